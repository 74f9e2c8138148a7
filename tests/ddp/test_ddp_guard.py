"""Does a guard end a rank that cannot end itself, say why in one line, and else keep silent?"""
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from subprocess import PIPE
from types import SimpleNamespace

import pytest

import ddp_guard
from ddp_guard import Known, Place
from ddp_setup import Ddp
from ddp_watch import lock_folder, watch_run
from launchers import (
    GRACE,
    ROOT,
    await_that,
    by_hand,
    clean_environment,
    read_status,
    started,
)

HOST = socket.gethostname()


def guarded(text, folder, *words, before=("-m", "ddp_guard"), env=None, **options):
    """Run a script of this text to its end, under a guard unless `before` is empty."""
    (folder / "script.py").write_text(text)
    return subprocess.run([sys.executable, *before, folder / "script.py", *words], text=True,
                          env=clean_environment(env={"PYTHONPATH": ROOT, **(env or {})}),
                          timeout=600, **{"stdout": PIPE, "stderr": PIPE, **options})


# A rank that tells its guard what ddp_watch.py would.
TELLS = """
import json, os, signal, sys, time
pipe = int(os.environ["DDP_GUARD_FD"].partition(":")[0])
def tell(**message):
    os.write(pipe, json.dumps(message).encode() + b"\\n")
"""
BEGUN = TELLS + "tell(rank=1, size=3, host='n1')\n"    # the block of watch_run


# ---------------------------------------------------------------- where there is a guard
def ignore_ended_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.parametrize("words, code", [(["--help"], 0), ([], 2)])
def test_help_of_the_guard_is_its_own_and_not_that_of_python(words, code):
    done = subprocess.run([sys.executable, ROOT / "ddp_guard.py", *words], timeout=60, stdout=PIPE,
                          text=True, env=clean_environment())
    assert done.returncode == code and done.stdout.startswith("usage: python -m ddp_guard SCRIPT")


def test_any_script_can_be_guarded_with_its_arguments_output_and_exit_code(tmp_path):
    text = "import sys\nprint(sys.argv[1:], sys.flags.optimize, sys.stdin.read())\nsys.exit(7)\n"
    done = guarded(text, tmp_path, "a", "--b", before=("-u", "-O", "-m", "ddp_guard"), input="text",
                   preexec_fn=ignore_ended_children)
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', '--b'] 1 text\n", "")


IS_GUARDED = """
import os, ddp_guard
ddp_guard.supervise()
print(os.environ.get("DDP_GUARD_FD", "").endswith(f":{os.getppid()}"))
"""


@pytest.mark.parametrize("before", [(), ("-m", "ddp_guard")], ids=["supervise", "-m"])
@pytest.mark.parametrize("env, has_guard", [
    ({}, True), ({"PALS_RANKID": "0"}, True), ({"DDP_GUARD": "0"}, False)])
def test_every_script_has_a_guard_where_it_is_wanted(env, has_guard, before, tmp_path):
    done = guarded(IS_GUARDED, tmp_path, before=before, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{has_guard}\n", "")


@pytest.mark.parametrize("before", [
    ("-i",), ("-m", "pdb", "-c", "continue", "-c", "quit"), ("-i", "-m", "ddp_guard")])
def test_what_a_person_works_with_has_no_guard_and_runs(before, tmp_path):
    done = guarded(IS_GUARDED, tmp_path, before=before, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "False\n" in done.stdout, done.stdout + done.stderr


def test_a_notebook_has_no_guard(tmp_path):
    done = guarded(f"import sys\nsys.ps1 = '>>> '\n{IS_GUARDED}", tmp_path, before=())
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_program_that_comes_through_a_pipe_has_no_guard():
    done = subprocess.run([sys.executable, "-"], input=IS_GUARDED, text=True, capture_output=True,
                          env=clean_environment(env={"PYTHONPATH": ROOT}), timeout=600)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_program_that_a_rank_starts_has_a_guard_of_its_own(tmp_path):
    done = guarded(f"""{IS_GUARDED}
import subprocess, sys
if len(sys.argv) == 1:
    print(os.getppid(), flush=True)
    subprocess.run([sys.executable, sys.argv[0], "child"])
else:
    print(os.getppid())
""", tmp_path, before=())
    first, guard, second, other_guard = done.stdout.split()
    assert (first, second) == ("True", "True") and guard != other_guard, done.stderr


# ---------------------------------------------------------------- the end of a rank
@pytest.mark.parametrize("number, cause", [
    (9, "SIGKILL: out of memory?"), (11, "SIGSEGV"), (7, "SIGBUS: is /dev/shm full?")])
def test_a_death_by_signal_is_told_with_a_likely_cause(number, cause, tmp_path):
    done = guarded(f"{BEGUN}os.kill(os.getpid(), {number})\n", tmp_path)
    said = f"\nFAILED: rank 1 of 3 on n1: died without a word ({cause}).\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_death_outside_a_watch_is_told_with_the_launchers_number(tmp_path):
    done = guarded("import os\nos.kill(os.getpid(), 9)\n", tmp_path, env={"PMI_RANK": "5"})
    said = f"\nFAILED: rank 5 on {HOST}: died without a word (SIGKILL: out of memory?).\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_the_last_line_of_a_guard_names_the_checkpoint(tmp_path):
    done = guarded(f"""{BEGUN}
tell(saved="Last checkpoint: last.pt (step 7).")
os.kill(os.getpid(), 9)
""", tmp_path)
    assert done.stderr.endswith("(SIGKILL: out of memory?). Last checkpoint: last.pt (step 7).\n")


def dies_where(folder, **status):
    """The end of a guarded rank of the run "this" that dies at step 4, where status.json holds
    this."""
    (folder / "run").mkdir()
    (folder / "run" / "status.json").write_text(json.dumps(status))
    return guarded(f"{BEGUN}tell(run_dir='run', run='this', step=4)\nos.kill(os.getpid(), 9)\n",
                   folder, cwd=folder)


def test_a_guard_notes_the_death_of_its_rank(tmp_path):
    done = dies_where(tmp_path, code=None, reason="running", step=0, run="this")
    noted = read_status(tmp_path / "run")
    assert (noted["code"], noted["step"], noted["run"]) == (1, 4, "this")
    assert "rank 1 of 3 on n1: died without a word (SIGKILL" in noted["reason"]
    assert os.listdir(tmp_path / "run") == ["status.json"] and "FAILED" in done.stderr


def test_a_guard_is_silent_where_a_failure_of_its_run_stands(tmp_path):
    """Then another rank, or its guard, has spoken."""
    failure = {"code": 1, "reason": "of rank 2", "step": 3, "run": "this"}
    done = dies_where(tmp_path, **failure)
    assert (done.returncode, done.stderr) == (1, "")
    assert read_status(tmp_path / "run") == failure


@pytest.mark.parametrize("code", [1, 70])
def test_a_failure_of_a_former_run_does_not_silence_a_guard(code, tmp_path):
    done = dies_where(tmp_path, code=code, reason="of before", step=3, run="former")
    assert "FAILED: rank 1 of 3 on n1: died" in done.stderr, done.stderr
    noted = read_status(tmp_path / "run")
    assert (noted["code"], noted["run"]) == (1, "this") and "died" in noted["reason"]


@pytest.mark.parametrize("end, code", [
    ("os.kill(os.getpid(), 15)", 143),     # of a launcher, as another rank has failed
    ("tell(spoken=True)\nsys.exit(3)", 3), ("tell(spoken=True)\nos.abort()", 1),
    ("tell(left=True)\nsys.exit(75)", 75), ("tell(left=True)", 0),
    ("tell(left=True)\nos.kill(os.getpid(), 15)", 143)],
    ids=["SIGTERM", "spoken", "spoken, then aborted", "stopped", "finished", "SIGTERM at the end"])
def test_a_guard_keeps_silent_where_its_rank_has_spoken_or_others_do(end, code, tmp_path):
    done = guarded(BEGUN + end, tmp_path)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("end, code", [("os._exit(0)", 1), ("os._exit(3)", 3)])
def test_a_process_that_ends_within_its_watch_without_a_word_has_failed(end, code, tmp_path):
    done = guarded(BEGUN + end, tmp_path)
    said = f"\nFAILED: rank 1 of 3 on n1: left with exit code {end[-2]} without a word.\n"
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("code", [0, 2])
def test_a_script_without_a_watch_may_end_as_it_likes(code, tmp_path):
    done = guarded(f"import sys\nsys.exit({code})\n", tmp_path)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_watch_that_refuses_its_folder_is_told_once(tmp_path):
    with lock_folder(tmp_path / "run"):
        with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run"):
    print("begun")
""", range(1)) as ranks:
            assert (ranks.codes(), ranks.out()) == ([1], ""), ranks.err()
            said = ranks.err()
    assert said.count("is in use by") == 1 and "FAILED" not in said, said


def test_a_line_that_is_no_message_does_not_end_a_healthy_rank(tmp_path):
    done = guarded(f"{BEGUN}os.write(pipe, b'no JSON\\n')\ntell(left=True)\n", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_guard_that_cannot_print_ends_all_the_same(tmp_path, monkeypatch):
    read, stderr = os.pipe()      # nobody reads it, and it takes no byte more
    os.set_blocking(stderr, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stderr, bytes(4096))
    os.set_blocking(stderr, True)
    done = guarded(f"{BEGUN}os.kill(os.getpid(), 9)\n", tmp_path, stderr=stderr)
    os.close(read)
    os.close(stderr)
    assert done.returncode == 1


# ---------------------------------------------------------------- the other ranks
@pytest.mark.parametrize("code, asked", [(2, b"cmd=abort exitcode=2\n"), (0, b"")])
def test_a_rank_that_fails_outside_a_watch_has_mpich_end_the_others(
        code, asked, tmp_path):
    read, write = os.pipe()
    with contextlib.closing(os.fdopen(read, "rb")) as mpich:
        done = guarded(f"import sys\nsys.exit({code})\n", tmp_path, env={"PMI_FD": write},
                       pass_fds=[write])
        os.close(write)
        assert (done.returncode, mpich.read()) == (code, asked)


def test_mpich_is_asked_to_end_all_ranks_when_the_rank_has_ended(tmp_path):
    """It hangs if a guard ends before its rank."""
    (tmp_path / "script.py").write_text(f"""{BEGUN}
os.write(1, f"{{os.getpid()}}\\n".encode())
tell(limit=0.5, step=3)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
time.sleep(600)
""")
    asked, write = os.pipe()
    env = clean_environment(env={"PYTHONPATH": ROOT, "PMI_FD": write})
    with started([sys.executable, "-m", "ddp_guard", "script.py"], cwd=tmp_path, env=env,
                 stdout=PIPE, stderr=PIPE, pass_fds=[write]) as guard:
        os.close(write)
        rank = int(guard.stdout.readline())
        assert os.read(asked, 100) == b"cmd=abort exitcode=70\n"
        os.close(asked)
        assert not os.path.exists(f"/proc/{rank}")
        assert guard.wait(60) == 70


@pytest.mark.parametrize("end, step, cancelled", [
    ("os.kill(os.getpid(), 9)", "77.3", ["77.3\n"]),
    ("sys.exit(2)", "77.3", ["--signal SIGURG 77.3\n"]),
    ("tell(left=True)", "77.3", []), ("os.kill(os.getpid(), 9)", "", [])])
def test_slurm_is_asked_to_end_the_step_of_a_rank_that_fails(end, step, cancelled, tmp_path):
    """srun goes on for an exit code. A program of this name stands for Slurm's, which would ask a
    server."""
    program = tmp_path / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\necho no server >&2\n')
    program.chmod(0o755)
    done = guarded(f"{TELLS}tell(rank=0, host='n0', slurm_step={step!r})\n{end}\n", tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    found = []
    if (tmp_path / "cancelled").exists():
        found = (tmp_path / "cancelled").read_text().splitlines(keepends=True)
    assert found == cancelled
    assert "no server" not in done.stderr, "the line FAILED stays the last one"


@pytest.mark.parametrize("env, step", [
    ({"SLURM_STEP_NUM_TASKS": "2"}, "77.3"), ({"SLURM_STEP_NUM_TASKS": "1"}, ""), ({}, ""),
    ({"SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "none"}, ""),
    ({"SLURM_STEP_NUM_TASKS": "2", "MPI_LOCALRANKID": "0"}, "")])
def test_without_a_watch_a_guard_finds_the_step_of_its_rank_itself(env, step, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    assert Known().slurm_step == step


@pytest.mark.parametrize("terminal, step", [(False, "77.3"), (True, "")])
def test_a_rank_tells_its_step_unless_it_is_at_a_terminal(terminal, step, monkeypatch):
    """A person's shell, in which it runs, may be a task of it: srun -n 4 --pty bash."""
    pipe, ranks_end = os.pipe()
    told = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1", "DDP_GUARD_FD": f"{ranks_end}:{os.getppid()}"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda _: terminal)
    with watch_run(Ddp(launcher="Slurm step"), minutes=0):
        first = os.read(pipe, 1 << 16).splitlines()[0]
    assert json.loads(first)["slurm_step"] == step


def test_a_rank_does_not_outlive_its_guard(tmp_path):
    (tmp_path / "script.py").write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\n"
                                        "time.sleep(600)\n")
    with started([sys.executable, "-m", "ddp_guard", "script.py"], cwd=tmp_path, stdout=PIPE,
                 env=clean_environment(env={"PYTHONPATH": ROOT})) as guard:
        rank = int(guard.stdout.readline())
        guard.kill()
        guard.wait(60)
        await_that(lambda: not os.path.exists(f"/proc/{rank}"), 60, lambda: "the rank lives on")


# ---------------------------------------------------------------- signals
def death_after_signals(terminal, *names):
    """The signal that ends a rank to whose guard these are sent, one after the other."""
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            guard = SimpleNamespace(rank=rank, known=Known(), ending=False,
                                    interrupted=None, terminal=terminal)
            guard.is_second_interrupt = lambda: ddp_guard.Guard.is_second_interrupt(guard)
            for name in names:
                ddp_guard.Guard.pass_on(guard, signal.Signals[name], None)
            return signal.Signals(-rank.wait(60)).name
        finally:
            rank.kill()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_to_the_guard_comes_to_its_rank(name):
    assert death_after_signals(False, name) == name


def test_that_a_terminal_was_closed_comes_to_the_rank_as_a_sigterm():
    assert death_after_signals(False, "SIGHUP") == "SIGTERM"


def test_a_ctrl_c_that_the_terminal_itself_sends_comes_to_the_rank_once():
    assert death_after_signals(True, "SIGINT", "SIGUSR1") == "SIGUSR1"


def test_a_closed_terminal_which_tells_the_whole_process_group_does_not_end_the_rank(tmp_path):
    done = guarded("""
import os, signal
os.kill(os.getpid(), signal.SIGHUP)
print("lives")
""", tmp_path)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def ignore_closed_terminals():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_under_nohup_a_rank_is_told_nothing_of_a_closed_terminal(tmp_path):
    done = guarded("""
import os, signal, time
seen = []
for number in signal.SIGTERM, signal.SIGUSR1:
    signal.signal(number, lambda number, _: seen.append(number))
for number in signal.SIGHUP, signal.SIGUSR1:    # to the guard, which passes on what it heeds
    os.kill(os.getppid(), number)
while signal.SIGUSR1 not in seen:
    time.sleep(0.01)
print(seen == [signal.SIGUSR1])
""", tmp_path, preexec_fn=ignore_closed_terminals)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_ctrl_c_ends_a_script_without_a_traceback(tmp_path):
    done = guarded("import ddp_guard, os, signal\nddp_guard.supervise()\n"
                   "os.kill(os.getpid(), signal.SIGINT)\n", tmp_path, before=())
    assert (done.returncode, done.stderr) == (130, "interrupted (Ctrl-C)\n")


TWICE = """
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
for number in 1, 2:
    os.kill(os.getppid(), signal.SIGINT)
    while len(seen) < number:    # the guard passes it on
        time.sleep(0.01)
    time.sleep(0.5)    # longer than between two signals of one Ctrl-C
"""


def test_a_second_ctrl_c_ends_a_rank_that_does_not_heed_the_first(tmp_path):
    done = guarded(f"{TELLS}tell(rank=0, size=3, host='n0')\n{TWICE}", tmp_path)
    said = "\nFAILED: rank 0 of 3 on n0: interrupted twice (Ctrl-C).\n"
    assert (done.returncode, done.stderr) == (130, said)


def test_ctrl_c_twice_does_not_change_the_code_of_a_rank_that_has_left(tmp_path):
    done = guarded(f"{BEGUN}tell(left=True)\n{TWICE}\nsys.exit(75)\n", tmp_path)
    assert (done.returncode, done.stderr) == (75, "")


def test_where_python_does_not_end_after_the_block_that_is_told_beside_the_end_of_the_run(tmp_path):
    """It may have failed after the block: code 0 would hide that."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps({"code": 0, "run": "this"}))
    done = guarded(f"""{BEGUN}
tell(run_dir="run", run="this")
tell(left=True, limit=0.5)
time.sleep(600)
""", tmp_path, cwd=tmp_path)
    assert done.returncode == 70 and "the run has ended, but Python did not" in done.stderr
    assert read_status(tmp_path / "run")["code"] == 0


def test_a_rank_that_is_killed_after_the_block_is_told_too(tmp_path):
    done = guarded(f"{BEGUN}tell(left=True)\nos.kill(os.getpid(), 9)\n", tmp_path)
    assert done.returncode == 1 and "died without a word (SIGKILL" in done.stderr


def test_where_stderr_is_closed_a_run_goes_on_and_nothing_else_gets_its_number(tmp_path):
    done = guarded("""
import os
from ddp_setup import *
from ddp_watch import *
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run"):
    print(os.readlink("/proc/self/fd/2"))
""", tmp_path, cwd=tmp_path, stderr=None, preexec_fn=close_stderr)
    assert (done.returncode, done.stdout) == (0, "/dev/null\n")
    assert read_status(tmp_path / "run")["code"] == 0


def close_stderr():
    os.close(2)


@pytest.mark.parametrize("code", [0, 75], ids=["finished", "stopped"])
def test_a_sigterm_after_a_good_end_lets_the_rank_finish_what_it_still_writes(code, tmp_path):
    """Such as a profile. Only a failure in status.json means that the launcher ends all."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps({"code": code, "run": "this"}))
    done = guarded(f"""{BEGUN}
import fcntl, termios
def finish(*_):
    print("written")
    sys.exit({code})
signal.signal(signal.SIGTERM, finish)
tell(run_dir="run", run="this", step=4)
tell(left=True)
while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):    # the guard has not heard it all
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
""", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "written\n", "")


# ---------------------------------------------------------------- no progress
STACKS = """
import faulthandler, os, signal, statistics, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def step(number):
    os.kill(os.getpid(), signal.SIGQUIT)
    return number
def main():
    statistics.mean(map(step, [1]))
faulthandler.register(signal.SIGQUIT)
main()
"""


def test_a_place_is_the_innermost_frames_of_the_main_thread_outside_libraries(tmp_path):
    stacks = guarded(STACKS, tmp_path, before=()).stderr
    assert stacks.lower().count("thread 0x") == 2 and "statistics.py" in stacks
    frames = ddp_guard.frames_in(stacks)
    assert ddp_guard.shown(frames) == "step (script.py:5) < main (script.py:8)"


def places(folder, *rows):
    """Have the guards of ranks note where these are; what rank 0's guard knows. A row: step, place,
    or None for a rank that does not answer, does it wait?"""
    (folder / "stacks").mkdir()
    known = Known()
    known.run_dir = str(folder)
    known.rank = 0
    known.size = len(rows)
    for rank, (step, where, waits) in enumerate(rows):
        place = Place(rank, f"n{rank}", step, where is not None, waits, where or "stopped")
        ddp_guard.note_place(known, place)
    return known


def late_by(known):
    own = ddp_guard.read_place(ddp_guard.stacks_of(known, 0))
    return [place.rank for place in ddp_guard.find_late(known, own)]


@pytest.mark.parametrize("rows, late", [
    ([(7, "a", True), (7, "a", True), (7, None, False)], [2]),
    ([(7, "a", True), (6, "b", True), (7, "a", False)], [1]),
    ([(7, "a", False), (7, "b", False), (7, "a", False)], [1]),
    ([(7, "a", True), (7, "b", False)], [1]), ([(7, "b", False), (7, "a", True)], [0]),
    ([(7, "a", True), (7, "b", False), (7, "b", False)], [1, 2]),
    ([(7, "a", True), (7, "b", True)], [0, 1]),
    ([(7, "a", True)] * 3, [0, 1, 2])],
    ids=["stopped", "an earlier step", "another place", "works while one waits",
         "rank 0 works", "two work", "two places", "no difference"])
def test_of_ranks_without_progress_the_late_ones_are_named(rows, late, tmp_path):
    assert late_by(places(tmp_path, *rows)) == late


def test_a_rank_whose_guard_or_host_is_silent_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp_guard, "OTHERS", 0.5)
    known = places(tmp_path, (7, "a", True), (7, "b", False), (6, "a", True))
    (tmp_path / "stacks" / "rank_1.txt").write_text("n1\n")    # as watch_run leaves it
    assert late_by(known) == [1]


HANGS = """
def stuck():
    {stuck}
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=3 / 60) as watch:
    for step in range(8):
        watch.stop_reason(step)
        if step == 5 and ddp.rank == 1:
            stuck()
"""


@pytest.mark.parametrize("stuck, place", [
    ("while True: pass", r"in stuck \(script.py:\d+\) < <module>"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped: no answer")],
    ids=["works alone", "stopped"])
def test_a_hang_is_ended_with_the_late_rank_its_step_and_its_place(stuck, place, tmp_path):
    with by_hand(tmp_path, HANGS.format(stuck=stuck), range(3)) as ranks:
        codes = ranks.codes(grace=GRACE)
        text = ranks.err()
    assert codes[0] == 70 and text.count("FAILED: ") == 1, text
    said = (rf"^FAILED: rank 1 of 3 on {HOST}: no progress for 3 s\. Late: rank 1 on {HOST}, "
            rf"last step 5, {place}.*\. No checkpoint yet\.$")
    assert re.search(said, text, re.M), text
    status = read_status(tmp_path / "run")
    assert status["code"] == 70 and "Late: rank 1 on" in status["reason"], status
    for rank in (0, 2):
        assert "script.py" in (tmp_path / "run" / "stacks" / f"rank_{rank}.txt").read_text()


def test_the_guard_of_a_rank_that_was_killed_speaks_before_those_that_lose_it(tmp_path):
    with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=0):
    barrier(ddp)
    if ddp.rank == 1:
        os.kill(os.getpid(), 9)
    all_sum(1.0, ddp)    # it fails at once in the others
""", range(3)) as ranks:
        assert ranks.codes(grace=GRACE)[1] == 1
        assert re.findall("^FAILED: (.*):", ranks.err(), re.M) == [
            f"rank 1 of 3 on {HOST}: died without a word (SIGKILL"], ranks.err()
        assert "Traceback" not in ranks.err()
    assert read_status(tmp_path / "run")["code"] == 1


def test_the_guard_of_a_rank_that_dies_in_its_second_watch_tells_it(tmp_path):
    with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp:
    with watch_run(ddp, "first") as watch:
        watch.stop_reason(7)
    with watch_run(ddp, "second"):
        os.kill(os.getpid(), 9)
""", range(1)) as ranks:
        assert ranks.codes() == [1]
        said = f"FAILED: rank 0 of 1 on {HOST}: died without a word (SIGKILL: out of memory?)."
        assert ranks.err().strip() == f"{said} No checkpoint yet."
    assert read_status(tmp_path / "first")["code"] == 0
    status = read_status(tmp_path / "second")
    assert (status["code"], status["step"]) == (1, None)


def test_without_a_run_folder_a_rank_without_progress_shows_its_stacks_and_ends(tmp_path):
    with by_hand(tmp_path, """
def stuck():
    time.sleep(600)
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=2 / 60):
    stuck()
""", range(1)) as ranks:
        assert ranks.codes() == [70]
        assert "in stuck" in ranks.err()
        said = f"FAILED: rank 0 of 1 on {HOST}: no progress for 2 s"
        assert ranks.err().splitlines()[-1].startswith(said), ranks.err()


def test_signs_of_progress_keep_a_rank_alive_beyond_the_limit(tmp_path):
    with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "run", minutes=3 / 60):
    until = time.monotonic() + 5
    while time.monotonic() < until:
        note_progress()    # between two steps
        time.sleep(0.1)
""", range(1)) as ranks:
        assert ranks.codes() == [0], ranks.err()


def test_a_guard_that_was_suspended_with_its_rank_takes_it_for_no_hang(tmp_path):
    """As by Ctrl-Z, or a scheduler."""
    (tmp_path / "script.py").write_text(f"""{BEGUN}
tell(limit=5.0)
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"seen\\n"))
os.write(1, b"ready\\n")
sys.stdin.readline()
tell(left=True)
""")
    env = clean_environment(env={"PYTHONPATH": ROOT})
    with started([sys.executable, "-m", "ddp_guard", "script.py"], cwd=tmp_path, env=env,
                 stdin=PIPE, stdout=PIPE, stderr=PIPE) as guard:
        assert guard.stdout.readline() == b"ready\n"
        os.killpg(guard.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(6)     # longer than the limit
        os.killpg(guard.pid, signal.SIGCONT)
        os.kill(guard.pid, signal.SIGUSR1)
        assert guard.stdout.readline() == b"seen\n"    # the guard runs
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(1)     # four looks of it
        guard.stdin.write(b"\n")
        guard.stdin.flush()
        assert guard.wait(60) == 0, guard.stderr.read()


NO_PROGRESS = {"code": 70, "reason": "no progress", "suspects": "", "step": None, "run": "this"}


def test_a_guard_writes_its_status_on_a_full_disk_into_the_old_file(tmp_path):
    (tmp_path / f".status.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    status = tmp_path / "status.json"
    status.write_text(json.dumps({**NO_PROGRESS, "code": None, "reason": "running " * 20}))
    known = Known()
    known.run_dir = str(tmp_path)
    known.run = "this"
    ddp_guard.write_status(known, 70, "no progress")
    assert json.loads(status.read_text()) == NO_PROGRESS
    assert os.listdir(tmp_path) == ["status.json"]
