"""What tests of the training scripts share."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten

import train_dpo_ddp
import train_mpnn_ddp
import train_sedd_ddp
from bench.speed import compute_gradient
from ddp_setup import Ddp, load_checkpoint
from ddp_watch import watch_run
from launchers import ROOT, fork_ranks
from tool_runs import assert_named, run_tool
from toy_run import toy
from training.config import load_config
from training.run_folder import take_folder

SCRIPTS = {"sedd": train_sedd_ddp, "dpo": train_dpo_ddp, "mpnn": train_mpnn_ddp}

# Beginnings of the names of metrics that differ between equal runs, by time or number of ranks.
CLOCK = ("residues_per_second", "pairs_per_second", "tokens_per_second", "mfu",
         "data_wait", "time/", "memory/", "ddp/")


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
    """Assert that the last checkpoints and metrics of two run folders are alike, to the last bit,
    and that b has a's published models and samples."""
    one, other = (load_checkpoint(str(folder / "checkpoints" / "last.pt")) for folder in (a, b))
    for key in one.keys() - {"config"}:
        assert equal(one[key], other[key]), key
    for path in [*a.glob("*_model.pt"), *a.glob("checkpoints/best.pt")]:
        one, other = (torch.load(folder / path.relative_to(a), weights_only=True)
                      for folder in (a, b))
        weights = "model_state_dict" if "model_state_dict" in one else "model"
        assert equal(one[weights], other[weights]) and one["step"] == other["step"], path.name
    for path in a.glob("samples/*"):
        assert path.read_bytes() == (b / path.relative_to(a)).read_bytes(), path.name
    assert timeless(a) == timeless(b)


def equal(a, b):
    """Are two nested states alike, to the last bit?"""
    leaves, form = tree_flatten(a)
    others, other_form = tree_flatten(b)
    if form != other_form:
        return False
    for x, y in zip(leaves, others):
        same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        if not same:
            return False
    return True


def assert_refused(main, words, named, folder):
    """A training script refuses a command line with one message that names these words of the
    user's, separated by blanks, and leaves the folder as it is. Returns what it says."""
    before = sorted(folder.rglob("*"))
    ran = run_tool(main, words, folder)
    assert ran.code == 2, ran.text
    assert ran.err.count("error: ") == 1 and "Traceback" not in ran.out + ran.err, ran.text
    assert ran.files == {} and sorted(folder.rglob("*")) == before, ran.text
    assert_named(named, ran.err)
    return ran.err


def driver(folder, module, code):
    """Write and return driver.py: a module's command line after `code`, which may change it."""
    (folder / "driver.py").write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import ddp_guard
ddp_guard.supervise()
import {module} as script
rank = int(os.environ["RANK"])
{code}
script.main()
""")
    return folder / "driver.py"


def gradients(model, schedule, dataset, loss_of, ddp, whole=None):
    """[{parameter: its gradient, "loss": loss}] of two steps of a MicroBatchSampler. loss_of:
    function (model, micro-batch). whole: function of a step that gives its loss by the definition;
    that has one backward then."""
    run = toy(model=model, ddp=ddp)

    def loss(batch):
        return loss_of(run.model, batch)

    if ddp.world_size > 1:   # as open_batches does
        loss(dataset[schedule.item_of(0, schedule.mine[0])])[0].backward()
        model.zero_grad()
    items = iter(schedule)
    both = []
    for step in range(2):
        if whole:
            mean = whole(step)
            mean.backward()
        else:
            micro_batches = [dataset[next(items)] for _ in schedule.mine]
            with watch_run(ddp, minutes=0) as watch:
                totals = compute_gradient(run, micro_batches, loss, watch, ddp)
            mean = totals.sums[0] / totals.count
        both.append({"loss": mean.detach().clone(),
                     **{name: p.grad.clone() for name, p in model.named_parameters()}})
        model.zero_grad()
    return both


needs_pretended_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device written in Python")


def on_ranks(n, module, expression, folder):
    """What `expression`, with the names of a module of tests and `ddp`, gives on rank 0 of n."""
    (folder / "s.py").write_text(f"""
import sys
sys.path[:0] = {[str(ROOT), *map(str, [ROOT / "tests", *ROOT.glob("tests/*/")])]!r}
import torch
from ddp_setup import setup_ddp
from {module} import *
with setup_ddp("cpu", quiet=True) as ddp:
    found = {expression}
    if ddp.is_main:
        torch.save(found, "out.pt")
""")
    done = fork_ranks(n, ["s.py"], folder)
    assert done.returncode == 0, done.text
    return torch.load(folder / "out.pt", weights_only=True)


def prepare_and_train(script, config, ddp, work_dir, resume=None, fresh=False, train=None):
    """Prepare and train without a command line.

    script: a module with `prepare` and `train`, such as train_sedd_ddp. train: function (run, ddp,
    watch) instead of its own. Returns: what that returns."""
    train = train or script.train
    signals = config.training.stop_signals
    with watch_run(ddp, minutes=config.monitoring.watchdog_minutes, signals=signals) as watch:
        run = script.prepare(config, ddp, work_dir, resume, fresh)
        take_folder(run, ddp, watch, fresh, ("checkpoints",))
        return train(run, ddp, watch)


def train(what, settings, folder, ddp, loop=None):
    """Prepare and train as a training script does. loop: function (run, ddp, watch) instead of its
    own."""
    script = SCRIPTS[what]
    config = load_config(script.Config, None, settings)
    prepare_and_train(script, config, ddp, Path(folder), train=loop)


def train_ready(what, ready):
    """Train a run that a script's `prepare` has returned, in its folder."""
    with watch_run(Ddp(), minutes=0) as watch:
        take_folder(ready, Ddp(), watch, False, ())
        return SCRIPTS[what].train(ready, Ddp(), watch)


def loss_of(run, what, ddp):
    """Function of a micro-batch: its loss, as a training script makes it."""
    def loss(batch):
        if what == "sedd":
            return train_sedd_ddp.micro_batch_loss(run.model, batch, run.graph, ddp, run.dtype)
        return train_dpo_ddp.micro_batch_loss(run.model, batch, run, ddp)

    return loss


def dataset_of(run, what, ddp):
    """The data set of micro-batches, as the script's `train` makes it."""
    if what == "sedd":
        return train_sedd_ddp.MicroBatchDataset(run.graph, run.noise, run.config.data.max_length,
                                                run.micro_batches, run.config.training.seed,
                                                run.config.loss.reduction)
    train_dpo_ddp.keep_base_scores(run, ddp)
    return run.train_set
