"""Distributed data parallel in one file: launcher -> ranks -> device -> process group.

Copy this file next to your script; it needs torch and the standard library. The same script then
runs unchanged under `python`, `mpirun`, `mpiexec`, `srun`, `torchrun`, `jsrun` and `flux run`, on
CPU, CUDA and Intel XPU:

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

What a script calls comes first, in the order in which it calls it. How that works follows:
launchers, devices, rendezvous, one fails - all end, stop requests, checkpoint files, the doctor,
odd machines.
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
import io
import ipaddress
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

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
    seed: int = 0
    host: str = ""
    notes: tuple[str, ...] = ()         # what was found and chosen, with reasons
    control: Any = field(default=None, repr=False, compare=False)   # gloo group, see _route
    timeout: float | None = None        # of a collective, in seconds; None: torch's own
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
        _leave_context(self, error)


def setup_ddp(device: str = "auto", backend: str = "auto", seed: int = 0,    # noqa: PLR0913
              ranks: int | None = None, timeout: float | None = None,    # (a script's options)
              init_timeout: float = 300.0, quiet: bool = False, ipex: str = "auto") -> Ddp:
    """Find this process' rank and device, join the other ranks, and return a Ddp. If called again
    in the same process, return the same Ddp.

    Args:
        device: auto, cpu, cuda or xpu. backend: auto, nccl, gloo, xccl, ccl or xpu.
        seed: gives all ranks equal initial weights; wrap_ddp then seeds each rank differently.
        ranks: refuse any other number of ranks.
        timeout: seconds a collective may take; None: torch's own limit.
        init_timeout: seconds to wait for all ranks to appear.
        quiet: do not print what was found. ipex: auto, on or off, see optimize_with_ipex.
    Raises: SetupError (a RuntimeError) with what was found and what to do, naming missing ranks.
        An error of all ranks is raised on one, or one per host; others exit with its `code`."""
    if setup_ddp.current is None:
        setup_ddp.current = _set_up(device, backend, seed, ranks, timeout, init_timeout, ipex)
        if not quiet:
            _print_notes(setup_ddp.current)
    return setup_ddp.current


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
    So all micro-steps of the first step average gradients, which does not change the result."""
    if not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    if model.static_graph and not getattr(model, "static_graph_recorded", False):
        model.static_graph_recorded = last
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def print0(ddp: Ddp, *values, **options) -> None:
    """print on rank 0; on every rank, with its number, where DDP_LOG_ALL=1."""
    options = {"flush": True, **options}
    with printing():
        if os.environ.get("DDP_LOG_ALL") == "1" and ddp.world_size > 1:
            print(f"[rank {ddp.rank}]", *values, **options)
        elif ddp.is_main:
            print(*values, **options)


def barrier(ddp: Ddp, timeout: float | None = None) -> None:
    """Wait for all ranks.

    timeout: seconds; default: that of setup_ddp, or half an hour.
    Raises: RuntimeError with the ranks that did not come (above GLOO_MAX_RANKS: without names)."""
    limit = timedelta(seconds=timeout or ddp.timeout or PATIENCE)
    if ddp.world_size > 1 and ddp.control is not None:
        dist.monitored_barrier(ddp.control, limit, wait_all_ranks=True)
    elif ddp.world_size > 1:
        dist.barrier(async_op=True).wait(limit)


def broadcast(value: Any, ddp: Ddp, src: int = 0) -> Any:
    """`value` of rank `src`, on every rank.

    value: a tensor (same shape and dtype everywhere) is filled in place and returned; anything else
        must be plain (None, bool, number, text, lists and dicts with text keys) and travels as
        JSON, so a tuple comes back as a list."""
    if not isinstance(value, torch.Tensor):
        return _broadcast_json(value, ddp, src)
    if ddp.world_size > 1:
        group, device = _route(ddp, value.device)
        moved = value.to(device)
        dist.broadcast(moved, src, group=group)
        value.detach().copy_(moved)   # it may be a parameter
    return value


def all_sum(value: Any, ddp: Ddp) -> Any:
    """Sum over ranks: of a tensor (into a new one), or of a number or list of numbers (float64)."""
    if not isinstance(value, torch.Tensor):
        return all_sum(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    if ddp.world_size == 1:
        return value.clone()
    group, device = _route(ddp, value.device)
    total = value.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(value.device)


def all_mean(value: Any, ddp: Ddp) -> Any:
    """Mean over ranks, like all_sum. Correct only if every rank has the same share of the data."""
    if not isinstance(value, torch.Tensor):
        return all_mean(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    return all_sum(value, ddp) / ddp.world_size


def autocast(dtype: torch.dtype, ddp: Ddp) -> contextlib.AbstractContextManager:
    """torch.autocast for ddp.device; float32 (and float64) mean none. See choose_dtype."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(ddp.device.type, dtype=dtype)


def grad_scaler(dtype: torch.dtype, ddp: Ddp) -> torch.amp.GradScaler:
    """A GradScaler that scales for float16 and passes everything through otherwise."""
    return torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)


def stop_reason(ddp: Ddp, step: int, wanted: float | None = None, stop_file: str = "") -> str:
    """Why all ranks shall now save and leave, the same on each, or "" to go on.

    To be called at each step boundary, on all ranks: it is a sign of progress too. A run is asked
    to stop by SIGTERM, SIGUSR1 or Ctrl-C to any rank, at the time DDP_DEADLINE, or by a file. The
    first call begins to watch for these, and for 20 minutes without progress: see start_watch.

    Args:
        wanted: the sum of stop_wanted over ranks, where the caller has it from an all-reduce of
            its own (perhaps of the step before); None: summed here, by a small one per call.
        stop_file: for the first call: path, such as out/STOP. If it exists, the run stops."""
    if ddp.state.watch is None:
        start_watch(ddp, stop_file)
    note_progress(ddp, step)
    if wanted is None:
        wanted = all_sum(stop_wanted(ddp), ddp)
    if not wanted:
        return ""
    ddp.state.watch.requested = first_problem(ddp.state.watch.requested, ddp)
    return ddp.state.watch.requested


def save_checkpoint(path: str | os.PathLike, ddp: Ddp, keep_last: int = 1, resumes: bool = True,
                    **state) -> None:
    """Write `state` to `path`, from rank 0: temporary name, fsync, rename. A collective.

    Args:
        state: tensors and plain types, nested. `world_size` and `versions` are added.
        keep_last: how many to keep, this one included; the former ones as path-1, path-2, ...
        resumes: the next start continues from this file, so error messages shall name it.
    Raises: RuntimeError, on all ranks, for a value that is not of a plain type, or if the file
        cannot be written (CannotSave: no room, no permission); the former file is then untouched.
    """
    path = os.fspath(path)
    note_progress(ddp)
    problem = None
    if ddp.is_main:
        problem = _try_to_write_checkpoint(path, ddp, keep_last, state)
    problem = broadcast(problem, ddp)
    note_progress(ddp)
    if problem is not None:
        raise CannotSave(problem["text"]) if problem["of_disk"] else RuntimeError(problem["text"])
    if resumes:
        _note_checkpoint(ddp, path, state)


def load_checkpoint(path: str | os.PathLike, ddp: Ddp | None = None) -> Any:
    """Read what save_checkpoint wrote; tensors come on the CPU.

    With ddp, a collective: rank 0 reads the file, goes back to the former one if it is damaged,
    saying so, and sends the bytes to the others.
    Raises: ValueError, on all ranks, for a file that is missing, damaged (each record has a
        checksum), or holds more than tensors and plain types."""
    if ddp is None:
        return _read_checkpoint(path).state
    return _load_on_all_ranks(path, ddp)


def cleanup_ddp(ddp: Ddp) -> None:
    """Leave in good order: wait for the others, destroy the groups, finalise MPI, put the
    environment back. Harmless when called twice.

    It waits for half an hour, or the limit of start_watch, and then names the missing ranks. With a
    guard, Python must end, or set up again, within two minutes after this."""
    if ddp.state.clean:
        return
    ddp.state.clean = True
    atexit.unregister(_at_exit)
    try:
        _await_others_at_the_end(ddp)
        _destroy_groups(ddp)
    finally:   # whatever happens, the caller may go on
        _forget(ddp)


# ---------------------------------------------------------------- codes, limits, state
__all__ = [
    "AGAIN", "BAD_INPUT", "CannotSave", "Ddp", "SetupError", "abort", "all_mean", "all_sum",
    "autocast", "barrier", "broadcast", "choose_device", "choose_dtype", "cleanup_ddp",
    "cores_given", "ddp_sampler", "detect_launcher", "disk_trouble", "grad_scaler",
    "gradient_sync", "load_checkpoint", "note_progress", "optimize_with_ipex", "print0",
    "save_checkpoint", "seed_for", "setup_ddp", "start_watch", "stop_reason", "stop_wanted",
    "unwrap_ddp", "worker_init", "wrap_ddp"]

AGAIN = 75         # exit codes, beside 0 finished and 1 failed: stopped on request, work is left
HANG = 70          # no progress
BAD_INPUT = 2      # a person must change something
INTERRUPTED = 130  # Ctrl-C
# Gloo connects each rank to every other by 2 sockets, and many sites allow only 1,024 open files.
# Above this number of ranks, objects, flags and barriers use the device's own backend.
GLOO_MAX_RANKS = 256
# Time limits and pauses, in seconds.
CONNECT = 5.0           # for one attempt to connect to rank 0
FIRST_WORD = 0.1        # a store waits for the other side; a program that closes or greets does not
ANSWER = 30.0           # for the store to answer: 10,000 ranks may come at once, to a busy host
ANSWER_MARGIN = 20.0    # the other ranks wait this much longer for rank 0 than it waits for them
TABLE_READ = 5.0        # for the other ranks to read rank 0's error before its store closes
PRINTER_FIRST = 4.0     # for the one rank that prints an error common to all, before the rest exit
CULPRIT_FIRST = 1.5     # for the rank at fault to print and end the others (without guards)
HYDRA_OUTPUT = 0.5      # for MPICH to forward what was printed: MPI_Abort drops the rest
SCANCEL = 30.0          # for Slurm to end a job step
GUARD_MARGIN = 10.0     # ranks wait this much longer than guards, so that a guard ends the run
GUARD_ANSWER = 20.0     # for the guard to end this process
PATIENCE = 1800.0       # for all ranks to reach a barrier, or cleanup_ddp
DESTROY = 60.0          # for torch and MPI to close their connections
SAME_CTRL_C = 0.2       # between two SIGINTs of one Ctrl-C, from launcher and guard


class SetupError(RuntimeError):
    """Setting up failed. prints: whether this rank shows it; an error of all ranks is shown by one.
    code: the exit code; 2 if a person must change something, 1 if a new start may succeed."""

    def __init__(self, text: str, *, prints: bool = True, code: int = BAD_INPUT):
        super().__init__(text)
        self.prints = prints
        self.code = code


class Record:
    """What a project notes about its runs; this one notes nothing.

    To add something, set ddp.state.record to a child of this class. The training scripts of this
    repository do it in training/watch.py, for status.json and the stacks of all ranks."""
    stacks = None   # open file for stack traces of a rank that makes no progress; None: stderr

    def note(self, code: int, reason: str) -> None:
        """The run ends with this exit code: all ranks have come to cleanup_ddp, or this one has
        failed. With a guard, a failure is the guard's to note."""

    def advice(self, retry: bool) -> str:
        """Text for the end of the line FAILED. retry: can the same command continue the run?"""
        return ""

    def close(self) -> None:
        """The watch over stop requests and progress has ended."""


@dataclass
class State:
    """The part of a Ddp that changes during a run."""
    pid: int = field(default_factory=os.getpid)       # of the rank, not of its forked children
    hosts: list = field(default_factory=list)         # host name of each rank
    store: Any = None                                 # torch's store, which rank 0 serves
    mpi: Any = None                                   # COMM_WORLD of mpi4py
    ipex: str = "auto"                                # see optimize_with_ipex
    environment: dict = field(default_factory=dict)   # variables before _set_environment
    guard: socket.socket | None = None                # to ddp_guard.py
    watch: "Watch | None" = None                      # see start_watch
    record: Record = field(default_factory=Record)
    patience: float = PATIENCE                        # seconds to wait for others in cleanup_ddp
    checkpoint: str = ""                              # path of the one to resume from
    damaged: str = ""                                 # checkpoint that could not be loaded
    clean: bool = False                               # cleanup_ddp was called


# ---------------------------------------------------------------- launchers
#   mpirun, srun, torchrun, ...
#      |  starts N processes, and tells each its place by variables of its own
#      v
#   environment  --  the first complete row of LAUNCHERS  -->  rank, size, local rank
#                    further complete rows: outer launchers, printed and not used
#                    rows that are not complete, numbers that differ: refused
@dataclass(frozen=True)
class Launcher:
    """The environment variables by which a launcher tells a process its place. Where a field lists
    several names, the first one that is set counts."""
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    needs: str = ""              # another variable that must be set, or this row is skipped
    launch: str = ""             # variables that together identify a launch
    mpi: bool = False            # its ranks are MPI processes: mpi4py may be used
    size_optional: bool = False  # the size may come from DDP_WORLD_SIZE or mpi4py instead


# The first row that applies wins: the inner launcher of torchrun in srun, or mpirun in sbatch.
LAUNCHERS = {row.name: row for row in (
    Launcher("DDP_* variables", "DDP_RANK", "DDP_WORLD_SIZE", "DDP_LOCAL_RANK",
             "DDP_LOCAL_WORLD_SIZE"),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
             needs="MASTER_ADDR", launch="TORCHELASTIC_RUN_ID"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
             launch="PMIX_NAMESPACE", mpi=True),
    # Size: Polaris sets PMI_SIZE, Aurora none. Slurm's cray_shasta plugin sets PALS_RANKID too.
    Launcher("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID PMI_LOCAL_RANK PMIX_LOCAL_RANK",
             "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", launch="PALS_APID", mpi=True, size_optional=True),
    Launcher("MPICH or Intel MPI (Hydra)", "PMI_RANK", "PMI_SIZE",
             "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE", mpi=True),
    Launcher("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE", mpi=True),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", launch="FLUX_JOB_ID"),
    Launcher("LSF jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
             launch="LSB_JOBID PMIX_NAMESPACE", mpi=True),
    Launcher("Slurm step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID",
             launch="SLURM_JOB_ID SLURM_STEP_ID SLURM_RESTART_COUNT"),
)}
MOST_RANKS = 10**6   # more than any machine starts: a wrong number, for which ranks would wait
PLACE = ("rank", "size", "local_rank", "local_size")   # fields of a Launcher that name variables


def _int(env, name):
    text = env.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text!r} is not an integer. Expected the number that the "
                         f"launcher sets; unset it if it was exported by hand.")
    return int(text)


def _first_set(env, names):
    """The first of several names, separated by blanks, that is set; or ""."""
    for name in names.split():
        if env.get(name, "").strip():
            return name
    return ""


def _rows_set_in(env):
    """LAUNCHERS, where each field of PLACE names only the variable that is set, or ""."""
    rows = []
    for row in LAUNCHERS.values():
        row = replace(row, **{part: _first_set(env, getattr(row, part)) for part in PLACE})
        # The shells of sbatch (no step) and salloc (a step of one task) have Slurm's variables too.
        if row.name == "Slurm step":
            if not env.get("SLURM_STEP_ID") or _int(env, row.size) == 1:
                continue
        rows.append(row)
    return rows


def _is_complete(row, env):
    has_size = row.size or row.size_optional
    has_needed = not row.needs or env.get(row.needs, "").strip()
    return bool(row.rank and row.local_rank and has_size and has_needed)


def _complete_rows(env):
    return [row for row in _rows_set_in(env) if _is_complete(row, env)]


def _seen(env):
    """The launchers' variables that are set, for messages."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"}
    for row in LAUNCHERS.values():
        for part in PLACE:
            names.update(getattr(row, part).split())
    shown = " ".join(f"{name}={env[name]}" for name in sorted(names) if env.get(name, "").strip())
    return f"Seen: {shown or 'none'}"


def detect_launcher(env: dict, mpi: tuple[int, int] | None = None) -> Ddp:
    """Which rank is this process? A pure function of the environment.

    The first complete row of LAUNCHERS wins. Complete rows after it are noted as outer launchers.

    Args:
        env: mapping of environment variables.
        mpi: (rank, size) of mpi4py's COMM_WORLD, where an MPI started this process.
    Returns: a Ddp that knows its place (a plain process: rank 0 of 1).
    Raises: SetupError, with what was seen, where variables are incomplete or disagree. Going on as
        a single process would end with exit code 0 and a wrong result.
    """
    complete = _complete_rows(env)
    if not complete:
        return _plain_process(env)
    row = complete[0]
    outer = complete[1:]
    rank = _int(env, row.rank)
    local_rank = _int(env, row.local_rank)
    local_size = _int(env, row.local_size)
    size = _agreed_size(row, outer, env, mpi)
    if size is None:
        raise SetupError(
            f"{row.name} started rank {rank} but sets no number of ranks. Expected DDP_WORLD_SIZE: "
            f"export it next to the mpiexec call (nodes x ranks per node), or install mpi4py. "
            f"{_seen(env)}", prints=local_rank == 0)
    slurm_on_one_node = row.name == "Slurm step" and _int(env, "SLURM_STEP_NUM_NODES") == 1
    if size == 1 or slurm_on_one_node:
        local_size = size   # one host; Slurm sets no plain number for this
    if size > MOST_RANKS:
        raise SetupError(f"{row.name}: found {size} ranks; expected at most {MOST_RANKS}. "
                         f"{_seen(env)}")
    _refuse_outside(row, "rank", rank, size, env)
    _refuse_outside(row, "local rank", local_rank, local_size or size, env)
    sources = [f"rank from {row.rank}"]
    if row.size:
        sources.append(f"size from {row.size}")
    sources.append(f"local rank from {row.local_rank}")
    notes = [f"launcher {row.name}: {', '.join(sources)}"]
    for other in outer:
        notes.append(f"outer launcher {other.name} says rank {env[other.rank]} of "
                     f"{env.get(other.size)}: not used")
    node_rank = 0 if size == 1 else None   # of several ranks: known when they meet
    return Ddp(rank, size, local_rank, local_size, node_rank, launcher=row.name,
               notes=tuple(notes))


def _agreed_size(row, outer, env, mpi):
    """The number of ranks, or None if nothing tells it. Raises: SetupError if two differ on it, or
    on this process' rank."""
    sizes = {"DDP_WORLD_SIZE": _int(env, "DDP_WORLD_SIZE")}
    if row.mpi:
        sizes["WORLD_SIZE"] = _int(env, "WORLD_SIZE")
    sizes[row.size] = _int(env, row.size)
    ranks = {row.rank: _int(env, row.rank)}
    if mpi is not None:
        ranks["mpi4py"] = mpi[0]
        sizes["mpi4py"] = mpi[1]
    if row.name == "torchrun" and not env.get("TORCHELASTIC_RUN_ID"):   # exported by hand
        for other in outer:
            if other.mpi:
                ranks[other.name] = _int(env, other.rank)
                sizes[other.name] = _int(env, other.size)
    is_first = _int(env, row.local_rank) == 0   # of its host: it prints what all ranks there see
    sizes = {source: size for source, size in sizes.items() if size is not None}
    ranks = {source: rank for source, rank in ranks.items() if rank is not None}
    _refuse_contradiction(row, "number of ranks", sizes, env, prints=is_first)
    _refuse_contradiction(row, "rank", ranks, env, prints=True)
    return next(iter(sizes.values()), None)


def _refuse_contradiction(row, what, claims, env, prints):
    """claims: {who says it: number}."""
    if len(set(claims.values())) > 1:
        said = ", ".join(f"{source} says {number}" for source, number in claims.items())
        raise SetupError(
            f"{row.name}: {said}. Expected the same {what}. Unset what is left over from "
            f"another launcher. If mpi4py differs, it was probably built for another MPI: "
            f"reinstall it, or set DDP_MPI4PY=0. {_seen(env)}", prints=prints)


def _refuse_outside(row, what, value, limit, env):
    if not 0 <= value < limit:
        raise SetupError(f"{row.name}: {what} {value} is outside 0 to {limit - 1}. {_seen(env)}")


def _plain_process(env):
    """Place of a process that no launcher has started. Refuses incomplete launcher variables."""
    harmless = {"", "RANK", "WORLD_SIZE", "DDP_WORLD_SIZE"}   # setup_ddp checks the last one
    stray = {}   # {variable: the field of a Launcher that names it}
    for row in _rows_set_in(env):
        for part in PLACE:
            if getattr(row, part) not in harmless:
                stray[getattr(row, part)] = part
    half_a_launcher = bool(stray) and list(stray.values()) != ["local_rank"]   # alone: by hand
    like_torchrun = "LOCAL_RANK" in stray or bool(env.get("RANK") and env.get("MASTER_ADDR"))
    half_a_torchrun = like_torchrun and (_int(env, "WORLD_SIZE") or 1) > 1
    if half_a_launcher or half_a_torchrun:
        raise SetupError(
            f"a launcher seems to have started this process, but no set of its variables is "
            f"complete. {_seen(env)}. Expected for example RANK, WORLD_SIZE, LOCAL_RANK and "
            f"MASTER_ADDR, or PMI_RANK, PMI_SIZE and MPI_LOCALRANKID. Unset what was exported by "
            f"hand, or set DDP_RANK, DDP_WORLD_SIZE and DDP_LOCAL_RANK.")
    notes = ["launcher none: one process"]
    ignored = [name for name in (*stray, "RANK", "WORLD_SIZE") if env.get(name, "").strip()]
    if ignored:
        notes.append(f"{', '.join(ignored)} ignored as left over: a launcher sets more variables")
    if env.get("SLURM_JOB_ID") and (_int(env, "SLURM_NTASKS") or 1) > 1:
        notes.append(f"ATTENTION: Slurm job {env['SLURM_JOB_ID']} has {env['SLURM_NTASKS']} tasks, "
                     f"and this is ONE process in its shell. To start all: srun python "
                     f"{os.path.basename(sys.argv[0]) or '...'}")
    return Ddp(notes=tuple(notes))


# ---------------------------------------------------------------- devices, backends, precision
#   --device, --backend  \
#                         choose_device  -->  cuda:1 with nccl, xpu:3 with xccl, cpu with gloo
#   _found_devices       /                    or a refusal that lists what is there
#
#   rank with local rank r  -->  device r modulo the number of visible ones: a launcher may let a
#                                rank see all devices of its host, some, or only its own one
KINDS = ("cuda", "xpu", "cpu")   # device types, the best first
# The device types that each backend serves, the best backend first.
BACKENDS = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "xccl": ("xpu",), "ccl": ("xpu", "cpu")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str, backend: str, local_rank: int, found: dict, ranks: int = 2) -> tuple:
    """Choose device type, index and backend. A pure function.

    Args:
        device: auto | cpu | cuda | xpu.
        backend: auto | nccl | gloo | ccl | xccl | xpu (xpu: the best one for XPU).
        found: {'cuda': devices visible, 'xpu': devices visible, 'nccl' | 'gloo' | 'xccl' | 'ccl':
            bool}; also 'trouble', the error, if ccl cannot be loaded.
        ranks: how many there are; a single rank needs no backend, unless `backend` names one.
    Returns: (type, index or None, backend, reason).
    Raises: SetupError if what was asked for is not available; it lists what is.
    """
    _refuse_unknown("device", device, ("auto", *KINDS))
    _refuse_unknown("backend", backend, ("auto", "xpu", *BACKENDS))
    asked = f"--device {device}, --backend {backend}"
    visible = {**found, "cpu": 1}
    # With gloo an XPU is found too, and then refused: not silently replaced by the CPU.
    kinds = {**BACKENDS, "auto": KINDS, "gloo": KINDS, "xpu": ("xpu",)}[backend]
    kind = device
    if device == "auto":
        kind = _first_available(kinds, visible) or kinds[0]
    if not visible[kind]:
        raise _not_here(f"{kind} was asked for ({asked}), but no such device is visible", found)
    usable = [name for name, served in BACKENDS.items()
              if kind in served and backend in (name, "auto", "xpu")]
    if kind not in kinds or not usable:
        raise _not_here(f"--backend {backend} does not serve device {kind}", found)
    chosen = _first_available(usable, found)
    if chosen is None and (ranks > 1 or backend != "auto"):
        trouble = f" ({found['trouble']})" if "ccl" in usable and "trouble" in found else ""
        raise _not_here(f"no backend for {kind}: expected {' or '.join(usable)}, which this torch "
                        f"lacks{trouble}", found)
    if kind == "cpu":
        return kind, None, chosen, f"device cpu; backend {chosen} ({asked})"
    index = local_rank % found[kind]
    return (kind, index, chosen,
            f"device {kind}:{index} of {found[kind]}; backend {chosen} ({asked})")


def _refuse_unknown(name, value, known):
    if value not in known:
        raise SetupError(f"--{name} {value} is not known; expected one of {', '.join(known)}")


def _first_available(names, available):
    return next((name for name in names if available.get(name)), None)


def _not_here(what, found):
    """A SetupError that lists what is available."""
    have = ["cpu"]
    for name, value in found.items():
        if value is True:
            have.append(name)
        elif value and name != "trouble":
            have.append(f"{value} {name}")
    return SetupError(f"{what}. Available here: {', '.join(have)}. Choose --device auto and "
                      f"--backend auto, or among these.")


def _found_devices(need_ccl=False, ipex="auto"):
    """What choose_device needs to know of this machine. Intel's own packages are imported only
    where torch lacks a backend for XPUs (before 2.8)."""
    xpu = torch.xpu.device_count()
    found = {"cuda": torch.cuda.device_count(), "xpu": xpu, "nccl": dist.is_nccl_available(),
             "gloo": dist.is_gloo_available(), "xccl": _has_xccl(), "ccl": False}
    if need_ccl or (xpu and not found["xccl"]):
        if xpu and ipex != "off":
            with contextlib.suppress(Exception, SystemExit):   # optimize_with_ipex reports it
                _import_ipex()   # before oneCCL, whose XPU part needs it
        try:
            import oneccl_bindings_for_pytorch  # noqa: F401  (it registers the backend)
            found["ccl"] = True
        except Exception as e:   # not installed, a library missing, made for another torch
            found["trouble"] = f"oneccl_bindings_for_pytorch: {_in_one_line(e)}"
    return found


def _has_xccl():
    return hasattr(dist, "is_xccl_available") and dist.is_xccl_available()


def _in_one_line(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _device_id(device):
    """A name that identifies an accelerator within its host, despite masks; CPU: None."""
    if device.type == "cpu":
        return None
    uuid = getattr(getattr(torch, device.type).get_device_properties(device.index), "uuid", None)
    if uuid and device.type == "cuda":
        return f"cuda {uuid}"
    mask = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}[device.type]
    return f"{device} of {mask}={os.environ.get(mask, '')} {uuid or ''}"   # tiles may share a uuid


def _native_bfloat16(device):
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "xpu":
        return True
    with contextlib.suppress(OSError):
        words = Path("/proc/cpuinfo").read_text().split()
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return False


def choose_dtype(request: bool | str | None, device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, reason) for a config's `mixed_precision`.

    request: False or None, True (bfloat16 where the device computes in it, float32 elsewhere), or a
        name of DTYPES.
    Raises: ValueError for an unknown name, RuntimeError for a dtype that the device lacks."""
    native = _native_bfloat16(device)
    if request in (False, None):
        return torch.float32, "mixed precision off"
    if request is True and native:
        return torch.bfloat16, f"{device.type} computes in bfloat16"
    if request is True:
        return torch.float32, f"{device.type} has no native bfloat16"
    if request not in DTYPES:
        raise ValueError(f"mixed_precision is {request!r}; expected true, false or one of "
                         f"{', '.join(DTYPES)}")
    if request == "bfloat16" and not native:
        if device.type != "cpu":
            raise RuntimeError(f"{device} has no bfloat16. Expected a newer device; use "
                               f"mixed_precision: float16 or false.")
        return torch.bfloat16, "asked for; emulated on this CPU, slow"
    return DTYPES[request], "asked for"


# ---------------------------------------------------------------- set-up of one rank
#   environment --> detect_launcher --> rank, size      (_start_mpi: only where MPI must help)
#   devices     --> _bind_device    --> device, backend
#   other ranks --> _join           --> hosts, process groups
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


setup_ddp.current = None   # one process has one Ddp at a time, as torch has one process group
setup_ddp.count = 0        # of set-ups in this process
setup_ddp.meeting = None   # what _open_store returned: a later set-up uses that store again


def _set_up(*request):
    """Find the place and join. If it fails, a rank that prints raises; the others exit later."""
    try:
        return _find_place_and_join(*request)
    except SetupError as error:
        if error.prints:
            raise
        time.sleep(PRINTER_FIRST)
        sys.stdout.flush()
        os._exit(error.code)


def _print_notes(ddp):
    hosts = len(set(ddp.state.hosts)) or 1
    try:
        print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on {hosts} host(s)", *ddp.notes,
               sep="\n  ")
    except CannotPrint as error:
        abort(ddp, f"error: {error}", BAD_INPUT)


def _find_place_and_join(device, backend, seed, ranks, timeout, init_timeout, ipex):
    """The Ddp of setup_ddp, whose arguments these are."""
    env = dict(os.environ)
    _deadline(env)   # refuses a wrong DDP_DEADLINE before anything is started
    if ipex not in ("auto", "on", "off"):
        raise SetupError(f"ipex is {ipex!r}; expected auto, on or off")
    if not init_timeout > 0:
        raise SetupError(f"init_timeout is {init_timeout}; expected seconds, more than 0")
    mpi = _start_mpi(env, init_timeout)
    ddp = detect_launcher(env, _place_in(mpi))
    _refuse_other_size(ddp, "--ranks", ranks)
    _refuse_other_size(ddp, "DDP_WORLD_SIZE", _int(env, "DDP_WORLD_SIZE"))
    ddp = replace(ddp, seed=seed, host=socket.gethostname(), timeout=timeout,
                  state=State(mpi=mpi, ipex=ipex))
    error = None
    try:
        ddp = _bind_device(ddp, device, backend)
    except RuntimeError as e:
        if ddp.world_size == 1:
            raise
        error = str(e)   # perhaps of this rank alone: rank 0 prints it, see _meet
    ddp.state.guard = _open_guard()
    if ddp.world_size > 1:
        ddp = _join(ddp, env, init_timeout, error)
    else:
        tell_guard(ddp, join={"rank": 0, "size": 1, "launcher": ddp.launcher, "hub": None})
    atexit.register(_at_exit, ddp)
    _seed_all(seed)
    return ddp


def _refuse_other_size(ddp, name, wanted):
    if wanted is not None and wanted != ddp.world_size:
        raise SetupError(f"{name} asks for {wanted} rank(s), but {ddp.world_size} were "
                         f"started. {'; '.join(ddp.notes)}. Start {wanted} (mpirun -n, "
                         f"srun -n, torchrun --nproc_per_node) or change {name}.",
                         prints=ddp.rank == 0)


def _bind_device(ddp, device, backend):
    """A Ddp with its device and backend, as choose_device chooses them."""
    found = _found_devices(backend == "ccl", ddp.state.ipex)
    kind, index, chosen, reason = choose_device(device, backend, ddp.local_rank, found,
                                                ddp.world_size)
    target = torch.device("cpu")
    if index is not None:
        target = torch.device(kind, index)
        getattr(torch, kind).set_device(index)   # the group binds to the current device
    return replace(ddp, device=target, backend=chosen if ddp.world_size > 1 else "none",
                   notes=(*ddp.notes, reason))


def _start_mpi(env, limit):
    """COMM_WORLD of mpi4py; None where it is absent, unwanted or not needed. Importing it calls
    MPI_Init, which hangs or gives a wrong rank in a process that no MPI launcher started."""
    row = next(iter(_complete_rows(env)), None)
    if row is None or not row.mpi or env.get("DDP_MPI4PY") == "0":
        return None
    sized = row.size or env.get("DDP_WORLD_SIZE")
    if sized and env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return None
    try:
        import mpi4py
        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.finalize = False   # it would wait for all ranks at exit
        with _time_limit(limit):   # MPI_Init waits for all ranks, without a limit
            from mpi4py import MPI
    except (ImportError, RuntimeError):   # RuntimeError: mpi4py found no MPI library
        return None
    return None if MPI.Is_finalized() else MPI.COMM_WORLD


def _place_in(mpi):
    """(rank, size) in COMM_WORLD, or None without MPI."""
    return None if mpi is None else (mpi.Get_rank(), mpi.Get_size())


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



# ---------------------------------------------------------------- rendezvous: addresses
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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_PORT = 29500


def slurm_first_host(nodelist: str) -> str:
    """First host of a Slurm node list: 'a[003-5,9]-ib,b3' -> 'a003-ib'. Slurm's scontrol would tell
    it, but containers often lack that."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)[0]   # up to a comma outside brackets
    return re.sub(r"\[([^\]]*)\]", lambda ranges: re.split("[-,]", ranges[1])[0], first)


def _addresses(name):
    """The addresses that a name has here, those of IPv4 first."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    places = {family: [] for family in (socket.AF_INET, socket.AF_INET6)}
    for family, *_, place in found:
        if family in places:
            places[family].append(place[0])
    return [*places[socket.AF_INET], *places[socket.AF_INET6]]


def _resolve(name):
    """The first address that a name has here, or ""."""
    return next(iter(_addresses(name)), "")


def _is_local(ip):
    """Whether an address has no meaning on other hosts: of the loopback, or of one link alone."""
    address = ipaddress.ip_address(ip)
    return address.is_loopback or address.is_link_local


def loopback() -> str:
    """The address by which processes on this host reach each other: ::1 where IPv4 is absent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def _own_address(way_to=""):
    """The address under which other hosts reach this one. way_to: a host that they reach too."""
    host = socket.gethostname()
    short = host.split(".")[0]
    names = [host]
    if re.fullmatch(r"x\d+c\d+s\d+b\d+n\d+", short) and ".hsn." not in host:   # HPE EX: its fabric
        names = [f"{short}.hsn.cm.aurora.alcf.anl.gov", f"{short}.hsn.cm.polaris.alcf.anl.gov",
                 host]
    for name in names:
        for ip in _addresses(name):
            if not _is_local(ip):   # Debian maps a host's own name to 127.0.1.1
                return ip
    outside = ["192.0.2.1", "2001:db8::1"]   # any outside address: the default route
    if way_to:
        outside.insert(0, way_to)
    for goal in outside:
        ip = _route_to(goal)
        if ip and not _is_local(ip):
            return ip
    return loopback()


def _seen_from_outside(ddp, host):
    """`host`, or this host's address, if other hosts cannot use what the name means here."""
    if ddp.on_one_host:
        return host
    address = _resolve(host)
    if not address or address == host or not _is_local(address):
        return host
    return _own_address()   # Debian maps a host's own name to 127.0.1.1


def _route_to(host):
    """This host's address on the way to `host`. Connecting a datagram socket sends nothing."""
    for ip in _addresses(host):
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((ip, 9))
            return s.getsockname()[0]
    return None


def _interface_of(ip):
    """Name of the network interface that has the address, or None (None outside Linux)."""
    if ip is None or not sys.platform.startswith("linux"):
        return None
    if ":" in ip:
        return _interface_of_ipv6(ip)
    import fcntl
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):   # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                packed = fcntl.ioctl(s.fileno(), 0x8915, request)   # SIOCGIFADDR
                if socket.inet_ntoa(packed[20:24]) == ip:
                    return name
    return None


def _interface_of_ipv6(ip):
    """As _interface_of. The kernel lists address, number, prefix, scope, flags and name."""
    wanted = ipaddress.ip_address(ip.partition("%")[0]).exploded.replace(":", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if address == wanted:
                return name
    return None


def _launch_name(env, ddp):
    """The launcher's identifier of this launch, or ""."""
    return "-".join(env[name] for name in LAUNCHERS[ddp.launcher].launch.split() if env.get(name))


def process_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state: see man proc_pid_stat. Raises: OSError
    if the process is gone, or there is no /proc."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()   # the second one, the name, may hold blanks


def parent_of(pid: int) -> int:
    """Process id of the parent. Raises: see process_fields."""
    return int(process_fields(pid)[1])


def _launcher_process(ddp):
    """Process id of this host's launcher, with its namespace, as containers may have equal ids. It
    is the first ancestor without the rank's variable, which a guard or shell around a rank has."""
    pid = os.getppid()
    rank_variable = f"{LAUNCHERS[ddp.launcher].rank}=".encode()
    try:
        while rank_variable in Path(f"/proc/{pid}/environ").read_bytes():
            pid = parent_of(pid)
        return f"{pid} {os.readlink('/proc/self/ns/pid')}"
    except OSError:   # no /proc: the parent is the best guess
        return str(pid)


def _port_asked_for(ddp, env):
    """MASTER_PORT, or 0."""
    port = _int(env, "MASTER_PORT") or 0
    if not 0 <= port < 1 << 16:   # 10000 + a job's number may be too large
        raise SetupError(f"MASTER_PORT={port} is no port; expected 1024 to 65535. Leave it unset "
                         f"to have one found.", prints=ddp.local_rank == 0)
    return port


def _computed_port(ddp, env):
    """A port that all ranks of this launch compute alike, below the kernel's ephemeral ports."""
    launch = _launch_name(env, ddp)
    if not launch and ddp.on_one_host:
        launch = _launcher_process(ddp)
    return 10000 + seed_for(f"{ddp.launcher} {launch} {ddp.world_size}") % 20000


def _place_of_rank_0(ddp, env):
    """The Address of rank 0's store, as far as this rank can tell alone."""
    port = _port_asked_for(ddp, env)
    by_mpi = ddp.state.mpi is not None
    if env.get("MASTER_ADDR"):
        source = "from MASTER_ADDR by MPI broadcast" if by_mpi else "from MASTER_ADDR"
        return Address(_seen_from_outside(ddp, env["MASTER_ADDR"]), port or DEFAULT_PORT, source)
    if by_mpi:
        host = loopback() if ddp.on_one_host else _own_address()
        source = "from MASTER_PORT by MPI broadcast" if port else "by MPI broadcast"
        return Address(host, port, source)
    host = ""
    if ddp.on_one_host:
        host = loopback()
    elif ddp.launcher == "Slurm step":
        first = slurm_first_host(env.get("SLURM_STEP_NODELIST", ""))
        if _resolve(first):   # in a cloud, node names may not resolve
            host = _seen_from_outside(ddp, first)
    if not host:
        raise SetupError(
            f"{ddp.launcher} started ranks that may be on several hosts, and nothing tells them "
            f"where rank 0 is: mpi4py is not usable and MASTER_ADDR is unset. Install mpi4py for "
            f"this MPI, or export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to "
            f"all ranks.", prints=ddp.rank == 0)
    if port:
        return Address(host, port, "from MASTER_PORT")
    return Address(host, _computed_port(ddp, env), "by the launcher's id")


# ---------------------------------------------------------------- rendezvous: store, table, groups
#   ranks 1, 2, ...                      rank 0's store                    rank 0
#                                        (torchrun: its agent's)
#   came/R += 1    ------------------->
#   here/R: host, device, backend, --->  all here/R  ------------------->  who is missing? who
#           torch version, error                                           shares a device? ...
#                  <-------------------  table  <------------------------  hosts, address of the
#                                                                          hub; or the problem
#   read/R, of a problem  ------------>  all read/R  ------------------->  ends, and the store too
#
#   then each rank tells its guard where the hub is, and makes the process groups
class Meeting(NamedTuple):
    """A connection to rank 0's store."""
    store: Any
    address: Address


def _join(ddp, env, init_timeout, error):
    """Meet all ranks in the store, check that they fit together, make the process groups.

    error: what this rank has to report instead of joining, or None."""
    agent = ddp.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = setup_ddp.meeting or _open_store(ddp, env, agent, init_timeout)
    host, _, source = meeting.address
    # Torchrun's agent keeps its store over restarts, and a script may set up twice. A prefix per
    # attempt hides the keys of earlier attempts.
    setup_ddp.count += 1
    attempt = f"{env.get('TORCHELASTIC_RESTART_COUNT')}/{setup_ddp.count}"
    store = dist.PrefixStore(f"ddp/{_launch_name(env, ddp)}/{attempt}", meeting.store)
    if ddp.on_one_host:
        hub_host = loopback()
    elif agent:   # MASTER_ADDR is the agent's host, which rank 0 may not share
        hub_host = _own_address(way_to=host)
    else:
        hub_host = host
    table = _meet(ddp, store, error, init_timeout, hub_host)
    hosts = table["hosts"]
    ddp.state.hosts = hosts
    ddp.state.store = store
    setup_ddp.meeting = meeting
    if table["hub"]:
        tell_guard(ddp, join={"rank": ddp.rank, "size": ddp.world_size,
                              "launcher": ddp.launcher, "hub": table["hub"]})
    else:   # the guards are not connected: abort has the launcher end the others
        ddp.state.guard = None
    local_world_size = ddp.local_world_size or hosts.count(ddp.host)
    _set_environment(ddp, meeting.address, local_world_size)
    control = _make_groups(ddp, env, init_timeout)
    notes = [*ddp.notes, f"rank 0 at {meeting.address}, found {source}", *table["notes"]]
    return replace(ddp, local_world_size=local_world_size, control=control,
                   node_rank=list(dict.fromkeys(hosts)).index(ddp.host), notes=tuple(notes))


def _set_environment(ddp, address, local_world_size):
    """Set the variables that torch and other libraries read. cleanup_ddp puts them back."""
    variables = {"MASTER_ADDR": address.host, "MASTER_PORT": address.port, "RANK": ddp.rank,
                 "WORLD_SIZE": ddp.world_size, "LOCAL_RANK": ddp.local_rank,
                 "LOCAL_WORLD_SIZE": local_world_size}
    # Gloo's own choice may be an interface that other hosts cannot reach.
    interface = _interface_of(loopback() if ddp.on_one_host else _route_to(address.host))
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    for name, value in variables.items():
        ddp.state.environment[name] = os.environ.get(name)
        os.environ[name] = str(value)


def _make_groups(ddp, env, init_timeout):
    """Make torch's process groups. Returns the one for objects, flags and barriers, see _route."""
    limit = None if ddp.timeout is None else timedelta(seconds=ddp.timeout)
    bind = {"device_id": ddp.device} if ddp.backend == "nccl" else {}
    most_ranks = _int(env, "DDP_GLOO_MAX_RANKS")
    if most_ranks is None:
        most_ranks = GLOO_MAX_RANKS
    with _time_limit(init_timeout):   # some backends wait without a limit
        dist.init_process_group(ddp.backend, store=ddp.state.store, rank=ddp.rank, timeout=limit,
                                world_size=ddp.world_size, **bind)
        if ddp.world_size > most_ranks:
            return None
        if ddp.backend == "gloo":
            return dist.group.WORLD
        return dist.new_group(backend="gloo", timeout=limit)


def _open_store(ddp, env, agent, limit):
    """Connect to rank 0's TCPStore. Returns a Meeting.

    Rank 0 opens its socket first. With mpi4py it then broadcasts the address, or its error."""
    address = _place_of_rank_0(ddp, env)
    listener = None
    problem = ""
    if ddp.is_main and not agent:
        try:
            listener = _listen(address)
            address = address._replace(port=listener.getsockname()[1])
        except OSError as e:
            reason = str(e.strerror).partition(" (while")[0]
            problem = (f"rank 0 on {ddp.host} cannot listen on {address}: {reason}. "
                       f"{_other_place(env)}")
    if ddp.state.mpi is not None:
        host, port, problem = ddp.state.mpi.bcast((address.host, address.port, problem), root=0)
        address = Address(host, port, address.source)
    if problem:
        raise SetupError(problem, prints=ddp.is_main)
    served = f"ddp/{_launch_name(env, ddp)}/served"   # rank 0's first word in its store
    if listener is None:
        stranger = SetupError(
            f"{address}, where rank 0 shall listen, is held by another program or another run: "
            f"rank 0 did not answer {ddp.host} there. {_other_place(env)}",
            prints=_speaks_for_host(ddp))
        _await_listener(ddp, address, limit, stranger)
        store = _connect(address, limit, "" if agent else served, stranger)
    else:
        store = dist.TCPStore(address.host, address.port, None, True, timedelta(seconds=limit),
                              wait_for_workers=False, master_listen_fd=listener.detach())
        store.set(served, "")
    return Meeting(store, address)


def _other_place(env):
    """What to do if rank 0 cannot listen at its address, by what was set."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)]
    if not given:
        return "Export MASTER_PORT=<a free port>, the same to all ranks, or start again."
    which = "both" if len(given) == 2 else given[0]
    return ("Expected MASTER_ADDR to be an address of rank 0's host and MASTER_PORT to be free "
            f"there. Leave {which} unset to have a free place found, or choose another port.")


def _listen(address):
    """A socket that listens on this address only; for port 0 the kernel chooses a free port."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    return socket.create_server(place[:2], family=family, backlog=4096)


def _await_listener(ddp, address, limit, stranger):
    """Wait until rank 0 listens. TCPStore would fail with a long C++ stack trace instead.

    stranger: raised if what listens is no store, which waits in silence."""
    deadline = time.monotonic() + limit
    patience = None   # a time: until then the store of an earlier run may end
    while True:
        try:
            with socket.create_connection((address.host, address.port), CONNECT) as probe:
                if _is_silent(probe):
                    return
            patience = patience or time.monotonic() + min(limit, ANSWER)
        except OSError as e:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"rank 0 cannot be reached at {address} within {limit:.0f} s ({e}). Expected "
                    f"it to listen there. Did it start? Is MASTER_ADDR right? Try `ping "
                    f"{address.host}` from {ddp.host}.",
                    prints=_speaks_for_host(ddp), code=1) from None
        if patience and time.monotonic() > patience:
            raise stranger
        time.sleep(0.05)


def _is_silent(connection):
    """Whether the other end of a new connection waits for this one to speak."""
    connection.settimeout(FIRST_WORD)
    with contextlib.suppress(ConnectionError):
        try:
            connection.recv(1)
        except TimeoutError:
            return True
    return False


def _connect(address, limit, served, stranger):
    """A client of the TCPStore of rank 0, or of torchrun's agent.

    served: a key that rank 0 has set there; "": none. stranger: raised if nothing else answers.
    TCPStore would wait for a silent program without end, so a thread does it, and may be left
    behind: this process then ends."""
    patience = timedelta(seconds=min(limit, ANSWER))
    deadline = time.monotonic() + patience.total_seconds()
    stores = []

    def open_client():
        with contextlib.suppress(RuntimeError):   # not the protocol of a store
            stores.append(dist.TCPStore(address.host, address.port, None, False, patience,
                                        wait_for_workers=False))

    thread = threading.Thread(target=open_client, daemon=True)
    with _time_limit(limit + ANSWER_MARGIN):
        thread.start()
        thread.join(patience.total_seconds())
        while stores and time.monotonic() < deadline:
            if not served or _holds(stores[0], served):
                stores[0].set_timeout(timedelta(seconds=limit))
                return stores[0]
            time.sleep(0.05)
    raise stranger


def _holds(store, key):
    with contextlib.suppress(RuntimeError):   # the run whose store it is has ended
        return store.check([key])
    return False


def _speaks_for_host(ddp):
    """Does this rank print an error of all ranks but rank 0? On each host one does."""
    return ddp.local_rank == 0 or ddp.rank == 1


def _meet(ddp, store, error, limit, hub_host):
    """Report to rank 0 and return its answer, a dict: "hosts" of all ranks; "notes", texts to
    print; and "hub", the address of rank 0's guard (None: guards are not connected). SetupError:
    the ranks do not match."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    report = {"host": ddp.host, "backend": ddp.backend, "torch": torch.__version__, "error": error,
              "bound": _bound_by_openmp(os.environ, own, cores_given()),
              "guarded": ddp.state.guard is not None,
              "device": None if error else _device_id(ddp.device)}
    if store.add(f"came/{ddp.rank}", 1) > 1:   # before reading a table, which is another run's
        raise _second_in_store(ddp)
    store.set(f"here/{ddp.rank}", json.dumps(report))
    if ddp.is_main:
        return _answer_all(ddp, store, limit, hub_host)
    try:   # rank 0 gives up earlier and says why: this wait fails only if it is gone
        store.wait(["table"], timedelta(seconds=limit + ANSWER_MARGIN))
    except RuntimeError:
        raise SetupError("rank 0 ended while the ranks were meeting. Expected it to stay; look "
                         "for its own message.", prints=_speaks_for_host(ddp), code=1) from None
    table = json.loads(store.get("table"))
    if table["problem"]:
        store.set(f"read/{ddp.rank}", "")
        raise SetupError(table["problem"], prints=False, code=table["code"])
    if len(table["hosts"]) != ddp.world_size:
        raise _second_in_store(ddp)
    return table


def _second_in_store(ddp):
    return SetupError(f"rank {ddp.rank} of {ddp.world_size} is in this store already. Was it "
                      f"started twice, or do two runs use one MASTER_PORT? Choose another for one "
                      f"of them.", prints=_speaks_for_host(ddp))


def _answer_all(ddp, store, limit, hub_host):
    """On rank 0: wait for the reports of all ranks, judge them, and write the table for all."""
    keys = [f"here/{rank}" for rank in range(ddp.world_size)]
    with contextlib.suppress(RuntimeError):   # a timeout: _problem_of names the missing ranks
        store.wait(keys, timedelta(seconds=limit))
    reports = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            reports[rank] = json.loads(store.get(key))
    problem, code = _problem_of(reports, ddp.world_size, limit)
    guarded = [report["guarded"] for report in reports.values()]
    hub = None
    if any(guarded) and not all(guarded):
        print0(ddp, "ATTENTION: not every rank has a guard, so no rank is guarded")
    elif all(guarded) and not problem:
        hub = _start_hub(ddp, hub_host)
        if not hub:
            print0(ddp, "ATTENTION: the guards cannot be joined, so no rank is guarded")
    table = {"problem": problem, "code": code, "hub": hub,
             "hosts": [report["host"] for report in reports.values()],
             "notes": _notes_on_binding(reports.values())}
    store.set("table", json.dumps(table))
    if problem:   # the store ends with rank 0: the others must read the table first
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{rank}" for rank in reports if rank], timedelta(seconds=TABLE_READ))
        raise SetupError(problem, code=code)
    return table


def _bound_by_openmp(env, own, given):
    """The cores to which OpenMP has bound this process, ascending; [] if it has bound it to none.

    own, given: sets of cores, of this process now and at its start. The start tells nothing if it
    is not known (None), or if the launcher was bound before, as torchrun is: then one core does.
    """
    asked = env.get("OMP_PROC_BIND") or env.get("OMP_PLACES")
    was_narrowed = given is not None and own != given
    if asked and (was_narrowed or len(own) == 1):
        return sorted(own)
    return []


def _notes_on_binding(reports):
    """A note if OpenMP has bound several ranks of a host to the same cores."""
    counts = {}   # {(host, its cores): ranks that are bound to them}
    for report in reports:
        place = (report["host"], listed(report["bound"]))
        counts[place] = counts.get(place, 0) + 1
    for (host, cores), ranks in counts.items():
        if cores and ranks > 1:
            return [f"ATTENTION: with OMP_PROC_BIND or OMP_PLACES set, {ranks} ranks of {host} are "
                    f"bound to core {cores}: unset both, or have the launcher give each rank cores "
                    "of its own"]
    return []


def _start_hub(ddp, host):
    """Have rank 0's guard listen for the other guards. Returns the address, or None."""
    tell_guard(ddp, serve=host)
    with contextlib.suppress(OSError, ValueError), ddp.state.guard.makefile() as answer:
        return json.loads(answer.readline())["address"]
    return None


def _problem_of(reports, size, limit):
    """(why the ranks do not fit together, exit code), or ("", 0). reports: by rank."""
    errors = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if errors:
        first, text = min(errors.items())
        alike = [rank for rank in errors if errors[rank] == text]
        who = f"rank {listed(alike)} on {reports[first]['host']}: "
        return text if len(alike) == size else who + text, 2
    missing = [rank for rank in range(size) if rank not in reports]
    if missing:
        hosts = sorted({report["host"] for report in reports.values()})
        return (f"{len(missing)} of {size} ranks did not appear within {limit:.0f} s: rank(s) "
                f"{listed(missing)}. The others are on {listed(hosts)}. Is a host down, or cannot "
                f"it reach rank 0?"), 1
    users = {}   # {accelerator: the first rank that reported it}
    for rank, report in reports.items():
        first = users.setdefault((report["host"], report["device"]), rank)
        if report["device"] and rank != first:
            return (f"ranks {first}, {rank} on {report['host']} share one accelerator "
                    f"({report['device']}); expected one each. Start fewer ranks per host, unset "
                    f"the mask (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK), or give --device cpu."), 2
    for what in ("backend", "torch"):
        values = sorted({report[what] for report in reports.values()})
        if len(values) > 1:
            return (f"the ranks differ in {what}: {', '.join(values)}; expected the same on all. "
                    f"Give --device and --backend, and one environment for all hosts."), 2
    return "", 0


def listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


# ---------------------------------------------------------------- one fails, all end
#   a rank fails, in any of these ways          with a guard (ddp_guard.py, the rank's parent):
#     an exception leaves `with ddp`      \        rank --failed--> guard --> hub --> all guards,
#     Python ends without cleanup_ddp      abort   which kill their ranks; the hub prints FAILED
#     the script calls abort              /      without: the rank prints FAILED and has the
#                                                launcher end the others: MPI_Abort, scancel, or
#                                                its own end by a signal or exit code
def _open_guard():
    """The socket to ddp_guard.py, if that is this process' parent, else None."""
    descriptor = _guard_descriptor()
    if descriptor is None:
        return None
    guard = socket.socket(fileno=os.dup(descriptor))
    guard.settimeout(GUARD_ANSWER)
    return guard


def _guard_descriptor():
    """File descriptor of the socket to ddp_guard.py, if that is this process' parent, else None."""
    descriptor, _, parent = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if not parent or int(parent) != os.getppid():
        return None
    return int(descriptor)


def tell_guard(ddp: Ddp, wait: bool = True, **message) -> None:
    """Send a line to the guard, if there is one. wait=False: drop it if the guard does not read.

    message: see the docstring of ddp_guard.py."""
    if ddp.state.guard is None:
        return
    line = json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):
        if wait:
            ddp.state.guard.sendall(line)
        else:   # socket.send would wait up to its timeout, os.write does not wait
            os.write(ddp.state.guard.fileno(), line)


def _alone_in_a_notebook(ddp):
    """A single interactive process: neither an exception nor a long pause may end it."""
    return ddp.world_size == 1 and hasattr(sys, "ps1")


def _leave_context(ddp, error):
    """The end of `with ddp`. error: the exception that leaves it, or None."""
    in_good_order = error is None
    if isinstance(error, SystemExit):
        in_good_order = error.code in (None, 0)
    if in_good_order:
        cleanup_ddp(ddp)
    elif _alone_in_a_notebook(ddp):   # there is no other rank to end, and the kernel goes on
        ddp.state.record.note(1, f"{type(error).__name__}: {error}")
        end_watch(ddp)
    else:
        _abort_with(ddp, error)


def abort(ddp: Ddp, text: str, code: int = 1, cause: str = "", secondary: bool = False,
          retry: bool = True) -> None:
    """Print `text` once, with the rank, and end every rank; in a notebook, raise SystemExit.

    Args:
        code: exit code of every rank, as far as the launcher passes it on.
        cause: one line for the record and the last line; default: the first line of the text.
        secondary: this failure is only the consequence of another rank's failure.
        retry: can the same command, given again, continue the run?"""
    cause = cause or text.partition("\n")[0]
    code = code % 256 or 1
    if _alone_in_a_notebook(ddp):
        print(text, file=sys.stderr)
        ddp.state.record.note(code, cause)
        end_watch(ddp)
        raise SystemExit(code)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if ddp.state.guard is not None:
        tell_guard(ddp, failed={"code": code, "cause": cause, "text": text,
                                "secondary": secondary, "retry": retry})
        with contextlib.suppress(OSError):
            ddp.state.guard.recv(1)   # until the guard kills this process
        os._exit(code)
    if ddp.state.watch is not None:
        for number in ddp.state.watch.handlers:
            signal.signal(number, signal.SIG_DFL)   # the launcher's SIGTERM must end this rank
    if secondary or not ddp.is_main:   # let the rank at fault, or rank 0, print first
        time.sleep(CULPRIT_FIRST)
    ddp.state.record.note(code, cause)
    with contextlib.suppress(OSError, ValueError):
        print(_failure_message(ddp, text, code, cause, retry), file=sys.stderr, flush=True)
    if ddp.world_size > 1:
        _end_others(ddp, code)
    os._exit(code)


def _failure_message(ddp, text, code, cause, retry):
    """What abort prints without a guard: the text, then one line with rank and cause."""
    place = f"rank {ddp.rank} of {ddp.world_size} on {ddp.host}"
    if code == BAD_INPUT:   # nothing has run yet
        return f"\n[{place}] {text}"
    end = "" if cause[-1:] in ".?" else "."
    line = f"FAILED: {place}: {cause}{end}"
    if ddp.state.checkpoint:
        line += f" Last checkpoint: {ddp.state.checkpoint}."
    line = f"{line} {ddp.state.record.advice(retry)}".rstrip()
    if text.strip() in ("", cause):   # the text has nothing to add
        return line
    return f"\n[{place}] {text}\n{line}"


def _end_others(ddp, code):
    """Have the launcher end all ranks, as far as it can."""
    if ddp.state.mpi is not None:
        time.sleep(HYDRA_OUTPUT)
        ddp.state.mpi.Abort(code)
    if ddp.launcher == "Slurm step":
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        with contextlib.suppress(OSError, subprocess.SubprocessError):   # it is missing, or hangs
            subprocess.run(["scancel", step], timeout=SCANCEL)
    if LAUNCHERS[ddp.launcher].mpi:
        os.abort()   # MPICH ends all ranks when one dies of a signal, not for an exit code


def _abort_with(ddp, error, printed=False):
    """End all ranks because of an exception in this one. printed: Python has shown it already."""
    if isinstance(error, KeyboardInterrupt):
        abort(ddp, "interrupted (Ctrl-C)", INTERRUPTED)
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        abort(ddp, error.code)
    if isinstance(error, SystemExit):
        abort(ddp, f"left with exit code {error.code}",
              error.code if isinstance(error.code, int) else 1)
    expected = not getattr(error, "retry", True)   # retry = False: no bug, so no traceback
    out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    # A lost connection is most likely the consequence of a failure elsewhere.
    lost = isinstance(error, RuntimeError) and re.search(
        "connection|socket|timed out|communicator|successfully reached monitoredBarrier",
        str(error), re.I)
    if expected:
        text = str(error)
        cause = text.partition("\n")[0]
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
        cause = _in_one_line(error)
    abort(ddp, "" if printed else text, cause=cause, secondary=bool(lost),
          retry=not out_of_memory and not expected)


def _at_exit(ddp):
    """Python ends without cleanup_ddp. A guard judges the exit code, which is not known here."""
    if os.getpid() != ddp.state.pid:
        return
    error = getattr(sys, "last_value", None)   # which nobody caught; Python has printed it
    if error is not None:
        _abort_with(ddp, error, printed=True)
    if ddp.world_size > 1 and ddp.state.guard is None:
        abort(ddp, "ended without cleanup_ddp. Call it at the end, or use `with setup_ddp()`.")


# ---------------------------------------------------------------- the end in good order
def _await_others_at_the_end(ddp):
    """The barrier of cleanup_ddp; ends all ranks if some do not come. Then nothing can fail any
    more: note the end of the run."""
    patience = ddp.state.patience
    tell_guard(ddp, bye=patience)
    try:
        with _time_limit(patience + 2 * GUARD_MARGIN):   # xccl ignores the barrier's limit
            barrier(ddp, patience + GUARD_MARGIN)
    except RuntimeError as e:
        abort(ddp, f"not all of {ddp.world_size} ranks came to cleanup_ddp within "
                   f"{patience:.0f} s: {_in_one_line(e)}", HANG, secondary=True)
    if ddp.state.watch is not None:
        requested = ddp.state.watch.requested
        if requested:
            ddp.state.record.note(AGAIN, requested)
        else:
            ddp.state.record.note(0, "left in good order")
        end_watch(ddp)


def _destroy_groups(ddp):
    with _time_limit(DESTROY):
        if ddp.world_size > 1:
            _await_gloo_threads()
            dist.destroy_process_group()
        _end_mpi(ddp.state.mpi)


def _forget(ddp):
    """Close the connections, and put back the environment."""
    tell_guard(ddp, left=True)
    if ddp.state.guard is not None:
        ddp.state.guard.close()
    ddp.state.guard = None
    ddp.state.mpi = None
    setup_ddp.current = None
    for name, value in ddp.state.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _await_gloo_threads():
    """Wait until gloo's threads are idle. They free a collective's tensors after it has returned
    and need the GIL for it: if Python shuts down meanwhile, they abort the process."""
    for _ in range(1000):
        time.sleep(0.01)   # this releases the GIL
        with contextlib.suppress(OSError):   # a thread that has ended
            if not any(b" (pt_gloo_runloop) R " in file.read_bytes()
                       for file in Path("/proc/self/task").glob("*/stat")):
                return


# ---------------------------------------------------------------- stop requests, progress
#   signal to any rank           \                                summed over ranks
#   DDP_DEADLINE (rank 0 looks)   watch.requested --> stop_wanted ------------------> stop_reason:
#   stop file (rank 0 looks)     /                    1.0 or 0.0                      all stop
#
#   stop_reason, save, load --> note_progress --> with a guard: it ends the run if no rank of all
#                                                 makes progress; without: a timer in each rank
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


@dataclass
class Watch:
    """See start_watch."""
    limit: float               # seconds without progress; 0: no limit
    stop_file: str             # path; "": none
    step: int | None = None    # number of steps done
    requested: str = ""        # why this rank was asked to stop
    interrupted: float = 0.0   # time of the first Ctrl-C
    handlers: dict = field(default_factory=dict)   # {signal: handler to restore}


def start_watch(ddp: Ddp, stop_file: str = "", minutes: float = 20.0,
                signals: Iterable[str] = STOP_SIGNALS) -> None:
    """Watch for stop requests and hangs from here on. stop_reason calls this if nobody has.

    Signals, the time DDP_DEADLINE and the stop file only ask for a stop: stop_reason tells all
    ranks at the same step. A second Ctrl-C ends the run at once, with exit code 130.

    Each call of stop_reason counts as progress, as does a save. With guards, the run is ended when
    no rank makes progress: the late ranks are named, and the exit code is 70. Without guards, each
    rank without progress ends by itself with exit code 1, even if it only waits for another rank.

    minutes: limit without progress; 0: none. signals: names of those that ask for a stop."""
    requested = ddp.state.watch.requested if ddp.state.watch else ""   # by an earlier watch
    end_watch(ddp)
    notebook = _alone_in_a_notebook(ddp)
    watch = Watch(limit=0.0 if notebook else minutes * 60, requested=requested,
                  stop_file=os.path.abspath(stop_file) if stop_file else "")
    ddp.state.watch = watch
    if not notebook:
        _set_handlers(ddp, watch, signals)
    if watch.limit:
        ddp.state.patience = watch.limit
    tell_guard(ddp, watch={"limit": watch.limit})
    note_progress(ddp)


def _set_handlers(ddp, watch, signals):
    def handle(number, _):
        _request_stop(ddp, watch, number)

    with contextlib.suppress(ValueError):   # only the main thread may set handlers
        for name in signals:
            number = getattr(signal, name, None)   # None: not on this system
            if number is not None:
                watch.handlers[number] = signal.signal(number, handle)


def _request_stop(ddp, watch, number):
    """Handler of the stop signals."""
    if os.getpid() != ddp.state.pid:   # a forked child: do what the signal does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    name = signal.Signals(number).name
    if number == signal.SIGINT:
        if watch.interrupted and time.monotonic() - watch.interrupted > SAME_CTRL_C:
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


def stop_wanted(ddp: Ddp) -> float:
    """1.0 if this rank has been asked to stop, else 0.0: to be summed over ranks, for stop_reason.
    Rank 0 looks for the deadline and the stop file."""
    watch = ddp.state.watch
    if watch is None:
        return 0.0
    if ddp.is_main and not watch.requested:
        if time.time() >= _deadline(os.environ):
            watch.requested = "DDP_DEADLINE is reached"
        elif watch.stop_file and os.path.exists(watch.stop_file):
            watch.requested = f"{watch.stop_file} exists; remove it before the next start"
    return float(bool(watch.requested))


def note_progress(ddp: Ddp, step: int | None = None) -> None:
    """A sign of progress: the limit of start_watch begins anew. step: number of steps done; None:
    as before, as between two steps."""
    watch = ddp.state.watch
    if watch is None:
        return
    if step is not None:
        watch.step = step
    if ddp.state.guard is not None:
        tell_guard(ddp, wait=False, step=watch.step)
    elif watch.limit:
        _set_timer(watch.limit, ddp.state.record.stacks or sys.__stderr__)


def end_watch(ddp: Ddp) -> None:
    """End the watch. All ranks must then reach cleanup_ddp within its limit."""
    watch = ddp.state.watch
    ddp.state.watch = None
    if watch is None:
        return
    for number, handler in watch.handlers.items():
        signal.signal(number, handler)
    if watch.limit:
        faulthandler.cancel_dump_traceback_later()
    ddp.state.record.close()
    if watch.limit:
        tell_guard(ddp, watch={"limit": 0.0})


def cores_given() -> set[int] | None:
    """The cores that this process was started on; None: not known.

    With OMP_PROC_BIND, importing torch binds this process to one of them, and what it starts then
    inherits that one core. The guard, its parent, does not import torch, and has all of them."""
    if hasattr(os, "sched_getaffinity") and _guard_descriptor() is not None:
        return os.sched_getaffinity(os.getppid())
    return None


def worker_init(worker_id: int = 0, signals: Iterable[str] = STOP_SIGNALS,
                cores: set[int] | None = None) -> None:
    """worker_init_fn for a DataLoader. A stop signal to all processes must not end the workers:
    without them the main process would raise an error instead of saving.

    cores: what the workers may run on, see cores_given; None: what they inherit."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    for name in signals:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _deadline(env):
    """DDP_DEADLINE in epoch seconds, or infinity."""
    text = env.get("DDP_DEADLINE", "").strip()
    with contextlib.suppress(ValueError):
        deadline = float(text or "inf")
        if deadline > 1e9:   # 1e9 is in 2001; false for nan
            return deadline
    raise SetupError(f"DDP_DEADLINE={text!r} is not a time in epoch seconds. Expected for example "
                     f"$(( $(date +%s) + 3000 )).")


# ---------------------------------------------------------------- what ranks tell each other
#   tensor on the CPU, JSON, barrier  -->  gloo group `control` (None above GLOO_MAX_RANKS)
#   tensor on a device                -->  backend of the device: nccl, xccl, ccl, gloo
def _route(ddp, device):
    """(process group, device) to communicate a tensor on `device`: small tensors, which are on the
    CPU, use gloo; others, and all above GLOO_MAX_RANKS ranks, use the backend of ddp.device."""
    if device.type == "cpu" and ddp.control is not None:
        return ddp.control, device
    return dist.group.WORLD, ddp.device


def _broadcast_json(value, ddp, src):
    """broadcast of a plain value: its length as JSON, then its bytes."""
    if ddp.world_size == 1:
        return json.loads(json.dumps(value))
    data = bytearray(json.dumps(value).encode() if ddp.rank == src else b"")
    size = int(broadcast(torch.tensor([len(data)]), ddp, src))
    if ddp.rank != src:
        data = bytearray(size)
    sent = broadcast(torch.frombuffer(data, dtype=torch.uint8), ddp, src)
    return json.loads(bytes(sent.tolist()))


def first_problem(problem: str, ddp: Ddp) -> str:
    """The text of the first rank whose text is not empty, on every rank; "" if all are empty."""
    has_problem = [0.0] * ddp.world_size
    has_problem[ddp.rank] = float(bool(problem))
    has_problem = all_sum(has_problem, ddp)
    if not any(has_problem):
        return ""
    return broadcast(problem, ddp, src=has_problem.index(1.0))


# ---------------------------------------------------------------- checkpoint files
#   save:  state --> .last.pt.tmp, fsync --> rotate: last.pt -> last-1.pt --> rename to last.pt
#   load:  rank 0 reads last.pt; damaged: last-1.pt, ... --> its bytes to all ranks
def kept_checkpoint(path: str | os.PathLike, k: int) -> str | os.PathLike:
    """Name of the k-th former checkpoint: last.pt -> last-1.pt."""
    base, end = os.path.splitext(path)
    return f"{base}-{k}{end}" if k else path


def rotate(path: str, keep_last: int) -> None:
    """Rename former checkpoints, last.pt to last-1.pt and so on, to make room for a new last.pt.

    keep_last: how many there shall be, the new one included. Each file is whole under some name at
    any moment: a kill between two renames leaves a gap, which the next call fills."""
    # There is room at the first name that no file has. What is older than a gap stays.
    oldest = 0
    while oldest < keep_last - 1 and os.path.exists(kept_checkpoint(path, oldest)):
        oldest += 1
    # All names are taken: the oldest file is replaced. keep_last 1: nothing is renamed, as the new
    # file replaces last.pt itself.
    for k in range(oldest, 0, -1):
        os.replace(kept_checkpoint(path, k - 1), kept_checkpoint(path, k))


class CannotPrint(OSError):
    """Standard output cannot be written, for a reason that a person must mend."""
    retry = False
    code = BAD_INPUT


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """In this block, which prints, an error of standard output says so, such as where it goes to a
    file on a full disk. What is printed later is lost. An output that nobody reads any longer stays
    the OSError that it is: see print_line in training/log.py."""
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        if error.errno not in DISK_TROUBLES:
            raise
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CannotPrint(f"cannot write to standard output: {error.strerror}. Make room where it "
                          "goes, or send it elsewhere.") from None


class CannotSave(RuntimeError):
    """A checkpoint cannot be written, for a reason that a person must mend."""
    retry = False


# Errors of a file system that a person must mend.
DISK_TROUBLES = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the quota is used up",
                 errno.EROFS: "the file system is read-only",
                 errno.EACCES: "this user may not write there",
                 errno.EPERM: "this user may not write there"}


def disk_trouble(error: BaseException, path: str | os.PathLike, needed: int = 0) -> str:
    """Why a file cannot be written and what to do; "" if the error is of another kind.

    Args:
        error: perhaps torch's, which hides the system's: "unexpected pos" on a full disk.
        path: of the file. needed: its size in bytes, roughly; 0: not known."""
    while error is not None and getattr(error, "errno", None) not in DISK_TROUBLES:
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    folder = os.path.dirname(os.path.abspath(path))
    trouble = f"cannot write {os.fspath(path)}: {DISK_TROUBLES[error.errno]} ({error.strerror})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{trouble}. Expected a folder that can be written. Mend that, or give another one."
    sizes = []
    if needed:
        sizes.append(f"the file needs about {needed / 1e6:,.1f} MB")
    if error.errno == errno.ENOSPC:   # a quota may be less than what the disk has
        with contextlib.suppress(OSError):
            free = os.statvfs(folder)
            sizes.append(f"{free.f_bavail * free.f_frsize / 1e6:,.1f} MB are free there")
    found = f": {', '.join(sizes)}" if sizes else ""
    return f"{trouble}{found}. Make room in {folder}, or give another folder."


def _try_to_write_checkpoint(path, ddp, keep_last, state):
    """Write on rank 0. Returns None, or what is wrong: {"text", "of_disk"}."""
    state.update(world_size=ddp.world_size, versions={
        "torch": str(torch.__version__), "python": sys.version.split()[0]})
    try:
        _write_checkpoint(path, ddp, keep_last, state)
    except Exception as e:   # perhaps what torch.save cannot write, or torch.load would refuse
        trouble = disk_trouble(e, path, _bytes_of_tensors(state))
        text = trouble or f"cannot write {path}: {_in_one_line(e)}."
        return {"text": f"{text} The former checkpoint is untouched.", "of_disk": bool(trouble)}
    return None


def _bytes_of_tensors(state):
    """Bytes of all tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return 0
    return sum(map(_bytes_of_tensors, state))


def _write_checkpoint(path, ddp, keep_last, state):
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.tmp")   # a killed save may have left it
    os.makedirs(folder or ".", exist_ok=True)
    try:
        with open(temporary, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
        if unsafe:
            raise TypeError(f"it holds {', '.join(unsafe)}; expected tensors and plain types "
                            f"(float(x), x.tolist()), which torch.load(weights_only=True) reads")
        if ddp.state.damaged == os.path.realpath(path):   # replace it, and keep the good ones
            ddp.state.damaged = ""
        else:
            rotate(path, keep_last)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        handle = os.open(folder or ".", os.O_RDONLY)
        os.fsync(handle)   # the rename itself must survive a power cut
        os.close(handle)


class Checkpoint(NamedTuple):
    """A file that _read_checkpoint has read."""
    path: str | os.PathLike
    data: bytes    # of the file
    state: Any     # what save_checkpoint was given


MOST_KEPT = 100            # former checkpoints that are tried when the newest is damaged
PART_BYTES = 64 * 2**20    # of a checkpoint, sent to other ranks between two signs of progress


def _read_newest(path):
    """(the newest Checkpoint that can be read, or None; texts on the files that cannot)."""
    files = [kept_checkpoint(path, k) for k in range(MOST_KEPT)]
    files = [file for file in files if os.path.lexists(file)]   # links that lead nowhere too
    troubles = []
    for file in files or [path]:
        try:
            return _read_checkpoint(file), troubles
        except ValueError as e:
            troubles.append(str(e))
    return None, troubles


def _load_on_all_ranks(path, ddp):
    """See load_checkpoint."""
    found = None
    message = None
    if ddp.is_main:
        found, troubles = _read_newest(path)
        message = [os.fspath(found.path) if found else "", troubles,
                   len(found.data) if found else 0]
    used, troubles, size = broadcast(message, ddp)
    if not used:
        raise ValueError("\n".join(troubles))
    if troubles:
        lines = [f"ATTENTION: {trouble}" for trouble in troubles]
        print0(ddp, "\n".join([*lines, f"  Going back to {used}."]))
        ddp.state.damaged = os.path.realpath(path)
    if ddp.world_size > 1:
        data = _broadcast_bytes(found.data if found else None, size, ddp)
    state = found.state if found else torch.load(io.BytesIO(data), map_location="cpu",
                                                 weights_only=True)
    _note_checkpoint(ddp, used, state if isinstance(state, dict) else {})
    return state


def _broadcast_bytes(data, size, ddp):
    """Bytes of rank 0 on every rank. data: None on other ranks. size: how many there are."""
    copy = bytearray(data if ddp.is_main else size)
    for part in torch.frombuffer(copy, dtype=torch.uint8).split(PART_BYTES):
        note_progress(ddp)
        broadcast(part, ddp)
    return copy


def _note_checkpoint(ddp, path, state):
    """Remember the checkpoint: the last line of a failure names it."""
    ddp.state.checkpoint = path
    tell_guard(ddp, checkpoint=path + (f" (step {state['step']})" if "step" in state else ""))


def _read_checkpoint(path):
    """The Checkpoint in a file. Raises: ValueError if it cannot be read."""
    expected = "Expected a file written by save_checkpoint."
    has_end = os.path.isfile(path) or os.path.isdir(path)
    if os.path.exists(path) and not has_end:   # a device or a pipe
        raise ValueError(f"no checkpoint {path}: it is no file. {expected}")
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"no checkpoint {path}: {e.strerror}. {expected}") from None
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > len(data):   # save_checkpoint packs nothing
            raise ValueError(f"it has {len(data):,} bytes and unpacks to {unpacked:,}")
        damaged = archive.testzip()   # torch.load checks no checksums
        if damaged is None:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return Checkpoint(path, data, state)
        reason = f"it is damaged, the checksum of its record {damaged} is wrong"
    except MemoryError:   # the file may be good: an older one must not take its place
        raise
    except Exception as e:   # of many types; drop torch's advice to unset weights_only
        reason = _in_one_line(e).partition(". ")[0]
    raise ValueError(f"cannot read the checkpoint {path}: {reason}. Expected a file written by "
                     f"save_checkpoint. Use another one, or start afresh.")


# ---------------------------------------------------------------- python ddp_setup.py --doctor
ENVIRONMENT = """\
Environment that is read: the variables by which launchers tell a process its place, such as
  {launchers}
MASTER_ADDR, MASTER_PORT   where rank 0 listens; MASTER_ADDR alone means port 29500
DDP_WORLD_SIZE             the expected number of ranks (Aurora's launcher sets no size)
DDP_RANK, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE
                           with DDP_WORLD_SIZE, override every launcher
DDP_MPI4PY=0               never import mpi4py
DDP_GLOO_MAX_RANKS         with more ranks than this (256), objects, flags, barriers avoid gloo
DDP_LOG_ALL=1              print0 prints on every rank, with its number
DDP_DEADLINE               epoch seconds at which stop_reason says stop
OMP_PROC_BIND, OMP_PLACES  OpenMP's; ranks that they bind to the same cores are told
DDP_GUARD_FD               set by ddp_guard.py, for its own child (DDP_GUARD=0: no guard)

Environment that is set until cleanup_ddp, if there are several ranks: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, for other libraries, and
GLOO_SOCKET_IFNAME, if it is unset."""


def doctor(env: dict) -> int:
    """Print what this file finds here and would choose. Returns 1 if there is a PROBLEM, else 0."""
    found = _found_devices()
    mpi = None
    rows = []
    try:
        mpi = _start_mpi(env, DESTROY)
        ddp = detect_launcher(env, _place_in(mpi))
        if ddp.rank:
            return 0
        agrees = ", mpi4py agrees" if mpi else ""
        chosen = choose_device("auto", "auto", ddp.local_rank, found, ddp.world_size)
        rows += [*ddp.notes, f"rank 0 of {ddp.world_size}{agrees}", chosen[3]]
    except SetupError as e:
        rows.append(f"PROBLEM: {e}")
    finally:
        _end_mpi(mpi)
    master = env.get("MASTER_ADDR")
    if master and _resolve(master):
        rows.append(f"MASTER_ADDR: {master} is {_resolve(master)}")
    elif master:
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
        print(ENVIRONMENT.format(launchers="\n  ".join(textwrap.wrap(variables, 90))))
        return 0
    if arguments == ["--doctor"]:
        try:
            with printing():
                return doctor(dict(os.environ))
        except CannotPrint as error:
            return f"error: {error}"
    return f"usage: python {sys.argv[0]} --doctor [--help]"


# ---------------------------------------------------------------- odd machines: Intel's extension
#   XPU, torch from 2.8 on, with xccl   nothing of Intel's is imported
#   XPU, older torch                    IPEX, then oneCCL's bindings, which register backend ccl
#   ipex="on", any device               IPEX optimizes the model; if not on every rank, on none
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
        mode = "on" if ddp.device.type == "xpu" and not _has_xccl() else "off"
    if mode == "off":
        return model, optimizer
    problem = ""
    try:   # no fused step: it ignores found_inf, by which our optimizers skip bad steps
        ipex = _import_ipex()
        result = ipex.optimize(model, optimizer=optimizer, fuse_update_step=False)
    except (Exception, SystemExit) as e:   # a library that is missing, a CPU that is too old, ...
        problem = _in_one_line(e)
    problem = first_problem(problem, ddp)
    if problem:
        print0(ddp, f"IPEX not used: {problem}")
        return model, optimizer
    print0(ddp, f"IPEX {ipex.__version__} optimized the model")
    return result


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
