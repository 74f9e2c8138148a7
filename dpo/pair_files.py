"""Files of preference pairs: JSON lists, or one object per line in a .jsonl file.

    pairs = read_items("pairs.json", reader.read, mend="the file")

Finds all that is wrong in a file, and says it once. Writes nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from proteins.seeds import FOR_SPLIT, content_hash, random_words
from proteins.tables import parse_json, quote
from training.problems import refuse

MOST_PAIRS_LISTED = 20      # at most so many problems of a file, or contradictions, are listed
LEAST_WEIGHT = 1e-6         # of a pair
MOST_WEIGHT = 1e6
EXPECTED_JSON = ("a list of objects; if it has one object per line, name it .jsonl; for a table of "
                 "mutations give loss.unit=table; of scored designs pairs_from_scores.py makes one")


class PairsOfRun(NamedTuple):
    """The pairs of a run."""
    train: list                 # of pairs
    val: list | None
    fingerprint: dict           # {"n", "hash"}, compared when a run is resumed
    description: list           # lines to print


def pairs_of_run(train: list, val: list | None, content: Any, description: list) -> PairsOfRun:
    """PairsOfRun with the hash of `content`, which is all of the pairs that decides a run."""
    fingerprint = {"n": len(train), "hash": content_hash(content)}
    return PairsOfRun(train, val, fingerprint, description)


def read_both(data: Any, read: Callable) -> tuple[list | None, list | None]:
    """What `read` makes of data.train_data and data.val_data; None of one that is not given.

    Raises: ValueError that lists the problems of both files."""
    found = []
    problems = []
    for path in (data.train_data, data.val_data):
        pairs = None
        try:
            if path is not None:
                pairs = read(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
        found.append(pairs)
    if problems:
        raise ValueError("\n".join(problems))
    train, val = found
    return train, val


def read_items(path: Path, read: Callable, mend: str, alive: Callable = lambda: None) -> list:
    """What `read` makes of each item of a file.

    Args:
        read:  function of an item, which raises ValueError or OSError with its first problem.
        mend:  what to mend, for the message.
        alive: called before each item, to show a watchdog that reading continues.
    Raises: one ValueError with the first problem of each bad item, counted from 0;
        OSError for a file that cannot be opened.
    """
    return read_list(path, read_entries(path), read, mend, alive)


def read_list(path: Path, entries: list, read: Callable, mend: str,
              alive: Callable = lambda: None) -> list:
    """What `read` makes of each entry of a file at `path`; see read_items."""
    found = []
    items_of = {}               # problem -> items that have it
    for item, entry in enumerate(entries):
        alive()
        try:
            found.append(read(entry))
        except (ValueError, OSError) as error:
            items_of.setdefault(str(error), []).append(item)
    problems = []
    for problem, items in items_of.items():     # one message for all items with the same problem
        others = ""
        if len(items) > 1:
            others = f" (and {len(items) - 1:,} more up to item {items[-1]})"
        problems.append(f"item {items[0]}: {problem}{others}")
    refuse(problems, f"{path}: found problems in {len(entries) - len(found):,} of "
           f"{len(entries):,} pairs; expected none. Mend {mend}:", MOST_PAIRS_LISTED)
    return found


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


def join_groups(sets: list[set]) -> list:
    """For each set of texts, the least text of its group: sets that share a text, directly or
    through others, are of one group. It does not depend on their order."""
    def root(text):
        while parent[text] != text:
            parent[text] = parent[parent[text]]     # shortens the path for the next search
            text = parent[text]
        return text

    linked = [sorted(texts) for texts in sets]
    parent = {text: text for texts in linked for text in texts}     # a tree of texts is a group
    for texts in linked:
        for text in texts:
            low, high = sorted((root(texts[0]), root(text)))
            parent[high] = low
    return [root(texts[0]) for texts in linked]


def hold_out_groups(groups: np.ndarray, val_fraction: float, seed: int) -> np.ndarray:
    """(n,) bool: which pairs are held out, whole groups drawn at random, about val_fraction of all;
    the smallest group at least. Only the seed and the groups decide.

    groups: (n,) int64, two different ones at least."""
    keys, counts = np.unique(groups, return_counts=True)
    draws = [random_words(1, [FOR_SPLIT, seed, key])[0] for key in keys.tolist()]
    order = np.argsort(draws, kind="stable").tolist()
    held_out = []
    room = max(1, val_fraction * len(groups))
    for group in order:
        if counts[group] <= room:
            held_out.append(group)
            room -= counts[group]
    held_out = held_out or [min(order, key=lambda group: counts[group])]
    return np.isin(groups, keys[held_out])
