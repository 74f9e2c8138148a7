"""bench/learn.py: which recipe learns more from the same residues."""

import re

import pytest

from bench.learn import steps_to
from launchers import fork_ranks
from training_runs import ROOT, command_lines


def test_where_a_curve_reaches_a_value_is_on_the_line_between_two_points():
    curve = [(100, 1.0), (200, 0.8), (300, 0.9), (400, 0.7)]
    assert steps_to(curve, 0.9) == pytest.approx(150)
    assert steps_to(curve, 0.75) == pytest.approx(375)
    assert steps_to(curve, 1.0) == 100 and steps_to(curve, 0.5) is None


ARGUMENTS = ["--config", ROOT / "configs" / "sedd_demo.yaml", "--steps", "5", "--seeds", "0,3",
             "--recipes", "adamw,muon_decay_subs_cosine", "--folder", "runs", "--device", "cpu",
             "data.demo_proteins=60", "data.val_fraction=0.2", "model.hidden_size=16",
             "model.n_blocks=1", "model.n_heads=2", "training.batch_size=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, what it printed) of a bench that was stopped first."""
    folder = tmp_path_factory.mktemp("learn")
    stopped = fork_ranks(1, ["-m", "bench", "learn", *ARGUMENTS], folder,
                         env={"DDP_DEADLINE": "1000000001"})
    assert stopped.returncode == 75 and "The same command goes on" in stopped.stdout
    (code, table, err), = command_lines("bench", [["learn", *ARGUMENTS]], folder)
    assert code == 0, err
    return folder, table


def test_the_table_compares_each_recipe_with_the_first(finished):
    _, table = finished
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) ([\d.]+) +(\S+) (\S+)$", table, re.M)
    assert [row[0] for row in rows] == ["adamw", "muon_decay_subs_cosine"]
    for _, mean, first, second, _, _ in rows:
        assert float(mean) == pytest.approx((float(first) + float(second)) / 2, abs=2e-4)


def test_a_finished_run_is_not_trained_again(finished):
    folder, table = finished
    (code, again, err), = command_lines("bench", [["learn", *ARGUMENTS]], folder)
    assert code == 0 and again == table, err
    assert all(len(path.read_text().splitlines()) == 5 for path in folder.rglob("metrics.jsonl"))


@pytest.mark.parametrize("words, said", [
    (["model.n_heads=1"], "Here: another --folder, or remove"),
    (["--recipes", "sgd"], "sgd; expected some of adamw,"),
    (["data.val_fraction=0"], "expected proteins to validate with"),
    (["--steps", "0"], "--steps is 0; expected at least 1")])
def test_what_cannot_be_compared_is_refused(words, said, finished):
    folder, _ = finished
    (code, _, err), = command_lines("bench", [["learn", *ARGUMENTS, *words]], folder)
    assert code == 2 and said in err
