"""How a run scales with the number of ranks, measured and predicted.

    python -m bench scale --ranks 1,2,4                     # SEDD; starts ranks on this host
    python -m bench scale dpo --ranks 1,2 --variants        # buckets, static graph, compression
    python -m bench scale --ranks 1,2,4 --predict 12,96,384,1536 --plot scale.png
    srun -n 96 python -m bench scale --ranks 12,96 --json scale.json    # added to the file
    python -m bench scale --json scale.json --predict 768 --latency_us 5 --bandwidth_gbs 20

Trains a config with the code of its script, on its data or on demo data, in a temporary folder; on
a CPU with one thread per rank. Without a launcher it runs each number of --ranks on this host.
Under a launcher it measures that launcher's ranks. Without --ranks it only reports on --json.

weak: the batch per rank is that of the config. strong: the global batch is that of the largest of
--ranks, and fewer ranks take more micro-batches each. "alone": the same processes at the same time
on the same data, but each trains without DDP and without collectives. So it shows the step without
communication ("exchange"). "of alone" is the median over steps of alone's time / the time with
exchange. It can exceed 1 with Muon, whose work the ranks of a host share. Settings alternate, some
steps each. Repeats of a number of ranks (with the same --json) are joined by medians. A second
table has the time and the bus bandwidth of an all-reduce, from 4 KiB to 64 MiB. The formulas are in
bench/scale_report.py.
"""
import contextlib
import importlib.util
import io
import json
import math
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.benchmark import timer

from bench.common import CONFIGS, SCRIPTS, shared_folder, training_of, use_demo_proteins
from bench.scale_report import report
from ddp_setup import (BAD_INPUT, Ddp, SetupError, all_mean, all_sum, barrier, detect_launcher,
                       wrap_ddp)
from training.config import load_config
from training.parser import Parser
from training.command_line import joined_ranks, prepare_and_train
from training.files import read_text, write_text_atomic
from training.launch import run_ranks
from training.plan import numbers_of
from training.meter import PARTS, StepMeter, peak_memory, seconds_by_part
from training.loop import open_batches, global_gradient, take_step

ALL_REDUCES = 9              # timed repeats of each size
ALL_REDUCE_BYTES = [4096 * 4**k for k in range(8)]   # the last ones exceed a bucket of DDP
NOISE_MICRO_BATCHES = 8      # micro-batches in the larger batch of measure_noise
COLLECTIVE_SECONDS = 900.0   # time limit of a collective: all ranks end if one does not come


class Setting(NamedTuple):
    """A way to train that is timed. share: micro-batches per rank in a step."""
    scaling: str                 # weak | strong
    share: int
    variant: str = ""            # what differs from the config; "alone": without exchange
    options: dict = {}           # for DistributedDataParallel
    compressed: bool = False     # all-reduce gradients in bfloat16


# ---------------------------------------------------------------- one launch
def make_settings(args, accum, ddp):
    """The settings of this number of ranks. accum: of the config."""
    ranks = ddp.world_size
    largest = max(args.ranks, default=0)
    settings = [Setting("weak", accum)]
    if ranks in args.ranks and ranks < largest:     # for the largest, weak and strong are the same
        settings.append(Setting("strong", accum * largest // ranks))
    if ranks > 1:
        settings += [setting._replace(variant="alone") for setting in settings]
    if ranks > 1 and args.variants:
        settings += [Setting("weak", accum, f"bucket {size} MB", {"bucket_cap_mb": size})
                     for size in (1, 4, 100)]
        settings += [Setting("weak", accum, "static graph", {"static_graph": True}),
                     Setting("weak", accum, "bfloat16", compressed=True)]
    return settings


def measure(args, config, ddp):
    """Measurements of this number of ranks, as a dict for JSON. All ranks must call it."""
    if ddp.device.type == "cpu":
        torch.set_num_threads(1)
    settings = make_settings(args, config.training.accum, ddp)
    script, _ = SCRIPTS[args.what]
    config.training.accum = max(setting.share for setting in settings)
    config.training.stop_signals = ()
    config.monitoring.watchdog_minutes = 0
    with shared_folder(".", ddp) as folder, contextlib.redirect_stdout(io.StringIO()):
        return prepare_and_train(ddp, lambda: script.prepare(config, ddp, folder / "run"),
                                 lambda run, ddp: measure_run(run, settings, args, ddp))


def measure_run(run, settings, args, ddp):
    """As measure, for a run from `prepare`. settings: the first one is used for --train."""
    dataset, loss_of = training_of(run, args.what, ddp)
    mine = run.sampler.mine
    order = list(enumerate(settings))
    if args.train:
        time_block(run, settings[0], 0, args.train, dataset, loss_of, ddp)
    noise = measure_noise(run, dataset, loss_of, args, ddp) if args.predict else None
    times = np.zeros((ddp.world_size, len(settings), args.repeats, args.steps, len(PARTS)))
    for repeat in range(args.repeats):
        order.append(order.pop(0))
        for k, setting in order:
            run.sampler.mine = mine[:setting.share]
            times[ddp.rank, k, repeat] = time_block(run, setting, args.train + repeat * args.steps,
                                                    args.steps, dataset, loss_of, ddp)
    parts = all_sum(torch.from_numpy(times), ddp).numpy()
    memory = [peak_memory(ddp.device) * (rank == ddp.rank) for rank in range(ddp.world_size)]
    rows = [make_row(setting, settings, parts, size_of_micro_batch(run, args.what))
            for setting in settings]
    if len(args.ranks) > 1 and ddp.world_size == max(args.ranks):
        rows += [{**row, "scaling": "strong"} for row in rows if row["variant"] in ("", "alone")]
    parameters = list(run.bare.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return dict(
        what=args.what, config=Path(args.config).name, overrides=args.overrides,
        device=ddp.device.type, backend=ddp.backend, dtype=str(run.dtype).removeprefix("torch."),
        optimizer=run.config.optim.name, ranks=ddp.world_size,
        unit=run.plan.counted_in if args.what == "sedd" else "pairs",
        largest=max(args.ranks, default=ddp.world_size), train=args.train,
        parameters=sum(p.numel() for p in parameters), gradient_bytes=size,
        messages=count_messages(size, None),
        memory_gb=max(all_sum(memory, ddp)), noise=noise, all_reduces=time_all_reduces(ddp),
        rows=rows)


def size_of_micro_batch(run, what):
    """Mean, in the unit of the global batch. SEDD's may differ from what the config asks for."""
    return float(run.plan.mean) if what == "sedd" else run.global_batch / run.micro_batches


def count_messages(size, cap):
    """Number of all-reduces in a step: one for counts, and one per DDP bucket of `cap` MiB (None:
    torch's default, the first of 1 MiB and others of 25). size: bytes of the gradients."""
    mebibytes = size / 2**20
    if cap is None:
        buckets = 1 + math.ceil((mebibytes - 1) / 25)
    else:
        buckets = math.ceil(mebibytes / cap)
    return 1 + buckets


def time_block(run, setting, first, n, dataset, loss_of, ddp):
    """Take n steps from step `first` on, after one that does not count.

    Returns: (n, 4) seconds of the PARTS of each of this rank's steps."""
    place = replace(ddp, world_size=1) if setting.variant == "alone" else ddp
    # Wrapping copies rank 0's weights to all ranks, which "alone" steps have made different.
    run.model = wrap_ddp(run.bare, place, **{**vars(run.config.ddp), **setting.options})
    run.optimizer.ddp = place   # Muon divides its work among the ranks in it
    if setting.compressed:
        run.model.register_comm_hook(None, compress)
    run.sampler.first = first
    run.sampler.last = first + n + 1
    run.progress["step"] = first
    run.meter = StepMeter(place, timing_every=1, seen=run.meter.seen)
    run.pending = None
    batches = open_batches(run, dataset, loss_of, place)
    barrier(ddp)
    for _ in range(n + 1):
        take_step(run, batches, loss_of, place)
    times = []
    for laps in run.meter.timed[1:]:
        seconds = seconds_by_part(laps)
        times.append([seconds[part] for part in PARTS])
    return times


def compress(group, bucket):
    """bf16_compress_hook under another name: by its own, DDP refuses it on a CPU."""
    return bf16_compress_hook(group, bucket)


def make_row(setting, settings, parts, per_micro_batch):
    """The results of a setting, as a row of the JSON file.

    parts: (rank, setting, repeat, step, part) seconds. per_micro_batch: size, in the unit of the
        global batch."""
    ranks = len(parts)
    k = settings.index(setting)
    by_rank = parts[:, k].sum(-1)
    steps = by_rank.mean(0)
    seconds = float(np.median(steps))
    shares = parts[:, k].mean((0, 1, 2)) / steps.mean()
    # Standard deviation over ranks, from the median absolute deviation: a few steps that a busy
    # machine slows do not change it. The factor 1.4826 is that of normal numbers.
    spread = 1.4826 * np.median(np.abs(by_rank - (steps if ranks > 1 else seconds)))
    row = dict(scaling=setting.scaling, variant=setting.variant,
               batch=per_micro_batch * setting.share * ranks, seconds=seconds,
               parts={part: float(share) * seconds for part, share in zip(PARTS, shares)},
               sigma=float(spread) * math.sqrt(ranks / max(ranks - 1, 1)), of_alone=1.0)
    alone = Setting(setting.scaling, setting.share, "alone")
    if alone in settings:
        limit = settings.index(alone)
        row["of_alone"] = float(np.median(parts[:, limit].sum(-1).mean(0) / steps))
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


def measure_noise(run, dataset, loss_of, args, ddp):
    """Arguments of bench.scale_report.noise_scale at the current weights: squared gradient norms of
    micro-batches, and of NOISE_MICRO_BATCHES together; means over args.steps groups per rank."""
    alone = replace(ddp, world_size=1)
    groups = args.steps
    first = args.train
    if args.train:      # skip data trained on; time_block takes one step more
        first += 1
    items = iter([run.sampler.item_of(first + step, micro) for micro in run.sampler.mine
                  for step in range(groups * NOISE_MICRO_BATCHES)])
    small_batches = []      # (squared norm, 1 / count of the loss) of each
    big_batches = []
    run.bare.train()
    for _ in range(groups):
        together = None     # the sum of the gradients times their counts
        count = 0.0
        for _ in range(NOISE_MICRO_BATCHES):
            totals, norm = global_gradient(run.bare, [dataset[next(items)]], loss_of, alone)
            n = float(totals.count)
            count += n
            small_batches.append((float(norm)**2, 1 / n))
            weighted = [n * p.grad for p in run.bare.parameters() if p.grad is not None]
            if together:
                weighted = [total + more for total, more in zip(together, weighted)]
            together = weighted
            run.optimizer.zero_grad(set_to_none=True)
        norm = float(torch.nn.utils.get_total_norm(together)) / count
        big_batches.append((norm**2, 1 / count))
    small, inverse_small = all_mean(np.mean(small_batches, 0).tolist(), ddp)
    big, inverse_big = all_mean(np.mean(big_batches, 0).tolist(), ddp)
    size = size_of_micro_batch(run, args.what)
    return dict(small=small, big=big, n_small=size, n_big=size * inverse_small / inverse_big)


# ---------------------------------------------------------------- command line
def read_launches(path):
    """The launches in a file that main wrote; [] if there is no file."""
    if path is None or not os.path.exists(path):
        return []
    try:
        return json.loads(read_text(path))["launches"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--json {path} is no file that python -m bench scale wrote; expected one "
                         "or a new name") from None


def make_parser():
    parser = Parser(prog="python -m bench scale", description=__doc__.split("\n")[0],
                    allow_abbrev=False, epilog="The top of bench/scale.py says what is measured.")
    add = parser.add_argument
    add("words", nargs="*", metavar="[sedd|dpo] section.key=value", help="script and overrides")
    add("--config", help="YAML file; default: configs/sedd_cpu.yaml or dpo_demo.yaml")
    add("--ranks", help="numbers of ranks, such as 1,2,4")
    add("--steps", type=int, default=4, help="steps of a setting before the next has its turn")
    add("--repeats", type=int, default=4, help="how often each setting has its turn")
    add("--train", type=int, default=5, help="steps to train before measuring, as untrained "
                                             "weights have a small critical batch")
    add("--variants", action="store_true", help="also bucket sizes, static graph, compression")
    add("--predict", help="numbers of ranks to predict; also measures the critical batch")
    add("--latency_us", type=float, help="latency per hop of the predicted machine: time of a "
                                         "small all-reduce / (2 log2 of its ranks)")
    add("--bandwidth_gbs", type=float, help="its bus bandwidth, as in the table of all-reduces")
    add("--json", help="file to add the results to")
    add("--plot", help="PNG file to draw")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    add("--measure", action="store_true", help="internal: measure without a report")
    return parser


def read_arguments(argv):
    """(options, config). Raises: ValueError."""
    args = make_parser().parse_intermixed_args(argv)
    args.says_what = bool(args.words or args.config)
    args.what = "sedd"
    if args.words and "=" not in args.words[0]:
        args.what = args.words.pop(0)
    args.overrides = args.words
    args.ranks = sorted_numbers("ranks", args.ranks)
    args.predict = sorted_numbers("predict", args.predict)
    problems = find_problems(args)
    if problems:
        raise ValueError(problems[0])
    script, name = SCRIPTS[args.what]
    args.config = args.config or str(CONFIGS / name)
    config = load_config(script.Config, args.config, args.overrides)
    if args.what == "sedd":
        use_demo_proteins(config)
    script.check_config(config)
    args.launches = read_launches(args.json)
    return args, config


def sorted_numbers(option, text):
    """The different numbers of ranks in the text of an option, which may not be given."""
    if not text:
        return []
    return sorted({*numbers_of(option, text)})


def find_problems(args):
    """What is wrong with the options, in the order in which it is said."""
    problems = []
    for name, value in vars(args).items():
        if name != "train" and type(value) in (int, float) and not value > 0:
            problems.append(f"--{name} is {value}; expected more than 0")
    if args.train < 0:
        problems.append(f"--train is {args.train}; expected 0 or more")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            problems.append(f"--{name} {path}: found no such folder; expected one that exists")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        problems.append("--plot needs matplotlib: pip install matplotlib")
    problems += find_problems_of_ranks(args)
    return problems


def find_problems_of_ranks(args):
    """As find_problems, about the numbers of ranks and what is predicted for them."""
    problems = []
    largest = max(args.ranks, default=1)
    for n in args.ranks:
        if largest % n:
            problems.append(f"--ranks: {n} does not divide {largest}; expected numbers that do, so "
                            "that the global batch can stay the same")
    if args.what not in SCRIPTS:
        problems.append(f"found {args.what!r}; expected sedd, dpo or section.key=value")
    if (args.latency_us is None) != (args.bandwidth_gbs is None):
        problems.append("found one of --latency_us and --bandwidth_gbs; expected both or none")
    if args.latency_us and not args.predict:
        problems.append("found --latency_us without --predict; expected --predict with numbers of "
                        "ranks, such as 96,384")
    return problems


def measure_here(args, config):
    """Measure the ranks of the launcher that has started this process; rank 0 adds the launch."""
    with joined_ranks(args.device, args.backend, timeout=COLLECTIVE_SECONDS) as ddp:
        launch = measure(args, config, ddp)
        args.launches = [launch]
        if ddp.is_main and args.json:
            # Read again: another job may have added to the file in the meantime.
            args.launches = [*read_launches(args.json), launch]
            write_text_atomic(args.json, json.dumps({"launches": args.launches}, indent=1))
        if ddp.is_main and not args.measure:
            write_report(args)
        barrier(ddp)    # after the end of the ranks their guards give little time


def write_report(args):
    """Print the report of args.launches, and add it to the file of --json."""
    found = report(args.launches, args)
    if args.json:
        write_text_atomic(args.json, json.dumps(found, indent=1))


def start_ranks(args, argv):
    """Run this command on this host with each number of ranks; exit if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = args.json or os.path.join(folder, "scale.json")
        command = ["-u", "-m", "bench", "scale", *argv, "--measure", "--json", path]
        for ranks in args.ranks:
            code = run_ranks(command, ranks)
            if code:
                sys.exit(code)      # the failed rank has printed why
        args.launches = read_launches(path)


def main(argv):
    try:
        place = detect_launcher(os.environ)
    except SetupError:   # such as under PALS, where only mpi4py knows the number of ranks
        place = Ddp(rank=int(os.environ.get("PALS_RANKID", 0)), launcher="told by mpi4py")
    try:
        args, config = read_arguments(argv)
        if place.launcher != "plain process":
            measure_here(args, config)
        elif args.ranks:
            start_ranks(args, argv)
        elif args.says_what:
            raise ValueError("found what to measure without --ranks; expected numbers of ranks, or "
                             "--json FILE alone, to report what it holds")
        elif not args.launches:
            found = f"; found no launch in {args.json}" if args.json else ""
            raise ValueError("expected --ranks, such as 1,2,4, or --json with results" + found)
        if place.launcher == "plain process":
            write_report(args)
    except (ValueError, OSError) as error:
        if place.rank == 0:
            print(f"python -m bench scale: error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
