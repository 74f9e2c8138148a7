"""Tables of measured mutations as training data: proteins with all their variants.

    data = load_tables(config, place, alive)                    # PairsOfRun of VariantTables
    couples = draw_couples(table.values, 0.3, 100_000, [FOR_COUPLES, seed, table.key, epoch])

A micro-batch is some proteins. Of each, one pass of the model gives the scores of all variants, and
the loss is the mean over pairs of its variants: all that differ by the margin, or as many as are
drawn anew in each epoch. Values are compared within a protein alone, so proteins may be measured in
other units. Reads the tables of proteins/mutations.py. No model here.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpo.pair_files import PairsOfRun, pairs_of_run, read_both
from proteins.correlation import LEAST, spearman
from proteins.identity import hold_out_families
from proteins.mutations import Protein, describe_skipped, measured_values, read_mutations
from proteins.seeds import FOR_COUPLES, content_key, random_words
from proteins.structures import Complex
from proteins.tables import describe_duplicates

ALL_COUNT = 50      # variants of a protein from which it counts as 1; fewer: by their square root
FEWEST = 20         # variants, of which some have to be worse than the wild type
SELDOM = 0.05       # fraction of variants that a wild type is better than, if its value is wrong


class VariantTable:
    """A protein with the measured values of its variants.

    variants: N lists of (row of the complex, letter). The wild type is no variant.
    values:   (N + 1,) float64, higher is better; the last is that of the wild type, or nan: it is
              in no pair.
    weight:   of the protein in means over proteins.
    key:      hash of all of the above, for seeds. shared_key: of the complex. length: its rows.
    """

    def __init__(self, name: str, complex: Complex, variants: list, values: np.ndarray):
        self.name = name
        self.complex = complex
        self.shared_key = complex.key
        self.length = len(complex)
        self.variants = variants
        self.values = values
        self.weight = math.sqrt(min(len(variants) / ALL_COUNT, 1))
        self.key = content_key(complex.key, repr(variants), values)

    def only(self, chosen: np.ndarray) -> VariantTable:
        """The table of some of the variants. chosen: (N,) bool."""
        variants = [self.variants[number] for number in np.flatnonzero(chosen)]
        values = self.values[np.append(chosen, True)]       # the wild type's too
        return VariantTable(self.name, self.complex, variants, values)


def load_tables(config: Any, place: Callable, alive: Callable = lambda: None) -> PairsOfRun:
    """The proteins to train on and to validate with.

    Args:
        config: with the sections data (train_data, val_data, val_fraction) and table.
        place:  function of a MutationTable -> (Proteins, texts on variants that fit none).
        alive:  called before each protein, to show a watchdog that reading continues.
    Raises: ValueError that lists the problems of both files.
    """
    data = config.data
    section = config.table
    notes = []

    def read(path):
        table = read_mutations(Path(path), section.measured)
        alive()
        proteins, skipped = place(table)
        tables = [make_table(protein, section) for protein in proteins]
        check_wild_type(path, tables, section)
        kept = [number for number, of_protein in enumerate(tables)
                if has_couple(of_protein.values, section.margin)]
        if not kept:
            raise ValueError(f"{path}: no two variants of a protein differ in {section.measured} "
                             f"by table.margin {section.margin:g} or more; expected some. Give a "
                             "smaller margin, or more variants.")
        notes.append(describe(path, proteins, tables, kept, section))
        if skipped.variants:
            notes.extend(describe_skipped(table, skipped).splitlines())
        return [(proteins[number], tables[number]) for number in kept]

    train, val = read_both(data, read)
    if val is not None:
        notes += describe_shared(train, val)
    elif data.val_fraction:
        try:
            split = hold_out_families([protein for protein, _ in train], data.val_fraction,
                                      section.identity, alive)
        except ValueError as error:
            raise ValueError(f"{data.train_data}: validation: {error} Or give a table of other "
                             "proteins (--val_data), or data.val_fraction=0 to train without "
                             "validation.") from None
        held = {id(protein) for protein in split.held_out}
        val = [both for both in train if id(both[0]) in held]
        train = [both for both in train if id(both[0]) not in held]
        notes.append(f"  {len(train):,} proteins for training, {len(val):,} for validation; "
                     f"none of them has {section.identity:.0%} identity with one of the others")
    train = [table for _, table in train]
    if val is not None:
        val = [table for _, table in val]
    content = [[table.key for table in part] for part in (train, val or [])]
    return pairs_of_run(train, val, content, notes)


def describe_shared(train, val):
    """List of a warning, if a file of validation has proteins of the other."""
    sequences = {protein.sequence for protein, _ in train}
    shared = sorted({protein.name for protein, _ in val if protein.sequence in sequences})
    if not shared:
        return []
    return [f"ATTENTION: {len(shared):,} protein(s) are in training and validation, first "
            f"{shared[0]}: validation does not tell about new proteins."]


def make_table(protein: Protein, section: Any) -> VariantTable:
    """The VariantTable of a protein. Rows of one variant count by their mean."""
    measured = measured_values(protein)
    variants = sorted(measured)
    values = [statistics.fmean(measured[variant]) for variant in variants]
    wild_type = math.nan if section.wild_type is None else section.wild_type
    sign = -1.0 if section.better == "lower" else 1.0
    return VariantTable(protein.name, protein.complex, [list(each) for each in variants],
                        sign * np.array([*values, wild_type]))


def has_couple(values: np.ndarray, margin: float) -> bool:
    """Whether two of the values differ by the margin."""
    known = values[np.isfinite(values)]
    if not len(known):
        return False
    return np.ptp(known) > 0 and np.ptp(known) >= least_difference(margin)


def least_difference(margin):
    """The margin, less what rounding may take."""
    return margin * (1 - 1e-9)


def draw_couples(values: np.ndarray, margin: float, most: int,
                 seed: list) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of variants whose values differ by the margin.

    Args:
        values: (N,) float64, nan: in no pair.
        margin: least difference.
        most:   if there are more pairs than this, so many are drawn, of which those that differ by
            less are left out.
        seed:   of the draw, as of random_words.
    Returns: (Q, 2) int64, the better variant first; (Q,) float64 differences, above 0.
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
    size = np.abs(difference)
    differs = (size > 0) & (size >= least_difference(margin))
    better = np.where(difference > 0, one, other)
    worse = np.where(difference > 0, other, one)
    return np.stack([better, worse], 1)[differs], size[differs]


def batch_of_couples(tables: list[VariantTable], indices: list[int], section: Any, seed: int,
                     epoch: int | None = None) -> dict[str, Any]:
    """Q pairs of variants of P proteins.

    Args:
        section: the config's section table.
        epoch:   None: the same pairs at each call.
    Returns: dict of
        keys           list of P int, of the tables.
        couples        (Q, 2) int64, the better and the worse variant, counted through all proteins,
                       of which each has its wild type after its variants.
        item           (Q,) int64, the pair's protein, 0 to P - 1.
        share          (Q,) float32, weight of the pair in the mean of its protein.
        pair_weight    (Q,) float32, the same times the protein's weight.
        n_scored       (Q,) float32, residues that are mutated in one variant or in both.
        count          P, by which the loss of a global batch is divided.
    """
    parts = {"couples": [], "item": [], "share": [], "pair_weight": [], "n_scored": []}
    first = 0               # number of a protein's first variant
    for item, index in enumerate(indices):
        table = tables[index]
        draw = [FOR_COUPLES, seed, table.key, -1 if epoch is None else epoch]
        couples, differences = draw_couples(table.values, section.margin, section.most_pairs, draw)
        weights = differences if section.weigh else np.ones(len(couples))
        share = weights / max(weights.sum(), 1e-300)
        parts["couples"].append(couples + first)
        parts["item"].append(np.full(len(couples), item))
        parts["share"].append(share.astype(np.float32))
        parts["pair_weight"].append((table.weight * share).astype(np.float32))
        parts["n_scored"].append(count_mutated(table, couples).astype(np.float32))
        first += len(table.values)
    batch = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
    batch["keys"] = [tables[index].key for index in indices]
    batch["count"] = float(len(indices))
    return batch


def scores_of_couples(scores: list[torch.Tensor], couples: torch.Tensor) -> torch.Tensor:
    """(Q, 2) float32 scores of pairs.

    scores: (N,) of the variants of each protein; the wild type's is 0. couples: (Q, 2), see
    batch_of_couples."""
    with_wild_types = [part for of_protein in scores
                       for part in (of_protein, of_protein.new_zeros(1))]
    return torch.cat(with_wild_types).float()[couples]


def mean_spearman(scores: list[np.ndarray], tables: list[VariantTable]) -> float | None:
    """Mean over proteins of Spearman's correlation of scores (N,) with the measured values; None
    if no protein has enough variants."""
    found = [spearman_of(of_table, table.values[:-1]) for of_table, table in zip(scores, tables)]
    found = [value for value in found if np.isfinite(value)]
    if not found:
        return None
    return float(np.mean(found))


def describe_couples(section: Any) -> str:
    """A text on which pairs the loss is a mean of. section: the config's section table."""
    weighed = ", weighed by their differences" if section.weigh else ""
    return (f"pairs of variants that differ by {section.margin:g} or more{weighed}, up to "
            f"{section.most_pairs:,} of a protein")


def spearman_of(scores, values):
    """Spearman's correlation of (N,) numbers, nan for fewer than LEAST."""
    if len(scores) < LEAST:
        return np.nan
    return spearman(np.unique(scores, return_inverse=True)[1],
                    np.unique(values, return_inverse=True)[1])


def count_mutated(table, couples):
    """(Q,) number of residues that are mutated in one variant of a pair or in both."""
    is_mutated = np.zeros((len(table.values), table.length), bool)
    for number, variant in enumerate(table.variants):
        is_mutated[number, [row for row, _ in variant]] = True
    is_mutated = is_mutated[:, is_mutated.any(0)]       # the rows that some variant has
    better, worse = couples.T
    return (is_mutated[better] | is_mutated[worse]).sum(1)


def check_wild_type(path, tables, section):
    """ValueError if the wild type is worse than nearly all variants: a value that it does not have
    would teach the opposite."""
    if section.wild_type is None:
        return
    better = sum(int((table.values[:-1] < table.values[-1]).sum()) for table in tables)
    total = sum(len(table.variants) for table in tables)
    if total >= FEWEST and better < SELDOM * total:
        raise ValueError(
            f"{path}: the wild type, whose {section.measured} is taken as {section.wild_type:g}, "
            f"is worse than {total - better:,} of {total:,} variants; expected it to be better "
            "than some. Give its value in this table (such as table.wild_type=1 for many scores of "
            "fitness), table.wild_type=null to leave it out, or the other value of table.better.")


def describe(path, proteins, tables, kept, section):
    """A line on a table and what is used of it. kept: numbers of the proteins that are."""
    lengths = sorted({table.length for table in tables})
    residues = f"{lengths[0]:,} residues"
    if len(lengths) > 1:
        residues = f"{lengths[0]:,} to {lengths[-1]:,} residues each"
    n_variants = sum(len(table.variants) for table in tables)
    several = sum(len(variant) > 1 for table in tables for variant in table.variants)
    texts = [f"data: {path}: {n_variants:,} variants of {len(tables):,} protein(s), {residues}",
             f"{section.measured}, {section.better} is better"]
    if several:
        texts.append(f"{several:,} of several mutations")
    if section.wild_type is not None:
        texts.append(f"wild type {section.wild_type:g}")
    left_out = len(tables) - len(kept)
    if left_out:
        texts.append(f"{left_out:,} protein(s) without a pair that differs by the margin are left "
                     "out")
    values = [each for protein in proteins for each in measured_values(protein).values()]
    texts += describe_duplicates(values, "variants", "their means count")
    return "; ".join(texts)
