"""Structures and preference pairs: PDB/mmCIF, checks, split, batches, a demo source. No model, no process group.

    pairs = read_pairs("pairs.json")                            # print(describe(pairs)): what was read
    train, val, warning = split_pairs(pairs, 0.1, seed=0)       # two lists, split by structure
    plan = EpochPlan(train, seed=0, epoch=0, micro_batches=4, batch_size=8)
    for indices in plan.global_batch(step):                     # 4 micro-batches on any number of ranks
        batch = collate(train, indices)                         # tensors by name

Reads structures (.pdb, .ent, .cif, .mmcif; each also with .gz) and pairs: a JSON list of objects, or one object per
line in a .jsonl file. Keys of an object:
    pdb_file                        path, relative to the folder of the file that names it
    preferred_seq, unpreferred_seq  a letter per row of the designed chains, joined in the order of design_chains
    chain_id, or design_chains with fixed_chains    what is designed; what is context. No other chain is loaded
    mutable_positions, or mutable_ranges    0-based in the joined sequence; ranges [first, last] hold both ends.
                                    Optional: without them every position is designed
    description                     anything; not used
Writes nothing. Everything is a function of its arguments: every rank reads, splits and plans the same.

Rows are those of the official ProteinMPNN parser: one per residue number from the first to the last of a chain, one
more per insertion code; a number without a residue is an X row without coordinates.
"""

import difflib
import gzip
import hashlib
import itertools
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import gemmi
import numpy as np
import torch

from sequence_data import AMINO_ACIDS, LETTERS, X_ID, encode

NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
FORMATS = (".pdb", ".ent", ".cif", ".mmcif")
MAX_ROWS = 100_000              # of a chain: no protein is as long, so its residue numbers are wrong
MAX_ANGSTROM = 100_000          # of a coordinate: ten times what a PDB file's %8.3f holds
MAX_TOLD = 20                   # problems of a file told in full
LENGTH_RATIO = 1.1              # longest / shortest complex that are mixed at will in a step
REQUIRED = ("pdb_file", "preferred_seq", "unpreferred_seq")
OPTIONAL = ("chain_id", "design_chains", "fixed_chains", "mutable_positions", "mutable_ranges", "description")


def _words(n, *integers):
    """(n,) random uint64 keyed by integers, of a stream that numpy promises for good."""
    return np.random.PCG64([int(i) % 2**64 for i in integers]).random_raw(n)


def _key(*parts):
    """Integer in [0, 2**63) from arrays, texts and numbers, the same on every machine."""
    plain = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little") >> 1


# ---- structures ----

@dataclass(frozen=True, eq=False)
class Chain:
    S: np.ndarray               # (L,) uint8 ids; X at gaps and at residues that are none of the 20
    X: np.ndarray               # (L, 4, 3) float32 of N, CA, C, O in Angstrom; 0 for an atom that is missing
    resolved: np.ndarray        # (L,) bool: all four atoms are there
    numbers: tuple              # (L,) texts such as "12" and "12B"; None at gaps


class Structure:
    """chains: dict of Chain by name. key: of letters and coordinates; copies and other formats of a file share it."""

    def __init__(self, name, chains):
        self.name, self.chains = name, chains
        self.key = _key(*(part for chain, c in sorted(chains.items()) for part in (chain, c.S, c.X)))


def read_structure(path):
    """Read a PDB or mmCIF file -> Structure, with the rows of the official ProteinMPNN parser.

    ATOM records count, and HETATM records of MSE, which are read as M. A residue of another name than the 20 is X and
    keeps its coordinates. Of atoms with one name in one residue the first counts, and so does its first residue name:
    alternative locations and models are merged, the first winning. Nucleic acids become X rows without coordinates.
    mmCIF is read by author names and numbers, which are those of the PDB file.
    Raises ValueError with the reason for what cannot be read so, FileNotFoundError for a missing file.
    Source: parse_PDB_biounits of github.com/dauparas/ProteinMPNN.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"file not found: {path}")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if not path.is_file() or suffix not in FORMATS:
        raise ValueError(f"{path} is not a file with a name in {' '.join(FORMATS)} or one of these with .gz")
    try:
        text = path.read_bytes()
        text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
        if not text.strip() or b"\0" in text:
            raise ValueError("the file is binary" if text.strip() else "the file is empty")
        residues = {}
        for chain in (chain for model in (_pdb if suffix in FORMATS[:2] else _mmcif)(text) for chain in model):
            for residue in chain:
                if residue.het_flag != "H" or residue.name == "MSE":
                    place = (residue.seqid.num, residue.seqid.icode.strip())
                    residues.setdefault(chain.name, {}).setdefault(place, []).append(residue)
        if not residues:
            raise ValueError("no ATOM records")
        return Structure(str(path), {name: _rows(name, places) for name, places in residues.items()})
    except (OSError, EOFError, zlib.error, RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip() or type(error).__name__}") from None


def _pdb(text):
    # The official parser sees nothing but these records. gemmi would stop at END, and read a broken number as 0.
    lines = re.findall(rb"^(?:ATOM|HETATM.{11}MSE)[^\r\n]*", text, re.MULTILINE)
    for line in lines:
        if not re.fullmatch(rb" *-?\d+ *", line[22:26]) or not all(
                re.fullmatch(rb" *([+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf) *", line[i:i + 8], re.IGNORECASE)
                for i in (30, 38, 46)):
            raise ValueError(f"found {line.decode('latin-1')[:54]!r}; expected a residue number in columns 23 to 26 "
                             "and coordinates in columns 31 to 54")
    # Without a name, two chains that restart their numbers would be one, the second lost. Models do so by intent.
    first_model = re.findall(rb"^ATOM[^\r\n]*", re.split(rb"^ENDMDL", text, flags=re.MULTILINE)[0], re.MULTILINE)
    blank = [place for place, _ in itertools.groupby(line[22:27] for line in first_model if line[21:22] == b" ")]
    if len(set(blank)) < len(blank):
        again = next(place for i, place in enumerate(blank) if place in blank[:i]).decode("latin-1").strip()
        raise ValueError(f"residue {again} comes again in a chain without a name; expected names in column 22, which "
                         "keep chains apart")
    return gemmi.read_pdb_string(b"\n".join(line[:20] + b" " + line[21:] for line in lines) + b"\n")   # 21: no name


def _mmcif(text):
    document = gemmi.cif.read_string(text.decode("utf-8", "replace"))
    blocks = [block for block in document if block.find_values("_atom_site.Cartn_x")]
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} data blocks have atoms (_atom_site); expected one")
    # gemmi would take every row for an ATOM, label numbers for the author's, and what is no number for unknown.
    if not blocks[0].find_values("_atom_site.group_PDB"):
        raise ValueError("_atom_site has no group_PDB; expected ATOM and HETATM there, which tell protein from water")
    numeric = dict.fromkeys(("Cartn_x", "Cartn_y", "Cartn_z"), r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?(\(\d+\))?|[?.]")
    for key, pattern in {**numeric, "auth_seq_id": r"-?\d+"}.items():
        for value in blocks[0].find_values(f"_atom_site.{key}"):
            if not re.fullmatch(pattern, value):
                raise ValueError(f"_atom_site.{key} is {value!a}; expected a number")
    return gemmi.make_structure_from_block(blocks[0])


def _rows(name, places):
    numbers = {number for number, _ in places}
    if None in numbers or max(numbers) - min(numbers) >= MAX_ROWS:
        raise ValueError(f"chain {name} has residues without a number, or more than {MAX_ROWS:,} rows")
    gaps = set(range(min(numbers), max(numbers))) - numbers
    rows = sorted([*places, *((number, "") for number in gaps)])
    S, X = np.full(len(rows), X_ID, np.uint8), np.full((len(rows), 4, 3), np.nan)
    for i, place in enumerate(rows):
        residues = places.get(place, ())
        for residue in residues[:1]:
            known = "MET" if residue.name == "MSE" and residue.het_flag == "H" else residue.name
            S[i] = NAMES.index(known) if known in NAMES else X_ID
        for k, atom in enumerate(("N", "CA", "C", "O")):
            atoms = [residue.find_atom(atom, "*") for residue in residues]
            X[i, k] = next((atom.pos.tolist() for atom in atoms if atom is not None), np.nan)
    there = np.isfinite(X)
    for i, k, axis in np.argwhere(there & (np.abs(X) > MAX_ANGSTROM))[:1]:
        number, code = rows[i]
        raise ValueError(f"chain {name} has {('N', 'CA', 'C', 'O')[k]} of residue {number}{code} at "
                         f"{'xyz'[axis]} = {X[i, k, axis]:g}; expected Angstrom, at most {MAX_ANGSTROM:,}")
    return Chain(S, np.where(there, X, 0).astype(np.float32), there.all((1, 2)),
                 tuple(f"{number}{code}" if (number, code) in places else None for number, code in rows))


class Complex:
    """Chains of a structure in the order of the official tensors: the designed ones sorted, then the fixed ones sorted.

    X (L, 4, 3) float32 Angstrom; S (L,) uint8 native ids; mask (L,) bool, True = resolved; chain_id (L,) int64, from 1;
    residue_idx (L,) int64, the row plus 100 per chain before. The first n_designed rows are designed.
    key: of the structure and the names of the chains.
    """

    def __init__(self, structure, design, fixed=()):
        self.structure, self.design, self.fixed = structure, tuple(sorted(design)), tuple(sorted(fixed))
        chains = [structure.chains[name] for name in self.design + self.fixed]
        self.X = np.concatenate([chain.X for chain in chains])
        self.S = np.concatenate([chain.S for chain in chains])
        self.mask = np.concatenate([chain.resolved for chain in chains])
        self.chain_id = np.repeat(np.arange(1, len(chains) + 1), [len(c.S) for c in chains])
        self.residue_idx = np.arange(len(self.S)) + 100 * (self.chain_id - 1)
        self.n_designed = int((self.chain_id <= len(self.design)).sum())
        self.key = _key(structure.key, self.design, self.fixed)

    def __len__(self):
        return len(self.S)

    def places(self, design):
        """(n_designed,) int64: where designed row i is in the sequences joined in the order of `design`."""
        ends = np.cumsum([len(self.structure.chains[name].S) for name in design])
        spans = {name: np.arange(end - len(self.structure.chains[name].S), end) for name, end in zip(design, ends)}
        return np.concatenate([spans[name] for name in self.design])


def parse_positions(texts, structure, chains):
    """Positions as written on a command line -> (positions, told).

    texts:  list of str, or a str of several with blanks or commas between. "A12" is residue 12 of chain A by its number
            in the file, "A12B" has insertion code B, "A10-A20" is a range with both ends. Or all of them are 0-based
            numbers in the joined sequence, "12" and "10-20".
    chains: names of the chains whose rows are joined, in this order.
    Returns sorted int64, 0-based in the joined sequence, and a text that says how they were understood.
    Raises ValueError for what is not there (a gap has no residue), comes twice, or can be read in two ways.
    """
    texts = re.split(r"[,\s]+", texts.strip(", \n")) if isinstance(texts, str) else texts
    absent = [name for name in chains if name not in structure.chains]
    if absent:
        raise ValueError(f"chain {' '.join(absent)} not in {structure.name} (has {_names(structure)})")
    labels = [number and name + number for name in chains for number in structure.chains[name].numbers]
    where, found, kinds = {}, [], set()
    for i, label in enumerate(labels):
        where.setdefault(label, []).append(i)
    for text in texts:
        halves = [(text[:i], text[i + 1:]) for i, sign in enumerate(text) if sign == "-"]
        read = {(i, i) for i in where.get(text, ())}
        read |= {(i, j) for first, last in halves for i in where.get(first, ()) for j in where.get(last, ())}
        kinds.add("chain and number in the file" if read else "0-based number in the sequence")
        plain = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
        read |= {(int(i), int(j or i)) for i, j in [plain.groups()] if int(j or i) < len(labels)} if plain else set()
        first, last = min(read, default=(0, -1))
        if len(read) != 1 or first > last:
            raise ValueError(f"position {text} is {'ambiguous' if len(read) > 1 else 'not there, or reversed'}; chains "
                             f"{' '.join(chains)} hold {labels[0]} to {labels[-1]}, {len(labels)} rows with the gaps")
        found.extend(range(first, last + 1))
    if not found or len(kinds) > 1 or len(set(found)) < len(found):
        raise ValueError(f"positions {' '.join(texts)}: expected some, all of one kind (A12 or 12), none of them twice")
    return np.array(sorted(found)), f"{len(found)} positions by {kinds.pop()}: {' '.join(texts)}"


def _names(structure):
    return " ".join(name or "(blank)" for name in structure.chains)


# ---- preference pairs ----

class Pair:
    """Two sequences for one complex, the first preferred.

    chosen, rejected: (n_designed,) uint8 ids by row of the complex; equal where they are not scored.
    chain_M: (n_designed,) bool, True = designed. Scored are the rows that are resolved as well.
    key:     integer of all this and the structure, for seeds and caches.
    """

    def __init__(self, complex, chosen, rejected, chain_M):
        self.complex, self.chosen, self.rejected, self.chain_M = complex, chosen, rejected, chain_M
        self.key = _key(complex.key, chosen, rejected, chain_M)


def read_pairs(path, structures=None, mutable=None, max_length=None, told=None, alive=lambda: None):
    """Read and check a file of preference pairs -> list of Pair, in the order of the file.

    structures: dict that keeps what was read of each structure file, to be shared between calls.
    mutable:    positions, as parse_positions takes them, for the pairs that have none of their own.
    max_length: most rows of a designed sequence.
    told:       list that gets a text on how `mutable` was understood, where it is first needed.
    alive:      called before each pair: what watches over a run may want to know that reading goes on.
    Letters at unresolved rows may be any, X or '-': they are not scored, and the structure's own are used. X in both
    sequences, at a residue to which the structure gives no letter either, takes this row out of the design.
    Raises one ValueError with the problems of all items, counted from 0, and FileNotFoundError for a missing file.
    """
    entries, pairs, problems = _read_entries(Path(path)), [], {}
    reader = _Reader(Path(path).parent, {} if structures is None else structures, mutable, max_length,
                     [] if told is None else told)
    for number, entry in enumerate(entries):
        alive()
        found = []
        pairs.append(reader.pair(entry, found.append))
        for problem in found:
            problems.setdefault(problem, []).append(number)
    if problems:
        n_bad = len(set().union(*problems.values()))
        lines = [f"{path}: found problems in {n_bad:,} of {len(entries):,} pairs; expected none. Mend the file:"]
        lines += [f"{_items(items)}: {problem}" for problem, items in list(problems.items())[:MAX_TOLD]]
        more = list(problems.values())[MAX_TOLD:]
        lines += [f"and {len(more):,} more problems, in {_items(set().union(*more))}"] * bool(more)
        raise ValueError("\n  ".join(lines))
    return pairs


def _items(numbers):
    """Numbers of items -> text, such as "items 0, 3-7"."""
    runs = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
    return f"item{'s' * (len(numbers) > 1)} {text}"


def describe(pairs):
    """One line on a list of pairs, with what a user should know of them."""
    complexes = {pair.complex.key: pair.complex for pair in pairs}
    seen, count = {}, lambda test: sum(map(test, pairs))
    for pair in pairs:
        seen.setdefault((pair.complex.key, pair.chosen.tobytes(), pair.rejected.tobytes()), pair)
    left_out = {key for key, c in complexes.items() if any(
        chain.resolved.any() for name, chain in c.structure.chains.items() if name not in c.design + c.fixed)}
    notes = [(count(lambda p: len(p.complex.design + p.complex.fixed) > 1), "with several chains"),
             (count(lambda p: not p.chain_M.all()), "with fixed positions"),
             (count(lambda p: p.complex.key in left_out), "leave other protein chains of their file out"),
             (count(lambda p: not p.complex.mask[:len(p.chosen)].all()), "with unresolved rows, which are not scored"),
             (len(pairs) - len(seen), "repeat an earlier one"),
             (sum((key, b, a) in seen for key, a, b in seen) // 2, "contradict another")]
    lengths, structures = [len(c) for c in complexes.values()], {c.structure.key for c in complexes.values()}
    head = f"{len(pairs):,} pairs on {len(structures):,} structures, {min(lengths):,} to {max(lengths):,} rows each"
    return "; ".join([head] + [f"{n:,} {what}" for n, what in notes if n])


class _Object(dict):
    """A JSON object that knows which of its keys came twice."""

    def __init__(self, items):
        super().__init__(items)
        names = [name for name, _ in items]
        self.repeated = sorted(name for name in self if names.count(name) > 1)


def _parse(text, place=""):
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        return ValueError(f"{place}this is no JSON: {str(error)[:80]}")


def _short(value):
    text = json.dumps(value)                # ASCII, whatever it holds
    return text if len(text) <= 60 else text[:57] + "..."


def _read_entries(path):
    """The items of a file; a line that is no JSON is a ValueError among them."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a file of preference pairs. Check the path (relative "
                                f"to {Path.cwd()}).")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a JSON list of preference pairs. Name the file itself.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (from byte {error.start} on); expected JSON. Is it compressed, "
                         "or of another encoding?") from None
    if not text.strip():
        raise ValueError(f"{path} is empty; expected a JSON list of preference pairs.")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return [_parse(line, f"line {i}: ") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    entries = _parse(text)
    if isinstance(entries, ValueError):
        raise ValueError(f"{path}: {entries}. Expected a JSON list; a file with one object per line is named .jsonl.")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: found {_short(entries)}; the top level must be a list of objects, [{{...}}, ...], "
                         "and not an empty one.")
    return entries


class _Reader:
    """Makes pairs of JSON objects. Every method says what is wrong by say(text), and then returns None."""

    def __init__(self, folder, structures, positions, max_length, told):
        self.folder, self.structures = folder, structures           # path: Structure, or text of the error
        self.positions, self.max_length, self.told = positions, max_length, told
        self.complexes, self.masks = {}, {}

    def pair(self, entry, say):
        if not isinstance(entry, dict):
            return say(str(entry) if isinstance(entry, ValueError) else f"found {_short(entry)}; expected an object")
        for name in entry.repeated:
            say(f"key {_short(name)} given twice")
        for name in sorted(entry.keys() - {*REQUIRED, *OPTIONAL}):
            near = difflib.get_close_matches(name, REQUIRED + OPTIONAL, 1)
            say(f"unknown key {_short(name)[1:-1]}" + (f"; did you mean {near[0]}?" if near else ""))
        for name in REQUIRED:
            if name not in entry:
                say(f"missing key {name}")
            elif not isinstance(entry[name], str) or not entry[name].strip():
                say(f"{name} is {_short(entry[name])}; expected a text that is not empty")
        texts = {name: entry[name] for name in REQUIRED if isinstance(entry.get(name), str) and entry[name].strip()}
        sequences = {name: text for name, text in texts.items() if name != "pdb_file"}
        wrong = {name: re.search(f"[^{LETTERS}-]", text) for name, text in sequences.items()}
        for name, found in wrong.items():
            if found:
                hint = ("; write upper case" if found.group() in LETTERS.lower() else
                        "; join chains without a sign between them" if found.group() in "/:|" else "")
                say(f"unknown residue letter {found.group()!a} at position {found.start() + 1} of {name}{hint}")
        sizes = [len(text) for text in sequences.values()]
        if len(set(sizes)) == 2:
            say(f"preferred ({sizes[0]}) and unpreferred ({sizes[1]}) lengths differ")

        own = [name for name in ("mutable_positions", "mutable_ranges") if name in entry]
        is_mutable = self.mutable(entry, own, max(sizes, default=0), say) if own else None
        design, fixed = self.chains(entry, say) or (None, None)
        structure = self.structure(texts["pdb_file"], say) if "pdb_file" in texts else None
        if not design or structure is None:
            return None
        absent = [name for name in design + fixed if name not in structure.chains]
        empty = [name for name in design if name not in absent and not structure.chains[name].resolved.any()]
        for name in absent:
            say(f"chain {_short(name)[1:-1]} not in {_short(texts['pdb_file'])[1:-1]} (has {_names(structure)})")
        for name in empty:
            say(f"chain {name} has no protein residue with a complete backbone (N, CA, C, O): nothing to score")
        if absent or empty:
            return None
        place = (texts["pdb_file"], tuple(sorted(design)), tuple(sorted(fixed)))
        complex = self.complexes[place] = self.complexes.get(place) or Complex(structure, design, fixed)
        places, n = complex.places(design), complex.n_designed
        resolved, native = np.zeros(n, bool), np.zeros(n, np.uint8)
        resolved[places], native[places] = complex.mask[:n], complex.S[:n]      # in the order of the sequences
        if self.max_length is not None and n > self.max_length:
            say(f"the designed sequence has {n} rows, more than max_length {self.max_length}")
        for size in sorted({*sizes} - {n}):
            unresolved = f" of which {n - resolved.sum()} unresolved (write X there)" * (not resolved.all())
            chains = f"chain{'s' * (len(design) > 1)} {' '.join(design)}"
            say(f"length mismatch: sequence {size}, structure {chains} {n}{unresolved}")
        if not own:
            is_mutable = self.default_mask(n, structure, design, say)
        if is_mutable is None or sizes != [n, n] or any(wrong.values()):
            return None

        letters = {name: encode(text.replace("-", "X")) for name, text in sequences.items()}
        chosen, rejected = letters.values()
        nameless = (native == X_ID) & (chosen == X_ID) & (rejected == X_ID) & resolved
        for name, ids in letters.items():
            for i in np.flatnonzero((ids == X_ID) & resolved & ~nameless)[:1]:
                say(f"{sequences[name][i]!r} at a resolved position, {i + 1} of {name}: it would be scored as an "
                    "unknown residue; expected one of the 20 amino acids")
        differ = (chosen != rejected) & resolved
        outside = np.flatnonzero(differ & ~is_mutable)
        if len(outside):
            say(f"preferred and unpreferred differ at {len(outside)} fixed positions: {outside[:5].tolist()} (0-based"
                f"{', and more' * (len(outside) > 5)}), which are not among the mutable ones: they must be equal there")
        elif not differ.any():
            say("preferred and unpreferred are equal at all resolved positions: no preference")
        chosen, rejected = (np.where(resolved, ids, native)[places] for ids in (chosen, rejected))
        return Pair(complex, chosen, rejected, (is_mutable & ~nameless)[places])

    def chains(self, entry, say):
        """(design, fixed), two lists of names."""
        if "chain_id" in entry:
            for other in ("design_chains", "fixed_chains"):
                if other in entry:
                    return say(f"chain_id and {other} given together; expected chain_id alone, or design_chains with "
                               "fixed_chains")
            if isinstance(entry["chain_id"], str) and entry["chain_id"].strip():
                return [entry["chain_id"]], []
            return say(f'chain_id is {_short(entry["chain_id"])}; expected the name of a chain, such as "A"')
        if "design_chains" not in entry:
            return say("neither chain_id nor design_chains given; expected the chains that the sequences are for")
        lists = [entry["design_chains"], entry.get("fixed_chains", [])]
        for key, names in zip(("design_chains", "fixed_chains"), lists):
            if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
                return say(f'{key} is {_short(names)}; expected a list of names of chains, such as ["A"]')
            for name in names:
                if names.count(name) > 1:
                    return say(f"chain {_short(name)[1:-1]} listed twice in {key}")
        if not lists[0]:
            return say("design_chains is empty; expected at least one chain")
        for name in lists[0]:
            if name in lists[1]:
                return say(f"chain {_short(name)[1:-1]} is in design_chains and in fixed_chains")
        return lists

    def structure(self, name, say):
        """Structure of a file, read once."""
        path = self.folder / name
        if path not in self.structures:
            try:
                self.structures[path] = read_structure(path)
            except FileNotFoundError:
                self.structures[path] = f"file not found: {_short(name)[1:-1]} (in {self.folder})"
            except (OSError, ValueError) as error:
                self.structures[path] = str(error).encode("ascii", "backslashreplace").decode()
        found = self.structures[path]
        return found if isinstance(found, Structure) else say(found)

    def mutable(self, entry, given, n, say):
        """(n,) bool in the order of the sequences, whose length is n; 0: not known."""
        if len(given) == 2:
            return say("mutable_positions and mutable_ranges given together; expected one of them")
        values, ranges = entry[given[0]], entry[given[0]]
        if given == ["mutable_positions"] and isinstance(values, list):
            ranges = [[value, value] for value in values]
        if not isinstance(ranges, list) or not ranges or not all(
                isinstance(ends, list) and len(ends) == 2 and {type(end) for end in ends} == {int} for ends in ranges):
            example = "[0, 1, 5]" if given == ["mutable_positions"] else "[[0, 5], [10, 12]], both ends included"
            return say(f"{given[0]} is {_short(values)}; expected whole numbers from 0, such as {example}")
        mask = np.zeros(n, bool)
        for first, last in ranges if n else ():
            text = f"mutable position {first}" if given == ["mutable_positions"] else f"mutable range {first}-{last}"
            if min(first, last) < 0 or max(first, last) >= n:
                return say(f"{text:.60} outside 0..{n - 1}")
            if first > last or mask[first:last + 1].any():
                return say(f"{text} is reversed" if first > last else f"{text} repeats positions given before")
            mask[first:last + 1] = True
        return mask

    def default_mask(self, n, structure, design, say):
        """(n,) bool in the order of the sequences, for pairs without positions."""
        place = (structure, *design)    # not its key, which leaves the numbers of residues out
        if place not in self.masks:
            try:
                some = slice(None)
                if self.positions is not None:
                    some, text = parse_positions(self.positions, structure, design)
                    self.told += [text] * (not self.told)
                self.masks[place] = np.zeros(n, bool)
                self.masks[place][some] = True
            except ValueError as error:
                self.masks[place] = f"the mutable positions for all pairs: {error}"
        found = self.masks[place]
        return say(found) if isinstance(found, str) else found


# ---- split ----

def split_pairs(pairs, val_fraction, seed):
    """Two lists of pairs, train and val, in their order, and a warning or None. No structure is on both sides.

    Of the structures, max(1, round(val_fraction x number)) go to validation: which ones, depends on the seed and on
    their content alone (Structure.key). Similar structures may still be on both sides.
    A single structure is split by sequence, with a warning: pairs that share a sequence, through others as well, stay
    together, and about val_fraction of the pairs go to validation.
    Raises ValueError for a fraction outside (0, 1), and where all pairs of a single structure hang together.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"found val_fraction = {val_fraction}; expected more than 0 and less than 1, such as 0.1.")
    groups = np.array([pair.complex.structure.key for pair in pairs], np.int64)
    by_sequence = len(set(groups.tolist())) == 1
    if by_sequence:
        groups = _linked_by_sequence(pairs)
    keys, counts = np.unique(groups, return_counts=True)
    if len(keys) < 2:
        raise ValueError(f"all {len(pairs):,} pairs are of one structure and linked by the sequences that they share, "
                         "so none can be held out; expected pairs that can be split. Give a file for it (--val_data), "
                         "or train without validation (data.val_fraction=0).")
    order = np.argsort([_words(1, 1, seed, key)[0] for key in keys.tolist()], kind="stable").tolist()
    if by_sequence:
        held_out, room = [], max(1, val_fraction * len(pairs))
        for group in order:
            if counts[group] <= room:
                held_out.append(group)
                room -= counts[group]
        held_out = held_out or [min(order, key=lambda group: counts[group])]
    else:
        held_out = order[:min(max(1, math.floor(val_fraction * len(keys) + 0.5)), len(keys) - 1)]
    is_val = np.isin(groups, keys[held_out])
    train, val = ([pairs[i] for i in np.flatnonzero(side)] for side in (~is_val, is_val))
    warning = (f"all pairs are of one structure: {len(val):,} of {len(pairs):,} are held out by sequence, so "
               "validation tells about other sequences, not other structures. For these, give --val_data.")
    return train, val, warning if by_sequence else None


def _linked_by_sequence(pairs):
    """(n,) int64, equal for pairs that share a chain's sequence, directly or through other pairs; independent of the
    order. A chain that is alike in both sequences of every pair shows no preference, and links none."""
    parent = {}

    def chains(pair):
        """[(chosen, rejected)], the letters of each designed chain."""
        number = pair.complex.chain_id[:len(pair.chosen)]
        return [tuple(S[number == k].tobytes() for S in (pair.chosen, pair.rejected)) for k in np.unique(number)]

    def root(text):
        while parent.setdefault(text, text) != text:
            parent[text] = text = parent[parent[text]]
        return text

    varied = {S for pair in pairs for both in chains(pair) if both[0] != both[1] for S in both}
    linked = [[S for both in chains(pair) for S in both if S in varied] for pair in pairs]
    for texts in linked:
        for text in texts:
            low, high = sorted((root(texts[0]), root(text)))
            parent[high] = low
    return np.array([_key(root(texts[0])) for texts in linked], np.int64)


def shared_structures(train, val):
    """Names of the structures of val that train has as well, sorted: a reason for a warning."""
    keys = {pair.complex.structure.key for pair in train}
    return sorted({pair.complex.structure.name for pair in val if pair.complex.structure.key in keys})


# ---- batches ----

class EpochPlan:
    """Which pairs are in which micro-batch of which step of an epoch.

    A function of the arguments alone: every rank makes the same plan and takes its own micro-batches from it.

    pairs:         list of Pair.
    micro_batches: micro-batches per global batch = ranks x accumulation.
    batch_size:    most pairs in a micro-batch.

    The pairs of a complex stand in one row, in random order, and complexes by length (mixed within a ratio of 1.1). The
    row is cut into micro-batches of equal numbers of pairs, give or take one: few complexes to encode, little padding.
    A step has micro-batches of about one length, so that ranks have about the same work; steps come in random order.
    Every pair comes once in an epoch, and no micro-batch is empty. Only with batch_size 1, less than a global batch is
    left out, chosen at random. n_steps is the same in all epochs.
    Raises ValueError for fewer pairs than micro-batches.
    """

    def __init__(self, pairs, seed, epoch, micro_batches, batch_size):
        if micro_batches < 1 or batch_size < 1 or len(pairs) < micro_batches:
            raise ValueError(f"found {len(pairs):,} pairs, {micro_batches:,} micro-batches per step (ranks x "
                             f"accumulation), batch_size {batch_size:,}; expected at least 1 of each, and a pair for "
                             "each micro-batch. Use fewer ranks or less accumulation, or give more pairs.")
        self.n_steps = min(-(-len(pairs) // (micro_batches * batch_size)), len(pairs) // micro_batches)
        n_pieces = self.n_steps * micro_batches
        kept = np.argsort(_words(len(pairs), 2, seed, epoch), kind="stable")[:n_pieces * batch_size]
        self.n_pairs = len(kept)
        bucket = np.floor(np.log([len(pairs[i].complex) for i in kept]) / math.log(LENGTH_RATIO))
        _, first, group = np.unique([pairs[i].complex.key for i in kept], return_index=True, return_inverse=True)
        order = np.lexsort((first[group], bucket))              # stable: within a complex in the random order of kept
        bounds = np.arange(n_pieces + 1) * len(kept) // n_pieces
        self.pieces = [kept[order[a:b]] for a, b in zip(bounds, bounds[1:])]
        longest = np.maximum.reduceat(bucket[order], bounds[:-1])
        by_length = np.lexsort((_words(n_pieces, 3, seed, epoch), longest)).reshape(self.n_steps, micro_batches)
        self.steps = by_length[np.argsort(_words(self.n_steps, 4, seed, epoch), kind="stable")]

    def global_batch(self, step):
        """The micro-batches of a step: list of `micro_batches` int64 arrays of indices into pairs."""
        if not 0 <= step < self.n_steps:
            raise ValueError(f"found step {step} of the epoch; expected 0 to {self.n_steps - 1}.")
        return [self.pieces[k] for k in self.steps[step]]


def eval_batches(pairs, batch_size):
    """Batches for evaluation: list of int64 index arrays, each pair in exactly one, longest first, complexes together.

    Independent of ranks: rank r of R takes batches r, r + R, and so on. Raises ValueError for a batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"found batch_size = {batch_size}; expected at least 1.")
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i].complex), pairs[i].complex.key, i))
    return [np.array(order[k:k + batch_size], np.int64) for k in range(0, len(order), batch_size)]


def collate_complexes(complexes, names=("X", "S", "mask", "residue_idx", "chain_id")):
    """U complexes -> dict of tensors, those of these names, padded to the longest, L rows.

    X (U, L, 4, 3) float32 Angstrom; S (U, L) int64 native letters; mask (U, L) float32, 1 = resolved;
    residue_idx, chain_id (U, L) int64. Padding is 0, and -100 in residue_idx.
    """
    shape = len(complexes), max(map(len, complexes))
    kinds = {"X": ((4, 3), np.float32, 0), "S": ((), np.int64, 0), "mask": ((), np.float32, 0),
             "residue_idx": ((), np.int64, -100), "chain_id": ((), np.int64, 0)}
    arrays = {name: np.full((*shape, *more), fill, dtype) for name in names for more, dtype, fill in [kinds[name]]}
    for row, complex in enumerate(complexes):
        for name, values in arrays.items():
            values[row, :len(complex)] = getattr(complex, name)
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def collate(pairs, indices):
    """P pairs -> dict of tensors: S and mask of collate_complexes, for the U complexes of these pairs, each once, and

    complex (P,) int64, the row of the pair's complex in them; chosen, rejected (P, L) int64, the letters of the whole
    complex; chain_M (P, L) float32, 1 = designed: scored is chain_M x mask[complex]. Coordinates are left out: what the
    network sees of them is kept per complex.
    """
    some, rows = [pairs[i] for i in indices], {}
    for pair in some:
        rows.setdefault(pair.complex.key, (len(rows), pair.complex))
    batch = collate_complexes([complex for _, complex in rows.values()], ("S", "mask"))
    batch["complex"] = torch.tensor([rows[pair.complex.key][0] for pair in some])
    batch["chosen"], batch["rejected"] = batch["S"][batch["complex"]], batch["S"][batch["complex"]]
    batch["chain_M"] = torch.zeros(batch["chosen"].shape)
    for i, pair in enumerate(some):
        for name in ("chosen", "rejected", "chain_M"):
            batch[name][i, :len(pair.chosen)] = torch.from_numpy(getattr(pair, name))
    return batch


# ---- demo source ----

PHI_PSI = {"helix": (-57, -47), "strand": (-120, 120)}              # degrees
SUITS = {"helix": "AEHKLMQR", "strand": "CFITVWY"}
BOND = {"N": (1.329, 117.2), "CA": (1.458, 121.7), "C": (1.525, 111.0), "O": (1.231, 120.1)}


def build_backbone(phi, psi):
    """Backbone with ideal bonds and trans peptides: phi, psi (L,) degrees -> X (L, 4, 3) float32 Angstrom.

    BOND: length (Angstrom) of the bond that ends in an atom, and angle (degrees) at the atom before it.
    Source: Engh and Huber 1991, Acta Cryst. A47, 392.
    """
    def place(a, b, c, atom, torsion):
        length, angle = BOND[atom][0], math.radians(BOND[atom][1])
        along = (c - b) / np.linalg.norm(c - b)
        normal = np.cross(b - a, along)
        normal /= np.linalg.norm(normal)
        across = math.cos(math.radians(torsion)) * np.cross(normal, along) + math.sin(math.radians(torsion)) * normal
        return c + length * (math.sin(angle) * across - math.cos(angle) * along)

    N, CA = np.zeros(3), np.array([BOND["CA"][0], 0, 0])
    C, rows = place(np.array([0, 1.0, 0]), N, CA, "C", 0), []
    for i in range(len(phi)):
        rows.append([N, CA, C, place(N, CA, C, "O", psi[i] + 180)])
        N_next = place(N, CA, C, "N", psi[i])
        CA_next = place(CA, C, N_next, "CA", 180)
        N, CA, C = N_next, CA_next, place(C, N_next, CA_next, "C", phi[(i + 1) % len(phi)])
    return np.array(rows, np.float32)


def demo_pairs(seed=0, n_structures=32, pairs_per_structure=8):
    """Pairs with a rule to learn, made in code: list of Pair.

    A structure is one chain of three segments of 8 to 14 residues, helix and strand in turns.
    The rule: the preferred sequence has more residues that suit their place, AEHKLMQR in helix and CFITVWY in strand.
    One residue in five is of D, G, N, P, S, which suit none; of the others three in four suit in chosen and native
    sequences, one in four in rejected ones, drawn until chosen is ahead by at least L / 5 residues. Over all, letters
    are as frequent in chosen as in rejected sequences: a model has to look at the backbone.
    """
    letters = {kind: encode(suits) for kind, suits in SUITS.items()}
    neutral = encode("".join(letter for letter in AMINO_ACIDS if letter not in "".join(SUITS.values())))
    pairs = []
    for number in range(n_structures):
        draw = np.random.Generator(np.random.PCG64([5, seed % 2**64, number])).random
        kinds = ("helix", "strand", "helix") if number % 2 else ("strand", "helix", "strand")
        places = [kind for kind in kinds for _ in range(8 + int(7 * draw()))]

        def sample(share):
            """-> (letters (L,) uint8, how many of them suit their place)."""
            ids, n_suit = [], 0
            for place in places:
                suits, other = draw() < share, "strand" if place == "helix" else "helix"
                some = neutral if draw() < 0.2 else letters[place if suits else other]
                n_suit += suits and some is not neutral
                ids.append(some[int(draw() * len(some))])
            return np.array(ids, np.uint8), n_suit

        n, everywhere = len(places), np.ones(len(places), bool)
        X = build_backbone(*zip(*(PHI_PSI[kind] for kind in places)))
        chain = Chain(sample(0.75)[0], X, everywhere, tuple(str(i + 1) for i in range(n)))
        complex = Complex(Structure(f"demo {number}", {"A": chain}), ["A"])
        while len(pairs) < (number + 1) * pairs_per_structure:
            (chosen, better), (rejected, worse) = sample(0.75), sample(0.25)
            if better - worse >= n / 5:
                pairs.append(Pair(complex, chosen, rejected, everywhere))
    return pairs
