"""examples/resume.py, copied with what it needs, on two ranks: killed or stopped, it goes on."""
import json
import shutil

import pytest
import torch

from launchers import ROOT, fork_ranks

# Ends rank 1 in its 45th step, between two checkpoints, as SIGKILL does.
KILLED = """
import os, runpy, signal, sys
import ddp_setup
draw_seed = ddp_setup.seed_for

def seed_or_die(*parts):
    if parts[1:] == (45, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return draw_seed(*parts)

ddp_setup.seed_for = seed_or_die
runpy.run_path("resume.py", run_name="__main__")
"""

# Asks for a stop in the last step of one rank.
ASKED_AT_THE_END = """
import pathlib, runpy
import ddp_setup
draw_seed = ddp_setup.seed_for

def seed_and_ask(*parts):
    if parts[1] == 256:
        pathlib.Path("runs/resume/STOP").touch()
    return draw_seed(*parts)

ddp_setup.seed_for = seed_and_ask
runpy.run_path("resume.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A function that makes a folder with copies of the example and of the files it needs."""
    def copy(name):
        folder = tmp_path_factory.mktemp(name)
        for file in ("examples/resume.py", "ddp_setup.py", "ddp_watch.py", "ddp_guard.py"):
            shutil.copy(ROOT / file, folder)
        (folder / "killed.py").write_text(KILLED)
        (folder / "asked.py").write_text(ASKED_AT_THE_END)
        return folder
    return copy


@pytest.fixture(scope="module")
def uninterrupted(copied):
    folder = copied("whole")
    done = fork_ranks(2, ["resume.py"], folder)
    assert done.returncode == 0 and "goes on" not in done.text, done.text
    return folder


def state_of(folder):
    """(step, {name: tensor}) of the last checkpoint, of the model and the optimizer."""
    state = torch.load(folder / "runs" / "resume" / "checkpoints" / "last.pt", weights_only=True)
    tensors = dict(state["model"])
    for number, moments in state["optim"]["state"].items():
        tensors |= {f"{number}/{name}": torch.as_tensor(value) for name, value in moments.items()}
    return state["step"], tensors


def assert_equal(folder, other):
    step, tensors = state_of(folder)
    other_step, others = state_of(other)
    assert step == other_step == 128 and tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_killed_run_goes_on_bit_by_bit(copied, uninterrupted):
    folder = copied("killed")
    killed = fork_ranks(2, ["killed.py"], folder)
    assert killed.returncode != 0 and state_of(folder)[0] == 40
    done = fork_ranks(2, ["resume.py"], folder)
    assert done.returncode == 0 and "goes on after step 40" in done.text, done.text
    assert_equal(folder, uninterrupted)


def test_a_stopped_run_says_so_and_goes_on_bit_by_bit(copied, uninterrupted):
    folder = copied("stopped")
    stop = folder / "runs" / "resume" / "STOP"
    stop.parent.mkdir(parents=True)
    stop.touch()
    assert fork_ranks(2, ["resume.py"], folder).returncode == 75
    assert json.loads((stop.parent / "status.json").read_text())["code"] == 75
    assert state_of(folder)[0] < 128
    stop.unlink()
    alone = fork_ranks(1, ["resume.py"], folder)
    assert alone.returncode == 1 and "saved by 2 ranks" in alone.text, alone.text
    assert fork_ranks(2, ["resume.py"], folder).returncode == 0
    assert_equal(folder, uninterrupted)


def test_a_stop_that_comes_in_the_last_step_leaves_a_finished_run(copied):
    folder = copied("asked")
    done = fork_ranks(1, ["asked.py"], folder)
    assert done.returncode == 0 and "step 256 " in done.stdout, done.text
    run = folder / "runs" / "resume"
    assert (run / "STOP").exists() and state_of(folder)[0] == 256
    status = json.loads((run / "status.json").read_text())
    assert (status["code"], status["reason"], status["step"]) == (0, "finished", 256)
