"""proteins/numbering.py: shifted numbers, other chains and other numberings are told from a few
wrong lines."""

import numpy as np
import pytest

from proteins.letters import AMINO_ACIDS, encode
from proteins.mutations import describe_skipped, place_all, place_on_sequences, read_mutations
from proteins.numbering import NamedSites, describe_misfits, describe_misnumbered
from proteins.structures import NAMES, Chain, Structure
from mpnn_cases import Atoms, refusal, write

TEXT = "".join(AMINO_ACIDS[k] for k in np.random.default_rng(0).integers(20, size=80))
OTHER = "".join(AMINO_ACIDS[k] for k in np.random.default_rng(1).integers(20, size=80))


def numbered(first, n=len(TEXT)):
    return tuple(str(first + k) for k in range(n))


def chain_of(text, numbers, labels=()):
    return Chain(encode(text), np.ones((len(text), 4, 3), np.float32), np.ones(len(text), bool),
                 numbers, label_numbers=labels)


def sites_of(text, numbers):
    return [((letter, number),) for letter, number in zip(text, numbers)]


def named(variants, name="A", **chains):
    chains = chains or {"A": chain_of(TEXT, numbered(1)), "B": chain_of(OTHER, numbered(1))}
    return NamedSites(Structure("x", chains), name, variants)


def test_shifted_numbers_are_told_with_the_shift_back():
    text = describe_misnumbered([named(sites_of(TEXT[1:], numbered(1)))], "line 2: A1C (no)")
    assert text == ("77 of 79 variants do not fit, such as line 2: A1C (no); expected most to fit. "
                    "With every number 1 larger, all do.")


@pytest.mark.parametrize("shift, said", [
    (-1, "every number 1 larger"), (5, "every number 5 smaller"), (-60, "every number 60 larger"),
    (1000, "every number 1,000 smaller"), (0, "")])
def test_the_shift_may_be_any(shift, said):
    text = describe_misnumbered([named(sites_of(TEXT, numbered(1 + shift)))])
    assert said in text and bool(text) == bool(shift)


def test_of_few_lines_the_nearest_shift_is_named():
    assert "every number 1 larger, all do" in describe_misnumbered(
        [named(sites_of(TEXT[10:14], numbered(10)))])


@pytest.mark.parametrize("length", [3, 80])
def test_another_protein_is_told_without_a_shift(length):
    text = describe_misnumbered([named(sites_of(OTHER[::-1][:length], numbered(1)),
                                       A=chain_of(TEXT, numbered(1)))])
    assert "No shift of the numbers and no other chain explains it: is this the right" in text


def test_the_chain_that_is_meant_is_named():
    assert "In chain B, all do" in describe_misnumbered([named(sites_of(OTHER, numbered(1)))])


def test_the_label_numbers_of_mmcif_are_known():
    labels = (*numbered(1, 40), *numbered(47, 40))
    chain = chain_of(TEXT, (*numbered(200, 40), *numbered(250, 40)), labels)
    text = describe_misnumbered([named(sites_of(TEXT, labels), A=chain)])
    assert "label_seq_id of the mmCIF file, all do" in text


def test_residues_that_are_counted_are_known():
    numbers = ("52", "52A", "52B", *numbered(53, 40), *numbered(100, 37))
    text = describe_misnumbered([named(sites_of(TEXT, numbered(0)), A=chain_of(TEXT, numbers))])
    assert "Counted from 1 over the residues of the file, with every number 1 larger, all" in text


def test_residues_that_are_counted_in_a_file_without_gaps_are_told_as_a_shift():
    chain = chain_of(TEXT, numbered(11))
    text = describe_misnumbered([named(sites_of(TEXT, numbered(1)), A=chain)])
    assert "With every number 10 larger, all do" in text


def test_a_shift_is_told_where_little_is_resolved():
    part = chain_of(TEXT[:12], numbered(1, 12))
    text = describe_misnumbered([named(sites_of(TEXT, numbered(2)), A=part)])
    assert "every number 1 smaller, 12 do" in text


def test_a_numbering_that_finds_absent_residues_counts_against_half_that_fit():
    chain = chain_of(TEXT, (*numbered(1, 30), *numbered(101, 50)))
    text = describe_misnumbered([named(sites_of(TEXT, numbered(1)), A=chain)])
    assert "50 of 80 variants do not fit" in text
    assert "Counted from 1 over the residues of the file, all do" in text


def test_a_copy_of_the_chain_with_more_residues_is_no_evidence():
    chains = {"A": chain_of(TEXT[:30], numbered(1, 30)), "B": chain_of(TEXT, numbered(1))}
    assert describe_misnumbered([named(sites_of(TEXT, numbered(1)), **chains)]) == ""


def test_an_insertion_code_stays_where_numbers_are_shifted():
    numbers = (*numbered(1, 40), "40A", "40B", *numbered(41, 38))
    shifted = (*numbered(8, 40), "47a", "47B", *numbered(48, 38))
    text = describe_misnumbered([named(sites_of(TEXT, shifted), A=chain_of(TEXT, numbers))])
    assert "every number 7 smaller, all do" in text


def test_several_mutations_fit_together():
    triples = [sum(three, ()) for three in zip(*[iter(sites_of(TEXT[1:], numbered(1)))] * 3)]
    triples[5] = (*triples[5][:2], ("W", "1"))
    text = describe_misnumbered([named(triples)])
    assert "26 of 26 variants do not fit" in text and "every number 1 larger, 25 do" in text


@pytest.mark.parametrize("n_right, is_told", [(5, True), (39, True), (40, False), (70, False)])
def test_less_than_half_that_fit_are_not_taken(n_right, is_told):
    wrong = "".join("W" if letter == "C" else "C" for letter in TEXT[n_right:])
    variants = sites_of(TEXT[:n_right] + wrong, numbered(1))
    assert bool(describe_misnumbered([named(variants)])) == is_told


def test_a_numbering_that_explains_fewer_lines_than_fit_is_not_named():
    wrong = "".join("W" if letter == "C" else "C" for letter in TEXT[50:])
    variants = sites_of(TEXT[:30] + TEXT[31:51] + wrong, numbered(1))
    assert "1 larger" not in describe_misnumbered([named(variants)])


@pytest.mark.parametrize("n_right, n_wrong, is_told", [
    (0, 2, False), (1, 1, False), (1, 2, True), (2, 1, False), (0, 3, True)])
def test_of_one_or_two_lines_none_is_refused(n_right, n_wrong, is_told):
    variants = sites_of(TEXT[:n_right], numbered(1))
    variants += [(("W", "30"),)] * n_wrong
    assert TEXT[29] != "W"
    assert bool(describe_misnumbered([named(variants)])) == is_told


def test_residues_that_are_not_in_the_file_are_no_evidence():
    part = chain_of(TEXT[:20], numbered(1, 20))
    assert describe_misnumbered([named(sites_of(TEXT, numbered(1)), A=part)]) == ""


def test_numbers_that_are_all_outside_of_the_file_are_told_if_a_shift_explains_them():
    part = chain_of(TEXT[:20], numbered(1, 20))
    variants = sites_of(TEXT[:20], numbered(301))
    assert "every number 300 smaller" in describe_misnumbered([named(variants, A=part)])
    assert describe_misnumbered([named(sites_of(OTHER[:20], numbered(301)), A=part)]) == ""


def test_many_proteins_of_one_line_are_judged_together():
    chains = []
    for k in range(20):
        text = TEXT[3 * k:] + OTHER
        chain = chain_of(text, numbered(1, len(text)))
        chains.append(named([((text[9], "9"),)], A=chain))
    assert [describe_misnumbered([each]) for each in chains] == [""] * 20
    assert "every number 1 larger, all do" in describe_misnumbered(chains)


def test_a_part_that_is_shifted_is_explained():
    text = describe_misfits(named(sites_of(TEXT[30:50], numbered(30))))
    assert text == ("20 variants do not fit. With every number 1 larger, all do; some of the "
                    "others may fit by chance")


def test_a_wrong_line_is_not_explained():
    assert describe_misfits(named([((TEXT[30], "30"),)])) == ""


def test_a_residue_of_another_insertion_code_explains_nothing():
    codes = tuple(f"52{code}" for code in "ABCDEFGHIJ")
    chain = chain_of(TEXT[:10], codes)
    assert describe_misfits(named(sites_of(TEXT, codes[1:]), A=chain)) == ""


# ---- tables ----

NAME_OF = dict(zip(AMINO_ACIDS, NAMES))


def write_structure(folder, name, text, first=1):
    atoms = Atoms()
    for k, letter in enumerate(text):
        atoms.add("A", first + k, NAME_OF[letter])
    (folder / name).write_text(atoms.pdb())


def mutations_of(text, first):
    return [f"{letter}{first + k}{'A' if letter != 'A' else 'G'}" for k, letter in enumerate(text)]


def test_the_protein_of_a_table_that_is_shifted_is_named(tmp_path):
    lines = ["pdb_file,mutation"]
    for name, shift in (("one.pdb", 0), ("two.pdb", -1), ("three.pdb", 0)):
        write_structure(tmp_path, name, TEXT)
        lines += [f"{name},{text}" for text in mutations_of(TEXT[1:], 2 + shift)]
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_all(read_mutations(path)))
    assert "t.csv, chain A of two.pdb: 77 of 79 variants do not fit" in message


def test_lines_of_one_chain_are_judged_together_whatever_their_context(tmp_path):
    write_structure(tmp_path, "one.pdb", TEXT)
    write_structure(tmp_path, "two.pdb", TEXT)
    lines = ["pdb_file,chain,mutation"]
    lines += [f"one.pdb,{chain},{mutation}" for chain, mutation in
              zip(["A", "", "A", ""], mutations_of(TEXT[1:5], 1))]
    lines += [f"two.pdb,A,{mutation}" for mutation in mutations_of(TEXT, 1)]
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_all(read_mutations(path)))
    assert "chain A of one.pdb: 4 of 4 variants" in message


def test_proteins_of_one_line_are_refused_together(tmp_path):
    lines = ["sequence,mutation"]
    lines += [f"{TEXT[3 * k:]},{TEXT[3 * k + 9]}9{'W' if TEXT[3 * k + 9] != 'W' else 'C'}"
              for k in range(20)]
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert "t.csv, all proteins together: " in message


@pytest.mark.parametrize("of_table, of_file, said", [
    (TEXT, TEXT[1:], "With every number 1 smaller, 79 do"),     # M is cut off
    (TEXT[1:], TEXT, "With every number 1 larger, all do")])
def test_the_first_residue_of_a_sequence_may_be_counted_or_not(of_table, of_file, said, tmp_path):
    path = write(tmp_path, "\n".join(mutations_of(of_table, 1)), "list.txt")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path), ("w", of_file)))
    assert "list.txt, w: 7" in message and said in message


def test_what_is_left_out_is_listed_with_what_explains_it(tmp_path):
    lines = [*mutations_of(TEXT[:50], 1), *mutations_of(TEXT[50:], 50)]
    table = read_mutations(write(tmp_path, "\n".join(lines), "list.txt"))
    (protein,), skipped = place_on_sequences(table, ("w", TEXT))
    assert len(protein.variants) + len(skipped.variants) == 80 > len(protein.variants) >= 50
    text = describe_skipped(table, skipped)
    assert text.splitlines()[-1].startswith(f"  w: {len(skipped.variants)} variants do not fit.")
