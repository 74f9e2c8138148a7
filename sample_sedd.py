"""Use a trained SEDD model: sample proteins, fill in scaffolds, score sequences.

    python sample_sedd.py runs/mine/checkpoints/best.pt --number 50 --length 80-120 --out new.fasta
    python sample_sedd.py best.pt --scaffold "MKT[40]GSHHW[12-20]" --number 8
    python sample_sedd.py best.pt --infill templates.fasta             # "_" marks what to sample
    python sample_sedd.py best.pt --score proteins.fasta --out scores.tsv
    python sample_sedd.py best.pt --score wild_type.fasta --each_position
    python sample_sedd.py best.pt --export FOLDER        # config.json, model.safetensors
    mpirun -n 4 python sample_sedd.py ...                              # the same, sooner

CHECKPOINT is best.pt or last.pt of a run, the run's folder (best.pt, else last.pt), a folder that
--export made, or a file in the published SEDD layout. Averaged weights (EMA) are used if the file
has them. Noise, graph and alphabet come from the checkpoint. The result goes to --out, whole or not
at all, or to standard output; notes on the checkpoint and progress go to standard error. Wrong
input ends with one message and exit code 2.

In a notebook:

    sedd = load_sedd("best.pt")
    print(sample_sequences(sedd, ["_" * 100] * 4 + ["MKT____________GSHHW"]))
    print(score_sequences(sedd, ["MKTAYIAKQRQISFVKSHFSRQ"]).bound)
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import hashlib
import itertools
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ddp_setup import Ddp, all_sum, print0, seed_for
from ddp_watch import note_progress
from proteins.csv_files import refuse_all
from proteins.letters import AMINO_ACIDS, X_ID, decode, encode
from proteins.seeds import keyed_generator
from proteins.sequences import Proteins, named_sequences
from sedd.batches import batches_within
from sedd.diffusion import sample, sample_scheduled
from sedd.evaluation import BoundEstimator, draw_lengths, perplexity
from sedd.variants import masked_nll, residue_scores
from sedd.weights import export_sedd, load_sedd
from training.command_line import add_launch_arguments
from training.files import check_output
from training.log import progress_bar
from training.loop import check_alike
from training.parser import Parser
from training.precision import autocast
from training.problems import in_columns
from training.resume import hash_of
from training.tool import open_output, run_tool

FREE = "_"              # marks a position of a template that is to be sampled
BLOCK = 2000            # sequences that are scored together; results are written block by block
INTERVAL = 1.96         # half the width of a 95 % interval, in standard errors
LIKE = 0.9              # part of the longest's length that sequences of one pass should have,
WORTH_A_PASS = 256      # if shorter ones together save so many positions
LONGEST = 10**6         # most residues of a free stretch, or of a template


# ---------------------------------------------------------------- sample
@torch.no_grad()
def sample_sequences(sedd, templates, steps=128,   # noqa: PLR0913  (all have a default)
                     predictor="analytic", temperature=1.0, top_p=1.0, seed=0, tokens=16384,
                     dtype=torch.float32, ddp=None, on_step=None):
    """Sample a sequence for each template. Collective if ddp is given.

    Args:
        templates: texts of the 20 letters, which are kept, and "_", which are sampled: "_" * 100.
            With the uniform graph, at high noise, the model treats kept letters as noise too.
        steps, predictor: see sedd.diffusion.sample.
        temperature, top_p: for the absorbing graph. A letter at a mask has the probability q[y] =
            s[y] / sum of s over the 20 letters, s = exp(log score). It becomes q^(1/temperature),
            restricted to the likeliest letters that together have the probability top_p. The
            number of residues unmasked per step does not change. 1 and 1: the model itself.
        seed: seed, templates and `tokens` determine the result, whatever the number of ranks.
        tokens: positions in a batch, padding included.
        dtype: of autocast.
        on_step: called after each step of this rank, with its total number of steps.
    Returns: list of str, in the order of the templates, without X, on every rank.
    Raises: ValueError for templates or settings that cannot be used.
    """
    ddp = ddp or Ddp(device=next(sedd.model.parameters()).device)
    if not (temperature >= 1e-3 and 0 < top_p <= 1 and steps >= 1 and tokens >= 1):
        raise ValueError(f"found temperature {temperature}, top_p {top_p}, steps {steps}, tokens "
                         f"{tokens}; expected temperature of 0.001 or more, top_p above 0 up to 1, "
                         "and at least 1 step and token.")
    shaped = (temperature, top_p) != (1.0, 1.0)
    if shaped and not sedd.graph.absorb:
        raise ValueError("temperature and top_p are defined for the absorbing graph; this model "
                         "has the uniform one. Expected 1.0 for both.")
    rows = [template_tokens(text, f"template {i}") for i, text in enumerate(templates, 1)]
    lengths = np.array([len(row) for row in rows], np.int64)
    if not rows:
        return []
    longest = int(lengths.max())
    out = torch.zeros(len(rows), longest, dtype=torch.int64)
    batches = batches_within(lengths, max(tokens, longest))
    own_batches = range(ddp.rank, len(batches), ddp.world_size)
    own_draws = len(own_batches) * (steps + 1)
    draw = sample_scheduled if sedd.model.parameterization == "subs" else sample
    for number in own_batches:
        indices = batches[number]
        given = pad_sequence([torch.from_numpy(rows[i]) for i in indices], True, padding_value=-1)
        width = given.shape[1]
        real = torch.arange(width) < torch.from_numpy(lengths[indices])[:, None]
        network = scores_by_length_group(sedd, lengths[indices])

        def log_score(xt, sigma, unmasked=None, network=network):
            note_progress()
            scores = network(xt, sigma, unmasked)
            if shaped:
                return reshape_choice(scores, xt, sedd.graph.mask_id, temperature, top_p)
            return scores

        def count_step(step, xt):
            if on_step is not None:
                on_step(own_draws)

        with autocast(dtype, ddp):
            drawn = draw(log_score, sedd.graph, sedd.noise, tuple(given.shape), steps,
                         predictor=predictor, fixed=(given.clamp(min=0), given >= 0),
                         forbidden=(X_ID,), mask=real, device=ddp.device,
                         generator=keyed_generator(seed, "sample", number), on_step=count_step)
        out[torch.from_numpy(indices), :width] = drawn.cpu()
    out = all_sum(out, ddp).numpy()
    return [decode(row[:n]) for row, n in zip(out, lengths)]


def scores_by_length_group(sedd, lengths):
    """The network for sequences of these lengths: a function (xt, sigma, unmasked) -> log scores
    (B, L, V). unmasked: None, or see sedd.diffusion.sample_scheduled.

    It computes sequences of like lengths together, so that short ones are padded less. It leaves
    out sequences in which nothing is unmasked, or, if that is not known, on a CPU with the
    absorbing graph, those in which no mask is left: their scores do not matter, and are 0.

    lengths: (B,) array, the longest first.
    """
    groups = [torch.from_numpy(rows) for rows in length_groups(lengths)]
    lengths = torch.from_numpy(lengths)

    def compute(xt, sigma, rows):
        width = int(lengths[rows].max())
        real = torch.arange(width) < lengths[rows][:, None]
        mask = None if bool(real.all()) else real.to(xt.device)
        rows = rows.to(xt.device)
        part = xt[rows, :width]
        return sedd.model(part, sigma[rows], mask, sedd.graph.wanted(part))

    def log_score(xt, sigma, unmasked=None):
        changes = None      # (B,) bool: whether a sequence may change
        if unmasked is not None:
            changes = unmasked.any(1)
        elif sedd.graph.absorb and xt.device.type == "cpu":
            changes = (xt == sedd.graph.mask_id).any(1)
        if len(groups) == 1 and changes is None:
            return compute(xt, sigma, groups[0])
        dtype = torch.promote_types(next(sedd.model.parameters()).dtype, torch.float32)
        scores = torch.zeros(*xt.shape, sedd.graph.vocab_size, device=xt.device, dtype=dtype)
        for rows in groups:
            if changes is not None:
                rows = rows[changes[rows]]
            if len(rows):
                part = compute(xt, sigma, rows)
                scores[rows.to(xt.device), :part.shape[1]] = part
        return scores

    return log_score


def length_groups(lengths):
    """Split sequences (B,), the longest first, into groups whose shortest has most of the length of
    their longest, if that saves positions worth a pass of their own. Returns: list of (n,) int64,
    which number the sequences from 0."""
    groups = []
    first = 0
    for i, length in enumerate(lengths):
        saved = (len(lengths) - i) * (lengths[first] - length)
        if length < LIKE * lengths[first] and saved >= WORTH_A_PASS:
            groups.append(np.arange(first, i))
            first = i
    groups.append(np.arange(first, len(lengths)))
    return groups


def reshape_choice(log_score, xt, mask_id, temperature, top_p):
    """Log scores (B, L, V) with temperature and top_p (see sample_sequences) applied at each mask.
    The sum of the scores over the letters, which is the rate of unmasking, stays the same."""
    letters = log_score[..., :X_ID]
    log_q = torch.log_softmax(letters / temperature, -1)
    if top_p < 1:
        ordered, places = log_q.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()    # of all likelier letters
        ordered = ordered.masked_fill(before >= top_p, -math.inf)
        log_q = torch.log_softmax(torch.empty_like(log_q).scatter(-1, places, ordered), -1)
    shaped = torch.full_like(log_score, -math.inf)           # X is never drawn
    shaped[..., :X_ID] = letters.logsumexp(-1, keepdim=True) + log_q
    shaped[..., mask_id] = log_score[..., mask_id]
    return torch.where((xt == mask_id)[..., None], shaped, log_score)


def template_tokens(text, name):
    """Tokens (L,) int64 of a template, -1 at free positions. Raises ValueError."""
    wrong = re.search(f"[^{AMINO_ACIDS}{FREE}]", text)
    if wrong or not text:
        what = f"{wrong.group()!r} at place {wrong.start() + 1}" if wrong else "nothing"
        raise ValueError(f"{name}: found {what}; expected the letters {AMINO_ACIDS}, which are "
                         f"kept, and {FREE} for each letter to be sampled.")
    return np.array([AMINO_ACIDS.find(letter) for letter in text], np.int64)


def scaffold_templates(scaffold, number, seed):
    """`number` templates of a scaffold such as "MKT[40]GSHHW[12-20]"; seed: of random lengths."""
    parts = re.findall(r"\[(\d+)(?:-(\d+))?\]|([A-Za-z]+)|(.)", scaffold)
    wrong = [other for *_, other in parts if other]
    free = any(int(high or low or 0) for low, high, *_ in parts)
    never_empty = any(letters or int(low or 0) for low, _, letters, _ in parts)
    if wrong or not free or not never_empty:
        if wrong:
            problem = repr(wrong[0])
        elif not free:
            problem = "no length above 0"
        else:
            problem = "parts that may all be empty"
        raise ValueError(f"--scaffold {scaffold!r}: found {problem}; expected letters and lengths "
                         "in brackets, such as MKT[40]GSHHW[12-20].")
    templates = []
    for k in range(number):
        generator = keyed_generator(seed, "scaffold", k)
        text = ""
        for low, high, letters, _ in parts:
            text += letters.upper() if letters else FREE * draw_number(low, high, generator)
        templates.append(text)
    return templates


def draw_number(low, high, generator):
    """A random integer from low to high, both included. They are texts; "" for high means low."""
    high = int(high or low)
    low = int(low)
    if not low <= high <= LONGEST:
        raise ValueError(f"found the length {low}-{high}; expected a range like 80-120, at most "
                         f"{LONGEST:,}.")
    return low + int(torch.randint(high - low + 1, (), generator=generator))


def free_templates(sedd, length, number, seed):
    """`number` templates of free positions only. length: "100", "80-120", or None: random lengths,
    distributed as those of the training proteins."""
    generator = keyed_generator(seed, "lengths")
    if length is None:
        if sedd.lengths is None:
            raise ValueError("the checkpoint does not tell the lengths of its training proteins; "
                             "expected --length, such as 100 or 80-120.")
        return [FREE * int(n) for n in draw_lengths(sedd.lengths, number, generator)]
    spec = re.fullmatch(r"(\d+)(?:-(\d+))?", length)
    if not spec or not int(spec[1]):
        raise ValueError(f"--length {length}; expected a length such as 100, or 80-120.")
    return [FREE * draw_number(*spec.groups(), generator) for _ in range(number)]


# ---------------------------------------------------------------- score
class Scores(NamedTuple):
    """Scores of n sequences, each an array (n,)."""
    residues: np.ndarray    # number without X
    bound: np.ndarray       # upper bound on -ln p, in nats
    error: np.ndarray       # standard error of the bound due to random noise: an upper estimate,
    #                         see score_sequences; nan for one sample
    unigram: np.ndarray     # -ln p under the letter frequencies of the training data


def score_sequences(sedd, sequences, samples=8, window=False, tokens=16384, dtype=torch.float32,
                    ddp=None):
    """Upper bounds on -ln p of sequences (the negative ELBO). Collective if ddp is given.

    The estimate and its control variate are those of validation, see evaluation.BoundEstimator.
    The noise is seeded by the sequence alone: other sequences do not change its score or error.
    The error takes the noise levels as independent. As they are evenly spaced, it can be too large:
    hardly with the absorbing graph and log-linear noise, but else 1.3 to 4 times (measured).

    Args:
        sequences: texts of the letters of proteins.sequences.encode.
        samples: noise levels per sequence, evenly spaced from a random start.
        window: cut sequences that are longer than the model was trained on into parts of equal
            length, which are scored independently; otherwise such sequences are refused.
        tokens: positions in a batch.
    Returns: Scores. Raises: ValueError.
    """
    ddp = ddp or Ddp(device=next(sedd.model.parameters()).device)
    proteins, owner = parts_to_score(sedd, sequences, window)
    start = np.array([seed_for("score", int(key)) / 2**63 for key in proteins.keys])
    estimator = BoundEstimator(proteins, sedd.graph, sedd.noise, sedd.letters, start, samples,
                               tokens)
    gains = estimator.gains(sedd.model, ddp, dtype).numpy()     # (parts, samples)
    spread = np.full(len(proteins), math.nan)
    if samples > 1:
        spread = gains.var(1, ddof=1) / samples

    def total(values):
        return np.bincount(owner, values, len(sequences))

    return Scores(residues=total(estimator.counts).astype(np.int64),
                  bound=total(estimator.baseline.numpy() - gains.mean(1)),
                  error=np.sqrt(total(spread)), unigram=total(estimator.unigram_nll))


def parts_to_score(sedd, sequences, window):
    """The parts in which sequences are scored, see score_sequences: (Proteins, (parts,) int64, the
    number of the sequence, from 0, that each is of)."""
    parts = []
    owner = []
    for i, sequence in enumerate(sequences):
        pieces = windows(encode(sequence), sedd.max_length, window)
        parts += pieces
        owner += [i] * len(pieces)
    return Proteins.from_sequences(parts), np.array(owner, np.int64)


def windows(row, longest, allowed):
    """The parts, of nearly equal length, in which a sequence (L,) is scored."""
    if not len(row):
        raise ValueError("a sequence is empty; expected at least one residue.")
    if len(row) > longest and not allowed:
        raise ValueError(f"a sequence has {len(row):,} residues, but the model was trained on at "
                         f"most {longest:,}. Leave it out, or score it in parts: --window.")
    return np.array_split(row, math.ceil(len(row) / longest))


# ---------------------------------------------------------------- command line
def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="See the top of this file for examples.")
    add = parser.add_argument
    add("checkpoint",
        help="best.pt, last.pt, a run folder, an exported folder, or a published file")
    add("--out", type=Path, help="file to write; default: standard output")
    add("--no_ema", action="store_true", help="use the last weights, not their averages")
    add("--bfloat16", action="store_true", help="compute in bfloat16 (autocast)")
    add("--tokens", type=int, default=16384, help="positions in a batch (default 16384)")
    task = parser.add_mutually_exclusive_group().add_argument
    task("--length", help="sample proteins of this length: 100, or 80-120; default: as in training")
    task("--scaffold", help='sample the parts in brackets, of these lengths: "MKT[40]GSHHW[12-20]"')
    task("--infill", type=Path, metavar="FASTA", help="sample each _ of these templates")
    task("--score", type=Path, metavar="FASTA", help="bound on -ln p of each sequence, as a table")
    task("--export", type=Path, metavar="FOLDER",
         help="write the model to a new folder, in the published layout")
    add = parser.add_argument_group("sampling").add_argument
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    add("--number", type=int, help="sequences; with --infill: of each template (default 1)")
    add("--steps", type=int, default=128, help="reverse steps (default 128)")
    add("--predictor", choices=("analytic", "euler"), default="analytic")
    add("--temperature", type=float, default=1.0, help="of letters; below 1: less random")
    add("--top_p", type=float, default=1.0, help="total probability of the allowed letters; 1: all")
    group = parser.add_argument_group("scoring")
    group.add_argument("--samples", type=int, default=8,
                       help="noise levels per sequence (default 8); they are evenly spaced, which "
                            "makes standard errors upper estimates")
    add = group.add_mutually_exclusive_group().add_argument
    add("--window", action="store_true",
        help="score sequences longer than the model was trained on in parts")
    add("--each_position", action="store_true",
        help="with --score: -ln p of each residue given all others")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    """The options. Raises ValueError or OSError."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(args, parser)
    check_files(args)
    return args


def check_arguments(args, parser):
    """Refuse values, and options that do not fit together. Raises ValueError."""
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    for_drawing = given & {"number", "steps", "predictor", "temperature", "top_p", "seed"}
    for_scoring = given & {"samples", "window", "each_position"}
    if for_drawing and (args.score or args.export):
        raise ValueError(f"found --{' --'.join(sorted(for_drawing))} with --score or --export, "
                         "which draw nothing; expected one of them.")
    if for_scoring and not args.score:
        raise ValueError(f"found --{' --'.join(sorted(for_scoring))} without --score; expected "
                         "both.")
    if "samples" in given and args.each_position:
        raise ValueError("found --samples with --each_position, which draws no noise levels; "
                         "expected one of them.")
    if args.export and args.out:
        raise ValueError("found --out with --export, which names what is written; expected one.")
    for name in ("number", "steps", "samples", "tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"found --{name} {value}; expected at least 1.")
    if abs(args.seed) >= 2**63:
        raise ValueError(f"found --seed {args.seed}; expected at most {2**63 - 1}.")


def check_files(args):
    """Refuse files that cannot be read or written. Raises ValueError."""
    read = [path for path in (args.infill, args.score) if path]
    if args.infill is not None and not args.infill.exists():
        refuse_text_for_infill(str(args.infill))
    for path in read:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a folder or a device; expected a file.")
        if not path.is_file():
            raise ValueError(f"there is no file {path}.")
    if args.export is not None and args.export.suffix in (".pth", ".pt"):
        raise ValueError(f"--export {args.export} has the name of a file; expected that of a new "
                         "folder.")
    checkpoint = Path(args.checkpoint)
    # An export is a folder; a run's folder holds its checkpoints in one.
    inputs = [checkpoint, *checkpoint.glob("*"), *checkpoint.glob("checkpoints/*"), *read]
    if args.out is not None:
        check_output(args.out, inputs)


def refuse_text_for_infill(text):
    """ValueError, with the option to give, if a text given to --infill is a template and no name of
    a file: MKT____GSH, or MKT[4]GSH."""
    scaffold = re.sub(f"{FREE}+", lambda free: f"[{len(free[0])}]", text)
    is_template = re.fullmatch(r"([A-Z]*\[\d+(-\d+)?\])+[A-Z]*", scaffold)
    if is_template:
        raise ValueError(f"--infill {text}: there is no such file; expected a FASTA file of "
                         f"templates. To sample this one: `--scaffold \"{scaffold}\"`.")


def run(args, ddp):
    """Do what the options say. Raises ValueError or OSError."""
    sedd = load_sedd(args.checkpoint, not args.no_ema, ddp.device)
    for note in sedd.notes:
        print0(ddp, in_columns(note, hanging="  "), file=sys.stderr)
    check_alike({"weights (hash)": hash_of(sedd.model.state_dict()), **inputs_of(args)}, ddp)
    if args.export:
        if ddp.is_main:
            export_sedd(sedd, args.export)
        print0(ddp, f"exported to {args.export}", file=sys.stderr)
        return
    how = {"tokens": args.tokens, "ddp": ddp,
           "dtype": torch.bfloat16 if args.bfloat16 else torch.float32}
    if args.score:
        check_scored_file(sedd, args)     # before the first is scored
    with open_output(args.out, ddp) as write:
        if args.each_position:
            score_positions(sedd, args, how, write)
        elif args.score:
            score_file(sedd, args, how, write)
        else:
            draw_file(sedd, args, how, write)


def inputs_of(args):
    """{what: plain value} of options and files, which must be the same on all ranks."""
    names = ("tokens", "seed", "number", "steps", "samples", "length", "scaffold")
    inputs = {f"--{name}": getattr(args, name) for name in names}
    for name in ("infill", "score"):
        if getattr(args, name):
            inputs[f"--{name} (hash)"] = hash_of_file(getattr(args, name))
    return inputs


def hash_of_file(path):
    """Hash of the bytes of a file, as text."""
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def draw_file(sedd, args, how, write):
    """Write samples as FASTA."""
    number = args.number or 1
    ddp = how["ddp"]
    if args.infill:
        names, templates = read_templates(args.infill, number)
    else:
        names = [f"sample_{k}" for k in range(1, number + 1)]
        if args.scaffold is not None:
            templates = scaffold_templates(args.scaffold, number, args.seed)
        else:
            templates = free_templates(sedd, args.length, number, args.seed)
    longest = max(map(len, templates))
    if longest > sedd.max_length:
        print0(ddp, f"ATTENTION: {longest} residues are asked for; the model was trained on at "
                    f"most {sedd.max_length}.", file=sys.stderr)
    with progress_bar(ddp.is_main, unit=" steps") as bar:
        def advance(total):
            bar.total = total
            bar.update()

        sequences = sample_sequences(sedd, templates, args.steps, args.predictor, args.temperature,
                                     args.top_p, args.seed, on_step=advance, **how)
    for name, sequence in zip(names, sequences):
        write(f">{name} length={len(sequence)}\n{sequence}\n")


def read_templates(path, number):
    """(names, templates) of a FASTA file of templates, `number` times each. Raises ValueError."""
    named = [(name, text.upper()) for name, text in named_sequences(path)]
    problems = []
    for name, text in named:
        try:
            check_template(text, name or "(no name)")
        except ValueError as error:
            problems.append(str(error))
    refuse_all(path, problems, "templates")
    words = [(name.split() or ["template"])[0] for name, _ in named]
    if len(set(words)) < len(words):
        raise ValueError(f"{path}: several templates are named {max(words, key=words.count)}; "
                         "expected different first words.")
    names = [f"{word}_{k}" for word in words for k in range(1, number + 1)]
    return names, [text for _, text in named for _ in range(number)]


def check_template(text, name):
    """ValueError for letters of a template that cannot be used. name: of the template."""
    if len(text) > LONGEST:
        raise ValueError(f"{name:.40}: found {len(text):,} residues; expected at most {LONGEST:,}.")
    template_tokens(text, f"{name:.40}")
    if FREE not in text:
        raise ValueError(f"{name:.40}: found no {FREE}; expected one for each letter to be "
                         "sampled.")


def check_scored_file(sedd, args):
    """ValueError that lists the sequences of --score which cannot be scored."""
    parts_allowed = bool(args.window or args.each_position)
    problems = []
    for name, text in named_sequences(args.score):
        try:
            windows(encode(letters_of(text)), sedd.max_length, parts_allowed)
        except ValueError as error:
            problems.append(f"{name or '(no name)':.60}: {error}")
    refuse_all(args.score, problems, "sequences")


def letters_of(text):
    """The letters of a sequence in a file: upper case, without a stop at the end."""
    return text.upper().removesuffix("*")


def score_file(sedd, args, how, write):
    """Write a table of bounds. Afterwards print to standard error their total, and the perplexity
    of masked residues."""
    totals = np.zeros(4)   # residues, bound, variance, unigram
    masked = np.zeros(2)   # -ln p of masked residues, their number
    n_single = 0           # sequences of one residue
    write("name\tlength\tnats\tstandard_error\tnats_per_residue\tunigram_nats\n")
    named = named_sequences(args.score)
    with progress_bar(how["ddp"].is_main, unit=" sequences") as bar:
        while block := list(itertools.islice(named, BLOCK)):
            texts = [letters_of(text) for _, text in block]
            scores = score_sequences(sedd, texts, args.samples, args.window, **how)
            for (name, _), text, n, bound, error, unigram in zip(block, texts, *scores):
                each = bound / n if n else math.nan
                write(f"{name}\t{len(text)}\t{bound:.4f}\t{error:.4f}\t{each:.5f}\t"
                      f"{unigram:.4f}\n")
            totals += (scores.residues.sum(), scores.bound.sum(), (scores.error**2).sum(),
                       scores.unigram.sum())
            # Of one residue EvoDiff, which masks from 2 to all, counts nothing.
            several = [text for text in texts if len(text) > 1]
            n_single += len(texts) - len(several)
            if sedd.graph.absorb and several:
                proteins, _ = parts_to_score(sedd, several, args.window)
                nats, residues = masked_nll(sedd, proteins, args.samples, **how)
                masked += (nats.sum(), residues.sum())
            bar.update(len(block))
    n, bound, variance, unigram = totals
    if not n:
        raise ValueError(f"{args.score} has no known residue, only X.")
    mean = bound / n
    error = math.sqrt(variance) / n
    if math.isnan(error):
        spread = ""
        interval = " (--samples 1: its error is not known)"
    else:
        spread = f" (standard error {error:.4f})"
        interval = (f" (95 %: {perplexity(mean - INTERVAL * error)} to "
                    f"{perplexity(mean + INTERVAL * error)})")
    text = (f"{n:,.0f} residues: bound {mean:.4f} nats per residue{spread}, perplexity "
            f"{perplexity(mean)}{interval}; unigram {unigram / n:.4f}, {perplexity(unigram / n)}")
    print0(how["ddp"], in_columns(text, hanging="  "), file=sys.stderr)
    print0(how["ddp"], in_columns(masked_line(sedd.graph, *masked, n_single), hanging="  "),
           file=sys.stderr)


def masked_line(graph, nats, residues, n_single):
    """What is said of masked residues: of their -ln p in nats, in all, and of their number.

    n_single: sequences of one residue, of which none count."""
    name = "masked residues, as EvoDiff counts them"
    if not graph.absorb:
        return f"{name}: none, as the uniform graph has no mask"
    if not residues:
        return f"{name}: none, as only X was masked, or sequences have one residue"
    line = f"{name}: {nats / residues:.4f} nats, perplexity {perplexity(nats / residues)}"
    if n_single:
        line += f"; without sequences of one residue: {n_single:,}"
    return line


def score_positions(sedd, args, how, write):
    """Write a table of -ln p of each residue given all others."""
    write("name\tposition\tresidue\tnats\n")
    for name, text in named_sequences(args.score):
        text = letters_of(text)
        scores = residue_scores(sedd, text, **how)
        for place, (letter, nats) in enumerate(zip(text, scores), 1):
            write(f"{name}\t{place}\t{letter}\t{nats:.4f}\n")


def cli(argv=None):
    run_tool("sample_sedd.py", argv, read_arguments, run)


if __name__ == "__main__":
    cli()
