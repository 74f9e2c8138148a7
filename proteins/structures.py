"""Protein structures: PDB and mmCIF files, their chains, and positions given as text.

    parsed = read_structure("complex.pdb")
    structure = Complex(parsed, design=["A"], fixed=["B"])      # arrays as ProteinMPNN takes them
    positions, note = parse_positions("A12 A15-A20", parsed, ["A"])

Reads .pdb, .ent, .cif, .mmcif; each also with .gz. Writes nothing. Rows are those of the official
ProteinMPNN parser: one for each residue number from first to last, and for each insertion code. A
number without a residue is a gap: letter X and no coordinates. A residue is resolved if it has N,
CA, C and O; read for a CA-only model, if it has CA, and no other atom is kept.

Unlike there, a modified residue has the letter of its parent, in ATOM and HETATM records: MSE is M,
SEP is S. Selenocysteine and pyrrolysine are X, as in files of sequences. Caps of a chain, such as
ACE and NME, have no rows, and residues whose numbers do not rise along the chain keep its order.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters

import numpy as np

from proteins.letters import LETTERS, X_ID
from proteins.residue_names import NAMES, plain_name, token_of
from proteins.seeds import content_key
from proteins.structure_files import BOUND, FORMATS, MAX_ANGSTROM, read_models

BACKBONE = ("N", "CA", "C", "O")
# Names of the two oxygen atoms at the end of a chain, by CHARMM, GROMACS and others. The first one
# that is there is the O of a residue that has none.
LAST_OXYGENS = ("OT1", "OC1", "O1", "O'", "OT", "OXT", "OT2", "OC2", "O2", "O''")
CA = BACKBONE.index("CA")
CA_MODEL = "such as ca/v_48_020"        # for messages
ONE_PLACE = ("expected a different name for each chain, a different number or insertion code for "
             "each residue, and a different letter for each alternative location")
NEAR = 8.0                  # Angstrom, at most, between CA of neighbours: 3.8, in a bad model more
CA_STEP = 3.8               # Angstrom, between CA atoms of residues that are bound
MOST_LISTED = 10            # residues in a message
MAX_ROWS = 100_000          # in a chain: no protein is as long, so more means wrong residue numbers


@dataclass(frozen=True, eq=False)
class Chain:
    """The rows of one chain."""
    S: np.ndarray               # (L,) uint8 letters; X at gaps and unknown residues
    X: np.ndarray               # (L, 4, 3) float32 of N, CA, C, O in Angstrom; missing atoms: 0
    resolved: np.ndarray        # (L,) bool: all four atoms are there, or CA for a CA-only model
    numbers: tuple              # (L,) residue numbers such as "12" and "12B"; None at gaps
    modified: dict = field(default_factory=dict)    # row -> name, of resolved ones not of the 20

    def row_of(self, number: str) -> int | None:
        """The row of a residue number, None if it is not there. Antibodies are often written with
        52a for 52A, so the other case of an insertion code is found where its own is not there."""
        row = self._rows.get(number)
        return self._rows.get(number.swapcase()) if row is None else row

    @functools.cached_property
    def _rows(self):
        return {number: row for row, number in enumerate(self.numbers) if number is not None}

    def breaks(self) -> list[tuple[str, str, float]]:
        """(number, number, Angstrom between CA) of residues in rows that follow each other, but
        that are farther apart than any neighbours in a chain."""
        steps = np.linalg.norm(np.diff(self.X[:, CA], axis=0), axis=1)
        is_known = self.resolved[1:] & self.resolved[:-1]
        return [(self.numbers[row], self.numbers[row + 1], float(steps[row]))
                for row in np.flatnonzero(is_known & (steps > NEAR))]

    @property
    def has_only_ca(self) -> bool:
        """Whether the chain has CA atoms, and no other atom of a backbone."""
        return bool(self.X[:, CA].any()) and not np.delete(self.X, CA, axis=1).any()


class Structure:
    """Chains of one file, by name.

    ca_only: read for a CA-only model, without the other atoms.
    needed:  words for what makes a residue resolved.
    ends:    modified residues that are left out, such as "PCA A1".
    notes:   sentences on chains that were not read as their names and numbers say.
    key:     hash of letters and coordinates, equal for copies of a file and for its other formats.
    """

    def __init__(self, name: str, chains: dict[str, Chain], ca_only: bool = False,
                 ends: Sequence[str] = (), notes: Sequence[str] = ()):
        self.name = name
        self.chains = chains
        self.ca_only = ca_only
        self.ends = ends
        self.notes = notes
        self.needed = "a CA atom" if ca_only else "a complete backbone (N, CA, C, O)"
        parts = []
        for chain_name, chain in sorted(chains.items()):
            parts += [chain_name, chain.S, chain.X]
        self.key = content_key(*parts)

    @property
    def protein_chains(self) -> list[str]:
        """Sorted names of the chains with a resolved residue."""
        return sorted(name for name, chain in self.chains.items() if chain.resolved.any())


class Complex:
    """Chains of a structure in the order of the official tensors.

    The designed chains come first, sorted by name, then the fixed ones, sorted by name.

    X:           (L, 4, 3) float32, Angstrom.
    S:           (L,) uint8, native letters.
    mask:        (L,) bool, True = resolved.
    modified:    (L,) bool, True = resolved, and none of the 20 amino acids.
    chain_id:    (L,) int64, from 1.
    residue_idx: (L,) int64, the row, plus 100 for each earlier chain.
    n_designed:  number of rows of the designed chains (single positions of these may be fixed).
    left_out:    names of the other protein chains of the structure.
    key:         hash of the structure and the names of the chains.
    """

    def __init__(self, structure, design, fixed=()):
        self.structure = structure
        self.design = tuple(sorted(design))
        self.fixed = tuple(sorted(fixed))
        chains = [structure.chains[name] for name in self.design + self.fixed]
        self.X = np.concatenate([chain.X for chain in chains])
        self.S = np.concatenate([chain.S for chain in chains])
        self.mask = np.concatenate([chain.resolved for chain in chains])
        self.modified = np.concatenate([
            np.isin(np.arange(len(chain.S)), list(chain.modified)) for chain in chains])
        self.chain_id = np.repeat(np.arange(1, len(chains) + 1), [len(chain.S) for chain in chains])
        self.residue_idx = np.arange(len(self.S)) + 100 * (self.chain_id - 1)
        self.n_designed = int((self.chain_id <= len(self.design)).sum())
        self.key = content_key(structure.key, self.design, self.fixed)
        self.left_out = [name for name, chain in structure.chains.items()
                         if chain.resolved.any() and name not in self.design + self.fixed]

    def __len__(self) -> int:
        return len(self.S)

    def first_row(self, name: str) -> int:
        """The first row of a designed chain."""
        return int(np.searchsorted(self.chain_id, self.design.index(name) + 1))

    def rows(self, design: list[str]) -> np.ndarray:
        """(n_designed,) int64: row of each position when chains are joined in order of `design`."""
        numbers = [self.design.index(name) + 1 for name in design]
        return np.concatenate([np.flatnonzero(self.chain_id == number) for number in numbers])


def read_structure(path: str | Path, ca_only: bool = False) -> Structure:
    """Read a PDB or mmCIF file with the rows of the official ProteinMPNN parser.

    ATOM records are read, HETATM records of MSE (selenomethionine), and those of other amino acids
    where they fill a gap in the numbers of a chain: ligands do not, and the rows stay those of the
    official code. A residue whose name, in upper or lower case, is not one of the 20 has the letter
    of its parent, or X if that is not known; HIE, NGLY and the like are HIS and GLY. Of several
    atoms of one name, or several residue names, at a residue number (alternative locations, models)
    the first counts. OT1, OXT and the like are the O of a residue without one. Nucleic acids become
    X rows without coordinates; water, ions and lipids in ATOM records are left out. mmCIF is read
    by author names and numbers, from _atom_site alone.
    What would be lost is refused: two residues of one number, two chains of one name. A number in
    columns 23 to 27 of a PDB file, such as 10000, is read.

    The official code sorts rows by number, has rows for caps (ACE, NME ...) and one chain for all
    proteins without a chain name. Here caps have none; where numbers do not rise, the order of the
    file is kept if distances show it (_order_rows); and TER and segments separate proteins that
    chain names do not (structure_files.py). `notes` of the structure tell of the last two.
    Source: parse_PDB_biounits of github.com/dauparas/ProteinMPNN.

    Args:
        path:    file with a name in FORMATS, or one of these with .gz.
        ca_only: read CA atoms alone, for a CA-only model. Otherwise a file that has no others is
            refused.
    Returns: Structure.
    Raises: FileNotFoundError; ValueError with the reason why a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"file not found: {path}")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in (".json", ".jsonl"):
        raise ValueError(f"{path} is a JSON file, as parsed_pdbs.jsonl of the published tool; "
                         "expected the PDB or mmCIF files that it was made from, or their folder")
    if not path.is_file() or suffix not in FORMATS:
        raise ValueError(f"{path} is not a file with a name in {' '.join(FORMATS)} or one of these "
                         "with .gz")
    try:
        models, notes = read_models(path)
        n_models = sum(len(model) > 0 for model in models)
        if n_models > 1:
            notes += (f"of {n_models} models the first one counts (the copies of a biological "
                      "assembly need chain names of their own)",)
        ends = _remove_ligands(models, ca_only)
        _check_identities(models)
        chains, order_notes = _make_chains(models, ca_only)
        if not ca_only:
            _check_backbones(chains)
        return Structure(str(path), chains, ca_only, ends, (*notes, *order_notes))
    except (OSError, EOFError, zlib.error, RuntimeError, ValueError, IndexError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None


def describe_reading(structures: Iterable[Structure]) -> str:
    """What was made of residues that are none of the 20, of chains that are named or ordered in
    another way than usual, and where chains are broken, in words; "" where there is none of it."""
    structures = list({structure.name: structure for structure in structures}.values())
    letters = {}
    ends = []
    breaks = []
    notes = []
    for structure in structures:
        place = f"{Path(structure.name).name}: " if len(structures) > 1 else ""
        ends += [name for name in structure.ends if name not in ends]
        notes += [place + note for note in structure.notes]
        for name, chain in structure.chains.items():
            breaks += [f"{place}{name}{one} and {name}{other} ({distance:.1f})"
                       for one, other, distance in chain.breaks()]
            for row, residue_name in chain.modified.items():
                letters[residue_name] = LETTERS[chain.S[row]]
    parts = []
    if letters:
        words = ", ".join(f"{name} as {letters[name]}" for name in sorted(letters))
        parts.append(f"residues that are none of the 20 amino acids are read: {words}")
    if ends:
        parts.append("HETATM at an end of a chain, or with an insertion code, are left out, as in "
                     f"the published code: {_first_of(ends)}")
    if breaks:
        parts.append("residues that follow each other in a chain are far apart, where some are "
                     "missing or two proteins have one chain name (Angstrom between CA): "
                     f"{_first_of(breaks)}")
    if notes:
        parts.append(_first_of(notes, "; "))
    return "; ".join(parts)


def _first_of(texts, separator=", "):
    """The first MOST_LISTED texts, and how many more there are."""
    more = f"{separator}and {len(texts) - MOST_LISTED:,} more" if len(texts) > MOST_LISTED else ""
    return separator.join(texts[:MOST_LISTED]) + more


def parse_positions(text: str, structure: Structure,
                    chains: list[str]) -> tuple[np.ndarray, str]:
    """Parse positions as written on a command line.

    Args:
        text:   positions separated by blanks or commas. "A12" is residue 12 of chain A by its
                number in the file, "A12B" or "A12b" has insertion code B, "A10-A20" is a range with
                both ends. Or all are 0-based numbers in the joined sequence, such as "12" and
                "10-20".
        structure: Structure.
        chains: names of the chains whose rows are joined, in this order.
    Returns: sorted int64 positions, 0-based in the joined sequence, and a text that says how they
        were understood.
    Raises: ValueError for positions that do not exist (a gap has no residue), come twice, or can be
        read in two ways.
    """
    words = re.findall(r"[^,\s]+", text)
    places = [(name, number) for name in chains for number in structure.chains[name].numbers]
    # "A12"; None in chains without a name, as "" would be the first end of a range "-A12"
    labels = [name + number if number and name.strip() else None for name, number in places]
    rows_of = {}                                    # label -> joined rows
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    for label in filter(None, labels):              # as Chain.row_of
        rows_of.setdefault(label[:-1] + label[-1].swapcase(), rows_of[label])
    positions = []
    kinds = set()
    for word in words:
        readings = _readings_by_number(word, rows_of)
        kinds.add("chain and number in the file" if readings else "0-based number in the sequence")
        for first, last in readings:
            _check_range(word, first, last, places)
        numeric = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word, re.ASCII)
        if numeric:
            first = int(numeric[1])
            last = int(numeric[2] or numeric[1])
            if last < len(labels):
                readings.add((first, last))
        first, last = min(readings, default=(0, -1))
        if len(readings) != 1 or first > last:
            problem = "ambiguous" if len(readings) > 1 else "not there, or reversed"
            hint = ""
            if not readings and numbers_near(word, labels):
                hint = f" (there is {', '.join(numbers_near(word, labels))})"
            raise ValueError(f"position {word} is {problem}{hint}; chains {' '.join(chains)} hold "
                             f"{labels[0] or 0} to {labels[-1] or len(labels) - 1}, {len(labels)} "
                             "rows with the gaps")
        positions.extend(range(first, last + 1))
    if not positions or len(kinds) > 1 or len(set(positions)) < len(positions):
        raise ValueError(f"positions {text!r}: expected some, all of one kind (A12 or "
                         "12), none of them twice")
    return (np.array(sorted(positions)),
            f"{len(positions)} positions by {kinds.pop()}: {' '.join(words)}")


def _readings_by_number(word, rows_of):
    """{(first row, last row)}: every way to read a position such as A12 or A10-A20.

    rows_of: {label: rows}."""
    # A "-" may separate the ends of a range or be the sign of a number, so split the word at each
    # "-" in turn.
    readings = {(row, row) for row in rows_of.get(word, [])}
    for dash in re.finditer("-", word):
        readings |= {*itertools.product(rows_of.get(word[:dash.start()], []),
                                        rows_of.get(word[dash.end():], []))}
    return readings


def _check_range(word, first, last, places):
    """ValueError for a range of one chain if its rows are not those with numbers between its ends.

    So it may be where numbers do not rise along the chain. A range whose first number is the larger
    one can only mean the rows between. places: (chain, number) of each row."""
    chain, first_number = places[first]
    low, low_code = _split_number(first_number)
    high, high_code = _split_number(places[last][1])
    if first >= last or chain != places[last][0] or low > high:
        return
    for row, (name, text) in enumerate(places):
        if name != chain or text is None:
            continue
        number, code = _split_number(text)
        is_stray = first <= row <= last and not low <= number <= high
        is_lost = not first <= row <= last and low < number < high and code in (low_code, high_code)
        if is_stray or is_lost:
            where = "between its ends in the chain" if is_stray else "elsewhere in the chain"
            raise ValueError(f"position {word} is ambiguous: residue {text} is {where}; expected "
                             "ranges in which the numbers rise along the chain. Split it")


def _split_number(text):
    """(number, insertion code) of a text such as 52A."""
    number, code = re.fullmatch(r"(-?\d+)(.*)", text).groups()
    return int(number), code


def numbers_near(number: str, numbers: Iterable[str | None]) -> list[str]:
    """Those of the numbers that differ in the insertion code alone."""
    digits = number.rstrip(ascii_letters)
    return [other for other in numbers if other and other.rstrip(ascii_letters) == digits]


# ---- residues that are read ----

def _remove_ligands(models, ca_only):
    """Remove HETATM residues, but MSE and those that fill a gap in the numbers of their chain.

    To fill one, a residue needs a backbone near a neighbour's: free amino acids have numbers too.
    Returns: names of those that are bound to a chain and in no gap, but at its ends or with an
    insertion code, where a row more would shift the others."""
    places = {}         # chain name -> {(number, insertion code)} of what is read in any case
    for model in models:
        for chain in model:
            places.setdefault(chain.name, set()).update(
                _place(residue) for residue in chain if not _may_be_ligand(residue))
    left_out = set()
    for model in models:
        for chain in model:
            left_out |= _remove_ligands_of_chain(chain, places[chain.name], ca_only)
    return tuple(sorted(left_out))


def _remove_ligands_of_chain(chain, places, ca_only):
    numbers = {number for number, _ in places}
    centres = []        # (place, position) of CA atoms
    for residue in chain:
        atom = residue.find_atom("CA", "*")
        if atom is not None:
            centres.append((_place(residue), atom.pos))
    left_out = set()
    for index in reversed(range(len(chain))):
        residue = chain[index]
        if not _may_be_ligand(residue):
            continue
        number, code = _place(residue)
        if places and _is_bound(residue, centres, ca_only):
            is_inside = min(numbers) < number < max(numbers)
            if is_inside and number not in numbers and not code:
                continue
            if (number, code) not in places:
                left_out.add(f"{residue.name} {chain.name}{residue.seqid}")
        del chain[index]
    return left_out


def _may_be_ligand(residue):
    return residue.het_flag == "H" and residue.name.upper() != "MSE"


def _place(residue):
    return residue.seqid.num, residue.seqid.icode.strip()


def _is_bound(residue, centres, ca_only):
    """Whether a residue has a backbone, with CA near that of a neighbouring number."""
    for name in ("CA",) if ca_only else BACKBONE:
        if _find_atom(residue, name) is None:
            return False
    own = _place(residue)
    centre = residue.find_atom("CA", "*").pos
    for place, position in centres:
        is_next = place != own and abs(place[0] - own[0]) <= 1
        if is_next and centre.dist(position) <= NEAR:
            return True
    return False


def _find_atom(residue, name):
    """The first atom of a backbone by its name, for O also one of the two at the end of a chain;
    None if there is none."""
    atom = residue.find_atom(name, "*")
    if atom is not None or name != "O":
        return atom
    for other in LAST_OXYGENS:
        atom = residue.find_atom(other, "*")
        if atom is not None:
            return atom
    return None


def _check_identities(models):
    """ValueError if two residues have one number, or two chains one name.

    gemmi would merge them, and the second be lost. An atom that comes twice in a model gives them
    away, and so do the label ids of mmCIF. Atoms of alternative locations may share a place, and a
    chain with gaps may be several label chains, through which its label numbers run on.
    """
    for model in models:
        label_of_place = {}
        label_chain_of = {}
        name_of = {}            # of (place, alternative)
        atoms = set()
        for chain in model:
            for residue in chain:
                place = (chain.name, residue.seqid.num, residue.seqid.icode)
                words = f"residue {chain.name or '(blank)'} {residue.seqid}"
                if residue.label_seq is not None:
                    label = f"label {residue.subchain} {residue.label_seq}"
                    first = label_of_place.setdefault(place, label)
                    if label != first:
                        raise ValueError(f"{words} comes twice, as {first} and {label}; "
                                         f"{ONE_PLACE}")
                    label_number = (chain.name, residue.label_seq)
                    first = label_chain_of.setdefault(label_number, residue.subchain)
                    if residue.subchain != first:
                        raise ValueError(f"chain {chain.name or '(blank)'} holds two chains, label "
                                         f"{first} and {residue.subchain}, which both have a "
                                         f"residue {residue.label_seq}; {ONE_PLACE}")
                for atom in residue:
                    identity = (place, atom.name, atom.altloc)
                    if atom.name in BACKBONE and identity in atoms:
                        raise ValueError(f"atom {atom.name} of {words} comes twice; {ONE_PLACE}")
                    atoms.add(identity)
                    first = name_of.setdefault((place, atom.altloc), residue.name)
                    if first != residue.name:
                        raise ValueError(f"{words} comes twice, as {first} and {residue.name}; "
                                         f"{ONE_PLACE}")


def _check_backbones(chains):
    """ValueError if the chains have CA atoms, and no other atom of a backbone."""
    only_ca = any(chain.has_only_ca for chain in chains.values())
    if only_ca and not any(chain.resolved.any() for chain in chains.values()):
        raise ValueError("it has CA atoms only; expected N, CA, C and O of each residue. For CA "
                         f"alone, give weights of a CA-only model, {CA_MODEL}")


def _make_chains(models, ca_only):
    """({chain name: Chain}, notes) from gemmi's models."""
    residues = {}       # chain name -> {(number, insertion code): residues of all models}
    for model in models:
        for chain in model:
            for residue in chain:
                places = residues.setdefault(chain.name, {})
                places.setdefault(_place(residue), []).append(residue)
    if not residues:
        raise ValueError("it has no ATOM records; expected those of a protein")
    chains = {}
    notes = []
    for name, places in residues.items():
        rows, note = _order_rows(name, places)
        chains[name] = _make_chain(name, places, rows, ca_only)
        if note:
            notes.append(note)
    return chains, notes


def _make_chain(name, places, rows, ca_only):
    """Chain from {(number, insertion code): residues} and its rows, of _order_rows."""
    S = np.full(len(rows), X_ID, np.uint8)
    X = np.full((len(rows), 4, 3), np.nan, np.float32)
    modified = {}               # row -> name of its residue
    for row, place in enumerate(rows):
        residues = places.get(place, [])
        if residues:
            residue_name = plain_name(residues[0].name)
            S[row] = token_of(residue_name)
            if residue_name not in NAMES:
                modified[row] = residue_name
        for k, atom_name in enumerate(BACKBONE):
            if ca_only and k != CA:
                continue
            atoms = [_find_atom(residue, atom_name) for residue in residues]
            places_of_atom = [atom.pos.tolist() for atom in atoms if atom is not None]
            if places_of_atom:
                X[row, k] = places_of_atom[0]
    known = np.isfinite(X)
    labels = tuple(None if place is None else _number(place) for place in rows)
    needed = known[:, [CA]] if ca_only else known
    resolved = needed.all((1, 2))
    _check_coordinates(name, X, resolved)
    modified = {row: residue_name for row, residue_name in modified.items() if resolved[row]}
    return Chain(S, np.where(known, X, np.float32(0)), resolved, labels, modified)


# ---- the order of rows ----
#
#   in the file   5P ... 10P   1 ... 62        225 ... 230  1002 ... 1161  240 ... 262
#   bound         5P ... 10P - 1 ... 62        225 ... 230 - 1002 ... 1161 - 240 ... 262
#   by number     1 ... 5  5P  6  6P ...       225 ... 230  240 ... 262   1002 ... 1161
#                         a propeptide                      a protein in a loop of another

def _order_rows(name, places):
    """(rows, note) of a chain: the (number, insertion code) of each row, None at gaps.

    Rows are sorted by number, as in the official code, unless the residues of the file are not.
    Then neighbours in the right order are bound, so the order in which more of them are is taken;
    of a tie, the order of label_seq_id in mmCIF. The note says which.

    places: {(number, insertion code): residues} in the order of the file.
    Raises ValueError if nothing tells the order."""
    numbers = {number for number, _ in places}
    if None in numbers or max(numbers) - min(numbers) >= MAX_ROWS:
        raise ValueError(f"chain {name} has residues without a number, or more than {MAX_ROWS:,} "
                         "rows")
    gaps = set(range(min(numbers), max(numbers))) - numbers
    by_number = sorted([*places, *((number, "") for number in gaps)])
    by_number = [place if place in places else None for place in by_number]
    centres = {}        # of the residues that have CA
    if list(places) != sorted(places):
        centres = _centres_of(places)
    in_file = list(centres)
    if in_file == sorted(in_file):
        return by_number, ""
    before, after = next(pair for pair in itertools.pairwise(in_file) if pair[0] > pair[1])
    words = f"{_number(before)} is followed by {_number(after)}"
    chain = f"chain {name or '(blank)'}"
    is_order_of_file = _is_order_of_file(places, centres)
    if is_order_of_file is None:
        raise ValueError(f"residues of {chain} are not in the order of their numbers ({words}), "
                         "and distances between them do not tell which order is that of the chain; "
                         "expected numbers that rise along it. Number the residues anew, or, of "
                         "several proteins, name the chain of each")
    if is_order_of_file:
        return (_rows_of_file(places, centres),
                f"the rows of {chain} are in the order of the file, where {words}")
    return by_number, (f"the rows of {chain} are in the order of the numbers, in which neighbours "
                       f"are bound, not of the file, where {words}")


def _number(place):
    """A residue's number and insertion code as text."""
    number, code = place
    return f"{number}{code}"


def _centres_of(places):
    """{place: position of CA} of the residues that have one."""
    centres = {}
    for place, residues in places.items():
        for residue in residues:
            atom = residue.find_atom("CA", "*")
            if atom is not None:
                centres.setdefault(place, atom.pos)
    return centres


def _is_order_of_file(places, centres):
    """True if a chain's order is that of the file, False if it is that of numbers, None if nothing
    tells."""
    in_file = list(centres)
    by_number = sorted(centres)
    n_in_file = _count_bound(in_file, centres)
    n_by_number = _count_bound(by_number, centres)
    if n_in_file != n_by_number:
        return n_in_file > n_by_number
    labels = {place: places[place][0].label_seq for place in centres}
    if None in labels.values():
        return None
    for order, answer in ((in_file, True), (by_number, False)):
        if order == sorted(order, key=labels.get):
            return answer
    return None


def _count_bound(order, centres):
    """How many neighbours in this order are as close as bound residues."""
    return sum(centres[one].dist(centres[other]) <= BOUND
               for one, other in itertools.pairwise(order))


def _rows_of_file(places, centres):
    """The places in the order of the file, with gaps for numbers that are left out between two
    residues and occur nowhere in the chain, unless the two are bound."""
    rows = []
    for place in places:
        if rows and not _are_bound(rows[-1], place, centres):
            first, code = rows[-1]
            left_out = range(first + 1, place[0])
            if not any((number, one) in places for number in left_out for one in (code, place[1])):
                rows += [None] * len(left_out)
        rows.append(place)
    return rows


def _are_bound(place, other, centres):
    """Whether residues are as close as bound ones; False if one has no CA."""
    if place not in centres or other not in centres:
        return False
    return centres[place].dist(centres[other]) <= BOUND


def _check_coordinates(name, X, resolved):
    """ValueError for coordinates of a chain that cannot be.

    Args:
        X:        (L, 4, 3) of N, CA, C, O in Angstrom; nan: not known.
        resolved: (L,) bool.
    """
    known = np.isfinite(X)
    if not known.all(2).any():
        return
    largest = np.abs(X[known]).max()
    if largest > MAX_ANGSTROM:
        raise ValueError(f"chain {name} has a coordinate of {largest:g}; expected Angstrom, at "
                         f"most {MAX_ANGSTROM:,}")
    # Some programs write 0 0 0 for atoms that they do not know.
    places, counts = np.unique(X[known.all(2)], axis=0, return_counts=True)
    if counts.max() > 1:
        place = " ".join(f"{value:.3f}" for value in places[counts.argmax()])
        raise ValueError(f"chain {name} has {counts.max()} backbone atoms at {place}; expected "
                         "each at a place of its own. Leave out atoms that are not known")
    steps = np.diff(X[:, CA], axis=0)[resolved[1:] & resolved[:-1]]
    if len(steps):
        step = np.median(np.linalg.norm(steps, axis=1))
        if step < CA_STEP / 3:
            raise ValueError(f"chain {name} has CA atoms of successive residues {step:.2f} apart "
                             f"(median); expected about {CA_STEP}, in Angstrom. Nanometres?")
