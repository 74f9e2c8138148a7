"""Does test_dtype.py notice what it is for? Its own checks: `pytest test_dtype.py`."""
import pytest
import torch

import test_dtype as script
from ddp_setup import Ddp, grad_scaler
from launchers import ROOT, fork_ranks
from test_dtype import BFLOAT16, FLOAT16, FLOAT32, Result, Row
from training.config import load_config
from train_sedd_ddp import Config

NAN = float("nan")
MISSING = "RuntimeError: no kernel of this name is there for 'Half' or for anything like it"


def rows(seconds=(1, 1, 1, 1), **changes):
    """A table in which all is well. seconds: of a step, per dtype. changes: of the rows' fields,
    by dtype."""
    networks = dict.fromkeys(("SEDD", "ProteinMPNN"), [0.0, 0.0])
    table = {}
    for dtype, time in zip(script.DTYPES, seconds):
        fields = {"matmul": 0.0, "networks": networks, "seconds": dict.fromkeys(networks, time)}
        table[dtype] = Row(**{**fields, **changes.get(script.short_name(dtype), {})})
    return table


def config_with(setting):
    return load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [setting])


def test_a_sampler_that_passes_t_is_found(monkeypatch):
    sample = script.sample

    def sample_by_t(log_score, *args, **kwargs):
        return sample(lambda xt, sigma: log_score(xt, -torch.expm1(-sigma)), *args, **kwargs)

    assert script.check_sigma(rows(), Ddp()).status == "PASS"
    monkeypatch.setattr(script, "sample", sample_by_t)
    assert script.check_sigma(rows(), Ddp()).status == "FAIL"


def test_a_sampler_that_rounds_sigma_is_found(monkeypatch):
    sample = script.sample

    def sample_rounded(log_score, *args, **kwargs):
        return sample(lambda xt, sigma: log_score(xt, sigma.bfloat16()), *args, **kwargs)

    monkeypatch.setattr(script, "sample", sample_rounded)
    assert script.check_sigma(rows(), Ddp()).status == "FAIL"


@pytest.mark.parametrize("name, tokens", [("SEDD", 0), ("ProteinMPNN", 4)])
def test_tokens_in_another_dtype_are_found(name, tokens, monkeypatch):
    network = script.NETWORKS[name]

    def step(model, batch, dtype, ddp):
        batch = [*batch]
        batch[tokens] = batch[tokens].to(dtype)
        return network.step(model, batch, dtype, ddp)

    assert script.check_on_all_ranks(script.check_tokens, rows(), Ddp()).status == "PASS"
    monkeypatch.setitem(script.NETWORKS, name, network._replace(step=step))
    assert script.check_on_all_ranks(script.check_tokens, rows(), Ddp()).status == "FAIL"


def test_the_report_fits_a_terminal_names_every_check_and_ends_with_the_setting(
        monkeypatch, capsys):
    for name, network in script.NETWORKS.items():   # a step in a dtype not native may take long
        small = network._replace(size_on_cpu=network.size_for_errors)
        monkeypatch.setitem(script.NETWORKS, name, small)
    monkeypatch.setattr(script, "matmul_rows", lambda device: 64)
    monkeypatch.setattr(script, "SECONDS", 0.01)
    assert script.report(Ddp()) == []
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("PASS")] == list(script.CHECKS)
    config_with(lines[-1].removeprefix("recommended: ").replace(": ", "="))


def test_a_dtype_that_is_missing_has_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(script, "measure_errors", lambda ddp: rows(float16={"missing": MISSING}))
    monkeypatch.setattr(script, "measure_speeds", lambda rows, ddp: None)
    assert script.report(Ddp()) == []
    lines = capsys.readouterr().out.splitlines()
    line, = [line for line in lines if line.startswith("SKIP")]
    assert "float16" in line and "not on this device: RuntimeError: no kernel" in line
    assert max(map(len, lines)) <= 80


def test_a_measured_rate_is_printed_as_a_setting_of_training():
    """2.5e11 FLOP/s are 0.25 TFLOP/s."""
    line, = script.describe_rates(rows(float32={"rate": 2.5e11}))
    setting = line.partition(": ")[2].replace(": ", "=")
    assert config_with(setting).monitoring.matmul_tflops == 0.25


def test_wrong_arguments_end_every_rank_with_an_error_and_measure_nothing(tmp_path):
    done = fork_ranks(2, [ROOT / "test_dtype.py", "--device=cpu", "--speed=high"], tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.text
    assert "unrecognized arguments: --speed=high" in done.stderr


FAULTY = """
import sys
sys.path.insert(0, {root!r})
import test_dtype
from test_dtype import Result, Row, torch
def check(rows, ddp):
    return Result("FAIL", "its figure") if ddp.rank == 1 else Result("PASS", "")
test_dtype.CHECKS.update(odd=check)
test_dtype.measure_errors = lambda ddp: {rows}
test_dtype.measure_speeds = lambda *arguments: None
test_dtype.cli(["--device=cpu"])
"""


def test_a_check_that_fails_on_one_rank_fails_on_all_and_is_printed_once(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT), rows=rows((2, 1, 0.5, 0.5))))
    done = fork_ranks(2, ["faulty.py"], tmp_path)
    assert done.stdout.count("FAIL  odd       its figure (on rank 1)") == 1, done.text
    assert done.stdout.splitlines()[-1] == "recommended: memory.mixed_precision: bfloat16"
    assert done.returncode == script.FAILED


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("change", [
    {"matmul": 0.2}, {"networks": {"SEDD": [0.0, 0.2], "ProteinMPNN": [0.0, 0.0]}},
    {"networks": {"SEDD": [0.0, 0.0], "ProteinMPNN": [NAN, 0.0]}}])
def test_an_error_that_is_large_or_not_finite_fails(dtype, change):
    table = rows(**{script.short_name(dtype): change})
    assert script.check_dtype(dtype, table, Ddp()).status == "FAIL"
    assert script.check_dtype(dtype, rows(), Ddp()).status == "PASS"


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_only_a_dtype_that_training_needs_must_be_there(dtype):
    of_training, _ = script.choose_dtype(True, Ddp().device)
    table = rows(**{script.short_name(dtype): {"missing": MISSING}})
    expected = "FAIL" if dtype in (FLOAT32, of_training) else "SKIP"
    assert script.check_dtype(dtype, table, Ddp()).status == expected


@pytest.mark.parametrize("seconds, changes, expected", [
    ((2, 1, 0.5, 0.5), {}, "bfloat16"),
    ((2, 1, 1.2, 1.3), {}, "float32"),                                  # small models gain nothing
    ((2, 1, 1.5, 0.5), {}, "float16"),                                  # older cards
    ((2, 1, 0.5, 0.5), {"bfloat16": "SKIP", "float16": "SKIP"}, "float32"),
    ((2, 1, 0.5, 0.9), {"bfloat16": "FAIL"}, "float16")])
def test_the_recommended_setting_has_passed_and_is_faster_and_a_config_takes_it(
        seconds, changes, expected):
    results = {name: Result(changes.get(name, "PASS"), "") for name in script.CHECKS}
    dtype = script.recommend(rows(seconds), results)
    assert str(dtype) == f"torch.{expected}"
    assert config_with(f"memory.mixed_precision={expected}").memory.mixed_precision == expected


def test_gradients_are_scaled_for_float16_alone():
    scaled = [dtype for dtype in script.DTYPES if grad_scaler(dtype, Ddp()).is_enabled()]
    assert scaled == [FLOAT16]
