"""plot_run.py: the numbers of metrics.jsonl, in a picture."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from launchers import ROOT, clean_environment
from plot_run import main
from training.plot import SMOOTHED, choose_panels, draw, loss_unit, points, rows_of, running_mean


def write(folder, *rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_long_curve_is_drawn_as_means_over_neighbours():
    rows = [{"step": k, "loss": float(k % 2)} for k in range(10 * SMOOTHED)] + [{"step": 9e9}]
    curve = points(rows, "loss")
    assert len(curve) <= SMOOTHED and curve[0][0] == pytest.approx(5, abs=1)
    assert all(0.3 < value < 0.7 for _, value in curve)


def test_a_short_curve_is_drawn_as_it_is():
    rows = [{"step": k, "loss": float(k % 2)} for k in range(5)]
    assert points(rows, "loss") == [[k, k % 2] for k in range(5)] and not points(rows, "lr")


def test_a_running_mean_takes_as_many_points_on_either_side():
    values = np.random.default_rng(0).normal(size=47)
    expected = [values[max(i - 2, 0):i + 3].mean() for i in range(47)]
    assert np.allclose(running_mean(values), expected)


def test_what_letter_frequencies_give_is_drawn_in_nats(tmp_path):
    folder = write(tmp_path / "run", {"step": 1, "val/unigram_perplexity": 18.0, "loss": None})
    assert rows_of(folder)[0]["val/unigram"] == math.log(18.0)


def titles_of(*rows):
    return [title for title, *_ in choose_panels({"run": list(rows)})]


def test_a_short_run_of_a_table_is_drawn_by_what_tells_whether_it_helped():
    row = {"loss": 0.6, "rewards/accuracies": 0.7, "spearman": 0.4, "lr": 1e-3, "grad_norm": 1.0,
           "residues_per_second": 9.0, "pairs_per_second": 4.0}
    titles = titles_of({"step": 0, "spearman": 0.2}, {"step": 10, **row})
    assert titles == ["loss", "ranks of measured values", "accuracy"]
    assert {"learning rate", "throughput", "pairs", "norm of the gradient"} < set(
        titles_of({"step": 2000, **row}))


def test_the_axis_of_a_loss_says_what_is_counted():
    """docs/metrics.md: nats per residue, of DPO per pair."""
    sedd = [{"step": 1, "loss": 2.8}, {"step": 2, "val/loss": 2.7}]
    dpo = [{"step": 0, "val/loss": 0.7, "val/rewards/accuracies": 0.5}]
    assert "residue" in loss_unit([sedd, sedd]) and "pair" not in loss_unit([sedd])
    assert "pair" in loss_unit([dpo]) and "residue" not in loss_unit([dpo])
    assert "residue" in loss_unit([sedd, dpo]) and "DPO: nats per pair" in loss_unit([sedd, dpo])


@pytest.mark.parametrize("key", ["val/spearman", "spearman"])
def test_the_correlation_stands_behind_the_loss(key):
    assert titles_of({"step": 1, "loss": 0.6, key: 0.4, "val/recovery": 0.5})[:2] == [
        "loss", "ranks of measured values"]


@pytest.mark.parametrize("rows", [[], [{"step": 1, "mine": 2.0}]])
def test_what_is_no_run_is_refused(rows, tmp_path, capsys):
    run = write(tmp_path / "mine", *rows)
    assert main([str(run)]) == 2
    assert "mine" in capsys.readouterr().err and not list(run.glob("*.png"))


def test_a_log_is_not_written_over(tmp_path, capsys):
    log = write(tmp_path / "good", {"step": 1, "loss": 2.0}) / "metrics.jsonl"
    assert main([str(log.parent), "--out", str(log)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err and log.read_text().startswith("{")


def test_runs_are_drawn_into_one_picture(tmp_path, capsys, extras):
    pytest.importorskip("matplotlib")
    sedd = write(tmp_path / "a", *({"step": k, "loss": 3 - k / 9, "lr": 0.1, "val/exact": 2.1}
                                   for k in range(9)))
    dpo = write(tmp_path / "b$x^$", {"step": 1, "loss": 0.6, "val/kl": 0.1})
    assert main([str(sedd)]) == 0 and str(sedd / "curves.png") in capsys.readouterr().out
    assert main([str(sedd), str(dpo), "--out", str(tmp_path / "both.png")]) == 0
    for path in (sedd / "curves.png", tmp_path / "both.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_picture_is_drawn_under_a_notebook_whose_backend_is_not_here(tmp_path, extras):
    pytest.importorskip("matplotlib")
    run = write(tmp_path / "run", *({"step": k, "loss": 3 - k / 9} for k in range(9)))
    environment = clean_environment(env={"PYTHONPATH": extras, "MPLBACKEND": "not_installed"})
    done = subprocess.run([sys.executable, ROOT / "plot_run.py", run], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and (run / "curves.png").stat().st_size > 10_000, done.stderr


def test_each_of_many_runs_has_its_own_colour(tmp_path, monkeypatch, extras):
    figure_of_matplotlib = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure_of_matplotlib, "savefig", lambda self, *_, **__: drawn.append(self))
    draw({str(k): [{"step": 1, "loss": 1.0}] for k in range(12)}, tmp_path / "12.png")
    assert len({tuple(line.get_color()) for line in drawn[0].legends[0].get_lines()}) == 12
