"""dpo/evaluation.py: which weights best_model.pt holds."""
import math
from types import SimpleNamespace

import pytest

from ddp_setup import Ddp, load_checkpoint
from dpo.evaluation import keep_best
from dpo.scorer import Scorer
from toy_run import toy
from training.log import RunLog
from training.loop import Diverged


class StepScorer(Scorer):
    """Its files hold the step that they are of."""

    def file_content(self, model, epoch, step):
        return {"of_step": step}


def run_in(folder):
    run = toy()
    run.work_dir = folder
    run.reference = SimpleNamespace(scorer=StepScorer(None, [], None, Ddp()))
    return run


def test_the_best_model_is_of_the_lowest_score(tmp_path):
    run = run_in(tmp_path)
    log = RunLog(tmp_path, True, 9)
    held = []
    for step, score in enumerate((2.0, 3.0, 1.0, 1.5), 1):
        run.progress["step"] = step
        keep_best(run, log, {}, score, Ddp())
        held.append(load_checkpoint(str(tmp_path / "best_model.pt"))["of_step"])
    log.close()
    assert held == [1, 1, 3, 3]


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_ends_the_run_without_a_best_model(score, tmp_path):
    log = RunLog(tmp_path, True, 9)
    with pytest.raises(Diverged, match="expected a finite number"):
        keep_best(run_in(tmp_path), log, {}, score, Ddp())
    log.close()
    assert not (tmp_path / "best_model.pt").exists()
