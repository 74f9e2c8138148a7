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
