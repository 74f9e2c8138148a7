"""Structures and pairs for tests: PDB and mmCIF text, files, made pairs."""
import json

import numpy as np
import pytest

from dpo.pairs import Pair, read_pairs
from mpnn.variants import Scoring, score_proteins
from proteins.structures import BACKBONE, Chain, Complex, Structure


class Atoms(list):
    """Records of a structure, written as PDB or mmCIF text.

    Where no coordinates are given they are counted up, so that each record is told from others.
    """

    def add(self, chain, number, name, atoms=BACKBONE, code="", het=False,    # noqa: PLR0913
            altloc="", model=1, xyz=None):   # the columns of a record
        for k, atom in enumerate(atoms):
            x = len(self) + 0.125
            self.append((chain, number, name, atom, code, het, altloc, model,
                         (x, -x, x / 2) if xyz is None else xyz[k]))
        return self

    def pdb(self):
        lines = []
        for i, (chain, number, name, atom, code, het, altloc, model, xyz) in enumerate(self):
            if i and model != self[i - 1][7]:
                lines += ["ENDMDL", f"MODEL {model:8}"]
            # Column 21 is the fourth letter of a residue, or the first of two of a chain.
            names = f"{name:>3}{chain:>2}" if len(name) < 4 else f"{name}{chain:1}"
            lines.append(f"{'HETATM' if het else 'ATOM':6}{i + 1:5} {' ' + atom:4}{altloc:1}"
                         f"{names}{number:4}{code:1}   "
                         f"{''.join(f'{value:8.3f}' for value in xyz)}  1.00 10.00{atom[0]:>12}")
        return "\n".join(lines) + "\nEND\n"

    def mmcif(self):
        keys = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
                "label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy "
                "B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num").split()
        residues = list(dict.fromkeys((chain, number, code)
                                      for chain, number, _, _, code, *_ in self))
        lines = [f"{'HETATM' if het else 'ATOM'} {i + 1} {atom[0]} {atom} {altloc or '.'} {name} "
                 f"L{chain} 1 {residues.index((chain, number, code)) + 500} {code or '?'} "
                 f"{' '.join(f'{value:.3f}' for value in xyz)} "
                 f"1.0 10.0 {number} {chain} {model}"
                 for i, (chain, number, name, atom, code, het, altloc, model, xyz)
                 in enumerate(self)]
        return "\n".join(["data_test", "loop_", *(f"_atom_site.{key}" for key in keys),
                          *lines]) + "\n"


def write(folder, data, name="pairs.json"):
    text = data if isinstance(data, (bytes, str)) else json.dumps(data)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def refusal(path, read=read_pairs, **options):
    """What `read` says, naming the path."""
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Chain A has rows 1, 2, 3 (unknown residue), 4 (gap), 5, 5A, 6 (without O); B 10, 11; D is DNA.
SMALL = (Atoms().add("A", 1, "MET").add("A", 2, "LYS").add("A", 3, "UNK").add("A", 5, "VAL")
         .add("A", 5, "LEU", code="A").add("A", 6, "ALA", BACKBONE[:3]).add("B", 10, "GLY")
         .add("B", 11, "TRP").add("D", 1, " DA", ["P"]))


GOOD = {"pdb_file": "small.pdb", "preferred_seq": "MKXXVLA", "unpreferred_seq": "MRXXVIA",
        "chain_id": "A"}
ABSENT = object()
AB = {"chain_id": ABSENT, "design_chains": ["A", "B"], "preferred_seq": "MKXXVLAGW",
      "unpreferred_seq": "MRXXVIAGW"}


def changed(**changes):
    """GOOD with some keys changed, or taken out."""
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not ABSENT}


def made(length, n_pairs, number=0, chosen=None):
    """Pairs with different random sequences on one structure of this length."""
    rng = np.random.default_rng([length, number])
    X = rng.normal(size=(length, 4, 3)).astype(np.float32)
    everywhere = np.ones(length, bool)
    chain = Chain(np.zeros(length, np.uint8), X, everywhere, tuple(map(str, range(length))))
    complex = Complex(Structure(f"s{number}", {"A": chain}), ["A"])
    return [Pair(complex, one if chosen is None else chosen, other, everywhere)
            for one, other in rng.integers(0, 20, (n_pairs, 2, length)).astype(np.uint8)]


def keys(pairs):
    return {pair.complex.structure.key for pair in pairs}


def score_variants(model, complex, variants, scoring=Scoring()):
    """(n,) scores of the variants of one complex."""
    scores, = score_proteins(model, [complex], [variants], scoring)
    return scores
