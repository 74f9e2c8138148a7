"""Validation perplexities of several training recipes on the same data, in a table.

    python -m bench learn --data proteins.fasta.gz
    mpirun -n 2 python -m bench learn --data my.fasta --steps 5000 --seeds 0,1,2 --folder runs/learn
    python -m bench learn --data my.fasta --recipes adamw,muon_decay optim.weight_decay=0.1
    python -m bench learn dpo s2648.csv --lower_is_better       # of DPO: see bench/learn_dpo.py
    python -m bench learn dpo_sedd                              # of SEDD: bench/learn_dpo_sedd.py

A recipe is a set of keys that override --config. With equal seeds all recipes see the same residues
in the same order, and are validated on the same proteins, each under its own noise schedule. The
runs are ordinary runs in --folder: the same command resumes a stopped bench, and does not repeat
finished runs.
"""
import contextlib
import io
import itertools
import sys
from pathlib import Path

import numpy as np

from bench import learn_dpo, learn_dpo_sedd
from bench.common import (CONFIGS, CommandParser, read_options, run_on_ranks,
                          use_demo_proteins)
from ddp_setup import AGAIN, broadcast, print0
from training.config import load_config
from training.log import read_rows
from training.command_line import prepare_and_train
from train_sedd_ddp import Config, prepare, train

DECAY = ["optim.decay=linear", "optim.decay_steps=0.5"]
# cosine: draws low noise levels more often, like importance sampling of times
SUBS_COSINE = ["model.parameterization=subs", "noise.type=cosine"]
RECIPES = {   # the first is the baseline
    "adamw": ["optim.name=adamw", "optim.lr=1e-3", "optim.decay=none", "optim.decay_steps=null",
              "model.parameterization=sedd", "noise.type=loglinear"],
    "adamw_decay": ["optim.name=adamw", "optim.lr=2e-3", *DECAY,
                    "model.parameterization=sedd", "noise.type=loglinear"],
    "adamw_decay_subs_cosine": ["optim.name=adamw", "optim.lr=2e-3", *DECAY, *SUBS_COSINE],
    "muon_decay": ["optim.name=muon", "optim.lr=4e-3", *DECAY,
                   "model.parameterization=sedd", "noise.type=loglinear"],
    "muon_decay_subs_cosine": ["optim.name=muon", "optim.lr=4e-3", *DECAY, *SUBS_COSINE],
}


def train_recipe(folder, recipe, seed, args, ddp):
    """Train one run to its end. Returns [(step, perplexity / unigram perplexity), ...], or [] if it
    was asked to stop. Raises: ValueError without validation proteins."""
    work_dir = folder / f"{recipe}_{args.steps}_{seed}"
    overrides = [*RECIPES[recipe], *args.overrides, f"training.seed={seed}",
                 f"training.n_iters={args.steps}", f"training.eval_freq={max(args.steps // 5, 1)}",
                 "monitoring.n_samples=1", "monitoring.sample_steps=1"]
    config = load_config(Config, args.config, overrides, {"data.file": args.data})
    use_demo_proteins(config)
    if not config.data.val_fraction:
        raise ValueError("data.val_fraction is 0; expected proteins to validate with.")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = prepare_and_train(ddp, lambda: prepare(config, ddp, work_dir), train)
            if "stopped" in result:
                return []
    except ValueError as e:
        if "--work_dir" not in str(e):   # the message advises an option that this script lacks
            raise
        raise ValueError(f"{e}\nHere: another --folder, or remove {work_dir}.") from None
    rows = read_rows(work_dir / "metrics.jsonl") if ddp.is_main else []
    return broadcast([(row["step"], row["val/perplexity"] / row["val/unigram_perplexity"])
                      for row in rows if "val/perplexity" in row], ddp)


def steps_to(curve, value):
    """The step at which a falling curve first reaches `value`, by linear interpolation, or None.

    curve: [(step, value), ...]."""
    first_step, first_value = curve[0]
    if first_value <= value:
        return first_step
    for (step, above), (next_step, found) in itertools.pairwise(curve):
        if found <= value:
            return step + (above - value) / (above - found) * (next_step - step)
    return None


def describe(recipe, curves, baseline):
    """A row of the table. curves, baseline: {seed: curve} of this recipe and of the first one."""
    ends = [curve[-1][1] for curve in curves.values()]
    shares = []         # steps to reach the baseline's last value, over the baseline's steps
    for seed, curve in curves.items():
        last_step, last_value = baseline[seed][-1]
        step = steps_to(curve, last_value)
        shares.append("never" if step is None else f"{step / last_step:.0%}")
    return (f"{recipe:<26}{np.mean(ends):>8.4f}   {' '.join(f'{end:.4f}' for end in ends):<22}"
            f"{' '.join(shares)}")


def bench_learn(args, ddp):
    """Train all recipes with all seeds, and print each row of the table when it is known. Returns
    whether all runs finished."""
    folder = Path(args.folder)
    found = {recipe: {} for recipe in args.recipes}
    print0(ddp, f"{args.steps:,} steps of {args.config}, validation perplexity over that of the "
                "letter frequencies\n"
                f"{'recipe':<26}{'mean':>8}   {'seeds ' + ' '.join(map(str, args.seeds)):<22}steps "
                f"to the last value of {args.recipes[0]}")
    for recipe in args.recipes:
        for seed in args.seeds:
            print0(ddp, f"training {recipe}, seed {seed}", file=sys.stderr)
            found[recipe][seed] = train_recipe(folder, recipe, seed, args, ddp)
            if not found[recipe][seed]:
                print0(ddp, "Stopped and saved. The same command goes on.")
                return False
        print0(ddp, describe(recipe, found[recipe], found[args.recipes[0]]))
    return True


def numbers(text):
    return [int(number) for number in text.split(",")]


def main(argv):
    if argv[:1] == ["dpo_sedd"]:
        learn_dpo_sedd.main(argv[1:])
        return
    if argv[:1] == ["dpo"]:
        learn_dpo.main(argv[1:])
        return
    parser = CommandParser(prog="python -m bench learn", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="proteins; default: demo proteins")
    parser.add_argument("--config", default=CONFIGS / "sedd_cpu.yaml")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default=[0, 1], type=numbers, help="default: 0,1")
    parser.add_argument("--recipes", default=list(RECIPES), type=lambda text: text.split(","),
                        help=f"default: {','.join(RECIPES)}")
    parser.add_argument("--folder", default="runs/learn", help="folder that keeps the runs")
    parser.add_argument("overrides", nargs="*", help="keys for all recipes, such as optim.warmup=9")
    args = read_options(parser, argv)
    unknown = [recipe for recipe in args.recipes if recipe not in RECIPES]
    if unknown:
        parser.error(f"--recipes: {', '.join(unknown)}; expected some of {', '.join(RECIPES)}")
    finished = run_on_ranks("learn", bench_learn, args, argv)
    if not finished:
        sys.exit(AGAIN)

