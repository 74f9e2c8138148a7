"""jobs/three_weights.sh: trains from three published weights, and says how to score by all."""
import os
import re
import shlex
import subprocess

import pytest

import score_mutations
import train_dpo_ddp
from launchers import ROOT


def said_by_script(folder, *words, **variables):
    """Lines of the script, whose training is printed and not done."""
    env = {**os.environ, "PYTHON": "echo", **variables}
    done = subprocess.run(["bash", ROOT / "jobs" / "three_weights.sh", *words], cwd=folder,
                          env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_three_trainings_have_a_base_and_a_folder_each_and_the_words_given(tmp_path):
    lines = said_by_script(tmp_path, "--train_data", "t.csv", "u.csv", "optim.lr=1e-4")
    trained = []
    for line in lines[:3]:
        script, *argv = shlex.split(line)
        options, config = train_dpo_ddp.read_arguments(argv)
        assert config.data.train_data == ("t.csv", "u.csv") and config.optim.lr == 1e-4
        assert config.loss.reference == "unfolded"      # of the config of this script
        trained.append((config.model.base_model_name, options.work_dir))
    assert trained == [(name, f"runs/three_weights/{name}")
                       for name in ("v_48_020", "v_48_010", "v_48_030")]


def test_three_trainings_go_on_from_the_three_weights_of_another_call(tmp_path):
    lines = said_by_script(tmp_path, FROM="my runs/a", FOLDER="b")
    trained = []
    for line in lines[:3]:
        before, _, after = line.partition(" --base_model_name ")
        trained.append(after.partition(" --work_dir "))
    assert trained == [(f"my runs/a/{name}/latest_model.pt", " --work_dir ", f"b/{name}")
                       for name in ("v_48_020", "v_48_010", "v_48_030")]


@pytest.mark.parametrize("words", ["--work_dir x", "--base_model_name=w.pt", "--config c.yaml"])
def test_a_folder_or_base_for_all_three_is_refused(words, tmp_path):
    done = subprocess.run(["bash", ROOT / "jobs" / "three_weights.sh", *words.split()],
                          cwd=tmp_path, env={**os.environ, "PYTHON": "echo"},
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.split("[ =]", words)[0] in done.stderr


def test_the_command_that_it_prints_scores_by_all_three(tmp_path):
    *_, line = said_by_script(tmp_path, "--train_data", "t.csv", FOLDER="my runs/a")
    _, script, *argv = shlex.split(line)
    args = score_mutations.read_arguments([*argv[:-1], "x.pdb", "--scan"])
    assert script == str(ROOT / "score_mutations.py") and argv[-1] == "..."
    assert [args.weights, *args.also] == [f"my runs/a/{name}/latest_model.pt"
                                          for name in ("v_48_020", "v_48_010", "v_48_030")]


def test_another_config_is_taken_from_the_folder_of_the_call_or_of_the_project(tmp_path):
    (tmp_path / "mine.yaml").touch()
    for config, expected in (("mine.yaml", "mine.yaml"),
                             ("configs/dpo_own_table.yaml",
                              str(ROOT / "configs" / "dpo_own_table.yaml"))):
        line = said_by_script(tmp_path, CONFIG=config)[0]
        assert f"--config {expected} " in line
