"""Does the guard decide rightly when a run must end, and whom to name?"""
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
from ddp_guard import Rank, decide, decide_about_hub
from launchers import ROOT, clean_environment


def ranks_heard(now, *rows, limit=10.0):
    """Ranks of which guards gave a sign at time `now`; a row: step, seconds without progress."""
    ranks = [Rank(number, f"n{number}", now) for number in range(len(rows))]
    for rank, (step, idle) in zip(ranks, rows):
        rank.step = step
        rank.last_progress = now - idle
        rank.limit = limit
        rank.stacks = "file"
    return ranks


def fail(rank, now, cause, secondary=False):
    rank.last_progress = now
    rank.failure = rank.blame(1, cause, secondary=secondary)


def test_a_failure_is_the_cause_at_once():
    ranks = ranks_heard(5.0, (1, 0.0), (1, 0.0))
    fail(ranks[1], 5.0, "on purpose")
    verdict = decide(ranks, 5.0)
    assert (verdict["rank"], verdict["code"], verdict["cause"]) == (1, 1, "on purpose")


def test_a_lost_connection_is_the_cause_after_a_while():
    ranks = ranks_heard(5.0, (1, 0.0), (1, 0.0), (1, 0.0))
    fail(ranks[0], 5.0, "connection closed", secondary=True)
    assert decide(ranks, 5.0) is None and decide(ranks, 5.5) is None
    verdict = decide(ranks, 7.0)
    assert (verdict["rank"], verdict["code"], verdict["cause"]) == (0, 1, "connection closed")


def test_a_failure_behind_a_lost_connection_is_the_cause():
    ranks = ranks_heard(5.0, (1, 0.0), (1, 0.0), (1, 0.0))
    fail(ranks[0], 5.0, "connection closed", secondary=True)
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


def test_who_does_not_come_to_the_clean_up_is_named():
    ranks = ranks_heard(5.0, (9, 0.0), (9, 4.0), (9, 0.0))
    ranks[1].bye = 5.0
    assert decide(ranks, 5.5) is None
    verdict = decide(ranks, 6.5)
    assert verdict["cause"] == "rank 0 on n0, 2 on n2 did not come to cleanup_ddp within 5 s"


def ranks_in_cleanup():
    """Ranks that came to cleanup_ddp, for 60 s, and the time until which they may stay there."""
    latest = 5.0 + 60.0 + ddp_guard.EXIT
    ranks = ranks_heard(latest, (9, 0.0), (9, 0.0), (9, 0.0))
    for rank in ranks:
        rank.bye = 60.0
        rank.last_progress = 5.0
    return ranks, latest


def test_who_does_not_end_after_the_clean_up_is_named():
    ranks, latest = ranks_in_cleanup()
    ranks[0].ended = True
    ranks[2].ended = True
    assert decide(ranks, latest - 0.5) is None
    assert decide(ranks, latest + 0.5)["rank"] == 1


def test_the_hub_is_not_judged_by_others_for_what_its_rank_does_at_the_end():
    ranks, latest = ranks_in_cleanup()
    assert decide_about_hub(ranks[0], latest + 0.5) is None


def test_the_hub_is_judged_by_others_when_it_is_silent():
    ranks, latest = ranks_in_cleanup()
    verdict = decide_about_hub(ranks[0], latest + ddp_guard.SILENCE + 0.5)
    assert (verdict["rank"], verdict["code"]) == (0, 70)


def test_the_verdict_of_the_hub_is_that_of_the_others():
    ranks = ranks_heard(5.0, (1, 0.0), (1, 0.0))
    ranks[0].failure = ranks[1].blame(3, "on purpose")
    assert decide_about_hub(ranks[0], 5.0) == ranks[0].failure


def after_a_pause(seconds):
    """A guard and two ranks, of which it knows what it knew when it last ran, `seconds` ago."""
    me, *others = ranks_heard(0.0, (5, 0.0), (5, 0.0), (5, 0.0))
    ddp_guard.Guard.forgive_suspension(SimpleNamespace(me=me), others, seconds)
    return [me, *others]


@pytest.mark.parametrize("seconds", [14.0, 1000.0])
def test_a_guard_that_was_suspended_takes_nobody_for_lost_or_hung(seconds):
    assert decide(after_a_pause(seconds), seconds) is None


def test_after_a_suspension_all_limits_count_from_its_end():
    ranks = after_a_pause(1000.0)
    for rank in ranks:
        rank.last_sign = 1011.0
    assert decide(ranks, 1012.0) is None and decide(ranks, 1014.0)["code"] == 70


def test_a_pause_that_a_busy_host_makes_is_no_suspension():
    ranks = after_a_pause(3.0)
    assert [rank.last_progress for rank in ranks] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("first_is_secondary, cause", [(False, "first"), (True, "second")])
def test_only_a_consequence_of_a_failure_gives_way_to_a_later_one(first_is_secondary, cause):
    me = Rank(0, "n0", 0.0)
    guard = SimpleNamespace(me=me)
    ddp_guard.Guard.fail(guard, 1, "first", secondary=first_is_secondary)
    ddp_guard.Guard.fail(guard, 3, "second")
    ddp_guard.Guard.fail(guard, 4, "third")
    assert me.failure["cause"] == cause


def death_after_signals(terminal, *names):
    """The signal that ends a rank to whose guard these are sent, one after the other."""
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            guard = SimpleNamespace(process=rank, joined=False, terminal=terminal)
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


# ---------------------------------------------------------------- messages
SIGN = {"idle": 0.5, "step": 7, "limit": 60.0, "stacks": "file", "place": "f (a.py:1)", "bye": 30,
        "left": True, "ended": True,
        "failure": {"rank": 2, "host": "n2", "code": 3, "cause": "c", "text": "t",
                    "secondary": True, "retry": False}}


def state(rank):
    """All that is known of a rank, but when it was heard of."""
    return {name: value for name, value in vars(rank).items() if name != "last_sign"}


def test_the_hub_knows_what_the_sign_of_a_guard_says():
    rank = Rank(1, "n1", 0.0)
    rank.read_sign(SIGN, 10.0)
    assert (rank.last_sign, rank.last_progress) == (10.0, 9.5)
    assert {name: getattr(rank, name) for name in SIGN if name != "idle"} == {
        name: value for name, value in SIGN.items() if name != "idle"}


def test_a_sign_that_is_written_and_read_is_the_same():
    rank = Rank(1, "n1", 0.0)
    rank.read_sign(SIGN, 10.0)
    copy = Rank(1, "n1", 0.0)
    copy.read_sign(json.loads(json.dumps({"idle": 0.5, **rank.write_sign()})), 10.0)
    assert state(copy) == state(rank)


@pytest.mark.parametrize("message", [
    {"idle": "0"}, {"step": "7"}, {"step": True}, {"step": 7.5}, {"limit": None}, {"limit": "5"},
    {"stacks": 5}, {"place": ["a"]}, {"bye": "60"}, {"bye": True}, {"left": 1}, {"ended": "no"},
    {"failure": "why"}, {"checkpoint": {}}, {"number": 5}, {"host": "elsewhere"},
    {"process": 1, "last_sign": 0, "last_progress": 0, "read_sign": None, "__class__": "Guard"}])
def test_an_unknown_field_or_a_wrong_type_in_a_sign_changes_nothing(message):
    rank = Rank(1, "n1", 0.0)
    rank.read_sign(SIGN, 10.0)
    before = state(rank)
    rank.read_sign(message, 11.0)
    assert state(rank) == before


def test_a_wrong_type_or_an_unknown_field_of_the_watch_changes_nothing():
    rank = Rank(0, "n0", 0.0)
    rank.read_watch({"limit": 60, "run_dir": "out", "stacks": "file"})
    before = dict(vars(rank))
    rank.read_watch({"limit": "0.1", "run_dir": 5, "stacks": True, "number": 3})
    assert vars(rank) == before


@pytest.mark.parametrize("failure", [
    {"rank": "2", "host": "n2", "code": 3, "cause": "c"}, {"rank": 2, "code": 3, "cause": "c"},
    {"rank": 2, "host": "n2", "code": "3", "cause": "c"}, {"rank": 2, "host": "n2", "code": 3}])
def test_a_failure_of_wrong_fields_is_none(failure):
    assert ddp_guard.read_verdict(failure) is None


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


def ignore_ended_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_any_script_can_be_guarded_with_its_arguments_output_and_exit_code(tmp_path):
    text = "import sys\nprint(sys.argv[1:], sys.flags.optimize, sys.stdin.read())\nsys.exit(7)\n"
    done = run(text, tmp_path, "a", "--b", before=("-u", "-O", "-m", "ddp_guard"), input="text",
               preexec_fn=ignore_ended_children)
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', '--b'] 1 text\n", "")


@pytest.mark.parametrize("code, asked", [(2, b"cmd=abort exitcode=2\n"), (0, b"")])
def test_a_rank_that_fails_before_the_ranks_have_met_has_mpich_end_the_others(
        code, asked, tmp_path):
    read, write = os.pipe()
    with contextlib.closing(os.fdopen(read, "rb")) as mpich:
        done = run(f"import sys\nsys.exit({code})\n", tmp_path, env={"PMI_FD": write},
                   pass_fds=[write])
        os.close(write)
        assert (done.returncode, mpich.read()) == (code, asked)


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


def test_a_rank_outlives_the_signal_by_which_a_closed_terminal_ends_programs(tmp_path):
    """Its guard gets the same one, and asks it to stop."""
    done = run("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('alive')\n", tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def ignore_closed_terminals():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_under_nohup_a_rank_is_told_nothing_of_a_closed_terminal(tmp_path):
    done = run("""
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


@pytest.mark.parametrize("number, cause", [
    (9, "died without a word (SIGKILL: out of memory?)"), (11, "died without a word (SIGSEGV)"),
    (7, "died without a word (SIGBUS: is /dev/shm full?)")])
def test_a_death_by_signal_is_told_with_a_likely_cause(number, cause):
    assert ddp_guard.describe_death(number) == cause


# A rank that tells its number and fails; another script is to wait for what becomes of it.
FAILS = """
import ddp_guard, os, socket, time
ddp_guard.LEAVE = 0.5
ddp_guard.supervise()
os.write(1, f"{os.getpid()}\\n".encode())
guard = socket.socket(fileno=int(os.environ["DDP_GUARD_FD"].partition(":")[0]))
guard.sendall(b'{"join": {"rank": 0, "size": 2, "launcher": "l", "hub": null}}\\n'
              b'{"failed": {"code": 3, "cause": "on purpose"}}\\n')
time.sleep(600)
"""


def test_mpich_is_asked_to_end_all_ranks_when_the_rank_has_ended(tmp_path):
    """It hangs if a guard ends before its rank."""
    (tmp_path / "script.py").write_text(FAILS)
    asked, write = os.pipe()
    env = clean_environment(env={"PYTHONPATH": ROOT, "PMI_FD": write})
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=env, stdout=PIPE,
                          stderr=PIPE, pass_fds=[write]) as guard:
        os.close(write)
        try:
            rank = int(guard.stdout.readline())
            assert os.read(asked, 100) == b"cmd=abort exitcode=3\n"
            assert not os.path.exists(f"/proc/{rank}")
            assert guard.wait(60) == 3
        finally:
            os.close(asked)
            guard.kill()    # the rank ends with it


def test_strangers_at_the_port_of_the_hub_are_turned_away(tmp_path):
    done = run(HUB + """
strangers = [socket.create_connection((host, port)) for _ in range(5)]
for stranger, line in zip(strangers, [b"GET / HTTP/1.1", b"5", b'{"number": 1, "host": "n1"}',
                                      b'{"token": "x", "number": 1, "host": "n1"}']):
    stranger.sendall(line + b"\\n")
strangers[4].sendall(os.urandom(1 << 16))
for stranger in strangers[:4]:
    assert stranger.recv(1) == b"", "the guard closes the connection"
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n')
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("lines", [
    [b"no JSON", b"[1, 2]", b"[" * 100_000, b"\xff\xfe", b"x" * ((1 << 24) + 10)],
    [b'{"process": null, "number": 5, "host": 7, "limit": 0.1, "guards": {}, "me": 1, "size": 9}'],
    [b'{"step": "x", "bye": true, "left": 1, "checkpoint": 2, "serve": 3, "failed": "no"}',
     b'{"watch": [], "join": {"rank": "5", "size": 2, "launcher": "l", "hub": null}}',
     b'{"watch": {"limit": "0.1", "run_dir": 5, "stacks": 7, "number": 3, "process": null}}',
     b'{"join": {"rank": 1, "size": 2, "launcher": "l", "hub": ["127.0.0.1", "80", 1]}}',
     b'{"failed": {"code": "1", "cause": null}}']],
    ids=["no message", "attributes of the guard", "wrong types"])
def test_a_line_that_the_guard_does_not_know_changes_nothing(lines, tmp_path):
    """The guard knows afterwards what it knew before: number, size, host, and no goodbye."""
    (tmp_path / "lines").write_bytes(b"".join(line + b"\n" for line in lines))
    done = run(HUB + """
guard.sendall(open("lines", "rb").read() + b'{"serve": "127.0.0.1"}\\n')
guard.makefile().readline()    # it has heard all
sys.exit(3)
""", tmp_path, cwd=tmp_path)
    told = re.findall("^FAILED: rank 0 of 2 on (.*): left with exit code 3", done.stderr, re.M)
    assert (done.returncode, told) == (3, [socket.gethostname()]), done.stderr
    assert "Traceback" not in done.stderr and "goes on without it" not in done.stderr


def test_a_guard_hears_its_rank_after_a_line_that_is_no_message(tmp_path):
    done = run(HUB + """
guard.sendall(b'no JSON\\n[1]\\n' + b'x' * ((1 << 24) + 10) + b'\\n')
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n')
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_guards_of_other_hosts_reach_the_hub_at_an_address_of_ipv6(ipv6, tmp_path):
    done = run(HUB.replace("127.0.0.1", "::1") + """
with socket.create_connection((host, port)):
    print(host)
guard.sendall(b'{"bye": 60}\\n{"left": true}\\n')
""", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "::1\n", "")


def test_a_sign_without_number_or_host_is_a_stranger(tmp_path):
    done = run(HUB + """
for fields in {"number": "1", "host": "n1"}, {"number": 1}, {"host": "n1"}:
    stranger = socket.create_connection((host, port))
    stranger.sendall(json.dumps({"token": token, **fields}).encode() + b"\\n")
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


def test_a_failure_of_many_words_is_told_in_all_of_them(tmp_path):
    done = run("from ddp_setup import abort, setup_ddp\n"
               "abort(setup_ddp(quiet=True), 'word ' * 100_000 + '.', cause='many')\n", tmp_path)
    assert done.stderr.count("word ") == 100_000
    assert done.returncode == 1 and "FAILED: rank 0 of 1" in done.stderr


@pytest.mark.parametrize("checkpoint, option, advice", [
    (None, "--fresh", "The same command starts from the beginning"),
    ("last.pt", "--device=cpu", "To go on, give the same command again"),
    ("last.pt", "--fresh", "To go on, give the same command again without --fresh"),
    ("last.pt", "--resume=a.pt", "To go on, give the same command again without --resume")])
def test_the_same_command_goes_on_only_from_a_checkpoint(checkpoint, option, advice):
    command = f"python train.py {option}"
    assert ddp_guard.what_the_same_command_does(command, checkpoint) == advice


def test_a_long_cause_stays_whole_in_the_last_line():
    cause = "x" * 330 + " Lower optim.lr"
    me = Rank(0, "n0", 0.0)
    guard = SimpleNamespace(me=me, size=1, how_to_go_on=str)
    words = ddp_guard.Guard.last_words(guard, me.blame(1, cause, text="see below"))
    assert f": {cause}. No checkpoint yet" in words


@pytest.mark.parametrize("end, code", [("print('to the end')", 0),
                                       ("os.kill(os.getpid(), signal.SIGRTMIN)", -signal.SIGRTMIN)])
def test_a_defect_of_the_guard_does_not_end_the_run(end, code, tmp_path):
    with open(tmp_path / "stderr", "w") as stderr:
        done = run(f"""
import ddp_guard, os, signal, time
def defective(ranks, now):
    raise ValueError("a defect")
ddp_guard.decide = defective
ddp_guard.supervise()
while "goes on without it" not in open("stderr").read():
    time.sleep(0.01)
{end}
""", tmp_path, before=(), cwd=tmp_path, stderr=stderr)
    assert (done.returncode, done.stdout) == (code, "to the end\n" * (code == 0))
    assert "FAILED" not in (tmp_path / "stderr").read_text()


def test_a_status_is_on_the_disk_before_it_has_its_name(tmp_path, disk_calls):
    me = Rank(0, "n0", 0.0)
    me.run_dir = str(tmp_path)
    guard = SimpleNamespace(me=me, size=1)
    ddp_guard.Guard.write_status(guard, me.blame(70, "no progress"))
    status = tmp_path / "status.json"
    assert disk_calls == [("fsync", status.read_bytes()), ("rename", status)]
