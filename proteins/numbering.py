"""Whether mutations are of the chain and the numbering that they are looked for in.

    problem = describe_misnumbered([NamedSites(structure, "A", sites_of_each_variant)])
    if problem:     # "97 of 103 variants do not fit; ... With every number 1 larger, all do."

Where the numbers of a table are shifted, a residue in twenty still has the letter that the table
names. Its mutation would be scored, or trained on, at a wrong place, so few that fit are no reason
to take them. Writes nothing. No model here.
"""
from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from proteins.letters import LETTERS, X_ID
from proteins.structures import Chain, Structure

FEWEST = 3          # variants: of one or two, a wrong letter and a wrong numbering look alike
SHARE = 0.1         # of residues, that one letter has in a protein: the most frequent about as much
BY_CHANCE = 0.05    # a numbering that fits as well by chance more often than this is not named
OF_FILE = ""        # the numbering of a Chain; the words of others are for messages
OF_LABELS = "by the numbers label_seq_id of the mmCIF file"
COUNTED = "counted from 1 over the residues of the file"


class NamedSites(NamedTuple):
    """The residues that variants name in one chain."""
    structure: Structure
    chain: str
    variants: list[tuple[tuple[str, str], ...]]     # of each its (letter, number) pairs


class Numbering(NamedTuple):
    """A way to find residues by the numbers of a table."""
    kind: str           # OF_FILE, OF_LABELS or COUNTED
    chain: str | None   # of the structure; None: the one that the variants name
    shift: int          # that is added to each number

    def __str__(self):
        words = []
        if self.kind:
            words.append(self.kind)
        if self.chain is not None:
            words.append(f"in chain {self.chain or '(blank)'}")
        if self.shift:
            size = "larger" if self.shift > 0 else "smaller"
            words.append(f"with every number {abs(self.shift):,} {size}")
        text = ", ".join(words)
        return text[:1].upper() + text[1:]


def describe_misnumbered(chains: list[NamedSites], example: str = "") -> str:
    """A text on variants of which most do not fit, and the numbering with which more do.

    A variant contradicts the numbering if one of its residues has another letter. One whose residue
    is not in the file says nothing about it: often only a part of a protein is resolved.

    Args:
        chains:  that share one mistake, if there is one.
        example: text on a variant that does not fit.
    Returns: "" if the variants that fit may be taken: if they are most; or, where no other
        numbering of the chain explains more, not fewer than those that contradict; or of fewer than
        FEWEST.
    """
    verdicts = Counter(agrees(sites, named.structure.chains[named.chain])
                       for named in chains for sites in named.variants)
    n = verdicts.total()
    n_fit = verdicts[True]
    n_contradict = verdicts[False]
    if n < FEWEST or n_fit > n - n_fit:
        return ""
    found = f"{n - n_fit:,} of {n:,} variants do not fit, such as {example}; expected most to fit."
    better = find_numbering(chains)
    explains = better is not None and count_fitting(chains, better) > n_fit
    # Another chain may be a copy of which more is resolved, and then nothing contradicts.
    if explains and (better.chain is None or n_fit <= n_contradict):
        return f"{found} {describe_fitting(chains, better)}."
    if n_fit >= n_contradict:
        return ""
    return (f"{found} No shift of the numbers and no other chain explains it: is this the right "
            "protein?")


def describe_misfits(misfits: NamedSites) -> str:
    """A text on the few variants of a chain that do not fit, if another numbering explains them;
    else ""."""
    better = find_numbering([misfits])
    if better is None:
        return ""
    n = len(misfits.variants)
    return (f"{n:,} variants do not fit. {describe_fitting([misfits], better)}; some of the others "
            "may fit by chance")


def describe_fitting(chains, numbering):
    """A text on how many variants fit with a numbering."""
    n = sum(len(named.variants) for named in chains)
    n_fit = count_fitting(chains, numbering)
    return f"{numbering}, all do" if n_fit == n else f"{numbering}, {n_fit:,} do"


def agrees(sites, chain):
    """Whether all (letter, number) pairs are residues of the chain; False if one has another
    letter; None if this cannot be told, because one is not there or of unknown letter."""
    verdict = True
    for letter, number in sites:
        row = chain.row_of(number)
        if row is None or chain.S[row] == X_ID:
            verdict = None
        elif LETTERS[chain.S[row]] != letter:
            return False
    return verdict


def find_numbering(chains: list[NamedSites]) -> Numbering | None:
    """The numbering that makes so many more sites fit that chance explains it least; None if chance
    may explain each.

    Of one chain, the other chains of its structure are tried too."""
    fitting = Counter()     # Numbering -> how many fit of the sites that do not fit as they are
    place = {}              # (kind, chain) -> 1 for the first that is tried, 2 ...
    n_sites = 0
    for named in chains:
        candidates = {None: named.structure.chains[named.chain]}
        if len(chains) == 1:
            candidates |= named.structure.chains
            del candidates[named.chain]
        sites = {site for site in itertools.chain(*named.variants)
                 if not agrees([site], candidates[None])}
        # A shift puts each site on another residue: no more can fit than there are.
        n_sites += min(len(sites), max(len(chain.S) for chain in candidates.values()))
        for kind, (name, chain) in itertools.product((OF_FILE, OF_LABELS, COUNTED),
                                                     candidates.items()):
            place.setdefault((kind, name), len(place) + 1)
            for shift in shifts_of(sites, kind, chain):
                fitting[Numbering(kind, name, shift)] += 1

    def log_chance(numbering):
        n_tried = place[numbering.kind, numbering.chain] * (2 * abs(numbering.shift) + 1)
        return math.log(n_tried) + log_chance_to_fit(fitting[numbering], n_sites)

    best = min(fitting, key=log_chance, default=None)
    if best is None or log_chance(best) > math.log(BY_CHANCE):
        return None
    if best.kind == COUNTED:    # often it is just a shift, which is easier to follow
        shifts = [numbering for numbering in fitting if numbering.kind == OF_FILE
                  and numbering.chain == best.chain and fitting[numbering] == fitting[best]
                  and count_fitting(chains, numbering) == count_fitting(chains, best)]
        best = min(shifts, key=log_chance, default=best)
    return best


def log_chance_to_fit(n_fitting, n):
    """An upper bound of ln P(at least n_fitting of n sites fit by chance): how many choices of so
    many sites there are, times the probability that all of a choice fit."""
    ln_choices = math.lgamma(n + 1) - math.lgamma(n_fitting + 1) - math.lgamma(n - n_fitting + 1)
    return ln_choices + n_fitting * math.log(SHARE)


def shifts_of(sites, kind, chain) -> Iterator[int]:
    """For each site and each residue of its letter: the shift with which it is found there."""
    numbers = {}            # (letter, insertion code) -> numbers of residues
    for (number, code), letter in residues_of(kind, chain):
        numbers.setdefault((letter, code), []).append(number)
    for letter, text in sites:
        named, code = split_number(text)
        for number in numbers.get((letter, code), []):
            yield number - named


def residues_of(kind, chain: Chain) -> Iterator[tuple[tuple[int, str], str]]:
    """((number, insertion code), letter) of the residues of a chain by one kind of numbering."""
    n_before = 0
    for row, text in enumerate(chain.numbers):
        if text is None:
            continue
        n_before += 1
        if kind == OF_LABELS:
            text = chain.label_numbers[row] if chain.label_numbers else None
        elif kind == COUNTED:
            text = str(n_before)
        if text is not None:
            yield split_number(text), LETTERS[chain.S[row]]


def split_number(text):
    """(number, insertion code in upper case) of a text such as 52A."""
    number, code = re.fullmatch(r"(-?\d+)(.*)", text).groups()
    return int(number), code.upper()


def count_fitting(chains, numbering):
    """How many variants have all their sites in a numbering."""
    n = 0
    for named in chains:
        name = named.chain if numbering.chain is None else numbering.chain
        letters = dict(residues_of(numbering.kind, named.structure.chains[name]))
        for sites in named.variants:
            found = []
            for letter, text in sites:
                number, code = split_number(text)
                found.append(letters.get((number + numbering.shift, code)) == letter)
            n += all(found)
    return n
