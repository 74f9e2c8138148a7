"""The plan of an epoch of pairs, and batches of complexes."""
import numpy as np
import pytest

from mpnn.batches import collate_complexes, plan_epoch
from mpnn.structures import Complex, read_structure
from mpnn_cases import keys, made
from sedd.sequences import encode


# 234 pairs on 60 structures of 40 to 335 rows
MIXED = [pair for i in range(60) for pair in made(40 + 5 * (7 * i % 60), 1 + i % 7, i)]


@pytest.mark.parametrize("n_micro, batch_size", [
    (1, 8), (12, 2), (3, 50), (len(MIXED), 1), (100, 2), (100, 1)])
def test_every_pair_comes_once_an_epoch_in_micro_batches_of_equal_size(n_micro, batch_size):
    plan, n = plan_epoch(MIXED, 0, 0, n_micro, batch_size), len(MIXED)
    pieces = sum(plan, [])
    sizes, indices = [len(piece) for piece in pieces], np.concatenate(pieces)
    assert len(np.unique(indices)) == len(indices)
    assert len(indices) == (n if batch_size > 1 else n // n_micro * n_micro)
    assert 1 <= min(sizes) and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert all(len(step) == n_micro for step in plan)


def test_the_plan_follows_from_seed_and_epoch_and_gives_ranks_equal_work_with_little_padding():
    plans = [plan_epoch(MIXED, seed, epoch, 4, 4)
             for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    pieces = [[tuple(piece) for piece in sum(plan, [])] for plan in plans]
    assert pieces[0] == pieces[1] and len({str(piece) for piece in pieces}) == 3
    company = [{frozenset(piece) for piece in of_plan} for of_plan in pieces]
    assert len(company[0] & company[2]) < len(company[0]) / 4
    taken = [set(np.concatenate(sum(plan_epoch(MIXED, 0, epoch, 100, 1), [])))
             for epoch in range(2)]
    assert taken[0] != taken[1]         # nor does it leave the same pairs out
    lengths = np.array([len(pair.complex) for pair in MIXED])
    work = np.array([[lengths[piece].max() * len(piece) for piece in step] for step in plans[0]])
    assert lengths.sum() / work.sum() > 0.95
    assert work.mean() / work.max(1).mean() > 0.85
    encoded = sum(len(keys(MIXED[i] for i in piece)) for piece in pieces[0])
    assert encoded <= len(keys(MIXED)) + len(pieces[0])     # structures stay together


def test_a_batch_of_complexes_is_padded_to_the_longest(small):
    structure = read_structure(small / "small.pdb")
    batch = collate_complexes([Complex(structure, ["A"]), Complex(structure, ["B"], ["A"])])
    assert batch["X"].shape == (2, 9, 4, 3) and not batch["X"][0, [3, 7, 8]].any()
    assert batch["S"][1].tolist() == encode("GWMKXXVLA").tolist()
    assert batch["residue_idx"][0].tolist() == [*range(7), -100, -100]
    assert not batch["chain_id"][0, 7:].any() and not batch["mask"][0, 7:].any()
