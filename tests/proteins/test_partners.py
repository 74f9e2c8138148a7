"""proteins/partners.py, copies.py and places.py: variants of several chains, of two partners that
bind, and of chains that are copies of each other."""

import itertools
import math

import numpy as np
import pytest

from mpnn_cases import Atoms, refusal, write
from proteins.mutations import (
    measured_values,
    place_all,
    place_on_sequences,
    read_mutations,
    scan_structure,
)
from proteins.places import content_of
from proteins.proposals import measured_variants
from proteins.scores import table_text
from proteins.structures import Complex, read_structure
from tool_runs import assert_named

ALA = 0
CYS = 1
LYS = 8
TRP = 18
FAR = 1000              # Angstrom


# Chains that touch: heavy H, light L (both 1 to 4), antigens A and B, which are copies, of which B
# lacks residue 3; and Z far from all.
def atoms_of_complex():
    atoms = Atoms()
    for chain, letters in (("H", "MET LYS VAL TRP"), ("L", "GLY LYS ALA SER"),
                           ("A", "MET ASP CYS TYR GLU"), ("B", "MET ASP - TYR GLU")):
        for number, name in enumerate(letters.split(), 1):
            if name != "-":
                atoms.add(chain, number, name)
    far = np.arange(12).reshape(4, 3) + FAR
    return atoms.add("Z", 1, "LEU", xyz=far)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "x.pdb").write_text(atoms_of_complex().pdb())
    return tmp_path


def table_of(folder, *rows, header="pdb_file,partners,chain,mutation,ddg"):
    return write(folder, "\n".join([header, *(f"x.pdb,{row}" for row in rows)]) + "\n", "t.csv")


def placed(path, **options):
    return place_all(read_mutations(path, "ddg"), **options)


def refused(path, **options):
    return refusal(path, lambda path: placed(path, **options))


def residues(protein):
    """Of each variant {(chain, number, letter of the mutant)}."""
    places = [(name, number) for name in protein.complex.design
              for number in protein.structure.chains[name].numbers]
    return [{(*places[row], letter) for row, letter in changes} for changes in protein.changes]


# ---- several chains ----

@pytest.mark.parametrize("text", ['"H:K2A,L:K2C"', '"KH2A,KL2C"', '"KH2A,KL2C;"', "H.K2A_L.K2C",
                                  "H:K2A:L:K2C"])
def test_a_variant_may_be_in_two_chains_at_the_same_number(text, folder):
    (protein,), note = placed(table_of(folder, f",,{text},1"))
    assert residues(protein) == [{("H", "2", ALA), ("L", "2", CYS)}]
    assert protein.complex.design == ("H", "L") and protein.complex.fixed == ("A", "B", "Z")
    assert protein.partners == () and note == ""


def test_the_rows_of_chains_are_those_of_the_complex(folder):
    path = table_of(folder, ',,"L:S4A,A:E5C,H:W4K",1')
    (protein,), _ = placed(path)
    expected = Complex(read_structure(folder / "x.pdb"), ["A", "H", "L"], ["B", "Z"])
    assert protein.complex.key == expected.key
    assert protein.changes == [[(5 + 4 + 3, ALA), (4, CYS), (5 + 3, LYS)]]


def test_variants_of_the_same_chains_are_one_protein(folder):
    path = table_of(folder, ',,"H:K2A,L:K2C",1', ",,H:K2A,1", ',H,"L:K2C,V3A",1', ",H,W4A,1")
    proteins, _ = placed(path)
    assert [(protein.complex.design, len(protein.variants)) for protein in proteins] == [
        (("H", "L"), 2), (("H",), 2)]


@pytest.mark.parametrize("row, chain, expected", [
    ('H,"K2A,L:K2C"', None, "H"), (',"K2A,L:K2C"', "H", "H"), ('H,"K2A,L:K2C"', "A", "H"),
    ('L,"S4A,L:K2C"', None, "L"), (',"L:K2C,L:A3A,S4A"', "L", "L"),
    (',"L:K2K,S4A"', "L", "L")])
def test_the_chain_of_mutations_that_name_none_is_that_of_the_line_or_the_option(
        row, chain, expected, folder):
    (protein,), note = placed(table_of(folder, f",{row},1"), chain=chain)
    found, = residues(protein)
    assert {name for name, _, letter in found if letter == ALA} == {expected}
    assert "do not fit" not in note


def test_a_mutation_whose_chain_is_not_told_is_refused(folder):
    message = refused(table_of(folder, ",,H:K2A,1", ',,"H:K2A,S4C",1'), option=" (or --chains)")
    assert_named("3 S4C A B H L Z chain --chains", message)


def test_a_silent_part_may_be_in_a_chain_that_is_not_mutated(folder):
    (protein,), note = placed(table_of(folder, ',,"H:K2A,L:K2K",1', ',,"H:K2C,L:G2G",1',
                                       ',,"H:K2W,Q:G2G",1'))
    assert protein.complex.design == ("H",) and len(protein.variants) == 1
    assert "line 3: H:K2C: in chain L of x.pdb residue 2 is K" in note
    assert "line 4: H:K2W: in chain Q of x.pdb there is no such chain" in note


@pytest.mark.parametrize("row, said", [
    ('H,"K2A,H:K2C"', "H:K2C: in chain H of x.pdb residue 2 is named twice"),
    ('H,"K2A,H:K2K"', "K2A: in chain H of x.pdb residue 2 is named twice"),
    ('A,"H:K2A,L:K2C"', "H:K2A,L:K2C: in chain A of x.pdb the mutation names chain H L"),
    (',"H:K2A,L:S2C"', "H:K2A,L:S2C: in chain L of x.pdb residue 2 is K")])
def test_what_does_not_fit_is_told_with_its_chain(row, said, folder):
    _, note = placed(table_of(folder, f",{row},1", ",,H:W4A,1"))
    assert said in note


def test_a_mutation_that_comes_twice_in_a_variant_of_two_chains_counts_once(folder):
    (protein,), note = placed(table_of(folder, ',,"KH2A,KL2C,KH2A",1'))
    assert residues(protein) == [{("H", "2", ALA), ("L", "2", CYS)}]
    assert "1 mutation(s) that come twice in a variant count once" in note


def test_a_chain_of_several_whose_numbers_are_shifted_is_named(folder):
    path = table_of(folder, ',,"H:M2C,L:G1A",1', ',,"H:M1A,L:G2A",1', ',,"H:K2A,L:K3G",1',
                    ',,"H:V3A,L:A4G",1')
    message = refused(path)
    assert_named("L x.pdb 3 4 1 H:M1A,L:G2A", message)
    assert "chain H" not in message


def test_mutations_in_several_chains_are_not_placed_on_a_sequence(tmp_path):
    path = write(tmp_path, "mutation\nKA2R:KB2R\n", "t.csv")
    message = refusal(path, lambda path: place_on_sequences(read_mutations(path), ("w", "MKTA")))
    assert_named("A B", message)


# ---- partners ----

def test_a_protein_of_binding_has_both_partners_alone(folder):
    path = table_of(folder, 'HL_A,,"H:K2A,A:D2C",1', "A_LH,L,K2A,2", "A_HL,,L:S4A,3")
    (protein,), note = placed(path)
    structure = read_structure(folder / "x.pdb")
    assert protein.complex.key == Complex(structure, ["A", "H", "L"]).key
    assert [partner.key for partner in protein.partners] == [
        Complex(structure, ["H", "L"]).key, Complex(structure, ["A"]).key]
    assert residues(protein) == [{("H", "2", ALA), ("A", "2", CYS)}, {("L", "2", ALA)},
                                 {("L", "4", ALA)}]
    assert "3 variants of binding, of 1 pair of partners, such as H L and A of x.pdb" in note


def test_other_partners_of_the_same_chains_are_another_protein(folder):
    proteins, _ = placed(table_of(folder, "HL_A,,H:K2A,1", "HA_L,,H:K2A,1"))
    assert len(proteins) == 2 and proteins[0].complex.key == proteins[1].complex.key


def test_the_content_of_binding_is_not_that_of_stability(folder):
    (stability,), _ = placed(table_of(folder, ',,"H:K2A,L:K2C",1'), fixed=[])
    (binding,), _ = placed(table_of(folder, "H_L,,H:K2A,1"))
    whole = binding.complex
    assert stability.complex.key == whole.key and stability.partners == ()
    assert content_of(whole, binding.partners) != content_of(stability.complex)
    assert content_of(whole, binding.partners) == content_of(whole, binding.partners[::-1])


def test_the_partners_of_a_line_come_before_the_option(folder):
    proteins, _ = placed(table_of(folder, "HL_A,,H:K2A,1", ",,H:K2A,1"), partners="H_L")
    assert [[partner.design for partner in protein.partners] for protein in proteins] == [
        [("H", "L"), ("A",)], [("H",), ("L",)]]


def test_rows_without_partners_beside_others_are_told(folder):
    proteins, note = placed(table_of(folder, "HL_A,,H:K2A,1", ",,H:K2C,1", ",,L:K2A,1"))
    assert [bool(protein.partners) for protein in proteins] == [True, False, False]
    assert "2 have no partners (first in line 3), so they are not of binding" in note
    _, note = placed(table_of(folder, "HL_A,,H:K2A,1"))
    assert "no partners" not in note


def test_a_row_of_the_wild_type_is_of_its_partners(folder):
    path = table_of(folder, "HL_A,,H:K2A,1", "H_L,,H:K2A,1", "A_HL,,WT,2", ",,WT,6")
    proteins, _ = placed(path)
    assert [protein.wild_type for protein in proteins] == [4, 6]


def test_a_mutation_in_no_partner_is_left_out(folder):
    (protein,), note = placed(table_of(folder, "L_A,,L:K2A,1", "L_A,,H:K2A,1"))
    assert len(protein.variants) == 1
    assert "line 3: H:K2A: in chain H of x.pdb residue 2 is in neither partner (L and A)" in note


@pytest.mark.parametrize("row, named", [
    ("HLA,,H:K2A", "'HLA'"), ("H_L_A,,H:K2A", "'H_L_A'"), ("_A,,H:K2A", "'_A'"),
    ("HL_HA,,H:K2A", "H HL_HA"), ("HH_A,,H:K2A", "H HH_A"), ("HL_Q,,H:K2A", "Q HL_Q"),
    ("HL_Z,,H:K2A", "HL_Z"), ("HL_A,,K2A", "K2A A H L"), ("HL_A,H,K2A,1,B", "HL_A B context")])
def test_partners_that_cannot_be_are_refused(row, named, folder):
    header = "pdb_file,partners,chain,mutation,ddg,context"
    row = row if row.count(",") == 4 else f"{row},1,"
    message = refused(table_of(folder, row, header=header))
    assert_named(f"t.csv 2 {named}", message)
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("gap, ca_only, touches", [
    (9.9, False, True), (10.1, False, False), (9.9, True, False), (8.4, True, True)])
def test_partners_touch_within_ten_angstrom_of_their_backbones(gap, ca_only, touches, tmp_path):
    """By their nearest atoms, O and N, or by CA, which are 1.5 farther apart."""
    atoms = Atoms()
    for chain, start in (("A", 0), ("B", 1.5 + gap)):
        atoms.add(chain, 1, "MET", xyz=[(start + x, 0, 0) for x in (0, 0.75, 1, 1.5)])
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    path = table_of(tmp_path, "A_B,,A:M1A,1")
    if touches:
        placed(path, ca_only=ca_only)
    else:
        assert_named("A_B x.pdb", refused(path, ca_only=ca_only))


@pytest.mark.parametrize("text, sides", [
    ("AA,BB_C", [("AA", "BB"), ("C",)]), ("AA_C", [("AA",), ("C",)]),
    ("C_BB, AA", [("C",), ("AA", "BB")])])
def test_names_of_chains_may_have_several_characters(text, sides, tmp_path):
    atoms = Atoms()
    for chain in ("AA", "BB", "C"):
        atoms.add(chain, 1, "MET")
    (tmp_path / "x.cif").write_text(atoms.mmcif())
    (protein,), _ = scan_structure(tmp_path / "x.cif", partners=text)
    assert [partner.design for partner in protein.partners] == sides


def test_a_side_that_may_be_one_chain_or_two_is_refused(tmp_path):
    atoms = Atoms()
    for chain in ("H", "L", "HL", "A"):
        atoms.add(chain, 1, "MET")
    (tmp_path / "x.cif").write_text(atoms.mmcif())
    with pytest.raises(ValueError, match=r"HL .* H L.* HL,"):
        scan_structure(tmp_path / "x.cif", partners="HL_A")
    for text, expected in (("H,L_A", ("H", "L")), ("HL,_A", ("HL",))):
        (protein,), _ = scan_structure(tmp_path / "x.cif", partners=text)
        assert protein.partners[0].design == expected


# ---- scans of partners ----

def test_a_scan_of_binding_mutates_both_partners(folder):
    (protein,), note = scan_structure(folder / "x.pdb", partners="HL_A")
    assert protein.complex.design == ("A", "H", "L") and protein.complex.fixed == ()
    assert len(protein.variants) == 19 * (4 + 4 + 5) and note == ""
    assert [variant.cells for variant in protein.variants[:1]] == [{"chain": "A",
                                                                    "mutation": "M1A"}]


def test_a_scan_of_binding_may_be_of_some_chains(folder):
    (protein,), _ = scan_structure(folder / "x.pdb", chains=["L"], partners="HL_A")
    assert {variant.cells["chain"] for variant in protein.variants} == {"L"}
    assert protein.complex.design == ("A", "H", "L")
    with pytest.raises(ValueError, match=r"\bB\b"):
        scan_structure(folder / "x.pdb", chains=["B"], partners="HL_A")


@pytest.mark.parametrize("limit", [3, 12, 15.5])
def test_the_interface_is_what_is_near_the_other_side(limit, folder):
    """By all distances of backbone atoms, one by one."""
    structure = read_structure(folder / "x.pdb")
    atoms = {(name, number): chain.X[row] for name, chain in structure.chains.items()
             for row, number in enumerate(chain.numbers) if number}
    expected = set()
    for one, other in itertools.permutations(atoms, 2):
        if {one[0] == "A", other[0] == "A"} == {True, False} and not {one[0], other[0]} & {*"BZ"}:
            if min(math.dist(p, q) for p in atoms[one] for q in atoms[other]) <= limit:
                expected.add(one)
    (protein,), note = scan_structure(folder / "x.pdb", partners="HL_A", interface=limit)
    found = {(variant.cells["chain"], variant.mutations[0].number) for variant in protein.variants}
    assert found == expected
    assert note == (f"{len(expected)} of 13 residues are within {limit} Angstrom of the other "
                    "partner")


def test_an_interface_needs_partners(folder):
    with pytest.raises(ValueError, match=r"\b8\b.* partners"):
        scan_structure(folder / "x.pdb", interface=8)


# ---- copies ----

@pytest.mark.parametrize("row", ["A,D2C", "B,D2C", ",A:D2C", ",DB2C", ',"DA2C,DB2C"'])
@pytest.mark.parametrize("copies", [[], ["A", "B"]])
def test_a_mutation_is_in_all_copies_of_its_chain(row, copies, folder):
    (protein,), note = placed(table_of(folder, f",{row},1"), copies=copies)
    assert residues(protein) == [{("A", "2", CYS), ("B", "2", CYS)}]
    assert protein.complex.design == ("A", "B") and protein.complex.fixed == ("H", "L", "Z")
    assert note.endswith("t.csv: a mutation is in all copies of its chain: A B of x.pdb")


def test_the_same_mutation_in_copies_is_one_variant(folder):
    path = table_of(folder, ",A,D2C,1", ",B,D2C,3", ",A,Y4C,5")
    (protein,), _ = placed(path, copies=[])
    assert sorted(measured_values(protein).values()) == [[1, 3], [5]]
    assert len(measured_variants([protein])) == 2


def test_a_residue_that_a_copy_lacks_is_mutated_in_the_others(folder):
    path = table_of(folder, ",A,C3A,1", ",B,C3W,1", ",A,D2C,1")
    (protein,), note = placed(path, copies=[])
    assert residues(protein)[:2] == [{("A", "3", ALA)}, {("A", "3", TRP)}]
    assert note.endswith("A B of x.pdb; 1 residue(s) are not there in a copy, such as B3 of x.pdb, "
                         "and mutated in the others")


def test_a_residue_of_unknown_letter_of_a_copy_is_not_mutated(tmp_path):
    atoms = Atoms()
    for chain, middle in (("A", "CYS"), ("B", "UNK")):
        atoms.add(chain, 1, "MET").add(chain, 2, middle).add(chain, 3, "LYS")
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    (protein,), _ = placed(table_of(tmp_path, ",A,C2A,1", ",A,K3A,1"), copies=[])
    assert residues(protein) == [{("A", "2", ALA)}, {("A", "3", ALA), ("B", "3", ALA)}]


def test_copies_with_two_letters_do_not_fit(folder):
    path = table_of(folder, ',,"A:D2C,B:D2A",1', ",A,D2C,1")
    (protein,), note = placed(path, copies=[])
    assert len(protein.variants) == 1 and "residue 2, of a copy, gets two letters" in note


def test_a_chain_without_copies_stays_as_it_is(folder):
    proteins, _ = placed(table_of(folder, ",H,K2A,1", ",A,D2C,1"), copies=[])
    assert [protein.complex.design for protein in proteins] == [("H",), ("A", "B")]
    assert residues(proteins[0]) == [{("H", "2", ALA)}]


@pytest.mark.parametrize("context, fixed", [("B H", ()), ("H", ()), ("", ["B", "H"])])
def test_a_copy_is_mutated_and_no_context(context, fixed, folder):
    path = table_of(folder, f",A,D2C,1,{context}",
                    header="pdb_file,partners,chain,mutation,ddg,context")
    (protein,), _ = placed(path, copies=[], fixed=list(fixed))
    assert (protein.complex.design, protein.complex.fixed) == (("A", "B"), ("H",))
    (scan,), _ = scan_structure(folder / "x.pdb", chains=["A"], fixed=["B", "H"], copies=[])
    assert scan.complex.key == protein.complex.key


def test_copies_are_found_among_the_partners_alone(folder):
    (protein,), _ = placed(table_of(folder, "A_B,,D2C,1"), copies=[])
    assert residues(protein) == [{("A", "2", CYS), ("B", "2", CYS)}]
    assert_named("t.csv", refused(table_of(folder, "HL_A,A,D2C,1"), copies=[]))


@pytest.mark.parametrize("chains, copies, named", [
    (["H"], [], "H"), (None, ["H", "L"], "H1 M L1 G x.pdb"), (None, ["A", "Q"], "A Q x.pdb"),
    (None, ["A"], "A x.pdb"), (None, ["A", "A"], "A x.pdb"), (["H"], ["A", "B"], "H")])
def test_copies_that_are_none_are_refused(chains, copies, named, folder):
    with pytest.raises(ValueError) as caught:
        scan_structure(folder / "x.pdb", chains=chains, copies=copies)
    assert_named(named, str(caught.value))


def test_a_table_without_copies_is_refused(folder):
    assert_named("t.csv", refused(table_of(folder, ",H,K2A,1"), copies=[]))


def test_two_chains_that_share_few_residues_are_no_copies(tmp_path):
    atoms = Atoms()
    for chain, numbers in (("A", range(1, 10)), ("B", range(6, 15)), ("C", range(5, 14))):
        for number in numbers:
            atoms.add(chain, number, "ALA")
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    (protein,), note = scan_structure(tmp_path / "x.pdb", copies=[])
    assert "a mutation is in all copies of its chain: A C;" in note     # 4 of 9; 5 of 9
    assert protein.complex.design == ("A", "B", "C")
    with pytest.raises(ValueError, match=r"\bB\b"):
        scan_structure(tmp_path / "x.pdb", chains=["B"], copies=["A", "C"])


def test_chains_of_other_numbers_share_none(tmp_path):
    atoms = Atoms().add("A", 1, "ALA").add("B", 2, "ALA")
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    with pytest.raises(ValueError, match="A and B of .*x.pdb"):
        scan_structure(tmp_path / "x.pdb", copies=["A", "B"])


def test_a_scan_of_copies_has_each_residue_once(folder):
    (protein,), note = scan_structure(folder / "x.pdb", chains=["B"], copies=[])
    names = {(variant.cells["chain"], variant.mutations[0].number) for variant in protein.variants}
    assert names == {("B", "1"), ("B", "2"), ("B", "4"), ("B", "5")}
    assert all(len(changes) == 2 for changes in protein.changes) and "copy" not in note
    (protein,), note = scan_structure(folder / "x.pdb", chains=["B", "A"], copies=["B", "A"])
    assert len(protein.variants) == 19 * 5 and protein.complex.design == ("A", "B")
    assert {len(changes) for changes in protein.changes} == {1, 2}
    assert "1 residue(s) are not there in a copy, such as B3, and mutated in the others" in note


def test_copies_that_are_not_mutated_are_not_told(folder):
    path = folder / "x.pdb"
    _, note = scan_structure(path, positions=["A2", "H2"], copies=[])
    assert note.endswith("a mutation is in all copies of its chain: A B")
    with pytest.raises(ValueError, match=r"\bH\b"):
        scan_structure(path, positions=["H2"], copies=[])


def test_positions_that_cannot_be_mutated_are_told(tmp_path):
    atoms = Atoms().add("A", 1, "ALA").add("A", 2, "GLY", atoms=("CA",)).add("A", 3, "ALA")
    path = write(tmp_path, atoms.add("B", 1, "LYS").add("B", 2, "UNK").pdb(), "x.pdb")
    _, note = scan_structure(path, positions=["A1-A3", "B2"])
    assert "2 of these are not mutated, as they lack a letter or " in note
    assert note.endswith(": A2, B2")
    _, note = scan_structure(path, positions=["A1", "A3"])
    assert "not mutated" not in note


def test_an_interface_without_residues_is_refused_with_the_nearest(folder):
    path = folder / "x.pdb"
    with pytest.raises(ValueError, match=r"0.001 .* \d+\.\d .*--interface"):
        scan_structure(path, partners="HL_A", interface=0.001)
    with pytest.raises(ValueError, match="0.001"):
        scan_structure(path, partners="HL_A", interface=0.001, positions=["H2"])


def test_partners_with_blanks_for_commas_are_refused(folder):
    with pytest.raises(ValueError, match="'H L_A'"):
        scan_structure(folder / "x.pdb", partners="H L_A")


def test_a_scan_of_copies_reads_back_as_a_table(folder):
    (scan,), _ = scan_structure(folder / "x.pdb", chains=["A"], copies=[])
    rows = [f",{variant.cells['chain']},{variant.cells['mutation']},1" for variant in scan.variants]
    (protein,), _ = placed(table_of(folder, *rows), copies=[])
    assert protein.complex.key == scan.complex.key
    assert residues(protein) == residues(scan)


def test_all_copies_alone_are_one_protein_where_others_are_not_seen(folder):
    proteins, _ = scan_structure(folder / "x.pdb", see_all=False, copies=[])
    assert [protein.complex.design for protein in proteins] == [("A", "B"), ("H",), ("L",), ("Z",)]


@pytest.mark.parametrize("text, options", [
    ("D2A", {"copies": [], "chain": "A"}), ("D2A", {"partners": "HL_A", "chain": "A"}),
    ("D2A:H:K2A", {"partners": "HL_A", "chain": "A"}), ("D2A", {"chain": "B"}),
    ("B:D2A", {"copies": []}), ("A:C3A:B:Y4A", {"copies": []}),
    ("B:D2A:H:K2A", {}), ("A:D2A", {"partners": "HL_A"})])
def test_a_result_says_the_chain_that_an_option_gave(text, options, folder):
    def placed_of(path, **options):
        proteins, _ = place_all(read_mutations(path), **options)
        return proteins

    list_of_one = write(folder, f"{text}\n", "list.txt")
    (protein,) = placed_of(list_of_one, structure=folder / "x.pdb", **options)
    result = write(folder, table_text([protein], {"score": [np.zeros(1)]}, "w", folder), "out.csv")
    for copies in (None, options.get("copies")):
        (again,) = placed_of(result, copies=copies)
        assert residues(again) == residues(protein)
        assert again.complex.key == protein.complex.key
        assert ([partner.key for partner in again.partners]
                == [partner.key for partner in protein.partners])


# ---- a public table ----

@pytest.mark.slow
@pytest.mark.parametrize("with_partners", [True, False])
def test_all_rows_of_skempi_are_placed(with_partners, shared):
    table = read_mutations(shared / "data" / "skempi" / "skempi.csv", "ddg")
    if not with_partners:
        variants = [variant._replace(cells={**variant.cells, "partners": ""})
                    for variant in table.variants]
        table = table._replace(variants=variants)
    proteins, note = place_all(table)
    assert sum(len(protein.variants) for protein in proteins) == 3050 and "do not fit" not in note
    assert all(bool(protein.partners) == with_partners for protein in proteins)
