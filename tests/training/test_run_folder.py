"""The run folder: who takes it, what is renamed or removed in it, and what is left alone."""
import os
import signal
import types

import pytest
import yaml

import training.run_folder
from ddp_setup import Ddp
from ddp_watch import watch_run
from launchers import ROOT, ForkedRanks, read_status
from train_sedd_ddp import Config
from training.config import config_to_dict, load_config
from training.run_folder import refuse_in_use, rename_former, take_folder
from training_runs import SCRIPTS, prepare_and_train


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


# ---- the end of a run ----

SEDD = ["model.hidden_size=16", "model.n_blocks=1", "model.n_heads=2", "model.cond_dim=8",
        "training.batch_size=4", "training.n_iters=9", "training.log_freq=1",
        "training.eval_freq=2", "data.demo_proteins=100", "data.max_length=20",
        "data.val_fraction=0.2", "monitoring.n_samples=0"]
DPO = ["model.base_model_name=random",
       "model.random={hidden_size: 16, n_encoder: 1, n_decoder: 1, num_edges: 8}",
       "data.demo_structures=4", "data.demo_pairs=3", "data.val_fraction=0.4",
       "training.batch_size=4", "training.n_iters=9", "training.log_freq=1",
       "training.eval_freq=2"]


@pytest.fixture
def drawn(monkeypatch):
    """The status of a run when its curves are drawn, in a list: a picture is a file of a byte."""
    statuses = []

    def draw(runs, path):
        path.write_bytes(b"P")
        statuses.append(read_status(path.parent)["code"])

    monkeypatch.setattr(training.run_folder, "draw", draw)
    return statuses


def train_until_stopped(what, settings, folder, after):
    """Train, and ask for a stop in step number `after`."""
    script = SCRIPTS[what]
    config = load_config(script.Config, None, [*settings, "training.stop_signals=[SIGUSR1]"])

    def train_and_stop(run, ddp, watch):
        if after == 0:
            signal.raise_signal(signal.SIGUSR1)

        def ask(*_):
            if run.progress["step"] == after - 1:
                signal.raise_signal(signal.SIGUSR1)

        run.bare.register_forward_pre_hook(ask)
        return script.train(run, ddp, watch)

    return prepare_and_train(script, config, Ddp(), folder, train=train_and_stop)


@pytest.mark.parametrize("what, settings, best", [
    ("sedd", SEDD, "checkpoints/best.pt (step 2) and last.pt"),
    ("dpo", DPO, "best_model.pt (step")])
def test_a_stopped_run_names_its_weights_and_its_picture_which_it_draws_last(
        what, settings, best, tmp_path, capsys, drawn):
    """When status.json says already that it has stopped, as little time may be left."""
    result = train_until_stopped(what, settings, tmp_path, 3)
    assert "stopped" in result and drawn == [75]
    out = capsys.readouterr().out
    end = out[out.index("Stopped at step 3 of 9: SIGUSR1"):]
    assert f"  weights   {tmp_path}/{best}" in end
    assert end.splitlines()[-1] == f"  picture   {tmp_path}/curves.png"
    for line in end.splitlines():     # a path has no place to be broken
        assert len(line) <= 80 or str(tmp_path) in line


def test_a_run_that_stops_before_its_first_row_has_no_picture(tmp_path, capsys, drawn):
    train_until_stopped("sedd", [*SEDD, "training.log_freq=5", "training.eval_freq=5"], tmp_path, 3)
    assert drawn == [] and "picture" not in capsys.readouterr().out


def test_a_start_that_does_no_step_names_no_weights_that_it_has_not_written(
        tmp_path, capsys, drawn):
    train_until_stopped("sedd", SEDD, tmp_path, 0)
    assert drawn == [] and "weights  " not in capsys.readouterr().out


@pytest.mark.parametrize("error, said", [
    (ModuleNotFoundError("No module named 'matplotlib'"), "none without matplotlib: pip install"),
    (KeyboardInterrupt(), "none, interrupted"), (ValueError("backend"), "ValueError: backend")])
def test_a_picture_that_is_not_drawn_is_said_and_changes_no_end(
        error, said, tmp_path, capsys, monkeypatch):
    def draw(*_):
        raise error

    monkeypatch.setattr(training.run_folder, "draw", draw)
    assert "stopped" in train_until_stopped("sedd", SEDD, tmp_path, 2)
    assert said in capsys.readouterr().out
    assert read_status(tmp_path)["code"] == 75
