"""proteins/structure_sets.py: what is read of many structures, kept in a file, and held out."""
import gzip
import os
import shutil
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch

from mpnn_cases import Atoms, write
from proteins import structure_sets
from proteins.letters import AMINO_ACIDS
from proteins.structure_sets import (
    Reading,
    choose_usable,
    describe_shared,
    find_structures,
    fingerprint,
    hold_out,
    load_cache,
    make_cache,
)
from proteins.structures import read_structure
from tool_runs import assert_named


def drawn(seed, length=40):
    """Letters of a protein that is no relative of one of another seed."""
    return "".join(np.random.default_rng(seed).choice(list(AMINO_ACIDS), length))


def pdb_of(**chains):
    """Text of a PDB file. chains: {name: letters}."""
    atoms = Atoms()
    for name, letters in chains.items():
        residues = gemmi.expand_one_letter_sequence(letters, gemmi.ResidueKind.AA)
        for number, residue in enumerate(residues, 1):
            atoms.add(name, number, residue)
    return atoms.pdb()


def folder_of(tmp_path, files, name="structures"):
    """A folder of PDB files. files: {name: {chain: letters}}."""
    folder = tmp_path / name
    folder.mkdir()
    for file, chains in files.items():
        write(folder, pdb_of(**chains), file)
    return folder


def made(tmp_path, source, **reading):
    """(StructureSet of a source, lines that were printed)."""
    reading.setdefault("split", "train")
    cache = tmp_path / "cache.pt"
    lines = make_cache(cache, {"train": source}, Reading(**reading))
    return load_cache(cache)["train"], "\n".join(lines)


def forbid_reading(monkeypatch):
    def read(path, ca_only=False):
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(structure_sets, "read_structure", read)


TWO = {"a.pdb": {"A": drawn(0), "B": drawn(1, 30)}, "b.pdb": {"A": drawn(2, 50)}}


# ---- sources ----

def test_a_folder_gives_the_structures_in_it_and_below_it_by_name(tmp_path):
    for name in ("b.pdb", "a/z.cif.gz", "a/y.ENT", "notes.txt", ".a.pdb", ".git/c.pdb", "c.pdb"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    names = [file.name for file in find_structures(tmp_path)]
    assert names == ["a/y.ENT", "a/z.cif.gz", "b.pdb", "c.pdb"]


def test_a_list_gives_its_structures_with_the_chains_to_design(tmp_path):
    folder_of(tmp_path, TWO)
    table = write(tmp_path, "pdb_file,chains,source\nstructures/b.pdb,,x\nstructures/a.pdb,B A,y\n",
                  "list.csv")
    found = [(file.path, file.chains) for file in find_structures(table)]
    assert found == [(tmp_path / "structures/b.pdb", ()),
                     (tmp_path / "structures/a.pdb", ("B", "A"))]


@pytest.mark.parametrize("header", [
    "pdb_file,chain", "PDB_file,chains", "pdb file,Design_Chains", "PdbFile,CHAIN"])
def test_the_columns_of_a_list_are_known_in_any_case(tmp_path, header):
    folder = folder_of(tmp_path, TWO)
    table = write(folder, f"{header}\na.pdb,B\nb.pdb,\n", "list.csv")
    assert [(file.name, file.chains) for file in find_structures(table)] == [
        ("a.pdb", ("B",)), ("b.pdb", ())]
    structures, said = made(tmp_path, table)
    assert structures.groups == [(("B",),), (("A",),)]
    assert "2 structures, 3 chains: 2 designed, 1 context; 120 rows" in said
    assert "not used" not in said


def test_columns_of_a_list_that_are_not_used_are_named(tmp_path):
    folder = folder_of(tmp_path, TWO)
    table = write(folder, "pdb_file,kind,chains_to_design\na.pdb,x,B\nb.pdb,x,A\n", "list.csv")
    for _ in range(2):      # read, and from the cache
        _, said = made(tmp_path, table)
        assert f"not used, columns of {table}: kind, chains_to_design" in said
        assert "3 chains: 3 designed, 0 context" in said


@pytest.mark.parametrize("text, named", [
    ("structure\na.pdb\n", "list.csv pdb_file"),
    ("pdb_file,chain,chains\na.pdb,A,B\n", "list.csv chain chains"),
    ("pdb_file\nc.pdb\n", "list.csv 2 c.pdb"), ("pdb_file,chains\n,A\n", "list.csv 2"),
    ("pdb_file\na.pdb\n./a.pdb\n", "list.csv 3 ./a.pdb 2"),
    ("pdb_file\nlist.csv\n", "2 list.csv"), ("pdb_file\n", "list.csv"),
    ("pdb_file,chains\nb.pdb,\na.pdb,A D\n", "list.csv 3 a.pdb D A B")])
def test_a_list_that_cannot_be_used_is_refused(tmp_path, text, named):
    folder = folder_of(tmp_path, TWO)
    with pytest.raises(ValueError) as caught:
        made(tmp_path, write(folder, text, "list.csv"))
    assert_named(named, str(caught.value))
    assert not (tmp_path / "cache.pt").exists()


@pytest.mark.parametrize("source", ["missing", "structures/a.pdb", ""])
def test_what_is_no_source_is_refused(tmp_path, source):
    folder_of(tmp_path, TWO if source else {})
    with pytest.raises(ValueError) as caught:
        find_structures(tmp_path / source)
    assert str(tmp_path / source) in str(caught.value)


# ---- what is read ----

def test_a_structure_has_the_rows_of_its_file_without_nucleic_acids(tmp_path):
    folder = folder_of(tmp_path, TWO)
    atoms = Atoms().add("C", 1, "GLY").add("C", 4, "UNK").add("C", 5, "MSE", ["N", "CA", "C"])
    write(folder, atoms.add("A", 7, "TRP").add("B", 1, " DA", ["P"]).pdb(), "odd.pdb")
    structures, _ = made(tmp_path, folder)
    assert structures.names == ["a.pdb", "b.pdb", "odd.pdb"]
    for number, name in enumerate(structures.names):
        expected = read_structure(folder / name)
        chains = structures.structure(number).chains
        assert list(chains) == {"a.pdb": ["A", "B"], "b.pdb": ["A"], "odd.pdb": ["A", "C"]}[name]
        for chain_name, chain in chains.items():
            for field in ("S", "X", "resolved"):
                assert np.array_equal(getattr(chain, field),
                                      getattr(expected.chains[chain_name], field))
        assert structures.structure(number).key == structures.keys[number]
        assert structures.lengths[number] == sum(len(chain.S) for chain in chains.values())
    assert structures.resolved_counts.tolist() == [70, 50, 3]


def test_formats_of_one_structure_are_read_alike(tmp_path):
    folder = folder_of(tmp_path, {"a.pdb": TWO["a.pdb"]})
    text = pdb_of(**TWO["a.pdb"])
    (folder / "b.pdb.gz").write_bytes(gzip.compress(text.encode()))
    write(folder, gemmi.read_pdb_string(text).make_mmcif_document().as_string(), "c.cif")
    structures, _ = made(tmp_path, folder)
    assert len(set(structures.keys.tolist())) == 1 and len(structures) == 3


def test_a_ca_only_model_gets_ca_atoms_alone(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, TWO), ca_only=True)
    X = structures.structure(0).chains["A"].X
    assert X[:, 1].all() and not X[:, [0, 2, 3]].any()


def test_files_that_cannot_be_read_are_left_out_with_their_names(tmp_path):
    folder = folder_of(tmp_path, TWO)
    write(folder, "no structure", "broken.pdb")
    structures, said = made(tmp_path, folder, most_broken=0.4)
    assert structures.names == ["a.pdb", "b.pdb"]
    assert f"1 file of {folder} cannot be read" in said and "\n  broken.pdb (" in said


def test_too_many_files_that_cannot_be_read_are_refused(tmp_path):
    folder = folder_of(tmp_path, TWO)
    write(folder, "no structure", "broken.pdb")
    with pytest.raises(ValueError, match="(?s)1 of 3 .*broken.pdb"):
        made(tmp_path, folder, most_broken=0.3)
    assert not (tmp_path / "cache.pt").exists()


@pytest.mark.parametrize("most_broken", [0.3, 0.99])
def test_ten_files_that_cannot_be_read_are_named_with_reasons_of_whole_sentences(tmp_path,
                                                                                 most_broken):
    folder = folder_of(tmp_path, TWO)
    ca_only = Atoms()
    for number in range(1, 30):
        ca_only.add("A", number, "GLY", ["CA"])
    for number in range(12):
        write(folder, ca_only.pdb(), f"c{number:02}.pdb")
    if most_broken < 0.5:
        with pytest.raises(ValueError) as caught:
            made(tmp_path, folder, most_broken=most_broken)
        said = str(caught.value)
    else:
        _, said = made(tmp_path, folder, most_broken=most_broken)
    named = [line for line in said.splitlines() if ".pdb (" in line]
    assert len(named) == 10 and "and 2 more" in said and "..." not in said
    assert named[0] == ("  c00.pdb (it has CA atoms only; expected N, CA, C and O of each residue)")


def test_a_folder_in_which_nothing_can_be_read_is_refused(tmp_path):
    write(tmp_path, "no structure", "broken.pdb")
    with pytest.raises(ValueError, match="1 of 1 "):
        made(tmp_path, tmp_path, most_broken=1)


def test_a_share_of_broken_files_that_was_accepted_may_be_refused_later(tmp_path):
    folder = folder_of(tmp_path, TWO)
    write(folder, "no structure", "broken.pdb")
    made(tmp_path, folder, most_broken=0.4)
    with pytest.raises(ValueError, match="1 of 3 "):
        made(tmp_path, folder, most_broken=0.3)


# ---- the cache ----

def test_a_cache_is_used_again_whatever_the_dates_of_the_files(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, TWO)
    first, _ = made(tmp_path, folder)
    os.utime(folder / "a.pdb", (1, 1))
    forbid_reading(monkeypatch)
    again, said = made(tmp_path, folder)
    assert fingerprint(again, [0, 1]) == fingerprint(first, [0, 1])
    assert f"from {tmp_path / 'cache.pt'}" in said


@pytest.mark.parametrize("change", ["letters", "name", "one more", "one less"])
def test_a_changed_source_is_read_again(tmp_path, change):
    folder = folder_of(tmp_path, TWO)
    made(tmp_path, folder)
    if change == "letters":
        text = (folder / "b.pdb").read_text()
        write(folder, text.replace(" TRP ", " TYR ").replace(" ALA ", " GLY "), "b.pdb")
        assert (folder / "b.pdb").stat().st_size == len(text)
    elif change == "name":
        (folder / "b.pdb").rename(folder / "c.pdb")
    elif change == "one more":
        shutil.copy(folder / "b.pdb", folder / "c.pdb")
    else:
        (folder / "b.pdb").unlink()
    structures, _ = made(tmp_path, folder)
    assert structures.names == sorted(path.name for path in folder.iterdir())
    for number, name in enumerate(structures.names):
        assert structures.keys[number] == read_structure(folder / name).key


@pytest.mark.parametrize("setting", [{"ca_only": True}, {"homologous": 0.9}, {"identity": 0.9}])
def test_other_settings_read_again(tmp_path, setting, monkeypatch):
    folder = folder_of(tmp_path, TWO)
    made(tmp_path, folder)
    forbid_reading(monkeypatch)
    with pytest.raises(AssertionError, match="read again"):
        made(tmp_path, folder, **setting)


@pytest.mark.parametrize("file", ["structures.py", "identity.py", "structure_sets.py"])
def test_other_code_reads_again(tmp_path, file, monkeypatch):
    folder = folder_of(tmp_path, TWO)
    made(tmp_path, folder)
    read_bytes = Path.read_bytes

    def of_other_code(path):
        more = b"another version" if path.name == file else b""
        return read_bytes(path) + more

    monkeypatch.setattr(Path, "read_bytes", of_other_code)
    _, lines = made(tmp_path, folder)
    assert "kept in" in lines


@pytest.mark.parametrize("kept", [0, 1000, -1000])
def test_a_damaged_cache_is_made_again_with_a_word(tmp_path, kept):
    folder = folder_of(tmp_path, TWO)
    made(tmp_path, folder)
    cache = tmp_path / "cache.pt"
    cache.write_bytes(cache.read_bytes()[:kept])
    structures, said = made(tmp_path, folder)
    assert f"ATTENTION: {cache} is damaged and is made again\n" in said
    assert len(structures) == 2


@pytest.mark.parametrize("content", [b"pdb_file\na.pdb\n", None])
def test_a_file_that_is_no_cache_is_never_overwritten(tmp_path, content):
    cache = tmp_path / "cache.pt"
    if content is None:
        torch.save({"model_state_dict": {}}, cache)
    else:
        cache.write_bytes(content)
    before = cache.read_bytes()
    with pytest.raises(ValueError, match="cache.pt"):
        made(tmp_path, folder_of(tmp_path, TWO))
    assert cache.read_bytes() == before


def test_of_several_sources_only_the_changed_one_is_read_again(tmp_path, monkeypatch):
    sources = {"train": folder_of(tmp_path, TWO), "val": folder_of(tmp_path, TWO, "val")}
    cache = tmp_path / "cache.pt"
    make_cache(cache, sources, Reading())
    write(sources["val"], pdb_of(A=drawn(9)), "a.pdb")
    paths = []

    def read(path, ca_only=False):
        paths.append(path)
        return read_structure(path, ca_only)

    monkeypatch.setattr(structure_sets, "read_structure", read)
    make_cache(cache, sources, Reading())
    assert paths == [sources["val"] / "a.pdb", sources["val"] / "b.pdb"]
    assert load_cache(cache)["val"].sequences == [[drawn(9)], [drawn(2, 50)]]


def test_loading_another_file_is_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="x.pt"):
        load_cache(tmp_path / "x.pt")


# ---- chains that are designed together ----

NEAR = drawn(0)[:36] + "WWWW"       # 90 % of the letters of drawn(0), or more


@pytest.mark.parametrize("homologous, groups", [
    (0.7, (("A", "C"), ("B",))), (0.99, (("A",), ("B",), ("C",)))])
def test_homologous_chains_are_designed_together(tmp_path, homologous, groups):
    folder = folder_of(tmp_path, {"a.pdb": {"A": drawn(0), "C": NEAR, "B": drawn(1)}})
    structures, _ = made(tmp_path, folder, homologous=homologous)
    assert structures.groups == [groups]


@pytest.mark.parametrize("chains, groups", [
    ("B", (("B",),)), ("A", (("A", "C"),)), ("C B", (("A", "C"), ("B",)))])
def test_chains_that_a_list_does_not_name_are_context_unless_they_tell_the_letters_of_a_named_one(
        tmp_path, chains, groups):
    folder = folder_of(tmp_path, {"a.pdb": {"A": drawn(0), "C": NEAR, "B": drawn(1)}})
    table = write(folder, f"pdb_file,chains\na.pdb,{chains}\n", "list.csv")
    structures, _ = made(tmp_path, table)
    assert structures.groups == [groups]


def test_a_chain_without_a_known_letter_is_never_designed(tmp_path):
    folder = folder_of(tmp_path, {"a.pdb": {"A": drawn(0)}})
    atoms = Atoms()
    for number in range(1, 30):
        atoms.add("B", number, "UNK")
    text = pdb_of(A=drawn(0)).replace("END\n", "") + atoms.pdb()
    structures, _ = made(tmp_path, (write(folder, text, "a.pdb")).parent)
    assert structures.groups == [(("A",),)]
    assert list(structures.structure(0).chains) == ["A", "B"]


# ---- what is used, what is held out ----

def test_structures_that_teach_nothing_or_are_too_long_are_left_out(tmp_path):
    folder = folder_of(tmp_path, {**TWO, "c.pdb": {"A": drawn(3, 19)}, "d.pdb": {"A": drawn(4, 20)},
                                  "e.pdb": {"A": "X" * 30}})
    structures, _ = made(tmp_path, folder)
    numbers, lines = choose_usable(structures, max_length=60)
    assert [structures.names[number] for number in numbers] == ["b.pdb", "d.pdb"]
    assert "1 longer than data.max_length 60" in lines[0]
    assert "1 with fewer than 20 resolved residues, 1 without a residue to design" in lines[0]
    assert choose_usable(structures, max_length=70)[0].tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match=r"\b5\b"):
        choose_usable(structures, max_length=19)


def test_an_entry_in_two_formats_is_used_once_with_a_word(tmp_path):
    folder = folder_of(tmp_path, TWO)
    text = gemmi.read_pdb_string(pdb_of(**TWO["a.pdb"])).make_mmcif_document().as_string()
    write(folder, text, "a.cif")
    structures, _ = made(tmp_path, folder)
    numbers, lines = choose_usable(structures, max_length=100)
    assert [structures.names[number] for number in numbers] == ["a.cif", "b.pdb"]
    assert lines == ["  left out: 1 equal to another (a.pdb is a.cif)"]


def test_copies_of_which_other_chains_are_designed_are_all_used(tmp_path):
    folder = folder_of(tmp_path, {**TWO, "c.pdb": TWO["a.pdb"]})
    table = write(folder, "pdb_file,chains\na.pdb,A\nc.pdb,B\n", "list.csv")
    structures, _ = made(tmp_path, table)
    numbers, lines = choose_usable(structures, max_length=100)
    assert numbers.tolist() == [0, 1] and not lines


def many(n_families, n_members=1):
    """{name: chains}: of each family one chain is shared, the other is each one's own."""
    files = {}
    for family in range(n_families):
        for member in range(n_members):
            number = family * n_members + member
            files[f"{number:03}.pdb"] = {"A": drawn([9, number]), "B": drawn([8, family])}
    return files


def held_names(structures, fraction):
    """(names in training, names in validation)."""
    train, val, _ = hold_out(structures, np.arange(len(structures)), fraction)
    return [[structures.names[number] for number in part] for part in (train, val)]


def test_structures_are_of_one_family_if_any_of_their_chains_are_relatives(tmp_path):
    folder = folder_of(tmp_path, {
        "a.pdb": {"A": drawn(0, 200), "B": drawn(1)}, "b.pdb": {"A": drawn(1), "B": drawn(2, 200)},
        "c.pdb": {"A": drawn(3), "C": drawn(2, 200)[20:180]}, "d.pdb": {"A": drawn(4)}})
    structures, _ = made(tmp_path, folder)
    a, b, c, d = structures.families
    assert a == b == c != d


def test_a_peptide_makes_no_relatives_but_those_with_an_equal_one(tmp_path):
    peptide = drawn(0, 200)[50:59]
    folder = folder_of(tmp_path, {
        "a.pdb": {"A": drawn(0, 200)}, "b.pdb": {"A": drawn(1), "P": peptide},
        "c.pdb": {"A": drawn(2), "P": peptide}, "d.pdb": {"A": drawn(3), "P": peptide[:-1]}})
    structures, _ = made(tmp_path, folder)
    a, b, c, d = structures.families
    assert b == c and len({a, b, d}) == 3


def test_chains_without_a_known_letter_make_no_relatives(tmp_path):
    folder = folder_of(tmp_path, {name: {"A": drawn(number), "B": "X" * 5}
                                  for number, name in enumerate(("a.pdb", "b.pdb"))})
    structures, _ = made(tmp_path, folder)
    assert structures.families[0] != structures.families[1]


def test_whole_families_are_held_out_as_many_as_asked_for(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, many(10, 3)))
    train, val = held_names(structures, 0.2)
    assert len(val) == 6 and sorted(train + val) == structures.names
    family = dict(zip(structures.names, structures.families))
    assert not {family[name] for name in train} & {family[name] for name in val}


def test_a_split_does_not_depend_on_the_order_of_the_files(tmp_path):
    folder = folder_of(tmp_path, many(10, 2))
    structures, _ = made(tmp_path, folder)
    names = structures.names[::-1]
    table = write(folder, "\n".join(["pdb_file", *names]), "list.csv")
    others, _ = made(tmp_path, table)
    assert others.names == names
    assert [set(part) for part in held_names(others, 0.3)] == [
        set(part) for part in held_names(structures, 0.3)]


def test_a_family_larger_than_the_fraction_is_trained_on(tmp_path):
    files = {**many(1, 8), **{f"x{number}.pdb": {"A": drawn([7, number])} for number in range(4)}}
    structures, _ = made(tmp_path, folder_of(tmp_path, files))
    train, val = held_names(structures, 0.25)
    assert len(val) == 3 and all(name.startswith("x") for name in val)


def test_a_family_at_least_is_on_each_side(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, many(3)))
    assert [len(part) for part in held_names(structures, 1e-9)] == [2, 1]
    assert [len(part) for part in held_names(structures, 0.999)] == [1, 2]


def test_structures_of_one_family_cannot_be_split(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, many(1, 3)))
    with pytest.raises(ValueError, match=r"\b3\b"):
        hold_out(structures, np.arange(3), 0.1)


def test_one_structure_is_no_family_of_antibodies_and_what_was_left_out_is_said(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, many(3)))
    with pytest.raises(ValueError, match="^left out: 2 long; ") as caught:
        hold_out(structures, np.arange(1), 0.1, "  left out: 2 long")
    assert "antibodies" not in str(caught.value)


def test_only_structures_that_are_used_are_split(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, many(10)))
    train, val, _ = hold_out(structures, np.arange(2, 9), 0.3)
    assert sorted([*train, *val]) == list(range(2, 9))


def test_a_chain_in_training_and_validation_is_told(tmp_path):
    structures, _ = made(tmp_path, folder_of(tmp_path, {
        "a.pdb": {"A": drawn(0)}, "b.pdb": {"A": drawn(1)}, "c.pdb": {"A": drawn(2), "B": drawn(0)},
        "d.pdb": {"A": drawn(3)}}))
    line, = describe_shared(structures, [0, 1], structures, [2, 3])
    assert "1 structure of validation has a chain" in line and "c.pdb" in line
    line, = describe_shared(structures, [0, 1], structures, [0, 1, 2], "the others")
    assert "3 structures of the others have a chain" in line
    assert describe_shared(structures, [0, 1], structures, [3]) == []


def test_a_fingerprint_is_that_of_contents_not_of_names(tmp_path):
    folder = folder_of(tmp_path, {**TWO, "c.pdb": TWO["a.pdb"]})
    structures, _ = made(tmp_path, folder)
    assert fingerprint(structures, [0, 1]) == fingerprint(structures, [2, 1])
    assert fingerprint(structures, [0, 1]) != fingerprint(structures, [1, 0])
    assert fingerprint(structures, [0, 1])["n"] == 2
