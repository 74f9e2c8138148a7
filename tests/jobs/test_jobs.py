"""Do jobs/local.sh, jobs/test.sh and jobs/torchrun_multinode.sh start what they are to start? Are
the commands understood that the pages show?

local.sh runs in copies whose requirements are empty: an environment takes seconds, no network.
"""
import argparse
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, Running, clean_environment, need, start_ranks, started

SCRIPT = """
import os, sys
print("arguments", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
sys.exit(5 if "fail" in sys.argv else 0)
"""
SETTINGS = {"PYTHON": sys._base_executable, "SCRIPT": "script.py", "CONFIG": "config.yaml",
            "LAUNCHER": "mpirun", "MPI_WHEEL": "", "MATPLOTLIB": ""}
HOSTS = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.77.0.1", "VENV": "none"}


def copy_into(folder):
    """A folder with jobs/, nothing to install and a short script; its name holds a space."""
    copy = folder / "a copy"
    shutil.copytree(ROOT / "jobs", copy / "jobs")
    for name in ("requirements.txt", "requirements-base.txt", "config.yaml"):
        (copy / name).touch()
    (copy / "script.py").write_text(SCRIPT)
    return copy


@pytest.fixture
def copy(tmp_path):
    return copy_into(tmp_path)


def start_local_sh(copy, *words, **settings):
    """A `with` of jobs/local.sh of a copy, called from the folder above, with mpirun of our own
    environment: its Popen."""
    env = clean_environment("mpich") | SETTINGS | settings
    return started(["bash", f"{copy.name}/jobs/local.sh", *words], cwd=copy.parent, env=env,
                   text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                   stderr=subprocess.STDOUT)


def local_sh(copy, *words, **settings):
    """The same to its end: (exit code, everything printed)."""
    with start_local_sh(copy, *words, **settings) as process:
        printed, _ = process.communicate(timeout=100)
    return process.returncode, printed


def run_bash(folder, *words, **settings):
    """`bash WORDS` in a folder to its end, with these variables."""
    return subprocess.run(["bash", *map(str, words)], cwd=folder, capture_output=True, text=True,
                          env=clean_environment(env=settings), timeout=100)


def shown_words(copy, script, *words, **settings):
    """What a script would start, word for word; it starts and writes nothing."""
    before = sorted(copy.parent.rglob("*"))
    done = run_bash(copy.parent, copy / "jobs" / script, *words, DRY_RUN=1, **settings)
    assert done.returncode == 0, done.stderr
    assert sorted(copy.parent.rglob("*")) == before
    return shlex.split(done.stdout)


def assert_refused(done, word):
    assert (done.returncode, done.stdout) == (2, "") and word in done.stderr


# ---------------------------------------------------------------- jobs/local.sh
@pytest.fixture(scope="module")
def first_calls(tmp_path_factory):
    """(a copy, the ends of its first two calls, which came at once)."""
    need("mpich")
    copy = copy_into(tmp_path_factory.mktemp("first"))
    with (start_local_sh(copy, "3", "x=a b") as one, start_local_sh(copy, "3", "x=a b") as other):
        printed = [process.communicate(timeout=100)[0] for process in (one, other)]
    return copy, [one.returncode, other.returncode], printed


def test_two_first_calls_at_once_make_one_environment_and_start_all_ranks(first_calls):
    _, codes, printed = first_calls
    assert codes == [0, 0], printed
    for text in printed:
        assert text.count("'x=a b'] threads") == 3, text
    assert "".join(printed).count("making .venv") == "".join(printed).count("installing") == 1


def test_the_code_of_the_script_is_kept_and_its_words_are_in_the_log(first_calls):
    copy, _, _ = first_calls
    shutil.rmtree(copy.parent / "logs")
    code, printed = local_sh(copy, "3", "fail", ARGS="--seed 5", LAUNCHER="torchrun")
    words = ["--nproc_per_node", "3", "--config", f"{copy}/config.yaml", "--seed", "5", "fail"]
    assert code == 5 and f"arguments {words}" in printed, printed
    log, = (copy.parent / "logs").iterdir()
    assert re.fullmatch(r"config-[\d-]+\.log", log.name) and log.read_text() in printed
    assert str(words) in log.read_text()


def test_threads_that_are_given_are_kept(first_calls):
    code, printed = local_sh(first_calls[0], "1", OMP_NUM_THREADS="6")
    assert code == 0 and "threads 6" in printed


def test_packages_are_installed_again_if_the_list_of_them_changed(first_calls):
    copy, _, _ = first_calls
    (copy / "requirements-base.txt").write_text("# another list\n")
    for steps in (["installing requirements.txt"], []):
        code, printed = local_sh(copy, "1")
        assert code == 0 and re.findall("making .*|installing .*", printed) == steps


def test_an_environment_that_was_moved_is_made_anew(first_calls, tmp_path):
    folder = tmp_path / "a copy"
    shutil.copytree(first_calls[0], folder, symlinks=True)
    code, printed = local_sh(folder, "1", PYTHON="no-such-python")      # so that it is not made
    assert code == 2 and "no-such-python" in printed


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
        assert code == 2 and "PIP_INDEX_URL" in printed
        assert "torch==2.13.0" in printed, "pip's own message must stay visible"
        assert "arguments" not in printed

        (copy / "requirements.txt").write_text("")
        for made in (True, False):      # matplotlib, which is not needed, is tried once
            code, printed = local_sh(copy, MATPLOTLIB="matplotlib", **offline)
            assert code == 0 and ("installing" in printed) == made, printed


@pytest.mark.parametrize("words, settings, word", [
    ("0", {}, "'0'"), ("-1", {}, "'-1'"), ("", {"NPROC": "two"}, "'two'"), ("2 4", {}, "'4'"),
    ("-n 4", {}, "'-n'"), ("--config=other.yaml", {}, "--config=other.yaml"),
    ("x=1 --nproc_per_node 2", {}, "--nproc_per_node"), ("", {"LAUNCHER": "mpiexec"}, "mpiexec"),
    ("", {"SCRIPT": "no.py"}, "SCRIPT=no.py"), ("", {"CONFIG": "no.yaml"}, "CONFIG=no.yaml"),
    ("--data no.fasta", {}, "no.fasta"), ("--data=no.fasta", {}, "no.fasta"),
    ("--train_data . no.csv", {}, "no.csv"),
    ("--structures no_folder", {}, "no_folder"),
    ("", {"PYTHON": "no-such-python"}, "no-such-python")])
def test_local_sh_refuses_before_it_installs(words, settings, word, copy):
    done = run_bash(copy.parent, copy / "jobs" / "local.sh", *words.split(), **SETTINGS | settings)
    assert_refused(done, word)
    assert [path.name for path in copy.glob(".venv*")] in ([], [".venv.lock"])


@pytest.mark.parametrize("words", [
    "--datafile script.py optim.lr=1 --init_timeout -1 --fresh --help",
    "--work_dir=x --plan 1,2 --device cpu model.dropout=0.1",
    "--lr 1 --num_epochs 2 --mutable_ranges 1-5 6-7 --no_cuda x=1 --beta 1",
    "--train_data=script.py --structures script.py --other_structures x"])
def test_words_of_the_script_are_passed_on_as_they_are(words, copy):
    (copy.parent / "script.py").touch()
    shown = shown_words(copy, "local.sh", *words.split(), **SETTINGS)
    assert shown[-len(words.split()):] == words.split()


def test_files_of_the_folder_of_the_call_go_before_those_of_the_project(copy):
    (copy.parent / "config.yaml").touch()
    shown = shown_words(copy, "local.sh", ARGS="x=[1,2]\n  y=1", **SETTINGS)
    assert shown[-5:] == [f"{copy}/script.py", "--config", "config.yaml", "x=[1,2]", "y=1"]


@pytest.mark.parametrize("visible, ranks", [(None, "1"), ("0,3,5", "3"), ("", "2"), ("-1", "2")])
def test_a_workstation_gets_a_rank_per_gpu(visible, ranks, copy):
    program = copy / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho 'GPU 0: one'\n")
    program.chmod(0o755)
    shown = shown_words(copy, "local.sh", PATH=f"{program.parent}:{os.environ['PATH']}",
                        **SETTINGS | {"CUDA_VISIBLE_DEVICES": visible, "LAUNCHER": "torchrun"})
    assert shown[shown.index("--nproc_per_node") + 1] == ranks


def test_local_sh_writes_into_no_environment_that_it_did_not_make(copy):
    (copy / ".venv").mkdir()
    code, printed = local_sh(copy)
    assert code == 2 and str(copy / ".venv") in printed
    (copy / ".venv").rename(copy / "other")
    (copy / "other" / "stamp").touch()
    (copy / ".venv").symlink_to("other")
    code, printed = local_sh(copy)
    assert code == 2 and str(copy / ".venv") in printed
    assert [path.name for path in (copy / "other").iterdir()] == ["stamp"]


# ---------------------------------------------------------------- jobs/test.sh
def test_twice_as_many_tests_run_at_a_time_as_there_are_cores(copy):
    cores = len(os.sched_getaffinity(0))
    for words, settings, processes in ((["-x", "--slow"], {}, 2 * cores),
                                       (["jobs"], {"TEST_PROCESSES": 0}, 0)):
        shown = shown_words(copy, "test.sh", *words, **settings)
        assert shown[:5] == [".venv/bin/python", "-m", "pytest", "-n", str(processes)]
        assert shown[7:] == words


# ---------------------------------------------------------------- jobs/torchrun_multinode.sh
@pytest.fixture
def alone(tmp_path):
    """A folder that holds torchrun_multinode.sh alone of jobs/, and the short script."""
    copy = copy_into(tmp_path)
    script = (copy / "jobs" / "torchrun_multinode.sh").read_text()
    shutil.rmtree(copy / "jobs")
    (copy / "jobs").mkdir()
    (copy / "jobs" / "torchrun_multinode.sh").write_text(script)
    return copy


def multinode(folder, *words, **settings):
    files = {"SCRIPT": "script.py", "CONFIG": "config.yaml"}
    return run_bash(folder, "jobs/torchrun_multinode.sh", *words, **{**HOSTS, **files, **settings})


@pytest.mark.parametrize("words, settings, word", [
    ("--nnodes=3", {}, "--nnodes"), ("", {"ARGS": "x=1\t--config=a"}, "--config"),
    ("", {"MASTER_ADDR": ""}, "MASTER_ADDR"), ("", {"CONFIG": "no.yaml"}, "no.yaml"),
    ("", {"NPROC": "two"}, "NPROC=two"), ("", {"MINUTES": "1h"}, "MINUTES=1h"),
    ("", {"PYTHON": "/bin/false", "VENV": "mine"}, "VENV=mine")])
def test_the_script_for_hosts_without_a_scheduler_refuses(words, settings, word, alone):
    before = sorted(alone.rglob("*"))
    assert_refused(multinode(alone, *words.split(), **settings), word)
    assert sorted(alone.rglob("*")) == before


@pytest.mark.parametrize("given, python", [
    ("shifter --image=any/one:1 python", ["shifter", "--image=any/one:1", "python"]),
    ("{folder}/my python", ["{folder}/my python"])])      # one path, with a blank
def test_python_may_be_several_words(given, python, alone):
    (alone / "my python").touch()
    (alone / "my python").chmod(0o755)
    given = given.format(folder=alone)
    done = multinode(alone, "y=1", DRY_RUN=1, NPROC=4, ARGS="x=1\n z=2", PYTHON=given)
    assert shlex.split(done.stdout) == [
        *(word.format(folder=alone) for word in python), "script.py",
        "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "4", "--master_addr", "10.77.0.1",
        "--master_port", "29500", "--config", "config.yaml", "--work_dir", "runs/config",
        "x=1", "z=2", "y=1"]


def test_the_script_for_hosts_without_a_scheduler_works_alone(alone):
    done = multinode(alone, "fail", NPROC=1, PREFLIGHT="", PYTHON=sys.executable)
    assert done.returncode == 5 and "'--node_rank', '1'" in done.stdout, done.stderr
    log, = (alone / "logs").glob("config-1-*.log")
    assert "arguments ['--nnodes'" in log.read_text()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_nothing_is_trained_after_a_signal_during_the_preflight_by_hand(name, alone):
    program = alone / "python"
    program.write_text("""#!/bin/bash
if [ "$1" = -c ]; then echo 3; exit; fi
echo $* >> asked
trap 'exit 1' INT TERM
echo checking
while :; do sleep 0.1; done
""")
    program.chmod(0o755)
    env = clean_environment(env={**HOSTS, "SCRIPT": "script.py", "CONFIG": "config.yaml",
                                 "PYTHON": program, "PREFLIGHT": "check.py --slow 1"})
    with Running(["bash", "jobs/torchrun_multinode.sh"], alone, env) as running:
        running.wait_for("checking", timeout=60)
        os.killpg(running.process.pid, getattr(signal, name))      # as a terminal does
        result = running.wait(60)
    asked, = (alone / "asked").read_text().splitlines()
    assert result.returncode == 128 + getattr(signal, name), result.text
    assert " --nproc_per_node 3 " in asked and asked.endswith("check.py --slow 1")


# ---------------------------------------------------------------- all scripts
JOB_SCRIPTS = sorted([*(ROOT / "jobs").glob("*.sh"), *(ROOT / "jobs").glob("*.pbs"),
                      *(ROOT / "bench").glob("*.sh")])
SHARED_PARTS = sorted((ROOT / "jobs" / "lib").iterdir())


@pytest.mark.parametrize("path", [*JOB_SCRIPTS, *SHARED_PARTS, ROOT / ".ci" / "run"],
                         ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say_about_a_script(path):
    check = ["shellcheck", "--shell=bash", "--severity=warning", "--external-sources"]
    if not shutil.which("shellcheck"):
        check = ["bash", "-n"]
    checked = subprocess.run([*check, path], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "jobs").glob("*.[sp][hb]*")))
def test_help_of_a_job_script_is_its_first_lines_and_does_nothing(copy, name):
    before = sorted(copy.rglob("*"))
    done = run_bash(copy, f"jobs/{name}", "--help")
    assert done.returncode == 0 and not done.stderr, done.stderr
    comment = re.match(r"#!.*\n((?:# .*\n)+)", (ROOT / "jobs" / name).read_text())[1]
    assert done.stdout == comment.replace("\n# ", "\n").removeprefix("# ")
    assert sorted(copy.rglob("*")) == before


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
