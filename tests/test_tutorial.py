"""tutorial.ipynb: is it committed clean, and does it show what its text says?"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, clean_environment, copy_code


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs():
    assert [cell["id"] for cell in code_cells(ROOT / "tutorial.ipynb")
            if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.slow
def test_the_notebook_runs_and_its_loop_and_script_have_the_same_losses_on_one_and_two_ranks(
        tmp_path):
    execute = ROOT / ".venv" / "extras" / "bin" / "jupyter-execute"
    if not execute.exists():
        pytest.skip("no .venv/extras with nbclient, ipykernel and matplotlib: see jobs/test.sh")
    copy_code(tmp_path)
    shutil.copy(ROOT / "tutorial.ipynb", tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    env = {name: tmp_path / name
           for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"   # has torchrun
    done = subprocess.run([execute, "--timeout=600", "--output=executed", "tutorial.ipynb"],
                          cwd=tmp_path, env=clean_environment(env=env), text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr      # a cell that fails ends it
    printed = {cell["id"]: "".join("".join(output["text"]) for output in cell["outputs"]
                                   if output.get("name") == "stdout")
               for cell in code_cells(tmp_path / "executed.ipynb")}
    assert "Initialized DDP: 2 rank(s)" in printed["two"]
    rows = [[float(number) for number in re.findall(r"\d+\.\d+", line)]
            for line in printed["equal"].splitlines()]
    assert len(rows) == 5 and rows[-1][0] < rows[0][0] / 2
    for loop, one, two in rows:
        assert [one, two] == pytest.approx([loop, loop], rel=1e-5)
    bound, unigram, exact = (float(re.search(rf"{name}\D* (\d\.\d+) ", printed["train"])[1])
                             for name in ("learned bound", "unigram  ", "exact, of"))
    assert exact < bound < unigram - 0.3
    assert "4 proteins" in printed["own-train"] and "step 20/20" in printed["own-train"]
