"""Copies: chains of one structure that are equal, into all of which a mutation goes.

    groups = choose_copies(structure, structure.protein_chains, [])     # found: [("A", "B")]
    group_of("A", groups)                                               # ("A", "B")

Chains are equal if residues of equal number have equal letters, as `--homomer` of
sample_proteinmpnn.py ties them. Residues that one of them lacks do not count. No model here. Writes
nothing.
"""
from __future__ import annotations

from collections.abc import Sequence

from proteins.letters import LETTERS, X_ID
from proteins.structures import Structure

# Of the residues of each of two chains: fewer that both have are no evidence for equal chains.
LEAST_SHARED = 0.5
EQUAL = "chains with equal letters at equal residue numbers"


def choose_copies(structure: Structure, names: Sequence[str],
                  copies: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Groups of equal chains, each of two or more.

    Args:
        names:  of the chains among which they are looked for.
        copies: names of chains that are equal; []: those that the structure shows; None: no copies.
    Raises: ValueError for given chains that are absent or not equal.
    """
    if copies is None:
        return []
    if not copies:
        return find_copies(structure, names)
    check_copies(structure, names, copies)
    return [tuple(copies)]


def group_of(name: str, groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The group of a chain; of one without copies, itself alone."""
    for group in groups:
        if name in group:
            return group
    return (name,)


def find_copies(structure, names):
    """Groups of the chains that are equal to all others of their group."""
    letters = {name: letters_of(structure.chains[name]) for name in names}
    groups = []
    for name in names:
        for group in groups:
            if all(are_equal(letters[name], letters[other]) for other in group):
                group.append(name)
                break
        else:
            groups.append([name])
    return [tuple(group) for group in groups if len(group) > 1]


def letters_of(chain):
    """{number: letter} of the residues of known letter."""
    return {number: int(letter) for number, letter in zip(chain.numbers, chain.S)
            if number is not None and letter != X_ID}


def are_equal(one, other):
    """Whether two chains are equal, and share enough residues to tell."""
    shared = one.keys() & other.keys()
    if not shared or len(shared) < LEAST_SHARED * max(len(one), len(other)):
        return False
    return all(one[number] == other[number] for number in shared)


def check_copies(structure, names, copies):
    """ValueError for given copies that are absent, come twice or are not equal."""
    absent = [name for name in copies if name not in names]
    if absent or len(set(copies)) < len(copies) or len(copies) < 2:
        raise ValueError(f"found {' '.join(copies)} as copies; expected two or more chains of "
                         f"{structure.name}, each once, of {' '.join(names)}")
    letters = {name: letters_of(structure.chains[name]) for name in copies}
    for place, name in enumerate(copies):
        for other in copies[:place]:
            shared = letters[name].keys() & letters[other].keys()
            wrong = [number for number in structure.chains[other].numbers
                     if number in shared and letters[name][number] != letters[other][number]]
            if wrong:
                found = ", ".join(f"{chain}{wrong[0]} {LETTERS[letters[chain][wrong[0]]]}"
                                  for chain in (other, name))
                raise ValueError(f"found {found} in the copies {' '.join(copies)} of "
                                 f"{structure.name}; expected {EQUAL}")
            if not shared:
                raise ValueError(f"the chains {other} and {name} of {structure.name} share no "
                                 f"residue number; expected copies: {EQUAL}")
