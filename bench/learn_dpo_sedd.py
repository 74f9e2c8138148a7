"""SEDD fine-tuned on preferences: does it reach a known optimum, what does it learn from mutants?

    python -m bench learn dpo_sedd                          # demo source: the optimum is known
    python -m bench learn dpo_sedd s2648.csv --base BEST.pt --lower_is_better

Without a table: a small SEDD is trained on short proteins of the demo source, and draws pairs. The
reward of a protein is r = REWARD x its number of K; a pair counts in both directions, with the
weights of Bradley and Terry, sigmoid(+-(r1 - r2)). DPO has one optimum, p(x) exp(r(x) / beta) / Z,
with p of the base. The table shows, of proteins that were not trained on:

    slope       of beta x (log-ratio of policy to base, chosen - rejected) over r1 - r2; optimum: 1
    K           fraction of K in proteins that the policy draws; optimum: the base's proteins,
                weighted by exp(r / beta)

With a table of measured mutations: pairs of most proteins (pairs_from_scores.py --sequences
--hold_out), a run for each seed, and Spearman's correlation on the proteins held out, before and
after. A score is the difference of bounds of mutant and wild type, by shared noise. The runs are
ordinary runs in --folder: the same command resumes a stopped bench.
"""
import contextlib
import io
import json
import math
import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train_sedd_ddp
from bench.common import (CONFIGS, CommandParser, measure_the_cpu_by_default, read_options,
                          run_on_ranks)
from bench.learn_dpo import write_pairs
from ddp_setup import AGAIN, barrier, print0
from mpnn.mutation_pairs import mutated
from proteins.mutations import place_all, place_on_sequences, read_mutations
from proteins.scores import check_measured, correlate_proteins
from sample_sedd import sample_sequences
from sedd.bounds import PairBounds
from proteins.letters import encode
from sedd.weights import load_sedd
from train_dpo_ddp import Config, prepare, train
from training.config import load_config
from training.files import write_text_atomic
from training.command_line import prepare_and_train
from proteins.seeds import content_key

LETTER = "K"
BETA = 1.0
REWARD = 0.5            # for each LETTER
LENGTH = 30             # residues of proteins of the demonstration
N_PROTEINS = 3000       # that the base draws; half of them for pairs to train on
SAMPLE_STEPS = 30
N_PAIRS_JUDGED = 500
LEVELS = 8              # noise levels of a score
AT_A_TIME = 16          # pairs that are scored together
DEMO_BASE = ["data.max_length=30", "data.demo_proteins=6000", "monitoring.n_samples=0",
             "training.eval_freq=10000", "training.n_iters=500", "model.hidden_size=64",
             "model.n_blocks=2", "model.n_heads=2", "model.cond_dim=32"]
DEMO_KEYS = [f"loss.beta={BETA}", "training.num_epochs=2", "training.batch_size=16",
             "data.val_fraction=0", "optim.lr=5e-4", "optim.warmup=10", "optim.decay=linear",
             "monitoring.n_designs=0", "estimator.samples=16", "training.log_freq=50"]


# ---------------------------------------------------------------- the known optimum
def bench_demo(args, ddp):
    """Print the table of the demonstration. Returns whether all runs finished."""
    base = args.base or train_demo_base(args.folder / "base", ddp)
    sedd = load_sedd(base, device=ddp.device)
    proteins = sample_sequences(sedd, ["_" * LENGTH] * N_PROTEINS, SAMPLE_STEPS, seed=0, ddp=ddp)
    half = N_PROTEINS // 2
    path = args.folder / "pairs.json"
    if ddp.is_main:
        write_text_atomic(path, json.dumps(both_directions(proteins[:half])) + "\n")
    judged = couples(proteins[half:])[:N_PAIRS_JUDGED]
    rewards = np.array([reward(text) for text in proteins])
    share = fraction(proteins)
    weights = np.exp((rewards - rewards.max()) / BETA)
    optimum = float((weights * [text.count(LETTER) / LENGTH for text in proteins]).sum()
                    / weights.sum())
    print0(ddp, f"{processor()}\n{'':<14}{'slope':>8}{LETTER:>8}\n"
                f"{'base':<14}{0:>8.3f}{share:>8.3f}\n{'optimum':<14}{1:>8.3f}{optimum:>8.3f}")
    before = margins(sedd, judged)
    truth = np.array([reward(one) - reward(other) for one, other in judged])
    for seed in args.seeds:
        work_dir = args.folder / f"demo_{seed}"
        if not run_dpo(work_dir, base, path, [*DEMO_KEYS, *args.overrides], seed, args, ddp):
            return False
        policy = load_sedd(work_dir / "latest_model.pt", device=ddp.device)
        gained = margins(policy, judged) - before
        slope = BETA * float((gained * truth).sum() / (truth * truth).sum())
        drawn = sample_sequences(policy, ["_" * LENGTH] * N_PROTEINS, SAMPLE_STEPS, seed=1 + seed,
                                 ddp=ddp)
        print0(ddp, f"{f'seed {seed}':<14}{slope:>8.3f}{fraction(drawn):>8.3f}")
    return True


def train_demo_base(work_dir, ddp):
    """Path of a small SEDD that has learned short proteins of the demo source."""
    config = load_config(train_sedd_ddp.Config, CONFIGS / "sedd_demo.yaml", DEMO_BASE)
    print0(ddp, "training the base", file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_and_train(ddp, lambda: train_sedd_ddp.prepare(config, ddp, work_dir),
                          train_sedd_ddp.train)
    return work_dir / "checkpoints" / "best.pt"


def reward(text):
    return REWARD * text.count(LETTER)


def fraction(proteins):
    """Mean fraction of LETTER."""
    return float(np.mean([text.count(LETTER) / len(text) for text in proteins]))


def couples(proteins):
    """[(protein, the next one)], each protein in one couple, without equal ones."""
    return [(one, other) for one, other in zip(proteins[::2], proteins[1::2]) if one != other]


def both_directions(proteins):
    """Entries of a file of pairs: each couple as if many had judged it."""
    entries = []
    for one, other in couples(proteins):
        share = 1 / (1 + math.exp(reward(other) - reward(one)))
        for chosen, rejected, weight in ((one, other, share), (other, one, 1 - share)):
            entries.append({"preferred_seq": chosen, "unpreferred_seq": rejected,
                            "weight": weight})
    return entries


# ---------------------------------------------------------------- measured mutations
def bench_mutations(args, ddp):
    """Print the table of proteins held out. Returns whether all runs finished."""
    sedd = load_sedd(args.base, device=ddp.device)
    path = make_pairs(sedd.max_length, args, ddp)
    table = read_mutations(path.with_name(f"{path.stem}_held_out.csv"), args.measured)
    place_them = place_on_sequences if table.has_sequences else place_all
    proteins, _ = place_them(table)
    check_measured(proteins, args.measured)
    proteins = [protein for protein in proteins if len(protein.complex) <= sedd.max_length]
    n = sum(len(protein.variants) for protein in proteins)
    n_pairs = len(json.loads(path.read_text()))
    print0(ddp, f"{processor()}\n{n_pairs:,} pairs; {n:,} mutations of {len(proteins)} proteins "
                f"held out\nSpearman{'':<12}{'all':>8}{'protein':>9}{'CPU min':>9}\n"
                f"{'before':<20}{correlation(sedd, proteins, args)}")
    for seed in args.seeds:
        work_dir = args.folder / f"seed_{seed}"
        began = time.process_time()
        if not run_dpo(work_dir, args.base, path, args.overrides, seed, args, ddp):
            return False
        minutes = (time.process_time() - began) / 60
        policy = load_sedd(work_dir / "latest_model.pt", device=ddp.device)
        print0(ddp, f"{f'after, seed {seed}':<20}{correlation(policy, proteins, args)}"
                    f"{minutes:>9.1f}")
    return True


def make_pairs(longest, args, ddp):
    """Path of the pairs of at most `longest` residues, which rank 0 writes. Raises: ValueError."""
    path = args.folder / "pairs.json"
    better = "--lower_is_better" if args.lower_is_better else "--higher_is_better"
    options = ["--score", args.measured, better, "--margin", str(args.margin), "--hold_out", "0.2",
               "--per_structure", str(args.per_protein), "--sequences"]
    write_pairs(path, options, args, ddp)
    if ddp.is_main:
        entries = [entry for entry in json.loads(path.read_text())
                   if len(entry["preferred_seq"]) <= longest]
        write_text_atomic(path, json.dumps(entries, indent=1) + "\n")
    barrier(ddp)
    return path


def correlation(sedd, proteins, args):
    """Text: Spearman's correlation over all mutations, and the mean of those of proteins."""
    scores = []
    for protein in proteins:
        S = protein.structure.chains[protein.chain].S
        wild_type = mutated(S, ())
        pairs = [(mutated(S, tuple(changes)), wild_type) for changes in protein.changes]
        scores.append(margins(sedd, pairs))
        print(f"scored {len(scores)} of {len(proteins)} proteins", file=sys.stderr)
    report = correlate_proteins(proteins, scores, args.lower_is_better)
    mean = report.mean.value if report.mean is not None else math.nan
    return f"{report.overall.value:>8.3f}{mean:>9.3f}"


# ---------------------------------------------------------------- both
@torch.no_grad()
def margins(sedd, couples):
    """(n,) estimates of ln p(first) - ln p(second), by noise that both share and that does not
    depend on the weights."""
    bounds = PairBounds(sedd.graph, sedd.noise, sedd.letters, LEVELS)
    device = next(sedd.model.parameters()).device
    pairs = []
    for one, other in couples:
        one = encode(one)
        other = encode(other)
        pairs.append(SimpleNamespace(chosen=one, rejected=other, key=content_key(one, other)))
    found = []
    for first in range(0, len(pairs), AT_A_TIME):
        batch = bounds.batch(pairs, range(first, min(first + AT_A_TIME, len(pairs))), seed=0)
        batch = {name: value.to(device) if torch.is_tensor(value) else value
                 for name, value in batch.items()}
        batch["sigma"] = batch["sigma"].float()
        mask = None if batch["full"] else batch["mask"]
        scores = bounds.parts(sedd.model(batch["xt"], batch["sigma"], mask), batch).sum(1)
        found.append((scores[:, 0] - scores[:, 1]).cpu().double())
    return torch.cat(found).numpy()


def run_dpo(work_dir, base, pairs, keys, seed, args, ddp):  # noqa: PLR0913  (of one run)
    """Train one run to its end. Returns whether it came to its end."""
    config = load_config(Config, args.config, [*keys, f"training.seed={seed}"],
                         {"model.base": str(base), "data.train_data": str(pairs)})
    print0(ddp, f"training, seed {seed}", file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):
        result = prepare_and_train(ddp, lambda: prepare(config, ddp, work_dir), train)
    if "stopped" in result:
        print0(ddp, "Stopped and saved. The same command goes on.")
    return "stopped" not in result


def processor():
    """Name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} thread(s)"
    return platform.processor() or platform.machine()


def main(argv):
    parser = CommandParser(prog="python -m bench learn dpo_sedd", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("table", type=Path, nargs="?",
                        help="CSV of measured mutations, as for pairs_from_scores.py")
    parser.add_argument("--base", type=Path, help="weights of SEDD; default: trained here, on the "
                        "demo source")
    parser.add_argument("--measured", default="ddg", metavar="COLUMN", help="default: ddg")
    parser.add_argument("--lower_is_better", action="store_true", help="of --measured")
    parser.add_argument("--margin", type=float, default=0.5, help="of pairs; default 0.5")
    parser.add_argument("--per_protein", type=int, default=20, help="most pairs; default 20")
    parser.add_argument("--config", default=CONFIGS / "dpo_sedd.yaml")
    parser.add_argument("--seeds", default=[0, 1, 2],
                        type=lambda text: [int(number) for number in text.split(",")],
                        help="default: 0,1,2")
    parser.add_argument("--folder", type=Path, default=Path("runs/learn_dpo_sedd"),
                        help="folder that keeps the runs")
    parser.add_argument("overrides", nargs="*", help="keys, such as optim.warmup=9")
    args = read_options(parser, argv)
    if args.table is not None and "=" in str(args.table):     # a key, and no table
        args.overrides.insert(0, str(args.table))
        args.table = None
    if args.table is not None and args.base is None:
        parser.error("--base is not given; expected weights of SEDD, trained on proteins")
    measure_the_cpu_by_default(args)
    bench = bench_demo if args.table is None else bench_mutations
    if not run_on_ranks("learn", bench, args, ["dpo_sedd", *argv]):
        sys.exit(AGAIN)
