"""Tables that people write: CSV with commas or tabs, each line checked, all problems listed. JSON.

    rows = read_rows("designs.csv", required=("pdb", "score"), optional=("context",))
    cells = check_cells(row)                # of each row; ValueError: what is wrong in it
    value = read_number(cells["score"], "score")
    refuse_all(path, problems)              # ["line 3: found ..."]: raises, unless there are none
    lines += describe_duplicates([[1.5], [2, 2.5]], "designs", "means count")   # "3 rows are 2"
"""
import collections
import contextlib
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from training.files import read_text
from training.problems import refuse

MOST_BYTES = 1 << 30        # of a table: millions of lines
LARGEST_NUMBER = 1e100      # of a table, so that sums of squares stay finite
MAX_LISTED = 10             # bad lines or records of a file that a message lists


def read_rows(path: Path, required: Sequence[str],
              optional: Sequence[str] = ()) -> list[tuple[int, dict]]:
    """[(line number, {column: text})] of the rows of a table.

    Args:
        required: columns that must be there, once.
        optional: columns that may be there, once.
    Raises: ValueError. A row with more or fewer cells than columns passes: see check_cells.
    """
    text = read_table_text(path)
    try:
        dialect = "excel-tab" if "\t" in text.partition("\n")[0] else "excel"
        rows = csv.DictReader(io.StringIO(text, newline=""), dialect=dialect, skipinitialspace=True)
        rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
        numbered = [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ValueError(f"{path} is no table: {error}; expected CSV in UTF-8.") from None
    check_columns(path, rows.fieldnames, required, optional)
    return numbered


def check_columns(path, columns, required, optional):
    """ValueError for columns that a table lacks, or has twice."""
    if len(columns) == 1 and ";" in columns[0]:
        raise ValueError(f"{path}: line 1 is separated by semicolons; expected commas or tabs, and "
                         "numbers with a decimal point. Save the table as CSV with commas.")
    times = collections.Counter(columns)
    missing = [name for name in required if not times[name]]
    if missing:
        names = ", ".join(columns[:MAX_LISTED]) or "nothing"
        raise ValueError(f"{path} has no column {', '.join(missing)}; found {names:.200}; expected "
                         f"each of {', '.join(required)} once in line 1, separated by commas or "
                         "tabs.")
    double = [name for name in (*required, *optional) if times[name] > 1]
    if double:
        raise ValueError(f"{path} has the column {', '.join(double)} more than once; expected "
                         "each once.")


def read_table_text(path: Path) -> str:
    """The text of a table. Raises: ValueError for what is no file of text, or too large."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {str(path):.200}; expected a table in CSV.")
    return read_text(path, MOST_BYTES)


def table_columns(text: str) -> list[str]:
    """The words of the first line of a table's text, such as the names of its columns.

    Semicolons separate too: so a table with these, which read_rows refuses, is known as one."""
    line = text.lstrip().partition("\n")[0]
    return [cell.strip().strip('"') for cell in re.split("[,;\t]", line)]


def check_cells(row: dict) -> dict:
    """A row {column: text} without blanks around texts. ValueError unless a cell per column."""
    if None in row.values() or None in row:
        raise ValueError("found more or fewer cells than columns")
    return {column: text.strip() for column, text in row.items()}


def read_number(text: str, column: str) -> float:
    """The number in a cell. Raises: ValueError for anything else, and for nan and infinities."""
    number = math.nan
    if "_" not in text:     # float() reads 1_000 as 1000
        with contextlib.suppress(ValueError):
            number = float(text)
    if not abs(number) < LARGEST_NUMBER:    # `not <` is true for nan too
        raise ValueError(f"found {text!a:.60} as {column}; expected a number below "
                         f"{LARGEST_NUMBER:g}, or nothing")
    return number


def refuse_all(path: str | Path, problems: list[str], things: str = "lines") -> None:
    """Raise a ValueError that lists the problems of a file, the first ones if there are many.

    Args:
        problems: texts such as "line 3: found ..."; none: nothing is raised.
        things: a word for what the texts name."""
    if len(problems) == 1:
        raise ValueError(f"{path}, {problems[0]}")
    refuse(problems, f"{path}: {len(problems):,} {things} cannot be used:", MAX_LISTED)


def describe_duplicates(values: Iterable[list[float]], things: str, what_counts: str) -> list[str]:
    """A line on rows of a table that are of one thing; none if each row is of another.

    values: of the rows of each thing. what_counts: text on what is made of them."""
    values = list(values)
    n_rows = sum(map(len, values))
    if n_rows == len(values):
        return []
    largest = max(max(each) - min(each) for each in values)
    return [f"{n_rows:,} rows are {len(values):,} {things} ({what_counts}); those of one differ by "
            f"up to {largest:.6g}"]


# ---- JSON ----

def parse_json(text: str | bytes, where: str | Path, expected: str) -> Any:
    """The value of a text of JSON, whose objects have each key once.

    where, expected: for messages: file, perhaps with a line; what the value should be.
    Raises: ValueError for anything else."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: this is not valid JSON: {str(error)[:80]}. Expected "
                         f"{expected}.") from None


def unique_keys(items: list[tuple]) -> dict:
    """Dict of the (key, value) items of a JSON object. Raises: ValueError for a key given twice."""
    unique = {}
    for name, value in items:
        if name in unique:
            raise ValueError(f"key {quote(name)} given twice")
        unique[name] = value
    return unique


def quote(value) -> str:
    """A value as short JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
