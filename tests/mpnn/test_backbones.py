"""mpnn/backbones.py: which chains are designed, which structures are in which step, tensors."""
import collections
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch

from mpnn.backbones import (
    Draws,
    Plan,
    evaluation_batches,
    make_batch,
    training_items,
    validation_items,
)
from mpnn.batches import collate_complexes
from mpnn_cases import Atoms, write
from proteins.letters import AMINO_ACIDS
from proteins.structure_sets import Reading, load_cache, make_cache
from proteins.structures import Complex, read_structure
from training.loop import MicroBatchSampler

A, B, C = ("".join(np.random.default_rng(seed).choice(list(AMINO_ACIDS), length))
           for seed, length in ((0, 24), (1, 30), (2, 21)))
# A homodimer A, C with B beside it, of which residue 3 is not known and 5 has no O; a monomer; and
# one with a gap.
THREE = {"a.pdb": {"A": A, "B": B[:2] + "X" + B[3:], "C": A}, "b.pdb": {"A": B}, "c.pdb": {"A": C}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structures")
    for name, chains in THREE.items():
        atoms = Atoms()
        for chain, letters in chains.items():
            residues = gemmi.expand_one_letter_sequence(letters, gemmi.ResidueKind.AA)
            for number, residue in enumerate(residues, 1):
                has_O = (chain, number) != ("B", 5)
                atoms.add(chain, number if name != "c.pdb" or number < 9 else number + 2, residue,
                          ["N", "CA", "C", "O"][:4 if has_O else 3])
        write(folder, atoms.pdb(), name)
    return folder


@pytest.fixture(scope="module")
def structures(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "cache.pt"
    make_cache(cache, {"train": folder}, Reading())
    return load_cache(cache)["train"]


@pytest.fixture
def items(structures):
    return training_items(structures, np.arange(len(structures)))


def of_lengths(lengths):
    return [SimpleNamespace(length=length) for length in lengths]


def drawn_lengths(n, longest, seed=0):
    return np.exp(np.random.default_rng(seed).uniform(np.log(20), np.log(longest), n)).astype(int)


# ---- the plan ----

PLANS = [(drawn_lengths(200, 1500), 4), (drawn_lengths(200, 1500), 1), (drawn_lengths(57, 300), 8),
         ([100] * 8, 8), ([100] * 9, 8), (drawn_lengths(40, 6000), 3), ([30] * 500 + [2400] * 2, 4)]


@pytest.mark.parametrize("lengths, micro_batches", PLANS)
def test_each_structure_comes_once_an_epoch_in_steps_of_whole_micro_batches(lengths, micro_batches):
    plan = Plan(of_lengths(lengths), 0, micro_batches, 2500)
    assert plan.left_out == 0
    for epoch in range(4):
        steps = plan.plan_of(epoch)
        assert len(steps) == plan.steps_per_epoch
        assert {len(step) for step in steps} == {micro_batches}
        assert all(len(indices) for step in steps for indices in step)
        indices = np.concatenate([indices for step in steps for indices in step])
        assert sorted(indices.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("lengths, micro_batches", PLANS)
def test_a_micro_batch_fits_with_its_padding_or_holds_one_structure(lengths, micro_batches):
    lengths = np.array(lengths)
    plan = Plan(of_lengths(lengths), 0, micro_batches, 2500)
    for epoch in range(4):
        for indices in (indices for step in plan.plan_of(epoch) for indices in step):
            assert len(indices) == 1 or len(indices) * lengths[indices].max() <= 2500


def test_micro_batches_are_well_filled():
    lengths = drawn_lengths(2000, 1000)
    plan = Plan(of_lengths(lengths), 0, 4, 2500)
    pieces = [indices for step in plan.plan_of(0) for indices in step]
    padded = [len(indices) * lengths[indices].max() for indices in pieces]
    assert lengths.sum() > 0.95 * sum(padded)
    assert np.mean(padded) > 0.85 * 2500
    assert plan.residues == pytest.approx(lengths.sum() / plan.steps_per_epoch)


def test_a_step_has_structures_of_like_length():
    lengths = drawn_lengths(400, 1000)
    plan = Plan(of_lengths(lengths), 0, 4, 2500)
    ranges = sorted((min(lengths[np.concatenate(step)]), max(lengths[np.concatenate(step)]))
                    for step in plan.plan_of(0))
    for (_, longest), (shortest, _) in zip(ranges, ranges[1:]):
        assert longest < 1.25 * shortest


def test_long_structures_that_fill_no_step_are_left_out_at_random():
    plan = Plan(of_lengths(range(1300, 2500, 120)), 0, 4, 2500)
    assert plan.left_out == 2 and plan.steps_per_epoch == 2
    times_used = np.zeros(10, int)
    for epoch in range(20):
        indices = np.concatenate([indices for step in plan.plan_of(epoch) for indices in step])
        assert len(set(indices.tolist())) == 8
        times_used[indices] += 1
    assert 8 < times_used.min() and times_used.max() < 20


def test_fewer_structures_than_micro_batches_are_refused():
    with pytest.raises(ValueError, match="3 .* 4 "):
        Plan(of_lengths([100] * 3), 0, 4, 2500)


def test_a_plan_is_another_in_each_epoch_and_the_same_after_a_restart():
    lengths = of_lengths(drawn_lengths(50, 500))
    plan = Plan(lengths, 0, 2, 2500)
    last = 3 * plan.steps_per_epoch
    items = [str(plan.item_of(step, micro)) for step in range(last) for micro in range(2)]
    again = Plan(lengths, 0, 2, 2500)
    assert str(again.item_of(last - 1, 1)) == items[-1]
    epochs = {str(plan.plan_of(epoch)) for epoch in range(3)}
    assert len(epochs) == 3
    assert str(Plan(lengths, 1, 2, 2500).plan_of(0)) not in epochs


def test_the_number_of_ranks_changes_no_micro_batch():
    plan = Plan(of_lengths(drawn_lengths(60, 500)), 0, 4, 2500)
    expected = None
    for n_ranks in (1, 2, 3, 4):
        found = set()
        for rank in range(n_ranks):
            ddp = SimpleNamespace(rank=rank, world_size=n_ranks)
            found |= {str(item) for item in MicroBatchSampler(plan.item_of, 4, ddp, 0, 7)}
        assert len(found) == 28
        expected = expected or found
        assert found == expected


def test_evaluation_takes_each_item_once_within_the_limit():
    lengths = np.append(drawn_lengths(100, 1000), 4000)
    batches = evaluation_batches(of_lengths(lengths), 2500)
    assert sorted(np.concatenate(batches).tolist()) == list(range(101))
    assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= 2500 for batch in batches)


# ---- tensors ----

def designed_chains(structures, item, epoch, seed=0):
    """Names of the chains that are designed."""
    batch = make_batch(structures, [item], Draws(seed, epoch))
    chains = structures.structure(item.number).chains
    n_designed = int(batch["chain_M"].sum())
    return [group for group in item.groups
            if sum(len(chains[name].S) for name in group) == n_designed]


def test_each_epoch_designs_one_group_of_chains_drawn_anew(structures, items):
    drawn = collections.Counter()
    for epoch in range(40):
        group, = designed_chains(structures, items[0], epoch)
        drawn[group] += 1
    assert set(drawn) == {("A", "C"), ("B",)} and min(drawn.values()) > 8


def test_rows_are_those_of_a_complex_with_the_designed_chains_first(folder, structures, items):
    parsed = read_structure(folder / "a.pdb")
    for epoch in range(4):
        group, = designed_chains(structures, items[0], epoch)
        others = sorted(set(parsed.chains) - set(group))
        whole = Complex(parsed, group, others)
        batch = make_batch(structures, items[:1], Draws(0, epoch))
        for name, expected in collate_complexes([whole]).items():
            assert torch.equal(batch[name], expected)
        assert batch["chain_M"][0].sum() == whole.n_designed
        assert batch["chain_M"][0, :whole.n_designed].all()


def test_only_resolved_designed_residues_of_a_known_letter_count(structures, items):
    epoch = next(epoch for epoch in range(40)
                 if designed_chains(structures, items[0], epoch) == [("B",)])
    counted = make_batch(structures, items[:1], Draws(0, epoch))["counted"][0]
    expected = [row < len(B) and row + 1 not in (3, 5) for row in range(len(counted))]
    assert counted.bool().tolist() == expected


@pytest.mark.parametrize("epoch", [None, 0, 1])
def test_what_is_not_designed_is_decoded_first_and_padding_last(structures, items, epoch):
    batch = make_batch(structures, items, Draws(0, epoch))
    L = batch["S"].shape[1]
    for row, item in enumerate(items):
        order = batch["order"][row]
        assert sorted(order.tolist()) == list(range(L))
        assert order[item.length:].tolist() == list(range(item.length, L))
        designed = (batch["chain_M"] * batch["mask"])[row, order[:item.length]]
        assert torch.equal(designed, designed.sort().values)


def test_orders_are_drawn_anew_in_each_epoch(structures, items):
    orders = {str(make_batch(structures, items[1:2], Draws(0, epoch))["order"].tolist())
              for epoch in (None, 0, 1, 2)}
    assert len(orders) == 4


@pytest.mark.parametrize("name", ["X", "S", "mask", "residue_idx", "chain_id", "chain_M", "counted",
                                  "order"])
def test_the_other_structures_of_a_batch_change_nothing(structures, items, name):
    draws = Draws(seed=3, epoch=5, noise=0.2)
    together = make_batch(structures, items, draws)[name]
    for row, item in enumerate(items):
        alone = make_batch(structures, [item], draws)[name][0]
        assert torch.equal(together[row, :item.length], alone)


def test_noise_moves_the_atoms_that_are_there(structures, items):
    still = make_batch(structures, items[:1], Draws(0, 1))["X"]
    moved = make_batch(structures, items[:1], Draws(0, 1, noise=0.3))["X"]
    is_there = (still != 0).any(-1)
    assert (~is_there).sum() == 1       # the O that the file lacks
    steps = (moved - still)[is_there]
    assert not (moved - still)[~is_there].any()
    assert steps.std().item() == pytest.approx(0.3, rel=0.1)
    assert abs(steps.mean().item()) < 5 * 0.3 / steps.numel() ** 0.5


@pytest.mark.parametrize("other", [Draws(0, 2, 0.3), Draws(1, 1, 0.3)])
def test_noise_is_another_in_each_epoch_and_for_each_seed(structures, items, other):
    X = make_batch(structures, items[1:2], Draws(0, 1, 0.3))["X"]
    assert torch.equal(X, make_batch(structures, items[1:2], Draws(0, 1, 0.3))["X"])
    assert not torch.equal(X, make_batch(structures, items[1:2], other)["X"])


def test_structures_have_noise_of_their_own(structures, items):
    still = make_batch(structures, items, Draws(0, 1))["X"]
    moves = make_batch(structures, items, Draws(0, 1, 0.3))["X"] - still
    assert not torch.allclose(moves[0, :10], moves[1, :10], atol=1e-3)


def test_validation_designs_each_group_of_chains_once(structures):
    items = validation_items(structures, np.arange(len(structures)))
    found = [(item.number, group) for item in items for group in item.groups]
    assert found == [(0, ("A", "C")), (0, ("B",)), (1, ("A",)), (2, ("A",))]
    batch = make_batch(structures, items)
    assert batch["chain_M"].sum(1).tolist() == [48, 30, 30, 23]     # with the gap of the last
    for name, tensor in make_batch(structures, items).items():
        assert torch.equal(tensor, batch[name])
