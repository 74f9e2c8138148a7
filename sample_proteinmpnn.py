"""Draw sequences for backbones with ProteinMPNN, score given ones, or write probabilities.

    python sample_proteinmpnn.py v_48_020 5L33.pdb --num 8 --out designs.fasta
    python sample_proteinmpnn.py best_model.pt complex.cif --chains A --temperature 0.1 0.2 \\
        --mutable_positions A10-A20 A25
    python sample_proteinmpnn.py v_48_020 dimer.pdb --chains A B --homomer --omit C --bias E=0.5
    python sample_proteinmpnn.py v_48_020 backbones/ --out_folder designs --save_probs
    python sample_proteinmpnn.py v_48_020 5L33.pdb --score_only designs.fasta
    python sample_proteinmpnn.py v_48_020 5L33.pdb --score_only         # the native sequence alone
    python sample_proteinmpnn.py v_48_020 5L33.pdb --out_folder out --conditional_probs

Reads weights in the published format and structures (.pdb, .ent, .cif, .mmcif, also with .gz):
files, or folders of such files. Options apply to every structure. Positions are chain and number in
the file (A12, A12B with insertion code, A10-A20 with both ends), or all are 0-based rows of the
designed chains joined in the order of --chains, gaps counted. Files of settings (--..._jsonl) are
those of the published tool, see mpnn/official_settings.py.

Writes FASTA to --out or to standard output: first a structure's native sequence, then the drawn
ones; or files of each structure and one table of all designs to --out_folder. How the input, above
all positions, was understood is printed to standard error. Wrong input ends with one message and
exit code 2. docs/data.md defines scores and probabilities, and lists the files of --out_folder.
"""
import csv
import io
import itertools
import math
import os
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_setup import SetupError, detect_launcher
from mpnn.batches import collate_complexes
from mpnn.designs import diversity
from mpnn.model import MAX_TEMPERATURE, decoding_order, gumbel_noise
from mpnn.official_settings import PER_STRUCTURE, read_json
from mpnn.published import find_weights
from mpnn.settings import Design, letter_bias, name_of, structure_files
from mpnn.variants import log_probs_decoded_last
from mpnn.weights import load_proteinmpnn
from proteins.letters import LETTERS, X_ID
from proteins.seeds import keyed_generator
from proteins.sequences import named_sequences
from proteins.tables import refuse_all
from training.fast_linear import fast_linear
from training.files import check_output, check_writable, write_text_atomic, write_whole
from training.parser import Parser
from training.tool import refuse_moved_options

DESIGNS = "designs.csv"
# Its columns. No `score`: that is the name of the column which a user adds.
DESIGN_COLUMNS = ("pdb", "chain", "context", "sequence", "temperature", "sample",
                  "mpnn_score", "seq_recovery")
MAX_NOISE = 10.0        # Angstrom; published models were trained with 0.02 to 0.3
SAVED = ("save_scores", "save_probs", "unconditional_probs", "conditional_probs")
NOT_DRAWING = ("score_only", "unconditional_probs", "conditional_probs")
ONLY_DRAWING = ("num", "temperature", "omit", "bias", "tied_positions", "homomer", "bias_AA_jsonl",
                "tied_positions_jsonl", "bias_by_res_jsonl", "pssm_jsonl", "pssm_multi",
                "backbone_noise", "save_probs")
# Options of the published command, and former ones of ours, that have another form here: what to
# give instead.
OTHER_FORMS = {
    "--pdb_path": "the structure itself, after the weights",
    "--jsonl_path": "the PDB or mmCIF files themselves, or their folder, after the weights",
    "--path_to_model_weights": "the file of weights as the first argument",
    "--model_name": "the weights as the first argument, such as v_48_020",
    "--use_soluble_model": "soluble/v_48_020, or a file of soluble_model_weights, as the first "
                           "argument",
    "--ca_only": "ca/v_48_020, or a file of ca_model_weights, as the first argument: a CA-only "
                 "model is told from its weights",
    "--path_to_fasta": "--score_only FASTA",
    "--conditional_probs_only_backbone": "--unconditional_probs",
    "--pssm_bias_flag": "--pssm_multi above 0, which uses the PSSM's bias; 0 does not",
    "--pssm_log_odds_flag": "--pssm_jsonl with the probabilities alone",
    "--pssm_threshold": "--pssm_jsonl with the probabilities alone",
    "--omit_AA_jsonl": "--bias_by_res_jsonl with -10000 for letters that shall not be drawn",
    "--max_length": "nothing: there is no longest sequence",
    "--suppress_print": "nothing, or 2> /dev/null: notes go to standard error",
}


# ---- options ----

def make_parser():
    """If an option has two names, the second is that of the published tool."""
    parser = Parser(
        description=__doc__, allow_abbrev=False,
        epilog="docs/data.md explains scores, probabilities and the files of --out_folder.")

    def flag(*names, help):
        add(*names, nargs="?", const=1, type=int, choices=(0, 1), metavar="1", help=help)

    add = parser.add_argument
    add("checkpoint", help="weights: a published name (v_48_020, soluble/v_48_010, ca/v_48_020) "
        "or a file, such as best_model.pt of train_dpo_ddp.py")
    add("structures", nargs="+", metavar="structure", help="PDB or mmCIF files, or folders of them")
    group = parser.add_argument_group("what is designed")
    add = group.add_argument
    add("--chains", "--pdb_path_chains", nargs="+", metavar="CHAIN",
        help="to design; default: all others that have a backbone")
    add("--fixed_chains", nargs="*", metavar="CHAIN",
        help="context; default: all others that have a backbone; without a name: none")
    add("--chain_id_jsonl", metavar="FILE", help="designed and fixed chains of each structure")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--fixed_positions", nargs="+", metavar="POSITION",
            help="positions of the designed chains that keep their letters")
    add_one("--mutable_positions", nargs="+", metavar="POSITION", help="the only ones to design")
    add_one("--fixed_positions_jsonl", metavar="FILE", help="fixed positions of each structure")
    group = parser.add_argument_group("drawing")
    add = group.add_argument
    add("--num", "--num_seq_per_target", type=int, metavar="N",
        help="sequences per structure and temperature; default 1")
    add("--temperature", "--sampling_temp", nargs="+", metavar="T",
        help="one or more; default 0.1; 0 takes the most likely letter")
    add("--omit", "--omit_AAs", metavar="LETTERS", help="amino acids never drawn, such as CM")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--bias", nargs="+", metavar="LETTER=NATS",
            help="added to logits before the temperature, such as E=0.5 K=-1")
    add_one("--bias_AA_jsonl", metavar="FILE", help="the same as a file")
    add("--bias_by_res_jsonl", metavar="FILE", help="bias by position, added to that of letters")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--tied_positions", nargs="+", metavar="GROUP",
            help="positions that get the same letter: A1,B1 A2,B2 or, as ranges, A1-A2,B1-B2")
    add_one("--homomer", action="store_true", default=None,
            help="tie residues of equal number in the designed chains")
    add_one("--tied_positions_jsonl", metavar="FILE", help="tied positions of each structure")
    add("--backbone_noise", type=float, default=0.0, metavar="ANGSTROM",
        help="standard deviation of noise on atoms, new for each sequence; default 0")
    add("--pssm_jsonl", metavar="FILE", help="position-specific scoring matrices")
    add("--pssm_multi", type=float, default=0.0, metavar="SHARE",
        help="0 to 1: weight of the PSSM in the probabilities; default 0")
    add = parser.add_argument_group("scoring and running").add_argument
    add("--score_only", nargs="*", metavar="FASTA",
        help="score the sequences of these files, or else the native one; nothing is drawn")
    add("--orders", type=int, default=4, metavar="N",
        help="decoding orders that scores are averaged over; default 4")
    add("--batch_size", type=int, default=8, metavar="N",
        help="sequences per pass; changes memory and speed, not the result; default 8")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--device", choices=("auto", "cpu", "cuda", "xpu"), default="auto")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--out", type=Path, metavar="FILE", help="one FASTA file; default: standard output")
    add_one("--out_folder", type=Path, metavar="DIR",
            help="files of each structure in sub-folders, and designs.csv")
    flag("--save_scores", "--save_score", help="with --out_folder: scores of the sequences")
    flag("--save_probs", help="with --out_folder: probabilities of designs, by position")
    flag("--unconditional_probs", "--unconditional_probs_only",
         help="with --out_folder: letters given the backbone alone; nothing is drawn")
    flag("--conditional_probs", "--conditional_probs_only",
         help="with --out_folder: letters given all other residues; nothing is drawn")
    return parser


def parse_arguments(argv):
    """Options, with defaults for drawing. ValueError for errors that argparse does not find."""
    refuse_moved_options(argv)
    refuse_other_forms(argv)
    args = make_parser().parse_intermixed_args(argv)

    def given(names):
        return [f"--{name}" for name in names if getattr(args, name) not in (None, 0)]

    if args.chain_id_jsonl and (args.chains or args.fixed_chains is not None):
        raise ValueError("found --chain_id_jsonl with --chains or --fixed_chains; expected one of "
                         "the two ways.")
    not_drawing = given(NOT_DRAWING)
    for_drawing = given(ONLY_DRAWING)
    if not_drawing and for_drawing:
        raise ValueError(f"found {' '.join(for_drawing)} with {not_drawing[0]}, which draws "
                         "nothing; expected one of the two.")
    if given(SAVED) and args.out_folder is None:
        raise ValueError(f"found {' '.join(given(SAVED))} without --out_folder; expected both.")
    args.drawing = not not_drawing
    if args.num is None:
        args.num = 1
    for name in ("num", "batch_size", "orders"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")
    args.temperature = temperatures(args.temperature or ["0.1"])
    if not 0 <= args.backbone_noise <= MAX_NOISE:
        raise ValueError(f"found --backbone_noise {args.backbone_noise}; expected Angstrom from 0 "
                         f"to {MAX_NOISE:g}, such as 0.1.")
    check_pssm_options(args)
    return args


def refuse_other_forms(argv):
    """ValueError that names what to give here for an option that has another form."""
    for option in [word.partition("=")[0] for word in argv]:
        if option in OTHER_FORMS:
            raise ValueError(f"found {option}; here give {OTHER_FORMS[option]}.")


def temperatures(texts):
    """Numbers of --temperature."""
    try:
        found = [float(text) for text in " ".join(texts).replace(",", " ").split()]
    except ValueError:
        found = []
    are_in_range = all(0 <= T <= MAX_TEMPERATURE for T in found)
    if not found or len(set(found)) < len(found) or not are_in_range:
        raise ValueError(f"found --temperature {' '.join(texts)}; expected numbers from 0 to "
                         f"{MAX_TEMPERATURE:g}, such as 0.1, each once.")
    return found


def check_pssm_options(args):
    """ValueError for options of PSSMs that would have no effect, or are out of range."""
    if bool(args.pssm_jsonl) != bool(args.pssm_multi):
        raise ValueError("found one of --pssm_jsonl FILE and --pssm_multi above 0; expected both.")
    if not 0 <= args.pssm_multi <= 1:
        raise ValueError(f"found --pssm_multi {args.pssm_multi}; expected 0 to 1.")


def output_files(args, paths):
    """{structure name: {kind: path}} of the files to write; {} for standard output.

    Raises: ValueError for a file that cannot be written, or that is an input.
    """
    if args.out_folder is None and args.out is None:
        return {}
    files = {}
    for path in paths:
        name = name_of(path)
        files[name] = {"seqs": args.out}
        if args.out_folder is not None:
            files[name] = files_in_out_folder(args, name)
    check_target(args)
    settings = [getattr(args, name) for name in (*PER_STRUCTURE, "bias_AA_jsonl")]
    inputs = [args.checkpoint, *paths, *(args.score_only or ()), *filter(None, settings)]
    outputs = {path for kinds in files.values() for path in kinds.values()}
    if args.out_folder is not None and args.drawing:
        outputs.add(args.out_folder / DESIGNS)
    for path in sorted(path for path in outputs if path.exists()):
        check_output(path, inputs)
    return files


def check_target(args):
    """ValueError for --out that cannot be a file, or --out_folder that cannot be a folder."""
    target = args.out_folder or args.out
    is_of_wrong_kind = target.exists() and target.is_dir() != (args.out_folder is not None)
    if not target.parent.is_dir() or is_of_wrong_kind:
        raise ValueError(f"found {target}; expected the name of a file with --out, of a folder "
                         "with --out_folder, in a folder that exists.")
    check_writable(target)


def files_in_out_folder(args, name):
    """{kind: path} of the files of one structure in --out_folder."""
    files = {"seqs": args.out_folder / "seqs" / f"{name}.fa"}
    for option in SAVED:
        if getattr(args, option):
            kind = option.removeprefix("save_")
            files[kind] = args.out_folder / kind / f"{name}.npz"
    if not args.drawing:    # do not overwrite earlier designs in the same folder
        files["seqs"] = args.out_folder / "scored" / f"{name}.fa"
        if "scores" in files:
            files["scores"] = args.out_folder / "scored" / f"{name}.npz"
    return files


def choose_device(name):
    """The device of --device; auto: the first that torch finds. ValueError for one it lacks."""
    found = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    found.append("cpu")
    if name == "auto":
        return torch.device(found[0])
    if name not in found:
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no such device; it "
                         f"finds {' '.join(found)}.")
    return torch.device(name)


# ---- sequences, scores, probabilities ----

def random_order(design, *key):
    """(1, L) random decoding order, seeded by the key, fixed residues first."""
    randn = torch.randn(1, len(design.drawn), dtype=torch.float64,
                        generator=keyed_generator(*key))
    return decoding_order(torch.from_numpy(design.drawn)[None].long(), randn)


def with_noise(tensors, keys, angstrom):
    """The tensors of one structure, repeated for each key with noise on all present atoms."""
    X = tensors["X"]
    noise = torch.cat([torch.randn(X.shape, dtype=torch.float64,
                                   generator=keyed_generator(*key, "backbone")) for key in keys])
    is_present = (X != 0).any(-1, keepdim=True)
    noisy = {name: x.expand(len(keys), *x.shape[1:]) for name, x in tensors.items()}
    noisy["X"] = X + (angstrom * noise).float() * is_present
    return noisy


def draw_sequences(model, encoding, design, temperature, keys):
    """Draw one sequence for each key, the seed of its random numbers.

    encoding: of the structure, or of one noisy copy for each key.
    Returns: S (M, L) int64; the probabilities that letters were drawn from, (M, L, 21); the orders
        (M, L) in which they were drawn.
    """
    device = encoding.mask.device
    L = len(design.drawn)
    V = len(LETTERS)
    orders = torch.cat([random_order(design, *key, "order") for key in keys])
    uniform = torch.stack([torch.rand(L, V, dtype=torch.float64,
                                      generator=keyed_generator(*key, "letters")) for key in keys])
    S = torch.from_numpy(design.complex.S.astype(np.int64)).expand(len(keys), L)
    drawn = torch.from_numpy(design.drawn)[None]
    S, probs = model.sample(
        encoding, S.to(device), drawn.to(device), orders.to(device), temperature, design.bias,
        tied=design.tied, pssm=design.pssm, noise=gumbel_noise(uniform))
    return S.cpu(), probs.cpu(), orders


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


def conditional_log_probs(model, encoding, design, args, S):
    """(L, 21) log of each residue's mean probability over orders, given all others of S (L,)."""
    device = encoding.mask.device
    rows = np.flatnonzero(design.drawn).tolist()
    probs = torch.zeros(len(S), len(LETTERS), dtype=torch.float64)
    for k in range(args.orders):
        order = random_order(design, args.seed, "score", k).to(device)
        log_p = log_probs_decoded_last(model, encoding, S[None].to(device), order, rows)
        probs[rows] += log_p.cpu().double().exp() / args.orders
    return probs.log()


class Scored(NamedTuple):
    """M sequences that are scored together."""
    heads: list                 # of (text, text): the scores are written between them
    S: torch.Tensor             # (M, L) int64
    draws: list | None = None   # of (temperature, number), of drawn sequences
    probs: torch.Tensor | None = None   # (M, L, 21) that letters were drawn from
    orders: torch.Tensor | None = None  # (M, L) in which they were drawn


def given_batches(design, args, given):
    """Yield Scored of the sequences given with --score_only, [(header, S (L,))]."""
    for first in range(0, len(given), args.batch_size):
        heads, S = zip(*given[first:first + args.batch_size])
        old_scores = r",? +(score|global_score|seq_recovery)=[^,\s]*"   # of an earlier call
        heads = [(title(design, args) + re.sub(old_scores, "", head), "") for head in heads]
        yield Scored(heads, torch.from_numpy(np.stack(S).astype(np.int64)))


def native_batch(design, args):
    """Scored of the native sequence."""
    about = (f", fixed_chains={list(design.complex.fixed)}, designed_chains={design.chains}, "
             f"model_name={Path(args.checkpoint).stem}, seed={args.seed}")
    S = torch.from_numpy(design.complex.S.astype(np.int64))[None]
    return Scored([(design.name, about)], S)


def drawn_batches(model, encoding, tensors, design, args):
    """Yield Scored of the sequences that are drawn."""
    for temperature in args.temperature:
        for first in range(1, args.num + 1, args.batch_size):
            numbers = range(first, min(first + args.batch_size, args.num + 1))
            keys = [(args.seed, design.name, repr(temperature), k) for k in numbers]
            seen = encoding
            if args.backbone_noise:
                noisy = with_noise(tensors, keys, args.backbone_noise)
                seen = model.encode(model.graph(**noisy).to(encoding.mask.device))
            S, probs, orders = draw_sequences(model, seen, design, temperature, keys)
            heads = [(f"{title(design, args)}T={temperature:g}, sample={k}", "") for k in numbers]
            yield Scored(heads, S, [(temperature, k) for k in numbers], probs, orders)


def title(design, args):
    """What a header begins with if one FASTA has several structures."""
    return f"{design.name}, " if args.many_in_one else ""


def header(begin, end, figures):
    """Header of a sequence. figures: {name: number}; those that are nan are left out."""
    texts = [f"{name}={value:.4f}" for name, value in figures.items() if not math.isnan(value)]
    text = ", ".join(texts) or "no residue of known letter"
    return f">{begin}, {text}{end}"


def make_results(model, design, args, given, device):
    """FASTA text of one structure, {kind: {name: array}} for the .npz files, and rows of the table
    of designs.

    given: [(header, S (L,))] of the sequences to score; empty: the native one and drawn ones.
    """
    tensors = collate_complexes([design.complex], ("X", "mask", "residue_idx", "chain_id"))
    encoding = model.encode(model.graph(**tensors).to(device))
    batches = [given_batches(design, args, given)]
    if not given:
        batches = [[native_batch(design, args)]]
        if args.drawing:
            batches.append(drawn_batches(model, encoding, tensors, design, args))
    lines = []
    saved = []          # what the .npz files hold: (Scored, scores)
    log_p = []          # conditional log-probabilities of each sequence
    rows = []
    for batch in itertools.chain(*batches):
        scores = score(model, encoding, design, args, batch.S)
        for (begin, end), row, (mean, whole) in zip(batch.heads, batch.S.numpy(), scores.tolist()):
            figures = {"score": mean, "global_score": whole, "seq_recovery": recovery(design, row)}
            lines += [header(begin, end, figures), design.text(row)]
        if batch.draws:
            rows += table_rows(design, batch, scores[:, 0].tolist())
        if args.conditional_probs:
            log_p += [conditional_log_probs(model, encoding, design, args, row) for row in batch.S]
        if batch.probs is not None or not args.drawing:     # the native sequence is not drawn
            saved.append((batch, scores))
    arrays = make_arrays(model, encoding, design, args, saved, log_p)
    return "\n".join(lines) + "\n", arrays, rows


def table_rows(design, batch, scores):
    """Cells of DESIGN_COLUMNS of drawn sequences. scores: of each."""
    path = Path(design.structure.name)
    path = path.parent.resolve() / path.name    # so that the table may be copied elsewhere
    rows = []
    for S, (temperature, number), score in zip(batch.S.numpy(), batch.draws, scores):
        rows.append((path, " ".join(design.chains), " ".join(design.complex.fixed),
                     design.text(S), f"{temperature:g}", number, f"{score:.4f}",
                     f"{recovery(design, S):.4f}"))
    return rows


def csv_text(rows):
    """CSV of rows of DESIGN_COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(DESIGN_COLUMNS)
    writer.writerows(rows)
    return text.getvalue()


def make_arrays(model, encoding, design, args, saved, log_p):
    """{kind: {name: array}} for the .npz files of one structure.

    saved: [(Scored, scores (M, 2))]. log_p: of each sequence (L, 21), with --conditional_probs."""
    device = encoding.mask.device
    mask = design.drawn[design.rows]
    S = torch.cat([batch.S for batch, _ in saved])
    about = {"S": S[:, design.rows].numpy(),
             "header": np.array([begin + end for batch, _ in saved for begin, end in batch.heads]),
             "mask": mask,
             "position": np.array(design.labels),
             "alphabet": np.array(LETTERS)}

    def joined(x):
        """(..., L, 21) by row of the complex -> in the user's order; nan where not designed."""
        return np.where(mask[:, None], x.float().numpy()[..., design.rows, :], np.nan)

    arrays = {}
    if args.save_scores:
        means, global_means = torch.cat([scores for _, scores in saved]).T.numpy()
        arrays["scores"] = {"score": means, "global_score": global_means, **about}
    if args.save_probs:
        probs = torch.cat([batch.probs for batch, _ in saved])
        log_probs = torch.cat([
            model.decode(encoding, batch.S.to(device), batch.orders.to(device)).cpu()
            for batch, _ in saved])
        arrays["probs"] = {"probs": probs[:, design.rows].numpy(), "log_probs": joined(log_probs),
                           **about}
    if args.unconditional_probs:
        found = joined(model.unconditional(encoding)[0].cpu())
        arrays["unconditional_probs"] = {"log_p": found, **about}
    if args.conditional_probs:
        arrays["conditional_probs"] = {"log_p": joined(torch.stack(log_p)), **about}
    return arrays


# ---- command ----

def make_designs(paths, args, ca_only):
    """The Design of each path. With several paths, a ValueError names its path.

    ca_only: for a CA-only model."""
    tables = {option: read_json(getattr(args, option))
              for option in PER_STRUCTURE if getattr(args, option)}
    bias = letter_bias(args)
    designs = []
    problems = []
    for path in paths:
        try:
            designs.append(Design(path, args, bias, tables, ca_only))
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


@torch.no_grad()
def run(args):
    """Read everything, then write structure by structure. Raises ValueError or OSError."""
    paths = structure_files(args.structures)
    args.checkpoint = str(find_weights(args.checkpoint))
    for path in args.score_only or ():
        if not os.path.isfile(path):
            raise ValueError(f"--score_only: there is no file {path}; expected FASTA files, or "
                             "none for the native sequence.")
    files = output_files(args, paths)
    device = choose_device(args.device)
    args.many_in_one = len(paths) > 1 and args.out_folder is None
    model = load_proteinmpnn(args.checkpoint, product=fast_linear).eval().to(device)
    designs = make_designs(paths, args, model.ca_only)
    given = [read_given(args, design) for design in designs]
    texts = []
    table = []      # rows of all designs
    try:
        for design, sequences in zip(designs, given):
            text, arrays, rows = make_results(model, design, args, sequences, device)
            targets = files.get(design.name, {})
            tell(args, design, len(text.splitlines()) // 2, targets, sequences, device)
            if rows:
                print(describe_designs(design, rows), file=sys.stderr)
            texts.append(text)
            if not files:
                print(text, end="", flush=True)
            if args.out_folder:
                write_files(args, design, text, arrays, targets)
            table += rows
    finally:   # after Ctrl-C or out of memory: keep finished structures, and an old --out file
        if args.out and texts:
            done = len(texts) == len(designs)
            path = args.out if done else Path(f"{args.out}.partial")
            write_whole(path, lambda file: file.write("".join(texts).encode()))
            if not done:
                print(f"{len(texts)} of {len(designs)} structures are in {path}", file=sys.stderr)
        if args.out_folder and table:
            write_text_atomic(args.out_folder / DESIGNS, csv_text(table))


def tell(args, design, n_sequences, targets, given, device):
    """Print how the input of a structure was understood, and where its sequences are."""
    native = "" if given else ", the first of them the native one"
    where = targets.get("seqs", "standard output")
    for note in design.notes:
        print(note, file=sys.stderr)
    print(f"{device}: {args.checkpoint}, {n_sequences} sequence(s){native}, to {where}",
          file=sys.stderr)
    if args.drawing:
        print(f"scores are means over {args.orders} decoding orders, the same for all sequences; "
              "the published tool scores a design in the order in which it was drawn: about 0.08 "
              "lower at temperature 0.1", file=sys.stderr)


def describe_designs(design, rows):
    """A line on the designs of a structure. rows: of table_rows."""
    score = statistics.fmean(float(row[-2]) for row in rows)
    recovered = statistics.fmean(float(row[-1]) for row in rows)
    text = (f"{design.name}: mean of {len(rows):,} designs: score {score:.3f}, "
            f"recovery {recovered:.3f}")
    if len(rows) > 1:
        letters = drawn_letters(design, [row[3] for row in rows])
        text += f", diversity {diversity(letters):.3f}"
    return text


def drawn_letters(design, sequences):
    """(N, designed and resolved residues) letters of sequences of DESIGN_COLUMNS."""
    letters = np.array([list(sequence.replace("/", "")) for sequence in sequences])
    return letters[:, design.drawn[design.rows]]


def write_files(args, design, text, arrays, targets):
    """Write the files of a structure in --out_folder."""
    # Remove arrays of an earlier call, which do not belong to these sequences.
    for kind in ("scores", "probs") if args.drawing else ("scored",):
        (args.out_folder / kind / f"{design.name}.npz").unlink(missing_ok=True)
    for kind, values in arrays.items():
        write_whole(targets[kind], lambda file, values=values: np.savez(file, **values))
    write_whole(targets["seqs"], lambda file: file.write(text.encode()))


def is_first_rank() -> bool:
    """Whether this process does the work, which ranks of a launcher do not share: the first does.

    Where the launcher is not clear, this is one process."""
    try:
        place = detect_launcher(os.environ)
    except SetupError:
        return True
    if place.is_main and place.world_size > 1:
        print(f"found {place.world_size} ranks: the first one does all the work", file=sys.stderr)
    return place.is_main


def main(argv):
    try:
        if is_first_rank():
            run(parse_arguments(argv))
        return 0
    except BrokenPipeError:   # such as from `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        out_of_memory = out_of_memory or "allocate memory" in str(error)
        if isinstance(error, RuntimeError) and not out_of_memory:
            raise
        advice = ""
        if out_of_memory:
            advice = " Give a smaller --batch_size, or --device cpu."
        print(f"sample_proteinmpnn.py: error: {error}{advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sample_proteinmpnn.py: interrupted (Ctrl-C)", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
