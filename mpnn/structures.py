"""Structures and preference pairs: PDB/mmCIF files, checks, split, batches, synthetic demo pairs.

    data = load_pairs(config.data, seed=0)                  # all that a run needs, in one call; or:
    pairs = read_pairs("pairs.json")                        # describe(pairs) summarises them
    train, val, warnings = split_pairs(pairs, 0.1, seed=0)  # two lists, split by structure
    plan = plan_epoch(train, seed=0, epoch=0, micro_batches=4, batch_size=8)
    for indices in plan[step]:                              # 4 micro-batches on any number of ranks
        batch = collate(train, indices)                     # {name: tensor}

Reads structures (.pdb, .ent, .cif, .mmcif; each also with .gz) and pairs: a JSON list of objects,
or one object per line in a .jsonl file. Keys of an object:
    pdb_file                path, relative to the folder of the file that names it
    preferred_seq, unpreferred_seq
                            a letter per row of the designed chains, joined in the order of
                            design_chains
    chain_id, or design_chains with fixed_chains
                            the chains to design; those that are context. No other chain is loaded
    mutable_positions, or mutable_ranges
                            0-based in the joined sequence; ranges [first, last] include both ends.
                            Optional: without them every position is designed
    weight                  of the pair in the loss, 1e-6 to 1e6; optional, default 1
    description             anything; not used
Writes nothing. All results depend only on the arguments, so that every rank reads, splits and plans
the same. No model and no process group here.

Rows are those of the official ProteinMPNN parser: one for each residue number from first to last,
and for each insertion code. A number without a residue is a gap: letter X and no coordinates.
"""

import functools
import gzip
import hashlib
import itertools
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gemmi
import numpy as np
import torch

from sedd.sequences import AMINO_ACIDS, LETTERS, X_ID, encode

NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
BACKBONE = ("N", "CA", "C", "O")
FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
MAX_ANGSTROM = 100_000      # largest coordinate
MAX_ROWS = 100_000          # in a chain: no protein is as long, so more means wrong residue numbers
MAX_LISTED = 20             # at most so many problems of a file, or contradictions, are listed
LENGTH_RATIO = 1.1          # longest / shortest of a class of lengths, within which is shuffled
REQUIRED = ("pdb_file", "preferred_seq", "unpreferred_seq")
OPTIONAL = ("chain_id", "design_chains", "fixed_chains", "mutable_positions", "mutable_ranges",
            "weight", "description")
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6   # of a pair
MOST_MISSED = 2             # warn if the held-out fraction misses val_fraction by a larger factor
# The first key of _random_words, so that no two purposes share a stream of random numbers.
FOR_SPLIT, FOR_PAIRS, FOR_LENGTHS, FOR_STEPS, FOR_DEMO = 1, 2, 3, 4, 5


def _random_words(n, *integers):
    """(n,) random uint64 seeded by integers. numpy promises never to change this stream."""
    return np.random.PCG64([int(i) % 2**64 for i in integers]).random_raw(n)


def _content_key(*parts):
    """Hash of arrays, texts and numbers: an integer in [0, 2**63), equal on every machine."""
    plain = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# ---- structures ----

@dataclass(frozen=True, eq=False)
class Chain:
    S: np.ndarray               # (L,) uint8 letters; X at gaps and non-standard residues
    X: np.ndarray               # (L, 4, 3) float32 of N, CA, C, O in Angstrom; missing atoms: 0
    resolved: np.ndarray        # (L,) bool: all four atoms are there
    numbers: tuple              # (L,) residue numbers such as "12" and "12B"; None at gaps


class Structure:
    """Chains of one file, by name.

    key: hash of letters and coordinates, equal for copies of a file and for its other formats.
    """

    def __init__(self, name, chains):
        self.name, self.chains = name, chains
        self.key = _content_key(*(part for chain_name, chain in sorted(chains.items())
                                  for part in (chain_name, chain.S, chain.X)))


def read_structure(path):
    """Read a PDB or mmCIF file with the rows of the official ProteinMPNN parser.

    Only ATOM records are read, and HETATM records of MSE (selenomethionine), as M. A residue whose
    name is not one of the 20 is X and keeps its coordinates. Of several atoms of one name, or
    several residue names, at a residue number (alternative locations, models) the first counts.
    Nucleic acids become X rows without coordinates. mmCIF is read by author names and numbers.
    Source: parse_PDB_biounits of github.com/dauparas/ProteinMPNN.

    Args:
        path: file with a name in FORMATS, or one of these with .gz.
    Returns: Structure.
    Raises: FileNotFoundError; ValueError with the reason why a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"file not found: {path}")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if not path.is_file() or suffix not in FORMATS:
        raise ValueError(f"{path} is not a file with a name in {' '.join(FORMATS)} or one of these "
                         "with .gz")
    try:
        text = path.read_bytes()
        if text[:2] == b"\x1f\x8b":
            text = gzip.decompress(text)
        text = text.removeprefix(b"\xef\xbb\xbf")   # the byte order mark of UTF-8
        models = _parse_pdb(text) if suffix in (".pdb", ".ent") else _parse_mmcif(text)
        return Structure(str(path), _make_chains(models))
    except (OSError, EOFError, zlib.error, RuntimeError, ValueError, IndexError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None


def _parse_pdb(text):
    # Keep only the records that the official parser reads. gemmi would also stop at END.
    lines = re.findall(rb"^(?:ATOM|HETATM.{11}MSE)[^\r\n]*", text, re.MULTILINE)
    for line in lines:      # gemmi would read a malformed number as 0
        try:
            int(line[22:26]), float(line[30:38]), float(line[38:46]), float(line[46:54])
        except ValueError:
            raise ValueError(f"found {line.decode('latin-1')[:54]!r}; expected a residue number in "
                             "columns 23 to 26 and coordinates in columns 31 to 54") from None
    # Two chains with the same name, or without one, would be merged, and the second be lost. Look
    # in the first model only, without column 17: models and alternative locations repeat residues.
    first_model = re.split(rb"^ENDMDL", text, flags=re.MULTILINE)[0]
    seen = set()
    for place in re.findall(rb"^ATOM.{8} CA  .{4}(.{6})", first_model, re.MULTILINE):
        if place in seen:
            residue = " ".join(place.decode("latin-1").split())
            raise ValueError(f"residue {residue} comes twice; expected a different name for each "
                             "chain in column 22, which keeps chains apart")
        seen.add(place)
    # gemmi would read a letter in column 21 as part of the chain's name.
    lines = [line[:20] + b" " + line[21:] for line in lines]
    return gemmi.read_pdb_string(b"\n".join(lines) + b"\n")


def _parse_mmcif(text):
    document = gemmi.cif.read_string(text.decode("utf-8", "replace"))
    blocks = [block for block in document if block.find_values("_atom_site.Cartn_x")]
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} data blocks have atoms (_atom_site); expected one")
    # The checks below are for what gemmi accepts silently: without group_PDB every row is an ATOM,
    # without auth_seq_id the label numbers are used, and a malformed number counts as unknown.
    if not blocks[0].find_values("_atom_site.group_PDB"):
        raise ValueError("_atom_site has no group_PDB; expected ATOM and HETATM there, which tell "
                         "protein from water")
    for key in ("id", "type_symbol", "label_alt_id", "label_asym_id", "Cartn_y", "Cartn_z"):
        if not blocks[0].find_values(f"_atom_site.{key}"):   # gemmi would read no atoms at all
            raise ValueError(f"_atom_site has no {key}; expected this column")
    number = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?(\(\d+\))?|[?.]"  # (7) in 1.25(7) is an error
    patterns = {"Cartn_x": number, "Cartn_y": number, "Cartn_z": number, "auth_seq_id": r"-?\d+"}
    for key, pattern in patterns.items():
        for value in blocks[0].find_values(f"_atom_site.{key}"):
            if not re.fullmatch(pattern, value):
                raise ValueError(f"_atom_site.{key} is {value!a}; expected a number")
    return gemmi.make_structure_from_block(blocks[0])


def _make_chains(models):
    """{chain name: Chain} from gemmi's models."""
    residues = {}       # chain name -> {(number, insertion code): residues of all models}
    for chain in (chain for model in models for chain in model):
        for residue in chain:
            if residue.het_flag != "H" or residue.name == "MSE":
                place = (residue.seqid.num, residue.seqid.icode.strip())
                residues.setdefault(chain.name, {}).setdefault(place, []).append(residue)
    if not residues:
        raise ValueError("no ATOM records")
    return {name: _make_chain(name, places) for name, places in residues.items()}


def _make_chain(name, places):
    """Chain from {(number, insertion code): residues}; gaps in the numbers become X rows."""
    numbers = {number for number, _ in places}
    if None in numbers or max(numbers) - min(numbers) >= MAX_ROWS:
        raise ValueError(f"chain {name} has residues without a number, or more than {MAX_ROWS:,} "
                         "rows")
    gaps = set(range(min(numbers), max(numbers))) - numbers
    rows = sorted([*places, *((number, "") for number in gaps)])
    S = np.full(len(rows), X_ID, np.uint8)
    X = np.full((len(rows), 4, 3), np.nan, np.float32)
    for row, place in enumerate(rows):
        residues = places.get(place, [])
        if residues:
            is_mse = residues[0].name == "MSE" and residues[0].het_flag == "H"
            residue_name = "MET" if is_mse else residues[0].name
            S[row] = NAMES.index(residue_name) if residue_name in NAMES else X_ID
        for k, atom_name in enumerate(BACKBONE):
            atoms = [residue.find_atom(atom_name, "*") for residue in residues]
            X[row, k] = next((atom.pos.tolist() for atom in atoms if atom is not None), np.nan)
    known = np.isfinite(X)
    if known.any() and np.abs(X[known]).max() > MAX_ANGSTROM:
        raise ValueError(f"chain {name} has a coordinate of {np.abs(X[known]).max():g}; expected "
                         f"Angstrom, at most {MAX_ANGSTROM:,}")
    labels = tuple(f"{number}{code}" if (number, code) in places else None
                   for number, code in rows)
    return Chain(S, np.where(known, X, np.float32(0)), known.all((1, 2)), labels)


class Complex:
    """Chains of a structure in the order of the official tensors.

    The designed chains come first, sorted by name, then the fixed ones, sorted by name.

    X:           (L, 4, 3) float32, Angstrom.
    S:           (L,) uint8, native letters.
    mask:        (L,) bool, True = resolved.
    chain_id:    (L,) int64, from 1.
    residue_idx: (L,) int64, the row, plus 100 for each earlier chain.
    n_designed:  number of rows of the designed chains (single positions of these may be fixed).
    left_out:    names of the other protein chains of the structure.
    key:         hash of the structure and the names of the chains.
    """

    def __init__(self, structure, design, fixed=()):
        self.structure = structure
        self.design, self.fixed = tuple(sorted(design)), tuple(sorted(fixed))
        chains = [structure.chains[name] for name in self.design + self.fixed]
        self.X = np.concatenate([chain.X for chain in chains])
        self.S = np.concatenate([chain.S for chain in chains])
        self.mask = np.concatenate([chain.resolved for chain in chains])
        self.chain_id = np.repeat(np.arange(1, len(chains) + 1), [len(chain.S) for chain in chains])
        self.residue_idx = np.arange(len(self.S)) + 100 * (self.chain_id - 1)
        self.n_designed = int((self.chain_id <= len(self.design)).sum())
        self.key = _content_key(structure.key, self.design, self.fixed)
        self.left_out = [name for name, chain in structure.chains.items()
                         if chain.resolved.any() and name not in self.design + self.fixed]

    def __len__(self):
        return len(self.S)

    def rows(self, design):
        """(n_designed,) int64: row of each position when chains are joined in order of `design`."""
        numbers = [self.design.index(name) + 1 for name in design]
        return np.concatenate([np.flatnonzero(self.chain_id == number) for number in numbers])


def parse_positions(text, structure, chains):
    """Parse positions as written on a command line.

    Args:
        text:   positions separated by blanks or commas. "A12" is residue 12 of chain A by its
                number in the file, "A12B" has insertion code B, "A10-A20" is a range with both
                ends. Or all are 0-based numbers in the joined sequence, such as "12" and "10-20".
        structure: Structure.
        chains: names of the chains whose rows are joined, in this order.
    Returns: sorted int64 positions, 0-based in the joined sequence, and a text that says how they
        were understood.
    Raises: ValueError for positions that do not exist (a gap has no residue), come twice, or can be
        read in two ways.
    """
    words = re.findall(r"[^,\s]+", text)
    # "A12"; None in chains without a name, as "" would be the first end of a range "-A12"
    labels = [name + number if number and name.strip() else None
              for name in chains for number in structure.chains[name].numbers]
    rows_of = {}                                    # label -> joined rows
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    positions, kinds = [], set()
    for word in words:
        # Collect every way to read the word, as (first row, last row). A "-" may separate the ends
        # of a range or be the sign of a number, so split the word at each "-" in turn.
        readings = {(row, row) for row in rows_of.get(word, [])}
        for dash in re.finditer("-", word):
            readings |= {*itertools.product(rows_of.get(word[:dash.start()], []),
                                            rows_of.get(word[dash.end():], []))}
        kinds.add("chain and number in the file" if readings else "0-based number in the sequence")
        numeric = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if numeric and int(numeric[2] or numeric[1]) < len(labels):
            readings.add((int(numeric[1]), int(numeric[2] or numeric[1])))
        first, last = min(readings, default=(0, -1))
        if len(readings) != 1 or first > last:
            problem = "ambiguous" if len(readings) > 1 else "not there, or reversed"
            raise ValueError(f"position {word} is {problem}; chains {' '.join(chains)} hold "
                             f"{labels[0] or 0} to {labels[-1] or len(labels) - 1}, {len(labels)} "
                             "rows with the gaps")
        positions.extend(range(first, last + 1))
    if not positions or len(kinds) > 1 or len(set(positions)) < len(positions):
        raise ValueError(f"positions {text!r}: expected some, all of one kind (A12 or "
                         "12), none of them twice")
    return (np.array(sorted(positions)),
            f"{len(positions)} positions by {kinds.pop()}: {' '.join(words)}")


# ---- preference pairs ----

class Pair:
    """Two sequences for one complex, the first preferred.

    chosen, rejected: (n_designed,) uint8 letters by row of the complex; equal where not scored.
    chain_M: (n_designed,) bool, True = designed. Rows that are also resolved are scored.
    key:     hash of the structure and all of the above, for seeds and caches.
    weight:  of the pair in means over pairs.
    """

    def __init__(self, complex, chosen, rejected, chain_M, weight=1.0):
        self.complex, self.chain_M, self.weight = complex, chain_M, weight
        self.chosen, self.rejected = chosen, rejected
        self.key = _content_key(complex.key, chosen, rejected, chain_M)


def read_pairs(path, structures=None, mutable=None, max_length=None, notes=None,
               alive=lambda: None):
    """Read and check a file of preference pairs.

    Unresolved rows may have any letter, X or '-': they are not scored, and the structure's letter
    is used. A residue that is X in both sequences and in the structure is not designed.

    Args:
        path:       JSON or .jsonl file.
        structures: dict to which each structure read is added, to share between calls.
        mutable:    positions, as parse_positions takes them, for pairs that give no positions.
        max_length: most rows of a designed sequence.
        notes:      list to which a text is added that says how `mutable` was understood.
        alive:      called before each pair, to show a watchdog that reading continues.
    Returns: list of Pair, in the order of the file.
    Raises: one ValueError with the first problem of each bad item, counted from 0;
        OSError for a file that cannot be opened.
    """
    path, pairs, problems, items_of = Path(path), [], [], {}
    entries = _read_entries(path)
    reader = _PairReader(path.parent, {} if structures is None else structures, mutable, max_length,
                         [] if notes is None else notes)
    for item, entry in enumerate(entries):
        alive()
        try:
            pairs.append(reader.read(entry))
        except (ValueError, OSError) as error:
            items_of.setdefault(str(error), []).append(item)
    for problem, items in items_of.items():     # one message for all items with the same problem
        others = f" (and {len(items) - 1:,} more up to item {items[-1]})" if items[1:] else ""
        problems.append(f"item {items[0]}: {problem}{others}")
    if problems:
        mend = "the file, or the mutable positions for all pairs" if mutable else "the file"
        lines = [f"{path}: found problems in {len(entries) - len(pairs):,} of {len(entries):,} "
                 f"pairs; expected none. Mend {mend}:", *problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"and {len(problems) - MAX_LISTED:,} other problems")
        raise ValueError("\n  ".join(lines))
    return pairs


def describe(pairs):
    """One line about the pairs of a file: their number, and anything unusual about them."""
    complexes = {pair.complex.key: pair.complex for pair in pairs}
    structures = {complex.structure.key for complex in complexes.values()}
    lengths = [len(complex) for complex in complexes.values()]
    first_items = {}            # (complex, preferred sequence, the other) -> first item with these
    for item, pair in enumerate(pairs):
        preference = pair.complex.key, pair.chosen.tobytes(), pair.rejected.tobytes()
        first_items.setdefault(preference, item)
    contradictions = [f"item {item} against item {first_items[key, rejected, chosen]}"
                      for (key, chosen, rejected), item in first_items.items()
                      if item < first_items.get((key, rejected, chosen), -1)]
    listed = ", ".join(contradictions[:MAX_LISTED])
    if len(contradictions) > MAX_LISTED:
        listed += f", and {len(contradictions) - MAX_LISTED:,} more"
    weights = [pair.weight for pair in pairs]
    notes = [(sum(weight != 1 for weight in weights),
              f"with a weight other than 1; weights {min(weights):g} to {max(weights):g}"),
             (sum(len(pair.complex.design + pair.complex.fixed) > 1 for pair in pairs),
              "with several chains"),
             (sum(not pair.chain_M.all() for pair in pairs), "with fixed positions"),
             (sum(not pair.complex.mask[:len(pair.chosen)].all() for pair in pairs),
              "with unresolved rows, which are not scored"),
             (len(pairs) - len(first_items), "repeat an earlier one"),
             (len(contradictions), f"contradict another: {listed}")]
    head = (f"{len(pairs):,} pairs on {len(structures):,} structures, "
            f"{min(lengths):,} to {max(lengths):,} residues each, gaps included")
    return "; ".join([head] + [f"{n:,} {text}" for n, text in notes if n])


def unique_keys(items):
    """Dict of the (key, value) items of a JSON object. Raises: ValueError for a key given twice."""
    keys = [key for key, _ in items]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ValueError(f"key {quote(twice[0])} given twice")
    return dict(items)


def quote(value):
    """A value as short JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _parse_json(text, where):
    """The value of a text or bytes of JSON. where: file and line, for messages."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: this is not valid JSON: {str(error)[:80]}. Expected a list of "
                         "objects; if it has one object per line, name it .jsonl.") from None


def _read_entries(path):
    """The items of a file of pairs."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; expected a file of preference pairs. Check the "
                                f"path (relative to {Path.cwd()}).")
    text = path.read_bytes()
    if path.suffix.lower() == ".jsonl":
        entries = [_parse_json(line, f"{path}, line {number}")
                   for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    else:
        entries = _parse_json(text, path)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: found {quote(entries)}; the top level must be a list of "
                         "objects, [{...}, ...], and not an empty one.")
    return entries


class _PairReader:
    """Makes pairs from JSON objects. Structures and complexes are kept, for later pairs on them.

    folder:    paths of structures are relative to it.
    positions: mutable positions for pairs that give none, or None.
    structures, max_length, notes: see read_pairs.
    """

    def __init__(self, folder, structures, positions, max_length, notes):
        self.folder, self.structures = folder, structures           # path -> Structure
        self.positions, self.max_length, self.notes = positions, max_length, notes
        self.complexes = {}         # (path, designed chains, fixed chains) -> Complex

    def read(self, entry):
        """Pair of an object. Raises: ValueError with the first problem."""
        _check_keys(entry)
        weight = _read_weight(entry)
        sequences = _read_sequences(entry)
        design, fixed = _read_chains(entry)
        complex = self.complex(entry["pdb_file"], design, fixed)
        self.check_length(complex, design, len(sequences["preferred_seq"]))
        has_own = "mutable_positions" in entry or "mutable_ranges" in entry
        is_mutable = (_read_mutable(entry, complex.n_designed) if has_own else
                      self.mutable_for_all(complex, design))
        return _make_pair(complex, design, sequences, is_mutable, weight)

    def complex(self, pdb_file, design, fixed):
        """Complex of these chains."""
        path = self.folder / pdb_file
        if path not in self.structures:
            self.structures[path] = read_structure(path)
        structure = self.structures[path]
        for chain in design + fixed:
            if chain not in structure.chains:
                names = " ".join(name or "(blank)" for name in structure.chains)
                raise ValueError(f"chain {chain} not in {pdb_file} (has {names})")
        for chain in design:
            if not structure.chains[chain].resolved.any():
                raise ValueError(f"chain {chain} has no protein residue with a complete backbone "
                                 "(N, CA, C, O): nothing to score")
        key = (path, tuple(sorted(design)), tuple(sorted(fixed)))
        if key not in self.complexes:
            self.complexes[key] = Complex(structure, design, fixed)
        return self.complexes[key]

    def check_length(self, complex, design, length):
        n = complex.n_designed
        if self.max_length is not None and n > self.max_length:
            raise ValueError(f"the designed sequence has {n} rows, more than max_length "
                             f"{self.max_length}")
        if length != n:
            n_unresolved = int((~complex.mask[:n]).sum())
            hint = f" of which {n_unresolved} unresolved (write X there)" if n_unresolved else ""
            chains = ("chains " if len(design) > 1 else "chain ") + " ".join(design)
            raise ValueError(f"length mismatch: sequence {length}, structure {chains} {n}{hint}")

    def mutable_for_all(self, complex, design):
        """(n_designed,) bool in the order of the sequences, for pairs that give no positions."""
        if self.positions is None:
            return np.ones(complex.n_designed, bool)
        try:
            positions, note = parse_positions(self.positions, complex.structure, design)
        except ValueError as error:
            raise ValueError(f"the mutable positions for all pairs: {error}") from None
        if not self.notes:
            self.notes.append(note)
        return np.isin(np.arange(complex.n_designed), positions)


def _check_keys(entry):
    if not isinstance(entry, dict):
        raise ValueError(f"found {quote(entry)}; expected an object")
    for key in sorted(entry.keys() - {*REQUIRED, *OPTIONAL}):
        raise ValueError(f"unknown key {key}; known are {' '.join(REQUIRED + OPTIONAL)}")
    for key in REQUIRED:
        if key not in entry:
            raise ValueError(f"missing key {key}")
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise ValueError(f"{key} is {quote(entry[key])}; expected a text that is not empty")


def _read_weight(entry):
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"weight is {quote(weight)}; expected a number above 0, from "
                         f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return float(weight)


def _read_sequences(entry):
    """{"preferred_seq": text, "unpreferred_seq": text} of one length, of LETTERS and '-'."""
    sequences = {key: entry[key] for key in ("preferred_seq", "unpreferred_seq")}
    for key, text in sequences.items():
        wrong = re.search(f"[^{LETTERS}-]", text)
        if wrong:
            letter = wrong.group()
            hint = "; write upper case" if letter in LETTERS.lower() else ""
            hint = "; join chains without a separator" if letter in "/:|" else hint
            raise ValueError(f"unknown residue letter {letter!a} at position {wrong.start() + 1} "
                             f"of {key}, counted from 1{hint}")
    preferred, unpreferred = map(len, sequences.values())
    if preferred != unpreferred:
        raise ValueError(f"preferred ({preferred}) and unpreferred ({unpreferred}) lengths differ")
    return sequences


def _read_chains(entry):
    """Names of the designed and of the fixed chains: two lists."""
    if "chain_id" in entry:
        for other in ("design_chains", "fixed_chains"):
            if other in entry:
                raise ValueError(f"chain_id and {other} given together; expected chain_id alone, "
                                 "or design_chains with fixed_chains")
        if not isinstance(entry["chain_id"], str) or not entry["chain_id"].strip():
            raise ValueError(f'chain_id is {quote(entry["chain_id"])}; expected the name of a '
                             'chain, such as "A"')
        return [entry["chain_id"]], []
    if "design_chains" not in entry:
        raise ValueError("neither chain_id nor design_chains given; expected the chains that the "
                         "sequences are for")
    design, fixed = entry["design_chains"], entry.get("fixed_chains", [])
    for key, names in (("design_chains", design), ("fixed_chains", fixed)):
        if not isinstance(names, list) or not all(
                isinstance(name, str) and name.strip() for name in names):
            raise ValueError(f'{key} is {quote(names)}; expected a list of names of chains, such '
                             'as ["A"]')
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"chain {name} listed twice in {key}")
    if not design:
        raise ValueError("design_chains is empty; expected at least one chain")
    for name in design:
        if name in fixed:
            raise ValueError(f"chain {name} is in design_chains and in fixed_chains")
    return design, fixed


def _read_mutable(entry, n):
    """(n,) bool in the order of the sequences, True = mutable."""
    if "mutable_positions" in entry and "mutable_ranges" in entry:
        raise ValueError("mutable_positions and mutable_ranges given together; expected one of "
                         "them")
    key = "mutable_positions" if "mutable_positions" in entry else "mutable_ranges"
    ranges = entry[key]
    if key == "mutable_positions" and isinstance(ranges, list):
        ranges = [[position, position] for position in ranges]
    if not isinstance(ranges, list) or not ranges or not all(
            isinstance(ends, list) and len(ends) == 2 and {type(end) for end in ends} == {int}
            for ends in ranges):
        raise ValueError(f"{key} is {quote(entry[key])}; expected whole numbers from 0, as "
                         "mutable_positions [0, 1, 5], as mutable_ranges [[0, 5], [10, 12]]")
    is_mutable = np.zeros(n, bool)
    for first, last in ranges:
        text = (f"mutable position {first}" if key == "mutable_positions"
                else f"mutable range {first}-{last}")
        if min(first, last) < 0 or max(first, last) >= n:
            raise ValueError(f"{text} outside 0..{n - 1}")
        if first > last:
            raise ValueError(f"{text} is reversed")
        if is_mutable[first:last + 1].any():
            raise ValueError(f"{text} repeats positions given before")
        is_mutable[first:last + 1] = True
    return is_mutable


def _make_pair(complex, design, sequences, is_mutable, weight):
    """Pair of two sequences of n_designed letters; is_mutable (n_designed,) bool in their order."""
    rows = complex.rows(design)
    places = np.argsort(rows)       # inverse of rows: position in the sequences of each row
    resolved, native = complex.mask[rows], complex.S[rows]
    chosen, rejected = (encode(text.replace("-", "X")) for text in sequences.values())
    unknown = resolved & (native == X_ID) & (chosen == X_ID) & (rejected == X_ID)
    for (key, text), letters in zip(sequences.items(), (chosen, rejected)):
        wrong = np.flatnonzero((letters == X_ID) & resolved & ~unknown)
        if len(wrong):
            raise ValueError(f"{text[wrong[0]]!r} at a resolved position, {wrong[0] + 1} of {key}, "
                             "counted from 1: it would be scored as an unknown residue; expected "
                             "one of the 20 amino acids")
    differ = (chosen != rejected) & resolved
    outside = np.flatnonzero(differ & ~is_mutable)
    if len(outside):
        more = ", and more" if len(outside) > 5 else ""
        raise ValueError(f"preferred and unpreferred differ at {len(outside)} fixed positions: "
                         f"{outside[:5].tolist()} (0-based{more}), which are not mutable; expected "
                         "equal letters there")
    if not differ.any():
        raise ValueError("preferred and unpreferred are equal at all resolved positions: no "
                         "preference")
    chosen, rejected = (np.where(resolved, letters, native)[places]
                        for letters in (chosen, rejected))
    return Pair(complex, chosen, rejected, (is_mutable & ~unknown)[places], weight)


# ---- the pairs of a run ----

class TrainingPairs(NamedTuple):
    train: list                 # of Pair
    val: list                   # of Pair, or None
    fingerprint: dict           # {"n", "hash"}, compared when a run is resumed
    description: list           # lines to print


def load_pairs(data, seed, alive=lambda: None):
    """The pairs to train on and to validate with.

    Args:
        data:  section of a config with train_data (None: demo pairs), val_data, val_fraction,
            max_length, mutable_positions, mutable_ranges, demo_structures, demo_pairs.
        seed:  of the split and of the demo pairs.
        alive: see read_pairs.
    Returns: TrainingPairs.
    Raises: ValueError that lists the problems of both files.
    """
    structures, notes, warnings = {}, [], []
    positions = data.mutable_positions or data.mutable_ranges

    def read(path):
        return path and read_pairs(path, structures, positions, data.max_length, notes, alive)

    pairs, val = try_all(lambda: read(data.train_data), lambda: read(data.val_data))
    if data.train_data is None:
        pairs = demo_pairs(seed, data.demo_structures, data.demo_pairs)
    lines = [f"data: {data.train_data or 'demo (no --train_data)'}: {describe(pairs)}"]
    if positions:
        lines.append("  mutable where a pair gives none: "
                     f"{notes[0] if notes else 'not needed, each pair gives its own'}")
    if data.val_data is not None:
        lines.append(f"  {data.val_data}, for validation: {describe(val)}")
        keys = {pair.complex.structure.key for pair in pairs}
        shared = sorted({pair.complex.structure.name for pair in val
                         if pair.complex.structure.key in keys})
        if shared:
            warnings.append(f"{len(shared)} structures are in training and validation, first "
                            f"{shared[0]}: validation does not tell about new structures.")
    elif data.val_fraction:
        pairs, val, warnings = split_pairs(pairs, data.val_fraction, seed)
        n = len({pair.complex.structure.key for pair in val})
        lines.append(f"  {len(pairs):,} pairs for training, {len(val):,} on {n:,} structure(s) for "
                     "validation")
    all_pairs = [*pairs, *(val or [])]
    partial = sum(bool(pair.complex.left_out) for pair in all_pairs)
    if partial:
        warnings.append(f"{partial:,} pairs leave other protein chains of their file out, so the "
                        "model does not see these. If they matter, name them in fixed_chains, "
                        "with design_chains instead of chain_id.")
    content = [[pair.key for pair in part] for part in (pairs, val or [])]   # in their order
    weights = [pair.weight for pair in all_pairs]
    if any(weight != 1 for weight in weights):
        content.append(weights)
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()
    return TrainingPairs(pairs, val, {"n": len(pairs), "hash": digest},
                         lines + [f"ATTENTION: {warning}" for warning in warnings])


def try_all(*functions):
    """Call all functions; return their results, or raise one ValueError with all their messages."""
    results, problems = [], []
    for function in functions:
        try:
            results.append(function())
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return results


# ---- split ----

def split_pairs(pairs, val_fraction, seed):
    """Split pairs into training and validation so that no structure is on both sides.

    max(1, round(val_fraction x number)) of the structures go to validation. Only the seed and their
    content (Structure.key) decide which. Similar structures may still be on both sides. A single
    structure is split by sequence, with a warning: pairs that share a sequence, directly or through
    other pairs, stay together, and about val_fraction of the pairs go to validation. Another
    warning says if the fraction held out is more than MOST_MISSED times above or below this.

    Args:
        pairs:        list of Pair.
        val_fraction: above 0 and below 1.
        seed:         int.
    Returns: the lists of pairs train and val, in the order of `pairs`, and a list of warnings.
    Raises: ValueError if all pairs of a single structure are linked by shared sequences.
    """
    groups = np.array([pair.complex.structure.key for pair in pairs], np.int64)
    by_sequence = len(set(groups.tolist())) == 1
    if by_sequence:
        groups = _linked_by_sequence(pairs)
    keys, counts = np.unique(groups, return_counts=True)
    if len(keys) < 2:
        raise ValueError(f"all {len(pairs):,} pairs are of one structure and linked by the "
                         "sequences that they share, so none can be held out; expected pairs that "
                         "can be split. Give a file of validation pairs (--val_data), or train "
                         "without validation (data.val_fraction=0).")
    draws = [_random_words(1, FOR_SPLIT, seed, key)[0] for key in keys.tolist()]
    order = np.argsort(draws, kind="stable").tolist()
    if by_sequence:
        held_out, room = [], max(1, val_fraction * len(pairs))
        for group in order:
            if counts[group] <= room:
                held_out.append(group)
                room -= counts[group]
        held_out = held_out or [min(order, key=lambda group: counts[group])]
    else:
        n_val = max(1, math.floor(val_fraction * len(keys) + 0.5))
        held_out = order[:min(n_val, len(keys) - 1)]
    is_val = np.isin(groups, keys[held_out])
    train, val = ([pairs[i] for i in np.flatnonzero(side)] for side in (~is_val, is_val))
    return train, val, _split_warnings(len(val), len(pairs), val_fraction, by_sequence)


def _split_warnings(n_val, n, val_fraction, by_sequence):
    """List of warnings about a split."""
    warnings = []
    if by_sequence:
        warnings.append(f"all pairs are of one structure: {n_val:,} of {n:,} are held out by "
                        "sequence, so validation measures other sequences, not other "
                        "structures. To measure these, give --val_data.")
    if not val_fraction / MOST_MISSED <= n_val / n <= val_fraction * MOST_MISSED:
        together = "linked by sequences that they share" if by_sequence else "of one structure"
        warnings.append(f"{n_val:,} of {n:,} pairs ({n_val / n:.0%}) are held out for validation, "
                        f"but data.val_fraction asks for {val_fraction:.0%}: pairs {together} stay "
                        "together. Give --val_data, pairs on more structures, or "
                        "data.val_fraction=0 to train on all of them without validation.")
    return warnings


def _linked_by_sequence(pairs):
    """(n,) int64, equal for pairs that share a chain's sequence, directly or through other pairs.

    It does not depend on the order of the pairs. A sequence that is the same in the chosen and the
    rejected design of every pair that has it shows no preference, and links no pairs.
    """
    def root(text):
        while parent[text] != text:
            parent[text] = parent[parent[text]]     # shortens the path for the next search
            text = parent[text]
        return text

    sequences, varied = [], set()       # of each pair; those of chains that differ in some pair
    for pair in pairs:
        chain_id = pair.complex.chain_id[:len(pair.chosen)]
        chains = [{letters[chain_id == k].tobytes() for letters in (pair.chosen, pair.rejected)}
                  for k in np.unique(chain_id)]
        sequences.append(set().union(*chains))
        varied.update(*(texts for texts in chains if len(texts) == 2))
    linked = [sorted(texts & varied) for texts in sequences]
    parent = {text: text for text in varied}        # union-find: a tree of sequences is a group
    for texts in linked:
        for text in texts:
            low, high = sorted((root(texts[0]), root(text)))
            parent[high] = low
    return np.array([_content_key(root(texts[0])) for texts in linked], np.int64)


# ---- batches ----

def plan_epoch(pairs, seed, epoch, micro_batches, batch_size):
    """Decide which pairs are in which micro-batch of which step of an epoch.

    The plan depends only on the arguments: every rank makes the same plan and takes its own
    micro-batches from it.

    Pairs are sorted by length of the complex (in classes of ratio LENGTH_RATIO), then by complex,
    then randomly. The sorted list is cut into micro-batches of equal numbers of pairs, give or take
    one: so a micro-batch has few complexes to encode and little padding. A step has micro-batches
    of similar length, so that ranks have about equal work; steps come in random order. Every pair
    comes once in an epoch, and no micro-batch is empty. Only with batch_size 1 random pairs, fewer
    than a global batch, are left out. The number of steps is the same in all epochs.

    Args:
        pairs:         list of Pair.
        seed, epoch:   int.
        micro_batches: micro-batches per global batch = ranks x accumulation.
        batch_size:    most pairs in a micro-batch.
    Returns: list of steps, each a list of micro-batches: int64 arrays of indices into pairs.
    Raises: ValueError for fewer pairs than micro-batches.
    """
    n = len(pairs)
    if n < micro_batches:
        raise ValueError(f"found {n:,} pairs for {micro_batches:,} micro-batches per step "
                         "(ranks x accumulation); expected a pair for each. Use fewer ranks or "
                         "less accumulation, or give more pairs.")
    n_steps = min(-(-n // (micro_batches * batch_size)), n // micro_batches)
    n_pieces = n_steps * micro_batches
    shuffled = np.argsort(_random_words(n, FOR_PAIRS, seed, epoch), kind="stable")
    shuffled = shuffled[:n_pieces * batch_size]
    lengths = [len(pairs[i].complex) for i in shuffled]
    bucket = np.floor(np.log(lengths) / math.log(LENGTH_RATIO))
    _, first, group = np.unique([pairs[i].complex.key for i in shuffled], return_index=True,
                                return_inverse=True)
    # By length, then by complex; a stable sort, which keeps the random order within a complex.
    order = np.lexsort((first[group], bucket))
    bounds = np.arange(n_pieces + 1) * len(shuffled) // n_pieces
    pieces = [shuffled[order[start:end]] for start, end in zip(bounds, bounds[1:])]
    longest = np.maximum.reduceat(bucket[order], bounds[:-1])
    tie_breakers = _random_words(n_pieces, FOR_LENGTHS, seed, epoch)
    by_length = np.lexsort((tie_breakers, longest)).reshape(n_steps, micro_batches)
    draws = _random_words(n_steps, FOR_STEPS, seed, epoch)
    steps = by_length[np.argsort(draws, kind="stable")]
    return [[pieces[k] for k in step] for step in steps]


class PairPlan:
    """Which pairs are in which micro-batch of which step of a run. Arguments: see plan_epoch."""

    def __init__(self, pairs, seed, micro_batches, batch_size):
        self.epoch_plan = functools.lru_cache(1)(
            lambda epoch: plan_epoch(pairs, seed, epoch, micro_batches, batch_size))
        self.steps_per_epoch = len(self.epoch_plan(0))

    def item_of(self, step, micro):
        """(step, micro-batch, epoch, indices into pairs) of a micro-batch."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return step, micro, epoch, self.epoch_plan(epoch)[at][micro].tolist()


def eval_batches(pairs, batch_size):
    """Batches for evaluation, independent of ranks: rank r of R takes batches r, r + R, and so on.

    Returns: list of int64 index arrays, each pair in exactly one: longest complexes first, pairs of
        a complex together.
    """
    order = sorted(range(len(pairs)),
                   key=lambda i: (-len(pairs[i].complex), pairs[i].complex.key, i))
    return [np.array(order[first:first + batch_size], np.int64)
            for first in range(0, len(order), batch_size)]


def collate_complexes(complexes, names=("X", "S", "mask", "residue_idx", "chain_id")):
    """Tensors of U complexes, padded to the longest, L rows.

    Args:
        complexes: list of Complex.
        names:     of the tensors to make.
    Returns: dict of
        X                     (U, L, 4, 3) float32, Angstrom
        S                     (U, L) int64, native letters
        mask                  (U, L) float32, 1 = resolved
        residue_idx, chain_id (U, L) int64
        Padding is 0, and -100 in residue_idx.
    """
    shape = len(complexes), max(map(len, complexes))
    kinds = {"X": ((4, 3), np.float32, 0), "S": ((), np.int64, 0), "mask": ((), np.float32, 0),
             "residue_idx": ((), np.int64, -100), "chain_id": ((), np.int64, 0)}
    tensors = {}
    for name in names:
        more_axes, dtype, padding = kinds[name]
        array = np.full((*shape, *more_axes), padding, dtype)
        for row, complex in enumerate(complexes):
            array[row, :len(complex)] = getattr(complex, name)
        tensors[name] = torch.from_numpy(array)
    return tensors


def collate(pairs, indices):
    """Tensors of P pairs and of the U distinct complexes that they are on.

    Coordinates are left out: the graph made from them is cached per complex.

    Args:
        pairs:   list of Pair.
        indices: which of them.
    Returns: dict of S and mask as of collate_complexes, and
        complex          (P,) int64, row of the pair's complex in S and mask
        chosen, rejected (P, L) int64, letters of the whole complex
        chain_M          (P, L) float32, 1 = designed; chain_M x mask[complex] is 1 where scored
    """
    batch_pairs = [pairs[i] for i in indices]
    complexes = {pair.complex.key: pair.complex for pair in batch_pairs}
    rows = {key: row for row, key in enumerate(complexes)}
    batch = collate_complexes([*complexes.values()], ("S", "mask"))
    batch["complex"] = torch.tensor([rows[pair.complex.key] for pair in batch_pairs])
    batch["chosen"] = batch["S"][batch["complex"]]
    batch["rejected"] = batch["chosen"].clone()
    batch["chain_M"] = torch.zeros(batch["chosen"].shape)
    for i, pair in enumerate(batch_pairs):
        for name in ("chosen", "rejected", "chain_M"):
            batch[name][i, :len(pair.chosen)] = torch.from_numpy(getattr(pair, name))
    return batch


# ---- demo pairs ----

PHI_PSI = {"helix": (-57, -47), "strand": (-120, 120)}              # degrees
SUITED = {"helix": "AEHKLMQR", "strand": "CFITVWY"}                 # preferred letters there
# Length (Angstrom) of the bond that ends in an atom, and angle (degrees) at the atom before it.
BOND = {"N": (1.329, 117.2), "CA": (1.458, 121.7), "C": (1.525, 111.0), "O": (1.231, 120.1)}


def build_backbone(phi, psi):
    """Build a backbone with ideal bonds and trans peptides.

    Source: Engh and Huber 1991, Acta Cryst. A47, 392.

    Args:
        phi, psi: (L,) torsions in degrees.
    Returns: X (L, 4, 3) float32, Angstrom.
    """
    def place(a, b, c, atom, torsion):
        """The atom after a, b, c."""
        length, angle = BOND[atom][0], math.radians(BOND[atom][1])
        torsion = math.radians(torsion)
        along = (c - b) / np.linalg.norm(c - b)
        normal = np.cross(b - a, along)
        normal /= np.linalg.norm(normal)
        across = math.cos(torsion) * np.cross(normal, along) + math.sin(torsion) * normal
        return c + length * (math.sin(angle) * across - math.cos(angle) * along)

    N, CA = np.zeros(3), np.array([BOND["CA"][0], 0, 0])
    C, rows = place(np.array([0, 1.0, 0]), N, CA, "C", 0), []
    for i in range(len(phi)):
        rows.append([N, CA, C, place(N, CA, C, "O", psi[i] + 180)])
        next_N = place(N, CA, C, "N", psi[i])
        next_CA = place(CA, C, next_N, "CA", 180)
        next_C = place(C, next_N, next_CA, "C", phi[(i + 1) % len(phi)])
        N, CA, C = next_N, next_CA, next_C
    return np.array(rows, np.float32)


def demo_pairs(seed=0, n_structures=32, pairs_per_structure=8):
    """Make synthetic pairs with a rule to learn.

    A structure is one chain of three segments of 8 to 14 residues, alternating helix and strand.
    The rule: the chosen sequence has more residues that suit their segment, AEHKLMQR in helix and
    CFITVWY in strand. One residue in five is D, G, N, P or S, which suit neither. Of the others,
    three in four suit in chosen and native sequences, and one in four in rejected ones. Pairs are
    drawn again until the chosen one has at least L / 5 more residues that suit. Letters are as
    frequent in chosen as in rejected sequences, so that a model has to look at the backbone.

    Returns: list of n_structures x pairs_per_structure Pair.
    """
    suited = {kind: encode(letters) for kind, letters in SUITED.items()}
    neutral = encode(re.sub(f"[{''.join(SUITED.values())}]", "", AMINO_ACIDS))
    pairs = []
    for number in range(n_structures):
        draw = np.random.Generator(np.random.PCG64([FOR_DEMO, seed % 2**64, number])).random
        turns = ("helix", "strand", "helix") if number % 2 else ("strand", "helix", "strand")
        places = [kind for kind in turns for _ in range(8 + int(7 * draw()))]

        def sample(share):
            """(letters (L,) uint8, how many of them suit their segment)."""
            ids, n_suited = [], 0
            for place in places:
                suits, other = draw() < share, "strand" if place == "helix" else "helix"
                choice = neutral if draw() < 0.2 else suited[place if suits else other]
                n_suited += suits and choice is not neutral
                ids.append(choice[int(draw() * len(choice))])
            return np.array(ids, np.uint8), n_suited

        L, everywhere = len(places), np.ones(len(places), bool)
        X = build_backbone(*zip(*(PHI_PSI[kind] for kind in places)))
        chain = Chain(sample(0.75)[0], X, everywhere, tuple(str(i + 1) for i in range(L)))
        complex = Complex(Structure(f"demo {number}", {"A": chain}), ["A"])
        while len(pairs) < (number + 1) * pairs_per_structure:
            (chosen, better), (rejected, worse) = sample(0.75), sample(0.25)
            if better - worse >= L / 5:
                pairs.append(Pair(complex, chosen, rejected, everywhere))
    return pairs
