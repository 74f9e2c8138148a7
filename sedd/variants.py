"""Scores of residues and of variants by SEDD, each behind a mask.

    nats = residue_scores(sedd, "MKTAYIAKQ")                    # -ln p of each residue: (L,)
    ratios = variant_scores(sedd, "MKTAYIAKQ", [[(0, 0)], [(0, 0), (2, 19)]])
    of_each = score_proteins(sedd, ["MKTAYIAKQ", "GSHHW"], [[[(0, 0)]], [[(3, 1)], [(4, 1)]]])

The score of a variant is ln p(mutant letter) - ln p(wild-type letter), summed over the mutated
positions, all masked at once, given the rest of the wild type: above 0 if the model prefers the
mutant. Writes nothing.
"""
import collections
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_setup import Ddp, all_sum
from ddp_watch import note_progress
from proteins.letters import X_ID, encode
from training.precision import autocast


def mask_of(sedd):
    """The token id of the mask. Raises ValueError for the uniform graph, which has none."""
    if not sedd.graph.absorb:
        raise ValueError("each position is scored behind a mask, which the uniform graph does not "
                         "have; expected a model with the absorbing one.")
    return sedd.graph.mask_id


@torch.no_grad()
def predict_letters(sedd, rows, tokens=16384, dtype=torch.float32, ddp=None):
    """ln p of each letter at the masks of each row, given the rest of the row.

    Args:
        rows: (n, L) array of tokens, with mask_of(sedd) at the places to be predicted.
        tokens: positions in a batch.
    Returns: (masks, 20) float64, row by row, and from left to right within a row.
    """
    ddp = ddp or Ddp(device=next(sedd.model.parameters()).device)
    ends = np.cumsum((rows == mask_of(sedd)).sum(1))   # masks up to each row
    out = torch.zeros(int(ends[-1]), X_ID)
    size = max(tokens // rows.shape[1], 1)
    for first in range(ddp.rank * size, len(rows), ddp.world_size * size):
        part = torch.from_numpy(rows[first:first + size]).long().to(ddp.device)
        with autocast(dtype, ddp):
            log_p = log_probs_at_masks(sedd.model, part, mask_of(sedd)).cpu()
        end = ends[first:first + size][-1]
        out[end - len(log_p):end] = log_p
        note_progress()
    return all_sum(out, ddp).double().numpy()


def log_probs_at_masks(model: torch.nn.Module, rows: Tensor, mask_id: int) -> Tensor:
    """ln p (masks, 20) of each letter at the masks of rows, in their order, with gradients.

    rows: (n, L) int64 tokens, mask_id at the places to be predicted."""
    is_mask = rows == mask_id
    # The noise level at which this share is masked on average.
    share = is_mask.float().mean(1).clamp(max=0.99)
    scores = model(rows, -torch.log1p(-share), None, is_mask)
    return torch.log_softmax(scores[is_mask][:, :X_ID], -1)


class MaskedRows(NamedTuple):
    """Rows of a protein with masks, and where the letters of N variants are found behind these.

    rows:   (n, L) int64 tokens.
    number: (E,) int64, of each mutation of a variant: the variant, 0 to N - 1.
    mask:   (E,) int64: which mask, counted as by log_probs_at_masks.
    letter, wild_type: (E,) int64.
    n_variants: () int64, N.
    """
    rows: Tensor
    number: Tensor
    mask: Tensor
    letter: Tensor
    wild_type: Tensor
    n_variants: Tensor


def mask_places(row: np.ndarray, variants: list[list[tuple[int, int]]], mask_id: int,
                groups: list[list[int]] | None = None) -> MaskedRows:
    """The MaskedRows of variants of a protein (L,), each a list of (place, letter).

    All mutated places of a variant are masked in one row, which serves all variants of the same
    places. groups: of places, each masked in one row that serves the single mutations of all of
    them; None: each place has a row."""
    together = {place: tuple(sorted(group)) for group in groups or [] for place in group}
    places_of = []          # masked in the row of each variant
    for changes in variants:
        places = tuple(sorted(place for place, _ in changes))
        if len(places) == 1:
            places = together.get(places[0], places)
        places_of.append(places)
    firsts = {}             # places of a row -> the number of its first mask
    n_masks = 0
    for places in places_of:
        if places not in firsts:
            firsts[places] = n_masks
            n_masks += len(places)
    rows = np.tile(row.astype(np.int64), (len(firsts), 1))
    for masked, places in zip(rows, firsts):
        masked[list(places)] = mask_id
    entries = []
    for number, (changes, places) in enumerate(zip(variants, places_of)):
        entries += [(number, firsts[places] + places.index(place), letter, row[place])
                    for place, letter in changes]
    columns = torch.from_numpy(np.array(entries, np.int64).T)
    return MaskedRows(torch.from_numpy(rows), *columns, torch.tensor(len(variants)))


def ratios_of(log_p: Tensor, masked: MaskedRows) -> Tensor:
    """ln p(variant) - ln p(wild type), (N,), of log_probs_at_masks (masks, 20)."""
    ratios = log_p[masked.mask, masked.letter] - log_p[masked.mask, masked.wild_type]
    return ratios.new_zeros(int(masked.n_variants)).index_add(0, masked.number, ratios)


def residue_scores(sedd, sequence, **how):
    """-ln p of each residue given all others, in nats: (L,) float64, nan for X.

    Each position is masked in turn. If the sequence is longer than the model was trained on, only
    the residues around the position are given. how: see predict_letters."""
    row = encode(sequence)
    places = np.arange(len(row))
    width = min(len(row), sedd.max_length)
    starts = (places - width // 2).clip(0, len(row) - width)
    rows = row[starts[:, None] + np.arange(width)]
    rows[places, places - starts] = mask_of(sedd)
    log_p = predict_letters(sedd, rows, **how)   # one mask in each row
    return np.where(row == X_ID, math.nan, -log_p[places, np.minimum(row, X_ID - 1)])


def variant_scores(sedd, sequence, variants, **how):
    """ln p(variant) - ln p(wild type) of the mutated residues, all masked at once: (n,) float64.

    variants: lists of (place from 0, token). how: see predict_letters. Source of the score ("masked
    marginals"): Meier et al. 2021, bioRxiv 2021.07.09.450648."""
    row = encode(sequence)
    if len(row) > sedd.max_length:
        raise ValueError(f"the sequence has {len(row):,} residues, but the model was trained on at "
                         f"most {sedd.max_length:,}. Cut it to the part that is mutated.")
    masked = mask_places(row, variants, mask_of(sedd))
    log_p = predict_letters(sedd, masked.rows.numpy(), **how)
    return ratios_of(torch.from_numpy(log_p), masked).numpy()


def score_proteins(sedd, wild_types, variants, done=None, tokens=16384, dtype=torch.float32,
                   ddp=None):
    """variant_scores of several proteins: a list of (n,) float64. Collective if ddp is given.

    Each batch is scored by one rank, so that many proteins of few variants use all ranks.

    Args:
        wild_types: texts.
        variants: of each, lists of (place from 0, token).
        done: called after each batch of this rank, with the number of its variants, and of those in
            all batches of this rank.
        tokens: positions in a batch.
    """
    ddp = ddp or Ddp(device=next(sedd.model.parameters()).device)
    alone = Ddp(device=ddp.device)
    batches = []
    for number, sequence in enumerate(wild_types):
        size = max(tokens // len(sequence), 1)
        batches += [(number, part) for part in batches_by_places(variants[number], size)]
    own_batches = batches[ddp.rank::ddp.world_size]
    own_total = sum(len(part) for _, part in own_batches)
    counts = [len(of_protein) for of_protein in variants]
    scores = [torch.zeros(n, dtype=torch.float64) for n in counts]
    for number, part in own_batches:
        of_part = [variants[number][k] for k in part]
        found = variant_scores(sedd, wild_types[number], of_part, tokens=tokens, dtype=dtype,
                               ddp=alone)
        scores[number][part] = torch.from_numpy(found)
        note_progress()
        if done is not None:
            done(len(found), own_total)
    of_all = all_sum(torch.cat(scores), ddp)     # of each variant one rank has the score
    return [of_protein.numpy() for of_protein in of_all.split(counts)]


def batches_by_places(variants, size):
    """Lists of numbers of variants, from 0, that mutate at most `size` different sets of places.

    Variants of the same places, which need one pass of the network, are in the same list, wherever
    they stand. variants: lists of (place, token)."""
    of_places = collections.defaultdict(list)
    for number, changes in enumerate(variants):
        of_places[tuple(sorted(place for place, _ in changes))].append(number)
    groups = list(of_places.values())
    return [list(itertools.chain.from_iterable(groups[first:first + size]))
            for first in range(0, len(groups), size)]
