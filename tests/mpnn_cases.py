"""Structures and pairs for tests: PDB and mmCIF text, files, made pairs; the official numbers."""
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpo.pairs import Pair, read_pairs
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import from_checkpoint
from mpnn.variants import Scoring, score_proteins
from proteins.letters import AMINO_ACIDS, LETTERS
from proteins.structures import BACKBONE, NAMES, Chain, Complex, Structure

SIZES = {"hidden_size": 16, "n_encoder": 1, "n_decoder": 1, "num_edges": 8}   # of a small network
# Of a run of train_mpnn_ddp.py that takes a second.
TINY = {"training.residues_per_batch": 100, "training.micro_batches": 4, "training.n_iters": 6,
        "training.eval_freq": 3, "training.snapshot_freq": 3, "training.log_freq": 1,
        "optim.lr": 3e-3, "optim.warmup": 2, "data.val_fraction": 0.3,
        "memory.mixed_precision": "false"}


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


def random_complex(length=30, unresolved=(), second=0):
    """A complex of chain A, perhaps with a context chain B, of random atoms."""
    rng = np.random.default_rng(length)
    chains = {}
    for name, n in (("A", length), ("B", second)):
        if n:
            resolved = np.ones(n, bool)
            resolved[list(unresolved)] = name == "B"
            X = rng.normal(0, 4, (n, 1, 3)) + rng.normal(0, 1, (n, 4, 3))
            X[~resolved] = 0
            letters = rng.integers(0, 20, n).astype(np.uint8)
            chains[name] = Chain(letters, X.astype(np.float32), resolved,
                                 tuple(map(str, range(n))))
    return Complex(Structure("made", chains), ["A"], [name for name in chains if name != "A"])


def backbone(S, X, chain="A", first=1):
    """Atoms of a chain of letters S (L,) at X (L, 4, 3), whose residues count from `first`."""
    atoms = Atoms()
    for number, (letter, xyz) in enumerate(zip(S, X), first):
        atoms.add(chain, number, NAMES[letter], xyz=xyz)
    return atoms


def write_structure(folder, name, seed, sizes):
    """A PDB file of chains of so many residues: ideal helices, shaken, 12 Angstrom apart."""
    draw = np.random.default_rng(seed)
    atoms = Atoms()
    for k, (chain, n) in enumerate(zip("ABC", sizes)):
        X = build_backbone(*zip(*[PHI_PSI["helix"]] * n)) + [0, 12.0 * k, 0]
        X = X + draw.normal(0, 0.4, X.shape)
        letters = [LETTERS.index(letter) for letter in draw.choice(list(AMINO_ACIDS), n)]
        atoms += backbone(letters, X, chain)
    write(folder, atoms.pdb(), name)


def write_structures(folder):
    """A folder of 14 structures of one or two chains."""
    folder.mkdir(exist_ok=True)
    for k in range(14):
        write_structure(folder, f"s{k}.pdb", k, [24 + k] if k % 2 else [24 + k, 30 - k])
    return folder


# ---- the official code's numbers ----

def official_numbers(shared, product=F.linear):
    """What the official code computes, with its models as ours, which multiply by `product`."""
    numbers = torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)
    numbers["models"] = {name.removeprefix("checkpoint_"):
                         from_checkpoint(value, product=product).eval()
                         for name, value in numbers.items() if name.startswith("checkpoint_")}
    return numbers


def near(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, check_dtype=False,
                               **{"rtol": 0, "atol": 0, **tolerance})


def each_case(numbers, what):
    """[(case, inputs, reference model, policy model)] of the cases that have `what`. numbers: of
    official_numbers."""
    models = numbers["models"]
    cases = [case for case in numbers["cases"].values() if what in case]
    assert cases
    return [(case, case["inputs"], models[case["model"]], models[case["model"] + "_policy"])
            for case in cases]


def graph_of(model, inputs):
    names = ("X", "mask", "residue_idx", "chain_encoding_all")
    return model.graph(*(inputs[name] for name in names))
