"""The pairs of a run: which are held out, and what is said of them."""
import re
from types import SimpleNamespace

import numpy as np
import pytest

from mpnn.pairs import Pair
from mpnn.split import load_pairs, split_pairs
from proteins.structures import Complex, Structure
from mpnn_cases import ABSENT, changed, keys, made, write


def sequences(pairs, first=None):
    """The first letters, or all, of every sequence."""
    return {letters[:first].tobytes() for pair in pairs for letters in (pair.chosen, pair.rejected)}


@pytest.mark.parametrize("n, fraction, n_val", [(2, 0.1, 1), (16, 0.1, 2), (3, 0.9, 2)])
def test_a_tenth_of_the_structures_at_least_one_is_held_out_whole_by_seed_and_content(
        n, fraction, n_val):
    pairs, copies = ([pair for i in range(n) for pair in made(30, 1 + i % 3, i)] for _ in range(2))
    train, val, warnings = split_pairs(pairs, fraction, seed=3)
    assert len(keys(val)) == n_val and not keys(train) & keys(val)
    # told where it is not within a factor of two of what was asked for
    assert (not warnings) == (fraction / 2 <= len(val) / len(pairs) <= 2 * fraction)
    assert sorted(map(id, train + val)) == sorted(map(id, pairs))
    for others in (pairs[::-1], pairs + copies):
        assert keys(split_pairs(others, fraction, seed=3)[1]) == keys(val)
    held_out = {frozenset(keys(split_pairs(pairs, fraction, seed)[1])) for seed in range(8)}
    assert len(held_out) > min(n, 6) - 2


def section(path, val_fraction, val_data=None):
    return SimpleNamespace(train_data=path, val_fraction=val_fraction, val_data=val_data,
                           max_length=None, mutable_positions=None, mutable_ranges=None)


def test_a_start_tells_of_an_odd_split_of_shared_structures_and_of_chains_left_out(shared):
    path, other = (shared / "data" / f"pairs_{name}.json" for name in ("multichain", "monomer"))

    def start(val_data):
        data = load_pairs(section(path, 0.1, val_data), seed=0)
        return len(data.val), *(line for line in data.description if line.startswith("ATTENTION"))

    n_val, split, partial = start(None)
    (_, repeated, _) = start(path)
    (_, _) = start(other)
    assert f"{n_val} of 28 pairs" in split and "--val_data" in split
    assert re.search(r"2 structures are in training and validation, first \S*3HTN.pdb", repeated)
    assert "leave other protein chains" in partial and "fixed_chains" in partial


def test_a_single_structure_is_split_by_sequence_with_a_warning_or_refused():
    pairs = made(30, 40)
    links = [Pair(a.complex, a.rejected, b.chosen, a.chain_M)
             for a, b in zip(pairs[:9], pairs[1:9])]                # chain 9 pairs together
    for all_pairs in (pairs, pairs + links):
        train, val, (warning,) = split_pairs(all_pairs, 0.1, seed=0)
        assert "one structure" in warning and 3 <= len(val) <= 4
        assert len(train) + len(val) == len(all_pairs) and not sequences(train) & sequences(val)
    assert [len(side) for side in split_pairs(pairs[:2], 0.1, seed=0)[:2]] == [1, 1]
    for linked in (made(30, 12, chosen=np.zeros(30, np.uint8)), made(30, 1)):
        with pytest.raises(ValueError, match=r"--val_data.*data.val_fraction=0\)"):
            split_pairs(linked, 0.1, seed=0)


def test_pairs_that_share_the_sequence_of_one_chain_are_on_one_side_of_the_split():
    chain = made(30, 1)[0].complex.structure.chains["A"]
    rng = np.random.default_rng(1)
    structure = Structure("two", {"A": chain, "B": chain})
    one = Complex(structure, ["A"], ["B"])
    two = Complex(structure, ["A", "B"])
    pairs = []
    constant = rng.integers(0, 20, 30).astype(np.uint8)
    for _ in range(20):         # designs of A alone, and of A with a B that is alike in all
        first, second, third = rng.integers(0, 20, (3, 30)).astype(np.uint8)
        pairs.append(Pair(one, first, second, np.ones(30, bool)))
        pairs.append(Pair(two, np.r_[first, constant], np.r_[third, constant], np.ones(60, bool)))
    train, val, _ = split_pairs(pairs, 0.2, seed=0)
    assert len(val) == 8 and not sequences(train, 30) & sequences(val, 30)


def loaded(small, *weights):
    """Three pairs with these weights."""
    entries = [changed(preferred_seq=f"MKXXV{letter}A", weight=weight)
               for letter, weight in zip("LVC", weights)]
    return load_pairs(section(write(small, entries), 0), seed=0)


def test_a_weight_of_1_is_that_of_a_pair_without_a_weight(small):
    plain = loaded(small, *[ABSENT] * 3)
    assert plain.fingerprint == loaded(small, 1, 1.0, 1).fingerprint


def test_other_weights_make_other_data_of_which_a_start_tells(small):
    twos = loaded(small, 2, ABSENT, 0.5)
    assert twos.fingerprint != loaded(small, *[ABSENT] * 3).fingerprint
    assert [pair.weight for pair in twos.train] == [2, 1, 0.5]
    assert "2 with a weight other than 1; weights 0.5 to 2" in twos.description[0]


def test_what_is_kept_of_a_pair_for_later_runs_does_not_depend_on_its_weight(small):
    """Its orders, its reference scores."""
    plain = loaded(small, *[ABSENT] * 3)
    twos = loaded(small, 2, ABSENT, 0.5)
    assert [pair.key for pair in twos.train] == [pair.key for pair in plain.train]
