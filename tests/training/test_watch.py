"""Does a run's folder say how the run ended, and where its ranks were when it hung?"""
import signal

import pytest

from ddp_setup import Ddp, end_watch, save_checkpoint, stop_reason
from launchers import ROOT, fork_ranks
from training.watch import (beat, close_run, read_status, save_every, save_wanted, watch_run,
                            write_status)


def test_a_run_is_on_until_it_is_closed(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path / "new", minutes=0)
    assert read_status(tmp_path / "new") == {"code": None, "reason": "running", "step": None}
    stop_reason(ddp, 3)
    close_run(ddp, 75, "because")
    assert read_status(tmp_path / "new") == {"code": 75, "reason": "because", "step": 3}


def test_a_watch_that_ends_without_a_code_leaves_the_outcome_as_it_is(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=0)
    close_run(ddp)
    assert read_status(tmp_path)["reason"] == "running"


def test_after_the_end_of_the_watch_nothing_is_noted_any_more(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=0)
    close_run(ddp, 0, "done")
    stop_reason(ddp, 1)     # begins a watch without a run folder
    ddp.state.record.note(1, "too late")
    end_watch(ddp)
    assert read_status(tmp_path)["reason"] == "done"


def test_a_file_STOP_in_the_run_folder_asks_for_a_stop(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=0)
    assert stop_reason(ddp, 1) == ""
    (tmp_path / "STOP").touch()
    assert stop_reason(ddp, 2).startswith(f"{tmp_path}/STOP exists")
    close_run(ddp)


@pytest.mark.parametrize("code, written", [(0, False), (75, False), (1, True), (130, True)])
def test_a_rank_other_than_0_notes_only_its_own_failure(code, written, tmp_path):
    ddp = Ddp(rank=1, world_size=2)
    watch_run(ddp, tmp_path, minutes=0)
    ddp.state.record.note(code, "it ended")
    assert (read_status(tmp_path).get("code") == code) == written
    close_run(ddp)


def test_without_a_run_folder_there_is_no_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ddp = Ddp()
    watch_run(ddp, minutes=0)
    close_run(ddp, 0, "done")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_as_a_status_is_an_empty_one(tmp_path):
    assert read_status(None) == read_status(tmp_path) == {}
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "status.json").write_text(text, encoding="latin-1")
        assert read_status(tmp_path) == {}


def test_a_status_replaces_the_one_before_and_leaves_no_other_file(tmp_path):
    write_status(tmp_path, None, "running", 4)
    write_status(tmp_path, 0, "done", 5)
    assert read_status(tmp_path) == {"code": 0, "reason": "done", "step": 5}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_advice_says_whether_the_same_command_can_go_on_and_from_what(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=0)
    advice = ddp.state.record.advice
    assert advice(True) == "No checkpoint yet. The same command starts from the beginning."
    assert advice(False) == "No checkpoint yet. Mend the cause first."
    save_checkpoint(tmp_path / "last.pt", ddp, step=1)
    assert advice(True) == "To go on, give the same command again."     # ddp_setup names the file
    close_run(ddp)


def test_stacks_are_not_appended_to_what_a_link_leads_to(tmp_path):
    (tmp_path / "stacks").mkdir()
    link = tmp_path / "stacks" / "rank_0.txt"
    link.symlink_to(tmp_path / "other")
    watch_run(Ddp(), tmp_path, minutes=1)
    assert link.is_file()
    assert not (tmp_path / "other").exists()


def test_stacks_that_nobody_wrote_leave_no_file(tmp_path):
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=1)
    assert (tmp_path / "stacks" / "rank_0.txt").exists()
    beat(ddp)
    end_watch(ddp)
    assert not (tmp_path / "stacks").exists()


def test_a_rank_without_a_guard_and_without_progress_writes_its_stacks_and_ends(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from ddp_setup import setup_ddp
from training.watch import watch_run
watch_run(setup_ddp(quiet=True), "out", minutes=1 / 60)
def stuck():
    time.sleep(600)
stuck()
""")
    result = fork_ranks(1, [path], tmp_path)
    assert result.returncode == 1, result.text
    assert "in stuck" in (tmp_path / "out" / "stacks" / "rank_0.txt").read_text()
    assert read_status(tmp_path / "out")["code"] is None     # a timer writes no status


def test_signals_that_a_watch_is_not_told_to_handle_are_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    ddp = Ddp()
    watch_run(ddp, tmp_path, minutes=0, signals=["SIGTERM", "SIGUSR1"])
    assert signal.getsignal(signal.SIGINT) is before
    close_run(ddp)


@pytest.mark.parametrize("seconds, wanted", [(0, False), (110, False), (130, True)])
def test_a_checkpoint_is_wanted_when_so_many_minutes_have_passed(seconds, wanted):
    ddp = Ddp()
    watch_run(ddp, minutes=0)
    save_every(ddp, minutes=2)
    ddp.state.record.saved_at -= seconds
    assert save_wanted(ddp) == wanted
    close_run(ddp)


def test_the_clock_of_another_rank_wants_no_checkpoint():
    ddp = Ddp(rank=1, world_size=2)
    watch_run(ddp, minutes=0)
    save_every(ddp, minutes=1e-9)
    assert not save_wanted(ddp)
    close_run(ddp)
