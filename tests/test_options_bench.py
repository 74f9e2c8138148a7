"""Every option of `python -m bench speed` and `scale`, once, with its effect on what is measured.

Slow: each command computes twice, without the option and with it."""
import re

import pytest
import torch

from bench import scale, speed
from launchers import ROOT
from mpnn_cases import SMALL, changed, write
from tool_runs import run_tool

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "sedd_demo.yaml"
OF_CONFIG = "model.hidden_size=16 model.n_blocks=1 training.batch_size=2 data.max_length=40"
SPEED = "--repeats=1 --matmul=64"
STEP = f"sedd {SPEED}"
SAMPLE = f"sample {SPEED} --lengths 9 --batch 1"
TINY = ("model.hidden_size=16 model.n_blocks=1 model.n_heads=1 model.cond_dim=8 "
        "data.max_length=64 data.demo_proteins=300 --steps 1 --repeats 1")
TOKENS = "training.tokens_per_batch=256"


# ---- effects: of a run without the option, and of a run with it ----

def computes_more(without, ran):
    assert ran.calls > without.calls


def is_refused(without, ran):
    assert ran.code != 0


def measures(pattern):
    """The output has this pattern with the option alone."""
    def check(without, ran):
        assert re.search(pattern, ran.text), ran.text
        assert not re.search(pattern, without.text), without.text
    return check


# {option: (words that it is added to, effect)}
SPEED_ROWS = {
    "--lengths 7": (f"{SAMPLE} --sample_steps 1", measures("SEDD, 7 residues, ")),
    "--batch 2": (f"{SAMPLE} --sample_steps 1", measures(", 2 at a time, ")),
    "--sample_steps 9": (f"{SAMPLE} --sample_steps 2", computes_more),
    "--repeats 3": (f"{SAMPLE} --sample_steps 2", computes_more),
    "--steps 3": (f"{STEP} --config {CONFIG} {OF_CONFIG}", computes_more),
    "--data p.fasta": (f"{STEP} --config {CONFIG} {OF_CONFIG}", measures("SEDD step, 0 M, p, ")),
    f"--config {CONFIG} {OF_CONFIG}": (STEP, measures(r"\A(?![\s\S]*, equal, )")),
    "--pairs pairs.json": (f"dpo {SPEED}", measures("DPO step, 1 pair, ")),
    "--matmul 32": (f"{SAMPLE} --sample_steps 1", measures("of 32 rows")),
    "--device cuda": (f"{SAMPLE} --sample_steps 1", is_refused)}
SCALE_ROWS = {
    "--ranks 1": (f"{TINY} {TOKENS}", measures(r"\| weak \| 1 \|")),
    "--steps 3": (f"{TINY} {TOKENS} --ranks 1", computes_more),
    "--repeats 3": (f"{TINY} {TOKENS} --ranks 1", computes_more),
    f"--config {CONFIG}": (f"{TINY} --ranks 1", measures("sedd_demo")),
    "--json new.json": (f"{TINY} {TOKENS} --ranks 1", measures(r"file new.json:\n\{")),
    "--device cuda": (f"{TINY} --ranks 1", is_refused),
    "--backend nccl": (f"{TINY} --ranks 1", is_refused)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of proteins and pairs. Networks are small, and `scale` has its rank here."""
    monkeypatch.setattr(speed, "NETWORK", dict(hidden_size=16, n_blocks=1, n_heads=2, dropout=0.1))
    monkeypatch.setattr(speed, "DPO_CASES", [(1, "random", torch.float32)])
    for name, value in {"N_MADE": 300, "MADE_RESIDUES": 30, "TABLE_RESIDUES": 12}.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(speed, "measure_matmul", lambda rows, *_: print(f"of {rows} rows") or 1e12)
    monkeypatch.setattr(scale, "run_ranks", run_here)
    (tmp_path / "p.fasta").write_text("".join(f">{k}\nMKTAYIAKQR{'ACDEFGHIKL' * k}\n"
                                              for k in range(1, 9)))
    (tmp_path / "small.pdb").write_text(SMALL.pdb())
    write(tmp_path, [changed(), changed(unpreferred_seq="MWXXVIA")])
    return tmp_path


def run_here(command, ranks):
    """In place of launch.run_ranks: the command of one rank, in this process."""
    assert command[:4] == ["-u", "-m", "bench", "scale"] and "--measure" in command
    scale.measure_here(*scale.read_arguments(command[4:]))
    return 0


@pytest.mark.parametrize("option", SPEED_ROWS)
def test_an_option_of_speed_has_its_effect(option, folder):
    words, effect = SPEED_ROWS[option]
    effect(run_tool(speed.main, words, folder), run_tool(speed.main, f"{words} {option}", folder))


@pytest.mark.parametrize("option", SCALE_ROWS)
def test_an_option_of_scale_has_its_effect(option, folder):
    words, effect = SCALE_ROWS[option]
    effect(run_tool(scale.main, words, folder), run_tool(scale.main, f"{words} {option}", folder))


@pytest.mark.parametrize("main, rows", [(speed.main, SPEED_ROWS), (scale.main, SCALE_ROWS)])
def test_every_option_has_a_row(main, rows, tmp_path):
    named = {"--help", *(option.split()[0] for option in rows)}
    if main is scale.main:
        named.add("--measure")      # internal: run_here is given it by every row
    assert set(re.findall(r"(?<![\w-])--\w+", run_tool(main, "--help", tmp_path).out)) == named
