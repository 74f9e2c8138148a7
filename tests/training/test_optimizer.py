"""The updates of AdamW and Muon."""

import copy

import pytest
import torch

from toy_run import Blocks
from training.config import CommonOptim
from training.optimizer import make_optimizer
from training_runs import equal


def test_muon_moves_a_matrix_by_the_nearest_orthogonal_one_and_leaves_the_rest_to_adamw():
    """With U S V' the gradient, by lr x 0.2 sqrt(larger side) x U V', but for Newton-Schulz's error
    (0.7 to 1.2 for 1). AdamW's first step is lr for each weight."""
    torch.manual_seed(0)
    model = Blocks()
    lr = 0.01
    optimizer = make_optimizer(model, lr, CommonOptim(name="muon"))
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        moved = before[name] - p.detach()
        if name.startswith("body") and p.ndim == 2:
            U, _, V = torch.linalg.svd(p.grad, full_matrices=False)
            found = U.T @ moved @ V.T / (lr * 0.2 * max(p.shape)**0.5)
            assert 0.6 < found.diag().min() and found.diag().max() < 1.3, (name, found)
            assert (found - found.diag().diag()).abs().max() < 0.05, (name, found)
        else:
            torch.testing.assert_close(moved, lr * p.grad.sign(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_without_a_gradient_weights_decay_by_their_share_of_the_learning_rate(name):
    torch.manual_seed(0)
    model = Blocks()
    before = copy.deepcopy(list(model.parameters()))
    optimizer = make_optimizer(model, 0.1, CommonOptim(name=name, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(model.parameters(), before):
        torch.testing.assert_close(p, old * (1 - 0.1 * 0.5))


def test_adamw_has_the_betas_with_the_eps_of_the_config():
    """Two steps by hand, of lr m / (sqrt(v) + eps), with m and v the corrected means of g, g^2."""
    model = torch.nn.Linear(1, 1, bias=False)
    start = float(model.weight.detach())
    optim = CommonOptim(betas=(0.5, 0.75), eps=0.1, weight_decay=0.0)
    optimizer = make_optimizer(model, 0.01, optim)
    for gradient in (1.0, 3.0):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    m = (0.25 * 1 + 0.5 * 3) / 0.75
    v = (0.1875 * 1 + 0.25 * 9) / 0.4375
    expected = 0.01 * (1 / 1.1 + m / (v**0.5 + 0.1))
    assert start - float(model.weight.detach()) == pytest.approx(expected, rel=1e-4)


def state_after_a_step(name):
    """(optimizer, its state)"""
    model = Blocks()
    optimizer = make_optimizer(model, 0.1, CommonOptim(name=name))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_of_an_optimizer_is_taken_back(name):
    optimizer, state = state_after_a_step(name)
    optimizer.load_state_dict(state)
    assert equal(optimizer.state_dict(), state)
