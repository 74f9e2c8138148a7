"""Prepared folders, which prepare_uniref50.py makes: check them, read them in pieces.

    check_prepared("data/uniref50", val_fraction=0.001)     # whole, and made with these settings
    train = PreparedProteins("data/uniref50")               # nothing is read yet
    proteins = train.read(first, last, token)               # proteins first to last - 1

prepare_uniref50.py describes the files. Writes nothing.
"""
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proteins.letters import LETTERS, N_TOKENS
from proteins.sequences import Proteins
from training.config import key, read_fields
from training.files import read_text

FORMAT = "prepared proteins"
VERSION = 1
SETS = ("train", "val")
FILES = {"tokens.bin": np.dtype("u1"), "lengths.bin": np.dtype("<u4"), "keys.bin": np.dtype("<u8")}
REMAKE = "Remove it, then copy or prepare it again."


@dataclass
class SetMeta:
    """What meta.json says of a set. length_histogram: (residues, number of proteins)."""
    proteins: int = key(least=0)
    residues: int = key(least=0)
    letter_counts: list[int] = key(least=0)
    length_histogram: list[tuple[int, int]] = key()
    keys_hash: str = key()


@dataclass
class SetsMeta:
    train: SetMeta
    val: SetMeta


@dataclass
class Meta:
    """What meta.json says of a folder. The settings without a type are only compared."""
    format: str
    version: int
    letters: str
    sets: SetsMeta
    val_fraction: float = key(least=0, below=1)
    min_length: int = key(least=1)
    release: str | None = None
    source: list[str] | None = None
    source_bytes: Any = None
    source_digest: Any = None
    seed: Any = None
    max_sequences: Any = None


def read_meta(folder) -> Meta:
    """The Meta in meta.json of a folder made by prepare_uniref50.py, which describes the format.

    Raises FileNotFoundError where it is missing, and ValueError for another format or version.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder made by "
                                f"prepare_uniref50.py. If {folder} holds sequence files: python "
                                f"prepare_uniref50.py NEW_FOLDER --fasta FILES. If it is a copy, "
                                f"copy it again.")
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} cannot be read; expected the JSON of prepare_uniref50.py. "
                         f"{REMAKE}") from None
    meta = read_fields(Meta, values, path)
    found = (meta.format, meta.version, meta.letters)
    if found != (FORMAT, VERSION, LETTERS):
        raise ValueError(f"{path} is of format {meta.format!r:.40}, version {meta.version}, "
                         f"letters {meta.letters!r:.40}; expected {FORMAT!r}, version {VERSION}, "
                         f"letters {LETTERS!r}. Prepare the data again with this "
                         "prepare_uniref50.py.")
    return meta


def check_prepared(folder, val_fraction=None, min_length=None):
    """Refuse a prepared folder that is not whole, or was prepared with other settings than these.

    Names and sizes are looked at: the content is checked by its keys when it is read.
    Raises ValueError naming what differs.
    """
    meta = read_meta(folder)
    differs = []
    for name in SETS:
        entry = getattr(meta.sets, name)
        for part, dtype in FILES.items():
            path = Path(folder) / name / part
            n_items = entry.residues if part == "tokens.bin" else entry.proteins
            expected = n_items * dtype.itemsize
            if not path.is_file():
                differs.append(f"{name}/{part} is missing, or no file")
            elif path.stat().st_size != expected:
                differs.append(f"{name}/{part} has {path.stat().st_size:,} bytes (expected "
                               f"{expected:,})")
        of_lengths = (sum(n for _, n in entry.length_histogram),
                      sum(length * n for length, n in entry.length_histogram))
        if of_lengths != (entry.proteins, entry.residues):
            differs.append(f"length_histogram of {name} in meta.json has {of_lengths[0]:,} "
                           f"proteins, {of_lengths[1]:,} residues (expected {entry.proteins:,}, "
                           f"{entry.residues:,})")
        n_letters = len(entry.letter_counts)
        if n_letters != N_TOKENS or sum(entry.letter_counts) != entry.residues:
            differs.append(f"letter_counts of {name} in meta.json has {n_letters} letters, "
                           f"{sum(entry.letter_counts):,} residues (expected {N_TOKENS}, "
                           f"{entry.residues:,})")
    if differs:
        raise ValueError(f"{folder} is not whole: {'; '.join(differs)}. Is it half copied? "
                         f"{REMAKE}")
    for name, value in (("val_fraction", val_fraction), ("min_length", min_length)):
        found = getattr(meta, name)
        if value is not None and found != value:
            raise ValueError(f"data.{name} is {value}, but {folder} was prepared with {found}; "
                             f"expected the same. Set data.{name}={found}, or prepare again "
                             f"with --{name} {value}.")


def keys_hash(keys):
    """Hash of a set of proteins and their order, as text: blake2b (8 bytes) of the keys."""
    return hashlib.blake2b(keys.astype("<u8").tobytes(), digest_size=8).hexdigest()


class PreparedProteins:
    """One set of a prepared folder, read in pieces. For BatchReader it works as Proteins does.

    len(): number of proteins. length_counts() and letter_counts(): see Proteins.
    bytes_read: how many bytes were read so far.
    """

    def __init__(self, folder, name="train"):
        self.folder = Path(folder)
        self.name = name
        self.meta = getattr(read_meta(folder).sets, name)
        self.bytes_read = 0
        self.files = {part: open(self.folder / name / part, "rb", buffering=0) for part in FILES}

    def __len__(self):
        return self.meta.proteins

    def length_counts(self):
        return tuple(np.array(self.meta.length_histogram, np.int64).reshape(-1, 2).T)

    def letter_counts(self):
        return np.array(self.meta.letter_counts, np.int64)

    def lengths_of(self, first, last):
        """Residues of proteins first to last - 1: (last - first,) int64."""
        return self._read("lengths.bin", first, last).astype(np.int64)

    def read(self, first, last, token):
        """Proteins first to last - 1, of which the first begins at residue `token` of the set.

        Raises OSError where a file ends too early, or tokens and keys do not agree.
        """
        lengths = self.lengths_of(first, last)
        tokens = self._read("tokens.bin", token, token + int(lengths.sum()))
        proteins = Proteins(tokens, np.cumsum(lengths) - lengths, lengths)  # computes keys
        bad = np.flatnonzero(proteins.keys != self._read("keys.bin", first, last))
        if len(bad):
            raise OSError(f"{self.folder / self.name} is damaged or was changed under the run: "
                          f"tokens.bin, lengths.bin or keys.bin is wrong at or before protein "
                          f"{first + bad[0]:,}; expected what prepare_uniref50.py wrote. {REMAKE}")
        return proteins

    def read_all(self):
        """The whole set as Proteins in memory."""
        return self.read(0, len(self), 0)

    def _read(self, part, first, last):
        """Items first to last - 1 of a file."""
        dtype = FILES[part]
        data = np.empty(last - first, dtype)
        place = first * dtype.itemsize
        left = data.view(np.uint8)
        # Not seek and read: DataLoader workers share one position in the file; preadv ignores it.
        while len(left):
            n_bytes = os.preadv(self.files[part].fileno(), [left], place)
            if n_bytes == 0:
                break
            place += n_bytes
            left = left[n_bytes:]
        if len(left):
            raise OSError(f"{self.folder / self.name / part} ends {len(left):,} bytes too early; "
                          f"expected the size that it had when it was checked. {REMAKE}")
        self.bytes_read += data.nbytes
        return data
