"""Download UniRef50 (or read files of proteins) and write a prepared folder, for training to read.

    python prepare_uniref50.py FOLDER                                # UniRef50: 13 GB, leaves 18 GB
    python prepare_uniref50.py FOLDER --max_sequences 10000          # its first records only
    python prepare_uniref50.py FOLDER --fasta a.fasta.gz b.txt c.pt  # files of one's own

Files, cleaning and refusals are those of sequence_data.py. Of equal proteins one stays. The
folder holds, all numbers little endian and without headers, for SET = train and val:

    meta.json          format and its version, source, release, letters, settings, report of the
                       cleaning; of each set: proteins, residues, letter counts, length histogram,
                       sizes and blake2b of the files
    SET/tokens.bin     uint8, residues of all proteins one after the other: places in `letters`
    SET/lengths.bin    uint32, residues of each protein
    SET/keys.bin       uint64, sequence_data.sequence_keys of each protein

Proteins stand in the order of order_words(keys, seed), a random one, the same whatever their order
in the sources: training reads long runs of a file and still sees a sample. A protein is in val if
its key is in the lowest val_fraction of all keys, as with split_by_hash.

Two passes: the text is cleaned and dealt to some hundred files ("buckets") by the first bits of the
order; then each of these is sorted in memory. Work in progress is in FOLDER.partial, and FOLDER
appears at the very end, by a rename. After an interruption the same command starts the passes
again; a finished download stays.
"""

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import http.client
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import ssl
import sys
import textwrap
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import numpy as np
from tqdm import tqdm

from sequence_data import (FORMAT, LETTERS, N_TOKENS, PARTS, SETS, VERSION, Block, Proteins,
                           ReadReport, check_prepared, order_words, read_blocks,
                           refuse_nothing_left, span_indices, word_spans)

# The current release: some 13 GB, about 60 million proteins.
UNIREF50_URL = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"

FLUSH_BYTES = 64 << 20          # of proteins that are gathered in memory, then dealt to the buckets
BUCKET_BYTES = 48 << 20         # of a bucket, about; their number follows
LARGEST_BUCKET = 128 << 20      # a larger one is dealt once more
SAMPLE_BYTES = 8 << 20          # of each source, by which the size of the result is estimated
PT_BYTES = 300                  # of a protein in a .pt file, about; these are not sampled
MARGIN = 1.1                    # for what the sample does not show


# ---- main: the steps in the order of time ----

def main(argv=None):
    """Exit code: 0 done (or done before), 2 refused or failed, 130 interrupted."""
    args = parse(argv)
    try:
        prepare(args.folder, args.fasta, args.url, args.max_sequences, args.val_fraction,
                args.min_length, args.seed)
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command starts the unfinished part again", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        advice = "; disk or quota is full. Make room and run the same command again"
        print(f"error: {error}{advice if is_full else ''}", file=sys.stderr)
        return 2


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what is made")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", default=UNIREF50_URL, help="a mirror (default: %(default)s)")
    source.add_argument("--fasta", type=Path, nargs="+", metavar="FILE", help="FASTA, text or .pt")
    parser.add_argument("--max_sequences", type=int, metavar="N", help="only the first N records")
    parser.add_argument("--val_fraction", type=float, default=0.001, help="default %(default)s")
    parser.add_argument("--min_length", type=int, default=1, help="residues; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the order; default %(default)s")
    return parser.parse_args(argv)


def prepare(folder, files, url, max_sequences=None, val_fraction=0.001, min_length=1, seed=0):
    """Make the prepared folder, or find it finished.

    folder: Path of what is made. files: Paths of files of proteins, or None to download the url.
    max_sequences: only so many records of the sources, the first ones. min_length: residues.
    val_fraction: share of the proteins in val, by their keys. seed: of the order.
    Raises ValueError for settings and data, RuntimeError for another process at work on the folder
    or an unfit server, OSError for disk and network.
    """
    n_wanted = 1 if max_sequences is None else max_sequences
    if not 0 <= val_fraction < 1 or min_length < 1 or n_wanted < 1:
        raise ValueError(f"found val_fraction = {val_fraction}, min_length = {min_length}, "
                         f"max_sequences = {max_sequences}; expected 0 <= val_fraction < 1, and at "
                         f"least 1 of the others.")
    settings = {"seed": seed, "val_fraction": val_fraction, "min_length": min_length,
                "max_sequences": max_sequences}
    inputs, release = [Input.of_file(file) for file in files or ()], None
    if files:
        named = sorted((Path(entry.name).name, entry.size, entry.digest()) for entry in inputs)
        for key, values in zip(("source", "source_bytes", "source_digest"), zip(*named)):
            settings[key] = list(values)
    else:
        settings["source"] = [shown(url)]
    folder = Path(os.path.abspath(folder))
    with working_folder(folder) as partial:
        if is_finished(folder, settings):
            print(f"{folder} is finished already, with these settings; nothing to do.")
            shutil.rmtree(partial)
            return
        remove_work(partial)                                    # of a run that was interrupted
        if not files:
            inputs, release = download_input(url, partial / "download", max_sequences)
        n_bytes, n_sequences = estimate(inputs, max_sequences, min_length)
        check_disk(partial, n_bytes)
        report = ReadReport()
        bits = max(0, math.ceil(math.log2(max(1, n_bytes) / BUCKET_BYTES)))
        try:
            n_read = deal(inputs, partial / "buckets", bits, n_sequences, report, settings)
            sets = collect(partial / "buckets", bits, partial / "result", n_read, settings)
            finish_report(report, sets, n_read, settings)
        except ValueError:                                      # the same call would end so again
            remove_work(partial)
            raise
        meta = {"format": FORMAT, "version": VERSION, "release": release, "letters": LETTERS,
                **settings, "report": dataclasses.asdict(report), "sets": sets}
        publish(partial / "result", meta, folder)
        shutil.rmtree(partial)
    print_summary(folder, meta, report)


# ---- sources ----

class Input:
    """A source of proteins, and the count of the bytes that were read of it.

    name: path or url. size: bytes, None if not known.
    open_source: gives a binary stream; None for what read_blocks takes, or refuses, as a path.
    """

    def __init__(self, name, size, open_source):
        self.name, self.size, self.open_source, self.count = name, size, open_source, 0

    @classmethod
    def of_file(cls, path):
        size = path.stat().st_size if path.is_file() else 0
        if path.suffix.lower() == ".pt" or not size:
            return cls(str(path), size, None)
        return cls(str(path), size, lambda: open(path, "rb"))

    def digest(self):
        """Hash of the first and the last MiB of a file, by which a changed one is known."""
        if not self.size:
            return ""
        with open(self.name, "rb") as file:
            head = file.read(1 << 20)
            file.seek(max(0, self.size - (1 << 20)))
            return hashlib.blake2b(head + file.read(), digest_size=8).hexdigest()

    def read(self, size):
        data = self.stream.read(size)
        self.count += len(data)
        return data

    def blocks(self, report, min_length, max_records=None):
        """read_blocks of this source, from its beginning."""
        self.count = 0
        if self.open_source is None:
            yield from read_blocks(self.name, report, min_length, max_records=max_records)
        else:
            with self.open_source() as self.stream:
                yield from read_blocks(self, report, min_length, max_records=max_records)


def download_input(url, folder, max_sequences):
    """([Input], release or None). Downloads the whole file, unless only its head is wanted.

    A finished download needs no network: the passes may go on where there is none.
    """
    path = folder / Path(shown(url)).name
    arrived = _Part(Source(url), path)
    if arrived.finished:
        return [Input.of_file(path)], arrived.note["release"]
    source = look_up(url)
    streamed = Input(shown(url), source.size, lambda: open_stream(source))
    if max_sequences and path.suffix.lower() != ".pt":
        return [streamed], source.release
    folder.mkdir(exist_ok=True)
    if not path.exists() and source.size:
        n_bytes, _ = estimate([streamed], None, 1)
        n_arrived = sum(entry.stat().st_size for entry in folder.iterdir())
        check_disk(folder, n_bytes, max(0, source.size - n_arrived))
    download(source, path)
    return [Input.of_file(path)], source.release


def estimate(inputs, max_sequences, min_length):
    """About how many (bytes, sequences) the inputs hold, from the head of each."""
    total, left = np.zeros(2), max_sequences or math.inf
    for entry in inputs:
        if Path(entry.name).suffix.lower() == ".pt":
            found = np.array([entry.size, entry.size / PT_BYTES])
        else:
            found = sample_head(entry, left, min_length)
        found = found * min(1, left / max(1, found[1]))
        total, left = total + found, left - found[1]
        if left <= 0:
            break
    return int(total[0] * MARGIN), int(total[1])


def sample_head(entry, n_records, min_length):
    """(bytes, sequences) of an input: exact if it is short, else scaled up from SAMPLE_BYTES."""
    found, first_count = np.zeros(2), None
    max_records = None if math.isinf(n_records) else math.ceil(n_records)
    with contextlib.closing(entry.blocks(ReadReport(), min_length, max_records)) as blocks:
        for block in blocks:
            found += block_bytes(block), len(block.lengths)
            if first_count is None:     # bytes are read ahead of the blocks, by always as many
                first_count, first_found = entry.count, found.copy()
            elif entry.count - first_count >= SAMPLE_BYTES:
                if entry.size is None:
                    return found * max(1, n_records / max(found[1], 1))
                return (found - first_found) / (entry.count - first_count) * entry.size
    return found


def block_bytes(block):
    return block.words.nbytes + 12 * len(block.lengths)         # 4 of a length, 8 of a key


def check_disk(folder, n_bytes, n_download=0):
    """Raise ValueError if there is no room for about n_bytes of proteins and for the download.

    The proteins take their room once: each bucket is removed when the result has it.
    """
    n_work, free = 2 * BUCKET_BYTES, shutil.disk_usage(folder).free
    need = n_download + n_bytes + n_work
    if free < need:
        free, need, n_download, n_bytes, n_work = (
            f"{n / 1e9:,.3f} GB" for n in (free, need, n_download, n_bytes, n_work))
        raise ValueError(f"{folder} has {free} free; expected about {need} ({n_download} to "
                         f"download, {n_bytes} of proteins, {n_work} to work in). Make room, or "
                         f"take another disk.")


# ---- pass 1: clean, and deal to buckets ----

def deal(inputs, folder, bits, n_sequences, report, settings):
    """Write the proteins to 2**bits buckets by the first bits of their order -> proteins read."""
    folder.mkdir()
    blocks, size, n_read = [], 0, 0
    with in_background() as run:
        for block in all_blocks(inputs, n_sequences, report, settings):
            blocks.append(block)
            size += block_bytes(block)
            n_read += len(block.lengths)
            if size >= FLUSH_BYTES:
                run(append, folder, concatenate(blocks), settings["seed"], 0, bits)
                blocks, size = [], 0
        run(append, folder, concatenate(blocks), settings["seed"], 0, bits)
    if not n_read:
        names = ", ".join(entry.name for entry in inputs)
        refuse_nothing_left(names, report, settings["min_length"])
    return n_read


def all_blocks(inputs, n_sequences, report, settings):
    """The blocks of one input after the other, up to max_sequences records, with a progress bar."""
    left, n_read, n_bytes = settings["max_sequences"], 0, 0
    by_bytes = left is None
    total = sum(entry.size for entry in inputs) if by_bytes else n_sequences
    with progress_bar("1/2 reading", total, "B" if by_bytes else " sequences") as bar:
        for entry in inputs:
            n_before = n_read + report.n_dropped
            for block in entry.blocks(report, settings["min_length"], left):
                n_read += len(block.lengths)
                bar.set_postfix_str(f"{n_read / 1e6:.2f} M sequences", refresh=False)
                bar.update((n_bytes + entry.count if by_bytes else n_read) - bar.n)
                yield block
            n_bytes += entry.count
            if not by_bytes:
                left -= n_read + report.n_dropped - n_before
                if left == 0:
                    break


@contextlib.contextmanager
def in_background():
    """A function that makes calls in a thread, each begun when the one before has ended.

    What a call raises comes out of the next one, or of the end of the context.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = collections.deque()

        def run(work, *arguments):
            while pending:
                pending.popleft().result()
            pending.append(pool.submit(work, *arguments))
        yield run
        pending.pop().result()


def concatenate(blocks):
    empty = Block(np.zeros(0, "<u8"), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    return Block(*map(np.concatenate, zip(empty, *blocks)))


def order_of(block, seed):
    """Indices in the order of order_words, each distinct protein once."""
    tokens, (starts, _) = block.words.view(np.uint8), word_spans(block.lengths)
    return Proteins(tokens, 8 * starts, block.lengths, block.keys).unique_order(seed)


def rearranged(block, order, n_words=1 << 17):
    """Yield the proteins of a block in this order, as Blocks of about n_words words."""
    starts, counts = word_spans(block.lengths)
    parts = np.cumsum(counts[order]) // n_words
    for rows in np.split(order, np.flatnonzero(np.diff(parts)) + 1):
        words = block.words[span_indices(starts[rows], counts[rows])]
        yield Block(words, block.lengths[rows], block.keys[rows])


def append(folder, block, seed, first_bit, bits):
    """Append the proteins to 2**bits files of the folder by bits of their order, from first_bit."""
    order = order_of(block, seed)
    words = order_words(block.keys[order], seed) << np.uint64(first_bit)
    firsts = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - max(1, bits))
    for bucket, rows in enumerate(np.split(order, np.searchsorted(words, firsts))):
        if len(rows):
            with open(folder / f"{bucket:06d}", "ab") as file:
                for part in rearranged(block, rows):
                    file.write(np.array([len(part.lengths), len(part.words)], "<u8"))
                    file.write(part.lengths.astype("<u4"))
                    file.write(part.keys.astype("<u8"))
                    file.write(part.words)


# ---- pass 2: sort each bucket, and write the sets ----

def collect(folder, bits, result, n_read, settings):
    """Write the sets from the buckets, which are removed then -> {set: what meta.json says}."""
    limit = np.uint64(int(settings["val_fraction"] * 2.0**64))
    with contextlib.ExitStack() as stack:
        sets = {name: stack.enter_context(SetWriter(result / name)) for name in SETS}
        run = stack.enter_context(in_background())
        bar = stack.enter_context(progress_bar("2/2 sorting", n_read, " sequences"))
        for block in buckets(folder, bits, settings["seed"]):
            order = order_of(block, settings["seed"])
            is_val = block.keys[order] < limit
            for name, rows in (("train", order[~is_val]), ("val", order[is_val])):
                for part in rearranged(block, rows):
                    run(sets[name].write, part)
            bar.update(len(block.lengths))
    return {name: writer.meta() for name, writer in sets.items()}


def buckets(folder, bits, seed):
    """Yield a Block of each bucket in order, and remove its file. bits: how many name a bucket."""
    for path in sorted(folder.iterdir()):
        if path.stat().st_size > LARGEST_BUCKET and bits < 60:
            deeper = path.with_suffix(".more")
            deeper.mkdir()
            for block in read_bucket(path):
                append(deeper, block, seed, bits, 4)
            path.unlink()
            yield from buckets(deeper, bits + 4, seed)
        else:
            yield concatenate(list(read_bucket(path)))
            path.unlink()
    folder.rmdir()


def read_bucket(path):
    """Yield the Blocks that were appended to a bucket, one after the other."""
    with open(path, "rb") as file:
        while head := file.read(16):
            n_rows, n_words = np.frombuffer(head, "<u8").tolist()
            lengths = np.frombuffer(file.read(4 * n_rows), "<u4").astype(np.int64)
            keys = np.frombuffer(file.read(8 * n_rows), "<u8")
            yield Block(np.frombuffer(file.read(8 * n_words), "<u8"), lengths, keys)


class SetWriter:
    """Writes the three files of a set and sums up what meta.json says of it."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.files = {name: open(folder / name, "xb") for name in PARTS}
        self.hashes = {name: hashlib.blake2b(digest_size=16) for name in PARTS}
        self.keys_hash = hashlib.blake2b(digest_size=8)
        self.pair_counts = np.zeros((256, 256), np.int64)   # two tokens at a time: faster
        self.histogram = np.zeros(0, np.int64)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files.values():
            file.close()

    def write(self, block):
        lengths, keys = block.lengths.astype("<u4").tobytes(), block.keys.astype("<u8").tobytes()
        for name, data in zip(PARTS, (block.tokens(), lengths, keys)):
            self.files[name].write(data)
            self.hashes[name].update(data)
        self.keys_hash.update(keys)
        pairs = np.bincount(block.words.view(np.uint16), minlength=1 << 16)
        self.pair_counts += pairs.reshape(256, 256)
        histogram = np.bincount(block.lengths, minlength=len(self.histogram))
        histogram[:len(self.histogram)] += self.histogram
        self.histogram = histogram

    def meta(self):
        lengths = np.flatnonzero(self.histogram)
        counts = self.histogram[lengths]
        letter_counts = self.pair_counts.sum(0) + self.pair_counts.sum(1)
        return {"proteins": int(counts.sum()), "residues": int((lengths * counts).sum()),
                "letter_counts": letter_counts[:N_TOKENS].tolist(),
                "length_histogram": np.stack([lengths, counts], axis=1).tolist(),
                "keys_hash": self.keys_hash.hexdigest(),
                "files": {name: {"bytes": os.path.getsize(self.files[name].name),
                                 "blake2b": self.hashes[name].hexdigest()} for name in PARTS}}


# ---- the folder ----

@contextlib.contextmanager
def working_folder(folder):
    """FOLDER.partial, for one process at a time; it stays if there is more in it than the lock."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(partial / "lock"))
        except (BlockingIOError, FileNotFoundError):    # held, or removed by a finished process
            is_ours = False
        except OSError as error:                        # as on Lustre mounted without locks
            _say(f"{folder.parent}: this disk has no locks ({error.strerror}). Start the making "
                 f"of {folder.name} only once at a time.")
            is_ours = True
        if not is_ours:
            raise RuntimeError(f"another process is making {folder} (it holds {partial / 'lock'}); "
                               f"expected none. Wait for it, or name another folder.")
        try:
            yield partial
        finally:
            if partial.exists() and os.listdir(partial) == ["lock"]:
                shutil.rmtree(partial)


def remove_work(partial):
    """Remove what is made of the sources; a download stays."""
    for name in ("buckets", "result"):
        shutil.rmtree(partial / name, ignore_errors=True)


def is_finished(folder, settings):
    """Whether the folder was made with these settings. Raises ValueError if it is anything else."""
    if not os.path.lexists(folder):
        return False
    here = {"format": FORMAT, "version": VERSION, **settings}
    try:
        meta = json.loads((folder / "meta.json").read_text())
        there = {key: meta.get(key) for key in here}
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{folder} exists, and is no prepared folder; expected nothing of this "
                         f"name. Name another folder.") from None
    differences = [f"{key} is {there[key]!r} there and {value!r} here"
                   for key, value in here.items() if there[key] != value]
    if differences:
        raise ValueError(f"{folder} was made with other settings: {'; '.join(differences)}. Name "
                         f"another folder, or remove it.")
    check_prepared(folder)
    return True


def finish_report(report, sets, n_read, settings):
    """Fill in what is known at the end. Raises ValueError if one of the sets is empty."""
    rows = np.array([row for entry in sets.values() for row in entry["length_histogram"]])
    histogram = np.bincount(rows[:, 0], rows[:, 1]).astype(np.int64)
    n, lengths = int(histogram.sum()), np.flatnonzero(histogram)
    middle = np.searchsorted(np.cumsum(histogram), [(n - 1) // 2, n // 2], "right")
    report.n_proteins, report.n_duplicates = n, n_read - n
    report.n_residues = int((rows[:, 0] * rows[:, 1]).sum())
    report.shortest, report.longest = int(lengths[0]), int(lengths[-1])
    report.median = int(middle.mean())
    n_train, n_val = (sets[name]["proteins"] for name in SETS)
    if not n_train or settings["val_fraction"] and not n_val:
        raise ValueError(f"val_fraction = {settings['val_fraction']} puts {n_train:,} proteins in "
                         f"training and {n_val:,} in validation; expected some in each. Give more "
                         f"proteins, or another --val_fraction (0: no validation).")


def publish(result, meta, folder):
    """Write meta.json, bring everything to the disk, and give the result its name."""
    (result / "meta.json").write_text(json.dumps(meta) + "\n")
    for path in [*result.rglob("*"), result]:
        synchronise(path)
    os.rename(result, folder)
    synchronise(folder.parent)


def synchronise(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def progress_bar(what, total, unit="B", initial=0):
    """A progress bar; where nobody watches, as in a job's log, a line per half minute."""
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=True, ncols=80,
                file=sys.stderr, mininterval=0.2 if sys.stderr.isatty() else 30)


def print_summary(folder, meta, report):
    print(textwrap.fill(str(report), 80))
    for name, entry in meta["sets"].items():
        size = sum(file["bytes"] for file in entry["files"].values())
        print(f"{name}: {entry['proteins']:,} proteins, {entry['residues']:,} residues, "
              f"{size / 1e6:,.1f} MB")
    release = f" (release {meta['release']})" if meta["release"] else ""
    config = "uniref50" if meta["sets"]["train"]["proteins"] > 1_000_000 else "cpu"
    print(f"{folder} is ready{release}. Next:\n"
          f"  python train_sedd_ddp.py --config configs/sedd_{config}.yaml "
          f"--data {shlex.quote(os.path.relpath(folder))} \\\n"
          f"    data.val_fraction={meta['val_fraction']} data.min_length={meta['min_length']}")


# ---- download ----

METALINK = "RELEASE.metalink"   # UniProt's list of files with size and MD5, beside the files
METALINK_BYTES = 4 << 20        # read at most of it; it has some kB
CHUNK = 1 << 20                 # bytes per read, at most
TIMEOUT = 60                    # seconds without a byte, after which a connection counts as dropped
TRIES = 10                      # in a row without progress; with BACKOFF about four minutes
BACKOFF = 1.0                   # seconds before the second try; doubled each time
LONGEST_WAIT = 60               # seconds
GZIP = b"\x1f\x8b"              # with which gzip begins
NOT_THERE = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)


class Source(NamedTuple):
    """A file to download: size in bytes, MD5 in hex and release, each None where not known."""
    url: str
    size: int | None = None
    md5: str | None = None
    release: str | None = None


class _Dropped(OSError):
    """An error that another try may mend: a lost connection, too little data, a busy server."""


def look_up(url, timeout=TIMEOUT, tries=TRIES, backoff=BACKOFF):
    """Source of the url, with what RELEASE.metalink beside it says, if anything.

    timeout, backoff: seconds. tries: in a row without progress.
    Raises ValueError for a url that is not http or https, OSError where the server does not answer.
    """
    _check_url(url)
    listing, name = Source(urljoin(url, METALINK)), unquote(urlsplit(url).path.rpartition("/")[2])

    def read():
        with io.BufferedReader(_Body(listing, timeout)) as body:
            return body.read(METALINK_BYTES)
    try:
        text = _retry(read, tries, backoff).decode()
        if "<!DOCTYPE" in text:
            raise ValueError(f"{METALINK} defines entities")     # which could expand without end
        root = xml.etree.ElementTree.fromstring(text)
        file = next((f for f in root.iterfind(".//{*}file") if f.get("name") == name), None)
        md5 = None if file is None else file.findtext(".//{*}hash[@type='md5']")
        if not re.fullmatch("[0-9a-fA-F]{32}", md5 or ""):
            raise ValueError(f"{METALINK} has no MD5 of {name}")
        size, release = file.findtext("{*}size"), root.findtext("{*}version")
        return Source(url, int(size), md5.lower(), release)
    except (ValueError, RuntimeError, TypeError, xml.etree.ElementTree.ParseError) as error:
        _say(f"{shown(url)}: MD5 and release are not known and not checked ({error}).")
        return Source(url)


def download(source, path, timeout=TIMEOUT, tries=TRIES, backoff=BACKOFF):
    """Download a Source to path, which is there only when whole and checked; the same call goes on.

    Until then the data is in path.part, and path.part.json says what it is the start of. That note
    stays and then describes path, so that the same call finds it done.
    timeout, backoff: seconds. tries: in a row without progress.
    Raises ValueError for what is not such a file (url, 4xx, a page), OSError or RuntimeError for
    network, server and disk.
    """
    part = _Part(source, Path(path))
    if part.finished:
        return
    with open(part.name, "ab", buffering=0) as part.file:
        part.clear_if_of_another_file()
        _retry(lambda: _receive(source, part, timeout), tries, backoff, lambda: part.size)
        os.fsync(part.file.fileno())
    if source.md5 and (found := _md5(part.name)) != source.md5:
        part.name.unlink()
        raise RuntimeError(f"{shown(source.url)}: found MD5 {found}, expected {source.md5}. "
                           f"The data is removed; run the same command again, or name a mirror.")
    os.replace(part.name, path)


def open_stream(source, timeout=TIMEOUT, tries=TRIES, backoff=BACKOFF):
    """Readable binary object over a Source from its first byte on; close it after use.

    Its read raises OSError where the connection drops or stalls, or the data ends early.
    """
    return _retry(lambda: _Body(source, timeout), tries, backoff)


class _Part:
    """The bytes of a file that have arrived, and the note of what they are the start of."""

    def __init__(self, source, path):
        self.path, self.name = path, Path(f"{path}.part")
        self.json = Path(f"{path}.part.json")
        query = hashlib.blake2b(urlsplit(source.url).query.encode(), digest_size=8).hexdigest()
        self.wanted = {**source._asdict(), "url": shown(source.url), "query_digest": query}
        try:
            self.note = json.loads(self.json.read_text())
        except (OSError, ValueError):
            self.note = {}
        self.differences = [key for key, value in self.wanted.items()
                            if value not in (None, self.note.get(key))]
        self.finished = path.exists() and not self.differences

    @property
    def size(self):
        return os.fstat(self.file.fileno()).st_size

    def clear_if_of_another_file(self):
        if self.differences:
            if self.size:
                _say(f"{self.name} is of another file ({', '.join(self.differences)} differ); "
                     f"thrown away.")
            self.clear()

    def clear(self):
        self.file.truncate(0)
        self.note = {}

    def begin(self, seen):
        """Empty the file and note what begins to arrive. seen: what the server says of it."""
        # In this order: whenever the process is killed, the note is right about what is there.
        self.clear()
        self.path.unlink(missing_ok=True)
        self.note = {**self.wanted, **seen}
        self.json.write_text(json.dumps(self.note))

    def write(self, data):
        try:
            while data:
                data = data[self.file.write(data):]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {self.size:,} bytes are kept. Make room "
                          f"and run the same command again", str(self.name)) from None


def _receive(source, part, timeout):
    """Write what one connection gives, from the byte reached to the end; _Dropped before it."""
    start, note = part.size, part.note
    if start and start == note.get("size"):
        return
    etag = note.get("etag") or "W/"
    unchanged = note.get("last_modified") if etag.startswith("W/") else etag    # weak: other bytes
    if not (unchanged or source.md5):
        start = 0           # nothing would show that the rest is of another file
    with _Body(source, timeout, start, unchanged) as body:
        seen = {"etag": body.answer.headers["ETag"], "size": body.total,
                "last_modified": body.answer.headers["Last-Modified"]}
        changes = ", ".join(f"{key} was {note[key]} and is {value}" for key, value in seen.items()
                            if note.get(key) and value and note[key] != value)
        if body.status == 416 and body.total == part.size and not changes:
            return
        if body.status == 416 or body.status == 206 and changes:
            part.clear()
            raise _Dropped(f"{part.name} is thrown away: not of {body.url} "
                           f"({changes or 'too long'})")
        if body.status == 200:
            if part.size:
                reason = changes or "the server does not continue files"
                _say(f"{body.url} begins anew ({reason}); the {part.size:,} bytes in {part.name} "
                     f"are thrown away.")
            part.begin(seen)
        buffer = memoryview(bytearray(CHUNK))
        with progress_bar(part.path.name, part.note["size"], initial=part.size) as bar:
            while count := body.readinto(buffer):
                part.write(buffer[:count])
                bar.update(count)


class _Body(io.RawIOBase):
    """A file from byte `start` on, as it arrives. Refuses what is not the file.

    status: 200 (the server sends all of it), 206 (from start on) or 416 (start is behind its end).
    total: bytes of the whole file. A read before its end raises _Dropped if no more comes.
    """
    answer = None       # for close(), where none came

    def __init__(self, source, timeout, start=0, unchanged=None):
        super().__init__()
        headers = {"Range": f"bytes={start}-", "If-Range": unchanged} if start else {}
        headers = {name: value for name, value in headers.items() if value}
        self.answer = _ask(source.url, timeout, headers)
        self.url, self.status, self.count, self.head = shown(source.url), self.answer.status, 0, b""
        self.total = self._checked_total(source, start)
        self.left = self.total
        if self.status == 206:
            self.left -= start
        if self.status == 200:
            self.head = self.read(1) + self.read(1)
            if urlsplit(source.url).path.endswith(".gz") and self.head != GZIP:
                raise ValueError(f"{self.url}: found {self.head} at its head, expected {GZIP} "
                                 f"(gzip). Check the address.")

    def _checked_total(self, source, start):
        headers = self.answer.headers
        stated = headers["Content-Range"] or ""
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", stated)
        total = self.answer.length if self.status == 200 else int(span[2]) if span else None
        if self.status == 200 and headers.get_content_type() == "text/html":
            raise ValueError(f"{self.url}: found a page (text/html), expected a file. Check the "
                             f"address, and whether a proxy or a login stands before it.")
        if None not in (total, source.size) and total != source.size:
            raise RuntimeError(f"{self.url}: found {total:,} bytes, expected {source.size:,} "
                               f"({METALINK}). Try again later (a new release?), or name a mirror.")
        if self.status == 206 and (not span or span[1] != str(start)):
            raise _Dropped(f"{self.url}: found Content-Range {stated!r}, expected bytes {start}-")
        total = source.size if total is None else total
        if self.status == 200 and total is None and not (self.answer.chunked or source.md5):
            raise RuntimeError(f"{self.url}: found no Content-Length, so an early end would not "
                               f"show; expected one, or a size in {METALINK}. Name a mirror.")
        return total

    def readable(self):
        return True

    def readinto(self, buffer):
        data, self.head = self.head[:len(buffer)], self.head[len(buffer):]
        if not data and self.left != 0:
            data = self._next(len(buffer))
        buffer[:len(data)] = data
        return len(data)

    def _next(self, size):
        try:                    # read1, because read loses what came before an error
            data = self.answer.read1(size if self.left is None else min(size, self.left))
        except (OSError, http.client.HTTPException) as error:
            raise _Dropped(f"{self.url}: lost after {self.count:,} bytes ({error!r})") from None
        self.count += len(data)
        if self.left is not None:
            self.left -= len(data)
        if self.left and not data:
            raise _Dropped(f"{self.url}: ended after {self.count:,} bytes; expected "
                           f"{self.left:,} more")
        return data

    def close(self):
        if self.answer:
            self.answer.close()
        super().close()


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, answer, code, message, headers, url):
        _check_url(url, ("https",) if request.type == "https" else ("http", "https"))
        return super().redirect_request(request, answer, code, message, headers, url)


def _check_url(url, schemes=("http", "https")):
    if urlsplit(url).scheme not in schemes or not urlsplit(url).hostname:
        raise ValueError(f"found the address {shown(url)}; expected "
                         f"{' or '.join(schemes)}://HOST/FILE.")


def _ask(url, timeout, headers):
    """The answer to one GET: of status 200, or 206 or 416 if a Range was asked for."""
    _check_url(url)
    login, _, host = urlsplit(url).netloc.rpartition("@")
    bare_url = urlunsplit(urlsplit(url)._replace(netloc=host))
    try:
        request = urllib.request.Request(bare_url, headers=headers)
        request.add_header("User-Agent", "protein-ddp")
        if login:
            secret = base64.b64encode(unquote(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {secret}")
        answer = urllib.request.build_opener(_Redirects).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        answer = error
    except (http.client.InvalidURL, UnicodeError):
        raise ValueError(f"found the address {shown(url)!r}; expected %20 for a blank, and the "
                         f"like for what is not ASCII.") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        cause = reason if isinstance(reason, Exception) else error
        raise _Dropped(f"{shown(url)}: no answer ({reason!r})") from cause
    if answer.status == 200 or answer.status in (206, 416) and "Range" in headers:
        return answer
    answer.close()
    kind = _Dropped if answer.status == 429 or answer.status >= 500 else ValueError
    raise kind(f"{shown(url)}: found the answer {answer.status} {answer.reason}, expected the file")


def _retry(work, tries, backoff, bytes_arrived=lambda: 0):
    """work(), again after _Dropped; a try in which more bytes arrived begins the count anew."""
    failures, first = 0, True
    while True:
        before = bytes_arrived()
        try:
            return work()
        except _Dropped as error:
            after = bytes_arrived()
            failures = 1 if after > before else failures + 1
            arrived = f"{after:,} bytes are kept; " if after else ""
            state = f"{arrived}tries without progress: {failures} of {tries}"
            advice = ("Check the network (on a cluster: a login node, or set https_proxy), name a "
                      "mirror (--url), or give files of your own (--fasta)")
            if first and isinstance(error.__cause__, NOT_THERE):
                raise OSError(f"{error}. {advice}.") from None
            if failures >= tries:
                raise OSError(f"{error}. {state}. {advice}; the same command goes on.") from None
            first, wait = False, min(LONGEST_WAIT, backoff * 2 ** (failures - 1))
            _say(f"{error}; {state}. Next in {wait:g} s.")
            time.sleep(wait)


def _md5(path):
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file, progress_bar("checking MD5", path.stat().st_size) as bar:
        while data := file.read(CHUNK):
            digest.update(data)
            bar.update(len(data))
    return digest.hexdigest()


def shown(url):
    """The url without user, password and query, which may be secret: for screens and files."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))


def _say(text):
    tqdm.write(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
