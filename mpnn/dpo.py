"""ProteinMPNN in training on preference pairs: its Scorer (see dpo/scorer.py).

A score is ln p of the designed residues of a sequence, decoded in an order of mpnn/batches.py, the
same for both sequences of a pair, and for policy and base.
"""
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dpo.scorer import Base, Likelihoods, Scorer
from mpnn.batches import collate_complexes, make_batch, shared_context, to_device
from mpnn.designs import Designs
from mpnn.model import ALPHABET, Encoding, Graph, to_checkpoint
from mpnn.pairs import Pair
from mpnn.variants import log_probs_alone
from proteins.structures import Complex

GRAPH_INPUT = ("X", "mask", "residue_idx", "chain_id")      # arguments of ProteinMPNN.graph
TABLE_VERSION = 3       # see Scorer.table_settings
# Bytes on the device for graphs of complexes and their encodings by the base: 9 MiB for a complex
# of 300 residues and weights of the published size, so about 230 of these.
MOST_KEPT = 2 * 2**30


# ---------------------------------------------------------------- scores
class Output(NamedTuple):
    """What the network says of a batch."""
    log_probs: torch.Tensor             # (M, L, 21), of its sequences
    natives: torch.Tensor | None        # (U, L, 21), of its native sequences, if it has these


class ProteinMPNNScorer(Scorer):
    """Scores pairs by ProteinMPNN. The graph of each complex, which is the network's input, and its
    encoding by the base are kept on the device."""

    def __init__(self, base: Base, pairs: list, config: Any, ddp: Any):
        super().__init__(base, pairs, config, ddp)
        self.complexes = {pair.complex.key: pair.complex for pair in pairs}
        self.kept = KeptOnDevice(MOST_KEPT)
        self.is_unfolded = config.loss.reference == "unfolded"
        self.is_fixed = config.loss.order != "random" or self.is_unfolded
        self.starts_at_base = not self.is_unfolded

    def batch_maker(self, pairs: list) -> Callable:
        return functools.partial(make_batch, pairs, loss=self.config.loss,
                                 seed=self.config.training.seed)

    def prepare(self, batch: dict) -> dict:
        complexes = [self.complexes[key] for key in batch["complex_keys"]]
        prepared = to_device(batch, self.ddp.device)
        prepared["graph"] = self.graph(complexes)
        if "native" in batch:
            prepared["native_base"] = self.decode_natives(prepared, complexes)
        return prepared

    def run(self, model: torch.nn.Module, batch: dict) -> Output:
        arguments = (batch["graph"], batch["S"], batch["order"], batch["complex_row"],
                     shared_context(batch))
        if "native" not in batch:
            return Output(model(*arguments), None)
        return Output(*model(*arguments, (batch["native"], batch["native_order"])))

    def run_base(self, batch: dict) -> Output:
        complexes = [self.complexes[key] for key in batch["complex_keys"]]
        encoding = self.encoding(complexes)
        log_probs = self.base.model.decode(encoding, batch["S"], batch["order"],
                                           batch["complex_row"], shared_context(batch))
        return Output(log_probs, None)

    def likelihoods(self, output: Output, batch: dict) -> Likelihoods:
        scores, entropy = pair_scores(output.log_probs, batch, self.config.loss.temperature)
        kl = None
        if output.natives is not None:
            kl = native_kl(output.natives, batch)
        return Likelihoods(scores, entropy, kl)

    def table_settings(self) -> tuple:
        loss = self.config.loss
        training = self.config.training
        order = ("fixed", training.seed, loss.n_orders, loss.share_order)
        if loss.order == "arange":
            order = "arange"
        if self.is_unfolded:
            order = "unfolded"
        return (TABLE_VERSION, order, loss.temperature, training.batch_size,
                self.base.model.num_edges)

    def file_content(self, model: torch.nn.Module, epoch: int, step: int) -> dict:
        return to_checkpoint(model, epoch=epoch, step=step)

    def describe(self) -> tuple[str, str, str]:
        loss = self.config.loss
        model = self.base.model
        name = "CA-only ProteinMPNN" if model.ca_only else "ProteinMPNN"
        scoring = f"temperature {loss.temperature:g}, {loss.order} order x {loss.n_orders}"
        if self.is_unfolded:
            scoring += ", reference: residues alone"
        return name, f"{model.num_edges} neighbours", scoring

    def designs(self, pairs: list) -> Designs:
        return Designs(pairs, self)

    def base_parts(self, pairs: list, indices: list[int]) -> torch.Tensor:
        if self.is_unfolded:
            return self.scores_alone([pairs[i] for i in indices])
        batch = self.prepare(self.batch_without_natives(pairs, indices))
        return self(self.base.model, batch).parts

    def more_metrics(self, model: torch.nn.Module, pairs: list) -> dict:
        """Of native sequences, one for each complex and set of designed positions among the pairs,
        means over scored residues of recovery, the fraction of native letters that are the model's
        most likely letter given the letters decoded before, and of the KL divergence of the model
        from the base, in nats."""
        natives = native_pairs(pairs)
        rows = self.rows_of(natives, (3,),
                            lambda indices: self.native_sums(model, natives, indices),
                            "validation, native sequences")
        right, kl, residues = rows.sum(0).tolist()
        return {"val/recovery": right / max(residues, 1),
                "val/kl": max(kl / max(residues, 1), 0.0)}     # rounding can make it negative

    # ---- complexes on the device ----

    def graph(self, complexes: list[Complex]) -> Graph:
        """The network's input for complexes, on the device."""
        return stack([self.kept.get(("graph", complex.key), lambda: self.make_graph(complex))
                      for complex in complexes])

    def make_graph(self, complex):
        graph = self.base.model.graph(**collate_complexes([complex], GRAPH_INPUT))
        return graph.to(self.ddp.device)

    def encoding(self, complexes: list[Complex]) -> Encoding:
        """The encoding of complexes by the base weights."""
        return stack([self.kept.get(("encoding", complex.key),
                                    lambda: self.base.model.encode(self.graph([complex])))
                      for complex in complexes])

    # ---- residues alone: loss.reference unfolded ----

    def scores_alone(self, pairs):
        """(P, 2) float64 scores of residues alone, see mpnn/variants.py. They have no order."""
        scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
        for row, pair in enumerate(pairs):
            complex = pair.complex
            log_probs, = self.kept.get(("alone", complex.key), lambda: (self.alone(complex),))
            scored = np.flatnonzero(pair.chain_M & complex.mask[:len(pair.chain_M)])
            for side, letters in enumerate((pair.chosen, pair.rejected)):
                token = log_probs[scored, letters[scored].astype(np.int64)]
                scores[row, side] = token.double().sum()
        return scores

    def alone(self, complex):
        """(L, 21) log-probabilities of the residues of a complex, each alone, on the CPU."""
        log_probs = torch.zeros(len(complex), len(ALPHABET))
        rows = np.flatnonzero(complex.mask).tolist()
        log_probs[rows] = log_probs_alone(self.base.model, complex, rows).float().cpu()
        return torch.log_softmax(log_probs / self.config.loss.temperature, dim=-1)

    # ---- native sequences ----

    @torch.no_grad()
    def decode_natives(self, batch, complexes):
        """(U, L, 21) log-probabilities of the native sequences of a batch under the base."""
        return self.base.model.decode(self.encoding(complexes), batch["native"],
                                      batch["native_order"])

    def batch_without_natives(self, pairs, indices):
        """A batch without the native sequences that loss.native_kl asks for."""
        loss = replace(self.config.loss, native_kl=0.0)
        return make_batch(pairs, indices, loss, self.config.training.seed)

    def native_sums(self, model, natives, indices):
        """(P, 3) sums over the scored residues of native pairs: letters that are the model's most
        likely, KL divergence in nats, number of residues."""
        batch = self.prepare(self.batch_without_natives(natives, indices))
        log_probs = self.run(model, batch).log_probs
        right = (log_probs.argmax(-1) == batch["S"]).float()
        difference = log_probs - self.run_base(batch).log_probs
        kl = (log_probs.exp() * difference).sum(-1)
        rows = batch["sequence_rows"][..., 0]               # native is chosen and rejected
        sum_right = (right[rows].mean(1) * batch["scored"]).sum(-1)
        sum_kl = (kl[rows].mean(1) * batch["scored"]).sum(-1)
        return torch.stack([sum_right, sum_kl, batch["n_scored"]], 1)


def pair_scores(log_probs: torch.Tensor, batch: dict,
                temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of pairs, averaged over their orders.

    log_probs: (M, L, 21), of the sequences of a batch of make_batch.
    Returns (P, 2) log-probabilities of chosen and rejected, summed over the scored residues, in
    nats; and (P,) mean entropy of a scored residue given the chosen sequence.
    """
    if temperature != 1:
        log_probs = torch.log_softmax(log_probs / temperature, dim=-1)
    token = log_probs.gather(-1, batch["S"][..., None])[..., 0]                    # (M, L)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    rows = batch["sequence_rows"]                                                  # (P, O, 2)
    scored = batch["scored"][:, None]                                              # (P, 1, L)
    sums = (token[rows] * scored[:, None]).sum(-1).mean(1)
    chosen_rows = rows[..., 0]                                                     # (P, O)
    chosen_entropy = (entropy[chosen_rows] * scored).sum(-1).mean(1)
    return sums, chosen_entropy / batch["n_scored"]


def native_kl(natives: torch.Tensor, batch: dict) -> torch.Tensor:
    """(P,) mean KL divergence of a model from the base, per residue of the native sequence of each
    pair's complex, in nats: of ln(p base / p model) under the base's p.

    natives: (U, L, 21), the model's log-probabilities of the native sequences of a batch."""
    base = batch["native_base"]
    divergence = (base.exp() * (base - natives)).sum(-1)                           # (U, L)
    known = batch["native_known"]
    means = (divergence * known).sum(1) / known.sum(1).clamp(min=1)
    return means[batch["native_row"]]


def native_pairs(pairs):
    """Pairs of the native sequence with itself, one for each complex and set of designed positions
    with a known native letter."""
    unknown = ALPHABET.index("X")
    found = {}
    for pair in pairs:
        native = pair.complex.S[:len(pair.chain_M)]
        designed = pair.chain_M & (native != unknown)
        if (designed & pair.complex.mask[:len(designed)]).any():
            key = (pair.complex.key, designed.tobytes())
            found.setdefault(key, Pair(pair.complex, native, native, designed))
    return list(found.values())


# ---------------------------------------------------------------- complexes on the device
class KeptOnDevice:
    """Tuples of tensors by key. Beyond `most` bytes the least recently used ones are dropped."""

    def __init__(self, most: int):
        self.room = most        # bytes left
        self.found = {}         # least recently used first

    def get(self, key: tuple, make: Callable) -> tuple:
        """The tuple of this key: what make() gave."""
        found = self.found.pop(key, None)
        if found is None:
            found = make()
            self.room -= sum(x.nbytes for x in found)
        self.found[key] = found
        while self.room < 0 and len(self.found) > 1:
            least_recent = next(iter(self.found))
            self.room += sum(x.nbytes for x in self.found.pop(least_recent))
        return found


def stack(parts: list) -> Graph | Encoding:
    """Join Graphs (or Encodings) of one structure each into one, padded with masked rows."""
    if len(parts) == 1:
        return parts[0]
    L = max(part.E_idx.shape[1] for part in parts)
    K = max(part.E_idx.shape[2] for part in parts)
    stacked = {}
    for name in parts[0]._fields:
        values = [getattr(part, name) for part in parts]
        if name in ("mask", "h_V"):                             # each (1, L, ...)
            whole = values[0].new_zeros(len(parts), L, *values[0].shape[2:])
            for row, value in zip(whole, values):
                row[:value.shape[1]] = value[0]
        else:                                                   # each (1, L, K, ...)
            whole = values[0].new_zeros(len(parts), L, K, *values[0].shape[3:])
            for row, value in zip(whole, values):
                row[:value.shape[1], :value.shape[2]] = value[0]
        stacked[name] = whole
    return type(parts[0])(**stacked)
