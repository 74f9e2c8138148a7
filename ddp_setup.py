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
a run also stops in good order on a signal, before the walltime, or on a STOP file.

    place       Ddp, detect_launcher, choose_device, setup_ddp (raises SetupError), cleanup_ddp
    training    wrap_ddp, unwrap_ddp, gradient_sync, ddp_sampler, seed_for, worker_init,
                optimize_with_ipex
    ranks       barrier, broadcast, all_sum, all_mean, print0
    precision   choose_dtype, autocast, grad_scaler
    stopping    watch_run, stop_wanted, stop_reason, beat, close_run, abort
    files       save_checkpoint, load_checkpoint

The file is long as each wait has an end, and each refusal says what to do. To follow a start, read
_setup, _join and _meet. `python ddp_setup.py --doctor` prints what it finds here and would choose.

When a rank fails, it has the launcher end the others, see _end_others. A timer ends a hang. With
ddp_guard.py as parent of each rank a killed rank ends the run too; the last line names the rank.

Environment read: the launcher variables of LAUNCHERS, and
  MASTER_ADDR, MASTER_PORT  where rank 0 listens; MASTER_ADDR alone means port 29500
  DDP_WORLD_SIZE            the expected number of ranks (Aurora's launcher sets no size)
  DDP_RANK, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE   with DDP_WORLD_SIZE, override every launcher
  DDP_MPI4PY=0              never import mpi4py
  DDP_GLOO_MAX_RANKS        with more ranks than this (256), objects, flags and barriers avoid gloo
  DDP_LOG_ALL=1             print0 prints on every rank, with its number
  DDP_DEADLINE              epoch seconds at which stop_reason says stop
  DDP_GUARD_FD              set by ddp_guard.py, for its own child (DDP_GUARD=0: no guard)
Environment set until cleanup_ddp, if there are several ranks: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, for other libraries; GLOO_SOCKET_IFNAME, if unset.
"""
import atexit
import contextlib
import faulthandler
import hashlib
import importlib.metadata
import inspect
import io
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__all__ = [
    "AGAIN", "BAD_INPUT", "Ddp", "SetupError", "abort", "all_mean", "all_sum", "autocast",
    "barrier", "beat", "broadcast", "choose_device", "choose_dtype", "cleanup_ddp", "close_run",
    "ddp_sampler", "detect_launcher", "grad_scaler", "gradient_sync", "load_checkpoint",
    "optimize_with_ipex", "print0", "save_checkpoint", "seed_for", "setup_ddp", "stop_reason",
    "stop_wanted", "unwrap_ddp", "watch_run", "worker_init", "wrap_ddp"]

# Gloo connects each rank to every other by 2 sockets, and many sites allow only 1,024 open files.
# Above this number of ranks, objects, flags and barriers use the device's own backend.
GLOO_MAX_RANKS = 256
AGAIN, HANG, BAD_INPUT, INTERRUPTED = 75, 70, 2, 130   # exit codes, beside 0 finished and 1 failed
# Time limits and pauses, in seconds.
CONNECT = 5.0           # for one attempt to connect to rank 0
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


# ---------------------------------------------------------------- this process' place
@dataclass
class State:
    """The part of a Ddp that changes during a run."""
    pid: int = field(default_factory=os.getpid)       # of the rank, not of its forked children
    hosts: list = field(default_factory=list)         # host name of each rank
    store: object = None                              # torch's store, which rank 0 serves
    mpi: object = None                                # COMM_WORLD of mpi4py
    ipex: str = "auto"                                # see optimize_with_ipex
    environment: dict = field(default_factory=dict)   # variables before _join set them
    guard: object = None                              # socket to ddp_guard.py
    watch: object = None                              # see watch_run
    patience: float = PATIENCE                        # seconds to wait for others in cleanup_ddp
    checkpoint: str = ""                              # path of the one to resume from
    damaged: str = ""                                 # checkpoint that could not be loaded
    clean: bool = False                               # cleanup_ddp was called


@dataclass(frozen=True)
class Ddp:
    """This process' place in the run.

    local_world_size: None until the ranks have met, if the launcher does not set it.
    node_rank: number of the host, in the order of ranks; None until the ranks have met.
    control: the gloo group for objects, flags and barriers (None: see _route)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    launcher: str = "plain process"
    seed: int = 0
    host: str = ""
    notes: tuple = ()
    control: object = field(default=None, repr=False, compare=False)
    timeout: float | None = None   # of a collective, in seconds; None: torch's own
    state: State = field(default_factory=State, repr=False, compare=False)

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def on_one_host(self):
        return self.local_world_size == self.world_size

    def __enter__(self):
        return self

    def __exit__(self, kind, error, tb):
        if error is None or isinstance(error, SystemExit) and error.code in (None, 0):
            cleanup_ddp(self)
        elif _alone_in_a_notebook(self):   # there is no other rank to end, and the kernel goes on
            close_run(self, 1, f"{kind.__name__}: {error}")
        else:
            _abort_with(self, error)


def _alone_in_a_notebook(ddp):
    """A single interactive process: neither an exception nor a long pause may end it."""
    return ddp.world_size == 1 and hasattr(sys, "ps1")


class SetupError(RuntimeError):
    """Setting up failed. prints: whether this rank shows it; an error of all ranks is shown by one.
    code: the exit code; 2 if a person must change something, 1 if a new start may succeed."""

    def __init__(self, text, *, prints=True, code=2):
        super().__init__(text)
        self.prints, self.code = prints, code


# ---------------------------------------------------------------- launchers
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
PLACE = ("rank", "size", "local_rank", "local_size")   # fields of a Launcher that name variables


def _int(env, name):
    text = env.get(name, "").strip()
    if text and not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text!r} is not an integer. Expected the number that the "
                         f"launcher sets; unset it if it was exported by hand.")
    return int(text) if text else None


def _rows_set_in(env):
    """LAUNCHERS, where each field of PLACE names only the variable that is set, or ""."""
    def first_set(names):
        return next((name for name in names.split() if env.get(name, "").strip()), "")
    rows = [replace(row, **{part: first_set(getattr(row, part)) for part in PLACE})
            for row in LAUNCHERS.values()]
    # The shells of sbatch (no step) and salloc (a step of one task) have Slurm's variables too.
    return [row for row in rows if row.name != "Slurm step"
            or env.get("SLURM_STEP_ID") and _int(env, row.size) != 1]


def _complete_rows(env):
    return [row for row in _rows_set_in(env)
            if row.rank and row.local_rank and (row.size or row.size_optional)
            and (not row.needs or env.get(row.needs, "").strip())]


def _seen(env):
    """The launchers' variables that are set, for messages."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"}.union(
        *(getattr(row, part).split() for row in LAUNCHERS.values() for part in PLACE))
    shown = " ".join(f"{name}={env[name]}" for name in sorted(names) if env.get(name, "").strip())
    return f"Seen: {shown or 'none'}"


def detect_launcher(env, mpi=None):
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
    row, *outer = complete
    rank, size, local_rank, local_size = (_int(env, getattr(row, part)) for part in PLACE)
    # By source. All that are not None must agree.
    ranks = {row.rank: rank, "mpi4py": mpi and mpi[0]}
    sizes = {"DDP_WORLD_SIZE": _int(env, "DDP_WORLD_SIZE"),
             "WORLD_SIZE": _int(env, "WORLD_SIZE") if row.mpi else None,
             row.size: size, "mpi4py": mpi and mpi[1]}
    if row.name == "torchrun" and not env.get("TORCHELASTIC_RUN_ID"):   # exported by hand
        for other in outer:
            if other.mpi:
                ranks[other.name], sizes[other.name] = _int(env, other.rank), _int(env, other.size)
    is_first = local_rank == 0   # only the first rank of a host prints what all its ranks see
    for what, claims, prints in (("number of ranks", sizes, is_first), ("rank", ranks, True)):
        numbers = {source: number for source, number in claims.items() if number is not None}
        if len(set(numbers.values())) > 1:
            said = ", ".join(f"{source} says {number}" for source, number in numbers.items())
            raise SetupError(
                f"{row.name}: {said}. Expected the same {what}. Unset what is left over from "
                f"another launcher. If mpi4py differs, it was probably built for another MPI: "
                f"reinstall it, or set DDP_MPI4PY=0. {_seen(env)}", prints=prints)
    size = next((number for number in sizes.values() if number is not None), None)
    if size == 1 or row.name == "Slurm step" and _int(env, "SLURM_STEP_NUM_NODES") == 1:
        local_size = size   # one host; Slurm sets no plain number for this
    if size is None:
        raise SetupError(
            f"{row.name} started rank {rank} but sets no number of ranks. Expected DDP_WORLD_SIZE: "
            f"export it next to the mpiexec call (nodes x ranks per node), or install mpi4py. "
            f"{_seen(env)}", prints=is_first)
    for what, value, limit in (("rank", rank, size),
                               ("local rank", local_rank, local_size or size)):
        if not 0 <= value < limit:
            raise SetupError(f"{row.name}: {what} {value} is outside 0 to {limit - 1}. "
                             f"{_seen(env)}")
    sources = ", ".join(f"{what} from {name}" for what, name in (
        ("rank", row.rank), ("size", row.size), ("local rank", row.local_rank)) if name)
    node_rank = 0 if size == 1 else None   # of several ranks: known when they meet
    return Ddp(rank, size, local_rank, local_size, node_rank, launcher=row.name, notes=(
        f"launcher {row.name}: {sources}",
        *(f"outer launcher {other.name} says rank {env[other.rank]} of {env.get(other.size)}: "
          f"not used" for other in outer)))


def _plain_process(env):
    """Place of a process that no launcher has started. Refuses incomplete launcher variables."""
    harmless = {"", "RANK", "WORLD_SIZE", "DDP_WORLD_SIZE"}   # setup_ddp checks the last one
    stray = {getattr(row, part): part for row in _rows_set_in(env) for part in PLACE
             if getattr(row, part) not in harmless}
    like_torchrun = "LOCAL_RANK" in stray or env.get("RANK") and env.get("MASTER_ADDR")
    if (stray and list(stray.values()) != ["local_rank"]   # alone: exported by hand
            or like_torchrun and (_int(env, "WORLD_SIZE") or 1) > 1):
        raise SetupError(
            f"a launcher seems to have started this process, but no set of its variables is "
            f"complete. {_seen(env)}. Expected for example RANK, WORLD_SIZE, LOCAL_RANK and "
            f"MASTER_ADDR, or PMI_RANK, PMI_SIZE and MPI_LOCALRANKID. Unset what was exported by "
            f"hand, or set DDP_RANK, DDP_WORLD_SIZE and DDP_LOCAL_RANK.")
    notes = ["launcher none: one process"]
    if ignored := [name for name in (*stray, "RANK", "WORLD_SIZE") if env.get(name, "").strip()]:
        notes.append(f"{', '.join(ignored)} ignored as left over: a launcher sets more variables")
    if env.get("SLURM_JOB_ID") and (_int(env, "SLURM_NTASKS") or 1) > 1:
        notes.append(f"ATTENTION: Slurm job {env['SLURM_JOB_ID']} has {env['SLURM_NTASKS']} tasks, "
                     f"and this is ONE process in its shell. To start all: srun python "
                     f"{os.path.basename(sys.argv[0]) or '...'}")
    return Ddp(notes=tuple(notes))


# ---------------------------------------------------------------- device and backend
KINDS = ("cuda", "xpu", "cpu")   # device types, the best first
# The device types that each backend serves, the best backend first.
BACKENDS = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "xccl": ("xpu",), "ccl": ("xpu", "cpu")}


def choose_device(device, backend, local_rank, found, ranks=2):
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
    def refuse(what):
        have = ["cpu", *(name if value is True else f"{value} {name}"
                         for name, value in found.items() if value and name != "trouble")]
        raise SetupError(f"{what}. Available here: {', '.join(have)}. Choose --device auto and "
                         f"--backend auto, or among these.")

    for name, value, known in (("device", device, ("auto", *KINDS)),
                               ("backend", backend, ("auto", "xpu", *BACKENDS))):
        if value not in known:
            raise SetupError(f"--{name} {value} is not known; expected one of {', '.join(known)}")
    asked, visible = f"--device {device}, --backend {backend}", {**found, "cpu": 1}
    # With gloo an XPU is found too, and then refused: not silently replaced by the CPU.
    kinds = {**BACKENDS, "auto": KINDS, "gloo": KINDS, "xpu": ("xpu",)}[backend]
    kind = device if device != "auto" else next(filter(visible.get, kinds), kinds[0])
    if not visible[kind]:
        refuse(f"{kind} was asked for ({asked}), but no such device is visible")
    usable = [name for name, served in BACKENDS.items()
              if kind in served and backend in (name, "auto", "xpu")]
    if kind not in kinds or not usable:
        refuse(f"--backend {backend} does not serve device {kind}")
    chosen = next(filter(found.get, usable), None)
    if chosen is None and (ranks > 1 or backend != "auto"):
        trouble = f" ({found['trouble']})" if "ccl" in usable and "trouble" in found else ""
        refuse(f"no backend for {kind}: expected {' or '.join(usable)}, which this torch "
               f"lacks{trouble}")
    # The remainder, since a launcher may let a rank see all devices, some, or only its own one.
    index = None if kind == "cpu" else local_rank % found[kind]
    where = "cpu" if index is None else f"{kind}:{index} of {found[kind]}"
    return kind, index, chosen, f"device {where}; backend {chosen} ({asked})"


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
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _device_id(device):
    """A name that identifies an accelerator within its host, despite masks; CPU: None."""
    if device.type == "cpu":
        return None
    uuid = getattr(getattr(torch, device.type).get_device_properties(device.index), "uuid", None)
    if uuid and device.type == "cuda":
        return f"cuda {uuid}"
    mask = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}[device.type]
    return f"{device} of {mask}={os.environ.get(mask, '')} {uuid or ''}"   # tiles may share a uuid


# ---------------------------------------------------------------- set-up
def seed_for(*parts):
    """Integer in [0, 2**63) from plain values: equal parts give equal seeds, everywhere."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)   # on every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def setup_ddp(device="auto", backend="auto", seed=0, ranks=None, timeout=None, init_timeout=300.0,
              quiet=False, ipex="auto"):
    """Find this process' rank and device, join the other ranks, and return a Ddp. If called again
    in the same process, return the same Ddp.

    Args:
        device, backend: see choose_device.
        seed: gives all ranks equal initial weights; wrap_ddp then seeds each rank differently.
        ranks: refuse any other number of ranks.
        timeout: seconds a collective may take; None: torch's own limit.
        init_timeout: seconds to wait for all ranks to appear.
        ipex: auto | on | off, see optimize_with_ipex.
    Raises: SetupError (a RuntimeError) with what was found and what to do, naming missing ranks.
        An error of all ranks is raised on one, or one per host; others exit with its `code`.
    """
    if setup_ddp.current is not None:
        return setup_ddp.current
    try:
        ddp = setup_ddp.current = _setup(dict(os.environ), device, backend, seed, ranks, timeout,
                                         init_timeout, ipex)
    except SetupError as e:
        if not e.prints:
            time.sleep(PRINTER_FIRST)
            sys.stdout.flush()
            os._exit(e.code)
        raise
    if not quiet:
        print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on "
                    f"{len(set(ddp.state.hosts)) or 1} host(s)", *ddp.notes, sep="\n  ")
    return ddp


setup_ddp.current = None   # one process has one Ddp at a time, as torch has one process group
setup_ddp.count = 0        # of set-ups in this process
setup_ddp.meeting = None   # what _open_store returned: a later set-up uses that store again


def _setup(env, device, backend, seed, ranks, timeout, init_timeout, ipex):
    _deadline(env)   # refuses a wrong DDP_DEADLINE before anything is started
    if ipex not in ("auto", "on", "off"):
        raise SetupError(f"ipex is {ipex!r}; expected auto, on or off")
    if not init_timeout > 0:
        raise SetupError(f"init_timeout is {init_timeout}; expected seconds, more than 0")
    mpi = _start_mpi(env, init_timeout)
    ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
    for name, wanted in (("--ranks", ranks), ("DDP_WORLD_SIZE", _int(env, "DDP_WORLD_SIZE"))):
        if wanted is not None and wanted != ddp.world_size:
            raise SetupError(f"{name} asks for {wanted} rank(s), but {ddp.world_size} were "
                             f"started. {'; '.join(ddp.notes)}. Start {wanted} (mpirun -n, "
                             f"srun -n, torchrun --nproc_per_node) or change {name}.",
                             prints=ddp.rank == 0)
    error, reason, target = None, "", torch.device("cpu")
    try:
        kind, index, backend, reason = choose_device(
            device, backend, ddp.local_rank, _found_devices(backend == "ccl", ipex),
            ddp.world_size)
        if index is not None:
            target = torch.device(kind, index)
            getattr(torch, kind).set_device(index)   # the group binds to the current device
    except RuntimeError as e:
        if ddp.world_size == 1:
            raise
        error = str(e)   # perhaps of this rank alone: rank 0 prints it, see _meet
    ddp = replace(ddp, device=target, backend=backend if ddp.world_size > 1 else "none", seed=seed,
                  host=socket.gethostname(), notes=(*ddp.notes, reason), timeout=timeout,
                  state=State(mpi=mpi, ipex=ipex, guard=_open_guard()))
    if ddp.world_size > 1:
        ddp = _join(ddp, env, init_timeout, error)
    else:
        _tell_guard(ddp, join=dict(rank=0, size=1, launcher=ddp.launcher, hub=None))
    atexit.register(_at_exit, ddp)
    _seed_all(seed)
    return ddp


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
def slurm_first_host(nodelist):
    """First host of a Slurm node list: 'a[003-5,9]-ib,b3' -> 'a003-ib'. Slurm's scontrol would tell
    it, but containers often lack that."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)[0]   # up to a comma outside brackets
    return re.sub(r"\[([^\]]*)\]", lambda m: re.split("[-,]", m[1])[0], first)


def _resolve(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _own_address():
    """The address under which other hosts reach this one."""
    host = socket.gethostname()
    short, names = host.split(".")[0], [host]
    if re.fullmatch(r"x\d+c\d+s\d+b\d+n\d+", short) and ".hsn." not in host:   # HPE EX: its fabric
        names = [f"{short}.hsn.cm.{m}.alcf.anl.gov" for m in ("aurora", "polaris")] + names
    for ip in map(_resolve, names):
        if ip and not ip.startswith("127."):   # Debian maps a host's own name to 127.0.1.1
            return ip
    return _route_to("192.0.2.1") or "127.0.0.1"   # any outside address: the default route


def _route_to(host):
    """This host's address on the way to `host`. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.connect((host, 9))
        return s.getsockname()[0]
    return None


def _interface_of(ip):
    """Name of the network interface that has the IPv4 address, or None (None outside Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):   # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                packed = fcntl.ioctl(s.fileno(), 0x8915, request)   # SIOCGIFADDR
                if socket.inet_ntoa(packed[20:24]) == ip:
                    return name
    return None


def _launch_name(env, ddp):
    """The launcher's identifier of this launch, or ""."""
    return "-".join(env[name] for name in LAUNCHERS[ddp.launcher].launch.split() if env.get(name))


def _launcher_process(ddp):
    """Process id of this host's launcher, with its namespace, as containers may have equal ids. It
    is the first ancestor without the rank's variable, which a guard or shell around a rank has."""
    pid, rank_variable = os.getppid(), f"{LAUNCHERS[ddp.launcher].rank}=".encode()
    with contextlib.suppress(OSError):   # no /proc: the parent is the best guess
        while rank_variable in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return f"{pid} {os.readlink('/proc/self/ns/pid')}"
    return str(pid)


def _place_of_rank_0(ddp, env):
    """(host, port or 0, their source) of rank 0's store, as far as this rank can tell alone."""
    host, port = env.get("MASTER_ADDR", ""), _int(env, "MASTER_PORT") or 0
    if not 0 <= port < 1 << 16:   # 10000 + a job's number may be too large
        raise SetupError(f"MASTER_PORT={port} is no port; expected 1024 to 65535. Leave it unset "
                         f"to have one found.", prints=ddp.local_rank == 0)
    source = f"from {'MASTER_ADDR' if host else 'MASTER_PORT'}" if host or port else ""
    if host:
        port = port or 29500
    elif ddp.on_one_host:
        host = "127.0.0.1"
    elif ddp.launcher == "Slurm step":
        host = slurm_first_host(env.get("SLURM_STEP_NODELIST", ""))
        host = host if _resolve(host) else ""   # in a cloud, node names may not resolve
    if not ddp.on_one_host and host != _resolve(host) and _resolve(host).startswith("127."):
        host = _own_address()   # Debian maps a host's own name to 127.0.1.1
    if ddp.state.mpi is not None:
        return host or _own_address(), port, f"{source} by MPI broadcast".strip()
    if not host:
        raise SetupError(
            f"{ddp.launcher} started ranks that may be on several hosts, and nothing tells them "
            f"where rank 0 is: mpi4py is not usable and MASTER_ADDR is unset. Install mpi4py for "
            f"this MPI, or export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to "
            f"all ranks.", prints=ddp.rank == 0)
    if not port:   # all ranks compute the same one, below the kernel's ephemeral ports
        launch = _launch_name(env, ddp) or ddp.on_one_host and _launcher_process(ddp)
        launch = f"{ddp.launcher} {launch} {ddp.world_size}"
        port, source = 10000 + seed_for(launch) % 20000, "by the launcher's id"
    return host, port, source


# ---------------------------------------------------------------- rendezvous: store, table, groups
def _join(ddp, env, init_timeout, error):
    """Meet all ranks in the store, check that they fit together, make the process groups.

    error: what this rank has to report instead of joining, or None."""
    agent = ddp.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = setup_ddp.meeting or _open_store(ddp, env, agent, init_timeout)
    store, host, port, how = meeting
    # Torchrun's agent keeps its store over restarts, and a script may set up twice. A prefix per
    # attempt hides the keys of earlier attempts.
    setup_ddp.count += 1
    attempt = f"{env.get('TORCHELASTIC_RESTART_COUNT')}/{setup_ddp.count}"
    store = dist.PrefixStore(f"ddp/{_launch_name(env, ddp)}/{attempt}", store)
    # Under torchrun MASTER_ADDR is the agent's host, which rank 0 may not share.
    hub_host = "127.0.0.1" if ddp.on_one_host else _own_address() if agent else host
    table = _meet(ddp, store, error, init_timeout, hub_host)
    hosts = ddp.state.hosts = table["hosts"]
    ddp.state.store, setup_ddp.meeting = store, meeting
    if table["hub"]:
        _tell_guard(ddp, join=dict(rank=ddp.rank, size=ddp.world_size, launcher=ddp.launcher,
                                   hub=table["hub"]))
    else:   # the guards are not connected: abort has the launcher end the others
        ddp.state.guard = None
    variables = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": ddp.rank,
                 "WORLD_SIZE": ddp.world_size, "LOCAL_RANK": ddp.local_rank,
                 "LOCAL_WORLD_SIZE": ddp.local_world_size or hosts.count(ddp.host)}
    interface = _interface_of("127.0.0.1" if ddp.on_one_host else _route_to(host))
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    ddp.state.environment = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    limit = None if ddp.timeout is None else timedelta(seconds=ddp.timeout)
    bind = {"device_id": ddp.device} if ddp.backend == "nccl" else {}
    control = None
    with _time_limit(init_timeout):   # some backends wait without a limit
        dist.init_process_group(ddp.backend, store=store, rank=ddp.rank, timeout=limit,
                                world_size=ddp.world_size, **bind)
        most_ranks = _int(env, "DDP_GLOO_MAX_RANKS")
        if ddp.world_size <= (GLOO_MAX_RANKS if most_ranks is None else most_ranks):
            control = (dist.group.WORLD if ddp.backend == "gloo" else
                       dist.new_group(backend="gloo", timeout=limit))
    return replace(ddp, local_world_size=variables["LOCAL_WORLD_SIZE"], control=control,
                   node_rank=list(dict.fromkeys(hosts)).index(ddp.host),
                   notes=(*ddp.notes, f"rank 0 at {host}:{port}, found {how}"))


def _open_store(ddp, env, agent, limit):
    """Connect to rank 0's TCPStore. Returns (store, host, port, how it was found).
    Rank 0 opens its socket first. With mpi4py it then broadcasts the address, or its error."""
    host, port, how = _place_of_rank_0(ddp, env)
    listener, problem = None, ""
    if ddp.is_main and not agent:
        try:   # on this address only; for port 0 the kernel chooses a free port
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=4096)
            port = listener.getsockname()[1]
        except OSError as e:
            problem = (
                f"rank 0 on {ddp.host} cannot listen on {host}:{port}: {e.strerror}. Expected "
                f"MASTER_ADDR to be an address of rank 0's host and MASTER_PORT to be free there. "
                f"Leave both unset to have them found, or choose another port.")
    if ddp.state.mpi is not None:
        host, port, problem = ddp.state.mpi.bcast((host, port, problem), root=0)
    if problem:
        raise SetupError(problem, prints=ddp.is_main)
    if listener is None:
        _await_listener(ddp, host, port, limit)
    with _time_limit(limit):   # torch would wait forever for another program there
        store = dist.TCPStore(host, port, None, listener is not None,
                              timedelta(seconds=limit), wait_for_workers=False,
                              master_listen_fd=listener.detach() if listener else None)
    return store, host, port, how


def _await_listener(ddp, host, port, limit):
    """Wait until rank 0 listens. TCPStore would fail with a long C++ stack trace instead."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection((host, port), CONNECT).close()
        except OSError as e:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"rank 0 cannot be reached at {host}:{port} within {limit:.0f} s ({e}). "
                    f"Expected it to listen there. Did it start? Is MASTER_ADDR right? Try `ping "
                    f"{host}` from {ddp.host}.", prints=_speaks_for_host(ddp), code=1) from None
            time.sleep(0.05)


def _speaks_for_host(ddp):
    """Does this rank print an error of all ranks but rank 0? On each host one does."""
    return ddp.local_rank == 0 or ddp.rank == 1


def _meet(ddp, store, error, limit, hub_host):
    """Report to rank 0 and return its answer, a dict: "hosts" of all ranks, and "hub", the address
    of rank 0's guard (None: guards are not connected). SetupError: the ranks do not match."""
    size = ddp.world_size
    report = {"host": ddp.host, "backend": ddp.backend, "torch": torch.__version__, "error": error,
              "guarded": ddp.state.guard is not None,
              "device": None if error else _device_id(ddp.device)}
    duplicate = SetupError(f"rank {ddp.rank} of {size} is in this store already. Was it started "
                           f"twice, or do two runs use one MASTER_PORT? Choose another for one of "
                           f"them.", prints=_speaks_for_host(ddp))
    if store.add(f"came/{ddp.rank}", 1) > 1:   # before reading a table, which is another run's
        raise duplicate
    store.set(f"here/{ddp.rank}", json.dumps(report))
    if not ddp.is_main:   # rank 0 gives up earlier and says why: this wait fails only if it is gone
        try:
            store.wait(["table"], timedelta(seconds=limit + ANSWER_MARGIN))
        except RuntimeError:
            raise SetupError("rank 0 ended while the ranks were meeting. Expected it to stay; look "
                             "for its own message.", prints=_speaks_for_host(ddp), code=1) from None
        table = json.loads(store.get("table"))
        if table["problem"]:
            store.set(f"read/{ddp.rank}", "")
            raise SetupError(table["problem"], prints=False, code=table["code"])
        if len(table["hosts"]) != size:
            raise duplicate
        return table
    keys = [f"here/{rank}" for rank in range(size)]
    with contextlib.suppress(RuntimeError):   # a timeout: _problem_of names the missing ranks
        store.wait(keys, timedelta(seconds=limit))
    reports = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)
               if store.check([key])}
    problem, code = _problem_of(reports, size, limit)
    table = dict(problem=problem, code=code, hub=None,
                 hosts=[report["host"] for report in reports.values()])
    guarded = [report["guarded"] for report in reports.values()]
    if any(guarded) and not all(guarded):
        print0(ddp, "ATTENTION: not every rank has a guard, so no rank is guarded")
    elif all(guarded) and not problem:
        _tell_guard(ddp, serve=hub_host)
        with contextlib.suppress(OSError, ValueError), ddp.state.guard.makefile() as answer:
            table["hub"] = json.loads(answer.readline())["address"]
        if not table["hub"]:
            print0(ddp, "ATTENTION: the guards cannot be joined, so no rank is guarded")
    store.set("table", json.dumps(table))
    if problem:   # the store ends with rank 0: the others must read the table first
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{rank}" for rank in reports if rank], timedelta(seconds=TABLE_READ))
        raise SetupError(problem, code=code)
    return table


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
def _open_guard():
    """The socket to ddp_guard.py, if that is this process' parent, else None."""
    descriptor, _, parent = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if not parent or int(parent) != os.getppid():
        return None
    guard = socket.socket(fileno=os.dup(int(descriptor)))
    guard.settimeout(GUARD_ANSWER)
    return guard


def _tell_guard(ddp, wait=True, **message):
    """Send a line to the guard, if there is one. wait=False: drop it if the guard does not read."""
    if ddp.state.guard is not None:
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            if wait:
                ddp.state.guard.sendall(line)
            else:   # socket.send would wait up to its timeout, os.write does not wait
                os.write(ddp.state.guard.fileno(), line)


def abort(ddp, text, code=1, cause="", secondary=False, retry=True):
    """Print `text` once, with the rank, and end every rank; in a notebook, raise SystemExit.

    Args:
        code: exit code of every rank, as far as the launcher passes it on.
        cause: one line for status.json and the last line; default: the first line of the text.
        secondary: this failure is only the consequence of another rank's failure.
        retry: can the same command, given again, continue the run?"""
    cause, code = cause or text.partition("\n")[0], code % 256 or 1
    if _alone_in_a_notebook(ddp):
        print(text, file=sys.stderr)
        close_run(ddp, code, cause)
        raise SystemExit(code)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if ddp.state.guard is not None:
        _tell_guard(ddp, failed=dict(code=code, cause=cause, text=text, secondary=secondary,
                                     retry=retry))
        with contextlib.suppress(OSError):
            ddp.state.guard.recv(1)   # until the guard kills this process
        os._exit(code)
    for number in ddp.state.watch.handlers if ddp.state.watch else ():
        signal.signal(number, signal.SIG_DFL)   # the launcher's SIGTERM must end this rank
    if secondary or not ddp.is_main:   # let the rank at fault, or rank 0, print first
        time.sleep(CULPRIT_FIRST)
    _write_status(ddp, code, cause)
    place = f"rank {ddp.rank} of {ddp.world_size} on {ddp.host}"
    lines = [f"\n[{place}] {text}"] if text.strip() not in ("", cause) or code == BAD_INPUT else []
    if code != BAD_INPUT:   # with it, nothing has run yet
        last = ddp.state.checkpoint
        saved = f"Last checkpoint: {last}" if last else "No checkpoint yet"
        again = "To go on, give the same command again" if retry else "Mend the cause first"
        full_stop = "" if cause[-1:] in ".?" else "."
        lines.append(f"FAILED: {place}: {cause}{full_stop} {saved}. {again}.")
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)
    if ddp.world_size > 1:
        _end_others(ddp, code)
    os._exit(code)


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
    if isinstance(error, SystemExit):
        text = error.code if isinstance(error.code, str) else f"left with exit code {error.code}"
        abort(ddp, text, error.code if isinstance(error.code, int) else 1)
    expected = not getattr(error, "retry", True)   # retry = False: no bug, so no traceback
    out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    # A lost connection is most likely the consequence of a failure elsewhere.
    lost = isinstance(error, RuntimeError) and re.search(
        "connection|socket|timed out|communicator|successfully reached monitoredBarrier",
        str(error), re.I)
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    cause = str(error).split("\n")[0] if expected else _in_one_line(error)
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


def cleanup_ddp(ddp):
    """Leave in good order: wait for the others, destroy the groups, finalise MPI, put the
    environment back. Harmless when called twice.

    It waits for half an hour, or the limit of watch_run, and then names the missing ranks. With a
    guard, Python must end, or set up again, within two minutes after this."""
    if ddp.state.clean:
        return
    ddp.state.clean = True
    atexit.unregister(_at_exit)
    watch, patience = ddp.state.watch, ddp.state.patience
    try:
        _tell_guard(ddp, bye=patience)
        try:
            with _time_limit(patience + 2 * GUARD_MARGIN):   # xccl ignores the barrier's limit
                barrier(ddp, patience + GUARD_MARGIN)
        except RuntimeError as e:
            abort(ddp, f"not all of {ddp.world_size} ranks came to cleanup_ddp within "
                       f"{patience:.0f} s: {_in_one_line(e)}", HANG, secondary=True)
        if watch is not None:   # the script did not call close_run
            close_run(ddp, AGAIN if watch.requested else 0, watch.requested or "left in good order")
        with _time_limit(DESTROY):
            if ddp.world_size > 1:
                _await_gloo_threads()
                dist.destroy_process_group()
            _end_mpi(ddp.state.mpi)
    finally:   # whatever happens, the caller may go on
        _tell_guard(ddp, left=True)
        if ddp.state.guard is not None:
            ddp.state.guard.close()
        ddp.state.guard = ddp.state.mpi = setup_ddp.current = None
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


# ---------------------------------------------------------------- stop requests, progress, outcome
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


@dataclass
class Watch:
    """See watch_run."""
    run_dir: str | None
    limit: float               # seconds
    step: int | None = None
    requested: str = ""        # why this rank was asked to stop
    interrupted: float = 0.0   # time of the first Ctrl-C
    stacks: object = None      # open file for stack traces
    handlers: dict = field(default_factory=dict)   # {signal: handler to restore}


def watch_run(ddp, run_dir=None, minutes=20.0, signals=STOP_SIGNALS):
    """Watch for stop requests and hangs from here on. stop_reason calls this if nobody has.

    Signals, the time DDP_DEADLINE and a file RUN_DIR/STOP only ask for a stop: stop_reason tells
    all ranks at the same step. A second Ctrl-C ends the run at once, with exit code 130.

    Each call of stop_reason or beat counts as progress. With guards, the run is ended when no rank
    makes progress: the late ranks are named, and the exit code is 70. Without guards, each rank
    without progress ends by itself with exit code 1, even if it only waits for another rank.

    Args:
        run_dir: for rank 0's status.json {code (null: the run is on), reason, step}, and for the
            stacks, stacks/rank_R.txt; None: no status, and stacks below the temporary folder.
        minutes: limit without progress; 0: none. signals: names of those that ask for a stop."""
    requested = ddp.state.watch.requested if ddp.state.watch else ""   # by an earlier watch
    close_run(ddp)
    run_dir, notebook = run_dir and os.path.abspath(run_dir), _alone_in_a_notebook(ddp)
    limit = 0.0 if notebook else minutes * 60
    watch = ddp.state.watch = Watch(run_dir, limit, requested=requested)
    with contextlib.suppress(ValueError):   # only the main thread may set handlers
        for name in signals if not notebook else ():
            if number := getattr(signal, name, None):
                watch.handlers[number] = signal.signal(
                    number, lambda number, _: _request_stop(ddp, watch, number))
    if watch.limit:
        ddp.state.patience = watch.limit
        with contextlib.suppress(OSError):   # without a file the stacks go to stderr
            folder = (os.path.join(run_dir, "stacks") if run_dir else
                      tempfile.mkdtemp(prefix="ddp-stacks-"))
            os.makedirs(folder, exist_ok=True)
            watch.stacks = open(os.path.join(folder, f"rank_{ddp.rank}.txt"), "a")
    if watch.limit and ddp.state.guard is not None:   # which asks for stacks by SIGQUIT
        with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError):   # no stderr
            faulthandler.register(signal.SIGQUIT, watch.stacks or sys.__stderr__)
    _tell_guard(ddp, watch=dict(limit=watch.limit, run_dir=run_dir,
                                stacks=watch.stacks and watch.stacks.name))
    beat(ddp)
    _write_status(ddp, None, "running")


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
    if not watch.requested:
        watch.requested = f"{name} on rank {ddp.rank} ({ddp.host})"
        when = "before its first step" if watch.step is None else "after this step and saves"
        again = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
        if ddp.is_main:   # by os.write: the signal may have interrupted a print
            with contextlib.suppress(OSError):
                os.write(2, f"\n{name}: the run stops {when}{again}\n".encode())


def stop_wanted(ddp):
    """1.0 if this rank has been asked to stop, else 0.0: to be summed over ranks, for stop_reason.
    Rank 0 looks for the deadline and the STOP file."""
    watch = ddp.state.watch
    if watch is None:
        return 0.0
    if ddp.is_main and not watch.requested:
        if time.time() >= _deadline(os.environ):
            watch.requested = "DDP_DEADLINE is reached"
        elif watch.run_dir and os.path.exists(path := os.path.join(watch.run_dir, "STOP")):
            watch.requested = f"{path} exists; remove it before the next start"
    return float(bool(watch.requested))


def stop_reason(ddp, step, wanted=None):
    """Why all ranks shall now save and leave, the same on each, or "" to go on.

    To be called at each step boundary, on all ranks; it is a sign of progress too.
    wanted: the sum of stop_wanted over ranks, where the caller has it from an all-reduce of its own
        (perhaps of the step before); None: summed here, by a small all-reduce per call."""
    if ddp.state.watch is None:
        watch_run(ddp)
    beat(ddp, step)
    if wanted is None:
        wanted = all_sum(stop_wanted(ddp), ddp)
    if not wanted:
        return ""
    ddp.state.watch.requested = first_problem(ddp.state.watch.requested, ddp)
    return ddp.state.watch.requested


def beat(ddp, step=None):
    """A sign of progress between step boundaries: during evaluation, sampling, saving."""
    watch = ddp.state.watch
    if watch is None:
        return
    if step is not None:
        watch.step = step
    if ddp.state.guard is not None:
        _tell_guard(ddp, wait=False, step=watch.step)
    elif watch.limit:
        _set_timer(watch.limit, watch.stacks or sys.__stderr__)


def close_run(ddp, code=None, reason=""):
    """End the watch and write code and reason to status.json. All ranks must then reach cleanup_ddp
    within the limit of the watch.

    code: 0 finished, 75 (AGAIN) start me again, 1 failed, 2 bad input, 130 interrupted; None: only
        end the watch, and leave status.json as it is."""
    if code is not None:
        _write_status(ddp, code, reason)
    watch, ddp.state.watch = ddp.state.watch, None
    if watch is None:
        return
    for number, handler in watch.handlers.items():
        signal.signal(number, handler)
    if watch.limit:
        faulthandler.cancel_dump_traceback_later()
        _tell_guard(ddp, watch=dict(limit=0.0, run_dir=watch.run_dir, stacks=None))
        if ddp.state.guard is not None:
            faulthandler.unregister(signal.SIGQUIT)
            with contextlib.suppress(ValueError):   # not the main thread
                signal.signal(signal.SIGQUIT, signal.SIG_IGN)   # a late request of the guard
    if watch.stacks is not None:
        watch.stacks.close()
        with contextlib.suppress(OSError):
            if os.path.getsize(watch.stacks.name) == 0:
                os.unlink(watch.stacks.name)
                os.rmdir(os.path.dirname(watch.stacks.name))


def worker_init(worker_id=0, signals=STOP_SIGNALS):
    """worker_init_fn for a DataLoader. A stop signal to all processes must not end the workers:
    without them the main process would raise an error instead of saving."""
    for name in signals:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _deadline(env):
    """Epoch seconds, or infinity."""
    text = env.get("DDP_DEADLINE", "").strip()
    with contextlib.suppress(ValueError):
        if (deadline := float(text or "inf")) > 1e9:   # 1e9 is in 2001; false for nan
            return deadline
    raise SetupError(f"DDP_DEADLINE={text!r} is not a time in epoch seconds. Expected for example "
                     f"$(( $(date +%s) + 3000 )).")


def _write_status(ddp, code, reason):
    """Write status.json: on rank 0, and on any rank that fails without a guard."""
    watch = ddp.state.watch
    if watch is None or watch.run_dir is None or not ddp.is_main and code in (None, 0, AGAIN):
        return
    with contextlib.suppress(OSError):   # perhaps a full disk is the failure itself
        os.makedirs(watch.run_dir, exist_ok=True)
        with open(os.path.join(watch.run_dir, f".status.json.{os.getpid()}.tmp"), "w") as f:
            f.write(json.dumps({"code": code, "reason": reason, "step": watch.step}) + "\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(f.name, os.path.join(watch.run_dir, "status.json"))


# ---------------------------------------------------------------- wrap, shard
def wrap_ddp(model, ddp, **options):
    """Wrap a model, already on ddp.device, in DistributedDataParallel if there are several ranks.

    Afterwards torch, random and numpy are seeded by (seed, "rank", rank): initial weights are equal
    on all ranks, but dropout and augmentation differ.

    options: of DistributedDataParallel; gradient_as_bucket_view is on by default.
    Raises: ValueError for a model on another device."""
    for name, p in model.named_parameters():
        if p.device != ddp.device:
            raise ValueError(f"parameter {name} is on {p.device}; expected {ddp.device}. Call "
                             f"model.to(ddp.device) before wrap_ddp (and before the optimizer is "
                             f"made).")
    if ddp.world_size > 1:
        known = inspect.signature(DistributedDataParallel).parameters
        if "broadcast_buffers" in options and "forward_sync_buffers" in known:
            # torch 2.13 renames the option, and warns of the old name
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        if ddp.device.type == "cuda":
            options["device_ids"] = [ddp.device.index]
        options.setdefault("gradient_as_bucket_view", True)
        model = DistributedDataParallel(model, **options)
    _seed_all(seed_for(ddp.seed, "rank", ddp.rank))
    return model


def unwrap_ddp(model):
    """The bare model: for state_dict, evaluation and sampling. The forward of a wrapped model may
    broadcast buffers, so a rank that calls it alone can hang."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def gradient_sync(model, last):
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


def ddp_sampler(dataset, ddp, train=True, shuffle=True):
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


# ---------------------------------------------------------------- agree, reduce
def print0(ddp, *values, **options):
    """print on rank 0; on every rank, with its number, where DDP_LOG_ALL=1."""
    log_all = os.environ.get("DDP_LOG_ALL") == "1" and ddp.world_size > 1
    if log_all or ddp.is_main:
        prefix = [f"[rank {ddp.rank}]"] if log_all else []
        print(*prefix, *values, **{"flush": True, **options})


def _route(ddp, device):
    """(process group, device) to communicate a tensor on `device`: small tensors, which are on the
    CPU, use gloo; others, and all above GLOO_MAX_RANKS ranks, use the backend of ddp.device."""
    if device.type == "cpu" and ddp.control is not None:
        return ddp.control, device
    return dist.group.WORLD, ddp.device


def barrier(ddp, timeout=None):
    """Wait for all ranks.

    timeout: seconds; default: that of setup_ddp, or half an hour.
    Raises: RuntimeError with the ranks that did not come (above GLOO_MAX_RANKS: without names)."""
    limit = timedelta(seconds=timeout or ddp.timeout or PATIENCE)
    if ddp.world_size > 1 and ddp.control is not None:
        dist.monitored_barrier(ddp.control, limit, wait_all_ranks=True)
    elif ddp.world_size > 1:
        dist.barrier(async_op=True).wait(limit)


def broadcast(value, ddp, src=0):
    """`value` of rank `src`, on every rank.

    value: a tensor (same shape and dtype everywhere) is filled in place and returned; anything else
        must be plain (None, bool, number, text, lists and dicts with text keys) and travels as
        JSON, so a tuple comes back as a list.
    """
    if isinstance(value, torch.Tensor):
        if ddp.world_size > 1:
            group, device = _route(ddp, value.device)
            moved = value.to(device)
            dist.broadcast(moved, src, group=group)
            value.detach().copy_(moved)   # it may be a parameter
        return value
    data = bytearray(json.dumps(value).encode() if ddp.rank == src else b"")
    if ddp.world_size > 1:
        size = broadcast(torch.tensor([len(data)]), ddp, src)
        data = bytearray(int(size)) if ddp.rank != src else data
        data = bytes(broadcast(torch.frombuffer(data, dtype=torch.uint8), ddp, src).tolist())
    return json.loads(data)


def all_sum(value, ddp):
    """Sum over ranks: of a tensor (into a new one), or of a number or list of numbers (float64)."""
    if not isinstance(value, torch.Tensor):
        return all_sum(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    if ddp.world_size == 1:
        return value.clone()
    group, device = _route(ddp, value.device)
    total = value.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(value.device)


def all_mean(value, ddp):
    """Mean over ranks, like all_sum. Correct only if every rank has the same share of the data."""
    if not isinstance(value, torch.Tensor):
        return all_mean(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    return all_sum(value, ddp) / ddp.world_size


def first_problem(problem, ddp):
    """The text of the first rank whose text is not empty, on every rank; "" if all are empty."""
    found = all_sum([float(bool(problem) and r == ddp.rank) for r in range(ddp.world_size)], ddp)
    return broadcast(problem, ddp, found.index(1.0)) if any(found) else ""


# ---------------------------------------------------------------- precision
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _native_bfloat16(device):
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "xpu":
        return True
    with contextlib.suppress(OSError):
        words = Path("/proc/cpuinfo").read_text().split()
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return False


def choose_dtype(request, device):
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


def autocast(dtype, ddp):
    """torch.autocast for ddp.device; float32 (and float64) mean none."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(ddp.device.type, dtype=dtype)


def grad_scaler(dtype, ddp):
    """A GradScaler that scales for float16 and passes everything through otherwise."""
    return torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)


# ---------------------------------------------------------------- checkpoints
def kept_checkpoint(path, k):
    """Name of the k-th former checkpoint: last.pt -> last-1.pt."""
    base, end = os.path.splitext(path)
    return f"{base}-{k}{end}" if k else path


def save_checkpoint(path, ddp, keep_last=1, resumes=True, **state):
    """Write `state` to `path`, from rank 0: temporary name, fsync, rename. A collective.

    Args:
        state: tensors and plain types, nested. `world_size` and `versions` are added.
        keep_last: how many to keep, this one included; the former ones as path-1, path-2, ...
        resumes: the next start continues from this file, so error messages shall name it.
    Raises: RuntimeError, on all ranks, for a value that is not of a plain type, or if the file
        cannot be written; the former file is then untouched.
    """
    path, problem = os.fspath(path), ""
    beat(ddp)
    try:
        if ddp.is_main:
            state.update(world_size=ddp.world_size, versions={
                "torch": str(torch.__version__), "python": sys.version.split()[0]})
            _write_checkpoint(path, ddp, keep_last, state)
    except Exception as e:   # perhaps what torch.save cannot write, or torch.load would refuse
        problem = f"cannot write {path}: {_in_one_line(e)}. The former checkpoint is untouched."
        if isinstance(e, (OSError, RuntimeError)):   # torch reports a full disk as RuntimeError
            problem += " Is the disk full or the folder read-only?"
    problem = broadcast(problem, ddp)
    beat(ddp)
    if problem:
        raise RuntimeError(problem)
    if resumes:
        _note_checkpoint(ddp, path, state)


def _write_checkpoint(path, ddp, keep_last, state):
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.tmp")   # a killed save may have left it
    os.makedirs(folder or ".", exist_ok=True)
    try:
        with open(temporary, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(temporary):
            raise TypeError(f"it holds {', '.join(unsafe)}; expected tensors and plain types "
                            f"(float(x), x.tolist()), which torch.load(weights_only=True) reads")
        if ddp.state.damaged == os.path.realpath(path):   # replace it; move no good ones
            ddp.state.damaged, keep_last = "", 1
        free = next((k for k in range(keep_last - 1)
                     if not os.path.exists(kept_checkpoint(path, k))), keep_last - 1)
        for k in range(free, 0, -1):   # each is whole under some name, if killed
            os.replace(kept_checkpoint(path, k - 1), kept_checkpoint(path, k))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        handle = os.open(folder or ".", os.O_RDONLY)
        os.fsync(handle)   # the rename itself must survive a power cut
        os.close(handle)


def load_checkpoint(path, ddp=None):
    """Read what save_checkpoint wrote; tensors come on the CPU.

    With ddp, a collective: rank 0 reads the file, goes back to the former one if it is damaged,
    saying so, and sends the bytes to the others.
    Raises: ValueError, on all ranks, for a file that is missing, damaged (each record has a
        checksum), or holds more than tensors and plain types.
    """
    if ddp is None:
        return _read_checkpoint(path)[1]
    data, troubles, used = b"", [], path
    if ddp.is_main:
        files = list(filter(os.path.exists, (kept_checkpoint(path, k) for k in range(100))))
        for used in files or [path]:
            try:
                data, state = _read_checkpoint(used)
                break
            except ValueError as e:
                troubles.append(str(e))
    used, troubles, size = broadcast([os.fspath(used), troubles, len(data)], ddp)
    if not size:
        raise ValueError("\n".join(troubles))
    if troubles:
        print0(ddp, "\n".join(f"ATTENTION: {t}" for t in troubles) + f"\n  Going back to {used}.")
        ddp.state.damaged = os.path.realpath(path)
    if ddp.world_size > 1:
        copy = bytearray(data if ddp.is_main else size)
        for part in torch.frombuffer(copy, dtype=torch.uint8).split(1 << 26):   # 64 MiB
            beat(ddp)
            broadcast(part, ddp)
        if not ddp.is_main:
            state = torch.load(io.BytesIO(copy), map_location="cpu", weights_only=True)
    _note_checkpoint(ddp, used, state if isinstance(state, dict) else {})
    return state


def _note_checkpoint(ddp, path, state):
    """Remember the checkpoint: the last line of a failure names it."""
    ddp.state.checkpoint = path
    _tell_guard(ddp, checkpoint=path + (f" (step {state['step']})" if "step" in state else ""))


def _read_checkpoint(path):
    """(the file's bytes, what they hold)."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"no checkpoint {path}: {e.strerror}. Expected a file written by "
                         f"save_checkpoint.") from None
    try:
        damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()   # torch.load checks no checksums
        if damaged is None:
            return data, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        reason = f"it is damaged, the checksum of its record {damaged} is wrong"
    except MemoryError:   # the file may be good: an older one must not take its place
        raise
    except Exception as e:   # of many types; drop torch's advice to unset weights_only
        reason = _in_one_line(e).partition(". ")[0]
    raise ValueError(f"cannot read the checkpoint {path}: {reason}. Expected a file written by "
                     f"save_checkpoint. Use another one, or start afresh.")


# ---------------------------------------------------------------- Intel's extension (legacy stacks)
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


def optimize_with_ipex(model, optimizer, ddp):
    """(model, optimizer) as ipex.optimize returns them, or as given if IPEX is not wanted or does
    not work. Call it on all ranks, after making the optimizer and before wrap_ddp.

    What IPEX returns are copies: do not use the old ones. The `ipex` of setup_ddp decides: "on",
    "off", or "auto", which means on for an XPU whose torch has no xccl. If it fails on any rank,
    all go on without it, and rank 0 prints why. The weights keep names, shapes and float32.
    """
    mode = ddp.state.ipex
    if mode == "off" or mode == "auto" and (ddp.device.type != "xpu" or _has_xccl()):
        return model, optimizer
    problem = ""
    try:   # no fused step: it ignores found_inf, by which our optimizers skip bad steps
        ipex = _import_ipex()
        result = ipex.optimize(model, optimizer=optimizer, fuse_update_step=False)
    except (Exception, SystemExit) as e:   # a library that is missing, a CPU that is too old, ...
        problem = _in_one_line(e)
    problem = first_problem(problem, ddp)
    print0(ddp, f"IPEX not used: {problem}" if problem else
           f"IPEX {ipex.__version__} optimized the model")
    return (model, optimizer) if problem else result


# ---------------------------------------------------------------- python ddp_setup.py --doctor
def doctor(env):
    """Print what this file finds here and would choose. Returns 1 if there is a PROBLEM, else 0."""
    found, mpi, rows = _found_devices(), None, []
    try:
        mpi = _start_mpi(env, DESTROY)
        ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
        if ddp.rank:
            return 0
        rows += [*ddp.notes, f"rank 0 of {ddp.world_size}" + (", mpi4py agrees" if mpi else ""),
                 choose_device("auto", "auto", ddp.local_rank, found, ddp.world_size)[3]]
    except SetupError as e:
        rows.append(f"PROBLEM: {e}")
    finally:
        _end_mpi(mpi)
    if master := env.get("MASTER_ADDR"):
        rows.append(f"MASTER_ADDR: {master} is {_resolve(master)}" if _resolve(master) else
                    f"PROBLEM: MASTER_ADDR={master} cannot be resolved here. Expected a host name "
                    f"or address.")
    versions = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in ("numpy", "mpi4py", "intel-extension-for-pytorch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    own = _own_address()
    print(f"versions: {', '.join(versions)}",
          "found: " + ", ".join(f"{name} {value}" for name, value in found.items()), *rows,
          f"this host: {socket.gethostname()}, {own} on interface {_interface_of(own)}", _seen(env),
          *(f"{name}={env[name]}" for name in sorted(env) if name.startswith("DDP_")), sep="\n")
    return int(any(row.startswith("PROBLEM") for row in rows))


if __name__ == "__main__":
    if sys.argv[1:] != ["--doctor"]:
        sys.exit(f"usage: python {sys.argv[0]} --doctor")
    sys.exit(doctor(dict(os.environ)))
