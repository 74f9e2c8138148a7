"""Recipes x seeds of any training script, each evaluated by commands: a table of mean and spread.

    python -m bench learn configs/learn/stability.yaml table=s2648.csv
    python -m bench learn my.yaml --recipes shipped,no_kl --seeds 0,1,2 --folder runs/mine
    python -m bench learn my.yaml more="training.n_iters=100"        # a value of the file

The file (YAML) has commands with placeholders such as {run}:

    given:      {table: s2648.csv, keys: ""}          # values; NAME=VALUE on the command line
    recipes:    {shipped: {}, no_kl: {keys: loss.native_kl=0}}        # what a recipe gives instead
    seeds:      [0, 1]
    prepare:    [COMMAND, ...]      # once for each recipe, before its first run
    train:      python {repo}/train_dpo_ddp.py --train_data {table} --output_dir {run}
                training.seed={seed} {keys}
    weights:    "{run}/latest_model.pt"
    before:     v_48_020            # optional: weights of a first row, which are not trained
    evaluate:   [python {repo}/score_mutations.py {weights} ..., ...]
    numbers:    {all: 'Spearman (\\S+) over', perplexity: "val/perplexity"}       # columns

{repo} is this repository, {folder} that of --folder, {run} a folder in it for each recipe and seed,
{recipe} and {seed} name them. Without `train`, the evaluation does all. A command is split into
words as by a shell, and no shell runs it; an empty value leaves no word. A column is a key of
{run}/metrics.jsonl, whose last value counts, or a regular expression whose first group is the
number in what the evaluation has printed (its last match). "-": not found.

Each cell has the mean over seeds and, of several, the least and the largest value. Numbers are kept
in {run}/learn.json: the same command does not repeat what was done. A training that was asked to
stop (exit code 75) ends it with 75: the same command goes on. Another code other than 0 is an
error. What commands print goes to {run}/learn.log.
"""
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ddp_setup import BAD_INPUT, STOPPED
from training.files import write_text_atomic
from training.log import read_rows
from training.parser import Parser

ROOT = Path(__file__).resolve().parents[1]
KEPT = "learn.json"         # in the folder of a run
LOG = "learn.log"


@dataclass
class Plan:
    """The file, see above."""
    evaluate: list
    numbers: dict
    train: str | None = None
    weights: str = ""
    given: dict = field(default_factory=dict)
    recipes: dict = field(default_factory=lambda: {"run": {}})
    seeds: list = field(default_factory=lambda: [0])
    prepare: list = field(default_factory=list)
    before: str | None = None


class Stopped(Exception):
    """A training was asked to stop, and has saved."""


def learn(plan, folder):
    """Run all, and print each row of the table when it is known."""
    names = list(plan.numbers)
    print(f"| recipe | {' | '.join(names)} |\n|---|{'---|' * len(names)}", flush=True)
    for number, (recipe, values) in enumerate(plan.recipes.items()):
        place = {"repo": ROOT, "folder": folder, "recipe": recipe, **plan.given, **values}
        folder.mkdir(parents=True, exist_ok=True)
        for command in plan.prepare:
            run_command(command, place, folder / f"{recipe}.log")
        if plan.before is not None and number == 0:
            run = folder / "before"
            before = plan.before.format(**place)
            print_row("before", names, [evaluate(plan, run, {**place, "seed": 0}, before)])
        found = []
        for seed in plan.seeds:
            run = folder / f"{recipe}_{seed}"
            print(f"{recipe}, seed {seed}", file=sys.stderr, flush=True)
            found.append(evaluate(plan, run, {**place, "seed": seed}))
        print_row(recipe, names, found)


def evaluate(plan, run, place, weights=None):
    """{column: number} of one run, which is trained first unless `weights` are given.

    place: {placeholder: value}."""
    place = {**place, "run": run}
    commands = []
    if weights is None:
        weights = plan.weights.format(**place)
        if plan.train is not None:
            commands.append(plan.train)
    place["weights"] = weights
    commands += plan.evaluate
    words = [words_of(command, place) for command in commands]
    kept = run / KEPT
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["commands"] == words and found["numbers"].keys() == plan.numbers.keys():
            return found["numbers"]
    run.mkdir(parents=True, exist_ok=True)
    printed = ""
    for command in commands:
        text = run_command(command, place, run / LOG)
        if command is not plan.train:
            printed += text
    numbers = {name: find_number(where, printed, run) for name, where in plan.numbers.items()}
    write_text_atomic(kept, json.dumps({"commands": words, "numbers": numbers}, indent=1) + "\n")
    return numbers


def run_command(command, place, log):
    """What a command has printed, which is also added to the file `log`. Raises: Stopped;
    ValueError if it failed."""
    words = words_of(command, place)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL)
    with open(log, "a") as file:
        file.write(f"{shlex.join(words)}\n{done.stdout}")
    if done.returncode == STOPPED:
        raise Stopped
    if done.returncode:
        last = done.stdout.strip().splitlines()[-5:]
        raise ValueError("\n".join([f"exit code {done.returncode} of {shlex.join(words)}", *last]))
    return done.stdout


def words_of(command, place):
    """The words of a command, with values for its placeholders. Raises: ValueError."""
    try:
        words = shlex.split(command.format(**place))
    except (KeyError, IndexError) as name:
        raise ValueError(f"found the placeholder {name} in {command!r}; expected one of "
                         f"{', '.join(sorted(place))}") from None
    if words and words[0] == "python":
        words[0] = sys.executable
    return words


def find_number(where, printed, run):
    """A number by a column's description, or None."""
    values = []
    if "(" in where:
        values = re.findall(where, printed)
    elif (run / "metrics.jsonl").exists():
        rows = read_rows(run / "metrics.jsonl")
        values = [row[where] for row in rows if where in row]
    return float(values[-1]) if values else None


def print_row(title, names, found):
    """Print a row. found: [{column: number or None} of each seed]."""
    cells = []
    for name in names:
        values = [numbers[name] for numbers in found if numbers[name] is not None]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            cells.append("-")
        elif len(values) == 1:
            cells.append(f"{values[0]:.4g}")
        else:
            cells.append(f"{statistics.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


# ---------------------------------------------------------------- command line
def read_plan(path):
    """The Plan in a file. Raises: ValueError, OSError."""
    try:
        found = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    names = list(Plan.__dataclass_fields__)
    if not isinstance(found, dict) or not found.keys() <= set(names):
        keys = list(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path} has {keys}; expected some of {', '.join(names)}")
    missing = [name for name in ("evaluate", "numbers") if name not in found]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; expected these keys")
    plan = Plan(**found)
    plan.recipes = {name: values or {} for name, values in plan.recipes.items()}
    return plan


def read_arguments(argv):
    """(Plan, folder). Raises: ValueError, OSError."""
    parser = Parser(prog="python -m bench learn", allow_abbrev=False,
                    description=__doc__,
                    epilog="The top of bench/learn.py says what the file holds.")
    parser.add_argument("file", help="YAML file of recipes")
    parser.add_argument("values", nargs="*", metavar="NAME=VALUE", help="of `given` in the file")
    parser.add_argument("--recipes", help="some of the file, such as shipped,no_kl")
    parser.add_argument("--seeds", help="such as 0,1,2; default: of the file")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: runs/learn/ and the "
                        "name of the file")
    options = parser.parse_intermixed_args(argv)
    plan = read_plan(options.file)
    for text in options.values:
        name, equals, value = text.partition("=")
        if not equals or name not in plan.given:
            raise ValueError(f"found {text}; expected NAME=VALUE, with a name of "
                             f"{', '.join(plan.given) or '(none)'}")
        plan.given[name] = value
    if options.recipes:
        names = options.recipes.split(",")
        unknown = [name for name in names if name not in plan.recipes]
        if unknown:
            raise ValueError(f"--recipes: found {', '.join(unknown)}; expected some of "
                             f"{', '.join(plan.recipes)}")
        plan.recipes = {name: plan.recipes[name] for name in names}
    if options.seeds:
        try:
            plan.seeds = [int(seed) for seed in options.seeds.split(",")]
        except ValueError:
            raise ValueError(f"--seeds {options.seeds}; expected such as 0,1,2") from None
    return plan, options.folder or Path("runs", "learn", Path(options.file).stem)


def main(argv):
    try:
        plan, folder = read_arguments(argv)
        learn(plan, folder)
    except (ValueError, OSError) as error:
        print(f"python -m bench learn: error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except Stopped:
        print("Stopped and saved. The same command goes on.", flush=True)
        sys.exit(STOPPED)
