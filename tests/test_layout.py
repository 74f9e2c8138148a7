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

MODELS = {"sedd_model", "sedd_diffusion", "proteinmpnn_model"}
DATA = {"sequence_data", "sequence_batches", "structure_data"}
SHARED = {"ddp_setup", "ddp_guard", "optimizer", "train_loop", "run_config", "run_dir", "run_log",
          "run_script"}

# file: (imports of ours, packages imported at its top, packages imported only inside functions).
# A file that is not here has no place in the design yet. What may use torch at its top may use
# numpy inside a function.
TABLE = {
    "ddp_setup": (set(), {"torch"}, {"mpi4py", "numpy", "intel_extension_for_pytorch",
                                     "oneccl_bindings_for_pytorch"}),
    "run_config": (set(), {"yaml"}, set()),
    "ddp_guard": (set(), set(), set()),
    "run_dir": ({"ddp_setup", "run_config", "run_log", "plot_run"}, {"torch"}, set()),
    "run_log": (set(), set(), {"tqdm", "torch", "tensorboard", "wandb", "matplotlib"}),
    "run_script": ({"ddp_setup", "run_config", "run_dir", "train_loop"}, {"torch"}, set()),
    "train_loop": ({"ddp_setup", "optimizer", "run_dir", "step_meter"}, {"torch"}, set()),
    "optimizer": ({"ddp_setup"}, {"torch"}, set()),
    "step_meter": ({"ddp_setup"}, {"torch"}, set()),
    "sedd_eval": ({"ddp_setup", "run_dir", "run_log", "train_loop", "sequence_batches",
                   "sequence_data", "sedd_diffusion"}, {"torch", "numpy"}, set()),
    "dpo_reference": ({"ddp_setup", "structure_data", "proteinmpnn_model"}, {"torch"}, set()),
    "dpo_designs": ({"ddp_setup", "dpo_reference", "run_log", "sequence_data", "structure_data",
                     "proteinmpnn_model"}, {"torch", "numpy"}, set()),
    "dpo_eval": ({"ddp_setup", "dpo_designs", "dpo_reference", "run_dir", "train_loop",
                  "structure_data", "proteinmpnn_model"}, {"torch"}, set()),
    "cpu_linear": (set(), {"torch"}, set()),
    "sedd_model": ({"cpu_linear"}, {"torch"}, set()),
    "sedd_diffusion": (set(), {"torch"}, set()),
    "proteinmpnn_model": ({"cpu_linear"}, {"torch"}, set()),
    "sequence_data": (set(), {"torch", "numpy"}, set()),
    "sequence_batches": ({"ddp_setup", "run_dir", "sequence_data"}, {"numpy"}, set()),
    "structure_data": ({"sequence_data"}, {"torch", "numpy", "gemmi"}, set()),
    "train_sedd_ddp": (SHARED | {"sequence_data", "sequence_batches", "sedd_model",
                                 "sedd_diffusion", "sedd_eval", "sedd_files"},
                       {"torch", "numpy"}, set()),
    "train_dpo_ddp": (SHARED | {"structure_data", "proteinmpnn_model", "dpo_reference", "dpo_eval"},
                      {"torch", "numpy"}, set()),
    "sedd_files": (MODELS | DATA | {"ddp_setup", "run_config", "run_dir", "run_log"},
                   {"torch", "numpy"}, {"safetensors"}),
    "sample_sedd": (MODELS | DATA | {"ddp_setup", "ddp_guard", "run_config", "run_log",
                                     "run_script", "sedd_eval", "sedd_files", "report_sequences"},
                    {"torch", "numpy"}, {"tqdm"}),
    "report_sequences": ({"sequence_data", "run_log"}, {"numpy"}, {"gemmi", "matplotlib"}),
    "pairs_from_scores": ({"run_log", "sequence_data", "structure_data"}, set(), set()),
    "design_settings": (MODELS | DATA, {"torch", "numpy"}, set()),
    "sample_proteinmpnn": (MODELS | DATA | {"design_settings", "run_log"}, {"torch", "numpy"},
                           set()),
    "prepare_uniref50": ({"sequence_data"}, {"torch", "numpy", "tqdm"}, set()),
    "bench_scale": (SHARED | {"train_sedd_ddp", "train_dpo_ddp", "step_meter", "dpo_reference",
                              "scale_report"}, {"torch", "numpy"}, set()),
    "bench_card": (SHARED | {"bench_scale", "bench_sedd", "prepare_uniref50", "step_meter"},
                   {"torch", "numpy"}, set()),
    "scale_report": ({"run_log"}, {"numpy"}, {"matplotlib"}),
    "bench_ddp": (SHARED | MODELS | DATA | {"bench_card", "bench_scale", "bench_sedd",
                                            "train_sedd_ddp", "train_dpo_ddp", "step_meter"},
                  {"torch", "numpy"}, {"matplotlib"}),
    "bench_sedd": ({"ddp_setup", "run_dir", "sequence_data", "sedd_eval", "sedd_files",
                    "train_loop", "train_sedd_ddp"}, {"torch", "numpy"}, set()),
    "bench_learn": ({"ddp_setup", "run_config", "run_log", "run_script", "train_sedd_ddp"},
                    {"numpy"}, set()),
    "plot_run": ({"run_log"}, {"numpy"}, {"matplotlib"}),
    "test_aurora_ddp": ({"ddp_setup", "ddp_guard", "run_config", "run_script", "run_dir"},
                        {"torch", "numpy", "pytest"}, {"mpi4py"}),
    "test_dtype": ({"ddp_setup", "run_config", "run_script"} | MODELS,
                   {"torch", "numpy", "pytest"}, {"intel_extension_for_pytorch"}),
}

# Not needed to train; whoever lacks them must be able to import every file.
OPTIONAL = {"wandb", "tensorboard", "matplotlib", "safetensors", "mpi4py",
            "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"}

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
    """Sentences about what in file `name` imports against the table; empty if it keeps to it."""
    if name not in TABLE:
        return [f"{name}.py is not in the table of files. Put it there with what it may import, or "
                "move it."]
    ours, at_top, in_functions = TABLE[name]
    top, inside = imported_names(source)
    third_party = (top | inside) - sys.stdlib_module_names - TABLE.keys()
    lazily = at_top | in_functions | ({"numpy"} if "torch" in at_top else set())
    return [*(f"{name}.py imports {other}.py, which the table does not allow"
              for other in sorted((top | inside) & TABLE.keys() - ours)),
            *(f"{name}.py needs {package} to be imported; import it in the function that uses it"
              for package in sorted(top & OPTIONAL)),
            *(f"{name}.py imports {package} at its top, allowed there: {sorted(at_top)}"
              for package in sorted(top & third_party - at_top - OPTIONAL)),
            *(f"{name}.py imports {package}, allowed inside functions: {sorted(lazily)}"
              for package in sorted(inside & third_party - lazily))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_imports_only_what_the_design_allows(path):
    assert broken_rules(path.stem, path.read_text()) == []


@pytest.mark.parametrize("name, source", [
    ("stray_file", ""),
    ("sedd_model", "import ddp_setup"),
    ("sedd_model", "def f():\n    from ddp_setup import barrier"),
    ("structure_data", "import importlib\nimportlib.import_module('proteinmpnn_model')"),
    ("ddp_setup", "import numpy"),
    ("ddp_setup", "try:\n    from mpi4py import MPI\nexcept ImportError:\n    MPI = None"),
    ("ddp_setup", "def f():\n    import yaml"),
    ("run_log", "class Log:\n    import wandb"),
    ("train_sedd_ddp", "from . import sedd_model"),
])
def test_the_import_check_notices(name, source):
    assert len(broken_rules(name, source)) == 1


def requirements(name):
    """{package: version condition} of a requirements file, comments left out."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups() for line in lines if line)


def test_torch_is_pinned_and_what_the_design_imports_at_a_top_is_required_and_nothing_optional():
    required, tops = requirements("requirements.txt"), [at_top for _, at_top, _ in TABLE.values()]
    assert required["torch"] == "==2.13.0"
    needed = set().union(*tops) - {"pytest", "yaml"} | {"pyyaml", "mpi4py"}
    assert required.keys() == needed == {"torch", "numpy", "pyyaml", "tqdm", "gemmi", "mpi4py"}
    for optional in ("wandb", "tensorboard", "matplotlib"):
        assert re.search(rf"^#\s+{optional}\s+\w", (ROOT / "requirements.txt").read_text(), re.M)


def test_ipex_stands_apart_with_the_torch_it_was_made_for():
    required = requirements("requirements-ipex.txt")
    assert required["torch"] == required["intel-extension-for-pytorch"] == "==2.8.*"
    others = required.keys() - {"intel-extension-for-pytorch"}
    assert others == requirements("requirements.txt").keys()


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


def test_the_tests_run_without_the_plugin_for_time_limits(tmp_path):
    (tmp_path / "test_marked.py").write_text(
        "import pytest\n@pytest.mark.timeout(5)\ndef test_marked_with_a_time_limit(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:timeout", "-p", "no:cacheprovider", "-q",
         "-W", "error", "-c", ROOT / "pytest.ini", "-k", "marked_with_a_time", tmp_path,
         ROOT / "tests" / "test_layout.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_tests_of_a_file_run_in_one_process(request):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not started with --dist loadgroup")
    assert request.node.nodeid.endswith("@test_layout.py")   # the group that conftest.py gives
