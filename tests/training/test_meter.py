"""What is measured in a step: norms by layer, times, the slow rank."""

import math
import socket

import pytest
import torch

from ddp_setup import Ddp
from toy_run import WIDTH, Rows, steps, toy
from training.meter import StepMeter
from training_runs import on_ranks


def test_layers_have_the_norms_of_the_mean_gradient_before_clipping_and_of_the_new_weights():
    """By hand: one backward over all rows. Groups: each numbered block, and what stands alone."""
    torch.manual_seed(1)
    model = torch.nn.Sequential()
    model.add_module("blocks", torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH)
                                                     for _ in range(2))))
    model.add_module("head", torch.nn.Linear(WIDTH, 1))
    groups = {"blocks.0": model.blocks[0], "blocks.1": model.blocks[1], "head": model.head}
    batches = [Rows(100)[0, micro] for micro in range(2)]
    x, y = (torch.cat([batch[name] for batch in batches]) for name in ("x", "y"))
    (model(x)[:, 0] - y).square().mean().backward()

    def norms(kind, tensor_of):
        return {f"{kind}/{name}": math.hypot(*(float(tensor_of(p).norm())
                                               for p in part.parameters()))
                for name, part in groups.items()}

    expected = norms("gradients", lambda p: p.grad)
    model.zero_grad()
    meter = StepMeter(Ddp(), layers=("gradients", "weights"), log_freq=1)
    for _ in steps(toy(model=model, meter=meter, grad_clip=0.25, lr=0.1), 1, scale=100):
        found = meter.report()
    expected |= norms("weights", lambda p: p.detach())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_mfu_is_the_work_of_this_rank_by_its_time_and_the_peak():
    """Three steps of two micro-batches, 5 FLOP for each of their rows, at a peak of 1,000 FLOP/s"""
    meter = StepMeter(Ddp())
    meter.count_flops(lambda batch: 5.0 * len(batch["y"]), 1000.0)
    run = toy(meter=meter)
    rows = 0
    for step, _ in enumerate(steps(run, 3)):
        rows += sum(len(Rows()[step, micro]["y"]) for micro in range(2))
    found = meter.report()
    assert found["mfu"] == pytest.approx(5 * rows / (3 * found["time/step"]) / 1000)


def measured(ddp):
    """[weights and norms of a run, those of one that is measured, what was measured]. Rank 1 takes
    at a time 200 MB more."""
    torch.ones(50_000_000 if ddp.rank == 1 else 1)
    results = []
    for layers in ((), ("gradients", "weights")):
        run = toy(ddp=ddp, micro_batches=4, optimizer="adamw", lr=0.01,
                  meter=StepMeter(ddp, layers=layers))
        norms = [norm for _, norm, _ in steps(run, 8, ddp=ddp)]
        results.append([norms, *(p.tolist() for p in run.bare.parameters())])
    return [*results, run.meter.report()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_ranks(2, "test_meter", "measured(ddp)", tmp_path_factory.mktemp("two"))


def test_measuring_changes_no_bit(two_ranks):
    plain, timed, _ = two_ranks
    assert plain == timed


def test_the_rank_with_the_most_memory_is_named(two_ranks):
    values = two_ranks[-1]
    assert values["memory/most_host"] == socket.gethostname()
    assert 0.1 < values["memory/peak_gb_most"] - values["memory/peak_gb_least"] < 1


def test_the_share_of_communication_is_told_of_several_ranks(two_ranks):
    """Four numbers take less than a step."""
    assert 0 < two_ranks[-1]["time/exchange"] < 1


def test_the_share_is_that_of_a_step():
    meter = StepMeter(Ddp())
    meter.exchange = 2.0
    list(steps(toy(meter=meter), 3))
    values = meter.report()
    assert values["time/exchange"] == pytest.approx(2.0 / values["time/step"])


def test_one_rank_has_no_share_of_communication():
    meter = StepMeter(Ddp())
    list(steps(toy(meter=meter), 1))
    assert "time/exchange" not in meter.report()
