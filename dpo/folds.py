"""Cross-validation inside the table of one protein: does tuning rank better what is not measured?

    found = cross_validate(table, 4, seed, scores_before, scores_after)     # a dict, as checkpoints
    print("\\n".join(lines_on(found)))

Each variant is scored by weights that were tuned without it, and without the others of its residue:
most mutations that are not measured are of residues of which none is. No model here.
"""
import textwrap
from collections.abc import Callable

import numpy as np

from dpo.tables import VariantTable
from proteins.correlation import compare
from proteins.seeds import FOR_FOLDS, random_words


def cross_validate(  # noqa: PLR0913  (the last only shows how far)
        table: VariantTable, n_folds: int, seed: int, before: np.ndarray, scores_after: Callable,
        show: Callable = iter) -> dict:
    """Spearman's correlations with the measured values, before and after tuning.

    Args:
        n_folds:      parts of the variants, each of which is left out once; fewer, if there are
            fewer residues.
        before:       (N,) scores of the variants under the base.
        scores_after: function of the VariantTable of the others -> (N,) scores of all variants
            under weights that were tuned on these.
        show:         function of a list that yields its items, and shows progress.
    Returns: {"variants": N, ...}, with the fields of a Gain.
    """
    values = table.values[:-1]
    n = len(values)
    fold_of = folds_of(table, n_folds, seed)
    after = np.empty(n)
    for fold in show(np.unique(fold_of)):
        left_out = fold_of == fold
        after[left_out] = scores_after(table.only(~left_out))[left_out]
    gain = compare(before, after, values)
    return {"variants": n, **gain._asdict()}


def folds_of(table: VariantTable, n_folds: int, seed: int) -> np.ndarray:
    """(N,) int64, the fold of each variant: that of its residue, or of the first of several. If all
    are of one residue, each is for itself."""
    units = [min(row for row, _ in variant) for variant in table.variants]
    if len(set(units)) == 1:
        units = range(len(units))
    distinct, unit_of = np.unique(units, return_inverse=True)
    order = np.argsort(random_words(len(distinct), [FOR_FOLDS, seed, table.key]), kind="stable")
    fold_of_unit = np.empty(len(distinct), np.int64)
    fold_of_unit[order] = np.arange(len(distinct)) % n_folds
    return fold_of_unit[unit_of]


def lines_on(found: dict) -> list[str]:
    """What a user should know of a cross-validation, as lines of text."""
    gain = found["after"] - found["before"]
    counts = (f"cross-validation: {found['variants']:,} variants, each left out of a tuning: "
              f"Spearman {found['after']:.3f}, under the base weights {found['before']:.3f}; gain "
              f"{gain:.3f} [{found['low']:.3f}, {found['high']:.3f}]")
    if found["low"] > 0:
        verdict = "Tuning helps to rank mutations of this protein that are not measured."
    elif found["high"] < 0:
        verdict = ("ATTENTION: tuning ranks variants worse that it has not seen. Use the scores of "
                   "the base weights, or measure more.")
    else:
        verdict = ("These variants do not show whether tuning helps, as the interval includes 0. "
                   "Let the base weights propose a part of the next plate, which will tell.")
    return [textwrap.fill(line, 80, subsequent_indent="    ") for line in (counts, verdict)]
