"""SEDD's network made fast on a CPU: what it computes otherwise than the plain one, and where.

That both agree with the official code is in test_sedd_model.py."""
import math

import pytest
import torch
import torch.nn.functional as F

from sedd import fast_cpu
from sedd.diffusion import AbsorbingGraph, UniformGraph
from sedd.fast_cpu import FastSEDD, add_branch, attend, spread
from sedd.model import SEDD
from sedd_cases import near, seeded, small_batch, small_model


@pytest.mark.parametrize("graph", [AbsorbingGraph(21), UniformGraph(21)])
def test_off_a_cpu_the_numbers_are_those_of_the_plain_network(graph, monkeypatch):
    _, xt, mask, _, sigma, _ = small_batch(graph)
    plain = small_model(graph, dropout=0.5)
    fast = small_model(graph, FastSEDD, dropout=0.5)
    found = []
    monkeypatch.setattr(fast_cpu, "on_cpu", lambda x: False)     # as on another device
    for model in (plain, fast):
        torch.manual_seed(0)
        log_score = model.train()(xt, sigma, mask, graph.wanted(xt))
        log_score.square().sum().backward()
        found.append([log_score, *(p.grad for p in model.parameters())])
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_a_fast_network_begins_with_the_weights_of_the_plain_one_under_their_names():
    plain, fast = (small_model(AbsorbingGraph(21), kind).state_dict() for kind in (SEDD, FastSEDD))
    assert list(fast) == list(plain)
    assert all(torch.equal(fast[name], value) for name, value in plain.items())


def test_what_is_recomputed_for_backward_has_the_same_gradient():
    graph = AbsorbingGraph(21)
    _, xt, mask, _, sigma, _ = small_batch(graph)
    gradients = []
    for checkpointing in (False, True):
        model = small_model(graph, FastSEDD, dropout=0.5, gradient_checkpointing=checkpointing)
        torch.manual_seed(0)
        model.train()(xt, sigma, mask, graph.wanted(xt)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_each_entry_alike_and_keeps_the_mean(p, dtype):
    B = 8                   # no multiple of 4
    L = 127
    H = 129
    torch.manual_seed(0)
    h = torch.zeros(B, L, H)
    branch = torch.ones(B, L, H, dtype=dtype)
    gate = torch.ones(B, 1, 1)
    found = [add_branch(h, branch, gate, p) for _ in range(2)]
    dropped = [(x == 0).double() for x in found]
    for x, zeros in zip(found, dropped):
        near(x[x != 0], torch.full_like(x[x != 0], 1 / (1 - p)), rtol=1e-4)
        for k in range(4):                  # four entries share a random number
            share = zeros.flatten()[k::4]
            assert abs(share.mean() - p) < 5 * math.sqrt(p * (1 - p) / len(share))
    pairs = [(dropped[0].flatten()[:-k], dropped[0].flatten()[k:]) for k in (1, 2, 3)]
    for a, b in [*pairs, dropped]:          # neighbours, and the next draw, know nothing of them
        assert abs((a * b).mean() - p * p) < 5 * p / math.sqrt(a.numel())
    torch.manual_seed(0)
    assert torch.equal(add_branch(h, branch, gate, p), found[0])


@pytest.mark.parametrize("L", [24, 500, 513])   # 500: keys filled up, in parts; 513: torch's kernel
def test_attention_in_bfloat16_and_its_gradients_are_as_exact_as_its_rounding(L):
    inputs = torch.randn(3, 2, 4, L, 8, generator=seeded()).bfloat16().requires_grad_()
    exact_inputs = inputs.detach().float().requires_grad_()
    attended = (torch.arange(L) < torch.tensor([[L], [L // 2]]))[:, None, None]
    for mask in (None, attended):
        exact = F.scaled_dot_product_attention(*exact_inputs, attn_mask=mask)
        q, k, v = inputs
        found = attend(q * 8**-0.5, k, v, mask)
        near(found.float(), exact, atol=0.03)
        gradients = [torch.autograd.grad((out.float() ** 2).sum(), x)[0].float()
                     for out, x in ((found, inputs), (exact, exact_inputs))]
        near(*gradients, atol=0.1)


def test_numbers_of_wanted_positions_make_few_shapes_and_the_same_scores():
    """For a new shape oneDNN compiles its products anew. Gradients are there for 0 and all, too."""
    model = small_model(AbsorbingGraph(21), FastSEDD, dropout=0.0)
    x0 = small_batch(AbsorbingGraph(21))[0]
    sigma = torch.ones(len(x0))
    shapes = set()
    model.output_layer.linear.register_forward_hook(lambda _, inputs, out: shapes.add(out.shape))
    for number in range(0, x0.numel() + 1, 4):
        unknown = (torch.arange(x0.numel()) < number).view(x0.shape)
        xt = x0.where(~unknown, 21)
        found = model(xt, sigma, wanted=unknown)
        model.zero_grad()
        found.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            near(found[unknown], model(xt, sigma)[unknown], atol=1e-5)
    assert len(shapes) <= 4 + 1    # 0, 64, 128, 192 of 144 positions; and all of them


def test_the_gradient_of_a_protein_is_a_sum_over_its_positions_in_bfloat16_too():
    modulation = torch.zeros(2, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    spread(modulation, torch.tensor([0] * 1000 + [1])).sum().backward()   # 256 + 1 is 256 there
    assert modulation.grad[:, 0, 0].tolist() == [1000, 1]
