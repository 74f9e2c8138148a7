"""Protein sequences: files, split, crops, batches as tensors.

    proteins, report = read_sequences("proteins.fasta.gz")      # print(report): read and cleaned
    train, val = split_by_hash(proteins, 0.05)                  # index arrays
    train = proteins.subset(train)
    crops = random_crops(train.subset([3, 1, 4]), 512, seed=0, epoch=0)
    x0, mask = collate(crops)

Reads FASTA (.gz or not), text with one sequence per line (.txt or .seq, .gz or not), and .pt files
that hold a list of dicts with `protein_seq`. Writes nothing. read_blocks reads all sequence files:
it cleans some thousand proteins at a time, so that a file of any size needs only a few MB of
memory. Folders made by prepare_uniref50.py are read by sedd/prepared.py.

Each random choice has its own seed (proteins/seeds.py). No choice depends
on how many random numbers other code has drawn. So the data of a training step depends on the seed,
the epoch and the step, not on ranks, workers or restarts.
"""

import contextlib
import gzip
import io
import itertools
import re
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from proteins.letters import (BAD, LETTERS, N_TOKENS, PAD, RARE, STOP, TO_TOKEN, X_ID,
                              encode)
from ddp_setup import seed_for
from training.files import check_zip

BLOCK_BYTES = 1 << 20           # text cleaned at a time: many proteins, but fits into a cache
LONGEST_RECORD = 16 << 20       # characters, header included; the longest known protein has 45,000
MOST_LINES = 1 << 20            # of a record; read one by one they take about 2 s
AT_A_TIME = 4096                # proteins that are copied at a time, to save memory
ORDER_SEED = 0                  # of the order in which read_sequences gives the proteins of a file
HEADER = b">" + b" " * 8 + b"\n"        # a header of 8 bytes and more, which _clean needs
# Letters of a file of A, C, G, T, U, N alone. Fewer may be a peptide: a letter of a protein is one
# of these with a probability of 0.27, so 20 in a row come once in 2e11 files.
NUCLEOTIDES_LEAST = 20


# ---- keys ----

def sequence_keys(tokens, offsets, lengths):
    """Hash of each protein's letters: the same in any table, at any place, on any computer.

    tokens: (total,) uint8. offsets, lengths: (n,) int64, as in Proteins.
    Returns (n,) uint64. Proteins with the same key count as equal. The probability that some two
    of N different proteins have the same key is N**2 / 2**65: 1e-4 for 60 million.
    """
    keys = np.empty(len(lengths), np.uint64)
    for first in range(0, len(lengths), AT_A_TIME):
        part = slice(first, first + AT_A_TIME)
        begins = offsets[part]
        sizes = lengths[part]
        starts, counts = word_spans(sizes)
        padded = np.full(8 * counts.sum(), PAD, np.uint8)
        padded[span_indices(8 * starts, sizes)] = tokens[span_indices(begins, sizes)]
        keys[part] = _keys_of_words(padded.view("<u8"), sizes)
    return keys


def order_words(keys, seed):
    """Numbers by which to sort proteins into a random order, another one for each seed.

    keys: (n,) uint64, see sequence_keys. Returns (n,) uint64, different words for different keys.
    """
    return _avalanche(keys + np.uint64(seed_for("order", seed)))


def _avalanche(words):
    # The last step of splitmix64: one to one, and each bit of the result depends on all of a word.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _keys_of_words(words, lengths):
    """Keys of proteins from their tokens as padded words, see Block: (n,) uint64.

    Scrambles each word of a protein, multiplies it by an odd number to the power of its place in
    the protein, adds the words up and scrambles the sum with the length; all modulo 2**64.
    """
    starts, counts = word_spans(lengths)
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    powers = np.uint64(0xDA942042E4DD58B5) ** np.arange(counts.max(initial=0), dtype=np.uint64)
    mixed *= powers[span_indices(np.zeros_like(counts), counts)]
    keys = lengths.astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    filled = counts > 0                             # reduceat cannot do empty sums
    if filled.any():
        keys[filled] += np.add.reduceat(mixed, starts[filled])
    return _avalanche(keys)


# ---- stretches of a flat array ----

def word_spans(lengths):
    """(first word, number of words) of each protein, padded to words of 8 tokens: both int64."""
    counts = (lengths + 7) // 8
    return np.cumsum(counts) - counts, counts


def span_indices(starts, lengths):
    """Indices of all items of these spans, one span after the other: (lengths.sum(),) int64."""
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())


# ---- the table of proteins ----

def named_sequences(path):
    """Yield (header, letters) of each record of a FASTA file (gzip or not): letters as they are,
    without blanks, lines joined. For files that people write; read_sequences is for data sets.

    Raises ValueError where the file is no FASTA, naming the line, or holds none.
    """
    header = None
    parts = []
    try:
        with open(path, "rb") as file:
            lines = io.TextIOWrapper(_unpacked(path, file), "utf-8-sig", "replace")
            size = 0        # of this record, blanks and line ends included
            n_lines = 0     # of this record, empty ones included
            pieces = iter(lambda: lines.readline(LONGEST_RECORD + 1), "")
            for number, piece in enumerate(pieces, 1):
                line = piece.strip()
                if line.startswith(">"):
                    size = 0
                    n_lines = 0
                size += len(piece)
                n_lines += 1
                if size > LONGEST_RECORD or n_lines > MOST_LINES:
                    refuse_long_record(path, number)
                if line.startswith(">"):
                    if header is not None:
                        yield header, "".join(parts)
                    header = line[1:].replace("\t", " ").strip()
                    parts = []
                elif line and header is None:
                    raise ValueError(f"{path} line {number}: found letters before a header; "
                                     "expected FASTA, with > first.")
                else:
                    parts.append("".join(line.split()))   # read_sequences removes blanks too
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f"{path} is truncated or damaged ({e}); expected a whole gzip "
                         "file.") from None
    if header is None:
        raise ValueError(f"{path} holds no sequence; expected FASTA.")
    yield header, "".join(parts)


def refuse_long_record(name, line):
    """Raise ValueError for a record that no protein is. line: number of a line in it."""
    raise ValueError(f"{name}, line {line}: a record of more than {LONGEST_RECORD:,} characters "
                     f"or {MOST_LINES:,} lines; expected proteins. Is it another file, or are "
                     "line ends missing?")


class Proteins:
    """A table of proteins over one flat array, which may as well be a memory-mapped file.

    tokens:  (total,) uint8, ids 0..20.
    offsets: (n,) int64, where each protein starts in tokens.
    lengths: (n,) int64, residues.
    keys:    (n,) uint64, sequence_keys of the whole cleaned protein; a crop has the key of its
             protein. Computed here if not given.
    Indexing gives one protein as a uint8 view; subset and random_crops share the tokens.
    """

    def __init__(self, tokens, offsets, lengths, keys=None):
        self.tokens = tokens
        self.offsets = np.asarray(offsets, np.int64)
        self.lengths = np.asarray(lengths, np.int64)
        if keys is None:
            keys = sequence_keys(tokens, self.offsets, self.lengths)
        self.keys = np.asarray(keys, np.uint64)
        if not self.offsets.shape == self.lengths.shape == self.keys.shape:
            raise ValueError(f"found offsets {self.offsets.shape}, lengths {self.lengths.shape}, "
                             f"keys {self.keys.shape}; expected one entry of each per protein.")

    @classmethod
    def from_sequences(cls, sequences):
        """Proteins from an iterable of str, or of uint8 arrays of ids."""
        rows = [encode(s) if isinstance(s, str) else np.asarray(s, np.uint8) for s in sequences]
        lengths = np.array([len(row) for row in rows], np.int64)
        tokens = np.concatenate(rows) if rows else np.zeros(0, np.uint8)
        return cls(tokens, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def join(cls, tables):
        """The proteins of several tables, one table after the other."""
        begins = np.cumsum([0] + [len(table.tokens) for table in tables])
        return cls(np.concatenate([table.tokens for table in tables]),
                   np.concatenate([t.offsets + begin for t, begin in zip(tables, begins)]),
                   np.concatenate([table.lengths for table in tables]),
                   np.concatenate([table.keys for table in tables]))

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, i):
        start = self.offsets[i]
        return self.tokens[start:start + self.lengths[i]]

    def subset(self, indices):
        """The proteins at these indices, in this order."""
        return Proteins(self.tokens, self.offsets[indices], self.lengths[indices],
                        self.keys[indices])

    def compact(self):
        """These proteins over tokens of their own, one after the other as in this table."""
        tokens = np.concatenate([np.zeros(0, np.uint8), *(self[i] for i in range(len(self)))])
        return Proteins(tokens, np.cumsum(self.lengths) - self.lengths, self.lengths, self.keys)

    def unique_order(self, seed):
        """Indices that put the proteins into the order of order_words, each distinct key once."""
        words = order_words(self.keys, seed)
        order = np.argsort(words)
        words = words[order]
        return order[np.append(True, words[1:] != words[:-1])[:len(order)]]

    def length_counts(self):
        """(lengths that occur, ascending; number of proteins of each), both int64."""
        return np.unique(self.lengths, return_counts=True)

    def letter_counts(self):
        """How often each of the 21 tokens occurs: (21,) int64."""
        counts = np.zeros(N_TOKENS, np.int64)
        for first in range(0, len(self), AT_A_TIME):
            part = self.subset(slice(first, first + AT_A_TIME)).compact()
            counts += np.bincount(part.tokens, minlength=N_TOKENS)
        return counts

    def lengths_of(self, first, last):
        """Residues of proteins first to last - 1."""
        return self.lengths[first:last]

    def read(self, first, last, token):
        """Proteins first to last - 1. token: as in PreparedProteins.read; not needed here."""
        return self.subset(slice(first, last)).compact()


# ---- files ----

@dataclass
class ReadReport:
    """What read_sequences found, dropped and changed; str() is one line with what is not zero."""
    n_proteins: int = 0
    n_residues: int = 0
    shortest: int = 0
    longest: int = 0
    median: int = 0
    n_rare: int = field(default=0, metadata={"note": "residues B, Z, U, O or J read as X"})
    n_x: int = field(default=0, metadata={"note": "residues X in the file"})
    n_lower: int = field(default=0, metadata={"note": "lower-case letters read as upper case"})
    n_stops: int = field(default=0, metadata={"note": "stops '*' at the end removed"})
    n_blanks: int = field(default=0, metadata={"note": "blanks removed"})
    n_empty: int = field(default=0, metadata={"note": "empty records dropped"})
    n_all_x: int = field(default=0, metadata={"note": "proteins of X only dropped"})
    n_short: int = field(default=0, metadata={"note": "too short dropped"})
    n_duplicates: int = field(default=0, metadata={"note": "exact duplicates dropped"})

    @property
    def n_dropped(self):
        """Records that gave no protein; duplicates are not among them."""
        return self.n_empty + self.n_all_x + self.n_short

    def __str__(self):
        notes = [f"{self.n_proteins:,} proteins, {self.n_residues:,} residues, lengths "
                 f"{self.shortest:,} to {self.longest:,} (median {self.median:,})"]
        for item in fields(self):
            if "note" in item.metadata and getattr(self, item.name):
                notes.append(f"{getattr(self, item.name):,} {item.metadata['note']}")
        return "; ".join(notes)


class Block(NamedTuple):
    """The proteins of one piece of a file, cleaned.

    words:   (number of words,) uint64, little endian: the tokens, each protein padded with PAD to
             whole words of 8.
    lengths: (n,) int64, residues. keys: (n,) uint64.
    """
    words: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray

    def tokens(self):
        """The tokens as bytes, one protein after the other, without the padding."""
        return self.words.tobytes().translate(None, bytes([PAD]))


def read_sequences(path, min_length=1, alive=lambda: None, block_bytes=BLOCK_BYTES):
    """Read a file of proteins -> (Proteins, ReadReport).

    path: .pt is a torch file with a list of dicts that have `protein_seq`; text whose first
        character is '>' is FASTA; other text is one sequence per line if its name ends in .txt or
        .seq. gzip is recognised by content. Windows line ends and a byte order mark are accepted.
    min_length: residues; shorter proteins are dropped.
    alive: called after each block, which shows a watcher that a large file is still being read.
    block_bytes: about how much text is cleaned at a time.

    Cleaned, and counted in the report: B, Z, U, O, J become X; lower case (soft-masked regions)
    becomes upper case; one '*' at the end is removed, and so are blanks inside FASTA sequences;
    empty records, proteins of X only and short ones are dropped; of equal proteins one stays.
    The table is in the order of order_words(keys, ORDER_SEED), whatever their order in the file.
    Raises FileNotFoundError for a missing file, and ValueError with file and line (or entry) for an
    inner '*', gaps '-' and '.', digits, any other character, blanks inside a line of text (a second
    column?), nucleotides, binary files, other encodings, a truncated or damaged .gz, an empty file,
    a directory.
    """
    report = ReadReport()
    tokens = bytearray()
    lengths = []
    keys = []
    for block in read_blocks(path, report, min_length, block_bytes):
        tokens += block.tokens()
        lengths.append(block.lengths)
        keys.append(block.keys)
        alive()
    lengths = np.concatenate(lengths)
    keys = np.concatenate(keys)
    if not len(lengths):
        refuse_nothing_left(path, report, min_length)
    tokens = np.frombuffer(tokens, np.uint8)
    proteins = Proteins(tokens, np.cumsum(lengths) - lengths, lengths, keys)
    order = proteins.unique_order(ORDER_SEED)
    report.n_duplicates = len(proteins) - len(order)
    proteins = proteins.subset(order)
    report.n_proteins = len(proteins)
    report.n_residues = int(proteins.lengths.sum())
    report.shortest = int(proteins.lengths.min())
    report.longest = int(proteins.lengths.max())
    report.median = int(np.median(proteins.lengths))
    alive()
    return proteins, report


def read_blocks(source, report, min_length=1, block_bytes=BLOCK_BYTES, max_records=None):
    """Yield the cleaned proteins of a file as Blocks, in its order, with duplicates.

    source: path, or a raw binary stream that has a name, at its beginning; it is closed.
    report: ReadReport; what is cleaned and dropped is added to it, not the number of proteins.
    max_records: how many records are read, those that are dropped included; None for all.
    Cleans and refuses as read_sequences says. Needs memory for some 10 blocks, or one long record.
    """
    name = getattr(source, "name", source)
    n_records = 0
    n_letters = 0
    nucleotides_only = True
    kinds = set()       # of letters, as long as all are nucleotides
    with contextlib.closing(_texts(source, name, block_bytes)) as texts:
        for kind, number, text in texts:
            fasta = _as_fasta(kind, text)
            if fasta is None:
                _refuse_character(name, kind, number, text)
            data, starts, lengths = _find_records(fasta)
            if max_records is not None and len(lengths) >= max_records - n_records:
                n = max_records - n_records
                data = data[:starts[n] + 8]
                starts = starts[:n + 1]
                lengths = lengths[:n]
            n_letters += int(lengths.sum())
            nucleotides_only = (nucleotides_only and
                                not data.translate(None, b"ACGTUNacgtun* \t\n\0"))
            if nucleotides_only:
                kinds |= set(data.upper()) & set(b"ACGTU")
            block = _clean(data, starts, lengths, min_length, report)
            if block is None:
                _refuse_character(name, kind, number, text)
            yield block
            n_records += len(lengths)
            if n_records == max_records:
                break
    # A repeat of few kinds of letters, such as AAT, may be a peptide.
    if nucleotides_only and len(kinds) > 3 and n_letters >= NUCLEOTIDES_LEAST:
        raise ValueError(f"{name}: all {n_letters:,} letters are among ACGTUN, which is "
                         f"nucleotides; expected proteins. Translate them first.")


def refuse_nothing_left(name, report, min_length):
    """Raise ValueError, as all records of a file were dropped, for the reasons in the report."""
    raise ValueError(f"{name}: no protein is left of {report.n_dropped:,} records "
                     f"({report.n_empty:,} empty, {report.n_all_x:,} of X only, "
                     f"{report.n_short:,} shorter than min_length = {min_length}); expected at "
                     f"least one. Check the file, or lower min_length.")


# From text to Blocks. A loop over records would take twice the time for 60 million proteins, so
# each step works on the whole text of a block, with numpy or the methods of bytes.

def _find_records(text):
    """Find the records in text of FASTA, and write zeros over their headers.

    text: bytes of whole records, that begin with '>' and hold no zero. Returns
    data:    bytearray, the text with zeros in place of the n headers and of one more at the end,
    starts:  (n + 1,) where each of these headers stands; each has at least 8 bytes,
    lengths: (n,) characters between a header and the next that are no line ends.
    """
    data = bytearray().join([text, b"\n", HEADER])
    letters = np.frombuffer(data, np.uint8)
    line_ends = np.flatnonzero(letters == ord("\n"))
    # numbers[i] = k: header i begins after line end number k - 1 and ends at line end number k.
    numbers = np.flatnonzero(letters[line_ends[:-1] + 1] == ord(">")) + 1
    numbers = np.append(0, numbers)
    starts = np.append(0, line_ends[numbers[1:] - 1] + 1)
    ends = line_ends[numbers]
    if (ends - starts)[1:].min() < 8:                           # _clean needs 8 bytes of each
        return _find_records(text.replace(b"\n>", b"\n" + HEADER[:-1]))
    # Headers and sequences take turns: the bytes of a header are multiplied by 0, others by 1.
    sizes = np.diff(np.stack([starts, ends], axis=1).ravel(), append=len(data))
    letters *= np.repeat(np.arange(len(sizes), dtype=np.uint8) % 2, sizes)
    return data, starts, starts[1:] - ends[:-1] - np.diff(numbers)


def _clean(data, starts, lengths, min_length, report):
    """Clean what _find_records gives -> Block, or None if there is a wrong character."""
    letters = np.frombuffer(data, np.uint8)
    if b" " in data or b"\t" in data:
        blanks = np.flatnonzero((letters == ord(" ")) | (letters == ord("\t")))
        report.n_blanks += len(blanks)
        record = np.searchsorted(starts, blanks) - 1
        lengths = lengths - np.bincount(record, minlength=len(lengths))
    n_lower = np.count_nonzero(letters >= ord("a"))
    n_x = np.count_nonzero(letters == ord("X"))
    if n_lower:
        n_x += data.count(b"x")
    # Write the padding of each protein, 0 to 7 times "\r", over the first 8 bytes of the next
    # header. Translation makes it PAD and removes zeros, line ends and blanks: words remain.
    places = np.arange(8)
    letters[starts[1:, None] + places] = np.where(places < -lengths[:, None] % 8, ord("\r"), 0)
    tokens = data.translate(TO_TOKEN, b"\0\n \t")
    words = np.frombuffer(tokens, "<u8")
    if STOP in tokens:
        words, lengths = _remove_final_stops(tokens, lengths, report)
    if STOP in tokens or BAD in tokens:
        return None

    n_unknown = np.count_nonzero(words.view(np.uint8) == X_ID)
    report.n_lower += int(n_lower)
    report.n_x += int(n_x)
    report.n_rare += int(n_unknown - n_x)
    empty = lengths == 0
    all_x = _all_x(words, lengths) if n_unknown else np.zeros_like(empty)
    short = ~(empty | all_x) & (lengths < min_length)
    dropped = empty | all_x | short
    if dropped.any():
        report.n_empty += int(empty.sum())
        report.n_all_x += int(all_x.sum())
        report.n_short += int(short.sum())
        _, counts = word_spans(lengths)
        words = words[np.repeat(~dropped, counts)]
        lengths = lengths[~dropped]
    return Block(words, lengths, _keys_of_words(words, lengths))


def _remove_final_stops(tokens, lengths, report):
    """Turn a STOP at the end of a protein into PAD, in place -> (words, lengths) without them."""
    letters = np.frombuffer(tokens, np.uint8)
    starts, _ = word_spans(lengths)
    last = 8 * starts + lengths - 1                     # place of the last letter of each
    stopped = (lengths > 0) & (letters[last] == STOP)
    report.n_stops += int(stopped.sum())
    letters[last[stopped]] = PAD
    lengths = lengths - stopped
    only_padding = last[stopped & (lengths % 8 == 0)] // 8
    return np.delete(letters.view("<u8"), only_padding), lengths


def _all_x(words, lengths):
    """Which proteins are X and nothing else: (n,) bool."""
    starts, counts = word_spans(lengths)
    known = np.append(0, np.cumsum((words.view(np.uint8) < X_ID).view("<u8") > 0))
    return (lengths > 0) & (known[starts + counts] == known[starts])


# From files to text: generators of (kind, number of the first line or entry, text), where kind is
# "fasta" (whole records), "line" (a sequence per line) or "entry" (of a .pt file, one per line).

def _texts(source, name, block_bytes):
    if Path(name).suffix.lower() == ".pt":
        sequences = _read_pt(_existing_file(source))
        step = max(1, block_bytes >> 9)
        for first in range(0, len(sequences), step):
            yield "entry", first + 1, b"\n".join(sequences[first:first + step])
        return
    raw = source if hasattr(source, "read") else open(_existing_file(source), "rb", buffering=0)
    with io.BufferedReader(raw, 1 << 18) as file:           # long reads suit a shared disk
        unpacked = _unpacked(name, file)
        size = max(block_bytes, 16)                         # errors quote 16 bytes
        yield from _texts_of_chunks(name, iter(lambda: unpacked.read(size), b""), block_bytes)


def _existing_file(path):
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a FASTA, text or .pt file of "
                                f"proteins. Check the path (relative to {Path.cwd()}).")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; expected a file of sequences. Name the file "
                         f"inside it.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes), or a pipe; expected a file of sequences. Was "
                         f"its download interrupted?")
    return path


def _unpacked(name, file):
    """The file, decompressed if it is gzip. Raises ValueError if only its name says .gz."""
    beginning = file.peek(4)[:4]
    if beginning[:2] == b"\x1f\x8b":
        return gzip.open(file)
    if beginning and Path(name).suffix.lower() == ".gz":
        raise ValueError(f"{name} is not gzip: it begins with {beginning!r}; expected "
                         f"b'\\x1f\\x8b'. Was an error page saved in its place? If it is "
                         f"plain text, remove .gz from its name.")
    return file


def _plain_text(name, chunks):
    """Yield chunks of text in which all line ends are '\\n'.

    Blanks and line ends at the end of a chunk go to the next one: no "\\r\\n" or "\\n>" is split.
    """
    rest = b""
    while len(rest) < 3 and (chunk := next(chunks, b"")):
        rest += chunk
    rest = rest.removeprefix(b"\xef\xbb\xbf")              # the byte order mark of UTF-8
    for chunk in itertools.chain([b""], chunks):
        chunk = rest + chunk
        text = chunk.rstrip()
        rest = chunk[len(text):]
        if len(rest) > LONGEST_RECORD:
            raise ValueError(f"{name} holds more than {LONGEST_RECORD:,} blanks and line ends in "
                             "a row; expected proteins.")
        if b"\0" in text:
            raise ValueError(f"{name} holds a zero byte, so it is binary (packed? UTF-16?) or "
                             f"damaged; expected text, ASCII or UTF-8, or gzip.")
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if text:
            yield text


def _texts_of_chunks(name, chunks, block_bytes):
    """Join a file's chunks into texts of whole records, each of block_bytes or somewhat more."""
    line = 1
    pieces = []
    size = 0
    kind = None
    try:
        for chunk in _plain_text(name, chunks):
            if kind is None:
                kind = _kind_of_text(name, chunk)
                if kind == "fasta":
                    line = 1 + chunk.count(b"\n", 0, chunk.find(b">"))
                    chunk = chunk.lstrip()
            pieces.append(chunk)
            size += len(chunk)
            record_end = b"\n>" if kind == "fasta" else b"\n"
            cut = chunk.rfind(record_end) if size >= block_bytes else -1
            if cut >= 0:
                pieces[-1] = chunk[:cut]
                text = b"".join(pieces)
                yield kind, line, text
                line += int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))) + 1
                pieces = [chunk[cut + 1:]]
                size = len(chunk) - cut - 1
            elif size > LONGEST_RECORD + block_bytes:
                refuse_long_record(name, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name} is truncated or damaged ({error}); expected a whole gzip file. "
                         f"Download or copy it again.") from None
    if not pieces:
        raise ValueError(f"{name} holds only blank lines; expected sequences.")
    yield kind, line, b"".join(pieces)


def _kind_of_text(name, beginning):
    """"fasta" or "line", by the first letter of a text and the ending of its name."""
    first = beginning.lstrip()
    if first[:1] == b">":
        return "fasta"
    if str(name).lower().removesuffix(".gz").endswith((".txt", ".seq")):
        return "line"
    line = 1 + beginning.count(b"\n", 0, len(beginning) - len(first))
    raise ValueError(f"{name}, line {line}: found {first.splitlines()[0][:20]!r}; expected '>', "
                     f"with which FASTA begins. If it has one sequence per line, name it .txt or "
                     f".seq.")


def _as_fasta(kind, text):
    """Text of one sequence per line as FASTA without names; None if a line holds a blank or '>'."""
    if kind == "fasta":
        return text
    if kind == "line" and (b" " in text or b"\t" in text):
        text = re.sub(rb"(?m)^[ \t]+|[ \t]+$", b"", text)
    if b">" in text or b" " in text or b"\t" in text:
        return None
    return HEADER + text.replace(b"\n", b"\n" + HEADER)


def _read_pt(path):
    """The sequences of a .pt file, as bytes that hold no line end and no zero."""
    check_zip(path)
    try:
        entries = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                      # unpickling junk raises nearly any type
        # The first sentence only: torch's next one advises to load the file without weights_only.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path} cannot be loaded: {reason}. Expected a torch file with a list of "
                         f"dicts of plain types, each with 'protein_seq'. Save it so, or give "
                         f"FASTA.") from None
    if not isinstance(entries, list) or not entries:
        found = "an empty list" if entries == [] else type(entries).__name__
        raise ValueError(f"{path} holds {found}; expected a list of dicts with 'protein_seq'.")
    sequences = []
    for number, entry in enumerate(entries, 1):
        sequence = entry.get("protein_seq") if isinstance(entry, dict) else None
        if not isinstance(sequence, str):
            raise ValueError(f"{path}, entry {number}: found {str(entry)[:80]}; expected a dict "
                             f"with the text 'protein_seq'.")
        sequences.append(sequence.encode())
        if re.search(rb"[\n\r\0]", sequences[-1]):
            _refuse_wrong_sequence(path, "entry", number, sequences[-1])
    return sequences


# The slow path: say where the wrong character is, and what it means.

WRONG = {"fasta": rb"[^A-Za-z* \t\n]|\*(?!\s*\Z)",       # a '*' may stand at the end alone
         "line": rb"[^A-Za-z* \t]|\*(?!\s*\Z)|(?<=\S)[ \t]+(?=\S)",
         "entry": rb"[^A-Za-z*]|\*(?!\Z)"}
CHARACTERS_AND_REASONS = (
    (b"*", "a stop inside a sequence. Translate up to the first stop, or remove the record"),
    (b"-.", "a gap, so this is an alignment. Give the sequences without gaps"),
    (b"0123456789", "a digit. Remove numbers from the sequence lines"),
    (b"\v\f", "a form feed or vertical tab, as printed text has. Remove it"),
    (b" \t\n\r", "a blank. Give one sequence per line and nothing else; with names, use FASTA"),
    (b">", "so a line end is missing before it (files joined without one?). Insert it"))


def _refuse_character(name, kind, number, text):
    """Raise ValueError for the first wrong character of a text whose first line has this number."""
    for record in text.split(b"\n>" if kind == "fasta" else b"\n"):
        if kind == "fasta":
            _, _, sequence = record.partition(b"\n")
            _refuse_wrong_sequence(name, kind, number + 1, sequence)
        else:
            _refuse_wrong_sequence(name, kind, number, record)
        number += record.count(b"\n") + 1


def _refuse_wrong_sequence(name, kind, number, sequence):
    """Raise ValueError for a wrong character in a sequence whose first line has this number."""
    wrong = re.search(WRONG[kind], sequence)
    if not wrong:
        return
    before = sequence[:wrong.start()]
    found = wrong.group()[:1]
    unit = "entry" if kind == "entry" else "line"
    number += before.count(b"\n")           # none in an entry, where a line end is itself wrong
    column = len(before) - before.rfind(b"\n")
    reason = "not a letter of a protein sequence. Check that the file is what its name says"
    for characters, why in CHARACTERS_AND_REASONS:
        if found in characters:
            reason = why
            break
    if found == b">" and not before.rpartition(b"\n")[2].strip():
        reason = "a header that is indented. Remove the blanks before it"
    raise ValueError(f"{name}, {unit} {number}, column {column}: found {found!r}, {reason}. "
                     f"Expected the letters {LETTERS} and {RARE}, and at most one '*' at the end.")


# ---- split and crops ----

def split_by_hash(proteins, val_fraction):
    """Indices (train, val): validation gets the proteins with keys in the lowest val_fraction.

    So the split depends on the sequence alone: a protein stays in its part when the file grows or
    is reordered, and exact duplicates are in the same part. Similar proteins may be in different
    parts: where that matters, cluster the file first (UniRef50 is clustered).
    Raises ValueError for a fraction outside (0, 1), and where a side is empty.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"found val_fraction = {val_fraction}; expected more than 0 and less than "
                         f"1, such as 0.05.")
    is_val = proteins.keys < np.uint64(int(val_fraction * 2.0**64))
    train = np.flatnonzero(~is_val)
    val = np.flatnonzero(is_val)
    if not len(train) or not len(val):
        raise ValueError(f"val_fraction = {val_fraction} puts {len(train):,} proteins in training "
                         f"and {len(val):,} in validation; expected some in each. Give more "
                         f"proteins, or a fraction nearer to 0.5.")
    return train, val


def apply_max_length(proteins, max_length, long):
    """The proteins of up to max_length residues if long is "drop"; all if it is "crop".

    Raises ValueError where none is left.
    """
    if long == "crop":
        return proteins
    fits = np.flatnonzero(proteins.lengths <= max_length)
    if not len(fits):
        raise ValueError(f"all {len(proteins):,} proteins are longer than max_length = "
                         f"{max_length:,}, the shortest has {proteins.lengths.min():,}; "
                         f"expected some to keep. Raise max_length, or crop; or raise "
                         f"val_fraction, if these are the proteins for validation.")
    return proteins.subset(fits)


def random_crops(proteins, max_length, seed, epoch):
    """Crop each protein longer than max_length to a random window of this length -> Proteins.

    All windows of a protein are equally likely. The choice depends only on seed, epoch and the
    protein's key.
    """
    places = proteins.lengths - max_length + 1                  # where a window may begin
    starts = [seed_for("crop", seed, epoch, key) % n if n > 1 else 0
              for key, n in zip(proteins.keys.tolist(), places.tolist())]
    return Proteins(proteins.tokens, proteins.offsets + np.array(starts, np.int64),
                    np.minimum(proteins.lengths, max_length), proteins.keys)


def collate(proteins, width=0):
    """Proteins as padded tensors.

    width: L, unless the longest protein is longer: then L is its length.
    Returns x0 (n, L) int64 with X under padding, and mask (n, L) bool, True = a real residue.
    """
    lengths = proteins.lengths
    x0 = np.full((len(proteins), max(width, lengths.max())), X_ID, np.int64)
    mask = np.arange(x0.shape[1]) < lengths[:, None]
    x0[mask] = proteins.compact().tokens
    return torch.from_numpy(x0), torch.from_numpy(mask)


# ---- unigram: what a model that knows only letter frequencies would reach ----

def unigram_frequencies(letter_counts):
    """(count + 1) / (total + 20) of the 20 amino acids, so that none is zero: (20,) float64.

    letter_counts: (21,), see Proteins.letter_counts; X is left out.
    """
    seen = np.asarray(letter_counts, np.float64)[:X_ID] + 1
    return seen / seen.sum()
