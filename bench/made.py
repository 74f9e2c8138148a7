"""Made data for benchmarks: random proteins, a structure, pairs, a table of mutations."""
import csv
import json

import numpy as np

from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import ATOMS
from proteins.letters import LETTERS, X_ID
from proteins.structures import NAMES, read_structure

LONGEST = 45_000            # residues in a random protein, at most


def made_lengths(n, random):
    """(n,) int64 lengths as in UniRef50: log-normal, mean 287. random: a numpy generator."""
    return np.exp(random.normal(np.log(200), 0.85, n)).clip(11, LONGEST).astype(np.int64)


def write_made_fasta(path, lengths, random):
    """Write a FASTA file of random proteins of these lengths."""
    letters = np.array(list(LETTERS[:X_ID]))
    with open(path, "w") as file:
        for i, length in enumerate(lengths):
            file.write(f">made{i}\n{''.join(random.choice(letters, length))}\n")


def write_demo_pdb(path, n_residues):
    """Helices and strands of 12 residues in turns, as a PDB file with one chain."""
    kinds = [("helix", "strand")[i // 12 % 2] for i in range(n_residues)]
    X = build_backbone(*zip(*(PHI_PSI[kind] for kind in kinds)))
    X -= X.min((0, 1))                      # a PDB column has no room for numbers such as -1000.000
    with open(path, "w") as file:
        for i, residue in enumerate(X.tolist()):
            for k, (atom, xyz) in enumerate(zip(ATOMS, residue)):
                place = f"{4 * i + k + 1:5d}  {atom:<3} {NAMES[i * 7 % 20]} A{i + 1:4d}"
                x, y, z = (f"{coordinate:8.3f}" for coordinate in xyz)
                file.write(f"ATOM  {place}    {x}{y}{z}  1.00  0.00           {atom[0]}\n")


def write_made_pairs(path, structure, n):
    """Write n pairs of random sequences on a structure that write_demo_pdb wrote, beside it."""
    random = np.random.default_rng(0)
    chain, = read_structure(structure).chains.values()
    letters = np.array(list(LETTERS[:X_ID]))
    pairs = []
    for _ in range(n):
        chosen, rejected = ("".join(random.choice(letters, len(chain.S))) for _ in range(2))
        pairs.append({"pdb_file": structure.name, "chain_id": "A", "preferred_seq": chosen,
                      "unpreferred_seq": rejected})
    path.write_text(json.dumps(pairs))


def write_made_table(path, structure, pairs, n):
    """Write a table of all single mutations, with random values, of a structure that write_demo_pdb
    wrote, beside it; and as `pairs` n pairs of them."""
    random = np.random.default_rng(0)
    chain, = read_structure(structure).chains.values()
    rows = []
    sequences = []          # (row, sequence) of each mutation
    for row, native in enumerate(chain.S):
        for letter in range(X_ID):
            if letter != native:
                mutation = f"{LETTERS[native]}{row + 1}{LETTERS[letter]}"
                rows.append([structure.name, mutation, f"{random.normal(1):.3f}"])
                sequence = chain.S.copy()
                sequence[row] = letter
                sequences.append((row, "".join(LETTERS[k] for k in sequence)))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["pdb_file", "mutation", "ddg"], *rows])
    entries = []
    for _ in range(n):
        one, other = random.choice(len(rows), 2, replace=False)
        place, chosen = sequences[one]
        other_place, rejected = sequences[other]
        entries.append({"pdb_file": structure.name, "chain_id": "A", "preferred_seq": chosen,
                        "unpreferred_seq": rejected,
                        "mutable_positions": sorted({place, other_place})})
    pairs.write_text(json.dumps(entries))
