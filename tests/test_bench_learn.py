"""bench_learn.py: which recipe learns more from the same residues."""

import re

import pytest

from bench_learn import steps_to
from launchers import fork_ranks
from training import ROOT, command_lines


def test_where_a_curve_reaches_a_value_is_on_the_line_between_two_points():
    curve = [(100, 1.0), (200, 0.8), (300, 0.9), (400, 0.7)]
    assert steps_to(curve, 0.9) == pytest.approx(150)
    assert steps_to(curve, 0.75) == pytest.approx(375)
    assert steps_to(curve, 1.0) == 100 and steps_to(curve, 0.5) is None


def test_the_table_compares_with_the_first_recipe_and_a_finished_run_is_not_trained_again(tmp_path):
    argv = ["--config", ROOT / "configs" / "sedd_demo.yaml", "--steps", "5", "--seeds", "0,3",
            "--recipes", "adamw,muon_decay_subs_cosine", "--folder", "runs",
            "data.demo_proteins=60", "data.val_fraction=0.2",
            "model.hidden_size=16", "model.n_blocks=1", "model.n_heads=2", "training.batch_size=2",
            "--device", "cpu"]
    stopped = fork_ranks(1, [ROOT / "bench_learn.py", *argv], tmp_path, env={"DDP_DEADLINE": "1"})
    assert stopped.returncode == 75 and "The same command goes on" in stopped.stdout
    (code, table, err), again, used, refused, no_data, no_validation, no_steps, no_nodes, short = (
        command_lines("bench_learn", [argv, argv, [*argv, "model.n_heads=1"],
                      [*argv, "--recipes", "sgd"], [*argv, "--data", "no.fasta"],
                      [*argv, "data.val_fraction=0"], [*argv, "--steps", "0"],
                      [*argv, "--node_rank", "1"], [*argv, "--nproc", "1"]], tmp_path))
    assert code == again[0] == 0 and again[1] == table, err
    assert all(len(path.read_text().splitlines()) == 5 for path in tmp_path.rglob("metrics.jsonl"))
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) ([\d.]+) +(\S+) (\S+)$", table, re.M)
    assert [row[0] for row in rows] == ["adamw", "muon_decay_subs_cosine"]
    assert rows[0][4:] == ("100%",) * 2
    for _, mean, *ends, _, _ in rows:
        assert float(mean) == pytest.approx((float(ends[0]) + float(ends[1])) / 2, abs=2e-4)
    assert used[0] == 2 and "Here: another --folder, or remove" in used[2]
    assert no_data[0] == 2 and "no.fasta" in no_data[2] and "Traceback" not in no_data[2]
    assert no_validation[0] == 2 and "expected proteins to validate with" in no_validation[2]
    assert no_steps[0] == 2 and "--steps is 0; expected at least 1" in no_steps[2]
    assert no_nodes[0] == 2 and "found --node_rank 1; expected --nproc_per_node" in no_nodes[2]
    assert short[0] == 2 and "unrecognized arguments: --nproc" in short[2]
    assert refused[0] == 2 and "sgd; expected some of adamw," in refused[2]
