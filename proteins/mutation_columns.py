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

OPTIONAL_COLUMNS = ("pdb_file", "chain", "context", "sequence", "partners")
# Other names, as plain_name makes them.
MUTATION_COLUMNS = ("mutations", "mutant", "mutants", "variant", "variants", "muts", "muttype",
                    "aachange", "aamutation", "aasubstitution", "aasubstitutions",
                    "aminoacidchange", "proteinchange", "proteinvariant", "substitution",
                    "substitutions", "hgvs", "hgvspro", "hgvsp")
# Where the parts of a mutation have columns of their own, those of letters as part_name makes their
# names. The mutant's letter may also be in one of the columns above; `mut` has the whole mutation
# where there are no such parts.
WILD_TYPE_COLUMNS = ("wildtype", "wt", "aawt", "wild", "ref", "aaref", "from")
POSITION_COLUMNS = ("position", "pos", "resid", "residue", "residuenumber", "residueposition",
                    "resnum", "resi", "resseq", "site", "aaposition", "aapos",
                    "aminoacidposition")
MUTANT_COLUMNS = ("mut", "aamut", "mutant", "mutated", "alt", "aaalt", "to")


class PartColumns(NamedTuple):
    """Columns that have the parts of a mutation, besides the mutant's letter."""
    wild_type: str
    position: str


class Lines(NamedTuple):
    """The lines of a list or table."""
    rows: list[tuple[int, dict[str, str]]]      # (line number, {column: text})
    is_list: bool                               # then a table with the column mutation alone
    parts: PartColumns | None                   # None: mutations are in one column
    unused: str = ""            # text on columns of parts that cannot be used; "": there are none


def read_lines(path: Path, measured: str | None) -> Lines:
    """Read a list or table. Its columns `mutation`, `pdb_file`, `chain`, `context`, `sequence` and
    `partners` have these names, whatever the file calls them. All but the first are empty where
    there is no name in them.

    measured: column that must be there. Raises: ValueError."""
    text = read_table_text(path)
    if measured == "":
        raise ValueError("found an empty name of the column of measured values; expected one of "
                         f"those in line 1 of {path}.")
    columns = [name for name in table_columns(text) if name != measured]
    parts = part_columns(columns)
    names = known_columns(path, columns, parts)
    unused = unused_parts(columns)
    if "mutation" in names.values():
        required = ["mutation", measured] if measured else ["mutation"]
        rows = read_rows(path, required, names)
        for _, cells in rows:
            empty = [name for name in OPTIONAL_COLUMNS if is_no_name(cells.get(name))]
            cells.update(dict.fromkeys(empty, ""))
        return Lines(rows, is_list=False, parts=parts, unused=unused)
    if text.lstrip().startswith(">"):
        raise ValueError(f"{path} is a FASTA file, which begins with >; expected a list of "
                         "mutations, one variant per line, such as A12V.")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if words.strip(",; \t"):
            rows.append((number, {"mutation": words}))
    check_is_list(path, rows, first_line(text), measured, unused)
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
        raise ValueError(f"found {wild_type!r:.20} as {parts.wild_type}, {position!r:.20} as "
                         f"{parts.position}; expected the wild type's letter, a number")
    return f"{wild_type}{position}{text}"


def is_no_name(text):
    """Whether a cell that is there has no name of a chain or file."""
    return text is not None and (is_no_value(text) or text == "_")


def plain_name(column):
    """The name of a column without capitals, and without what separates its words."""
    return re.sub("[ _-]", "", column.lower())


def part_name(column):
    """The plain name of a column of letters, without a word for these at its end."""
    return re.sub("(?<=.)(residue|aa|aminoacid)$", "", plain_name(column))


def column_of(path, columns, names, naming=plain_name):
    """The only one of the columns that has one of these names; None: there is none. ValueError for
    several, but for one that is spelt as the only name.

    naming: makes the names that are compared."""
    if len(names) == 1 and names[0] in columns:
        return names[0]
    names = {naming(name) for name in names}
    found = list(dict.fromkeys(name for name in columns if naming(name) in names))
    if len(found) > 1:
        raise ValueError(f"{path} has the columns {' and '.join(found)}; expected one of them. "
                         "Rename the other.")
    return found[0] if found else None


def part_columns(columns):
    """The PartColumns of a table, or None unless there is one of each."""
    wild_types, positions = columns_of_parts(columns)
    if len(wild_types) != 1 or len(positions) != 1:
        return None
    return PartColumns(wild_types[0], positions[0])


def columns_of_parts(columns):
    """(columns of the wild type's letter, columns of the position)."""
    wild_types = [name for name in columns if part_name(name) in WILD_TYPE_COLUMNS]
    positions = [name for name in columns if plain_name(name) in POSITION_COLUMNS]
    return wild_types, positions


def unused_parts(columns):
    """A text on columns of parts of mutations of which there are too many; "" for others."""
    found = columns_of_parts(columns)
    for names in found:
        if all(found) and len(names) > 1:
            return (f"The columns {' and '.join(names)} are not used, as there may be one of them. "
                    "Rename the others.")
    return ""


def known_columns(path, columns, parts):
    """{column in the file: mutation, or one of OPTIONAL_COLUMNS}. That of mutants' letters is
    called mutation, too. Raises: ValueError."""
    found = {name: column_of(path, columns, [name]) for name in (*OPTIONAL_COLUMNS, "mutation")}
    if not found["mutation"]:
        found["mutation"] = column_of(path, columns, MUTATION_COLUMNS)
    if parts and not found["mutation"]:
        found["mutation"] = column_of(path, columns, MUTANT_COLUMNS, part_name)
    if not found["mutation"]:
        found["mutation"] = column_of(path, columns, ["mut"])
    return {column: name for name, column in found.items() if column}


def check_is_list(path, rows, header, measured, unused):
    """ValueError for the lines of what is no list: a table whose columns have other names, or none.

    header: the first line with text. unused: text on columns of the table, if it is one."""
    if not rows:
        return
    number, cells = rows[0]
    try:
        read_variant(cells["mutation"])
    except ValueError:
        above = ""
        if number > 1:
            above = " (above it, blank lines and those that begin with # are passed over)"
        message = (f"{path}: line {number} is {header.strip():.80}{above}; expected the names of "
                   "the columns of a table, one of them mutation (rename the one that has the "
                   f"mutations), or a list of mutations such as A12V. {unused}")
        raise ValueError(message.strip()) from None
    if measured:
        raise ValueError(f"{path} is a list; expected a table with the columns mutation and "
                         f"{measured} in line 1, so spelt.")
