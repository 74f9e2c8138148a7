"""Is the repository laid out as designed? Imports, requirements, style, how the tests run.

Nothing of the project is imported here: files are read and parsed.
"""

import ast
import functools
import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from launchers import FOLDERS, ROOT, code_files

SCRIPTS = {"train_sedd_ddp", "train_dpo_ddp", "train_mpnn_ddp", "test_aurora_ddp", "test_dtype",
           "sample_sedd", "sample_proteinmpnn", "score_mutations", "prepare_uniref50",
           "pairs_from_scores", "plot_run"}
TO_COPY = {"ddp_setup", "ddp_watch", "ddp_guard"}    # with torch, without the rest of the project

# Folder, or "" for the scripts in the root: what of the project its files may import.
MAY_IMPORT = {
    "": {"ddp_setup", "ddp_watch", "ddp_guard", "sedd", "mpnn", "dpo", "proteins", "training"},
    "proteins": {"ddp_setup", "proteins", "training.figures", "training.files",
                 "training.problems"},
    "sedd": {"ddp_setup", "ddp_watch", "sedd", "proteins", "training"},
    "mpnn": {"ddp_setup", "ddp_watch", "mpnn", "proteins", "training"},
    "dpo": {"ddp_setup", "ddp_watch", "dpo", "mpnn", "proteins", "training"},
    "training": {"ddp_setup", "ddp_watch", "training"},
    "jobs": {"ddp_setup", "ddp_watch", "ddp_guard"},
    "examples": {"ddp_setup", "ddp_watch", "ddp_guard"},
    "bench": {"ddp_setup", "ddp_watch", "ddp_guard", "sedd", "mpnn", "dpo", "proteins", "training",
              "bench", *SCRIPTS}}
# What may import less than its folder.
MAY_IMPORT_ALONE = {"ddp_setup": set(), "ddp_guard": set(), "ddp_watch": {"ddp_setup", "ddp_guard"},
                    "test_aurora_ddp": {"ddp_setup"}}
TORCH_ALONE = {"sedd/diffusion", "mpnn/model"}      # `cp` takes them elsewhere
REQUIRED = {"torch", "numpy", "yaml", "tqdm", "gemmi"}
# Imported inside functions only: who does not need them may lack them.
OPTIONAL = {"mpi4py", "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "wandb",
            "tensorboard", "matplotlib", "PIL", "safetensors", "pytest"}


def imported_names(source):
    """Modules that a Python source imports: (at its top, inside functions), with their dots. The
    top is everything that runs at import: class bodies, `if` and `try` included."""
    tree = ast.parse(source)
    top = set()
    inside = set()
    functions = [node for node in ast.walk(tree)
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    in_functions = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        found = inside if node in in_functions else top
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(".")
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:   # from sedd import model
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Call) and re.search("import_module|__import__$",
                                                      ast.unparse(node.func)):
            found.add(ast.unparse(node.args[0]).strip("'"))
    return top, inside


def is_in(module, names):
    """Whether a module, or a package that holds it, is among `names`."""
    parts = module.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


def broken_rules(name, source):
    """Sentences about what file `name` ("sedd/model") imports against the rules; [] if it keeps
    them."""
    folder, _, stem = name.rpartition("/")
    if folder == "" and stem not in SCRIPTS | TO_COPY:
        return [f"{name}.py stands in the root; expected there what one runs or copies, else a "
                f"folder: {', '.join(FOLDERS)}"]
    ours = MAY_IMPORT_ALONE.get(name, MAY_IMPORT[folder])
    others = REQUIRED
    if name in TORCH_ALONE:
        ours = set()
    if name in TORCH_ALONE or name in MAY_IMPORT_ALONE:
        others = {"torch"}
    if stem.startswith("test_"):
        others = others | {"pytest"}
    top, inside = imported_names(source)
    if stem in TO_COPY:
        inside = {module for module in inside if module != "numpy"}
    known = sys.stdlib_module_names | ours | others
    broken = [module for module in top if not is_in(module, known)]
    broken += [module for module in inside if not is_in(module, known | OPTIONAL)]
    if stem == "ddp_guard" and is_in("torch", {module.split(".")[0] for module in top | inside}):
        broken.append("torch")
    return [f"{name}.py imports {module}; allowed: {', '.join(sorted(ours | others))}"
            for module in broken]


def name_of(path):
    """Its path from the root without the suffix, such as "sedd/model"."""
    return str(path.relative_to(ROOT).with_suffix(""))


def test_every_file_imports_only_what_its_folder_may():
    broken = [sentence for path in code_files()
              for sentence in broken_rules(name_of(path), path.read_text())]
    assert broken == []


@pytest.mark.parametrize("name, source", [
    ("stray_file", ""),
    ("ddp_setup", "def f():\n    import ddp_guard"),
    ("ddp_guard", "import torch"),
    ("ddp_setup", "import ddp_watch"),
    ("ddp_watch", "import training.log"),
    ("test_aurora_ddp", "import ddp_guard"),
    ("jobs/preflight", "from training import launch"),
    ("sedd/diffusion", "import numpy"),
    ("mpnn/weights", "import dpo.pairs"),
    ("mpnn/variants", "import importlib\nimportlib.import_module('sedd.model')"),
    ("train_sedd_ddp", "from . import sedd")])
def test_the_import_check_notices(name, source):
    assert len(broken_rules(name, source)) == 1


def test_the_root_holds_what_one_runs_or_copies():
    assert {path.stem for path in ROOT.glob("*.py")} == SCRIPTS | TO_COPY


def test_a_folder_of_modules_says_in_one_docstring_what_it_is():
    for folder in FOLDERS:
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        assert ast.get_docstring(tree) and len(tree.body) == 1


def rows_of_the_table():
    """[cells] of the table of docs/changing.md: what to change, files to edit, tests."""
    text = (ROOT / "docs" / "changing.md").read_text().partition("## The table")[2]
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]


def files_in(cell):
    return set(re.findall(r"`([\w/]+\.py)`", cell))


def test_the_table_of_what_to_edit_has_every_module_of_the_folders():
    edited = set().union(*(files_in(cells[1]) for cells in rows_of_the_table()))
    modules = {f"{path.parent.name}/{path.name}" for path in code_files()
               if path.parent.name in set(FOLDERS) - {"bench"} and path.stem != "__init__"}
    assert modules - edited == set()


def test_the_table_of_what_to_edit_names_files_that_exist():
    for _, edited, checks in rows_of_the_table():
        assert [name for name in files_in(edited) if not (ROOT / name).exists()] == []
        assert [name for name in files_in(checks) if not (ROOT / "tests" / name).exists()
                and not (ROOT / name).exists()] == []


@functools.cache
def defined_names(path):
    """What a Python file defines at its top, and Class.name of what its classes define."""
    found = set()
    tree = ast.parse(path.read_text())
    bodies = [("", tree.body)]
    bodies += [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in bodies:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            elif isinstance(node, ast.Assign):
                found.update(prefix + ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.AnnAssign):
                found.add(prefix + ast.unparse(node.target))
    return found


def test_pages_name_symbols_where_they_are_defined():
    """`file.py: name`, or several names with commas between them."""
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = re.findall(r"([\w/]+\.py):\s+([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*)",
                           page.read_text())
        wrong += [f"{page.name}: {file}: {name}" for file, names in named
                  for name in names.split(", ")
                  if not (ROOT / file).exists() or name not in defined_names(ROOT / file)]
        assert len(named) > 50 or page.name != "changing.md"
    assert wrong == []


def test_no_import_comes_back_to_the_file_it_started_from():
    """Of those at the top of files."""
    imports = {}
    for path in code_files():
        imports[name_of(path).replace("/", ".")] = imported_names(path.read_text())[0]
    left = dict(imports)
    while True:
        free = [name for name, found in left.items() if not any(module in left for module in found)]
        if not free:
            break
        for name in free:
            del left[name]
    assert left == {}


def requirements(name):
    """{package: version condition} of a requirements file and of those that it includes."""
    required = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            required |= requirements(line.removeprefix("-r "))
        elif line:
            package, condition = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups()
            required[package] = condition
    return required


def test_what_files_import_at_their_top_is_required():
    base = requirements("requirements-base.txt").keys()
    assert base == REQUIRED - {"torch", "yaml"} | {"pyyaml", "safetensors"}
    assert requirements("requirements.txt").keys() == base | {"torch", "mpi4py"}


def test_ipex_stands_apart_with_the_torch_it_was_made_for():
    required = requirements("requirements-ipex.txt")
    assert required["torch"] == required["intel-extension-for-pytorch"] == "==2.8.*"
    others = required.keys() - {"intel-extension-for-pytorch"}
    assert others == requirements("requirements.txt").keys()


def test_files_to_copy_and_the_citation_have_the_version_of_the_change_log():
    version, date = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(),
                              re.MULTILINE).groups()
    for name in TO_COPY:
        assert f'__version__ = "{version}"' in (ROOT / f"{name}.py").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (version, date)


def test_a_commit_is_checked_by_the_ruff_of_the_tests():
    text = (ROOT / ".pre-commit-config.yaml").read_text() + (ROOT / "jobs" / "test.sh").read_text()
    assert len(re.findall(r"ruff==[\d.]+", text)) == 2
    assert len(set(re.findall(r"ruff==[\d.]+", text))) == 1


def test_no_file_names_a_folder_of_somebodys_machine():
    folders = ["jobs", "configs", "docs", "examples", "tests", ".ci", ".github", *FOLDERS]
    files = [*ROOT.glob("*"), *(path for name in folders for path in ROOT.glob(f"{name}/**/*"))]
    texts = [path for path in files
             if path.is_file() and path.suffix not in (".pt", ".gz", ".png", ".pyc")
             and path.name != ".git"]        # a file in a worktree
    found = [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in texts
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"(?<![\w.])/(home|Users|root|work|tmp/dev)/\w", line)]
    assert found == []


def test_no_function_exceeds_a_screen_and_no_six_lines_stand_in_two_files():
    """Of 80 lines; imports and blank lines are not counted among the six. Training scripts have the
    same step, so that `diff` teaches."""
    first_file = {}
    for path in code_files():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, (path.name, node.name)
        lines = [line for line in text.splitlines()
                 if line.strip() and not line.startswith(("import ", "from "))]
        name = re.sub("^train_.*_ddp.py$", "a training script", path.name)
        for six in zip(*(lines[k:] for k in range(6))):
            assert first_file.setdefault(six, name) == name, "\n".join(six)


def test_every_file_keeps_to_the_rules_of_style():
    if not importlib.util.find_spec("ruff"):
        pytest.skip("ruff is not installed; jobs/test.sh brings it")
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache",
                              "--output-format=concise", ROOT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_line_of_text_is_longer_than_100_columns():
    """Of Python files ruff holds it. A row of a table, or an address, cannot be broken."""
    patterns = ("*.md", "*.txt", "docs/*.md", "configs/*.yaml", ".github/**/*.*", "jobs/**/*.*sh",
                "jobs/*.pbs", "bench/*.sh")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    long = [f"{path.relative_to(ROOT)}:{number}" for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > 100 and not line.startswith("|") and "://" not in line]
    assert len(files) > 10 and long == []
