"""Protein structures: PDB and mmCIF files, their chains, and positions given as text.

    parsed = read_structure("complex.pdb")
    structure = Complex(parsed, design=["A"], fixed=["B"])      # arrays as ProteinMPNN takes them
    positions, note = parse_positions("A12 A15-A20", parsed, ["A"])

Reads .pdb, .ent, .cif, .mmcif; each also with .gz. Writes nothing. Rows are those of the official
ProteinMPNN parser: one for each residue number from first to last, and for each insertion code. A
number without a residue is a gap: letter X and no coordinates. A residue is resolved if it has N,
CA, C and O; read for a CA-only model, if it has CA, and no other atom is kept.

Unlike there, a modified residue has the letter of its parent, in ATOM and HETATM records: MSE is M,
SEP is S. Selenocysteine and pyrrolysine are X, as in files of sequences.
"""

import functools
import gzip
import itertools
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters

import gemmi
import numpy as np

from proteins.letters import LETTERS, X_ID, encode
from proteins.seeds import content_key

NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
# Names that programs of molecular dynamics give to residues by their protons and bonds.
PROTONATED = {"HID": "HIS", "HIE": "HIS", "HIP": "HIS", "HSD": "HIS", "HSE": "HIS", "HSP": "HIS",
              "CYX": "CYS", "CYM": "CYS", "ASH": "ASP", "GLH": "GLU", "LYN": "LYS", "ARN": "ARG",
              "TYM": "TYR"}
BACKBONE = ("N", "CA", "C", "O")
CA = BACKBONE.index("CA")
CA_MODEL = "such as ca/v_48_020"        # for messages
FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
# Columns of _atom_site that a mmCIF file must have.
ATOM_KEYS = ("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
             "label_asym_id", "Cartn_x", "Cartn_y", "Cartn_z")
ONE_PLACE = ("expected a different name for each chain, a different number or insertion code for "
             "each residue, and a different letter for each alternative location")
MAX_ANGSTROM = 100_000      # largest coordinate
NEAR = 8.0                  # Angstrom, at most, between CA of neighbours: 3.8, in a bad model more
CA_STEP = 3.8               # Angstrom, between CA atoms of residues that are bound
MOST_LISTED = 10            # residues in a message
MAX_ROWS = 100_000          # in a chain: no protein is as long, so more means wrong residue numbers
MAX_MIB = 64                # of text: 800,000 atoms in a PDB file; reading takes ten times as much


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

    @property
    def has_only_ca(self) -> bool:
        """Whether the chain has CA atoms, and no other atom of a backbone."""
        return bool(self.X[:, CA].any()) and not np.delete(self.X, CA, axis=1).any()


class Structure:
    """Chains of one file, by name.

    ca_only: read for a CA-only model, without the other atoms.
    needed:  words for what makes a residue resolved.
    ends:    modified residues that are left out, such as "PCA A1".
    key:     hash of letters and coordinates, equal for copies of a file and for its other formats.
    """

    def __init__(self, name: str, chains: dict[str, Chain], ca_only: bool = False, ends=()):
        self.name = name
        self.chains = chains
        self.ca_only = ca_only
        self.ends = ends
        self.needed = "a CA atom" if ca_only else "a complete backbone (N, CA, C, O)"
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

    def rows(self, design: list[str]) -> np.ndarray:
        """(n_designed,) int64: row of each position when chains are joined in order of `design`."""
        numbers = [self.design.index(name) + 1 for name in design]
        return np.concatenate([np.flatnonzero(self.chain_id == number) for number in numbers])


def read_structure(path: str | Path, ca_only: bool = False) -> Structure:
    """Read a PDB or mmCIF file with the rows of the official ProteinMPNN parser.

    ATOM records are read, HETATM records of MSE (selenomethionine), and those of other amino acids
    where they fill a gap in the numbers of a chain: ligands do not, and the rows stay those of the
    official code. A residue whose name, in upper or lower case, is not one of the 20 has the letter
    of its parent, or X if that is not known; HIE and the like are HIS (PROTONATED). Of several
    atoms of one name, or several residue names, at a residue number (alternative locations, models)
    the first counts.
    Nucleic acids become X rows without coordinates. mmCIF is read by author names and numbers, from
    _atom_site alone. What would be lost is refused: two residues of one number, two chains of one
    name. A number in columns 23 to 27 of a PDB file, such as 10000, is read.
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
        text = _read_text(path)
        text = text.removeprefix(b"\xef\xbb\xbf")   # the byte order mark of UTF-8
        text = text.replace(b"\r", b"\n")   # some programs end lines with \r alone
        if b"\0" in text:   # a record that begins with one would be lost
            raise ValueError("it holds a zero byte, so it is binary, packed or damaged; expected "
                             "text, or gzip")
        is_pdb = suffix in (".pdb", ".ent")
        _check_format(text, is_pdb)
        models = _parse_pdb(text) if is_pdb else _parse_mmcif(text)
        ends = _remove_ligands(models, ca_only)
        _check_identities(models)
        chains = _make_chains(models, ca_only)
        if not ca_only:
            _check_backbones(chains)
        return Structure(str(path), chains, ca_only, ends)
    except (OSError, EOFError, zlib.error, RuntimeError, ValueError, IndexError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None


def describe_modified(structures: Iterable[Structure]) -> str:
    """What was made of residues that are none of the 20, in words; "" where there are none."""
    letters = {}
    ends = []
    for structure in structures:
        ends += [name for name in structure.ends if name not in ends]
        for chain in structure.chains.values():
            for row, name in chain.modified.items():
                letters[name] = LETTERS[chain.S[row]]
    parts = []
    if letters:
        words = ", ".join(f"{name} as {letters[name]}" for name in sorted(letters))
        parts.append(f"residues that are none of the 20 amino acids are read: {words}")
    if ends:
        more = f", and {len(ends) - MOST_LISTED:,} more" if len(ends) > MOST_LISTED else ""
        parts.append("HETATM at an end of a chain, or with an insertion code, are left out, as in "
                     f"the published code: {', '.join(ends[:MOST_LISTED])}{more}")
    return "; ".join(parts)


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
    # "A12"; None in chains without a name, as "" would be the first end of a range "-A12"
    labels = [name + number if number and name.strip() else None
              for name in chains for number in structure.chains[name].numbers]
    rows_of = {}                                    # label -> joined rows
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    for label in filter(None, labels):              # as Chain.row_of
        rows_of.setdefault(label[:-1] + label[-1].swapcase(), rows_of[label])
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


def numbers_near(number: str, numbers: Iterable[str | None]) -> list[str]:
    """Those of the numbers that differ in the insertion code alone."""
    digits = number.rstrip(ascii_letters)
    return [other for other in numbers if other and other.rstrip(ascii_letters) == digits]


# ---- the two formats ----

def _read_text(path):
    """Bytes of a file, unpacked if it is of gzip. ValueError for more than MAX_MIB."""
    limit = MAX_MIB * 2**20
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if is_packed:
            file = gzip.GzipFile(fileobj=file)
        text = file.read(limit + 1)
    if len(text) > limit:
        unpacked = ", unpacked" if is_packed else ""
        raise ValueError(f"it is larger than {MAX_MIB} MiB{unpacked}; expected a smaller structure,"
                         " such as the chains that are needed")
    return text


def _check_format(text, is_pdb):
    """ValueError for mmCIF in a file with a name of PDB (is_pdb), and the other way round."""
    has_header = re.search(rb"^data_", text, re.MULTILINE | re.IGNORECASE)
    if is_pdb and has_header:
        raise ValueError("it holds data_, as mmCIF files do; expected PDB. Name it .cif")
    if not is_pdb and not has_header:
        raise ValueError("it has no data_, with which mmCIF begins; expected mmCIF. Name a PDB "
                         "file .pdb")


def _parse_pdb(text):
    records = []
    for number, model in enumerate(re.split(rb"^ENDMDL", text, flags=re.MULTILINE), start=1):
        # Keep only the records of residues. gemmi would also stop at END, and take a ligand for a
        # part of a residue of its name and number.
        lines = re.findall(rb"^(?:ATOM|HETATM)[^\r\n]*", model, re.MULTILINE)
        places = {line[21:27] for line in lines if line.startswith(b"ATOM")}
        lines = [line for line in lines if _is_of_residue(line, places)]
        for line in lines:
            _check_numbers(line)
        records += [b"MODEL %8d" % number, *map(_for_gemmi, lines), b"ENDMDL"]
    return gemmi.read_pdb_string(b"\n".join(records) + b"\n")


def _is_of_residue(line, places):
    """Whether a PDB record is read. places: columns 22 to 27 of the ATOM records."""
    name = line[17:20].decode("latin-1")
    if line.startswith(b"ATOM") or name.upper() == "MSE":
        return True
    return _is_amino_acid(name) and line[21:27] not in places


def _check_numbers(line):
    """ValueError for a PDB record with a malformed number, which gemmi would read as 0."""
    try:
        int(line[22:26])
        for start in (30, 38, 46):
            text = line[start:start + 8]
            is_coordinate = abs(float(text)) <= MAX_ANGSTROM        # False for nan too
            if not is_coordinate or b"_" in text:
                raise ValueError("no coordinate")
    except ValueError:
        raise ValueError(f"found {line.decode('latin-1')[:54]!r}; expected a residue number in "
                         "columns 23 to 26 and coordinates in columns 31 to 54") from None
    # Five digits are a number above 9999. Other digits in column 27 would be read as an insertion
    # code, and the number ten times too small.
    if re.search(rb"\d", line[26:28]) and not re.fullmatch(rb"\d{5}\D", line[22:28]):
        raise ValueError(f"found {line.decode('latin-1')[:54]!r}, a residue number that ends "
                         "right of column 26; expected columns 23 to 26, or five digits in columns "
                         "23 to 27")


def _for_gemmi(line):
    """A PDB record as gemmi reads it right."""
    number = line[22:27]
    if re.fullmatch(rb"\d{5}", number) and number >= b"10000":
        # gemmi knows numbers from 10000 in hybrid-36: A000, A001, ...
        rest = int(number) - 10_000 + 10 * 36**3
        digits = b""
        for _ in range(4):
            rest, digit = divmod(rest, 36)
            digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit:digit + 1] + digits
        line = line[:22] + digits + b" " + line[27:]
    # gemmi would read a letter in column 21 as part of the chain's name.
    return line[:20] + b" " + line[21:]


def _parse_mmcif(text):
    document = gemmi.cif.read_string(text.decode("utf-8", "replace"))
    blocks = [block for block in document if block.find_values("_atom_site.Cartn_x")]
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} data blocks have atoms (_atom_site); expected one")
    # The checks below are for what gemmi accepts silently: without group_PDB every row is an ATOM,
    # and a malformed number counts as unknown.
    if not blocks[0].find_values("_atom_site.group_PDB"):
        raise ValueError("_atom_site has no group_PDB; expected ATOM and HETATM there, which tell "
                         "protein from water")
    for key in ATOM_KEYS:
        if not blocks[0].find_values(f"_atom_site.{key}"):   # gemmi would read no atoms at all
            raise ValueError(f"_atom_site has no {key}; expected this column")
    table = blocks[0].find_mmcif_category("_atom_site.")
    keys = [tag.removeprefix("_atom_site.") for tag in table.tags]
    if not set(ATOM_KEYS) <= set(keys):   # gemmi finds them in capitals too
        raise ValueError(f"_atom_site has the columns {' '.join(keys)[:80]}; expected names in "
                         "lower and upper case as in group_PDB and label_atom_id")
    columns = {key: list(table.column(k)) for k, key in enumerate(keys)}
    # Other tables are not needed, and may hold what gemmi refuses. Ligands need no numbers.
    groups = map(gemmi.cif.as_string, columns["group_PDB"])
    names = map(gemmi.cif.as_string, columns["label_comp_id"])
    # gemmi uses the label numbers of a file that has no others.
    number_key = "auth_seq_id" if "auth_seq_id" in columns else "label_seq_id"
    if number_key not in columns:
        raise ValueError("_atom_site has no auth_seq_id; expected residue numbers there")
    chains = columns.get("auth_asym_id", columns["label_asym_id"])
    codes = columns.get("pdbx_PDB_ins_code", itertools.repeat("?"))
    rows = list(zip(groups, names, zip(chains, columns[number_key], codes)))
    places = {place for group, _, place in rows if group[:1] not in ("H", "h")}
    kept = []
    for row, (group, name, place) in enumerate(rows):
        is_read = group[:1] not in ("H", "h") or name.upper() == "MSE"
        if is_read or (_is_amino_acid(name) and place not in places and place[1] not in "?."):
            kept.append(row)
    columns = {key: [values[row] for row in kept] for key, values in columns.items()}
    _check_values(columns, number_key)
    block = gemmi.cif.Block("atoms")
    loop = block.init_loop("_atom_site.", keys)
    loop.set_all_values(list(columns.values()))
    return gemmi.make_structure_from_block(block)


def _check_values(columns, number_key):
    """ValueError for a malformed number. columns: {key of _atom_site: list of values}. number_key:
    of residue numbers."""
    number = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?(\(\d+\))?|[?.]"  # (7) in 1.25(7) is an error
    patterns = {"Cartn_x": number, "Cartn_y": number, "Cartn_z": number, number_key: r"-?\d+"}
    for key, pattern in patterns.items():
        for value in columns[key]:
            if not re.fullmatch(pattern, value):
                raise ValueError(f"_atom_site.{key} is {value!a}; expected a number")


@functools.cache
def _token_of(name):
    """The letter of a residue by its name, of a modified one that of its parent, as a token."""
    if not _is_amino_acid(name):
        return X_ID
    letter = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    return int(encode(letter.replace(" ", "X"))[0])     # gemmi knows no parent of a few


@functools.cache
def _is_amino_acid(name):
    """Whether the name of a residue is that of an amino acid, perhaps a modified one."""
    return gemmi.find_tabulated_residue(_plain_name(name)).is_amino_acid()


def _plain_name(name):
    """A residue's name in upper case, without what it says of protons: HIS for HIE."""
    name = name.strip().upper()
    return PROTONATED.get(name, name)


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
        if residue.find_atom(name, "*") is None:
            return False
    own = _place(residue)
    centre = residue.find_atom("CA", "*").pos
    for place, position in centres:
        is_next = place != own and abs(place[0] - own[0]) <= 1
        if is_next and centre.dist(position) <= NEAR:
            return True
    return False


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
    """{chain name: Chain} from gemmi's models."""
    residues = {}       # chain name -> {(number, insertion code): residues of all models}
    for model in models:
        for chain in model:
            for residue in chain:
                places = residues.setdefault(chain.name, {})
                places.setdefault(_place(residue), []).append(residue)
    if not residues:
        raise ValueError("it has no ATOM records; expected those of a protein")
    return {name: _make_chain(name, places, ca_only) for name, places in residues.items()}


def _make_chain(name, places, ca_only):
    """Chain from {(number, insertion code): residues}; gaps in the numbers become X rows."""
    numbers = {number for number, _ in places}
    if None in numbers or max(numbers) - min(numbers) >= MAX_ROWS:
        raise ValueError(f"chain {name} has residues without a number, or more than {MAX_ROWS:,} "
                         "rows")
    gaps = set(range(min(numbers), max(numbers))) - numbers
    rows = sorted([*places, *((number, "") for number in gaps)])
    S = np.full(len(rows), X_ID, np.uint8)
    X = np.full((len(rows), 4, 3), np.nan, np.float32)
    modified = {}               # row -> name of its residue
    for row, place in enumerate(rows):
        residues = places.get(place, [])
        if residues:
            residue_name = _plain_name(residues[0].name)
            S[row] = _token_of(residue_name)
            if residue_name not in NAMES:
                modified[row] = residue_name
        for k, atom_name in enumerate(BACKBONE):
            if ca_only and k != CA:
                continue
            atoms = [residue.find_atom(atom_name, "*") for residue in residues]
            places_of_atom = [atom.pos.tolist() for atom in atoms if atom is not None]
            if places_of_atom:
                X[row, k] = places_of_atom[0]
    known = np.isfinite(X)
    labels = tuple(f"{number}{code}" if (number, code) in places else None
                   for number, code in rows)
    needed = known[:, [CA]] if ca_only else known
    resolved = needed.all((1, 2))
    _check_coordinates(name, X, resolved)
    modified = {row: residue_name for row, residue_name in modified.items() if resolved[row]}
    return Chain(S, np.where(known, X, np.float32(0)), resolved, labels, modified)


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
