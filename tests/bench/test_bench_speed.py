"""bench/speed.py: what is printed."""
import re
from types import SimpleNamespace

import pytest
import torch

from bench import speed
from bench.speed import Table, Work
from ddp_setup import Ddp
from launchers import ROOT

ROW = re.compile(r"^\| (?P<name>[^|]+): (?P<unit>\w+) \| (?P<plain>[\d.,e+]+) "
                 r"\| (?P<ours>[\d.,e+]+) \| (?P<ratio>[\d.]+) \(.*?\) "
                 r"\| (?P<mfu>\d+%|-) \| (?P<differ>.+) \|$", re.M)


def rows_of(text):
    return [row.groupdict() for row in ROW.finditer(text)]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Small networks and few proteins, in a folder of its own; the processor has bfloat16."""
    monkeypatch.setattr(speed, "NETWORK", dict(hidden_size=16, n_blocks=1, n_heads=2, dropout=0.1))
    monkeypatch.setattr(speed, "N_MADE", 300)
    monkeypatch.setattr(speed, "MADE_RESIDUES", 30)
    monkeypatch.setattr(speed, "TABLE_RESIDUES", 12)
    monkeypatch.setattr(speed, "computes_in_bfloat16", lambda device: True)
    monkeypatch.chdir(tmp_path)
    return ["--device=cpu", "--repeats=1", "--matmul=64"]


@pytest.mark.slow
def test_a_row_of_sedd_for_each_data_set_and_dtype(small, capsys, tmp_path):
    speed.main(["sedd", *small])
    rows = rows_of(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [
        f"SEDD step, 0 M, {data}, {dtype}" for data in ("made", "equal")
        for dtype in ("float32", "bfloat16")]
    for row in rows:
        limit = 1e-4 if "float32" in row["name"] else 0.05
        assert all(float(number) < limit for number in row["differ"].split(", ")), row
        assert row["mfu"] != "-"
    assert list(tmp_path.iterdir()) == []


def test_a_config_is_measured_with_its_own_network(small, capsys):
    speed.main(["sedd", "--config", str(ROOT / "configs" / "sedd_demo.yaml"), *small,
                "model.hidden_size=16", "model.n_blocks=1", "training.batch_size=2"])
    rows = rows_of(capsys.readouterr().out)
    assert [row["differ"] for row in rows] == ["-", "-"]


@pytest.mark.slow
def test_a_row_of_dpo_for_each_case(small, capsys, monkeypatch):
    monkeypatch.setattr(speed, "DPO_CASES", [(1, "random", torch.float32),
                                             (2, "arange", torch.float32)])
    speed.main(["dpo", *small])
    rows = rows_of(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["DPO step, 30 residues, 1 pair, random, float32",
                                             "DPO step, 30 residues, 2 pairs, arange, float32"]
    assert rows[0]["differ"] == "-"
    assert all(float(number) < 1e-4 for number in rows[1]["differ"].split(", "))


@pytest.mark.slow
def test_a_table_has_a_hundred_times_the_pairs_of_pairs_one_by_one(small, capsys):
    speed.main(["tables", *small])
    pairs, variants = rows_of(capsys.readouterr().out)
    assert pairs["name"] == variants["name"] == "DPO step, 228 mutations of 12 residues, float32"
    assert (pairs["unit"], variants["unit"]) == ("pairs", "variants")
    assert float(pairs["ratio"]) > 100 and float(variants["ratio"]) > 10


@pytest.mark.slow
def test_a_row_of_sampling_for_each_model_length_and_batch(small, capsys):
    speed.main(["sample", "--batch", "1", "2", "--lengths", "20", "--sample_steps=2", *small])
    cases = [f"{model}, 20 residues, {batch} at a time, {dtype}" for batch in (1, 2)
             for model, dtypes in (("SEDD", ("float32", "bfloat16")),
                                   ("SUBS", ("float32", "bfloat16")), ("ProteinMPNN", ("float32",)))
             for dtype in dtypes]
    names = {row["name"] for row in rows_of(capsys.readouterr().out)}
    assert {f"drawing, {case}" for case in cases} <= names
    assert "drawing, SEDD, 2 to 20, 2 at a time, float32" in names and len(names) == 14


@pytest.mark.slow
def test_bfloat16_is_left_out_where_it_would_be_emulated(small, monkeypatch, capsys):
    monkeypatch.setattr(speed, "computes_in_bfloat16", lambda device: False)
    speed.main(["sedd", *small])
    said = capsys.readouterr()
    assert {row["name"].split()[-1] for row in rows_of(said.out)} == {"float32"}
    assert "bfloat16 is left out: cpu has no native bfloat16" in said.err


def test_the_ratio_is_of_amounts_per_second_and_mfu_of_flop_per_second(monkeypatch, capsys):
    """Plain does 10 in 4 s, ours 30 in 2 s with 80 FLOP: ratio 6; of 100 FLOP/s 40 %."""
    clock = iter([0.0, 4.0, 4.0, 6.0] * 3)
    monkeypatch.setattr(speed, "now", lambda ddp: next(clock))
    table = Table.__new__(Table)
    table.ddp = Ddp()
    table.options = SimpleNamespace(repeats=1)
    table.rates = {torch.float32: 100.0}
    table.add("row", "things", lambda: Work(10), {torch.float32: lambda: Work(30, 80.0)})
    row, = rows_of(capsys.readouterr().out)
    numbers = [row[column] for column in ("plain", "ours", "ratio", "mfu")]
    assert numbers == ["2.5", "15", "6.00", "40%"]
