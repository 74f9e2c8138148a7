"""proteins/combinations.py: the best variants of several mutations of a scan."""
import itertools

import numpy as np
import pytest

from proteins.combinations import (
    best_singles,
    choose_combinations,
    combine,
    describe_combinations,
    n_combined,
)
from proteins.letters import LETTERS
from proteins.mutations import place_on_sequences, read_mutations, scan_sequence
from proteins.proposals import measured_variants

WILD_TYPE = "MKTAYW"


@pytest.fixture
def scan():
    return scan_sequence("w", WILD_TYPE)


@pytest.fixture
def scores(scan):
    """(n,) of the variants of the scan: no two alike."""
    return np.random.default_rng(0).permutation(len(scan.variants)) / 10.0


def names(protein, numbers=None):
    numbers = range(len(protein.variants)) if numbers is None else numbers
    return [protein.variants[number].cells["mutation"] for number in numbers]


def best_of_each_residue(scan, scores):
    """[mutation], one a residue, by brute force, in the order of residues."""
    best = {}
    for variant, score in zip(scan.variants, scores):
        mutation, = variant.mutations
        if mutation.number not in best or score > best[mutation.number][0]:
            best[mutation.number] = (score, str(mutation))
    return [mutation for _, mutation in best.values()]


def test_of_each_residue_the_best_mutation_is_combined(scan, scores):
    singles = best_singles([scan], [scores], 2)
    assert sorted(names(scan, [single.variant for single in singles])) == sorted(
        best_of_each_residue(scan, scores))


def test_all_variants_of_up_to_so_many_mutations_are_made_in_the_order_of_residues(scan, scores):
    (protein,), (sums,) = combine([scan], [scores], best_singles([scan], [scores], 3), 3, ())
    best = best_of_each_residue(scan, scores)
    expected = [":".join(some) for size in (1, 2, 3) for some in itertools.combinations(best, size)]
    assert names(protein) == expected and len(expected) == 6 + 15 + 20
    score_of = dict(zip(names(scan), scores))
    assert sums == pytest.approx([sum(score_of[name] for name in text.split(":"))
                                  for text in expected])
    for text, changes, variant in zip(expected, protein.changes, protein.variants):
        assert changes == [(int(name[1:-1]) - 1, LETTERS.index(name[-1]))
                           for name in text.split(":")]
        assert [str(mutation) for mutation in variant.mutations] == text.split(":")


def test_what_is_measured_is_not_proposed_but_takes_part(scan, scores, tmp_path):
    one, two, *_ = best_of_each_residue(scan, scores)
    table = tmp_path / "t.csv"
    table.write_text(f"sequence,mutation\n{WILD_TYPE},{one}\n{WILD_TYPE},{two}:{one}\n")
    measured = measured_variants(place_on_sequences(read_mutations(table))[0])
    singles = best_singles([scan], [scores], 2)
    (every,), _ = combine([scan], [scores], singles, 2, ())
    (left,), (sums,) = combine([scan], [scores], singles, 2, measured)
    assert set(names(every)) - set(names(left)) == {one, f"{one}:{two}"}
    assert len(sums) == len(left.variants)
    assert sum(one in name.split(":") for name in names(left)) == 4


def test_a_table_of_all_combinations_leaves_nothing(scan, scores):
    singles = best_singles([scan], [scores], 2)
    every, _ = combine([scan], [scores], singles, 2, ())
    with pytest.raises(ValueError, match="measured"):
        combine([scan], [scores], singles, 2, measured_variants(every))


def test_the_best_are_chosen_with_no_mutation_in_more_than_a_quarter(scan, scores):
    proteins, _ = combine([scan], [scores], best_singles([scan], [scores], 3), 3, ())
    joint = np.random.default_rng(1).normal(size=len(proteins[0].variants))
    chosen = choose_combinations(proteins, [joint], 9)
    expected = []
    times = dict.fromkeys(best_of_each_residue(scan, scores), 0)
    for number in np.argsort(-joint):       # by brute force
        mutations = proteins[0].variants[number].cells["mutation"].split(":")
        if len(expected) < 9 and max(times[mutation] for mutation in mutations) < 2:
            expected.append(number)
            for mutation in mutations:
                times[mutation] += 1
    assert [choice.variant for choice in chosen] == expected
    assert 1 < len(expected) < 9 and max(times.values()) == 2


def test_fewer_than_asked_for_are_said(scan, scores):
    proteins, _ = combine([scan], [scores], best_singles([scan], [scores], 3), 3, ())
    sizes = np.array([len(changes) for changes in proteins[0].changes], float)
    chosen = choose_combinations(proteins, [sizes], 9)      # four of three use up all mutations
    assert "found no more for --top 9" in describe_combinations(chosen, 9, 3, 6)
    assert "found no more" not in describe_combinations(chosen, len(chosen), 3, 6)


def test_proteins_are_combined_each_by_itself():
    proteins = [scan_sequence("a", "MK"), scan_sequence("b", "WYT")]
    scores = [np.zeros(len(protein.variants)) for protein in proteins]
    candidates, _ = combine(proteins, scores, best_singles(proteins, scores, 2), 2, ())
    assert [(protein.name, len(protein.variants)) for protein in candidates] == [
        ("a", 3), ("b", 6)]


@pytest.mark.parametrize("most", [2, 3, 4, 5])
def test_as_many_mutations_enter_as_make_a_thousand_variants(most):
    def variants_of(n):
        return sum(1 for size in range(1, most + 1)
                   for _ in itertools.combinations(range(n), size))
    n = n_combined(most)
    assert variants_of(n) <= 1000 < variants_of(n + 1)
