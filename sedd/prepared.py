"""Prepared folders, which prepare_uniref50.py makes: check them, read them in pieces.

    check_prepared("data/uniref50", val_fraction=0.001)     # whole, and made with these settings
    train = PreparedProteins("data/uniref50")               # nothing is read yet
    proteins = train.read(first, last, token)               # proteins first to last - 1

prepare_uniref50.py describes the files. Writes nothing.
"""
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from proteins.letters import LETTERS
from proteins.sequences import Proteins

FORMAT = "prepared proteins"
VERSION = 1
SETS = ("train", "val")
FILES = {"tokens.bin": np.dtype("u1"), "lengths.bin": np.dtype("<u4"), "keys.bin": np.dtype("<u8")}
REMAKE = "Remove it, then copy or prepare it again."


def read_meta(folder) -> dict:
    """The content of meta.json of a folder made by prepare_uniref50.py, which describes it.

    Raises: ValueError where it is missing, or of another format or version; OSError."""
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
        made_as = (meta["format"], meta["version"], meta["letters"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        made_as = None
    if made_as != (FORMAT, VERSION, LETTERS):
        raise ValueError(f"{path} is missing, or of no prepared folder of version {VERSION}; "
                         f"expected what prepare_uniref50.py makes. If {folder} holds sequence "
                         "files: python prepare_uniref50.py NEW_FOLDER --fasta FILES. If it is a "
                         "copy, copy it again.")
    return meta


def check_prepared(folder, val_fraction=None, min_length=None):
    """Refuse a prepared folder that is not whole, or was prepared with other settings than these.

    Names and sizes are looked at: the content is checked by its keys when it is read.
    Raises: ValueError, naming what differs.
    """
    meta = read_meta(folder)
    differences = []
    for name in SETS:
        for part, entry in meta["sets"][name]["files"].items():
            path = Path(folder) / name / part
            if not path.is_file():
                differences.append(f"{name}/{part} is missing, or no file")
            elif path.stat().st_size != entry["bytes"]:
                differences.append(f"{name}/{part} has {path.stat().st_size:,} bytes (expected "
                                   f"{entry['bytes']:,})")
    if differences:
        raise ValueError(f"{folder} is not whole: {'; '.join(differences)}. Is it half copied? "
                         f"{REMAKE}")
    for name, value in (("val_fraction", val_fraction), ("min_length", min_length)):
        prepared_with = meta[name]
        if value is not None and prepared_with != value:
            raise ValueError(f"data.{name} is {value}, but {folder} was prepared with "
                             f"{prepared_with}; expected the same. Set data.{name}={prepared_with},"
                             f" or prepare again with --{name} {value}.")


def keys_hash(keys):
    """Hash of a set of proteins and their order, as text: blake2b (8 bytes) of the keys."""
    return hashlib.blake2b(keys.astype("<u8").tobytes(), digest_size=8).hexdigest()


class PreparedProteins:
    """One set of a prepared folder, read in pieces. For BatchReader it works as Proteins does.

    len(): number of proteins. length_counts() and letter_counts(): see Proteins.
    """

    def __init__(self, folder, name="train"):
        self.folder = Path(folder)
        self.name = name
        self.meta = read_meta(folder)["sets"][name]
        self.files = {part: open(self.folder / name / part, "rb", buffering=0) for part in FILES}

    def __len__(self):
        return self.meta["proteins"]

    def length_counts(self):
        return tuple(np.array(self.meta["length_histogram"], np.int64).reshape(-1, 2).T)

    def letter_counts(self):
        return np.array(self.meta["letter_counts"], np.int64)

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
        return data
