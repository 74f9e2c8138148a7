"""Which variants of several mutations to measure next: the best mutations of a scan, combined.

    singles = best_singles(proteins, scores, most=3)        # of a scan, one a residue
    candidates, sums = combine(proteins, scores, singles, most=3, measured=measured)
    joint = ...                                             # their scores, by the model again
    chosen = choose_combinations(candidates, joint, top=24)

All variants of up to `most` of the best mutations are scored, each as a whole. Each costs a pass of
its own, so as many mutations enter as make at most MOST_SCORED variants:

    most         2   3   4   5
    mutations   44  18  12  10

Mutations that are measured already may take part, in combinations that are not. No model here.
Writes nothing.
"""
from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container

import numpy as np

from proteins.mutations import Protein, Variant
from proteins.proposals import Choice, Site, best_first, choose_proposals, sites_of

FEWEST = 2              # mutations that --combine may ask for
LARGEST = 5
MOST_SCORED = 1000      # variants; 80 CPU seconds for 106 residues and four orders
SHARE = 4               # a mutation is in at most one of so many of the chosen variants


def best_singles(proteins: list[Protein], scores: list[np.ndarray], most: int) -> list[Choice]:
    """The mutations of highest score, at most one of a residue, as many as can be combined.

    Args:
        proteins: of a scan.
        scores:   (n,) of the variants of each.
        most:     mutations of a combination.
    """
    return choose_proposals(proteins, scores, (), top=n_combined(most), per_position=1)


def n_combined(most: int) -> int:
    """How many mutations make at most MOST_SCORED variants of up to `most` of them."""
    n = 1
    while sum(math.comb(n + 1, size) for size in range(1, most + 1)) <= MOST_SCORED:
        n += 1
    return n


def combine(proteins: list[Protein], scores: list[np.ndarray], singles: list[Choice], most: int,
            measured: Container[frozenset[Site]]) -> tuple[list[Protein], list[np.ndarray]]:
    """Variants of one to `most` of these mutations in one protein, without those measured.

    Args:
        proteins, scores: of the scan.
        singles:          of best_singles.
    Returns: proteins with these variants, and of each (n,) the sums of the scores of the single
        mutations.
    Raises: ValueError if all are measured.
    """
    candidates = []
    sums = []
    for place, protein in enumerate(proteins):
        own = sorted(choice.variant for choice in singles if choice.protein == place)
        combined = protein._replace(variants=[], changes=[])
        sums_here = []
        for size in range(1, most + 1):
            for numbers in itertools.combinations(own, size):
                combined.variants.append(join([protein.variants[number] for number in numbers]))
                combined.changes.append([change for number in numbers
                                         for change in protein.changes[number]])
                sums_here.append(sum(scores[place][number] for number in numbers))
        kept = [number for number, sites in enumerate(sites_of(combined)) if sites not in measured]
        if kept:
            candidates.append(combined._replace(
                variants=[combined.variants[number] for number in kept],
                changes=[combined.changes[number] for number in kept]))
            sums.append(np.array(sums_here)[kept])
    if not candidates:
        raise ValueError("found no combination that is not measured; expected some. Give another "
                         "--combine, or more positions.")
    return candidates, sums


def join(variants: list[Variant]) -> Variant:
    """The variant of all mutations of these, which are of a scan. Its text names the chains if
    there are several, as the column `chain` cannot."""
    cells = dict(variants[0].cells)
    chains = {variant.cells.get("chain") for variant in variants}
    texts = [variant.cells["mutation"] for variant in variants]
    if len(chains) > 1:
        texts = [f"{variant.cells['chain']}:{text}" for variant, text in zip(variants, texts)]
        cells["chain"] = ""
    cells["mutation"] = ":".join(texts)
    mutations = tuple(mutation for variant in variants for mutation in variant.mutations)
    return variants[0]._replace(cells=cells, mutations=mutations)


def choose_combinations(candidates: list[Protein], scores: list[np.ndarray],
                        top: int) -> list[Choice]:
    """The variants of highest score, best first, with each mutation in at most share_of(top).

    candidates: of combine. scores: (n,) of the variants of each, as wholes."""
    chosen = []
    times = Counter()       # site -> chosen variants that have it
    for choice, sites in best_first(candidates, scores, ()):
        if len(chosen) < top and all(times[site] < share_of(top) for site in sites):
            chosen.append(choice)
            times.update(sites)
    return chosen


def share_of(top: int) -> int:
    """In how many of the chosen variants a mutation may be: a quarter of them."""
    return max(1, top // SHARE)


def describe_combinations(chosen: list[Choice], top: int, most: int, n_singles: int) -> str:
    """A line on how many are proposed."""
    best = "mutation" if n_singles == 1 else f"{n_singles} mutations"
    line = (f"proposed: {len(chosen):,} variants of up to {most} of the best {best}, one a "
            f"residue; each mutation in at most {share_of(top)}")
    if len(chosen) < top:
        line += f"; found no more for --top {top:,}"
    return line
