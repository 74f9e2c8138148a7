"""sedd/bounds.py: the model that knows letter frequencies alone."""
import numpy as np
import pytest
import torch

from proteins.letters import X_ID
from sedd.bounds import Unigram, unigram_frequencies
from sedd.diffusion import make_graph, make_noise

LETTER_COUNTS = np.arange(100, 121)


def test_letter_frequencies_are_without_x_and_never_zero():
    assert unigram_frequencies([18] + [0] * 19 + [1000]) == pytest.approx([19/38] + [1/38] * 19)


def test_of_the_masking_graph_its_bound_is_the_exact_negative_log_likelihood():
    unigram = Unigram(LETTER_COUNTS, make_graph("absorb", 21), make_noise("loglinear"))
    expected = -np.log(unigram_frequencies(LETTER_COUNTS))
    assert unigram.baseline[:X_ID] == pytest.approx(expected) and unigram.baseline[X_ID] == 0


def test_of_the_uniform_graph_its_bound_is_the_integral_of_its_loss_over_all_noise():
    """By Gauss and Legendre, over time and over all noised letters; and the prior's divergence."""
    graph = make_graph("uniform", 21)
    noise = make_noise("geometric")
    unigram = Unigram(LETTER_COUNTS, graph, noise)
    places, weights = np.polynomial.legendre.leggauss(200)
    sigma, dsigma = noise(torch.from_numpy((places + 1) / 2))
    xt = torch.arange(21)[:, None]
    for letter in (0, 7, 19):
        x0 = torch.full_like(xt, letter)
        integral = 0.0
        for s, d, weight in zip(sigma, dsigma, weights / 2):
            p = graph.transition(x0[:1], s[None])[0, 0]
            loss = unigram.loss({"x0": x0, "xt": xt, "sigma": s.expand(21), "dsigma": d.expand(21),
                                 "weight": x0 != X_ID})
            integral += float(weight * (p * loss).sum())
        sigma1 = noise(torch.ones(1, dtype=torch.float64))[0]
        expected = integral + float(graph.prior_kl(sigma1))
        assert unigram.baseline[letter] == pytest.approx(expected, abs=2e-3)
