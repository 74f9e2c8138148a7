"""Evaluation of DPO training: metrics of pairs, validation, the best model, the final table.

All results are the same for any number of ranks.
"""
import math
import textwrap
import time

import torch

from ddp_setup import all_sum, beat, save_checkpoint
from mpnn.batches import eval_batches
from mpnn.designs import Designs
from mpnn.model import ALPHABET, to_checkpoint
from mpnn.pairs import Pair
from training.loop import ADVICE, Diverged, record_score, unpack
from training.resume import before_saving

# Sums over pairs, from which metrics_of makes means. rewards: beta x (ln p - ln p of the
# reference), or beta x ln p for losses without a reference.
SUMS = ("loss", "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
        "logps/chosen", "logps/rejected", "entropy", "residues")
SEEN = ("pairs", "residues")   # counts of what a run has trained on so far


def metrics_of(sums, pairs, prefix=""):
    """Means over pairs, by name. pairs: their number, or the sum of their weights."""
    values = {prefix + name: float(x) / (float(pairs) or math.nan) for name, x in zip(SUMS, sums)}
    values.pop(f"{prefix}residues")
    chosen, rejected = (values[f"{prefix}rewards/{side}"] for side in ("chosen", "rejected"))
    values[f"{prefix}rewards/margins"] = chosen - rejected
    return values


class Validation:
    """Metrics of the validation pairs, in float32, under the same decoding orders at each call.

    Of pairs: means of loss and rewards, by the weights of the pairs. Of native sequences (one for
    each complex and set of designed positions among the pairs): means over scored residues of
    recovery, the fraction of native letters that are the policy's most likely letter given the
    letters decoded before, and of the KL divergence of policy from reference, in nats. Each pair is
    computed on one rank and gathered, so the number of ranks does not matter.
    designs: a Designs of the same pairs, or None if monitoring.n_designs is 0.
    """

    def __init__(self, pairs, reference, config, objective):
        """objective: function (log-probabilities, batch, reference scores, section Loss) -> (loss
        of each pair, columns of SUMS), as in training."""
        self.pairs, self.reference, self.config, self.table = pairs, reference, config, None
        self.objective = objective
        self.designs = Designs(pairs, reference, config) if config.monitoring.n_designs else None
        self.weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
        natives, size, unknown = {}, config.training.batch_size, ALPHABET.index("X")
        for pair in pairs:
            native = pair.complex.S[:len(pair.chain_M)]
            designed = pair.chain_M & (native != unknown)
            if (designed & pair.complex.mask[:len(designed)]).any():
                key = pair.complex.key, designed.tobytes()
                natives.setdefault(key, Pair(pair.complex, native, native, designed))
        self.natives = list(natives.values())
        self.batches, self.native_batches = (eval_batches(p, size) for p in (pairs, self.natives))

    @torch.no_grad()
    def __call__(self, model, ddp):
        """Metrics by name. model: without DDP; set to eval mode and back."""
        was_training, _ = model.training, model.eval()
        values = torch.zeros(len(self.pairs), len(SUMS), dtype=torch.float64)
        natives = torch.zeros(len(self.natives), 3, dtype=torch.float64)   # recovered, KL, residues
        for indices in self.batches[ddp.rank::ddp.world_size]:
            batch, log_probs = self.reference.run_model(model, self.pairs, indices)
            reference_scores = self.reference.scores(batch, self.table)
            columns = self.objective(log_probs, batch, reference_scores, self.config.loss)[1]
            values[indices] = columns.cpu()
            beat(ddp)
        for indices in self.native_batches[ddp.rank::ddp.world_size]:
            batch, log_probs = self.reference.run_model(model, self.natives, indices)
            right = (log_probs.argmax(-1) == batch["S"]).float()
            difference = log_probs - self.reference.log_probs(batch)
            kl = (log_probs.exp() * difference).sum(-1)
            rows = batch["sequence_rows"][..., 0]
            sums = [(each[rows].mean(1) * batch["scored"]).sum(-1) for each in (right, kl)]
            natives[indices] = torch.stack([*sums, batch["n_scored"]], 1).double().cpu()
            beat(ddp)
        model.train(was_training)
        sums = (self.weights[:, None] * all_sum(values, ddp)).sum(0)
        recovered, kl, residues = all_sum(natives, ddp).sum(0).tolist()
        per_residue = sums[SUMS.index("logps/chosen")] / sums[SUMS.index("residues")]
        return {**metrics_of(sums, self.weights.sum(), "val/"),
                "val/logps/chosen_per_residue": float(per_residue),
                "val/recovery": recovered / max(residues, 1),
                "val/kl": max(kl / max(residues, 1), 0.0)}   # rounding can make it negative


def evaluate_start(run, log, ddp):
    """Evaluate the base weights at the start of a run. Returns metrics by name.

    Without validation pairs it returns {}, and sets progress["start"], the log-probability from
    which a fall is measured in training: with a reference and without dropout it is 0, as rewards
    start there; else it is set later, to the mean of the first epoch."""
    progress, validation = run.progress, run.validation
    if progress["start"] is not None:
        return {}
    if validation is None:
        if run.reference.needed and not run.config.model.dropout:
            progress["start"] = 0.0
        return {}
    values = validate(run, log, ddp)
    log.metrics(0, values)
    found = (f"loss {values['val/loss']:.4f} (policy and reference are equal)"
             if run.reference.needed else short_result(values))
    log.say(f"step 0: validation {found}, recovery {values['val/recovery']:.3f}")
    keep_best(run, log, values, values["val/loss"], ddp)
    return values


def evaluate(run, log, values, epoch_began, ddp):
    """Validate, add metrics to `values`, keep the best model. epoch_began: a perf_counter time."""
    step, per_epoch, epoch = run.progress["step"], run.steps_per_epoch, unpack(run.sums)
    last, whole_epoch = step == run.n_iters, step % per_epoch == 0
    at_end = last or whole_epoch
    trained = metrics_of(epoch.sums, epoch.count)
    text = f"train {short_result(trained, '')}"
    if run.validation is not None:
        found = validate(run, log, ddp)
        values.update(found)
        text += f", validation {short_result(found)}"
        if not at_end:
            log.say(f"step {step:,}: validation {short_result(found)}")
    elif float(epoch.count) and at_end:
        sums = dict(zip(SUMS, epoch.sums.tolist()))
        warn_of_fall(run, log, sums["rewards/chosen"] / sums["residues"] / run.config.loss.beta)
    if at_end:
        log.say(f"epoch {-(-step // per_epoch)}/{-(-run.n_iters // per_epoch)}: {text}, "
                f"{time.perf_counter() - epoch_began:.0f} s")
    if whole_epoch:
        values.update({f"epoch/{k}": trained[k] for k in ("loss", "rewards/accuracies")})
    if run.validation is not None:
        return keep_best(run, log, values, values["val/loss"], ddp)
    # Without validation, the training loss of whole epochs decides which model is best. The loss
    # of a part of an epoch, which may be a single batch, counts only until an epoch is complete.
    best = run.progress["best"]
    if whole_epoch and best and best["step"] % per_epoch:
        best = run.progress["best"] = None
    if float(epoch.count) and (whole_epoch or last and not best):
        keep_best(run, log, values, trained["loss"], ddp)
    elif last and not best:
        raise Diverged(f"step {step}: all steps had a nan or infinite loss or gradient; "
                       f"expected finite numbers. {ADVICE}")


def validate(run, log, ddp):
    """Metrics of the validation pairs and of designs for their structures. May print warnings."""
    values = run.validation(run.bare, ddp)
    warn_of_fall(run, log, values["val/logps/chosen_per_residue"])
    if run.validation.designs is not None:
        step, folder = run.progress["step"], run.work_dir
        values.update(run.validation.designs(run.bare, step, folder, ddp))
        warn_of_collapse(run, log, values)
    return values


def warn_of_collapse(run, log, values):
    """Warn, once per run, if designs have lost diversity. values: metrics of Designs."""
    progress = run.progress   # untrained base weights have no diversity worth keeping
    if progress["collapsed"] or run.config.model.base_model_name == "random":
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
    if progress["fallen"] or not fall > run.config.monitoring.fall:   # `not >` is true for nan too
        return
    progress["fallen"] = True
    say_attention(log, f"chosen sequences have become less likely, by {fall:.3f} nats per residue "
                       "since the start. DPO can increase the margin this way, if rejected ones "
                       "fall faster. If designs suffer: set loss.sft (such as 1), raise loss.beta, "
                       "lower optim.lr, or stop earlier.")


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
    """Write the weights in the published format, which other ProteinMPNN tools read."""
    before_saving(run, log, ddp)
    step = run.progress["step"]
    save_checkpoint(str(run.work_dir / name), ddp, resumes=False,
                    **to_checkpoint(run.bare, epoch=step // run.steps_per_epoch, step=step))


def short_result(values, prefix="val/"):
    return (f"loss {values[prefix + 'loss']:.4f} acc "
            f"{values[prefix + 'rewards/accuracies']:.3f}")


def result_lines(result, progress, folder):
    """Lines printed at the end of a run: a table of validation metrics, warnings, paths."""
    best, lines = progress["best"], []
    columns = {"val/loss": 4, "val/rewards/accuracies": 3, "val/rewards/margins": 3,
               "val/recovery": 3, "val/kl": 4}   # metric: decimals
    if "val/loss" in result:
        lines.append("  validation       loss   accuracy     margin   recovery         KL")
        for name, row in (("best", best), ("latest", result)):
            numbers = (f"{row[k]:.{decimals}f}" if abs(row[k]) < 1e5 else f"{row[k]:.2e}"
                       for k, decimals in columns.items())
            lines.append(f"  {name:<10}" + "".join(f" {text:>10}" for text in numbers))
    if best["step"] == 0:
        lines.append("  ATTENTION: no evaluation was better than the base weights: "
                     "best_model.pt holds these")
    if "val/design_diversity" in result:
        lines.append(f"  designs   {folder / 'designs'}/step_{result['step']}.fasta")
    if progress["collapsed"]:
        lines.append("  ATTENTION: designs have lost variety: look at them before you use weights")
    return [*lines, f"  weights   {folder / 'best_model.pt'} (step {best['step']:,}) and "
                    "latest_model.pt", f"  metrics   {folder / 'metrics.jsonl'}"]
