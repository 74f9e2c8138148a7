"""python -m bench tables: from small files in the published formats to a table that trains."""
import csv
import gzip

import pytest

from bench.tables import DOMAINS, main
from mpnn_cases import Atoms
from proteins.mutations import place_all, read_mutations

LETTERS = {"A": "ALA", "C": "CYS", "D": "ASP", "E": "GLU"}
SEQUENCE = "ACDEACDE"


def pdb(chain="A", first=1, sequence=SEQUENCE):
    """A PDB file with side chains, a second chain and a second model, which are not wanted."""
    atoms = Atoms()
    for model in (1, 2):
        for number, letter in enumerate(sequence, first):
            atoms.add(chain, number, LETTERS[letter], ("N", "CA", "C", "O", "CB"), model=model)
        atoms.add("Z", 1, "ALA", model=model)
    return atoms.pdb()


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_structures(folder, **texts):
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.pdb").write_text(text)


def evostability(folder):
    """A clone of EvoStability: all of DOMAINS, and a protein of its other set."""
    for name in [*DOMAINS, "1div"]:
        write_csv(folder / "datasets" / f"{name}.csv", [
            {"protein_id": name, "mutation_pdb": f"{mutation[0]}A{mutation[1:]}",
             "mutation_fasta": mutation, "DDG": ddg, "RSA": 99.9}
            for mutation, ddg in [("A1C", 0.07388938), ("C2D", -1.25)]])
    write_structures(folder / "pdb", **{name: pdb() for name in DOMAINS})
    return [(DOMAINS[0], "A", "A1C", 0.074), (DOMAINS[0], "A", "C2D", -1.25)], 2 * len(DOMAINS)


def zenodo(folder):
    """What the two archives of Megascale unpack to: values of other kinds than single mutations,
    values that are not trusted, a domain without a model, a name with a bar. And what macOS adds.
    """
    rows = [("1AAA.pdb", "wt", "0"), ("1AAA.pdb", "A1C", "0.5"), ("1AAA.pdb", "C2D", "-"),
            ("1AAA.pdb", "E8A", "-2.25"), ("1AAA.pdb", "insA1", "1"), ("1AAA.pdb", "delC2", "1"),
            ("1AAA.pdb", "A1C:C2D", "1"), ("r11|2.pdb", "D3E", "1"), ("9ZZZ.pdb", "A1C", "1")]
    write_csv(folder / "Processed_K50_dG_datasets"
              / "Tsuboyama2023_Dataset2_Dataset3_20230416.csv",
              [{"name": f"{name}_{mutation}", "aa_seq": SEQUENCE, "mut_type": mutation,
                "WT_name": name, "dG_ML": "3.1", "ddG_ML": value}
               for name, mutation, value in rows])
    write_structures(folder / "models" / "AlphaFold_model_PDBs",
                     **{"1AAA": pdb(), "r11:2": pdb(first=11)})
    write_structures(folder / "__MACOSX" / "AlphaFold_model_PDBs", **{"._1AAA": "Mac OS X"})
    return [("1AAA", "A", "A1C", -0.5), ("1AAA", "A", "E8A", 2.25), ("r11_2", "A", "D13E", -1)], 3


def s2648(folder):
    """A clone of proteinmpnn_ddg: a file of one chain, and one with several."""
    rows = [("1AAA", "A", "C", "2", "D", "3.7", "1aaa_A.pdb"),
            ("1BBB", "U", "A", "71", "C", "-0.55", "1bbb.pdb")]
    columns = ("pdb_id", "chain", "pre", "pos", "post", "ddG_experimental", "relative_path")
    write_csv(folder / "paper/datasets/s2648/s2648_ddg_experimental.csv",
              [dict(zip(columns, row)) | {"prediction_DDGun": ""} for row in rows])
    write_structures(folder / "paper/datasets/s2648/pdb", **{"1aaa_A": pdb(),
                                                             "1bbb": pdb("U", first=71)})
    return [("1aaa_A", "A", "C2D", 3.7), ("1bbb_U", "U", "A71C", -0.55)], 2


@pytest.mark.parametrize("source", [evostability, zenodo, s2648])
def test_a_table_is_made_from_published_files(source, tmp_path, capsys):
    """Positive is destabilising in all tables, also where it is not in the published file."""
    expected, n = source(tmp_path / "published")
    out = tmp_path / "made.csv"
    main([source.__name__, str(tmp_path / "published"), "--out", str(out)])
    assert f"{n:,} mutations" in capsys.readouterr().out
    proteins, note = place_all(read_mutations(out, measured="ddg"))     # as train_dpo_ddp.py does
    found = [(protein.name.split("/")[-1].removesuffix(".pdb.gz"), protein.chain,
              str(variant.cells["mutation"]), variant.measured)
             for protein in proteins for variant in protein.variants]
    assert note == "" and len(found) == n
    assert found[:len(expected)] == expected


def test_structures_hold_the_backbone_of_the_chain_of_the_first_model(tmp_path):
    s2648(tmp_path / "published")
    main(["s2648", str(tmp_path / "published"), "--out", str(tmp_path / "made.csv")])
    files = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert files == ["1aaa_A.pdb.gz", "1bbb_U.pdb.gz"]
    lines = gzip.decompress((tmp_path / "made" / files[1]).read_bytes()).decode().splitlines()
    atoms = [(line[21], line[12:16].strip()) for line in lines if line.startswith("ATOM")]
    assert atoms == [("U", atom) for _ in SEQUENCE for atom in ("N", "CA", "C", "O")]


def test_a_model_without_a_backbone_is_named(tmp_path, capsys):
    zenodo(tmp_path / "published")
    model = tmp_path / "published" / "models" / "AlphaFold_model_PDBs" / "1AAA.pdb"
    model.write_text(Atoms().add("A", 1, "ALA", ("CB",)).pdb())
    with pytest.raises(SystemExit) as ended:
        main(["zenodo", str(tmp_path / "published"), "--out", str(tmp_path / "made.csv")])
    said = "".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "".join(str(model).split()) in said
    assert not list(tmp_path.glob("made*"))


@pytest.mark.parametrize("words, said", [
    ("zenodo published --out made.csv", "Tsuboyama2023"),
    ("s2648 nowhere --out made.csv", "nowhere"),
    ("evostability published --out made.csv", "DDG"),
    ("s2648 published --out made.txt", "made.txt"),
    ("megascale published --out made.csv", "megascale")])
def test_what_makes_no_table_is_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evostability(tmp_path / "published")
    first = tmp_path / "published" / "datasets" / f"{DOMAINS[0]}.csv"
    write_csv(first, [{"mutation_pdb": "AA1C"}])        # not as published
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published"]


@pytest.mark.parametrize("old, new, named", [
    ("3.7", "x", "'x'"), ("3.7", "nan", "'nan'"), (",3.7,", ",", "line 2"),
    ("1AAA", "../x", "../x"), (",2,D", ",,D", "CD")])
def test_a_row_that_no_table_may_have_is_refused(old, new, named, tmp_path, capsys):
    s2648(tmp_path / "published")
    path = tmp_path / "published/paper/datasets/s2648/s2648_ddg_experimental.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SystemExit) as ended:
        main(["s2648", str(tmp_path / "published"), "--out", str(tmp_path / "s.csv")])
    assert ended.value.code == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "s.csv").exists() and not (tmp_path / "s").exists()


def test_a_number_that_the_model_does_not_have_is_refused(tmp_path, capsys):
    zenodo(tmp_path / "published")
    path = next((tmp_path / "published").rglob("Tsuboyama*.csv"))
    path.write_text(path.read_text().replace("A1C,1AAA", "A0C,1AAA", 1))
    with pytest.raises(SystemExit) as ended:
        main(["zenodo", str(tmp_path / "published"), "--out", str(tmp_path / "s.csv")])
    assert ended.value.code == 2 and "A0C" in capsys.readouterr().err
