"""Does test_dtype.py notice what it is for? Its own checks: `pytest test_dtype.py`."""
import pytest
import torch

import test_dtype as script
from ddp_setup import Ddp
from launchers import ROOT, fork_ranks
from test_dtype import Result, Row
from train_sedd_ddp import Config
from training.config import load_config

NAN = float("nan")
NO_ERRORS = dict.fromkeys(("SEDD output", "SEDD gradient", "ProteinMPNN output",
                           "ProteinMPNN gradient"), 0.0)
TRAINED = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
MISSING = "RuntimeError: no kernel of this name is there for 'Half' or for anything like it"


def rows(seconds=(1, 1, 1, 1), **changes):
    """A table in which all is well. seconds: of a step, per dtype. changes: of the rows' fields,
    by dtype."""
    table = {}
    for dtype, time in zip(script.DTYPES, seconds):
        fields = {"errors": NO_ERRORS, "seconds": {"SEDD": time, "ProteinMPNN": time}}
        table[dtype] = Row(**{**fields, **changes.get(script.short_name(dtype), {})})
    return table


def config_with(setting):
    return load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [setting])


def test_the_report_fits_a_terminal_has_a_line_for_each_dtype_and_ends_with_the_setting(
        monkeypatch, capsys):
    for name, network in script.NETWORKS.items():   # a step in a dtype not native may take long
        small = network._replace(size_on_cpu=network.size_for_errors)
        monkeypatch.setitem(script.NETWORKS, name, small)
    monkeypatch.setattr(script, "matmul_rows", lambda device: 64)
    monkeypatch.setattr(script, "SECONDS", 0.01)
    assert script.report(Ddp()) == []
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[1] for line in lines if line.startswith("PASS")]
    assert names == ["float64", "float32", "bfloat16", "float16"]
    config_with(lines[-1].removeprefix("recommended: ").replace(": ", "="))


def test_a_dtype_that_is_missing_has_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(script, "measure_errors", lambda ddp: rows(float16={"missing": MISSING}))
    monkeypatch.setattr(script, "measure_speeds", lambda rows, ddp: None)
    assert script.report(Ddp()) == []
    line, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SKIP")]
    assert "float16" in line and "not on this device: RuntimeError: no kernel" in line


def test_a_measured_rate_is_printed_as_a_setting_of_training():
    """2.5e11 FLOP/s are 0.25 TFLOP/s."""
    line, = script.describe_rates(rows(float32={"rate": 2.5e11}))
    setting = line.partition(": ")[2].replace(": ", "=")
    assert config_with(setting).monitoring.matmul_tflops == 0.25


def test_wrong_arguments_end_every_rank_with_an_error_and_measure_nothing(tmp_path):
    done = fork_ranks(2, [ROOT / "test_dtype.py", "--device=cpu", "--speed=high"], tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.text
    assert "--speed=high" in done.stderr and list(tmp_path.iterdir()) == [], done.text


FAULTY = """
import sys
sys.path.insert(0, {root!r})
import test_dtype
from test_dtype import Result, Row, torch
def check(dtype, rows, ddp):
    if ddp.rank == 1 and dtype == torch.float16:
        return Result("FAIL", "    its figure")
    return Result("PASS", "")
test_dtype.check_dtype = check
test_dtype.measure_errors = lambda ddp: {rows}
test_dtype.measure_speeds = lambda *arguments: None
test_dtype.cli(["--device=cpu"])
"""


def test_a_dtype_that_fails_on_one_rank_fails_on_all_and_is_printed_once(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT), rows=rows((2, 1, 0.5, 0.5))))
    done = fork_ranks(2, ["faulty.py"], tmp_path)
    assert done.stdout.count("FAIL  float16      its figure (on rank 1)") == 1, done.text
    assert done.stdout.splitlines()[-1] == "recommended: memory.mixed_precision: bfloat16"
    assert done.returncode == script.FAILED


@TRAINED
@pytest.mark.parametrize("name", NO_ERRORS)
@pytest.mark.parametrize("error", [0.2, NAN])
def test_an_error_that_is_large_or_not_finite_fails(dtype, name, error):
    table = rows(**{script.short_name(dtype): {"errors": {**NO_ERRORS, name: error}}})
    result = script.check_dtype(dtype, table, Ddp())
    assert result.status == "FAIL"
    assert result.text.endswith(f": {name}")
    assert script.check_dtype(dtype, rows(), Ddp()).status == "PASS"


@TRAINED
def test_only_a_dtype_that_training_needs_must_be_there(dtype):
    of_training, _ = script.choose_dtype(True, Ddp().device)
    table = rows(**{script.short_name(dtype): {"missing": MISSING}})
    expected = "FAIL" if dtype in (torch.float32, of_training) else "SKIP"
    assert script.check_dtype(dtype, table, Ddp()).status == expected


@pytest.mark.parametrize("seconds, changes, expected", [
    ((2, 1, 0.5, 0.5), {}, "bfloat16"),
    ((2, 1, 1.2, 1.3), {}, "float32"),                                  # small models gain nothing
    ((2, 1, 1.5, 0.5), {}, "float16"),                                  # older cards
    ((2, 1, 0.5, 0.5), {"bfloat16": "SKIP", "float16": "SKIP"}, "float32"),
    ((2, 1, 0.5, 0.9), {"bfloat16": "FAIL"}, "float16")])
def test_the_recommended_setting_has_passed_and_is_faster_and_a_config_takes_it(
        seconds, changes, expected):
    results = {dtype: Result(changes.get(script.short_name(dtype), "PASS"), "")
               for dtype in script.DTYPES}
    dtype = script.recommend(rows(seconds), results)
    assert str(dtype) == f"torch.{expected}"
    assert config_with(f"memory.mixed_precision={expected}").memory.mixed_precision == expected
