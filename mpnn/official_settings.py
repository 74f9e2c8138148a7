"""The published tool's JSON files of settings: what they say on one structure, checked.

    tables = {"fixed_positions_jsonl": read_json("fixed.jsonl")}
    settings = settings_of(tables, "5L33", {"A": 106})      # of a structure, with rows by chain
    settings.fixed                                          # {"A": [1, 2]}

A file holds one object, {structure: entry}. Each structure that is designed needs an entry; {}, []
or null in it, or in place of it, stand for nothing. Rows count from 1 in each chain, with gaps:
    chain_id_jsonl         {"5L33": [["A"], ["B"]]}: designed and fixed chains
    fixed_positions_jsonl  {"5L33": {"A": [1, 2]}}
    tied_positions_jsonl   {"5L33": [{"A": [1], "B": [1]}, {"A": [2], "B": [2]}]}
    bias_by_res_jsonl      {"5L33": {"A": rows x 21 nats, in the order ACDEFGHIKLMNPQRSTVWYX}}
    pssm_jsonl             {"5L33": {"A": {"pssm_coef": rows from 0 to 1, "pssm_bias": rows x 21
                           probabilities, "pssm_log_odds": not used}}}
bias_AA_jsonl, {"E": 0.5}, is keyed by letter and not by structure.
Source: examples and helper_scripts of github.com/dauparas/ProteinMPNN.
"""
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from proteins.letters import LETTERS
from proteins.tables import parse_json, quote
from training.files import read_text

MOST_JSON_BYTES = 1 << 28   # of a file; a PSSM of 1,000 residues has 0.5 MB
MAX_BIAS = 1e4          # nats; a larger bias would round away the logits in float32
PER_STRUCTURE = ("chain_id_jsonl", "fixed_positions_jsonl", "tied_positions_jsonl",
                 "bias_by_res_jsonl", "pssm_jsonl")
NOTHING = (None, {}, [])


class StructureSettings(NamedTuple):
    """What the files say on one structure. Rows count from 1 in their chain."""
    chains: list    # [designed, fixed], names of chains; [] if the files do not say
    fixed: dict     # {chain: rows that keep their letters}
    tied: list      # of {chain: rows}, groups of rows that get the same letter
    bias: dict      # {chain: (rows, 21) float64 nats}
    pssm: dict      # {chain: (share (rows,), probabilities (rows, 21))}


def read_json(path: str | Path) -> dict:
    """The JSON object in a file. Raises: ValueError for anything else, and for keys that come
    twice; OSError."""
    value = parse_json(read_text(path, MOST_JSON_BYTES), path, "one object, {...}, each key once")
    if not isinstance(value, dict):
        raise ValueError(f"{path}: found {quote(value)}; expected one JSON object, {{...}}.")
    return value


def settings_of(tables: dict[str, dict], name: str, n_rows: dict[str, int]) -> StructureSettings:
    """The StructureSettings of one structure.

    Args:
        tables: {option: object of its file}, of options in PER_STRUCTURE.
        name:   of the structure.
        n_rows: {chain: number of its rows}, of all its chains.
    Raises: ValueError for what is not as stated above, and for absent chains and rows.
    """
    def entry(option):
        """This structure's entry in the file of an option."""
        table = tables.get(option, {name: None})
        if name not in table:
            refuse_setting(f"--{option}", sorted(table),
                           f"{name} among the structures, with {{}} for no settings")
        return table[name]

    def of_chains(option, read):
        return by_chain(f"--{option}, {name}", entry(option), n_rows, read)

    return StructureSettings(
        chains=read_chains(f"--chain_id_jsonl, {name}", entry("chain_id_jsonl")),
        fixed=of_chains("fixed_positions_jsonl", rows_in_chain),
        tied=read_groups(f"--tied_positions_jsonl, {name}", entry("tied_positions_jsonl"), n_rows),
        bias=of_chains("bias_by_res_jsonl", read_bias),
        pssm=of_chains("pssm_jsonl", read_pssm))


def by_chain(where: str, entry: Any, n_rows: dict[str, int], read: Callable) -> dict:
    """{chain: read(where, value, rows of the chain)} of an entry {chain: value}."""
    if entry in NOTHING:
        return {}
    if not isinstance(entry, dict):
        refuse_setting(where, entry, "{chain: ...}")
    found = {}
    for chain, value in entry.items():
        if chain not in n_rows:
            refuse_setting(where, chain, f"a chain, one of {' '.join(n_rows)}")
        if value not in NOTHING:
            found[chain] = read(f"{where}, chain {chain}", value, n_rows[chain])
    return found


def read_chains(where, entry):
    """[designed, fixed], lists of names; [] for nothing. Whether there are such chains is checked
    with those of the command line."""
    if entry in NOTHING:
        return []
    is_right = isinstance(entry, list) and len(entry) == 2 and entry[0] != []
    for names in entry if is_right else ():
        is_right = is_right and isinstance(names, list)
        is_right = is_right and all(isinstance(name, str) for name in names)
    if not is_right:
        refuse_setting(where, entry, "[[designed chains], [fixed chains]]")
    return entry


def read_groups(where, entry, n_rows):
    """[{chain: rows}] of a list of groups, or of one group."""
    if isinstance(entry, list):
        return [by_chain(where, group, n_rows, rows_in_chain) for group in entry]
    return [by_chain(where, entry, n_rows, rows_in_chain)]


def rows_in_chain(where, value, n):
    """A list of rows of a chain of n."""
    is_right = isinstance(value, list) and all(type(i) is int and 1 <= i <= n for i in value)
    if not is_right or len(set(value)) < len(value):
        refuse_setting(where, value, f"a list of rows from 1 to {n}, gaps counted, none twice")
    return value


def read_bias(where, value, n):
    return read_numbers(where, value, (n, len(LETTERS)), -MAX_BIAS, MAX_BIAS)


def read_pssm(where, value, n):
    """(share (n,), probabilities (n, 21)): the log-odds have no use without a threshold."""
    if not isinstance(value, dict) or not {"pssm_coef", "pssm_bias"} <= value.keys():
        refuse_setting(where, value, "the keys pssm_coef and pssm_bias")
    share = read_numbers(f"{where}, pssm_coef", value["pssm_coef"], (n,), 0, 1)
    letters = read_numbers(f"{where}, pssm_bias", value["pssm_bias"], (n, len(LETTERS)), 0, 1)
    wrong = np.flatnonzero((share > 0) & (np.abs(letters.sum(1) - 1) > 0.01))
    if len(wrong):
        row = wrong[0]
        refuse_setting(f"{where}, pssm_bias", f"a sum of {letters[row].sum():g} in row {row + 1}",
               "probabilities, a sum of 1, where pssm_coef is above 0")
    return share, letters


def read_numbers(where, value, shape, low, high):
    """`value` as a float64 array of this shape, with numbers in low .. high."""
    try:
        array = np.array(value)
    except ValueError:      # rows of several lengths
        array = np.empty(0)
    # Not texts and truths, and not integers above 2**64, which numpy keeps as objects.
    is_right = array.shape == shape and array.dtype.kind in "iuf"
    if not is_right or not ((array >= low) & (array <= high)).all():    # False for nan, too
        refuse_setting(where, value, f"numbers of shape {shape} from {low:g} to {high:g}")
    return array.astype(np.float64)


def refuse_setting(where, found, expected):
    """Raise the ValueError of a setting."""
    raise ValueError(f"{where}: found {quote(found)}; expected {expected}.")
