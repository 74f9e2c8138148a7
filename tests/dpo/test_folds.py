"""dpo/folds.py: a variant is judged by weights that were tuned without it."""
import numpy as np
import pytest

from dpo.folds import cross_validate, lines_on
from dpo.tables import VariantTable
from proteins.mutations import scan_sequence


def made_table(n=41):
    variants = [[(row, letter)] for row in range(10) for letter in range(5)][:n]
    complex = scan_sequence("made", "MKTAYIAKQRQI").complex
    return VariantTable("made", complex, variants, np.arange(n + 1.0) % 23)


def test_each_variant_is_left_out_once_with_its_residue_and_scored_by_the_rest():
    table = made_table()            # eight residues of five variants, and one of one
    left_out = []
    shown = []

    def show(folds):
        for fold in folds:
            shown.append(len(left_out))
            yield fold

    def scores_after(others):
        is_known = np.isin(range(41), [table.variants.index(each) for each in others.variants])
        assert others.values.tolist() == table.values[[*is_known, True]].tolist()
        left_out.append(np.flatnonzero(~is_known))
        return np.where(is_known, 0.0, table.values[:-1])       # right for those alone

    found = cross_validate(table, 4, 0, -table.values[:-1], scores_after, show)
    assert shown == [0, 1, 2, 3]        # as many are done
    rows_left_out = [{table.variants[number][0][0] for number in part} for part in left_out]
    assert sorted(map(len, rows_left_out)) == [2, 2, 2, 3]
    assert sorted(row for rows in rows_left_out for row in rows) == list(range(9))
    assert sorted(np.concatenate(left_out)) == list(range(41))
    assert found["variants"] == 41
    assert found["after"] == pytest.approx(1) and found["before"] == pytest.approx(-1)


@pytest.mark.parametrize("n, left_out", [(12, [2, 5, 5]), (5, [1] * 5)])
def test_more_folds_than_residues_leave_one_out_each_and_of_one_residue_each_variant(n, left_out):
    table = made_table(n)
    sizes = []

    def scores_after(others):
        sizes.append(n - len(others.variants))
        return table.values[:-1]

    cross_validate(table, 100, 0, -table.values[:-1], scores_after)
    assert sorted(sizes) == left_out


def found_with(scores):
    """What is found if all tunings give these scores; the base's are noise."""
    table = made_table()
    noise = np.random.default_rng(0).normal(size=41)
    return cross_validate(table, 4, 0, noise, lambda others: scores(table.values[:-1], noise))


def test_the_interval_says_whether_a_gain_is_shown():
    better = found_with(lambda values, noise: values + noise)
    equal = found_with(lambda values, noise: noise)
    worse = found_with(lambda values, noise: noise - values)
    assert 0 < better["low"] < better["after"] - better["before"] < better["high"]
    assert equal["low"] == equal["high"] == 0
    assert worse["high"] < 0
    said = [" ".join(lines_on(found)[1].split()) for found in (better, equal, worse)]
    assert "helps" in said[0]
    assert ["ATTENTION" in text for text in said] == [False, False, True]
    assert "do not show" in said[1] and "ranks variants worse" in said[2]
