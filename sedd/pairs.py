"""Preference pairs of proteins, without structures: files, each entry checked, and their split.

    data = load_pairs(config.data, seed=0, longest=512)     # all that a run needs, in one call

Reads a JSON list of objects, one object per line in a .jsonl file, or a table (.csv, .tsv: commas
or tabs) with columns. Keys of an object, and columns:
    preferred_seq, unpreferred_seq
                    letters of the 20 amino acids and X; the lengths may differ
    group           optional: pairs of one group, such as a protein, are all for training or all for
                    validation. So are pairs that share a sequence
    weight          of the pair in the loss, 1e-6 to 1e6; optional, default 1
    description     anything; not used
Other keys of an object are refused; other columns of a table are not used, and named at the start.
Writes nothing. No model and no process group here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpo.pair_files import (PairsOfRun, hold_out_groups, join_groups, pairs_of_run, read_both,
                            read_items, read_list, read_weight)
from proteins.letters import X_ID, encode
from proteins.seeds import content_key
from proteins.sequences import is_nucleotides
from proteins.tables import check_cells, quote, read_rows, read_table_text, table_columns

REQUIRED = ("preferred_seq", "unpreferred_seq")
OPTIONAL = ("group", "weight", "description")
TABLES = (".csv", ".tsv")


class SequencePair:
    """Two proteins, the first preferred.

    chosen, rejected: (L,) uint8 letters. group: text, or None. weight: in means over pairs.
    key: hash of both, for seeds and caches. length, shared_key: see dpo/pair_plan.py.
    """

    def __init__(self, chosen: np.ndarray, rejected: np.ndarray, group: str | None = None,
                 weight: float = 1.0):
        self.chosen = chosen
        self.rejected = rejected
        self.group = group
        self.weight = weight
        self.key = content_key(chosen, rejected)
        self.length = max(len(chosen), len(rejected))
        self.shared_key = self.length


def read_pairs(path: str | Path, longest: int | None,
               alive: Callable = lambda: None) -> list[SequencePair]:
    """Read and check a file of pairs.

    Args:
        longest: most residues of a sequence, or None: any number. alive: called before each pair.
    Raises: one ValueError with the first problem of each bad item, counted from 0 (of a table: from
        the line below the header); OSError for a file that cannot be opened.
    """
    path = Path(path)

    def read(entry):
        return read_pair(entry, longest)

    if path.suffix.lower() in TABLES:
        rows = [row for _, row in read_rows(path, REQUIRED, OPTIONAL)]
        if not rows:
            raise ValueError(f"{path} holds no pair; expected lines below the header.")
        if "pdb_file" in rows[0]:
            raise ValueError(f"{path} has a column pdb_file: pairs on structures; expected "
                             "sequences alone. For ProteinMPNN give model.kind=proteinmpnn.")
        return read_list(path, rows, lambda row: read(entry_of(row)), "the table", alive)
    return read_items(path, read, "the file", alive)


def unused_columns(path):
    """The columns of a table of pairs that mean nothing here, such as a misspelt one. path: as
    read_pairs has read it, or None."""
    if path is None or Path(path).suffix.lower() not in TABLES:
        return []
    columns = table_columns(read_table_text(Path(path)))
    return [name for name in columns if name not in REQUIRED and name not in OPTIONAL]


def entry_of(row):
    """A row of a table as an object of a JSON file. Raises: ValueError."""
    filled = {name: text for name, text in check_cells(row).items() if text}
    cells = {name: filled[name] for name in (*REQUIRED, *OPTIONAL) if name in filled}
    if "weight" in cells:
        try:
            cells["weight"] = float(cells["weight"])
        except ValueError:
            pass    # read_weight says what is wrong with a text
    return cells


def read_pair(entry, longest):
    """SequencePair of an object. Raises: ValueError with the first problem."""
    if not isinstance(entry, dict):
        raise ValueError(f"found {quote(entry)}; expected an object")
    if "pdb_file" in entry:
        raise ValueError("a pair on a structure (pdb_file); expected sequences alone. For "
                         "ProteinMPNN give model.kind=proteinmpnn")
    for key in sorted(entry.keys() - {*REQUIRED, *OPTIONAL}):
        raise ValueError(f"unknown key {key}; known are {' '.join(REQUIRED + OPTIONAL)}")
    group = entry.get("group")
    if group is not None and not (isinstance(group, str) and group.strip()):
        raise ValueError(f"group is {quote(group)}; expected a text that is not empty")
    chosen, rejected = (read_letters(entry, key, longest) for key in REQUIRED)
    if len(chosen) == len(rejected):
        differ = chosen != rejected
        if not differ.any():
            raise ValueError("preferred and unpreferred are equal: no preference")
        is_known = (chosen != X_ID) & (rejected != X_ID)
        if not (differ & is_known).any():   # X has no likelihood, so these would not be compared
            raise ValueError("preferred and unpreferred differ at unknown residues (X) alone; "
                             "expected a difference of known ones")
    return SequencePair(chosen, rejected, group, read_weight(entry))


def read_letters(entry, key, longest):
    """(L,) uint8 letters of a sequence of an entry. Raises: ValueError."""
    text = entry.get(key)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key} is {quote(text)}; expected the letters of a protein")
    try:
        letters = encode(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}".rstrip(".")) from None
    if is_nucleotides(text.encode()):
        raise ValueError(f"{key} is of nucleotides ({text[:20]}...); expected a protein. Translate "
                         "it")
    if (letters == X_ID).all():
        raise ValueError(f"{key} has unknown residues alone; expected some of the 20 amino acids")
    if longest is not None and len(letters) > longest:
        raise ValueError(f"{key} has {len(letters):,} residues; expected at most {longest:,}: as "
                         "many as the base was trained on, or data.max_length if that is less. "
                         "Leave the pair out")
    return letters


def load_pairs(data: Any, seed: int, longest: int | None,
               alive: Callable = lambda: None) -> PairsOfRun:
    """The pairs to train on and to validate with.

    Args:
        data: section of a config with train_data, val_data, val_fraction.
        seed: of the split. longest, alive: see read_pairs.
    Raises: ValueError that lists the problems of both files.
    """
    pairs, val = read_both(data, lambda path: read_pairs(path, longest, alive))
    lines = [f"data: {data.train_data}: {describe(pairs)}"]
    for path in (data.train_data, data.val_data):
        unused = unused_columns(path)
        if unused:
            lines.append(f"  {path}: columns that are not used: {', '.join(unused)}")
    if val is not None:
        lines.append(f"  {data.val_data}, for validation: {describe(val)}")
        groups = groups_of([*pairs, *val])
        shared = set(groups[:len(pairs)].tolist()) & set(groups[len(pairs):].tolist())
        if shared:
            lines.append(f"ATTENTION: {len(shared):,} groups of pairs that share a sequence are in "
                         "training and validation: it does not tell about new proteins")
    elif data.val_fraction:
        groups = groups_of(pairs)
        if len(set(groups.tolist())) < 2:
            raise ValueError(f"all {len(pairs):,} pairs are of one group, or linked by sequences "
                             "that they share, so none can be held out; expected two groups or "
                             "more. Give a file of validation pairs (--val_data), or train "
                             "without validation (data.val_fraction=0).")
        is_val = hold_out_groups(groups, data.val_fraction, seed)
        val = [pair for pair, held in zip(pairs, is_val) if held]
        n_groups = len(set(groups[is_val].tolist()))
        pairs = [pair for pair, held in zip(pairs, is_val) if not held]
        lines.append(f"  {len(pairs):,} pairs for training, {len(val):,} in {n_groups:,} group(s) "
                     "for validation")
    content = [[(pair.key, pair.weight) for pair in part] for part in (pairs, val or [])]
    return pairs_of_run(pairs, val, content, lines)


def groups_of(pairs: list[SequencePair]) -> np.ndarray:
    """(n,) int64, equal for pairs of one group, and for those that share a sequence, directly or
    through other pairs."""
    sets = []
    for pair in pairs:
        texts = {pair.chosen.tobytes(), pair.rejected.tobytes()}
        if pair.group is not None:
            # The first byte is no letter of a sequence. JSON may hold half a character.
            texts.add(b"\xff" + pair.group.encode(errors="surrogatepass"))
        sets.append(texts)
    return np.array([content_key(root) for root in join_groups(sets)], np.int64)


def describe(pairs: list[SequencePair]) -> str:
    """One line about the pairs of a file."""
    lengths = [len(side) for pair in pairs for side in (pair.chosen, pair.rejected)]
    differ = [int((pair.chosen != pair.rejected).sum()) for pair in pairs
              if len(pair.chosen) == len(pair.rejected)]
    text = f"{len(pairs):,} pairs, {min(lengths):,} to {max(lengths):,} residues"
    if differ:
        text += (f"; {len(differ):,} of equal length, which differ at {min(differ):,} to "
                 f"{max(differ):,} positions (median {int(np.median(differ)):,})")
    contradicted = {(pair.rejected.tobytes(), pair.chosen.tobytes()) for pair in pairs}
    n = sum((pair.chosen.tobytes(), pair.rejected.tobytes()) in contradicted for pair in pairs)
    return text + (f"; {n:,} contradict another" if n else "")
