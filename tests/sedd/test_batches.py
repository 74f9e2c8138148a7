"""The batch plan of training and its reader, batches for evaluation."""

import itertools
import re

import numpy as np
import pytest
import torch

from proteins.sequences import Proteins, read_sequences
from sedd import batches as module
from sedd.batches import BatchPlan, BatchReader, batches_within, sum_rows, to_device

BUDGETS = pytest.mark.parametrize("budget", [dict(tokens=4096), dict(batch_size=12)])


def random_lengths(n, top=512, seed=0):
    draws = np.random.default_rng(seed).normal(5.3, 0.85, n)     # as UniRef50: median 200, mean 286
    return np.clip(np.exp(draws), 11, top).astype(np.int64)


@pytest.fixture(scope="module")
def real(shared):
    return read_sequences(shared / "data" / "proteins.fasta.gz")[0]


def plan_of(proteins, max_length=512, micro_batches=4, **settings):
    """A BatchReader of these proteins, or of proteins of these lengths."""
    if not isinstance(proteins, Proteins):
        lengths = np.asarray(proteins, np.int64)
        tokens = np.random.default_rng(1).integers(0, 20, lengths.sum()).astype(np.uint8)
        keys = np.arange(len(lengths), dtype=np.uint64)
        proteins = Proteins(tokens, np.cumsum(lengths) - lengths, lengths, keys)
    plan = BatchPlan(proteins.length_counts(), max_length, micro_batches, **settings)
    return BatchReader(plan, proteins, sum_rows(proteins, plan))


def steps_of(reader, epoch=0):
    """The micro-batches of each step of an epoch: lists of (keys, cropped lengths, width)."""
    plan = reader.plan
    out = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        batches = [reader.micro_batch(step, lane) for lane in range(plan.micro_batches)]
        out.append([(p.keys, p.lengths.clip(max=plan.max_length), width) for p, width in batches])
    return out


def keys_of(reader, epoch=0):
    """The keys of each micro-batch of an epoch."""
    return [keys for step in steps_of(reader, epoch) for keys, _, _ in step]


def work_of(batch, hidden_size=768):
    """Operations of a batch in a layer, up to a factor: 24 h^2 for a position, 4 h for a pair."""
    keys, _, width = batch
    return len(keys) * (width * 24 * hidden_size**2 + width**2 * 4 * hidden_size)


@BUDGETS
@pytest.mark.parametrize("micro_batches, in_windows", [(1, 0), (2, 0), (5, 0), (8, 0), (2, 1)])
def test_an_epoch_takes_no_protein_twice_and_leaves_out_few(
        budget, micro_batches, in_windows, monkeypatch):
    if in_windows:
        for name, least in {"WINDOW_BYTES": 0, "READ_BYTES": 0, "WINDOW_STEPS": 20}.items():
            monkeypatch.setattr(module, name, least)
    reader = plan_of(random_lengths(3001), 2000, micro_batches, **budget)
    windows = reader.plan.windows
    assert (windows > 3) == in_windows and reader.plan.window_steps >= 20
    steps = steps_of(reader, epoch=2)
    assert all(len(step) == micro_batches for step in steps)
    seen = np.concatenate([keys for step in steps for keys, _, _ in step])
    assert len(np.unique(seen)) == len(seen) > 3001 - 12 * 2 * micro_batches * windows
    for _, lengths, width in (batch for step in steps for batch in step):
        assert 1 < lengths.max() <= width <= 2000           # 1: nothing was left for a lane


@pytest.mark.parametrize("max_length, unit, asked", [
    (512, "tokens", 4096), (1024, "tokens", 32768), (1024, "tokens", 8192),
    (512, "batch_size", 16), (1024, "batch_size", 16)])
def test_batches_of_real_proteins_have_the_size_asked_for_and_hardly_pad_or_wait(
        real, max_length, unit, asked):
    steps = steps_of(plan_of(real, max_length, **{unit: asked}))
    sizes, widths, residues = np.transpose([(len(keys), width, lengths.sum())
                                            for step in steps for keys, lengths, width in step])
    positions = sizes * widths
    assert 1 - residues.sum() / positions.sum() < 0.05              # padding
    assert np.mean(positions if unit == "tokens" else sizes) == pytest.approx(asked, rel=0.04)
    # Attention makes long proteins dearer, so short ones get more positions, but not many more.
    assert max(positions) < 1.35 * np.mean(positions)
    work = np.array([[work_of(batch) for batch in step] for step in steps])
    waits = work.max(1) / work.mean(1) - 1                          # for the slowest of a step
    assert np.median(waits) < 0.03 and np.percentile(waits, 90) < 0.06


@BUDGETS
def test_each_step_has_long_proteins_in_some_lanes_beside_short_ones_in_others(budget):
    steps = steps_of(plan_of(random_lengths(2000), **budget))
    widths = np.array([[width for _, _, width in step] for step in steps])
    assert (widths.max(1) / widths.min(1)).min() > 1.5


@pytest.mark.parametrize("unit, asked", [("tokens", 1950), ("batch_size", 4)])
def test_a_batch_that_most_lengths_would_not_fill_is_a_little_larger_or_smaller(unit, asked):
    reader = plan_of(random_lengths(3001), **{unit: asked})
    assert reader.plan.warning() == []
    mean = float(re.search(r"has ([\d.,]+)", reader.plan.describe())[1].replace(",", ""))
    batches = [batch for step in steps_of(reader) for batch in step]
    sizes = [len(keys) * (width if unit == "tokens" else 1) for keys, _, width in batches]
    assert np.mean(sizes) == pytest.approx(mean, rel=0.02)
    assert 0.02 < abs(mean / asked - 1) <= 0.1
    work = [work_of(batch) for batch in batches]
    assert np.mean(work) > 0.95 * max(work)


@pytest.mark.parametrize("unit, asked", [("tokens", 1200), ("batch_size", 3)])
def test_where_some_lengths_do_not_fill_a_batch_a_warning_says_so(unit, asked):
    lengths = random_lengths(3001)
    _, advice = plan_of(lengths, **{unit: asked}).plan.warning()
    assert f"a larger training.{unit.replace('tokens', 'tokens_per_batch')}" in advice
    assert plan_of(lengths, **{unit: 10 * asked}).plan.warning() == []


def test_few_steps_per_epoch_come_with_a_warning():
    plan = plan_of(random_lengths(3001)[:60], tokens=1200).plan
    assert "may be smaller" in plan.warning()[0]


def test_the_warning_tells_that_most_proteins_are_cropped():
    assert plan_of([50] * 16, 100, 2, batch_size=1).plan.warning() == []   # all full
    cropped, = plan_of([50] * 16, 40, 2, batch_size=1).plan.warning()
    assert "100% of the proteins are longer than data.max_length, 40" in cropped


def test_a_warning_of_cropped_proteins_says_what_to_set_and_what_it_costs():
    """The work of a protein is length x (6 x 100 + length); 95 of 100 have 90 residues or less."""
    lengths = [30] * 30 + [80] * 30 + [90] * 35 + [500] * 5
    plan = plan_of(lengths, 40, 1, batch_size=10, hidden_size=100).plan
    now = 30 * 30 * 630 + 70 * 40 * 640
    then = 30 * 30 * 630 + 30 * 80 * 680 + 40 * 90 * 690
    warning = plan.warning()[-1]
    assert "data.max_length=90 keeps 90% whole" in warning
    assert f"{then / now:.1f} times the work" in warning


@BUDGETS
def test_the_plan_is_a_function_of_seed_and_epoch_and_any_step_is_reached_directly(budget):
    readers = [plan_of(random_lengths(2000), 2000, 4, seed=seed, **budget) for seed in (0, 0, 1)]
    first, second, other = ([keys.tolist() for keys in keys_of(readers[k], epoch)]
                            for k, epoch in ((0, 0), (0, 1), (2, 0)))
    assert first != second and first != other and len(first) == len(second)
    company, later = ({pair for keys in batches for pair in itertools.combinations(sorted(keys), 2)}
                      for batches in (first, second))
    assert len(company & later) < len(company) / 2      # all, if only the order of batches changed
    for at in range(2 * len(first) - 1, -1, -7):                        # backwards, over two epochs
        proteins, _ = readers[1].micro_batch(*divmod(at, 4))
        assert proteins.keys.tolist() == (first + second)[at]


@pytest.mark.parametrize("field", ["work", "windows", "window_steps", "tops", "sizes"])
def test_a_plan_of_other_micro_batches_has_another_identity(field):
    plan = plan_of([30, 40] * 20, batch_size=2).plan
    before = plan.identity()
    setattr(plan, field, getattr(plan, field) + 1)
    assert plan.identity() != before


@pytest.mark.parametrize("others", [[50, 50, 90], [40, 60, 91], [40, 60, 80]])
def test_lengths_for_which_the_plan_was_not_made_are_refused(others):
    """Of as many residues, of as much work (all above 64 are cropped), of neither."""
    reader = plan_of([40, 60, 90], 64, 1, batch_size=1)
    damaged = Proteins.from_sequences(["A" * length for length in others])
    with pytest.raises(OSError, match="lengths.bin"):
        sum_rows(damaged, reader.plan)


FEW, MANY = (random_lengths(n) for n in (150, 400))     # none is left out; some are


@pytest.mark.parametrize("choice", [
    lambda plan, epoch: [plan.turn(epoch * plan.steps_per_epoch + step, 0) for step in range(9)],
    lambda plan, epoch: np.diff([plan.unit(epoch, 0, k)[0] for k in range(8)]) % plan.work_in_set,
    lambda plan, epoch: sorted(plan.unit(epoch, 0, lane)[0] for lane in range(8)),
    lambda plan, epoch: [indices.tolist() for indices, _ in plan.cut(FEW, epoch)],
    lambda plan, epoch: [width for _, width in plan.cut(MANY, epoch)]],
    ids=["turns", "which unit a lane has", "ends of units", "company in a batch", "left out"])
def test_every_random_choice_follows_from_seed_and_epoch(choice):
    plans = [plan_of(random_lengths(2000), 512, 8, batch_size=12, seed=k).plan for k in (0, 0, 1)]
    first, again, with_another_seed = (list(choice(plan, 0)) for plan in plans)
    assert first == again
    assert first != with_another_seed and first != list(choice(plans[0], 1))


def test_long_proteins_are_left_out_of_the_plan_if_they_are_to_be_dropped():
    lengths = random_lengths(2000)
    reader = plan_of(lengths, 300, 2, tokens=4096, long="drop")
    assert reader.plan.proteins == (lengths <= 300).sum()
    assert reader.plan.n_long == (lengths > 300).sum()
    seen = np.concatenate(keys_of(reader)).astype(int)
    assert lengths[seen].max() <= 300 and len(seen) > 0.97 * reader.plan.proteins


def test_a_budget_below_the_longest_protein_is_refused():
    with pytest.raises(ValueError, match="tokens_per_batch 800 .* 900"):
        plan_of([20] * 500 + [900], 1000, 1, tokens=800)


def test_too_few_proteins_are_refused():
    lengths = random_lengths(100)
    with pytest.raises(ValueError, match="100 .* 6 .* 16 .* 8.* training.batch_size"):
        plan_of(lengths, 2000, 8, batch_size=16)
    assert plan_of(lengths, 2000, 6, batch_size=16).plan.steps_per_epoch == 1
    assert plan_of(lengths, 2000, 8, batch_size=11).plan.steps_per_epoch == 1
    with pytest.raises(ValueError, match="4.* training.batch_size"):
        plan_of([5, 6, 7], 50, 4, batch_size=4)


def test_few_proteins_fill_every_lane_and_step():
    for lengths, micro_batches, size, n_steps in (([5, 6, 7, 9], 2, 2, 1), ([30] * 60, 1, 1, 60)):
        steps = steps_of(plan_of(lengths, 50, micro_batches, batch_size=size))
        assert len(steps) == n_steps and all(len(step) == micro_batches for step in steps)
        assert all(width > 1 for step in steps for _, _, width in step)     # 1: nothing was left


@pytest.mark.parametrize("tokens", [512, 2048, 10**7])
def test_evaluation_takes_each_protein_once_within_the_budget_and_hardly_pads(real, tokens):
    lengths = np.minimum(real.lengths[:2000], 512)
    batches = batches_within(lengths, tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(2000))
    computed = [len(batch) * int(lengths[batch].max()) for batch in batches]
    assert max(computed) <= tokens
    assert tokens == 10**7 or 1 - lengths.sum() / sum(computed) < 0.02


@pytest.mark.parametrize("dtype, expected", [
    (torch.float64, torch.float64), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32)])
def test_noise_levels_have_the_dtype_of_the_model_but_no_less_than_32_bits(dtype, expected):
    levels = torch.tensor([0.1], dtype=torch.float64)
    moved = to_device({"sigma": levels, "dsigma": levels}, torch.device("cpu"), dtype)
    assert moved["sigma"].dtype == moved["dsigma"].dtype == expected


def test_tokens_stay_integers_on_the_way_to_the_device():
    batch = {"x0": torch.tensor([[19]]), "sigma": torch.ones(1), "dsigma": torch.ones(1)}
    moved = to_device(batch, torch.device("cpu"), torch.bfloat16)
    assert moved["x0"].dtype == torch.int64
