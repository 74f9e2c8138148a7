"""Which mutations to measure next: the highest scores of a scan, without those measured.

    measured = measured_variants(table_proteins)            # of a table, from place_all
    proteins = keep_measured_chains(scanned, table_proteins, "table.csv", measured)
    chosen = choose_proposals(proteins, scores, measured, top=96, per_position=3)
    text = table_text(proteins_of(proteins, chosen), {"score": values_of(scores, chosen)}, ...)

Variants of several of these: proteins/combinations.py. A mutation is known by the content of its
chain, not by the name of a file: a copy of a structure is the same protein, and one that has other
residues or numbers is another. No model here. Writes nothing.
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


def measured_variants(proteins: list[Protein]) -> set[frozenset[Site]]:
    """The variants that a table has, also those without a value. A mutation that it has beside
    others alone, in a variant of several, is not among them."""
    return {sites for protein in proteins for sites in sites_of(protein)}


def keep_measured_chains(proteins: list[Protein], table_proteins: list[Protein],
                         path: str | Path, measured: Container[frozenset[Site]]
                         ) -> list[Protein]:
    """A scan without the chains that a table does not have, such as copies in a complex.

    Args:
        proteins:       of the scan.
        table_proteins: those that the table is of.
        path:           of the table, for messages.
        measured:       what shall not be proposed; empty where combinations of it may be.
    Raises: ValueError if none is left, or none of their mutations is unmeasured.
    """
    chains = {chain for protein in table_proteins for chain in chains_of(protein).values()}
    kept = []
    n_left = 0
    for protein in proteins:
        numbers = [number for number, sites in enumerate(sites_of(protein))
                   if all(site.chain in chains for site in sites)]
        if numbers:
            kept.append(protein._replace(
                variants=[protein.variants[number] for number in numbers],
                changes=[protein.changes[number] for number in numbers]))
            n_left += sum(sites not in measured for sites in sites_of(kept[-1]))
    if not kept:
        first = table_proteins[0]
        raise ValueError(f"{path}: found variants of {first.name}, chain {first.chain}, and none "
                         "of a chain that is scanned; expected some of the same residues with the "
                         "same numbers.")
    if not n_left:
        raise ValueError(f"{path} has all mutations of the scan; expected some that are not "
                         "measured.")
    return kept


def choose_proposals(proteins: list[Protein], scores: list[np.ndarray],
                     measured: Container[frozenset[Site]], top: int,
                     per_position: int) -> list[Choice]:
    """The unmeasured mutations of highest score, best first.

    Args:
        proteins:     of a scan.
        scores:       (n,) of the variants of each.
        top:          most of them.
        per_position: most of one residue.
    Returns: fewer than top if no more are left.
    """
    chosen = []
    done = set()            # a protein may have been given twice
    at_position = Counter()
    for choice, sites in best_first(proteins, scores, measured):
        position = frozenset((site.chain, site.number) for site in sites)
        if len(chosen) < top and sites not in done and at_position[position] < per_position:
            chosen.append(choice)
            done.add(sites)
            at_position[position] += 1
    return chosen


def best_first(proteins: list[Protein], scores: list[np.ndarray],
               measured: Container[frozenset[Site]]) -> list[tuple[Choice, frozenset[Site]]]:
    """The unmeasured variants, those of higher score first. Scores are compared as they are
    written, so that rounding on another number of ranks changes no choice; of equal ones the first
    counts."""
    candidates = []
    for place, (protein, protein_scores) in enumerate(zip(proteins, scores)):
        for number, (sites, score) in enumerate(zip(sites_of(protein), protein_scores)):
            if sites not in measured:
                candidates.append((-float(written(score)), Choice(place, number), sites))
    candidates.sort(key=lambda candidate: candidate[:2])
    return [(choice, sites) for _, choice, sites in candidates]


def describe_proposals(chosen: list[Choice], top: int, per_position: int) -> str:
    """A line on how many are proposed."""
    line = f"proposed: {len(chosen):,} mutations, at most {per_position} per position"
    if len(chosen) < top:
        line += f"; found no more for --top {top:,}"
    return line


def proteins_of(proteins: list[Protein], chosen: list[Choice]) -> list[Protein]:
    """Proteins of one variant each, in the order of the choice."""
    ranked = []
    for place, number in chosen:
        protein = proteins[place]
        ranked.append(protein._replace(variants=[protein.variants[number]],
                                       changes=[protein.changes[number]]))
    return ranked


def values_of(values: list[np.ndarray], chosen: list[Choice]) -> list[np.ndarray]:
    """(1,) of each of proteins_of. values: (n,) of the variants of each protein, as scores."""
    return [values[place][number:number + 1] for place, number in chosen]


def marks_of(proteins: list[Protein], measured: Container[frozenset[Site]],
             proposed: list[Protein]) -> list[np.ndarray]:
    """(n,) of the variants of each protein of a scan: UNMARKED, MEASURED or PROPOSED.

    proposed: proteins of what is proposed, also of variants of several mutations."""
    proposed_sites = {site for protein in proposed for sites in sites_of(protein)
                      for site in sites}
    marks = []
    for protein in proteins:
        marks.append(np.full(len(protein.variants), UNMARKED))
        for number, sites in enumerate(sites_of(protein)):
            if sites <= proposed_sites:
                marks[-1][number] = PROPOSED
            elif sites in measured:
                marks[-1][number] = MEASURED
    return marks


def sites_of(protein: Protein) -> list[frozenset[Site]]:
    """The Sites of each variant."""
    residues = {}           # row of the complex -> (hash of the chain, number)
    for name, chain_hash in chains_of(protein).items():
        numbers = protein.structure.chains[name].numbers
        for row, number in zip(protein.complex.rows([name]), numbers):
            residues[int(row)] = (chain_hash, number)
    return [frozenset(Site(*residues[row], LETTERS[letter]) for row, letter in changes)
            for changes in protein.changes]


def chains_of(protein):
    """{name: hash} of the chains that are mutated."""
    hashes = {}
    for name in protein.complex.design:
        chain = protein.structure.chains[name]
        hashes[name] = content_key(name, repr(chain.numbers), chain.S)
    return hashes
