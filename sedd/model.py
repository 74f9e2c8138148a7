"""SEDD's network: noised tokens and a noise level in, log scores out. A bidirectional transformer.

    model = SEDD(vocab_size=22, hidden_size=768, n_blocks=12, n_heads=12, forbidden=(20,))
    log_score = model(xt, sigma, mask)      # (B, L) int64, (B,), (B, L) bool or None -> (B, L, 22)
    ema = EMA(model.parameters())
    ema.update(model.parameters())                                # after each optimiser step
    with ema.applied(model): ...                                  # evaluate and sample on averages
    load_official(model, torch.load("checkpoint.pth", weights_only=True))

Rotary positions, adaLN-zero conditioning on sigma (not t), scaled dot-product attention. Parameter
names and initial values are those of the published SEDD code, so that its checkpoints load. There
are no buffers, so DDP has nothing to broadcast, and a cast to bfloat16 does not round the rotary
tables. Needs torch and training/fast_linear.py; reads and writes nothing.
Source: Lou, Meng, Ermon 2024, arXiv 2310.16834; adaLN-zero: Peebles, Xie 2023, arXiv 2212.09748.
"""
import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.fast_linear import Linear, linear, on_cpu

# The list of positions that enter the loss is padded, with position 0, to a multiple of this, as
# oneDNN compiles kernels for every new length: a tenth of a small model's step (measured).
NEEDED_MULTIPLE = 64

# Attention in bfloat16 on a CPU; without these it takes 1.2 to 1.8 times as long (measured).
SCORES = 2**19          # attention scores computed at a time: 1 MB, which stays in the cache
KEYS_MULTIPLE = 32      # the number of keys is padded to a multiple of this, as suits the kernels,
KEYS_LONG = 192         # but only if it exceeds this: below, the padding costs more than it saves


class SEDD(nn.Module):
    """Log scores l[y] = ln p_t(xt with y here) - ln p_t(xt), for the absorbing or uniform graph.

    vocab_size:       V; with the absorbing graph the mask is the last id, V - 1.
    cond_dim:         width of the noise embedding.
    dropout:          on the output of each attention and MLP.
    scale_by_sigma:   True for the absorbing graph: adds ln r - ln(V - 1), r = 1/(e^sigma - 1), so a
                      fresh model's scores at a mask sum to r, as the true ones do. False for the
                      uniform graph.
    parameterization: "sedd": free scores. "subs" (absorbing only): at a mask the scores of all
                      tokens that are not `forbidden` are r x softmax, so they sum to r; with
                      log-linear noise the score entropy is then cross-entropy / t, masked
                      diffusion's objective (arXiv 2406.07524).
    gradient_checkpointing: hold only the blocks' inputs for backward and recompute the rest: less
                      memory, about a third more time, the same dropout.
    forbidden:        for "subs": token ids that are never a target, such as X. Free scores learn
                      this from the data.
    init_logits:      standard deviation of a fresh model's logits. 0, as published, is a saddle
                      point: the head first learns one direction, along which the last layer norm
                      passes no gradient back, so the blocks get hardly any. With weakly structured
                      data such as proteins this lasts for a million residues and more.
    Raises ValueError for sizes or settings that do not fit together.
    """

    def __init__(self, vocab_size, hidden_size, n_blocks, n_heads, cond_dim=128, dropout=0.1,
                 scale_by_sigma=True, parameterization="sedd", gradient_checkpointing=False,
                 forbidden=(), init_logits=0.0):
        super().__init__()
        if hidden_size % (2 * n_heads):
            fit = [n for n in range(1, hidden_size // 2 + 1) if hidden_size % (2 * n) == 0]
            raise ValueError(f"n_heads = {n_heads}, hidden_size = {hidden_size}; expected heads of "
                             f"an even width hidden_size / n_heads, as rotary positions turn "
                             f"pairs: n_heads one of {', '.join(map(str, fit)) or 'none'}.")
        if parameterization not in ("sedd", "subs"):
            raise ValueError(f"parameterization {parameterization!r}; expected 'sedd' or 'subs'.")
        if parameterization == "subs" and not scale_by_sigma:
            raise ValueError("parameterization is 'subs' with the uniform graph "
                             "(scale_by_sigma=False); expected 'sedd' there. Use 'subs' with the "
                             "absorbing graph.")
        self.vocab_size = vocab_size
        self.n_heads, self.head_dim = n_heads, hidden_size // n_heads
        self.scale_by_sigma, self.parameterization = scale_by_sigma, parameterization
        self.gradient_checkpointing, self.forbidden = gradient_checkpointing, tuple(forbidden)
        # In the published order, in which checkpoints list the averages (EMA) of the parameters.
        self.vocab_embed = TokenTable(vocab_size, hidden_size)
        self.sigma_map = SigmaEmbedding(cond_dim)
        self.blocks = nn.ModuleList(Block(hidden_size, n_heads, cond_dim, dropout)
                                    for _ in range(n_blocks))
        self.output_layer = Head(hidden_size, vocab_size, cond_dim)
        if init_logits:
            std = init_logits / math.sqrt(hidden_size)
            nn.init.normal_(self.output_layer.linear.weight, std=std)

    def forward(self, xt, sigma, mask=None):
        """Log scores of all tokens at all positions.

        xt:    (B, L) int64, noised tokens.
        sigma: (B,) floating point, total noise > 0 in nats; NOT the time t.
        mask:  (B, L) bool, True = residue, or None where nothing is padding (faster).
        Returns log_score (B, L, V): float32 whatever autocast or the parameters' dtype, float64 for
        a float64 model; 0 at each position's own token. Values at padding are meaningless. So are
        values at unmasked residues in training with the absorbing graph: its loss ignores them.
        Raises ValueError for other shapes or dtypes.
        """
        check_inputs(xt, sigma, mask)
        exact = at_least_float32(self.vocab_embed.embedding.dtype)
        sigma = sigma.to(exact)
        # Autocast to bfloat16 would make neighbouring noise levels equal. This costs no time.
        with torch.autocast(xt.device.type, enabled=False):
            c = F.silu(self.sigma_map(sigma))                                   # (B, cond_dim)
        h = self.vocab_embed(xt)                                                # (B, L, H)
        rotary = rotary_tables(xt.shape[1], self.head_dim, xt.device, exact)
        attended = None if mask is None else mask[:, None, None, :]             # (B, 1, 1, L)
        needed = None   # positions computed after the last attention: all, or those of the loss
        if self.training and self.scale_by_sigma and on_cpu(xt):    # nonzero stalls a GPU
            rows = (xt.flatten() == self.vocab_size - 1).nonzero()[:, 0]
            padded = F.pad(rows, (0, -len(rows) % NEEDED_MULTIPLE))
            needed = padded, padded // xt.shape[1]
        tokens = (xt, self.vocab_embed.embedding) if on_cpu(xt) else None
        for i, block in enumerate(self.blocks, 1):
            inputs = (h, c, rotary, attended, needed if i == len(self.blocks) else None,
                      tokens if i == 1 else None)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                h = checkpoint(block, *inputs, use_reentrant=False)
            else:
                h = block(*inputs)
        # To `exact` before log_score adds an offset, which bfloat16 would round.
        logits = self.output_layer(h, c, needed).to(exact)
        if needed is not None:
            everywhere = logits.new_zeros(xt.numel(), self.vocab_size)
            logits = everywhere.index_copy(0, rows, logits[:len(rows), 0]).view(*xt.shape, -1)
        return self.log_score(logits, xt, sigma)

    def log_score(self, logits, xt, sigma):
        """Log scores (B, L, V) from the logits (B, L, V) of the head."""
        log_r = -torch.log(torch.expm1(sigma))[:, None, None] if self.scale_by_sigma else 0.0
        if self.parameterization == "subs":
            mask_id = self.vocab_size - 1
            masked = (xt == mask_id)[..., None]
            token = torch.arange(self.vocab_size, device=xt.device)
            never = sum((token == y for y in self.forbidden), start=token == mask_id)
            log_p = torch.log_softmax(logits.masked_fill(never, -math.inf), dim=-1)
            scores = torch.where(masked, log_p + log_r, -math.inf)  # known residues never change
        elif self.scale_by_sigma:
            scores = logits + log_r - math.log(self.vocab_size - 1)
        else:
            scores = logits
        return scores.scatter(-1, xt[..., None], 0.0)


class TokenTable(nn.Module):
    """Token embedding: xt (B, L) -> (B, L, H)."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, hidden_size))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, xt):
        return F.embedding(xt, self.embedding)


class SigmaEmbedding(nn.Module):
    """sigma (B,) -> (B, cond_dim): 128 cosines and 128 sines of sigma, then a small MLP."""

    def __init__(self, cond_dim, n_frequencies=128):
        super().__init__()
        self.n_frequencies = n_frequencies
        self.mlp = nn.Sequential(nn.Linear(2 * n_frequencies, cond_dim), nn.SiLU(),
                                 nn.Linear(cond_dim, cond_dim))

    def forward(self, sigma):
        k = torch.arange(self.n_frequencies, device=sigma.device, dtype=sigma.dtype)
        angle = sigma[:, None] * torch.exp(-math.log(10000) / self.n_frequencies * k)
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated by the noise level: h (B, L, H) -> same.

    needed: (rows of h.flatten(0, 1), the protein of each), both (n,) int64: what follows attention
            is computed at these positions only, and h is returned as (n, 1, H). None: at all.
    tokens: for the first block, whose h is the embedding of xt: (xt (B, L), embedding (V, H)).
            Queries, keys and values are then computed once per token and protein, not per position.
    """

    def __init__(self, hidden_size, n_heads, cond_dim, dropout):
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.norm1 = Norm(hidden_size)
        self.attn_qkv = Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attn_out = Linear(hidden_size, hidden_size, bias=False)
        self.norm2 = Norm(hidden_size)
        self.mlp = nn.Sequential(Linear(hidden_size, 4 * hidden_size),
                                 GELU(),
                                 Linear(4 * hidden_size, hidden_size))
        self.adaLN_modulation = zero_linear(cond_dim, 6 * hidden_size)

    def forward(self, h, c, rotary, attended, needed, tokens):
        modulation = self.adaLN_modulation(c)[:, None]                          # (B, 1, 6 H)
        shift, scale = modulation.chunk(6, dim=-1)[:2]                          # each (B, 1, H)
        x = h if tokens is None else tokens[1][None]                            # (1, V, H)
        qkv = self.queries_keys_values(modulated(self.norm1(x), shift, scale))
        if tokens is not None:      # look up rows by a product: its gradient is exact and fast
            qkv = F.one_hot(tokens[0], x.shape[1]).to(qkv.dtype) @ qkv          # (B, L, 3 H)
        branch = self.attention(qkv, rotary, attended)
        if needed is not None:
            rows, proteins = needed
            h, branch, modulation = take(h, rows), take(branch, rows), spread(modulation, proteins)
        gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)[2:]
        p = self.dropout if self.training else 0.0
        h = add_branch(h, self.attn_out(branch), gate1, p)
        return add_branch(h, self.mlp(modulated(self.norm2(h), shift2, scale2)), gate2, p)

    def queries_keys_values(self, x):
        """x (B, L, H) -> (B, L, 3 H). On a CPU the rows of attn_qkv's weight are reordered first:
        entries i and i + e/2 of each query and key (e entries) become neighbours, for rotate_pairs.
        """
        if not on_cpu(x):
            return self.attn_qkv(x)
        H = x.shape[-1]
        rows = torch.arange(3 * H)
        pairs = rows[:2 * H].view(-1, 2, H // self.n_heads // 2).mT.flatten()
        # The gradient of F.embedding is faster than that of weight[rows].
        return linear(x, F.embedding(torch.cat([pairs, rows[2 * H:]]), self.attn_qkv.weight))

    def attention(self, qkv, rotary, attended):
        B, L, H = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3

        def by_head(x):
            return x.view(B, L, self.n_heads, -1).transpose(1, 2)               # (B, heads, L, e)

        q, k, v = qkv.chunk(3, dim=-1)
        if on_cpu(qkv):
            factor = torch.complex(*rotary).repeat(1, self.n_heads)             # (L, H / 2)
            q, k = rotate_pairs(q, factor * (H / self.n_heads)**-0.5), rotate_pairs(k, factor)
            out = attend(by_head(q), by_head(k), by_head(v), attended)
        else:
            q, k = rotate(by_head(q), rotary), rotate(by_head(k), rotary)
            out = F.scaled_dot_product_attention(q, k, by_head(v), attn_mask=attended)
        return out.transpose(1, 2).reshape(B, L, H)


class GELU(nn.Module):
    """GELU by its tanh approximation, as published. In bfloat16 on a CPU exactly (erf), in a third
    of the time (measured). They differ by at most 5e-4, less than rounding to bfloat16 changes."""

    def forward(self, x):
        by_erf = on_cpu(x) and x.dtype == torch.bfloat16
        return F.gelu(x, approximate="none" if by_erf else "tanh")


class Head(nn.Module):
    """h (B, L, H) -> logits (B, L, V), scaled and shifted by the noise level."""

    def __init__(self, hidden_size, vocab_size, cond_dim):
        super().__init__()
        self.norm_final = Norm(hidden_size)
        self.linear = zero_linear(hidden_size, vocab_size)
        self.adaLN_modulation = zero_linear(cond_dim, 2 * hidden_size)

    def forward(self, h, c, needed):
        modulation = self.adaLN_modulation(c)[:, None]
        if needed is not None:
            modulation = spread(modulation, needed[1])
        shift, scale = modulation.chunk(2, dim=-1)
        return self.linear(modulated(self.norm_final(h), shift, scale))


def modulated(x, shift, scale):
    """x (1 + scale) + shift, in the dtype of shift and scale, which the matrix product uses."""
    return torch.addcmul(shift, x.to(scale.dtype), 1 + scale)


def take(x, rows):
    """Rows (n,) of x (B, L, C) as n sequences of one position, (n, 1, C)."""
    return F.embedding(rows, x.flatten(0, 1))[:, None]      # its gradient is faster than x[rows]'s


def spread(modulation, proteins):
    """modulation (B, 1, C), of each protein -> (n, 1, C), of each position. In float32 at least, as
    the gradient is a sum over hundreds of positions of a protein: too many for bfloat16."""
    exact = modulation.to(at_least_float32(modulation.dtype))
    return take(exact, proteins).to(modulation.dtype)


class Norm(nn.Module):
    """Layer norm with a weight and no bias, computed in float32 at least."""

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, h):
        exact = at_least_float32(h.dtype)
        weight = self.weight.to(exact)
        return F.layer_norm(h.to(exact), weight.shape, weight, None, 1e-5).to(h.dtype)


def zero_linear(n_in, n_out):
    """A linear map that starts at zero: every block starts as the identity, every logit at 0."""
    linear = nn.Linear(n_in, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotary_tables(L, head_dim, device, dtype):
    """Cosines and sines of position x frequency, each (L, head_dim / 2); positions count from 0."""
    exponent = -torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    angle = torch.outer(torch.arange(L, device=device, dtype=dtype), 10000.0 ** exponent)
    return angle.cos(), angle.sin()


def rotate(x, rotary):
    """Rotary embedding of x (B, heads, L, e): rotates the pair of entries i and i + e/2.

    Source: arXiv 2104.09864, in half-split order.
    """
    cos, sin = (table.to(x.dtype) for table in rotary)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def rotate_pairs(x, factor):
    """The same as rotate, in half of the time on a CPU. The entries of a pair are neighbours in x
    (B, L, H): a complex number, which is multiplied by factor (L, H / 2). Returns (B, L, H)."""
    pairs = torch.view_as_complex(x.to(factor.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)


def attend(q, k, v, attended):
    """Softmax attention on a CPU: q, already scaled, k, v (B, heads, L, e), attended (B, 1, 1, L)
    bool or None -> as q."""
    # In bfloat16 torch's kernel takes 1.4 to 8 times as long as AttentionInParts, which keeps all
    # attention weights in memory for backward: too much for long proteins.
    if q.dtype != torch.bfloat16 or q.shape[2] > 512:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attended, scale=1.0)
    B, heads, L, _ = q.shape
    padding = -L % KEYS_MULTIPLE if L > KEYS_LONG else 0
    if padding:
        all_of_them = torch.ones(B, 1, 1, L, dtype=torch.bool)
        attended = F.pad(all_of_them if attended is None else attended, (0, padding))
        k, v = (F.pad(x, (0, 0, 0, padding)) for x in (k, v))
    if attended is not None:    # hide keys: queries get a 1, keys a 0 or -max
        hidden = torch.where(attended, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        q = F.pad(q, (0, 1), value=1.0)
        k = torch.cat([k, hidden.mT.expand(-1, heads, -1, -1)], dim=-1)
    out = AttentionInParts.apply(*(x.flatten(0, 1).contiguous() for x in (q, k, v)))
    return out.view(B, heads, L, -1)


class AttentionInParts(torch.autograd.Function):
    """softmax(q k^T) v for q (n, L, e), k (n, K, e), v (n, K, f). Computes a few of the n heads at
    a time, forward and backward: their scores fit into the cache. Halves the time (measured)."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, weights = q.new_empty(*q.shape[:2], v.shape[2]), []
        ctx.n = max(1, SCORES // (q.shape[1] * k.shape[1]))
        for q_, k_, v_, out_ in in_parts(ctx.n, q, k, v, out):
            weight = torch.bmm(q_, k_.mT).softmax(-1)
            torch.bmm(weight, v_, out=out_)
            if any(ctx.needs_input_grad):
                weights.append(weight)
        ctx.save_for_backward(q, k, v, *weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, *weights = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        parts = in_parts(ctx.n, q, k, v, grad.contiguous(), *grads)
        for weight, (q_, k_, v_, grad_, grad_q, grad_k, grad_v) in zip(weights, parts):
            torch.bmm(weight.mT, grad_, out=grad_v)
            grad_scores = torch.ops.aten._softmax_backward_data(
                torch.bmm(grad_, v_.mT), weight, -1, weight.dtype)
            torch.bmm(grad_scores, k_, out=grad_q)
            torch.bmm(grad_scores.mT, q_, out=grad_k)
        return tuple(grads)


def in_parts(n, *tensors):
    """Split all tensors into parts of n rows; yields a tuple of views for each part."""
    return zip(*(x.split(n) for x in tensors))


def add_branch(h, branch, gate, p):
    """h + gate x dropout(branch): each entry of branch is dropped with probability p."""
    if not on_cpu(h) or not p:
        return h + gate * F.dropout(branch, p, p > 0)
    # Dropout with 16 random bits per entry, four entries per 64-bit number: an eighth of the time.
    # p is rounded to a multiple of 2^-16; the scale of the entries that stay uses the rounded p.
    dropped = round(p * 2**16)
    bits = torch.empty(-(-branch.numel() // 4), dtype=torch.int64).random_(-2**63, None)
    bits = bits.view(torch.int16)[:branch.numel()].view(branch.shape)
    stays = torch.ge(bits, dropped - 2**15, out=torch.empty_like(branch))       # 0.0 or 1.0
    return h + gate / (1 - dropped / 2**16) * (branch * stays)


def at_least_float32(dtype):
    return torch.promote_types(dtype, torch.float32)


def check_inputs(xt, sigma, mask):
    if xt.dtype != torch.int64 or xt.dim() != 2:
        raise ValueError(f"xt is {tuple(xt.shape)} {xt.dtype}; expected (B, L) torch.int64 token "
                         f"ids, whatever the dtype of autocast and model.")
    if sigma.shape != xt.shape[:1] or not sigma.is_floating_point():
        raise ValueError(f"sigma is {tuple(sigma.shape)} {sigma.dtype}; expected ({xt.shape[0]},) "
                         f"floating point: the total noise of each protein, sigma = noise(t)[0], "
                         f"not the time t.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != xt.shape):
        raise ValueError(f"mask is {tuple(mask.shape)} {mask.dtype}; expected {tuple(xt.shape)} "
                         f"torch.bool, True = residue, or None where nothing is padding.")


def load_official(model, state, use_ema=True):
    """Load weights in the published names into a SEDD of the same size.

    state:   a state dict (with or without the "module." that DDP puts before each name), or a
             checkpoint {"model": state dict, "ema": {"shadow_params": list in parameter order,
             ...}, ...}.
    use_ema: take the averages where the checkpoint has them.
    Returns "ema" or "model": which weights were loaded.
    Raises ValueError naming what is missing, unexpected or of another shape; the model is then
    unchanged.
    """
    weights = state["model"] if isinstance(state.get("model"), dict) else state
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
    # The published code stores the rotary frequencies: the only trace of the number of heads.
    frequencies = weights.pop("rotary_emb.inv_freq", None)
    if frequencies is not None and 2 * len(frequencies) != model.head_dim:
        raise ValueError(f"The weights are for heads of width {2 * len(frequencies)}; the model "
                         f"has {model.n_heads} heads of width {model.head_dim}. Set n_heads so "
                         f"that the widths agree.")
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    problems = [f"missing {name}" for name in shapes if name not in weights]
    problems += [f"unexpected {name}" for name in weights if name not in shapes]
    ema = state.get("ema")
    use_ema = use_ema and isinstance(ema, dict) and "shadow_params" in ema
    if use_ema:
        averages = ema["shadow_params"]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if len(names) != len(averages):
            problems.append(f"{len(averages)} ema.shadow_params for {len(names)} parameters")
        weights.update(zip(names, averages))
    problems += [f"{name} is {tuple(weights[name].shape)}, the model has {tuple(shape)}"
                 for name, shape in shapes.items()
                 if name in weights and weights[name].shape != shape]
    if problems:
        raise ValueError(f"The weights do not fit this model ({len(problems)} differences): "
                         f"{'; '.join(problems[:8])}. Build SEDD with the sizes of the "
                         f"checkpoint.")
    model.load_state_dict(weights)
    return "ema" if use_ema else "model"


class EMA:
    """Exponential moving average of the trainable parameters, in float32 at least.

    The decay of update k = 1, 2, ... is min(decay, (1 + k)/(10 + k)), so early averages forget the
    start. bfloat16 parameters are averaged in float32, where a change of 1e-4 is not lost.
    Raises ValueError for a decay outside [0, 1).
    """

    def __init__(self, parameters, decay=0.9999):
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}; expected 0 <= decay < 1.")
        self.decay, self.num_updates = decay, 0
        self.shadow_params = [p.detach().to(at_least_float32(p.dtype), copy=True)
                              for p in parameters if p.requires_grad]

    @torch.no_grad()
    def update(self, parameters, skip=None):
        """Move the averages towards the parameters; call once after each optimiser step.

        skip: 0-dimensional bool on the parameters' device; True: the averages stay. num_updates
            grows even then: the caller corrects it later, when the flag has reached the host.
        """
        live = self._matched([p.detach() for p in parameters if p.requires_grad], "parameters")
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        live = [p.to(average.dtype) for p, average in zip(live, self.shadow_params)]
        if skip is not None and not on_cpu(skip):   # lerp takes no weight on a device
            move = torch._foreach_sub(live, self.shadow_params)
            torch._foreach_mul_(move, torch.where(skip, 0.0, 1 - decay))
            torch._foreach_add_(self.shadow_params, move)
        elif skip is None or not skip:
            torch._foreach_lerp_(self.shadow_params, live, 1 - decay)

    @contextlib.contextmanager
    def applied(self, model):
        """Put the averages into the model for a `with` block; an error restores the weights too."""
        parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        live = self._matched(parameters, "model")
        weights = [p.clone() for p in live]
        torch._foreach_copy_(live, self.shadow_params)
        try:
            yield model
        finally:
            torch._foreach_copy_(live, weights)

    def state_dict(self):
        """{"decay", "num_updates", "shadow_params"}, as in published checkpoints; not copied."""
        return {"decay": self.decay, "num_updates": self.num_updates,
                "shadow_params": self.shadow_params}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Take over a state_dict(). Raises ValueError if its tensors are not of this model."""
        averages = self._matched(list(state["shadow_params"]), "state")
        torch._foreach_copy_(self.shadow_params, averages)
        self.decay, self.num_updates = state["decay"], state["num_updates"]

    def _matched(self, tensors, what):
        found = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(average.shape) for average in self.shadow_params]
        if found != expected:
            same = [a == b for a, b in zip(found, expected)]
            i = same.index(False) if False in same else len(same)
            raise ValueError(f"{what}: {len(found)} tensors, expected {len(expected)} as in the "
                             f"averaged model; at index {i}: {found[i:i + 1]}, expected "
                             f"{expected[i:i + 1]}.")
        return tensors


SAVED_BYTES = {"float32": 104, "16 bits": 68}   # for backward per position x width x block


def describe_memory(model, positions, in_float32, optimizer_bytes):
    """Lines about the memory that training takes on a rank.

    model: a SEDD, perhaps on the device "meta". positions: of the largest micro-batch, padded.
    in_float32: whether the blocks compute in float32, not 16 bits. optimizer_bytes: of its state.
    """
    n = sum(p.numel() for p in model.parameters())
    per_block, blocks = SAVED_BYTES["float32" if in_float32 else "16 bits"], len(model.blocks)
    if model.gradient_checkpointing:
        blocks = 1 + 4 / per_block * blocks   # one in full; of each its float32 input (4 bytes)
    activations = positions * model.n_heads * model.head_dim * blocks * per_block
    state = 12 * n + optimizer_bytes
    total = size(state + activations)
    return [f"memory of a rank, {n / 1e6:,.2f} million parameters: about {total}",
            f"  state {size(state)}: weights {size(4 * n)}, gradients {size(4 * n)}, optimizer "
            f"{size(optimizer_bytes)}, averages (EMA) {size(4 * n)}",
            f"  activations about {size(activations)}: an estimate, for micro-batches of up to "
            f"{positions:,} positions"]


def size(n_bytes):
    """Bytes as text, in MB below 0.1 GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
