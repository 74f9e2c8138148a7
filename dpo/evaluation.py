"""Evaluation of training on preference pairs: metrics, the best model, warnings.

What is the same for every kind of model, and for any number of ranks.
"""
import math
import textwrap
import time

import torch

from ddp_setup import save_checkpoint
from dpo.folds import lines_on
from training.loop import ADVICE, Diverged, eval_mode, record_score, unpack
from training.resume import before_saving

# Metrics of a pair, in the order in which `pack` lays them side by side. rewards: beta x (ln p -
# ln p of the reference), or beta x ln p for losses without a reference. Also the order of sums in
# checkpoints.
SUMS = ("loss", "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
        "logps/chosen", "logps/rejected", "entropy", "residues")
# Metric -> (title, decimals) of a column of the table at the end; a kind may lack some.
COLUMNS = {"val/loss": ("loss", 4), "val/rewards/accuracies": ("accuracy", 3),
           "val/rewards/margins": ("margin", 3), "val/recovery": ("recovery", 3),
           "val/kl": ("KL", 4), "val/margin_noise": ("noise", 3),
           "val/spearman": ("Spearman", 3)}
# Of training on tables. Measured: 0.2 where scores of other proteins have become better and designs
# are as before; 0.8 where both are spoilt.
MOST_DRIFT = 0.4            # nats per residue of native sequences
MOST_NATIVES = 16           # proteins
SEEN = ("pairs", "residues")   # counts of what a run has trained on so far


def pack(metrics: dict) -> torch.Tensor:
    """Metrics {name: (P,)} of pairs -> (P, len(SUMS)) float64, so that one sum over ranks will do.
    `unpack_sums` gives the names back."""
    return torch.stack([metrics[name].detach().double() for name in SUMS], 1)


def unpack_sums(packed: torch.Tensor) -> dict:
    """Sums over pairs of what `pack` made, (len(SUMS), ...) or longer -> {name: sum}."""
    return dict(zip(SUMS, packed))


def metrics_of(packed: torch.Tensor, pairs: float | torch.Tensor, prefix: str = "") -> dict:
    """Means over pairs, by name.

    packed: sums over pairs, as unpack_sums takes them. pairs: their number, or the sum of their
    weights."""
    sums = unpack_sums(packed)
    del sums["residues"]
    pairs = float(pairs) or math.nan
    means = {name: float(x) / pairs for name, x in sums.items()}
    means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return {prefix + name: value for name, value in means.items()}


def evaluate_start(run, log, ddp):
    """Evaluate the base weights at the start of a run. Returns metrics by name.

    Without validation pairs it returns {}, and sets progress["start"], the log-probability from
    which a fall is measured in training: with the base as reference and without dropout it is 0, as
    rewards start there; else it is set later, to the mean of the first epoch."""
    progress = run.progress
    if progress["start"] is not None:
        return {}
    if run.validation is None:
        if run.reference.is_start and not run.config.model.dropout:
            progress["start"] = 0.0
        return {}
    values = validate(run, log, ddp)
    log.metrics(0, values)
    found = short_result(values)
    if run.reference.is_start:
        found = f"loss {values['val/loss']:.4f} (policy and reference are equal)"
    if "val/recovery" in values:
        found += f", recovery {values['val/recovery']:.3f}"
    log.say(f"step 0: validation {found}")
    keep_best(run, log, values, values["val/loss"], ddp)
    return values


def evaluate(run, log, values, epoch_began, ddp):
    """Validate, add metrics to `values`, keep the best model. epoch_began: a perf_counter time."""
    step = run.progress["step"]
    per_epoch = run.steps_per_epoch
    is_whole_epoch = step % per_epoch == 0
    at_end = is_whole_epoch or step == run.n_iters
    epoch = unpack(run.sums)
    trained = metrics_of(epoch.sums, epoch.count)
    text = f"train {short_result(trained, '')}"
    if run.validation is not None:
        found = validate(run, log, ddp)
        values.update(found)
        text += f", validation {short_result(found)}"
        if not at_end:
            log.say(f"step {step:,}: validation {short_result(found)}")
    elif float(epoch.count) and at_end and not run.reference.scorer.is_relative:
        sums = unpack_sums(epoch.sums.tolist())
        warn_of_fall(run, log, sums["rewards/chosen"] / sums["residues"] / run.config.loss.beta)
    if step == run.n_iters:
        warn_of_drift(run, log)
    if at_end:
        log.say(f"epoch {-(-step // per_epoch)}/{-(-run.n_iters // per_epoch)}: {text}, "
                f"{time.perf_counter() - epoch_began:.0f} s")
    if is_whole_epoch:
        values["epoch/loss"] = trained["loss"]
        values["epoch/rewards/accuracies"] = trained["rewards/accuracies"]
    if run.validation is not None:
        keep_best(run, log, values, values["val/loss"], ddp)
    else:
        keep_best_of_training(run, log, values, ddp)


def keep_best_of_training(run, log, values, ddp):
    """Without validation, the training loss of whole epochs decides which model is best. The loss
    of a part of an epoch, which may be a single batch, counts only until an epoch is complete."""
    progress = run.progress
    step = progress["step"]
    is_whole_epoch = step % run.steps_per_epoch == 0
    is_last = step == run.n_iters
    if is_whole_epoch and progress["best"] and progress["best"]["step"] % run.steps_per_epoch:
        progress["best"] = None     # the loss of a part
    has_none = is_last and not progress["best"]
    epoch = unpack(run.sums)
    if float(epoch.count) and (is_whole_epoch or has_none):
        loss = metrics_of(epoch.sums, epoch.count)["loss"]
        keep_best(run, log, values, loss, ddp)
    elif has_none:
        raise Diverged(f"step {step}: all steps had a nan or infinite loss or gradient; "
                       f"expected finite numbers. {ADVICE}")


def validate(run, log, ddp):
    """Metrics of the validation pairs and of designs for their structures. May print warnings."""
    values = run.validation(run.bare)
    if not run.reference.scorer.is_relative:
        warn_of_fall(run, log, values["val/logps/chosen_per_residue"])
    if run.validation.designs is not None:
        step = run.progress["step"]
        values.update(run.validation.designs(run.bare, step, run.work_dir, ddp))
        warn_of_collapse(run, log, values)
    return values


def warn_of_collapse(run, log, values):
    """Warn, once per run, if designs have lost diversity. values: metrics of Designs."""
    progress = run.progress
    has_diversity = run.reference.scorer.base.is_trained    # of random weights none is worth it
    if progress["collapsed"] or not has_diversity:
        return
    sign = run.validation.designs.sign_of_collapse(values)
    if sign:
        progress["collapsed"] = True
        path = run.work_dir / "designs" / f"step_{progress['step']}.fasta"
        say_attention(log, f"{sign} Look at {path}. If the pairs do not ask for this: raise "
                           "loss.beta, lower optim.lr, set loss.sft (such as 1) or "
                           "loss.diversity_lambda, or stop earlier.")


def warn_of_fall(run, log, now):
    """Warn, once per run, if chosen sequences become less likely. now: their mean log-probability
    per residue."""
    progress = run.progress
    if progress["start"] is None:
        progress["start"] = now
    fall = progress["start"] - now
    if fall > run.config.monitoring.fall and not progress["fallen"]:
        progress["fallen"] = True
        say_attention(log, f"chosen sequences have become less likely, by {fall:.3f} nats per "
                           "residue since the start. DPO can increase the margin this way, if "
                           "rejected ones fall faster. If designs suffer: set loss.sft (such as "
                           "1), raise loss.beta, lower optim.lr, or stop earlier.")


@torch.no_grad()
def warn_of_drift(run, log):
    """Warn if a training on tables has moved the weights far. A collective."""
    scorer = run.reference.scorer
    with eval_mode(run.bare):
        drift = scorer.drift(run.bare, run.pairs[:MOST_NATIVES])
    if drift is not None and drift > MOST_DRIFT and scorer.base.is_trained:
        say_attention(log, "the weights have moved far from the base: native sequences of training "
                           f"proteins by {drift:.2f} nats per residue (KL divergence; expected up "
                           f"to {MOST_DRIFT:g}). Scores of other proteins and designs may be "
                           "spoilt. Lower optim.lr, raise training.accum or loss.native_kl.")


def say_attention(log, text):
    log.say(textwrap.fill(f"ATTENTION: {text}", 80, subsequent_indent="    "))


def keep_best(run, log, values, score, ddp):
    """Write best_model.pt if this is the best evaluation so far. score: lower is better."""
    if not math.isfinite(score):
        raise Diverged(f"step {run.progress['step']}: the loss is {score}; expected a finite "
                       f"number. {ADVICE}")
    if record_score(run, score, values, ddp):
        save_model(run, log, ddp, "best_model.pt")


def save_model(run, log, ddp, name):
    """Write the weights of the policy to a file in the run folder, as other tools read them."""
    before_saving(run, log)
    step = run.progress["step"]
    content = run.reference.scorer.file_content(run.bare, step // run.steps_per_epoch, step)
    save_checkpoint(run.work_dir / name, ddp, **content)


def short_result(values, prefix="val/"):
    text = f"loss {values[prefix + 'loss']:.4f} acc {values[prefix + 'rewards/accuracies']:.3f}"
    if prefix + "spearman" in values:
        text += f" Spearman {values[prefix + 'spearman']:.3f}"
    return text


def result_lines(result, progress, folder):
    """Lines printed at the end of a run: a table of validation metrics, warnings, paths."""
    best = progress["best"]
    lines = []
    if progress["folds"] is not None:
        lines += lines_on(progress["folds"])
    columns = {key: column for key, column in COLUMNS.items() if key in result}
    if "val/loss" in result:
        lines.append("  validation" + "".join(f" {title:>10}" for title, _ in columns.values()))
        for name, row in (("best", best), ("latest", result)):
            line = f"  {name:<10}"
            for key, (_, decimals) in columns.items():
                number = f"{row[key]:.{decimals}f}"
                if not abs(row[key]) < 1e5:
                    number = f"{row[key]:.2e}"
                line += f" {number:>10}"
            lines.append(line)
    if best["step"] == 0:
        lines.append("  ATTENTION: no evaluation was better than the base weights: "
                     "best_model.pt holds these")
    if "val/design_diversity" in result:
        lines.append(f"  designs   {folder / 'designs'}/step_{result['step']}.fasta")
    if progress["collapsed"]:
        lines.append("  ATTENTION: designs have lost variety: look at them before you use weights")
    lines.append(f"  weights   {folder / 'best_model.pt'} (step {best['step']:,}) and "
                 "latest_model.pt")
    lines.append(f"  metrics   {folder / 'metrics.jsonl'}")
    return lines
