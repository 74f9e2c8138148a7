"""Files of SEDD's weights: what is exported is what was loaded, and what is no model is refused."""

import json

import pytest
import torch

from sedd.weights import export_sedd, load_sedd
from sedd_cases import BOTH_GRAPHS, entries, write_checkpoint, write_published
from training_runs import equal


@BOTH_GRAPHS
def test_averages_are_taken_unless_the_last_weights_are_asked_for(tmp_path, graph_name):
    path = write_checkpoint(tmp_path / "best.pt", graph_name)
    state = torch.load(path)
    averaged = load_sedd(path)
    last = load_sedd(path, ema=False)
    assert equal(state["ema"]["shadow_params"], [*averaged.model.parameters()])
    assert equal(state["model"], last.model.state_dict())
    assert "averaged weights" in averaged.notes[0] and "weights as saved" in last.notes[0]


# ---- exported folders ----

@BOTH_GRAPHS
def test_an_exported_folder_loads_to_the_last_bit(tmp_path, graph_name):
    pytest.importorskip("safetensors")
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt", graph_name))
    export_sedd(sedd, tmp_path / "folder")
    again = load_sedd(tmp_path / "folder")
    times = torch.tensor([0.1, 0.5, 1.0])
    assert equal(sedd.model.state_dict(), again.model.state_dict())
    assert torch.equal(again.noise(times)[0], sedd.noise(times)[0])
    assert (again.graph.absorb, again.max_length) == (graph_name == "absorb", 40)
    assert (again.letters == range(100, 121)).all() and (again.lengths == sedd.lengths).all()


@pytest.fixture
def published(shared, tmp_path):
    """(weights of the official code, their file)."""
    weights = entries(torch.load(shared / "fixtures" / "sedd.pt", weights_only=True),
                      "absorb", "model")
    torch.save({"model": weights}, tmp_path / "published.pth")
    return weights, tmp_path / "published.pth"


def test_an_export_holds_the_tensors_of_the_published_file_it_was_made_of(published, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights, path = published
    export_sedd(load_sedd(path), tmp_path / "folder")
    exported = safetensors.load_file(tmp_path / "folder" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=0)


def test_the_config_of_an_export_says_what_the_published_code_builds_a_model_from(tmp_path):
    """Its keys: louaaron/Score-Entropy-Discrete-Diffusion, model/transformer.py."""
    pytest.importorskip("safetensors")
    export_sedd(load_sedd(write_checkpoint(tmp_path / "best.pt", "uniform")), tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    expected = {"hidden_size": 32, "n_blocks": 2, "n_heads": 2, "cond_dim": 16, "length": 40,
                "scale_by_sigma": False, "dropout": 0.0}
    assert {name: config["model"][name] for name in expected} == expected
    assert (config["tokens"], config["graph"]["type"], config["noise"]["type"]) == (
        21, "uniform", "loglinear")


def test_an_export_never_replaces_what_is_there(tmp_path):
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt"))
    with pytest.raises(FileExistsError, match="best.pt"):
        export_sedd(sedd, tmp_path / "best.pt")


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{", '{"model": {}}'])
def test_a_folder_whose_config_is_of_no_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_sedd(tmp_path)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    whole = tmp_path / "whole.pt"
    torch.save({"model": {"a": torch.zeros(10_000)}}, whole)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:20_000])
    with pytest.raises(ValueError, match="cut.pt"):
        load_sedd(cut)


def test_a_folder_without_its_weights_is_refused(tmp_path):
    export_sedd(load_sedd(write_checkpoint(tmp_path / "a.pt", "absorb")), tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        load_sedd(tmp_path / "folder")


# ---- files ----

@pytest.mark.parametrize("graph, noise", [("absorb", "loglinear"), ("uniform", "geometric")])
def test_the_settings_of_a_published_file_follow_from_its_weights(tmp_path, graph, noise):
    checkpoint = write_checkpoint(tmp_path / "best.pt", graph)
    sedd = load_sedd(write_published(tmp_path / "published.pth", checkpoint))
    sizes = load_sedd(checkpoint).config["model"]
    assert sedd.config["model"].items() <= sizes.items()
    assert (sedd.config["graph"]["type"], sedd.config["noise"]["type"]) == (graph, noise)
    assert f"assumed are ACDEFGHIKLMNPQRSTVWYX and {noise}" in sedd.notes[1]


def test_a_published_file_of_other_tokens_is_refused(tmp_path):
    path = write_published(tmp_path / "text.pth", write_checkpoint(tmp_path / "best.pt"))
    state = torch.load(path)
    state["model"]["vocab_embed.embedding"] = torch.zeros(50258, 32)
    torch.save(state, path)
    with pytest.raises(ValueError, match="50258"):
        load_sedd(path)


def test_weights_that_do_not_fit_their_config_are_named(tmp_path):
    path = write_checkpoint(tmp_path / "best.pt")
    state = torch.load(path)
    state["config"]["model"] = {**state["config"]["model"], "n_blocks": 3}
    torch.save(state, path)
    with pytest.raises(ValueError, match="best.pt: .* missing blocks.2.norm1.weight"):
        load_sedd(path)


def test_a_checkpoint_with_a_wrong_byte_among_its_numbers_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "best.pt")
    numbers = torch.load(path)["ema"]["shadow_params"][0].numpy().tobytes()
    content = path.read_bytes()
    assert numbers in content
    path.write_bytes(content.replace(numbers, numbers[::-1]))
    with pytest.raises(ValueError, match="best.pt"):
        load_sedd(path)


@pytest.mark.parametrize("saved, taken", [(["best.pt", "last.pt"], "best.pt"),
                                          (["last.pt"], "last.pt")])
def test_of_a_run_folder_the_best_checkpoint_there_is_is_taken(tmp_path, saved, taken):
    (tmp_path / "checkpoints").mkdir()
    for name in saved:
        write_checkpoint(tmp_path / "checkpoints" / name, "absorb")
    assert load_sedd(tmp_path).notes[0].startswith(f"{tmp_path / 'checkpoints' / taken}:")


def test_a_missing_checkpoint_names_the_one_that_is_there(tmp_path):
    write_checkpoint(tmp_path / "last.pt", "absorb")
    with pytest.raises(ValueError, match=str(tmp_path / "last.pt")):
        load_sedd(tmp_path / "best.pt")


def test_a_run_folder_of_dpo_names_the_script_that_draws_with_it(tmp_path):
    (tmp_path / "latest_model.pt").touch()
    with pytest.raises(ValueError, match="sample_proteinmpnn.py"):
        load_sedd(tmp_path)


def test_weights_of_a_proteinmpnn_are_named(tmp_path):
    torch.save({"model_state_dict": {"W_e.weight": torch.zeros(1)}}, tmp_path / "best_model.pt")
    with pytest.raises(ValueError, match="ProteinMPNN"):
        load_sedd(tmp_path / "best_model.pt")
