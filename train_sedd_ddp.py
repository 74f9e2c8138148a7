"""Pretrain SEDD (score entropy discrete diffusion) on protein sequences, on one process or many.

    python train_sedd_ddp.py --config configs/sedd_demo.yaml
    mpirun -n 4 python train_sedd_ddp.py --config configs/sedd_uniref50.yaml --data data/uniref50
    torchrun --nproc_per_node=4 train_sedd_ddp.py --config configs/sedd_cpu.yaml --data my.fasta optim.lr=1e-4
    python train_sedd_ddp.py --config configs/sedd_uniref50.yaml --plan 1,2,4,8      # what scaling will do; no device

Reads a YAML config (every key below, with its default) and proteins: a file (sequence_data.py), a folder made by
prepare_uniref50.py, or demo proteins that it makes. Writes into the run directory (--work_dir, default
runs/CONFIG_NAME): metrics.jsonl, config.yaml, samples/step_N.fasta, checkpoints/last.pt (before it last-1.pt) and
best.pt, and at the end status.json. The same command again continues from last.pt. SIGTERM, SIGUSR1, Ctrl-C, the
time DDP_DEADLINE and a file STOP in the run directory end a run in good order: it saves, and leaves with exit code 75.

A run does not depend on the number of ranks: the unit of distribution is the micro-batch, and everything random is
keyed by (seed, purpose, step, micro-batch) or by protein, never drawn from a stream of a rank.
"""
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()

import functools
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch

from ddp_setup import (AGAIN, BAD_INPUT, STOP_SIGNALS, Ddp, add_launch_arguments, all_sum, autocast, barrier, beat,
                       broadcast, check_alike, check_in_sync, choose_dtype, close_run, end_watch, grad_scaler,
                       gradient_sync, hand_over, limit_memory, load_checkpoint, machine_differences, optimize_with_ipex,
                       print0, read_flags, save_checkpoint, scale_for_batch, scale_name, setup_ddp, skip_where_bad,
                       abort, stop_reason, stop_wanted, to_host, watch_run, worker_init, wrap_ddp)
from run_config import Parser, config_differences, config_items, config_to_dict, dump_yaml, load_config
from run_log import (RunLog, check_resume, find_checkpoint, open_run, replace_status, write_status,
                     write_text_atomic)
from sedd_diffusion import (independent_log_score, make_graph, make_noise, sample, score_entropy_loss,
                            stratified_times)
from sedd_model import EMA, SEDD
from sequence_data import (N_TOKENS, X_ID, BatchPlan, BatchReader, DemoSource, PreparedProteins, apply_max_length,
                           check_prepared, collate, count_rows, crop_starts, decode, eval_batches, eval_crop_starts,
                           keyed_generator, keyed_seed, keys_hash, read_meta, read_sequences, split_by_hash,
                           stage_prepared, sum_rows, unigram_frequencies)


# ------------------------------------------------------------------------------------------------------------ config
@dataclass
class Training:
    batch_size: int | None = None        # proteins per rank and micro-step, on average: the work is equal; or
    tokens_per_batch: int | None = None  # computed positions (padding included) per rank and micro-step, on average
    accum: int = 1                       # micro-steps per optimizer step
    num_workers: int = 0                 # processes that prepare batches, per rank
    n_iters: int | None = None           # optimizer steps; or
    num_epochs: int | None = None
    eval_freq: int = 500                 # steps between evaluations
    eval_samples: int = 1                # noise levels per validation protein
    log_freq: int = 10                   # steps between rows of metrics.jsonl
    snapshot_freq: int = 500             # steps between checkpoints
    keep_last: int = 2                   # of them are kept: last.pt, last-1.pt, ...
    max_bad_steps: int = 10              # steps in a row with a nan or infinite loss or gradient that end the run
    stop_signals: tuple[str, ...] = STOP_SIGNALS   # that end the run in good order
    patience: int | None = None          # evaluations without improvement before an early stop
    min_delta: float = 0.0               # nats per residue that count as an improvement
    seed: int = 0


@dataclass
class Optim:
    lr: float = 3e-4                     # at base_global_batch; scaled by `scale`
    warmup: int = 2500                   # steps, linear; scaled likewise
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"   # or {cap: 4}
    base_global_batch: int | None = None  # proteins (tokens, with tokens_per_batch) per step that lr was chosen for
    grad_clip: float = 1.0               # global norm; 0 = none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    ema: float = 0.9999


@dataclass
class Model:
    hidden_size: int = 768
    n_blocks: int = 12
    n_heads: int = 12
    cond_dim: int = 128
    dropout: float = 0.1
    parameterization: Literal["sedd", "subs"] = "sedd"
    init_logits: float = 0.0             # spread of a fresh model's logits; 0 as published, 3 learns sooner


@dataclass
class Loss:
    reduction: Literal["residue", "sequence"] = "residue"  # mean over residues; or sum over length, mean over proteins


@dataclass
class Noise:
    type: Literal["loglinear", "geometric", "cosine"] = "loglinear"
    eps: float = 1e-3                    # loglinear, cosine: share left clean at t = 1
    sigma_min: float = 1e-4              # geometric
    sigma_max: float = 20.0


@dataclass
class GraphSection:
    type: Literal["absorb", "uniform"] = "absorb"


@dataclass
class Data:
    file: str | None = None              # file or prepared folder; none: demo proteins, of known likelihood
    max_length: int = 512
    long: Literal["crop", "drop"] = "crop"   # what happens to longer proteins
    min_length: int = 1
    val_fraction: float = 0.05           # of the proteins, by hash of the sequence; 0 = no validation
    demo_proteins: int = 20000


@dataclass
class Memory:
    gradient_checkpointing: bool = False
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = True   # true: bfloat16 where native
    max_memory_per_gpu: float | None = None  # share of the device's memory this process may take


@dataclass
class DdpSection:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    broadcast_buffers: bool = False      # the model has none
    bucket_cap_mb: int | None = None


@dataclass
class Monitoring:
    sample_frequency: int = 0            # steps between sampled proteins; 0 = only at the end
    n_samples: int = 8
    sample_steps: int = 128
    predictor: Literal["euler", "analytic"] = "analytic"
    watchdog_minutes: float = 30.0       # without progress, after which the run is ended; 0 = never
    check_sync_every: int = 1000         # steps between comparisons of the weights over ranks; 0 = never


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    optim: Optim = field(default_factory=Optim)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    noise: Noise = field(default_factory=Noise)
    graph: GraphSection = field(default_factory=GraphSection)
    data: Data = field(default_factory=Data)
    memory: Memory = field(default_factory=Memory)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: Monitoring = field(default_factory=Monitoring)


# A resumed run may differ in these and in the number of ranks (accum follows); in nothing else.
MAY_CHANGE = ("training.n_iters", "training.num_epochs", "training.eval_freq", "training.log_freq",
              "training.snapshot_freq", "training.keep_last", "training.max_bad_steps", "training.stop_signals",
              "training.num_workers", "monitoring.sample_frequency", "monitoring.watchdog_minutes",
              "monitoring.check_sync_every", "data.file")   # its content is compared instead
PER_HOST = ("data.file", "training.num_workers", "memory.max_memory_per_gpu")   # need not be equal
KEPT = ("model", "ema", "optimizer", "scaler", "step", "best", "bad_steps", "config", "micro_batches", "lr", "warmup",
        "data", "plan")   # what a checkpoint must hold
SAVED_BYTES = {"float32": 104, "16 bits": 68}   # kept for backward per position, width and block; measured
LARGE_FILE = 200_000_000   # bytes of a file, from which on preparing it pays
PREPARED_VAL_FRACTION = 0.001   # default of prepare_uniref50.py
STAGE_SECONDS = 3 * 3600.0   # for the slowest host to copy the data: 20 GB at 2 MB/s
TIME_EPS = 1e-3   # t is drawn from [TIME_EPS, 1]: the weight of the loss is 1/t


def check_config(c):
    """Refuse values that no type forbids. Raises ValueError naming the key."""
    t, o, m = c.training, c.optim, c.memory
    for ok, text in (
            ((t.batch_size is None) != (t.tokens_per_batch is None),
             f"training.batch_size is {t.batch_size} and training.tokens_per_batch {t.tokens_per_batch}; "
             f"expected one of the two"),
            ((t.n_iters is None) != (t.num_epochs is None),
             f"training.n_iters is {t.n_iters} and training.num_epochs {t.num_epochs}; expected one of the two"),
            (m.max_memory_per_gpu is None or 0 < m.max_memory_per_gpu <= 1,
             f"memory.max_memory_per_gpu is {m.max_memory_per_gpu}; expected a share of the memory, above 0 up to 1"),
            (o.scale == "none" or o.base_global_batch,
             f"optim.scale is {o.scale} without optim.base_global_batch; give the global batch that lr was chosen for"),
            (not isinstance(o.scale, dict) or (list(o.scale) == ["cap"] and o.scale["cap"] >= 1),
             f"optim.scale is {o.scale}; expected none, linear, sqrt or {{cap: N}} with N of at least 1"),
            (0 <= c.model.dropout < 1, f"model.dropout is {c.model.dropout}; expected 0 up to below 1"),
            (0 <= c.data.val_fraction < 1, f"data.val_fraction is {c.data.val_fraction}; expected 0 up to below 1"),
            (c.model.parameterization == "sedd" or c.graph.type == "absorb",
             "model.parameterization is subs with the uniform graph; expected graph.type absorb"),
            (t.tokens_per_batch is None or t.tokens_per_batch >= c.data.max_length,
             f"training.tokens_per_batch is {t.tokens_per_batch}, data.max_length {c.data.max_length}; "
             f"expected a budget that holds the longest protein"),
            (set(t.stop_signals) <= {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"},
             f"training.stop_signals is {list(t.stop_signals)}; expected names such as SIGTERM, of signals that a "
             f"program may handle")):
        if not ok:
            raise ValueError(f"config: {text}.")
    width, heads = c.model.hidden_size, c.model.n_heads
    if width % (2 * max(heads, 1)):   # rotary positions turn pairs
        fit = [n for n in range(1, width // 2 + 1) if width % (2 * n) == 0]
        raise ValueError(f"config: model.n_heads is {heads}, model.hidden_size {width}; expected heads of an even "
                         f"width hidden_size / n_heads: n_heads one of {', '.join(map(str, fit)) or 'none'}.")
    at_least = {"training": dict(batch_size=1, tokens_per_batch=1, accum=1, num_workers=0, n_iters=1, num_epochs=1,
                                 eval_freq=1, eval_samples=1, log_freq=1, snapshot_freq=1, patience=1, min_delta=0,
                                 keep_last=1, max_bad_steps=0),
                "optim": dict(lr=0, warmup=0, base_global_batch=1, grad_clip=0, eps=0, weight_decay=0, ema=0),
                "model": dict(hidden_size=1, n_blocks=1, n_heads=1, cond_dim=1, init_logits=0),
                "data": dict(max_length=1, min_length=1, demo_proteins=1), "ddp": dict(bucket_cap_mb=1),
                "monitoring": dict(sample_frequency=0, n_samples=1, sample_steps=1, watchdog_minutes=0,
                                   check_sync_every=0)}
    for section, keys in at_least.items():
        for key, low in keys.items():
            value = getattr(getattr(c, section), key)
            if value is not None and value < low:
                raise ValueError(f"config: {section}.{key} is {value}; expected at least {low}.")


# -------------------------------------------------------------------------------------------------------------- loss
def micro_batch_loss(model, batch, graph, ddp, dtype):
    """Loss of one micro-batch: (sum in nats, residues, proteins), 0-dimensional. X and padding do not count.

    batch: see MicroBatches. The mean over the global batch is taken by the caller, over all its micro-batches.
    """
    xt, x0, mask, sigma, dsigma = (batch[k] for k in ("xt", "x0", "mask", "sigma", "dsigma"))
    with autocast(dtype, ddp):
        log_score = model(xt, sigma, None if batch["full"] else mask)
    loss, count = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, mask & (x0 != X_ID))
    return loss.sum(), count.sum(), (count > 0).sum()


def accumulate(model, batches, graph, config, ddp, dtype, nominal, scaler=None):
    """Gradient of the mean loss over the global batch, left in .grad on every rank (before clipping).

    batches: list of this rank's micro-batches. The mean is over residues, and how many there are in the micro-batches
    of all ranks is known only at the end: backward runs on sum / nominal, then comes one small all-reduce, then
    the gradients are multiplied by ranks x nominal / count (DDP has divided by the ranks).
    Returns (totals, norm). totals: float64 on the device, over all ranks: [loss sum, count, residues, ranks with a
    loss or gradient that is not finite, ranks with such a loss, ranks asked to stop]. norm: of the gradient. If
    totals[3] is not 0, all gradients are nan. Nothing here waits for the device.
    """
    totals = torch.zeros(6, dtype=torch.float64, device=ddp.device)
    for k, batch in enumerate(batches):
        if config.model.dropout:
            torch.manual_seed(batch["seed"])   # dropout too is keyed by the micro-batch
        batch = to_device(batch, ddp.device, next(model.parameters()).dtype)
        with gradient_sync(model, last=k == len(batches) - 1):
            loss, residues, proteins = micro_batch_loss(model, batch, graph, ddp, dtype)
            scaled = loss / nominal
            (scaler.scale(scaled) if scaler is not None else scaled).backward()
        totals[0] += loss.detach()
        totals[1] += residues if config.loss.reduction == "residue" else proteins
        totals[2] += residues
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    bad_loss = ~totals[0].isfinite()
    totals[3], totals[4], totals[5] = bad_loss | ~norm.isfinite(), bad_loss, stop_wanted(ddp)
    totals = all_sum(totals, ddp)
    factor = ddp.world_size * nominal / totals[1].clamp(min=1)   # 0: every crop of the step was X only
    factor = torch.where(totals[3] > 0, math.nan, factor).to(gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)
    return totals, norm * factor


# -------------------------------------------------------------------------------------------------------------- data
class MicroBatches(torch.utils.data.Dataset):
    """(step, micro, epoch, proteins, width) -> tensors of one micro-batch, noised on the CPU.

    Noise drawn here is the same on every device and with any number of workers.
    x0, xt (B, L) int64, L = width; mask (B, L) bool, True = residue; full: no padding; sigma, dsigma (B,) float64.
    """

    def __init__(self, graph, noise, max_length, micro_batches, seed):
        self.graph, self.noise, self.max_length = graph, noise, max_length
        self.micro_batches, self.seed = micro_batches, seed

    def __getitem__(self, item):
        step, micro, epoch, proteins, width = item
        n = len(proteins)
        starts = crop_starts(proteins, np.arange(n), self.max_length, self.seed, epoch)
        x0, mask = collate(proteins, np.arange(n), starts, self.max_length, width)
        # One time in each of n parts of [0, 1], shifted evenly over the micro-batches: together they cover it finely.
        offset = (keyed_seed(self.seed, "time", step) / 2**63 + micro / self.micro_batches) % 1
        permutation = torch.randperm(n, generator=keyed_generator(self.seed, "strata", step, micro))
        sigma, dsigma = self.noise(stratified_times(n, offset, permutation, TIME_EPS))
        xt = self.graph.corrupt(x0, sigma, keyed_generator(self.seed, "noise", step, micro))
        return {"x0": x0, "xt": torch.where(mask, xt, X_ID), "mask": mask, "full": bool(mask.all()), "sigma": sigma,
                "dsigma": dsigma, "seed": keyed_seed(self.seed, "dropout", step, micro)}


class Schedule(torch.utils.data.Sampler):
    """What this rank computes, from `first` step to `last`: items for MicroBatches. Any step is reached directly."""

    def __init__(self, reader, ddp, first=0, last=0):
        self.reader, self.first, self.last = reader, first, last
        accum = reader.plan.micro_batches // ddp.world_size
        self.mine = range(ddp.rank * accum, (ddp.rank + 1) * accum)

    def item(self, step, micro):
        return (step, micro, self.reader.plan.place(step)[0], *self.reader.micro_batch(step, micro))

    def __iter__(self):
        for step in range(self.first, self.last):
            for micro in self.mine:
                yield self.item(step, micro)

    def __len__(self):
        return (self.last - self.first) * len(self.mine)


def to_device(batch, device, dtype):
    """The batch on the device, noise levels in the model's dtype but in float32 at least."""
    move = {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    exact = torch.promote_types(dtype, torch.float32)
    return {**move, "sigma": move["sigma"].to(exact), "dsigma": move["dsigma"].to(exact)}


def missing_data(config):
    """What to say where data.file is not there: one line."""
    path = Path(config.data.file)
    problem = f"data.file {path} does not exist (relative to {Path.cwd()})."
    if path.suffix in (".fasta", ".fa", ".faa", ".fas", ".gz", ".txt", ".seq", ".pt"):
        return f"{problem} Check the path."
    if os.path.exists(f"{path}.partial"):
        return f"{problem} Its preparing is not finished: give the same command of prepare_uniref50.py again."
    return f"{problem} To download and prepare UniRef50 (13 GB): {prepare_command(config, path)}; " \
           f"from your own files: the same with --fasta FILE."


def prepare_command(config, folder):
    """The command that prepares data as this config wants it."""
    d, options = config.data, ""
    options += f" --val_fraction {d.val_fraction}" if d.val_fraction != PREPARED_VAL_FRACTION else ""
    options += f" --min_length {d.min_length}" if d.min_length != 1 else ""
    return f"python prepare_uniref50.py {folder}{options}"


class TrainingData(NamedTuple):
    train: object           # Proteins or PreparedProteins
    val: object             # Proteins, or None
    source: object          # a DemoSource that knows the likelihood of the proteins, or None
    fingerprint: dict       # what a resumed run must have alike
    description: str


def load_data(config, ddp, stage=None):
    """The proteins to train on and to validate with. stage: folder on each host to copy a prepared folder to.

    Raises ValueError or OSError for data that cannot be used."""
    d, source = config.data, None
    if d.file and not os.path.exists(d.file):
        raise FileNotFoundError(missing_data(config))
    if d.file and os.path.isdir(d.file):
        meta, train, val = open_prepared(config, ddp, stage)
        hashes = [meta["sets"][name]["keys_hash"] for name in ("train", "val")]
        made_of = meta.get("release") or ", ".join(map(str, meta.get("source", ())))
        description = f"{d.file}: {len(train) + len(val):,} proteins, prepared from {made_of}"
    else:
        if stage:
            raise ValueError(f"--stage copies a folder made by prepare_uniref50.py; data.file is {d.file}.")
        if d.file is None:
            source = DemoSource(seed=0)
            proteins = source.sample(d.demo_proteins, seed=config.training.seed)
            description = f"{len(proteins):,} demo proteins of a second-order Markov source"
        else:
            if os.path.getsize(d.file) > LARGE_FILE:
                print0(ddp, f"NOTE: every rank reads {d.file} ({os.path.getsize(d.file) / 1e9:.1f} GB) and keeps "
                            f"some 0.4 GB per million proteins. Prepared once, it starts in seconds and 0.1 GB:\n  "
                            f"{prepare_command(config, 'FOLDER')} --fasta {d.file}   then --data FOLDER")
            proteins, report = read_sequences(d.file, d.min_length, functools.partial(beat, ddp))
            description = f"{d.file}: {report}"
        train, val = proteins, proteins.subset([])
        if d.val_fraction:
            train, val = map(proteins.subset, split_by_hash(proteins, d.val_fraction))
        hashes = [keys_hash(part.keys) for part in (train, val)]
    beat(ddp)
    return TrainingData(train, val if len(val) else None, source, {"n": len(train), "hash": "".join(hashes)},
                        description)


def open_prepared(config, ddp, stage):
    """(meta, training proteins, validation proteins) of the prepared folder data.file, which rank 0 checks.

    stage: one rank of each host copies the folder there, all open the copy, and its names are removed at once: the
    data stays until the last of them closes it, and is gone however the run ends."""
    d, folder = config.data, Path(config.data.file)
    if ddp.is_main:
        check_prepared(folder, d.val_fraction, d.min_length)
    barrier(ddp)   # so that what is wrong is said once
    if stage:
        name = broadcast(f"{folder.resolve().name}-{os.urandom(4).hex()}" if ddp.is_main else None, ddp)
        folder, last = Path(stage) / f"{name}-{ddp.host or 'here'}", [time.monotonic()]

        def report(done, total):
            beat(ddp)
            if ddp.is_main and (done == total or time.monotonic() > last[0] + 10):
                last[0] = time.monotonic()
                print0(ddp, f"copying {d.file} to {stage}: {done / 1e9:,.3f} of {total / 1e9:,.3f} GB")

        if ddp.local_rank == 0:
            stage_prepared(d.file, folder, report)
        barrier(ddp, timeout=STAGE_SECONDS)
    meta, train, val = read_meta(folder), PreparedProteins(folder), PreparedProteins(folder, "val").read_all()
    if stage:
        barrier(ddp)
        if ddp.local_rank == 0:
            shutil.rmtree(folder)
    return meta, train, val


# -------------------------------------------------------------------------------------------------------- evaluation
class Validation:
    """Bound on -ln p(x0) of every validation protein, the same for any number of ranks.

    Noise is keyed by the protein; the times of all proteins together are stratified. Each protein is computed once,
    on one rank; sums are taken over the gathered values, so they do not depend on the ranks even in rounding.

    Most of the variance comes from how many residues the noise happens to change, which is alike for every model.
    So the same noise is given to the unigram model, whose scores and likelihood are known exactly, and the bound is
    its exact -ln p plus the estimated difference between the two (a control variate: no bias, several times less
    noise). What happens below TIME_EPS, where no score is learned, is thereby counted at the unigram's price, so that
    this is a bound for every noise schedule.
    """

    def __init__(self, proteins, config, graph, noise, letter_counts, source=None):
        """letter_counts: of the training proteins, see Proteins.letter_counts. source: of demo proteins, whose exact
        likelihood it knows."""
        d, t = config.data, config.training
        self.graph, self.noise, self.samples = graph, noise, t.eval_samples
        everything = np.arange(len(proteins))
        self.proteins = proteins.crop(eval_crop_starts(proteins, everything, d.max_length), d.max_length)
        self.batches = eval_batches(self.proteins.lengths, max(t.tokens_per_batch or 16 * d.max_length, d.max_length))
        # Protein i takes the i-th part of [0, 1] in an order that its key decides; further samples are 1/samples apart.
        lot = np.array([keyed_seed("validation time", int(k)) for k in self.proteins.keys])
        self.part = np.empty(len(lot))
        self.part[np.argsort(lot, kind="stable")] = (np.arange(len(lot)) + 0.5) / len(lot)
        self.counts = np.array([int((self.proteins[i] != X_ID).sum()) for i in everything])
        frequencies = np.append(unigram_frequencies(letter_counts), 0.0)   # X, which is never a target: 0
        nll = -np.log(np.append(frequencies[:X_ID], 1.0))                 # of each token, in nats
        self.unigram = math.exp(sum(nll[self.proteins[i]].sum() for i in everything) / self.counts.sum())
        self.frequencies = torch.from_numpy(frequencies)
        cost = nll   # the absorbing graph: residues that are not even masked at t = 1 are paid for too
        if not graph.absorb:   # what the unigram model knows of the noise at t = 1 is replaced by the prior of a model
            sigma1 = noise(torch.ones(1, dtype=torch.float64))[0]
            p1 = graph.transition(torch.arange(graph.n_tokens)[None], sigma1)[0]                 # (n_tokens, V)
            own_prior = (torch.xlogy(p1, p1) - torch.xlogy(p1, self.frequencies @ p1)).sum(-1).numpy()
            cost = np.where(nll > 0, nll - own_prior + graph.prior_kl(sigma1), 0.0)
        self.baseline = torch.tensor([cost[self.proteins[i]].sum() for i in everything], dtype=torch.float64)
        self.exact = None if source is None else source.nll(self.proteins)   # of the window that is evaluated

    @torch.no_grad()
    def __call__(self, model, ddp, dtype):
        """(n,) float64 bounds in nats, one per protein. model: the bare one; put into eval mode and back."""
        gain = torch.zeros(len(self.proteins), dtype=torch.float64)
        was_training, _ = model.training, model.eval()
        for indices in self.batches[ddp.rank::ddp.world_size]:
            x0, mask = collate(self.proteins, indices)
            weight = mask & (x0 != X_ID)
            for k in range(self.samples):
                t = TIME_EPS + (1 - TIME_EPS) * (torch.from_numpy(self.part[indices]) + k) / self.samples
                sigma, dsigma = self.noise(t)
                xt = x0.clone()
                for row, i in enumerate(indices.tolist()):
                    n = int(self.proteins.lengths[i])
                    g = keyed_generator("validation noise", int(self.proteins.keys[i]), k)
                    xt[row:row + 1, :n] = self.graph.corrupt(x0[row:row + 1, :n], sigma[row:row + 1], g)
                batch = to_device(dict(xt=xt, x0=x0, mask=mask, weight=weight, sigma=sigma, dsigma=dsigma), ddp.device,
                                  next(model.parameters()).dtype)
                with autocast(dtype, ddp):
                    log_score = model(batch["xt"], batch["sigma"], None if bool(mask.all()) else batch["mask"])
                loss, _ = score_entropy_loss(log_score, batch["sigma"], batch["dsigma"], batch["xt"], batch["x0"],
                                             self.graph, batch["weight"])
                beat(ddp)
                log_score = independent_log_score(self.frequencies, sigma, xt, self.graph)
                unigram, _ = score_entropy_loss(log_score, sigma, dsigma, xt, x0, self.graph, weight)
                gain[indices] += (unigram - loss.double().cpu()) * (1 - TIME_EPS) / self.samples
        model.train(was_training)
        return self.baseline - all_sum(gain, ddp)

    def summarise(self, bound):
        """Metrics of one evaluation."""
        nll = float(bound.sum() / self.counts.sum())
        return {"val/loss": nll, "val/perplexity": math.exp(min(nll, 50.0)), "val/unigram_perplexity": self.unigram}

    def compare(self, bound):
        """Where the exact NLL of the proteins is known: its mean per residue, and the standard error of the mean of
        bound - exact (ratio estimator over proteins), both in nats per residue."""
        if self.exact is None:
            return {}
        difference, n = bound.numpy() - self.exact, self.counts.sum()
        rest = difference - difference.sum() / n * self.counts
        return {"exact": float(self.exact.sum() / n), "standard_error": float(np.sqrt((rest**2).sum()) / n)}


def sample_proteins(model, config, graph, noise, counts, step, ddp, dtype):
    """FASTA text of monitoring.n_samples proteins. Keyed by (seed, step).

    counts: (longest + 1,) number of training proteins of each length, from which lengths are drawn."""
    m, seed = config.monitoring, config.training.seed
    generator = keyed_generator(seed, "sample", step)
    ends = np.cumsum(counts)
    chosen = np.searchsorted(ends, torch.randint(int(ends[-1]), (m.n_samples,), generator=generator).numpy(), "right")
    mask = torch.from_numpy(np.arange(chosen.max()) < chosen[:, None]).to(ddp.device)
    keys = None if bool(mask.all()) else mask
    was_training, _ = model.training, model.eval()
    def log_score(xt, sigma):
        beat(ddp)
        return model(xt, sigma, keys)

    with torch.no_grad(), autocast(dtype, ddp):
        out = sample(log_score, graph, noise, tuple(mask.shape), m.sample_steps,
                     predictor=m.predictor, forbidden=(X_ID,), mask=mask, generator=generator, device=ddp.device)
    model.train(was_training)
    return "".join(f">step_{step}_{i} length={n}\n{decode(row[:n])}\n"
                   for i, (row, n) in enumerate(zip(out.cpu().numpy(), chosen.tolist())))


# -------------------------------------------------------------------------------------------------------------- main
def describe_plan(config, ranks):
    """Table of what each number of ranks (text such as "1,2,4,8") would do, and the memory: no device is touched.

    Raises ValueError for what training would refuse, other than content of the data."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", ranks):
        raise ValueError(f"--plan {ranks}; expected numbers of ranks, such as 1,2,4,8")
    t, o, d, unit = config.training, config.optim, config.data, "proteins" if config.training.batch_size else "tokens"
    rows = [f"optim.scale {scale_name(o.scale)}: from lr {o.lr:g} and warm-up {o.warmup:,}"
            + (f" at a global batch of {o.base_global_batch:,} {unit}" if o.base_global_batch else "")]
    counts, positions, problems = None, None, []
    make_config_noise(config)
    if d.file and not os.path.exists(d.file):
        rows.append(f"steps per epoch are not known: {missing_data(config)}")
    else:
        data = load_data(config, Ddp())
        counts, rows = data.train.length_counts(), [f"data: {data.description}", *rows]
    rows.append(f"{'ranks':>6} {f'batch ({unit})':>17} {'learning rate':>14} {'warm-up steps':>14} {'steps/epoch':>12} "
                f"{'epochs':>8}")
    for n in map(int, ranks.split(",")):
        batch = n * t.accum * (t.batch_size or t.tokens_per_batch)
        lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, batch, o.base_global_batch)
        steps = epochs = "?"
        if counts is not None:
            try:
                plan = make_batch_plan(config, counts, n * t.accum)
            except ValueError as e:
                problems.append(f"refused with {n} rank(s): {e}")
                rows.append(f"{n:>6} {batch:>17,} {'refused, see below':>14}")
                continue
            positions = int((plan.sizes * plan.tops).max())
            steps = f"{plan.steps_per_epoch:,}"
            epochs = f"{t.num_epochs or t.n_iters / plan.steps_per_epoch:,.2f}"
        rows.append(f"{n:>6} {batch:>17,} {lr:>14.4g} {warmup:>14,} {steps:>12} {epochs:>8}")
    if problems and positions is None:
        raise ValueError("\n".join(problems))
    positions = positions or t.tokens_per_batch or t.batch_size * d.max_length
    return "\n".join([*rows, *problems, *describe_memory(config, positions)])


def describe_memory(config, positions):
    """Lines on the memory of a rank. positions: most of them in a micro-batch."""
    m = config.model
    with torch.device("meta"):
        n = sum(p.numel() for p in make_model(config, make_graph(config.graph.type, N_TOKENS)).parameters())
    per_block = SAVED_BYTES["float32" if config.memory.mixed_precision in (False, "float32") else "16 bits"]
    blocks = 1 + 4 / per_block * m.n_blocks if config.memory.gradient_checkpointing else m.n_blocks
    activations = positions * m.hidden_size * blocks * per_block
    return [f"memory of a rank, {n / 1e6:,.2f} million parameters in float32:",
            f"  weights {4 * n / 1e9:.2f} GB, gradients {4 * n / 1e9:.2f}, AdamW {8 * n / 1e9:.2f}, averages (EMA) "
            f"{4 * n / 1e9:.2f}: {20 * n / 1e9:.2f} GB",
            f"  activations about {activations / 1e9:.2f} GB: an estimate, for micro-batches of up to {positions:,} "
            f"positions"]


def make_batch_plan(config, length_counts, micro_batches):
    """The BatchPlan of this config."""
    t, d = config.training, config.data
    return BatchPlan(length_counts, d.max_length, micro_batches, t.batch_size, t.tokens_per_batch, d.long,
                     config.model.hidden_size, t.seed)


def make_reader(config, proteins, micro_batches, ddp):
    """A BatchReader of this config's plan. Rank 0 alone reads all lengths: a collective."""
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    check_alike({"batches (hash)": plan.identity()}, ddp)
    rows = (torch.from_numpy(sum_rows(proteins, plan)) if ddp.is_main else
            torch.zeros(2, count_rows(len(proteins)), dtype=torch.int64))
    return BatchReader(plan, proteins, broadcast(rows, ddp).numpy())


def make_config_noise(config):
    n = config.noise
    return make_noise(n.type, **(dict(sigma_min=n.sigma_min, sigma_max=n.sigma_max) if n.type == "geometric" else
                                 dict(eps=n.eps)))


def make_model(config, graph):
    m = config.model
    return SEDD(graph.vocab_size, m.hidden_size, m.n_blocks, m.n_heads, m.cond_dim, m.dropout,
                scale_by_sigma=graph.absorb, parameterization=m.parameterization, forbidden=(X_ID,),
                gradient_checkpointing=config.memory.gradient_checkpointing, init_logits=m.init_logits)


def describe_split(plan, val, data):
    """One line: how many proteins there are to train on and to validate with, and what becomes of long ones."""
    how = "cropped" if data.long == "crop" else "dropped"
    text = f"{plan.proteins:,} for training, {plan.residues:,} residues per epoch"
    text += f" ({plan.n_long:,} longer than {plan.max_length:,}: {how})" if plan.n_long else ""
    if plan.left_out > 0.005:
        text += f", about {plan.left_out:.1%} of them left out of each epoch, others each time"
    return text if val is None else f"{text}; {len(val):,} for validation"


def prepare(config, ddp, work_dir, resume=None, fresh=False, stage=None):
    """Everything before the first step: data, model, start or continue, the lock. Returns what `train` needs.

    Raises ValueError or OSError for input that cannot be used, and then has written nothing: the run directory is
    touched last, when every rank has come through all checks."""
    t, o, work_dir = config.training, config.optim, Path(work_dir)
    check_config(config)
    if fresh and resume:
        raise ValueError("--fresh and --resume exclude each other: start over, or continue.")
    check_alike(config_items(config, PER_HOST), ddp)   # of several hosts, each may have a copy of its own
    # Start or continue: rank 0 decides, all read the same checkpoint.
    differences = lambda before: config_differences(before, config_to_dict(config), ignore=MAY_CHANGE)
    unlike = lambda file: differences(config_to_dict(load_config(Config, file)))
    path = broadcast(find_checkpoint(work_dir, resume, fresh, unlike) if ddp.is_main else None, ddp)
    state = load_checkpoint(path, ddp) if path else None

    data = load_data(config, ddp, stage)
    check_alike({"data (hash)": data.fingerprint["hash"]}, ddp)
    graph = make_graph(config.graph.type, N_TOKENS)
    noise = make_config_noise(config)
    try:
        dtype, dtype_why = choose_dtype(config.memory.mixed_precision, ddp.device)
    except RuntimeError as e:
        raise ValueError(f"config: {e}") from None
    memory_note = limit_memory(config.memory.max_memory_per_gpu, ddp)
    torch.manual_seed(t.seed)   # the same initial weights on every rank
    bare = make_model(config, graph).to(ddp.device)

    # A global batch is a number of micro-batches, fixed at the start of the run, whatever the ranks are later.
    micro_batches = t.accum * ddp.world_size
    if state is not None:
        micro_batches = check_resume(state, path, __file__, KEPT, differences, MAY_CHANGE, bare.state_dict(),
                                     "proteins", data.fingerprint, ddp.world_size)
    accum, batch = micro_batches // ddp.world_size, micro_batches * (t.batch_size or t.tokens_per_batch)
    lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, batch, o.base_global_batch)
    progress = {"step": 0, "best": None, "bad_evals": 0, "recent": [0.0, 0.0], "finished": "",
                "bad_steps": [0, 0]}   # with a loss or gradient that is not finite: in all, and in a row now
    if state is not None:
        path = ddp.state.checkpoint[0]   # perhaps the one before
        lr, warmup, progress = state["lr"], state["warmup"], {k: state[k] for k in progress}
        bare.load_state_dict(state["model"])
    reader = make_reader(config, data.train, micro_batches, ddp)
    plan = reader.plan
    if state is not None and state["plan"] != plan.identity():
        raise ValueError(f"{path} was saved by a run with other batches (hash {state['plan']}, now {plan.identity()}); "
                         f"expected the same. Continue with the version of this project that saved it, or --fresh.")
    n_iters = t.n_iters or t.num_epochs * plan.steps_per_epoch
    schedule = Schedule(reader, ddp, progress["step"], max(n_iters, progress["step"]))
    if not is_finished(progress, n_iters):
        schedule.item(progress["step"], schedule.mine[0])   # damaged data is refused before anything is written
    validation, split = None, describe_split(plan, data.val, config.data)
    if data.val is not None:
        val, _, _ = apply_max_length(data.val, config.data.max_length, config.data.long)
        validation = Validation(val, config, graph, noise, data.train.letter_counts(), data.source)

    optimizer = torch.optim.AdamW(bare.parameters(), lr=lr, betas=o.betas, eps=o.eps,
                                  weight_decay=o.weight_decay, fused=True)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp)
    model = wrap_ddp(bare, ddp, **vars(config.ddp))
    ema, scaler = EMA(bare.parameters(), o.ema), grad_scaler(dtype, ddp)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        ema.load_state_dict(state["ema"])
        scaler.load_state_dict(state["scaler"])

    unit = "proteins" if t.batch_size else "tokens"
    n_parameters = sum(p.numel() for p in bare.parameters())
    lines = [f"model: SEDD, {n_parameters / 1e6:.2f} million parameters, {config.graph.type} graph, "
             f"{config.noise.type} noise, {config.model.parameterization}",
             f"  {str(dtype)[6:]} ({dtype_why}){memory_note}",
             f"data: {data.description}", f"  {split}",
             f"batch: {batch // micro_batches:,} {unit} x accum {accum} x {ddp.world_size} rank(s) = {batch:,} per "
             f"step on average, {plan.steps_per_epoch:,} steps per epoch, {n_iters:,} steps in all"]
    if plan.filled < 0.95 and micro_batches > 1:
        lines.append(f"  few of the longest proteins fit into such a batch: on average {plan.mean:,.4g} {unit}, "
                     f"and a step waits up to {1 / plan.filled - 1:.0%} longer than with larger batches")
    if accum != t.accum:
        lines.append(f"  accum is {accum} and not {t.accum}: it follows the ranks, so that the global batch stays")
    lines.append(f"optim: lr {lr:g}, warm-up {warmup:,} steps, " + (
        "kept from the checkpoint" if state is not None else "as given (scale none)" if o.scale == "none" else
        f"scaled from {o.lr:g} and {o.warmup:,} at {o.base_global_batch:,} {unit} ({scale_name(o.scale)})"))
    if state is None and warmup >= n_iters:
        lines.append(f"ATTENTION: the warm-up ({warmup:,} steps) lasts to the end ({n_iters:,} steps): the learning "
                     f"rate reaches {100 * n_iters / warmup:.0f} % of its value; lower optim.warmup or train longer")
    lines.append(f"results: {work_dir}, "
                 + ("a new run" if not path else f"finished, {path}" if is_finished(progress, n_iters) else
                    f"continuing from step {progress['step']:,} of {path}"))
    elsewhere = machine_differences(state, ddp) if state is not None else ""
    if elsewhere:
        lines.append(f"  saved elsewhere ({elsewhere}): the run goes on, but not to the last bit as it would have")
    wrap = textwrap.TextWrapper(80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    print0(ddp, "\n".join(map(wrap.fill, lines)))
    lock = None
    if ddp.is_main and not is_finished(progress, n_iters):
        lock = open_run(work_dir, fresh, ("checkpoints", "samples"))
        write_text_atomic(work_dir / "config.yaml", dump_yaml(config))
    if not is_finished(progress, n_iters):
        barrier(ddp)   # the run directory is there, on all ranks
        watch_run(ddp, work_dir, config.monitoring.watchdog_minutes, t.stop_signals)
    return SimpleNamespace(
        config=config, work_dir=work_dir, path=path, lock=lock, data=data, plan=plan,
        graph=graph, noise=noise, dtype=dtype, bare=bare, model=model, optimizer=optimizer, ema=ema, scaler=scaler,
        schedule=schedule, validation=validation, progress=progress, n_iters=n_iters, accum=accum,
        micro_batches=micro_batches, batch=batch, lr=lr, warmup=warmup)


def is_finished(progress, n_iters):
    return progress["finished"] == "early stop" or progress["step"] >= n_iters


def train(run, ddp):
    """Train from where `prepare` left off. Returns a dict of the final metrics, the same on every rank."""
    config, progress, bare, schedule, validation = run.config, run.progress, run.bare, run.schedule, run.validation
    t, o, m, n_iters, work_dir = config.training, config.optim, config.monitoring, run.n_iters, run.work_dir
    if is_finished(progress, n_iters):
        early = progress["finished"] == "early stop"
        more = f" Weights: {work_dir / 'checkpoints' / 'best.pt'}."
        more += "" if early else " To go on, raise training.n_iters or num_epochs."
        print0(ddp, f"This run is finished: {'early stop' if early else 'all steps done'} at step "
                    f"{progress['step']:,}.{more} To start over, --fresh.")
        if ddp.is_main:
            write_status(work_dir, 0, progress["finished"], progress["step"])
            return {"step": progress["step"]}
    progress["finished"] = ""
    log = RunLog(work_dir, ddp.is_main, total_steps=n_iters)
    log.truncate(progress["step"] if run.path else -1)
    before = "The checkpoints are of before. Lower optim.lr, raise optim.warmup, or set memory.mixed_precision: false."

    def check_lock():
        """Another run may have taken the folder over: then nothing more is written there, status.json included."""
        if run.lock and run.lock.lost:
            end_watch(ddp)
            run.lock.check()

    def save(name, keep_last=1, resumes=True):
        check_lock()
        log.sync()   # the rows before a checkpoint are on the disk no later than it
        if progress["bad_steps"][1] and not all(bool(p.isfinite().all()) for p in bare.parameters()):
            raise RuntimeError(f"step {progress['step']}: weights are nan or infinite; expected finite numbers. "
                               f"{before}")
        save_checkpoint(str(work_dir / "checkpoints" / name), ddp, keep_last, resumes, model=bare.state_dict(),
                        ema=run.ema.state_dict(), optimizer=run.optimizer.state_dict(), scaler=run.scaler.state_dict(),
                        config=config_to_dict(config), epoch=progress["step"] // run.plan.steps_per_epoch,
                        micro_batches=run.micro_batches, lr=run.lr, warmup=run.warmup, data=run.data.fingerprint,
                        plan=run.plan.identity(), **progress)

    def settle(totals, arrived):
        """Read the flags of a step: a bad one has changed nothing. Returns how many ranks were asked to stop."""
        bad, wanted = read_flags(totals, arrived, progress["bad_steps"], run.scaler, t.max_bad_steps,
                                 f"step {progress['step']}", before)
        run.ema.num_updates -= bad   # a skipped step has not moved the averages
        return wanted

    dataset = MicroBatches(run.graph, run.noise, config.data.max_length, run.micro_batches, t.seed)
    batches = iter(torch.utils.data.DataLoader(dataset, sampler=schedule, batch_size=None, num_workers=t.num_workers,
                                               pin_memory=ddp.device.type == "cuda", generator=torch.Generator(),
                                               worker_init_fn=functools.partial(worker_init, signals=t.stop_signals)))
    per_protein = (1.0 if t.tokens_per_batch or config.loss.reduction == "sequence" else
                   run.plan.residues / run.plan.proteins)
    nominal = run.batch * per_protein   # a fixed guess of the count, so that backward runs on numbers near 1
    bare.train()
    # DDP lays out its buckets anew after its first backward, which changes the order of sums from 3 ranks on. One
    # backward whose gradient is thrown away, at every start, and a resumed run has the layout of the one before.
    if ddp.world_size > 1:
        first = dataset[schedule.item(progress["step"], schedule.mine[0])]
        accumulate(run.model, [first], run.graph, config, ddp, run.dtype, nominal)
        run.optimizer.zero_grad(set_to_none=True)
    since, seen = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=ddp.device)
    first_row, bound, values, pending, began = True, None, {}, None, time.perf_counter()
    reason = stop_reason(ddp, progress["step"])
    while not progress["finished"] and not reason:
        for group in run.optimizer.param_groups:
            group["lr"] = run.lr * min((progress["step"] + 1) / max(run.warmup, 1), 1.0)
        mine = [next(batches) for _ in range(run.accum)]
        totals, norm = accumulate(run.model, mine, run.graph, config, ddp, run.dtype, nominal, run.scaler)
        wanted = 0.0 if pending is None else settle(*pending)   # of the step before, which the device has long done
        if run.scaler.is_enabled():
            run.scaler.unscale_(run.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), o.grad_clip or math.inf, foreach=True)
        else:
            torch.nn.utils.clip_grads_with_norm_(bare.parameters(), o.grad_clip or math.inf, norm, foreach=True)
            skip_where_bad(run.optimizer, totals[3])
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        run.ema.update(bare.parameters(), skip=totals[3] > 0)
        progress["step"] += 1
        seen += totals[2]
        step, last = progress["step"], progress["step"] == n_iters

        evaluate, save_last = last or step % t.eval_freq == 0, last or step % t.snapshot_freq == 0
        report, pending = evaluate or step % t.log_freq == 0, to_host(totals)
        if report or save_last or ddp.device.type == "cpu":   # here the flags of this very step are at hand
            wanted, pending = settle(*pending), None
        reason = stop_reason(ddp, step, wanted)
        if reason and pending is not None:
            settle(*pending)
        if m.check_sync_every and (step % m.check_sync_every == 0 or last):
            check_in_sync(bare, ddp)
        if report:
            loss, per_residue = (float(totals[0] / totals[k].clamp(min=1)) for k in (1, 2))
            values = {"loss": loss, "perplexity": math.exp(min(per_residue, 50.0)), "grad_norm": float(norm),
                      "lr": run.optimizer.param_groups[0]["lr"], "epoch": (step - 1) // run.plan.steps_per_epoch,
                      "residues_per_second": float(seen) / (time.perf_counter() - since)}
            if progress["bad_steps"][0]:
                values["bad_steps"] = progress["bad_steps"][0]
            if run.scaler.is_enabled():
                values["loss_scale"] = run.scaler.get_scale()
            if first_row:   # of every start: the ranks may be others
                values.update({"ddp/world_size": ddp.world_size, "ddp/effective_batch_size": run.batch,
                               "ddp/scaled_lr": run.lr, "ddp/scaled_warmup": run.warmup})
            first_row = False
            more = {"bad steps": progress["bad_steps"][0]} if progress["bad_steps"][0] else {}
            log.progress(step, loss=loss, ppl=values["perplexity"], rate=values["residues_per_second"], **more)
            if math.isfinite(loss):
                progress["recent"] = [progress["recent"][0] + loss, progress["recent"][1] + 1]
        if evaluate:
            if validation is not None:
                with run.ema.applied(bare):
                    bound = validation(bare, ddp, run.dtype)
                values.update(validation.summarise(bound))
                score = values["val/loss"]
                if not math.isfinite(score):
                    raise RuntimeError(f"step {step}: the validation bound is {score}; expected a finite number. "
                                       f"{before}")
                log.say(f"step {step:,}: validation {score:.4f} nats per residue, perplexity "
                        f"{values['val/perplexity']:.3f} (unigram {validation.unigram:.3f})")
            else:   # training loss since the last evaluation
                score = progress["recent"][0] / progress["recent"][1] if progress["recent"][1] else math.inf
            progress["recent"] = [0.0, 0.0]
            improved, progress["bad_evals"], stop = broadcast(judge(score, progress, t), ddp)
            if improved:
                progress["best"] = {"step": step, "score": score}
                save("best.pt", resumes=False)
            progress["finished"] = "early stop" if stop else ""
        if last and not progress["finished"]:
            progress["finished"] = "all steps done"
        if report:
            check_lock()
            log.metrics(step, values)
        if ddp.is_main and (progress["finished"] or (m.sample_frequency and step % m.sample_frequency == 0)):
            with run.ema.applied(bare):
                text = sample_proteins(bare, config, run.graph, run.noise, run.plan.counts, step, ddp, run.dtype)
            write_text_atomic(work_dir / "samples" / f"step_{step}.fasta", text)
        if progress["finished"] or save_last or reason:   # after sampling: what says "finished" has everything
            save("last.pt", t.keep_last)
        if report:   # evaluation, saving and sampling are not counted as training
            since = time.perf_counter()
            seen.zero_()
    log.close()
    if run.lock:
        run.lock.release()
    result = {"step": progress["step"], **values, **(validation.compare(bound) if bound is not None else {})}
    if not progress["finished"]:
        saved = (ddp.state.checkpoint[0] or "nothing yet")
        print0(ddp, f"Stopped at step {progress['step']:,} of {n_iters:,}: {reason}. Saved: {saved}. The same command "
                    f"continues.")
        close_run(ddp, AGAIN, reason)
        return {**result, "stopped": reason}
    print0(ddp, summary(result, progress, work_dir, time.perf_counter() - began))
    close_run(ddp, 0, progress["finished"])
    return result


def main(config, ddp, work_dir, resume=None, fresh=False, stage=None):
    """prepare and train; importable."""
    run = None
    try:
        run = prepare(config, ddp, work_dir, resume, fresh, stage)
        return train(run, ddp)
    except BaseException as e:
        close_run(ddp, 130 if isinstance(e, KeyboardInterrupt) else 1, f"{type(e).__name__}: {e}")
        raise
    finally:
        end_watch(ddp)
        if run is not None and run.lock:
            run.lock.release()


def summary(result, progress, work_dir, seconds):
    """What a person wants to know at the end."""
    lines = [f"Finished at step {result['step']:,} ({progress['finished']}) after {seconds / 60:.1f} min, training "
             f"loss {result['loss']:.4f}"]
    if "val/loss" in result:
        rows = [("learned bound (EMA)", math.log(result["val/perplexity"])),
                ("unigram", math.log(result["val/unigram_perplexity"]))]
        if "exact" in result:
            rows.append(("exact, of the source", result["exact"]))
        lines += ["  the same validation proteins under   nats per residue   perplexity"]
        lines += [f"    {name:<35}{nats:>14.4f}{math.exp(nats):>13.3f}" for name, nats in rows]
        if "exact" in result:
            lines.append(f"    (no model can be below the exact value; standard error {result['standard_error']:.4f})")
    best = progress["best"]
    return "\n".join(lines + [f"  weights   {work_dir / 'checkpoints' / 'best.pt'} (step {best['step']:,}) and last.pt",
                              f"  samples   {work_dir / 'samples'}/step_{result['step']}.fasta",
                              f"  metrics   {work_dir / 'metrics.jsonl'}"])


def judge(score, progress, training):
    """(is it the best so far, evaluations without improvement, stop early?)"""
    improved = progress["best"] is None or score < progress["best"]["score"] - training.min_delta
    bad_evals = 0 if improved else progress["bad_evals"] + 1
    return improved, bad_evals, training.patience is not None and bad_evals >= training.patience


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], epilog="See the head of this file for examples and all keys.",
                    allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--data", "--datafile", dest="data",
                        help="file of proteins, or folder of prepare_uniref50.py (sets data.file)")
    parser.add_argument("--stage", metavar="DIR",
                        help="copy the prepared folder to DIR on each host, and read it there")
    parser.add_argument("--work_dir", help="run directory (default runs/CONFIG_NAME)")
    parser.add_argument("--resume", help="continue from this checkpoint")
    parser.add_argument("--fresh", action="store_true", help="start over; the old run directory is renamed")
    parser.add_argument("--plan", help="print batch, learning rate and warm-up for numbers of ranks such as 1,2,4,8")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    """(arguments, config). Raises ValueError."""
    args = make_parser().parse_intermixed_args(argv)
    config = load_config(Config, args.config, args.overrides)
    if args.data:
        config.data.file = args.data
    check_config(config)
    return args, config


def cli(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        make_parser().parse_args(["--help"])
    launch = Parser(add_help=False, allow_abbrev=False)   # known before the ranks can meet
    add_launch_arguments(launch)
    for option in ("--config", "--work_dir", "--plan"):
        launch.add_argument(option)
    early, problem, work_dir, began = launch.parse_args([]), None, None, time.time()
    try:
        early = launch.parse_known_args(argv)[0]
        work_dir = early.work_dir or early.config and os.path.join("runs", Path(early.config).stem)
        if early.plan is None:
            hand_over(early, argv)
    except (ValueError, RuntimeError) as e:
        problem = ValueError(e)   # told below, once
    try:
        if early.plan is not None:
            return print(describe_plan(read_arguments(argv)[1], early.plan))
        # A collective's own limit is long: the watchdog, which names who is late, is to be sooner.
        ddp = setup_ddp(early.device, early.backend, ranks=early.ranks, timeout=6 * 3600.0,
                        init_timeout=early.init_timeout, ipex=early.ipex)
    except (ValueError, RuntimeError, OSError) as e:
        code = getattr(e, "code", BAD_INPUT if isinstance(e, ValueError) else 1)
        print(f"error: {e}", file=sys.stderr)
        if early.plan is None:
            replace_status(work_dir, code, str(e), since=began)   # of several ranks, the first tells the cause
        sys.exit(code)
    except KeyboardInterrupt:   # nothing runs yet
        replace_status(work_dir, 130, "interrupted (Ctrl-C)", since=began)
        sys.exit(130)
    with ddp:
        try:
            speaking = replace_status(work_dir, None, "starting") if ddp.is_main else False
            if problem:
                raise problem
            args, config = read_arguments(argv)
            minutes = config.monitoring.watchdog_minutes   # while loading no less than for meeting
            signals = [name for name in config.training.stop_signals if name != "SIGINT"]   # Ctrl-C ends it at once
            watch_run(ddp, work_dir if speaking else None, minutes and max(minutes, early.init_timeout / 60), signals)
            run = prepare(config, ddp, work_dir, args.resume, args.fresh, args.stage)
        except (ValueError, OSError) as e:
            if ddp.is_main:
                replace_status(work_dir, BAD_INPUT, str(e))
            abort(ddp, f"error: {e}", code=BAD_INPUT)
        result = train(run, ddp)
    if "stopped" in result:
        sys.exit(AGAIN)


if __name__ == "__main__":
    cli()
