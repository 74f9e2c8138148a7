"""proteins/pictures.py: how a heat map of a scan is laid out."""
import io

import numpy as np
import pytest

from mpnn_cases import Atoms
from proteins.mutations import scan_structure
from proteins.pictures import DPI, PER_LINE, draw_scan, lines_of
from proteins.proposals import MEASURED, PROPOSED, UNMARKED


@pytest.fixture
def drawn(tmp_path, monkeypatch, extras):
    """Function (residue numbers, positions to scan or None, weights, mark or None) -> figure of the
    scan of a chain A of alanines; the first mutation has the mark."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr("proteins.pictures.save_figure", lambda figure, *_: figures.append(figure))

    def draw(numbers, positions=None, weights="w", mark=None):
        atoms = Atoms()
        for number in numbers:
            atoms.add("A", number, "ALA", xyz=[(3.8 * number, y, 0) for y in range(4)])
        (tmp_path / "x.pdb").write_text(atoms.pdb())
        proteins, _ = scan_structure(tmp_path / "x.pdb", positions=positions)
        n = len(proteins[0].variants)
        marks = None
        if mark is not None:
            marks = [np.full(n, UNMARKED)]
            marks[0][0] = mark
        draw_scan(proteins, [np.zeros(n) - 1], "x.png", weights, marks)
        return figures[-1]

    return draw


def lines_in(figure):
    """[(scores (20, n), residue numbers below, number of vertical lines)] of a heat map."""
    return [(axis.images[0].get_array(), [text.get_text() for text in axis.get_xticklabels()],
             len(axis.lines))
            for axis in figure.axes if axis.images]


@pytest.mark.parametrize("first, end, expected", [
    (0, 106, [53, 53]), (-1, 105, [53, 53]), (3, 63, [60]), (0, 61, [30, 31]), (0, 1, [1]),
    (0, 181, [45, 45, 46, 45])])
def test_lines_of_a_heat_map_are_few_and_equal(first, end, expected):
    lines = lines_of(first, end)
    assert sorted(part.stop - part.start for part in lines) == sorted(expected)
    assert [number for part in lines for number in range(part.start, part.stop)] == [
        *range(first, end)]
    assert max(expected) <= PER_LINE


def test_a_heat_map_names_its_weights_above_lines_of_residues(drawn):
    figure = drawn(range(1, 71), weights="mine.pt, corrected by v_48_020")
    assert "mine.pt, corrected by v_48_020" in figure.get_suptitle()
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert [title.split(": ")[1] for title in titles if title] == ["1 to 35", "36 to 70"]


def test_residues_that_are_not_scanned_are_left_out(drawn):
    """Also more of them than a line has, which once were a line without a score."""
    figure = drawn(range(1, 201), ["A10", "A12", "A13", "A190"])
    (scores, numbers, n_cuts), = lines_in(figure)
    assert not np.ma.getmaskarray(scores).all(axis=0).any()
    assert numbers == ["10", "12", "13", "190"]
    assert n_cuts == 2 * 2      # a dark line in a white one


def test_many_scanned_residues_are_wrapped(drawn):
    lines = lines_in(drawn(range(1, 301), ["A1-A40", "A250-A290"]))
    assert [scores.shape[1] for scores, *_ in lines] == [40, 41]
    assert not any(np.ma.getmaskarray(scores).all(axis=0).any() for scores, *_ in lines)


@pytest.mark.parametrize("n_missing, n_columns, n_cuts", [(3, 3, 0), (4, 0, 1), (100, 0, 1)])
def test_only_short_gaps_of_a_structure_are_drawn(n_missing, n_columns, n_cuts, drawn):
    figure = drawn([*range(1, 11), *range(11 + n_missing, 21 + n_missing)])
    (scores, _, n_lines), = lines_in(figure)
    assert scores.shape[1] == 20 + n_columns
    assert np.ma.getmaskarray(scores).all(axis=0).sum() == n_columns
    assert n_lines == 2 * n_cuts


@pytest.mark.parametrize("mark, expected", [
    (None, []), (UNMARKED, []), (MEASURED, ["measured"]), (PROPOSED, ["proposed"])])
def test_the_legend_names_the_marks_that_occur(mark, expected, drawn):
    figure = drawn(range(1, 4), mark=mark)
    assert [text.get_text() for legend in figure.legends for text in legend.texts] == expected


@pytest.mark.parametrize("numbers", [range(1, 4), range(1, 71), range(1, 401)])
def test_letters_beside_a_heat_map_are_inside_of_the_figure(numbers, drawn):
    figure = drawn(numbers)
    figure.savefig(io.BytesIO(), dpi=DPI)
    assert all(label.get_window_extent().x0 >= 0
               for axis in figure.axes if axis.images for label in axis.get_yticklabels())
