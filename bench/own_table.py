"""Few measurements of one protein, for each of many: scores before and after tuning, and a ridge.

    python -m bench own_table proteingym.csv --measured fitness --better higher --variants 48 \\
        --draw 0 --folder runs/own48_0 table.folds=0
    python -m bench learn configs/learn/own_table.yaml table=proteingym.csv

Of each protein of the table, variants are drawn and the weights tuned on these as
`train_dpo_ddp.py --config configs/dpo_own_table.yaml` does, in memory. All other variants judge, by
Spearman's correlation with their values: of the score of the base weights corrected for the
unfolded state (zero-shot), of the tuned weights less the same correction, each by one decoding
order, and of ridge regression on the drawn values, from indicators of mutated residues and new
letters, and the zero-shot score (after Hsu et al. 2022, doi 10.1038/s41587-021-01146-5). --also
WEIGHTS: scores are means over several base weights, each tuned and corrected by itself. With
table.folds the cross-validation inside the drawn variants is shown too. Results are kept in
FOLDER/own_table.json: the same command goes on.
"""
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ddp_setup import BAD_INPUT, Ddp
from dpo.folds import cross_validate
from dpo.scorer import load
from dpo.tables import spearman_of
from proteins.correlation import LEAST
from proteins.seeds import FOR_DRAWS, random_words
from train_dpo_ddp import KINDS, Config, check_config, train_apart
from training.config import config_to_dict, load_config
from training.files import write_text_atomic
from training.parser import Parser

ROOT = Path(__file__).resolve().parents[1]
KEPT = "own_table.json"
PENALTIES = 10.0 ** np.arange(-2, 4.5, 0.5)     # of the ridge, on standardised values
RIDGE_FOLDS = 5
ZERO_SHOT_SIZE = 10     # standard deviations, so that this column is nearly free of the penalty


def judge(configs, n_variants, draw, folder, ddp=Ddp()):
    """Results of all proteins with enough variants, dicts by name; each is printed when it is
    known.

    configs: of trainings from one or several base weights, over which scores are averaged.
    n_variants, draw: how many variants are drawn, by which seed."""
    bases = []
    for config in configs:
        base, data = load(KINDS[config.model.kind], config, ddp)
        base.model.to(ddp.device).eval()
        bases.append(base)
    settings = {"variants": n_variants, "draw": draw,
                "configs": [config_to_dict(config) for config in configs]}
    kept = Path(folder, KEPT)
    results = {}
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["settings"] == settings:
            results = found["results"]
    for table in data.train:
        if len(table.variants) < n_variants + LEAST:
            continue
        if table.name not in results:
            results[table.name] = judge_one(bases, table, configs, n_variants, draw, ddp)
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(kept, json.dumps({"settings": settings, "results": results},
                                               indent=1) + "\n")
        print(describe(table.name, results[table.name]), flush=True)
    return results


def judge_one(bases, table, configs, n_variants, draw, ddp):  # noqa: PLR0913  (what it depends on)
    """The results of one protein, a dict."""
    order = random_words(len(table.variants), [FOR_DRAWS, draw, table.key])
    is_drawn = np.zeros(len(table.variants), bool)
    is_drawn[np.argsort(order, kind="stable")[:n_variants]] = True
    drawn = table.only(is_drawn)

    scorers = [KINDS[config.model.kind].scorer(base, [table], config, ddp)
               for base, config in zip(bases, configs)]

    def mean_scores(models):
        """Of all variants."""
        found = []
        for scorer, model in zip(scorers, models):
            found += scorer.variant_scores(model, [table])
        return np.mean(found, axis=0)

    def train_on(variants):
        return [train_apart(base, variants, config, ddp) for base, config in zip(bases, configs)]

    def scores_after(others):
        return mean_scores(train_on(others))[is_drawn]

    def correlation(scores):
        return spearman_of(scores[~is_drawn], table.values[:-1][~is_drawn])

    zero_shot = mean_scores([base.model for base in bases])
    began = time.process_time()
    tuned = train_on(drawn)
    seconds = time.process_time() - began
    found = {"residues": table.length, "drawn": n_variants, "judged": int((~is_drawn).sum()),
             "zero_shot": correlation(zero_shot), "tuned": correlation(mean_scores(tuned)),
             "ridge": correlation(ridge_scores(table, is_drawn, zero_shot)),
             "cpu_seconds": round(seconds, 1)}
    config = configs[0]
    if config.table.folds:
        found["folds"] = cross_validate(drawn, config.table.folds, config.training.seed,
                                        zero_shot[is_drawn], scores_after)
    return found


def describe(name, found):
    """A line on the results of one protein."""
    text = (f"{Path(name).name.partition('.')[0]}: {found['drawn']} of "
            f"{found['drawn'] + found['judged']:,} variants, {found['residues']} residues; "
            f"zero-shot {found['zero_shot']:.3f}, tuned {found['tuned']:.3f}, ridge "
            f"{found['ridge']:.3f}; {found['cpu_seconds']:.0f} CPU s")
    if "folds" in found:
        folds = found["folds"]
        gain = folds["after"] - folds["before"]
        text += f"; cross-validation {gain:+.3f} [{folds['low']:.3f}, {folds['high']:.3f}]"
    return text


def summary(results):
    """A line on the results of all proteins."""
    columns = {name: np.array([found[name] for found in results.values()])
               for name in ("zero_shot", "tuned", "ridge")}
    above = columns["tuned"] > np.maximum(columns["zero_shot"], columns["ridge"])
    means = {name: values.mean() for name, values in columns.items()}
    return (f"mean of {len(above)} proteins: zero-shot {means['zero_shot']:.4f}, tuned "
            f"{means['tuned']:.4f}, ridge {means['ridge']:.4f}; tuned above both in {above.sum()}")


# ---------------------------------------------------------------- ridge regression
def ridge_scores(table, is_known, zero_shot):
    """(N,) values that ridge regression on the known ones predicts for all variants.

    is_known: (N,) bool. zero_shot: (N,) scores. The penalty is that of the least squared error on
    known variants that are left out."""
    spread = zero_shot[is_known].std() or 1.0
    column = ZERO_SHOT_SIZE * (zero_shot - zero_shot[is_known].mean()) / spread
    features = np.column_stack([features_of(table), column])
    known = features[is_known]
    values = table.values[:-1][is_known]
    fold_of = np.arange(len(values)) % RIDGE_FOLDS
    errors = []
    for penalty in PENALTIES:
        error = 0.0
        for fold in range(RIDGE_FOLDS):
            rest = fold_of != fold
            predicted = ridge(known[rest], values[rest], known[~rest], penalty)
            error += ((predicted - values[~rest])**2).sum()
        errors.append(error)
    return ridge(known, values, features, PENALTIES[int(np.argmin(errors))])


def features_of(table):
    """(N, residues + letters) float64: how many mutations of a variant are at a residue, and to a
    letter."""
    rows = sorted({row for variant in table.variants for row, _ in variant})
    place = {row: k for k, row in enumerate(rows)}
    features = np.zeros((len(table.variants), len(rows) + 20))
    for number, variant in enumerate(table.variants):
        for row, letter in variant:
            features[number, place[row]] += 1
            features[number, len(rows) + letter] += 1
    return features


def ridge(features, values, wanted, penalty):
    """Predicted values (M,) of `wanted` (M, F), from values (n,) of features (n, F)."""
    middle = features.mean(0)
    mean = values.mean()
    centred = features - middle
    kernel = centred @ centred.T + penalty * np.eye(len(values))
    weights = np.linalg.solve(kernel, values - mean)
    return mean + (wanted - middle) @ (centred.T @ weights)


# ---------------------------------------------------------------- command line
def read_arguments(argv):
    """(options, Configs of all base weights). Raises: ValueError, OSError."""
    parser = Parser(prog="python -m bench own_table", allow_abbrev=False, description=__doc__)
    parser.add_argument("table", help="mutations of several proteins, as for scoring")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config")
    parser.add_argument("--measured", required=True, help="column of measured values")
    parser.add_argument("--better", required=True, choices=("lower", "higher"), help="values")
    parser.add_argument("--variants", type=int, default=48, help="drawn of each protein")
    parser.add_argument("--draw", type=int, default=0, help="seed of the draw")
    parser.add_argument("--also", action="append", default=[], metavar="WEIGHTS",
                        help="further model.base_model_name; scores are means over all")
    parser.add_argument("--folder", required=True, type=Path, help="keeps the results")
    parser.add_argument("--config", default=ROOT / "configs" / "dpo_own_table.yaml",
                        help="default: configs/dpo_own_table.yaml")
    options = parser.parse_intermixed_args(argv)
    if options.variants < LEAST:
        raise ValueError(f"--variants {options.variants}; expected {LEAST} or more")
    given = {"data.train_data": options.table, "table.measured": options.measured,
             "table.better": options.better}
    config = load_config(Config, options.config, options.overrides, given)
    check_config(config)
    if options.also and config.model.kind != "proteinmpnn":
        raise ValueError(f"found --also with model.kind={config.model.kind}; expected it with "
                         "proteinmpnn")
    configs = [config]
    for name in options.also:
        configs.append(replace(config, model=replace(config.model, base_model_name=name)))
    return options, configs


def main(argv):
    try:
        options, configs = read_arguments(argv)
        results = judge(configs, options.variants, options.draw, options.folder)
        if not results:
            raise ValueError(f"{options.table} has no protein with {options.variants} variants and "
                             f"{LEAST} more; expected one")
        print(summary(results), flush=True)
    except (ValueError, OSError) as error:
        print(f"python -m bench own_table: error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
