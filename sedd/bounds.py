"""The model that knows letter frequencies alone, against which bounds on likelihoods are measured.

    unigram = Unigram(letter_counts, graph, noise)
    bound = unigram.baseline[x0] + loss_of_model - unigram.loss(batch)     # see sedd/evaluation.py
"""
import numpy as np
import torch

from proteins.letters import X_ID
from sedd.diffusion import independent_log_score, score_entropy_loss

# In training t is drawn from [TIME_EPS, 1], as the weight of the loss, 1/t, diverges at 0: a model
# learns no scores at lower noise.
TIME_EPS = 1e-3


class Unigram:
    """The model that knows letter frequencies alone: the control variate of bounds.

    Its scores and likelihood are known exactly, and the noise happens to change the losses of all
    models alike. So a bound is its exact -ln p plus the estimated difference between the models:
    without bias, with several times less variance. Below TIME_EPS, where no score is learned, the
    bound thereby is that of this model.

    nll: (21,) float64, -ln p of each token, in nats; 0 for X, which never counts.
    baseline: (21,) float64, its part of the bound.
    """

    def __init__(self, letter_counts, graph, noise):
        """letter_counts: of the training proteins, see Proteins.letter_counts."""
        self.graph = graph
        frequencies = np.append(unigram_frequencies(letter_counts), 0.0)   # 0 for X, never a target
        self.nll = -np.log(np.append(frequencies[:X_ID], 1.0))
        self.frequencies = torch.from_numpy(frequencies)
        self.baseline = self.nll if graph.absorb else self._uniform_cost(noise)

    def _uniform_cost(self, noise):
        """Baseline in nats of each token in the uniform graph. The prior at t = 1 is uniform: it
        replaces the unigram model's own distribution of noised tokens."""
        graph = self.graph
        sigma1 = noise(torch.ones(1, dtype=torch.float64))[0]
        p1 = graph.transition(torch.arange(graph.n_tokens)[None], sigma1)[0]       # (n_tokens, V)
        own_prior = (torch.xlogy(p1, p1) - torch.xlogy(p1, self.frequencies @ p1)).sum(-1).numpy()
        return np.where(self.nll > 0, self.nll - own_prior + graph.prior_kl(sigma1), 0.0)

    def loss(self, batch):
        """(B,) loss in nats, float64 on the CPU, of a batch of x0, xt, weight, sigma, dsigma."""
        log_score = independent_log_score(self.frequencies, batch["sigma"], batch["xt"],
                                          self.graph)
        loss, _ = score_entropy_loss(log_score, batch["sigma"], batch["dsigma"], batch["xt"],
                                     batch["x0"], self.graph, batch["weight"])
        return loss


def unigram_frequencies(letter_counts):
    """(count + 1) / (total + 20) of the 20 amino acids, so that none is zero: (20,) float64.

    letter_counts: (21,), see Proteins.letter_counts; X is left out.
    """
    seen = np.asarray(letter_counts, np.float64)[:X_ID] + 1
    return seen / seen.sum()
