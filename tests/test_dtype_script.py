"""Does test_dtype.py notice what it is for? Its own claims: `pytest test_dtype.py`."""
import dataclasses

import pytest
import torch

import test_dtype as script
from ddp_setup import Ddp
from launchers import ROOT, fork_ranks
from run_config import load_config
from sequence_data import N_TOKENS, DemoSource, collate
from test_dtype import NetworkErrors as Errors
from test_dtype import Row
from sedd_eval import sample_proteins, to_device
from train_sedd_ddp import Config

NAN, INFINITE = float("nan"), float("inf")
EXACT = dict.fromkeys(("SEDD", "ProteinMPNN"), Errors(0.0, 0.0, 1))


def rows(seconds=(1, 1, 1, 1), **changes):
    """A table in which all is well.

    seconds: of a step of SEDD, per dtype. changes: by dtype, fields of its row; a network's name
    stands for its errors.
    """
    table = {}
    for dtype, time in zip(script.DTYPES, seconds):
        change = changes.get(script.short_name(dtype), {})
        networks = {name: change.pop(name, errors) for name, errors in EXACT.items()}
        times = dict.fromkeys(("matmul", *EXACT), time)
        table[dtype] = dataclasses.replace(Row(None, 0.0, networks, times), **change)
    return table


def config_with(setting):
    """The configuration of SEDD with memory.mixed_precision as recommended."""
    return load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [setting])


def test_a_sampler_that_passes_t_and_a_model_that_ignores_sigma_are_found(monkeypatch):
    make, sample = script.make, script.sample

    def make_without_sigma(*args):
        model, batch = make(*args)
        for module in model.modules():
            if hasattr(module, "adaLN_modulation"):
                torch.nn.init.zeros_(module.adaLN_modulation.weight)
        return model, batch

    def sample_by_t(log_score, *args, **kwargs):
        return sample(lambda xt, sigma: log_score(xt, -torch.expm1(-sigma)), *args, **kwargs)

    assert script.generation_passes_sigma(Ddp(), None)[0] == "PASS"
    with monkeypatch.context() as patched:
        patched.setattr(script, "make", make_without_sigma)
        assert script.generation_passes_sigma(Ddp(), None)[0] == "FAIL"
    monkeypatch.setattr(script, "sample", sample_by_t)
    status, figure = script.generation_passes_sigma(Ddp(), None)
    assert status == "FAIL" and "not sigma(t)" in figure


def test_the_report_names_every_claim_and_ends_with_the_setting(monkeypatch, capsys):
    for name, network in script.NETWORKS.items():   # a step in a dtype not native may take long
        small = network._replace(size_on_cpu=network.size_for_errors)
        monkeypatch.setitem(script.NETWORKS, name, small)
    assert script.report(Ddp(), limit=0.02) == []
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("PASS ", "SKIP ")) for line in lines) == len(script.CLAIMS)
    config_with(lines[-1].removeprefix("recommended: ").replace(": ", "="))


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
    return ("FAIL", "its figure") if ddp.rank == 1 else ("PASS", "")
test_dtype.CLAIMS = {{"odd": claim}}
test_dtype.measure = lambda ddp, limit: {rows}
test_dtype.cli(["--device=cpu"])
"""


def test_a_claim_that_fails_on_one_rank_fails_on_all_and_is_printed_once(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT), rows=rows((2, 1, 0.5, 0.5))))
    done = fork_ranks(2, ["faulty.py"], tmp_path)
    assert done.stdout.count("FAIL  odd          on rank 1: its figure") == 1
    assert done.stdout.splitlines()[-1] == "recommended: memory.mixed_precision: bfloat16"
    assert done.returncode == script.FAILED


# What the script cannot import: the way from the data to the models, and to generation.


def test_collate_and_the_way_to_the_device_leave_tokens_integers():
    x0, mask = collate(DemoSource(seed=0).sample(4, seed=0), range(4))
    for dtype in script.DTYPES:
        sigma = torch.rand(4, dtype=torch.float64)
        batch = to_device(dict(x0=x0, xt=x0, mask=mask, sigma=sigma, dsigma=sigma),
                          torch.device("cpu"), dtype)
        assert batch["x0"].dtype == batch["xt"].dtype == torch.int64
        assert batch["mask"].dtype == torch.bool and torch.equal(batch["x0"], x0)
        assert batch["sigma"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_in_training_gives_the_network_sigma_and_not_t(dtype):
    config, sigmas = config_with("monitoring.sample_steps=3"), []
    model, _ = script.make("SEDD", (16, 1, 2, 8))
    model.register_forward_pre_hook(lambda _, args: sigmas.append(args[1][0].item()))
    lengths = torch.tensor([9, 12]).numpy()
    assert script.GRAPH.vocab_size == N_TOKENS + 1      # with the mask, as in training
    sample_proteins(model, config, script.GRAPH, script.NOISE, lengths, 0, Ddp(), dtype)
    expected = script.NOISE(torch.linspace(1, 1e-5, 4, dtype=torch.float64))[0]
    assert sigmas == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("change, expected", [
    ({}, "PASS"), ({"SEDD": Errors(0.0, 0.2, 1)}, "FAIL"), ({"SEDD": Errors(NAN, 0.0, 1)}, "FAIL"),
    ({"SEDD": Errors(0.0, INFINITE, 20)}, "FAIL"), ({"error": "no kernel"}, "PASS")])
def test_an_error_that_is_large_or_not_finite_fails_but_not_a_dtype_that_is_not_there(
        change, expected):
    for dtype in ("bfloat16", "float16", "float32"):
        needed = dtype in ("float32", script.short_name(script.choose_dtype(True, Ddp().device)[0]))
        status, _ = script.sedd_is_finite_and_close(Ddp(), rows(**{dtype: dict(change)}))
        assert status == ("FAIL" if needed and "error" in change else expected)


@pytest.mark.parametrize("seconds, changes, expected", [
    ((2, 1, 0.5, 0.5), {}, "bfloat16"),
    ((2, 1, 1.2, 1.3), {}, "float32"),                                  # small models gain nothing
    ((2, 1, 1.5, 0.5), {}, "float16"),                                  # older cards
    ((2, 1, 0.5, 0.5), dict(bfloat16={"error": "none"}, float16={"error": "none"}), "float32"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"SEDD": Errors(0.001, NAN, 20)}), "float16"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"ProteinMPNN": Errors(0.5, 0.001, 1)}), "float16")])
def test_the_recommended_setting_is_close_and_faster_and_a_config_takes_it(
        seconds, changes, expected):
    dtype, reason = script.recommend(rows(seconds, **changes))
    assert str(dtype) == f"torch.{expected}" and reason
    assert config_with(f"memory.mixed_precision={expected}").memory.mixed_precision == expected
