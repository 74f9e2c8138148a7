"""The SEDD network, its averages and checkpoints, against the official code and closed forms."""
import copy
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train_sedd_ddp
from ddp_setup import Ddp
from sedd import fast_cpu
from sedd import model as network
from sedd.diffusion import (
    AbsorbingGraph,
    UniformGraph,
    make_graph,
    make_noise,
    sample,
    sample_scheduled,
    score_entropy_loss,
)
from sedd.model import EMA, SEDD, Block, Head, flops_per_position, load_official
from sedd_cases import CASES, entries, near, seeded, small_batch, small_model
from training import fast_linear
from training.config import CommonOptim
from training.loop import rate_share

SMALL = train_sedd_ddp.Model(hidden_size=32, n_blocks=2, n_heads=4, cond_dim=16)
EACH_WAY = pytest.mark.usefixtures("each_way")


@pytest.fixture(params=["as on a CPU", "as on another device"])
def each_way(request, monkeypatch):
    """A CPU has functions of its own, which other devices do not take."""
    if request.param == "as on another device":
        for module in (network, fast_cpu, fast_linear):
            monkeypatch.setattr(module, "on_cpu", lambda x: False)


@pytest.fixture(scope="module")
def fixture(shared):
    return torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)


def official_model(fixture, graph_name, loaded=True, **kwargs):
    sizes = [fixture[f"cfg_{name}"] for name in ("hidden", "blocks", "heads", "cond")]
    case = entries(fixture, graph_name)
    scaled = case["scale_by_sigma"] == 1
    model = SEDD(case["vocab"], *sizes, scale_by_sigma=scaled, **kwargs)
    if loaded:      # the names are those of a model in DDP
        weights = entries(fixture, graph_name, "model")
        load_official(model, {f"module.{name}": value for name, value in weights.items()})
    return model.eval()


# ---- against the official code ----

@CASES
@EACH_WAY
def test_log_scores_agree_with_the_official_code(fixture, graph_name, noise_name):
    case = entries(fixture, graph_name, noise_name)
    xt = case["xt"]
    sigma = case["sigma"]
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
    """The log scores and the losses of a model on a case of the fixture; its gradient is made, as
    in training: from the log scores that are wanted."""
    xt, x0, sigma, dsigma = (case[name] for name in ("xt", "x0", "sigma", "dsigma"))
    everything = torch.ones_like(xt, dtype=torch.bool)
    graph = make_graph("absorb" if model.scale_by_sigma else "uniform",
                       model.vocab_size - model.scale_by_sigma)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        wanted = model(xt, sigma, wanted=graph.wanted(xt))
        with torch.no_grad():
            log_score = model(xt, sigma)
    loss, _ = score_entropy_loss(wanted, sigma, dsigma, xt, x0, graph, everything)
    loss.mean().backward()
    return log_score, loss


def compare_gradients(model, case, rtol_norms, rtol_tensors):
    """Compare with the official gradients: all norms, and two tensors, each relative."""
    near(torch.stack([p.grad.norm() for p in model.parameters()]), case["grad_norms"],
         rtol=rtol_norms)
    for grad, name in ((model.vocab_embed.embedding.grad, "grad_embed"),
                       (model.output_layer.linear.weight.grad, "grad_out_weight")):
        assert (grad - case[name]).norm() < rtol_tensors * case[name].norm()


@EACH_WAY
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype, by_onednn", [(torch.float32, False), (torch.float32, True),
                                              (torch.bfloat16, False)])
@CASES
def test_gradients_agree_with_the_official_code(  # noqa: PLR0913  (dimensions of a table)
        fixture, graph_name, noise_name, dtype, by_onednn, training, monkeypatch):
    monkeypatch.setattr(fast_linear, "onednn_is_faster", lambda *_: by_onednn)
    case = entries(fixture, graph_name, noise_name)
    model = official_model(fixture, graph_name, dropout=0.0).train(training)
    log_score, loss = backward(model, case, dtype)
    near(log_score, case["log_score"], atol=0.02)
    near(loss, case["loss"], rtol=3e-3, atol=1e-3)
    tolerances = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (0.01, 0.01)}
    compare_gradients(model, case, *tolerances[dtype])


@EACH_WAY
def test_three_training_steps_agree_with_the_official_code(fixture):
    case = entries(fixture, "absorb", "loglinear")
    expected = entries(fixture, "train3")
    model = official_model(fixture, "absorb")
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0)
    ema = EMA(model.parameters(), decay=0.9999)
    for step in range(len(expected["loss"])):
        optim.zero_grad()
        backward(model, case)
        optim.param_groups[0]["lr"] = 3e-4 * rate_share(step, int(expected["warmup"]), 100,
                                                          CommonOptim())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        ema.update(model.parameters())
    averages = dict(zip((name for name, _ in model.named_parameters()), ema.shadow_params))
    for kind, tensors in (("param", dict(model.named_parameters())), ("ema", averages)):
        values = entries(fixture, "train3", kind)
        assert values
        for name, value in values.items():  # Adam may flip the sign of a gradient of almost zero
            assert ((tensors[name] - value).abs() <= 2e-6).float().mean() >= 0.999


# ---- what stands in sedd/model.py is what trains ----

PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def training_loss(model, graph, dtype):
    """That of train_sedd_ddp.py, of a batch with padding."""
    x0, xt, mask, _, sigma, dsigma = small_batch(graph)
    batch = {"x0": x0, "xt": xt, "mask": mask, "sigma": sigma, "dsigma": dsigma, "full": False}
    loss, _ = train_sedd_ddp.micro_batch_loss(model, batch, graph, Ddp(), dtype)
    return loss


@EACH_WAY
@PRECISIONS
@pytest.mark.parametrize("changed", [Block, Head])
def test_a_change_of_forward_in_a_block_or_the_head_changes_the_loss(changed, dtype, monkeypatch):
    graph = AbsorbingGraph(21)
    torch.manual_seed(0)
    model = train_sedd_ddp.make_model(train_sedd_ddp.Config(model=SMALL), graph)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model.eval()            # no dropout: each loss can be computed again
    before = training_loss(model, graph, dtype)
    assert training_loss(model, graph, dtype) == before
    forward = changed.forward
    monkeypatch.setattr(changed, "forward", lambda *inputs: forward(*inputs).roll(1, -1))
    assert abs(training_loss(model, graph, dtype) / before - 1) > 1e-3


@EACH_WAY
@PRECISIONS
def test_every_part_of_the_network_is_called_in_training(dtype):
    """So hooks on it, and layers put in its place, as for LoRA, have their effect."""
    graph = AbsorbingGraph(21)
    model = train_sedd_ddp.make_model(train_sedd_ddp.Config(model=SMALL), graph)
    called = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    training_loss(model.train(), graph, dtype)
    assert {name for name, _ in model.named_modules()} - called == {"blocks"}   # a list


# ---- which log scores ----

@EACH_WAY
@pytest.mark.parametrize("training", [True, False])
def test_log_scores_that_are_not_wanted_are_0_and_pass_no_gradient_back(training):
    graph = UniformGraph(21)
    _, xt, mask, _, sigma, _ = small_batch(graph)
    wanted = torch.rand(xt.shape, generator=seeded()) < 0.3
    model = small_model(graph, dropout=0.0).train(training)
    gradients = []
    for given in (None, wanted):
        model.zero_grad()
        log_score = model(xt, sigma, mask, given)
        log_score[wanted].square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert not log_score[~wanted].any()
    near(log_score[wanted], model(xt, sigma, mask)[wanted], atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


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
    graph = AbsorbingGraph(21)
    X = 20
    logits = []
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


# ---- dropout ----

GATES = {"attention": 2, "MLP": 5}   # of the six parts of adaLN_modulation


@EACH_WAY
@pytest.mark.parametrize("closed", GATES)
def test_dropout_acts_on_each_branch_in_training(closed):
    graph = AbsorbingGraph(21)
    model = small_model(graph, dropout=0.5)
    for block in model.blocks:
        for parameter in block.adaLN_modulation.parameters():
            parameter.data.unflatten(0, (6, -1))[GATES[closed]] = 0
    _, xt, mask, _, sigma, _ = small_batch(graph)
    assert not torch.equal(model.train()(xt, sigma, mask), model(xt, sigma, mask))


def test_what_gradient_checkpointing_recomputes_has_the_same_dropout():
    graph = AbsorbingGraph(21)
    _, xt, mask, _, sigma, _ = small_batch(graph)
    gradients = []
    for again in (False, True):
        model = small_model(graph, dropout=0.5, gradient_checkpointing=again)
        torch.manual_seed(0)
        model.train()(xt, sigma, mask).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_under_autocast_the_noise_level_is_embedded_in_float32():
    graph = AbsorbingGraph(21)
    model = small_model(graph).eval()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    _, xt, mask, _, sigma, _ = small_batch(graph)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(xt, sigma, mask)
    assert torch.equal(*seen)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_in_low_precision_take_a_noise_level_in_float32(weights, autocast):
    graph = AbsorbingGraph(21)
    model = small_model(graph).eval()
    _, xt, mask, _, sigma, _ = small_batch(graph)
    with torch.no_grad():
        expected = model(xt, sigma.float(), mask)
        with torch.autocast("cpu", weights, enabled=autocast):
            log_score = model.to(weights)(xt, sigma.float(), mask)
    assert (log_score - expected).norm() < 0.1 * expected.norm()


def test_tokens_in_a_real_dtype_are_refused():
    graph = AbsorbingGraph(21)
    _, xt, mask, _, sigma, _ = small_batch(graph)
    with pytest.raises(ValueError, match="torch.int64 token ids"):
        small_model(graph)(xt.bfloat16(), sigma, mask)


@pytest.mark.parametrize("sampler", [sample, sample_scheduled])
def test_in_each_step_a_sampler_gives_the_network_the_total_noise_in_float32(sampler):
    """It is -ln(1 - (1 - eps) t), here at times t from 1 to 0.1."""
    given = []

    def even(xt, sigma, unmasked=None):
        given.append(sigma)
        return torch.zeros(*xt.shape, 22)

    # With so many residues, in each step some are unmasked.
    sampler(even, AbsorbingGraph(21), make_noise("loglinear", eps=1e-3), (2, 500), 6,
            generator=seeded(), eps=0.1)
    levels = torch.stack(given)
    t = torch.linspace(1, 0.1, 7, dtype=torch.float64)
    sigma = -torch.log1p(-(1 - 1e-3) * t)
    assert levels.dtype == torch.float32
    near(levels.double(), sigma[:, None].expand(-1, 2), rtol=1e-6)


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
    ema = EMA([p], decay=0.25)
    expected = 0.0
    for k, decay in enumerate((2 / 11, 3 / 12, 0.25, 0.25), start=1):
        p.data.fill_(k)
        ema.update([p])
        expected = decay * expected + (1 - decay) * k
        near(ema.shadow_params[0], torch.full((3,), expected), rtol=1e-6)


def test_averages_that_were_saved_go_on_as_if_they_had_not_been():
    p = torch.nn.Parameter(torch.zeros(3))
    straight = EMA([p], decay=0.25)      # the decay of the official schedule is still below that
    p.data.fill_(1)
    straight.update([p])
    loaded = EMA([p])
    loaded.load_state_dict(copy.deepcopy(straight.state_dict()))
    for number in (2, 3):
        p.data.fill_(number)
        straight.update([p])
        loaded.update([p])
        assert torch.equal(loaded.shadow_params[0], straight.shadow_params[0])


def test_parameters_that_are_not_trained_are_among_the_averages():
    """A file of weights lists the averages of all, by their order."""
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    averages = EMA(model.parameters()).state_dict()["shadow_params"]
    assert [p.shape for p in averages] == [p.shape for p in model.parameters()]


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


def test_averages_of_another_model_are_refused():
    saved = EMA(SEDD(22, 16, 1, 2, cond_dim=8).parameters()).state_dict()
    ema = EMA(SEDD(22, 16, 1, 2, cond_dim=8).parameters())
    with pytest.raises(ValueError, match="as in the model"):
        ema.load_state_dict({**saved, "shadow_params": saved["shadow_params"][::-1]})


# ---- work ----

def test_the_work_of_a_position_is_what_torch_counts():
    """Of forward and backward pass; torch also counts the layers of the noise level, 0.1 %."""
    model = SEDD(22, 32, 2, 4, cond_dim=4)
    xt = torch.randint(0, 22, (2, 64))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(xt, torch.rand(2)).sum().backward()
    expected = counter.get_total_flops() / xt.numel()
    assert flops_per_position(model, 64) == pytest.approx(expected, rel=2e-3)
