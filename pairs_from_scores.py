"""Make preference pairs for train_dpo_ddp.py from scored designs or from measured mutations.

    python pairs_from_scores.py designs.csv pairs.json --margin 0.5 --per_structure 50
    python pairs_from_scores.py energies.csv pairs.json --lower_is_better --weights
    python pairs_from_scores.py s2648.csv pairs.json --score ddg --lower_is_better --margin 0.5 \\
        --hold_out 0.2

Reads a CSV file (comma or tab) with a column of scores: `score`, or that of --score. A higher score
is better, unless --lower_is_better is given (energies, scores of sample_proteinmpnn.py). Writes a
JSON list of pairs (.jsonl: one per line); paths of structures are relative to the file's folder.

Designs: columns pdb (path, relative to the table), sequence, and chain (the designed one; of
several, "A C" with the sequence AAA/CCC), and optionally context (other chains, such as "B D", that
the model shall see; without it the model sees the designed chains alone). designs.csv, which
sample_proteinmpnn.py writes with --out_folder, has these: add a column with your score. Designs
whose score is empty are left out.

A pair is two sequences of the same structure and chains whose scores differ by at least --margin.
The best is paired with the worst, the second best with the second worst, and so on, at most
--per_structure pairs; no sequence is used twice. Duplicates of a sequence count once, with their
mean score; a line says how many there are, and how far they differ.

Mutations: a column mutation, such as A12V or A12V:G45D, and pdb_file, perhaps chain and context
(see proteins/mutations.py); give --higher_is_better or --lower_is_better. Pairs of a structure are
each variant against the wild type, whose score is --wild_type (0), and variants against one
another: in each of --rounds rounds (2) all are shuffled, and neighbours paired. --against wild_type
or mutants makes one of the two kinds. A wild type that is worse than nearly all variants is refused
unless --wild_type says so: fitness often gives it 1. Of pairs that differ by at least --margin the
--per_structure with the largest differences are kept. Only the positions at which the two differ
are mutable_positions. Duplicates count once, as those of designs. Lines without a score are left
out; so are those that do not fit the structure, which are named; if most do not, nothing is
written. --hold_out 0.2 leaves out all mutations of about a fifth of the proteins, chosen by a hash
of the mutated chain's sequence, and writes them to a table beside the pairs (pairs.json:
pairs_held_out.csv), with which score_mutations.py --mutations measures what training has gained on
proteins that it did not see. Those with a relative in the pairs, of 30 % identity or more, are
named; split_mutations.py keeps relatives together. --ca_only reads CA atoms alone, for pairs on
which a CA-only model is trained; a residue then needs no other atom.

For train_dpo_ddp.py with model.kind=sedd, which needs no structures: the table of mutations has a
column sequence in place of pdb_file, the wild type, whose residues count from 1; or --sequences
leaves the structures out. Then pairs have sequences and a group, the wild type's sequence.

With --weights, the weight of a pair in the loss is its difference of scores divided by the mean
difference of all pairs; otherwise all weights are 1. Prints the number of pairs per structure.
Wrong input ends with one message, which lists up to ten bad lines, and exit code 2; then nothing is
written.
"""
import collections
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from dpo.mutation_pairs import AGAINST, WILD_TYPE, Rules, mutated, pair_mutations
from dpo.pair_files import LEAST_WEIGHT
from proteins.identity import RELATED, find_relatives, hold_out_proteins
from proteins.letters import LETTERS
from proteins.mutations import (absolute, columns_of, describe_skipped, measured_values,
                                place_named, read_mutations, variants_text)
from proteins.structures import describe_modified
from proteins.tables import (MAX_LISTED, check_cells, describe_duplicates, read_rows,
                             read_table_text, refuse_all, table_columns)
from training.files import check_output, write_text_atomic
from training.parser import Parser

LARGEST_SCORE = 1e100   # so that sums of differences stay finite
MOST_ROUNDS = 1000
# Options that only tables of mutations use
MUTATION_OPTIONS = ("against", "wild_type", "rounds", "hold_out", "ca_only", "sequences")
FOR_RULES = ("against", "wild_type", "rounds")
SELDOM = 0.05           # part of the pairs with the wild type: if it is preferred in fewer, its
FEWEST_PAIRS = 10       # score is hardly what was assumed; of at least so many pairs


class Place(NamedTuple):
    """What sequences are for."""
    structure: Path         # of a sequence alone: a name, and no file
    design: tuple           # names of the designed chains, sorted
    context: tuple          # names of the other chains that the model sees, sorted


# ---- tables of designs ----

def read_designs(path: Path, column: str = "score") -> tuple[dict, int]:
    """{Place: {sequence: [scores]}} of a table, and how many of its designs have no score.
    column: of scores.

    Raises: ValueError that lists the problems by line."""
    designs = collections.defaultdict(lambda: collections.defaultdict(list))
    n_unscored = 0
    problems = []
    for line, row in read_rows(path, ("pdb", "sequence", column, "chain"), ("context",)):
        try:
            cells = check_cells(row)
            if not cells[column]:
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
    score = parse_score(cells[column])
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


def parse_score(text):
    """The number. Raises: ValueError."""
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not abs(score) < LARGEST_SCORE:   # `not <` is true for nan too
        raise ValueError(f"found the score {text!r:.60}; expected a number below "
                         f"{LARGEST_SCORE:g}")
    return score


def place_sequence(structure, chains, context, parts):
    """(Place, sequence in its order of chains) of the letters `parts` of each of the chains."""
    if len(parts) != len(chains):
        raise ValueError(f"found {len(parts)} sequence(s), separated by /, for the chains "
                         f"{' '.join(chains)}; expected one for each")
    by_name = dict(zip(chains, parts))
    place = Place(structure, tuple(sorted(chains)), tuple(sorted(context)))
    return place, "".join(by_name[name] for name in place.design)


# ---- pairs ----

def pairs_of_designs(designs, args):
    """[(Place, [entry without structure and chains], [difference])], a row for each place."""
    found = []
    counts = collections.Counter()
    for place, scores in designs.items():
        room = None
        if args.per_structure is not None:
            room = args.per_structure - counts[place.structure]
        pairs = make_pairs(scores, args.margin, room, args.lower_is_better)
        counts[place.structure] += len(pairs)
        entries = [{"preferred_seq": chosen, "unpreferred_seq": rejected}
                   for chosen, rejected, _ in pairs]
        found.append((place, entries, [difference for _, _, difference in pairs]))
    return found


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


def pairs_of_mutations(args):
    """As pairs_of_designs, of a table of mutations; number of its variants; proteins held out;
    lines to print on the wild type."""
    table = read_mutations(args.table, args.score)
    check_outputs(args, table.structures)
    proteins = proteins_of(table, args)
    held_out = []
    if args.hold_out is not None:
        proteins, held_out = hold_out_proteins(proteins, args.hold_out)
        warn_of_relatives(held_out, proteins)
    rules = Rules(margin=args.margin, lower_is_better=args.lower_is_better)
    for name in FOR_RULES:
        if getattr(args, name) is not None:
            rules = rules._replace(**{name: getattr(args, name)})
    found = []
    counts = collections.Counter()
    values = []             # measured, of each variant
    wild_type_is = collections.Counter()    # better or worse than the other of its pair
    for protein in proteins:
        path = Path(protein.structure.name)
        if not table.has_sequences:
            path = absolute(path)
        place = Place(path, protein.complex.design, protein.complex.fixed)
        measured = measured_values(protein)
        values += measured.values()
        means = {variant: statistics.fmean(each) for variant, each in measured.items()}
        pairs = pair_mutations(means, rules, protein.complex.key)
        wild_type_is["better"] += sum(pair.better == WILD_TYPE for pair in pairs)
        wild_type_is["worse"] += sum(pair.worse == WILD_TYPE for pair in pairs)
        if args.per_structure is not None:
            pairs = pairs[:args.per_structure - counts[place.structure]]
        counts[place.structure] += len(pairs)
        S = protein.structure.chains[protein.chain].S
        entries = [entry_of_mutations(S, pair) for pair in pairs]
        if args.sequences or table.has_sequences:
            wild_type = mutated(S, ())
            entries = [without_structure(entry, wild_type) for entry in entries]
        found.append((place, entries, [pair.difference for pair in pairs]))
    notes = describe_wild_type(args, rules, wild_type_is)
    notes += describe_duplicates(values, "variants", "their means count")
    return found, len(values), held_out, notes


def describe_wild_type(args, rules, wild_type_is):
    """Lines on the score of the wild type. ValueError if it is worse than nearly all variants by
    a score that was not given: these pairs would teach the opposite.

    wild_type_is: {"better" or "worse": number of pairs}."""
    total = wild_type_is.total()
    if not total:
        return []
    better = wild_type_is["better"]
    if args.wild_type is None and total >= FEWEST_PAIRS and better < SELDOM * total:
        raise ValueError(
            f"{args.table}: the wild type, whose score is taken as {rules.wild_type:g}, is worse "
            f"than the mutant in {total - better:,} of {total:,} pairs; expected a score by which "
            "it is better in some. Give the score that it has in this table (such as --wild_type "
            "1 for many scores of fitness, or --wild_type 0 if this is right), --against mutants, "
            "which needs none, or the other of --higher_is_better and --lower_is_better.")
    # Of variants, not pairs: --per_structure may leave most of the pairs out.
    differ = " that differ by --margin" if rules.margin else ""
    return [f"wild type: score {rules.wild_type:g} (--wild_type), better than {better:,} of "
            f"{total:,} variants{differ}"]


def proteins_of(table, args):
    """The Proteins of a table of mutations; prints which variants fit none. Raises: ValueError."""
    proteins, skipped = place_named(table, bool(args.ca_only))
    if skipped.variants:
        print(describe_skipped(table, skipped), file=sys.stderr)
    modified = describe_modified(protein.structure for protein in proteins)
    if modified:
        print(modified, file=sys.stderr)
    return proteins


def warn_of_relatives(held_out, proteins):
    """Tell which proteins held out teach all the same, by a relative among those in the pairs."""
    relatives = find_relatives(held_out, proteins, RELATED)
    if not relatives:
        return
    listed = ", ".join(f"{name} ({other})" for name, other in relatives[:MAX_LISTED])
    if len(relatives) > MAX_LISTED:
        listed += f" and {len(relatives) - MAX_LISTED:,} more"
    print(f"ATTENTION: {len(relatives):,} of {len(held_out):,} proteins held out have a relative "
          f"(in brackets) in the pairs, so they are no strangers to what is trained: {listed}",
          file=sys.stderr)


def entry_of_mutations(S, pair):
    """Sequences and mutable positions of a pair of variants of the chain S (L,)."""
    better = mutated(S, pair.better)
    worse = mutated(S, pair.worse)
    differ = [row for row, (one, other) in enumerate(zip(better, worse)) if one != other]
    return {"preferred_seq": better, "unpreferred_seq": worse, "mutable_positions": differ}


def without_structure(entry, wild_type):
    """An entry of entry_of_mutations for a model of sequences.

    wild_type: names the group: unlike a number or a file's name, it is that of the same protein in
        the files of training and of validation, and of no other protein."""
    return {"preferred_seq": entry["preferred_seq"], "unpreferred_seq": entry["unpreferred_seq"],
            "group": wild_type}


def make_entries(found, args, notes):
    """Entries of the file of pairs, and {structure: number of its pairs}. ValueError for none.

    found: of pairs_of_designs. notes: lines on the table, for the message."""
    entries = []
    differences = []
    counts = collections.Counter()
    for place, of_place, its_differences in found:
        chains = {"chain_id": place.design[0]}
        if place.context or len(place.design) > 1:
            chains = {"design_chains": list(place.design), "fixed_chains": list(place.context)}
        relative = os.path.relpath(place.structure, args.pairs.parent.resolve())
        counts[place.structure] += len(of_place)
        of_structure = {"pdb_file": relative, **chains}
        for entry in of_place:
            entries.append(entry if "group" in entry else {**of_structure, **entry})
        differences += its_differences
    if not entries:
        by = ""
        advice = ""
        if args.margin:
            by = f" by {args.margin:g} or more"
            advice = " Lower --margin."
        message = (f"{args.table}: no two sequences of a structure differ in their scores{by}; "
                   f"expected at least one such pair.{advice}")
        raise ValueError("\n  ".join([message, *notes]))
    if args.weights:
        mean = statistics.fmean(differences)
        for entry, difference in zip(entries, differences):
            entry["weight"] = max(float(f"{difference / mean:.6g}"), LEAST_WEIGHT)
    return entries, counts


# ---- command ----

def make_all(args):
    """[(Place, entries, differences)] of the table, whatever its kind; number of sequences;
    proteins held out; lines to print."""
    has_mutations = "mutation" in table_columns(read_table_text(args.table))
    check_kind_of_table(args, has_mutations)
    if has_mutations:
        return pairs_of_mutations(args)
    designs, n_unscored = read_designs(args.table, args.score)
    values = [each for scores in designs.values() for each in scores.values()]
    notes = describe_duplicates(values, "designs", "their means count")
    if n_unscored:
        notes.append(f"{n_unscored:,} design(s) without a score in {args.score} are left out")
    return pairs_of_designs(designs, args), len(values), [], notes


def check_kind_of_table(args, has_mutations):
    """ValueError for options that do not fit the kind of the table."""
    given = [f"--{name}" for name in MUTATION_OPTIONS if getattr(args, name) is not None]
    if given and not has_mutations:
        raise ValueError(f"found {' '.join(given)}, but {args.table} has no column mutation; "
                         "expected both.")
    if has_mutations and args.higher_is_better == args.lower_is_better:
        raise ValueError(f"{args.table} is of mutations; expected --higher_is_better or "
                         "--lower_is_better (ddG: lower, if positive values are destabilising).")


def check_options(args):
    """ValueError for numbers that make no sense."""
    if args.higher_is_better and args.lower_is_better:
        raise ValueError("found --higher_is_better and --lower_is_better; expected one of them.")
    if args.rounds is not None and not 0 <= args.rounds <= MOST_ROUNDS:
        raise ValueError(f"found --rounds {args.rounds}; expected 0 to {MOST_ROUNDS}.")
    if args.wild_type is not None and not abs(args.wild_type) < LARGEST_SCORE:
        raise ValueError(f"found --wild_type {args.wild_type}; expected a number below "
                         f"{LARGEST_SCORE:g}.")
    if args.hold_out is not None and not 0 < args.hold_out < 1:
        raise ValueError(f"found --hold_out {args.hold_out}; expected a fraction of the proteins, "
                         "between 0 and 1, such as 0.2.")
    if not args.margin >= 0 or (args.per_structure is not None and args.per_structure < 1):
        raise ValueError(f"found --margin {args.margin}, --per_structure "
                         f"{args.per_structure}; expected at least 0, and at least 1.")


def held_out_file(pairs: Path) -> Path:
    """Where the mutations of proteins that are held out are written."""
    return pairs.with_name(f"{pairs.stem}_held_out.csv")


def check_outputs(args, structures):
    """ValueError for a file to write that is also read. structures: paths."""
    check_output(args.pairs, [args.table, *structures])
    if args.hold_out is not None:
        check_output(held_out_file(args.pairs), [args.table, *structures])


def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("table", type=Path, help="CSV file")
    add("pairs", type=Path, help="JSON file to write")
    add("--margin", type=float, default=0.0, help="least difference of scores (default 0)")
    add("--per_structure", type=int, help="most pairs of a structure (default: all)")
    add("--lower_is_better", action="store_true", help="such as for energies")
    add("--higher_is_better", action="store_true", help="the default, except for mutations")
    add("--score", default="score", metavar="COLUMN", help="column of scores (default: score)")
    add("--against", choices=AGAINST, help="of mutations: which pairs (default: both)")
    add("--wild_type", type=float, metavar="VALUE",
        help="its score: default 0, as of ddG; fitness often gives it 1")
    add("--rounds", type=int, help="how many others each mutant meets (default 2)")
    add("--hold_out", type=float, metavar="FRACTION",
        help="of proteins of a table of mutations that are left out, and written to a table")
    add("--ca_only", action="store_true", default=None,
        help="of mutations: read CA atoms alone, for a CA-only model")
    add("--sequences", action="store_true", default=None,
        help="of mutations: pairs of sequences without structures, for model.kind=sedd")
    add("--weights", action="store_true", help="weigh pairs by their difference of scores")
    return parser


def main(argv):
    try:
        if any(word.partition("=")[0] == "--designs" for word in argv):
            raise ValueError("found --designs, which is gone; expected as the table designs.csv, "
                             "which sample_proteinmpnn.py --out_folder writes, with a column "
                             "score that you add.")
        args = make_parser().parse_args(argv)
        check_options(args)
        found, n_sequences, held_out, notes = make_all(args)
        check_outputs(args, [place.structure for place, _, _ in found])
        entries, counts = make_entries(found, args, notes)
        if args.pairs.suffix.lower() == ".jsonl":
            text = "\n".join(json.dumps(entry) for entry in entries)
        else:
            text = json.dumps(entries, indent=1)
        if held_out:
            of_held_out = variants_text(held_out, columns_of(held_out), args.pairs.parent)
            write_text_atomic(held_out_file(args.pairs), of_held_out)
        write_text_atomic(args.pairs, text + "\n")
        say_result(args, n_sequences, entries, counts, notes)
        say_held_out(args, held_out)
        return 0
    except (ValueError, OSError) as error:
        print(f"pairs_from_scores.py: error: {error}", file=sys.stderr)
        return 2


def say_held_out(args, held_out):
    """Print how much was held out, if that was asked for."""
    if held_out:
        n_variants = sum(len(protein.variants) for protein in held_out)
        print(f"{n_variants:,} mutations of {len(held_out):,} other protein(s), held out, written "
              f"to {held_out_file(args.pairs)}")


def say_result(args, n_sequences, entries, counts, notes):
    """Print what was written: pairs per structure, weights, totals. notes: further lines."""
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
    things = "protein(s)" if "group" in entries[0] else "structure(s)"
    print(f"{len(entries):,} pairs on {n_used:,} of {len(counts):,} {things}, from "
          f"{n_sequences:,} sequences, written to {args.pairs}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
