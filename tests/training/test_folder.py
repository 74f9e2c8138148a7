"""The run folder: whose it is, by its lock."""

import json
import math
import os
import socket
import time
import types
from unittest import mock

import pytest

from ddp_setup import Ddp
from training.files import write_text_atomic
from training.watch import read_status, write_status
from training.folder import RunLock, check_lock, open_run, process_start, replace_status


def test_of_two_starts_that_find_a_dead_lock_the_faster_one_keeps_the_folder(tmp_path, monkeypatch):
    path = tmp_path / "lock.json"
    pid = os.getppid()
    faster = {"host": socket.gethostname(), "pid": pid, "start": process_start(pid),
              "beat": time.time()}
    dead = json.dumps({**faster, "start": "another"})   # of a process that is gone
    path.write_text(dead)

    def look_and_be_overtaken(asked):
        if asked == pid:
            path.write_text(json.dumps(faster))
        return process_start(asked)

    monkeypatch.setattr("training.folder.process_start", look_and_be_overtaken)
    with pytest.raises(ValueError, match=f"in use by process {pid} on "):
        RunLock(tmp_path)
    assert json.loads(path.read_text()) == faster and list(tmp_path.iterdir()) == [path]
    path.write_text(dead)   # which another start takes away just now: no error
    monkeypatch.setattr("training.folder.process_start", lambda _: path.unlink(missing_ok=True))
    RunLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_dead_if_its_process_number_is_of_a_later_process_now(tmp_path):
    pid = os.getppid()
    (tmp_path / "lock.json").write_text(json.dumps(
        {"host": socket.gethostname(), "pid": pid, "start": process_start(pid) - 1,
         "beat": time.time()}))
    RunLock(tmp_path).release()


def test_a_lock_of_another_host_counts_while_its_heartbeat_goes_on(tmp_path, monkeypatch):
    def beat(seconds=0):
        write_text_atomic(tmp_path / "lock.json", json.dumps(
            {"host": "elsewhere", "pid": 1, "start": 5, "beat": time.time()}))

    monkeypatch.setattr(RunLock, "stale", 2)
    beat()
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", beat)
        with pytest.raises(ValueError, match="in use by process 1 on elsewhere"):
            RunLock(tmp_path)
    start = time.monotonic()
    RunLock(tmp_path).release()
    assert 1 <= time.monotonic() - start <= 300 and not (tmp_path / "lock.json").exists()



def test_a_run_that_was_taken_over_while_it_stood_still_writes_nothing_more(tmp_path, monkeypatch):
    # on a file system without hard links, too
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError))
    monkeypatch.setattr(RunLock, "every", 0.01)
    lock = RunLock(tmp_path)
    ready = types.SimpleNamespace(lock=lock, work_dir=tmp_path)
    check_lock(ready, Ddp())
    other = json.dumps({"host": "elsewhere", "pid": 7, "start": 5, "beat": time.time()})
    while not lock.lost:      # a beat under way may still be written after this; then again
        lock.path.write_text(other)
    with pytest.raises(RuntimeError, match="taken over by process 7 on elsewhere"):
        check_lock(ready, Ddp())
    lock.release()
    assert lock.path.read_text() == other and [p.name for p in tmp_path.iterdir()] == ["lock.json"]


@pytest.mark.parametrize("text", ["[" * 100000, "[1]", "3", "null", "{"])
def test_a_lock_that_was_damaged_is_renewed_by_its_holder(text, tmp_path, monkeypatch):
    monkeypatch.setattr(RunLock, "every", 0.01)
    lock = RunLock(tmp_path)
    lock.path.write_text(text)
    while lock.thread.is_alive() and '"pid"' not in lock.path.read_text():
        time.sleep(0.01)
    lock.release()
    assert not lock.lost and not list(tmp_path.iterdir())


LOCK = {"host": "elsewhere", "pid": 5, "start": 5, "beat": 1.0}
NO_LOCKS = [json.dumps({**LOCK, key: value}) for key, values in {
    "host": [None, [], 3], "pid": [None, "5", -1, 0, True, 10**18, 1.5],
    "beat": [None, "x", math.nan, math.inf, -1, 1e18, 10**400, []]}.items() for value in values]


@pytest.mark.parametrize("text", ["[" * 100000, "[1]", "3", *NO_LOCKS])
def test_a_lock_of_another_kind_is_refused(text, tmp_path):
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read as a lock"):
        RunLock.refuse_live(tmp_path)


def test_a_status_that_cannot_be_read_counts_as_none(tmp_path):
    (tmp_path / "status.json").write_text("[" * 100000)
    assert read_status(tmp_path) == {}


@pytest.mark.parametrize("text", [None, '{"host": "%s", "pid": 4194304, "start": 5, "beat": 0}'])
def test_a_lock_is_not_written_to_what_a_link_leads_to(text, tmp_path):
    """text: of a lock whose process is gone; None: the link leads to nothing."""
    if text is not None:
        text = text % socket.gethostname()
        (tmp_path / "other").write_text(text)
    (tmp_path / "lock.json").symlink_to("other")
    lock = RunLock(tmp_path)
    assert not (tmp_path / "lock.json").is_symlink()
    lock.release()
    if text is not None:
        assert (tmp_path / "other").read_text() == text
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("code, step, stays", [
    (75, 7, True), (1, 7, True), (0, 7, True), (0, None, True), (75, None, False),
    (2, None, False), (None, None, False)])
def test_a_refused_start_leaves_the_outcome_of_steps(code, step, stays, tmp_path):
    write_status(tmp_path, code, "before", step)
    former = read_status(tmp_path)
    replace_status(tmp_path, None, "starting")
    replace_status(tmp_path, 2, "no such file", former=former)
    assert (read_status(tmp_path) == former) == stays


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".last.pt.tmp").touch()
    (tmp_path / ".config.yaml.tmp").touch()
    open_run(tmp_path, False, ("checkpoints",)).release()
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


@pytest.mark.parametrize("seconds, replaced", [(-60, False), (60, True)])
def test_a_failed_start_replaces_no_status_that_is_written_after_it_began(
        seconds, replaced, tmp_path):
    write_status(tmp_path, 1, "of another rank")
    assert replace_status(tmp_path, 2, "of this one", since=time.time() + seconds) == replaced
    assert read_status(tmp_path)["code"] == (2 if replaced else 1)
