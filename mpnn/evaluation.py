"""How well a ProteinMPNN gives native letters: validation, other structures, the best model.

    validation = Validation(structures, items, residues_per_batch=2500)
    loss, accuracy = validation(model, ddp)         # nats per residue; share of residues
    values = validate(run, ddp)                     # {"val/loss": ..., "other/perplexity": ...}

Without noise and dropout, in float32, in orders that are the same at each call. Each group of
chains of a structure is designed once, so a residue that may be designed counts once. The results
are the same for any number of ranks.
"""
import math

import torch
from torch import nn

from ddp_setup import Ddp, all_sum, save_checkpoint
from ddp_watch import note_progress
from mpnn.backbones import evaluation_batches, make_batch
from mpnn.batches import to_device
from mpnn.model import to_checkpoint
from mpnn.record import RECORD
from training.log import show_progress
from training.loop import ADVICE, Diverged, eval_mode, record_score
from training.problems import in_columns
from training.resume import before_saving

# Prefix of metrics -> what it is of.
SETS = {"val/": "validation", "other/": "others"}


class Validation:
    """The native letters of structures, as a model gives them.

    structures: StructureSet. items: list of Backbone. n_structures: of how many structures."""

    def __init__(self, structures, items, residues_per_batch):
        self.structures = structures
        self.items = items
        self.batches = evaluation_batches(items, residues_per_batch)
        self.n_structures = len({item.number for item in items})

    @classmethod
    def of(cls, part, residues_per_batch):
        """That of mpnn.structure_data.Items; None of None."""
        if part is None:
            return None
        return cls(part.structures, part.items, residues_per_batch)

    @torch.no_grad()
    def __call__(self, model: nn.Module, ddp: Ddp, what: str = "validation") -> tuple[float, float]:
        """(Mean -ln p of native letters, in nats per residue; share of residues whose most likely
        letter is native). A collective.

        model: without its DDP wrapper. what: for the progress."""
        rows = torch.zeros(len(self.items), 3, dtype=torch.float64)     # -ln p, correct, residues
        with eval_mode(model):
            for indices in show_progress(self.batches[ddp.rank::ddp.world_size], ddp, what):
                batch = make_batch(self.structures, [self.items[i] for i in indices])
                rows[indices] = self._sums(model, to_device(batch, ddp.device)).double().cpu()
                note_progress()
        nll, correct, residues = all_sum(rows, ddp).sum(0).tolist()
        return nll / residues, correct / residues

    def _sums(self, model, batch):
        """(U, 3) of the structures of a batch, see `rows`."""
        S = batch["S"]
        counted = batch["counted"]
        graph = model.graph(batch["X"], batch["mask"], batch["residue_idx"], batch["chain_id"])
        log_probs = model(graph, S, batch["order"])                                 # (U, L, 21)
        nll = -log_probs.gather(-1, S[..., None])[..., 0]
        correct = log_probs.argmax(-1) == S
        return torch.stack([(counted * each).sum(1) for each in (nll, correct, counted)], 1)


# ---------------------------------------------------------------- what a run evaluates
def validate(run, ddp) -> dict:
    """Metrics by name of what the run has: validation, other structures. A collective."""
    values = {}
    for prefix, validation in (("val/", run.validation), ("other/", run.others)):
        if validation is None:
            continue
        loss, accuracy = validation(run.bare, ddp, SETS[prefix])
        values[f"{prefix}loss"] = loss
        values[f"{prefix}perplexity"] = math.exp(min(loss, 50.0))
        values[f"{prefix}accuracy"] = accuracy
    return values


def evaluate_start(run, log, ddp) -> None:
    """Evaluate the base weights at the start of a run, as what training has to improve. Random ones
    tell nothing."""
    progress = run.progress
    if progress["step"] or progress["before"] is not None:      # a resumed run knows it
        return
    if run.config.model.base_model_name == "random":
        return
    values = validate(run, ddp)
    if not values:
        return
    progress["before"] = values
    log.metrics(0, values)
    say_values(run, log, values)
    keep_best(run, log, values, ddp)


def evaluate(run, log, values, ddp) -> None:
    """Validate, add metrics to `values`, keep the best model."""
    found = validate(run, ddp)
    if not found:
        return
    values.update(found)
    say_values(run, log, found)
    keep_best(run, log, values, ddp)


def say_values(run, log, values):
    texts = []
    for prefix, name in SETS.items():
        if f"{prefix}loss" in values:
            texts.append(f"{name} {values[f'{prefix}loss']:.4f} nats per residue, perplexity "
                         f"{values[f'{prefix}perplexity']:.3f}, accuracy "
                         f"{values[f'{prefix}accuracy']:.3f}")
    text = f"step {run.progress['step']:,}: " + ";\n  ".join(texts)
    log.say(in_columns(text, hanging="  "))


# ---------------------------------------------------------------- models, texts
def keep_best(run, log, values, ddp) -> None:
    """Write best_model.pt if this is the best validation so far. values: with "val/loss", if there
    is a validation."""
    score = values.get("val/loss")
    if score is None:
        return
    if not math.isfinite(score):
        raise Diverged(f"step {run.progress['step']}: the validation loss is {score}; expected a "
                       f"finite number. {ADVICE}")
    if record_score(run, score, values, ddp):
        save_model(run, log, ddp, "best_model.pt")


def save_model(run, log, ddp, name) -> None:
    """Write the weights to a file in the run folder, as other ProteinMPNN tools read them."""
    before_saving(run, log)
    step = run.progress["step"]
    content = to_checkpoint(run.bare, epoch=step // run.steps_per_epoch, step=step)
    if run.record is not None:
        content[RECORD] = run.record._asdict()
    save_checkpoint(run.work_dir / name, ddp, **content)


def result_lines(result, progress, folder) -> list[str]:
    """Lines printed at the end of a run: what the weights give before, at best and at the end;
    paths."""
    best = progress["best"]     # None without validation
    moments = {"before": progress["before"], "best": best, "latest": result}
    lines = []
    for prefix, name in SETS.items():
        lines += table_lines(prefix, name, moments)
    return [*lines, *weights_lines(progress, folder),
            f"  metrics   {folder / 'metrics.jsonl'}"]


def weights_lines(progress, folder) -> list[str]:
    """Lines on which weights a run has left, and whether the best are still those of its start."""
    best = progress["best"]     # None without validation
    latest = folder / "latest_model.pt"
    if best is None:
        return [f"  weights   {latest}"]
    lines = []
    if best["step"] == 0:
        text = ("  ATTENTION: best_model.pt is still the base weights, as no later evaluation was "
                f"better; {latest.name} has step {progress['step']:,}")
        lines.append(in_columns(text, hanging="  "))
    lines.append(f"  weights   {folder / 'best_model.pt'} (step {best['step']:,}) and "
                 f"{latest.name}")
    return lines


def table_lines(prefix, name, moments):
    """Lines of a table of the metrics with this prefix; [] if the last evaluation has none.

    moments: {"before", "best", "latest": metrics by name, or None}."""
    if f"{prefix}loss" not in moments["latest"]:
        return []
    lines = [f"  {name:<12}{'nats per residue':>18}{'perplexity':>12}{'accuracy':>10}"]
    for moment, row in moments.items():
        if row is not None and f"{prefix}loss" in row:
            lines.append(f"  {moment:<12}{row[f'{prefix}loss']:>18.4f}"
                         f"{row[f'{prefix}perplexity']:>12.3f}{row[f'{prefix}accuracy']:>10.3f}")
    return lines
