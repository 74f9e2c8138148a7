"""The demo source: its distribution is the documented one, and its likelihood is exact."""
import itertools
import math

import numpy as np
import pytest

from proteins.letters import UNIREF50
from proteins.sequences import Proteins
from sedd.demo import DemoSource


@pytest.fixture(scope="module")
def demo():
    return DemoSource(seed=0)


def test_the_likelihood_of_all_triples_adds_up_to_one(demo):
    triples = np.array(list(itertools.product(range(20), repeat=3)), np.uint8)
    every = Proteins.from_sequences(triples)
    assert math.isclose(np.exp(-demo.nll(every)).sum(), 1, rel_tol=1e-9)
    a, c, d = range(3)
    assert math.isclose(demo.nll(Proteins.from_sequences(["ACD"]))[0],
                        -math.log(demo.pair[a, c]) - math.log(demo.transition[a, c, d]))


def test_samples_follow_the_transitions(demo):
    proteins = demo.sample(4000, seed=5)
    assert (proteins.lengths.min(), proteins.lengths.max()) == (40, 120)
    assert abs(proteins.lengths.mean() - 80) < 4 * 23.4 / math.sqrt(4000)  # sd of 40..120: 23.4
    counts = np.zeros((20, 20, 20))
    begins = np.zeros((20, 20))
    for i in range(len(proteins)):
        x = proteins[i]
        np.add.at(counts, (x[:-2], x[1:-1], x[2:]), 1)
        begins[x[0], x[1]] += 1 / 4000
    assert begins == pytest.approx(demo.pair, abs=0.01)     # standard deviations: up to 0.0027
    expected = counts.sum(2, keepdims=True) * demo.transition
    often = expected > 20
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum() / often.sum()
    assert 0.9 < chi2 < 1.05                                # each term: 1 - p on average


def test_letters_and_entropies_are_those_of_the_docstring(demo):
    letters = demo.pair.sum(0)
    triples = demo.pair[..., None] * demo.transition
    assert letters == pytest.approx(np.array(UNIREF50) / sum(UNIREF50), abs=1e-4)
    assert -(triples * np.log(demo.transition)).sum() == pytest.approx(2.064, abs=5e-4)
    assert -(letters * np.log(letters)).sum() == pytest.approx(2.889, abs=5e-4)
