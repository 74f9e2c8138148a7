"""Are the log-likelihoods of pairs right: by all masks and times, by the demo source's own?"""

import functools
import itertools
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

import sedd.bounds
from sedd.bounds import (TIME_EPS, PairBounds, Unigram, margin_variance,
                         unigram_frequencies)
from sedd.demo import DemoSource
from sedd.diffusion import make_graph, make_noise, score_entropy_loss
from proteins.letters import X_ID, encode
from proteins.sequences import Proteins
from sedd_cases import small_model

LETTER_COUNTS = np.arange(100, 121)
DRAWS = 120


def pair(chosen, rejected, key=0):
    return SimpleNamespace(chosen=encode(chosen), rejected=encode(rejected), key=key)


def test_letter_frequencies_are_without_x_and_never_zero():
    assert unigram_frequencies([18] + [0] * 19 + [1000]) == pytest.approx([19/38] + [1/38] * 19)


def draws(bounds, chosen, rejected, model, n=DRAWS):
    """(n, K, 2) parts of so many draws of the noise of one pair, and their batch."""
    pairs = [pair(chosen, rejected, key) for key in range(n)]
    batch = bounds.batch(pairs, range(n), seed=0)
    sigma = batch["sigma"].float()
    log_score = model(batch["xt"], sigma, None if batch["full"] else batch["mask"])
    return bounds.parts(log_score, {**batch, "sigma": sigma}), batch


def exact(model, text, graph, noise):
    """-B of a sequence, over all noised sequences and noise levels: of the masking graph over the
    share m that is hidden, else over time; by Gauss and Legendre."""
    x0 = torch.from_numpy(encode(text).astype(np.int64))
    unigram = Unigram(LETTER_COUNTS, graph, noise)
    places, weights = np.polynomial.legendre.leggauss(16)
    places = torch.from_numpy((places + 1) / 2)
    if graph.absorb:
        choices = [(int(token), graph.mask_id) for token in x0]
        low, high = noise(torch.tensor([TIME_EPS, 1.0]).double())[0]
        sigma = -torch.log1p(-places)
        seen = sigma.clamp(low, high)                       # by the network
        dsigma = torch.expm1(seen) / places
        weights = weights / 2
    else:
        choices = [range(graph.n_tokens)] * len(x0)
        sigma, dsigma = noise(TIME_EPS + (1 - TIME_EPS) * places)
        seen = sigma
        weights = weights * (1 - TIME_EPS) / 2
    gain = 0.0
    states = torch.tensor(list(itertools.product(*choices)))
    own = x0.expand(len(states), -1)
    for s, net, d, w in zip(sigma, seen, dsigma, weights):
        p = graph.transition(own, s.expand(len(own))).gather(-1, states[..., None]).prod(1)[:, 0]
        net = net.expand(len(own))
        batch = {"x0": own, "xt": states, "sigma": net, "dsigma": d.expand(len(own)),
                 "weight": own != X_ID}
        loss, _ = score_entropy_loss(model(states, net.float()), net, batch["dsigma"], states, own,
                                     graph, batch["weight"])
        gain = gain + w * (p * (unigram.loss(batch) - loss)).sum()
    return gain - float(unigram.baseline[x0.numpy()].sum())


def within(found, expected, errors=4.0):
    """Assert that the mean of draws (n,) is the expected number, by its standard error."""
    found = found.double()
    error = float(found.std() / len(found) ** 0.5)
    assert abs(float(found.mean()) - float(expected)) < errors * error + 1e-4


@torch.no_grad()
@pytest.mark.parametrize("graph_name, noise_name, share, texts", [
    ("absorb", "loglinear", True, ("MKTA", "MRTA")),      # masks chosen by one position
    ("absorb", "cosine", True, ("MKTA", "AKTC")),         # by two
    ("absorb", "loglinear", True, ("MKTA", "AGVC")),      # all differ: no choice
    ("absorb", "loglinear", True, ("MKXA", "AK")),        # of two lengths; X does not count
    ("absorb", "cosine", False, ("MKTA", "MRTA")),
    ("uniform", "geometric", True, ("MK", "MR"))])
def test_estimates_are_unbiased(graph_name, noise_name, share, texts):
    graph = make_graph(graph_name, 21)
    noise = make_noise(noise_name)
    model = small_model(graph).eval()
    bounds = PairBounds(graph, noise, LETTER_COUNTS, samples=4, share=share)
    parts, batch = draws(bounds, *texts, model)
    chosen, rejected = parts.sum(1).unbind(1)
    values = [exact(model, text, graph, noise) for text in texts]
    within(chosen, values[0])
    within(rejected, values[1])
    within(chosen - rejected, values[0] - values[1])
    found = margin_variance(parts, batch["n_first"]).mean()
    assert float(found) > 0.3 * float((chosen - rejected).var())


# ---- the noise of one pair, drawn often ----

OFTEN = 400
SHORT = pytest.mark.parametrize("rejected, differ", [("MRT", {1}), ("AKC", {0, 2})])


@functools.cache
def noised_often(chosen, rejected):
    """[Noised] of a pair by so many keys, and how many levels are of the first kind. The number of
    levels is odd, so that there are more of the second kind."""
    bounds = PairBounds(make_graph("absorb", 21), make_noise("loglinear"), LETTER_COUNTS, samples=5)
    noised = []
    for key in range(OFTEN):
        found, n_first = bounds.draw(pair(chosen, rejected, key), seed=0)
        noised += found
    return noised, n_first


def hidden_by(one):
    """The residues that a Noised hides."""
    return tuple((one.xt != one.x0).nonzero()[:, 0].tolist())


@SHORT
def test_each_mask_counts_as_much_as_in_the_sum_over_all_masks(rejected, differ):
    """The bound of 3 residues is the sum over masks of l residues of 1 / l / (3 choose l) h."""
    noised, _ = noised_often("MKT", rejected)
    expected = {mask: 1 / number / math.comb(3, number) for number in range(1, 4)
                for mask in itertools.combinations(range(3), number)}
    for side in range(2):
        found = dict.fromkeys(expected, 0.0)
        for one in noised:
            if one.side == side:
                found[hidden_by(one)] += one.factor / OFTEN
        assert found == pytest.approx(expected, rel=0.15)


@SHORT
def test_levels_of_the_first_kind_hide_a_differing_residue_as_the_others_do_not(rejected, differ):
    noised, n_first = noised_often("MKT", rejected)
    for one in noised:
        hides_some = not differ.isdisjoint(hidden_by(one))
        assert hides_some == (one.level < n_first)


@SHORT
def test_the_noise_level_of_a_mask_is_that_at_which_so_many_are_hidden(rejected, differ):
    """Of 3 uniform random numbers, the l-th smallest is l / 4 in the mean."""
    noised, _ = noised_often("MKT", rejected)
    for number in range(1, 4):
        shares = [-math.expm1(-one.sigma) for one in noised if len(hidden_by(one)) == number]
        assert statistics.mean(shares) == pytest.approx(number / 4, abs=0.04)


def test_no_noise_level_is_beyond_those_of_training():
    """Of some thousand uniform random numbers some are."""
    limits = torch.tensor([TIME_EPS, 1.0], dtype=torch.float64)
    bounds = PairBounds(make_graph("absorb", 21), make_noise("loglinear"), LETTER_COUNTS, 2000)
    noised, _ = bounds.draw(pair("MKT", "MRT"), seed=0)
    levels = [one.sigma for one in noised]
    assert [min(levels), max(levels)] == make_noise("loglinear")(limits)[0].tolist()


@torch.no_grad()
def test_entropy_is_the_mean_over_hidden_residues_of_the_chosen_sequence():
    bounds = PairBounds(make_graph("absorb", 21), make_noise("loglinear"), LETTER_COUNTS, samples=5)
    pairs = [pair("MKTAGSLLEE", "MKTAPSLLEE"), pair("AKTAGSLL", "AKTAGSLLEEMK", 1)]
    weights = torch.arange(1.0, 13.0)

    def scores(xt):
        """(..., L, 22), other ones for each sequence."""
        total = (xt * weights[:xt.shape[-1]] * (xt != X_ID)).sum(-1)
        return torch.sin(total[..., None, None] * torch.arange(22.0)).expand(*xt.shape, 22)

    batch = bounds.batch(pairs, [0, 1], seed=0)
    found = bounds.entropy(scores(batch["xt"]), batch)
    for one, value in zip(pairs, found.tolist()):
        entropies = []
        for noised in bounds.draw(one, seed=0)[0]:
            if noised.side == 0:
                p = scores(noised.xt)[0, :20].softmax(-1)
                entropies += [-float((p * p.log()).sum())] * len(hidden_by(noised))
        assert value == pytest.approx(statistics.mean(entropies), rel=1e-5)


def test_the_variance_of_a_margin_adds_that_of_each_kind_of_levels():
    margins = [[1.0, 4.0, 2.0, 3.0, 7.0], [0.0, 5.0, 5.0, 1.0, 2.0]]
    parts = torch.tensor([[(10 + margin, 10) for margin in row] for row in margins])
    split, whole = margins
    expected = [2 * statistics.variance(split[:2]) + 3 * statistics.variance(split[2:]),
                5 * statistics.variance(whole)]
    assert margin_variance(parts, torch.tensor([2, 0])).tolist() == pytest.approx(expected)


# ---- the loss, the demo source ----

def test_the_gradient_of_a_loss_is_that_of_the_exact_loss():
    graph = make_graph("absorb", 21)
    noise = make_noise("loglinear")
    model = small_model(graph).double().eval()
    bounds = PairBounds(graph, noise, LETTER_COUNTS, samples=1000)
    texts = ("MKTA", "MRTA")
    parts, _ = draws(bounds, *texts, lambda xt, sigma, mask: model(xt, sigma.double(), mask), n=1)
    estimates = parts.sum(1)[0]
    values = [exact(lambda xt, sigma: model(xt, sigma.double()), text, graph, noise)
              for text in texts]

    def gradient(chosen, rejected):
        loss = -logsigmoid(0.5 * (chosen - rejected + 0.3))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    found = gradient(*estimates)
    expected = gradient(*values)
    assert float((found - expected).norm() / expected.norm()) < 0.05


class SourceScores(torch.nn.Module):
    """The exact scores of the demo source for the absorbing graph: p(residue | those seen)."""

    def __init__(self, source):
        super().__init__()
        self.pair = torch.from_numpy(source.pair)
        self.transition = torch.from_numpy(source.transition)

    def forward(self, xt, sigma, mask=None):
        seen = torch.nn.functional.one_hot(xt.clamp(max=19), 20).double()
        evidence = torch.where((xt == 21)[..., None], 1.0, seen)                   # (R, L, 20)
        forward = [self.pair * evidence[:, 0, :, None] * evidence[:, 1, None]]
        for i in range(2, xt.shape[1]):
            step = torch.einsum("rab,abc->rbc", forward[-1], self.transition)
            forward.append(step * evidence[:, i, None])
        backward = [torch.ones_like(forward[0])]
        for i in range(xt.shape[1] - 1, 1, -1):
            later = evidence[:, i, None] * backward[-1]
            backward.append(torch.einsum("abc,rbc->rab", self.transition, later))
        both = [a * b for a, b in zip(forward, reversed(backward))]
        marginals = torch.stack([both[0].sum(2), *(each.sum(1) for each in both)], 1)
        p = marginals / marginals.sum(-1, keepdim=True)
        log_r = -torch.log(torch.expm1(sigma.double()))[:, None, None]
        scores = torch.full((*xt.shape, 22), -torch.inf, dtype=torch.float64)
        scores[..., :20] = p.log() + log_r
        return scores.scatter(-1, xt[..., None], 0.0)


@pytest.fixture(scope="module")
def source():
    return DemoSource(seed=0)


@torch.no_grad()
@pytest.mark.parametrize("texts", [("MKTAGSLLEE", "MKTAPSLLEE"), ("MKTAGSLL", "AAKRILMW")])
def test_with_the_scores_of_the_demo_source_estimates_are_its_exact_log_likelihoods(texts, source):
    graph = make_graph("absorb", 21)
    bounds = PairBounds(graph, make_noise("loglinear"), LETTER_COUNTS, samples=4)
    parts, _ = draws(bounds, *texts, SourceScores(source), n=120)
    chosen, rejected = parts.sum(1).unbind(1)
    exact_nll = source.nll(Proteins.from_sequences(texts))
    within(chosen, -exact_nll[0])
    within(rejected, -exact_nll[1])
    within(chosen - rejected, exact_nll[1] - exact_nll[0])


@torch.no_grad()
def test_shared_noise_has_a_variance_at_least_five_times_smaller(source, monkeypatch):
    graph = make_graph("absorb", 21)
    half = "MKTAGSLLEEKRAVMKGNITEDPLKR"
    variances = {}
    for name, share, few in (("apart", False, 0), ("shared", True, 0), ("chosen masks", True, 5)):
        monkeypatch.setattr(sedd.bounds, "FEW", few)
        bounds = PairBounds(graph, make_noise("loglinear"), LETTER_COUNTS, samples=4, share=share)
        parts, _ = draws(bounds, f"{half}A{half}", f"{half}W{half}", SourceScores(source), n=50)
        chosen, rejected = parts.sum(1).unbind(1)
        variances[name] = float((chosen - rejected).var())
    assert variances["chosen masks"] < variances["apart"] / 5, variances
    assert variances["chosen masks"] < variances["shared"] / 2, variances


def test_the_noise_of_a_pair_hangs_on_its_key_and_epoch_alone():
    graph = make_graph("absorb", 21)
    bounds = PairBounds(graph, make_noise("loglinear"), LETTER_COUNTS, samples=4)
    pairs = [pair("MKTAGSLLEE", "MKTAGSLLEEW", 1), pair("MKTAGSLLEE", "MKTAPSLLEE", 2)]

    def drawn(indices, i, **how):
        """The inputs of the losses of pair number i of a batch."""
        batch = bounds.batch(pairs, indices, seed=0, **how)
        of_pair = batch["cell"] // 8 == indices.index(i)
        return batch["xt"][batch["row"][of_pair]][:, :10].tolist()

    assert drawn([0, 1], 1) == drawn([1], 1) == drawn([1, 0], 1)
    assert drawn([1], 1, epoch=0) != drawn([1], 1, epoch=1)


def test_a_mask_that_hides_the_differing_position_serves_both_sequences_in_one_pass():
    graph = make_graph("absorb", 21)
    bounds = PairBounds(graph, make_noise("loglinear"), LETTER_COUNTS, samples=8)
    batch = bounds.batch([pair("MKTAGSLLEE" * 5, "MKTAPSLLEE" + "MKTAGSLLEE" * 4)], [0], seed=0)
    assert len(batch["x0"]) == 16
    assert len(batch["xt"]) == 4 + 2 * 4
