"""Ideal backbones, for demonstrations and tests. Reads no file.

    X = build_backbone(*zip(*[PHI_PSI["helix"]] * 12))      # (12, 4, 3)
"""

import math
from collections.abc import Sequence

import numpy as np

PHI_PSI = {"helix": (-57, -47), "strand": (-120, 120)}              # degrees
# Length (Angstrom) of the bond that ends in an atom, and angle (degrees) at the atom before it.
BOND = {"N": (1.329, 117.2), "CA": (1.458, 121.7), "C": (1.525, 111.0), "O": (1.231, 120.1)}


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
