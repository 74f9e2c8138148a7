"""Make a prepared folder, for training to read, of UniRef50 or other files of proteins.

    bash jobs/download_uniref50.sh                                        # 13 GB, into data/
    python prepare_uniref50.py data/uniref50 --fasta data/uniref50.fasta.gz       # makes 18 GB
    python prepare_uniref50.py FOLDER --fasta a.fasta.gz b.txt c.pt               # your own files

Files are read, cleaned and checked by proteins/sequences.py. Of equal proteins one is kept. The
folder holds, with all numbers little endian and without headers, for SET = train and val:

    meta.json          format and its version, source, letters, settings, report of the cleaning;
                       of each set: proteins, residues, letter counts, length histogram, sizes and
                       blake2b of the files
    SET/tokens.bin     uint8, residues of all proteins one after the other: indices of `letters`
    SET/lengths.bin    uint32, residues of each protein
    SET/keys.bin       uint64, proteins.sequences.sequence_keys of each protein

Proteins are in the order of order_words(keys, seed): random, but independent of their order in the
sources. So training can read long stretches of a file and still gets a random sample. A protein is
in val if its key is in the lowest val_fraction of all keys, as with split_by_hash.

Two passes make the random order. The first cleans the text and appends each protein to one of some
hundred files ("buckets"), by the first bits of its order word. The second sorts one bucket after
the other in memory. All work is done in FOLDER.partial, which is renamed to FOLDER at the very end.
After an interruption the same command repeats the passes.
"""
import collections
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from proteins.letters import LETTERS, N_TOKENS
from proteins.sequences import Proteins, ReadReport, order_words, read_tables, refuse_nothing_left
from sedd.prepared import FILES, FORMAT, SETS, VERSION, check_prepared, read_meta
from training.parser import Parser
from training.problems import in_columns

FLUSH_BYTES = 64 << 20          # proteins kept in memory before they are appended to the buckets
BUCKET_BYTES = 48 << 20         # approximate size of a bucket; determines the number of buckets
UNPACKED_SHARE = 1.7            # most bytes of a folder per byte of .gz; UniRef50: 1.4
VAL_FRACTIONS = (0.001, 0.01, 0.05)   # from which the default of --val_fraction is chosen, and
VAL_PROTEINS = 100              # how many proteins it should hold out at least
FEW_VAL_PROTEINS = 10           # fewer tell hardly which weights are best
BYTES_PER_PROTEIN = 400         # most bytes of a folder per protein, on average; UniRef50: 300


# ---- main: the steps in their order ----

def main(argv=None):
    """Exit code: 0 done (or done before), 2 refused or failed, 130 interrupted."""
    try:
        args = parse(argv)
        prepare(**vars(args))
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command starts the unfinished part again", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        advice = ""
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            advice = (f"; disk or quota of {args.folder} is full. Make room and run the same "
                      "command again")
        print(in_columns(f"error: {error}{advice}"), file=sys.stderr)
        return 2


def parse(argv):
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="The top of prepare_uniref50.py has examples, and says what the folder "
                           "holds.")
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--fasta", type=Path, nargs="+", metavar="FILE", help="FASTA, text or .pt")
    parser.add_argument("--max_sequences", type=int, metavar="N", help="only the first N records")
    parser.add_argument("--val_fraction", type=float, help="share of the proteins for validation; "
                        "default 0.001, of fewer than 100,000 proteins 0.01 or 0.05")
    parser.add_argument("--min_length", type=int, default=1, help="residues; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the order; default %(default)s")
    args = parser.parse_args(argv)
    if not args.fasta:
        raise ValueError("found no file of proteins; expected --fasta FILE: for UniRef50, what "
                         "bash jobs/download_uniref50.sh downloads, data/uniref50.fasta.gz.")
    return args


def prepare(folder, fasta, max_sequences, val_fraction, min_length, seed):
    """Make the prepared folder, or find it finished.

    Args:
        folder: Path to create.
        fasta: Paths of files of proteins.
        max_sequences: only this many records of the files, or None.
        val_fraction: share of the proteins in val, by their keys; None: see choose_val_fraction.
        min_length: residues.
        seed: of the random order.
    Raises: ValueError for wrong settings or data, RuntimeError if another process works on the
        folder, OSError for the disk.
    """
    n_wanted = 1 if max_sequences is None else max_sequences
    share = 0 if val_fraction is None else val_fraction
    if not 0 <= share < 1 or min_length < 1 or n_wanted < 1:
        raise ValueError(f"found val_fraction = {val_fraction}, min_length = {min_length}, "
                         f"max_sequences = {max_sequences}; expected 0 <= val_fraction < 1, and at "
                         f"least 1 of the others.")
    described = sorted((file.name, size_of(file), digest_of_ends(file)) for file in fasta)
    settings = {"seed": seed, "val_fraction": val_fraction, "min_length": min_length,
                "max_sequences": max_sequences,
                "source": [name for name, _, _ in described],
                "source_bytes": [n_bytes for _, n_bytes, _ in described],
                "source_digest": [digest for _, _, digest in described]}
    folder = Path(os.path.abspath(folder))
    with working_folder(folder) as partial:
        if is_prepared(folder, settings):
            print(f"{folder} is finished already, with these settings; nothing to do.")
            remove_partial(partial)
            return
        remove_work(partial)                                    # what an interrupted run left
        n_bytes = expected_bytes(fasta, max_sequences)
        check_disk(partial, n_bytes)
        report = ReadReport()
        bits = max(0, math.ceil(math.log2(max(1, n_bytes) / BUCKET_BYTES)))     # 2**bits buckets
        try:
            n_read = deal(fasta, partial / "buckets", bits, report, settings)
            if val_fraction is None:
                settings["val_fraction"] = choose_val_fraction(n_read)
            sets = collect(partial / "buckets", partial / "result", settings)
            finish_report(report, sets, n_read, settings)
        except (ValueError, FileNotFoundError):     # repeating the command would not help
            remove_work(partial)
            raise
        meta = {"format": FORMAT, "version": VERSION, "letters": LETTERS, **settings,
                "report": dataclasses.asdict(report), "sets": sets}
        publish(partial / "result", meta, folder)
        remove_partial(partial)
    print_summary(folder, meta, report)


def choose_val_fraction(n_proteins):
    """The least of VAL_FRACTIONS that holds out VAL_PROTEINS of these, or the largest."""
    for fraction in VAL_FRACTIONS:
        if fraction * n_proteins >= VAL_PROTEINS:
            return fraction
    return VAL_FRACTIONS[-1]


# ---- sources ----

def size_of(path):
    """Bytes of a file; 0 if it is none: reading it will say so."""
    return path.stat().st_size if path.is_file() else 0


def digest_of_ends(path):
    """Hash of the first and the last MiB of a file. A change in between that keeps the size is
    missed."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        return hashlib.blake2b(head + file.read(), digest_size=8).hexdigest()


def expected_bytes(files, max_sequences):
    """Estimate, rather too high, of the size in bytes of a prepared folder of these files."""
    n_bytes = 0
    for path in files:
        share = UNPACKED_SHARE if path.suffix == ".gz" else 1
        n_bytes += size_of(path) * share
    return int(min(n_bytes, (max_sequences or math.inf) * BYTES_PER_PROTEIN))


def check_disk(folder, n_bytes):
    """Raise ValueError if there is no room for about n_bytes of proteins.

    Buckets and result together need the space of the proteins once: a bucket is removed when read.
    """
    need = n_bytes + 2 * BUCKET_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ValueError(f"{folder} has {free / 1e9:,.3f} GB free; expected about "
                         f"{need / 1e9:,.3f}. Make room, or take another disk.")


# ---- pass 1: clean the proteins, and deal them out to buckets ----

def deal(files, folder, bits, report, settings):
    """Deal the proteins out to 2**bits buckets. Returns the number of proteins read."""
    folder.mkdir()
    tables = []
    size = 0
    n_read = 0
    for table in all_tables(files, report, settings):
        tables.append(table)
        size += len(table.tokens) + 12 * len(table)         # 4 per length, 8 per key
        n_read += len(table)
        if size >= FLUSH_BYTES:
            append(folder, Proteins.join(tables), settings["seed"], bits)
            tables = []
            size = 0
    if tables:
        append(folder, Proteins.join(tables), settings["seed"], bits)
    if not n_read:
        names = ", ".join(map(str, files))
        refuse_nothing_left(names, report, settings["min_length"])
    return n_read


def all_tables(files, report, settings):
    """Yield the proteins of all files, up to max_sequences records, with a progress bar."""
    wanted = settings["max_sequences"]
    n_read = 0
    with bar_of_pass("1/2 reading", wanted, " sequences") as bar:
        for path in files:
            left = None
            if wanted:
                left = wanted - n_read - report.n_dropped
            if left == 0:
                break
            for table in read_tables(path, report, settings["min_length"], left):
                n_read += len(table)
                bar.update(len(table))
                yield table


def append(folder, proteins, seed, bits):
    """Append these proteins to 2**bits files of the folder, chosen by the first bits of their order
    words."""
    proteins = proteins.subset(proteins.unique_order(seed))
    words = order_words(proteins.keys, seed)
    firsts = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    rows = np.split(np.arange(len(proteins)), np.searchsorted(words, firsts))
    for bucket, chosen in enumerate(rows):
        if len(chosen):
            with open(folder / f"{bucket:06d}", "ab") as file:
                for part in proteins.subset(chosen).parts():
                    file.write(np.array([len(part), len(part.tokens)], "<u8"))
                    file.write(part.lengths.astype("<u4"))
                    file.write(part.keys.astype("<u8"))
                    file.write(part.tokens)


# ---- pass 2: sort each bucket, and write the sets ----

def collect(folder, result, settings):
    """Write the sets from the buckets and remove these -> {set: its entry in meta.json}."""
    limit = np.uint64(int(settings["val_fraction"] * 2.0**64))
    with contextlib.ExitStack() as stack:
        sets = {name: stack.enter_context(contextlib.closing(SetWriter(result / name)))
                for name in SETS}
        sizes = {path: path.stat().st_size for path in sorted(folder.iterdir())}
        bar = stack.enter_context(bar_of_pass("2/2 sorting", sum(sizes.values())))
        for path, size in sizes.items():
            proteins = Proteins.join(list(read_bucket(path)))
            path.unlink()
            proteins = proteins.subset(proteins.unique_order(settings["seed"]))
            is_val = proteins.keys < limit
            for name, chosen in (("train", ~is_val), ("val", is_val)):
                for part in proteins.subset(chosen).parts():
                    sets[name].write(part)
            bar.update(size)
    return {name: writer.meta() for name, writer in sets.items()}


def read_bucket(path):
    """Yield the Proteins that were appended to a bucket, one table after the other."""
    with open(path, "rb") as file:
        while head := file.read(16):
            n_proteins, n_residues = np.frombuffer(head, "<u8").tolist()
            lengths = np.frombuffer(file.read(4 * n_proteins), "<u4").astype(np.int64)
            keys = np.frombuffer(file.read(8 * n_proteins), "<u8")
            tokens = np.frombuffer(file.read(n_residues), np.uint8)
            yield Proteins(tokens, np.cumsum(lengths) - lengths, lengths, keys)


class SetWriter:
    """Writes the three files of a set and collects its entry in meta.json."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.files = {name: open(folder / name, "xb") for name in FILES}
        self.hashes = {name: hashlib.blake2b(digest_size=16) for name in FILES}
        self.keys_hash = hashlib.blake2b(digest_size=8)
        self.letter_counts = np.zeros(N_TOKENS, np.int64)
        self.length_counts = collections.Counter()

    def close(self):
        for file in self.files.values():
            file.close()

    def write(self, proteins):
        """Append these proteins, whose tokens follow each other."""
        lengths = proteins.lengths.astype("<u4").tobytes()
        keys = proteins.keys.astype("<u8").tobytes()
        for name, data in zip(FILES, (proteins.tokens.tobytes(), lengths, keys)):
            self.files[name].write(data)
            self.hashes[name].update(data)
        self.keys_hash.update(keys)
        self.letter_counts += np.bincount(proteins.tokens, minlength=N_TOKENS)
        self.length_counts.update(proteins.lengths.tolist())

    def meta(self):
        histogram = sorted(self.length_counts.items())
        return {"proteins": self.length_counts.total(),
                "residues": sum(length * count for length, count in histogram),
                "letter_counts": self.letter_counts.tolist(),
                "length_histogram": histogram,
                "keys_hash": self.keys_hash.hexdigest(),
                "files": {name: {"bytes": os.path.getsize(self.files[name].name),
                                 "blake2b": self.hashes[name].hexdigest()} for name in FILES}}


# ---- the folder ----

@contextlib.contextmanager
def working_folder(folder):
    """FOLDER.partial, locked for one process; removed at the end if it holds only the lock."""
    partial = folder.with_name(folder.name + ".partial")
    # A link is not followed: it would make, or lock, a file somewhere else.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial / "lock", flags, 0o666)
    except OSError as error:
        raise ValueError(f"cannot work in {partial}: {error.strerror}, {error.filename}; expected "
                         "a folder that this script can make and write, or none. Move it away, or "
                         "name another folder.") from None
    with open(descriptor, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is making {folder} (it holds {partial / 'lock'}); "
                               f"expected none. Wait for it, or name another folder.") from None
        except OSError as error:                        # as on Lustre mounted without locks
            say(f"{folder.parent}: this disk has no locks ({error.strerror}). Do not let two "
                f"processes make {folder.name} at the same time.")
        try:
            yield partial
        finally:
            if partial.exists() and os.listdir(partial) == ["lock"]:
                shutil.rmtree(partial)


def remove_partial(partial):
    """Remove what this script wrote into the folder, and the folder if nothing else is in it."""
    remove_work(partial)
    (partial / "lock").unlink(missing_ok=True)
    if not os.listdir(partial):
        partial.rmdir()


def remove_work(partial):
    """Remove buckets and unfinished result."""
    for name in ("buckets", "result"):
        shutil.rmtree(partial / name, ignore_errors=True)


def is_prepared(folder, settings):
    """Whether the folder exists, with these settings. Raises ValueError if it is anything else."""
    if not os.path.lexists(folder):
        return False
    try:
        meta = read_meta(folder)
    except (OSError, ValueError):
        raise ValueError(f"{folder} exists, and is no prepared folder of version {VERSION}; "
                         f"expected nothing of this name. Name another folder.") from None
    differences = []
    for name, value in settings.items():
        chosen_here = name == "val_fraction" and value is None
        if meta[name] != value and not chosen_here:
            differences.append(f"{name} is {meta[name]!r} there and {value!r} here")
    if differences:
        raise ValueError(f"{folder} was made with other settings: {'; '.join(differences)}. Name "
                         f"another folder, or remove it.")
    check_prepared(folder)
    return True


def finish_report(report, sets, n_read, settings):
    """Fill in the totals, known only at the end. Raises ValueError if one of the sets is empty."""
    n_train, n_val = (sets[name]["proteins"] for name in SETS)
    n = n_train + n_val
    report.n_proteins = n
    report.n_duplicates = n_read - n
    report.n_residues = sum(entry["residues"] for entry in sets.values())
    histogram = sorted(row for entry in sets.values() for row in entry["length_histogram"])
    lengths, counts = np.array(histogram).T
    middle = np.searchsorted(np.cumsum(counts), [(n - 1) // 2, n // 2], "right")
    report.median = int(lengths[middle].mean())
    report.shortest = int(lengths[0])
    report.longest = int(lengths[-1])
    val_is_missing = settings["val_fraction"] > 0 and not n_val
    if not n_train or val_is_missing:
        raise ValueError(f"val_fraction = {settings['val_fraction']} puts {n_train:,} proteins in "
                         f"training and {n_val:,} in validation; expected some in each. Give more "
                         f"proteins, or another --val_fraction (0: no validation).")


def publish(result, meta, folder):
    """Write meta.json, force everything to the disk (fsync), and rename the result to `folder`."""
    (result / "meta.json").write_text(json.dumps(meta) + "\n")
    for path in [*result.rglob("*"), result]:
        synchronise(path)
    os.rename(result, folder)
    synchronise(folder.parent)


def synchronise(path):
    """Force a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bar_of_pass(what, total, unit="B"):
    """A progress bar; without a terminal, as in a job's log, it writes a line per half minute."""
    watched = sys.stderr.isatty()
    line = "{l_bar}{bar}{r_bar}\n" if total else "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}]\n"
    return tqdm(desc=what, total=total, unit=unit, unit_scale=True, ncols=80, file=sys.stderr,
                mininterval=0.2 if watched else 30, bar_format=None if watched else line)


def say(text):
    """Print a line to standard error."""
    print(text, file=sys.stderr)


def print_summary(folder, meta, report):
    print(in_columns(str(report)))
    for name, entry in meta["sets"].items():
        size = sum(file["bytes"] for file in entry["files"].values())
        print(f"{name}: {entry['proteins']:,} proteins, {entry['residues']:,} residues, "
              f"{size / 1e6:,.1f} MB")
    warn_of_few_val_proteins(meta)
    config = "uniref50" if meta["sets"]["train"]["proteins"] > 1_000_000 else "cpu"
    print(f"{folder} is ready. Next:\n"
          f"  python train_sedd_ddp.py --config configs/sedd_{config}.yaml "
          f"--data {shlex.quote(os.path.relpath(folder))} \\\n"
          f"    data.val_fraction={meta['val_fraction']} data.min_length={meta['min_length']}")


def warn_of_few_val_proteins(meta):
    """Say on stderr if hardly any proteins are held out, and how to hold out more."""
    n_val = meta["sets"]["val"]["proteins"]
    n = n_val + meta["sets"]["train"]["proteins"]
    if not 0 < n_val < FEW_VAL_PROTEINS:
        return
    better = choose_val_fraction(n)
    if better > meta["val_fraction"]:
        advice = f"prepare another folder, with --val_fraction {better}"
    else:
        advice = "give more proteins, or a larger --val_fraction"
    say(f"ATTENTION: only {n_val} of {n:,} proteins are for validation, by which training chooses "
        f"best.pt: {advice}.")


if __name__ == "__main__":
    sys.exit(main())
