"""Families of proteins, by identity of sequences; whole families are held out.

    held = hold_out_families(sequences, 0.1, share=0.3)     # held.is_held_out: (n,) bool

Unknown residues, X, are left out of a sequence. The identity of two is that of a global alignment
(BLOSUM62, by gemmi): equal letters per column. Columns beyond an end of either sequence do not
count, but all residues of the shorter one do. So a domain is a relative of a longer protein that
contains it. By all columns the identity is never larger. Writes nothing.
"""
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import gemmi
import numpy as np

# Memory and time of an alignment are those of the product of the lengths: 2,000 by 2,000 residues
# take 0.04 s. Longer chains are compared part by part.
LONGEST_PART = 2000
# All pairs are aligned, on each rank: 1,000 sequences of 250 residues take 4 minutes.
MOST_ALIGNED = 1000
BLOSUM62 = gemmi.AlignmentScoring("b")


class HeldOut(NamedTuple):
    """Which proteins are held out, no relatives of them among the others."""
    is_held_out: np.ndarray     # (n,) bool
    n_families: int             # of all n
    are_aligned: bool           # False: there are too many, and only equal sequences are relatives


def identity(one: str, other: str) -> float:
    """Equal letters per column of the alignment of two sequences, 0 to 1.

    Of sequences longer than LONGEST_PART, the largest of any two parts."""
    return identity_of_parts(parts_of(one), parts_of(other))


def hold_out_families(sequences: list[str], fraction: float, share: float,
                      alive: Callable = lambda: None) -> HeldOut:
    """Hold out whole families, by a hash of their sequences.

    A family are all proteins that are connected by relatives: identity `share` or more; equal
    sequences are one protein. Of more than MOST_ALIGNED different sequences only equal ones are
    relatives. The side of a protein depends on its family alone: not on other proteins, the order,
    names, or a seed; but one family at least is on each side.

    Args:
        sequences: n texts of the 20 letters and X, one for each protein.
        fraction:  0 to 1, of families that are held out, on average.
        share:     0 to 1.
        alive:     called for each sequence, to show a watchdog that work continues.
    Raises: ValueError if there is one family alone.
    """
    known = [known_letters(sequence) for sequence in sequences]
    distinct = sorted(set(known))
    are_aligned = len(distinct) <= MOST_ALIGNED
    families = [[number] for number in range(len(distinct))]
    if are_aligned:
        families = connected(all_identities(distinct, alive) >= share)
    if len(families) < 2:
        raise ValueError(f"all {len(sequences):,} proteins are of one family, of {share:.0%} "
                         "identity, so none can be held out; expected two families or more. Give "
                         "more proteins.")
    draws = [draw_of("\n".join(distinct[member] for member in family)) for family in families]
    limit = min(max(fraction, np.nextafter(min(draws), 1)), max(draws))
    held_letters = set()
    for family, draw in zip(families, draws):
        if draw < limit:
            held_letters.update(distinct[member] for member in family)
    is_held_out = np.array([letters in held_letters for letters in known], bool)
    return HeldOut(is_held_out, len(families), are_aligned)


# ---- alignments ----

def known_letters(sequence):
    """A sequence without unknown residues."""
    return sequence.replace("X", "")


def parts_of(sequence):
    """Parts of about equal length, none longer than LONGEST_PART, as gemmi takes them."""
    names = gemmi.expand_one_letter_sequence(sequence, gemmi.ResidueKind.AA)
    n_parts = max(1, -(-len(names) // LONGEST_PART))
    ends = [len(names) * number // n_parts for number in range(n_parts + 1)]
    return [names[start:end] for start, end in zip(ends, ends[1:])]


def identity_of_parts(parts, others):
    """The largest identity of one of the parts with one of the others."""
    return max(aligned_identity(part, other) for part in parts for other in others)


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
    for number in range(len(sequences)):
        alive()
        for earlier in range(number):
            shared = identity_of_parts(parts[number], parts[earlier])
            identities[number, earlier] = shared
            identities[earlier, number] = shared
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
