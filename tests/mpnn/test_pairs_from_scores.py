"""pairs_from_scores.py: scored designs become pairs by the stated rules."""

import json

import pytest

from pairs_from_scores import main, make_pairs
from sedd.sequences import decode
from mpnn.pairs import read_pairs
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
        assert f"{path.name} is the table or a structure" in capsys.readouterr().err


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


@pytest.mark.parametrize("text, options, expected", [
    ("pdb,sequence,score,score,chain\nx.pdb,AAA,1,2,A\n", [], "no column score, or two"),
    (TABLE.replace(",", ";"), [], "separated by commas or tabs"),
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
    (TABLE + "x.pdb,AAA,1,A\nx.pdb,CCC,2\n", [], "line 3: found more or fewer cells")])
def test_a_wrong_table_is_refused_whole(tmp_path, capsys, text, options, expected):
    assert run(tmp_path, text, *options) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("error: ") == 1
    assert not (tmp_path / "p.json").exists()
