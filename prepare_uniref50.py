"""Download UniRef50 (or read files of proteins) and write a prepared folder, for training to read.

    python prepare_uniref50.py FOLDER                                # UniRef50: 13 GB, leaves 18 GB
    python prepare_uniref50.py FOLDER --max_sequences 10000          # its first records only
    python prepare_uniref50.py FOLDER --fasta a.fasta.gz b.txt c.pt  # your own files

Files are read, cleaned and checked by sedd/sequences.py. Of equal proteins one is kept. The folder
holds, with all numbers little endian and without headers, for SET = train and val:

    meta.json          format and its version, source, release, letters, settings, report of the
                       cleaning; of each set: proteins, residues, letter counts, length histogram,
                       sizes and blake2b of the files
    SET/tokens.bin     uint8, residues of all proteins one after the other: indices of `letters`
    SET/lengths.bin    uint32, residues of each protein
    SET/keys.bin       uint64, sedd.sequences.sequence_keys of each protein

Proteins are in the order of order_words(keys, seed): random, but independent of their order in the
sources. So training can read long stretches of a file and still gets a random sample. A protein is
in val if its key is in the lowest val_fraction of all keys, as with split_by_hash.

Two passes make the random order. The first cleans the text and appends each protein to one of some
hundred files ("buckets"), by the first bits of its order word. The second sorts one bucket after
the other in memory. All work is done in FOLDER.partial, which is renamed to FOLDER at the very end.
After an interruption the same command repeats the passes; a finished download is kept.
"""

import argparse
import collections
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import numpy as np
from tqdm import tqdm

from sedd.prepared import FORMAT, PARTS, SETS, VERSION, check_prepared, read_meta
from sedd.sequences import (LETTERS, N_TOKENS, Block, Proteins, ReadReport, order_words,
                            read_blocks, refuse_nothing_left, span_indices, word_spans)

# The current release: some 13 GB, about 60 million proteins.
UNIREF50_URL = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"

FLUSH_BYTES = 64 << 20          # proteins kept in memory before they are appended to the buckets
BUCKET_BYTES = 48 << 20         # approximate size of a bucket; determines the number of buckets
PART_WORDS = 1 << 17            # about how many words of 8 residues are copied at a time
UNPACKED_SHARE = 1.7            # most bytes of a folder per byte of .gz; UniRef50: 1.4
BYTES_PER_PROTEIN = 400         # most bytes of a folder per protein, on average; UniRef50: 300


# ---- main: the steps in their order ----

def main(argv=None):
    """Exit code: 0 done (or done before), 2 refused or failed, 130 interrupted."""
    args = parse(argv)
    try:
        prepare(**vars(args))
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
    parser.add_argument("folder", type=Path, help="folder to create")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", default=UNIREF50_URL, help="a mirror (default: %(default)s)")
    source.add_argument("--fasta", type=Path, nargs="+", metavar="FILE", help="FASTA, text or .pt")
    parser.add_argument("--max_sequences", type=int, metavar="N", help="only the first N records")
    parser.add_argument("--val_fraction", type=float, default=0.001, help="default %(default)s")
    parser.add_argument("--min_length", type=int, default=1, help="residues; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the order; default %(default)s")
    return parser.parse_args(argv)


def prepare(folder, url, fasta, max_sequences, val_fraction, min_length, seed):
    """Make the prepared folder, or find it finished.

    folder: Path to create. fasta: Paths of files of proteins, or None to download the url.
    max_sequences: only this many records of the sources, or None. min_length: residues.
    val_fraction: share of the proteins in val, by their keys. seed: of the random order.
    Raises ValueError for wrong settings or data, RuntimeError if another process works on the
    folder or the server sends something wrong, OSError for disk and network.
    """
    n_wanted = 1 if max_sequences is None else max_sequences
    if not 0 <= val_fraction < 1 or min_length < 1 or n_wanted < 1:
        raise ValueError(f"found val_fraction = {val_fraction}, min_length = {min_length}, "
                         f"max_sequences = {max_sequences}; expected 0 <= val_fraction < 1, and at "
                         f"least 1 of the others.")
    settings = {"seed": seed, "val_fraction": val_fraction, "min_length": min_length,
                "max_sequences": max_sequences}
    if fasta:
        release = None
        inputs = [input_of_file(file) for file in fasta]
        described = sorted((file.name, entry.size, digest_of(file))
                           for file, entry in zip(fasta, inputs))
        settings["source"] = [name for name, _, _ in described]
        settings["source_bytes"] = [size for _, size, _ in described]
        settings["source_digest"] = [digest for _, _, digest in described]
    else:
        settings["source"] = [safe_url(url)]
    folder = Path(os.path.abspath(folder))
    with working_folder(folder) as partial:
        if is_finished(folder, settings):
            print(f"{folder} is finished already, with these settings; nothing to do.")
            shutil.rmtree(partial)
            return
        remove_work(partial)                                    # what an interrupted run left
        if not fasta:
            inputs, release = download_input(url, partial / "download", max_sequences)
        n_bytes = expected_bytes(inputs, max_sequences)
        check_disk(partial, n_bytes)
        report = ReadReport()
        bits = max(0, math.ceil(math.log2(max(1, n_bytes) / BUCKET_BYTES)))     # 2**bits buckets
        try:
            n_read = deal(inputs, partial / "buckets", bits, report, settings)
            sets = collect(partial / "buckets", partial / "result", settings)
            finish_report(report, sets, n_read, settings)
        except (ValueError, FileNotFoundError):     # repeating the command would not help
            remove_work(partial)
            raise
        meta = {"format": FORMAT, "version": VERSION, "release": release, "letters": LETTERS,
                **settings, "report": dataclasses.asdict(report), "sets": sets}
        publish(partial / "result", meta, folder)
        shutil.rmtree(partial)
    print_summary(folder, meta, report)


# ---- sources ----

class Input(NamedTuple):
    """A source of proteins: a file, or a url that is read without keeping what is read."""
    name: str               # path or url
    size: int | None        # bytes, None if not known
    open: Callable          # () -> context manager of a source for read_blocks


def input_of_file(path):
    size = path.stat().st_size if path.is_file() else 0     # reading it raises if it is no file
    return Input(str(path), size, lambda: contextlib.nullcontext(str(path)))


def digest_of(path):
    """Hash of the first and the last MiB of a file. A change in between that keeps the size is
    missed."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        return hashlib.blake2b(head + file.read(), digest_size=8).hexdigest()


def download_input(url, folder, max_sequences):
    """Download the url, unless only its first records are wanted -> ([Input], release or None).

    A finished download needs no network, so the passes can run later where there is none.
    """
    path = folder / Path(safe_url(url)).name
    partial = PartialFile(Source(url), path)
    if partial.is_finished:
        return [input_of_file(path)], partial.note["release"]
    source = look_up(url)
    stream = Input(safe_url(url), source.size, lambda: retry(lambda: open_url(source)))
    if max_sequences and path.suffix.lower() != ".pt":
        return [stream], source.release
    folder.mkdir(exist_ok=True)
    if source.size:
        n_arrived = sum(entry.stat().st_size for entry in folder.iterdir())
        check_disk(folder, expected_bytes([stream], None), max(0, source.size - n_arrived))
    download(source, path)
    return [input_of_file(path)], source.release


def expected_bytes(inputs, max_sequences):
    """Estimate, rather too high, of the size in bytes of a prepared folder of these inputs."""
    n_bytes = 0
    for entry in inputs:
        if entry.size is None:
            n_bytes = math.inf
        elif entry.name.endswith(".gz"):
            n_bytes += entry.size * UNPACKED_SHARE
        else:
            n_bytes += entry.size
    return int(min(n_bytes, (max_sequences or math.inf) * BYTES_PER_PROTEIN))


def check_disk(folder, n_bytes, n_download=0):
    """Raise ValueError if there is no room for about n_bytes of proteins and for the download.

    Buckets and result together need the space of the proteins once: a bucket is removed when read.
    """
    n_work = 2 * BUCKET_BYTES
    free = shutil.disk_usage(folder).free
    need = n_download + n_bytes + n_work

    def in_gb(n):
        return f"{n / 1e9:,.3f} GB"

    if free < need:
        raise ValueError(f"{folder} has {in_gb(free)} free; expected about {in_gb(need)} "
                         f"({in_gb(n_download)} to download, {in_gb(n_bytes)} of proteins, "
                         f"{in_gb(n_work)} to work in). Make room, or take another disk.")


# ---- pass 1: clean the proteins, and deal them out to buckets ----

def deal(inputs, folder, bits, report, settings):
    """Deal the proteins out to 2**bits buckets. Returns the number of proteins read."""
    folder.mkdir()
    blocks = []
    size = 0
    n_read = 0
    for block in all_blocks(inputs, report, settings):
        blocks.append(block)
        size += block.words.nbytes + 12 * len(block.lengths)        # 4 per length, 8 per key
        n_read += len(block.lengths)
        if size >= FLUSH_BYTES:
            append(folder, concatenate(blocks), settings["seed"], bits)
            blocks = []
            size = 0
    append(folder, concatenate(blocks), settings["seed"], bits)
    if not n_read:
        names = ", ".join(entry.name for entry in inputs)
        refuse_nothing_left(names, report, settings["min_length"])
    return n_read


def all_blocks(inputs, report, settings):
    """Yield the blocks of all inputs, up to max_sequences records, with a progress bar."""
    wanted = settings["max_sequences"]
    n_read = 0
    with progress_bar("1/2 reading", wanted, " sequences") as bar:
        for entry in inputs:
            left = None
            if wanted:
                left = wanted - n_read - report.n_dropped
            if left == 0:
                break
            with entry.open() as source:
                for block in read_blocks(source, report, settings["min_length"], max_records=left):
                    n_read += len(block.lengths)
                    bar.update(len(block.lengths))
                    yield block


def concatenate(blocks):
    empty = Block(np.zeros(0, "<u8"), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    return Block(*map(np.concatenate, zip(empty, *blocks)))


def order_of(block, seed):
    """Indices of the proteins of a block in the order of order_words, each protein once."""
    starts, _ = word_spans(block.lengths)
    tokens = block.words.view(np.uint8)
    return Proteins(tokens, 8 * starts, block.lengths, block.keys).unique_order(seed)


def rearranged(block, order):
    """Yield the proteins of a block in this order, as Blocks of about PART_WORDS words."""
    starts, counts = word_spans(block.lengths)
    parts = np.cumsum(counts[order]) // PART_WORDS
    for rows in np.split(order, np.flatnonzero(np.diff(parts)) + 1):
        words = block.words[span_indices(starts[rows], counts[rows])]
        yield Block(words, block.lengths[rows], block.keys[rows])


def append(folder, block, seed, bits):
    """Append the proteins of a block to 2**bits files of the folder, chosen by the first bits of
    their order words."""
    order = order_of(block, seed)
    words = order_words(block.keys[order], seed)
    firsts = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    for bucket, rows in enumerate(np.split(order, np.searchsorted(words, firsts))):
        if len(rows):
            with open(folder / f"{bucket:06d}", "ab") as file:
                for part in rearranged(block, rows):
                    file.write(np.array([len(part.lengths), len(part.words)], "<u8"))
                    file.write(part.lengths.astype("<u4"))
                    file.write(part.keys.astype("<u8"))
                    file.write(part.words)


# ---- pass 2: sort each bucket, and write the sets ----

def collect(folder, result, settings):
    """Write the sets from the buckets and remove these -> {set: its entry in meta.json}."""
    limit = np.uint64(int(settings["val_fraction"] * 2.0**64))
    with contextlib.ExitStack() as stack:
        sets = {name: stack.enter_context(contextlib.closing(SetWriter(result / name)))
                for name in SETS}
        sizes = {path: path.stat().st_size for path in sorted(folder.iterdir())}
        bar = stack.enter_context(progress_bar("2/2 sorting", sum(sizes.values())))
        for path, size in sizes.items():
            block = concatenate(list(read_bucket(path)))
            path.unlink()
            order = order_of(block, settings["seed"])
            is_val = block.keys[order] < limit
            for name, rows in (("train", order[~is_val]), ("val", order[is_val])):
                for part in rearranged(block, rows):
                    sets[name].write(part)
            bar.update(size)
    return {name: writer.meta() for name, writer in sets.items()}


def read_bucket(path):
    """Yield the Blocks that were appended to a bucket, one after the other."""
    with open(path, "rb") as file:
        while head := file.read(16):
            n_rows, n_words = np.frombuffer(head, "<u8").tolist()
            lengths = np.frombuffer(file.read(4 * n_rows), "<u4").astype(np.int64)
            keys = np.frombuffer(file.read(8 * n_rows), "<u8")
            yield Block(np.frombuffer(file.read(8 * n_words), "<u8"), lengths, keys)


class SetWriter:
    """Writes the three files of a set and collects its entry in meta.json."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.files = {name: open(folder / name, "xb") for name in PARTS}
        self.hashes = {name: hashlib.blake2b(digest_size=16) for name in PARTS}
        self.keys_hash = hashlib.blake2b(digest_size=8)
        self.token_counts = np.zeros(256, np.int64)
        self.length_counts = collections.Counter()

    def close(self):
        for file in self.files.values():
            file.close()

    def write(self, block):
        lengths = block.lengths.astype("<u4").tobytes()
        keys = block.keys.astype("<u8").tobytes()
        for name, data in zip(PARTS, (block.tokens(), lengths, keys)):
            self.files[name].write(data)
            self.hashes[name].update(data)
        self.keys_hash.update(keys)
        self.token_counts += np.bincount(block.words.view(np.uint8), minlength=256)
        self.length_counts.update(block.lengths.tolist())

    def meta(self):
        histogram = sorted(self.length_counts.items())
        return {"proteins": self.length_counts.total(),
                "residues": sum(length * count for length, count in histogram),
                "letter_counts": self.token_counts[:N_TOKENS].tolist(),
                "length_histogram": histogram,
                "keys_hash": self.keys_hash.hexdigest(),
                "files": {name: {"bytes": os.path.getsize(self.files[name].name),
                                 "blake2b": self.hashes[name].hexdigest()} for name in PARTS}}


# ---- the folder ----

@contextlib.contextmanager
def working_folder(folder):
    """FOLDER.partial, locked for one process; removed at the end if it holds only the lock."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
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


def remove_work(partial):
    """Remove buckets and unfinished result; keep a download."""
    for name in ("buckets", "result"):
        shutil.rmtree(partial / name, ignore_errors=True)


def is_finished(folder, settings):
    """Whether the folder exists, with these settings. Raises ValueError if it is anything else."""
    if not os.path.lexists(folder):
        return False
    try:
        meta = read_meta(folder)
    except (OSError, ValueError):
        raise ValueError(f"{folder} exists, and is no prepared folder of version {VERSION}; "
                         f"expected nothing of this name. Name another folder.") from None
    differences = [f"{key} is {meta.get(key)!r} there and {value!r} here"
                   for key, value in settings.items() if meta.get(key) != value]
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def progress_bar(what, total, unit="B", initial=0):
    """A progress bar; without a terminal, as in a job's log, it writes a line per half minute."""
    watched = sys.stderr.isatty()
    line = "{l_bar}{bar}{r_bar}\n" if total else "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}]\n"
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=True, ncols=80,
                file=sys.stderr, mininterval=0.2 if watched else 30,
                bar_format=None if watched else line)


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
CHUNK = 1 << 20                 # bytes per read, at most
TIMEOUT = 60                    # seconds without a byte, after which a connection counts as dropped
TRIES = 10                      # failures in a row without progress; takes about four minutes
BACKOFF = 1.0                   # seconds before the second try; doubled each time
LONGEST_WAIT = 60               # seconds between two tries
GZIP = b"\x1f\x8b"              # the first two bytes of a gzip file
NO_SERVER = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
ADVICE = ("Check the network (on a cluster: a login node, or set https_proxy), name a mirror "
          "(--url), or give files of your own (--fasta)")


class Source(NamedTuple):
    """A file to download: size in bytes, MD5 in hex and release, each None where not known."""
    url: str
    size: int | None = None
    md5: str | None = None
    release: str | None = None


class Dropped(OSError):
    """An error that another try may mend: a lost connection, too little data, a busy server."""


def look_up(url):
    """Source of the url, with size, MD5 and release from RELEASE.metalink beside it, if known.

    Raises ValueError for a url that is not http or https, OSError where the server does not answer.
    """
    check_url(url)
    listing = Source(urljoin(url, METALINK))
    name = unquote(urlsplit(url).path.rpartition("/")[2])

    def read_listing():
        with open_url(listing) as file:
            return file.readall()
    try:
        root = xml.etree.ElementTree.fromstring(retry(read_listing))
        entries = [entry for entry in root.iterfind(".//{*}file") if entry.get("name") == name]
        md5 = ""
        if entries:
            md5 = entries[0].findtext(".//{*}hash[@type='md5']", "")
        if not re.fullmatch("[0-9a-fA-F]{32}", md5):
            raise ValueError(f"{METALINK} has no MD5 of {name}")
        size = int(entries[0].findtext("{*}size"))
        return Source(url, size, md5.lower(), release=root.findtext("{*}version"))
    except (ValueError, RuntimeError, TypeError, xml.etree.ElementTree.ParseError) as error:
        say(f"{safe_url(url)}: MD5 and release are not known and not checked ({error}).")
        return Source(url)


def download(source, path):
    """Download a Source to path, which appears when whole and checked. The same call resumes it.

    Raises ValueError if there is no such file (wrong url, 4xx, a web page), OSError or RuntimeError
    for network, server and disk.
    """
    partial = PartialFile(source, path)
    if partial.is_finished:
        return
    if partial.differences:
        partial.clear(f"it is of another file ({', '.join(partial.differences)} differ)")
    retry(lambda: receive(source, partial), lambda: partial.size)
    synchronise(partial.part)
    if source.md5:
        found = md5_of(partial.part)
        if found != source.md5:
            partial.part.unlink()
            raise RuntimeError(f"{safe_url(source.url)}: found MD5 {found}, expected {source.md5}. "
                               "The data is removed; run the same command again, or name a mirror.")
    os.replace(partial.part, path)


class PartialFile:
    """The bytes of a download that have arrived, in PATH.part, and the note PATH.part.json.

    The note says to which file the bytes belong: what was asked for, and the size and the version
    that the server named. A whole file is renamed to PATH. The note is kept, so that the same
    command finds the download finished.

    note: the dict in the note, {} if there is none. differences: keys in which it differs from what
    is asked for now.
    """

    def __init__(self, source, path):
        self.path = path
        self.part = Path(f"{path}.part")
        self.note_path = Path(f"{path}.part.json")
        query = hashlib.blake2b(urlsplit(source.url).query.encode(), digest_size=8).hexdigest()
        self.wanted = {**source._asdict(), "url": safe_url(source.url), "query_digest": query}
        try:
            self.note = json.loads(self.note_path.read_text())
        except (OSError, ValueError):
            self.note = {}
        self.differences = [key for key, value in self.wanted.items()
                            if value not in (None, self.note.get(key))]
        self.is_finished = path.exists() and not self.differences

    @property
    def size(self):
        return self.part.stat().st_size if self.part.exists() else 0

    def clear(self, reason):
        """Delete what has arrived, and say why."""
        if self.size:
            say(f"{self.part.name}: {self.size:,} bytes are thrown away: {reason}.")
        self.part.unlink(missing_ok=True)
        self.note = {}

    def begin(self, total, version):
        """Write the note on a file of `total` bytes before its first byte is written."""
        # The part is empty here, so the note is right even if the process is killed right after.
        self.path.unlink(missing_ok=True)
        self.note = {**self.wanted, "size": total, "version": version}
        self.note_path.write_text(json.dumps(self.note))


def receive(source, partial):
    """Append what one connection delivers to the part. Raises Dropped if it ends too early."""
    note = partial.note
    if partial.size and partial.size == note["size"]:
        return
    # Without a version, start again: nothing would show that the rest is of another file.
    start = partial.size if note.get("version") else 0
    with open_url(source, start, note.get("version")) as file:
        if file.status == 200:
            partial.clear("the server sends the file from its beginning")
            partial.begin(file.total, file.version)
        elif not continues(file, start, note):
            partial.clear(f"{file.name} is another file now, or does not continue it")
            raise Dropped(f"{file.name}: the answer is not the rest of the file")
        with open(partial.part, "ab") as target, progress_bar(
                partial.path.name, file.total, initial=partial.size) as bar:
            while data := file.read(CHUNK):
                target.write(data)
                bar.update(len(data))


def continues(file, start, note):
    """Whether an HttpFile is the rest, from byte `start` on, of the file that the note is on."""
    same_version = file.version in (None, note["version"])
    return same_version and file.start == start and file.total == note["size"]


class HttpFile(io.RawIOBase):
    """A file on a server, as it arrives, from byte `start` on.

    name: the address. status: 200 (the server sends the whole file) or 206 (from start on). total:
    bytes of the whole file. version: ETag or time of the file, None if not known.
    A read before the end raises Dropped if no more comes.
    """

    def __init__(self, answer, url, start, total):
        super().__init__()
        self.answer = answer
        self.name = url
        self.status = answer.status
        self.start = start
        self.total = total
        self.n_read = 0
        etag = answer.headers["ETag"] or "W/"           # a weak ETag does not vouch for each byte
        self.version = answer.headers["Last-Modified"] if etag.startswith("W/") else etag

    def readable(self):
        return True

    def readinto(self, buffer):
        left = self.total - self.start - self.n_read
        if not left:
            return 0
        try:                    # read1, because read loses what came before an error
            data = self.answer.read1(min(len(buffer), left))
        except (OSError, http.client.HTTPException) as error:
            raise Dropped(f"{self.name}: lost after {self.n_read:,} bytes ({error!r})") from None
        if not data:
            raise Dropped(f"{self.name}: ended after {self.n_read:,} bytes; expected {left:,} more")
        self.n_read += len(data)
        buffer[:len(data)] = data
        return len(data)

    def close(self):
        self.answer.close()
        super().close()


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from https to http or to ftp, where anyone could answer."""

    def redirect_request(self, request, answer, code, message, headers, url):
        if urlsplit(url).scheme not in ("https", request.type):
            raise ValueError(f"{safe_url(request.full_url)}: found a redirect to {safe_url(url)}, "
                             f"expected https. Name a mirror (--url).")
        return super().redirect_request(request, answer, code, message, headers, url)


def open_url(source, start=0, version=None):
    """HttpFile of a Source, from byte `start` on if the server still has this version of it.

    Raises Dropped, ValueError if the answer is not the file, RuntimeError for a size that is wrong
    or not known.
    """
    check_url(source.url)
    url = safe_url(source.url)
    headers = {"User-Agent": "protein-ddp"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        request = urllib.request.Request(source.url, headers=headers)
        answer = urllib.request.build_opener(SafeRedirects).open(request, timeout=TIMEOUT)
        beginning = answer.peek(2)[:2]
    except urllib.error.HTTPError as error:
        kind = Dropped if error.code == 429 or error.code >= 500 else ValueError
        raise kind(f"{url}: found the answer {error.code} {error.reason}, expected the "
                   f"file") from None
    except (http.client.InvalidURL, UnicodeError):
        raise ValueError(f"found the address {url!r}; expected blanks (%20) and characters "
                         f"beyond ASCII percent-encoded.") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        cause = reason if isinstance(reason, Exception) else error
        raise Dropped(f"{url}: no answer ({reason!r})") from cause
    if start and answer.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers["Content-Range"] or "")
        if not span:
            return HttpFile(answer, url, -1, -1)    # which continues nothing
        return HttpFile(answer, url, int(span[1]), int(span[2]))
    if answer.status != 200:
        raise ValueError(f"{url}: found the answer {answer.status}, expected 200 with the file")
    total = source.size if answer.length is None else answer.length
    if not total or source.size not in (None, total):
        found = "no Content-Length" if total is None else f"{total:,} bytes"
        expected = "some" if source.size is None else f"{source.size:,} ({METALINK})"
        raise RuntimeError(f"{url}: found {found}, expected {expected}. Try again later (a new "
                           f"release?), or name a mirror.")
    is_no_gzip = urlsplit(source.url).path.endswith(".gz") and beginning not in (GZIP, b"")
    if is_no_gzip or answer.headers.get_content_type() == "text/html":
        raise ValueError(f"{url}: found {answer.headers.get_content_type()} that begins with "
                         f"{beginning}, expected the file. Check the address, and whether a proxy "
                         f"or a login page stands before it.")
    return HttpFile(answer, url, 0, total)


def retry(work, bytes_arrived=lambda: 0):
    """Call work(), again after Dropped. A try in which more bytes arrived resets the count."""
    failures = 0
    while True:
        before = bytes_arrived()
        try:
            return work()
        except Dropped as error:
            if not failures and isinstance(error.__cause__, NO_SERVER):
                raise OSError(f"{error}. {ADVICE}.") from None
            after = bytes_arrived()
            failures = 1 if after > before else failures + 1
            arrived = f"{after:,} bytes are kept; " if after else ""
            state = f"{arrived}tries without progress: {failures} of {TRIES}"
            if failures >= TRIES:
                raise OSError(f"{error}. {state}. {ADVICE}; the same command goes on.") from None
            wait = min(LONGEST_WAIT, BACKOFF * 2 ** (failures - 1))
            say(f"{error}; {state}. Next in {wait:g} s.")
            time.sleep(wait)


def md5_of(path):
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file, progress_bar("checking MD5", path.stat().st_size) as bar:
        while data := file.read(CHUNK):
            digest.update(data)
            bar.update(len(data))
    return digest.hexdigest()


def check_url(url):
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"found the address {safe_url(url)}; expected http://HOST/FILE or "
                         f"https://HOST/FILE, without user and password.")


def safe_url(url):
    """The url without user, password and query, which may be secret: to be shown or saved."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))


def say(text):
    tqdm.write(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
