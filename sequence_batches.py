"""Which proteins a run has, and which go into which batch: of training, and of evaluation.

    train, val, *_ = load_data(config, ddp)              # a file, a prepared folder, or a demo
    plan = BatchPlan(train.length_counts(), 512, micro_batches=4, tokens=8192)
    reader = BatchReader(plan, train, sum_rows(train, plan))
    proteins, width = reader.micro_batch(step, lane)     # one of 4 lanes, on any number of ranks
    for indices in eval_batches(val.lengths, tokens=8192): ...

A plan depends on the lengths of the proteins, the size of the global batch and a seed; never on
ranks, workers or restarts. It reads through the given table only.
"""

import bisect
import functools
import hashlib
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddp_setup import barrier, beat, print0
from run_dir import staged
from sequence_data import (REMAKE, DemoSource, PreparedProteins, Proteins, check_prepared,
                           keyed_seed, keys_hash, random_words, read_meta, read_sequences,
                           split_by_hash, stage_prepared)

LARGE_FILE = 200_000_000        # bytes of a file, from which on preparing it pays
PREPARED_VAL_FRACTION = 0.001   # default of prepare_uniref50.py
ROW = 256                       # proteins per row of the table of sums, see sum_rows
# A window (see BatchPlan) holds at least
WINDOW_BYTES = 64 << 20         # so many residues over all its lanes,
READ_BYTES = 256 << 10          # so many residues in each lane, which are read in one piece, and
WINDOW_STEPS = 256              # proteins for so many steps, so that they fill a unit's buckets
BUCKET_RATIO = 0.96             # shortest / longest protein of a bucket: about 2 % padding
EQUAL_WORK = 0.97               # a shape is good if it holds at least this share of the work
WIDEST_STEP = 0.80              # down to this share of its top, a bucket ends at a good shape
# So many more micro-batches come out of a unit than its work fills (measured): one that runs on
# into the next bucket has shorter proteins than it has room for.
TAIL_BATCHES = 2.2
FEW_STEPS = 10                  # of an epoch, below which estimates of its batches are far off
WELL_FILLED = 0.95              # mean share of the fullest micro-batch's work
MEAN_WITHIN = 0.02              # how near the mean of batch_size or tokens is to what was asked for
MEAN_AT_MOST = 0.10             # the same, where nothing nearer is well filled


# ---- the proteins of a run ----

class TrainingData(NamedTuple):
    train: Any                  # Proteins or PreparedProteins
    val: Any                    # Proteins, or None
    source: Any                 # a DemoSource that knows the likelihood of the proteins, or None
    fingerprint: dict           # {"n", "hash"}, equal when a run is resumed
    description: str


def load_data(config, ddp, stage=None):
    """The proteins to train on and to validate with: a collective.

    Args:
        config: its section data has file (a file, a prepared folder, None: demo proteins),
            val_fraction, min_length, demo_proteins.
        stage:  folder on each host to copy a prepared folder to.
    Returns: TrainingData.
    Raises: ValueError or OSError for data that cannot be used.
    """
    data = config.data
    if missing := missing_data(data):
        raise FileNotFoundError(missing)
    prepared = data.file and os.path.isdir(data.file)
    if prepared:
        if ddp.is_main:
            check_prepared(data.file, data.val_fraction, data.min_length)
        barrier(ddp)   # so that what is wrong is said once
        with staged(data.file, stage, stage_prepared, ddp) as copy:
            found = _open_prepared(data.file, copy or data.file)
    elif stage:
        raise ValueError("--stage copies a folder made by prepare_uniref50.py; data.file is "
                         f"{data.file}.")
    else:
        found = _load_file_or_demo(data, config.training.seed, ddp)
    beat(ddp)
    return found


def _open_prepared(name, folder):
    """TrainingData of a prepared folder, read at `folder`."""
    val = PreparedProteins(folder, "val").read_all()
    meta, train = read_meta(folder), PreparedProteins(folder)
    made_of = meta.get("release") or ", ".join(map(str, meta.get("source", ())))
    hashes = [meta["sets"][part]["keys_hash"] for part in ("train", "val")]
    return _training_data(train, val, hashes,
                          f"{name}: {len(train) + len(val):,} proteins, prepared from {made_of}")


def _load_file_or_demo(data, seed, ddp):
    source = None
    if data.file is None:
        source = DemoSource(seed=0)
        proteins = source.sample(data.demo_proteins, seed=seed)
        description = f"{len(proteins):,} demo proteins of a second-order Markov source"
    else:
        proteins, report = _read_file(data, ddp)
        description = f"{data.file}: {report}"
    train, val = _split(proteins, data.val_fraction)
    return _training_data(train, val, [keys_hash(part.keys) for part in (train, val)], description,
                          source)


def _training_data(train, val, hashes, description, source=None):
    fingerprint = {"n": len(train), "hash": "".join(hashes)}
    return TrainingData(train, val if len(val) else None, source, fingerprint, description)


def _read_file(data, ddp):
    """(Proteins, report) of a file; a large one is read with a hint."""
    size = os.path.getsize(data.file)
    if size > LARGE_FILE:
        print0(ddp, f"NOTE: every rank reads {data.file} ({size / 1e9:.1f} GB) and keeps some 0.4 "
                    "GB per million proteins. Prepared once, it starts in seconds and 0.1 GB:\n  "
                    f"{_prepare_command(data, 'FOLDER')} --fasta {shlex.quote(data.file)}   then "
                    "--data FOLDER")
    return read_sequences(data.file, data.min_length, lambda: beat(ddp))


def _split(proteins, val_fraction):
    """(training, validation) proteins."""
    if not val_fraction:
        return proteins, proteins.subset([])
    try:
        return tuple(map(proteins.subset, split_by_hash(proteins, val_fraction)))
    except ValueError as e:
        raise ValueError(f"data.{e} Or set data.val_fraction=0 to train without validation.") from e


def missing_data(data):
    """What to say where data.file is not there, in one line; '' where it is."""
    if not data.file or os.path.exists(data.file):
        return ""
    path = Path(data.file)
    problem = f"data.file {path} does not exist (relative to {Path.cwd()})."
    if os.path.exists(f"{path}.partial"):
        return f"{problem} Its preparing is not finished: give the same command of " \
               "prepare_uniref50.py again."
    if path.suffix:
        return f"{problem} Check the path."
    return f"{problem} Check the path. To download and prepare UniRef50 (13 GB): " \
           f"{_prepare_command(data, path)}; from your own files: the same with --fasta FILE."


def _prepare_command(data, folder):
    """The command that prepares data as this section of a config wants it."""
    options = ""
    if data.val_fraction != PREPARED_VAL_FRACTION:
        options += f" --val_fraction {data.val_fraction}"
    options += f" --min_length {data.min_length}" if data.min_length != 1 else ""
    return f"python prepare_uniref50.py {shlex.quote(str(folder))}{options}"


# ---- the plan of training ----

class Shapes(NamedTuple):
    """Shapes of micro-batches that hold nearly equal work; for the fields see BatchPlan."""
    work: int
    tops: np.ndarray
    sizes: np.ndarray
    expected: float             # number of micro-batches that the set fills
    mean: float                 # of what was asked for, proteins or tokens
    filled: float


class BatchPlan:
    """Which proteins are in which micro-batch of which step, without reading or sorting them all.

    The work of a protein is what its residues and its attention cost: length x (6 x hidden_size +
    length), of the cropped length. The set stands in a random order that is always the same. The
    plan cuts it, in that order, into units of equal work. Each epoch shifts the cuts by a random
    distance and deals the units in random order: to each of `micro_batches` lanes one unit in each
    of `windows` windows. A lane is a place in the global batch. It belongs to no rank: any number
    of ranks trains on the same batches, and a rank reads the units of its own lanes.

    A lane sorts the proteins of its unit into buckets of nearly equal length, shuffles each
    bucket, and cuts them, longest first, into micro-batches of equal work. Each step of the window
    takes one of them from every lane, so that it has long, middling and short proteins.

    Args:
        length_counts: (lengths, counts), int64, of the proteins, see Proteins.length_counts.
        max_length, long: longer proteins are cropped to max_length residues ("crop") or left out
            ("drop").
        micro_batches: micro-batches per global batch = ranks x accumulation.
        batch_size: mean number of proteins in a micro-batch; or
        tokens: mean number of tokens in one, padding included. Exactly one of the two. The mean
            may differ by up to a tenth, where batches are then better filled.
        hidden_size: width of the model, which says how much attention costs beside the rest.
    Fields:
        windows, window_steps, steps_per_epoch: the same in all epochs.
        tops, sizes: shapes of micro-batches: up to sizes[b] proteins, padded to tops[b] residues.
        filled: mean work of a micro-batch as a share of the fullest one's, for which a step waits.
        mean: mean number of what was asked for, proteins or tokens, in a micro-batch.
        work: of a full micro-batch. work_of: of a protein by its length in the file, (longest +
            1,) int64.
        counts: proteins of each cropped length, (longest + 1,) int64. n_long: too long ones.
        work_in_set, residues_in_file: work of the whole set; its residues before cropping.
        proteins, residues: how many are in the set, of the cropped proteins.
        counted_in, asked, available: what a batch is counted in, "proteins" or "tokens"; how many
            of them were asked for, and are in the set.
        left_out: about which share of the proteins an epoch leaves out.
    Raises: ValueError for a budget that cannot hold the longest protein, and for a set that does
        not fill one global batch.
    """

    def __init__(self, length_counts, max_length, micro_batches, batch_size=None, tokens=None,
                 long="crop", hidden_size=768, seed=0):
        budgets = [budget for budget in (tokens, batch_size) if budget is not None]
        if len(budgets) != 1 or budgets[0] < 1 or micro_batches < 1:
            raise ValueError(f"found tokens = {tokens}, batch_size = {batch_size}, micro_batches = "
                             f"{micro_batches}; expected one of tokens and batch_size, and at "
                             f"least 1 of each.")
        self.counted_in, self.budget = (("proteins", "batch_size") if tokens is None else
                                        ("tokens", "tokens_per_batch"))
        self.seed, self.micro_batches = seed, micro_batches
        self.max_length, self.long = max_length, long
        self._count_lengths(*(np.asarray(x, np.int64) for x in length_counts), hidden_size)
        self._choose_shapes(budgets[0])
        self.available = self.residues if tokens else self.proteins

        bytes_each = self.residues_in_file / self.expected      # of a micro-batch, in the file
        fewest_steps = max(WINDOW_STEPS, READ_BYTES / bytes_each,
                           WINDOW_BYTES / (bytes_each * micro_batches))
        self.windows = max(1, int(self.expected / micro_batches / fewest_steps))
        per_unit = self.expected / micro_batches / self.windows
        per_unit += min(TAIL_BATCHES, per_unit / 8)
        per_unit = min(per_unit, self.proteins / micro_batches / self.windows)
        self.window_steps = int(per_unit)
        self.steps_per_epoch = self.windows * self.window_steps
        if self.steps_per_epoch == 0:
            self._refuse_too_few(budgets[0])
        self.left_out = 1 - self.window_steps / per_unit

    def _count_lengths(self, in_file, counts, hidden_size):
        """Work and numbers of proteins by length. in_file: lengths that occur; counts: of each."""
        n = counts.sum()
        if not len(in_file) or in_file.min() < 1:
            raise ValueError(f"found {n:,} proteins, the shortest of {in_file.min(initial=0)} "
                             f"residues; expected some, of at least 1.")
        used = np.arange(in_file.max() + 1).clip(max=self.max_length)   # residues of a protein
        if self.long == "drop":
            used[self.max_length + 1:] = 0
        self.work_of = used * (6 * hidden_size + used)
        self.work_in_set = int((self.work_of[in_file] * counts).sum())
        self.residues_in_file = int((in_file * counts).sum())
        self.counts = np.bincount(used[in_file], counts).astype(np.int64)
        self.counts[0] = 0                          # those that are dropped
        self.n_long = int(counts[in_file > self.max_length].sum())
        self.proteins = int(self.counts.sum())
        self.residues = int((self.counts * np.arange(len(self.counts))).sum())
        if not self.proteins:
            raise ValueError(f"all {n:,} proteins are longer than max_length = "
                             f"{self.max_length:,}, the shortest has {in_file.min():,}; expected "
                             f"some to keep. Raise max_length, or crop.")

    def _choose_shapes(self, asked):
        """Take the shapes whose mean is what was asked for."""
        self.asked = asked
        longest = len(self.counts) - 1
        self.least_work = int(self.work_of[longest])            # one protein is the least that fits
        self.least = math.ceil(self._shapes(self.least_work).mean * 0.99)
        if asked < self.least:
            raise ValueError(f"{self.budget} {asked:,} is less work per micro-batch than the "
                             f"longest protein alone, of {longest:,} residues; expected at least "
                             f"{self.least:,}. Raise training.{self.budget}, or lower "
                             f"data.max_length.")
        self.work, self.tops, self.sizes, self.expected, self.mean, self.filled = self._find(asked)
        self.bucket_of = np.searchsorted(-self.tops, -np.arange(longest + 1), side="right") - 1

    def _find(self, asked):
        """The fullest Shapes of those whose mean is what was asked for."""
        work = self.least_work
        for _ in range(20):                             # towards the mean that was asked for
            work = max(int(work * asked / self._shapes(work).mean), self.least_work)
        nearby = (max(int(work * share), self.least_work) for share in np.linspace(0.85, 1.15, 61))
        tried = [self._shapes(work) for work in nearby]

        def error(shapes):
            return abs(shapes.mean / asked - 1)

        def fullest(within):
            close = [shapes for shapes in tried if error(shapes) <= within]
            return max(close or [min(tried, key=error)], key=lambda shapes: shapes.filled)

        near, far = fullest(MEAN_WITHIN), fullest(MEAN_AT_MOST)
        return far if near.filled < WELL_FILLED <= far.filled else near

    def _shapes(self, work):
        """Shapes of micro-batches of this much work, each for a bucket of lengths up to its top."""
        longest = len(self.counts) - 1
        work_of = self.work_of[:longest + 1]                    # of cropped lengths
        number = work // np.maximum(work_of, 1)                 # proteins that fit, by length
        good = np.flatnonzero(number * work_of >= EQUAL_WORK * work)
        tops = np.array(_tops(longest, good.tolist()))
        members = -np.diff(np.cumsum(self.counts)[tops], append=0)      # proteins of each bucket
        tops, members = tops[members > 0], members[members > 0]
        sizes = np.maximum(number[tops], 1)
        expected = (members / sizes).sum()
        mean = self.proteins / expected
        if self.counted_in == "tokens":
            mean = (members * tops).sum() / expected
        filled = (members * work_of[tops]).sum() / expected / work
        return Shapes(work, tops, sizes, expected, mean, filled)

    def _refuse_too_few(self, asked):
        fills = int(self.expected)
        advice = (f"at most {fills:,} micro-batches per step (ranks x training.accum), "
                  * (fills > 0))
        raise ValueError(f"{self.proteins:,} proteins fill {fills:,} micro-batches of {asked:,} "
                         f"{self.counted_in}; one global batch needs {self.micro_batches:,}. Give "
                         f"{advice}a smaller training.{self.budget}, or more proteins.")

    def identity(self):
        """Text that only plans of the same batches share."""
        plan = [self.work, self.windows, self.window_steps, self.tops.tolist(), self.sizes.tolist()]
        return hashlib.blake2b(json.dumps(plan).encode(), digest_size=8).hexdigest()

    def describe(self):
        """Text on the proteins of an epoch."""
        text = f"{self.proteins:,} for training, {self.residues:,} residues per epoch"
        if self.n_long:
            how = "cropped" if self.long == "crop" else "dropped"
            text += f" ({self.n_long:,} longer than {self.max_length:,}: {how})"
        if self.left_out > 0.005:
            text += f"; each epoch leaves out about {self.left_out:.1%} of them, others each time"
        return text

    def warning(self):
        """Lines on proteins that are mostly cropped, on a mean that is not what was asked for, and
        on batches that are far from full, with numbers that fill them."""
        small = self.steps_per_epoch < FEW_STEPS and self.left_out > 0.005
        lines = [f"  only {self.steps_per_epoch} step(s) per epoch: these numbers are rough, "
                 "batches may be smaller"] if small else []
        if self.long == "crop" and self.n_long > self.proteins / 2:
            lines.append(f"ATTENTION: {self.n_long / self.proteins:.0%} of the proteins are longer "
                         f"than data.max_length, {self.max_length:,}: the model learns parts of them")
        if abs(self.mean / self.asked - 1) > MEAN_WITHIN:
            lines.append(f"  a micro-batch has {round(float(self.mean), 1):,} {self.counted_in} on "
                         f"average, not {self.asked:,}: so ranks wait less for each other")
        if self.filled >= WELL_FILLED or self.micro_batches == 1:
            return lines
        least = self.least
        if self.counted_in == "tokens":
            least = max(least, self.max_length)     # what a config must hold
        good, n_fit = [], int(self.sizes[0])    # so many of the longest proteins fit
        for n in range(n_fit, n_fit + 4):
            asked = max(round(self._shapes(n * self.least_work).mean), least)
            found = self._find(asked)
            if found.filled >= WELL_FILLED and found.expected >= self.micro_batches:
                good.append(str(asked))
        name = f"training.{self.budget}"
        better = f"{name}={' or '.join(good[:2])}" if good else f"a larger {name}"
        return [*lines, "  proteins of some lengths do not fill a micro-batch: a step waits up to "
                f"{1 / self.filled - 1:.0%}", f"  longer. Better: {better}"]

    def place(self, step):
        """(epoch, window of the epoch, step of the window) of a step of the run."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        return (epoch, *divmod(step_of_epoch, self.window_steps))

    def turn(self, step, lane):
        """Which micro-batch of its unit, counted from the longest, a lane gives to a step."""
        epoch, window, step_of_window = self.place(step)
        turns = _shuffled(self.window_steps, "turns", self.seed, epoch, window)
        spacing = lane * self.window_steps // self.micro_batches
        return int(turns[step_of_window] + spacing) % self.window_steps

    def unit(self, epoch, window, lane):
        """Where the unit of a lane begins and ends, as work of the proteins before these places.

        An end beyond work_in_set: the unit goes on at the beginning of the set.
        """
        units, total = self.windows * self.micro_batches, self.work_in_set
        order = _shuffled(units, "units", self.seed, epoch)
        unit = int(order[window * self.micro_batches + lane])
        shift = keyed_seed("shift", self.seed, epoch) % total
        begin, end = unit * total // units, (unit + 1) * total // units
        first = (begin + shift) % total
        return first, first + end - begin

    def cut(self, lengths, *key):
        """Cut the proteins of a unit into `window_steps` micro-batches, longest first.

        lengths: (n,) int64, residues in the file. key: ints, of the shuffles.
        Returns a list of (indices, width to pad to). Micro-batches that are too many are left out
        at random; where there are too few, the largest are halved.
        """
        cropped = np.minimum(lengths, self.max_length)
        taken = np.flatnonzero(self.work_of[lengths])
        bucket = self.bucket_of[cropped[taken]]
        words = random_words(len(taken), "company", self.seed, *key)
        order = np.lexsort((words, bucket))         # by bucket, and at random within it
        starts = _cut(np.bincount(bucket, minlength=len(self.tops)), self.sizes.tolist())
        batches = [(taken[part], int(self.tops[bucket[part[0]]]))
                   for part in np.split(order, starts[1:]) if len(part)]
        if len(batches) > self.window_steps:
            shuffled = _shuffled(len(batches), "left out", self.seed, *key)
            return [batches[k] for k in np.sort(shuffled[:self.window_steps])]
        while len(batches) < self.window_steps:
            sizes = [len(indices) for indices, _ in batches]
            if max(sizes, default=0) < 2:                               # a set of a few proteins
                batches.append((np.zeros(0, np.int64), 1))
                continue
            largest = sizes.index(max(sizes))
            indices, width = batches[largest]
            batches[largest:largest + 1] = [(indices[::2], width), (indices[1::2], width)]
        return batches


def count_rows(n):
    """Number of sums that sum_rows gives for n proteins."""
    return -(-n // ROW) + 1


def sum_rows(proteins, plan):
    """Work and residues before each row of ROW proteins, and before the end.

    proteins: Proteins or PreparedProteins, the set that the plan was made for.
    Returns (2, rows + 1) int64, by one pass over the lengths.
    Raises OSError where these are not the lengths that the plan was made for.
    """
    n, at_a_time = len(proteins), ROW << 12
    sums = np.zeros((2, count_rows(n)), np.int64)
    for first in range(0, n, at_a_time):
        lengths = proteins.lengths_of(first, min(first + at_a_time, n))
        starts = np.arange(0, len(lengths), ROW)
        rows = slice(first // ROW + 1, first // ROW + 1 + len(starts))
        known = np.minimum(lengths, len(plan.work_of) - 1)      # a damaged file may hold anything
        sums[0, rows] = np.add.reduceat(plan.work_of[known], starts)
        sums[1, rows] = np.add.reduceat(lengths, starts)
    sums = np.cumsum(sums, axis=1)
    if sums[:, -1].tolist() != [plan.work_in_set, plan.residues_in_file]:
        raise OSError(f"the lengths of {n:,} proteins add up to {sums[1, -1]:,} residues; expected "
                      f"{plan.residues_in_file:,}, as meta.json says: lengths.bin of the data is "
                      f"damaged. {REMAKE}")
    return sums


class BatchReader:
    """Reads the micro-batches of a BatchPlan: a unit at a time, for the lanes that are asked for.

    proteins: Proteins or PreparedProteins, the set that the plan was made for.
    rows: sum_rows(proteins, plan).
    """

    def __init__(self, plan, proteins, rows):
        self.plan, self.proteins, self.rows = plan, proteins, rows
        self.units = {}                         # lane: ((epoch, window), proteins, micro-batches)

    def micro_batch(self, step, lane):
        """(Proteins, width): what a lane gives to a step of the run, and the length to pad it to.

        Where a lane of a set of a few proteins has nothing left it is one X, which does not count.
        """
        epoch, window, _ = self.plan.place(step)
        if lane not in self.units or self.units[lane][0] != (epoch, window):
            self.units.pop(lane, None)                      # never two units of a lane in memory
            self.units[lane] = (epoch, window), *self._read_unit(epoch, window, lane)
        _, proteins, batches = self.units[lane]
        indices, width = batches[self.plan.turn(step, lane)]
        if not len(indices):
            return Proteins.from_sequences(["X"]), 1
        return proteins.subset(indices).compact(), width

    def item_of(self, step, lane):
        """(step, lane, epoch, proteins, width) of a micro-batch."""
        return step, lane, self.plan.place(step)[0], *self.micro_batch(step, lane)

    def _read_unit(self, epoch, window, lane):
        total = self.plan.work_in_set
        first, last = self.plan.unit(epoch, window, lane)
        spans = [(first, last)] if last <= total else [(first, total), (0, last - total)]
        parts = []
        for first, last in spans:
            (begin, token), (end, _) = self._locate(first), self._locate(last)
            parts.append(self.proteins.read(begin, end, token))
        proteins = Proteins.join(parts)
        return proteins, self.plan.cut(proteins.lengths, epoch, window, lane)

    def _locate(self, work):
        """(index, first residue) of the first protein before which there is this work."""
        n_rows = self.rows.shape[1] - 1
        row = min(int(np.searchsorted(self.rows[0], work, "right")), n_rows) - 1
        end = min((row + 1) * ROW, len(self.proteins))
        lengths = self.proteins.lengths_of(row * ROW, end)
        work_before = np.cumsum(np.append(self.rows[0, row], self.plan.work_of[lengths]))
        place = int(np.searchsorted(work_before, work))
        return row * ROW + place, int(self.rows[1, row] + lengths[:place].sum())


def eval_batches(lengths, tokens):
    """Batches for evaluation, each protein in exactly one, longest first.

    lengths: (n,) residues after cropping. tokens: budget of a batch, padding included.
    Returns a list of int64 index arrays. It does not depend on ranks: rank r of R takes batches r,
    r + R, and so on.
    Raises ValueError for an empty set and for a protein longer than the budget.
    """
    lengths = np.asarray(lengths, np.int64)
    shortest, longest = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
    if shortest < 1 or tokens < longest:
        raise ValueError(f"found {len(lengths):,} proteins, lengths {shortest:,} to {longest:,}, "
                         f"and a budget of {tokens:,} tokens; expected some proteins of at least "
                         f"1 residue, and a budget that holds the longest.")
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths, return_counts=True)
    return np.split(order, _cut(counts, (tokens // -distinct).tolist())[1:])


@functools.lru_cache(maxsize=4)     # each step of a window asks for the same turns
def _shuffled(n, *key):
    """The numbers 0 to n - 1 in an order that the key decides."""
    return np.argsort(random_words(n, *key), kind="stable")


def _tops(longest, good):
    """The longest length of each bucket, from `longest` on down to 1 or less.

    The next lower top is the shortest good length of at least BUCKET_RATIO x top; if there is none,
    the longest good one of at least WIDEST_STEP x top; if there is none, BUCKET_RATIO x top.

    good: ascending lengths; a whole number of such proteins nearly fills a micro-batch.
    """
    tops = [longest]
    while (top := tops[-1]) > 1:
        n_shorter = bisect.bisect_left(good, top)
        in_bucket = bisect.bisect_left(good, BUCKET_RATIO * top)
        if in_bucket < n_shorter:
            tops.append(good[in_bucket])
        elif n_shorter and good[n_shorter - 1] >= WIDEST_STEP * top:
            tops.append(good[n_shorter - 1])
        else:
            tops.append(min(int(BUCKET_RATIO * top), top - 1))
    return tops


def _cut(counts, sizes):
    """Where each piece starts if items, that stand in buckets, are cut into pieces: int64.

    counts: items of each bucket. sizes: items of a piece that starts in that bucket; where the
    bucket has fewer left, the piece goes on into the next one. The last piece has what is left.
    """
    starts, position = [np.zeros(0, np.int64)], 0
    for end, size in zip(np.cumsum(counts).tolist(), sizes):
        if position < end:
            starts.append(np.arange(position, end, size))
            position = int(starts[-1][-1]) + size
    return np.concatenate(starts)
