"""Score-entropy discrete diffusion (SEDD), the mathematics: noise, corruption, loss, sampling. No network.

    noise, graph = make_noise("loglinear"), make_graph("absorb", n_tokens=21)
    t = stratified_times(B, offset, permutation).float()
    sigma, dsigma = noise(t)                                    # (B,), (B,)
    xt = graph.corrupt(x0, sigma, generator)                    # (B, L)
    loss, count = score_entropy_loss(model(xt, sigma, mask), sigma, dsigma, xt, x0, graph, weight)
    proteins = sample(lambda xt, sigma: model(xt, sigma), graph, noise, shape=(B, L), steps=256)

B batch, L residues, V tokens; x0 clean and xt noised tokens, (B, L) int64. sigma is the total noise and
dsigma = d sigma/dt its rate, both (B,): one noise level per protein. A log score l[y], (B, L, V), is the
network's estimate of ln p_t(xt with this residue changed to y) - ln p_t(xt), 0 at y = xt. Losses in nats.
Source: Lou, Meng, Ermon 2024, arXiv 2310.16834. Needs torch only; reads and writes nothing.
"""
import math

import torch


class LogLinearNoise:
    """sigma = -ln(1 - (1 - eps) t): the noised share 1 - exp(-sigma) = (1 - eps) t grows linearly."""

    def __init__(self, eps=1e-3):
        _check_eps(eps)
        self.eps = eps

    def __call__(self, t):
        noised = (1 - self.eps) * _check_times(t)
        return -torch.log1p(-noised), (1 - self.eps) / (1 - noised)


class GeometricNoise:
    """sigma = sigma_min^(1 - t) sigma_max^t. sigma_max must be large: sampling starts from full noise."""

    def __init__(self, sigma_min=1e-4, sigma_max=20.0):
        if not 0 < sigma_min < sigma_max:
            raise ValueError(f"sigma_min = {sigma_min}, sigma_max = {sigma_max}; expected 0 < min < max.")
        self.sigma_min, self.sigma_max = sigma_min, sigma_max

    def __call__(self, t):
        sigma = self.sigma_min ** (1 - _check_times(t)) * self.sigma_max ** t
        return sigma, sigma * math.log(self.sigma_max / self.sigma_min)


class CosineNoise:
    """Noised share (1 - eps) (1 - cos(pi t / 2)): slow at first, full (up to eps) at t = 1."""

    def __init__(self, eps=1e-3):
        _check_eps(eps)
        self.eps = eps

    def __call__(self, t):
        angle = _check_times(t) * (math.pi / 2)
        noised = (1 - self.eps) * 2 * torch.sin(angle / 2) ** 2      # 1 - cos would cancel at small t
        return -torch.log1p(-noised), (1 - self.eps) * (math.pi / 2) * torch.sin(angle) / (1 - noised)


def make_noise(type, **kwargs):
    """The schedule named `type` ("loglinear", "geometric", "cosine") with its own keyword arguments."""
    choices = {"loglinear": LogLinearNoise, "geometric": GeometricNoise, "cosine": CosineNoise}
    if type not in choices:
        raise ValueError(f"noise type {type!r}; expected one of {', '.join(choices)}.")
    return choices[type](**kwargs)


def stratified_times(n, offset, permutation, eps=1e-3):
    """Time points for the n proteins of a global batch, one in each of n equal parts of [eps, 1].

    offset:      float in [0, 1), common to all strata: one random number per step is enough.
    permutation: (n,) int64, a permutation of 0..n-1: which protein gets which stratum.
    Returns t (n,) float64; each is uniform on [eps, 1] if offset is uniform, so the loss stays unbiased and
    its variance falls. An average over [eps, 1] times (1 - eps) is the integral over it.
    Raises ValueError if permutation is not a permutation or offset is outside [0, 1).
    """
    if not 0 <= offset < 1:
        raise ValueError(f"offset = {offset}; expected a number in [0, 1).")
    if permutation.shape != (n,) or not torch.equal(permutation.sort().values.cpu(), torch.arange(n)):
        raise ValueError(f"permutation has shape {tuple(permutation.shape)} or repeats a stratum; expected "
                         f"each of 0..{n - 1} once, as torch.randperm({n}) gives.")
    return eps + (1 - eps) * ((permutation.double() + offset) / n % 1)


class Graph:
    """Which token may turn into which, and the formulas that follow. sigma (B,) > 0.

    corrupt(x0, sigma, generator)  x0 with noise. The draw is made on the generator's device: a CPU generator
                                   gives the same noise whatever accelerator x0 is on.
    rate(x), transp_rate(x)        forward rates from x to every token, from every token to x: (B, L, V).
    transition(x0, sigma)          p(xt | x0) over all xt, (B, L, V).
    transp_transition(x, sigma)    p(xt = x | x0) over all x0, (B, L, V).
    staggered_score(score, step)   from the ratios at sigma to those of p at sigma - step over p(xt) at sigma:
                                   exp(-step Q) score, (B, L, V); step (B,).
    reverse_rate(x, score)         rates of the reverse process, (B, L, V); score = exp(log_score).
    score_entropy(log_score, sigma, xt, x0)  (B, L) >= 0, with the constants that make its minimum 0; float32
                                   at least, float64 for a float64 log_score.
    sample_limit(shape, generator, device)   tokens of full noise.
    prior_kl(sigma1)               KL(p(xt | x0) || full noise), nats per residue, at sigma1 = sigma(t = 1).
    Tokens x, x0, xt are (B, L) int64. Wrong shapes or dtypes raise ValueError.
    """

    def reverse_rate(self, x, score):
        rate = (self.transp_rate(x, score.dtype) * score).scatter(-1, x[..., None], 0.0)
        return rate.scatter(-1, x[..., None], -rate.sum(-1, keepdim=True))       # each row sums to 0


class AbsorbingGraph(Graph):
    """Tokens 0..n_tokens-1 turn into the mask, id n_tokens, and stay there. V = n_tokens + 1."""
    absorb = True

    def __init__(self, n_tokens):
        self.n_tokens, self.vocab_size, self.mask_id = n_tokens, n_tokens + 1, n_tokens

    def corrupt(self, x0, sigma, generator=None):
        return x0.masked_fill(_moved(x0, sigma, generator), self.mask_id)

    def rate(self, x, dtype=torch.float32):
        return self.at_mask(x.device).to(dtype) - _one_hot(x, self.vocab_size, dtype)

    def transp_rate(self, x, dtype=torch.float32):
        return (x == self.mask_id)[..., None].to(dtype) - _one_hot(x, self.vocab_size, dtype)

    def transition(self, x0, sigma):
        sigma = _per_token(sigma, x0)
        moved = self.at_mask(x0.device)
        return torch.exp(-sigma) * _one_hot(x0, self.vocab_size, sigma.dtype) - torch.expm1(-sigma) * moved

    def transp_transition(self, x, sigma):
        sigma = _per_token(sigma, x)
        masked = (x == self.mask_id)[..., None]
        return torch.exp(-sigma) * _one_hot(x, self.vocab_size, sigma.dtype) - torch.expm1(-sigma) * masked

    def staggered_score(self, score, step):
        step = _per_token(step, score).to(score.dtype)
        lost = torch.expm1(step) * score.sum(-1, keepdim=True)
        return score * step.exp() - lost * self.at_mask(score.device)

    def score_entropy(self, log_score, sigma, xt, x0):
        # 0 where xt is not the mask. At a mask, r = p(x0)/p(mask) = 1/(e^sigma - 1): sum of s[y] over the
        # real y, - r l[x0] + r (ln r - 1). Its minimum is at s[x0] = r, all other s[y] = 0.
        log_score, sigma = _check_scores(self, log_score, sigma, xt, x0)
        masked = xt == self.mask_id
        log_score = torch.where(masked[..., None], log_score, 0.0)  # before use: a gradient 0 x inf is NaN
        log_r = -torch.log(torch.expm1(sigma))
        target = log_score.gather(-1, x0[..., None])[..., 0]
        entropy = log_score[..., :-1].exp().sum(-1) - log_r.exp() * (target - log_r + 1)
        return torch.where(masked, entropy, 0.0)

    def sample_limit(self, shape, generator=None, device=None):
        return torch.full(shape, self.mask_id, dtype=torch.int64, device=device)

    def prior_kl(self, sigma1):
        return 0.0      # formally infinite while a share exp(-sigma1) stays unmasked; taken as 0, as is usual

    def at_mask(self, device):
        return torch.arange(self.vocab_size, device=device) == self.mask_id      # (V,) bool


class UniformGraph(Graph):
    """Each of the n_tokens tokens turns into any other at rate 1/V. V = n_tokens; there is no mask."""
    absorb, mask_id = False, None

    def __init__(self, n_tokens):
        self.n_tokens = self.vocab_size = n_tokens

    def corrupt(self, x0, sigma, generator=None):
        moved = _moved(x0, sigma, generator)
        return torch.where(moved, self.sample_limit(x0.shape, generator, x0.device), x0)

    def rate(self, x, dtype=torch.float32):
        return 1 / self.vocab_size - _one_hot(x, self.vocab_size, dtype)

    def transition(self, x0, sigma):
        sigma = _per_token(sigma, x0)
        stay = torch.exp(-sigma) * _one_hot(x0, self.vocab_size, sigma.dtype)
        return stay - torch.expm1(-sigma) / self.vocab_size

    transp_rate, transp_transition = rate, transition       # both are symmetric

    def staggered_score(self, score, step):
        step = _per_token(step, score).to(score.dtype)
        return score * step.exp() - torch.expm1(step) / self.vocab_size * score.sum(-1, keepdim=True)

    def score_entropy(self, log_score, sigma, xt, x0):
        # Mean over y, without y = xt, of s[y] - q l[y] + q (ln q - 1), with q = p(y | x0)/p(xt | x0).
        # With E = e^sigma - 1 and rho = E/(E + V), which does not cancel at small sigma: q = rho if xt = x0;
        # else q = 1/rho = 1 + V/E at y = x0 and 1 elsewhere.
        log_score, sigma = _check_scores(self, log_score, sigma, xt, x0)
        V, E = self.vocab_size, torch.expm1(sigma)
        rho, log_rho = E / (E + V), -torch.log1p(V / E)
        own = log_score.gather(-1, xt[..., None])[..., 0]
        target = log_score.gather(-1, x0[..., None])[..., 0]
        pos = (log_score.exp().sum(-1) - own.exp()) / V
        base = (log_score.sum(-1) - own) / V
        same = rho * ((V - 1) / V * (log_rho - 1) - base)
        moved = (-(log_rho + 1) / rho - (V - 2)) / V - target / E - base
        return pos + torch.where(xt == x0, same, moved)

    def sample_limit(self, shape, generator=None, device=None):
        source = generator.device if generator is not None else device
        return torch.randint(self.vocab_size, shape, generator=generator, device=source).to(device)

    def prior_kl(self, sigma1):
        V, stay = self.vocab_size, math.exp(-float(sigma1))
        own, other = (V - 1) * stay, -stay                # V p - 1 for the token of x0 and for each other one
        return ((1 + own) * math.log1p(own) + (V - 1) * (1 + other) * math.log1p(other)) / V


def make_graph(type, n_tokens):
    """The graph named `type` ("absorb" or "uniform") over n_tokens real tokens."""
    choices = {"absorb": AbsorbingGraph, "uniform": UniformGraph}
    if type not in choices:
        raise ValueError(f"graph type {type!r}; expected one of {', '.join(choices)}.")
    return choices[type](n_tokens)


def independent_log_score(p, sigma, xt, graph):
    """Exact log scores (B, L, V) where residues are independent: the law of each is p (n_tokens,), float64.

    sigma (B,) float64; xt (B, L) int64. -inf at tokens that p makes impossible.
    """
    x0 = torch.arange(graph.n_tokens, device=xt.device).expand(len(sigma), -1)
    log_pt = torch.log(torch.einsum("n,bnv->bv", p, graph.transition(x0, sigma)))        # law of a noised residue
    return log_pt[:, None] - log_pt.gather(-1, xt)[..., None]


def score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, weight):
    """dsigma x score entropy, summed over the residues of each protein that count.

    log_score (B, L, V); sigma, dsigma (B,); xt, x0 (B, L) int64; weight (B, L) bool, True = counts (a real
    residue that is not X). Elsewhere log_score may even be NaN: neither value nor gradient sees it.
    Returns (sums (B,) in nats, counts (B,) int64). sums.sum() / counts.sum() is the loss per residue over any
    number of batches and ranks; sums.mean() is the official reduction. For t uniform on [eps, 1] the expected
    loss times (1 - eps), plus prior_kl per residue, bounds -ln p(x0) from above (but for t < eps).
    Raises ValueError for shapes or dtypes that do not agree.
    """
    if weight.dtype != torch.bool or weight.shape != xt.shape:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}; expected {tuple(xt.shape)} "
                         f"torch.bool, True where a residue counts.")
    if dsigma.shape != sigma.shape:
        raise ValueError(f"dsigma is {tuple(dsigma.shape)}, sigma {tuple(sigma.shape)}; expected both (B,).")
    entropy = graph.score_entropy(torch.where(weight[..., None], log_score, 0.0), sigma, xt, x0)
    loss = dsigma.to(entropy.dtype)[:, None] * torch.where(weight, entropy, 0.0)
    return loss.sum(-1), weight.sum(-1)


@torch.no_grad()
def sample(log_score_fn, graph, noise, shape, steps, predictor="analytic", denoise=True, fixed=None,
           forbidden=(), mask=None, generator=None, device=None, eps=1e-5, on_step=None):
    """Draw `shape` = (B, L) tokens by running the noise backwards from t = 1 to eps in `steps` equal steps.

    log_score_fn: (xt (B, L) int64, sigma (B,) float32) -> log_score (B, L, V). It is given sigma, never t.
    predictor:    "euler" (first order in the step) or "analytic" (Tweedie; residues independent in a step).
    denoise:      one more draw at the end that removes the noise left at t = eps (one more network call).
    fixed:        (tokens (B, L) int64, fixed_mask (B, L) bool): residues held from the start (infilling).
    forbidden:    token ids never returned, such as X.
    mask:         (B, L) bool, True = residue. The rest is padding: not drawn, returned as forbidden[0] (0 if
                  none). log_score_fn has to hand the same mask to its network.
    generator:    draws are made on its device, so that a CPU generator serves every accelerator.
    on_step:      called as on_step(step, xt) after each draw.
    Returns (B, L) int64 without the mask and without forbidden tokens, by construction: they have no weight
    in the last draw, and a residue left without any weight is drawn evenly from the others. (`fixed` may
    hold forbidden ones.)
    Raises ValueError for bad arguments, RuntimeError if log_score_fn returned NaN.
    """
    if predictor not in ("euler", "analytic"):
        raise ValueError(f"predictor {predictor!r}; expected 'euler' or 'analytic'.")
    if steps < 1:
        raise ValueError(f"steps = {steps}; expected at least 1.")
    device = torch.device("cpu" if device is None else device)
    B, V = shape[0], graph.vocab_size
    held, held_tokens = _held(graph, tuple(shape), fixed, mask, forbidden, device)
    returned = torch.tensor([y < graph.n_tokens and y not in forbidden for y in range(V)], device=device)
    if not returned.any() or not all(0 <= y < graph.n_tokens for y in forbidden):
        raise ValueError(f"forbidden = {tuple(forbidden)}; expected some of 0 to {graph.n_tokens - 1}.")
    # Until the last draw, uniform noise passes through forbidden tokens too; a mask must never turn into one.
    entered = returned | graph.at_mask(device) if graph.absorb else torch.ones_like(returned)

    # The schedule is evaluated beforehand, in float64 on the CPU: differences of sigma cancel in float32, and
    # a number read from the device in each step would stall it.
    sigma, dsigma = noise(torch.linspace(1, eps, steps + 1, dtype=torch.float64))
    step_sigma = torch.cat([sigma[:-1] - sigma[1:], sigma[-1:]])
    sigma, dsigma, step_sigma = (s.float().to(device) for s in (sigma, dsigma, step_sigma))

    xt = torch.where(held, held_tokens, graph.sample_limit(shape, generator, device))
    bad = torch.zeros((), dtype=torch.bool, device=device)
    draws = steps + 1 if denoise else steps
    for i in range(draws):
        log_score = log_score_fn(xt, sigma[i].expand(B))
        if log_score.shape != (*shape, V):
            raise ValueError(f"log_score_fn returned {tuple(log_score.shape)}; expected {(*shape, V)}, one "
                             f"log score per residue and token of the graph.")
        bad |= (log_score.isnan().any(-1) & ~held).any()
        score = log_score.to(torch.promote_types(log_score.dtype, torch.float32)).exp()
        stay = _one_hot(xt, V, score.dtype)
        if predictor == "euler" and i < steps:
            p = stay + (1 - eps) / steps * dsigma[i] * graph.reverse_rate(xt, score)
        else:
            step = step_sigma[i].expand(B)
            p = graph.staggered_score(score, step) * graph.transp_transition(xt, step)
        last = i == draws - 1
        p = torch.where((returned if last else entered) & (p > 0), p, 0.0)
        p = torch.where(p.any(-1, keepdim=True), p, returned.to(p.dtype) if last else stay)
        xt = torch.where(held, held_tokens, _draw(p, generator))
        if on_step is not None:
            on_step(i, xt)
    if bad:
        raise RuntimeError("log_score_fn returned NaN at residues to be sampled; are the weights finite?")
    return xt


def _draw(p, generator):
    """Index drawn with probability p / sum(p) over the last dimension; negative and NaN weights count as 0.

    The smallest of independent exponential times of rates p is the draw; p need not sum to 1.
    """
    source = generator.device if generator is not None else p.device
    u = torch.rand(p.shape, generator=generator, device=source).to(p.device)
    waiting = -torch.log(u).clamp(max=-1e-10)       # > 0 even if a device's log rounds u near 1 to 0
    return torch.where(p > 0, p / waiting, -1.0).argmax(-1)


def _held(graph, shape, fixed, mask, forbidden, device):
    """Which positions are not drawn, (B, L) bool, and the tokens they hold."""
    held = torch.zeros(shape, dtype=torch.bool, device=device)
    tokens = torch.full(shape, forbidden[0] if len(forbidden) else 0, dtype=torch.int64, device=device)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != shape:
            raise ValueError(f"mask is {tuple(mask.shape)} {mask.dtype}; expected {shape} torch.bool.")
        held = ~mask.to(device)
    if fixed is None:
        return held, tokens
    given, where = (x.to(device) for x in fixed)
    if (given.shape, given.dtype, where.shape, where.dtype) != (shape, torch.int64, shape, torch.bool):
        raise ValueError(f"fixed: ({tuple(given.shape)} {given.dtype}, {tuple(where.shape)} {where.dtype}), "
                         f"expected (int64 tokens, bool mask), both {shape}.")
    wrong = given[where & ((given < 0) | (given >= graph.n_tokens))]
    if len(wrong):
        raise ValueError(f"fixed holds token {wrong[0].item()}; expected 0 to {graph.n_tokens - 1}.")
    return held | where, torch.where(where, given, tokens)


def _check_eps(eps):
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps}; expected between 0 and 1: the share of residues left clean at t = 1.")


def _check_times(t):
    if not t.is_floating_point():
        raise ValueError(f"t is {t.dtype}; expected floating-point times in [0, 1].")
    return t


def _per_token(sigma, x):
    """sigma (B,) as (B, 1, 1), at least float32."""
    if sigma.shape != x.shape[:1] or not sigma.is_floating_point():
        raise ValueError(f"sigma is {tuple(sigma.shape)} {sigma.dtype}; expected ({x.shape[0]},) floating "
                         f"point, one noise level per protein. Not one value per residue.")
    return sigma.to(torch.promote_types(sigma.dtype, torch.float32))[:, None, None]


def _check_scores(graph, log_score, sigma, xt, x0):
    if x0.shape != xt.shape or log_score.shape != (*xt.shape, graph.vocab_size):
        raise ValueError(f"log_score is {tuple(log_score.shape)}, xt {tuple(xt.shape)}, x0 "
                         f"{tuple(x0.shape)}; expected (B, L, {graph.vocab_size}), (B, L), (B, L).")
    log_score = log_score.to(torch.promote_types(log_score.dtype, torch.float32))
    return log_score, _per_token(sigma, xt)[..., 0].to(log_score.dtype)      # sigma (B, 1)


def _one_hot(x, V, dtype):
    return (x[..., None] == torch.arange(V, device=x.device)).to(dtype)      # (B, L, V)


def _moved(x0, sigma, generator):
    """Which tokens have been hit by noise, (B, L) bool, each with probability 1 - exp(-sigma)."""
    share = -torch.expm1(-_per_token(sigma, x0)[..., 0])                     # (B, 1)
    source = generator.device if generator is not None else x0.device
    u = torch.rand(x0.shape, generator=generator, device=source)
    return u.to(x0.device) < share
