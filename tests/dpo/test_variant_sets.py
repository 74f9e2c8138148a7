"""dpo/variant_sets.py: which variants a step takes of a protein, and which pairs of these."""
import numpy as np
import pytest

from dpo.variant_sets import VariantSet, draw_pairs, draw_variants, make_batch
from mpnn_cases import random_complex
from train_dpo_ddp import Config, Loss, Table


def made_set(variants, wild_type=0.0):
    values = np.random.default_rng(len(variants)).normal(size=len(variants) + 1)
    values[-1] = wild_type
    return VariantSet("made", random_complex(30), variants, values)


def singles(n=40):
    return made_set([[(row, letter)] for row in range(30) for letter in range(20)][:n])


def doubles(n, n_singles=0):
    """Of n different double mutations, after n_singles single ones."""
    both = [[(row, 1), (other, 2)] for row in range(30) for other in range(row)]
    return made_set([[(row, 3)] for row in range(n_singles)] + both[:n])


def config_of(loss=Loss(), **table):
    return Config(loss=loss, table=Table(**table))


# ---- pairs ----

def test_pairs_are_all_that_differ_by_the_margin_with_the_better_first():
    pairs = draw_pairs(np.array([1.0, 3.0, 1.5, np.nan, 2.0]), 1.0, 100, [0])
    assert sorted(map(tuple, pairs.tolist())) == [(1, 0), (1, 2), (1, 4), (4, 0)]


def test_equal_values_are_no_pair_without_a_margin():
    pairs = draw_pairs(np.array([1.0, 1.0, 2.0]), 0.0, 100, [0])
    assert sorted(map(tuple, pairs.tolist())) == [(2, 0), (2, 1)]


def test_of_many_pairs_some_are_drawn_evenly_and_anew_by_the_seed():
    values = np.arange(60.0)
    drawn = [draw_pairs(values, 10.0, 500, [seed]) for seed in (0, 0, 1)]
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert (values[drawn[0]] @ [1, -1] >= 10).all()
    expected = 500 * (50 * 51 / 2) / (60 * 60 / 2)
    assert len(drawn[0]) == pytest.approx(expected, rel=0.15)


def test_of_many_pairs_each_variant_is_drawn_about_as_often_the_wild_type_too():
    """It is the last value."""
    pairs = draw_pairs(np.arange(60.0), 0.0, 1500, [0])
    times = np.bincount(pairs.ravel(), minlength=60)
    assert times.min() > 25 and times.max() < 80


def test_where_no_drawn_pair_differs_by_the_margin_the_two_extremes_are_one():
    values = np.zeros(1000)
    values[7] = 1.0
    values[8] = -1.0
    assert draw_pairs(values, 1.5, 3, [0]).tolist() == [[7, 8]]


def test_the_wild_type_takes_part_only_if_it_has_a_value():
    for value, takes_part in ((0.0, True), (np.nan, False)):
        variant_set = made_set([[(4, letter)] for letter in range(19)], wild_type=value)
        drawn = draw_variants(variant_set, config_of(), epoch=0)
        assert (len(variant_set.variants) in drawn.numbers) == takes_part


def test_the_residues_of_a_pair_are_those_mutated_in_one_or_in_both():
    variant_set = made_set([[(3, 1)], [(3, 2)], [(3, 2), (7, 1)], [(8, 1), (9, 1)]])
    drawn = draw_variants(variant_set, config_of(), epoch=0)
    mutated = [{row for row, _ in variant} for variant in [*variant_set.variants, []]]
    expected = [len(mutated[drawn.numbers[i]] | mutated[drawn.numbers[j]])
                for i, j in zip(drawn.better, drawn.worse)]
    assert drawn.n_mutated.tolist() == expected and set(expected) == {1, 2, 3, 4}


# ---- variants ----

def test_only_variants_that_are_in_a_drawn_pair_are_scored():
    variant_set = doubles(200)
    drawn = draw_variants(variant_set, config_of(most_pairs=5), epoch=0)
    assert len(drawn.numbers) <= 10
    assert sorted({*drawn.better.tolist(), *drawn.worse.tolist()}) == list(range(
        len(drawn.numbers)))
    assert drawn.values.numpy() == pytest.approx(variant_set.values[drawn.numbers])
    assert (drawn.values[drawn.better] > drawn.values[drawn.worse]).all()


def test_of_variants_of_several_mutations_so_many_are_taken_anew_in_each_epoch():
    variant_set = doubles(200, n_singles=30)
    numbers = [draw_variants(variant_set, config_of(most_several=20), epoch).numbers.tolist()
               for epoch in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]
    for taken in numbers:
        assert sum(30 <= number < 230 for number in taken) == 20
        assert sum(number < 30 for number in taken) == 30     # singles are from one pass
    assert set(numbers[0]) & set(numbers[2]) != set(numbers[0])


def test_a_pair_is_left_whichever_variants_of_several_mutations_are_taken():
    """All but one have the same value, such as at the end of a scale."""
    variant_set = doubles(40)
    variant_set.values[:] = np.where(np.arange(41) == 17, 5.0, 1.0)
    variant_set.values[-1] = np.nan
    for epoch in range(20):
        drawn = draw_variants(variant_set, config_of(most_several=3), epoch)
        assert (drawn.values[drawn.better] > drawn.values[drawn.worse]).all()


def test_differences_of_large_values_are_not_lost():
    variant_set = singles(12)
    variant_set.values[:] = 1e9 + np.arange(13)
    drawn = draw_variants(variant_set, config_of(), epoch=0)
    assert set((drawn.values[drawn.better] - drawn.values[drawn.worse]).tolist()) == set(
        range(1, 13))


def test_a_batch_counts_proteins_by_the_square_root_of_their_variants():
    sets = [singles(8), singles(50), singles(200)]
    batch = make_batch(sets, [0, 1, 2], config_of(), epoch=0)
    assert batch["weight"].tolist() == pytest.approx([0.4, 1, 1])
    assert batch["seen"][0] == sum(len(protein.better) for protein in batch["proteins"])


# ---- orders ----

def orders(loss, epoch, variant_set=singles()):
    return draw_variants(variant_set, config_of(loss), epoch).orders.tolist()


def test_orders_are_of_all_residues_and_new_in_each_epoch_unless_they_are_fixed():
    assert all(sorted(order) == list(range(30)) for order in orders(Loss(n_orders=3), 0))
    assert orders(Loss(), 0) == orders(Loss(), 0) != orders(Loss(), 1)
    assert orders(Loss(order="fixed"), 0) == orders(Loss(order="fixed"), 1)
    assert orders(Loss(order="arange"), 0) == [list(range(30))]


def test_several_orders_are_different_ones():
    assert len({tuple(order) for order in orders(Loss(n_orders=4), 0)}) == 4
