"""What files of preference pairs may hold, and what is made of them."""
import json
import math
import re

import numpy as np
import pytest

from dpo.pairs import describe, read_pairs
from mpnn_cases import AB, ABSENT, GOOD, Atoms, changed, refusal, write
from proteins.csv_files import unique_keys
from proteins.letters import decode
from tool_runs import assert_named


def test_each_malformed_case_is_refused_in_the_words_that_it_names(shared, tmp_path):
    cases = json.loads((shared / "data" / "pairs_bad.json").read_text())
    (tmp_path / "pdbs").symlink_to(shared / "data" / "pdbs")
    for case in cases:
        message = refusal(write(tmp_path, case["data"]))
        words = re.findall(r"\w+", re.sub(r"\(.*?\)(:.*)?|, or.*", "", case["expect_error"]))
        assert len(words) > 2 and all(word in message for word in words), (case["name"], message)
        assert isinstance(case["data"], list) == ("item 0: " in message)
    assert len(cases) == 18


@pytest.mark.parametrize("changes, named", [
    ([dict(pdb_file=value) for value in ("pairs.json", "é\ud800.pdb", "x" * 5000)], ""),
    ([dict(preferred_seq="MKZXVLA")], "'Z' 3 preferred_seq"),
    ([dict(preferred_seq="MKSXVLA")], "3 unpreferred_seq"),
    ([dict(unpreferred_seq=value) for value in ("MKXXVLA", "MKXCVLG", "MK--VL-")], ""),
    ([dict(chain_id=value) for value in (None, " ", ["A"])], "chain_id"),
    ([{**AB, "design_chains": value} for value in ("AB", ["A", 2])], "design_chains"),
    ([{**AB, "fixed_chains": ["A"]}], "A design_chains fixed_chains"),
    ([dict(mutable_positions=value) for value in ([], [True], [1.0], ["A2"], 1)],
     "mutable_positions"),
    ([dict(mutable_positions=[value]) for value in (7, 10 ** 40)], "0..6"),
    ([dict(mutable_positions=[1, 5], mutable_ranges=[[1, 5]])], "mutable_positions mutable_ranges"),
    ([dict(mutable_ranges=value) for value in ([1, 5], [[1, 2, 3]], "1-5")], "mutable_ranges"),
    ([dict(mutable_ranges=[[1, 5], [5, 6]])], "5-6"),
    ([dict(weight=value) for value in (0, math.nan, math.inf, "2", True, None, 1e-9)], "weight")])
def test_siblings_of_the_malformed_cases_are_refused_with_their_item(small, changes, named):
    for change in changes:
        message = refusal(write(small, [GOOD, changed(**change)]))
        assert "item 1: " in message and "item 0" not in message
        assert_named(named, message)


@pytest.mark.parametrize("content, named", [
    ("[]", "[]"), (b"\x80", ""), ("[null]", "null"),
    pytest.param("[" * 100_000, "", id="nested too deeply"),
    (json.dumps(GOOD) + "\n" + json.dumps(GOOD), ".jsonl"),
    (json.dumps([GOOD])[:-2] + ', "chain_id": "B"}]', '"chain_id"')])
def test_a_file_that_holds_no_list_of_objects_is_refused(small, content, named):
    assert_named(named, refusal(write(small, content)))


def test_a_path_counts_from_the_folder_of_its_file_and_letters_go_to_the_rows_of_their_chain(
        small, monkeypatch):
    (small / "sub").mkdir()
    monkeypatch.chdir("/")
    entry = {"pdb_file": "../small.pdb", "design_chains": ["B", "A"], "fixed_chains": ["D"],
             "preferred_seq": "FGMKXXVLA", "unpreferred_seq": "FHMKXXVLA",
             "mutable_positions": [1, 2, 8]}
    pair, again = read_pairs(write(small / "sub", [entry, entry]), max_length=9)
    assert (decode(pair.chosen), decode(pair.rejected)) == ("MKXXVLAFG", "MKXXVLAFH")
    assert np.flatnonzero(pair.chain_M).tolist() == [0, 6, 8]
    assert (pair.complex.design, pair.complex.fixed) == (("A", "B"), ("D",))
    assert again.complex is pair.complex, "a structure is read once"
    assert "more than max_length 8" in refusal(small / "sub" / "pairs.json", max_length=8)


@pytest.mark.parametrize("het", [False, True], ids=["ATOM, once read as X", "HETATM, once a gap"])
def test_a_modified_residue_may_be_x_in_both_sequences_and_is_then_not_designed(small, het):
    """As in pairs that were made from the letters of the structure."""
    text = (small / "small.pdb").read_text()
    text = re.sub("ATOM  (.{11})UNK", f"{'HETATM' if het else 'ATOM  '}\\1SEP", text)
    write(small, text, "small.pdb")
    old, new = read_pairs(write(small, [GOOD, changed(preferred_seq="MKSXVLA",
                                                      unpreferred_seq="MRAXVIA")]))
    assert decode(old.complex.S) == "MKSXVLA" and old.complex.mask[2]
    assert decode(old.chosen) == "MKXXVLA" and not old.chain_M[2]
    assert decode(new.rejected) == "MRAXVIA" and new.chain_M.all()
    assert "SEP as S" in describe([old, new])


def test_pairs_that_contradict_or_repeat_one_another_are_told_by_item(small):
    other = changed(preferred_seq="MKXXVCA")
    turned = changed(preferred_seq=GOOD["unpreferred_seq"], unpreferred_seq=GOOD["preferred_seq"])
    text = describe(read_pairs(write(small, [GOOD, other, turned, GOOD])))
    assert "1 repeat an earlier one" in text
    assert "1 contradict another: item 0 against item 2" in text


def test_unresolved_rows_keep_the_letters_of_the_structure_and_unnamed_ones_may_stay_out(small):
    left_out, named = read_pairs(write(small, [
        changed(preferred_seq="MKXGVLW", unpreferred_seq="MR-PVIX"),
        changed(preferred_seq="MKS-VLA", unpreferred_seq="MRTXVIA")]))
    assert (decode(left_out.chosen), decode(left_out.rejected)) == ("MKXXVLA", "MRXXVIA")
    assert left_out.chain_M.tolist() == [True, True, False] + [True] * 4
    assert decode(named.chosen) == "MKSXVLA" and named.chain_M.all()


def test_positions_for_all_pairs_hold_by_the_numbers_of_each_file_where_a_pair_has_none(small):
    own = changed(chain_id="B", preferred_seq="GW", unpreferred_seq="FW", mutable_positions=[0])
    path = write(small, [GOOD, changed(mutable_ranges=[[1, 5]]), own])
    notes = []
    pairs = read_pairs(path, mutable="A2 A5A", notes=notes)        # B, with its own, has none
    assert notes == ["2 positions by chain and number in the file: A2 A5A"]
    designed = [np.flatnonzero(pair.chain_M).tolist() for pair in pairs]
    assert designed == [[1, 5], [1, 3, 4, 5], [0]]              # row 2 is X in both
    assert "item 0: preferred and unpreferred differ at 1 fixed positions: [5]" in refusal(
        path, mutable="A2")
    assert ("the file, or the mutable positions for all pairs:\n  item 0: the mutable positions "
            "for all pairs: position A9") in refusal(path, mutable="A9")
    copies = []          # of one structure, with other residue numbers
    for start, other in ((1, "AG"), (2, "GA")):
        atoms = Atoms().add("A", start, "ALA").add("A", start + 1, "ALA")
        (small / f"{start}.pdb").write_text(atoms.pdb())
        copies.append(changed(pdb_file=f"{start}.pdb", preferred_seq="AA", unpreferred_seq=other))
    first, second = read_pairs(write(small, copies), mutable="A2")
    assert first.complex.structure.key == second.complex.structure.key
    assert [np.flatnonzero(pair.chain_M).tolist() for pair in (first, second)] == [[1], [0]]


def test_the_key_of_a_pair_changes_with_everything_in_it_and_not_with_the_kind_of_file(small):
    entries = [changed(**change) for change in (
        {}, dict(preferred_seq="MKXXVFA"), dict(unpreferred_seq="MSXXVIA"),
        dict(mutable_positions=[1, 5]),
        dict(chain_id=ABSENT, design_chains=["A"], fixed_chains=["B"]))]
    lines = "\ufeff" + "".join(json.dumps(entry) + "\r\n" for entry in entries)    # as on Windows
    keys, of_lines = ([pair.key for pair in read_pairs(path)] for path in (
        write(small, entries), write(small, lines, "pairs.jsonl")))
    assert len(set(keys)) == 5 and all(0 <= key < 2 ** 63 for key in keys) and of_lines == keys


def test_the_first_problem_of_each_item_is_listed_but_not_without_end(small):
    wrong = [changed(pdb_file="nope.pdb"), changed(preferred_seq="Z", chain_id="Q", extra=1)]
    lines = refusal(write(small, [GOOD, *wrong * 12])).splitlines()
    assert "24 of 25 pairs" in lines[0]
    assert f"item 1: file not found: {small / 'nope.pdb'}" in lines[1]
    assert "item 2: unknown key extra" in lines[2] and "(and 11 more up to item 24)" in lines[2]
    assert len(lines) == 3
    lines = refusal(write(small, [changed(pdb_file=f"{n}.pdb") for n in range(24)])).splitlines()
    assert len(lines) == 1 + 20 + 1 and lines[-1].endswith("and 4 more")


def test_an_object_of_very_many_keys_is_read_at_once():
    """To compare each key with each other would take minutes."""
    assert len(unique_keys([(str(k), k) for k in range(100_000)])) == 100_000
