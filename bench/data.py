"""Planning for many ranks from large prepared data, and training from disk and from memory.

    python -m bench data --proteins 60000000 --folder /tmp  # plan, read 17 GB of random data
    mpirun -n 2 python -m bench data                        # only train from such data, 2 ranks
"""
import concurrent.futures
import math
import multiprocessing
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from bench.common import (CONFIGS, CommandParser, add_folder, check_folder,
                          measure_the_cpu_by_default, read_options, run_on_ranks, shared_folder,
                          write_prepared)
from ddp_setup import all_sum, barrier, print0, wrap_ddp
from sedd.batches import BatchReader, sum_rows
from sedd.diffusion import make_graph, make_noise
from sedd.prepared import PreparedProteins
from proteins.letters import N_TOKENS
from training.config import load_config
from training.loop import MicroBatchSampler, global_gradient
from train_sedd_ddp import (Config, MicroBatchDataset, make_batch_plan, make_model, make_reader,
                            micro_batch_loss)

BYTES_PER_PROTEIN = 300     # of a prepared set on disk
MOST_READ = 20_000          # most micro-batches of a window that are read
MOST_LANES = 64             # most micro-batches of a step that are read
PROTEINS_TO_TRAIN = 100_000


def bench_data(args, ddp):
    """Measure planning for many ranks, and training from a prepared set and from memory."""
    with shared_folder(args.folder, ddp) as folder:
        if ddp.world_size == 1:
            table_of_ranks(args, folder)
        if ddp.is_main:
            write_prepared(folder / "small", PROTEINS_TO_TRAIN)
        barrier(ddp)
        train_from_both(args, folder / "small", ddp)


# ---- planning ----

def table_of_ranks(args, folder):
    """Print a table of the results of start_a_rank for 1 to 12,288 ranks."""
    room = shutil.disk_usage(folder).free
    n = min(args.proteins, int(room * 0.9 / BYTES_PER_PROTEIN))
    start = time.perf_counter()
    write_prepared(folder / "large", n)
    config = load_config(Config, CONFIGS / "sedd_uniref50.yaml")
    accum = config.training.accum
    print(f"prepared set of {n:,} random proteins"
          f"{'' if n == args.proteins else ' (the disk has no room for more)'}, written in "
          f"{time.perf_counter() - start:.0f} s; sedd_uniref50.yaml, accum {accum}\n"
          f"{'ranks':>6}{'steps/epoch':>12}{'windows':>8}{'unit kB':>8}{'CPU s to batch 1':>17}"
          f"{'private MB':>11}{'s to step k':>12}{'padding':>8}{'waits':>6}{'read/used':>10}"
          f"{'cropped':>8}")
    for ranks in (1, 12, 1536, 12288):
        if n < 2 * ranks * accum * config.training.batch_size:
            print(f"{ranks:>6}  too few proteins for this number of ranks: see --proteins")
            continue
        found = in_a_child(start_a_rank, folder / "large", config, ranks * accum, accum)
        print("{ranks:>6}{steps:>12,}{windows:>8,}{unit:>8,.0f}{first:>17.2f}{memory:>11.0f}"
              "{reach:>12.3f}{padding:>8.1%}{wait:>6.1%}{read:>10.3f}{read_cropped:>8.3f}".format(
                  ranks=ranks, **found), flush=True)
    print(f"of rank 0, the only one that reads all lengths ({4 * n / 1e6:,.0f} MB) at the start. "
          f"k: a step of the second epoch. waits: work\nof the largest of up to {MOST_LANES} "
          "micro-batches of a step over their mean, minus 1. read/used: bytes read per\nresidue "
          "of the proteins trained on. cropped: per residue of these after cropping")


def in_a_child(function, *arguments):
    """Run function(*arguments) in a new process; return its result."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def start_a_rank(folder, config, micro_batches, accum):
    """Costs of rank 0 until its first batch, and statistics of the batches.

    Args: micro_batches: of all ranks in a step. accum: of rank 0.
    Returns: dict for table_of_ranks: first (CPU seconds to the first batch), memory (MB), reach
        (seconds to a step of the second epoch), padding and wait (fractions), read, read_cropped
        (bytes per residue), steps, windows, unit (thousand residues).
    """
    torch.set_num_threads(1)
    memory_before = private_megabytes()
    start = time.process_time()
    proteins = PreparedProteins(folder)
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    reader = BatchReader(plan, proteins, sum_rows(proteins, plan))
    for lane in range(accum):
        reader.micro_batch(0, lane)
    found = dict(first=time.process_time() - start, memory=private_megabytes() - memory_before,
                 steps=plan.steps_per_epoch, windows=plan.windows,
                 unit=proteins.meta.residues / plan.windows / micro_batches / 1e3)
    start = time.perf_counter()
    for lane in range(accum):
        reader.micro_batch(plan.steps_per_epoch * 5 // 3, lane)
    found["reach"] = time.perf_counter() - start
    return found | read_a_window(reader, plan, proteins, micro_batches, config.model.hidden_size)


def private_megabytes():
    """Memory of this process that is not shared with other processes, in MB."""
    kilobytes = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private"):
            kilobytes += int(line.split()[1])
    return kilobytes / 1e3


def read_a_window(reader, plan, proteins, micro_batches, width):
    """Statistics of the batches of a window in the middle: dict of padding, wait, read,
    read_cropped, as in start_a_rank. width: of the network."""
    reader.units.clear()
    read_before = proteins.bytes_read
    lanes = np.linspace(0, micro_batches - 1, min(micro_batches, MOST_LANES)).astype(int)
    n = plan.window_steps
    first_step = n * (plan.windows // 2)
    steps = range(first_step, first_step + n, math.ceil(len(lanes) * n / MOST_READ))
    uncropped = 0
    positions = 0
    residues = 0
    waits = []
    for step in steps:
        work = []
        for lane in lanes:
            part, length = reader.micro_batch(step, lane)
            positions += len(part) * length
            residues += int(np.minimum(part.lengths, plan.max_length).sum())
            uncropped += int(part.lengths.sum())
            work.append(len(part) * length * (6 * width + length))
        waits.append(max(work) / (sum(work) / len(work)) - 1)
    read = (proteins.bytes_read - read_before) * len(steps) / n   # all n steps were read
    return dict(padding=1 - residues / positions, wait=np.mean(waits), read=read / uncropped,
                read_cropped=read / residues)


# ---- training ----

def train_from_both(args, folder, ddp):
    """Compare residues per second of training from disk and from memory; also time the loader."""
    torch.set_num_threads(1)
    config = load_config(Config, CONFIGS / "sedd_cpu.yaml")
    graph = make_graph("absorb", N_TOKENS)
    noise = make_noise("loglinear")
    model = wrap_ddp(make_model(config, graph).to(ddp.device), ddp)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = MicroBatchDataset(graph, noise, config.data.max_length, ddp.world_size, 0,
                                config.loss.reduction)
    on_disk = PreparedProteins(folder)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, graph, config, ddp, torch.float32)

    def residue_rate(proteins, first, last, train):
        """Residues per second over these steps. train: False only loads their batches."""
        reader = make_reader(config, proteins, ddp.world_size, ddp)
        sampler = MicroBatchSampler(reader.item_of, ddp.world_size, ddp, first, last)
        barrier(ddp)
        start = time.perf_counter()
        residues = 0.0
        for item in sampler:
            batch = dataset[item]
            residues += float(batch["mask"].sum())
            if train:
                global_gradient(model, [batch], loss_of, ddp)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if ddp.device.type != "cpu":
            getattr(torch, ddp.device.type).synchronize()
        return all_sum(residues, ddp) / (time.perf_counter() - start)

    in_memory = on_disk.read_all()
    residue_rate(on_disk, 0, 5, train=True)     # to warm up
    rates = []
    ratios = []
    for k in range(args.repeats):           # other steps in each repeat, each with a new reader
        print0(ddp, f"training, turn {k + 1} of {args.repeats}", file=sys.stderr)
        first = 1000 * k
        last = first + args.steps
        disk = residue_rate(on_disk, first, last, train=True)
        memory = residue_rate(in_memory, first, last, train=True)
        rates.append(disk)
        ratios.append(disk / memory)
    loader = residue_rate(on_disk, 0, 200, train=False)
    print0(ddp, f"{ddp.world_size} rank(s), sedd_cpu.yaml, {args.steps} steps, {args.repeats} "
                f"times in turns: {statistics.median(rates):,.0f} residues/s from disk, "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of that "
                f"from memory; the loader alone {loader:,.0f} residues/s")


def main(argv):
    parser = CommandParser(prog="python -m bench data", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("--proteins", type=int, default=2_000_000,
                        help="number of random proteins (60000000: 17 GB)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each training")
    parser.add_argument("--repeats", type=int, default=5)
    add_folder(parser)
    args = read_options(parser, argv)
    check_folder(parser, args.folder)
    measure_the_cpu_by_default(args)
    run_on_ranks("data", bench_data, args, argv)
