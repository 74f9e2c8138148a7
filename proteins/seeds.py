"""Random numbers and hashes that are the same on every machine and with every version of numpy."""
import hashlib

import numpy as np

# The first number that random_words is seeded by: no two purposes share a stream.
FOR_SPLIT = 1
FOR_PAIRS = 2
FOR_LENGTHS = 3
FOR_STEPS = 4
FOR_DEMO = 5
FOR_MUTATIONS = 6


def random_words(n: int, *integers: int) -> np.ndarray:
    """(n,) random uint64 seeded by integers. numpy promises never to change this stream."""
    return np.random.PCG64([int(i) % 2**64 for i in integers]).random_raw(n)


def content_key(*parts) -> int:
    """Hash of arrays, texts and numbers: an integer in [0, 2**63), equal on every machine."""
    plain = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
