"""Scores of residues and of variants by SEDD, each behind a mask.

    nats = residue_scores(sedd, "MKTAYIAKQ")                    # -ln p of each residue: (L,)
    scores = variant_scores(sedd, "MKTAYIAKQ", [[(0, 0)], [(0, 0), (2, 19)]])
    scores = score_proteins(sedd, ["MKTAYIAKQ", "GSHHW"], [[[(0, 0)]], [[(3, 1)], [(4, 1)]]])
    nats, residues = masked_nll(sedd, Proteins.from_sequences([encode("MKTAYIAKQ")]), samples=8)

The score of a variant is ln p(mutant letter) - ln p(wild-type letter), summed over the mutated
positions, all masked at once, given the rest of the wild type: above 0 if the model prefers the
mutant. Writes nothing.
"""
import collections
import itertools
import math

import numpy as np
import torch

from ddp_setup import Ddp, all_sum
from ddp_watch import note_progress
from proteins.letters import X_ID, encode
from proteins.seeds import keyed_generator
from proteins.sequences import Proteins, collate
from sedd.batches import batches_within
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
    mask_id = mask_of(sedd)
    ends = np.cumsum((rows == mask_id).sum(1))   # masks up to each row
    log_probs = torch.zeros(int(ends[-1]), X_ID)
    size = max(tokens // rows.shape[1], 1)
    for first in range(ddp.rank * size, len(rows), ddp.world_size * size):
        part = torch.from_numpy(rows[first:first + size]).long()
        log_p = log_probs_at_masks(sedd, part, None, dtype, ddp)
        end = ends[first:first + size][-1]
        log_probs[end - len(log_p):end] = log_p
        note_progress()
    return all_sum(log_probs, ddp).double().numpy()


def log_probs_at_masks(sedd, xt, real, dtype, ddp):
    """ln p of each letter at the masks of xt (B, L): (masks, 20), on the CPU, row by row.

    real: (B, L) bool, False under padding; None if there is no padding."""
    xt = xt.to(ddp.device)
    is_mask = xt == sedd.graph.mask_id
    if real is None:
        share = is_mask.float().mean(1)
    else:
        real = real.to(ddp.device)
        share = is_mask.sum(1) / real.sum(1)
    # The noise level at which this share is masked on average.
    sigma = -torch.log1p(-share.clamp(max=0.99))
    with autocast(dtype, ddp):
        log_scores = sedd.model(xt, sigma, real, is_mask)
    return torch.log_softmax(log_scores[is_mask][:, :X_ID], -1).cpu()


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
    first_mask = {}     # of the row for all variants of the same places
    n_masks = 0
    for changes in variants:
        places = mutated_places(changes)
        if places not in first_mask:
            first_mask[places] = n_masks
            n_masks += len(places)
    rows = np.tile(row, (len(first_mask), 1))
    for masked, places in zip(rows, first_mask):
        masked[list(places)] = mask_of(sedd)
    log_p = predict_letters(sedd, rows, **how)
    scores = np.zeros(len(variants))
    for number, changes in enumerate(variants):
        places = mutated_places(changes)
        for place, letter in changes:
            mask = first_mask[places] + places.index(place)
            scores[number] += log_p[mask, letter] - log_p[mask, row[place]]
    return scores


def mutated_places(changes):
    """The places of a variant, a list of (place, token), from left to right."""
    return tuple(sorted(place for place, _ in changes))


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
    for protein, sequence in enumerate(wild_types):
        size = max(tokens // len(sequence), 1)
        batches += [(protein, batch) for batch in batches_by_places(variants[protein], size)]
    own_batches = batches[ddp.rank::ddp.world_size]
    own_total = sum(len(batch) for _, batch in own_batches)
    counts = [len(protein_variants) for protein_variants in variants]
    scores = [torch.zeros(n, dtype=torch.float64) for n in counts]
    for protein, batch in own_batches:
        batch_scores = variant_scores(sedd, wild_types[protein],
                                      [variants[protein][k] for k in batch],
                                      tokens=tokens, dtype=dtype, ddp=alone)
        scores[protein][batch] = torch.from_numpy(batch_scores)
        note_progress()
        if done is not None:
            done(len(batch), own_total)
    scores = all_sum(torch.cat(scores), ddp)     # of each variant one rank has the score
    return [protein_scores.numpy() for protein_scores in scores.split(counts)]


def batches_by_places(variants, size):
    """Lists of numbers of variants, from 0, that mutate at most `size` different sets of places.

    Variants of the same places, which need one pass of the network, are in the same list, wherever
    they stand. variants: lists of (place, token)."""
    groups = collections.defaultdict(list)      # places -> numbers of the variants that have them
    for number, changes in enumerate(variants):
        groups[mutated_places(changes)].append(number)
    groups = list(groups.values())
    return [list(itertools.chain.from_iterable(groups[first:first + size]))
            for first in range(0, len(groups), size)]


@torch.no_grad()
def masked_nll(sedd, proteins: Proteins, samples, tokens=16384, dtype=torch.float32, ddp=None):
    """-ln p of masked residues given the unmasked ones, and their number: what the perplexity of
    order-agnostic models is computed from. Collective if ddp is given.

    Of a protein of L residues L + 1 - t are masked, at random places, t uniform over 1 .. L - 1: so
    from 2 to L are. Masked residues of unknown letter (X) do not count. Masks are seeded by the
    protein alone. Source: Alamdari et al. 2023 (EvoDiff), bioRxiv 2023.09.11.556673.

    Args:
        samples: sets of masks of each protein; their sizes are evenly spread over 2 .. L.
        tokens: positions in a batch, padding included.
    Returns: (nats, residues), each (n, samples) float64, of each protein and set: the perplexity of
        all is exp(nats.sum() / residues.sum()). Each protein is computed on one rank; all get the
        same result, whatever their number.
    """
    ddp = ddp or Ddp(device=next(sedd.model.parameters()).device)
    mask_id = mask_of(sedd)
    nats = torch.zeros(len(proteins), samples, dtype=torch.float64)
    residues = torch.zeros(len(proteins), samples, dtype=torch.float64)
    batches = batches_within(proteins.lengths, proteins.lengths.max(initial=tokens))
    for indices in batches[ddp.rank::ddp.world_size]:
        x0, real = collate(proteins.subset(indices))
        for k in range(samples):
            masked = draw_masks(proteins, indices, k, samples, x0.shape)
            xt = torch.where(masked, mask_id, x0)
            log_p = log_probs_at_masks(sedd, xt, None if real.all() else real, dtype, ddp).double()
            target = x0[masked]
            known = target != X_ID
            # X has no probability of its own: any letter's stands in for it, and does not count.
            of_target = log_p.gather(1, target.where(known, 0)[:, None])[:, 0]
            own_row = masked.nonzero()[:, 0]
            index = torch.from_numpy(indices)[own_row]
            nats[:, k].index_add_(0, index, -of_target * known)
            residues[:, k].index_add_(0, index, known.double())
            note_progress()
    return all_sum(nats, ddp).numpy(), all_sum(residues, ddp).numpy()


def draw_masks(proteins, indices, k, samples, shape):
    """Set k of `samples` sets of masks, see masked_nll, of the proteins of a batch of this shape:
    (B, L) bool."""
    masked = torch.zeros(shape, dtype=torch.bool)
    for row, i in enumerate(indices.tolist()):
        length = int(proteins.lengths[i])
        generator = keyed_generator("masks", int(proteins.keys[i]), k)
        place = (k + float(torch.rand((), generator=generator, dtype=torch.float64))) / samples
        number = min(2 + int(place * (length - 1)), length)    # a single residue is masked
        masked[row, torch.randperm(length, generator=generator)[:number]] = True
    return masked
