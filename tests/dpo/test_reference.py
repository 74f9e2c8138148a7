"""The reference of DPO: which scores in its cache are used again."""
import pytest
import torch

from ddp_setup import Ddp
from dpo.pair_scores import keep_base_scores, name_of_scores
from dpo.reference import FrozenBase
from mpnn.base import Base
from mpnn.model import random_proteinmpnn
from mpnn_cases import made
from train_dpo_ddp import Config
from training.config import load_config

PAIRS = made(12, 3)


def base_of(pairs, weights="hash", num_edges=8):
    model = random_proteinmpnn(0, hidden_size=8, n_encoder=1, n_decoder=1, num_edges=num_edges)
    return FrozenBase(Base(model, "random", weights), pairs, torch.device("cpu"))


def filled(folder, pairs=PAIRS, weights="hash", num_edges=8, **more):
    """(scores of these pairs, text that says where they come from)."""
    settings = {"loss.order": "fixed", **more}
    config = load_config(Config, None, [f"{name}={value}" for name, value in settings.items()])
    base = base_of(pairs, weights, num_edges)
    return keep_base_scores(base, pairs, config, folder, "pairs", Ddp())


def source_of(folder, **change):
    """The first word on where the scores come from."""
    _, told = filled(folder, **change)
    return told.split()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the scores of PAIRS, by the settings of source_of and for the order arange."""
    folder = tmp_path_factory.mktemp("scores")
    assert source_of(folder) == source_of(folder, **{"loss.order": "arange"}) == "computed,"
    return folder


@pytest.mark.parametrize("change", [
    {"weights": "another hash"}, {"num_edges": 9}, {"pairs": PAIRS[:2]}, {"pairs": PAIRS[::-1]},
    {"pairs": [*PAIRS[:2], *made(12, 1, 1)]}, {"training.seed": 1}, {"training.batch_size": 2},
    {"loss.temperature": 0.5}, {"loss.n_orders": 2}, {"loss.share_order": True},
    {"loss.order": "arange", "loss.temperature": 0.5}])
def test_scores_are_computed_anew_after_a_change_of(change, folder):
    assert source_of(folder, **change) == "computed,"


@pytest.mark.parametrize("change", [
    {}, {"loss.beta": 0.5}, {"loss.order": "random"}, {"loss.order": "arange"},
    {"loss.order": "arange", "training.seed": 1},
    {"loss.order": "arange", "loss.n_orders": 2, "loss.share_order": True}])
def test_scores_that_a_change_leaves_as_they_are_are_read_again(change, folder):
    """Validation is scored under fixed orders whatever the order in training, apart from arange."""
    assert source_of(folder, **change) == "read"


def test_scores_by_another_version_of_torch_are_computed_anew(folder, monkeypatch):
    """Its sums, rounded otherwise, are not those of the policy here."""
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert source_of(folder) == "computed,"


def test_scores_of_another_kind_of_device_are_kept_in_another_file():
    names = {name_of_scores(base_of(PAIRS), PAIRS, load_config(Config),
                            Ddp(device=torch.device(kind))) for kind in ("cpu", "cuda")}
    assert len(names) == 2


def test_scores_in_a_damaged_file_are_computed_anew(tmp_path):
    scores, _ = filled(tmp_path)
    file, = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    again, told = filled(tmp_path)
    assert "could not be used" in told and torch.equal(again, scores)
    assert source_of(tmp_path) == "read"
