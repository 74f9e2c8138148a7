"""The pairs of a run: which are held out, and what is said of them."""
import re
from types import SimpleNamespace

import numpy as np
import pytest

from dpo.data import hold_out_pairs, load_pairs
from dpo.pairs import Pair
from mpnn_cases import ABSENT, changed, made, write
from proteins.structures import Chain, Complex, Structure


def section(path, val_fraction, val_data=None):
    return SimpleNamespace(train_data=path, val_fraction=val_fraction, val_data=val_data,
                           identity=0.3, max_length=None, mutable_positions=None,
                           mutable_ranges=None)


def split(pairs, val_fraction):
    """(train, val, lines) of hold_out_pairs."""
    return hold_out_pairs(pairs, section("pairs.json", val_fraction), lambda: None)


def pairs_on(letters, name, n=2, partner=None):
    """Pairs on a structure of these letters, perhaps with a context chain of others."""
    rng = np.random.default_rng([len(name), *letters[:4].tolist()])
    chains = {}
    for chain_name, S in (("A", letters), ("B", partner)):
        if S is not None:
            X = rng.normal(size=(len(S), 4, 3)).astype(np.float32)
            chains[chain_name] = Chain(S, X, np.ones(len(S), bool), tuple(map(str, range(len(S)))))
    structure = Complex(Structure(name, chains), ["A"], [c for c in chains if c != "A"])
    everywhere = np.ones(len(letters), bool)
    return [Pair(structure, one, other, everywhere)
            for one, other in rng.integers(0, 20, (n, 2, len(letters))).astype(np.uint8)]


def families(n):
    """Pairs on n families of two structures each, whose letters differ by a tenth."""
    rng = np.random.default_rng(0)
    pairs = []
    for number in range(n):
        letters = rng.integers(0, 20, 60).astype(np.uint8)
        relative = letters.copy()
        relative[::10] = (relative[::10] + 1) % 20
        pairs += pairs_on(letters, f"{number}") + pairs_on(relative, f"{number} relative")
    return pairs


def family_of(pair):
    return pair.complex.structure.name.split()[0]


def test_structures_of_one_family_are_on_one_side_whatever_their_order():
    pairs = families(12)
    train, val, lines = split(pairs, 0.3)
    assert not {family_of(pair) for pair in train} & {family_of(pair) for pair in val}
    assert len(val) == 4 * len({family_of(pair) for pair in val})
    assert sorted(map(id, train + val)) == sorted(map(id, pairs))
    _, again, _ = split(pairs[::-1], 0.3)
    assert {pair.key for pair in again} == {pair.key for pair in val}
    assert "of 12; identity" in lines[0]


def test_structures_that_are_too_many_to_align_are_not_called_unrelated(monkeypatch):
    monkeypatch.setattr("proteins.identity.MOST_ALIGNED", 3)
    _, _, lines = split(families(12), 0.3)
    assert "ATTENTION" in lines[0] and "identity of sequences below" not in lines[0]


def test_a_structure_is_on_one_side_whichever_of_its_chains_is_designed():
    """A alone, or B in the context of A."""
    rng = np.random.default_rng(1)
    pairs = []
    for number in range(10):
        first, second = rng.integers(0, 20, (2, 50)).astype(np.uint8)
        (pair,) = pairs_on(first, f"{number}", 1, second)
        turned = Complex(pair.complex.structure, ["B"], ["A"])
        pairs += [pair, Pair(turned, pair.chosen, pair.rejected, pair.chain_M)]
    train, val, _ = split(pairs, 0.3)
    assert val and not {family_of(pair) for pair in train} & {family_of(pair) for pair in val}


def test_one_family_is_split_by_preferred_sequence_which_the_start_tells():
    pairs = made(30, 40)
    same_chosen = [Pair(pair.complex, pair.chosen, pair.rejected[::-1].copy(), pair.chain_M)
                   for pair in pairs]
    train, val, lines = split(pairs + same_chosen, 0.1)
    assert len(val) == 8        # of 40 preferred sequences 4, in two pairs each
    assert not {pair.chosen.tobytes() for pair in train} & {pair.chosen.tobytes() for pair in val}
    assert any("other sequences, not other structures" in line for line in lines)


@pytest.mark.parametrize("pairs", [made(30, 12, chosen=np.zeros(30, np.uint8)), made(30, 1)])
def test_pairs_of_one_preferred_sequence_cannot_be_split(pairs):
    with pytest.raises(ValueError, match=r"--val_data.*data.val_fraction=0\)"):
        split(pairs, 0.1)


def test_a_start_tells_of_an_odd_split_of_shared_structures_and_of_chains_left_out(shared):
    path, other = (shared / "data" / f"pairs_{name}.json" for name in ("multichain", "monomer"))

    def start(val_data):
        data = load_pairs(section(path, 0.1, val_data), seed=0)
        return len(data.val), *(line for line in data.description if line.startswith("ATTENTION"))

    (_, repeated, _) = start(path)
    (_, partial) = start(other)
    assert re.search(r"2 structures are in training and validation, first \S*3HTN.pdb", repeated)
    assert "leave other protein chains" in partial and "fixed_chains" in partial


def test_far_more_held_out_pairs_than_asked_for_are_told():
    pairs = families(12)
    _, val, _ = split(pairs, 0.3)
    many = [pair for pair in val[:1] for _ in range(200)] + pairs
    assert any("data.val_fraction asks for" in line for line in split(many, 0.3)[2])


def test_other_validation_pairs_are_other_data(small):
    """A run that is resumed with them is refused."""
    hashes = set()
    train = write(small, [changed()])
    for letter in "LV":
        val = write(small, [changed(preferred_seq=f"MKXXV{letter}W")], f"{letter}.json")
        hashes.add(load_pairs(section(train, 0, val), seed=0).fingerprint["hash"])
    assert len(hashes) == 2


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
