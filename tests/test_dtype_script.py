"""Does test_dtype.py notice what it is for? Its claims on this CPU are tests themselves: `pytest test_dtype.py`."""
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import test_dtype as script
from ddp_setup import Ddp
from launchers import clean_environment, run_ranks
from run_config import load_config
from sequence_data import DemoSource, collate
from train_sedd_ddp import Config, sample_proteins, to_device

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"native": "yes", "matmul": 0.0, "SEDD": (0.0, 0.0, 1), "ProteinMPNN": (0.0, 0.0, 1)}


def rows(seconds, **changes):
    """A table in which all is well; seconds: of a step of SEDD, per dtype; changes: to the rows of dtypes."""
    return {dtype: {**GOOD, "times": dict.fromkeys(("matmul", "SEDD", "ProteinMPNN"), t),
                    **changes.get(str(dtype)[6:], {})} for dtype, t in zip(script.DTYPES, seconds)}


@pytest.mark.parametrize("seconds, changes, expected", [
    ((2, 1, 0.5, 0.5), {}, "bfloat16"),
    ((2, 1, 1.2, 1.3), {}, "float32"),                                               # small models gain nothing
    ((2, 1, 0.5, 0.5), dict(bfloat16={"native": "no"}), "float16"),                  # older cards
    ((2, 1, 0.5, 0.5), dict(bfloat16={"native": "no"}, float16={"native": "no"}), "float32"),
    ((2, 1, 0.5, 0.5), dict(bfloat16={"error": "none"}, float16={"error": "none"}), "float32"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"SEDD": (0.001, float("nan"), 20)}), "float16"),
    ((2, 1, 0.5, 0.9), dict(bfloat16={"ProteinMPNN": (0.5, 0.001, 1)}), "float16")])
def test_the_setting_that_is_recommended_is_native_close_and_faster_and_a_config_takes_it(seconds, changes, expected):
    dtype, why = script.recommend(rows(seconds, **changes))
    assert str(dtype) == f"torch.{expected}" and why
    config = load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [f"memory.mixed_precision={expected}"])
    assert config.memory.mixed_precision == expected


@pytest.mark.parametrize("row, expected", [
    ({}, "PASS"), ({"SEDD": (0.0, 0.2, 1)}, "FAIL"), ({"SEDD": (float("nan"), 0.0, 1)}, "FAIL"),
    ({"SEDD": (0.0, float("inf"), 20)}, "FAIL"), ({"native": "yes", "error": "no kernel"}, "FAIL"),
    ({"native": "no", "error": "no kernel"}, "PASS")])
def test_an_error_that_is_large_or_not_finite_fails_and_a_dtype_that_nobody_promised_may_lack(row, expected):
    assert script.sedd_is_finite_and_close(Ddp(), rows((1, 1, 1, 1), bfloat16=row))[0] == expected


def test_scaling_another_dtype_or_not_float16_fails(monkeypatch):
    for on in ((torch.float16, torch.bfloat16), ()):
        monkeypatch.setattr(script, "grad_scaler",
                            lambda dtype, ddp: torch.amp.GradScaler("cpu", enabled=dtype in on))
        assert script.gradients_are_scaled_for_float16_alone(Ddp(), rows((1, 1, 1, 1)))[0] == "FAIL"


def without_sigma(model, batch):
    for module in model.modules():
        if hasattr(module, "adaLN_modulation"):
            torch.nn.init.zeros_(module.adaLN_modulation.weight)
    return model, batch


def test_a_sampler_that_passes_t_and_a_model_that_ignores_sigma_are_found(monkeypatch):
    assert script.generation_passes_sigma(Ddp(), None)[0] == "PASS"
    make, sample = script.make, script.sample
    monkeypatch.setattr(script, "make", lambda *a: without_sigma(*make(*a)))
    assert script.generation_passes_sigma(Ddp(), None)[0] == "FAIL"
    monkeypatch.undo()
    passes_t = lambda f, *a, **k: sample(lambda xt, sigma: f(xt, -torch.expm1(-sigma)), *a, **k)
    monkeypatch.setattr(script, "sample", passes_t)
    status, figure = script.generation_passes_sigma(Ddp(), None)
    assert status == "FAIL" and "not sigma(t)" in figure


def test_a_model_that_takes_real_tokens_or_minds_other_dtypes_is_found(monkeypatch):
    low = rows((1, 1, 1, 1))
    make, step, *sizes = script.MODELS["SEDD"]
    lenient = lambda model, batch, *a: step(model, [batch[0].long(), batch[1].long(), *batch[2:]], *a)
    monkeypatch.setitem(script.MODELS, "SEDD", (make, lenient, *sizes))
    status, figure = script.tokens_stay_integers(Ddp(), low)
    assert status == "FAIL" and "SEDD took torch.bfloat16" in figure
    naive = lambda model, batch, dtype, ddp: script.Naive().to(model.vocab_embed.embedding.dtype)(batch[0], batch[2])
    monkeypatch.setitem(script.MODELS, "SEDD", (make, lambda *a: (naive(*a), 0), *sizes))
    status, figure = script.dtypes_of_weights_and_inputs_may_differ(Ddp(), low)
    assert status == "FAIL" and "same dtype" in figure


def test_the_report_fits_a_terminal_and_ends_with_the_setting(monkeypatch, capsys):
    for name, (make, step, size, *_) in script.MODELS.items():   # a step in a dtype that is not native may take long
        monkeypatch.setitem(script.MODELS, name, (make, step, size, size, size))
    assert script.report(Ddp(), limit=0.02) == []
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[3:7]] == ["float64", "float32", "bfloat16", "float16"]
    assert sum(line.startswith(("PASS ", "SKIP ")) for line in lines) == len(script.CLAIMS)
    setting = lines[-1].removeprefix("recommended: ").replace(": ", "=")
    load_config(Config, ROOT / "configs" / "sedd_demo.yaml", [setting])


def test_where_the_models_do_not_fit_their_speed_is_told_to_be_unknown(monkeypatch, capsys):
    make = script.make

    def out_of_memory(name, size):
        if size == "large":
            raise torch.OutOfMemoryError("out of memory")
        return make(name, size)
    monkeypatch.setattr(script, "make", out_of_memory)
    for name, (*most, _, _) in script.MODELS.items():
        monkeypatch.setitem(script.MODELS, name, (*most, "large", "large"))
    found = script.measure(Ddp(), limit=0.02)
    assert all(row["times"].keys() == {"matmul"} for row in found.values())
    assert "SEDD could not be timed: out of memory" in capsys.readouterr().err
    dtype, why = script.recommend({dtype: {**row, "native": "yes"} for dtype, row in found.items()})
    assert dtype == torch.float32 and "SEDD's speed in bfloat16 was not measured" in why and " x " not in why


@pytest.mark.parametrize("word", ["--seconds=0", "--seconds=-1", "--seconds=inf", "--seconds=x", "--secnds=1"])
def test_arguments_that_measure_nothing_or_are_unknown_are_refused(word):
    with pytest.raises(ValueError, match="command line: .*--sec"):
        script.read_arguments([word])


def test_wrong_arguments_are_told_once_and_end_every_rank_with_an_error(tmp_path):
    done = run_ranks("torchrun", 2, [ROOT / "test_dtype.py", "--device=cpu", "--seconds=nan"], tmp_path, timeout=240)
    assert done.stderr.count("error: command line: --seconds is nan") == 1 and "recommended" not in done.stdout
    codes = sorted(map(int, re.findall(r"exitcode  : (-?\d+)", done.stderr)))
    assert codes in ([2, 2], [-signal.SIGTERM, 2]), done.text   # torchrun ends who is a moment later than the first


FAULTY = """
import sys
sys.path.insert(0, {root!r})
import test_dtype
def claim(ddp, rows):
    return ("FAIL", "its figure") if ddp.rank == 1 else ("PASS", "")
test_dtype.CLAIMS = {{"good": lambda ddp, rows: ("PASS", "as it should"), "odd": claim}}
test_dtype.measure = lambda ddp, limit: {rows}
test_dtype.cli(["--device=cpu"])
"""


def test_a_claim_that_fails_on_one_rank_fails_on_all_and_is_printed_once(tmp_path):
    table = repr(rows((2, 1, 0.5, 0.5))).replace("torch.", "test_dtype.torch.")
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT), rows=table))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(tmp_path / "faulty.py")], cwd=tmp_path, env=clean_environment(), text=True, timeout=240,
                          capture_output=True)
    assert done.stdout.count("PASS  good         as it should") == 1
    assert done.stdout.count("FAIL  odd          on rank 1: its figure") == 1
    assert done.stdout.splitlines()[-1] == "recommended: memory.mixed_precision: bfloat16"
    assert f"exitcode  : {script.FAILED}" in done.stderr


# What the script cannot import: the way from the data to the models, and to generation, in training.


def test_collate_and_the_way_to_the_device_leave_tokens_integers():
    proteins = DemoSource(seed=0).sample(4, seed=0)
    x0, mask = collate(proteins, range(4))
    for dtype in script.DTYPES:
        sigma = torch.rand(4, dtype=torch.float64)
        batch = to_device(dict(x0=x0, xt=x0, mask=mask, sigma=sigma, dsigma=sigma), torch.device("cpu"), dtype)
        assert (batch["x0"].dtype, batch["xt"].dtype, batch["mask"].dtype) == (torch.int64, torch.int64, torch.bool)
        assert torch.equal(batch["x0"], x0)
        assert batch["sigma"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_in_training_gives_the_network_sigma_and_not_t(dtype):
    config = load_config(Config, ROOT / "configs" / "sedd_demo.yaml", ["monitoring.sample_steps=3"])
    model, _ = script.make("SEDD", (16, 1, 2, 8))
    given = []
    model.register_forward_pre_hook(lambda _, args: given.append(args[1][0].item()))
    lengths = torch.tensor([9, 12]).numpy()
    sample_proteins(model, config, script.GRAPH, script.NOISE, lengths, 0, Ddp(), dtype)
    expected = script.NOISE(torch.linspace(1, 1e-5, 4, dtype=torch.float64))[0]
    assert given == pytest.approx(expected.tolist(), rel=1e-5)
