"""Draw sequences for a backbone with ProteinMPNN, or score given ones.

    python sample_proteinmpnn.py v_48_020.pt 5L33.pdb --num 8 --out designs.fasta
    python sample_proteinmpnn.py best_model.pt complex.cif --chains A --temperature 0.2 \\
        --mutable_positions A10-A20 A25
    python sample_proteinmpnn.py v_48_020.pt dimer.pdb --chains A B --homomer --omit C --bias E=0.5
    python sample_proteinmpnn.py v_48_020.pt 5L33.pdb --score_only designs.fasta

Reads weights in the published format and a structure (.pdb, .ent, .cif, .mmcif, perhaps .gz).
Writes FASTA to --out, whole or not at all, or to standard output: first the structure's own
sequence, then the drawn ones, each the designed chains in the order of --chains with / between
them. X is a row without a residue, such as a gap. How the input was understood, positions above
all, is printed on standard error. Wrong input ends with one message and exit code 2.

Positions are chain and number in the file (A12, A12B with insertion code, A10-A20 with both ends),
or all of them 0-based rows of the designed chains joined in the order of --chains, gaps counted.

In the header lines: score, the mean negative log-probability in nats of the designed, resolved
residues; global_score, of all resolved residues; seq_recovery, the share of designed, resolved
residues that are as in the structure; each over residues whose letter is known (not X), and left
out where there is none. Scores are means over --orders decoding orders, fixed residues first, which
are the same for all sequences: scores compare.
Sequence k depends on the seed and k alone, not on --num or --batch_size (but for rounding, where
two letters tie).
"""
import argparse
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from proteinmpnn_model import MAX_TEMPERATURE, decoding_order, load_proteinmpnn
from sequence_data import (AMINO_ACIDS, LETTERS, X_ID, decode, encode, keyed_generator,
                           named_sequences)
from structure_data import Complex, collate_complexes, parse_positions, read_structure

MAX_BIAS = 1e4          # nats; with more, float32 would not hold the logits beside it
ONLY_DRAWING = ("num", "temperature", "omit", "bias", "tied_positions", "homomer")


def parse_arguments(argv):
    """Where two names are given, the second is that of the published tool."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", help="weights: published, or of train_dpo_ddp.py (best_model.pt)")
    add("structure", help="PDB or mmCIF file")
    add("--chains", "--pdb_path_chains", nargs="+",
        help="to design; default: all that have a backbone")
    add("--fixed_chains", nargs="*",
        help="context; default: all others that have a backbone; without a name: none")
    positions = parser.add_mutually_exclusive_group()
    positions.add_argument("--fixed_positions", nargs="+",
                           help="of the designed chains, that keep their letters")
    positions.add_argument("--mutable_positions", nargs="+", help="the only ones to design")
    add("--tied_positions", nargs="+", metavar="GROUP",
        help="that get one letter: A1,B1 A2,B2 or, the same for ranges, A1-A2,B1-B2")
    add("--homomer", action="store_true", default=None,
        help="tie residues of equal number in the designed chains")
    add("--omit", "--omit_AAs", metavar="LETTERS", help="amino acids never drawn, such as CM")
    add("--bias", nargs="+", metavar="LETTER=NATS",
        help="added to logits before the temperature, such as E=0.5 K=-1")
    add("--temperature", "--sampling_temp", type=float,
        help="of drawing, default 0.1; 0 takes the best letter")
    add("--num", "--num_seq_per_target", type=int, help="sequences to draw, default 1")
    add("--batch_size", type=int, default=8,
        help="sequences per pass; changes memory and speed, not the result")
    add("--seed", type=int, default=0)
    add("--orders", type=int, default=4, help="decoding orders over which scores are averaged")
    add("--score_only", nargs="+", metavar="FASTA",
        help="score the sequences of these files; nothing is drawn")
    add("--device", choices=("auto", "cpu", "cuda", "xpu"), default="auto")
    add("--out", type=Path, help="file to write; default: standard output")
    return check_arguments(parser.parse_args(argv))


def check_arguments(args):
    """Fill in defaults of drawing; raise ValueError for what argparse does not notice."""
    if args.score_only:
        useless = [f"--{name}" for name in ONLY_DRAWING if getattr(args, name) is not None]
        if useless:
            raise ValueError(f"found {' '.join(useless)} with --score_only; expected neither or "
                             "one, as these are for drawing, and --score_only draws nothing. Leave "
                             "one out.")
        missing = [path for path in args.score_only if not os.path.isfile(path)]
        if missing:
            raise ValueError(f"--score_only: there is no file {missing[0]}. Expected FASTA files.")
    args.num = 1 if args.num is None else args.num
    args.temperature = 0.1 if args.temperature is None else args.temperature
    for name in ("num", "batch_size", "orders"):
        if getattr(args, name) < 1:
            raise ValueError(f"found --{name} {getattr(args, name)}; expected at least 1.")
    if not 0 <= args.temperature <= MAX_TEMPERATURE:
        raise ValueError(f"found --temperature {args.temperature}; expected a number of at least "
                         f"0, such as 0.1, and not above {MAX_TEMPERATURE:g}.")
    out = args.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        problem = "a folder" if out.is_dir() else "in a folder that is missing"
        raise ValueError(f"found --out {out}, {problem}; expected the name of a file in a folder "
                         "that exists.")
    for path in (args.checkpoint, args.structure, *(args.score_only or ())):
        if out is not None and out.exists() and os.path.exists(path) and (
                os.path.samefile(path, out)):
            raise ValueError(f"found --out {out}, which is the input {path}; expected another "
                             "file.")
    return args


class Design:
    """What is designed. "Joined" is the order of the sequences, chain after chain as in `chains`.

    complex:  the Complex, whose rows are in another order.
    chains:   names of the designed chains, as the user orders them.
    places:   (n_designed,) joined position of each designed row of the complex; row: the reverse.
    ends:     joined position at which each chain ends.
    labels:   such as "A12", of each joined position.
    native, resolved, mutable: (n_designed,) joined letters; bool; bool.
    drawn:    (L,) bool by row of the complex: mutable and resolved.
    tied:     lists of rows of the complex that get one letter.
    notes:    lines on how the input was understood.
    """

    def __init__(self, args):
        structure = read_structure(args.structure)
        self.chains, fixed = choose_chains(args, structure)
        self.complex = Complex(structure, self.chains, fixed)
        self.places, n = self.complex.places(self.chains), self.complex.n_designed
        self.row = np.argsort(self.places)
        chains = [structure.chains[name] for name in self.chains]
        self.labels = [f"{name}{number}" if number else f"a gap in {name}"
                       for name, chain in zip(self.chains, chains) for number in chain.numbers]
        self.ends = np.cumsum([len(chain.S) for chain in chains])
        self.native = self.complex.S[:n][self.row]
        self.resolved = self.complex.mask[:n][self.row]
        self.notes = [f"{structure.name}: designed chains {' '.join(self.chains)}, {n} rows, "
                      f"{self.resolved.sum()} resolved; fixed chains {' '.join(fixed) or '(none)'}"]
        self.mutable = np.ones(n, bool)
        if args.fixed_positions:
            self.mutable[self.positions("fixed_positions", args.fixed_positions)] = False
        elif args.mutable_positions:
            found = self.positions("mutable_positions", args.mutable_positions)
            self.mutable = np.isin(np.arange(n), found)
        if not (self.mutable & self.resolved).any():
            raise ValueError("no position is left to design: all are fixed or without a complete "
                             "backbone. Fix fewer.")
        self.drawn = np.zeros(len(self.complex), bool)
        self.drawn[:n] = (self.mutable & self.resolved)[self.places]
        groups = self.tied_positions(args)
        for group in groups:
            if len(set(self.mutable[group])) == 2:
                kinds = ", ".join(f"{self.labels[i]} ({'designed' if self.mutable[i] else 'fixed'})"
                                  for i in group)
                raise ValueError(f"tied positions are designed and fixed: {kinds}. Fix all of a "
                                 "group or none.")
        self.tied = [self.row[group].tolist() for group in groups]

    def positions(self, option, texts):
        """Joined positions of an option, sorted; how they were understood goes into the notes."""
        try:
            found, note = parse_positions(" ".join(texts), self.complex.structure, self.chains)
        except ValueError as error:
            raise ValueError(f"--{option}: {error}") from None
        self.notes.append(f"--{option}: {note}")
        return found

    def tied_positions(self, args):
        """Lists of joined positions that get one letter."""
        if args.homomer and args.tied_positions:
            raise ValueError("found --homomer and --tied_positions together; expected one of them.")
        if args.homomer:
            return self.equal_numbers()
        return self.given_groups(args.tied_positions) if args.tied_positions else []

    def given_groups(self, texts):
        """Of each group as typed, the k-th positions of its parts, in turn."""
        self.positions("tied_positions", texts)             # none twice, all of one kind
        groups = []
        for text in texts:
            parts = [parse_positions([part], self.complex.structure, self.chains)[0].tolist()
                     for part in re.split(r"[,\s]+", text.strip(", "))]
            lengths = [len(part) for part in parts]
            if len(parts) < 2 or len(set(lengths)) > 1:
                raise ValueError(f"--tied_positions: found {text} with parts of {lengths} "
                                 "positions; expected at least two parts of one length, such as "
                                 "A1,B1 or A1-A9,B1-B9.")
            groups += [list(group) for group in zip(*parts)]
        return groups

    def equal_numbers(self):
        """Positions of the designed chains with the same number in the file."""
        by_number, position = {}, 0
        for name in self.chains:
            for number in self.complex.structure.chains[name].numbers:
                if number:
                    by_number.setdefault(number, []).append(position)
                position += 1
        groups = [group for group in by_number.values() if len(group) > 1]
        for group in groups:
            if len({int(self.native[i]) for i in group} - {X_ID}) > 1:
                found = ", ".join(f"{self.labels[i]} {LETTERS[self.native[i]]}" for i in group)
                raise ValueError(f"--homomer ties residues of equal number, but found {found}; "
                                 "expected the same letter. Name the chains that are equal "
                                 "(--chains), or use --tied_positions.")
        if not groups:
            raise ValueError(f"--homomer: chains {' '.join(self.chains)} share no residue number; "
                             "expected two or more chains with the same numbers. Name them "
                             "(--chains), or use --tied_positions.")
        n_alone = len(by_number) - len(groups)
        self.notes.append(f"--homomer: {len(groups)} groups of residues of equal number in the "
                          f"file; {n_alone} in one chain alone, not tied")
        return groups

    def text(self, S):
        """(L,) ids of the complex -> letters of the designed chains, with / between them."""
        joined = decode(S[self.row])
        return "/".join(joined[a:b] for a, b in zip([0, *self.ends[:-1]], self.ends))

    def ids(self, text, name):
        """The reverse, for sequences of a file; unresolved rows keep the structure's letters."""
        parts, expected = text.replace("-", "X").split("/"), np.diff([0, *self.ends]).tolist()
        if [len(part) for part in parts] != expected:
            raise ValueError(f"{name}: found chains of {[len(part) for part in parts]} letters; "
                             f"expected {expected}, of chains {' '.join(self.chains)}, gap rows "
                             "counted, with / between chains.")
        joined = "".join(parts)
        wrong = re.search(f"[^{LETTERS}]", joined)
        is_x = np.array([letter == "X" for letter in joined])
        unnamed = is_x & self.resolved & (self.native != X_ID)
        if wrong or unnamed.any():
            i = wrong.start() if wrong else int(unnamed.argmax())
            raise ValueError(f"{name}: found {joined[i]!r} at {self.labels[i]} (position {i}, "
                             f"0-based); expected one of {AMINO_ACIDS}"
                             f"{'' if wrong else ' at a resolved residue'}.")
        S = self.complex.S.copy()
        S[:len(self.places)] = np.where(self.resolved, encode(joined), self.native)[self.places]
        return S


def choose_chains(args, structure):
    """Names of the designed chains, in the user's order, and of the fixed ones."""
    usable = sorted(name for name, chain in structure.chains.items() if chain.resolved.any())
    designed = chain_names(args.chains, structure, "--chains") if args.chains else usable
    unusable = [name for name in designed if name not in usable]
    if unusable or not designed:
        raise ValueError(f"chain {' '.join(unusable)} of {structure.name} has no residue with a "
                         "complete backbone (N, CA, C, O); expected a protein chain. Design one "
                         f"of: {' '.join(usable) or '(none)'}.")
    fixed = [name for name in usable if name not in designed]
    if args.fixed_chains is not None:
        fixed = chain_names(args.fixed_chains, structure, "--fixed_chains")
    both = sorted({*designed} & {*fixed})
    if both:
        raise ValueError(f"chain {' '.join(both)} is in --chains and in --fixed_chains; expected "
                         "it in one.")
    return designed, fixed


def chain_names(texts, structure, option):
    names = [name for text in texts for name in re.split(r"[,\s]+", text) if name]
    absent = [name for name in names if name not in structure.chains]
    if absent or len(set(names)) < len(names) or not names and texts:
        raise ValueError(f"{option}: found {' '.join(names) or 'no name'}; expected chains of "
                         f"{structure.name}, each once, which has "
                         f"{' '.join(map(repr, structure.chains))}.")
    return names


def letter_bias(args):
    """(21,) nats, -inf for what is never drawn."""
    bias, seen = torch.zeros(len(LETTERS)), set()
    for text in args.bias or ():
        letter, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if letter not in AMINO_ACIDS or len(letter) != 1 or not abs(number) <= MAX_BIAS:
            raise ValueError(f"--bias: found {text}; expected an amino acid and nats, such as "
                             f"E=0.5 or K=-1, up to {MAX_BIAS:g} either way.")
        if letter in seen:
            raise ValueError(f"--bias: found {letter} twice; expected each amino acid once.")
        seen.add(letter)
        bias[LETTERS.index(letter)] = number
    omitted = set((args.omit or "") + "X")
    if omitted - set(LETTERS) or omitted == set(LETTERS):
        raise ValueError(f"--omit: found {args.omit}; expected some, not all, of {AMINO_ACIDS}.")
    bias[[LETTERS.index(letter) for letter in omitted]] = -math.inf
    return bias


def choose_device(name):
    found = [kind for kind in ("cuda", "xpu")
             if getattr(torch, kind, None) and getattr(torch, kind).is_available()]
    if name not in ("auto", "cpu", *found):
        raise ValueError(f"--device {name}: torch {torch.__version__} sees none; it sees "
                         f"{' '.join(found + ['cpu'])}.")
    return torch.device((found + ["cpu"])[0] if name == "auto" else name)


def random_order(design, *key):
    """(1, L) decoding order, fixed residues first, of this key."""
    L, generator = len(design.drawn), keyed_generator(*key)
    randn = torch.randn(1, L, dtype=torch.float64, generator=generator)
    return decoding_order(torch.from_numpy(design.drawn)[None].long(), randn)


def draw(model, encoding, design, args, bias, numbers):
    """Draw the sequences of these numbers, (M, L) int64.

    All that is random in a sequence is keyed by (seed, number).
    """
    device, (L, V) = encoding.mask.device, (len(design.drawn), len(LETTERS))
    orders, noise = [], []
    for k in numbers:
        orders.append(random_order(design, args.seed, "order", k))
        generator = keyed_generator(args.seed, "letters", k)
        uniform = torch.rand(L, V, dtype=torch.float64, generator=generator)
        gumbel = -(-uniform.clamp(min=1e-300).log()).clamp(min=1e-300).log()
        for group in design.tied:
            gumbel[group] = gumbel[group[0]].clone()    # one draw, which their mean leaves as it is
        noise.append(gumbel)
    # arg max of (logits + bias + temperature x Gumbel noise) is a draw from
    # softmax((logits + bias) / temperature).
    scores = bias + (args.temperature * torch.stack(noise)).float()
    S = torch.from_numpy(design.complex.S.astype(np.int64)).expand(len(numbers), L)
    drawn = torch.from_numpy(design.drawn).long()[None]
    return model.sample(encoding, S.to(device), drawn.to(device), torch.cat(orders).to(device),
                        temperature=0, bias=scores.to(device), tied=design.tied).cpu()


def score(model, encoding, design, args, S):
    """(M, 2) float64 in nats, score and global score of sequences S (M, L).

    X is not scored: it is no prediction.
    """
    device, total = encoding.mask.device, 0.0
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
    """Share of designed, resolved residues as in the structure, where that has a letter."""
    counted = design.drawn & (design.complex.S != X_ID)
    return (S[counted] == design.complex.S[counted]).mean() if counted.any() else math.nan


@torch.no_grad()
def make_records(args):
    """(FASTA text, lines on how the input was understood). Raises ValueError or OSError."""
    design = Design(args)
    given = [(name, design.ids(text, f"{path}, sequence {i} ({name:.40})"))
             for path in args.score_only or ()
             for i, (name, text) in enumerate(named_sequences(path), 1)]
    bias, device = letter_bias(args), choose_device(args.device)
    model = load_proteinmpnn(args.checkpoint).eval().to(device)
    tensors = collate_complexes([design.complex])
    native = tensors.pop("S")
    graph = model.graph(**tensors)
    encoding = model.encode(type(graph)(*(x.to(device) for x in graph)))

    def batches():
        """(header lines, S (M, L)), to be scored together; SCORES stands for the figures."""
        size = args.batch_size
        if not given:
            name = Path(re.sub(r"\.gz$", "", args.structure)).stem
            yield [f"{name}, SCORES, fixed_chains={list(design.complex.fixed)}, "
                   f"designed_chains={design.chains}, model_name={Path(args.checkpoint).stem}, "
                   f"seed={args.seed}"], native
            for first in range(1, args.num + 1, size):
                numbers = range(first, min(first + size, args.num + 1))
                yield ([f"T={args.temperature:g}, sample={k}, SCORES" for k in numbers],
                       draw(model, encoding, design, args, bias, numbers))
        for first in range(0, len(given), size):
            heads, S = zip(*given[first:first + size])
            old_scores = r",? *(score|global_score|seq_recovery)=[^,]*"
            yield ([re.sub(old_scores, "", head) + ", SCORES" for head in heads],
                   torch.from_numpy(np.stack(S).astype(np.int64)))

    lines = []
    for heads, S in batches():
        figures = score(model, encoding, design, args, S).tolist()
        for head, row, (mean, whole) in zip(heads, S.numpy(), figures):
            scores = {"score": mean, "global_score": whole, "seq_recovery": recovery(design, row)}
            text = ", ".join(f"{key}={value:.4f}" for key, value in scores.items()
                             if not math.isnan(value)) or "no residue of known letter"
            lines += [">" + text.join(head.rsplit("SCORES", 1)), design.text(row)]
    last_note = f"{device}: {args.checkpoint}, {len(lines) // 2} sequences"
    return "\n".join(lines) + "\n", [*design.notes, last_note]


def main(argv):
    try:
        args = parse_arguments(argv)
        text, notes = make_records(args)
        print(*notes, sep="\n", file=sys.stderr)
        if args.out is None:
            sys.stdout.write(text)
            return 0
        temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8", newline="\n")
            os.replace(temporary, args.out)
        finally:
            temporary.unlink(missing_ok=True)
        return 0
    except (ValueError, OSError) as error:
        print(f"sample_proteinmpnn.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
