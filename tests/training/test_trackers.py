"""Rows reach TensorBoard and Weights & Biases, and a run goes on without them."""

import sys
import types
from unittest import mock

import pytest

from training.log import RunLog
from training_runs import rows


def test_tensorboard_reads_back_numbers_and_texts_also_after_a_resume(tmp_path, extras):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for first, last in ((1, 6), (4, 9)):   # the second start goes on from step 3
        log = RunLog(tmp_path, True, 9)
        log.truncate(first - 1)
        log.track({}, first - 1, tensorboard=True)
        for step in range(first, last):
            log.metrics(step, {"loss": first + step / 8, "bad": float("nan"), "host": "n7"})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {event.step: event.value for event in events.Scalars("loss")}
    assert scalars == {row["step"]: row["loss"] for row in rows(tmp_path)}
    assert events.Tags()["scalars"] == ["loss"] and "host/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("variables, mode", [({}, {"mode": "offline"}),
                                             ({"WANDB_MODE": "offline"}, {"mode": "online"})])
def test_wandb_offline_keeps_its_run_after_a_resume(variables, mode, tmp_path, monkeypatch, extras):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = set()
    for step in (1, 2):
        log = RunLog(tmp_path, True, 9)
        log.track({"model": {"width": 8}}, step - 1, wandb={"project": "p", "name": "n", **mode})
        ids.add(log.trackers[0].run.id)
        log.metrics(step, {"loss": 2.5, "host": "node7"})
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
