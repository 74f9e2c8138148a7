"""Preference pairs: files of pairs and structures, each entry checked.

    pairs = read_pairs("pairs.json")                        # describe(pairs) summarises them

Reads structures (proteins/structures.py) and pairs: a JSON list of objects, or one object per line
in a .jsonl file. Keys of an object:
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
Writes nothing. No model and no process group here.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpo.pair_files import MOST_PAIRS_LISTED, read_items, read_weight
from proteins.csv_files import quote
from proteins.letters import LETTERS, X_ID, encode
from proteins.seeds import content_key
from proteins.structures import CA_MODEL, Complex, describe_reading, parse_positions, read_structure

REQUIRED = ("pdb_file", "preferred_seq", "unpreferred_seq")
OPTIONAL = ("chain_id", "design_chains", "fixed_chains", "mutable_positions", "mutable_ranges",
            "weight", "description")


class Pair:
    """Two sequences for one complex, the first preferred.

    chosen, rejected: (n_designed,) uint8 letters by row of the complex; equal where not scored.
    chain_M: (n_designed,) bool, True = designed. Rows that are also resolved are scored.
    key:     hash of the structure and all of the above, for seeds and caches.
    weight:  of the pair in means over pairs.
    """

    def __init__(self, structure: Complex, chosen: np.ndarray, rejected: np.ndarray,
                 chain_M: np.ndarray, weight: float = 1.0):
        self.complex = structure
        self.chosen = chosen
        self.rejected = rejected
        self.chain_M = chain_M
        self.weight = weight
        self.key = content_key(structure.key, chosen, rejected, chain_M)

    @property
    def structures(self) -> tuple[Complex, ...]:
        """All that is scored."""
        return (self.complex,)

    @property
    def length(self) -> int:
        """Rows of the complex."""
        return len(self.complex)

    @property
    def shared_key(self) -> int:
        """Equal for pairs on one complex, which is encoded once in a batch."""
        return self.complex.key


def read_pairs(  # noqa: PLR0913  (two of them collect what several calls share)
        path: str | Path, structures: dict | None = None, mutable: str | None = None,
        max_length: int | None = None, notes: list | None = None,
        alive: Callable = lambda: None, ca_only: bool = False) -> list[Pair]:
    """Read and check a file of preference pairs.

    Unresolved rows may have any letter, X or '-': they are not scored, and the structure's letter
    is used. A residue that is X in both sequences and none of the 20 in the structure is not
    designed.

    Args:
        path:       JSON or .jsonl file.
        structures: dict to which each structure read is added, to share between calls.
        mutable:    positions, as parse_positions takes them, for pairs that give no positions.
        max_length: most rows of a designed sequence.
        notes:      list to which a text is added that says how `mutable` was understood.
        alive:      called before each pair, to show a watchdog that reading continues.
        ca_only:    read structures for a CA-only model.
    Returns: list of Pair, in the order of the file.
    Raises: one ValueError with the first problem of each bad item, counted from 0;
        OSError for a file that cannot be opened.
    """
    path = Path(path)
    if structures is None:
        structures = {}
    if notes is None:
        notes = []
    what_to_mend = "the file, or the mutable positions for all pairs" if mutable else "the file"
    reader = _PairReader(path.parent, structures, mutable, max_length, notes, ca_only)
    return read_items(path, reader.read, what_to_mend, alive)


def describe(pairs: list[Pair]) -> str:
    """One line about the pairs of a file: their number, and anything unusual about them."""
    complexes = {pair.complex.key: pair.complex for pair in pairs}
    structures = {one.structure.key: one.structure for one in complexes.values()}
    lengths = [len(one) for one in complexes.values()]
    first_items = {}            # (complex, preferred sequence, the other) -> first item with these
    for item, pair in enumerate(pairs):
        preference = pair.complex.key, pair.chosen.tobytes(), pair.rejected.tobytes()
        first_items.setdefault(preference, item)
    contradictions = [f"item {item} against item {first_items[structure, rejected, chosen]}"
                      for (structure, chosen, rejected), item in first_items.items()
                      if item < first_items.get((structure, rejected, chosen), -1)]
    listed = ", ".join(contradictions[:MOST_PAIRS_LISTED])
    if len(contradictions) > MOST_PAIRS_LISTED:
        listed += f", and {len(contradictions) - MOST_PAIRS_LISTED:,} more"
    notes = []                  # (how many, what about them)
    weights = [pair.weight for pair in pairs]
    notes.append((sum(weight != 1 for weight in weights),
                  f"with a weight other than 1; weights {min(weights):g} to {max(weights):g}"))
    notes.append((sum(len(pair.complex.design + pair.complex.fixed) > 1 for pair in pairs),
                  "with several chains"))
    notes.append((sum(not pair.chain_M.all() for pair in pairs), "with fixed positions"))
    notes.append((sum(not pair.complex.mask[:len(pair.chosen)].all() for pair in pairs),
                  "with unresolved rows, which are not scored"))
    notes.append((len(pairs) - len(first_items), "repeat an earlier one"))
    notes.append((len(contradictions), f"contradict another: {listed}"))
    head = (f"{len(pairs):,} pairs on {len(structures):,} structures, "
            f"{min(lengths):,} to {max(lengths):,} residues each, gaps included")
    parts = [head, *(f"{n:,} {text}" for n, text in notes if n),
             describe_reading(structures.values())]
    return "; ".join(part for part in parts if part)


# ---- one pair ----

class _PairReader:
    """Makes pairs from JSON objects. Structures and complexes are kept, for later pairs on them.

    folder:    paths of structures are relative to it.
    positions: mutable positions for pairs that give none, or None.
    structures, max_length, notes, ca_only: see read_pairs.
    """

    def __init__(self, folder, structures, positions, max_length, notes, ca_only):
        self.folder = folder
        self.structures = structures    # path -> Structure
        self.positions = positions
        self.max_length = max_length
        self.notes = notes
        self.ca_only = ca_only
        self.complexes = {}         # (path, designed chains, fixed chains) -> Complex

    def read(self, entry):
        """Pair of an object. Raises: ValueError with the first problem."""
        _check_keys(entry)
        weight = read_weight(entry)
        sequences = _read_sequences(entry)
        design, fixed = _read_chains(entry)
        structure = self.find_complex(entry["pdb_file"], design, fixed)
        self.check_length(structure, design, len(sequences["preferred_seq"]))
        has_own = "mutable_positions" in entry or "mutable_ranges" in entry
        if has_own:
            is_mutable = _read_mutable(entry, structure.n_designed)
        else:
            is_mutable = self.mutable_for_all(structure, design)
        return _make_pair(structure, design, sequences, is_mutable, weight)

    def find_complex(self, pdb_file, design, fixed):
        """Complex of these chains."""
        path = self.folder / pdb_file
        if path not in self.structures:
            self.structures[path] = read_structure(path, self.ca_only)
        structure = self.structures[path]
        for chain in design + fixed:
            if chain not in structure.chains:
                names = " ".join(name or "(blank)" for name in structure.chains)
                raise ValueError(f"chain {chain} not in {pdb_file} (has {names})")
        for chain in design:
            if not structure.chains[chain].resolved.any():
                advice = ""
                if structure.chains[chain].has_only_ca:
                    advice = f". For CA alone, give weights of a CA-only model, {CA_MODEL}"
                raise ValueError(f"chain {chain} has no protein residue with {structure.needed}: "
                                 f"nothing to score{advice}")
        chains = (path, tuple(sorted(design)), tuple(sorted(fixed)))
        if chains not in self.complexes:
            self.complexes[chains] = Complex(structure, design, fixed)
        return self.complexes[chains]

    def check_length(self, structure, design, length):
        n = structure.n_designed
        if self.max_length is not None and n > self.max_length:
            raise ValueError(f"the designed sequence has {n} rows, more than max_length "
                             f"{self.max_length}")
        if length != n:
            n_unresolved = int((~structure.mask[:n]).sum())
            hint = f" of which {n_unresolved} unresolved (write X there)" if n_unresolved else ""
            chains = ("chains " if len(design) > 1 else "chain ") + " ".join(design)
            raise ValueError(f"length mismatch: sequence {length}, structure {chains} {n}{hint}")

    def mutable_for_all(self, structure, design):
        """(n_designed,) bool in the order of the sequences, for pairs that give no positions."""
        if self.positions is None:
            return np.ones(structure.n_designed, bool)
        try:
            positions, note = parse_positions(self.positions, structure.structure, design)
        except ValueError as error:
            raise ValueError(f"the mutable positions for all pairs: {error}") from None
        if not self.notes:
            self.notes.append(note)
        return np.isin(np.arange(structure.n_designed), positions)


def _check_keys(entry):
    if not isinstance(entry, dict):
        raise ValueError(f"found {quote(entry)}; expected an object")
    if "num_of_chains" in entry:
        raise ValueError("a structure, as in parsed_pdbs.jsonl of the published tool; expected "
                         "preference pairs, which name PDB or mmCIF files")
    if "pdb_file" not in entry and "preferred_seq" in entry:
        raise ValueError("a pair without a structure; expected the path of one (pdb_file)")
    for name in sorted(entry.keys() - {*REQUIRED, *OPTIONAL}):
        raise ValueError(f"unknown key {name}; known are {' '.join(REQUIRED + OPTIONAL)}")
    for name in REQUIRED:
        if name not in entry:
            raise ValueError(f"missing key {name}")
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise ValueError(f"{name} is {quote(entry[name])}; expected a text that is not empty")


def _read_sequences(entry):
    """{"preferred_seq": text, "unpreferred_seq": text} of one length, of LETTERS and '-'."""
    sequences = {name: entry[name] for name in ("preferred_seq", "unpreferred_seq")}
    for name, text in sequences.items():
        wrong = re.search(f"[^{LETTERS}-]", text)
        if wrong:
            letter = wrong.group()
            hint = ""
            if letter in LETTERS.lower():
                hint = "; write upper case"
            elif letter in "/:|":
                hint = "; join chains without a separator"
            raise ValueError(f"unknown residue letter {letter!a} at position {wrong.start() + 1} "
                             f"of {name}, counted from 1{hint}")
    preferred, unpreferred = map(len, sequences.values())
    if preferred != unpreferred:
        raise ValueError(f"preferred ({preferred}) and unpreferred ({unpreferred}) lengths differ")
    return sequences


def _read_chains(entry):
    """Names of the designed and of the fixed chains: two lists."""
    if "chain_id" in entry:
        return [_read_chain_id(entry)], []
    if "design_chains" not in entry:
        raise ValueError("neither chain_id nor design_chains given; expected the chains that the "
                         "sequences are for")
    design = entry["design_chains"]
    fixed = entry.get("fixed_chains", [])
    _check_names("design_chains", design)
    _check_names("fixed_chains", fixed)
    if not design:
        raise ValueError("design_chains is empty; expected at least one chain")
    in_both = set(design) & set(fixed)
    if in_both:
        raise ValueError(f"chain {min(in_both)} is in design_chains and in fixed_chains")
    return design, fixed


def _read_chain_id(entry):
    for other in ("design_chains", "fixed_chains"):
        if other in entry:
            raise ValueError(f"chain_id and {other} given together; expected chain_id alone, or "
                             "design_chains with fixed_chains")
    name = entry["chain_id"]
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'chain_id is {quote(name)}; expected the name of a chain, such as "A"')
    return name


def _check_names(key_name, names):
    """ValueError unless `names`, the value of a key, is a list of different names of chains."""
    if not isinstance(names, list) or not all(
            isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f'{key_name} is {quote(names)}; expected a list of names of chains, such '
                         'as ["A"]')
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"chain {name} listed twice in {key_name}")
        seen.add(name)


def _read_mutable(entry, n):
    """(n,) bool in the order of the sequences, True = mutable."""
    if "mutable_positions" in entry and "mutable_ranges" in entry:
        raise ValueError("mutable_positions and mutable_ranges given together; expected one of "
                         "them")
    given = "mutable_positions" if "mutable_positions" in entry else "mutable_ranges"
    ranges = entry[given]
    if given == "mutable_positions" and isinstance(ranges, list):
        ranges = [[position, position] for position in ranges]
    if not isinstance(ranges, list) or not ranges or not all(
            isinstance(ends, list) and len(ends) == 2 and {type(end) for end in ends} == {int}
            for ends in ranges):
        raise ValueError(f"{given} is {quote(entry[given])}; expected whole numbers from 0, as "
                         "mutable_positions [0, 1, 5], as mutable_ranges [[0, 5], [10, 12]]")
    is_mutable = np.zeros(n, bool)
    for first, last in ranges:
        text = (f"mutable position {first}" if given == "mutable_positions"
                else f"mutable range {first}-{last}")
        if min(first, last) < 0 or max(first, last) >= n:
            raise ValueError(f"{text} outside 0..{n - 1}")
        if first > last:
            raise ValueError(f"{text} is reversed")
        if is_mutable[first:last + 1].any():
            raise ValueError(f"{text} repeats positions given before")
        is_mutable[first:last + 1] = True
    return is_mutable


def _make_pair(structure, design, sequences, is_mutable, weight):
    """Pair of two sequences of n_designed letters; is_mutable (n_designed,) bool in their order."""
    rows = structure.rows(design)
    places = np.argsort(rows)       # inverse of rows: position in the sequences of each row
    resolved = structure.mask[rows]
    native = structure.S[rows]
    chosen = encode(sequences["preferred_seq"].replace("-", "X"))
    rejected = encode(sequences["unpreferred_seq"].replace("-", "X"))
    unnamed = (native == X_ID) | structure.modified[rows]
    unknown = resolved & unnamed & (chosen == X_ID) & (rejected == X_ID)
    for (name, text), letters in zip(sequences.items(), (chosen, rejected)):
        wrong = np.flatnonzero((letters == X_ID) & resolved & ~unknown)
        if len(wrong):
            raise ValueError(f"{text[wrong[0]]!r} at a resolved position, {wrong[0] + 1} of "
                             f"{name}, counted from 1: it would be scored as an unknown residue; "
                             "expected one of the 20 amino acids")
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
    return Pair(structure, np.where(resolved, chosen, native)[places],
                np.where(resolved, rejected, native)[places],
                (is_mutable & ~unknown)[places], weight)
