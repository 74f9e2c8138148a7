"""Functions that sedd/model.py calls: on a CPU they take less time, elsewhere they are torch's own.

    out = attention(q, k, v, attended)
    x = gelu(x)
    x = dropout(x, p, training)
    x = take_rows(x, list_rows(wanted))         # to compute with these alone

The results are those of torch up to rounding, apart from the random numbers of dropout. Gains were
measured on one core of AMD's Zen 4. Where torch.compile finds its own way, all is torch's own.
Needs torch and training/fast_linear.py.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from training.fast_linear import on_cpu

# Attention in bfloat16
SCORES = 2**19          # attention scores computed at a time: 1 MB, which stays in the cache
LONGEST_IN_PARTS = 512  # residues; backward keeps all attention weights: too much memory for more

# A list of rows is as long as a multiple of this, as oneDNN compiles its products anew for each
# new length: a tenth of a small model's step.
ROWS_MULTIPLE = 64


def attention(q: Tensor, k: Tensor, v: Tensor, attended: Tensor | None) -> Tensor:
    """Softmax attention over all residues of a protein, with scores q k / sqrt(e).

    Args: q, k, v (B, heads, L, e); attended (B, 1, 1, L) bool, True = residue, or None where
        nothing is padding.
    Returns: (B, heads, L, e).
    """
    # In bfloat16 torch's kernel takes 2 to 4 times as long.
    if on_cpu(q) and q.dtype == torch.bfloat16 and q.shape[2] <= LONGEST_IN_PARTS:
        return attention_in_parts(q, k, v, attended)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attended)


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, attended: Tensor | None) -> Tensor:
    """attention, for a few of the B x heads at a time, whose scores fit into the cache."""
    B, heads, L, e = q.shape
    hidden = q.new_zeros(B, 1, 1, L)                # added to the scores
    if attended is not None:
        hidden = hidden.masked_fill(~attended, torch.finfo(q.dtype).min)
    hidden = hidden.expand(B, heads, 1, L)
    n = max(1, SCORES // L**2)
    parts = [x.flatten(0, 1).split(n) for x in (q * e**-0.5, k, v, hidden)]
    out = []
    for q_part, k_part, v_part, hidden_part in zip(*parts):
        weights = torch.baddbmm(hidden_part, q_part, k_part.mT).softmax(-1)     # (n, L, L)
        out.append(torch.bmm(weights, v_part))
    return torch.cat(out).view(B, heads, L, e)


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, as published. In bfloat16 on a CPU the exact one, by erf, in
    half of the time: they differ by at most 5e-4, less than rounding to bfloat16 changes."""
    if on_cpu(x) and x.dtype == torch.bfloat16:
        return F.gelu(x)
    return F.gelu(x, approximate="tanh")


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout. On a CPU with 16 random bits per entry, four entries to a 64-bit number: in half
    of the time. There p is rounded to a multiple of 2^-16, and the entries that stay are scaled by
    the rounded p."""
    if not (training and p and on_cpu(x)):
        return F.dropout(x, p, training)
    n_dropped = round(p * 2**16)                    # of the 2^16 values that the bits may have
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2**63, None)
    bits = bits.view(torch.int16)[:x.numel()].view(x.shape)
    factor = torch.ge(bits, n_dropped - 2**15, out=torch.empty_like(x))         # 0.0 or 1.0
    return x * factor.mul_(1 / (1 - n_dropped / 2**16))


def list_rows(wanted: Tensor) -> Tensor:
    """Rows (n,) int64 of x.flatten(0, 1) that are wanted, (B, L) bool, in order; row 0 is appended
    until n is a multiple of ROWS_MULTIPLE."""
    rows = wanted.flatten().nonzero()[:, 0]
    return F.pad(rows, (0, -len(rows) % ROWS_MULTIPLE))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (n,) of x (B, L, C) as n sequences of one position, (n, 1, C)."""
    return F.embedding(rows, x.flatten(0, 1))[:, None]      # its gradient is faster than x[rows]'s
