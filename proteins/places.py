"""Where the mutations of variants are: which chains of a structure, and which of their rows.

    named = name_place(variant, options)            # what its line, its text and options say
    place, chain = choose_place(named, structure, variant, options)
    changes, _ = find_changes(locate(variant, options, chain), place)

A line says it by its columns `chain`, `context` and `partners`, and by the chains in its text. What
it leaves open is told by options, or by the structure. No model here. Writes nothing.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from proteins.copies import choose_copies, group_of
from proteins.letters import LETTERS, X_ID
from proteins.notation import Mutation
from proteins.partners import choose_partners
from proteins.structures import Chain, Complex, Structure, numbers_near


class Variant(NamedTuple):
    """A line of a list or table."""
    line: int                           # from 1
    cells: dict[str, str]               # {column: text}; of a list: {"mutation": text}
    mutations: tuple[Mutation, ...]     # of the wild type: none
    measured: float = math.nan          # nan: none
    pdb_file: Path | None = None        # that a line of a table names
    silent: tuple[Mutation, ...] = ()   # parts of the text that change nothing


class Options(NamedTuple):
    """What holds for lines that do not say it; see place_all."""
    structure: str | Path | None = None
    chain: str | None = None
    fixed: list[str] | None = None
    see_all: bool = True
    copies: list[str] | None = None
    partners: str = ""
    words: str = ""             # on the option of the caller that names the chain, for a message


class Named(NamedTuple):
    """What is said of the place of a variant; equal for those of one place."""
    path: Path
    chains: tuple[str, ...]     # that decide on the complex, sorted; "" for one that is not told
    context: tuple[str, ...] | None     # names of chains; None: all others
    partners: str               # text; "": none


class Place(NamedTuple):
    """Chains of a structure, on which variants are."""
    complex: Complex                    # the mutated chains first, or all chains of the partners
    partners: tuple[Complex, ...] = ()
    copies: Sequence[tuple[str, ...]] = ()      # groups of equal chains


class Located(NamedTuple):
    """A variant, and the chains of its mutations, then those of its silent parts."""
    variant: Variant
    chains: tuple[str, ...]


class Misfit(ValueError):
    """Why a variant does not fit. chain: of the mutation at fault."""

    def __init__(self, chain: str, reason: str):
        super().__init__(reason)
        self.chain = chain


def name_place(variant: Variant, options: Options) -> Named:
    """What its line, its text and the options say of the place of a variant."""
    cells = variant.cells
    context = options.fixed
    if cells.get("context"):
        context = cells["context"].replace(",", " ").split()
    if context is None and not options.see_all:
        context = []
    path = Path(options.structure) if options.structure else variant.pdb_file
    partners = cells.get("partners") or options.partners
    located = locate(variant, options)
    chains = set()
    if not partners:
        chains.update(located.chains[:len(variant.mutations)])
    if "" in located.chains:
        chains.add("")
    return Named(path, tuple(sorted(chains)), None if context is None else tuple(context),
                 partners)


def locate(variant: Variant, options: Options, only_chain: str = "") -> Located:
    """The chain of each mutation of a variant: that in its text, or else of its line, or else of
    the options, or else only_chain."""
    parts = (*variant.mutations, *variant.silent)
    column = variant.cells.get("chain", "")
    if is_contradicted(variant, column):
        return Located(variant, (column,) * len(parts))
    other = column or options.chain or only_chain
    return Located(variant, tuple(part.chain or other for part in parts))


def is_contradicted(variant: Variant, told: str) -> bool:
    """Whether each mutation names another chain than the one that is told; "": none is."""
    named = {part.chain for part in (*variant.mutations, *variant.silent)}
    return bool(told) and "" not in named and told not in named


def choose_place(named: Named, structure: Structure, variant: Variant,
                 options: Options) -> tuple[Place, str]:
    """(the Place, the chain of mutations of which none is told, or "").

    variant: the first one there, for messages. Raises: ValueError."""
    partners = ()
    names = structure.protein_chains
    if named.partners:
        if named.context:
            raise ValueError(f"found the partners {named.partners}, and {' '.join(named.context)} "
                             "as context; expected none, as the model sees the chains of the "
                             "partners alone")
        partners = choose_partners(named.partners, structure)
        names = sorted(name for partner in partners for name in partner.design)
    groups = choose_copies(structure, names, options.copies)
    chain = ""
    if "" in named.chains:
        candidates = names
        if not partners:
            candidates = choose_complex(structure, None, named.context).design
        chain = candidates[0]
        if not set(candidates) <= set(group_of(chain, groups)):
            raise ValueError(chain_is_not_told(named, candidates, variant, options))
    if partners:
        return Place(Complex(structure, names), partners, groups), chain
    mutated = sorted({name or chain for name in named.chains})
    return Place(with_copies(structure, mutated, named.context, groups), (), groups), chain


def chain_is_not_told(named, candidates, variant, options):
    """A text on mutations that may be in several chains."""
    unnamed = [part for part in (*variant.mutations, *variant.silent) if not part.chain]
    if named.partners or len(named.chains) > 1:
        return (f"{unnamed[0]} names no chain, which may be {' or '.join(candidates)}; expected "
                f"it in the text, such as {candidates[0]}:{unnamed[0]}, or in a column chain"
                f"{options.words}")
    expected = f"expected one, or a column chain{options.words}, which says which is mutated"
    if "chain" in variant.cells:
        expected = f"expected one of them in the column chain, which is empty{options.words}"
    return f"{named.path} has the protein chains {' '.join(candidates)}; {expected}"


def with_copies(structure: Structure, names: Sequence[str], context: Sequence[str] | None,
                groups: Sequence[tuple[str, ...]]) -> Complex:
    """As choose_complex, of these chains and their copies, which are no context then."""
    copies = {other for name in names for other in group_of(name, groups)} - set(names)
    if context is not None:
        context = [name for name in context if name not in copies]
    return choose_complex(structure, [*names, *sorted(copies)], context)


def choose_complex(structure: Structure, names: Sequence[str] | None,
                   context: Sequence[str] | None) -> Complex:
    """Complex of the chains to mutate and their context. ValueError for absent chains.

    names:   of the chains; None: all of proteins that are no context.
    context: names of the other chains that the model shall see; None: all of proteins.
    """
    usable = structure.protein_chains
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


def content_of(chosen: Complex, partners: Sequence[Complex] = ()) -> tuple:
    """What makes a Complex whose designed chains are mutated another protein: letters,
    coordinates, names of chains, the numbers by which its residues are found, and the partners
    whose binding is meant, in any order."""
    numbers = tuple(chosen.structure.chains[name].numbers for name in chosen.design)
    return chosen.key, numbers, tuple(sorted(partner.key for partner in partners))


# ---- residues ----

def find_changes(located: Located, place: Place
                 ) -> tuple[list[tuple[int, int]], list[tuple[str, str]]]:
    """([(row of the complex, letter 0 to 19)] of a variant, [(chain, number)] of residues that
    copies of its chains lack). Raises: Misfit."""
    variant, chains = located
    if is_contradicted(variant, variant.cells.get("chain", "")):
        named = sorted({mutation.chain for mutation in variant.mutations})
        raise Misfit(chains[0], f"the mutation names chain {' '.join(named)}")
    letters = {}            # row of the complex -> letter
    named_rows = set()
    lacking = []
    for mutation, chain in zip(variant.mutations, chains):
        letter = LETTERS.index(mutation.mutant)
        names, without = chains_with(mutation, chain, place)
        lacking += [(name, mutation.number) for name in without]
        for name in names:
            row = place.complex.first_row(name) + find_residue(mutation, name, place)
            is_named = name == chain
            if is_named and row in named_rows:
                raise Misfit(name, f"residue {mutation.number} is named twice")
            if letters.setdefault(row, letter) != letter:
                raise Misfit(name, f"residue {mutation.number}, of a copy, gets two letters")
            if is_named:
                named_rows.add(row)
    check_silent(located, place, named_rows)
    return list(letters.items()), lacking


def chains_with(mutation, chain, place):
    """(names of the chains of which a residue is mutated, names of its copies that lack it).
    Raises: Misfit for a chain of no partner."""
    if chain not in place.complex.design:
        sides = " and ".join(" ".join(partner.design) for partner in place.partners)
        raise Misfit(chain, f"residue {mutation.number} is in neither partner ({sides})")
    group = group_of(chain, place.copies)
    if len(group) == 1:
        return group, ()
    names = [name for name in group
             if has_residue(place.complex.structure.chains[name], mutation.number)]
    if not names:
        return (chain,), ()
    return names, [name for name in group if name not in names]


def has_residue(chain: Chain, number: str) -> bool:
    """Whether a residue is there, resolved and of known letter."""
    row = chain.row_of(number)
    return row is not None and bool(chain.resolved[row]) and int(chain.S[row]) != X_ID


def find_residue(mutation: Mutation, name: str, place: Place) -> int:
    """The row in its chain of the residue of a mutation. Misfit for one that does not fit."""
    chain = place.complex.structure.chains[name]
    row = chain.row_of(mutation.number)
    if row is None:
        near = numbers_near(mutation.number, chain.numbers)
        hint = f" (there is {', '.join(near)})" if near else ""
        raise Misfit(name, f"there is no residue {mutation.number}{hint}")
    check_letter(mutation, name, chain, row)
    if not chain.resolved[row]:
        raise Misfit(name, f"residue {mutation.number} lacks atoms of the backbone")
    return row


def check_letter(mutation, name, chain, row):
    """Misfit if the row of the mutation has another letter than its wild type."""
    letter = LETTERS[chain.S[row]]
    if letter != mutation.wild_type:
        hint = ", the mutant's letter" if letter == mutation.mutant else ""
        raise Misfit(name, f"residue {mutation.number} is {letter}{hint}")


def check_silent(located, place, named_rows):
    """Misfit for a silent part that names another letter than its residue has, or a residue that
    is mutated. named_rows: of the complex, that mutations name."""
    variant, chains = located
    for mutation, name in zip(variant.silent, chains[len(variant.mutations):]):
        chain = place.complex.structure.chains.get(name)
        if chain is None:
            raise Misfit(name, "there is no such chain")
        row = chain.row_of(mutation.number)
        if row is None:
            continue
        check_letter(mutation, name, chain, row)
        is_design = name in place.complex.design
        if is_design and place.complex.first_row(name) + row in named_rows:
            raise Misfit(name, f"residue {mutation.number} is named twice")
