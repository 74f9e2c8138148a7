"""Score mutations with ProteinMPNN or SEDD: those of a table, or all of a protein.

    python score_mutations.py v_48_020 5L33.pdb --scan --out scan.csv --picture scan.png
    python score_mutations.py v_48_020 5L33.pdb --mutations list.txt     # A12V, or A12V:G45D
    python score_mutations.py best_model.pt --mutations s2648.csv --measured ddg \\
        --lower_is_better --out scores.csv --picture scores.png
    python score_mutations.py runs/sedd wild_type.fasta --scan --out scan.csv
    python score_mutations.py runs/sedd --mutations held_out.csv --measured ddg
    python score_mutations.py tuned.pt x.pdb --scan --unmeasured table.csv --top 96 --out next.csv
    mpirun -n 4 python score_mutations.py ...                                   # the same, sooner

A score is ln p(mutant letters) - ln p(wild-type letters) at the mutated residues, given the rest,
in nats: below 0 if the model prefers the wild type. docs/data.md defines it for both models, and
has the columns of a table. The result is a CSV table of the same columns, `score` and `scored_by`.
Weights that train_dpo_ddp.py made say how their scores are corrected, and this is done. Lines that
do not fit their protein are named and left out; if most do not, nothing is scored. --measured
COLUMN prints Spearman's rank correlation with that column, over all mutations (whole proteins drawn
anew for its 95 % interval) and per protein with at least ten. --top N of a scan leaves the N
highest scores, best first, without the mutations of the table --unmeasured: what to measure next
(docs/rounds.md). Which model the weights are of is told from their file. The result is written
whole or not at all; wrong input ends with one message and exit code 2.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_setup import print0
from mpnn.model import ProteinMPNN
from mpnn.record import TrainingRecord, find_base, read_record
from mpnn.variants import Scoring
from mpnn.variants import score_proteins as score_with_proteinmpnn
from mpnn.weights import find_weights, is_proteinmpnn, model_of, read_weights
from proteins.csv_files import MAX_LISTED, describe_duplicates
from proteins.mutations import (measured_values, place_all, place_on_sequences, read_mutations,
                                refuse_long, scan_sequence, scan_structure)
from proteins.pictures import draw_measured, draw_scan
from proteins.proposals import (choose_proposals, describe_proposals, in_order,
                                keep_measured_chains, marks_of, measured_sites)
from proteins.scores import (check_measured, correlate_proteins, names_in_result, report_text,
                             table_text)
from proteins.seeds import content_key
from proteins.sequences import named_sequences
from proteins.structures import FORMATS, describe_reading
from sedd.variants import mask_of
from sedd.variants import score_proteins as score_with_sedd
from sedd.weights import load_sedd
from training.command_line import add_launch_arguments
from training.fast_linear import fast_linear
from training.files import check_output
from training.log import progress_bar
from training.loop import check_alike
from training.parser import Parser
from training.problems import in_columns
from training.resume import hash_of
from training.tool import open_output, run_tool, show_on_rank_0


# Options that the weights of one model alone use.
PROTEINMPNN_OPTIONS = ("also", "correct_unfolded", "correction_weights", "no_correction",
                       "fixed_chains", "orders", "batch_size")
SEDD_OPTIONS = ("no_ema", "bfloat16", "tokens")


# ---- the two models ----

class VariantScorer(NamedTuple):
    """A model that scores variants."""
    weights: str            # hash
    scored_by: str          # which weights, for the table
    notes: list             # lines for the user on these
    is_sedd: bool           # it sees the mutated chain's sequence alone, else structures
    ca_only: bool           # of a structure it sees CA atoms alone
    longest: float          # residues of a protein
    score: Callable         # function (Proteins, done) -> list of (n,) float64; done: called with
    #                         the number of variants that this rank has scored since, and of all


def load_scorer(args, ddp):
    """The VariantScorer of the weights that the command line names. Raises ValueError or OSError.
    """
    path = find_weights(args.weights)
    dpo_file = path / "latest_model.pt"
    if dpo_file.is_file():
        raise ValueError(f"{path} is a run folder of train_dpo_ddp.py; expected a file of it, such "
                         f"as {dpo_file}.")
    if path.is_dir():
        return load_for_sequences(path, args, ddp)
    if not path.exists():
        raise ValueError(f"there is no file {path}; expected weights of SEDD (a checkpoint, run "
                         "folder or exported folder) or of ProteinMPNN (a file, or a published "
                         "name such as v_48_020).")
    content = read_weights(path)
    if not is_proteinmpnn(content):
        return load_for_sequences(path, args, ddp)
    return load_for_structures(weights_of(args.weights, path, content), args, ddp)


class Weights(NamedTuple):
    """The ProteinMPNN of a file."""
    name: str                       # as the command line names it
    path: Path
    model: ProteinMPNN
    record: TrainingRecord | None   # of its training, if the file has one


class Correction(NamedTuple):
    """What is subtracted from a score: that of the mutated residues alone, or nothing."""
    name: str                   # of the weights by which; "" for none
    model: ProteinMPNN | None
    reason: str


NO_CORRECTION = Correction("", None, "no correction")


def load_weights(name):
    """The Weights that the command line names. Raises ValueError."""
    path = find_weights(name)
    return weights_of(name, path, read_weights(path))


def weights_of(name, path, content):
    """The Weights of what a file holds. Raises ValueError."""
    model = model_of(content, path, product=fast_linear)
    return Weights(name, path, model, read_record(content, path))


def load_for_structures(first, args, ddp):
    """The VariantScorer of a ProteinMPNN, and of further ones that the command line names.

    first: Weights."""
    refuse_options(args, SEDD_OPTIONS, "ProteinMPNN; expected it with those of SEDD")
    scoring_weights = [first, *map(load_weights, args.also)]
    pairs = [(weights, choose_correction(weights, number, args))
             for number, weights in enumerate(scoring_weights)]
    models = [(weights.model, correction.model) for weights, correction in pairs]
    loaded = [model for pair in models for model in pair if model is not None]
    for model in loaded:
        model.eval().to(ddp.device)
    ca_only = first.model.ca_only
    if any(model.ca_only != ca_only for model in loaded):
        named = " ".join([args.weights, *args.also, *args.correction_weights])
        raise ValueError(f"found weights {named}: some of a CA-only model, some for full "
                         "backbones; expected all of one kind.")
    scoring = Scoring(args.orders, args.seed, args.batch_size)

    def score(proteins, done):
        structures = [protein.complex for protein in proteins]
        variants = [protein.changes for protein in proteins]

        def done_by_one_model(scored, total):
            done(scored, total * len(models))

        model_scores = [score_with_proteinmpnn(model, structures, variants, scoring, correction,
                                               done_by_one_model, ddp)
                        for model, correction in models]
        return [np.mean(scores, axis=0) for scores in zip(*model_scores)]

    # With their number: further weights are not those of a correction.
    weights = f"{len(models)} {' '.join(hash_of(model.state_dict()) for model in loaded)}"
    return VariantScorer(weights, "; ".join(text_of_pair(*pair) for pair in pairs),
                         notes_on_pairs(pairs), is_sedd=False, ca_only=ca_only,
                         longest=float("inf"), score=score)


def choose_correction(weights, number, args):
    """The Correction of weights, which are of this number on the command line: the one that its
    options ask for, or else that of their training. Raises ValueError."""
    if args.no_correction:
        return NO_CORRECTION._replace(reason="no correction, as asked for")
    if args.correct_unfolded:
        return Correction(weights.name, weights.model, "corrected by the weights themselves")
    if args.correction_weights:
        other = load_weights(args.correction_weights[number])
        return Correction(other.name, other.model, "corrected as given")
    record = weights.record
    if record is None:
        return NO_CORRECTION
    if not record.is_corrected:
        return NO_CORRECTION._replace(
            reason=f"no correction, as in training (reference: {record.reference})")
    name, model = find_base(record, weights.path, fast_linear)
    return Correction(name, model, "corrected by the base weights, as in training")


def text_of_pair(weights, correction):
    """Weights and those of their correction, for the column scored_by."""
    return f"{weights.name} - {correction.name}" if correction.name else weights.name


def notes_on_pairs(pairs):
    """A line on each pair of Weights and Correction, and a warning where these do not fit."""
    notes = []
    for weights, correction in pairs:
        notes.append(f"scored by {text_of_pair(weights, correction)}: {correction.reason}")
        notes += describe_misfit(weights, correction)
    return notes


def describe_misfit(weights, correction):
    """List of a warning, if the correction is another than that of the training."""
    record = weights.record
    if record is None:
        return []
    expected = record.base_hash if record.is_corrected else ""
    found = ""
    if correction.model is not None:
        found = hash_of(correction.model.state_dict())
    if found == expected:
        return []
    fits = "without a correction"
    if expected:
        fits = f"corrected by {record.base} (hash {expected})"
    how = f"are corrected by {correction.name} (hash {found})" if found else "are not corrected"
    return [f"ATTENTION: {weights.name} was trained with its scores {fits}; here they {how}. They "
            "may rank worse. Without --correct_unfolded, --correction_weights and --no_correction "
            "the correction of the training is taken."]


def load_for_sequences(path, args, ddp):
    """The VariantScorer of a SEDD."""
    refuse_options(args, PROTEINMPNN_OPTIONS, "SEDD; expected it with those of ProteinMPNN")
    sedd = load_sedd(path, not args.no_ema, ddp.device)
    mask_of(sedd)       # raises ValueError for a model that has none
    for note in sedd.notes:
        print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32

    def score(proteins, done):
        return score_with_sedd(
            sedd, [protein.sequence for protein in proteins],
            [protein.changes for protein in proteins], done, args.tokens, dtype, ddp)

    # Letters alone matter: of a structure, a residue that has a CA atom is there.
    return VariantScorer(hash_of(sedd.model.state_dict()), args.weights, [], is_sedd=True,
                         ca_only=True, longest=sedd.max_length, score=score)


def refuse_options(args, names, weights):
    """ValueError for options that the weights do not use. weights: of which model, and what was
    expected."""
    parser = make_parser()
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"found --{name} with weights of {weights}.")


# ---- proteins ----

def read_scan(args, scorer, ddp):
    """The Proteins of --scan. Prints how positions were understood. Raises ValueError or OSError.
    """
    if len({is_structure(path) for path in args.proteins}) > 1:
        raise ValueError(f"found {' '.join(map(str, args.proteins))}: structures and sequences, "
                         "whose tables have other columns; expected one kind.")
    proteins = []
    for path in args.proteins:
        if is_structure(path):
            fixed = args.fixed_chains
            found, note = scan_structure(path, args.chains, fixed, args.mutable_positions,
                                         see_all=not scorer.is_sedd, ca_only=scorer.ca_only)
            proteins += found
            if note:
                print0(ddp, in_columns(f"{path}: {note}"), file=sys.stderr)
        else:
            refuse_chains(args)
            proteins += [scan_sequence(name, text) for name, text in read_fasta(path, scorer)]
    return proteins


def read_table(args, scorer, ddp):
    """The Proteins of --mutations. Prints which variants do not fit. Raises ValueError or OSError.
    """
    table = read_mutations(args.mutations, args.measured)
    for column, name in names_in_result(list(table.variants[0].cells)).items():
        if name != column:
            print0(ddp, f"{table.path}: its column {column} is {name} in the result",
                   file=sys.stderr)
    check_outputs(args, table.structures)       # also those of which no variant fits
    if args.proteins and names_proteins(table, args):
        raise ValueError(f"found {len(args.proteins)} protein(s) on the command line, and "
                         f"{table.path} with a column pdb_file or sequence; expected one protein, "
                         "or the column.")
    proteins = place_table(table, args, scorer, ddp)
    if args.measured:
        check_measured(proteins, args.measured)
    return proteins


def read_unmeasured(args, scorer, ddp):
    """The Proteins of --unmeasured; [] without it. Raises ValueError or OSError."""
    if not args.unmeasured:
        return []
    table = read_mutations(args.unmeasured)
    check_outputs(args, table.structures)
    return place_table(table, args, scorer, ddp)


def place_table(table, args, scorer, ddp):
    """The Proteins of a table, which names them, or has variants of the one of the command line.
    Prints which variants do not fit. Raises ValueError or OSError."""
    protein = None
    if not names_proteins(table, args):
        if len(args.proteins) != 1:
            raise ValueError(f"found {len(args.proteins)} protein(s) on the command line, and "
                             f"{table.path} without a column pdb_file or sequence; expected one "
                             "protein, or the column.")
        protein = args.proteins[0]
    are_sequences = not is_structure(protein) if protein else table.has_sequences
    if are_sequences:
        refuse_chains(args)
        wild_type = None
        if protein:
            named = read_fasta(protein, scorer)
            if len(named) != 1:
                raise ValueError(f"{protein} holds {len(named)} sequences; expected the one that "
                                 "the list changes.")
            wild_type = named[0]
        elif not scorer.is_sedd:
            raise ValueError(f"{table.path} has sequences; expected structures for weights of "
                             "ProteinMPNN, in a column pdb_file.")
        proteins, note = place_on_sequences(table, wild_type)
    else:
        chain = None
        if args.chains and len(args.chains) == 1:
            chain = args.chains[0]
        proteins, note = place_all(table, protein, chain, args.fixed_chains,
                                   see_all=not scorer.is_sedd, ca_only=scorer.ca_only,
                                   option=" (or --chains)")
    if note:
        print0(ddp, note, file=sys.stderr)
    return proteins


def names_proteins(table, args):
    """Whether a table says which protein each variant is of. Databases add the sequence: beside a
    structure on the command line it is a column like others."""
    if any(map(is_structure, args.proteins)):
        return table.names_structures
    return table.names_structures or table.has_sequences


def refuse_chains(args):
    """ValueError for options that name chains or residues of structures, where there are none."""
    for name in ("chains", "mutable_positions"):
        if getattr(args, name):
            raise ValueError(f"found --{name} with sequences; expected it with structures.")


def is_structure(path):
    """Whether a file has the name of a structure; others are FASTA."""
    return str(path).lower().removesuffix(".gz").endswith(FORMATS)


def read_fasta(path, scorer):
    """[(name, sequence in capitals)] of a FASTA file. Raises ValueError or OSError."""
    if not scorer.is_sedd:
        raise ValueError(f"found {path}; expected a structure for weights of ProteinMPNN: a name "
                         f"in {' '.join(FORMATS)}, perhaps with .gz.")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}.")
    return [(name, text.upper().removesuffix("*")) for name, text in named_sequences(path)]


def describe(proteins, scorer):
    """Lines that say how the proteins were understood, the first ones if there are many."""
    lines = []
    for protein in proteins[:MAX_LISTED]:
        structure = protein.complex
        line = f"{protein.name}: chain {' '.join(structure.design)}, {structure.n_designed} rows"
        if not scorer.is_sedd:
            line += f"; context chains {' '.join(structure.fixed) or '(none)'}"
        lines.append(line)
    modified = describe_reading(protein.structure for protein in proteins)
    if modified:
        lines.append(modified)
    return "\n".join(lines)


# ---- command ----

def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="See the top of this file for examples, and docs/data.md for tables.")
    add = parser.add_argument
    add("weights", help="of SEDD: a checkpoint, run folder or exported folder; of ProteinMPNN: a "
                        "file such as best_model.pt, or a published name such as v_48_020")
    add("proteins", nargs="*", metavar="protein",
        help="PDB or mmCIF files; for SEDD also FASTA; none if a table names them")
    task = parser.add_mutually_exclusive_group(required=True).add_argument
    task("--mutations", type=Path, metavar="FILE", help="score the variants of a list or table")
    task("--scan", action="store_true", help="score all single mutations")
    add("--chains", nargs="+", metavar="CHAIN",
        help="to mutate; default: --scan: all others, --mutations: the column chain, or the only "
             "one")
    add("--fixed_chains", nargs="*", metavar="CHAIN",
        help="ProteinMPNN: context; default: all others; without a name: none")
    add("--mutable_positions", nargs="+", metavar="POSITION",
        help="--scan of a structure: the only ones, such as A10-A20 A25")
    add("--top", type=int, metavar="N",
        help="--scan: only the N highest scores, best first, to be measured next")
    add("--per_position", type=int, default=3, metavar="N",
        help="--top: at most so many at one residue (default 3)")
    add("--unmeasured", type=Path, metavar="TABLE",
        help="--top: leave out the mutations that this table has, and chains that it lacks")
    add("--measured", metavar="COLUMN",
        help="print the rank correlation of the scores with this column of the table")
    add("--lower_is_better", action="store_true",
        help="of --measured, such as ddG with positive = destabilising")
    add("--out", type=Path, metavar="FILE", help="CSV; default: standard output")
    add("--picture", type=Path, metavar="FILE",
        help="PNG: of --scan a heat map, with --measured measured against predicted")
    add("--seed", type=int, default=0, help="of decoding orders and intervals (default 0)")
    add = parser.add_argument_group("ProteinMPNN").add_argument
    add("--also", action="append", default=[], metavar="WEIGHTS",
        help="further weights, each by an option of its own; a score is the mean over all")
    add("--correct_unfolded", action="store_true",
        help="subtract the score of each mutated residue alone")
    add("--correction_weights", action="append", default=[], metavar="WEIGHTS",
        help="the same by other weights; once, or once more for each --also. Default: as the "
             "weights were trained")
    add("--no_correction", action="store_true",
        help="subtract nothing, however the weights were trained")
    add("--orders", type=int, default=4, metavar="N",
        help="decoding orders that scores are averaged over (default 4)")
    add("--batch_size", type=int, default=8, metavar="N",
        help="sequences with several mutations per pass (default 8)")
    add = parser.add_argument_group("SEDD").add_argument
    add("--no_ema", action="store_true", help="use the last weights, not their averages")
    add("--bfloat16", action="store_true", help="compute in bfloat16 (autocast)")
    add("--tokens", type=int, default=16384, help="positions in a batch (default 16384)")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    """The options. Raises ValueError for those that do not fit together."""
    args = make_parser().parse_intermixed_args(argv)
    if args.scan and args.measured:
        raise ValueError("found --measured with --scan; expected it with --mutations.")
    if args.lower_is_better and not args.measured:
        raise ValueError("found --lower_is_better without --measured; expected both.")
    if args.scan and not args.proteins:
        raise ValueError("found --scan without a protein; expected PDB, mmCIF or FASTA files after "
                         "the weights.")
    if args.mutations and args.mutable_positions:
        raise ValueError("found --mutable_positions with --mutations; expected it with --scan.")
    if args.mutations and args.chains and len(args.chains) > 1:
        raise ValueError(f"found --chains {' '.join(args.chains)} with --mutations; expected the "
                         "one chain that is mutated. Of several, name them in a column chain.")
    check_correction(args)
    check_proposals(args)
    for name in ("orders", "batch_size", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")
    if abs(args.seed) >= 2**63:
        raise ValueError(f"found --seed {args.seed}; expected at most {2**63 - 1}.")
    check_picture(args)
    weights = Path(args.weights)
    # An export is a folder; a run's folder holds its checkpoints in one.
    in_folder = [*weights.glob("*"), *weights.glob("checkpoints/*")]
    check_outputs(args, [weights, *in_folder, *args.also, *args.correction_weights,
                         *args.proteins])
    return args


def check_correction(args):
    """ValueError for options of the correction for the unfolded state that do not fit together."""
    given = [f"--{name}" for name in ("correct_unfolded", "correction_weights", "no_correction")
             if getattr(args, name)]
    if len(given) > 1:
        raise ValueError(f"found {' with '.join(given)}, which say how scores are corrected; "
                         "expected one of them.")
    n_weights = 1 + len(args.also)
    if args.correction_weights and len(args.correction_weights) != n_weights:
        raise ValueError(f"found {n_weights} weights and {len(args.correction_weights)} "
                         "--correction_weights; expected one for each, in their order.")


def check_proposals(args):
    """ValueError for --top, --per_position and --unmeasured that do not fit together."""
    if args.top is None:
        if args.unmeasured:
            raise ValueError("found --unmeasured without --top; expected how many mutations to "
                             "propose, such as --top 96.")
        if args.per_position != make_parser().get_default("per_position"):
            raise ValueError("found --per_position without --top; expected both.")
        return
    if not args.scan:
        raise ValueError("found --top with --mutations; expected it with --scan.")
    for name in ("top", "per_position"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")


def check_picture(args):
    """ValueError for --picture that cannot be drawn."""
    if args.picture is None:
        return
    if args.picture.suffix.lower() != ".png":
        raise ValueError(f"found --picture {args.picture}; expected a name that ends in .png.")
    if args.mutations and not args.measured:
        raise ValueError("found --picture with --mutations; expected --measured too, against "
                         "which scores are drawn, or --scan.")
    if args.scan and len(args.proteins) > 1:
        raise ValueError(f"found --picture with {len(args.proteins)} proteins; expected one.")
    if args.out and os.path.realpath(args.out) == os.path.realpath(args.picture):
        raise ValueError(f"found {args.out} for --out and --picture; expected two names: the "
                         "picture would overwrite the table.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("found --picture, but matplotlib is not installed; expected it: "
                         "`pip install matplotlib`.")


def check_outputs(args, inputs):
    """ValueError for files that cannot be written, or that are inputs."""
    tables = [path for path in (args.mutations, args.unmeasured) if path]
    for path in (args.out, args.picture):
        if path is not None:
            check_output(path, [*inputs, *tables])


def run(args, ddp):
    """Do what the options say. Raises ValueError or OSError."""
    scorer = load_scorer(args, ddp)
    proteins = read_scan(args, scorer, ddp) if args.scan else read_table(args, scorer, ddp)
    known_proteins = read_unmeasured(args, scorer, ddp)
    if known_proteins:
        proteins = keep_measured_chains(proteins, known_proteins, args.unmeasured)
    measured = measured_sites(known_proteins)
    refuse_long("the given proteins", proteins, scorer.longest)
    check_alike(inputs_of(args, scorer, proteins, measured), ddp)
    n = sum(len(protein.variants) for protein in proteins)
    weights = ", ".join([args.weights, *args.also])
    print0(ddp, f"{describe(proteins, scorer)}\n{ddp.device}: {weights}, {n:,} variants of "
                f"{len(proteins):,} protein(s)", file=sys.stderr)
    for note in scorer.notes:
        print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
    with open_output(args.out, ddp) as write:
        with progress_bar(ddp.is_main, unit=" variants") as bar:
            def advance(scored, total):
                bar.total = total
                bar.update(scored)

            scores = scorer.score(proteins, advance)
        folder = args.out.parent if args.out else Path()
        chosen = []
        if args.top:
            chosen = choose_proposals(proteins, scores, measured, args.top, args.per_position)
            write(table_text(*in_order(proteins, scores, chosen), scorer.scored_by, folder))
            print0(ddp, describe_proposals(chosen, args.top, args.per_position), file=sys.stderr)
        else:
            write(table_text(proteins, scores, scorer.scored_by, folder))
    if args.measured or args.picture:
        marks = marks_of(proteins, measured, chosen) if args.top else None
        show_on_rank_0(lambda: describe_result(args, proteins, scores, marks), ddp)


def inputs_of(args, scorer, proteins, measured=()):
    """{what: plain value} of what must be the same on all ranks."""
    inputs = {f"--{name}": getattr(args, name) for name in ("orders", "batch_size", "tokens",
                                                            "seed", "bfloat16", "top",
                                                            "per_position")}
    contents = [(protein.complex.key, protein.changes) for protein in proteins]
    return {**inputs, "weights (hash)": scorer.weights, "proteins (hash)": content_key(*contents),
            "--unmeasured (hash)": content_key(sorted(measured))}


def describe_result(args, proteins, scores, marks):
    """Text on the correlation, if it was asked for, and on the picture, which is drawn here."""
    lines = []
    report = None
    if args.measured:
        report = correlate_proteins(proteins, scores, args.lower_is_better, args.seed)
        lines.append(report_text(report, args.measured, args.lower_is_better))
        values = []     # of each variant, those of its rows
        for protein in proteins:
            values += measured_values(protein).values()
        lines += describe_duplicates(values, "variants", "each row counts")
    if args.picture:
        if args.scan:
            draw_scan(proteins, scores, args.picture, marks)
        else:
            draw_measured(proteins, scores, args.picture, report, args.measured,
                          args.lower_is_better)
        lines.append(f"picture: {args.picture}")
    return "\n".join(lines)


def main(argv=None):
    run_tool("score_mutations.py", argv, read_arguments, run)


if __name__ == "__main__":
    main()
