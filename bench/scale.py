"""How the speed of a run scales with the number of ranks, and how fast the network is.

    python -m bench scale --ranks 1,2,4                     # SEDD; starts ranks on this host
    python -m bench scale dpo --ranks 1,2                   # DPO
    srun -n 96 python -m bench scale --ranks 12,96 --json scale.json    # added to the file
    python -m bench scale --json scale.json                 # the table of the file

Trains a config with the code of its script, on its data or on demo data, in a temporary folder; on
a CPU with one thread per rank. Without a launcher it runs each number of --ranks on this host.
Under a launcher it measures that launcher's ranks, and --ranks only says which is the largest.

weak: the batch per rank is that of the config. strong: the global batch is that of the largest of
--ranks, and fewer ranks take more micro-batches each. "alone": the same processes at the same time
on the same data, but each trains without DDP and without collectives. So it shows the step without
communication. "of alone" is the median over steps of alone's time / the time with communication.
Settings alternate, some steps each; figures are medians. "speed-up" is that over the fewest ranks,
"efficiency" its fraction of the ideal one.

A second table has the time and the bus bandwidth of an all-reduce, from 4 KiB to 64 MiB: of N ranks
each sends 2 (N - 1) / N x bytes.
"""
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.benchmark import timer

import train_dpo_ddp
import train_sedd_ddp
from bench.speed import take_step
from ddp_setup import (
    BAD_INPUT,
    Ddp,
    SetupError,
    all_mean,
    all_sum,
    barrier,
    broadcast,
    detect_launcher,
    wrap_ddp,
)
from sedd.data import names_no_data
from training.command_line import joined_ranks
from training.config import load_config
from training.files import read_text, write_text_atomic
from training.launch import run_ranks
from training.loop import open_batches
from training.parser import Parser
from training.plan import numbers_of
from training.problems import in_columns

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SCRIPTS = {"sedd": (train_sedd_ddp, "sedd_cpu.yaml"), "dpo": (train_dpo_ddp, "dpo_demo.yaml")}
DEMO_PROTEINS = 20_000       # for a config that names no data
ALL_REDUCES = 9              # timed repeats of each size
ALL_REDUCE_BYTES = [4096 * 4**k for k in range(8)]   # the last ones exceed a bucket of DDP
COLLECTIVE_SECONDS = 900.0   # time limit of a collective: all ranks end if one does not come
# Only launches that are equal in these are compared in a table.
ALIKE = ("what", "config", "overrides", "device", "dtype", "parameters", "largest")


class Setting(NamedTuple):
    """A way to train that is timed."""
    scaling: str                 # weak | strong
    share: int                   # micro-batches per rank in a step
    alone: bool = False          # without communication


# ---------------------------------------------------------------- one launch
def make_settings(args, accum, ddp):
    """The settings of this number of ranks. accum: of the config."""
    ranks = ddp.world_size
    largest = max(args.ranks, default=0)
    settings = [Setting("weak", accum)]
    if ranks in args.ranks and ranks < largest:     # for the largest, weak and strong are the same
        settings.append(Setting("strong", accum * largest // ranks))
    if ranks > 1:
        settings += [setting._replace(alone=True) for setting in settings]
    return settings


def measure(args, config, ddp):
    """Measurements of this number of ranks, as a dict for JSON. All ranks must call it."""
    if ddp.device.type == "cpu":
        torch.set_num_threads(1)
    settings = make_settings(args, config.training.accum, ddp)
    script, _ = SCRIPTS[args.what]
    config.training.accum = max(setting.share for setting in settings)
    config.training.stop_signals = ()
    with shared_folder(ddp) as folder, contextlib.redirect_stdout(io.StringIO()):
        run = script.prepare(config, ddp, folder / "run")
        return measure_run(run, settings, args, ddp)


@contextlib.contextmanager
def shared_folder(ddp):
    """Path, on every rank, of a temporary folder here, which all hosts must share."""
    with contextlib.ExitStack() as stack:
        name = None
        if ddp.is_main:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="."))
        yield Path(broadcast(name, ddp))
        barrier(ddp)     # wait until all ranks have left


def measure_run(run, settings, args, ddp):
    """As measure, for a run from `prepare`."""
    dataset, loss_of = training_of(run, args.what, ddp)
    mine = run.sampler.mine
    order = list(enumerate(settings))
    times = np.zeros((ddp.world_size, len(settings), args.repeats, args.steps))
    for repeat in range(args.repeats):
        order.append(order.pop(0))
        for k, setting in order:
            run.sampler.mine = mine[:setting.share]
            times[ddp.rank, k, repeat] = time_block(run, setting, repeat * args.steps, args.steps,
                                                    dataset, loss_of, ddp)
    times = all_sum(torch.from_numpy(times), ddp).numpy()
    # Mean, in the unit of the global batch. SEDD's may differ from what the config asks for.
    if args.what == "sedd":
        per_micro_batch = float(run.plan.mean)
        unit = run.plan.counted_in
    else:
        per_micro_batch = run.global_batch / run.micro_batches
        unit = train_dpo_ddp.unit_of(run.config)
    rows = [make_row(setting, settings, times, per_micro_batch) for setting in settings]
    if len(args.ranks) > 1 and ddp.world_size == max(args.ranks):
        rows += [{**row, "scaling": "strong"} for row in rows]
    return dict(
        what=args.what, config=Path(args.config).name, overrides=args.overrides,
        device=ddp.device.type, backend=ddp.backend, dtype=str(run.dtype).removeprefix("torch."),
        ranks=ddp.world_size, unit=unit, largest=max(args.ranks, default=ddp.world_size),
        parameters=sum(p.numel() for p in run.bare.parameters()),
        all_reduces=time_all_reduces(ddp), rows=rows)


def training_of(run, what, ddp):
    """(data set of micro-batches, loss function), as the script's `train` makes them."""
    if what == "dpo":
        train_dpo_ddp.keep_base_scores(run, ddp)
        return run.train_set, lambda batch: train_dpo_ddp.micro_batch_loss(run.model, batch, run,
                                                                           ddp)
    config = run.config
    dataset = train_sedd_ddp.MicroBatchDataset(run.graph, run.noise, config.data.max_length,
                                               run.micro_batches, config.training.seed,
                                               config.loss.reduction)
    return dataset, lambda batch: train_sedd_ddp.micro_batch_loss(run.model, batch, run.graph, ddp,
                                                                  run.dtype)


def time_block(run, setting, first, n, dataset, loss_of, ddp):
    """Take n steps from step `first` on, after one that does not count. Returns the seconds of each
    of this rank's steps, a list."""
    place = replace(ddp, world_size=1) if setting.alone else ddp
    # Wrapping copies rank 0's weights to all ranks, which "alone" steps have made different.
    run.model = wrap_ddp(run.bare, place, **vars(run.config.ddp))
    run.sampler.first = first
    run.sampler.last = first + n + 1
    run.progress["step"] = first
    batches = open_batches(run, dataset, loss_of, place)
    barrier(ddp)
    times = []
    for _ in range(n + 1):
        begin = timer()     # after the device has finished its work
        take_step(run, batches, loss_of, place)
        times.append(timer() - begin)
    return times[1:]


def make_row(setting, settings, times, per_micro_batch):
    """The results of a setting, as a row of the JSON file.

    times: (rank, setting, repeat, step) seconds. per_micro_batch: size, in the unit of the global
        batch."""
    steps = times[:, settings.index(setting)].mean(0)
    row = dict(scaling=setting.scaling, alone=setting.alone,
               batch=per_micro_batch * setting.share * len(times),
               seconds=float(np.median(steps)), of_alone=1.0)
    alone = setting._replace(alone=True)
    if alone in settings:
        row["of_alone"] = float(np.median(times[:, settings.index(alone)].mean(0) / steps))
    return row


def time_all_reduces(ddp):
    """[[bytes, seconds]] of float32 all-reduces: the median of each size, as a mean over ranks."""
    if ddp.world_size == 1:
        return []
    medians = []
    for size in ALL_REDUCE_BYTES:
        tensor = torch.zeros(size // 4, device=ddp.device)
        times = []
        for _ in range(2 + ALL_REDUCES):
            begin = timer()     # after the device has finished its work
            dist.all_reduce(tensor)
            times.append(timer() - begin)
        medians.append(statistics.median(times[2:]))    # the first two warm up
    return [[size, seconds] for size, seconds in zip(ALL_REDUCE_BYTES, all_mean(medians, ddp))]


# ---------------------------------------------------------------- what was measured
def print_report(launches):
    """Print the tables of the launches like the last one; of a number of ranks the last counts."""
    latest = {launch["ranks"]: launch for launch in launches if is_alike(launch, launches[-1])}
    latest = dict(sorted(latest.items()))
    last = launches[-1]
    threads = ", one thread a rank" if last["device"] == "cpu" else ""
    print(" ".join([f"{last['what']},", last["config"], *last["overrides"]]))
    print(f"{last['parameters'] / 1e6:.2f} million parameters, {last['dtype']}, {last['device']}"
          f"{threads}; medians\n")
    print(f"| scaling | ranks | batch ({last['unit']}) | s a step | {last['unit']}/s | speed-up "
          f"| efficiency | of alone |\n|{'---|' * 8}")
    for row in table_of(latest):
        name = f"{row['scaling']}, alone" if row["alone"] else row["scaling"]
        print(f"| {name} | {row['ranks']} | {row['batch']:,.0f} | {row['seconds']:.3f} "
              f"| {row['batch'] / row['seconds']:,.0f} | {row['speed_up']:.2f} "
              f"| {row['efficiency']:.0%} | {row['of_alone']:.2f} |")
    most = latest[max(latest)]
    if most["all_reduces"]:
        print_all_reduces(most)


def is_alike(launch, other):
    return all(launch.get(name) == other.get(name) for name in ALIKE)


def table_of(launches):
    """Rows of {ranks: launch}, with the speed-up over the fewest ranks, and its fraction of the
    ideal one."""
    rows = []
    for ranks, launch in launches.items():
        rows += [{"ranks": ranks, **row} for row in launch["rows"]]
    rows.sort(key=lambda row: (row["scaling"] == "strong", row["alone"], row["ranks"]))
    for row in rows:
        base = next(other for other in rows
                    if other["scaling"] == row["scaling"] and not other["alone"])
        row["speed_up"] = row["batch"] / row["seconds"] / (base["batch"] / base["seconds"])
        row["efficiency"] = row["speed_up"] * base["ranks"] / row["ranks"]
    return rows


def print_all_reduces(launch):
    """Print the time and the bus bandwidth of an all-reduce, for each size."""
    ranks = launch["ranks"]
    print(f"\nall-reduces of {ranks} ranks, {launch['backend']}, float32\n\n"
          "| KiB | us | bus GB/s |\n|---|---|---|")
    for size, seconds in launch["all_reduces"]:
        bus = 2 * (ranks - 1) / ranks * size / seconds
        print(f"| {size / 1024:,.0f} | {seconds * 1e6:,.0f} | {bus / 1e9:.4f} |")


# ---------------------------------------------------------------- command line
def read_launches(path):
    """The launches in a file that main wrote; [] if there is no file."""
    if path is None or not os.path.exists(path):
        return []
    try:
        launches = json.loads(read_text(path))["launches"]
        for launch in launches:
            table_of({launch["ranks"]: launch})
        return launches
    except (ValueError, KeyError, TypeError, StopIteration):
        raise ValueError(f"--json {path} is no file that this version of python -m bench scale "
                         "wrote; expected one or a new name") from None


def read_arguments(argv):
    """(options, config). Raises: ValueError."""
    parser = Parser(prog="python -m bench scale", description=__doc__,
                    allow_abbrev=False, epilog="The top of bench/scale.py says what is measured.")
    add = parser.add_argument
    add("words", nargs="*", metavar="[sedd|dpo] section.key=value", help="script and overrides")
    add("--config", help="YAML file; default: configs/sedd_cpu.yaml or dpo_demo.yaml")
    add("--ranks", help="numbers of ranks, such as 1,2,4")
    add("--steps", type=int, default=4, help="steps of a setting before the next has its turn")
    add("--repeats", type=int, default=4, help="how often each setting has its turn")
    add("--json", help="file to add the results to")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    add("--measure", action="store_true", help="internal: measure without a report")
    args = parser.parse_intermixed_args(argv)
    args.says_what = bool(args.words or args.config)
    args.what = "sedd"
    if args.words and "=" not in args.words[0]:
        args.what = args.words.pop(0)
    args.overrides = args.words
    args.ranks = sorted({*numbers_of("ranks", args.ranks)}) if args.ranks else []
    problems = find_problems(args)
    if problems:
        raise ValueError(problems[0])
    script, name = SCRIPTS[args.what]
    args.config = args.config or str(CONFIGS / name)
    config = load_config(script.Config, args.config, args.overrides)
    if args.what == "sedd" and names_no_data(config.data):
        config.data.demo_proteins = DEMO_PROTEINS
    script.check_config(config)
    args.launches = read_launches(args.json)
    return args, config


def find_problems(args):
    """What is wrong with the options, in the order in which it is said."""
    problems = []
    for name in ("steps", "repeats"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} is {getattr(args, name)}; expected at least 1")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        problems.append(f"--json {args.json}: found no such folder; expected one that exists")
    largest = max(args.ranks, default=1)
    for n in args.ranks:
        if largest % n:
            problems.append(f"--ranks: {n} does not divide {largest}; expected numbers that do, so "
                            "that the global batch can stay the same")
    if args.what not in SCRIPTS:
        problems.append(f"found {args.what!r}; expected sedd, dpo or section.key=value")
    return problems


def measure_here(args, config):
    """Measure the ranks of the launcher that has started this process; rank 0 adds the launch."""
    with joined_ranks(args.device, args.backend, timeout=COLLECTIVE_SECONDS) as ddp:
        launches = [measure(args, config, ddp)]
        if ddp.is_main and args.json:
            # Read again: another job may have added to the file in the meantime.
            launches = [*read_launches(args.json), *launches]
            write_text_atomic(args.json, json.dumps({"launches": launches}, indent=1))
        if ddp.is_main and not args.measure:
            print_report(launches)


def start_ranks(args, argv):
    """Run this command on this host with each number of ranks; exit if one of them fails. Returns
    the launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = args.json or os.path.join(folder, "scale.json")
        command = ["-u", "-m", "bench", "scale", *argv, "--measure", "--json", path]
        for ranks in args.ranks:
            code = run_ranks(command, ranks)
            if code:
                sys.exit(code)      # the failed rank has printed why
        return read_launches(path)


def main(argv):
    try:
        place = detect_launcher(os.environ)
    except SetupError:   # such as under PALS, where only mpi4py knows the number of ranks
        place = Ddp(rank=int(os.environ.get("PALS_RANKID", 0)), launcher="told by mpi4py")
    try:
        args, config = read_arguments(argv)
        if place.launcher != "none":
            measure_here(args, config)
        elif args.ranks:
            print_report(start_ranks(args, argv))
        elif args.says_what:
            raise ValueError("found what to measure without --ranks; expected numbers of ranks, or "
                             "--json FILE alone, to report what it holds")
        elif args.launches:
            print_report(args.launches)
        else:
            in_file = f"; found no launch in {args.json}" if args.json else ""
            raise ValueError("expected --ranks, such as 1,2,4, or --json with results" + in_file)
    except (ValueError, OSError) as error:
        if place.rank == 0:
            print(in_columns(f"python -m bench scale: error: {error}"), file=sys.stderr)
        sys.exit(BAD_INPUT)
