"""pairs_from_scores.py: scored designs become pairs by the stated rules."""

import hashlib
import json
from pathlib import Path

import pytest

from dpo.mutation_pairs import Rules, pair_mutations
from pairs_from_scores import main, make_pairs
from proteins.letters import AMINO_ACIDS, decode
from proteins.mutations import read_mutations
from mpnn.pairs import read_pairs
from proteins.structures import NAMES
from mpnn_cases import Atoms

TABLE = "pdb,sequence,score,chain\n"


def run(folder, text, *options, name="p.json"):
    """Exit code for this table, beside which lies a structure x.pdb."""
    (folder / "x.pdb").write_text("")
    (folder / "t.csv").write_text(text)
    return main([str(folder / "t.csv"), str(folder / name), *options])


def test_the_best_meet_the_worst_by_the_margin_and_up_to_the_cap():
    scores = {"AAA": [5.0], "CCC": [4.0], "DDD": [3.0], "EEE": [1.0, 2.0], "FFF": [0.0]}
    assert make_pairs(scores, 0, None) == [("AAA", "FFF", 5), ("CCC", "EEE", 2.5)]
    assert make_pairs(scores, 3, None) == [("AAA", "FFF", 5)]      # 4 - 1.5 is less than 3
    assert make_pairs(scores, 0, 1) == [("AAA", "FFF", 5)]
    assert make_pairs(scores, 0, None, lower_is_better=True) == [("FFF", "AAA", 5),
                                                                 ("EEE", "CCC", 2.5)]
    assert make_pairs({"AAA": [1.0], "CCC": [1.0]}, 0, None) == []    # neither is better


def test_a_difference_of_the_margin_makes_a_pair_whatever_its_rounding():
    (chosen, rejected, _), = make_pairs({"AAA": [0.3], "CCC": [0.2]}, 0.1, None)
    assert (chosen, rejected) == ("AAA", "CCC")


def test_the_pairs_are_those_that_training_reads(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "scratch" / "mine").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "scratch" / "mine")     # whose ".." is scratch
    (tmp_path / "scratch" / "s.pdb").write_text(Atoms().add("A", 1, "ALA").add("A", 2, "GLY").pdb())
    table = tmp_path / "in" / "designs.csv"
    target = tmp_path / "out" / "pairs.json"
    rows = [f"../out/../s.pdb,A{letter},{score},A\n" for score, letter in enumerate("CDEF")]
    table.write_text(TABLE + "".join(rows))
    for options, weights in (([], (1, 1)), (["--weights"], (1.5, 0.5))):    # differences of 3 and 1
        assert main([str(table), str(target), *options]) == 0
        assert "2 pairs on 1 of 1 structure(s)" in capsys.readouterr().out
        pairs = [(decode(p.chosen), decode(p.rejected), p.weight) for p in read_pairs(target)]
        assert pairs == [("AF", "AC", weights[0]), ("AE", "AD", weights[1])]
    for path in (table, tmp_path / "scratch" / "s.pdb"):        # are not written over
        before = path.read_text()
        assert main([str(table), str(path)]) == 2 and path.read_text() == before
        assert "the result would overwrite" in capsys.readouterr().err


def test_a_structure_of_which_no_mutation_fits_is_not_written_over(small, capsys):
    (small / "other.pdb").write_bytes((small / "small.pdb").read_bytes())
    text = "pdb_file,chain,mutation,score\nsmall.pdb,A,M1A,1\nother.pdb,A,W999A,2\n"
    assert run(small, text, "--higher_is_better", name="other.pdb") == 2
    assert "other.pdb; expected another name" in capsys.readouterr().err
    assert (small / "other.pdb").read_bytes() == (small / "small.pdb").read_bytes()


def test_the_cap_is_for_a_structure_and_context_chains_become_fixed_chains(tmp_path):
    rows = [f"{path},{text},{score},{chain},{context}\n" for path, chain, context in (
        ("x.pdb", "A", "B C"), ("x.pdb", "B", ""), ("./x.pdb", "A", "C  B"))
            for text, score in (("AAA", 1), ("CCC", 2))]
    table = "pdb, sequence, score, chain, context\n" + "".join(rows)
    expected = [{"design_chains": ["A"], "fixed_chains": ["B", "C"]}, {"chain_id": "B"}]
    for most in (1, 9):
        assert run(tmp_path, table, "--per_structure", str(most), name="p.jsonl") == 0
        lines = (tmp_path / "p.jsonl").read_text().splitlines()     # a pair in each
        chains = [{key: entry[key] for key in entry if "chain" in key}
                  for entry in map(json.loads, lines)]
        assert chains == expected[:most]


def test_the_weight_of_a_pair_is_its_difference_by_the_mean_of_all(tmp_path):
    scores = {"AA": 0, "AC": 1, "AD": 2, "AE": 3, "AF": 4, "AG": 11}    # differences 11, 3 and 1
    rows = "".join(f"x.pdb,{sequence},{score},A\n" for sequence, score in scores.items())
    assert run(tmp_path, TABLE + rows, "--weights") == 0
    weights = [entry["weight"] for entry in json.loads((tmp_path / "p.json").read_text())]
    assert weights == pytest.approx([11 / 5, 3 / 5, 1 / 5], rel=1e-5)


def test_no_weight_is_less_than_training_takes(tmp_path):
    rows = "x.pdb,AA,0,A\nx.pdb,AC,1e9,A\ny.pdb,AA,0,A\ny.pdb,AC,1,A\n"
    for name in ("x.pdb", "y.pdb"):
        (tmp_path / name).write_text(Atoms().add("A", 1, "ALA").add("A", 2, "GLY").pdb())
    (tmp_path / "t.csv").write_text(TABLE + rows)
    assert main([str(tmp_path / "t.csv"), str(tmp_path / "p.json"), "--weights"]) == 0
    assert [pair.weight for pair in read_pairs(tmp_path / "p.json")] == pytest.approx([2, 1e-6])


def test_designs_without_a_score_are_left_out(tmp_path):
    assert run(tmp_path, TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,,A\nx.pdb,DDD,2,A\n") == 0
    pair, = json.loads((tmp_path / "p.json").read_text())
    assert (pair["preferred_seq"], pair["unpreferred_seq"]) == ("DDD", "AAA")


@pytest.mark.parametrize("text, options, expected", [
    ("pdb,sequence,score,score,chain\nx.pdb,AAA,1,2,A\n", [], "the column score more than once"),
    (TABLE.replace(",", ";"), [], "line 1 is separated by semicolons"),
    ("sequence;mutation;score\nMKT;M1A;1\n", ["--wild_type", "1", "--higher_is_better"],
     "line 1 is separated by semicolons"),
    (TABLE + "x.pdb,AAA,1,\n", [], "line 2: found no chain"),
    ("pdb,sequence,score,chain,context\nx.pdb,AAA,1,A,B A\n", [], "found the chains A B A"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,AA,2,A\n", [], "line 3: found 2 residues; expected 3"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,A1A,2,A\nno.pdb,AAA,nan,A\n", [],
     "2 lines cannot be used:\n  line 3: found 1 in the sequence"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,1e308,A\n", [], "line 3: found the score '1e308'"),
    (TABLE + "x.pdb,AA-,1,A\nx.pdb,AAX,2,A\n", [], "no two sequences of a structure differ"),
    (TABLE + "no.pdb,AAA,1,A\n", [], "line 2: there is no file no.pdb"),
    (TABLE + "n" * 5000 + ",AAA,1,A\n", [], "line 2: there is no file nnn"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2,A\n", ["--margin", "5"], "Lower --margin"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2\n", [], "line 3: found more or fewer cells"),
    (TABLE + "x.pdb,AAA,1,A C\n", [], "line 2: found 1 sequence(s), separated by /, for the "),
    (TABLE + "x.pdb,AAA/CC,1,A\n", [], "line 2: found 2 sequence(s), separated by /, for the "),
    (TABLE + "x.pdb,AAA/,1,A C\n", [], "line 2: found nothing in the sequence"),
    (TABLE, ["--score", "energy"], "has no column energy; found pdb"),
    (TABLE, ["--rounds", "1"], "found --rounds, but "),
    (TABLE, ["--designs", "."], "expected as the table designs.csv"),
    (TABLE + "x.pdb,AAA,,A\n", [], "holds no design with a score"),
    (TABLE, ["--lower_is_better", "--higher_is_better"], "expected one of them")])
def test_a_wrong_table_is_refused_whole(tmp_path, capsys, text, options, expected):
    assert run(tmp_path, text, *options) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("error: ") == 1
    assert not (tmp_path / "p.json").exists()


# ---- several designed chains ----

def test_designs_of_several_chains_are_joined_in_the_order_of_the_names(tmp_path):
    (tmp_path / "s.pdb").write_text(Atoms().add("A", 1, "ALA").add("A", 2, "GLY").add("B", 1, "SER")
                                    .add("C", 1, "TRP").pdb())
    (tmp_path / "t.csv").write_text("pdb,sequence,score,chain,context\ns.pdb,CD/E,2,A C,B\n"
                                    "s.pdb,F/GH,1,C A,B\n")
    assert main([str(tmp_path / "t.csv"), str(tmp_path / "p.json")]) == 0
    pair, = read_pairs(tmp_path / "p.json")
    assert (decode(pair.chosen), decode(pair.rejected)) == ("CDE", "GHF")
    assert pair.complex.design == ("A", "C") and pair.complex.fixed == ("B",)


# ---- measured mutations ----

def pairs_of_table(folder, text, *options):
    (folder / "m.csv").write_text(text)
    assert main([str(folder / "m.csv"), str(folder / "p.json"), *options]) == 0
    return json.loads((folder / "p.json").read_text())


DDG = "pdb_file,chain,mutation,ddg\n"
MEASURED = ("--score", "ddg", "--lower_is_better")


def test_each_mutant_meets_the_wild_type_at_the_positions_that_differ(small):
    rows = "small.pdb,A,M1A,2\nsmall.pdb,A,K2R:V5A,-1\nsmall.pdb,A,K2R,\nsmall.pdb,A,K2W,0\n"
    entries = pairs_of_table(small, DDG + rows, *MEASURED, "--against", "wild_type")
    assert entries == [
        {"pdb_file": "small.pdb", "chain_id": "A", "preferred_seq": "MKXXVLA",
         "unpreferred_seq": "AKXXVLA", "mutable_positions": [0]},
        {"pdb_file": "small.pdb", "chain_id": "A", "preferred_seq": "MRXXALA",
         "unpreferred_seq": "MKXXVLA", "mutable_positions": [1, 4]}]
    assert [pair.chain_M.sum() for pair in read_pairs(small / "p.json")] == [1, 2]


def test_the_cap_of_mutations_is_for_a_structure_of_which_two_chains_are_mutated(small):
    rows = "small.pdb,A,M1A,2\nsmall.pdb,A,K2R,1\nsmall.pdb,B,G10A,2\nsmall.pdb,B,W11A,1\n"
    entries = pairs_of_table(small, DDG + rows, *MEASURED, "--per_structure", "3",
                             "--against", "wild_type")
    assert [entry["chain_id"] for entry in entries] == ["A", "A", "B"]


def test_mutants_that_differ_by_the_margin_make_a_pair_whatever_its_rounding():
    values = {((0, 1),): 0.3, ((0, 2),): 0.2}
    found, = pair_mutations(values, Rules(against="mutants", margin=0.1), key=0)
    assert (found.better, found.worse) == (((0, 1),), ((0, 2),))


def test_in_each_round_each_mutant_meets_another(small):
    rows = "".join(f"small.pdb,A,K2{letter},{value}\n" for value, letter in enumerate("ACDEFG"))
    entries = pairs_of_table(small, DDG + rows, *MEASURED, "--against", "mutants", "--rounds", "1")
    met = sorted(entry[key][1] for entry in entries
                 for key in ("preferred_seq", "unpreferred_seq"))
    assert met == list("ACDEFG")
    assert all(entry["preferred_seq"] < entry["unpreferred_seq"] for entry in entries)
    assert all(entry["mutable_positions"] == [1] for entry in entries)
    again = pairs_of_table(small, DDG + rows, *MEASURED, "--against", "mutants", "--rounds", "1")
    more = pairs_of_table(small, DDG + rows, *MEASURED, "--against", "mutants", "--rounds", "9")
    assert again == entries and len(more) > 6
    assert len({(entry["preferred_seq"], entry["unpreferred_seq"]) for entry in more}) == len(more)


@pytest.mark.parametrize("options, letters", [
    (["--lower_is_better"], "KA KC KD"), (["--higher_is_better"], "DK CK AK"),
    (["--lower_is_better", "--margin", "2"], "KA KC"),
    (["--lower_is_better", "--per_structure", "1"], "KA"),
    (["--lower_is_better", "--wild_type", "2.5"], "CK DK KA")])
def test_pairs_with_the_wild_type_follow_the_rules(options, letters, small):
    rows = "".join(f"small.pdb,A,K2{letter},{value}\n"
                   for letter, value in (("A", 3), ("C", 2.5), ("C", 1.5), ("D", 1)))
    entries = pairs_of_table(small, DDG + rows, "--score", "ddg", "--against", "wild_type",
                             *options)
    found = {entry["preferred_seq"][1] + entry["unpreferred_seq"][1] for entry in entries}
    assert found == set(letters.split())


FITNESS = "sequence,mutation,score\n" + "".join(
    f"MKAAVLA,K2{letter},{value / 12}\n" for value, letter in enumerate("ACDEFGHILMNP"))


def test_a_wild_type_that_is_worse_than_all_variants_is_refused(tmp_path, capsys):
    """Its score, 0, was not given: the table's is likely 1."""
    (tmp_path / "m.csv").write_text(FITNESS)
    assert main([str(tmp_path / "m.csv"), str(tmp_path / "p.json"), "--higher_is_better"]) == 2
    assert "is worse than the mutant in 11 of 11 pairs" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("options, said", [
    (["--wild_type", "0"], "wild type: score 0 (--wild_type), better than 0 of 11 variants"),
    (["--wild_type", "1"], "wild type: score 1 (--wild_type), better than 12 of 12 variants"),
    (["--against", "mutants"], "preferred: the higher score")])
def test_what_is_said_of_the_wild_type_is_taken(options, said, tmp_path, capsys):
    pairs_of_table(tmp_path, FITNESS, "--higher_is_better", *options)
    assert said in capsys.readouterr().out.splitlines()


def test_context_chains_of_mutations_become_fixed_chains(small):
    entry, = pairs_of_table(small, "pdb_file,chain,context,mutation,score\n"
                                   "small.pdb,B,A,G10W,1\n", "--higher_is_better")
    assert entry["design_chains"] == ["B"] and entry["fixed_chains"] == ["A"]
    assert entry["preferred_seq"] == "WW" and entry["mutable_positions"] == [0]


def test_mutations_of_a_structure_of_ca_atoms_become_pairs_for_a_ca_only_model(small, capsys):
    atoms = Atoms().add("A", 1, "MET", ["CA"]).add("A", 2, "LYS", ["CA"])
    (small / "ca.pdb").write_text(atoms.pdb())
    entry, = pairs_of_table(small, DDG + "ca.pdb,A,M1A,2\n", *MEASURED, "--ca_only")
    assert (entry["preferred_seq"], entry["unpreferred_seq"]) == ("MK", "AK")
    assert main([str(small / "m.csv"), str(small / "q.json"), *MEASURED]) == 2
    assert "to pairs_from_scores.py, --ca_only" in capsys.readouterr().err


@pytest.mark.parametrize("text, options, said", [
    (DDG + "small.pdb,A,M1A,1\n", ["--score", "ddg"], "expected --higher_is_better or "),
    ("mutation,score\nM1A,1\n", ["--lower_is_better"], "has no column pdb_file"),
    (DDG + "small.pdb,A,A1M,1\n", MEASURED, "no variant fits its protein"),
    (DDG + "small.pdb,A,M1A,0\n", MEASURED, "no two sequences of a structure differ"),
    (DDG + "small.pdb,A,M1A,x\n", MEASURED, "line 2: found 'x' as ddg"),
    (DDG + "small.pdb,A,M1A,1\n", [*MEASURED, "--rounds", "-1"], "found --rounds -1"),
    (DDG + "small.pdb,A,M1A,1\n", [*MEASURED, "--wild_type", "nan"], "found --wild_type nan")])
def test_a_wrong_table_of_mutations_is_refused(text, options, said, small, capsys):
    (small / "m.csv").write_text(text)
    assert main([str(small / "m.csv"), str(small / "p.json"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (small / "p.json").exists()


TWICE = "small.pdb,A,M1A,{}\nsmall.pdb,A,K2R,3\nsmall.pdb,A,M1A,{}\n"


def test_a_line_tells_of_duplicates_and_how_far_they_differ(small, capsys):
    (small / "m.csv").write_text(DDG + TWICE.format(2, -1.5))
    assert main([str(small / "m.csv"), str(small / "p.json"), *MEASURED]) == 0
    assert ("3 rows are 2 variants (their means count); those of one differ by up to 3.5"
            in capsys.readouterr().out.splitlines())


def test_without_duplicates_there_is_no_line_of_them(small, capsys):
    (small / "m.csv").write_text(DDG + "small.pdb,A,M1A,1\nsmall.pdb,A,M1C,2\nsmall.pdb,A,M1D,\n"
                                 "small.pdb,A,M1D,\n")
    assert main([str(small / "m.csv"), str(small / "p.json"), *MEASURED]) == 0
    assert "rows are" not in capsys.readouterr().out


def test_duplicates_whose_means_make_no_pair_are_told(small, capsys):
    (small / "m.csv").write_text(DDG + "small.pdb,A,M1A,2\nsmall.pdb,A,M1A,-2\n")
    assert main([str(small / "m.csv"), str(small / "p.json"), *MEASURED]) == 2
    assert "2 rows are 1 variants" in capsys.readouterr().err


def test_duplicates_of_designs_are_told(tmp_path, capsys):
    assert run(tmp_path, TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2,A\nx.pdb,AAA,1.25,A\n") == 0
    assert "3 rows are 2 designs" in capsys.readouterr().out


def test_mutations_of_which_most_do_not_fit_are_refused(small, capsys):
    rows = "".join(f"small.pdb,A,{text},1\n" for text in ("M1A", "A2W", "W5A", "L6R"))
    (small / "m.csv").write_text(DDG + rows)
    assert main([str(small / "m.csv"), str(small / "p.json"), *MEASURED]) == 2
    assert "3 of 4 variants do not fit" in capsys.readouterr().err
    assert not (small / "p.json").exists()


# Of 1-letter chains, the SHA-256 of these letters begins with a byte below 51 (a fifth of 256).
HELD_OUT = [letter for letter in AMINO_ACIDS if hashlib.sha256(letter.encode()).digest()[0] < 51]


@pytest.fixture
def one_residue_each(tmp_path):
    """A folder with structures of one residue, and a table of two mutations of each."""
    rows = []
    for letter, name in zip(AMINO_ACIDS, NAMES):
        (tmp_path / f"{letter}.pdb").write_text(Atoms().add("A", 1, name).pdb())
        others = AMINO_ACIDS.replace(letter, "")
        rows += [f"{letter}.pdb,A,{letter}1{others[0]},1", f"{letter}.pdb,A,{letter}1{others[1]},"]
    (tmp_path / "m.csv").write_text(DDG + "\n".join(rows) + "\n")
    return tmp_path


def held_out_run(folder, *options):
    """(letters of the structures in the pairs, rows of the table that is held out)."""
    (folder / "out").mkdir()
    pairs = folder / "out" / "p.json"
    assert main([str(folder / "m.csv"), str(pairs), *MEASURED, "--hold_out", "0.2", *options]) == 0
    trained = {Path(entry["pdb_file"]).stem for entry in json.loads(pairs.read_text())}
    table = read_mutations(folder / "out" / "p_held_out.csv", "ddg")
    return trained, [variant.cells for variant in table.variants]


def test_whole_proteins_are_held_out_by_the_hash_of_their_sequence(one_residue_each):
    trained, rows = held_out_run(one_residue_each)
    assert {row["mutation"][0] for row in rows} == set(HELD_OUT)
    assert trained == set(AMINO_ACIDS) - set(HELD_OUT)


def test_the_table_held_out_has_all_lines_of_its_proteins(one_residue_each):
    _, rows = held_out_run(one_residue_each)
    lines = [",".join(row.values()).removeprefix("../") for row in rows]
    expected = [line for line in (one_residue_each / "m.csv").read_text().split()
                if line[0] in HELD_OUT and line[1] == "."]
    assert lines == expected


def test_a_protein_held_out_with_a_relative_in_the_pairs_is_told(small, capsys):
    for letters, name in (("ACDEFGHIK", "one"), ("ACDEFGHIR", "two")):
        atoms = Atoms()
        for number, letter in enumerate(letters, 1):
            atoms.add("A", number, NAMES[AMINO_ACIDS.index(letter)])
        (small / f"{name}.pdb").write_text(atoms.pdb())
    (small / "m.csv").write_text(DDG + "one.pdb,A,A1C,1\ntwo.pdb,A,A1C,1\n")
    command = [str(small / "m.csv"), str(small / "p.json"), *MEASURED, "--hold_out", "0.742"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "1 of 1 proteins held out have a relative" in said and ".pdb (" in said


def test_the_table_held_out_finds_structures_through_a_link_to_a_folder(one_residue_each):
    far = one_residue_each / "far" / "away"
    far.mkdir(parents=True)
    (one_residue_each / "near").symlink_to(far)          # whose ".." is far
    for path in one_residue_each.glob("*.pdb"):
        path.rename(one_residue_each / "far" / path.name)
    text = (one_residue_each / "m.csv").read_text()
    rows = [line if line == DDG.strip() else f"near/../{line}" for line in text.split()]
    (one_residue_each / "m.csv").write_text("\n".join(rows) + "\n")
    held_out_run(one_residue_each)     # read_mutations refuses files that are not there


def test_nothing_is_written_where_the_pairs_cannot_be(one_residue_each, capsys):
    folder = one_residue_each / "p.json"
    folder.mkdir()
    assert main([str(one_residue_each / "m.csv"), str(folder), *MEASURED, "--hold_out", "0.2"]) == 2
    assert "is a folder or a device" in capsys.readouterr().err
    assert not (one_residue_each / "p_held_out.csv").exists()


def test_the_table_held_out_does_not_overwrite_the_table_that_is_read(one_residue_each, capsys):
    table = one_residue_each / "p_held_out.csv"
    (one_residue_each / "m.csv").rename(table)
    before = table.read_text()
    pairs = one_residue_each / "p.json"
    assert main([str(table), str(pairs), *MEASURED, "--hold_out", "0.2"]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert table.read_text() == before and not pairs.exists()


@pytest.mark.parametrize("option, said", [
    (["1.5"], "between 0 and 1"), (["0.2"], "expected some on both sides")])
def test_a_part_that_cannot_be_held_out_is_refused(option, said, small, capsys):
    (small / "m.csv").write_text(DDG + "small.pdb,A,M1A,1\n")
    command = [str(small / "m.csv"), str(small / "p.json"), *MEASURED, "--hold_out", *option]
    assert main(command) == 2
    assert said in capsys.readouterr().err and not (small / "p.json").exists()


# ---- mutations of sequences ----

def test_mutations_of_sequences_become_pairs_without_structures(tmp_path):
    (tmp_path / "m.csv").write_text(
        "sequence,mutation,score\nMKTA,K2R,1\nMKTA,A4G:M1L,-1\nGGSW,W4Y,2\n")
    assert main([str(tmp_path / "m.csv"), str(tmp_path / "p.json"), "--higher_is_better",
                 "--against", "wild_type"]) == 0
    assert json.loads((tmp_path / "p.json").read_text()) == [
        {"preferred_seq": "MKTA", "unpreferred_seq": "LKTG", "group": "MKTA"},
        {"preferred_seq": "MRTA", "unpreferred_seq": "MKTA", "group": "MKTA"},
        {"preferred_seq": "GGSY", "unpreferred_seq": "GGSW", "group": "GGSW"}]


def test_structures_are_left_out_of_pairs_of_sequences(small):
    (small / "m.csv").write_text("pdb_file,chain,mutation,score\nsmall.pdb,A,K2R,1\n")
    command = [str(small / "m.csv"), str(small / "p.json"), "--higher_is_better"]
    assert main([*command, "--sequences"]) == 0
    pair, = json.loads((small / "p.json").read_text())
    assert pair == {"preferred_seq": "MRXXVLA", "unpreferred_seq": "MKXXVLA",
                    "group": "MKXXVLA"}


@pytest.mark.parametrize("line, said", [
    ("MKTA,K3R,1", "residue 3 is T"), ("MK-A,K2R,1", "'-' at position 3"),
    ("MKTA,K9R,1", "there is no residue 9"),
    ("atggcattcgaccgtaagctg,A1R,1", "found nucleotides (ATGGCATTCGACCGTAAGCT...)")])
def test_mutations_that_do_not_fit_their_sequence_are_refused(line, said, tmp_path, capsys):
    (tmp_path / "m.csv").write_text(f"sequence,mutation,score\n{line}\n")
    assert main([str(tmp_path / "m.csv"), str(tmp_path / "p.json"), "--higher_is_better"]) == 2
    assert said in capsys.readouterr().err
