"""Scores of the variants of many proteins: computed with a progress bar, written as a table.

    proteins, skipped = place_all(read_mutations("s2648.csv", measured="ddg"))
    scores = list(score_proteins(model, proteins, Scoring(n_orders=4), correction=model))
    text = table_text(proteins, scores)                     # CSV
    report = correlate_proteins(proteins, scores, lower_is_better=True)
    print(report_text(proteins, scores, "ddg", lower_is_better=True))

Writes nothing but the progress bar, to standard error, if that is a terminal.
"""
import csv
import io
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from proteins.correlation import FEWEST, Report, correlate
from mpnn.model import ProteinMPNN
from proteins.mutations import Mutation, MutationTable, Protein, Variant
from mpnn.settings import Design
from mpnn.variants import score_alone, score_variants, work_of
from proteins.letters import AMINO_ACIDS, LETTERS
from training.log import progress_bar

SCORE = "score"         # the column that is added to a table
PATIENCE = 10.0         # seconds of silence, after which there is a progress bar


class Scoring(NamedTuple):
    """How variants are scored; see score_variants."""
    n_orders: int = 4
    seed: int = 0
    batch_size: int = 8


def score_proteins(model: ProteinMPNN, proteins: list[Protein], scoring: Scoring,
                   correction: ProteinMPNN | None = None) -> Iterator[np.ndarray]:
    """Yield the scores (n,) of the variants of each protein, float64, in nats; see
    mpnn/variants.py.

    Args:
        model:      in eval mode, on its device.
        correction: model whose score of the residue alone is subtracted, or None.
    """
    total = sum(work_of(protein.changes, scoring.n_orders) for protein in proteins)
    with progress_bar(True, total=total, unit=" residues", delay=PATIENCE) as bar:
        for protein in proteins:
            found = score_variants(model, protein.complex, protein.changes, *scoring,
                                   done=bar.update)
            if correction is not None:
                found -= score_alone(correction, protein.complex, protein.changes)
            yield found


def all_single_mutations(design: Design, name: str) -> Protein:
    """The 19 other letters at each designed, resolved position whose letter is known.

    name: of the structure, as it shall stand in the table."""
    variants = []
    changes = []
    for chain, span in design.spans.items():
        for position, number in zip(span, design.structure.chains[chain].numbers):
            row = int(design.rows[position])
            wild_type = LETTERS[design.complex.S[row]]
            if not design.drawn[row] or wild_type not in AMINO_ACIDS:
                continue
            for mutant in AMINO_ACIDS.replace(wild_type, ""):
                mutation = Mutation(wild_type, number, mutant)
                cells = {"pdb_file": name, "chain": chain, "mutation": str(mutation)}
                variants.append(Variant(0, cells, (mutation,), math.nan))
                changes.append([(row, LETTERS.index(mutant))])
    return Protein(name, design.structure, design.complex, variants, changes)


def check_no_score(table: MutationTable) -> None:
    """ValueError for a table that has a column of the name of the result."""
    if SCORE in table.variants[0].cells:
        raise ValueError(f"{table.path} has a column {SCORE}, which is the name of the result; "
                         "expected another name for it.")


def table_text(proteins: list[Protein], scores: list[np.ndarray],
               added: tuple[str, ...] = ("pdb_file", "chain")) -> str:
    """CSV of the variants, protein by protein: their own columns and their score.

    added: columns that are put first if the variants lack them, as those of a list do."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = list(proteins[0].variants[0].cells)
    added = [name for name in added if name not in columns]
    writer.writerow([*added, *columns, SCORE])
    for protein, of_protein in zip(proteins, scores):
        own = {"pdb_file": protein.name, "chain": protein.chain}
        for variant, score in zip(protein.variants, of_protein):
            writer.writerow([*(own[name] for name in added), *variant.cells.values(),
                             f"{score:.5f}"])
    return text.getvalue()


def check_measured(proteins: list[Protein], column: str) -> None:
    """ValueError for fewer measured values than correlate_proteins needs, or if all are equal."""
    values = [variant.measured for protein in proteins for variant in protein.variants
              if math.isfinite(variant.measured)]
    if len(values) < FEWEST:
        raise ValueError(f"found {len(values)} variants with a value in the column {column}; "
                         f"expected at least {FEWEST} to correlate.")
    if len(set(values)) == 1:
        raise ValueError(f"found {values[0]:g} as {column} of all {len(values):,} variants; "
                         "expected different values to correlate.")


def correlate_proteins(proteins: list[Protein], scores: list[np.ndarray],
                       lower_is_better: bool = False, seed: int = 0) -> Report:
    """Correlation of scores with the variants' measured values, where there are any.

    Args:
        lower_is_better: such as for ddG, positive = destabilising: the sign of the measured values
            is turned.
        seed:            of the bootstrap.
    Raises: ValueError for fewer than FEWEST measured values.
    """
    sign = -1 if lower_is_better else 1
    names = []
    measured = []
    for protein in proteins:
        for variant in protein.variants:
            names.append(f"{protein.name} {protein.chain}")
            measured.append(sign * variant.measured)
    is_measured = np.isfinite(measured)
    return correlate(np.concatenate(scores)[is_measured], np.array(measured)[is_measured],
                     np.array(names)[is_measured], seed)


def report_text(proteins: list[Protein], scores: list[np.ndarray], measured: str,
                lower_is_better: bool = False, seed: int = 0) -> str:
    """The lines of correlate_proteins, under one that says of what. measured: the column."""
    report = correlate_proteins(proteins, scores, lower_is_better, seed)
    better = "lower" if lower_is_better else "higher"
    title = f"score against {measured} ({better} is better), 95 % intervals in brackets"
    return "\n".join([title, *report.lines()])
