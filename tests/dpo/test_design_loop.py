"""The loop of design, without a script of one's own but the score: draw, score, make pairs, train,
draw again with the new weights."""
import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import pairs_from_scores
import sample_proteinmpnn
import train_dpo_ddp
from ddp_setup import Ddp
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import Atoms
from train_dpo_ddp import Config
from training.config import load_config
from training_runs import prepare_and_train, words

SETTINGS = {"model.base_model_name": "base", "training.num_epochs": 4, "training.batch_size": 8,
            "optim.lr": 2e-3, "optim.warmup": 1, "data.val_fraction": 0, "loss.beta": 0.1}


@pytest.fixture
def structures(tmp_path):
    """A folder with a helix and a strand of 12 alanines."""
    (tmp_path / "pdbs").mkdir()
    for kind in ("helix", "strand"):
        atoms = Atoms()
        for i, xyz in enumerate(build_backbone(*zip(*[PHI_PSI[kind]] * 12))):
            atoms.add("A", i + 1, "ALA", xyz=xyz)
        (tmp_path / "pdbs" / f"{kind}.pdb").write_text(atoms.pdb())
    return tmp_path / "pdbs"


def net_charge(sequence):
    return sum(map(sequence.count, "KR")) - sum(map(sequence.count, "DE"))


def draw(weights, structures, folder):
    """Design each structure 8 times. Returns: rows of the table of designs, {column: text}."""
    sample_proteinmpnn.main([str(weights), str(structures), "--num", "8", "--temperature", "1",
                             "--orders", "1", "--out_folder", str(folder)])
    with open(folder / "designs.csv", newline="") as file:
        return list(csv.DictReader(file))


def mean_charge(designs, structure):
    """Mean net charge of the designs of a structure."""
    return np.mean([net_charge(row["sequence"]) for row in designs
                    if Path(row["pdb"]).stem == structure])


def test_after_a_turn_of_the_loop_designs_score_higher(structures, tmp_path):
    model = random_proteinmpnn(0, hidden_size=16, n_encoder=1, n_decoder=1, num_edges=8)
    torch.save(to_checkpoint(model), tmp_path / "base.pt")
    before = draw(tmp_path / "base.pt", structures, tmp_path / "before")
    assert len(before) == 16
    with open(tmp_path / "scores.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*before[0], "score"])
        writer.writeheader()
        for row in before:
            writer.writerow({**row, "score": net_charge(row["sequence"])})
    pairs_from_scores.main([str(tmp_path / "scores.csv"), str(tmp_path / "pairs.json"),
                            "--margin", "1"])
    config = load_config(Config, None, words(
        SETTINGS, model__base_model_dir=tmp_path, data__train_data=tmp_path / "pairs.json"))
    prepare_and_train(train_dpo_ddp, config, Ddp(), tmp_path / "run")
    after = draw(tmp_path / "run" / "latest_model.pt", structures, tmp_path / "after")
    gains = [mean_charge(after, structure) - mean_charge(before, structure)
             for structure in ("helix", "strand")]
    assert min(gains) > 0.5, gains
