"""bench/speed.py, against.py, speed_all.py: what is printed, and parts that fail."""
import re
from types import SimpleNamespace

import pytest
import torch

from bench import against, speed, speed_all
from bench.speed import Table, Work
from bench.speed_all import Part, command, resumed_run, run_parts
from ddp_setup import Ddp, save_checkpoint
from launchers import ROOT

ROW = re.compile(r"^\| (?P<name>[^|]+): (?P<unit>\w+) \| (?P<plain>[\d.,e+]+) "
                 r"\| (?P<ours>[\d.,e+]+) \| (?P<ratio>[\d.]+) \(.*?\) "
                 r"\| (?P<mfu>\d+%|-) \| (?P<differ>.+) \|$", re.M)


def rows_of(text):
    return [found.groupdict() for found in ROW.finditer(text)]


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


def test_a_row_of_dpo_for_each_case(small, capsys, monkeypatch):
    monkeypatch.setattr(speed, "DPO_CASES", [(1, "random", torch.float32),
                                             (2, "arange", torch.float32)])
    speed.main(["dpo", *small])
    rows = rows_of(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["DPO step, 30 residues, 1 pair, random, float32",
                                             "DPO step, 30 residues, 2 pairs, arange, float32"]
    assert rows[0]["differ"] == "-"
    assert all(float(number) < 1e-4 for number in rows[1]["differ"].split(", "))


def test_a_table_has_a_hundred_times_the_pairs_of_pairs_one_by_one(small, capsys):
    speed.main(["tables", *small])
    pairs, variants = rows_of(capsys.readouterr().out)
    assert pairs["name"] == variants["name"] == "DPO step, 228 mutations of 12 residues, float32"
    assert (pairs["unit"], variants["unit"]) == ("pairs", "variants")
    assert float(pairs["ratio"]) > 100 and float(variants["ratio"]) > 10


def test_a_row_of_sampling_for_each_model_length_and_batch(small, capsys):
    speed.main(["sample", "--batch", "1", "2", "--lengths", "20", "--sample_steps=2", *small])
    cases = [f"{model}, 20 residues, {batch} at a time, {dtype}" for batch in (1, 2)
             for model, dtypes in (("SEDD", ("float32", "bfloat16")),
                                   ("SUBS", ("float32", "bfloat16")), ("ProteinMPNN", ("float32",)))
             for dtype in dtypes]
    names = {row["name"] for row in rows_of(capsys.readouterr().out)}
    assert {f"drawing, {case}" for case in cases} <= names
    assert "drawing, SEDD, 2 to 20, 2 at a time, float32" in names and len(names) == 14


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
    table.add("row", "things", {"plain": lambda: Work(10),
                                ("", torch.float32): lambda: Work(30, 80.0)})
    row, = rows_of(capsys.readouterr().out)
    assert [row[key] for key in ("plain", "ours", "ratio", "mfu")] == ["2.5", "15", "6.00", "40%"]


@pytest.mark.slow
def test_two_checkouts_are_compared_row_by_row(capsys, monkeypatch):
    """Here one checkout with itself; a hidden size of its own for the test."""
    tiny = ["model.hidden_size=16", "model.n_blocks=1", "model.n_heads=1", "data.demo_proteins=200"]
    monkeypatch.setattr(against, "ROWS", {"SEDD": ("sedd", "train_sedd_ddp", "sedd_demo.yaml",
                                                   [*against.SEDD, *tiny])})
    speed.main(["--against", str(ROOT), "--device=cpu", "--repeats=2"])
    last = capsys.readouterr().out.splitlines()[-1]
    numbers = re.match(r"\| SEDD \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \(", last).groups()
    assert all(float(number) > 0 for number in numbers)


# ---- speed --all ----

PASS = Part("good", command(["-c", "print('all is well')"]), 300)
FAIL = Part("bad", command(["-c", "print('no'); exit(3)"]), 300)
SLEEP = "import time; print('here', flush=True); time.sleep(1000)"
HANG = Part("slow", command(["-c", SLEEP]), 5)
TABLE = Part("speed x", command(["-c", "print('a card, torch 2\\n\\n| per second | plain |\\n"
                                 "|---|---|\\n| one | 1 |')"]), 300)


def outcomes(folder):
    """{part: (outcome, found)} of the report"""
    lines = (folder / "report.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines
            if re.match(r"\| .* \| (PASS|FAIL) \|", line)]
    return {name: (outcome, found) for name, outcome, _, found in rows}


def test_a_part_that_fails_does_not_keep_the_others_from_being_tried(tmp_path):
    assert run_parts([FAIL, PASS], tmp_path, 600) == 3
    assert outcomes(tmp_path) == {"bad": ("FAIL", "exit code 3; last line: no"),
                                  "good": ("PASS", "all is well")}
    assert run_parts([PASS], tmp_path, 600) == 0


def test_a_part_that_hangs_is_ended_at_its_limit(tmp_path):
    assert run_parts([HANG], tmp_path, 600) == 3
    assert outcomes(tmp_path)["slow"] == ("FAIL", "not done after 5 s; last line: here")


def test_no_part_begins_after_the_time_of_all(tmp_path):
    assert run_parts([PASS], tmp_path, 0.0) == 3
    assert outcomes(tmp_path) == {"good": ("FAIL", "no time was left")}


def test_the_rows_of_several_tables_become_one_table(tmp_path, capsys):
    assert run_parts([TABLE, PASS, TABLE], tmp_path, 600) == 0
    assert capsys.readouterr().out.splitlines()[:7] == [
        "a card, torch 2", "", "| per second | plain |", "|---|---|", "| one | 1 |", "| one | 1 |",
        ""]


def test_all_parts_together_take_at_most_nine_minutes(tmp_path):
    for device in ("cpu", "cuda", "xpu"):
        assert sum(part.limit for part in speed_all.parts_on(device, tmp_path)) <= 560


TINY = ["--config", ROOT / "configs" / "sedd_demo.yaml", "--device=cpu", "training.n_iters=40",
        "training.snapshot_freq=2", "training.eval_freq=40", "training.batch_size=2",
        "training.eval_samples=1", "data.demo_proteins=200", "model.hidden_size=16",
        "model.n_blocks=1", "model.n_heads=1", "monitoring.n_samples=1"]


@pytest.mark.slow
def test_a_run_that_was_killed_and_continued_has_the_weights_of_the_undisturbed_one(tmp_path):
    run = resumed_run([ROOT / "train_sedd_ddp.py", *TINY, "--work_dir"], tmp_path, "sedd", "cpu")
    assert run_parts([Part("sedd", run, 600)], tmp_path, 600) == 0, (
        tmp_path / "sedd.log").read_text()
    outcome, found = outcomes(tmp_path)["sedd"]
    assert outcome == "PASS" and "continued: weights equal to the bit" in found


def test_weights_differ_by_the_relative_norm_of_their_difference(tmp_path):
    for name, weights in (("a", {"w": [3.0, 0.0], "b": [4.0]}),
                          ("b", {"w": [3.0, 0.3], "b": [4.4]})):
        state = {key: torch.tensor(values) for key, values in weights.items()}
        save_checkpoint(str(tmp_path / name / "checkpoints" / "last.pt"), Ddp(), model=state)
    found = speed_all.weights_differ(tmp_path / "a", tmp_path / "b")
    assert found == pytest.approx(0.5 / 5.0)


def test_a_world_of_one_rank_has_the_gradient_of_a_step_without_a_group(capsys):
    speed_all.check_world("cpu")
    assert capsys.readouterr().out.startswith("gloo: a world of one rank, gradient within")
