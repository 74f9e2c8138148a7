"""Start the ranks of this host, as torchrun would: --nproc_per_node, --nnodes.

    start_ranks_if_asked(options, argv)    # in a script: exits with the ranks' code
    code = run_ranks(["train.py"], 4)      # run `python train.py` on 4 ranks here

Each rank has torchrun's variables, and meets the others in a store, as under torchrun:

    this process  -- starts, passes signals on to -->  (guard -->)  rank 0, rank 1, ...
    its store     <----------- MASTER_ADDR, MASTER_PORT ----------  rank 0, rank 1, ...

With several hosts, or --master_addr, rank 0 holds the store. When a rank fails, the others here get
SIGTERM, and SIGKILL if they do not end.

Why not torch's elastic_launch: after a signal it loses the exit codes of the ranks, so that a run
which could not save would count as stopped in good order; up to torch 2.11 a signal leaves 30
seconds to save; and it asks the name service for this host at every event.
"""
import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_setup import STOPPED, SetupError, detect_launcher

POLL = 0.1             # seconds between two looks at the ranks
FAILED_SECONDS = 20    # for the others to end when a rank has failed: they cannot save any more
MOST_PER_NODE = 1024   # ranks; far more would leave the host without memory
LOOPBACK = "127.0.0.1"
LOOPBACK_SECONDS = 5   # far more than it takes within a host
INIT_SECONDS = 300.0   # until ranks that do not meet give up, as torch has it
MASTER_PORT = 29500    # if --master_port is not given
# These options start ranks; they are not passed on to them.
LAUNCHER_OPTIONS = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def start_ranks_if_asked(args: argparse.Namespace, argv: list[str]) -> None:
    """If --nnodes or --nproc_per_node is given, run this script on as many ranks, with the other
    arguments of `argv`, and exit with their code. Returns only if neither is given.

    Raises: ValueError for options that do not fit together, SetupError for variables of a launcher
        that are incomplete or disagree, or without a loopback."""
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
    master_addr = args.master_addr
    if args.master_port and not master_addr:
        master_addr = LOOPBACK
    print(f"starting {per_node} rank(s) here, on node {node_rank} of {n_nodes}", file=sys.stderr,
          flush=True)
    sys.exit(run_ranks(["-u", *this_program(), *rest], per_node, n_nodes, node_rank, master_addr,
                       args.master_port or MASTER_PORT, args.init_timeout))


def check_launcher_options(given: dict) -> None:
    """Refuse options that do not fit together, or ranks that a launcher has started already.

    given: {name: value} of those LAUNCHER_OPTIONS that were given. Raises: as
    start_ranks_if_asked."""
    environment = dict(os.environ)
    if "LOCAL_RANK" not in environment:   # pods set the other two, for a launcher that comes later
        environment.pop("RANK", None)
        environment.pop("WORLD_SIZE", None)
    place = detect_launcher(environment)
    in_a_shell = "SLURM_PTY_PORT" in environment and os.isatty(0)   # the first task of several
    if place.world_size > 1 and not in_a_shell:
        raise ValueError(f"--nnodes and --nproc_per_node start ranks, but {place.launcher} has "
                         f"started {place.world_size} already. Leave one of the two out.")
    n_nodes = given.get("nnodes", 1)
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
              master_addr: str | None = None, master_port: int = MASTER_PORT,
              init_timeout: float = INIT_SECONDS) -> int:
    """Run the ranks of this node to their end; returns their exit code.

    Signals are passed on to the ranks. When a rank fails, the others are ended.

    Args:
        command: arguments for the Python interpreter.
        per_node: number of ranks here, the same on every node. node_rank: number of this node.
        master_addr: host of rank 0, which listens there at master_port; None: all ranks are on this
            node, and meet in a store of this process, at a port that the kernel chooses.
        init_timeout: seconds for that store to open.
    Raises: SetupError if the ranks are to meet at 127.0.0.1, and nobody can be reached there."""
    n_ranks = n_nodes * per_node
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")     # as torchrun does
    environment["WORLD_SIZE"] = str(n_ranks)
    environment["LOCAL_WORLD_SIZE"] = str(per_node)
    environment["TORCHELASTIC_RUN_ID"] = "none"        # torchrun's default, equal on all nodes
    environment["TORCHELASTIC_RESTART_COUNT"] = "0"
    if master_addr in (None, LOOPBACK):
        check_loopback()
    if master_addr is None:
        store = open_store(init_timeout)     # it ends with this function
        environment["MASTER_ADDR"] = store.host
        environment["MASTER_PORT"] = str(store.port)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    else:
        environment["MASTER_ADDR"] = master_addr
        environment["MASTER_PORT"] = str(master_port)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    ranks = {}    # {number: process}
    with signals_noted() as signals:
        try:
            for local_rank in range(per_node):
                rank = node_rank * per_node + local_rank
                environment["RANK"] = str(rank)
                environment["LOCAL_RANK"] = str(local_rank)
                # In a session of its own: a terminal's Ctrl-C comes from this process alone.
                ranks[rank] = subprocess.Popen([sys.executable, *command], env=environment,
                                               start_new_session=True)
            codes = await_ranks(ranks, signals)
        finally:    # one that could not be started ends all
            send(ranks, signal.SIGKILL)
    return choose_exit_code(codes, n_ranks)


def check_loopback() -> None:
    """Raise SetupError where a process cannot reach another one of this host: torch would try again
    for minutes, and end with its stacks."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), LOOPBACK_SECONDS).close()
    except OSError as error:
        raise SetupError(f"{LOOPBACK} cannot be reached here ({error.strerror or error}); expected "
                         "to, as the ranks meet there. Is the loopback up? In a sandbox or "
                         "container, as root:\n  ip link set lo up") from None


def open_store(seconds: float = INIT_SECONDS) -> dist.TCPStore:
    """A store on this host for ranks on this host, which no other host can reach.

    seconds: until it gives up."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, timeout=timedelta(seconds=seconds),
                         wait_for_workers=False, master_listen_fd=listener.detach())


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """In this block, signals to this process are only added to the list that it yields."""
    signals = []

    def note(number, _frame):
        signals.append(number)

    before = {}
    for number in SIGNALS:
        under_nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
        if not under_nohup:
            before[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def await_ranks(ranks: dict[int, subprocess.Popen], signals: list[int]) -> dict[int, int]:
    """Wait for all ranks, passing on the signals that come. When one fails, end the others.

    Returns: {rank: exit code}, in the order in which they ended."""
    codes = {}
    kill_at = None    # time.monotonic(); None: no rank has failed
    while len(codes) < len(ranks):
        time.sleep(POLL)
        while signals:
            number = signals.pop(0)
            if number == signal.SIGHUP:    # the terminal is gone
                number = signal.SIGTERM
            send(ranks, number)
        for rank, process in ranks.items():
            if rank in codes or process.poll() is None:
                continue
            codes[rank] = process.returncode
            is_complete = process.returncode in (0, STOPPED)
            if not is_complete and kill_at is None:   # by SIGTERM too: the others would wait for it
                kill_at = time.monotonic() + FAILED_SECONDS
                send(ranks, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            send(ranks, signal.SIGKILL)
    return codes


def send(ranks: dict[int, subprocess.Popen], number: int) -> None:
    """Send a signal to the ranks that have not ended."""
    for process in ranks.values():
        process.send_signal(number)   # nothing to one that has ended


def has_failed(code: int) -> bool:
    """Whether this exit code is a failure.

    The others get SIGTERM when a rank fails: they exit with STOPPED, or SIGTERM ends them as they
    exit. Neither is a failure. Other signals are."""
    ended_by_us = (-signal.SIGTERM, 128 + signal.SIGTERM)   # the second one: as a guard reports it
    return code not in (0, STOPPED, *ended_by_us)


def choose_exit_code(codes: dict[int, int], n_ranks: int) -> int:
    """The exit code for ranks that ended with `codes`, in this order: that of the first failure.

    If a signal has ended that rank, which could not say so itself, print it: as the last line."""
    for rank, code in codes.items():
        if not has_failed(code):
            continue
        if code > 0:
            return code
        if code == -signal.SIGINT:   # by Ctrl-C, before the ranks had met
            return 130
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        print(f"FAILED: rank {rank} of {n_ranks} on {socket.gethostname()}: died without a word "
              f"({signal.Signals(-code).name}{hint})", file=sys.stderr, flush=True)
        return 1
    if STOPPED in codes.values():
        return STOPPED
    return int(any(codes.values()))
