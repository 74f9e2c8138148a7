"""What all training scripts share of a step: learning rate, micro-batches, sums over ranks.

    batches = open_batches(run, dataset, loss_of, ddp)
    while ...:                                                   # a step, which a script writes out
        set_learning_rate(run)
        micro_batches = next_micro_batches(run, batches)
        count = global_count(micro_batches, ddp)
        ...                                                      # forward, backward, clip
        totals = exchange(run, sums, count, norm, watch, ddp)
        ...                                                      # step, if totals.is_finite
        reason, save_due = after_step(run, totals, watch, ddp)   # to stop here, or ""

The training scripts call these functions, and add their own config, loss, data and evaluation. An
optimizer step takes a global batch, which consists of micro-batches. Their number is fixed at the
start of a run. The ranks share them, by gradient accumulation, so the gradient is the same for
every number of ranks:

    4 micro-batches    on 1 rank    0 1 2 3        on 3 ranks    0 | 1 | 2 3
                       on 2 ranks   0 1 | 2 3      on 4 ranks    0 | 1 | 2 | 3
"""
import contextlib
import functools
import json
import math
import time
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_setup import all_sum, broadcast, gather, unwrap_ddp
from ddp_watch import worker_init
from training.config import profiled_steps
from training.meter import StepMeter


# ---------------------------------------------------------------- learning rate
def scale_for_batch(lr, warmup, rule, global_batch, base) -> tuple[float, int]:
    """Scale the learning rate to a global batch that differs from the one it was chosen for.

    The factor depends on the rule. "linear": global_batch / base (Goyal et al. 2017, arXiv
    1706.02677). "sqrt", usual for Adam: the square root of that. {"cap": N}: linear, but at most N.
    "none": 1. The warm-up steps are multiplied by the same factor and rounded. So with "linear", N
    times the ranks take N times the steps, on N times the data each, to warm up.
    Returns: (learning rate, warm-up steps).
    """
    if rule == "none":
        factor = 1.0
    elif rule == "linear":
        factor = global_batch / base
    elif rule == "sqrt":
        factor = (global_batch / base)**0.5
    else:
        factor = min(global_batch / base, rule["cap"])
    return lr * factor, round(warmup * factor)


WSD_SHARE = 0.2   # of all steps, in which wsd decays: enough, says Haegele et al. 2024, 2405.18392


def rate_share(step, warmup, n_iters, optim) -> float:
    """Learning rate of the next step, as a fraction of the full rate. step: number of steps done.

    It rises linearly, to 1 in step number `warmup`. With an optim.decay it falls over the last
    optim.decay_steps of n_iters steps (below 1: that fraction of n_iters; None: all steps after the
    warm-up), towards optim.min_lr / optim.lr. "wsd" (warm-up, stable, decay: Hu et al. 2024, arXiv
    2404.06395) is "linear" whose default is the fraction WSD_SHARE. "noam" (Vaswani et al. 2017,
    arXiv 1706.03762) falls with 1 / sqrt(step) after the warm-up, whatever n_iters is.

    optim: the config's section; `scale` multiplies its lr and min_lr alike, so their ratio stays.
    """
    rise = min((step + 1) / max(warmup, 1), 1.0)
    if optim.decay == "none":
        return rise
    if optim.decay == "noam":
        return min(rise, math.sqrt(max(warmup, 1) / (step + 1)))
    decay_steps = length_of_decay(optim)
    if decay_steps is None:
        length = n_iters - warmup
    elif decay_steps < 1:
        length = decay_steps * n_iters
    else:
        length = min(decay_steps, n_iters)
    left = min(max((n_iters - step) / max(length, 1), 0.0), 1.0)
    if optim.decay == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    floor = optim.min_lr / optim.lr if optim.min_lr else 0.0   # lr may be 0 too
    return rise * (floor + (1 - floor) * left)


def length_of_decay(optim) -> float | None:
    """optim.decay_steps, or what the decay does where they are not given."""
    if optim.decay == "wsd" and optim.decay_steps is None:
        return WSD_SHARE
    return optim.decay_steps


# ---------------------------------------------------------------- a run
@dataclass(kw_only=True)
class Run:
    """A run, as a script's `prepare` returns it. Scripts add fields of their own."""
    config: Any
    work_dir: Path
    continued_from: str | None   # path of a checkpoint; None: a new run
    fingerprint: dict          # of the data: {"n", "hash"}
    bare: Any                  # the model without DDP: for state_dict, evaluation and sampling
    model: Any                 # the same model, wrapped in DDP: for training steps
    optimizer: Any
    scaler: Any
    ema: Any = None            # exponential moving average of the weights, if the script has one
    dtype: torch.dtype         # for autocast
    progress: dict             # what changes, and is saved: step, best, bad_evals, finished, ...
    sampler: Any               # MicroBatchSampler
    validation: Any            # None without validation proteins or pairs
    n_iters: int               # optimizer steps in all
    steps_per_epoch: int
    micro_batches: int         # per global batch
    global_batch: int          # in proteins, tokens or pairs
    lr: float                  # full rate, scaled, as is warmup (steps)
    warmup: int
    meter: StepMeter           # measures time, memory, gradients
    saved_at: float = field(default_factory=time.monotonic)   # of the last one, or the start
    values: dict = field(default_factory=dict)   # metrics of the last report


def is_finished(run) -> bool:
    """Whether a run has done all steps, or has stopped early for good."""
    return has_ended(run.progress, run.n_iters)


def has_ended(progress, n_iters) -> bool:
    """As is_finished, of Run.progress and Run.n_iters."""
    return progress["finished"] == "early stop" or progress["step"] >= n_iters


# ---------------------------------------------------------------- micro-batches
class MicroBatchSampler(torch.utils.data.Sampler):
    """The micro-batches that this rank computes, from step `first` to `last`, for a DataLoader.

    item_of: function (step, micro-batch) -> key of the data set, for dataset[key]. With SEDD the
    key holds the proteins: they are read here, in the main process, and workers add the noise.
    A resumed run starts at any step, without going through the steps before it."""

    def __init__(self, item_of, micro_batches, ddp, first, last):
        self.item_of = item_of
        self.first = first
        self.last = last
        self.mine = share_of(ddp.rank, ddp.world_size, micro_batches)

    def __iter__(self):
        for step in range(self.first, self.last):
            for micro in self.mine:
                yield self.item_of(step, micro)


def micro_batches_of(training, n_ranks) -> int:
    """Micro-batches in a global batch of a new run. training: the config's section."""
    return training.micro_batches or training.accum * n_ranks


def check_ranks(n_ranks, micro_batches, source, advice="") -> None:
    """Refuse more ranks than micro-batches. Raises: ValueError.

    source: text on where the number of micro-batches is from. advice: what to do instead of fewer
        ranks, to append."""
    if n_ranks > micro_batches:
        raise ValueError(f"{source}, and there are {n_ranks} ranks; expected a micro-batch for "
                         f"each rank. Give at most {micro_batches} rank(s){advice}.")


def share_of(rank, n_ranks, micro_batches) -> range:
    """The micro-batches of a step that a rank computes: as many as each other rank has, or one more
    or less. No rank has none if there are at most as many ranks as micro-batches."""
    return range(rank * micro_batches // n_ranks, (rank + 1) * micro_batches // n_ranks)


def open_batches(run, dataset, loss_of, ddp):
    """Warm DDP up; return an iterator over this rank's micro-batches, from the next step on.

    After its first backward, DDP regroups the gradients into other buckets. With 3 ranks or more
    this changes the order in which it sums them, and so the last bits. Every start therefore runs
    one backward, of one micro-batch on each rank, and drops its result: a resumed run then sums
    like an uninterrupted one.

    loss_of: function of a micro-batch that returns its loss, and more."""
    training = run.config.training
    start = functools.partial(start_worker, signals=training.stop_signals)
    loader = torch.utils.data.DataLoader(
        dataset, sampler=run.sampler, batch_size=None, num_workers=training.num_workers,
        worker_init_fn=start, pin_memory=ddp.device.type != "cpu",
        generator=torch.Generator())   # not the global one
    batches = iter(loader)
    run.bare.train()
    if ddp.world_size > 1:
        item = run.sampler.item_of(run.progress["step"], run.sampler.mine[0])
        loss, *_ = loss_of(dataset[item])
        loss.backward()
        run.optimizer.zero_grad(set_to_none=True)
        run.meter.time_exchange(run.bare)
    run.meter.restart()
    return batches


def start_worker(worker_id, signals):
    """What a worker process of a DataLoader does first: ignore these stop signals, and send tensors
    through its pipe.

    By default they go through /dev/shm, which is small in many containers: where it is full, a
    worker prints an error and lives on, and its rank waits for ever."""
    worker_init(worker_id, signals)
    ForkingPickler.register(torch.Tensor, as_array)


def as_array(tensor):
    """(function, arguments) that makes a CPU tensor anew from a numpy array, for a pickle."""
    return torch.from_numpy, (tensor.numpy(),)


def next_micro_batches(run, batches) -> list[dict]:
    """This rank's micro-batches of the next step. batches: see open_batches."""
    run.meter.begin(run.progress["step"] + 1)
    micro_batches = [next(batches) for _ in run.sampler.mine]
    run.meter.have(micro_batches)
    return micro_batches


# ---------------------------------------------------------------- the step
ADVICE = ("A checkpoint, if there is one, holds the weights from before these steps. Begin a new "
          "run with a lower optim.lr, a higher optim.warmup, or memory.mixed_precision: false.")


class Diverged(RuntimeError):
    """The loss has become nan or infinite. The same command would end in the same way again."""


def due(step, every) -> bool:
    """Whether something is done after this step. every: number of steps; None or 0: never."""
    return bool(every) and step % every == 0


def set_learning_rate(run) -> None:
    """Give the optimizer the learning rate of the next step, see rate_share."""
    share = rate_share(run.progress["step"], run.warmup, run.n_iters, run.config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = run.lr * share


def global_count(micro_batches, ddp) -> torch.Tensor:
    """What the mean loss of the global batch is taken over, (), float64, on the device: the sum of
    "count" (residues, proteins or weights) of the micro-batches of all ranks; 1 if that is 0."""
    own = sum(batch["count"] for batch in micro_batches)
    # `full` writes on the device; a copy from the host would make it wait
    count = all_sum(torch.full((), own, dtype=torch.float64, device=ddp.device), ddp)
    return torch.where(count > 0, count, 1.0)


class Totals(NamedTuple):
    """A step of all ranks, on the host. It is the same on every rank."""
    sums: torch.Tensor    # (n,) float64, as the script adds them up
    count: float          # see global_count
    norm: float           # of the gradient before clipping
    n_bad: float          # number of ranks whose gradient is nan or infinite
    requests: float       # number of ranks that ask all to stop or to save

    @property
    def is_finite(self) -> bool:
        """Whether the loss of all ranks and the gradient are finite; else the step is bad."""
        return self.n_bad == 0 and self.loss_is_finite

    @property
    def loss_is_finite(self) -> bool:
        """A nan in the sums of one rank is a nan in those of all."""
        return bool(self.sums.isfinite().all())


def exchange(run, sums, count, norm, watch, ddp) -> Totals:  # noqa: PLR0913  (all of a step)
    """Add up the sums of all ranks, in one small all-reduce. The host waits for the device here.

    Args:
        sums: (n,) float64, of this rank's micro-batches, on the device, without gradients.
        count: see global_count. norm: (), of the gradient, equal on all ranks.
        watch: a Watch (ddp_watch.py), which may ask all ranks to stop.
    """
    flags = torch.stack([(~norm.isfinite()).double(),
                         sums.new_full((), request_of(run, watch, ddp))])
    added_up = all_sum(torch.cat([sums, flags]), ddp)
    packed = torch.cat([added_up, count[None], norm.double()[None]]).cpu()
    n_bad, requests, whole_count, own_norm = packed[-4:].tolist()
    return Totals(packed[:-4], whole_count, own_norm, n_bad, requests)


def request_of(run, watch, ddp) -> float:
    """1.0 if this rank asks all ranks to stop or to save, else 0.0."""
    return float(watch.flag() or save_wanted(run, ddp))


def save_wanted(run, ddp) -> bool:
    """Whether rank 0 asks all ranks for a checkpoint, by its clock; False on other ranks."""
    minutes = run.config.training.snapshot_minutes
    if not ddp.is_main or not minutes:
        return False
    return time.monotonic() - run.saved_at >= 60 * minutes


def after_step(run, totals, watch, ddp) -> tuple[str, bool]:
    """Count the step; compare the weights of all ranks every check_sync_every steps.

    Returns: (why all ranks stop here, or ""; whether they save here by the clock of rank 0).
        Requests for both travel together: if there are any, the ranks exchange the reasons for a
        stop; if none has one, the request was to save.
    Raises: Diverged, see count_bad_steps."""
    progress = run.progress
    progress["step"] += 1
    step = progress["step"]
    count_bad_steps(run, totals, ddp)
    if totals.is_finite:
        seen = progress["seen"]
        for name, number in zip(seen, totals.sums[-len(seen):].tolist()):
            seen[name] += int(number)
    run.meter.measure_layers("weights", run.bare)
    run.meter.finish(totals.sums)
    reason = watch.stop_reason(step, flags=totals.requests)
    save_due = totals.requests > 0 and not reason
    every = run.config.monitoring.check_sync_every
    if due(step, every) or (every and step == run.n_iters):
        check_in_sync(run.bare, ddp)
    return reason, save_due


def count_bad_steps(run, totals, ddp) -> None:
    """Count a step with a nan or infinite loss or gradient, which the script has skipped.

    Raises: Diverged for more of them in a row than training.max_bad_steps, or if a run ends without
        a good step."""
    bad_steps, in_a_row = run.progress["bad_steps"]
    if totals.is_finite:
        run.progress["bad_steps"] = [bad_steps, 0]
        return
    # In float16 the scaler lowers its scale after each overflow: that is no bad step. But if the
    # scale is below 1, the gradient itself has overflowed.
    is_overflow = (totals.loss_is_finite and run.scaler.is_enabled()
                   and run.scaler.get_scale() * ddp.world_size >= 1)
    if is_overflow:
        return
    run.progress["bad_steps"] = [bad_steps + 1, in_a_row + 1]
    max_bad_steps = run.config.training.max_bad_steps
    was_none_good = bad_steps + 1 == run.progress["step"] == run.n_iters
    if in_a_row + 1 > max_bad_steps or was_none_good:
        raise Diverged(f"step {run.progress['step']}: the loss or its gradient was nan or infinite "
                       f"in {in_a_row + 1} steps in a row; expected at most {max_bad_steps}, and a "
                       f"good one in a run. These steps were skipped. {ADVICE}")


def open_trace(run, log):
    """torch's profiler for the steps in training.profile, such as 10:13, started; None without.

    Call step() after each step, and stop() at the end. It writes profile/steps_10-13.json.gz into
    the run folder, of rank 0, which https://ui.perfetto.dev shows. log: the RunLog."""
    text = run.config.training.profile
    if text is None or not log.is_main:
        return None
    first, last = profiled_steps(text)
    done = run.progress["step"]
    first = max(first, done + 1)
    last = min(last, run.n_iters)
    if first > last:
        log.say(f"training.profile {text}: no trace, as this start does steps {done + 1:,} to "
                f"{run.n_iters:,}")
        return None
    before = first - 1 - done
    warmup = min(before, 1)    # a step in which the profiler itself gets ready
    schedule = torch.profiler.schedule(wait=before - warmup, warmup=warmup,
                                       active=last - first + 1, repeat=1)
    folder = run.work_dir / "profile"
    folder.mkdir(exist_ok=True)
    path = folder / f"steps_{first}-{last}.json.gz"
    trace = torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)))
    trace.start()
    return trace


# ---------------------------------------------------------------- are all ranks alike?
MOST_NAMED = 8   # ranks in a message


def check_alike(values, ddp) -> None:
    """Refuse values that differ between ranks, such as settings or the hash of a file.

    values: {what: plain value}. A collective. Raises ValueError on every rank, naming the first
    rank that differs from rank 0 and what it has."""
    of_rank_0 = broadcast(values, ddp)
    other = []
    for what, own in values.items():
        if of_rank_0.get(what) != own:
            other.append(f"{what} {json.dumps(own)} (rank 0: {json.dumps(of_rank_0.get(what))})")
    problem = f"rank {ddp.rank} on {ddp.host} has {', '.join(other)}" if other else ""
    problem = next(filter(None, gather(problem, ddp)), "")
    if problem:
        raise ValueError(f"{problem}. Expected the same on all ranks. Is a file that every host "
                         "has a copy of an old one somewhere, or was another command given there?")


def check_in_sync(model, ddp) -> None:
    """Check that all ranks have the same parameters, bit for bit, by a checksum of each parameter.

    Raises: RuntimeError on every rank, naming the ranks that differ and their first parameter."""
    if ddp.world_size == 1:
        return
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}   # {bytes: type}
    names = []
    checksums = []
    for name, parameter in unwrap_ddp(model).named_parameters():
        bits = parameter.detach().contiguous().view(integers[parameter.element_size()])
        names.append(name)
        checksums.append(bits.sum(dtype=torch.int64))
    own = torch.stack(checksums)
    differs = (own != broadcast(own.clone(), ddp)).tolist()
    first = names[differs.index(True)] if any(differs) else ""
    first_of_ranks = gather(first, ddp)
    others = [rank for rank, name in enumerate(first_of_ranks) if name]
    if not others:
        return
    named = ", ".join(f"rank {rank} on {ddp.hosts[rank]}" for rank in others[:MOST_NAMED])
    raise RuntimeError(f"the parameters are no longer equal on all ranks: {len(others)} of "
                       f"{ddp.world_size} differ from rank 0 on {ddp.hosts[0]} ({named}), first in "
                       f"{first_of_ranks[others[0]]}. Expected equal bits. Is a device faulty (if "
                       "most differ: that of rank 0), or does a rank change weights by itself?")


# ---------------------------------------------------------------- the best
def record_score(run, score, values, ddp) -> bool:
    """Note an evaluation's score in run.progress. Returns: is it the best so far? Rank 0 decides.

    After training.patience evaluations without a better score, the run is marked as finished.
    score: lower is better. values: metrics by name; those named val/... and other/... are kept with
    the best."""
    progress = run.progress
    training = run.config.training
    best = progress["best"]
    improved = broadcast(best is None or score < best["score"], ddp)
    progress["bad_evals"] = 0 if improved else progress["bad_evals"] + 1
    if improved:
        validated = {name: value for name, value in values.items()
                     if name.startswith(("val/", "other/"))}
        progress["best"] = {"step": progress["step"], "score": score, **validated}
    if training.patience is not None and progress["bad_evals"] >= training.patience:
        progress["finished"] = "early stop"
    return improved


@contextlib.contextmanager
def eval_mode(model):
    """Put the model into eval mode (no dropout) for a `with` block, and then back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
