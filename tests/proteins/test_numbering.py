"""proteins/numbering.py: a table of another numbering is told from one with a few wrong lines."""

import numpy as np
import pytest

from mpnn_cases import Atoms, refusal, write
from proteins.letters import AMINO_ACIDS, encode
from proteins.mutations import place_all, place_on_sequences, read_mutations
from proteins.numbering import NamedSites, describe_misnumbered
from proteins.structures import NAMES, Chain
from tool_runs import assert_named

TEXT = "".join(AMINO_ACIDS[k] for k in np.random.default_rng(0).integers(20, size=80))
OTHER = "".join(AMINO_ACIDS[k] for k in np.random.default_rng(1).integers(20, size=80))


def numbered(first, n=len(TEXT)):
    return tuple(str(first + k) for k in range(n))


def chain_of(text, numbers):
    return Chain(encode(text), np.ones((len(text), 4, 3), np.float32), np.ones(len(text), bool),
                 numbers)


def named(text, numbers, chain=None):
    """The sites of these letters at these numbers, in a chain: that of TEXT from 1."""
    return NamedSites(chain or chain_of(TEXT, numbered(1)), set(zip(text, numbers)))


def other_letters(text):
    return "".join("W" if letter == "C" else "C" for letter in text)


def test_shifted_numbers_are_told_with_the_shift_back():
    text = describe_misnumbered([named(TEXT[1:], numbered(1))], "line 2: A1C (no)")
    assert text == ("77 of 79 residues do not have the letter that the variants name, such as line "
                    "2: A1C (no); expected most to. With every number 1 larger, all do.")


@pytest.mark.parametrize("shift, said", [
    (-1, "every number 1 larger"), (5, "every number 5 smaller"), (-60, "every number 60 larger"),
    (40, "every number 40 smaller"), (0, "")])
def test_the_shift_may_be_any(shift, said):
    text = describe_misnumbered([named(TEXT, numbered(1 + shift))])
    assert said in text and bool(text) == bool(shift)


def test_of_few_residues_the_nearest_shift_is_named():
    """20 residues larger or smaller is another copy of the same ones."""
    chain = chain_of(TEXT[:20] * 4, numbered(1))
    assert "every number 1 larger, all do" in describe_misnumbered(
        [named(TEXT[10:14], numbered(30), chain)])


@pytest.mark.parametrize("length", [20, 80])
def test_another_protein_is_told_without_a_shift(length):
    text = describe_misnumbered([named(OTHER[::-1][:length], numbered(1))])
    assert "No shift of the numbers explains it: is this the right chain and protein?" in text


def test_a_shift_is_told_where_little_is_resolved():
    part = chain_of(TEXT[:12], numbered(1, 12))
    assert "every number 1 smaller, all do" in describe_misnumbered(
        [named(TEXT, numbered(2), part)])


def test_an_insertion_code_stays_where_numbers_are_shifted():
    """In either case of the code's letter. The residues 47 to 49 have other letters."""
    numbers = [*numbered(47, 3), *(f"40{code}" for code in "ABCDEFGHIJ")]
    shifted = [*numbered(47, 3), *(f"47{code}" for code in "abcdefghij")]
    chain = chain_of(TEXT[:13], numbers)
    text = describe_misnumbered([named(other_letters(TEXT[:3]) + TEXT[3:13], shifted, chain)])
    assert "every number 7 smaller, all do" in text


@pytest.mark.parametrize("n_right, is_told", [(5, True), (39, True), (40, False), (70, False)])
def test_less_than_half_that_fit_are_not_taken(n_right, is_told):
    text = TEXT[:n_right] + other_letters(TEXT[n_right:])
    assert bool(describe_misnumbered([named(text, numbered(1))])) == is_told


@pytest.mark.parametrize("n_right, n_wrong, is_told", [
    (0, 2, False), (1, 1, False), (1, 2, True), (2, 1, False), (0, 3, True)])
def test_of_one_or_two_residues_none_is_refused(n_right, n_wrong, is_told):
    text = TEXT[:n_right] + other_letters(TEXT[n_right:n_right + n_wrong])
    assert bool(describe_misnumbered([named(text, numbered(1))])) == is_told


def test_residues_that_are_not_in_the_file_are_no_evidence():
    part = chain_of(TEXT[:20], numbered(1, 20))
    assert describe_misnumbered([named(TEXT, numbered(1), part)]) == ""


def test_residues_of_unknown_letter_are_no_evidence():
    chain = chain_of(TEXT[:20] + "X" * 60, numbered(1))
    assert describe_misnumbered([named(TEXT, numbered(1), chain)]) == ""


def test_many_proteins_of_one_residue_are_judged_together():
    sites = []
    for k in range(20):
        text = TEXT[3 * k:] + OTHER
        sites.append(named(text[9], ["9"], chain_of(text, numbered(1, len(text)))))
    assert [describe_misnumbered([one]) for one in sites] == [""] * 20
    assert "every number 1 larger, all do" in describe_misnumbered(sites)


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
    texts = {"one.pdb": TEXT, "two.pdb": TEXT[::-1], "three.pdb": OTHER}
    for name, text in texts.items():
        write_structure(tmp_path, name, text)
        first = 1 if name == "two.pdb" else 2
        lines += [f"{name},{mutation}" for mutation in mutations_of(text[1:], first)]
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_all(read_mutations(path)))
    assert_named("t.csv A two.pdb 79", message)
    assert "one.pdb" not in message and "three.pdb" not in message


def test_proteins_of_one_line_are_refused_together(tmp_path):
    lines = ["sequence,mutation"]
    lines += [f"{TEXT[3 * k:]},{TEXT[3 * k + 9]}9{'W' if TEXT[3 * k + 9] != 'W' else 'C'}"
              for k in range(20)]
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert_named("t.csv all", message)


@pytest.mark.parametrize("of_table, of_file, named", [
    (TEXT, TEXT[1:], "1 smaller"), (TEXT[1:], TEXT, "1 larger")])       # M is cut off, or is there
def test_the_first_residue_of_a_sequence_may_be_counted_or_not(of_table, of_file, named, tmp_path):
    path = write(tmp_path, "\n".join(mutations_of(of_table, 1)), "list.txt")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path), ("w", of_file)))
    assert_named(f"list.txt w {named}", message)


@pytest.mark.parametrize("n_of_each", [1, 19])
def test_a_wild_type_that_has_the_mutants_letters_is_told(n_of_each):
    """Of all 19 mutations of a residue one letter may be there: that is another protein."""
    mutants = [(letter, number) for number, there in zip(numbered(1), TEXT)
               for letter in (AMINO_ACIDS if n_of_each == 19 else there)]
    sites = named(other_letters(TEXT), numbered(1))._replace(mutants=mutants)
    text = describe_misnumbered([sites])
    assert ("give the sequence or structure of the wild type" in text) == (n_of_each == 1)


def test_a_table_with_a_sequence_of_each_mutant_is_told(tmp_path):
    lines = ["mutation,sequence"]
    for k in range(4):
        mutant = "W" if TEXT[k] != "W" else "C"
        lines.append(f"{TEXT[k]}{k + 1}{mutant},{TEXT[:k]}{mutant}{TEXT[k + 1:]}")
    path = write(tmp_path, "\n".join(lines), "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert_named("t.csv mutants", message)


def test_of_one_variant_the_mutants_letter_is_told(tmp_path):
    path = write(tmp_path, "mutation,sequence\nM1A,AKTA\n", "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert_named("t.csv 1 A mutant", message)
