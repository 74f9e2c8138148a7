"""Files of preference pairs: JSON lists, or one object per line in a .jsonl file.

    pairs = read_items("pairs.json", reader.read, "the file")

Finds all that is wrong in a file, and says it once. Writes nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from proteins.csv_files import parse_json, quote
from training.problems import refuse

MOST_PAIRS_LISTED = 20      # at most so many problems of a file, or contradictions, are listed
LEAST_WEIGHT = 1e-6         # of a pair
MOST_WEIGHT = 1e6
EXPECTED_JSON = ("a list of objects; if it has one object per line, name it .jsonl; for a table of "
                 "mutations give loss.unit=table; of scored designs pairs_from_scores.py makes one")


def files_of(value: str | tuple | None) -> list[str]:
    """The files that data.train_data or data.val_data names: none, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [str(value)]


def named(value: str | tuple | None) -> str:
    """The same files, in words."""
    return ", ".join(files_of(value))


def read_both(data: Any, read: Callable) -> tuple[list, list]:
    """What `read` makes of each file of data.train_data, and of each of data.val_data.

    Raises: ValueError that lists the problems of all files."""
    problems = []

    def read_all(value):
        contents = []
        for path in files_of(value):
            try:
                contents.append(read(path))
            except (ValueError, OSError) as error:
                problems.append(str(error))
        return contents

    train = read_all(data.train_data)
    val = read_all(data.val_data)
    if problems:
        raise ValueError("\n".join(problems))
    return train, val


def read_items(path: Path, read: Callable, what_to_mend: str,
               alive: Callable = lambda: None) -> list:
    """What `read` makes of each item of a file.

    Args:
        read:         function of an item, which raises ValueError or OSError with its first
            problem.
        what_to_mend: text for the message.
        alive:        called before each item, to show a watchdog that reading continues.
    Raises: one ValueError with the first problem of each bad item, counted from 0;
        OSError for a file that cannot be opened.
    """
    entries = read_entries(path)
    items = []
    numbers_with = {}               # problem -> numbers of the entries that have it
    for number, entry in enumerate(entries):
        alive()
        try:
            items.append(read(entry))
        except (ValueError, OSError) as error:
            numbers_with.setdefault(str(error), []).append(number)
    problems = []
    for problem, numbers in numbers_with.items():   # one message for all with the same problem
        others = ""
        if len(numbers) > 1:
            others = f" (and {len(numbers) - 1:,} more up to item {numbers[-1]})"
        problems.append(f"item {numbers[0]}: {problem}{others}")
    refuse(problems, f"{path}: found problems in {len(entries) - len(items):,} of "
           f"{len(entries):,} pairs; expected none. Mend {what_to_mend}:", MOST_PAIRS_LISTED)
    return items


def read_entries(path: Path) -> list:
    """The items of a file of pairs. Raises: ValueError or OSError."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; expected a file of preference pairs. Check the "
                                f"path (relative to {Path.cwd()}).")
    text = path.read_bytes()
    if path.suffix.lower() == ".jsonl":
        entries = [parse_json(line, f"{path}, line {number}", EXPECTED_JSON)
                   for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    else:
        entries = parse_json(text, path, EXPECTED_JSON)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: found {quote(entries)}; the top level must be a list of "
                         "objects, [{...}, ...], and not an empty one.")
    return entries


def read_weight(entry: dict) -> float:
    """The weight of a pair in the loss, 1 if none is given. Raises: ValueError."""
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"weight is {quote(weight)}; expected a number above 0, from "
                         f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return float(weight)
