"""bench/variants.py: both ways are timed, and their results compared."""
import re

from training_runs import command_lines


def test_one_pass_for_many_residues_is_faster_and_agrees(tmp_path):
    (code, out, err), = command_lines("bench", [["variants", "--repeats=1", "--device=cpu"]],
                                      tmp_path)
    assert code == 0, err
    rows = re.findall(r"^\d+ residues, made +[\d.]+ +[\d.]+ +([\d.]+)x +\S+ +(\S+)$", out, re.M)
    assert len(rows) == 3
    assert all(float(difference) <= 1e-5 for _, difference in rows)
    assert float(rows[1][0]) >= 5
