"""The SEDD network, its averages and checkpoints, against the official code and closed forms."""
import copy
import math

import pytest
import torch
import torch.nn.functional as F

from training import fast_linear
from sedd import model as sedd_model
from sedd_cases import CASES, entries, near, seeded
from sedd.diffusion import AbsorbingGraph, make_graph, make_noise, score_entropy_loss
from sedd.model import EMA, SEDD, add_branch, attend, load_official, spread
from training.loop import rate_share


@pytest.fixture(scope="module")
def fixture(shared):
    return torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)


def official_model(fixture, graph_name, loaded=True, **kwargs):
    sizes = [fixture[f"cfg_{key}"] for key in ("hidden", "blocks", "heads", "cond")]
    of_graph = entries(fixture, graph_name)
    scaled = of_graph["scale_by_sigma"] == 1
    model = SEDD(of_graph["vocab"], *sizes, scale_by_sigma=scaled, **kwargs)
    if loaded:      # the names are those of a model in DDP
        weights = entries(fixture, graph_name, "model")
        load_official(model, {f"module.{name}": value for name, value in weights.items()})
    return model.eval()


def small_model(graph, **kwargs):
    """A small model whose every parameter matters: what starts at zero is filled."""
    torch.manual_seed(0)
    model = SEDD(graph.vocab_size, 32, 2, 4, cond_dim=16, scale_by_sigma=graph.absorb, **kwargs)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "adaLN" in name or "output_layer.linear" in name:
                p.normal_(std=0.2)
    return model


def small_batch(graph):
    """x0, xt, a mask of different lengths, and t, sigma, dsigma of log-linear noise."""
    generator = seeded()
    mask = torch.arange(24) < torch.randint(12, 25, (6, 1), generator=generator)
    x0 = torch.randint(20, (6, 24), generator=generator).where(mask, 20)
    t = torch.rand(6, generator=generator, dtype=torch.float64)
    sigma, dsigma = make_noise("loglinear")(t)
    return x0, graph.corrupt(x0, sigma, generator).where(mask, 20), mask, t, sigma, dsigma


# ---- against the official code ----

@CASES
@pytest.mark.parametrize("on_cpu", [True, False])
def test_log_scores_agree_with_the_official_code(fixture, graph_name, noise_name, on_cpu,
                                                 monkeypatch):
    monkeypatch.setattr(sedd_model, "on_cpu", lambda x: on_cpu)     # False: as on other devices
    case = entries(fixture, graph_name, noise_name)
    xt, sigma = case["xt"], case["sigma"]
    model = official_model(fixture, graph_name)
    assert [name for name, _ in model.named_parameters()] == fixture["param_names"].split("\n")
    log_score = model(xt, sigma)
    near(log_score, case["log_score"], rtol=1e-4, atol=1e-4)
    assert (log_score.gather(-1, xt[..., None]) == 0).all()
    everything = torch.ones_like(xt, dtype=torch.bool)
    near(model(xt, sigma, everything), case["log_score"], rtol=1e-4, atol=1e-4)
    fresh = official_model(fixture, graph_name, loaded=False)
    near(fresh(xt[:2], sigma[:2]), case["log_score_fresh"], rtol=1e-4, atol=1e-4)


def backward(model, case, dtype=torch.float32):
    """The log scores and the losses of a model on a case of the fixture; its gradient is made."""
    xt, x0, sigma, dsigma = (case[key] for key in ("xt", "x0", "sigma", "dsigma"))
    everything = torch.ones_like(xt, dtype=torch.bool)
    graph = make_graph("absorb" if model.scale_by_sigma else "uniform",
                       model.vocab_size - model.scale_by_sigma)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        log_score = model(xt, sigma)
    loss, _ = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, everything)
    loss.mean().backward()
    return log_score, loss


def compare_gradients(model, case, of_norms, of_tensors):
    """Compare with the official gradients: all norms, and two tensors, each relative."""
    near(torch.stack([p.grad.norm() for p in model.parameters()]), case["grad_norms"],
         rtol=of_norms)
    for found, key in ((model.vocab_embed.embedding.grad, "grad_embed"),
                       (model.output_layer.linear.weight.grad, "grad_out_weight")):
        assert (found - case[key]).norm() < of_tensors * case[key].norm()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype, onednn, tolerances", [
    (torch.float32, False, (1e-3, 1e-4)), (torch.float32, True, (1e-3, 1e-4)),
    (torch.bfloat16, False, (0.01, 0.01))])
@CASES
def test_gradients_agree_with_the_official_code(fixture, graph_name, noise_name, dtype, onednn,
                                                tolerances, training, monkeypatch):
    monkeypatch.setattr(fast_linear, "onednn_is_faster", lambda *_: onednn)
    case = entries(fixture, graph_name, noise_name)
    model = official_model(fixture, graph_name, dropout=0.0).train(training)
    log_score, loss = backward(model, case, dtype)
    scored = case["xt"] == model.vocab_size - 1 if graph_name == "absorb" else slice(None)
    near(log_score[scored], case["log_score"][scored], atol=0.02)
    near(loss, case["loss"], rtol=3e-3, atol=1e-3)
    compare_gradients(model, case, *tolerances)


def test_three_training_steps_agree_with_the_official_code(fixture):
    case, expected = entries(fixture, "absorb", "loglinear"), entries(fixture, "train3")
    model = official_model(fixture, "absorb")
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0)
    ema = EMA(model.parameters(), decay=0.9999)
    for step in range(len(expected["loss"])):
        optim.zero_grad()
        backward(model, case)
        optim.param_groups[0]["lr"] = 3e-4 * rate_share(step, int(expected["warmup"]), 100)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        ema.update(model.parameters())
    averages = dict(zip((name for name, _ in model.named_parameters()), ema.shadow_params))
    for kind, found in (("param", dict(model.named_parameters())), ("ema", averages)):
        values = entries(fixture, "train3", kind)
        assert values
        for name, value in values.items():  # Adam may flip the sign of a gradient of almost zero
            assert ((found[name] - value).abs() <= 2e-6).float().mean() >= 0.999


# ---- closed forms ----

def test_init_logits_is_the_spread_of_fresh_logits_and_lets_the_gradient_into_the_blocks():
    graph = make_graph("uniform", 21)                       # its log scores are the logits
    _, xt, mask, _, sigma, _ = small_batch(graph)
    torch.manual_seed(0)
    model = SEDD(21, 64, 1, 2, cond_dim=8, scale_by_sigma=False, init_logits=3.0)
    log_score = model(xt, sigma, mask)
    log_score.square().sum().backward()
    assert abs(log_score[torch.arange(21) != xt[..., None]].std() - 3) < 0.5
    assert model.blocks[0].adaLN_modulation.bias.grad.any()


def test_subs_makes_the_score_entropy_cross_entropy_over_t():
    graph, X, logits = AbsorbingGraph(21), 20, []
    model = small_model(graph, parameterization="subs", forbidden=(X,)).double().eval()
    x0, xt, mask, t, sigma, dsigma = small_batch(graph)
    model.output_layer.register_forward_hook(lambda module, args, out: logits.append(out))
    log_score = model(xt, sigma, mask)
    loss, _ = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, mask)
    log_p = logits[0][..., :20].log_softmax(-1)          # over 20 amino acids: neither X nor mask
    cross_entropy = -log_p.gather(-1, x0.clamp(max=19)[..., None])[..., 0]
    masked = xt == graph.mask_id
    near(loss, torch.where(masked & mask, cross_entropy, 0.0).sum(-1) / t, rtol=1e-9, atol=1e-9)
    r = 1 / torch.expm1(sigma)[:, None].expand_as(xt)
    near(log_score[masked][:, :20].exp().sum(-1), r[masked], rtol=1e-9)
    assert (log_score[masked][:, X] == -math.inf).all()
    assert (log_score.gather(-1, xt[..., None]) == 0).all()
    loss.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


# ---- dtypes, dropout ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_each_entry_alike_and_keeps_the_mean(p, dtype):
    B, L, H = 8, 127, 129                   # no multiple of 4
    torch.manual_seed(0)
    h, branch, gate = torch.zeros(B, L, H), torch.ones(B, L, H, dtype=dtype), torch.ones(B, 1, 1)
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


def test_numbers_of_unknown_residues_make_few_shapes_and_the_scores_of_evaluation():
    """For a new shape oneDNN compiles its products anew. Gradients are there for 0 and all, too."""
    model, x0 = small_model(AbsorbingGraph(21), dropout=0.0), small_batch(AbsorbingGraph(21))[0]
    shapes, sigma = set(), torch.ones(len(x0))
    model.blocks[-1].mlp.register_forward_hook(lambda _, inputs, out: shapes.add(out.shape))
    for number in range(0, x0.numel() + 1, 4):
        unknown = (torch.arange(x0.numel()) < number).view(x0.shape)
        xt = x0.where(~unknown, 21)
        in_training = model.train()(xt, sigma)
        model.zero_grad()
        in_training.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            near(in_training[unknown], model.eval()(xt, sigma)[unknown], atol=1e-5)
    assert len(shapes) <= 4 + 1    # 0, 64, 128, 192 of 144 positions; and that of the evaluation


def test_the_gradient_of_a_protein_is_a_sum_over_its_positions_in_bfloat16_too():
    modulation = torch.zeros(2, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    spread(modulation, torch.tensor([0] * 1000 + [1])).sum().backward()   # 256 + 1 is 256 there
    assert modulation.grad[:, 0, 0].tolist() == [1000, 1]


def test_dropout_acts_in_training():
    graph = AbsorbingGraph(21)
    model, (_, xt, mask, _, sigma, _) = small_model(graph, dropout=0.5), small_batch(graph)
    assert not torch.equal(model.train()(xt, sigma, mask), model(xt, sigma, mask))


# ---- published weights and averages ----

def test_official_checkpoints_load_with_and_without_their_averages(fixture):
    state = entries(fixture, "absorb", "model")
    shadow = [value + 1 for name, value in state.items() if name != "rotary_emb.inv_freq"]
    checkpoint = {"model": {f"module.{name}": value for name, value in state.items()}, "step": 7,
                  "ema": {"decay": 0.9999, "num_updates": 7, "shadow_params": shadow}}
    model = official_model(fixture, "absorb", loaded=False)
    assert load_official(model, checkpoint) == "ema"
    assert all(torch.equal(p, state[name] + 1) for name, p in model.named_parameters())
    assert load_official(model, checkpoint, use_ema=False) == "model"
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_weights_of_another_model_are_refused_by_name_and_change_nothing():
    model = SEDD(22, 16, 2, 2, cond_dim=8)
    before = copy.deepcopy(model.state_dict())
    good = {name: value + 1 for name, value in before.items()}
    shadow = list(good.values())
    cases = [(SEDD(22, 16, 1, 2, cond_dim=8).state_dict(), "missing blocks.1.norm1.weight"),
             ({**good, "extra": torch.ones(1)}, "unexpected extra"),
             ({**good, "rotary_emb.inv_freq": torch.ones(2)}, "heads of width 4"),
             ({"model": good, "ema": {"shadow_params": shadow[:-1]}}, "shadow_params"),
             ({"model": good, "ema": {"shadow_params": shadow[::-1]}}, "vocab_embed.embedding is")]
    for state, match in cases:
        with pytest.raises(ValueError, match=match):
            load_official(model, state)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_averages_follow_the_official_schedule():
    p = torch.nn.Parameter(torch.zeros(3))
    ema, expected = EMA([p], decay=0.25), 0.0
    for k, decay in enumerate((2 / 11, 3 / 12, 0.25, 0.25), start=1):
        p.data.fill_(k)
        ema.update([p])
        expected = decay * expected + (1 - decay) * k
        near(ema.shadow_params[0], torch.full((3,), expected), rtol=1e-6)


def test_averages_are_swapped_in_and_back_even_when_the_block_fails():
    model = SEDD(22, 16, 1, 2, cond_dim=8).to(torch.bfloat16)
    ema = EMA(model.parameters())
    for s in ema.shadow_params:
        s.add_(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), ema.applied(model):
        for p, s in zip(model.parameters(), ema.shadow_params):
            assert torch.equal(p, s.bfloat16()) and s.dtype == torch.float32
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    saved = ema.state_dict()
    with pytest.raises(ValueError, match="index 0"):
        ema.load_state_dict({**saved, "shadow_params": saved["shadow_params"][::-1]})
