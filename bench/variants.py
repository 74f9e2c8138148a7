"""Scores of all mutations of a protein: one decoder pass for many residues, and one for each.

    python -m bench variants                        # made structures of 60, 150 and 300 residues
    python -m bench variants a.pdb b.pdb.gz         # all chains of structures

Random weights of the published size. Leaves no files.
"""
import argparse
import statistics
from pathlib import Path

import numpy as np
import torch

from bench.common import now, read_options, run_on_one_rank, say
from mpnn.model import random_proteinmpnn
from proteins.structures import Chain, Complex, Structure, read_structure
from training.fast_linear import fast_linear
from mpnn.variants import encode_complex, log_probs_decoded_last, variant_order

LENGTHS = (60, 150, 300)    # of made structures
SAMPLE = 24                 # residues that have a pass each in a turn
PASSES_AT_ONCE = 8          # as sample_proteinmpnn.py by default
VOLUME = 135.0              # cubic Angstrom of a residue in a protein


def bench_variants(args, ddp):
    """Time both ways in turns, and compare their results."""
    on_cpu = ddp.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    if args.structures:
        complexes = [(path.name, whole_complex(path)) for path in args.structures]
    else:
        complexes = [(f"{length} residues, made", made_complex(length)) for length in LENGTHS]
    model = random_proteinmpnn(0, product=fast_linear).eval().to(ddp.device)
    print(f"log-probabilities of a residue given all others, {ddp.device}, in turns, median of "
          f"{args.repeats}\n{'':<30}{'milliseconds a residue':^26}\n{'':<30}{'a pass each':>12}"
          f"{'one pass':>10}{'ratio':>8}  {'(min-max)':<13}{'difference':>10}")
    for name, complex in complexes:
        say(name)
        print(row_of(name, model, complex, args.repeats, ddp))


@torch.no_grad()
def row_of(name, model, complex, repeats, ddp):
    """A line of the table."""
    encoding = encode_complex(model, complex)
    S = torch.from_numpy(complex.S.astype(np.int64))[None].to(ddp.device)
    order = variant_order(len(complex), 0, 0).to(ddp.device)
    rows = np.flatnonzero(complex.mask).tolist()
    sample = rows[::max(len(rows) // SAMPLE, 1)]
    of_each = []
    of_one = []
    for _ in range(repeats):
        start = now(ddp)
        plain = torch.cat([model.conditional(encoding, S, order, sample[k:k + PASSES_AT_ONCE])
                           for k in range(0, len(sample), PASSES_AT_ONCE)])
        between = now(ddp)
        found = log_probs_decoded_last(model, encoding, S, order, rows)
        of_each.append((between - start) / len(sample))
        of_one.append((now(ddp) - between) / len(rows))
    ratios = [each / one for each, one in zip(of_each, of_one)]
    difference = (found[[rows.index(row) for row in sample]] - plain).abs().max().item()
    return (f"{name[:29]:<30}{statistics.median(of_each) * 1e3:>12.2f}"
            f"{statistics.median(of_one) * 1e3:>10.2f}{statistics.median(ratios):>7.1f}x  "
            f"{f'({min(ratios):.1f}-{max(ratios):.1f})':<13}{difference:>10.0e}")


def whole_complex(path):
    """All protein chains of a structure."""
    structure = read_structure(path)
    chains = [name for name, chain in structure.chains.items() if chain.resolved.any()]
    return Complex(structure, chains)


def made_complex(length):
    """Residues in a ball, as dense as in a protein, in random places."""
    random = np.random.default_rng(length)
    direction = random.normal(size=(length, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = (3 * VOLUME * length / (4 * np.pi)) ** (1 / 3)
    CA = direction * radius * random.random((length, 1)) ** (1 / 3)
    X = (CA[:, None] + random.normal(0, 1, (length, 4, 3))).astype(np.float32)
    letters = random.integers(0, 20, length).astype(np.uint8)
    chain = Chain(letters, X, np.ones(length, bool), tuple(map(str, range(length))))
    return Complex(Structure("made", {"A": chain}), ["A"])


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m bench variants", allow_abbrev=False,
                                     description=__doc__.split("\n")[0])
    parser.add_argument("structures", nargs="*", type=Path, help="PDB or mmCIF files")
    parser.add_argument("--repeats", type=int, default=3)
    args = read_options(parser, argv)
    run_on_one_rank("variants", bench_variants, args, argv)
