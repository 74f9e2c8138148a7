"""What the tests of SEDD's network and of its mathematics share: the official code's numbers."""
import itertools
from pathlib import Path

import pytest
import torch

FIXTURE = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "sedd.pt"
BOTH_GRAPHS = pytest.mark.parametrize("graph_name", ["absorb", "uniform"])
CASES = pytest.mark.parametrize("graph_name, noise_name", list(itertools.product(
    ["absorb", "uniform"], ["loglinear", "geometric"])))


def official_numbers():
    """The fixture: a flat dict, whose keys sedd.md beside it explains."""
    if not FIXTURE.exists():
        pytest.skip(f"no {FIXTURE}: the official code's numbers are not part of the repository")
    return torch.load(FIXTURE, weights_only=True)


def entries(fixture, *names):
    """The entries below these names, under the rest of their names."""
    start = "/".join(names) + "/"
    return {key.removeprefix(start): value for key, value in fixture.items()
            if key.startswith(start)}


def near(found, expected, rtol=0.0, atol=0.0):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
