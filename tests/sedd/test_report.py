"""The comparison of protein sequences with a reference, on sequences whose figures are known."""
import numpy as np
import pytest

from sedd.report import compare, difference, divergence, longest_repeat, low_complexity, measure
from proteins.letters import AMINO_ACIDS


def test_low_complexity_and_repeats_of_known_sequences():
    assert low_complexity("A" * 30) == 1 and low_complexity("ACDEFGHIKLMNPQRSTVWY") == 0
    assert longest_repeat("ACDEFGHIKL") == 0 and longest_repeat("WWWW") == 3
    assert longest_repeat("MKTAYGMKTAYH") == 5


ROWS = ["MKTAYIAKQRQISFVKSHFSRQ", "GGGGGGAAAAAWWWWWCDEFGH"]


def test_a_set_does_not_differ_from_itself():
    shares = measure(ROWS).residues
    assert shares.sum() == pytest.approx(1) and divergence(shares, shares) == 0
    assert difference([ROWS[0], ROWS[0]]) == 0 and difference(ROWS) == 1


def test_novelty_of_known_sequences():
    new, identity, by_chance, nearest = compare(
        [ROWS[0], "MKTAYIAKQRWWWWWWWWWWWW", "CCCCCCCCC", "CCC"], ROWS)
    assert nearest.tolist()[:2] == [0, 0] and nearest[2] == -1 and np.isnan(identity[2])
    assert new[0] == 0 and identity[0] == 1 and new[2] == 1 and 0.4 < identity[1] < 0.7
    assert np.isnan(new[3]) and by_chance[0] < 0.7 and np.isnan(by_chance[2])


def test_a_long_protein_is_near_to_its_own_stretches_only():
    random = np.random.default_rng(0)
    long, other = ("".join(random.choice(list(AMINO_ACIDS), n)) for n in (5000, 100))
    copied = long[2000:2040] + "WW" + long[2040:2100]   # with an insertion
    _, identity, by_chance, nearest = compare([copied, other], [other[:7] + "A" * 99, long])
    assert nearest[0] == 1 and identity[0] > 0.97
    assert identity[1] < 0.5 and (by_chance < 0.5).all()   # letters in order, somewhere, are not it
