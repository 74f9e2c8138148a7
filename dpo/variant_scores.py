"""Scores of a protein's variants by ProteinMPNN, with gradients.

A score is ln p(mutant letters) - ln p(wild-type letters) of the mutated residues, decoded last, as
of score_mutations.py. Those of all single mutations of a protein are from one pass, in an order
that is drawn anew in each epoch.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddp_setup import Ddp
from dpo.reference import WITHOUT_REFERENCE, FrozenBase
from dpo.variant_sets import DrawnVariants, VariantSet, kept_values, mean_spearman
from mpnn.model import Encoding, Graph, ProteinMPNN, run_once
from mpnn.variants import Decoding, Scoring, choose_run, score_proteins, scores_in_order
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

    def forward(self, proteins: list[DrawnVariants], graphs: list[Graph]) -> list[VariantScores]:
        run = choose_run(sum(protein.orders.numel() for protein in proteins))
        return [score_variants(self.model, self.model.encode(graph, run), protein, run)
                for protein, graph in zip(proteins, graphs)]


def score_variants(model: ProteinMPNN, encoding: Encoding, protein: DrawnVariants,
                   run: Callable = run_once) -> VariantScores:
    """The VariantScores of one protein, whose encoding is given.

    run: run_once, or run_twice to save memory."""
    scores = []
    entropies = []
    for number, order in enumerate(protein.orders):
        how = Decoding(in_reverse=number % 2 == 1, run=run)
        order_scores, entropy = scores_in_order(model, encoding, protein.S, order[None],
                                                protein.index, how)
        scores.append(order_scores)
        entropies.append(entropy)
    mean = torch.stack(scores).mean(0).float()
    if len(mean) < len(protein.numbers):        # the wild type is drawn
        mean = torch.cat([mean, mean.new_zeros(1)])
    native = None
    if protein.native_order is not None:
        native, = run(model.decode, encoding, protein.S, protein.native_order)
    return VariantScores(mean, torch.stack(entropies).mean().float(), native)


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
    encoding = base.encoding([protein.complex_key])
    scores = score_variants(base.model, encoding, protein._replace(native_order=None))
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

    Scores are by one order, less those of the reference that the loss compares with. Of variants of
    several mutations at most table.most_several of a protein are scored.
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
    scores = score_proteins(model, [variant_set.complex for variant_set in sets], variants,
                            Scoring(1, seed), correction, ddp=ddp)
    return mean_spearman(scores, values)
