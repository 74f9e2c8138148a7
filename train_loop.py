"""What every training script repeats, as plain functions: learning rate, state, step, best.

train_sedd_ddp.py and train_dpo_ddp.py read in the order of time and call these. What a script adds
is its config, its loss, its data and its evaluation. A global batch is a number of micro-batches,
fixed at the start of a run; each rank computes its share of them, and the gradient is that of the
mean over all of them, whatever the number of ranks.
"""
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_setup import (all_sum, broadcast, grad_scaler, gradient_sync, optimize_with_ipex,
                       stop_reason, stop_wanted, worker_init, wrap_ddp)
from optimizer import make_optimizer
from run_dir import ADVICE, Diverged, check_in_sync
from step_meter import StepMeter, make_meter


# ---------------------------------------------------------------- learning rate
def scale_for_batch(lr, warmup, rule, global_batch, base):
    """Scale the learning rate to a global batch that differs from the one it was chosen for.

    The factor is global_batch / base by the rule "linear" (Goyal et al. 2017, arXiv 1706.02677);
    its square root by "sqrt", usual for Adam; at most N by {"cap": N}; 1 by "none". Warm-up is
    scaled alike, in whole steps: with "linear", N times the ranks warm up on N x N times the data.
    Returns: (learning rate, warm-up steps).
    """
    factor = 1.0 if rule == "none" else global_batch / base
    if rule == "sqrt":
        factor = factor**0.5
    elif isinstance(rule, dict):
        factor = min(factor, rule["cap"])
    return lr * factor, round(warmup * factor)


def rate_share(step, warmup, n_iters, decay="none", decay_steps=None):
    """Learning rate of the next step, as a share of the full rate. step: how many are done.

    It rises linearly, to 1 in step number `warmup`. decay "linear" or "cosine": it falls towards 0
    over the last decay_steps of n_iters steps (below 1: that share of them; None: all after the
    warm-up)."""
    rise = min((step + 1) / max(warmup, 1), 1.0)
    if decay == "none":
        return rise
    if decay_steps is None:
        length = n_iters - warmup
    elif decay_steps < 1:
        length = decay_steps * n_iters
    else:
        length = min(decay_steps, n_iters)
    left = min(max((n_iters - step) / max(length, 1), 0.0), 1.0)
    return rise * {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[decay]


# ---------------------------------------------------------------- start or continue
@dataclass(kw_only=True)
class Run:
    """What a script's `prepare` returns and these functions read. Scripts add fields."""
    config: Any
    work_dir: Path
    continued_from: str | None   # path of a checkpoint; None: a new run
    fingerprint: dict          # of the data: {"n", "hash"}
    bare: Any                  # the model without DDP, for weights, evaluation and sampling
    model: Any                 # the same, as DDP wraps it, for training steps
    optimizer: Any
    scaler: Any
    ema: Any = None            # averages of the weights, where the script keeps some
    dtype: torch.dtype         # that autocast computes in
    progress: dict             # what changes: step, best, bad_evals, finished, bad_steps, ...
    sampler: Any               # MicroBatchSampler
    validation: Any            # None without validation proteins or pairs
    n_iters: int               # steps in all
    steps_per_epoch: int
    micro_batches: int         # per global batch
    global_batch: int          # in proteins, tokens or pairs
    expected_count: float      # of residues, proteins or pairs that a global batch has, roughly
    lr: float                  # scaled
    warmup: int
    meter: StepMeter           # of time, memory, gradients
    lock: Any = None           # on the run folder: rank 0 only
    flags: Any = None          # Totals of the last step, read one step late by read_flags, so that
    #                            the host need not wait for the device
    stop_requests: float = 0.0  # how many ranks were asked to stop, as last read


def start_run(kind, config, ddp, former, bare, item_of, *, steps_per_epoch, micro_batches,
              available, progress, seen, make_ema=None, **fields):
    """Scale the learning rate, make sampler and optimizer, wrap the model; take over a checkpoint.

    Args:
        kind: the script's class of Run.
        former: what is continued, see run_dir.Former.
        bare: the model with its first weights, on the device. item_of: see MicroBatchSampler.
        available: the part of the global batch that there is data for; lr is scaled to that.
        progress: what the script adds to what changes.
        seen: names of the last entries of Totals.sums, which good steps add up.
        make_ema: function of parameters, which makes their averages: called when DDP has given
            all ranks the weights of rank 0.
        fields: other fields of `kind`.
    Returns: an instance of `kind`.
    """
    t, o, state = config.training, config.optim, former.state
    progress = {"step": 0, "best": None, "bad_evals": 0, "finished": "",
                "bad_steps": [0, 0],   # nan or infinite: in all, and in a row now
                "seen": dict.fromkeys(seen, 0),
                **progress}
    lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, available, o.base_global_batch)
    if state is not None:
        state = {"seen": {}, **state}   # older checkpoints do not tell how much they have seen
        lr, warmup = state["lr"], state["warmup"]
        progress = {name: state.get(name, first) for name, first in progress.items()}
        bare.load_state_dict(state["model"])
    n_iters = t.n_iters or t.num_epochs * steps_per_epoch
    sampler = MicroBatchSampler(item_of, micro_batches, ddp, progress["step"], n_iters)
    bare, optimizer = optimize_with_ipex(bare, make_optimizer(bare, lr, o, ddp), ddp)
    run = kind(config=config, continued_from=former.path, bare=bare,
               model=wrap_ddp(bare, ddp, **vars(config.ddp)), optimizer=optimizer,
               scaler=grad_scaler(fields["dtype"], ddp),
               ema=make_ema(bare.parameters()) if make_ema else None, progress=progress,
               sampler=sampler, n_iters=n_iters, steps_per_epoch=steps_per_epoch,
               micro_batches=micro_batches, lr=lr, warmup=warmup,
               meter=make_meter(config, ddp, seen), **fields)
    for name in ("optimizer", "scaler", "ema"):
        if state is not None and getattr(run, name) is not None:
            getattr(run, name).load_state_dict(state[name])
    return run


# ---------------------------------------------------------------- the step
class MicroBatchSampler(torch.utils.data.Sampler):
    """The micro-batches that this rank computes, from step `first` to `last`, for a DataLoader.

    item_of: function (step, micro-batch) -> item of the data set. Any step is reached directly."""

    def __init__(self, item_of, micro_batches, ddp, first, last):
        self.item_of, self.first, self.last = item_of, first, last
        accum = micro_batches // ddp.world_size
        self.mine = range(ddp.rank * accum, (ddp.rank + 1) * accum)

    def __iter__(self):
        for step in range(self.first, self.last):
            yield from (self.item_of(step, micro) for micro in self.mine)


class Totals(NamedTuple):
    """Sums over all ranks of one step, float64, on the device."""
    packed: torch.Tensor     # all of the following in a row, for one all-reduce and one copy
    sums: torch.Tensor       # (n,) as the script's micro_batch_loss gives them
    count: torch.Tensor      # residues, proteins or pairs that the mean loss is over
    bad: torch.Tensor        # how many ranks have a loss or gradient that is nan or infinite
    bad_loss: torch.Tensor   # how many have such a loss
    stop: torch.Tensor       # how many were asked to stop


N_FLAGS = 4   # fields of Totals behind `sums`


def unpack(packed):
    """The Totals that are views of `packed`, (n + N_FLAGS,)."""
    return Totals(packed, packed[:-N_FLAGS], *packed[-N_FLAGS:].unbind())


def global_gradient(model, batches, loss_of, ddp, expected_count, scaler=None, meter=None):
    """Leave the gradient of the mean loss over the global batch in .grad on every rank.

    How many residues or pairs the mean is over is known only at the end: backward runs on
    sum / expected_count, then comes one small all-reduce, then the gradients are multiplied by
    ranks x expected_count / count (DDP has divided by the ranks). Any expected_count gives the same
    gradient; one near the count keeps float16 in its range. Nothing here waits for the device.

    Args:
        model: as DDP wraps it.
        batches: this rank's micro-batches, each with a "seed" for dropout.
        loss_of: function (model, batch) -> (loss sum, sums (n,) to be totalled, count).
        scaler: a GradScaler, or None. meter: a StepMeter, or None.
    Returns: (Totals, norm of the gradient). If totals.bad is not 0, all gradients are nan.
    """
    own, meter = None, meter or StepMeter(ddp)
    for k, batch in enumerate(batches):
        torch.manual_seed(batch["seed"])   # so that dropout is keyed by the micro-batch
        with gradient_sync(model, last=k == len(batches) - 1), meter.passes(model):
            loss, sums, count = loss_of(model, batch)
            scaled = loss / expected_count
            (scaler.scale(scaled) if scaler is not None else scaled).backward()
        if own is None:
            own = unpack(torch.zeros(len(sums) + N_FLAGS, dtype=torch.float64, device=ddp.device))
        own.sums.add_(sums.detach())   # views of own.packed
        own.count.add_(count)
        own.bad_loss.add_(~loss.detach().isfinite())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    own.bad_loss.copy_(own.bad_loss > 0)
    own.bad.copy_((own.bad_loss > 0) | ~norm.isfinite())
    own.stop.fill_(stop_wanted(ddp))
    meter.lap("optimizer")   # counts the time since the last lap, here of norm and flags
    totals = unpack(all_sum(own.packed, ddp))
    meter.lap("exchange")
    count = torch.where(totals.count > 0, totals.count, 1.0)   # 0: nothing that counts
    factor = ddp.world_size * expected_count / count
    factor = torch.where(totals.bad > 0, math.nan, factor).to(gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)
    return totals, norm * factor


def open_batches(run, dataset, loss_of, ddp):
    """Warm DDP up; return an iterator over this rank's micro-batches, from the next step on.

    DDP arranges its gradient buckets anew after its first backward. From 3 ranks on this changes
    the order of sums. So every start throws one backward away: then a resumed run adds up in the
    order of one that was not interrupted."""
    t = run.config.training
    batches = iter(torch.utils.data.DataLoader(
        dataset, sampler=run.sampler, batch_size=None, num_workers=t.num_workers,
        pin_memory=ddp.device.type != "cpu", generator=torch.Generator(),   # not the global one
        worker_init_fn=functools.partial(worker_init, signals=t.stop_signals)))
    run.bare.train()
    if ddp.world_size > 1:
        item = run.sampler.item_of(run.progress["step"], run.sampler.mine[0])
        global_gradient(run.model, [dataset[item]], loss_of, ddp, run.expected_count)
        run.optimizer.zero_grad(set_to_none=True)
    run.meter.restart()
    return batches


def take_step(run, batches, loss_of, ddp):
    """One optimizer step on this rank's next micro-batches. A bad step leaves weights and averages
    as they are; it counts as a step.

    batches: iterator of open_batches. Returns: (Totals, norm of the gradient before clipping)."""
    o, progress, optimizer, scaler = run.config.optim, run.progress, run.optimizer, run.scaler
    mine = run.meter.fetch(batches, len(run.sampler.mine), progress["step"] + 1)
    for group in optimizer.param_groups:
        group["lr"] = run.lr * rate_share(progress["step"], run.warmup, run.n_iters, o.decay,
                                          o.decay_steps)
    totals, norm = global_gradient(run.model, mine, loss_of, ddp, run.expected_count, scaler,
                                   run.meter)
    read_flags(run)   # of the step before, which the device has long computed
    clip, parameters = o.grad_clip or math.inf, list(run.bare.parameters())
    if scaler.is_enabled():   # it skips the step by itself where gradients are nan
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:   # skip a bad step without asking the device: where found_inf is 1, AdamW and Muon skip
        optimizer.found_inf = (totals.bad > 0).float()
    run.meter.measure_layers("gradients", run.bare)
    torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if run.ema is not None:
        run.ema.update(parameters, skip=totals.bad > 0)
    run.meter.measure_layers("weights", run.bare)
    run.meter.finish(totals.sums)
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
    totals, (bad_steps, in_a_row) = unpack(packed), run.progress["bad_steps"]
    run.stop_requests = float(totals.stop)
    if not totals.bad:
        run.progress["bad_steps"] = [bad_steps, 0]
        seen = run.progress["seen"]
        for name, number in zip(seen, totals.sums[-len(seen):].tolist()):
            seen[name] += int(number)
        return
    if run.ema is not None:
        run.ema.num_updates -= 1   # a skipped step has not moved the averages
    # In float16 the scaler finds its scale by overflows, which are not counted. Below a scale of 1
    # the gradient itself is infinite.
    if totals.bad_loss or not run.scaler.is_enabled() or run.scaler.get_scale() < 1:
        bad_steps, in_a_row = bad_steps + 1, in_a_row + 1
        run.progress["bad_steps"] = [bad_steps, in_a_row]
    most = run.config.training.max_bad_steps
    if in_a_row > most:
        raise Diverged(f"step {run.progress['step']}: the loss or its gradient was nan or infinite "
                       f"in {in_a_row} steps in a row, on "
                       f"{float(totals.bad_loss or totals.bad):.0f} rank(s) in the last; "
                       f"expected at most {most}. These steps were skipped. {ADVICE}")


def after_step(run, ddp, at_once):
    """What follows each step: count it if it was bad, compare the ranks' weights now and then, and
    return why all ranks stop here, '' to go on. Raises: see read_flags.

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


# ---------------------------------------------------------------- the best
def record_score(run, score, values, ddp):
    """Note an evaluation's score in run.progress. Returns: is it the best so far? Rank 0 decides.

    After training.patience of them without a better one, the run is marked as finished.
    score: lower is better. values: metrics by name, of which val/... are kept with the best."""
    progress, t = run.progress, run.config.training
    best = progress["best"]
    improved = broadcast(best is None or score < best["score"] - t.min_delta, ddp)
    progress["bad_evals"] = 0 if improved else progress["bad_evals"] + 1
    if improved:
        found = {name: value for name, value in values.items() if name.startswith("val/")}
        progress["best"] = {"step": progress["step"], "score": score, **found}
    if t.patience is not None and progress["bad_evals"] >= t.patience:
        progress["finished"] = "early stop"
    return improved
