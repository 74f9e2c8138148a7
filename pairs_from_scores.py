"""Make preference pairs for train_dpo_ddp.py from a table of scored designs.

    python pairs_from_scores.py designs.csv pairs.json --margin 0.5 --per_structure 50
    python pairs_from_scores.py energies.csv pairs.json --lower_is_better --weights

Reads a CSV file (comma or tab) with the columns pdb, sequence, score and chain (the designed one).
Writes a JSON list of pairs; paths of structures become relative to it. A pair is two different
sequences of the same structure and chain whose scores differ by at least --margin. The best is
paired with the worst, the second best with the second worst, and so on, at most --per_structure of
them, so that no sequence is used twice. A higher score is better, unless --lower_is_better is given
(energies, scores of sample_proteinmpnn.py). Equal sequences count once, by their mean score. With
--weights, the weight of a pair in the loss is its difference of scores over the mean difference of
all pairs; without, all pairs count alike. Prints how many pairs each structure gave. Wrong input
ends with one message, naming all its lines, and exit code 2; then nothing is written.
"""
import argparse
import collections
import csv
import json
import math
import os
import statistics
import sys
from pathlib import Path

from run_log import write_text_atomic
from sequence_data import LETTERS
from structure_data import LEAST_WEIGHT

COLUMNS = ("pdb", "sequence", "score", "chain")
MAX_LISTED = 10


def read_designs(path):
    """{(path of the structure, chain): {sequence: [scores]}} of a table.

    Raises: ValueError with all that is wrong, by line."""
    designs = collections.defaultdict(lambda: collections.defaultdict(list))
    problems = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        dialect = "excel-tab" if "\t" in file.readline() else "excel"
        file.seek(0)
        rows = csv.DictReader(file, dialect=dialect)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; expected the columns "
                             f"{', '.join(COLUMNS)} in its first line.")
        for row in rows:
            problem = wrong_in(row, path.parent)
            if problem:
                problems.append(f"line {rows.line_num}: {problem}")
                continue
            structure = os.path.normpath(os.path.join(path.parent, row["pdb"].strip()))
            scores, text = designs[structure, row["chain"].strip()], row["sequence"].strip().upper()
            if len(text) != len(next(iter(scores), text)):
                problems.append(f"line {rows.line_num}: found {len(text)} residues; expected "
                                f"{len(next(iter(scores)))}, as above for this chain")
            scores[text].append(float(row["score"]))
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] * (len(problems) > MAX_LISTED)
        raise ValueError("\n  ".join([f"{path}: {len(problems)} lines cannot be used:",
                                      *problems[:MAX_LISTED], *more]))
    if not designs:
        raise ValueError(f"{path} holds no design; expected lines below its first.")
    return designs


def wrong_in(row, folder):
    """What is wrong in a row of the table, or ""."""
    if None in row.values() or None in row:
        return "found more or fewer cells than columns"
    wrong = sorted(set(row["sequence"].strip().upper()) - set(LETTERS + "-"))
    if wrong or not row["sequence"].strip():
        return f"found {' '.join(wrong) or 'nothing'} in the sequence; expected letters {LETTERS}"
    try:
        finite = math.isfinite(float(row["score"]))
    except ValueError:
        finite = False
    if not finite:
        return f"found the score {row['score']!r}; expected a number"
    if not row["chain"].strip():
        return "found no chain; expected the name of the designed one, such as A"
    if not os.path.isfile(os.path.join(folder, row["pdb"].strip())):
        return f"there is no file {row['pdb']}"
    return ""


def make_pairs(scores, margin, most, lower_is_better=False):
    """[(better sequence, worse sequence, difference of scores)] of one structure, see the head of
    this file.

    scores: {sequence: [scores]}. margin: least difference. most: number of pairs, or None."""
    sign = -1 if lower_is_better else 1
    ranked = sorted(((sign * statistics.fmean(values), sequence)
                     for sequence, values in scores.items()), reverse=True)
    pairs = []
    for (better, chosen), (worse, rejected) in zip(ranked[:len(ranked) // 2], reversed(ranked)):
        if better > worse and better - worse >= margin and len(pairs) != most:
            pairs.append((chosen, rejected, better - worse))
    return pairs


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("table", type=Path, help="CSV file")
    add("pairs", type=Path, help="JSON file to write")
    add("--margin", type=float, default=0.0, help="least difference of scores (default 0)")
    add("--per_structure", type=int, help="most pairs of a structure (default: all)")
    add("--lower_is_better", action="store_true", help="such as for energies")
    add("--weights", action="store_true", help="weigh pairs by their difference of scores")
    args = parser.parse_args(argv)
    try:
        if not args.margin >= 0 or args.per_structure is not None and args.per_structure < 1:
            raise ValueError(f"found --margin {args.margin}, --per_structure "
                             f"{args.per_structure}; expected at least 0, and at least 1.")
        entries, differences, counts = [], [], collections.Counter()
        designs = read_designs(args.table)
        for (structure, chain), scores in designs.items():
            relative = os.path.relpath(structure, args.pairs.absolute().parent)
            room = args.per_structure and args.per_structure - counts[structure]
            found = make_pairs(scores, args.margin, room, args.lower_is_better)
            counts[structure] += len(found)
            entries += [{"pdb_file": relative, "chain_id": chain, "preferred_seq": chosen,
                         "unpreferred_seq": rejected} for chosen, rejected, _ in found]
            differences += [difference for _, _, difference in found]
        if not entries:
            raise ValueError(f"{args.table}: no two sequences of a structure differ by "
                             f"{args.margin:g} in their scores; lower --margin.")
        if args.weights:
            mean = statistics.fmean(differences)
            for entry, difference in zip(entries, differences):
                entry["weight"] = max(float(f"{difference / mean:.6g}"), LEAST_WEIGHT)
        write_text_atomic(args.pairs, json.dumps(entries, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"pairs_from_scores.py: error: {error}", file=sys.stderr)
        return 2
    for structure, n in counts.items():
        print(f"{n:>6}  {structure}")
    used = sum(map(len, designs.values()))
    if args.weights:
        weights = [entry["weight"] for entry in entries]
        print(f"weights {min(weights):g} to {max(weights):g}, median "
              f"{statistics.median(weights):g}")
    print(f"preferred: the {'lower' if args.lower_is_better else 'higher'} score")
    print(f"{len(entries):,} pairs of {used:,} sequences on {len(counts):,} structure(s), written "
          f"to {args.pairs}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
