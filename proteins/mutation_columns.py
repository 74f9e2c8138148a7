"""Lines of lists and tables of mutations: by which names their columns are known.

    lines = read_lines(Path("s2648.csv"), "ddg")
    for number, cells in lines.rows:            # cells["mutation"], whatever the file calls it
        text = mutation_text(cells, lines.parts)

A table has line 1 with the names of its columns, a list has variants from line 1 on. Writes
nothing.
"""
from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from proteins.csv_files import first_line, is_no_value, read_rows, read_table_text, table_columns
from proteins.notation import is_letter, read_variant

# Names of columns, as plain_name makes them.
OPTIONAL_COLUMNS = ("pdb_file", "chain", "context", "sequence")
MUTATION_COLUMNS = ("mutations", "mutant", "mutants", "variant", "variants", "muts", "mut_type",
                    "aa_change", "aa_mutation", "aa_substitution", "aa_substitutions",
                    "amino_acid_change", "protein_change", "protein_variant", "substitution",
                    "substitutions", "hgvs", "hgvs_pro", "hgvs_p", "hgvsp")
# Where the parts of a mutation have columns of their own. The mutant's letter may also be in one of
# the columns above; `mut` has the whole mutation where there are no such parts.
WILD_TYPE_COLUMNS = ("wildtype", "wild_type", "wt", "wt_aa", "wtaa", "aa_wt", "wild", "wild_aa",
                     "wt_residue", "wildtype_aa", "wild_type_aa", "ref_aa", "aa_ref")
POSITION_COLUMNS = ("position", "pos", "resid", "residue", "residue_number", "res_num", "resnum",
                    "resi", "resseq", "site", "aa_position", "aa_pos")
MUTANT_COLUMNS = ("mut", "mut_aa", "mutaa", "aa_mut", "mutant_aa", "mut_residue", "mutant_residue",
                  "alt_aa", "aa_alt")


class PartColumns(NamedTuple):
    """Columns that have the parts of a mutation, besides the mutant's letter."""
    wild_type: str
    position: str


class Lines(NamedTuple):
    """The lines of a list or table."""
    rows: list[tuple[int, dict[str, str]]]      # (line number, {column: text})
    is_list: bool                               # then a table with the column mutation alone
    parts: PartColumns | None                   # None: mutations are in one column


def read_lines(path: Path, measured: str | None) -> Lines:
    """Read a list or table. Its columns `mutation`, `pdb_file`, `chain`, `context` and `sequence`
    have these names, whatever the file calls them.

    measured: column that must be there. Raises: ValueError."""
    text = read_table_text(path)
    if measured == "":
        raise ValueError("found an empty name of the column of measured values; expected one of "
                         f"those in line 1 of {path}.")
    columns = [name for name in table_columns(text) if name != measured]
    parts = part_columns(columns)
    names = known_columns(path, columns, parts)
    if "mutation" in names.values():
        required = ["mutation", measured] if measured else ["mutation"]
        return Lines(read_rows(path, required, names), is_list=False, parts=parts)
    if text.lstrip().startswith(">"):
        raise ValueError(f"{path} is a FASTA file, which begins with >; expected a list of "
                         "mutations, one variant per line, such as A12V.")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if words:
            rows.append((number, {"mutation": words}))
    check_is_list(path, rows, first_line(text), measured)
    return Lines(rows, is_list=True, parts=None)


def mutation_text(cells: dict[str, str], parts: PartColumns | None) -> str:
    """The text of the mutation of a line; of a letter alone, joined with the columns of its parts.

    Raises: ValueError."""
    text = cells["mutation"]
    if parts is None or not is_letter(text):
        return text
    wild_type = cells.get(parts.wild_type, "")
    position = re.sub(r"\.0+$", "", cells.get(parts.position, ""))      # 12.0, as pandas writes it
    if is_no_value(wild_type) and is_no_value(position):
        return text
    if not is_letter(wild_type) or not re.fullmatch("-?[0-9]+[A-Za-z]?", position):
        raise ValueError(f"found {wild_type!a:.20} as {parts.wild_type}, {position!a:.20} as "
                         f"{parts.position}; expected the wild type's letter, a number")
    return f"{wild_type}{position}{text}"


def plain_name(column):
    """The name of a column without differences of capitals, blanks and hyphens."""
    return re.sub("[ -]+", "_", column.lower())


def column_of(path, columns, names):
    """The only one of the columns that has one of these names; None: there is none. ValueError for
    several, but for one that is spelt as the only name."""
    if len(names) == 1 and names[0] in columns:
        return names[0]
    found = list(dict.fromkeys(name for name in columns if plain_name(name) in names))
    if len(found) > 1:
        raise ValueError(f"{path} has the columns {' and '.join(found)}; expected one of them. "
                         "Rename the other.")
    return found[0] if found else None


def part_columns(columns):
    """The PartColumns of a table, or None unless there is one of each."""
    wild_types = [name for name in columns if plain_name(name) in WILD_TYPE_COLUMNS]
    positions = [name for name in columns if plain_name(name) in POSITION_COLUMNS]
    if len(wild_types) != 1 or len(positions) != 1:
        return None
    return PartColumns(wild_types[0], positions[0])


def known_columns(path, columns, parts):
    """{column in the file: mutation, or one of OPTIONAL_COLUMNS}. That of mutants' letters is
    called mutation, too. Raises: ValueError."""
    found = {name: column_of(path, columns, [name]) for name in OPTIONAL_COLUMNS}
    for names in (["mutation"], MUTATION_COLUMNS, MUTANT_COLUMNS if parts else ["mut"]):
        found["mutation"] = found.get("mutation") or column_of(path, columns, names)
    return {column: name for name, column in found.items() if column}


def check_is_list(path, rows, header, measured):
    """ValueError for the lines of what is no list: a table whose columns have other names, or none.

    header: the first line of the file."""
    if not rows:
        return
    number, cells = rows[0]
    words = cells["mutation"]
    try:
        read_variant(words)
    except ValueError:
        shown = f"line {number} is {words:.80}"
        if re.search("[,;\t]", header):
            shown = f"line 1 is {header.strip():.80}"
        raise ValueError(f"{path}: {shown}; expected the names of the columns of a table, one of "
                         "them mutation (rename the one that has the mutations), or a list of "
                         "mutations such as A12V.") from None
    if measured:
        raise ValueError(f"{path} is a list; expected a table with the columns mutation and "
                         f"{measured} in line 1, so spelt.")
