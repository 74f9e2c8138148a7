"""Scores of the variants of many proteins: as a table, and against what was measured.

    proteins, note = place_all(read_mutations("s2648.csv", measured="ddg"))
    text = table_text(proteins, {SCORE: scores}, "v_48_020", folder)    # scores: (n,) of each
    report = correlate_proteins(proteins, scores, lower_is_better=True)
    print(report_text(report, "ddg", lower_is_better=True))

No model here. Writes nothing.
"""
import csv
import io
import math
import os
from pathlib import Path

import numpy as np

from proteins.correlation import FEWEST, Report, correlate
from proteins.letters import LETTERS
from proteins.mutations import Protein, Variant
from proteins.notation import Mutation

# The columns that are added to a table.
SCORE = "score"
IN_COMPLEX = "score_in_complex"     # of variants of a complex, whose score is that of binding
SCORED_BY = "scored_by"
# That of a combination, which is of a scan.
SUM_OF_SINGLES = "sum_of_singles"


def names_in_result(columns: list[str]) -> dict[str, str]:
    """{column of a table: its name in table_text}: of a column that has the name of a result,
    such as the scores of MaveDB, or of an earlier call, it is another."""
    names = {column: column for column in columns}
    for column in (SCORE, IN_COMPLEX, SCORED_BY):
        if column in names:
            free = f"table_{column}"
            while free in names.values():
                free = f"table_{free}"
            names[column] = free
    return names


def table_text(proteins: list[Protein], results: dict[str, list[np.ndarray]], scored_by: str,
               folder: Path) -> str:
    """CSV of the variants, protein by protein: their own columns, the results, such as their score,
    and by which weights these are. Columns that name the protein come first if the variants lack
    them, as those of a list do; for columns of the names of results see names_in_result. Paths are
    relative to `folder`, as those of a table in it.

    results: {column: of each protein (n,) of its variants}."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = list(proteins[0].variants[0].cells)
    added = [name for name in naming_cells(proteins[0], folder) if name not in columns]
    writer.writerow([*added, *names_in_result(columns).values(), *results, SCORED_BY])
    files = {variant.pdb_file for protein in proteins for variant in protein.variants}
    paths = {file: relative_path(file, folder) for file in files - {None}}
    for protein, *results_of_variants in zip(proteins, *results.values()):
        own = naming_cells(protein, folder)
        for variant, changes, *values in zip(protein.variants, protein.changes,
                                             *results_of_variants):
            cells = dict(variant.cells)
            if is_of_copies(variant, changes):
                cells |= cells_of_copies(protein, variant, changes)
                own |= {"chain": ""} if "chain" in own else {}
            elif "chain" in own:
                own["chain"] = chain_of(protein, variant, changes)
            if variant.pdb_file is not None:
                cells["pdb_file"] = paths[variant.pdb_file]
            writer.writerow([*(own[name] for name in added), *cells.values(),
                             *map(written, values), scored_by])
    return text.getvalue()


def written(score: float) -> str:
    """A score as it stands in a table."""
    return f"{score:.5f}"


def naming_cells(protein, folder):
    """{column: text} that name a protein, as in a table in a folder."""
    if protein.has_structure:
        path = relative_path(Path(protein.structure.name), folder)
        chain = {"chain": ""}       # that of each variant: chain_of
        if not protein.partners:
            return {"pdb_file": path, **chain}
        if not any(map(first_unnamed, protein.variants)):
            chain = {}
        return {"pdb_file": path, "partners": partners_of(protein), **chain}
    if "sequence" in protein.variants[0].cells:
        return {}
    return {"name": protein.name}


def first_unnamed(variant):
    """The first mutation of a variant whose text names no chain; None if all do."""
    return next((mutation for mutation in variant.mutations if not mutation.chain), None)


def is_of_copies(variant: Variant, changes: list[tuple[int, int]]) -> bool:
    """Whether a variant has more changes, as (row of the complex, letter), than its text names."""
    return len(changes) > len(variant.mutations)


def cells_of_copies(protein, variant, changes):
    """{column: text} of a variant whose mutations are in copies, too: the text names all of them,
    so that a reader who knows of no copies finds the same variant."""
    residues = [(name, number) for name in protein.complex.design
                for number in protein.structure.chains[name].numbers]
    texts = []
    for row, letter in changes:
        chain, number = residues[row]
        wild_type = LETTERS[protein.complex.S[row]]
        texts.append(str(Mutation(wild_type, number, LETTERS[letter], chain)))
    cells = {"mutation": ",".join(texts)}
    if "chain" in variant.cells:
        cells["chain"] = ""
    return cells


def chain_of(protein, variant, changes):
    """The chain of the mutations that name none, for the column `chain`; "" where all of several
    chains are named. changes: (row of the complex, letter)."""
    chains = protein.complex.design
    mutation = first_unnamed(variant)
    if len(chains) == 1:
        return chains[0]
    if mutation is None:
        return ""
    changed = {row for row, _ in changes}
    named = {other.chain for other in variant.mutations if other.number == mutation.number}
    for name in chains:
        chain = protein.structure.chains[name]
        row = chain.row_of(mutation.number)
        if (name not in named and row is not None and LETTERS[chain.S[row]] == mutation.wild_type
                and protein.complex.first_row(name) + row in changed):
            return name
    return ""


def partners_of(protein: Protein) -> str:
    """The chains of the two partners, as in the column `partners`."""
    return "_".join(join_chains(partner.design) for partner in protein.partners)


def label_of(protein: Protein) -> str:
    """A text on a protein and its mutated chains."""
    chains = partners_of(protein) if protein.partners else " ".join(protein.complex.design)
    return f"{protein.name} {chains}"


def join_chains(names):
    """HL, or AA,BB of names of several characters."""
    return ("" if all(len(name) == 1 for name in names) else ",").join(names)


def relative_path(path, folder):
    """The path of a file, relative to a folder, as text."""
    return os.path.relpath(absolute(path), folder.resolve())


def absolute(path: Path) -> Path:
    """A path with links to folders followed, on which ".." depends, but not that of the file."""
    return path.parent.resolve() / path.name


def check_measured(proteins: list[Protein], column: str) -> None:
    """ValueError for fewer measured values than correlate_proteins needs, or if all are equal."""
    values = [variant.measured for protein in proteins for variant in protein.variants
              if math.isfinite(variant.measured)]
    if len(values) < FEWEST:
        noun = "variant" if len(values) == 1 else "variants"
        raise ValueError(f"found {len(values)} {noun} with a value in the column {column}; "
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
            names.append(label_of(protein))
            measured.append(sign * variant.measured)
    is_measured = np.isfinite(measured)
    return correlate(np.concatenate(scores)[is_measured], np.array(measured)[is_measured],
                     np.array(names)[is_measured], seed)


def report_text(report: Report, measured: str, lower_is_better: bool = False) -> str:
    """The lines of correlate_proteins, under one that says of what. measured: the column."""
    better = "lower" if lower_is_better else "higher"
    title = f"score against {measured} ({better} is better), 95 % intervals in brackets"
    return "\n".join([title, *report.lines()])
