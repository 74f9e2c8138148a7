"""Proteins held out with their relatives, by identity of sequences.

    split = hold_out_families(proteins, 0.2, share=0.3)         # split.rest, split.held_out

A protein is known by the letters of its mutated chain; unknown residues are left out. The identity
of two is that of a global alignment (BLOSUM62, by gemmi): equal letters per column. Columns beyond
an end of either sequence do not count, but all residues of the shorter one do. So a domain is a
relative of a longer protein that contains it. By all columns the identity is never larger.
Writes nothing.
"""
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import gemmi
import numpy as np

from proteins.mutations import Protein

RELATED = 0.3           # identity from which proteins of usual lengths are related
# Memory and time of an alignment are those of the product of the lengths: 2,000 by 2,000 residues
# take 0.04 s. Longer chains are compared part by part.
LONGEST_PART = 2000
BLOSUM62 = gemmi.AlignmentScoring("b")


class Split(NamedTuple):
    """Proteins on two sides, no relatives between them."""
    rest: list[Protein]
    held_out: list[Protein]
    n_families: int
    nearest: float          # largest identity of two proteins on different sides


def identity(one: str, other: str) -> float:
    """Equal letters per column of the alignment of two sequences, 0 to 1.

    Of sequences longer than LONGEST_PART, the largest of any two parts."""
    return identity_of_parts(parts_of(one), parts_of(other))


def hold_out_families(proteins: Sequence[Protein], fraction: float, share: float,
                      alive: Callable = lambda: None) -> Split:
    """Hold out whole families, by a hash of their sequences.

    A family are all proteins that are connected by relatives: identity `share` or more. The side
    of a protein depends on its family alone: not on other proteins, names, or a seed.

    Args:
        fraction: 0 to 1, of families that are held out, on average.
        alive:    called for each protein, to show a watchdog that work continues.
    Raises: ValueError if either side is empty.
    """
    sequences = sorted({known_letters(protein) for protein in proteins})
    identities = all_identities(sequences, alive)
    families = connected(identities >= share)
    draws = [draw_of("\n".join(sequences[member] for member in family)) for family in families]
    is_held_out = np.zeros(len(sequences), bool)
    for family, draw in zip(families, draws):
        is_held_out[family] = draw < fraction
    held_letters = {sequences[number] for number in np.flatnonzero(is_held_out)}
    held_out = [protein for protein in proteins if known_letters(protein) in held_letters]
    rest = [protein for protein in proteins if known_letters(protein) not in held_letters]
    check_sides(rest, held_out, fraction, draws,
                f" in {len(families):,} families of {share:.0%} identity")
    nearest = float(identities[is_held_out][:, ~is_held_out].max())
    return Split(rest, held_out, len(families), nearest)


# ---- alignments ----

def known_letters(protein):
    """The mutated chain's sequence without unknown residues."""
    return protein.sequence.replace("X", "")


def parts_of(sequence):
    """Parts of about equal length, none longer than LONGEST_PART, as gemmi takes them."""
    names = gemmi.expand_one_letter_sequence(sequence, gemmi.ResidueKind.AA)
    n_parts = max(1, -(-len(names) // LONGEST_PART))
    ends = [len(names) * number // n_parts for number in range(n_parts + 1)]
    return [names[start:end] for start, end in zip(ends, ends[1:])]


def identity_of_parts(parts, of_other):
    """The largest identity of a part with one of the other."""
    return max(aligned_identity(part, other) for part in parts for other in of_other)


def aligned_identity(one, other):
    """Of two lists of residues' names. The same whichever is the first."""
    shorter = min(len(one), len(other))
    if not shorter:
        return 0.0
    one, other = sorted((one, other))       # of equally good alignments gemmi gives one
    signs = gemmi.align_string_sequences(one, other, [], BLOSUM62).match_string
    # A sign for each column: | equal, blank: one has no residue. All residues of the shorter
    # sequence count, so that a few at two ends that overlap make no relatives.
    columns = max(len(signs.strip(" ")), shorter)
    return signs.count("|") / columns


def all_identities(sequences, alive):
    """(n, n) float64."""
    parts = [parts_of(sequence) for sequence in sequences]
    identities = np.eye(len(sequences))
    for number, of_one in enumerate(parts):
        alive()
        for earlier in range(number):
            found = identity_of_parts(of_one, parts[earlier])
            identities[number, earlier] = found
            identities[earlier, number] = found
    return identities


# ---- families ----

def connected(is_related):
    """Lists of the numbers of those that are connected, each in ascending order.

    is_related: (n, n) bool, symmetric."""
    left = set(range(len(is_related)))
    families = []
    while left:
        family = set()
        new = {min(left)}
        while new:
            family |= new
            left -= new
            new = left.intersection(np.flatnonzero(is_related[sorted(new)].any(0)).tolist())
        families.append(sorted(family))
    return families


def draw_of(text):
    """A number from 0 to 1 that depends on a text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def check_sides(rest, held_out, fraction, draws, how):
    """ValueError if either side is empty.

    draws: of all families. how: text on how proteins stay together."""
    if rest and held_out:
        return
    advice = "Give more proteins"
    other = float(f"{(min(draws) + max(draws)) / 2:.3f}")
    if min(draws) < other <= max(draws):
        advice += f", or another fraction, such as {other:g}"
    raise ValueError(f"found {len(rest) + len(held_out)} protein(s){how}, of which "
                     f"{len(held_out)} would be held out by the fraction {fraction:g}; "
                     f"expected some on both sides. {advice}.")
