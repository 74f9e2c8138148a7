"""sedd/prepared.py: a folder that is not whole, or not what it should be, is refused in words."""
import json
import os
import shutil

import numpy as np
import pytest

import prepare_uniref50
from proteins.letters import decode
from sedd.prepared import FILES, SETS, PreparedProteins, check_prepared
from tool_runs import assert_named


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


@pytest.mark.parametrize("name, value", [
    ("version", 2), ("format", "other"), ("letters", "YWVTSRQPNMLKIHGFEDCAX")])
def test_a_folder_of_another_version_is_refused(folder, name, value):
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert str(path) in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "7", '{"format": 1', "{}"])
def test_what_is_no_meta_json_of_ours_is_refused(folder, text):
    (folder / "meta.json").write_text(text)
    assert str(folder / "meta.json") in refusal(folder)


def test_a_folder_of_sequence_files_is_refused_with_the_command_that_prepares_it(tmp_path):
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    assert "prepare_uniref50.py" in refusal(tmp_path)


def test_a_whole_folder_is_accepted(folder):
    check_prepared(folder, 0.2, 1)


@pytest.mark.parametrize("settings, says", [
    ((0.3, 1), "val_fraction .*0.3.* 0.2"),
    ((0.2, 5), "min_length .*5.* 1")])
def test_a_folder_of_other_settings_is_refused(folder, settings, says):
    with pytest.raises(ValueError, match=says):
        check_prepared(folder, *settings)


@pytest.mark.parametrize("name", [f"{name}/{part}" for name in SETS for part in FILES])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_is_named(folder, name, more):
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size + more)
    assert_named(f"{name} {size + more:,}", refusal(folder))


@pytest.mark.parametrize("part", ["tokens.bin", "keys.bin"])
def test_changed_content_is_noticed_when_it_is_read(folder, part):
    path = folder / "train" / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    check_prepared(folder)
    with pytest.raises(OSError, match="train"):
        PreparedProteins(folder).read_all()
