"""Scores of variants: log-probability of the mutant's letters less that of the wild type's.

    scores, = score_proteins(model, [structure], [[[(7, 18)], [(7, 18), (30, 2)]]])
    scores = score_proteins(model, structures, variants, correction=base_model, ddp=ddp)
    log_p = log_probs_decoded_last(model, encoding, S, order, positions)        # (P, 21)
    scores, entropy = scores_in_order(model, encoding, S, order, index, how)    # with gradients

A mutated residue is decoded last, so that it sees the letters of all others. Variants of several
mutations have passes of their own, see joint_log_probs. All single mutations of a protein are
scored from one pass, by OneOrder. What depends on the place of residue i in the decoding order is
little, and only this is computed anew for each i:

    others decoded before i    in any case do not see i: as in the pass of the whole order
    others decoded after i     those with i as a neighbour see its letter no more. In the second
                               layer also those that see one of these, and so on
    i itself                   sees all its neighbours

Of what has changed, only that counts which reaches i: in the last layer i alone, in the layer
before it the neighbours of i, and so on. With three layers and 48 neighbours that is about 50
residues for each i, instead of three times all. In the first layer, moreover, only the message of i
itself is another; those of the other neighbours are kept from the pass of the whole order.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_setup import Ddp, all_sum
from ddp_watch import note_progress
from mpnn.batches import collate_complexes
from mpnn.model import (
    Encoding,
    ProteinMPNN,
    SharedContext,
    decoded_before,
    decoding_order,
    run_once,
    run_twice,
    step_of_residue,
    sum_hidden,
    take_rows,
)
from proteins.seeds import keyed_generator
from proteins.structures import Complex

AT_ONCE = 256       # residues that are moved to the end side by side
# Rows of a layer whose messages are computed at once: 9 MB a tensor. The backward pass of each such
# part fills a whole tensor of edges, and larger ones are slower to allocate. Measured, 69 and 286
# residues: 192 takes up to 1.2 times as long, 1536 1.4 times.
ROWS_AT_ONCE = 384
SAVES_MEMORY_FROM = 200     # residues, see choose_run


@torch.no_grad()
def log_probs_decoded_last(model: ProteinMPNN, encoding: Encoding, S: Tensor, order: Tensor,
                           positions: list[int]) -> Tensor:
    """Log-probabilities of residues given the backbone and the letters of all other residues.

    The same numbers as of model.decode with each of them last in the order, which would run the
    decoder on all residues for each. Call model.eval() first, or dropout is active.

    Args:
        encoding:  of one structure, without padding.
        S:         (1, L) int64 letters.
        order:     (1, L) int64, in which the others are decoded; the residue itself comes last.
        positions: P residues, from 0.
    Returns: (P, 21) in nats.
    """
    return OneOrder(model, encoding, S, order).log_probs(positions)


class Scoring(NamedTuple):
    """How variants are scored.

    n_orders:   random decoding orders of the other residues, over which the mean is taken.
    seed:       of the orders, which are the same for all variants.
    batch_size: sequences with several mutations per pass, wild types counted too.
    """
    n_orders: int = 4
    seed: int = 0
    batch_size: int = 8


def score_proteins(  # noqa: PLR0913  (the last two only say where, and how far)
        model: ProteinMPNN, structures: list[Complex], variants: list[list[list[tuple[int, int]]]],
        scoring: Scoring = Scoring(), correction: ProteinMPNN | None = None,
        done: Callable[[int, int], object] = lambda n, total: None,
        ddp: Ddp | None = None) -> list[np.ndarray]:
    """ln p(mutant) - ln p(wild type) of the mutated residues, given all others, of the variants of
    several proteins. Collective if ddp is given, with the same result for any number of ranks.

    The mutated residues are decoded last. If there are several, they follow one another along the
    structure in the first, third, ... order, and in reverse in the others; each sees the letters of
    those before it, of the mutant for the mutant, of the wild type for the wild type. Each order of
    each protein is computed by one rank.

    Args:
        model:      in eval mode, on its device.
        structures: with the wild types' letters.
        variants:   of each protein, each a list of (row of the structure, letter 0 to 20), of
                    different rows that are resolved.
        correction: model whose score of the residues alone is subtracted, or None.
        done:       called after each order of this rank, with the number of its variants, and of
                    those in all of this rank.
    Returns: of each protein (n,) float64 in nats; below 0: the model prefers the wild type.
    """
    ddp = ddp or Ddp(device=next(model.parameters()).device)
    alone = scoring.n_orders    # a unit of work after the orders
    numbers = range(scoring.n_orders + (correction is not None))
    units = [(protein, number) for protein in range(len(structures)) for number in numbers]
    own_units = units[ddp.rank::ddp.world_size]
    own_total = sum(len(variants[protein]) for protein, _ in own_units)
    counts = [len(protein_variants) for protein_variants in variants]
    tables = [torch.zeros(scoring.n_orders + 1, n, dtype=torch.float64) for n in counts]
    encoded = None      # the protein of `encoding`
    for protein, number in own_units:
        structure = structures[protein]
        if number == alone:
            scores = score_alone(correction, structure, variants[protein])
        else:
            if protein != encoded:
                encoding = encode_complex(model, structure)
                encoded = protein
            scores = score_in_order(model, encoding, structure, variants[protein], scoring, number)
        tables[protein][number] = torch.from_numpy(scores)
        note_progress()
        done(len(scores), own_total)
    tables = all_sum(torch.cat(tables, dim=1), ddp).split(counts, dim=1)    # one rank has a number
    return [mean_over_orders(table.numpy()) for table in tables]


def mean_over_orders(table):
    """Scores (n,) of a table (orders + 1, n), whose last row is subtracted."""
    total = 0.0
    for scores in table[:-1]:       # one after another: the same rounding for any n
        total = total + scores
    return total / (len(table) - 1) - table[-1]


@torch.no_grad()
def score_in_order(  # noqa: PLR0913  (what the numbers depend on)
        model, encoding, structure, variants, scoring, number):
    """Scores (n,) float64 by one decoding order. number: of the order, from 0."""
    S = torch.from_numpy(structure.S.astype(np.int64))[None].to(encoding.mask.device)
    order = variant_order(len(structure), scoring.seed, number).to(S.device)
    index = index_variants(variants, structure.S)
    scores, _ = scores_in_order(model, encoding, S, order, index,
                                Decoding(number % 2 == 1, scoring.batch_size))
    return scores.cpu().numpy()


@torch.no_grad()
def log_probs_alone(model: ProteinMPNN, structure: Complex, rows: list[int]) -> Tensor:
    """(P, 21) log-probabilities, in nats, of residues alone: each a structure of one residue, with
    its own four backbone atoms.

    rows: P rows of the structure, resolved."""
    one_each = torch.ones(len(rows), 1, dtype=torch.int64)
    graph = model.graph(torch.from_numpy(structure.X[rows, None]), one_each, one_each, one_each)
    encoding = model.encode(graph.to(next(model.parameters()).device))
    return model.unconditional(encoding)[:, 0]


def score_alone(model: ProteinMPNN, structure: Complex,
                variants: list[list[tuple[int, int]]]) -> np.ndarray:
    """ln p(mutant) - ln p(wild type) of each mutated residue alone, added up: (n,) float64, nats.

    See log_probs_alone: what the model knows of the letters without a fold. Less this, a score is
    corrected for the unfolded state.
    Arguments: as of score_proteins, of one protein.
    Source: ProteinMPNN-ddG, bioRxiv 2024.06.15.599145.
    """
    rows = sorted({row for variant in variants for row, _ in variant})
    place = {row: k for k, row in enumerate(rows)}
    log_p = log_probs_alone(model, structure, rows).double().cpu().numpy()
    scores = np.zeros(len(variants))
    for k, variant in enumerate(variants):
        for row, letter in variant:
            scores[k] += log_p[place[row], letter] - log_p[place[row], structure.S[row]]
    return scores


def variant_order(n_residues: int, seed: int, number: int) -> Tensor:
    """(1, L) int64: a random decoding order of all residues, the same for all structures of L."""
    draw = torch.randn(1, n_residues, dtype=torch.float64,
                       generator=keyed_generator(seed, "score", number))
    return decoding_order(torch.ones_like(draw), draw)


@torch.no_grad()
def encode_complex(model, structure):
    """The model's encoding of one structure."""
    tensors = collate_complexes([structure], ("X", "mask", "residue_idx", "chain_id"))
    return model.encode(model.graph(**tensors).to(next(model.parameters()).device))


# ---- scores with gradients ----

def choose_run(n_residues: int) -> Callable:
    """How to compute what gradients are asked of: run_once, or run_twice to save memory.

    Kept for the gradient, the encoder and the pass of all single mutations take 4 MB a residue (of
    published sizes, measured), so that 200 residues take 0.8 GB. Variants of several mutations take
    0.2 MB a residue for each set of mutated rows, of which a protein may have thousands: if they
    need more than one pass, scores_in_order computes these twice, whatever is chosen here.

    n_residues: of a micro-batch, counted once for each decoding order.
    """
    return run_twice if n_residues >= SAVES_MEMORY_FROM else run_once


class VariantIndex(NamedTuple):
    """Where the letters of N variants of a structure are found in log-probabilities.

    rows:   the mutated ones of variants of one mutation, sorted: R.
    single: (4, n) int64, of each such variant: its number, the place of its row in `rows`, its
            letter, and the wild type's.
    joint:  (rows, letters) of the sequences whose residues are decoded together. For each set of
            rows that variants of several mutations have: the wild type's, then the variants'.
    several: (3, m) int64, of each variant of several mutations: its number, its place in `joint`,
            and the wild type's there.
    """
    rows: list[int]
    single: Tensor
    joint: list[tuple[tuple[int, ...], tuple[int, ...]]]
    several: Tensor


def index_variants(variants: list[list[tuple[int, int]]], S: np.ndarray) -> VariantIndex:
    """The VariantIndex of variants, each a list of (row, letter). S: (L,) the wild type.

    2,000 take 1 ms: it may be made anew of those that a step draws."""
    wild_type = S.tolist()
    rows = sorted({variant[0][0] for variant in variants if len(variant) == 1})
    place = {row: k for k, row in enumerate(rows)}
    single = []
    members_of = {}     # rows of a variant of several mutations -> numbers of those that have them
    for number, variant in enumerate(variants):
        if len(variant) == 1:
            (row, letter), = variant
            single.append((number, place[row], letter, wild_type[row]))
        else:
            mutated = tuple(sorted(row for row, _ in variant))
            members_of.setdefault(mutated, []).append(number)
    joint = []
    several = []
    for mutated, members in members_of.items():
        native = len(joint)
        joint.append((mutated, tuple(wild_type[row] for row in mutated)))
        for number in members:
            several.append((number, len(joint), native))
            letter_of = dict(variants[number])
            joint.append((mutated, tuple(letter_of[row] for row in mutated)))
    return VariantIndex(rows, columns(single, 4), joint, columns(several, 3))


def columns(entries, n):
    """(n, entries) int64 of a list of tuples of n numbers."""
    return torch.tensor(entries, dtype=torch.int64).view(-1, n).T


class Decoding(NamedTuple):
    """How scores_in_order decodes.

    in_reverse: several mutations of a variant follow one another from the end of the structure.
    batch_size: sequences with several mutations per pass, wild types counted too.
    run:        run_once, or run_twice to save memory, see choose_run.
    """
    in_reverse: bool = False
    batch_size: int = 8
    run: Callable = run_once


def scores_in_order(  # noqa: PLR0913  (what the numbers depend on)
        model: ProteinMPNN, encoding: Encoding, S: Tensor, order: Tensor, index: VariantIndex,
        how: Decoding) -> tuple[Tensor, Tensor]:
    """ln p(mutant) - ln p(wild type) of variants, decoded last in one order, with gradients.

    Args:
        encoding: of one structure, without padding. S, order: (1, L) int64.
        index:    of the variants: all of a protein, or some.
    Returns: (N,) float64 in nats, and the mean entropy () of a residue of index.rows given all
        others, 0 without these.
    """
    n = index.single.shape[1] + index.several.shape[1]
    scores = torch.zeros(n, dtype=torch.float64, device=S.device)
    entropy = scores.new_zeros(())
    if index.rows:
        base = OneOrder(model, encoding, S, order)
        log_p = base.log_probs(index.rows, how.run).double()
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        number, place, letter, native = index.single.to(S.device)
        scores = scores.index_add(0, number, log_p[place, letter] - log_p[place, native])
    if index.joint:
        run = how.run
        if len(index.joint) > how.batch_size and torch.is_grad_enabled():
            run = run_twice     # only one pass may be kept, see choose_run
        log_p = []
        for first in range(0, len(index.joint), how.batch_size):
            sequences = index.joint[first:first + how.batch_size]
            log_p.append(run(joint_log_probs, model, encoding, S, order, sequences,
                             how.in_reverse))
        log_p = torch.cat(log_p)
        number, mutant, native = index.several.to(S.device)
        scores = scores.index_add(0, number, log_p[mutant] - log_p[native])
    return scores, entropy


def joint_log_probs(  # noqa: PLR0913  (what the numbers depend on)
        model, encoding, S, order, sequences, in_reverse):
    """ln p (n,) float64 of the letters of sequences at their rows, which are decoded last, one
    after another.

    sequences: n of (rows, letters), elsewhere the letters of S. Those of the same rows have the
        same context, on which the decoder runs once."""
    n = len(sequences)
    context_of = {}     # rows -> number of the context of sequences that have them
    context_row = []    # of each sequence
    firsts = []         # of each context, the first sequence that has it
    changes = []        # (sequence, row, letter)
    for number, (rows, letters) in enumerate(sequences):
        rows = tuple(rows)      # a DataLoader makes lists of tuples
        if rows not in context_of:
            context_of[rows] = len(context_of)
            firsts.append(number)
        context_row.append(context_of[rows])
        changes += [(number, row, letter) for row, letter in zip(rows, letters)]
    number, row, letter = columns(changes, 3).to(S.device)
    S = S.repeat(n, 1)
    S[number, row] = letter
    is_last = torch.zeros_like(S, dtype=torch.bool)
    is_last[number, row] = True
    along = torch.arange(S.shape[1], device=S.device)
    if in_reverse:
        along = along.flip(0)
    orders = decoding_order(is_last.long(), torch.where(is_last, along, step_of_residue(order)))
    shared = SharedContext(is_last, S.new_tensor(context_row), S.new_tensor(firsts))
    log_p = model.decode(encoding, S, orders, shared=shared)
    return log_p.gather(-1, S[..., None])[..., 0].double().sum(1)   # of other rows it is 0


# ---- one pass for many residues ----
#
# The fourth place where the decoder's pass is written. The others are methods of ProteinMPNN:
# run_decoder (all residues), decode_designed (few residues of sequences with one context) and step
# (the residues whose turn it is in a draw). All are made of the methods of DecoderLayer. A change
# of what a residue sees has to be made here too; tests compare the result with run_decoder's.

class OneOrder:
    """The decoder's pass in one order, from which that with a residue moved to the end is made."""

    def __init__(self, model, encoding, S, order):
        self.model = model
        self.E_idx = encoding.E_idx[0]                                              # (L, K)
        self.present = encoding.present[0]
        self.mask = encoding.mask[0]
        self.visible = decoded_before(step_of_residue(order), encoding.E_idx)[0]    # (L, K)
        self.h_S = model.W_s(S[0])
        self.layers = []            # (layer, its h_V (L, H), table (2L, H), edges (L, K, H))
        self.first_hidden = None    # of the first layer, a row for each neighbour (L K, H)
        self.first_sum = None       # its sum over neighbours (L, H)
        index = torch.where(self.visible, self.E_idx, self.E_idx + len(self.E_idx))
        undecoded = encoding.h_V[0]
        h_V = undecoded
        for layer in model.decoder_layers:
            table = torch.cat([layer.decoded(h_V, self.h_S), layer.undecoded(undecoded)])
            edges = layer.edges(encoding.h_E)[0]
            self.layers.append((layer, h_V, table, edges))
            hidden = layer.hidden(h_V, edges, take_rows(table, index))
            total = sum_hidden(hidden, self.present)
            if self.first_hidden is None:
                self.first_hidden = hidden.flatten(0, 1)
                self.first_sum = total
            h_V = layer.update_by_sum(h_V, total, self.present, self.mask)

    def log_probs(self, rows: list[int], run: Callable = run_once) -> Tensor:
        """Log-probabilities (P, 21) of residues, each moved to the end of the order.

        run: run_once, or run_twice to save memory."""
        moved = torch.tensor(rows, dtype=torch.int64, device=self.mask.device)
        return torch.cat([self.log_probs_of_last(part, run) for part in moved.split(AT_ONCE)])

    def log_probs_of_last(self, moved, run):
        """Log-probabilities (P, 21) of residues moved (P,), each moved to the end of the order."""
        L = len(self.E_idx)
        (p, i), *later = self.rows_to_compute(moved)
        new = run(self.first_layer, moved[p], i)    # h_V of the residues computed anew
        # For each moved residue, the row of the table that a decoded residue has: its own, or one
        # of those that are appended for the residues computed anew.
        own_rows = torch.arange(L, device=moved.device).repeat(len(moved), 1)       # (P, L)
        for (layer, h_V, table, edges), (next_p, next_i) in zip(self.layers[1:], later):
            row_of = own_rows.clone()
            row_of[p, i] = 2 * L + torch.arange(len(i), device=moved.device)
            table = torch.cat([table, layer.decoded(new, self.h_S[i])])
            h_V = torch.cat([h_V, torch.zeros_like(h_V), new])          # rows as in the table
            p = next_p
            i = next_i
            E_idx = self.E_idx[i]                                                   # (n, K)
            index = torch.where(self.visible_to(i, moved[p]), row_of[p[:, None], E_idx], E_idx + L)
            h_V = take_rows(h_V, row_of[p, i])
            total = []
            for part in zip(*(x.split(ROWS_AT_ONCE) for x in (h_V, i, index))):
                total.append(run(self.sum_of, layer, edges, table, *part))
            new = layer.update_by_sum(h_V, torch.cat(total), self.present[i], self.mask[i])
        return self.model.log_probs(new)

    def sum_of(self, layer, edges, table, h_V, i, index):
        """Sum of hidden messages (n, H) to residues i (n,) with h_V (n, H), whose neighbours have
        the rows `index` (n, K) of the table."""
        hidden = layer.hidden(h_V, take_rows(edges, i), take_rows(table, index))
        return sum_hidden(hidden, self.present[i])

    def first_layer(self, last, i):
        """h_V (n, H) of residues i (n,) after the first layer, each with its `last` (n,) moved to
        the end of the order."""
        layer, h_V, table, edges = self.layers[0]
        L, K = self.E_idx.shape
        total = take_rows(self.first_sum, i)
        # The moved residue is a neighbour of the others, and no longer seen.
        others = (i != last).nonzero()[:, 0]
        residue = i[others]
        slot = (self.E_idx[residue] == last[others, None]).long().argmax(1)
        neighbour = K * residue + slot
        message = layer.hidden(take_rows(h_V, residue),
                               take_rows(edges.flatten(0, 1), neighbour)[:, None],
                               take_rows(table, L + last[others])[:, None])
        former = take_rows(self.first_hidden, neighbour)
        total = total.index_add(0, others, message[:, 0] - former)
        # Itself it sees all its neighbours.
        ends = (i == last).nonzero()[:, 0]
        at_end = i[ends]
        E_idx = self.E_idx[at_end]
        index = torch.where(self.visible_to(at_end, at_end), E_idx, E_idx + L)
        hidden = layer.hidden(take_rows(h_V, at_end), take_rows(edges, at_end),
                              take_rows(table, index))
        total = total.index_copy(0, ends, sum_hidden(hidden, self.present[at_end]))
        return layer.update_by_sum(take_rows(h_V, i), total, self.present[i], self.mask[i])

    def visible_to(self, i, last):
        """(n, K) bool: which neighbours of residues i (n,) are decoded before them, if `last` (n,)
        is at the end of the order."""
        is_last = (i == last)[:, None]
        return (self.visible[i] | is_last) & (self.E_idx[i] != last[:, None])

    def rows_to_compute(self, moved):
        """For each layer (number of the moved residue (n,), residue (n,)), of those that differ
        from the base pass and reach the moved residue, and of the moved residue itself."""
        number = torch.arange(len(moved), device=moved.device)
        wanted = torch.zeros(len(moved), len(self.E_idx), dtype=torch.bool, device=moved.device)
        wanted[number, moved] = True
        rows = [wanted.nonzero(as_tuple=True)]          # of the last layer
        for changed in self.changed(moved)[-2::-1]:
            p, i = rows[0]
            wanted[p[:, None], self.E_idx[i]] = True    # of the layer before: their neighbours
            wanted &= changed
            wanted[number, moved] = True
            rows.insert(0, wanted.nonzero(as_tuple=True))
        return rows

    def changed(self, moved):
        """For each layer (P, L) bool: is the residue's output another when `moved` comes last?"""
        sees_moved = (self.E_idx == moved[:, None, None]) & self.visible            # (P, L, K)
        first = sees_moved.any(-1)
        changed = [first]
        for _ in self.layers[1:]:
            sees_changed = (changed[-1][:, self.E_idx] & self.visible).any(-1)
            changed.append(first | sees_changed)
        return changed
