"""Our SEDD step, and a plain transcription of the published one, in turns.

    python -m bench sedd                                # random proteins of UniRef50's lengths
    python -m bench sedd --data proteins.fasta.gz       # real ones

The plain step is written from the published mathematics (Lou, Meng, Ermon 2024, arXiv 2310.16834)
in the style of the published code: rotary positions applied to packed queries, keys and values;
boolean indexing in the loss; AdamW and EMA tensor by tensor; proteins padded to one length. Ours is
the whole step of train_sedd_ddp.py, from batch plan to EMA. In float32, and in bfloat16 where the
processor computes in it. On a CPU with one thread, in CPU seconds. Leaves no files.
"""
import contextlib
import copy
import io
import math
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import (CommandParser, computes_in_bfloat16, made_lengths, now, read_options,
                          run_on_one_rank, say, write_made_fasta)
from ddp_setup import autocast
from sedd.batches import to_device
from proteins.letters import X_ID
from sedd.weights import noise_of
from training.command_line import prepare_and_train
from training.loop import global_gradient, open_batches, take_step
from train_sedd_ddp import Config, MicroBatchDataset, Model, micro_batch_loss, prepare

BATCH = 8                   # proteins in a plain step
EQUAL_LENGTH = 256          # residues of the proteins of equal length
PADDED_LENGTH = 512         # to which plain pads the others
N_MADE = 3000               # proteins in a random data set
NETWORK = dict(hidden_size=256, n_blocks=6, n_heads=8, dropout=0.1)
WARM_UP = 2                 # turns that are not counted: Adam's state, caches


def bench_sedd(args, ddp):
    """Time our SEDD step and a plain one alternately, in float32 and bfloat16."""
    on_cpu = ddp.device.type == "cpu"
    second = "CPU second" if on_cpu else "second"
    place = ddp.device
    if on_cpu:
        torch.set_num_threads(1)
        cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "the CPU")
        place = f"one thread of {cpu.strip()}"
    if not computes_in_bfloat16(ddp.device):
        say(f"bfloat16 is left out: {ddp.device.type} has no native bfloat16")
    print(f"SEDD step, {NETWORK['hidden_size']} wide, {NETWORK['n_blocks']} blocks, dropout "
          f"{NETWORK['dropout']}; {place}, in turns, median of "
          f"{args.repeats}; residues per {second}\n{'':<44}{'plain':>8}{'ours':>8}"
          f"{'ratio':>8}  {'(min-max)':<13}{'loss differs':>12}{'norm':>10}", flush=True)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        equal = Path(folder, "equal.fasta")
        made = Path(folder, "made.fasta")
        write_made_fasta(equal, [EQUAL_LENGTH] * 400, random)
        write_made_fasta(made, made_lengths(N_MADE, random), random)
        for file, length in ((args.data or made, PADDED_LENGTH), (equal, EQUAL_LENGTH)):
            say(f"{Path(file).stem}: reading proteins")
            prepare_and_train(
                ddp, lambda: prepare_quietly(file, length, Path(folder, str(length)), ddp),
                lambda run, ddp: print_rows(run, Path(file).stem, length, args.repeats, ddp))
    print(f"equal: {BATCH} proteins of {EQUAL_LENGTH} residues. The other proteins are cropped to "
          f"{PADDED_LENGTH} residues; plain pads all to this.\nDifferences are relative, without "
          "dropout, of our first batch, which plain gets without padding.")


def prepare_quietly(file, length, folder, ddp):
    """Prepare a run whose steps have as many positions as BATCH proteins of `length`."""
    config = Config(model=Model(**NETWORK))
    config.data.file = str(file)
    config.data.max_length = length
    config.data.val_fraction = 0.0
    config.training.tokens_per_batch = BATCH * length
    config.training.n_iters = 10**6
    config.training.stop_signals = ()
    config.monitoring.watchdog_minutes = 0
    config.loss.reduction = "sequence"
    with contextlib.redirect_stdout(io.StringIO()):
        return prepare(config, ddp, folder)


# ---- both steps, alternately ----

def print_rows(run, name, length, repeats, ddp):
    """Print rows of the table: steps from equal weights, in each dtype."""
    dtypes = [torch.float32]
    rows = [(torch.float32, torch.float32)]     # (dtype of ours, of plain)
    if computes_in_bfloat16(ddp.device):
        dtypes.append(torch.bfloat16)
        rows += [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():               # change the initial weights, with which all logits are 0
        for p in run.bare.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator).to(p.device)
    plain = PlainSteps(copy.deepcopy(run.bare), run.config, length, ddp)
    dataset = MicroBatchDataset(run.graph, run.noise, length, run.micro_batches, 0,
                                run.config.loss.reduction)
    say(f"{name}: comparing the results")
    differences = {dtype: compare(run, plain, dataset, dtype, ddp) for dtype in dtypes}
    times = time_in_turns(run, name, plain, dataset, dtypes, repeats, ddp)
    for ours, other in rows:
        ratios = [a / b for a, b in zip(times["plain", other], times["ours", ours])]
        plain_rate = 1 / statistics.median(times["plain", other])
        our_rate = 1 / statistics.median(times["ours", ours])
        title = f"{name}, {str(ours).removeprefix('torch.')}"
        if ours != other:
            title += " against float32"
        loss, norm = differences[ours]
        print(f"{title:<44}{plain_rate:>8,.0f}{our_rate:>8,.0f}{statistics.median(ratios):>7.2f}x  "
              f"{f'({min(ratios):.2f}-{max(ratios):.2f})':<13}{loss:>12.1e}{norm:>10.1e}",
              flush=True)


def time_in_turns(run, name, plain, dataset, dtypes, repeats, ddp):  # noqa: PLR0913 (both steps)
    """{("plain" or "ours", dtype): seconds per residue, one for each of the repeats}."""
    batches = open_batches(run, dataset, None, ddp)
    per_step = BATCH * run.plan.residues / run.plan.proteins    # mean residues in a plain step
    times = {}
    for dtype in dtypes:
        times["plain", dtype] = []
        times["ours", dtype] = []
    for turn in range(WARM_UP + repeats):
        if turn < WARM_UP:
            say(f"{name}: warm-up {turn + 1} of {WARM_UP}")
        else:
            say(f"{name}: turn {turn - WARM_UP + 1} of {repeats}")
        for (kind, dtype), found in times.items():
            start = now(ddp)
            if kind == "plain":
                plain.step(dtype)
                found.append((now(ddp) - start) / per_step)
            else:
                totals, _ = take_step(run, batches, loss_in(dtype, run, ddp), ddp)
                found.append((now(ddp) - start) / float(totals.sums[1]))
    return {kind: found[WARM_UP:] for kind, found in times.items()}


def loss_in(dtype, run, ddp):
    """The loss function of train_sedd_ddp.py, with autocast to `dtype`."""
    return lambda model, batch: micro_batch_loss(model, batch, run.graph, run.config, ddp, dtype)


def compare(run, plain, dataset, dtype, ddp):
    """Relative differences (loss, gradient norm) of both steps on our first batch, dropout 0."""
    batch = dataset[run.sampler.item_of(0, 0)]
    batch["x0"] = batch["x0"].where(batch["x0"] != X_ID, 0)     # no X: only plain would count it
    n = len(batch["x0"])
    for block in run.bare.train().blocks:
        block.dropout = 0.0
    batch["count"] = n
    totals, norm = global_gradient(run.model, [batch], loss_in(dtype, run, ddp), ddp)
    for block in run.bare.blocks:
        block.dropout = run.config.model.dropout
    batch = to_device(batch, ddp.device, torch.float32)
    loss = 0.0
    for i, length in enumerate(batch["mask"].sum(1).tolist()):
        part = [batch[name][i:i + 1] for name in ("x0", "xt", "sigma", "dsigma")]
        share = plain.loss([x[:, :length] if x.dim() == 2 else x for x in part], dtype, 0.0) / n
        share.backward()
        loss += float(share.detach())
    plain_norm = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters()])
    run.optimizer.zero_grad()
    plain.optimizer.zero_grad()
    return (abs(float(totals.sums[0]) / n / loss - 1), abs(float(norm / plain_norm) - 1))


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
        return plain_loss(log_score, sigma, dsigma, xt, x0).mean()

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


def main(argv):
    parser = CommandParser(prog="python -m bench sedd", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="proteins; default: random ones with the lengths of "
                                       "UniRef50")
    parser.add_argument("--repeats", type=int, default=5)
    args = read_options(parser, argv)
    run_on_one_rank("sedd", bench_sedd, args, argv)
