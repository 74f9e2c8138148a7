"""bench/sedd.py: the plain step is the published one, and what is printed."""
import re

import pytest
import torch

from bench import common, sedd
from sedd.model import SEDD, load_official
from sedd_cases import entries, near


@pytest.mark.parametrize("noise_name", ["loglinear", "geometric"])
def test_the_plain_step_agrees_with_the_official_code(shared, noise_name):
    fixture = torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)
    case = entries(fixture, "absorb", noise_name)
    sizes = [fixture[f"cfg_{key}"] for key in ("hidden", "blocks", "heads", "cond")]
    model = SEDD(entries(fixture, "absorb")["vocab"], *sizes).eval()
    weights = entries(fixture, "absorb", "model")   # their names are those of a model in DDP
    load_official(model, {f"module.{name}": value for name, value in weights.items()})
    log_score = sedd.plain_log_score(model, case["xt"], case["sigma"])
    loss = sedd.plain_loss(log_score, case["sigma"], case["dsigma"], case["xt"], case["x0"])
    near(loss, case["loss"], rtol=1e-4, atol=1e-3)
    loss.mean().backward()
    near(torch.stack([p.grad.norm() for p in model.parameters()]), case["grad_norms"], rtol=1e-3)
    for parameter, key in ((model.vocab_embed.embedding, "grad_embed"),
                           (model.output_layer.linear.weight, "grad_out_weight")):
        assert (parameter.grad - case[key]).norm() < 1e-4 * case[key].norm()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A small network and few proteins, in a folder of its own."""
    monkeypatch.setattr(sedd, "NETWORK", dict(hidden_size=16, n_blocks=1, n_heads=2, dropout=0.1))
    monkeypatch.setattr(sedd, "N_MADE", 300)
    monkeypatch.chdir(tmp_path)


def rows_of(text):
    """{title: (plain, ours, ratio, loss differs, norm)} of the printed table"""
    found = re.findall(r"^(\w+, .+?)  +([\d,]+) +([\d,]+) +([\d.]+)x  \(.*?\) +(\S+) +(\S+)$",
                       text, re.M)
    return {title: [float(figure.replace(",", "")) for figure in figures]
            for title, *figures in found}


def test_every_turn_is_a_line_on_stderr(small, capsys):
    sedd.main(["--repeats=3"])
    err = capsys.readouterr().err
    for name in ("made", "equal"):
        turns = [f"{name}: turn {k} of 3" for k in (1, 2, 3)]
        assert [line for line in err.splitlines() if line.startswith(f"{name}: turn")] == turns


def test_both_dtypes_are_compared_where_the_processor_has_both(small, monkeypatch, capsys):
    monkeypatch.setattr(sedd, "computes_in_bfloat16", lambda device: True)
    sedd.main(["--repeats=1"])
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == [f"{name}, {how}" for name in ("made", "equal") for how in
                          ("float32", "bfloat16", "bfloat16 against float32")]
    assert max(rows["made, float32"][3:] + rows["equal, float32"][3:]) < 1e-4
    assert rows["made, bfloat16"][3:] < [0.05, 0.05]


def test_bfloat16_is_left_out_where_it_would_be_emulated(small, monkeypatch, capsys):
    monkeypatch.setattr(common, "choose_dtype", lambda request, device: (torch.float32, "none"))
    sedd.main(["--repeats=1"])
    said = capsys.readouterr()
    assert list(rows_of(said.out)) == ["made, float32", "equal, float32"]
    assert "bfloat16 is left out: cpu has no native bfloat16" in said.err
