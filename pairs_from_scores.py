"""Make preference pairs for train_dpo_ddp.py from scored designs.

    python pairs_from_scores.py designs.csv pairs.json --margin 0.5 --per_structure 50
    python pairs_from_scores.py energies.csv pairs.json --lower_is_better --weights

Reads a CSV file (comma or tab) with a column of scores: `score`, or that of --score. A higher score
is better, unless --lower_is_better is given (energies, scores of sample_proteinmpnn.py). Writes a
JSON list of pairs (.jsonl: one per line); paths of structures are relative to the file's folder.

The columns: pdb (path, relative to the table), sequence, and chain (the designed one; of several,
"A C" with the sequence AAA/CCC), and optionally context (other chains, such as "B D", that the
model shall see; without it the model sees the designed chains alone). designs.csv, which
sample_proteinmpnn.py writes with --out_folder, has these: add a column with your score. Designs
without a score (an empty cell, NA, nan) are left out.

A pair is two sequences of the same structure and chains whose scores differ by at least --margin.
The best is paired with the worst, the second best with the second worst, and so on; no sequence is
used twice. --per_structure N draws N of the pairs of each structure, by a hash of their sequences:
the same ones in any order of lines. Duplicates of a sequence count once, with their mean score; a
line says how many there are, and how far they differ. The column mpnn_score of designs.csv, for
which lower is better, needs --lower_is_better.

With --weights, the weight of a pair in the loss is its difference of scores divided by the mean
difference of all pairs; otherwise all weights are 1. Prints the number of pairs per structure.
Wrong input ends with one message, which lists up to three bad lines, and exit code 2; then nothing
is written. Tables of measured mutations need no pairs: train_dpo_ddp.py reads them with
loss.unit=table.
"""
import collections
import json
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from dpo.pair_files import LEAST_WEIGHT
from proteins.csv_files import (
    describe_duplicates,
    is_no_value,
    read_number,
    read_rows,
    read_table_text,
    refuse_all,
    table_columns,
)
from proteins.letters import LETTERS
from proteins.scores import absolute
from proteins.seeds import content_key
from training.files import check_output, write_text_atomic
from training.parser import Parser
from training.problems import in_columns

MPNN_SCORE = "mpnn_score"   # column of sample_proteinmpnn.py: -ln p per residue, lower is better


class Place(NamedTuple):
    """What sequences are for."""
    structure: Path         # of a sequence alone: a name, and no file
    design: tuple           # names of the designed chains, sorted
    context: tuple          # names of the other chains that the model sees, sorted


# ---- the table ----

def read_designs(path: Path, column: str = "score") -> tuple[dict, int]:
    """{Place: {sequence: [scores]}} of a table, and how many of its designs have no score.
    column: of scores.

    Raises: ValueError that lists the problems by line."""
    designs = collections.defaultdict(lambda: collections.defaultdict(list))
    n_unscored = 0
    problems = []
    for line, cells in read_rows(path, ("pdb", "sequence", column, "chain")):
        try:
            if is_no_value(cells[column]):
                n_unscored += 1
                continue
            place, sequence, score = parse_row(cells, path.parent, column)
            add_design(designs, place, sequence, score)
        except ValueError as error:
            problems.append(f"line {line}: {error}")
    refuse_all(path, problems)
    if not designs:
        raise ValueError(f"{path} holds no design with a score; expected lines below the header.")
    return designs, n_unscored


def add_design(designs, place, sequence, score):
    """Add a score. ValueError for another length than that of the sequences before."""
    scores = designs[place]
    length = len(next(iter(scores), sequence))
    if len(sequence) != length:
        raise ValueError(f"found {len(sequence)} residues; expected {length}, as in the lines "
                         "above for this chain")
    scores[sequence].append(score)


def parse_row(cells, folder, column):
    """(Place, sequence, score) of the cells of a row of a table.

    folder: paths in the table are relative to it. Raises: ValueError with what is wrong."""
    chains = cells["chain"].replace(",", " ").split()
    context = cells.get("context", "").replace(",", " ").split()
    parts = parse_sequence(cells["sequence"])
    score = read_number(cells[column], column)
    if not chains:
        raise ValueError("found no chain; expected the name of the designed one, such as A, or of "
                         "several, such as A C")
    named = [*chains, *context]
    if len(set(named)) < len(named):
        raise ValueError(f"found the chains {' '.join(named)}; expected each once, the designed "
                         "one first")
    structure = absolute(folder / cells["pdb"])
    if not os.path.isfile(structure):   # False for a name that is too long, too
        raise ValueError(f"there is no file {cells['pdb']:.200}")
    return (*place_sequence(structure, chains, context, parts), score)


def parse_sequence(text):
    """The letters of each chain, which / separates. ValueError for other letters."""
    parts = text.upper().replace("-", "X").split("/")
    wrong = sorted(set("".join(parts)) - set(LETTERS))
    if wrong or not all(parts):
        raise ValueError(f"found {' '.join(wrong) or 'nothing'} in the sequence; expected letters "
                         f"{LETTERS}")
    return parts


def place_sequence(structure, chains, context, parts):
    """(Place, sequence in its order of chains) of the letters `parts` of each of the chains."""
    if len(parts) != len(chains):
        raise ValueError(f"found {len(parts)} sequence(s), separated by /, for the chains "
                         f"{' '.join(chains)}; expected one for each")
    by_name = dict(zip(chains, parts))
    place = Place(structure, tuple(sorted(chains)), tuple(sorted(context)))
    return place, "".join(by_name[name] for name in place.design)


# ---- pairs ----

class PairOfDesigns(NamedTuple):
    """Two designs, the better one first."""
    place: Place
    chosen: str
    rejected: str
    difference: float       # of their scores, above 0


def pairs_of_designs(designs, args):
    """List of PairOfDesigns, largest difference of a place first."""
    pairs = []
    for place, scores in designs.items():
        pairs += [PairOfDesigns(place, *pair)
                  for pair in make_pairs(scores, args.margin, args.lower_is_better)]
    if args.per_structure is None:
        return pairs
    by_structure = collections.defaultdict(list)
    for pair in pairs:
        by_structure[pair.place.structure].append(pair)
    kept = set()
    for pairs_of_one in by_structure.values():
        # The largest differences would teach the least: what the model likely knows already.
        kept.update(sorted(pairs_of_one, key=draw_of_pair)[:args.per_structure])
    return [pair for pair in pairs if pair in kept]


def draw_of_pair(pair):
    """An integer that depends on a pair's letters and chains alone, whatever the order of lines."""
    return content_key(pair.chosen, pair.rejected, pair.place.design, pair.place.context)


def make_pairs(scores: dict, margin: float, lower_is_better: bool = False) -> list[tuple]:
    """[(better sequence, worse sequence, difference of scores)] of one chain of a structure.

    scores: {sequence: [scores]}. margin: least difference."""
    sign = -1 if lower_is_better else 1
    ranked = sorted(((sign * statistics.fmean(values), sequence)
                     for sequence, values in scores.items()), reverse=True)
    least = margin * (1 - 1e-9)         # allows for rounding
    pairs = []
    for (better, chosen), (worse, rejected) in zip(ranked[:len(ranked) // 2], reversed(ranked)):
        if better > worse and better - worse >= least:
            pairs.append((chosen, rejected, better - worse))
    return pairs


def make_entries(pairs, args, notes):
    """Entries of the file of PairOfDesigns. ValueError for none.

    notes: lines on the table, for the message."""
    if not pairs:
        by = ""
        advice = ""
        if args.margin:
            by = f" by {args.margin:g} or more"
            advice = " Lower --margin."
        message = (f"{args.table}: no two sequences of a structure differ in their scores{by}; "
                   f"expected at least one such pair.{advice}")
        raise ValueError("\n  ".join([message, *notes]))
    mean = statistics.fmean(pair.difference for pair in pairs)
    entries = []
    for pair in pairs:
        place = pair.place
        entry = {"pdb_file": os.path.relpath(place.structure, args.pairs.parent.resolve())}
        if place.context or len(place.design) > 1:
            entry["design_chains"] = list(place.design)
            entry["fixed_chains"] = list(place.context)
        else:
            entry["chain_id"] = place.design[0]
        entry["preferred_seq"] = pair.chosen
        entry["unpreferred_seq"] = pair.rejected
        if args.weights:
            entry["weight"] = max(float(f"{pair.difference / mean:.6g}"), LEAST_WEIGHT)
        entries.append(entry)
    return entries


# ---- command ----

def check_is_of_designs(path):
    """ValueError for a table of mutations."""
    if "mutation" in table_columns(read_table_text(path)):
        raise ValueError(f"{path} is a table of mutations; expected scored designs. "
                         "train_dpo_ddp.py reads a table of mutations as it is, with "
                         "loss.unit=table.")


def check_options(args):
    """ValueError for options that make no sense."""
    if not args.margin >= 0 or (args.per_structure is not None and args.per_structure < 1):
        raise ValueError(f"found --margin {args.margin}, --per_structure "
                         f"{args.per_structure}; expected at least 0, and at least 1.")
    if args.score == MPNN_SCORE and not args.lower_is_better:
        raise ValueError(f"found --score {MPNN_SCORE} without --lower_is_better; expected both: "
                         "the lower it is, the better ProteinMPNN rates the design.")


def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("table", type=Path, help="CSV file")
    add("pairs", type=Path, help="JSON file to write")
    add("--margin", type=float, default=0.0, help="least difference of scores (default 0)")
    add("--per_structure", type=int, help="most pairs of a structure, drawn (default: all)")
    add("--lower_is_better", action="store_true", help="such as for energies")
    add("--score", default="score", metavar="COLUMN", help="column of scores (default: score)")
    add("--weights", action="store_true", help="weigh pairs by their difference of scores")
    return parser


def main(argv):
    try:
        args = make_parser().parse_args(argv)
        check_options(args)
        check_is_of_designs(args.table)
        designs, n_unscored = read_designs(args.table, args.score)
        structures = {place.structure for place in designs}
        check_output(args.pairs, [args.table, *structures])
        values = [each for scores in designs.values() for each in scores.values()]
        notes = describe_duplicates(values, "designs", "their means count")
        if n_unscored:
            notes.append(f"{n_unscored:,} design(s) without a score in {args.score} are left out")
        pairs = pairs_of_designs(designs, args)
        entries = make_entries(pairs, args, notes)
        if args.pairs.suffix.lower() == ".jsonl":
            text = "\n".join(json.dumps(entry) for entry in entries)
        else:
            text = json.dumps(entries, indent=1)
        write_text_atomic(args.pairs, text + "\n")
        say_result(args, len(values), pairs, entries, [*designs], notes)
        return 0
    except (ValueError, OSError) as error:
        print(in_columns(f"pairs_from_scores.py: error: {error}"), file=sys.stderr)
        return 2


def say_result(args, n_sequences, pairs, entries, places, notes):  # noqa: PLR0913  (all of a run)
    """Print what was written: pairs per structure, weights, totals. notes: further lines."""
    counts = dict.fromkeys((place.structure for place in places), 0)
    for pair in pairs:
        counts[pair.place.structure] += 1
    for structure, n in counts.items():
        print(f"{n:>6}  {os.path.relpath(structure)}")
    if args.weights:
        weights = [entry["weight"] for entry in entries]
        print(f"weights {min(weights):g} to {max(weights):g}, median "
              f"{statistics.median(weights):g}")
    print(f"preferred: the {'lower' if args.lower_is_better else 'higher'} score")
    for note in notes:
        print(note)
    n_used = sum(n > 0 for n in counts.values())
    print(f"{len(pairs):,} pairs on {n_used:,} of {len(counts):,} structure(s), from "
          f"{n_sequences:,} sequences, written to {args.pairs}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
