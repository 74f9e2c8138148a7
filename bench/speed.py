"""Our training steps and samplers, and plain transcriptions of the published ones, in turns.

    python -m bench speed                                # all, on made data
    python -m bench speed sedd --data proteins.fasta.gz  # a step of SEDD on real proteins
    python -m bench speed sedd --config configs/sedd_uniref50_38m.yaml training.batch_size=8
    python -m bench speed dpo --pairs pairs.json --device cpu
    python -m bench speed tables                         # pairs from a table, and one by one
    python -m bench speed sample --lengths 100 400 --batch 1 8 32

bench/card.sh runs it on a new card, beside other checks.
Prints a table in Markdown under the name of the processor or card. A row has the medians of the
rates of both, and the median and range of their ratio, turn by turn. On a CPU with one thread, and
a second is a CPU second. The plain codes are in bench/plain.py: SEDD's in the same dtype, those of
ProteinMPNN in float32. bfloat16 is measured where the processor computes in it.

sedd    the whole step of train_sedd_ddp.py, from batch plan to EMA. Without --config the network
        has 6 million parameters. "made": random proteins with the lengths of UniRef50 (or --data),
        which plain pads to the longest; "equal": all of one length. "compiled", on CUDA: by
        torch.compile. MFU: FLOP by the formula of sedd/model.py (flops_per_position), padding
        included, but nothing computed twice, over the rate of a matrix product measured here. On a
        CPU an upper bound: there the last products skip known residues
dpo     the step of train_dpo_ddp.py with ProteinMPNN of published size. Residues are those of the
        structures, one structure for each pair. Order "arange": the reference's scores are computed
        once; "random": in each step; plain decodes from N to C
tables  the step of train_dpo_ddp.py on all single mutations of a made protein (loss.unit table).
        Here "plain" is ours with loss.unit pair: one pair of these mutations a step, the same loss,
        the reference's scores known. A pair has two variants
sample  sample_sequences of sample_sedd.py, and encode and sample of mpnn/model.py, with random
        weights. SEDD's steps are all equal for plain, so some are timed. "subs": masked diffusion,
        with which ours asks the network only when a residue is unmasked

"differ": relative differences of loss and gradient norm in a step from equal weights on equal data,
without dropout. Leaves no files.
"""
import contextlib
import copy
import csv
import functools
import io
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import train_dpo_ddp
import train_sedd_ddp
from bench.plain import PlainDpo, PlainSedd, plain_mpnn_sample, plain_sedd_sample
from ddp_setup import BAD_INPUT, gradient_sync
from mpnn.batches import collate_complexes
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import ATOMS, decoding_order, random_proteinmpnn
from proteins.letters import LETTERS, N_TOKENS, X_ID
from proteins.structures import NAMES, Complex, read_structure
from sample_sedd import FREE, sample_sequences
from sedd.batches import to_device
from sedd.diffusion import make_graph, make_noise
from sedd.model import flops_per_position
from sedd.weights import Sedd
from training.command_line import joined_ranks
from training.config import load_config
from training.loop import (
    exchange,
    global_count,
    next_micro_batches,
    open_batches,
    set_learning_rate,
)
from training.parser import Parser
from training.peak import matmul_rows, measure_matmul
from training.precision import choose_dtype, compile_blocks
from training.problems import in_columns

WHAT = ("sedd", "dpo", "tables", "sample")
WARM_UP = 2                 # turns that are not counted: Adam's state, caches, compilation
STEPS_ON_DEVICE = 10        # training steps of a turn; on a CPU one

NETWORK = dict(hidden_size=256, n_blocks=6, n_heads=8, dropout=0.1)     # of SEDD without --config
BATCH = 8                   # proteins in a plain step of it
EQUAL_LENGTH = 256          # residues of the proteins of equal length
PADDED_LENGTH = 512         # to which plain pads the others
N_MADE = 3000               # proteins in a made data set

MADE_RESIDUES = 106         # of the made structure
DPO_CASES = [(1, "arange", torch.float32), (1, "random", torch.float32),     # pairs a step, ...
             (4, "arange", torch.float32), (4, "arange", torch.bfloat16),
             (4, "random", torch.bfloat16)]

TABLE_RESIDUES = 58         # of the made protein whose mutations are all measured
PAIRS_ONE_BY_ONE = 200      # of these, at most one a step

PLAIN_STEPS = 8             # steps of the plain sampler of SEDD that are timed, at most
TEMPERATURE = 0.1           # of ProteinMPNN, as is usual


def measure(options, ddp):
    """Print the table of what the options name."""
    if ddp.world_size > 1:
        raise ValueError(f"found {ddp.world_size} ranks; expected one process: speed compares "
                         "steps, on one device. Start it by python alone.")
    if ddp.device.type == "cpu":
        torch.set_num_threads(1)
    table = Table(options, ddp)
    table.print_head()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if "sedd" in options.what:
            measure_sedd(table, Path(folder, "sedd"))
        if "dpo" in options.what:
            measure_dpo(table, Path(folder, "dpo"))
        if "tables" in options.what:
            measure_tables(table, Path(folder, "tables"))
        if "sample" in options.what:
            with torch.no_grad():
                measure_samplers(table, Path(folder, "sample"))


# ---------------------------------------------------------------- the timer and its table
@dataclass
class Work:
    """What a turn has done: amount of the unit of its row, and FLOP (0: not counted)."""
    amount: float
    flops: float = 0.0


class Table:
    """Measures in turns, and prints a row for each side but the plain one.

    rates: {dtype: FLOP/s of matrix products} of the device."""

    def __init__(self, options, ddp):
        self.options = options
        self.ddp = ddp
        self.dtypes = [torch.float32]
        if computes_in_bfloat16(ddp.device):
            self.dtypes.append(torch.bfloat16)
        else:
            say(f"bfloat16 is left out: {ddp.device.type} has no native bfloat16")
        rows = options.matmul or matmul_rows(ddp.device)
        self.rates = {dtype: measure_matmul(rows, dtype, ddp.device, lambda: now(ddp))
                      for dtype in self.dtypes}

    def print_head(self):
        rates = "; ".join(f"{rate / 1e12:,.3g} in {name_of(dtype)}"
                          for dtype, rate in self.rates.items())
        second = "CPU second" if self.ddp.device.type == "cpu" else "second"
        print(f"{name_of_device(self.ddp.device)}, torch {torch.__version__}; matrix products: "
              f"{rates} TFLOP/s; medians of {self.options.repeats} turns\n\n"
              f"| per {second} | plain | ours | ratio (range) | MFU | differ: loss, norm |\n"
              "|---|---|---|---|---|---|", flush=True)

    def add(self, title, unit, plain, ours, differences=None):  # noqa: PLR0913  (all of a row)
        """Measure in turns, and print a row for each dtype of ours.

        Args:
            plain: function () -> Work, a turn of the plain code.
            ours: {dtype: function () -> Work}.
            differences: {dtype: (of the loss, of the norm of the gradient)}.
        """
        plain_turns, *our_turns = take_turns(title, [plain, *ours.values()], self.options.repeats,
                                             self.ddp)
        for dtype, turns in zip(ours, our_turns):
            ratios = [rate(turn) / rate(other) for turn, other in zip(turns, plain_turns)]
            mfu = statistics.median(work.flops / seconds for work, seconds in turns)
            mfu = f"{mfu / self.rates[dtype]:.0%}" if mfu else "-"
            differ = "-"
            if differences:
                differ = ", ".join(f"{difference:.0e}" for difference in differences[dtype])
            print(f"| {title}, {name_of(dtype)}: {unit} | {median_text(plain_turns)} "
                  f"| {median_text(turns)} | {statistics.median(ratios):.2f} "
                  f"({min(ratios):.2f} to {max(ratios):.2f}) | {mfu} | {differ} |", flush=True)


def take_turns(title, sides, repeats, ddp):
    """For each side, a function () -> Work: [(Work, seconds) of each turn], after WARM_UP turns."""
    times = [[] for _ in sides]
    for turn in range(1 - WARM_UP, 1 + repeats):
        say(f"{title}: {f'turn {turn} of {repeats}' if turn > 0 else 'warm-up'}")
        for side, take in enumerate(sides):
            start = now(ddp)
            work = take()
            seconds = now(ddp) - start
            if turn > 0:
                times[side].append((work, seconds))
    return times


def rate(turn):
    """Amount per second of (Work, seconds)."""
    work, seconds = turn
    return work.amount / seconds


def median_text(turns):
    """The median rate of turns, with four digits or more."""
    median = statistics.median(map(rate, turns))
    return f"{median:,.0f}" if median >= 1000 else f"{median:.4g}"


def now(ddp):
    """CPU seconds of this process; for a device, wall seconds after it has finished its work."""
    if ddp.device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def computes_in_bfloat16(device):
    """Whether a device has bfloat16. A CPU without emulates it, a hundred times slower."""
    dtype, _ = choose_dtype(True, device)
    return dtype == torch.bfloat16


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def name_of_device(device):
    """Name of a card, or of this machine's processor."""
    if device.type != "cpu":
        return getattr(torch, device.type).get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    return f"{name}, one thread"


def say(text):
    """Print a line on the progress."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the training step
class Nobody:
    """A watch (ddp_watch.py) that never asks to stop."""

    def flag(self):
        return False


def take_step(run, batches, loss_of, ddp):
    """A step as both training scripts take it, without log. Returns its Totals.

    run: of a script's `prepare`. batches: see open_batches. loss_of: function (micro-batch) ->
    (loss, sums)."""
    set_learning_rate(run)
    totals = compute_gradient(run, next_micro_batches(run, batches), loss_of, Nobody(), ddp)
    apply_gradient(run, totals)
    run.progress["step"] += 1
    return totals


def compute_gradient(run, micro_batches, loss_of, watch, ddp):
    """The first half of a script's step, which leaves the clipped gradient: its Totals."""
    count = global_count(micro_batches, ddp)
    sums = 0.0
    for k, batch in enumerate(micro_batches):
        torch.manual_seed(batch["seed"])
        with gradient_sync(run.model, last=k == len(micro_batches) - 1):
            loss, part = loss_of(batch)
            run.scaler.scale(loss * ddp.world_size / count).backward()
        sums = sums + part
    run.scaler.unscale_(run.optimizer)
    run.meter.measure_layers("gradients", run.bare)
    largest = run.config.optim.grad_clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(run.bare.parameters(), largest, foreach=True)
    return exchange(run, sums, count, norm, watch, ddp)


def apply_gradient(run, totals):
    """The second half: move the weights and their averages, unless the step is bad."""
    if totals.is_finite:
        run.scaler.step(run.optimizer)
        if run.ema is not None:
            run.ema.update(run.bare.parameters())
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- SEDD
def measure_sedd(table, folder):
    """Rows for each data set, and for each way to compute."""
    random = np.random.default_rng(0)
    folder.mkdir()
    equal = folder / "equal.fasta"
    made = folder / "made.fasta"
    write_made_fasta(equal, [EQUAL_LENGTH] * 400, random)
    write_made_fasta(made, made_lengths(N_MADE, random), random)
    data = Path(table.options.data or made)
    cases = [(data, PADDED_LENGTH), (equal, EQUAL_LENGTH)]
    if table.options.config:
        cases = [(data, None)]
    for file, length in cases:
        config = sedd_config(table.options, file, length)
        run = prepare_quietly(train_sedd_ddp, config, folder / f"run-{file.stem}", table.ddp)
        add_sedd_rows(table, run, file.stem)


def sedd_config(options, file, length):
    """That of --config, or one of a small network whose steps have as many positions as BATCH
    proteins of `length`."""
    if options.config:
        config = load_config(train_sedd_ddp.Config, options.config, options.overrides)
    else:
        config = train_sedd_ddp.Config(model=train_sedd_ddp.Model(**NETWORK))
        config.data.max_length = length
        config.training.tokens_per_batch = BATCH * length
        config.loss.reduction = "sequence"      # as plain
    config.data.file = str(file)
    config.data.demo_proteins = None
    config.data.val_fraction = 0.0
    config.memory.compile = False
    config.training.num_epochs = None
    return config


def prepare_quietly(script, config, folder, ddp):
    """A run that the training script prepares, without a word."""
    config.training.n_iters = 10**6
    config.training.stop_signals = ()
    with contextlib.redirect_stdout(io.StringIO()):
        return script.prepare(config, ddp, folder)


def add_sedd_rows(table, run, name):
    """Rows of a run: steps from equal weights, in each dtype, and compiled."""
    ddp = table.ddp
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():               # change the initial weights, with which all logits are 0
        for p in run.bare.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator).to(p.device)
    length = run.plan.max_length
    n = run.plan.mean if run.plan.counted_in == "proteins" else run.plan.mean / length
    ours = OurSedd(run, table.options.steps, ddp)
    plain = PlainSedd(copy.deepcopy(run.bare), run.config, max(round(n), 1), length, ddp)
    residues = len(plain.x0) * run.plan.residues / run.plan.proteins   # without padding, on average
    differences = None
    if not table.options.config:
        say(f"{name}: comparing the results")
        differences = {dtype: ours.compare(plain, dtype) for dtype in table.dtypes}

    def take_plain(dtype):
        for _ in range(ours.steps):
            plain.step(dtype)
        return Work(ours.steps * residues)

    def add(title, dtype, differences=None):
        table.add(title, "residues", lambda: take_plain(dtype),
                  {dtype: lambda: ours.take(dtype)}, differences)

    millions = sum(p.numel() for p in run.bare.parameters()) / 1e6
    title = f"SEDD step, {millions:.0f} M, {name}"
    for dtype in table.dtypes:
        add(title, dtype, differences)
    if ddp.device.type == "cuda":
        compile_blocks(run.bare, True, ddp)
        add(f"{title}, compiled", table.dtypes[-1])
        torch.compiler.reset()


class OurSedd:
    """Turns of training steps as train_sedd_ddp.py takes them. steps: of a turn."""

    def __init__(self, run, steps, ddp):
        self.run = run
        self.steps = steps
        self.ddp = ddp
        self.dtype = torch.float32
        self.flops = 0.0
        self.dataset = train_sedd_ddp.MicroBatchDataset(
            run.graph, run.noise, run.config.data.max_length, run.micro_batches,
            run.config.training.seed, run.config.loss.reduction)
        self.batches = open_batches(run, self.dataset, self.loss_of, ddp)

    def loss_of(self, batch):
        run = self.run
        x0 = batch["x0"]
        self.flops += x0.numel() * flops_per_position(run.bare, x0.shape[1])
        return train_sedd_ddp.micro_batch_loss(run.model, batch, run.graph, self.ddp, self.dtype)

    def take(self, dtype):
        """A turn in this dtype. Returns its Work."""
        self.dtype = dtype
        self.flops = 0.0
        residues = 0.0
        for _ in range(self.steps):
            totals = take_step(self.run, self.batches, self.loss_of, self.ddp)
            residues += float(totals.sums[1])       # see train_sedd_ddp.micro_batch_loss
        return Work(residues, self.flops)

    def compare(self, plain, dtype):
        """Relative differences (loss, gradient norm) of our next step from one of the plain code on
        the same batch, which gets no padding, from our weights and without dropout. Both leave the
        weights that training has made of them."""
        run = self.run
        plain.model.load_state_dict(run.bare.state_dict())
        batch = self.dataset[run.sampler.item_of(run.progress["step"], run.sampler.mine[0])]
        self.dtype = dtype
        for block in run.bare.blocks:
            block.dropout = 0.0
        totals = take_step(run, self.batches, self.loss_of, self.ddp)
        for block in run.bare.blocks:
            block.dropout = run.config.model.dropout
        plain.optimizer.zero_grad()
        batch = to_device(batch, self.ddp.device, torch.float32)
        n = len(batch["x0"])
        loss = 0.0
        for i, length in enumerate(batch["mask"].sum(1).tolist()):
            protein = (batch["x0"][i:i + 1, :length], batch["xt"][i:i + 1, :length],
                       batch["sigma"][i:i + 1], batch["dsigma"][i:i + 1])
            share = plain.loss(protein, dtype, 0.0) / n
            share.backward()
            loss += float(share.detach())
        return (abs(float(totals.sums[0]) / totals.count / loss - 1),
                abs(totals.norm / float(norm_of(plain.model)) - 1))


def norm_of(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


# ---------------------------------------------------------------- DPO
def measure_dpo(table, folder):
    """A row for each of DPO_CASES, on the pairs of a file or on made ones."""
    folder.mkdir()
    pairs = table.options.pairs
    title = "DPO step"
    if not pairs:
        write_demo_pdb(folder / "made.pdb", MADE_RESIDUES)
        pairs = folder / "pairs.json"
        write_made_pairs(pairs, folder / "made.pdb", 4)
        title = f"DPO step, {MADE_RESIDUES} residues"
    for batch_size, order, dtype in DPO_CASES:
        if dtype not in table.dtypes:
            continue
        config = train_dpo_ddp.Config()
        config.model.base_model_name = "random"
        config.data.train_data = str(pairs)
        config.data.val_fraction = 0.0
        config.training.batch_size = batch_size
        config.loss.order = order
        config.memory.mixed_precision = name_of(dtype)
        run = prepare_quietly(train_dpo_ddp, config,
                              folder / f"run-{batch_size}-{order}-{name_of(dtype)}", table.ddp)
        plural = "s" if batch_size > 1 else ""
        add_dpo_row(table, run, f"{title}, {batch_size} pair{plural}, {order}")


def add_dpo_row(table, run, title):
    ddp = table.ddp
    config = run.config
    base = copy.deepcopy(run.bare).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():               # move it: if it equals the reference, losses are log 2
        for p in run.bare.parameters():
            p += 0.003 * torch.randn(p.shape, generator=generator).to(p.device)
    ours = OurDpo(run, table.options.steps, ddp)
    plain = PlainDpo(copy.deepcopy(run.bare), base, run.train_set.items,
                     config.training.batch_size, config.loss, config.optim)
    differences = None
    if config.loss.order == "arange":   # as plain
        differences = {run.dtype: ours.compare(plain)}
    table.add(title, "residues", lambda: Work(sum(plain.step() for _ in range(ours.steps))),
              {run.dtype: lambda: ours.take(residues_of)}, differences)


class OurDpo:
    """Turns of training steps as train_dpo_ddp.py takes them. steps: of a turn."""

    def __init__(self, run, steps, ddp):
        self.run = run
        self.steps = steps
        self.ddp = ddp
        with contextlib.redirect_stdout(io.StringIO()):
            train_dpo_ddp.keep_base_scores(run, ddp)
        self.batches = open_batches(run, run.train_set, self.loss_of, ddp)

    def loss_of(self, batch):
        return train_dpo_ddp.micro_batch_loss(self.run.model, batch, self.run, self.ddp)

    def next_items(self):
        """The pairs or proteins of the next step."""
        *_, indices = self.run.sampler.item_of(self.run.progress["step"], self.run.sampler.mine[0])
        return [self.run.train_set.items[i] for i in indices]

    def take(self, amount):
        """A turn. Returns its Work. amount: function (items, Totals) of a step."""
        done = 0.0
        for _ in range(self.steps):
            items = self.next_items()
            totals = take_step(self.run, self.batches, self.loss_of, self.ddp)
            done += amount(items, totals)
        return Work(done)

    def compare(self, plain):
        """Differences (of the loss; of the gradient norm, relative) of our next step from one of
        the plain code on the same pairs, from equal weights."""
        plain.policy.load_state_dict(self.run.bare.state_dict())
        loss = plain.loss(self.next_items())
        loss.backward()
        totals = take_step(self.run, self.batches, self.loss_of, self.ddp)
        return (abs(float(totals.sums[0]) / totals.count / float(loss.detach()) - 1),
                abs(totals.norm / float(norm_of(plain.policy)) - 1))


def residues_of(pairs, totals):
    """Residues of the structures, one structure for each pair."""
    return sum(len(pair.complex) for pair in pairs)


# ---------------------------------------------------------------- tables of mutations
def measure_tables(table, folder):
    """Rows of pairs and of variants: all single mutations of a protein in a step, and a pair."""
    folder.mkdir()
    write_demo_pdb(folder / "made.pdb", TABLE_RESIDUES)
    write_made_table(folder / "made.csv", folder / "made.pdb", folder / "pairs.json",
                     PAIRS_ONE_BY_ONE)
    config = table_config(folder / "pairs.json")
    one_by_one = prepare_quietly(train_dpo_ddp, config, folder / "run-pairs", table.ddp)
    config = table_config(folder / "made.csv")
    config.loss.unit = "table"
    config.table = train_dpo_ddp.Table(measured="ddg", better="lower", wild_type=0.0)
    run = prepare_quietly(train_dpo_ddp, config, folder / "run-table", table.ddp)
    add_table_rows(table, one_by_one, run)


def table_config(data):
    """That of a step on an item of this file, with the loss that configs/dpo_stability.yaml has."""
    config = train_dpo_ddp.Config()
    config.model.base_model_name = "random"
    config.data.train_data = str(data)
    config.data.val_fraction = 0.0
    config.training.batch_size = 1
    config.loss.reference = "unfolded"
    config.loss.native_kl = 0.1
    return config


def add_table_rows(table, one_by_one, run):
    """Rows of both runs, each with another amount of the same steps."""
    plain = OurDpo(one_by_one, table.options.steps, table.ddp)
    ours = OurDpo(run, table.options.steps, table.ddp)
    mutations, = run.train_set.items
    title = f"DPO step, {len(mutations.variants)} mutations of {mutations.length} residues"

    def pairs(items, totals):
        return float(totals.sums[-2])       # see train_dpo_ddp.micro_batch_loss

    def variants_of_pairs(items, totals):
        return 2 * len(items)

    def variants_of_table(items, totals):
        return len(mutations.variants)

    table.add(title, "pairs", lambda: plain.take(pairs), {run.dtype: lambda: ours.take(pairs)})
    table.add(title, "variants", lambda: plain.take(variants_of_pairs),
              {run.dtype: lambda: ours.take(variants_of_table)})


# ---------------------------------------------------------------- samplers
def measure_samplers(table, folder):
    """Rows for each model, length, and number of sequences that are drawn together."""
    folder.mkdir()
    options = table.options
    for length in options.lengths:
        for batch in options.batch:
            lengths = {f"{length} residues": [length] * batch}
            if batch > 1 and length == max(options.lengths):
                lengths[f"{length // 10} to {length}"] = mixed_lengths(length, batch)
            for title, each in lengths.items():
                for parameterization in ("sedd", "subs"):
                    table.add(f"drawing, {parameterization.upper()}, {title}, {batch} at a time",
                              "sequences", *sedd_samplers(parameterization, each, table))
            table.add(f"drawing, ProteinMPNN, {length} residues, {batch} at a time", "sequences",
                      *mpnn_samplers(folder, length, batch, table.ddp))


def mixed_lengths(longest, batch):
    """`batch` lengths, evenly from a tenth of the longest to it."""
    return np.linspace(longest / 10, longest, batch).round().astype(int).tolist()


def sedd_samplers(parameterization, lengths, table):
    """(plain, ours), as Table.add takes them: they draw a protein of each length."""
    ours = random_sedd(table.ddp.device, parameterization)
    templates = [FREE * length for length in lengths]
    steps = table.options.sample_steps
    timed = min(steps, PLAIN_STEPS)

    def draw_plainly():
        plain_sedd_sample(ours.model, ours.noise, len(lengths), max(lengths), timed)
        return Work(len(lengths) * (timed + 1) / (steps + 1))      # with the last step

    def draw(dtype):
        sample_sequences(ours, templates, steps, dtype=dtype, ddp=table.ddp,
                         tokens=max(16384, max(lengths)))
        return Work(len(lengths))

    return draw_plainly, {dtype: functools.partial(draw, dtype) for dtype in table.dtypes}


def random_sedd(device, parameterization="sedd"):
    """A Sedd of random weights, all of which matter, with the network of the training step."""
    config = train_sedd_ddp.Config(
        model=train_sedd_ddp.Model(**NETWORK, parameterization=parameterization))
    graph = make_graph("absorb", N_TOKENS)
    torch.manual_seed(0)
    model = train_sedd_ddp.make_model(config, graph).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return Sedd(model.to(device), graph, make_noise("loglinear"), {}, None, None, 10**6, ())


def mpnn_samplers(folder, length, batch, ddp):
    """(plain, ours), as Table.add takes them: they draw `batch` sequences for a structure."""
    path = folder / f"{length}.pdb"
    write_demo_pdb(path, length)
    model = random_proteinmpnn(0).eval()
    model = model.to(ddp.device)
    structure = read_structure(path)
    tensors = collate_complexes([Complex(structure, sorted(structure.chains))])
    tensors = {name: tensors[name].to(ddp.device)
               for name in ("X", "mask", "residue_idx", "chain_id")}
    S = torch.zeros(batch, tensors["mask"].shape[1], dtype=torch.int64, device=ddp.device)
    everywhere = torch.ones_like(S)

    def orders():
        return decoding_order(everywhere, torch.randn(S.shape, device=S.device))

    def draw_plainly():
        copies = {name: x.expand(batch, *x.shape[1:]) for name, x in tensors.items()}
        plain_mpnn_sample(model, copies, orders(), TEMPERATURE)
        return Work(batch)

    def draw():
        encoding = model.encode(model.graph(**tensors))
        model.sample(encoding, S, everywhere, orders(), TEMPERATURE)
        return Work(batch)

    return draw_plainly, {torch.float32: draw}


# ---------------------------------------------------------------- made data
LONGEST = 45_000            # residues in a random protein, at most


def made_lengths(n, random):
    """(n,) int64 lengths as in UniRef50: log-normal, mean 287. random: a numpy generator."""
    return np.exp(random.normal(np.log(200), 0.85, n)).clip(11, LONGEST).astype(np.int64)


def write_made_fasta(path, lengths, random):
    """Write a FASTA file of random proteins of these lengths."""
    letters = np.array(list(LETTERS[:X_ID]))
    with open(path, "w") as file:
        for i, length in enumerate(lengths):
            file.write(f">made{i}\n{''.join(random.choice(letters, length))}\n")


def write_demo_pdb(path, n_residues):
    """Helices and strands of 12 residues in turns, as a PDB file with one chain."""
    kinds = [("helix", "strand")[i // 12 % 2] for i in range(n_residues)]
    X = build_backbone(*zip(*(PHI_PSI[kind] for kind in kinds)))
    X -= X.min((0, 1))                      # a PDB column has no room for numbers such as -1000.000
    with open(path, "w") as file:
        for i, residue in enumerate(X.tolist()):
            for k, (atom, xyz) in enumerate(zip(ATOMS, residue)):
                place = f"{4 * i + k + 1:5d}  {atom:<3} {NAMES[i * 7 % 20]} A{i + 1:4d}"
                x, y, z = (f"{coordinate:8.3f}" for coordinate in xyz)
                file.write(f"ATOM  {place}    {x}{y}{z}  1.00  0.00           {atom[0]}\n")


def write_made_pairs(path, structure, n):
    """Write n pairs of random sequences on a structure that write_demo_pdb wrote, beside it."""
    random = np.random.default_rng(0)
    chain, = read_structure(structure).chains.values()
    letters = np.array(list(LETTERS[:X_ID]))
    pairs = []
    for _ in range(n):
        chosen, rejected = ("".join(random.choice(letters, len(chain.S))) for _ in range(2))
        pairs.append({"pdb_file": structure.name, "chain_id": "A", "preferred_seq": chosen,
                      "unpreferred_seq": rejected})
    path.write_text(json.dumps(pairs))


def write_made_table(path, structure, pairs, n):
    """Write a table of all single mutations, with random values, of a structure that write_demo_pdb
    wrote, beside it; and as `pairs` n pairs of them."""
    random = np.random.default_rng(0)
    chain, = read_structure(structure).chains.values()
    rows = []
    sequences = []          # (row, sequence) of each mutation
    for row, native in enumerate(chain.S):
        for letter in range(X_ID):
            if letter != native:
                mutation = f"{LETTERS[native]}{row + 1}{LETTERS[letter]}"
                rows.append([structure.name, mutation, f"{random.normal(1):.3f}"])
                sequence = chain.S.copy()
                sequence[row] = letter
                sequences.append((row, "".join(LETTERS[k] for k in sequence)))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["pdb_file", "mutation", "ddg"], *rows])
    entries = []
    for _ in range(n):
        one, other = random.choice(len(rows), 2, replace=False)
        place, chosen = sequences[one]
        other_place, rejected = sequences[other]
        entries.append({"pdb_file": structure.name, "chain_id": "A", "preferred_seq": chosen,
                        "unpreferred_seq": rejected,
                        "mutable_positions": sorted({place, other_place})})
    pairs.write_text(json.dumps(entries))


# ---------------------------------------------------------------- command line
def read_options(argv):
    """Options. Raises: ValueError."""
    parser = Parser(prog="python -m bench speed", allow_abbrev=False,
                    description=__doc__,
                    epilog="The top of bench/speed.py says what is measured.")
    add = parser.add_argument
    add("words", nargs="*", metavar="sedd|dpo|tables|sample, section.key=value",
        help="what to measure, default all; overrides of --config")
    add("--data", help="sedd: proteins; default: random ones with the lengths of UniRef50")
    add("--config", help="sedd: YAML file of a network and its batches")
    add("--pairs", type=Path, help="dpo: pairs as for train_dpo_ddp.py; default: made ones")
    add("--lengths", type=int, nargs="+", default=[100], help="sample: residues; default 100")
    add("--batch", type=int, nargs="+", default=[1, 8],
        help="sample: sequences drawn side by side; default 1 8")
    add("--sample_steps", type=int, default=128, help="sample: of SEDD; default 128")
    add("--repeats", type=int, default=5, help="turns; default 5")
    add("--steps", type=int, help="training steps of a turn; default: on a CPU 1, else "
        f"{STEPS_ON_DEVICE}")
    add("--matmul", type=int, help="rows of the multiplied matrices; default: 8192, on a CPU 1024")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    options = parser.parse_intermixed_args(argv)
    options.what = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    unknown = [word for word in options.what if word not in WHAT]
    if unknown:
        raise ValueError(f"found {', '.join(unknown)}; expected {', '.join(WHAT)}")
    options.what = options.what or list(WHAT)
    if options.overrides and not options.config:
        raise ValueError(f"found {options.overrides[0]} without --config; expected a config that "
                         "it overrides")
    for name, value in vars(options).items():
        values = value if isinstance(value, list) else [value]
        for number in values:
            if type(number) in (int, float) and not number > 0:
                raise ValueError(f"--{name} is {number}; expected more than 0")
    if options.device == "auto":
        device = torch.accelerator.current_accelerator(check_available=True)
        options.device = device.type if device else "cpu"
    if options.steps is None:
        options.steps = 1 if options.device == "cpu" else STEPS_ON_DEVICE
    return options


def main(argv):
    try:
        options = read_options(argv)
    except ValueError as error:
        print(in_columns(f"python -m bench speed: error: {error}"), file=sys.stderr)
        sys.exit(BAD_INPUT)
    with joined_ranks(options.device) as ddp:
        measure(options, ddp)
