"""proteins/identity.py: which proteins are relatives, and on which side they are."""
import numpy as np
import pytest

from proteins.identity import (
    LONGEST_PART,
    hold_out_families,
    identity,
    identity_of_parts,
    known_letters,
    relatives,
)
from proteins.letters import AMINO_ACIDS

WHOLE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"      # 33 residues
SHARE = 0.3


def drawn(rng, length):
    return "".join(rng.choice(list(AMINO_ACIDS), length))


def held_out_of(sequences, fraction):
    """The set of the sequences that are held out."""
    held = hold_out_families(sequences, fraction, SHARE)
    return {text for text, is_held_out in zip(sequences, held.is_held_out) if is_held_out}


# ---- identity ----

@pytest.mark.parametrize("one, other, expected", [
    (WHOLE, WHOLE, 1),
    ("MKTAYIAKQR", "MKTAYIAKQW", 9 / 10),
    (WHOLE, WHOLE[:14] + WHOLE[18:], 29 / 33),      # 4 columns of a gap
    (WHOLE, WHOLE[8:], 1),                          # the longer one overhangs
    ("WWWW" + WHOLE[5:], WHOLE[5:] + "GGGG", 28 / 32),      # of the shorter one all residues count
    ("AAAA", "WWWW", 0),
    ("", WHOLE, 0)])
def test_identity_is_that_of_an_alignment_by_hand(one, other, expected):
    assert identity(one, other) == pytest.approx(expected)


def test_letters_at_two_ends_that_overlap_are_divided_by_the_shorter_length():
    assert identity("GGGGGGGGGG" + "W", "W" + "DDDDDDDDDD") <= 1 / 11


def test_identity_is_the_same_either_way():
    rng = np.random.default_rng(0)
    for _ in range(20):
        one = drawn(rng, 40)
        other = drawn(rng, 45)
        assert identity(one, other) == identity(other, one)


@pytest.mark.parametrize("start, least", [
    (100, 0.95), (LONGEST_PART + 100, 0.95), (LONGEST_PART - 30, 0.5)])
def test_a_domain_of_a_chain_that_is_compared_in_parts_is_found(start, least):
    rng = np.random.default_rng(1)
    domain = drawn(rng, 60)
    chain = drawn(rng, 2 * LONGEST_PART)
    chain = chain[:start] + domain + chain[start + len(domain):]
    assert identity(domain, chain) >= least


# ---- relatives ----

@pytest.mark.parametrize("other", [
    WHOLE[5:],                                # other residues are resolved
    WHOLE[10:18],                             # a small part
    WHOLE[:9] + "XXX" + WHOLE[12:],           # a gap
    WHOLE[:20] + "D" + WHOLE[21:],            # a mutant
    "".join(letter if row % 2 else "P" for row, letter in enumerate(WHOLE)),    # no two in a row
    "GGSGGS" + WHOLE + "PPHHHHHH"])
def test_a_relative_is_found(other):
    assert known_identity(WHOLE, other) >= SHARE


@pytest.mark.parametrize("one, other", [
    (WHOLE, WHOLE[::-1]), (WHOLE, "XXXX"), ("MKXXXX", "GHXXXX"), ("XXXX", "XXXX")])
def test_other_proteins_are_no_relatives(one, other):
    assert known_identity(one, other) < SHARE


def known_identity(one, other):
    """Of two proteins, as they are held out together or not."""
    return identity(known_letters(one), known_letters(other))


# ---- sides ----

def families(n):
    """Sequences of n families of three: one, one with every other letter of it, and one with every
    other letter of that."""
    rng = np.random.default_rng(2)
    sequences = []
    for _ in range(n):
        text = drawn(rng, 60)
        for first in range(3):
            sequences.append(text)
            other = drawn(rng, 60)
            text = "".join(pair[row % 2 == first % 2] for row, pair in enumerate(zip(text, other)))
    return sequences


def test_relatives_are_never_on_both_sides():
    sequences = families(15)
    held = hold_out_families(sequences, 0.4, SHARE)
    across = [identity(sequences[one], sequences[other])
              for one in np.flatnonzero(held.is_held_out)
              for other in np.flatnonzero(~held.is_held_out)]
    assert max(across) < SHARE


def test_relatives_of_relatives_are_on_one_side():
    """Of each family the third has hardly a letter of the first."""
    held = hold_out_families(families(15), 0.4, SHARE)
    of_families = held.is_held_out.reshape(15, 3)
    assert held.n_families == 15
    assert (of_families.all(1) | ~of_families.any(1)).all()


def test_the_side_of_a_family_depends_on_nothing_else():
    sequences = families(15)
    whole = held_out_of(sequences, 0.5)
    part = sequences[21:][::-1]
    assert held_out_of(part, 0.5) == {text for text in part if text in whole}


def test_the_families_that_are_held_out_are_those_of_a_hash_of_their_letters():
    """`printf CCCC | sha256sum` begins with 90b4: 0x90b4 / 0x10000 = 0.565."""
    sequences = ["AAAA", "CCCC", "DDDD", "EEEE"]        # 0.390, 0.565, 0.225, 0.682
    assert held_out_of(sequences, 0.3) == {"DDDD"}
    assert held_out_of(sequences, 0.5) == {"AAAA", "DDDD"}


def test_copies_and_those_of_other_unknown_residues_are_on_one_side():
    sequences = families(15)
    whole = hold_out_families(sequences, 0.4, SHARE).is_held_out
    copies = [f"XX{text[:30]}X{text[30:]}" for text in sequences]
    held = hold_out_families([*sequences, *sequences, *copies], 0.4, SHARE)
    assert held.is_held_out.tolist() == 3 * whole.tolist()
    assert held.n_families == 15


def test_about_the_fraction_of_unrelated_proteins_is_held_out():
    rng = np.random.default_rng(3)
    held = hold_out_families([drawn(rng, 30) for _ in range(200)], 0.2, share=1)
    assert held.n_families == 200
    assert held.is_held_out.sum() == pytest.approx(40, abs=4 * (200 * 0.2 * 0.8) ** 0.5)


def test_proteins_of_one_family_are_refused():
    with pytest.raises(ValueError, match=r"\b2\b"):
        hold_out_families([WHOLE, WHOLE], 0.5, SHARE)


@pytest.mark.parametrize("fraction, expected", [(1e-9, 1), (1 - 1e-9, 3)])
def test_a_family_at_least_is_on_each_side(fraction, expected):
    rng = np.random.default_rng(0)
    sequences = [drawn(rng, 30) for _ in range(4)]
    assert hold_out_families(sequences, fraction, SHARE).is_held_out.sum() == expected


def mutant(rng, sequence, share):
    """The sequence with other letters at a share of places, and a few residues out and in."""
    letters = [rng.choice(list(AMINO_ACIDS)) if rng.random() < share else letter
               for letter in sequence]
    return "".join([*letters[:40], *letters[45:100], *drawn(rng, 6), *letters[100:]])


def test_of_many_sequences_those_are_aligned_that_share_words(monkeypatch):
    rng = np.random.default_rng(5)
    sequences = [drawn(rng, length) for length in range(150, 230, 2)]
    sequences += [mutant(rng, sequence, 0.45) for sequence in sequences[:20]]
    expected = relatives(sequences, SHARE)
    assert len(expected) == 20
    aligned = []

    def align(parts, others):
        aligned.append(0)
        return identity_of_parts(parts, others)

    monkeypatch.setattr("proteins.identity.identity_of_parts", align)
    monkeypatch.setattr("proteins.identity.ALL_PAIRS", 3)
    assert relatives(sequences, SHARE) == expected
    assert len(aligned) < 60 * 59 / 2 / 10


def test_sequences_shorter_than_a_word_share_none(monkeypatch):
    monkeypatch.setattr("proteins.identity.ALL_PAIRS", 1)
    assert relatives(["", "MK", WHOLE, WHOLE[1:]], SHARE) == [(3, 2)]


def test_of_too_many_sequences_only_equal_ones_are_relatives(monkeypatch):
    sequences = families(15)
    aligned = hold_out_families(sequences, 0.4, SHARE)
    monkeypatch.setattr("proteins.identity.MOST_ALIGNED", 3)
    held = hold_out_families(sequences, 0.4, SHARE)
    assert aligned.are_aligned and not held.are_aligned
    assert held.n_families == len(set(sequences)) > aligned.n_families
