"""proteins/proposals.py: the highest scores of a scan that a table does not have."""
import numpy as np
import pytest

from proteins.mutations import place_on_sequences, read_mutations, scan_sequence
from proteins.proposals import (
    MEASURED,
    PROPOSED,
    choose_proposals,
    keep_measured_chains,
    marks_of,
    measured_variants,
    proteins_of,
    values_of,
)

WILD_TYPE = "MKTAY"


def of_table(folder, *mutations, sequence=WILD_TYPE):
    """The Proteins of a table of these variants."""
    path = folder / "table.csv"
    path.write_text("sequence,mutation\n" + "".join(f"{sequence},{m}\n" for m in mutations))
    return place_on_sequences(read_mutations(path))[0]


def names(proteins, chosen):
    return [str(proteins[place].variants[number].mutations[0]) for place, number in chosen]


def scores_of(protein, **values):
    """(n,) the given scores of variants, such as M1A=2; of others -1, -2 ... in their order."""
    scores = -1.0 - np.arange(len(protein.variants))
    for number, variant in enumerate(protein.variants):
        scores[number] = values.get(str(variant.mutations[0]), scores[number])
    return scores


@pytest.fixture
def scan():
    return scan_sequence("w", WILD_TYPE)


def test_the_highest_are_chosen_in_order_without_those_measured(scan, tmp_path):
    scores = scores_of(scan, T3W=5, K2A=7, Y5C=6, M1A=4)
    measured = measured_variants(of_table(tmp_path, "Y5C", "T3G"))
    assert names([scan], choose_proposals([scan], [scores], measured, 3, 2)) == [
        "K2A", "T3W", "M1A"]


def test_of_one_position_no_more_are_chosen_than_asked_for(scan):
    scores = scores_of(scan, K2A=9, K2C=8, K2D=7, T3W=1)
    assert names([scan], choose_proposals([scan], [scores], set(), 3, 2)) == ["K2A", "K2C", "T3W"]


def test_all_that_are_left_are_chosen_if_more_are_asked_for(scan):
    assert len(choose_proposals([scan], [scores_of(scan)], set(), 1000, 2)) == 2 * len(WILD_TYPE)


def test_a_mutation_measured_beside_another_may_be_proposed_alone(scan, tmp_path):
    measured = measured_variants(of_table(tmp_path, "K2A:T3W", "M1A"))
    scores = scores_of(scan, K2A=9, M1A=8, T3W=7)
    assert names([scan], choose_proposals([scan], [scores], measured, 2, 1)) == ["K2A", "T3W"]


def test_scores_that_are_written_alike_are_in_the_order_of_the_scan(scan):
    """Whatever rounding on another number of ranks does to them."""
    for tiny in (1e-9, -1e-9):
        scores = scores_of(scan, K2A=3, T3W=3 + tiny)
        assert names([scan], choose_proposals([scan], [scores], set(), 2, 1)) == ["K2A", "T3W"]


def test_a_protein_given_twice_is_proposed_once(scan):
    chosen = choose_proposals([scan, scan], [scores_of(scan)] * 2, set(), 1000, 19)
    assert len(set(names([scan, scan], chosen))) == len(chosen) == 19 * len(WILD_TYPE)


def test_proteins_that_the_table_does_not_have_are_left_out(scan, tmp_path):
    other = scan_sequence("other", "GGGG")
    table = of_table(tmp_path, "M1A")
    kept = keep_measured_chains([other, scan], table, "table.csv", measured_variants(table))
    assert [protein.name for protein in kept] == ["w"]
    assert len(kept[0].variants) == len(scan.variants)


def test_a_table_of_another_protein_is_refused(scan, tmp_path):
    with pytest.raises(ValueError, match="table.csv"):
        keep_measured_chains([scan], of_table(tmp_path, "M1A", sequence="MKTAW"), "table.csv", ())


def test_a_table_of_all_mutations_leaves_nothing_to_propose(scan, tmp_path):
    mutations = [str(variant.mutations[0]) for variant in scan.variants]
    table = of_table(tmp_path, *mutations)
    with pytest.raises(ValueError, match="table.csv"):
        keep_measured_chains([scan], table, "table.csv", measured_variants(table))


def test_proposals_of_several_proteins_are_in_one_order():
    proteins = [scan_sequence("a", "MK"), scan_sequence("b", "WY")]
    scores = [scores_of(proteins[0], M1A=3, K2A=1), scores_of(proteins[1], Y2A=2)]
    chosen = choose_proposals(proteins, scores, set(), 3, 1)
    ranked = proteins_of(proteins, chosen)
    of_ranked = values_of(scores, chosen)
    assert [(protein.name, str(protein.variants[0].mutations[0]), float(score[0]))
            for protein, score in zip(ranked, of_ranked)] == [
        ("a", "M1A", 3), ("b", "Y2A", 2), ("a", "K2A", 1)]


def test_each_cell_is_marked_as_what_it_is(scan, tmp_path):
    measured = measured_variants(of_table(tmp_path, "M1A", "Y5C"))
    scores = scores_of(scan, K2A=9)
    chosen = choose_proposals([scan], [scores], measured, 1, 1)
    marks, = marks_of([scan], measured, proteins_of([scan], chosen))
    marked = {str(variant.mutations[0]): mark
              for variant, mark in zip(scan.variants, marks) if mark}
    assert marked == {"M1A": MEASURED, "Y5C": MEASURED, "K2A": PROPOSED}
