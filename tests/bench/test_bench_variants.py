"""bench/variants.py: both ways are timed, and their results compared."""
import re

from bench.dpo import write_demo_pdb
from training_runs import command_lines


def test_one_pass_for_many_residues_is_faster_and_agrees(tmp_path):
    write_demo_pdb(tmp_path / "made.pdb", 100)
    argv = ["variants", "made.pdb", "--repeats=1", "--device=cpu"]
    (code, out, err), = command_lines("bench", [argv], tmp_path)
    assert code == 0, err
    ratio, difference = re.search(r"^made.pdb +[\d.]+ +[\d.]+ +([\d.]+)x +\S+ +(\S+)$", out,
                                  re.M).groups()
    assert float(ratio) > 3 and float(difference) <= 1e-5
