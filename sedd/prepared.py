"""Prepared folders, which prepare_uniref50.py makes: check them, read them in pieces, copy them.

    check_prepared("data/uniref50", val_fraction=0.001)     # whole, and made with these settings
    train = PreparedProteins("data/uniref50")               # nothing is read yet
    proteins = train.read(first, last, token)               # proteins first to last - 1
    stage_prepared("data/uniref50", "/local/copy", report)

prepare_uniref50.py describes the files. Writes nothing but the copy that stage_prepared makes.
"""
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np

from proteins.letters import LETTERS, N_TOKENS
from proteins.sequences import Proteins
from training.files import read_text

FORMAT = "prepared proteins"
VERSION = 1
SETS = ("train", "val")
PARTS = {"tokens.bin": np.dtype("u1"), "lengths.bin": np.dtype("<u4"), "keys.bin": np.dtype("<u8")}
LETTERS_READ = 64 << 20         # residues, the first of a set, whose letters are counted
LETTERS_DIFFER = 0.005          # most by which the share of a letter among them is another one
READ_BYTES = 16 << 20           # read at a time
REMAKE = "Remove it, then copy or prepare it again."


def read_meta(folder):
    """The dict in meta.json of a folder made by prepare_uniref50.py, which describes the format.

    Raises FileNotFoundError where it is missing, and ValueError for another format or version.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder made by "
                                f"prepare_uniref50.py. If {folder} holds sequence files: python "
                                f"prepare_uniref50.py NEW_FOLDER --fasta FILES. If it is a copy, "
                                f"copy it again.")
    try:
        meta = json.loads(read_text(path))
        found = (meta["format"], meta["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} cannot be read; expected the JSON of prepare_uniref50.py. "
                         f"{REMAKE}") from None
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {found[0]!r:.40}, version {found[1]!r:.40}; "
                         f"expected {FORMAT!r}, version {VERSION}. Prepare the data again with "
                         "this prepare_uniref50.py.")
    problems = problems_of_settings(meta)
    sets = meta.get("sets")
    for name in SETS:
        entry = sets.get(name) if isinstance(sets, dict) else None
        problems += [f"sets.{name}{text}" for text in problems_of_set(entry)]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}; expected what prepare_uniref50.py wrote. "
                         f"{REMAKE}")
    return meta


def problems_of_settings(meta):
    """Texts on what is wrong with the settings in a meta.json."""
    problems = []
    fraction = meta.get("val_fraction")
    if type(fraction) not in (int, float) or not 0 <= fraction < 1:
        problems.append(f"val_fraction is {fraction!r:.40}")
    if not is_count(meta.get("min_length")):
        problems.append(f"min_length is {meta.get('min_length')!r:.40}")
    if meta.get("letters") != LETTERS:
        problems.append(f"letters is {meta.get('letters')!r:.40}, not {LETTERS}")
    if not isinstance(meta.get("release"), (str, type(None))):
        problems.append(f"release is {meta['release']!r:.40}")
    source = meta.get("source", [])
    if not isinstance(source, list) or not all(isinstance(name, str) for name in source):
        problems.append(f"source is {source!r:.40}")
    return problems


def problems_of_set(entry):
    """Texts on what is wrong with a set's entry in a meta.json, or does not agree with the rest."""
    if not isinstance(entry, dict):
        return [" is missing"]
    problems = [f".{key} is {entry.get(key)!r:.40}" for key in ("proteins", "residues")
                if not is_count(entry.get(key))]
    letters = entry.get("letter_counts")
    if not is_list_of_counts(letters, N_TOKENS):
        problems.append(f".letter_counts is {letters!r:.40}")
    histogram = entry.get("length_histogram")
    if not isinstance(histogram, list) or not all(is_list_of_counts(row, 2) for row in histogram):
        problems.append(f".length_histogram is {histogram!r:.40}")
    if not isinstance(entry.get("keys_hash"), str):
        problems.append(f".keys_hash is {entry.get('keys_hash')!r:.40}")
    sizes = {}
    for part in PARTS:
        files = entry.get("files")
        file = files.get(part) if isinstance(files, dict) else None
        sizes[part] = file.get("bytes") if isinstance(file, dict) else None
        if not is_count(sizes[part]):
            problems.append(f".files: bytes of {part} is {sizes[part]!r:.40}")
    return problems or disagreements(entry, sizes)


def disagreements(entry, sizes):
    """Texts on numbers of a set that do not agree. entry: of the right types. sizes: {file: bytes}.
    """
    proteins = entry["proteins"]
    residues = entry["residues"]
    lengths = [length for length, _ in entry["length_histogram"]]
    problems = []
    if lengths != sorted(set(lengths)) or 0 in lengths:
        problems.append(".length_histogram: lengths are not 1 or more, in ascending order")
    for name, value in (
            ("length_histogram", sum(length * n for length, n in entry["length_histogram"])),
            ("letter_counts", sum(entry["letter_counts"])), ("tokens.bin", sizes["tokens.bin"])):
        if value != residues:
            problems.append(f".residues is {residues}, but {value} by {name}")
    for name, value in (("length_histogram", sum(n for _, n in entry["length_histogram"])),
                        ("lengths.bin", sizes["lengths.bin"] / 4),
                        ("keys.bin", sizes["keys.bin"] / 8)):
        if value != proteins:
            problems.append(f".proteins is {proteins}, but {value:.12g} by {name}")
    return problems


def is_count(value):
    """Whether a value from JSON is a whole number from 0, which an int64 holds."""
    return type(value) is int and 0 <= value < 2**63


def is_list_of_counts(value, n):
    return isinstance(value, list) and len(value) == n and all(map(is_count, value))


def check_prepared(folder, val_fraction=None, min_length=None, alive=lambda: None):
    """Refuse a prepared folder that is not whole, or was prepared with other settings than these.

    Names, sizes, keys and some of the letters are looked at: the rest of the content is checked by
    its keys when it is read. alive: called now and then, to show that it goes on.
    Raises ValueError naming what differs.
    """
    meta = read_meta(folder)
    differs = []
    for name, part in itertools.product(SETS, PARTS):
        path = Path(folder) / name / part
        expected = meta["sets"][name]["files"][part]["bytes"]
        if not path.is_file():
            differs.append(f"{name}/{part} is missing, or no file")
        elif path.stat().st_size != expected:
            differs.append(f"{name}/{part} has {path.stat().st_size:,} bytes (expected "
                           f"{expected:,})")
    if differs:
        raise ValueError(f"{folder} is not whole: {'; '.join(differs)}. Is it half copied? "
                         f"{REMAKE}")
    for key, value in (("val_fraction", val_fraction), ("min_length", min_length)):
        if value is not None and meta[key] != value:
            raise ValueError(f"data.{key} is {value}, but {folder} was prepared with {meta[key]}; "
                             f"expected the same. Set data.{key}={meta[key]}, or prepare again "
                             f"with --{key} {value}.")
    for name in SETS:
        check_content(Path(folder) / name, meta["sets"][name], alive)


def check_content(folder, entry, alive):
    """Compare a set's keys, and its first letters, with its entry in meta.json. Raises ValueError.

    A key of 8 bytes a protein is read: of UniRef50 0.5 GB, some seconds. Lengths are compared when
    the batches are planned."""
    digest = hashlib.blake2b(digest_size=8)
    with open(folder / "keys.bin", "rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
            alive()
    differs = None
    if digest.hexdigest() != entry["keys_hash"]:
        differs = "keys.bin has another hash than keys_hash"
    # The proteins are in random order, so the first ones have the letters of all, nearly.
    first = np.fromfile(folder / "tokens.bin", np.uint8, LETTERS_READ)
    found = np.bincount(first, minlength=N_TOKENS)
    expected = np.array(entry["letter_counts"])
    exact = len(first) == entry["residues"]
    if len(found) > N_TOKENS:   # signs that are no letters
        alike = False
    elif exact:
        alike = (found == expected).all()
    else:
        shares = np.abs(found / len(first) - expected / entry["residues"])
        alike = (found <= expected).all() and shares.max() <= LETTERS_DIFFER
    if not alike:
        differs = "tokens.bin holds other letters than letter_counts"
    if differs:
        raise ValueError(f"{folder} is damaged or was changed: {differs} in meta.json; expected "
                         f"what prepare_uniref50.py wrote. {REMAKE}")


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
        self.meta = read_meta(folder)["sets"][name]
        self.bytes_read = 0
        # Kept open: the files of a staged copy are deleted once all ranks have opened them.
        self.files = {part: open(self.folder / name / part, "rb", buffering=0) for part in PARTS}

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
        dtype = PARTS[part]
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


def stage_prepared(folder, target, report):
    """Copy a prepared folder to `target`, which must not exist.

    report(bytes done, bytes in all) is called now and then. If it fails, the copy is removed.
    Raises ValueError where there is no room, OSError where the disk fails. The content is checked
    when it is read.
    """
    folder = Path(folder)
    target = Path(target)
    meta = read_meta(folder)
    names = [f"{name}/{part}" for name in SETS for part in PARTS]
    total = sum(meta["sets"][name]["files"][part]["bytes"] for name in SETS for part in PARTS)
    done = 0
    target.mkdir(parents=True)
    try:
        free = shutil.disk_usage(target).free
        if free < total * 1.01:
            raise ValueError(f"{target.parent} has {free / 1e9:,.1f} GB free; expected "
                             f"{total / 1e9:,.1f} GB for a copy of {folder}. Name another folder, "
                             f"or train without --stage.")
        for name in names:
            (target / name).parent.mkdir(exist_ok=True)
            with open(folder / name, "rb") as source, open(target / name, "wb") as copy:
                while piece := source.read(16 << 20):
                    copy.write(piece)
                    done += len(piece)
                    report(done, total)
        shutil.copy(folder / "meta.json", target / "meta.json")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
