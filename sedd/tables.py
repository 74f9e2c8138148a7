"""SEDD on tables of measured mutations: the Scorer of proteins with all their variants.

A score is ln p(mutant letters) - ln p(wild-type letters) of the mutated residues behind masks, as
of score_mutations.py. There each residue is masked by itself. Here a row of the network serves
many: the residues that single mutations change are dealt into groups, anew in each epoch, and a row
masks one group at once, at most estimator.masked of the protein. So 10 rows score all single
mutations if that is 0.1. Variants of several mutations are scored as by score_mutations.py.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpo.scorer import Base, Likelihoods, Scorer
from dpo.tables import (VariantTable, batch_of_couples, describe_couples, mean_spearman,
                        scores_of_couples)
from proteins.letters import decode
from proteins.seeds import keyed_generator
from sedd.designs import Designs
from sedd.dpo import describe_model, fine_tuned
from sedd.model import SEDD
from sedd.variants import (MaskedRows, log_probs_at_masks, mask_of, mask_places, ratios_of,
                           score_proteins)

# Positions of a protein's rows in one pass. The rows of a table with many variants of several
# mutations have more: these are computed in parts, and twice, to keep activations out of memory.
AT_ONCE = 8192


class Found(NamedTuple):
    """What a model says of one protein: scores (N,) of its variants, and the mean entropy () of its
    masked residues, in nats."""
    scores: Tensor
    entropy: Tensor


class VariantPass(nn.Module):
    """A SEDD whose forward pass scores variants: gradients of what goes through `forward` are
    averaged by DDP."""

    def __init__(self, model: SEDD, mask_id: int):
        super().__init__()
        self.model = model
        self.mask_id = mask_id

    def forward(self, works: list[MaskedRows]) -> list[Found]:
        return [self.score(work) for work in works]

    def score(self, work: MaskedRows) -> Found:
        """Of one protein."""
        parts = work.rows.split(max(AT_ONCE // work.rows.shape[1], 1))
        if len(parts) == 1:
            log_p = log_probs_at_masks(self.model, work.rows, self.mask_id)
        else:
            log_p = torch.cat([checkpoint(log_probs_at_masks, self.model, part, self.mask_id,
                                          use_reentrant=False) for part in parts])
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        return Found(ratios_of(log_p, work), entropy)


class TableScorer(Scorer):
    """Scores the pairs of variants in a micro-batch of proteins, Q of them for its P proteins."""
    shape = None            # each protein has another number of variants
    is_relative = True

    def __init__(self, base: Base, pairs: list[VariantTable], config: Any, ddp: Any):
        super().__init__(base, pairs, config, ddp)
        self.sedd = base.more._replace(model=base.model)
        self.mask_id = mask_of(self.sedd)

    def batch_maker(self, pairs: list[VariantTable]) -> Callable:
        return functools.partial(make_batch, pairs, self.mask_id, self.config)

    def prepare(self, batch: dict) -> dict:
        device = self.ddp.device
        prepared = {}
        for name, value in batch.items():
            prepared[name] = value.to(device) if torch.is_tensor(value) else value
        prepared["works"] = [MaskedRows(*(tensor.to(device) for tensor in work))
                             for work in batch["works"]]
        return prepared

    def module(self, model: SEDD) -> VariantPass:
        return VariantPass(model, self.mask_id)

    def run(self, model: nn.Module, batch: dict) -> list[Found]:
        if isinstance(model, SEDD):
            model = self.module(model)
        return model(batch["works"])

    def likelihoods(self, output: list[Found], batch: dict) -> Likelihoods:
        entropy = torch.stack([found.entropy for found in output])
        return Likelihoods(scores_of_couples([found.scores for found in output], batch["couples"]),
                           entropy[batch["item"]])

    def file_content(self, model: SEDD, epoch: int, step: int) -> dict:
        return fine_tuned(self.sedd, model, step)

    def describe(self) -> tuple[str, str, str]:
        estimator = self.config.estimator
        masks = "the same in all epochs" if estimator.fixed else "new in each epoch"
        return ("SEDD", describe_model(self.sedd),
                f"residues behind masks, up to {estimator.masked:.0%} of a protein at once, "
                f"{masks}, {describe_couples(self.config.table)}")

    def designs(self, pairs: list[VariantTable]) -> Designs:
        ordered = sorted(pairs, key=lambda table: table.key)
        return Designs([table.length for table in ordered], self.sedd, self.config)

    def variant_scores(self, model: SEDD, tables: list[VariantTable]) -> list[np.ndarray]:
        """(N,) scores of the variants of each table, as of score_mutations.py. A collective."""
        return score_proteins(self.sedd._replace(model=model),
                              [decode(table.complex.S) for table in tables],
                              [table.variants for table in tables], ddp=self.ddp)

    def more_metrics(self, model: SEDD, pairs: list[VariantTable]) -> dict:
        """The mean over proteins of Spearman's rank correlation of the scores with the measured
        values."""
        correlation = mean_spearman(self.variant_scores(model, pairs), pairs)
        return {} if correlation is None else {"val/spearman": correlation}


# ---------------------------------------------------------------- batches
def make_batch(tables: list[VariantTable], mask_id: int, config: Any, indices: list[int],
               epoch: int | None = None) -> dict[str, Any]:
    """The dict of batch_of_couples for P proteins, and works, a list of their MaskedRows.

    epoch: None: the same random choices at each call."""
    seed = config.training.seed
    batch = batch_of_couples(tables, indices, config.table, seed, epoch)
    batch["works"] = []
    for index in indices:
        table = tables[index]
        of_epoch = None if config.estimator.fixed else epoch
        generator = keyed_generator(seed, "masks", table.key, of_epoch)
        places = sorted({place for variant in table.variants if len(variant) == 1
                         for place, _ in variant})
        groups = deal(places, max(int(config.estimator.masked * table.length), 1), generator)
        batch["works"].append(mask_places(table.complex.S, table.variants, mask_id, groups))
    return batch


def deal(places: list[int], most: int, generator: torch.Generator) -> list[list[int]]:
    """The places, dealt at random into as few groups of at most `most` as possible, of sizes that
    differ by one at most."""
    n_groups = -(-len(places) // most)
    shuffled = [places[k] for k in torch.randperm(len(places), generator=generator).tolist()]
    return [shuffled[number::n_groups] for number in range(n_groups)]
