"""Runs of train_dpo_ddp.py for tests: settings, made pairs, files of pairs and of tables."""
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

import train_dpo_ddp
from ddp_setup import Ddp
from dpo.demo import demo_pairs
from dpo.pairs import Pair
from mpnn_cases import SIZES, Atoms, backbone
from proteins.letters import AMINO_ACIDS, LETTERS, X_ID, decode
from proteins.structures import NAMES, Complex, Structure, read_structure
from train_dpo_ddp import Config, MicroBatchDataset, loss_of_pairs
from training.config import load_config
from training_runs import prepare_and_train, words

TINY = {"training.batch_size": 3, "training.accum": 2, "training.n_iters": 12,
        "training.log_freq": 1, "optim.lr": 3e-3, "optim.warmup": 3,
        "model.base_model_name": "random", "data.demo_structures": 6, "data.demo_pairs": 5,
        **{f"model.random.{k}": v for k, v in SIZES.items()}}


def tiny(**more):
    return load_config(Config, None, words(TINY, **more))


def run(config, work_dir, **options):
    return prepare_and_train(train_dpo_ddp, config, Ddp(), work_dir, **options)


def small_pairs():
    """Pairs of different lengths and weights; some with fixed positions, unresolved rows, a context
    chain."""
    pairs = []
    random = np.random.default_rng(0)
    chains = []
    for i, pair in enumerate(demo_pairs(seed=3, n_structures=4, pairs_per_structure=4)):
        mask = pair.chain_M
        if i % 4 == 0:   # not ideal backbones: there, neighbours lie at equal distances
            chain = pair.complex.structure.chains["A"]
            X = chain.X + random.normal(0, 0.3, chain.X.shape).astype(np.float32)
            chains.append(replace(chain, X=X))
            complex = Complex(Structure(f"s{i}", {"A": chains[-1]}), ["A"])
        elif i % 4 == 1:
            mask = random.random(len(mask)) < 0.5
        pairs.append(Pair(complex, np.where(mask, pair.chosen, pair.rejected), pair.rejected, mask))
    one, other, *_ = chains
    other = replace(other, S=np.where(np.arange(len(other.S)) % 9 == 4, X_ID, other.S))
    two = Complex(Structure("two", {
        "A": replace(one, resolved=np.arange(len(one.S)) % 7 != 3),
        "B": replace(other, X=other.X + np.float32(20))}), ["A"], ["B"])
    pairs += [Pair(two, pairs[k].chosen, pairs[k].rejected, pairs[k].chain_M) for k in (0, 2, 3)]
    for i, pair in enumerate(pairs):
        pair.weight = (1 + i % 3) / 64   # of float32 without rounding
    return pairs


def run_of(config, policy, base, pairs, loss_of=loss_of_pairs):
    """What a run has for its loss and its validation, on these pairs."""
    return SimpleNamespace(config=config, loss_function=loss_of, base=base, bare=policy,
                           model=policy, dtype=torch.float32,
                           validation=MicroBatchDataset(pairs, config))


# ---- files ----

def write_pairs(folder, n=None):
    """Write pairs.json, 6 pairs on 3 structures of all, or n, residues."""
    entries = []
    for i, pair in enumerate(demo_pairs(seed=5, n_structures=3, pairs_per_structure=2)):
        atoms = backbone(pair.complex.S, pair.complex.X[:n])
        (folder / f"s{i // 2}.pdb").write_text(atoms.pdb())
        entries.append({"pdb_file": f"s{i // 2}.pdb", "preferred_seq": decode(pair.chosen[:n]),
                        "unpreferred_seq": decode(pair.rejected[:n]), "chain_id": "A"})
    (folder / "pairs.json").write_text(json.dumps(entries))


# ---- tables of mutations ----

TABLE = {"loss.unit": "table", "table.measured": "ddg", "table.better": "lower"}


def config_of(**more):
    return load_config(Config, None, words({**TINY, **TABLE, "training.batch_size": 2}, **more))


def write_table(folder, name="table.csv", residues=14, shift=0):
    """Write a table of all letters at some rows of three structures, of some at both, and the
    structures. Low values are of letters at the beginning of the alphabet, so that there is
    something to learn."""
    write_pairs(folder, residues)
    lines = ["pdb_file,mutation,ddg"]
    for number in range(3):
        chain = read_structure(folder / f"s{number}.pdb").chains["A"]
        names = []          # of the residues, with their letter
        for row in (2, 9):
            native = LETTERS[chain.S[row]]
            names.append(f"{native}{int(chain.numbers[row]) + shift}")
            for place, letter in enumerate(AMINO_ACIDS):
                if letter != native:
                    lines.append(f"s{number}.pdb,{names[-1]}{letter},{place - 10}")
        for place, letter in enumerate(AMINO_ACIDS):
            if letter not in (names[0][0], names[1][0]):
                both = f"{names[0]}{letter}:{names[1]}{letter}"
                lines.append(f"s{number}.pdb,{both},{2 * (place - 10)}")
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def write_binding(folder, name="binding.csv"):
    """Write a table of binding of three complexes of 9 and 7 residues, and the complexes. The first
    two are of group g."""
    write_pairs(folder, 16)
    lines = ["pdb_file,partners,mutations,ddg,group"]
    for number in range(3):
        chain = read_structure(folder / f"s{number}.pdb").chains["A"]
        atoms = Atoms()
        for row in range(16):
            atoms.add("AB"[row > 8], row, NAMES[chain.S[row]], xyz=chain.X[row])
        (folder / f"b{number}.pdb").write_text(atoms.pdb())
        one, other = (f"{LETTERS[chain.S[row]]}{'AB'[row > 8]}{row}" for row in (3, 12))
        for place, letter in enumerate("ACDEW"):
            for text in (f"{one}{letter}", f"{other}{letter}", f"{one}{letter},{other}{letter}"):
                if f"{one[0]}{letter}" not in ("AA", "CC", "DD", "EE", "WW") and other[0] != letter:
                    lines.append(f"b{number}.pdb,A_B,\"{text}\",{place - len(text) / 9},"
                                 f"{'g' if number < 2 else 'h'}")
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name
