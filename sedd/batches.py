"""Decides which batch of training or evaluation has which proteins, and reads it.

    plan = BatchPlan(train.length_counts(), 512, micro_batches=4, tokens=8192)
    reader = BatchReader(plan, train, sum_rows(train, plan))
    proteins, width = reader.micro_batch(step, lane)     # one of 4 lanes, on any number of ranks
    for indices in batches_within(val.lengths, tokens=8192): ...
    batch = to_device(batch, device, torch.float32)

A plan depends on the lengths of the proteins, the size of the global batch and a seed; never on
ranks, workers or restarts. It is made from counts of lengths; only the reader reads proteins.
"""

import bisect
import functools
import hashlib
import json
import math
from typing import NamedTuple

import numpy as np
import torch

from ddp_setup import seed_for
from proteins.seeds import random_words
from proteins.sequences import Proteins
from sedd.prepared import REMAKE

ROW = 256                       # proteins per row of the table that sum_rows makes
# Least size of a window (see BatchPlan)
WINDOW_BYTES = 64 << 20         # residues in all lanes together
READ_BYTES = 256 << 10          # residues in each lane, which are read at once
WINDOW_STEPS = 256              # steps, so that a unit has proteins enough for all its buckets
BUCKET_RATIO = 0.96             # shortest / longest protein of a bucket: about 2 % padding
EQUAL_WORK = 0.97               # proteins of a good length fill this share of a micro-batch
WIDEST_STEP = 0.80              # shortest / longest of a bucket that ends at a good length
# A unit gives about this many micro-batches more than its work would fill (measured): one that
# begins in one bucket and ends in the next, of shorter proteins, is not full.
TAIL_BATCHES = 2.2
FEW_STEPS = 10                  # per epoch; with fewer, the estimated number of batches is far off
MOST_WHOLE = 0.9                # of the proteins, which a longer max_length would not crop
WELL_FILLED = 0.95              # least mean work of micro-batches, as a share of a full one's
MEAN_WITHIN = 0.02              # relative error of the mean batch_size or tokens that is tolerated
MEAN_AT_MOST = 0.10             # the same, if micro-batches are well filled only then


# ---- training ----

class Shapes(NamedTuple):
    """A shape of micro-batch for each bucket, of nearly equal work; other fields: see BatchPlan."""
    work: int
    tops: np.ndarray
    sizes: np.ndarray
    expected: float             # number of micro-batches that the whole set fills
    mean: float
    filled: float


class BatchPlan:
    """Which proteins are in which micro-batch of which step, without reading or sorting them all.

    The work of a protein is the cost of its residues and of their attention: length x (6 x
    hidden_size + length), with the cropped length. The set has a fixed random order. The plan cuts
    it, in this order, into units of equal work. It divides an epoch into `windows` windows, each of
    `window_steps` steps, and gives each of `micro_batches` lanes one unit per window. Every epoch
    shifts the cuts by a random distance and gives out the units in another random order. A lane is
    a position in the global batch. It belongs to no rank: any number of ranks trains on the same
    batches, and a rank reads only the units of the lanes that it computes.

    The proteins of a unit are sorted into buckets of nearly equal length, shuffled within each
    bucket, and cut, longest first, into micro-batches of equal work. Each step of the window takes
    one micro-batch from every lane: long proteins from some, short ones from others.

    With micro_batches = 2, windows = 2, window_steps = 4, in one epoch:

        the set, in its order    d d|a a a a a a|b b b b b b|c c c c c c|d d d d
                                    4 units of equal work; the cuts are shifted by a random
                                    distance, so a unit may go round the end, as d does

                        window 0                      window 1
                        step  0   1   2   3           step  4   5   6   7
        lane 0  unit c       c2  c0  c3  c1   unit b       b1  b3  b0  b2
        lane 1  unit a       a0  a2  a1  a3   unit d       d3  d1  d2  d0
                              |
                              the global batch of step 0: c2 and a0, by one rank or by two

        unit c, longest first    ======== ========|===== ===== =====|== == == == == ==|= = = = ...
        in micro-batches         c0                c1                c2                c3

    Args:
        length_counts: (lengths, counts), int64, of the proteins, see Proteins.length_counts.
        max_length, long: longer proteins are cropped to max_length residues ("crop") or left out
            ("drop").
        micro_batches: micro-batches per global batch = ranks x accumulation.
        batch_size: mean number of proteins in a micro-batch; or
        tokens: mean number of tokens in one, padding included. Exactly one of the two. The plan's
            mean may differ by a tenth if micro-batches are then well filled.
        hidden_size: width of the model, which sets the cost of attention relative to the rest.
    Fields:
        windows, window_steps, steps_per_epoch: the same in all epochs.
        tops, sizes: bucket b has micro-batches of up to sizes[b] proteins, padded to tops[b].
        filled: mean work of a micro-batch as a share of a full one's, for which a step waits.
        mean: mean number of proteins or tokens (see counted_in) in a micro-batch.
        work: work of a full micro-batch. work_of: work of a protein, indexed by its length in the
            file, (longest + 1,) int64; 0 if it is dropped.
        counts: proteins of each cropped length, (longest + 1,) int64. n_long: longer ones.
        in_file, counts_in_file: length_counts.
        work_in_set, residues_in_file: work of the whole set; its residues before cropping.
        proteins, residues: their numbers in the set, after cropping or dropping.
        counted_in: the unit of batch size, "proteins" or "tokens". asked, available: how many of
            these the caller asked for; how many are in the set.
        left_out: estimated share of the proteins that an epoch leaves out.
    Raises: ValueError if a micro-batch cannot hold the longest protein, or the set does not fill
        one global batch.
    """

    def __init__(self, length_counts, max_length,   # noqa: PLR0913  (what a plan depends on)
                 micro_batches, batch_size=None, tokens=None, long="crop", hidden_size=768,
                 seed=0):
        budgets = [budget for budget in (tokens, batch_size) if budget is not None]
        if len(budgets) != 1 or budgets[0] < 1 or micro_batches < 1:
            raise ValueError(f"found tokens = {tokens}, batch_size = {batch_size}, micro_batches = "
                             f"{micro_batches}; expected one of tokens and batch_size, and at "
                             f"least 1 of each.")
        self.counted_in = "proteins" if tokens is None else "tokens"
        self.key = "batch_size" if tokens is None else "tokens_per_batch"
        self.seed = seed
        self.micro_batches = micro_batches
        self.max_length = max_length
        self.long = long
        in_file, counts = length_counts
        self.hidden_size = hidden_size
        self.in_file = np.asarray(in_file, np.int64)
        self.counts_in_file = np.asarray(counts, np.int64)
        self._count_lengths(self.in_file, self.counts_in_file, hidden_size)
        self._choose_shapes(budgets[0])
        self.available = self.residues if tokens else self.proteins

        batch_bytes = self.residues_in_file / self.expected     # of a micro-batch, in the file
        fewest_steps = max(WINDOW_STEPS, READ_BYTES / batch_bytes,
                           WINDOW_BYTES / (batch_bytes * micro_batches))
        self.windows = max(1, int(self.expected / micro_batches / fewest_steps))
        unit_batches = self.expected / micro_batches / self.windows     # micro-batches of a unit
        unit_batches += min(TAIL_BATCHES, unit_batches / 8)
        unit_batches = min(unit_batches, self.proteins / micro_batches / self.windows)
        self.window_steps = int(unit_batches)
        self.steps_per_epoch = self.windows * self.window_steps
        if self.steps_per_epoch == 0:
            self._refuse_too_few(budgets[0])
        self.left_out = 1 - self.window_steps / unit_batches

    def _count_lengths(self, in_file, counts, hidden_size):
        """Set work and numbers of proteins. in_file: lengths that occur; counts: of each."""
        n = counts.sum()
        if not len(in_file) or in_file.min() < 1:
            raise ValueError(f"found {n:,} proteins, the shortest of {in_file.min(initial=0)} "
                             f"residues; expected some, of at least 1.")
        kept = np.arange(in_file.max() + 1).clip(max=self.max_length)   # residues, by length
        if self.long == "drop":
            kept[self.max_length + 1:] = 0
        self.work_of = _work(kept, hidden_size)
        self.work_in_set = int((self.work_of[in_file] * counts).sum())
        self.residues_in_file = int((in_file * counts).sum())
        self.counts = np.bincount(kept[in_file], counts).astype(np.int64)
        self.counts[0] = 0                          # dropped proteins are not in the set
        self.n_long = int(counts[in_file > self.max_length].sum())
        self.proteins = int(self.counts.sum())
        self.residues = int((self.counts * np.arange(len(self.counts))).sum())
        if not self.proteins:
            raise ValueError(f"all {n:,} proteins are longer than max_length = "
                             f"{self.max_length:,}, the shortest has {in_file.min():,}; expected "
                             f"some to keep. Raise max_length, or crop.")

    def _choose_shapes(self, asked):
        """Set the shapes of micro-batches, whose mean size is near `asked`."""
        self.asked = asked
        longest = len(self.counts) - 1
        self.least_work = int(self.work_of[longest])    # a micro-batch must hold one such protein
        self.least = math.ceil(self._shapes(self.least_work).mean * 0.99)
        if asked < self.least:
            raise ValueError(f"{self.key} {asked:,} is less work per micro-batch than the "
                             f"longest protein alone, of {longest:,} residues; expected at least "
                             f"{self.least:,}. Raise training.{self.key}, or lower "
                             f"data.max_length.")
        best = self._best_shapes(asked)
        self.work = best.work
        self.tops = best.tops
        self.sizes = best.sizes
        self.expected = best.expected
        self.mean = best.mean
        self.filled = best.filled
        self.bucket_of = np.searchsorted(-self.tops, -np.arange(longest + 1), side="right") - 1

    def _best_shapes(self, asked):
        """The Shapes with the fullest micro-batches among those whose mean size is near `asked`. If
        even these are not well filled: the nearest that are, at most MEAN_AT_MOST away."""
        work = self.least_work
        for _ in range(20):                             # approach the work whose mean is `asked`
            work = max(int(work * asked / self._shapes(work).mean), self.least_work)
        tried = []
        for share in np.linspace(0.85, 1.15, 61):
            tried.append(self._shapes(max(int(work * share), self.least_work)))

        def error(shapes):
            return abs(shapes.mean / asked - 1)

        near = [shapes for shapes in tried if error(shapes) <= MEAN_WITHIN]
        if not near:
            near = [min(tried, key=error)]
        best = max(near, key=lambda shapes: shapes.filled)
        if best.filled >= WELL_FILLED:
            return best
        full = [shapes for shapes in tried
                if shapes.filled >= WELL_FILLED and error(shapes) <= MEAN_AT_MOST]
        return min(full, key=error, default=best)

    def _shapes(self, work):
        """Shapes of micro-batches of this much work: one for each bucket of lengths."""
        longest = len(self.counts) - 1
        work_of = self.work_of[:longest + 1]                    # of cropped lengths
        number = work // np.maximum(work_of, 1)                 # proteins that fit, by length
        good = np.flatnonzero(number * work_of >= EQUAL_WORK * work)
        tops = np.array(_bucket_tops(longest, good.tolist()))
        members = -np.diff(np.cumsum(self.counts)[tops], append=0)      # proteins of each bucket
        tops = tops[members > 0]
        members = members[members > 0]
        sizes = np.maximum(number[tops], 1)
        expected = (members / sizes).sum()
        mean = self.proteins / expected
        if self.counted_in == "tokens":
            mean = (members * tops).sum() / expected
        filled = (members * work_of[tops]).sum() / expected / work
        return Shapes(work, tops, sizes, expected, mean, filled)

    def _refuse_too_few(self, asked):
        fills = int(self.expected)
        advice = ""
        if fills:
            advice = f"at most {fills:,} micro-batches per step (ranks x training.accum), "
        raise ValueError(f"{self.proteins:,} proteins fill {fills:,} micro-batches of {asked:,} "
                         f"{self.counted_in}; one global batch needs {self.micro_batches:,}. Give "
                         f"{advice}a smaller training.{self.key}, or more proteins.")

    def identity(self):
        """Hash of the sizes of windows and micro-batches, as text."""
        plan = [self.work, self.windows, self.window_steps, self.tops.tolist(), self.sizes.tolist()]
        return hashlib.blake2b(json.dumps(plan).encode(), digest_size=8).hexdigest()

    def describe(self):
        """Text about the proteins of an epoch, and the mean micro-batch if it is not as asked."""
        text = f"{self.proteins:,} for training, {self.residues:,} residues per epoch"
        if self.n_long:
            how = "cropped" if self.long == "crop" else "dropped"
            text += f" ({self.n_long:,} longer than {self.max_length:,}: {how})"
        if self.left_out > 0.005:
            text += f"; each epoch leaves out about {self.left_out:.1%} of them, others each time"
        if abs(self.mean / self.asked - 1) > MEAN_WITHIN:
            text += (f"; a micro-batch has {round(float(self.mean), 1):,} {self.counted_in} on "
                     f"average, not {self.asked:,}")
        return text

    def warning(self):
        """Lines that warn: few steps per epoch; most proteins cropped; micro-batches that are far
        from full."""
        lines = []
        if self.steps_per_epoch < FEW_STEPS and self.left_out > 0.005:
            lines.append(f"  few steps per epoch ({self.steps_per_epoch}): what an epoch leaves "
                         "out is a rough estimate, and batches may be smaller")
        if self.long == "crop" and self.n_long > self.proteins / 2:
            longest, work = self.longer_max_length()
            lines.append(f"ATTENTION: {self.n_long / self.proteins:.0%} of the proteins are longer "
                         f"than data.max_length, {self.max_length:,}: the model sees parts of "
                         f"them. data.max_length={longest} keeps {MOST_WHOLE:.0%} whole, and an "
                         f"epoch is then {work:.1f} times the work")
        if self.filled < WELL_FILLED and self.micro_batches > 1:
            lines.append("  proteins of some lengths do not fill a micro-batch: a step takes up to "
                         f"{1 / self.filled - 1:.0%}")
            lines.append(f"  longer. Better: a larger training.{self.key}, where memory allows it")
        return lines

    def longer_max_length(self):
        """(max_length that would keep MOST_WHOLE of the proteins whole, work of the set with it as
        a multiple of what it is now)."""
        order = np.argsort(self.in_file)
        up_to = np.cumsum(self.counts_in_file[order])      # proteins up to each length
        place = np.searchsorted(up_to, MOST_WHOLE * up_to[-1])
        longest = int(self.in_file[order][place])
        kept = self.in_file.clip(max=longest)
        work = (_work(kept, self.hidden_size) * self.counts_in_file).sum()
        return longest, float(work / self.work_in_set)

    def place(self, step):
        """Where a step of the run is: (epoch, window in the epoch, step in the window)."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        window, step_of_window = divmod(step_of_epoch, self.window_steps)
        return epoch, window, step_of_window

    def turn(self, step, lane):
        """Index of the micro-batch that a lane gives to a step, in its unit's list (see cut)."""
        epoch, window, step_of_window = self.place(step)
        turns = _shuffled(self.window_steps, "turns", self.seed, epoch, window)
        spacing = lane * self.window_steps // self.micro_batches    # a step has long and short
        return int(turns[step_of_window] + spacing) % self.window_steps

    def unit(self, epoch, window, lane):
        """(begin, end) of the unit of a lane. A place in the set is given as the total work of the
        proteins before it. If end is beyond work_in_set, the unit continues at the set's beginning.
        """
        units = self.windows * self.micro_batches
        total = self.work_in_set
        order = _shuffled(units, "units", self.seed, epoch)
        unit = int(order[window * self.micro_batches + lane])
        shift = seed_for("shift", self.seed, epoch) % total
        begin = unit * total // units
        end = (unit + 1) * total // units
        first = (begin + shift) % total
        return first, first + end - begin

    def cut(self, lengths, *key):
        """Cut the proteins of a unit into `window_steps` micro-batches, longest first.

        lengths: (n,) int64, residues in the file. key: ints that seed the shuffles.
        Returns a list of (indices, width to pad to). If there are too many micro-batches, random
        ones are left out; if there are too few, the largest are halved.
        """
        cropped = np.minimum(lengths, self.max_length)
        taken = np.flatnonzero(self.work_of[lengths])       # without dropped proteins
        bucket = self.bucket_of[cropped[taken]]
        words = random_words(len(taken), seed_for("company", self.seed, *key))
        order = np.lexsort((words, bucket))         # by bucket, and at random within it
        starts = _piece_starts(np.bincount(bucket, minlength=len(self.tops)), self.sizes.tolist())
        batches = [(taken[part], int(self.tops[bucket[part[0]]]))
                   for part in np.split(order, starts[1:]) if len(part)]
        if len(batches) > self.window_steps:
            shuffled = _shuffled(len(batches), "left out", self.seed, *key)
            return [batches[k] for k in np.sort(shuffled[:self.window_steps])]
        while len(batches) < self.window_steps:
            _halve_largest(batches)
        return batches


def count_rows(n):
    """Length of the sums that sum_rows gives for n proteins."""
    return -(-n // ROW) + 1


def sum_rows(proteins, plan):
    """Total work and residues of the proteins before each row of ROW proteins, and of all.

    proteins: Proteins or PreparedProteins, the set that the plan was made for.
    Reads all lengths once. Returns (2, rows + 1) int64.
    Raises OSError where these are not the lengths that the plan was made for.
    """
    n = len(proteins)
    at_a_time = ROW << 12
    sums = np.zeros((2, count_rows(n)), np.int64)
    for first in range(0, n, at_a_time):
        lengths = proteins.lengths_of(first, min(first + at_a_time, n))
        starts = np.arange(0, len(lengths), ROW)
        rows = slice(first // ROW + 1, first // ROW + 1 + len(starts))
        known = np.minimum(lengths, len(plan.work_of) - 1)      # a damaged file may have others
        sums[0, rows] = np.add.reduceat(plan.work_of[known], starts)
        sums[1, rows] = np.add.reduceat(lengths, starts)
    sums = np.cumsum(sums, axis=1)
    if sums[:, -1].tolist() != [plan.work_in_set, plan.residues_in_file]:
        raise OSError(f"the lengths of {n:,} proteins add up to {sums[1, -1]:,} residues; expected "
                      f"{plan.residues_in_file:,}, as meta.json says: lengths.bin of the data is "
                      f"damaged. {REMAKE}")
    return sums


class Unit(NamedTuple):
    """What a lane gives to the steps of a window."""
    epoch: int
    window: int
    proteins: Proteins
    batches: list               # of (indices of proteins, width to pad to), see BatchPlan.cut


class BatchReader:
    """Reads the micro-batches of a BatchPlan. Keeps one unit of each requested lane in memory.

    proteins: Proteins or PreparedProteins, the set that the plan was made for.
    rows: sum_rows(proteins, plan).
    """

    def __init__(self, plan, proteins, rows):
        self.plan = plan
        self.proteins = proteins
        self.rows = rows
        self.units = {}                         # lane: Unit

    def micro_batch(self, step, lane):
        """(Proteins, width) that a lane gives to a step of the run; width: the length to pad to.

        A lane that has no protein left, in a very small set, gives one X, which does not count.
        """
        epoch, window, _ = self.plan.place(step)
        unit = self.units.get(lane)
        if unit is None or (unit.epoch, unit.window) != (epoch, window):
            unit = None
            self.units.pop(lane, None)      # first, so that memory never holds both units
            unit = self._read_unit(epoch, window, lane)
            self.units[lane] = unit
        indices, width = unit.batches[self.plan.turn(step, lane)]
        if not len(indices):
            return Proteins.from_sequences(["X"]), 1
        return unit.proteins.subset(indices).compact(), width

    def item_of(self, step, lane):
        """(step, lane, epoch, proteins, width): an item for MicroBatchDataset."""
        epoch, _, _ = self.plan.place(step)
        proteins, width = self.micro_batch(step, lane)
        return step, lane, epoch, proteins, width

    def _read_unit(self, epoch, window, lane):
        total = self.plan.work_in_set
        first, last = self.plan.unit(epoch, window, lane)
        spans = [(first, last)] if last <= total else [(first, total), (0, last - total)]
        parts = []
        for start, stop in spans:       # in work, see plan.unit
            begin, residue = self._locate(start)
            end, _ = self._locate(stop)
            parts.append(self.proteins.read(begin, end, residue))
        proteins = Proteins.join(parts)
        batches = self.plan.cut(proteins.lengths, epoch, window, lane)
        return Unit(epoch, window, proteins, batches)

    def _locate(self, work):
        """(index, first residue) of the first protein that has at least this work before it."""
        n_rows = self.rows.shape[1] - 1
        row = min(int(np.searchsorted(self.rows[0], work, "right")), n_rows) - 1
        end = min((row + 1) * ROW, len(self.proteins))
        lengths = self.proteins.lengths_of(row * ROW, end)
        work_before = np.cumsum(np.append(self.rows[0, row], self.plan.work_of[lengths]))
        place = int(np.searchsorted(work_before, work))
        return row * ROW + place, int(self.rows[1, row] + lengths[:place].sum())


# ---- evaluation, and any batch ----

def batches_within(lengths, tokens):
    """Batches within a budget of tokens, each protein in exactly one, longest first.

    lengths: (n,) residues after cropping. tokens: budget of a batch, padding included.
    Returns a list of int64 index arrays, the same on every rank: rank r of R takes batches r, r + R
    and so on.
    Raises ValueError for an empty set and for a protein longer than the budget.
    """
    lengths = np.asarray(lengths, np.int64)
    shortest = lengths.min() if len(lengths) else 0
    longest = lengths.max() if len(lengths) else 0
    if shortest < 1 or tokens < longest:
        raise ValueError(f"found {len(lengths):,} proteins, lengths {shortest:,} to {longest:,}, "
                         f"and a budget of {tokens:,} tokens; expected some proteins of at least "
                         f"1 residue, and a budget that holds the longest.")
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths, return_counts=True)
    return np.split(order, _piece_starts(counts, (tokens // -distinct).tolist())[1:])


def to_device(batch, device, dtype):
    """A batch, a dict, on the device.

    Its noise levels, sigma and dsigma, get the model's dtype, but float32 at least.
    """
    moved = {}
    for name, value in batch.items():
        moved[name] = value.to(device, non_blocking=True) if torch.is_tensor(value) else value
    exact = torch.promote_types(dtype, torch.float32)
    moved["sigma"] = moved["sigma"].to(exact)
    moved["dsigma"] = moved["dsigma"].to(exact)
    return moved


# ---- helpers ----

def _work(residues, hidden_size):
    """What an array of lengths costs, up to a factor: products of weights, and attention."""
    return residues * (6 * hidden_size + residues)


@functools.lru_cache(maxsize=4)     # all steps of a window use the same order
def _shuffled(n, *key):
    """The numbers 0 to n - 1 in a random order, seeded by the key."""
    return np.argsort(random_words(n, seed_for(*key)), kind="stable")


def _bucket_tops(longest, good):
    """The longest length of each bucket, from `longest` down to 1 or less.

    The next lower top is the shortest good length of at least BUCKET_RATIO x top; if there is none,
    the longest good one of at least WIDEST_STEP x top; if there is none, BUCKET_RATIO x top.

    good: ascending lengths. A whole number of proteins of such a length nearly fills a micro-batch.
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


def _piece_starts(counts, sizes):
    """Cut a list of items, sorted by bucket, into pieces. Returns the start of each piece, int64.

    counts: items of each bucket. sizes: items of a piece that starts in that bucket. If the bucket
    has fewer left, the piece continues into the next bucket. The last piece has what is left.
    """
    starts = [np.zeros(0, np.int64)]
    position = 0
    for end, size in zip(np.cumsum(counts).tolist(), sizes):
        if position < end:
            starts.append(np.arange(position, end, size))
            position = int(starts[-1][-1]) + size
    return np.concatenate(starts)


def _halve_largest(batches):
    """Halve the largest of a unit's micro-batches, see BatchPlan.cut, or append an empty one if all
    have less than 2 proteins. Changes the list."""
    sizes = [len(indices) for indices, _ in batches]
    if max(sizes, default=0) < 2:       # the unit has fewer proteins than steps
        batches.append((np.zeros(0, np.int64), 1))
        return
    largest = sizes.index(max(sizes))
    indices, width = batches[largest]
    batches[largest:largest + 1] = [(indices[::2], width), (indices[1::2], width)]
