"""The run folder: who takes it, what is renamed or removed in it, and what is left alone."""
import os
import signal
import types

import pytest
import yaml

from ddp_setup import Ddp
from ddp_watch import watch_run
from launchers import ROOT, ForkedRanks, read_status
from train_sedd_ddp import Config
from training_runs import prepare_and_train
from training.config import config_to_dict, load_config
from training.run_folder import refuse_in_use, rename_former, take_folder


def run_in(folder, step=0, finished="", n_iters=10):
    """As much of a Run as take_folder needs."""
    config = load_config(Config, None, [
        "monitoring.watchdog_minutes=0", "training.stop_signals=[SIGUSR1]",
        f"training.n_iters={n_iters}"])
    return types.SimpleNamespace(config=config, work_dir=folder, n_iters=n_iters,
                                 continued_from=f"{folder}/checkpoints/last.pt",
                                 progress={"step": step, "finished": finished})


def take(run, fresh=False):
    with watch_run(Ddp(), minutes=0) as watch:
        take_folder(run, Ddp(), watch, fresh, ("checkpoints",))


def test_a_run_that_takes_its_folder_writes_its_config_and_that_it_runs(tmp_path):
    run = run_in(tmp_path / "w")
    with watch_run(Ddp(), minutes=0) as watch:
        take_folder(run, Ddp(), watch, False, ())
        assert sorted(os.listdir(tmp_path / "w")) == ["config.yaml", "lock", "status.json"]
        assert read_status(tmp_path / "w")["code"] is None
    written = tmp_path / "w" / "config.yaml"
    assert load_config(Config, written) == run.config
    assert yaml.safe_load(written.read_text()) == config_to_dict(run.config)   # for other tools


def test_a_run_heeds_the_stop_signals_of_its_config(tmp_path):
    run = run_in(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def train(run, ddp, watch):
        assert signal.getsignal(signal.SIGTERM) is before
        assert watch.stop_reason(1) == ""
        signal.raise_signal(signal.SIGUSR1)
        return watch.stop_reason(2)

    script = types.SimpleNamespace(prepare=lambda *_: run)
    reason = prepare_and_train(script, run.config, Ddp(), tmp_path, train=train)
    assert reason.startswith("SIGUSR1")


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in (".config.yaml.tmp", "notes.tmp", "checkpoints/.a.pt.tmp", "checkpoints/a.pt"):
        (tmp_path / name).touch()
    take(run_in(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.yaml", "lock", "notes.tmp",
                                            "status.json"]
    assert os.listdir(tmp_path / "checkpoints") == ["a.pt"]


def test_the_folder_of_a_finished_run_is_left_alone(tmp_path):
    take(run_in(tmp_path / "w", step=10, finished="all steps done"))
    assert not (tmp_path / "w").exists()


def test_a_fresh_start_renames_the_former_folder_to_the_first_free_name(tmp_path, capsys):
    for number in (1, 2, 3):
        take(run_in(tmp_path / "w", n_iters=number), fresh=True)
    steps = {path.name: load_config(Config, path / "config.yaml").training.n_iters
             for path in tmp_path.iterdir()}
    assert steps == {"w.old1": 1, "w.old2": 2, "w": 3}
    assert f"--fresh: the former run is now in {tmp_path}/w.old2" in capsys.readouterr().out


def test_a_fresh_start_renames_what_a_link_leads_to(tmp_path):
    """Such as a folder on a larger disk."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to("large")
    take(run_in(tmp_path / "link"), fresh=True)
    assert sorted(os.listdir(tmp_path)) == ["large", "large.old1", "link"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large" / "config.yaml").exists()


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()],
                         ids=["none", "empty"])
def test_where_there_was_no_run_nothing_is_renamed(make, tmp_path):
    make(tmp_path / "w")
    rename_former(tmp_path / "w")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["w"])


def test_a_folder_in_use_is_neither_taken_nor_renamed(tmp_path):
    (tmp_path / "script.py").write_text(f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
from ddp_setup import setup_ddp
from ddp_watch import watch_run
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "w", minutes=0):
    print("ready", flush=True)
    signal.pause()
""")
    with ForkedRanks(["script.py"], tmp_path, {0: {"DDP_GUARD": 0}}) as holder:
        holder.wait_for("ready")
        for refused in (lambda: take(run_in(tmp_path / "w")), lambda: refuse_in_use(tmp_path / "w"),
                        lambda: take(run_in(tmp_path / "w"), fresh=True)):
            with pytest.raises(ValueError, match=f"in use by process {holder.pids[0]} on"):
                refused()
    assert sorted(os.listdir(tmp_path)) == ["script.py", "w"]
    assert sorted(os.listdir(tmp_path / "w")) == ["lock", "status.json"]    # of the holder


def test_a_look_whether_a_folder_is_in_use_writes_nothing(tmp_path):
    refuse_in_use(tmp_path / "none")
    (tmp_path / "lock").write_text("process 5 on n0\n")    # which has ended
    refuse_in_use(tmp_path)
    assert os.listdir(tmp_path) == ["lock"]
    assert (tmp_path / "lock").read_text() == "process 5 on n0\n"
