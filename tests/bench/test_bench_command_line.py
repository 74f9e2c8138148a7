"""bench/__main__.py and the options of all commands: help, refusals, ranks of their own."""
import pytest

from bench.__main__ import COMMANDS
from bench.common import CONFIGS
from launchers import ROOT, fork_ranks, run_ranks
from training_runs import command_lines


def test_without_a_command_every_command_is_listed_with_what_its_file_says(tmp_path):
    (code, out, _), (none, again, _) = command_lines("bench", [["--help"], []], tmp_path)
    assert code == 0 and none == 2 and again == out
    lines = [line.split(maxsplit=1) for line in out.splitlines()[2:]]
    assert dict(lines) == {name: module.__doc__.splitlines()[0]
                           for name, module in COMMANDS.items()}


def test_every_command_has_a_help_of_its_own(tmp_path):
    found = command_lines("bench", [[name, "--help"] for name in COMMANDS], tmp_path)
    for name, (code, out, _) in zip(COMMANDS, found):
        assert code == 0 and out.startswith(f"usage: python -m bench {name} "), out


def test_what_a_bench_cannot_do_is_refused_in_one_line_before_it_measures(tmp_path):
    (tmp_path / "bad.json").write_text("[1]")
    refused = {
        ("sed",): "found 'sed'; expected one of sedd, dpo, data, scale, card, learn, sample, "
                  "save, variants",
        ("scale", "--ranks=1,x"): "--ranks 1,x; expected numbers of ranks, such as 1,2,4,8",
        ("scale", "--ranks=1,2,3"): "2 does not divide 3; expected numbers that do",
        ("scale", "--json=bad.json"): "bad.json is no file that python -m bench scale wrote",
        ("scale", "--plot=no/x.png"): "--plot no/x.png: found no such folder",
        ("scale", "dpo"): "found what to measure without --ranks",
        ("scale", f"--config={CONFIGS / 'sedd_demo.yaml'}"):
            "found what to measure without --ranks",
        ("scale", "--steps=0", "--ranks=1"): "--steps is 0; expected more than 0",
        ("scale", "--latency_us=1"): "found one of --latency_us and --bandwidth_gbs",
        ("card", "--json=bad.json"): "bad.json is no file that python -m bench card wrote",
        ("card", "--data=no"): "--data no is not a folder",
        ("card", "--models=7m"): "--models: found 7m; expected 6m, 38m, 92m, dpo",
        ("sedd", "--backend=nccl"): "nccl does not serve cpu",
        ("sedd", "optim.lr=1"): "unrecognized arguments: optim.lr=1",
        ("sedd", "--data=no.fasta"): "no.fasta does not exist",
        ("sedd", "--repeats=0"): "--repeats is 0; expected at least 1",
        ("sample", "--models=x"): "--models: found x; expected sedd, subs, mpnn",
        ("sample", "--batch=0"): "--batch [0], --lengths [100, 400]; expected numbers",
        ("save", "--nproc=1"): "unrecognized arguments: --nproc=1",   # it started itself for ever
        ("save", "--folder=no"): "--folder no is no folder; expected one that exists",
        ("data", "--data=folder"): "unrecognized arguments: --data=folder"}
    found = command_lines("bench", [list(words) for words in refused], tmp_path)
    for (code, out, err), message in zip(found, refused.values()):
        assert code == 2 and message in err.splitlines()[-1], err
        assert "Traceback" not in err and "float32" not in out


@pytest.mark.parametrize("command", ["dpo", "sedd"])
def test_a_bench_that_compares_steps_refuses_two_ranks(command, tmp_path):
    done = fork_ranks(2, ["-m", "bench", command, "--device=cpu", "--repeats=1"], tmp_path)
    assert done.returncode == 2 and "found 2 ranks; expected one process" in done.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher, options", [("python", ["--nproc_per_node=2"]), ("mpich", []),
                                               ("openmpi", [])])
def test_ranks_of_a_launcher_or_of_its_own_find_the_package_from_another_folder(
        launcher, options, tmp_path):
    done = run_ranks(launcher, 2, ["-m", "bench", "save", CONFIGS / "sedd_demo.yaml", "--repeats=1",
                                   "--device=cpu", *options], tmp_path, {"PYTHONPATH": ROOT})
    assert done.returncode == 0 and "2 rank(s)" in done.stdout, done.text
