"""tutorial.ipynb: is it committed clean, and does it show what its text says?

Its commands are also checked, without being run, by tests/test_jobs.py.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT, clean_environment


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads((ROOT / "tutorial.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"]] == []


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """{id of a code cell: (text printed to standard output, [pictures])} of the executed tutorial,
    in a copy of what it needs. A cell that fails raises."""
    execute = ROOT / ".venv" / "extras" / "bin" / "jupyter-execute"
    if not execute.exists():
        pytest.skip("no .venv/extras with nbclient, ipykernel and matplotlib: see jobs/test.sh")
    folder = tmp_path_factory.mktemp("tutorial")
    for path in [*ROOT.glob("*.py"), ROOT / "tutorial.ipynb"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    private = {name: str(folder / name)
               for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    private["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"   # has torchrun
    done = subprocess.run([execute, "--timeout=600", "--output=executed", "tutorial.ipynb"],
                          cwd=folder, env=clean_environment(env=private), text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    notebook = json.loads((folder / "executed.ipynb").read_text())
    return {cell["id"]: ("".join("".join(output["text"]) for output in cell["outputs"]
                                 if output.get("name") == "stdout"),
                         [base64.b64decode(output["data"]["image/png"])
                          for output in cell["outputs"] if "image/png" in output.get("data", ())])
            for cell in notebook["cells"] if cell["cell_type"] == "code"}


@pytest.mark.slow
def test_the_loop_and_its_script_on_one_and_two_ranks_have_the_same_losses(outputs):
    assert "Initialized DDP: 1 rank(s)" in outputs["one"][0]
    assert "Initialized DDP: 2 rank(s)" in outputs["two"][0]
    rows = [[float(number) for number in re.findall(r"\d+\.\d+", line)]
            for line in outputs["equal"][0].splitlines()]
    assert len(rows) == 5 and rows[-1][0] < rows[0][0] / 2
    for loop, one, two in rows:
        assert [one, two] == pytest.approx([loop, loop], rel=1e-5)


@pytest.mark.slow
def test_the_model_learns_more_than_letter_frequencies_and_a_picture_shows_it(outputs):
    bound, unigram, exact = (float(re.search(rf"{name}\D* (\d\.\d+) ", outputs["train"][0])[1])
                             for name in ("learned bound", "unigram  ", "exact, of"))
    assert exact < bound < unigram - 0.3
    (picture,) = outputs["picture"][1]
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.slow
def test_drawn_proteins_keep_their_templates_and_score_better_than_shuffled_ones(outputs):
    letters = "[ACDEFGHIKLMNPQRSTVWY]"
    for cell, shape, number in (("sample", letters + "{60}", 4),
                                ("infill", f"MKT{letters}{{40}}GSHHW", 4),
                                ("scaffold", f"MKT{letters}{{40}}GSHHW{letters}{{12,20}}", 4)):
        assert len(re.findall(f"^{shape}$", outputs[cell][0], re.MULTILINE)) == number, cell
    drawn, shuffled = re.findall(r"bound (\S+)", outputs["score"][0])
    assert float(drawn) < float(shuffled) - 0.2
