"""Measured mutations as training data: proteins, each with the set of its variants.

    variant_set = make_variant_set(protein, config.table)
    batch = make_batch(sets, indices, config, epoch)            # batch["proteins"]: DrawnVariants

A micro-batch is some proteins. Of each, pairs of variants are drawn anew in each epoch, and the
variants that are in one are scored. Values are compared within a protein alone, so proteins may be
measured in other units. Of a table of binding, a protein is a complex with its partners alone
(mpnn/binding.py). No model here.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_setup import seed_for
from mpnn.binding import split_by_partner
from mpnn.variants import VariantIndex, index_variants
from proteins.correlation import LEAST, spearman
from proteins.mutations import Protein, measured_values
from proteins.seeds import FOR_COUPLES, FOR_SEVERAL, content_key, random_words
from proteins.structures import Complex

ALL_COUNT = 50      # variants of a protein from which it counts as 1; fewer: by their square root


# ---------------------------------------------------------------- a protein with its variants
class VariantSet:
    """A protein with the measured values of its variants.

    variants: N lists of (row of the complex, letter). The wild type is no variant.
    values:   (N + 1,) float64, higher is better; the last is that of the wild type, or nan: it is
              in no pair.
    weight:   of the protein in means over proteins.
    partners: of a table of binding the two partners alone, whose scores are subtracted; else ().
    groups:   texts; proteins that have one in common are on one side of a split.
    key:      hash of what is scored, and of the values, for seeds. shared_key: of the complex.
    """

    def __init__(self, name: str, structure: Complex, variants: list,  # noqa: PLR0913  (all of it)
                 values: np.ndarray, partners: Sequence[Complex] = (),
                 groups: Sequence[str] = ()):
        self.name = name
        self.complex = structure
        self.shared_key = structure.key
        self.variants = variants
        self.values = values
        self.partners = tuple(partners)
        self.groups = tuple(groups)
        self.weight = math.sqrt(min(len(variants) / ALL_COUNT, 1))
        self.key = content_key(structure.key, repr(variants), values,
                               *(partner.key for partner in partners))

    @property
    def structures(self) -> tuple[Complex, ...]:
        """All that is scored."""
        return (self.complex, *self.partners)

    @property
    def length(self) -> int:
        """Rows of all that is scored."""
        return sum(map(len, self.structures))


def make_variant_set(protein: Protein, table: Any) -> VariantSet:
    """The VariantSet of a protein. Rows of one variant count by their mean. The wild type's value
    is that of its row, or else the config's.

    table: the config's section."""
    measured = measured_values(protein)
    variants = sorted(measured)
    values = [statistics.fmean(measured[variant]) for variant in variants]
    wild_type = protein.wild_type
    if math.isnan(wild_type) and table.wild_type is not None:
        wild_type = table.wild_type
    sign = -1.0 if table.better == "lower" else 1.0
    return VariantSet(protein.name, protein.complex, [list(each) for each in variants],
                      sign * np.array([*values, wild_type]), protein.partners,
                      groups_of(protein, table.group))


def groups_of(protein: Protein, column: str | None) -> list[str]:
    """The different texts of a column in the rows of a protein. None, or where its table has no
    such column: []."""
    texts = {variant.cells.get(column, "") for variant in protein.variants}
    return sorted(texts - {""})


# ---------------------------------------------------------------- what a step takes of it
class DrawnPartner(NamedTuple):
    """A partner alone, and which of the N variants of a complex change it.

    complex_key:  of the partner.
    places:       (n,) int64, of these variants among the N.
    index, S, orders: as of DrawnVariants, of the partner.
    """
    complex_key: int
    places: Tensor
    index: VariantIndex
    S: Tensor
    orders: Tensor


class DrawnVariants(NamedTuple):
    """What a step takes of a protein: N of its variants, and Q pairs of these.

    key, complex_key: of its VariantSet and its complex.
    numbers:       (N,) int64, the variants' numbers in the set, ascending; the wild type has the
                   number after the last variant.
    values:        (N,) float64, what was measured; higher is better.
    better, worse: (Q,) int64, the pairs, by place among the N.
    n_mutated:     (Q,) float32, residues that are mutated in one variant of the pair or in both.
    index:         of the N variants, without the wild type.
    S:             (1, L) int64, native letters. is_resolved: (L,) bool.
    orders:        (O, L) int64, in which they are decoded.
    native_order:  (1, L) int64, for loss.native_kl, or None.
    partners:      of binding, those that are changed by one of the variants.
    """
    key: int
    complex_key: int
    numbers: Tensor
    values: Tensor
    better: Tensor
    worse: Tensor
    n_mutated: Tensor
    index: VariantIndex
    S: Tensor
    is_resolved: Tensor
    orders: Tensor
    native_order: Tensor | None
    partners: list[DrawnPartner]


def keys_of(protein: DrawnVariants) -> list[int]:
    """Keys of the structures that a step scores: of the complex, and of the partners."""
    return [protein.complex_key, *(partner.complex_key for partner in protein.partners)]


def make_batch(sets: list[VariantSet], indices: list[int], config: Any,
               epoch: int | None = None) -> dict[str, Any]:
    """The random choices for P proteins.

    Args:
        config: with the sections loss and table, and training.seed.
        epoch:  None: the same choices at each call.
    Returns: dict of
        proteins   list of P DrawnVariants.
        weight     (P,) float32, of each protein.
        seen       (2,) float64, numbers of pairs and of their mutated residues.
    """
    proteins = [draw_variants(sets[index], config, epoch) for index in indices]
    n_pairs = sum(len(protein.better) for protein in proteins)
    n_residues = sum(float(protein.n_mutated.sum()) for protein in proteins)
    weight = torch.tensor([sets[index].weight for index in indices], dtype=torch.float32)
    return {"proteins": proteins, "weight": weight,
            "seen": torch.tensor([n_pairs, n_residues], dtype=torch.float64)}


def draw_variants(variant_set: VariantSet, config: Any, epoch: int | None) -> DrawnVariants:
    """Draw pairs of variants of a protein; the variants are those that are in one."""
    table = config.table
    seed = config.training.seed
    values = kept_values(variant_set, table.most_several, seed, epoch)
    draw = [FOR_COUPLES, seed, variant_set.key, -1 if epoch is None else epoch]
    pairs = draw_pairs(values, table.margin, table.most_pairs, draw)
    numbers, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    structure = variant_set.complex
    variants = [variant_set.variants[number] for number in numbers
                if number < len(variant_set.variants)]
    native_order = None
    if config.loss.native_kl:
        native_order = shuffled(structure, seed_for(seed, "native", variant_set.key, epoch))[None]
    return DrawnVariants(
        key=variant_set.key, complex_key=structure.key, numbers=torch.from_numpy(numbers),
        values=torch.from_numpy(variant_set.values[numbers]),
        better=torch.from_numpy(places[:, 0].copy()), worse=torch.from_numpy(places[:, 1].copy()),
        n_mutated=torch.from_numpy(count_mutated(variants, places, len(structure))).float(),
        index=index_variants(variants, structure.S),
        S=letters_of(structure), is_resolved=torch.from_numpy(structure.mask),
        orders=decoding_orders(variant_set, structure, config.loss, seed, epoch),
        native_order=native_order, partners=draw_partners(variant_set, variants, config, epoch))


def draw_partners(variant_set: VariantSet, variants: list, config: Any,
                  epoch: int | None) -> list[DrawnPartner]:
    """The partners that some of the variants change.

    variants: drawn ones of the set, without the wild type."""
    drawn = []
    for part in split_by_partner(variant_set.complex, variant_set.partners, variants):
        if not part.numbers:
            continue
        structure = part.structure
        drawn.append(DrawnPartner(
            complex_key=structure.key, places=torch.tensor(part.numbers),
            index=index_variants(part.changes, structure.S), S=letters_of(structure),
            orders=decoding_orders(variant_set, structure, config.loss, config.training.seed,
                                   epoch)))
    return drawn


def letters_of(structure):
    """(1, L) int64 native letters."""
    return torch.from_numpy(structure.S.astype(np.int64))[None]


def kept_values(variant_set: VariantSet, most_several: int, seed: int,
                epoch: int | None) -> np.ndarray:
    """(N + 1,) values of a set, nan for variants that a step leaves out: of those of several
    mutations, each of which takes a pass of its own, most_several are drawn. The best and the worst
    of these are always there, so that a set with a pair keeps one."""
    several = np.flatnonzero([len(variant) > 1 for variant in variant_set.variants])
    if len(several) <= most_several:
        return variant_set.values
    draw = [FOR_SEVERAL, seed, variant_set.key, -1 if epoch is None else epoch]
    words = random_words(len(several), draw)
    values = variant_set.values.copy()
    words[[np.argmax(values[several]), np.argmin(values[several])]] = 0
    order = np.argsort(words, kind="stable")
    values[several[order[most_several:]]] = np.nan
    return values


def draw_pairs(values: np.ndarray, margin: float, most: int, seed: list) -> np.ndarray:
    """Pairs of variants whose values differ by the margin.

    Args:
        values: (N,) float64, nan: in no pair. At least two differ by the margin.
        margin: least difference.
        most:   if there are more pairs than this, so many are drawn, of which those that differ by
            less are left out.
        seed:   of the draw, as of random_words.
    Returns: (Q, 2) int64, the better variant first. Q is at least 1: if no drawn pair differs by
        the margin, it is the one that differs most.
    """
    known = np.flatnonzero(np.isfinite(values))
    n = len(known)
    if n * (n - 1) // 2 <= most:
        one, other = np.triu_indices(n, 1)
    else:
        one, other = (random_words((2, most), seed) % np.uint64(n)).astype(np.int64)
    one = known[one]
    other = known[other]
    difference = values[one] - values[other]
    differs = (difference != 0) & (np.abs(difference) >= least_difference(margin))
    better = np.where(difference > 0, one, other)
    worse = np.where(difference > 0, other, one)
    pairs = np.stack([better, worse], 1)[differs]
    if len(pairs):
        return pairs
    return np.array([[np.nanargmax(values), np.nanargmin(values)]])


def has_pair(values: np.ndarray, margin: float) -> bool:
    """Whether two of the values differ by the margin."""
    known = values[np.isfinite(values)]
    if not len(known):
        return False
    return np.ptp(known) > 0 and np.ptp(known) >= least_difference(margin)


def least_difference(margin):
    """The margin, less what rounding may take."""
    return margin * (1 - 1e-9)


def count_mutated(variants, places, length):
    """(Q,) number of residues that are mutated in one variant of a pair or in both.

    places: (Q, 2) of the pairs, among the variants; one beyond these is the wild type. length: of
    the complex."""
    is_mutated = np.zeros((len(variants) + 1, length), bool)
    for number, variant in enumerate(variants):
        is_mutated[number, [row for row, _ in variant]] = True
    is_mutated = is_mutated[:, is_mutated.any(0)]       # the rows that some variant has
    better, worse = places.T
    return (is_mutated[better] | is_mutated[worse]).sum(1)


def decoding_orders(  # noqa: PLR0913  (what the seed is made of)
        variant_set, structure, loss, seed, epoch):
    """(n_orders, L) decoding orders of all residues of the complex of a set, or of a partner; of
    arange (1, L)."""
    if loss.order == "arange":
        return torch.arange(len(structure))[None]
    if loss.order == "fixed":
        epoch = None
    own = [variant_set.key, epoch]
    if structure is not variant_set.complex:
        own.append(structure.key)
    orders = [shuffled(structure, seed_for(seed, "order", *own, number))
              for number in range(loss.n_orders)]
    return torch.stack(orders)


def shuffled(structure, seed):
    """(L,) int64: the rows of a structure in a random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(structure), generator=generator)


# ---------------------------------------------------------------- scores and values
def mean_spearman(scores: list[np.ndarray], values: list[np.ndarray]) -> float | None:
    """Mean over proteins of Spearman's correlation of scores (N,) with the measured values (N,);
    None if no protein has LEAST variants."""
    correlations = []
    for protein_scores, protein_values in zip(scores, values):
        if len(protein_scores) < LEAST:
            continue
        correlation = spearman(np.unique(protein_scores, return_inverse=True)[1],
                               np.unique(protein_values, return_inverse=True)[1])
        if np.isfinite(correlation):
            correlations.append(correlation)
    if not correlations:
        return None
    return float(np.mean(correlations))
