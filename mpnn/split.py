"""The pairs of a run: read from files or made up, and split into training and validation.

    data = load_pairs(config.data, seed=0)                  # all that a run needs, in one call; or:
    train, val, warnings = split_pairs(pairs, 0.1, seed=0)  # two lists, split by structure

All results depend only on the arguments, so that every rank reads and splits the same. Reads what
mpnn/pairs.py reads; writes nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpo.pair_files import PairsOfRun, hold_out_groups, join_groups, pairs_of_run, read_both
from mpnn.demo import demo_pairs
from mpnn.pairs import describe, read_pairs
from proteins.seeds import FOR_SPLIT, content_key, random_words

MOST_MISSED = 2             # warn if the held-out fraction misses val_fraction by a larger factor


def load_pairs(data: Any, seed: int, alive: Callable = lambda: None,
               ca_only: bool = False) -> PairsOfRun:
    """The pairs to train on and to validate with.

    Args:
        data:  section of a config with train_data (None: demo pairs), val_data, val_fraction,
            max_length, mutable_positions, mutable_ranges, demo_structures, demo_pairs.
        seed:  of the split and of the demo pairs.
        alive, ca_only: see read_pairs.
    Raises: ValueError that lists the problems of both files.
    """
    positions = data.mutable_positions or data.mutable_ranges
    structures = {}         # read once, for both files
    notes = []              # how the positions were understood
    warnings = []

    def read(path):
        return read_pairs(path, structures, positions, data.max_length, notes, alive, ca_only)

    pairs, val = read_both(data, read)
    if data.train_data is None:
        pairs = demo_pairs(seed, data.demo_structures, data.demo_pairs)
    lines = [f"data: {data.train_data or 'demo (no --train_data)'}: {describe(pairs)}"]
    if positions:
        lines.append("  mutable where a pair gives none: "
                     f"{notes[0] if notes else 'not needed, each pair gives its own'}")
    if data.val_data is not None:
        lines.append(f"  {data.val_data}, for validation: {describe(val)}")
        keys = {pair.complex.structure.key for pair in pairs}
        shared = sorted({pair.complex.structure.name for pair in val
                         if pair.complex.structure.key in keys})
        if shared:
            warnings.append(f"{len(shared)} structures are in training and validation, first "
                            f"{shared[0]}: validation does not tell about new structures.")
    elif data.val_fraction:
        pairs, val, warnings = split_pairs(pairs, data.val_fraction, seed)
        n = len({pair.complex.structure.key for pair in val})
        lines.append(f"  {len(pairs):,} pairs for training, {len(val):,} on {n:,} structure(s) for "
                     "validation")
    all_pairs = [*pairs, *(val or [])]
    partial = sum(bool(pair.complex.left_out) for pair in all_pairs)
    if partial:
        warnings.append(f"{partial:,} pairs leave other protein chains of their file out, so the "
                        "model does not see these. If they matter, name them in fixed_chains, "
                        "with design_chains instead of chain_id.")
    content = [[pair.key for pair in part] for part in (pairs, val or [])]   # in their order
    weights = [pair.weight for pair in all_pairs]
    if any(weight != 1 for weight in weights):
        content.append(weights)
    lines += [f"ATTENTION: {warning}" for warning in warnings]
    return pairs_of_run(pairs, val, content, lines)


def split_pairs(pairs: list, val_fraction: float, seed: int) -> tuple[list, list, list]:
    """Split pairs into training and validation so that no structure is on both sides.

    max(1, round(val_fraction x number)) of the structures go to validation. Only the seed and their
    content (Structure.key) decide which. Similar structures may still be on both sides. A single
    structure is split by sequence, with a warning: pairs that share a sequence, directly or through
    other pairs, stay together, and about val_fraction of the pairs go to validation. Another
    warning says if the fraction held out is more than MOST_MISSED times above or below this.

    Args:
        pairs:        list of Pair.
        val_fraction: above 0 and below 1.
        seed:         int.
    Returns: the lists of pairs train and val, in the order of `pairs`, and a list of warnings.
    Raises: ValueError if all pairs of a single structure are linked by shared sequences.
    """
    groups = np.array([pair.complex.structure.key for pair in pairs], np.int64)
    by_sequence = len(set(groups.tolist())) == 1
    if by_sequence:
        groups = _linked_by_sequence(pairs)
    keys = np.unique(groups)
    if len(keys) < 2:
        raise ValueError(f"all {len(pairs):,} pairs are of one structure and linked by the "
                         "sequences that they share, so none can be held out; expected pairs that "
                         "can be split. Give a file of validation pairs (--val_data), or train "
                         "without validation (data.val_fraction=0).")
    if by_sequence:
        is_val = hold_out_groups(groups, val_fraction, seed)
    else:
        draws = [random_words(1, [FOR_SPLIT, seed, key])[0] for key in keys.tolist()]
        order = np.argsort(draws, kind="stable").tolist()
        n_val = max(1, math.floor(val_fraction * len(keys) + 0.5))
        is_val = np.isin(groups, keys[order[:min(n_val, len(keys) - 1)]])
    train = [pairs[i] for i in np.flatnonzero(~is_val)]
    val = [pairs[i] for i in np.flatnonzero(is_val)]
    return train, val, _split_warnings(len(val), len(pairs), val_fraction, by_sequence)


def _split_warnings(n_val, n, val_fraction, by_sequence):
    """List of warnings about a split."""
    warnings = []
    if by_sequence:
        warnings.append(f"all pairs are of one structure: {n_val:,} of {n:,} are held out by "
                        "sequence, so validation measures other sequences, not other "
                        "structures. To measure these, give --val_data.")
    if not val_fraction / MOST_MISSED <= n_val / n <= val_fraction * MOST_MISSED:
        together = "linked by sequences that they share" if by_sequence else "of one structure"
        warnings.append(f"{n_val:,} of {n:,} pairs ({n_val / n:.0%}) are held out for validation, "
                        f"but data.val_fraction asks for {val_fraction:.0%}: pairs {together} stay "
                        "together. Give --val_data, pairs on more structures, or "
                        "data.val_fraction=0 to train on all of them without validation.")
    return warnings


def _linked_by_sequence(pairs):
    """(n,) int64, equal for pairs that share a chain's sequence, directly or through other pairs.

    It does not depend on the order of the pairs. A sequence that is the same in the chosen and the
    rejected design of every pair that has it shows no preference, and links no pairs.
    """
    sequences = []      # of each pair
    varied = set()      # those of chains that differ in some pair
    for pair in pairs:
        chain_id = pair.complex.chain_id[:len(pair.chosen)]
        chains = [{letters[chain_id == k].tobytes() for letters in (pair.chosen, pair.rejected)}
                  for k in np.unique(chain_id)]
        sequences.append(set().union(*chains))
        varied.update(*(texts for texts in chains if len(texts) == 2))
    roots = join_groups([texts & varied for texts in sequences])
    return np.array([content_key(root) for root in roots], np.int64)
