"""Recipes to fine-tune ProteinMPNN on measured mutations, compared on proteins held out.

    python -m bench learn dpo s2648.csv --measured ddg --lower_is_better
    mpirun -n 2 python -m bench learn dpo s2648.csv --measured ddg --lower_is_better \\
        --recipes shipped --seeds 0,1,2 --folder runs/learn_dpo

A recipe is how pairs are made (options of pairs_from_scores.py) and keys that override --config.
The first is --config as it is, each of the others changes one thing of it. The table has the base
weights in its first row, then a row for each run:

    Spearman    rank correlation of scores with measured values on the proteins held out: over all
                mutations; mean of those of proteins with ten or more. Scores are those of
                score_mutations.py --mutations; corrected: with --correction_weights BASE
    native      mean ln p per residue of the native sequences of these proteins, each whole, in
                random orders. The last line compares its largest fall with monitoring.fall
    recovery, diversity
                of designs at temperature 0.1 of up to 16 of these proteins: the fraction of native
                letters; the fraction in which two designs differ
    CPU min     of training, all ranks together, without evaluation; of a run that was stopped, what
                it took after the last start

The runs are ordinary runs in --folder: the same command resumes a stopped bench, and does not
repeat finished runs.
"""
import contextlib
import copy
import io
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import pairs_from_scores
from bench.common import CONFIGS, CommandParser, read_options, run_on_ranks
from ddp_setup import AGAIN, all_sum, broadcast, print0
from mpnn.weights import load_proteinmpnn
from mpnn.base import load_base
from mpnn.dpo import ProteinMPNNScorer, native_pairs
from proteins.mutations import place_all, read_mutations
from mpnn.pairs import Pair
from mpnn.variants import Scoring, score_alone, score_variants
from proteins.scores import check_measured, correlate_proteins
from train_dpo_ddp import Config, Loss, objective, prepare, train
from training.config import load_config
from training.fast_linear import fast_linear
from training.files import write_text_atomic
from training.command_line import prepare_and_train
from dpo.preferences import unpack_sums
from dpo.validation import Validation

N_ORDERS = 2        # in which native sequences are scored
N_DESIGNS = 4       # of each protein
RESULT = "held_out.json"        # in the folder of a run
COLUMNS = {"spearman": 3, "spearman_mean": 3, "corrected": 3, "corrected_mean": 3, "native": 3,
           "recovery": 3, "diversity": 3, "cpu_minutes": 1}     # of the table: decimals
HEAD = f"""{'':<20}{'Spearman':^18}{'corrected':^18}
{'recipe':<15}{'seed':>5}{'all':>9}{'protein':>9}{'all':>9}{'protein':>9}{'native':>9}\
{'recovery':>9}{'diversity':>10}{'CPU min':>8}"""


class Recipe(NamedTuple):
    """What differs from the first recipe."""
    pairs: tuple = ()       # options of pairs_from_scores.py
    keys: tuple = ()        # of the config


RECIPES = {   # the first is the baseline
    "shipped": Recipe(),
    "no_kl": Recipe(keys=("loss.native_kl=0",)),
    "sft_not_kl": Recipe(keys=("loss.native_kl=0", "loss.sft=0.2")),
    "from_base": Recipe(keys=("loss.reference=base",)),
    "reference_free": Recipe(keys=("loss.reference=base", "loss.name=reference_free")),
    "beta_0.1": Recipe(keys=("loss.beta=0.1",)),
    "beta_2": Recipe(keys=("loss.beta=2",)),
    "lr_half": Recipe(keys=("optim.lr=5e-5",)),
    "lr_double": Recipe(keys=("optim.lr=2e-4",)),
    "fixed_order": Recipe(keys=("loss.order=fixed",)),
    "batch_16": Recipe(keys=("training.batch_size=16",)),
    "wild_type_only": Recipe(pairs=("--against", "wild_type")),
    "mutants_only": Recipe(pairs=("--against", "mutants")),
    "weights": Recipe(pairs=("--weights",)),
}


def bench_learn_dpo(args, ddp):
    """Train all recipes with all seeds, and print each row of the table when it is known. Returns
    whether all runs finished."""
    files = {recipe: make_pairs(recipe, args, ddp) for recipe in args.recipes}
    first = files[args.recipes[0]]
    with silence():
        judge = Judge(args, first.with_name(f"{first.stem}_held_out.csv"), ddp)
    print0(ddp, judge.describe(), HEAD, row_of("base weights", "", judge.base), sep="\n")
    falls = []
    for recipe in args.recipes:
        found = []
        for seed in args.seeds:
            print0(ddp, f"training {recipe}, seed {seed}", file=sys.stderr)
            values = result_of(recipe, seed, files[recipe], judge, args, ddp)
            if values is None:
                print0(ddp, "Stopped and saved. The same command goes on.")
                return False
            found.append(values)
            print0(ddp, row_of(recipe, seed, values))
            falls.append(judge.base["native"] - values["native"])
        if len(found) > 1:
            means = {name: np.mean([values[name] for values in found]) for name in COLUMNS}
            print0(ddp, row_of(recipe, "mean", means))
    print0(ddp, f"largest fall of native: {max(falls):.3f} nats per residue (monitoring.fall: "
                f"{judge.most_fall:g})")
    return True


def make_pairs(recipe, args, ddp):
    """Path of the pairs of a recipe, which rank 0 writes. Raises: ValueError."""
    path = args.folder / f"{recipe}.json"
    better = "--lower_is_better" if args.lower_is_better else "--higher_is_better"
    options = ["--score", args.measured, better, "--margin", str(args.margin), "--hold_out",
               str(args.hold_out), *RECIPES[recipe].pairs]
    write_pairs(path, options, args, ddp)
    return path


def write_pairs(path, options, args, ddp):
    """Let rank 0 write the pairs of --table, with these options of pairs_from_scores.py. Raises:
    ValueError."""
    code = 0
    if ddp.is_main:
        args.folder.mkdir(parents=True, exist_ok=True)
        with silence():
            code = pairs_from_scores.main([str(args.table), str(path), *options])
    if broadcast(code, ddp):
        raise ValueError(f"{args.table}: no pairs could be made; expected a table of measured "
                         "mutations, see the message above.")


def result_of(recipe, seed, pairs, judge, args, ddp):
    """Train one run to its end, and measure. Returns {column: number}, or None if it was asked to
    stop. What was measured is kept in the run's folder."""
    work_dir = args.folder / f"{recipe}_{seed}"
    config = load_config(Config, args.config, [*RECIPES[recipe].keys, *args.overrides,
                                               f"training.seed={seed}"],
                         {"data.train_data": str(pairs)})
    began = time.process_time()
    try:
        with silence():
            result = prepare_and_train(ddp, lambda: prepare(config, ddp, work_dir), train)
    except ValueError as e:
        if "--work_dir" not in str(e):   # the message advises an option that this script lacks
            raise
        raise ValueError(f"{e}\nHere: another --folder, or remove {work_dir}.") from None
    if "stopped" in result:
        return None
    minutes = all_sum(torch.tensor((time.process_time() - began) / 60, dtype=torch.float64), ddp)
    path = work_dir / RESULT
    kept = None
    if ddp.is_main and path.exists():
        kept = json.loads(path.read_text())
    kept = broadcast(kept, ddp)
    # Measured on the same proteins: else the base, which is measured anew, differs.
    if kept is not None and kept["step"] == result["step"] and kept.get("base") == judge.base:
        return kept
    model = load_proteinmpnn(str(work_dir / "latest_model.pt"), product=fast_linear)
    model = model.eval().to(ddp.device)
    with silence():
        values = {"step": result["step"], "base": judge.base, "cpu_minutes": float(minutes),
                  **judge.measure(model)}
    if ddp.is_main:
        write_text_atomic(path, json.dumps(values) + "\n")
    return values


def silence():
    """A context without words on stdout: only the table belongs there."""
    return contextlib.redirect_stdout(io.StringIO())


class Judge:
    """Measures weights on the proteins held out. All ranks share the work.

    base: what `measure` finds for the base weights.
    """

    def __init__(self, args, table, ddp):
        """args: options. table: of the mutations held out."""
        config = load_config(Config, args.config, args.overrides)
        config.training.seed = 0
        config.loss = Loss(n_orders=N_ORDERS)
        config.monitoring.n_designs = N_DESIGNS
        base = load_base(config)
        self.text = base.text
        model = base.model.eval().to(ddp.device)
        self.ddp = ddp
        self.lower_is_better = args.lower_is_better
        self.most_fall = config.monitoring.fall
        mutations = read_mutations(table, args.measured)
        self.proteins, _ = place_all(mutations, see_all=False, ca_only=model.ca_only)
        check_measured(self.proteins, args.measured)
        self.alone = self.of_variants(lambda protein: score_alone(
            model, protein.complex, protein.changes))
        whole = [Pair(protein.complex, S, S, np.ones(len(S), bool)) for protein in self.proteins
                 for S in [protein.complex.S[:protein.complex.n_designed]]]
        pairs = native_pairs(whole)
        base = base._replace(model=copy.deepcopy(model))
        scorer = ProteinMPNNScorer(base, pairs, config, ddp)
        self.validation = Validation(pairs, scorer, objective)
        reference = self.validation.reference
        reference.table = reference.compute(pairs, "native sequences").to(ddp.device)
        self.designs = self.validation.designs
        self.designs.base = self.designs.draw(model, ddp)
        self.base = {"cpu_minutes": 0.0, **self.measure(model)}

    def describe(self):
        """A line on what is held out."""
        n = sum(len(protein.variants) for protein in self.proteins)
        return f"{n:,} mutations of {len(self.proteins)} proteins held out; base: {self.text}"

    def measure(self, model):
        """{column: number} of weights; without CPU minutes."""
        scores = self.of_variants(lambda protein: score_variants(
            model, protein.complex, protein.changes, Scoring()))
        plain = self.correlate(scores)
        corrected = self.correlate([own - alone for own, alone in zip(scores, self.alone)])
        with torch.no_grad():
            sums = unpack_sums(self.validation.sums_over_pairs(model))
        designs = self.designs.metrics(self.designs.draw(model, self.ddp))
        return {"spearman": plain[0], "spearman_mean": plain[1], "corrected": corrected[0],
                "corrected_mean": corrected[1],
                "native": float(sums["logps/chosen"] / sums["residues"]),
                "recovery": designs["val/design_recovery"],
                "diversity": designs["val/design_diversity"]}

    def of_variants(self, score):
        """[score(protein)] of all proteins, each computed on one rank. score: function (Protein) ->
        (n,) float64."""
        found = []
        for number, protein in enumerate(self.proteins):
            scores = torch.zeros(len(protein.variants), dtype=torch.float64)
            if number % self.ddp.world_size == self.ddp.rank:
                scores += torch.from_numpy(score(protein))
            found.append(scores)
        together = all_sum(torch.cat(found), self.ddp)
        return [part.numpy() for part in together.split([len(scores) for scores in found])]

    def correlate(self, scores):
        """Spearman's correlation over all mutations, and the mean of those of proteins (nan: no
        protein has enough mutations)."""
        report = correlate_proteins(self.proteins, scores, self.lower_is_better)
        mean = report.mean.value if report.mean is not None else np.nan
        return report.overall.value, mean


def row_of(recipe, seed, values):
    """A line of the table. values: {column: number}."""
    numbers = "".join(f"{values[name]:>9.{decimals}f}" for name, decimals in COLUMNS.items())
    return f"{recipe:<15}{seed:>5}{numbers}"


def numbers(text):
    return [int(number) for number in text.split(",")]


def main(argv):
    parser = CommandParser(prog="python -m bench learn dpo", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("table", type=Path, help="CSV with pdb_file, mutation and measured values")
    parser.add_argument("--measured", default="ddg", metavar="COLUMN", help="default: ddg")
    parser.add_argument("--lower_is_better", action="store_true", help="of --measured")
    parser.add_argument("--margin", type=float, default=0.5, help="of pairs; default 0.5")
    parser.add_argument("--hold_out", type=float, default=0.2, help="of the proteins; default 0.2")
    parser.add_argument("--config", default=CONFIGS / "dpo_stability.yaml")
    parser.add_argument("--seeds", default=[0], type=numbers, help="such as 0,1,2; default: 0")
    parser.add_argument("--recipes", default=list(RECIPES), type=lambda text: text.split(","),
                        help=f"default: {','.join(RECIPES)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/learn_dpo"),
                        help="folder that keeps the runs")
    parser.add_argument("overrides", nargs="*", help="keys for all recipes, such as optim.warmup=9")
    args = read_options(parser, argv)
    unknown = [recipe for recipe in args.recipes if recipe not in RECIPES]
    if unknown:
        parser.error(f"--recipes: {', '.join(unknown)}; expected some of {', '.join(RECIPES)}")
    finished = run_on_ranks("learn", bench_learn_dpo, args, ["dpo", *argv])
    if not finished:
        sys.exit(AGAIN)
