"""The loop, on a toy model and in the scripts; how ranks end."""

import contextlib
import copy
import gzip
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from bench.speed import compute_gradient
from ddp_setup import Ddp, all_sum, gather, load_checkpoint  # noqa: F401  (gather: for on_ranks)
from ddp_watch import watch_run
from launchers import ROOT, slow
from sedd.model import SEDD
from toy_run import Blocks, Rows, steps, take_step, toy
from toy_run import loss_of as loss_of_toy
from training.log import RunLog
from training.loop import (
    Totals,
    after_step,
    eval_mode,
    open_batches,
    open_trace,
    record_score,
    scale_for_batch,
    share_of,
)
from training.precision import compile_blocks, grad_scaler
from training_runs import (
    SCRIPTS,
    dataset_of,
    loss_of,
    losses,
    needs_pretended_device,
    on_ranks,
    train,
)

# ---- the step ----

@pytest.mark.parametrize("micro_batches", [1, 4, 12, 13])
def test_ranks_share_all_micro_batches_of_a_step_as_evenly_as_they_can(micro_batches):
    for n_ranks in range(1, micro_batches + 1):
        shares = [share_of(rank, n_ranks, micro_batches) for rank in range(n_ranks)]
        assert [micro for share in shares for micro in share] == list(range(micro_batches))
        sizes = {len(share) for share in shares}
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("decay, decay_steps, expected", [
    ("none", None, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", None, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ("linear", 0.4, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    ("linear", 99, [0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),   # all ten
    ("cosine", 4, [0.5, 1, 1, 1, 1, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ("wsd", 0.4, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    ("wsd", None, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5])])   # two of ten
def test_the_learning_rate_falls_to_0_after_the_last_step(decay, decay_steps, expected):
    """In step k of the decay 1 - k/D of it, or half of 1 + cos(pi k/D), is left."""
    run = toy(lr=0.8, warmup=2, decay=decay, decay_steps=decay_steps)
    assert [lr / 0.8 for lr, _, _ in steps(run, 10)] == pytest.approx(expected)


@pytest.mark.parametrize("decay, expected", [
    ("linear", [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
    ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
    ("cosine", [0.5, 1, 1, 1, 1, 1, 1, 0.6 + 0.2 * 2**0.5, 0.6, 0.6 - 0.2 * 2**0.5])])
def test_the_learning_rate_falls_to_min_lr(decay, expected):
    """min_lr is a fifth of lr: this much is left after the last step, and the warm-up has none."""
    run = toy(lr=0.8, warmup=2, decay=decay, decay_steps=4, min_lr=0.16)
    assert [lr / 0.8 for lr, _, _ in steps(run, 10)] == pytest.approx(expected)


def test_noam_falls_with_the_square_root_of_the_step_after_the_warm_up():
    run = toy(lr=0.8, warmup=4, decay="noam")
    assert [lr / 0.8 for lr, _, _ in steps(run, 10)] == pytest.approx(
        [1 / 4, 2 / 4, 3 / 4, *((4 / step)**0.5 for step in range(4, 11))])


def test_min_lr_is_scaled_as_lr_is():
    """To the same fraction of the scaled rate."""
    run = toy(lr=0.8, decay="linear", min_lr=0.16)
    run.lr *= 3
    assert [lr / 2.4 for lr, _, _ in steps(run, 10)] == pytest.approx(
        [0.2 + 0.8 * left / 10 for left in range(10, 0, -1)])


def test_clipping_limits_the_change_of_the_weights_and_not_the_norm_that_is_told():
    """Plain SGD moves the weights by lr x gradient."""
    for _, norm, moved in steps(toy(lr=0.01, grad_clip=0.25), 3, scale=100):
        assert norm > 1 and moved == pytest.approx(0.01 * 0.25, rel=1e-4)
    for _, norm, moved in steps(toy(lr=0.01, grad_clip=0.0), 3, scale=100):
        assert moved == pytest.approx(0.01 * norm, rel=1e-4)


@pytest.mark.parametrize("optimizer, first", [("adamw", 3), ("muon", 3), ("muon", 0)])
def test_a_bad_step_is_counted_and_changes_nothing_else(optimizer, first):
    """first: good steps before it."""
    def state():
        moments = run.optimizer.state_dict()
        return copy.deepcopy([run.bare.state_dict(), moments.get("muon", moments)["state"]])

    run = toy(model=Blocks(), optimizer=optimizer, ema=0.5, max_bad_steps=2, lr=0.01)
    list(steps(run, first))
    before = state()
    averages = [p.clone() for p in run.ema.shadow_params]
    updates = run.ema.num_updates
    for bad in (1, 2):
        _, norm, moved = next(steps(run, 1, scale=math.nan))
        assert moved == 0 and math.isnan(norm) and run.progress["bad_steps"] == [bad, bad]
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert all(map(torch.equal, averages, run.ema.shadow_params)) and run.ema.num_updates == updates
    next(steps(run, 1))
    assert run.progress["bad_steps"] == [2, 0] and run.ema.num_updates == updates + 1


def test_a_step_with_a_gradient_of_nan_is_bad_whatever_its_loss():
    def loss_with_nan_gradient(model, batch):
        loss, sums = loss_of_toy(model, batch)
        return loss + (0 * model.weight).sum().sqrt(), sums

    run = toy(optimizer="adamw")
    _, _, moved = next(steps(run, 1, loss_of=loss_with_nan_gradient))
    assert moved == 0 and run.progress["bad_steps"] == [1, 1]


@pytest.mark.parametrize("bad", range(2))
def test_a_loss_of_nan_with_a_finite_gradient_is_bad_in_each_micro_batch(bad):
    calls = []

    def loss_nan_in_one(model, batch):
        loss, sums = loss_of_toy(model, batch)
        calls.append(loss)
        nan = math.nan if len(calls) == bad + 1 else 0.0
        return loss + nan, sums + nan

    run = toy(micro_batches=2, optimizer="adamw")
    _, _, moved = next(steps(run, 1, loss_of=loss_nan_in_one))
    assert moved == 0 and run.progress["bad_steps"] == [1, 1]


def test_random_numbers_of_a_micro_batch_hang_on_its_seed_alone():
    drawn = []

    def loss_that_draws(model, batch):
        drawn.append(torch.rand(1).item())
        return loss_of_toy(model, batch)

    batches = [{**Rows()[0, micro], "seed": seed} for micro, seed in enumerate((7, 3, 7))]
    run = toy()
    with watch_run(Ddp(), minutes=0) as watch:
        compute_gradient(run, batches, lambda batch: loss_that_draws(run.model, batch), watch,
                         Ddp())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_goes_back_to_the_mode_that_it_had(training):
    model = torch.nn.Linear(1, 1).train(training)
    with eval_mode(model):
        assert not model.training
    assert model.training == training


def a_step_with_a_nan_loss_on_rank_1(ddp, dtype):
    """(how far it moved the weights of all ranks, bad steps)."""
    def nan_loss(model, batch):
        loss, sums = loss_of_toy(model, batch)
        if ddp.rank == 1:
            loss = loss + math.nan   # whose gradient is finite
            sums = sums + math.nan
        return loss, sums

    run = toy(ddp=ddp, micro_batches=3, optimizer="adamw")
    run.scaler = grad_scaler(dtype, ddp)
    _, _, moved = next(steps(run, 1, ddp=ddp, loss_of=nan_loss))
    return all_sum(moved, ddp), run.progress["bad_steps"]


def test_all_ranks_skip_a_step_in_which_the_loss_of_one_is_nan(tmp_path):
    """Also where its gradient is finite."""
    call = ("[a_step_with_a_nan_loss_on_rank_1(ddp, dtype) "
            "for dtype in (torch.float32, torch.float16)]")
    assert on_ranks(3, "test_loop", call, tmp_path) == [(0.0, [1, 1])] * 2


def test_an_overflow_in_float16_is_skipped_and_no_bad_step():
    """The scale of the loss falls, until the gradient fits."""
    run = toy(optimizer="adamw")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    _, norm, moved = next(steps(run, 1, scale=100))
    assert moved == 0 and not math.isfinite(norm) and run.progress["bad_steps"] == [0, 0]
    assert run.scaler.get_scale() == 2.0**126


def gradients_in_float16(ddp):
    """The scaled gradients that two micro-batches leave, as the device sees them in float16."""
    seen = []

    def watched_loss(model, batch):
        loss, sums = loss_of_toy(model, batch)
        loss.register_hook(lambda gradient: seen.append(float(gradient)))
        return loss, sums

    run = toy(ddp=ddp, micro_batches=2, optimizer="adamw")
    run.scaler = grad_scaler(torch.float16, ddp)
    next(steps(run, 1, ddp=ddp, loss_of=watched_loss))
    return seen[-1], [p.flatten().tolist() for p in run.bare.parameters()]


def test_the_range_of_gradients_in_float16_does_not_depend_on_the_number_of_ranks(tmp_path):
    """So a step overflows on any number of ranks, or on none."""
    (one, weights), (two, same) = (on_ranks(n, "test_loop", "gradients_in_float16(ddp)", tmp_path)
                                   for n in (1, 2))
    assert one == two == pytest.approx(2**16 / 3)   # of three rows
    for a, b in zip(weights, same, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_a_global_batch_in_which_nothing_counts_changes_nothing():
    class Unknown(Rows):
        def __getitem__(self, item):
            return {**super().__getitem__(item), "count": 0}

    def masked_loss(model, batch):
        loss, sums = loss_of_toy(model, batch)
        return 0 * loss, 0 * sums

    run = toy()
    before = copy.deepcopy(run.bare.state_dict())
    batches = iter([Unknown()[0, micro] for micro in range(2)])
    with watch_run(Ddp(), minutes=0) as watch:
        totals, _ = take_step(run, batches, lambda batch: masked_loss(run.model, batch), watch,
                              Ddp())
    assert totals.norm == 0 and run.progress["bad_steps"] == [0, 0]
    torch.testing.assert_close(run.bare.state_dict(), before, rtol=0, atol=0)


def test_too_many_bad_steps_in_a_row_end_the_run():
    run = toy(optimizer="adamw", max_bad_steps=2)
    for scale in (math.nan, math.inf, 1.0):   # the good one begins the row anew
        next(steps(run, 1, scale=scale))
    with pytest.raises(RuntimeError,
                       match="in 3 steps in a row; expected at most 2.*optim.lr"):
        list(steps(run, 3, scale=math.inf))
    assert run.progress["bad_steps"] == [5, 3]


def test_a_run_without_a_good_step_does_not_count_as_finished():
    run = toy(n_iters=2, optimizer="adamw", max_bad_steps=10)
    with pytest.raises(RuntimeError, match="in 2 steps in a row; .*a good one in a run"):
        list(steps(run, 2, scale=math.nan))


@pytest.mark.parametrize("what", ["sedd", "dpo"])
def test_a_script_takes_the_step_that_other_tests_take(what, tmp_path, monkeypatch):
    """To the last bit, weights and their moving averages, and the second step is bad."""
    micro_batch_loss = SCRIPTS[what].micro_batch_loss
    states = []
    calls = []

    def loss_nan_in_the_second_step(*arguments):
        calls.append(arguments)
        loss, sums = micro_batch_loss(*arguments)
        nan = math.nan if len(calls) in (3, 4) else 0.0    # two micro-batches a step
        return loss + nan, sums + nan

    monkeypatch.setattr(SCRIPTS[what], "micro_batch_loss", loss_nan_in_the_second_step)

    def take_three(run, ddp, watch):
        loss = loss_of(run, what, ddp)
        batches = open_batches(run, dataset_of(run, what, ddp), loss, ddp)
        for _ in range(3):
            take_step(run, batches, loss, watch, ddp)
        keep_state(run)

    def train_three(run, ddp, watch):
        SCRIPTS[what].train(run, ddp, watch)
        keep_state(run)

    def keep_state(run):
        averages = run.ema.state_dict() if run.ema is not None else {}
        weights = [p.detach().clone() for p in run.bare.parameters()]
        states.append(copy.deepcopy([weights, averages, run.progress["bad_steps"]]))
        calls.clear()

    settings = [*STEPS[what].split(), "training.n_iters=3", "optim.warmup=2"]
    train(what, settings, tmp_path / "steps", Ddp(), take_three)
    train(what, settings, tmp_path / "script", Ddp(), train_three)
    assert states[0][2] == states[1][2] == [1, 0]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_the_batches_of_a_worker_need_no_shared_memory():
    """In many containers /dev/shm has no room for them."""
    run = toy(n_iters=1, num_workers=1)
    batches = open_batches(run, Rows(), None, Ddp())
    for batch, (step, micro) in zip(batches, [(0, 0), (0, 1)], strict=True):
        assert not batch["x"].is_shared()
        torch.testing.assert_close(batch, Rows()[step, micro], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="root mounts a small /dev/shm")
@pytest.mark.parametrize("size, code, said", [
    ("64k", 0, "all steps done"),   # enough for the locks between processes
    ("4k", 1, "No space left on device")])
def test_a_run_with_workers_needs_no_more_of_dev_shm_than_locks(size, code, said, tmp_path):
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec \"$0\" \"$@\""
    if subprocess.run(["unshare", "-m", "bash", "-c", mount, "true"]).returncode:
        pytest.skip("this machine allows no mount of its own")
    settings = [*STEPS["sedd"].split(), "training.batch_size=64", "training.n_iters=2",
                "training.num_workers=2", "data.max_length=512", "monitoring.n_samples=1"]
    config = ["--config", ROOT / "configs" / "sedd_demo.yaml", "--work_dir", tmp_path / "w"]
    command = [sys.executable, ROOT / "train_sedd_ddp.py", *config, *settings]
    done = subprocess.run(["unshare", "-m", "bash", "-c", mount, *command], timeout=120,
                          capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert said in text


STEPS = {
    "sedd": "training.batch_size=4 training.accum=2 training.n_iters=9 model.hidden_size=32 "
            "model.n_blocks=2 model.n_heads=2 data.max_length=64 data.demo_proteins=300 "
            "memory.compile=false monitoring.sample_steps=4",
    "sedd muon": "optim.name=muon noise.type=cosine model.parameterization=subs "
                 "memory.gradient_checkpointing=true ",
    "dpo": "training.batch_size=3 training.accum=2 model.base_model_name=random "
           "data.demo_structures=6 data.demo_pairs=5 model.random.hidden_size=16 "
           "model.random.n_encoder=1 model.random.n_decoder=1"}
STEPS["sedd muon"] += STEPS["sedd"]


@needs_pretended_device
@pytest.mark.parametrize("name", [slow("sedd"), "sedd muon", slow("dpo")])
def test_ranks_train_and_go_on_on_devices_as_on_the_cpu(name, tmp_path):
    """With validation, samples and checkpoints. In bfloat16 they run, and are not compared."""
    what = name.split()[0]
    settings = [*STEPS[name].split(), "model.dropout=0", "training.n_iters=2",
                "training.eval_freq=2", "training.log_freq=1", "optim.warmup=1",
                "memory.mixed_precision=false"]
    longer = [*settings, "training.n_iters=4"]

    def train_on_device(settings, folder):
        return f"on_device(train, {what!r}, {settings}, {folder!r}, ddp=ddp)"

    begun = train_on_device(settings, "device")
    going_on = train_on_device(longer, "device")
    in_bfloat16 = train_on_device([*settings, "memory.mixed_precision=true"], "bfloat16")
    on_ranks(2, "pretended_device", f"[{begun}, {going_on}, {in_bfloat16}]", tmp_path)
    on_ranks(2, "training_runs", f"train({what!r}, {longer}, 'cpu', ddp)", tmp_path)
    on_cpu = losses(tmp_path / "cpu")
    assert losses(tmp_path / "device") == pytest.approx(on_cpu, rel=1e-4) and 4 in on_cpu


def test_a_run_ends_after_so_many_evaluations_in_a_row_that_are_no_better():
    run = toy(patience=2)
    found = []
    for score in (3.0, 3.1, 2.4, 2.4, 2.5):
        found.append((record_score(run, score, {}, Ddp()), run.progress["finished"]))
    assert found == [(True, ""), (False, ""), (True, ""), (False, ""), (False, "early stop")]


def test_the_learning_rate_is_scaled_with_the_root_of_the_batch_or_up_to_a_cap():
    assert scale_for_batch(1e-4, 100, "sqrt", 256, 64) == (pytest.approx(2e-4), 200)
    assert scale_for_batch(1e-4, 100, {"cap": 4}, 512, 64) == (pytest.approx(4e-4), 400)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU: none here")
def test_compiled_blocks_compute_the_same_under_the_same_names_by_one_code_for_all_shapes():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(SEDD(22, 32, 2, 2, dropout=0.0, scale_by_sigma=False))
        with torch.no_grad():
            for p in models[-1].parameters():
                p += 0.05 * torch.randn(p.shape)
    assert "compiled" in compile_blocks(models[1], True, Ddp())
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for shape in ((4, 20), (6, 21)):    # neither as wide as a head, which is fixed
        xt = torch.randint(0, 22, shape)
        sigma = torch.rand(shape[0]) + 0.1
        for model in models:
            model.zero_grad()
            model(xt, sigma).square().sum().backward()
        torch.testing.assert_close(*([p.grad for p in model.parameters()] for model in models),
                                   rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1     # of all blocks


@pytest.mark.parametrize("what", ["sedd", "dpo"])
def test_a_checkpoint_is_written_when_the_minutes_have_passed(what, tmp_path):
    settings = [*STEPS[what].split(), "training.n_iters=3", "training.snapshot_freq=100",
                "training.snapshot_minutes=1e-9", "training.keep_last=9"]
    train(what, settings, tmp_path, Ddp())
    kept = [load_checkpoint(tmp_path / "checkpoints" / name)["step"]
            for name in ("last.pt", "last-1.pt", "last-2.pt")]
    assert kept == [3, 2, 1]


def save_by_the_clock_of_rank_0(ddp):
    """What after_step returns on this rank in three steps."""
    run = toy(n_iters=3, ddp=ddp, snapshot_minutes=1e-9 if ddp.is_main else 1e9)

    def loss(batch):
        return loss_of_toy(run.model, batch)

    batches = open_batches(run, Rows(), loss, ddp)
    with watch_run(ddp, minutes=0) as watch:
        return [take_step(run, batches, loss, watch, ddp)[1] for _ in range(3)]


def test_all_ranks_save_after_the_same_step_by_the_clock_of_rank_0(tmp_path):
    answers = on_ranks(2, "test_loop", "gather(save_by_the_clock_of_rank_0(ddp), ddp)", tmp_path)
    assert answers == [[("", True)] * 3] * 2


def come_apart(ddp):
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(2)))
    run = toy(model=model, ddp=ddp)
    run.config.monitoring.check_sync_every = 2
    totals = Totals(torch.zeros(1), 1.0, 1.0, 0.0, 0.0)
    fine = contextlib.nullcontext()
    told = pytest.raises(RuntimeError, match=r"1 of 3 differ from rank 0 on \S+ \(rank 2 on \S+\), "
                                             "first in 1.weight")
    with watch_run(ddp, minutes=0) as watch:
        for step, outcome in ((4, fine), (5, fine), (6, told), (10, told)):   # at 5 nobody looks
            run.progress["step"] = step - 1
            with outcome:
                after_step(run, totals, watch, ddp)
            if ddp.rank == 2:
                model[1].weight.data[2, 1] += 1e-6


def test_weights_that_have_come_apart_are_told_with_rank_and_parameter(tmp_path):
    on_ranks(3, "test_loop", "come_apart(ddp)", tmp_path)


def traced(folder, n, profile, done=0):
    """Names of the files in `folder` after the steps from `done` + 1 to n, and those steps that a
    trace has."""
    run = toy(n_iters=n, profile=profile)
    run.work_dir = folder
    run.progress["step"] = done
    trace = open_trace(run, RunLog(folder, True, n))
    for _ in steps(run, n - done):
        if trace:
            trace.step()
    if trace:
        trace.stop()
    names = []
    for path in folder.rglob("*.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        numbers = {event["name"].partition("#")[2] for event in events
                   if event["name"].startswith("ProfilerStep")}
        names.append((path.name, len(numbers)))
    return names


@pytest.mark.parametrize("n, done, expected", [
    (5, 0, [("steps_2-3.json.gz", 2)]),
    (2, 0, [("steps_2-2.json.gz", 1)]),    # the run ends in the middle
    (5, 2, [("steps_3-3.json.gz", 1)]),    # continued in the middle
    (1, 0, []),                            # the run ends before it
    (5, 3, [])])                           # continued behind it
def test_a_trace_has_the_steps_that_were_asked_for(n, done, expected, tmp_path):
    assert traced(tmp_path, n, "2:3", done) == expected


def test_no_trace_is_written_unless_it_is_asked_for(tmp_path):
    assert traced(tmp_path, 4, None) == []
