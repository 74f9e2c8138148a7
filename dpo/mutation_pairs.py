"""Preference pairs from measured mutations of one protein.

    rules = Rules(margin=0.5, lower_is_better=True)
    pairs = pair_mutations({((7, 18),): 1.2, ((9, 0),): -0.3}, rules, key=complex.key)
    text = mutated(chain.S, pairs[0].better)

A variant is a tuple of (row, letter), sorted; the wild type is (). Pairs are of two kinds:

    wild type    each variant against the wild type, whose value is `wild_type`
    mutants      in each of `rounds` rounds the variants are shuffled, and neighbours in this order
                 paired: each variant meets about `rounds` random others, and none twice

Equal values make no pair, nor do those that differ by less than `margin`.
"""
from typing import NamedTuple

import numpy as np

from proteins.letters import decode
from proteins.seeds import FOR_MUTATIONS, random_words

AGAINST = ("wild_type", "mutants", "both")
WILD_TYPE = ()


class Rules(NamedTuple):
    """Which pairs are made."""
    against: str = "both"           # one of AGAINST
    wild_type: float = 0.0          # its value, in the unit of the variants'
    rounds: int = 2
    margin: float = 0.0             # least difference of values
    lower_is_better: bool = False


class Preference(NamedTuple):
    """Two variants, the better one first."""
    better: tuple
    worse: tuple
    difference: float               # of their values, above 0


def pair_mutations(values: dict[tuple, float], rules: Rules, key: int) -> list[Preference]:
    """The pairs of one protein, largest difference first.

    Args:
        values: {variant: measured value}.
        key:    seed of the shuffles, such as a hash of the structure.
    """
    variants = sorted(values)
    together = []
    if rules.against in ("wild_type", "both"):
        together += [(variant, WILD_TYPE) for variant in variants]
    if rules.against in ("mutants", "both"):
        together += random_couples(variants, rules.rounds, key)
    values = {**values, WILD_TYPE: rules.wild_type}
    sign = -1 if rules.lower_is_better else 1
    least = rules.margin * (1 - 1e-9)       # allows for rounding
    found = []
    for one, other in together:
        difference = sign * (values[one] - values[other])
        if difference > 0 and difference >= least:
            found.append(Preference(one, other, difference))
        elif difference < 0 and -difference >= least:
            found.append(Preference(other, one, -difference))
    return sorted(found, key=lambda pair: -pair.difference)


def random_couples(variants, rounds, key):
    """[(variant, another)] of all rounds, none twice."""
    couples = {}
    for number in range(rounds):
        draws = random_words(len(variants), [FOR_MUTATIONS, key, number])
        order = np.argsort(draws, kind="stable").tolist()
        for one, other in zip(order[::2], order[1::2]):
            couple = (min(one, other), max(one, other))
            couples[couple] = (variants[couple[0]], variants[couple[1]])
    return list(couples.values())


def mutated(S: np.ndarray, variant: tuple) -> str:
    """The sequence S (L,) of a chain with the letters of a variant."""
    letters = S.copy()
    for row, letter in variant:
        letters[row] = letter
    return decode(letters)
