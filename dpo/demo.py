"""Synthetic preference pairs with a rule to learn, for demonstrations and tests. Reads no file."""

from collections.abc import Callable

import numpy as np

from dpo.pairs import Pair
from mpnn.demo import PHI_PSI, build_backbone
from proteins.letters import encode
from proteins.seeds import FOR_DEMO
from proteins.structures import Chain, Complex, Structure

SUITED = {"helix": "AEHKLMQR", "strand": "CFITVWY"}                 # preferred letters there
NEUTRAL = "DGNPS"                                                # suit neither
OTHER = {"helix": "strand", "strand": "helix"}


def demo_pairs(seed: int = 0, n_structures: int = 32, pairs_per_structure: int = 8) -> list[Pair]:
    """Make synthetic pairs with a rule to learn.

    A structure is one chain of three segments of 8 to 14 residues, alternating helix and strand.
    The rule: the chosen sequence has more residues that suit their segment, AEHKLMQR in helix and
    CFITVWY in strand. One residue in five is D, G, N, P or S, which suit neither. Of the others,
    three in four suit in chosen and native sequences, and one in four in rejected ones. Pairs are
    drawn again until the chosen one has at least L / 5 more residues that suit. Letters are as
    frequent in chosen as in rejected sequences, so that a model has to look at the backbone.

    Returns: list of n_structures x pairs_per_structure Pair.
    """
    pairs = []
    for number in range(n_structures):
        draw = np.random.Generator(np.random.PCG64([FOR_DEMO, seed % 2**64, number])).random
        first = "helix" if number % 2 else "strand"
        places = []         # helix or strand, for each residue
        for kind in (first, OTHER[first], first):
            places += [kind] * (8 + int(7 * draw()))

        everywhere = np.ones(len(places), bool)
        X = build_backbone(*zip(*(PHI_PSI[kind] for kind in places)))
        native, _ = draw_sequence(places, 0.75, draw)
        chain = Chain(native, X, everywhere, tuple(str(i + 1) for i in range(len(places))))
        backbone = Complex(Structure(f"demo {number}", {"A": chain}), ["A"])
        while len(pairs) < (number + 1) * pairs_per_structure:
            chosen, better = draw_sequence(places, 0.75, draw)
            rejected, worse = draw_sequence(places, 0.25, draw)
            if better - worse >= len(places) / 5:
                pairs.append(Pair(backbone, chosen, rejected, everywhere))
    return pairs


def draw_sequence(places: list[str], share: float, draw: Callable) -> tuple[np.ndarray, int]:
    """(letters (L,) uint8, how many of them suit their segment). places: helix or strand, for each
    residue; share: of those that are not neutral, how many suit; draw(): a number in [0, 1)."""
    ids = []
    n_suited = 0
    for place in places:
        suits = draw() < share
        if draw() < 0.2:
            choice = NEUTRAL
        elif suits:
            choice = SUITED[place]
            n_suited += 1
        else:
            choice = SUITED[OTHER[place]]
        ids.append(choice[int(draw() * len(choice))])
    return encode("".join(ids)), n_suited
