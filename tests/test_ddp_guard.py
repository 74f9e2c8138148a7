"""Does the guard decide rightly when a run must end, and whom to name?

Real processes are in test_faults.py.
"""
import contextlib
import os
import subprocess
import sys
from subprocess import PIPE

import pytest

import ddp_guard
from ddp_guard import Rank, Watcher
from launchers import ROOT, clean_environment


def watched(size):
    """A Watcher of `size` ranks that were heard of at time 0, and the ranks."""
    ranks = [Rank(number, f"n{number}", [100 + number, 200 + number], 0.0)
             for number in range(size)]
    watcher = Watcher(ranks[0])
    watcher.ranks = ranks
    return watcher, ranks


def hear(ranks, now, *rows, limit=10.0):
    """rows: (step, seconds without progress) of each rank; None: nothing is heard of it."""
    for rank, row in zip(ranks, rows):
        if row is not None:
            rank.hear(now, step=row[0], idle=row[1], limit=limit)


def fail(rank, now, cause, secondary=False):
    rank.hear(now, failure=[rank.number, rank.host, 1, cause, "", secondary])


def test_a_failure_is_the_cause_at_once_and_a_lost_connection_waits_for_the_failure_behind_it():
    watcher, ranks = watched(3)
    fail(ranks[2], 5.0, "no such file")
    assert watcher.decide(5.0)[:4] == (2, "n2", 1, "no such file")
    watcher, ranks = watched(3)
    fail(ranks[0], 5.0, "connection closed", secondary=True)
    assert watcher.decide(5.0) is None and watcher.decide(5.5) is None
    fail(ranks[1], 5.6, "on purpose")
    assert watcher.decide(5.6).rank == 1
    watcher, ranks = watched(3)
    fail(ranks[0], 5.0, "connection closed", secondary=True)
    assert watcher.decide(5.0) is None
    assert watcher.decide(7.0)[:4] == (0, "n0", 1, "connection closed")


def test_stacks_are_asked_for_before_a_hang_is_judged_however_seldom_the_hub_looks():
    """With thousands of ranks it looks every few seconds, longer than ranks need for stacks."""
    watcher, ranks = watched(2)
    for now in (0.0, 6.0):
        hear(ranks, now, (5, 0.0), (5, 0.0))
        assert watcher.decide(now) is None and not watcher.hangs
    hear(ranks, 17.0, (5, 11.0), (5, 11.0))
    assert watcher.decide(17.0) is None and watcher.hangs
    hear(ranks, 23.0, (5, 17.0), (5, 17.0))
    assert watcher.decide(23.0).code == 70


def test_a_guard_that_is_gone_is_a_death_unless_it_said_goodbye():
    for goodbye in (False, True):
        watcher, ranks = watched(2)
        if goodbye:
            ranks[1].hear(1.0, bye=60)
        ranks[1].gone = True
        verdict = watcher.decide(1.0)
        assert verdict is None if goodbye else (verdict.rank, verdict.code) == (1, 1)


def test_a_rank_that_works_long_while_the_others_wait_is_no_hang():
    watcher, ranks = watched(3)
    for now in range(1, 100):
        hear(ranks, now, (5, now), (5, 0.5), (5, now))
        assert watcher.decide(now) is None and not watcher.hangs


@pytest.mark.parametrize("places, steps, late", [
    (["a", "a", None], [7, 7, 7], [2]), (["a", "b", "a"], [7, 6, 7], [1]),
    (["a", "b", "a"], [7, 7, 7], [1]), (["a", "a", "a"], [7, 7, 7], [0, 1, 2])],
    ids=["stopped", "an earlier step", "another place", "no difference"])
def test_where_nobody_makes_progress_the_late_ranks_are_named_with_host_step_and_place(
        places, steps, late):
    watcher, ranks = watched(3)
    hear(ranks, 11.0, *((step, 10.5) for step in steps))
    assert watcher.decide(11.0) is None and watcher.hangs, "first they write their stacks"
    for rank, place in zip(ranks, places):
        rank.place = place
    hear(ranks, 13.1, *((step, 12.6) for step in steps))
    verdict = watcher.decide(13.1)
    assert (verdict.rank, verdict.code, verdict.host) == (late[0], 70, f"n{late[0]}")
    named = ", ".join(f"{number} on n{number}" for number in late)
    place = f"in {places[late[0]]}" if places[late[0]] else "stopped"
    assert f"Late: rank {named}, last step {steps[late[0]]}, {place}" in verdict.cause
    others = ", ".join(f"{number} on n{number}" for number in range(3) if number not in late)
    assert not others or f"waiting: rank {others}, last step 7, in a" in verdict.text


def test_progress_while_the_ranks_write_their_stacks_is_no_hang():
    watcher, ranks = watched(2)
    hear(ranks, 11.0, (7, 10.5), (7, 10.5))
    assert watcher.decide(11.0) is None and watcher.hangs
    hear(ranks, 13.5, (8, 0.1), (7, 12.5))
    assert watcher.decide(13.5) is None and not watcher.hangs


def test_a_guard_without_a_sign_is_named_with_the_processes_to_be_killed():
    watcher, ranks = watched(2)
    hear(ranks, 12.0, (1, 0.0), None)
    assert watcher.decide(12.0) is None
    hear(ranks, 14.0, (2, 0.0), None)
    verdict = watcher.decide(14.0)
    assert (verdict.rank, verdict.silent) == (1, [("n1", [101, 201])])


def test_a_guard_that_was_suspended_itself_forgets_all_ages():
    watcher, ranks = watched(2)
    hear(ranks, 1.0, (1, 0.0), (1, 0.0))
    watcher.forget_ages(100.0)
    assert watcher.decide(100.5) is None and not watcher.hangs


def test_who_does_not_come_to_the_clean_up_is_named():
    watcher, ranks = watched(3)
    ranks[1].hear(1.0, bye=5.0)
    assert watcher.decide(1.0) is None
    hear(ranks, 5.0, (9, 0.0), None, (9, 0.0))
    assert watcher.decide(5.5) is None
    assert watcher.decide(6.5).cause == "rank 0, 2 of 3 did not come to cleanup_ddp within 5 s"


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


def run(text, folder, *words, before=("-m", "ddp_guard"), env=None, **options):
    """Run a script of this text to its end, under a guard unless `before` is empty."""
    (folder / "script.py").write_text(text)
    return subprocess.run([sys.executable, *before, folder / "script.py", *words], text=True,
                          env=clean_environment(env={"PYTHONPATH": ROOT, **(env or {})}),
                          timeout=60, **{"stdout": PIPE, "stderr": PIPE, **options})


def test_a_place_is_the_innermost_frames_of_the_main_thread_outside_libraries(tmp_path):
    stacks = run(STACKS, tmp_path, before=()).stderr
    assert stacks.lower().count("thread 0x") == 2 and "statistics.py" in stacks
    assert ddp_guard.place_of(stacks) == "step (script.py:5) < main (script.py:8)"


def test_any_script_can_be_guarded_and_keeps_its_arguments_output_and_exit_code(tmp_path):
    done = run("import sys\nprint(sys.argv[1:], sys.stdin.read())\nsys.exit(7)\n", tmp_path, "a",
               "--b", input="text")
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', '--b'] text\n", "")
    assert subprocess.call([sys.executable, "-m", "ddp_guard"], cwd=ROOT, stderr=PIPE,
                           env=clean_environment()) == 1


def test_ctrl_c_is_seen_by_a_shell_as_such(tmp_path):
    done = run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", tmp_path)
    assert done.returncode == -2 and done.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("env, guarded", [
    ({}, True), ({"DDP_GUARD": "0"}, False), ({"PALS_RANKID": "0"}, False),
    ({"PALS_RANKID": "0", "DDP_GUARD": "1"}, True)])
def test_where_it_was_never_tried_or_is_not_wanted_there_is_no_guard(env, guarded, tmp_path):
    text = ("import os, ddp_guard\nddp_guard.supervise()\n"
            "print(bool(os.environ.get('DDP_GUARD_FD')))\n")
    for before in ((), ("-m", "ddp_guard")):
        done = run(text, tmp_path, before=before, env=env)
        assert (done.returncode, done.stdout) == (0, f"{guarded}\n"), done.stderr
        assert ("never tried under PALS" in done.stderr) == ("PALS_RANKID" in env and not guarded)


def test_a_fault_of_the_guard_itself_ends_no_run(tmp_path):
    done = run("import sys, time, ddp_guard\nddp_guard.Watcher.decide = lambda *_: 1 / 0\n"
               "ddp_guard.supervise()\ntime.sleep(1.5)\nsys.exit(7)\n", tmp_path, before=())
    assert (done.returncode, done.stderr) == (7, "ddp_guard: ZeroDivisionError: division by zero\n")


HUB = """
import json, os, socket
guard = socket.socket(fileno=int(os.environ["DDP_GUARD_FD"].partition(":")[0]))
guard.sendall(b'{"serve": "127.0.0.1"}\\n')
host, port, *_ = json.loads(guard.makefile().readline())["address"]
guard.sendall(b'{"join": {"rank": 0, "size": 2, "launcher": "l", "hub": null}}\\n')
"""


@pytest.mark.parametrize("joined, code", [(False, -11), (True, 1)])
def test_a_guard_that_cannot_print_ends_all_the_same(joined, code, tmp_path):
    read, stderr = os.pipe()      # nobody reads it, and it takes no byte more
    os.set_blocking(stderr, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stderr, bytes(4096))
    os.set_blocking(stderr, True)
    done = run(HUB * joined + "import os\nos.kill(os.getpid(), 11)\n", tmp_path, stderr=stderr)
    os.close(read)
    os.close(stderr)
    assert done.returncode == code


STRANGERS = HUB + """
strangers = [socket.create_connection((host, port)) for _ in range(6)]
for stranger, line in zip(strangers, [b"GET / HTTP/1.1", b"5", b"[]", b"{}",
                                      b'{"token": "x", "number": 1, "host": "h", "pids": [1, 2]}']):
    stranger.sendall(line + b"\\n")
strangers[5].sendall(os.urandom(1 << 16))
for stranger in strangers[:5]:
    assert stranger.recv(1) == b"", "the guard closes the connection"
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n')
"""


def test_strangers_at_the_port_of_the_hub_are_turned_away(tmp_path):
    done = run(STRANGERS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
