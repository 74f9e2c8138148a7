"""Does the guard decide rightly when a run must end, and whom to name?"""
import contextlib
import os
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

import ddp_guard
from ddp_guard import Rank, decide
from launchers import ROOT, clean_environment


def ranks_heard(now, *rows, limit=10.0):
    """Ranks of which guards gave a sign at time `now`; a row: step, seconds without progress."""
    ranks = [Rank(number, f"n{number}", now) for number in range(len(rows))]
    for rank, (step, idle) in zip(ranks, rows):
        rank.step, rank.last_progress, rank.limit, rank.stacks = step, now - idle, limit, "file"
    return ranks


def fail(rank, now, cause, secondary=False):
    rank.last_progress, rank.failure = now, rank.blame(1, cause, secondary=secondary)


def test_a_failure_is_the_cause_at_once_and_a_lost_connection_waits_for_the_failure_behind_it():
    ranks = ranks_heard(5.0, (1, 0.0), (1, 0.0), (1, 0.0))
    fail(ranks[0], 5.0, "connection closed", secondary=True)
    assert decide(ranks, 5.0) is None and decide(ranks, 5.5) is None
    verdict = decide(ranks, 7.0)
    assert (verdict["rank"], verdict["code"], verdict["cause"]) == (0, 1, "connection closed")
    fail(ranks[1], 5.6, "on purpose")
    assert [decide(ranks, now)["rank"] for now in (5.6, 7.0)] == [1, 1]


def test_a_rank_that_works_long_while_the_others_wait_is_no_hang():
    assert decide(ranks_heard(99.0, (5, 99.0), (5, 0.5), (5, 99.0)), 99.0) is None


@pytest.mark.parametrize("places, steps, late", [
    (["a", "a", None], [7, 7, 7], [2]), (["a", "b", "a"], [7, 6, 7], [1]),
    (["a", "b", "a"], [7, 7, 7], [1]), (["a", "b"], [7, 7], [1]),
    (["a", "a", "a"], [7, 7, 7], [0, 1, 2])],
    ids=["stopped", "an earlier step", "another place", "two places", "no difference"])
def test_where_nobody_makes_progress_the_late_ranks_are_named_with_host_step_and_place(
        places, steps, late):
    ranks = ranks_heard(11.0, *((step, 10.5) for step in steps))
    assert decide(ranks, 11.0) is None, "first they write their stacks"
    for rank, place in zip(ranks, places):
        rank.place = place
    verdict = decide(ranks, 13.6)
    assert (verdict["rank"], verdict["code"], verdict["host"]) == (late[0], 70, f"n{late[0]}")
    named = ", ".join(f"{number} on n{number}" for number in late)
    place = f"in {places[late[0]]}" if places[late[0]] else "stopped"
    assert f"Late: rank {named}, last step {steps[late[0]]}, {place}" in verdict["cause"]
    others = ", ".join(f"{k} on n{k}" for k in range(len(steps)) if k not in late)
    assert not others or f"waiting: rank {others}, last step 7, in a" in verdict["text"]


def test_a_guard_without_a_sign_is_named_with_its_host():
    ranks = ranks_heard(14.0, (1, 0.0), (1, 0.0))
    ranks[1].last_sign = 2.0
    assert decide(ranks, 14.0) is None
    verdict = decide(ranks, 15.5)
    assert (verdict["rank"], verdict["host"], verdict["code"]) == (1, "n1", 70)


def test_who_does_not_come_to_the_clean_up_or_to_its_end_after_it_is_named():
    ranks = ranks_heard(5.0, (9, 0.0), (9, 4.0), (9, 0.0))
    ranks[1].bye = 5.0
    assert decide(ranks, 5.5) is None
    verdict = decide(ranks, 6.5)
    assert verdict["cause"] == "rank 0 on n0, 2 on n2 did not come to cleanup_ddp within 5 s"
    latest = 5.0 + 60.0 + ddp_guard.EXIT
    for rank in ranks:
        rank.bye, rank.last_sign, rank.last_progress = 60.0, latest, 5.0
    ranks[0].ended = ranks[2].ended = True
    assert decide(ranks, latest - 0.5) is None and decide(ranks, latest + 0.5)["rank"] == 1


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
                          timeout=600, **{"stdout": PIPE, "stderr": PIPE, **options})


def test_a_place_is_the_innermost_frames_of_the_main_thread_outside_libraries(tmp_path):
    stacks = run(STACKS, tmp_path, before=()).stderr
    assert stacks.lower().count("thread 0x") == 2 and "statistics.py" in stacks
    assert ddp_guard.place_of(stacks) == "step (script.py:5) < main (script.py:8)"


def test_any_script_can_be_guarded_and_keeps_its_arguments_output_and_exit_code(tmp_path):
    text = "import sys\nprint(sys.argv[1:], sys.flags.optimize, sys.stdin.read())\nsys.exit(7)\n"
    done = run(text, tmp_path, "a", "--b", before=("-u", "-O", "-m", "ddp_guard"), input="text",
               preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', '--b'] 1 text\n", "")


def test_ctrl_c_is_seen_by_a_shell_as_such(tmp_path):
    done = run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", tmp_path)
    assert done.returncode == -2 and done.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("env, guarded", [
    ({}, True), ({"DDP_GUARD": "0"}, False), ({"PALS_RANKID": "0"}, False),
    ({"PALS_RANKID": "0", "DDP_GUARD": "1"}, True)])
def test_where_it_was_never_tried_or_is_not_wanted_there_is_no_guard(env, guarded, tmp_path):
    text = "import os, ddp_guard\nddp_guard.supervise()\nprint('DDP_GUARD_FD' in os.environ)\n"
    for before in ((), ("-m", "ddp_guard")):
        done = run(text, tmp_path, before=before, env=env)
        assert (done.returncode, done.stdout) == (0, f"{guarded}\n"), done.stderr
        assert ("never tried under PALS" in done.stderr) == ("PALS_RANKID" in env and not guarded)


SOCKET = """
import json, os, signal, socket, sys, time
guard = socket.socket(fileno=int(os.environ["DDP_GUARD_FD"].partition(":")[0]))
"""
HUB = SOCKET + """
guard.sendall(b'{"serve": "127.0.0.1"}\\n')
host, port, token, _ = json.loads(guard.makefile().readline())["address"]
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
    done = run((HUB if joined else SOCKET) + "os.kill(os.getpid(), 11)\n", tmp_path, stderr=stderr)
    os.close(read)
    os.close(stderr)
    assert done.returncode == code


def test_strangers_at_the_port_of_the_hub_are_turned_away(tmp_path):
    done = run(HUB + """
strangers = [socket.create_connection((host, port)) for _ in range(5)]
for stranger, line in zip(strangers, [b"GET / HTTP/1.1", b"5", b"{}", b'{"token": "x"}']):
    stranger.sendall(line + b"\\n")
strangers[4].sendall(os.urandom(1 << 16))
for stranger in strangers[:4]:
    assert stranger.recv(1) == b"", "the guard closes the connection"
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n')
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


PEER = HUB + """
peer = socket.create_connection((host, port))
bye = json.loads(sys.argv[1])
peer.sendall(json.dumps(dict(token=token, number=1, host="n1", idle=0, bye=bye)).encode() + b"\\n")
peer.recv(1)
last_words = b'{"bye": 60}\\n{"left": true}\\n'
if sys.argv[2] == "hub left":
    guard.sendall(last_words)
    heard = b""
    while heard.count(b'"bye": 60') < 2:    # the second sign comes after both words
        heard += peer.recv(4096)
peer.close()
time.sleep(3)
guard.sendall(last_words)
"""


@pytest.mark.parametrize("bye, hub, code", [
    ("60", "works", 0), ("null", "works", 1), ("null", "hub left", 0)])
def test_a_guard_that_is_gone_is_a_death_unless_all_have_said_goodbye(bye, hub, code, tmp_path):
    done = run(PEER, tmp_path, bye, hub)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("FAILED: rank 1 of 2 on n1: died without a word") == code


def test_ctrl_c_twice_does_not_change_the_code_of_a_rank_that_has_left(tmp_path):
    done = run(HUB + """
signal.signal(signal.SIGINT, signal.SIG_IGN)
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n{"serve": "127.0.0.1"}\\n')
guard.makefile().readline()    # it has heard all three
for _ in range(2):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1)    # longer than for one that comes on two ways, and than a verdict takes
sys.exit(75)
""", tmp_path)
    assert (done.returncode, done.stderr) == (75, "")


def test_a_hang_is_ended_and_told_where_the_file_system_hangs(tmp_path):
    done = run(SOCKET + """
for name in "stacks", f".status.{os.getppid()}.tmp":
    os.mkfifo(name)    # nobody reads it: it cannot be opened
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
guard.sendall(b'{"join": {"rank": 0, "size": 1, "launcher": "l", "hub": null}}\\n'
              b'{"watch": {"limit": 1.0, "run_dir": ".", "stacks": "stacks"}}\\n')
time.sleep(60)
""", tmp_path, cwd=tmp_path)
    assert done.returncode == 70 and done.stderr.count("FAILED: rank 0 of 1") == 1, done.stderr


def test_a_failure_of_many_words_is_told_and_its_long_cause_stays_in_the_last_line(tmp_path):
    cause = "x" * 330 + " Lower optim.lr"
    text = ("from ddp_setup import abort, setup_ddp\n"
            f"abort(setup_ddp(quiet=True), 'word ' * 100_000 + '.', cause={cause!r})\n")
    done = run(text, tmp_path)
    assert done.returncode == 1 and done.stderr.count("word ") == 100_000
    assert "FAILED: rank 0 of 1" in done.stderr and f": {cause}. No checkpoint yet" in done.stderr


@pytest.mark.parametrize("end, code", [("print('to the end')", 0),
                                       ("os.kill(os.getpid(), signal.SIGRTMIN)", -signal.SIGRTMIN)])
def test_a_defect_of_the_guard_does_not_end_the_run(end, code, tmp_path):
    with open(tmp_path / "stderr", "w") as stderr:
        done = run(SOCKET + f"""
guard.sendall(b'{{"join": {{"rank": 0, "size": 1, "launcher": "l", "hub": null}}}}\\n'
              b'{{"watch": {{"limit": "no number", "run_dir": null, "stacks": null}}}}\\n')
while "goes on without it" not in open("stderr").read():
    time.sleep(0.01)
{end}
""", tmp_path, cwd=tmp_path, stderr=stderr)
    assert (done.returncode, done.stdout) == (code, "to the end\n" * (code == 0))
    assert "FAILED" not in (tmp_path / "stderr").read_text()
