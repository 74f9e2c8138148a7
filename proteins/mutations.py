"""Lists and tables of mutations: read, checked, placed on the proteins that they name.

    table = read_mutations("s2648.csv", measured="ddg")
    proteins, note = place_all(table)               # a Protein for each structure and chain
    protein = scan_sequence("mine", "MKTAYIAKQ")    # all single mutations

A list has one variant per line, such as A12V or A12V:G45D; text after # is left out. A table (CSV,
commas or tabs) has a column `mutation` with such variants, and perhaps pdb_file (path, relative to
the folder of the table), chain (which is mutated), context (names of other chains, such as "B C",
that the model shall see), or sequence (of the wild type, where there is no structure), and any
others. Other names of columns: proteins/mutation_columns.py. How a variant is written:
proteins/notation.py. All mutations of a variant are in one chain. Rows that are no substitution, as
a mutational scan has them, are counted by their kind and left out; that of the wild type gives the
protein its value. Writes nothing. No model here.
"""
from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proteins.csv_files import MAX_LISTED, is_limit, is_no_value, read_number, refuse_all
from proteins.letters import AMINO_ACIDS, LETTERS, decode, encode
from proteins.mutation_columns import mutation_text, read_lines
from proteins.notation import (EXPECTED, PLURALS, WILD_TYPE, Mutation, UnreadableVariant,
                               read_variant)
from proteins.numbering import NamedSites, describe_misnumbered
from proteins.sequences import is_nucleotides
from proteins.structures import (Chain, Complex, Structure, numbers_near, parse_positions,
                                 read_structure)

SHOWN = 8               # letters of a sequence that stand for its name
MERGED = "in each row (of cells that were merged, the first alone has it)"


class Variant(NamedTuple):
    """A line of a list or table."""
    line: int                           # from 1
    cells: dict[str, str]               # {column: text}; of a list: {"mutation": text}
    mutations: tuple[Mutation, ...]     # of the wild type: none
    measured: float = math.nan          # nan: none
    pdb_file: Path | None = None        # that a line of a table names
    chain: str = ""                     # that the text of the mutation names
    silent: tuple[Mutation, ...] = ()   # parts of the text that change nothing


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
    """A structure, or a sequence alone, with variants of one of its chains; a scan has some."""
    name: str                   # path as in the table or on the command line; of a sequence: any
    structure: Structure        # of a sequence: one chain A, all coordinates 0
    complex: Complex            # the mutated chain first, then its context
    variants: list[Variant]
    changes: list[list[tuple[int, int]]]    # of each variant: (row of the complex, letter 0 to 19)
    wild_types: tuple[float, ...] = ()      # measured values of the wild type, of its lines

    @property
    def wild_type(self) -> float:
        """The wild type's value, the mean of its lines; nan: there is none."""
        return statistics.fmean(self.wild_types) if self.wild_types else math.nan

    @property
    def chain(self) -> str:
        return self.complex.design[0]

    @property
    def has_structure(self) -> bool:
        return bool(self.complex.X.any())

    @property
    def sequence(self) -> str:
        """Letters of the mutated chain, X for what is not known."""
        return decode(self.structure.chains[self.chain].S)


class Placement(NamedTuple):
    """Variants of a table on a protein, which has those that fit."""
    protein: Protein
    where: str                          # text that names the chain or sequence
    variants: list[Variant]             # all of them
    wild_types: list[Variant]           # lines that give it a value
    misfits: list[tuple[Variant, str]]  # and why it does not fit


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
            if reading.left_out and reading.left_out != WILD_TYPE:
                continue
            value, lack = read_value(cells, measured)
            if reading.mutations:
                counts[lack] += 1
                variants.append(Variant(line, cells, reading.mutations, value,
                                        structure_file(path, cells, files), reading.chain,
                                        reading.silent))
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


def place_all(table: MutationTable, structure: str | Path | None = None, chain: str | None = None,
              fixed: list[str] | None = None, see_all: bool = True, ca_only: bool = False,
              option: str = "") -> tuple[list[Protein], str]:
    """Find the residues of the variants; those of one structure, chain and context are a Protein.

    A copy of a structure in another file is the same structure.

    Args:
        structure: path, for a table that names none.
        chain:     name, for lines that give none. Optional for structures of one protein chain.
        fixed:     names of the context chains, for lines that give none.
        see_all:   if neither says which: take all other protein chains as context, or none.
        ca_only:   read structures for a CA-only model.
        option:    words on the option of the caller that names the chain, for a message.
    Returns: proteins in the order of the table; a text on what is left out because it does not fit
        its structure or is no substitution, or "".
    Raises: ValueError for a table without structures, for those that cannot be read, absent chains,
        if none is left, and where so few fit that the numbers are hardly those of the structure,
        see describe_misnumbered.
    """
    if structure is None and not table.names_structures:
        raise ValueError(f"{table.path} has no column pdb_file; expected it, with the path of the "
                         "structure in each line, relative to the table.")
    files = {}          # path -> Structure
    groups = {}         # content of chains -> (their Complex, variants)
    problems = []
    named = variants_by_name(table, structure, chain, fixed, see_all)
    for (path, name, context), variants in named.items():
        try:
            chosen = choose_complex(read_once(path, ca_only, files), [name] if name else None,
                                    context)
            if len(chosen.design) > 1:
                expected = f"expected one, or a column chain{option}, which says which is mutated"
                if "chain" in variants[0].cells:
                    expected = f"expected one of them in the column chain, which is empty{option}"
                raise ValueError(f"{path} has the protein chains {' '.join(chosen.design)}; "
                                 f"{expected}")
        except (ValueError, OSError) as error:
            problems.append(f"line {variants[0].line}: {error}")
            continue
        groups.setdefault(content_of(chosen), (chosen, []))[1].extend(variants)
    keys = {chosen.structure.key for chosen, _ in groups.values()}
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
    for chosen, variants in groups.values():
        variants.sort(key=lambda variant: variant.line)
        shown = variants[0].cells.get("pdb_file", str(structure))
        protein = Protein(shown, chosen.structure, chosen, [], [])
        own = [line for key, line in wild_types if key == chosen.structure.key
               and line.cells.get("chain", "") in ("", *chosen.design)]
        placements.append(place(protein, variants, own, f"chain {protein.chain} of {shown}"))
    return what_fits(table, placements)


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
        placements.append(place(protein, variants, own, name))
    refuse_all(table.path, problems)
    return what_fits(table, placements)


def scan_structure(path: str | Path, chains: list[str] | None = None,  # noqa: PLR0913
                   fixed: list[str] | None = None, positions: list[str] | None = None,
                   see_all: bool = True, ca_only: bool = False) -> tuple[list[Protein], str]:
    """All single mutations of a structure: at each resolved residue the 19 other letters.

    Args:
        chains:    names of those to mutate; None: all that are not fixed.
        fixed:     names of the context chains; None: all others.
        positions: the only ones to mutate, texts such as A10-A20; None: all.
        see_all:   one Protein of all chains together; False: one of each chain alone.
        ca_only:   read the structure for a CA-only model.
    Returns: the Proteins, and a text on how positions were understood, or "".
    Raises: ValueError.
    """
    structure = read_structure(path, ca_only)
    whole = choose_complex(structure, chains, fixed)
    names = chains or list(whole.design)
    labels = [(name, number) for name in names for number in structure.chains[name].numbers]
    wanted = range(len(labels))
    note = ""
    if positions:
        wanted, note = parse_positions(" ".join(positions), structure, names)
    parts = [whole]
    if not see_all:
        parts = [Complex(structure, [name]) for name in names]
    proteins = []
    for part in parts:
        protein = Protein(str(path), structure, part, [], [])
        rows = {}       # label -> row of the part
        for name in part.design:
            for row, number in zip(part.rows([name]), structure.chains[name].numbers):
                rows[name, number] = int(row)
        for name, number in (labels[position] for position in wanted):
            row = rows.get((name, number))
            if number and row is not None and part.mask[row]:
                add_all_letters(protein, row, number, {"chain": name})
        if protein.variants:
            proteins.append(protein)
    if not proteins:
        raise ValueError(f"{path}: found no residue to mutate; expected some with one of the 20 "
                         f"letters and {structure.needed}.")
    return proteins, note


def scan_sequence(name: str, text: str) -> Protein:
    """All single mutations of a sequence: at each place, from 1, the 19 other letters.

    name: of the sequence, for messages. Raises: ValueError."""
    try:
        protein = protein_of_sequence(name, text)
    except ValueError as error:
        raise ValueError(f"{name:.60}: {error}") from None
    chain = protein.structure.chains["A"]
    for row, number in enumerate(chain.numbers):
        add_all_letters(protein, row, number, {})
    if not protein.variants:
        raise ValueError(f"{name:.60}: found no residue to mutate; expected some of the 20 "
                         "letters.")
    return protein


def add_all_letters(protein, row, number, cells):
    """Add the variants of one row of the complex, unless its letter is not known.

    number: of the residue. cells: {column: text} of these variants, besides the mutation."""
    wild_type = LETTERS[protein.complex.S[row]]
    if wild_type not in AMINO_ACIDS:
        return
    for mutant in AMINO_ACIDS.replace(wild_type, ""):
        mutation = Mutation(wild_type, number, mutant)
        own = {**cells, "mutation": str(mutation)}
        protein.variants.append(Variant(0, own, (mutation,)))
        protein.changes.append([(row, LETTERS.index(mutant))])


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


def find_residues(mutations: tuple[Mutation, ...], chain: Chain) -> list[tuple[int, int]]:
    """[(row of the chain, letter 0 to 19)] of mutations. ValueError for those that do not fit."""
    changes = []
    for mutation in mutations:
        row = chain.row_of(mutation.number)
        if row is None:
            near = numbers_near(mutation.number, chain.numbers)
            hint = f" (there is {', '.join(near)})" if near else ""
            raise ValueError(f"there is no residue {mutation.number}{hint}")
        check_letter(mutation, chain, row)
        if not chain.resolved[row]:
            raise ValueError(f"residue {mutation.number} lacks atoms of the backbone")
        changes.append((row, LETTERS.index(mutation.mutant)))
    return changes


def check_letter(mutation, chain, row):
    """ValueError if the row of the mutation has another letter than its wild type."""
    letter = LETTERS[chain.S[row]]
    if letter != mutation.wild_type:
        hint = ", the mutant's letter" if letter == mutation.mutant else ""
        raise ValueError(f"residue {mutation.number} is {letter}{hint}")


# ---- lines ----

# What is counted besides the kinds of proteins/notation.py.
SILENT = "silent part"
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
    chains = sorted({variant.chain for variant in variants} - {""})
    if len(chains) > 1:
        raise ValueError(f"found mutations in the chains {' '.join(chains)} on one sequence; "
                         "expected one chain")


# ---- structures ----

def variants_by_name(table, structure, chain, fixed, see_all):
    """{(path, chain, names of the context chains) as lines name them: their variants}.

    A chain or context that neither a line nor the options name is None; see place_all."""
    named = {}
    for variant in table.variants:
        cells = variant.cells
        context = fixed
        if cells.get("context"):
            context = cells["context"].replace(",", " ").split()
        if context is None and not see_all:
            context = []
        if context is not None:
            context = tuple(context)
        path = Path(structure) if structure else variant.pdb_file
        named_chain = cells.get("chain") or variant.chain or chain
        named.setdefault((path, named_chain, context), []).append(variant)
    return named


def read_once(path, ca_only, files):
    """The Structure of a file. files: {path: Structure} of those before, is added to."""
    if path not in files:
        files[path] = read_structure(path, ca_only)
    return files[path]


def choose_complex(structure, names, context):
    """Complex of the chains to mutate and their context. ValueError for absent chains.

    names:   of the chains; None: all of proteins that are no context.
    context: names of the other chains that the model shall see; None: all of proteins.
    """
    usable = sorted(name for name, chain in structure.chains.items() if chain.resolved.any())
    if names is None:
        names = [name for name in usable if name not in (context or ())]
    if context is None:
        context = [name for name in usable if name not in names]
    together = [*names, *context]
    for name in together:
        if name not in usable:
            role = "" if name in names else " as context"
            raise ValueError(f"found chain {name}{role}; expected a protein chain of "
                             f"{structure.name}, which has {' '.join(usable) or '(none)'}")
    if not names or len(set(together)) < len(together):
        raise ValueError(f"found the chains {' '.join(together) or '(none)'} of {structure.name}; "
                         "expected each once, those to mutate first")
    return Complex(structure, names, context)


def content_of(chosen):
    """What makes a Complex of one mutated chain another protein: letters, coordinates, names of
    chains, and the numbers by which its residues are found."""
    name, = chosen.design
    return chosen.key, chosen.structure.chains[name].numbers


def place(protein, variants, wild_types, where):
    """The Placement of variants; those that fit are added to the protein.

    wild_types: lines of its wild type."""
    protein = protein._replace(wild_types=tuple(line.measured for line in wild_types))
    chain = protein.structure.chains[protein.chain]
    misfits = []
    for variant in variants:
        try:
            check_chain(variant)
            changes = find_residues(variant.mutations, chain)
            check_silent(variant, chain)
        except ValueError as error:
            misfits.append((variant, str(error)))
            continue
        protein.variants.append(variant)
        protein.changes.append(changes)
    return Placement(protein, where, variants, wild_types, misfits)


def check_chain(variant):
    """ValueError for a mutation that names another chain than the column."""
    column = variant.cells.get("chain")
    if column and variant.chain and column != variant.chain:
        raise ValueError(f"the mutation names chain {variant.chain}")


def check_silent(variant, chain):
    """ValueError for a silent part that names another letter than its residue has."""
    for mutation in variant.silent:
        row = chain.row_of(mutation.number)
        if row is not None:
            check_letter(mutation, chain, row)


def what_fits(table, placements):
    """(proteins with the variants that fit, text on what is left out) of a table; see place_all.

    Raises: ValueError if no variant fits, or too few to take them; see describe_misnumbered."""
    refuse_misnumbered(table.path, placements)
    misfits = [f"{name_of(variant)}: in {placement.where} {reason}"
               for placement in placements for variant, reason in placement.misfits]
    proteins = [placement.protein for placement in placements if placement.protein.variants]
    if not proteins:
        raise ValueError(f"{table.path}: no variant fits its protein. Found {misfits[0]}.")
    lines = []
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


def refuse_misnumbered(path, placements):
    """ValueError that names each protein of which too few residues have the letters that variants
    name, and all others together, which may have too few residues each to tell."""
    problems = []
    others = []
    for placement in placements:
        text = describe_misnumbered([sites_of(placement)], first_misfit([placement]))
        if text:
            problems.append(f"{placement.where}: {text}")
        else:
            others.append(placement)
    text = describe_misnumbered([sites_of(placement) for placement in others], first_misfit(others))
    if text:
        problems.append(f"all {'other ' if problems else ''}proteins together: {text}")
    refuse_all(path, problems, "proteins")


def sites_of(placement):
    """The NamedSites of the variants of a placement."""
    protein = placement.protein
    mutations = [mutation for variant in placement.variants for mutation in variant.mutations]
    silent = [mutation for variant in placement.variants for mutation in variant.silent]
    sites = {(mutation.wild_type, mutation.number) for mutation in [*mutations, *silent]}
    mutants = [(mutation.mutant, mutation.number) for mutation in mutations]
    return NamedSites(protein.structure.chains[protein.chain], sites, mutants)


def first_misfit(placements):
    """A text on the first variant that does not fit; "" if all do."""
    for placement in placements:
        for variant, reason in placement.misfits:
            return f"{name_of(variant)} ({reason})"
    return ""


def name_of(variant):
    """A text that names a variant of a table."""
    return f"line {variant.line}: {':'.join(map(str, variant.mutations))}"
