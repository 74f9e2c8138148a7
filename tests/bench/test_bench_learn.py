"""bench/learn.py: recipes x seeds, trained and judged by commands."""
import pytest

from launchers import ROOT
from training_runs import command_lines

# "Trains" by writing a metric that depends on recipe and seed, and counts how often it did.
TRAIN = """import json, pathlib, sys
run, factor, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
run.mkdir(exist_ok=True)
with open(run / "trained", "a") as file:
    file.write("x")
for step in (1, 2):
    with open(run / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "val/loss": factor * step + seed}), file=file)
if (run.parent / "stop").exists():
    sys.exit(75)
"""
PLAN = """
given: {where: val/loss, factor: 1, more: ""}
recipes: {one: {}, three: {factor: 3}}
seeds: [0, 2]
prepare: ["python {folder}/../prepare.py {folder}/{recipe}.made"]
train: python {folder}/../train.py {run} {factor} {seed} {more}
weights: "{run}/weights.pt"
before: "{folder}/base.pt"
evaluate: ["python {folder}/../judge.py {weights}"]
numbers: {loss: val/loss, length: 'length (\\d+)'}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "prepare.py").write_text("import sys; open(sys.argv[1], 'w').close()")
    (tmp_path / "judge.py").write_text(
        "import sys; print('length', len(sys.argv[1].rpartition('/')[2]))")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def learn(folder, *words):
    (code, out, err), = command_lines("bench", [["learn", "plan.yaml", "--folder", "runs", *words]],
                                      folder)
    return code, out, err


def test_a_row_has_mean_and_range_over_seeds_of_each_number(folder):
    code, out, err = learn(folder)
    assert code == 0, err
    assert out.splitlines() == [
        "| recipe | loss | length |", "|---|---|---|",
        "| before | - | 7 |",
        "| one | 3 (2 to 4) | 10 (10 to 10) |",     # the last losses are 2 and 4
        "| three | 7 (6 to 8) | 10 (10 to 10) |"]
    assert {path.name for path in (folder / "runs").glob("*.made")} == {"one.made", "three.made"}


def test_a_finished_run_is_not_trained_again(folder):
    _, first, _ = learn(folder)
    code, again, err = learn(folder)
    assert code == 0 and again == first, err
    assert {path.read_text() for path in folder.rglob("trained")} == {"x"}


def test_another_value_is_another_run(folder):
    learn(folder, "--recipes", "one", "--seeds", "0")
    _, out, _ = learn(folder, "--recipes", "one", "--seeds", "0", "factor=5")
    assert out.splitlines()[-1] == "| one | 10 | 10 |"


def test_a_training_that_stops_ends_it_until_the_same_command_goes_on(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "stop").touch()
    code, out, _ = learn(folder)
    assert code == 75 and "The same command goes on" in out
    (folder / "runs" / "stop").unlink()
    code, out, err = learn(folder)
    assert code == 0 and "| three | 7 (6 to 8) |" in out, err


def test_a_command_that_fails_is_named_with_its_last_words(folder):
    (folder / "judge.py").write_text("print('no such weights'); exit(4)")
    code, _, err = learn(folder)
    assert code == 2 and "exit code 4 of" in err and "no such weights" in err


def test_a_file_without_a_training_is_evaluated_alone(folder):
    (folder / "plan.yaml").write_text("""
seeds: [1, 22]
evaluate: ["python {folder}/../judge.py /{seed}"]
numbers: {length: 'length (\\d+)'}
""")
    code, out, err = learn(folder)
    assert code == 0 and out.splitlines()[-1] == "| run | 1.5 (1 to 2) |", err


@pytest.mark.parametrize("words, said", [
    (["--recipes", "two"], "--recipes: found two; expected some of one, three"),
    (["lr=1"], "found lr=1; expected NAME=VALUE, with a name of where, factor, more"),
    (["--seeds", "x"], "--seeds x; expected such as 0,1,2")])
def test_what_the_file_does_not_have_is_refused(words, said, folder):
    code, out, err = learn(folder, *words)
    assert code == 2 and said in err and not out


def test_a_file_of_something_else_is_refused(folder):
    (folder / "plan.yaml").write_text("training: {n_iters: 3}\n")
    code, _, err = learn(folder)
    assert code == 2 and "plan.yaml has ['training']; expected some of evaluate" in err


def test_an_unknown_placeholder_is_refused(folder):
    (folder / "plan.yaml").write_text(PLAN.replace("{factor} {seed}", "{step}"))
    code, _, err = learn(folder)
    assert code == 2 and "found the placeholder 'step'" in err


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "learn").glob("*.yaml")),
                         ids=lambda path: path.stem)
def test_the_files_of_the_docs_are_understood(path, tmp_path):
    (code, _, err), = command_lines("bench", [["learn", path, "--recipes", "none"]], tmp_path)
    assert code == 2 and "--recipes: found none; expected some of" in err
