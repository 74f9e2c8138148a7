"""Training speeds on one GPU ("card"), in one table.

    python -m bench card --json card.json                 # SEDD of 6, 39, 92 million, and DPO
    python -m bench card --all out --fasta my.fasta --pairs my.json     # and tests, runs, samples
    python -m bench card --device cpu --models 6m,dpo --steps 2 training.batch_size=4

Trains configs/sedd_uniref50.yaml (92m), sedd_uniref50_38m.yaml (38m), the first with the network of
`bench sedd` (6m), and dpo_demo.yaml with ProteinMPNN of published size, with the code of the
training scripts, in a temporary folder. Proteins come from a prepared folder; without --data from a
temporary one, of random proteins with the lengths of UniRef50. SEDD runs in bfloat16 if the device
supports it, DPO in float32. Further arguments override keys of the configs.

Rows of a model: "plain" is the step of bench/sedd.py on as many proteins, padded to
data.max_length; "ours" the step of train_sedd_ddp.py; "compiled" the same with memory.compile=true
(only on CUDA, or with --compile). Columns:

    residues/s  trained on, without padding; for DPO pairs/s
    TFLOP/s     per position, padding included, by flops_per_position of sedd/model.py. Counts
                forward and backward, but no recomputation
    of matmul   TFLOP/s over the rate of one matrix product, which is measured and shown first. On a
                CPU an upper bound: there the last products skip known residues
    waits       fraction of the time in which the step waits for its proteins
    peak GB     most memory of tensors; "plain" includes the weights and EMA of "ours" beside its
                own. On a CPU most memory of the process since its start

Times are medians over --repeats of --steps consecutive steps; on a CPU, CPU seconds.
"""
import contextlib
import copy
import io
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.card_all import check_world, run_all
from bench.common import CONFIGS, SCRIPTS, now, say, training_of, write_prepared
from bench.sedd import PlainSteps
from ddp_setup import BAD_INPUT
from sedd.model import flops_per_position
from training.config import load_config
from training.parser import Parser
from training.command_line import prepare_and_train
from training.files import write_text_atomic
from training.command_line import joined_ranks
from training.precision import choose_dtype, compile_blocks
from training.meter import peak_memory
from training.peak import matmul_rows, measure_matmul
from training.loop import open_batches, take_step

FAILED = 3   # exit code: a part of --all failed
MODELS = {   # name: (script, config, overrides)
    "6m": ("sedd", "sedd_uniref50.yaml", ["model.hidden_size=256", "model.n_blocks=6",
                                          "model.n_heads=8"]),
    "38m": ("sedd", "sedd_uniref50_38m.yaml", []),
    "92m": ("sedd", "sedd_uniref50.yaml", []),
    "dpo": ("dpo", "dpo_demo.yaml", ["model.random.hidden_size=128", "model.random.n_encoder=3",
                                     "model.random.n_decoder=3", "model.random.num_edges=48",
                                     "data.val_fraction=0"])}


def time_steps(take, args, ddp):
    """Take --warmup steps, and --repeats times --steps.

    take: function that takes a step, given its number.
    Returns: (seconds of each repeat, peak memory in GB)."""
    if ddp.device.type != "cpu":
        getattr(torch, ddp.device.type).reset_peak_memory_stats(ddp.device)
    for step in range(args.warmup):
        take(step)
    times = []
    for repeat in range(args.repeats):
        start = now(ddp)
        for step in range(args.steps):
            take(args.warmup + repeat * args.steps + step)
        times.append(now(ddp) - start)
    return times, peak_memory(ddp.device)


def time_ours(run, what, args, ddp):
    """(seconds of each repeat, columns of a row) of our step."""
    dataset, loss_of = training_of(run, what, ddp)
    run.progress["step"] = 0
    run.sampler.first = 0
    run.sampler.last = args.warmup + args.steps * args.repeats
    batches = open_batches(run, dataset, loss_of, ddp)

    def take(step):
        if step == args.warmup:
            run.meter.restart()
        take_step(run, batches, loss_of, ddp)

    times, memory = time_steps(take, args, ddp)
    return times, dict(waits=run.meter.report()["data_wait"], peak_gb=memory)


def time_plain(run, args, ddp):
    """(seconds of each repeat, residues and FLOP of each, columns of a row) of SEDD's plain step,
    with as many proteins as ours has on average."""
    plan = run.plan
    length = plan.max_length
    n = plan.mean if plan.counted_in == "proteins" else plan.mean / length
    n = max(round(n), 1)
    plain = PlainSteps(copy.deepcopy(run.bare), run.config, length, ddp, n)
    times, memory = time_steps(lambda step: plain.step(run.dtype), args, ddp)
    residues = plan.residues / plan.proteins
    flops = length * flops_per_position(run.bare, length)
    work = np.tile((residues, flops), (args.repeats, 1)) * args.steps * n
    return times, work, dict(waits=0.0, peak_gb=memory)


def work_of_steps(run, what, args):
    """(repeats, 2): residues (for DPO: pairs) and FLOP in the steps that time_ours takes."""
    work = np.zeros((args.repeats, 2))
    for k in range(args.steps * args.repeats):
        for micro in run.sampler.mine:
            item = run.sampler.item_of(args.warmup + k, micro)
            if what == "dpo":
                *_, pairs = item
                work[k // args.steps, 0] += len(pairs)
                continue
            *_, proteins, width = item
            flops = len(proteins) * width * flops_per_position(run.bare, width)
            residues = np.minimum(proteins.lengths, run.plan.max_length).sum()
            work[k // args.steps] += residues, flops
    return work


def rows_of(run, what, args, ddp):
    """Yield (name, seconds per repeat, (residues or pairs, FLOP) per repeat, other columns)."""
    if what == "sedd":
        yield "plain", *time_plain(run, args, ddp)
    work = work_of_steps(run, what, args)
    times, columns = time_ours(run, what, args, ddp)
    yield "ours", times, work, columns
    if what == "sedd" and (args.compile or ddp.device.type == "cuda"):
        compile_blocks(run.bare, True, ddp)
        times, columns = time_ours(run, what, args, ddp)
        yield "compiled", times, work, columns
        torch.compiler.reset()


def config_of(name, args):
    """The config of a model. Raises: ValueError for overrides that are not valid for it."""
    what, file, overrides = MODELS[name]
    script, _ = SCRIPTS[what]
    config = load_config(script.Config, CONFIGS / file, overrides + args.overrides)
    script.check_config(config)
    return config


def measure_model(name, args, folder, matmul, ddp):
    """Print and return the rows of a model, as dicts."""
    what, *_ = MODELS[name]
    config = config_of(name, args)
    config.training.stop_signals = ()
    config.monitoring.watchdog_minutes = 0
    if what == "sedd":
        config.data.file = str(args.data)
        config.memory.compile = False
    script, _ = SCRIPTS[what]

    def prepare():
        with contextlib.redirect_stdout(io.StringIO()):
            return script.prepare(config, ddp, folder)

    def measure(run, ddp):
        n = sum(p.numel() for p in run.bare.parameters())
        rows = []
        for step, times, work, columns in rows_of(run, what, args, ddp):
            rate, flops = np.median(np.asarray(work) / np.asarray(times)[:, None], 0).tolist()
            row = dict(model=name, parameters=n, dtype=dtype_name(run.dtype), step=step,
                       per_second=rate, flops_per_second=flops, **columns)
            rows.append(row)
            if what == "sedd":
                row["of_matmul"] = flops / matmul
                row["of_plain"] = rate / rows[0]["per_second"]
            print(describe_row(row), flush=True)
        return rows

    say(f"{name}: measuring")
    return prepare_and_train(ddp, prepare, measure)


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def describe_row(row):
    """A line of the table."""
    flops = " " * 19
    of_plain = "  (pairs/s)"
    if row["model"] != "dpo":
        flops = f"{row['flops_per_second'] / 1e12:>9.2f}{row['of_matmul']:>10.1%}"
        of_plain = f"{row['of_plain']:>9.2f}x"
    return (f"{row['model']:<6}{row['parameters'] / 1e6:>8.2f} M  {row['dtype']:<9}"
            f"{row['step']:<9}{row['per_second']:>12,.1f}{flops}{row['waits']:>7.1%}"
            f"{row['peak_gb']:>9.2f}{of_plain}")


def make_parser():
    parser = Parser(prog="python -m bench card", description=__doc__.split("\n")[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="overrides keys of the configs")
    add("--models", default=",".join(MODELS), help="some of %(default)s")
    add("--data", type=Path, help="folder of prepare_uniref50.py; default: random proteins")
    add("--proteins", type=int, default=20_000, help="number of random proteins")
    add("--steps", type=int, default=10, help="steps that are timed together")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=10, help="steps before timing, in which blocks are compiled")
    add("--matmul", type=int, help="rows of the matrices; default: 8192, on a CPU 1024")
    add("--compile", action="store_true", help="compiled rows on devices other than CUDA, too")
    add("--json", type=Path, help="file to write the rows to")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    group = parser.add_argument_group("everything in one call, see bench/card_all.py").add_argument
    group("--all", type=Path, metavar="FOLDER", help="a new folder for report, logs and runs")
    group("--fasta", type=Path, help="proteins for train_sedd_ddp.py; default: demo data")
    group("--pairs", type=Path, help="pairs for train_dpo_ddp.py; default: demo data")
    group("--minutes", type=float, default=9.0, help="default 9")
    group("--world", action="store_true", help="internal: only check a world of one rank")
    return parser


def read_arguments(argv):
    """Options. Raises: ValueError."""
    args = make_parser().parse_intermixed_args(argv)
    args.models = args.models.split(",")
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            raise ValueError(f"--{name} is {value}; expected at least 1")
    if args.data and not args.data.is_dir():
        raise ValueError(f"--data {args.data} is not a folder; expected one that "
                         "prepare_uniref50.py made")
    if args.json:
        check_json(args.json)
    check_all(args)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        raise ValueError(f"--models: found {', '.join(unknown)}; expected {', '.join(MODELS)}")
    for name in args.models:   # check all now, not after an hour of measuring the first ones
        config_of(name, args)
    return args


def check_all(args):
    """Raises: ValueError if what --all needs is not there."""
    for name in ("fasta", "pairs"):
        path = getattr(args, name)
        if path and not args.all:
            raise ValueError(f"found --{name} without --all FOLDER; expected both")
        if path and not path.is_file():
            raise ValueError(f"--{name} {path} does not exist")
    if args.all and args.all.exists():
        raise ValueError(f"--all {args.all} exists; expected a new folder")
    if not args.minutes > 0:
        raise ValueError(f"--minutes is {args.minutes}; expected more than 0")


def check_json(path):
    """Raises: ValueError if the file can't be written, or is somebody else's."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--json {path}: found no such folder; expected one that exists")
    if not path.exists():
        return
    if not path.is_file() or '"matmul_rows"' not in path.read_text("utf-8", "replace"):
        raise ValueError(f"--json {path} is no file that python -m bench card wrote; "
                         "expected one or a new name")


def measure_card(args, ddp):
    """Print the table, and write --json."""
    if ddp.world_size > 1:
        raise ValueError(f"found {ddp.world_size} ranks; expected one: start it by python alone.")
    dtype, _ = choose_dtype(True, ddp.device)
    if ddp.device.type == "cpu":
        torch.set_num_threads(1)
        name = "one CPU thread"
    else:
        name = getattr(torch, ddp.device.type).get_device_name(ddp.device)
    n = args.matmul or matmul_rows(ddp.device)
    matmul = measure_matmul(n, dtype, ddp.device, lambda: now(ddp), args.repeats)
    print(f"{name}, torch {torch.__version__}: {matmul / 1e12:.2f} TFLOP/s in products of "
          f"{n:,} x {n:,} matrices in {dtype_name(dtype)}\n{'model':<6}{'parameters':>10}  "
          f"{'dtype':<9}{'step':<9}{'residues/s':>12}{'TFLOP/s':>9}{'of matmul':>10}{'waits':>7}"
          f"{'peak GB':>9}{'of plain':>10}", flush=True)
    found = dict(device=name, torch=torch.__version__, dtype=dtype_name(dtype), matmul_rows=n,
                 matmul_flops_per_second=matmul, rows=[])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if args.data is None and args.models != ["dpo"]:
            args.data = Path(folder, "prepared")
            write_prepared(args.data, args.proteins)
            args.overrides.append("data.val_fraction=0")
        for model in args.models:
            found["rows"] += measure_model(model, args, Path(folder, model), matmul, ddp)
            if args.json:   # after each model, as the next may run out of memory
                write_text_atomic(args.json, json.dumps(found, indent=1))


def main(argv):
    try:
        args = read_arguments(argv)
    except ValueError as error:
        print(f"python -m bench card: error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    if args.device == "auto" and (args.all or args.world):
        device = torch.accelerator.current_accelerator(check_available=True)
        args.device = device.type if device else "cpu"
    if args.world:
        check_world(args.device)
        return
    if args.all:
        sys.exit(0 if run_all(args) else FAILED)
    with joined_ranks(args.device) as ddp:
        measure_card(args, ddp)
