"""Random numbers and hashes that are the same on every machine and with every version of numpy.

    generator = keyed_generator(seed, "noise", step)    # of torch; depends on these parts alone
    words = random_words(9, [FOR_PAIRS, seed, epoch])   # of numpy
    key = content_key("MKV", array)                     # of what a protein or a pair holds

Each random choice has its own seed, made of integers and a word by ddp_setup.seed_for. So no choice
depends on how many random numbers other code has drawn.
"""
import hashlib

import numpy as np
import torch

from ddp_setup import seed_for

# The first number of a list that seeds random_words: no two purposes share a stream.
FOR_PAIRS = 2
FOR_LENGTHS = 3
FOR_STEPS = 4
FOR_DEMO = 5
FOR_COUPLES = 7
FOR_SEVERAL = 10


def keyed_generator(*parts) -> torch.Generator:
    """A generator of torch on the CPU, seeded by seed_for(*parts)."""
    return torch.Generator().manual_seed(seed_for(*parts))


def random_words(shape, seed) -> np.ndarray:
    """Random uint64 of this shape. seed: an integer, or a list of integers."""
    if isinstance(seed, list):
        seed = [int(part) % 2**64 for part in seed]
    # numpy promises never to change this stream; permutation() and shuffle() may change.
    return np.random.PCG64(seed).random_raw(shape)


def content_key(*parts) -> int:
    """Hash of arrays, texts and numbers: an integer in [0, 2**63), equal on every machine."""
    plain = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
    return int.from_bytes(bytes.fromhex(content_hash(plain)), "little") >> 1


def content_hash(content, n_bytes=8) -> str:
    """Hash of lists, texts and numbers, as text: blake2b of this many bytes."""
    return hashlib.blake2b(repr(content).encode(), digest_size=n_bytes).hexdigest()
