"""split_mutations.py: tables become one to train on and one of unrelated proteins."""
import csv
from pathlib import Path

import pytest

import score_mutations
from mpnn.demo import PHI_PSI, build_backbone
from mpnn_cases import Atoms
from proteins.letters import AMINO_ACIDS
from proteins.structures import NAMES
from sedd_cases import write_checkpoint
from split_mutations import main

# The first two are relatives, and so are the next two.
SEQUENCES = {"a": "MKTAYIAKQRQISFVKSHFS", "b": "MKTAYIAKQRQISFVWWWWW",
             "c": "GDPENWCCLLGDPENWHHHH", "d": "GDPENWCCLLGDPENWTTTT",
             "e": "VVRRTTEEVVRRTTEEVVRR", "f": "LNNLDFFDLNNLDFFDLNNL"}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """[two tables in two folders, of other columns]; the current folder is above them."""
    monkeypatch.chdir(tmp_path)
    for folder, names, header, rest in (("one", "ace", "pdb_file,chain,mutation,ddg", "1.5"),
                                        ("two", "bdf", "mutation,pdb_file,source,ddg", "lab,-2")):
        (tmp_path / folder / "pdbs").mkdir(parents=True)
        lines = [header]
        for name in names:
            text = SEQUENCES[name]
            X = build_backbone(*zip(*[PHI_PSI["helix"]] * len(text)))
            atoms = Atoms()
            for row, letter in enumerate(text):
                atoms.add("A", row + 1, NAMES[AMINO_ACIDS.index(letter)], xyz=X[row])
            (tmp_path / folder / "pdbs" / f"{name}.pdb").write_text(atoms.pdb())
            for row in (0, 7):
                where = f"pdbs/{name}.pdb"
                mutation = f"{text[row]}{row + 1}Y"
                cells = f"{where},A,{mutation}" if folder == "one" else f"{mutation},{where}"
                lines.append(f"{cells},{rest}")
        (tmp_path / folder / "m.csv").write_text("\n".join(lines) + "\n")
    return ["one/m.csv", "two/m.csv"]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def names_in(path):
    return {row["pdb_file"].rpartition("/")[2].removesuffix(".pdb") for row in rows_of(path)}


def split(tables, folder, *options):
    """(names of the structures in rest.csv, those in held_out.csv)."""
    assert main([*tables, "--out_folder", folder, "--hold_out", "0.5", *options]) == 0
    return names_in(f"{folder}/rest.csv"), names_in(f"{folder}/held_out.csv")


def test_related_proteins_of_two_tables_are_on_one_side(tables):
    rest, held_out = split(tables, "out")
    assert rest | held_out == set(SEQUENCES) and not rest & held_out
    for relatives in ({"a", "b"}, {"c", "d"}):
        assert relatives <= rest or relatives <= held_out


def test_the_order_of_the_tables_does_not_matter(tables):
    assert split(tables, "out") == split(tables[::-1], "other")


def test_every_line_is_in_one_of_the_tables_with_the_columns_of_all(tables):
    split(tables, "out")
    rows = rows_of("out/rest.csv") + rows_of("out/held_out.csv")
    assert len(rows) == 12
    for row in rows:
        assert row.keys() == {"pdb_file", "chain", "mutation", "ddg", "source"}
        cells = (row["chain"], row["ddg"], row["source"])
        assert cells == (("A", "1.5", "") if "one/" in row["pdb_file"] else ("", "-2", "lab"))


def test_tables_of_like_names_have_files_of_their_own(tables):
    Path("one/m_1.csv").write_text(Path("one/m.csv").read_text())
    split([*tables, "one/m_1.csv"], "out")
    assert len(list(Path("out").glob("*.csv"))) == 2 * 3 + 2


def test_each_of_several_tables_has_its_own_part_of_both_sides(tables):
    split(tables, "out")
    for side in ("rest", "held_out"):
        parts = [rows_of(f"out/m_{number}_{side}.csv") for number in (1, 2)]
        assert parts[0] + parts[1] == rows_of(f"out/{side}.csv")
        assert all("one/" in row["pdb_file"] for row in parts[0])
        assert all("two/" in row["pdb_file"] for row in parts[1])


@pytest.mark.parametrize("folder", ["out", "deep/out", "link/out"])
def test_score_mutations_finds_the_structures_of_a_written_table(folder, tables, tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")       # whose ".." is far
    _, held_out = split(tables, folder)
    write_checkpoint(tmp_path / "sedd.pt")
    score_mutations.main(["sedd.pt", "--mutations", f"{folder}/held_out.csv", "--out", "s.csv"])
    assert len(rows_of("s.csv")) == 2 * len(held_out)


def test_a_lower_identity_keeps_more_together(tables, capsys):
    split(tables, "out", "--identity", "0.3")
    assert "4 families" in capsys.readouterr().out
    split(tables, "other", "--identity", "1")
    assert "6 families" in capsys.readouterr().out


def test_tables_of_sequences_are_split_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{text},{text[0]}1Y,1" for text in SEQUENCES.values()]
    (tmp_path / "m.csv").write_text("\n".join(["sequence,mutation,score", *lines]) + "\n")
    assert main(["m.csv", "--out_folder", "out", "--hold_out", "0.5"]) == 0
    rows = rows_of("out/rest.csv") + rows_of("out/held_out.csv")
    assert sorted(row["sequence"] for row in rows) == sorted(SEQUENCES.values())


def test_variants_that_do_not_fit_are_told(tables, tmp_path, capsys):
    with open(tmp_path / "one" / "m.csv", "a") as file:
        file.write("pdbs/a.pdb,A,W1Y,3\n")
    split(tables, "out")
    assert "1 of 7 variants do not fit" in capsys.readouterr().err
    assert len(rows_of("out/rest.csv") + rows_of("out/held_out.csv")) == 12


@pytest.mark.parametrize("options, said", [
    (["--hold_out", "0"], "--hold_out 0.0"),
    (["--identity", "0"], "--identity 0.0"),
    (["--identity", "30"], "--identity 30.0"),
    (["--hold_out", "1e-9"], "expected some on both sides"),
    (["sequences.csv"], "one has sequences"),
    (["list.txt"], "no column pdb_file"),
    (["none.csv"], "no file none.csv")])
def test_wrong_input_ends_with_a_message_and_no_file(options, said, tables, tmp_path, capsys):
    (tmp_path / "sequences.csv").write_text("sequence,mutation\nMKT,M1A\n")
    (tmp_path / "list.txt").write_text("M1A\n")
    assert main([*tables, *options, "--out_folder", "out"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_table_that_is_read_is_not_written_over(tables, tmp_path, capsys):
    table = (tmp_path / "one" / "m.csv").rename(tmp_path / "one" / "rest.csv")
    before = table.read_text()
    assert main([str(table), tables[1], "--hold_out", "0.5", "--out_folder", "one"]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert table.read_text() == before and not (tmp_path / "one" / "held_out.csv").exists()
