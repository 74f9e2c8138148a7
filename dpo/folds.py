"""Cross-validation inside the table of one protein: does tuning rank better what is not measured?

    found = cross_validate(table, 4, seed, scores_before, scores_after)     # a dict, as checkpoints
    print("\\n".join(lines_on(found)))

Each variant is scored by weights that were tuned without it. No model here.
"""
import textwrap
from collections.abc import Callable

import numpy as np

from dpo.tables import VariantTable
from proteins.correlation import compare
from proteins.seeds import FOR_FOLDS, random_words


def cross_validate(table: VariantTable, n_folds: int, seed: int, before: np.ndarray,
                   scores_after: Callable) -> dict:
    """Spearman's correlations with the measured values, before and after tuning.

    Args:
        n_folds:      parts of the variants, each of which is left out once.
        before:       (N,) scores of the variants under the base.
        scores_after: function of the VariantTable of the others -> (N,) scores of all variants
            under weights that were tuned on these.
    Returns: {"variants": N, ...}, with the fields of a Gain.
    """
    values = table.values[:-1]
    n = len(values)
    n_folds = min(n_folds, n)       # none is empty
    fold_of = np.empty(n, np.int64)
    fold_of[np.argsort(random_words(n, [FOR_FOLDS, seed, table.key]), kind="stable")] = (
        np.arange(n) % n_folds)
    after = np.empty(n)
    for fold in range(n_folds):
        left_out = fold_of == fold
        after[left_out] = scores_after(table.only(~left_out))[left_out]
    gain = compare(before, after, values)
    return {"variants": n, **gain._asdict()}


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
