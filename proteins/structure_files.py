"""The text of PDB and mmCIF files as models of gemmi: what is read of it, and what is refused.

    models, notes = read_models(Path("complex.pdb.gz"))     # notes: sentences for the user

Columns of PDB files hold more than the format knows: names of residues of four letters and names of
chains of two share column 21, and where chains have no names, TER and the names of segments in
columns 73 to 76 tell proteins apart. Water, ions and lipids are left out here, which ligands become
rows is decided in structures.py. Writes nothing.
"""
import bisect
import gzip
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import gemmi
import numpy as np

from proteins.residue_names import CAPS, is_amino_acid, is_name_of_four, is_nucleotide, plain_name

FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
# Columns of _atom_site that a mmCIF file must have.
ATOM_KEYS = ("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
             "label_asym_id", "Cartn_x", "Cartn_y", "Cartn_z")
MAX_ANGSTROM = 100_000      # largest coordinate
BOUND = 4.5                 # Angstrom, at most, between CA of residues that are bound: 3.8, less
#                             in a cis bond; residues with one between them are 5 and more apart
OVERLAP = 2.0               # Angstrom, between CA of two proteins: none are as near
MAX_MIB = 64                # of text: 800,000 atoms in a PDB file; reading takes ten times as much


def read_models(path: Path) -> tuple[gemmi.Structure, tuple[str, ...]]:
    """The models of a file with a name in FORMATS, or one of these with .gz.

    Returns: the structure of gemmi, with the residues of _indices_of_residues, and notes on how
        chains were told apart.
    Raises: OSError, EOFError, zlib.error, RuntimeError, ValueError or IndexError for a file that
        cannot be read."""
    text = _read_text(path)
    text = text.removeprefix(b"\xef\xbb\xbf")   # the byte order mark of UTF-8
    text = text.replace(b"\r", b"\n")   # some programs end lines with \r alone
    if b"\0" in text:   # a record that begins with one would be lost
        raise ValueError("it holds a zero byte, so it is binary, packed or damaged; expected "
                         "text, or gzip")
    is_pdb = path.name.lower().removesuffix(".gz").endswith((".pdb", ".ent"))
    _check_format(text, is_pdb)
    if is_pdb:
        return _parse_pdb(text)
    return _parse_mmcif(text), ()


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


def _indices_of_residues(atoms: Sequence[tuple]) -> list[int]:
    """Indices of the atoms that are read.

    Of ATOM records these are amino acids, other residues with a CA atom, and nucleotides, unless
    these stand beside a protein in a chain without a name. Caps of a chain, and water, ions and
    lipids, which programs of molecular dynamics write as ATOM, are not read. Of HETATM records MSE
    is read, and amino acids whose number has no ATOM.

    atoms: (is it HETATM, name of its residue, place, name of the atom); place: (chain, number,
        insertion code) as text."""
    has_unnamed_protein = False
    with_ca = set()     # (name, place); the atom of calcium is called CA as well
    for is_ligand, name, place, atom in atoms:
        if not is_ligand and not place[0] and is_amino_acid(name):
            has_unnamed_protein = True
        if atom == "CA" and name.upper() != "CA":
            with_ca.add((name, place))
    read = []
    ligands = []
    places = set()
    for index, (is_ligand, name, place, _) in enumerate(atoms):
        is_beside_protein = has_unnamed_protein and not place[0]
        if is_ligand:
            ligands.append(index)
        elif _has_row(name, (name, place) in with_ca, is_beside_protein):
            read.append(index)
            places.add(place)
    for index in ligands:
        _, name, place, _ = atoms[index]
        is_free = place not in places and place[1] not in ("?", ".")    # mmCIF without a number
        if name.upper() == "MSE" or (is_amino_acid(name) and is_free):
            read.append(index)
    return sorted(read)


def _has_row(name, has_ca, is_beside_protein):
    """Whether ATOM records of a residue are read. is_beside_protein: in a chain without a name."""
    if name.upper() in CAPS:
        return False
    if is_nucleotide(name):
        return not is_beside_protein
    return is_amino_acid(name) or has_ca


# ---- PDB ----

def _parse_pdb(text):
    """(structure of gemmi, notes) from the text of a PDB file."""
    records = []
    found = _Found()
    for number, model in enumerate(re.split(rb"^ENDMDL", text, flags=re.MULTILINE), start=1):
        # Keep only the records of residues. gemmi would also stop at END, and take a ligand for a
        # part of a residue of its name and number.
        lines = re.findall(rb"^(?:ATOM|HETATM)[^\r\n]*", model, re.MULTILINE)
        if any(line[20:21].strip() for line in lines):
            lines = _settle_column_21(lines)
        lines = _separate_proteins(lines, model, found)
        lines = [lines[index] for index in _indices_of_residues(list(map(_atom_of, lines)))]
        for line in lines:
            _check_numbers(line)
        records += [b"MODEL %8d" % number, *map(_for_gemmi, lines), b"ENDMDL"]
    structure = gemmi.read_pdb_string(b"\n".join(records) + b"\n")
    for chain in itertools.chain.from_iterable(structure):
        chain.name = found.names.get(chain.name, chain.name)
    notes = []
    if found.names:
        notes.append("proteins that have one chain name or none, and are separated by TER or names "
                     f"of segments, are read as chains {' '.join(found.names.values())}")
    if found.gaps:
        notes.append("parts that TER or names of segments separate are read as one chain, as the "
                     f"numbers rise: {', '.join(found.gaps)} (name the chains if they are two)")
    return structure, tuple(notes)


def _settle_column_21(lines):
    """PDB records in which column 21 is blank, or the first of the two of a chain's name.

    GLUHA is GLUH in chain A, or GLU in chain HA. It is the former if all names of chain HA would be
    names of four letters, or if it had but one residue."""
    names_of = {}       # columns 21 and 22 -> columns 18 to 27 of their atoms
    for line in lines:
        if line[20:21].strip():
            names_of.setdefault(line[20:22], set()).add(line[17:27])
    chains = set()      # of two columns
    for chain, names in names_of.items():
        are_of_four = all(is_name_of_four(name[:4].decode("latin-1")) for name in names)
        if chain[1:].strip() and len(names) > 1 and not are_of_four:
            chains.add(chain)
    settled = []
    for line in lines:
        name = line[17:21].decode("latin-1")
        if name[3:].strip() and line[20:22] not in chains:
            if is_name_of_four(name):
                line = line[:17] + plain_name(name).encode() + line[20:]
            line = line[:20] + b" " + line[21:]
        settled.append(line)
    return settled


def _atom_of(line):
    """A PDB record for _indices_of_residues."""
    text = line[:27].decode("latin-1")
    place = text[20:22].strip(), text[22:26], text[26:]
    return text.startswith("HETATM"), text[17:20].strip(), place, text[12:16].strip()


def _check_numbers(line):
    """ValueError for a PDB record with a malformed number, which gemmi would read as 0."""
    try:
        int(line[22:26])
        for start in (30, 38, 46):
            text = line[start:start + 8]
            if not abs(float(text)) <= MAX_ANGSTROM:        # `not <=` is true for nan too
                raise ValueError("no coordinate")
        if b"_" in line[22:26] + line[30:54]:       # int() and float() read 1_0 as 10
            raise ValueError("no number")
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
    """A PDB record as gemmi reads it right, without what is right of coordinates: it is not used,
    and some programs write other things there than the format says, which gemmi would refuse."""
    line = line[:54]
    number = line[22:27]
    if re.fullmatch(rb"\d{5}", number) and number >= b"10000":
        # gemmi knows numbers from 10000 in hybrid-36: A000, A001, ...
        rest = int(number) - 10_000 + 10 * 36**3
        digits = b""
        for _ in range(4):
            rest, digit = divmod(rest, 36)
            digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit:digit + 1] + digits
        line = line[:22] + digits + b" " + line[27:]
    return line


# ---- proteins that a PDB file does not name apart ----
#
#   columns  18-20  21-22  73-76
#   ATOM      GLY     .    PROA      first        a part: the CA atoms at its ends tell whether it
#   ATOM      GLU     .    PROA      last         is bound to the next one
#   TER                                           begins a part in chains without a name, END too
#   ATOM      GLY     .    PROB      first        and so does another segment, in all chains

@dataclass
class _Found:
    """What is found in the models of a file, which all have the same chains."""
    names: dict = field(default_factory=dict)   # columns 21, 22 of changed records -> chain's name
    counts: dict = field(default_factory=dict)  # columns 21, 22 -> how many proteins in each model
    gaps: list = field(default_factory=list)    # words such as "A 2 and 8", of two parts joined


class _Part:
    """Records of one chain that TER or segments separate from others."""

    def __init__(self, segment, n_ends):
        self.segment = segment
        self.n_ends = n_ends    # how many END are before it
        self.indices = []       # of its records
        self.centres = []       # CA records of amino acids, without HETATM: these alone fill a gap


def _separate_proteins(lines, model, found):
    """PDB records in which each protein has a chain of its own.

    Where chains have no name, TER and END separate proteins, and in all chains the names of
    segments do, unless the parts may be one chain (_may_be_one). A chain A with a TER in it is one
    chain, as it may be broken. Records without amino acids keep the chain that they have.

    lines: the ATOM and HETATM records of a model.
    model: its text, with TER.
    found: _Found, to which is added.
    Raises ValueError for models that differ, and for two proteins at one place."""
    tags = {line[20:22] + line[72:76] for line in lines}    # with segments
    chains = {tag[:2] for tag in tags}
    if b"  " not in chains and len(chains) == len(tags):    # most files: each chain is one part
        for chain in chains:
            _check_count(chain, 1, found)
        return lines
    used = {chain.decode("latin-1").strip() for chain in chains}
    lines = list(lines)
    for chain, parts in _parts_of(lines, _ends_in(model)).items():
        proteins = _join_parts(parts, found.gaps)
        if not proteins:
            continue
        _check_count(chain, len(proteins), found)
        if len(proteins) == 1:
            continue
        _check_apart(proteins)
        used.discard(chain.decode("latin-1").strip())
        for name, protein in zip(_names_for(proteins, used), proteins):
            used.add(name)
            columns = _columns_for(name, found.names, chains)
            for index in itertools.chain.from_iterable(part.indices for part in protein):
                lines[index] = lines[index][:20] + columns + lines[index][22:]
    return lines


def _check_count(chain, count, found):
    """ValueError if a chain holds another number of proteins than in a model before."""
    before = found.counts.setdefault(chain, count)
    if before != count:
        raise ValueError(f"TER or names of segments make {before} of chain {_words_for(chain)} in "
                         f"one model and {count} in another; expected the same in each. Name the "
                         "chains, or keep one model")


def _ends_in(model):
    """{TER, END: how many ATOM and HETATM records are before each of these} in a model."""
    ends = {b"TER": [], b"END": []}
    n_records = 0
    for kind in re.findall(rb"^(ATOM|HETATM|TER|END)", model, re.MULTILINE):
        if kind in ends:
            ends[kind].append(n_records)
        else:
            n_records += 1
    return ends


def _parts_of(lines, ends):
    """{columns 21 and 22: [_Part]} of PDB records. ends: of _ends_in."""
    # Where columns 73 to 76 change within a residue, they hold something else than segments.
    without_segments = {
        line[20:22] for line, before in itertools.pairwise(lines)
        if line[17:27] == before[17:27] and line[72:76].strip() != before[72:76].strip()}
    parts = {}      # columns 21 and 22 -> [_Part]
    latest = {}     # (columns 21 and 22, what tells parts apart) -> _Part
    for index, line in enumerate(lines):
        chain = line[20:22]
        segment = "" if chain in without_segments else line[72:76].decode("latin-1").strip()
        n_ters = 0 if chain.strip() else bisect.bisect_right(ends[b"TER"], index)
        n_ends = 0 if chain.strip() else bisect.bisect_right(ends[b"END"], index)
        is_atom = line.startswith(b"ATOM")
        key = (chain, segment, n_ters, n_ends)
        of_chain = parts.setdefault(chain, [])
        # HETATM far from its segment belongs to it; ATOM there begins another part.
        if key not in latest or (is_atom and latest[key] is not of_chain[-1]):
            latest[key] = _Part(segment, n_ends)
            of_chain.append(latest[key])
        latest[key].indices.append(index)
        if is_atom and line[12:16] == b" CA " and is_amino_acid(line[17:20].decode("latin-1")):
            _check_numbers(line)
            latest[key].centres.append(line)
    return parts


def _join_parts(parts, gaps):
    """[[_Part, ...]] of the proteins: parts with amino acids, together where they may be one chain.

    gaps: to which are added words for those that are not bound."""
    proteins = []
    for part in parts:
        if not part.centres:
            continue
        before = proteins[-1][-1] if proteins else None
        if before is None or not _may_be_one(before, part):
            proteins.append([part])
            continue
        proteins[-1].append(part)
        last = before.centres[-1]
        first = part.centres[0]
        words = f"{_words_for(first[20:22])} {_number_of(last)} and {_number_of(first)}"
        if _distance(last, first) > BOUND and words not in gaps:    # of the models before
            gaps.append(words)
    return proteins


def _may_be_one(part, other):
    """Whether two parts may be of one chain, the first one before TER, END or another segment.

    They are if they are bound, or if the numbers that are left out between them are of a loop that
    is missing: it must be long enough, unless the chain has a name. END separates files, and is in
    no loop."""
    last = part.centres[-1]
    first = other.centres[0]
    rise = _number_of(first) - _number_of(last)
    if part.n_ends != other.n_ends:
        rise = 0
    is_named = bool(last[20:22].strip())
    return (is_named and rise > 0) or _distance(last, first) <= BOUND * max(1, rise)


def _number_of(line):
    """The residue number of a PDB record, without its insertion code."""
    return int(re.match(rb" *-?\d+", line[22:27])[0])


def _words_for(columns):
    """The name of a chain by columns 21 and 22, for messages."""
    return columns.decode("latin-1").strip() or "(blank)"


def _distance(line, other):
    """Angstrom between the atoms of two PDB records."""
    return math.dist(_place_of(line), _place_of(other))


def _place_of(line):
    """Coordinates of a PDB record, in Angstrom."""
    return [float(line[start:start + 8]) for start in (30, 38, 46)]


def _check_apart(proteins):
    """ValueError if two proteins are at one place, as those of two frames of a trajectory are."""
    centres = []        # (x, y, z, number of its protein)
    for number, protein in enumerate(proteins):
        for line in itertools.chain.from_iterable(part.centres for part in protein):
            centres.append([*_place_of(line), number])
    centres = np.array(sorted(centres))
    # Each is compared with the next ones by x, until all of these are farther away in x.
    for step in range(1, len(centres)):
        offsets = centres[step:] - centres[:-step]
        if offsets[:, 0].min() > OVERLAP:
            return
        is_near = np.linalg.norm(offsets[:, :3], axis=1) < OVERLAP
        if (is_near & (offsets[:, 3] != 0)).any():
            raise ValueError("proteins that TER, END or names of segments separate are at one "
                             f"place, with CA atoms less than {OVERLAP:g} Angstrom apart; expected "
                             "each at a place of its own. Of several frames or models keep one, or "
                             "begin each with MODEL and end it with ENDMDL")


def _names_for(proteins, used):
    """Names of the proteins of one chain: of their segments if these differ, else A, B, ...

    used: names of other chains."""
    segments = [protein[0].segment for protein in proteins]
    if all(segments) and len({*segments, *used}) == len(segments) + len(used):
        return segments
    return [name for name in _short_names() if name not in used][:len(proteins)]


def _columns_for(name, names, chains):
    """Two columns that stand for a chain in PDB records, also in those of other models.

    names: {columns: name}, to which they are added. chains: columns that stand for others."""
    for columns, other in names.items():
        if other == name:
            return columns.encode()
    columns = next(columns for columns in _short_names()
                   if len(columns) == 2 and columns not in names and columns.encode() not in chains)
    names[columns] = name
    return columns.encode()


def _short_names():
    """A, B, ..., a, ..., 9, AA, AB, ...: 3,906 names."""
    letters = ascii_uppercase + ascii_lowercase + digits
    return [*letters, *map("".join, itertools.product(letters, repeat=2))]


# ---- mmCIF ----

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
    # gemmi uses the label numbers of a file that has no others.
    number_key = "auth_seq_id" if "auth_seq_id" in columns else "label_seq_id"
    if number_key not in columns:
        raise ValueError("_atom_site has no auth_seq_id; expected residue numbers there")
    if "auth_asym_id" in columns:
        columns["auth_asym_id"] = [label if author in (".", "?") else author for author, label
                                   in zip(columns["auth_asym_id"], columns["label_asym_id"])]
    kept = _indices_of_residues(_atoms_of_mmcif(columns, number_key))
    columns = {key: [values[row] for row in kept] for key, values in columns.items()}
    _check_values(columns, number_key)
    # Other tables are not needed, and may hold what gemmi refuses.
    block = gemmi.cif.Block("atoms")
    loop = block.init_loop("_atom_site.", keys)
    loop.set_all_values(list(columns.values()))
    return gemmi.make_structure_from_block(block)


def _atoms_of_mmcif(columns, number_key):
    """The rows of _atom_site for _indices_of_residues.

    columns: {key of _atom_site: list of values}. number_key: of residue numbers."""
    chains = columns.get("auth_asym_id", columns["label_asym_id"])
    codes = columns.get("pdbx_PDB_ins_code", itertools.repeat("?"))
    atoms = []
    rows = zip(columns["group_PDB"], columns["label_comp_id"], chains, columns[number_key], codes,
               columns["label_atom_id"])
    for group, name, chain, number, code, atom in rows:
        is_ligand = gemmi.cif.as_string(group)[:1] in ("H", "h")
        atoms.append((is_ligand, gemmi.cif.as_string(name), (chain, number, code),
                      gemmi.cif.as_string(atom)))
    return atoms


def _check_values(columns, number_key):
    """ValueError for a malformed number. columns: {key of _atom_site: list of values}. number_key:
    of residue numbers."""
    number = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?(\(\d+\))?|[?.]"  # (7) in 1.25(7) is an error
    patterns = {"Cartn_x": number, "Cartn_y": number, "Cartn_z": number, number_key: r"-?\d+"}
    for key, pattern in patterns.items():
        for value in columns[key]:
            if not re.fullmatch(pattern, value):
                raise ValueError(f"_atom_site.{key} is {value!a}; expected a number")
