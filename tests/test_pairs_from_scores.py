"""pairs_from_scores.py: scored designs become pairs by the stated rules."""

import json

import pytest

from dpo.pairs import read_pairs
from launchers import Printed
from mpnn_cases import Atoms
from pairs_from_scores import main, make_pairs
from proteins.letters import AMINO_ACIDS, decode
from tool_runs import assert_refused

TABLE = "pdb,sequence,score,chain\n"


def run(folder, text, *options, name="p.json"):
    """Exit code for this table, beside which lies a structure x.pdb."""
    (folder / "x.pdb").write_text("")
    (folder / "t.csv").write_text(text)
    return main([str(folder / "t.csv"), str(folder / name), *options])


def test_the_best_meet_the_worst_by_the_margin():
    scores = {"AAA": [5.0], "CCC": [4.0], "DDD": [3.0], "EEE": [1.0, 2.0], "FFF": [0.0]}
    assert make_pairs(scores, 0) == [("AAA", "FFF", 5), ("CCC", "EEE", 2.5)]
    assert make_pairs(scores, 3) == [("AAA", "FFF", 5)]      # 4 - 1.5 is less than 3
    assert make_pairs(scores, 0, lower_is_better=True) == [("FFF", "AAA", 5), ("EEE", "CCC", 2.5)]
    assert make_pairs({"AAA": [1.0], "CCC": [1.0]}, 0) == []    # neither is better


def test_of_many_pairs_the_same_are_drawn_in_any_order_of_lines(tmp_path):
    rows = [f"x.pdb,AA{letter},{score},A\n" for score, letter in enumerate(AMINO_ACIDS)]
    drawn = []
    for lines in (rows, rows[::-1]):
        assert run(tmp_path, TABLE + "".join(lines), "--per_structure", "4") == 0
        drawn.append(json.loads((tmp_path / "p.json").read_text()))
    assert len(drawn[0]) == 4
    assert drawn[0] == drawn[1]


def test_drawn_pairs_are_not_those_of_the_largest_differences(tmp_path):
    """Half of 40 pairs have, in the mean, the mean difference of all."""
    letters = [a + b for a in AMINO_ACIDS for b in "ACDE"]
    rows = [f"x.pdb,{text},{score},A\n" for score, text in enumerate(letters)]
    assert run(tmp_path, TABLE + "".join(rows), "--per_structure", "20") == 0
    pairs = json.loads((tmp_path / "p.json").read_text())
    differences = [letters.index(pair["preferred_seq"]) - letters.index(pair["unpreferred_seq"])
                   for pair in pairs]
    assert sum(differences) / 20 == pytest.approx(40, abs=12)


def test_a_difference_of_the_margin_makes_a_pair_whatever_its_rounding():
    (chosen, rejected, _), = make_pairs({"AAA": [0.3], "CCC": [0.2]}, 0.1)
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
        assert "the result would overwrite" in Printed(capsys.readouterr().err)


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
        assert len(chains) == min(most, 2) and all(chain in expected for chain in chains)


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
    unscored = "x.pdb,CCC,,A\nx.pdb,EEE,nan,A\nx.pdb,FFF,#N/A,A\n"
    assert run(tmp_path, f"{TABLE}x.pdb,AAA,1,A\n,,,\n{unscored}x.pdb,DDD,2,A,\n") == 0
    pair, = json.loads((tmp_path / "p.json").read_text())
    assert (pair["preferred_seq"], pair["unpreferred_seq"]) == ("DDD", "AAA")


@pytest.mark.parametrize("text, options, named", [
    ("pdb,sequence,score,score,chain\nx.pdb,AAA,1,2,A\n", "", "score"),
    (TABLE.replace(",", ";"), "", "1"),
    (TABLE + "x.pdb,AAA,1,\n", "", "2 chain"),
    ("pdb,sequence,score,chain,context\nx.pdb,AAA,1,A,B A\n", "", "2 A B"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,AA,2,A\n", "", "3 2"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,A1A,2,A\nno.pdb,AAA,>5,A\n", "", "3 1 4 '>5'"),   # at once
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,1e308,A\n", "", "3 '1e308' score"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,1_000,A\n", "", "3 '1_000' score"),
    (TABLE + "x.pdb,AA-,1,A\nx.pdb,AAX,2,A\n", "", ""),     # equal designs
    (TABLE + "no.pdb,AAA,1,A\n", "", "2 no.pdb"),
    (TABLE + "n" * 5000 + ",AAA,1,A\n", "", "2"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2,A\n", "--margin 5", "5 --margin"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2\n", "", "3 chain"),
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2,A,B\n", "", "3 'B'"),
    ("pdb,sequence,score,chain,note,note\nx.pdb,AAA,1,A,,\n", "", "note"),
    (TABLE + "x.pdb,AAA,1,A C\n", "", "2 A C"),
    (TABLE + "x.pdb,AAA/CC,1,A\n", "", "2 A"),
    (TABLE + "x.pdb,AAA/,1,A C\n", "", "2"),
    (TABLE, "--score energy", "energy"),
    (TABLE + "x.pdb,AAA,,A\n", "", ""),
    (TABLE, "--score mpnn_score", "mpnn_score --lower_is_better"),
    ("pdb_file,mutation,ddg\nx.pdb,M1A,1\n", "--score ddg", "loss.unit=table")])
def test_a_wrong_table_is_refused_whole(tmp_path, text, options, named):
    (tmp_path / "x.pdb").write_text("")
    (tmp_path / "t.csv").write_text(text)
    assert_refused(main, f"t.csv p.json {options}", f"{'' if 'score m' in options else 't.csv'} "
                   f"{named}", tmp_path)


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


def test_duplicates_of_designs_are_told(tmp_path, capsys):
    assert run(tmp_path, TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2,A\nx.pdb,AAA,1.25,A\n") == 0
    assert "3 rows are 2 designs" in capsys.readouterr().out


def test_of_the_score_of_proteinmpnn_the_lower_is_preferred(tmp_path):
    table = TABLE.replace("score", "mpnn_score") + "x.pdb,AAA,1.5,A\nx.pdb,CCC,0.7,A\n"
    assert run(tmp_path, table, "--score", "mpnn_score", "--lower_is_better") == 0
    pair, = json.loads((tmp_path / "p.json").read_text())
    assert (pair["preferred_seq"], pair["unpreferred_seq"]) == ("CCC", "AAA")
