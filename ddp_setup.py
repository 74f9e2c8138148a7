"""Distributed data parallel in one file: launcher -> ranks -> device -> process group, and everything around it.

Copy this file next to your script; it needs torch and the standard library. The same script then runs unchanged
under `python`, `mpirun`, `mpiexec`, `srun`, `torchrun`, `jsrun` and `flux run`, on CPU, CUDA and Intel XPU:

    from ddp_setup import setup_ddp, wrap_ddp, unwrap_ddp, ddp_sampler, save_checkpoint, cleanup_ddp
    ddp = setup_ddp(seed=0)
    model = wrap_ddp(MyModel().to(ddp.device), ddp)
    sampler = ddp_sampler(data, ddp)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler): ...
        save_checkpoint(f"out/{epoch}.pt", ddp, model=unwrap_ddp(model).state_dict(), epoch=epoch)
    cleanup_ddp(ddp)

Or `with setup_ddp(seed=0) as ddp:`. A rank that raises brings all others down; the traceback is printed once. With
`if stop_reason(ddp, step): save and leave` at each step, a run also stops in good order on a signal, before the
walltime or on a STOP file, and one that hangs is ended, with the stacks of all ranks (see watch_run).
`python ddp_setup.py --doctor` tells what this file finds here.

Environment read: the launcher variables of LAUNCHERS, and
  MASTER_ADDR, MASTER_PORT  rendezvous; the address alone means port 29500, the port alone is honoured
  DDP_WORLD_SIZE            the number of ranks that must have been started (PALS on Aurora sets no size itself)
  DDP_RANK, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE, DDP_NODE_RANK   override every launcher (with DDP_WORLD_SIZE)
  DDP_RENDEZVOUS_DIR        folder that all hosts see, for the address file (default: the current folder)
  DDP_MPI4PY=0              never import mpi4py
  DDP_GLOO_MAX_RANKS        up to how many ranks gloo carries objects, flags and barriers (default 256)
  DDP_LOG_ALL=1             print0 prints on every rank, with its number
  DDP_DEADLINE              epoch seconds at which stop_reason says stop: the end of the walltime less the time to save
Environment set, until cleanup_ddp: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT for
libraries that look there; GLOO_SOCKET_IFNAME (the interface that routes to rank 0) where it is unset.
"""
import atexit
import builtins
import collections
import contextlib
import ctypes
import datetime
import faulthandler
import glob
import hashlib
import importlib.metadata
import inspect
import io
import json
import math
import multiprocessing
import os
import random
import re
import secrets
import selectors
import shlex
import signal
import socket
import struct
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import zipfile
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Gloo connects every rank with every other, and rank 0 holds a connection to each for the store and one for the
# lifeline: 3 N sockets, and many sites allow 1,024 open files. Above this, objects, flags and barriers travel over the
# device's own backend instead (see _route).
GLOO_MAX_RANKS = 256


# ---------------------------------------------------------------- launchers
@dataclass(frozen=True)
class Launcher:
    """One row of LAUNCHERS: the variables in which a launcher tells a process its place (first one set wins)."""
    name: str
    rank: tuple
    size: tuple
    local_rank: tuple
    local_size: tuple = ()
    node_rank: tuple = ()
    needs: tuple = ()            # further variables without which the row does not count
    mpi: bool = False            # ranks were started by an MPI: mpi4py may be asked
    size_optional: bool = False  # the size may come from DDP_WORLD_SIZE or mpi4py instead


# In the order of detection. It survives nesting: torchrun inside srun, mpirun inside an sbatch shell.
LAUNCHERS = (
    Launcher("DDP_* variables", ("DDP_RANK",), ("DDP_WORLD_SIZE",), ("DDP_LOCAL_RANK",),
             ("DDP_LOCAL_WORLD_SIZE",), ("DDP_NODE_RANK",)),
    Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK",),
             needs=("MASTER_ADDR",)),
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the node's index: not used.
    Launcher("Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
             ("OMPI_COMM_WORLD_LOCAL_SIZE",), mpi=True),
    # Polaris sets PMI_SIZE, Aurora nothing dependable. Slurm's cray_shasta plugin sets these names too.
    Launcher("PALS", ("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "PMIX_LOCAL_RANK"),
             ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), ("PALS_NODEID",), mpi=True, size_optional=True),
    Launcher("MPICH or Intel MPI (Hydra)", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
             ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), mpi=True),
    Launcher("MVAPICH2", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
             ("MV2_COMM_WORLD_LOCAL_SIZE",), mpi=True),
    Launcher("Flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    Launcher("LSF jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",), mpi=True),
    # Without SLURM_STEP_ID these variables belong to the batch shell, which is one process however many tasks.
    Launcher("Slurm step", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",),
             (), ("SLURM_NODEID",), needs=("SLURM_STEP_ID",)),
)


@dataclass(frozen=True)
class Ddp:
    """This process' place in the run. local_world_size and node_rank are None until the ranks have met, where the
    launcher does not say. control: the gloo group for objects, flags and barriers (None: see _route)."""
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
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)
    state: dict = field(default_factory=dict, repr=False, compare=False)   # lifeline, MPI, what to undo

    @property
    def is_main(self):
        return self.rank == 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, tb):
        if error is None or isinstance(error, SystemExit) and error.code in (None, 0):
            cleanup_ddp(self)
        elif _alone_in_a_notebook(self):   # nobody else is to be ended, and the kernel lives on
            _write_status(self, 1, f"{kind.__name__}: {error}")
            end_watch(self)
        else:
            _fail_with(self, error)


def _alone_in_a_notebook(ddp):
    """One process with a person before it: it is not ended, neither for an exception nor for standing still."""
    return ddp.world_size == 1 and hasattr(sys, "ps1")


class SetupError(RuntimeError):
    """Setting up failed. `speaks`: this rank says so; others see the same and leave quietly. `code`: for sys.exit: 2
    where a person must look, 1 where a rank or host is missing, which the next start may find."""

    def __init__(self, text, speaks=True, code=2):
        super().__init__(text)
        self.speaks, self.code = speaks, code


def _int(env, name):
    text = env.get(name, "").strip()
    if text and not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text!r} is not an integer. Expected the number that the launcher sets; "
                         f"unset it if it was exported by hand.")
    return int(text) if text else None


def _read_row(env, row):
    """{"rank": (value, variable), ...}, with (None, None) for what is not set, and whether the row is complete."""
    v = {}
    for key in ("rank", "size", "local_rank", "local_size", "node_rank"):
        v[key] = next(((_int(env, n), n) for n in getattr(row, key) if env.get(n, "").strip()), (None, None))
    complete = (v["rank"][1] and v["local_rank"][1] and (v["size"][1] or row.size_optional)
                and all(env.get(n, "").strip() for n in row.needs)
                # a step of one task, such as an interactive shell, is a plain process
                and not (row.name == "Slurm step" and v["size"][0] == 1))
    return v, bool(complete)


def slurm_tasks_per_node(text):
    """Expand Slurm's run-length list: '2(x3),1' -> [2, 2, 2, 1]."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
    if not all(parts):
        raise SetupError(f"cannot read {text!r} as Slurm's list of tasks per node; expected such as 2(x3),1")
    return [int(m[1]) for m in parts for _ in range(int(m[2] or 1))]


def slurm_first_host(nodelist):
    """First host of a Slurm node list: 'a[003-5,9]-ib,b3' -> 'a003-ib'. Containers often have no scontrol."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)[0]   # up to the first comma outside brackets
    return re.sub(r"\[([^\]]*)\]", lambda m: re.split("[-,]", m[1])[0], first)


def detect_launcher(env, mpi=None):
    """Which rank is this process? A pure function of the environment mapping `env` and, where an MPI launcher
    started us and mpi4py was asked, `mpi` = (rank, size) of its COMM_WORLD.

    The first complete row of LAUNCHERS wins; complete rows behind it are expected to differ and are noted.
    Returns a Ddp that knows its place (a plain process: rank 0 of 1). Raises SetupError, printing what was seen,
    where variables are incomplete or sizes disagree: a single process instead would exit 0 with the wrong result.
    """
    rows = [(row, *_read_row(env, row)) for row in LAUNCHERS]
    names = {n for row in LAUNCHERS for k in (row.rank, row.size, row.local_rank, row.local_size, row.node_rank)
             for n in k} | {"MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"}
    seen = "Seen: " + (" ".join(f"{n}={env[n]}" for n in sorted(names) if env.get(n, "").strip()) or "none")
    complete = [(row, v) for row, v, ok in rows if ok]
    if not complete:
        return _plain_process(env, rows, seen)

    row, v = complete[0]
    rank, size, local_rank, local_size, node_rank = (value for value, _ in v.values())
    first = local_rank == 0   # what all ranks of the host see alike, its first one says
    if row.name == "Slurm step" and node_rank is not None:
        text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
        local_size = dict(enumerate(slurm_tasks_per_node(text) if text else ())).get(node_rank)
    sizes = {v["size"][1]: size} if size is not None else {}
    for name in ("WORLD_SIZE", "DDP_WORLD_SIZE"):
        if _int(env, name) is not None and (row.mpi or name == "DDP_WORLD_SIZE"):
            sizes[name] = _int(env, name)
    if row.name == "torchrun" and not env.get("TORCHELASTIC_RUN_ID"):   # exported by hand: MPI must say the same
        for other, o in complete[1:]:
            if other.mpi and (o["rank"][0] != rank or o["size"][0] not in (None, size)):
                raise SetupError(f"RANK={rank} and WORLD_SIZE={size} disagree with {other.name}, which says "
                                 f"rank {o['rank'][0]} of {o['size'][0]}. Expected the same. Unset RANK, "
                                 f"WORLD_SIZE and LOCAL_RANK (left over from another launcher?). {seen}")
    hint = "Unset what is left over from another launcher, or start the number that DDP_WORLD_SIZE names"
    if mpi is not None:
        sizes["mpi4py"] = mpi[1]
        if mpi[1] == size and mpi[0] != rank:
            raise SetupError(f"{row.name} says rank {rank}, mpi4py rank {mpi[0]} of {mpi[1]}. Expected the "
                             f"same. Reinstall mpi4py against this MPI, or set DDP_MPI4PY=0. {seen}")
        if len(set(sizes.values()) - {mpi[1]}) == 1:
            hint = ("mpi4py was probably built for another MPI than this launcher's: reinstall it, or export "
                    "MASTER_ADDR and MASTER_PORT to do without it")
    if not sizes:
        raise SetupError(f"{row.name} started rank {rank} but sets no number of ranks. Expected "
                         f"DDP_WORLD_SIZE: export it next to the mpiexec call (nodes x ranks per node), or "
                         f"install mpi4py. {seen}", first)
    if len(set(sizes.values())) > 1:
        raise SetupError(f"{row.name}: the numbers of ranks disagree: "
                         f"{', '.join(f'{k} says {n}' for k, n in sizes.items())}. {hint}. {seen}", first)
    size = next(iter(sizes.values()))
    for what, value, limit in (("rank", rank, size), ("local rank", local_rank, local_size or size)):
        if not 0 <= value < limit:
            raise SetupError(f"{row.name}: {what} {value} is outside 0 to {limit - 1}. {seen}")

    told = ", ".join(f"{k.replace('_', ' ')} from {v[k][1]}" for k in ("rank", "size", "local_rank") if v[k][1])
    outer = [f"outer launcher {other.name} says rank {o['rank'][0]} of {o['size'][0]}: not used"
             for other, o in complete[1:]]
    return Ddp(rank, size, local_rank, local_size, node_rank, launcher=row.name,
               notes=(f"launcher {row.name}: {told}", *outer))


def _plain_process(env, rows, seen):
    harmless = {"RANK", "WORLD_SIZE", "DDP_WORLD_SIZE"}   # DDP_WORLD_SIZE alone is a check, made by setup_ddp
    stray = {name: key for row, v, _ in rows for key, (_, name) in v.items() if name and name not in harmless
             and (row.name != "Slurm step" or env.get("SLURM_STEP_ID") and v["size"][0] != 1)}   # else its shell
    one_local_rank = list(stray.values()) == ["local_rank"]
    if stray and not one_local_rank or "LOCAL_RANK" in stray and (_int(env, "WORLD_SIZE") or 1) > 1:
        raise SetupError(
            f"a launcher seems to have started this process, but no set of its variables is complete. "
            f"{seen}. Expected for example RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, or PMI_RANK, "
            f"PMI_SIZE and MPI_LOCALRANKID. Unset what was exported by hand, or set DDP_RANK, DDP_WORLD_SIZE "
            "and DDP_LOCAL_RANK.")
    notes = ["launcher none: one process"]
    if one_local_rank:
        notes.append(f"{min(stray)} alone says nothing: ignored")
    if env.get("RANK", "").strip() or env.get("WORLD_SIZE", "").strip():
        notes.append(f"RANK={env.get('RANK', '')} WORLD_SIZE={env.get('WORLD_SIZE', '')} without LOCAL_RANK "
                     f"and MASTER_ADDR are taken as left over: ignored")
    if env.get("SLURM_JOB_ID") and (_int(env, "SLURM_NTASKS") or 1) > 1:
        notes.append(f"ATTENTION: Slurm job {env['SLURM_JOB_ID']} has {env['SLURM_NTASKS']} tasks, and this "
                     f"is ONE process in its shell. To start all: srun python "
                     f"{os.path.basename(sys.argv[0]) or '...'}")
    return Ddp(notes=tuple(notes))


# ---------------------------------------------------------------- device and backend
DEVICES = ("auto", "cpu", "cuda", "xpu")
BACKENDS = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "xccl": ("xpu",), "ccl": ("xpu", "cpu")}   # what each serves
BEST = {"cpu": ("gloo",), "cuda": ("nccl", "gloo"), "xpu": ("xccl", "ccl")}


def choose_device(device, backend, local_rank, found):
    """Choose device type, index and backend. A pure function.

    device: auto | cpu | cuda | xpu.  backend: auto | nccl | gloo | ccl | xccl | xpu (xpu: the best one for XPU).
    found: {'cuda': devices visible, 'xpu': devices visible, 'nccl' | 'gloo' | 'xccl' | 'ccl': bool}, perhaps 'trouble':
    why there is no ccl.
    Returns (type, index or None, backend, reason). Raises SetupError for what is not there, saying what is.
    """
    def refuse(what):
        have = ", ".join(["cpu", *(k if v is True else f"{v} {k}" for k, v in found.items() if v and k != "trouble")])
        raise SetupError(f"{what}. Available here: {have}. Choose --device auto and --backend auto, or among "
                         "these.")

    for name, value, known in (("device", device, DEVICES), ("backend", backend, ("auto", "xpu", *BACKENDS))):
        if value not in known:
            raise SetupError(f"--{name} {value} is not known; expected one of {', '.join(known)}")
    if device != "auto":
        kind, why = device, f"--device {device}"
    elif backend in ("nccl", "xccl", "ccl", "xpu"):
        kind, why = BACKENDS.get(backend, ("xpu",))[0], f"--backend {backend}"
        if backend == "ccl" and not found["xpu"]:   # oneCCL serves CPUs too
            kind, why = "cpu", "--backend ccl and no XPU visible"
    else:
        kind = next((k for k in ("cuda", "xpu") if found[k]), "cpu")
        why = f"{found[kind]} {kind} device(s) visible" if kind != "cpu" else "no accelerator visible"
    if kind != "cpu" and not found[kind]:
        refuse(f"{kind} was asked for ({why}), but no such device is visible")
    if backend == "xpu" and kind != "xpu" or backend in BACKENDS and kind not in BACKENDS[backend]:
        refuse(f"--backend {backend} does not serve device {kind}")
    choice = (backend,) if backend in BACKENDS else BEST[kind]
    picked = next((b for b in choice if found[b]), None)
    if picked is None:
        refuse(f"no backend for {kind}: expected {' or '.join(choice)}, which this torch lacks"
               + (f" ({found['trouble']})" if "ccl" in choice and "trouble" in found else ""))
    # Folding serves all three: every device visible, a mask of some, and one visible device per task.
    index = None if kind == "cpu" else local_rank % found[kind]
    where = "cpu" if index is None else f"{kind}:{index} of {found[kind]}"
    return kind, index, picked, f"device {where} ({why}); backend {picked}"


def _found_devices(need_ccl=False, ipex="auto"):
    """What choose_device needs to know of this machine. Intel's own packages are imported only where torch lacks what
    they bring: IPEX the device (before torch 2.4), oneCCL's bindings the backend (before xccl, 2.8)."""
    if ipex != "off" and not hasattr(torch, "xpu"):
        _import_ipex()
    xpu = torch.xpu.device_count() if hasattr(torch, "xpu") else 0
    xccl, ccl, trouble = _has_xccl(), False, ""
    if need_ccl or (xpu and not xccl):
        if xpu and ipex != "off":
            _import_ipex()   # first: the bindings' XPU half is built on it
        try:
            import oneccl_bindings_for_pytorch  # noqa: F401  (registers the backend "ccl")
            ccl = True
        except Exception as e:   # missing, or its libraries are, or made for another torch: many kinds
            trouble = f"oneccl_bindings_for_pytorch: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    return {"cuda": torch.cuda.device_count(), "xpu": xpu, "nccl": dist.is_nccl_available(),
            "gloo": dist.is_gloo_available(), "xccl": xccl, "ccl": ccl, **({"trouble": trouble} if trouble else {})}


def _has_xccl():
    return bool(getattr(dist, "is_xccl_available", bool)())


def _import_ipex():
    """(the module intel_extension_for_pytorch, "") or (None, why it cannot be used)."""
    ours = torch.__version__.split(".")[:2]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("intel-extension-for-pytorch")
        if version.split(".")[:2] != ours:   # importing it would print an error on every rank and try to exit
            return None, f"intel_extension_for_pytorch {version} does not fit torch {torch.__version__}"
    try:
        import intel_extension_for_pytorch
        return intel_extension_for_pytorch, ""
    except (Exception, SystemExit) as e:   # a library that is missing, a CPU that is too old: many kinds
        return None, f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def _device_id(device):
    """A name that is unique for an accelerator within its host, whatever is masked; None for a CPU."""
    if device.type == "cpu":
        return None
    uuid = getattr(getattr(torch, device.type).get_device_properties(device.index), "uuid", None)
    mask = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}[device.type]
    return f"{device.type} {uuid}" if uuid else f"{device} of {mask}={os.environ.get(mask, '')}"


# ---------------------------------------------------------------- set-up
def seed_for(*parts):
    """Integer in [0, 2**63) made from integers and strings by blake2b: equal parts give equal seeds, everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)   # every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def setup_ddp(device="auto", backend="auto", seed=0, ranks=None, timeout=1800.0, init_timeout=300.0, quiet=False,
              ipex="auto"):
    """Find this process' rank and device, join the others, and return a Ddp.

    device, backend: see choose_device.  seed: equal initial weights on all ranks; wrap_ddp then gives every rank a
    stream of its own, keyed by (seed, rank).  ranks: refuse any other number of ranks.
    timeout: seconds a collective may take.  init_timeout: seconds to wait for all ranks to appear.
    ipex: auto | on | off, see optimize_with_ipex.
    Called again in the same process it returns the same Ddp. Raises SetupError (a RuntimeError), saying what was
    found and what to do; where ranks are missing, the message names them. What all ranks see alike is raised on one
    of them; the others end with exit code 1.
    """
    if getattr(setup_ddp, "current", None) is not None:
        return setup_ddp.current   # one process has one process group, as in torch.distributed itself
    try:
        ddp = _setup(dict(os.environ), device, backend, seed, ranks, timeout, init_timeout, ipex)
    except SetupError as e:
        if not e.speaks:
            time.sleep(4.0)   # let the one that speaks do so, before the launcher kills it because others have left
            _leave(1)
        raise
    setup_ddp.current = ddp
    if not quiet:
        hosts = len(set(ddp.state.get("hosts", [ddp.host])))
        print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on {hosts} host(s)\n  " + "\n  ".join(ddp.notes))
    return ddp


def _setup(env, device, backend, seed, ranks, timeout, init_timeout, ipex):
    _deadline(env)
    if ipex not in ("auto", "on", "off"):
        raise SetupError(f"ipex is {ipex!r}; expected auto, on or off")
    mpi, finalize = _start_mpi(env, init_timeout)
    ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
    for name, wanted in (("--ranks", ranks), ("DDP_WORLD_SIZE", _int(env, "DDP_WORLD_SIZE"))):
        if wanted is not None and wanted != ddp.world_size:
            raise SetupError(f"{name} asks for {wanted} rank(s), but {ddp.world_size} were started. "
                             f"{'; '.join(ddp.notes)}. Start {wanted} (mpirun -n, srun -n, torchrun "
                             f"--nproc_per_node) or change {name}.", speaks=ddp.rank == 0)
    error, reason, target = None, "", torch.device("cpu")
    try:
        found = _found_devices(backend == "ccl", ipex)
        needs_none = ddp.world_size == 1 and backend == "auto"   # one process is not refused for the lack of a backend
        try:
            offered = {**found, **dict.fromkeys(BACKENDS, True)} if needs_none else found
            kind, index, backend, reason = choose_device(device, backend, ddp.local_rank, offered)
        except SetupError:   # the message names what there really is
            kind, index, backend, reason = choose_device(device, backend, ddp.local_rank, found)
        if index is not None:
            target = torch.device(kind, index)
            getattr(torch, kind).set_device(index)   # before the group is made: it binds to the current device
    except RuntimeError as e:
        if ddp.world_size == 1:
            raise
        error = str(e)   # perhaps of this rank alone: rank 0 says it, see _join
    ddp = replace(ddp, device=target, backend=backend if ddp.world_size > 1 else "none", seed=seed,
                  host=socket.gethostname(), notes=(*ddp.notes, reason), timeout=datetime.timedelta(seconds=timeout),
                  state={"mpi": mpi, "finalize_mpi": finalize, "ipex": ipex})
    if ddp.world_size > 1:
        ddp = _join(ddp, env, init_timeout, error)
    else:   # libraries that look there make a group of one
        with _listen("127.0.0.1") as free:
            _export(ddp, MASTER_ADDR=env.get("MASTER_ADDR") or "127.0.0.1",
                    MASTER_PORT=env.get("MASTER_PORT") or free.getsockname()[1])
    _export(ddp, RANK=ddp.rank, WORLD_SIZE=ddp.world_size, LOCAL_RANK=ddp.local_rank,
            LOCAL_WORLD_SIZE=ddp.local_world_size)
    _seed_all(seed)
    return ddp


def _export(ddp, **variables):
    undo = ddp.state.setdefault("environment", {})
    for name, value in variables.items():
        undo.setdefault(name, os.environ.get(name))
        os.environ[name] = str(value)


def _start_mpi(env, limit):
    """(COMM_WORLD of mpi4py, are we to finalise it?); (None, False) where it is absent, unwanted or not needed.
    Importing it initialises MPI, which freezes or misleads a process that no MPI launched: so never elsewhere."""
    row, v = next(((row, v) for row in LAUNCHERS for v, complete in [_read_row(env, row)] if complete), (None, None))
    if row is None or not row.mpi or env.get("DDP_MPI4PY") == "0":
        return None, False
    if (v["size"][1] or env.get("DDP_WORLD_SIZE")) and env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return None, False
    ours = "mpi4py.MPI" not in sys.modules
    try:
        if ours:
            import mpi4py
            mpi4py.rc.finalize = False   # at exit it would wait for the others (measured: a raise hangs); see cleanup
            # MPI_Init waits for all ranks without end and keeps Python's lock: only this timer gets through.
            with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError):   # no real stderr: no timer
                faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
        from mpi4py import MPI
    except (ImportError, RuntimeError):   # RuntimeError: no MPI library found. Rank and size are known without it
        return None, False
    finally:
        if ours:
            faulthandler.cancel_dump_traceback_later()
    return (None, False) if MPI.Is_finalized() else (MPI.COMM_WORLD, ours)


# ---------------------------------------------------------------- rendezvous
def _listen(host, port=0):
    """A listening socket on the one address in use; port 0 lets the kernel choose a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(4096)
        except OSError:
            sock.close()
            raise
    except OSError as e:
        raise SetupError(
            f"rank 0 on {socket.gethostname()} cannot listen on {host}:{port}: {e.strerror}. Expected "
            f"MASTER_ADDR to be an address of rank 0's host and MASTER_PORT to be free there. Leave both "
            f"unset to have them found, or choose another port.") from None
    return sock


def _resolve(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _own_address():
    """The address under which other hosts reach this one."""
    host = socket.gethostname()
    short, names = host.split(".")[0], [host]
    if re.fullmatch(r"x\d+c\d+s\d+b\d+n\d+", short) and ".hsn." not in host:   # HPE EX node: prefer its fabric name
        names = [f"{short}.hsn.cm.{m}.alcf.anl.gov" for m in ("aurora", "polaris")] + names
    for ip in map(_resolve, names):
        if ip and not ip.startswith("127."):   # Debian maps a host's own name to 127.0.1.1
            return ip
    return _route_to("192.0.2.1") or "127.0.0.1"   # a documentation address: the default route decides


def _route_to(host):
    """This host's address on the way to `host`. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.connect((host, 9))
        return s.getsockname()[0]
    return None


def _interface_of(ip):
    """Name of the network interface that has the IPv4 address, or None (also where the system is not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):   # an interface without an address
                packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))   # SIOCGIFADDR
                if socket.inet_ntoa(packed[20:24]) == ip:
                    return name
    return None


def _launch_name(env, ddp, one_host):
    """A name that only the ranks of this very launch share, or None. A killed run's file must not mislead the next."""
    ids = {"Slurm step": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), "Flux": ("FLUX_JOB_ID",),
           "LSF jsrun": ("LSB_JOBID", "PMIX_NAMESPACE"), "PALS": ("PALS_APID",)}.get(ddp.launcher, ("PMIX_NAMESPACE",))
    if env.get(ids[0]) and (not one_host or ddp.launcher == "Slurm step"):
        return "-".join(env.get(name, "") for name in ids)
    if not one_host:
        return None
    # One host: the launcher's process id and start time. A wrapper around a rank has the rank's variable itself.
    pid, variable = os.getppid(), next(r.rank[0] for r in LAUNCHERS if r.name == ddp.launcher)
    with contextlib.suppress(OSError):   # no /proc: the parent is the best guess
        while True:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/environ", "rb") as environ:
                fields = stat.read().rpartition(")")[2].split()   # from field 3 on: [1] parent, [19] start time
                if variable.encode() + b"=" not in environ.read():
                    return f"{pid}-{fields[19]}"
            pid = int(fields[1])
    return str(pid)


def _address_file(env, ddp, one_host):
    name = _launch_name(env, ddp, one_host)
    if name is None:
        raise SetupError(
            f"{ddp.launcher} started ranks that may be on several hosts, and nothing tells them where rank 0 "
            f"is: mpi4py is not usable and MASTER_ADDR is unset. Install mpi4py for this MPI, or export "
            f"MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to all ranks.", ddp.rank == 0)
    folder = env.get("DDP_RENDEZVOUS_DIR") or os.getcwd()
    if one_host:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = os.path.join(tempfile.gettempdir(), f"ddp-{user}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if user and os.stat(folder).st_uid != user:
            raise SetupError(f"{folder} belongs to another user; expected it to be yours. Set TMPDIR.",
                             ddp.local_rank == 0)
    digest = hashlib.blake2b(f"{ddp.launcher} {name} {ddp.world_size}".encode(), digest_size=8).hexdigest()
    return os.path.join(folder, f".ddp-rank0-{digest}")


def _open_store(ddp, env, one_host, agent, init_timeout):
    """Meet rank 0 in its TCPStore. Returns (store, host, port, a word on how it was found, the address file or None).

    Rank 0 binds its socket first and then tells the others where it is, or that it could not: by MPI broadcast, or
    in a file. Where neither is possible (torchrun, variables exported by hand, MASTER_ADDR on several hosts), the
    others know MASTER_ADDR and MASTER_PORT only.
    """
    host, port, mpi, path = env.get("MASTER_ADDR"), _int(env, "MASTER_PORT"), ddp.state["mpi"], None
    how = f"from {'MASTER_ADDR' if host else 'MASTER_PORT'}" if host or port else ""
    by_hand = ddp.launcher in ("DDP_* variables", "torchrun")   # the ranks may share no parent process
    if mpi is not None:
        how += " by MPI broadcast"
    elif not host or one_host and not by_hand:
        path = _address_file(env, ddp, one_host)
        how += f" through {path}"
    port = port or (29500 if host else 0)
    listener = failure = None
    if ddp.rank == 0 and not agent:
        slurm_host = slurm_first_host(env.get("SLURM_STEP_NODELIST", "")) if ddp.launcher == "Slurm step" else ""
        slurm_host = slurm_host if _resolve(slurm_host) else ""   # in a cloud its names may mean nothing
        host = host or ("127.0.0.1" if one_host else slurm_host or _own_address())
        if not one_host and host in (ddp.host, slurm_host) and _resolve(host).startswith("127."):
            host = _own_address()   # Debian maps a host's own name to 127.0.1.1; the others see its real address
        try:
            listener = _listen(host, port)
            port = listener.getsockname()[1]
        except SetupError as e:
            failure = e
    if mpi is not None:
        host, port, failed = mpi.bcast((host, port, failure is not None), root=0)
        if failed and failure is None:
            raise SetupError("rank 0 cannot listen", speaks=False)   # it has said why
    elif path and ddp.rank == 0:
        _write_address(path, host, port, failure)
    if failure:
        raise failure
    if listener is not None:
        store = dist.TCPStore(host, port, None, True, datetime.timedelta(seconds=init_timeout),
                              wait_for_workers=False, master_listen_fd=listener.detach())
    else:
        store, host, port = _connect(ddp, host, port, None if mpi is not None else path, init_timeout)
    # Torchrun's agent keeps its store over restarts, and a script may set up twice: old keys must not be seen.
    setup_ddp.count = getattr(setup_ddp, "count", 0) + 1
    launch = env.get("TORCHELASTIC_RUN_ID") if by_hand else _launch_name(env, ddp, one_host)
    store = dist.PrefixStore(f"ddp/{launch}/{env.get('TORCHELASTIC_RESTART_COUNT')}/{setup_ddp.count}", store)
    if listener is not None:
        store.set("rank0", "")
    elif not agent:   # rank 0 owns this store: if it is not in it, another run does
        _await_key(ddp, store, "rank0", 20.0, f"a store answers at {host}:{port}, but rank 0 of this run is "
                                              f"not in it. Is it another run's? Choose another MASTER_PORT.")
    return store, host, port, how.strip(), path


def _write_address(path, host, port, failure):
    try:
        with open(f"{path}.{os.getpid()}", "w") as f:
            json.dump([host, port, failure is not None], f)
        os.replace(f.name, path)
    except OSError as e:
        raise SetupError(f"rank 0 cannot write the address file {path}: {e.strerror}. Expected a folder that all hosts "
                         f"see. Set DDP_RENDEZVOUS_DIR, or MASTER_ADDR and MASTER_PORT.") from None
    if failure:
        time.sleep(5.0)   # the others read it
        os.unlink(path)


def _connect(ddp, host, port, path, limit):
    """(client of rank 0's store, host, port). Waits for the address file and the listener by itself: torch's client
    prints a wall of C++ frames while nobody listens, and the file may be of a run that was killed."""
    deadline, speaks, found = time.monotonic() + limit, ddp.local_rank == 0 or ddp.rank == 1, path is None
    while True:
        try:
            if path is not None:
                with open(path) as f:
                    host, port, failed = json.load(f)
                if failed:
                    raise SetupError("rank 0 cannot listen", speaks=False)   # it has said why
                found = True
            socket.create_connection((host, port), timeout=5).close()
            break
        except OSError as e:
            if time.monotonic() > deadline and found:
                raise SetupError(
                    f"rank 0 cannot be reached at {host}:{port} within {limit:.0f} s ({e}). Expected it to listen "
                    f"there. Did it start? Is MASTER_ADDR right? Try `ping {host}` from {ddp.host}.", speaks,
                    code=1) from None
            if time.monotonic() > deadline:
                raise SetupError(
                    f"rank 0 did not appear within {limit:.0f} s: no file {path}. Did it start? Do all hosts see "
                    f"this folder? If not, set DDP_RENDEZVOUS_DIR, or MASTER_ADDR and MASTER_PORT.", speaks,
                    code=1) from None
            time.sleep(0.05)
    try:
        store = dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=20), wait_for_workers=False)
    except RuntimeError:
        raise SetupError(f"something listens at {host}:{port} that is not this run's store. Expected rank 0. Choose "
                         f"another MASTER_PORT.", speaks) from None
    store.set_timeout(datetime.timedelta(seconds=limit))
    return store, host, port


def _await_key(ddp, store, key, limit, otherwise):
    try:
        store.wait([key], datetime.timedelta(seconds=limit))
        return store.get(key)
    except RuntimeError:   # a timeout, or rank 0 is gone
        raise SetupError(otherwise, speaks=ddp.local_rank == 0 or ddp.rank == 1, code=1) from None


def _join(ddp, env, init_timeout, error):
    """Meet all ranks in the store, check that they fit together, make the process groups. `error`: what this rank
    has to report instead of joining."""
    one_host = ddp.local_world_size == ddp.world_size
    agent = ddp.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store, host, port, how, path = _open_store(ddp, env, one_host, agent, init_timeout)
    store.set(f"here/{ddp.rank}", json.dumps({
        "host": ddp.host, "backend": ddp.backend, "torch": torch.__version__, "error": error,
        "process": [os.getpid(), _process_start(os.getpid())],
        "device": None if error else _device_id(ddp.device)}))
    if store.add(f"claim/{ddp.rank}", 1) > 1:   # MASTER_PORT exported by hand, and two runs use it
        store.set("twice", str(ddp.rank))
    joined = store.add("joined", 1)
    server = None
    if ddp.rank == 0:
        deadline = time.monotonic() + init_timeout
        while (joined := store.add("joined", 0)) < ddp.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
        table = _check_table(store, ddp.world_size, init_timeout)
        if "error" not in table:
            # Under torchrun MASTER_ADDR is the agent's host, which rank 0 may not share.
            listener = _listen("127.0.0.1" if one_host else _own_address() if agent else host)
            server = _LifelineServer(listener, ddp, table["hosts"])
            table["lifeline"] = [*server.address, server.token]
        store.set("table", json.dumps(table))
        if path:
            os.unlink(path)
    else:   # rank 0 gives up first and says why; only if it is gone itself does this wait run out
        table = json.loads(_await_key(ddp, store, "table", init_timeout + 20, "rank 0 ended while the ranks were "
                                      "meeting. Expected it to stay; look for its own message."))
    if "error" in table:
        store.add("read", 1)
        if ddp.rank == 0:   # it says the reason, and owns the store: the others must have read before it leaves
            _poll(lambda: store.add("read", 0) >= joined, 5.0)
            raise SetupError(table["error"], code=table.get("code", 2))
        _leave(1)
    hosts = table["hosts"]
    ddp.state.update(hosts=hosts, processes=table["processes"], server=server, store=store)
    ddp.state["lifeline"] = lifeline = _Lifeline(ddp, table["lifeline"], server)
    _export(ddp, MASTER_ADDR=host, MASTER_PORT=port)
    interface = _interface_of("127.0.0.1" if one_host else _route_to(host))
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        _export(ddp, GLOO_SOCKET_IFNAME=interface)
    watch_run(ddp, None, init_timeout / 60, signals=(), arm=True)   # backends may wait for a lost rank without end
    dist.init_process_group(ddp.backend, store=store, rank=ddp.rank, world_size=ddp.world_size, timeout=ddp.timeout,
                            **({"device_id": ddp.device} if ddp.backend == "nccl" else {}))
    sys.excepthook = lifeline.endings.excepthook   # torch has wrapped it in one that swallows what we print
    control = None
    if ddp.world_size <= (_int(env, "DDP_GLOO_MAX_RANKS") or GLOO_MAX_RANKS):
        control = dist.group.WORLD if ddp.backend == "gloo" else dist.new_group(backend="gloo", timeout=ddp.timeout)
    end_watch(ddp)
    node_rank = list(dict.fromkeys(hosts)).index(ddp.host) if ddp.node_rank is None else ddp.node_rank
    return replace(ddp, local_world_size=ddp.local_world_size or hosts.count(ddp.host), node_rank=node_rank,
                   control=control, notes=(*ddp.notes, f"rank 0 at {host}:{port}, found {how}"))


def _check_table(store, n, init_timeout):
    """On rank 0: {'hosts': [...]} if all ranks are there and fit together, else {'error': text}."""
    rows = {r: json.loads(store.get(f"here/{r}")) for r in range(n) if store.check([f"here/{r}"])}

    def ranks_by(key):
        groups = collections.defaultdict(list)
        for r, row in rows.items():
            groups[key(row)].append(r)
        return groups

    if store.check(["twice"]):
        return dict(error=f"rank {store.get('twice').decode()} came twice. Expected each once. Was it started twice, "
                          f"or do two runs use the same MASTER_PORT?")
    for text, ranks in ranks_by(lambda row: row["error"]).items():
        if text:
            who = "" if len(ranks) == n else f"rank {_some(ranks)} on {rows[ranks[0]]['host']}: "
            return dict(error=who + text)
    if len(rows) < n:
        return dict(code=1, error=f"{n - len(rows)} of {n} ranks did not appear within {init_timeout:.0f} s: rank(s) "
                          f"{_some(sorted(set(range(n)) - set(rows)))}. The others are on "
                          f"{_some(sorted({row['host'] for row in rows.values()}))}. Is a host down, or cannot it "
                          f"reach rank 0?")
    for (host, device), ranks in ranks_by(lambda row: (row["host"], row["device"])).items():
        if device and len(ranks) > 1:
            return dict(error=f"ranks {_some(ranks)} on {host} share one accelerator ({device}); expected one rank per "
                              f"accelerator. Start fewer ranks per host, or unset the mask "
                              f"(CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK).")
    for what in ("backend", "torch"):
        values = sorted(ranks_by(lambda row: row[what]))
        if len(values) > 1:
            return dict(error=f"the ranks differ in {what}: {', '.join(values)}; expected the same on all. Give "
                              f"--device and --backend, and one environment for all hosts.")
    return {"hosts": [rows[r]["host"] for r in range(n)], "processes": [rows[r]["process"] for r in range(n)]}


def _some(items):
    shown = ", ".join(map(str, items[:20]))
    return f"{shown} and {len(items) - 20} more" if len(items) > 20 else shown


def _poll(condition, seconds):
    """Wait until condition() is true, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


# ---------------------------------------------------------------- one fails, all end
# MPICH, Intel MPI and srun let the other ranks run on when one fails; a rank outside a collective never notices. So
# every rank holds a connection to a small thread in rank 0, its lifeline. A rank that fails says so there; one that
# dies without a word is seen by its connection closing. Each rank waits in recv(): no polling, no load, and no torch
# store, whose client prints pages of C++ frames when its peer is gone. Messages are lines of JSON:
#   rank -> server   {"token": ..., "rank": r}, {"failed": code, "cause": text, "secondary": bool}, {"bye": true},
#                    {"beat": [step, beats, age, collectives, where]}, see _Watch
#   server -> ranks  {"failed": rank, "code": code, "cause": text, "silent": [ranks]}: all end; {"alive": true}: the
#                    answer to a beat; {"done": true}: everybody has said goodbye
DIED = "died without a word (killed, out of memory, or a crash)"


def _send(sock, **message):
    with contextlib.suppress(OSError):   # the peer is gone: then its own end is what counts
        sock.sendall(json.dumps(message).encode() + b"\n")


def _keep_alive(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A host that vanishes is missed after a minute, with or without something on its way to it.
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _LifelineServer(threading.Thread):
    """In rank 0: passes the first failure on to all, and releases all once everybody has said goodbye."""

    def __init__(self, listener, ddp, hosts):
        super().__init__(daemon=True, name="ddp-lifeline-server")
        self.listener, self.ddp, self.hosts = listener, ddp, hosts
        self.address, self.token = listener.getsockname()[:2], secrets.token_hex(8)
        self.ranks, self.peers, self.gone = {}, {}, set()   # socket -> rank, rank -> socket, ranks that have left
        self.beats, self.looked = {}, 0.0                   # rank -> (when heard, its last beat); when last looked at
        self.parting = None                                 # when the first rank said goodbye
        self.verdict = self.pending = None
        self.start()

    def run(self):
        selector, buffers, told = selectors.DefaultSelector(), {}, False
        selector.register(self.listener, selectors.EVENT_READ)
        while self.peers or len(self.gone) < self.ddp.world_size:
            # A failure that only reports a lost connection waits a moment for the failure that caused it.
            limit = 1.0 if self.beats or self.gone else None
            if self.pending is not None:
                limit = max(0.0, self.pending[0] - time.monotonic())
            for key, _ in selector.select(limit):
                sock = key.fileobj
                if sock is self.listener:
                    try:
                        sock, _ = self.listener.accept()
                        _keep_alive(sock)
                        selector.register(sock, selectors.EVENT_READ)
                        buffers[sock] = b""
                    except OSError:   # it has gone again; or no file may be opened, and then it goes on knocking
                        time.sleep(0.05)
                    continue
                try:
                    data = sock.recv(4096)
                    *lines, buffers[sock] = (buffers[sock] + data).split(b"\n")
                    for line in lines:
                        self._hear(sock, json.loads(line))
                except (OSError, ValueError, KeyError, TypeError):   # lost, or a stranger that talks nonsense
                    data = b""
                if not data or (sock not in self.ranks and len(buffers[sock]) > 4096):
                    selector.unregister(sock)
                    sock.close()
                    self._closed(self.ranks.get(sock))
            if self.pending is not None and time.monotonic() >= self.pending[0]:
                self._announce(*self.pending[1:])
            if len(self.gone) == self.ddp.world_size and not told:
                told = True
                self._tell(done=True)
            if self.verdict is None and self.beats:
                self._look_for_a_hang()
            if self.verdict is None and self.parting and time.monotonic() > self.parting + _patience(self.ddp):
                self._end_the_parting()
        selector.close()
        self.listener.close()

    def _hear(self, sock, message):
        if sock not in self.ranks:
            if not secrets.compare_digest(message["token"], self.token):
                raise ValueError("a stranger")
            self.ranks[sock] = message["rank"]
            self.peers[message["rank"]] = sock
            if self.verdict:   # it came late: tell it what has happened
                _send(sock, **self.verdict)
        elif "bye" in message:
            self.gone.add(self.ranks[sock])
            self.beats.pop(self.ranks[sock], None)
            self.parting = self.parting or time.monotonic()
        elif "beat" in message:
            self.beats[self.ranks[sock]] = time.monotonic(), message["beat"]
            if message["beat"] is None:
                del self.beats[self.ranks[sock]]
            _send(sock, alive=True)
        elif self.verdict is None and not message["secondary"]:
            self._announce(self.ranks[sock], message["failed"], message["cause"])
        elif self.verdict is None and self.pending is None:
            self.pending = (time.monotonic() + 1.0, self.ranks[sock], message["failed"], message["cause"])

    def _closed(self, rank):
        if rank is None:
            return
        self.peers.pop(rank, None)
        if rank not in self.gone:
            self.gone.add(rank)
            if self.verdict is None:
                _print_failure(self.ddp, DIED, rank, self.hosts[rank])
                self._announce(rank, 1, DIED)

    def _announce(self, rank, code, cause, silent=()):
        self.pending = None   # the silent ones are for their neighbours: beyond a thousand it is no single host
        self.verdict = {"failed": rank, "code": code, "cause": cause, "silent": list(silent)[:1000]}
        self._tell(**self.verdict)

    def _look_for_a_hang(self):
        """End all where no rank has made progress for the limit: one that waits for another's long work is no hang."""
        watch, now = self.ddp.state.get("watch"), time.monotonic()
        if watch is None or not watch.limit or now - self.looked < 1.0:
            return
        self.looked = now
        if min(now - heard + beat[2] for heard, beat in self.beats.values()) < watch.limit:
            return
        ranks = [r for r in range(self.ddp.world_size) if r not in self.gone]
        silent = [r for r in ranks if r not in self.beats or now - self.beats[r][0] > watch.silence]
        late, text = describe_hang({r: self.beats[r][1] for r in ranks if r in self.beats}, ranks, silent, self.hosts)
        text = f"no progress for {watch.limit:.0f} s (the watchdog's limit). {text} {watch.stacks_note()}"
        _print_failure(self.ddp, text, late, self.hosts[late])
        self._announce(late, WATCHDOG, text.splitlines()[0], silent)

    def _end_the_parting(self):
        """End all where some do not come to cleanup_ddp."""
        missing = [r for r in range(self.ddp.world_size) if r not in self.gone]
        if missing:
            text = (f"rank {_some(missing)} of {self.ddp.world_size} did not come to cleanup_ddp within "
                    f"{_patience(self.ddp):.0f} s")
            _print_failure(self.ddp, text, missing[0], self.hosts[missing[0]])
            self._announce(missing[0], WATCHDOG, text, missing)

    def _tell(self, **message):
        line = json.dumps(message).encode() + b"\n"
        for sock in self.peers.values():
            with contextlib.suppress(OSError):
                sock.sendall(line)

    def outlast(self, seconds):
        """The others hear the news through this process: let them leave first, but wait no longer than `seconds`."""
        _poll(lambda: not set(self.peers) - {0}, seconds)


class _Lifeline(threading.Thread):
    """In every rank: waits for the news that a rank has failed, and then ends this process."""

    def __init__(self, ddp, address, server):
        super().__init__(daemon=True, name="ddp-lifeline")
        host, port, token = address
        self.ddp, self.server = ddp, server
        self.sock = socket.create_connection((host, port), timeout=60)
        self.sock.settimeout(None)
        _keep_alive(self.sock)
        _send(self.sock, token=token, rank=ddp.rank)
        self.leaving, self.failing, self.answered = False, False, threading.Event()
        self.sending, self.heard = threading.Lock(), time.monotonic()
        _make_kernel_timer()
        self.endings = _Endings(ddp)
        if hasattr(os, "register_at_fork"):   # a forked DataLoader worker must not keep a dead rank's connection open
            os.register_at_fork(after_in_child=self.forget)
        self.start()

    def run(self):
        try:
            with self.sock.makefile("rb") as f:
                while "alive" in (message := json.loads(f.readline())):
                    self.heard = time.monotonic()
        except (OSError, ValueError):   # rank 0 is gone: one of the survivors says so
            message = None if self.leaving else {"failed": 0, "code": 1, "cause": DIED}
            if message and _speaks_for_rank_0(self.ddp):   # even if a lost connection is what it is about to report
                _end_soon()
                _write_status(self.ddp, 1, f"rank 0 on {self.ddp.state['hosts'][0]}: {DIED}", for_rank_0=True)
                _print_failure(self.ddp, DIED, 0, self.ddp.state["hosts"][0])
        if message is None or "done" in message or (self.failing and message["failed"] == self.ddp.rank):
            self.answered.set()   # a failing main thread prints its own failure
            return
        end_here(self.ddp, message["failed"], message["code"], message["cause"], message.get("silent", ()))

    def send(self, **message):
        with self.sending:
            _send(self.sock, **message)

    def fail(self, code, cause, secondary):
        """Announce a failure. Returns if it is the first one, to be printed; else this process has ended."""
        self.failing = True
        self.send(failed=code, cause=cause, secondary=secondary)
        self.answered.wait(8.0)

    def forget(self):
        if self.sock.fileno() < 0:   # cleaned up before the fork
            return
        self.endings.restore()
        for sock in (self.sock, *((self.server.listener, *self.server.peers.values()) if self.server else ())):
            with contextlib.suppress(OSError):
                os.close(sock.detach())


class _Endings:
    """How a script may end without a word to us: by an exception that nobody catches, by sys.exit, without
    cleanup_ddp."""

    def __init__(self, ddp):
        self.ddp, self.pid = ddp, os.getpid()
        self.previous_hook, sys.excepthook = sys.excepthook, self.excepthook
        # Python does not tell atexit handlers the exit code. `raise SystemExit(1)` is seen by `with setup_ddp()` only.
        self.exit_code, self.restored = None, False
        self.previous_exits = sys.exit, getattr(builtins, "exit", None), getattr(builtins, "quit", None)
        sys.exit = builtins.exit = builtins.quit = self.sys_exit
        atexit.register(self.at_exit)

    def excepthook(self, kind, error, tb):
        if os.getpid() == self.pid and not self.restored:
            _fail_with(self.ddp, error)
        self.previous_hook(kind, error, tb)

    def sys_exit(self, code=None):
        self.exit_code = code
        told = isinstance(code, str) and self.ddp.world_size > 1   # by us, with the rank
        self.previous_exits[0](1 if told else code)

    def at_exit(self):
        """The script ends without cleanup_ddp."""
        if os.getpid() != self.pid:
            return
        error = getattr(sys, "last_value", None)   # of an exception that nobody caught, whoever's hook has printed it
        lifeline = self.ddp.state.get("lifeline")
        if error is not None or self.exit_code not in (None, 0) or lifeline and lifeline.failing:
            _fail_with(self.ddp, error or SystemExit(self.exit_code or 1))
        cleanup_ddp(self.ddp)

    def restore(self):
        self.restored = True
        atexit.unregister(self.at_exit)
        names = ((sys, "excepthook"), (sys, "exit"), (builtins, "exit"), (builtins, "quit"))
        for (module, name), before in zip(names, (self.previous_hook, *self.previous_exits)):
            if getattr(module, name, None) in (self.excepthook, self.sys_exit):   # else it is somebody's who came later
                setattr(module, name, before)


def _speaks_for_rank_0(ddp):
    """The first other rank that lives on its host tells that rank 0 is gone, and the first rank of the next host,
    should the whole host be gone."""
    hosts, processes = ddp.state["hosts"], ddp.state["processes"]
    if ddp.host != hosts[0]:
        return ddp.rank == next(r for r, host in enumerate(hosts) if host != hosts[0])
    lives = lambda r: r == ddp.rank or not processes[r][1] or _process_start(processes[r][0]) == processes[r][1]
    return ddp.rank == next(r for r, host in enumerate(hosts) if r and host == ddp.host and lives(r))


def _say(text):
    """To stderr, where that still works: a full disk or a reader that is gone must not keep a run from ending."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _print_failure(ddp, text, rank, host, cause=None):
    """What happened, and as the last line who failed, why, what is saved and how to go on."""
    _end_soon()   # whoever tells a failure ends, even if nobody reads what is written here
    path, step = ddp.state.get("checkpoint", (None, None))
    saved = "No checkpoint yet" if path is None else f"Last checkpoint: {path}"
    saved += "" if step is None else f" (step {step})"
    command = shlex.join(["python", *getattr(sys, "orig_argv", sys.argv)[1:]])
    place, cause = f"rank {rank} of {ddp.world_size} on {host}", cause or text.splitlines()[0]
    cause = cause.rstrip(".") if len(cause) < 250 else cause[:250] + " ..."
    story = f"\n[{place}] {text}" if "\n" in text else ""
    _say(f"{story}\nFAILED: {place}: {cause}. {saved}. To go on, give the same command again ({ddp.launcher}, "
         f"{ddp.world_size} rank(s)): {command}")


def _fail_with(ddp, error):
    """End all ranks because of an exception in this one."""
    if isinstance(error, KeyboardInterrupt):
        stop_all(ddp, "interrupted (Ctrl-C)", 130)
    if isinstance(error, SystemExit):
        endings = getattr(ddp.state.get("lifeline") or ddp.state.get("watch"), "endings", None)
        said = getattr(endings, "exit_code", None)   # the text of sys.exit(text), see sys_exit
        said = said if isinstance(said, str) else error.code
        code = said if isinstance(said, int) else 1
        stop_all(ddp, said if isinstance(said, str) and said else f"left with exit code {code}", code)
    # A lost connection is most likely the consequence of a failure elsewhere: that one is to be printed.
    secondary = isinstance(error, RuntimeError) and bool(re.search(
        "connection|socket|timed out|communicator|successfully reached monitoredBarrier", str(error), re.I))
    cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    stop_all(ddp, "".join(traceback.format_exception(error)).rstrip(), 1, secondary, cause)


def stop_all(ddp, text, code=1, secondary=False, cause=None):
    """Print `text` once, with the rank, and end every rank with exit code `code`. Does not return (in a notebook of one
    process: raises SystemExit).

    secondary: another rank's failure within the next second is to be printed instead. cause: one line (default: the
    first of the text)."""
    lifeline, server = ddp.state.get("lifeline"), ddp.state.get("server")
    cause = cause or (text.splitlines() or [""])[0]
    if _alone_in_a_notebook(ddp):
        _say(text)
        _write_status(ddp, code, cause)
        raise SystemExit(code)
    _end_soon(35)
    if ddp.state.get("ending") not in (None, threading.get_ident()):
        time.sleep(60)   # another thread is ending this process: what the end of others brings about is no news
    if lifeline is not None:
        lifeline.fail(code, cause, secondary)
    if code == BAD_INPUT:   # nothing ran: nothing to go on with
        _say(f"\n[rank {ddp.rank} of {ddp.world_size} on {ddp.host}] {text}" if lifeline else text)
    else:
        _print_failure(ddp, text, ddp.rank, ddp.host, cause)
    _write_status(ddp, code, f"rank {ddp.rank} on {ddp.host}: {cause}" if lifeline else cause)
    if ddp.state.get("watch"):
        ddp.state["watch"].drop_file()
    if server:
        server.outlast(3.0)
    _leave(code, ddp.state.get("mpi"))


def end_here(ddp, rank, code, cause, silent=()):
    """End this process because of what happened in `rank`; silent: ranks that no longer answer."""
    _end_soon()
    ddp.state["ending"] = threading.get_ident()
    _write_status(ddp, code, f"rank {rank} on {ddp.state['hosts'][rank]}: {cause}")
    if code == WATCHDOG:
        if ddp.state.get("watch"):
            ddp.state["watch"].dump_stacks()
        _kill_silent(ddp, silent)
    elif ddp.state.get("watch"):
        ddp.state["watch"].drop_file()
    if ddp.state.get("server"):
        ddp.state["server"].outlast(3.0)
    time.sleep(0.7)   # at the first end launchers kill the others: the one that failed must have spoken by then
    _leave(code)


def _end_soon(seconds=25):
    """A file system that hangs must not keep a failed run from ending: the kernel does it then (SIGALRM)."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


_kernel_timers = {}   # process number (a forked child has none) -> C library, timer


def _make_kernel_timer():
    """Give this process a POSIX timer that sends SIGKILL, see _end_by_kernel; not where there is none, as on macOS."""
    with contextlib.suppress(OSError, AttributeError):
        clib, timer = ctypes.CDLL("librt.so.1"), ctypes.c_void_p()
        wish = ctypes.create_string_buffer(struct.pack("@Pii", 0, signal.SIGKILL, 0), 64)   # struct sigevent: a signal
        if os.getpid() not in _kernel_timers and not clib.timer_create(time.CLOCK_MONOTONIC, wish, ctypes.byref(timer)):
            _kernel_timers[os.getpid()] = clib, timer


def _end_by_kernel(seconds):
    """Have the kernel kill this process in `seconds`, even if it is stopped by then (SIGSTOP); 0: no longer."""
    if os.getpid() in _kernel_timers:
        clib, timer = _kernel_timers[os.getpid()]
        clib.timer_settime(timer, 0, struct.pack("@4l", 0, 0, math.ceil(seconds), 0), None)   # once; s, ns


@atexit.register   # this early, so that it runs after the handlers of all that is imported or made later
def _last_seconds():
    """After the goodbye nobody watches, and Python takes most of a second to take torch apart."""
    mpi = sys.modules.get("mpi4py.MPI")   # one that the script itself started waits for all ranks when it ends
    children = multiprocessing.active_children() if os.getpid() in _kernel_timers else []
    if not (mpi and mpi.Is_initialized() and not mpi.Is_finalized()) and all(child.daemon for child in children):
        _end_by_kernel(EXIT_SECONDS)


def _patience(ddp):
    """Seconds that ranks wait for each other in cleanup_ddp: after close_run no longer than the watch would have."""
    return ddp.state.get("patience") or min(ddp.timeout.total_seconds(), 1800.0)


def _kill_silent(ddp, silent):
    """End the ranks of this host that do not answer; the first other rank of the host does it. One that holds the
    interpreter's lock has some seconds to end by its own timer, which writes its stacks; one that is stopped has
    none."""
    here = [r for r, host in enumerate(ddp.state["hosts"]) if host == ddp.host]
    targets = [ddp.state["processes"][r] for r in here if r in silent]
    if not targets or ddp.rank != min(set(here) - set(silent), default=None):
        return
    alive = lambda: [pid for pid, start in targets if start and _process_start(pid) == start]
    _poll(lambda: all(_process_stat(pid)[:1] == ["T"] for pid in alive()), 6.0)
    for pid in alive():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _process_stat(pid):
    """The fields of /proc/PID/stat from the third on: [0] state, [1] parent, [19] start in clock ticks since boot.
    Empty for a process that is not there, or has ended though nobody has asked after it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return fields if fields[0] not in "ZX" else []
    except (OSError, IndexError):
        return []


def _process_start(pid):
    """With the process number, a name not used again. None: no such process."""
    fields = _process_stat(pid)
    return int(fields[19]) if fields else None


def _leave(code, mpi=None):
    """End this process now: no atexit handlers, no destructors, which wait for other ranks or die by SIGABRT."""
    last = threading.Timer(5.0, os._exit, (code,))   # whatever hangs below: a full pipe, MPI_Abort
    last.daemon = True
    try:
        last.start()
    except RuntimeError:   # no more threads: while the interpreter ends (Python 3.12), or by a limit
        _end_soon(5)
    for child in multiprocessing.active_children():
        child.kill()   # DataLoader workers ignore SIGTERM, see worker_init
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if mpi is not None:
        time.sleep(0.5)   # Hydra drops what it has not yet passed on of our last words when Abort comes
        mpi.Abort(code)
    os._exit(code)


def cleanup_ddp(ddp):
    """Leave in good order: wait for the others (at most ddp.timeout and half an hour; after close_run, the limit of the
    watch), destroy the groups, finalise MPI, put the environment back. Harmless when called twice. On Linux, a process
    that still ends two minutes after its atexit handlers began is then killed: it is stopped, or stuck."""
    if ddp.state.get("clean"):
        return
    ddp.state["clean"] = True
    watch = ddp.state.get("watch")
    if watch is not None:   # a script without close_run
        end_watch(ddp)
        ddp.state["watch"] = watch   # another rank may still fail: that is then the outcome
    lifeline, server = ddp.state.get("lifeline"), ddp.state.get("server")
    try:
        if lifeline is not None:
            _end_by_kernel(_patience(ddp) + LAST_SECONDS)
            lifeline.leaving = True
            lifeline.send(bye=True)
            seconds = _patience(ddp) + 5.0   # by then rank 0 has named who is missing, unless it is stopped itself
            if not lifeline.answered.wait(seconds):   # everybody has said goodbye: the final barrier
                _kill_silent(ddp, [0])
                stop_all(ddp, f"rank 0 of {ddp.world_size} has not answered in cleanup_ddp for {seconds:.0f} s",
                         WATCHDOG)
            _end_by_kernel(60.0 + EXIT_SECONDS)
        if watch is not None:
            _write_status(ddp, AGAIN if watch.requested else 0, watch.requested or "left in good order")
            ddp.state.pop("watch", None)
        if lifeline is not None:
            lifeline.endings.restore()
            with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError):   # no real stderr: no timer
                faulthandler.dump_traceback_later(60.0, exit=True, file=sys.__stderr__)   # what follows may wait
            dist.destroy_process_group()
            with contextlib.suppress(OSError):
                lifeline.sock.shutdown(socket.SHUT_RDWR)
            lifeline.sock.close()
            if server:   # the store lives in this process: outlast the others' last request
                server.join(10.0)
        if ddp.state.get("finalize_mpi"):
            from mpi4py import MPI
            if not MPI.Is_finalized():
                MPI.Finalize()
    finally:   # whatever happens, the caller may go on
        if lifeline is not None:
            faulthandler.cancel_dump_traceback_later()
            _end_by_kernel(0)
    for name, value in ddp.state.get("environment", {}).items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    setup_ddp.current = None


# ---------------------------------------------------------------- no progress, stop requests, outcome
AGAIN, WATCHDOG, BAD_INPUT = 75, 70, 2   # exit codes, beside 0 finished, 1 error, 130 a second Ctrl-C
# Seconds after which the kernel ends a process that nobody else ends: a stopped rank, after the limit of the watch; one
# that has said goodbye, once Python begins to end it. Traces of a profiler may be written then.
LAST_SECONDS, EXIT_SECONDS = 40.0, 120.0
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


def watch_run(ddp, run_dir=None, minutes=20.0, signals=STOP_SIGNALS, arm=False):
    """Watch over the run from here on; stop_reason calls it with the defaults where nobody else has.

    Signals, the time DDP_DEADLINE and a file RUN_DIR/STOP only ask for a stop: stop_reason tells all ranks at the same
    step. A second Ctrl-C ends at once, with exit code 130.
    From the first stop_reason on (arm: from now on), a run in which no rank makes progress for `minutes` (0: no limit)
    is ended with exit code 70; progress is a call of stop_reason or beat. Every rank writes the stacks of its threads
    to RUN_DIR/stacks/rank_R.txt (without a run_dir: below the temporary folder), and the message names the late ranks.
    Each rank sends rank 0 about a line per limit/8, or per minute for limits above 8 minutes: 12,288 ranks make 205
    lines of 100 bytes a second. A job that is suspended for longer than the limit is ended too. The limit must be below
    the `timeout` of setup_ddp, or the backend, which names nobody, is sooner. A process that holds the interpreter's
    lock is ended by a timer in C, with code 1; of several ranks, one that is stopped by a neighbour or, on Linux, 40 s
    after the limit by the kernel.
    Rank 0 writes RUN_DIR/status.json {code, reason, step}: code null while the run is on, see close_run.
    """
    former = ddp.state.get("watch")
    end_watch(ddp)
    ddp.state["watch"] = _Watch(ddp, run_dir, minutes * 60, signals)
    if former and former.requested:   # asked to stop while it was loading, say
        ddp.state["watch"].requested = former.requested
    beat(ddp, arm=arm)
    _write_status(ddp, None, "running")


def stop_wanted(ddp):
    """1.0 if this rank has been asked to stop, else 0.0: to be summed over ranks, for stop_reason."""
    watch = ddp.state.get("watch")
    return 0.0 if watch is None else float(watch.wanted())


def stop_reason(ddp, step, wanted=None):
    """At each step boundary, on all ranks: '' to go on, else why all shall now save and leave, the same on every rank.
    It is a sign of life too, see watch_run.

    wanted: the sum of stop_wanted over ranks, where the caller has it from an all-reduce of its own (perhaps of the
    step before); None: it is taken here, a small all-reduce per call."""
    if ddp.state.get("watch") is None:
        watch_run(ddp)
    beat(ddp, step, arm=True)
    wanted = all_sum(stop_wanted(ddp), ddp) if wanted is None else wanted
    if not wanted:
        return ""
    watch = ddp.state["watch"]
    watch.wanted()
    asked = all_sum([float(bool(watch.requested) and r == ddp.rank) for r in range(ddp.world_size)], ddp)
    watch.requested = broadcast(watch.requested, ddp, src=next(r for r, n in enumerate(asked) if n))
    return watch.requested   # rank 0 writes it down when the run ends, whoever was asked


def beat(ddp, step=None, arm=False):
    """A sign of life between step boundaries: during evaluation, sampling, saving. Without an armed watch, nothing."""
    watch = ddp.state.get("watch")
    if watch is not None and (arm or watch.last is not None):
        watch.beat(step)


def close_run(ddp, code, reason):
    """The run ends well: status.json gets code and reason, the watch ends; within its limit all ranks must come to
    cleanup_ddp. Codes: 0 finished, 75 (AGAIN) run me again; the file writes 1 (an error), 2 (bad input), 70 (no
    progress) and 130 by itself where it ends the ranks."""
    _write_status(ddp, code, reason)
    if ddp.state.get("watch"):
        ddp.state["patience"] = ddp.state["watch"].limit
    end_watch(ddp)


def end_watch(ddp):
    """No longer watch, without a word: for a caller that goes on after an exception, such as a notebook."""
    if ddp.state.get("watch"):
        ddp.state["watch"].close()


def worker_init(worker_id=0, signals=STOP_SIGNALS):
    """worker_init_fn for a DataLoader: a stop signal sent to the whole session must not end the workers, without which
    the main process would raise instead of saving."""
    for name in signals:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _deadline(env):
    text = env.get("DDP_DEADLINE", "").strip()
    try:
        return float(text or "inf")
    except ValueError:
        raise SetupError(f"DDP_DEADLINE={text!r} is not a time in epoch seconds. Expected such as $(( $(date +%s) + "
                         f"3000 )).") from None


def _write_status(ddp, code, reason, for_rank_0=False):
    watch, tell = ddp.state.get("watch"), ddp.state.get("tell_outcome")
    if tell and code is not None and ddp.is_main and (watch is None or watch.run_dir is None):
        tell(code, reason)   # the run has no folder yet: what a training script wants done then
    if watch is None or watch.run_dir is None or watch.told or not (ddp.is_main or for_rank_0):
        return
    watch.told = code is not None   # the first reason is the cause
    path = os.path.join(watch.run_dir, "status.json")
    with contextlib.suppress(OSError):   # a full disk is what is being reported, perhaps
        half = f".status.json.{os.getpid()}-{threading.get_ident()}.tmp"   # two threads may end a run
        with open(os.path.join(watch.run_dir, half), "w") as f:
            json.dump({"code": code, "reason": reason, "step": watch.step}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(f.name, path)


def describe_hang(beats, ranks, silent, hosts):
    """(a late rank, text naming all late ones). beats: {rank: [step, beats, age, collectives entered, where]}.

    Late are the ranks that do not answer, else those that have entered the fewest collectives (the others wait for them
    in the next one), else those at the lowest step, else those at another place than most."""
    def fewest(key):
        low = min(key(beats[r]) for r in ranks)
        found = [r for r in ranks if key(beats[r]) == low]
        return found if len(found) < len(ranks) else []

    late = list(silent) or fewest(lambda b: b[3]) or fewest(lambda b: -1 if b[0] is None else b[0])
    if not late:
        places = collections.Counter(beats[r][4] for r in ranks)
        late = [r for r in ranks if beats[r][4] != places.most_common(1)[0][0]] or list(ranks)

    def row(r):
        if r not in beats:
            return f"rank {r} on {hosts[r]}, which has not come to where the others are"
        where = "does not answer: stopped, or stuck outside Python" if r in silent else f"in {beats[r][4]}"
        return f"rank {r} on {hosts[r]}, last step {beats[r][0]}, {where}"

    text = "Late: " + "; ".join(map(row, late[:8])) + (f"; and {len(late) - 8} more" if len(late) > 8 else "") + "."
    waiting = collections.defaultdict(list)
    for r in ranks:
        if r not in late:
            waiting[beats[r][4]].append(r)
    text = [text, *(f"waiting: rank {_some(group)} in {place}" for place, group in waiting.items())]
    return late[0], "\n  ".join(text)


class _Watch(threading.Thread):
    """In every rank: hears signals, sends signs of life to rank 0, and knows how long there was none."""
    live = None   # the one watch that is on (False: was, and has ended)

    def __init__(self, ddp, run_dir, limit, signals):
        super().__init__(daemon=True, name="ddp-watch")
        alone = _alone_in_a_notebook(ddp)
        limit, signals = (0, ()) if alone else (limit, signals)
        self.ddp, self.run_dir, self.limit = ddp, None if run_dir is None else os.fspath(run_dir), limit
        user = os.getuid() if hasattr(os, "getuid") else 0
        self.stacks = (os.path.join(self.run_dir, "stacks") if self.run_dir else
                       os.path.join(tempfile.gettempdir(), f"ddp-{user}", f"stacks-{os.getppid()}"))
        self.period = min(max(limit / 8, 0.25), 60.0)
        self.silence = max(3 * self.period, 2.0)   # seconds without a line that mean: does not answer
        self.requested, self.deadline, self.looked = "", _deadline(os.environ), 0.0
        self.step, self.beats, self.last, self.file = None, 0, None, None
        self.sent = self.sent_age = self.sent_beats = self.ticked = 0
        self.told, self.closed, self.interrupts, self.handlers = False, False, 0, {}
        self.inbox, self.signalled = socket.socketpair()
        self.signalled.setblocking(False)
        self.wakeup = None
        if signals and threading.current_thread() is threading.main_thread():   # only there can signals be had
            # The interpreter writes a signal's number to the socket even while the main thread is stuck in a
            # collective; a handler would have to wait for that.
            self.handlers = {s: signal.signal(s, lambda *_: None) for s in
                             (getattr(signal, name) for name in signals if hasattr(signal, name))}
            self.wakeup = signal.set_wakeup_fd(self.signalled.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork") and _Watch.live is None:
            os.register_at_fork(before=lambda: _Watch.live and _Watch.live.before_fork(),
                                after_in_parent=lambda: _Watch.live and _Watch.live.after_fork(),
                                after_in_child=lambda: _Watch.live and _Watch.live.forget())
        _Watch.live = self
        self.endings = _Endings(ddp) if ddp.world_size == 1 and run_dir and not alone else None
        self.start()

    def wanted(self):
        """Has this rank been asked to stop? Rank 0 looks for the deadline and the STOP file, once a second."""
        now = time.monotonic()
        if self.ddp.is_main and not self.requested and now - self.looked > 1.0:
            self.looked = now
            if time.time() >= self.deadline:
                self.requested = "DDP_DEADLINE is reached"
            elif self.run_dir and os.path.exists(os.path.join(self.run_dir, "STOP")):
                self.requested = f"{os.path.join(self.run_dir, 'STOP')} exists"
        return bool(self.requested)

    def beat(self, step):
        self.step = self.step if step is None else step
        self.beats += 1
        first, self.last = self.last is None, time.monotonic()
        if first and self.limit:
            link = self.ddp.state.get("lifeline")
            for _ in range(3):   # another rank may be removing the empty folder; without a file they go to stderr
                with contextlib.suppress(OSError):
                    os.makedirs(self.stacks, mode=0o777 if self.run_dir else 0o700, exist_ok=True)
                    self.file = open(os.path.join(self.stacks, f"rank_{self.ddp.rank}.txt"), "a")   # older ones stay
                    break
            if link:
                link.heard = self.last
            self._tick(self.last)   # at once: nothing may run later

    def run(self):
        while not self.closed:
            self.inbox.settimeout(min(1.0, self.period))
            try:
                numbers = self.inbox.recv(64)
            except TimeoutError:
                numbers = b""
            except OSError:
                return
            for number in numbers:
                if number in self.handlers:
                    self._signalled(signal.Signals(number))
            if self.limit and self.last is not None and not self.closed:
                self._tick(time.monotonic())

    def _signalled(self, number):
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            stop_all(self.ddp, "interrupted twice (Ctrl-C)", 130)
        if not self.requested:
            self.requested = f"{number.name} on rank {self.ddp.rank} ({self.ddp.host})"
            again = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
            if self.ddp.is_main:
                _say(f"\n{number.name}: the run stops after this step and saves{again}")

    def _tick(self, now):
        # A second line, should the interpreter's lock be held so that no thread runs: a timer in C.
        with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError):   # no file, no real stderr
            faulthandler.dump_traceback_later(self.limit + 6.0, exit=True, file=self.file or sys.__stderr__)
        age, link, ddp = now - self.last, self.ddp.state.get("lifeline"), self.ddp
        if link is None:
            if age > self.limit:
                text = (f"no progress for {self.limit:.0f} s (the watchdog's limit), last step {self.step}, in "
                        f"{_where()}.")
                _end_soon()
                _print_failure(ddp, f"{text} {self.stacks_note()}", 0, ddp.host, text)
                _write_status(ddp, WATCHDOG, text)
                self.dump_stacks()
                _leave(WATCHDOG)
            return
        _end_by_kernel(self.limit + LAST_SECONDS)   # it may be stopped, and have no neighbour that would end it
        if self.closed:   # in between
            faulthandler.cancel_dump_traceback_later()
            _end_by_kernel(0)
            return
        if now - self.ticked > self.silence:   # this process stood still itself: rank 0's words wait to be read
            link.heard = now
        self.ticked = now
        # News at once where rank 0 may take this rank for a late one, else at times.
        if now - self.sent >= self.period or (self.sent_age > self.period and self.sent_beats != self.beats):
            link.send(beat=[self.step, self.beats, round(age, 2), _collectives(), _where() if age > 0.5 else ""])
            self.sent, self.sent_age, self.sent_beats = now, age, self.beats
        if age > self.limit and now - link.heard > self.silence + 2.0:
            link.leaving, host = True, ddp.state["hosts"][0]   # its end, when it comes, is no news
            text = (f"no progress for {self.limit:.0f} s (the watchdog's limit). Late: rank 0 on {host}, which does "
                    f"not answer: stopped, or stuck outside Python.")
            if _speaks_for_rank_0(ddp):
                _end_soon()
                _write_status(ddp, WATCHDOG, text, for_rank_0=True)
                _print_failure(ddp, f"{text} {self.stacks_note()}", 0, host, text)
            end_here(ddp, 0, WATCHDOG, text, silent=(0,))

    def stacks_note(self):
        return f"\n  The stacks of all ranks are in {self.stacks}/."

    def dump_stacks(self):
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self.file or sys.__stderr__, all_threads=True)

    def restore(self, wakeup):
        """Give signals back to whoever had them."""
        if self.wakeup is not None and threading.current_thread() is threading.main_thread():
            try:
                signal.set_wakeup_fd(wakeup)
            except (OSError, ValueError):   # who had it before is gone
                signal.set_wakeup_fd(-1)
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def before_fork(self):
        """The timer's thread is not in a child, whose interpreter would wait for it (the next tick sets it again); and
        a signal that comes to the child before its handlers are its own must wait."""
        faulthandler.cancel_dump_traceback_later()
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.handlers)

    def after_fork(self):
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def forget(self):
        """In a forked child, whose signals are its own."""
        _Watch.live, self.closed = False, True
        if self.endings:
            self.endings.restore()
        self.restore(-1)
        self.after_fork()

    def close(self):
        if self.closed:
            return
        self.closed = True
        self.ddp.state.pop("watch", None)
        if self.endings:
            self.endings.restore()
        link = self.ddp.state.get("lifeline")
        if self.last is not None and link:
            link.send(beat=None)
        if _Watch.live is self:
            _Watch.live = False
        self.restore(self.wakeup)
        self.signalled.close()   # ends the thread
        if threading.current_thread() is not self:
            self.join(2.0)
        self.inbox.close()
        if self.limit:
            faulthandler.cancel_dump_traceback_later()
            _end_by_kernel(0)
        if self.file:
            self.file.close()
            self.drop_file()

    def drop_file(self):
        """Remove the file for the stacks, if there are none in it."""
        with contextlib.suppress(OSError):
            if self.file and os.path.getsize(self.file.name) == 0:
                os.unlink(self.file.name)
                os.rmdir(self.stacks)


def _collectives():
    """How many collectives this rank has entered, DDP's own included."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):   # a backend that does not count
        return 0


def _where():
    """What the main thread is doing: its innermost frames outside torch and the standard library."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    libraries, places = os.path.dirname(os.__file__), []
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        if not path.startswith((libraries, "<")) and "site-packages" not in path:
            places.append(f"{frame.f_code.co_name} ({os.path.basename(path)}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places) or "?"


# ---------------------------------------------------------------- wrap, shard, agree, reduce
def optimize_with_ipex(model, optimizer, ddp, dtype=None):
    """(model, optimizer) as ipex.optimize returns them, or as given where it is not wanted or does not work.

    Between making the optimizer and wrap_ddp:
        model, optimizer = optimize_with_ipex(model, optimizer, ddp)
    What comes back are copies: the old ones must not be used. setup_ddp's `ipex` decides: "on", "off", or "auto", which
    is only on an XPU whose torch has no xccl, since newer ones need no IPEX. Whatever fails on any rank, all go on
    without, and rank 0 says why. A collective where it is wanted. state_dict() keeps names, shapes and float32.
    dtype: None leaves the weights in float32, and autocast computes. torch.bfloat16 converts those of linear layers:
    then forward works under autocast only, and averages of the weights see rounded ones.
    """
    mode = ddp.state.get("ipex", "auto")
    if mode == "off" or mode == "auto" and (ddp.device.type != "xpu" or _has_xccl()):
        return model, optimizer
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is wrapped already. Expected optimize_with_ipex before wrap_ddp.")
    ipex, problem = _import_ipex()
    problem, result = _first_problem(problem, ddp), None
    if not problem:
        # IPEX keeps a float32 copy beside each bfloat16 weight. DDP aligns only the latter, and the optimizer then
        # writes each rank's own copy back into it: ranks drift apart, without a word (measured).
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.detach(), ddp)
        # IPEX's own step of the optimizer, on XPUs, does not know found_inf (see train_loop). Prepacking, which
        # comes with a dtype, changes the shape of weights, and models may look at theirs.
        how = {"fuse_update_step": False} | ({} if dtype is None else {"dtype": dtype, "weights_prepack": False})
        try:
            result = ipex.optimize(model, optimizer=optimizer, **how)
        except Exception as e:
            problem = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        problem = _first_problem(problem, ddp)
    print0(ddp, f"IPEX not used: {problem}" if problem else
           f"IPEX {ipex.__version__} optimized the model, {str(dtype)[6:] if dtype else 'weights stay float32'}")
    return (model, optimizer) if problem else result


def _first_problem(problem, ddp):
    """The first rank's text that is not empty, on every rank, or ""."""
    found = all_sum([float(bool(problem) and r == ddp.rank) for r in range(ddp.world_size)], ddp)
    return broadcast(problem, ddp, found.index(1.0)) if any(found) else ""


def wrap_ddp(model, ddp, gradient_as_bucket_view=True, static_graph=False, find_unused_parameters=False,
             broadcast_buffers=True, bucket_cap_mb=None):
    """Wrap a model, already on ddp.device, in DistributedDataParallel (one rank: the model itself comes back).

    Afterwards the generators of torch, random and numpy follow a stream keyed by (seed, "rank", rank): initial weights
    are equal on all ranks, dropout and augmentation are not. Raises ValueError for a model on another device.
    """
    for name, p in model.named_parameters():
        if p.device != ddp.device:
            raise ValueError(f"parameter {name} is on {p.device}; expected {ddp.device}. Call "
                             f"model.to(ddp.device) before wrap_ddp (and before the optimizer is made).")
    if ddp.world_size > 1:
        ids = {"device_ids": [ddp.device.index], "output_device": ddp.device.index} if ddp.device.type == "cuda" else {}
        # torch 2.13 renames the option, and warns of the old name
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        buffers = {"forward_sync_buffers" if renamed else "broadcast_buffers": broadcast_buffers}
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph,
            find_unused_parameters=find_unused_parameters, bucket_cap_mb=bucket_cap_mb or 25, **buffers, **ids)
    if not ddp.state.get("streams"):
        ddp.state["streams"] = True
        _seed_all(seed_for(ddp.seed, "rank", ddp.rank))
    return model


def unwrap_ddp(model):
    """The bare model: for state_dict, evaluation and sampling. DDP's forward broadcasts buffers, so a rank that calls
    it alone can hang."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def gradient_sync(model, last):
    """Context for one micro-step of an accumulated step: gradients are averaged over ranks only in the `last` one.

    A static graph is recorded in its first backward, which stock DDP does not survive under no_sync: there the first
    micro-steps are synchronised too. The sum is the same, since averaging what is already equal on all ranks changes
    nothing.
    """
    if not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    if model.static_graph and not getattr(model, "static_graph_recorded", False):
        model.static_graph_recorded = last
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


class DdpSampler(torch.utils.data.Sampler):
    """See ddp_sampler."""

    def __init__(self, n, rank, world_size, train, shuffle, seed):
        if n < world_size:
            raise ValueError(f"{n} item(s) for {world_size} ranks; expected at least one each. Use fewer "
                             f"ranks or more data.")
        self.n, self.rank, self.world_size = n, rank, world_size
        self.train, self.shuffle, self.seed = train, shuffle, seed
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch, start=0):
        """Order of `epoch`; its first `start` items (counted over all ranks, whatever their number was) are skipped."""
        if not 0 <= start <= self.n:
            raise ValueError(f"start {start} is outside the epoch of {self.n} items")
        self.epoch, self.start = epoch, start

    def __iter__(self):
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "order", self.epoch))
            order = torch.randperm(self.n, generator=generator).tolist()
        else:
            order = list(range(self.n))
        order = order[self.start:]
        if self.train:
            order = order[:len(order) - len(order) % self.world_size]   # equal steps on all ranks
        return iter(order[self.rank::self.world_size])

    def __len__(self):
        left = self.n - self.start
        return left // self.world_size if self.train else len(range(self.rank, left, self.world_size))


def ddp_sampler(dataset, ddp, train=True, shuffle=None, seed=None):
    """A sampler for any dataset with a length. The order is f(seed, epoch), dealt to the ranks in turn.

    train=True shuffles and cuts the epoch to equal steps per rank; train=False gives every item to exactly one rank,
    in order, none twice (the ranks may then differ by one item: no collectives inside that loop).
    Raises ValueError for fewer items than ranks.
    """
    return DdpSampler(len(dataset), ddp.rank, ddp.world_size, train, train if shuffle is None else shuffle,
                      ddp.seed if seed is None else seed)


def print0(ddp, *values, **options):
    """print on rank 0; on every rank, with its number, where DDP_LOG_ALL=1."""
    if os.environ.get("DDP_LOG_ALL") == "1" and ddp.world_size > 1:
        print(f"[rank {ddp.rank}]", *values, **{"flush": True, **options})
    elif ddp.is_main:
        print(*values, **{"flush": True, **options})


def _route(ddp, device):
    """(group, device) over which something on `device` travels: small things, on the CPU, over gloo; above
    GLOO_MAX_RANKS over the device's own backend."""
    if device.type == "cpu" and ddp.control is not None:
        return ddp.control, device
    return dist.group.WORLD, ddp.device


def barrier(ddp, timeout=None):
    """Wait for all ranks, at most `timeout` seconds (default: that of the set-up). Raises RuntimeError naming the
    ranks that did not come (above GLOO_MAX_RANKS: without names)."""
    limit = ddp.timeout if timeout is None else datetime.timedelta(seconds=timeout)
    if ddp.world_size > 1 and ddp.control is not None:
        dist.monitored_barrier(ddp.control, limit, wait_all_ranks=True)
    elif ddp.world_size > 1:
        dist.barrier(async_op=True).wait(limit)


def broadcast(value, ddp, src=0):
    """`value` of rank `src`, on every rank. A tensor (same shape and dtype everywhere) is filled in place and returned;
    anything else must be plain (None, bool, number, text, lists and dicts with text keys) and travels as JSON, so a
    tuple comes back as a list."""
    if isinstance(value, torch.Tensor):
        if ddp.world_size > 1:
            group, device = _route(ddp, value.device)
            moved = value.to(device)
            dist.broadcast(moved, src, group=group)
            value.copy_(moved)
        return value
    data = bytearray(json.dumps(value).encode() if ddp.rank == src else b"")
    if ddp.world_size > 1:
        size = broadcast(torch.tensor([len(data)]), ddp, src)
        data = bytearray(int(size)) if ddp.rank != src else data
        data = bytes(broadcast(torch.frombuffer(data, dtype=torch.uint8), ddp, src).tolist())
    return json.loads(data)


def all_sum(value, ddp):
    """Sum over ranks of a tensor (a new one is returned) or of a number or list of numbers (in float64)."""
    if not isinstance(value, torch.Tensor):
        return all_sum(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    if ddp.world_size == 1:
        return value.clone()
    group, device = _route(ddp, value.device)
    total = value.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(value.device)


def all_mean(value, ddp):
    """Mean over ranks, as all_sum. Right only where every rank has the same share; else sum and count."""
    if not isinstance(value, torch.Tensor):
        return all_mean(torch.tensor(value, dtype=torch.float64), ddp).tolist()
    return all_sum(value, ddp) / ddp.world_size


# ---------------------------------------------------------------- precision
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _native_bfloat16(device):
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "xpu":
        return True
    try:
        with open("/proc/cpuinfo") as f:
            flags = set(re.search(r"^(?:flags|Features)\s*:(.*)$", f.read(), re.M)[1].split())
        return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    except (OSError, TypeError):
        return False


def choose_dtype(request, device):
    """(dtype, reason) for a config's `mixed_precision`: False or None, True (bfloat16 where the device computes in it,
    float32 elsewhere), or a name of DTYPES. Raises ValueError for an unknown name, RuntimeError for a dtype that the
    device lacks."""
    native = _native_bfloat16(device)
    if request in (False, None):
        return torch.float32, "mixed precision off"
    if request is True:
        return (torch.bfloat16, f"{device.type} computes in bfloat16") if native else (
            torch.float32, f"{device.type} has no native bfloat16")
    if request not in DTYPES:
        raise ValueError(f"mixed_precision is {request!r}; expected true, false or one of "
                         f"{', '.join(DTYPES)}")
    if request == "bfloat16" and not native:
        if device.type != "cpu":
            raise RuntimeError(f"{device} has no bfloat16. Expected a newer device; use mixed_precision: "
                               "float16 or false.")
        return torch.bfloat16, "asked for; emulated on this CPU, slow"
    return DTYPES[request], "asked for"


def autocast(dtype, ddp):
    """torch.autocast for ddp.device; float32 (and float64) mean none."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(ddp.device.type, dtype=dtype)


def grad_scaler(dtype, ddp):
    """A GradScaler that scales for float16 and passes everything through otherwise. A step it skips because of an
    overflow is its way of finding the scale, not a failure."""
    return torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)


def limit_memory(share, ddp):
    """Let this process take at most `share` of its device's memory (None: all); returns what to say about it."""
    if share is None:
        return ""
    setter = getattr(getattr(torch, ddp.device.type), "set_per_process_memory_fraction", None)
    if ddp.device.type == "cpu" or setter is None:
        return f"; max_memory_per_gpu {share} has no effect on {ddp.device.type}"
    setter(share, ddp.device)
    return f"; at most {share:.0%} of the device's memory"


# ---------------------------------------------------------------- checkpoints
def _check_plain(value, where):
    if type(value) in (dict, collections.OrderedDict) and all(type(k) in (str, int) for k in value):
        for k, v in value.items():
            _check_plain(v, f"{where}.{k}")
    elif type(value) in (list, tuple, torch.Size):
        for i, v in enumerate(value):
            _check_plain(v, f"{where}[{i}]")
    elif value is not None and type(value) not in (bool, int, float, str) and not isinstance(value, torch.Tensor):
        raise ValueError(f"{where} is {type(value).__name__}; expected tensors and plain types (dicts with "
                         f"text or int as keys), so that torch.load(weights_only=True) reads it. Convert it: "
                         "float(x), x.tolist(), ...")


def kept_checkpoint(path, k):
    """Where save_checkpoint(path, keep_last=...) keeps the k-th former one: last.pt -> last-1.pt."""
    base, end = os.path.splitext(path)
    return f"{base}-{k}{end}" if k else path


class _Beating:
    """A file to write to; every write is a sign of life."""

    def __init__(self, file, ddp):
        self.file, self.ddp, self.flush = file, ddp, file.flush

    def write(self, data):
        beat(self.ddp)
        return self.file.write(data)


def save_checkpoint(path, ddp, keep_last=1, resumes=True, **state):
    """Write `state` (tensors and plain types, nested) to `path`, from rank 0, atomically: temporary name, fsync of the
    file and its folder, rename. Adds `world_size`, `versions` and `machine`. A collective: all ranks must call it, all
    of them raise if writing failed (ValueError: something that is not plain; RuntimeError: the disk), and then the file
    of before is untouched. keep_last: how many to keep, this one included; the former ones as path-1, path-2, ...
    resumes: this is what a next start continues from, to be named when something fails."""
    error, folder = None, os.path.dirname(path) or "."
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}.tmp")
    beat(ddp)
    try:
        if ddp.is_main:
            state.update(world_size=ddp.world_size, machine=describe_machine(ddp),
                         versions={"torch": str(torch.__version__), "python": sys.version.split()[0]})
            _check_plain(state, "checkpoint")
            os.makedirs(folder, exist_ok=True)
            for half in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(os.path.basename(path))}.*.tmp")):
                with contextlib.suppress(OSError):
                    os.unlink(half)   # of a run that was killed while it saved
            with open(temporary, "wb") as f:
                torch.save(state, _Beating(f, ddp))
                f.flush()
                os.fsync(f.fileno())
            damaged = ddp.state.get("damaged") == os.path.realpath(path)   # then the good ones keep their names
            for k in range(keep_last - 1, 0, -1):   # a kill in between leaves each of them whole, under one name or two
                if not damaged and os.path.exists(kept_checkpoint(path, k - 1)):
                    _move(kept_checkpoint(path, k - 1), kept_checkpoint(path, k), stays=k == 1)
            os.replace(temporary, path)
            if damaged:
                del ddp.state["damaged"]
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)   # the rename itself must survive a power cut
            finally:
                os.close(handle)
    except ValueError as e:
        error = ["ValueError", str(e)]
    except (OSError, RuntimeError) as e:   # torch reports a full disk as RuntimeError
        error = ["RuntimeError", f"cannot write {path}: {str(e).splitlines()[0]}. The checkpoint of before is "
                                 f"untouched. Is the disk full or the folder read-only?"]
    finally:
        if ddp.is_main:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    error = broadcast(error, ddp)
    beat(ddp)
    if error:
        raise (ValueError if error[0] == "ValueError" else RuntimeError)(error[1])
    if resumes:
        ddp.state["checkpoint"] = path, state.get("step")


def _move(old, new, stays):
    """Rename; stays: the file keeps its old name too, where the file system has hard links."""
    if stays:
        extra = os.path.join(os.path.dirname(new), f".{os.path.basename(new)}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            os.link(old, extra)
            os.replace(extra, new)
            if os.path.exists(extra):   # both were one file already, and rename has done nothing
                os.unlink(extra)
            return
    os.replace(old, new)


def describe_machine(ddp):
    """What the last bits of a result depend on, beside the number of ranks: plain values, for a checkpoint."""
    kind = ddp.device.type
    device = kind if kind == "cpu" else getattr(torch, kind).get_device_name(ddp.device)
    return {"device": device, "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}


def load_checkpoint(path, ddp=None, map_location="cpu"):
    """Read what save_checkpoint wrote; tensors come on `map_location`. Raises ValueError for a file that is missing,
    damaged (each record has a checksum), or holds more than tensors and plain types.

    With ddp, a collective: rank 0 reads the file, goes back to the one kept before it if it is damaged, saying so, and
    sends the bytes to the others. All ranks raise where none is good."""
    data, troubles, used = None, [], path
    if ddp is None or ddp.is_main:
        files = [p for k in range(100) if os.path.exists(p := kept_checkpoint(path, k))] if ddp is not None else []
        for used in files or [path]:
            try:
                data, state = _read_checkpoint(used, map_location)
                break
            except ValueError as e:
                troubles.append(str(e))
    if ddp is None:
        if data is None:
            raise ValueError(troubles[0])
        return state
    used, troubles, size = broadcast([used, troubles, len(data or b"")], ddp)
    if not size:
        raise ValueError("\n".join(troubles))
    if troubles:
        print0(ddp, "\n".join(f"ATTENTION: {t}" for t in troubles) + f"\n  Going back to {used}.")
    ddp.state["damaged"] = os.path.realpath(path) if used != path else None
    if ddp.world_size > 1:
        whole = torch.frombuffer(bytearray(data if ddp.is_main else size), dtype=torch.uint8)
        for part in whole.split(1 << 26):   # 64 MiB at a time
            beat(ddp)
            broadcast(part, ddp)
        data = whole.numpy()
    if not ddp.is_main:
        state = torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    ddp.state["checkpoint"] = used, state.get("step") if isinstance(state, dict) else None
    return state


def _read_checkpoint(path, map_location):
    """(the file's bytes, what they hold)."""
    otherwise = "Expected a file written by save_checkpoint. Use another one, or start afresh."
    try:
        with open(path, "rb") as f:
            data = f.read()
        broken = zipfile.ZipFile(io.BytesIO(data)).testzip()   # torch.load itself does not look at the checksums
        if broken is not None:
            raise ValueError(f"the checkpoint {path} is damaged: the checksum of its record {broken} is wrong. "
                             f"{otherwise}")
        return data, torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no checkpoint {path}. Expected a file written by save_checkpoint.") from None
    except (OSError, MemoryError):   # it may be good: an older one must not take its place
        raise
    except Exception as e:   # torch raises half a dozen kinds for a damaged file
        if "the checksum of its record" in str(e):
            raise
        raise ValueError(f"cannot read the checkpoint {path}: {type(e).__name__}: "
                         f"{(str(e).splitlines() or [''])[0]}. {otherwise}") from None


# ---------------------------------------------------------------- python ddp_setup.py --doctor
READ = ("DDP_RENDEZVOUS_DIR", "DDP_MPI4PY", "DDP_GLOO_MAX_RANKS", "DDP_LOG_ALL", "DDP_DEADLINE", "MASTER_ADDR",
        "MASTER_PORT", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "TMPDIR", "OMP_NUM_THREADS",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_RESTART_COUNT",
        "FLUX_JOB_ID", "LSB_JOBID", "PALS_APID", "PMIX_NAMESPACE")
SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def doctor(env):
    """(text, exit code): what this file finds here and would do, without joining other ranks. Code 1: it found a
    problem; each is marked PROBLEM."""
    def lines(title, rows):
        return [title, *(textwrap.fill(r, 80, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
                         for r in rows)]

    def version(name):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{name} absent"

    found = _found_devices()
    names = [f"{k}:{i} {getattr(torch, k).get_device_name(i)}" for k in ("cuda", "xpu") for i in range(found[k])]
    text = lines("versions", [f"ddp_setup.py {_own_hash()}, Python {sys.version.split()[0]}, torch {torch.__version__}",
                              ", ".join(map(version, ("numpy", "mpi4py", "intel-extension-for-pytorch"))),
                              f"{sys.platform}, {os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} "
                              f"threads ({torch.backends.cpu.get_cpu_capability()})"])
    text += lines("devices", names or ["no accelerator visible"])
    text += lines("backends", [", ".join(f"{b} {'yes' if found[b] else 'no'}" for b in BACKENDS)])
    mpi, finalize = None, False
    try:
        mpi, finalize = _start_mpi(env, 60.0)
        ddp = detect_launcher(env, mpi and (mpi.Get_rank(), mpi.Get_size()))
        text += lines("launcher", [f"rank {ddp.rank} of {ddp.world_size}", *ddp.notes,
                                   *([f"mpi4py agrees: {mpi.Get_size()} ranks"] if mpi else [])])
        if ddp.rank:
            return "", 0
        text += lines("choice", [choose_device("auto", "auto", ddp.local_rank, found)[3]])
    except (SetupError, ValueError) as e:
        text += lines("launcher", [f"PROBLEM: {e}"])
    finally:
        if finalize:
            sys.modules["mpi4py"].MPI.Finalize()
    own, master = _own_address(), env.get("MASTER_ADDR")
    rows = [f"this host {socket.gethostname()} is {own}, on interface {_interface_of(own)}"]
    if not master:
        rows.append("MASTER_ADDR is unset: rank 0 tells the others where it is")
    elif _resolve(master):
        rows.append(f"MASTER_ADDR {master} is {_resolve(master)}, reached through {_interface_of(_route_to(master))}")
    else:
        rows.append(f"PROBLEM: MASTER_ADDR={master} cannot be resolved here. Expected a host name or address")
    rows.append("interfaces: " + ", ".join(name for _, name in socket.if_nameindex()))
    text += lines("network", rows)
    text += lines("limits", _limits(env))
    known = sorted({n for row in LAUNCHERS for group in (row.rank, row.size, row.local_rank, row.local_size,
                                                         row.node_rank, row.needs) for n in group} | {*READ, *SET})
    text += lines("environment (* = set for libraries, until cleanup_ddp)",
                  [f"{n}{'*' if n in SET else ''} = {env[n]}" for n in known if n in env] or ["none of them"])
    text += lines("not set", [" ".join(n + "*" * (n in SET) for n in known if n not in env)])
    return "\n".join(text), int(any("PROBLEM" in line for line in text))


def _own_hash():
    with open(__file__, "rb") as f:
        return hashlib.blake2b(f.read(), digest_size=4).hexdigest()


def _limits(env):
    """Sentences on what runs out first."""
    rows = []
    with contextlib.suppress(ImportError):
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        rows.append(f"open files {soft} (at most {hard}): enough for {max(soft - 100, 0) // 3} ranks over gloo, of "
                    f"which rank 0 holds 3 connections each")
    with contextlib.suppress(OSError, AttributeError):
        disk = os.statvfs("/dev/shm")
        size = disk.f_bavail * disk.f_frsize
        rows.append(("PROBLEM: " if size < 1 << 27 else "") + f"shared memory {size / 2**30:.1f} GiB free in /dev/shm"
                    + ("; DataLoader workers need some: enlarge it (docker --shm-size), or num_workers 0"
                       if size < 1 << 27 else ""))
    folder = tempfile.gettempdir()
    free = os.statvfs(folder) if hasattr(os, "statvfs") else None
    longest = len(os.path.join(folder, "pymp-xxxxxxxx", "listener-xxxxxxxx"))   # a Unix socket's name has 108 bytes
    rows.append(f"temporary files in {folder}" +
                (f", {free.f_bavail * free.f_frsize / 2**30:.1f} GiB free" if free else ""))
    if env.get("TMPDIR") and os.path.realpath(env["TMPDIR"]) != os.path.realpath(folder):
        rows.append(f"PROBLEM: TMPDIR={env['TMPDIR']} cannot be used, {folder} is. Expected a folder that may be "
                    f"written")
    if longest > 107:
        rows.append(f"PROBLEM: {folder} is too long for the Unix sockets of DataLoader workers and MPI ({longest} of "
                    f"107 bytes). export TMPDIR=/tmp")
    return rows


if __name__ == "__main__":
    if sys.argv[1:] != ["--doctor"]:
        sys.exit(f"usage: python {sys.argv[0]} --doctor")
    report, code = doctor(dict(os.environ))
    if report:
        print(report)
    sys.exit(code)
