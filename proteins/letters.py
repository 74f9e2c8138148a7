"""The letters of proteins and their tokens: 20 amino acids and X, for every model.

    tokens = encode("MKV")      # uint8 (3,)
    decode(tokens)              # "MKV"
"""
import re

import numpy as np

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
X_ID = 20                       # unknown residue: an ordinary input, never a target, never sampled
N_TOKENS = 21
LETTERS = AMINO_ACIDS + "X"
RARE = "BZUOJ"                  # Asx, Glx, Sec, Pyl, Leu/Ile: a share below 2e-6 each; read as X

# Share of each letter of AMINO_ACIDS in UniRef50 (18.8 million residues, EvoDiff's test split).
UNIREF50 = (.086, .014, .055, .061, .039, .069, .022, .055, .051, .096,
            .022, .041, .050, .038, .059, .074, .057, .065, .013, .030)

# The token of each letter, as a table for bytes.translate; other signs have none.
TO_TOKEN = bytes.maketrans((LETTERS + RARE).encode(),
                           bytes([*range(N_TOKENS), *[X_ID] * len(RARE)]))


def encode(sequence):
    """Token ids of a str of the 20 letters, X, B, Z, U, O, J (the last five become X): uint8 (L,).

    Raises ValueError for anything else, lower case included: read_sequences cleans, this does not.
    """
    wrong = re.search(f"[^{LETTERS}{RARE}]", sequence)
    if wrong:
        raise ValueError(f"found {wrong.group()!r} at position {wrong.start() + 1} of a sequence; "
                         f"expected the letters {LETTERS}{RARE}. Remove gaps, stops and blanks, "
                         f"and write upper case.")
    return np.frombuffer(sequence.encode().translate(TO_TOKEN), np.uint8)


def decode(tokens):
    """Integer array (L,) of ids 0..20 -> str. Raises ValueError for another id, such as a mask."""
    tokens = np.asarray(tokens)
    if tokens.size and (tokens.min() < 0 or tokens.max() > X_ID):
        raise ValueError(f"found token ids {tokens.min()} to {tokens.max()}; expected 0 to {X_ID}. "
                         f"A mask or padding has no letter: denoise or cut before decoding.")
    return "".join(LETTERS[t] for t in tokens.tolist())
