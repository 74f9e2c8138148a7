"""Whole structures to train on: which chains are designed, which are in which step, tensors.

    items = training_items(structures, numbers)         # one for each structure
    plan = Plan(items, seed=0, micro_batches=4, residues_per_batch=2500)
    step, micro, epoch, indices = plan.item_of(step=7, micro=2)
    draws = Draws(seed=0, epoch=epoch, noise=0.2)
    batch = make_batch(structures, [items[i] for i in indices], draws)

    items = validation_items(structures, numbers)       # one for each group of chains
    for indices in evaluation_batches(items, residues_per_batch=2500):
        batch = make_batch(structures, [items[i] for i in indices])     # no noise, fixed orders

All results depend only on the arguments: never on ranks, workers or the other items of a batch.
No model's weights and no process group here.

The plan of 9 structures, a (long) to c (short), of 1,000, 600 and 300 rows, with residues_per_batch
2,000 and 2 micro-batches a step:

    by classes of lengths, randomly within each     a2 a1 | b3 b1 b4 b2 | c2 c1 c3
    cut, so that each fits its first one's class    [a2 a1] [b3 b1 b4] [b2 c2 c1] [c3]
    pieces of like length make a step               {[b3 b1 b4] [a2 a1]} {[c3] [b2 c2 c1]}
    steps in random order                           {[c3] [b2 c2 c1]} {[b3 b1 b4] [a2 a1]}
"""
import math
from typing import NamedTuple

import numpy as np
import torch

from ddp_setup import seed_for
from mpnn.batches import collate_complexes
from mpnn.model import decoding_order
from proteins.letters import X_ID
from proteins.seeds import content_key, keyed_generator, random_words
from proteins.structure_sets import StructureSet
from proteins.structures import Complex

LENGTH_RATIO = 1.1      # longest / shortest of a class of lengths, within which is shuffled


# ---- items ----

class Backbone(NamedTuple):
    """A structure to train on, or one of its groups of chains to validate with."""
    number: int                             # in the StructureSet
    key: int                                # of the structure and the groups
    length: int                             # rows of all its chains
    groups: tuple[tuple[str, ...], ...]     # names of chains; one group is designed at a time


class Draws(NamedTuple):
    """What random numbers of a batch depend on, beside the structure."""
    seed: int = 0
    epoch: int | None = None    # None: the same at each call, for validation
    noise: float = 0.0          # Angstrom, standard deviation of each coordinate of the backbone


def training_items(structures: StructureSet, numbers: np.ndarray) -> list[Backbone]:
    """A Backbone for each of these structures, with all its groups."""
    return [make_item(structures, int(number), structures.groups[number]) for number in numbers]


def validation_items(structures: StructureSet, numbers: np.ndarray) -> list[Backbone]:
    """A Backbone for each group of these structures, so that validation designs each once."""
    return [make_item(structures, int(number), (group,))
            for number in numbers for group in structures.groups[number]]


def make_item(structures, number, groups):
    """Backbone of the structure of this number."""
    key = content_key(int(structures.keys[number]), groups)
    return Backbone(number, key, int(structures.lengths[number]), groups)


# ---- the plan of an epoch ----

class Plan:
    """Which items are in which micro-batch of which step of a run.

    Every item comes once in an epoch, and no micro-batch is empty. Only where items are so long
    that a micro-batch holds one each, some micro-batches, fewer than a step has, are left out, at
    random.

    Args:
        items:              list of anything with `length`.
        micro_batches:      per global batch = ranks x accumulation.
        residues_per_batch: padded rows of a micro-batch, items x the longest. A longer item is in
            one of its own.
    Fields:
        steps_per_epoch: the same in all epochs.
        left_out:        micro-batches that an epoch leaves out; mostly 0.
        residues:        mean number of rows in a step, without padding.
    Raises: ValueError for fewer items than micro-batches.
    """

    def __init__(self, items: list, seed: int, micro_batches: int, residues_per_batch: int):
        if len(items) < micro_batches:
            raise ValueError(f"found {len(items):,} structures to train on for {micro_batches:,} "
                             "micro-batches per step (ranks x accumulation); expected one for "
                             "each. Lower training.micro_batches, or give more structures.")
        self.seed = seed
        self.micro_batches = micro_batches
        lengths = np.array([item.length for item in items], np.int64)
        classes = np.floor(np.log(lengths) / math.log(LENGTH_RATIO)).astype(np.int64)
        self.by_class = np.argsort(-classes, kind="stable")     # longest first
        self.classes = classes[self.by_class]
        distinct, numbers = np.unique(self.classes, return_inverse=True)
        tops = np.array([lengths[classes == one].max() for one in distinct])[numbers]
        self.sizes = cut(tops, residues_per_batch, micro_batches)   # items of each micro-batch
        self.left_out = len(self.sizes) % micro_batches
        self.steps_per_epoch = len(self.sizes) // micro_batches
        kept = (len(self.sizes) - self.left_out) / len(self.sizes)
        self.residues = lengths.sum() * kept / self.steps_per_epoch
        self.epoch = None       # of which self.plan is
        self.plan = None

    def item_of(self, step: int, micro: int) -> tuple:
        """(step, micro-batch, epoch, indices into items) of a micro-batch."""
        epoch = step // self.steps_per_epoch
        if epoch != self.epoch:
            self.plan = self.plan_of(epoch)
            self.epoch = epoch
        indices = self.plan[step % self.steps_per_epoch][micro]
        return step, micro, epoch, indices.tolist()

    def plan_of(self, epoch: int) -> list:
        """The plan of an epoch: a list of steps, each a list of micro-batches, int64 arrays of
        indices into items."""
        draws = self.random_words("structures", len(self.classes), epoch)
        order = self.by_class[np.lexsort((draws, -self.classes))]
        pieces = np.split(order, np.cumsum(self.sizes)[:-1])
        numbers = np.arange(len(pieces))        # longest first
        is_kept = np.ones(len(pieces), bool)
        draws = self.random_words("left out", len(pieces), epoch)
        is_kept[np.argsort(draws, kind="stable")[:self.left_out]] = False
        steps = numbers[is_kept].reshape(self.steps_per_epoch, self.micro_batches)
        draws = self.random_words("steps", self.steps_per_epoch, epoch)
        steps = steps[np.argsort(draws, kind="stable")]
        return [[pieces[number] for number in step] for step in steps]

    def random_words(self, purpose, n, epoch):
        """(n,) random uint64 for a purpose in an epoch."""
        return random_words(n, seed_for(self.seed, purpose, epoch))


def cut(tops, residues, micro_batches):
    """List of numbers of items, of micro-batches that cut a list of items, longest first.

    As many as whole steps need, if there are items for all; the largest are halved for it.

    tops: of each item, the longest length of its class, which any item of the class may have."""
    sizes = []
    first = 0
    while first < len(tops):
        size = max(1, int(residues // tops[first]))
        sizes.append(min(size, len(tops) - first))
        first += sizes[-1]
    wanted = -(-len(sizes) // micro_batches) * micro_batches
    if wanted <= len(tops):
        while len(sizes) < wanted:
            largest = sizes.index(max(sizes))
            half = sizes[largest] // 2
            sizes[largest:largest + 1] = [sizes[largest] - half, half]
    return sizes


def evaluation_batches(items: list, residues_per_batch: int) -> list[np.ndarray]:
    """Batches for evaluation, independent of ranks: rank r of R takes batches r, r + R, and so on.

    Returns: list of int64 index arrays, each item in exactly one, longest first; padded rows as in
        Plan.
    """
    lengths = np.array([item.length for item in items], np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes = cut(lengths[order], residues_per_batch, micro_batches=1)
    return np.split(order, np.cumsum(sizes)[:-1])


# ---- tensors ----

def make_batch(structures: StructureSet, items: list[Backbone],
               draws: Draws = Draws()) -> dict[str, torch.Tensor]:
    """Tensors of U structures, padded to the longest, L rows.

    The chains of a structure are those of Complex(structure, design=group, fixed=the others), so
    that those which are designed come first. What an item has does not depend on the other items.

    Returns: dict of
        X, S, mask, residue_idx, chain_id: see collate_complexes; X with noise, which each atom that
            is there has anew in each epoch
        chain_M  (U, L) float32, 1 = designed, of the group of chains that the epoch draws
        counted  (U, L) float32, 1 = counts in the loss: designed, resolved, with a known letter
        order    (U, L) int64, decoding order; what is not designed comes first, padding last
    """
    wholes = [choose_complex(structures, item, draws) for item in items]
    batch = collate_complexes(wholes)
    batch["chain_M"] = torch.zeros_like(batch["mask"])
    L = batch["S"].shape[1]
    orders = []
    for row, (item, whole) in enumerate(zip(items, wholes)):
        length = len(whole)
        batch["chain_M"][row, :whole.n_designed] = 1
        designed = batch["chain_M"][row, :length] * batch["mask"][row, :length]
        keys = normal("order", (length,), item, draws)
        order = decoding_order(designed[None], keys[None])[0]
        orders.append(torch.cat([order, torch.arange(length, L)]))
        if draws.noise:
            X = batch["X"][row, :length]
            noise = normal("noise", X.shape, item, draws)
            is_there = (X != 0).any(-1, keepdim=True)       # (length, 4, 1)
            X += (draws.noise * noise * is_there).float()
    batch["order"] = torch.stack(orders)
    batch["counted"] = batch["chain_M"] * batch["mask"] * (batch["S"] != X_ID)
    return batch


def choose_complex(structures, item, draws):
    """Complex of a structure, in which one of its groups is designed."""
    chosen = seed_for(draws.seed, "chains", item.key, draws.epoch) % len(item.groups)
    group = item.groups[chosen]
    structure = structures.structure(item.number)
    return Complex(structure, group, [name for name in structure.chains if name not in group])


def normal(purpose, shape, item, draws):
    """Normal random numbers of an item, float64."""
    generator = keyed_generator(draws.seed, purpose, item.key, draws.epoch)
    return torch.randn(shape, dtype=torch.float64, generator=generator)
