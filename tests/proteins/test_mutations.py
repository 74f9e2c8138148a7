"""proteins/mutations.py: lists and tables of mutations, and where their residues are."""

import math

import numpy as np
import pytest

from proteins.mutations import place_all, place_on_sequences, read_mutations, scan_structure
from proteins.scores import table_text
from mpnn_cases import Atoms, refusal, write

TABLE = "pdb_file,chain,mutation,ddg\n"


def texts(variant):
    return [str(mutation) for mutation in variant.mutations]


def test_a_list_has_a_variant_per_line(tmp_path):
    path = write(tmp_path, "# mine\nM1A,\n\nK2R:V5A # two\nL5AG+M1C\n", "list.txt")
    table = read_mutations(path)
    assert [texts(variant) for variant in table.variants] == [["M1A"], ["K2R", "V5A"],
                                                              ["L5AG", "M1C"]]
    assert [variant.line for variant in table.variants] == [2, 4, 5]
    assert not table.names_structures


@pytest.mark.parametrize("line", ["A12V, G45D, K3R", "A12V G45D K3R", "A12V;G45D;K3R"])
def test_several_variants_on_a_line_of_a_list_are_not_taken_as_one(line, tmp_path):
    message = refusal(write(tmp_path, f"M1A\n{line}\n", "list.txt"), read_mutations)
    assert f"line 2: found {line}; expected one variant per line, or A12V:G45D:K3R" in message


def test_several_mutations_in_a_cell_of_a_table_are_one_variant(small):
    path = write(small, 'mutation,ddg\n"M1A, K2R",1\n', "t.csv")
    assert [texts(variant) for variant in read_mutations(path).variants] == [["M1A", "K2R"]]


@pytest.mark.parametrize("comma", [",", "\t", " , "])
def test_a_table_keeps_its_other_columns(small, comma):
    path = write(small, (TABLE + "small.pdb, A ,M1A,1.5\nsmall.pdb,A,K2R,\n").replace(",", comma),
                 "table.csv")
    first, second = read_mutations(path, measured="ddg").variants
    assert first.cells == {"pdb_file": "small.pdb", "chain": "A", "mutation": "M1A", "ddg": "1.5"}
    assert first.measured == 1.5 and math.isnan(second.measured)


def test_residues_are_found_by_their_number_in_the_file(small):
    path = write(small, "M1A:L5AW\nV5W\n", "list.txt")
    (protein,), note = place_all(read_mutations(path), small / "small.pdb", chain="A")
    assert protein.changes == [[(0, 0), (5, 18)], [(4, 18)]] and note == ""
    assert protein.chain == "A" and protein.complex.fixed == ("B",)


def test_a_variant_that_does_not_fit_is_left_out_with_its_reason(small):
    path = write(small, TABLE + "".join(f"small.pdb,A,{mutation},1\n" for mutation in
                                        ("M1A", "A2R", "G4A", "A6G", "K2R:L5A", "L6BA")), "t.csv")
    (protein,), note = place_all(read_mutations(path))
    assert [texts(variant) for variant in protein.variants] == [["M1A"]]
    assert note.splitlines() == [
        f"{path}: 5 of 6 variants do not fit their protein and are left out:",
        "  line 3: A2R: in chain A of small.pdb residue 2 is K",
        "  line 4: G4A: in chain A of small.pdb there is no residue 4",
        "  line 5: A6G: in chain A of small.pdb residue 6 lacks atoms of the backbone",
        "  line 6: K2R:L5A: in chain A of small.pdb residue 5 is V",
        "  line 7: L6BA: in chain A of small.pdb there is no residue 6B (there is 6)"]


def test_an_insertion_code_is_found_in_the_other_case(small):
    path = write(small, "L5aW\n", "list.txt")
    (protein,), _ = place_all(read_mutations(path), small / "small.pdb", chain="A")
    assert protein.changes == [[(5, 18)]]


def test_of_a_number_that_has_insertion_codes_only_they_are_named(small):
    (small / "small.pdb").write_text((small / "small.pdb").read_text().replace("   5 ", "   7 "))
    path = write(small, "M1A\nV5W\n", "list.txt")
    _, note = place_all(read_mutations(path), small / "small.pdb", chain="A")
    assert note.endswith("there is no residue 5 (there is 5A)")


def test_variants_that_change_nothing_or_have_a_stop_are_counted_and_left_out(small):
    lines = ["M1A", "M1M", "M1*", "K2*", "K2R", "K2R:M1*"]
    path = write(small, TABLE + "".join(f"small.pdb,A,{line},1\n" for line in lines), "t.csv")
    (protein,), note = place_all(read_mutations(path, measured="ddg"))
    assert [texts(variant) for variant in protein.variants] == [["M1A"], ["K2R"]]
    assert note == (f"{path}: 1 variant(s) that change nothing and 3 variant(s) with a stop are "
                    "left out")


def test_a_table_of_nothing_but_stops_is_refused(small):
    path = write(small, TABLE + "small.pdb,A,M1*,1\n", "t.csv")
    assert "1 variant(s) with a stop are left out; expected" in refusal(path, read_mutations)


def test_lines_with_and_without_a_chain_are_one_protein(tmp_path):
    (tmp_path / "one.pdb").write_text(Atoms().add("A", 1, "MET").add("A", 2, "LYS").pdb())
    path = write(tmp_path, f"{TABLE}one.pdb,A,M1A,1\none.pdb,,M1C,2\none.pdb,A,K2R,3\n", "t.csv")
    protein, = place_all(read_mutations(path))[0]
    assert [texts(variant) for variant in protein.variants] == [["M1A"], ["M1C"], ["K2R"]]
    assert protein.changes == [[(0, 0)], [(0, 1)], [(1, 14)]]


def test_a_copy_of_a_structure_is_the_same_protein(small):
    (small / "copy.pdb").write_text((small / "small.pdb").read_text())
    path = write(small, f"{TABLE}small.pdb,A,M1A,1\ncopy.pdb,A,M1C,2\nsmall.pdb,B,M1A,1\n",
                 "t.csv")
    proteins, _ = place_all(read_mutations(path))
    assert [len(protein.variants) for protein in proteins] == [2]
    rows = table_text(proteins, [np.zeros(2)], small).splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == ["small.pdb", "copy.pdb"]


def test_a_copy_with_other_numbers_is_placed_by_its_own(tmp_path):
    lines = [TABLE]
    for first in (1, 2):
        atoms = Atoms().add("A", first, "MET").add("A", first + 1, "LYS")
        (tmp_path / f"{first}.pdb").write_text(atoms.pdb())
        lines.append(f"{first}.pdb,A,M{first}A,1\n")
    proteins, _ = place_all(read_mutations(write(tmp_path, "".join(lines), "t.csv")))
    assert [protein.changes for protein in proteins] == [[[(0, 0)]], [[(0, 0)]]]


@pytest.mark.parametrize("cells, fixed, see_all, expected", [
    ("A,", None, True, ("B",)), ("A,", None, False, ()), ("A,", [], True, ()),
    ("A,B", None, False, ("B",)), ("A,B", [], True, ("B",))])
def test_context_is_that_of_the_line_then_the_option_then_all_or_none(
        cells, fixed, see_all, expected, small):
    path = write(small, f"pdb_file,mutation,chain,context\nsmall.pdb,M1A,{cells}\n", "t.csv")
    (protein,), _ = place_all(read_mutations(path), fixed=fixed, see_all=see_all)
    assert protein.complex.fixed == expected


def test_the_chain_of_a_line_comes_before_that_of_the_option(small):
    path = write(small, f"{TABLE}small.pdb,A,M1A,1\n", "t.csv")
    (protein,), _ = place_all(read_mutations(path), chain="B")
    assert protein.chain == "A"


def test_a_sequence_may_be_in_lower_case(tmp_path):
    (protein,), _ = place_on_sequences(read_mutations(
        write(tmp_path, "sequence,mutation\nmkta,K2R\n", "t.csv")))
    assert protein.sequence == "MKTA"
    assert protein.changes == [[(1, 14)]]


def test_a_scan_leaves_residues_out_that_lack_atoms_of_the_backbone(small):
    protein, = scan_structure(small / "small.pdb", chains=["A"])
    assert "6" in protein.structure.chains["A"].numbers
    numbers = {mutation.number for variant in protein.variants for mutation in variant.mutations}
    assert "5" in numbers and "6" not in numbers


@pytest.mark.parametrize("row, said", [
    ("small.pdb,A,M1,1", "found 'M1'; expected such as A12V"),
    ("small.pdb,A,M1X,1", "found 'M1X'; expected such as A12V"),
    ("small.pdb,A,m1a,1", "found 'm1a'; expected such as A12V"),
    ("small.pdb,A,M1A:M1C,1", "each of another residue"),
    ("small.pdb,A,,1", "found no mutation"),
    ("small.pdb,A,M1A,high", "found 'high' as ddg"),
    ("small.pdb,A,M1A,nan", "found 'nan' as ddg"),
    ("small.pdb,A,M1A,1_000", "found '1_000' as ddg"),
    ("no.pdb,A,M1A,1", "/no.pdb"),
    (",A,M1A,1", "there is no file (empty cell)"),
    ("small.pdb,A,M1A", "found more or fewer cells than columns")])
def test_a_wrong_line_is_named(row, said, small):
    path = write(small, f"{TABLE}{row}\n", "t.csv")
    message = refusal(path, read_mutations, measured="ddg")
    assert ", line 2: " in message and said in message


@pytest.mark.parametrize("text, said", [
    ("", "holds no variant"), (TABLE, "holds no variant"),
    ("pdb_file,mut\nx.pdb,A1V\n", "A table has the column mutation"),
    ("mutation,mutation\nA1V,A1V\n", "has the column mutation more than once"),
    ("mutation;ddg\nA1V;1\n", "separated by semicolons"),
    (">a\nMKTA\n", "is a FASTA file"),
    (b"mutation\n\xff\n", "is no text in UTF-8")])
def test_a_wrong_file_is_refused(text, said, tmp_path):
    assert said in refusal(write(tmp_path, text, "t.csv"), read_mutations)


def test_the_column_of_measured_values_needs_a_name(tmp_path):
    path = write(tmp_path, TABLE + "x.pdb,A,M1A,1\n", "t.csv")
    assert "found an empty name of the column" in refusal(path, read_mutations, measured="")


@pytest.mark.parametrize("text, said", [
    ("M1A\n", "is a list; expected a table"),
    (TABLE.replace("ddg", "x"), "has no column ddg; found")])
def test_measured_values_need_their_column(text, said, tmp_path):
    assert said in refusal(write(tmp_path, text, "t.csv"), read_mutations, measured="ddg")


@pytest.mark.parametrize("row, said", [
    ("small.pdb,Z,M1A,", "found chain Z; expected a protein chain of"),
    ("small.pdb,D,M1A,", "found chain D; expected a protein chain of"),
    ("small.pdb,,M1A,", "has the protein chains A B; expected one"),
    ("small.pdb,A,M1A,A", "found the chains A A of"),
    ("small.pdb,A,M9A,", "no variant fits its protein. Found line 2: M9A"),
    ("list.txt,A,M1A,", "is not a file with a name in")])
def test_what_a_structure_lacks_is_named(row, said, small):
    write(small, "M1A\n", "list.txt")
    path = write(small, f"pdb_file,chain,mutation,context\n{row}\n", "t.csv")
    assert said in refusal(read_mutations(path).path, lambda path: place_all(read_mutations(path)))
