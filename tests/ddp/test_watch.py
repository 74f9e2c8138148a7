"""Whose is a run folder, what asks a run to stop, and what is left in the folder when it ends?"""
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

import pytest

import ddp_watch
from ddp_setup import STOPPED, Ddp
from ddp_watch import lock_folder, note_progress, watch_run
from launchers import (
    ForkedRanks,
    await_that,
    by_hand,
    fork_ranks,
    own_tracebacks,
    read_status,
    script,
)

DDP = Ddp(host="n1")    # one process


@contextlib.contextmanager
def running(folder, text, **env):
    """A process that runs this text in a folder, until it prints "ready": ForkedRanks of one."""
    with ForkedRanks([script(folder, text)], folder, {0: {"DDP_GUARD": 0, **env}}) as ranks:
        ranks.wait_for("ready")
        yield ranks


# ---------------------------------------------------------------- the lock
HOLD = """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0) as watch:
    print("ready", flush=True)
    while not watch.flag():
        time.sleep(0.01)
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
        with watch_run(DDP, tmp_path / "run", minutes=0):
            words = (tmp_path / "run" / "lock").read_text()
    assert words == f"process {os.getpid()} on n1\n"    # of the last one alone


def test_a_folder_is_free_when_the_block_ends(tmp_path):
    with running(tmp_path, HOLD) as holder:
        assert not is_free(tmp_path / "run")
        os.kill(holder.pids[0], signal.SIGUSR1)    # a request to stop
        await_that(lambda: is_free(tmp_path / "run"), 60, lambda: "the folder is still in use")


def test_a_process_that_reads_its_own_lock_keeps_the_folder(tmp_path):
    """As one does that copies its run folder, or uploads it."""
    with running(tmp_path, HOLD.replace("print", "open('run/lock').read()\n    print")):
        assert not is_free(tmp_path / "run")


def test_a_worker_that_outlives_the_holder_does_not_keep_the_folder(tmp_path):
    with running(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
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
    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    lock_folder(tmp_path).close()
    said = capsys.readouterr().out
    assert said == (f"ATTENTION: {tmp_path} is on a file system without locks (No locks "
                    "available): nothing keeps a second run out\n")


REFUSED = """
with setup_ddp(quiet=True) as ddp:
    try:
        with watch_run(ddp, sys.argv[1], minutes=0):
            print("begun", flush=True)
    except ValueError as error:
        print(f"refused: {error}", flush=True)
"""


def test_a_start_in_a_folder_in_use_is_refused_on_all_ranks_and_writes_nothing(tmp_path):
    with running(tmp_path, HOLD) as holder:
        before = (tmp_path / "run" / "status.json").read_text()
        (tmp_path / "refused").mkdir()
        done = fork_ranks(3, [script(tmp_path / "refused", REFUSED), "run"], tmp_path)
        expected = f"run is in use by process {holder.pids[0]} on"
    assert (done.returncode, done.stdout.count(expected)) == (0, 3), done.text
    assert sorted(os.listdir(tmp_path / "run")) == ["lock", "status.json"]    # of the holder
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {holder.pids[0]} on")
    assert (tmp_path / "run" / "status.json").read_text() == before


def test_a_folder_that_cannot_be_made_is_refused_on_all_ranks(tmp_path):
    done = fork_ranks(2, [script(tmp_path, REFUSED), "script.py/run"], tmp_path)
    assert (done.returncode, done.stdout.count("refused: cannot write into ")) == (0, 2), done.text
    assert done.stdout.count("script.py") == 2, done.text


# ---------------------------------------------------------------- status.json
def test_a_run_is_on_until_its_block_ends(tmp_path):
    with watch_run(DDP, tmp_path / "new", minutes=0) as watch:
        status = read_status(tmp_path / "new")
        assert (status["code"], status["reason"], status["step"]) == (None, "running", None)
        watch.stop_reason(3)
    assert read_status(tmp_path / "new") == {
        "code": 0, "reason": "finished", "suspects": "", "step": 3, "run": status["run"]}


def test_a_script_tells_in_its_own_words_why_it_has_finished(tmp_path):
    with watch_run(DDP, tmp_path, minutes=0) as watch:
        watch.reason = "early stop"
    assert read_status(tmp_path)["reason"] == "early stop"


@pytest.mark.parametrize("by_exit", [True, False])
def test_a_run_that_leaves_its_loop_for_a_request_is_stopped_with_work_left(
        by_exit, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() - 1))
    with contextlib.suppress(SystemExit):
        with watch_run(DDP, tmp_path, minutes=0) as watch:
            watch.stop_reason(4)
            if by_exit:
                sys.exit(STOPPED)
    status = read_status(tmp_path)
    assert (status["code"], status["reason"]) == (75, "DDP_DEADLINE is reached")


@pytest.mark.parametrize("end, code, reason", [
    (ValueError("on purpose"), 1, "ValueError: on purpose"), (SystemExit(0), 0, "finished"),
    (SystemExit(3), 3, "left with exit code 3"), (SystemExit("no data"), 1, "no data"),
    (KeyboardInterrupt(), 130, "interrupted (Ctrl-C)")], ids=str)
def test_what_leaves_the_block_of_one_process_is_noted_and_may_be_caught(
        end, code, reason, tmp_path):
    with pytest.raises(type(end)) as caught:
        with watch_run(DDP, tmp_path, minutes=0) as watch:
            watch.progress(4)
            raise end
    status = read_status(tmp_path)
    assert caught.value is end
    assert (status["code"], status["reason"], status["step"]) == (code, reason, 4)


def test_a_new_run_replaces_the_outcome_of_the_one_before_and_leaves_no_other_file(tmp_path):
    former = {"run": "none"}
    for end, code in ((ValueError, 1), (SystemExit, 0)):
        with contextlib.suppress(end):
            with watch_run(DDP, tmp_path, minutes=0):
                assert read_status(tmp_path)["code"] is None
                assert read_status(tmp_path)["run"] != former["run"]
                raise end
        former = read_status(tmp_path)
        assert former["code"] == code
    assert sorted(os.listdir(tmp_path)) == ["lock", "status.json"]


def test_the_first_failure_of_a_run_stays(tmp_path):
    """That of a guard, say, whose rank cannot speak; another rank then loses its connection."""
    with pytest.raises(RuntimeError):
        with watch_run(DDP, tmp_path, minutes=0):
            first = {**read_status(tmp_path), "code": 70, "reason": "no progress"}
            (tmp_path / "status.json").write_text(json.dumps(first))
            raise RuntimeError("connection closed by peer")
    assert read_status(tmp_path) == first


def test_a_failure_of_another_run_does_not_stay(tmp_path):
    """A rank may see it for a while where its file system shows what was there before."""
    with pytest.raises(ValueError):
        with watch_run(DDP, tmp_path, minutes=0):
            former = {**read_status(tmp_path), "code": 70, "run": "former"}
            (tmp_path / "status.json").write_text(json.dumps(former))
            raise ValueError("on purpose")
    assert read_status(tmp_path)["reason"] == "ValueError: on purpose"


def test_a_forked_child_leaves_the_block_without_a_trace(tmp_path):
    done = fork_ranks(1, [script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
    if os.fork() == 0:
        sys.exit(3)
    os.wait()
    print(open("run/status.json").read())
""")], tmp_path)
    assert done.returncode == 0 and "running" in done.stdout, done.text
    assert read_status(tmp_path / "run")["code"] == 0


def test_without_a_run_folder_there_is_no_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with watch_run(DDP, minutes=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_later_tells_of_a_request_before(tmp_path):
    with watch_run(DDP, minutes=0) as watch:
        signal.raise_signal(signal.SIGTERM)
        watch.take_folder(tmp_path / "run")
        assert read_status(tmp_path / "run")["code"] is None
        assert watch.stop_reason(0) == "SIGTERM on rank 0 (n1)"
    assert read_status(tmp_path / "run")["code"] == 75


def test_a_second_watch_in_the_block_of_another_is_refused(tmp_path):
    with watch_run(DDP, tmp_path / "first", minutes=0) as watch:
        with pytest.raises(RuntimeError, match="inside the block of another watch_run"):
            watch_run(DDP, tmp_path / "second", minutes=0).__enter__()
        watch.stop_reason(1)    # the first one is on
    assert read_status(tmp_path / "first")["code"] == 0
    assert not (tmp_path / "second").exists()


# ---------------------------------------------------------------- what is printed of an end
def test_the_last_line_of_an_exception_names_rank_and_checkpoint():
    with pytest.raises(ValueError) as caught:
        with watch_run(DDP, minutes=0) as watch:
            watch.saved("last.pt", 7)
            raise ValueError("on purpose\nMore of it.")
    assert traceback.format_exception(caught.value)[-1] == (
        "FAILED: rank 0 of 1 on n1: ValueError: on purpose. Last checkpoint: last.pt (step 7). "
        "To go on, load_checkpoint it.\n")


@pytest.mark.parametrize("text, advise, last", [
    ("no room?", True, "no room? Last checkpoint: last.pt (step 7). Go on."),
    ("a story\nof many lines", False, "a story. Last checkpoint: last.pt (step 7).")])
def test_the_last_line_of_abort_names_the_checkpoint(text, advise, last, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        with watch_run(DDP, tmp_path, minutes=0) as watch:
            watch.saved("last.pt", 7, "Go on.")
            watch.abort(text, 9, advise)
    said = capsys.readouterr().err
    assert (end.value.code, said.splitlines()[-1]) == (9, f"FAILED: rank 0 of 1 on n1: {last}")
    first_line = text.splitlines()[0]
    assert said.count(first_line) == len(text.splitlines())    # alone it is not told twice
    status = read_status(tmp_path)
    assert (status["code"], status["reason"]) == (9, first_line)


def test_bad_input_is_told_without_a_last_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        with watch_run(DDP, tmp_path, minutes=0) as watch:
            watch.abort("no such file", 2)
    assert (end.value.code, capsys.readouterr().err) == (2, "no such file\n")
    assert read_status(tmp_path)["code"] == 2


# ---------------------------------------------------------------- stacks, and a rank that hangs
@pytest.fixture
def guard(monkeypatch):
    """A file descriptor of what this process tells its parent, which is taken for its guard."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setenv("DDP_GUARD_FD", f"{write}:{os.getppid()}")
    return read


def test_stacks_that_nobody_wrote_leave_no_file(tmp_path, guard):
    with watch_run(DDP, tmp_path, minutes=1):
        assert (tmp_path / "stacks" / "rank_0.txt").exists()
        note_progress()
    assert not (tmp_path / "stacks").exists()


def test_code_without_the_watch_gives_signs_of_progress_in_its_block_alone(guard):
    with watch_run(DDP, minutes=0) as watch:
        watch.progress(3)
        os.read(guard, 1 << 16)
        note_progress()
        assert json.loads(os.read(guard, 1 << 16)) == {"step": 3}
    os.read(guard, 1 << 16)
    note_progress()
    with pytest.raises(BlockingIOError):
        os.read(guard, 1 << 16)


def test_another_limit_may_hold_once_the_folder_is_taken(tmp_path, guard):
    with watch_run(DDP, minutes=20) as watch:
        os.read(guard, 1 << 16)
        watch.take_folder(tmp_path, minutes=1)
        told = json.loads(os.read(guard, 1 << 16).splitlines()[0])
    assert told["limit"] == 60


@pytest.mark.parametrize("folder", ["None", "'out'"])
def test_a_rank_without_a_guard_and_without_progress_shows_its_stacks_and_ends(folder, tmp_path):
    done = fork_ranks(1, [script(tmp_path, f"""
def stuck():
    time.sleep(600)
with setup_ddp(quiet=True) as ddp, watch_run(ddp, {folder}, minutes=1 / 60):
    stuck()
""")], tmp_path)
    assert done.returncode == 1 and "in stuck" in done.stderr, done.text


IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUCK = f"""
import multiprocessing
import ddp_watch
ddp_watch.WORKERS = 0.5
def stuck(number=1):
    if number == 1:    # the other items of a DataLoader
        {IGNORES}
        time.sleep(600)
    return number
"""


def test_a_child_that_hangs_does_not_keep_python_after_the_block(tmp_path):
    done = fork_ranks(1, [script(tmp_path, f"""{STUCK}
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=0):
    multiprocessing.Process(target=stuck, daemon=True).start()
    time.sleep(0.5)    # it ignores SIGTERM by now
""")], tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_two_workers_of_a_loader_that_hang_do_not_keep_python_after_the_block(tmp_path):
    done = fork_ranks(1, [script(tmp_path, f"""{STUCK}
class Items:
    __len__ = lambda self: 9
    __getitem__ = lambda self, i: stuck(i > 0)
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=0):
    loader = torch.utils.data.DataLoader(Items(), batch_size=None, num_workers=2,
                                         worker_init_fn=worker_init)
    batches = iter(loader)    # it lives until Python has ended
    next(batches)
""")], tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_workers_that_heed_sigterm_end_with_python_at_once(tmp_path):
    done = fork_ranks(1, [script(tmp_path, f"""{STUCK}
ddp_watch.WORKERS = 600.0
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=0):
    loader = torch.utils.data.DataLoader(range(9), batch_size=None, num_workers=2)
    batches = iter(loader)    # it lives until Python has ended
    next(batches)
""")], tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.text


# ---------------------------------------------------------------- what asks for a stop
def test_without_a_request_there_is_no_reason_to_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() + 3600))
    with watch_run(DDP, tmp_path, minutes=0) as watch:
        assert watch.stop_reason(3) == ""


@pytest.mark.parametrize("text", ["soon", "nan", "-60", "3000"])
def test_a_deadline_that_is_no_time_is_refused_before_anything_is_written(
        text, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", text)
    with pytest.raises(ValueError, match=f"DDP_DEADLINE='{text}' is not a time"):
        watch_run(DDP, tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


def test_a_stop_file_is_looked_for_in_the_run_folder_wherever_the_script_goes(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with watch_run(DDP, "run", minutes=0) as watch:
        assert watch.stop_reason(3) == ""
        (tmp_path / "run" / "STOP").touch()
        monkeypatch.chdir("/")
        expected = f"{tmp_path}/run/STOP exists; remove it before the next start"
        assert watch.stop_reason(4) == expected


def test_where_the_caller_has_summed_the_flags_a_rank_waits_for_no_other():
    watch = watch_run(Ddp(world_size=2), minutes=0)    # of ranks that have not met
    assert watch.stop_reason(1, flags=0.0) == ""


STOPS = """
if os.environ["DDP_RANK"] == "0" and {deadline_in}:
    os.environ["DDP_DEADLINE"] = str(time.time() + {deadline_in})
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0) as watch:
    step = 0
    reason = ""
    while not reason:
        step += 1
        reason = watch.stop_reason(step)
        time.sleep(0.01 * ddp.rank)
        if step == 1:
            print("ready", flush=True)
    print(f"{{step}}: {{reason}}", flush=True)
    sys.exit(STOPPED)
"""


@pytest.mark.parametrize("ask, reason", [
    ("SIGUSR1", "SIGUSR1 on rank 1 "), ("DDP_DEADLINE", "DDP_DEADLINE is reached"),
    ("STOP", "run/STOP exists")])
def test_what_asks_one_rank_has_all_stop_after_the_same_step(ask, reason, tmp_path):
    with by_hand(tmp_path, STOPS.format(deadline_in=1 if ask == "DDP_DEADLINE" else 0), range(3),
                 DDP_GUARD=0) as ranks:
        ranks.wait_for("ready")
        if ask == "SIGUSR1":
            os.kill(ranks.pids[1], signal.SIGUSR1)
        elif ask == "STOP":
            (tmp_path / "run" / "STOP").touch()
        assert ranks.codes() == [75, 75, 75], ranks.err()
        said, = {ranks.out(rank) for rank in range(3)}    # the same
    status = read_status(tmp_path / "run")
    assert reason in status["reason"] and said == f"ready\n{status['step']}: {status['reason']}\n"


def test_a_watch_leaves_the_handlers_as_they_were_and_no_thread():
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    with watch_run(DDP) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        await_that(watch.flag, 60, lambda: "SIGTERM was not noticed")
        assert watch.stop_reason(1) == "SIGTERM on rank 0 (n1)"
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == (before, threads)


def test_a_handler_of_a_library_in_c_is_given_back_as_the_default(monkeypatch):
    """Python cannot tell what it was."""
    set_handler = signal.signal
    before = set_handler(signal.SIGUSR1, signal.SIG_IGN)
    monkeypatch.setattr(signal, "signal", lambda *what: set_handler(*what) and None)
    with watch_run(DDP, minutes=0, signals=["SIGUSR1"]):
        pass
    assert set_handler(signal.SIGUSR1, before) == signal.SIG_DFL


def test_signals_that_a_watch_is_not_told_to_handle_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with watch_run(DDP, minutes=0, signals=["SIGTERM", "SIGUSR1"]):
        assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_step_ends_the_run_at_once():
    with pytest.raises(KeyboardInterrupt):
        with watch_run(DDP, minutes=0):
            signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_raises_KeyboardInterrupt_and_one_that_comes_on_two_ways_does_not(
        monkeypatch):
    now = time.monotonic()
    with watch_run(DDP, minutes=0) as watch:
        watch.stop_reason(1)
        for seconds in (0.0, 0.1):    # from the terminal, and from the launcher
            monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert watch.stop_reason(2) == "SIGINT on rank 0 (n1)"


def test_stop_signals_do_not_end_the_workers_of_a_loader(tmp_path):
    done = fork_ranks(1, [script(tmp_path, """
worker_init(0)
for number in signal.SIGTERM, signal.SIGUSR1, signal.SIGINT:
    os.kill(os.getpid(), number)
print("alive")
""")], tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.text


# ---------------------------------------------------------------- the end of several ranks
HOST = socket.gethostname()


def test_a_rank_that_comes_late_to_the_end_of_the_block_is_waited_for(tmp_path):
    done = fork_ranks(2, [script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
    if ddp.rank == 1:
        time.sleep(1)
        print(open("run/status.json").read())
""")], tmp_path)
    assert done.returncode == 0 and "running" in done.stdout, done.text
    assert read_status(tmp_path / "run")["code"] == 0


def test_a_rank_that_never_comes_to_the_end_of_the_block_is_named(tmp_path):
    done = fork_ranks(2, [script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=2 / 60) as watch:
    while ddp.rank == 1:
        watch.progress()
        time.sleep(0.05)
""")], tmp_path, timeout=100)
    cause = ("this rank left the block of watch_run after step None, but rank(s) 1 did not within "
             "2 s")
    expected = f"FAILED: rank 0 of 2 on {HOST}: {cause}. No checkpoint yet."
    assert done.returncode == 70 and done.stderr.splitlines()[-1] == expected, done.text
    status = read_status(tmp_path / "run")
    assert status["code"] == 70 and cause in status["reason"], status


def test_a_failure_of_a_former_run_does_not_silence_a_rank_of_this_one(tmp_path):
    done = fork_ranks(2, [script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
    if ddp.rank == 1:
        with open("run/status.json", "w") as file:    # what its host may still see
            file.write('{"code": 70, "reason": "of before", "step": 3, "run": "former"}')
        raise ValueError("on purpose")
    all_sum(1.0, ddp)
""")], tmp_path)
    assert f"FAILED: rank 1 of 2 on {HOST}: ValueError: on purpose." in done.stderr, done.text
    assert "on purpose" in read_status(tmp_path / "run")["reason"]


def test_of_all_ranks_with_one_error_one_says_so(tmp_path):
    """A RuntimeError may also be of a rank that has lost another: all of them wait first."""
    done = fork_ranks(4, [script(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0) as watch:
    barrier(ddp)
    raise RuntimeError("mat1 and mat2")
""")], tmp_path)
    assert done.returncode == 1 and own_tracebacks(done.stderr) == 1, done.text
    assert done.stderr.count("FAILED: rank 0 of 4") == done.stderr.count("FAILED") == 1, done.text


# ---------------------------------------------------------------- what it is given
@pytest.mark.parametrize("minutes", [-1, float("nan"), float("inf")])
def test_a_limit_that_no_timer_can_hold_is_refused(minutes):
    with pytest.raises(ValueError, match="minutes is"):
        watch_run(DDP, minutes=minutes)


def test_a_number_of_steps_of_numpy_is_one_of_python(tmp_path):
    numpy = pytest.importorskip("numpy")
    with watch_run(DDP, tmp_path, minutes=0) as watch:
        assert watch.stop_reason(numpy.int64(3)) == ""
    assert read_status(tmp_path)["step"] == 3


def test_a_folder_that_is_renamed_while_it_is_locked_is_refused(tmp_path, monkeypatch):
    """By --fresh of another run: the lock would be that of the former folder."""
    real = ddp_watch._lock

    def lock_after_another_has_renamed(file):
        (tmp_path / "run").rename(tmp_path / "run.old1")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").touch()
        real(file)

    monkeypatch.setattr(ddp_watch, "_lock", lock_after_another_has_renamed)
    with pytest.raises(ValueError, match="another run has just renamed"):
        lock_folder(tmp_path / "run")


def test_where_torch_can_the_groups_own_limit_is_later_than_that_of_the_watch(tmp_path):
    done = fork_ranks(2, [script(tmp_path, """
import torch.distributed as dist
limits = []
dist.set_timeout = lambda timeout: limits.append(timeout.total_seconds())    # of torch 2.14
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=1):
    print0(ddp, limits[0] > 60)
""")], tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.text
