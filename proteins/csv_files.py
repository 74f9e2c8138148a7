"""Tables that people write: CSV with commas or tabs, each line checked, all problems listed. JSON.

    for line, cells in read_rows("designs.csv", required=("pdb", "score")):
        if not is_no_value(cells["score"]):                     # an empty cell, NA, n.d.
            value = read_number(cells["score"], "score")
    refuse_all(path, problems)              # ["line 3: found ..."]: raises, unless there are none
    lines += describe_duplicates([[1.5], [2, 2.5]], "designs", "means count")   # "3 rows are 2"
"""
import collections
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
MAX_LISTED = 10             # of what a message lists
MOST_REFUSED = 3            # bad lines or records of a file that a refusal lists

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
LIMIT = re.compile(rf"([<>]=?|=[<>]|[≤≥]) *{NUMBER.pattern}")
# At the top of a table, with blank lines between them. A # alone in its cell names a column.
COMMENTS = re.compile(r'(?:[\s,;]*"?#(?!"? *[,;\t])[^\r\n]*)*')
MINUS = "\N{MINUS SIGN}"     # as papers print it; of the keyboard is the hyphen
# What people and programs write for no value; of a spreadsheet, errors too.
NO_VALUE = {"", "na", "n/a", "n.a.", "n.a", "<na>", "nan", "null", "none", "-", "--", ".", "?",
            "\N{EN DASH}", "\N{EM DASH}", "n.d.", "n.d", "nd", "n.m.", "nm", "#n/a", "#value!",
            "#div/0!", "#num!", "#ref!", "#name?", "#null!"}


def read_rows(path: Path, required: Sequence[str],
              names: dict[str, str] | None = None) -> list[tuple[int, dict[str, str]]]:
    """[(line number, {column: text without blanks around it})] of the rows of a table.

    Rows without any text are passed over. Cells that are missing at the end of a row are empty, as
    spreadsheets leave them out.

    Args:
        required: columns that must be there.
        names:    {column in the file: name in the result}, of columns that are called otherwise.
    Raises: ValueError, also for a column that is there twice, and for text beyond the last column.
    """
    text = read_table_text(path)
    dialect = "excel-tab" if "\t" in first_line(text) else "excel"
    # Strict: a quote that is never closed would swallow the rows below it.
    lines = csv.reader(io.StringIO(text, newline=""), dialect=dialect, skipinitialspace=True,
                       strict=True)
    columns = None
    rows = []
    problems = []
    n_read = 0      # lines of the file
    try:
        for texts in lines:
            n_read = lines.line_num
            cells = [cell.strip() for cell in texts]
            if not any(cells):
                continue
            if columns is None:
                columns = [(names or {}).get(name, name) for name in cells]
                check_columns(path, columns, required)
                continue
            beyond = [cell for cell in cells[len(columns):] if cell]
            if beyond:
                problems.append(f"line {lines.line_num}: found {beyond[0]!r:.60} beyond the last "
                                f"of {len(columns)} columns")
            cells += [""] * (len(columns) - len(cells))
            rows.append((lines.line_num, dict(zip(columns, cells))))
    except csv.Error as error:
        raise ValueError(f"{path}, line {n_read + 1}: this row is no CSV ({error}); expected a "
                         "cell that begins with a quote to end with one.") from None
    if columns is None:
        check_columns(path, [], required)
    refuse_all(path, problems)
    return rows


def check_columns(path, columns, required):
    """ValueError for columns that a table lacks, or has twice."""
    if len(columns) == 1 and ";" in columns[0]:
        raise ValueError(f"{path}: line 1 is separated by semicolons; expected commas or tabs, and "
                         "numbers with a decimal point. Save the table as CSV with commas.")
    times = collections.Counter(columns)
    missing = [name for name in required if not times[name]]
    if missing:
        found = ", ".join(columns[:MAX_LISTED]) or "nothing"
        raise ValueError(f"{path} has no column {', '.join(missing)}; found {found:.200}; expected "
                         f"each of {', '.join(required)} once in line 1, separated by commas or "
                         "tabs.")
    double = [name for name in times if name and times[name] > 1]
    if double:
        raise ValueError(f"{path} has the column {', '.join(double)} more than once; expected "
                         "each once.")


def read_table_text(path: Path) -> str:
    """The text of a table, in which comments at its top are empty lines.

    Raises: ValueError for what is no file of text, or too large."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {str(path):.200}; expected a table in CSV.")
    text = read_text(path, MOST_BYTES)
    comments = COMMENTS.match(text)[0]
    return re.sub(r"[^\r\n]", "", comments) + text[len(comments):]


def table_columns(text: str) -> list[str]:
    """The words of the first line of a table's text, such as the names of its columns.

    Semicolons separate too: so a table with these, which read_rows refuses, is known as one."""
    return [cell.strip().strip('"').strip() for cell in re.split("[,;\t]", first_line(text))]


def first_line(text: str) -> str:
    """The first line that has any text in its cells."""
    for line in io.StringIO(text, newline=""):
        if line.strip("\",; \t\r\n"):
            return line
    return ""


def is_no_value(text: str) -> bool:
    """Whether a cell without blanks around it has no value: it is empty, or has a word for it."""
    return not text or text.lower() in NO_VALUE


def is_limit(text: str) -> bool:
    """Whether a cell has a limit, such as >5, in place of a value."""
    return LIMIT.fullmatch(text.replace(MINUS, "-")) is not None


def read_number(text: str, column: str) -> float:
    """The number in a cell, in digits 0 to 9. Raises: ValueError for anything else."""
    number = math.nan
    written = text.replace(MINUS, "-")
    if NUMBER.fullmatch(written):       # float() alone reads 1_000 and other digits, too
        number = float(written)
    if not abs(number) < LARGEST_NUMBER:    # `not <` is true for nan too
        raise ValueError(f"found {text!r:.60} as {column}; expected a number below "
                         f"{LARGEST_NUMBER:g}, or nothing")
    return number


def refuse_all(path: str | Path, problems: list[str], things: str = "lines",
               expected: str = "") -> None:
    """Raise a ValueError that lists the problems of a file, the first ones if there are many.

    Args:
        problems: texts such as "line 3: found ..."; none: nothing is raised.
        things:   a word for what the texts name.
        expected: what was expected of all of them, where the texts do not say it."""
    if len(problems) == 1:
        raise ValueError("; expected ".join(filter(None, [f"{path}, {problems[0]}", expected])))
    heading = f"{path}: {len(problems):,} {things} cannot be used"
    if expected:
        heading += f"; expected {expected}"
    refuse(problems, f"{heading}:", MOST_REFUSED)


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
