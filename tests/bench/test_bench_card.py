"""bench/card.py: what it writes, and the work it counts."""
import json

import pytest

from bench import card


def test_a_card_is_measured_model_by_model_against_the_plain_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--device=cpu", "--steps=1", "--repeats=2", "--warmup=1", "--matmul=64",
             "--json=card.json"]
    card.main([*short, "--models=6m", "--proteins=300", "training.batch_size=2",
                     "training.accum=2", "training.num_workers=0", "data.max_length=64",
                     "model.hidden_size=16", "model.n_blocks=2", "model.n_heads=2"])
    found = json.loads((tmp_path / "card.json").read_text())
    rows = {row["step"]: row for row in found["rows"]}
    assert rows.keys() == {"plain", "ours"} and len([*tmp_path.iterdir()]) == 1
    for row in rows.values():
        assert row["of_matmul"] == pytest.approx(
            row["flops_per_second"] / found["matmul_flops_per_second"])
        assert row["of_plain"] == pytest.approx(row["per_second"] / rows["plain"]["per_second"])
    # By hand: 2 blocks of 12 x 16^2 weights and an output of 16 x 22; 64 positions a protein.
    per_position = 6 * (2 * 12 * 16**2 + 16 * 22) + 12 * 2 * 16 * 64
    ratio = rows["plain"]["flops_per_second"] / rows["plain"]["per_second"]
    assert 64 * per_position / 64 <= ratio < 64 * per_position / 11    # of 11 to 64 residues
    assert rows["ours"]["flops_per_second"] / rows["ours"]["per_second"] < ratio   # less padding
    card.main([*short, "--models=dpo", "training.batch_size=2", "data.demo_structures=3",
                     "model.random.hidden_size=16", "model.random.num_edges=8"])
    row, = json.loads((tmp_path / "card.json").read_text())["rows"]
    assert row["per_second"] > 0 and row["flops_per_second"] == 0 and row["dtype"] == "float32"
