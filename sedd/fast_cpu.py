"""SEDD's network computed faster on a CPU: the same weights, the same log scores up to rounding.

    model = FastSEDD(...)       # takes what SEDD takes; its state_dict has the same names

On other devices, and where torch.compile finds its own way, it computes as sedd/model.py does.
Measured gains stand beside each part. Needs torch and training/fast_linear.py.
"""
import torch
import torch.nn.functional as F

from sedd.model import SEDD, Block, Head, join_heads, modulated, split_heads, wide_dtype
from training.fast_linear import fast_linear, on_cpu

# The list of positions that are wanted is padded, with position 0, to a multiple of this, as
# oneDNN compiles kernels for every new length: a tenth of a small model's step (measured).
NEEDED_MULTIPLE = 64

# Attention in bfloat16; without these it takes 1.2 to 1.8 times as long (measured).
SCORES = 2**19          # attention scores computed at a time: 1 MB, which stays in the cache
KEYS_MULTIPLE = 32      # the number of keys is padded to a multiple of this, as suits the kernels,
KEYS_LONG = 192         # but only if it exceeds this: below, the padding costs more than it saves
LONGEST_IN_PARTS = 512  # residues; all attention weights are in memory: too much for more


class FastSEDD(SEDD):
    """SEDD, whose first block computes queries, keys and values once per token, and whose last
    block and head compute only the positions that are wanted."""

    def new_block(self, *sizes):
        return FastBlock(*sizes)

    def new_head(self, *sizes):
        return FastHead(*sizes)

    def logits(self, xt, c, rotary, attended, wanted):
        if not on_cpu(xt):
            return super().logits(xt, c, rotary, attended, wanted)
        needed = None
        if wanted is not None:
            places = wanted.flatten().nonzero()[:, 0]
            rows = F.pad(places, (0, -len(places) % NEEDED_MULTIPLE))
            needed = (rows, rows // xt.shape[1])
        h = self.vocab_embed(xt)                                                # (B, L, H)
        for i, block in enumerate(self.blocks):
            is_first = i == 0
            is_last = i == len(self.blocks) - 1
            h = self.run_block(block, h, c, rotary, attended,
                               (xt, self.vocab_embed.embedding) if is_first else None,
                               needed if is_last else None)
        logits = self.output_layer(h, c, needed)
        if wanted is None:
            return logits
        everywhere = logits.new_zeros(xt.numel(), self.vocab_size)
        return everywhere.index_copy(0, places, logits[:len(places), 0]).view(*xt.shape, -1)


class FastBlock(Block):
    """Block. Its forward takes two more inputs, None if they do not apply.

    tokens: for the first block, whose h is the embedding of xt: (xt (B, L), embedding (V, H)).
            Queries, keys and values are then computed once per token and protein, not per position.
    needed: (rows of h.flatten(0, 1), the protein of each), both (n,) int64: what follows attention
            is computed at these positions only, and h is returned as (n, 1, H).
    """

    def forward(self, h, c, rotary, attended, tokens=None, needed=None):
        modulation = self.adaLN_modulation(c)[:, None]                          # (B, 1, 6 H)
        shift1, scale1 = modulation.chunk(6, dim=-1)[:2]                        # each (B, 1, H)
        x = h if tokens is None else tokens[1][None]                            # (1, V, H)
        qkv = self.queries_keys_values(modulated(self.norm1(x), shift1, scale1))
        if tokens is not None:      # look up rows by a product: its gradient is exact and fast
            qkv = F.one_hot(tokens[0], x.shape[1]).to(qkv.dtype) @ qkv          # (B, L, 3 H)
        branch = self.attention(qkv, rotary, attended)
        if needed is not None:
            rows, proteins = needed
            h = take(h, rows)
            branch = take(branch, rows)
            modulation = spread(modulation, proteins)
        gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)[2:]
        p = self.dropout if self.training else 0.0
        h = add_branch(h, fast_linear(branch, self.attn_out.weight), gate1, p)
        branch = self.feed_forward(modulated(self.norm2(h), shift2, scale2))
        return add_branch(h, branch, gate2, p)

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
        return fast_linear(x, F.embedding(torch.cat([pairs, rows[2 * H:]]), self.attn_qkv.weight))

    def attention(self, qkv, rotary, attended):
        if not on_cpu(qkv):
            return super().attention(qkv, rotary, attended)
        q, k, v = qkv.chunk(3, dim=-1)
        head_dim = q.shape[-1] // self.n_heads
        factor = torch.complex(*rotary).repeat(1, self.n_heads)                 # (L, H / 2)
        q = rotate_pairs(q, factor * head_dim**-0.5)
        k = rotate_pairs(k, factor)
        return join_heads(attend(*(split_heads(x, self.n_heads) for x in (q, k, v)), attended))

    def feed_forward(self, x):
        """self.mlp, but in bfloat16 on a CPU with the exact GELU (by erf), in a third of the time
        (measured), not its tanh approximation as published. They differ by at most 5e-4, less than
        rounding to bfloat16 changes."""
        widen, gelu, narrow = self.mlp
        x = fast_linear(x, widen.weight, widen.bias)
        x = F.gelu(x) if on_cpu(x) and x.dtype == torch.bfloat16 else gelu(x)
        return fast_linear(x, narrow.weight, narrow.bias)


class FastHead(Head):
    """Head. needed: as in FastBlock, whose h (n, 1, H) it takes then; logits are (n, 1, V)."""

    def forward(self, h, c, needed=None):
        modulation = self.adaLN_modulation(c)[:, None]
        if needed is not None:
            modulation = spread(modulation, needed[1])
        shift, scale = modulation.chunk(2, dim=-1)
        return self.linear(modulated(self.norm_final(h), shift, scale))


def take(x, rows):
    """Rows (n,) of x (B, L, C) as n sequences of one position, (n, 1, C)."""
    return F.embedding(rows, x.flatten(0, 1))[:, None]      # its gradient is faster than x[rows]'s


def spread(modulation, proteins):
    """modulation (B, 1, C), of each protein -> (n, 1, C), of each position. In float32 at least, as
    the gradient is a sum over hundreds of positions of a protein: too many for bfloat16."""
    exact = modulation.to(wide_dtype(modulation.dtype))
    return take(exact, proteins).to(modulation.dtype)


def rotate_pairs(x, factor):
    """The same as rotate, in half of the time. The entries of a pair are neighbours in x
    (B, L, H): a complex number, which is multiplied by factor (L, H / 2). Returns (B, L, H)."""
    pairs = torch.view_as_complex(x.to(factor.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)


def attend(q, k, v, attended):
    """Softmax attention on a CPU: q, already scaled, k, v (B, heads, L, e), attended (B, 1, 1, L)
    bool or None -> as q."""
    # In bfloat16 torch's kernel takes 1.4 to 8 times as long as AttentionInParts, which keeps all
    # attention weights in memory for backward: too much for long proteins.
    if q.dtype != torch.bfloat16 or q.shape[2] > LONGEST_IN_PARTS:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attended, scale=1.0)
    B, heads, L, _ = q.shape
    padding = -L % KEYS_MULTIPLE if L > KEYS_LONG else 0
    if padding:
        if attended is None:
            attended = torch.ones(B, 1, 1, L, dtype=torch.bool)
        attended = F.pad(attended, (0, padding))
        k = F.pad(k, (0, 0, 0, padding))
        v = F.pad(v, (0, 0, 0, padding))
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
        out = q.new_empty(*q.shape[:2], v.shape[2])
        weights = []
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
