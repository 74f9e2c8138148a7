"""Scores of a reference model, kept in files; the check of the folder that they go to.

    table, source = kept_scores(path, (len(pairs), 2), compute, ddp)
    check_cache(config, ddp)
    make_tables(run, ddp)
"""
from collections.abc import Callable
from pathlib import Path

import torch

from ddp_setup import Ddp, broadcast, load_checkpoint, save_checkpoint
from training.plan import print_lines

WITHOUT_REFERENCE = ("reference_free", "simpo")   # losses that need no reference model


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
    save_checkpoint(str(path), ddp, resumes=False, scores=scores)
    return scores.to(ddp.device), f"computed, kept in {path}{trouble}"


def read_scores(path, shape):
    """Finite float32 scores of this shape from a file. Raises ValueError, KeyError, TypeError,
    IndexError or AttributeError."""
    scores = load_checkpoint(str(path))["scores"]
    is_right = scores.dtype == torch.float32 and scores.shape == shape
    if not is_right or not scores.isfinite().all():
        raise ValueError(f"scores are not {shape} finite {torch.float32}")
    return scores


def make_tables(run, ddp):
    """Precompute (or read from the cache) the reference scores that are the same in all epochs."""
    reference = run.reference
    validation = run.validation
    folder = run.work_dir / "reference"
    if reference.is_fixed and reference.needed:
        reference.table, source = reference.precompute(run.pairs, run.base, folder,
                                                        "training pairs")
        print_lines(ddp, [f"reference, training pairs: {source}"])
    if validation is not None and reference.needed:
        validation.table, source = reference.precompute(validation.pairs, run.base, folder,
                                                         "validation pairs")
        print_lines(ddp, [f"reference, validation pairs: {source}"])
