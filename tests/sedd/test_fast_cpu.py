"""What sedd/model.py computes otherwise on a CPU than elsewhere, and that the results are the same.

That both agree with the official code is in test_sedd_model.py."""
import math

import pytest
import torch
import torch.nn.functional as F

from sedd import fast_cpu
from sedd import model as network
from sedd.diffusion import AbsorbingGraph, UniformGraph
from sedd.fast_cpu import attention, dropout
from sedd.model import spread
from sedd_cases import near, seeded, small_batch, small_model
from training import fast_linear


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("graph", [AbsorbingGraph(21), UniformGraph(21)])
def test_log_scores_are_those_of_another_device(graph, dtype, atol, monkeypatch):
    _, xt, mask, _, sigma, _ = small_batch(graph)
    model = small_model(graph, dropout=0.0)
    log_scores = []
    for device in ("CPU", "another"):
        if device == "another":
            for module in (network, fast_cpu, fast_linear):
                monkeypatch.setattr(module, "on_cpu", lambda x: False)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            log_scores.append(model(xt, sigma, mask, graph.wanted(xt)))
    near(*log_scores, atol=atol)


def test_what_is_recomputed_for_backward_has_the_same_gradient():
    graph = AbsorbingGraph(21)
    _, xt, mask, _, sigma, _ = small_batch(graph)
    gradients = []
    for checkpointing in (False, True):
        model = small_model(graph, dropout=0.5, gradient_checkpointing=checkpointing)
        torch.manual_seed(0)
        model.train()(xt, sigma, mask, graph.wanted(xt)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_each_entry_alike_and_keeps_the_mean(p, dtype):
    x = torch.ones(8, 127, 129, dtype=dtype)            # no multiple of 4 in a protein
    torch.manual_seed(0)
    draws = [dropout(x, p, True) for _ in range(2)]
    dropped = [(draw == 0).double() for draw in draws]
    for draw, zeros in zip(draws, dropped):
        kept = draw[draw != 0].float()
        near(kept, torch.full_like(kept, 1 / (1 - p)), rtol=torch.finfo(dtype).eps + 1e-4)
        for k in range(4):                  # four entries share a random number
            share = zeros.flatten()[k::4]
            assert abs(share.mean() - p) < 5 * math.sqrt(p * (1 - p) / len(share))
    pairs = [(dropped[0].flatten()[:-k], dropped[0].flatten()[k:]) for k in (1, 2, 3)]
    for a, b in [*pairs, dropped]:          # neighbours, and the next draw, know nothing of them
        assert abs((a * b).mean() - p * p) < 5 * p / math.sqrt(a.numel())
    torch.manual_seed(0)
    assert torch.equal(dropout(x, p, True), draws[0])


def test_dropout_scales_the_gradient_as_it_scales_the_entries():
    x = torch.ones(7, 33, requires_grad=True)
    y = dropout(x, 0.3, True)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_in_evaluation_changes_nothing():
    x = torch.randn(3, 5)
    assert torch.equal(dropout(x, 0.5, False), x)


@pytest.mark.parametrize("L", [24, 500, 513])   # 500: in parts; 513: torch's kernel
def test_attention_in_bfloat16_and_its_gradients_are_as_exact_as_its_rounding(L):
    inputs = torch.randn(3, 2, 4, L, 8, generator=seeded()).bfloat16().requires_grad_()
    exact_inputs = inputs.detach().float().requires_grad_()
    attended = (torch.arange(L) < torch.tensor([[L], [L // 2]]))[:, None, None]
    for mask in (None, attended):
        exact = F.scaled_dot_product_attention(*exact_inputs, attn_mask=mask)
        out = attention(*inputs, mask)
        near(out.float(), exact, atol=0.03)
        gradients = [torch.autograd.grad((y.float() ** 2).sum(), x)[0].float()
                     for y, x in ((out, inputs), (exact, exact_inputs))]
        near(*gradients, atol=0.1)


def test_numbers_of_wanted_positions_make_few_shapes_and_the_same_scores():
    """For a new shape oneDNN compiles its products anew. Gradients are there for 0 and all, too."""
    model = small_model(AbsorbingGraph(21), dropout=0.0)
    x0 = small_batch(AbsorbingGraph(21))[0]
    sigma = torch.ones(len(x0))
    shapes = set()
    model.output_layer.linear.register_forward_hook(lambda _, inputs, out: shapes.add(out.shape))
    for number in range(0, x0.numel() + 1, 4):
        unknown = (torch.arange(x0.numel()) < number).view(x0.shape)
        xt = x0.where(~unknown, 21)
        log_score = model(xt, sigma, wanted=unknown)
        model.zero_grad()
        log_score.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            near(log_score[unknown], model(xt, sigma)[unknown], atol=1e-5)
    assert len(shapes) <= 4 + 1    # 0, 64, 128, 192 of 144 positions; and all of them


def test_the_gradient_of_a_protein_is_a_sum_over_its_positions_in_bfloat16_too():
    modulation = torch.zeros(2, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    spread(modulation, torch.tensor([0] * 1000 + [1])).sum().backward()   # 256 + 1 is 256 there
    assert modulation.grad[:, 0, 0].tolist() == [1000, 1]
