"""Synthetic preference pairs with a rule to learn, for demonstrations and tests. Reads no file."""

import math
import re
from collections.abc import Sequence

import numpy as np

from mpnn.pairs import Pair
from proteins.letters import AMINO_ACIDS, encode
from proteins.seeds import FOR_DEMO
from proteins.structures import Chain, Complex, Structure

PHI_PSI = {"helix": (-57, -47), "strand": (-120, 120)}              # degrees
SUITED = {"helix": "AEHKLMQR", "strand": "CFITVWY"}                 # preferred letters there
OTHER = {"helix": "strand", "strand": "helix"}
# Length (Angstrom) of the bond that ends in an atom, and angle (degrees) at the atom before it.
BOND = {"N": (1.329, 117.2), "CA": (1.458, 121.7), "C": (1.525, 111.0), "O": (1.231, 120.1)}


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
    suited = {kind: encode(letters) for kind, letters in SUITED.items()}
    neutral = encode(re.sub(f"[{''.join(SUITED.values())}]", "", AMINO_ACIDS))
    pairs = []
    for number in range(n_structures):
        draw = np.random.Generator(np.random.PCG64([FOR_DEMO, seed % 2**64, number])).random
        first = "helix" if number % 2 else "strand"
        places = []         # helix or strand, for each residue
        for kind in (first, OTHER[first], first):
            places += [kind] * (8 + int(7 * draw()))

        def sample(share):
            """(letters (L,) uint8, how many of them suit their segment)."""
            ids = []
            n_suited = 0
            for place in places:
                suits = draw() < share
                if draw() < 0.2:
                    choice = neutral
                elif suits:
                    choice = suited[place]
                    n_suited += 1
                else:
                    choice = suited[OTHER[place]]
                ids.append(choice[int(draw() * len(choice))])
            return np.array(ids, np.uint8), n_suited

        everywhere = np.ones(len(places), bool)
        X = build_backbone(*zip(*(PHI_PSI[kind] for kind in places)))
        native, _ = sample(0.75)
        chain = Chain(native, X, everywhere, tuple(str(i + 1) for i in range(len(places))))
        complex = Complex(Structure(f"demo {number}", {"A": chain}), ["A"])
        while len(pairs) < (number + 1) * pairs_per_structure:
            chosen, better = sample(0.75)
            rejected, worse = sample(0.25)
            if better - worse >= len(places) / 5:
                pairs.append(Pair(complex, chosen, rejected, everywhere))
    return pairs


def build_backbone(phi: Sequence[float], psi: Sequence[float]) -> np.ndarray:
    """Build a backbone with ideal bonds and trans peptides.

    Source: Engh and Huber 1991, Acta Cryst. A47, 392.

    Args:
        phi, psi: (L,) torsions in degrees.
    Returns: X (L, 4, 3) float32, Angstrom.
    """
    def place(a, b, c, atom, torsion):
        """The atom after a, b, c."""
        length, degrees = BOND[atom]
        angle = math.radians(degrees)
        torsion = math.radians(torsion)
        along = (c - b) / np.linalg.norm(c - b)
        normal = np.cross(b - a, along)
        normal /= np.linalg.norm(normal)
        across = math.cos(torsion) * np.cross(normal, along) + math.sin(torsion) * normal
        return c + length * (math.sin(angle) * across - math.cos(angle) * along)

    N = np.zeros(3)
    CA = np.array([BOND["CA"][0], 0, 0])
    C = place(np.array([0, 1.0, 0]), N, CA, "C", 0)
    rows = []
    for i in range(len(phi)):
        rows.append([N, CA, C, place(N, CA, C, "O", psi[i] + 180)])
        next_N = place(N, CA, C, "N", psi[i])
        next_CA = place(CA, C, next_N, "CA", 180)
        next_C = place(C, next_N, next_CA, "C", phi[(i + 1) % len(phi)])
        N = next_N
        CA = next_CA
        C = next_C
    return np.array(rows, np.float32)
