"""Random numbers and hashes that are the same on every machine."""
import hashlib

import numpy as np

from proteins.seeds import content_key


def test_the_key_of_a_content_is_the_same_number_in_every_version():
    content = b"['A', 3, b'\\x00\\x00\\xc0?']"     # 1.5 in 32 bits
    digest = hashlib.blake2b(content, digest_size=8).digest()
    key = content_key("A", 3, np.array([1.5], np.float32))
    assert key == int.from_bytes(digest, "little") // 2


def test_one_number_of_a_long_array_makes_another_key():
    numbers = np.zeros(100_000, np.float32)
    before = content_key(numbers)
    numbers[50_000] = 1
    assert content_key(numbers) != before
