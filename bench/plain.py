"""Plain transcriptions of the published codes: what ours is compared with, in results and in speed.

Written from the published mathematics, in the style of the published code, not optimised, with the
weights of our networks. SEDD (Lou, Meng, Ermon 2024, arXiv 2310.16834): rotary positions applied to
packed queries, keys and values; boolean indexing in the loss; AdamW and EMA tensor by tensor; all
proteins of one length; a sampler that asks the network for all positions in each step. ProteinMPNN
(Dauparas et al. 2022, Science 378, 49): all L x L distances, concatenated inputs, the order as
one-hot matrices; DPO by four forward passes, for which the structures are read again; a sampler
that copies the structure for each design, and gathers inputs for one residue at a time.
"""
import math

import torch
import torch.nn.functional as F

from dpo.pair_batches import collate
from dpo.pairs import Pair
from mpnn.batches import collate_complexes
from mpnn.model import PAIRS
from proteins.letters import X_ID
from proteins.structures import Complex, read_structure
from sedd.weights import noise_of
from training.precision import autocast

LAST_TIME = 1e-5            # where the steps of SEDD's sampler end, as published


# ---- SEDD: a training step ----

def plain_log_score(model, xt, sigma, dropout=0.0):
    """Log scores (B, L, V) with the weights of a SEDD of the absorbing graph.

    Args: xt (B, L) int64; sigma (B,); dropout: on the output of each attention and MLP.
    """
    def linear(layer, x):               # not layer(x), which may use a faster implementation
        return F.linear(x, layer.weight, layer.bias)

    B, L = xt.shape
    frequency = torch.exp(-math.log(10000) * torch.arange(128, device=xt.device) / 128)
    angle = sigma[:, None] * frequency
    first, _, second = model.sigma_map.mlp
    c = F.silu(linear(second, F.silu(linear(first, torch.cat([angle.cos(), angle.sin()], -1)))))
    e = model.head_dim
    inverse = 1 / 10000 ** (torch.arange(0, e, 2, device=xt.device) / e)
    angle = torch.outer(torch.arange(L, device=xt.device), inverse).repeat(1, 2)    # (L, e)
    cos = torch.stack([angle.cos(), angle.cos(), torch.ones_like(angle)], 1)[None, :, :, None]
    sin = torch.stack([angle.sin(), angle.sin(), torch.zeros_like(angle)], 1)[None, :, :, None]

    def modulated(norm, h, shift, scale):
        with torch.autocast(h.device.type, enabled=False):
            h = F.layer_norm(h.float(), h.shape[-1:]) * norm.weight
        return h * (1 + scale) + shift

    h = model.vocab_embed.embedding[xt]
    for block in model.blocks:
        modulation = linear(block.adaLN_modulation, c)[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, 2)
        qkv = linear(block.attn_qkv, modulated(block.norm1, h, shift1, scale1))
        qkv = qkv.view(B, L, 3, model.n_heads, e)
        half = torch.cat([-qkv[..., e // 2:], qkv[..., :e // 2]], -1)
        q, k, v = (qkv * cos + half * sin).to(qkv.dtype).transpose(1, 3).unbind(2)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, L, -1)
        h = h + gate1 * F.dropout(linear(block.attn_out, out), dropout)
        branch = linear(block.mlp[0], modulated(block.norm2, h, shift2, scale2))
        branch = linear(block.mlp[2], F.gelu(branch, approximate="tanh"))
        h = h + gate2 * F.dropout(branch, dropout)
    head = model.output_layer
    shift, scale = linear(head.adaLN_modulation, c)[:, None].chunk(2, 2)
    scores = linear(head.linear, modulated(head.norm_final, h, shift, scale))
    log_E = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1).log()[:, None, None]
    scores = scores - log_E - math.log(model.vocab_size - 1)
    return torch.scatter(scores, -1, xt[..., None], torch.zeros_like(scores[..., :1]))


def plain_sedd_loss(log_score, sigma, dsigma, xt, x0):
    """Score entropy of the absorbing graph times dsigma, summed over positions: (B,)."""
    masked = xt == log_score.shape[-1] - 1
    E = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1)
    ratio = (1 / E)[:, None].expand_as(xt)[masked]
    target = torch.gather(log_score[masked], -1, x0[masked][:, None])[:, 0]
    positive = log_score[masked][:, :-1].exp().sum(-1)
    entropy = torch.zeros(xt.shape, device=xt.device, dtype=positive.dtype)
    entropy[masked] += positive - ratio * target + ratio * (ratio.log() - 1)
    return (dsigma[:, None] * entropy).sum(-1)


class PlainSedd:
    """Plain training steps of SEDD on random tokens, as if padding were residues.

    Args: model: its weights are moved. n, length: proteins in a step, and their residues."""

    def __init__(self, model, config, n, length, ddp):
        self.model = model
        self.dropout = config.model.dropout
        self.ddp = ddp
        self.optim = config.optim
        self.noise = noise_of(vars(config.noise))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr,
                                           weight_decay=0.0, foreach=False, fused=False)
        self.averages = [p.detach().clone() for p in model.parameters()]
        self.x0 = torch.randint(0, X_ID, (n, length), device=ddp.device)

    def loss(self, batch, dtype, dropout):
        x0, xt, sigma, dsigma = batch
        with autocast(dtype, self.ddp):
            log_score = plain_log_score(self.model, xt, sigma, dropout)
        return plain_sedd_loss(log_score, sigma, dsigma, xt, x0).mean()

    def step(self, dtype):
        x0 = self.x0
        mask_id = self.model.vocab_size - 1
        sigma, dsigma = self.noise((1 - 1e-3) * torch.rand(len(x0), device=x0.device) + 1e-3)
        noised = torch.rand(x0.shape, device=x0.device) < 1 - torch.exp(-sigma[:, None])
        xt = torch.where(noised, mask_id, x0)
        self.optimizer.zero_grad()
        self.loss((x0, xt, sigma, dsigma), dtype, self.dropout).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.grad_clip)
        self.optimizer.step()
        with torch.no_grad():
            for average, p in zip(self.averages, self.model.parameters()):
                average.sub_((1 - self.optim.ema) * (average - p))


# ---- SEDD: drawing proteins ----

def plain_sedd_sample(model, noise, B, L, steps, generator=None):
    """B sequences of L tokens (B, L), drawn with SEDD's absorbing graph by the published analytic
    steps; X is never drawn."""
    device = next(model.parameters()).device
    x = torch.full((B, L), model.vocab_size - 1, device=device)
    times = torch.linspace(1, LAST_TIME, steps + 1, device=device)
    for time, later in zip(times, times[1:]):
        sigma = noise(time.expand(B))[0]
        step = sigma - noise(later.expand(B))[0]
        probs = plain_analytic_probs(plain_log_score(model, x, sigma).exp(), x, step)
        probs[..., X_ID] = 0
        x = plain_draw(probs, generator)
    sigma = noise(times[-1].expand(B))[0]
    probs = plain_analytic_probs(plain_log_score(model, x, sigma).exp(), x, sigma)
    probs[..., X_ID:] = 0           # also the mask
    return plain_draw(probs, generator)


def plain_analytic_probs(score, x, step):
    """Probabilities (B, L, V) of the tokens one step later: exp(-step Q) score, the staggered
    score, times the transition from each token to x. score (B, L, V), x (B, L), step (B,)."""
    mask_id = score.shape[-1] - 1
    step = step[:, None, None]
    extra = (1 - step.exp()) * score.sum(-1, keepdim=True)
    staggered = score * step.exp()
    staggered[..., mask_id:] += extra
    transition = (-step).exp() * torch.nn.functional.one_hot(x, mask_id + 1)
    transition = transition + torch.where(x[..., None] == mask_id, 1 - (-step).exp(), 0.0)
    return staggered * transition


def plain_draw(probs, generator):
    """A token for each row of probs (B, L, V), which need not be normalised."""
    uniform = torch.rand(probs.shape, generator=generator).to(probs.device)
    return (probs / (1e-10 - (uniform + 1e-10).log())).argmax(-1)


# ---- ProteinMPNN: log-probabilities, DPO ----

def plain_log_probs(model, X, S, mask, residue_idx, chain_id, order):  # noqa: PLR0913
    """ProteinMPNN's forward pass, written as in its paper and the published code.

    Not optimised: all L x L distances, concatenated inputs, the order as one-hot matrices.
    Args, as of ProteinMPNN: X (B, L, 4, 3) in Angstrom; S, residue_idx, chain_id, order (B, L)
        int64; mask (B, L). The weights are those of `model`.
    Returns: log-probabilities (B, L, 21).
    """
    h_V, h_E, E_idx = plain_encode(model, X, mask, residue_idx, chain_id)
    visible = plain_visible(order, E_idx)
    h_S = model.W_s(S)
    known = mask[..., None, None]
    rest = [h_E, torch.zeros_like(h_E), plain_gather(h_V, E_idx)]
    blind = torch.cat(rest, -1) * (1 - visible) * known
    for layer in model.decoder_layers:
        rest = [h_E, plain_gather(h_S, E_idx), plain_gather(h_V, E_idx)]
        seen = torch.cat(rest, -1) * visible * known
        message = plain_message(plain_centre(h_V, seen + blind), layer.W1, layer.W2, layer.W3)
        h_V = plain_update(layer, h_V, message, mask)
    return torch.log_softmax(plain_linear(model.W_out, h_V), -1)


def plain_encode(model, X, mask, residue_idx, chain_id):
    """Features and encoder of plain_log_probs: h_V (B, L, H), h_E (B, L, K, H), E_idx (B, L, K)."""
    B, L = mask.shape
    N, CA, C, O = X.unbind(2)
    b = CA - N
    c = C - CA
    atoms = dict(N=N, CA=CA, C=C, O=O)
    atoms["CB"] = -0.58273431 * torch.linalg.cross(b, c) + 0.56802827 * b - 0.54067466 * c + CA

    def distances(p, q):
        difference = atoms[p][:, :, None] - atoms[q][:, None]
        return (difference.square().sum(-1) + 1e-6).sqrt()                  # (B, L, L)

    pair_mask = mask[:, :, None] * mask[:, None]
    D = pair_mask * distances("CA", "CA")
    D = D + (1 - pair_mask) * D.amax(-1, keepdim=True)
    nearest, E_idx = D.topk(min(model.num_edges, L), largest=False)
    centres = torch.linspace(2, 22, 16, device=X.device)
    rbf = []
    for k, pair in enumerate(PAIRS.split()):
        d = nearest if k == 0 else distances(*pair.split("-")).gather(2, E_idx)
        rbf.append(torch.exp(-((d[..., None] - centres) / 1.25).square()))
    offset = (residue_idx[:, :, None] - residue_idx[:, None]).gather(2, E_idx)
    same = (chain_id[:, :, None] == chain_id[:, None]).gather(2, E_idx)
    kind = torch.where(same, (offset + 32).clamp(0, 64), 65)
    f = model.features
    positional = plain_linear(f.embeddings.linear, F.one_hot(kind, 66).float())
    features = plain_linear(f.edge_embedding, torch.cat([positional, *rbf], -1))
    h_E = plain_linear(model.W_e, f.norm_edges(features))
    h_V = h_E.new_zeros(B, L, h_E.shape[-1])
    edge_mask = mask[..., None] * plain_gather(mask[..., None], E_idx)[..., 0]
    for layer in model.encoder_layers:
        x = plain_centre(h_V, torch.cat([h_E, plain_gather(h_V, E_idx)], -1))
        message = plain_message(x, layer.W1, layer.W2, layer.W3)
        h_V = plain_update(layer, h_V, message * edge_mask[..., None], mask)
        x = plain_centre(h_V, torch.cat([h_E, plain_gather(h_V, E_idx)], -1))
        h_E = layer.norm3(h_E + plain_message(x, layer.W11, layer.W12, layer.W13))
    return h_V, h_E, E_idx


def plain_visible(order, E_idx):
    """(B, L, K, 1) 1.0 where the neighbour comes before the residue in the order (B, L)."""
    L = order.shape[1]
    one_hot = F.one_hot(order, L).float()                                   # step, residue
    earlier = one_hot.new_ones(L, L).tril(-1)
    all_pairs = torch.einsum("ij,biq,bjp->bqp", earlier, one_hot, one_hot)
    return all_pairs.gather(2, E_idx)[..., None]


def plain_linear(layer, x):
    """A linear layer, not by training/fast_linear.py's faster products."""
    return F.linear(x, layer.weight, layer.bias)


def plain_gather(x, index):
    """(B, L, H), (B, L, K) -> (B, L, K, H)."""
    flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).view(*index.shape, x.shape[-1])


def plain_message(x, *layers):
    """Linear layers with GELU in between."""
    for layer in layers[:-1]:
        x = F.gelu(plain_linear(layer, x))
    return plain_linear(layers[-1], x)


def plain_centre(h_V, rest):
    """[h_V_i | rest_ij]: h_V (B, L, H), rest (B, L, K, n) -> (B, L, K, H + n)."""
    return torch.cat([h_V[:, :, None].expand(-1, -1, rest.shape[2], -1), rest], -1)


def plain_update(layer, h_V, m, mask):
    """h_V (B, L, H) after the messages m (B, L, K, H)."""
    h_V = layer.norm1(h_V + m.sum(2) / 30)
    dense = plain_message(h_V, layer.dense.W_in, layer.dense.W_out)
    return layer.norm2(h_V + dense) * mask[..., None]


def plain_dpo_loss(policy, reference, pairs, beta):
    """Mean DPO loss of pairs, padded to the longest, with four forward passes. Nothing is shared or
    cached: the structures are read again."""
    complexes = {}
    for pair in pairs:
        old = pair.complex
        if old.key not in complexes:
            complexes[old.key] = Complex(read_structure(old.structure.name), old.design, old.fixed)
    pairs = [Pair(complexes[pair.complex.key], pair.chosen, pair.rejected, pair.chain_M)
             for pair in pairs]
    batch = {**collate(pairs, range(len(pairs))), **collate_complexes([*complexes.values()])}
    device = policy.W_s.weight.device
    del batch["complex_keys"]           # no tensor
    batch = {name: value.to(device) for name, value in batch.items()}
    names = "X", "mask", "residue_idx", "chain_id"
    X, mask, residue_idx, chain_id = (batch[name][batch["complex"]] for name in names)
    designed = batch["chain_M"] * mask
    order = torch.arange(X.shape[1], device=device).expand(len(pairs), -1)
    order = order.gather(1, designed.gather(1, order).argsort(dim=1, stable=True))
    scores = []
    for model, grad in ((policy, True), (reference, False)):
        for S in (batch["chosen"], batch["rejected"]):
            with torch.set_grad_enabled(grad):
                log_probs = plain_log_probs(model, X, S, mask, residue_idx, chain_id, order)
                scores.append((log_probs.gather(-1, S[..., None])[..., 0] * designed).sum(1))
    chosen, rejected, ref_chosen, ref_rejected = scores
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


class PlainDpo:
    """Plain training steps of DPO, on pairs in random order.

    Args: policy: its weights are moved. reference: the base weights. pairs: dpo.pairs.Pair.
        n: pairs in a step. optim: the config's section."""

    def __init__(self, policy, reference, pairs, n, loss, optim):  # noqa: PLR0913 (what DPO needs)
        self.policy = policy
        self.reference = reference
        self.pairs = pairs
        self.n = n
        self.beta = loss.beta
        self.grad_clip = optim.grad_clip
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=optim.lr)
        self.order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
        self.taken = 0

    def loss(self, pairs):
        return plain_dpo_loss(self.policy, self.reference, pairs, self.beta)

    def step(self):
        """Returns the number of residues of the structures, one structure for each pair."""
        first = self.taken * self.n
        pairs = [self.pairs[self.order[k % len(self.order)]] for k in range(first, first + self.n)]
        self.taken += 1
        self.optimizer.zero_grad()
        self.loss(pairs).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip)
        self.optimizer.step()
        return sum(len(pair.complex) for pair in pairs)


# ---- ProteinMPNN: drawing sequences ----

def plain_mpnn_sample(model, tensors, order, temperature, noise=None):
    """Draw all residues, by the published loop over residues; X is never drawn.

    Args:
        tensors: X, mask, residue_idx, chain_id of B structures, as of ProteinMPNN.graph.
        order: (B, L) int64, element t is the residue drawn at step t.
        noise: (B, L, 21) Gumbel noise that decides the letters; None: torch.multinomial.
    Returns: S (B, L), and the probabilities (B, L, 21) that its letters were drawn from.
    """
    mask = tensors["mask"].float()
    h_V, h_E, E_idx = plain_encode(model, tensors["X"], mask, tensors["residue_idx"],
                                   tensors["chain_id"])
    B, L, H = h_V.shape
    visible = plain_visible(order, E_idx)
    seen = visible * mask[..., None, None]
    blind = torch.cat([h_E, torch.zeros_like(h_E), plain_gather(h_V, E_idx)], -1)
    blind = blind * (1 - visible) * mask[..., None, None]
    S = torch.zeros_like(order)
    h_S = torch.zeros_like(h_V)
    stack = [h_V, *(torch.zeros_like(h_V) for _ in model.decoder_layers)]
    all_probs = h_V.new_zeros(B, L, 21)

    def take(x, at):                                        # (B, L, ...) -> (B, 1, ...)
        index = at.view(B, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
        return x.gather(1, index)

    def put(x, at, rows):                                   # rows (B, 1, n) into x (B, L, n)
        x.scatter_(1, at[:, None, None].expand_as(rows), rows)

    for at in order.unbind(1):
        near = take(E_idx, at)                                              # (B, 1, K)
        edges = torch.cat([take(h_E, at), plain_gather(h_S, near)], -1)
        for k, layer in enumerate(model.decoder_layers):
            inputs = torch.cat([edges, plain_gather(stack[k], near)], -1)
            inputs = take(seen, at) * inputs + take(blind, at)
            here = take(stack[k], at)
            message = plain_message(plain_centre(here, inputs), layer.W1, layer.W2, layer.W3)
            put(stack[k + 1], at, plain_update(layer, here, message, take(mask, at)))
        logits = plain_linear(model.W_out, take(stack[-1], at)[:, 0]) / temperature
        logits[:, X_ID] = -torch.inf
        probs = logits.softmax(-1)
        if noise is None:
            letter = torch.multinomial(probs, 1)
        else:
            letter = (probs.log() + take(noise, at)[:, 0]).argmax(-1, keepdim=True)
        put(h_S, at, model.W_s(letter))
        put(all_probs, at, probs[:, None])
        S.scatter_(1, at[:, None], letter)
    return S, all_probs
