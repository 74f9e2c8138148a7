"""The checkpoint that a run continues from: what is refused, and what is told. More, with real
runs: test_train_sedd.py, test_train_dpo.py."""

import dataclasses
import math

import pytest
import torch

from ddp_setup import Ddp, load_checkpoint
from toy_run import toy
from training.config import CommonOptim, CommonTraining, config_to_dict
from training.log import RunLog
from training.loop import Diverged, save_wanted
from training.precision import grad_scaler
from training.resume import (
    Start,
    check_config,
    check_weights,
    describe_machine,
    find_checkpoint,
    hash_of,
    machine_differences,
    save_run,
)


@dataclasses.dataclass
class Model:
    width: int = 2


@dataclasses.dataclass
class Config:
    training: CommonTraining = dataclasses.field(default_factory=CommonTraining)
    model: Model = dataclasses.field(default_factory=Model)
    optim: CommonOptim = dataclasses.field(default_factory=CommonOptim)


FURTHER = " To train its weights further."


def saved(**changes):
    """The content of a checkpoint."""
    return {"model": torch.nn.Linear(2, 2).state_dict(), "config": config_to_dict(Config()),
            "data": {"n": 5, "hash": "a"}, "micro_batches": 6, **changes}


def continued(config=Config(), ddp=Ddp(), work_dir=None, **changes):
    return Start(config, ddp, work_dir, "last.pt", saved(**changes))


def refusal(config):
    with pytest.raises(ValueError) as caught:
        check_config("last.pt", saved(), config, FURTHER)
    return str(caught.value)


def test_a_checkpoint_that_fits_is_accepted():
    check_config("last.pt", saved(), Config(training=CommonTraining(log_freq=3)))   # it may change
    check_weights("last.pt", saved()["model"])


def test_another_config_is_refused_with_what_differs_and_how_to_train_further():
    text = refusal(Config(training=CommonTraining(seed=7)))
    assert "training.seed: 0 -> 7" in text and FURTHER in text


def test_no_further_training_is_offered_for_another_network():
    text = refusal(Config(model=Model(width=3)))
    assert "model.width: 2 -> 3" in text and FURTHER not in text


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(number):
    spoilt = {"weight": torch.ones(2, 2), "bias": torch.tensor([0.0, number])}
    with pytest.raises(ValueError, match="1 tensors of the model hold nan or infinite"):
        check_weights("last.pt", spoilt)


@pytest.mark.parametrize("n, name", [(6, "b"), (6, "a"), (5, "b")])
def test_other_data_are_refused(n, name):
    says = f"other pairs, or in another order .5, hash a; now {n}, {name}"
    with pytest.raises(ValueError, match=says):
        continued().check_data("pairs", {"n": n, "hash": name})


def test_the_same_data_and_those_of_a_new_run_are_accepted():
    continued().check_data("pairs", {"n": 5, "hash": "a"})
    Start(Config(), Ddp()).check_data("pairs", {"n": 6, "hash": "b"})


def test_a_new_run_takes_accum_micro_batches_per_rank():
    config = Config(training=CommonTraining(accum=3))
    assert Start(config, Ddp(world_size=4)).micro_batches == 12


def test_a_new_run_takes_the_micro_batches_that_its_config_names():
    config = Config(training=CommonTraining(accum=3, micro_batches=5))
    assert Start(config, Ddp(world_size=4)).micro_batches == 5


@pytest.mark.parametrize("n_ranks", [1, 3, 4, 6])
def test_a_continued_run_keeps_its_micro_batches(n_ranks):
    same = Config(training=CommonTraining(micro_batches=6))
    for config in (Config(), same):
        assert continued(config, Ddp(world_size=n_ranks)).micro_batches == 6


def test_more_ranks_than_micro_batches_are_refused_with_the_most_that_can_be():
    six = Config(training=CommonTraining(micro_batches=6))
    for start in (continued, lambda ddp: Start(six, ddp)):
        with pytest.raises(ValueError, match="and there are 7 ranks; .*Give at most 6 rank"):
            start(ddp=Ddp(world_size=7))


def test_another_number_of_micro_batches_than_the_checkpoint_has_is_refused():
    config = Config(training=CommonTraining(micro_batches=4))
    with pytest.raises(ValueError, match="last.pt has 6 .*training.micro_batches is 4; expected"):
        continued(config)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not a run directory: it holds notes.txt"):
        find_checkpoint(tmp_path, None, False)


def test_the_checkpoint_before_is_enough(tmp_path):
    """A run that was killed between two renames has no last.pt."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last-1.pt").touch()
    found = find_checkpoint(tmp_path, None, False)
    assert found == str(tmp_path / "checkpoints" / "last.pt")
    assert find_checkpoint(tmp_path, None, True) is None


def test_a_folder_that_holds_a_run_takes_no_checkpoint_of_another(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "last.pt").touch()
    own = tmp_path / "one" / "checkpoints" / "last-1.pt"
    assert find_checkpoint(tmp_path / "one", own, False) == str(own)
    with pytest.raises(ValueError, match="holds a run already, and --resume .* is of another"):
        find_checkpoint(tmp_path / "one", tmp_path / "other" / "checkpoints" / "last.pt", False)


@pytest.mark.parametrize("target", ["nowhere", "last.pt"])
def test_a_link_that_leads_nowhere_is_no_sign_of_a_new_run(target, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").symlink_to(target)
    found = find_checkpoint(tmp_path, None, False)
    with pytest.raises(ValueError, match="cannot read .*last.pt: .*(No such file|Too many levels)"):
        load_checkpoint(found)


def test_no_run_starts_while_it_is_asked_to_stop(tmp_path):
    (tmp_path / "STOP").touch()
    with pytest.raises(ValueError, match="was asked to stop"):
        find_checkpoint(tmp_path, None, False)


def test_a_run_that_is_begun_anew_does_not_heed_the_stop_of_the_former_one(tmp_path):
    (tmp_path / "STOP").touch()
    (tmp_path / "config.yaml").touch()
    assert find_checkpoint(tmp_path, None, True) is None


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """They can be so only after a bad step."""
    run = toy()
    run.config = Config()
    run.work_dir = tmp_path
    run.progress["bad_steps"] = [1, 1]
    run.bare.weight.data[0, 1] = math.nan
    with pytest.raises(Diverged, match="weights are nan or infinite"):
        save_run(run, RunLog(tmp_path, True, 9), Ddp(), "last.pt")
    assert not (tmp_path / "checkpoints").exists()


def test_another_machine_is_told_by_what_may_change_the_last_bits():
    here = {"world_size": 1, "versions": {"torch": str(torch.__version__)},
            "machine": describe_machine(Ddp())}
    other = {**here, "world_size": 4, "machine": {**here["machine"], "device": "another"}}
    assert machine_differences(here, Ddp()) == ""
    assert machine_differences(other, Ddp()) == "world_size 4 -> 1, device another -> cpu"


BEST = {"step": 2, "score": 1.0}


def best_after_going_on(folder, work_dir, n_iters=9, **state):
    """Run.progress["best"] of a run in work_dir that continues, of n_iters steps, from a checkpoint
    of step 3 in `folder`."""
    start = Start(Config(), Ddp(), work_dir, str(folder / "checkpoints" / "last.pt"),
                  saved(step=3, best=BEST, bad_evals=0, bad_steps=[0, 0], seen={}, **state))
    return start.progress((), {}, n_iters)["best"]


@pytest.mark.parametrize("n_iters, finished, elsewhere", [(9, "", None),
                                                          (3, "all steps done", BEST)])
def test_a_run_that_goes_on_in_another_folder_looks_for_its_best_weights_anew(
        n_iters, finished, elsewhere, tmp_path):
    """Their file stayed behind. One that has finished goes on with nothing."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)

    def best_from(folder):
        return best_after_going_on(folder, here, n_iters, finished=finished)

    assert best_from(here) == best_from(tmp_path / "link") == BEST
    (tmp_path / "disk").mkdir()     # with room for the checkpoints
    (here / "checkpoints").symlink_to(tmp_path / "disk")
    assert best_from(here) == BEST
    assert best_from(tmp_path / "other") == elsewhere


def test_an_unfinished_run_without_a_step_left_to_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is of step 3 of a run that is not finished.*2 steps"):
        best_after_going_on(tmp_path, tmp_path, n_iters=2, finished="")


def test_a_new_run_begins_at_step_0_with_the_scripts_own_entries():
    progress = Start(Config(), Ddp()).progress(("pairs",), {"recent": 1.0}, 9)
    assert progress == {"step": 0, "best": None, "bad_evals": 0, "finished": "",
                        "bad_steps": [0, 0], "seen": {"pairs": 0}, "recent": 1.0}


def test_the_scale_of_the_loss_goes_on_for_another_number_of_ranks():
    """Together with the number of ranks, by which a loss is multiplied, it stays."""
    run = toy()
    run.scaler = grad_scaler(torch.float16, Ddp(world_size=4))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    start = continued(optimizer=run.optimizer.state_dict(), scaler=scaler.state_dict(),
                      world_size=2)
    start.load_optimizer(run, Ddp(world_size=4))
    assert run.scaler.get_scale() == 32


@pytest.mark.parametrize("rate", [{"lr": 1e18}, {"lr": math.nan}, {"lr": -0.5}, {"warmup": 10**9}])
def test_a_checkpoint_with_a_rate_that_its_config_does_not_give_is_refused(rate):
    config = Config()
    config.optim.lr = 0.5
    config.optim.warmup = 3
    assert Start(config, Ddp()).rate(8) == (0.5, 3)
    assert continued(config, lr=0.5, warmup=3).rate(8) == (0.5, 3)
    with pytest.raises(ValueError, match="last.pt has the learning rate"):
        continued(config, **{"lr": 0.5, "warmup": 3, **rate}).rate(8)


def test_the_hash_of_weights_depends_on_names_and_numbers_and_not_on_their_order():
    a = {"x": torch.ones(2), "y": torch.zeros(2)}
    assert hash_of(a) == hash_of({"y": torch.zeros(2), "x": torch.ones(2)})
    assert hash_of(a) != hash_of({"x": torch.zeros(2), "y": torch.zeros(2)})
    assert hash_of(a) != hash_of({"w": torch.ones(2), "y": torch.zeros(2)})


def test_the_rows_up_to_a_checkpoint_are_on_the_disk_before_it(tmp_path, disk_calls):
    run = toy()
    run.config = Config()
    run.work_dir = tmp_path
    log = RunLog(tmp_path, True, 9)
    log.metrics(1, {"loss": 2.0})
    save_run(run, log, Ddp(), "last.pt")
    log.close()
    assert disk_calls[0] == ("fsync", (tmp_path / "metrics.jsonl").read_bytes())


def test_the_minutes_until_a_checkpoint_begin_anew_with_each(tmp_path):
    run = toy()
    run.config = Config(training=CommonTraining(snapshot_minutes=2))
    run.work_dir = tmp_path
    run.saved_at -= 100
    assert not save_wanted(run, Ddp())
    run.saved_at -= 30
    assert save_wanted(run, Ddp())
    assert not save_wanted(run, Ddp(rank=1, world_size=2))   # the clock of rank 0 decides
    save_run(run, RunLog(tmp_path, True, 9), Ddp(), "last.pt")
    assert not save_wanted(run, Ddp())
