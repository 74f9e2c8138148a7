"""Distributed data parallel in one file: launcher -> ranks -> device -> process group.

Copy this file next to your script. It needs torch 2.8 and the standard library (and mpi4py, where
an MPI launcher has to tell several hosts where rank 0 is). The same script then runs unchanged
under `python`, `mpirun`, `mpiexec`, `srun` and `torchrun`, on CPU, CUDA and Intel XPU:

    from ddp_setup import setup_ddp, wrap_ddp, unwrap_ddp, ddp_sampler, save_checkpoint
    with setup_ddp(seed=0) as ddp:
        model = wrap_ddp(MyModel().to(ddp.device), ddp)
        sampler = ddp_sampler(data, ddp)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, batch_size=8, sampler=sampler): ...
            save_checkpoint("out/last.pt", ddp, model=unwrap_ddp(model).state_dict(), epoch=epoch)

An exception in the block ends all ranks, and is printed by the rank at fault. One process alone
starts no process group, and its exceptions are ordinary ones: it may be a test, a notebook, a trial
of a search.

What a script calls comes first, in the order in which it calls it; how it works follows, with a
picture above each section. `python ddp_setup.py` prints what is found here and would be chosen.
To stop in good order at a signal or the walltime, and to end hangs: ddp_watch.py, a second file.
"""
import atexit
import contextlib
import errno
import faulthandler
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__version__ = "1.0.0"
# Exit codes, beside 0 finished and 1 failed.
BAD_INPUT = 2      # a person must change something
STOPPED = 75       # stopped on request, work is left: the block may be left with it in good order
# Seconds.
PATIENCE = 1800.0  # for all ranks to reach a barrier, or cleanup_ddp
LAST_WORDS = 1.5   # the other ranks wait for the rank at fault, which speaks first
RANK_0_FIRST = 1.0  # and for rank 0, if all are at fault
FORWARDING = 0.5   # for a launcher to forward what was printed, before it ends all
GRACE = 20.0       # for a launcher to end this rank, or for others to leave the store
CLOSING = 60.0     # for torch and MPI to close their connections
LEFT_OVER = 3600.0  # a temporary file so old is of a save that was killed


# ---------------------------------------------------------------- what a script calls
@dataclass(frozen=True)
class Ddp:
    """This process' place in the run."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0                 # number within its host
    local_world_size: int | None = 1    # ranks on its host; None: not known before they meet
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    launcher: str = "none"
    seed: int = 0
    host: str = ""
    hosts: tuple[str, ...] = ()         # of each rank
    notes: tuple[str, ...] = ()         # what was found and chosen, with reasons
    timeout: float | None = None        # of a collective, in seconds; None: torch's own
    store: Any = field(default=None, repr=False, compare=False)   # served by rank 0; None: 1 rank
    mpi: Any = field(default=None, repr=False, compare=False)     # COMM_WORLD of mpi4py, if used
    meetings: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    pid: int = field(default_factory=os.getpid, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def place(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.host}"

    def __enter__(self) -> "Ddp":
        return self

    def __exit__(self, kind, error, tb) -> None:
        if os.getpid() != self.pid:   # a forked child of the rank
            return
        left_by_exit = isinstance(error, SystemExit) and error.code in (None, 0, STOPPED)
        if error is None or left_by_exit:
            cleanup_ddp(self)
        elif self.world_size > 1:   # one process raises as usual
            _end_by(self, error)


class SetupError(RuntimeError):
    """Setting up failed: what was found, and what to do. code: the exit code for a caller that
    catches it; 2 if a person must change something, 1 if a new start may succeed."""

    def __init__(self, text: str, code: int = BAD_INPUT):
        super().__init__(text)
        self.code = code


def setup_ddp(device: str = "auto", backend: str = "auto", seed: int = 0, ranks: int | None = None,
              timeout: float | None = None, init_timeout: float = 300.0,
              quiet: bool = False) -> Ddp:
    """Find this process' rank and device, join the other ranks, and return a Ddp.

    Several ranks can meet once in a process; one process may be set up again and again.

    Args:
        device: auto, cpu, cuda or xpu. backend: auto, nccl, gloo, xccl or ccl.
        seed: gives all ranks equal initial weights; wrap_ddp then seeds each rank differently.
        ranks: refuse any other number of ranks (as the variable DDP_WORLD_SIZE does).
        timeout: seconds a collective may take; None: torch's own limit.
        init_timeout: seconds to wait for all ranks to appear.
        quiet: do not print what was found.
    Raises: SetupError, with what was found and what to do, naming missing ranks, on every rank that
        finds it; once the ranks have met, on rank 0 only, and the others exit."""
    if not init_timeout > 0:
        raise SetupError(f"init_timeout is {init_timeout}; expected seconds, more than 0")
    if dist.is_initialized() and not setup_ddp.has_met:
        raise SetupError("torch.distributed has a process group already, perhaps of another "
                         "library. Expected none: call setup_ddp first, and leave "
                         "init_process_group to it.")
    env = dict(os.environ)
    mpi = _start_mpi(env, init_timeout)
    ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
    for name, wanted in (("ranks", ranks), ("DDP_WORLD_SIZE", _number(env, "DDP_WORLD_SIZE"))):
        if wanted not in (None, ddp.world_size):
            raise SetupError(f"{name} asks for {wanted} rank(s), but {ddp.world_size} were "
                             f"started. {'; '.join(ddp.notes)}. Start {wanted} (mpirun -n, "
                             f"srun -n, torchrun --nproc_per_node) or change {name}.")
    ddp = replace(ddp, seed=seed, host=socket.gethostname(), timeout=timeout, mpi=mpi)
    problem = ""
    try:
        ddp = _bind_device(ddp, device, backend)
    except RuntimeError as error:
        if ddp.world_size == 1:
            raise
        problem = str(error)   # perhaps of this rank alone: rank 0 tells all, see _problem_of
    if ddp.world_size > 1:
        ddp = _join(ddp, env, init_timeout, problem)
        _hook_exceptions(ddp)
    else:
        ddp = replace(ddp, hosts=(ddp.host,))
        if mpi is not None:   # it was needed to tell that there is no other rank
            atexit.register(_end_mpi, mpi)
    _seed_all(seed)
    if not quiet:
        hosts = len(set(ddp.hosts))
        print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on {hosts} host(s)", *ddp.notes,
               sep="\n  ")
    return ddp


setup_ddp.has_met = False   # other ranks, in this process


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
        options = {"gradient_as_bucket_view": True, **options}
        known = inspect.signature(DistributedDataParallel).parameters
        if "broadcast_buffers" in options and "forward_sync_buffers" in known:
            # torch 2.13 renames the option, and warns of the old name
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        if ddp.device.type == "cuda":
            options["device_ids"] = [ddp.device.index]
        model = DistributedDataParallel(model, **options)
    _seed_all(seed_for(ddp.seed, "rank", ddp.rank))
    return model


def unwrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The bare model: for state_dict, evaluation and sampling. The forward of a wrapped model may
    broadcast buffers, so a rank that calls it alone can hang."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def ddp_sampler(dataset, ddp: Ddp, train: bool = True) -> DistributedSampler | range:
    """A sampler for any dataset with a length: each item goes to one rank.

    train=True: torch's DistributedSampler, in an order of (ddp.seed, epoch); call its set_epoch.
    The epoch is cut to equal steps per rank. train=False: all items, in order. Some ranks may then
    have one item more, so a loop over them must not contain collectives.
    Raises: ValueError for fewer items than ranks."""
    if len(dataset) < ddp.world_size:
        raise ValueError(f"{len(dataset)} item(s) for {ddp.world_size} ranks; expected at least "
                         f"one each. Use fewer ranks or more data.")
    if not train:
        return range(ddp.rank, len(dataset), ddp.world_size)
    return DistributedSampler(dataset, ddp.world_size, ddp.rank, seed=ddp.seed, drop_last=True)


def gradient_sync(model: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Context for one micro-step of gradient accumulation: only the `last` one averages gradients
    over ranks."""
    if last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def print0(ddp: Ddp, *values, **options) -> None:
    """print on rank 0; on every rank, with its number, where DDP_LOG_ALL=1."""
    options = {"flush": True, **options}
    if os.environ.get("DDP_LOG_ALL") == "1" and ddp.world_size > 1:
        print(f"[rank {ddp.rank}]", *values, **options)
    elif ddp.is_main:
        print(*values, **options)


def wait_for_ranks(ddp: Ddp, limit: float) -> list[int]:
    """Wait for all ranks, in the store: it knows who has not come, which no backend tells.

    limit: seconds. Returns: the ranks that are missing then; [] if all have come. Ranks that have
        not met are out of step: they are to end, not to meet again.
    Raises: RuntimeError if rank 0, which serves the store, is gone."""
    if ddp.world_size == 1:
        return []
    number = next(ddp.meetings)   # the same on all ranks
    ddp.store.set(f"at/{ddp.rank}", str(number))
    if ddp.store.add(f"arrived/{number}", 1) == ddp.world_size:
        ddp.store.set(f"all_at/{number}", "")
        # Everybody is here, so nobody waits in an earlier meeting: the store does not grow.
        ddp.store.delete_key(f"arrived/{number - 2}")
        ddp.store.delete_key(f"all_at/{number - 2}")
    with contextlib.suppress(dist.DistStoreError):   # at the limit
        ddp.store.wait([f"all_at/{number}"], timedelta(seconds=limit))
        return []
    missing = []
    for rank in range(ddp.world_size):
        key = f"at/{rank}"
        if not ddp.store.check([key]) or int(ddp.store.get(key)) < number:
            missing.append(rank)
    return missing


def barrier(ddp: Ddp, timeout: float | None = None) -> None:
    """Wait for all ranks.

    timeout: seconds; default: that of setup_ddp, or half an hour.
    Raises: RuntimeError with the ranks that did not come."""
    limit = timeout or ddp.timeout or PATIENCE
    missing = wait_for_ranks(ddp, limit)
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
    """Sum over ranks: of a tensor, into a new one; or of a number or list of numbers, in float64 on
    the CPU, as some devices have no float64. A tensor is faster."""
    if not isinstance(value, torch.Tensor):
        values = torch.tensor(gather(value, ddp), dtype=torch.float64)
        return values.sum(0).tolist()
    if ddp.world_size == 1:
        return value.detach().clone()
    total = value.detach().to(ddp.device, copy=True)
    dist.all_reduce(total)
    return total.to(value.device)


def all_mean(value: Any, ddp: Ddp) -> Any:
    """Mean over ranks, like all_sum. Correct only if every rank has the same share of the data."""
    if not isinstance(value, torch.Tensor):
        values = torch.tensor(gather(value, ddp), dtype=torch.float64)
        return values.mean(0).tolist()
    return all_sum(value, ddp) / ddp.world_size


def seed_for(*parts) -> int:
    """Integer in [0, 2**63) from plain values: equal parts give equal seeds, everywhere."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def save_checkpoint(path: str | os.PathLike, ddp: Ddp, keep_last: int = 1, **state) -> None:
    """Write `state` to `path`, from rank 0: temporary name, fsync, rename. A collective.

    Args:
        keep_last: how many to keep, this one included; the former ones as path-1, path-2, ...
        state: tensors and plain types, nested.
    Raises: CannotSave, on all ranks, for a value that is not of a plain type, or if the file cannot
        be written; the former file is then untouched."""
    problem = ""
    if ddp.is_main:
        try:
            _write_checkpoint(os.fspath(path), keep_last, state)
        except Exception as error:   # of the disk, or what torch.load would refuse
            problem = f"cannot write {path}: {_in_one_line(_behind(error))}"
    problem = broadcast(problem, ddp)
    if problem:
        raise CannotSave(f"{problem}. The former checkpoint is untouched.")


class CannotSave(RuntimeError):
    """A checkpoint cannot be written, for a reason that a person must mend."""


def load_checkpoint(path: str | os.PathLike, ddp: Ddp | None = None) -> Any:
    """Read what save_checkpoint wrote; tensors come on the CPU.

    With ddp, a collective: it goes back to the former file if the newest is damaged, see
    newest_checkpoint. Each rank reads the file itself where all have it; else rank 0 sends it.
    Raises: ValueError, on all ranks, for a file that is missing, damaged (each record has a
        checksum), or holds more than tensors and plain types."""
    if ddp is None:
        return _read_checkpoint(os.fspath(path))
    path = newest_checkpoint(path, ddp)
    own = _records_of(path)
    all_have_it = all(gather(own == broadcast(own, ddp), ddp))
    state = None
    problem = ""
    if ddp.is_main or all_have_it:
        try:
            state = _read_checkpoint(path)
        except ValueError as error:
            problem = str(error)
    for message in gather(problem, ddp):
        if message:
            raise ValueError(message)
    return state if all_have_it else broadcast(state, ddp)


def newest_checkpoint(path: str | os.PathLike, ddp: Ddp) -> str:
    """Path of the newest whole checkpoint: `path`, or path-1, path-2, ... where rank 0 finds newer
    ones damaged. These are renamed to NAME.damaged, as the next save would put one in place of a
    good one. A collective.

    Raises: ValueError, on all ranks, with what is wrong with each, if none is whole."""
    found = None
    if ddp.is_main:
        found = _find_whole(os.fspath(path))
    used, troubles = broadcast(found, ddp)
    if used is None:
        raise ValueError("\n".join(troubles))
    for trouble in troubles:
        print0(ddp, f"ATTENTION: {trouble} Going back to {used}.")
    return used


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A binary file to write: a kill at any moment leaves the old file or the new one. Of two
    processes that write the same path, the last one wins."""
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        handle = os.open(folder or ".", os.O_RDONLY)
        os.fsync(handle)   # the rename itself must survive a power cut
        os.close(handle)


def abort(ddp: Ddp, text: str, code: int = 1) -> None:
    """Print `text` once, with the rank, and end every rank with this exit code, as far as the
    launcher passes it on. One process raises SystemExit(code)."""
    if ddp.world_size > 1:
        await_culprit(ddp)
        end_ranks(ddp, f"[{ddp.place}] {text}", code)
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def cleanup_ddp(ddp: Ddp, timeout: float = PATIENCE) -> None:
    """Leave in good order: wait for the others, destroy the group, finalise MPI. Harmless when
    called twice. `with setup_ddp()` calls it.

    If some do not come within `timeout` seconds, they are named, and all are ended."""
    if ddp.world_size == 1 or not dist.is_initialized():
        return
    with _time_limit(timeout + GRACE):
        missing = wait_for_ranks(ddp, timeout)
    if missing:
        abort(ddp, f"rank(s) {_listed(missing)} of {ddp.world_size} did not come to cleanup_ddp "
                   f"within {timeout:.0f} s; expected all")
    with _time_limit(CLOSING):
        _await_gloo_threads()
        dist.destroy_process_group()
        with contextlib.suppress(RuntimeError):   # a rank that is gone needs the store no more
            if ddp.is_main:   # it serves the store, so it leaves last
                others = [f"gone/{rank}" for rank in range(1, ddp.world_size)]
                ddp.store.wait(others, timedelta(seconds=GRACE))
            else:
                ddp.store.set(f"gone/{ddp.rank}", "")
        _end_mpi(ddp.mpi)


# ---------------------------------------------------------------- launchers
#   mpirun, srun, torchrun, ...
#      |  starts N processes, and tells each its place by variables of its own
#      v
#   environment  --  the first complete row of LAUNCHERS  -->  rank, size, local rank
#                    rows that agree with it lend it what it lacks
class Launcher(NamedTuple):
    """The environment variables by which a launcher tells a process its place. Where a field lists
    several names, separated by blanks, the first one that is set counts."""
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    launch: str = ""    # variables that together identify a launch
    needs: str = ""     # other variables of which one must be set, or this row is skipped
    own: str = ""       # a variable that nobody else sets, neither srun nor a person
    mpi: bool = False   # its ranks are MPI processes: mpi4py may be used


BY_HAND = "DDP_* variables"
HYDRA = "MPICH or Intel MPI (Hydra)"
SLURM = "Slurm step"
# In this order: the inner launcher of torchrun in srun, or mpirun in sbatch, comes first.
LAUNCHERS = {
    BY_HAND: Launcher("DDP_RANK", "DDP_WORLD_SIZE", "DDP_LOCAL_RANK", "DDP_LOCAL_WORLD_SIZE"),
    "torchrun": Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                         launch="TORCHELASTIC_RUN_ID", needs="MASTER_ADDR LOCAL_RANK",
                         own="TORCHELASTIC_RUN_ID"),
    "Open MPI": Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                         launch="PMIX_NAMESPACE", own="OMPI_COMM_WORLD_RANK", mpi=True),
    # Size: Polaris sets PMI_SIZE, Aurora none. Slurm's cray_shasta plugin sets PALS_RANKID too.
    "PALS": Launcher("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID PMI_LOCAL_RANK PMIX_LOCAL_RANK",
                     "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", launch="PALS_APID", mpi=True),
    HYDRA: Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK",
                    "MPI_LOCALNRANKS PMI_LOCAL_SIZE", own="MPI_LOCALRANKID", mpi=True),
    SLURM: Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID",
                    launch="SLURM_JOB_ID SLURM_STEP_ID SLURM_RESTART_COUNT", needs="SLURM_STEP_ID"),
}
JOBS = "SLURM_JOB_ID PBS_JOBID"   # of batch systems; PBS' holds the index within an array
PLACE = ("rank", "size", "local_rank", "local_size")


def detect_launcher(env: dict, mpi: tuple[int, int] | None = None) -> Ddp:
    """Which rank is this process? A pure function of the environment.

    Args:
        env: mapping of environment variables.
        mpi: (rank, size) of mpi4py's COMM_WORLD, where an MPI started this process.
    Returns: a Ddp that knows its place (a plain process: rank 0 of 1).
    Raises: SetupError, with what was seen, where variables are incomplete or disagree. Going on as
        a single process would end with exit code 0 and a wrong result."""
    launcher, place = _find_place(env)
    if launcher is None:
        return _plain_process(env)
    rank, size, local_rank, local_size = (place[key] for key in PLACE)
    if size is None and mpi is not None and mpi[0] == rank:
        size = mpi[1]
    problem = ""
    if mpi not in (None, (rank, size)):
        problem = (f"says rank {rank} of {size or '?'}, mpi4py says rank {mpi[0]} of {mpi[1]}. "
                   f"mpi4py was probably built for another MPI: reinstall it, or set DDP_MPI4PY=0")
    elif size is None:
        problem = (f"started rank {rank} but sets no number of ranks. Export DDP_WORLD_SIZE next "
                   f"to the mpiexec call (nodes x ranks per node), or install mpi4py. If no "
                   f"launcher runs, unset what is left over")
    elif local_rank is None:
        problem = (f"started rank {rank} of {size}, but no variable tells its number within the "
                   f"host, for example {LAUNCHERS[launcher].local_rank}. Unset what was exported "
                   f"by hand, or set DDP_RANK, DDP_WORLD_SIZE and DDP_LOCAL_RANK")
    elif not 0 <= rank < size or not 0 <= local_rank < (local_size or size):
        problem = f"says rank {rank}, local rank {local_rank} of {size}; expected 0 to {size - 1}"
    if problem:
        raise SetupError(f"{launcher} {problem}. {_seen(env)}")
    notes = (f"launcher {launcher}: rank {rank} of {size}, local rank {local_rank}",)
    if size == 1:   # its step may be salloc's own shell
        local_size = 1
    return Ddp(rank, size, local_rank, local_size, launcher=launcher, notes=notes)


def _find_place(env):
    """(name, {key of PLACE: number or None}) of the first row that is complete, with what other
    rows lend it; (None, {}): no launcher.

    Rank 0 of 1 counts only if torchrun or DDP_* variables say it: salloc's own shell has it too,
    and PMI that a step of one task has left."""
    rows = {}
    for name, row in LAUNCHERS.items():
        has_needed = any(env.get(needed, "").strip() for needed in row.needs.split())
        if has_needed or not row.needs:   # RANK alone may mean anything
            rows[name] = {key: _number(env, getattr(row, key)) for key in PLACE}
    if SLURM in rows and _number(env, "SLURM_STEP_NUM_NODES") == 1:
        rows[SLURM]["local_size"] = rows[SLURM]["size"]
    rows = {name: place for name, place in rows.items() if place["rank"] is not None}
    first = (None, {})
    for name, place in rows.items():
        place = _completed(place, rows.values(), env)
        on_purpose = name == BY_HAND or (name == "torchrun" and _is_own(name, env))
        if place["rank"] == 0 and place["size"] == 1 and not on_purpose:
            continue
        if place["size"] is not None and place["local_rank"] is not None:
            return name, place
        if first[0] is None:   # if no row is complete, the caller names what this one lacks
            first = (name, place)
    return first


def _completed(place, rows, env):
    """A place, with what it lacks from rows that may be of the same launch, as srun and its PMI."""
    for other in rows:
        sizes = {place["size"], other["size"]} - {None}
        if other["rank"] == place["rank"] and len(sizes) <= 1:
            place = {key: other[key] if own is None else own for key, own in place.items()}
    if place["size"] is None:
        place["size"] = _number(env, "DDP_WORLD_SIZE")
    return place


def _is_own(launcher, env):
    """Whether a launcher itself has set its variables, and not srun or a person."""
    return bool(env.get(LAUNCHERS[launcher].own, "").strip())


def _plain_process(env):
    """Place of a process that no launcher has started with others."""
    notes = ["launcher none: one process"]
    if env.get("SLURM_JOB_ID") and (_number(env, "SLURM_NTASKS") or 1) > 1:
        notes.append(f"ATTENTION: Slurm job {env['SLURM_JOB_ID']} has {env['SLURM_NTASKS']} tasks, "
                     f"and this is ONE process in its shell. To start all: srun python "
                     f"{os.path.basename(sys.argv[0]) or '...'}")
    return Ddp(notes=tuple(notes))


def _number(env, names):
    """The integer in the first of several variables that is set; None: none is."""
    for name in names.split():
        text = env.get(name, "").strip()
        if not text:
            continue
        if not re.fullmatch(r"-?[0-9]+", text):
            raise SetupError(f"{name}={text!r} is not an integer. Expected the number that the "
                             f"launcher sets; unset it if it was exported by hand.")
        return int(text)
    return None


def _seen(env):
    """The launchers' variables that are set, for messages."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"}
    for row in LAUNCHERS.values():
        names.update(f"{row.rank} {row.size} {row.local_rank} {row.local_size}".split())
    shown = " ".join(f"{name}={env[name]}" for name in sorted(names) if env.get(name, "").strip())
    return f"Seen: {shown or 'none'}"


def slurm_step(ddp: Ddp) -> str:
    """Slurm's step, such as 77.0, if srun itself has started these ranks: it is to be cancelled if
    one fails. "" at a terminal, where the first task may be a person's shell (srun --pty)."""
    return "" if os.isatty(0) else _step_of(ddp, os.environ)


def _step_of(ddp, env):
    """The step in which srun has started each of these ranks, or "".

    Rank 0 of a torchrun or mpirun in a shell of `srun -n 4` looks like task 0 of that step. So a
    launcher that knows where its ranks are is never taken for a step."""
    row = LAUNCHERS[SLURM]
    if not env.get("SLURM_STEP_ID") or ddp.launcher not in LAUNCHERS:
        return ""
    if (_number(env, row.rank), _number(env, row.size)) != (ddp.rank, ddp.world_size):
        return ""
    knows_where = env.get("MASTER_ADDR") or ddp.on_one_host
    if _is_own(ddp.launcher, env) and knows_where:
        return ""
    return f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"


# ---------------------------------------------------------------- MPI, where it must help
def _start_mpi(env, limit):
    """COMM_WORLD of mpi4py; None where it is absent, unwanted or not needed. Importing it calls
    MPI_Init, which hangs or gives a wrong rank in a process that no MPI launcher started."""
    launcher, place = _find_place(env)
    if launcher is None or not LAUNCHERS[launcher].mpi or env.get("DDP_MPI4PY") == "0":
        return None
    ddp = Ddp(place["rank"], place["size"], 0, place["local_size"], launcher=launcher)
    if place["size"] is not None and (env.get("MASTER_ADDR") or _step_of(ddp, env)):
        return None   # these tell where rank 0 is
    try:
        from mpi4py import rc  # an ImportError too for the empty folder of a former install
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


# ---------------------------------------------------------------- devices, backends, seeds
#   device, backend     \
#                        choose_device  -->  cuda:1 with nccl, xpu:3 with xccl, cpu with gloo
#   torch.accelerator   /                    or a refusal that says what is there
#
#   rank with local rank r  -->  device r modulo the number of visible ones: a launcher may let a
#                                rank see all devices of its host, some, or only its own one
# What each backend serves; of those that serve a device, the first one is the default. nccl-legacy:
# what torch 2.15 calls the nccl of before.
BACKENDS = {"nccl": ("cuda",), "nccl-legacy": ("cuda",), "gloo": ("cpu", "cuda"),
            "xccl": ("xpu",), "ccl": ("xpu", "cpu")}


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
    asked = f"device {device}, backend {backend}"
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
        raise SetupError(f"asked for {asked}: {problem}. Available here: {here}. Choose auto for "
                         f"both, or among these.")
    if kind == "cpu":
        return torch.device("cpu"), chosen, f"device cpu; backend {chosen} (asked for {asked})"
    index = local_rank % found[kind]
    reason = f"device {kind}:{index} of {found[kind]}; backend {chosen} (asked for {asked})"
    return torch.device(kind, index), chosen, reason


def _found_devices(backend="auto"):
    """What choose_device needs to know of this machine."""
    found = {"backends": []}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        found[accelerator.type] = torch.accelerator.device_count()
    if backend == "ccl" or (found.get("xpu") and not dist.is_backend_available("xccl")):
        _import_oneccl()
    found["backends"] = [name for name in BACKENDS if dist.is_backend_available(name)]
    return found


def _bind_device(ddp, device, backend):
    """A Ddp with its device and backend, as choose_device chooses them."""
    if backend == "xpu":   # as earlier scripts called the best one for an XPU
        device = "xpu"
        backend = "auto"
    found = _found_devices(backend)
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


def _seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)   # on every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


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
    port = _number(env, "MASTER_PORT") or 0
    if not 0 <= port < 1 << 16:   # 10000 + a job's number may be too large
        raise SetupError(f"MASTER_PORT={port} is no port; expected 1024 to 65535. Leave it unset "
                         f"to have one found.")
    if env.get("MASTER_ADDR"):
        host = _seen_from_outside(ddp, env["MASTER_ADDR"])
        return Address(host, port or 29500, "from MASTER_ADDR")
    if ddp.mpi is not None:
        host = LOOPBACK if ddp.on_one_host else _own_address()
        return Address(host, port, "by MPI broadcast")
    nodes = ""
    if _step_of(ddp, env):
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if ddp.on_one_host:
        host = LOOPBACK
    elif nodes:
        host = _seen_from_outside(ddp, _first_host(nodes))
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
    name = "-".join([*jobs, _launch_name(ddp, env), _launch_of_hydra(ddp, env)])
    return 10000 + seed_for(f"{ddp.launcher} {name} {ddp.world_size}") % 20000


def _launch_name(ddp, env):
    """What tells this launch from others: the identifiers that its launcher gives to all ranks.
    Hydra gives none, but passes its environment on, and so the job's id, which tells two members of
    a job array apart. Ranks that other launchers start by ssh may lack that."""
    row = LAUNCHERS[ddp.launcher]
    names = f"{row.launch} TORCHELASTIC_RESTART_COUNT"
    if row.mpi and not row.launch:
        names += f" {JOBS}"
    if _step_of(ddp, env):   # perhaps beside another row
        names += f" {LAUNCHERS[SLURM].launch}"
    return "-".join(env[name] for name in names.split() if env.get(name))


def _launch_of_hydra(ddp, env):
    """What tells a launch of Hydra from others on its host: Intel's has a name, and all ranks of
    MPICH's inherit one socket. "" for other launchers."""
    if ddp.launcher != HYDRA or not ddp.on_one_host:
        return ""
    with contextlib.suppress(KeyError, ValueError, OSError):
        return env.get("I_MPI_HYDRA_UUID") or str(os.fstat(int(env["HYDI_CONTROL_FD"])).st_ino)
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
#           torch version, problem                                         shares a device? ...
#                  <-------------------  verdict  <----------------------  hosts; or the problem
#   read/R, of a problem  ------------>  all read/R  ------------------->  raises it
#
#   then each rank makes the process group
def _join(ddp, env, limit, problem):
    """Meet all ranks in the store, check that they fit together, make the process group.

    limit: seconds. problem: what this rank has to report instead of joining, or ""."""
    if setup_ddp.has_met:
        raise SetupError("setup_ddp was called a second time. Several ranks can meet once in a "
                         "process: expected one call, around all that they do.")
    setup_ddp.has_met = True
    store, address = _open_store(ddp, env, limit)
    # torchrun's agent keeps its store over restarts; and two runs may be given one port
    prefix = f"ddp/{_launch_name(ddp, env)}"
    store = dist.PrefixStore(prefix, store)
    if store.add(f"started/{ddp.rank}", 1) > 1:   # joining would end the run that is there
        raise SetupError(f"another run has met at {address}, found {address.source}. Expected a "
                         f"port of its own for each run. Leave MASTER_ADDR and MASTER_PORT unset "
                         f"to have one found, or choose another one. Was this process started by "
                         f"a rank, whose variables it has inherited?")
    report = {"host": ddp.host, "backend": ddp.backend, "torch": torch.__version__,
              "problem": problem, "device": None if problem else _device_id(ddp.device)}
    store.set(f"here/{ddp.rank}", json.dumps(report))
    if ddp.is_main:
        store.set("verdict", json.dumps(_judge(store, ddp.world_size, limit)))
    try:   # rank 0 gives up earlier and says why: this wait fails only if it is gone
        store.wait(["verdict"], timedelta(seconds=limit + GRACE))
    except RuntimeError:
        raise SetupError("rank 0 ended while the ranks were meeting. Expected it to stay; look "
                         "for its own message.", code=1) from None
    verdict = json.loads(store.get("verdict"))
    if verdict["problem"]:
        _leave_with(verdict, store, ddp)
    hosts = verdict["hosts"]
    ddp = replace(ddp, store=store, hosts=tuple(hosts),
                  local_world_size=ddp.local_world_size or hosts.count(ddp.host),
                  notes=(*ddp.notes, f"rank 0 at {address}, found {address.source}"))
    _set_environment(ddp, address)
    # A connection of its own for the group: while a rank waits in ours, NCCL's watchdog uses this.
    _make_group(ddp, dist.PrefixStore(prefix, _connect(address, limit)), limit)
    return ddp


def _open_store(ddp, env, limit):
    """Connect to rank 0's TCPStore. Returns it, and its Address.

    Rank 0 opens its socket first. With mpi4py it then broadcasts the address, or its error."""
    address = _place_of_rank_0(ddp, env)
    by_agent = ddp.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None
    problem = ""
    if ddp.is_main and not by_agent:
        try:   # at this address only; for port 0 the kernel chooses a free port
            listener = socket.create_server((address.host, address.port), backlog=4096)
            host, port = listener.getsockname()
            address = address._replace(host=host, port=port)
        except OSError as error:
            problem = (f"rank 0 on {ddp.host} cannot listen on {address}: {error.strerror}. "
                       f"Expected an address of rank 0's host and a free port. Leave MASTER_ADDR "
                       f"and MASTER_PORT unset to have them found, or choose another port.")
    if ddp.mpi is not None:
        host, port, problem = ddp.mpi.bcast((address.host, address.port, problem), root=0)
        address = Address(host, port, address.source)
    if problem:
        raise SetupError(problem)
    if listener is None:
        _await_listener(ddp, address, limit)
        return _connect(address, limit), address
    return dist.TCPStore(address.host, address.port, None, True, timedelta(seconds=limit),
                         wait_for_workers=False, master_listen_fd=listener.detach()), address


def _await_listener(ddp, address, limit):
    """Wait until rank 0 listens. TCPStore would fail with a long C++ stack trace instead."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with socket.create_connection((address.host, address.port), 5.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"rank 0 cannot be reached at {address} within {limit:.0f} s ({error}). "
                    f"Expected it to listen there. Did it start? Is MASTER_ADDR right? Try `ping "
                    f"{address.host}` from {ddp.host}.", code=1) from None
        time.sleep(0.05)


def _connect(address, limit):
    """A client of the store at this Address."""
    with _time_limit(limit + GRACE):   # it waits for a silent program without end
        return dist.TCPStore(address.host, address.port, None, False, timedelta(seconds=limit),
                             wait_for_workers=False)


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
    problems = {rank: report["problem"] for rank, report in reports.items() if report["problem"]}
    if problems:
        first, text = min(problems.items())
        alike = [rank for rank in problems if problems[rank] == text]
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
                    f"the mask (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK), or choose device "
                    f"cpu."), BAD_INPUT
    for what in ("backend", "torch"):
        values = sorted({report[what] for report in reports.values()})
        if len(values) > 1:
            return (f"the ranks differ in {what}: {', '.join(values)}; expected the same on all. "
                    f"Choose device and backend, and one environment for all hosts."), BAD_INPUT
    return "", 0


def _leave_with(verdict, store, ddp):
    """End because of rank 0's verdict, which rank 0 alone raises."""
    if not ddp.is_main:
        store.set(f"read/{ddp.rank}", "")
        time.sleep(GRACE)   # when rank 0 exits, launchers end this one
        os._exit(verdict["code"])
    others = [f"read/{rank}" for rank in range(1, ddp.world_size)
              if store.check([f"here/{rank}"])]
    with contextlib.suppress(RuntimeError):   # the store ends with rank 0: they must read it first
        store.wait(others, timedelta(seconds=GRACE))
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


def _make_group(ddp, store, limit):
    """Make torch's process group. limit: seconds, as some backends wait without one.

    device_id is for NCCL alone: with xccl, groups could not be made or split then (pytorch issues
    162237 and 186548)."""
    timeout = None if ddp.timeout is None else timedelta(seconds=ddp.timeout)
    bind = {"device_id": ddp.device} if ddp.backend.startswith("nccl") else {}
    with _time_limit(limit):
        dist.init_process_group(ddp.backend, store=store, rank=ddp.rank, timeout=timeout,
                                world_size=ddp.world_size, **bind)


def _listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


@contextlib.contextmanager
def _time_limit(seconds):
    """Print the stacks of all threads and end this process, if the block takes longer. The timer
    of faulthandler is in C, so it works even while a library call holds the GIL."""
    # No timer is set if stderr is no real file, or `seconds` is more than a timer can hold.
    with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError, OverflowError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- one of several fails, all end
#   rank at fault       prints its error at once if it is rank 0, else after 1.5 s
#   the other ranks     lose it, in a collective: their error is a RuntimeError, so they wait 1.5 s
#                       too, or 2.5, in which the launcher mostly ends them
#   launcher            ends all for an exit code (torchrun, Open MPI), or is asked to
def await_culprit(ddp: Ddp, error: BaseException | None = None) -> None:
    """Give another rank, which may be the one at fault, time to speak first.

    error: of this rank. Torch's backends raise RuntimeErrors when they lose another one."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    perhaps_lost = isinstance(error, RuntimeError) and not out_of_memory
    if perhaps_lost or not ddp.is_main:
        time.sleep(LAST_WORDS)
    if perhaps_lost and not ddp.is_main:   # of all ranks with one error, rank 0 speaks
        time.sleep(RANK_0_FIRST)


def words_of(error: BaseException) -> tuple[str, int]:
    """(what is to be printed of an error that ends all ranks, exit code)."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)", 130
    if not isinstance(error, SystemExit):
        return "".join(traceback.format_exception(error)).rstrip(), 1
    if isinstance(error.code, int):
        return f"left with exit code {error.code}", error.code
    return str(error.code), 1


def end_ranks(ddp: Ddp, text: str, code: int, slurm_signal: str = "") -> None:
    """Print `text`, and end all ranks, as far as the launcher can be asked to.

    slurm_signal: by which a step of Slurm is ended; "": SIGKILL, after which srun itself ends with
        137, whatever the code of this rank."""
    with contextlib.suppress(OSError, ValueError):   # nobody reads it any more
        sys.stdout.flush()
        print(f"\n{text}", file=sys.stderr, flush=True)
    time.sleep(FORWARDING)
    step = slurm_step(ddp)
    if step and slurm_signal:
        _scancel("--signal", slurm_signal, step)
        os._exit(code)
    if "PMI_FD" in os.environ:   # MPICH and Intel MPI
        with contextlib.suppress(OSError, ValueError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
    elif ddp.mpi is not None:
        ddp.mpi.Abort(code)
    if step:
        _scancel(step)
    os._exit(code % 256 or 1)


def _scancel(*words):
    with contextlib.suppress(OSError, subprocess.SubprocessError):   # it is missing, or hangs
        subprocess.run(["scancel", *words], timeout=GRACE, stderr=subprocess.DEVNULL)


def _end_by(ddp, error):
    await_culprit(ddp, error)
    text, code = words_of(error)
    end_ranks(ddp, f"[{ddp.place}] {text}", code)


def _hook_exceptions(ddp):
    """Have an exception that nobody catches, outside of `with ddp`, end all ranks too."""
    before = sys.excepthook

    def end_all(kind, error, tb):
        if dist.is_initialized() and os.getpid() == ddp.pid:   # not after cleanup_ddp
            _end_by(ddp, error)
        before(kind, error, tb)

    sys.excepthook = end_all


def _in_one_line(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _await_gloo_threads():
    """Wait until gloo's threads are idle. They free a collective's tensors after it has returned
    and need the GIL for it: if Python shuts down meanwhile, they abort the process."""
    for _ in range(1000):
        time.sleep(0.01)   # this releases the GIL
        with contextlib.suppress(OSError):   # a thread that has ended
            if not any(b" (pt_gloo_runloop) R " in file.read_bytes()
                       for file in Path("/proc/self/task").glob("*/stat")):
                return


# ---------------------------------------------------------------- checkpoint files
#   save:  state --> .last.pt.PID.tmp, fsync --> rotate: last.pt -> last-1.pt --> rename to last.pt
#   load:  last.pt; damaged: last.pt -> last.pt.damaged, and last-1.pt is read
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


def _write_checkpoint(path, keep_last, state):
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    _remove_left_over(folder or ".", f".{name}.")
    with whole_file(path) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())   # before anything is renamed
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
        if unsafe:
            raise TypeError(f"it holds {', '.join(unsafe)}; expected tensors and plain types "
                            f"(float(x), x.tolist()), which torch.load(weights_only=True) reads")
        _rotate(path, keep_last)


def _remove_left_over(folder, begin):
    """Remove temporary files of saves that were killed: they have the size of a checkpoint."""
    for entry in os.scandir(folder):
        if entry.name.startswith(begin) and entry.name.endswith(".tmp"):
            with contextlib.suppress(OSError):   # another process has removed or renamed it
                if entry.stat().st_mtime < time.time() - LEFT_OVER:
                    os.unlink(entry.path)


def _behind(error):
    """The system's error behind torch's, which on a full disk says "unexpected pos"."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _read_checkpoint(path):
    """What save_checkpoint was given. Raises: ValueError."""
    try:
        reason = _damage_of(path)   # torch.load checks no checksums
        if not reason:
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:   # of many types; drop torch's advice to unset weights_only
        reason = _in_one_line(error).partition(". ")[0]
    raise ValueError(f"cannot read the checkpoint {path}: {reason}. Expected a file written by "
                     f"save_checkpoint. Use another one, or start afresh.")


def _damage_of(path):
    """What is wrong with the content of a checkpoint's file, or "". Raises: OSError."""
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
    except MemoryError:   # the file itself may be good
        raise
    except Exception as error:   # of many types, by what is damaged; EINVAL: a wrong offset in it
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        return _in_one_line(error)
    return f"it is damaged, the checksum of its record {record} is wrong" if record else ""


def _find_whole(path):
    """(path of the newest checkpoint that is whole, or None; what is wrong with newer ones)."""
    troubles = []
    damaged = []   # (path, its number in the file system)
    file = path
    while file == path or os.path.lexists(file):
        try:
            number = os.stat(file).st_ino
            reason = _damage_of(file)
            if not reason:
                _set_aside(damaged)
                return file, troubles
            damaged.append((file, number))
        except OSError as error:
            reason = _in_one_line(error)
        troubles.append(f"cannot read the checkpoint {file}: {reason}.")
        file = _kept(path, len(troubles))
    return None, troubles


def _set_aside(damaged):
    """Rename damaged checkpoints, unless another process has put a new file in their place."""
    for file, number in damaged:
        with contextlib.suppress(OSError):
            if os.stat(file).st_ino == number:
                os.replace(file, f"{file}.damaged")


def _records_of(path):
    """Names, sizes and checksums of a checkpoint's records, as a hash: equal for its copies on
    other hosts. None: there is no such file here."""
    try:
        with zipfile.ZipFile(path) as file:
            records = [(part.filename, part.file_size, part.CRC) for part in file.infolist()]
    except (OSError, zipfile.BadZipFile):
        return None
    return hashlib.blake2b(repr(records).encode()).hexdigest()


# ---------------------------------------------------------------- Intel's extension, and oneCCL
#   XPU, torch from 2.8 on, with xccl   nothing of Intel's is imported
#   XPU, a torch without xccl           IPEX, then oneCCL's bindings, which register backend ccl
#   mode "on", any device               IPEX optimizes the model; if not on every rank, on none
def optimize_with_ipex(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ddp: Ddp,
                       mode: str = "auto") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """(model, optimizer) as ipex.optimize returns them, or as given if IPEX is not wanted or does
    not work. Call it on all ranks, after making the optimizer and before wrap_ddp.

    What IPEX returns are copies: do not use the old ones. If it fails on any rank, all go on
    without it, and rank 0 prints why. The weights keep names, shapes and float32.

    mode: on, off, or auto, which means on for an XPU whose torch has no xccl."""
    if mode == "auto":
        mode = "on" if ddp.device.type == "xpu" and ddp.backend == "ccl" else "off"
    if mode == "off":
        return model, optimizer
    problem = ""
    try:   # no fused step: it ignores found_inf, by which an optimizer skips a bad step
        ipex = _import_ipex()
        result = ipex.optimize(model, optimizer=optimizer, fuse_update_step=False)
    except (Exception, SystemExit) as error:   # a missing library, a CPU that is too old, ...
        problem = _in_one_line(error)
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


def _import_oneccl():
    """Import oneCCL's bindings, which register the backend ccl; what fails is printed."""
    try:
        if torch.xpu.is_available():
            _import_ipex()   # first: the XPU part of oneCCL needs it
        import oneccl_bindings_for_pytorch  # noqa: F401  (it registers the backend)
    except (Exception, SystemExit) as error:   # not installed, or made for another torch
        print(f"backend ccl is not usable: {_in_one_line(error)}", file=sys.stderr)


if __name__ == "__main__":   # what is found here, and would be chosen
    try:
        here = _bind_device(detect_launcher(dict(os.environ)), "auto", "auto")
    except SetupError as error:
        sys.exit(f"PROBLEM: {error}")
    print0(here, f"ddp_setup.py {__version__}, Python {sys.version.split()[0]}, "
           f"torch {torch.__version__}", *here.notes,
           f"{socket.gethostname()}, {_own_address()} on {_interface_of(_own_address())}",
           _seen(os.environ), sep="\n")
