"""proteins/mutations.py: lists and tables of mutations, and where their residues are."""

import math
import re

import numpy as np
import pytest

from mpnn_cases import Atoms, refusal, write
from proteins.mutations import place_all, place_on_sequences, read_mutations, scan_structure
from proteins.scores import table_text
from tool_runs import assert_named

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
    assert line in message      # what was found, and how to write it
    assert_named("2 A12V:G45D:K3R", message)


@pytest.mark.parametrize("line", ["A:H18A,B:K5E", "HA18A,KB5E", "HA18A,KB5E;"])
def test_mutations_that_name_their_chains_are_one_variant_of_a_list(line, tmp_path):
    variant, = read_mutations(write(tmp_path, f"{line}\n", "list.txt")).variants
    assert texts(variant) == ["A:H18A", "B:K5E"]


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
    (small / "small.pdb").write_text((small / "small.pdb").read_text().replace("   5 ", "   4 "))
    path = write(small, "M1A\nV5W\n", "list.txt")
    _, note = place_all(read_mutations(path), small / "small.pdb", chain="A")
    assert note.endswith("there is no residue 5 (there is 5A)")


def test_rows_that_are_no_substitution_are_counted_by_kind_and_left_out(small):
    lines = ["M1A", "M1M", "M1*", "K2*", "K2R", "K2R:M1*", "WT", "M1A:K2K", "M1del", ""]
    path = write(small, TABLE + "".join(f"small.pdb,A,{line},1\n" for line in lines), "t.csv")
    (protein,), note = place_all(read_mutations(path, measured="ddg"))
    assert [texts(variant) for variant in protein.variants] == [["M1A"], ["K2R"], ["M1A"]]
    assert note == (f"{path}: no substitution: 1 wild type, 3 stops, 1 deletion, 1 variant that "
                    "changes nothing, 1 row without a mutation, 1 silent part")


def test_a_row_that_is_no_substitution_may_have_anything_in_its_other_columns(small):
    path = write(small, TABLE + "small.pdb,A,M1A,1\n,,M1*,?!\n", "t.csv")
    assert len(read_mutations(path, measured="ddg").variants) == 1


def test_a_table_of_nothing_but_stops_is_refused(small):
    path = write(small, TABLE + "small.pdb,A,M1*,1\n", "t.csv")
    assert_named("t.csv 1 stop", refusal(path, read_mutations))


def test_a_silent_part_must_have_the_letter_of_its_residue(small):
    path = write(small, TABLE + "".join(f"small.pdb,A,{mutation},1\n" for mutation in
                                        ("M1A:K2K", "M1C:W2W", "M1D:K2=", "M1E:W2=", "M1F:W4W")),
                 "t.csv")
    (protein,), note = place_all(read_mutations(path))
    assert [texts(variant) for variant in protein.variants] == [["M1A"], ["M1D"], ["M1F"]]
    assert "line 3: M1C: in chain A of small.pdb residue 2 is K\n" in note
    assert "line 5: M1E: in chain A of small.pdb residue 2 is K\n" in note


def test_silent_parts_tell_whether_the_numbers_are_those_of_the_protein(tmp_path):
    rows = "MKTAYIA,K3R:T4T\nMKTAYIA,T4A:A5A\n"      # one too large
    path = write(tmp_path, "sequence,mutation\n" + rows, "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert_named("3 K3R 1", message)      # by which numbers are shifted


# ---- values ----

@pytest.mark.parametrize("text", ["", "NA", "n/a", "N/A", "nan", "NaN", "#N/A", "null", "None", "-",
                                  "--", ".", "?", "n.d.", "nd", "ND", "<NA>", "#DIV/0!", "\u2013"])
def test_a_word_for_no_value_is_none(text, small):
    path = write(small, f"{TABLE}small.pdb,A,M1A,{text}\nsmall.pdb,A,M1C,1\n", "t.csv")
    (protein,), note = place_all(read_mutations(path, measured="ddg"))
    assert math.isnan(protein.variants[0].measured) and protein.variants[1].measured == 1
    assert note == f"{path}: not measured in ddg: 1 without a value"


@pytest.mark.parametrize("text", [">5", "<0.1", ">= 5", "<=5", "\u22655", "\u2264 -1e3", "> .5"])
def test_a_limit_is_no_value(text, small):
    path = write(small, f"{TABLE}small.pdb,A,M1A,{text}\nsmall.pdb,A,M1C,1\n", "t.csv")
    (protein,), note = place_all(read_mutations(path, measured="ddg"))
    assert math.isnan(protein.variants[0].measured)
    assert note == f"{path}: not measured in ddg: 1 with a limit, such as >5"


@pytest.mark.parametrize("text, value", [
    ("1", 1), ("-1.5", -1.5), ("+2.", 2), (".5", 0.5), ("1e-3", 1e-3), ("\u22121.5", -1.5)])
def test_a_number_is_a_value(text, value, tmp_path):
    path = write(tmp_path, f"mutation,ddg\nM1A,{text}\n", "t.csv")
    assert read_mutations(path, measured="ddg").variants[0].measured == value


@pytest.mark.parametrize("text", ["high", "1_0", "\u0661", "\uff11", "inf", "1e999", "0x1", "1 2",
                                  "\"1,5\"", ">high", "5>", "1.2\u00b10.3"])
def test_another_text_in_place_of_a_value_is_refused(text, tmp_path):
    path = write(tmp_path, f"mutation,ddg\nM1A,{text}\n", "t.csv")
    assert_named(f"2 {text.split()[0].strip(chr(34))}",
                 refusal(path, read_mutations, measured="ddg"))


def test_without_a_column_of_values_none_is_missing(small):
    path = write(small, f"{TABLE}small.pdb,A,M1A,\n", "t.csv")
    assert place_all(read_mutations(path))[1] == ""


# ---- the wild type's value ----

def test_the_wild_type_has_the_mean_of_its_rows(small):
    rows = "small.pdb,A,M1A,1\nsmall.pdb,,WT,2\nsmall.pdb,A,wt,3\nsmall.pdb,A,p.=,NA\n"
    protein, = place_all(read_mutations(write(small, TABLE + rows, "t.csv"), "ddg"))[0]
    assert protein.wild_type == 2.5


def test_a_row_of_the_wild_type_is_of_its_file_or_of_its_chain_there(small):
    (small / "one.pdb").write_text(Atoms().add("A", 1, "MET").add("A", 2, "LYS").pdb())
    rows = ("small.pdb,A,M1A,1\nsmall.pdb,B,G10A,1\none.pdb,,K2R,1\nsmall.pdb,,WT,2\n"
            "small.pdb,B,WT,4\n")
    proteins, _ = place_all(read_mutations(write(small, TABLE + rows, "t.csv"), "ddg"))
    values = {(protein.name, protein.chain): protein.wild_type for protein in proteins}
    assert values["small.pdb", "A"] == 2 and values["small.pdb", "B"] == 3
    assert math.isnan(values["one.pdb", "A"])


def test_a_row_of_the_wild_type_is_of_its_sequence(tmp_path):
    path = write(tmp_path, "sequence,mutation,ddg\nMKTA,K2R,1\nMKTA,WT,2\nGKTA,K2R,3\n", "t.csv")
    proteins, _ = place_on_sequences(read_mutations(path, "ddg"))
    assert proteins[0].wild_type == 2 and math.isnan(proteins[1].wild_type)


def test_a_row_of_the_wild_type_counts_for_the_one_protein_that_a_table_does_not_name(small):
    path = write(small, "mutation,ddg\nM1A,1\nWT,0.5\n", "t.csv")
    protein, = place_all(read_mutations(path, "ddg"), small / "small.pdb", chain="A")[0]
    assert protein.wild_type == 0.5
    protein, = place_on_sequences(read_mutations(path, "ddg"), ("w", "MKTA"))[0]
    assert protein.wild_type == 0.5


@pytest.mark.parametrize("row", ["../FOLDER/small.pdb,A,WT,2", "copy.pdb,A,WT,2", ",A,WT,2",
                                 "NA,NA,WT,2", "small.pdb,_,WT,2"])
def test_a_row_of_the_wild_type_is_of_the_one_structure_however_it_is_named(row, small):
    (small / "copy.pdb").write_text((small / "small.pdb").read_text())
    rows = f"small.pdb,A,M1A,1\n{row}\n".replace("FOLDER", small.name)
    (protein,), note = place_all(read_mutations(write(small, TABLE + rows, "t.csv"), "ddg"))
    assert protein.wild_type == 2 and "not used" not in note


@pytest.mark.parametrize("row", ["small.pdb,B,WT,2", "small.pdb,a,WT,2", "one.pdb,A,WT,2"])
def test_a_value_of_a_wild_type_of_no_protein_is_told(row, small):
    (small / "one.pdb").write_text(Atoms().add("A", 1, "MET").add("A", 2, "LYS").pdb())
    rows = f"small.pdb,A,M1A,1\nsmall.pdb,A,WT,3\n{row}\n"
    path = write(small, TABLE + rows, "t.csv")
    (protein,), note = place_all(read_mutations(path, "ddg"))
    assert protein.wild_type == 3
    assert note.splitlines()[-1] == (f"{path}: of no protein here, so not used: 1 of 2 values of "
                                     "the wild type (line 4)")


def test_of_several_structures_a_wild_type_that_names_none_has_no_protein(small):
    (small / "one.pdb").write_text(Atoms().add("A", 1, "MET").add("A", 2, "LYS").pdb())
    path = write(small, f"{TABLE}small.pdb,A,M1A,1\none.pdb,A,K2R,1\n,,WT,2\n", "t.csv")
    proteins, note = place_all(read_mutations(path, "ddg"))
    assert all(math.isnan(protein.wild_type) for protein in proteins)
    assert "so not used: 1 of 1 values of the wild type (line 4)" in note


def test_a_wild_type_without_a_sequence_is_of_the_only_one(tmp_path):
    one = "sequence,mutation,ddg\nMKTA,K2R,1\n,WT,2\n"
    (protein,), note = place_on_sequences(read_mutations(write(tmp_path, one, "t.csv"), "ddg"))
    assert protein.wild_type == 2 and "not used" not in note
    path = write(tmp_path, f"{one}GKTA,K2R,1\n", "t.csv")
    proteins, note = place_on_sequences(read_mutations(path, "ddg"))
    assert all(math.isnan(protein.wild_type) for protein in proteins)
    assert "so not used: 1 of 1 values of the wild type (line 3)" in note


def test_a_mutation_without_a_sequence_is_refused(tmp_path):
    path = write(tmp_path, "sequence,mutation\nMKTA,K2R\nNA,K2C\n", "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path)))
    assert_named("3 sequence", message)


# ---- chains in mutations ----

def test_a_chain_in_the_mutation_is_as_one_in_its_column(small):
    path = write(small, "mutation,ddg\nMA1A,1\nB:G10A,2\nWB11F,3\n", "t.csv")
    proteins, note = place_all(read_mutations(path), small / "small.pdb", chain="A")
    assert [(protein.chain, len(protein.variants)) for protein in proteins] == [("A", 1), ("B", 2)]
    assert note == ""


def test_a_column_that_names_another_chain_is_a_line_that_does_not_fit(small):
    path = write(small, f"{TABLE}small.pdb,A,MA1A,1\nsmall.pdb,A,MB1C,1\n", "t.csv")
    (protein,), note = place_all(read_mutations(path))
    assert [texts(variant) for variant in protein.variants] == [["A:M1A"]]
    assert "line 3: B:M1C: in chain A of small.pdb the mutation names chain B" in note


def test_mutations_of_two_chains_are_not_placed_on_one_sequence(tmp_path):
    path = write(tmp_path, "KA2R\nKB2C\n", "list.txt")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path), ("w", "MKTA")))
    assert_named("A B", message)


# ---- columns ----

@pytest.mark.parametrize("name", ["mutation", "Mutation", "MUTATION", "mutations", "mutant",
                                  "Mutant", "variant", "Variants", "mut", "mut_type", "aa_change",
                                  "AA change", "hgvs_pro", "HGVS"])
def test_a_column_of_mutations_has_many_names(name, tmp_path):
    path = write(tmp_path, f"id,{name},f\n7,M1A,1\n", "t.csv")
    variant, = read_mutations(path, "f").variants
    assert texts(variant) == ["M1A"] and variant.measured == 1
    assert variant.cells == {"id": "7", "mutation": "M1A", "f": "1"}


def test_the_column_mutation_comes_before_others(tmp_path):
    path = write(tmp_path, "mutant,Mutation,mutation\nx,y,M1A\n", "t.csv")
    variant, = read_mutations(path).variants
    assert variant.cells == {"mutant": "x", "Mutation": "y", "mutation": "M1A"}


def test_mutation_in_capitals_comes_before_other_names(tmp_path):
    path = write(tmp_path, "mutant,Mutation\nx,M1A\n", "t.csv")
    assert texts(read_mutations(path).variants[0]) == ["M1A"]


@pytest.mark.parametrize("header, named", [
    ("mutant,hgvs_pro", "mutant hgvs_pro"), ("Variant,mutations", "Variant mutations"),
    ("MUTATION,Mutation", "MUTATION Mutation"), ("wt,pos,mut,mut_aa", "mut mut_aa"),
    ("mutation,Chain,CHAIN", "Chain CHAIN"), ("Mutation(s)_PDB,ddg", "1 Mutation(s)_PDB,ddg"),
    ("#Pdb;Mutation(s)_PDB", "2 M1A;M1A"), ("sequence,f", "1 sequence,f"),
    ("M1A,0.5", "1 M1A,0.5"), ("residues", "1 residues")])
def test_columns_that_are_not_known_are_named(header, named, tmp_path):
    row = re.sub("[^,;]+", "M1A", header)
    path = write(tmp_path, "\n".join([header, *[row] * 200]), "t.csv")
    message = refusal(path, read_mutations)
    assert_named(named, message)
    assert len(message.splitlines()) == 1


def test_other_columns_are_known_in_any_case(small):
    path = write(small, "PDB file,Chain,Mutation,Context\nsmall.pdb,A,M1A,B\n", "t.csv")
    (protein,), _ = place_all(read_mutations(path), see_all=False)
    assert protein.chain == "A" and protein.complex.fixed == ("B",)
    head = table_text([protein], {"score": [np.zeros(1)]}, "w", small).splitlines()[0]
    assert head.startswith("pdb_file,chain,mutation,context,score")


@pytest.mark.parametrize("header, row, expected", [
    ("wildtype,position,mutation", "M,1,A", "M1A"), ("wt,pos,mut", "MET,1,ALA", "M1A"),
    ("WT_AA,Position,mut_aa", "M,1.0,A", "M1A"), ("wild_type,resid,mutant", "Met,-1B,Ala", "M-1BA"),
    ("wtAA,residue,mutAA", "L,5a,W", "L5aW"), ("mutation,wildtype,position", "M1A,K,9", "M1A"),
    ("mutant,wt,pos,mut_aa", "M1A,K,9,R", "M1A"), ("Mutant,WT,Pos,Mut", "M1A,K,9,R", "M1A")])
def test_letters_in_columns_are_joined(header, row, expected, tmp_path):
    path = write(tmp_path, f"{header},f\n{row},1\n", "t.csv")
    assert texts(read_mutations(path, "f").variants[0]) == [expected]


@pytest.mark.parametrize("header", [
    "Wild-type residue,Position,Mutant residue", "from,position,to",
    "Wild Type AA,Residue Number,Mut", "WT amino acid,Amino-acid position,mutated amino acid",
    "ref_aa,pos,alt_aa", "WT,site,MutAA"])
def test_columns_of_letters_have_many_names(header, tmp_path):
    path = write(tmp_path, f"{header}\nM,1,A\n", "t.csv")
    assert texts(read_mutations(path).variants[0]) == ["M1A"]


@pytest.mark.parametrize("header", ["wt,pos,position,mut", "wt,pos,position,mut_aa"])
def test_columns_of_letters_that_cannot_be_used_are_named_in_a_refusal(header, tmp_path):
    path = write(tmp_path, f"{header}\nM,1,1,A\nM,1,1,C\n", "t.csv")
    assert_named("pos position", refusal(path, read_mutations))
    path = write(tmp_path, f"mutation,{header}\nM1A,M,1,1,A\n", "t.csv")
    assert texts(read_mutations(path).variants[0]) == ["M1A"]


@pytest.mark.parametrize("row, kind", [
    ("M,1,M", "1 variant that changes nothing"), ("M,1,*", "1 stop"), ("M,1,Ter", "1 stop"),
    ("M,1,-", "1 deletion"), ("M,1,=", "1 variant that changes nothing"), (",,WT", "1 wild type"),
    ("M,1,", "1 row without a mutation"), ("NA,NA,NA", "1 row without a mutation"),
    ("M,1,X", "1 variant with an unknown letter")])
def test_letters_in_columns_may_be_no_substitution(row, kind, tmp_path):
    path = write(tmp_path, f"wt,pos,mut\nK,2,R\n{row}\n", "t.csv")
    assert read_mutations(path).left_out == f"{path}: no substitution: {kind}"


@pytest.mark.parametrize("row, named", [
    ("M,,A", "'M'"), (",1,A", "'1'"), ("M,A1,A", "A1"), ("M,1_0,A", "1_0"),
    ("M,\u0661,A", "\u0661"), ("MK,1,A", "MK"), ("G,G1,A", "G1"), ("M,1.5,A", "1.5")])
def test_a_letter_without_its_place_is_refused(row, named, tmp_path):
    path = write(tmp_path, f"wt,pos,mut\nK,2,R\n{row}\n", "t.csv")
    assert_named(f"3 {named}", refusal(path, read_mutations))


# ---- rows ----

@pytest.mark.parametrize("text", [
    "mutation,ddg,note\nM1A,1,\n,,\n , ,\n\nK2R,2,\n", "mutation,ddg,note\nM1A,1\nK2R,2\n",
    "mutation,ddg,note\nM1A,1,,,\nK2R,2,,\n", ",,\nmutation,ddg,note\nM1A,1,\nK2R,2,\n",
    "mutation\tddg\tnote\nM1A\t1\n\t\t\nK2R\t2\t\t\n",
    "mutation,ddg,note\rM1A,1\r,,\rK2R,2\r", "mutation,ddg,note\r\nM1A,1\r\n,,\r\nK2R,2\r\n"])
def test_cells_that_spreadsheets_leave_out_or_add_are_nothing(text, tmp_path):
    table = read_mutations(write(tmp_path, text, "t.csv"))
    assert table.left_out == ""
    assert [variant.cells for variant in table.variants] == [
        {"mutation": "M1A", "ddg": "1", "note": ""}, {"mutation": "K2R", "ddg": "2", "note": ""}]


def test_lines_are_counted_with_those_that_are_passed_over(tmp_path):
    path = write(tmp_path, "mutation,ddg\n,\n\nM1,1\n", "t.csv")
    assert_named("4 'M1'", refusal(path, read_mutations))


@pytest.mark.parametrize("top", ["# of a paper\n", "# one, two\n\n#three\n", '"# of, a paper",,\n',
                                 "# a\r\n# \"b\r\n", " # a\r# b\r"])
@pytest.mark.parametrize("header", ["mutation,ddg", "#,mutation,ddg"])
def test_comments_above_a_table_are_passed_over(top, header, tmp_path):
    path = write(tmp_path, f"{top}{header}\n{'1,' * header.count('#')}M1A,1\n", "t.csv")
    variant, = read_mutations(path, "ddg").variants
    assert texts(variant) == ["M1A"] and variant.measured == 1
    assert variant.line == len(re.findall("\r\n|\r|\n", top)) + 2


def test_below_the_header_a_number_sign_is_no_comment(tmp_path):
    path = write(tmp_path, "mutation,ddg\n# M1A,1\n", "t.csv")
    assert_named("2 M1A", refusal(path, read_mutations))


@pytest.mark.parametrize("cell", ['"see note', '"see note\nM1C,1,"see note', '"a"b'])
def test_a_quote_that_is_not_closed_swallows_no_rows(cell, tmp_path):
    rows = f"M1A,1,\nK2R,1,{cell}\nM1D,2,\nM1E,3,\n"
    path = write(tmp_path, f"mutation,ddg,note\n{rows}", "t.csv")
    assert_named("3", refusal(path, read_mutations))


@pytest.mark.parametrize("cell", ['5" gel', '"5"" gel"', '"two\nlines"', '""', "5'"])
def test_quotes_within_a_cell_are_read(cell, tmp_path):
    path = write(tmp_path, f"mutation,ddg,note\nM1A,1,{cell}\nM1C,2,\n", "t.csv")
    assert len(read_mutations(path).variants) == 2


def test_a_refusal_lists_three_lines(tmp_path):
    path = write(tmp_path, "mutation\nM1A\n" + "M1\n" * 205, "t.csv")
    heading, *lines = refusal(path, read_mutations).splitlines()
    assert_named("205", heading)
    assert [re.findall(r"\d+", line)[0] for line in lines] == ["3", "4", "5", "202"]


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
    rows = table_text(proteins, {"score": [np.zeros(2)]}, "v_48_020", small).splitlines()
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
    (protein,), _ = scan_structure(small / "small.pdb", chains=["A"])
    assert "6" in protein.structure.chains["A"].numbers
    numbers = {mutation.number for variant in protein.variants for mutation in variant.mutations}
    assert "5" in numbers and "6" not in numbers


@pytest.mark.parametrize("row, named", [
    ("small.pdb,A,M1,1", "'M1'"), ("small.pdb,A,m1a,1", "'m1a'"),
    ("small.pdb,A,M1A:M1C,1", "'M1A:M1C'"), ("small.pdb,A,M1A,high", "'high' ddg"),
    ("small.pdb,A,M1A,1_000", "'1_000' ddg"), ("no.pdb,A,M1A,1", "no.pdb"),
    (",A,M1A,1", "pdb_file"), ("small.pdb,A,M1A,1,,x", "'x' 4")])
def test_a_wrong_line_is_named(row, named, small):
    path = write(small, f"{TABLE}{row}\n", "t.csv")
    assert_named(f"2 {named}", refusal(path, read_mutations, measured="ddg"))


@pytest.mark.parametrize("text, named", [
    ("", ""), (TABLE, ""), ("mutation,mutation\nA1V,A1V\n", "mutation"),
    ("mutation,ddg,ddg\nA1V,1,2\n", "ddg"),
    (b"PK\x03\x04\x14..[Content_Types].xml\xff", "Excel"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0", "Excel"),
    ("mutation;ddg\nA1V;1\n", "semicolons"), (">a\nMKTA\n", "FASTA"),
    (b"mutation\n\xff\n", "UTF-8")])
def test_a_wrong_file_is_refused(text, named, tmp_path):
    assert_named(named, refusal(write(tmp_path, text, "t.csv"), read_mutations))


@pytest.mark.parametrize("text, column", [
    ("M1A\n", "ddg"), (TABLE.replace("ddg", "x"), "ddg"), (TABLE + "x.pdb,A,M1A,1\n", "")])
def test_measured_values_need_their_column(text, column, tmp_path):
    path = write(tmp_path, text, "t.csv")
    assert column in refusal(path, read_mutations, measured=column)


@pytest.mark.parametrize("row, named", [
    ("small.pdb,Z,M1A,", "Z small.pdb"), ("small.pdb,D,M1A,", "D small.pdb"),
    ("small.pdb,,M1A,", "small.pdb A B"), ("small.pdb,_,M1A,", "small.pdb A B chain"),
    ("small.pdb,A,M1A,in buffer", "in context small.pdb"), ("small.pdb,A,M1A,A", "A small.pdb"),
    ("small.pdb,A,M9A,", "2 M9A"), ("list.txt,A,M1A,", "list.txt")])
def test_what_a_structure_lacks_is_named(row, named, small):
    write(small, "M1A\n", "list.txt")
    path = write(small, f"pdb_file,chain,mutation,context\n{row}\n", "t.csv")
    assert_named(named, refusal(path, lambda path: place_all(read_mutations(path))))
