"""Files of SEDD's weights: what is exported is what was loaded."""

import pytest
import torch

from sedd.model import load_official
from sedd.weights import export_sedd, load_sedd
from sedd_cases import write_checkpoint
from training_runs import equal


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
def test_averages_or_weights_as_saved_are_exported_to_the_last_bit(tmp_path, graph, extras):
    state = torch.load(write_checkpoint(tmp_path / "best.pt", graph))
    sedd, last = (load_sedd(tmp_path / "best.pt", ema=ema) for ema in (True, False))
    assert equal(state["ema"]["shadow_params"], [*sedd.model.parameters()])
    assert equal(state["model"], last.model.state_dict())
    pytest.importorskip("safetensors")
    for name in ("folder", "published.pth"):
        export_sedd(sedd, tmp_path / name)
        again = load_sedd(tmp_path / name)
        times = torch.tensor([0.1, 0.5, 1.0])
        assert equal(sedd.model.state_dict(), again.model.state_dict())
        assert (again.config, again.max_length) == (sedd.config, 40)
        assert (again.letters == range(100, 121)).all() and (again.lengths == sedd.lengths).all()
        assert torch.equal(again.noise(times)[0], sedd.noise(times)[0])
        with pytest.raises(FileExistsError):
            export_sedd(sedd, tmp_path / name)
    assert load_sedd(tmp_path / "folder").about == sedd.about
    official = torch.load(tmp_path / "published.pth", weights_only=True)
    assert load_official(sedd.model, official) == "ema"
    for name in ("last", "last.pth"):
        export_sedd(last, tmp_path / name)
        assert "weights as saved" in load_sedd(tmp_path / name).notes[0]
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "averages over" in card and ("the mask comes last" in card) == (graph == "absorb")
    assert "not averaged" in (tmp_path / "last" / "README.md").read_text()
    write_checkpoint(tmp_path / "by.pt", graph, "sequence", best={"step": 2, "score": 99.0})
    export_sedd(load_sedd(tmp_path / "by.pt"), tmp_path / "by")
    assert "99.0000 nats per protein" in (tmp_path / "by" / "README.md").read_text()


# ---- files that lie ----

DELETED = object()


def changed(state, keys, value):
    """A copy of nested dicts with another value, or none, under these keys."""
    first, *rest = keys.split("/")
    new = dict(state)
    if rest:
        new[first] = changed(new[first], "/".join(rest), value)
    elif value is DELETED:
        del new[first]
    else:
        new[first] = value
    return new


@pytest.mark.parametrize("key, value", [
    ("config/model/hidden_size", 10**6), ("config/model/n_blocks", 10**5),
    ("config/model/cond_dim", 10**18), ("config/model/n_heads", 1.5),
    ("config/model/cond_dim", DELETED), ("config", DELETED), ("config/graph", "absorb"),
    ("config/noise/eps", float("nan")), ("config/noise/eps", 7.0), ("config/noise/eps", DELETED),
    ("config/data/max_length", None), ("letters", [1] * 20), ("lengths", [5]),
    ("lengths", [10**30]), ("best", {"step": "x"}), ("about", {"averaged": [1]}),
    ("ema/shadow_params", [1]), ("model/output_layer.linear.weight", "x"),
    ("model/vocab_embed.embedding", torch.zeros(1).expand(22, 10**9))])
def test_a_checkpoint_with_a_value_that_cannot_be_is_refused_by_its_name(tmp_path, key, value):
    path = write_checkpoint(tmp_path / "best.pt")
    torch.save(changed(torch.load(path), key, value), path)
    with pytest.raises(ValueError, match="best.pt"):
        load_sedd(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "null"])
def test_an_exported_folder_whose_config_is_none_is_refused(tmp_path, text, extras):
    pytest.importorskip("safetensors")
    export_sedd(load_sedd(write_checkpoint(tmp_path / "best.pt")), tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_sedd(tmp_path / "folder")


@pytest.mark.parametrize("saved, taken", [(["best.pt", "last.pt"], "best.pt"),
                                          (["last.pt"], "last.pt")])
def test_of_a_run_folder_the_best_checkpoint_there_is_is_taken(tmp_path, saved, taken):
    (tmp_path / "checkpoints").mkdir()
    for name in saved:
        write_checkpoint(tmp_path / "checkpoints" / name, "absorb")
    assert load_sedd(tmp_path).notes[0].startswith(f"{tmp_path / 'checkpoints' / taken}:")


def test_a_missing_checkpoint_names_the_one_that_is_there(tmp_path):
    write_checkpoint(tmp_path / "last.pt", "absorb")
    with pytest.raises(ValueError, match=f"There is {tmp_path / 'last.pt'}: give that"):
        load_sedd(tmp_path / "best.pt")


def test_a_run_folder_of_dpo_names_the_script_that_draws_with_it(tmp_path):
    (tmp_path / "latest_model.pt").touch()
    with pytest.raises(ValueError, match="sample_proteinmpnn.py"):
        load_sedd(tmp_path)


def test_weights_of_a_proteinmpnn_are_named(tmp_path):
    torch.save({"model_state_dict": {"W_e.weight": torch.zeros(1)}}, tmp_path / "best_model.pt")
    with pytest.raises(ValueError, match="It holds a ProteinMPNN"):
        load_sedd(tmp_path / "best_model.pt")
