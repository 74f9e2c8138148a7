"""Scores of a protein's variants by ProteinMPNN, with gradients.

A score is ln p(mutant letters) - ln p(wild-type letters) of the mutated residues, decoded last, as
of score_mutations.py. Those of all single mutations of a protein are from one pass, in an order
that is drawn anew in each epoch. Of binding, the score of each partner alone is subtracted, as by
mpnn/binding.py.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddp_setup import Ddp
from dpo.reference import WITHOUT_REFERENCE, FrozenBase
from dpo.variant_sets import (
    DrawnPartner,
    DrawnVariants,
    VariantSet,
    kept_values,
    keys_of,
    mean_spearman,
)
from mpnn.binding import score_binding
from mpnn.model import Encoding, Graph, ProteinMPNN, run_once
from mpnn.variants import Decoding, Scoring, choose_run, scores_in_order
from proteins.letters import X_ID


class VariantScores(NamedTuple):
    """What a model says of one protein: scores (N,) float32, in nats, of its drawn variants, the
    wild type's 0; mean entropy () of a mutated residue given all others, or None where the scores
    are of no decoder; both means over orders. And log-probabilities (L, 21) of its native sequence,
    or None."""
    scores: Tensor
    entropy: Tensor | None
    native: Tensor | None


class VariantPass(nn.Module):
    """A ProteinMPNN whose forward pass scores variants: gradients of what goes through `forward`
    are averaged by DDP."""

    def __init__(self, model: ProteinMPNN):
        super().__init__()
        self.model = model

    def forward(self, proteins: list[DrawnVariants],
                graphs: list[list[Graph]]) -> list[VariantScores]:
        """graphs: of each protein those of keys_of."""
        run = choose_run(sum(map(count_decoded, proteins)))
        scores = []
        for protein, own_graphs in zip(proteins, graphs):
            encodings = [self.model.encode(graph, run) for graph in own_graphs]
            scores.append(score_variants(self.model, encodings, protein, run))
        return scores


def count_decoded(protein: DrawnVariants) -> int:
    """Residues that a step decodes, once for each order."""
    return sum(part.orders.numel() for part in (protein, *protein.partners))


def score_variants(model: ProteinMPNN, encodings: list[Encoding], protein: DrawnVariants,
                   run: Callable = run_once) -> VariantScores:
    """The VariantScores of one protein: in its structure, less those in the partners alone.

    encodings: of the structures of keys_of. run: run_once, or run_twice to save memory."""
    encoding, *of_partners = encodings
    scores, entropy = mean_scores(model, encoding, protein, run)
    for partner, own_encoding in zip(protein.partners, of_partners):
        alone, _ = mean_scores(model, own_encoding, partner, run)
        scores = scores.index_add(0, partner.places, alone, alpha=-1)
    scores = scores.float()
    if len(scores) < len(protein.numbers):      # the wild type is drawn
        scores = torch.cat([scores, scores.new_zeros(1)])
    native = None
    if protein.native_order is not None:
        native, = run(model.decode, encoding, protein.S, protein.native_order)
    return VariantScores(scores, entropy.float(), native)


def mean_scores(model: ProteinMPNN, encoding: Encoding, part: DrawnVariants | DrawnPartner,
                run: Callable) -> tuple[Tensor, Tensor]:
    """(Scores (n,) float64, entropy ()) in one structure: means over its orders."""
    scores = []
    entropies = []
    for number, order in enumerate(part.orders):
        how = Decoding(in_reverse=number % 2 == 1, run=run)
        order_scores, entropy = scores_in_order(model, encoding, part.S, order[None], part.index,
                                                how)
        scores.append(order_scores)
        entropies.append(entropy)
    return torch.stack(scores).mean(0), torch.stack(entropies).mean()


@torch.no_grad()
def score_by_base(base: FrozenBase, protein: DrawnVariants, loss: Any) -> VariantScores:
    """The VariantScores of one protein under the reference: of the base weights in the same orders;
    or of the mutated residues alone under these; or 0, for losses without a reference.

    loss: the config's section."""
    native = None
    if protein.native_order is not None:
        encoding = base.encoding([protein.complex_key])
        native = base.model.decode(encoding, protein.S, protein.native_order)[0]
    zeros = torch.zeros_like(protein.values)
    if loss.name in WITHOUT_REFERENCE:
        return VariantScores(zeros, None, native)
    if loss.reference == "unfolded":
        return VariantScores(base.scores_alone(protein.key)[protein.numbers], None, native)
    encodings = [base.encoding([one]) for one in keys_of(protein)]
    scores = score_variants(base.model, encodings, protein._replace(native_order=None))
    return scores._replace(native=native)


def native_kl(output: VariantScores, reference: VariantScores, protein: DrawnVariants) -> Tensor:
    """() mean KL divergence of a model from the base, per residue of a protein's native sequence,
    in nats, as of dpo/pair_scores.py. output, reference: of model and base."""
    divergence = (reference.native.exp() * (reference.native - output.native)).sum(-1)
    known = protein.is_resolved & (protein.S[0] != X_ID)
    return (divergence * known).sum() / known.sum().clamp(min=1)


def correlate_variants(model: ProteinMPNN, base: FrozenBase, sets: list[VariantSet], config: Any,
                       ddp: Ddp) -> float | None:
    """The mean over proteins of Spearman's rank correlation of the scores of their variants with
    the measured values; None if all have too few. A collective.

    Scores are by one order, less those of the reference that the loss compares with, and of binding
    less those of the partners. Of variants of several mutations at most table.most_several of a
    protein are scored.
    model: in eval mode, without DDP."""
    correction = base.model if config.loss.reference == "unfolded" else None
    seed = config.training.seed
    variants = []
    values = []
    for variant_set in sets:
        known = kept_values(variant_set, config.table.most_several, seed, epoch=None)[:-1]
        numbers = np.flatnonzero(np.isfinite(known))
        variants.append([variant_set.variants[number] for number in numbers])
        values.append(known[numbers])
    scores = score_binding(model, [variant_set.complex for variant_set in sets],
                           [variant_set.partners for variant_set in sets], variants,
                           Scoring(1, seed), correction, ddp=ddp)
    return mean_spearman([one.binding for one in scores], values)
