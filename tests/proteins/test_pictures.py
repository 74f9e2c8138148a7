"""proteins/pictures.py: how a heat map of a scan is laid out."""
import numpy as np
import pytest

from mpnn_cases import Atoms
from proteins.mutations import scan_structure
from proteins.pictures import PER_LINE, draw_scan, lines_of


@pytest.mark.parametrize("first, end, expected", [
    (0, 106, [53, 53]), (-1, 105, [53, 53]), (3, 63, [60]), (0, 61, [30, 31]), (0, 1, [1]),
    (0, 181, [45, 45, 46, 45])])
def test_lines_of_a_heat_map_are_few_and_equal(first, end, expected):
    lines = lines_of(first, end)
    assert sorted(part.stop - part.start for part in lines) == sorted(expected)
    assert [number for part in lines for number in range(part.start, part.stop)] == [
        *range(first, end)]
    assert max(expected) <= PER_LINE


def test_a_heat_map_names_its_weights_above_lines_of_residues(tmp_path, monkeypatch, extras):
    pytest.importorskip("matplotlib")
    atoms = Atoms()
    for number in range(1, 71):
        atoms.add("A", number, "ALA")
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    proteins, _ = scan_structure(tmp_path / "x.pdb")
    drawn = []
    monkeypatch.setattr("proteins.pictures.save_figure", lambda figure, *_: drawn.append(figure))
    draw_scan(proteins, [np.zeros(len(proteins[0].variants)) - 1], "x.png", "mine.pt - v_48_020")
    assert "mine.pt - v_48_020" in drawn[0].get_suptitle()
    titles = [axis.get_title(loc="left") for axis in drawn[0].axes]
    assert [title.split(": ")[1] for title in titles if title] == ["1 to 35", "36 to 70"]
