"""The mathematics of SEDD against the official code, closed forms and exactly enumerable models."""
import math

import pytest
import torch

from sedd.diffusion import (
    AbsorbingGraph,
    independent_log_score,
    make_graph,
    make_noise,
    sample,
    sample_scheduled,
    score_entropy_loss,
    stratified_times,
)
from sedd_cases import BOTH_GRAPHS, CASES, entries, near, seeded

FIXTURE_NOISE = {"loglinear": dict(eps=1e-3), "geometric": dict(sigma_min=1e-5, sigma_max=20.0)}
PREDICTORS = pytest.mark.parametrize("predictor", ["euler", "analytic"])


@pytest.fixture(scope="module")
def fixture(shared):
    return torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)


def official(fixture, graph_name, noise_name):
    """The fixture's graph, noise, and its entries of this pair."""
    noise = make_noise(noise_name, **FIXTURE_NOISE[noise_name])
    graph = make_graph(graph_name, fixture["cfg_tokens"])
    return graph, noise, entries(fixture, graph_name, noise_name)


# ---- noise ----

@pytest.mark.parametrize("noise_name", ["loglinear", "geometric"])
def test_noise_agrees_with_the_official_schedule(fixture, noise_name):
    sigma, dsigma = make_noise(noise_name, **FIXTURE_NOISE[noise_name])(fixture["noise/t"])
    case = entries(fixture, "noise", noise_name)
    near(sigma[:-1], case["total"][:-1], rtol=1e-5)
    near(sigma[-1:], case["total"][-1:], rtol=1e-4)             # log1p near -0.999
    near(dsigma, case["rate"], rtol=1e-5)


@pytest.mark.parametrize("noise_name", ["loglinear", "geometric", "cosine"])
def test_dsigma_is_the_derivative_of_sigma_and_the_dtype_is_that_of_t(noise_name):
    t = torch.linspace(1e-5, 1, 1001, dtype=torch.float64, requires_grad=True)
    sigma, dsigma = make_noise(noise_name)(t)
    derivative, = torch.autograd.grad(sigma.sum(), t)
    near(dsigma, derivative, rtol=1e-9)
    assert (sigma.diff() > 0).all() and sigma.dtype == torch.float64
    for found, exact in zip(make_noise(noise_name)(t.detach().float()), (sigma, dsigma)):
        assert found.dtype == torch.float32
        near(found.double(), exact.detach(), rtol=2e-3, atol=1e-9)


def test_cosine_noise_leaves_only_eps_of_the_residues_clean_at_the_end():
    sigma, _ = make_noise("cosine", eps=1e-9)(torch.tensor([0, 0.5, 1], dtype=torch.float64))
    clean = torch.tensor([1, math.cos(math.pi / 4), 1e-9], dtype=torch.float64)
    near(torch.exp(-sigma), clean, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_of_the_times_of_a_batch_each_is_in_its_own_part_of_the_whole(offset):
    parts = torch.tensor([3, 0, 4, 2, 1])
    times = stratified_times(5, offset, parts, eps=0.5)     # parts of a tenth, from 0.5 to 1
    near(times, 0.5 + 0.1 * (parts.double() + offset), rtol=1e-12)


# ---- graphs and score entropy against the official code ----

@CASES
def test_rates_and_transitions_agree_with_the_official_code(fixture, graph_name, noise_name):
    graph, _, case = official(fixture, graph_name, noise_name)
    near(graph.transp_rate(case["xt"], torch.float32), case["transp_rate"], atol=1e-6)
    near(graph.transp_transition(case["xt"], case["sigma"]), case["transp_transition"], atol=1e-6)
    if graph_name == "uniform":
        near(graph.transition(case["x0"], case["sigma"]), case["transition"], atol=1e-6)
    of_graph = entries(fixture, graph_name)
    near(graph.sample_limit((1000, 8), seeded()).unique(), of_graph["sample_limit_unique"])
    mask_id = -1 if graph.mask_id is None else graph.mask_id
    assert (graph.vocab_size, mask_id) == (of_graph["vocab"], of_graph["mask_id"])


@CASES
def test_reverse_steps_agree_with_the_official_code(fixture, graph_name, noise_name):
    graph, _, case = official(fixture, graph_name, noise_name)
    xt = case["xt"]
    score = case["log_score"].exp()
    expected = case["reverse_rate"]
    error = (graph.reverse_rate(xt, score) - expected).abs()
    size = expected.abs()
    assert (error <= 1e-4 * size + 1e-5 * size.amax(-1, keepdim=True)).all()
    clean = graph.staggered_score(score, case["sigma"])
    denoise = clean * graph.transp_transition(xt, case["sigma"])
    for found, name in ((graph.staggered_score(score, case["sigma_step"]), "staggered_score"),
                        (denoise[..., :graph.n_tokens], "denoise_probs")):
        near(found, case[name], rtol=1e-3, atol=1e-4 * max(1.0, case[name].abs().max().item()))


@CASES
def test_score_entropy_and_loss_agree_with_the_official_code(fixture, graph_name, noise_name):
    graph, noise, case = official(fixture, graph_name, noise_name)
    xt = case["xt"]
    x0 = case["x0"]
    sigma = case["sigma"]
    dsigma = case["dsigma"]
    everywhere = torch.ones_like(xt, dtype=torch.bool)
    entropy = graph.score_entropy(case["log_score"], sigma, xt, x0)
    loss, _ = score_entropy_loss(case["log_score"], sigma, dsigma, xt, x0, graph, everywhere)
    assert entropy.dtype == loss.dtype == torch.float32
    # The official float32 of the uniform graph loses digits by cancellation.
    near(entropy.double(), case["score_entropy_f64"], rtol=1e-4, atol=1e-5)
    near(loss.double(), case["loss_f64"], rtol=1e-4)
    sigma, dsigma = noise(case["t"].double())
    log_score = case["log_score"].double()
    loss, _ = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, everywhere)
    entropy = graph.score_entropy(log_score, sigma, xt, x0)
    near(entropy, case["score_entropy_f64"], rtol=1e-9, atol=1e-9)
    near(loss, case["loss_f64"], rtol=1e-9, atol=1e-9)


# ---- score entropy from closed forms ----

@BOTH_GRAPHS
def test_score_entropy_stays_finite_in_float32_from_tiny_to_full_noise(graph_name):
    graph = make_graph(graph_name, 21)
    sigma = torch.tensor([1e-6, 1e-4, 1.0, 20.0])
    x0 = torch.randint(20, (4, 50), generator=seeded())
    xt = graph.sample_limit((4, 50), seeded())
    log_score = torch.zeros(4, 50, graph.vocab_size, requires_grad=True)
    entropy = graph.score_entropy(log_score, sigma, xt, x0)
    exact = graph.score_entropy(log_score.double(), sigma.double(), xt, x0)
    gradient, = torch.autograd.grad(entropy.sum(), log_score)
    assert entropy.isfinite().all() and gradient.isfinite().all()
    near(entropy.double(), exact, rtol=1e-4, atol=1e-4)


@BOTH_GRAPHS
def test_what_does_not_count_reaches_neither_loss_nor_gradient(graph_name):
    graph = make_graph(graph_name, 21)
    x0 = torch.randint(20, (3, 40), generator=seeded(1))
    weight = torch.rand(3, 40, generator=seeded(2)) < 0.5
    x0 = torch.where(weight, x0, 20)
    sigma, dsigma = make_noise("loglinear")(torch.tensor([0.2, 0.5, 1.0]))
    xt = graph.corrupt(x0, sigma, seeded(3))
    clean = torch.randn(3, 40, graph.vocab_size, generator=seeded(4))
    junk = torch.tensor([math.nan, math.inf, 200.0])[:, None, None]
    # In the absorbing graph a residue that is not masked is known.
    counts = weight & (xt == graph.mask_id) if graph.absorb else weight
    spoilt = torch.where(counts[..., None], clean, junk)
    spoilt.requires_grad_()
    loss, count = score_entropy_loss(spoilt, sigma, dsigma, xt, x0, graph, weight)
    each = dsigma[:, None] * graph.score_entropy(clean, sigma, xt, x0)
    near(loss.detach(), torch.where(weight, each, 0.0).sum(-1), rtol=1e-6)
    assert count.tolist() == weight.sum(-1).tolist()
    gradient, = torch.autograd.grad(loss.sum(), spoilt)
    assert gradient.isfinite().all() and (gradient[counts] != 0).any()
    assert (gradient[~counts] == 0).all()


def test_bfloat16_scores_are_summed_in_float32():
    graph = AbsorbingGraph(20)
    xt = torch.full((1, 8), 20)
    x0 = torch.zeros(1, 8, dtype=torch.int64)
    log_score = torch.zeros(1, 8, 21, dtype=torch.bfloat16)
    one = torch.ones(1)
    loss, _ = score_entropy_loss(log_score, one, one, xt, x0, graph, xt == 20)
    r = 1 / math.expm1(1)
    near(loss, torch.tensor([8 * (20 + r * (math.log(r) - 1))]), rtol=1e-6)


@BOTH_GRAPHS
def test_corruption_draws_from_the_transition(graph_name):
    graph = make_graph(graph_name, 21)
    n = 50_000
    sigma = torch.tensor([0.01, 0.5, 3.0])
    x0 = torch.full((3, n), 7)
    xt = graph.corrupt(x0, sigma, seeded())
    p = graph.transition(x0[:, :1], sigma)[:, 0]
    share = torch.stack([row.bincount(minlength=graph.vocab_size) for row in xt]) / n
    assert ((share - p).abs() <= 4.5 * (p * (1 - p) / n).sqrt() + 1e-6).all()


# ---- a model that is exact: the data are two residues of known joint distribution ----

class Table:
    """p0 over two residues of n tokens; exact log scores by enumeration, in float64."""

    def __init__(self, graph, seed=0):
        n = graph.n_tokens
        self.graph = graph
        logits = 2 * torch.randn(n * n, generator=seeded(seed), dtype=torch.float64)
        self.p0 = logits.softmax(0).view(n, n)

    def marginal(self, sigma):
        """p_t over pairs of tokens, (V, V)."""
        clean = torch.arange(self.graph.n_tokens)[None]
        forward = self.graph.transition(clean, torch.tensor([sigma], dtype=torch.float64))[0]
        return forward.T @ self.p0 @ forward

    def __call__(self, xt, sigma):
        assert sigma.shape == (len(xt),) and (sigma == sigma[0]).all()
        log_p = self.marginal(sigma[0].item()).log()
        rows = torch.stack([log_p[:, xt[:, 1]].T, log_p[xt[:, 0]]], dim=1)      # (B, 2, V)
        return rows - rows.gather(-1, xt[..., None])


@BOTH_GRAPHS
@pytest.mark.parametrize("noise_name", ["loglinear", "geometric", "cosine"])
def test_the_loss_of_the_exact_score_integrates_to_the_entropy_of_the_data(graph_name, noise_name):
    # The bound is tight for the exact score in the mean over x0. Sum over all xt, x0, quadrature
    # over t; left out are t < eps and, in the absorbing graph, the exp(-sigma(1)) unmasked at the
    # end: below 0.5 %.
    graph = make_graph(graph_name, 3)
    noise = make_noise(noise_name)
    table = Table(graph)
    eps = 1e-5
    tokens = torch.arange(graph.vocab_size)
    clean = torch.arange(3)
    xt, x0 = torch.cartesian_prod(tokens, tokens, clean, clean).split(2, dim=1)     # each (S, 2)
    everywhere = torch.ones_like(xt, dtype=torch.bool)
    nodes = torch.linspace(math.log(eps), 0, 401, dtype=torch.float64)      # ln t: steep near t = 0
    bound = 2 * graph.prior_kl(noise(torch.ones(1, dtype=torch.float64))[0])
    for log_t, width in zip((nodes[:-1] + nodes[1:]) / 2, nodes.diff()):
        t = log_t.exp()
        sigma, dsigma = (value.expand(len(xt)) for value in noise(t[None]))
        forward = graph.transition(clean[None], sigma[:1])[0]
        p = table.p0[x0[:, 0], x0[:, 1]] * forward[x0, xt].prod(1)
        loss, _ = score_entropy_loss(table(xt, sigma), sigma, dsigma, xt, x0, graph, everywhere)
        bound += width * t * (p * torch.where(p > 0, loss, 0.0)).sum()
    entropy = -(table.p0 * table.p0.log()).sum()
    assert abs(bound / entropy - 1) < 5e-3


# ---- sampling ----

@BOTH_GRAPHS
@pytest.mark.parametrize("steps, eps", [(1, 1e-5), (5, 1e-5), (2, 0.5)])
def test_analytic_sampling_of_one_residue_is_exact(graph_name, steps, eps):
    graph = make_graph(graph_name, 6)
    noise = make_noise("loglinear", eps=1e-6)
    B = 40_000
    p0 = torch.tensor([0.4, 0.3, 0.2, 0.09, 0.01, 0.0], dtype=torch.float64)
    possible = p0.clamp(min=1e-12)

    def exact(xt, sigma):
        return independent_log_score(possible, sigma.double(), xt, graph)

    x = sample(exact, graph, noise, (B, 1), steps, "analytic", generator=seeded(), eps=eps)
    found = x.flatten().bincount(minlength=6) / B
    assert ((found - p0).abs() <= 4 * (p0 * (1 - p0) / B).sqrt() + 3e-5).all()


def test_an_euler_step_has_the_rate_of_its_beginning():
    graph = make_graph("absorb", 20)
    noise = make_noise("geometric", sigma_min=0.1, sigma_max=1.0)
    B = 40_000
    seen = []
    sample(lambda xt, sigma: torch.full((B, 1, 21), math.log(0.02)), graph, noise, (B, 1), 4,
           "euler", generator=seeded(), on_step=lambda step, xt: seen.append(xt))
    _, rate = noise(torch.ones((), dtype=torch.float64))
    share = float(rate) / 4 * 20 * 0.02     # of 20 letters with the score 0.02
    found = float((seen[0] != graph.mask_id).double().mean())
    assert found == pytest.approx(share, abs=4 * (share * (1 - share) / B) ** 0.5)


def test_the_last_draw_removes_all_noise_whatever_the_predictor():
    graph = make_graph("uniform", 6)
    p = torch.eye(6, dtype=torch.float64)[2]     # the data are this token alone

    def exact(xt, sigma):
        return independent_log_score(p, sigma.double(), xt, graph)

    x = sample(exact, graph, make_noise("loglinear"), (1000, 1), 1, "euler", generator=seeded(),
               eps=0.5)
    assert (x == 2).all()


@BOTH_GRAPHS
@PREDICTORS
def test_sampling_with_the_exact_score_gives_the_joint_distribution(graph_name, predictor):
    graph = make_graph(graph_name, 3)
    B = 20_000
    table = Table(graph)
    x = sample(table, graph, make_noise("loglinear"), (B, 2), 200, predictor, generator=seeded())
    found = (x[:, 0] * 3 + x[:, 1]).bincount(minlength=9) / B
    # 0.02 in total variation is sampling error and step size; drawn independently it would be 0.1.
    assert (found - table.p0.flatten()).abs().sum() / 2 < 0.02


@BOTH_GRAPHS
@PREDICTORS
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_neither_the_mask_nor_a_forbidden_token_is_ever_returned(graph_name, predictor, steps):
    graph = make_graph(graph_name, 21)
    noise = make_noise("geometric")
    even = torch.zeros(20, 30, graph.vocab_size)
    log_scores = {"even": even, "no score at all": even - math.inf, "overflow": even + 300,
                  "all on X": even - 50 + 100 * (torch.arange(graph.vocab_size) == 20)}
    for name, log_score in log_scores.items():
        x = sample(lambda xt, sigma: log_score, graph, noise, (20, 30), steps, predictor,
                   forbidden=(20, 3), generator=seeded())
        assert x.dtype == torch.int64 and x.shape == (20, 30)
        assert ((x >= 0) & (x < 20) & (x != 3)).all(), name
        assert len(x.unique()) > 10 or name == "overflow"       # without any weight: drawn evenly


@BOTH_GRAPHS
@PREDICTORS
def test_infilling_keeps_the_fixed_residues_in_every_step(graph_name, predictor):
    graph = make_graph(graph_name, 21)
    tokens = torch.randint(21, (8, 20), generator=seeded(1))
    where = torch.rand(8, 20, generator=seeded(2)) < 0.4
    steps = []

    def model(xt, sigma):
        assert torch.equal(xt[where], tokens[where])
        return torch.zeros(*xt.shape, graph.vocab_size)

    x = sample(model, graph, make_noise("cosine"), (8, 20), 6, predictor, fixed=(tokens, where),
               forbidden=(20,), generator=seeded(), on_step=lambda step, _: steps.append(step))
    assert torch.equal(x[where], tokens[where]) and (x[~where] < 20).all()
    assert steps == list(range(7))


# ---- sampling whose steps of unmasking are drawn first ----

@PREDICTORS
def test_scheduled_sampling_with_the_exact_score_gives_the_joint_distribution(predictor):
    graph = make_graph("absorb", 3)
    B = 20_000
    table = Table(graph)
    x = sample_scheduled(lambda xt, sigma, _: table(xt, sigma), graph, make_noise("loglinear"),
                         (B, 2), 200, predictor, generator=seeded())
    found = (x[:, 0] * 3 + x[:, 1]).bincount(minlength=9) / B
    assert (found - table.p0.flatten()).abs().sum() / 2 < 0.02


@PREDICTORS
@pytest.mark.parametrize("noise", [make_noise("cosine"), make_noise("geometric")],
                         ids=["cosine", "geometric"])
def test_both_samplers_unmask_as_many_residues_in_each_step(noise, predictor):
    graph = AbsorbingGraph(4)
    B = 20_000
    masked = {}

    def even(xt, sigma, _=None):    # 4 equal scores, which sum to 1 / (e^sigma - 1)
        log_score = -torch.log(4 * torch.expm1(sigma))
        return log_score[:, None, None].repeat(1, 1, 5).scatter(-1, xt[..., None], 0.0)

    for sampler in (sample, sample_scheduled):
        shares = []
        sampler(even, graph, noise, (B, 1), 6, predictor, generator=seeded(),
                on_step=lambda step, xt: shares.append(float((xt == 4).double().mean())))
        masked[sampler] = torch.tensor(shares)
    assert len(masked[sample]) == 7
    # 5 standard errors of a difference of two shares
    assert (masked[sample] - masked[sample_scheduled]).abs().max() < 5 * (0.5 / B) ** 0.5


def test_scheduled_sampling_asks_the_network_only_when_a_residue_is_unmasked():
    graph = AbsorbingGraph(4)
    asked = []

    def even(xt, sigma, unmasked):
        assert (xt[unmasked] == graph.mask_id).all()
        asked.append(int(unmasked.sum()))
        return torch.zeros(*xt.shape, 5)

    sample_scheduled(even, graph, make_noise("loglinear"), (2, 3), 200, generator=seeded())
    assert min(asked) > 0
    assert sum(asked) == 2 * 3


def test_scheduled_sampling_keeps_the_fixed_residues():
    graph = AbsorbingGraph(21)
    tokens = torch.randint(20, (8, 20), generator=seeded(1))
    where = torch.rand(8, 20, generator=seeded(2)) < 0.4
    real = torch.arange(20) < torch.full((8, 1), 15)
    x = sample_scheduled(lambda xt, *_: torch.zeros(8, 20, 22), graph, make_noise("cosine"),
                         (8, 20), 6, fixed=(tokens, where), forbidden=(20, 3), mask=real,
                         generator=seeded())
    assert torch.equal(x[where], tokens[where])
    drawn = x[real & ~where]
    assert ((drawn < 20) & (drawn != 3)).all()
    assert (x[~real & ~where] == 20).all()


@pytest.mark.parametrize("graph, value, error, match", [
    (make_graph("uniform", 4), 0.0, ValueError, "uniform graph"),
    (AbsorbingGraph(7), 0.0, ValueError, r"\(2, 3, 8\)"),
    (AbsorbingGraph(4), math.nan, RuntimeError, "NaN")], ids=["uniform", "shape", "nan"])
def test_scheduled_sampling_refuses(graph, value, error, match):
    with pytest.raises(error, match=match):
        sample_scheduled(lambda xt, *_: torch.full((2, 3, 5), value), graph,
                         make_noise("loglinear"), (2, 3), 2)


def test_what_cannot_be_made_or_sampled_is_refused():
    graph = AbsorbingGraph(4)
    noise = make_noise("loglinear")
    even = torch.zeros(2, 3, 5)
    masked = (torch.full((2, 3), 4), torch.ones(2, 3, dtype=torch.bool))
    for match, kwargs in (("steps", dict(steps=0)), ("forbidden", dict(forbidden=(0, 1, 2, 3))),
                          ("fixed holds token 4", dict(fixed=masked)),
                          ("mask", dict(mask=torch.ones(2, 3)))):
        with pytest.raises(ValueError, match=match):
            sample(lambda xt, sigma: even, graph, noise, (2, 3), **{"steps": 2, **kwargs})
    with pytest.raises(RuntimeError, match="NaN"):
        sample(lambda xt, sigma: even * math.nan, graph, noise, (2, 3), 2)
    for name, wrong in (("cosine", dict(eps=1e-300)),
                        ("geometric", dict(sigma_min=2.0, sigma_max=1.0)),
                        ("geometric", dict(sigma_max=100.0))):
        with pytest.raises(ValueError, match="expected"):
            make_noise(name, **wrong)
