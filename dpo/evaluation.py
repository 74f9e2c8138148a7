"""Evaluation of training on preferences: metrics, validation, the best model, warnings.

Metrics are means over items: pairs, or with loss.unit table proteins, of which each has the mean
over its drawn pairs. They and the loss have the same weights. All results are the same for any
number of ranks.
"""
import math
import time

import torch
from torch import Tensor

from ddp_setup import unwrap_ddp
from dpo.pair_scores import compare_natives, whole_natives
from dpo.plan import rows_on_ranks
from dpo.reference import WITHOUT_REFERENCE
from dpo.variant_scores import correlate_variants
from mpnn.batches import to_device
from mpnn.evaluation import keep_best, weights_lines
from training.loop import eval_mode
from training.problems import in_columns

# Metrics of a pair, in the order in which pair_metrics lays them side by side. rewards: beta x
# (ln p - ln p of the reference), or beta x ln p for losses without a reference. Also the order of
# sums in checkpoints.
METRICS = ("loss", "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
           "logps/chosen", "logps/rejected", "entropy", "residues")
# Metric -> (title, decimals) of a column of the table at the end; a run may lack some.
COLUMNS = {"val/loss": ("loss", 4), "val/rewards/accuracies": ("accuracy", 3),
           "val/rewards/margins": ("margin", 3), "val/recovery": ("recovery", 3),
           "val/kl": ("KL", 4), "val/spearman": ("Spearman", 3)}
# Of training on tables without validation.
TRAINED = "spearman"        # of the variants that are trained on
MOST_RANKED = 16            # proteins of which it is computed
# Of training on tables. Measured: 0.2 where scores of other proteins have become better and designs
# are as before; 0.8 where both are spoilt.
MOST_DRIFT = 0.4            # nats per residue of native sequences
MOST_NATIVES = 16           # proteins


# ---------------------------------------------------------------- metrics
def pair_metrics(  # noqa: PLR0913  (what is known of a pair)
        loss: Tensor, preference: Tensor, scores: tuple[Tensor, Tensor],
        base_scores: tuple[Tensor, Tensor], entropy: Tensor, n: Tensor, beta: float) -> Tensor:
    """(Q, len(METRICS)) float64 metrics of Q pairs, side by side.

    Args:
        loss, preference: (Q,) or (), with and without added terms.
        scores, base_scores: (Q,) of chosen and of rejected, under policy and reference, in nats.
        entropy: (Q,) or (). n: (Q,) number of residues. beta: loss.beta.
    """
    chosen, rejected = scores
    base_chosen, base_rejected = base_scores
    chosen_reward = beta * (chosen - base_chosen)
    rejected_reward = beta * (rejected - base_rejected)
    columns = (loss, preference, chosen_reward, rejected_reward, chosen_reward > rejected_reward,
               chosen, rejected, entropy, n)
    return torch.stack([column.detach().double().expand(len(n)) for column in columns], 1)


def mean_metrics(sums: Tensor, weight: float, prefix: str = "") -> dict:
    """Means by name. sums: (len(METRICS),) or longer, of weight x metric. weight: its sum."""
    sums = dict(zip(METRICS, sums.tolist()))
    del sums["residues"]
    weight = float(weight) or math.nan
    means = {name: total / weight for name, total in sums.items()}
    means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return {prefix + name: value for name, value in means.items()}


# ---------------------------------------------------------------- validation
@torch.no_grad()
def validate(run, ddp) -> dict:
    """Metrics of the validation items by name, in float32, by the same random numbers at each call.
    A collective."""
    config = run.config
    model = unwrap_ddp(run.model)
    items = run.validation.items

    def metrics_of(indices):
        batch = to_device(run.validation.make_batch(indices), ddp.device)
        _, metrics = run.loss_function(model, batch, run.base, config, ddp, torch.float32)
        return metrics

    weight = torch.tensor([item.weight for item in items], dtype=torch.float64)
    with eval_mode(model):
        rows = rows_on_ranks(items, len(METRICS), metrics_of, config.training.batch_size,
                             "validation", ddp)
        sums = (weight[:, None] * rows).sum(0)
        values = mean_metrics(sums, weight.sum(), "val/")
        if config.loss.unit == "table":
            correlation = correlate_variants(run.bare, run.base, items, config, ddp)
            if correlation is not None:
                values["val/spearman"] = correlation
        else:
            named = dict(zip(METRICS, sums.tolist()))
            values["val/logps/chosen_per_residue"] = named["logps/chosen"] / named["residues"]
        values |= compare_natives(run.bare, run.base, native_items(items, config), config, ddp)
    return values


def rank_trained(run, ddp) -> dict:
    """TRAINED, where a run on tables has no validation that tells more; else {}. A collective."""
    if run.validation is not None or run.config.loss.unit != "table":
        return {}
    items = run.train_set.items[:MOST_RANKED]
    with eval_mode(run.bare):
        correlation = correlate_variants(run.bare, run.base, items, run.config, ddp)
    return {} if correlation is None else {TRAINED: correlation}


def words_of_ranked(run):
    """Text on what rank_trained is of."""
    if len(run.train_set.items) > MOST_RANKED:
        return f"the trained variants of {MOST_RANKED} proteins"
    return "the trained variants"


def native_items(items, config):
    """The pairs whose native sequences tell how far a model has moved."""
    if config.loss.unit == "table":
        return whole_natives([item.complex for item in items])
    return items


def evaluate_start(run, log, ddp) -> None:
    """Evaluate the base weights at the start of a run, as what training has to improve: by
    validation, or on tables without one by the variants that are trained on.

    Without validation it sets progress["start"], the log-probability from which a fall is measured
    in training: with the base as reference and without dropout it is 0, as rewards start there;
    else it is set later, to the mean of the first epoch."""
    progress = run.progress
    if run.validation is None:
        if starts_equal(run.config) and not run.config.model.dropout:
            progress["start"] = 0.0
        rank_start(run, log, ddp)
        return
    if progress["before"] is not None:      # a resumed run knows it
        return
    values = validate(run, ddp)
    progress["before"] = {name: value for name, value in values.items()
                          if name.startswith("val/")}
    log.metrics(0, values)
    text = short_result(values)
    if starts_equal(run.config):
        text = f"loss {values['val/loss']:.4f} (policy and reference are equal)"
        if "val/spearman" in values:
            text += f", Spearman {values['val/spearman']:.3f}"
    log.say(f"step 0: validation {text}, recovery {values['val/recovery']:.3f}")
    warn_of_fall(run, log, values.get("val/logps/chosen_per_residue"))
    keep_best(run, log, values, ddp)


def rank_start(run, log, ddp):
    """Where rank_trained tells of a run, say what it is before the first step."""
    if run.progress["step"]:
        return
    values = rank_trained(run, ddp)
    if values:
        run.progress["before"] = values
        log.metrics(0, values)
        log.say(f"step 0: Spearman {values[TRAINED]:.3f} of {words_of_ranked(run)}")


def starts_equal(config) -> bool:
    """Whether the reference is what the policy starts from."""
    loss = config.loss
    return loss.name not in WITHOUT_REFERENCE and loss.reference == "base"


def evaluate(run, log, values, ddp) -> None:
    """Validate, add metrics to `values`, keep the best model, warn. At the end of an epoch, or of
    the run, say how the epoch was."""
    step = run.progress["step"]
    per_epoch = run.steps_per_epoch
    is_whole_epoch = step % per_epoch == 0
    at_end = is_whole_epoch or step == run.n_iters
    weight = float(run.epoch_sums[-1])
    trained = mean_metrics(run.epoch_sums, weight)
    text = f"train {short_result(trained, '')}"
    ranked = rank_trained(run, ddp)
    values.update(ranked)
    if ranked:
        text += f", Spearman {ranked[TRAINED]:.3f} of {words_of_ranked(run)}"
    if run.validation is not None:
        validated = validate(run, ddp)
        values.update(validated)
        text += f", validation {short_result(validated)}"
        if not at_end:
            log.say(f"step {step:,}: validation {short_result(validated)}")
        warn_of_fall(run, log, validated.get("val/logps/chosen_per_residue"))
    elif weight and at_end and run.config.loss.unit == "pair":
        named = dict(zip(METRICS, run.epoch_sums.tolist()))
        warn_of_fall(run, log,
                     named["rewards/chosen"] / named["residues"] / run.config.loss.beta)
    if step == run.n_iters:
        warn_of_drift(run, log, ddp)
    if at_end:
        seconds = time.perf_counter() - run.epoch_began
        log.say(f"epoch {-(-step // per_epoch)}/{-(-run.n_iters // per_epoch)}: {text}, "
                f"{seconds:.0f} s")
    if is_whole_epoch:
        values["epoch/loss"] = trained["loss"]
        values["epoch/rewards/accuracies"] = trained["rewards/accuracies"]
    if run.validation is not None:
        keep_best(run, log, values, ddp)


# ---------------------------------------------------------------- warnings
def warn_of_fall(run, log, now) -> None:
    """Warn, once per run, if chosen sequences become less likely. now: their mean log-probability
    per residue; None of tables, where nothing is said of whole sequences."""
    progress = run.progress
    if now is None:
        return
    if progress["start"] is None:
        progress["start"] = now
    fall = progress["start"] - now
    if fall > run.config.monitoring.fall and not progress["fallen"]:
        progress["fallen"] = True
        say_attention(log, f"chosen sequences have become less likely, by {fall:.3f} nats per "
                           "residue since the start. DPO can increase the margin this way, if "
                           "rejected ones fall faster. If designs suffer: set loss.sft (such as "
                           "1), raise loss.beta, lower optim.lr, or stop earlier.")


def warn_of_drift(run, log, ddp) -> None:
    """Warn if a training on tables has moved trained weights far from the base. A collective."""
    config = run.config
    if config.loss.unit != "table" or config.model.base_model_name == "random":
        return
    natives = whole_natives([item.complex for item in run.train_set.items[:MOST_NATIVES]])
    with eval_mode(run.bare):
        drift = compare_natives(run.bare, run.base, natives, config, ddp)["val/kl"]
    if drift > MOST_DRIFT:
        say_attention(log, "the weights have moved far from the base: native sequences of training "
                           f"proteins by {drift:.2f} nats per residue (KL divergence; expected up "
                           f"to {MOST_DRIFT:g}). Scores of other proteins and designs may be "
                           "spoilt. Lower optim.lr, raise training.accum or loss.native_kl.")


def say_attention(log, text):
    log.say(in_columns(f"ATTENTION: {text}", hanging="    "))


# ---------------------------------------------------------------- texts
def short_result(values, prefix="val/"):
    text = f"loss {values[prefix + 'loss']:.4f} acc {values[prefix + 'rewards/accuracies']:.3f}"
    if prefix + "spearman" in values:
        text += f" Spearman {values[prefix + 'spearman']:.3f}"
    return text


def result_lines(result, progress, folder) -> list[str]:
    """Lines printed at the end of a run: a table of validation metrics, warnings, paths."""
    best = progress["best"]     # None without validation
    lines = []
    if "val/loss" in result:
        columns = {name: column for name, column in COLUMNS.items() if name in result}
        lines.append("  validation" + "".join(f" {title:>10}" for title, _ in columns.values()))
        for name, row in (("before", progress["before"]), ("best", best), ("latest", result)):
            numbers = [number_text(row[metric], decimals)
                       for metric, (_, decimals) in columns.items()]
            lines.append(f"  {name:<10}" + "".join(f" {number:>10}" for number in numbers))
    lines += ranking_lines(result, progress["before"])
    return [*lines, *weights_lines(progress, folder),
            f"  metrics   {folder / 'metrics.jsonl'}"]


def ranking_lines(result, before):
    """Line on how a run has changed the ranks of the variants that it was trained on; [] where
    that was not computed at its start and end. before: Run.progress["before"]."""
    if TRAINED not in result or TRAINED not in (before or {}):
        return []
    text = (f"  Spearman  {before[TRAINED]:.3f} before, {result[TRAINED]:.3f} now, of variants "
            f"that were trained on (up to {MOST_RANKED} proteins): this does not say how others "
            "are ranked")
    return [in_columns(text, hanging=" " * 10)]


def number_text(number, decimals):
    """A number with so many decimals, or if it is very large with a power of ten."""
    if abs(number) < 1e5:
        return f"{number:.{decimals}f}"
    return f"{number:.2e}"
