"""bench/learn_dpo_sedd.py: does SEDD reach a known optimum, what does it learn from mutants?"""
import re

import pytest

from proteins.letters import AMINO_ACIDS
from sedd_cases import write_checkpoint
from training_runs import command_lines

KEYS = ["training.n_iters=2", "optim.lr=1e-2", "estimator.samples=2", "data.val_fraction=0",
        "monitoring.n_designs=0"]


@pytest.mark.slow
def test_the_table_has_spearman_of_proteins_held_out_before_and_after(tmp_path):
    write_checkpoint(tmp_path / "base.pt")
    lines = ["sequence,mutation,ddg"]
    for number in range(6):
        text = "".join(AMINO_ACIDS[(number + 3 * i) % 20] for i in range(25 + number))
        for i in range(12):
            mutant = AMINO_ACIDS[(number + 3 * i + 1) % 20]
            lines.append(f"{text},{text[i]}{i + 1}{mutant},{i * 5 % 12 - 2}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    command = ["learn", "dpo_sedd", "table.csv", "--base", "base.pt", "--lower_is_better",
               "--folder", "runs", "--device", "cpu", "--seeds", "0,1", *KEYS]
    (code, table, err), = command_lines("bench", [command], tmp_path)
    assert code == 0, err
    rows = re.findall(r"^(before|after, seed \d) +(-?[\d.]+) +(-?[\d.]+|nan)", table, re.M)
    assert [name for name, *_ in rows] == ["before", "after, seed 0", "after, seed 1"]
    assert len({correlation for _, correlation, _ in rows}) > 1


def test_a_table_needs_a_base(tmp_path):
    (code, _, err), = command_lines("bench", [["learn", "dpo_sedd", "table.csv"]], tmp_path)
    assert code == 2 and "--base is not given" in err
