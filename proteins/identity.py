"""Families of proteins, by identity of sequences; whole families are held out.

    held = hold_out_families(sequences, 0.1, share=0.3)     # held.is_held_out: (n,) bool

Unknown residues, X, are left out of a sequence. The identity of two is that of a global alignment
(BLOSUM62, by gemmi): equal letters per column. Columns beyond an end of either sequence do not
count, but all residues of the shorter one do. So a domain is a relative of a longer protein that
contains it. By all columns the identity is never larger. Writes nothing.
"""
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import gemmi
import numpy as np

from proteins.letters import LETTERS, encode

# Memory and time of an alignment are those of the product of the lengths: 2,000 by 2,000 residues
# take 0.04 s. Longer chains are compared part by part.
LONGEST_PART = 2000
# All pairs are aligned: 1,000 sequences of 250 residues take 4 minutes.
ALL_PAIRS = 1000
# Of more sequences those pairs that SharedWords finds: 2 %, with all but 1 in 800 of the relatives
# of 60 residues and more, of 443 chains of the docking benchmark at 30 %. Below 30 residues it
# finds little but nearly equal ones. 10,000 sequences take two to ten minutes.
MOST_ALIGNED = 20_000
WORD = 3                    # letters
BAND = 16                   # diagonals of a table of two sequences, on which words are counted
LEAST_WORDS = 2             # of a band, and one more for each
RESIDUES_PER_WORD = 75      # residues, the geometric mean of both lengths
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
                      alive: Callable = lambda: None,
                      groups: Sequence[Iterable[str]] = ()) -> HeldOut:
    """Hold out whole families, by a hash of their sequences.

    A family are all proteins that are connected by relatives: identity `share` or more, or a group
    in common; equal sequences are one protein. Of more than ALL_PAIRS different sequences those are
    aligned that share words, and of more than MOST_ALIGNED only equal ones are relatives. The side
    of a protein depends on its family alone: not on other proteins, the order, names, or a seed;
    but one family at least is on each side.

    Args:
        sequences: n texts of the 20 letters and X, one for each protein.
        fraction:  0 to 1, of families that are held out, on average.
        share:     0 to 1.
        alive:     called for each sequence, to show a watchdog that work continues.
        groups:    names of the groups of each protein; (): there are none.
    Raises: ValueError if there is one family alone.
    """
    known = [known_letters(sequence) for sequence in sequences]
    distinct = sorted(set(known))
    related = relatives(distinct, share, alive)
    first_of = {}       # name of a group -> number of its first sequence
    for letters, names in zip(known, groups):
        number = distinct.index(letters)
        related += [(number, first_of.setdefault(name, number)) for name in names]
    families = connected(len(distinct), related)
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
    return HeldOut(is_held_out, len(families), len(distinct) <= MOST_ALIGNED)


def relatives(sequences: list[str], share: float, alive: Callable = lambda: None,
              progress: Callable = lambda items, text: items) -> list[tuple[int, int]]:
    """Pairs of different sequences with an identity of `share` or more, by their numbers, the
    larger one first. Of more than MOST_ALIGNED sequences: none.

    Args:
        sequences: without X, each once.
        alive:     called for each sequence, to show a watchdog that work continues.
        progress:  function (numbers, text) -> iterator over these that shows how much is done.
    """
    if len(sequences) > MOST_ALIGNED:
        return []
    words = None
    if len(sequences) > ALL_PAIRS:
        words = SharedWords(sequences)
    parts = [parts_of(sequence) for sequence in sequences]
    pairs = []
    for number in progress(range(len(sequences)), "comparing sequences"):
        alive()
        others = range(number) if words is None else words.alike_before(number)
        for other in others:
            if identity_of_parts(parts[number], parts[other]) >= share:
                pairs.append((number, other))
    return pairs


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


class SharedWords:
    """Finds sequences that share words, by a table of all of them.

    Two sequences span a table, in which a shared word is a point. Points of an alignment lie near
    one diagonal, chance ones anywhere:

            M K T A Y I A
        K     .                  both words, KTA and TAY, are in one band of diagonals
        T       .
        A
    """

    def __init__(self, sequences):
        self.lengths = np.array([len(sequence) for sequence in sequences])
        self.words = [words_of(sequence) for sequence in sequences]
        counts = [len(words) for words in self.words]
        places = np.concatenate([np.arange(count) for count in counts])
        every = np.concatenate(self.words)
        order = np.argsort(every, kind="stable")
        self.sorted_words = every[order]
        self.owners = np.repeat(np.arange(len(sequences)), counts)[order]
        self.places = places[order]

    def alike_before(self, number):
        """Numbers of earlier sequences that share enough words with this one, ascending."""
        words = self.words[number]
        first = np.searchsorted(self.sorted_words, words, "left")
        counts = np.searchsorted(self.sorted_words, words, "right") - first
        ends = np.cumsum(counts)
        at = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
        is_earlier = self.owners[at] < number
        at = at[is_earlier]
        own_places = np.repeat(np.arange(len(words)), counts)[is_earlier]
        diagonals = self.places[at] - own_places + len(words)       # from 1
        n_bands = int(diagonals.max(initial=0)) // BAND + 2
        most = np.zeros(number, np.int64)       # words of the fullest band
        for shift in (0, BAND // 2):            # so that a band's border parts nothing
            bands = self.owners[at] * n_bands + (diagonals + shift) // BAND
            found, n_words = np.unique(bands, return_counts=True)
            np.maximum.at(most, found // n_bands, n_words)
        mean_length = np.sqrt(self.lengths[:number] * self.lengths[number])
        return np.flatnonzero(most >= LEAST_WORDS + mean_length / RESIDUES_PER_WORD).tolist()


def words_of(sequence):
    """(n,) int64, a number for each WORD letters in a row."""
    letters = encode(sequence).astype(np.int64)
    n_words = max(0, len(letters) - WORD + 1)
    words = np.zeros(n_words, np.int64)
    for start in range(WORD):
        words = words * len(LETTERS) + letters[start:start + n_words]
    return words


# ---- families ----

def connected(n, pairs):
    """Lists of the numbers, of 0 to n - 1, that are connected by pairs, each in ascending order."""
    partners = [[] for _ in range(n)]
    for one, other in pairs:
        partners[one].append(other)
        partners[other].append(one)
    is_placed = [False] * n
    families = []
    for start in range(n):
        if is_placed[start]:
            continue
        is_placed[start] = True
        family = [start]
        for member in family:       # grows
            for other in partners[member]:
                if not is_placed[other]:
                    is_placed[other] = True
                    family.append(other)
        families.append(sorted(family))
    return families


def draw_of(text):
    """A number from 0 to 1 that depends on a text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
