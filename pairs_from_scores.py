"""Make preference pairs for train_dpo_ddp.py from a table of scored designs.

    python pairs_from_scores.py designs.csv pairs.json --margin 0.5 --per_structure 50
    python pairs_from_scores.py energies.csv pairs.json --lower_is_better --weights

Reads a CSV file (comma or tab) with the columns pdb, sequence, score and chain (the designed one),
and optionally context (other chains, such as "B C", that the model shall see; without it the model
sees the designed chain alone). Writes a JSON list of pairs (.jsonl: one per line); paths of
structures are relative to the file's folder. A pair is two sequences of the same structure and
chains whose scores differ by at least --margin. The best is paired with the worst, the second best
with the second worst, and so on, at most --per_structure pairs; no sequence is used twice. A higher
score is better, unless --lower_is_better is given (energies, scores of sample_proteinmpnn.py).
Duplicates of a sequence count once, with their mean score. With --weights, the weight of a pair in
the loss is its difference of scores divided by the mean difference of all pairs; otherwise all
weights are 1. Prints the number of pairs per structure. Wrong input ends with one message, which
lists up to ten bad lines, and exit code 2; then nothing is written.
"""
import collections
import json
import math
import os
import statistics
import sys
from pathlib import Path

from mpnn.pairs import LEAST_WEIGHT
from mpnn.tables import check_cells, read_rows, refuse_lines
from sedd.sequences import LETTERS
from training.config import Parser
from training.files import write_text_atomic

COLUMNS = ("pdb", "sequence", "score", "chain")
LARGEST_SCORE = 1e100   # so that sums of differences stay finite


def read_designs(path: Path) -> dict:
    """{(path of the structure, chain, context chains): {sequence: [scores]}} of a table.

    Raises: ValueError that lists the problems by line."""
    designs = collections.defaultdict(lambda: collections.defaultdict(list))
    problems = []
    for line, row in read_rows(path, COLUMNS, ("context",)):
        try:
            place, sequence, score = parse_row(row, path.parent)
            scores = designs[place]
            length = len(next(iter(scores), sequence))
            if len(sequence) != length:
                raise ValueError(f"found {len(sequence)} residues; expected {length}, as in the "
                                 "lines above for this chain")
            scores[sequence].append(score)
        except ValueError as error:
            problems.append(f"line {line}: {error}")
    refuse_lines(path, problems)
    if not designs:
        raise ValueError(f"{path} holds no design; expected lines below the header.")
    return designs


def parse_row(row, folder):
    """((path of the structure, chain, context chains), sequence, score) of a row of a table.

    folder: paths in the table are relative to it. Raises: ValueError with what is wrong."""
    cells = check_cells(row)
    sequence = cells["sequence"].upper().replace("-", "X")
    chain = cells["chain"]
    context = cells.get("context", "").replace(",", " ").split()
    chains = [chain, *context]
    wrong = sorted(set(sequence) - set(LETTERS))
    if wrong or not sequence:
        raise ValueError(f"found {' '.join(wrong) or 'nothing'} in the sequence; expected letters "
                         f"{LETTERS}")
    try:
        score = float(cells["score"])
    except ValueError:
        score = math.nan
    if not abs(score) < LARGEST_SCORE:   # `not <` is true for nan too
        raise ValueError(f"found the score {cells['score']!r:.60}; expected a number below "
                         f"{LARGEST_SCORE:g}")
    if not chain:
        raise ValueError("found no chain; expected the name of the designed one, such as A")
    if len(set(chains)) < len(chains):
        raise ValueError(f"found the chains {' '.join(chains)}; expected each once, the designed "
                         "one first")
    path = folder / cells["pdb"]   # follow links to folders (".." depends on them), not to the file
    structure = path.parent.resolve() / path.name
    if not os.path.isfile(structure):   # False for a name that is too long, too
        raise ValueError(f"there is no file {cells['pdb']:.200}")
    return (structure, chain, tuple(sorted(context))), sequence, score


def make_pairs(scores: dict, margin: float, most: int | None,
               lower_is_better: bool = False) -> list[tuple]:
    """[(better sequence, worse sequence, difference of scores)] of one chain of a structure.

    scores: {sequence: [scores]}. margin: least difference. most: most pairs, or None for all."""
    sign = -1 if lower_is_better else 1
    ranked = sorted(((sign * statistics.fmean(values), sequence)
                     for sequence, values in scores.items()), reverse=True)
    least = margin * (1 - 1e-9)         # allows for rounding
    pairs = []
    for (better, chosen), (worse, rejected) in zip(ranked[:len(ranked) // 2], reversed(ranked)):
        if better > worse and better - worse >= least:
            pairs.append((chosen, rejected, better - worse))
    return pairs[:most]


def make_entries(designs, args):
    """Entries of the file of pairs, and {structure: number of its pairs}. ValueError for none."""
    entries = []
    differences = []
    counts = collections.Counter()
    for (structure, chain, context), scores in designs.items():
        chains = {"chain_id": chain}
        if context:
            chains = {"design_chains": [chain], "fixed_chains": list(context)}
        relative = os.path.relpath(structure, args.pairs.parent.resolve())
        room = None
        if args.per_structure is not None:
            room = args.per_structure - counts[structure]
        found = make_pairs(scores, args.margin, room, args.lower_is_better)
        counts[structure] += len(found)
        for chosen, rejected, difference in found:
            entries.append({"pdb_file": relative, **chains, "preferred_seq": chosen,
                            "unpreferred_seq": rejected})
            differences.append(difference)
    if not entries:
        by = ""
        advice = ""
        if args.margin:
            by = f" by {args.margin:g} or more"
            advice = " Lower --margin."
        raise ValueError(f"{args.table}: no two sequences of a structure differ in their scores"
                         f"{by}; expected at least one such pair.{advice}")
    if args.weights:
        mean = statistics.fmean(differences)
        for entry, difference in zip(entries, differences):
            entry["weight"] = max(float(f"{difference / mean:.6g}"), LEAST_WEIGHT)
    return entries, counts


def check_options(args):
    """ValueError for numbers that make no sense."""
    if not args.margin >= 0 or (args.per_structure is not None and args.per_structure < 1):
        raise ValueError(f"found --margin {args.margin}, --per_structure "
                         f"{args.per_structure}; expected at least 0, and at least 1.")


def check_output(args, designs):
    """ValueError for a file to write that is also read."""
    for path in (args.table, *(structure for structure, *_ in designs)):
        if args.pairs.exists() and args.pairs.samefile(path):
            raise ValueError(f"{args.pairs} is the table or a structure that it names; "
                             "expected another file to write.")


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("table", type=Path, help="CSV file")
    add("pairs", type=Path, help="JSON file to write")
    add("--margin", type=float, default=0.0, help="least difference of scores (default 0)")
    add("--per_structure", type=int, help="most pairs of a structure (default: all)")
    add("--lower_is_better", action="store_true", help="such as for energies")
    add("--weights", action="store_true", help="weigh pairs by their difference of scores")
    return parser


def main(argv):
    try:
        args = make_parser().parse_args(argv)
        check_options(args)
        designs = read_designs(args.table)
        check_output(args, designs)
        entries, counts = make_entries(designs, args)
        if args.pairs.suffix.lower() == ".jsonl":
            text = "\n".join(json.dumps(entry) for entry in entries)
        else:
            text = json.dumps(entries, indent=1)
        write_text_atomic(args.pairs, text + "\n")
    except (ValueError, OSError) as error:
        print(f"pairs_from_scores.py: error: {error}", file=sys.stderr)
        return 2
    say_result(args, designs, entries, counts)
    return 0


def say_result(args, designs, entries, counts):
    """Print what was written: pairs per structure, weights, totals."""
    for structure, n in counts.items():
        print(f"{n:>6}  {os.path.relpath(structure)}")
    if args.weights:
        weights = [entry["weight"] for entry in entries]
        print(f"weights {min(weights):g} to {max(weights):g}, median "
              f"{statistics.median(weights):g}")
    print(f"preferred: the {'lower' if args.lower_is_better else 'higher'} score")
    n_sequences = sum(len(scores) for scores in designs.values())
    n_used = sum(n > 0 for n in counts.values())
    print(f"{len(entries):,} pairs on {n_used:,} of {len(counts):,} structure(s), from "
          f"{n_sequences:,} sequences, written to {args.pairs}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
