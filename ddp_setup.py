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

Or `with setup_ddp(seed=0) as ddp:`. A rank that raises brings all others down; the traceback is printed once.

Environment read: the launcher variables of LAUNCHERS, and
  MASTER_ADDR, MASTER_PORT  rendezvous; the address alone means port 29500, the port alone is honoured
  DDP_WORLD_SIZE            the number of ranks that must have been started (PALS on Aurora sets no size itself)
  DDP_RANK, DDP_LOCAL_RANK, DDP_LOCAL_WORLD_SIZE, DDP_NODE_RANK   override every launcher (with DDP_WORLD_SIZE)
  DDP_RENDEZVOUS_DIR        folder that all hosts see, for the address file (default: the current folder)
  DDP_MPI4PY=0              never import mpi4py
  DDP_LOG_ALL=1             print0 prints on every rank, with its number
Environment set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT for libraries that look
there (until cleanup_ddp), GLOO_SOCKET_IFNAME (the interface that routes to rank 0) where it is unset.
"""
import argparse
import contextlib
import datetime
import hashlib
import inspect
import json
import os
import random
import re
import secrets
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Gloo connects every rank with every other: N - 1 sockets per rank, and most sites allow 1,024 open files. Above
# this, objects, flags and barriers travel over the device's own backend instead (see `_control`).
GLOO_MAX_RANKS = 512


# ----------------------------------------------------------------------------------------------- launchers
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
    Launcher("DDP_* variables", ("DDP_RANK",), ("DDP_WORLD_SIZE",), ("DDP_LOCAL_RANK",), ("DDP_LOCAL_WORLD_SIZE",),
             ("DDP_NODE_RANK",)),
    Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK",),
             needs=("MASTER_ADDR",)),
    # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the node's index: not used.
    Launcher("Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
             ("OMPI_COMM_WORLD_LOCAL_SIZE",), mpi=True),
    # Polaris sets PMI_SIZE, Aurora nothing that can be relied on. Slurm's cray_shasta plugin sets these names too.
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
class Place:
    """What the launcher said: which rank this process is. `None` = not told, found out at the rendezvous."""
    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None
    node_rank: int | None = None
    mpi: bool = False
    notes: tuple = ()


def _int(env, name):
    text = env.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise RuntimeError(f"{name}={text!r} is not an integer. Expected the number that the launcher sets; unset it "
                           f"if it was exported by hand.")
    return int(text)


def _first(env, names):
    """(value, name) of the first of `names` that is set, else (None, None)."""
    return next(((_int(env, n), n) for n in names if env.get(n, "").strip()), (None, None))


def _read_row(env, row):
    values = {k: _first(env, getattr(row, k)) for k in ("rank", "size", "local_rank", "local_size", "node_rank")}
    complete = (values["rank"][1] and values["local_rank"][1] and (values["size"][1] or row.size_optional)
                and all(env.get(n, "").strip() for n in row.needs))
    return values, bool(complete)


def slurm_tasks_per_node(text):
    """Expand Slurm's run-length list: '2(x3),1' -> [2, 2, 2, 1]."""
    out = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not m:
            raise RuntimeError(f"cannot read {text!r} as Slurm's list of tasks per node; expected a form as 2(x3),1")
        out += [int(m[1])] * int(m[2] or 1)
    return out


def slurm_first_host(nodelist):
    """First host of a Slurm node list: 'a[003-5,9]-ib,b3' -> 'a003-ib'. scontrol is often missing in containers."""
    depth, end = 0, len(nodelist)
    for i, c in enumerate(nodelist):
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            end = i
            break
    return re.sub(r"\[([^\]]*)\]", lambda m: re.split("[-,]", m[1])[0], nodelist[:end])


def detect_launcher(env, mpi=None):
    """Which rank is this process? A pure function of the environment mapping `env` and, where an MPI launcher
    started us and mpi4py was asked, `mpi` = (rank, size) of its COMM_WORLD.

    The first complete row of LAUNCHERS wins; complete rows behind it are expected to differ and are noted.
    Returns a Place (a plain process: rank 0 of 1). Raises RuntimeError, printing what was seen, where variables are
    incomplete or sizes disagree: running as a single process instead would exit 0 with the wrong result.
    """
    notes, rows = [], [(row, *_read_row(env, row)) for row in LAUNCHERS]
    complete = [(row, v) for row, v, ok in rows if ok]

    def seen():
        names = {n for row in LAUNCHERS for k in (row.rank, row.size, row.local_rank, row.local_size, row.node_rank)
                 for n in k} | {"MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"}
        return " ".join(f"{n}={env[n]}" for n in sorted(names) if env.get(n, "").strip()) or "none"

    if not complete:
        return _plain_process(env, rows, seen)
    row, v = complete[0]
    rank, size, local_rank = v["rank"][0], v["size"][0], v["local_rank"][0]
    local_size, node_rank = v["local_size"][0], v["node_rank"][0]
    if row.name == "Slurm step":
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
        if tasks and node_rank is not None and node_rank < len(slurm_tasks_per_node(tasks)):
            local_size = slurm_tasks_per_node(tasks)[node_rank]

    sizes = {v["size"][1]: size} if size is not None else {}
    bare_torchrun = row.name == "torchrun" and not env.get("TORCHELASTIC_RUN_ID")
    if row.mpi and _int(env, "WORLD_SIZE") is not None:
        sizes["WORLD_SIZE"] = _int(env, "WORLD_SIZE")
    if bare_torchrun:   # RANK and friends exported by hand: an MPI launcher inside must say the same
        for other, o in complete[1:]:
            if other.mpi and (o["rank"][0] != rank or o["size"][0] not in (None, size)):
                raise RuntimeError(
                    f"RANK={rank} and WORLD_SIZE={size} disagree with {other.name}, which says rank {o['rank'][0]} of "
                    f"{o['size'][0]}. Expected one of the two. Unset RANK, WORLD_SIZE and LOCAL_RANK (left over from "
                    f"another launcher?). Seen: {seen()}")
    if _int(env, "DDP_WORLD_SIZE") is not None:
        sizes["DDP_WORLD_SIZE"] = _int(env, "DDP_WORLD_SIZE")
    if mpi is not None:
        sizes["mpi4py"] = mpi[1]
        if mpi[1] == size and mpi[0] != rank:
            raise RuntimeError(f"{row.name} says rank {rank}, mpi4py rank {mpi[0]} of {mpi[1]}. Expected the same. "
                               f"Reinstall mpi4py against this MPI, or set DDP_MPI4PY=0. Seen: {seen()}")
    if not sizes:
        raise RuntimeError(f"{row.name} started rank {rank} but sets no number of ranks. Export DDP_WORLD_SIZE next to "
                           f"the mpiexec call (nodes x ranks per node), or install mpi4py. Seen: {seen()}")
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{k} says {n}" for k, n in sizes.items())
        hint = ("mpi4py was probably built for another MPI than this launcher's: reinstall it, or export MASTER_ADDR "
                "and MASTER_PORT to do without it" if "mpi4py" in sizes and len({*sizes.values()} - {mpi[1]}) == 1
                else "Unset the variables that are left over from another launcher, or start the number that "
                     "DDP_WORLD_SIZE names")
        raise RuntimeError(f"{row.name}: the numbers of ranks disagree: {told}. {hint}. Seen: {seen()}")
    size = next(iter(sizes.values()))
    for what, value, limit in (("rank", rank, size), ("local rank", local_rank, local_size or size)):
        if not 0 <= value < limit:
            raise RuntimeError(f"{row.name}: {what} {value} is outside 0 to {limit - 1}. Seen: {seen()}")

    told = ", ".join(f"{k.replace('_', ' ')} from {v[k][1]}" for k in ("rank", "size", "local_rank") if v[k][1])
    notes.append(f"launcher {row.name}: {told}")
    for other, o in complete[1:]:
        notes.append(f"outer launcher {other.name} says rank {o['rank'][0]} of {o['size'][0]}: not used")
    return Place(row.name, rank, size, local_rank, local_size, node_rank, row.mpi, tuple(notes))


def _plain_process(env, rows, seen):
    notes = []
    harmless = {"RANK", "WORLD_SIZE", "DDP_WORLD_SIZE"}   # DDP_WORLD_SIZE alone is a check, made by the caller
    found, local_only = set(), set()
    for row, v, _ in rows:
        if row.name == "Slurm step":
            continue   # without SLURM_STEP_ID this is the batch shell
        for key, (_, name) in v.items():
            if name and name not in harmless:
                (local_only if key == "local_rank" else found).add(name)
    bare = all(env.get(n, "").strip() for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")) and _int(env, "WORLD_SIZE") > 1
    if found or len(local_only) > 1 or bare:
        raise RuntimeError(
            f"a launcher seems to have started this process, but no set of its variables is complete. Seen: {seen()}. "
            f"Expected for example RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, or PMI_RANK, PMI_SIZE and "
            f"MPI_LOCALRANKID. Unset what was exported by hand, or set DDP_RANK, DDP_WORLD_SIZE and DDP_LOCAL_RANK.")
    if local_only:
        notes.append(f"{min(local_only)} alone says nothing: ignored")
    if env.get("RANK", "").strip() or env.get("WORLD_SIZE", "").strip():
        notes.append(f"RANK={env.get('RANK', '')} WORLD_SIZE={env.get('WORLD_SIZE', '')} without LOCAL_RANK and "
                     f"MASTER_ADDR are taken as left over: ignored")
    tasks = _int(env, "SLURM_NTASKS") or 1
    if env.get("SLURM_JOB_ID") and not env.get("SLURM_STEP_ID") and tasks > 1:
        notes.append(f"ATTENTION: this is the shell of Slurm job {env['SLURM_JOB_ID']} with {tasks} tasks, and ONE "
                     f"process runs. To start all: srun python {os.path.basename(sys.argv[0] or 'script.py')} ...")
    return Place("plain process", 0, 1, 0, 1, 0, notes=(*notes, "launcher none: one process"))


# ------------------------------------------------------------------------------------------ device and backend
def choose_device(device, backend, local_rank, found):
    """Choose device type, index and backend. A pure function.

    device: auto | cpu | cuda | xpu.  backend: auto | nccl | gloo | ccl | xccl | xpu (xpu: the best one for XPU).
    found: {'cuda': devices visible, 'xpu': devices visible, 'nccl' | 'gloo' | 'xccl' | 'ccl': bool}.
    Returns (type, index or None, backend, reason). Raises RuntimeError for what is not there, saying what is.
    """
    def refuse(what):
        have = ", ".join(k if v is True else f"{v} {k}" for k, v in found.items() if v) or "nothing"
        raise RuntimeError(f"{what}. Available here: cpu, {have}. Choose --device auto and --backend auto, or what is "
                           f"available.")
    for name, value, allowed in (("device", device, ("auto", "cpu", "cuda", "xpu")),
                                 ("backend", backend, ("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))):
        if value not in allowed:
            raise RuntimeError(f"--{name} {value} is not known; expected one of {', '.join(allowed)}")
    kind, why = device, f"--device {device}"
    if device == "auto":
        wanted = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu"}.get(backend)
        kind = wanted or ("cuda" if found["cuda"] else "xpu" if found["xpu"] else "cpu")
        why = (f"--backend {backend}" if wanted else f"{found[kind]} {kind} device(s) visible" if kind != "cpu"
               else "no accelerator visible")
        if backend == "ccl" and not found["xpu"]:
            kind, why = "cpu", "--backend ccl and no XPU visible"   # oneCCL serves CPUs too
    if kind != "cpu" and not found[kind]:
        refuse(f"{kind} was asked for ({why}), but no such device is visible")
    if backend in ("auto", "xpu"):
        if backend == "xpu" and kind != "xpu":
            refuse(f"--backend xpu does not fit device {kind}")
        choice = {"cpu": ("gloo",), "cuda": ("nccl", "gloo"), "xpu": ("xccl", "ccl")}[kind]
        picked = next((b for b in choice if found[b]), None)
        if picked is None:
            refuse(f"no backend for {kind}: expected {' or '.join(choice)} in this torch")
    else:
        picked = backend
        fits = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "xccl": ("xpu",), "ccl": ("cpu", "xpu")}[backend]
        if kind not in fits:
            refuse(f"--backend {backend} does not serve device {kind}")
        if not found[backend]:
            refuse(f"--backend {backend} is not in this torch")
    index = None if kind == "cpu" else local_rank % found[kind]
    where = "cpu" if index is None else f"{kind}:{index} of {found[kind]}"
    return kind, index, picked, f"device {where} ({why}); backend {picked}"


def _found_devices(need_ccl=False):
    """What choose_device needs to know of this machine. oneCCL's bindings are imported only where torch lacks xccl."""
    xpu = torch.xpu.device_count() if hasattr(torch, "xpu") else 0
    xccl = bool(getattr(dist, "is_xccl_available", bool)())
    ccl = False
    if need_ccl or (xpu and not xccl):
        try:
            import oneccl_bindings_for_pytorch  # noqa: F401  (registers the backend "ccl")
            ccl = True
        except ImportError:
            pass
    return {"cuda": torch.cuda.device_count(), "xpu": xpu, "nccl": dist.is_nccl_available(),
            "gloo": dist.is_gloo_available(), "xccl": xccl, "ccl": ccl}


def _device_id(device):
    """A name that is unique for an accelerator within its host, whatever is masked."""
    properties = getattr(torch, device.type).get_device_properties(device.index)
    uuid = getattr(properties, "uuid", None)
    mask = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}[device.type]
    return f"{device.type} {uuid}" if uuid else f"{device} of {mask}={os.environ.get(mask, '')}"


# --------------------------------------------------------------------------------------------------- set-up
@dataclass(frozen=True)
class Ddp:
    """This process' place in the run. `control`: process group for objects, flags and barriers (None: one rank)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
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
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            cleanup_ddp(self)
        else:
            _fail_with(self, error)


def seed_for(*parts):
    """Integer in [0, 2**63) made from integers and strings by blake2b: equal parts give equal seeds, everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)   # every device
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def setup_ddp(device="auto", backend="auto", seed=0, ranks=None, timeout=1800.0, init_timeout=300.0, quiet=False):
    """Find this process' rank and device, join the others, and return a Ddp.

    device, backend: see choose_device.  seed: equal initial weights on all ranks; wrap_ddp then gives every rank a
    stream of its own, keyed by (seed, rank).  ranks: refuse any other number of ranks.
    timeout: seconds a collective may take.  init_timeout: seconds to wait for all ranks to appear.
    Called again in the same process it returns the same Ddp. Raises RuntimeError, saying what was found and what to
    do; where ranks are missing, the message names them.
    """
    if getattr(setup_ddp, "current", None) is not None:
        return setup_ddp.current   # one process has one process group, as in torch.distributed itself
    env = dict(os.environ)
    try:
        ddp = _setup(env, device, backend, seed, ranks, timeout, init_timeout)
    except RuntimeError:
        local_rank = _first(env, [n for row in LAUNCHERS for n in row.local_rank])[0]
        if local_rank:           # every rank of the host finds the same: its first one says it, before the
            time.sleep(2.0)      # launcher kills it because others have left
            _leave(1)
        raise
    setup_ddp.current = ddp
    if not quiet:
        hosts = len(set(ddp.state.get("hosts", [ddp.host])))
        print0(ddp, f"Initialized DDP: {ddp.world_size} rank(s) on {hosts} host(s)\n  " + "\n  ".join(ddp.notes))
    return ddp


def _setup(env, device, backend, seed, ranks, timeout, init_timeout):
    place = detect_launcher(env)
    mpi = _mpi_comm(env, place)
    if mpi is not None:
        place = detect_launcher(env, (mpi.Get_rank(), mpi.Get_size()))
    for name, wanted in (("--ranks", ranks), ("DDP_WORLD_SIZE", _int(env, "DDP_WORLD_SIZE"))):
        if wanted is not None and wanted != place.world_size:
            raise RuntimeError(f"{name} asks for {wanted} rank(s), but {place.world_size} was/were started. "
                               f"{'; '.join(place.notes)}. Start {wanted} (mpirun -n, srun -n, torchrun "
                               f"--nproc_per_node) or change {name}.")
    kind, index, backend, reason = choose_device(device, backend, place.local_rank, _found_devices(backend == "ccl"))
    target = torch.device(kind) if index is None else torch.device(kind, index)
    if index is not None:
        getattr(torch, kind).set_device(index)   # before the group is made: it binds to the current device
    ddp = Ddp(place.rank, place.world_size, place.local_rank, place.local_world_size or 1, place.node_rank or 0, target,
              backend if place.world_size > 1 else "none", place.launcher, seed, socket.gethostname(),
              (*place.notes, reason), timeout=datetime.timedelta(seconds=timeout), state={"mpi": mpi})
    if place.world_size > 1:
        ddp = _join(ddp, place, env, backend, init_timeout)
    _export(ddp, RANK=ddp.rank, WORLD_SIZE=ddp.world_size, LOCAL_RANK=ddp.local_rank,
            LOCAL_WORLD_SIZE=ddp.local_world_size)
    _seed_all(seed)
    return ddp


def _export(ddp, **variables):
    undo = ddp.state.setdefault("environment", {})
    for name, value in variables.items():
        undo.setdefault(name, os.environ.get(name))
        os.environ[name] = str(value)


def _mpi_comm(env, place):
    """COMM_WORLD, if an MPI launcher started us and mpi4py is there and wanted; else None. Importing mpi4py
    initialises MPI, which freezes or misleads a process that no MPI launched: so never elsewhere."""
    if not place.mpi or env.get("DDP_MPI4PY") == "0" or (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        return None
    try:
        import mpi4py
        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.finalize = False   # at exit it would wait for the others (measured: a raise hangs); see cleanup
        from mpi4py import MPI
    except (ImportError, RuntimeError):   # RuntimeError: no MPI library found. Rank and size are known without it
        return None
    return MPI.COMM_WORLD


# ----------------------------------------------------------------------------------------------- rendezvous
def _listen(host, port=0):
    """A listening socket on the one address in use; port 0 lets the kernel choose a free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as e:
        sock.close()
        raise RuntimeError(
            f"rank 0 on {socket.gethostname()} cannot listen on {host}:{port} ({address[0]}): {e.strerror}. MASTER_ADDR "
            f"must be an address of rank 0's host, and MASTER_PORT free there. Leave both unset to have them found, "
            f"or choose another port.") from None
    sock.listen(4096)
    return sock


def _resolves(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _own_address():
    """The address under which other hosts reach this one."""
    host = socket.gethostname()
    short = host.split(".")[0]
    names = [host]
    if re.fullmatch(r"x\d+c\d+s\d+b\d+n\d+", short) and ".hsn." not in host:   # HPE EX node: prefer its fabric name
        names = [f"{short}.hsn.cm.{m}.alcf.anl.gov" for m in ("aurora", "polaris")] + names
    for name in names:
        ip = _resolves(name)
        if ip and not ip.startswith("127."):   # Debian maps a host's own name to 127.0.1.1
            return ip
    return _route_to("192.0.2.1") or "127.0.0.1"   # a documentation address: the default route decides


def _route_to(host):
    """This host's address on the way to `host`. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host, 9))
            return s.getsockname()[0]
        except OSError:
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
                if socket.inet_ntoa(packed[20:24]) == ip or (ip.startswith("127.") and name == "lo"):
                    return name
    return None


def _job_name(env, place, one_host):
    """A name that only the ranks of this very launch share, or None. A killed run's file must not mislead the next."""
    for parts in (("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), ("PMIX_NAMESPACE",), ("PALS_APID",),
                  ("FLUX_JOB_ID",), ("LSB_JOBID", "JSM_JSRUN_CMD")):
        if env.get(parts[0]) and (place.launcher == "Slurm step" or parts[0] != "SLURM_JOB_ID"):
            return "-".join(str(env.get(p, "")) for p in parts)
    if not one_host:
        return None
    pid, variable = os.getppid(), next(r.rank[0] for r in LAUNCHERS if r.name == place.launcher)
    with contextlib.suppress(OSError):   # no /proc: the parent is the best guess
        while variable.encode() + b"=" in open(f"/proc/{pid}/environ", "rb").read():   # a wrapper around the rank
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        return f"{pid}-{open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[19]}"   # and when it started
    return str(pid)


def _address_file(env, place, one_host):
    name = _job_name(env, place, one_host)
    if name is None:
        raise RuntimeError(
            f"{place.launcher} started ranks on several hosts, and nothing tells them where rank 0 is: mpi4py is not "
            f"usable and MASTER_ADDR is unset. Install mpi4py for this MPI, or export MASTER_ADDR=<host of rank 0> "
            f"and MASTER_PORT=<a free port> to all ranks.")
    if one_host:
        folder = os.path.join(tempfile.gettempdir(), f"ddp-{os.getuid() if hasattr(os, 'getuid') else 'user'}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and os.stat(folder).st_uid != os.getuid():
            raise RuntimeError(f"{folder} belongs to another user; expected it to be yours. Set TMPDIR.")
    else:
        folder = env.get("DDP_RENDEZVOUS_DIR") or os.getcwd()
    digest = hashlib.blake2b(f"{place.launcher} {name} {place.world_size}".encode(), digest_size=8).hexdigest()
    return os.path.join(folder, f".ddp-rank0-{digest}")


def _open_store(ddp, place, env, init_timeout):
    """The TCPStore all ranks meet in. Returns (store, host, port, a word on how it was found)."""
    limit = datetime.timedelta(seconds=init_timeout)
    mpi, one_host = ddp.state["mpi"], place.local_world_size == place.world_size
    host, port = env.get("MASTER_ADDR"), _int(env, "MASTER_PORT")
    slurm_host = env.get("SLURM_STEP_NODELIST") if place.launcher == "Slurm step" else None
    if slurm_host:
        slurm_host = slurm_first_host(slurm_host)
    listener, path, agent = None, None, env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and ddp.launcher == "torchrun"
    if host or port:
        how = f"from {'MASTER_ADDR' if host else 'MASTER_PORT'}"
        host = host or ("127.0.0.1" if one_host else slurm_host)
        if host is None:
            raise RuntimeError(f"MASTER_PORT={port} is set, but not MASTER_ADDR, and the ranks are on several hosts. "
                               f"Export MASTER_ADDR=<host of rank 0>, or unset both.")
        port = port or 29500
        if ddp.rank == 0 and not agent:
            if not one_host and host == ddp.host and (_resolves(host) or "").startswith("127."):
                host = _own_address()   # Debian maps a host's own name to 127.0.1.1; the others see its real address
            listener = _listen(host, port)
    else:
        if ddp.rank == 0:
            listener = _listen("127.0.0.1" if one_host else slurm_host or _own_address())
            host, port = listener.getsockname()[:2]
        if mpi is not None:
            (host, port), how = mpi.bcast((host, port), root=0), "by MPI broadcast"
        else:
            path = _address_file(env, place, one_host)
            host, port = _exchange_file(path, ddp.rank, host, port, init_timeout)
            how = f"through {path}"
    if ddp.rank != 0 or agent:
        _await_port(host, port, init_timeout, path)
    store = dist.TCPStore(host, port, None, listener is not None, limit, wait_for_workers=False,
                          **({"master_listen_fd": listener.detach()} if listener is not None else {}))
    if path and ddp.rank == 0:
        ddp.state["address_file"] = path
    # A torchrun agent keeps its store over restarts: keys of the attempt before must not be seen.
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"ddp/{attempt}", store), host, port, how


def _exchange_file(path, rank, host, port, limit):
    if rank == 0:
        temporary = f"{path}.{os.getpid()}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(f"{host} {port}")
        os.replace(temporary, path)
        return host, port
    deadline = time.monotonic() + limit
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 did not appear within {limit:.0f} s: no file {path}. Did it start? Do all hosts "
                               f"see this folder? If not, set DDP_RENDEZVOUS_DIR, or MASTER_ADDR and MASTER_PORT.")
        time.sleep(0.02)
    with open(path) as f:
        host, port = f.read().split()
    return host, int(port)


def _await_port(host, port, limit, path):
    """Wait until somebody listens there: torch's own client prints a wall of stack frames when nobody does."""
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank 0 cannot be reached at {host}:{port} within {limit:.0f} s ({e}). Expected rank 0 to listen "
                    f"there. Did it start? Try `ping {host}` from {socket.gethostname()}; is MASTER_ADDR right"
                    f"{f', or {path} left over' if path else ''}?") from None
            time.sleep(0.1)


def _join(ddp, place, env, backend, init_timeout):
    """Meet all ranks in the store, check that they fit together, make the process groups."""
    store, host, port, how = _open_store(ddp, place, env, init_timeout)
    mine = {"host": ddp.host, "device": None if ddp.device.type == "cpu" else _device_id(ddp.device),
            "local_rank": ddp.local_rank, "backend": backend, "torch": torch.__version__}
    store.set(f"here/{ddp.rank}", json.dumps(mine))
    joined = store.add("joined", 1)
    if ddp.rank == 0:
        deadline = time.monotonic() + init_timeout
        while (joined := store.add("joined", 0)) < ddp.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
        table = _check_table(store, ddp, joined, init_timeout)
        server = None
        if "error" not in table:
            # Under torchrun MASTER_ADDR is the agent's host, which rank 0 may not share.
            server = _LifelineServer(_listen(host if _is_local(host) else _own_address()), ddp, table["hosts"])
            table["lifeline"] = [*server.address, server.token]
        store.set("table", json.dumps(table))
        with contextlib.suppress(OSError, KeyError):
            os.unlink(ddp.state.pop("address_file"))
    else:
        # Rank 0 gives up first and says why; only if it is gone itself does this wait run out.
        store.wait(["table"], datetime.timedelta(seconds=init_timeout + 60))
        table, server = json.loads(store.get("table")), None
    if "error" in table:
        if ddp.rank == 0:   # it owns the store: the others must have read the reason before it leaves
            deadline = time.monotonic() + 5
            while store.add("read", 0) < joined - 1 and time.monotonic() < deadline:
                time.sleep(0.02)
            raise RuntimeError(table["error"])
        store.add("read", 1)
        _leave(1)   # rank 0 prints the reason once
    hosts = table["hosts"]
    local = [r for r, h in enumerate(hosts) if h == ddp.host]
    order = list(dict.fromkeys(hosts))
    ddp.state.update(hosts=hosts, store=store, server=server)
    ddp.state["lifeline"] = _Lifeline(ddp, table["lifeline"], server)
    _export(ddp, MASTER_ADDR=host, MASTER_PORT=port)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _interface_of(_route_to(host) or "")
        if name:
            _export(ddp, GLOO_SOCKET_IFNAME=name)
    arguments = {"device_id": ddp.device} if backend == "nccl" else {}
    dist.init_process_group(backend, store=store, rank=ddp.rank, world_size=ddp.world_size, timeout=ddp.timeout,
                            **arguments)
    sys.excepthook = ddp.state["lifeline"]._excepthook   # torch has wrapped it in one that swallows what we print
    control = dist.group.WORLD
    if backend != "gloo" and ddp.world_size <= GLOO_MAX_RANKS:
        control = dist.new_group(backend="gloo", timeout=ddp.timeout)
    return Ddp(ddp.rank, ddp.world_size, ddp.local_rank, place.local_world_size or len(local),
               order.index(ddp.host) if place.node_rank is None else place.node_rank, ddp.device, backend, ddp.launcher,
               ddp.seed, ddp.host, (*ddp.notes, f"rank 0 at {host}:{port}, found {how}"), control, ddp.timeout, ddp.state)


def _is_local(host):
    """Is `host` an address of this machine?"""
    try:
        _listen(host).close()
        return True
    except (RuntimeError, OSError):
        return False


def _check_table(store, ddp, joined, init_timeout):
    """On rank 0: {'hosts': [...]} if all ranks are there and fit together, else {'error': text}."""
    n = ddp.world_size
    if joined < n:
        present = [r for r in range(n) if store.check([f"here/{r}"])]
        missing = sorted(set(range(n)) - set(present))
        where = sorted({json.loads(store.get(f"here/{r}"))["host"] for r in present})
        shown = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        return {"error": f"{len(missing)} of {n} ranks did not appear within {init_timeout:.0f} s: rank(s) {shown}. "
                         f"The others are on {', '.join(where[:20])}. Is a host down, or cannot it reach rank 0?"}
    rows = [json.loads(x) for x in store.multi_get([f"here/{r}" for r in range(n)])]
    users = {}
    for r, row in enumerate(rows):
        if row["device"]:
            users.setdefault((row["host"], row["device"]), []).append(r)
    for (host, device), ranks in users.items():
        if len(ranks) > 1:
            return {"error": f"ranks {', '.join(map(str, ranks))} on {host} share one accelerator ({device}); expected one "
                             f"rank per accelerator. Start fewer ranks per host, or unset the mask "
                             f"(CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK)."}
    for what in ("backend", "torch"):
        values = sorted({row[what] for row in rows})
        if len(values) > 1:
            return {"error": f"the ranks differ in {what}: {', '.join(values)}; expected the same on all. Give --device "
                             f"and --backend, and one environment for all hosts."}
    return {"hosts": [row["host"] for row in rows]}


# -------------------------------------------------------------------------------------------- one fails, all end
# MPICH, Intel MPI and srun let the other ranks run on when one fails; a rank outside a collective never notices. So
# every rank holds a connection to a small thread in rank 0. A rank that fails says so there; one that dies without
# a word is seen by its connection closing. Each rank waits in recv(): no polling, no load, and no torch store, whose
# client prints pages of C++ frames when its peer is gone.
DIED = "died without a word (killed, out of memory, or a crash)"


def _line(sock_file):
    text = sock_file.readline()
    return json.loads(text) if text.endswith(b"\n") else None


def _send(sock, **message):
    with contextlib.suppress(OSError):   # the peer is gone: then its own end is what counts
        sock.sendall(json.dumps(message).encode() + b"\n")


def _keep_alive(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):   # a host that vanishes
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class _LifelineServer(threading.Thread):
    """In rank 0: passes the first failure on to all, and releases all once everybody has said goodbye."""

    def __init__(self, listener, ddp, hosts):
        super().__init__(daemon=True, name="ddp-lifeline-server")
        self.listener, self.ddp, self.hosts, self.world_size = listener, ddp, hosts, ddp.world_size
        self.address, self.token = listener.getsockname()[:2], secrets.token_hex(8)
        self.peers, self.gone, self.verdict, self.pending = {}, set(), None, None
        self.start()

    def run(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            buffers, ranks = {}, {}
            while len(self.gone) < self.world_size:
                # A failure that only reports a lost connection waits a moment for the failure that caused it.
                limit = None if self.pending is None else max(0.0, self.pending[0] - time.monotonic())
                for key, _ in selector.select(limit):
                    sock = key.fileobj
                    if sock is self.listener:
                        sock, _ = self.listener.accept()
                        _keep_alive(sock)
                        selector.register(sock, selectors.EVENT_READ)
                        buffers[sock] = b""
                        continue
                    try:
                        data = sock.recv(65536)
                    except OSError:
                        data = b""
                    *lines, buffers[sock] = (buffers[sock] + data).split(b"\n")
                    for text in lines:
                        self._message(sock, ranks, json.loads(text))
                    if not data:
                        selector.unregister(sock)
                        sock.close()
                        rank = ranks.get(sock)
                        if rank is not None and rank not in self.gone:
                            self.gone.add(rank)
                            if self.verdict is None:
                                _print_failure(self.ddp, rank, DIED, self.hosts[rank])
                            self._judge(rank, 1, DIED, False)
                if self.pending is not None and time.monotonic() >= self.pending[0]:
                    self._announce(*self.pending[1:])
            self._tell(done=True)

    def _message(self, sock, ranks, m):
        if "token" in m:
            if secrets.compare_digest(m["token"], self.token):
                ranks[sock] = m["rank"]
                self.peers[m["rank"]] = sock
                if self.verdict:   # it came late: tell it what has happened
                    _send(sock, **self.verdict)
        elif sock in ranks and m.get("bye"):
            self.gone.add(ranks[sock])
        elif sock in ranks:
            self._judge(ranks[sock], m["code"], m["text"], m["secondary"])

    def _judge(self, rank, code, text, secondary):
        if self.verdict is None and secondary and self.pending is None:
            self.pending = (time.monotonic() + 1.0, rank, code, text)
        elif self.verdict is None and not secondary:
            self._announce(rank, code, text)

    def _announce(self, rank, code, text):
        self.pending, self.verdict = None, {"failed": rank, "code": code, "text": text}
        self._tell(**self.verdict)

    def _tell(self, **message):
        for sock in self.peers.values():
            _send(sock, **message)


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
        self.leaving, self.mine, self.answered = False, None, threading.Event()
        if hasattr(os, "register_at_fork"):   # a forked DataLoader worker must not keep a dead rank's connection open
            os.register_at_fork(after_in_child=self._close_in_child)
        self.previous_hook, sys.excepthook = sys.excepthook, self._excepthook
        self.start()

    def _close_in_child(self):
        for sock in (self.sock, *(self.server.peers.values() if self.server else ()),
                     *((self.server.listener,) if self.server else ())):
            with contextlib.suppress(OSError):
                os.close(sock.detach())
        sys.excepthook = self.previous_hook

    def run(self):
        with self.sock.makefile("rb") as f:
            try:
                message = _line(f)
            except OSError:
                message = None
        if message and message.get("done"):
            self.answered.set()
            return
        if message is None:   # rank 0 is gone
            if self.leaving:
                self.answered.set()
                return
            message = {"failed": 0, "code": 1}
            if self.ddp.rank == 1:   # one of the survivors says it
                _print_failure(self.ddp, 0, DIED, self.ddp.state["hosts"][0])
        if self.mine is not None and message["failed"] in (self.ddp.rank, None):
            self.answered.set()   # the main thread prints its own failure
            return
        if self.server is not None:   # the others read the news from this process: let them before it ends
            deadline = time.monotonic() + 3.0
            while len(self.server.gone | {self.ddp.rank}) < self.ddp.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
        _leave(message["code"], self.ddp)

    def _excepthook(self, kind, error, tb):
        _fail_with(self.ddp, error)

    def fail(self, text, code, secondary):
        """Announce a failure. True: this rank was the first and should print it. False: another was; leave quietly."""
        self.mine = text
        _send(self.sock, code=code, text=text[:2000], secondary=secondary)
        self.answered.wait(8.0)
        return True


def _print_failure(ddp, rank, text, host):
    print(f"\n[rank {rank} of {ddp.world_size} on {host}] {text}", file=sys.stderr, flush=True)


def _fail_with(ddp, error):
    """End all ranks because of an exception in this one."""
    if isinstance(error, KeyboardInterrupt):
        stop_all(ddp, "interrupted (Ctrl-C)", 130)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        stop_all(ddp, str(error.code) if isinstance(error.code, str) else f"left with exit code {code}", code)
    # A lost connection is most likely the consequence of a failure elsewhere: that one is to be printed.
    secondary = isinstance(error, RuntimeError) and "onnection" in str(error)
    stop_all(ddp, "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip(), 1, secondary)


def stop_all(ddp, text, code=1, secondary=False):
    """Print `text` once, with the rank, and end every rank with exit code `code`. Does not return."""
    if ddp.state.get("lifeline") is None:
        print(f"\n[rank {ddp.rank} of {ddp.world_size} on {ddp.host}] {text}" if ddp.world_size > 1 else text,
              file=sys.stderr, flush=True)
    elif ddp.state["lifeline"].fail(text, code, secondary):
        _print_failure(ddp, ddp.rank, text, ddp.host)
        server = ddp.state.get("server")
        deadline = time.monotonic() + 3.0
        while server and len(server.gone | {ddp.rank}) < ddp.world_size and time.monotonic() < deadline:
            time.sleep(0.02)   # rank 0 owns the store and the lifeline: the others hear the news before it ends
    _leave(code, ddp, abort=True)


def _leave(code, ddp=None, abort=False):
    """End this process now: no atexit handlers, no destructors, which wait for other ranks or die by SIGABRT."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if abort and ddp is not None and ddp.state.get("mpi") is not None:
        ddp.state["mpi"].Abort(code)
    os._exit(code)


def cleanup_ddp(ddp):
    """Leave in good order: wait for the others (at most ddp.timeout), destroy the groups, finalise MPI, put the
    environment back. Harmless when called twice."""
    if ddp.state.get("clean"):
        return
    ddp.state["clean"] = True
    lifeline = ddp.state.get("lifeline")
    if lifeline is not None:
        lifeline.leaving = True
        _send(lifeline.sock, bye=True)
        lifeline.answered.wait(ddp.timeout.total_seconds())   # everybody has said goodbye: the final barrier
        dist.destroy_process_group()
        sys.excepthook = lifeline.previous_hook
        ddp.state["store"].add("left", 1)
        if ddp.state["server"] is not None:   # the store lives in this process: outlast the others' last request
            deadline = time.monotonic() + 10
            while ddp.state["store"].add("left", 0) < ddp.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
        lifeline.sock.close()
    if ddp.state.get("mpi") is not None:
        from mpi4py import MPI
        if not MPI.Is_finalized():
            MPI.Finalize()
    for name, value in ddp.state.get("environment", {}).items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    setup_ddp.current = None


# ------------------------------------------------------------------------------------- wrap, shard, agree, reduce
def wrap_ddp(model, ddp, gradient_as_bucket_view=True, static_graph=False, find_unused_parameters=False,
             broadcast_buffers=True, bucket_cap_mb=None):
    """Wrap a model, already on ddp.device, in DistributedDataParallel (one rank: the model itself comes back).

    Afterwards the generators of torch, random and numpy follow a stream keyed by (seed, "rank", rank): initial weights
    are equal on all ranks, dropout and augmentation are not. Raises ValueError for a model on another device.
    """
    for name, p in model.named_parameters():
        if p.device != ddp.device:
            raise ValueError(f"parameter {name} is on {p.device}; expected {ddp.device}. Call model.to(ddp.device) before "
                             f"wrap_ddp (and before the optimizer is made).")
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
            raise ValueError(f"{n} item(s) for {world_size} ranks; expected at least one each. Use fewer ranks or more "
                             f"data.")
        self.n, self.rank, self.world_size, self.train, self.shuffle, self.seed = n, rank, world_size, train, shuffle, seed
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


def _control(ddp):
    """(group, device) over which small things travel: gloo, or above GLOO_MAX_RANKS the device's own backend."""
    if ddp.control is not None and (ddp.backend == "gloo" or ddp.control is not dist.group.WORLD):
        return ddp.control, torch.device("cpu")
    return dist.group.WORLD, ddp.device


def barrier(ddp, timeout=None):
    """Wait for all ranks, at most `timeout` seconds (default: that of the set-up). Raises RuntimeError naming the ranks
    that did not come (above GLOO_MAX_RANKS and on accelerators: without names)."""
    if ddp.world_size == 1:
        return
    group, device = _control(ddp)
    limit = ddp.timeout if timeout is None else datetime.timedelta(seconds=timeout)
    if device.type == "cpu":
        dist.monitored_barrier(group, limit, wait_all_ranks=True)
    else:
        dist.barrier(group)


def broadcast(value, ddp, src=0):
    """`value` of rank `src`, on every rank. A tensor (same shape and dtype everywhere) is filled in place and returned;
    anything else must be plain (None, bool, number, text, lists and dicts of these) and travels as JSON."""
    if ddp.world_size == 1:
        return value
    if isinstance(value, torch.Tensor):
        dist.broadcast(value, src, group=_control(ddp)[0] if value.device.type == "cpu" else None)
        return value
    group, device = _control(ddp)
    data = json.dumps(value).encode() if ddp.rank == src else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if ddp.rank == src:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src, group=group)
    return json.loads(bytes(buffer.cpu().tolist()))


def all_sum(value, ddp):
    """Sum over ranks of a tensor (a new one is returned) or of a number or list of numbers (in float64)."""
    if isinstance(value, torch.Tensor):
        value = value.clone()
        if ddp.world_size > 1:
            group, device = _control(ddp) if value.device.type == "cpu" else (None, value.device)
            moved = value.to(device)
            dist.all_reduce(moved, group=group)
            value = moved.to(value.device)
        return value
    return all_sum(torch.tensor(value, dtype=torch.float64), ddp).tolist()


def all_mean(value, ddp):
    """Mean over ranks, as all_sum. Right only where every rank has the same share; else sum and count."""
    if isinstance(value, torch.Tensor):
        return all_sum(value, ddp) / ddp.world_size
    mean = all_sum(torch.tensor(value, dtype=torch.float64), ddp) / ddp.world_size
    return mean.tolist()


def scale_for_batch(lr, warmup, rule, global_batch, base):
    """(learning rate, warm-up steps) for a global batch that differs from the one they were chosen for.

    rule: "none"; "linear": both times f = global_batch / base (Goyal et al. 2017, arXiv 1706.02677); "sqrt": times
    sqrt(f), usual for Adam; {"cap": N}: times min(f, N). Warm-up is rounded to whole steps. As it is scaled in steps and
    each step takes f times the data, N times the ranks warm up on N x N times the data.
    """
    f = 1.0 if rule == "none" else global_batch / base
    f = min(f, rule["cap"]) if isinstance(rule, dict) else f**0.5 if rule == "sqrt" else f
    return lr * f, round(warmup * f)


# ------------------------------------------------------------------------------------------------------- precision
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
        raise ValueError(f"mixed_precision is {request!r}; expected true, false or one of {', '.join(DTYPES)}")
    if request == "bfloat16" and not native:
        if device.type != "cpu":
            raise RuntimeError(f"{device} has no bfloat16. Expected a newer device; use mixed_precision: float16 or false.")
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


# ------------------------------------------------------------------------------------------------------ checkpoints
def _check_plain(value, where):
    if isinstance(value, dict):
        for k, v in value.items():
            if not isinstance(k, (str, int)):
                raise ValueError(f"checkpoint: key {k!r} in {where} is {type(k).__name__}; expected text or int")
            _check_plain(v, f"{where}.{k}")
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            _check_plain(v, f"{where}[{i}]")
    elif value is not None and type(value) not in (bool, int, float, str) and not isinstance(value, torch.Tensor):
        raise ValueError(f"checkpoint: {where} is {type(value).__name__}; expected tensors and plain types only, so that "
                         f"torch.load(weights_only=True) reads it. Convert it (float(x), x.tolist(), dict(x)).")


def save_checkpoint(path, ddp, **state):
    """Write `state` (tensors and plain types, nested) to `path`, from rank 0, atomically: temporary name, fsync of the
    file and its folder, rename. Adds `world_size` and `versions`. A collective: all ranks must call it, all of them
    raise if writing failed (ValueError: something that is not plain; RuntimeError: the disk), and then the file of
    before is untouched."""
    error = None
    if ddp.is_main:
        temporary = os.path.join(os.path.dirname(path) or ".", f".{os.path.basename(path)}.{os.getpid()}.tmp")
        try:
            state = {**state, "world_size": ddp.world_size,
                     "versions": {"torch": str(torch.__version__), "python": sys.version.split()[0]}}
            _check_plain(state, "checkpoint")
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary, "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
            folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
            try:
                os.fsync(folder)   # the rename itself must survive a power cut
            finally:
                os.close(folder)
        except ValueError as e:
            error = ["ValueError", str(e)]
        except (OSError, RuntimeError) as e:   # torch reports a full disk as RuntimeError
            error = ["RuntimeError", f"cannot write {path}: {e}. The checkpoint of before is untouched. Is the disk full "
                                     f"or the folder read-only?"]
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    error = broadcast(error, ddp)
    if error:
        raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[error[0]](error[1])


def load_checkpoint(path, ddp=None, map_location="cpu"):
    """Read what save_checkpoint wrote; tensors come on `map_location`. Raises ValueError for a file that is missing,
    damaged, or holds more than tensors and plain types."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no checkpoint {path}. Expected a file written by save_checkpoint.") from None
    except Exception as e:   # torch raises half a dozen kinds for a damaged file
        raise ValueError(f"cannot read the checkpoint {path}: {type(e).__name__}: {str(e).splitlines()[0]}. Expected a "
                         f"file written by save_checkpoint. Use another one, or start afresh.") from None


# ----------------------------------------------------------------------------------------------------- command line
def add_launch_arguments(parser):
    """The launch options of a training script, for an argparse parser."""
    group = parser.add_argument_group("launch")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    group.add_argument("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    group.add_argument("--ranks", type=int, help="refuse any other number of ranks")
    group.add_argument("--init_timeout", type=float, default=300.0, help="seconds to wait for all ranks")
    group.add_argument("--nnodes", type=int, help="start with torch's launcher on this many nodes, by hand")
    group.add_argument("--node_rank", type=int, help="this node, 0 to nnodes - 1")
    group.add_argument("--master_addr", help="host of node 0")
    group.add_argument("--master_port", type=int, help="a free port of node 0 (default 29500)")
    group.add_argument("--nproc_per_node", type=int, help="ranks on this node (default: its accelerators, else 1)")


def hand_over(args, argv):
    """Where --nnodes or --nproc_per_node is given, replace this process by torch.distributed.run with the same script
    and the other arguments of `argv`. Does nothing otherwise. Raises ValueError for incomplete options."""
    if args.nnodes is None and args.nproc_per_node is None:
        stray = [o for o in ("node_rank", "master_addr", "master_port") if getattr(args, o) is not None]
        if stray:
            raise ValueError(f"--{stray[0]} is given without --nnodes. Expected --nnodes N --node_rank R --master_addr HOST "
                             f"[--master_port P] [--nproc_per_node M].")
        return
    place = detect_launcher(os.environ)
    if place.world_size > 1:
        raise ValueError(f"--nnodes and --nproc_per_node start ranks, but {place.launcher} has started {place.world_size} "
                         f"already. Leave one of the two out.")
    nnodes = args.nnodes or 1
    if nnodes > 1 and (args.node_rank is None or args.master_addr is None):
        raise ValueError(f"--nnodes {nnodes} needs --node_rank (0 to {nnodes - 1}) and --master_addr (host of node 0)")
    if args.node_rank is not None and not 0 <= args.node_rank < nnodes:
        raise ValueError(f"--node_rank {args.node_rank} is outside 0 to {nnodes - 1}")
    per_node = args.nproc_per_node or (
        1 if args.device == "cpu" else
        torch.cuda.device_count() or (torch.xpu.device_count() if hasattr(torch, "xpu") else 0) or 1)
    rest = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--nnodes", "--node_rank", "--master_addr", "--master_port", "--nproc_per_node"):
        rest.add_argument(option)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--nproc-per-node={per_node}"]
    if nnodes > 1:
        command += [f"--node-rank={args.node_rank}", f"--master-addr={args.master_addr}",
                    f"--master-port={args.master_port or 29500}"]
    else:
        command += ["--standalone"]
    command += [sys.argv[0], *rest.parse_known_args(argv)[1]]
    print("handing over to torch's launcher:", subprocess.list2cmdline(command), flush=True)
    os.execv(sys.executable, command)
