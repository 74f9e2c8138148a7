"""Random numbers and hashes that are the same on every machine."""
import hashlib

import numpy as np
import torch

from proteins.seeds import content_key, keyed_generator, random_words


def test_a_generator_is_of_all_its_parts():
    first, again, other = (torch.rand(3, generator=keyed_generator(k, "noise")) for k in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_random_words_are_of_all_integers_of_their_seed():
    seeds = [0, 1, [0, 1], [1, 1], [0, 1, 1], [0, -1]]
    assert len({random_words(1, seed)[0] for seed in seeds}) == len(seeds)


def test_random_words_are_the_same_numbers_in_every_version():
    assert random_words(1, [1, 2]).tolist() == [8271799387826207682]


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
