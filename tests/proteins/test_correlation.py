"""proteins/correlation.py: Spearman's correlation and its intervals."""

import numpy as np
import pytest

from proteins import correlation
from proteins.correlation import average_ranks, correlate


def test_equal_values_get_the_mean_of_their_ranks():
    assert average_ranks(np.array([2, 1, 2, 0])).tolist() == [3.5, 2, 3.5, 1]


def test_spearman_without_ties_is_that_of_squared_differences_of_ranks():
    x = [1.0, 2, 3, 4, 5, 6]
    y = [20.0, 10, 30, 60, 50, 40]          # differences of ranks: 1 1 0 2 0 2
    value = correlate(x, y, ["a"] * 6).overall.value
    assert value == pytest.approx(1 - 6 * 10 / (6 * 35))


def test_equal_scores_have_no_correlation():
    assert np.isnan(correlate([1.0] * 4, range(4), ["a"] * 4).overall.value)


def test_proteins_with_few_mutations_have_no_correlation_of_their_own():
    scores = [*range(10), *range(10), *range(9)]
    names = ["large"] * 10 + ["larger"] * 10 + ["small"] * 9
    report = correlate(scores, [-score for score in scores], names)
    assert list(report.proteins) == ["large", "larger"]
    assert report.mean == pytest.approx((-1, -1, -1, 2))
    assert report.overall == pytest.approx((-1, -1, -1, 29))


def test_one_protein_has_no_mean_of_proteins():
    scores = [*range(10), *range(9)]
    assert correlate(scores, scores, ["large"] * 10 + ["small"] * 9).mean is None


def test_the_interval_holds_the_value_of_the_population_19_times_in_20(monkeypatch):
    monkeypatch.setattr(correlation, "N_DRAWS", 200)
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(120):
        x, y = rng.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], 60).T
        overall = correlate(x, y, ["a"] * 60).overall
        hits += overall.low < 6 / np.pi * np.arcsin(0.25) < overall.high
    assert 106 <= hits <= 119


def test_whole_proteins_are_drawn_for_the_interval_over_all():
    """Copies of each mutation add nothing: the interval stays as wide."""
    rng = np.random.default_rng(2)
    x, y = rng.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], 40).T
    names = [f"p{k}" for k in range(40)]
    one = correlate(x, y, names).overall
    many = correlate(np.repeat(x, 9), np.repeat(y, 9), np.repeat(names, 9)).overall
    assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.05)


def test_two_mutations_are_too_few():
    with pytest.raises(ValueError, match=r"\b2\b"):
        correlate([1, 2], [1, 2], ["a", "a"])
