"""The reference of DPO: scores of pairs under the base weights, computed or from a table in a file.

    reference = Reference(scorer)
    base = reference(batch)                             # Likelihoods; of a prepared batch
    make_tables(run, ddp)                               # what stays the same is scored once
"""
from collections.abc import Callable
from pathlib import Path

import torch

from ddp_setup import Ddp, broadcast, load_checkpoint, save_checkpoint
from dpo.scorer import Likelihoods, Scorer
from proteins.seeds import content_hash
from training.plan import print_lines

WITHOUT_REFERENCE = ("reference_free", "simpo")   # losses that need no reference


class Reference:
    """What the policy is measured against, for one list of pairs.

    is_needed: whether the loss has a reference; else all scores are 0. is_start: whether it is what
    the policy starts from. table: (n, *Scorer.shape) of all pairs, or None: each batch is computed.
    """

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.is_needed = scorer.config.loss.name not in WITHOUT_REFERENCE
        self.is_start = self.is_needed and scorer.starts_at_base
        self.table = None

    @torch.no_grad()
    def __call__(self, batch: dict) -> Likelihoods:
        """Likelihoods under the base, in float32 also if the policy uses bfloat16."""
        scorer = self.scorer
        if not self.is_needed:
            shape = scorer.shape or (2,)
            return Likelihoods(batch["n_scored"].new_zeros(len(batch["n_scored"]), *shape))
        if self.table is not None:
            return Likelihoods(self.table[batch["pair_numbers"]])
        if scorer.shape is not None and not scorer.starts_at_base:
            raise RuntimeError("this reference has its scores in a table, and there is none; "
                               "expected fill_table first (see make_tables)")
        return scorer.likelihoods(scorer.run_base(batch), batch)

    def fill_table(self, pairs: list, base_hash: str, folder: Path, what: str) -> str:
        """Score all pairs, or read the scores from a file in `folder`, whose name is a hash of all
        that decides them. A collective.

        base_hash: of the base's weights and settings. what: which pairs, for the progress bar.
        Returns: text that says where the scores come from."""
        path = Path(folder) / self.file_name(pairs, base_hash)
        self.table, source = kept_scores(path, (len(pairs), *self.scorer.shape),
                                         lambda: self.compute(pairs, what), self.scorer.ddp)
        return source

    def file_name(self, pairs, base_hash):
        """Name of the file that keeps the table of these pairs."""
        version, *settings = self.scorer.table_settings()
        content = (version, base_hash, *settings, self.scorer.ddp.device.type,
                   torch.__version__,   # other versions round differently: no log 2 at step 0
                   [pair.key for pair in pairs])
        return content_hash(content, n_bytes=12) + ".pt"

    @torch.no_grad()
    def compute(self, pairs: list, what: str = "pairs") -> torch.Tensor:
        """The table of these pairs, float32, on the CPU. A collective."""
        scorer = self.scorer
        return scorer.rows_of(pairs, scorer.shape,
                              lambda indices: scorer.base_parts(pairs, indices),
                              f"reference, {what}").float()


def make_tables(run, ddp: Ddp) -> None:
    """Score by the reference, or read from the run folder, what is the same in all epochs."""
    folder = run.work_dir / "reference"
    if run.reference.scorer.shape is None:
        return
    tables = []
    if run.reference.scorer.is_fixed:
        tables.append((run.reference, run.pairs, "training pairs"))
    if run.validation is not None:
        tables.append((run.validation.reference, run.validation.pairs, "validation pairs"))
    for reference, pairs, what in tables:
        if reference.is_needed:
            source = reference.fill_table(pairs, run.base, folder, what)
            print_lines(ddp, [f"reference, {what}: {source}"])


# ---------------------------------------------------------------- files
def kept_scores(path: Path, shape: tuple, compute: Callable,
                ddp: Ddp) -> tuple[torch.Tensor, str]:
    """Scores from a file, or else computed and written there. A collective.

    Args:
        path:    its name should be a hash of all inputs.
        compute: function () -> scores of this shape, float32, equal on all ranks.
    Returns: (scores on the device, text that says where they come from).
    """
    scores = None
    trouble = ""
    if ddp.is_main and path.exists():
        try:
            scores = read_scores(path, shape)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
            trouble = f"; {path} could not be used ({str(e).splitlines()[0]})"
    if broadcast(scores is not None, ddp):
        if scores is None:
            scores = torch.zeros(shape)
        return broadcast(scores, ddp).to(ddp.device), f"read from {path}"
    scores = compute()
    save_checkpoint(path, ddp, scores=scores)
    return scores.to(ddp.device), f"computed, kept in {path}{trouble}"


def read_scores(path, shape):
    """Finite float32 scores of this shape from a file. Raises ValueError, KeyError, TypeError,
    IndexError or AttributeError."""
    scores = load_checkpoint(str(path))["scores"]
    is_right = scores.dtype == torch.float32 and scores.shape == shape
    if not is_right or not scores.isfinite().all():
        raise ValueError(f"scores are not {shape} finite {torch.float32}")
    return scores
