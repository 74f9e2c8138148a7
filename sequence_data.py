"""Protein sequences: alphabet, files, split, length-aware batches, a demo source. No model, no process group.

    proteins, report = read_sequences("proteins.fasta.gz")      # print(report): what was read and cleaned
    train, val = split_by_hash(proteins, 0.05)                  # index arrays
    train = proteins.subset(train)
    plan = BatchPlan(train.length_counts(), 512, micro_batches=4, tokens=8192)
    reader = BatchReader(plan, train, sum_rows(train, plan))
    batch, width = reader.micro_batch(step, lane)               # one of 4, on any number of ranks
    x0, mask = collate(batch, range(len(batch)), max_length=512, width=width)

Reads FASTA (.gz or not), text with one sequence per line (.txt or .seq, .gz or not), and .pt files that hold
a list of dicts with `protein_seq`. Writes nothing. read_blocks is the one reader of such files: it cleans
some thousand proteins at a time, so that a file of any size passes through a few MB of memory.

Everything random is keyed by integers (`keyed_seed`), never drawn from a stream that someone else may have
advanced; so what a step sees depends on the seed, the epoch and the step, not on ranks, workers or restarts.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
X_ID = 20                       # unknown residue: an ordinary input, never a target, never sampled
N_TOKENS = 21
LETTERS = AMINO_ACIDS + "X"
RARE = "BZUOJ"                  # Asx, Glx, Sec, Pyl, Leu/Ile: below 2e-6 each in UniRef50, read as X
BAD, STOP, PAD = 253, 254, 255  # marks while a file is read, never tokens; "\r" is free to stand for PAD
TO_TOKEN = bytes(LETTERS.find(c) if c in LETTERS else X_ID if c in RARE else STOP if c == "*" else
                 PAD if c == "\r" else BAD for c in (chr(i).upper() if i < 128 else "?" for i in range(256)))

# Share of each letter of AMINO_ACIDS in UniRef50 (18.8 million residues, EvoDiff's test split).
UNIREF50 = (.086, .014, .055, .061, .039, .069, .022, .055, .051, .096,
            .022, .041, .050, .038, .059, .074, .057, .065, .013, .030)

BLOCK_BYTES = 1 << 20           # text that is cleaned at a time: long against a protein, fits into a cache
ORDER_SEED = 0                  # of the order in which read_sequences gives the proteins of a file
LONGEST = 1 << 24               # residues of a protein that is read; the longest known has 45,000
HEADER = b">" + b" " * 8 + b"\n"   # a header long enough for _split

BUCKET_RATIO = 0.96             # shortest / longest protein of a bucket of lengths: about 2 % padding


# ---- keys ----

def keyed_seed(*parts):
    """Integer in [0, 2**63) made from ints and short strings by blake2b; equal parts give equal seeds."""
    plain = tuple(p if isinstance(p, str) else int(operator.index(p)) for p in parts)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(*parts, device="cpu"):
    """torch.Generator seeded by keyed_seed(*parts)."""
    return torch.Generator(device=device).manual_seed(keyed_seed(*parts))


def _random_words(shape, *parts):
    # Raw 64-bit words: numpy promises this stream for good, unlike that of permutation() or shuffle().
    return np.random.PCG64(keyed_seed(*parts)).random_raw(shape)


def sequence_keys(tokens, offsets, lengths):
    """Hash of each protein's letters: (n,) uint64, the same wherever the protein stands, on every machine.

    tokens: (total,) uint8. offsets, lengths: (n,) int64, as in Proteins. Two of N proteins share a key by
    chance with probability N**2 / 2**65: 1e-4 for 60 million.
    """
    keys = np.empty(len(lengths), np.uint64)
    for piece in _pieces(lengths):
        keys[piece] = _keys_of_words(_padded_words(tokens, offsets[piece], lengths[piece]), lengths[piece])
    return keys


def order_words(keys, seed):
    """Words whose order is a random order of proteins: (n,) uint64, for a seed one to one with their keys."""
    return _avalanche(keys + np.uint64(keyed_seed("order", seed)))


def _avalanche(words):
    # The last step of splitmix64: one to one, and each bit of the result depends on all bits of the word.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _keys_of_words(words, lengths):
    """words: each protein's tokens as whole little-endian words, see Block. -> keys (n,) uint64.

    A polynomial in an odd constant whose coefficients are the mixed words of a protein, modulo 2**64.
    """
    counts = (lengths + 7) // 8
    starts = np.cumsum(counts) - counts
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    # Powers by the place in `words`, and the sums divided by the power at which a protein starts.
    base = 0xDA942042E4DD58B5
    mixed *= _powers(base, len(words).bit_length())[:len(words)]
    keys = lengths.astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    some = counts > 0                               # reduceat has no empty sums
    if some.any():
        begin = starts[some]
        inverse = _powers(pow(base, -1, 1 << 64), len(words).bit_length())
        keys[some] += np.add.reduceat(mixed, begin) * inverse[begin]
    return _avalanche(keys)


@functools.lru_cache(maxsize=2)
def _powers(base, bits):
    """base**0, base**1, ... modulo 2**64: (2**bits,) uint64."""
    factors = np.full(1 << bits, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def _padded_words(tokens, offsets, lengths):
    """The tokens of these proteins as whole little-endian words, each protein filled up with PAD."""
    counts = (lengths + 7) // 8
    padded = np.full(8 * counts.sum(), PAD, np.uint8)
    padded[places(8 * (np.cumsum(counts) - counts), lengths)] = tokens[places(offsets, lengths)]
    return padded.view("<u8")


def places(offsets, lengths):
    """Index of each item of these stretches of an array, one after the other: (lengths.sum(),) int64."""
    return np.repeat(offsets - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _pieces(lengths, residues=1 << 20):
    """Slices of a table, each of about this many residues (or one longer protein), to bound memory."""
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(residues, ends[-1] if len(ends) else 0, residues))
    bounds = np.unique([0, *cuts, len(lengths)]).tolist()
    return [slice(*bound) for bound in zip(bounds, bounds[1:])]


# ---- alphabet and the table of proteins ----

def encode(sequence):
    """str of the 20 letters, X, B, Z, U, O, J (the last five become X) -> uint8 array (L,).

    Raises ValueError for anything else, lower case included: cleaning is for files, see read_sequences.
    """
    wrong = re.search(f"[^{LETTERS}{RARE}]", sequence)
    if wrong:
        raise ValueError(f"found {wrong.group()!r} at position {wrong.start() + 1} of a sequence; expected "
                         f"the letters {LETTERS}{RARE}. Remove gaps, stops and blanks, and write upper case.")
    return np.frombuffer(sequence.encode().translate(TO_TOKEN), np.uint8)


def decode(tokens):
    """Integer array (L,) of ids 0..20 -> str. Raises ValueError for another id, such as a mask."""
    tokens = np.asarray(tokens)
    if tokens.size and (tokens.min() < 0 or tokens.max() > X_ID):
        raise ValueError(f"found token ids {tokens.min()} to {tokens.max()}; expected 0 to {X_ID}. "
                         f"A mask or padding has no letter: denoise or cut before decoding.")
    return "".join(LETTERS[t] for t in tokens.tolist())


class Proteins:
    """A table of proteins over one flat array, which may as well be a memory-mapped file.

    tokens:  (total,) uint8, ids 0..20.
    offsets: (n,) int64, where each protein starts in tokens.
    lengths: (n,) int64, residues.
    keys:    (n,) uint64, sequence_keys of the whole cleaned protein; a crop keeps the key of its protein.
             Computed here if not given.
    Indexing gives one protein as a uint8 view; subset and crop share the tokens.
    """

    def __init__(self, tokens, offsets, lengths, keys=None):
        self.tokens = tokens
        self.offsets = np.asarray(offsets, np.int64)
        self.lengths = np.asarray(lengths, np.int64)
        self.keys = np.asarray(sequence_keys(tokens, self.offsets, self.lengths) if keys is None else keys,
                               np.uint64)
        if not self.offsets.shape == self.lengths.shape == self.keys.shape:
            raise ValueError(f"found offsets {self.offsets.shape}, lengths {self.lengths.shape}, keys "
                             f"{self.keys.shape}; expected one entry of each per protein.")

    @classmethod
    def from_sequences(cls, sequences):
        """Proteins from an iterable of str, or of uint8 arrays of ids."""
        rows = [encode(s) if isinstance(s, str) else np.asarray(s, np.uint8) for s in sequences]
        lengths = np.array([len(r) for r in rows], np.int64)
        tokens = np.concatenate(rows) if rows else np.zeros(0, np.uint8)
        return cls(tokens, np.cumsum(lengths) - lengths, lengths)

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, i):
        start = self.offsets[i]
        return self.tokens[start:start + self.lengths[i]]

    def subset(self, indices):
        """The proteins at these indices, in this order."""
        return Proteins(self.tokens, self.offsets[indices], self.lengths[indices], self.keys[indices])

    def crop(self, starts, max_length):
        """Each protein from its start (n,) on, at most max_length residues of it."""
        lengths = np.minimum(self.lengths - starts, max_length)
        return Proteins(self.tokens, self.offsets + starts, lengths, self.keys)

    def compact(self):
        """These proteins over tokens of their own, one after the other in the order of this table."""
        tokens = np.empty(self.lengths.sum(), np.uint8)
        offsets = np.cumsum(self.lengths) - self.lengths
        for piece in _pieces(self.lengths):
            size = self.lengths[piece].sum()
            begin = offsets[piece][0]
            tokens[begin:begin + size] = self.tokens[places(self.offsets[piece], self.lengths[piece])]
        return Proteins(tokens, offsets, self.lengths, self.keys)

    def unique_order(self, seed):
        """Indices that put the proteins into the order of order_words, each distinct protein once.

        Which one of several equal proteins is taken does not matter; different proteins that share a key
        are all kept.
        """
        words = order_words(self.keys, seed)
        order = np.argsort(words)
        again = np.flatnonzero(words[order[1:]] == words[order[:-1]])
        first, second = order[again], order[again + 1]
        equal = self.lengths[first] == self.lengths[second]
        again, first, second = again[equal], first[equal], second[equal]
        differs = np.zeros(len(again), bool)
        for piece in _pieces(self.lengths[first]):
            sizes = self.lengths[first[piece]]
            same = (self.tokens[places(self.offsets[first[piece]], sizes)]
                    == self.tokens[places(self.offsets[second[piece]], sizes)])
            differs[piece] = np.logical_or.reduceat(~same, np.cumsum(sizes) - sizes)
        return np.delete(order, again[~differs] + 1)

    @classmethod
    def join(cls, parts):
        """The proteins of several tables, one table after the other."""
        if len(parts) == 1:
            return parts[0]
        begins = np.cumsum([0] + [len(p.tokens) for p in parts])
        return cls(np.concatenate([p.tokens for p in parts]),
                   np.concatenate([p.offsets + begin for p, begin in zip(parts, begins)]),
                   np.concatenate([p.lengths for p in parts]), np.concatenate([p.keys for p in parts]))

    def length_counts(self):
        """(lengths that occur, ascending; number of proteins of each), both int64."""
        return np.unique(self.lengths, return_counts=True)

    def letter_counts(self):
        """How often each of the 21 tokens occurs: (21,) int64."""
        counts = np.zeros(N_TOKENS, np.int64)
        for piece in _pieces(self.lengths):
            tokens = self.tokens[places(self.offsets[piece], self.lengths[piece])]
            counts += np.bincount(tokens, minlength=N_TOKENS)
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
    n_rare: int = 0             # letters B, Z, U, O, J read as X
    n_x: int = 0                # letters X in the file
    n_lower: int = 0            # lower-case letters read as upper case
    n_stops: int = 0            # one '*' at the end of a sequence, removed
    n_blanks: int = 0           # blanks and tabs inside FASTA sequences, removed
    n_empty: int = 0            # records without a residue, dropped
    n_all_x: int = 0            # proteins with nothing but X, dropped: nothing to learn from
    n_short: int = 0            # proteins shorter than min_length, dropped
    n_duplicates: int = 0       # proteins equal to another one, dropped: each is kept once

    def __str__(self):
        notes = [(self.n_rare, "letters B/Z/U/O/J read as X"), (self.n_x, "letters X"),
                 (self.n_lower, "lower-case letters read as upper case"),
                 (self.n_stops, "stops '*' at the end removed"), (self.n_blanks, "blanks removed"),
                 (self.n_empty, "empty records dropped"), (self.n_all_x, "proteins of X only dropped"),
                 (self.n_short, "too short dropped"), (self.n_duplicates, "exact duplicates dropped")]
        head = (f"{self.n_proteins:,} proteins, {self.n_residues:,} residues, lengths {self.shortest:,} to "
                f"{self.longest:,} (median {self.median:,})")
        return "; ".join([head] + [f"{n:,} {what}" for n, what in notes if n])


def read_sequences(path, min_length=1, alive=lambda: None, block_bytes=BLOCK_BYTES):
    """Read a file of proteins -> (Proteins, ReadReport).

    What it is follows from name and content: .pt is a torch file with a list of dicts that have
    `protein_seq`; text whose first character is '>' is FASTA; other text is one sequence per line if its name
    ends in .txt or .seq. gzip is recognised by content. Windows line ends and a byte order mark are accepted.

    Cleaned, and counted in the report: B, Z, U, O, J become X; lower case (soft-masked regions) becomes upper
    case; one '*' at the end is removed, and so are blanks inside FASTA sequences; empty records, proteins of
    X only and proteins shorter than min_length are dropped; of equal proteins one is kept.
    The table is in the order of order_words(keys, ORDER_SEED), whatever their order in the file.
    alive: called after each block, so that what watches over a run knows that reading a large file goes on.
    block_bytes: about how much text is cleaned at a time.
    Refused, by ValueError with file and line (or entry): an inner '*', gaps '-' and '.', digits, any other
    character, blanks inside a line of text (a second column?), nucleotides, binary files, other encodings, a
    truncated or damaged .gz, an empty file, a directory. FileNotFoundError for a missing file.
    """
    report, tokens = ReadReport(), bytearray()
    lengths, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for block in read_blocks(path, report, min_length, block_bytes):
        tokens += block.tokens()
        lengths.append(block.lengths)
        keys.append(block.keys)
        alive()
    lengths, keys = np.concatenate(lengths), np.concatenate(keys)
    if not len(lengths):
        refuse_nothing_left(path, report, min_length)
    proteins = Proteins(np.frombuffer(tokens, np.uint8), np.cumsum(lengths) - lengths, lengths, keys)
    order = proteins.unique_order(ORDER_SEED)
    report.n_duplicates = len(proteins) - len(order)
    proteins = proteins.subset(order)
    report.n_proteins, report.n_residues = len(proteins), int(proteins.lengths.sum())
    report.shortest, report.longest = int(proteins.lengths.min()), int(proteins.lengths.max())
    report.median = int(np.median(proteins.lengths))
    alive()
    return proteins, report


@dataclass
class Block:
    """The proteins of one piece of a file, cleaned.

    words:   (number of words,) uint64, little endian: the tokens, each protein filled up with PAD to whole
             words of 8.
    lengths: (n,) int64, residues. keys: (n,) uint64.
    """
    words: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray

    def tokens(self):
        """The tokens as bytes, one protein after the other, without the padding."""
        return self.words.tobytes().translate(None, bytes([PAD]))


def read_blocks(source, report, min_length=1, block_bytes=BLOCK_BYTES, max_records=None):
    """Clean the proteins of a file block by block: what read_sequences says of cleaning and refusals.

    source: path, or an object with read(size) and name, at its beginning.
    report: ReadReport; what is cleaned and dropped is added to it, not the number of proteins.
    max_records: how many records are read, those that are dropped included; None for all.
    Yields Block, in the order of the file, with duplicates. Memory: some 10 blocks, or one long record.
    """
    name = getattr(source, "name", source)
    n_records, n_letters, nucleotides_only = 0, 0, True
    with contextlib.ExitStack() as stack:
        if Path(name).suffix == ".pt":
            parts = _parts_of_pt(_checked(source), block_bytes)
        else:
            stream = source if hasattr(source, "read") else stack.enter_context(open(_checked(source), "rb"))
            chunks = _ahead(_unpacked(name, stream, min(max(block_bytes, 4), 1 << 18)))
            parts = _parts_of_text(name, stack.enter_context(contextlib.closing(chunks)), block_bytes)
        for kind, number, text in parts:
            fasta = _as_fasta(kind, text)
            block = None
            if fasta is not None:
                data, starts, lengths = _split(fasta)
                if max_records is not None and len(lengths) >= max_records - n_records:
                    n = max_records - n_records
                    data, starts, lengths = data[:starts[n] + 8], starts[:n + 1], lengths[:n]
                n_letters += int(lengths.sum())
                nucleotides_only = nucleotides_only and not data.translate(None, b"ACGTUNacgtun* \t\n\0")
                if nucleotides_only and n_letters >= 1_000_000:
                    break
                block = _cleaned(data, starts, lengths, min_length, report)
            if block is None:
                _refuse_character(name, kind, number, text.split(b"\n"))
            yield block
            n_records += len(lengths)
            if n_records == max_records:
                break
    if nucleotides_only and n_letters >= 1000:
        raise ValueError(f"{name}: all {n_letters:,} letters are among ACGTUN, which is nucleotides; "
                         f"expected proteins. Translate them first.")


def refuse_nothing_left(name, report, min_length):
    """Raise ValueError: nothing was left of a file by the cleaning that the report tells of."""
    n_records = report.n_empty + report.n_all_x + report.n_short
    raise ValueError(f"{name}: no protein is left of {n_records:,} records ({report.n_empty:,} empty, "
                     f"{report.n_all_x:,} of X only, {report.n_short:,} shorter than min_length = "
                     f"{min_length}); expected at least one. Check the file, or lower min_length.")


def _checked(path):
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a FASTA, text or .pt file of proteins. "
                                f"Check the path (relative to {Path.cwd()}).")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; expected a file of sequences. Name the file inside it.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); expected sequences. Was its download interrupted?")
    return path


def _split(text):
    """Tell headers from sequences in text of whole FASTA records.

    text: bytes that begin with '>' and hold no zero. Returns
    data:    bytearray, the text with zeros in place of the n headers and of one more behind the end,
    starts:  (n + 1,) where each of these headers stands; each has at least 8 bytes,
    lengths: (n,) characters between a header and the next that are no line ends.
    """
    data = bytearray().join([text, b"\n", HEADER])
    letters = np.frombuffer(data, np.uint8)
    line_ends = np.flatnonzero(letters == ord("\n"))
    first = np.flatnonzero(letters[line_ends[:-1] + 1] == ord(">")) + 1
    first = np.append(0, first)                                 # which line end ends each header
    starts, ends = np.append(0, line_ends[first[1:] - 1] + 1), line_ends[first]
    if (ends - starts)[1:].min() < 8:
        return _split(text.replace(b"\n>", b"\n" + HEADER[:-1]))
    sizes = np.diff(np.stack([starts, ends], axis=1).ravel(), append=len(data))     # header, body, header...
    letters *= np.repeat(np.arange(len(sizes), dtype=np.uint8) % 2, sizes)
    return data, starts, starts[1:] - ends[:-1] - (first[1:] - first[:-1])


def _cleaned(data, starts, lengths, min_length, report):
    """Clean what _split gives -> Block, or None if there is a wrong character."""
    letters = np.frombuffer(data, np.uint8)
    if b" " in data or b"\t" in data:
        blanks = np.flatnonzero((letters == ord(" ")) | (letters == ord("\t")))
        report.n_blanks += len(blanks)
        lengths = lengths - np.bincount(np.searchsorted(starts, blanks) - 1, minlength=len(lengths))
    n_lower = np.count_nonzero(letters >= ord("a"))
    n_x = np.count_nonzero(letters == ord("X")) + (data.count(b"x") if n_lower else 0)
    # Behind each protein, where the next header was, what fills it up to whole words.
    marks = np.frombuffer(b"".join((b"\r" * n).ljust(8, b"\0") for n in range(8)), np.uint8).reshape(8, 8)
    letters[starts[1:, None] + np.arange(8)] = marks[-lengths % 8]
    tokens = data.translate(TO_TOKEN, b"\0\n \t")
    letters = np.frombuffer(tokens, np.uint8)
    words, counts = letters.view("<u8"), (lengths + 7) // 8

    if STOP in tokens:
        some = np.flatnonzero(lengths)
        last = 8 * (np.cumsum(counts) - counts)[some] + lengths[some] - 1
        some, last = some[letters[last] == STOP], last[letters[last] == STOP]
        report.n_stops += len(some)
        letters[last] = PAD
        lengths = lengths.copy()
        lengths[some] -= 1
        words = np.delete(words, last[lengths[some] % 8 == 0] // 8)     # words of PAD only
        counts = (lengths + 7) // 8
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
        words, lengths = words[np.repeat(~dropped, counts)], lengths[~dropped]
    return Block(words, lengths, _keys_of_words(words, lengths))


def _all_x(words, lengths):
    """Which proteins are X and nothing else: (n,) bool. Only those that begin with X are looked through."""
    counts = (lengths + 7) // 8
    result, starts = lengths > 0, np.cumsum(counts) - counts
    tokens = words.view(np.uint8).reshape(-1, 8)
    result[result] = tokens[starts[result], 0] == X_ID
    if result.any():
        known = (tokens[places(starts[result], counts[result])] < X_ID).any(1)
        result[result] = ~np.logical_or.reduceat(known, np.cumsum(counts[result]) - counts[result])
    return result


def _ahead(chunks, depth=4):
    """The items of a generator, made up to `depth` ahead in a thread, which ends with this generator."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        pending = collections.deque(pool.submit(next, chunks, None) for _ in range(depth))
        while (chunk := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, chunks, None))
            yield chunk
    finally:
        pool.shutdown(cancel_futures=True)


def _unpacked(name, stream, size):
    """The bytes of a stream, unpacked if they are gzip, in chunks of at most 4 `size`; the first has 4 bytes.

    Raises ValueError if only the name says gzip, EOFError for truncated and zlib.error for damaged data.
    """
    data = stream.read(size)
    if data[:2] != b"\x1f\x8b":
        if data and Path(name).suffix == ".gz":
            raise ValueError(f"{name} is not gzip: it begins with {data[:4]!r}; expected b'\\x1f\\x8b'. Was "
                             f"an error page saved in its place? If it is plain text, remove .gz from its name.")
        while data:
            yield data
            data = stream.read(4 * size)
        return
    unpacker = zlib.decompressobj(31)
    while data:
        if text := unpacker.decompress(data, 4 * size):
            yield text
        if unpacker.eof:                                        # another member may follow, or zeros
            data = unpacker.unused_data.lstrip(b"\0")
            while not data and (more := stream.read(size)):
                data = more.lstrip(b"\0")
            unpacker = zlib.decompressobj(31) if data else unpacker
        else:
            data = unpacker.unconsumed_tail or stream.read(size)
    if not unpacker.eof:
        raise EOFError("the gzip data ends too early")


def _plain_text(name, chunks):
    """Chunks of text with '\\n' at all line ends and without blanks and line ends at the end of each chunk.

    What is taken off comes with the next chunk, so that no line end and no "\\n>" is ever cut in two.
    """
    held = b""
    while len(held) < 4 and (chunk := next(chunks, b"")):
        held += chunk
    if held[:4] in (b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zX") or held[:3] == b"BZh":
        raise ValueError(f"{name} begins with {held[:4]!r}, as zip, zstd, xz, bzip2 and torch files do; "
                         f"expected text or gzip. Unpack it first; a torch file needs .pt in its name.")
    if held[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{name}, line 1: found UTF-16 text; expected ASCII or UTF-8. Save it again as "
                         "UTF-8.")
    held = held.removeprefix(b"\xef\xbb\xbf")
    for chunk in itertools.chain([b""], chunks):
        chunk = held + chunk
        text = chunk.rstrip()
        held = chunk[len(text):]
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if text:
            yield text


def _parts_of_text(name, chunks, block_bytes):
    """Cut text at records -> ("fasta" or "line", number of its first line, whole records of text)."""
    line, parts, size, kind = 1, [], 0, None
    try:
        for chunk in _plain_text(name, chunks):
            if b"\0" in chunk:
                line += b"".join(parts).count(b"\n") + chunk.count(b"\n", 0, chunk.find(b"\0"))
                raise ValueError(f"{name}, line {line}: found a zero byte, so the file is binary or damaged; "
                                 "expected text.")
            if kind is None:
                kind = _kind_of_text(name, chunk)
                if kind == "fasta":
                    line, chunk = 1 + chunk.count(b"\n", 0, chunk.find(b">")), chunk.lstrip()
            parts.append(chunk)
            size += len(chunk)
            if size > 2 * max(LONGEST, block_bytes):
                raise ValueError(f"{name}, line {line}: found a record of more than {size:,} characters; "
                                 f"expected a protein, of at most {LONGEST:,}. Is this a genome?")
            cut = chunk.rfind(b"\n>" if kind == "fasta" else b"\n") if size >= block_bytes else -1
            if cut >= 0:
                parts[-1] = chunk[:cut]
                text = b"".join(parts)
                yield kind, line, text
                line += int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))) + 1
                parts, size = [chunk[cut + 1:]], len(chunk) - cut - 1
    except (EOFError, zlib.error) as error:
        line += b"".join(parts).count(b"\n")
        what = "is truncated" if isinstance(error, EOFError) else f"is damaged ({error})"
        raise ValueError(f"{name} {what}: its gzip data can be read up to line {line}; expected a whole "
                         f"file. Download or copy it again.") from None
    if not parts:
        raise ValueError(f"{name} holds only blank lines; expected sequences.")
    yield kind, line, b"".join(parts)


def _kind_of_text(name, beginning):
    """"fasta" or "line", by the first letter of a text and by its name."""
    first = beginning.lstrip()
    if first[:1] == b">":
        return "fasta"
    if Path(Path(name).name.removesuffix(".gz")).suffix in (".txt", ".seq"):
        return "line"
    line = 1 + beginning.count(b"\n", 0, len(beginning) - len(first))
    raise ValueError(f"{name}, line {line}: found {first.splitlines()[0][:20]!r}; expected '>', with which "
                     f"FASTA begins. If it has one sequence per line, name it .txt or .seq.")


def _as_fasta(kind, text):
    """Text of one sequence per line as FASTA without names; None if a line holds a blank or a '>'."""
    if kind == "fasta":
        return text
    if kind == "line" and (b" " in text or b"\t" in text):
        text = re.sub(rb"(?m)^[ \t]+|[ \t]+$", b"", text)
    if b">" in text or b" " in text or b"\t" in text:
        return None
    return HEADER + text.replace(b"\n", b"\n" + HEADER)


def _parts_of_pt(path, block_bytes):
    """The same from a .pt file -> ("entry", number of the first one, one sequence per line)."""
    bodies, step = _read_pt(path), max(1, block_bytes >> 9)
    for first in range(0, len(bodies), step):
        for number, body in enumerate(bodies[first:first + step], first + 1):
            if re.search(rb"[\n\r\0]", body):
                _refuse_character(path, "entry", number, [body])
        yield "entry", first + 1, b"\n".join(bodies[first:first + step])


def _read_pt(path):
    try:
        entries = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                      # unpickling junk raises nearly any type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be loaded: {reason}. Expected a torch file with a list of dicts of "
                         f"plain types, each with 'protein_seq'. Save it so, or give FASTA.") from None
    if not isinstance(entries, list) or not entries:
        found = "an empty list" if entries == [] else type(entries).__name__
        raise ValueError(f"{path} holds {found}; expected a list of dicts with 'protein_seq'.")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            found = type(entry).__name__
        elif "protein_seq" not in entry:
            found = f"a dict with the keys {sorted(map(str, entry))[:8]}"
        elif not isinstance(entry["protein_seq"], str):
            found = f"protein_seq of type {type(entry['protein_seq']).__name__}"
        else:
            continue
        raise ValueError(f"{path}, entry {number}: found {found}; expected a dict with the text "
                         "'protein_seq'.")
    return [entry["protein_seq"].encode() for entry in entries]


def _refuse_character(name, kind, number, lines):
    """Raise ValueError for the first character that cannot be read, saying where it is. The slow path.

    kind: "fasta", "line" or "entry"; number: of the first of these lines (or entries).
    """
    is_fasta, column, found, star = kind == "fasta", 0, b"*", None
    wrong = re.compile(rb"[^A-Za-z* \t]|\*(?=.)" if is_fasta else rb"[^A-Za-z*]|\*(?=.)", re.DOTALL)
    for number, line in enumerate(lines, number):
        if is_fasta and line[:1] == b">":
            star = None
            continue
        stripped = line if kind == "entry" else line.rstrip(b" \t")
        if star and stripped:                       # the sequence goes on after a line that ended in '*'
            number, column, found = *star, b"*"
            break
        bad = wrong.search(stripped, len(line) - len(line.lstrip(b" \t")) if kind == "line" else 0)
        if bad:
            column, found = bad.start() + 1, bad.group()
            break
        star = (number, len(stripped)) if is_fasta and stripped[-1:] == b"*" else star if is_fasta else None
    place = "entry" if kind == "entry" else "line"
    why = ("a stop inside a sequence. Translate up to the first stop, or remove the "
           "record" if found == b"*" else
           "a gap, so this is an alignment. Give the sequences without gaps" if found in b"-." else
           "a digit. Remove numbers from the sequence lines" if found.isdigit() else
           "a blank. Give one sequence per line and nothing else; with names, use "
           "FASTA" if found.isspace() else
           "so a line end is missing before it (files joined without one?). Insert it" if found == b">" else
           "not a letter of a protein sequence. Check that the file is what its name says")
    raise ValueError(f"{name}, {place} {number}, column {column}: found {found!r}, {why}. Expected the "
                     f"letters {LETTERS} and {RARE}, and at most one '*' at the end.")


# ---- split and crops ----

def split_by_hash(proteins, val_fraction):
    """Indices (train, val): a protein is in validation if its key is in the lowest val_fraction of all keys.

    So the side depends on the sequence alone: it stays when the file grows or is reordered, and exact
    duplicates share it. Similar proteins may still be on both sides: where that matters, cluster the file
    first (UniRef50 is). Raises ValueError for a fraction outside (0, 1), and where a side is empty.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"found val_fraction = {val_fraction}; expected more than 0 and less than 1, such "
                         "as 0.05.")
    is_val = proteins.keys < np.uint64(int(val_fraction * 2.0**64))
    train, val = np.flatnonzero(~is_val), np.flatnonzero(is_val)
    if not len(train) or not len(val):
        raise ValueError(f"val_fraction = {val_fraction} puts {len(train):,} proteins in training and "
                         f"{len(val):,} in validation; expected some in each. Give more proteins, or a "
                         "fraction nearer to 0.5.")
    return train, val


def apply_max_length(proteins, max_length, long="crop"):
    """-> (proteins kept, their lengths after cropping (n,), number of proteins that were too long).

    long: "crop" keeps a window of max_length residues (see crop_starts), "drop" leaves the protein out.
    """
    if max_length < 1 or long not in ("crop", "drop"):
        raise ValueError(f"found max_length = {max_length}, long = {long!r}; expected at least 1, and crop "
                         "or drop.")
    too_long = proteins.lengths > max_length
    if long == "drop" and too_long.any():
        if too_long.all():
            raise ValueError(f"all {len(proteins):,} proteins are longer than max_length = {max_length:,}, "
                             f"the shortest has {proteins.lengths.min():,}; expected some to keep. Raise "
                             "max_length, or crop.")
        proteins = proteins.subset(np.flatnonzero(~too_long))
    return proteins, np.minimum(proteins.lengths, max_length), int(too_long.sum())


def crop_start(seed, epoch, key, length, max_length):
    """First residue of the window of this protein in this epoch: uniform over all windows; 0 if it fits."""
    return keyed_seed("crop", seed, epoch, key) % (length - max_length + 1) if length > max_length else 0


def crop_starts(proteins, indices, max_length, seed, epoch):
    """crop_start of each of these proteins: (len(indices),) int64."""
    rows = zip(proteins.keys[indices].tolist(), proteins.lengths[indices].tolist())
    return np.array([crop_start(seed, epoch, key, length, max_length) for key, length in rows], np.int64)


def eval_crop_starts(proteins, indices, max_length):
    """Windows for validation, keyed by the protein alone: the same in every run, so that values compare."""
    return crop_starts(proteins, indices, max_length, seed="validation", epoch=0)


# ---- prepared folders ----

FORMAT, VERSION = "prepared proteins", 1
SETS = ("train", "val")
PARTS = {"tokens.bin": np.dtype("u1"), "lengths.bin": np.dtype("<u4"), "keys.bin": np.dtype("<u8")}


REMAKE = "Remove it, then copy or prepare it again."


def read_meta(folder):
    """The dict in meta.json of a folder made by prepare_uniref50.py, whose head describes the format.

    Raises FileNotFoundError where it is missing, and ValueError for another format or version.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder made by prepare_uniref50.py. "
                                f"If {folder} holds sequence files: python prepare_uniref50.py "
                                f"NEW_FOLDER --fasta FILES. If it is a copy, copy it again.")
    try:
        meta = json.loads(path.read_text())
        found = meta["format"], meta["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} cannot be read; expected the JSON of prepare_uniref50.py. "
                         f"{REMAKE}") from None
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {found[0]!r}, version {found[1]}; expected {FORMAT!r}, "
                         f"version {VERSION}. Prepare the data again with this prepare_uniref50.py.")
    return meta


def check_prepared(folder, val_fraction=None, min_length=None):
    """Refuse a prepared folder that is not whole, or was prepared with other settings than these.

    Only names and sizes are looked at: the content is checked by its keys when it is read. Done by one rank.
    Raises ValueError naming what differs.
    """
    meta, differs = read_meta(folder), []
    for name in SETS:
        for part in PARTS:
            path, expected = Path(folder) / name / part, meta["sets"][name]["files"][part]["bytes"]
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                differs.append(f"{name}/{part} is missing" if found is None else
                               f"{name}/{part} has {found:,} bytes (expected {expected:,})")
    if differs:
        raise ValueError(f"{folder} is not whole: {'; '.join(differs)}. Is it half copied? {REMAKE}")
    for key, value in (("val_fraction", val_fraction), ("min_length", min_length)):
        if value is not None and meta[key] != value:
            raise ValueError(f"data.{key} is {value}, but {folder} was prepared with {meta[key]}; expected "
                             f"the same. Set data.{key}={meta[key]}, or prepare again with --{key} {value}.")


def keys_hash(keys):
    """Text that two sets of proteins in the same order share: blake2b (8 bytes) of their keys."""
    return hashlib.blake2b(keys.astype("<u8").tobytes(), digest_size=8).hexdigest()


class PreparedProteins:
    """One set of a prepared folder, read piece by piece, with the names of Proteins that a BatchPlan needs.

    len(): number of proteins. length_counts() and letter_counts(): see Proteins.
    bytes_read: how many bytes were read so far.
    """

    def __init__(self, folder, name="train"):
        self.folder, self.name, self.meta = Path(folder), name, read_meta(folder)["sets"][name]
        self.bytes_read = 0
        self.files = {part: open(self.folder / name / part, "rb", buffering=0) for part in PARTS}
        self.state = self._state()

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
        """Proteins first to last - 1, of which the first begins at residue `token` of the set -> Proteins.

        Raises OSError where a file changed since it was opened, and where the tokens do not give the keys.
        """
        lengths = self.lengths_of(first, last)
        tokens = self._read("tokens.bin", token, token + int(lengths.sum()))
        proteins = Proteins(tokens, np.cumsum(lengths) - lengths, lengths)      # with keys of these tokens
        bad = np.flatnonzero(proteins.keys != self._read("keys.bin", first, last))
        if len(bad) or self.state != self._state():
            what = (f"tokens.bin, lengths.bin or keys.bin is wrong at or before protein {first + bad[0]:,}"
                    if len(bad) else "a file has changed")
            raise OSError(f"{self.folder / self.name} is damaged or was changed under the run: {what}; "
                          f"expected what prepare_uniref50.py wrote. {REMAKE}")
        return proteins

    def read_all(self):
        """The whole set as Proteins in memory."""
        return self.read(0, len(self), 0)

    def _read(self, part, first, last):
        kind = PARTS[part]
        start, left, pieces = first * kind.itemsize, (last - first) * kind.itemsize, []
        while left and (piece := os.pread(self.files[part].fileno(), left, start)):
            pieces.append(piece)
            start, left = start + len(piece), left - len(piece)
            self.bytes_read += len(piece)
        if left:
            raise OSError(f"{self.folder / self.name / part} ends {left:,} bytes too early; expected the "
                          f"size that it had when it was checked. {REMAKE}")
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), kind)

    def _state(self):
        return [(s.st_size, s.st_mtime_ns) for s in (os.fstat(f.fileno()) for f in self.files.values())]


def stage_prepared(folder, target, report):
    """Copy a prepared folder to `target`, which must not exist, and check every file by its checksum.

    report(bytes done, bytes in all) is called now and then. If it fails, the copy is removed.
    Raises ValueError where there is no room, OSError where a checksum differs or the disk fails.
    """
    folder, target, meta = Path(folder), Path(target), read_meta(folder)
    files = {f"{name}/{part}": meta["sets"][name]["files"][part] for name in SETS for part in PARTS}
    total, done = sum(expected["bytes"] for expected in files.values()), 0
    target.mkdir(parents=True)
    try:
        free = shutil.disk_usage(target).free
        if free < total * 1.01:
            raise ValueError(f"{target.parent} has {free / 1e9:,.1f} GB free; expected "
                             f"{total / 1e9:,.1f} GB for a copy of {folder}. Name another folder, or "
                             f"train without --stage.")
        for name, expected in files.items():
            (target / name).parent.mkdir(exist_ok=True)
            digest = hashlib.blake2b(digest_size=16)
            with open(folder / name, "rb") as source, open(target / name, "wb") as copy:
                while piece := source.read(16 << 20):
                    copy.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    report(done, total)
            if digest.hexdigest() != expected["blake2b"]:
                raise OSError(f"{folder / name} does not have its checksum; expected "
                              f"{expected['blake2b']}. {REMAKE}")
        shutil.copy(folder / "meta.json", target / "meta.json")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


# ---- batches ----

ROW = 256                       # proteins per row of the table of sums
WINDOW_BYTES = 64 << 20         # residues of all lanes in a window, where that gives each lane enough
READ_BYTES = 256 << 10          # least residues that a lane reads in one piece
WINDOW_STEPS = 256              # least global batches in a window: 16 proteins each fill the buckets of a unit
EQUAL_WORK = 0.97               # a shape is used if it holds at least this share of the work of a micro-batch
WIDEST_STEP = 0.80              # unless the next such shape is shorter than this share of the one before
# Micro-batches that a unit fills beyond its share of all, as they run on from bucket to bucket (measured).
TAIL_BATCHES = 2.2
MEAN_WITHIN = 0.02              # how near the mean of batch_size or tokens is to what was asked for


class BatchPlan:
    """Which proteins are in which micro-batch of which step, found without reading or sorting them all.

    The work of a protein is what its residues and its attention cost: length x (6 x hidden_size +
    length), of the cropped length, as integers. The set is cut, in its own order (random, but the
    same always), into units of equal work. An epoch shifts the cuts by a random distance and deals
    the units in random order: one to each of `micro_batches` lanes in each of `windows` windows. A
    lane shuffles the proteins of its unit inside buckets of nearly equal length and cuts them,
    longest first, into micro-batches of equal work. In a window each step takes one micro-batch
    from every lane, evenly spaced from long to short. Lanes belong to the global batch, not to
    ranks: any number of ranks trains on the same batches, and a rank reads the units of its own
    lanes, each in one piece.

    length_counts: (lengths, counts), int64, of the proteins in the set, see Proteins.length_counts.
    max_length, long: longer proteins are cropped to max_length residues, or left out (long="drop").
    micro_batches: micro-batches per global batch = ranks x accumulation.
    batch_size: mean number of proteins in a micro-batch; or
    tokens: mean number of computed positions in a micro-batch, padding included. Exactly one of the two.
    hidden_size: width of the model, which says how much attention costs beside the rest.

    steps_per_epoch, windows, window_steps: as the names say, the same in all epochs.
    tops, sizes: shapes of micro-batches: up to sizes[b] proteins, padded to tops[b] residues.
    filled: mean work of a micro-batch as a share of that of the fullest, for which a step waits.
    work, work_of: work of a full micro-batch; of a protein by its length in the file, (longest + 1,) int64.
    totals: [work, residues as in the file] of the set.
    proteins, residues: in the set, of the cropped proteins. left_out: about which share of them an epoch leaves out.
    Raises ValueError for a budget that cannot hold the longest protein, and for less than a global batch.
    """

    def __init__(self, length_counts, max_length, micro_batches, batch_size=None, tokens=None, long="crop",
                 hidden_size=768, seed=0):
        budgets = [budget for budget in (tokens, batch_size) if budget is not None]
        if len(budgets) != 1 or budgets[0] < 1 or micro_batches < 1:
            raise ValueError(f"found tokens = {tokens}, batch_size = {batch_size}, micro_batches = "
                             f"{micro_batches}; expected one of tokens and batch_size, and at least 1 of each.")
        self.seed, self.micro_batches, self.max_length, self.long = seed, micro_batches, max_length, long
        in_file, counts = (np.asarray(x, np.int64) for x in length_counts)
        if not len(in_file) or in_file.min() < 1:
            raise ValueError(f"found {counts.sum():,} proteins, the shortest of {in_file.min(initial=0)} residues; "
                             f"expected some, of at least 1.")
        taken = in_file <= max_length if long == "drop" else np.ones(len(in_file), bool)
        if not taken.any():
            raise ValueError(f"all {counts.sum():,} proteins are longer than max_length = {max_length:,}, the "
                             f"shortest has {in_file.min():,}; expected some to keep. Raise max_length, or crop.")
        lengths = np.arange(in_file.max() + 1)
        cropped = np.where((long == "drop") & (lengths > max_length), 0, np.minimum(lengths, max_length))
        self.work_of = cropped * (6 * hidden_size + cropped)
        self.totals = [int((self.work_of[in_file] * counts).sum()), int((in_file * counts).sum())]
        self.counts = np.bincount(cropped[in_file[taken]], counts[taken]).astype(np.int64)   # by cropped length
        self.n_long = int(counts[in_file > max_length].sum())
        self.proteins = int(counts[taken].sum())
        self.residues = int((self.counts * np.arange(len(self.counts))).sum())
        self._choose_shapes(budgets[0], tokens is not None)

        bytes_each = (in_file * counts).sum() / self.expected        # in the file, per micro-batch
        fewest_steps = max(WINDOW_STEPS, READ_BYTES / bytes_each, WINDOW_BYTES / (bytes_each * micro_batches))
        self.windows = max(1, int(self.expected / micro_batches / fewest_steps))
        per_unit = self.expected / micro_batches / self.windows
        per_unit += min(TAIL_BATCHES, per_unit / 8)
        self.window_steps = int(per_unit)
        self.steps_per_epoch = self.windows * self.window_steps
        if self.steps_per_epoch == 0:
            self._refuse_too_few(tokens, batch_size)
        self.left_out = 1 - self.window_steps / per_unit
        self._shuffles = {}

    def _choose_shapes(self, asked, by_tokens):
        """Find the work of a micro-batch whose mean is what was asked for, and the shapes that hold this work."""
        top = len(self.counts) - 1
        work = self.work_of[:top + 1]                                   # of cropped lengths
        at_least = np.append(np.cumsum(self.counts[::-1])[::-1], 0)     # proteins of this length or longer

        def shapes(budget):
            """(tops, sizes, expected number of micro-batches, mean of what was asked for, share of work filled)"""
            number = budget // np.maximum(work, 1)
            good = np.flatnonzero(number * work >= EQUAL_WORK * budget)
            # The length below each: the shortest good one within the ratio, or else the nearest good one.
            every = np.arange(top + 1)
            below, near, far = (np.searchsorted(good, every * share) for share in (1, BUCKET_RATIO, WIDEST_STEP))
            step = np.minimum((every * BUCKET_RATIO).astype(np.int64), every - 1)
            if len(good):
                step = np.where(far < below, good[np.where(near < below, near, below - 1) % len(good)], step)
            tops, step = [top], step.tolist()
            while tops[-1] > 1:
                tops.append(step[tops[-1]])
            tops = np.array(tops)
            members = at_least[np.append(tops[1:], 0) + 1] - at_least[tops + 1]
            tops, members = tops[members > 0], members[members > 0]
            sizes = np.maximum(number[tops], 1)
            filled = members / sizes
            mean = (filled * sizes * tops).sum() / filled.sum() if by_tokens else self.proteins / filled.sum()
            return tops, sizes, filled.sum(), mean, (filled * sizes * work[tops]).sum() / filled.sum() / budget

        least = int(work[top])                                          # one protein is the least that fits
        self.least = math.ceil(shapes(least)[3] * 0.99)
        if asked < self.least:
            name = "tokens_per_batch" if by_tokens else "batch_size"
            raise ValueError(f"{name} {asked:,} is less work per micro-batch than the longest protein "
                             f"alone, of {top:,} residues; expected at least {self.least:,}. Raise "
                             f"training.{name}, or lower data.max_length.")
        budget = least
        for _ in range(20):                                             # near the mean, then the best filled
            budget = max(int(budget * asked / shapes(budget)[3]), least)
        tried = [(b, *shapes(b)) for b in (max(int(budget * x), least) for x in np.linspace(0.85, 1.15, 61))]
        error = lambda found: abs(found[4] / asked - 1)
        close = [found for found in tried if error(found) <= MEAN_WITHIN] or [min(tried, key=error)]
        best = max(close, key=lambda found: found[5])
        self.work, self.tops, self.sizes, self.expected, self.mean, self.filled = best
        self.bucket_of = np.searchsorted(-self.tops, -np.arange(top + 1), side="right") - 1

    def _refuse_too_few(self, tokens, batch_size):
        fills, asked = int(self.expected), tokens or batch_size
        name = "tokens" if tokens else "proteins"
        smaller = int(0.97 * asked * self.expected / self.micro_batches)
        advice = [f"at most {fills:,} micro-batches per step (ranks x accumulation)"] if fills else []
        if smaller >= self.least:
            advice.append(f"at most {smaller:,} {name} per micro-batch")
        raise ValueError(f"{self.proteins:,} proteins fill {fills:,} micro-batches of {asked:,} {name}; one global "
                         f"batch needs {self.micro_batches:,}. Give {', or '.join(advice) or 'more proteins'}.")

    def identity(self):
        """Text that only plans of the same batches share."""
        plan = [self.work, self.windows, self.window_steps, self.tops.tolist(), self.sizes.tolist()]
        return hashlib.blake2b(json.dumps(plan).encode(), digest_size=8).hexdigest()

    def place(self, step):
        """(epoch, window of the epoch, step of the window) of a step of the run."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return (epoch, *divmod(at, self.window_steps))

    def turn(self, step, lane):
        """Which micro-batch of its unit, counted from the longest proteins, a lane gives to a step."""
        epoch, window, at = self.place(step)
        turns = self._shuffle_once("turns", self.window_steps, epoch, window)
        return int(turns[at] + lane * self.window_steps // self.micro_batches) % self.window_steps

    def unit(self, epoch, window, lane, total):
        """Work before the unit of a lane and after it, of the `total` work of the set; it may end beyond the total,
        and then goes on at the beginning."""
        units = self.windows * self.micro_batches
        unit = int(self._shuffle_once("units", units, epoch)[window * self.micro_batches + lane])
        shift = keyed_seed("shift", self.seed, epoch) % total
        first = unit * total // units + shift
        last = (unit + 1) * total // units + shift
        return (first - total, last - total) if first >= total else (first, last)

    def _shuffle_once(self, what, n, *key):
        if self._shuffles.get(what, (None,))[0] != key:     # the last of each kind is kept
            self._shuffles[what] = key, _shuffled(n, what, self.seed, *key)
        return self._shuffles[what][1]

    def cut(self, lengths, *key):
        """Cut the proteins of a unit into `window_steps` micro-batches: list of (indices, width to pad to), longest
        first. lengths: (n,) in the file. Proteins left over are left out at random; what lacks is split off."""
        cropped = np.minimum(lengths, self.max_length)
        taken = np.flatnonzero(self.work_of[lengths])
        bucket = self.bucket_of[cropped[taken]]
        # One sort for both: the bucket in the high bits, a random word below it.
        words = _random_words(len(taken), "company", self.seed, *key) >> np.uint64(16)
        order = np.argsort((bucket.astype(np.uint64) << np.uint64(48)) | words, kind="stable")
        starts = _cut(np.bincount(bucket, minlength=len(self.tops)), self.sizes.tolist())
        batches = [(taken[part], int(self.tops[bucket[part[0]]]))
                   for part in np.split(order, starts[1:]) if len(part)]
        if len(batches) > self.window_steps:
            keep = np.sort(_shuffled(len(batches), "left out", self.seed, *key)[:self.window_steps])
            return [batches[k] for k in keep]
        while len(batches) < self.window_steps:
            most = max(range(len(batches)), key=lambda k: len(batches[k][0]), default=None)
            if most is None or len(batches[most][0]) < 2:
                batches.append((np.zeros(0, np.int64), 1))              # of a set of a few proteins
            else:
                indices, width = batches[most]
                batches[most:most + 1] = [(indices[::2], width), (indices[1::2], width)]
        return batches


def count_rows(n):
    """Number of sums that sum_rows gives for n proteins."""
    return -(-n // ROW) + 1


def sum_rows(proteins, plan):
    """Work and residues before each row of ROW proteins, and before the end: (2, rows + 1) int64.

    proteins: Proteins or PreparedProteins, the set that the plan was made for. One pass over the lengths.
    Raises OSError where these are not the lengths that the plan was made for.
    """
    n = len(proteins)
    sums = np.zeros((2, count_rows(n)), np.int64)
    for first in range(0, n, ROW << 12):
        lengths = proteins.lengths_of(first, min(first + (ROW << 12), n))
        starts = np.arange(0, len(lengths), ROW)
        here = slice(first // ROW + 1, first // ROW + 1 + len(starts))
        known = np.minimum(lengths, len(plan.work_of) - 1)          # a damaged file may hold anything
        sums[0, here] = np.add.reduceat(plan.work_of[known], starts)
        sums[1, here] = np.add.reduceat(lengths, starts)
    sums = np.cumsum(sums, axis=1)
    if sums[:, -1].tolist() != plan.totals:
        raise OSError(f"the lengths of {n:,} proteins add up to {sums[1, -1]:,} residues; expected "
                      f"{plan.totals[1]:,}, as meta.json says: lengths.bin of the data is damaged. {REMAKE}")
    return sums


class BatchReader:
    """Reads the micro-batches of a BatchPlan: a unit at a time, for the lanes that it is asked for.

    proteins: Proteins or PreparedProteins, the set that the plan was made for.
    rows: sum_rows(proteins, plan).
    """

    def __init__(self, plan, proteins, rows):
        self.plan, self.proteins, self.rows = plan, proteins, rows
        self.units = {}                                     # lane: ((epoch, window), proteins, micro-batches)

    def micro_batch(self, step, lane):
        """(Proteins, width): what a lane gives to a step of the run, and the length to pad it to.

        Where a lane of a set of a few proteins has nothing left it is one X, which does not count.
        """
        epoch, window, _ = self.plan.place(step)
        if lane not in self.units or self.units[lane][0] != (epoch, window):
            self.units.pop(lane, None)                      # never two units of a lane in memory
            self.units[lane] = (epoch, window), *self._read_unit(epoch, window, lane)
        _, proteins, batches = self.units[lane]
        indices, width = batches[self.plan.turn(step, lane)]
        if not len(indices):
            return Proteins.from_sequences(["X"]), 1
        return proteins.subset(indices).compact(), width

    def _read_unit(self, epoch, window, lane):
        total = int(self.rows[0, -1])
        first, last = self.plan.unit(epoch, window, lane, total)
        spans = [(first, last)] if last <= total else [(first, total), (0, last - total)]
        parts = []
        for first, last in spans:
            (begin, token), (end, _) = self._locate(first), self._locate(last)
            parts.append(self.proteins.read(begin, end, token))
        proteins = Proteins.join(parts)
        return proteins, self.plan.cut(proteins.lengths, epoch, window, lane)

    def _locate(self, work):
        """(index, first residue) of the first protein before which there is this work."""
        row = min(int(np.searchsorted(self.rows[0], work, "right")), self.rows.shape[1] - 1) - 1
        lengths = self.proteins.lengths_of(row * ROW, min((row + 1) * ROW, len(self.proteins)))
        before = np.cumsum(np.append(self.rows[0, row], self.plan.work_of[lengths]))
        k = int(np.searchsorted(before, work))
        return row * ROW + k, int(self.rows[1, row] + lengths[:k].sum())


def _shuffled(n, *parts):
    return np.argsort(_random_words(n, *parts), kind="stable")


def _cut(counts, sizes):
    """Cut a row of buckets into pieces -> where each piece starts.

    A piece that starts in bucket b has sizes[b] items, and runs on into the next buckets if b ends; the last
    piece has what is left.
    """
    starts, position = [np.zeros(0, np.int64)], 0
    for end, size in zip(np.cumsum(counts).tolist(), sizes):
        if position < end:
            starts.append(np.arange(position, end, size))
            position = int(starts[-1][-1]) + size
    return np.concatenate(starts)


def eval_batches(lengths, tokens):
    """Batches for evaluation: list of int64 index arrays, each protein in exactly one, longest first.

    lengths: (n,) after cropping. tokens: budget of a batch in computed positions. Independent of ranks: rank
    r of R takes batches r, r + R, and so on. Raises ValueError for a protein longer than the budget.
    """
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths) or lengths.min() < 1 or tokens < lengths.max():
        raise ValueError(f"found {len(lengths):,} proteins, lengths {lengths.min(initial=1 << 40):,} to "
                         f"{lengths.max(initial=0):,}, and a budget of {tokens:,} tokens; expected some "
                         f"proteins of at least 1 residue, and a budget that holds the longest.")
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths, return_counts=True)
    return np.split(order, _cut(counts, (tokens // -distinct).tolist())[1:])


def collate(proteins, indices, starts=None, max_length=None, width=0):
    """-> x0 (B, L) int64 with X under padding, and mask (B, L) bool, True = a real residue.

    starts: (B,) first residue of each (default 0); at most max_length residues are taken of each.
    width: least L; otherwise L is that of the longest.
    """
    starts = np.zeros(len(indices), np.int64) if starts is None else np.asarray(starts, np.int64)
    if len(starts) != len(indices) or (starts < 0).any() or (starts >= proteins.lengths[indices]).any():
        raise ValueError(f"found crop starts {starts[:8].tolist()} for proteins of "
                         f"{proteins.lengths[indices][:8].tolist()} residues; expected one inside each.")
    sizes = proteins.lengths[indices] - starts
    sizes = sizes if max_length is None else np.minimum(sizes, max_length)
    x0 = np.full((len(sizes), max(width, sizes.max())), X_ID, np.int64)
    for row, begin, size in zip(x0, (proteins.offsets[indices] + starts).tolist(), sizes.tolist()):
        row[:size] = proteins.tokens[begin:begin + size]
    return torch.from_numpy(x0), torch.from_numpy(np.arange(x0.shape[1]) < sizes[:, None])


# ---- unigram: what a model that knows only letter frequencies would reach ----

def unigram_frequencies(letter_counts):
    """(count + 1) / (total + 20) of the 20 amino acids, so that one never seen has some: (20,) float64.

    letter_counts: (21,), see Proteins.letter_counts; X is left out.
    """
    seen = np.asarray(letter_counts, np.float64)[:X_ID] + 1
    return seen / seen.sum()


# ---- demo source ----

class DemoSource:
    """Proteins of known likelihood: a second-order Markov source with the letter frequencies of UniRef50.

    P(c | a, b), for residue c after a, b, is proportional to
        exp(bias[c] + 2 same[b, c] + same[a, c] + u1[b, c] + 0.7 u2[a, c]),
    where same is 1 if both residues are of one class (which favour helix, strand or turn) and else 0, and
    u1, u2 are uniform in [-1, 1], drawn once from the seed. Two motifs override this: after "GK" comes S or
    T with probability 0.9 (the end of a P-loop), and two places after another N comes S or T with probability
    0.6 (the glycosylation site N-x-[ST]). bias is fitted so that the stationary letter frequencies are
    UniRef50's. The first two residues have the stationary distribution of pairs, so a window has the law of a
    protein of its length; lengths are uniform over 40 to 120. There is no other state: the likelihood of a
    protein given its length is the product of these probabilities.
    With seed 0: 2.064 nats per residue; 2.889 by letter frequencies alone.

    transition: (20, 20, 20) float64, P(c | a, b).
    pair: (20, 20) float64, P(a, b) of two consecutive residues.
    """
    shortest, longest = 40, 120
    classes = ("AEHKLMQR", "CFITVWY", "DGNPS")       # runs of a class are what a network learns first

    def __init__(self, seed=0):
        draw = np.random.Generator(np.random.PCG64(keyed_seed("demo source", seed))).random
        u1, u2 = 2 * draw((20, 20)) - 1, 2 * draw((20, 20)) - 1
        kind = np.array([[c in group for group in self.classes].index(True) for c in AMINO_ACIDS])
        same = (kind[:, None] == kind).astype(float)
        want = np.array(UNIREF50) / sum(UNIREF50)
        bias, self.pair = np.log(want), np.outer(want, want)
        for _ in range(2000):                                   # the chain forgets its start; bias follows it
            self.transition = self._transition(bias + (2 * same + u1)[None] + (same + 0.7 * u2)[:, None])
            self.pair = np.einsum("ab,abc->bc", self.pair, self.transition)
            bias = bias + 0.1 * np.log(want / self.pair.sum(0))

    @staticmethod
    def _transition(logits):
        p = np.exp(logits)
        p /= p.sum(2, keepdims=True)
        g, k, n, s, t = (AMINO_ACIDS.index(c) for c in "GKNST")
        for where, share in ((np.s_[n:n + 1, :], 0.6), (np.s_[g:g + 1, k:k + 1], 0.9)):
            block = p[where]                                    # a view
            motif = block[..., [s, t]].sum(-1, keepdims=True)
            rest = (1 - share) / (1 - motif)
            scale = np.broadcast_to(rest, block.shape).copy()
            scale[..., [s, t]] = share / motif
            block *= scale
        return p

    def entropy(self):
        """Exact nats per residue of a long protein: (of the source, of its letter frequencies alone)."""
        letters = self.pair.sum(0)
        source = -(self.pair[:, :, None] * self.transition * np.log(self.transition)).sum()
        return float(source), float(-(letters * np.log(letters)).sum())

    def sample(self, n, seed):
        """n proteins drawn with this seed -> Proteins."""
        draw = np.random.Generator(np.random.PCG64(keyed_seed("demo sample", seed))).random
        lengths = self.shortest + (draw(n) * (self.longest - self.shortest + 1)).astype(np.int64)
        tokens = np.empty((n, self.longest), np.uint8)
        first = np.searchsorted(np.cumsum(self.pair)[:399], draw(n))
        tokens[:, 0], tokens[:, 1] = first // 20, first % 20
        edges = np.cumsum(self.transition, axis=2)[:, :, :19]
        for i in range(2, self.longest):
            tokens[:, i] = (edges[tokens[:, i - 2], tokens[:, i - 1]] < draw(n)[:, None]).sum(1)
        return Proteins(tokens.ravel(), np.arange(n) * self.longest, lengths)

    def nll(self, proteins):
        """Exact negative log-likelihood of each protein given its length, in nats: (n,) float64.

        Raises ValueError for X and for proteins shorter than 2 residues, which this source never makes.
        """
        log_pair, log_transition = np.log(self.pair), np.log(self.transition)
        out = np.empty(len(proteins))
        for i in range(len(proteins)):
            x = proteins[i]
            if len(x) < 2 or x.max() >= X_ID:
                raise ValueError(f"protein {i} is {decode(x)[:30]!r}; expected at least 2 residues and no X: "
                                 f"the demo source makes no other.")
            out[i] = -log_pair[x[0], x[1]] - log_transition[x[:-2], x[1:-1], x[2:]].sum()
        return out
