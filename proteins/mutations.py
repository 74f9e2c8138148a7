"""Lists and tables of mutations: read, checked, placed on the proteins that they name.

    table = read_mutations("s2648.csv", measured="ddg")
    proteins, note = place_all(table)               # a Protein for each structure and chain
    protein = scan_sequence("mine", "MKTAYIAKQ")    # all single mutations

A list has one variant per line, such as A12V or A12V:G45D; text after # is left out. A table (CSV,
commas or tabs) has a column `mutation` with such variants, and perhaps pdb_file (path, relative to
the folder of the table), chain (which is mutated, where the text does not name it), context (names
of other chains, such as "B C", that the model shall see), partners (the two sides whose binding
changes: proteins/partners.py), or sequence (of the wild type, where there is no structure), and any
others. Other names of columns: proteins/mutation_columns.py. How a variant is written:
proteins/notation.py. In which chains its mutations are: proteins/places.py. Rows that are no
substitution, as a mutational scan has them, are counted by their kind and left out; that of the
wild type gives the protein its value. Writes nothing. No model here.
"""
from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proteins.copies import EQUAL, choose_copies, group_of
from proteins.csv_files import MAX_LISTED, is_limit, is_no_value, read_number, refuse_all
from proteins.letters import AMINO_ACIDS, LETTERS, decode, encode
from proteins.mutation_columns import mutation_text, read_lines
from proteins.notation import (
    EXPECTED,
    PLURALS,
    WILD_TYPE,
    Mutation,
    UnreadableVariant,
    read_variant,
)
from proteins.numbering import NamedSites, describe_misnumbered
from proteins.partners import choose_partners, distances_between, have_sides
from proteins.places import (
    Located,
    Misfit,
    Options,
    Place,
    Variant,
    choose_complex,
    choose_place,
    content_of,
    find_changes,
    has_residue,
    locate,
    name_place,
    with_copies,
)
from proteins.sequences import is_nucleotides
from proteins.structures import Chain, Complex, Structure, parse_positions, read_structure

SHOWN = 8               # letters of a sequence that stand for its name
MERGED = "in each row (of cells that were merged, the first alone has it)"


class MutationTable(NamedTuple):
    """A list or table of variants."""
    path: Path
    variants: list[Variant]
    wild_types: list[Variant]           # lines of the wild type that have a value
    left_out: str                       # text on what is left out, or has no value; "": nothing

    @property
    def names_structures(self) -> bool:
        return "pdb_file" in self.variants[0].cells

    @property
    def structures(self) -> list[Path]:
        """The files that it names, each once."""
        files = dict.fromkeys(line.pdb_file for line in [*self.variants, *self.wild_types])
        return [file for file in files if file is not None]

    @property
    def has_sequences(self) -> bool:
        """Whether wild types are given as sequences, and no structures."""
        return "sequence" in self.variants[0].cells and not self.names_structures


class Protein(NamedTuple):
    """A structure, or a sequence alone, with variants of one of its chains, or of several that they
    name, that are copies or partners, or that are scanned."""
    name: str                   # path as in the table or on the command line; of a sequence: any
    structure: Structure        # of a sequence: one chain A, all coordinates 0
    complex: Complex            # the mutated chains first, then their context
    variants: list[Variant]
    changes: list[list[tuple[int, int]]]    # of each variant: (row of the complex, letter 0 to 19)
    wild_types: tuple[float, ...] = ()      # measured values of the wild type, of its lines
    partners: tuple[Complex, ...] = ()      # of variants of binding: the two sides, each alone

    @property
    def wild_type(self) -> float:
        """The wild type's value, the mean of its lines; nan: there is none."""
        return statistics.fmean(self.wild_types) if self.wild_types else math.nan

    @property
    def chain(self) -> str:
        """The mutated chain, of several the first."""
        return self.complex.design[0]

    @property
    def has_structure(self) -> bool:
        return bool(self.complex.X.any())

    @property
    def sequence(self) -> str:
        """Letters of this chain, X for what is not known."""
        return decode(self.structure.chains[self.chain].S)


class Placement(NamedTuple):
    """Variants of a table on a protein, which has those that fit."""
    protein: Protein
    chosen: Place
    located: list[Located]              # all of them
    wild_types: list[Variant]           # lines that give it a value
    misfits: list[tuple[Variant, Misfit]]   # and why it does not fit
    lacking: list[tuple[str, str]]      # (chain, number) of residues that copies lack

    def where(self, chain: str) -> str:
        """A text that names a chain or sequence."""
        if not self.protein.has_structure:
            return self.protein.name
        return f"chain {chain} of {self.protein.name}"


def read_mutations(path: str | Path, measured: str | None = None) -> MutationTable:
    """Read a list or table of variants.

    Args:
        measured: column of measured values. An empty cell there is no value, and so are the words
            for it (NA, n.d.) and limits (>5).
    Raises: ValueError that lists the problems by line.
    """
    path = Path(path)
    lines = read_lines(path, measured)
    variants = []
    wild_types = []
    counts = Counter()      # of what is left out, or lacks a value
    problems = []
    expected = ""           # where a mutation cannot be read
    files = {}
    for line, cells in lines.rows:
        try:
            reading = read_variant(mutation_text(cells, lines.parts), lines.is_list)
            counts[reading.left_out] += 1
            counts[SILENT] += len(reading.silent)
            counts[REPEATED] += reading.n_repeated
            if reading.left_out and reading.left_out != WILD_TYPE:
                continue
            value, lack = read_value(cells, measured)
            if reading.mutations:
                counts[lack] += 1
                variants.append(Variant(line, cells, reading.mutations, value,
                                        structure_file(path, cells, files), reading.silent))
            elif math.isfinite(value):
                file = structure_file(path, cells, files) if cells.get("pdb_file") else None
                wild_types.append(Variant(line, cells, (), value, file))
        except UnreadableVariant as error:
            expected = f"{EXPECTED}. {lines.unused}".rstrip(". ")
            problems.append(f"line {line}: {error}")
        except ValueError as error:
            problems.append(f"line {line}: {error}")
    refuse_all(path, problems, expected=expected)
    left_out = describe_left_out(path, counts, measured)
    if not variants:
        nothing = left_out or f"{path} holds no variant"
        raise ValueError(f"{nothing}; expected one per line, such as A12V or A12V:G45D.")
    return MutationTable(path, variants, wild_types, left_out)


def place_all(  # noqa: PLR0913  (what lines may leave open)
        table: MutationTable, structure: str | Path | None = None, chain: str | None = None,
        fixed: list[str] | None = None, see_all: bool = True, ca_only: bool = False,
        option: str = "", copies: list[str] | None = None,
        partners: str = "") -> tuple[list[Protein], str]:
    """Find the residues of the variants; those of one structure, of the same chains and context, or
    the same partners, are a Protein.

    A copy of a structure in another file is the same structure.

    Args:
        structure: path, for a table that names none.
        chain:     name, for mutations of which neither line nor text gives it. Optional for
            structures of one protein chain.
        fixed:     names of the context chains, for lines that give none.
        see_all:   if neither says which: take all other protein chains as context, or none.
        ca_only:   read structures for a CA-only model.
        option:    words on the option of the caller that names the chain, for a message.
        copies:    names of equal chains, into all of which a mutation of one goes; []: those that
            the structure shows; None: a mutation is in its own chain alone.
        partners:  such as HL_A (proteins/partners.py), for lines that give none; "": none.
    Returns: proteins in the order of the table; a text on partners and copies, and on what is left
        out because it does not fit its structure or is no substitution, or "".
    Raises: ValueError for a table without structures, for those that cannot be read, absent chains,
        if none is left, and where so few fit that the numbers are hardly those of the structure,
        see describe_misnumbered.
    """
    if structure is None and not table.names_structures:
        raise ValueError(f"{table.path} has no column pdb_file; expected it, with the path of the "
                         "structure in each line, relative to the table.")
    options = Options(structure, chain, fixed, see_all, copies, partners, option)
    files = {}          # path -> Structure
    groups = {}         # content of chains -> (their Place, located variants)
    problems = []
    for named, variants in variants_by_place(table, options).items():
        try:
            chosen, only_chain = choose_place(named, read_once(named.path, ca_only, files),
                                              variants[0], options)
        except (ValueError, OSError) as error:
            problems.append(f"line {variants[0].line}: {error}")
            continue
        content = content_of(chosen.complex, chosen.partners)
        located = [locate(variant, options, only_chain) for variant in variants]
        groups.setdefault(content, (chosen, []))[1].extend(located)
    keys = {chosen.complex.structure.key for chosen, _ in groups.values()}
    the_only_key = keys.pop() if len(keys) == 1 else None
    wild_types = []     # (key of their structure, line)
    for line in table.wild_types:
        path = structure or line.pdb_file
        try:
            key = read_once(Path(path), ca_only, files).key if path else the_only_key
            wild_types.append((key, line))
        except (ValueError, OSError) as error:
            problems.append(f"line {line.line}: {error}")
    refuse_all(table.path, problems)
    placements = []
    for chosen, located in groups.values():
        located.sort(key=lambda one: one.variant.line)
        shown = located[0].variant.cells.get("pdb_file", str(structure))
        protein = Protein(shown, chosen.complex.structure, chosen.complex, [], [],
                          partners=chosen.partners)
        own = [line for key, line in wild_types
               if key == chosen.complex.structure.key and is_wild_type_of(line, chosen)]
        placements.append(place(protein, located, own, chosen))
    understood = describe_partners(placements) + describe_copies(table, placements, options)
    return what_fits(table, placements, understood)


def place_on_sequences(table: MutationTable, wild_type: tuple[str, str] | None = None
                       ) -> tuple[list[Protein], str]:
    """As place_all, of a table whose column `sequence` has the wild type of each mutation. Its
    residues are numbered from 1. There is no structure: all coordinates are 0.

    wild_type: (name, sequence) of the only one, for a list, which names none."""
    groups = {}
    for variant in table.variants:
        groups.setdefault(sequence_of(variant, wild_type), []).append(variant)
    placements = []
    problems = []
    for number, (text, variants) in enumerate(groups.items(), 1):
        beginning = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        name = wild_type[0] if wild_type else f"protein {number} ({beginning})"
        try:
            if not text:
                raise ValueError(f"found an empty cell as sequence; expected letters {MERGED}")
            check_one_chain(variants)
            protein = protein_of_sequence(name, text)
        except ValueError as error:
            problems.append(f"line {variants[0].line}: {error}")
            continue
        own = [line for line in table.wild_types
               if sequence_of(line, wild_type) == text
               or len(groups) == 1 and not sequence_of(line, wild_type)]
        located = [Located(variant, (protein.chain,) * len(variant.mutations + variant.silent))
                   for variant in variants]
        placements.append(place(protein, located, own, Place(protein.complex)))
    refuse_all(table.path, problems)
    return what_fits(table, placements, [])


def scan_structure(  # noqa: PLR0913  (what may be chosen of a structure)
        path: str | Path, chains: list[str] | None = None, fixed: list[str] | None = None,
        positions: list[str] | None = None, see_all: bool = True, ca_only: bool = False,
        partners: str = "", interface: float | None = None,
        copies: list[str] | None = None) -> tuple[list[Protein], str]:
    """All single mutations of a structure: at each resolved residue the 19 other letters.

    Args:
        chains:    names of those to mutate; None: all that are not fixed.
        fixed:     names of the context chains; None: all others.
        positions: the only ones to mutate, texts such as A10-A20; None: all.
        see_all:   one Protein of all chains together; False: one of each chain alone.
        ca_only:   read the structure for a CA-only model.
        partners:  such as HL_A, of whose binding the mutations are (proteins/partners.py).
        interface: Angstrom; with partners, the only residues to mutate are those with a backbone
            atom within it of one of the other partner.
        copies:    as of place_all.
    Returns: the Proteins, and a text on how positions, partners and copies were understood, or "".
    Raises: ValueError.
    """
    structure = read_structure(path, ca_only)
    scan = choose_scan(structure, chains, fixed, partners, copies)
    labels = [(name, number) for name in scan.names for number in structure.chains[name].numbers]
    wanted = range(len(labels))
    notes = []
    if positions:
        wanted, note = parse_positions(" ".join(positions), structure, scan.names)
        notes.append(note)
    wanted = [labels[position] for position in wanted]
    if positions:
        notes += describe_unmutated(wanted, structure, scan.groups)
    wanted = [label for label in wanted if label[1]]
    wanted = keep_interface(wanted, scan.partners, interface, notes)
    proteins = []
    lacking = []
    for part in [scan.whole] if see_all else scan.parts:
        protein = Protein(str(path), structure, part, [], [], partners=scan.partners)
        lacking += scan_residues(protein, wanted, scan.groups)
        if protein.variants:
            proteins.append(protein)
    if not proteins:
        raise ValueError(f"{path}: found no residue to mutate; expected some with one of the 20 "
                         f"letters and {structure.needed}.")
    if scan.groups:
        mutated = {variant.cells["chain"] for protein in proteins for variant in protein.variants}
        used = [group for group in scan.groups if mutated & set(group)]
        refuse_no_copies(structure, sorted(mutated), used)
        notes.append(copies_text([" ".join(group) for group in used], lacking))
    return proteins, "; ".join(notes)


class Scan(NamedTuple):
    """What of a structure is scanned."""
    whole: Complex
    names: list[str]                    # of the chains to mutate
    parts: list[Complex]                # each chain alone, with its copies
    partners: tuple[Complex, ...]
    groups: list[tuple[str, ...]]       # of these chains and their copies


def choose_scan(structure, chains, fixed, partners, copies):
    """The Scan of a structure; see scan_structure."""
    sides = ()
    if partners:
        if fixed:
            raise ValueError(f"found {' '.join(fixed)} as context, and the partners {partners}; "
                             "expected none, as the model sees the chains of the partners alone")
        sides = choose_partners(partners, structure)
        whole = Complex(structure, [name for side in sides for name in side.design])
        names = chains or list(whole.design)
        others = [name for name in names if name not in whole.design]
        if others:
            raise ValueError(f"found chain {others[0]} to mutate; expected one of the partners "
                             f"{partners}")
    else:
        whole = choose_complex(structure, chains, fixed)
        names = chains or list(whole.design)
    groups = choose_copies(structure, whole.design if sides else structure.protein_chains, copies)
    groups = [group for group in groups if set(group) & set(names)]
    if copies is not None:
        refuse_no_copies(structure, names, groups)
    if groups and not sides:
        whole = with_copies(structure, names, fixed, groups)
    parts = [Complex(structure, group)
             for group in dict.fromkeys(group_of(name, groups) for name in names)]
    return Scan(whole, names, parts, sides, groups)


def refuse_no_copies(structure, names, groups):
    """ValueError if there are no groups of copies of the chains of these names."""
    if not groups:
        raise ValueError(f"{structure.name}: found no copies of the chains {' '.join(names)}; "
                         f"expected {EQUAL}.")


def describe_unmutated(wanted, structure, groups):
    """List of a text on the (chain, number) that are wanted and cannot be mutated; number None: of
    a gap. Of copies (groups) one is enough."""
    texts = []
    for name, number in wanted:
        names = group_of(name, groups)
        if number is None:
            texts.append(f"a gap of {name}")
        elif not any(has_residue(structure.chains[other], number) for other in names):
            texts.append(f"{name}{number}")
    if not texts:
        return []
    shown = ", ".join(dict.fromkeys(texts[:MAX_LISTED]))
    if len(texts) > MAX_LISTED:
        shown += " and more"
    return [f"{len(texts):,} of these are not mutated, as they lack a letter or {structure.needed}"
            f": {shown}"]


def keep_interface(wanted, partners, interface, notes):
    """The (chain, number) that are wanted, and near the other partner. Adds a note. Raises:
    ValueError if none is."""
    if interface is None:
        return wanted
    if not partners:
        raise ValueError(f"found an interface of {interface:g} Angstrom without partners; expected "
                         "both")
    distances = distances_between(partners)
    kept = [label for label in wanted if distances[label] <= interface]
    nearest = min((distances[label] for label in wanted), default=math.inf)
    if not kept and math.isfinite(nearest):
        raise ValueError(f"found no residue to mutate within {interface:g} Angstrom of the other "
                         f"partner; the nearest is {nearest:.1f} Angstrom away. Expected some: "
                         "give a larger --interface.")
    notes.append(f"{len(kept):,} of {len(wanted):,} residues are within {interface:g} Angstrom of "
                 "the other partner")
    return kept


def scan_residues(protein, wanted, groups):
    """Add all single mutations of the residues that are wanted, as (chain, number), to the
    protein; of equal chains (groups) each once. Returns texts on residues that copies lack."""
    chains = protein.structure.chains
    done = set()
    lacking = []
    for name, number in wanted:
        group = group_of(name, groups)
        if name not in protein.complex.design or (group, number) in done:
            continue
        done.add((group, number))
        names = [other for other in group if has_residue(chains[other], number)]
        if not names:
            continue
        rows = [protein.complex.first_row(other) + chains[other].row_of(number)
                for other in names]
        chain = name if name in names else names[0]
        add_all_letters(protein, rows, number, {"chain": chain})
        lacking += [f"{other}{number}" for other in group if other not in names]
    return lacking


def scan_sequence(name: str, text: str) -> Protein:
    """All single mutations of a sequence: at each place, from 1, the 19 other letters.

    name: of the sequence, for messages. Raises: ValueError."""
    try:
        protein = protein_of_sequence(name, text)
    except ValueError as error:
        raise ValueError(f"{name:.60}: {error}") from None
    chain = protein.structure.chains["A"]
    for row, number in enumerate(chain.numbers):
        add_all_letters(protein, [row], number, {})
    if not protein.variants:
        raise ValueError(f"{name:.60}: found no residue to mutate; expected some of the 20 "
                         "letters.")
    return protein


def add_all_letters(protein, rows, number, cells):
    """Add the variants of a residue, unless its letter is not known.

    rows: of the complex, several of copies. number: of the residue. cells: {column: text} of these
    variants, besides the mutation."""
    wild_type = LETTERS[protein.complex.S[rows[0]]]
    if wild_type not in AMINO_ACIDS:
        return
    for mutant in AMINO_ACIDS.replace(wild_type, ""):
        mutation = Mutation(wild_type, number, mutant)
        own = {**cells, "mutation": str(mutation)}
        protein.variants.append(Variant(0, own, (mutation,)))
        protein.changes.append([(row, LETTERS.index(mutant)) for row in rows])


def protein_of_sequence(name, text):
    """A Protein of a sequence alone, without variants. ValueError for other letters, and for
    nucleotides."""
    letters = encode(text)
    if is_nucleotides(text.encode()):
        raise ValueError(f"found nucleotides ({text[:20]}...); expected a protein. Translate them")
    numbers = tuple(str(i + 1) for i in range(len(letters)))
    chain = Chain(letters, np.zeros((len(letters), 4, 3), np.float32),
                  np.ones(len(letters), bool), numbers)
    structure = Structure(name, {"A": chain})
    return Protein(name, structure, Complex(structure, ["A"]), [], [])


def measured_values(protein: Protein) -> dict[tuple, list[float]]:
    """{variant: the values that were measured}; a variant is its changes, sorted."""
    values = {}
    for variant, changes in zip(protein.variants, protein.changes):
        if math.isfinite(variant.measured):
            values.setdefault(tuple(sorted(changes)), []).append(variant.measured)
    return values


def refuse_long(where: str | Path, proteins: list[Protein], longest: float) -> None:
    """ValueError that lists the proteins that are longer than a model has seen.

    where: what is refused, for the message. longest: residues."""
    problems = []
    for protein in proteins:
        n = len(protein.sequence)
        if n > longest:
            line = protein.variants[0].line     # 0: of a scan
            place = f"line {line}: " if line else ""
            problems.append(f"{place}{protein.name} has {n:,} residues, but the model was trained "
                            f"on at most {longest:,}; leave its variants out")
    refuse_all(where, problems, "proteins")


# ---- lines ----

# What is counted besides the kinds of proteins/notation.py.
SILENT = "silent part"
REPEATED = "mutation that comes twice"
NO_VALUE = "no value"
LIMIT = "limit"


def read_value(cells, measured):
    """(the measured value in a column, nan for none; NO_VALUE or LIMIT for why there is none, or
    ""). Raises: ValueError."""
    if not measured:
        return math.nan, ""
    text = cells[measured]
    if is_no_value(text):
        return math.nan, NO_VALUE
    if is_limit(text):
        return math.nan, LIMIT
    return read_number(text, measured), ""


def structure_file(path, cells, files):
    """The file that a line of the table at `path` names; None for none. ValueError if it is not
    there. files: {name: file} of those before, is added to."""
    if "pdb_file" not in cells:
        return None
    name = cells["pdb_file"]
    if name not in files:
        structure = path.parent / name
        if not name:
            raise ValueError(f"found an empty cell as pdb_file; expected a path {MERGED}")
        if not os.path.isfile(structure):
            raise ValueError(f"there is no file {str(structure):.200}")
        files[name] = structure
    return files[name]


def describe_left_out(path, counts, measured):
    """A text on the lines that read_mutations has left out, or that have no value; "" if there are
    none."""
    plurals = {**PLURALS, SILENT: "silent parts"}
    kinds = [f"{counts[kind]:,} {kind if counts[kind] == 1 else plural}"
             for kind, plural in plurals.items() if counts[kind]]
    lacks = []
    if counts[NO_VALUE]:
        lacks.append(f"{counts[NO_VALUE]:,} without a value")
    if counts[LIMIT]:
        lacks.append(f"{counts[LIMIT]:,} with a limit, such as >5")
    texts = []
    if kinds:
        texts.append(f"no substitution: {', '.join(kinds)}")
    if counts[REPEATED]:
        texts.append(f"{counts[REPEATED]:,} mutation(s) that come twice in a variant count once")
    if lacks:
        texts.append(f"not measured in {measured}: {', '.join(lacks)}")
    if not texts:
        return ""
    return f"{path}: {'; '.join(texts)}"


def sequence_of(line, wild_type):
    """The wild type of a line; wild_type: see place_on_sequences."""
    return wild_type[1] if wild_type else line.cells["sequence"].upper()


def check_one_chain(variants):
    """ValueError for variants on one sequence whose mutations name several chains."""
    chains = sorted({mutation.chain for variant in variants
                     for mutation in (*variant.mutations, *variant.silent)} - {""})
    if len(chains) > 1:
        raise ValueError(f"found mutations in the chains {' '.join(chains)} on one sequence; "
                         "expected one chain")


# ---- structures ----

def variants_by_place(table, options):
    """{Named: its variants} of the variants of a table."""
    named = {}
    for variant in table.variants:
        named.setdefault(name_place(variant, options), []).append(variant)
    return named


def read_once(path, ca_only, files):
    """The Structure of a file. files: {path: Structure} of those before, is added to."""
    if path not in files:
        files[path] = read_structure(path, ca_only)
    return files[path]


def is_wild_type_of(line, chosen):
    """Whether a line of the wild type of a structure is that of a Place there."""
    cells = line.cells
    if cells.get("chain", "") not in ("", *chosen.complex.design):
        return False
    text = cells.get("partners", "")
    return not text or bool(chosen.partners) and have_sides(chosen.partners, text)


def place(protein, located, wild_types, chosen):
    """The Placement of located variants; those that fit are added to the protein.

    wild_types: lines of its wild type. chosen: its Place."""
    protein = protein._replace(wild_types=tuple(line.measured for line in wild_types))
    misfits = []
    lacking = {}
    for one in located:
        try:
            changes, without = find_changes(one, chosen)
        except Misfit as misfit:
            misfits.append((one.variant, misfit))
            continue
        protein.variants.append(one.variant)
        protein.changes.append(changes)
        lacking.update(dict.fromkeys(without))
    return Placement(protein, chosen, located, wild_types, misfits, list(lacking))


def describe_partners(placements):
    """List of a line on the proteins whose binding is meant, if there are any, and on others beside
    them: a row may lack its partners by mistake."""
    of_binding = [placement for placement in placements if placement.protein.partners]
    if not of_binding:
        return []
    first = of_binding[0].protein
    n = sum(len(placement.protein.variants) for placement in of_binding)
    line = (f"{n:,} {'variant' if n == 1 else 'variants'} of binding, of {len(of_binding):,} "
            f"{'pair' if len(of_binding) == 1 else 'pairs'} of partners, such as "
            f"{' and '.join(' '.join(side.design) for side in first.partners)} of {first.name}")
    others = [placement.located[0].variant.line for placement in placements
              if not placement.protein.partners]
    if others:
        n_others = sum(len(placement.protein.variants) for placement in placements) - n
        line += (f". ATTENTION: {n_others:,} have no partners (first in line {min(others)}), so "
                 "they are not of binding")
    return [line]


def describe_copies(table, placements, options):
    """List of a line on copies, if they are asked for. ValueError if no mutated chain has one."""
    if options.copies is None:
        return []
    used = {}       # text on a group, each once -> None
    lacking = []
    for placement in placements:
        mutated = {chain for one in placement.located for chain in one.chains}
        name = placement.protein.name
        used.update({f"{' '.join(group)} of {name}": None for group in placement.chosen.copies
                     if mutated & set(group)})
        lacking += [f"{chain}{number} of {name}" for chain, number in placement.lacking]
    if not used:
        raise ValueError(f"{table.path}: found no copies of the chains that variants name; "
                         f"expected {EQUAL}.")
    return [copies_text(list(used), lacking)]


def copies_text(groups, lacking):
    """A text on copies. groups: texts on each. lacking: texts on residues that some lack."""
    text = f"a mutation is in all copies of its chain: {', '.join(groups[:MAX_LISTED])}"
    if len(groups) > MAX_LISTED:
        text += f" and {len(groups) - MAX_LISTED:,} more"
    if lacking:
        text += (f"; {len(lacking):,} residue(s) are not there in a copy, such as {lacking[0]}, "
                 "and mutated in the others")
    return text


def what_fits(table, placements, understood):
    """(proteins with the variants that fit, text on what is left out) of a table; see place_all.

    understood: lines on partners and copies, to tell first.
    Raises: ValueError if no variant fits, or too few to take them; see describe_misnumbered."""
    refuse_misnumbered(table.path, placements)
    misfits = [f"{name_of(variant)}: in {placement.where(misfit.chain)} {misfit}"
               for placement in placements for variant, misfit in placement.misfits]
    proteins = [placement.protein for placement in placements if placement.protein.variants]
    if not proteins:
        raise ValueError(f"{table.path}: no variant fits its protein. Found {misfits[0]}.")
    lines = [f"{table.path}: {line}" for line in understood]
    if misfits:
        lines.append(f"{table.path}: {len(misfits):,} of {len(table.variants):,} variants do not "
                     "fit their protein and are left out:")
        lines += [f"  {text}" for text in misfits[:MAX_LISTED]]
    if len(misfits) > MAX_LISTED:
        lines.append(f"  and {len(misfits) - MAX_LISTED:,} more")
    if table.left_out:
        lines.append(table.left_out)
    used = {line.line for placement in placements for line in placement.wild_types}
    unused = [str(line.line) for line in table.wild_types if line.line not in used]
    if unused:
        shown = ", ".join(unused[:MAX_LISTED])
        lines.append(f"{table.path}: of no protein here, so not used: {len(unused):,} of "
                     f"{len(table.wild_types):,} values of the wild type (line {shown})")
    return proteins, "\n".join(lines)


class NamedChain(NamedTuple):
    """What the variants of a placement name in one chain."""
    where: str
    sites: NamedSites
    first_misfit: str       # text on the first variant that does not fit there; "": all do


def refuse_misnumbered(path, placements):
    """ValueError that names each chain of which too few residues have the letters that variants
    name, and all others together, which may have too few residues each to tell."""
    problems = []
    others = []
    for chain in [chain for placement in placements for chain in named_chains(placement)]:
        text = describe_misnumbered([chain.sites], chain.first_misfit)
        if text:
            problems.append(f"{chain.where}: {text}")
        else:
            others.append(chain)
    example = next((chain.first_misfit for chain in others if chain.first_misfit), "")
    text = describe_misnumbered([chain.sites for chain in others], example)
    if text:
        problems.append(f"all {'other ' if problems else ''}proteins together: {text}")
    refuse_all(path, problems, "proteins")


def named_chains(placement):
    """The NamedChains of a placement."""
    sites = {}              # chain -> {(wild type's letter, number)}
    mutants = {}            # chain -> [(mutant's letter, number)]
    for variant, chains in placement.located:
        for mutation, chain in zip((*variant.mutations, *variant.silent), chains):
            sites.setdefault(chain, set()).add((mutation.wild_type, mutation.number))
        for mutation, chain in zip(variant.mutations, chains):
            mutants.setdefault(chain, []).append((mutation.mutant, mutation.number))
    first_misfits = {}      # chain -> text
    for variant, misfit in placement.misfits:
        first_misfits.setdefault(misfit.chain, f"{name_of(variant)} ({misfit})")
    structure = placement.protein.structure
    return [NamedChain(placement.where(chain),
                       NamedSites(structure.chains[chain], sites[chain], mutants.get(chain, ())),
                       first_misfits.get(chain, ""))
            for chain in sites if chain in structure.chains]


def name_of(variant):
    """A text that names a variant of a table."""
    are_named = any(mutation.chain for mutation in variant.mutations)
    separator = "," if are_named else ":"
    return f"line {variant.line}: {separator.join(map(str, variant.mutations))}"
