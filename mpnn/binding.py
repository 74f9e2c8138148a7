"""Binding: what a variant does to a complex, less what it does to the two partners alone.

    score = [ln p(mutant) - ln p(wild type)] in the complex - the same in each partner alone

Each partner alone is a structure of its own chains, in which its own mutated residues are scored.
The unfolded state is the same on both sides and cancels, and so does a correction for it.

    parts = split_by_partner(whole, partners, variants)     # for each partner: its share of these
    scores = score_binding(model, wholes, partners, variants)   # .binding and .in_complex of each
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddp_setup import Ddp
from mpnn.model import ProteinMPNN
from mpnn.variants import Scoring, score_proteins
from proteins.structures import Complex


class Part(NamedTuple):
    """A partner alone, with the variants that change it."""
    structure: Complex
    numbers: list[int]                          # of these variants, among those of the complex
    changes: list[list[tuple[int, int]]]        # of each: (row of the structure, letter 0 to 19)


class BindingScores(NamedTuple):
    """Scores (n,) float64, in nats, of the variants of a complex."""
    binding: np.ndarray         # below 0: the model expects weaker binding
    in_complex: np.ndarray      # of the complex alone: is it still stable?


def split_by_partner(whole: Complex, partners: Sequence[Complex],
                     variants: list[list[tuple[int, int]]]) -> list[Part]:
    """For each partner the variants that change it, with the rows that they have there.

    Args:
        whole:    of all chains of the partners.
        partners: complexes of some chains of the same structure, each chain in one of them.
        variants: lists of (row of the whole, letter).
    """
    parts = []
    for partner in partners:
        row_alone = {}          # row of the whole -> row of the partner
        for name in partner.design:
            row_alone.update(zip(whole.rows([name]).tolist(), partner.rows([name]).tolist()))
        numbers = []
        changes = []
        for number, variant in enumerate(variants):
            own = [(row_alone[row], letter) for row, letter in variant if row in row_alone]
            if own:
                numbers.append(number)
                changes.append(own)
        parts.append(Part(partner, numbers, changes))
    return parts


def score_binding(  # noqa: PLR0913  (as score_proteins)
        model: ProteinMPNN, wholes: list[Complex], partners: list[Sequence[Complex]],
        variants: list[list[list[tuple[int, int]]]], scoring: Scoring = Scoring(),
        correction: ProteinMPNN | None = None,
        done: Callable[[int, int], object] = lambda n, total: None,
        ddp: Ddp | None = None) -> list[BindingScores]:
    """BindingScores of the variants of several complexes. Collective if ddp is given.

    Args:
        wholes, partners: of each complex, see split_by_partner. Others: as of score_proteins.
    """
    structures = []
    changes = []
    parts_of_wholes = []
    for whole, own_partners, own_variants in zip(wholes, partners, variants):
        parts = [part for part in split_by_partner(whole, own_partners, own_variants)
                 if part.numbers]
        structures += [whole, *(part.structure for part in parts)]
        changes += [own_variants, *(part.changes for part in parts)]
        parts_of_wholes.append(parts)
    tables = iter(score_proteins(model, structures, changes, scoring, correction, done, ddp))
    scores = []
    for parts in parts_of_wholes:
        in_complex = next(tables)
        binding = in_complex.copy()
        for part in parts:
            binding[part.numbers] -= next(tables)
        scores.append(BindingScores(binding, in_complex))
    return scores
