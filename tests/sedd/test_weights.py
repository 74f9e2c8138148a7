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
        again, times = load_sedd(tmp_path / name), torch.tensor([0.1, 0.5, 1.0])
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
