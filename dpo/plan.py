"""Which items, pairs or proteins with their variants, are in which step, on any number of ranks.

    plan = plan_epoch(train, seed=0, epoch=0, micro_batches=4, batch_size=8)
    for indices in plan[step]: ...                          # 4 micro-batches on any number of ranks
    rows = rows_on_ranks(val, 2, compute, 8, "validation", ddp)     # (n, 2), equal on all ranks

An item is anything with `length`, the residues that its cost depends on, and `shared_key`, equal
for items that are cheaper together. All results depend only on the arguments, so that every rank
plans the same. No model here.

The plan of 12 pairs on structures a (short) to d (long), with 2 micro-batches a step:

    pairs, by length, by structure, then randomly      a2 a1 a4 a3 | b3 b1 b2 c1 | d2 d1 d4 d3
    cut into pieces of equal size                      [a2 a1] [a4 a3] [b3 b1] [b2 c1] [d2 d1] ...
    pieces of like length make a step                  {[a4 a3] [a2 a1]} {[b3 b1] [b2 c1]} ...
    steps in random order                              {[b3 b1] [b2 c1]} {[d4 d3] [d2 d1]} ...
                                            with 2 ranks: rank 0, rank 1; with 1: both, accumulated
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from ddp_setup import Ddp, all_sum
from ddp_watch import note_progress
from proteins.seeds import FOR_LENGTHS, FOR_PAIRS, FOR_STEPS, random_words
from training.log import show_progress

LENGTH_RATIO = 1.1      # longest / shortest of a class of lengths, within which is shuffled


def plan_epoch(items: list, seed: int, epoch: int, micro_batches: int, batch_size: int) -> list:
    """Decide which items are in which micro-batch of which step of an epoch.

    The plan depends only on the arguments: every rank makes the same plan and takes its own
    micro-batches from it.

    Items are sorted by length (in classes of ratio LENGTH_RATIO), then by shared_key, then
    randomly. The sorted list is cut into micro-batches of equal numbers of items, give or take one:
    so a micro-batch has few structures to encode and little padding. A step has micro-batches of
    similar length, so that ranks have about equal work; steps come in random order. Every item
    comes once in an epoch, and no micro-batch is empty. Only with batch_size 1 random items, fewer
    than a global batch, are left out. The number of steps is the same in all epochs.

    Args:
        items:         list of items.
        seed, epoch:   int.
        micro_batches: micro-batches per global batch = ranks x accumulation.
        batch_size:    most items in a micro-batch.
    Returns: list of steps, each a list of micro-batches: int64 arrays of indices into items.
    Raises: ValueError for fewer items than micro-batches.
    """
    n = len(items)
    if n < micro_batches:
        raise ValueError(f"found {n:,} pairs (of loss.unit table: proteins) for {micro_batches:,} "
                         "micro-batches per step (ranks x accumulation); expected one for each. "
                         "Use fewer ranks or less accumulation (training.accum=1), or give more. "
                         "For a table of one protein: configs/dpo_own_table.yaml.")
    n_steps = min(-(-n // (micro_batches * batch_size)), n // micro_batches)
    n_pieces = n_steps * micro_batches
    shuffled = np.argsort(random_words(n, [FOR_PAIRS, seed, epoch]), kind="stable")
    shuffled = shuffled[:n_pieces * batch_size]
    lengths = [items[i].length for i in shuffled]
    bucket = np.floor(np.log(lengths) / math.log(LENGTH_RATIO))
    _, first, group = np.unique([items[i].shared_key for i in shuffled], return_index=True,
                                return_inverse=True)
    # By length, then by shared_key; a stable sort keeps the random order among equal ones.
    order = np.lexsort((first[group], bucket))
    bounds = np.arange(n_pieces + 1) * len(shuffled) // n_pieces
    pieces = [shuffled[order[start:end]] for start, end in zip(bounds, bounds[1:])]
    longest = np.maximum.reduceat(bucket[order], bounds[:-1])
    tie_breakers = random_words(n_pieces, [FOR_LENGTHS, seed, epoch])
    by_length = np.lexsort((tie_breakers, longest)).reshape(n_steps, micro_batches)
    draws = random_words(n_steps, [FOR_STEPS, seed, epoch])
    steps = by_length[np.argsort(draws, kind="stable")]
    return [[pieces[k] for k in step] for step in steps]


class Plan:
    """Which items are in which micro-batch of which step of a run. Arguments: see plan_epoch."""

    def __init__(self, items: list, seed: int, micro_batches: int, batch_size: int):
        self.items = items
        self.seed = seed
        self.micro_batches = micro_batches
        self.batch_size = batch_size
        self.epoch = None       # of which self.plan is
        self.plan = None
        self.steps_per_epoch = len(self.plan_of(0))

    def plan_of(self, epoch: int) -> list:
        """The plan of an epoch. The last one asked for is kept."""
        if epoch != self.epoch:
            self.plan = plan_epoch(self.items, self.seed, epoch, self.micro_batches,
                                   self.batch_size)
            self.epoch = epoch
        return self.plan

    def item_of(self, step: int, micro: int) -> tuple:
        """(step, micro-batch, epoch, indices into items) of a micro-batch."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return step, micro, epoch, self.plan_of(epoch)[at][micro].tolist()


def eval_batches(items: list, batch_size: int) -> list[np.ndarray]:
    """Batches for evaluation, independent of ranks: rank r of R takes batches r, r + R, and so on.

    Returns: list of int64 index arrays, each item in exactly one: longest first, items of one
        shared_key together.
    """
    order = sorted(range(len(items)),
                   key=lambda i: (-items[i].length, items[i].shared_key, i))
    return [np.array(order[first:first + batch_size], np.int64)
            for first in range(0, len(order), batch_size)]


def rows_on_ranks(
        items: list, n_columns: int, compute: Callable, batch_size: int, what: str,
        ddp: Ddp) -> torch.Tensor:
    """(n, n_columns) float64 on the CPU, equal for any number of ranks: each item is computed on
    one rank, in a batch that does not depend on the ranks. A collective.

    compute: function (indices) -> rows of these items. what: for the progress bar."""
    rows = torch.zeros(len(items), n_columns, dtype=torch.float64)
    batches = eval_batches(items, batch_size)
    mine = batches[ddp.rank::ddp.world_size]
    for indices in show_progress(mine, ddp, what):
        rows[indices] = compute(indices.tolist()).double().cpu()
        note_progress()
    return all_sum(rows, ddp)
