"""Whether the letters that mutations name are those of the residues with their numbers.

    problem = describe_misnumbered([NamedSites(chain, {("M", "1"), ("K", "2")})])
    if problem:     # "77 of 79 residues do not have ... With every number 1 larger, all do."

Where the numbers of a table are shifted, a residue in twenty still has the letter that the table
names. Its mutation would be scored, or trained on, at a wrong place, so few that fit are no reason
to take them. Writes nothing. No model here.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from proteins.letters import LETTERS, X_ID
from proteins.structures import Chain

FEWEST = 3          # residues: of one or two, a wrong letter and a wrong numbering look alike


class NamedSites(NamedTuple):
    """The residues that variants name in one chain."""
    chain: Chain
    sites: set[tuple[str, str]]     # (wild type's letter, number in the file)
    mutants: Sequence[tuple[str, str]] = ()     # (mutant's letter, number) of each mutation


def describe_misnumbered(chains: list[NamedSites], example: str = "") -> str:
    """A text on chains of whose named residues fewer than half have the letter that is named.

    A residue that is not in the file, or of unknown letter, says nothing: often only a part of a
    protein is resolved.

    Args:
        chains:  that share one mistake, if there is one.
        example: text on a variant that does not fit.
    Returns: "" if the variants that fit may be taken.
    """
    n_fit, n = count_letters(chains, 0)
    if n < FEWEST or 2 * n_fit >= n:
        return ""
    text = (f"{n - n_fit:,} of {n:,} residues do not have the letter that the variants name, such "
            f"as {example}; expected most to.")
    if have_mutants(chains):
        return (f"{text} The mutants' letters stand there: give the sequence or structure of the "
                "wild type, not that of the mutant.")
    shift = best_shift(chains)
    n_fit, n = count_letters(chains, shift)
    if 2 * n_fit <= n:
        return f"{text} No shift of the numbers explains it: is this the right chain and protein?"
    size = "larger" if shift > 0 else "smaller"
    all_or_some = "all" if n_fit == n else f"{n_fit:,} of {n:,}"
    return f"{text} With every number {abs(shift):,} {size}, {all_or_some} do."


def count_letters(chains: list[NamedSites], shift: int) -> tuple[int, int]:
    """(how many residues have the letter that is named, how many are there); shift: is added to
    each number."""
    n_fit = 0
    n = 0
    for chain, sites, _ in chains:
        letters = letters_of(chain)
        for letter, text in sites:
            number, code = split_number(text)
            there = letters.get((number + shift, code))
            n += there is not None
            n_fit += there == letter
    return n_fit, n


def have_mutants(chains: list[NamedSites]) -> bool:
    """Whether most residues that mutations name have the mutant's letter. Of all mutations of a
    residue one at most can."""
    n_fit = 0
    n = 0
    for chain, _, mutants in chains:
        letters = letters_of(chain)
        there = [letters.get(split_number(text)) for _, text in mutants]
        n += len(there) - there.count(None)
        n_fit += sum(letter == mutant for letter, (mutant, _) in zip(there, mutants))
    return 2 * n_fit > n


def best_shift(chains: list[NamedSites]) -> int:
    """What, added to each number, finds most residues with the letter that is named; of equally
    good ones the nearest to 0."""
    times = Counter()
    for chain, sites, _ in chains:
        numbers = {}            # (letter, insertion code) -> numbers of residues
        for (number, code), letter in letters_of(chain).items():
            numbers.setdefault((letter, code), []).append(number)
        for letter, text in sites:
            named, code = split_number(text)
            times.update(number - named for number in numbers.get((letter, code), ()))
    return max(times, key=lambda shift: (times[shift], -abs(shift), shift), default=0)


def letters_of(chain):
    """{(number, insertion code): letter} of the residues of known letter."""
    return {split_number(text): LETTERS[token] for text, token in zip(chain.numbers, chain.S)
            if text is not None and token != X_ID}


def split_number(text):
    """(number, insertion code in upper case) of a text such as 52A."""
    number, code = re.fullmatch("(-?[0-9]+)(.*)", text).groups()
    return int(number), code.upper()
