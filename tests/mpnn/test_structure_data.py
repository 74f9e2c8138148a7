"""structure_data: rows of PDB and mmCIF files, what pair files may hold, split, batches."""

import gzip
import json
import math
import re
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch

from sedd.sequences import decode, encode
from mpnn.structures import (BACKBONE, Chain, Complex, Pair, Structure, collate_complexes, describe,
                             load_pairs, parse_positions, plan_epoch, read_pairs, read_structure,
                             split_pairs)


class Atoms(list):
    """Records of a structure, written as PDB or mmCIF text.

    Where no coordinates are given they are counted up, so that each record is told from others.
    """

    def add(self, chain, number, name, atoms=BACKBONE, code="", het=False, altloc="", model=1,
            xyz=None):
        for k, atom in enumerate(atoms):
            x = len(self) + 0.125
            self.append((chain, number, name, atom, code, het, altloc, model,
                         (x, -x, x / 2) if xyz is None else xyz[k]))
        return self

    def pdb(self):
        lines = []
        for i, (chain, number, name, atom, code, het, altloc, model, xyz) in enumerate(self):
            if i and model != self[i - 1][7]:
                lines += ["ENDMDL", f"MODEL {model:8}"]
            lines.append(f"{'HETATM' if het else 'ATOM':6}{i + 1:5} {' ' + atom:4}{altloc:1}"
                         f"{name:>3} {chain:1}{number:4}{code:1}   "
                         f"{''.join(f'{value:8.3f}' for value in xyz)}  1.00 10.00{atom[0]:>12}")
        return "\n".join(lines) + "\nEND\n"

    def mmcif(self):
        keys = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
                "label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy "
                "B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num").split()
        lines = [f"{'HETATM' if het else 'ATOM'} {i + 1} {atom[0]} {atom} {altloc or '.'} {name} "
                 f"L{chain} 1 {i + 500} {code or '?'} {' '.join(f'{value:.3f}' for value in xyz)} "
                 f"1.0 10.0 {number} {chain} {model}"
                 for i, (chain, number, name, atom, code, het, altloc, model, xyz)
                 in enumerate(self)]
        return "\n".join(["data_test", "loop_", *(f"_atom_site.{key}" for key in keys),
                          *lines]) + "\n"


def write(folder, data, name="pairs.json"):
    text = data if isinstance(data, (bytes, str)) else json.dumps(data)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def refusal(path, read=read_pairs, **options):
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def read_text(tmp_path, name, text):
    return read_structure(write(tmp_path, text, name))


# ---- structures ----

@pytest.mark.parametrize("name", ["monomer_official", "complex_small", "odd_pdb_small"])
def test_rows_of_a_file_equal_those_of_the_official_code(shared, tmp_path, name):
    fixture = torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)
    case = fixture["cases"][name]
    text = case.get("pdb_text") or (shared / "data" / "pdbs" / case["pdb"]).read_text()
    mmcif = gemmi.read_pdb_string(text).make_mmcif_document().as_string()
    structures = read_text(tmp_path, "s.pdb", text), read_text(tmp_path, "s.cif", mmcif)
    assert structures[0].key == structures[1].key
    for structure in structures:
        design = case.get("design_chains", case["chain_order"])[::-1]   # in any order
        complex = Complex(structure, design, case.get("fixed_chains", ()))
        for key, values in collate_complexes([complex]).items():
            expected = case["inputs"]["chain_encoding_all" if key == "chain_id" else key]
            assert torch.equal(values, expected) and values.dtype == expected.dtype
        assert list(complex.design + complex.fixed) == case["chain_order"]
        assert complex.n_designed == case["inputs"]["chain_M"].sum()


GAPS = (Atoms().add("A", 5, "GLY").add("A", -1, "ALA").add("A", 3, "SER", code="B")
        .add("A", 3, "THR").add("A", 3, "CYS", code="A").add("B", 1, "TRP")
        .add("A", 7, "ASP", code="C"))
ALTERNATIVES = (Atoms().add("A", 1, "SER", altloc="B").add("A", 1, "SER", altloc="A")
                .add("A", 2, "THR", ["N", "CA"], altloc="A").add("A", 2, "VAL", altloc="B")
                .add("A", 3, "GLY", ["N"]).add("A", 3, "GLY", model=2).add("A", 4, "TRP", model=2))


# Letters, and the record that each row begins with, or those of its four atoms.
@pytest.mark.parametrize("atoms, letters, expected", [
    (GAPS, "AXXXTCSXGXD", [4, None, None, None, 12, 16, 8, None, 0, None, 24]),
    (ALTERNATIVES, "STGW", [0, [8, 9, 12, 13], [14, 16, 17, 18], 19])],
    ids=["numbers left out, insertions", "the first alternative and model, atom by atom"])
def test_rows_of_both_formats_hold_the_letters_and_atoms_of_the_file_and_nothing_around_them(
        tmp_path, atoms, letters, expected):
    lines = atoms.pdb().splitlines()
    lines.insert(8, "TER\nEND")
    odd = b"REMARK \xe9\r\n" + "\r\n".join(lines).encode() + b"\r\nCONECT 1 2"
    for name, text in (("s.pdb", atoms.pdb()), ("s.cif", atoms.mmcif()), ("t.pdb", odd),
                       ("u.ent.gz", gzip.compress(atoms.pdb().encode())),
                       ("v.pdb", "\ufeff" + atoms.pdb())):
        chain, *others = read_text(tmp_path, name, text).chains.values()
        assert [decode(other.S) for other in others] == ["W"] * (atoms is GAPS)
        assert decode(chain.S) == letters and chain.X.dtype == np.float32
        for x, resolved, row in zip(chain.X[:, :, 0], chain.resolved, expected, strict=True):
            records = list(range(row, row + 4)) if isinstance(row, int) else row
            assert (x.astype(int).tolist() if resolved else None) == records
    if atoms is GAPS:
        assert chain.numbers == ("-1", None, None, None, "3", "3A", "3B", None, "5", None, "7C")
        assert not chain.X[~chain.resolved].any()


def test_an_unknown_coordinate_of_mmcif_is_a_missing_atom_and_its_error_no_part_of_it(tmp_path):
    text = Atoms().add("AB-2", 1, "ALA").add("AB-2", 2, "GLY").mmcif()
    text = text.replace(" 0.125 ", " ? ").replace(" 4.125 ", " 4.125(7) ")
    chain = read_text(tmp_path, "s.cif", text).chains["AB-2"]
    assert chain.resolved.tolist() == [False, True] and chain.X[1, 0, 0] == 4.125


ONE, ONE_CIF = Atoms().add("A", 1, "ALA").pdb(), Atoms().add("A", 1, "ALA").mmcif()


@pytest.mark.parametrize("name, content, says", [
    ("s.pdb", b"\0\1\2", "no ATOM"), ("s.txt", ONE, ".mmcif"),
    ("s.pdb", ONE.replace("   0.125", "  0.12.5"), "columns 31 to 54"),
    ("s.pdb", ONE.replace("A   1 ", "A   x "), "columns 23 to 26"),
    ("s.pdb", "".join(Atoms().add("A", i, "ALA").pdb() for i in (1, 1)), "residue A 1 comes twice"),
    ("s.pdb.gz", gzip.compress(ONE.encode(), mtime=0)[:-9], "end-of-stream"),
    ("s.cif", ONE, "cannot be read"), ("s.cif", "data_x\n_a.b 1\n", "0 data blocks"),
    ("s.cif", Atoms().add("A", 1, "ALA").add("A", 900_000, "ALA").mmcif(), "100,000 rows"),
    ("s.cif", Atoms().add("A", "?", "ALA").mmcif(), "auth_seq_id is '?'; expected a number"),
    ("s.cif", ONE_CIF.replace(" 0.125 ", " foo "), "Cartn_x is 'foo'; expected a number"),
    ("s.cif", ONE_CIF.replace("group_PDB", "group"), "no group_PDB"),
    ("s.cif", ONE_CIF.replace("label_alt_id", "alt"), "no label_alt_id"),
    ("s.cif", ONE_CIF.replace(" 0.125 ", " 1e30 "), "coordinate of 1e+30; expected Angstrom")])
def test_a_structure_file_that_cannot_be_read_is_refused_with_the_reason(
        tmp_path, name, content, says):
    assert says in refusal(write(tmp_path, content, name), read_structure)


# ---- positions on a command line ----

# Chain A has rows 1, 2, 3 (unknown residue), 4 (gap), 5, 5A, 6 (without O); B 10, 11; D is DNA.
SMALL = (Atoms().add("A", 1, "MET").add("A", 2, "LYS").add("A", 3, "UNK").add("A", 5, "VAL")
         .add("A", 5, "LEU", code="A").add("A", 6, "ALA", BACKBONE[:3]).add("B", 10, "GLY")
         .add("B", 11, "TRP").add("D", 1, " DA", ["P"]))


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.pdb").write_text(SMALL.pdb())
    return tmp_path


def test_positions_are_read_by_chain_and_number_or_by_index_and_say_which(small):
    structure = read_structure(small / "small.pdb")
    for text, chains, positions, understood in (
            ("A5A", "AB", [5], "chain and number"), ("A3-A5A", "AB", [2, 3, 4, 5], "chain"),
            ("B10 A2", "AB", [1, 7], "chain"), ("B10 A2", "BA", [0, 3], "chain"),
            ("A1, A2 A6-B10", "AB", [0, 1, 6, 7], "chain"), ("2-4,6", "AB", [2, 3, 4, 6], "0-bas")):
        found, note = parse_positions(text, structure, list(chains))
        assert found.tolist() == positions and understood in note
    for text in ("A4", "C1", "", ", ", "A5-A2", "A1 A1", "A1-A3 A2", "A1 3", "9", "5-2", "-1",
                  "A1-3", "1.5", "A05", "99999999999"):
        with pytest.raises(ValueError, match="position"):
            parse_positions(text, structure, ["A", "B"])


def test_a_position_that_two_readings_fit_is_refused_and_a_negative_number_is_none(tmp_path):
    atoms = Atoms().add("1", 13, "ALA").add("1", 12, "SER").add("1", 2, "CYS").add("11", 2, "GLY")
    structure = read_text(tmp_path, "s.cif", atoms.add("A", -3, "ALA").mmcif())
    for text in ("112", "12"):          # chain 1, 12 or chain 11, 2; chain 1, 2 or number 12 from 0
        with pytest.raises(ValueError, match="ambiguous"):
            parse_positions(text, structure, ["1", "11"])
    assert parse_positions("112 113", structure, ["1"])[0].tolist() == [10, 11]
    assert parse_positions("A-3-A-3", structure, ["A"])[0].tolist() == [0]
    atoms = Atoms().add("", 1, "ALA").add("A", 12, "GLY")
    structure = read_text(tmp_path, "s.pdb", atoms.pdb())
    assert parse_positions("1", structure, list(structure.chains))[0].tolist() == [1]   # from 0
    with pytest.raises(ValueError, match="-A12 is not there"):
        parse_positions("-A12", structure, list(structure.chains))


# ---- pairs ----

GOOD = {"pdb_file": "small.pdb", "preferred_seq": "MKXXVLA", "unpreferred_seq": "MRXXVIA",
        "chain_id": "A"}
ABSENT = object()
AB = {"chain_id": ABSENT, "design_chains": ["A", "B"], "preferred_seq": "MKXXVLAGW",
      "unpreferred_seq": "MRXXVIAGW"}


def changed(**changes):
    """GOOD with some keys changed, or taken out."""
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not ABSENT}


def test_each_malformed_case_is_refused_in_the_words_that_it_names(shared, tmp_path):
    cases = json.loads((shared / "data" / "pairs_bad.json").read_text())
    (tmp_path / "pdbs").symlink_to(shared / "data" / "pdbs")
    for case in cases:
        message = refusal(write(tmp_path, case["data"]))
        words = re.findall(r"\w+", re.sub(r"\(.*?\)(:.*)?|, or.*", "", case["expect_error"]))
        assert len(words) > 2 and all(word in message for word in words), (case["name"], message)
        assert isinstance(case["data"], list) == ("item 0: " in message)
    assert len(cases) == 18


@pytest.mark.parametrize("changes, says", [
    ([dict(pdb_file=value) for value in ("pairs.json", "é\ud800.pdb", "x" * 5000)], "item 1: "),
    ([dict(preferred_seq="MKZXVLA")], "'Z' at position 3 of preferred_seq, counted from 1"),
    ([dict(preferred_seq="MKSXVLA")], "resolved position, 3 of unpreferred_seq, counted from 1: "),
    ([dict(unpreferred_seq=value) for value in ("MKXXVLA", "MKXCVLG", "MK--VL-")], "no preference"),
    ([dict(chain_id=value) for value in (None, " ", ["A"])], "chain_id is"),
    ([{**AB, "design_chains": value} for value in ("AB", ["A", 2])], "list of names"),
    ([{**AB, "fixed_chains": ["A"]}], "chain A is in design_chains and in fixed_chains"),
    ([dict(mutable_positions=value) for value in ([], [True], [1.0], ["A2"], 1)], "whole numbers"),
    ([dict(mutable_positions=[value]) for value in (7, 10 ** 40)], "outside 0..6"),
    ([dict(mutable_positions=[1, 5], mutable_ranges=[[1, 5]])], "given together"),
    ([dict(mutable_ranges=value) for value in ([1, 5], [[1, 2, 3]], "1-5")], "whole numbers"),
    ([dict(mutable_ranges=[[1, 5], [5, 6]])], "range 5-6 repeats"),
    ([dict(weight=value) for value in (0, math.nan, math.inf, "2", True, None, 1e-9)],
     "expected a number above 0")])
def test_siblings_of_the_malformed_cases_are_refused_with_their_item(small, changes, says):
    for change in changes:
        message = refusal(write(small, [GOOD, changed(**change)]))
        assert "item 1: " in message and "item 0" not in message and says in message


@pytest.mark.parametrize("content, says", [
    ("[]", "found []"), (b"\x80", "not valid JSON"), ("[null]", "found null"),
    pytest.param("[" * 100_000, "not valid JSON", id="nested too deeply"),
    (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "name it .jsonl"),
    (json.dumps([GOOD])[:-2] + ', "chain_id": "B"}]', 'key "chain_id" given twice')])
def test_a_file_that_holds_no_list_of_objects_is_refused(small, content, says):
    assert says in refusal(write(small, content))


def test_a_weight_of_1_is_that_of_a_pair_without_and_another_makes_other_data(small):
    def loaded(*weights):
        entries = [changed(preferred_seq=f"MKXXV{letter}A", weight=weight)
                   for letter, weight in zip("LVC", weights)]
        return load_pairs(section(write(small, entries), 0), seed=0)

    plain, ones, twos = loaded(*[ABSENT] * 3), loaded(1, 1.0, 1), loaded(2, ABSENT, 0.5)
    assert plain.fingerprint == ones.fingerprint != twos.fingerprint
    assert [pair.weight for pair in twos.train] == [2, 1, 0.5]
    # what is kept of a pair for later runs, its orders and reference scores, stays
    assert [pair.key for pair in twos.train] == [pair.key for pair in plain.train]
    assert "2 with a weight other than 1; weights 0.5 to 2" in twos.description[0]


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
    path, notes = write(small, [GOOD, changed(mutable_ranges=[[1, 5]]), own]), []
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


# ---- split, plan, batches ----

def made(length, n_pairs, number=0, chosen=None):
    """Pairs with different random sequences on one structure of this length."""
    rng = np.random.default_rng([length, number])
    X, everywhere = rng.normal(size=(length, 4, 3)).astype(np.float32), np.ones(length, bool)
    chain = Chain(np.zeros(length, np.uint8), X, everywhere, tuple(map(str, range(length))))
    complex = Complex(Structure(f"s{number}", {"A": chain}), ["A"])
    return [Pair(complex, one if chosen is None else chosen, other, everywhere)
            for one, other in rng.integers(0, 20, (n_pairs, 2, length)).astype(np.uint8)]


def keys(pairs):
    return {pair.complex.structure.key for pair in pairs}


def sequences(pairs, first=None):
    """The first letters, or all, of every sequence."""
    return {letters[:first].tobytes() for pair in pairs for letters in (pair.chosen, pair.rejected)}


@pytest.mark.parametrize("n, fraction, n_val", [(2, 0.1, 1), (16, 0.1, 2), (3, 0.9, 2)])
def test_a_tenth_of_the_structures_at_least_one_is_held_out_whole_by_seed_and_content(
        n, fraction, n_val):
    pairs, copies = ([pair for i in range(n) for pair in made(30, 1 + i % 3, i)] for _ in range(2))
    train, val, warnings = split_pairs(pairs, fraction, seed=3)
    assert len(keys(val)) == n_val and not keys(train) & keys(val)
    # told where it is not within a factor of two of what was asked for
    assert (not warnings) == (fraction / 2 <= len(val) / len(pairs) <= 2 * fraction)
    assert sorted(map(id, train + val)) == sorted(map(id, pairs))
    for others in (pairs[::-1], pairs + copies):
        assert keys(split_pairs(others, fraction, seed=3)[1]) == keys(val)
    held_out = {frozenset(keys(split_pairs(pairs, fraction, seed)[1])) for seed in range(8)}
    assert len(held_out) > min(n, 6) - 2


def section(path, val_fraction, val_data=None):
    return SimpleNamespace(train_data=path, val_fraction=val_fraction, val_data=val_data,
                           max_length=None, mutable_positions=None, mutable_ranges=None)


def test_a_start_tells_of_an_odd_split_of_shared_structures_and_of_chains_left_out(shared):
    path, other = (shared / "data" / f"pairs_{name}.json" for name in ("multichain", "monomer"))

    def start(val_data):
        data = load_pairs(section(path, 0.1, val_data), seed=0)
        return len(data.val), *(line for line in data.description if line.startswith("ATTENTION"))

    n_val, split, partial = start(None)
    (_, repeated, _), (_, _) = start(path), start(other)
    assert f"{n_val} of 28 pairs" in split and "--val_data" in split
    assert re.search(r"2 structures are in training and validation, first \S*3HTN.pdb", repeated)
    assert "leave other protein chains" in partial and "fixed_chains" in partial


def test_a_single_structure_is_split_by_sequence_with_a_warning_or_refused():
    pairs = made(30, 40)
    links = [Pair(a.complex, a.rejected, b.chosen, a.chain_M)
             for a, b in zip(pairs[:9], pairs[1:9])]                # chain 9 pairs together
    for all_pairs in (pairs, pairs + links):
        train, val, (warning,) = split_pairs(all_pairs, 0.1, seed=0)
        assert "one structure" in warning and 3 <= len(val) <= 4
        assert len(train) + len(val) == len(all_pairs) and not sequences(train) & sequences(val)
    assert [len(side) for side in split_pairs(pairs[:2], 0.1, seed=0)[:2]] == [1, 1]
    for linked in (made(30, 12, chosen=np.zeros(30, np.uint8)), made(30, 1)):
        with pytest.raises(ValueError, match=r"--val_data.*data.val_fraction=0\)"):
            split_pairs(linked, 0.1, seed=0)


def test_pairs_that_share_the_sequence_of_one_chain_are_on_one_side_of_the_split():
    chain, rng = made(30, 1)[0].complex.structure.chains["A"], np.random.default_rng(1)
    structure = Structure("two", {"A": chain, "B": chain})
    one, two = Complex(structure, ["A"], ["B"]), Complex(structure, ["A", "B"])
    pairs, constant = [], rng.integers(0, 20, 30).astype(np.uint8)
    for _ in range(20):         # designs of A alone, and of A with a B that is alike in all
        first, second, third = rng.integers(0, 20, (3, 30)).astype(np.uint8)
        pairs.append(Pair(one, first, second, np.ones(30, bool)))
        pairs.append(Pair(two, np.r_[first, constant], np.r_[third, constant], np.ones(60, bool)))
    train, val, _ = split_pairs(pairs, 0.2, seed=0)
    assert len(val) == 8 and not sequences(train, 30) & sequences(val, 30)


# 234 pairs on 60 structures of 40 to 335 rows
MIXED = [pair for i in range(60) for pair in made(40 + 5 * (7 * i % 60), 1 + i % 7, i)]


@pytest.mark.parametrize("n_micro, batch_size", [
    (1, 8), (12, 2), (3, 50), (len(MIXED), 1), (100, 2), (100, 1)])
def test_every_pair_comes_once_an_epoch_in_micro_batches_of_equal_size(n_micro, batch_size):
    plan, n = plan_epoch(MIXED, 0, 0, n_micro, batch_size), len(MIXED)
    pieces = sum(plan, [])
    sizes, indices = [len(piece) for piece in pieces], np.concatenate(pieces)
    assert len(np.unique(indices)) == len(indices)
    assert len(indices) == (n if batch_size > 1 else n // n_micro * n_micro)
    assert 1 <= min(sizes) and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert all(len(step) == n_micro for step in plan)


def test_the_plan_follows_from_seed_and_epoch_and_gives_ranks_equal_work_with_little_padding():
    plans = [plan_epoch(MIXED, seed, epoch, 4, 4)
             for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    pieces = [[tuple(piece) for piece in sum(plan, [])] for plan in plans]
    assert pieces[0] == pieces[1] and len({str(piece) for piece in pieces}) == 3
    company = [{frozenset(piece) for piece in of_plan} for of_plan in pieces]
    assert len(company[0] & company[2]) < len(company[0]) / 4
    taken = [set(np.concatenate(sum(plan_epoch(MIXED, 0, epoch, 100, 1), [])))
             for epoch in range(2)]
    assert taken[0] != taken[1]         # nor does it leave the same pairs out
    lengths = np.array([len(pair.complex) for pair in MIXED])
    work = np.array([[lengths[piece].max() * len(piece) for piece in step] for step in plans[0]])
    assert lengths.sum() / work.sum() > 0.95
    assert work.mean() / work.max(1).mean() > 0.85
    encoded = sum(len(keys(MIXED[i] for i in piece)) for piece in pieces[0])
    assert encoded <= len(keys(MIXED)) + len(pieces[0])     # structures stay together


def test_a_batch_of_complexes_is_padded_to_the_longest(small):
    structure = read_structure(small / "small.pdb")
    batch = collate_complexes([Complex(structure, ["A"]), Complex(structure, ["B"], ["A"])])
    assert batch["X"].shape == (2, 9, 4, 3) and not batch["X"][0, [3, 7, 8]].any()
    assert batch["S"][1].tolist() == encode("GWMKXXVLA").tolist()
    assert batch["residue_idx"][0].tolist() == [*range(7), -100, -100]
    assert not batch["chain_id"][0, 7:].any() and not batch["mask"][0, 7:].any()


def test_the_first_problem_of_each_item_is_listed_but_not_without_end(small):
    wrong = [changed(pdb_file="nope.pdb"), changed(preferred_seq="Z", chain_id="Q", extra=1)]
    lines = refusal(write(small, [GOOD, *wrong * 12])).splitlines()
    assert "24 of 25 pairs" in lines[0]
    assert f"item 1: file not found: {small / 'nope.pdb'}" in lines[1]
    assert "item 2: unknown key extra" in lines[2] and "(and 11 more up to item 24)" in lines[2]
    assert len(lines) == 3
    lines = refusal(write(small, [changed(pdb_file=f"{n}.pdb") for n in range(24)])).splitlines()
    assert len(lines) == 1 + 20 + 1 and lines[-1].endswith("and 4 other problems")
