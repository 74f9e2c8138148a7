"""ProteinMPNN on tables of measured mutations: the Scorer of proteins with all their variants.

A score is ln p(mutant letters) - ln p(wild-type letters) of the mutated residues, decoded last, as
of score_mutations.py. Those of all single mutations of a protein are from one pass, in an order
that is drawn anew in each epoch. loss.reference: base, the scores of the base weights in the same
order; unfolded, those of the mutated residues alone.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddp_setup import seed_for
from dpo.scorer import Base, Likelihoods, Scorer
from dpo.tables import (VariantTable, batch_of_couples, describe_couples, mean_spearman,
                        scores_of_couples)
from mpnn.batches import to_device
from mpnn.designs import Designs
from mpnn.dpo import ProteinMPNNScorer
from mpnn.model import ALPHABET, Encoding, Graph, ProteinMPNN, run_once, run_twice
from mpnn.pairs import Pair
from mpnn.variants import (Decoding, Scoring, VariantIndex, index_variants, score_alone,
                           score_proteins, scores_in_order)

X = ALPHABET.index("X")
# Residues of a micro-batch from which most is computed twice, to keep activations out of memory.
SAVES_MEMORY_FROM = 200


class Work(NamedTuple):
    """What a model computes of one protein.

    graph: of its complex. S: (1, L) native letters. orders: (O, L). native_order: (1, L), or None:
    the native sequence is not asked for. index: of its variants."""
    graph: Graph
    S: Tensor
    orders: Tensor
    native_order: Tensor | None
    index: VariantIndex


class Found(NamedTuple):
    """What a model says of one protein: scores (N,) float64 of its variants and their entropy (),
    see scores_in_order, means over orders; and log-probabilities (L, 21) of its native sequence, or
    None."""
    scores: Tensor
    entropy: Tensor
    native: Tensor | None


class VariantPass(nn.Module):
    """A ProteinMPNN whose forward pass scores variants: gradients of what goes through `forward`
    are averaged by DDP."""

    def __init__(self, model: ProteinMPNN):
        super().__init__()
        self.model = model

    def forward(self, works: list[Work]) -> list[Found]:
        n_residues = sum(work.S.shape[1] for work in works)
        run = run_twice if n_residues >= SAVES_MEMORY_FROM else run_once
        found = []
        for work in works:
            found.append(self.score(self.model.encode(work.graph, run), work, run))
        return found

    def score(self, encoding: Encoding, work: Work, run: Callable = run_once) -> Found:
        """Of one protein, whose encoding is given. run: run_once, or run_twice to save memory."""
        scores = []
        entropies = []
        for number, order in enumerate(work.orders):
            how = Decoding(in_reverse=number % 2 == 1, run=run)
            of_order, entropy = scores_in_order(self.model, encoding, work.S, order[None],
                                                work.index, how)
            scores.append(of_order)
            entropies.append(entropy)
        native = None
        if work.native_order is not None:
            native, = run(self.model.decode, encoding, work.S, work.native_order)
        return Found(torch.stack(scores).mean(0), torch.stack(entropies).mean(), native)


class TableScorer(Scorer):
    """Scores the pairs of variants in a micro-batch of proteins, Q of them for its P proteins.

    What is of native sequences and designs is that of a ProteinMPNNScorer."""
    shape = None            # each protein has another number of variants
    is_relative = True

    def __init__(self, base: Base, pairs: list[VariantTable], config: Any, ddp: Any):
        super().__init__(base, pairs, config, ddp)
        self.tables = {table.key: table for table in pairs}
        self.of_natives = ProteinMPNNScorer(base, natives_of(pairs), config, ddp)
        self.starts_at_base = config.loss.reference == "base"
        self.indices = {key: index_variants(table.variants, table.complex.S)
                        for key, table in self.tables.items()}
        self.alone = {}     # key of a table -> its scores_alone

    def batch_maker(self, pairs: list[VariantTable]) -> Callable:
        return functools.partial(make_batch, pairs, self.config.loss, self.config.table,
                                 self.config.training.seed)

    def prepare(self, batch: dict) -> dict:
        prepared = to_device(batch, self.ddp.device)
        prepared["works"] = []
        prepared["native_base"] = []
        for key, orders, native_order in zip(batch["keys"], batch["orders"],
                                             batch["native_orders"]):
            work = self.work(key, orders, native_order)
            prepared["works"].append(work)
            if native_order is not None:
                prepared["native_base"].append(self.native_of_base(key, work))
        return prepared

    def work(self, key, orders, native_order):
        """The Work of a protein, on the device."""
        complex = self.tables[key].complex
        device = self.ddp.device
        S = torch.from_numpy(complex.S.astype(np.int64))[None].to(device)
        if native_order is not None:
            native_order = native_order.to(device)
        return Work(self.of_natives.graph([complex]), S, orders.to(device), native_order,
                    self.indices[key])

    @torch.no_grad()
    def native_of_base(self, key, work):
        """Log-probabilities (L, 21) of the native sequence under the base."""
        encoding = self.of_natives.encoding([self.tables[key].complex])
        return self.base.model.decode(encoding, work.S, work.native_order)[0]

    def module(self, model: ProteinMPNN) -> VariantPass:
        return VariantPass(model)

    def run(self, model: nn.Module, batch: dict) -> list[Found]:
        if isinstance(model, ProteinMPNN):
            model = self.module(model)
        return model(batch["works"])

    def run_base(self, batch: dict) -> list[Found]:
        found = []
        for key, work in zip(batch["keys"], batch["works"]):
            if self.starts_at_base:
                encoding = self.of_natives.encoding([self.tables[key].complex])
                work = work._replace(native_order=None)
                found.append(self.module(self.base.model).score(encoding, work))
            else:
                scores = self.scores_alone(key)
                found.append(Found(scores, scores.new_zeros(()), None))
        return found

    def likelihoods(self, output: list[Found], batch: dict) -> Likelihoods:
        parts = scores_of_couples([found.scores for found in output], batch["couples"])
        entropy = torch.stack([found.entropy for found in output]).float()
        kl = None
        if output[0].native is not None:
            kl = self.native_kl(output, batch)[batch["item"]]
        return Likelihoods(parts, entropy[batch["item"]], kl)

    def native_kl(self, output, batch):
        """(P,) mean KL divergence of a model from the base per residue of the native sequence of
        each protein, in nats, as of mpnn/dpo.py."""
        means = []
        for found, base, work in zip(output, batch["native_base"], batch["works"]):
            divergence = (base.exp() * (base - found.native)).sum(-1)
            known = work.graph.mask[0] & (work.S[0] != X)
            means.append((divergence * known).sum() / known.sum().clamp(min=1))
        return torch.stack(means)

    @torch.no_grad()
    def scores_alone(self, key):
        """(N,) float64 scores of the mutated residues alone under the base."""
        if key not in self.alone:
            table = self.tables[key]
            scores = score_alone(self.base.model, table.complex, table.variants)
            self.alone[key] = torch.from_numpy(scores).to(self.ddp.device)
        return self.alone[key]

    def file_content(self, model: ProteinMPNN, epoch: int, step: int) -> dict:
        return self.of_natives.file_content(model, epoch, step)

    def describe(self) -> tuple[str, str, str]:
        name, more, scoring = self.of_natives.describe()
        return name, more, f"{scoring}, {describe_couples(self.config.table)}"

    def designs(self, pairs: list[VariantTable]) -> Designs:
        return Designs(natives_of(pairs), self.of_natives)

    def variant_scores(self, model: ProteinMPNN, tables: list[VariantTable]) -> list[np.ndarray]:
        correction = None if self.starts_at_base else self.base.model
        return score_proteins(model, [table.complex for table in tables],
                              [table.variants for table in tables],
                              Scoring(1, self.config.training.seed), correction, ddp=self.ddp)

    def drift(self, model: ProteinMPNN, tables: list[VariantTable]) -> float:
        return self.of_natives.more_metrics(model, natives_of(tables))["val/kl"]

    def more_metrics(self, model: ProteinMPNN, pairs: list[VariantTable]) -> dict:
        """As of ProteinMPNNScorer, and the mean over proteins of Spearman's rank correlation of the
        scores with the measured values."""
        scores = self.variant_scores(model, pairs)
        metrics = self.of_natives.more_metrics(model, natives_of(pairs))
        correlation = mean_spearman(scores, pairs)
        if correlation is not None:
            metrics["val/spearman"] = correlation
        return metrics


def natives_of(tables: list[VariantTable]) -> list[Pair]:
    """A pair of the native sequence with itself of each table."""
    pairs = []
    for table in tables:
        native = table.complex.S[:table.complex.n_designed]
        pairs.append(Pair(table.complex, native, native, np.ones(len(native), bool)))
    return pairs


# ---------------------------------------------------------------- batches
def make_batch(tables: list[VariantTable], loss: Any, section: Any,  # noqa: PLR0913  (the config's)
               seed: int, indices: list[int], epoch: int | None = None) -> dict[str, Any]:
    """The random choices for P proteins: pairs of their variants, and decoding orders.

    Args:
        loss, section: the config's sections loss and table.
        epoch: None: the same choices at each call.
    Returns: the dict of batch_of_couples, and
        orders         list of P tensors (O, L) int64.
        native_orders  list of P tensors (1, L), or of None, without loss.native_kl.
    """
    batch = batch_of_couples(tables, indices, section, seed, epoch)
    batch["orders"] = []
    batch["native_orders"] = []
    for index in indices:
        table = tables[index]
        batch["orders"].append(orders_of(table, loss, seed, epoch))
        native_order = None
        if loss.native_kl:
            native_order = shuffled(table, seed_for(seed, "native", table.key, epoch))[None]
        batch["native_orders"].append(native_order)
    return batch


def orders_of(table, loss, seed, epoch):
    """(n_orders, L) decoding orders of all residues; of arange (1, L)."""
    if loss.order == "arange":
        return torch.arange(table.length)[None]
    if loss.order == "fixed":
        epoch = None
    orders = [shuffled(table, seed_for(seed, "order", table.key, epoch, number))
              for number in range(loss.n_orders)]
    return torch.stack(orders)


def shuffled(table, seed):
    """(L,) int64: the rows of a protein in a random order."""
    return torch.randperm(table.length, generator=torch.Generator().manual_seed(seed))
