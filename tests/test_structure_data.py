"""structure_data: rows of PDB and mmCIF files, what pair files may hold, the split, the plan of batches, the demo."""

import gzip
import json
import math

import numpy as np
import pytest
import torch

from sequence_data import AMINO_ACIDS, LETTERS, decode, encode
from structure_data import (Chain, Complex, EpochPlan, Pair, Structure, build_backbone, collate, collate_complexes,
                            demo_pairs, describe, eval_batches, parse_positions, read_pairs, read_structure,
                            shared_structures, split_pairs)

FOUR = ("N", "CA", "C", "O")
NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()


class Atoms(list):
    """Records of a structure, written as PDB or mmCIF text; coordinates are counted up, so each is told from others."""

    def add(self, chain, number, name, atoms=FOUR, code="", het=False, altloc="", model=1):
        for atom in atoms:
            x = len(self) + 0.125
            self.append((chain, number, name, atom, code, het, altloc, model, (x, -x, x / 2)))
        return self

    def pdb(self):
        lines = [f"{'HETATM' if het else 'ATOM':6}{i + 1:5} {' ' + atom:4}{altloc:1}{name:>3} {chain:1}{number:4}"
                 f"{code:1}   {x:8.3f}{y:8.3f}{z:8.3f}  1.00 10.00           {atom[0]}"
                 for i, (chain, number, name, atom, code, het, altloc, _, (x, y, z)) in enumerate(self)]
        models = [record[7] for record in self]
        if len(set(models)) > 1:
            for at in reversed([i for i in range(len(models)) if i == 0 or models[i] != models[i - 1]]):
                lines[at:at] = ["ENDMDL"] * (at > 0) + [f"MODEL {models[at]:8}"]
        return "\n".join(lines) + "\nEND\n"

    def mmcif(self):
        keys = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
                "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id "
                "auth_asym_id pdbx_PDB_model_num").split()
        lines = [f"{'HETATM' if het else 'ATOM'} {i + 1} {atom[0]} {atom} {altloc or '.'} {name} L{chain} 1 {i + 500} "
                 f"{code or '?'} {x:.3f} {y:.3f} {z:.3f} 1.0 10.0 {number} {chain} {model}"
                 for i, (chain, number, name, atom, code, het, altloc, model, (x, y, z)) in enumerate(self)]
        return "\n".join(["data_test", "loop_", *(f"_atom_site.{key}" for key in keys), *lines]) + "\n"


def both(tmp_path, atoms):
    """The structure read from its PDB and from its mmCIF text."""
    (tmp_path / "s.pdb").write_text(atoms.pdb())
    (tmp_path / "s.cif").write_text(atoms.mmcif())
    return read_structure(tmp_path / "s.pdb"), read_structure(tmp_path / "s.cif")


def first_x(chain):
    """Which record each resolved row begins with; None at the others."""
    return [int(x) if there else None for x, there in zip(chain.X[:, 0, 0], chain.resolved)]


def plain_rows(text, chain):
    """Rows of a chain by the published rules, read column by column: {(number, code): (residue name, {atom: xyz})}."""
    rows = {}
    for line in text.splitlines():
        if line[:6] == "HETATM" and line[17:20] == "MSE":
            line = line.replace("HETATM", "ATOM  ").replace("MSE", "MET")
        if line[:4] == "ATOM" and line[21] == chain:
            _, atoms = rows.setdefault((int(line[22:26]), line[26].strip()), (line[17:20], {}))
            atoms.setdefault(line[12:16].strip(), [float(line[i:i + 8]) for i in (30, 38, 46)])
    numbers = [number for number, _ in rows]
    for number in set(range(min(numbers), max(numbers))) - set(numbers):
        rows[number, ""] = ("---", {})
    return [rows[key] for key in sorted(rows)]


def same(a, b):
    return np.array_equal(a.S, b.S) and np.array_equal(a.X, b.X) and np.array_equal(a.resolved, b.resolved)


# ---- structures ----

@pytest.fixture(scope="module")
def fixtures(shared):
    return torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)["cases"]


def equals_fixture(complex, inputs):
    found = collate_complexes([complex])
    names = {"X": "X", "S": "S", "mask": "mask", "residue_idx": "residue_idx", "chain_id": "chain_encoding_all"}
    assert all(torch.equal(found[ours], inputs[theirs]) for ours, theirs in names.items())
    assert all(found[ours].dtype == inputs[theirs].dtype for ours, theirs in names.items())


@pytest.mark.parametrize("suffix", ["pdb", "cif"])
def test_rows_of_a_monomer_and_a_complex_equal_those_of_the_official_code(fixtures, shared, suffix):
    folder, three = shared / "data" / "pdbs", fixtures["complex_small"]
    equals_fixture(Complex(read_structure(folder / f"5L33.{suffix}"), ["A"]), fixtures["monomer_official"]["inputs"])
    complex = Complex(read_structure(folder / f"3HTN.{suffix}"), three["design_chains"][::-1], three["fixed_chains"])
    equals_fixture(complex, three["inputs"])
    assert list(complex.design + complex.fixed) == three["chain_order"]
    assert complex.n_designed == three["inputs"]["chain_M"].sum()


def test_rows_of_a_file_with_every_oddity_equal_those_of_the_official_code(fixtures, tmp_path):
    odd = fixtures["odd_pdb_small"]
    (tmp_path / "odd.pdb").write_text(odd["pdb_text"])
    structure = read_structure(tmp_path / "odd.pdb")
    equals_fixture(Complex(structure, ["A"]), odd["inputs"])
    assert decode(structure.chains["A"].S) == odd["seq_with_gaps"].replace("-", "X")


@pytest.mark.parametrize("name", ["5L33", "6MRR", "3HTN", "4YOW", "5L33_odd"])
def test_rows_of_real_files_equal_a_plain_reading_of_their_columns(shared, name):
    path = shared / "data" / "pdbs" / f"{name}.pdb"
    structure, text = read_structure(path), path.read_text()
    assert sorted(structure.chains) == sorted({line[21] for line in text.splitlines() if line[:4] == "ATOM"})
    letters = dict(zip(NAMES, AMINO_ACIDS))
    for chain, found in structure.chains.items():
        rows = plain_rows(text, chain)
        assert decode(found.S) == "".join(letters.get(name, "X") for name, _ in rows)
        assert found.resolved.tolist() == [set(FOUR) <= atoms.keys() for _, atoms in rows]
        xyz = [[atoms.get(a, [0, 0, 0]) for a in FOUR] for _, atoms in rows]
        assert np.array_equal(found.X, np.array(xyz, np.float32))


def test_two_formats_of_one_protein_are_one_structure_and_another_is_not(shared):
    folder = shared / "data" / "pdbs"
    names = ("3HTN.pdb", "3HTN.cif", "5L33.pdb", "5L33.cif", "5L33_odd.pdb")
    keys = [read_structure(folder / name).key for name in names]
    assert keys[0] == keys[1] != keys[2] == keys[3] != keys[4]


def test_numbers_left_out_are_x_rows_and_insertions_follow_their_number(tmp_path):
    atoms = Atoms().add("A", 5, "GLY").add("A", -1, "ALA").add("A", 3, "SER", code="B").add("A", 3, "THR")
    atoms.add("A", 3, "CYS", code="A")
    for structure in both(tmp_path, atoms):
        chain = structure.chains["A"]
        assert decode(chain.S) == "AXXXTCSXG"
        assert chain.numbers == ("-1", None, None, None, "3", "3A", "3B", None, "5")
        assert first_x(chain) == [4, None, None, None, 12, 16, 8, None, 0]
        assert not chain.X[~chain.resolved].any() and chain.X.dtype == np.float32


def test_an_insertion_code_without_its_number_gets_no_gap_row(tmp_path):
    for structure in both(tmp_path, Atoms().add("A", 1, "ALA").add("A", 2, "CYS", code="A").add("A", 3, "ASP")):
        assert structure.chains["A"].numbers == ("1", "2A", "3")


def test_selenomethionine_is_m_unknown_residues_are_x_with_coordinates_and_other_hetatms_are_nothing(tmp_path):
    atoms = Atoms().add("A", 1, "MSE", het=True).add("A", 2, "UNK").add("A", 3, "HOH", ["O"], het=True)
    atoms.add("A", 3, "LYS").add("A", 9, "SEP", het=True).add("B", 1, "HOH", ["O"], het=True)
    for structure in both(tmp_path, atoms):
        assert list(structure.chains) == ["A"]
        assert decode(structure.chains["A"].S) == "MXK" and first_x(structure.chains["A"]) == [0, 4, 9]


def test_of_alternative_locations_mutations_and_models_the_first_counts_atom_by_atom(tmp_path):
    atoms = Atoms().add("A", 1, "SER", FOUR, altloc="B").add("A", 1, "SER", FOUR, altloc="A")         # records 0 to 7
    atoms.add("A", 2, "THR", ["N", "CA"], altloc="A").add("A", 2, "VAL", FOUR, altloc="B")            # 8 to 13
    atoms.add("A", 3, "GLY", ["N"]).add("A", 3, "GLY", FOUR, model=2).add("A", 4, "TRP", FOUR, model=2)    # 14 to 22
    for structure in both(tmp_path, atoms):
        chain = structure.chains["A"]
        assert decode(chain.S) == "STGW" and chain.resolved.all()
        records = chain.X[:, :, 0].astype(int).tolist()
        assert records == [[0, 1, 2, 3], [8, 9, 12, 13], [14, 16, 17, 18], [19, 20, 21, 22]]


def test_a_residue_without_one_of_four_atoms_keeps_its_letter_and_is_masked(tmp_path):
    atoms = Atoms()
    for number, missing in enumerate(FOUR):
        atoms.add("A", number, "TYR", [a for a in FOUR if a != missing])
    atoms.add("A", 4, "TYR", [*FOUR, "CB", "OXT"]).add("A", 5, " DA", ["P", "C1'"])
    for structure in both(tmp_path, atoms):
        chain = structure.chains["A"]
        assert decode(chain.S) == "YYYYYX" and chain.resolved.tolist() == [False] * 4 + [True, False]
        missing = np.r_[np.eye(4, dtype=bool), [[False] * 4, [True] * 4]]
        assert not chain.X[missing].any() and chain.X[~missing][1:].any(1).all()


def test_records_between_and_after_the_atoms_change_nothing(tmp_path):
    atoms = Atoms().add("A", 1, "ALA").add("B", 1, "CYS").add("A", 2, "ASP").add("A", 3, "GLU")
    expected = both(tmp_path, atoms)[0]
    lines = atoms.pdb().splitlines()
    lines.insert(8, "TER\nEND")
    (tmp_path / "t.pdb").write_bytes(b"REMARK \xe9\r\n" + "\r\n".join(lines).encode() + b"\r\nCONECT 1 2")
    (tmp_path / "u.ent.gz").write_bytes(gzip.compress(atoms.pdb().encode()))
    for name in ("t.pdb", "u.ent.gz"):
        found = read_structure(tmp_path / name)
        assert all(same(found.chains[c], expected.chains[c]) for c in "AB") and found.key == expected.key


def test_a_chain_has_the_name_of_column_22_alone_or_none(tmp_path):
    atoms = Atoms().add(" ", 1, "SER", altloc="A").add(" ", 1, "SER", altloc="B").add(" ", 2, "THR")
    atoms.add(" ", 1, "SER", model=2)                                   # models are merged by intent
    for text, name in ((ONE.replace(" A ", "ZA "), "A"), (atoms.pdb(), "")):
        (tmp_path / "s.pdb").write_text(text)
        assert list(read_structure(tmp_path / "s.pdb").chains) == [name]


def test_unknown_coordinates_of_mmcif_are_missing_atoms_and_errors_in_brackets_no_part_of_them(tmp_path):
    text = Atoms().add("A", 1, "ALA").add("A", 2, "GLY").mmcif()
    (tmp_path / "s.cif").write_text(text.replace(" 0.125 ", " ? ").replace(" 4.125 ", " 4.125(7) "))
    chain = read_structure(tmp_path / "s.cif").chains["A"]
    assert chain.resolved.tolist() == [False, True] and chain.X[1, 0, 0] == 4.125


def test_mmcif_chains_may_have_long_names(tmp_path):
    (tmp_path / "s.cif").write_text(Atoms().add("AB-2", 7, "TRP").mmcif())
    assert read_structure(tmp_path / "s.cif").chains["AB-2"].numbers == ("7",)


ONE = Atoms().add("A", 1, "ALA").pdb()


@pytest.mark.parametrize("name, content, says", [
    ("s.pdb", "", "empty"), ("s.cif", " \n", "empty"), ("s.pdb", b"\0\1\2" * 99, "binary"),
    ("s.pdb", "HELLO\n", "no ATOM"), ("s.pdb", Atoms().add("A", 1, "HOH", het=True).pdb(), "no ATOM"),
    ("s.cif", ONE, "cannot be read"), ("s.pdb", ONE.replace("   0.125", "  0.12.5"), "columns 31 to 54"),
    ("s.pdb", ONE.replace("  -0.125", "********"), "columns 31"),
    ("s.pdb", ONE.replace("A   1 ", "A   x "), "columns 23 to 26"),
    ("s.pdb", "ATOM      1  N   ALA A   1\n", "columns"), ("s.pdb", Atoms().add("A", 1, "ALA").mmcif(), "columns"),
    ("s.pdb.gz", gzip.compress(ONE.encode())[:-9], "end-of-stream"), ("s.txt", ONE, ".mmcif"), ("s", ONE, ".mmcif"),
    ("s.cif", "data_x\n_a.b 1\n", "0 data blocks"),
    ("s.cif", Atoms().add("A", 1, "ALA").mmcif() * 2, "cannot be read"),
    ("s.cif", "data_x\nloop_\n_a.b\n'x", "cannot be read"),
    ("s.cif", Atoms().add("A", 1, "ALA").add("A", 900_000, "ALA").mmcif(), "100,000 rows"),
    ("s.cif", Atoms().add("A", "?", "ALA").mmcif().replace("500", "."), "auth_seq_id is '?'"),
    ("s.cif", Atoms().add("A", ".", "ALA").mmcif(), "auth_seq_id is '.'; expected a number"),
    ("s.cif", Atoms().add("A", "1x", "ALA").mmcif(), "auth_seq_id is '1x'"),
    ("s.cif", Atoms().add("A", 1, "ALA").mmcif().replace(" 0.125 ", " foo "), "Cartn_x is 'foo'; expected a number"),
    ("s.cif", Atoms().add("A", 1, "ALA").mmcif().replace(" -0.125 ", " 1.2.3 "), "Cartn_y is '1.2.3'"),
    ("s.cif", Atoms().add("A", 1, "ALA").mmcif().replace("group_PDB", "group"), "no group_PDB"),
    ("s.pdb", ONE.replace("   0.125", "   1_0.5"), "columns 31"),
    ("s.pdb", ONE.replace("A   1 ", "A 1_1 "), "columns 23"),
    ("s.pdb", "".join(Atoms().add(" ", i, "ALA").pdb() for i in (1, 2, 1)), "residue 1 comes again in a chain"),
    ("s.pdb", ONE.replace("   0.125", "    1e39"), "chain A has N of residue 1 at x = 1e+39; expected Angstrom"),
    ("s.pdb", ONE.replace("  -1.125", "-100001 "),
     "CA of residue 1 at y = -100001; expected Angstrom, at most 100,000"),
    ("s.cif", Atoms().add("B", 7, "ALA").mmcif().replace(" 0.125 ", " 1e30 "),
     "chain B has N of residue 7 at x = 1e+30"),
    ("s.pdb/", "", "not a file")])
def test_a_structure_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path, name, content, says):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        read_structure(path)
    assert says in str(caught.value) and path.name in str(caught.value)


def test_a_missing_structure_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="nope.pdb"):
        read_structure(tmp_path / "nope.pdb")


# ---- positions on a command line ----

# Chain A has rows 1, 2, 3 (unknown residue), 4 (gap), 5, 5A, 6 (without O); chain B 10, 11; D is DNA.
SMALL = (Atoms().add("A", 1, "MET").add("A", 2, "LYS").add("A", 3, "UNK").add("A", 5, "VAL")
         .add("A", 5, "LEU", code="A").add("A", 6, "ALA", FOUR[:3]).add("B", 10, "GLY").add("B", 11, "TRP")
         .add("D", 1, " DA", ["P"]))


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.pdb").write_text(SMALL.pdb())
    return tmp_path


@pytest.mark.parametrize("texts, chains, positions, understood", [
    ("A1", "AB", [0], "chain and number"), ("A5", "AB", [4], "chain"), ("A5A", "AB", [5], "chain"),
    ("A3-A5A", "AB", [2, 3, 4, 5], "chain"), (["B10", "A2"], "AB", [1, 7], "chain"),
    (["B10", "A2"], "BA", [0, 3], "chain"), ("A6-B10", "AB", [6, 7], "chain"),
    ("A1, A2 B11", "AB", [0, 1, 8], "chain"), ("0 8", "AB", [0, 8], "0-based"),
    ("2-4,6", "AB", [2, 3, 4, 6], "0-based")])
def test_positions_are_read_by_chain_and_number_or_by_index_and_say_which(small, texts, chains, positions, understood):
    found, told = parse_positions(texts, read_structure(small / "small.pdb"), list(chains))
    assert found.tolist() == positions and understood in told


@pytest.mark.parametrize("texts", ["A4", "A9", "C1", "A", "", [], "A5-A2", "A1 A1", "A1-A3 A2", "A1 3", "9", "5-2",
                                   "-1", "A1-", "a1", "A5a", "A1-3", "1.5", "A4-A5", "A05", "99999999999"])
def test_positions_that_are_not_there_or_unclear_are_refused(small, texts):
    with pytest.raises(ValueError, match="position"):
        parse_positions(texts, read_structure(small / "small.pdb"), ["A", "B"])


def test_a_position_that_two_readings_fit_is_refused(tmp_path):
    atoms = Atoms().add("1", 13, "ALA").add("1", 12, "SER").add("1", 2, "CYS").add("11", 2, "GLY")
    (tmp_path / "s.cif").write_text(atoms.mmcif())
    structure = read_structure(tmp_path / "s.cif")
    for text in ("112", "12"):                  # chain 1, 12 or chain 11, 2; chain 1, 2 or the number 12 from 0
        with pytest.raises(ValueError, match="ambiguous"):
            parse_positions(text, structure, ["1", "11"])
    assert parse_positions("112 113", structure, ["1"])[0].tolist() == [10, 11]
    negative = Structure("s", {"A": Chain(encode("AC"), np.zeros((2, 4, 3)), np.ones(2, bool), ("-3", "-2"))})
    assert parse_positions("A-3", negative, ["A"])[0].tolist() == [0]
    assert parse_positions("A-3-A-2", negative, ["A"])[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="chain Q not in"):
        parse_positions("Q1", negative, ["Q"])


# ---- pairs ----

GOOD = {"pdb_file": "small.pdb", "preferred_seq": "MKXXVLA", "unpreferred_seq": "MRXXVIA", "chain_id": "A"}


def write(folder, data, name="pairs.json"):
    path = folder / name
    text = data if isinstance(data, (bytes, str)) else json.dumps(data)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path, **options):
    with pytest.raises(ValueError) as caught:
        read_pairs(path, **options)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_the_pairs_at_hand_are_read(shared):
    pairs = read_pairs(shared / "data" / "pairs_monomer.json")
    assert describe(pairs) == "80 pairs on 2 structures, 68 to 106 rows each"
    pairs = read_pairs(shared / "data" / "pairs_multichain.json")
    assert describe(pairs) == (
        "28 pairs on 2 structures, 286 to 685 rows each; 28 with several chains; 11 with fixed positions; "
        "4 leave other protein chains of their file out; 4 with unresolved rows, which are not scored")
    entries = json.loads((shared / "data" / "pairs_multichain.json").read_text())
    for pair, entry in zip(pairs, entries):
        chains = [(name, len(pair.complex.structure.chains[name].S)) for name in entry["design_chains"]]
        text, rows = entry["preferred_seq"], {}
        for name, size in chains:
            rows[name], text = text[:size], text[size:]
        assert decode(pair.chosen) == "".join(rows[name] for name in sorted(rows))
        identity = np.mean(pair.chosen == pair.complex.S[:pair.complex.n_designed])
        assert identity > 0.8                   # preferred sequences are the native one but for 3 to 15 %


BAD_WORDS = {                                   # what the message has to hold beside the case's own expectation
    "too_short_for_structure": ["103", "chain A 106"],
    "pair_lengths_differ": ["preferred (106)", "unpreferred (105)"], "missing_design_chain": ["chain Q", "has A B C"],
    "unknown_letter": ["'J'", "position 1 of preferred_seq"], "gap_letter": ["'-' at a resolved position"],
    "missing_file": ["file not found: pdbs/NOPE.pdb"], "missing_key_preferred": ["missing key preferred_seq"],
    "unknown_key": ["unknown key prefered_seq", "mean preferred_seq"],
    "not_a_list": ["top level must be a list of objects"],
    "duplicated_design_chain": ["chain A listed twice in design_chains"],
    "chain_id_and_design_chains": ["chain_id and design_chains given together"],
    "empty_design_chains": ["design_chains is empty"],
    "unresolved_left_out": ["sequence 139", "chain B 143 of which 4 unresolved", "X"],
    "X_at_resolved": ["'X' at a resolved"], "mutable_negative": ["mutable position -1 outside 0..105"],
    "mutable_range_reversed": ["mutable range 20-10 is reversed"],
    "differs_outside_mutable": ["differ at", "fixed positions"],
    "dna_design_chain": ["chain B has no protein residue"]}


@pytest.mark.parametrize("name", BAD_WORDS)
def test_each_malformed_case_is_refused_as_expected(shared, tmp_path, name):
    cases = {case["name"]: case["data"] for case in json.loads((shared / "data" / "pairs_bad.json").read_text())}
    assert cases.keys() == BAD_WORDS.keys()
    (tmp_path / "pdbs").symlink_to(shared / "data" / "pdbs")
    message = refusal(write(tmp_path, cases[name]))
    assert all(words in message for words in BAD_WORDS[name]) and (name == "not_a_list" or "item 0: " in message)


NAN, TWO = float("nan"), {"design_chains": ["A", "B"], "preferred_seq": "MKXXVLAGW", "unpreferred_seq": "MRXXVIAGW"}


@pytest.mark.parametrize("change, says", [
    ({"pdb_file": None}, "pdb_file is null"), ({"pdb_file": ""}, "not empty"), ({"pdb_file": 3}, "pdb_file is 3"),
    ({"pdb_file": "."}, "not a file"), ({"pdb_file": "pairs.json"}, ".mmcif"),
    ({"pdb_file": "a\0.pdb"}, "a\\u0000.pdb"), ({"pdb_file": "x" * 5000 + ".pdb"}, "too long"),
    ({"pdb_file": "é\ud800.pdb"}, "\\"), ({"pdb_file": "empty.pdb"}, "empty"),
    ({"pdb_file": "far.pdb"}, "far.pdb cannot be read: chain A has N of residue 1 at x = 1e+39"),
    ({"preferred_seq": NAN}, "preferred_seq is NaN"), ({"preferred_seq": ""}, "preferred_seq is \"\""),
    ({"preferred_seq": ["M"]}, "preferred_seq is [\"M\"]"), ({"preferred_seq": "mkXXVLA"}, "write upper case"),
    ({"preferred_seq": "MKXXVL "}, "letter ' ' at position 7"),
    ({"preferred_seq": "MKXXVLB"}, "unknown residue letter 'B' at position 7"),
    ({"unpreferred_seq": "MKXX/VLA"}, "without a sign"), ({"preferred_seq": "MKXXVLÄ"}, "'\\xc4'"),
    ({"preferred_seq": "MKXXVL\ud800"}, "'\\ud800'"), ({"preferred_seq": "MK*XVLA"}, "'*'"),
    ({"preferred_seq": "MKVLA", "unpreferred_seq": "MRVIA"}, "sequence 5, structure chain A 7 of which 2 unresolved"),
    ({"preferred_seq": "MKXXVLAA", "unpreferred_seq": "MKXXVIAA"}, "sequence 8"),
    ({"preferred_seq": "MKX"}, "lengths differ"),
    ({"preferred_seq": "MKXXXLA"}, "'X' at a resolved position, 5 of preferred_seq"),
    ({"preferred_seq": "-KXXVLA"}, "'-' at a resolved position, 1"),
    ({"preferred_seq": "MKSXVLA"}, "3 of unpreferred_seq"), ({"unpreferred_seq": "MKXXVLA"}, "no preference"),
    ({"unpreferred_seq": "MKXCVLG"}, "no preference"), ({"unpreferred_seq": "MK--VL-"}, "no preference"),
    ({"chain_id": ""}, "chain_id is \"\""), ({"chain_id": " "}, "chain_id is"),
    ({"chain_id": ["A"]}, "chain_id is [\"A\"]"), ({"chain_id": 1}, "chain_id is 1"),
    ({"chain_id": "a"}, "chain a not in small.pdb (has A B D)"), ({"chain_id": "A,B"}, "chain A,B not in"),
    ({"chain_id": "D", "preferred_seq": "X", "unpreferred_seq": "X"}, "chain D has no protein residue"),
    ({"chain_id": None}, "chain_id is null"), ({"fixed_chains": ["B"]}, "chain_id and fixed_chains given together"),
    ({**TWO, "fixed_chains": []}, "chain_id and design_chains"), ({**TWO, "chain_id": ...}, None),
    ({"chain_id": ...}, "neither chain_id nor"), ({"chain_id": ..., "fixed_chains": ["A"]}, "neither chain_id nor"),
    ({**TWO, "chain_id": ..., "design_chains": "AB"}, "design_chains is \"AB\""),
    ({**TWO, "chain_id": ..., "design_chains": ["A", 2]}, "list of names"),
    ({**TWO, "chain_id": ..., "design_chains": ["A", ""]}, "list of names"),
    ({**TWO, "chain_id": ..., "fixed_chains": ["A"]}, "chain A is in design_chains and in fixed_chains"),
    ({**TWO, "chain_id": ..., "fixed_chains": ["D", "D"]}, "chain D listed twice in fixed_chains"),
    ({**TWO, "chain_id": ..., "fixed_chains": "D"}, "fixed_chains is"),
    ({**TWO, "chain_id": ..., "fixed_chains": None}, "fixed_chains is null"),
    ({**TWO, "chain_id": ..., "fixed_chains": ["Z"]}, "chain Z not in"),
    ({**TWO, "chain_id": ..., "design_chains": ["A", "D"]}, "chain D has no protein"),
    ({"mutable_positions": [7]}, "position 7 outside 0..6"), ({"mutable_positions": [1, 5, 1]}, "position 1 repeats"),
    ({"mutable_positions": []}, "mutable_positions is []"),
    ({"mutable_positions": [True]}, "mutable_positions is [true]"), ({"mutable_positions": [1.0]}, "[1.0]"),
    ({"mutable_positions": ["A2"]}, "expected whole numbers from 0"), ({"mutable_positions": 1}, "is 1;"),
    ({"mutable_positions": "1,5"}, "is \"1,5\""), ({"mutable_positions": [NAN]}, "[NaN]"),
    ({"mutable_positions": [[1, 5]]}, "[[1, 5]]"), ({"mutable_positions": None}, "is null"),
    ({"mutable_positions": {"A": [1]}}, "whole numbers"), ({"mutable_positions": [10 ** 40]}, "outside 0..6"),
    ({"mutable_positions": [1]}, "differ at 1 fixed positions: [5]"),
    ({"mutable_positions": [3, 6]}, "differ at 2 fixed positions"), ({"mutable_positions": [1, 5],
    "mutable_ranges": [[1, 5]]}, "given together"), ({"mutable_ranges": [1, 5]}, "mutable_ranges is [1, 5]"),
    ({"mutable_ranges": [[1, 5], [5, 6]]}, "range 5-6 repeats"),
    ({"mutable_ranges": [[1, 7]]}, "range 1-7 outside 0..6"), ({"mutable_ranges": [[5, 1]]}, "reversed"),
    ({"mutable_ranges": [[1, 2, 3]]}, "whole numbers"), ({"mutable_ranges": [[-2, 5]]}, "outside"),
    ({"mutable_ranges": [[1, True]]}, "whole numbers"), ({"mutable_ranges": [["A1", "A5"]]}, "whole numbers"),
    ({"mutable_ranges": []}, "is []"), ({"mutable_ranges": "1-5"}, "is \"1-5\""), ({"score": 3}, "unknown key score"),
    ({"Pdb_file": "x"}, "did you mean pdb_file?"), ({"pdb_file": ...}, "missing key pdb_file"),
    ({"unpreferred_seq": ...}, "missing key unpreferred_seq")])
def test_siblings_of_the_malformed_cases_are_refused_with_their_item(small, change, says):
    (small / "empty.pdb").write_text("")
    (small / "far.pdb").write_text(SMALL.pdb().replace("   0.125", "    1e39"))
    entry = {key: value for key, value in {**GOOD, **change}.items() if value is not ...}
    path = write(small, [GOOD, entry])
    if says is None:
        assert len(read_pairs(path)) == 2
    else:
        message = refusal(path)
        assert "item 1: " in message and "item 0" not in message and says in message


@pytest.mark.parametrize("content, says", [
    ("", "empty"), ("  \n", "empty"), ("[]", "found []"), ("{}", "top level must be a list"), ("null", "found null"),
    ("3", "found 3"), ("[{]", "no JSON"), (json.dumps([GOOD])[:-1], "no JSON"),
    (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "named .jsonl"), (b"\xff\xfe[\0]\0", "UTF-8 (from byte 0 on)"),
    (gzip.compress(b"[]"), "UTF-8"), (b"PK\3\4\0\0", "no JSON"), (b"\0" * 99, "no JSON"), ("[" * 100_000, "no JSON"),
    ("[" + "9" * 5000 + "]", "no JSON"), ("[1]", "item 0: found 1"), ("[null]", "found null"), ("[[]]", "found []"),
    ('["small.pdb"]', "found \"small.pdb\""),
    (json.dumps([GOOD])[:-2] + ', "chain_id": "B"}]', "key \"chain_id\" given twice"), ("[{}]", "missing key")])
def test_a_file_that_holds_no_list_of_objects_is_refused(small, content, says):
    assert says in refusal(write(small, content))


def test_a_missing_file_a_directory_and_a_bad_line_are_told(small):
    with pytest.raises(FileNotFoundError, match="nope.json"):
        read_pairs(small / "nope.json")
    assert "not a file" in refusal(small)
    lines = "\n".join([json.dumps(GOOD), "", "{", json.dumps({**GOOD, "chain_id": "Q"}), "[]"])
    message = refusal(write(small, lines, "pairs.jsonl"))
    for words in ("item 1: line 3: this is no JSON", "item 2: chain Q not in", "item 3: found []", "3 of 4 pairs"):
        assert words in message


def test_all_problems_are_told_at_once_equal_ones_together_and_not_without_end(small):
    wrong = [{**GOOD, "pdb_file": "nope.pdb"}] * 7 + [{**GOOD, "preferred_seq": "Z", "chain_id": "Q", "extra": 1}]
    message = refusal(write(small, [GOOD] + wrong))
    assert "8 of 9 pairs" in message and "items 1-7: file not found: nope.pdb" in message
    for words in ("unknown key extra", "unknown residue letter 'Z'", "chain Q not in"):
        assert f"item 8: {words}" in message
    odd = [{**GOOD, "extra": 1} if i in (0, 2, 3, 4, 7) else GOOD for i in range(8)]
    assert "items 0, 2-4, 7: unknown key extra" in refusal(write(small, odd))
    for bad in ({"chain_id": "Q"}, {"pdb_file": "nope.pdb"}, {"chain_id": ...}, {"preferred_seq": ...}):
        entry = {k: v for k, v in {**GOOD, "mutable_ranges": [[5, 9]], **bad}.items() if v is not ...}
        message = refusal(write(small, [entry]))
        assert len(message.splitlines()) == 3 and "item 0: mutable range 5-9 outside 0..6" in message
    many = refusal(write(small, [{**GOOD, "chain_id": f"Q{i}"} for i in range(50)]))
    assert len(many.splitlines()) == 1 + 20 + 1 and many.endswith("and 30 more problems, in items 20-49")


def test_lines_and_a_byte_order_mark_and_windows_line_ends_read_like_a_list(small):
    entries = [GOOD, {**GOOD, "description": {"any": ["thing", 1]}, "unpreferred_seq": "MRXXVLA"}]
    lines = "".join(json.dumps(entry) + "\r\n" for entry in entries)
    with_mark = b"\xef\xbb\xbf" + json.dumps(entries).encode()
    files = [write(small, entries), write(small, with_mark, "bom.json"), write(small, lines, "pairs.jsonl")]
    keys = [[pair.key for pair in read_pairs(path)] for path in files]
    assert keys[0] == keys[1] == keys[2] and len(set(keys[0])) == 2


def test_paths_count_from_the_folder_of_the_file(small, monkeypatch):
    (small / "sub").mkdir()
    monkeypatch.chdir("/")
    for name in ("../small.pdb", str(small / "small.pdb")):
        assert len(read_pairs(write(small / "sub", [{**GOOD, "pdb_file": name}]))) == 1


def test_a_structure_is_read_once_even_for_two_files_of_pairs(small):
    structures = {}
    first, second = read_pairs(write(small, [GOOD, {**GOOD, "unpreferred_seq": "MRXXVLA"}]), structures)
    (small / "small.pdb").unlink()
    again, = read_pairs(write(small, [GOOD]), structures)
    assert len(structures) == 1 and again.key == first.key
    assert first.complex is second.complex and again.complex.structure is first.complex.structure


def test_letters_go_to_their_rows_whatever_the_order_of_the_chains(small):
    entry = {"pdb_file": "small.pdb", "design_chains": ["B", "A"], "fixed_chains": ["D"],
             "preferred_seq": "FGMKXXVLA", "unpreferred_seq": "FHMKXXVLA", "mutable_positions": [1, 2, 8]}
    pair, = read_pairs(write(small, [entry]))
    assert decode(pair.chosen) == "MKXXVLAFG" and decode(pair.rejected) == "MKXXVLAFH"
    assert np.flatnonzero(pair.chain_M).tolist() == [0, 6, 8]
    assert (pair.complex.design, pair.complex.fixed) == (("A", "B"), ("D",))
    assert (len(pair.complex), pair.complex.n_designed) == (10, 9)
    assert pair.complex.chain_id.tolist() == [1] * 7 + [2] * 2 + [3]
    assert pair.complex.residue_idx.tolist() == [0, 1, 2, 3, 4, 5, 6, 107, 108, 209]


def test_unresolved_rows_keep_the_letters_of_the_structure_and_unnamed_ones_may_stay_out(small):
    entries = [{**GOOD, "preferred_seq": "MKXGVLW", "unpreferred_seq": "MR-PVIX"},
               {**GOOD, "preferred_seq": "MKS-VLA", "unpreferred_seq": "MRTXVIA"}]
    left_out, named = read_pairs(write(small, entries))
    assert decode(left_out.chosen) == "MKXXVLA" and decode(left_out.rejected) == "MRXXVIA"
    assert left_out.chain_M.tolist() == [True, True, False] + [True] * 4
    assert decode(named.chosen) == "MKSXVLA" and named.chain_M.all()


def test_positions_for_all_pairs_hold_where_a_pair_has_none_of_its_own(small):
    own = {**GOOD, "mutable_ranges": [[1, 5]]}
    path = write(small, [GOOD, own])
    designed = [np.flatnonzero(pair.chain_M).tolist() for pair in read_pairs(path, mutable=["A2", "A5A"])]
    assert designed == [[1, 5], [1, 3, 4, 5]]                   # row 2 is X in both
    assert "item 0: preferred and unpreferred differ at 1 fixed positions: [5]" in refusal(path, mutable="A2")
    assert "item 0: the mutable positions for all pairs: position A9" in refusal(path, mutable="A9")
    told = []
    read_pairs(path, mutable=["A2", "A5A"], told=told)
    assert told == ["2 positions by chain and number in the file: A2 A5A"]


def test_a_copy_with_other_residue_numbers_has_positions_of_its_own(small):
    entries = []
    for start, other in ((1, "AAAAG"), (3, "AAGAA")):
        atoms = Atoms()
        for i in range(5):
            atoms.add("A", start + i, "ALA")
        (small / f"{start}.pdb").write_text(atoms.pdb())
        entries.append({"pdb_file": f"{start}.pdb", "preferred_seq": "AAAAA", "unpreferred_seq": other,
                        "chain_id": "A"})
    first, second = read_pairs(write(small, entries), mutable="A5")
    assert first.complex.structure.key == second.complex.structure.key
    assert [np.flatnonzero(pair.chain_M).tolist() for pair in (first, second)] == [[4], [2]]


def test_designs_beyond_max_length_are_refused_not_cut(small):
    path = write(small, [GOOD])
    assert len(read_pairs(path, max_length=7)) == 1
    assert "7 rows, more than max_length 6" in refusal(path, max_length=6)


def test_repeated_and_contradicting_pairs_are_told(small):
    swapped = {**GOOD, "preferred_seq": GOOD["unpreferred_seq"], "unpreferred_seq": GOOD["preferred_seq"]}
    text = describe(read_pairs(write(small, [GOOD, GOOD, swapped])))
    assert "1 repeat an earlier one" in text and "1 contradict another" in text


def test_the_key_of_a_pair_changes_with_everything_that_enters_it(small):
    changes = [{}, {"preferred_seq": "MKXXVFA"}, {"unpreferred_seq": "MSXXVIA"}, {"mutable_positions": [1, 5]},
               {"chain_id": ..., "design_chains": ["A"], "fixed_chains": ["B"]}]
    entries = [{k: v for k, v in {**GOOD, **change}.items() if v is not ...} for change in changes]
    keys = {pair.key for pair in read_pairs(write(small, entries))}
    assert len(keys) == 5 and all(0 <= key < 2 ** 63 for key in keys)


# ---- split, plan, batches ----

def made(length, n_pairs, number=0, chosen=None):
    """Pairs with different random sequences on one structure of this length."""
    rng = np.random.default_rng([length, number])
    X = rng.normal(size=(length, 4, 3)).astype(np.float32)
    chain = Chain(np.zeros(length, np.uint8), X, np.ones(length, bool), tuple(map(str, range(length))))
    complex, everywhere = Complex(Structure(f"s{number}", {"A": chain}), ["A"]), np.ones(length, bool)
    draw = lambda: rng.integers(0, 20, length).astype(np.uint8)
    return [Pair(complex, draw() if chosen is None else chosen, draw(), everywhere) for _ in range(n_pairs)]


def keys(pairs):
    return {pair.complex.structure.key for pair in pairs}


@pytest.mark.parametrize("n, fraction, n_val", [
    (2, 0.1, 1), (10, 0.1, 1), (14, 0.1, 1), (16, 0.1, 2), (30, 0.1, 3), (3, 0.9, 2), (2, 0.99, 1)])
def test_a_tenth_of_the_structures_at_least_one_is_held_out_whole(n, fraction, n_val):
    pairs = [pair for i in range(n) for pair in made(30, 1 + i % 3, i)]
    train, val, warning = split_pairs(pairs, fraction, seed=3)
    assert len(keys(val)) == n_val and not keys(train) & keys(val) and warning is None
    assert sorted(map(id, train + val)) == sorted(map(id, pairs)) and shared_structures(train, val) == []
    assert shared_structures(pairs, val) == sorted({pair.complex.structure.name for pair in val})


def test_the_split_depends_on_seed_and_content_not_on_order_or_copies():
    pairs = [pair for i in range(20) for pair in made(30, 2, i)]
    copies = [pair for i in range(20) for pair in made(30, 2, i)]
    val = lambda some, seed: keys(split_pairs(some, 0.2, seed)[1])
    assert val(pairs, 0) == val(pairs[::-1], 0) == val(pairs + copies, 0) and len(val(pairs, 0)) == 4
    assert len({frozenset(val(pairs, seed)) for seed in range(8)}) > 4


def sequences(pairs):
    return {letters.tobytes() for pair in pairs for letters in (pair.chosen, pair.rejected)}


def test_a_single_structure_is_split_by_sequence_with_a_warning():
    pairs = made(30, 40)
    links = [Pair(a.complex, a.rejected, b.chosen, a.chain_M) for a, b in zip(pairs[:9], pairs[1:9])]     # of 9 pairs
    for some in (pairs, pairs + links):
        train, val, warning = split_pairs(some, 0.1, seed=0)
        assert "one structure" in warning and 3 <= len(val) <= 4 and len(train) + len(val) == len(some)
        assert not sequences(train) & sequences(val)
    train, val, _ = split_pairs(pairs[:2], 0.1, seed=0)
    assert len(train) == len(val) == 1


def test_pairs_that_share_the_sequence_of_one_chain_are_on_one_side_of_the_split():
    chain, draw = made(30, 1)[0].complex.structure.chains["A"], np.random.default_rng(1)
    structure = Structure("two", {"A": chain, "B": chain})
    one, two = Complex(structure, ["A"], ["B"]), Complex(structure, ["A", "B"])
    letters = lambda n=30: draw.integers(0, 20, n).astype(np.uint8)
    pairs, constant = [], letters()
    for _ in range(20):                           # designs of A alone, and of A with a B that is alike in all
        first, second = letters(), letters()
        pairs.append(Pair(one, first, second, np.ones(30, bool)))
        pairs.append(Pair(two, np.r_[first, constant], np.r_[letters(), constant], np.ones(60, bool)))
    train, val, _ = split_pairs(pairs, 0.2, seed=0)
    of_a = lambda some: {S[:30].tobytes() for pair in some for S in (pair.chosen, pair.rejected)}
    assert len(val) == 8 and not of_a(train) & of_a(val)


def test_pairs_that_cannot_be_split_are_refused():
    native = np.zeros(30, np.uint8)
    for pairs in (made(30, 12, chosen=native), made(30, 1)):
        with pytest.raises(ValueError, match=r"--val_data.*data.val_fraction=0\)"):
            split_pairs(pairs, 0.1, seed=0)
    for fraction in (0, 1, -0.1, math.nan):
        with pytest.raises(ValueError, match="val_fraction"):
            split_pairs(made(30, 12), fraction, seed=0)


MIXED = [pair for i in range(60) for pair in made(40 + 5 * (7 * i % 60), 1 + i % 7, i)]     # 234 pairs, 40 to 335 rows


def batches_of(plan):
    return [plan.global_batch(step) for step in range(plan.n_steps)]


@pytest.mark.parametrize("micro_batches, batch_size", [
    (1, 8), (4, 4), (12, 2), (3, 50), (100, 1), (234, 1), (100, 2), (1, 1)])
def test_every_pair_comes_once_an_epoch_in_micro_batches_of_equal_size(micro_batches, batch_size):
    plan = EpochPlan(MIXED, seed=0, epoch=0, micro_batches=micro_batches, batch_size=batch_size)
    sizes = [len(piece) for step in batches_of(plan) for piece in step]
    together = np.concatenate([piece for step in batches_of(plan) for piece in step])
    assert len(set(together.tolist())) == len(together) == plan.n_pairs
    assert plan.n_pairs == (len(MIXED) if batch_size > 1 else len(MIXED) // micro_batches * micro_batches)
    assert 1 <= min(sizes) and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert all(len(step) == micro_batches for step in batches_of(plan))


def test_the_plan_is_a_function_of_seed_and_epoch_and_mixes_anew_each_epoch():
    plans = [batches_of(EpochPlan(MIXED, seed, epoch, 4, 4)) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    text = [str([[piece.tolist() for piece in step] for step in plan]) for plan in plans]
    assert text[0] == text[1] and len(set(text)) == 3
    company = [{frozenset(piece.tolist()) for step in plan for piece in step} for plan in plans]
    assert len(company[0] & company[2]) < len(company[0]) / 4
    single = [batches_of(EpochPlan(MIXED, 0, epoch, 100, 1)) for epoch in range(2)]
    left_out = [set(range(234)) - set(np.concatenate(sum(plan, []))) for plan in single]
    assert len(left_out[0]) == len(left_out[1]) == 34 and left_out[0] != left_out[1]


def test_ranks_have_about_equal_work_and_little_padding_and_structures_stay_together():
    plan = EpochPlan(MIXED, seed=0, epoch=0, micro_batches=4, batch_size=4)
    lengths = np.array([len(pair.complex) for pair in MIXED])
    work = np.array([[lengths[piece].max() * len(piece) for piece in step] for step in batches_of(plan)])
    real = sum(lengths[piece].sum() for step in batches_of(plan) for piece in step)
    assert real / work.sum() > 0.95 and work.mean() / work.max(1).mean() > 0.85
    pieces = [piece for step in batches_of(plan) for piece in step]
    encoded = sum(len({MIXED[i].complex.key for i in piece}) for piece in pieces)
    assert encoded <= 60 + len(pieces)
    order = [lengths[step[0]].max() for step in batches_of(plan)]
    assert sorted(order) != order != sorted(order, reverse=True)


def test_structures_of_about_one_length_are_mixed_in_a_step():
    pairs = made(50, 40, 0) + made(50, 40, 1)
    steps = batches_of(EpochPlan(pairs, 0, 0, 4, 4))
    structures = [[{pairs[i].complex.key for i in piece} for piece in step] for step in steps]
    assert len(steps) == 5 and sum(len(set().union(*step)) == 2 for step in structures) >= 3
    assert all(len(piece) == 1 for step in structures for piece in step)


@pytest.mark.parametrize("n, micro_batches, batch_size", [(3, 4, 1), (0, 1, 1), (5, 0, 1), (5, 1, 0)])
def test_a_plan_without_a_pair_for_every_rank_is_refused(n, micro_batches, batch_size):
    with pytest.raises(ValueError, match="expected at least 1"):
        EpochPlan(MIXED[:n], 0, 0, micro_batches, batch_size)


def test_a_step_outside_the_epoch_is_refused():
    plan = EpochPlan(MIXED, 0, 0, 4, 4)
    for step in (-1, plan.n_steps):
        with pytest.raises(ValueError, match="expected 0 to"):
            plan.global_batch(step)


def test_evaluation_has_each_pair_once_whatever_the_ranks():
    batches = eval_batches(MIXED, 5)
    assert sorted(np.concatenate(batches).tolist()) == list(range(234)) and len(batches) == 47
    lengths = [len(MIXED[i].complex) for batch in batches for i in batch]
    assert lengths == sorted(lengths, reverse=True) and eval_batches([], 5) == []
    with pytest.raises(ValueError, match="batch_size"):
        eval_batches(MIXED, 0)


def test_a_batch_holds_each_complex_once_padded_to_the_longest(small):
    entries = [{**GOOD, "mutable_positions": [1, 5]}, {**GOOD, "preferred_seq": "MWXXVWA"}]
    entries.insert(1, {"pdb_file": "small.pdb", "design_chains": ["B"], "fixed_chains": ["A"], "preferred_seq": "GF",
                       "unpreferred_seq": "GY"})
    pairs = read_pairs(write(small, entries))
    batch = collate(pairs, [2, 1, 0])
    assert batch["complex"].tolist() == [0, 1, 0]
    text = lambda rows: ["".join(LETTERS[t] for t in row) for row in rows.tolist()]
    assert text(batch["S"]) == ["MKXXVLAAA", "GWMKXXVLA"]                     # A under padding, as 0 is A
    assert text(batch["chosen"]) == ["MWXXVWAAA", "GFMKXXVLA", "MKXXVLAAA"]
    assert text(batch["rejected"]) == ["MRXXVIAAA", "GYMKXXVLA", "MRXXVIAAA"]
    assert batch["chain_M"].tolist() == [[1, 1, 0, 1, 1, 1, 1, 0, 0], [1, 1] + [0] * 7, [0, 1, 0, 0, 0, 1, 0, 0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 1, 1, 0]]
    assert batch.keys() == {"complex", "S", "chosen", "rejected", "chain_M", "mask"}      # what is used, and no more
    whole = collate_complexes([pairs[2].complex, pairs[1].complex])
    assert torch.equal(whole["S"], batch["S"]) and whole["X"].shape == (2, 9, 4, 3)
    assert whole["residue_idx"][0].tolist() == [*range(7), -100, -100] and not whole["chain_id"][0, 7:].any()
    assert not whole["X"][0, 7:].any() and not whole["X"][0, 3].any()


def test_the_designed_part_of_a_complex_equals_the_official_one(fixtures, shared):
    three = fixtures["complex_small"]
    complex = Complex(read_structure(shared / "data" / "pdbs" / "3HTN.pdb"), ["A", "C"], ["B"])
    letters, n = three["inputs"]["S_chosen"][0, :286].numpy().astype(np.uint8), complex.n_designed
    pair = Pair(complex, letters, complex.S[:n], three["inputs"]["chain_M_pos"][0, :286].numpy().astype(bool))
    batch = collate([pair], [0])
    assert torch.equal(batch["chosen"], three["inputs"]["S_chosen"])
    assert torch.equal(batch["rejected"], three["inputs"]["S"])
    assert torch.equal(batch["chain_M"], three["inputs"]["chain_M_full"])


def test_padding_holds_the_values_of_the_official_code(fixtures):
    official, peptide = fixtures["padded_batch_small"]["inputs"], 24
    batch = collate_complexes([pair.complex for pair in made(peptide, 1) + made(30, 1)])
    for name, values in batch.items():
        wanted = official["chain_encoding_all" if name == "chain_id" else name]
        assert (values[0, peptide:] == wanted[1, peptide]).all() and values.dtype == wanted.dtype


# ---- demo ----

def test_ideal_backbones_have_the_textbook_geometry():
    distance = lambda a, b: np.linalg.norm(a - b, axis=-1)
    for (phi, psi), rise, turn in (((-57, -47), 1.5, 100), ((-120, 120), 3.3, None)):
        X = build_backbone([phi] * 20, [psi] * 20).astype(float)
        N, CA, C, O = X.transpose(1, 0, 2)
        bonds = (N, CA, 1.458), (CA, C, 1.525), (C[:-1], N[1:], 1.329), (C, O, 1.231), (CA[:-1], CA[1:], 3.80)
        for a, b, length in bonds:
            assert np.allclose(distance(a, b), length, atol=0.02)
        axis = np.cross(CA[1] - 2 * CA[2] + CA[3], CA[2] - 2 * CA[3] + CA[4])       # bends point to a helix's axis
        axis /= np.linalg.norm(axis)
        assert np.allclose(abs((CA[5] - CA[4]) @ axis), rise, atol=0.15)
        if turn:
            assert np.allclose(distance(O[:-4], N[4:]), 3.0, atol=0.2)                # hydrogen bonds i to i + 4
            across = CA[1:-1] * 2 - CA[:-2] - CA[2:]
            cosine = (across[0] @ across[1]) / np.linalg.norm(across[0]) ** 2
            assert abs(math.degrees(math.acos(cosine)) - turn) < 3
            assert (np.cross(across[0], across[1]) @ (CA[5] - CA[0])) > 0             # right-handed


def test_torsions_of_a_backbone_are_those_asked_for_and_peptides_are_trans():
    def torsion(a, b, c, d):
        n1, n2 = np.cross(b - a, c - b), np.cross(c - b, d - c)
        return math.degrees(math.atan2(np.linalg.norm(c - b) * (b - a) @ n2, n1 @ n2))
    phi, psi = [0, -57, -120, 60, -80], [-47, 120, 130, 40, 0]
    X = build_backbone(phi, psi).astype(float)
    for i in range(4):
        (N, CA, C, O), (N2, CA2, C2, _) = X[i], X[i + 1]
        assert np.allclose([torsion(N, CA, C, N2), torsion(C, N2, CA2, C2)], [psi[i], phi[i + 1]], atol=0.01)
        assert np.allclose(np.abs([torsion(CA, C, N2, CA2), torsion(O, C, N2, CA2)]), [180, 0], atol=0.01)


def helical(X):
    """Residues i whose CA i - 1 and i + 2 are near: 5 Angstrom in a helix, 10 in a strand. (L,) bool"""
    near = np.linalg.norm(X[3:, 1] - X[:-3, 1], axis=1) < 7
    return np.concatenate([near[:1], near, near[-1:], near[-1:]])


def test_demo_pairs_follow_the_stated_rule_which_the_backbone_alone_tells():
    pairs = demo_pairs(seed=1, n_structures=16, pairs_per_structure=4)
    assert len(pairs) == 64 and len(keys(pairs)) == 16
    assert sequences(pairs[:4]).isdisjoint(sequences(pairs[4:]))
    right = 0
    for pair in pairs:
        X, n = pair.complex.X, len(pair.complex)
        fits = lambda ids: sum(letter in ("AEHKLMQR" if h else "CFITVWY") for letter, h in zip(decode(ids), helical(X)))
        right += fits(pair.chosen) > fits(pair.rejected)
        assert 24 <= n <= 42 and pair.chain_M.all() and pair.complex.mask.all()
        CA = X[:, 1]
        far = np.linalg.norm(CA[:, None] - CA, axis=-1)[np.triu_indices(n, 3)]
        assert far.min() > 3.5                                          # no clashes
    assert right == 64


def test_letter_frequencies_do_not_tell_the_demo_preference():
    pairs = demo_pairs(seed=0, n_structures=64, pairs_per_structure=8)
    count = lambda side: np.bincount(np.concatenate([getattr(pair, side) for pair in pairs]), minlength=20)
    log_odds = np.log(count("chosen") / count("rejected"))
    right = np.mean([log_odds[p.chosen].sum() > log_odds[p.rejected].sum() for p in pairs])
    assert right < 0.6                                                 # the backbone brings it to 1, see above


def test_demo_pairs_are_a_function_of_the_seed():
    first, again, other = ([pair.key for pair in demo_pairs(seed, 4, 3)] for seed in (0, 0, 1))
    assert first == again and not set(first) & set(other)
    train, val, warning = split_pairs(demo_pairs(0), 0.1, seed=0)
    assert len(keys(val)) == 3 and warning is None and len(train) + len(val) == 256
