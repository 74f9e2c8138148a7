"""dpo/pair_files.py: which groups of pairs are held out."""
import numpy as np

from dpo.pair_files import hold_out_groups

GROUPS = np.repeat(np.arange(40), 5)


def test_another_seed_holds_out_other_groups():
    held_out = [GROUPS[hold_out_groups(GROUPS, 0.25, seed)] for seed in range(2)]
    assert len(held_out[0]) == len(held_out[1]) == 50
    assert set(held_out[0]) != set(held_out[1])


def test_the_smallest_group_is_held_out_where_none_is_small_enough():
    groups = np.repeat(np.arange(6), [5, 4, 5, 2, 4, 3])
    for seed in range(4):
        assert set(groups[hold_out_groups(groups, 0.01, seed)]) == {3}
