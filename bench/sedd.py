"""Compares a training step of SEDD with a plain one, on one CPU thread: `python -m bench sedd`.

    python -m bench sedd                                # random proteins of UniRef50's lengths
    python -m bench sedd --data proteins.fasta.gz       # real ones

The plain step is written from the published mathematics (Lou, Meng, Ermon 2024, arXiv 2310.16834)
in the style of the published code: rotary positions applied to packed queries, keys and values;
boolean indexing in the loss; AdamW and EMA tensor by tensor; proteins padded to one length. Ours is
the whole step of train_sedd_ddp.py, from batch plan to EMA. Leaves no files.
"""
import contextlib
import copy
import io
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ddp_setup import autocast
from training.finish import prepare_and_train
from sedd.sequences import FORMAT, LETTERS, N_TOKENS, PARTS, SETS, VERSION, X_ID, sequence_keys
from sedd.evaluation import to_device
from sedd.weights import noise_of
from training.loop import open_batches, global_gradient, take_step
from train_sedd_ddp import Config, MicroBatchDataset, Model, micro_batch_loss, prepare

LONGEST = 45_000                                    # residues in a random protein, at most
BATCH, EQUAL_LENGTH, PADDED_LENGTH = 8, 256, 512    # proteins in a plain step; residues
N_MADE = 3000                                       # proteins in a random data set


# ---- random proteins, also for other benches ----

def made_lengths(n, random):
    """(n,) int64 lengths as in UniRef50: log-normal, mean 287. random: a numpy generator."""
    return np.exp(random.normal(np.log(200), 0.85, n)).clip(11, LONGEST).astype(np.int64)


def write_made_fasta(path, lengths, random):
    """Write a FASTA file of random proteins of these lengths."""
    letters = np.array(list(LETTERS[:X_ID]))
    with open(path, "w") as file:
        for i, length in enumerate(lengths):
            file.write(f">made{i}\n{''.join(random.choice(letters, length))}\n")


def write_prepared(folder, n):
    """Write a prepared folder of n random proteins with the lengths of UniRef50. folder: Path."""
    random, histogram = np.random.default_rng(0), np.zeros(LONGEST + 1, np.int64)
    for name in SETS:
        (folder / name).mkdir(parents=True)
        for part in PARTS:
            (folder / name / part).touch()
    for first in range(0, n, 250_000):
        lengths = made_lengths(min(250_000, n - first), random)
        tokens = random.integers(0, X_ID, lengths.sum(), np.uint8)
        keys = sequence_keys(tokens, np.cumsum(lengths) - lengths, lengths)
        for (part, dtype), values in zip(PARTS.items(), (tokens, lengths, keys)):
            with open(folder / "train" / part, "ab") as file:
                values.astype(dtype).tofile(file)
        histogram += np.bincount(lengths, minlength=len(histogram))
    lengths = np.flatnonzero(histogram)
    sets = {name: {"proteins": 0, "residues": 0, "length_histogram": [],
                   "letter_counts": [0] * N_TOKENS, "keys_hash": "",
                   "files": {part: {"bytes": (folder / name / part).stat().st_size}
                             for part in PARTS}} for name in SETS}
    sets["train"].update(
        proteins=n, residues=int((histogram[lengths] * lengths).sum()),
        length_histogram=np.stack([lengths, histogram[lengths]], 1).tolist(),
        letter_counts=[1] * N_TOKENS)
    (folder / "meta.json").write_text(json.dumps({
        "format": FORMAT, "version": VERSION, "release": "made", "source": [],
        "val_fraction": 0.0, "min_length": 1, "sets": sets}))


# ---- the plain step ----

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


def plain_loss(log_score, sigma, dsigma, xt, x0):
    """Score entropy of the absorbing graph times dsigma, summed over positions: (B,)."""
    masked = xt == log_score.shape[-1] - 1
    E = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1)
    ratio = (1 / E)[:, None].expand_as(xt)[masked]
    target = torch.gather(log_score[masked], -1, x0[masked][:, None])[:, 0]
    positive = log_score[masked][:, :-1].exp().sum(-1)
    entropy = torch.zeros(xt.shape, device=xt.device, dtype=positive.dtype)
    entropy[masked] += positive - ratio * target + ratio * (ratio.log() - 1)
    return (dsigma[:, None] * entropy).sum(-1)


class PlainSteps:
    """Plain steps on batches of random tokens, all of one length, as if padding were residues."""

    def __init__(self, model, config, length, ddp, n=BATCH):
        self.model, self.dropout, self.ddp = model, config.model.dropout, ddp
        self.optim, self.noise = config.optim, noise_of(vars(config.noise))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr,
                                           weight_decay=0.0, foreach=False, fused=False)
        self.averages = [p.detach().clone() for p in model.parameters()]
        self.x0 = torch.randint(0, X_ID, (n, length), device=ddp.device)

    def loss(self, batch, dtype, dropout):
        x0, xt, sigma, dsigma = batch
        with autocast(dtype, self.ddp):
            log_score = plain_log_score(self.model, xt, sigma, dropout)
        return plain_loss(log_score, sigma, dsigma, xt, x0).mean()

    def step(self, dtype):
        x0, mask_id = self.x0, self.model.vocab_size - 1
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


# ---- both steps, alternately ----

def bench_sedd(args, ddp):
    """Time our SEDD step and a plain one alternately, in float32 and bfloat16."""
    on_cpu = ddp.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "the CPU")
    place = f"one thread of {cpu.strip()}" if on_cpu else ddp.device
    second = "CPU second" if on_cpu else "second"
    print(f"SEDD step, 256 wide, 6 blocks, dropout 0.1; {place}, in turns, median of "
          f"{args.repeats}; residues per {second}\n{'':<44}{'plain':>8}{'ours':>8}"
          f"{'ratio':>8}  {'(min-max)':<13}{'loss differs':>12}{'norm':>10}")
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        equal, made = Path(folder, "equal.fasta"), Path(folder, "made.fasta")
        write_made_fasta(equal, [EQUAL_LENGTH] * 400, random)
        write_made_fasta(made, made_lengths(N_MADE, random), random)
        for file, length in ((args.data or made, PADDED_LENGTH), (equal, EQUAL_LENGTH)):
            prepare_and_train(
                ddp, lambda: prepare_quietly(file, length, Path(folder, str(length)), ddp),
                lambda run, ddp: print_rows(run, Path(file).stem, length, args.repeats, ddp))
    print(f"equal: {BATCH} proteins of {EQUAL_LENGTH} residues. The other proteins are cropped to "
          f"{PADDED_LENGTH} residues; plain pads all to this.\nDifferences are relative, without "
          "dropout, of our first batch, which plain gets without padding.")


def prepare_quietly(file, length, folder, ddp):
    """Prepare a run whose steps have as many positions as BATCH proteins of `length`."""
    config = Config(model=Model(256, 6, 8, dropout=0.1))
    config.data.file, config.data.max_length, config.data.val_fraction = str(file), length, 0.0
    config.training.tokens_per_batch, config.training.n_iters = BATCH * length, 10**6
    config.loss.reduction = "sequence"
    config.training.stop_signals, config.monitoring.watchdog_minutes = (), 0
    with contextlib.redirect_stdout(io.StringIO()):
        return prepare(config, ddp, folder)


def print_rows(run, name, length, repeats, ddp):
    """Print rows of the table: steps from equal weights, in float32 and bfloat16."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():               # change the initial weights, with which all logits are 0
        for p in run.bare.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator).to(p.device)
    plain = PlainSteps(copy.deepcopy(run.bare), run.config, length, ddp)
    float32, bfloat16 = torch.float32, torch.bfloat16
    dataset = MicroBatchDataset(run.graph, run.noise, length, run.micro_batches, 0)
    differences = {dtype: compare(run, plain, dataset, dtype, ddp)
                   for dtype in (float32, bfloat16)}
    batches = open_batches(run, dataset, None, ddp)
    per_step = BATCH * run.plan.residues / run.plan.proteins    # mean residues in a plain step

    def time_step(kind, dtype):
        """Seconds of a step per residue."""
        start = now(ddp)
        if kind == "plain":
            plain.step(dtype)
            return (now(ddp) - start) / per_step
        totals, _ = take_step(run, batches, loss_in(dtype, run, ddp), ddp)
        return (now(ddp) - start) / float(totals.sums[1])

    kinds = [(kind, dtype) for dtype in (float32, bfloat16) for kind in ("plain", "ours")]
    for kind in kinds * 2:              # warm up: Adam's state, caches
        time_step(*kind)
    times = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            times[kind].append(time_step(*kind))
    for ours, other in ((float32, float32), (bfloat16, bfloat16), (bfloat16, float32)):
        ratios = [a / b for a, b in zip(times["plain", other], times["ours", ours])]
        rates = [1 / statistics.median(times[kind]) for kind in (("plain", other), ("ours", ours))]
        title = f"{name}, {str(ours)[6:]}" + (" against float32" if ours != other else "")
        print(f"{title:<44}{rates[0]:>8,.0f}{rates[1]:>8,.0f}{statistics.median(ratios):>7.2f}x  "
              f"{f'({min(ratios):.2f}-{max(ratios):.2f})':<13}"
              f"{differences[ours][0]:>12.1e}{differences[ours][1]:>10.1e}", flush=True)


def loss_in(dtype, run, ddp):
    """The loss function of train_sedd_ddp.py, with autocast to `dtype`."""
    return lambda model, batch: micro_batch_loss(model, batch, run.graph, run.config, ddp, dtype)


def compare(run, plain, dataset, dtype, ddp):
    """Relative differences (loss, gradient norm) of both steps on our first batch, dropout 0."""
    batch = dataset[run.sampler.item_of(0, 0)]
    batch["x0"] = batch["x0"].where(batch["x0"] != X_ID, 0)     # no X: only plain would count it
    n, loss = len(batch["x0"]), 0.0
    for block in run.bare.train().blocks:
        block.dropout = 0.0
    totals, norm = global_gradient(run.model, [batch], loss_in(dtype, run, ddp), ddp, n)
    for block in run.bare.blocks:
        block.dropout = run.config.model.dropout
    batch = to_device(batch, ddp.device, torch.float32)
    for i, length in enumerate(batch["mask"].sum(1).tolist()):
        part = [batch[name][i:i + 1] for name in ("x0", "xt", "sigma", "dsigma")]
        share = plain.loss([x[:, :length] if x.dim() == 2 else x for x in part], dtype, 0.0) / n
        share.backward()
        loss += float(share.detach())
    plain_norm = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters()])
    run.optimizer.zero_grad()
    plain.optimizer.zero_grad()
    return (abs(float(totals.sums[0]) / n / loss - 1), abs(float(norm / plain_norm) - 1))


def now(ddp):
    """CPU seconds of this process; for a device, wall seconds after it has finished its work."""
    if ddp.device.type == "cpu":
        return time.process_time()
    getattr(torch, ddp.device.type).synchronize()
    return time.perf_counter()
