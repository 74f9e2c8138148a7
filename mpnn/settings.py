"""Which positions of a structure are designed, and under which constraints.

    tables = {"omit_AA_jsonl": read_json("omit.jsonl")}
    design = Design("5L33.pdb", args, letter_bias(args), tables)
    print(*design.notes, sep="\\n")                 # how everything was understood

Takes chains, fixed and tied positions, bias, omitted letters and PSSMs from the command line of
sample_proteinmpnn.py and from the published tool's JSON files of settings, {structure name: entry}.
In an entry, mostly {chain: value}, rows count from 1 in each chain, gaps included. Two orders of
rows occur: "joined", the designed chains in the user's order, and that of Complex: designed chains,
then fixed ones, sorted by name. A missing chain, position or letter is a ValueError. Settings for
other structures, and for chains that are not designed, are ignored, with a note.
"""
import argparse
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import torch

from mpnn.model import Pssm, allowed_letters, mean_in_groups
from proteins.structures import CA_MODEL, FORMATS, Complex, parse_positions, read_structure
from proteins.letters import AMINO_ACIDS, LETTERS, X_ID, decode, encode
from dpo.pair_files import quote, unique_keys

MOST_BYTES = 1 << 28    # of a file of settings; a PSSM of 1,000 residues has 0.5 MB
MAX_BIAS = 1e4          # nats; a larger bias would round away the logits in float32
PER_STRUCTURE = ("chain_id_jsonl", "fixed_positions_jsonl", "tied_positions_jsonl",
                 "omit_AA_jsonl", "bias_by_res_jsonl", "pssm_jsonl")
UNLIKELY = 0.001        # factor of letters whose log-odds are too low, as in the published tool
PSSM_KEYS = ("pssm_coef", "pssm_bias", "pssm_log_odds")


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
    tied:     lists of rows of the complex that get the same letter; tied_weights: (L,) of logits.
    bias:     (L, 21) nats by row of the complex; -inf: never drawn.
    pssm:     Pssm by row of the complex, or None.
    notes:    lines on how the input was understood.
    """

    def __init__(self, path: str, args: argparse.Namespace, bias: np.ndarray, tables: dict,
                 ca_only: bool = False):
        """args: of sample_proteinmpnn.py. bias: (21,) per letter. tables: {option: parsed JSON}.
        ca_only: for a CA-only model."""
        structure = read_structure(path, ca_only)
        self.name = name_of(path)
        self.structure = structure
        self.tables = tables
        self.notes = []
        self.chains, fixed = choose_chains(args, structure, self.entry("chain_id_jsonl"))
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
        self.notes.append(
            f"{structure.name}: designed chains {' '.join(self.chains)}, {len(self.rows)} rows, "
            f"{self.resolved.sum()} resolved; fixed chains {' '.join(fixed) or '(none)'}")
        unknown = sorted({name for chain in structure.chains.values() for name in chain.unknown})
        if unknown:
            self.notes.append(f"{structure.name}: residues {', '.join(unknown)} are none of the 20 "
                              "amino acids, and read as X")
        only_ca = [name for name, chain in structure.chains.items() if chain.has_only_ca]
        if only_ca and not ca_only:
            self.notes.append(f"{structure.name}: chains {' '.join(only_ca)} have CA atoms only: "
                              f"this model does not see them, a CA-only model, {CA_MODEL}, does")
        self.mutable = self.mutable_positions(args)
        if not (self.mutable & self.resolved).any():
            raise ValueError(f"{self.name}: no position is left to design: all are fixed or "
                             f"without {structure.needed}. Fix fewer.")
        self.drawn = np.zeros(len(self.complex), bool)
        self.drawn[self.rows] = self.mutable & self.resolved
        self.tie(args)
        self.bias = self.of_complex(self.bias_by_row(bias))
        self.pssm = None
        if "pssm_jsonl" in tables:
            self.pssm = self.read_pssm(args)
        self.check_letters_left()

    # ---- positions ----

    def positions(self, option, texts):
        """Sorted joined positions given to an option. Adds a note on how they were understood."""
        try:
            found, note = parse_positions(" ".join(texts), self.structure, self.chains)
        except ValueError as error:
            raise ValueError(f"--{option}: {error}") from None
        self.notes.append(f"--{option}: {note}")
        return found

    def mutable_positions(self, args):
        """(n_designed,) bool by joined position: may its letter change?"""
        mutable = np.full(len(self.rows), not args.mutable_positions)
        if args.mutable_positions:
            mutable[self.positions("mutable_positions", args.mutable_positions)] = True
        if args.fixed_positions:
            mutable[self.positions("fixed_positions", args.fixed_positions)] = False
        for span, rows, where in self.settings("fixed_positions_jsonl"):
            mutable[joined_positions(rows, span, where)] = False
        return mutable

    def tie(self, args):
        """Set `tied` and `tied_weights`."""
        positions = self.given_groups(args.tied_positions or ())
        if args.homomer:
            positions = self.equal_numbers()
        groups = [dict.fromkeys(group, 1.0) for group in positions]     # joined position -> weight
        entries = self.entry("tied_positions_jsonl") or []
        if not isinstance(entries, list):
            entries = [entries]
        groups += [self.weighted_group(entry) for entry in entries]
        members = [i for group in groups for i in group]
        if len(set(members)) < len(members):
            raise ValueError(f"{self.name}: found tied positions in two groups; expected each "
                             "position in one.")
        self.tied = []
        self.tied_weights = np.ones(len(self.complex), np.float32)
        for group in groups:
            if len({self.mutable[i] for i in group}) == 2:      # both True and False
                kinds = ", ".join(f"{self.labels[i]} ({'designed' if self.mutable[i] else 'fixed'})"
                                  for i in group)
                raise ValueError(f"tied positions are designed and fixed: {kinds}. Fix all of a "
                                 "group or none.")
            resolved = [i for i in group if self.resolved[i]]
            if len(resolved) > 1:
                self.tied.append(self.rows[resolved].tolist())
                self.tied_weights[self.rows[resolved]] = [group[i] for i in resolved]
        n_absent = sum(not self.resolved[i] for i in members)
        if n_absent:
            self.notes.append(f"{n_absent} tied positions are gaps or lack atoms, and are left out "
                              "of their groups")

    def weighted_group(self, entry):
        """{joined position: weight} from a file's group {chain: rows, or [rows, weights]}."""
        group = {}
        for span, value, where in self.by_chain("tied_positions_jsonl", entry, self.spans):
            has_weights = isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)
            if has_weights:
                positions = joined_positions(value[0], span, where)
                weights = numbers(value[1], (len(positions),), where)
            else:
                positions = joined_positions(value, span, where)
                weights = [1.0] * len(positions)
            group.update(zip(positions, weights))
        return group

    def given_groups(self, texts):
        """Groups from texts such as A1-A9,B1-B9: the k-th positions of all parts form a group."""
        texts = " ".join(texts).split()                     # blanks separate, also inside quotes
        if texts:
            self.refuse_fixed_chains(texts)
            self.positions("tied_positions", texts)         # checks: none twice, all of one kind
        groups = []
        for text in texts:
            parts = []
            for part in text.strip(",").split(","):
                positions = []
                if part:
                    found, _ = parse_positions(part, self.structure, self.chains)
                    positions = found.tolist()
                parts.append(positions)
            lengths = [len(part) for part in parts]
            if len(parts) < 2 or len(set(lengths)) > 1:
                raise ValueError(f"--tied_positions: found {text} with parts of {lengths} "
                                 "positions; expected at least two parts of one length, such as "
                                 "A1,B1 or A1-A9,B1-B9.")
            groups += [list(group) for group in zip(*parts)]
        return groups

    def refuse_fixed_chains(self, texts):
        """ValueError for tied positions that are those of a chain that is not designed."""
        for word in re.findall(r"[^,\s]+", " ".join(texts)):
            if re.fullmatch(r"[\d-]+", word):       # rows from 0
                continue
            for name in sorted(set(self.structure.chains) - set(self.chains)):
                numbers = [number for number in self.structure.chains[name].numbers if number]
                is_there = any(word.split("-")[0] == f"{name}{number}" for number in numbers)
                if is_there and name.strip():
                    raise ValueError(f"--tied_positions: {word} is in chain {name}, which is not "
                                     f"designed; expected positions of {' '.join(self.chains)}. "
                                     "Name all tied chains with --chains.")

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

    def bias_by_row(self, bias):
        """(n_designed, 21) nats by joined position: (21,) for all, plus the settings of files."""
        bias = np.tile(bias, (len(self.rows), 1))
        for span, value, where in self.settings("bias_by_res_jsonl"):
            shape = (len(span), len(LETTERS))
            bias[span] += numbers(value, shape, where, -MAX_BIAS, MAX_BIAS)
        for span, items, where in self.settings("omit_AA_jsonl"):
            if not isinstance(items, list):
                items = [items]
            for item in items:
                is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[1], str)
                if not is_pair or set(item[1]) - set(LETTERS):
                    raise ValueError(f'{where}: found {quote(item)}; expected [[rows], "letters"] '
                                     f"with letters of {LETTERS}.")
                rows, letters = item
                columns = [LETTERS.index(letter) for letter in letters]
                bias[np.ix_(joined_positions(rows, span, where), columns)] = -math.inf
        return bias

    def read_pssm(self, args):
        """Pssm by row of the complex; it has no effect on rows that the file does not mention."""
        coef = np.zeros(len(self.rows))
        shape = (len(self.rows), len(LETTERS))
        letters = np.zeros(shape)
        log_odds = np.full(shape, np.inf)
        factor = np.ones(shape)
        for span, value, where in self.settings("pssm_jsonl"):
            if not isinstance(value, dict) or set(value) != set(PSSM_KEYS):
                raise ValueError(f"{where}: found {quote(value)}; expected the keys "
                                 f"{', '.join(PSSM_KEYS)}.")
            shape = (len(span), len(LETTERS))
            coef[span] = numbers(value["pssm_coef"], (len(span),), f"{where}, pssm_coef", 0, 1)
            letters[span] = numbers(value["pssm_bias"], shape, f"{where}, pssm_bias", 0, 1)
            log_odds[span] = numbers(value["pssm_log_odds"], shape, f"{where}, pssm_log_odds")
        wrong = np.flatnonzero((coef > 0) & (np.abs(letters.sum(1) - 1) > 0.01))
        if len(wrong):
            i = wrong[0]
            raise ValueError(f"--pssm_jsonl: found pssm_bias at {self.labels[i]} of {self.name} "
                             f"with a sum of {letters[i].sum():g}; expected probabilities, a sum "
                             "of 1, where pssm_coef is above 0.")
        if args.pssm_log_odds_flag:
            factor = UNLIKELY + (log_odds > args.pssm_threshold)
        share = args.pssm_multi * coef[:, None]
        return Pssm(self.of_complex(share), self.of_complex(letters), self.of_complex(factor))

    def check_letters_left(self):
        """Refuse positions at which no letter could be drawn."""
        bias = mean_in_groups(self.bias, self.tied)
        pssm = None
        if self.pssm is not None:
            pssm = Pssm(*(mean_in_groups(x, self.tied) for x in self.pssm))
        is_stuck = self.drawn & ~allowed_letters(bias, pssm).any(1).numpy()
        stuck = np.flatnonzero(is_stuck[self.rows])
        if len(stuck):
            raise ValueError(f"{self.name}: bias, omitted letters and PSSM leave no letter to draw "
                             f"at {self.labels[stuck[0]]}. Omit fewer there.")

    def of_complex(self, joined):
        """Joined (n_designed, k) -> (L, k) float32 by row of the complex, 0 for fixed chains."""
        by_row = np.zeros((len(self.complex), joined.shape[1]), np.float32)
        by_row[self.rows] = joined
        return torch.from_numpy(by_row)

    # ---- JSON files ----

    def entry(self, option):
        """This structure's entry in the file of an option; None if the option was not given."""
        if option not in self.tables:
            return None
        table = self.tables[option]
        if self.name not in table:
            raise ValueError(f"--{option}: found settings for {quote(sorted(table))}; expected "
                             f"{self.name} among them. Give it {{}} for none.")
        return table[self.name]

    def settings(self, option):
        """by_chain for this structure's entry in the file of an option."""
        return self.by_chain(option, self.entry(option), self.structure.chains)

    def by_chain(self, option, entry, known):
        """Yield (span, value, start of an error message) of each designed chain in an entry.

        entry: {chain: value}, or None. known: names of chains that are allowed in it.
        """
        where = f"--{option}: {self.name}"
        if not is_nothing(entry) and not isinstance(entry, dict):
            raise ValueError(f"{where}: found {quote(entry)}; expected {{chain: ...}}.")
        for name, value in (entry or {}).items():
            if name not in known:
                raise ValueError(f"{where}: found chain {quote(name)}; expected one of "
                                 f"{' '.join(known)}.")
            if is_nothing(value):
                continue
            if name in self.spans:
                yield self.spans[name], value, f"{where}, chain {name}"
            else:
                self.notes.append(f"{where}: chain {name} is not designed, so its settings have "
                                  "no effect")

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
            needs_name = self.resolved[i] and self.native[i] != X_ID
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


def choose_chains(args, structure, entry):
    """Names of the designed chains, in the user's order, and of the fixed ones.

    entry: [designed, fixed] of a file, or None.
    """
    designed = args.chains
    fixed = args.fixed_chains
    option = "--chains"
    fixed_option = "--fixed_chains"
    if entry:
        check_chain_lists(entry, structure)
        designed, fixed = entry
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


def check_chain_lists(entry, structure):
    """ValueError unless a file's entry is [[designed chains], [fixed chains]]."""
    is_right = isinstance(entry, list) and len(entry) == 2 and bool(entry[0])
    for names in entry if is_right else ():
        is_right = is_right and isinstance(names, list)
        is_right = is_right and all(isinstance(name, str) for name in names)
    if not is_right:
        raise ValueError(f"--chain_id_jsonl: {structure.name}: found {quote(entry)}; expected "
                         "[[designed chains], [fixed chains]].")


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


def read_json(path: str) -> dict:
    """One dict of all JSON objects in a file, which may have several, such as one per line.

    Raises: ValueError for anything else and for keys that come twice.
    """
    try:
        with open(path, "rb") as file:   # perhaps a pipe, so its size is not known
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a file of JSON "
                         "objects.") from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes; expected JSON objects.")
    text = data.decode("utf-8-sig", errors="replace")
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    non_blank = re.compile(r"\S")
    items = []
    end = 0
    try:
        while start := non_blank.search(text, end):
            value, end = decoder.raw_decode(text, start.start())
            if not isinstance(value, dict):
                raise ValueError(f"a {type(value).__name__}")
            if "num_of_chains" in value:
                raise ValueError("a structure, as in parsed_pdbs.jsonl of the published tool")
            items += value.items()
        if end == 0:
            raise ValueError("nothing")
        return unique_keys(items)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: found {str(error)[:80]}; expected JSON objects, {{...}}, each "
                         "key once.") from None


def joined_positions(rows, span, where):
    """Joined positions of rows of a chain, counted from 1. span: joined positions of the chain."""
    n = len(span)
    is_right = isinstance(rows, list) and all(type(i) is int and 1 <= i <= n for i in rows)
    if not is_right or len(set(rows)) < len(rows):
        raise ValueError(f"{where}: found {quote(rows)}; expected a list of rows from 1 to {n}, "
                         "gaps counted, none twice.")
    return [span[i - 1] for i in rows]


def numbers(value, shape, where, low=-math.inf, high=math.inf):
    """`value` as a float64 array; ValueError unless of this shape, finite, and in low .. high."""
    try:
        array = np.array(value)
    except ValueError:      # rows of several lengths
        array = np.empty(0)
    # Not texts, and not integers above 2**64, which numpy keeps as objects.
    are_numbers = array.dtype.kind in "iuf" and not holds_bool(value)
    is_right = array.shape == shape and are_numbers and bool(np.isfinite(array).all())
    if not is_right or ((array < low) | (array > high)).any():
        raise ValueError(f"{where}: found {quote(value)}; expected numbers of shape {shape} from "
                         f"{low:g} to {high:g}.")
    return array.astype(np.float64)


def holds_bool(value):
    """Whether a value from JSON is true or false, or a list that holds one."""
    if isinstance(value, list):
        return any(map(holds_bool, value))
    return isinstance(value, bool)


def is_nothing(value):
    """Whether a value from JSON says that there are no settings: null, {} or []."""
    return value is None or value == {} or value == []
