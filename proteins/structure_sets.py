"""Many structures, read once into one file, to train a structure model on.

    lines = make_cache("runs/x/structures.pt", {"train": "folder/", "val": "list.csv"}, reading)
    sets = load_cache("runs/x/structures.pt")           # {"train": StructureSet, "val": ...}
    numbers, lines = choose_usable(sets["train"], max_length=10_000)
    train, val, lines = hold_out(sets["train"], numbers, fraction=0.1)
    structure = sets["train"].structure(train[0])       # proteins/structures.py: Structure

A source is a folder of PDB and mmCIF files, or a CSV list of them. The cache holds what was read of
all sources, which chains are alike, and which structures are of one family; it is made again, by
one rank, when a file, the reader or its settings have changed. Reads nothing else, and writes only
the cache.
"""
import hashlib
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gemmi
import numpy as np
import torch

from ddp_setup import load_checkpoint
from proteins.csv_files import read_rows, read_table_text, refuse_all, table_columns
from proteins.identity import MOST_ALIGNED, connected, draw_of, known_letters, relatives
from proteins.letters import X_ID, decode
from proteins.mutation_columns import column_of
from proteins.seeds import content_hash
from proteins.structure_files import FORMATS
from proteins.structures import Chain, Structure, read_structure
from training.files import write_whole
from training.problems import refuse

LEAST_RESOLVED = 20     # residues of a structure; fewer tell nothing of a fold
MOST_NAMED = 10         # files or columns in a message
LONGEST_REASON = 120    # letters, why a file cannot be read
MOST_MISSED = 2         # warn if the held-out share misses what was asked for by a larger factor
# Names of the column of a list with the chains to design, in any case.
CHAIN_COLUMNS = ("chain", "chains", "design_chains")
KIND = "structures read by proteins/structure_sets.py"      # tells a cache from other files
ZIP = b"PK"             # how a file of torch.save begins
# Residues of a chain: at 30 % identity a shorter one is like many by chance, one of nine like every
# tenth protein. So peptides would make one family of what they are bound to.
SHORTEST_COMPARED = 30
# What decides the content of the cache, so that a new version of it makes the cache again.
READER = ("structures.py", "structure_files.py", "residue_names.py", "identity.py",
          "structure_sets.py")


class Reading(NamedTuple):
    """How structures are read."""
    ca_only: bool = False       # for a CA-only model
    homologous: float = 0.7     # identity, from which chains of one structure are designed together
    identity: float = 0.3       # of chains, from which structures are of one family
    split: str | None = None    # the source that hold_out shall split: its families are found
    most_broken: float = 0.05   # share of the files of a source; if more cannot be read: refused


class StructureFile(NamedTuple):
    """A file of a folder or a list."""
    path: Path
    name: str                       # below the folder, or as in the list
    chains: tuple[str, ...] = ()    # that may be designed; (): all
    line: int = 0                   # of a list


class StructureSet:
    """n structures in flat arrays, with the protein chains of each in the order of their names.

    names:           list of n names of files.
    keys:            (n,) int64, Structure.key of each.
    lengths:         (n,) int64, rows of all chains, gaps included.
    resolved_counts: (n,) int64, resolved residues.
    groups:          list of n tuples, the groups of chains that are designed together; a group is a
        tuple of names. A chain that is in none is always context.
    sequences:       list of n lists, letters of each chain without X.
    families:        (n,) int64, the number of each structure's family; -1 if not asked for.
    ca_only, identity: as they were read.
    """

    def __init__(self, part: dict):
        self.names = part["names"]
        self.keys = part["keys"].numpy()
        self.families = part["families"].numpy()
        self.ca_only = part["ca_only"]
        self.identity = part["identity"]
        self._chain_names = part["chain_names"]
        self._S = part["S"].numpy()
        self._X = part["X"].numpy()
        self._resolved = part["resolved"].numpy()
        self._first_chain = np.append(0, part["n_chains"].numpy().cumsum())     # (n + 1,)
        self._first_row = np.append(0, part["n_rows"].numpy().cumsum())         # (chains + 1,)
        self.lengths = np.diff(self._first_row[self._first_chain])
        self.resolved_counts = self._sums(self._resolved)
        self.groups = self._groups_of(part["groups"].tolist())
        self.sequences = [[known_letters(decode(self._S[self._rows_of(chain)]))
                           for chain in self._chains_of(number)] for number in range(len(self))]

    def __len__(self) -> int:
        return len(self.names)

    def structure(self, number: int) -> Structure:
        """The structure of this number. Its chains have no residue numbers."""
        chains = {}
        for chain in self._chains_of(number):
            rows = self._rows_of(chain)
            S = self._S[rows]
            chains[self._chain_names[chain]] = Chain(S, self._X[rows], self._resolved[rows],
                                                     (None,) * len(S))
        return Structure(self.names[number], chains, self.ca_only)

    def _chains_of(self, number):
        return range(self._first_chain[number], self._first_chain[number + 1])

    def _rows_of(self, chain):
        return slice(self._first_row[chain], self._first_row[chain + 1])

    def _sums(self, values):
        """(n,) int64 sums over the rows of each structure."""
        sums = np.append(0, np.cumsum(values, dtype=np.int64))
        return np.diff(sums[self._first_row[self._first_chain]])

    def _groups_of(self, numbers):
        """The groups of each structure that have a residue to learn from.

        numbers: of the group of each chain, within its structure; -1: never designed."""
        sums = np.append(0, np.cumsum(self._resolved & (self._S != X_ID)))
        n_known = np.diff(sums[self._first_row])
        groups = []
        for number in range(len(self)):
            members = {}        # number of a group -> names, in their order
            has_residues = set()
            for chain in self._chains_of(number):
                members.setdefault(numbers[chain], []).append(self._chain_names[chain])
                if n_known[chain]:
                    has_residues.add(numbers[chain])
            groups.append(tuple(tuple(names) for group, names in members.items()
                                if group >= 0 and group in has_residues))
        return groups


# ---- sources ----

def find_structures(source: str | Path) -> list[StructureFile]:
    """The files of a source.

    A folder: all files in it and its folders with a name in FORMATS, or one of these with .gz, in
    the order of their names; names that begin with a dot are passed over. A list: CSV with a column
    `pdb_file`, relative to the list, and perhaps one of CHAIN_COLUMNS, names with blanks between
    them.
    Raises: ValueError for another path, none of such files, or a wrong line of a list."""
    source = Path(source)
    if source.is_dir():
        return find_in_folder(source)
    if not source.is_file():
        raise ValueError(f"{source} is not there; expected a folder of structures "
                         f"({' '.join(FORMATS)}, perhaps .gz), or a list of them in CSV.")
    if has_format(source):
        raise ValueError(f"{source} is one structure; expected its folder, or a list in CSV with "
                         "a column pdb_file.")
    return find_in_list(source)


def find_in_folder(folder):
    """List of StructureFile. Raises: ValueError if there are none."""
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if has_format(path) and not name.startswith(".") and path.is_file():
                files.append(StructureFile(path, path.relative_to(folder).as_posix()))
    if not files:
        raise ValueError(f"{folder} has no structures; expected files with a name in "
                         f"{' '.join(FORMATS)}, or one of these with .gz.")
    return sorted(files, key=lambda file: file.name)


def find_in_list(source):
    """List of StructureFile, in the order of the lines. Raises: ValueError for wrong lines."""
    files = []
    problems = []
    line_of = {}        # path -> line
    columns, _ = list_columns(source)
    for line, cells in read_rows(source, required=("pdb_file",), names=columns):
        name = cells["pdb_file"]
        path = source.parent / name
        chains = tuple(dict.fromkeys(re.findall(r"[^\s,;]+", cells.get("chains", ""))))
        if not name or not path.is_file():
            problems.append(f"line {line}: there is no file {name or '(empty)'}")
        elif not has_format(path):
            problems.append(f"line {line}: {name} has no name in {' '.join(FORMATS)}, .gz")
        elif path.resolve() in line_of:
            problems.append(f"line {line}: {name} is in line {line_of[path.resolve()]}, too")
        else:
            line_of[path.resolve()] = line
            files.append(StructureFile(path, name, chains, line))
    refuse_all(source, problems, expected="each structure once, by a path relative to the list")
    if not files:
        raise ValueError(f"{source} has no lines below its columns; expected a structure in each.")
    return files


def list_columns(source):
    """({column of a list: its name here, pdb_file or chains}, list of its other columns).

    Raises: ValueError for several columns of chains."""
    columns = table_columns(read_table_text(source))
    found = {column_of(source, columns, ["pdb_file"]): "pdb_file",
             column_of(source, columns, CHAIN_COLUMNS): "chains"}
    found.pop(None, None)
    return found, [column for column in columns if column and column not in found]


def has_format(path):
    """Whether a file's name is one of a structure."""
    return Path(path.name.lower().removesuffix(".gz")).suffix in FORMATS


# ---- the cache ----
#
#   rank 0        make_cache: hash the files; where the cache has another hash, read them; write
#   all ranks                                                          wait  load_cache
#
#   in the file   for each source:   names, keys     a structure each
#                                    n_chains        a a b c c c      chains of all structures
#                                    n_rows          ----- -- ------- rows of all chains: S, X

def make_cache(cache: str | Path, sources: dict[str, str | Path], reading: Reading,
               alive: Callable = lambda: None,
               progress: Callable = lambda items, text: items) -> list[str]:
    """Make sure that `cache` holds the structures of all sources, as they are now.

    For one rank; the others wait, minutes if there are thousands of files, and then call
    load_cache. Files that cannot be read are left out and named.

    Args:
        sources:  {name of your choice: folder or list}.
        alive:    called now and then, to show a watchdog that work continues.
        progress: function (items, text) -> iterator over the items that shows how many are done.
    Returns: lines to print.
    Raises: ValueError for sources that cannot be used, and for a file that is no cache; OSError.
        Nothing is written then.
    """
    cache = Path(cache)
    files_of = {name: find_structures(source) for name, source in sources.items()}
    former, lines = read_former(cache)
    parts = {}
    has_changed = former.keys() != sources.keys()
    for name, source in sources.items():
        files = files_of[name]
        identity = reading.identity if name == reading.split else None
        content = hash_files(files, [reading.ca_only, reading.homologous, identity], alive)
        part = former.get(name)
        origin = f"from {cache}"
        if part is None or part["content"] != content:
            part = read_part(source, files, reading, alive, progress)
            part["content"] = content
            part["families"] = number_families(part, identity, alive, progress)
            part["identity"] = identity
            origin = f"kept in {cache}"
            has_changed = True
        check_broken(source, part["broken"], len(files), reading.most_broken)
        parts[name] = part
        lines += describe_part(name, source, part, origin)
        lines += describe_unused(source)
    if has_changed:
        write_whole(cache, lambda file: torch.save({"kind": KIND, "parts": parts}, file))
    return lines


def load_cache(cache: str | Path) -> dict[str, StructureSet]:
    """{name of a source: StructureSet} of a file of make_cache.

    Raises: ValueError if it is missing, damaged, or another file."""
    content = load_checkpoint(cache)
    if not is_cache(content):
        raise ValueError(f"{cache} holds no structures; expected a file of make_cache.")
    return {name: StructureSet(part) for name, part in content["parts"].items()}


def is_cache(content):
    """Whether what a file of torch.save holds is from make_cache."""
    return isinstance(content, dict) and content.get("kind") == KIND


def read_former(cache):
    """(parts of a cache that is there, lines). A damaged one has none.

    Raises: ValueError for another file, which writing would destroy."""
    if not cache.exists():
        return {}, []
    try:
        content = load_checkpoint(cache)
    except ValueError:
        with open(cache, "rb") as file:
            beginning = file.read(len(ZIP))
        if beginning and beginning != ZIP:
            content = None
        else:
            return {}, [f"ATTENTION: {cache} is damaged and is made again"]
    if not is_cache(content):
        raise ValueError(f"{cache} is no cache of structures, and would be overwritten; expected "
                         "the name of a new file, or of one that data.cache has made.")
    return content["parts"], []


def hash_files(files, settings, alive):
    """Hash of the names, chains and contents of files, of settings, and of the code that reads."""
    digests = [hashlib.blake2b(Path(__file__).with_name(name).read_bytes()).hexdigest()
               for name in READER]
    for file in files:
        alive()
        try:
            digest = hashlib.blake2b(file.path.read_bytes(), digest_size=16).hexdigest()
        except OSError as error:        # it is then named as broken
            digest = str(error)
        digests.append([file.name, file.chains, digest])
    return content_hash([gemmi.__version__, settings, digests], n_bytes=16)


def read_part(source, files, reading, alive, progress):
    """What the cache holds of a source, but its families. Raises: ValueError for a chain of a list
    that a file lacks, and see check_broken."""
    names = []
    keys = []
    chain_names = []
    chains = []
    n_chains = []
    groups = []
    broken = []
    problems = []
    for file in progress(files, f"reading structures of {source}"):
        alive()
        try:
            structure = read_proteins(file.path, reading.ca_only)
        except (ValueError, OSError) as error:
            broken.append(f"{file.name} ({one_line(str(error), file)})")
            continue
        missing = [name for name in file.chains if name not in structure.chains]
        if missing:
            there = " ".join(name.strip() or "(blank)" for name in structure.chains) or "none"
            problems.append(f"line {file.line}: {file.name} has no protein chain "
                            f"{' '.join(missing)}; there are: {there}")
        names.append(file.name)
        keys.append(structure.key)
        chain_names += structure.chains
        chains += structure.chains.values()
        n_chains.append(len(structure.chains))
        groups += number_groups(structure, file.chains, reading.homologous)
    refuse_all(source, problems)
    check_broken(source, broken, len(files), reading.most_broken)
    return {"names": names, "keys": integers(keys), "chain_names": chain_names,
            "n_chains": integers(n_chains), "n_rows": integers([len(one.S) for one in chains]),
            "groups": integers(groups), "broken": broken, "ca_only": reading.ca_only,
            "S": torch.from_numpy(np.concatenate([one.S for one in chains])),
            "X": torch.from_numpy(np.concatenate([one.X for one in chains])),
            "resolved": torch.from_numpy(np.concatenate([one.resolved for one in chains]))}


def integers(values):
    return torch.tensor(values, dtype=torch.int64)


def read_proteins(path, ca_only):
    """Structure of the chains that have a resolved residue, sorted by name: nucleic acids have rows
    without coordinates, of which a model sees nothing."""
    whole = read_structure(path, ca_only)
    chains = {name: chain for name, chain in sorted(whole.chains.items()) if chain.resolved.any()}
    if not chains:
        raise ValueError(f"it has no protein residue with {whole.needed}")
    return Structure(whole.name, chains, ca_only)


def one_line(text, file):
    """A reason without the path: as many of its sentences as are short enough, or the beginning of
    the first."""
    text = " ".join(text.split()).replace(f"{file.path} cannot be read: ", "")
    if len(text) <= LONGEST_REASON:
        return text
    sentences, ends, _ = text[:LONGEST_REASON].rpartition(". ")
    if ends:
        return sentences
    return textwrap.shorten(text, LONGEST_REASON, placeholder=" ...")


def check_broken(source, broken, n_files, most_broken):
    """ValueError if more than a share of the files cannot be read, or none can."""
    n_read = n_files - len(broken)
    if n_read and len(broken) <= most_broken * n_files:
        return
    why = "and there is no other"
    if n_read:
        why = f"more than data.most_broken {most_broken:g} of them, which may be raised"
    refuse(broken, f"{source}: {len(broken):,} of {count(n_files, 'file')} cannot be read, {why}. "
                   "Remove or mend these:", MOST_NAMED)


def count(n, thing):
    """A number of things, in words."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def first_of(texts):
    """The first ones, and how many more there are: a list of texts."""
    if len(texts) <= MOST_NAMED:
        return texts
    return [*texts[:MOST_NAMED], f"and {len(texts) - MOST_NAMED:,} more"]


def describe_part(name, source, part, origin):
    """Lines on a source."""
    n_rows = int(part["n_rows"].sum())
    n_chains = len(part["n_rows"])
    n_designed = sum(len(group) for groups in StructureSet(part).groups for group in groups)
    lines = [f"{name}: {source}: {count(len(part['names']), 'structure')}, "
             f"{count(n_chains, 'chain')}: {n_designed:,} designed, {n_chains - n_designed:,} "
             f"context; {count(n_rows, 'row')}, {origin}"]
    if part["broken"]:
        lines.append(f"ATTENTION: {count(len(part['broken']), 'file')} of {source} cannot be read, "
                     "so left out:")
        lines += [f"  {text}" for text in first_of(part["broken"])]
    return lines


def describe_unused(source):
    """A line on columns of a list that are not used."""
    if Path(source).is_dir():
        return []
    _, unused = list_columns(Path(source))
    if not unused:
        return []
    return [f"  not used, columns of {source}: {', '.join(first_of(unused))}"]


# ---- chains that are alike ----

def number_groups(structure, may_design, share):
    """List of a number for each chain: equal ones are designed together; -1: never designed.

    Chains with an identity of `share` or more are alike: beside one, the other would tell its
    letters. So a chain that is like one to design is designed, too.

    may_design: names; (): all."""
    letters = [known_letters(decode(chain.S)) for chain in structure.chains.values()]
    numbers = number_by_relatives([[text] for text in letters], share)
    designed = {number for number, name in zip(numbers, structure.chains)
                if not may_design or name in may_design}
    return [number if number in designed else -1 for number in numbers]


def number_families(part, identity, alive, progress):
    """(n,) int64, a number for each structure: equal for those of one family.

    Two structures are relatives if a chain of one is a relative of a chain of the other, and a
    family are all that are connected by relatives. A chain of fewer than SHORTEST_COMPARED residues
    is a relative of equal ones alone. identity: None: -1, they are not needed."""
    n = len(part["names"])
    if identity is None:
        return torch.full((n,), -1)
    structures = StructureSet({**part, "families": torch.full((n,), -1), "identity": identity})
    return integers(number_by_relatives(structures.sequences, identity, alive, progress,
                                        SHORTEST_COMPARED))


def number_by_relatives(sequences, share, alive=lambda: None,
                        progress=lambda items, text: items, shortest=0):
    """List of a number for each of n things: equal for those that are connected by relatives.

    sequences: of each thing, a list of texts without X. An empty one has no relatives, and one
    shorter than `shortest` those that are equal."""
    distinct = sorted({text for texts in sequences for text in texts if text})
    place = {text: len(sequences) + number for number, text in enumerate(distinct)}
    pairs = [(number, place[text]) for number, texts in enumerate(sequences)
             for text in texts if text]
    compared = [text for text in distinct if len(text) >= shortest]
    for one, other in relatives(compared, share, alive, progress):
        pairs.append((place[compared[one]], place[compared[other]]))
    numbers = [-1] * len(sequences)
    for family, members in enumerate(connected(len(sequences) + len(distinct), pairs)):
        for member in members:
            if member < len(sequences):
                numbers[member] = family
    return numbers


# ---- which structures are used ----

def choose_usable(structures: StructureSet, max_length: int) -> tuple[np.ndarray, list[str]]:
    """(Numbers of the structures that can be used, lines on those that are left out).

    Left out are those with more rows than max_length, with fewer than LEAST_RESOLVED resolved
    residues, without a known residue in the chains to design, or equal to one before them, such as
    an entry that is there as PDB and as mmCIF.
    Raises: ValueError if none is left."""
    is_long = structures.lengths > max_length
    is_short = structures.resolved_counts < LEAST_RESOLVED
    is_empty = np.array([not groups for groups in structures.groups], bool)
    is_copy = find_first(structures) < np.arange(len(structures))
    is_copy &= ~(is_long | is_short | is_empty)
    reasons = []
    for n, words in ((is_long.sum(), f"longer than data.max_length {max_length:,} rows"),
                     ((is_short & ~is_long).sum(), f"with fewer than {LEAST_RESOLVED} resolved "
                                                   "residues"),
                     ((is_empty & ~is_short & ~is_long).sum(), "without a residue to design"),
                     (is_copy.sum(), f"equal to another ({describe_copies(structures, is_copy)})")):
        if n:
            reasons.append(f"{n:,} {words}")
    numbers = np.flatnonzero(~(is_long | is_short | is_empty | is_copy))
    if not len(numbers):
        raise ValueError(f"none of {count(len(structures), 'structure')} can be used: "
                         f"{', '.join(reasons)}; expected some.")
    if not reasons:
        return numbers, []
    return numbers, [f"  left out: {', '.join(reasons)}"]


def find_first(structures):
    """(n,) int64, for each structure the number of the first that is equal in letters, coordinates
    and groups: often its own."""
    first_of_content = {}       # (key, groups) -> number
    contents = zip(structures.keys.tolist(), structures.groups)
    return np.array([first_of_content.setdefault(content, number)
                     for number, content in enumerate(contents)], np.int64)


def describe_copies(structures, is_copy):
    """Text on the structures that are equal to one before them. is_copy: (n,) bool."""
    first = find_first(structures)
    names = structures.names
    return "; ".join(first_of([f"{names[number]} is {names[first[number]]}"
                               for number in np.flatnonzero(is_copy)]))


def hold_out(structures: StructureSet, numbers: np.ndarray, fraction: float,
             left_out: str = "") -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(Numbers to train on, numbers to validate with, lines): whole families are held out.

    Families come in an order that their sequences alone decide, and each is held out that fits into
    what is left of the fraction; one at least is.

    Args:
        structures: with families, see Reading.split.
        fraction:   of the structures.
        left_out:   text on the structures that are not among the numbers, for a refusal.
    Raises: ValueError if all are of one family."""
    families, sizes = np.unique(structures.families[numbers], return_counts=True)
    if len(families) < 2:
        refuse_split(len(numbers), structures.identity, left_out)
    texts = letters_of_families(structures, numbers)
    draws = np.array([draw_of(texts[family]) for family in families])
    left = max(fraction * len(numbers), sizes.min())
    held = []
    for place in np.argsort(draws):
        if sizes[place] <= left:
            held.append(families[place])
            left -= sizes[place]
    is_val = np.isin(structures.families[numbers], held)
    train = numbers[~is_val]
    val = numbers[is_val]
    lines = [f"  {count(len(train), 'structure')} for training, {len(val):,} of other families for "
             f"validation (of {len(families):,}; identity of chains below "
             f"{structures.identity:.0%}; the largest has {count(int(sizes.max()), 'structure')})"]
    share = len(val) / len(numbers)
    if not fraction / MOST_MISSED <= share <= fraction * MOST_MISSED:
        lines.append(f"ATTENTION: {share:.0%} of the structures are held out for validation, but "
                     f"data.val_fraction asks for {fraction:.0%}: families stay together. Give "
                     "data.val_structures, or a higher data.identity.")
    n_chains = len({text for texts in structures.sequences for text in texts})
    if n_chains > MOST_ALIGNED:
        lines.append(f"ATTENTION: of more than {MOST_ALIGNED:,} different chains only equal ones "
                     "are kept together, so relatives may be on both sides. Cluster them by a tool "
                     "such as MMseqs2, and give data.val_structures.")
    return train, val, lines


def refuse_split(n, identity, left_out):
    """ValueError for n structures of one family."""
    found = "there is one structure, which cannot be split"
    higher = ""
    if n > 1:
        found = (f"all {n:,} structures are of one family, connected by chains of {identity:.0%} "
                 "identity or more, as those of all antibodies are")
        higher = "a higher data.identity, such as 0.9, "
    before = f"{left_out.strip()}; " if left_out else ""
    raise ValueError(f"{before}{found}; expected two families or more. Give other structures for "
                     f"validation (data.val_structures), {higher}or data.val_fraction=0 to train "
                     "without validation.")


def letters_of_families(structures, numbers):
    """{family: text of the different sequences of its chains}."""
    letters = {}
    for number in numbers:
        letters.setdefault(int(structures.families[number]), set()).update(
            structures.sequences[number])
    return {family: "\n".join(sorted(texts)) for family, texts in letters.items()}


def describe_shared(structures: StructureSet, numbers: np.ndarray, others: StructureSet,
                    other_numbers: np.ndarray, name: str = "validation") -> list[str]:
    """A line of warning if structures that are not trained on, the others, have a chain of
    training. name: of the others."""
    known = {text for number in numbers for text in structures.sequences[number]
             if len(text) >= LEAST_RESOLVED}
    shared = [others.names[number] for number in other_numbers
              if known.intersection(others.sequences[number])]
    if not shared:
        return []
    has = "has" if len(shared) == 1 else "have"
    return [f"ATTENTION: {count(len(shared), 'structure')} of {name} {has} a chain that is in "
            f"training, first {shared[0]}: {name} does not tell about new proteins"]


def fingerprint(structures: StructureSet, numbers: np.ndarray) -> dict:
    """{"n", "hash"} of what is used of structures: their contents and groups, not their names."""
    content = [(int(structures.keys[number]), structures.groups[number]) for number in numbers]
    return {"n": len(content), "hash": content_hash(content)}
