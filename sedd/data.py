"""The proteins of a run: from a sequence file, a prepared folder, or a demo source.

    train, val, *_ = load_data(config, ddp)
"""
import contextlib
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from ddp_setup import barrier, broadcast, note_progress, print0
from sedd.demo import DemoSource
from sedd.prepared import PreparedProteins, check_prepared, keys_hash, read_meta, stage_prepared
from proteins.sequences import read_sequences, split_by_hash

LARGE_FILE = 200_000_000        # bytes; a larger file should be prepared first
STAGE_SECONDS = 3 * 3600.0   # limit for the slowest host to copy the data: 20 GB at 2 MB/s
NO_DATA = ("no proteins are given; expected --data FILE (sequences, or a prepared folder); for a "
           "demo: --config configs/sedd_demo.yaml, or data.demo_proteins=20000.")



class TrainingData(NamedTuple):
    train: Any                  # Proteins or PreparedProteins
    val: Any                    # Proteins, or None
    source: Any                 # the DemoSource of demo proteins, which knows their likelihood
    fingerprint: dict           # {"n", "hash"}; must be the same when a run is resumed
    description: str


def load_data(config, ddp, stage=None):
    """The proteins for training and validation. Collective.

    Args:
        config: its section data has file (a file or a prepared folder), demo_proteins (how many,
            where there is no file), val_fraction, min_length.
        stage:  folder on each host into which a prepared folder is copied.
    Returns: TrainingData.
    Raises: ValueError or OSError for data that cannot be used.
    """
    data = config.data
    if missing := missing_data(data):
        raise FileNotFoundError(missing)
    prepared = data.file and os.path.isdir(data.file)
    if prepared:
        if ddp.is_main:
            check_prepared(data.file, data.val_fraction, data.min_length,
                           lambda: note_progress(ddp))
        barrier(ddp)   # the others wait, so that only rank 0 reports an error
        with staged(data.file, stage, stage_prepared, ddp) as copy:
            found = _open_prepared(data.file, copy or data.file)
    elif stage:
        raise ValueError("--stage copies a folder made by prepare_uniref50.py; data.file is "
                         f"{data.file}.")
    else:
        found = _load_file_or_demo(data, config.training.seed, ddp)
    note_progress(ddp)
    return found


@contextlib.contextmanager
def staged(folder, stage, copy, ddp):
    """A copy of a folder on each host, as long as this context lasts; None without `stage`.

    At the end the copy is deleted. Files that a rank still has open stay readable for it, and the
    system frees their space when the rank ends, however it ends.

    Args:
        folder: what to copy. stage: folder that each host has; None: nothing is copied.
        copy: function (folder, target, report), which calls report(bytes done, bytes in all).
    """
    if not stage:
        yield None
        return
    name = f"{Path(folder).resolve().name}-{os.urandom(4).hex()}" if ddp.is_main else None
    target = Path(stage) / f"{broadcast(name, ddp)}-{ddp.host or 'here'}"
    reported = time.monotonic()

    def report(done, total):
        nonlocal reported
        note_progress(ddp)
        if ddp.is_main and (done == total or time.monotonic() > reported + 10):
            reported = time.monotonic()
            print0(ddp, f"copying {folder} to {stage}: {done / 1e9:,.3f} of {total / 1e9:,.3f} GB")

    if ddp.local_rank == 0:
        copy(folder, target, report)
    try:
        barrier(ddp, timeout=STAGE_SECONDS)
        yield target
        barrier(ddp)
    finally:   # also if reading it has failed
        if ddp.local_rank == 0:
            shutil.rmtree(target, ignore_errors=True)


def _open_prepared(name, folder):
    """TrainingData of a prepared folder: `name` in the config, `folder` where it is read."""
    val = PreparedProteins(folder, "val").read_all()
    train = PreparedProteins(folder)
    meta = read_meta(folder)
    made_of = meta.get("release") or ", ".join(map(str, meta.get("source", ())))
    hashes = [meta["sets"][part]["keys_hash"] for part in ("train", "val")]
    return _training_data(train, val, hashes,
                          f"{name}: {len(train) + len(val):,} proteins, prepared from {made_of}")


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
    return read_sequences(data.file, data.min_length, lambda: note_progress(ddp))


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
    return f"{problem} Check the path. To download and prepare UniRef50 (13 GB): " \
           f"{_prepare_command(data, path)}; from your own files: the same with --fasta FILE."


def _prepare_command(data, folder):
    """The command that prepares data with the settings of this config section."""
    options = f" --val_fraction {data.val_fraction}"
    if data.min_length != 1:
        options += f" --min_length {data.min_length}"
    return f"python prepare_uniref50.py {shlex.quote(str(folder))}{options}"
