"""Protein structures: PDB and mmCIF files, their chains, and positions given as text.

    structure = read_structure("complex.pdb")
    complex = Complex(structure, design=["A"], fixed=["B"])     # arrays as ProteinMPNN takes them
    positions, note = parse_positions("A12 A15-A20", structure, ["A"])

Reads .pdb, .ent, .cif, .mmcif; each also with .gz. Writes nothing. Rows are those of the official
ProteinMPNN parser: one for each residue number from first to last, and for each insertion code. A
number without a residue is a gap: letter X and no coordinates.
"""

import gzip
import itertools
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import gemmi
import numpy as np

from mpnn.seeds import content_key
from sedd.sequences import X_ID

NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
BACKBONE = ("N", "CA", "C", "O")
FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
MAX_ANGSTROM = 100_000      # largest coordinate
MAX_ROWS = 100_000          # in a chain: no protein is as long, so more means wrong residue numbers


@dataclass(frozen=True, eq=False)
class Chain:
    """The rows of one chain."""
    S: np.ndarray               # (L,) uint8 letters; X at gaps and non-standard residues
    X: np.ndarray               # (L, 4, 3) float32 of N, CA, C, O in Angstrom; missing atoms: 0
    resolved: np.ndarray        # (L,) bool: all four atoms are there
    numbers: tuple              # (L,) residue numbers such as "12" and "12B"; None at gaps


class Structure:
    """Chains of one file, by name.

    key: hash of letters and coordinates, equal for copies of a file and for its other formats.
    """

    def __init__(self, name: str, chains: dict[str, Chain]):
        self.name = name
        self.chains = chains
        parts = []
        for chain_name, chain in sorted(chains.items()):
            parts += [chain_name, chain.S, chain.X]
        self.key = content_key(*parts)


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
        self.design = tuple(sorted(design))
        self.fixed = tuple(sorted(fixed))
        chains = [structure.chains[name] for name in self.design + self.fixed]
        self.X = np.concatenate([chain.X for chain in chains])
        self.S = np.concatenate([chain.S for chain in chains])
        self.mask = np.concatenate([chain.resolved for chain in chains])
        self.chain_id = np.repeat(np.arange(1, len(chains) + 1), [len(chain.S) for chain in chains])
        self.residue_idx = np.arange(len(self.S)) + 100 * (self.chain_id - 1)
        self.n_designed = int((self.chain_id <= len(self.design)).sum())
        self.key = content_key(structure.key, self.design, self.fixed)
        self.left_out = [name for name, chain in structure.chains.items()
                         if chain.resolved.any() and name not in self.design + self.fixed]

    def __len__(self) -> int:
        return len(self.S)

    def rows(self, design: list[str]) -> np.ndarray:
        """(n_designed,) int64: row of each position when chains are joined in order of `design`."""
        numbers = [self.design.index(name) + 1 for name in design]
        return np.concatenate([np.flatnonzero(self.chain_id == number) for number in numbers])


def read_structure(path: str | Path) -> Structure:
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


def parse_positions(text: str, structure: Structure,
                    chains: list[str]) -> tuple[np.ndarray, str]:
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
    positions = []
    kinds = set()
    for word in words:
        # Collect every way to read the word, as (first row, last row). A "-" may separate the ends
        # of a range or be the sign of a number, so split the word at each "-" in turn.
        readings = {(row, row) for row in rows_of.get(word, [])}
        for dash in re.finditer("-", word):
            readings |= {*itertools.product(rows_of.get(word[:dash.start()], []),
                                            rows_of.get(word[dash.end():], []))}
        kinds.add("chain and number in the file" if readings else "0-based number in the sequence")
        numeric = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if numeric:
            first = int(numeric[1])
            last = int(numeric[2] or numeric[1])
            if last < len(labels):
                readings.add((first, last))
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


# ---- the two formats ----

def _parse_pdb(text):
    # Keep only the records that the official parser reads. gemmi would also stop at END.
    lines = re.findall(rb"^(?:ATOM|HETATM.{11}MSE)[^\r\n]*", text, re.MULTILINE)
    for line in lines:      # gemmi would read a malformed number as 0
        try:
            int(line[22:26])
            for start in (30, 38, 46):
                float(line[start:start + 8])
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
    for model in models:
        for chain in model:
            for residue in chain:
                if residue.het_flag != "H" or residue.name == "MSE":
                    place = (residue.seqid.num, residue.seqid.icode.strip())
                    places = residues.setdefault(chain.name, {})
                    places.setdefault(place, []).append(residue)
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
            residue_name = residues[0].name
            if residue_name == "MSE" and residues[0].het_flag == "H":
                residue_name = "MET"
            if residue_name in NAMES:
                S[row] = NAMES.index(residue_name)
        for k, atom_name in enumerate(BACKBONE):
            atoms = [residue.find_atom(atom_name, "*") for residue in residues]
            found = [atom.pos.tolist() for atom in atoms if atom is not None]
            if found:
                X[row, k] = found[0]
    known = np.isfinite(X)
    if known.any() and np.abs(X[known]).max() > MAX_ANGSTROM:
        raise ValueError(f"chain {name} has a coordinate of {np.abs(X[known]).max():g}; expected "
                         f"Angstrom, at most {MAX_ANGSTROM:,}")
    labels = tuple(f"{number}{code}" if (number, code) in places else None
                   for number, code in rows)
    return Chain(S, np.where(known, X, np.float32(0)), known.all((1, 2)), labels)
