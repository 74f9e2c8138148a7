"""The data of a run: pairs or tables of mutations, read from files or made up, and validation.

    data = load_data(config, ca_only, alive)        # data.train, data.val: lists of items

Items are Pairs, or with loss.unit table VariantSets, a protein each. Validation items are those of
data.val_data, or of a fraction data.val_fraction of the families of proteins, see
proteins/identity.py. All results depend only on the arguments, so that every rank reads and splits
the same. Writes nothing.
"""
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo.demo import demo_pairs
from dpo.pair_files import named, read_both
from dpo.pairs import Pair, describe, read_pairs
from dpo.variant_sets import VariantSet, has_pair, make_variant_set
from proteins.csv_files import MAX_LISTED, describe_duplicates
from proteins.identity import MOST_ALIGNED, hold_out_families
from proteins.letters import decode
from proteins.mutations import Protein, measured_values, place_all, read_mutations
from proteins.places import content_of
from proteins.seeds import content_hash, content_key
from proteins.structures import describe_reading
from training.plan import count

MOST_MISSED = 2     # warn if the held-out fraction misses val_fraction by a larger factor


class DpoData(NamedTuple):
    """The items of a run."""
    train: list
    val: list | None            # None: there is no validation
    fingerprint: dict           # {"n", "hash"}, compared when a run is resumed
    description: list[str]      # lines to print


def load_data(config: Any, ca_only: bool = False, alive: Callable = lambda: None) -> DpoData:
    """The items to train on and to validate with.

    Args:
        config:  with the sections data, loss and table, and training.seed.
        ca_only: read structures for a CA-only model.
        alive:   called now and then, to show a watchdog that reading continues.
    Raises: ValueError that lists the problems of both files.
    """
    if config.loss.unit == "table":
        return load_tables(config, ca_only, alive)
    return load_pairs(config.data, config.training.seed, ca_only, alive)


def data_of(train, val, content, description):
    """DpoData with the hash of `content`, which is all of the items that decides a run."""
    fingerprint = {"n": len(train), "hash": content_hash(content)}
    return DpoData(train, val, fingerprint, description)


# ---------------------------------------------------------------- pairs
def load_pairs(data: Any, seed: int, ca_only: bool = False,
               alive: Callable = lambda: None) -> DpoData:
    """The pairs of a run. data: the config's section. seed: of demo pairs."""
    positions = data.mutable_positions or data.mutable_ranges
    structures = {}         # read once, for both files
    notes = []              # how the positions were understood

    def read(path):
        return read_pairs(path, structures, positions, data.max_length, notes, alive, ca_only)

    train_files, val_files = read_both(data, read)
    train = [pair for pairs in train_files for pair in pairs]
    val = [pair for pairs in val_files for pair in pairs] or None
    if data.train_data is None:
        train, val = make_demo_pairs(data, seed)
    lines = [f"data: {named(data.train_data) or 'demo (no --train_data)'}: {describe(train)}"]
    if positions:
        lines.append("  mutable where a pair gives none: "
                     f"{notes[0] if notes else 'not needed, each pair gives its own'}")
    if val is not None:
        source = named(data.val_data) or "demo, other structures"
        lines.append(f"  {source}, for validation: {describe(val)}")
        lines += describe_shared_structures(train, val)
    elif data.val_fraction and data.train_data is not None:
        train, val, how = hold_out_pairs(train, data, alive)
        lines += how
    all_pairs = [*train, *(val or [])]
    lines += describe_left_out(all_pairs)
    content = [[pair.key for pair in part] for part in (train, val or [])]   # in their order
    weights = [pair.weight for pair in all_pairs]
    if any(weight != 1 for weight in weights):
        content.append(weights)
    return data_of(train, val, content, lines)


def make_demo_pairs(data, seed):
    """Demo pairs to train on, and on other structures to validate with, or None."""
    train = demo_pairs(seed, data.demo_structures, data.demo_pairs)
    if not data.val_fraction:
        return train, None
    n_structures = max(1, round(data.val_fraction * data.demo_structures))
    return train, demo_pairs(seed + 1, n_structures, data.demo_pairs)


def hold_out_pairs(pairs: list[Pair], data: Any, alive: Callable) -> tuple[list, list, list]:
    """Hold out whole families of structures; where that cannot be, sequences.

    Args: data: the config's section.
    Returns: the lists of pairs train and val, in the order of `pairs`, and lines on them.
    Raises: ValueError if all pairs have one preferred sequence.
    """
    warnings = []
    try:
        held = hold_out_families(sequences_of_structures(pairs), data.val_fraction, data.identity,
                                 alive)
        is_val = held.is_held_out
        how = f"of other families ({describe_families(held, data)})"
        together = "of one family"
    except ValueError as error:     # there is one family alone
        is_val = by_preferred_sequence(pairs, data.val_fraction)
        how = "of other preferred sequences"
        together = "with one preferred sequence"
        warnings.append(f"validation measures other sequences, not other structures: {error} Or "
                        "give --val_data.")
    train = [pair for pair, held_out in zip(pairs, is_val) if not held_out]
    val = [pair for pair, held_out in zip(pairs, is_val) if held_out]
    share = len(val) / len(pairs)
    is_near = data.val_fraction / MOST_MISSED <= share <= data.val_fraction * MOST_MISSED
    if len(val) > 1 and not is_near:        # of one pair, less cannot be held out
        warnings.append(f"{len(val):,} of {len(pairs):,} pairs ({share:.0%}) are held out for "
                        f"validation, but data.val_fraction asks for {data.val_fraction:.0%}: "
                        f"pairs {together} stay together. Give --val_data, pairs on more "
                        "structures, or data.val_fraction=0 training.patience=null to train on all "
                        "of them without validation.")
    lines = [f"  {len(train):,} pairs for training, {len(val):,} {how} for validation"]
    return train, val, lines + [f"ATTENTION: {warning}" for warning in warnings]


def sequences_of_structures(pairs: list[Pair]) -> list[str]:
    """(n,) letters of each pair's structure, of all its chains that some pair uses."""
    used = {}       # key of a structure -> names of chains
    for pair in pairs:
        structure = pair.complex.structure
        used.setdefault(structure.key, set()).update(pair.complex.design, pair.complex.fixed)
    texts = {}
    for pair in pairs:
        structure = pair.complex.structure
        if structure.key not in texts:
            names = sorted(used[structure.key])
            texts[structure.key] = "".join(decode(structure.chains[name].S) for name in names)
    return [texts[pair.complex.structure.key] for pair in pairs]


def by_preferred_sequence(pairs: list[Pair], val_fraction: float) -> np.ndarray:
    """(n,) bool: pairs with those preferred sequences whose hashes are lowest, val_fraction of all
    such sequences and at least one."""
    hashes = np.array([content_key(pair.chosen) for pair in pairs])
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise ValueError(f"all {len(pairs):,} pairs have one preferred sequence, so none can be "
                         "held out; expected two or more. Give a file of validation pairs "
                         "(--val_data), or train without validation (data.val_fraction=0).")
    n_val = min(max(1, round(val_fraction * len(distinct))), len(distinct) - 1)
    return hashes <= distinct[n_val - 1]


def describe_shared_structures(train, val):
    """List of a warning, if structures of validation are in training."""
    keys = {pair.complex.structure.key for pair in train}
    shared = sorted({pair.complex.structure.name for pair in val
                     if pair.complex.structure.key in keys})
    if not shared:
        return []
    return [f"ATTENTION: {len(shared)} structures are in training and validation, first "
            f"{shared[0]}: validation does not tell about new structures."]


def describe_left_out(pairs):
    """List of a warning, if pairs leave protein chains of their files out."""
    n = sum(bool(pair.complex.left_out) for pair in pairs)
    if not n:
        return []
    return [f"ATTENTION: {n:,} pairs leave other protein chains of their file out, so the model "
            "does not see these. If they matter, name them in fixed_chains, with design_chains "
            "instead of chain_id."]


# ---------------------------------------------------------------- tables of mutations
def load_tables(config: Any, ca_only: bool = False, alive: Callable = lambda: None) -> DpoData:
    """The proteins of a run, each with its measured variants. Arguments: see load_data."""
    data = config.data

    def read(path):
        alive()
        return read_proteins(Path(path), config.table, ca_only)

    train_tables, val_tables = read_both(data, read)
    check_group(train_tables, named(data.train_data), config.table.group)
    train, notes = variant_sets_of(train_tables, named(data.train_data), config)
    val = None
    if val_tables:
        val, lines = variant_sets_of(val_tables, named(data.val_data), config)
        notes += [*lines, *describe_shared_proteins(train, val)]
    elif data.val_fraction:
        train, val, how = hold_out_proteins(train, data, alive)
        notes += how
    content = [[variant_set.key for variant_set in part] for part in (train, val or [])]
    return data_of(train, val, content, notes)


def check_group(tables, names, column):
    """ValueError if no row of the tables has the column of groups. tables, names: of
    variant_sets_of."""
    if column is None:
        return
    for proteins, _ in tables:
        if any(column in variant.cells for protein in proteins for variant in protein.variants):
            return
    raise ValueError(f"{names}: found no column {column}, of table.group; expected one that says "
                     "which proteins stay together. Without groups: table.group=null.")


def read_proteins(path: Path, table: Any, ca_only: bool) -> tuple[list[Protein], str]:
    """(Proteins of a table, text on how it was understood). table: the config's section."""
    copies = [] if table.copies else None
    return place_all(read_mutations(path, table.measured), ca_only=ca_only, copies=copies)


def variant_sets_of(tables: list, names: str, config: Any) -> tuple[list[VariantSet], list[str]]:
    """(VariantSets of the proteins of all tables together, lines on them).

    tables: what read_proteins made of each. names: of the tables.
    Raises: ValueError for tables without a pair to learn from."""
    table = config.table
    proteins, notes = merge_proteins([proteins for proteins, _ in tables])
    proteins, lines = leave_out_long(proteins, names, config.data.max_length)
    notes += lines
    sets = [make_variant_set(protein, table) for protein in proteins]
    kept = [one for one in sets if has_pair(one.values, table.margin)]
    if not kept:
        raise ValueError(f"{names}: no two variants of a protein differ in {table.measured} by "
                         f"table.margin {table.margin:g} or more; expected some. Give a smaller "
                         "margin, or more variants.")
    for _, misfits in tables:
        notes += misfits.splitlines()
    return kept, [describe_table(names, proteins, sets, len(kept), table), *notes]


def leave_out_long(proteins: list[Protein], names: str,
                   longest: int | None) -> tuple[list[Protein], list[str]]:
    """(Proteins whose structures have no more rows than longest, lines on the others). None: all.

    names: of their tables. Raises: ValueError if none is left."""
    if longest is None:
        return proteins, []
    kept = [protein for protein in proteins if len(protein.complex) <= longest]
    left_out = [protein for protein in proteins if len(protein.complex) > longest]
    if not kept:
        raise ValueError(f"{names}: all {len(proteins):,} structures have more rows than "
                         f"data.max_length {longest:,}; expected some with fewer.")
    if not left_out:
        return kept, []
    shown = ", ".join(f"{protein.name} ({len(protein.complex):,})"
                      for protein in left_out[:MAX_LISTED])
    more = f" and {len(left_out) - MAX_LISTED:,} more" if len(left_out) > MAX_LISTED else ""
    return kept, [f"  left out, as they have more rows than data.max_length {longest:,}: "
                  f"{count(len(left_out), 'structure')}: {shown}{more}"]


def merge_proteins(tables: list[list[Protein]]) -> tuple[list[Protein], list[str]]:
    """(The Proteins of all tables, lines on those that are in several): a complex that is in
    several tables is one protein, with the variants of all, as if the tables were one."""
    if len(tables) == 1:
        return tables[0], []
    merged = {}         # content -> Protein
    in_several = set()
    for proteins in tables:
        former_keys = set(merged)
        for protein in proteins:
            shared = content_of(protein.complex, protein.partners)
            if shared in merged:
                former = merged[shared]
                protein = former._replace(variants=former.variants + protein.variants,
                                          changes=former.changes + protein.changes,
                                          wild_types=former.wild_types + protein.wild_types)
            merged[shared] = protein
            if shared in former_keys:
                in_several.add(shared)
    notes = []
    if in_several:
        notes.append(f"  {len(in_several):,} protein(s) are in several of these tables: each is "
                     "one protein, and its values are compared across the tables, so they must be "
                     "of one scale")
    return list(merged.values()), notes


def hold_out_proteins(sets: list[VariantSet], data: Any,
                      alive: Callable) -> tuple[list, list, list]:
    """Hold out whole families. Returns: the lists train and val, and lines on them.

    Raises: ValueError if either would be empty."""
    sequences = [mutated_chain(variant_set) for variant_set in sets]
    try:
        held = hold_out_families(sequences, data.val_fraction, data.identity, alive,
                                 [variant_set.groups for variant_set in sets])
    except ValueError as error:
        raise ValueError(f"{named(data.train_data)}: validation: {error} Or give a table of other "
                         "proteins (--val_data), or data.val_fraction=0 to train without "
                         "validation.") from None
    train = [one for one, held_out in zip(sets, held.is_held_out) if not held_out]
    val = [one for one, held_out in zip(sets, held.is_held_out) if held_out]
    groups = {name for variant_set in sets for name in variant_set.groups}
    lines = [f"  {count(len(train), 'protein')} for training, {len(val):,} of other families for "
             f"validation ({describe_families(held, data, len(groups))})"]
    are_of_binding = any(variant_set.partners for variant_set in sets)
    if are_of_binding and not groups:
        lines.append("ATTENTION: complexes are split by the identity of all their chains together, "
                     "so alike interfaces may be on both sides. Name a column of those that stay "
                     "together (table.group).")
    share = len(val) / len(sets)
    if not data.val_fraction / MOST_MISSED <= share <= data.val_fraction * MOST_MISSED:
        lines.append(f"ATTENTION: {share:.0%} of the proteins are held out for validation, but "
                     f"data.val_fraction asks for {data.val_fraction:.0%}: families stay together. "
                     "Give --val_data, or another fraction.")
    return train, val, lines


def describe_families(held, data, n_groups=0):
    """Text on what is a family. held: HeldOut. data: the config's section. n_groups: that the
    proteins name."""
    if held.are_aligned:
        groups = f", and none of {count(n_groups, 'group')} on both sides" if n_groups else ""
        return f"of {held.n_families:,}; identity of sequences below {data.identity:.0%}{groups}"
    return (f"of {held.n_families:,}; ATTENTION: more than {MOST_ALIGNED:,} are not aligned, so "
            "only equal sequences are kept together, and relatives may be on both sides. Cluster "
            "them by a tool such as MMseqs2, and give --val_data")


def mutated_chain(variant_set):
    """Letters of the chain that is mutated."""
    return decode(variant_set.complex.S[:variant_set.complex.n_designed])


def describe_shared_proteins(train, val):
    """List of a warning, if a file of validation has proteins, or groups, of the other."""
    sequences = {mutated_chain(variant_set) for variant_set in train}
    groups = {name for variant_set in train for name in variant_set.groups}
    shared = sorted({variant_set.name for variant_set in val
                     if mutated_chain(variant_set) in sequences
                     or groups.intersection(variant_set.groups)})
    if not shared:
        return []
    return [f"ATTENTION: {count(len(shared), 'protein')} of validation, or of its group, is in "
            f"training, first {shared[0]}: validation does not tell about new proteins."]


def describe_table(path, proteins, sets, n_kept, table):
    """A line on a table and what is used of it. n_kept: number of the proteins that are."""
    lengths = sorted({len(variant_set.complex) for variant_set in sets})
    residues = f"{lengths[0]:,} residues"
    if len(lengths) > 1:
        residues = f"{lengths[0]:,} to {lengths[-1]:,} residues each"
    n_variants = sum(len(variant_set.variants) for variant_set in sets)
    several = sum(len(variant) > 1 for variant_set in sets for variant in variant_set.variants)
    texts = [f"data: {path}: {n_variants:,} variants of {len(sets):,} protein(s), {residues}",
             f"{table.measured}, {table.better} is better"]
    if several:
        texts.append(f"{several:,} of several mutations")
    texts.append(describe_wild_type(proteins, table))
    if n_kept < len(sets):
        texts.append(f"{len(sets) - n_kept:,} protein(s) without a pair that differs by the margin "
                     "are left out")
    values = [each for protein in proteins for each in measured_values(protein).values()]
    texts += describe_duplicates(values, "variants", "their means count")
    reading = describe_reading(protein.structure for protein in proteins)
    if reading:
        texts.append(reading)
    return "; ".join(texts)


def describe_wild_type(proteins, table):
    """A text on where the value of the wild type is from, which may differ between proteins."""
    of_rows = [protein.wild_type for protein in proteins if protein.wild_types]
    n_others = len(proteins) - len(of_rows)
    texts = []
    if len(of_rows) == 1:
        texts.append(f"wild type {of_rows[0]:g}, of its row in the table")
    elif of_rows:
        texts.append(f"wild type of its row in the table for {len(of_rows):,} proteins")
    of_others = f" for {n_others:,} others" if of_rows else ""
    if n_others and table.wild_type is not None:
        texts.append(f"wild type {table.wild_type:g}, of table.wild_type{of_others}")
    elif n_others:
        texts.append(f"the wild type is in no pair{of_others}, as it has no value of a row of its "
                     "own or of table.wild_type")
    return "; ".join(texts)
