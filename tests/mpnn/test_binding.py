"""mpnn/binding.py: the score in a complex less those of its partners alone."""
import numpy as np
import pytest

from mpnn.binding import score_binding, split_by_partner
from mpnn.model import random_proteinmpnn
from mpnn.variants import Scoring, score_alone
from mpnn_cases import score_variants
from proteins.structures import Chain, Complex, Structure

LENGTHS = {"A": 9, "B": 14, "C": 11}
# Rows of the complex of A, B, C: one in A, one in B, one in each of A and C, several in A and B.
VARIANTS = [[(3, 0)], [(10, 18)], [(2, 5), (25, 18)], [(8, 1), (0, 2), (12, 3), (11, 4)]]
# The same in A and C alone, and in B alone: number of the variant, and what of it is there.
IN_AC = {0: [(3, 0)], 2: [(2, 5), (11, 18)], 3: [(8, 1), (0, 2)]}
IN_B = {1: [(1, 18)], 3: [(3, 3), (2, 4)]}


@pytest.fixture(scope="module")
def structure():
    rng = np.random.default_rng(0)
    chains = {}
    for name, n in LENGTHS.items():
        X = rng.normal(0, 6, (n, 1, 3)) + rng.normal(0, 1, (n, 4, 3))
        letters = rng.integers(5, 18, n).astype(np.uint8)
        chains[name] = Chain(letters, X.astype(np.float32), np.ones(n, bool),
                             tuple(map(str, range(n))))
    return Structure("made", chains)


@pytest.fixture(scope="module")
def whole(structure):
    return Complex(structure, ["A", "B", "C"])


@pytest.fixture(scope="module")
def partners(structure):
    """A and C bind B, whose rows stand between theirs."""
    return Complex(structure, ["C", "A"]), Complex(structure, ["B"])


@pytest.fixture(scope="module")
def models():
    return [random_proteinmpnn(seed, hidden_size=16, num_edges=12).eval() for seed in (1, 2)]


def by_hand(score, whole, partners):
    """(score in the complex, the same less the scores of the partners), from a function of a
    structure and variants."""
    in_complex = score(whole, VARIANTS)
    binding = in_complex.copy()
    for partner, own in zip(partners, (IN_AC, IN_B)):
        binding[list(own)] -= score(partner, list(own.values()))
    return in_complex, binding


def test_each_partner_has_its_own_mutations_by_its_own_rows(whole, partners):
    of_ac, of_b = split_by_partner(whole, partners, VARIANTS)
    assert dict(zip(of_ac.numbers, of_ac.changes)) == IN_AC
    assert dict(zip(of_b.numbers, of_b.changes)) == IN_B
    assert (of_ac.structure, of_b.structure) == partners


@pytest.mark.parametrize("is_corrected", [False, True])
def test_a_score_of_binding_is_that_of_three_calls_by_hand(is_corrected, whole, partners, models):
    model, other = models
    scoring = Scoring(n_orders=3, seed=1)

    def score(structure, variants):
        return score_variants(model, structure, variants, scoring)

    in_complex, binding = by_hand(score, whole, partners)
    if is_corrected:    # which cancels in the score of binding
        in_complex = in_complex - score_alone(other, whole, VARIANTS)
    correction = other if is_corrected else None
    found, = score_binding(model, [whole], [partners], [VARIANTS], scoring, correction)
    assert found.binding == pytest.approx(binding, abs=1e-5)
    assert found.in_complex == pytest.approx(in_complex, abs=1e-5)
    assert np.abs(binding).min() > 1e-3, "the partners have no effect"


def test_complexes_are_scored_each_with_its_partners(structure, whole, partners, models):
    small = Complex(structure, ["A", "B"])
    of_small = (Complex(structure, ["A"]), Complex(structure, ["B"]))
    variants = [[(3, 0)], [(10, 18)]]
    together = score_binding(models[0], [whole, small], [partners, of_small], [VARIANTS, variants])
    for number, (some, own_partners, own) in enumerate(
            [(whole, partners, VARIANTS), (small, of_small, variants)]):
        alone, = score_binding(models[0], [some], [own_partners], [own])
        assert together[number].binding.tolist() == alone.binding.tolist()
