"""Ranks that a script starts here: do they have their place, and end as they should?"""

import contextlib
import os
import signal
import socket
import subprocess

import pytest
import torch

import sample_sedd
import train_sedd_ddp
from launchers import (
    ROOT,
    ForkedRanks,
    Printed,
    Running,
    await_that,
    clean_environment,
    command,
    fork_ranks,
    slow,
    start_ranks,
)
from training import launch

# Hands over; then each rank writes what it is, and ends as --end says. Only the first one imports
# torch.
RANKS = """
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--end")
if "LOCAL_RANK" not in os.environ:
    sys.path.insert(0, {root!r})
    from training.command_line import add_launch_arguments
    from training.launch import start_ranks_if_asked
    add_launch_arguments(parser)
    start_ranks_if_asked(parser.parse_args(), sys.argv[1:])
args = parser.parse_args()
rank, stopped, pressed = int(os.environ["RANK"]), [], []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: stopped.append(1))
def press(*_):
    pressed.append(1)
    os.write(1, b"Ctrl-C %d\\n" % len(pressed))   # whole: print writes it in parts
signal.signal(signal.SIGINT, press)
world, local = os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
os.write(1, f"rank {{rank}} of {{world}}, local {{local}}\\n".encode())
open(f"here{{rank}}", "w").close()   # else one may end the other before it has said what it is
while not all(os.path.exists(f"here{{r}}") for r in range(int(world))):
    time.sleep(0.01)
if args.end == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if args.end == "terminated":   # as one that imports torch still
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
if args.end == "interrupted":   # as one that Ctrl-C meets while it imports torch
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
waits = args.end.startswith("SIG") or args.end in ("killed", "unsaved", "Ctrl-C")
while waits and not stopped and len(pressed) < 2:
    time.sleep(0.01)
if args.end.startswith("SIG"):
    os.write(2, b"the last word\\n")
if args.end == "unsaved":
    sys.exit(1)
sys.exit(75 if stopped else 130 if pressed else int(args.end or 0))
"""


@pytest.mark.parametrize("end, code", [
    (2, 2), ("SIGTERM", 75), slow("SIGUSR1", 75), slow("SIGHUP", 75), ("unsaved", 1),
    ("killed", 1), ("interrupted", 130), ("Ctrl-C", 130)])
def test_ranks_started_here_end_with_their_own_code_and_word(tmp_path, end, code):
    (tmp_path / "s.py").write_text(RANKS.format(root=str(ROOT)))
    options = ["--nproc_per_node", "2", "--end", str(end)]
    with ForkedRanks(["s.py", *options], tmp_path, {0: {"DDP_GUARD": 0}}) as launcher:
        launcher.wait_for("rank 0 of 2, local 0")
        launcher.wait_for("rank 1 of 2, local 1")
        if code == 75:
            os.kill(launcher.pids[0], signal.Signals[end])
        if end == "unsaved":
            os.kill(launcher.pids[0], signal.SIGTERM)
        for nth in (1, 2) if end == "Ctrl-C" else ():   # the second one too comes to the ranks
            os.kill(launcher.pids[0], signal.SIGINT)
            launcher.wait_for(f"Ctrl-C {nth}")
        assert launcher.codes() == [code], launcher.err()
        first, *others = launcher.err().splitlines()
    assert first.startswith("starting 2 rank(s) here"), first
    expected = ["the last word"] * 2 * (code == 75)
    if end == "killed":   # it has no guard
        expected = [f"FAILED: rank 1 of 2 on {socket.gethostname()}: died without a word "
                    "(SIGKILL: out of memory?)"]
    assert others == expected


def test_a_rank_that_sigterm_ends_before_it_can_save_ends_the_others(tmp_path):
    (tmp_path / "s.py").write_text(RANKS.format(root=str(ROOT)))
    with ForkedRanks(["s.py", "--nproc_per_node", "2", "--end", "terminated"], tmp_path,
                     {0: {"DDP_GUARD": 0}}) as launcher:
        assert launcher.codes(100) == [1], launcher.err()


# Stands before torch, and waits for Ctrl-C, in a rank of a launcher or where there is none.
SLOW_IMPORT = """
import os, sys, time
if "LOCAL_RANK" in os.environ or "--nproc_per_node" not in sys.argv:
    open(f"imports{os.environ.get('RANK', 0)}", "w").close()
    while True:
        time.sleep(0.01)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
import torch
"""


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_ctrl_c_while_a_script_imports_torch_gives_one_line_and_code_130(ranks, tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_IMPORT)
    words = [ROOT / "train_sedd_ddp.py", "--config", ROOT / "configs" / "sedd_demo.yaml"]
    if ranks > 1:
        words += ["--nproc_per_node", ranks]
    with start_ranks("python", 1, words, tmp_path, env={"PYTHONPATH": tmp_path}) as running:
        for rank in range(ranks):
            await_that((tmp_path / f"imports{rank}").exists, 300, running.stderr)
        running.process.send_signal(signal.SIGINT)
        result = running.wait(timeout=300)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("starting ")]
    assert (result.returncode, lines) == (130, ["interrupted (Ctrl-C)"]), result.text


def test_ctrl_c_reaches_the_ranks_of_a_launcher_that_a_script_started_in_the_background(tmp_path):
    """Shells start `command &` with SIGINT ignored."""
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    (tmp_path / "s.py").write_text(ignored + RANKS.format(root=str(ROOT)))
    with ForkedRanks(["s.py", "--nproc_per_node", "2", "--end", "Ctrl-C"], tmp_path,
                     {0: {"DDP_GUARD": 0}}) as launcher:
        for rank in (0, 1):
            launcher.wait_for(f"rank {rank} of 2, local {rank}")
        for nth in (1, 2):
            os.kill(launcher.pids[0], signal.SIGINT)
            launcher.wait_for(f"Ctrl-C {nth}")
        assert launcher.codes() == [130], launcher.err()


GUARDED = """
import sys
sys.path.insert(0, {root!r})
import ddp_guard
ddp_guard.supervise()
""" + RANKS


def test_ranks_save_and_end_when_their_launcher_is_killed(tmp_path):
    (tmp_path / "s.py").write_text(GUARDED.format(root=str(ROOT)))
    options = ["--nproc_per_node", "2", "--end", "SIGTERM"]
    with start_ranks("python", 1, ["s.py", *options], tmp_path) as running:
        running.wait_for("rank 0 of 2", timeout=300)
        running.wait_for("rank 1 of 2", timeout=300)
        running.process.kill()
        result = running.wait(timeout=300)
    assert result.stderr.count("the last word") == 2 and result.leftover == [], result.text


def tell(*names):
    """Arguments of Python that have a rank print variables of its environment."""
    return ["-S", "-c", f"import os; "
            f"os.write(1, (' '.join(map(os.environ.get, {names})) + '\\n').encode())"]


def test_on_several_nodes_a_rank_knows_its_number_among_all_and_on_its_node(capfd):
    told = tell("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                "MASTER_PORT")
    assert launch.run_ranks(told, 2, 3, 1, "first", 5) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["2 0 6 2 first 5", "3 1 6 2 first 5"]


@pytest.mark.parametrize("threads, expected", [(None, "1"), ("3", "3")])
def test_a_rank_has_one_thread_unless_the_environment_says_otherwise(monkeypatch, capfd, threads,
                                                                     expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert launch.run_ranks(tell("OMP_NUM_THREADS"), 1) == 0
    assert capfd.readouterr().out.split() == [expected]


MEET = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")    # by the environment alone
ranks = torch.tensor(dist.get_rank())
dist.all_reduce(ranks)
os.write(1, f"sum {int(ranks)}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_one_host_meet_by_what_torch_finds_in_the_environment(capfd):
    assert launch.run_ranks(["-c", MEET], 2) == 0
    assert capfd.readouterr().out.split("\n") == ["sum 1", "sum 1", ""]


def test_each_launch_has_a_port_of_its_own_that_only_this_host_reaches():
    first = launch.open_store()
    second = launch.open_store()
    assert first.port != second.port
    socket.create_connection(("127.0.0.1", first.port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):    # as one that listens everywhere would not
        socket.create_connection(("127.0.0.2", first.port), timeout=60)


@pytest.mark.parametrize("ranks", [0, 100_000])
def test_a_number_of_ranks_that_no_host_starts_is_refused(ranks):
    with pytest.raises(ValueError, match=f"found --nproc_per_node {ranks}; expected"):
        launch.check_launcher_options({"nproc_per_node": ranks})


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "4711"}


@pytest.mark.parametrize("has_terminal", [True, False])
def test_in_a_step_of_several_tasks_only_a_persons_shell_may_start_ranks(has_terminal, monkeypatch):
    """As of `srun -n 2 --pty bash`: the other task has ended. Jobs inherit its variables."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda descriptor: has_terminal)
    refusal = pytest.raises(ValueError, match="Slurm step has started 2 already")
    with contextlib.nullcontext() if has_terminal else refusal:
        launch.check_launcher_options({"nproc_per_node": 2})


FAILS = """
if __name__ == "__main__":
    import sys
    sys.path.insert(0, {root!r})
    import ddp_guard
    ddp_guard.supervise()
import argparse
from training.command_line import add_launch_arguments, started_ranks
parser = argparse.ArgumentParser()
add_launch_arguments(parser)
with started_ranks(parser.parse_args(), sys.argv[1:]) as ddp:
    assert ddp.is_main, "on purpose?"
"""


def test_ranks_that_fail_end_with_one_code_and_the_error_of_the_rank_at_fault(tmp_path):
    (tmp_path / "s.py").write_text(FAILS.format(root=str(ROOT)))
    result = fork_ranks(2, ["s.py", "--device", "cpu"], tmp_path, {"DDP_GUARD": 1})
    assert result.returncode == 1 and "[rank 1 of 2 on " in result.stderr, result.text
    assert result.stderr.count("AssertionError: on purpose?") == 1, result.text


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an XPU")
def test_ranks_that_are_refused_end_with_code_2_and_one_message(tmp_path):
    (tmp_path / "s.py").write_text(FAILS.format(root=str(ROOT)))
    result = fork_ranks(2, ["s.py", "--device", "xpu"], tmp_path, {"DDP_GUARD": 1})
    assert result.returncode == 2, result.text
    assert result.stderr.count("error: ") == 1 and "xpu" in result.stderr, result.text


def test_without_a_loopback_one_message_says_so_at_once(tmp_path):
    without_network = ["unshare", "--net"]
    if subprocess.run([*without_network, "true"], capture_output=True).returncode:
        pytest.skip("unshare --net needs root and the right to make namespaces")
    words = command("ours", 2, [ROOT / "sample_sedd.py", "none.pt"])
    with Running([*without_network, *words], tmp_path, clean_environment()) as running:
        done = running.wait(timeout=60)     # torch gives up after 300 s
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.text
    assert "127.0.0.1 cannot be reached here (Network is unreachable)" in done.stderr, done.text


@pytest.mark.parametrize("main, words", [
    (train_sedd_ddp.main, ["--config", str(ROOT / "configs" / "sedd_demo.yaml")]),
    (sample_sedd.cli, ["none.pt"])])
def test_a_variable_that_a_launcher_has_left_over_gives_one_message_and_code_2(
        main, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PMI_RANK", "3")
    for more in ([], ["--nproc_per_node", "2"]):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        said = capsys.readouterr()
        assert end.value.code == 2 and said.err.count("error: ") == 1, said.err
    assert "started rank 3 but sets no number of ranks" in Printed(said.err)
    assert not os.listdir(tmp_path)
