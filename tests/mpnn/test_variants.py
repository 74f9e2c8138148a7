"""mpnn/variants.py: the scores of variants are those of the decoder's definition."""

import numpy as np
import pytest
import torch

from mpnn.model import random_proteinmpnn
from mpnn.variants import (
    Decoding,
    Scoring,
    choose_run,
    encode_complex,
    index_variants,
    log_probs_decoded_last,
    score_alone,
    score_proteins,
    scores_in_order,
    variant_order,
)
from mpnn_cases import random_complex, score_variants
from proteins.structures import Chain, Complex, Structure

A = 0           # letters
G = 5
W = 18


def sharp_model(n_decoder=3, dtype=torch.float32):
    """A model of 6 neighbours, in which letters around a residue matter much."""
    model = random_proteinmpnn(1, hidden_size=16, n_encoder=1, n_decoder=n_decoder, num_edges=6)
    with torch.no_grad():
        model.W_s.weight *= 20
        model.W_out.weight *= 4
    return model.eval().to(dtype)


def encoded(model, structure, dtype=torch.float32):
    with torch.no_grad():
        encoding = encode_complex(model.float(), structure)
    model.to(dtype)
    return type(encoding)(*(x.to(dtype) if x.is_floating_point() else x for x in encoding))


def letters_of(structure):
    """(1, L) int64."""
    return torch.from_numpy(structure.S.astype(np.int64))[None]


@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("n_decoder", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [{}, {"unresolved": (3, 4, 20)}, {"second": 12}, {"length": 4}])
def test_one_pass_gives_what_a_pass_for_each_residue_gives(  # noqa: PLR0913  (what is varied)
        shape, n_decoder, dtype, within, monkeypatch):
    """In parts that are small: of residues, and of the rows computed for them."""
    monkeypatch.setattr("mpnn.variants.AT_ONCE", 10)
    monkeypatch.setattr("mpnn.variants.ROWS_AT_ONCE", 37)
    structure = random_complex(**shape)
    model = sharp_model(n_decoder)
    encoding = encoded(model, structure, dtype)
    S = letters_of(structure)
    order = variant_order(len(structure), seed=0, number=0)
    rows = np.flatnonzero(structure.mask).tolist()
    plain = one_pass_each(model, encoding, S, order, rows)
    log_p = log_probs_decoded_last(model, encoding, S, order, rows)
    assert (plain.exp().std(0) > 1e-3).any(), "letters and places have no effect"
    assert log_p.dtype == dtype and (log_p - plain).abs().max() <= within


@torch.no_grad()
def one_pass_each(model, encoding, S, order, rows):
    """(P, 21) log-probabilities of residues, each last in the order of a pass of its own."""
    orders = [torch.cat([order[0, order[0] != i], order.new_tensor([i])]) for i in rows]
    log_probs = model.decode(encoding, S.expand(len(rows), -1), torch.stack(orders))
    return log_probs[torch.arange(len(rows)), rows]


def decoded(model, structure, S, last, seed, number):
    """(L, 21) float64 of the letters S, the rows `last` at the end of an order."""
    order = variant_order(len(structure), seed, number)[0].tolist()
    order = [row for row in order if row not in last] + list(last)
    with torch.no_grad():
        encoding = encode_complex(model, structure)
        log_p = model.decode(encoding, torch.tensor(S)[None], torch.tensor(order)[None])[0]
    return log_p.double().numpy()


def joint_score(model, structure, variant, seed, number, in_reverse=False):
    """ln p(mutant) - ln p(wild type) of a variant, each by a pass of its own."""
    last = sorted(row for row, _ in variant)
    if in_reverse:
        last = last[::-1]
    sums = []
    for letters in (dict(variant), {row: int(structure.S[row]) for row in last}):
        S = structure.S.astype(np.int64)
        for row, letter in letters.items():
            S[row] = letter
        log_p = decoded(model, structure, S, last, seed, number)
        sums.append(sum(log_p[row, letter] for row, letter in letters.items()))
    mutant, wild_type = sums
    return mutant - wild_type


def test_the_score_is_the_mean_log_odds_of_the_residue_decoded_last():
    structure = random_complex(unresolved=(0,), second=9)
    model = sharp_model()
    S = structure.S.astype(np.int64)
    S[7] = A
    structure.S[7] = A
    expected = []
    for number in range(3):
        log_p = decoded(model, structure, S, [7], 5, number)[7]
        expected.append(log_p[W] - log_p[A])
    assert np.std(expected) > 1e-3
    scores = score_variants(model, structure, [[(7, W)], [(7, A)]], Scoring(n_orders=3, seed=5))
    assert scores == pytest.approx([np.mean(expected), 0], abs=1e-5)


def test_another_seed_draws_other_orders():
    structure = random_complex()
    scores = [score_variants(sharp_model(), structure, [[(7, W)]], Scoring(n_orders=1, seed=seed))
              for seed in range(2)]
    assert abs(scores[0] - scores[1]) > 1e-3


def test_several_mutations_are_decoded_along_the_chain_then_in_reverse():
    structure = random_complex()
    model = sharp_model()
    variant = [(4, W), (11, G), (12, A)]
    along = joint_score(model, structure, variant, 0, 0)
    reverse = joint_score(model, structure, variant, 0, 1, in_reverse=True)
    assert abs(reverse - joint_score(model, structure, variant, 0, 1)) > 1e-3
    how = Scoring(n_orders=2)
    scores = score_variants(model, structure, [variant, variant[::-1]], how)
    assert scores == pytest.approx([(along + reverse) / 2] * 2, abs=1e-4)
    singles = [[change] for change in variant]
    assert abs(scores[0] - score_variants(model, structure, singles, how).sum()) > 1e-3


# Of one to three mutations, some of the same residues.
MANY = [[(4, W), (11, G)], [(4, G), (11, W)], [(3, W)], [(9, G), (4, A), (11, W)],
        [(12, W), (29, G)], [(4, A), (11, W)], [(0, W), (1, W)]]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_variants_side_by_side_have_the_scores_of_each_alone(batch_size):
    structure = random_complex(second=9)
    model = sharp_model()
    expected = [joint_score(model, structure, variant, 0, 0) for variant in MANY]
    assert np.std(expected) > 0.1
    scores = score_variants(model, structure, MANY, Scoring(n_orders=1, batch_size=batch_size))
    assert scores == pytest.approx(expected, abs=1e-4)


def scores_and_gradient(variants, **how):
    """Scores (n,), the gradient of the sum of their squares, and the bytes held for it."""
    structure = random_complex()
    model = sharp_model(dtype=torch.float64)
    encoding = encoded(model, structure, torch.float64)
    order = variant_order(len(structure), seed=0, number=0)
    held = {}           # address -> bytes

    def hold(tensor):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        scores, _ = scores_in_order(model, encoding, letters_of(structure), order,
                                    index_variants(variants, structure.S), Decoding(**how))
    gradient = torch.autograd.grad(scores.square().sum(), [*model.decoder_layers.parameters()])
    return scores.detach(), torch.cat([part.flatten() for part in gradient]), sum(held.values())


def doubles(n):
    """Variants of n pairs of residues."""
    pairs = [(i, j) for i in range(30) for j in range(i)]
    return [[(i, (i + j) % 20), (j, j % 20)] for i, j in pairs[7:7 + n]]


def test_many_passes_hold_no_more_for_the_gradient_than_one():
    *_, held_by_one = scores_and_gradient(doubles(4))
    scores, gradient, held = scores_and_gradient(doubles(40))
    assert held < held_by_one
    kept_scores, kept_gradient, kept = scores_and_gradient(doubles(40), batch_size=1000)
    assert kept > 5 * held_by_one
    torch.testing.assert_close(scores, kept_scores, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, kept_gradient, rtol=1e-9, atol=1e-12)


def test_of_many_residues_less_is_held_for_the_same_gradient():
    singles = [[(row, (row + 7) % 20)] for row in range(30)]
    scores, gradient, kept = scores_and_gradient(singles, run=choose_run(30))
    scores_again, gradient_again, held = scores_and_gradient(singles, run=choose_run(30_000))
    assert torch.equal(scores, scores_again) and torch.equal(gradient, gradient_again)
    assert held < 0.75 * kept


def test_some_variants_have_the_scores_that_they_have_among_all():
    scores, _, _ = scores_and_gradient(MANY + doubles(20))
    drawn = [MANY[k] for k in (5, 2, 0)]
    some, _, _ = scores_and_gradient(drawn)
    torch.testing.assert_close(some, scores[[5, 2, 0]], rtol=1e-9, atol=1e-9)


def test_alone_a_residue_is_a_structure_of_its_four_atoms():
    structure = random_complex()
    model = sharp_model()
    expected = []
    for row, letter in ((4, W), (11, G)):
        own = Chain(structure.S[[row]], structure.X[[row]], np.ones(1, bool), ("1",))
        alone = Complex(Structure("one", {"A": own}), ["A"])
        log_p = decoded(model, alone, alone.S.astype(np.int64), [0], 0, 0)[0]
        expected.append(log_p[letter] - log_p[alone.S[0]])
    scores = score_alone(model, structure, [[(4, W)], [(11, G)], [(4, W), (11, G)]])
    assert scores == pytest.approx([*expected, sum(expected)], abs=1e-5)


def test_proteins_are_scored_as_each_alone_and_their_variants_are_counted():
    structures = [random_complex(), random_complex(length=20, second=9)]
    variants = [[[(4, W)], [(4, G)], [(5, W), (4, A)]], [[(3, W)]]]
    model = sharp_model()
    told = []
    scores = score_proteins(model, structures, variants, Scoring(n_orders=2), correction=model,
                            done=lambda n, total: told.append((n, total)))
    for protein_scores, structure, protein_variants in zip(scores, structures, variants):
        expected = score_variants(model, structure, protein_variants, Scoring(n_orders=2))
        expected = expected - score_alone(model, structure, protein_variants)
        assert np.array_equal(protein_scores, expected)
    assert told == [(3, 12)] * 3 + [(1, 12)] * 3
