"""Make preference pairs for train_dpo_ddp.py from a table of scored designs.

    python pairs_from_scores.py designs.csv pairs.json --margin 0.5 --per_structure 50
    python pairs_from_scores.py energies.csv pairs.json --lower_is_better --weights

Reads a CSV file (comma or tab) with the columns pdb, sequence, score and chain (the designed one),
and perhaps context (other chains, such as "B C", that the model shall see; without it the model
sees the designed chain alone). Writes a JSON list of pairs (.jsonl: one per line), with paths of
structures relative to its folder. A pair is two different sequences of the same structure and
chains whose scores differ by at least --margin. The best is paired with the worst, the second best
with the second worst, and so on, at most --per_structure of them, so that no sequence is used
twice. A higher score is better, unless --lower_is_better is given (energies, scores of
sample_proteinmpnn.py). Equal sequences count once, by their mean score. With --weights, the weight
of a pair in the loss is its difference of scores over the mean difference of all pairs; without,
all pairs count alike. Prints how many pairs each structure gave. Wrong input ends with one message,
naming up to ten of its lines, and exit code 2; then nothing is written.
"""
import argparse
import collections
import csv
import io
import json
import os
import statistics
import sys
from pathlib import Path

from run_log import write_text_atomic
from sequence_data import LETTERS
from structure_data import LEAST_WEIGHT

COLUMNS = ("pdb", "sequence", "score", "chain")
MAX_LISTED = 10
LARGEST_SCORE = 1e100   # sums of differences stay finite


def read_designs(path):
    """{(path of the structure, chain, its context): {sequence: [scores]}} of a table.

    Raises: ValueError with what is wrong, by line."""
    designs = collections.defaultdict(lambda: collections.defaultdict(list))
    problems = []
    for line, row in read_rows(path):
        problem = wrong_in(row, path.parent)
        if problem:
            problems.append(f"line {line}: {problem}")
            continue
        structure = os.path.normpath(os.path.join(path.parent, row["pdb"].strip()))
        context = tuple(sorted(context_of(row)))
        scores, text = designs[structure, row["chain"].strip(), context], row["sequence"]
        text = text.strip().upper()
        if len(text) != len(next(iter(scores), text)):
            problems.append(f"line {line}: found {len(text)} residues; expected "
                            f"{len(next(iter(scores)))}, as above for this chain")
        scores[text].append(float(row["score"]))
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] * (len(problems) > MAX_LISTED)
        raise ValueError("\n  ".join([f"{path}: {len(problems)} lines cannot be used:",
                                      *problems[:MAX_LISTED], *more]))
    if not designs:
        raise ValueError(f"{path} holds no design; expected lines below its first.")
    return designs


def read_rows(path):
    """[(number of its last line, {column: text})] of a table. Raises: ValueError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        dialect = "excel-tab" if "\t" in text.partition("\n")[0] else "excel"
        rows = csv.DictReader(io.StringIO(text, newline=""), dialect=dialect, skipinitialspace=True)
        found = [(rows.line_num, row) for row in rows]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table: {error}; expected CSV in UTF-8.") from None
    times = collections.Counter(rows.fieldnames)
    wrong = [name for name in COLUMNS if times[name] != 1] + ["context"] * (times["context"] > 1)
    if wrong:
        raise ValueError(f"{path} has no column {', '.join(wrong)}, or two; expected each of "
                         f"{', '.join(COLUMNS)} once in its first line.")
    return found


def context_of(row):
    """Names of the chains in the column context, which a table need not have."""
    return row.get("context", "").replace(",", " ").split()


def wrong_in(row, folder):
    """What is wrong in a row of the table, or ""."""
    if None in row.values() or None in row:
        return "found more or fewer cells than columns"
    wrong = sorted(set(row["sequence"].strip().upper()) - set(LETTERS + "-"))
    if wrong or not row["sequence"].strip():
        return f"found {' '.join(wrong) or 'nothing'} in the sequence; expected letters {LETTERS}"
    try:
        usable = abs(float(row["score"])) < LARGEST_SCORE   # not for nan
    except ValueError:
        usable = False
    if not usable:
        return f"found the score {row['score']!r}; expected a number below {LARGEST_SCORE:g}"
    if not row["chain"].strip():
        return "found no chain; expected the name of the designed one, such as A"
    named = [row["chain"].strip(), *context_of(row)]
    if len({*named}) < len(named):
        return f"found the chains {' '.join(named)}; expected each once, the designed one first"
    if not os.path.isfile(os.path.join(folder, row["pdb"].strip())):
        return f"there is no file {row['pdb']}"
    return ""


def make_pairs(scores, margin, most, lower_is_better=False):
    """[(better sequence, worse sequence, difference of scores)] of one chain of a structure, see
    the head of this file.

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
        for path in (args.table, *(structure for structure, *_ in designs)):
            if args.pairs.exists() and args.pairs.samefile(path):
                raise ValueError(f"{args.pairs} is the table or a structure that it names; "
                                 "expected another file to write.")
        for (structure, chain, context), scores in designs.items():
            chains = ({"design_chains": [chain], "fixed_chains": list(context)} if context else
                      {"chain_id": chain})
            folder, name = os.path.split(structure)   # a link that leads elsewhere has another ".."
            relative = os.path.relpath(os.path.join(os.path.realpath(folder), name),
                                       os.path.realpath(args.pairs.parent))
            room = args.per_structure and args.per_structure - counts[structure]
            found = make_pairs(scores, args.margin, room, args.lower_is_better)
            counts[structure] += len(found)
            entries += [{"pdb_file": relative, **chains, "preferred_seq": chosen,
                         "unpreferred_seq": rejected} for chosen, rejected, _ in found]
            differences += [difference for _, _, difference in found]
        if not entries:
            raise ValueError(f"{args.table}: no two sequences of a structure differ by "
                             f"{args.margin:g} in their scores; lower --margin.")
        if args.weights:
            mean = statistics.fmean(differences)
            for entry, difference in zip(entries, differences):
                entry["weight"] = max(float(f"{difference / mean:.6g}"), LEAST_WEIGHT)
        text = ("\n".join(map(json.dumps, entries)) if args.pairs.suffix == ".jsonl" else
                json.dumps(entries, indent=1))
        write_text_atomic(args.pairs, text + "\n")
    except (ValueError, OSError) as error:
        print(f"pairs_from_scores.py: error: {error}", file=sys.stderr)
        return 2
    for structure, n in counts.items():
        print(f"{n:>6}  {structure}")
    n_sequences, n_used = sum(map(len, designs.values())), sum(map(bool, counts.values()))
    if args.weights:
        weights = [entry["weight"] for entry in entries]
        print(f"weights {min(weights):g} to {max(weights):g}, median "
              f"{statistics.median(weights):g}")
    print(f"preferred: the {'lower' if args.lower_is_better else 'higher'} score")
    print(f"{len(entries):,} pairs on {n_used:,} of {len(counts):,} structure(s), from "
          f"{n_sequences:,} sequences, written to {args.pairs}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
