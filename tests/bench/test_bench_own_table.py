"""bench/own_table.py: few measurements of a protein, judged by all others."""
import json

import numpy as np
import pytest
import torch

from bench.own_table import read_arguments, ridge, ridge_scores
from dpo.tables import VariantTable
from mpnn.model import random_proteinmpnn, to_checkpoint
from proteins.letters import AMINO_ACIDS
from proteins.mutations import scan_sequence
from mpnn_cases import Atoms
from training_runs import command_lines

@pytest.fixture
def folder(tmp_path):
    """A table of all letters at two residues of two proteins, and of one at a third."""
    rng = np.random.default_rng(0)
    lines = ["pdb_file,mutation,value"]
    for name, letters in (("one", AMINO_ACIDS), ("two", AMINO_ACIDS), ("few", "W")):
        atoms = Atoms()
        for row in range(9):
            atoms.add("A", row + 1, "ALA", xyz=rng.normal(size=(4, 3)) + [3.8 * row, 0, 0])
        (tmp_path / f"{name}.pdb").write_text(atoms.pdb())
        lines += [f"{name}.pdb,A{row}{letter},{number + row}" for row in (3, 7)
                  for number, letter in enumerate(letters) if letter != "A"]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


SIZES = {"hidden_size": 16, "n_encoder": 1, "n_decoder": 1, "num_edges": 4}
SMALL = ["model.base_model_name=random",
         *(f"model.random.{name}={size}" for name, size in SIZES.items())]


def own_table(folder, *words, base=SMALL):
    (code, out, err), = command_lines("bench", [
        ["own_table", "table.csv", "--measured", "value", "--better", "higher", "--folder", "kept",
         "--variants", "12", "training.n_iters=2", *base, *words]], folder)
    return code, out, err


def test_each_protein_with_enough_variants_is_drawn_from_and_judged_by_the_others(folder):
    code, out, err = own_table(folder, "table.folds=3")
    assert code == 0, err
    results = json.loads((folder / "kept" / "own_table.json").read_text())["results"]
    assert list(results) == ["one.pdb", "two.pdb"]
    for found in results.values():
        assert (found["drawn"], found["judged"], found["folds"]["variants"]) == (12, 26, 12)
        assert all(-1 <= found[name] <= 1 for name in ("zero_shot", "tuned", "ridge"))
        assert found["tuned"] != found["zero_shot"]
    mean = np.mean([found["ridge"] for found in results.values()])
    assert "mean of 2 proteins: " in out and f"ridge {mean:.4f}; " in out


def test_the_same_command_goes_on_and_another_draw_does_not(folder):
    own_table(folder, "table.folds=0")
    kept = folder / "kept" / "own_table.json"
    whole = json.loads(kept.read_text())
    whole["results"]["one.pdb"]["tuned"] = 2.0      # as if it had been found
    kept.write_text(json.dumps(whole))
    assert "tuned 2.000" in own_table(folder, "table.folds=0")[1]
    assert "tuned 2.000" not in own_table(folder, "table.folds=0", "--draw", "1")[1]


def test_scores_are_means_over_several_base_weights(folder):
    """Twice the same weights give what these give alone, and other ones do not."""
    first = folder / "1.pt"
    second = folder / "2.pt"
    for path, seed in ((first, 1), (second, 2)):
        torch.save(to_checkpoint(random_proteinmpnn(seed, **SIZES)), path)
    found = []
    for also in ([], ["--also", str(first)], ["--also", str(second)]):
        code, _, err = own_table(folder, "table.folds=0", *also,
                                 base=[f"model.base_model_name={first}"])
        assert code == 0, err
        kept = json.loads((folder / "kept" / "own_table.json").read_text())["results"]
        found.append([each[name] for each in kept.values() for name in ("zero_shot", "tuned")])
    assert found[1] == pytest.approx(found[0])
    assert found[2] != pytest.approx(found[0])


def test_further_weights_for_sedd_are_refused():
    """SEDD does not read model.base_model_name: the same weights would count twice."""
    with pytest.raises(ValueError, match="found --also with model.kind=sedd"):
        read_arguments(["table.csv", "--measured", "value", "--better", "higher", "--folder",
                        "kept", "--also", "v_48_020", "model.kind=sedd", "model.base=sedd.pt",
                        "loss.reference=base", "loss.native_kl=0"])


def test_keys_that_exclude_each_other_are_refused(folder):
    code, _, err = own_table(folder, "table.folds=1")
    assert code == 2 and "table.folds is 1" in err


# ---- ridge regression ----

def test_without_a_penalty_a_ridge_is_a_linear_fit():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 4))
    values = features @ [1.0, -2.0, 0.5, 0.0] + 3
    wanted = rng.normal(size=(5, 4))
    np.testing.assert_allclose(ridge(features, values, wanted, 1e-9),
                               wanted @ [1.0, -2.0, 0.5, 0.0] + 3, atol=1e-6)


def test_a_ridge_learns_residues_and_letters_beside_the_zero_shot_score():
    variants = [[(row, letter)] for row in range(10) for letter in range(19)]
    rng = np.random.default_rng(0)
    of_row = rng.normal(size=10)
    of_letter = rng.normal(size=19)
    values = np.array([of_row[row] + of_letter[letter] for (row, letter), in variants])
    zero_shot = rng.normal(size=190)
    complex = scan_sequence("made", "MKTAYIAKQRQI").complex
    is_known = rng.random(190) < 0.5
    table = VariantTable("made", complex, variants, np.append(values, np.nan))
    found = ridge_scores(table, is_known, zero_shot)
    assert np.corrcoef(found[~is_known], values[~is_known])[0, 1] > 0.95
    table = VariantTable("made", complex, variants, np.append(zero_shot, np.nan))
    found = ridge_scores(table, is_known, zero_shot)
    assert np.corrcoef(found[~is_known], zero_shot[~is_known])[0, 1] > 0.95
