"""Protein sequences: files, split, crops, batches as tensors.

    proteins, report = read_sequences("proteins.fasta.gz")      # print(report): read and cleaned
    train, val = split_by_hash(proteins, 0.05)                  # index arrays
    train = proteins.subset(train)
    crops = random_crops(train.subset([3, 1, 4]), 512, seed=0, epoch=0)
    x0, mask = collate(crops)

Reads FASTA (.gz or not), text with one sequence per line (.txt or .seq, .gz or not), and .pt files
that hold a list of dicts with `protein_seq`. Writes nothing. `records` finds the records of all
these files, in pieces, so that a file of any size needs only a few MB of memory; read_tables cleans
them for data sets, and named_sequences gives them as they are. Folders made by prepare_uniref50.py
are read by sedd/prepared.py.

Each random choice has its own seed (proteins/seeds.py). No choice depends
on how many random numbers other code has drawn. So the data of a training step depends on the seed,
the epoch and the step, not on ranks, workers or restarts.
"""

import gzip
import io
import itertools
import re
import string
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from ddp_setup import seed_for
from proteins.letters import AMINO_ACIDS, LETTERS, N_TOKENS, RARE, TO_TOKEN, X_ID, encode
from training.files import check_saved

TEXT_SIZE = 1 << 20             # characters of a file that are read at a time
LONGEST_RECORD = 16 << 20       # characters, header included; the longest known protein has 45,000
AT_A_TIME = 4096                # proteins that are hashed or copied at a time, to save memory
USUAL = AMINO_ACIDS.encode()    # letters that need no cleaning
UNKNOWN = b"X" + RARE.encode()  # letters that are read as X
ORDER_SEED = 0                  # of the order in which read_sequences gives the proteins of a file
PADDING = 255                   # no token: makes the length of a protein a multiple of 8, for keys
NUCLEOTIDES = b"ACGTUN"
# A record of at least so many letters is of nucleotides if this share of them is: others are R, Y
# and the like. A letter of a protein is one of them with a probability of 0.27, of silk 0.83.
NUCLEOTIDES_LEAST = 20
NUCLEOTIDES_SHARE = 0.9
MOST_NUCLEOTIDES = 0.01         # of the records of a file; more, and it is refused
# Line 1 of a text of sequences is the heading of a column if it is one of these words, in any case;
# all its letters may be of amino acids. PEPTIDE in capitals is read as a peptide, as people try it.
HEADINGS = {"sequence", "sequences", "seq", "seqs", "protein", "proteins", "protein_seq",
            "protein_seqs", "protein_sequence", "protein_sequences", "aa", "aa_seq", "aa_sequence",
            "aa_sequences", "aaseq", "amino_acid_sequence", "peptide_sequence"}
PEPTIDE_HEADINGS = {"peptide", "Peptide", "peptides", "Peptides"}
PIR = re.compile("(P1|F1|D[LC]|R[LC]|N[13]|XX);")   # how a header of PIR (NBRF) begins


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
        keys[part] = _keys_of_part(gather(tokens, offsets[part], lengths[part]), lengths[part])
    return keys


def gather(tokens, offsets, lengths):
    """The tokens of these proteins, one protein after the other: (lengths.sum(),) uint8."""
    ends = offsets + lengths
    spans = [tokens[start:end] for start, end in zip(offsets.tolist(), ends.tolist())]
    return np.concatenate([np.zeros(0, np.uint8), *spans])


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


def _keys_of_part(tokens, lengths):
    """Keys of proteins whose tokens follow each other: (n,) uint64.

    Pads each protein to whole words of 8 tokens. Scrambles each word, multiplies it by an odd
    number to the power of its place in the protein, adds the words up and scrambles the sum with
    the length; all modulo 2**64.
    """
    padded = np.insert(tokens, np.repeat(np.cumsum(lengths), -lengths % 8), PADDING)
    counts = (lengths + 7) // 8                     # words of each protein
    starts = np.cumsum(counts) - counts
    mixed = padded.view("<u8") * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    powers = np.uint64(0xDA942042E4DD58B5) ** np.arange(counts.max(initial=0), dtype=np.uint64)
    mixed *= powers[np.arange(len(mixed)) - np.repeat(starts, counts)]
    keys = lengths.astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    filled = counts > 0                             # reduceat cannot do empty sums
    if filled.any():
        keys[filled] += np.add.reduceat(mixed, starts[filled])
    return _avalanche(keys)


# ---- the table of proteins ----

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
        tokens = gather(self.tokens, self.offsets, self.lengths)
        return Proteins(tokens, np.cumsum(self.lengths) - self.lengths, self.lengths, self.keys)

    def parts(self):
        """Yield these proteins over tokens of their own, AT_A_TIME at a time."""
        for first in range(0, len(self), AT_A_TIME):
            yield self.subset(slice(first, first + AT_A_TIME)).compact()

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
        for part in self.parts():
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
    n_headings: int = field(default=0, metadata={"note": "heading(s) of a column left out"})
    n_rare: int = field(default=0, metadata={"note": "residues B, Z, U, O or J read as X"})
    n_x: int = field(default=0, metadata={"note": "residues X in the file"})
    n_lower: int = field(default=0, metadata={"note": "lower-case letters read as upper case"})
    n_stops: int = field(default=0, metadata={"note": "stops '*' at the end removed"})
    n_blanks: int = field(default=0, metadata={"note": "blanks removed"})
    n_empty: int = field(default=0, metadata={"note": "empty records dropped"})
    n_all_x: int = field(default=0, metadata={"note": "proteins of X only dropped"})
    n_short: int = field(default=0, metadata={"note": "too short dropped"})
    n_nucleotides: int = field(default=0, metadata={"note": "records of nucleotides dropped"})
    n_duplicates: int = field(default=0, metadata={"note": "exact duplicates dropped"})

    @property
    def n_dropped(self):
        """Records that gave no protein; duplicates are not among them."""
        return self.n_empty + self.n_all_x + self.n_short + self.n_nucleotides

    def __str__(self):
        notes = [f"{self.n_proteins:,} proteins, {self.n_residues:,} residues, lengths "
                 f"{self.shortest:,} to {self.longest:,} (median {self.median:,})"]
        for item in fields(self):
            if "note" in item.metadata and getattr(self, item.name):
                notes.append(f"{getattr(self, item.name):,} {item.metadata['note']}")
        return "; ".join(notes)


def read_sequences(path, min_length=1, alive=lambda: None):
    """Read a file of proteins -> (Proteins, ReadReport).

    path: .pt is a torch file with a list of dicts that have `protein_seq`; text whose first
        character is '>' is FASTA; other text is one sequence per line if its name ends in .txt or
        .seq. gzip is recognised by content. Windows line ends and a byte order mark are accepted.
    min_length: residues; shorter proteins are dropped.
    alive: called now and then, which shows a watcher that a large file is still being read.

    Cleaned, and counted in the report: B, Z, U, O, J become X; lower case (soft-masked regions)
    becomes upper case; one '*' at the end is removed, and so are blanks inside FASTA sequences;
    a heading in line 1 of text, such as "sequence", is left out;
    empty records, proteins of X only and short ones are dropped, and so are records of nucleotides
    (is_nucleotides), up to MOST_NUCLEOTIDES of all; of equal proteins one stays.
    The table is in the order of order_words(keys, ORDER_SEED), whatever their order in the file.
    Raises FileNotFoundError for a missing file, and ValueError with file and line (or entry) for an
    inner '*', gaps '-' and '.', digits, any other character, blanks inside a line of text (a second
    column?), more nucleotides, binary files, other encodings, a truncated or damaged .gz, an empty
    file, a directory.
    """
    report = ReadReport()
    tokens = bytearray()
    lengths = []
    keys = []
    for table in read_tables(path, report, min_length):
        tokens += table.tokens.tobytes()
        lengths.append(table.lengths)
        keys.append(table.keys)
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


def read_tables(path, report, min_length=1, max_records=None, file=None) -> Iterator[Proteins]:
    """Yield the cleaned proteins of a file, in its order, with duplicates, AT_A_TIME or fewer.

    path: as in read_sequences. file: where it is read from, see records; None: from the path.
    report: ReadReport; what is cleaned and dropped is added to it, not the number of proteins.
    max_records: how many records are read, those that are dropped included; None for all.
    Cleans and refuses as read_sequences says.
    """
    if file is None:
        check_file(path)
    n_read = 0
    n_nucleotides = 0
    tokens = bytearray()
    lengths = []
    found = without_heading(path, records(path, file), report)
    for record in itertools.islice(found, max_records):
        n_read += 1
        letters = _clean(path, record, report)
        if is_nucleotides(letters):
            n_nucleotides += 1
            report.n_nucleotides += 1
        elif not letters:
            report.n_empty += 1
        elif not letters.strip(UNKNOWN):
            report.n_all_x += 1
        elif len(letters) < min_length:
            report.n_short += 1
        else:
            tokens += letters.translate(TO_TOKEN)
            lengths.append(len(letters))
        if n_read % AT_A_TIME == 0 or len(tokens) > LONGEST_RECORD:
            yield _table(tokens, lengths)
            tokens = bytearray()
            lengths = []
    yield _table(tokens, lengths)
    if n_nucleotides > MOST_NUCLEOTIDES * n_read:
        raise ValueError(f"{path}: {n_nucleotides:,} of {n_read:,} records are nucleotides; "
                         "expected proteins. Translate or remove them.")


def without_heading(path, found, report):
    """Yield the records of a file but the heading of a column, which is counted in the report."""
    for record in found:
        header, text, _ = record
        is_line = header is None and not is_pt(path)
        if is_line and is_heading(text.strip()):
            report.n_headings += 1
            break
        yield record
        if text.strip():    # the first line that is not blank
            break
    yield from found


def is_heading(word):
    """Whether a line is the heading of a column of sequences."""
    return word.lower() in HEADINGS or word in PEPTIDE_HEADINGS


def named_sequences(path) -> Iterator[tuple[str, str]]:
    """Yield (header, letters) of each record of a FASTA file: letters as they are, without blanks.

    For files that people write; read_sequences is for data sets. Raises ValueError, see records,
    and for the first record of nucleotides.
    """
    for header, text, number in records(path):
        if header is None:
            raise ValueError(f"{path} has no headers; expected FASTA.")
        letters = "".join(text.split())
        if is_nucleotides(letters.upper().encode()):
            raise ValueError(f"{path}, line {number}: nucleotides ({letters[:20]}...); expected "
                             "proteins. Translate them, or remove the record.")
        yield header.replace("\t", " ").strip(), letters


def records(path, file=None) -> Iterator[tuple[str | None, str, int]]:
    """Yield (header, text, number) of each record of a file, see read_sequences for its formats.

    header: without '>'; None for a line of text, or an entry of a .pt file. text: the letters as
    they stand there, with blanks and line ends. number: of the first line of the text, or of the
    entry.
    file: buffered binary stream that is read in place of the path, which then only names it.
    Raises ValueError where the file is none of these formats, damaged, binary, has a header of PIR,
    or a record longer than any protein. Needs memory for a piece of TEXT_SIZE, or one long record.
    """
    if is_pt(path):
        for number, sequence in enumerate(_read_pt(path), 1):
            yield None, sequence, number
        return
    with file or open(path, "rb", buffering=1 << 18) as file:       # long reads suit a shared disk
        texts = _texts(path, file)
        first = next(texts, None)
        if first is None:
            raise ValueError(f"{path} holds only blank lines; expected sequences.")
        number = 1
        is_fasta = _is_fasta(path, first)
        if is_fasta:
            number += first.count("\n", 0, first.find(">"))
            first = first.lstrip()[1:]
        rest = ""
        for text in itertools.chain([first], texts):
            *whole, rest = (rest + text).split("\n>" if is_fasta else "\n")
            for record in whole:
                yield _record(path, record, number, is_fasta)
                number += record.count("\n") + 1
            if len(rest) > LONGEST_RECORD:
                raise ValueError(f"{path}, line {number}: a record of more than "
                                 f"{LONGEST_RECORD:,} characters; expected proteins. Is it another "
                                 "file, or are line ends missing?")
        yield _record(path, rest, number, is_fasta)


def check_file(path):
    """Raise FileNotFoundError or ValueError for a path that is no file, or an empty one."""
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


def is_pt(path):
    """Whether a file is one of torch, by its name."""
    return Path(path).suffix.lower() == ".pt"


def refuse_nothing_left(name, report, min_length):
    """Raise ValueError, as all records of a file were dropped, for the reasons in the report."""
    raise ValueError(f"{name}: no protein is left of {report.n_dropped:,} records "
                     f"({report.n_empty:,} empty, {report.n_all_x:,} of X only, "
                     f"{report.n_short:,} shorter than min_length = {min_length}, "
                     f"{report.n_nucleotides:,} of nucleotides); expected at "
                     f"least one. Check the file, or lower min_length.")


# From a file to texts and records.

def _texts(path, file):
    """Yield the text of a file in pieces, with "\\n" at the ends of lines.

    Blanks and line ends at the end of a piece go to the next one; those of the file are left out.
    """
    unpacked = io.TextIOWrapper(_unpacked(path, file), "utf-8-sig", "replace")
    rest = ""
    try:
        while piece := unpacked.read(TEXT_SIZE):
            piece = rest + piece
            text = piece.rstrip()
            rest = piece[len(text):]
            if len(rest) > LONGEST_RECORD:
                raise ValueError(f"{path} holds more than {LONGEST_RECORD:,} blanks and line ends "
                                 "in a row; expected proteins.")
            if "\0" in text:
                raise ValueError(f"{path} holds a zero byte, so it is binary (packed? UTF-16?) or "
                                 "damaged; expected text, ASCII or UTF-8, or gzip.")
            if text:
                yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); expected a whole gzip file. "
                         "Download or copy it again.") from None


def _unpacked(path, file):
    """The file, decompressed if it is gzip. Raises ValueError if only its name says .gz."""
    beginning = file.peek(4)[:4]
    if beginning[:2] == b"\x1f\x8b":
        return gzip.open(file)
    if beginning and Path(path).suffix.lower() == ".gz":
        raise ValueError(f"{path} is not gzip: it begins with {beginning!r}; expected "
                         f"b'\\x1f\\x8b'. Was an error page saved in its place? If it is "
                         f"plain text, remove .gz from its name.")
    return file


def _is_fasta(path, text):
    """Whether the first text of a file is FASTA. Raises ValueError if it is no list of sequences
    either."""
    first = text.lstrip()
    if first.startswith(">"):
        return True
    if str(path).lower().removesuffix(".gz").endswith((".txt", ".seq")):
        return False
    line = 1 + text.count("\n", 0, len(text) - len(first))
    raise ValueError(f"{path}, line {line}: found {first.splitlines()[0][:20]!r}; expected '>', "
                     f"with which FASTA begins. If it has one sequence per line, name it .txt or "
                     f".seq.")


def _record(path, record, number, is_fasta):
    """What `records` yields of a record that begins in the line of this number."""
    if not is_fasta:
        return None, record, number
    header, _, text = record.partition("\n")
    if PIR.match(header):
        raise ValueError(f"{path}, line {number}: found {'>' + header[:40]!r}, as PIR (NBRF) has "
                         "it, where a line of description stands before each sequence; expected "
                         "FASTA. Convert it, as Biopython does: `SeqIO.convert('x.pir', "
                         "'pir', 'x.fasta', 'fasta')`.")
    return header, text, number + 1


def _read_pt(path):
    """The sequences of a .pt file, as texts."""
    check_saved(path)
    try:
        entries = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                      # unpickling junk raises nearly any type
        # The first sentence only: torch's next one advises to load the file without weights_only.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path} cannot be loaded: {reason}. Expected a torch file with a list of "
                         f"dicts of plain types, each with 'protein_seq'. Save it so, or give "
                         f"FASTA.") from None
    if not isinstance(entries, list) or not entries:
        kind = "an empty list" if entries == [] else type(entries).__name__
        raise ValueError(f"{path} holds {kind}; expected a list of dicts with 'protein_seq'.")
    sequences = []
    for number, entry in enumerate(entries, 1):
        sequence = entry.get("protein_seq") if isinstance(entry, dict) else None
        if not isinstance(sequence, str):
            raise ValueError(f"{path}, entry {number}: found {str(entry)[:80]}; expected a dict "
                             f"with the text 'protein_seq'.")
        sequences.append(sequence)
    return sequences


# From records to proteins.

def _clean(path, record, report):
    """The letters of a record, bytes in upper case, without line ends, blanks and a stop at the
    end. Counts in the report what it finds, and refuses what no protein has."""
    header, text, _ = record
    letters = text.encode()
    if header is not None:
        letters = letters.translate(None, b"\n")
    if not letters.translate(None, USUAL):      # nothing is left, as of nearly all records
        return letters
    check_letters(path, record)
    if header is None:
        letters = letters.strip(b" \t")
    n_all = len(letters)
    letters = letters.translate(None, b" \t")
    report.n_blanks += n_all - len(letters)
    if letters.endswith(b"*"):
        report.n_stops += 1
        letters = letters[:-1]
    report.n_lower += len(letters) - len(letters.translate(None, string.ascii_lowercase.encode()))
    letters = letters.upper()
    n_x = letters.count(b"X")
    report.n_x += n_x
    report.n_rare += len(letters) - len(letters.translate(None, UNKNOWN)) - n_x
    return letters


def _table(tokens, lengths):
    """Proteins whose tokens follow each other. tokens: bytes. lengths: list."""
    lengths = np.array(lengths, np.int64)
    return Proteins(np.frombuffer(tokens, np.uint8), np.cumsum(lengths) - lengths, lengths)


def is_nucleotides(letters):
    """Whether these letters, bytes in upper case, are of DNA or RNA and hardly of a protein."""
    n_others = len(letters.translate(None, NUCLEOTIDES))
    return len(letters) >= NUCLEOTIDES_LEAST and n_others <= (1 - NUCLEOTIDES_SHARE) * len(letters)


# What no protein has: where it is, and what it means.

WRONG_IN_FASTA = re.compile(r"[^A-Za-z* \t\n]|\*(?!\s*\Z)")     # a '*' may stand at the end alone
WRONG_IN_LINE = re.compile(r"[^A-Za-z* \t]|\*(?!\s*\Z)|(?<=\S)[ \t]+(?=\S)")
CHARACTERS_AND_REASONS = (
    ("*", "a stop inside a sequence. Translate up to the first stop, or remove the record"),
    ("-", "a gap, so this is an alignment. Give the sequences without gaps"),
    (".", "a gap of an alignment, or a stop, as gffread writes it. Give the sequences without gaps "
          "and stops"),
    ("0123456789", "a digit. Remove numbers from the sequence lines"),
    ("\v\f", "a form feed or vertical tab, as printed text has. Remove it"),
    (" \t\n\r", "a blank. Give one sequence per line and nothing else; with names, use FASTA"),
    (">", "so a line end is missing before it (files joined without one?). Insert it"))


def check_letters(path, record):
    """Raise ValueError for the first wrong character of a record, see records."""
    header, text, number = record
    wrong = (WRONG_IN_LINE if header is None else WRONG_IN_FASTA).search(text)
    if not wrong:
        return
    before = text[:wrong.start()]
    sign = wrong.group()[:1]
    unit = "line"
    if is_pt(path):
        unit = "entry"
    else:
        number += before.count("\n")
    column = len(before) - before.rfind("\n")
    reason = "not a letter of a protein sequence. Check that the file is what its name says"
    for characters, why in CHARACTERS_AND_REASONS:
        if sign in characters:
            reason = why
            break
    if sign == ">" and not before.rpartition("\n")[2].strip():
        reason = "a header that is indented. Remove the blanks before it"
    raise ValueError(f"{path}, {unit} {number}, column {column}: found {sign!r}, {reason}. "
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
