"""Partners of a complex: the two sides whose binding variants change.

    partners = choose_partners("HL_A", structure)       # Complexes: H and L together, and A
    distances = nearest(*partners)                      # Angstrom, of each row of the first

The text names the chains of the two sides: HL_A, AB_C. Names of several characters have commas
between them: AA,BB_C. No model here. Writes nothing.
"""
from __future__ import annotations

import numpy as np

from proteins.structures import CA, Complex, Structure

TOUCHING = 10.0     # Angstrom, at most, between the nearest backbone atoms of two that bind
ROWS_AT_ONCE = 256  # for the memory of a table of distances
FORM = "such as HL_A, for H and L that bind A (AA,BB_C for names of several characters)"


def choose_partners(text: str, structure: Structure) -> tuple[Complex, Complex]:
    """The two partners, each alone, as Complexes of the same structure.

    Raises: ValueError for another text, absent chains, a chain that is named twice, and partners
        that do not touch."""
    sides = read_sides(text, structure)
    names = [name for side in sides for name in side]
    usable = structure.protein_chains
    absent = [name for name in names if name not in usable]
    if absent:
        raise ValueError(f"found chain {absent[0]} in the partners {text}; expected protein chains "
                         f"of {structure.name}, which has {' '.join(usable) or '(none)'}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"found chain {twice[0]} twice in the partners {text} of "
                         f"{structure.name}; expected each chain once, on one side")
    first, second = (Complex(structure, side) for side in sides)
    distance = nearest(first, second).min()
    if distance > TOUCHING:
        raise ValueError(f"the partners {text} of {structure.name} do not touch: their nearest "
                         f"backbone atoms are {distance:.1f} Angstrom apart; expected at most "
                         f"{TOUCHING:g}. Are these the chains that bind?")
    return first, second


def read_sides(text: str, structure: Structure) -> list[list[str]]:
    """The names of the chains of the two sides. ValueError for another text."""
    sides = [side.strip() for side in text.split("_")]
    has_blanks = any(len(side.split()) > 1 for side in sides if "," not in side)
    if len(sides) != 2 or not all(sides) or has_blanks:
        raise ValueError(f"found {text!r:.60} as partners; expected two sides, {FORM}")
    return [read_side(side, structure) for side in sides]


def read_side(side, structure):
    """The names of the chains of one side. ValueError for a text with two meanings."""
    if "," in side:
        return [name.strip() for name in side.split(",") if name.strip()]
    letters = list(side)
    if len(side) == 1 or side not in structure.chains:
        return letters
    if all(letter in structure.chains for letter in letters):
        raise ValueError(f"found {side} in the partners, which may be the chain {side} of "
                         f"{structure.name} or the chains {' '.join(letters)}; expected "
                         f"{side}, (with a comma) or {','.join(letters)}")
    return [side]


def have_sides(partners: tuple[Complex, ...], text: str) -> bool:
    """Whether a text names these partners, in any order."""
    try:
        sides = read_sides(text, partners[0].structure)
    except ValueError:
        return False
    return {frozenset(side) for side in sides} == {frozenset(one.design) for one in partners}


def nearest(one: Complex, other: Complex) -> np.ndarray:
    """(L,) float64: of each row of `one` the smallest distance of its backbone atoms (CA, of a
    CA-only model) from those of `other`, in Angstrom. inf where it is not resolved."""
    atoms = backbone(one)
    others = backbone(other)[other.mask].reshape(-1, 3)
    distances = np.full(len(one), np.inf)
    resolved = np.flatnonzero(one.mask)
    for first in range(0, len(resolved), ROWS_AT_ONCE):
        rows = resolved[first:first + ROWS_AT_ONCE]
        own = atoms[rows]                                               # (rows, atoms, 3)
        squares = (own ** 2).sum(-1)[..., None] + (others ** 2).sum(-1) - 2 * own @ others.T
        distances[rows] = np.sqrt(np.maximum(squares.min((1, 2)), 0))
    return distances


def backbone(structure):
    """(L, atoms, 3) float64 of the backbone atoms that the model sees."""
    X = structure.X.astype(np.float64)
    return X[:, [CA]] if structure.structure.ca_only else X


def distances_between(partners: tuple[Complex, Complex]) -> dict[tuple[str, str], float]:
    """{(chain, number): Angstrom} of the residues of both partners: from the nearest of their
    backbone atoms to the nearest of the other partner; inf where they are not resolved."""
    distances_of = {}
    for one, other in (partners, partners[::-1]):
        distances = nearest(one, other)
        for name in one.design:
            numbers = one.structure.chains[name].numbers
            distances_of.update(((name, number), float(distances[row]))
                                for number, row in zip(numbers, one.rows([name]))
                                if number is not None)
    return distances_of
