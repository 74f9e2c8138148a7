"""Is the repository laid out as designed? Imports, requirements, style, how the tests run.

Nothing of the project is imported here: files are read and parsed.
"""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

from launchers import ROOT

GROUPS = {
    "MODELS": "sedd_model sedd_diffusion proteinmpnn_model",
    "DATA": "sequence_data sequence_batches structure_data",
    "SHARED": "ddp_setup ddp_guard optimizer train_loop run_config run_dir run_log run_script"}

# files: what they may import; in brackets: inside functions alone, as who does not need it lacks
# it. A file that is not here has no place in the design yet.
TABLE = """
ddp_setup: torch (mpi4py numpy intel_extension_for_pytorch oneccl_bindings_for_pytorch)
run_config: yaml
ddp_guard:
run_dir: ddp_setup run_config run_log plot_run torch
run_log: (tqdm torch tensorboard wandb matplotlib)
run_script: ddp_setup run_config run_dir train_loop torch
train_loop: ddp_setup optimizer run_dir step_meter torch
optimizer: cpu_linear ddp_setup torch
step_meter: ddp_setup torch
sedd_eval: ddp_setup run_dir run_log train_loop sequence_batches sequence_data sedd_diffusion torch
    numpy
dpo_reference: ddp_setup structure_data proteinmpnn_model torch
dpo_designs: ddp_setup dpo_reference run_log sequence_data structure_data proteinmpnn_model torch
    numpy
dpo_eval: ddp_setup dpo_designs dpo_reference run_dir train_loop structure_data proteinmpnn_model
    torch
cpu_linear sedd_diffusion: torch
sedd_model proteinmpnn_model: cpu_linear torch
sequence_data: torch numpy
sequence_batches: ddp_setup run_dir sequence_data numpy
structure_data: sequence_data torch numpy gemmi
train_sedd_ddp: SHARED sequence_data sequence_batches sedd_model sedd_diffusion sedd_eval sedd_files
    torch
train_dpo_ddp: SHARED structure_data proteinmpnn_model dpo_reference dpo_eval torch numpy
sedd_files: MODELS DATA ddp_setup run_config run_dir run_log torch numpy (safetensors)
sample_sedd: MODELS DATA ddp_setup ddp_guard run_config run_log run_script sedd_eval sedd_files
    report_sequences torch numpy (tqdm)
report_sequences: sequence_data run_log numpy (gemmi matplotlib)
pairs_from_scores: run_log sequence_data structure_data
design_settings: MODELS DATA torch numpy
sample_proteinmpnn: MODELS DATA design_settings run_log torch numpy
prepare_uniref50: sequence_data torch numpy tqdm
bench_scale: SHARED train_sedd_ddp train_dpo_ddp step_meter dpo_reference scale_report torch numpy
bench_card: SHARED bench_scale bench_sedd step_meter torch numpy
bench_ddp: SHARED MODELS DATA bench_card bench_scale bench_sedd train_sedd_ddp train_dpo_ddp
    step_meter torch numpy (matplotlib)
bench_sedd: ddp_setup run_dir sequence_data sedd_eval sedd_files train_loop train_sedd_ddp torch
    numpy
bench_learn: ddp_setup run_config run_log run_script train_sedd_ddp numpy
plot_run scale_report: run_log numpy (matplotlib)
test_aurora_ddp: ddp_setup ddp_guard run_config run_script run_dir torch numpy pytest (mpi4py)
test_dtype: ddp_setup run_config run_script MODELS torch numpy pytest (intel_extension_for_pytorch)
"""
ALLOWED = {}   # {file: (names at its top, names inside functions)}
for row in TABLE.strip().replace("\n    ", " ").splitlines():
    for group, names in GROUPS.items():
        row = row.replace(group, names)
    files, *found = re.fullmatch(r"([^:]*):([^(]*)(?:\((.*)\))?", row).groups("")
    at_top, inside = map(str.split, found)
    ALLOWED |= dict.fromkeys(files.split(), ({*at_top}, {*at_top, *inside}))


def imported_names(source):
    """Packages that a Python source imports, by first name part: (at its top, inside functions).
    The top is everything that runs at import: class bodies, `if` and `try` included."""
    tree, top, inside = ast.parse(source), set(), set()
    functions = [node for node in ast.walk(tree)
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    in_functions = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        found = inside if node in in_functions else top
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module if node.level == 0 else ".")
        elif isinstance(node, ast.Call) and re.search("import_module|__import__$",
                                                      ast.unparse(node.func)):
            found.add(ast.unparse(node.args[0]).strip("'"))
    return ({name.partition(".")[0] or "." for name in names} for names in (top, inside))


def broken_rules(name, source):
    """Sentences about what in file `name` imports against the table; empty if it keeps to it."""
    if name not in ALLOWED:
        return [f"{name}.py is not in the table of files; expected a row there, or no such file"]
    places = zip(("at its top", "inside a function"), imported_names(source), ALLOWED[name])
    return [f"{name}.py imports {other} {place}; the table allows {', '.join(sorted(allowed))}"
            for place, found, allowed in places
            for other in sorted(found - sys.stdlib_module_names - allowed)]


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_every_file_imports_only_what_the_design_allows(path):
    assert broken_rules(path.stem, path.read_text()) == []


@pytest.mark.parametrize("name, source", [
    ("stray_file", ""),
    ("sedd_model", "import ddp_setup"),
    ("sedd_model", "def f():\n    from ddp_setup import barrier"),
    ("structure_data", "import importlib\nimportlib.import_module('proteinmpnn_model')"),
    ("run_log", "class Log:\n    import wandb"),
    ("train_sedd_ddp", "from . import sedd_model")])
def test_the_import_check_notices(name, source):
    assert len(broken_rules(name, source)) == 1


def requirements(name):
    """{package: version condition} of a requirements file, comments left out."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups() for line in lines if line)


def test_torch_is_pinned_and_what_the_design_imports_at_a_top_is_required_and_nothing_optional():
    required = requirements("requirements.txt")
    tops = set().union(*(at_top for at_top, _ in ALLOWED.values())) - ALLOWED.keys()
    assert required["torch"] == "==2.13.0"
    assert tops == {"torch", "numpy", "yaml", "tqdm", "gemmi", "pytest"}
    assert required.keys() == tops - {"pytest", "yaml"} | {"pyyaml", "mpi4py"}
    for optional in ("wandb", "tensorboard", "matplotlib"):
        assert re.search(rf"^#\s+{optional}\s+\w", (ROOT / "requirements.txt").read_text(), re.M)


def test_ipex_stands_apart_with_the_torch_it_was_made_for():
    required = requirements("requirements-ipex.txt")
    assert required["torch"] == required["intel-extension-for-pytorch"] == "==2.8.*"
    others = required.keys() - {"intel-extension-for-pytorch"}
    assert others == requirements("requirements.txt").keys()


def test_ci_runs_the_quick_set_and_the_slow_set():
    text = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^bash jobs/test\.sh( --slow|)", text, re.MULTILINE) == ["", " --slow"]


def test_no_file_names_a_folder_of_somebodys_machine():
    folders = [ROOT, *(ROOT / name for name in ("jobs", "configs", "tests", ".ci"))]
    texts = [path for folder in folders for path in folder.glob("*")
             if path.is_file() and path.suffix not in (".pt", ".gz", ".png")
             and path.name != ".git"]        # a file in a worktree
    found = [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in texts
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"(?<![\w.])/(home|Users|root|work|tmp/dev)/\w", line)]
    assert found == []


def test_no_function_exceeds_a_screen_and_no_six_lines_stand_in_two_files():
    """Of 80 lines; imports and blank lines are not counted among the six."""
    first_file = {}
    for path in sorted(ROOT.glob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, (path.name, node.name)
        lines = [line for line in text.splitlines()
                 if line.strip() and not line.startswith(("import ", "from "))]
        for six in zip(*(lines[k:] for k in range(6))):
            assert first_file.setdefault(six, path.name) == path.name, "\n".join(six)


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
