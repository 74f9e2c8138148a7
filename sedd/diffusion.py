"""Score-entropy discrete diffusion (SEDD), the mathematics: noise, loss, sampling. No network.

    noise, graph = make_noise("loglinear"), make_graph("absorb", n_tokens=21)
    t = stratified_times(B, offset, permutation).float()
    sigma, dsigma = noise(t)                                    # (B,), (B,)
    xt = graph.corrupt(x0, sigma, generator)                    # (B, L)
    log_score = model(xt, sigma, mask)                          # (B, L, V)
    loss, count = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, weight)
    proteins = sample(model, graph, noise, shape=(B, L), steps=256)

B batch, L residues, V tokens; x0 clean and xt noised tokens, (B, L) int64. sigma is the total noise
and dsigma = d sigma/dt its rate, both (B,): one noise level per protein. A log score l[y], (B, L,
V), is the network's estimate of ln p_t(xt with this residue changed to y) - ln p_t(xt); it is 0 at
y = xt. Losses are in nats. Source: Lou, Meng, Ermon 2024, arXiv 2310.16834. Needs torch only; reads
and writes nothing.
"""
import math

import torch

# ---- noise: t (any shape, floating point) in [0, 1] -> sigma, dsigma, in the dtype of t ----

class LogLinearNoise:
    """sigma = -ln(1 - (1 - eps) t): the noised share 1 - exp(-sigma) = (1 - eps) t is linear."""

    def __init__(self, eps=1e-3):
        self.eps = _checked_eps(eps)

    def __call__(self, t):
        noised = (1 - self.eps) * t
        return -torch.log1p(-noised), (1 - self.eps) / (1 - noised)


class GeometricNoise:
    """sigma = sigma_min^(1 - t) sigma_max^t. Sampling starts from the noise sigma_max."""

    def __init__(self, sigma_min=1e-4, sigma_max=20.0):
        if not 0 < sigma_min < sigma_max <= 88:
            raise ValueError(f"sigma_min = {sigma_min}, sigma_max = {sigma_max}; expected 0 < min "
                             f"< max <= 88: e^sigma of more is infinite in float32.")
        self.sigma_min = sigma_min
        self.sigma_max = sigma_max

    def __call__(self, t):
        sigma = self.sigma_min ** (1 - t) * self.sigma_max ** t
        return sigma, sigma * math.log(self.sigma_max / self.sigma_min)


class CosineNoise:
    """Noised share (1 - eps) (1 - cos(pi t / 2)): grows slowly at first; 1 - eps at t = 1."""

    def __init__(self, eps=1e-3):
        self.eps = _checked_eps(eps)

    def __call__(self, t):
        angle = t * (math.pi / 2)
        noised = (1 - self.eps) * 2 * torch.sin(angle / 2) ** 2     # 1 - cos is inexact at small t
        dsigma = (1 - self.eps) * (math.pi / 2) * torch.sin(angle) / (1 - noised)
        return -torch.log1p(-noised), dsigma


def make_noise(type, **kwargs):
    """The schedule named `type` ("loglinear", "geometric", "cosine") with its own arguments."""
    choices = {"loglinear": LogLinearNoise, "geometric": GeometricNoise, "cosine": CosineNoise}
    if type not in choices:
        raise ValueError(f"noise type {type!r}; expected one of {', '.join(choices)}.")
    return choices[type](**kwargs)


def stratified_times(n, offset, permutation, eps=1e-3):
    """Time points for the n proteins of a batch, one in each of n equal parts of [eps, 1].

    offset:      float in [0, 1), common to all strata: one random number per step is enough.
    permutation: (n,) int64, a permutation of 0..n-1: which protein gets which stratum.
    Returns t (n,) float64; each is uniform on [eps, 1] if offset is uniform, so the loss stays
    unbiased and its variance falls. An average over [eps, 1] times (1 - eps) is the integral.
    """
    return eps + (1 - eps) * ((permutation.double() + offset) / n)


# ---- graphs ----

class Graph:
    """Which token may turn into which, and the formulas that follow.

    Tokens x, x0, xt are (B, L) int64; sigma is (B,) > 0. Wrong shapes or dtypes raise ValueError.

    corrupt(x0, sigma, generator): x0 with noise. The draw is made on the generator's device: a CPU
        generator gives the same noise whatever accelerator x0 is on.
    transp_rate(x, dtype): forward rates from every token to x, (B, L, V).
    transition(x0, sigma): p(xt | x0) over all xt, (B, L, V).
    transp_transition(x, sigma): p(xt = x | x0) over all x0, (B, L, V).
    staggered_score(score, step): the ratios of p(y) at noise sigma - step to p(xt) at sigma, from
        the score at sigma: exp(-step Q) score, (B, L, V); step (B,).
    reverse_rate(x, score): rates of the reverse process, (B, L, V); score = exp(log_score).
    score_entropy(log_score, sigma, xt, x0): (B, L) >= 0, with the constants that make its minimum
        0; float32 at least, float64 for a float64 log_score.
    wanted(xt): (B, L) bool, the positions whose log scores matter to the score entropy and to the
        reverse process, for SEDD.forward: those of masks; or None for all.
    sample_limit(shape, generator, device): tokens drawn at full noise.
    prior_kl(sigma1): KL(p(xt | x0) || full noise), nats per residue, at sigma1 = sigma(t = 1).
    """

    def wanted(self, xt):
        return None

    def reverse_rate(self, x, score):
        rate = (self.transp_rate(x, score.dtype) * score).scatter(-1, x[..., None], 0.0)
        return rate.scatter(-1, x[..., None], -rate.sum(-1, keepdim=True))  # each row sums to 0


class AbsorbingGraph(Graph):
    """Tokens 0..n_tokens-1 turn into the mask, id n_tokens, and stay there. V = n_tokens + 1."""
    absorb = True

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens
        self.vocab_size = n_tokens + 1
        self.mask_id = n_tokens

    def corrupt(self, x0, sigma, generator=None):
        return x0.masked_fill(_noised(x0, sigma, generator), self.mask_id)

    def transp_rate(self, x, dtype):
        return (x == self.mask_id)[..., None].to(dtype) - _one_hot(x, self.vocab_size, dtype)

    def transition(self, x0, sigma):
        sigma = _per_token(sigma, x0)
        stay = torch.exp(-sigma) * _one_hot(x0, self.vocab_size, sigma.dtype)
        return stay - torch.expm1(-sigma) * self.at_mask(x0.device)

    def transp_transition(self, x, sigma):
        sigma = _per_token(sigma, x)
        stay = torch.exp(-sigma) * _one_hot(x, self.vocab_size, sigma.dtype)
        return stay - torch.expm1(-sigma) * (x == self.mask_id)[..., None]

    def staggered_score(self, score, step):
        step = _per_token(step, score).to(score.dtype)
        letters = score[..., :-1]
        # Not e^step - (e^step - 1) (1 + sum): after long steps that rounds to 0 in float32.
        mask = score[..., -1:] - torch.expm1(step) * letters.sum(-1, keepdim=True)
        return torch.cat([letters * step.exp(), mask], -1)

    def score_entropy(self, log_score, sigma, xt, x0):
        # 0 where xt is not the mask. At a mask, r = p(x0)/p(mask) = 1/(e^sigma - 1): sum of s[y]
        # over the real y, - r l[x0] + r (ln r - 1). Its minimum is at s[x0] = r, other s[y] = 0.
        log_score, sigma = _checked_scores(self, log_score, sigma, xt, x0)
        masked = xt == self.mask_id
        # Set the scores elsewhere to 0 first: a gradient of 0 x inf would be NaN.
        log_score = torch.where(masked[..., None], log_score, 0.0)
        log_r = -torch.log(torch.expm1(sigma))
        target = log_score.gather(-1, x0[..., None])[..., 0]
        entropy = log_score[..., :-1].exp().sum(-1) - log_r.exp() * (target - log_r + 1)
        return torch.where(masked, entropy, 0.0)

    def wanted(self, xt):
        return xt == self.mask_id

    def sample_limit(self, shape, generator=None, device=None):
        return torch.full(shape, self.mask_id, dtype=torch.int64, device=device)

    def prior_kl(self, sigma1):
        return 0.0      # by convention; infinite, as a share exp(-sigma1) stays unmasked

    def at_mask(self, device):
        return torch.arange(self.vocab_size, device=device) == self.mask_id     # (V,) bool


class UniformGraph(Graph):
    """Each of the n_tokens tokens turns into any other at rate 1/V. V = n_tokens; no mask."""
    absorb = False
    mask_id = None

    def __init__(self, n_tokens):
        self.n_tokens = self.vocab_size = n_tokens

    def corrupt(self, x0, sigma, generator=None):
        noised = _noised(x0, sigma, generator)
        return torch.where(noised, self.sample_limit(x0.shape, generator, x0.device), x0)

    def transp_rate(self, x, dtype):
        return 1 / self.vocab_size - _one_hot(x, self.vocab_size, dtype)

    def transition(self, x0, sigma):
        sigma = _per_token(sigma, x0)
        stay = torch.exp(-sigma) * _one_hot(x0, self.vocab_size, sigma.dtype)
        return stay - torch.expm1(-sigma) / self.vocab_size

    transp_transition = transition      # it is symmetric

    def staggered_score(self, score, step):
        step = _per_token(step, score).to(score.dtype)
        lost = torch.expm1(step) / self.vocab_size * score.sum(-1, keepdim=True)
        return score * step.exp() - lost

    def score_entropy(self, log_score, sigma, xt, x0):
        # Mean over y, without y = xt, of s[y] - q l[y] + q (ln q - 1), with q = p(y|x0)/p(xt|x0).
        # With E = e^sigma - 1 and rho = E/(E + V), exact at small sigma: q = rho if xt = x0; else
        # q = 1/rho = 1 + V/E at y = x0 and 1 elsewhere.
        log_score, sigma = _checked_scores(self, log_score, sigma, xt, x0)
        V = self.vocab_size
        E = torch.expm1(sigma)
        rho = E / (E + V)
        log_rho = -torch.log1p(V / E)
        own = log_score.gather(-1, xt[..., None])[..., 0]
        target = log_score.gather(-1, x0[..., None])[..., 0]
        mean_score = (log_score.exp().sum(-1) - own.exp()) / V
        mean_log_score = (log_score.sum(-1) - own) / V
        same = rho * ((V - 1) / V * (log_rho - 1) - mean_log_score)
        moved = (-(log_rho + 1) / rho - (V - 2)) / V - target / E - mean_log_score
        return mean_score + torch.where(xt == x0, same, moved)

    def sample_limit(self, shape, generator=None, device=None):
        source = generator.device if generator is not None else device
        tokens = torch.randint(self.vocab_size, shape, generator=generator, device=source)
        return tokens.to(device)

    def prior_kl(self, sigma1):
        V = self.vocab_size
        stay = math.exp(-float(sigma1))
        own = (V - 1) * stay    # V p - 1 for the token of x0
        other = -stay           # and for each other one
        kl_others = (V - 1) * (1 + other) * math.log1p(other)
        return ((1 + own) * math.log1p(own) + kl_others) / V


def make_graph(type, n_tokens):
    """The graph named `type` ("absorb" or "uniform") over n_tokens real tokens."""
    choices = {"absorb": AbsorbingGraph, "uniform": UniformGraph}
    if type not in choices:
        raise ValueError(f"graph type {type!r}; expected one of {', '.join(choices)}.")
    return choices[type](n_tokens)


# ---- scores and loss ----

def independent_log_score(p, sigma, xt, graph):
    """Exact log scores if residues are independent and all have the distribution p.

    p: (n_tokens,) float64. sigma: (B,) float64. xt: (B, L) int64.
    Returns (B, L, V) float64, -inf at tokens that p makes impossible.
    """
    x0 = torch.arange(graph.n_tokens, device=xt.device).expand(len(sigma), -1)
    p_noised = torch.einsum("n,bnv->bv", p, graph.transition(x0, sigma))
    log_pt = torch.log(p_noised)                                            # (B, V)
    return log_pt[:, None] - log_pt.gather(-1, xt)[..., None]


def score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, weight):
    """dsigma x score entropy, summed over the residues of each protein that count.

    log_score:     (B, L, V). It may be NaN where weight is False: neither the loss nor its gradient
                   depends on it there.
    sigma, dsigma: (B,), see make_noise. xt, x0: (B, L) int64.
    weight:        (B, L) bool, True = counts (a real residue that is not X).
    Returns (sums (B,) in nats, counts (B,) int64). sums.sum() / counts.sum() is the loss per
    residue over any number of batches and ranks; sums.mean() is the official reduction. For t
    uniform on [eps, 1] the expected loss times (1 - eps), plus prior_kl per residue, bounds -ln
    p(x0) from above (apart from times t < eps).
    Raises ValueError for shapes or dtypes that do not agree.
    """
    if weight.dtype != torch.bool or weight.shape != xt.shape:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}; expected "
                         f"{tuple(xt.shape)} torch.bool, True where a residue counts.")
    if dsigma.shape != sigma.shape:
        raise ValueError(f"dsigma is {tuple(dsigma.shape)}, sigma {tuple(sigma.shape)}; expected "
                         f"both (B,).")
    log_score = torch.where(weight[..., None], log_score, 0.0)
    entropy = graph.score_entropy(log_score, sigma, xt, x0)
    loss = dsigma.to(entropy.dtype)[:, None] * torch.where(weight, entropy, 0.0)
    return loss.sum(-1), weight.sum(-1)


# ---- sampling ----

@torch.no_grad()
def sample(log_score_fn, graph, noise, shape, steps,   # noqa: PLR0913  (most have a default)
           predictor="analytic", fixed=None, forbidden=(), mask=None, generator=None, device=None,
           eps=1e-5, on_step=None):
    """Draw tokens by running the noise backwards from t = 1 to 0.

    log_score_fn: (xt (B, L) int64, sigma (B,) float32) -> log_score (B, L, V). It is given sigma,
                  never t.
    shape:        (B, L).
    steps:        draws at evenly spaced times from t = 1 to eps. One more draw, always analytic,
                  removes the noise left at eps.
    predictor:    "euler" (first order in the step) or "analytic" (Tweedie; takes the residues as
                  independent within a step).
    fixed:        (tokens (B, L) int64, fixed_mask (B, L) bool): residues held from the start
                  (infilling).
    forbidden:    token ids never returned, such as X.
    mask:         (B, L) bool, True = residue. The rest is padding: not drawn, returned as
                  forbidden[0] (0 if none). log_score_fn has to pass the same mask to its network.
    generator:    random numbers come from its device: a CPU generator works with any accelerator.
    on_step:      called as on_step(step, xt) after each draw.
    Returns (B, L) int64. By construction it has no mask and, outside `fixed`, no forbidden token:
    these have probability 0 in the last draw. A residue for which all other tokens have 0 as well
    is drawn evenly from them.
    Raises ValueError for bad arguments, RuntimeError if log_score_fn returned NaN.
    """
    device = torch.device("cpu" if device is None else device)
    B = shape[0]
    V = graph.vocab_size
    held, held_tokens = _held_positions(graph, tuple(shape), fixed, mask, forbidden, device)
    returned = _returned_tokens(graph, forbidden, device)
    # Before the last draw, forbidden tokens are allowed with the uniform graph only.
    allowed = returned | graph.at_mask(device) if graph.absorb else torch.ones_like(returned)
    schedule = _steps_of(noise, steps, predictor, eps)
    sigma, dsigma, step_sigma = (s.float().to(device) for s in schedule)

    xt = torch.where(held, held_tokens, graph.sample_limit(shape, generator, device))
    found_nan = torch.zeros((), dtype=torch.bool, device=device)
    for i in range(steps + 1):
        is_last = i == steps
        log_score = log_score_fn(xt, sigma[i].expand(B))
        _check_shape(log_score, (*shape, V))
        found_nan |= (log_score.isnan().any(-1) & ~held).any()
        score = _at_least_float32(log_score).exp()
        stay = _one_hot(xt, V, score.dtype)
        if predictor == "euler" and not is_last:
            p = stay + (1 - eps) / steps * dsigma[i] * graph.reverse_rate(xt, score)
        else:
            step = step_sigma[i].expand(B)
            p = graph.staggered_score(score, step) * graph.transp_transition(xt, step)
        p = torch.where((returned if is_last else allowed) & (p > 0), p, 0.0)
        fallback = returned.to(p.dtype) if is_last else stay    # where all probabilities are 0
        p = torch.where(p.any(-1, keepdim=True), p, fallback)
        xt = torch.where(held, held_tokens, _draw(p, generator))
        if on_step is not None:
            on_step(i, xt)
    _refuse_nan(found_nan)
    return xt


@torch.no_grad()
def sample_scheduled(log_score_fn, graph, noise, shape, steps,   # noqa: PLR0913  (as of sample)
                     predictor="analytic", fixed=None, forbidden=(), mask=None, generator=None,
                     device=None, eps=1e-5, on_step=None):
    """Draw tokens as `sample` does, for a network whose scores of all letters at a mask sum to
    1/(e^sigma - 1), such as a SEDD with the parameterization "subs", by fewer of its passes.

    The sum alone decides how likely a residue is unmasked in a step. So it is drawn first, for each
    residue, in which step that happens; in the others the network is not asked. The distribution is
    that of `sample`. Source: Zheng et al. 2024, arXiv 2409.02908, who take the time as continuous.

    log_score_fn: (xt, sigma, unmasked) -> log_score (B, L, V), of which only the values at
                  unmasked, (B, L) bool on the CPU, are used.
    graph:        the absorbing one.
    forbidden:    tokens never drawn; their scores have to be 0 (log scores -inf).
    The rest: as for `sample`. on_step is called after steps without a pass, too.
    """
    if not graph.absorb:
        raise ValueError("found the uniform graph; expected the absorbing one.")
    device = torch.device("cpu" if device is None else device)
    B = shape[0]
    held, held_tokens = _held_positions(graph, tuple(shape), fixed, mask, forbidden, device)
    returned = _returned_tokens(graph, forbidden, device)
    schedule = _steps_of(noise, steps, predictor, eps)
    sigma = schedule[0].float().to(device)
    still_masked = (1 - _unmasked_shares(schedule, predictor, eps)).cumprod(0)
    source = generator.device if generator is not None else device
    u = torch.rand(shape, generator=generator, device=source).cpu().double()
    step_of = torch.searchsorted(-still_masked, -u)     # the first with still_masked <= u
    step_of[held.cpu()] = -1

    xt = torch.where(held, held_tokens, graph.sample_limit(shape, generator, device))
    found_nan = torch.zeros((), dtype=torch.bool, device=device)
    for i in range(steps + 1):
        unmasked = step_of == i
        if unmasked.any():
            log_score = log_score_fn(xt, sigma[i].expand(B), unmasked)
            _check_shape(log_score, (*shape, graph.vocab_size))
            rows, places = unmasked.nonzero().to(device).unbind(1)
            log_score = _at_least_float32(log_score[rows, places])              # (n, V)
            found_nan |= log_score.isnan().any()
            p = torch.softmax(log_score.masked_fill(~returned, -math.inf), -1)
            p = torch.where(p.isnan(), returned.to(p.dtype), p)     # all scores 0: evenly
            xt = xt.index_put((rows, places), _draw(p, generator))
        if on_step is not None:
            on_step(i, xt)
    _refuse_nan(found_nan)
    return xt


def _draw(p, generator):
    """Index drawn with probability p / sum(p) over the last dimension; NaN and p < 0 count as 0.

    Each index gets a random waiting time, exponential with rate p. The shortest time wins.
    """
    source = generator.device if generator is not None else p.device
    u = torch.rand(p.shape, generator=generator, device=source).to(p.device)
    waiting = -torch.log(u).clamp(max=-1e-10)   # > 0 even if a device's log rounds u near 1 to 0
    return torch.where(p > 0, p / waiting, -1.0).argmax(-1)


def _steps_of(noise, steps, predictor, eps):
    """(sigma, dsigma, decrease of sigma) of each draw, (steps + 1,) float64 on the CPU."""
    if predictor not in ("euler", "analytic"):
        raise ValueError(f"predictor {predictor!r}; expected 'euler' or 'analytic'.")
    if steps < 1:
        raise ValueError(f"steps = {steps}; expected at least 1.")
    # Beforehand and in float64: differences of sigma are inexact in float32, and reading a number
    # from the device in each step would stall it.
    sigma, dsigma = noise(torch.linspace(1, eps, steps + 1, dtype=torch.float64))
    return sigma, dsigma, torch.cat([sigma[:-1] - sigma[1:], sigma[-1:]])


def _unmasked_shares(schedule, predictor, eps):
    """Probability that a residue that is still masked is unmasked in each draw, (steps + 1,)
    float64, if its scores sum to 1/(e^sigma - 1). schedule: of _steps_of."""
    sigma, dsigma, step_sigma = schedule
    shares = torch.expm1(step_sigma) / torch.expm1(sigma)
    if predictor == "euler":
        steps = len(sigma) - 1
        shares = ((1 - eps) / steps * dsigma / torch.expm1(sigma)).clamp(max=1)
    shares[-1] = 1
    return shares


def _returned_tokens(graph, forbidden, device):
    """(V,) bool: which tokens may be returned. ValueError if there is none."""
    returned = torch.tensor([y < graph.n_tokens and y not in forbidden
                             for y in range(graph.vocab_size)], device=device)
    if not returned.any() or not all(0 <= y < graph.n_tokens for y in forbidden):
        raise ValueError(f"forbidden = {tuple(forbidden)}; expected some of 0 to "
                         f"{graph.n_tokens - 1}.")
    return returned


def _check_shape(log_score, expected):
    if log_score.shape != expected:
        raise ValueError(f"log_score_fn returned {tuple(log_score.shape)}; expected {expected}, "
                         f"one log score per residue and token of the graph.")


def _refuse_nan(found_nan):
    if found_nan:
        raise RuntimeError("log_score_fn returned NaN at residues to be sampled; are the weights "
                           "finite?")


def _held_positions(graph, shape, fixed, mask, forbidden, device):
    """Which positions are not drawn, (B, L) bool, and the tokens they keep, (B, L) int64."""
    filler = forbidden[0] if len(forbidden) else 0
    held = torch.zeros(shape, dtype=torch.bool, device=device)
    tokens = torch.full(shape, filler, dtype=torch.int64, device=device)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != shape:
            raise ValueError(f"mask is {tuple(mask.shape)} {mask.dtype}; expected {shape} "
                             f"torch.bool.")
        held = ~mask.to(device)
    if fixed is None:
        return held, tokens
    given, where = (x.to(device) for x in fixed)
    expected = (shape, torch.int64, shape, torch.bool)
    if (given.shape, given.dtype, where.shape, where.dtype) != expected:
        raise ValueError(f"fixed: ({tuple(given.shape)} {given.dtype}, {tuple(where.shape)} "
                         f"{where.dtype}), expected (int64 tokens, bool mask), both {shape}.")
    wrong = given[where & ((given < 0) | (given >= graph.n_tokens))]
    if len(wrong):
        raise ValueError(f"fixed holds token {wrong[0].item()}; expected 0 to "
                         f"{graph.n_tokens - 1}.")
    return held | where, torch.where(where, given, tokens)


# ---- checks and helpers ----

def _checked_eps(eps):
    if not 1e-12 <= eps < 1:   # else 1 - eps may be 1, and sigma infinite
        raise ValueError(f"eps = {eps}; expected 1e-12 up to below 1: the share of residues left "
                         f"clean at t = 1.")
    return eps


def _checked_scores(graph, log_score, sigma, xt, x0):
    """log_score, at least float32, and sigma as (B, 1)."""
    if x0.shape != xt.shape or log_score.shape != (*xt.shape, graph.vocab_size):
        raise ValueError(f"log_score is {tuple(log_score.shape)}, xt {tuple(xt.shape)}, x0 "
                         f"{tuple(x0.shape)}; expected (B, L, {graph.vocab_size}), (B, L), (B, L).")
    log_score = _at_least_float32(log_score)
    return log_score, _per_token(sigma, xt)[..., 0].to(log_score.dtype)


def _per_token(sigma, x):
    """sigma (B,) as (B, 1, 1), at least float32."""
    if sigma.shape != x.shape[:1] or not sigma.is_floating_point():
        raise ValueError(f"sigma is {tuple(sigma.shape)} {sigma.dtype}; expected ({x.shape[0]},) "
                         f"floating point, one noise level per protein. Not one value per residue.")
    return _at_least_float32(sigma)[:, None, None]


def _at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _one_hot(x, V, dtype):
    return (x[..., None] == torch.arange(V, device=x.device)).to(dtype)         # (B, L, V)


def _noised(x0, sigma, generator):
    """Which tokens the noise replaces, (B, L) bool, each with probability 1 - exp(-sigma)."""
    share = -torch.expm1(-_per_token(sigma, x0)[..., 0])                        # (B, 1)
    source = generator.device if generator is not None else x0.device
    u = torch.rand(x0.shape, generator=generator, device=source)
    return u.to(x0.device) < share
