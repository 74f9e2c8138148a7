"""sedd/prepared.py: a meta.json that does not describe its folder is refused in a sentence."""
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import prepare_uniref50
from sedd import prepared
from sedd.prepared import PARTS, SETS, check_prepared, stage_prepared
from proteins.letters import decode


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    proteins = [decode(rng.integers(0, 20, size)) for size in rng.integers(20, 60, 60)]
    file = tmp_path / "p.fasta"
    file.write_text("".join(f">p\n{protein}\n" for protein in proteins))
    folder = tmp_path / "prepared"
    assert prepare_uniref50.main([str(folder), "--fasta", str(file), "--val_fraction=0.2"]) == 0
    return folder


@pytest.fixture
def folder(made_once, tmp_path):
    return shutil.copytree(made_once, tmp_path / "prepared")


def refusal(folder):
    with pytest.raises(ValueError) as error:
        check_prepared(folder)
    return str(error.value)


DELETED = object()
WRONG = {   # key of the training set -> values that are not those of the folder
    "letter_counts": [[1] * 21, [5], "x", {}, None, [-1] * 21, [10**30] * 21, [1.5] * 21, DELETED],
    "keys_hash": ["0" * 16, "", 5, None, DELETED],
    "residues": [1, 0, -5, "12", 1e18, 10**18, True, None, DELETED],
    "proteins": [1, 0, -5, "12", 1e18, 10**18, [], DELETED],
    "length_histogram": [[[1, 10**12]], [[10**12, 1]], [[0, 0]], [[1]], [["a", 1]], {}, 7, None, [],
                         DELETED],
    "files": [{}, [], None, {"tokens.bin": 5}, {"tokens.bin": {"bytes": "x"}}, DELETED]}


@pytest.mark.parametrize("key, value", [(key, value) for key in WRONG for value in WRONG[key]])
def test_a_wrong_field_of_a_set_is_named(folder, key, value):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    if value is DELETED:
        del meta["sets"]["train"][key]
    else:
        meta["sets"]["train"][key] = value
    path.write_text(json.dumps(meta))
    assert key in refusal(folder)


def test_letter_counts_in_another_order_are_noticed(folder):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    meta["sets"]["train"]["letter_counts"].reverse()   # the sum is right
    path.write_text(json.dumps(meta))
    assert "letter_counts" in refusal(folder)


@pytest.mark.parametrize("key, value", [
    ("val_fraction", "0.1"), ("val_fraction", float("nan")), ("val_fraction", 7),
    ("min_length", 1.5), ("min_length", None), ("release", []), ("source", 3), ("source", [3]),
    ("sets", []), ("sets", {}), ("sets", None), ("version", [1]), ("format", None)])
def test_a_wrong_field_of_the_folder_is_named(folder, key, value):
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert key in refusal(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[]", "7", "null", '{"format": 1', "{}",
                                  "1" * 10_000])
def test_what_is_no_json_of_ours_is_refused(folder, text):
    (folder / "meta.json").write_text(text)
    assert "meta.json cannot be read" in refusal(folder)


def test_a_whole_folder_is_accepted(folder):
    check_prepared(folder, 0.2, 1)


def test_a_whole_folder_is_accepted_when_it_is_read_in_pieces(folder, monkeypatch):
    monkeypatch.setattr(prepared, "READ_BYTES", 64)
    beats = []
    check_prepared(folder, alive=lambda: beats.append(1))
    assert len(beats) > 5    # it has shown that it goes on


@pytest.mark.parametrize("settings, says", [
    ((0.3, 1), "val_fraction is 0.3, but .* with 0.2"),
    ((0.2, 5), "min_length is 5, but .* with 1")])
def test_a_folder_of_other_settings_is_refused(folder, settings, says):
    with pytest.raises(ValueError, match=says):
        check_prepared(folder, *settings)


@pytest.mark.parametrize("name", SETS)
def test_other_keys_are_noticed(folder, name):
    path = folder / name / "keys.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert f"{name} is damaged or was changed: keys.bin" in refusal(folder)


@pytest.mark.parametrize("name", [f"{name}/{part}" for name in SETS for part in PARTS])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_is_named(folder, name, more):
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size + more)
    assert f"{name} has {size + more:,} bytes" in refusal(folder)


def test_a_folder_of_another_alphabet_is_refused(folder):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "letters": meta["letters"][::-1]}))
    assert "letters is" in refusal(folder)


@pytest.mark.parametrize("n_read", [60, 500])   # the whole has more than 60 of the letter 0
def test_other_letters_are_noticed_in_the_part_that_is_read(folder, n_read, monkeypatch):
    monkeypatch.setattr(prepared, "LETTERS_READ", n_read)
    with open(folder / "train" / "tokens.bin", "r+b") as file:
        file.write(bytes(n_read))
    assert "tokens.bin holds other letters" in refusal(folder)


def test_one_letter_more_than_there_are_is_noticed_in_the_part_that_is_read(folder, monkeypatch):
    path = folder / "train" / "tokens.bin"
    *tokens, last = path.read_bytes()
    monkeypatch.setattr(prepared, "LETTERS_READ", len(tokens))
    other = (last + 1) % 20
    changed = tokens.index((last + 2) % 20)
    tokens[changed] = other
    path.write_bytes(bytes([*tokens, last]))
    assert "tokens.bin holds other letters" in refusal(folder)


def test_no_copy_is_made_where_there_is_no_room(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match="GB free; expected"):
        stage_prepared(folder, tmp_path / "copy", lambda *_: None)
    assert not (tmp_path / "copy").exists()


def test_a_copy_that_ends_early_is_removed(folder, tmp_path):
    def report(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage_prepared(folder, tmp_path / "copy", report)
    assert not (tmp_path / "copy").exists()
