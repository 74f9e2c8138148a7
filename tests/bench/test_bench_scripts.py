"""bench/*.sh: their commands are understood, and a part that fails is told."""
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from launchers import ROOT
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import Atoms
from proteins.letters import AMINO_ACIDS

# In place of Python: it notes its arguments, and says what a scoring does.
STAND_IN = """#!/bin/bash
printf '%q ' "$@" >> "${0%/*}/commands"
echo >> "${0%/*}/commands"
echo "Spearman 0.500 [0.4, 0.6]: 9 mutations of 2 protein(s)"
echo "Spearman 0.250 [0.1, 0.3]: mean of 2 protein(s)"
[ "${1##*/}" != test_dtype.py ]
"""
SIZES = {"hidden_size": 16, "n_encoder": 1, "n_decoder": 1, "num_edges": 4}


@pytest.fixture
def folder(tmp_path):
    """Tables of single mutations of two proteins, of ddG and of fitness, a structure, and small
    random weights under the published names."""
    rng = np.random.default_rng(0)
    lines = []
    for name in ("1aaa_A", "1csp_A"):       # the second one is held out by stability.sh
        atoms = Atoms()
        for row in range(9):
            atoms.add("A", row + 1, "ALA", xyz=rng.normal(size=(4, 3)) + [3.8 * row, 0, 0])
        (tmp_path / f"{name}.pdb").write_text(atoms.pdb())
        lines += [f"{name}.pdb,A,A{row}{letter},{rng.normal():.3f}" for row in (3, 7)
                  for letter in AMINO_ACIDS if letter != "A"]
    for column in ("ddg", "fitness"):
        text = "\n".join([f"pdb_file,chain,mutation,{column}", *lines, ""])
        (tmp_path / f"{column}.csv").write_text(text)
    weights = tmp_path / "vanilla_model_weights"
    weights.mkdir()
    for seed, name in enumerate(("v_48_010", "v_48_020", "v_48_030")):
        torch.save(to_checkpoint(random_proteinmpnn(seed, **SIZES)), weights / f"{name}.pt")
    return tmp_path


def run_script(name, words, folder, **variables):
    """(exit code, stdout, stderr) of bench/NAME with real Python, or the one in `variables`."""
    settings = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", ROOT / "bench" / name, *words], cwd=folder, text=True,
                          env=settings | variables, capture_output=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def stand_in(folder):
    """Path of a program that stands in for Python."""
    path = folder / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name, words, rows", [
    ("stability.sh", ["ddg.csv", "ddg.csv", "fitness.csv", "1aaa_A.pdb"], 5),
    ("esm_msr.sh", ["ddg.csv"], 3),
    ("rounds.sh", ["fitness.csv", "fitness"], 4)])
def test_the_commands_of_a_script_are_understood(name, words, rows, folder, stand_in, monkeypatch):
    code, out, err = run_script(name, words, folder, PYTHON=stand_in, SIZES="12 24")
    assert code == 0, err
    assert len(re.findall(r"^\| .*\| 0\.5", out, re.M)) == rows, out
    monkeypatch.chdir(folder)
    for line in sorted(set((folder / "commands").read_text().splitlines())):
        script, *argv = shlex.split(line)
        module = importlib.import_module(Path(script).stem)
        try:
            module.read_arguments(argv)
        except (ValueError, OSError) as error:      # nothing was trained
            assert re.search("no file", str(error)), error


def test_a_split_by_names_takes_the_domains_that_a_table_has(folder, stand_in):
    """Of the training domains it has 1AOY and a mutant of 2KVV, of the test domains 1GJS."""
    names = ["pdbs/1aoy_A_7-75.pdb.gz", "2KVV_A_8-68_K50S.pdb", "pdbs/1gjs_A_18-62.pdb.gz",
             "1aaa_A.pdb"]
    lines = [f"{name},A,A{row}C,0.5\n" for name in names for row in (3, 7)]
    (folder / "some.csv").write_text("pdb_file,chain,mutation,ddg\n" + "".join(lines))
    code, out, err = run_script("esm_msr.sh", ["some.csv"], folder, PYTHON=stand_in, FOLDER="split")
    assert code == 0, err
    assert "trained on 2 of 97 domains, tested on 1 of 112" in out
    for side, expected in ("train", lines[:4]), ("test", lines[4:6]):
        header, *rows = (folder / "split" / f"{side}.csv").read_text().splitlines()
        assert header == "pdb_file,chain,mutation,ddg"
        assert rows == [f"{folder}/{line.strip()}" for line in expected]


def test_a_part_that_fails_does_not_keep_the_others_from_being_tried(folder, stand_in):
    code, out, _ = run_script("card.sh", [], folder, PYTHON=stand_in)
    rows = dict(re.findall(r"^\| (\w+) \| (PASS|FAIL, exit code \d+) \|", out, re.M))
    assert code == 3
    assert rows == {"machine": "PASS", "dtypes": "FAIL, exit code 1",
                    "resume": "FAIL, exit code 1", "speed": "PASS"}


@pytest.mark.slow
def test_a_card_passes_where_this_cpu_stands_in_for_it(folder):
    code, out, err = run_script(
        "card.sh", [], folder, DEVICE="cpu", STEPS="12", MINUTES="40", SPEED="sedd --config "
        "configs/sedd_demo.yaml --repeats 1 --matmul 64 model.hidden_size=16 model.n_blocks=1")
    assert code == 0 and out.count("| PASS |") == 4, out + err
    alone, continued = re.search(r"^loss (\S+) alone, (\S+) continued", out, re.M).groups()
    assert alone == continued


@pytest.mark.slow
def test_the_table_of_rounds_has_spearman_before_and_after(folder):
    code, out, err = run_script("rounds.sh", ["fitness.csv", "fitness"], folder, SIZES="12",
                                DRAWS="0")
    rows = re.findall(r"^\| (\w+)\.pdb \| 12 \| (-?0\.\d+) \| (-?0\.\d+) \|$", out, re.M)
    assert code == 0 and [name for name, *_ in rows] == ["1aaa_A", "1csp_A"], out + err
    assert all(before != after for _, before, after in rows)


@pytest.mark.slow
def test_the_table_of_stability_has_a_row_for_each_training(folder):
    code, out, err = run_script(
        "stability.sh", ["ddg.csv", "ddg.csv", "fitness.csv", "1aaa_A.pdb"], folder, SEEDS="0")
    cells = r" \| (-?\d\.\d+)" * 3
    rows = re.findall(rf"^\| ([\w ]+){cells};-?\d\.\d+ \|$", out, re.M)
    assert code == 0 and [name for name, *_ in rows] == ["no", "seed 0", "three weights"], out + err
    assert len({tuple(numbers) for _, *numbers in rows}) == 3
    assert out.count("recovery") == 2
