"""What every training script repeats, as plain functions: settings, the step, the end, launch.

train_sedd_ddp.py and train_dpo_ddp.py read in the order of time and call these. What a script adds
is its config, its loss, its data and its evaluation. A global batch is a number of micro-batches,
fixed at the start of a run; each rank computes its share of them, and the gradient is that of the
mean over all of them, whatever the number of ranks.
"""
import argparse
import functools
import logging
import math
import os
import re
import signal
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_setup import (AGAIN, BAD_INPUT, STOP_SIGNALS, abort, all_sum, broadcast, choose_dtype,
                       detect_launcher, grad_scaler, gradient_sync, listed, optimize_with_ipex,
                       print0, setup_ddp, stop_reason, stop_wanted, unwrap_ddp, watch_run,
                       worker_init, wrap_ddp)
from run_config import Parser
from run_dir import (ADVICE, Diverged, is_finished, machine_differences, read_status,
                     replace_status)

SAVING_SECONDS = 600   # that the ranks have to save and leave after a signal to the launcher


# ---------------------------------------------------------------- settings
@dataclass
class CommonTraining:
    """The keys of section `training` that mean the same in every script."""
    accum: int = 1                       # micro-steps per optimizer step
    num_workers: int = 0                 # processes that prepare batches, per rank
    log_freq: int = 10                   # steps between rows of metrics.jsonl
    keep_last: int = 2                   # checkpoints that are kept: last.pt, last-1.pt, ...
    max_bad_steps: int = 10              # in a row, with a nan or infinite loss or gradient: then
    #                                      the run ends
    stop_signals: tuple[str, ...] = STOP_SIGNALS   # that end the run in good order
    patience: int | None = None          # evaluations without improvement before an early stop
    min_delta: float = 0.0               # nats (per residue, per pair) that count as improvement
    seed: int = 0


@dataclass
class DdpSection:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    broadcast_buffers: bool = False      # the models have none
    bucket_cap_mb: int | None = None


LEAST = {"training": dict(batch_size=1, accum=1, num_workers=0, n_iters=1, num_epochs=1,
                          eval_freq=1, log_freq=1, snapshot_freq=1, patience=1, min_delta=0,
                          keep_last=1, max_bad_steps=0),
         "optim": dict(lr=0, warmup=0, base_global_batch=1, grad_clip=0, eps=0, weight_decay=0),
         "ddp": dict(bucket_cap_mb=1), "monitoring": dict(watchdog_minutes=0, check_sync_every=0)}


def check_values(c, checks, least):
    """Refuse values that no type forbids.

    Args:
        c: the script's config.
        checks: pairs (whether it is right, what is wrong otherwise) beside those of all scripts.
        least: smallest values {section: {key: number}} beside LEAST.
    Raises: ValueError naming the key.
    """
    t, o, share = c.training, c.optim, c.memory.max_memory_per_gpu
    known = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    common = (
        (share is None or 0 < share <= 1,
         f"memory.max_memory_per_gpu is {share}; expected a share of the memory, above 0 up to 1"),
        (o.scale == "none" or o.base_global_batch,
         f"optim.scale is {o.scale} without optim.base_global_batch; give the global batch that lr "
         "was chosen for"),
        (not isinstance(o.scale, dict) or (list(o.scale) == ["cap"] and o.scale["cap"] >= 1),
         f"optim.scale is {o.scale}; expected none, linear, sqrt or {{cap: N}} with N of at least "
         "1"),
        (all(0 <= b < 1 for b in o.betas),
         f"optim.betas is {list(o.betas)}; expected 0 up to below 1"),
        (0 <= c.model.dropout < 1, f"model.dropout is {c.model.dropout}; expected 0 up to below 1"),
        (0 <= c.data.val_fraction < 1,
         f"data.val_fraction is {c.data.val_fraction}; expected 0 up to below 1"),
        (abs(t.seed) < 2**63, f"training.seed is {t.seed}; expected at most {2**63 - 1}"),
        (set(t.stop_signals) <= known,
         f"training.stop_signals is {list(t.stop_signals)}; expected names such as SIGTERM, of "
         "signals that a program may handle"))
    for right, text in (*common, *checks):
        if not right:
            raise ValueError(f"config: {text}.")
    for section in {**LEAST, **least}:
        for key, low in (LEAST.get(section, {}) | least.get(section, {})).items():
            value = getattr(getattr(c, section), key, None)
            if value is not None and value < low:
                raise ValueError(f"config: {section}.{key} is {value}; expected at least {low}.")


def scale_for_batch(lr, warmup, rule, global_batch, base):
    """Scale the learning rate to a global batch that differs from the one it was chosen for.

    With f = global_batch / base: "linear" multiplies by f (Goyal et al. 2017, arXiv 1706.02677);
    "sqrt" by sqrt(f), usual for Adam; {"cap": N} by min(f, N); "none" changes nothing. Warm-up is
    scaled alike, in whole steps. Each step takes f times the data, so that N times the ranks warm
    up on N x N times the data.
    Returns: (learning rate, warm-up steps).
    """
    f = 1.0 if rule == "none" else global_batch / base
    f = min(f, rule["cap"]) if isinstance(rule, dict) else f**0.5 if rule == "sqrt" else f
    return lr * f, round(warmup * f)


def warmup_share(step, warmup):
    """Share of the learning rate in the step after `step` steps: linear, whole in step `warmup`."""
    return min((step + 1) / max(warmup, 1), 1.0)


def scale_name(rule):
    """The rule of scale_for_batch in words."""
    return rule if isinstance(rule, str) else f"linear up to {rule['cap']:g} times"


def plan_head(o, ranks, unit):
    """(numbers of ranks from text such as "1,2,4,8", line on the scaling) for --plan."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", ranks):
        raise ValueError(f"--plan {ranks}; expected numbers of ranks, such as 1,2,4,8")
    base = f" at a global batch of {o.base_global_batch:,} {unit}" if o.base_global_batch else ""
    return [int(n) for n in ranks.split(",")], (
        f"optim.scale {scale_name(o.scale)}: from lr {o.lr:g} and warm-up {o.warmup:,}{base}")


# ---------------------------------------------------------------- start or continue
@dataclass(kw_only=True)
class Run:
    """What a script's `prepare` returns and these functions read. Scripts add fields."""
    config: Any
    work_dir: Path
    path: str | None           # checkpoint it continues from
    fingerprint: dict          # of the data: {"n", "hash"}
    bare: Any                  # the model, and as DDP wraps it
    model: Any
    optimizer: Any
    scaler: Any
    ema: Any = None            # averages of the weights, where the script keeps some
    dtype: torch.dtype         # that autocast computes in
    progress: dict             # what changes: step, best, bad_evals, finished, bad_steps, ...
    schedule: Any
    validation: Any            # None without validation proteins or pairs
    n_iters: int               # steps in all
    steps_per_epoch: int
    micro_batches: int         # per global batch
    batch: int                 # the global batch in proteins, tokens or pairs
    nominal: float             # about what the mean is over, so that backward sees numbers near 1
    lr: float                  # scaled
    warmup: int
    lock: Any = None           # on the run folder: rank 0 only
    flags: Any = None          # of the last step, on their way to the host: see read_flags
    stop_requests: float = 0.0  # ranks that were asked to stop, as last read


def choose_precision(config, ddp):
    """(dtype of autocast, words on it and on the limit of memory)."""
    try:
        dtype, why = choose_dtype(config.memory.mixed_precision, ddp.device)
    except RuntimeError as e:
        raise ValueError(f"config: {e}") from None
    return dtype, f"{str(dtype)[6:]} ({why}){limit_memory(config.memory.max_memory_per_gpu, ddp)}"


def limit_memory(share, ddp):
    """Let this process take at most `share` of its device's memory; returns words on it.

    share: above 0 up to 1, or None for all."""
    if share is None:
        return ""
    kind = ddp.device.type
    setter = getattr(getattr(torch, kind), "set_per_process_memory_fraction", None)
    if kind == "cpu" or setter is None:
        return f"; max_memory_per_gpu {share} has no effect on {kind}"
    setter(share, ddp.device)
    return f"; at most {share:.0%} of the device's memory"


def make_optimizer(config, bare, lr, dtype, ddp):
    """(the model, as DDP wraps it, AdamW, gradient scaler)."""
    o = config.optim
    optimizer = torch.optim.AdamW(bare.parameters(), lr=lr, betas=o.betas, eps=o.eps,
                                  weight_decay=o.weight_decay, fused=True)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp)
    return bare, wrap_ddp(bare, ddp, **vars(config.ddp)), optimizer, grad_scaler(dtype, ddp)


def load_training_state(run, state):
    """Take optimizer, scaler and averages over from a checkpoint (None: a new run)."""
    if state is None:
        return
    run.optimizer.load_state_dict(state["optimizer"])
    run.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        run.ema.load_state_dict(state["ema"])


def describe_run(run, state, unit, base_batch, ddp):
    """Lines on how this start trains. base_batch: the global batch that lr was scaled to."""
    o, accum, first = run.config.optim, run.micro_batches // ddp.world_size, []
    if accum != run.config.training.accum:
        first = [f"  accum is {accum} and not {run.config.training.accum}: it follows the ranks, "
                 "so that the global batch stays"]
    fewer = f", to the {base_batch:,} {unit} that there are" if base_batch < run.batch else ""
    how = ("kept from the checkpoint" if state is not None else
           "as given (scale none)" if o.scale == "none" else
           f"scaled from {o.lr:g} and {o.warmup:,} at {o.base_global_batch:,} {unit} "
           f"({scale_name(o.scale)}){fewer}")
    lines = [*first, f"optim: lr {run.lr:g}, warm-up {run.warmup:,} steps, {how}"]
    if state is None and run.warmup >= run.n_iters:
        lines.append(f"ATTENTION: the warm-up ({run.warmup:,} steps) lasts to the end "
                     f"({run.n_iters:,} steps): the learning rate reaches "
                     f"{100 * run.n_iters / run.warmup:.0f} % of its value; lower optim.warmup or "
                     "train longer")
    lines.append(f"results: {run.work_dir}, " + (
        "a new run" if not run.path else f"finished, {run.path}" if is_finished(run) else
        f"continuing from step {run.progress['step']:,} of {run.path}"))
    elsewhere = machine_differences(state, ddp) if state is not None else ""
    if elsewhere:
        lines.append(f"  saved elsewhere ({elsewhere}): the run goes on, but not to the last bit "
                     "as it would have")
    return lines


def print_lines(ddp, lines):
    """Print on rank 0, in at most 80 columns where words allow it."""
    wrap = textwrap.TextWrapper(80, subsequent_indent="    ", break_long_words=False,
                                break_on_hyphens=False)
    print0(ddp, "\n".join(map(wrap.fill, lines)))


# ---------------------------------------------------------------- the step
class Schedule(torch.utils.data.Sampler):
    """The micro-batches that this rank computes, from step `first` to `last`, for a DataLoader.

    item_of: function (step, micro-batch) -> item of the data set. Any step is reached directly."""

    def __init__(self, item_of, micro_batches, ddp, first=0, last=0):
        self.item_of, self.first, self.last = item_of, first, last
        accum = micro_batches // ddp.world_size
        self.mine = range(ddp.rank * accum, (ddp.rank + 1) * accum)

    def __iter__(self):
        for step in range(self.first, self.last):
            yield from (self.item_of(step, micro) for micro in self.mine)

    def __len__(self):
        return (self.last - self.first) * len(self.mine)


class Totals(NamedTuple):
    """Sums over all ranks of one step, float64, on the device."""
    packed: torch.Tensor     # all of the following in a row, for one all-reduce and one copy
    sums: torch.Tensor       # (n,) as the script's micro_batch_loss returns them
    count: torch.Tensor      # residues, proteins or pairs that the mean loss is over
    bad: torch.Tensor        # ranks with a loss or gradient that is nan or infinite
    bad_loss: torch.Tensor   # ranks with such a loss
    stop: torch.Tensor       # ranks that were asked to stop


def unpack(packed):
    """The Totals that are views of `packed`, (n + 4,)."""
    return Totals(packed, packed[:-4], *packed[-4:].unbind())


def global_gradient(model, batches, micro_batch_loss, ddp, nominal, scaler=None):
    """Leave the gradient of the mean loss over the global batch in .grad on every rank.

    How many residues or pairs the mean is over is known only at the end: backward runs on
    sum / nominal, then comes one small all-reduce, then the gradients are multiplied by
    ranks x nominal / count (DDP has divided by the ranks). Nothing here waits for the device.

    Args:
        model: as DDP wraps it.
        batches: this rank's micro-batches, each with a "seed" for dropout.
        micro_batch_loss: function (model, batch) -> (loss sum, sums (n,) to be totalled, count).
        nominal: about the count. scaler: a GradScaler, or None.
    Returns: (Totals, norm of the gradient). If totals.bad is not 0, all gradients are nan.
    """
    packed = None
    for k, batch in enumerate(batches):
        torch.manual_seed(batch["seed"])   # so that dropout is keyed by the micro-batch
        with gradient_sync(model, last=k == len(batches) - 1):
            loss, sums, count = micro_batch_loss(model, batch)
            scaled = loss / nominal
            (scaler.scale(scaled) if scaler is not None else scaled).backward()
        values = torch.zeros(len(sums) + 4, dtype=torch.float64, device=ddp.device)
        part = unpack(values)
        part.sums.copy_(sums.detach())
        part.count.add_(count)
        part.bad_loss.copy_(~loss.detach().isfinite())
        packed = values if packed is None else packed + values
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    own = unpack(packed)
    own.bad_loss.copy_(own.bad_loss > 0)
    own.bad.copy_((own.bad_loss > 0) | ~norm.isfinite())
    own.stop.fill_(stop_wanted(ddp))
    totals = unpack(all_sum(packed, ddp))
    factor = ddp.world_size * nominal / totals.count.clamp(min=1)   # 0: nothing that counts
    factor = torch.where(totals.bad > 0, math.nan, factor).to(gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)
    return totals, norm * factor


def first_batches(run, dataset, micro_batch_loss, ddp):
    """An iterator over this rank's micro-batches, from the step that the run is at."""
    t = run.config.training
    batches = iter(torch.utils.data.DataLoader(
        dataset, sampler=run.schedule, batch_size=None, num_workers=t.num_workers,
        pin_memory=ddp.device.type == "cuda", generator=torch.Generator(),
        worker_init_fn=functools.partial(worker_init, signals=t.stop_signals)))
    run.bare.train()
    # DDP lays out its buckets anew after its first backward, which changes the order of sums from 3
    # ranks on. One backward whose gradient is thrown away, at every start, and a resumed run has
    # the layout of the one before.
    if ddp.world_size > 1:
        item = run.schedule.item_of(run.progress["step"], run.schedule.mine[0])
        global_gradient(run.model, [dataset[item]], micro_batch_loss, ddp, run.nominal)
        run.optimizer.zero_grad(set_to_none=True)
    return batches


def take_step(run, batches, micro_batch_loss, ddp):
    """One optimizer step on this rank's micro-batches. A bad step changes nothing.

    Returns: (Totals, norm of the gradient before clipping)."""
    progress, optimizer, scaler = run.progress, run.optimizer, run.scaler
    for group in optimizer.param_groups:
        group["lr"] = run.lr * warmup_share(progress["step"], run.warmup)
    totals, norm = global_gradient(run.model, batches, micro_batch_loss, ddp, run.nominal, scaler)
    read_flags(run)   # of the step before, which the device has long computed
    clip, parameters = run.config.optim.grad_clip or math.inf, list(run.bare.parameters())
    if scaler.is_enabled():   # it skips the step by itself where gradients are nan
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
    else:   # a fused optimizer that is told found_inf changes nothing: decided on the device
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
        optimizer.grad_scale, optimizer.found_inf = None, (totals.bad > 0).float()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if run.ema is not None:
        run.ema.update(parameters, skip=totals.bad > 0)
    progress["step"] += 1
    run.flags = to_host(totals.packed)
    return totals, norm


def to_host(packed):
    """(a copy in the host's memory, event that says when it is there, or None).

    The copy waits for this step only, not for what is queued behind it."""
    if packed.device.type == "cpu":
        return packed, None
    copy = torch.empty_like(packed, device="cpu", pin_memory=True)
    arrived = getattr(torch, packed.device.type).Event()
    copy.copy_(packed, non_blocking=True)
    arrived.record()
    return copy, arrived


def read_flags(run):
    """Read the flags of the last step, once: count bad steps, note who was asked to stop.

    Raises: RuntimeError for more bad steps in a row than training.max_bad_steps."""
    if run.flags is None:
        return
    (packed, arrived), run.flags = run.flags, None
    if arrived is not None:
        arrived.synchronize()
    totals, counts = unpack(packed), run.progress["bad_steps"]
    most = run.config.training.max_bad_steps
    run.stop_requests = float(totals.stop)
    if not totals.bad:
        counts[1] = 0
        return
    if run.ema is not None:
        run.ema.num_updates -= 1   # a skipped step has not moved the averages
    # In float16 a gradient may overflow: so the scale is found. Below a scale of 1 it is the
    # gradient itself that is infinite.
    if totals.bad_loss or not run.scaler.is_enabled() or run.scaler.get_scale() < 1:
        counts[:] = counts[0] + 1, counts[1] + 1
    if counts[1] > most:
        raise Diverged(f"step {run.progress['step']}: the loss or its gradient was nan or infinite "
                       f"in {counts[1]} steps in a row, on "
                       f"{float(totals.bad_loss or totals.bad):.0f} rank(s) in the last; "
                       f"expected at most {most}. These steps were skipped. {ADVICE}")


def reason_to_stop(run, ddp, at_once=True):
    """Why all ranks stop after this step, '' to go on; the same on every rank.

    at_once: wait for the flags of this very step, not only for those of the step before."""
    step, every = run.progress["step"], run.config.monitoring.check_sync_every
    if at_once or ddp.device.type == "cpu":
        read_flags(run)
    reason = stop_reason(ddp, step, run.stop_requests)
    if reason:
        read_flags(run)
    if every and (step % every == 0 or step == run.n_iters):
        check_in_sync(run.bare, ddp)
    return reason


def check_in_sync(model, ddp):
    """Compare the parameters of all ranks, bit by bit by a checksum each.

    Raises: RuntimeError on every rank, naming the ranks that differ and their first parameter."""
    if ddp.world_size == 1:
        return
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    names, parameters = zip(*unwrap_ddp(model).named_parameters())
    sums = torch.stack([p.detach().contiguous().view(words[p.element_size()]).sum(dtype=torch.int64)
                        for p in parameters])
    differs = (sums != broadcast(sums.clone(), ddp)).tolist()
    first = differs.index(True) + 1 if any(differs) else 0
    found = all_sum([first if r == ddp.rank else 0 for r in range(ddp.world_size)], ddp)
    ranks = [r for r, n in enumerate(found) if n]
    if not ranks:
        return
    name, hosts = names[int(found[ranks[0]]) - 1], ddp.state.hosts
    who = f"rank {listed([f'{r} on {hosts[r]}' for r in ranks])} differ from rank 0"
    if len(ranks) > ddp.world_size / 2 and ddp.world_size > 2:
        who = f"rank 0 on {hosts[0]} differs from most others"
    raise RuntimeError(f"the parameters are no longer equal on all ranks: {who}, first in {name}. "
                       "Expected equal bits. Is a device faulty, or does a rank change weights by "
                       "itself?")


# ---------------------------------------------------------------- metrics, the best
def step_values(run, norm, first_row, ddp):
    """What every script logs of a step, by name."""
    values = {"grad_norm": float(norm), "lr": run.optimizer.param_groups[0]["lr"],
              "epoch": (run.progress["step"] - 1) // run.steps_per_epoch}
    if run.progress["bad_steps"][0]:
        values["bad_steps"] = run.progress["bad_steps"][0]
    if run.scaler.is_enabled():
        values["loss_scale"] = run.scaler.get_scale()
    if first_row:   # of every start: the ranks may be others
        values.update({"ddp/world_size": ddp.world_size, "ddp/effective_batch_size": run.batch,
                       "ddp/scaled_lr": run.lr, "ddp/scaled_warmup": run.warmup})
    return values


def bad_steps_field(run):
    """For RunLog.progress: how many steps were bad, once there are some."""
    return {"bad steps": run.progress["bad_steps"][0]} if run.progress["bad_steps"][0] else {}


def is_best(run, score, ddp, **values):
    """Is this evaluation the best so far? Rank 0 decides. Ends a run that no longer improves.

    score: lower is better. values: to be kept with the best."""
    progress, t = run.progress, run.config.training
    best = progress["best"]
    improved = best is None or score < best["score"] - t.min_delta
    improved = broadcast(improved, ddp)
    progress["bad_evals"] = 0 if improved else progress["bad_evals"] + 1
    if improved:
        progress["best"] = {"step": progress["step"], "score": score, **values}
    if t.patience is not None and progress["bad_evals"] >= t.patience:
        progress["finished"] = "early stop"
    return improved


# ---------------------------------------------------------------- launch and command line
def add_launch_arguments(parser):
    """Add the launch options of all scripts to an argparse parser."""
    add = parser.add_argument_group("launch").add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    add("--ipex", default="auto", choices=("auto", "on", "off"),
        help="Intel's extension for PyTorch; auto: on an XPU whose torch has no xccl")
    add("--ranks", type=int, help="refuse any other number of ranks")
    add("--init_timeout", type=float, default=300.0, help="seconds to wait for all ranks")
    add("--nproc_per_node", type=int, help="start so many ranks on this node, with torch's "
                                           "launcher (with --nnodes by default: its accelerators)")
    add("--nnodes", type=int, help="nodes on which this command is given, by hand")
    add("--node_rank", type=int, help="this node, 0 to nnodes - 1")
    add("--master_addr", help="host of node 0")
    add("--master_port", type=int, help="a free port of node 0 (default 29500)")


def hand_over(args, argv):
    """Where --nnodes or --nproc_per_node is given, run this script on as many ranks, with the other
    arguments of `argv`, and leave with their exit code. Does nothing otherwise.

    Raises: ValueError for options that do not fit together."""
    if args.nnodes is None and args.nproc_per_node is None:
        stray = [name for name in ("node_rank", "master_addr", "master_port")
                 if getattr(args, name) is not None]
        if stray:
            raise ValueError(f"--{stray[0]} is given without --nnodes. Expected --nnodes N "
                             "--node_rank R --master_addr HOST [--master_port P] "
                             "[--nproc_per_node M].")
        return
    place = detect_launcher(os.environ)
    if place.world_size > 1:
        raise ValueError(f"--nnodes and --nproc_per_node start ranks, but {place.launcher} has "
                         f"started {place.world_size} already. Leave one of the two out.")
    nnodes, rank = args.nnodes or 1, args.node_rank or 0
    if nnodes > 1 and (args.node_rank is None or args.master_addr is None):
        raise ValueError(f"--nnodes {nnodes} needs --node_rank (0 to {nnodes - 1}) and "
                         "--master_addr (host of node 0)")
    if not 0 <= rank < nnodes:
        raise ValueError(f"--node_rank {rank} is outside 0 to {nnodes - 1}")
    devices = torch.cuda.device_count() or (hasattr(torch, "xpu") and torch.xpu.device_count()) or 1
    per_node = args.nproc_per_node or (1 if args.device == "cpu" else devices)
    rest = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--nnodes", "--node_rank", "--master_addr", "--master_port", "--nproc_per_node"):
        rest.add_argument(option)
    command = ["-u", sys.argv[0], *rest.parse_known_args(argv)[1]]
    print(f"starting {per_node} rank(s) here, on node {rank} of {nnodes}, with torch's launcher",
          flush=True)
    alone = nnodes == 1 and not args.master_addr and not args.master_port
    host, port = args.master_addr or "127.0.0.1", args.master_port or 29500
    endpoint = "localhost:0" if alone else f"{host}:{port}"
    sys.exit(run_ranks(command, per_node, nnodes, rank, "c10d" if alone else "static", endpoint))


def run_ranks(command, per_node, nnodes, node_rank, meeting, endpoint):
    """Run the ranks of this node under torch's agent, without its reports; returns their exit code.

    command: what follows the interpreter. meeting, endpoint: torch's rendezvous, "c10d" or
    "static", and where. A signal is passed on to the ranks, which have SAVING_SECONDS to save."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    logging.disable()   # its tables of errors would hide our last line
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")   # as torchrun does
    place = RendezvousParameters(meeting, endpoint, f"{os.getpid()}" if nnodes == 1 else "by hand",
                                 nnodes, nnodes, rank=node_rank, timeout=900)
    host, _, port = endpoint.rpartition(":")
    fixed = {} if meeting == "c10d" else {"master_addr": host, "master_port": int(port)}
    spec = WorkerSpec("rank", per_node, registry.get_rendezvous_handler(place),
                      entrypoint=sys.executable, args=tuple(command), max_restarts=0,
                      monitor_interval=0.1, **fixed)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    agent._shutdown_timeout = SAVING_SECONDS
    try:
        codes = [failure.exitcode for failure in agent.run().failures.values()]
    except SignalException:
        handlers = agent._pcontext.subprocess_handlers if agent._pcontext else {}
        codes = [handler.proc.returncode for handler in handlers.values()] or [130]
    except KeyboardInterrupt:   # before the ranks were started
        return 130
    except (RuntimeError, OSError, ValueError) as e:
        print(f"error: torch's launcher: {e}", file=sys.stderr)
        return 1
    # When a rank has left, torch's agent ends the others by SIGTERM: they leave with AGAIN, or are
    # ended by it while they leave anyway. A rank that was killed has another negative code.
    failed = [code for code in codes if code not in (0, AGAIN, -signal.SIGTERM)]
    if failed:
        return next((code for code in failed if code > 0), 1)
    return AGAIN if AGAIN in codes else int(any(codes))


class Script(NamedTuple):
    """What run_script needs of a training script."""
    make_parser: Any      # () -> argparse parser of all options
    read_arguments: Any   # (argv) -> (options, config), or ValueError
    describe_plan: Any    # (config, text of --plan) -> text
    prepare: Any          # (config, ddp, work_dir, options) -> Run
    train: Any            # (run, ddp) -> dict
    name: str = ""        # of the run folder below runs/ where no --config names it


def run_script(script, argv=None):
    """The command line of a training script; ends the process with an exit code other than 0 where
    the run did not finish."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        script.make_parser().parse_args(["--help"])
    began, problem, early, limit = time.time(), None, launch_options([]), None
    options = config = None
    try:
        early = launch_options(argv)
        if early.plan is None:
            options, config = script.read_arguments(argv)
            hand_over(early, argv)
            # The watchdog, which names who is late, is to be sooner than a collective's own limit.
            limit = 6 * 3600.0 if config.monitoring.watchdog_minutes else None
    except (ValueError, RuntimeError) as e:
        problem = ValueError(e)   # said below, once
    name = Path(early.config).stem if early.config else script.name
    work_dir = early.work_dir or (os.path.join("runs", name) if name else None)
    try:
        if early.plan is not None:
            return print(script.describe_plan(script.read_arguments(argv)[1], early.plan))
        ddp = setup_ddp(early.device, early.backend, ranks=early.ranks, timeout=limit,
                        init_timeout=early.init_timeout, ipex=early.ipex)
    except (ValueError, RuntimeError, OSError) as e:
        code = getattr(e, "code", BAD_INPUT if isinstance(e, ValueError) else 1)
        print(f"error: {e}", file=sys.stderr)
        if early.plan is None:
            replace_status(work_dir, code, str(e), since=began)   # of several ranks, the first
        sys.exit(code)
    except KeyboardInterrupt:   # nothing runs yet
        replace_status(work_dir, 130, "interrupted (Ctrl-C)", since=began)
        sys.exit(130)
    with ddp:
        run = prepare_on_all_ranks(script, options, config, early, problem, work_dir, ddp)
        result = script.train(run, ddp)
    if "stopped" in result:
        sys.exit(AGAIN)


def add_run_arguments(parser, *work_dir):
    """Add the options on a run that all scripts have. work_dir: names of that for its folder."""
    add = parser.add_argument
    add(*work_dir, dest="work_dir", help="run folder (default runs/CONFIG_NAME)")
    add("--resume", help="continue from this checkpoint")
    add("--fresh", action="store_true", help="start over; the old run folder is renamed")
    add("--plan", help="print batch, learning rate and warm-up for ranks such as 1,2,4,8")
    add("overrides", nargs="*", metavar="section.key=value")
    add_launch_arguments(parser)


def launch_options(argv):
    """The options that are needed before the ranks can meet; all others are left alone."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_launch_arguments(parser)
    parser.add_argument("--config")
    parser.add_argument("--work_dir", "--output_dir")
    parser.add_argument("--plan")
    parser.add_argument("--no_cuda", action="store_true")
    early = parser.parse_known_args(argv)[0]
    if early.no_cuda:
        if early.device not in ("auto", "cpu"):
            raise ValueError(f"command line: --no_cuda with --device {early.device}; expected one "
                             "of the two.")
        early.device = "cpu"
    return early


def prepare_on_all_ranks(script, options, config, early, problem, work_dir, ddp):
    """Prepare the run; what is wrong with the arguments or data ends all ranks with one line.

    early: see launch_options. problem: found before the ranks met, or None."""
    former, watched = read_status(work_dir), None
    if ddp.is_main and replace_status(work_dir, None, "starting"):
        watched = work_dir   # whatever ends this start writes its outcome there
    try:
        if problem:
            raise problem
        # While loading, no less than the ranks had for meeting; Ctrl-C ends it at once.
        minutes = config.monitoring.watchdog_minutes
        signals = [name for name in config.training.stop_signals if name != "SIGINT"]
        watch_run(ddp, watched, minutes and max(minutes, early.init_timeout / 60), signals)
        return script.prepare(config, ddp, work_dir, options)
    except (ValueError, OSError) as e:
        watch_run(ddp, None, minutes=0, signals=())
        if ddp.is_main:
            replace_status(work_dir, BAD_INPUT, str(e),
                           finished=former if former.get("code") == 0 else None)
        # Rank 0 first puts status.json right: the failure of another one waits for that.
        abort(ddp, f"error: {e}", code=BAD_INPUT, secondary=not ddp.is_main)
