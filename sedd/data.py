"""The proteins of a run: from a sequence file, a prepared folder, or a demo source.

    train, val, *_ = load_data(config, ddp)
"""
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ddp_setup import barrier, print0
from ddp_watch import note_progress
from proteins.sequences import read_sequences, split_by_hash
from sedd.demo import DemoSource
from sedd.prepared import PreparedProteins, check_prepared, keys_hash, read_meta

LARGE_FILE = 200_000_000        # bytes; a larger file should be prepared first
NO_DATA = ("no proteins are given; expected --data FILE (sequences, or a prepared folder); for a "
           "demo: --config configs/sedd_demo.yaml, or data.demo_proteins=20000.")


class TrainingData(NamedTuple):
    train: Any                  # Proteins or PreparedProteins
    val: Any                    # Proteins, or None
    source: Any                 # the DemoSource of demo proteins, which knows their likelihood
    fingerprint: dict           # {"n", "hash"}; must be the same when a run is resumed
    description: str


def load_data(config, ddp):
    """The proteins for training and validation. Collective.

    Args:
        config: its section data has file (a file or a prepared folder), demo_proteins (how many,
            where there is no file), val_fraction, min_length.
    Returns: TrainingData.
    Raises: ValueError or OSError for data that cannot be used.
    """
    data = config.data
    if missing := missing_data(data):
        raise FileNotFoundError(missing)
    prepared = data.file and os.path.isdir(data.file)
    if prepared:
        if ddp.is_main:
            check_prepared(data.file, data.val_fraction, data.min_length)
        barrier(ddp)   # the others wait, so that only rank 0 reports an error
        training_data = _open_prepared(data.file)
    else:
        training_data = _load_file_or_demo(data, config.training.seed, ddp)
    note_progress()
    return training_data


def _open_prepared(folder):
    """TrainingData of a prepared folder."""
    val = PreparedProteins(folder, "val").read_all()
    train = PreparedProteins(folder)
    meta = read_meta(folder)
    hashes = [meta["sets"]["train"]["keys_hash"], meta["sets"]["val"]["keys_hash"]]
    return _training_data(train, val, hashes,
                          f"{folder}: {len(train) + len(val):,} proteins, prepared from "
                          f"{', '.join(meta['source'])}")


def _load_file_or_demo(data, seed, ddp):
    source = None
    if not data.file:
        source = DemoSource(seed=0)
        proteins = source.sample(data.demo_proteins, seed=seed)
        description = f"{len(proteins):,} demo proteins of a second-order Markov source"
    else:
        proteins, report = _read_file(data, ddp)
        description = f"{data.file}: {report}"
    train, val = _split(proteins, data.val_fraction)
    hashes = [keys_hash(train.keys), keys_hash(val.keys)]
    return _training_data(train, val, hashes, description, source)


def _training_data(train, val, hashes, description, source=None):
    fingerprint = {"n": len(train), "hash": "".join(hashes)}
    return TrainingData(train, val if len(val) else None, source, fingerprint, description)


def _read_file(data, ddp):
    """(Proteins, report) of a file. For a large one it prints how to prepare it first."""
    size = os.path.getsize(data.file)
    if size > LARGE_FILE:
        print0(ddp, f"NOTE: every rank reads {data.file} ({size / 1e9:.1f} GB) and keeps some 0.4 "
                    "GB per million proteins. A prepared folder loads in seconds, into 0.1 GB:\n  "
                    f"{_prepare_command(data, 'FOLDER')} --fasta {shlex.quote(data.file)}   then "
                    "--data FOLDER")
    return read_sequences(data.file, data.min_length, note_progress)


def _split(proteins, val_fraction):
    """(training, validation) proteins."""
    if not val_fraction:
        return proteins, proteins.subset([])
    try:
        train, val = split_by_hash(proteins, val_fraction)
    except ValueError as error:
        raise ValueError(f"data.{error} Or set data.val_fraction=0 to train without "
                         "validation.") from error
    return proteins.subset(train), proteins.subset(val)


def names_no_data(data):
    """Whether a config's section data names neither a file nor a number of demo proteins."""
    return not data.file and data.demo_proteins is None


def missing_data(data):
    """A message, in one line, if there are no proteins to train on; '' if there are."""
    if names_no_data(data):
        return NO_DATA
    if not data.file or os.path.exists(data.file):
        return ""
    path = Path(data.file)
    problem = f"data.file {path} does not exist (relative to {Path.cwd()})."
    if os.path.exists(f"{path}.partial"):
        return f"{problem} Preparing it was not finished: run the same command of " \
               "prepare_uniref50.py again."
    if path.suffix:
        return f"{problem} Check the path."
    return f"{problem} Check the path. To make such a folder: {_prepare_command(data, path)} " \
           "--fasta FILE; UniRef50 (13 GB): bash jobs/download_uniref50.sh first."


def _prepare_command(data, folder):
    """The command that prepares data with the settings of this config section."""
    options = f" --val_fraction {data.val_fraction}"
    if data.min_length != 1:
        options += f" --min_length {data.min_length}"
    return f"python prepare_uniref50.py {shlex.quote(str(folder))}{options}"
