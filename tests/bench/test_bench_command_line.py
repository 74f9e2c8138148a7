"""bench/__main__.py and the options of all commands: help, refusals, ranks of their own."""
from bench.__main__ import COMMANDS
from launchers import ROOT, fork_ranks
from training_runs import command_lines


def test_without_a_command_every_command_is_listed_with_what_its_file_says(tmp_path):
    (code, out, _), (none, again, _) = command_lines("bench", [["--help"], []], tmp_path)
    assert code == 0 and none == 2 and again == out
    lines = [line.split(maxsplit=1) for line in out.splitlines()[2:]]
    assert dict(lines) == {name: module.__doc__.splitlines()[0]
                           for name, module in COMMANDS.items()}


def test_every_command_has_a_help_of_its_own(tmp_path):
    ended = command_lines("bench", [[name, "--help"] for name in COMMANDS], tmp_path)
    for name, (code, out, _) in zip(COMMANDS, ended):
        assert code == 0 and out.startswith(f"usage: python -m bench {name} "), out


def test_what_a_bench_cannot_do_is_refused_in_one_line_before_it_measures(tmp_path):
    (tmp_path / "bad.json").write_text("[1]")
    config = ROOT / "configs" / "sedd_demo.yaml"
    refused = {
        ("sedd",): "found 'sedd'; expected one of speed, scale",
        ("scale", "--ranks=1,x"): "--ranks 1,x; expected numbers of ranks, such as 1,2,4,8",
        ("scale", "--ranks=1,2,3"): "2 does not divide 3; expected numbers that do",
        ("scale", "--json=bad.json"): "bad.json is no file that",
        ("scale", "dpo"): "found what to measure without --ranks",
        ("scale", f"--config={config}"): "found what to measure without --ranks",
        ("scale", "--steps=0", "--ranks=1"): "--steps is 0; expected at least 1",
        ("speed", "optim.lr=1"): "found optim.lr=1 without --config",
        ("speed", "seed"): "found seed; expected sedd, dpo, tables, sample",
        ("speed", "--repeats=0"): "--repeats is 0; expected more than 0",
        ("speed", "sample", "--batch=0"): "--batch is 0; expected more than 0",
        ("speed", "sedd", "--device=cpu", "--matmul=64", "--data=no.fasta"):
            "no.fasta does not exist"}
    ended = command_lines("bench", [list(words) for words in refused], tmp_path)
    for (code, out, err), message in zip(ended, refused.values()):
        assert code == 2 and message in err and err.count("error: ") == 1, err
        assert "Traceback" not in err and "float32 |" not in out


def test_speed_refuses_two_ranks(tmp_path):
    done = fork_ranks(2, ["-m", "bench", "speed", "sedd", "--device=cpu"], tmp_path)
    assert done.returncode == 2 and "found 2 ranks; expected one process" in done.text
