"""sedd/prepared.py: a folder that is not whole, or not what it should be, is refused in words."""
import json
import os
import shutil

import numpy as np
import pytest

import prepare_uniref50
from sedd.prepared import FILES, SETS, PreparedProteins, check_prepared
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


@pytest.mark.parametrize("key, value", [
    ("val_fraction", "x"), ("val_fraction", float("nan")), ("val_fraction", 7),
    ("min_length", None), ("source", [3]), ("sets", []), ("sets", {}), ("version", 2),
    ("format", "other"), ("letters", "YWVTSRQPNMLKIHGFEDCAX")])
def test_a_wrong_field_is_named(folder, key, value):
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    said = refusal(folder)
    assert "meta.json" in said
    assert key in said


@pytest.mark.parametrize("key, value", [
    ("proteins", "x"), ("residues", -1), ("letter_counts", None), ("length_histogram", [[1]]),
    ("keys_hash", 5)])
def test_a_wrong_field_of_a_set_is_named(folder, key, value):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    meta["sets"]["train"][key] = value
    path.write_text(json.dumps(meta))
    assert f"train.{key}" in refusal(folder)


@pytest.mark.parametrize("key, value", [
    ("letter_counts", [1, 2]), ("letter_counts", [0] * 21), ("length_histogram", []),
    ("length_histogram", [[5, 10**12]])])
def test_counts_that_do_not_add_up_are_named(folder, key, value):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    meta["sets"]["train"][key] = value
    path.write_text(json.dumps(meta))
    assert f"{key} of train in meta.json has" in refusal(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[]", "7", '{"format": 1', "{}"])
def test_what_is_no_json_of_ours_is_refused(folder, text):
    (folder / "meta.json").write_text(text)
    assert "meta.json" in refusal(folder)


def test_a_whole_folder_is_accepted(folder):
    check_prepared(folder, 0.2, 1)


@pytest.mark.parametrize("settings, says", [
    ((0.3, 1), "val_fraction is 0.3, but .* with 0.2"),
    ((0.2, 5), "min_length is 5, but .* with 1")])
def test_a_folder_of_other_settings_is_refused(folder, settings, says):
    with pytest.raises(ValueError, match=says):
        check_prepared(folder, *settings)


@pytest.mark.parametrize("name", [f"{name}/{part}" for name in SETS for part in FILES])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_is_named(folder, name, more):
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size + more)
    assert f"{name} has {size + more:,} bytes" in refusal(folder)


@pytest.mark.parametrize("part", ["tokens.bin", "keys.bin"])
def test_changed_content_is_noticed_when_it_is_read(folder, part):
    path = folder / "train" / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    check_prepared(folder)
    with pytest.raises(OSError, match="train is damaged or was changed"):
        PreparedProteins(folder).read_all()
