"""bench/card_all.py: parts one after the other, in the time there is, and what is said of them."""
import pytest
import torch

from bench import card_all
from bench.card_all import Part, command, resumed_run, run_parts
from ddp_setup import Ddp, save_checkpoint
from launchers import ROOT

PASS = Part("good", command(["-c", "print('all is well')"]), 300)
FAIL = Part("bad", command(["-c", "print('no'); exit(3)"]), 300)
HANG = Part("slow", command(["-c", "import time; print('here', flush=True); time.sleep(1000)"]), 5)
TINY = ["--config", ROOT / "configs" / "sedd_demo.yaml", "--device=cpu", "training.n_iters=40",
        "training.snapshot_freq=2", "training.eval_freq=40", "training.batch_size=2",
        "training.eval_samples=1", "data.demo_proteins=200", "model.hidden_size=16",
        "model.n_blocks=1", "model.n_heads=1", "monitoring.n_samples=1"]


def trained(folder):
    return resumed_run([ROOT / "train_sedd_ddp.py", *TINY, "--work_dir"], folder, "sedd")


def outcomes(folder):
    """{part: (outcome, found)} of the report"""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in (folder / "report.md").read_text().splitlines()[2:]]
    return {name: (outcome, found) for name, outcome, _, found in rows}


def test_a_part_that_fails_does_not_keep_the_others_from_being_tried(tmp_path):
    assert not run_parts([FAIL, PASS], tmp_path, 600)
    assert outcomes(tmp_path) == {"bad": ("FAIL", "exit code 3; last line: no"),
                                  "good": ("PASS", "all is well")}


def test_a_part_that_hangs_is_ended_at_its_limit(tmp_path):
    assert not run_parts([HANG], tmp_path, 600)
    assert outcomes(tmp_path)["slow"] == ("FAIL", "not done after 5 s; last line: here")


def test_no_part_begins_after_the_time_of_all(tmp_path):
    assert not run_parts([PASS], tmp_path, 0.0)
    assert outcomes(tmp_path) == {"good": ("FAIL", "no time was left")}


@pytest.mark.slow
def test_a_run_that_was_killed_and_continued_has_the_weights_of_the_undisturbed_one(tmp_path):
    part = Part("sedd", trained(tmp_path), 600)
    assert run_parts([part], tmp_path, 600), (tmp_path / "sedd.log").read_text()
    outcome, found = outcomes(tmp_path)["sedd"]
    assert outcome == "PASS" and "continued: weights differ by 0.0e+00" in found


def test_weights_differ_by_the_relative_norm_of_their_difference(tmp_path):
    for name, weights in (("a", {"w": [3.0, 0.0], "b": [4.0]}),
                          ("b", {"w": [3.0, 0.3], "b": [4.4]})):
        state = {key: torch.tensor(values) for key, values in weights.items()}
        save_checkpoint(str(tmp_path / name / "checkpoints" / "last.pt"), Ddp(), model=state)
    found = card_all.weights_differ(tmp_path / "a", tmp_path / "b")
    assert found == pytest.approx(0.5 / 5.0)


def test_a_world_of_one_rank_has_the_gradient_of_a_step_without_a_group(capsys):
    card_all.check_world("cpu")
    assert capsys.readouterr().out.startswith("gloo: a world of one rank, gradient within")
