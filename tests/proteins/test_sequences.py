"""Protein sequences: what files may hold, keys, the split, crops."""

import collections
import gzip
import itertools
import math
import os
import re

import numpy as np
import pytest
import torch

from proteins import sequences
from proteins.letters import AMINO_ACIDS, N_TOKENS, X_ID, decode, encode
from proteins.sequences import (
    TEXT_SIZE,
    Proteins,
    apply_max_length,
    collate,
    named_sequences,
    order_words,
    random_crops,
    read_sequences,
    split_by_hash,
)
from sedd.demo import DemoSource
from tool_runs import assert_named


def write(tmp_path, content, name="in.fasta"):
    path = tmp_path / name
    if isinstance(content, (bytes, str)):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        torch.save(content, path)
    return path


def texts(proteins):
    return [decode(proteins[i]) for i in range(len(proteins))]


@pytest.fixture(params=[TEXT_SIZE, 5, 6, 7, 31])
def read(request, monkeypatch):
    """read_sequences, also in pieces so small that they end at every place."""
    monkeypatch.setattr(sequences, "TEXT_SIZE", request.param)
    return read_sequences


def refusal(read, path):
    with pytest.raises(ValueError) as caught:
        read(path)
    assert path.name in str(caught.value)
    return str(caught.value)


# ---- headings, and what is no FASTA ----

@pytest.mark.parametrize("heading", ["sequence", "Sequence", "SEQ", "protein", "protein_seq",
                                     "aa_sequence ", "peptide", "\nProteins"])
def test_the_heading_of_a_column_is_left_out_and_counted(tmp_path, read, heading):
    proteins, report = read(write(tmp_path, f"{heading}\nMKV\nMKL\n", "p.txt"))
    assert sorted(texts(proteins)) == ["MKL", "MKV"]
    assert report.n_headings == 1 and "1 heading(s)" in str(report)


@pytest.mark.parametrize("content, name", [
    ("SEQWENCE\nMKV\n", "p.txt"),              # a protein that is like one
    ("PEPTIDE\nMKV\n", "p.txt"),               # what people write to try a program
    ("MKV\nsequence\n", "p.txt"),              # not in line 1
    (">a\nsequence\n>b\nMKV\n", "p.fasta")])
def test_what_is_no_heading_stays_a_protein(tmp_path, read, content, name):
    proteins, report = read(write(tmp_path, content, name))
    assert len(proteins) == 2 and report.n_headings == 0


@pytest.mark.parametrize("reader", [read_sequences, lambda path: list(named_sequences(path))])
@pytest.mark.parametrize("code", ["P1", "F1", "DL", "XX"])
def test_pir_is_refused_as_its_descriptions_would_be_read_as_letters(tmp_path, reader, code):
    path = write(tmp_path, f">{code};Q1\nhemoglobin alpha\nMKVL*\n")
    said = refusal(reader, path)
    assert_named("line 1 PIR", said)


def test_a_header_of_fasta_may_hold_a_semicolon(tmp_path):
    assert [*named_sequences(write(tmp_path, ">A1;x\nMKV\n>P1\nMKL\n"))] == [
        ("A1;x", "MKV"), ("P1", "MKL")]


# ---- keys and alphabet ----

def test_the_alphabet_is_in_the_published_order():
    assert encode("ACDEFGHIKLMNPQRSTVWY").tolist() == list(range(20))


def test_rare_letters_are_x():
    assert encode("XBZUOJ").tolist() == [20] * 6


def test_encode_and_decode_refuse_what_has_no_token_or_letter():
    assert decode(encode("MKXV")) == "MKXV" and decode([]) == "" and N_TOKENS == 21
    for text in ("MKv", "MK-V", "MKé"):             # only a file reader may clean
        with pytest.raises(ValueError, match="position 3"):
            encode(text)
    with pytest.raises(ValueError, match="0 to 20"):
        decode([0, 21])                             # a mask


def test_keys_and_their_order_are_the_same_numbers_in_every_version_wherever_a_protein_stands():
    rows = ["MKV", "ACDEFGHIKLMNPQRSTVWYX"]
    keys = Proteins.from_sequences(rows).keys
    assert keys.tolist() == [7357805257792509725, 9964410311591326365]
    assert order_words(keys, 0).tolist() == [1443003581826762636, 14662638302584749771]
    assert Proteins.from_sequences([rows[1], "", rows[0]]).keys[::2].tolist() == keys[::-1].tolist()


# ---- reading ----

def test_text_with_one_sequence_per_line_reads_like_fasta(read, tmp_path):
    for name, pack in [("x.txt", bytes), ("X.SEQ", bytes), ("x.TXT.GZ", gzip.compress)]:
        proteins, report = read(write(tmp_path, pack(b"MKVLA\r\n\n ACDEFG \nW*\n\n"), name))
        assert sorted(texts(proteins)) == sorted(["MKVLA", "ACDEFG", "W"])
        assert str(report) == ("3 proteins, 12 residues, lengths 1 to 6 (median 5); "
                               "1 stops '*' at the end removed; 1 empty records dropped")
    assert texts(read(write(tmp_path, ">a\nMK\nV\n", "x.txt"))[0]) == ["MKV"]


def test_the_pt_file_of_the_original_project_reads(read, tmp_path):
    entries = [{"protein_seq": "MKVU", "ligand": "CCO", "vector": torch.ones(3)},
               {"protein_seq": "ACD*"}, {"protein_seq": ""}]
    proteins, report = read(write(tmp_path, entries, "DATA.PT"))
    assert sorted(texts(proteins)) == ["ACD", "MKVX"]
    assert (report.n_rare, report.n_stops, report.n_empty) == (1, 1, 1)


@pytest.mark.parametrize("content, name, named", [
    ({"protein_seq": ["MK"]}, "in.pt", "dict"), ([], "in.pt", ""), (["MK"], "in.pt", "entry 1 MK"),
    ([{"protein_seq": "MK"}, {"seq": "MK"}], "in.pt", "entry 2 {'seq': 'MK'}"),
    ([{"protein_seq": "MK"}, {"protein_seq": "MK-V"}], "in.pt", "entry 2 column 3 '-'"),
    ([{"protein_seq": "MK\nV"}], "in.pt", "entry 1 column 3"),
    ([{"protein_seq": "MK", "run": print}], "in.pt", ""),       # code
    (">a\nMKV*\nMK\n>b\nMKV\n", "in.fasta", "line 2 column 4 '*' stop"),
    (">a\nMKV\nLA-V\n", "in.fasta", "line 3 column 3 '-' gap"),
    (">a\nMKV.\n", "in.fasta", "line 2 column 4 '.' gap stop"),
    (">a\nMK.V\n", "in.fasta", "line 2 column 3 '.' gap stop"),
    (">a\nMKV>b\nMKV\n", "in.fasta", "line 2 column 4 '>'"),
    ("\r\n>a\r\nMKV\r\nM?V\r\n", "in.fasta", "line 4 column 2 '?'"),
    ("MKV\n\nP1 MKV\n", "in.txt", "line 3 column 2 '1' digit"),
    ("MKV\nMKV\tACD\n", "in.txt", "line 2 column 4 '\\t' blank"),
    ("", "in.fasta.gz", "0"), ("", "in.pt", ""), (">a\nMKV\n", "in.pt", ""),
    (gzip.compress(b"\n \n", mtime=0), "x.gz", "blank"),
    (">a\n>b\nX\n", "in.fasta", "1 empty X"), ("\n\nMK\n>a\nMK\n", "in.fa", "line 3 'MK' '>'"),
    ("<html>not found</html>", "in.fasta.gz", "gzip"),
    (">a\nMKV\n".encode("utf-16"), "in.fasta", "zero"),
    (">a\n" + "ACGTN" * 300, "in.fasta", "nucleotides"),
    (">a\nMKV\n  >b\nMKV\n", "in.fasta", "line 3 column 3 '>' header"),
    (">a\nMKV\fMK\n", "in.fasta", "line 2 column 4 '\\x0c'")])
def test_what_is_no_protein_is_refused_with_its_line_or_entry(read, tmp_path, content, name, named):
    assert_named(named, refusal(read, write(tmp_path, content, name)))


PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
DNA = "ATGGCATTCGACCGTAAGCTGACCTGA"
OF_NUCLEOTIDES = {
    "DNA": DNA, "RNA": DNA.replace("T", "U"), "lower case": DNA.lower(), "lines": DNA[:9] + "\n" +
    DNA[9:], "unknown letters": DNA + "N" * 100, "ambiguous letters": DNA * 4 + "RYK",
    "rich in A and T": "AATATCTTTAACATTAGAATGAATTATATA", "a primer": "GTGCCAGCMGCCGCGGTAAC"}
OF_PROTEINS = {
    "a short peptide": "GAGAGATC", "silk": "GAGAGSGAGAGS" * 4,
    "an antifreeze protein": "DTASDAAAAAALTAANAKAAAELTAANAAAAAAATAR"}


@pytest.mark.parametrize("letters", OF_NUCLEOTIDES.values(), ids=OF_NUCLEOTIDES)
def test_one_record_of_nucleotides_among_proteins_is_dropped_and_counted(tmp_path, letters):
    records = [f"{PROTEIN}{a}{b}" for a in "ACDEFGHIKL" for b in "ACDEFGHIKL"]
    records.insert(57, letters)
    text = "".join(f">{k}\n{record}\n" for k, record in enumerate(records))
    proteins, report = read_sequences(write(tmp_path, text))
    assert len(proteins) == 100 and report.n_nucleotides == 1


@pytest.mark.parametrize("letters", OF_PROTEINS.values(), ids=OF_PROTEINS)
def test_a_protein_of_few_kinds_of_letters_is_no_record_of_nucleotides(tmp_path, letters):
    proteins, _ = read_sequences(write(tmp_path, f">a\n{PROTEIN}\n>b\n{letters}\n"))
    assert sorted(texts(proteins)) == sorted([PROTEIN, letters])


@pytest.mark.parametrize("name", ["in.fasta", "in.txt", "in.pt"])
def test_more_than_a_few_records_of_nucleotides_are_refused(tmp_path, name):
    records = [PROTEIN, PROTEIN[1:], DNA, PROTEIN[2:], DNA]
    content = [{"protein_seq": record} for record in records]
    if name == "in.fasta":
        content = "".join(f">a\n{record}\n" for record in records)
    elif name == "in.txt":
        content = "\n".join(records)
    said = refusal(read_sequences, write(tmp_path, content, name))
    assert_named("2 5 nucleotides", said)


def test_nucleotides_in_a_file_of_named_sequences_are_refused(tmp_path):
    path = write(tmp_path, f">a\n{PROTEIN}\n>b\n{DNA}\n")
    with pytest.raises(ValueError, match="line 4.* nucleotides"):
        list(named_sequences(path))


def test_a_pipe_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_named("pipe", refusal(read, tmp_path / "pipe"))


def plain_reader(text, min_length):
    """What read_sequences says, as plainly as possible: {counter: number}, set of sequences."""
    counts = collections.Counter()
    found = set()
    for record in re.split("\n>", "\n" + re.sub("\r\n?", "\n", text).strip())[1:]:
        _, _, body = record.partition("\n")
        counts["n_blanks"] += len(re.findall("[ \t]", body))
        letters = re.sub("[ \t\n]", "", body)
        counts["n_stops"] += letters.endswith("*")
        letters = letters.removesuffix("*")
        counts["n_lower"] += len(re.findall("[a-z]", letters))
        counts["n_x"] += letters.upper().count("X")
        counts["n_rare"] += len(re.findall("[BZUOJ]", letters.upper()))
        clean = re.sub("[BZUOJ]", "X", letters.upper())
        reason = None
        if not clean:
            reason = "n_empty"
        elif not clean.strip("X"):
            reason = "n_all_x"
        elif len(clean) < min_length:
            reason = "n_short"
        elif clean in found:
            reason = "n_duplicates"
        else:
            found.add(clean)
        counts[reason] += 1
    return counts, found


def random_fasta(rng, n):
    """FASTA with everything that is cleaned, in odd places."""

    def pick(*options):
        return options[rng.integers(len(options))]

    records = []
    for _ in range(n):
        size = pick(0, 1, 2, 7, 8, 9, 15, 16, 17, 40, rng.integers(1, 90))
        alphabet = pick("ACDEFGHIKLMNPQRSTVWY", "ACDWYX", "X", "acdBZUOJxuGK")
        letters = "".join(rng.choice(list(alphabet), size)) + pick("", "", "*")
        width = pick(1, 3, 8, 60, 60)
        rows = [letters[i:i + width] for i in range(0, len(letters), width)]
        rows = [pick("", "", "", " ", "\t") + row + pick("", "", "", "\n", " \t", "\n\n ")
                for row in rows]
        header = pick(">", ">a", ">ab >c*", "> x 1-2.", ">UniRef50_A0A3BI652J5 Tax=x >", ">\tB>")
        records.append("\n".join([header, *rows]))
    before = pick("", "\n", "\ufeff", " \n\n")
    between = pick("\n", "\n\n")
    return before + between.join(records) + pick("", "\n", "\n \n\n")


@pytest.mark.parametrize("seed", range(8))
def test_random_files_read_as_by_a_plain_reader_in_pieces_of_all_sizes(
        tmp_path, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    text = random_fasta(rng, 60)
    counts, found = plain_reader(text.removeprefix("\ufeff"), 4)
    for end, pack in [("\n", bytes), ("\r\n", gzip.compress), (      # the last in two members
            "\r", lambda data: gzip.compress(data[:500]) + gzip.compress(data[500:]))]:
        path = write(tmp_path, pack(text.replace("\n", end).encode()))
        for size, at_a_time in [(1, 1), (5, 2), (6, 3), (7, 59), (8, 60), (50, 61), (1000, 4096),
                                (TEXT_SIZE, 4096)]:
            monkeypatch.setattr(sequences, "TEXT_SIZE", size)
            monkeypatch.setattr(sequences, "AT_A_TIME", at_a_time)
            proteins, report = read_sequences(path, 4)
            assert sorted(texts(proteins)) == sorted(found)
            assert all(getattr(report, name) == counts[name] for name in counts if name)


def test_a_long_file_shows_that_it_is_still_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "AT_A_TIME", 10)
    signs = []
    read_sequences(write(tmp_path, ">a\nX\n" * 95 + ">b\nMKV"), alive=lambda: signs.append(1))
    assert len(signs) > 9       # also where all records are dropped


# ---- the table, split, crops ----

def test_parts_and_crops_share_the_tokens_and_have_the_keys_of_whole_cleaned_proteins(tmp_path):
    proteins = Proteins.from_sequences(["MKV", encode("ACDEFG"), "WYW"])
    part = proteins.subset([2, 1])
    assert texts(part) == ["WYW", "ACDEFG"] and part.tokens is proteins.tokens
    assert part.keys.tolist() == proteins.keys[[2, 1]].tolist()
    cropped = random_crops(part, 5, seed=0, epoch=0)
    assert texts(cropped)[0] == "WYW" and texts(cropped)[1] in ("ACDEF", "CDEFG")
    assert cropped.tokens is proteins.tokens and cropped.keys.tolist() == part.keys.tolist()
    compact = part.compact()                        # over tokens of its own
    assert texts(compact) == texts(part) and len(compact.tokens) == 9
    cleaned, _ = read_sequences(write(tmp_path, ">a\nmk u\nV*\n"))
    assert cleaned.keys.tolist() == Proteins.from_sequences(["MKXV"]).keys.tolist()


def test_long_proteins_are_left_out_if_they_are_to_be_dropped():
    part = Proteins.from_sequences(["WYW", "ACDEFG"])
    assert apply_max_length(part, 5, "crop") is part
    assert texts(apply_max_length(part, 3, "drop")) == ["WYW"]
    with pytest.raises(ValueError, match="max_length = 2"):
        apply_max_length(part, 2, "drop")


def test_the_split_stays_when_the_file_grows_or_is_reordered():
    few = DemoSource().sample(4000, seed=1)
    more = Proteins.from_sequences([few[i] for i in range(3999, -1, -1)] + ["MKV", "ACD"])

    def val_keys(p):
        return set(p.keys[split_by_hash(p, 0.1)[1]].tolist())

    assert val_keys(few) == val_keys(more) & set(few.keys.tolist())


def test_the_split_has_the_share_asked_for():
    few = DemoSource().sample(4000, seed=1)
    train, val = split_by_hash(few, 0.1)
    assert sorted([*train, *val]) == list(range(4000))
    assert abs(len(val) - 400) < 4 * math.sqrt(4000 * 0.1 * 0.9)
    assert set(val) <= set(split_by_hash(few, 0.2)[1])              # a larger fraction only adds


PACKED = gzip.compress(b">a b\nMKV AC\n D\tE\n\n>c\nM\n")


def test_gzip_is_known_by_its_content(tmp_path):
    for name, content in (
            ("A.FA.GZ", PACKED), ("a.fasta", PACKED), ("b.gz", PACKED + bytes(99))):
        path = write(tmp_path, content, name)
        assert list(named_sequences(path)) == [("a b", "MKVACDE"), ("c", "M")]  # without blanks
        assert len(read_sequences(path)[0]) == 2


def test_gzip_that_is_damaged_is_refused(tmp_path):
    checksum_wrong = PACKED[:-8] + bytes(4) + PACKED[-4:]
    for damaged in (PACKED[:-12], checksum_wrong, PACKED + b"junk"):
        path = write(tmp_path, damaged, "A.FA.GZ")
        for reader in (read_sequences, lambda path: list(named_sequences(path))):
            refusal(reader, path)


def test_crops_are_uniform_over_all_windows():
    one = Proteins(np.zeros(13, np.uint8), [0], [13], [123])
    starts = [random_crops(one, 10, 0, epoch).offsets[0] for epoch in range(4000)]
    counts = np.bincount(starts)
    assert len(counts) == 4 and abs(counts - 1000).max() < 5 * math.sqrt(750)
    assert random_crops(one, 13, 1, 5).offsets == 0 == random_crops(one, 20, 1, 5).offsets


def test_crops_are_keyed_by_seed_epoch_and_protein_alone():
    long = Proteins(np.zeros(0, np.uint8), [0, 0], [10**9, 10**9], [0, 1])
    varied = [random_crops(long, 10, *key).offsets for key in itertools.product((0, 1), repeat=2)]
    assert len(np.unique(varied)) == 8
    proteins = DemoSource().sample(50, seed=3)      # in other places of file and batch
    cropped = texts(random_crops(proteins, 45, seed=1, epoch=2))
    assert texts(random_crops(proteins.subset([8, 7]), 45, 1, 2)) == cropped[8:6:-1]


def test_collate_pads_with_a_mask():
    proteins = Proteins.from_sequences(["MKVLA", "ACD", "WX"]).subset([1, 2])
    x0, mask = collate(proteins)
    assert x0.dtype == torch.int64 and mask.dtype == torch.bool
    assert x0.tolist() == [[0, 1, 2], [18, X_ID, X_ID]]
    assert mask.tolist() == [[True] * 3, [True, True, False]]
    wide, wide_mask = collate(proteins, width=5)
    assert wide[:, :3].equal(x0) and (wide[:, 3:] == X_ID).all() and wide_mask.sum() == 5


# ---- letters ----

def test_letters_are_counted_of_the_proteins_of_the_table():
    proteins = Proteins.from_sequences(["AAC", "DDDDX", "YA"])
    part = Proteins(proteins.tokens, proteins.offsets[[0, 2]] + [1, 0], [2, 2])     # "AC", "YA"
    counts = part.letter_counts()
    there = {(AMINO_ACIDS + "X")[i]: count for i, count in enumerate(counts) if count}
    assert there == {"A": 2, "C": 1, "Y": 1} and proteins.letter_counts()[X_ID] == 1


# ---- small files that unpack to very much ----

LONG = sequences.LONGEST_RECORD + 3 * TEXT_SIZE


@pytest.mark.parametrize("reader", [read_sequences, lambda path: list(named_sequences(path))],
                         ids=["read_sequences", "named_sequences"])
@pytest.mark.parametrize("content", [
    ">a\n" + "A" * LONG, ">" + "a" * LONG, ">a\n" + "ACDE\n" * (LONG // 4)],
    ids=["line", "header", "lines"])
def test_a_packed_record_longer_than_any_protein_is_refused(tmp_path, reader, content):
    path = write(tmp_path, gzip.compress(content.encode(), 1), "bomb.fasta.gz")
    refusal(reader, path)


@pytest.mark.parametrize("reader", [read_sequences, lambda path: list(named_sequences(path))],
                         ids=["read_sequences", "named_sequences"])
def test_packed_blanks_without_end_are_refused(tmp_path, reader):
    path = write(tmp_path, gzip.compress(b">a\nACD" + b"\n" * LONG, 1), "bomb.fasta.gz")
    refusal(reader, path)
