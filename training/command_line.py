"""The command line of a training script: its options, and one message for all ranks.

    def main(argv=None):
        command = read_command(argv, read_arguments)    # starts ranks here, if options ask for it
        if command.plan is not None:
            return print_plan(command, describe_plan)
        with ranks_meet(command) as (ddp, watch):
            with preparing(command, watch):
                run = prepare(command.config, ddp, command.work_dir)
                take_folder(run, ddp, watch, fresh, folders)
            result = train(run, ddp, watch)
        exit_with(result)

An error before training is printed once and ends all ranks with exit code 2, and the run folder
stays as it was. Other codes: 0 finished, 75 stopped with work left, 1 an error or ranks that did
not appear, 70 no progress, 130 Ctrl-C.
"""
import argparse
import contextlib
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_setup import (
    BACKENDS,
    BAD_INPUT,
    STOPPED,
    CannotSave,
    Ddp,
    abort,
    detect_launcher,
    setup_ddp,
)
from ddp_watch import INTERRUPTED, STOP_SIGNALS, watch_run
from training.launch import start_ranks_if_asked
from training.loop import Diverged
from training.parser import Parser
from training.plan import print_lines
from training.problems import in_columns

COLLECTIVE_SECONDS = 6 * 3600.0   # timeout; the watchdog is earlier and names the late rank


# ---------------------------------------------------------------- the start of a script
@dataclass
class Command:
    """The command line of a training script, as far as it could be read."""
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
    command = Command(launch_options([]))
    try:
        command.launch = launch_options(argv)
        command.options, command.config = read_arguments(argv)
        if command.plan is None:
            start_ranks_if_asked(command.launch, argv)
    except (ValueError, RuntimeError) as error:
        command.problem = ValueError(error)
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
    except (ValueError, RuntimeError, OSError) as error:
        exit_before_start(command, error)


@contextlib.contextmanager
def ranks_meet(command):
    """The ranks of a command meet, and are watched to the end of the block: yields (ddp, watch).

    Here ends what is no bug, with one line instead of a traceback: Ctrl-C, a training that has
    diverged, a checkpoint that cannot be written."""
    launch = command.launch
    minutes = 0.0
    signals = STOP_SIGNALS
    collective_timeout = None
    if command.config is not None:
        minutes = command.config.monitoring.watchdog_minutes
        signals = command.config.training.stop_signals
    if minutes:
        collective_timeout = COLLECTIVE_SECONDS
    try:
        ddp = setup_ddp(launch.device, launch.backend, ranks=launch.ranks,
                        timeout=collective_timeout, init_timeout=launch.init_timeout)
    except (ValueError, RuntimeError) as error:
        exit_before_start(command, error)
    if minutes:   # while loading, allow at least the time to meet; take_folder sets the other limit
        minutes = max(minutes, launch.init_timeout / 60)
    with ddp:
        try:
            watch = watch_run(ddp, minutes=minutes, signals=signals)
        except ValueError as error:   # DDP_DEADLINE is no time
            abort(ddp, in_columns(f"error: {error}", ddp), BAD_INPUT)
        with watch:
            try:
                yield ddp, watch
            except KeyboardInterrupt:
                watch.abort("interrupted (Ctrl-C)", INTERRUPTED)
            except (Diverged, CannotSave) as error:
                watch.abort(str(error), advise=False)


def exit_before_start(command, error):
    """Print an error of this rank, and exit."""
    error = command.problem or error   # the first one
    default_code = BAD_INPUT if isinstance(error, (ValueError, OSError)) else 1
    print(in_columns(f"error: {error}"), file=sys.stderr)
    sys.exit(getattr(error, "code", default_code))


@contextlib.contextmanager
def preparing(command, watch):
    """In this block an error in arguments or data, a ValueError or OSError, ends all ranks with one
    line. It raises what was wrong with the command line."""
    try:
        if command.problem:
            raise command.problem
        yield
    except (ValueError, OSError) as error:
        watch.abort(in_columns(f"error: {error}", watch.ddp), BAD_INPUT)


def exit_with(result):
    """Exit with 75 if `train` has stopped with work left; result: what it returned."""
    if "stopped" in result:
        sys.exit(STOPPED)


# ---------------------------------------------------------------- the start of a benchmark
@contextlib.contextmanager
def joined_ranks(device, backend="auto", **options):
    """setup_ddp for a benchmark. An error in the machine, the data or the settings ends all ranks
    with one line."""
    try:
        ddp = setup_ddp(device, backend, quiet=True, **options)
    except (RuntimeError, OSError) as e:
        print(in_columns(f"error: {e}"), file=sys.stderr)
        sys.exit(getattr(e, "code", 1))
    with ddp:
        try:
            yield ddp
        except (ValueError, OSError) as e:
            abort(ddp, in_columns(f"error: {e}", ddp), BAD_INPUT)


def started_ranks(args, argv):
    """joined_ranks by the options of add_launch_arguments, which may ask to start the ranks first.

    args: the options that were parsed from argv; None: parse the launch options of argv here."""
    try:
        args = args or launch_options(argv)
        start_ranks_if_asked(args, argv)
    except (ValueError, RuntimeError) as e:
        print(in_columns(f"error: {e}"), file=sys.stderr)
        sys.exit(BAD_INPUT)
    return joined_ranks(args.device, args.backend, ranks=args.ranks,
                        init_timeout=args.init_timeout)


# ---------------------------------------------------------------- options
def add_run_arguments(parser, *work_dir):
    """Add the options of all training scripts. work_dir: names of the one for the run folder."""
    add = parser.add_argument
    add(*work_dir, dest="work_dir", help="run folder (default: runs/CONFIG_NAME)")
    add("--resume", help="continue from this checkpoint")
    add("--fresh", action="store_true", help="start over; the old run folder is renamed")
    add("--plan", help="print batch, learning rate and warm-up for ranks such as 1,2,4,8")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--ipex", default="auto", choices=("auto", "on", "off"),
        help="Intel's extension for PyTorch; auto: on an XPU whose torch has no xccl")
    add_launch_arguments(parser)


def add_launch_arguments(parser):
    """Add the launch options of all scripts to an argparse parser."""
    add = parser.add_argument_group("launch").add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", *BACKENDS, "xpu"))
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
