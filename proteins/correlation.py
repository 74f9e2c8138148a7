"""Rank correlation of scores and measured values, over all and per protein, with intervals.

    report = correlate(scores, measured, proteins)          # print("\\n".join(report.lines()))

An interval is the middle 95 % of bootstrap draws. In one over several proteins whole proteins are
drawn, because mutations of one protein are alike; in that of one protein, its mutations.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

N_DRAWS = 1000
FEWEST = 3              # mutations for any correlation
LEAST = 10              # mutations of a protein for a correlation of its own


class Estimate(NamedTuple):
    """A correlation, nan if scores or values are all equal, with its interval."""
    value: float
    low: float
    high: float
    n: int              # mutations, or proteins of a mean

    def __str__(self):
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Report(NamedTuple):
    """Spearman's correlations."""
    overall: Estimate               # of all mutations together
    mean: Estimate | None           # of those of proteins; None if fewer than two have LEAST
    proteins: dict[str, Estimate]   # of each protein with at least LEAST mutations
    n_proteins: int

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lines = [f"Spearman {self.overall}: {self.overall.n:,} mutations of {self.n_proteins:,} "
                 "protein(s)"]
        if self.mean is not None:
            lines.append(f"Spearman {self.mean}: mean of {self.mean.n:,} protein(s) with {LEAST} "
                         "mutations or more")
        if self.n_proteins > 1:     # of one protein it is said already
            for name, estimate in self.proteins.items():
                lines.append(f"  {estimate}: {name}, {estimate.n} mutations")
        return lines


def correlate(scores: Sequence[float], measured: Sequence[float], proteins: Sequence[str],
              seed: int = 0) -> Report:
    """Spearman's rank correlation, over all mutations and per protein.

    Args:
        scores, measured: (n,) finite numbers.
        proteins:         (n,) the name of each mutation's protein.
        seed:             of the bootstrap.
    Raises: ValueError for fewer than FEWEST mutations.
    """
    scores = np.asarray(scores, np.float64)
    measured = np.asarray(measured, np.float64)
    if len(scores) < FEWEST:
        raise ValueError(f"found {len(scores)} mutations with a measured value; expected at least "
                         f"{FEWEST} to correlate.")
    names, protein = np.unique(np.asarray(proteins, dtype=object).astype(str), return_inverse=True)
    random = np.random.Generator(np.random.PCG64(seed % 2**64))
    estimates = {}
    for number, name in enumerate(names):
        here = protein == number
        if here.sum() >= LEAST:
            own = np.arange(here.sum())
            estimates[str(name)] = estimate(scores[here], measured[here], random, own)
    if len(names) == 1 and estimates:
        overall, = estimates.values()       # one number has one interval
    else:   # Whole proteins are drawn. With one protein, its mutations are drawn instead.
        unit = protein if len(names) > 1 else np.arange(len(scores))
        overall = estimate(scores, measured, random, unit)
    values = np.array([one.value for one in estimates.values() if np.isfinite(one.value)])
    mean = None
    if len(values) > 1:     # that of one protein would be said to be certain
        means = random.choice(values, (N_DRAWS, len(values))).mean(1)
        mean = Estimate(float(values.mean()), *interval(means), len(values))
    return Report(overall, mean, estimates, len(names))


def estimate(x, y, random, unit):
    """Estimate of Spearman's correlation of x and y (n,), by the draws of a random generator.

    unit: (n,) number of the unit of each value; units are drawn, with all their values."""
    a = np.unique(x, return_inverse=True)[1]
    b = np.unique(y, return_inverse=True)[1]
    n_units = unit.max() + 1
    evenly = np.full(n_units, 1 / n_units)
    draws = []
    for _ in range(N_DRAWS):
        times = random.multinomial(n_units, evenly)
        rows = np.repeat(np.arange(len(x)), times[unit])
        draws.append(spearman(a[rows], b[rows]))
    return Estimate(spearman(a, b), *interval(np.array(draws)), len(x))


def interval(values):
    """(low, high) of the middle 95 % of the values that are finite."""
    values = values[np.isfinite(values)]
    if not len(values):
        return np.nan, np.nan
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of a and b (n,), whole numbers from 0 in the order of the values
    that they stand for; nan where all of a or all of b are equal."""
    if not len(a) or np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan
    return float(np.corrcoef(average_ranks(a), average_ranks(b))[0, 1])


def average_ranks(a):
    """(n,) rank of each from 1, equal ones at the mean of their ranks; see spearman."""
    counts = np.bincount(a)
    return (np.cumsum(counts) - (counts - 1) / 2)[a]
