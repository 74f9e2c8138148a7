"""The trace of steps: which steps are in it, when it is written, what does not end a run."""
import gzip
import json
import re

import pytest

from ddp_setup import Ddp
from toy_run import steps, toy
from training.log import RunLog
from training.profile import StepProfile
from training_runs import train


def steps_in(path):
    """Numbers of the steps that are marked in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    return sorted(int(found[1]) for found in (re.fullmatch(r"step (\d+)", name) for name in names)
                  if found)


def profile_steps(folder, n, profile, done=0, is_main=True):
    """Take steps `done` + 1 to n of a toy run that is profiled. Returns its StepProfile."""
    run = toy(profile=profile)
    run.work_dir = folder
    run.progress["step"] = done
    profiled = StepProfile(run, RunLog(folder, is_main, 10))
    taken = steps(run, n)
    for step in range(done + 1, n + 1):
        profiled.begin(step)
        next(taken)
    profiled.close()
    return profiled


@pytest.mark.parametrize("n, done, name, expected", [
    (5, 0, "steps_2-3", [2, 3]),
    (3, 0, "steps_2-3", [2, 3]),     # the run ends with the trace
    (2, 0, "steps_2-2", [2]),        # a stop in the middle
    (5, 2, "steps_3-3", [3])])       # continued in the middle
def test_a_trace_has_the_steps_that_were_asked_for(n, done, name, expected, tmp_path, capsys):
    profile_steps(tmp_path, n, "2:3", done)
    path = tmp_path / "profile" / f"{name}.json.gz"
    assert [*tmp_path.rglob("*")] == [path.parent, path]
    assert steps_in(path) == expected
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("profile, is_main", [("2:3", False), (None, True), ("8:9", True)])
def test_no_trace_is_written_without_need(profile, is_main, tmp_path):
    """On a rank other than 0; if none is asked for; if its steps are not reached."""
    profile_steps(tmp_path, 4, profile, is_main=is_main)
    assert [*tmp_path.iterdir()] == []


def test_steps_that_a_start_does_not_do_are_told(tmp_path, capsys):
    profile_steps(tmp_path, 5, "2:3", done=3)
    assert "training.profile 2:3: no trace, as this start does steps 4 to 10" in (
        capsys.readouterr().out)


def test_a_trace_that_cannot_be_written_is_told_once(tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    profile_steps(tmp_path, 5, "2:4")
    assert capsys.readouterr().out.count("ATTENTION: no trace of steps was made") == 1


SETTINGS = {
    "sedd": "training.batch_size=4 model.hidden_size=32 model.n_blocks=1 model.n_heads=2 "
            "data.max_length=32 data.demo_proteins=100 memory.compile=false "
            "monitoring.n_samples=0 data.val_fraction=0",
    "dpo": "training.batch_size=3 model.base_model_name=random model.random.hidden_size=16 "
           "model.random.n_encoder=1 model.random.n_decoder=1 model.random.num_edges=8 "
           "data.demo_structures=3 data.demo_pairs=2 monitoring.n_designs=0"}


@pytest.mark.parametrize("what", ["sedd", "dpo"])
def test_both_scripts_trace_steps(what, tmp_path):
    settings = [*SETTINGS[what].split(), "training.n_iters=3", "training.profile=2:2"]
    train(what, settings, tmp_path, Ddp())
    assert steps_in(tmp_path / "profile" / "steps_2-2.json.gz") == [2]
