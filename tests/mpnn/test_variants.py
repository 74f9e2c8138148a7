"""mpnn/variants.py: the scores of variants are those of the decoder's definition."""

import numpy as np
import pytest
import torch

from mpnn.model import random_proteinmpnn
from proteins.structures import Chain, Complex, Structure
from mpnn_cases import score_variants
from mpnn.variants import (Scoring, encode_complex, log_probs_decoded_last, score_alone,
                           score_proteins, variant_order)

A = 0           # letters
G = 5
W = 18


def random_complex(length=30, unresolved=(), second=0):
    """A complex of chain A, perhaps with a context chain B, of random atoms."""
    rng = np.random.default_rng(length)
    chains = {}
    for name, n in (("A", length), ("B", second)):
        if n:
            resolved = np.ones(n, bool)
            resolved[list(unresolved)] = name == "B"
            X = rng.normal(0, 4, (n, 1, 3)) + rng.normal(0, 1, (n, 4, 3))
            X[~resolved] = 0
            letters = rng.integers(0, 20, n).astype(np.uint8)
            chains[name] = Chain(letters, X.astype(np.float32), resolved,
                                 tuple(map(str, range(n))))
    return Complex(Structure("made", chains), ["A"], [name for name in chains if name != "A"])


def sharp_model(n_decoder=3, dtype=torch.float32):
    """A model of 6 neighbours, in which letters around a residue matter much."""
    model = random_proteinmpnn(1, hidden_size=16, n_encoder=1, n_decoder=n_decoder, num_edges=6)
    with torch.no_grad():
        model.W_s.weight *= 20
        model.W_out.weight *= 4
    return model.eval().to(dtype)


def encoded(model, complex, dtype=torch.float32):
    with torch.no_grad():
        encoding = encode_complex(model.float(), complex)
    model.to(dtype)
    return type(encoding)(*(x.to(dtype) if x.is_floating_point() else x for x in encoding))


@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("n_decoder", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [{}, {"unresolved": (3, 4, 20)}, {"second": 12}, {"length": 4}])
def test_one_pass_gives_what_a_pass_for_each_residue_gives(  # noqa: PLR0913  (what is varied)
        shape, n_decoder, dtype, within, monkeypatch):
    """In parts that are small: of residues, and of the rows computed for them."""
    monkeypatch.setattr("mpnn.variants.AT_ONCE", 10)
    monkeypatch.setattr("mpnn.variants.ROWS_AT_ONCE", 37)
    complex = random_complex(**shape)
    model = sharp_model(n_decoder)
    encoding = encoded(model, complex, dtype)
    S = torch.from_numpy(complex.S.astype(np.int64))[None]
    order = variant_order(len(complex), seed=0, number=0)
    rows = np.flatnonzero(complex.mask).tolist()
    plain = one_pass_each(model, encoding, S, order, rows)
    found = log_probs_decoded_last(model, encoding, S, order, rows)
    assert (plain.exp().std(0) > 1e-3).any(), "letters and places have no effect"
    assert found.dtype == dtype and (found - plain).abs().max() <= within


@torch.no_grad()
def one_pass_each(model, encoding, S, order, rows):
    """(P, 21) log-probabilities of residues, each last in the order of a pass of its own."""
    orders = [torch.cat([order[0, order[0] != i], order.new_tensor([i])]) for i in rows]
    log_probs = model.decode(encoding, S.expand(len(rows), -1), torch.stack(orders))
    return log_probs[torch.arange(len(rows)), rows]


def decoded(model, complex, S, last, seed, number):
    """(L, 21) float64 of the letters S, the rows `last` at the end of an order."""
    order = variant_order(len(complex), seed, number)[0].tolist()
    order = [row for row in order if row not in last] + list(last)
    with torch.no_grad():
        encoding = encode_complex(model, complex)
        log_p = model.decode(encoding, torch.tensor(S)[None], torch.tensor(order)[None])[0]
    return log_p.double().numpy()


def test_the_score_is_the_mean_log_odds_of_the_residue_decoded_last():
    complex = random_complex(unresolved=(0,), second=9)
    model = sharp_model()
    S = complex.S.astype(np.int64)
    S[7] = A
    complex.S[7] = A
    expected = []
    for number in range(3):
        log_p = decoded(model, complex, S, [7], 5, number)[7]
        expected.append(log_p[W] - log_p[A])
    assert np.std(expected) > 1e-3
    scores = score_variants(model, complex, [[(7, W)], [(7, A)]], Scoring(n_orders=3, seed=5))
    assert scores == pytest.approx([np.mean(expected), 0], abs=1e-5)


def test_another_seed_draws_other_orders():
    complex = random_complex()
    of_seeds = [score_variants(sharp_model(), complex, [[(7, W)]], Scoring(n_orders=1, seed=seed))
                for seed in range(2)]
    assert abs(of_seeds[0] - of_seeds[1]) > 1e-3


def test_several_mutations_are_decoded_along_the_chain_then_in_reverse():
    complex = random_complex()
    model = sharp_model()
    mutated = {4: W, 11: G, 12: A}
    expected = []
    for number, last in enumerate(([4, 11, 12], [12, 11, 4])):
        of_each = []
        for letters in (mutated, {row: int(complex.S[row]) for row in mutated}):
            S = complex.S.astype(np.int64)
            for row, letter in letters.items():
                S[row] = letter
            log_p = decoded(model, complex, S, last, 0, number)
            of_each.append(sum(log_p[row, letter] for row, letter in letters.items()))
        expected.append(of_each[0] - of_each[1])
    one = list(mutated.items())
    how = Scoring(n_orders=2, batch_size=2)
    scores = score_variants(model, complex, [one, one[::-1], [(4, W)]], how)
    assert scores[:2] == pytest.approx([np.mean(expected)] * 2, abs=1e-4)
    singles = [[change] for change in one]
    assert abs(scores[0] - score_variants(model, complex, singles, how).sum()) > 1e-3


def test_alone_a_residue_is_a_structure_of_its_four_atoms():
    complex = random_complex()
    model = sharp_model()
    expected = []
    for row, letter in ((4, W), (11, G)):
        own = Chain(complex.S[[row]], complex.X[[row]], np.ones(1, bool), ("1",))
        alone = Complex(Structure("one", {"A": own}), ["A"])
        log_p = decoded(model, alone, alone.S.astype(np.int64), [0], 0, 0)[0]
        expected.append(log_p[letter] - log_p[alone.S[0]])
    scores = score_alone(model, complex, [[(4, W)], [(11, G)], [(4, W), (11, G)]])
    assert scores == pytest.approx([*expected, sum(expected)], abs=1e-5)


def test_proteins_are_scored_as_each_alone_and_their_variants_are_counted():
    complexes = [random_complex(), random_complex(length=20, second=9)]
    variants = [[[(4, W)], [(4, G)], [(5, W), (4, A)]], [[(3, W)]]]
    model = sharp_model()
    told = []
    found = score_proteins(model, complexes, variants, Scoring(n_orders=2), correction=model,
                           done=lambda n, total: told.append((n, total)))
    for scores, complex, of_protein in zip(found, complexes, variants):
        expected = score_variants(model, complex, of_protein, Scoring(n_orders=2))
        expected = expected - score_alone(model, complex, of_protein)
        assert np.array_equal(scores, expected)
    assert told == [(3, 12)] * 3 + [(1, 12)] * 3
