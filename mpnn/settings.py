"""Which positions of a structure sample_proteinmpnn.py designs, and under which constraints.

    design = Design("5L33.pdb", args)
    print(*design.notes, sep="\n")                 # how everything was understood
    bias = letter_bias(args)                        # of letters, the same for all structures

Takes chains, fixed and tied positions and bias from the command line. Two orders of rows occur:
"joined", the designed chains in the user's order, and that of Complex: designed chains, then fixed
ones, sorted by name. A missing chain or position is a ValueError.
"""
import argparse
import math
import os
import re
from pathlib import Path

import numpy as np
import torch

from proteins.letters import AMINO_ACIDS, LETTERS, X_ID, decode, encode
from proteins.structures import (
    CA_MODEL,
    FORMATS,
    Complex,
    describe_reading,
    parse_positions,
    read_structure,
)

MAX_BIAS = 1e4          # nats; a larger bias would round away the logits in float32


class Design:
    """Settings for one structure. "Joined" positions are those of `chains`, one after another.

    name:     name of the structure: its file's name without folder and suffix.
    complex:  the Complex, whose rows are in another order.
    chains:   names of the designed chains, in the user's order.
    rows:     (n_designed,) row of the complex of each joined position.
    spans:    {chain: range of its joined positions}.
    labels:   such as "A12", of each joined position.
    native, resolved, mutable: (n_designed,) by joined position: letters; bool; bool.
    drawn:    (L,) bool by row of the complex: mutable and resolved.
    tied:     lists of rows of the complex that get the same letter.
    notes:    lines on how the input was understood.
    """

    def __init__(self, path: str, args: argparse.Namespace, ca_only: bool = False):
        """args: of sample_proteinmpnn.py. ca_only: for a CA-only model."""
        structure = read_structure(path, ca_only)
        self.name = name_of(path)
        self.structure = structure
        self.notes = []
        self.chains, fixed = choose_chains(args, structure)
        self.complex = Complex(structure, self.chains, fixed)
        self.rows = self.complex.rows(self.chains)
        self.labels = []
        self.spans = {}
        for name in self.chains:
            chain = structure.chains[name]
            self.spans[name] = range(len(self.labels), len(self.labels) + len(chain.S))
            self.labels += [f"{name}{number}" if number else f"a gap in {name}"
                            for number in chain.numbers]
        self.native = self.complex.S[self.rows]
        self.resolved = self.complex.mask[self.rows]
        self.modified = self.complex.modified[self.rows]
        self.note_input(fixed, ca_only)
        self.mutable = self.mutable_positions(args)
        if not (self.mutable & self.resolved).any():
            raise ValueError(f"{self.name}: no position is left to design: all are fixed or "
                             f"without {structure.needed}. Fix fewer: see --fixed_positions and "
                             "--mutable_positions.")
        self.drawn = np.zeros(len(self.complex), bool)
        self.drawn[self.rows] = self.mutable & self.resolved
        groups = self.tied_positions(args)
        self.check_tied(groups, args)
        self.tied = self.tied_rows(groups)

    def note_input(self, fixed, ca_only):
        """Add notes on chains and residues."""
        structure = self.structure
        self.notes.append(
            f"{structure.name}: designed chains {' '.join(self.chains)}, {len(self.rows)} rows, "
            f"{self.resolved.sum()} resolved; fixed chains {' '.join(fixed) or '(none)'}")
        reading = describe_reading([structure])
        if reading:
            self.notes.append(f"{structure.name}: {reading}")
        only_ca = [name for name, chain in structure.chains.items() if chain.has_only_ca]
        if only_ca and not ca_only:
            self.notes.append(f"{structure.name}: chains {' '.join(only_ca)} have CA atoms only: "
                              f"this model does not see them, a CA-only model, {CA_MODEL}, does")

    # ---- positions ----

    def positions(self, option, texts):
        """Sorted joined positions given to an option. Adds a note on how they were understood."""
        try:
            positions, note = parse_positions(" ".join(texts), self.structure, self.chains)
        except ValueError as error:
            raise ValueError(f"--{option}: {error}") from None
        self.notes.append(f"--{option}: {note}")
        return positions

    def mutable_positions(self, args):
        """(n_designed,) bool by joined position: may its letter change?"""
        mutable = np.full(len(self.rows), not args.mutable_positions)
        if args.mutable_positions:
            mutable[self.positions("mutable_positions", args.mutable_positions)] = True
        if args.fixed_positions:
            mutable[self.positions("fixed_positions", args.fixed_positions)] = False
        return mutable

    def tied_positions(self, args):
        """Lists of joined positions that get the same letter."""
        if args.homomer:
            return self.equal_numbers()
        if args.tied_positions:
            return self.given_groups(args.tied_positions)
        return []

    def check_tied(self, groups, args):
        """ValueError for groups of which some positions are designed and some are fixed."""
        mixed = [group for group in groups if len({self.mutable[i] for i in group}) == 2]
        if not mixed:
            return
        kinds = ", ".join(f"{self.labels[i]} ({'designed' if self.mutable[i] else 'fixed'})"
                          for i in mixed[0])
        option = "mutable_positions" if args.mutable_positions else "fixed_positions"
        to_fix = option == "fixed_positions"
        others = sorted(i for group in mixed for i in group if self.mutable[i] == to_fix)
        raise ValueError(f"tied positions are designed and fixed: {kinds}. Fix all of a group or "
                         f"none: add {self.words_for(others, option)} to --{option}.")

    def words_for(self, positions, option):
        """Sorted joined positions as one writes them, in the way in which the option has its
        own."""
        are_rows = any(note.startswith(f"--{option}:") and "0-based" in note for note in self.notes)
        runs = []           # (first, last) of positions with successive numbers
        for i in positions:
            if runs and i == runs[-1][1] + 1 and (are_rows or self.is_next(i)):
                runs[-1] = runs[-1][0], i
            else:
                runs.append((i, i))
        names = range(len(self.labels)) if are_rows else self.labels
        return " ".join(f"{names[first]}-{names[last]}" if first < last else f"{names[first]}"
                        for first, last in runs)

    def is_next(self, i):
        """Whether the number of joined position i follows that of the position before, in the same
        chain."""
        before = re.fullmatch(r"(.*?)(-?\d+)", self.labels[i - 1])
        return before is not None and self.labels[i] == f"{before[1]}{int(before[2]) + 1}"

    def tied_rows(self, groups):
        """Lists of rows of the complex from lists of joined positions, without the unresolved."""
        tied = []
        n_absent = 0
        for group in groups:
            resolved = [i for i in group if self.resolved[i]]
            n_absent += len(group) - len(resolved)
            tied.append(self.rows[resolved].tolist())
        if n_absent:
            self.notes.append(f"{n_absent} tied positions are gaps or lack atoms, and are left out "
                              "of their groups")
        return tied

    def given_groups(self, texts):
        """Groups from texts such as A1-A9,B1-B9: the k-th positions of all parts form a group."""
        texts = " ".join(texts).split()                     # blanks separate, also inside quotes
        self.positions("tied_positions", texts)             # checks: none twice, all of one kind
        groups = []
        for text in texts:
            parts = []
            for part in text.strip(",").split(","):
                positions = []      # of nothing between two commas
                if part:
                    positions = parse_positions(part, self.structure, self.chains)[0].tolist()
                parts.append(positions)
            lengths = [len(part) for part in parts]
            if len(parts) < 2 or len(set(lengths)) > 1:
                raise ValueError(f"--tied_positions: found {text} with parts of {lengths} "
                                 "positions; expected at least two parts of one length, such as "
                                 "A1,B1 or A1-A9,B1-B9.")
            groups += [list(group) for group in zip(*parts)]
        return groups

    def equal_numbers(self):
        """Groups of joined positions with the same residue number, for --homomer."""
        by_number = {}
        for name, span in self.spans.items():
            for position, number in zip(span, self.structure.chains[name].numbers):
                if number:
                    by_number.setdefault(number, []).append(position)
        groups = [group for group in by_number.values() if len(group) > 1]
        for group in groups:
            if len({int(self.native[i]) for i in group} - {X_ID}) > 1:
                letters = ", ".join(f"{self.labels[i]} {LETTERS[self.native[i]]}" for i in group)
                raise ValueError(f"--homomer ties residues of equal number, but found {letters}; "
                                 "expected the same letter. Name the chains that are equal "
                                 "(--chains), or use --tied_positions.")
        if not groups:
            raise ValueError(f"--homomer: chains {' '.join(self.chains)} share no residue number; "
                             "expected two or more chains with the same numbers. Name them "
                             "(--chains), or use --tied_positions.")
        n_alone = len(by_number) - len(groups)
        self.notes.append(f"--homomer: {len(groups)} groups of residues of equal number in the "
                          f"file; {n_alone} numbers occur in one chain only and are not tied")
        return groups

    # ---- sequences ----

    def text(self, S):
        """(L,) ids of the complex -> letters of the designed chains, joined by /."""
        joined = decode(S[self.rows])
        return "/".join(joined[span.start:span.stop] for span in self.spans.values())

    def ids(self, text, name):
        """Letters of the designed chains, joined by / -> ids (L,) of the complex. Unresolved rows
        get the structure's letters. name: of the sequence, for the ValueError."""
        parts = text.replace("-", "X").split("/")
        lengths = [len(part) for part in parts]
        expected = [len(span) for span in self.spans.values()]
        if lengths != expected:
            raise ValueError(f"{name}: found chains of {lengths} letters; expected {expected}, of "
                             f"chains {' '.join(self.chains)}, gap rows counted, with / between "
                             "chains.")
        for i, letter in enumerate("".join(parts)):
            needs_name = self.resolved[i] and self.native[i] != X_ID and not self.modified[i]
            if letter not in LETTERS or (letter == "X" and needs_name):
                raise ValueError(f"{name}: found {letter!r} at {self.labels[i]} (position {i}, "
                                 f"0-based); expected one of {AMINO_ACIDS}, or X where no residue "
                                 "is resolved.")
        S = self.complex.S.copy()
        S[self.rows] = np.where(self.resolved, encode("".join(parts)), self.native)
        return S


def name_of(path: str) -> str:
    """Name of a structure: its file's name without folder and suffix."""
    return Path(re.sub(r"\.gz$", "", str(path), flags=re.I)).stem


def structure_files(given: list[str]) -> list[str]:
    """Paths of structures, those in given folders too. ValueError for none, or two of one name."""
    paths = []
    for path in given:
        if os.path.isdir(path):
            paths += files_in(path)
        else:
            paths.append(path)
    by_name = {}
    for path in paths:
        by_name.setdefault(name_of(path), []).append(path)
    for same in by_name.values():
        if len(same) > 1:
            raise ValueError(f"found {' and '.join(same)}, whose designs would have one name; "
                             "expected structures of different names. Rename one or leave it out.")
    return paths


def files_in(folder):
    """Sorted paths of the structures in a folder. ValueError for none."""
    files = []
    for file in Path(folder).iterdir():
        is_structure = file.name.lower().removesuffix(".gz").endswith(FORMATS)
        if is_structure and not file.name.startswith("._") and not file.is_dir():
            files.append(str(file))
    if not files:
        raise ValueError(f"found no structure in the folder {folder}; expected files with "
                         f"names in {' '.join(FORMATS)}, perhaps with .gz.")
    return sorted(files)


def choose_chains(args, structure):
    """Names of the designed chains, in the user's order, and of the fixed ones."""
    designed = args.chains
    fixed = args.fixed_chains
    usable = sorted(name for name, chain in structure.chains.items() if chain.resolved.any())
    if fixed is not None:
        fixed = chain_names(fixed, structure, "--fixed_chains")
    if designed:
        designed = chain_names(designed, structure, "--chains")
    else:
        designed = [name for name in usable if name not in (fixed or ())]
    unusable = [name for name in designed if name not in usable]
    if unusable or not designed:
        advice = ""
        if any(structure.chains[name].has_only_ca for name in unusable):
            advice = f" For CA alone, give weights of a CA-only model, {CA_MODEL}."
        raise ValueError(f"{structure.name}: found {' '.join(unusable) or 'no chain'} to design; "
                         f"expected protein chains with {structure.needed} that are not fixed. "
                         f"There are: {' '.join(usable) or '(none)'}.{advice}")
    if fixed is None:
        fixed = [name for name in usable if name not in designed]
    both = sorted(set(designed) & set(fixed))
    if both:
        raise ValueError(f"--chains: chain {' '.join(both)} is to be designed and to be fixed; "
                         "expected one of the two.")
    return designed, fixed


def chain_names(texts, structure, option):
    """Names of chains given to an option. ValueError for absent and repeated ones, and for none."""
    names = re.findall(r"[^,\s]+", " ".join(texts))
    absent = [name for name in names if name not in structure.chains]
    has_twice = len(set(names)) < len(names)
    has_blanks_only = bool(texts) and not names
    if absent or has_twice or has_blanks_only:
        raise ValueError(f"{option}: found {' '.join(names)[:80] or 'no name'}; expected chains of "
                         f"{structure.name}, each once, which has "
                         f"{' '.join(map(repr, structure.chains))}.")
    return names


def letter_bias(args: argparse.Namespace) -> torch.Tensor:
    """(21,) nats from --bias and --omit: -inf for omitted letters and X."""
    bias = torch.zeros(len(LETTERS))
    seen = set()
    for text in re.findall(r"[^,\s]+", " ".join(args.bias or ())):
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
