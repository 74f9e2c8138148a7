"""Rows of PDB and mmCIF files, and positions given as text."""
import gzip
import re

import gemmi
import numpy as np
import pytest
import torch

from mpnn.batches import collate_complexes
from mpnn_cases import Atoms, refusal, write
from proteins.letters import decode
from proteins.structures import (
    Chain,
    Complex,
    Structure,
    describe_reading,
    parse_positions,
    read_structure,
)
from tool_runs import assert_named


def read_text(tmp_path, name, text):
    return read_structure(write(tmp_path, text, name))


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
        chains = Complex(structure, design, case.get("fixed_chains", ()))
        for key, values in collate_complexes([chains]).items():
            expected = case["inputs"]["chain_encoding_all" if key == "chain_id" else key]
            assert torch.equal(values, expected) and values.dtype == expected.dtype
        assert list(chains.design + chains.fixed) == case["chain_order"]
        assert chains.n_designed == case["inputs"]["chain_M"].sum()


GAPS = (Atoms().add("A", -1, "ALA").add("A", 3, "THR").add("A", 3, "CYS", code="A")
        .add("A", 3, "SER", code="B").add("A", 5, "GLY").add("B", 1, "TRP")
        .add("A", 7, "ASP", code="C"))
ALTERNATIVES = (Atoms().add("A", 1, "SER", altloc="B").add("A", 1, "SER", altloc="A")
                .add("A", 2, "THR", ["N", "CA"], altloc="A").add("A", 2, "VAL", altloc="B")
                .add("A", 3, "GLY", ["N"]).add("A", 3, "GLY", model=2).add("A", 4, "TRP", model=2))


# Letters, and the record that each row begins with, or those of its four atoms.
@pytest.mark.parametrize("atoms, letters, expected", [
    (GAPS, "AXXXTCSXGXD", [0, None, None, None, 4, 8, 12, None, 16, None, 24]),
    (ALTERNATIVES, "STGW", [0, [8, 9, 12, 13], [14, 16, 17, 18], 19])],
    ids=["numbers left out, insertions", "the first alternative and model, atom by atom"])
def test_rows_of_both_formats_hold_the_letters_and_atoms_of_the_file_and_nothing_around_them(
        tmp_path, atoms, letters, expected):
    lines = atoms.pdb().splitlines()
    lines.insert(8, "TER\nEND")
    odd = b"REMARK \xe9\r\n" + "\r\n".join(lines).encode() + b"\r\nCONECT 1 2"
    for name, text in (("s.pdb", atoms.pdb()), ("s.cif", atoms.mmcif()), ("t.pdb", odd),
                       ("u.ent.gz", gzip.compress(atoms.pdb().encode())),
                       ("v.pdb", "\ufeff" + atoms.pdb()),
                       ("w.pdb", atoms.pdb().replace("\n", "\r").encode()),
                       ("x.cif", atoms.mmcif().replace("\n", "\r").encode())):
        chain, *others = read_text(tmp_path, name, text).chains.values()
        assert [decode(other.S) for other in others] == ["W"] * (atoms is GAPS)
        assert decode(chain.S) == letters and chain.X.dtype == np.float32
        for x, resolved, row in zip(chain.X[:, :, 0], chain.resolved, expected, strict=True):
            records = list(range(row, row + 4)) if isinstance(row, int) else row
            assert (x.astype(int).tolist() if resolved else None) == records
    if atoms is GAPS:
        assert chain.numbers == ("-1", None, None, None, "3", "3A", "3B", None, "5", None, "7C")
        assert not chain.X[~chain.resolved].any()


@pytest.mark.parametrize("text", [Atoms.pdb, Atoms.mmcif])
def test_names_of_residues_may_be_in_lower_case(tmp_path, text):
    atoms = Atoms().add("A", 1, "ala").add("A", 2, "Trp").add("A", 3, "mse", het=True)
    structure = read_text(tmp_path, "s.pdb" if text is Atoms.pdb else "s.cif", text(atoms))
    assert decode(structure.chains["A"].S) == "AWM"


@pytest.mark.parametrize("text", [Atoms.pdb, Atoms.mmcif])
def test_protons_and_bonds_in_the_name_of_a_residue_change_no_letter(tmp_path, text):
    atoms = Atoms()
    for number, name in enumerate(("HID", "HSE", "CYX", "ASH", "glh", "LYN"), start=1):
        atoms.add("A", number, name, het=name == "ASH")
    structure = read_text(tmp_path, "s.pdb" if text is Atoms.pdb else "s.cif", text(atoms))
    assert decode(structure.chains["A"].S) == "HHCDEK" and not structure.chains["A"].modified


@pytest.mark.parametrize("ca_only", [False, True])
def test_coordinates_in_nanometres_are_refused(shared, tmp_path, ca_only):
    structure = gemmi.read_structure(str(shared / "data" / "pdbs" / "5L33.pdb"))
    for place in structure[0].all():
        place.atom.pos = place.atom.pos / 10
    path = write(tmp_path, structure.make_pdb_string(), "s.pdb")
    with pytest.raises(ValueError, match="s.pdb.* 0.38 .*Nanometres"):
        read_structure(path, ca_only)


@pytest.mark.parametrize("name, text, other", [
    ("s.pdb", GAPS.mmcif(), ".cif"), ("s.cif", GAPS.pdb(), ".pdb")])
def test_a_structure_with_the_name_of_the_other_format_is_refused(tmp_path, name, text, other):
    assert other in refusal(write(tmp_path, text, name), read_structure)


def test_an_unknown_coordinate_of_mmcif_is_a_missing_atom_and_its_error_no_part_of_it(tmp_path):
    text = Atoms().add("AB-2", 1, "ALA").add("AB-2", 2, "GLY").mmcif()
    text = text.replace(" 0.125 ", " ? ").replace(" 4.125 ", " 4.125(7) ")
    chain = read_text(tmp_path, "s.cif", text).chains["AB-2"]
    assert chain.resolved.tolist() == [False, True] and chain.X[1, 0, 0] == 4.125


ONE = Atoms().add("A", 1, "ALA").pdb()
ONE_CIF = Atoms().add("A", 1, "ALA").mmcif()


@pytest.mark.parametrize("name, content, named", [
    ("s.pdb", b"\1\2", "ATOM"), ("s.pdb", "\0" + ONE, "zero"), ("s.txt", ONE, ".mmcif"),
    ("s.pdb", ONE.replace("   0.125", "  0.12.5"), "31 54"),
    *(("s.pdb", ONE.replace("   0.125", x), "31 54")
      for x in ("     inf", "     nan", "9.9e+300", "   0_1.2")),
    ("s.pdb", ONE.replace("A   1 ", "A   x "), "23 26"),
    ("s.pdb", ONE.replace("A   1 ", "A 1_0 "), "23 26"),
    ("s.pdb", "".join(Atoms().add("A", i, "ALA").pdb() for i in (1, 1)), "A 1"),
    ("s.pdb", Atoms().add("A", 1, "ALA").add("A", 2, "ALA", xyz=[(0, 0, 0)] * 4).pdb(),
     "4 0.000"),
    ("s.pdb.gz", gzip.compress(ONE.encode(), mtime=0)[:-9], ""), ("s.cif", ONE, ""),
    ("s.cif", "data_x\n_a.b 1\n", "0"),
    ("s.cif", Atoms().add("A", 1, "ALA").add("A", 900_000, "ALA").mmcif(), "100,000"),
    ("s.cif", Atoms().add("A", "?", "ALA").mmcif(), "auth_seq_id '?'"),
    ("s.cif", ONE_CIF.replace(" 0.125 ", " foo "), "Cartn_x 'foo'"),
    ("s.cif", ONE_CIF.replace("group_PDB", "group"), "group_PDB"),
    ("s.cif", ONE_CIF.replace("label_alt_id", "alt"), "label_alt_id"),
    ("s.cif", ONE_CIF.upper(), "case"), ("s.cif", ONE_CIF.replace(" 0.125 ", " 1e30 "), "1e+30")])
def test_a_structure_file_that_cannot_be_read_is_refused_with_the_reason(
        tmp_path, name, content, named):
    assert_named(named, refusal(write(tmp_path, content, name), read_structure))


# ---- modified residues ----

FORMATS = [("s.pdb", Atoms.pdb), ("s.cif", Atoms.mmcif)]


def around(name, number=11, far=0.0, **options):
    """ALA 10, this residue, GLY 12 of chain A, with CA 3.8 Angstrom apart; far: Angstrom more."""
    atoms = Atoms()
    for place, residue, how in ((10, "ALA", {}), (number, name, options), (12, "GLY", {})):
        away = far if residue == name else 0.0
        xyz = [(3.8 * place + k, float(k), away) for k in (-1, 0, 1, 2)]
        atoms.add("A", place, residue, xyz=xyz, **how)
    return atoms


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
@pytest.mark.parametrize("het", [False, True], ids=["ATOM", "HETATM"])
def test_a_modified_residue_in_a_chain_has_the_letter_of_its_parent(tmp_path, file, text, het):
    letters = {"MSE": "M", "SEP": "S", "TPO": "T", "PTR": "Y", "CSO": "C", "MLY": "K", "HYP": "P",
               "KCX": "K", "DAL": "A", "SEC": "X", "PYL": "X", "UNK": "X", "ASX": "X", "GLY": "G"}
    for name, letter in letters.items():
        chain = read_text(tmp_path, file, text(around(name, het=het))).chains["A"]
        assert decode(chain.S) == f"A{letter}G" and chain.resolved.all()
        assert chain.numbers == ("10", "11", "12")


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
@pytest.mark.parametrize("options", [
    {"name": "GLU", "far": 20.0}, {"name": "SEP", "far": 20.0}, {"name": "HEM"}, {"name": "HOH"},
    {"name": " DA"}, {"name": "SEP", "atoms": ["CA"], "bare": True}],
    ids=["an amino acid elsewhere", "a modified one elsewhere", "heme", "water", "DNA",
         "no backbone"])
def test_a_ligand_with_the_number_of_a_gap_leaves_it_a_gap(tmp_path, file, text, options):
    if options.pop("bare", False):
        atoms = Atoms(record for record in around(options["name"], het=True)
                      if record[2] != "SEP" or record[3] == "CA")
    else:
        atoms = around(het=True, **options)
    chain = read_text(tmp_path, file, text(atoms)).chains["A"]
    assert decode(chain.S) == "AXG" and chain.numbers == ("10", None, "12")
    assert chain.resolved.tolist() == [True, False, True]


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
@pytest.mark.parametrize("atoms, left_out", [
    (around("PCA", 9, het=True), "PCA A9"), (around("MLY", 13, het=True), "MLY A13"),
    (around("SEP", 10, het=True, code="A"), "SEP A10A")])
def test_a_modified_residue_that_would_shift_the_rows_is_left_out_with_a_word(
        tmp_path, file, text, atoms, left_out):
    structure = read_text(tmp_path, file, text(atoms))
    assert decode(structure.chains["A"].S) == "AXG"
    assert left_out in describe_reading([structure])


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
@pytest.mark.parametrize("name", ["SEP", "SER"], ids=["of another name", "of its name"])
def test_a_ligand_with_the_number_of_a_residue_does_not_count_as_a_second_one(
        tmp_path, file, text, name):
    atoms = around("SER")
    atoms += [record for record in around(name, het=True) if record[2] == name]
    structure = read_text(tmp_path, file, text(atoms.add("B", 1, "SEP", het=True)))
    assert {name: decode(chain.S) for name, chain in structure.chains.items()} == {"A": "ASG"}
    assert describe_reading([structure]) == ""


def test_a_modified_residue_with_an_insertion_code_fills_no_gap(tmp_path):
    atoms = around("SEP", 11, het=True, code="A")
    assert read_text(tmp_path, "s.pdb", atoms.pdb()).chains["A"].numbers == ("10", None, "12")


def test_a_ligand_of_mmcif_that_is_an_amino_acid_needs_no_number(tmp_path):
    lines = around("GLU", 77, het=True).mmcif().splitlines()
    text = "\n".join(line.replace(" 77 ", " ? ") if line.startswith("HETATM") else line
                     for line in lines)
    assert " ? " in text and " 77 " not in text
    assert read_text(tmp_path, "s.cif", text + "\n").chains["A"].numbers == ("10", None, "12")


def test_what_modified_residues_are_read_as_is_told_in_one_line(tmp_path):
    structures = [read_text(tmp_path, f"{name}.pdb", around(name).pdb())
                  for name in ("SEP", "UNK", "SER")]
    assert describe_reading(structures) == (
        "residues that are none of the 20 amino acids are read: SEP as S, UNK as X")
    assert describe_reading(structures[2:]) == ""


# ---- residues that would be lost ----

CHAIN = Atoms().add("A", 104, "ALA").add("A", 105, "ARG").add("A", 106, "ILE").mmcif()
OTHER = Atoms().add("B", 104, "LYS").add("B", 105, "LEU").add("B", 106, "VAL").mmcif()
FAR = (Atoms().add("B", 201, "LYS", xyz=[(x, 99, 0) for x in range(4)])
       .add("B", 202, "LEU", xyz=[(x, 99, 0) for x in range(4, 8)]).mmcif())


def both(one, other, author="A"):
    """One mmCIF text with the atoms of two, all under one author chain."""
    rows = [re.sub(r"^((?:\S+ ){16})\S+", rf"\g<1>{author}", line)
            for line in (one + other).splitlines() if line.startswith(("ATOM", "HETATM"))]
    head = one[:one.index("ATOM ")]
    return head + "\n".join(rows) + "\n"


def without(text, *keys):
    """mmCIF text without these columns of _atom_site."""
    block = gemmi.cif.read_string(text).sole_block()
    loop = block.find_loop("_atom_site.id").get_loop()
    for key in keys:
        loop.remove_column(f"_atom_site.{key}")
    return block.as_string()


@pytest.mark.parametrize("text, named", [
    (CHAIN.replace(" 106 A ", " 105 A "), "A 105 LA 501 502"),
    (both(CHAIN, OTHER), "A 104 LA LB 500"), (both(CHAIN, FAR), "A LA LB"),
    (re.sub(r" 50\d \?", " . ?", CHAIN.replace(" 106 A ", " 105 A ")), "N A 105"),
    (re.sub(r" 50\d \?", " . ?", CHAIN.replace(" 106 A ", " 105 A ").replace("ILE", "ARG")),
     "N A 105"),
    (without(CHAIN, "pdbx_PDB_ins_code").replace(" 106 A ", " 105 A "), "A 105"),
    (both(CHAIN.replace("A 1\n", "A 2\n"), CHAIN.replace(" 106 A ", " 105 A ")), "A 105"),
    (CHAIN.replace(" O . ARG", " O . LYS"), "A 105 ARG LYS"),
], ids=["one number", "two chains", "two chains apart", "no label numbers",
        "no label numbers, one name", "no insertion codes", "in the second model",
        "two names that share no atom"])
def test_residues_of_mmcif_that_would_be_lost_are_refused(tmp_path, text, named):
    assert_named(named, refusal(write(tmp_path, text, "s.cif"), read_structure))


@pytest.mark.parametrize("text, letters", [
    (without(CHAIN, "pdbx_PDB_ins_code", "pdbx_PDB_model_num"), "ARI"),
    (without(both(CHAIN, OTHER), "auth_asym_id"), "ARI"),
    (both(CHAIN, OTHER, "?"), "ARI"),
    (both(CHAIN, CHAIN.replace("A 1\n", "A 2\n")), "ARI"),
    (CHAIN.replace("502 ? ", "502 A ").replace(" 106 A ", " 105 A "), "ARI"),
    (both(CHAIN, FAR.replace(" 500 ", " 600 ").replace(" 501 ", " 601 ")), "ARI" + 94 * "X" + "KL"),
], ids=["no codes or models", "no author chains", "blank author chains", "two models",
        "an insertion code", "label chains that count on"])
def test_residues_of_mmcif_that_are_told_apart_are_all_read(tmp_path, text, letters):
    chain = next(iter(read_text(tmp_path, "s.cif", text).chains.values()))
    assert decode(chain.S) == letters and chain.resolved.sum() == len(letters.replace("X", ""))


def test_tables_beside_the_atoms_are_not_read(shared):
    """A table of SIFTS that gemmi refuses."""
    for name in ("sifts_ok.cif", "sifts_mm.cif"):
        chains = read_structure(shared / "cases" / "structures" / name).chains
        assert {key: decode(chain.S) for key, chain in chains.items()} == {"A": "AGSK"}


@pytest.mark.parametrize("change", [(" 105 A 1", " . A 1"), (" 4.125 ", " foo ")])
def test_a_ligand_needs_no_numbers(tmp_path, change):
    ligand = Atoms().add("A", 104, "ALA").add("A", 105, "HEM", het=True).mmcif()
    structure = read_text(tmp_path, "s.cif", ligand.replace(*change))
    assert decode(structure.chains["A"].S) == "A"


@pytest.mark.parametrize("change, named", [
    ((" 105 A 1", " . A 1"), "auth_seq_id '.'"), ((" 4.125 ", " foo "), "Cartn_x 'foo'")])
def test_selenomethionine_needs_numbers(tmp_path, change, named):
    text = Atoms().add("A", 104, "ALA").add("A", 105, "MSE", het=True).mmcif()
    assert decode(read_text(tmp_path, "s.cif", text).chains["A"].S) == "AM"
    path = write(tmp_path, text.replace(*change), "s.cif")
    assert_named(named, refusal(path, read_structure))


def test_residue_numbers_of_five_digits_are_read_from_columns_23_to_27(shared):
    chain = read_structure(shared / "cases" / "structures" / "over9999.pdb").chains["A"]
    assert chain.numbers == tuple(str(number) for number in range(9985, 10015))
    assert chain.resolved.all()


@pytest.mark.parametrize("columns", ["  10 0", "-1000", " 1000", "1000A0", "100000"])
def test_another_digit_right_of_column_26_is_refused(tmp_path, columns):
    """It would be read as an insertion code, and the number ten times too small."""
    text = re.sub(r"A   1 {2}", "A" + columns.ljust(6), Atoms().add("A", 1, "ALA").pdb())
    assert_named("23 26", refusal(write(tmp_path, text, "s.pdb"), read_structure))


def test_an_atom_that_comes_twice_is_named(tmp_path):
    line = Atoms().add("A", 1, "ALA").pdb().splitlines()[1]
    text = Atoms().add("A", 1, "ALA").add("A", 2, "GLY").pdb().replace(line, f"{line}\n{line}")
    assert_named("CA A 1", refusal(write(tmp_path, text, "s.pdb"), read_structure))
    twice = 2 * Atoms().add("A", 1, "ALA").add("A", 2, "GLY").pdb()
    assert_named("N A 1", refusal(write(tmp_path, twice, "t.pdb"), read_structure))


# ---- residues whose numbers do not rise along the chain ----

def chain_in_order(words, far=()):
    """Atoms of ALA with numbers such as 10P, in the order of the file and bound to each other, but
    12 Angstrom from the one before where the word is in `far`."""
    atoms = Atoms()
    x = 0.0
    for word in words.split():
        number, code = re.fullmatch(r"(-?\d+)(.*)", word).groups()
        x += 12.0 if word in far else 3.8
        xyz = [(x + k, float(k), 0.0) for k in (-1, 0, 1, 2)]
        atoms.add("A", int(number), "ALA", code=code, xyz=xyz)
    return atoms


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
@pytest.mark.parametrize("words, far, expected", [
    ("5P 6P 7P 1 2 3 4 5 6 7 8", "", "5P 6P 7P 1 2 3 4 5 6 7 8"),
    ("5P 8P 1 2 3 4 5 6 7 8", ["8P"], "5P - - 8P 1 2 3 4 5 6 7 8"),
    ("229 230 1002 1003 240 241", "", "229 230 1002 1003 240 241"),
    ("229 230 1002 1003 240 243", ["243"], "229 230 1002 1003 240 - - 243"),
    ("229 230 1002 1003 240 241", ["240"], "229 230 1002 1003 240 241"),
    ("229 230 1002 1003 240 241", ["1002"], "229 230 1002 1003 240 241"),
    ("4 5 6 1 2 3", "", "4 5 6 1 2 3"),
    ("9996 9997 9998 9999 0 1 2", "", "9996 9997 9998 9999 0 1 2"),
    ("1B 1A 1 2 3", "", "1B 1A 1 2 3"),
    ("110 111 111A 112A 112 113", "", "110 111 111A 112A 112 113"),
    ("1 2 5 6 5A 7", "", "1 2 5 6 5A 7")], ids=[
        "propeptide", "propeptide with a gap", "fusion", "fusion with a gap",
        "fusion, one end unbound", "fusion, the other end unbound", "circular permutant",
        "negative numbers", "thrombin", "IMGT", "a leap that is bound"])
def test_rows_keep_the_order_of_the_file_where_numbers_do_not_rise_along_the_chain(
        tmp_path, file, text, words, far, expected):
    structure = read_text(tmp_path, file, text(chain_in_order(words, far)))
    chain = structure.chains["A"]
    assert " ".join(number or "-" for number in chain.numbers) == expected
    known = chain.X[chain.resolved][:, 1, 0]
    assert (np.diff(known) > 0).all()       # along the line on which the residues stand
    assert "the rows of chain A are in the order of the file" in describe_reading([structure])


@pytest.mark.parametrize("file, text", FORMATS, ids=["PDB", "mmCIF"])
def test_residues_at_the_end_of_the_file_that_are_bound_inside_the_chain_stand_there(
        tmp_path, file, text):
    atoms = chain_in_order("1 2 3 4 5")
    inside = [record for record in atoms if record[1] == 3]
    atoms = Atoms([record for record in atoms if record[1] != 3] + inside)
    structure = read_text(tmp_path, file, text(atoms))
    assert structure.chains["A"].numbers == ("1", "2", "3", "4", "5")
    assert "in the order of the numbers" in describe_reading([structure])


def test_an_order_that_nothing_tells_is_refused_in_pdb(tmp_path):
    path = write(tmp_path, chain_in_order("11 12 13 1 2 3", far=["1"]).pdb(), "s.pdb")
    assert_named("13 1", refusal(path, read_structure))


def test_the_label_numbers_of_mmcif_tell_the_order_where_distances_do_not(tmp_path):
    text = chain_in_order("11 12 13 1 2 3", far=["1"]).mmcif()
    chain = read_text(tmp_path, "s.cif", text).chains["A"]
    assert chain.numbers == ("11", "12", "13", "1", "2", "3")


def test_rows_without_atoms_of_a_protein_have_no_order_to_keep(tmp_path):
    atoms = chain_in_order("5 6").add("A", 3, " DA", ["P"]).add("A", 2, " DA", ["P"])
    structure = read_text(tmp_path, "s.pdb", atoms.pdb())
    assert structure.chains["A"].numbers == ("2", "3", None, "5", "6")
    assert describe_reading([structure]) == ""


FUSION = "228 229 230 1002 1003 240 241"


@pytest.mark.parametrize("words, text, rows", [
    (FUSION, "A229-A230", [1, 2]), (FUSION, "A1002-A240", [3, 4, 5]), (FUSION, "A240-A241", [5, 6]),
    ("5P 6P 7P 1 2 3 4 5 6 7", "A5-A7", [7, 8, 9]), ("5P 6P 7P 1 2 3 4", "A5P-A7P", [0, 1, 2]),
    ("5P 6P 7P 1 2 3 4", "A6P-A2", [1, 2, 3, 4]), ("9998 9999 0 1 2", "A9999-A1", [1, 2, 3]),
    ("110 111 111A 112A 112 113", "A110-A113", [0, 1, 2, 3, 4, 5])])
def test_a_range_is_read_where_its_numbers_rise_along_the_chain(tmp_path, words, text, rows):
    structure = read_text(tmp_path, "s.pdb", chain_in_order(words).pdb())
    assert parse_positions(text, structure, ["A"])[0].tolist() == rows


@pytest.mark.parametrize("words, text, other", [
    (FUSION, "A229-A241", "1002"), (FUSION, "A229-A1002", "240"),
    ("5P 6P 7P 1 2 3 4 5 6 7", "A5P-A6", "7P")])
def test_a_range_that_holds_other_numbers_than_those_between_its_ends_is_refused(
        tmp_path, words, text, other):
    structure = read_text(tmp_path, "s.pdb", chain_in_order(words).pdb())
    with pytest.raises(ValueError) as caught:
        parse_positions(text, structure, ["A"])
    assert_named(f"{text} {other}", str(caught.value))


# ---- the file as a whole ----

@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
def test_a_file_larger_than_any_structure_is_refused_before_it_is_unpacked(
        tmp_path, monkeypatch, pack):
    monkeypatch.setattr("proteins.structure_files.MAX_MIB", 1)
    line = Atoms().add("A", 1, "ALA").pdb().splitlines()[0] + "\n"
    path = write(tmp_path, pack((line * 14_000).encode()), "s.pdb")
    said = refusal(path, read_structure)
    assert_named("1 MiB", said)
    assert "\n" not in said


def test_the_key_of_a_structure_changes_with_its_coordinates():
    def key(x):
        place = np.full((1, 4, 3), x, np.float32)
        chain = Chain(np.zeros(1, np.uint8), place, np.ones(1, bool), ("1",))
        return Structure("s.pdb", {"A": chain}).key

    assert key(1.0) == key(1.0) != key(1.5)


# ---- positions on a command line ----

@pytest.mark.parametrize("text, chains, positions, understood", [
    ("A5A", "AB", [5], "chain and number"), ("A3-A5A", "AB", [2, 3, 4, 5], "chain"),
    ("B10 A2", "AB", [1, 7], "chain"), ("B10 A2", "BA", [0, 3], "chain"),
    ("A1, A2 A6-B10", "AB", [0, 1, 6, 7], "chain"), ("2-4,6", "AB", [2, 3, 4, 6], "0-bas")])
def test_positions_are_read_by_number_or_by_index_with_a_note_that_says_which(
        small, text, chains, positions, understood):
    structure = read_structure(small / "small.pdb")
    found, note = parse_positions(text, structure, list(chains))
    assert found.tolist() == positions and understood in note


@pytest.mark.parametrize("text", [
    "A4", "C1", "", ", ", "A5-A2", "A1 A1", "A1-A3 A2", "A1 A5-A2", "A1 3", "9", "5-2", "-1",
    "A1-3", "1.5", "A05", "99999999999"])
def test_positions_that_are_not_there_or_of_two_kinds_are_refused(small, text):
    with pytest.raises(ValueError, match="position"):
        parse_positions(text, read_structure(small / "small.pdb"), ["A", "B"])


def test_a_position_that_two_readings_fit_is_refused(tmp_path):
    atoms = Atoms().add("1", 2, "CYS").add("1", 12, "SER").add("1", 13, "ALA").add("11", 2, "GLY")
    structure = read_text(tmp_path, "s.cif", atoms.add("A", -3, "ALA").mmcif())
    for text in ("112", "12"):          # chain 1, 12 or chain 11, 2; chain 1, 2 or number 12 from 0
        with pytest.raises(ValueError, match=text):
            parse_positions(text, structure, ["1", "11"])
    assert parse_positions("112 113", structure, ["1"])[0].tolist() == [10, 11]


@pytest.mark.parametrize("text, rows", [("52a", [1]), ("52A", [1]), ("52B", [2]), ("52b", [2])])
def test_an_insertion_code_is_found_in_capitals_and_small(text, rows, tmp_path):
    atoms = Atoms().add("A", 52, "ALA").add("A", 52, "GLY", code="A").add("A", 52, "SER", code="b")
    structure = read_text(tmp_path, "s.pdb", atoms.pdb())
    assert parse_positions(f"A{text}", structure, ["A"])[0].tolist() == rows
    assert [structure.chains["A"].row_of(text)] == rows
    assert parse_positions(f"A52-A{text}", structure, ["A"])[0].tolist() == [0, 1, 2][:rows[0] + 1]


def test_a_position_with_another_insertion_code_gets_those_that_are_there(small):
    with pytest.raises(ValueError, match=r"A5c.* A5, A5A"):
        parse_positions("A5c", read_structure(small / "small.pdb"), ["A", "B"])


def test_the_sign_of_a_number_is_no_range(tmp_path):
    structure = read_text(tmp_path, "s.cif", Atoms().add("A", -3, "ALA").mmcif())
    assert parse_positions("A-3-A-3", structure, ["A"])[0].tolist() == [0]


def test_a_chain_without_a_name_has_positions_from_0_alone(tmp_path):
    atoms = Atoms().add("", 1, "ALA").add("A", 12, "GLY")
    structure = read_text(tmp_path, "s.pdb", atoms.pdb())
    assert parse_positions("1", structure, list(structure.chains))[0].tolist() == [1]   # from 0
    with pytest.raises(ValueError, match="-A12"):
        parse_positions("-A12", structure, list(structure.chains))
