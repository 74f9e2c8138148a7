"""bench/__main__.py and the options of all commands: help, refusals, ranks of their own."""
import shlex

import pytest

import bench.__main__
from bench.__main__ import COMMANDS
from launchers import ROOT, fork_ranks
from tool_runs import assert_refused, run_tool

CONFIG = ROOT / "configs" / "sedd_demo.yaml"


def test_without_a_command_every_command_is_listed_with_what_its_file_says(tmp_path):
    asked = run_tool(bench.__main__.main, ["--help"], tmp_path)
    none = run_tool(bench.__main__.main, [], tmp_path)
    assert (asked.code, none.code, none.out) == (0, 2, asked.out)
    for name, module in COMMANDS.items():
        assert f"{name} " in asked.out and module.__doc__.splitlines()[0] in asked.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name, tmp_path):
    ran = run_tool(bench.__main__.main, [name, "--help"], tmp_path)
    assert ran.code == 0 and ran.out.startswith(f"usage: python -m bench {name} "), ran.text


@pytest.mark.parametrize("words, named", [
    ("sedd", "sedd"), ("scale --ranks=1,x", "1,x"), ("scale --ranks=1,2,3", "2 3"),
    ("scale --json=bad.json", "bad.json"), ("scale dpo", "--ranks"),
    (f"scale --config={CONFIG}", "--ranks"), ("scale --steps=0 --ranks=1", "--steps 0"),
    ("speed optim.lr=1", "optim.lr=1 --config"), ("speed seed", "seed"),
    ("speed --repeats=0", "--repeats 0"), ("speed sample --batch=0", "--batch 0")])
def test_what_a_bench_cannot_do_is_refused_before_it_measures(words, named, tmp_path):
    (tmp_path / "bad.json").write_text("[1]")
    assert_refused(bench.__main__.main, words, named, tmp_path)


def test_data_that_a_bench_does_not_find_are_refused_before_it_measures(tmp_path):
    words = shlex.split("speed sedd --device=cpu --matmul=64 --data=no.fasta")
    ran = run_tool(bench.__main__.main, words, tmp_path)
    assert ran.code == 2 and "no.fasta" in ran.err and ran.files == {}, ran.text
    assert "float32 |" not in ran.out, ran.out


def test_speed_refuses_two_ranks(tmp_path):
    done = fork_ranks(2, ["-m", "bench", "speed", "sedd", "--device=cpu"], tmp_path)
    assert done.returncode == 2 and "2 ranks" in done.text, done.text
