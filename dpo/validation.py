"""Validation of training on preference pairs, for every kind of model.

    validation = Validation(pairs, scorer, objective)
    values = validation(model)                          # metrics by name

All results are the same for any number of ranks.
"""
from collections.abc import Callable

import torch

from dpo.evaluation import SUMS, metrics_of, pack, unpack_sums
from dpo.reference import Reference
from dpo.scorer import Scorer
from training.loop import eval_mode


class Validation:
    """Metrics of the validation pairs, in float32, by the same random numbers at each call: means
    of loss and rewards by the weights of the pairs; and what the Scorer adds.

    val/margin_noise, of a Scorer whose scores are estimates: standard deviation, in nats, that
    their noise gives to the log-ratio of policy to reference of chosen over rejected, of a typical
    pair.
    designs: function (model, step, folder, ddp) -> metrics of sequences that the policy draws, or
    None.
    """

    def __init__(self, pairs: list, scorer: Scorer, objective: Callable):
        """objective: function (Likelihoods, batch, reference scores, section Loss) -> (loss of each
        pair, metrics {name: (P,)} of SUMS), as in training."""
        self.pairs = pairs
        self.scorer = scorer
        self.reference = Reference(scorer)
        self.objective = objective
        self.make_batch = scorer.batch_maker(pairs)
        self.weights = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
        self.designs = None
        if scorer.config.monitoring.n_designs:
            self.designs = scorer.designs(pairs)

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> dict:
        """Metrics by name. model: without DDP; set to eval mode and back. A collective."""
        with eval_mode(model):
            sums = self.sums_over_pairs(model)
            more = self.scorer.more_metrics(model, self.pairs)
        total = self.weights.sum()
        named = unpack_sums(sums)
        values = metrics_of(sums[:len(SUMS)], total, "val/")
        if not self.scorer.is_relative:
            per_residue = named["logps/chosen"] / named["residues"]
            values["val/logps/chosen_per_residue"] = float(per_residue)
        if len(sums) > len(SUMS):
            values["val/margin_noise"] = float((sums[-1] / total).sqrt())
        return {**values, **more}

    def sums_over_pairs(self, model: torch.nn.Module) -> torch.Tensor:
        """Sums of weight x metric over the pairs of all ranks: SUMS, and then, if the scores are
        estimates, the variance of the margin."""
        n_columns = len(SUMS) + self.scorer.is_noisy
        rows = self.scorer.rows_of(self.pairs, (n_columns,),
                                   lambda indices: self.metrics_of_batch(model, indices),
                                   "validation pairs")
        return (self.weights[:, None] * rows).sum(0)

    def metrics_of_batch(self, model, indices):
        """(items, columns) float64, see sums_over_pairs."""
        scorer = self.scorer
        batch = scorer.prepare(self.make_batch(indices))
        base = self.reference(batch)
        likelihoods = scorer(model, batch)
        _, metrics = self.objective(likelihoods, batch, base.scores, scorer.config.loss)
        packed = pack(metrics)
        if "share" in batch:    # several pairs of each item
            rows = packed.new_zeros(len(indices), packed.shape[1])
            return rows.index_add(0, batch["item"], batch["share"][:, None] * packed)
        if not scorer.is_noisy:
            return packed
        variance = scorer.margin_variance(likelihoods, base, batch).double()
        return torch.cat([packed, variance[:, None]], 1)
