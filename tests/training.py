"""What the tests of the training scripts share: runs in this process, runs by command line,
comparisons."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from ddp_setup import load_checkpoint
from launchers import ROOT, fork_ranks

# Beginnings of the names of metrics that differ between equal runs, by time or number of ranks.
CLOCK = ("residues_per_second", "pairs_per_second", "data_wait", "time/", "memory/", "device/",
         "ddp/")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in one order: bit-identical runs are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def words(settings, **more):
    """Overrides for the command line; a keyword training__n_iters=3 sets training.n_iters."""
    settings = {**settings, **{k.replace("__", "."): v for k, v in more.items()}}
    return [f"{k}={v}" for k, v in settings.items()]


def rows(work_dir):
    return [json.loads(line)
            for line in (Path(work_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(work_dir):
    return {row["step"]: row["loss"] for row in rows(work_dir) if row["step"]}


def timeless(work_dir):
    """Rows of metrics.jsonl without what time and the number of ranks tell."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)}
            for row in rows(work_dir)]


def same_run(a, b):
    """Assert that the last checkpoints, published models, designs and metrics of two run folders
    are alike, to the last bit."""
    one, other = (load_checkpoint(str(folder / "checkpoints" / "last.pt")) for folder in (a, b))
    for key in one.keys() - {"config"}:
        assert equal(one[key], other[key]), key
    for path in a.glob("*_model.pt"):
        one, other = (torch.load(folder / path.name, weights_only=True) for folder in (a, b))
        assert equal(one["model_state_dict"], other["model_state_dict"]), path.name
        assert one["step"] == other["step"]
    for path in a.glob("designs/*"):
        assert path.read_bytes() == (b / "designs" / path.name).read_bytes(), path.name
    assert timeless(a) == timeless(b)


def equal(a, b):
    """Are two nested states alike, to the last bit?"""
    (leaves, form), (others, other_form) = tree_flatten(a), tree_flatten(b)
    return form == other_form and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(leaves, others))


def command_lines(script, cases, cwd):
    """Run each list of arguments as `python SCRIPT.py ARGUMENTS`: [(exit code, stdout, stderr)]."""
    done = [fork_ranks(1, [ROOT / f"{script}.py", *case], cwd) for case in cases]
    return [(result.returncode, result.stdout, result.stderr) for result in done]


# A training script in which the loss is nan on rank 1 in the calls BAD, counted after the first,
# which lays out DDP's buckets.
NAN_LOSS = """
import os, sys
sys.path.insert(0, {root!r})
import ddp_guard
ddp_guard.supervise()
import {script} as script
real, calls = script.micro_batch_loss, []
def micro_batch_loss(*arguments):
    loss, sums, count = real(*arguments)
    calls.append(1)
    bad = os.environ["RANK"] == "1" and len(calls) - 1 in {bad}
    return (loss * float("nan"), sums * float("nan"), count) if bad else (loss, sums, count)
script.micro_batch_loss = micro_batch_loss
script.cli()
"""


def steps_with_a_nan(work_dir):
    """Assert that step 3, bad on one rank, changed nothing on any; return the states of all
    checkpoints by step."""
    states = [load_checkpoint(str(path))
              for path in (Path(work_dir) / "checkpoints").glob("last*.pt")]
    states = {state["step"]: state for state in states}
    for key in {"model", "ema", "optimizer"} & states[3].keys():
        part = (lambda s: s["optimizer"]["state"]) if key == "optimizer" else (lambda s: s[key])
        torch.testing.assert_close(part(states[3]), part(states[2]), rtol=0, atol=0)
    assert not all(torch.equal(states[4]["model"][k], v) for k, v in states[3]["model"].items())
    assert [states[k]["bad_steps"] for k in (1, 2, 3, 4, 5)] == [[0, 0], [0, 0], [1, 1], [1, 0],
                                                                 [1, 0]]
    return states
