"""Whose is a run folder, what asks a run to stop, and what is left in the folder when it ends?"""
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time

import pytest

from ddp_setup import (Ddp, SetupError, end_watch, lock_folder, note_progress, setup_ddp,
                       start_watch, stop_reason, stop_wanted)
from launchers import ROOT, ForkedRanks, await_that, fork_ranks, own_tracebacks, read_status

HEAD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from ddp_setup import *
"""


def script(folder, text):
    (folder / "script.py").write_text(HEAD + text)
    return folder / "script.py"


@contextlib.contextmanager
def running(folder, text, **env):
    """A process that runs this text in a folder, until it prints "ready": ForkedRanks of one."""
    with ForkedRanks([script(folder, text)], folder, {0: {"DDP_GUARD": 0, **env}}) as ranks:
        ranks.wait_for("ready")
        yield ranks


# ---------------------------------------------------------------- the lock
HOLD = """
ddp = setup_ddp(quiet=True)
start_watch(ddp, "run", minutes=0)
print("ready", flush=True)
while not stop_wanted(ddp):
    time.sleep(0.01)
end_watch(ddp)
signal.pause()
"""


def is_free(folder):
    try:
        lock_folder(folder).close()
    except ValueError:
        return False
    return True


def test_a_second_process_is_refused_with_the_words_of_the_one_that_has_the_folder(tmp_path):
    with running(tmp_path, HOLD, PBS_JOBID="77.pbs") as holder:
        expected = (f"run is in use by process {holder.pids[0]} on {socket.gethostname()}, job "
                    "77.pbs. Expected one run per folder")
        for _ in range(2):    # who was refused has changed nothing
            with pytest.raises(ValueError, match=expected):
                lock_folder(tmp_path / "run")


def test_a_folder_is_free_as_soon_as_its_holder_is_killed(tmp_path):
    with running(tmp_path, HOLD) as holder:
        os.kill(holder.pids[0], signal.SIGKILL)
        assert holder.codes() == [-signal.SIGKILL]
        start_watch(ddp := Ddp(host="n1"), tmp_path / "run", minutes=0)
        end_watch(ddp)
    words = (tmp_path / "run" / "lock").read_text()
    assert words == f"process {os.getpid()} on n1\n"    # of the last one alone


def test_a_folder_is_free_when_the_watch_ends(tmp_path):
    with running(tmp_path, HOLD) as holder:
        assert not is_free(tmp_path / "run")
        os.kill(holder.pids[0], signal.SIGUSR1)    # a request to stop
        await_that(lambda: is_free(tmp_path / "run"), 60, lambda: "the folder is still in use")


def test_a_worker_that_outlives_the_holder_does_not_keep_the_folder(tmp_path):
    with running(tmp_path, """
start_watch(setup_ddp(quiet=True), "run", minutes=0)
if os.fork() == 0:
    signal.pause()
print("ready", flush=True)
signal.pause()
""") as holder:
        assert not is_free(tmp_path / "run")
        os.kill(holder.pids[0], signal.SIGKILL)    # the worker lives on in its process group
        await_that(lambda: is_free(tmp_path / "run"), 60, lambda: "the folder is still in use")
        os.killpg(holder.pids[0], 0)


def test_a_file_system_without_locks_is_told_and_keeps_nobody_out(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    lock_folder(tmp_path).close()
    said = capsys.readouterr().out
    assert said == (f"ATTENTION: {tmp_path} is on a file system without locks (No locks "
                    "available): nothing keeps a second run out\n")


REFUSED = """
with setup_ddp(quiet=True) as ddp:
    try:
        start_watch(ddp, sys.argv[1])
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    assert ddp.state.watch is None, "no watch is on"
"""


def test_a_start_in_a_folder_in_use_is_refused_on_all_ranks_and_writes_nothing(tmp_path):
    with running(tmp_path, HOLD) as holder:
        (tmp_path / "refused").mkdir()
        done = fork_ranks(3, [script(tmp_path / "refused", REFUSED), "run"], tmp_path)
        expected = f"run is in use by process {holder.pids[0]} on"
    assert (done.returncode, done.stdout.count(expected)) == (0, 3), done.text
    assert sorted(os.listdir(tmp_path / "run")) == ["lock", "status.json"]    # of the holder
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {holder.pids[0]} on")


def test_a_folder_that_cannot_be_made_is_refused_on_all_ranks(tmp_path):
    done = fork_ranks(2, [script(tmp_path, REFUSED), "script.py/run"], tmp_path)
    assert (done.returncode, done.stdout.count("refused: cannot write into ")) == (0, 2), done.text
    assert done.stdout.count("script.py") == 2, done.text


# ---------------------------------------------------------------- status.json
def test_a_run_is_on_until_its_watch_ends(tmp_path):
    ddp = Ddp()
    start_watch(ddp, tmp_path / "new", minutes=0)
    assert read_status(tmp_path / "new") == {"code": None, "reason": "running", "step": None}
    stop_reason(ddp, 3)
    end_watch(ddp, 75, "because")
    assert read_status(tmp_path / "new") == {"code": 75, "reason": "because", "step": 3}


def test_a_new_start_replaces_the_outcome_of_the_one_before_and_leaves_no_other_file(tmp_path):
    for code in (1, 0):
        ddp = Ddp()
        start_watch(ddp, tmp_path, minutes=0)
        assert read_status(tmp_path)["code"] is None
        end_watch(ddp, code, "it ended")
        assert read_status(tmp_path)["code"] == code
    assert sorted(os.listdir(tmp_path)) == ["lock", "status.json"]


def test_a_watch_that_ends_without_a_code_leaves_the_outcome_as_it_is(tmp_path):
    ddp = Ddp()
    start_watch(ddp, tmp_path, minutes=0)
    end_watch(ddp)
    assert read_status(tmp_path)["reason"] == "running"


def test_the_first_failure_stays(tmp_path):
    """That of a guard, say, whose rank cannot speak; another rank then loses its connection."""
    ddp = Ddp()
    start_watch(ddp, tmp_path, minutes=0)
    first = {"code": 70, "reason": "no progress", "step": 4}
    (tmp_path / "status.json").write_text(json.dumps(first))
    end_watch(ddp, 1, "connection closed by peer")
    assert read_status(tmp_path) == first


def test_after_the_end_of_the_watch_nothing_is_noted_any_more(tmp_path):
    ddp = Ddp()
    start_watch(ddp, tmp_path, minutes=0)
    end_watch(ddp, 0, "done")
    stop_reason(ddp, 1)     # begins a watch without a run folder
    end_watch(ddp, 1, "too late")
    assert read_status(tmp_path)["reason"] == "done"


@pytest.mark.parametrize("code, noted", [(0, False), (75, False), (1, True), (130, True)])
def test_a_rank_other_than_0_notes_only_a_failure(code, noted, tmp_path):
    ddp = Ddp()
    start_watch(ddp, tmp_path, minutes=0)
    end_watch(Ddp(rank=1, world_size=2, state=ddp.state), code, "it ended")
    assert (read_status(tmp_path)["code"] == code) == noted


def test_without_a_run_folder_there_is_no_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ddp = Ddp()
    start_watch(ddp, minutes=0)
    end_watch(ddp, 0, "done")
    assert list(tmp_path.iterdir()) == []


def test_a_status_is_on_the_disk_before_it_has_its_name(tmp_path, disk_calls):
    start_watch(ddp := Ddp(), tmp_path, minutes=0)
    status = tmp_path / "status.json"
    assert disk_calls[:2] == [("fsync", status.read_bytes()), ("rename", status)]
    end_watch(ddp)


# ---------------------------------------------------------------- stacks, and a rank that hangs
def test_stacks_that_nobody_wrote_leave_no_file(tmp_path):
    ddp = Ddp()
    ddp.state.guard = os.open(os.devnull, os.O_WRONLY)
    start_watch(ddp, tmp_path, minutes=1)
    assert (tmp_path / "stacks" / "rank_0.txt").exists()
    note_progress(ddp)
    end_watch(ddp)
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("folder", ["None", "'out'"])
def test_a_rank_without_a_guard_and_without_progress_shows_its_stacks_and_ends(folder, tmp_path):
    done = fork_ranks(1, [script(tmp_path, f"""
start_watch(setup_ddp(quiet=True), {folder}, minutes=1 / 60)
def stuck():
    time.sleep(600)
stuck()
""")], tmp_path)
    assert done.returncode == 1 and "in stuck" in done.stderr, done.text


# ---------------------------------------------------------------- what asks for a stop
def test_without_a_request_there_is_no_reason_to_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() + 3600))
    ddp = Ddp()
    start_watch(ddp, tmp_path)
    assert stop_reason(ddp, 3) == ""
    end_watch(ddp)


def test_a_deadline_that_has_passed_asks_for_a_stop(monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() - 1))
    ddp = Ddp()
    assert stop_reason(ddp, 3) == "DDP_DEADLINE is reached"
    end_watch(ddp)


@pytest.mark.parametrize("text", ["soon", "nan", "-60", "3000"])
def test_a_deadline_that_is_no_time_is_refused_before_the_ranks_meet(text, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", text)
    with pytest.raises(SetupError, match=f"DDP_DEADLINE='{text}' is not a time"):
        setup_ddp()


def test_a_stop_file_is_looked_for_in_the_run_folder_wherever_the_script_goes(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ddp = Ddp()
    start_watch(ddp, "run")
    assert stop_reason(ddp, 3) == ""
    (tmp_path / "run" / "STOP").touch()
    monkeypatch.chdir("/")
    expected = f"{tmp_path}/run/STOP exists; remove it before the next start"
    assert stop_reason(ddp, 4) == expected
    end_watch(ddp)


def test_a_new_watch_knows_of_a_request_to_the_one_before():
    ddp = Ddp()
    start_watch(ddp)
    ddp.state.watch.requested = "SIGTERM"
    start_watch(ddp)
    assert stop_wanted(ddp) == 1.0
    end_watch(ddp)


def test_a_watch_leaves_the_handlers_as_they_were_and_no_thread():
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    ddp = Ddp()
    start_watch(ddp, signals=["SIGINT"])
    start_watch(ddp)
    os.kill(os.getpid(), signal.SIGTERM)
    await_that(lambda: stop_wanted(ddp), 60, lambda: "SIGTERM was not noticed")
    assert stop_reason(ddp, 1).startswith("SIGTERM on rank 0")
    end_watch(ddp)
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == (before, threads)


def test_signals_that_a_watch_is_not_told_to_handle_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    ddp = Ddp()
    start_watch(ddp, signals=["SIGTERM", "SIGUSR1"])
    assert signal.getsignal(signal.SIGINT) is before
    end_watch(ddp)


def test_a_second_ctrl_c_raises_KeyboardInterrupt_and_one_that_comes_on_two_ways_does_not(
        monkeypatch):
    ddp = Ddp()
    start_watch(ddp)
    now = time.monotonic()
    with contextlib.ExitStack() as watched:
        watched.callback(end_watch, ddp)
        for seconds in (0.0, 0.1):    # from the terminal, and from the launcher
            monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert ddp.state.watch.requested.startswith("SIGINT on rank 0")


def test_stop_signals_do_not_end_the_workers_of_a_loader(tmp_path):
    done = fork_ranks(1, [script(tmp_path, """
worker_init(0)
for number in signal.SIGTERM, signal.SIGUSR1, signal.SIGINT:
    os.kill(os.getpid(), number)
print("alive")
""")], tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.text


# ---------------------------------------------------------------- checkpoints by time
# ---------------------------------------------------------------- how a process ends
def ends(folder, text, ranks=1, **env):
    """The Result of a script, without a guard, and its last line on stderr."""
    done = fork_ranks(ranks, [script(folder, text)], folder, env)
    return done, (done.stderr.splitlines() or [""])[-1]


HOST = socket.gethostname()
EXPECTED = "class NoBug(RuntimeError):\n    expected = True\n"


@pytest.mark.parametrize("end, code, cause, tracebacks", [
    ("raise ValueError('on purpose.')", 1, "ValueError: on purpose.", 1),
    ("raise NoBug('the disk is full. Free some.')", 1, "the disk is full. Free some.", 0),
    ("raise NoBug('two\\nlines')", 1, "two.", 0),
    ("sys.exit('no data?')", 1, "no data?", 0), ("sys.exit(5)", 5, "left with exit code 5.", 0),
    ("raise KeyboardInterrupt", 130, "interrupted (Ctrl-C).", 0),
    ("abort(ddp, 'no room', 9)", 9, "no room.", 0),
    ("abort(ddp, 'a story\\nof many lines')", 1, "a story.", 0)])
def test_the_last_line_names_the_rank_and_the_cause(end, code, cause, tracebacks, tmp_path):
    done, last = ends(tmp_path, f"""
{EXPECTED}
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp, "run")
    stop_reason(ddp, 4)
    {end}
""")
    assert done.returncode == code, done.text
    assert last == f"FAILED: rank 0 of 1 on {HOST}: {cause} No checkpoint yet."
    assert own_tracebacks(done.stderr) == tracebacks, done.text
    status = read_status(tmp_path / "run")
    assert (status["code"], status["step"]) == (code, 4)
    assert status["reason"].rstrip(".") == cause.rstrip("."), status


def test_the_last_line_names_the_checkpoint_from_which_the_same_command_goes_on(tmp_path):
    done, last = ends(tmp_path, """
with setup_ddp(quiet=True) as ddp:
    save_checkpoint("last.pt", ddp, step=7)
    raise ValueError("on purpose")
""")
    assert last == (f"FAILED: rank 0 of 1 on {HOST}: ValueError: on purpose. Last checkpoint: "
                    "last.pt (step 7). To go on, load_checkpoint it.")


def test_after_an_error_that_a_person_must_mend_the_same_command_is_not_advised(tmp_path):
    done, last = ends(tmp_path, """
def fill(*_):
    os.symlink("/dev/full", ".full.pt.tmp")
fill()
time.sleep = fill     # it is full at the second try too
with setup_ddp(quiet=True) as ddp:
    save_checkpoint("last.pt", ddp, step=7)
    save_checkpoint("full.pt", ddp, step=8)
""")
    assert last.endswith("Last checkpoint: last.pt (step 7)."), done.text
    assert "No space left on device" in last and "Traceback" not in done.stderr


def test_bad_input_is_told_without_a_last_line(tmp_path):
    done, last = ends(tmp_path, "abort(setup_ddp(quiet=True), 'no such file', 2)\n")
    assert (done.returncode, last) == (2, f"[rank 0 of 1 on {HOST}] no such file")


def test_an_error_that_python_has_printed_is_not_printed_again(tmp_path):
    done, last = ends(tmp_path, "setup_ddp(quiet=True)\nraise ValueError('on purpose')\n")
    assert done.returncode == 1 and own_tracebacks(done.stderr) == 1, done.text
    assert last == f"FAILED: rank 0 of 1 on {HOST}: ValueError: on purpose."


def test_one_process_may_end_without_cleanup(tmp_path):
    done, _ = ends(tmp_path, "setup_ddp(quiet=True)\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("request_, code", [("", 0), ("os.kill(os.getpid(), signal.SIGTERM)", 75)])
def test_a_script_that_notes_no_outcome_is_finished_or_stopped(request_, code, tmp_path):
    done, _ = ends(tmp_path, f"""
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp, "run")
    {request_}
    stop_reason(ddp, 4)
""")
    assert done.returncode == 0 and read_status(tmp_path / "run")["code"] == code, done.text
    assert sorted(os.listdir(tmp_path / "run")) == ["lock", "status.json"]
