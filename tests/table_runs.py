"""What tests of training on tables share, for both kinds of model."""
import torch

from ddp_setup import Ddp
from dpo.pair_plan import PairPlan
from dpo.reference import Reference
from train_dpo_ddp import MicroBatchDataset, micro_batch_loss
from training.loop import MicroBatchSampler
from training_runs import gradients, on_ranks


def gradients_on_tables(policy, scorer, tables, config, ddp, plain_loss=None):
    """See training_runs.gradients, of four micro-batches of proteins a step, in float64.

    plain_loss: function (policy, batch, scorer, config, tables, indices) -> the sum of weight x
    loss over the pairs of a batch, by the definition; None: as in training."""
    policy = policy.double()
    scorer.base.model.double()
    reference = Reference(scorer)
    plan = PairPlan(tables, 0, 4, config.training.batch_size)
    make_batch = scorer.batch_maker(tables)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, reference, config, ddp, torch.float32)

    def whole(step):
        """Of a protein with few variants, a step's loss has a part of its weight alone."""
        total = n_proteins = 0
        for _, _, epoch, indices in (plan.item_of(step, k) for k in range(4)):
            batch = make_batch(indices, epoch=epoch)
            total = total + plain_loss(policy, batch, scorer, config, tables, indices)
            n_proteins += len(indices)
        return total / n_proteins

    return gradients(scorer.module(policy), MicroBatchSampler(plan.item_of, 4, ddp, 0, 2),
                     MicroBatchDataset(make_batch, 0), loss_of, ddp, whole if plain_loss else None)


def check_any_number_of_ranks(gradients_of, module, expression, folder):
    """Assert that gradients on ranks are those by the definition, and the loss that is shown that
    of one rank: a plain mean over proteins.

    gradients_of: function (ddp, by_definition) of the module of tests. expression: its call."""
    expected = gradients_of(Ddp(), True)
    for step, alone in zip(expected, gradients_of(Ddp(), False), strict=True):
        step["loss"] = alone["loss"]
    for n in (1, 2, 4):
        found = on_ranks(n, module, expression, folder)
        for a, b in zip(found, expected, strict=True):
            for name in b:
                torch.testing.assert_close(a[name], b[name], rtol=1e-5,
                                           atol=1e-5 * float(b[name].norm()) + 1e-9)
