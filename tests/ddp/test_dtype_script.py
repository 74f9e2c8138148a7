"""Does test_dtype.py notice what it is for? Its own claims: `pytest test_dtype.py`."""
import numpy as np
import pytest
import torch

import test_dtype as script
from ddp_setup import Ddp
from launchers import ROOT, fork_ranks
from training.config import load_config
from sedd.batches import to_device
from sedd.evaluation import sample_proteins
from test_dtype import NetworkErrors as Errors
from test_dtype import Row
from train_sedd_ddp import Config

NAN = float("nan")


def rows(seconds=(1, 1, 1, 1), **changes):
    """A table in which all is well. seconds: of a step, per dtype. changes: by dtype, the error of
    its row, or the errors of networks."""
    exact = dict.fromkeys(("SEDD", "ProteinMPNN"), Errors(0.0, 0.0))
    table = {}
    for dtype, time in zip(script.DTYPES, seconds):
        networks = {**exact, **changes.get(script.short_name(dtype), {})}
        table[dtype] = Row(networks.pop("error", None), 0.0, networks,
                           dict.fromkeys(("matmul", *exact), time))
    return table


def config_with(setting):
    return load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [setting])


def test_a_sampler_that_passes_t_and_a_model_that_ignores_sigma_are_found(monkeypatch):
    sample = script.sample

    def sample_by_t(log_score, *args, **kwargs):
        return sample(lambda xt, sigma: log_score(xt, -torch.expm1(-sigma)), *args, **kwargs)

    assert script.generation_passes_sigma(Ddp(), None)[0]
    with monkeypatch.context() as patched:    # all noise levels look alike
        patched.setattr("sedd.model.SigmaEmbedding.forward",
                        lambda self, sigma: self.mlp(torch.ones(len(sigma), 256)))
        assert not script.generation_passes_sigma(Ddp(), None)[0]
    monkeypatch.setattr(script, "sample", sample_by_t)
    holds, figure = script.generation_passes_sigma(Ddp(), None)
    assert not holds and "not sigma(t)" in figure


def test_a_model_that_takes_real_tokens_is_found(monkeypatch):
    def step(model, batch, *arguments):
        return script.sedd_step(model, [batch[0].long(), batch[1].long(), *batch[2:]], *arguments)

    monkeypatch.setitem(script.NETWORKS, "SEDD", script.NETWORKS["SEDD"]._replace(step=step))
    holds, figure = script.tokens_stay_integers(Ddp(), rows())
    assert not holds and "SEDD took real tokens" in figure


def test_the_report_names_every_claim_and_ends_with_the_setting(monkeypatch, capsys):
    for name, network in script.NETWORKS.items():   # a step in a dtype not native may take long
        small = network._replace(size_on_cpu=network.size_for_errors)
        monkeypatch.setitem(script.NETWORKS, name, small)
    monkeypatch.setattr(script, "matmul_rows", lambda device: 64)
    assert script.report(Ddp(), limit=0.02) == []
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("PASS ", "SKIP ")) for line in lines) == len(script.CLAIMS)
    config_with(lines[-1].removeprefix("recommended: ").replace(": ", "="))


def test_a_measured_rate_is_printed_as_a_setting_of_training():
    """2.5e11 FLOP/s are 0.25 TFLOP/s."""
    table = rows()
    table[torch.float32].rate = 2.5e11
    line, = script.describe_rates(table)
    setting = line.partition(": ")[2].replace(": ", "=")
    assert config_with(setting).monitoring.matmul_tflops == 0.25


def test_wrong_arguments_end_every_rank_with_an_error_and_measure_nothing(tmp_path):
    done = fork_ranks(2, [ROOT / "test_dtype.py", "--device=cpu", "--seconds=nan"], tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.text
    assert "error: command line: --seconds is nan" in done.stderr


FAULTY = """
import sys
sys.path.insert(0, {root!r})
import test_dtype
from test_dtype import NetworkErrors, Row, torch
def claim(ddp, rows):
    return ddp.rank != 1, "its figure" if ddp.rank == 1 else ""
test_dtype.CLAIMS = {{"odd": claim}}
test_dtype.measure_errors = lambda ddp: {rows}
test_dtype.measure_speeds = lambda *arguments: None
test_dtype.cli(["--device=cpu"])
"""


def test_a_claim_that_fails_on_one_rank_fails_on_all_and_is_printed_once(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT), rows=rows((2, 1, 0.5, 0.5))))
    done = fork_ranks(2, ["faulty.py"], tmp_path)
    assert done.stdout.count("FAIL  odd          on rank 1: its figure") == 1
    assert done.stdout.splitlines()[-1] == "recommended: memory.mixed_precision: bfloat16"
    assert done.returncode == script.FAILED


def test_on_the_way_to_the_device_tokens_stay_integers_and_noise_levels_exact():
    batch = dict(x0=torch.tensor([[19]]), sigma=torch.rand(1).double(), dsigma=torch.rand(1))
    for dtype in script.DTYPES:
        moved = to_device(batch, "cpu", dtype)
        exact = torch.promote_types(dtype, torch.float32)
        assert [x.dtype for x in moved.values()] == [torch.int64, exact, exact]


def test_generation_in_training_gives_the_network_sigma_and_not_t():
    config = config_with("monitoring.sample_steps=3")
    sigmas = []
    model, _ = script.make("SEDD", (16, 1, 2, 8), "cpu")
    model.register_forward_pre_hook(lambda _, args: sigmas.append(args[1][0].item()))
    sample_proteins(model, config, script.GRAPH, script.NOISE, np.array([9, 12]), 0, Ddp(),
                    torch.bfloat16)
    expected = script.NOISE(torch.linspace(1, 1e-5, 4, dtype=torch.float64))[0]
    assert sigmas == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("change, expected", [
    ({}, True), ({"SEDD": Errors(0.0, 0.2)}, False), ({"SEDD": Errors(NAN, 0.0)}, False),
    ({"error": "no kernel"}, True)])
def test_an_error_that_is_large_or_not_finite_fails_but_not_a_dtype_that_is_not_there(
        change, expected):
    for dtype in ("bfloat16", "float16", "float32"):
        needed = dtype in ("float32", script.short_name(script.choose_dtype(True, Ddp().device)[0]))
        holds, _ = script.sedd_is_finite_and_close(Ddp(), rows(**{dtype: change}))
        assert holds == (expected and not (needed and "error" in change))


@pytest.mark.parametrize("seconds, changes, expected", [
    ((2, 1, 0.5, 0.5), {}, "bfloat16"),
    ((2, 1, 1.2, 1.3), {}, "float32"),                                  # small models gain nothing
    ((2, 1, 1.5, 0.5), {}, "float16"),                                  # older cards
    ((2, 1, 0.5, 0.5), dict(bfloat16={"error": "none"}, float16={"error": "none"}), "float32"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"SEDD": Errors(0.001, NAN)}), "float16"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"ProteinMPNN": Errors(0.5, 0.001)}), "float16")])
def test_the_recommended_setting_is_close_and_faster_and_a_config_takes_it(
        seconds, changes, expected):
    dtype, reason = script.recommend(rows(seconds, **changes))
    assert str(dtype) == f"torch.{expected}" and reason
    assert config_with(f"memory.mixed_precision={expected}").memory.mixed_precision == expected
