"""Start the ranks of this host, as torchrun would: --nproc_per_node, --nnodes.

    start_ranks_if_asked(options, argv)    # in a script: exits with the ranks' code
    code = run_ranks(["train.py"], 4)      # run `python train.py` on 4 ranks here

Each rank gets its place in the DDP_* variables, the first row of ddp_setup.LAUNCHERS:

    this process ── starts, passes signals on to ──> (guard ──>) rank 0, rank 1, ...
    rank 1, ...  ── MASTER_ADDR, MASTER_PORT ──────> rank 0

When a rank fails, its guard (ddp_guard.py) ends all ranks. This process ends those that are left
or, where there are no guards, all others.
"""
import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ddp_setup import AGAIN, DEFAULT_PORT, cores_given, detect_launcher, loopback

POLL = 0.1             # seconds between two looks at the ranks
SAVING_SECONDS = 600   # for the ranks to save and exit after a signal to this process
FAILED_SECONDS = 20    # for the others to end when a rank has failed: they cannot save any more
MOST_PER_NODE = 1024   # ranks; far more would leave the host without memory
# These options start ranks; they are not passed on to them.
LAUNCHER_OPTIONS = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port")
# What another launcher, or a pod, may have left in the environment.
OTHER_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Place(NamedTuple):
    """Where rank 0 listens."""
    host: str
    port: int


def start_ranks_if_asked(args: argparse.Namespace, argv: list[str]) -> None:
    """If --nnodes or --nproc_per_node is given, run this script on as many ranks, with the other
    arguments of `argv`, and exit with their code. Returns only if neither is given.

    Raises: ValueError for options that do not fit together."""
    given = {name: getattr(args, name) for name in LAUNCHER_OPTIONS
             if getattr(args, name) is not None}
    if not given:
        return
    check_launcher_options(given)
    n_nodes = given.get("nnodes", 1)
    node_rank = given.get("node_rank", 0)
    devices = 0 if args.device == "cpu" else torch.accelerator.device_count()
    per_node = args.nproc_per_node or devices or 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in LAUNCHER_OPTIONS:
        parser.add_argument(f"--{name}")
    rest = parser.parse_known_args(argv)[1]
    # The command that the last line of a failure gives to continue: that of a rank starts only one.
    os.environ["DDP_COMMAND"] = shlex.join(["python", *sys.orig_argv[1:]])
    print(f"starting {per_node} rank(s) here, on node {node_rank} of {n_nodes}", file=sys.stderr,
          flush=True)
    rank_0 = None
    if n_nodes > 1 or args.master_addr or args.master_port:
        rank_0 = Place(args.master_addr or loopback(), args.master_port or DEFAULT_PORT)
    sys.exit(run_ranks(["-u", *this_program(), *rest], per_node, n_nodes, node_rank, rank_0))


def check_launcher_options(given: dict) -> None:
    """Refuse options that do not fit together, or ranks that a launcher has started already.

    given: {name: value} of those LAUNCHER_OPTIONS that were given. Raises: ValueError."""
    environment = dict(os.environ)
    if "LOCAL_RANK" not in environment:   # pods set the other two, for a launcher that comes later
        environment.pop("RANK", None)
        environment.pop("WORLD_SIZE", None)
    place = detect_launcher(environment)
    if place.world_size > 1:
        raise ValueError(f"--nnodes and --nproc_per_node start ranks, but {place.launcher} has "
                         f"started {place.world_size} already. Leave one of the two out.")
    n_nodes = given.get("nnodes", 1)
    wanted = os.environ.get("DDP_WORLD_SIZE", "").strip()
    if wanted and "nproc_per_node" in given and wanted != str(n_nodes * given["nproc_per_node"]):
        raise ValueError(f"DDP_WORLD_SIZE asks for {wanted} rank(s), but --nnodes {n_nodes} and "
                         f"--nproc_per_node {given['nproc_per_node']} start "
                         f"{n_nodes * given['nproc_per_node']}. Expected the same; unset it, or "
                         "change one of them.")
    if n_nodes > 1:
        complete = {"node_rank", "master_addr"} <= given.keys()
    else:
        complete = "nnodes" in given or "nproc_per_node" in given
    node_exists = 0 <= given.get("node_rank", 0) < n_nodes
    is_possible = 1 <= given.get("nproc_per_node", 1) <= MOST_PER_NODE
    if not complete or not node_exists or not is_possible:
        found = " ".join(f"--{name} {value}" for name, value in given.items())
        raise ValueError(f"found {found}; expected --nproc_per_node M, or --nnodes N --node_rank R "
                         "--master_addr HOST [--master_port P] [--nproc_per_node M] with R from 0 "
                         f"to N - 1 and M from 1 to {MOST_PER_NODE:,}.")


def this_program() -> list[str]:
    """The arguments of Python that name the program which runs: a script, or -m and a package."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return [sys.argv[0]]
    return ["-m", spec.name.removesuffix(".__main__")]


def run_ranks(command: list[str], per_node: int, n_nodes: int = 1, node_rank: int = 0,
              rank_0: Place | None = None) -> int:
    """Run the ranks of this node to their end; returns their exit code.

    Signals are passed on to the ranks. When a rank fails, the others are ended.

    Args:
        command: arguments for the Python interpreter.
        per_node: number of ranks here, the same on every node. node_rank: number of this node.
        rank_0: None: all ranks are on this node, and a free port is found."""
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_PLACES}
    environment.setdefault("OMP_NUM_THREADS", "1")   # as torchrun does
    if per_node > 1:    # they would bind the first thread of every rank to the first core
        environment.pop("OMP_PROC_BIND", None)
        environment.pop("OMP_PLACES", None)
    environment["DDP_WORLD_SIZE"] = str(n_nodes * per_node)
    environment["DDP_LOCAL_WORLD_SIZE"] = str(per_node)
    with contextlib.ExitStack() as stack:
        if rank_0 is None:
            rank_0 = stack.enter_context(reserved_place())
        environment["MASTER_ADDR"] = rank_0.host
        environment["MASTER_PORT"] = str(rank_0.port)
        ranks = Ranks()
        stack.enter_context(ranks.signals_passed_on())
        try:
            for local_rank in range(per_node):
                place = {"DDP_RANK": str(node_rank * per_node + local_rank),
                         "DDP_LOCAL_RANK": str(local_rank)}
                ranks.start(command, {**environment, **place})
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"error: rank {place['DDP_RANK']} cannot be started: {error}", file=sys.stderr)
            ranks.end_within(0)
            ranks.wait()
            return 1
        return exit_code_of(ranks.wait())


@contextlib.contextmanager
def reserved_place() -> Iterator[Place]:
    """A free port of the loopback address, which no other program gets meanwhile.

    On Linux the port stays bound, without listening, so that the kernel gives it to nobody who
    asks for any free port, while rank 0, which asks for this one, may bind it too and listen."""
    host = loopback()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        port = holder.getsockname()[1]
        if not sys.platform.startswith("linux"):   # elsewhere rank 0 could not bind it
            holder.close()
        yield Place(host, port)


class Ranks:
    """The started ranks. `ending`: when they are killed if they have not ended by themselves."""

    def __init__(self):
        self.processes = []
        self.numbers = {}       # {process id: number of the rank}
        self.guarded = "DDP_GUARD_FD" in os.environ   # as this process is: a guard names its rank
        self.codes = []         # exit codes, in the order in which the ranks ended
        self.ending = None      # time.monotonic(); None: no limit
        self.pending = []       # signals that came since the last look at the ranks
        self.cores = cores_given()

    def start(self, command: list[str], environment: dict) -> None:
        """Start one rank, in a session of its own: a terminal's Ctrl-C comes through pass_on."""
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, start_new_session=True,
            preexec_fn=self.become_rank)
        self.processes.append(process)
        self.numbers[process.pid] = environment["DDP_RANK"]

    def become_rank(self) -> None:
        """In the started process, before it runs Python: give back the cores that OpenMP took, and
        have the kernel send SIGTERM when this launcher is killed (Linux only)."""
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)    # PR_SET_PDEATHSIG

    @contextlib.contextmanager
    def signals_passed_on(self):
        """In this block, signals to this process go to the ranks."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1,
                       signal.SIGUSR2, signal.SIGHUP):
            under_nohup = (number == signal.SIGHUP
                           and signal.getsignal(number) is signal.SIG_IGN)
            if not under_nohup:
                before[number] = signal.signal(number, self.pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pass_on(self, number: int, _frame) -> None:
        """Handler: send a signal to all ranks; that of a closed terminal, and SIGQUIT, by which a
        guard asks its rank for stacks, as a SIGTERM."""
        if number in (signal.SIGHUP, signal.SIGQUIT):
            number = signal.SIGTERM
        if number in (signal.SIGINT, signal.SIGTERM):
            self.end_within(SAVING_SECONDS)
        self.pending.append(number)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that have not ended."""
        for process in self.processes:
            process.send_signal(number)   # nothing to one that has ended

    def end_within(self, seconds: float) -> None:
        if self.ending is None:
            self.ending = time.monotonic() + seconds

    def wait(self) -> list[int]:
        """Wait for all ranks; returns their exit codes, in the order in which they ended."""
        running = list(self.processes)
        while running:
            while self.pending:
                self.send(self.pending.pop(0))
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                running.remove(process)
                self.name_killed(process)
                self.codes.append(process.returncode)
            if any(has_failed(process.returncode) for process in ended):
                self.send(signal.SIGTERM)
                self.end_within(FAILED_SECONDS)
            if self.ending is not None and time.monotonic() > self.ending:
                self.send(signal.SIGKILL)
            if running and not ended:
                time.sleep(POLL)
        return self.codes

    def name_killed(self, process: subprocess.Popen) -> None:
        """Print which rank a signal has ended, if it was the first to fail, not Ctrl-C, and no
        guard says so: the rank itself could not."""
        code = process.returncode
        others_failed = any(has_failed(other) for other in self.codes)
        by_hand = code == -signal.SIGINT or self.ending is not None
        if code >= 0 or not has_failed(code) or others_failed or by_hand or self.guarded:
            return
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"error: rank {self.numbers[process.pid]} of this run was ended by "
              f"{signal.Signals(-code).name}{hint}", file=sys.stderr)


def has_failed(code: int) -> bool:
    """Whether this exit code is a failure.

    The others get SIGTERM when a rank fails: they exit with AGAIN, or SIGTERM ends them as they
    exit. Neither is a failure. Other signals are."""
    ended_by_us = (-signal.SIGTERM, 128 + signal.SIGTERM)   # the second one: as a guard reports it
    return code not in (0, AGAIN, *ended_by_us)


def exit_code_of(codes: list[int]) -> int:
    """The exit code for ranks that ended with `codes`, in this order."""
    failed = [code for code in codes if has_failed(code)]
    for code in failed:
        if code > 0:
            return code
    if -signal.SIGINT in failed:   # by Ctrl-C, before the ranks had met
        return 130
    if failed:
        return 1
    if AGAIN in codes:
        return AGAIN
    return int(any(codes))
