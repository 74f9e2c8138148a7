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
tables. What stands here is what trains, on every device: where a CPU has a faster way, a function
that is called here takes it (sedd/fast_cpu.py, training/fast_linear.py). Reads and writes nothing.
Source: Lou, Meng, Ermon 2024, arXiv 2310.16834; adaLN-zero: Peebles, Xie 2023, arXiv 2212.09748.
"""
import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from sedd.fast_cpu import attention, dropout, gelu, list_rows, take_rows
from training.fast_linear import fast_linear, on_cpu


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

    def __init__(self, vocab_size, hidden_size, n_blocks, n_heads,   # noqa: PLR0913  (settings)
                 cond_dim=128, dropout=0.1, scale_by_sigma=True, parameterization="sedd",
                 gradient_checkpointing=False, forbidden=(), init_logits=0.0):
        super().__init__()
        if hidden_size % (2 * n_heads):
            fit = [str(n) for n in range(1, hidden_size // 2 + 1) if hidden_size % (2 * n) == 0]
            raise ValueError(f"n_heads = {n_heads}, hidden_size = {hidden_size}; expected heads of "
                             f"an even width hidden_size / n_heads, as rotary positions turn "
                             f"pairs: n_heads one of {', '.join(fit) or 'none'}.")
        if parameterization not in ("sedd", "subs"):
            raise ValueError(f"parameterization {parameterization!r}; expected 'sedd' or 'subs'.")
        if parameterization == "subs" and not scale_by_sigma:
            raise ValueError("parameterization is 'subs' with the uniform graph "
                             "(scale_by_sigma=False); expected 'sedd' there. Use 'subs' with the "
                             "absorbing graph.")
        self.vocab_size = vocab_size
        self.n_heads = n_heads
        self.head_dim = hidden_size // n_heads
        self.scale_by_sigma = scale_by_sigma
        self.parameterization = parameterization
        self.gradient_checkpointing = gradient_checkpointing
        self.forbidden = tuple(forbidden)
        # In the published order, in which checkpoints list the averages (EMA) of the parameters.
        self.vocab_embed = TokenTable(vocab_size, hidden_size)
        self.sigma_map = SigmaEmbedding(cond_dim)
        self.blocks = nn.ModuleList(Block(hidden_size, n_heads, cond_dim, dropout)
                                    for _ in range(n_blocks))
        self.output_layer = Head(hidden_size, vocab_size, cond_dim)
        if init_logits:
            std = init_logits / math.sqrt(hidden_size)
            nn.init.normal_(self.output_layer.linear.weight, std=std)

    def forward(self, xt, sigma, mask=None, wanted=None):
        """Log scores of all tokens at all positions, or at those that are wanted.

        xt:     (B, L) int64, noised tokens.
        sigma:  (B,) floating point, total noise > 0 in nats; NOT the time t.
        mask:   (B, L) bool, True = residue, or None where nothing is padding (faster).
        wanted: (B, L) bool, True where log scores are needed, or None: everywhere. See
                Graph.wanted in sedd/diffusion.py. On a CPU fewer positions take less time.
        Returns log_score (B, L, V): float32 whatever autocast or the parameters' dtype, float64 for
        a float64 model; 0 at each position's own token, and where not wanted. Values at padding are
        meaningless.
        Raises ValueError for other shapes or dtypes.
        """
        check_inputs(xt, sigma, mask=mask, wanted=wanted)
        exact = wide_dtype(self.vocab_embed.embedding.dtype)
        sigma = sigma.to(exact)
        # Autocast to bfloat16 would make neighbouring noise levels equal. This costs no time.
        with torch.autocast(xt.device.type, enabled=False):
            c = F.silu(self.sigma_map(sigma))                                   # (B, cond_dim)
        rotary = rotary_tables(xt.shape[1], self.head_dim, xt.device, exact)
        attended = None if mask is None else mask[:, None, None, :]             # (B, 1, 1, L)
        rows = None
        if wanted is not None and on_cpu(xt):   # a GPU would be waited for to tell how many
            rows = list_rows(wanted)                                            # (n,)
        *blocks, last_block = self.blocks
        h = self.vocab_embed(xt)                                                # (B, L, H)
        for block in blocks:
            h = self.run_block(block, h, c, rotary, attended)
        h = self.run_block(last_block, h, c, rotary, attended, rows)
        if rows is None:
            logits = self.output_layer(h, c)                                    # (B, L, V)
        else:
            picked = self.output_layer(h, c[rows // xt.shape[1]])               # (n, 1, V)
            everywhere = picked.new_zeros(*xt.shape, self.vocab_size)
            logits = everywhere.masked_scatter(wanted[..., None], picked)
        # To `exact` before log_score adds an offset, which bfloat16 would round.
        log_score = self.log_score(logits.to(exact), xt, sigma)
        if wanted is None:
            return log_score
        return log_score.masked_fill(~wanted[..., None], 0.0)

    def run_block(self, block, *inputs):
        """block(*inputs), of which gradient_checkpointing keeps only the inputs for backward."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

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

    forward takes h; c (B, cond_dim), the noise level; rotary, see rotary_tables; attended
    (B, 1, 1, L) bool, True = residue, or None where nothing is padding; rows (n,) int64 or None:
    what follows attention is computed at these rows of h.flatten(0, 1) alone -> (n, 1, H).
    """

    def __init__(self, hidden_size, n_heads, cond_dim, dropout):
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.norm1 = Norm(hidden_size)
        self.attn_qkv = Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attn_out = Linear(hidden_size, hidden_size, bias=False)
        self.norm2 = Norm(hidden_size)
        self.mlp = nn.Sequential(Linear(hidden_size, 4 * hidden_size),
                                 Gelu(),
                                 Linear(4 * hidden_size, hidden_size))
        self.adaLN_modulation = zero_linear(cond_dim, 6 * hidden_size)

    def forward(self, h, c, rotary, attended, rows=None):
        modulation = self.adaLN_modulation(c)[:, None]                          # (B, 1, 6 H)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        x = modulated(self.norm1(h), shift1, scale1)
        branch = self.attend(self.attn_qkv(x), rotary, attended)
        if rows is not None:
            modulation = spread(modulation, rows // h.shape[1])                 # (n, 1, 6 H)
            gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)[2:]
            h = take_rows(h, rows)                                              # (n, 1, H)
            branch = take_rows(branch, rows)
        branch = self.attn_out(branch)
        h = h + gate1 * dropout(branch, self.dropout, self.training)
        branch = self.mlp(modulated(self.norm2(h), shift2, scale2))
        return h + gate2 * dropout(branch, self.dropout, self.training)

    def attend(self, qkv, rotary, attended):
        """Softmax attention over all residues of a protein: qkv (B, L, 3 H) -> (B, L, H)."""
        q, k, v = (split_heads(x, self.n_heads) for x in qkv.chunk(3, dim=-1))
        q = rotate(q, rotary)
        k = rotate(k, rotary)
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attended)
        return out.transpose(1, 2).flatten(2)


class Head(nn.Module):
    """h (B, L, H) -> logits (B, L, V), scaled and shifted by the noise level."""

    def __init__(self, hidden_size, vocab_size, cond_dim):
        super().__init__()
        self.norm_final = Norm(hidden_size)
        self.linear = zero_linear(hidden_size, vocab_size)
        self.adaLN_modulation = zero_linear(cond_dim, 2 * hidden_size)

    def forward(self, h, c):
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)       # each (B, 1, H)
        return self.linear(modulated(self.norm_final(h), shift, scale))


def modulated(x, shift, scale):
    """x (1 + scale) + shift, in the dtype of shift and scale, which the matrix product uses."""
    return torch.addcmul(shift, x.to(scale.dtype), 1 + scale)


def split_heads(x, n_heads):
    """(B, L, H) -> (B, L, heads, e), with e = H / heads."""
    return x.unflatten(-1, (n_heads, -1))


def spread(x, proteins):
    """x (B, 1, C), of each protein -> (n, 1, C), of each of n rows. In float32 at least, as the
    gradient is a sum over hundreds of rows of a protein: too many for bfloat16."""
    exact = x.to(wide_dtype(x.dtype))
    return take_rows(exact, proteins).to(x.dtype)


class Linear(nn.Linear):
    """nn.Linear, by the fastest product that this CPU has."""

    def forward(self, x):
        return fast_linear(x, self.weight, self.bias)


class Gelu(nn.Module):
    """GELU by its tanh approximation."""

    def forward(self, x):
        return gelu(x)


class Norm(nn.Module):
    """Layer norm with a weight and no bias, computed in float32 at least."""

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, h):
        exact = wide_dtype(h.dtype)
        weight = self.weight.to(exact)
        return F.layer_norm(h.to(exact), weight.shape, weight, None, 1e-5).to(h.dtype)


def zero_linear(n_in, n_out):
    """A linear map that starts at zero: every block starts as the identity, every logit at 0."""
    linear = nn.Linear(n_in, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotary_tables(L, head_dim, device, dtype):
    """Cosines and sines of position x frequency, each (L, 1, head_dim), for `rotate`; positions
    count from 0, the frequencies repeat in the second half, where the sines change sign."""
    exponent = -torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    angle = torch.outer(torch.arange(L, device=device, dtype=dtype), 10000.0 ** exponent)
    cos = torch.cat([angle.cos(), angle.cos()], dim=-1)
    sin = torch.cat([-angle.sin(), angle.sin()], dim=-1)
    return cos[:, None], sin[:, None]


def rotate(x, rotary):
    """Rotary embedding of x (B, L, heads, e): rotates the pair of entries i and i + e/2.

    Source: arXiv 2104.09864, in half-split order.
    """
    cos, sin = (table.to(x.dtype) for table in rotary)
    partner = x.roll(x.shape[-1] // 2, dims=-1)     # i + e/2 at i, and i at i + e/2
    return torch.addcmul(x * cos, partner, sin)


def wide_dtype(dtype):
    """float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def check_inputs(xt, sigma, **positions):
    """ValueError for what SEDD.forward does not take. positions: mask and wanted, by name."""
    if xt.dtype != torch.int64 or xt.dim() != 2:
        raise ValueError(f"xt is {tuple(xt.shape)} {xt.dtype}; expected (B, L) torch.int64 token "
                         f"ids, whatever the dtype of autocast and model.")
    if sigma.shape != xt.shape[:1] or not sigma.is_floating_point():
        raise ValueError(f"sigma is {tuple(sigma.shape)} {sigma.dtype}; expected ({xt.shape[0]},) "
                         f"floating point: the total noise of each protein, sigma = noise(t)[0], "
                         f"not the time t.")
    meaning = {"mask": "True = residue, or None where nothing is padding",
               "wanted": "True = its log scores are needed, or None for all"}
    for name, value in positions.items():
        if value is not None and (value.dtype != torch.bool or value.shape != xt.shape):
            raise ValueError(f"{name} is {tuple(value.shape)} {value.dtype}; expected "
                             f"{tuple(xt.shape)} torch.bool, {meaning[name]}.")


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
        names = [name for name, _ in model.named_parameters()]
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
    """Exponential moving average of the parameters, in float32 at least.

    The decay of update k = 1, 2, ... is min(decay, (1 + k)/(10 + k)), so early averages forget the
    start. bfloat16 parameters are averaged in float32, where a change of 1e-4 is not lost.
    Raises ValueError for a decay outside [0, 1).
    """

    def __init__(self, parameters, decay=0.9999):
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}; expected 0 <= decay < 1.")
        self.decay = decay
        self.num_updates = 0
        self.shadow_params = [p.detach().to(wide_dtype(p.dtype), copy=True) for p in parameters]

    @torch.no_grad()
    def update(self, parameters):
        """Move the averages towards the parameters; call once after each optimiser step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        live = [p.detach().to(average.dtype)
                for p, average in zip(parameters, self.shadow_params, strict=True)]
        get_ema_multi_avg_fn(decay)(self.shadow_params, live, self.num_updates)

    @contextlib.contextmanager
    def applied(self, model):
        """Put the averages into the model for a `with` block; an error restores the weights too."""
        live = list(model.parameters())
        weights = [p.detach().clone() for p in live]
        copy_values(self.shadow_params, live)
        try:
            yield model
        finally:
            copy_values(weights, live)

    def state_dict(self):
        """{"decay", "num_updates", "shadow_params"}, as in published checkpoints; not copied."""
        return {"decay": self.decay, "num_updates": self.num_updates,
                "shadow_params": self.shadow_params}

    def load_state_dict(self, state):
        """Take over a state_dict(). Raises ValueError if its tensors are not of this model."""
        copy_values(state["shadow_params"], self.shadow_params)
        self.decay = state["decay"]
        self.num_updates = state["num_updates"]


@torch.no_grad()
def copy_values(source, target):
    """Copy tensors into tensors. Raises ValueError, and copies nothing, unless all have the same
    shapes."""
    given = [tuple(tensor.shape) for tensor in source]
    expected = [tuple(tensor.shape) for tensor in target]
    if given != expected:
        raise ValueError(f"averages of {len(given)} tensors of shapes {given[:3]}, ...; expected "
                         f"{len(expected)} of shapes {expected[:3]}, ..., as in the model.")
    for value, place in zip(source, target):
        place.copy_(value)


SAVED_BYTES = {"float32": 104, "16 bits": 68}   # for backward per position x width x block


def flops_per_position(model, length):
    """FLOP of a SEDD's forward and backward pass per position of a sequence of this length.

    6 for each weight that is applied to each position (Kaplan et al. 2020, arXiv 2001.08361), which
    are those of the blocks and the output, not those for the noise level; and attention's products:
    12 x blocks x width x length (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """
    width = model.n_heads * model.head_dim
    weights = len(model.blocks) * 12 * width**2 + width * model.vocab_size
    return 6 * weights + 12 * len(model.blocks) * width * length


def describe_memory(model, positions, in_float32, optimizer_bytes):
    """Lines about the memory that training takes on a rank.

    model: a SEDD, perhaps on the device "meta". positions: of the largest micro-batch, padded.
    in_float32: whether the blocks compute in float32, not 16 bits. optimizer_bytes: of its state.
    """
    n = sum(p.numel() for p in model.parameters())
    per_block = SAVED_BYTES["float32" if in_float32 else "16 bits"]
    blocks = len(model.blocks)
    if model.gradient_checkpointing:
        blocks = 1 + 4 / per_block * blocks   # one in full; of each its float32 input (4 bytes)
    activations = positions * model.n_heads * model.head_dim * blocks * per_block
    state = 12 * n + optimizer_bytes
    copy = bytes_as_text(4 * n)
    return [f"memory of a rank, {n / 1e6:,.2f} million parameters: about "
            f"{bytes_as_text(state + activations)}",
            f"  state {bytes_as_text(state)}: weights {copy}, gradients {copy}, optimizer "
            f"{bytes_as_text(optimizer_bytes)}, averages (EMA) {copy}",
            f"  activations about {bytes_as_text(activations)}: an estimate, for micro-batches of "
            f"up to {positions:,} positions"]


def bytes_as_text(n_bytes):
    """Bytes as text, in MB below 0.1 GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
