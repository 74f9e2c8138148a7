"""bench/dpo.py: the plain step is ours, written plainly."""
import math

import pytest
import torch

from bench import common, dpo
from ddp_setup import Ddp


def test_the_plain_step_has_our_loss_and_gradient(tmp_path):
    """On a chain with fewer rows than neighbours, a gap and a residue that lacks O: all are seen by
    all."""
    path = tmp_path / "s.pdb"
    dpo.write_demo_pdb(path, 30)
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        residue = int(line[22:26])
        atom = line[13]
        if residue != 9 and not (residue == 17 and atom == "O"):
            lines.append(line)
    path.write_text("".join(lines))
    steps = dpo.DpoSteps(dpo.made_pairs(path), 2, Ddp())
    plain, norm = map(float, steps.gradient("plain", 0, [0, 1]))
    ours, our_norm = map(float, steps.gradient("ours", 0, [0, 1]))
    assert plain == pytest.approx(ours, abs=4e-6) and abs(plain - math.log(2)) > 1e-3
    assert norm == pytest.approx(our_norm, rel=1e-4)
    for (name, p), q in zip(steps.models["plain"].named_parameters(),
                            steps.models["ours"].parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * norm, msg=name)


def test_rows_of_the_table_and_a_line_on_stderr_for_every_turn(tmp_path, capsys):
    dpo.write_demo_pdb(tmp_path / "s.pdb", 30)
    settings = [("arange", "float32"), ("random", "float32")]
    rows = dpo.compare_steps(dpo.made_pairs(tmp_path / "s.pdb"), 2, settings, 1, 1, 2, Ddp())
    assert [row.split("  ")[0] for row in rows] == [
        "2 pairs a step, arange, float32", "2 pairs a step, random, float32"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["2 a step: turn 1 of 2", "2 a step: turn 2 of 2"]


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_measured_only_where_the_processor_has_it(native, monkeypatch):
    dtype = torch.bfloat16 if native else torch.float32
    monkeypatch.setattr(common, "choose_dtype", lambda request, device: (dtype, ""))
    found = dpo.cases_on(torch.device("cpu"), dpo.FILE_CASES)
    if native:
        assert found == dpo.FILE_CASES
    else:
        assert found == {1: [("random", "float32"), ("fixed", "float32")],
                         4: [("fixed", "float32")]}
