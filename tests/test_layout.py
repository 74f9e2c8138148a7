"""Is the repository laid out as designed? Imports, requirements, style, how the tests run.

Nothing of the project is imported here: files are read and parsed.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Networks, mathematics and formats of data: they know of no ranks and no runs.
PURE = {"cpu_linear", "optimizer", "sedd_model", "sedd_diffusion", "proteinmpnn_model",
        "sequence_data", "structure_data", "design_settings"}
# Every rank's guard, and what tells of a run where there is no torch: packages at their top.
LIGHT = {"ddp_guard": set(), "run_log": set(), "run_config": {"yaml"}}
# What is started. Only they import one another; all others may be imported by each.
SCRIPT = re.compile("train_.*_ddp|(bench|test|sample|prepare)_.*")
# Not needed to train; whoever lacks them must be able to import every file.
OPTIONAL = {"wandb", "tensorboard", "matplotlib", "safetensors", "mpi4py",
            "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"}
REQUIRED = {"torch", "numpy", "yaml", "tqdm", "gemmi"}

SOURCES = sorted(ROOT.glob("*.py"))


def imported_names(source):
    """Packages that a Python source imports, by first name part: (at its top, inside functions).

    The top is everything that runs at import: class bodies, `if` and `try` included.
    importlib.import_module and __import__ with a literal name count as imports.
    """
    top, inside = set(), set()

    def visit(node, found):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module if node.level == 0 else "." * node.level)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside if in_function else found)

    visit(ast.parse(source), top)
    return ({name.partition(".")[0] or "." for name in names} for names in (top, inside))


def broken_rules(name, source):
    """Sentences about what in file `name` imports against the design; empty if it keeps to it."""
    top, inside = imported_names(source)
    ours = (top | inside) & {path.stem for path in SOURCES}
    foreign = top - ours - sys.stdlib_module_names
    allowed = LIGHT.get(name, REQUIRED | ({"pytest"} if name.startswith("test_") else set()))
    unknown = inside - ours - sys.stdlib_module_names - REQUIRED - OPTIONAL
    return [*(f"{name}.py imports {other}.py, though it shall know of no ranks and runs"
              for other in sorted(ours - PURE) if name in PURE),
            *(f"{name}.py imports {other}.py, which is a script"
              for other in sorted(filter(SCRIPT.fullmatch, ours)) if not SCRIPT.fullmatch(name)),
            *(f"{name}.py imports {package} at its top, allowed there: {sorted(allowed)}; what "
              "few need is imported in the function that uses it"
              for package in sorted(foreign - allowed)),
            *(f"{name}.py imports {package}, which is neither required nor optional"
              for package in sorted(unknown))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_imports_only_what_the_design_allows(path):
    assert broken_rules(path.stem, path.read_text()) == []


def requirements(name):
    """{package: version condition} of a requirements file, comments left out."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups() for line in lines if line)


def test_torch_is_pinned_and_nothing_optional_is_required():
    required = requirements("requirements.txt")
    assert required["torch"] == "==2.13.0"
    assert required.keys() == REQUIRED - {"yaml"} | {"pyyaml", "mpi4py"}
    ipex = requirements("requirements-ipex.txt")     # with the torch it was made for
    assert ipex["torch"] == ipex.pop("intel-extension-for-pytorch") == "==2.8.*"
    assert ipex.keys() == required.keys()


def test_ci_runs_the_quick_set_and_the_slow_set():
    text = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^bash jobs/test\.sh( <|$)", text, re.MULTILINE)
    assert re.search(r"^bash jobs/test\.sh --slow", text, re.MULTILINE)


def test_no_file_names_a_folder_of_somebodys_machine():
    folders = [ROOT, *(ROOT / name for name in ("jobs", "configs", "tests", ".ci"))]
    texts = [path for folder in folders for path in folder.glob("*")
             if path.is_file() and path.suffix not in (".pt", ".gz", ".png")
             and path.name != ".git"]        # a file in a worktree
    found = [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in texts
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"(?<![\w.])/(home|Users|root|work|tmp/dev)/\w", line)]
    assert found == []


def test_every_file_keeps_to_the_rules_of_style():
    if not importlib.util.find_spec("ruff"):
        pytest.skip("ruff is not installed; jobs/test.sh brings it")
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache",
                              "--output-format=concise", ROOT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
