"""What programs write into PDB and mmCIF files besides what the formats say: names of residues and
atoms, caps, chains without names."""
import re

import pytest

from mpnn_cases import Atoms, refusal, write
from proteins.letters import decode
from proteins.structures import BACKBONE, describe_reading, read_structure
from tool_runs import assert_named

BOTH = pytest.mark.parametrize("file, text", [("s.pdb", Atoms.pdb), ("s.cif", Atoms.mmcif)],
                               ids=["PDB", "mmCIF"])


def line_of(chain, names, first=1, away=0.0, **options):
    """Atoms of residues with these names, CA 3.8 Angstrom apart, on one line.

    away: Angstrom between this line and others."""
    atoms = Atoms()
    for number, name in enumerate(names, start=first):
        xyz = [(3.8 * number + k, float(k), away) for k in (-1, 0, 1, 2)]
        atoms.add(chain, number, name, xyz=xyz, **options)
    return atoms


def with_segment(atoms, segment):
    """PDB text without END, with the name of a segment in columns 73 to 76."""
    lines = atoms.pdb().removesuffix("END\n").splitlines()
    return "".join(f"{line[:72]}{segment:4}{line[76:]}\n" for line in lines)


def pdb(*parts, between="TER\n"):
    """PDB text of parts, each Atoms or text."""
    texts = [with_segment(part, "") if isinstance(part, Atoms) else part for part in parts]
    return between.join(texts) + between


def read(tmp_path, file, text):
    return read_structure(write(tmp_path, text, file))


def letters_of(structure):
    """{chain: letters}"""
    return {name: decode(chain.S) for name, chain in structure.chains.items()}


# ---- names of atoms and residues ----

@BOTH
@pytest.mark.parametrize("names", [
    ("OT1", "OT2"), ("OC1", "OC2"), ("O1", "O2"), ("OT", "OXT"), ("OXT",)], ids=" ".join)
def test_an_oxygen_at_the_end_of_a_chain_is_its_o(tmp_path, file, text, names):
    atoms = line_of("A", ["GLY", "TRP"])
    atoms += line_of("A", ["ALA"], 3, atoms=BACKBONE[:3])
    for k, name in enumerate(names):
        atoms.add("A", 3, "ALA", [name], xyz=[(10.0 + k, 5.0, 0.0)])
    chain = read(tmp_path, file, text(atoms)).chains["A"]
    assert chain.resolved.all()
    assert chain.X[2, 3].tolist() == [10.0, 5.0, 0.0]


@BOTH
def test_a_residue_that_has_o_keeps_it_beside_oxt(tmp_path, file, text):
    atoms = Atoms().add("A", 1, "GLY", ["OXT", *BACKBONE], xyz=[(k, 1, 0) for k in range(5)])
    assert read(tmp_path, file, text(atoms)).chains["A"].X[0, 3].tolist() == [4, 1, 0]


@BOTH
@pytest.mark.parametrize("names, letters", [
    (["NGLY", "TRP", "CGLU"], "GWE"), (["NHIE", "NCYX", "CHID"], "HCH"), (["NLYP", "CTYR"], "KY"),
    (["HISA", "HISB", "HISD", "HISE", "HISH", "HIS1"], "HHHHHH"), (["CYS2", "CYSH"], "CC"),
    (["ASPH", "GLUH", "LYSH", "ARGN"], "DEKR"), (["LYP", "LSN", "CYN"], "KKC"),
    (["nala", "cGLY"], "AG")], ids=lambda value: " ".join(value))
def test_names_of_molecular_dynamics_are_amino_acids(tmp_path, file, text, names, letters):
    structure = read(tmp_path, file, text(line_of("A", names)))
    assert letters_of(structure) == {"A": letters}
    assert describe_reading([structure]) == ""


@pytest.mark.parametrize("chain", ["HA", "YA", "1A"])
def test_a_chain_of_a_pdb_file_may_have_a_name_of_two_columns(tmp_path, chain):
    atoms = line_of("A", ["ALA", "TRP"]) + line_of(chain, ["GLY", "GLU", "ASP", "LYS"], away=30.0)
    structure = read(tmp_path, "s.pdb", Atoms(atoms).pdb())
    assert letters_of(structure) == {"A": "AW", chain: "GEDK"}


def test_an_unknown_name_of_four_letters_is_no_chain(tmp_path):
    structure = read(tmp_path, "s.pdb", line_of("A", ["ALA", "TRPQ", "GLY"]).pdb())
    assert letters_of(structure) == {"A": "AWG"}


@BOTH
@pytest.mark.parametrize("first, last", [
    ("ACE", "NME"), ("ACE", "NMA"), ("FOR", "NH2"), ("ace", "NHE"), ("BOC", "NAC")])
def test_caps_of_a_chain_are_no_rows(tmp_path, file, text, first, last):
    atoms = line_of("A", [first], 0, atoms=["CH3", "C", "O"]) + line_of("A", ["GLY", "TRP"])
    atoms += line_of("A", [last], 3, atoms=["N", "CA"])
    structure = read(tmp_path, file, text(Atoms(atoms)))
    assert letters_of(structure) == {"A": "GW"} and structure.chains["A"].numbers == ("1", "2")


@BOTH
def test_a_cap_with_the_number_of_its_residue_is_no_second_one(tmp_path, file, text):
    atoms = line_of("A", ["GLY", "TRP"]) + line_of("A", ["NME"], 2, away=2.0, atoms=["N", "C"])
    assert letters_of(read(tmp_path, file, text(Atoms(atoms)))) == {"A": "GW"}


# ---- chains that a PDB file does not name ----

ONE = ["GLY", "TRP"]
OTHER = ["SER", "THR"]
FAR = line_of("", OTHER, 3, away=30.0)                  # numbers go on
FAR_FROM_1 = line_of("", OTHER, away=30.0)              # numbers begin anew
WATER = line_of("", ["WAT"], 9, atoms=["O"], away=50.0)
GAP = Atoms(line_of("", ONE) + line_of("", OTHER, 4))
MSE = line_of("", ["MSE"], 3, het=True)                 # in the gap
LIGAND = line_of("", ["GLU"], 20, away=50.0, het=True)
FIRST_OF_P = line_of("P", ONE)
SECOND_OF_P = line_of("P", OTHER, away=30.0)
PROA = with_segment(FIRST_OF_P, "PROA")
PROB = with_segment(SECOND_OF_P, "PROB")
NOT_OF_PROTEIN = [("WAT", ["O"]), ("HOH", ["O"]), ("SOL", ["OW"]), ("TIP3", ["OH2"]),
                  ("NA", ["NA"]), ("SOD", ["SOD"]), ("CA", ["CA"]), ("POPC", ["N", "C1", "P"]),
                  ("NAG", ["C1"])]


@pytest.mark.parametrize("text, letters", [
    (pdb(line_of("", ONE), FAR), {"A": "GW", "B": "ST"}),
    (pdb(line_of("", ONE), FAR_FROM_1), {"A": "GW", "B": "ST"}),
    (pdb(line_of("", ONE), FAR_FROM_1, between="END\n"), {"A": "GW", "B": "ST"}),
    (pdb(line_of("", ONE), FAR, line_of("A", ["ALA"])), {"B": "GW", "C": "ST", "A": "A"}),
    (pdb(with_segment(line_of("", ONE), "PROA"), with_segment(FAR, "PROB")),
     {"PROA": "GW", "PROB": "ST"}),
    (pdb(with_segment(line_of("", ONE), "L"), with_segment(FAR_FROM_1, "H"), between=""),
     {"L": "GW", "H": "ST"}),
    (pdb(PROA, PROB), {"PROA": "GW", "PROB": "ST"}),
    (pdb(with_segment(FIRST_OF_P, "P"), with_segment(SECOND_OF_P, "Q")), {"P": "GW", "Q": "ST"}),
], ids=["TER", "TER, numbers anew", "END", "TER, a named chain", "segments", "segments, no TER",
        "segments of one name",
        "a segment called as its chain"])
def test_proteins_that_no_chain_name_tells_apart_are_chains_of_their_own(tmp_path, text, letters):
    structure = read(tmp_path, "s.pdb", text)
    assert letters_of(structure) == letters
    named = " ".join(name for name in letters if letters[name] != "A")
    assert f"are read as chains {named}" in describe_reading([structure])


def test_proteins_of_all_models_get_the_same_chains(tmp_path):
    model = pdb(line_of("", ONE), FAR)
    structure = read(tmp_path, "s.pdb", f"MODEL        1\n{model}ENDMDL\nMODEL        2\n{model}")
    assert letters_of(structure) == {"A": "GW", "B": "ST"}
    assert "are read as chains A B;" in describe_reading([structure])


def test_models_that_are_not_read_are_told(tmp_path):
    """A biological assembly has the copies of a chain in models, under one name."""
    copies = [pdb(line_of("A", ONE, away=away)) for away in (0.0, 40.0)]
    text = "".join(f"MODEL {number:8}\n{copy}ENDMDL\n" for number, copy in enumerate(copies, 1))
    structure = read(tmp_path, "s.pdb", text)
    assert letters_of(structure) == {"A": "GW"}
    assert "of 2 models the first one counts" in describe_reading([structure])
    assert describe_reading([read(tmp_path, "t.pdb", copies[0] + "ENDMDL\n")]) == ""


def test_a_broken_chain_is_one_beside_proteins_without_names(tmp_path):
    broken = pdb(line_of("C", ONE, away=-30.0), line_of("C", OTHER, 5, away=-45.0))
    structure = read(tmp_path, "s.pdb", broken + pdb(line_of("", ONE), FAR))
    assert letters_of(structure) == {"C": "GWXXST", "A": "GW", "B": "ST"}


def frame(*proteins, away=0.0):
    """Records of proteins without chain names, away from those of another frame."""
    return "".join(with_segment(line_of("", ONE + OTHER, away=40.0 * k + away), segment)
                   for k, segment in enumerate(proteins))


@pytest.mark.parametrize("proteins, n_frames", [
    ([""], 2), ([""], 3), (["PROA"], 2), (["PROA", "PROB"], 2)],
    ids=["two frames", "three frames", "of a segment", "of two proteins"])
def test_frames_of_a_trajectory_are_no_chains(tmp_path, proteins, n_frames):
    frames = [frame(*proteins, away=0.8 * number) for number in range(n_frames)]
    path = write(tmp_path, "END\n".join(frames) + "END\n", "s.pdb")
    refusal(path, read_structure)


def test_alternative_locations_are_no_second_protein_at_one_place(tmp_path):
    one = line_of("", ONE + OTHER, altloc="A") + line_of("", ONE + OTHER, away=0.5, altloc="B")
    structure = read(tmp_path, "s.pdb", pdb(Atoms(one), FAR_FROM_1))
    assert letters_of(structure) == {"A": "GWST", "B": "ST"}


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)], ids=str)
def test_models_with_different_numbers_of_proteins_are_refused(tmp_path, counts):
    proteins = [line_of("", ONE), FAR_FROM_1]
    text = "".join(f"MODEL {k:8}\n{pdb(*proteins[:n])}ENDMDL\n" for k, n in enumerate(counts, 1))
    message = refusal(write(tmp_path, text, "s.pdb"), read_structure)
    assert_named(f"{counts[0]} {counts[1]}", message)


@pytest.mark.parametrize("name, atoms", NOT_OF_PROTEIN, ids=[name for name, _ in NOT_OF_PROTEIN])
@pytest.mark.parametrize("chain", ["", "A"], ids=["no chain name", "chain A"])
def test_water_ions_and_lipids_in_atom_records_are_no_rows(tmp_path, chain, name, atoms):
    others = Atoms(atom for number in (1, 2, 2, 9)     # numbers of the protein, and one twice
                   for atom in line_of(chain, [name], number, atoms=atoms, away=50.0))
    structure = read(tmp_path, "s.pdb", pdb(line_of(chain, ONE), others))
    assert letters_of(structure) == {chain: "GW"} and describe_reading([structure]) == ""


def test_water_ions_and_lipids_of_mmcif_are_no_rows(tmp_path):
    atoms = line_of("A", ONE)
    for number, (name, of_it) in enumerate(NOT_OF_PROTEIN, start=1):
        atoms += line_of("A", [name], number, atoms=of_it, away=50.0)
    assert letters_of(read(tmp_path, "s.cif", Atoms(atoms).mmcif())) == {"A": "GW"}


def test_water_beside_proteins_without_names_is_no_chain(tmp_path):
    structure = read(tmp_path, "s.pdb", pdb(line_of("", ONE), FAR, WATER))
    assert letters_of(structure) == {"A": "GW", "B": "ST"}


def test_dna_beside_a_protein_without_a_name_is_no_row(tmp_path):
    dna = line_of("", [" DA", " DT"], atoms=["P"], away=50.0)
    assert letters_of(read(tmp_path, "s.pdb", pdb(line_of("", ONE), dna))) == {"": "GW"}
    assert letters_of(read(tmp_path, "s.pdb", pdb(line_of("A", ONE), dna))) == {"A": "GW", "": "XX"}
    dna = line_of("D", [" DA", " DT"], atoms=["P"], away=50.0)
    assert letters_of(read(tmp_path, "s.pdb", pdb(line_of("", ONE), dna))) == {"": "GW", "D": "XX"}


@BOTH
def test_an_unknown_residue_with_a_backbone_is_a_row(tmp_path, file, text):
    chain = read(tmp_path, file, text(line_of("A", ["GLY", "QQQ", "TRP"]))).chains["A"]
    assert decode(chain.S) == "GXW" and chain.resolved.all()


def test_water_in_atom_records_takes_no_number_of_a_modified_residue(tmp_path):
    sep = line_of("", ["SEP"], 3, het=True)
    water = line_of("", ["WAT"], 3, atoms=["O"], away=50.0)
    assert letters_of(read(tmp_path, "s.pdb", pdb(GAP, sep, water, between=""))) == {"": "GWSST"}


@pytest.mark.parametrize("text, letters", [
    (pdb(line_of("A", ONE), line_of("A", OTHER, 3)), {"A": "GWST"}),
    (pdb(line_of("A", ONE), line_of("A", OTHER, 5)), {"A": "GWXXST"}),
    (pdb(line_of("", ONE), line_of("", OTHER, 3)), {"": "GWST"}),
    (pdb(line_of("", ONE + OTHER), LIGAND), {"": "GWST"}),
    (pdb(with_segment(line_of("A", ONE), "A1"), with_segment(line_of("A", OTHER, 3), "A2")),
     {"A": "GWST"}),
    (with_segment(line_of("A", ONE), "1ABC"), {"A": "GW"}),
], ids=["a break", "a gap", "no name, bound", "no name, a ligand",
        "segments that are bound", "one segment"])
def test_a_chain_in_parts_is_one_chain(tmp_path, text, letters):
    structure = read(tmp_path, "s.pdb", text)
    assert letters_of(structure) == letters and describe_reading([structure]) == ""


@pytest.mark.parametrize("text, letters, words", [
    (pdb(line_of("", ONE), line_of("", OTHER, 5)), {"": "GWXXST"}, "(blank) 2 and 5"),
    (pdb(with_segment(line_of("A", ONE), "S1"), with_segment(line_of("A", OTHER, 5), "S2")),
     {"A": "GWXXST"}, "A 2 and 5"),
    (pdb(with_segment(line_of("A", ONE), "S1"), with_segment(line_of("A", OTHER, 3, 30.0), "S2")),
     {"A": "GWST"}, "A 2 and 3"),
], ids=["no name", "a chain of two segments", "a broken chain of two segments"])
def test_parts_through_which_the_numbers_rise_are_one_chain(tmp_path, text, letters, words):
    structure = read(tmp_path, "s.pdb", text)
    assert letters_of(structure) == letters
    assert f"read as one chain, as the numbers rise: {words} (" in describe_reading([structure])


def test_a_gap_over_end_separates_proteins_without_names(tmp_path):
    text = pdb(line_of("", ONE), line_of("", OTHER, 5), between="END\n")
    assert letters_of(read(tmp_path, "s.pdb", text)) == {"A": "GW", "B": "ST"}


def test_a_part_without_residue_numbers_is_refused(tmp_path):
    text = pdb(line_of("", ONE), with_segment(FAR, "").replace("   3    ", "        "))
    assert_named("number", refusal(write(tmp_path, text, "s.pdb"), read_structure))


def test_a_gap_too_short_for_the_distance_separates_proteins_without_names(tmp_path):
    structure = read(tmp_path, "s.pdb", pdb(line_of("", ONE), line_of("", OTHER, 5, away=30.0)))
    assert letters_of(structure) == {"A": "GW", "B": "ST"}


def test_a_chain_whose_residues_are_segments_by_turns_is_one(tmp_path):
    parts = [with_segment(line_of("A", [name], number), f"S{number % 2}")
             for number, name in enumerate(2 * (ONE + OTHER), start=1)]
    assert letters_of(read(tmp_path, "s.pdb", "".join(parts))) == {"A": "GWSTGWST"}


def test_selenomethionine_far_from_its_segment_belongs_to_it(tmp_path):
    text = with_segment(GAP, "PROA") + with_segment(FAR_FROM_1, "PROB") + with_segment(MSE, "PROA")
    assert letters_of(read(tmp_path, "s.pdb", text)) == {"PROA": "GWMST", "PROB": "ST"}


def test_selenomethionine_after_a_chain_without_a_name_fills_its_gap(tmp_path):
    structure = read(tmp_path, "s.pdb", pdb(GAP, MSE))
    assert letters_of(structure) == {"": "GWMST"}
    assert structure.chains[""].numbers == ("1", "2", "3", "4", "5")


def test_text_in_columns_73_to_76_that_changes_in_a_residue_names_no_segment(tmp_path):
    lines = with_segment(Atoms(line_of("A", ONE) + line_of("A", OTHER, 3, away=30.0)), "")
    text = "".join(f"{line[:72]}{k % 3:4}{line[76:]}\n" for k, line in enumerate(lines.split("\n"))
                   if line)
    assert letters_of(read(tmp_path, "s.pdb", text)) == {"A": "GWST"}


@pytest.mark.parametrize("end", ["  1.00 20.00      1SG   2", "  1.00 20.00      1ABC 101", " a b",
                                 "\t1.00"], ids=["MODELLER", "PDB of 1995", "letters", "a tab"])
def test_what_is_right_of_coordinates_may_be_anything(tmp_path, end):
    lines = line_of("A", ONE).pdb().removesuffix("END\n").splitlines()
    text = "".join(f"{line[:54]}{end}\n" for line in lines)
    assert letters_of(read(tmp_path, "s.pdb", text)) == {"A": "GW"}


def test_chains_of_mmcif_without_author_names_have_label_names(tmp_path):
    chains = line_of("1", ["GLY", "SER", "TRP"]) + line_of("2", OTHER, away=30.0)
    chains += line_of("2", ["SEP"], 3, away=30.0, het=True) + line_of("2", ["ALA"], 4, away=30.0)
    text = re.sub(r"\w( \d)$", r".\1", Atoms(chains).mmcif(), flags=re.MULTILINE)
    assert letters_of(read(tmp_path, "s.cif", text)) == {"L1": "GSW", "L2": "STSA"}


@BOTH
def test_successive_numbers_of_residues_that_are_far_apart_are_told(tmp_path, file, text):
    atoms = Atoms(line_of("A", ONE) + line_of("A", OTHER, 3, away=30.0))
    structures = [read(tmp_path, file, text(atoms))]
    assert "(Angstrom between CA): A2 and A3 (30.2)" in describe_reading(structures)
    structures.append(read(tmp_path, f"t{file}", text(atoms)))
    assert f"{file}: A2 and A3 (30.2), t{file}: A2 and A3" in describe_reading(structures)
