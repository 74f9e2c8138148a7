"""The command line of a training script: its options, and one message for all ranks.

    def main(argv=None):
        command = read_command(argv, read_arguments)    # starts ranks here, if options ask for it
        if command.plan is not None:
            return print_plan(command, describe_plan)
        with ranks_meet(command) as ddp:
            with preparing(command, ddp):
                run = prepare(command.config, ddp, command.work_dir)
            result = train(run, ddp)
        exit_with(result)

An error before training is printed once and ends all ranks with exit code 2. It replaces the
status.json in the run folder, unless that tells the outcome of steps. Other codes: 0 finished, 75
stopped with work left, 1 an error or ranks that did not appear, 70 no progress, 130 Ctrl-C.
"""
import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_setup import AGAIN, BAD_INPUT, Ddp, abort, detect_launcher, setup_ddp, worker_init
from training.config import Parser
from training.folder import replace_status
from training.launch import start_ranks_if_asked
from training.plan import print_lines
from training.watch import read_status, watch_run

COLLECTIVE_SECONDS = 6 * 3600.0   # timeout; the watchdog is earlier and names the late rank
INTERRUPTED = 130                 # exit code after Ctrl-C


# ---------------------------------------------------------------- the start of a script
@dataclass
class Command:
    """The command line of a training script, as far as it could be read."""
    began: float                        # when, in epoch seconds
    launch: argparse.Namespace          # see launch_options; of a wrong command line the defaults
    options: Any = None                 # all options of the script
    config: Any = None
    work_dir: str | None = None         # run folder; None: this command names none
    problem: ValueError | None = None   # raised when the ranks have met, so that one prints it

    @property
    def plan(self):
        """Text of --plan; None: train."""
        return self.launch.plan


def read_command(argv, read_arguments, default_name=""):
    """Read a command line, and start ranks here if its options ask for it.

    Args:
        argv: list of arguments; None: those of this process.
        read_arguments: function (argv) -> (options, config); it raises ValueError.
        default_name: of the run folder in runs/, if no --config gives a name.
    Returns: a Command. Does not return where it has started ranks, or printed the help."""
    if argv is None:
        argv = sys.argv[1:]
    if "-h" in argv or "--help" in argv:
        read_arguments(["--help"])
    command = Command(time.time(), launch_options([]))
    try:
        command.launch = launch_options(argv)
        command.options, command.config = read_arguments(argv)
        if command.plan is None:
            start_ranks_if_asked(command.launch, argv)
    except KeyboardInterrupt as error:
        exit_before_start(command, error)
    except (ValueError, RuntimeError) as error:
        command.problem = ValueError(error)
    if command.plan is None:   # a plan starts no run: an earlier status.json stays
        command.work_dir = command.launch.work_dir
        name = Path(command.launch.config).stem if command.launch.config else default_name
        if not command.work_dir and name:
            command.work_dir = os.path.join("runs", name)
    return command


def print_plan(command, describe_plan):
    """Print on rank 0 what describe_plan(config, text of --plan) returns."""
    try:
        if detect_launcher(os.environ).rank > 0:
            return
        if command.problem:
            raise command.problem
        text = describe_plan(command.config, command.plan)
        print_lines(Ddp(), text.splitlines())
    except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as error:
        exit_before_start(command, error)


@contextlib.contextmanager
def ranks_meet(command):
    """setup_ddp by the options of a command, and cleanup_ddp at the end of the block."""
    launch = command.launch
    collective_timeout = None
    if command.problem is None and command.config.monitoring.watchdog_minutes:
        collective_timeout = COLLECTIVE_SECONDS
    try:
        ddp = setup_ddp(launch.device, launch.backend, ranks=launch.ranks, ipex=launch.ipex,
                        timeout=collective_timeout, init_timeout=launch.init_timeout)
    except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as error:
        exit_before_start(command, error)
    with ddp:
        yield ddp


def exit_before_start(command, error):
    """Print an error of this rank, note it in status.json if no other rank has, and exit."""
    if isinstance(error, KeyboardInterrupt):
        if detect_launcher(os.environ).rank == 0:
            print("interrupted (Ctrl-C)", file=sys.stderr)
        replace_status(command.work_dir, INTERRUPTED, "interrupted (Ctrl-C)", since=command.began)
        sys.exit(INTERRUPTED)
    error = command.problem or error   # the first one
    default_code = BAD_INPUT if isinstance(error, ValueError) else 1
    code = getattr(error, "code", default_code)
    print(f"error: {error}", file=sys.stderr)
    replace_status(command.work_dir, code, str(error), since=command.began)
    sys.exit(code)


@contextlib.contextmanager
def preparing(command, ddp):
    """In this block an error in arguments or data, a ValueError or OSError, ends all ranks with one
    line; so does a lack of memory. It raises what was wrong with the command line."""
    former = read_status(command.work_dir)
    watched = None
    if ddp.is_main and replace_status(command.work_dir, None, "starting"):
        watched = command.work_dir   # watch_run shall write the outcome of this start there
    try:
        if command.problem:
            raise command.problem
        minutes = command.config.monitoring.watchdog_minutes
        if minutes:   # while loading, allow at least the time to meet
            minutes = max(minutes, command.launch.init_timeout / 60)
        # Ctrl-C ends the run at once until the steps begin.
        signals = [name for name in command.config.training.stop_signals if name != "SIGINT"]
        # Before the watch, which restores these handlers when it ends: a stop signal that comes
        # after the end of the run is ignored, as by a DataLoader's worker.
        worker_init(signals=signals)
        # This watch is for loading; take_folder begins the one for the steps.
        watch_run(ddp, watched, minutes, signals)
        yield
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        if isinstance(error, (MemoryError, RuntimeError)):   # torch's is a RuntimeError
            error = OSError(f"there is not enough memory for this model or data ({error})")
        watch_run(ddp, None, minutes=0, signals=())
        if ddp.is_main:
            replace_status(command.work_dir, BAD_INPUT, str(error), former=former)
        # Rank 0 corrects status.json first: the failure of another rank, secondary, waits for it.
        abort(ddp, f"error: {error}", code=BAD_INPUT, secondary=not ddp.is_main)
    # The watch restores this handler too: Ctrl-C after the end does not change the outcome.
    ddp.state.watch.handlers[signal.SIGINT] = signal.SIG_IGN


def exit_with(result):
    """Exit with 75 if `train` has stopped with work left; result: what it returned."""
    if "stopped" in result:
        sys.exit(AGAIN)


# ---------------------------------------------------------------- the start of a benchmark
@contextlib.contextmanager
def joined_ranks(device, backend="auto", **options):
    """setup_ddp for a benchmark. An error in the machine, the data or the settings ends all ranks
    with one line."""
    try:
        ddp = setup_ddp(device, backend, quiet=True, **options)
    except (RuntimeError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(getattr(e, "code", 1))
    with ddp:
        try:
            yield ddp
        except (ValueError, OSError) as e:
            abort(ddp, f"error: {e}", BAD_INPUT, secondary=not ddp.is_main)


def started_ranks(args, argv):
    """joined_ranks by the options of add_launch_arguments, which may ask to start the ranks first.

    args: the options that were parsed from argv; None: parse the launch options of argv here."""
    try:
        args = args or launch_options(argv)
        start_ranks_if_asked(args, argv)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    return joined_ranks(args.device, args.backend, ranks=args.ranks,
                        init_timeout=args.init_timeout, ipex=args.ipex)


# ---------------------------------------------------------------- options
def add_run_arguments(parser, *work_dir):
    """Add the options of all training scripts. work_dir: names of the one for the run folder."""
    add = parser.add_argument
    add(*work_dir, dest="work_dir", help="run folder (default: runs/CONFIG_NAME)")
    add("--resume", help="continue from this checkpoint")
    add("--fresh", action="store_true", help="start over; the old run folder is renamed")
    add("--plan", help="print batch, learning rate and warm-up for ranks such as 1,2,4,8")
    add("overrides", nargs="*", metavar="section.key=value")
    add_launch_arguments(parser)


def add_launch_arguments(parser):
    """Add the launch options of all scripts to an argparse parser."""
    add = parser.add_argument_group("launch").add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    add("--ipex", default="auto", choices=("auto", "on", "off"),
        help="Intel's extension for PyTorch; auto: on an XPU whose torch has no xccl")
    add("--ranks", type=int, help="refuse any other number of ranks")
    add("--init_timeout", type=float, default=300.0, help="seconds to wait for all ranks")
    add("--nproc_per_node", type=int, help="start this many ranks on this node (with "
                                           "--nnodes: default 1 per accelerator)")
    add("--nnodes", type=int, help="number of nodes; give this command on each")
    add("--node_rank", type=int, help="number of this node, 0 to nnodes - 1")
    add("--master_addr", help="host of node 0")
    add("--master_port", type=int, help="a free port of node 0 (default 29500)")


def launch_options(argv):
    """The options that are needed before the ranks can meet; all others are left alone."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_launch_arguments(parser)
    parser.add_argument("--config")
    parser.add_argument("--work_dir", "--output_dir")
    parser.add_argument("--plan")
    parser.add_argument("--no_cuda", action="store_true")
    if "" in argv or any(re.fullmatch("--[^=]+=", text) for text in argv):
        raise ValueError(f"command line: an argument is empty in {shlex.join(argv)}. Expected a "
                         "value. Is a variable of the shell unset?")
    launch = parser.parse_known_args(argv)[0]
    if launch.no_cuda:
        if launch.device not in ("auto", "cpu"):
            raise ValueError(f"command line: --no_cuda with --device {launch.device}; expected one "
                             "of the two.")
        launch.device = "cpu"
    return launch
