"""Distributed data parallel in one file: launcher -> ranks -> device -> process group.

Copy this file next to your script; it needs torch and the standard library. The same script then
runs unchanged under `python`, `mpirun`, `mpiexec`, `srun` and `torchrun`, on CPU, CUDA and Intel
XPU:

    from ddp_setup import setup_ddp, wrap_ddp, unwrap_ddp, ddp_sampler, save_checkpoint, cleanup_ddp
    ddp = setup_ddp(seed=0)
    model = wrap_ddp(MyModel().to(ddp.device), ddp)
    sampler = ddp_sampler(data, ddp)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler): ...
        save_checkpoint(f"out/{epoch}.pt", ddp, model=unwrap_ddp(model).state_dict(), epoch=epoch)
    cleanup_ddp(ddp)

Or `with setup_ddp(seed=0) as ddp:`. With `if stop_reason(ddp, step): save and leave` at each step,
a run also stops in good order on a signal, before the walltime, or on a stop file.

What a script calls comes first, in the order in which it calls it. How that works follows, with
some functions that few scripts call (detect_launcher, choose_device, seed_for, lock_folder):
launchers, devices, where rank 0 is, how the ranks meet, one fails - all end, stop requests,
checkpoint files, the doctor, Intel's extension.
`python ddp_setup.py --doctor` prints what is found here and would be chosen, and `--doctor --help`
all environment variables that are read and set.
"""
import atexit
import contextlib
import errno
import faulthandler
import hashlib
import importlib.metadata
import inspect
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__all__ = [
    "AGAIN", "BAD_INPUT", "Ddp", "SetupError", "abort", "all_mean", "all_sum", "autocast",
    "barrier", "broadcast", "choose_device", "cleanup_ddp", "ddp_sampler",
    "detect_launcher", "end_watch", "gather", "grad_scaler", "gradient_sync", "load_checkpoint",
    "lock_folder", "missing_ranks", "note_progress", "optimize_with_ipex", "print0",
    "save_checkpoint", "seed_for", "setup_ddp", "start_watch", "stop_reason",
    "stop_wanted", "unwrap_ddp", "worker_init", "wrap_ddp"]

# Exit codes, beside 0 finished and 1 failed.
AGAIN = 75         # stopped on request, work is left
HANG = 70          # no progress
BAD_INPUT = 2      # a person must change something
INTERRUPTED = 130  # Ctrl-C
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
# Time limits and pauses, in seconds.
PATIENCE = 1800.0    # for all ranks to reach a barrier, or cleanup_ddp
MARGIN = 20.0        # ranks wait this much longer for one that speaks for all, or has to end them
CLOSING = 60.0       # for torch and MPI to close their connections
CULPRIT_FIRST = 1.5  # for the rank at fault, or its guard, to speak before the others do
DISK_FULL = 5.0      # until a checkpoint is written once more


# ---------------------------------------------------------------- what a script calls
@dataclass(frozen=True)
class Ddp:
    """This process' place in the run. What changes during a run stands in `state`."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0                 # number within its host
    local_world_size: int | None = 1    # ranks on its host; None: not known before they meet
    node_rank: int | None = 0           # number of its host; None: not known before they meet
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    launcher: str = "plain process"
    slurm_step: str = ""                # of all ranks, such as 77.0, if srun has started them
    seed: int = 0
    host: str = ""
    hosts: tuple[str, ...] = ()         # of each rank
    notes: tuple[str, ...] = ()         # what was found and chosen, with reasons
    timeout: float | None = None        # of a collective, in seconds; None: torch's own
    store: Any = field(default=None, repr=False, compare=False)   # served by rank 0; None: 1 rank
    state: "State" = field(default_factory=lambda: State(), repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def __enter__(self) -> "Ddp":
        return self

    def __exit__(self, kind, error, tb) -> None:
        if os.getpid() == self.state.pid:   # a forked child may leave as it likes
            _leave_context(self, error)


@dataclass
class State:
    """The part of a Ddp that changes during a run."""
    pid: int = field(default_factory=os.getpid)    # of the rank, not of its forked children
    mpi: Any = None               # COMM_WORLD of mpi4py
    ipex: str = "auto"            # see optimize_with_ipex
    guard: int | None = None      # file descriptor of the pipe to ddp_guard.py
    barriers: int = 0             # how many there have been
    watch: "Watch | None" = None  # see start_watch
    patience: float = PATIENCE    # seconds to wait for the others in cleanup_ddp
    checkpoint: str = ""          # path of the one to resume from
    step: int | None = None       # of that checkpoint
    advice: str = "To go on, load_checkpoint it."   # for the last line of a failure
    terminated: bool = False      # by SIGTERM, as launchers do when another rank has failed
    clean: bool = False           # cleanup_ddp was called


class SetupError(RuntimeError):
    """Setting up failed. code: the exit code; 2 if a person must change something, 1 if a new start
    may succeed."""

    def __init__(self, text: str, code: int = BAD_INPUT):
        super().__init__(text)
        self.code = code


def setup_ddp(device: str = "auto", backend: str = "auto", seed: int = 0,    # noqa: PLR0913
              ranks: int | None = None, timeout: float | None = None,    # (a script's options)
              init_timeout: float = 300.0, quiet: bool = False, ipex: str = "auto") -> Ddp:
    """Find this process' rank and device, join the other ranks, and return a Ddp. If called again
    in the same process, return the same Ddp. Several ranks cannot meet again after cleanup_ddp.

    Args:
        device: auto, cpu, cuda or xpu. backend: auto, nccl, gloo, xccl or ccl.
        seed: gives all ranks equal initial weights; wrap_ddp then seeds each rank differently.
        ranks: refuse any other number of ranks.
        timeout: seconds a collective may take; None: torch's own limit.
        init_timeout: seconds to wait for all ranks to appear.
        quiet: do not print what was found. ipex: auto, on or off, see optimize_with_ipex.
    Raises: SetupError (a RuntimeError) with what was found and what to do, naming missing ranks.
        It is raised on one rank, or before the ranks have met on one per host; the others exit with
        its `code`."""
    if setup_ddp.current is None:
        try:
            setup_ddp.current = _set_up(device, backend, seed, ranks, timeout, init_timeout, ipex)
        except SetupError as error:
            _leave_unless_first_on_host(error)
            raise
        if not quiet:
            _print_notes(setup_ddp.current)
    elif setup_ddp.current.state.clean:
        raise SetupError("setup_ddp was called after cleanup_ddp. Expected one cleanup_ddp, at the "
                         "end: several ranks can meet once in a process.")
    return setup_ddp.current


setup_ddp.current = None   # one process has one Ddp at a time, as torch has one process group


def wrap_ddp(model: torch.nn.Module, ddp: Ddp, **options) -> torch.nn.Module:
    """Wrap a model, already on ddp.device, in DistributedDataParallel if there are several ranks.

    Afterwards torch, random and numpy are seeded by (seed, "rank", rank): initial weights are equal
    on all ranks, but dropout and augmentation differ.

    options: of DistributedDataParallel; gradient_as_bucket_view is on by default.
    Raises: ValueError for a model on another device."""
    for name, parameter in model.named_parameters():
        if parameter.device != ddp.device:
            raise ValueError(f"parameter {name} is on {parameter.device}; expected {ddp.device}. "
                             f"Call model.to(ddp.device) before wrap_ddp (and before the optimizer "
                             f"is made).")
    if ddp.world_size > 1:
        model = DistributedDataParallel(model, **_options_for_torch(options, ddp))
    _seed_all(seed_for(ddp.seed, "rank", ddp.rank))
    return model


def unwrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The bare model: for state_dict, evaluation and sampling. The forward of a wrapped model may
    broadcast buffers, so a rank that calls it alone can hang."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def ddp_sampler(dataset, ddp: Ddp, train: bool = True,
                shuffle: bool = True) -> DistributedSampler | range:
    """A sampler for any dataset with a length: each item goes to one rank.

    train=True: torch's DistributedSampler, in an order of (ddp.seed, epoch); call its set_epoch.
    The epoch is cut to equal steps per rank. train=False: all items, in order, whatever `shuffle`.
    Some ranks may then have one item more, so a loop over them must not contain collectives.
    Raises: ValueError for fewer items than ranks."""
    if len(dataset) < ddp.world_size:
        raise ValueError(f"{len(dataset)} item(s) for {ddp.world_size} ranks; expected at least "
                         f"one each. Use fewer ranks or more data.")
    if not train:
        return range(ddp.rank, len(dataset), ddp.world_size)
    return DistributedSampler(dataset, ddp.world_size, ddp.rank, shuffle, ddp.seed, drop_last=True)


def gradient_sync(model: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Context for one micro-step of gradient accumulation: only the `last` one averages gradients
    over ranks.

    With static_graph, DDP records the graph in its first backward, which must not be under no_sync.
    So all micro-steps of the first step average gradients, which does not change the result. All
    ranks must then have equally many of them."""
    if not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    if model.static_graph and not getattr(model, "static_graph_recorded", False):
        model.static_graph_recorded = last
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def print0(ddp: Ddp, *values, **options) -> None:
    """print on rank 0; on every rank, with its number, where DDP_LOG_ALL=1."""
    options = {"flush": True, **options}
    if os.environ.get("DDP_LOG_ALL") == "1" and ddp.world_size > 1:
        print(f"[rank {ddp.rank}]", *values, **options)
    elif ddp.is_main:
        print(*values, **options)


def missing_ranks(ddp: Ddp, name: str, limit: float) -> list[int]:
    """Tell the store that this rank has come to `name`, and wait there for all ranks.

    Args:
        name: of this meeting; a name can be used once. limit: seconds.
    Returns: the ranks that have not come in time; [] if all have.
    Raises: RuntimeError if rank 0, which serves the store, is gone."""
    if ddp.world_size == 1:
        return []
    ddp.store.set(f"{name}/{ddp.rank}", "")
    if ddp.store.add(f"{name}/count", 1) == ddp.world_size:
        ddp.store.set(f"{name}/all", "")
    with contextlib.suppress(dist.DistStoreError):   # at the limit
        ddp.store.wait([f"{name}/all"], timedelta(seconds=limit))
        return []
    return [rank for rank in range(ddp.world_size) if not ddp.store.check([f"{name}/{rank}"])]


def barrier(ddp: Ddp, timeout: float | None = None) -> None:
    """Wait for all ranks.

    timeout: seconds; default: that of setup_ddp, or half an hour.
    Raises: RuntimeError with the ranks that did not come."""
    limit = timeout or ddp.timeout or PATIENCE
    ddp.state.barriers += 1
    missing = missing_ranks(ddp, f"barrier/{ddp.state.barriers}", limit)
    if missing:
        raise RuntimeError(f"rank(s) {_listed(missing)} of {ddp.world_size} did not come to a "
                           f"barrier within {limit:.0f} s; expected all")


def broadcast(value: Any, ddp: Ddp, src: int = 0) -> Any:
    """`value` of rank `src`, on every rank.

    value: a tensor (same shape and dtype everywhere) is filled in place and returned; anything else
        is pickled: plain values, perhaps with tensors on the CPU."""
    if ddp.world_size == 1:
        return value
    if not isinstance(value, torch.Tensor):
        values = [value]
        dist.broadcast_object_list(values, src, device=ddp.device)
        return values[0]
    moved = value.to(ddp.device)
    dist.broadcast(moved, src)
    value.detach().copy_(moved)   # it may be a parameter
    return value


def gather(value: Any, ddp: Ddp) -> list[Any]:
    """The plain values of all ranks, in their order, on every rank."""
    values = [value] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def all_sum(value: Any, ddp: Ddp) -> Any:
    """Sum over ranks: of a tensor (into a new one), or of a number or list of numbers (float64)."""
    if not isinstance(value, torch.Tensor):
        return all_sum(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    if ddp.world_size == 1:
        return value.clone()
    total = value.to(ddp.device, copy=True)
    dist.all_reduce(total)
    return total.to(value.device)


def all_mean(value: Any, ddp: Ddp) -> Any:
    """Mean over ranks, like all_sum. Correct only if every rank has the same share of the data."""
    if not isinstance(value, torch.Tensor):
        return all_mean(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    return all_sum(value, ddp) / ddp.world_size


def autocast(dtype: torch.dtype, ddp: Ddp) -> contextlib.AbstractContextManager:
    """torch.autocast for ddp.device; float32 (and float64) mean none."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(ddp.device.type, dtype=dtype)


def grad_scaler(dtype: torch.dtype, ddp: Ddp) -> torch.amp.GradScaler:
    """A GradScaler that scales for float16 and passes everything through otherwise."""
    return torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)


def start_watch(ddp: Ddp, run_dir: str | os.PathLike | None = None, minutes: float = 20.0,
                signals: Iterable[str] = STOP_SIGNALS) -> None:
    """Watch for stop requests and hangs from here on. stop_reason calls this if nobody has. A
    collective. With a run_dir, this run owns the folder from here on.

    Signals, the time DDP_DEADLINE and a file RUN_DIR/STOP only ask for a stop: stop_reason tells
    all ranks at the same step. A second Ctrl-C ends the run at once, with exit code 130.

    Each call of stop_reason counts as progress, as does a save. With a guard (ddp_guard.py) a run
    without progress is ended with exit code 70, and the late rank is named. Without, each rank
    without progress shows its stacks and ends by itself with exit code 1, even if it only waits for
    another rank; status.json then stays at code null.

    Args:
        run_dir: folder with `lock`, which keeps a second run out; `status.json`, see end_watch; and
            `stacks/rank_R.txt`, where each rank with a guard is at the limit.
        minutes: limit without progress; 0: none. signals: names of those that ask for a stop.
    Raises: ValueError, on all ranks, if another run uses the folder, or it cannot be written.
        Nothing has been written then."""
    watch = ddp.state.watch or Watch()   # of an earlier call: a request to stop stays
    if run_dir is not None:
        _take_folder(ddp, watch, os.path.abspath(run_dir))
    _close_stacks(ddp, watch)
    ddp.state.watch = watch
    watch.limit = 0.0
    if not _alone_in_a_notebook(ddp):
        watch.limit = minutes * 60
        ddp.state.patience = watch.limit or PATIENCE
        _set_handlers(ddp, watch, signals)
    if watch.limit:
        _open_stacks(ddp, watch)
    _tell_guard(ddp, limit=watch.limit, run_dir=watch.run_dir, saved=_last_checkpoint(ddp))
    _write_status(ddp, None, "running")
    note_progress(ddp)


def note_progress(ddp: Ddp, step: int | None = None) -> None:
    """A sign of progress: the limit of start_watch begins anew. step: number of steps done; None:
    as before, as between two steps."""
    watch = ddp.state.watch
    if watch is None:
        return
    if step is not None:
        watch.step = step
    if ddp.state.guard is not None:
        _tell_guard(ddp, step=watch.step)
    elif watch.limit:
        _set_timer(watch.limit, sys.__stderr__)   # which is all that this rank can say


def stop_reason(ddp: Ddp, step: int, wanted: float | None = None) -> str:
    """Why all ranks shall now save and leave, the same on each, or "" to go on.

    To be called at each step boundary, on all ranks: it is a sign of progress too. See start_watch
    for what asks a run to stop.

    wanted: the sum of stop_wanted over ranks, where the caller has it from an all-reduce of its own
        (perhaps of the step before); None: summed here, by a small one per call."""
    if ddp.state.watch is None:
        start_watch(ddp)
    note_progress(ddp, step)
    if wanted is None:
        wanted = all_sum(stop_wanted(ddp), ddp)
    if not wanted:
        return ""
    reasons = gather(ddp.state.watch.requested, ddp)
    ddp.state.watch.requested = next(filter(None, reasons), "")
    return ddp.state.watch.requested


def stop_wanted(ddp: Ddp) -> float:
    """1.0 if this rank has been asked to stop, else 0.0: to be summed over ranks, for stop_reason.
    Rank 0 looks for the deadline and the stop file."""
    watch = ddp.state.watch
    if watch is None:
        return 0.0
    if ddp.is_main and not watch.requested:
        if time.time() >= _deadline(os.environ):
            watch.requested = "DDP_DEADLINE is reached"
        elif watch.run_dir and os.path.exists(f"{watch.run_dir}/STOP"):
            watch.requested = f"{watch.run_dir}/STOP exists; remove it before the next start"
    return float(bool(watch.requested))


def end_watch(ddp: Ddp, code: int | None = None, reason: str = "") -> None:
    """End the watch, and give the run folder back. All ranks must then reach cleanup_ddp within its
    limit; cleanup_ddp calls this if nobody has.

    RUN_DIR/status.json holds {"code", "reason", "step"}: code null while the run is on, else 0
    finished, 75 stopped with work left, 1 failed, 2 bad input, 70 no progress, 130 interrupted.

    code, reason: what to note there; None: leave it as it is."""
    watch = ddp.state.watch
    if watch is None:
        return
    if code is not None:
        _write_status(ddp, code, reason)
    for number, handler in watch.handlers.items():
        signal.signal(number, handler)
    ddp.state.watch = None
    _close_stacks(ddp, watch)
    _tell_guard(ddp, limit=0.0, run_dir=None)
    if watch.lock is not None:
        watch.lock.close()


def worker_init(worker_id: int = 0, signals: Iterable[str] = STOP_SIGNALS) -> None:
    """worker_init_fn for a DataLoader. A stop signal to all processes must not end the workers:
    without them the main process would raise an error instead of saving."""
    for name in signals:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def save_checkpoint(path: str | os.PathLike, ddp: Ddp, keep_last: int = 1, resumes: bool = True,
                    **state) -> None:
    """Write `state` to `path`, from rank 0: temporary name, fsync, rename. A collective.

    Args:
        state: tensors and plain types, nested. `world_size` and `versions` are added.
        keep_last: how many to keep, this one included; the former ones as path-1, path-2, ...
        resumes: the next start continues from this file, so the last line of a failure names it.
    Raises: RuntimeError, on all ranks, for a value that is not of a plain type, or if the file
        cannot be written; the former file is then untouched."""
    path = os.fspath(path)
    note_progress(ddp)
    problem = ""
    if ddp.is_main:
        state.update(world_size=ddp.world_size, versions={
            "torch": str(torch.__version__), "python": sys.version.split()[0]})
        problem = _try_to_write(path, keep_last, state)
    problem = broadcast(problem, ddp)
    note_progress(ddp)
    if problem:
        raise CannotSave(f"{problem}. The former checkpoint is untouched.")
    if resumes:
        _note_checkpoint(ddp, path, state)


def load_checkpoint(path: str | os.PathLike, ddp: Ddp | None = None) -> Any:
    """Read what save_checkpoint wrote; tensors come on the CPU.

    With ddp, a collective: rank 0 reads the file, goes back to the former one if it is damaged,
    saying so, and sends what it holds to the others.
    Raises: ValueError, on all ranks, for a file that is missing, damaged (each record has a
        checksum), or holds more than tensors and plain types."""
    path = os.fspath(path)
    if ddp is None:
        return _read_checkpoint(path)
    note_progress(ddp)
    found = None
    if ddp.is_main:
        found = _read_newest(path)
    used, state, troubles = broadcast(found, ddp)
    if used is None:
        raise ValueError("\n".join(troubles))
    if troubles:
        lines = [f"ATTENTION: {trouble}" for trouble in troubles]
        print0(ddp, "\n".join([*lines, f"  Going back to {used}."]))
    note_progress(ddp)
    _note_checkpoint(ddp, used, state if isinstance(state, dict) else {})
    return state


def abort(ddp: Ddp, text: str, code: int = 1) -> None:
    """Print `text` once, with the rank, and end every rank; in a notebook, raise SystemExit. The
    last line, and status.json, have the first line of the text.

    text: "": nothing is printed, as the caller has said why.
    code: exit code of every rank, as far as the launcher passes it on."""
    _end_all(ddp, End(text, code))


def cleanup_ddp(ddp: Ddp) -> None:
    """Leave in good order: wait for the others, destroy the group, finalise MPI. Harmless when
    called twice.

    It waits for half an hour, or the limit of start_watch, and then names the missing ranks. With a
    guard, Python must end within two minutes after this."""
    if ddp.state.clean:
        return
    try:
        _await_others_at_the_end(ddp)
        ddp.state.clean = True
        atexit.unregister(_at_exit)
        _close_connections(ddp)
    except RuntimeError as error:   # perhaps another rank has died
        _end_all(ddp, _end_by(error))
    _tell_guard(ddp, left=True, limit=2 * CLOSING)   # a profiler may still write its traces
    if ddp.world_size == 1:   # such as in a notebook
        setup_ddp.current = None


# ---------------------------------------------------------------- launchers
#   mpirun, srun, torchrun, ...
#      |  starts N processes, and tells each its place by variables of its own
#      v
#   environment  --  the first complete row of LAUNCHERS  -->  rank, size, local rank
#                    rows that agree with it lend it what it lacks; others are printed and not used
class Launcher(NamedTuple):
    """The environment variables by which a launcher tells a process its place. Where a field lists
    several names, separated by blanks, the first one that is set counts."""
    rank: str
    size: str
    local_rank: str
    local_size: str
    launch: str = ""    # variables that together identify a launch
    needs: str = ""     # other variables of which one must be set, or this row is skipped
    own: str = ""       # a variable that nobody else sets, neither srun nor a person
    mpi: bool = False   # its ranks are MPI processes: mpi4py may be used


# In this order: the inner launcher of torchrun in srun, or mpirun in sbatch, comes first.
LAUNCHERS = {
    "DDP_* variables": Launcher("DDP_RANK", "DDP_WORLD_SIZE", "DDP_LOCAL_RANK",
                                "DDP_LOCAL_WORLD_SIZE"),
    "torchrun": Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                         launch="TORCHELASTIC_RUN_ID", needs="MASTER_ADDR LOCAL_RANK",
                         own="TORCHELASTIC_RUN_ID"),
    "Open MPI": Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                         launch="PMIX_NAMESPACE", own="OMPI_COMM_WORLD_RANK", mpi=True),
    # Size: Polaris sets PMI_SIZE, Aurora none. Slurm's cray_shasta plugin sets PALS_RANKID too.
    "PALS": Launcher("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID PMI_LOCAL_RANK PMIX_LOCAL_RANK",
                     "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", launch="PALS_APID", mpi=True),
    "MPICH or Intel MPI (Hydra)": Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK",
                                           "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
                                           own="MPI_LOCALRANKID", mpi=True),
    "Slurm step": Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID",
                           "", launch="SLURM_JOB_ID SLURM_STEP_ID SLURM_RESTART_COUNT",
                           needs="SLURM_STEP_ID"),
}
JOBS = "SLURM_JOB_ID PBS_JOBID"   # of batch systems; PBS' holds the index within an array


class Claim(NamedTuple):
    """What a row of LAUNCHERS, or mpi4py, says of this process; None: nothing."""
    launcher: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None
    slurm_step: str | None = None

    def agrees(self, other: "Claim") -> bool:
        """Whether both may be of one launch, as of srun and of its PMI."""
        sizes = {self.size, other.size} - {None}
        return self.rank == other.rank and len(sizes) <= 1

    @property
    def is_alone(self) -> bool:
        return self.rank == 0 and self.size == 1


def detect_launcher(env: dict, mpi: tuple[int, int] | None = None) -> Ddp:
    """Which rank is this process? A pure function of the environment.

    The first row of LAUNCHERS wins whose rank, size and local rank are known; rows that agree with
    it on rank and size lend it what it lacks. A launch of one task is one process.

    Args:
        env: mapping of environment variables.
        mpi: (rank, size) of mpi4py's COMM_WORLD, where an MPI started this process.
    Returns: a Ddp that knows its place (a plain process: rank 0 of 1).
    Raises: SetupError, with what was seen, where variables are incomplete or disagree. Going on as
        a single process would end with exit code 0 and a wrong result.
    """
    claims = _claims(env, mpi)
    chosen = _choose(claims, env)
    if chosen is None:
        return _plain_process(env)
    notes = [f"launcher {chosen.launcher}: rank {chosen.rank} of {chosen.size}, local rank "
             f"{chosen.local_rank}"]
    for other in claims:
        if other.agrees(chosen):
            continue
        _refuse_contradiction(chosen, other, env)
        notes.append(f"outer launcher {other.launcher} says rank {other.rank} of {other.size}: "
                     f"not used")
    _refuse_incomplete(chosen, env)
    if chosen.size == 1:   # its step may be salloc's own shell
        return Ddp(local_rank=chosen.local_rank, launcher=chosen.launcher, notes=tuple(notes))
    return Ddp(chosen.rank, chosen.size, chosen.local_rank, chosen.local_size, node_rank=None,
               launcher=chosen.launcher, slurm_step=chosen.slurm_step or "", notes=tuple(notes))


def _claims(env, mpi=None):
    """The Claims of mpi4py and of all rows of LAUNCHERS whose variable for the rank is set."""
    claims = []
    for name, row in LAUNCHERS.items():
        has_needed = any(env.get(name, "").strip() for name in row.needs.split())
        if row.needs and not has_needed:
            continue   # RANK alone may mean anything
        rank = _first_int(env, row.rank)
        if rank is None:
            continue
        claim = Claim(name, rank, _first_int(env, row.size), _first_int(env, row.local_rank),
                      _first_int(env, row.local_size))
        if name == "Slurm step":
            claim = _with_step(claim, env)
        claims.append(claim)
    if mpi is not None:
        claims.append(Claim("mpi4py", *mpi))
    return claims


def _with_step(claim, env):
    """The Claim of Slurm's row, with what no single variable tells."""
    if _int(env, "SLURM_STEP_NUM_NODES") == 1:
        claim = claim._replace(local_size=claim.size)
    return claim._replace(slurm_step=f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}")


def _choose(claims, env):
    """The Claim that counts, with what others lend it; None: this is a plain process.

    Rank 0 of 1 does not count: it is what salloc's own shell has, or PMI that a step of one task
    has left. It does if set on purpose, by torchrun or DDP_* variables."""
    candidates = []
    for claim in claims:
        if claim.launcher == "mpi4py":
            continue
        by_torchrun = claim.launcher == "torchrun" and _is_own(claim, env)
        on_purpose = by_torchrun or claim.launcher == "DDP_* variables"
        claim = _completed(claim, claims, env)
        if on_purpose or not claim.is_alone:
            candidates.append(claim)
    for claim in candidates:
        if claim.size is not None and claim.local_rank is not None:
            return claim
    return candidates[0] if candidates else None   # what it lacks is named by the caller


def _is_own(claim, env):
    """Whether a launcher itself has set these variables, and not srun or a person."""
    return bool(env.get(LAUNCHERS[claim.launcher].own, "").strip())


def _completed(claim, claims, env):
    """A Claim, with what it lacks from those that agree with it.

    By chance, rank 0 of a torchrun or mpirun in a shell of `srun -n 4` agrees with task 0 of 4, and
    no other rank does. So a launcher that knows where its ranks are takes no step."""
    for other in claims:
        if other.agrees(claim):
            lent = {name: value for name, value in other._asdict().items()
                    if getattr(claim, name) is None}
            claim = claim._replace(**lent)
    if claim.size is None:
        claim = claim._replace(size=_int(env, "DDP_WORLD_SIZE"))
    knows_where = env.get("MASTER_ADDR") or claim.local_size == claim.size
    if _is_own(claim, env) and knows_where:
        claim = claim._replace(slurm_step=None)
    return claim


def _refuse_contradiction(chosen, other, env):
    """Raise SetupError if a Claim that disagrees with the chosen one is not just of an outer
    launcher: it is mpi4py's, or torchrun's variables were exported by hand under an MPI."""
    by_hand = chosen.launcher == "torchrun" and not _is_own(chosen, env)
    by_mpi = other.launcher != "mpi4py" and LAUNCHERS[other.launcher].mpi and not other.is_alone
    if other.launcher == "mpi4py" or (by_hand and by_mpi):
        raise SetupError(
            f"{chosen.launcher} says rank {chosen.rank} of {chosen.size}, {other.launcher} says "
            f"rank {other.rank} of {other.size}. Expected the same. Unset what is left over from "
            f"another launcher. If mpi4py differs, it was probably built for another MPI: "
            f"reinstall it, or set DDP_MPI4PY=0. {_seen(env)}")


def _refuse_incomplete(chosen, env):
    """Raise SetupError if a Claim lacks something, or cannot be."""
    if chosen.size is None:
        raise SetupError(
            f"{chosen.launcher} started rank {chosen.rank} but sets no number of ranks. Expected "
            f"DDP_WORLD_SIZE: export it next to the mpiexec call (nodes x ranks per node), or "
            f"install mpi4py. If no launcher runs, unset what is left over. {_seen(env)}")
    if chosen.local_rank is None:
        raise SetupError(
            f"{chosen.launcher} started rank {chosen.rank} of {chosen.size}, but no variable tells "
            f"its number within the host. {_seen(env)}. Expected for example "
            f"{LAUNCHERS[chosen.launcher].local_rank}. Unset what was exported by hand, or set "
            f"DDP_RANK, DDP_WORLD_SIZE and DDP_LOCAL_RANK.")
    most = chosen.local_size or chosen.size
    if not 0 <= chosen.rank < chosen.size or not 0 <= chosen.local_rank < most:
        raise SetupError(f"{chosen.launcher}: rank {chosen.rank} and local rank "
                         f"{chosen.local_rank} of {chosen.size}; expected 0 to "
                         f"{chosen.size - 1}. {_seen(env)}")


def _plain_process(env):
    """Place of a process that no launcher has started with others."""
    notes = ["launcher none: one process"]
    if env.get("SLURM_JOB_ID") and (_int(env, "SLURM_NTASKS") or 1) > 1:
        notes.append(f"ATTENTION: Slurm job {env['SLURM_JOB_ID']} has {env['SLURM_NTASKS']} tasks, "
                     f"and this is ONE process in its shell. To start all: srun python "
                     f"{os.path.basename(sys.argv[0]) or '...'}")
    return Ddp(notes=tuple(notes))


def _int(env, name):
    text = env.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text!r} is not an integer. Expected the number that the "
                         f"launcher sets; unset it if it was exported by hand.")
    return int(text)


def _first_int(env, names):
    """The number in the first of several variables that is set; None: none is."""
    for name in names.split():
        if env.get(name, "").strip():
            return _int(env, name)
    return None


def _seen(env):
    """The launchers' variables that are set, for messages."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"}
    for row in LAUNCHERS.values():
        names.update(f"{row.rank} {row.size} {row.local_rank} {row.local_size}".split())
    shown = " ".join(f"{name}={env[name]}" for name in sorted(names) if env.get(name, "").strip())
    return f"Seen: {shown or 'none'}"


# ---------------------------------------------------------------- devices, backends, seeds
#   --device, --backend  \
#                         choose_device  -->  cuda:1 with nccl, xpu:3 with xccl, cpu with gloo
#   torch.accelerator    /                    or a refusal that says what is there
#
#   rank with local rank r  -->  device r modulo the number of visible ones: a launcher may let a
#                                rank see all devices of its host, some, or only its own one
# What each backend serves; of those that serve a device, the first one is the default.
BACKENDS = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "xccl": ("xpu",), "ccl": ("xpu", "cpu")}


def choose_device(device: str, backend: str, local_rank: int, found: dict,
                  ranks: int = 2) -> tuple[torch.device, str, str]:
    """Choose device and backend. A pure function.

    Args:
        device: auto | cpu | cuda | xpu. backend: auto, or a name of BACKENDS.
        found: {'cuda' or 'xpu': how many are visible, 'backends': names that this torch has, in
            the order of BACKENDS}.
        ranks: how many there are; a single rank needs no backend, unless `backend` names one.
    Returns: (device, backend, reason).
    Raises: SetupError if what was asked for is not available; it says what is.
    """
    asked = f"--device {device}, --backend {backend}"
    kinds = [kind for kind in ("cuda", "xpu") if found.get(kind)]
    kind = device
    if device == "auto":
        kind = [*kinds, "cpu"][0]
    serving = [name for name in found["backends"] if kind in BACKENDS[name]]
    chosen = backend
    if backend == "auto":
        chosen = [*serving, "none"][0]
    problem = ""
    if kind not in [*kinds, "cpu"]:
        problem = f"no {kind} device is visible"
    elif chosen == "none" and ranks > 1:
        problem = f"no backend of this torch serves {kind}"
    elif chosen not in [*serving, "none"]:
        problem = f"backend {chosen} does not serve {kind} here"
    if problem:
        here = ", ".join(["cpu", *(f"{found[kind]} {kind}" for kind in kinds), *found["backends"]])
        raise SetupError(f"{asked}: {problem}. Available here: {here}. Choose --device auto and "
                         f"--backend auto, or among these.")
    if kind == "cpu":
        return torch.device("cpu"), chosen, f"device cpu; backend {chosen} ({asked})"
    index = local_rank % found[kind]
    return (torch.device(kind, index), chosen,
            f"device {kind}:{index} of {found[kind]}; backend {chosen} ({asked})")


def _found_devices(backend="auto", ipex="auto"):
    """What choose_device needs to know of this machine."""
    found = {"backends": []}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        found[accelerator.type] = torch.accelerator.device_count()
    if backend == "ccl" or (found.get("xpu") and not dist.is_backend_available("xccl")):
        _import_oneccl(ipex)
    found["backends"] = [name for name in BACKENDS if dist.is_backend_available(name)]
    return found


def _bind_device(ddp, device, backend):
    """A Ddp with its device and backend, as choose_device chooses them."""
    if backend == "xpu":   # as earlier scripts called the best one for an XPU
        device = "xpu"
        backend = "auto"
    found = _found_devices(backend, ddp.state.ipex)
    target, chosen, reason = choose_device(device, backend, ddp.local_rank, found, ddp.world_size)
    if target.type != "cpu":
        torch.accelerator.set_device_index(target.index)   # the group binds to the current device
    return replace(ddp, device=target, backend=chosen if ddp.world_size > 1 else "none",
                   notes=(*ddp.notes, reason))


def _device_id(device):
    """A name that identifies an accelerator within its host, despite masks; CPU: None."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    return f"{device} of ZE_AFFINITY_MASK={os.environ.get('ZE_AFFINITY_MASK', '')}"


def seed_for(*parts) -> int:
    """Integer in [0, 2**63) from plain values: equal parts give equal seeds, everywhere."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)   # on every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _options_for_torch(options, ddp):
    """Options of wrap_ddp -> options of DistributedDataParallel."""
    options = {"gradient_as_bucket_view": True, **options}
    known = inspect.signature(DistributedDataParallel).parameters
    if "broadcast_buffers" in options and "forward_sync_buffers" in known:
        # torch 2.13 renames the option, and warns of the old name
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    if ddp.device.type == "cuda":
        options["device_ids"] = [ddp.device.index]
    return options


# ---------------------------------------------------------------- set-up of one rank
#   environment --> detect_launcher --> rank, size      (_start_mpi: only where MPI must help)
#   devices     --> _bind_device    --> device, backend
#   other ranks --> _join           --> hosts, store, process group
def _set_up(device, backend, seed, ranks, timeout, init_timeout, ipex):  # noqa: PLR0913
    """The Ddp of setup_ddp, whose arguments these are."""
    env = dict(os.environ)
    _deadline(env)   # refuses a wrong DDP_DEADLINE before anything is started
    if ipex not in ("auto", "on", "off"):
        raise SetupError(f"ipex is {ipex!r}; expected auto, on or off")
    if not init_timeout > 0:
        raise SetupError(f"init_timeout is {init_timeout}; expected seconds, more than 0")
    mpi = _start_mpi(env, init_timeout)
    ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
    _refuse_other_size(ddp, "--ranks", ranks)
    _refuse_other_size(ddp, "DDP_WORLD_SIZE", _int(env, "DDP_WORLD_SIZE"))
    ddp = replace(ddp, seed=seed, host=socket.gethostname(), timeout=timeout,
                  state=State(mpi=mpi, ipex=ipex, guard=_pipe_to_guard()))
    _tell_guard(ddp, rank=ddp.rank, host=ddp.host, slurm_step=_step_to_cancel(ddp))
    _write_stacks_to(None, ddp)
    error = ""
    try:
        ddp = _bind_device(ddp, device, backend)
    except RuntimeError as e:
        if ddp.world_size == 1:
            raise
        error = str(e)   # perhaps of this rank alone: rank 0 prints it, see _judge
    if ddp.world_size > 1:
        ddp = _join(ddp, env, init_timeout, error)
    else:
        ddp = replace(ddp, hosts=(ddp.host,))
    _tell_guard(ddp, size=ddp.world_size)
    atexit.register(_at_exit, ddp)
    _set_exception_hook(ddp)
    _seed_all(seed)
    return ddp


def _refuse_other_size(ddp, name, wanted):
    if wanted is not None and wanted != ddp.world_size:
        raise SetupError(f"{name} asks for {wanted} rank(s), but {ddp.world_size} were "
                         f"started. {'; '.join(ddp.notes)}. Start {wanted} (mpirun -n, "
                         f"srun -n, torchrun --nproc_per_node) or change {name}.")


def _leave_unless_first_on_host(error):
    """Exit with an error's code on all ranks but the first of each host, which prints it."""
    env = dict(os.environ)
    with contextlib.suppress(SetupError):   # a variable is no number: each rank says so
        claim = _choose(_claims(env), env)
        if claim is not None and claim.local_rank:
            _leave_silently(error.code)


def _leave_silently(code):
    """Exit after the rank that prints the error: when that one exits, launchers end this one."""
    time.sleep(MARGIN)
    sys.stdout.flush()
    os._exit(code)


def _print_notes(ddp):
    hosts = len(set(ddp.hosts))
    print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on {hosts} host(s)", *ddp.notes,
           sep="\n  ")


def _start_mpi(env, limit):
    """COMM_WORLD of mpi4py; None where it is absent, unwanted or not needed. Importing it calls
    MPI_Init, which hangs or gives a wrong rank in a process that no MPI launcher started."""
    claim = _choose(_claims(env), env)
    if claim is None or not LAUNCHERS[claim.launcher].mpi or env.get("DDP_MPI4PY") == "0":
        return None
    if claim.size is not None and (env.get("MASTER_ADDR") or claim.slurm_step):   # finds rank 0
        return None
    try:
        from mpi4py import rc   # an ImportError too for the empty folder of a former install
        if "mpi4py.MPI" not in sys.modules:
            rc.finalize = False   # it would wait for all ranks at exit
        with _time_limit(limit):   # MPI_Init waits for all ranks, without a limit
            from mpi4py import MPI
    except (ImportError, RuntimeError):   # RuntimeError: mpi4py found no MPI library
        return None
    return None if MPI.Is_finalized() else MPI.COMM_WORLD


def _end_mpi(mpi):
    """MPI_Finalize, where _start_mpi has begun it."""
    if mpi is not None and sys.modules["mpi4py"].rc.finalize is False:
        from mpi4py import MPI
        if not MPI.Is_finalized():
            MPI.Finalize()


@contextlib.contextmanager
def _time_limit(seconds):
    """Print the stacks of all threads and end this process, if the block takes longer. The timer
    of faulthandler is in C, so it works even while a library call holds the GIL."""
    try:
        _set_timer(seconds, sys.__stderr__)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _set_timer(seconds, file):
    # No timer is set if `file` is no real file, or `seconds` is more than a timer can hold.
    with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError, OverflowError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)


# ---------------------------------------------------------------- where is rank 0?
#   all ranks compute the same address, or rank 0 tells it by MPI:
#
#   MASTER_ADDR is set            that host, MASTER_PORT or 29500
#   mpi4py works                  rank 0's own address (one host: the loopback) and MASTER_PORT, or
#                                 a port that the kernel chooses, by MPI broadcast
#   all ranks are on one host     the loopback   \  MASTER_PORT, or a port computed from what
#   Slurm                         its first host /  identifies this launch
class Address(NamedTuple):
    """Where rank 0's store is, or will be."""
    host: str
    port: int     # 0: rank 0 takes a free one
    source: str   # how it was found, for messages

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


LOOPBACK = "127.0.0.1"


def _place_of_rank_0(ddp, env):
    """The Address of rank 0's store, as far as this rank can tell alone."""
    port = _int(env, "MASTER_PORT") or 0
    if not 0 <= port < 1 << 16:   # 10000 + a job's number may be too large
        raise SetupError(f"MASTER_PORT={port} is no port; expected 1024 to 65535. Leave it unset "
                         f"to have one found.")
    if env.get("MASTER_ADDR"):
        host = _seen_from_outside(ddp, env["MASTER_ADDR"])
        return Address(host, port or 29500, "from MASTER_ADDR")
    if ddp.state.mpi is not None:
        host = LOOPBACK if ddp.on_one_host else _own_address()
        return Address(host, port, "by MPI broadcast")
    if ddp.on_one_host:
        host = LOOPBACK
    elif _nodes_of_step(ddp, env):
        host = _seen_from_outside(ddp, _first_host(_nodes_of_step(ddp, env)))
    else:
        raise SetupError(
            f"{ddp.launcher} started ranks that may be on several hosts, and nothing tells them "
            f"where rank 0 is: mpi4py is not usable and MASTER_ADDR is unset. Install mpi4py for "
            f"this MPI, or export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to "
            f"all ranks.")
    if port:
        return Address(host, port, "from MASTER_PORT")
    return Address(host, _computed_port(ddp, env), "by the launcher's id")


def _computed_port(ddp, env):
    """A port that all ranks of this launch compute alike, below the kernel's ephemeral ports."""
    jobs = [env[name] for name in JOBS.split() if env.get(name)]
    name = "-".join([*jobs, _launch_name(ddp, env)])
    if ddp.on_one_host and not LAUNCHERS[ddp.launcher].launch:
        name += f" {_launcher_process(ddp)}"
    return 10000 + seed_for(f"{ddp.launcher} {name} {ddp.world_size}") % 20000


def _launch_name(ddp, env):
    """What tells this launch from others: the identifiers that its launcher gives to all ranks.
    Hydra gives none, but passes its environment on, and so the job's id: two members of a job
    array, say. Other launchers may leave it unknown where ssh has started the ranks."""
    row = LAUNCHERS[ddp.launcher]
    names = f"{row.launch} TORCHELASTIC_RESTART_COUNT"
    if row.mpi and not row.launch:
        names += f" {JOBS}"
    if ddp.slurm_step:   # perhaps beside another row
        names += f" {LAUNCHERS['Slurm step'].launch}"
    return "-".join(env[name] for name in names.split() if env.get(name))


def _launcher_process(ddp):
    """Process id of this host's launcher: the first ancestor without the rank's variable, which a
    guard or a shell around a rank has."""
    pid = os.getppid()
    rank_variable = f"{LAUNCHERS[ddp.launcher].rank}=".encode()
    with contextlib.suppress(OSError):   # no /proc: the parent is the best guess
        while rank_variable in Path(f"/proc/{pid}/environ").read_bytes():
            status = Path(f"/proc/{pid}/stat").read_text()
            pid = int(status.rpartition(")")[2].split()[1])   # the name may hold blanks
    return str(pid)


def _nodes_of_step(ddp, env):
    """Slurm's list of the hosts of these ranks; "": there is none."""
    for claim in _claims(env):
        if (claim.launcher, claim.rank, claim.size) == ("Slurm step", ddp.rank, ddp.world_size):
            return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    return ""


def _first_host(nodelist):
    """First host of a Slurm node list: 'a[003-5,9]-ib,b3' -> 'a003-ib'. Slurm's scontrol would tell
    it, but containers often lack that."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)[0]   # up to a comma outside brackets
    return re.sub(r"\[([^\]]*)\]", lambda ranges: re.split("[-,]", ranges[1])[0], first)


def _seen_from_outside(ddp, host):
    """`host`, or this host's own address, if other hosts cannot use what the name means here."""
    if ddp.on_one_host or not _resolved(host).startswith("127."):
        return host
    return _own_address()   # Debian maps a host's own name to 127.0.1.1


def _own_address():
    """The address under which other hosts reach this one."""
    host = socket.gethostname()
    names = [host]
    if re.fullmatch(r"x\d+c\d+s\d+b\d+n\d+", host):   # HPE EX: its fabric
        names = [f"{host}.hsn.cm.aurora.alcf.anl.gov", f"{host}.hsn.cm.polaris.alcf.anl.gov", host]
    for name in names:
        address = _resolved(name)
        if address and not address.startswith("127."):
            return address
    return _route_to("192.0.2.1") or LOOPBACK   # any outside address: the default route


def _resolved(name):
    """The first IPv4 address that a name has here, or ""."""
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]
    return ""


def _route_to(host):
    """This host's address on the way to `host`, or "". Connecting a datagram socket sends
    nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))
        return s.getsockname()[0]
    return ""


def _interface_of(address):
    """Name of the network interface that has this address, or "" (always outside Linux)."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):   # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                packed = fcntl.ioctl(s.fileno(), 0x8915, request)   # SIOCGIFADDR
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return ""


# ---------------------------------------------------------------- the ranks meet
#   ranks 1, 2, ...                      rank 0's store                    rank 0
#                                        (torchrun: its agent's)
#   here/R: host, device, backend, --->  all here/R  ------------------->  who is missing? who
#           torch version, error                                           shares a device? ...
#                  <-------------------  verdict  <----------------------  hosts; or the problem
#   read/R, of a problem  ------------>  all read/R  ------------------->  prints it and ends
#
#   then each rank makes the process group
def _join(ddp, env, limit, error):
    """Meet all ranks in the store, check that they fit together, make the process group.

    limit: seconds. error: what this rank has to report instead of joining, or ""."""
    store, address = _open_store(ddp, env, limit)
    # torchrun's agent keeps its store over restarts; and two runs may be given one port
    store = dist.PrefixStore(f"ddp/{_launch_name(ddp, env)}", store)
    if store.add(f"started/{ddp.rank}", 1) > 1:   # joining would end the run that is there
        raise SetupError(f"another run has met at {address}, found {address.source}. Expected a "
                         f"port of its own for each run. Leave MASTER_ADDR and MASTER_PORT unset "
                         f"to have one found, or choose another port.")
    report = {"host": ddp.host, "backend": ddp.backend, "torch": torch.__version__,
              "error": error, "device": None if error else _device_id(ddp.device)}
    store.set(f"here/{ddp.rank}", json.dumps(report))
    if ddp.is_main:
        store.set("verdict", json.dumps(_judge(store, ddp.world_size, limit)))
    try:   # rank 0 gives up earlier and says why: this wait fails only if it is gone
        store.wait(["verdict"], timedelta(seconds=limit + MARGIN))
    except RuntimeError:
        raise SetupError("rank 0 ended while the ranks were meeting. Expected it to stay; look "
                         "for its own message.", code=1) from None
    verdict = json.loads(store.get("verdict"))
    if verdict["problem"]:
        _leave_with(verdict, store, ddp)
    hosts = verdict["hosts"]
    ddp = replace(ddp, store=store, hosts=tuple(hosts),
                  local_world_size=ddp.local_world_size or hosts.count(ddp.host),
                  node_rank=list(dict.fromkeys(hosts)).index(ddp.host),
                  notes=(*ddp.notes, f"rank 0 at {address}, found {address.source}"))
    _set_environment(ddp, address)
    _make_group(ddp, limit)
    return ddp


def _open_store(ddp, env, limit):
    """Connect to rank 0's TCPStore. Returns it, and its Address.

    Rank 0 opens its socket first. With mpi4py it then broadcasts the address, or its error."""
    address = _place_of_rank_0(ddp, env)
    by_agent = ddp.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None
    problem = ""
    if ddp.is_main and not by_agent:
        try:
            listener = _listen(address)
            address = address._replace(host=listener.getsockname()[0],
                                       port=listener.getsockname()[1])
        except OSError as e:
            problem = (f"rank 0 on {ddp.host} cannot listen on {address}: {e.strerror}. Expected "
                       f"an address of rank 0's host and a free port. Leave MASTER_ADDR and "
                       f"MASTER_PORT unset to have them found, or choose another port.")
    if ddp.state.mpi is not None:
        host, port, problem = ddp.state.mpi.bcast((address.host, address.port, problem), root=0)
        address = Address(host, port, address.source)
    if problem:
        raise SetupError(problem)
    seconds = timedelta(seconds=limit)
    if listener is not None:
        store = dist.TCPStore(address.host, address.port, None, True, seconds,
                              wait_for_workers=False, master_listen_fd=listener.detach())
        return store, address
    _await_listener(ddp, address, limit)
    with _time_limit(limit + MARGIN):   # it waits for a silent program without end
        store = dist.TCPStore(address.host, address.port, None, False, seconds,
                              wait_for_workers=False)
    return store, address


def _listen(address):
    """A socket that listens on this address only; for port 0 the kernel chooses a free port."""
    return socket.create_server((address.host, address.port), backlog=4096)


def _await_listener(ddp, address, limit):
    """Wait until rank 0 listens. TCPStore would fail with a long C++ stack trace instead."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with socket.create_connection((address.host, address.port), 5.0):
                return
        except OSError as e:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"rank 0 cannot be reached at {address} within {limit:.0f} s ({e}). Expected "
                    f"it to listen there. Did it start? Is MASTER_ADDR right? Try `ping "
                    f"{address.host}` from {ddp.host}.", code=1) from None
        time.sleep(0.05)


def _judge(store, size, limit):
    """On rank 0: wait for the reports of all ranks, and judge them. Returns {"problem", "code",
    "hosts"}; no problem: ""."""
    keys = [f"here/{rank}" for rank in range(size)]
    with contextlib.suppress(dist.DistStoreError):   # at the limit: _problem_of names the missing
        store.wait(keys, timedelta(seconds=limit))
    reports = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            reports[rank] = json.loads(store.get(key))
    problem, code = _problem_of(reports, size, limit)
    return {"problem": problem, "code": code,
            "hosts": [report["host"] for report in reports.values()]}


def _problem_of(reports, size, limit):
    """(why the ranks do not fit together, exit code), or ("", 0). reports: by rank."""
    errors = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if errors:
        first, text = min(errors.items())
        alike = [rank for rank in errors if errors[rank] == text]
        who = f"rank {_listed(alike)} on {reports[first]['host']}: "
        return text if len(alike) == size else who + text, BAD_INPUT
    missing = [rank for rank in range(size) if rank not in reports]
    if missing:
        hosts = sorted({report["host"] for report in reports.values()})
        return (f"{len(missing)} of {size} ranks did not appear within {limit:.0f} s: rank(s) "
                f"{_listed(missing)}. The others are on {_listed(hosts)}. Were all started? Is a "
                f"host down, or cannot it reach rank 0?"), 1
    users = {}   # {accelerator: the first rank that reported it}
    for rank, report in reports.items():
        first = users.setdefault((report["host"], report["device"]), rank)
        if report["device"] and rank != first:
            return (f"ranks {first}, {rank} on {report['host']} share one accelerator "
                    f"({report['device']}); expected one each. Start fewer ranks per host, unset "
                    f"the mask (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK), or give --device "
                    f"cpu."), BAD_INPUT
    for what in ("backend", "torch"):
        values = sorted({report[what] for report in reports.values()})
        if len(values) > 1:
            return (f"the ranks differ in {what}: {', '.join(values)}; expected the same on all. "
                    f"Give --device and --backend, and one environment for all hosts."), BAD_INPUT
    return "", 0


def _leave_with(verdict, store, ddp):
    """End because of rank 0's verdict, which rank 0 alone prints."""
    if not ddp.is_main:
        store.set(f"read/{ddp.rank}", "")
        _leave_silently(verdict["code"])
    others = [f"read/{rank}" for rank in range(1, ddp.world_size)
              if store.check([f"here/{rank}"])]
    with contextlib.suppress(RuntimeError):   # the store ends with rank 0: they must read it first
        store.wait(others, timedelta(seconds=MARGIN))
    raise SetupError(verdict["problem"], verdict["code"])


def _set_environment(ddp, address):
    """Set the variables that torch and other libraries read."""
    os.environ.update(MASTER_ADDR=address.host, MASTER_PORT=str(address.port),
                      RANK=str(ddp.rank), WORLD_SIZE=str(ddp.world_size),
                      LOCAL_RANK=str(ddp.local_rank), LOCAL_WORLD_SIZE=str(ddp.local_world_size))
    if ddp.backend == "gloo":   # its own choice may be an interface that other hosts cannot reach
        here = LOOPBACK if ddp.on_one_host else _route_to(address.host)
        interface = _interface_of(here)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ddp.backend == "nccl":   # torch's flight recorder: what each rank was doing, at a timeout
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _make_group(ddp, limit):
    """Make torch's process group. limit: seconds, as some backends wait without one.

    device_id is for NCCL alone: with xccl, groups could not be made or split then (pytorch issues
    162237 and 186548)."""
    timeout = None if ddp.timeout is None else timedelta(seconds=ddp.timeout)
    bind = {"device_id": ddp.device} if ddp.backend == "nccl" else {}
    with _time_limit(limit):
        dist.init_process_group(ddp.backend, store=ddp.store, rank=ddp.rank, timeout=timeout,
                                world_size=ddp.world_size, **bind)


def _listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


# ---------------------------------------------------------------- one fails, all end
#   a rank fails, in any of these ways          it waits its turn (see _end_all), prints its text
#     an exception leaves `with ddp`      \     and `FAILED: rank R of N on HOST: cause`, notes that
#     Python ends without cleanup_ddp      >    in status.json, and exits. The launcher ends the
#     the script calls abort              /     others: by exit code, MPI_Abort, scancel
#   a rank is killed, or hangs                  its guard does the same (ddp_guard.py)
def _pipe_to_guard():
    """File descriptor of the pipe to ddp_guard.py, if that is this process' parent, else None."""
    descriptor, _, guard = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if guard != str(os.getppid()):
        return None
    os.set_blocking(int(descriptor), False)   # a guard that does not read must not stop the rank
    return int(descriptor)


def _tell_guard(ddp, **message):
    """Send a line to the guard, if there is one. message: see the docstring of ddp_guard.py."""
    if ddp.state.guard is not None:
        with contextlib.suppress(OSError):   # it is gone, or does not read
            os.write(ddp.state.guard, json.dumps(message).encode() + b"\n")


def _alone_in_a_notebook(ddp):
    """A single interactive process: neither an exception nor a long pause may end it."""
    return ddp.world_size == 1 and (hasattr(sys, "ps1") or bool(sys.flags.interactive))


def _set_exception_hook(ddp):
    """Have an exception that nobody catches end all ranks. Python would print it on each rank, also
    where it is only the consequence of another one's, and then end this rank alone."""
    before = sys.excepthook

    def end_all(kind, error, tb):
        is_rank = os.getpid() == ddp.state.pid
        if is_rank and not ddp.state.clean and not _alone_in_a_notebook(ddp):
            _end_all(ddp, _end_by(error))
        before(kind, error, tb)

    sys.excepthook = end_all


def _leave_context(ddp, error):
    """The end of `with ddp`. error: the exception that leaves it, or None."""
    left_by_exit = isinstance(error, SystemExit) and error.code in (None, 0, AGAIN)
    if error is None or left_by_exit:
        cleanup_ddp(ddp)
    elif _alone_in_a_notebook(ddp):   # there is no other rank to end, and the kernel goes on
        end_watch(ddp, 1, f"{type(error).__name__}: {error}")
    else:
        _end_all(ddp, _end_by(error))


def _at_exit(ddp):
    """Python ends without cleanup_ddp. It closes connections a second before its process is gone:
    too early for a guard to be the first who says so."""
    is_rank = os.getpid() == ddp.state.pid
    if is_rank and ddp.world_size > 1:
        abort(ddp, "ended without cleanup_ddp. Call it at the end, or use `with setup_ddp()`.")


class End(NamedTuple):
    """Why a rank ends."""
    text: str                    # to print; "": nothing
    code: int = 1
    cause: str = ""              # for the last line and status.json; "": the first line of the text
    advise: bool = True          # can the same command go on from the last checkpoint?
    perhaps_lost: bool = False   # this may be the consequence of another rank's end


def _end_by(error):
    """The End by an exception."""
    if isinstance(error, KeyboardInterrupt):
        return End("interrupted (Ctrl-C)", INTERRUPTED)
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        return End(error.code)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return End(f"left with exit code {error.code}", code)
    if getattr(error, "expected", False):   # an attribute of exceptions that are no bugs
        return End(str(error), advise=False)
    text = "".join(traceback.format_exception(error)).rstrip()
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    # Errors of torch's backends are RuntimeErrors: perhaps of a connection that another rank lost.
    perhaps_lost = isinstance(error, RuntimeError) and not out_of_memory
    return End(text, 1, _in_one_line(error), not out_of_memory, perhaps_lost)


def _end_all(ddp, end):
    """End all ranks.

    Who speaks? All ranks but rank 0, and a rank that perhaps has lost another, first wait for the
    rank at fault, or its guard: launchers end all when that one has exited. Then the first to say
    so in the store, unless status.json tells that a guard has spoken."""
    code = end.code % 256 or 1
    cause = end.cause or end.text.partition("\n")[0]
    if _alone_in_a_notebook(ddp):
        print(end.text, file=sys.stderr)
        end_watch(ddp, code, cause)
        raise SystemExit(code)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _tell_guard(ddp, spoken=True, limit=CLOSING)
    watch = ddp.state.watch
    if watch is not None:
        with contextlib.suppress(ValueError):   # not the main thread
            for number in watch.handlers:
                signal.signal(number, signal.SIG_DFL)   # the launcher's SIGTERM must end this rank
    status_tells = watch is not None and watch.run_dir is not None   # whether another has spoken
    if end.perhaps_lost and ddp.state.terminated and not status_tells:
        os._exit(code)   # the launcher ends all because of another rank, or is gone itself
    if ddp.world_size > 1 and (end.perhaps_lost or not ddp.is_main):
        time.sleep(CULPRIT_FIRST)
    if _is_first_to_speak(ddp):
        place = f"rank {ddp.rank} of {ddp.world_size} on {ddp.host}"
        reason = cause if ddp.world_size == 1 else f"{place}: {cause}"
        _write_status(ddp, code, reason)
        with contextlib.suppress(OSError, ValueError):
            if end.text:
                print(_last_words(ddp, place, end, code, cause), file=sys.stderr, flush=True)
        if ddp.is_main and ddp.world_size > 1:   # those that fail too learn that from its store
            time.sleep(CULPRIT_FIRST + 0.5)
        _end_others(ddp, code)
    else:
        time.sleep(MARGIN)   # the launcher ends this rank
    os._exit(code)


def _is_first_to_speak(ddp):
    """Whether no other rank or guard has said why the run ends; True where the store does not
    answer."""
    if ddp.world_size == 1:
        return True
    if _status_code(ddp) not in (None, 0, AGAIN):
        return False
    with contextlib.suppress(RuntimeError), _time_limit(MARGIN):
        return ddp.store.add("spoken", 1) == 1
    return True


def _last_words(ddp, place, end, code, cause):
    """What a rank prints at its end: the text, then one line with rank and cause."""
    if code == BAD_INPUT:   # nothing has run yet
        return f"\n[{place}] {end.text}"
    stop = "" if cause[-1:] in ".?" else "."
    line = f"FAILED: {place}: {cause}{stop} {_last_checkpoint(ddp, end.advise)}".rstrip()
    if end.text.strip() == cause:   # the text has nothing to add
        return f"\n{line}"
    return f"\n[{place}] {end.text}\n{line}"


def _last_checkpoint(ddp, advise=True):
    """What a next start continues from, for the last line; "" if nothing is known of it."""
    state = ddp.state
    if not state.checkpoint:
        return "No checkpoint yet." if state.watch and state.watch.run_dir else ""
    step = "" if state.step is None else f" (step {state.step})"
    advice = f" {state.advice}" if advise else ""
    return f"Last checkpoint: {state.checkpoint}{step}.{advice}"


def _end_others(ddp, code):
    """Have the launcher end all ranks, as far as it can. With a guard, that one does more."""
    if ddp.world_size == 1 or ddp.state.guard is not None:
        return
    time.sleep(0.5)   # for MPICH to forward what was printed: MPI_Abort drops the rest
    if ddp.state.mpi is not None:
        ddp.state.mpi.Abort(code)
    step = _step_to_cancel(ddp)
    if step:
        with contextlib.suppress(OSError, subprocess.SubprocessError):   # it is missing, or hangs
            subprocess.run(["scancel", step], timeout=30, stderr=subprocess.DEVNULL)
    if LAUNCHERS[ddp.launcher].mpi:
        os.abort()   # MPICH ends all ranks when one dies of a signal, not for an exit code


def _step_to_cancel(ddp):
    """Slurm's step, if this rank fails; "" at a terminal, where its first task may be a person's
    shell (srun --pty)."""
    return "" if os.isatty(0) else ddp.slurm_step


def _in_one_line(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# ---------------------------------------------------------------- the end in good order
def _await_others_at_the_end(ddp):
    """Wait for all ranks; end them if some do not come. Then nothing can fail any more: note the
    end of the run."""
    watch = ddp.state.watch
    limit = ddp.state.patience
    _tell_guard(ddp, limit=limit + MARGIN)
    with _time_limit(limit + 2 * MARGIN):
        missing = missing_ranks(ddp, "cleanup", limit)
    if missing:
        abort(ddp, f"rank(s) {_listed(missing)} did not come to cleanup_ddp within {limit:.0f} s",
              HANG)
    if watch is not None and watch.requested:
        end_watch(ddp, AGAIN, watch.requested)
    else:
        end_watch(ddp, 0, "left in good order")


def _close_connections(ddp):
    _tell_guard(ddp, limit=CLOSING + MARGIN)
    with _time_limit(CLOSING):
        if ddp.world_size > 1:
            _await_gloo_threads()
            dist.destroy_process_group()
            _close_store(ddp)
        _end_mpi(ddp.state.mpi)


def _close_store(ddp):
    """Have rank 0, which serves the store, stay until nobody needs it any more."""
    with contextlib.suppress(RuntimeError):   # a rank that is gone needs it no more
        if ddp.is_main:
            others = [f"gone/{rank}" for rank in range(1, ddp.world_size)]
            ddp.store.wait(others, timedelta(seconds=MARGIN))
        else:
            ddp.store.set(f"gone/{ddp.rank}", "")


def _await_gloo_threads():
    """Wait until gloo's threads are idle. They free a collective's tensors after it has returned
    and need the GIL for it: if Python shuts down meanwhile, they abort the process."""
    for _ in range(1000):
        time.sleep(0.01)   # this releases the GIL
        with contextlib.suppress(OSError):   # a thread that has ended
            if not any(b" (pt_gloo_runloop) R " in file.read_bytes()
                       for file in Path("/proc/self/task").glob("*/stat")):
                return


# ---------------------------------------------------------------- stop requests, progress, status
#   signal to any rank           \                                summed over ranks
#   DDP_DEADLINE (rank 0 looks)   watch.requested --> stop_wanted ------------------> stop_reason:
#   RUN_DIR/STOP (rank 0 looks)  /                    1.0 or 0.0                      all stop
#
#   stop_reason, save --> note_progress --> the guard, or a timer in each rank
@dataclass
class Watch:
    """See start_watch."""
    limit: float = 0.0         # seconds without progress; 0: no limit
    run_dir: str | None = None
    lock: IO | None = None     # on rank 0: the open file that holds the lock of run_dir
    stacks: IO | None = None   # file for stack traces of this rank; None: stderr
    step: int | None = None    # number of steps done
    requested: str = ""        # why this rank was asked to stop
    interrupted: float = 0.0   # time of the first Ctrl-C
    handlers: dict = field(default_factory=dict)   # {signal: its handler before}


def lock_folder(folder: str | os.PathLike) -> IO:
    """Take the lock of a folder: FOLDER/lock, which the kernel gives back when this process ends or
    closes the file. It may hold who that is, in words, see start_watch.

    A lock of POSIX: unlike flock's it is not kept by forked workers that outlive this process. It
    holds across hosts where the file system has such locks; where it has none, a line says so.

    Returns: the open file. Raises: ValueError if another process holds the lock; OSError."""
    import fcntl
    os.makedirs(os.path.realpath(folder), exist_ok=True)   # perhaps a link that leads nowhere yet
    file = open(os.path.join(folder, "lock"), "a+", encoding="utf-8")
    file.seek(0)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(f"{folder} is in use by {holder}. Expected one run per folder. Wait for "
                         f"it, stop it, or give another folder.") from None
    except OSError as error:
        print(f"ATTENTION: {folder} is on a file system without locks ({error.strerror}): nothing "
              f"keeps a second run out", flush=True)
    return file


def _take_folder(ddp, watch, run_dir):
    """Take the lock of the run folder on rank 0. Raises: ValueError on all ranks."""
    problem = ""
    if ddp.is_main:
        if watch.lock is not None:   # of an earlier watch
            watch.lock.close()
        jobs = [f", job {os.environ[name]}" for name in JOBS.split() if name in os.environ]
        try:
            lock = lock_folder(run_dir)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {ddp.host}{''.join(jobs)}\n")
            lock.flush()
            watch.lock = lock
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write into {run_dir}: {error.strerror}"
    problem = broadcast(problem, ddp)
    if problem:
        raise ValueError(problem)
    watch.run_dir = run_dir


def _write_status(ddp, code, reason):
    """Write status.json: at the start and at a good end on rank 0, at a failure on the rank that
    speaks. A failure that stands there, perhaps a guard's, is the first one, and stays."""
    watch = ddp.state.watch
    if watch is None or watch.run_dir is None:
        return
    if code in (None, 0, AGAIN) and not ddp.is_main:
        return
    if code is not None and _status_code(ddp) is not None:
        return
    path = os.path.join(watch.run_dir, "status.json")
    text = json.dumps({"code": code, "reason": reason, "step": watch.step}) + "\n"
    with contextlib.suppress(OSError):
        try:
            _write_whole(path, lambda file: file.write(text.encode()))
        except OSError:   # on a full disk there is room in the old file
            with open(path, "r+b") as file:
                file.write(text.encode())
                file.truncate()


def _status_code(ddp):
    """The code in status.json: None while the run is on, and where there is none."""
    watch = ddp.state.watch
    if watch is not None and watch.run_dir is not None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(watch.run_dir, "status.json").read_text())["code"]
    return None


def _set_handlers(ddp, watch, signals):
    """Have these signals ask for a stop. A second Ctrl-C raises KeyboardInterrupt."""
    def handle(number, _):
        _request_stop(ddp, number)

    with contextlib.suppress(ValueError):   # only the main thread may set handlers
        for name in signals:
            number = getattr(signal, name, None)   # None: not on this system
            if number is not None:
                before = signal.signal(number, handle)
                watch.handlers.setdefault(number, before)


def _request_stop(ddp, number):
    """Handler of the stop signals."""
    if os.getpid() != ddp.state.pid:   # a forked child: do what the signal does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    watch = ddp.state.watch
    name = signal.Signals(number).name
    if number == signal.SIGTERM:
        ddp.state.terminated = True
    if number == signal.SIGINT:
        same_ctrl_c = 0.2   # seconds between two signals of one, from terminal and launcher
        if watch.interrupted and time.monotonic() - watch.interrupted > same_ctrl_c:
            raise KeyboardInterrupt
        watch.interrupted = watch.interrupted or time.monotonic()
    if watch.requested:
        return
    watch.requested = f"{name} on rank {ddp.rank} ({ddp.host})"
    when = "before its first step" if watch.step is None else "after this step and saves"
    again = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
    if ddp.is_main:   # by os.write: the signal may have interrupted a print
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: the run stops {when}{again}\n".encode())


def _open_stacks(ddp, watch):
    """Open the file for the stack traces that the guard asks for."""
    if watch.run_dir is not None and ddp.state.guard is not None:
        folder = os.path.join(watch.run_dir, "stacks")
        with contextlib.suppress(OSError):   # without a file the stacks go to stderr
            os.makedirs(folder, exist_ok=True)
            watch.stacks = open(os.path.join(folder, f"rank_{ddp.rank}.txt"), "w")
            watch.stacks.write(f"{ddp.host}\n")   # for a guard, if this host does not answer
            watch.stacks.flush()
        if ddp.backend == "nccl":
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, "nccl_rank_"))
    _write_stacks_to(watch.stacks, ddp)


def _write_stacks_to(file, ddp):
    """Have faulthandler write the stacks there if the guard asks by SIGQUIT: it answers even while
    a library call holds the GIL. file: None means stderr."""
    if ddp.state.guard is not None:
        with contextlib.suppress(ValueError, AttributeError, OSError):   # stderr is no real file
            faulthandler.register(signal.SIGQUIT, file or sys.__stderr__)


def _close_stacks(ddp, watch):
    """Close the file of the stacks; one that holds none is removed."""
    if watch.limit and ddp.state.guard is None:
        faulthandler.cancel_dump_traceback_later()
    _write_stacks_to(None, ddp)
    if watch.stacks is None:
        return
    watch.stacks.close()
    with contextlib.suppress(OSError):
        if Path(watch.stacks.name).read_text() == f"{ddp.host}\n":
            os.unlink(watch.stacks.name)
            os.rmdir(os.path.dirname(watch.stacks.name))
    watch.stacks = None


def _deadline(env):
    """DDP_DEADLINE in epoch seconds, or infinity."""
    text = env.get("DDP_DEADLINE", "").strip()
    with contextlib.suppress(ValueError):
        deadline = float(text or "inf")
        if deadline > 1e9:   # 1e9 is in 2001; false for nan
            return deadline
    raise SetupError(f"DDP_DEADLINE={text!r} is not a time in epoch seconds. Expected for example "
                     f"$(( $(date +%s) + 3000 )).")


# ---------------------------------------------------------------- checkpoint files
#   save:  state --> .last.pt.tmp, fsync --> rotate: last.pt -> last-1.pt --> rename to last.pt
#   load:  rank 0 reads last.pt; damaged: last-1.pt, ... --> its content to all ranks
class CannotSave(RuntimeError):
    """A checkpoint cannot be written, for a reason that a person must mend."""
    expected = True   # no bug: the message says it all


def _kept(path, k):
    """Name of the k-th former checkpoint: last.pt -> last-1.pt."""
    base, end = os.path.splitext(path)
    return f"{base}-{k}{end}" if k else path


def _rotate(path, keep_last):
    """Rename former checkpoints, last.pt to last-1.pt and so on, to make room for a new last.pt.

    keep_last: how many there shall be, the new one included. Each file is whole under some name at
    any moment: a kill between two renames leaves a gap, which the next call fills."""
    # There is room at the first name that no file has. What is older than a gap stays.
    oldest = 0
    while oldest < keep_last - 1 and os.path.exists(_kept(path, oldest)):
        oldest += 1
    # All names are taken: the oldest file is replaced. keep_last 1: nothing is renamed, as the new
    # file replaces last.pt itself.
    for k in range(oldest, 0, -1):
        os.replace(_kept(path, k - 1), _kept(path, k))


def _try_to_write(path, keep_last, state):
    """Write a checkpoint on rank 0; once more after some seconds if the disk is full, as that may
    pass. Returns what is wrong, or ""."""
    for is_last_try in (False, True):
        try:
            _write_checkpoint(path, keep_last, state)
            return ""
        except Exception as e:   # perhaps what torch.save cannot write, or torch.load would refuse
            error = _of_the_system(e)
            is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if is_last_try or not is_full:
                return f"cannot write {path}: {_in_one_line(error)}"
        time.sleep(DISK_FULL)


def _write_checkpoint(path, keep_last, state):
    def check_and_make_room(temporary):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
        if unsafe:
            raise TypeError(f"it holds {', '.join(unsafe)}; expected tensors and plain types "
                            f"(float(x), x.tolist()), which torch.load(weights_only=True) reads")
        _rotate(path, keep_last)

    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    _write_whole(path, lambda file: torch.save(state, file), check_and_make_room)


def _write_whole(path, write, before_rename=None):
    """Call write(binary file) so that a kill at any moment leaves the old file or the new one:
    temporary name, fsync, rename.

    before_rename: function of the temporary path, perhaps."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.tmp")   # a killed save may have left it
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        handle = os.open(folder or ".", os.O_RDONLY)
        os.fsync(handle)   # the rename itself must survive a power cut
        os.close(handle)


def _of_the_system(error):
    """The system's error behind torch's, which on a full disk says "unexpected pos"."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _read_checkpoint(path):
    """What save_checkpoint was given. Raises: ValueError."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()   # torch.load checks no checksums
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
        reason = f"it is damaged, the checksum of its record {damaged} is wrong"
    except MemoryError:   # the file may be good: an older one must not take its place
        raise
    except Exception as e:   # of many types; drop torch's advice to unset weights_only
        reason = _in_one_line(e).partition(". ")[0]
    raise ValueError(f"cannot read the checkpoint {path}: {reason}. Expected a file written by "
                     f"save_checkpoint. Use another one, or start afresh.")


def _read_newest(path):
    """(path of the newest checkpoint that can be read, what it holds, texts on newer ones that
    cannot); the first two are None if none can."""
    file = path
    troubles = []
    while file == path or os.path.lexists(file):
        try:
            return file, _read_checkpoint(file), troubles
        except ValueError as e:
            troubles.append(str(e))
        file = _kept(path, len(troubles))
    return None, None, troubles


def _note_checkpoint(ddp, path, state):
    """Remember the checkpoint: the last line of a failure names it."""
    ddp.state.checkpoint = path
    ddp.state.step = state.get("step")
    _tell_guard(ddp, saved=_last_checkpoint(ddp))


# ---------------------------------------------------------------- python ddp_setup.py --doctor
ENVIRONMENT = """\
Environment that is read: the variables by which launchers tell a process its place, such as
  {launchers}
MASTER_ADDR, MASTER_PORT   where rank 0 listens; MASTER_ADDR alone means port 29500
DDP_WORLD_SIZE             the expected number of ranks (Aurora's launcher sets no size)
DDP_RANK, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE
                           with DDP_WORLD_SIZE, override every launcher
DDP_MPI4PY=0               never import mpi4py
DDP_LOG_ALL=1              print0 prints on every rank, with its number
DDP_DEADLINE               epoch seconds at which stop_reason says stop
DDP_GUARD_FD               set by ddp_guard.py, for its own child (DDP_GUARD=0: no guard)

Environment that is set, if there are several ranks: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, for other libraries; with gloo GLOO_SOCKET_IFNAME,
with NCCL TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_FR_DUMP_TEMP_FILE, if unset."""


def doctor(env: dict) -> int:
    """Print what this file finds here and would choose. Returns 1 if there is a PROBLEM, else 0."""
    found = _found_devices()
    mpi = None
    rows = []
    try:
        mpi = _start_mpi(env, CLOSING)
        ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
        if ddp.rank:
            return 0
        agrees = ", mpi4py agrees" if mpi else ""
        reason = choose_device("auto", "auto", ddp.local_rank, found, ddp.world_size)[2]
        rows += [*ddp.notes, f"rank 0 of {ddp.world_size}{agrees}", reason]
    except SetupError as e:
        rows.append(f"PROBLEM: {e}")
    finally:
        _end_mpi(mpi)
    master = env.get("MASTER_ADDR")
    if master and not _resolved(master):
        rows.append(f"PROBLEM: MASTER_ADDR={master} cannot be resolved here. Expected a host name "
                    f"or address.")
    own = _own_address()
    print(f"versions: {', '.join(_versions())}")
    print("found: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    print("\n".join(rows))
    print(f"this host: {socket.gethostname()}, {own} on interface {_interface_of(own)}")
    print(_seen(env))
    for name in sorted(env):
        if name.startswith("DDP_"):
            print(f"{name}={env[name]}")
    return int(any(row.startswith("PROBLEM") for row in rows))


def _versions():
    versions = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in ("numpy", "mpi4py", "intel-extension-for-pytorch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


def _main(arguments):
    if arguments == ["--doctor", "--help"]:
        variables = " ".join(row.rank for row in LAUNCHERS.values())
        print(ENVIRONMENT.format(launchers=variables))
        return 0
    if arguments == ["--doctor"]:
        return doctor(dict(os.environ))
    return f"usage: python {sys.argv[0]} --doctor [--help]"


# ---------------------------------------------------------------- Intel's extension, and oneCCL
#   XPU, torch from 2.8 on, with xccl   nothing of Intel's is imported
#   XPU, a torch without xccl           IPEX, then oneCCL's bindings, which register backend ccl
#   ipex="on", any device               IPEX optimizes the model; if not on every rank, on none
def optimize_with_ipex(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                       ddp: Ddp) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """(model, optimizer) as ipex.optimize returns them, or as given if IPEX is not wanted or does
    not work. Call it on all ranks, after making the optimizer and before wrap_ddp.

    What IPEX returns are copies: do not use the old ones. The `ipex` of setup_ddp decides: "on",
    "off", or "auto", which means on for an XPU whose torch has no xccl. If it fails on any rank,
    all go on without it, and rank 0 prints why. The weights keep names, shapes and float32.
    """
    mode = ddp.state.ipex
    if mode == "auto":
        mode = "on" if ddp.device.type == "xpu" and ddp.backend == "ccl" else "off"
    if mode == "off":
        return model, optimizer
    problem = ""
    try:   # no fused step: it ignores found_inf, by which our optimizers skip bad steps
        ipex = _import_ipex()
        result = ipex.optimize(model, optimizer=optimizer, fuse_update_step=False)
    except (Exception, SystemExit) as e:   # a library that is missing, a CPU that is too old, ...
        problem = _in_one_line(e)
    problem = next(filter(None, gather(problem, ddp)), "")
    if problem:
        print0(ddp, f"IPEX not used: {problem}")
        return model, optimizer
    print0(ddp, f"IPEX {ipex.__version__} optimized the model")
    return result


def _import_ipex():
    """Import intel_extension_for_pytorch. Raises: whatever the import raises, even SystemExit."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("intel-extension-for-pytorch")
        if version.split(".")[:2] != torch.__version__.split(".")[:2]:
            # Its import would print on every rank and try to exit.
            raise ImportError(f"intel_extension_for_pytorch {version} does not fit torch "
                              f"{torch.__version__}")
    import intel_extension_for_pytorch
    return intel_extension_for_pytorch


def _import_oneccl(ipex):
    """Import oneCCL's bindings, which register the backend ccl; what fails is printed."""
    try:
        if ipex != "off" and torch.xpu.is_available():
            _import_ipex()   # first: the XPU part of oneCCL needs it
        import oneccl_bindings_for_pytorch  # noqa: F401  (it registers the backend)
    except (Exception, SystemExit) as e:   # not installed, or made for another torch
        print(f"backend ccl is not usable: {_in_one_line(e)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
