"""The command line of a training script: options, torch's launcher, one message for all ranks.

    run_script(Script(make_parser, read_arguments, describe_plan, prepare, train))

A start goes in this order: read the options, start ranks if the options ask for it, let the ranks
meet, prepare, train. An error before training is printed once, replaces an earlier status.json in
the run folder, and ends all ranks with exit code 2. Other codes: 0 finished, 75 stopped with work
left, 1 an error or ranks that did not appear, 70 no progress, 130 Ctrl-C. The last part of the file
makes the text that --plan and a start print.
"""
import argparse
import contextlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_setup import (AGAIN, BAD_INPUT, Ddp, abort, choose_dtype, detect_launcher, print0,
                       setup_ddp, worker_init)
from training.config import Parser
from training.loop import is_finished
from training.resume import machine_differences
from training.folder import replace_status
from training.loop import scale_for_batch
from training.watch import read_status, watch_run

COLLECTIVE_SECONDS = 6 * 3600.0   # timeout; the watchdog is earlier and names the late rank
SAVING_SECONDS = 600   # for the ranks to save and exit after a signal to the launcher
EXIT_SECONDS = 30      # for a node whose ranks have finished to wait for other nodes


# ---------------------------------------------------------------- the start of a script
class Script(NamedTuple):
    """What run_script needs of a training script."""
    make_parser: Any      # () -> argparse parser of all options
    read_arguments: Any   # (argv) -> (options, config), or ValueError
    describe_plan: Any    # (config, text of --plan) -> text
    prepare: Any          # (config, ddp, work_dir, options) -> Run
    train: Any            # (run, ddp) -> dict
    name: str = ""        # of the run folder in runs/, if no --config gives a name


def run_script(script, argv=None):
    """Run a training script. Exits with a code other than 0 if the run did not finish."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        script.make_parser().parse_args(["--help"])
    began, launch, collective_timeout = time.time(), launch_options([]), None
    options = config = problem = None
    try:
        launch = launch_options(argv)
        if launch.plan is None:
            options, config = script.read_arguments(argv)
            start_ranks_if_asked(launch, argv)
            if config.monitoring.watchdog_minutes:
                collective_timeout = COLLECTIVE_SECONDS
    except (ValueError, RuntimeError) as e:
        problem = ValueError(e)   # raised when the ranks have met: printed once
    name = Path(launch.config).stem if launch.config else script.name
    work_dir = launch.work_dir or (os.path.join("runs", name) if name else None)
    if launch.plan is not None:
        work_dir = None   # --plan starts no run: its status.json stays
    try:
        if launch.plan is not None:
            if detect_launcher(os.environ).rank == 0:
                text = script.describe_plan(script.read_arguments(argv)[1], launch.plan)
                print_lines(Ddp(), text.splitlines())
            return
        ddp = setup_ddp(launch.device, launch.backend, ranks=launch.ranks, ipex=launch.ipex,
                        timeout=collective_timeout, init_timeout=launch.init_timeout)
    except (ValueError, RuntimeError, OSError) as e:
        e = problem or e   # the first error
        code = getattr(e, "code", BAD_INPUT if isinstance(e, ValueError) else 1)
        print(f"error: {e}", file=sys.stderr)
        replace_status(work_dir, code, str(e), since=began)   # only by the first rank to fail
        sys.exit(code)
    except KeyboardInterrupt:   # nothing runs yet
        replace_status(work_dir, 130, "interrupted (Ctrl-C)", since=began)
        sys.exit(130)
    with ddp:
        run = prepare_on_all_ranks(script, options, config, launch, problem, work_dir, ddp)
        # close_run restores this handler: Ctrl-C after the end does not change the outcome
        ddp.state.watch.handlers[signal.SIGINT] = signal.SIG_IGN
        result = script.train(run, ddp)
    if "stopped" in result:
        sys.exit(AGAIN)


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


def prepare_on_all_ranks(script, options, config, launch, problem, work_dir, ddp):
    """Prepare the run; an error in the arguments or data ends all ranks with one line.

    launch: see launch_options. problem: ValueError found before the ranks met, or None."""
    former, watched = read_status(work_dir), None
    if ddp.is_main and replace_status(work_dir, None, "starting"):
        watched = work_dir   # watch_run shall write the outcome of this start there
    try:
        if problem:
            raise problem
        # While loading, allow at least the time to meet, and let Ctrl-C end the run at once.
        minutes = config.monitoring.watchdog_minutes
        signals = [name for name in config.training.stop_signals if name != "SIGINT"]
        worker_init(signals=signals)   # ignored when close_run has ended the watch
        watch_run(ddp, watched, minutes and max(minutes, launch.init_timeout / 60), signals)
        return script.prepare(config, ddp, work_dir, options)
    except (ValueError, OSError) as e:
        watch_run(ddp, None, minutes=0, signals=())
        if ddp.is_main:
            replace_status(work_dir, BAD_INPUT, str(e),
                           finished=former if former.get("code") == 0 else None)
        # Rank 0 corrects status.json first: the failure of another rank, secondary, waits for it.
        abort(ddp, f"error: {e}", code=BAD_INPUT, secondary=not ddp.is_main)


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
    add("--nproc_per_node", type=int, help="start this many ranks on this node, with torch's "
                                           "launcher (with --nnodes: default 1 per accelerator)")
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


# ---------------------------------------------------------------- torch's launcher
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


# ---------------------------------------------------------------- what is printed
def numbers_of(option, text):
    """Numbers of ranks from a text such as "1,2,4,8", given to an option. Raises: ValueError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"--{option} {text}; expected numbers of ranks, such as 1,2,4,8")
    return [int(number) for number in text.split(",")]


def plan_head(o, ranks, unit):
    """(numbers of ranks from text such as "1,2,4,8", line on the scaling) for --plan."""
    base = f" at a global batch of {o.base_global_batch:,} {unit}" if o.base_global_batch else ""
    return numbers_of("plan", ranks), (
        f"optim.scale {scale_name(o.scale)}: from lr {o.lr:g} and warm-up {o.warmup:,}{base}"
        f"{decay_name(o)}")


def plan_table(config, numbers, per_rank, title, more="", outcome=lambda n, batch: (batch, "")):
    """Table of what each number of ranks would do: global batch, learning rate, warm-up; and a
    warning if the warm-up lasts for all of training.n_iters.

    Args:
        per_rank: batch of a rank in a micro-step.
        title: heading of the global batch's column, which sets its width. more: further headings.
        outcome: function (ranks, global batch) -> (the global batch that there is data for, text
            of further columns). Raises ValueError where training would be refused.
    Returns: (lines, lines on what would be refused)."""
    o, steps, problems, late = config.optim, config.training.n_iters, [], []
    rows = [f"{'ranks':>6} {title} {'learning rate':>14} {'warm-up steps':>14}{more}"]
    for n in numbers:
        batch = n * config.training.accum * per_rank
        row = f"{n:>6} {batch:>{len(title)},}"
        try:
            lr_batch, columns = outcome(n, batch)
        except ValueError as e:
            problems.append(f"refused with {n} rank(s): {e}")
            rows.append(f"{row} {'refused, see below':>14}")
            continue
        lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, lr_batch, o.base_global_batch)
        rows.append(f"{row} {lr:>14.4g} {warmup:>14,}{columns}")
        if steps and warmup >= steps:
            late.append(str(n))
    if late:
        rows.append(f"ATTENTION: with {', '.join(late)} rank(s) the warm-up lasts to the end (step "
                    f"{steps:,})")
    return rows, problems


def choose_precision(config, ddp):
    """(dtype for autocast, text on it and on the memory limit). Raises: ValueError."""
    device = ddp.device
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        raise ValueError(f"{device} computes no float64, in which losses are summed; expected a "
                         "data-centre XPU. Give --device cpu.")
    try:
        dtype, why = choose_dtype(config.memory.mixed_precision, device)
    except RuntimeError as e:
        raise ValueError(f"config: {e}") from None
    words, share = f"{str(dtype).removeprefix('torch.')} ({why})", config.memory.max_memory_per_gpu
    if share is not None:
        set_limit = getattr(getattr(torch, device.type), "set_per_process_memory_fraction", None)
        if device.type == "cpu" or set_limit is None:
            words += f"; max_memory_per_gpu {share} has no effect on {device.type}"
        else:
            set_limit(share, device)
            words += f"; at most {share:.0%} of the device's memory"
    return dtype, words


def compile_blocks(model, setting, ddp):
    """Compile the blocks of a network by torch.compile, where that pays; returns text on it.

    In place, so that no name in a checkpoint changes. Block by block, so that all blocks share the
    compiled code, and DDP sends the gradients of one block while backward computes the next.

    setting: memory.compile. "auto": only on a CUDA device, if all that torch.compile needs is
        installed. On a CPU it did not pay; other devices are untested."""
    if not setting or setting == "auto" and ddp.device.type != "cuda":
        return ""
    if setting == "auto":
        compilers = (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
        # Triton compiles C that includes Python.h; on Debian that is in the system's own folder.
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
        headers = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
        missing = [what for what, found in (
            ("Triton", importlib.util.find_spec("triton")),
            ("C compiler", any(map(shutil.which, compilers))), ("Python.h", headers.exists()),
            ("compute capability 7", torch.cuda.get_device_capability(ddp.device) >= (7, 0)))
            if not found]
        if missing:
            return f"; blocks not compiled: no {', no '.join(missing)} here"
    settings = torch._dynamo.config
    settings.optimize_ddp = False     # splits for DDP: not needed, as blocks are compiled apart
    settings.recompile_limit = 32     # variants: gradient or not, padding or not, one protein
    settings.specialize_float = True  # dropout can only be compiled with a constant rate
    for block in model.blocks:
        block.compile(dynamic=True)   # one compiled code for the dozens of batch shapes
    return "; blocks compiled, in the first steps"


def describe_batch(run, per_rank, ddp):
    """Line on the global batch. per_rank: text on the batch of a rank in a micro-step."""
    return (f"batch: {per_rank} x accum {len(run.sampler.mine)} x {ddp.world_size} rank(s) = "
            f"{run.global_batch:,} per step, {run.steps_per_epoch:,} steps per epoch, "
            f"{run.n_iters:,} steps in all")


def describe_run(run, state, unit, lr_batch, ddp):
    """Lines on how this start trains. lr_batch: the global batch that lr was scaled to."""
    o, accum, lines = run.config.optim, run.micro_batches // ddp.world_size, []
    if accum != run.config.training.accum:
        lines.append(f"  accum is {accum} and not {run.config.training.accum}: it follows the "
                     "number of ranks, so that the global batch stays")
    fewer = f", to the {lr_batch:,} {unit} that there are" if lr_batch < run.global_batch else ""
    if state is not None:
        how = "kept from the checkpoint"
    elif o.scale == "none":
        how = "as given (scale none)"
    elif lr_batch == run.global_batch == o.base_global_batch:
        how = "as given (the batch is the base)"
    else:
        how = (f"scaled from {o.lr:g} and {o.warmup:,} at {o.base_global_batch:,} {unit} "
               f"({scale_name(o.scale)}){fewer}")
    name = "Muon for the blocks' matrices, AdamW for the rest, " if o.name == "muon" else ""
    lines.append(f"optim: {name}lr {run.lr:g}, warm-up {run.warmup:,} steps, {how}{decay_name(o)}")
    if state is None and run.warmup >= run.n_iters:
        lines.append(f"ATTENTION: the warm-up ({run.warmup:,} steps) lasts to the end "
                     f"({run.n_iters:,} steps) or longer: lower optim.warmup or train longer")
    former = run.continued_from
    lines.append(f"results: {run.work_dir}, " + (
        "a new run" if not former else f"finished ({former})" if is_finished(run) else
        f"continuing from step {run.progress['step']:,} of {former}"))
    elsewhere = machine_differences(state, ddp) if state is not None else ""
    if elsewhere:
        lines.append(f"  saved elsewhere ({elsewhere}): the run continues, but its losses may "
                     "differ in the last digits")
    return lines


def decay_name(o):
    """Text on the decay of the learning rate, to append to a line; "" for none."""
    if o.decay == "none":
        return ""
    length = o.decay_steps or 0
    over = (f"the last {length:.0%} of the steps" if 0 < length < 1 else
            f"the last {length:,.0f} steps" if length else "all steps after the warm-up")
    return f"; {o.decay} decay over {over}"


def scale_name(rule):
    """The rule of scale_for_batch in words."""
    return rule if isinstance(rule, str) else f"linear up to {rule['cap']:g} times"


def print_lines(ddp, lines):
    """Print on rank 0, in at most 80 columns where words allow it."""
    wrap = textwrap.TextWrapper(80, subsequent_indent="    ", break_long_words=False,
                                break_on_hyphens=False)
    print0(ddp, "\n".join(map(wrap.fill, lines)))
