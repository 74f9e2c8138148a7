"""The log: rows that survive kills and resumes, a screen that stays readable, silence on other
ranks."""

import os
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch

from training.log import RunLog
from training.files import write_text_atomic, write_whole
from training.meter import histogram_of
from training_runs import rows


def test_a_row_is_in_the_file_as_soon_as_metrics_returns_with_null_for_nan_and_infinity(tmp_path):
    log = RunLog(tmp_path / "new" / "run", True, 9)
    log.metrics(3, {"loss": float("nan"), "ppl": float("inf"), "val/nll": 2.5})
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "loss": null, "ppl": null, "val/nll": 2.5}\n'
    log.close()


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    log = RunLog(tmp_path / "run", False, 10)
    log.truncate(0)
    log.metrics(1, {"loss": 1.0})
    log.progress(1, loss=1.0)
    log.say("hello")
    log.close()
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()


def test_on_a_terminal_a_bar_shows_the_numbers_and_say_does_not_break_it(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, True, 10)
    log.progress(4, loss=2.81)
    log.say("saved last.pt")
    log.progress(5, loss=2.75, rate=12300, bad=3)
    log.close()
    out, err = capsys.readouterr()
    assert out == "saved last.pt\n" and "step 5/10  loss 2.750  bad 3  12,300 res/s" in err


def test_text_replaces_a_file_whole_or_not_at_all_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "samples" / "step_10.fasta"
    write_text_atomic(target, "older")
    write_text_atomic(target, "old\n")
    for error in OSError(28, "No space left on device"), KeyboardInterrupt("by a person"):
        with pytest.raises(type(error), match="No space left on device: .*step_10.fasta|a person"):
            write_whole(target, mock.Mock(side_effect=error))
    assert target.read_bytes() == b"old\n" and list(target.parent.iterdir()) == [target]


def test_a_link_stays_and_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="is no file"):
            write_text_atomic(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()


def test_tensorboard_reads_back_numbers_histograms_and_texts_also_after_a_resume(tmp_path, extras):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    numbers = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    for first, last in ((1, 6), (4, 9)):   # the second start goes on from step 3
        log = RunLog(tmp_path, True, 9)
        log.truncate(first - 1)
        log.track({}, first - 1, tensorboard=True)
        for step in range(first, last):
            log.metrics(step, {"loss": first + step / 8, "bad": float("nan"), "host": "n7"},
                        {"a": histogram_of(list(numbers))})
        log.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {event.step: event.value for event in found.Scalars("loss")}
    assert scalars == {row["step"]: row["loss"] for row in rows(tmp_path)}
    assert found.Tags()["scalars"] == ["loss"] and "host/text_summary" in found.Tags()["tensors"]
    histogram = found.Histograms("a")[0].histogram_value
    counts, edges = np.histogram(numbers.numpy(), len(histogram.bucket))
    assert histogram.bucket == counts.tolist() and histogram.num == 1000
    assert [histogram.min, *histogram.bucket_limit] == pytest.approx(edges.tolist(), abs=1e-5)


def test_wandb_offline_keeps_its_run_after_a_resume(tmp_path, monkeypatch, extras):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = set()
    for step in (1, 2):
        log = RunLog(tmp_path, True, 9)
        log.track({"model": {"width": 8}}, step - 1, wandb={"project": "p", "name": "n"})
        ids.add(log.trackers[0].run.id)
        log.metrics(step, {"loss": 2.5, "host": "node7"}, {"a": histogram_of([torch.ones(3)])})
        assert len(log.trackers) == 1                # one that fails would be left out
        log.close()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(ids) == 1 and len(folders) == 2


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)   # not installed
    log = RunLog(tmp_path, True, 9)
    log.track({}, 0, tensorboard=True, wandb={})
    out = capsys.readouterr().out
    assert out.count("ATTENTION: TensorBoard is not used") == 1
    assert out.count("ATTENTION: W&B is not used") == 1
    fail = mock.Mock(side_effect=OSError("disk full"))
    log.trackers.append(types.SimpleNamespace(name="broken", log=fail))
    for step in (1, 2):
        log.metrics(step, {"loss": 1.0})
    log.close()
    assert len(rows(tmp_path)) == 2
    assert capsys.readouterr().out.count("broken is not used: OSError: disk full") == 1
