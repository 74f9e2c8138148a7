"""Which positions of a structure are designed, and under which constraints.

    design = Design("5L33.pdb", args, letter_bias(args), tables)
    print(*design.notes, sep="\\n")                 # how everything was understood

Takes chains, fixed and tied positions, bias and PSSMs from the command line of
sample_proteinmpnn.py and from the published tool's files (mpnn/official_settings.py). Two orders of
rows occur: "joined", the designed chains in the user's order, and that of Complex: designed chains,
then fixed ones, sorted by name. A missing chain or position is a ValueError. Settings of files for
chains that are not designed have no effect, with a note.
"""
import argparse
import math
import os
import re
from pathlib import Path

import numpy as np
import torch

from mpnn.model import Pssm
from mpnn.official_settings import MAX_BIAS, read_json, settings_of
from proteins.letters import AMINO_ACIDS, LETTERS, X_ID, decode, encode
from proteins.structures import (CA_MODEL, FORMATS, Complex, describe_modified, parse_positions,
                                 read_structure)


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
    bias:     (L, 21) nats by row of the complex; -inf: never drawn.
    pssm:     Pssm by row of the complex, or None.
    notes:    lines on how the input was understood.
    """

    def __init__(self, path: str, args: argparse.Namespace, bias: np.ndarray, tables: dict,
                 ca_only: bool = False):
        """args: of sample_proteinmpnn.py. bias: (21,) per letter. tables: of settings_of.
        ca_only: for a CA-only model."""
        structure = read_structure(path, ca_only)
        self.name = name_of(path)
        self.structure = structure
        self.notes = []
        n_rows = {name: len(chain.S) for name, chain in structure.chains.items()}
        settings = settings_of(tables, self.name, n_rows)
        self.chains, fixed = choose_chains(args, structure, settings.chains)
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
        self.note_input(fixed, settings, ca_only)
        self.mutable = self.mutable_positions(args, settings.fixed)
        if not (self.mutable & self.resolved).any():
            raise ValueError(f"{self.name}: no position is left to design: all are fixed or "
                             f"without {structure.needed}. Fix fewer.")
        self.drawn = np.zeros(len(self.complex), bool)
        self.drawn[self.rows] = self.mutable & self.resolved
        self.tied = self.tied_rows(self.tied_positions(args, settings.tied))
        self.bias = self.of_complex(self.bias_by_row(bias, settings.bias))
        self.pssm = None
        if "pssm_jsonl" in tables:
            self.pssm = self.make_pssm(args.pssm_multi, settings.pssm)

    def note_input(self, fixed, settings, ca_only):
        """Add notes on chains and residues."""
        structure = self.structure
        self.notes.append(
            f"{structure.name}: designed chains {' '.join(self.chains)}, {len(self.rows)} rows, "
            f"{self.resolved.sum()} resolved; fixed chains {' '.join(fixed) or '(none)'}")
        modified = describe_modified([structure])
        if modified:
            self.notes.append(f"{structure.name}: {modified}")
        only_ca = [name for name, chain in structure.chains.items() if chain.has_only_ca]
        if only_ca and not ca_only:
            self.notes.append(f"{structure.name}: chains {' '.join(only_ca)} have CA atoms only: "
                              f"this model does not see them, a CA-only model, {CA_MODEL}, does")
        for_chains = [settings.fixed, settings.bias, settings.pssm, *settings.tied]
        others = sorted({name for each in for_chains for name in each} - set(self.chains))
        if others:
            self.notes.append(f"{structure.name}: chains {' '.join(others)} are not designed, so "
                              "what files of settings say on them has no effect")

    # ---- positions ----

    def positions(self, option, texts):
        """Sorted joined positions given to an option. Adds a note on how they were understood."""
        try:
            found, note = parse_positions(" ".join(texts), self.structure, self.chains)
        except ValueError as error:
            raise ValueError(f"--{option}: {error}") from None
        self.notes.append(f"--{option}: {note}")
        return found

    def joined(self, rows_of_chains):
        """Joined positions of {chain: rows from 1} of a file; those of designed chains."""
        return [self.spans[name][row - 1] for name, rows in rows_of_chains.items()
                if name in self.spans for row in rows]

    def mutable_positions(self, args, fixed_rows):
        """(n_designed,) bool by joined position: may its letter change?

        fixed_rows: {chain: rows} of a file."""
        mutable = np.full(len(self.rows), not args.mutable_positions)
        if args.mutable_positions:
            mutable[self.positions("mutable_positions", args.mutable_positions)] = True
        if args.fixed_positions:
            mutable[self.positions("fixed_positions", args.fixed_positions)] = False
        mutable[self.joined(fixed_rows)] = False
        return mutable

    def tied_positions(self, args, groups_of_rows):
        """Lists of joined positions that get the same letter.

        groups_of_rows: [{chain: rows}] of a file."""
        if args.homomer:
            return self.equal_numbers()
        if args.tied_positions:
            return self.given_groups(args.tied_positions)
        return [self.joined(group) for group in groups_of_rows]

    def tied_rows(self, groups):
        """Lists of rows of the complex from lists of joined positions, without the unresolved."""
        members = [i for group in groups for i in group]
        if len(set(members)) < len(members):
            raise ValueError(f"{self.name}: found tied positions in two groups; expected each "
                             "position in one.")
        tied = []
        for group in groups:
            if len({self.mutable[i] for i in group}) == 2:      # both True and False
                kinds = ", ".join(f"{self.labels[i]} ({'designed' if self.mutable[i] else 'fixed'})"
                                  for i in group)
                raise ValueError(f"tied positions are designed and fixed: {kinds}. Fix all of a "
                                 "group or none.")
            resolved = [i for i in group if self.resolved[i]]
            if len(resolved) > 1:
                tied.append(self.rows[resolved].tolist())
        n_absent = sum(not self.resolved[i] for i in members)
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
            parts = [parse_positions(part, self.structure, self.chains)[0].tolist()
                     for part in text.strip(",").split(",")]
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
                          f"file; {n_alone} numbers occur in one chain only and are not tied")
        return groups

    # ---- letters ----

    def bias_by_row(self, bias, of_chains):
        """(n_designed, 21) nats by joined position: (21,) for all, plus {chain: (rows, 21)}."""
        bias = np.tile(bias, (len(self.rows), 1))
        for name, added in of_chains.items():
            if name in self.spans:
                bias[self.spans[name]] += added
        return bias

    def make_pssm(self, share_of_all, of_chains):
        """Pssm by row of the complex; it has no effect on chains that the file does not mention.

        share_of_all: of the PSSM in the probabilities, 0 to 1. of_chains: see
            StructureSettings.pssm."""
        share = np.zeros((len(self.rows), 1))
        letters = np.zeros((len(self.rows), len(LETTERS)))
        for name, (of_rows, probabilities) in of_chains.items():
            if name in self.spans:
                share[self.spans[name], 0] = share_of_all * of_rows
                letters[self.spans[name]] = probabilities
        return Pssm(self.of_complex(share), self.of_complex(letters))

    def of_complex(self, joined):
        """Joined (n_designed, k) -> (L, k) float32 by row of the complex, 0 for fixed chains."""
        by_row = np.zeros((len(self.complex), joined.shape[1]), np.float32)
        by_row[self.rows] = joined
        return torch.from_numpy(by_row)

    # ---- sequences ----

    def text(self, S):
        """(L,) ids of the complex -> letters of the designed chains, joined by /."""
        joined = decode(S[self.rows])
        return "/".join(joined[span.start:span.stop] for span in self.spans.values())

    def ids(self, text, name):
        """Letters of the designed chains, joined by / -> ids (L,) of the complex. Unresolved rows
        get the structure's letters. name: of the sequence, for the ValueError."""
        parts = text.replace("-", "X").split("/")
        found = [len(part) for part in parts]
        expected = [len(span) for span in self.spans.values()]
        if found != expected:
            raise ValueError(f"{name}: found chains of {found} letters; expected {expected}, of "
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


def choose_chains(args, structure, of_file):
    """Names of the designed chains, in the user's order, and of the fixed ones.

    of_file: [designed, fixed] of a file, or [].
    """
    designed = args.chains
    fixed = args.fixed_chains
    option = "--chains"
    fixed_option = "--fixed_chains"
    if of_file:
        designed, fixed = of_file
        option = "--chain_id_jsonl"
        fixed_option = "--chain_id_jsonl"
    usable = sorted(name for name, chain in structure.chains.items() if chain.resolved.any())
    if fixed is not None:
        fixed = chain_names(fixed, structure, fixed_option)
    if designed:
        designed = chain_names(designed, structure, option)
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
        raise ValueError(f"{option}: chain {' '.join(both)} is to be designed and to be fixed; "
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


def letter_bias(args: argparse.Namespace) -> np.ndarray:
    """(21,) nats from --bias or its file, -inf for omitted letters and X."""
    option = "--bias"
    texts = args.bias or ()
    if args.bias_AA_jsonl:
        option = "--bias_AA_jsonl"
        table = read_json(args.bias_AA_jsonl)
        texts = [f"{letter}={value}" for letter, value in table.items()]
    bias = np.zeros(len(LETTERS))
    seen = set()
    for text in re.findall(r"[^,\s]+", " ".join(texts)):
        letter, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if letter not in AMINO_ACIDS or len(letter) != 1 or not abs(number) <= MAX_BIAS:
            raise ValueError(f"{option}: found {text}; expected an amino acid and nats, such as "
                             f"E=0.5 or K=-1, up to {MAX_BIAS:g} either way.")
        if letter in seen:
            raise ValueError(f"{option}: found {letter} twice; expected each amino acid once.")
        seen.add(letter)
        bias[LETTERS.index(letter)] = number
    omitted = set((args.omit or "") + "X")
    if omitted - set(LETTERS) or omitted == set(LETTERS):
        raise ValueError(f"--omit: found {args.omit}; expected some, not all, of {AMINO_ACIDS}.")
    bias[[LETTERS.index(letter) for letter in omitted]] = -math.inf
    return bias
