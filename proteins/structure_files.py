"""The text of PDB and mmCIF files as models of gemmi: what is read of it, and what is refused.

    models, notes = read_models(Path("complex.pdb.gz"))     # notes: sentences for the user

Columns of PDB files hold more than the format knows: names of residues of four letters and names of
chains of two share column 21, and where chains have no names, TER and the names of segments in
columns 73 to 76 tell proteins apart. Which residues become rows is decided in structures.py. Writes
nothing.
"""
import bisect
import gzip
import itertools
import math
import re
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import gemmi

from proteins.residue_names import is_amino_acid, is_name_of_four, plain_name

FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
# Columns of _atom_site that a mmCIF file must have.
ATOM_KEYS = ("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
             "label_asym_id", "Cartn_x", "Cartn_y", "Cartn_z")
MAX_ANGSTROM = 100_000      # largest coordinate
BOUND = 4.5                 # Angstrom, at most, between CA of residues that are bound: 3.8, less
#                             in a cis bond; residues with one between them are 5 and more apart
MAX_MIB = 64                # of text: 800,000 atoms in a PDB file; reading takes ten times as much


def read_models(path: Path) -> tuple[gemmi.Structure, tuple[str, ...]]:
    """The models of a file with a name in FORMATS, or one of these with .gz.

    Of amino acids in HETATM records, those whose number has no ATOM are among the residues.
    Returns: the structure of gemmi, without ligands that are no amino acids, and notes on how
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


# ---- PDB ----

def _parse_pdb(text):
    """(structure of gemmi, notes) from the text of a PDB file."""
    records = []
    names = {}      # columns 21 and 22 of records -> name, of chains that are named here
    for number, model in enumerate(re.split(rb"^ENDMDL", text, flags=re.MULTILINE), start=1):
        # Keep only the records of residues. gemmi would also stop at END, and take a ligand for a
        # part of a residue of its name and number.
        lines = re.findall(rb"^(?:ATOM|HETATM)[^\r\n]*", model, re.MULTILINE)
        chains = {line[20:22] + line[72:76] for line in lines}      # with names of segments
        if any(chain[:1].strip() for chain in chains):
            lines = _settle_column_21(lines)
            chains = {line[20:22] + line[72:76] for line in lines}
        if _may_hold_several(chains):
            lines = _separate_proteins(lines, model, names)
        places = {line[20:27] for line in lines if line.startswith(b"ATOM")}
        lines = [line for line in lines if _is_of_residue(line, places)]
        for line in lines:
            _check_numbers(line)
        records += [b"MODEL %8d" % number, *map(_for_gemmi, lines), b"ENDMDL"]
    structure = gemmi.read_pdb_string(b"\n".join(records) + b"\n")
    for chain in itertools.chain.from_iterable(structure):
        chain.name = names.get(chain.name, chain.name)
    if not names:
        return structure, ()
    return structure, ("proteins that have one chain name or none, and are separated by TER or "
                       f"names of segments, are read as chains {' '.join(names.values())}",)


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


def _is_of_residue(line, places):
    """Whether a PDB record is read. places: columns 21 to 27 of the ATOM records."""
    if line.startswith(b"ATOM"):
        return True
    name = line[17:20].decode("latin-1")
    return name.upper() == "MSE" or (is_amino_acid(name) and line[20:27] not in places)


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
    return line


# ---- proteins that a PDB file does not name apart ----
#
#   columns  18-20  21-22  73-76
#   ATOM      GLY     .    PROA      first        a part: the CA atoms at its ends tell whether it
#   ATOM      GLU     .    PROA      last         is bound to the next one
#   TER                                           begins a part in chains without a name
#   ATOM      GLY     .    PROB      first        and so does another segment, in all chains

class _Part:
    """Records of one chain that TER or segments separate from others."""

    def __init__(self, segment):
        self.segment = segment
        self.indices = []       # of its records
        self.first = None       # CA records of its first and of its last amino acid
        self.last = None
        self.has_chain = False  # whether ATOM records are among these: HETATM alone fills a gap


def _may_hold_several(chains):
    """Whether one chain may hold several proteins. chains: columns 21, 22 and 73 to 76."""
    names = {chain[:2] for chain in chains}
    return b"  " in names or len(names) < len(chains)


def _separate_proteins(lines, model, names):
    """PDB records in which each protein has a chain of its own.

    Where chains have no name, TER separates proteins, and in all chains the names of segments do,
    unless the residues there are bound. A chain A with a TER in it is one chain, as it may be
    broken. Records without amino acids keep the chain that they have.

    lines: the ATOM and HETATM records of a model.
    model: its text, with TER.
    names: is filled with {columns 21 and 22 of the records that are returned: name}."""
    chains = {line[20:22] for line in lines}
    used = {chain.decode("latin-1").strip() for chain in chains}
    lines = list(lines)
    for chain, parts in _parts_of(lines, _ends_in(model)).items():
        proteins = _join_bound(parts)
        if len(proteins) < 2:
            continue
        used.discard(chain.decode("latin-1").strip())
        for name, protein in zip(_names_for(proteins, used), proteins):
            used.add(name)
            columns = _columns_for(name, names, chains)
            for index in itertools.chain.from_iterable(part.indices for part in protein):
                lines[index] = lines[index][:20] + columns + lines[index][22:]
    return lines


def _ends_in(model):
    """How many ATOM and HETATM records are before each TER or END of a model."""
    ends = []
    for index, kind in enumerate(re.findall(rb"^(ATOM|HETATM|TER|END)", model, re.MULTILINE)):
        if kind in (b"TER", b"END"):
            ends.append(index - len(ends))
    return ends


def _parts_of(lines, ends):
    """{columns 21 and 22: [_Part]} of PDB records. ends: how many are before each TER."""
    # Where columns 73 to 76 change within a residue, they hold something else than segments.
    without_segments = {
        line[20:22] for line, before in itertools.pairwise(lines)
        if line[17:27] == before[17:27] and line[72:76].strip() != before[72:76].strip()}
    parts = {}      # columns 21 and 22 -> {what tells its parts apart: _Part}
    for index, line in enumerate(lines):
        chain = line[20:22]
        segment = "" if chain in without_segments else line[72:76].decode("latin-1").strip()
        n_ends = bisect.bisect_right(ends, index) if not chain.strip() else 0
        part = parts.setdefault(chain, {}).setdefault((segment, n_ends), _Part(segment))
        part.indices.append(index)
        if line[12:16] == b" CA " and _is_of_chain(line):
            part.first = part.first or line
            part.last = line
            part.has_chain |= line.startswith(b"ATOM")
    return {chain: list(of_chain.values()) for chain, of_chain in parts.items()}


def _is_of_chain(line):
    """Whether a record is of an amino acid that is no ligand."""
    name = line[17:20].decode("latin-1")
    return is_amino_acid(name) and (line.startswith(b"ATOM") or name.upper() == "MSE")


def _join_bound(parts):
    """[[_Part, ...]] of the proteins: parts with amino acids, together where they are bound."""
    proteins = []
    for part in parts:
        if not part.has_chain:
            continue
        if proteins and _distance(proteins[-1][-1].last, part.first) <= BOUND:
            proteins[-1].append(part)
        else:
            proteins.append([part])
    return proteins


def _distance(line, other):
    """Angstrom between the atoms of two PDB records."""
    places = []
    for record in (line, other):
        _check_numbers(record)
        places.append([float(record[start:start + 8]) for start in (30, 38, 46)])
    return math.dist(*places)


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
        if is_read or (is_amino_acid(name) and place not in places and place[1] not in "?."):
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
