"""The plan of an epoch of pairs, their decoding orders, and batches of complexes."""
import numpy as np
import pytest
import torch

from dpo.pair_batches import decoding_orders, make_batch, shared_context
from dpo.pairs import Pair
from dpo.plan import Plan, plan_epoch
from dpo_cases import small_pairs
from mpnn.batches import collate_complexes
from mpnn_cases import keys, made
from proteins.letters import encode
from proteins.structures import Complex, read_structure
from train_dpo_ddp import Loss

# 234 pairs on 60 structures of 40 to 335 rows
MIXED = [pair for i in range(60) for pair in made(40 + 5 * (7 * i % 60), 1 + i % 7, i)]


@pytest.mark.parametrize("n_micro, batch_size", [
    (1, 8), (12, 2), (3, 50), (len(MIXED), 1), (100, 2), (100, 1)])
def test_every_pair_comes_once_an_epoch_in_micro_batches_of_equal_size(n_micro, batch_size):
    plan = plan_epoch(MIXED, 0, 0, n_micro, batch_size)
    n = len(MIXED)
    pieces = sum(plan, [])
    sizes = [len(piece) for piece in pieces]
    indices = np.concatenate(pieces)
    assert len(np.unique(indices)) == len(indices)
    assert len(indices) == (n if batch_size > 1 else n // n_micro * n_micro)
    assert 1 <= min(sizes) and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert all(len(step) == n_micro for step in plan)


def pieces_of(seed=0, epoch=0):
    """The micro-batches of a plan of MIXED, as tuples."""
    return [tuple(piece) for piece in sum(plan_epoch(MIXED, seed, epoch, 4, 4), [])]


def test_the_plan_follows_from_seed_with_epoch():
    first = pieces_of()
    assert pieces_of() == first
    assert len({str(first), str(pieces_of(epoch=1)), str(pieces_of(seed=1))}) == 3


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}])
def test_pairs_are_in_other_company_in_another_epoch_or_by_another_seed(other):
    company = [{frozenset(piece) for piece in pieces_of(**how)} for how in ({}, other)]
    assert len(company[0] & company[1]) < len(company[0]) / 4


def test_a_plan_that_is_asked_for_again_is_that_of_its_epoch():
    plan = Plan(MIXED, 0, 12, 2)
    items = [plan.item_of(step, 0) for step in (0, plan.steps_per_epoch, 0)]
    assert items[0] == items[2] and items[0][-1] != items[1][-1]


def test_other_pairs_are_left_out_in_another_epoch():
    taken = [set(np.concatenate(sum(plan_epoch(MIXED, 0, epoch, 100, 1), [])))
             for epoch in range(2)]
    assert taken[0] != taken[1]


def test_ranks_get_equal_work_with_little_padding():
    lengths = np.array([len(pair.complex) for pair in MIXED])
    plan = plan_epoch(MIXED, 0, 0, 4, 4)
    work = np.array([[lengths[piece].max() * len(piece) for piece in step] for step in plan])
    assert lengths.sum() / work.sum() > 0.95
    assert work.mean() / work.max(1).mean() > 0.85


def test_pairs_of_a_structure_stay_together_in_a_plan():
    pieces = pieces_of()
    encoded = sum(len(keys(MIXED[i] for i in piece)) for piece in pieces)
    assert encoded <= len(keys(MIXED)) + len(pieces)


def test_short_and_long_structures_come_in_random_order():
    longest = [max(len(MIXED[i].complex) for piece in step for i in piece)
               for step in plan_epoch(MIXED, 0, 0, 4, 4)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


# ---- batches and orders ----

def test_orders_put_fixed_residues_first_and_are_keyed_by_seed_pair_and_epoch():
    pairs = small_pairs()
    for pair in pairs:
        n = len(pair.chain_M)
        L = len(pair.complex)
        designed = np.zeros(L, bool)
        designed[:n] = pair.chain_M & pair.complex.mask[:n]
        for order in decoding_orders(pair, Loss(n_orders=3), 0, 0).tolist():
            assert sorted(order) == list(range(L)) and not designed[order[:-designed.sum()]].any()
        arange = decoding_orders(pair, Loss(order="arange"), 0, 5)
        assert arange.tolist() == [np.argsort(designed, kind="stable").tolist()]

    def get(pair=pairs[0], seed=0, epoch=0, **more):
        return decoding_orders(pair, Loss(**more), seed, epoch).tolist()

    assert get() == get() and len({str(order) for order in get(n_orders=4)}) == 4
    assert get() != get(epoch=1) and get() != get(seed=1) and get() != get(pair=pairs[2])
    assert get(order="fixed") == get(order="fixed", epoch=1) != get(order="fixed", seed=1)
    assert decoding_orders(pairs[0], Loss(), 0).tolist() == get(order="fixed")   # in evaluations
    shared = [get(pair=pair, share_order=True) for pair in pairs[:3]]
    assert shared[0] == shared[2] != shared[1]   # the second has other designed positions


def test_native_sequences_are_decoded_in_orders_of_all_residues_that_are_new_in_each_epoch():
    pairs = small_pairs()
    loss = Loss(native_kl=1)
    first, again, second = (make_batch(pairs, [0, 16], loss, 0, epoch)["native_order"].tolist()
                            for epoch in (0, 0, 1))
    assert first == again != second
    assert all(sorted(order) == list(range(len(order))) for order in first)
    lengths = [len(pairs[i].complex) for i in (0, 16)]
    assert all(sorted(order[:length]) == list(range(length))     # padding comes last
               for order, length in zip(first, lengths))


def few_and_all_designed():
    """Four pairs on one structure of 40 rows: two with row 5 designed, one with rows 5 and 20, one
    with all."""
    native, *_ = made(40, 1, 0)
    pairs = []
    for rows in ([5], [5], [5, 20], range(40)):
        designed = np.zeros(40, bool)
        designed[list(rows)] = True
        letters = np.random.default_rng(len(pairs)).integers(0, 20, (2, 40))
        chosen, rejected = np.where(designed, letters, native.complex.S).astype(np.uint8)
        pairs.append(Pair(native.complex, chosen, rejected, designed))
    return pairs


@pytest.mark.parametrize("share_order, contexts", [(False, 3), (True, 2)])
def test_sequences_of_one_context_share_it(share_order, contexts):
    batch = make_batch(few_and_all_designed(), [0, 1, 2], Loss(share_order=share_order), 0, 0)
    assert len(batch["sequence"]) == contexts
    chosen, rejected = batch["sequence_rows"][:, 0].T
    assert torch.equal(batch["context_row"][chosen], batch["context_row"][rejected])


def test_equal_letters_on_another_structure_are_another_context():
    few = []
    for number in range(2):
        native, *_ = made(40, 1, number)    # all letters are equal
        designed = np.arange(40) == 5
        few.append(Pair(native.complex, native.complex.S, (native.complex.S + designed), designed))
    batch = make_batch(few, [0, 1], Loss(order="arange"), 0, 0)
    assert len(batch["sequence"]) == 2


def test_only_pairs_with_the_same_designed_positions_share_orders():
    pairs = few_and_all_designed()
    first, second, other = [decoding_orders(pair, Loss(share_order=True), 0, 0)[0].tolist()
                            for pair in pairs[:3]]
    assert first == second
    assert [i for i in first if i not in (5, 20)] != [i for i in other if i not in (5, 20)]


def test_sequences_of_a_context_have_its_letters_outside_of_their_designed_residues():
    batch = make_batch(few_and_all_designed(), [0, 1, 2], Loss(), 0, 0)
    for row, number in enumerate(batch["context_row"]):
        differs = batch["S"][row] != batch["S"][batch["sequence"][number]]
        assert not differs[~batch["designed"][row]].any()


def test_a_batch_in_which_much_is_designed_shares_no_context():
    assert shared_context(make_batch(few_and_all_designed(), [2, 3], Loss(), 0, 0)) is None


def test_a_batch_of_complexes_is_padded_to_the_longest(small):
    structure = read_structure(small / "small.pdb")
    batch = collate_complexes([Complex(structure, ["A"]), Complex(structure, ["B"], ["A"])])
    assert batch["X"].shape == (2, 9, 4, 3) and not batch["X"][0, [3, 7, 8]].any()
    assert batch["S"][1].tolist() == encode("GWMKXXVLA").tolist()
    assert batch["residue_idx"][0].tolist() == [*range(7), -100, -100]
    assert not batch["chain_id"][0, 7:].any() and not batch["mask"][0, 7:].any()
