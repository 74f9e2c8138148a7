"""The reference of DPO: which scores in its cache are used again."""
import math

import pytest
import torch

from ddp_setup import Ddp
from dpo.reference import Reference
from dpo.scorer import Base
from mpnn.dpo import ProteinMPNNScorer
from mpnn.model import random_proteinmpnn
from mpnn_cases import made
from training.config import load_config
from train_dpo_ddp import Config

PAIRS = made(12, 3)


def filled(folder, pairs=PAIRS, weights="hash", num_edges=8, **more):
    """(table of these pairs, text that says where it comes from)."""
    model = random_proteinmpnn(0, hidden_size=8, n_encoder=1, n_decoder=1, num_edges=num_edges)
    settings = {"loss.order": "fixed", **more}
    config = load_config(Config, None, [f"{key}={value}" for key, value in settings.items()])
    reference = Reference(ProteinMPNNScorer(Base(model.eval(), "random"), pairs, config, Ddp()))
    source = reference.fill_table(pairs, weights, folder, "pairs")
    return reference.table, source


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
    names = []
    for kind in ("cpu", "cuda"):
        model = random_proteinmpnn(0, hidden_size=8, n_encoder=1, n_decoder=1, num_edges=8)
        scorer = ProteinMPNNScorer(Base(model, "random"), PAIRS, load_config(Config),
                                   Ddp(device=torch.device(kind)))
        names.append(Reference(scorer).file_name(PAIRS, "hash"))
    assert names[0] != names[1]


N = len(PAIRS)


@pytest.mark.parametrize("damaged", [
    torch.full((N, 2), math.nan), torch.full((N, 2), math.inf), torch.zeros(N + 1, 2),
    torch.zeros(N, 2).double(), None], ids=["nan", "infinite", "of more pairs", "64 bits", "none"])
def test_scores_that_cannot_be_are_computed_anew(damaged, tmp_path):
    scores, _ = filled(tmp_path)
    file, = tmp_path.iterdir()
    torch.save({"scores": damaged}, file)
    again, told = filled(tmp_path)
    assert "could not be used" in told and torch.equal(again, scores)
    assert source_of(tmp_path) == "read"
