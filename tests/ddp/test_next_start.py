"""What decides on the next start of a run: which host is suspected, which code a refusal has, and
whether a job that was started again meets its former ranks."""
import contextlib
import os
import signal
import sys
from subprocess import PIPE, Popen, run

import pytest

import ddp_watch
from ddp_guard import Known, Place, find_late, note_place, write_status
from ddp_setup import Ddp
from ddp_watch import lock_folder, watch_run
from launchers import (
    ROOT,
    ForkedRanks,
    await_that,
    clean_environment,
    fork_ranks,
    read_status,
    script,
)

DDP = Ddp(host="n1")    # one process
# A rank that tells its guard what ddp_watch.py would, in a run of two ranks, a host each.
RANK = """
import faulthandler, json, os, signal, sys, time
rank = int(os.environ["DDP_RANK"])
pipe = int(os.environ["DDP_GUARD_FD"].partition(":")[0])
def tell(**message):
    os.write(pipe, json.dumps(message).encode() + b"\\n")
def stop():
    time.sleep(600)
def wait():
    time.sleep(600)
os.makedirs("run/stacks", exist_ok=True)
stacks = open(f"run/stacks/rank_{rank}.txt", "w")
stacks.write(f"n{rank}\\n")
stacks.flush()
faulthandler.register(signal.SIGQUIT, stacks)
tell(rank=rank, size=2, host=f"n{rank}", run_dir="run", run="this", step=4)
"""


@contextlib.contextmanager
def guards(folder, text, ranks=(0, 1), **env):
    """A guard, in a process of its own, of each of these ranks, which run this text after RANK."""
    (folder / "script.py").write_text(RANK + text)
    started = []
    try:
        for rank in ranks:
            its = clean_environment(env={"PYTHONPATH": ROOT, "DDP_RANK": rank, **env})
            started.append(Popen([sys.executable, "-m", "ddp_guard", "script.py"], cwd=folder,
                                 env=its, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True))
        yield started
    finally:
        for guard in started:
            guard.kill()
            guard.communicate()


# ---------------------------------------------------------------- who is suspected
@pytest.mark.parametrize("end, suspects", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "n1"),
    ("os._exit(3)", "")], ids=["a death", "an exit"])
def test_the_host_of_a_rank_is_suspected_if_the_rank_died_of_a_signal(end, suspects, tmp_path):
    with guards(tmp_path, end, ranks=[1]) as (guard,):
        guard.wait(60)
    assert read_status(tmp_path / "run")["suspects"] == suspects


def test_after_an_exception_no_host_is_suspected(tmp_path):
    path = script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run"):
    raise ValueError("on purpose")
""")
    assert fork_ranks(2, [path], tmp_path).returncode == 1
    status = read_status(tmp_path / "run")
    assert "on purpose" in status["reason"] and status["suspects"] == ""


@pytest.mark.parametrize("hang, who, suspects", [
    ("tell(limit=1.0)\nwait()", "2 ranks on 2 hosts", ""),
    ("tell(limit=1.0)\nstop() if rank else wait()", "2 ranks on 2 hosts", ""),
    ("tell(limit=1.0, step=4 - rank)\nwait()", "rank 1 of 2 on n1", "n1")],
    ids=["all at one place", "each at its own", "one at an earlier step"])
def test_a_hang_makes_a_host_suspected_only_where_its_ranks_alone_are_late(
        hang, who, suspects, tmp_path):
    with guards(tmp_path, hang) as (first, _):
        text = first.stderr.read()
        assert first.wait(60) == 70
    status = read_status(tmp_path / "run")
    assert (status["code"], status["suspects"]) == (70, suspects), text
    assert f"FAILED: {who}: no progress for 1 s. Late: rank" in text
    assert ("0 on n0" in text) == (suspects == "") and "1 on n1" in text


def test_late_are_the_ranks_at_each_place_that_holds_as_few(tmp_path):
    (tmp_path / "stacks").mkdir()
    known = Known()
    known.run_dir = str(tmp_path)
    known.rank = 0
    known.size = 5
    places = [Place(rank, f"n{rank}", 7, True, True, where) for rank, where in enumerate("aabac")]
    for place in places:
        note_place(known, place)
    assert [place.rank for place in find_late(known, places[0])] == [2, 4]


# ---------------------------------------------------------------- the rule of the job scripts
@pytest.mark.parametrize("code, suspects, follows", [
    (75, "", True), (70, "", True), (70, "n1", True), (None, "", True), (1, "n1", True),
    (0, "", False), (2, "", False), (1, "", False), (3, "n1", False), (130, "", False)])
def test_the_job_scripts_read_a_status_as_it_is_written(code, suspects, follows, tmp_path):
    """Whether another start follows. The pattern is that of jobs/slurm.sh."""
    known = Known()
    known.run_dir = str(tmp_path)
    known.run = "this"
    known.step = 75
    write_status(known, code, 'KeyError: "suspects": "a"', suspects)
    lines = (ROOT / "jobs" / "slurm.sh").read_text().splitlines()
    rule, = (line for line in lines if line.startswith("[[ $said =~") and "suspects" in line)
    text = f'said=$(< status.json); code=; next=yes\n{rule}\necho "$next"'
    done = run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout[:3] == "yes") == follows and done.stderr == "", done


# ---------------------------------------------------------------- a refusal, told by Slurm
def test_a_guard_ends_its_rank_with_code_2_when_another_has_refused_to_start(tmp_path):
    with guards(tmp_path, "print('ready', os.getpid(), flush=True)\nwait()", ranks=[1]) as (guard,):
        pid = int(guard.stdout.readline().split()[1])
        guard.send_signal(signal.SIGURG)
        assert (guard.wait(60), guard.stderr.read()) == (2, "")
        await_that(lambda: not os.path.exists(f"/proc/{pid}"), 60, lambda: "the rank is there")
    assert not (tmp_path / "run" / "status.json").exists()


def test_a_guard_whose_own_rank_has_refused_keeps_the_code_of_that(tmp_path):
    text = "tell(spoken=True)\nprint('ready', flush=True)\nsys.stdin.readline()\nos._exit(3)"
    with guards(tmp_path, text, ranks=[0]) as (guard,):
        assert guard.stdout.readline() == "ready\n"
        guard.send_signal(signal.SIGURG)
        guard.communicate("\n", timeout=60)
        assert guard.returncode == 3


# ---------------------------------------------------------------- former ranks of the same job
HOLD = """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
    print("ready", flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def holder(folder):
    """A process of job 77 that has the folder: ForkedRanks of one."""
    env = {"DDP_GUARD": 0, "SLURM_JOB_ID": "77"}
    with ForkedRanks([script(folder, HOLD)], folder, {0: env}) as ranks:
        ranks.wait_for("ready")
        yield ranks


def test_a_job_that_was_started_again_waits_for_its_former_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with holder(tmp_path) as former:
        def let_it_end(_):
            os.kill(former.pids[0], signal.SIGKILL)
            former.codes()
        monkeypatch.setattr(ddp_watch.time, "sleep", let_it_end)
        with watch_run(DDP, tmp_path / "run", minutes=0):
            pass
    assert f"process {former.pids[0]} on" in capsys.readouterr().out    # who it waits for
    assert read_status(tmp_path / "run")["code"] == 0


@pytest.mark.parametrize("job", ["77", "78"], ids=["the same job", "another job"])
def test_a_folder_in_use_is_refused_in_the_end(job, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setattr(ddp_watch, "FORMER_START", 1.0)
    with holder(tmp_path) as former:
        with pytest.raises(ValueError, match=f"process {former.pids[0]} on .*, job 77"):
            lock_folder(tmp_path / "run")
