"""Which single mutations to measure next: the highest scores of a scan, without those measured.

    measured = measured_sites(table_proteins)               # of a table, from place_all
    proteins = keep_measured_chains(scanned, table_proteins, "table.csv")
    chosen = choose_proposals(proteins, scores, measured, top=96, per_position=3)
    text = table_text(*in_order(proteins, scores, chosen), scored_by, folder)   # scores.py

A mutation is known by the content of its chain, not by the name of a file: a copy of a structure is
the same protein, and one that has other residues or numbers is another. No model here. Writes
nothing.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proteins.letters import LETTERS
from proteins.mutations import Protein
from proteins.scores import written
from proteins.seeds import content_key

UNMARKED, MEASURED, PROPOSED = range(3)     # what a picture shows of a mutation


class Site(NamedTuple):
    """A residue of a chain, and the letter that it is changed to."""
    chain: int          # hash of its name, numbers and letters
    number: str         # of the residue in the file
    letter: str


class Choice(NamedTuple):
    """A proposed variant of a scan."""
    protein: int        # its place among the proteins
    variant: int        # its place among the variants of that protein


def measured_sites(proteins: list[Protein]) -> set[Site]:
    """The single mutations that a table has, also those without a value. A mutation that it has
    beside others alone, in a variant of several, is not among them."""
    return {site for protein in proteins for site in sites_of(protein)}


def keep_measured_chains(proteins: list[Protein], table_proteins: list[Protein],
                         path: str | Path) -> list[Protein]:
    """A scan without the chains that a table does not have, such as copies in a complex.

    Args:
        proteins:       of the scan.
        table_proteins: those that the table is of.
        path:           of the table, for messages.
    Raises: ValueError if none is left, or none of their mutations is unmeasured.
    """
    chains = {chain for protein in table_proteins for chain in chains_of(protein).values()}
    measured = measured_sites(table_proteins)
    kept = []
    n_left = 0
    for protein in proteins:
        numbers = [number for number, site in enumerate(sites_of(protein)) if site.chain in chains]
        if numbers:
            kept.append(protein._replace(
                variants=[protein.variants[number] for number in numbers],
                changes=[protein.changes[number] for number in numbers]))
            n_left += sum(site not in measured for site in sites_of(kept[-1]))
    if not kept:
        first = table_proteins[0]
        raise ValueError(f"{path}: found variants of {first.name}, chain {first.chain}, and none "
                         "of a chain that is scanned; expected some of the same residues with the "
                         "same numbers.")
    if not n_left:
        raise ValueError(f"{path} has all mutations of the scan; expected some that are not "
                         "measured.")
    return kept


def choose_proposals(proteins: list[Protein], scores: list[np.ndarray], measured: Container[Site],
                     top: int, per_position: int) -> list[Choice]:
    """The unmeasured single mutations of highest score, best first.

    Args:
        proteins:     of a scan.
        scores:       (n,) of the variants of each. They are compared as they are written, so that
            rounding on another number of ranks changes no choice; of equal ones the first counts.
        top:          most of them.
        per_position: most of one residue.
    Returns: fewer than top if no more are left.
    """
    candidates = []
    for place, (protein, protein_scores) in enumerate(zip(proteins, scores)):
        for number, (site, score) in enumerate(zip(sites_of(protein), protein_scores)):
            if site not in measured:
                candidates.append((-float(written(score)), Choice(place, number), site))
    candidates.sort()
    chosen = []
    sites = set()           # a protein may have been given twice
    at_position = Counter()
    for _, choice, site in candidates:
        position = (site.chain, site.number)
        if len(chosen) < top and site not in sites and at_position[position] < per_position:
            chosen.append(choice)
            sites.add(site)
            at_position[position] += 1
    return chosen


def describe_proposals(chosen: list[Choice], top: int, per_position: int) -> str:
    """A line on how many are proposed."""
    line = f"proposed: {len(chosen):,} mutations, at most {per_position} per position"
    if len(chosen) < top:
        line += f"; found no more for --top {top:,}"
    return line


def in_order(proteins: list[Protein], scores: list[np.ndarray],
             chosen: list[Choice]) -> tuple[list[Protein], list[np.ndarray]]:
    """Proteins of one variant each, and their scores, in the order of the choice."""
    ranked = []
    ranked_scores = []
    for place, number in chosen:
        protein = proteins[place]
        ranked.append(protein._replace(variants=[protein.variants[number]],
                                       changes=[protein.changes[number]]))
        ranked_scores.append(scores[place][number:number + 1])
    return ranked, ranked_scores


def marks_of(proteins: list[Protein], measured: Container[Site],
             chosen: list[Choice]) -> list[np.ndarray]:
    """(n,) of the variants of each protein: UNMARKED, MEASURED or PROPOSED."""
    marks = [np.array([MEASURED if site in measured else UNMARKED for site in sites_of(protein)])
             for protein in proteins]
    for place, number in chosen:
        marks[place][number] = PROPOSED
    return marks


def sites_of(protein: Protein) -> list[Site]:
    """The Site of each variant of one mutation, in the order of the variants."""
    chains = chains_of(protein)
    residues = {}           # row of the complex -> (hash of the chain, number)
    for name, chain_hash in chains.items():
        numbers = protein.structure.chains[name].numbers
        for row, number in zip(protein.complex.rows([name]), numbers):
            residues[int(row)] = (chain_hash, number)
    return [Site(*residues[changes[0][0]], LETTERS[changes[0][1]])
            for changes in protein.changes if len(changes) == 1]


def chains_of(protein):
    """{name: hash} of the chains that are mutated."""
    hashes = {}
    for name in protein.complex.design:
        chain = protein.structure.chains[name]
        hashes[name] = content_key(name, repr(chain.numbers), chain.S)
    return hashes
