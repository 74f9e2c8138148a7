"""Score mutations with ProteinMPNN or SEDD: those of a table, or all of a protein.

    python score_mutations.py v_48_020 5L33.pdb --scan --out scan.csv --picture scan.png
    python score_mutations.py v_48_020 5L33.pdb --mutations list.txt     # A12V, or A12V:G45D
    python score_mutations.py best_model.pt --mutations s2648.csv --measured ddg \\
        --lower_is_better --out scores.csv --picture scores.png
    python score_mutations.py runs/sedd wild_type.fasta --scan --out scan.csv
    python score_mutations.py runs/sedd --mutations held_out.csv --measured ddg
    python score_mutations.py tuned.pt x.pdb --scan --unmeasured table.csv --top 96 --out next.csv
    python score_mutations.py tuned.pt x.pdb --scan --top 24 --combine 3 --out combined.csv
    python score_mutations.py v_48_020 x.pdb --scan --partners HL_A --interface 8 --out binding.csv
    mpirun -n 4 python score_mutations.py ...                                   # the same, sooner

A score is ln p(mutant letters) - ln p(wild-type letters) at the mutated residues, given the rest,
in nats: below 0 if the model prefers the wild type. docs/scoring.md defines it for both models,
docs/tables.md has the columns of a table. The result is a CSV table of the same columns, `score`
and `scored_by`. With --partners, or a column of this name, a score is that of binding: in the
complex of both sides less each side alone (docs/binding.md). --copies puts a mutation into all
equal chains.
Weights that train_dpo_ddp.py made say how their scores are corrected, and this is done. Lines that
do not fit their protein are named and left out; if most do not, nothing is scored. --measured
COLUMN prints Spearman's rank correlation with that column, over all mutations (whole proteins drawn
anew for its 95 % interval) and per protein with at least ten. --top N of a scan leaves the N
highest scores, best first, without the mutations of the table --unmeasured: what to measure next
(docs/rounds.md); with --combine K, variants of up to K mutations. Which model the weights are of is
told from their file. The result is written whole or not at all; wrong input ends with one message
and exit code 2.
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
from mpnn.binding import score_binding
from mpnn.model import ProteinMPNN
from mpnn.record import TrainingRecord, find_base, read_record
from mpnn.variants import Scoring
from mpnn.variants import score_proteins as score_with_proteinmpnn
from mpnn.weights import find_weights, is_proteinmpnn, model_of, read_weights
from proteins.combinations import (
    FEWEST,
    LARGEST,
    best_singles,
    choose_combinations,
    combine,
    describe_combinations,
    n_combined,
)
from proteins.csv_files import MAX_LISTED, describe_duplicates
from proteins.mutations import (
    measured_values,
    place_all,
    place_on_sequences,
    read_mutations,
    refuse_long,
    scan_sequence,
    scan_structure,
)
from proteins.pictures import draw_measured, draw_scan
from proteins.places import is_contradicted
from proteins.proposals import (
    choose_proposals,
    describe_proposals,
    keep_measured_chains,
    marks_of,
    measured_variants,
    proteins_of,
    values_of,
)
from proteins.scores import (
    IN_COMPLEX,
    SCORE,
    SUM_OF_SINGLES,
    check_measured,
    correlate_proteins,
    is_of_copies,
    names_in_result,
    partners_of,
    report_text,
    table_text,
)
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
                       "fixed_chains", "orders", "batch_size", "partners", "interface", "copies")
SEDD_OPTIONS = ("no_ema", "bfloat16", "tokens")


# ---- the two models ----

class VariantScorer(NamedTuple):
    """A model that scores variants."""
    weights: str            # hash
    describe: Callable      # function (is the score of binding?) -> (which weights, for the column
    #                         scored_by; the same for a title; list of lines for the user on these)
    is_sedd: bool           # it sees the mutated chain's sequence alone, else structures
    ca_only: bool           # of a structure it sees CA atoms alone
    longest: float          # residues of a protein
    score: Callable         # function (Proteins, done) -> {column: list of (n,) float64}; done:
    #                         called with the number of variants that this rank has scored since,
    #                         and of all


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
        def done_by_one_model(scored, total):
            done(scored, total * len(models))

        of_models = [score_by_one_model(model, correction, proteins, scoring, done_by_one_model,
                                        ddp)
                     for model, correction in models]
        return {column: [np.mean(values, axis=0)
                         for values in zip(*(results[column] for results in of_models))]
                for column in of_models[0]}

    # With their number: further weights are not those of a correction.
    weights = f"{len(models)} {' '.join(hash_of(model.state_dict()) for model in loaded)}"
    return VariantScorer(weights, lambda of_binding: describe_pairs(pairs, of_binding),
                         is_sedd=False, ca_only=ca_only, longest=float("inf"), score=score)


def score_by_one_model(  # noqa: PLR0913  (as score_proteins)
        model, correction, proteins, scoring, done, ddp):
    """{column: of each protein (n,) float64} by a ProteinMPNN; correction: ProteinMPNN or None."""
    wholes = [protein.complex for protein in proteins]
    variants = [protein.changes for protein in proteins]
    if not proteins[0].partners:
        return {SCORE: score_with_proteinmpnn(model, wholes, variants, scoring, correction, done,
                                              ddp)}
    scores = score_binding(model, wholes, [protein.partners for protein in proteins], variants,
                           scoring, correction, done, ddp)
    return {SCORE: [of_complex.binding for of_complex in scores],
            IN_COMPLEX: [of_complex.in_complex for of_complex in scores]}


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


def describe_pairs(pairs, of_binding):
    """(text for the column scored_by, text for a title, lines for the user) on pairs of Weights and
    Correction, with a warning where these do not fit."""
    notes = []
    texts = []
    for weights, correction in pairs:
        texts.append(text_of_pair(weights, correction, of_binding))
        notes.append(f"scored by {texts[-1]}: {correction.reason}")
        notes += describe_misfit(weights, correction)
    if len({bool(correction.name) for _, correction in pairs}) > 1:
        notes.append("ATTENTION: found scores with and without a correction for the unfolded "
                     "state, which differ by what a letter is without a fold. Their mean may rank "
                     "worse; expected weights of one kind, or one of --correct_unfolded, "
                     "--correction_weights and --no_correction.")
    if of_binding:
        notes.append(f"{SCORE} is of binding: in the complex less the same of each partner alone, "
                     f"so the unfolded state cancels; {IN_COMPLEX} is corrected as said above")
    title = "; ".join(title_of_pair(*pair, of_binding) for pair in pairs)
    return "; ".join(texts), title, notes


def text_of_pair(weights, correction, of_binding):
    """Weights and those of their correction, for the column scored_by. In a score of binding the
    correction cancels."""
    if not correction.name:
        return weights.name
    if of_binding:
        return f"{weights.name} (in the complex - {correction.name})"
    return f"{weights.name} - {correction.name}"


def title_of_pair(weights, correction, of_binding):
    """Weights and those of their correction, for a title, where "X - X" would read as zero."""
    if of_binding or not correction.name:
        return weights.name
    if correction.name == weights.name:
        return f"{weights.name}, corrected for the unfolded state"
    return f"{weights.name}, corrected by {correction.name}"


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
        return {SCORE: score_with_sedd(
            sedd, [protein.sequence for protein in proteins],
            [protein.changes for protein in proteins], done, args.tokens, dtype, ddp)}

    # Letters alone matter: of a structure, a residue that has a CA atom is there.
    return VariantScorer(hash_of(sedd.model.state_dict()),
                         lambda of_binding: (args.weights, args.weights, []),
                         is_sedd=True, ca_only=True, longest=sedd.max_length, score=score)


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
                                         see_all=not scorer.is_sedd, ca_only=scorer.ca_only,
                                         partners=args.partners or "", interface=args.interface,
                                         copies=args.copies)
            proteins += found
            if note:
                print0(ddp, in_columns(f"{path}: {note}"), file=sys.stderr)
        else:
            refuse_chains(args)
            proteins += [scan_sequence(name, text) for name, text in read_fasta(path, scorer)]
    check_copies_have_names(proteins)
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
    check_own_partners(table, args)
    check_own_chains(table, args)
    proteins = place_table(table, args, scorer, ddp)
    check_copies_have_names(proteins)
    if args.measured:
        check_measured(proteins, args.measured)
    return proteins


def check_own_partners(table, args):
    """ValueError for options that the column `partners` of a table makes idle."""
    are_named = [bool(variant.cells.get("partners")) for variant in table.variants]
    if any(are_named) and args.fixed_chains is not None:
        raise ValueError(f"found --fixed_chains, and {table.path} with a column partners; expected "
                         "one of them: of binding, both partners are seen, and no other chain.")
    if all(are_named) and args.partners:
        raise ValueError(f"found --partners {args.partners}, and {table.path}, whose column "
                         "partners names them in all rows; expected one of them.")


def check_own_chains(table, args):
    """ValueError for variants of other chains than that of --chains."""
    if not args.chains:
        return
    chain, = args.chains
    others = [variant for variant in table.variants if is_contradicted(variant, chain)]
    if others:
        first = others[0]
        raise ValueError(f"found --chains {chain}, and {len(others):,} of "
                         f"{len(table.variants):,} variants in other chains, such as line "
                         f"{first.line} of {table.path}: {first.cells['mutation']:.40}. Expected "
                         "no --chains, which is for mutations that name no chain.")


def check_copies_have_names(proteins):
    """ValueError for variants in copies whose chains the text of a mutation cannot name, as it
    names all of them in the result."""
    for protein in proteins:
        odd = [name for name in protein.complex.design if len(name) != 1 or not name.isalnum()]
        if odd and any(map(is_of_copies, protein.variants, protein.changes)):
            raise ValueError(f"found --copies, and chain {odd[0]} in {protein.name}; expected "
                             "names of one letter or digit, which the text of a mutation can hold. "
                             "Rename the chains.")


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
                                   option=" (or --chains)", copies=args.copies,
                                   partners=args.partners or "")
    if note:
        print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
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


def check_kind(proteins, scorer):
    """ValueError for scores of several kinds, or of one that the weights do not have."""
    of_binding = [protein for protein in proteins if protein.partners]
    if of_binding and scorer.is_sedd:
        raise ValueError(f"found {of_binding[0].name} with partners, whose binding is scored, and "
                         "weights of SEDD, which sees one chain; expected weights of ProteinMPNN, "
                         "or a table without the column partners.")
    if 0 < len(of_binding) < len(proteins):
        other = next(protein for protein in proteins if not protein.partners)
        raise ValueError(f"found variants of {of_binding[0].name} with partners and of "
                         f"{other.name} without, whose scores do not compare; expected one kind "
                         "in a call. --partners HL_A names those of lines without.")
    for protein in proteins:
        if scorer.is_sedd and len(protein.complex.design) > 1:
            raise ValueError(f"found variants of {protein.name} in the chains "
                             f"{' '.join(protein.complex.design)} together, and weights of SEDD, "
                             "which sees one chain; expected variants of one chain each.")


def describe(proteins, scorer):
    """Lines that say how the proteins were understood, the first ones if there are many."""
    lines = []
    for protein in proteins[:MAX_LISTED]:
        structure = protein.complex
        line = f"{protein.name}: chain {' '.join(structure.design)}, {structure.n_designed} rows"
        if protein.partners:
            line += f"; binding of {partners_of(protein)}"
        elif not scorer.is_sedd:
            line += f"; context chains {' '.join(structure.fixed) or '(none)'}"
        lines.append(line)
    modified = describe_reading(protein.structure for protein in proteins)
    if modified:
        lines.append(modified)
    return "\n".join(lines)


# ---- command ----

def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="See the top of this file for examples, and docs/tables.md for "
                            "tables.")
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
             "one, of mutations whose text names none")
    add("--fixed_chains", nargs="*", metavar="CHAIN",
        help="ProteinMPNN: context; default: all others; without a name: none")
    add("--mutable_positions", nargs="+", metavar="POSITION",
        help="--scan of a structure: the only ones, such as A10-A20 A25")
    add("--top", type=int, metavar="N",
        help="--scan: only the N highest scores, best first, to be measured next")
    add("--per_position", type=int, default=3, metavar="N",
        help="--top: at most so many at one residue (default 3)")
    add("--combine", type=int, metavar="K",
        help="--top: the N best variants of up to K mutations, 2 to 5, scored as wholes: all those "
             f"of the best mutations of the scan, one a residue ({n_combined(2)} for K = 2, "
             f"{n_combined(3)}, {n_combined(4)}, {n_combined(5)} for 3, 4, 5). A mutation is in at "
             "most a quarter of the N")
    add("--unmeasured", type=Path, metavar="TABLE",
        help="--top: leave out the variants that this table has, and chains that it lacks")
    add("--measured", metavar="COLUMN",
        help="print the rank correlation of the scores with this column of the table")
    add("--lower_is_better", action="store_true",
        help="of --measured, such as ddG with positive = destabilising")
    add("--out", type=Path, metavar="FILE", help="CSV; default: standard output")
    add("--picture", type=Path, metavar="FILE",
        help="PNG: of --scan a heat map, with --measured measured against predicted")
    add("--seed", type=int, default=0, help="of decoding orders and intervals (default 0)")
    add = parser.add_argument_group("ProteinMPNN").add_argument
    add("--partners", metavar="HL_A",
        help="score binding: chains of the two sides of a complex, which are seen alone; those of "
             "several characters as AA,BB_C. Of a table: for lines that name none")
    add("--interface", type=float, metavar="ANGSTROM",
        help="--scan --partners: only residues with a backbone atom so near to the other side")
    add("--copies", nargs="*", metavar="CHAIN",
        help="put a mutation of one of these chains into all; without a name: into all chains of "
             "the same sequence. The result names all of them")
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
    if args.copies:     # A,B, too
        args.copies = [name for text in args.copies for name in text.split(",")]
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
    check_partners(args)
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


def check_partners(args):
    """ValueError for options of binding and of copies that are empty or do not fit together."""
    if args.partners is not None and not args.partners.strip():
        raise ValueError("found --partners without chains; expected those of the two sides, such "
                         "as HL_A, or no --partners.")
    if args.copies is not None and not all(args.copies):
        raise ValueError("found an empty name in --copies; expected names such as --copies A B, "
                         "or --copies alone.")
    if args.interface is not None:
        if not args.scan or not args.partners:
            raise ValueError("found --interface without --scan and --partners; expected it with "
                             "both.")
        if not args.interface > 0:
            raise ValueError(f"found --interface {args.interface:g}; expected a distance above 0 "
                             "Angstrom, such as 8.")
    if args.partners and args.fixed_chains is not None:
        raise ValueError("found --fixed_chains with --partners; expected one of them: of binding, "
                         "both partners are seen, and no other chain.")


def check_proposals(args):
    """ValueError for --top and options beside it that do not fit together."""
    has_per_position = args.per_position != make_parser().get_default("per_position")
    if args.top is None:
        if args.unmeasured:
            raise ValueError("found --unmeasured without --top; expected how many mutations to "
                             "propose, such as --top 96.")
        if has_per_position or args.combine is not None:
            name = "per_position" if has_per_position else "combine"
            raise ValueError(f"found --{name} without --top; expected both.")
        return
    if not args.scan:
        raise ValueError("found --top with --mutations; expected it with --scan.")
    for name in ("top", "per_position"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")
    if args.combine is None:
        return
    if has_per_position:
        raise ValueError("found --per_position with --combine; expected one of them: of what is "
                         "combined, one mutation of a residue is taken.")
    if not FEWEST <= args.combine <= LARGEST:
        raise ValueError(f"found --combine {args.combine}; expected {FEWEST} to {LARGEST} "
                         "mutations.")


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
    measured = measured_variants(known_proteins)
    if known_proteins:
        # Of a scan that is measured as a whole, combinations may be left.
        left_out = () if args.combine else measured
        proteins = keep_measured_chains(proteins, known_proteins, args.unmeasured, left_out)
    check_kind(proteins, scorer)
    refuse_long("the given proteins", proteins, scorer.longest)
    check_alike(inputs_of(args, scorer, proteins, measured), ddp)
    n = sum(len(protein.variants) for protein in proteins)
    weights = ", ".join([args.weights, *args.also])
    text = (f"{describe(proteins, scorer)}\n{ddp.device}: {weights}, {n:,} variants of "
            f"{len(proteins):,} protein(s)")
    print0(ddp, in_columns(text, hanging="  "), file=sys.stderr)
    scored_by, title, notes = scorer.describe(bool(proteins[0].partners))
    for note in notes:
        print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
    with open_output(args.out, ddp) as write:
        results = score_all(scorer, proteins, ddp)
        folder = args.out.parent if args.out else Path()
        marks = None
        if args.top:
            proposed, own_results, note = propose(args, scorer, proteins, results, measured, ddp)
            write(table_text(proposed, own_results, scored_by, folder))
            print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
            marks = marks_of(proteins, measured, proposed)
        else:
            write(table_text(proteins, results, scored_by, folder))
    if args.measured or args.picture:
        show_on_rank_0(
            lambda: describe_result(args, proteins, results[SCORE], marks, title), ddp)


def score_all(scorer, proteins, ddp):
    """{column: of each protein (n,)} of the variants. Shows how far it is."""
    with progress_bar(ddp.is_main, unit=" variants") as bar:
        def advance(scored, total):
            bar.total = total
            bar.update(scored)

        return scorer.score(proteins, advance)


def propose(args, scorer, proteins, results, measured, ddp):  # noqa: PLR0913  (what it depends on)
    """(Proteins, {column: values}, text): what to measure next, from a scan and its results.
    Raises ValueError."""
    scores = results[SCORE]
    if args.combine:
        singles = best_singles(proteins, scores, args.combine)
        proteins, sums = combine(proteins, scores, singles, args.combine, measured)
        results = {**score_all(scorer, proteins, ddp), SUM_OF_SINGLES: sums}
        chosen = choose_combinations(proteins, results[SCORE], args.top)
        note = describe_combinations(chosen, args.top, args.combine, len(singles))
    else:
        chosen = choose_proposals(proteins, scores, measured, args.top, args.per_position)
        note = describe_proposals(chosen, args.top, args.per_position)
    of_chosen = {column: values_of(values, chosen) for column, values in results.items()}
    return proteins_of(proteins, chosen), of_chosen, note


def inputs_of(args, scorer, proteins, measured=()):
    """{what: plain value} of what must be the same on all ranks."""
    inputs = {f"--{name}": getattr(args, name) for name in ("orders", "batch_size", "tokens",
                                                            "seed", "bfloat16", "top",
                                                            "per_position", "combine")}
    contents = [(protein.complex.key, [partner.key for partner in protein.partners],
                 protein.changes) for protein in proteins]
    return {**inputs, "weights (hash)": scorer.weights, "proteins (hash)": content_key(*contents),
            "--unmeasured (hash)": content_key(sorted(map(sorted, measured)))}


def describe_result(args, proteins, scores, marks, title):
    """Text on the correlation, if it was asked for, and on the picture, which is drawn here.

    title: the weights, in words."""
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
            draw_scan(proteins, scores, args.picture, title, marks)
        else:
            draw_measured(proteins, scores, args.picture, report, args.measured,
                          args.lower_is_better)
        lines.append(f"picture: {args.picture}")
    return "\n".join(lines)


def main(argv=None):
    run_tool("score_mutations.py", argv, read_arguments, run)


if __name__ == "__main__":
    main()
