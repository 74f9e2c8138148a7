"""bench/learn_dpo.py: which recipe learns more from measured mutations, on proteins held out."""
import re

import pytest

from bench.dpo import write_demo_pdb
from launchers import ROOT
from proteins.letters import AMINO_ACIDS
from training_runs import command_lines

ARGUMENTS = ["dpo", "table.csv", "--lower_is_better", "--hold_out", "0.4", "--config",
             ROOT / "configs" / "dpo_stability.yaml", "--seeds", "0,3", "--recipes",
             "shipped,no_kl", "--folder", "runs", "--device", "cpu",
             "model.base_model_name=random", "model.random.hidden_size=16",
             "model.random.n_encoder=1", "model.random.n_decoder=1", "model.random.num_edges=8",
             "training.n_iters=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, what the bench printed) for twelve mutations of each of six made proteins."""
    folder = tmp_path_factory.mktemp("learn_dpo")
    lines = ["pdb_file,mutation,ddg"]
    for length in range(30, 36):
        write_demo_pdb(folder / f"{length}.pdb", length)
        for i in range(12):
            wild_type = AMINO_ACIDS[i * 7 % 20]         # as write_demo_pdb
            mutant = AMINO_ACIDS[(i * 7 + 1) % 20]
            lines.append(f"{length}.pdb,{wild_type}{i + 1}{mutant},{i * 5 % 12 - 2}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    (code, table, err), = command_lines("bench", [["learn", *ARGUMENTS]], folder)
    assert code == 0, err
    return folder, table


def rows_of(table):
    """{(recipe, seed): its numbers} of the table."""
    found = re.findall(r"^(base weights|\w+) +(\d+|mean|) +((?: *-?[\d.]+){8})$", table, re.M)
    return {(recipe, seed): [float(word) for word in numbers.split()]
            for recipe, seed, numbers in found}


@pytest.mark.slow
def test_a_row_for_each_run_and_the_mean_of_its_seeds(finished):
    rows = rows_of(finished[1])
    seeds = ("0", "3", "mean")
    assert list(rows) == [("base weights", ""),
                          *((recipe, seed) for recipe in ("shipped", "no_kl")
                            for seed in seeds)]
    for recipe in ("shipped", "no_kl"):
        first, second, mean = (rows[recipe, seed] for seed in seeds)
        assert mean == pytest.approx([(a + b) / 2 for a, b in zip(first, second)], abs=0.06)


@pytest.mark.slow
def test_the_correlation_is_that_of_the_command_for_variants(finished):
    folder, table = finished
    command = ["runs/shipped_0/latest_model.pt", "--mutations", "runs/shipped_held_out.csv",
               "--measured", "ddg", "--lower_is_better", "--device", "cpu", "--out", "s.csv"]
    (code, _, err), = command_lines("score_mutations", [command], folder)
    assert code == 0, err
    overall, mean = re.findall(r"^Spearman (-?[\d.]+)", err, re.M)
    assert rows_of(table)["shipped", "0"][:2] == [float(overall), float(mean)]


@pytest.mark.slow
def test_a_finished_run_is_neither_trained_nor_measured_again(finished):
    folder, table = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("held_out.json")}
    (code, again, err), = command_lines("bench", [["learn", *ARGUMENTS]], folder)
    assert code == 0 and again == table, err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("held_out.json")}


@pytest.mark.slow
@pytest.mark.parametrize("words, said", [
    (["loss.beta=0.3"], "Here: another --folder, or remove"),
    (["--recipes", "best"], "best; expected some of shipped,"),
    (["--hold_out", "0"], "no pairs could be made")])
def test_what_cannot_be_compared_is_refused(words, said, finished):
    folder, _ = finished
    (code, _, err), = command_lines("bench", [["learn", *ARGUMENTS, *words]], folder)
    assert code == 2 and said in err
