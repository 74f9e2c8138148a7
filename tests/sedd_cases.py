"""What the tests of SEDD's network and of its mathematics share."""
import itertools

import pytest
import torch

BOTH_GRAPHS = pytest.mark.parametrize("graph_name", ["absorb", "uniform"])
CASES = pytest.mark.parametrize("graph_name, noise_name", list(itertools.product(
    ["absorb", "uniform"], ["loglinear", "geometric"])))


def entries(fixture, *names):
    """The entries below these names, under the rest of their names. fixture: the official code's
    numbers, a flat dict, whose keys sedd.md beside it explains."""
    start = "/".join(names) + "/"
    return {key.removeprefix(start): value for key, value in fixture.items()
            if key.startswith(start)}


def near(found, expected, rtol=0.0, atol=0.0):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class TrueScores(torch.nn.Module):
    """The exact scores of residues drawn independently with probabilities p (20,)."""

    def __init__(self, p, graph):
        super().__init__()
        self.graph, self.anything = graph, torch.nn.Parameter(torch.zeros(1))
        # neither X nor the mask in clean data
        self.p = torch.cat([p, torch.full((graph.vocab_size - 20,), 1e-30)])

    def forward(self, xt, sigma, mask=None):
        stay = torch.exp(-sigma.double())[:, None, None]
        limit = torch.full((self.graph.vocab_size,), 1 / self.graph.vocab_size)
        if self.graph.absorb:
            limit = (torch.arange(self.graph.vocab_size) == self.graph.mask_id).double()
        now = stay * self.p + (1 - stay) * limit                           # p(xt) at this noise
        ratio = now / now.expand(*xt.shape, -1).gather(-1, xt[..., None])
        return ratio.clamp(min=1e-30).log().scatter(-1, xt[..., None], 0.0).float()
