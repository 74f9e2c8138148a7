"""Pretrain SEDD (score entropy discrete diffusion) on protein sequences, on one process or many.

    python train_sedd_ddp.py --config configs/sedd_demo.yaml
    mpirun -n 4 python train_sedd_ddp.py --config configs/sedd_uniref50.yaml --data data/uniref50
    python train_sedd_ddp.py --nproc_per_node 4 --config configs/sedd_cpu.yaml --data my.fasta
    python train_sedd_ddp.py --config configs/sedd_demo.yaml --plan 1,2,4,8   # what scaling does

Reads a YAML config (every key below and in train_loop.py, with its default) and proteins: a file
(sequence_data.py), a folder made by prepare_uniref50.py, or demo proteins that it makes. Writes
into the run folder (--work_dir, default runs/CONFIG_NAME): metrics.jsonl, config.yaml,
samples/step_N.fasta, checkpoints/last.pt (before it last-1.pt) and best.pt, and at the end
status.json. The same command again continues from last.pt. SIGTERM, SIGUSR1, Ctrl-C, the time
DDP_DEADLINE and a file STOP in the run folder end a run in good order: it saves, and leaves with
exit code 75.

A run does not depend on the number of ranks: the unit of distribution is the micro-batch, and
everything random is keyed by (seed, purpose, step, micro-batch) or by protein, never drawn from a
stream of a rank.
"""
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()

import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ddp_setup import Ddp, autocast, barrier, beat, broadcast, print0, stop_reason
from run_config import Parser, load_config
from run_dir import (ADVICE, Diverged, ALWAYS_NEEDED, MAY_ALWAYS_CHANGE, check_alike, check_lock,
                     check_resume, closing, finish_run, is_finished, save_run, say_finished,
                     start_or_continue, take_folder)
from run_log import RunLog, write_text_atomic
from sedd_diffusion import make_graph, make_noise, score_entropy_loss, stratified_times
from sedd_eval import TIME_EPS, Validation, sample_proteins, to_device
from sedd_model import EMA, SEDD
from sequence_batches import BatchPlan, BatchReader, count_rows, sum_rows
from sequence_data import (N_TOKENS, X_ID, DemoSource, PreparedProteins, apply_max_length,
                           check_prepared, collate, crop_starts, keyed_generator, keyed_seed,
                           keys_hash, read_meta, read_sequences, split_by_hash, stage_prepared)
from train_loop import (CommonTraining, DdpSection, Run, Schedule, Script, add_run_arguments,
                        bad_steps_field, check_values, choose_precision, describe_run,
                        first_batches, is_best, load_training_state, make_optimizer, plan_head,
                        print_lines, reason_to_stop, run_script, scale_for_batch, step_values,
                        take_step)


# ---------------------------------------------------------------- config
@dataclass
class Training(CommonTraining):
    batch_size: int | None = None        # proteins per rank and micro-step, on average; or
    tokens_per_batch: int | None = None  # computed positions, padding included, likewise
    n_iters: int | None = None           # optimizer steps; or
    num_epochs: int | None = None
    eval_freq: int = 500                 # steps between evaluations
    eval_samples: int = 1                # noise levels per validation protein
    snapshot_freq: int = 500             # steps between checkpoints


@dataclass
class Optim:
    lr: float = 3e-4                     # at base_global_batch; scaled by `scale`
    warmup: int = 2500                   # steps, linear; scaled likewise
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"   # or {cap: 4}
    base_global_batch: int | None = None  # proteins (tokens, with tokens_per_batch) per step
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
    init_logits: float = 0.0             # spread of a fresh model's logits; 3 learns sooner than 0


@dataclass
class Loss:
    reduction: Literal["residue", "sequence"] = "residue"   # mean over residues, or of the sums
    #                                                         over length, mean over proteins


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
    file: str | None = None              # file or prepared folder; none: demo proteins
    max_length: int = 512
    long: Literal["crop", "drop"] = "crop"   # what happens to longer proteins
    min_length: int = 1
    val_fraction: float = 0.05           # of the proteins, by hash of the sequence; 0: none
    demo_proteins: int = 20000           # of a source whose likelihood is known


@dataclass
class Memory:
    gradient_checkpointing: bool = False
    # true: bfloat16 where the device computes in it
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = True
    max_memory_per_gpu: float | None = None  # share of the device's memory this process may take


@dataclass
class Monitoring:
    sample_frequency: int = 0            # steps between sampled proteins; 0 = only at the end
    n_samples: int = 8
    sample_steps: int = 128
    predictor: Literal["euler", "analytic"] = "analytic"
    watchdog_minutes: float = 30.0       # without progress, then the run is ended; 0 = never
    check_sync_every: int = 1000         # steps between comparisons of the weights over ranks


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
MAY_CHANGE = (*MAY_ALWAYS_CHANGE, "monitoring.sample_frequency",
              "data.file")                  # its content is compared
PER_HOST = ("data.file", "training.num_workers", "memory.max_memory_per_gpu")   # may differ by host
NEEDED = (*ALWAYS_NEEDED, "ema", "plan")    # what a checkpoint must hold
SAVED_BYTES = {"float32": 104, "16 bits": 68}   # for backward, per position, width, block; measured
LARGE_FILE = 200_000_000                    # bytes of a file, from which on preparing it pays
PREPARED_VAL_FRACTION = 0.001               # default of prepare_uniref50.py
STAGE_SECONDS = 3 * 3600.0   # for the slowest host to copy the data: 20 GB at 2 MB/s


def check_config(c):
    """Refuse values that no type forbids. Raises ValueError naming the key."""
    t, m = c.training, c.model
    check_values(c, (
        ((t.batch_size is None) != (t.tokens_per_batch is None),
         f"training.batch_size is {t.batch_size} and training.tokens_per_batch "
         f"{t.tokens_per_batch}; expected one of the two"),
        ((t.n_iters is None) != (t.num_epochs is None),
         f"training.n_iters is {t.n_iters} and training.num_epochs {t.num_epochs}; expected one of "
         "the two"),
        (c.optim.ema < 1, f"optim.ema is {c.optim.ema}; expected 0 up to below 1"),
        (m.parameterization == "sedd" or c.graph.type == "absorb",
         "model.parameterization is subs with the uniform graph; expected graph.type absorb"),
        (t.tokens_per_batch is None or t.tokens_per_batch >= c.data.max_length,
         f"training.tokens_per_batch is {t.tokens_per_batch}, data.max_length {c.data.max_length}; "
         "expected a budget that holds the longest protein")),
        {"training": dict(tokens_per_batch=1, eval_samples=1), "optim": dict(ema=0),
         "model": dict(hidden_size=1, n_blocks=1, n_heads=1, cond_dim=1, init_logits=0),
         "data": dict(max_length=1, min_length=1, demo_proteins=1),
         "monitoring": dict(sample_frequency=0, n_samples=1, sample_steps=1)})
    if m.hidden_size % (2 * m.n_heads):   # rotary positions turn pairs
        fit = [n for n in range(1, m.hidden_size // 2 + 1) if m.hidden_size % (2 * n) == 0]
        raise ValueError(f"config: model.n_heads is {m.n_heads}, model.hidden_size "
                         f"{m.hidden_size}; expected heads of an even width hidden_size / n_heads: "
                         f"n_heads one of {', '.join(map(str, fit)) or 'none'}.")


# ---------------------------------------------------------------- loss
def micro_batch_loss(model, batch, graph, config, ddp, dtype):
    """Loss of one micro-batch of MicroBatches. X and padding do not count.

    Returns: (loss sum in nats, (2,) loss sum and residues for the log, number that the mean is
    over: residues or proteins). The mean over the global batch is taken by global_gradient.
    """
    batch = to_device(batch, ddp.device, next(model.parameters()).dtype)
    xt, x0, mask, sigma, dsigma = (batch[k] for k in ("xt", "x0", "mask", "sigma", "dsigma"))
    with autocast(dtype, ddp):
        log_score = model(xt, sigma, None if batch["full"] else mask)
    counted = mask & (x0 != X_ID)
    loss, residues = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, counted)
    total = loss.sum()
    count = residues.sum() if config.loss.reduction == "residue" else (residues > 0).sum()
    return total, torch.stack([total.detach().double(), residues.sum()]), count


# ---------------------------------------------------------------- data
class MicroBatches(torch.utils.data.Dataset):
    """(step, micro, epoch, proteins, width) -> tensors of one micro-batch, noised on the CPU: the
    same on every device and with any number of workers.

    A dict of x0, xt (B, L) int64, L = width; mask (B, L) bool, True = residue; full, bool: no
    padding; sigma, dsigma (B,) float64; seed, int.
    """

    def __init__(self, graph, noise, max_length, micro_batches, seed):
        self.graph, self.noise, self.max_length = graph, noise, max_length
        self.micro_batches, self.seed = micro_batches, seed

    def __getitem__(self, item):
        step, micro, epoch, proteins, width = item
        n = len(proteins)
        starts = crop_starts(proteins, np.arange(n), self.max_length, self.seed, epoch)
        x0, mask = collate(proteins, np.arange(n), starts, self.max_length, width)
        # One time in each of n parts of [0, 1], shifted evenly over the micro-batches: together
        # they cover it finely.
        offset = (keyed_seed(self.seed, "time", step) / 2**63 + micro / self.micro_batches) % 1
        strata = torch.randperm(n, generator=keyed_generator(self.seed, "strata", step, micro))
        sigma, dsigma = self.noise(stratified_times(n, offset, strata, TIME_EPS))
        xt = self.graph.corrupt(x0, sigma, keyed_generator(self.seed, "noise", step, micro))
        return {"x0": x0, "xt": torch.where(mask, xt, X_ID), "mask": mask, "full": bool(mask.all()),
                "sigma": sigma, "dsigma": dsigma,
                "seed": keyed_seed(self.seed, "dropout", step, micro)}


class TrainingData(NamedTuple):
    train: Any              # Proteins or PreparedProteins
    val: Any                # Proteins, or None
    source: Any             # a DemoSource that knows the likelihood of the proteins, or None
    fingerprint: dict       # what a resumed run must have alike
    description: str


def load_data(config, ddp, stage=None):
    """The proteins to train on and to validate with.

    stage: folder on each host to copy a prepared folder to.
    Raises: ValueError or OSError for data that cannot be used."""
    d, source = config.data, None
    if d.file and not os.path.exists(d.file):
        raise FileNotFoundError(missing_data(config))
    if d.file and os.path.isdir(d.file):
        meta, train, val = open_prepared(config, ddp, stage)
        hashes = [meta["sets"][name]["keys_hash"] for name in ("train", "val")]
        made_of = meta.get("release") or ", ".join(map(str, meta.get("source", ())))
        n = len(train) + len(val)
        description = f"{d.file}: {n:,} proteins, prepared from {made_of}"
    else:
        if stage:
            raise ValueError("--stage copies a folder made by prepare_uniref50.py; data.file is "
                             f"{d.file}.")
        if d.file is None:
            source = DemoSource(seed=0)
            proteins = source.sample(d.demo_proteins, seed=config.training.seed)
            description = f"{len(proteins):,} demo proteins of a second-order Markov source"
        else:
            proteins, report = read_file(config, ddp)
            description = f"{d.file}: {report}"
        train, val = split(proteins, d.val_fraction)
        hashes = [keys_hash(part.keys) for part in (train, val)]
    beat(ddp)
    fingerprint = {"n": len(train), "hash": "".join(hashes)}
    return TrainingData(train, val if len(val) else None, source, fingerprint, description)


def read_file(config, ddp):
    """(Proteins, report) of a file; a large one is read with a hint."""
    file, size = config.data.file, os.path.getsize(config.data.file)
    if size > LARGE_FILE:
        print0(ddp, f"NOTE: every rank reads {file} ({size / 1e9:.1f} GB) and keeps some 0.4 GB "
                    "per million proteins. Prepared once, it starts in seconds and 0.1 GB:\n  "
                    f"{prepare_command(config, 'FOLDER')} --fasta {file}   then --data FOLDER")
    return read_sequences(file, config.data.min_length, lambda: beat(ddp))


def split(proteins, val_fraction):
    """(training, validation) proteins."""
    if not val_fraction:
        return proteins, proteins.subset([])
    try:
        return tuple(map(proteins.subset, split_by_hash(proteins, val_fraction)))
    except ValueError as e:
        raise ValueError(f"data.{e} Or set data.val_fraction=0 to train without validation.") from e


def open_prepared(config, ddp, stage):
    """(meta, training proteins, validation proteins) of a prepared folder, which rank 0 checks.

    stage: one rank of each host copies the folder there, all open the copy, and its names are
    removed at once: the data stays until the last rank closes it, and is gone however the run ends.
    """
    d, folder = config.data, Path(config.data.file)
    if ddp.is_main:
        check_prepared(folder, d.val_fraction, d.min_length)
    barrier(ddp)   # so that what is wrong is said once
    if stage:
        name = f"{folder.resolve().name}-{os.urandom(4).hex()}" if ddp.is_main else None
        name, last = broadcast(name, ddp), [time.monotonic()]
        folder = Path(stage) / f"{name}-{ddp.host or 'here'}"

        def report(done, total):
            beat(ddp)
            if ddp.is_main and (done == total or time.monotonic() > last[0] + 10):
                last[0] = time.monotonic()
                print0(ddp, f"copying {d.file} to {stage}: {done / 1e9:,.3f} of {total / 1e9:,.3f} "
                            "GB")

        if ddp.local_rank == 0:
            stage_prepared(d.file, folder, report)
        barrier(ddp, timeout=STAGE_SECONDS)
    val = PreparedProteins(folder, "val").read_all()
    meta, train = read_meta(folder), PreparedProteins(folder)
    if stage:
        barrier(ddp)
        if ddp.local_rank == 0:
            shutil.rmtree(folder)
    return meta, train, val


def missing_data(config):
    """What to say where data.file is not there: one line."""
    path = Path(config.data.file)
    problem = f"data.file {path} does not exist (relative to {Path.cwd()})."
    if path.suffix in (".fasta", ".fa", ".faa", ".fas", ".gz", ".txt", ".seq", ".pt"):
        return f"{problem} Check the path."
    if os.path.exists(f"{path}.partial"):
        return f"{problem} Its preparing is not finished: give the same command of " \
               "prepare_uniref50.py again."
    command = prepare_command(config, path)
    return f"{problem} To download and prepare UniRef50 (13 GB): {command}; from your own files: " \
           "the same with --fasta FILE."


def prepare_command(config, folder):
    """The command that prepares data as this config wants it."""
    d, options = config.data, ""
    if d.val_fraction != PREPARED_VAL_FRACTION:
        options += f" --val_fraction {d.val_fraction}"
    options += f" --min_length {d.min_length}" if d.min_length != 1 else ""
    return f"python prepare_uniref50.py {folder}{options}"


def make_batch_plan(config, length_counts, micro_batches):
    t, d = config.training, config.data
    return BatchPlan(length_counts, d.max_length, micro_batches, t.batch_size, t.tokens_per_batch,
                     d.long, config.model.hidden_size, t.seed)


def make_reader(config, proteins, micro_batches, ddp):
    """A BatchReader of this config's plan. Rank 0 alone reads all lengths: a collective."""
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    check_alike({"batches (hash)": plan.identity()}, ddp)
    rows = (torch.from_numpy(sum_rows(proteins, plan)) if ddp.is_main else
            torch.zeros(2, count_rows(len(proteins)), dtype=torch.int64))
    return BatchReader(plan, proteins, broadcast(rows, ddp).numpy())


def make_schedule(reader, ddp, first=0, last=0):
    """This rank's items for MicroBatches."""
    def item_of(step, micro):
        return step, micro, reader.plan.place(step)[0], *reader.micro_batch(step, micro)
    return Schedule(item_of, reader.plan.micro_batches, ddp, first, last)


# ---------------------------------------------------------------- model
def make_model(config, graph):
    m = config.model
    return SEDD(graph.vocab_size, m.hidden_size, m.n_blocks, m.n_heads, m.cond_dim, m.dropout,
                scale_by_sigma=graph.absorb, parameterization=m.parameterization, forbidden=(X_ID,),
                gradient_checkpointing=config.memory.gradient_checkpointing,
                init_logits=m.init_logits)


def make_config_noise(config):
    n = config.noise
    if n.type == "geometric":
        return make_noise(n.type, sigma_min=n.sigma_min, sigma_max=n.sigma_max)
    try:
        return make_noise(n.type, eps=n.eps)
    except ValueError as e:
        raise ValueError(f"config: noise.{e}") from None


# ---------------------------------------------------------------- plan
def describe_plan(config, ranks):
    """Table of what each number of ranks (text such as "1,2,4,8") would do, and the memory. No
    device is touched. Raises ValueError for what training would refuse, content of data apart."""
    t, o, d = config.training, config.optim, config.data
    unit, counts, positions, problems = unit_of(config), None, None, []
    numbers, head = plan_head(o, ranks, unit)
    make_config_noise(config)
    if d.file and not os.path.exists(d.file):
        rows = [head, f"steps per epoch are not known: {missing_data(config)}"]
    else:
        data = load_data(config, Ddp())
        counts, rows = data.train.length_counts(), [f"data: {data.description}", head]
    rows.append(f"{'ranks':>6} {f'batch ({unit})':>17} {'learning rate':>14} {'warm-up steps':>14} "
                f"{'steps/epoch':>12} {'epochs':>8}")
    for n in numbers:
        batch = n * t.accum * (t.batch_size or t.tokens_per_batch)
        steps, epochs, filled = "?", "?", batch
        if counts is not None:
            try:
                plan = make_batch_plan(config, counts, n * t.accum)
            except ValueError as e:
                problems.append(f"refused with {n} rank(s): {e}")
                rows.append(f"{n:>6} {batch:>17,} {'refused, see below':>14}")
                continue
            positions = int((plan.sizes * plan.tops).max())
            steps, filled = f"{plan.steps_per_epoch:,}", filled_batch(batch, plan, config)
            epochs = f"{t.num_epochs or t.n_iters / plan.steps_per_epoch:,.2f}"
        lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, filled, o.base_global_batch)
        rows.append(f"{n:>6} {batch:>17,} {lr:>14.4g} {warmup:>14,} {steps:>12} {epochs:>8}")
    if problems and positions is None:
        raise ValueError("\n".join(problems))
    positions = positions or t.tokens_per_batch or t.batch_size * d.max_length
    return "\n".join([*rows, *problems, *describe_memory(config, positions)])


def describe_memory(config, positions):
    """Lines on the memory of a rank. positions: most of them in a micro-batch."""
    m = config.model
    with torch.device("meta"):
        model = make_model(config, make_graph(config.graph.type, N_TOKENS))
    n = sum(p.numel() for p in model.parameters())
    single = config.memory.mixed_precision in (False, "float32")
    per_block = SAVED_BYTES["float32" if single else "16 bits"]
    few = config.memory.gradient_checkpointing
    blocks = 1 + 4 / per_block * m.n_blocks if few else m.n_blocks
    activations = positions * m.hidden_size * blocks * per_block
    return [f"memory of a rank, {n / 1e6:,.2f} million parameters in float32:",
            f"  weights {4 * n / 1e9:.2f} GB, gradients {4 * n / 1e9:.2f}, AdamW "
            f"{8 * n / 1e9:.2f}, averages (EMA) {4 * n / 1e9:.2f}: {20 * n / 1e9:.2f} GB",
            f"  activations about {activations / 1e9:.2f} GB: an estimate, for micro-batches of up "
            f"to {positions:,} positions"]


def unit_of(config):
    """What a batch is counted in."""
    return "proteins" if config.training.batch_size else "tokens"


def filled_batch(batch, plan, config):
    """The global batch that there is data for: the learning rate is not scaled beyond it."""
    return min(batch, plan.proteins if config.training.batch_size else plan.residues)


# ---------------------------------------------------------------- prepare
@dataclass(kw_only=True)
class SeddRun(Run):
    graph: Any
    noise: Any
    plan: BatchPlan
    letters: Any          # (21,) int64, how often each token stands in the training proteins
    bound: Any = None     # (n,) bounds of the last evaluation


def prepare(config, ddp, work_dir, resume=None, fresh=False, stage=None):
    """Everything before the first step: data, model, start or continue, the lock. Returns SeddRun.

    Raises ValueError or OSError for input that cannot be used, and then has written nothing: the
    run folder is touched last, when every rank has come through all checks."""
    t, o, d, work_dir = config.training, config.optim, config.data, Path(work_dir)
    check_config(config)
    path, state, differences = start_or_continue(config, ddp, work_dir, resume, fresh, MAY_CHANGE,
                                                 PER_HOST)
    data = load_data(config, ddp, stage)
    check_alike({"data (hash)": data.fingerprint["hash"]}, ddp)
    graph, noise = make_graph(config.graph.type, N_TOKENS), make_config_noise(config)
    dtype, precision = choose_precision(config, ddp)
    torch.manual_seed(t.seed)   # the same initial weights on every rank
    bare = make_model(config, graph).to(ddp.device)

    # A global batch is a number of micro-batches, fixed at the start of the run.
    micro_batches = t.accum * ddp.world_size
    if state is not None:
        micro_batches = check_resume(state, path, __file__, NEEDED, differences, MAY_CHANGE,
                                     bare.state_dict(), "proteins", data.fingerprint,
                                     ddp.world_size)
    reader = make_reader(config, data.train, micro_batches, ddp)
    plan, batch = reader.plan, micro_batches * (t.batch_size or t.tokens_per_batch)
    if state is not None and state["plan"] != plan.identity():
        raise ValueError(f"{path} was saved by a run with other batches (hash {state['plan']}, now "
                         f"{plan.identity()}); expected the same. Continue with the version of "
                         "this project that saved it, or --fresh.")
    filled = filled_batch(batch, plan, config)
    lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, filled, o.base_global_batch)
    progress = {"step": 0, "best": None, "bad_evals": 0, "finished": "",
                "recent": [0.0, 0.0],   # training loss since the last evaluation: sum, number
                "bad_steps": [0, 0]}    # nan or infinite: in all, and in a row now
    if state is not None:
        lr, warmup, progress = state["lr"], state["warmup"], {k: state[k] for k in progress}
        bare.load_state_dict(state["model"])
    n_iters = t.n_iters or t.num_epochs * plan.steps_per_epoch
    schedule = make_schedule(reader, ddp, progress["step"], max(n_iters, progress["step"]))
    validation, letters = None, data.train.letter_counts()
    if data.val is not None:
        val, _, _ = apply_max_length(data.val, d.max_length, d.long)
        validation = Validation(val, config, graph, noise, letters, data.source)
    bare, model, optimizer, scaler = make_optimizer(config, bare, lr, dtype, ddp)
    by_residue = config.loss.reduction == "residue" and not t.tokens_per_batch
    run = SeddRun(
        config=config, work_dir=work_dir, path=path, fingerprint=data.fingerprint, bare=bare,
        model=model, optimizer=optimizer, scaler=scaler, ema=EMA(bare.parameters(), o.ema),
        dtype=dtype, progress=progress, schedule=schedule, validation=validation, n_iters=n_iters,
        steps_per_epoch=plan.steps_per_epoch, micro_batches=micro_batches, batch=batch, lr=lr,
        nominal=batch * (plan.residues / plan.proteins if by_residue else 1.0), warmup=warmup,
        graph=graph, noise=noise, plan=plan, letters=letters)
    load_training_state(run, state)
    if not is_finished(run):
        schedule.item_of(progress["step"], schedule.mine[0])   # damaged data is refused here
    lines = describe_data(run, data, precision, ddp)
    print_lines(ddp, lines + describe_run(run, state, unit_of(config), filled, ddp))
    take_folder(run, ddp, fresh, ("checkpoints", "samples"))
    return run


def describe_data(run, data, precision, ddp):
    """Lines on model, data and batch."""
    config, plan, unit = run.config, run.plan, unit_of(run.config)
    n_parameters, accum = sum(p.numel() for p in run.bare.parameters()), len(run.schedule.mine)
    how = "cropped" if config.data.long == "crop" else "dropped"
    text = f"{plan.proteins:,} for training, {plan.residues:,} residues per epoch"
    text += f" ({plan.n_long:,} longer than {plan.max_length:,}: {how})" if plan.n_long else ""
    if plan.left_out > 0.005:
        text += f", about {plan.left_out:.1%} of them left out of each epoch, others each time"
    text += f"; {len(data.val):,} for validation" if data.val is not None else ""
    lines = [f"model: SEDD, {n_parameters / 1e6:.2f} million parameters, {config.graph.type} "
             f"graph, {config.noise.type} noise, {config.model.parameterization}",
             f"  {precision}", f"data: {data.description}", f"  {text}",
             f"batch: {run.batch // run.micro_batches:,} {unit} x accum {accum} x "
             f"{ddp.world_size} rank(s) = {run.batch:,} per step on average, "
             f"{plan.steps_per_epoch:,} steps per epoch, {run.n_iters:,} steps in all"]
    if plan.filled < 0.95 and run.micro_batches > 1:
        lines.append(f"  few of the longest proteins fit into such a batch: on average "
                     f"{plan.mean:,.4g} {unit}, and a step waits up to {1 / plan.filled - 1:.0%} "
                     "longer than with larger batches")
    return lines


# ---------------------------------------------------------------- train
def train(run, ddp):
    """Train from where `prepare` left off. Returns the final metrics, the same on every rank."""
    config, progress, t, m = run.config, run.progress, run.config.training, run.config.monitoring
    if is_finished(run):
        return say_finished(run, ddp, lambda row, folder: result_lines(row, progress, folder))
    progress["finished"] = ""
    log = RunLog(run.work_dir, ddp.is_main, total_steps=run.n_iters)
    log.truncate(progress["step"] if run.path else -1)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, run.graph, config, ddp, run.dtype)

    dataset = MicroBatches(run.graph, run.noise, config.data.max_length, run.micro_batches, t.seed)
    batches = first_batches(run, dataset, loss_of, ddp)
    began = since = time.perf_counter()
    residues, values, first_row = 0.0, {}, True
    reason = stop_reason(ddp, progress["step"])
    while not progress["finished"] and not reason:
        totals, norm = take_step(run, [next(batches) for _ in run.schedule.mine], loss_of, ddp)
        residues = residues + totals.sums[1]
        step, last = progress["step"], progress["step"] == run.n_iters
        evaluate_now = last or step % t.eval_freq == 0
        save_now = last or step % t.snapshot_freq == 0
        report = evaluate_now or step % t.log_freq == 0
        reason = reason_to_stop(run, ddp, at_once=report or save_now)
        if report:
            rate = float(residues) / (time.perf_counter() - since)
            values = report_step(run, log, totals, norm, rate, first_row, ddp)
            first_row = False
        if evaluate_now:
            evaluate(run, log, values, ddp)
        if last and not progress["finished"]:
            progress["finished"] = "all steps done"
        if report:
            check_lock(run, ddp)
            log.metrics(step, values)
        if progress["finished"] or (m.sample_frequency and step % m.sample_frequency == 0):
            write_samples(run, ddp)
        if progress["finished"] or save_now or reason:   # "finished" says that samples are there
            save(run, log, ddp, "last.pt", t.keep_last)
        if report:   # evaluation, saving and sampling are not counted as training
            since, residues = time.perf_counter(), 0.0
    result = {"step": progress["step"], **values}
    if run.bound is not None:
        result.update(run.validation.compare(run.bound))
    return finish_run(run, log, ddp, reason, result, time.perf_counter() - began,
                      lambda: result_lines(result, progress, run.work_dir))


def report_step(run, log, totals, norm, rate, first_row, ddp):
    """Show a step; returns its metrics by name. rate: residues per second of all ranks."""
    loss_sum, residues = totals.sums.unbind()
    loss = float(loss_sum / totals.count.clamp(min=1))
    per_residue = float(loss_sum / residues.clamp(min=1))
    values = {"loss": loss, "perplexity": math.exp(min(per_residue, 50.0)),
              **step_values(run, norm, first_row, ddp), "residues_per_second": rate}
    log.progress(run.progress["step"], loss=loss, ppl=values["perplexity"], rate=rate,
                 **bad_steps_field(run))
    if math.isfinite(loss):
        total, number = run.progress["recent"]
        run.progress["recent"] = [total + loss, number + 1]
    return values


def evaluate(run, log, values, ddp):
    """Validate under the averaged weights, add to `values`, keep the best weights.

    Without validation proteins, the training loss since the last evaluation decides."""
    step, validation, (total, number) = run.progress["step"], run.validation, run.progress["recent"]
    score = total / number if number else math.inf
    if validation is not None:
        with run.ema.applied(run.bare):
            run.bound = validation(run.bare, ddp, run.dtype)
        values.update(validation.summarise(run.bound))
        score = values["val/loss"]
        if not math.isfinite(score):
            raise Diverged(f"step {step}: the validation bound is {score}; expected a finite "
                           f"number. {ADVICE}")
        log.say(f"step {step:,}: validation {score:.4f} nats per residue, perplexity "
                f"{values['val/perplexity']:.3f} (unigram {validation.unigram:.3f})")
    run.progress["recent"] = [0.0, 0.0]
    if is_best(run, score, ddp):
        save(run, log, ddp, "best.pt", resumes=False)


def write_samples(run, ddp):
    """Sample proteins under the averaged weights, on rank 0, into samples/step_N.fasta."""
    if not ddp.is_main:
        return
    step = run.progress["step"]
    with run.ema.applied(run.bare):
        text = sample_proteins(run.bare, run.config, run.graph, run.noise, run.plan.counts, step,
                               ddp, run.dtype)
    write_text_atomic(run.work_dir / "samples" / f"step_{step}.fasta", text)


def save(run, log, ddp, name, keep_last=1, resumes=True):
    save_run(run, log, ddp, name, keep_last, resumes, plan=run.plan.identity(),
             letters=run.letters.tolist(), lengths=run.plan.counts.tolist())


def result_lines(result, progress, folder):
    """What a person wants to know at the end: a table of bounds, and where things are."""
    lines = []
    if "val/loss" in result:
        rows = [("learned bound (EMA)", result["val/loss"]),
                ("unigram", math.log(result["val/unigram_perplexity"]))]
        if "exact" in result:
            rows.append(("exact, of the source", result["exact"]))
        lines.append("  the same validation proteins under   nats per residue   perplexity")
        for name, nats in rows:
            perplexity = math.exp(min(nats, 700.0))
            text = f"{perplexity:.3f}" if perplexity < 1e5 else f"{perplexity:.3e}"
            lines.append(f"    {name:<33} {nats:>15.4f} {text:>12}")
        if "exact" in result:
            lines.append("    (no model can be below the exact value; standard error "
                         f"{result['standard_error']:.4f})")
    checkpoints, step = folder / "checkpoints", progress["best"]["step"]
    return [*lines, f"  weights   {checkpoints / 'best.pt'} (step {step:,}) and last.pt",
            f"  samples   {folder / 'samples'}/step_{result['step']}.fasta",
            f"  metrics   {folder / 'metrics.jsonl'}"]


# ---------------------------------------------------------------- main
def main(config, ddp, work_dir, resume=None, fresh=False, stage=None):
    """prepare and train; importable."""
    return closing(ddp, lambda: prepare(config, ddp, work_dir, resume, fresh, stage), train)


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False,
                    epilog="See the head of this file for examples and all keys.")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--data", "--datafile", dest="data",
                        help="file of proteins, or folder of prepare_uniref50.py (sets data.file)")
    parser.add_argument("--stage", metavar="DIR",
                        help="copy the prepared folder to DIR on each host, and read it there")
    add_run_arguments(parser, "--work_dir")
    return parser


def read_arguments(argv):
    """(options, config). Raises ValueError."""
    args = make_parser().parse_intermixed_args(argv)
    config = load_config(Config, args.config, args.overrides)
    if args.data:
        config.data.file = args.data
    check_config(config)
    return args, config


def prepare_from(config, ddp, work_dir, args):
    return prepare(config, ddp, work_dir, args.resume, args.fresh, args.stage)


def cli(argv=None):
    run_script(Script(make_parser, read_arguments, describe_plan, prepare_from, train), argv)


if __name__ == "__main__":
    cli()
