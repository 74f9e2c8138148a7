"""Draw sequences for backbones with ProteinMPNN, or score given ones.

    python sample_proteinmpnn.py v_48_020 5L33.pdb --num 8 --out designs.fasta
    python sample_proteinmpnn.py best_model.pt complex.cif --chains A --temperature 0.1 0.2 \\
        --mutable_positions A10-A20 A25
    python sample_proteinmpnn.py v_48_020 dimer.pdb --chains A B --homomer --omit C --bias E=0.5
    python sample_proteinmpnn.py v_48_020 backbones/ --num 8 --out_folder designs
    python sample_proteinmpnn.py v_48_020 5L33.pdb --score_only designs.fasta
    python sample_proteinmpnn.py v_48_020 5L33.pdb --score_only         # the native sequence alone

Reads weights in the published format and structures (.pdb, .ent, .cif, .mmcif, also with .gz):
files, or folders of such files. Options apply to every structure. Positions are chain and number in
the file (A12, A12B with insertion code, A10-A20 with both ends), or all are 0-based rows of the
designed chains joined in the order of --chains, gaps counted.

Writes FASTA to --out or to standard output: first a structure's native sequence, then the drawn
ones; or a FASTA file of each structure and one table of all designs to --out_folder. Each file is
written whole or not at all. How the input, above all positions, was understood is printed to
standard error. Wrong input ends with one message and exit code 2. docs/scoring.md defines the
scores, and lists the files of --out_folder.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import csv
import io
import math
import os
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_setup import barrier, print0
from mpnn.batches import collate_complexes
from mpnn.model import MAX_TEMPERATURE, decoding_order, gumbel_noise
from mpnn.settings import Design, letter_bias, name_of, structure_files
from mpnn.weights import find_weights, load_proteinmpnn
from proteins.csv_files import refuse_all
from proteins.letters import LETTERS, X_ID
from proteins.seeds import keyed_generator
from proteins.sequences import named_sequences
from training.command_line import add_launch_arguments
from training.fast_linear import fast_linear
from training.files import check_output, check_writable, write_text_atomic
from training.parser import Parser
from training.problems import in_columns
from training.tool import PATIENCE, open_output, run_tool

DESIGNS = "designs.csv"
MAX_NOISE = 10.0        # Angstrom; published models were trained with 0.02 to 0.3
# Options of the published tool that name weights: here they are the first argument.
PUBLISHED_WEIGHTS = ("--model_name", "--path_to_model_weights", "--use_soluble_model", "--ca_only")
ONLY_DRAWING = ("num", "temperature", "omit", "bias", "tied_positions", "homomer",
                "backbone_noise")


class DesignRow(NamedTuple):
    """The columns of designs.csv. None is called `score`: a user adds a column of that name."""
    pdb: Path
    chain: str
    context: str
    sequence: str
    temperature: str
    sample: int
    mpnn_score: float
    seq_recovery: float
    weights: str            # as the user gave them


# ---- options ----

def make_parser():
    """If an option has two names, the second is that of the published tool."""
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="docs/scoring.md explains scores and the files of --out_folder.")
    add = parser.add_argument
    add("checkpoint", nargs="?", help="weights: a published name (v_48_020, soluble/v_48_010, "
        "ca/v_48_020) or a file, such as best_model.pt of train_dpo_ddp.py")
    add("structures", nargs="*", metavar="structure", help="PDB or mmCIF files, or folders of them")
    add("--pdb_path", action="append", default=[], metavar="STRUCTURE",
        help="a structure, as in the published tool")
    group = parser.add_argument_group("what is designed")
    add = group.add_argument
    add("--chains", "--pdb_path_chains", nargs="+", metavar="CHAIN",
        help="to design; default: all others that have a backbone")
    add("--fixed_chains", nargs="*", metavar="CHAIN",
        help="context; default: all others that have a backbone; without a name: none")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--fixed_positions", nargs="+", metavar="POSITION",
            help="positions of the designed chains that keep their letters")
    add_one("--mutable_positions", nargs="+", metavar="POSITION", help="the only ones to design")
    group = parser.add_argument_group("drawing")
    add = group.add_argument
    add("--num", "--num_seq_per_target", type=int, metavar="N",
        help="sequences per structure and temperature; default 1")
    add("--temperature", "--sampling_temp", nargs="+", metavar="T",
        help="one or more; default 0.1; 0 takes the most likely letter")
    add("--omit", "--omit_AAs", metavar="LETTERS", help="amino acids never drawn, such as CM")
    add("--bias", nargs="+", metavar="LETTER=NATS",
        help="added to logits before the temperature, such as E=0.5 K=-1")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--tied_positions", nargs="+", metavar="GROUP",
            help="positions that get the same letter: A1,B1 A2,B2 or, as ranges, A1-A2,B1-B2")
    add_one("--homomer", action="store_true", default=None,
            help="tie residues of equal number in the designed chains")
    add("--backbone_noise", type=float, default=0.0, metavar="ANGSTROM",
        help="standard deviation of noise on atoms, new for each sequence; default 0")
    add = parser.add_argument_group("scoring and running").add_argument
    add("--score_only", "--path_to_fasta", nargs="*", action="extend", metavar="FASTA",
        help="score the sequences of these files, or else the native one; nothing is drawn")
    add("--orders", type=int, default=4, metavar="N",
        help="decoding orders that scores are averaged over; default 4")
    add("--batch_size", type=int, default=8, metavar="N",
        help="sequences per pass; changes memory and speed, not the result; default 8")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    group = parser.add_argument_group("output").add_mutually_exclusive_group()
    group.add_argument("--out", type=Path, metavar="FILE",
                       help="one FASTA file; default: standard output")
    group.add_argument("--out_folder", type=Path, metavar="DIR",
                       help="files of each structure in sub-folders, and designs.csv")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    """Options, with defaults for drawing. ValueError for those that do not fit together."""
    check_no_published_weights(argv)
    args = make_parser().parse_intermixed_args(argv)
    if args.checkpoint is None:
        raise ValueError("found no weights; expected them as the first argument, such as v_48_020.")
    args.structures += args.pdb_path
    if not args.structures:
        raise ValueError("found no structure; expected PDB or mmCIF files, or folders of them, "
                         "after the weights.")
    for_drawing = [f"--{name}" for name in ONLY_DRAWING if getattr(args, name) not in (None, 0)]
    args.drawing = args.score_only is None
    if not args.drawing:    # the published tool's: --score_only 1 --path_to_fasta FILE
        args.score_only = [text for text in args.score_only if text != "1"]
    if for_drawing and not args.drawing:
        raise ValueError(f"found {' '.join(for_drawing)} with --score_only, which draws nothing; "
                         "expected one of the two.")
    if args.num is None:
        args.num = 1
    for name in ("num", "batch_size", "orders"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")
    args.temperature = temperatures(args.temperature or ["0.1"])
    args.letter_bias = letter_bias(args)
    if not 0 <= args.backbone_noise <= MAX_NOISE:
        raise ValueError(f"found --backbone_noise {args.backbone_noise}; expected Angstrom from 0 "
                         f"to {MAX_NOISE:g}, such as 0.1.")
    if abs(args.seed) >= 2**63:
        raise ValueError(f"found --seed {args.seed}; expected at most {2**63 - 1}.")
    return args


def check_no_published_weights(argv):
    """ValueError for an option of PUBLISHED_WEIGHTS."""
    for word in argv:
        if word.partition("=")[0] in PUBLISHED_WEIGHTS:
            raise ValueError(f"found {word}, an option of the published tool; expected the weights "
                             "as the first argument: v_48_020, soluble/v_48_020, ca/v_48_020 or a "
                             "file.")


def temperatures(texts):
    """Numbers of --temperature."""
    try:
        numbers = [float(text) for text in " ".join(texts).replace(",", " ").split()]
    except ValueError:
        numbers = []
    are_in_range = all(0 <= T <= MAX_TEMPERATURE for T in numbers)
    if not numbers or len(set(numbers)) < len(numbers) or not are_in_range:
        raise ValueError(f"found --temperature {' '.join(texts)}; expected numbers from 0 to "
                         f"{MAX_TEMPERATURE:g}, such as 0.1, each once.")
    return numbers


def check_outputs(args, paths):
    """ValueError for files that cannot be written, or that are an input. paths: of structures."""
    inputs = [args.checkpoint, *paths, *(args.score_only or ())]
    if args.out is not None:
        check_output(args.out, inputs)
    if args.out_folder is None:
        return
    folder = args.out_folder
    if not folder.parent.is_dir() or folder.exists() and not folder.is_dir():
        raise ValueError(f"found --out_folder {folder}; expected the name of a folder, in one that "
                         "exists.")
    check_writable(folder)
    outputs = [fasta_path(args, name_of(path)) for path in paths]
    if args.drawing:
        outputs.append(folder / DESIGNS)
    for path in outputs:
        if path.exists():
            check_output(path, inputs)


def fasta_path(args, name):
    """The file of a structure's sequences in --out_folder."""
    kind = "seqs"
    if not args.drawing:    # earlier designs in the same folder stay
        kind = "scored"
    return args.out_folder / kind / f"{name}.fa"


# ---- sequences and their scores ----

def random_order(design, *words):
    """(1, L) random decoding order, seeded by these words, fixed residues first."""
    randn = torch.randn(1, len(design.drawn), dtype=torch.float64,
                        generator=keyed_generator(*words))
    return decoding_order(torch.from_numpy(design.drawn)[None].long(), randn)


def with_noise(tensors, seeds, angstrom):
    """The tensors of one structure, repeated for each seed with noise on all present atoms."""
    X = tensors["X"]
    noise = torch.cat([torch.randn(X.shape, dtype=torch.float64,
                                   generator=keyed_generator(*seed, "backbone"))
                       for seed in seeds])
    is_present = (X != 0).any(-1, keepdim=True)
    noisy = {name: x.expand(len(seeds), *x.shape[1:]) for name, x in tensors.items()}
    noisy["X"] = X + (angstrom * noise).float() * is_present
    return noisy


def draw_sequences(model, encoding, design, temperature, bias, seeds):
    """Draw S (M, L) int64, one sequence for each seed of random numbers, a tuple.

    encoding: of the structure, or of one noisy copy for each seed.
    bias: (21,) nats of letters."""
    device = encoding.mask.device
    L = len(design.drawn)
    V = len(LETTERS)
    orders = torch.cat([random_order(design, *seed, "order") for seed in seeds])
    uniform = torch.stack([torch.rand(L, V, dtype=torch.float64,
                                      generator=keyed_generator(*seed, "letters"))
                           for seed in seeds])
    S = torch.from_numpy(design.complex.S.astype(np.int64)).expand(len(seeds), L)
    drawn = torch.from_numpy(design.drawn)[None]
    S, _ = model.sample(encoding, S.to(device), drawn.to(device), orders.to(device), temperature,
                        bias, tied=design.tied, noise=gumbel_noise(uniform))
    return S.cpu()


def score(model, encoding, design, args, S):
    """(M, 2) float64 in nats, score and global score of sequences S (M, L).

    X, an unknown residue, is not scored.
    """
    device = encoding.mask.device
    total = 0.0
    known = (S != X_ID) & torch.from_numpy(design.complex.mask)
    drawn = torch.from_numpy(design.drawn)
    weights = torch.stack([known & drawn, known], dim=1).double()                   # (M, 2, L)
    letters = S.to(device)
    for k in range(args.orders):
        order = random_order(design, args.seed, "score", k).expand(S.shape).to(device)
        log_probs = model.decode(encoding, letters, order)
        total = total - log_probs.gather(-1, letters[..., None])[..., 0].cpu().double()     # (M, L)
    return (weights * total[:, None] / args.orders).sum(-1) / weights.sum(-1)


def recovery(design, S):
    """Fraction of designed, resolved residues with the native letter, where that is known."""
    counted = design.drawn & (design.complex.S != X_ID)
    if not counted.any():
        return math.nan
    return (S[counted] == design.complex.S[counted]).mean()


class Batch(NamedTuple):
    """M sequences that are scored together."""
    heads: list                 # of (text, text): the scores are written between them
    S: torch.Tensor             # (M, L) int64
    draws: list | None = None   # of (temperature, number), of drawn sequences


def given_batches(design, args, given):
    """Yield a Batch of the sequences given with --score_only, [(header, S (L,))]."""
    for first in range(0, len(given), args.batch_size):
        heads, S = zip(*given[first:first + args.batch_size])
        weights = f", model_name={args.weights}"
        heads = [(title(design, args) + without_scores(head), weights) for head in heads]
        yield Batch(heads, torch.from_numpy(np.stack(S).astype(np.int64)))


def without_scores(head):
    """A header without scores of an earlier call, and without the weights that gave them."""
    head = re.sub(r",? +(score|global_score|seq_recovery)=[^,\s]*", "", head)
    return re.sub(r",? +model_name=[^,]*", "", head)    # a path may have blanks


def native_batch(design, args):
    """The Batch of the native sequence."""
    about = (f", fixed_chains={list(design.complex.fixed)}, designed_chains={design.chains}, "
             f"model_name={args.weights}, seed={args.seed}")
    S = torch.from_numpy(design.complex.S.astype(np.int64))[None]
    return Batch([(design.name, about)], S)


def drawn_batches(model, encoding, tensors, design, args):
    """Yield a Batch of the sequences that are drawn."""
    for temperature in args.temperature:
        for first in range(1, args.num + 1, args.batch_size):
            numbers = range(first, min(first + args.batch_size, args.num + 1))
            seeds = [(args.seed, design.name, repr(temperature), k) for k in numbers]
            seen = encoding
            if args.backbone_noise:
                noisy = with_noise(tensors, seeds, args.backbone_noise)
                seen = model.encode(model.graph(**noisy).to(encoding.mask.device))
            S = draw_sequences(model, seen, design, temperature, args.letter_bias, seeds)
            heads = [(f"{title(design, args)}T={temperature:g}, sample={k}", "") for k in numbers]
            yield Batch(heads, S, [(temperature, k) for k in numbers])


def title(design, args):
    """What a header begins with if one FASTA has several structures."""
    return f"{design.name}, " if args.many_in_one else ""


def header(begin, end, figures):
    """Header of a sequence. figures: {name: number}; those that are nan are left out."""
    texts = [f"{name}={value:.4f}" for name, value in figures.items() if not math.isnan(value)]
    text = ", ".join(texts) or "no residue of known letter"
    return f">{begin}, {text}{end}"


def make_results(model, design, args, given, device):
    """(FASTA text of one structure, its DesignRows, lines on them or on the given sequences).

    given: [(header, S (L,))] of the sequences to score; empty: the native one and drawn ones.
    """
    tensors = collate_complexes([design.complex], ("X", "mask", "residue_idx", "chain_id"))
    encoding = model.encode(model.graph(**tensors).to(device))
    lines = []
    rows = []
    counted = []    # (score, recovery) of designs, or of given sequences but the native one
    for batch in batches_of(model, encoding, tensors, design, args, given):
        scores = score(model, encoding, design, args, batch.S)
        for (begin, end), S, (mean, whole) in zip(batch.heads, batch.S.numpy(), scores.tolist()):
            figures = {"score": mean, "global_score": whole, "seq_recovery": recovery(design, S)}
            lines += [header(begin, end, figures), design.text(S)]
            if batch.draws or given and (S != design.complex.S).any():
                counted.append((mean, figures["seq_recovery"]))
        if batch.draws:
            rows += design_rows(design, batch, scores[:, 0].tolist(), args.weights)
    said = ""
    if counted:
        what = "sequences other than the native one" if given else "designs"
        said = describe_means(design, what, counted)
    if rows:
        said += describe_designs(design, rows)
    return "\n".join(lines) + "\n", rows, said


def batches_of(model, encoding, tensors, design, args, given):
    """Yield the Batches of one structure. Arguments as in make_results."""
    if given:
        yield from given_batches(design, args, given)
        return
    yield native_batch(design, args)
    if args.drawing:
        yield from drawn_batches(model, encoding, tensors, design, args)


# ---- the table of designs ----

def design_rows(design, batch, scores, weights):
    """The DesignRows of drawn sequences. scores: of each. weights: as the user gave them."""
    path = Path(design.structure.name)
    path = path.parent.resolve() / path.name    # so that the table may be copied elsewhere
    rows = []
    for S, (temperature, number), mpnn_score in zip(batch.S.numpy(), batch.draws, scores):
        rows.append(DesignRow(
            path, " ".join(design.chains), " ".join(design.complex.fixed), design.text(S),
            f"{temperature:g}", number, mpnn_score, recovery(design, S), weights))
    return rows


def csv_text(rows):
    """CSV of DesignRows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(DesignRow._fields)
    for row in rows:
        writer.writerow(row._replace(mpnn_score=f"{row.mpnn_score:.4f}",
                                     seq_recovery=f"{row.seq_recovery:.4f}"))
    return text.getvalue()


def describe_means(design, what, counted):
    """A line on (score, recovery) of sequences of a structure. what: which these are."""
    mean_score, mean_recovery = map(statistics.fmean, zip(*counted))
    return (f"{design.name}: mean of {len(counted):,} {what}: score {mean_score:.3f}, "
            f"recovery {mean_recovery:.3f}")


def describe_designs(design, rows):
    """What follows their means on the DesignRows of a structure, and further lines."""
    text = ""
    if len(rows) > 1:
        letters = np.array([list(row.sequence.replace("/", "")) for row in rows])
        text = f", diversity {diversity(letters[:, design.drawn[design.rows]]):.3f}"
    places = places_of_x(design, rows[0].sequence)
    if places:
        n_unknown = rows[0].sequence.count("X")
        text += (f"\n{design.name}: each design has {n_unknown} X, where no letter is drawn: gaps, "
                 f"and fixed residues of unknown letter. They are at letters {places}, counted "
                 "from 1 in each chain: model the missing residues, or cut them out.")
    return text


def places_of_x(design, sequence):
    """Where a design has X, such as "A 31-42, A 60"; "" if it has none."""
    places = []
    for name, letters in zip(design.chains, sequence.split("/")):
        for run in re.finditer("X+", letters):
            first = run.start() + 1
            places.append(f"{name} {first}-{run.end()}" if run.end() > first else f"{name} {first}")
    return ", ".join(places)


def diversity(letters):
    """The fraction of residues in which two of N designs differ, in the mean over pairs of them.

    letters: (N, L) array, N of at least two."""
    n, length = letters.shape
    n_equal = 0     # ordered pairs with the same letter
    for letter in np.unique(letters):
        with_it = (letters == letter).sum(0)
        n_equal += (with_it * (with_it - 1)).sum()
    return 1 - n_equal / (n * (n - 1) * length)


# ---- command ----

def run(args, ddp):
    """Do what the options say, on the first rank. Raises ValueError or OSError."""
    if ddp.world_size > 1:
        print0(ddp, f"found {ddp.world_size} ranks: the first one does all the work",
               file=sys.stderr)
    if ddp.is_main:
        draw_and_score(args, ddp)
    barrier(ddp, timeout=PATIENCE)   # the others wait longer than they would at the end


@torch.no_grad()
def draw_and_score(args, ddp):
    """Read everything, then write structure by structure. Raises ValueError or OSError."""
    paths = structure_files(args.structures)
    args.weights = args.checkpoint      # as the user gave them: headers and tables name these
    args.checkpoint = str(find_weights(args.checkpoint))
    args.many_in_one = len(paths) > 1 and args.out_folder is None
    for path in args.score_only or ():
        if not os.path.isfile(path):
            raise ValueError(f"--score_only: there is no file {path}; expected FASTA files, or "
                             "none for the native sequence.")
    check_outputs(args, paths)
    model = load_proteinmpnn(args.checkpoint, product=fast_linear).eval().to(ddp.device)
    designs = make_designs(paths, args, model.ca_only)
    given = [read_given(args, design) for design in designs]
    table = []      # DesignRows of all structures
    with open_output(args.out, ddp) as write:
        try:
            for design, sequences in zip(designs, given):
                text, rows, said = make_results(model, design, args, sequences, ddp.device)
                tell(args, design, len(text.splitlines()) // 2, sequences, ddp.device)
                if said:
                    print(in_columns(said), file=sys.stderr)
                if args.out_folder:
                    write_text_atomic(fasta_path(args, design.name), text)
                else:
                    write(text)
                table += rows
        finally:    # after Ctrl-C or out of memory: those of finished structures
            if args.out_folder and table:
                write_text_atomic(args.out_folder / DESIGNS, csv_text(table))


def make_designs(paths, args, ca_only):
    """The Design of each path. With several paths, a ValueError names its path.

    ca_only: for a CA-only model."""
    designs = []
    problems = []
    for path in paths:
        try:
            designs.append(Design(path, args, ca_only))
        except (ValueError, OSError) as error:
            if len(paths) == 1:
                raise
            named = "" if str(error).startswith(str(path)) else f"{path}: "
            problems.append(f"{named}{error}")
    if len(problems) == 1:
        raise ValueError(problems[0])
    refuse_all("the given structures", problems, "of them")
    return designs


def read_given(args, design):
    """[(header, S (L,))] of the sequences of --score_only, as of one structure."""
    given = []
    for path in args.score_only or ():
        problems = []
        for number, (head, text) in enumerate(named_sequences(path), 1):
            try:
                given.append((head, design.ids(text, f"sequence {number} ({head:.40})")))
            except ValueError as error:
                problems.append(str(error))
        refuse_all(path, problems, "sequences")
    return given


def tell(args, design, n_sequences, given, device):
    """Print how the input of a structure was understood, and where its sequences are."""
    native = "" if given else ", the first of them the native one"
    where = args.out or "standard output"
    if args.out_folder:
        where = fasta_path(args, design.name)
    lines = [*design.notes,
             f"{device}: {args.checkpoint}, {n_sequences} sequence(s){native}, to {where}"]
    if args.drawing:
        lines.append(f"scores are means over {args.orders} decoding orders, the same for all "
                     "sequences; the published tool scores a design in the order in which it was "
                     "drawn: about 0.08 lower at temperature 0.1")
    print(in_columns("\n".join(lines)), file=sys.stderr)


def main(argv=None):
    run_tool("sample_proteinmpnn.py", argv, read_arguments, run)


if __name__ == "__main__":
    main()
