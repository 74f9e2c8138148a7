"""The log: rows that survive kills and resumes, a screen that stays readable, silence on other
ranks."""

import contextlib
import dataclasses
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest

import training.log
from ddp_setup import Ddp
from training.config import CommonMonitoring
from training.log import RunLog, open_log, print_line, read_rows, show_progress


@dataclasses.dataclass
class Config:
    monitoring: CommonMonitoring = dataclasses.field(default_factory=CommonMonitoring)


def test_a_row_is_in_the_file_as_soon_as_metrics_returns_with_null_for_nan_and_infinity(tmp_path):
    log = RunLog(tmp_path / "new" / "run", True, 9)
    log.metrics(3, {"loss": float("nan"), "ppl": float("inf"), "val/nll": 2.5})
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "loss": null, "ppl": null, "val/nll": 2.5}\n'
    log.close()


def test_an_error_for_want_of_room_names_the_file_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)    # it is full at the second try too
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, True, 9)
    with pytest.raises(OSError, match="No space left on device: '.*metrics.jsonl'"):
        log.metrics(1, {"loss": 1.0})
    with contextlib.suppress(OSError):   # the row is still in the buffer
        log.file.close()


@pytest.mark.parametrize("continued_from, kept", [("last.pt", [0, 3, 4]), (None, [])])
def test_rows_after_the_step_that_a_run_goes_on_from_are_dropped(continued_from, kept, tmp_path):
    """Of a new run, all: they are of a run that came to no checkpoint."""
    lines = [f'{{"step": {step}}}\n' for step in (0, 3, 4, 5, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = SimpleNamespace(config=Config(), work_dir=tmp_path, n_iters=9, progress={"step": 4},
                          continued_from=continued_from)
    open_log(run, Ddp()).close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == kept


def test_a_row_that_a_kill_cut_off_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    RunLog(tmp_path, True, 9).truncate(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


@pytest.mark.parametrize("row", ['{"step": 0}{"step": 1}', '{"loss": 2.8}', "[2.8]"])
def test_another_row_that_cannot_be_read_is_named(row, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{row}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_rows(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_a_run_goes_on_when_nobody_reads_its_output(make, monkeypatch):
    """As after `| tee` has ended by Ctrl-C, or when the terminal was closed."""
    reader, writer = make()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print_line("loss 2.8")
        print_line("loss 2.7")


def test_an_output_that_cannot_be_written_is_an_error_that_names_it(monkeypatch):
    stdout = open("/dev/full", "w")
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(OSError, match="No space .*standard output"):
        print_line("loss 2.8")
    with contextlib.suppress(OSError):   # the line is still to be written
        stdout.close()


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    log = RunLog(tmp_path / "run", False, 10)
    log.truncate(0)
    log.metrics(1, {"loss": 1.0})
    log.progress(1, loss=1.0)
    log.say("hello")
    log.close()
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()


def be_on_terminal(monkeypatch, stdout=True, stderr=True):
    """Let the outputs that capsys captures be a terminal. To be called in the test itself."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: stderr)


def test_on_a_terminal_a_line_shows_the_numbers_and_say_does_not_break_it(
        tmp_path, capsys, monkeypatch):
    be_on_terminal(monkeypatch)
    log = RunLog(tmp_path, True, 10)
    log.progress(4, loss=2.81)
    log.say("saved last.pt")
    log.progress(5, loss=2.75, rate=(12300, "res"), bad=3)
    log.close()
    out, err = capsys.readouterr()
    assert out == "saved last.pt\n" and "step 5/10  loss 2.750  bad 3  12,300 res/s" in err


@pytest.mark.parametrize("step, total", [(23, 120), (1234, 9600)])
def test_what_dpo_shows_fits_into_a_terminal(step, total, tmp_path, capsys, monkeypatch):
    be_on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    log = RunLog(tmp_path, True, total)
    for number in (step - 1, step):
        log.progress(number, loss=0.4662, acc=0.8125, margin=0.7533, rate=(125.3, "pairs"))
    shown = capsys.readouterr().err.split("\r")[-1]
    whole = rf"step {step}/{total} .*  125 pairs/s  ETA \d+:\d\d:\d\d"
    assert re.fullmatch(whole, shown), shown
    log.close()


@pytest.mark.parametrize("piped", ["stdout", "stderr"])
def test_a_line_of_progress_comes_once_where_an_output_is_no_terminal(
        piped, tmp_path, capsys, monkeypatch):
    """As with `| tee`, which prints on the same terminal, later."""
    be_on_terminal(monkeypatch, **{piped: False})
    log = RunLog(tmp_path, True, 10)
    log.progress(4, loss=2.81)
    log.say("saved last.pt")
    log.close()
    assert capsys.readouterr() == ("step 4/10  loss 2.810\nsaved last.pt\n", "")


@pytest.mark.parametrize("per_second, shown", [(12300, "12,300"), (98.76, "98.8"), (0.25, "0.250")])
def test_a_slow_rate_is_not_rounded_to_nothing(per_second, shown, tmp_path, capsys):
    RunLog(tmp_path, True, 10).progress(4, rate=(per_second, "pairs"))
    assert capsys.readouterr().out == f"step 4/10  {shown} pairs/s\n"


def test_long_work_shows_in_a_log_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(training.log, "LINE_SECONDS", -1)   # a line after every item
    assert list(show_progress("abcd", Ddp(), "reference, pairs")) == list("abcd")
    assert capsys.readouterr().out.splitlines()[2] == "reference, pairs: 50%"


def test_long_work_shows_a_bar_on_a_terminal(capsys, monkeypatch):
    be_on_terminal(monkeypatch)
    assert list(show_progress("abcd", Ddp(), "reference, pairs")) == list("abcd")
    out, err = capsys.readouterr()
    assert out == "" and "reference, pairs" in err


def test_short_work_shows_nothing(capsys):
    list(show_progress("abcd", Ddp(), "reference, pairs"))
    assert capsys.readouterr() == ("", "")


def test_a_row_is_written_once_more_after_seconds_of_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, True, 9)

    def make_room(_):
        with open(tmp_path / "room", "ab") as file:
            os.dup2(file.fileno(), log.file.fileno())

    monkeypatch.setattr(time, "sleep", make_room)
    log.metrics(1, {"loss": 2})
    assert [row["step"] for row in read_rows(tmp_path / "room")] == [1]
    log.close()
