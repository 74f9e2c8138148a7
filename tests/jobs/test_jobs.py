"""Do jobs/local.sh, launchers.py and the commands shown work?

local.sh runs in copies whose requirements.txt is empty: an environment takes seconds, no network.
"""
import argparse
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, clean_environment, need, start_ranks, started

SCRIPT = """
import os, sys
print("arguments", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
sys.exit(5 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def copy(tmp_path):
    """A folder with jobs/, nothing to install and a short script; its name holds a space."""
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    (folder / "requirements.txt").touch()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "config.yaml").touch()
    return folder


def start_local_sh(folder, *arguments, **variables):
    """A `with` of jobs/local.sh of `folder`, called from elsewhere, with mpirun of our own
    environment: its Popen."""
    settings = {"PYTHON": sys._base_executable, "SCRIPT": "script.py", "CONFIG": "config.yaml",
                "LAUNCHER": "mpirun", "MPI_WHEEL": "", "MATPLOTLIB": ""}
    env = clean_environment("mpich") | settings | variables
    words = ["bash", f"{folder.name}/jobs/local.sh", *arguments]
    return started(words, cwd=folder.parent, env=env, text=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def local_sh(folder, *arguments, **variables):
    """The same to its end: (exit code, everything printed)."""
    with start_local_sh(folder, *arguments, **variables) as process:
        printed, _ = process.communicate(timeout=800)
    return process.returncode, printed


def test_local_sh_makes_its_environment_once_and_ends_with_the_scripts_code_and_last_line(copy):
    need("mpich")
    with (start_local_sh(copy, "3", "--data", "a b") as first,
          start_local_sh(copy, "3", "--data", "c b") as second):
        printed = [process.communicate(timeout=800)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    for name, text in zip("ac", printed):
        assert text.count(f"arguments ['--config', 'config.yaml', '--data', '{name} b']") == 3
    assert "".join(printed).count("making .venv") == "".join(printed).count("installing") == 1

    shutil.rmtree(copy / "logs")
    code, printed = local_sh(copy, "3", "fail", ARGS="--seed 5", LAUNCHER="torchrun")
    words = ["--nproc_per_node", "3", "--config", "config.yaml", "--seed", "5", "fail"]
    assert code == 5 and f"arguments {words}" in printed.splitlines()[-1], printed
    log, = (copy / "logs").iterdir()
    assert re.fullmatch(r"config-[\d-]+\.log", log.name) and printed.endswith(log.read_text())
    assert str(words) in log.read_text()

    stamp = copy / ".venv" / "stamp"                # an environment holds its own path
    moved = stamp.read_text().replace("a copy", "another copy")
    for file, text, arguments, steps in (
            (stamp, stamp.read_text(), ["1", "x=1"], []),
            (copy / "requirements.txt", "# another list\n", ["1", "fail"], ["installing"]),
            (stamp, moved, ["1"], ["making", "installing"])):
        file.write_text(text)
        code, printed = local_sh(copy, *arguments, OMP_NUM_THREADS="6",
                                 PYTHON="" if text == moved else sys._base_executable)
        assert code == (5 if "fail" in arguments else 0) and "threads 6" in printed, printed
        assert [word for word in ("making", "installing") if word in printed] == steps


@pytest.mark.slow
def test_local_sh_says_what_failed_without_network_and_starts_afresh_after_it(copy):
    need("mpich")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))           # bound but not listening: connections are refused
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        offline = {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
                   "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
        (copy / "requirements.txt").write_text("torch==2.13.0\n")
        code, printed = local_sh(copy, **offline)
        assert code == 2
        assert "pip could not install -r requirements.txt" in printed and "PIP_INDEX_URL" in printed
        assert "torch==2.13.0" in printed, "pip's own message must stay visible"
        assert "arguments" not in printed

        (copy / "requirements.txt").write_text("")
        for made in (True, False):      # matplotlib, which is not needed, is tried once
            code, printed = local_sh(copy, MATPLOTLIB="matplotlib", **offline)
            assert code == 0 and ("installing" in printed) == made, printed


def test_local_sh_takes_data_from_where_it_is_called_and_all_else_from_its_own_folder(copy):
    for name in ("my.fasta", "runs"):
        (copy.parent / name).touch()
    words = ["--data", "my.fasta", "data.file=my.fasta", "--data", "not_there", "--work_dir",
             "runs"]
    code, printed = local_sh(copy, *words, DRY_RUN="1")
    here = str(copy.parent / "my.fasta")
    assert code == 0 and shlex.split(printed.splitlines()[-1])[-7:] == [
        "--data", here, f"data.file={here}", *words[-4:]], printed


JOB_SCRIPTS = sorted([*(ROOT / "jobs").glob("*.sh"), *(ROOT / "jobs").glob("*.pbs"),
                      *(ROOT / "bench").glob("*.sh")])
SHARED_PARTS = sorted((ROOT / "jobs" / "lib").iterdir())


@pytest.mark.parametrize("path", [*JOB_SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_a_script_stops_at_errors(path):
    text = path.read_text()
    assert text.startswith("#!/bin/bash") and re.search(r"^set -[a-z]*e", text, re.MULTILINE)


@pytest.mark.parametrize("path", [*JOB_SCRIPTS, *SHARED_PARTS, ROOT / ".ci" / "run"],
                         ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say_about_a_script(path):
    check = ["shellcheck", "--shell=bash", "--external-sources", "--check-sourced"]
    if not shutil.which("shellcheck"):
        check = ["bash", "-n"]
    checked = subprocess.run([*check, path], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_local_sh_refuses_before_it_installs(copy):
    for arguments, variables, message in (
            (["0"], {}, "NPROC is '0', expected"),
            ([], {"SCRIPT": "no.py"}, "SCRIPT=no.py or CONFIG=config.yaml is not a file in"),
            (["--config=other.yaml"], {}, "give the config as CONFIG="),
            ([], {"PYTHON": "no-such-python"}, "'no-such-python' does not run, or is older")):
        code, printed = local_sh(copy, *arguments, **variables)
        assert code == 2 and message in printed
        assert not (copy / ".venv").exists()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "jobs").glob("*.[sp][hb]*")))
def test_help_of_a_job_script_is_its_first_lines_and_does_nothing(copy, name):
    before = sorted(copy.rglob("*"))
    done = subprocess.run(["bash", f"jobs/{name}", "--help"], cwd=copy, capture_output=True,
                          text=True, env=clean_environment(), timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    comment = re.match(r"#!.*\n((?:# .*\n)+)", (ROOT / "jobs" / name).read_text())[1]
    assert done.stdout == comment.replace("\n# ", "\n").removeprefix("# ")
    assert sorted(copy.rglob("*")) == before


def test_an_option_is_no_folder_for_a_download(copy):
    done = subprocess.run(["bash", "jobs/download_uniref50.sh", "--hlep"], cwd=copy, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 2 and "found --hlep" in done.stderr


def test_local_sh_writes_into_no_environment_that_it_did_not_make(copy):
    (copy / ".venv").mkdir()
    code, printed = local_sh(copy)
    assert code == 2 and "was not made by this script" in printed
    (copy / ".venv").rename(copy / "other")
    (copy / "other" / "stamp").touch()
    (copy / ".venv").symlink_to("other")
    code, printed = local_sh(copy)
    assert code == 2 and "was not made by this script" in printed
    assert [path.name for path in (copy / "other").iterdir()] == ["stamp"]


def test_a_process_left_behind_is_named_and_ended(tmp_path):
    (tmp_path / "leave.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n")
    with start_ranks("python", 1, ["leave.py"], cwd=tmp_path) as running:
        result = running.wait(timeout=600, leftover_grace=0.2)
        assert result.returncode == 0 and running.pids() == []
        assert len(result.leftover) == 1 and "sleep 300" in result.leftover[0]


def shell_blocks():
    """Shell lines in the README, the pages of docs/ and the tutorial, and commands in sentences."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        yield from re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`((?:python|mpirun|bash) [^`]*)`", text):
            yield " ".join(command.split())
    for cell in json.loads((ROOT / "tutorial.ipynb").read_text())["cells"]:
        head, _, lines = "".join(cell["source"]).partition("\n")
        if head == "%%bash":
            yield lines


class Understood(BaseException):
    """Raised where a script has parsed its arguments; nothing catches it."""


def commands(blocks):
    """[(variables given, words)] of shell lines; qsub's -v counts as variables."""
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace(";", " "), comments=True)
        given = dict(word.split("=", 1)
                     for word in itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
        words = words[len(given):]
        if words[:1] == ["qsub"] and "-v" in words:   # a name alone: exported before
            entries = words[words.index("-v") + 1].split(",")
            given |= dict(entry.split("=", 1) for entry in entries if "=" in entry)
        found.append((given, words))
    return found


OURS = re.compile(r"(?!script\.py|train\.py)(jobs/|tests/|bench/)?\w+\.(py|sh|pbs)")
COMMANDS = [pytest.param(given, words, id=" ".join(words)[:60]) for given,
            words in commands(shell_blocks()) if any(map(OURS.fullmatch, words))]


@pytest.mark.parametrize("given, words", COMMANDS)
def test_a_command_that_is_shown_is_understood_by_the_script_it_names(given, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    place = next(k for k, word in enumerate(words) if OURS.fullmatch(word))
    script = words[place]
    argv = [word for word in words[place + 1:] if word != "..."]
    text = (ROOT / script).read_text()
    monkeypatch.syspath_prepend(ROOT / "jobs")     # preflight.py
    if script.endswith((".sh", ".pbs")):
        known = set(re.findall(r"^(?:export )?(\w+)=\$\{\1", text, re.MULTILINE))
        assert given.keys() <= known, f"{script} reads {sorted(known)}"
        if script in ("jobs/test.sh", "jobs/download_uniref50.sh") or script.startswith("bench/"):
            return          # they start no training with arguments of this command
        settings = {name: given.get(name)
                    or re.search(rf"^{name}=\$\{{{name}:-(.*)\}}", text, re.MULTILINE)[1]
                    for name in ("SCRIPT", "CONFIG")}
        argv = argv[1:] if argv and argv[0].isdigit() else argv
        script = settings["SCRIPT"]
        argv = ["--config", settings["CONFIG"],
                *given.get("ARGS", "").split(), *argv]
    module = importlib.import_module(Path(script).stem)
    if not argv or "--help" in argv or script == "ddp_setup.py":
        return
    if hasattr(module, "read_arguments"):
        try:
            module.read_arguments(argv)
        except (ValueError, OSError) as error:      # the command's files are not here
            assert re.search("no file|folder that is missing|not installed", str(error)), error
        return

    assert_understood(module.main, argv, monkeypatch)


BENCHMARKS = [pytest.param(words, id=" ".join(words)[:60]) for _, words in commands(shell_blocks())
              if "-m bench " in " ".join(words)]


@pytest.mark.parametrize("words", BENCHMARKS)
def test_a_benchmark_that_is_shown_is_understood(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = importlib.import_module("bench.__main__")
    assert_understood(module.main, words[words.index("bench") + 1:], monkeypatch)


def assert_understood(main, argv, monkeypatch):
    """`main` takes these arguments; nothing after that is run."""
    for name in ("parse_args", "parse_intermixed_args"):
        def parse_and_leave(*arguments, parse=getattr(argparse.ArgumentParser, name)):
            parse(*arguments)
            raise Understood
        monkeypatch.setattr(argparse.ArgumentParser, name, parse_and_leave)
    with pytest.raises(Understood):
        main(argv)
