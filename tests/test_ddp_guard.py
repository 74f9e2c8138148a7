"""Does the guard decide rightly when a run must end, and whom to name?

Real processes are in test_faults.py.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_guard
from ddp_guard import DIED, Hub
from launchers import clean_environment

ROOT = Path(__file__).resolve().parents[1]


def joined(size, now=0.0):
    hub = Hub(size)
    for rank in range(size):
        hub.hear(rank, {"hello": {"processes": [f"n{rank}", 100 + rank, 200 + rank]}}, now)
    return hub


def beat(hub, now, *rows, limit=10.0):
    """rows: (step, age) of each rank; None: silent."""
    for rank, row in enumerate(rows):
        if row is not None:
            assert hub.hear(rank, {"beat": [*row, limit]}, now) is None


def failure(cause, secondary=False):
    return {"failed": {"code": 1, "cause": cause, "text": "", "secondary": secondary, "retry": True,
                       "checkpoint": ["last.pt", 4]}}


def test_a_failure_is_the_cause_at_once_and_a_lost_connection_waits_for_the_failure_behind_it():
    assert joined(3).hear(2, failure("no such file"), 5.0)[:4] == (2, 1, "no such file", "n2")
    hub = joined(3)
    assert hub.hear(0, failure("connection closed", secondary=True), 5.0) is None and hub.decide(5.5) is None
    assert hub.hear(1, failure("on purpose"), 5.6).rank == 1
    hub = joined(3)
    hub.hear(0, failure("connection closed", secondary=True), 5.0)
    beat(hub, 6.0, (1, 0.0), (1, 0.0), (1, 0.0))
    assert hub.decide(7.0)[:3] == (0, 1, "connection closed")


def test_a_guard_that_is_gone_is_a_death_unless_it_said_goodbye():
    hub = joined(2)
    assert DIED in hub.lose(1).cause
    hub = joined(2)
    hub.hear(1, {"bye": 60}, 1.0)
    assert hub.lose(1) is None


def test_a_rank_that_works_long_while_the_others_wait_is_no_hang():
    hub = joined(3)
    for now in range(1, 100):
        beat(hub, now, (5, now), (5, 0.5), (5, now))
        assert hub.decide(now) is None and hub.asked is None


@pytest.mark.parametrize("places, steps, late", [
    (["a", "a", None], [7, 7, 7], [2]), (["a", "b", "a"], [7, 6, 7], [1]), (["a", "b", "a"], [7, 7, 7], [1]),
    (["a", "a", "a"], [7, 7, 7], [0, 1, 2])], ids=["stopped", "an earlier step", "another place", "no difference"])
def test_where_nobody_makes_progress_the_late_ranks_are_named_with_host_step_and_place(places, steps, late):
    hub = joined(3)
    beat(hub, 11.0, *((step, 10.5) for step in steps))
    assert hub.decide(11.0) is None and hub.asked is not None, "the stacks are asked for first"
    for rank, place in enumerate(places):
        if place:
            hub.hear(rank, {"place": place}, 11.5)
    beat(hub, 13.1, *((step, 12.6) for step in steps))
    verdict = hub.decide(13.1)
    assert (verdict.rank, verdict.code, verdict.host) == (late[0], 70, f"n{late[0]}")
    for rank in range(3):
        assert (f"rank {rank} on n{rank}, last step {steps[rank]}" in verdict.cause) == (rank in late)
    waiting = [str(rank) for rank in range(3) if rank not in late]
    assert not waiting or f"waiting: rank {', '.join(waiting)} in a" in verdict.text


def test_progress_during_the_question_for_stacks_is_no_hang():
    hub = joined(2)
    beat(hub, 11.0, (7, 10.5), (7, 10.5))
    hub.decide(11.0)
    beat(hub, 13.0, (8, 0.1), (7, 12.5))
    assert hub.decide(13.0) is None and hub.asked is None


def test_a_guard_without_a_sign_is_named_with_the_processes_to_be_killed():
    hub = joined(2)
    beat(hub, 10.0, (1, 0.0), None)
    beat(hub, 14.0, (2, 0.0), None)
    verdict = hub.decide(14.0)
    assert (verdict.rank, verdict.silent) == (1, [["n1", 101, 201]])


def test_a_guard_that_was_suspended_itself_forgets_all_ages():
    hub = joined(2)
    beat(hub, 1.0, (1, 0.0), (1, 0.0))
    hub.forget_ages(100.0)
    assert hub.decide(100.5) is None and hub.asked is None


def test_who_does_not_come_to_the_clean_up_is_named():
    hub = joined(3)
    hub.hear(1, {"bye": 5.0}, 1.0)
    beat(hub, 5.0, (9, 0.0), None, (9, 0.0))
    assert hub.decide(5.5) is None
    assert hub.decide(6.5).cause == "rank 0, 2 of 3 did not come to cleanup_ddp within 5 s"


def test_a_place_is_the_innermost_frames_outside_libraries():
    stacks = f'''Thread 0x1 (most recent call first):
  File "{os.__file__}", line 5 in run

Current thread 0x2 (most recent call first):
  File "/x/site-packages/torch/nn.py", line 7 in forward
  File "/data/train.py", line 10 in step
  File "/data/train.py", line 20 in main
  File "/data/train.py", line 30 in <module>

'''
    assert ddp_guard.place_of(stacks) == "step (train.py:10) < main (train.py:20)"


def run_python(words, env=None, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env=clean_environment(env=env), **options)


def test_any_script_can_be_guarded_and_keeps_its_arguments_output_and_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:], sys.stdin.read())\nsys.exit(7)\n")
    done = run_python(["-m", "ddp_guard", str(script), "a", "--b"], input="text")
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', '--b'] text\n", "")
    assert run_python(["-m", "ddp_guard"]).returncode == 1


def test_ctrl_c_is_seen_by_a_shell_as_such(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run_python(["-m", "ddp_guard", str(script)])
    assert done.returncode == -2 and done.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("env, guarded", [
    ({}, True), ({"DDP_GUARD": "0"}, False), ({"PALS_RANKID": "0"}, False), ({"PALS_RANKID": "0", "DDP_GUARD": "1"}, True)])
def test_where_it_was_never_tried_or_is_not_wanted_there_is_no_guard(env, guarded, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, ddp_guard\nddp_guard.supervise()\nprint(bool(os.environ.get('DDP_GUARD_FD')))\n")
    done = run_python([str(script)], env={**env, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, f"{guarded}\n"), done.stderr
    assert ("never tried under PALS" in done.stderr) == ("PALS_RANKID" in env and not guarded)
