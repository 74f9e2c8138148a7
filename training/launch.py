"""Start the ranks of this host, as torchrun would: --nproc_per_node, --nnodes.

    start_ranks_if_asked(options, argv)    # in a script: exits with the ranks' code
    code = run_ranks(["train.py"], 4)      # run `python train.py` on 4 ranks here
"""
import argparse
import contextlib
import logging
import os
import shlex
import signal
import sys

import torch

from ddp_setup import AGAIN, detect_launcher

SAVING_SECONDS = 600   # for the ranks to save and exit after a signal to the launcher
EXIT_SECONDS = 30      # for a node whose ranks have finished to wait for other nodes
# These options start ranks; they are not passed on to them.
LAUNCHER_OPTIONS = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port")


def start_ranks_if_asked(args, argv):
    """If --nnodes or --nproc_per_node is given, run this script on as many ranks, with the other
    arguments of `argv`, and exit with their code. Returns only if neither is given.

    Raises: ValueError for options that do not fit together."""
    given = {name: getattr(args, name) for name in LAUNCHER_OPTIONS
             if getattr(args, name) is not None}
    if not given:
        return
    left_over = set() if "LOCAL_RANK" in os.environ else {"RANK", "WORLD_SIZE"}   # pods set these
    place = detect_launcher({name: os.environ[name] for name in {*os.environ} - left_over})
    if place.world_size > 1:
        raise ValueError(f"--nnodes and --nproc_per_node start ranks, but {place.launcher} has "
                         f"started {place.world_size} already. Leave one of the two out.")
    nnodes, rank = given.get("nnodes", 1), given.get("node_rank", 0)
    complete = ({"node_rank", "master_addr"} <= given.keys() if nnodes > 1 else
                bool({"nnodes", "nproc_per_node"} & given.keys()))
    if not complete or not 0 <= rank < nnodes or given.get("nproc_per_node", 1) < 1:
        found = " ".join(f"--{name} {value}" for name, value in given.items())
        raise ValueError(f"found {found}; expected --nproc_per_node M, or --nnodes N --node_rank R "
                         "--master_addr HOST [--master_port P] [--nproc_per_node M] with R from 0 "
                         "to N - 1 and M of at least 1.")
    devices = 0 if args.device == "cpu" else torch.accelerator.device_count()
    per_node = args.nproc_per_node or devices or 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in LAUNCHER_OPTIONS:
        parser.add_argument(f"--{name}")
    rest = parser.parse_known_args(argv)[1]
    command = ["-u", *this_program(), *rest]
    # The command that the guard's last line gives to continue: `command` starts only one rank.
    os.environ["DDP_COMMAND"] = shlex.join(["python", *sys.orig_argv[1:]])
    print(f"starting {per_node} rank(s) here, on node {rank} of {nnodes}, with torch's launcher",
          file=sys.stderr, flush=True)
    place_of_node_0 = None
    if nnodes > 1 or args.master_addr or args.master_port:
        place_of_node_0 = args.master_addr or "127.0.0.1", args.master_port or 29500
    code = run_ranks(command, per_node, nnodes, rank, place_of_node_0, args.init_timeout)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)   # at Python's own exit a thread of torch's store may abort the process


def this_program():
    """The arguments of Python that name the program which runs: a script, or -m and a package."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return [sys.argv[0]]
    return ["-m", spec.name.removesuffix(".__main__")]


def run_ranks(command, per_node, nnodes=1, node_rank=0, place_of_node_0=None, limit=300.0):
    """Run the ranks of this node under torch's agent, without its reports; returns their exit code.

    command: arguments for the Python interpreter. place_of_node_0: (host, a free port there); None:
    all ranks are on this node, and torch finds a port. limit: seconds to wait for the other nodes.
    Signals are passed on to the ranks, which then have SAVING_SECONDS to save."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    logging.disable()   # torch's error tables would hide our last line
    os.environ.setdefault("OMP_NUM_THREADS", "1")   # as torchrun does
    host, port = place_of_node_0 or ("localhost", 0)
    rendezvous = RendezvousParameters(
        "static" if place_of_node_0 else "c10d", f"{host}:{port}",
        f"{os.getpid()}" if nnodes == 1 else "by hand", nnodes, nnodes, rank=node_rank,
        timeout=limit)
    fixed = {"master_addr": host, "master_port": port} if place_of_node_0 else {}
    spec = WorkerSpec("rank", per_node, registry.get_rendezvous_handler(rendezvous),
                      entrypoint=sys.executable, args=tuple(command), max_restarts=0,
                      monitor_interval=0.1, **fixed)

    class Agent(LocalElasticAgent):
        def _start_workers(self, group):
            started = super()._start_workers(group)   # it sets handlers that end the ranks
            for number in (signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._pass_on)
            return started

        def _pass_on(self, number, _):
            for handler in self._pcontext.subprocess_handlers.values():
                handler.proc.send_signal(number)

    agent = Agent(spec, DefaultLogsSpecs(), exit_barrier_timeout=EXIT_SECONDS)
    agent._shutdown_timeout = SAVING_SECONDS   # torch 2.8 ignores this and waits 30 s
    try:
        codes = [failure.exitcode for failure in agent.run().failures.values()]
    except SignalException:
        handlers = agent._pcontext.subprocess_handlers if agent._pcontext else {}
        codes = [handler.proc.returncode for handler in handlers.values()] or [130]
    except KeyboardInterrupt:   # before the ranks were started
        return 130
    except (RuntimeError, OSError, ValueError) as e:
        print(f"error: torch's launcher: {e}", file=sys.stderr)
        return 1
    # When a rank ends, torch's agent sends SIGTERM to the others: they exit with AGAIN, or SIGTERM
    # ends them as they exit. Neither is a failure. Other signals are: they have other codes.
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)   # the second one: as a guard reports it
    failed = [code for code in codes if code not in (0, AGAIN, *ended)]
    if failed:
        interrupted = -signal.SIGINT in failed   # by Ctrl-C, before the ranks had met
        return next((code for code in failed if code > 0), 130 if interrupted else 1)
    return AGAIN if AGAIN in codes else int(any(codes))
