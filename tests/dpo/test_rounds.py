"""docs/rounds.md: measure, tune, propose, measure; a hidden rule answers as the laboratory."""
import csv
import statistics

import numpy as np
import pytest
import torch

import score_mutations
from dpo_cases import run, write_pairs
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import SIZES
from proteins.letters import AMINO_ACIDS
from proteins.mutations import scan_structure
from train_dpo_ddp import Config
from training.config import load_config
from training_runs import words

PLATE = 24
PER_POSITION = 3
SETTINGS = {"loss.unit": "table", "table.measured": "activity", "table.better": "higher",
            "data.train_data": "table.csv", "data.val_fraction": 0,
            "model.base_model_dir": ".", "model.base_model_name": "w", "training.batch_size": 1,
            "training.n_iters": 15, "optim.lr": 1e-2, "optim.warmup": 2,
            "loss.reference": "unfolded"}


def hidden_values():
    """{mutation: what the laboratory would measure}: by the new letter, and noise."""
    draw = np.random.default_rng(5)
    of_letter = dict(zip(AMINO_ACIDS, draw.normal(size=len(AMINO_ACIDS))))
    (protein,), _ = scan_structure("s0.pdb")
    return {variant.cells["mutation"]: of_letter[variant.mutations[0].mutant]
            + 0.3 * float(draw.normal()) for variant in protein.variants}


def propose(weights, out):
    """The mutations of a plate, by the command."""
    score_mutations.main([str(weights), "s0.pdb", "--scan", "--orders", "1", "--top", str(PLATE),
                          "--per_position", str(PER_POSITION), "--unmeasured", "table.csv",
                          "--out", out])
    with open(out) as file:
        rows = list(csv.DictReader(file))
    assert {row["scored_by"] for row in rows} == {f"{weights} - w.pt"}     # as they were tuned
    return [row["mutation"] for row in rows]


@pytest.mark.slow
def test_three_rounds_find_better_variants_than_a_random_plate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, 24)
    model = random_proteinmpnn(3, **SIZES)
    torch.save(to_checkpoint(model), "w.pt")
    value_of = hidden_values()
    plate = list(np.random.default_rng(0).permutation(sorted(value_of))[:PLATE])
    plates = [plate]
    for number in range(3):
        lines = [f"s0.pdb,{m},{value_of[m]}\n" for plate in plates for m in plate]
        (tmp_path / "table.csv").write_text("pdb_file,mutation,activity\n" + "".join(lines))
        config = load_config(Config, None, words(SETTINGS))
        run(config, tmp_path / f"round{number}")
        plates.append(propose(tmp_path / f"round{number}" / "latest_model.pt", f"{number}.csv"))
        positions = [mutation[1:-1] for mutation in plates[-1]]
        assert max(map(positions.count, positions)) <= PER_POSITION
    every = [mutation for plate in plates for mutation in plate]
    assert len(every) == len(set(every)) == 4 * PLATE   # distinct, none proposed that is measured
    means = [statistics.fmean(value_of[mutation] for mutation in plate) for plate in plates]
    assert min(means[1:]) > means[0] and means[-1] > means[0] + 0.5
    assert max(value_of[m] for m in every) > max(value_of[m] for m in plates[0])
