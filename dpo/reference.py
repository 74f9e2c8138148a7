"""What the policy is measured against: the base weights, frozen, and what depends on them alone.

    base = FrozenBase(load_base(config), items, device)
    graph = base.graph(batch["complex_keys"])           # the network's input, kept on the device
    encoding = base.encoding(batch["complex_keys"])     # by the base weights, kept there too
    scores = kept_scores(path, shape, compute, ddp)     # of pairs, kept in a file
"""
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_setup import Ddp, broadcast, load_checkpoint, save_checkpoint
from mpnn.base import Base
from mpnn.batches import collate_complexes
from mpnn.model import ALPHABET, Encoding, Graph
from mpnn.variants import log_probs_alone, score_alone

WITHOUT_REFERENCE = ("reference_free", "simpo")     # losses that need no reference
GRAPH_INPUT = ("X", "mask", "residue_idx", "chain_id")      # arguments of ProteinMPNN.graph
# Bytes on the device for graphs of complexes and their encodings by the base: 9 MiB for a complex
# of 300 residues and weights of the published size, so about 230 of these.
MOST_KEPT = 2 * 2**30


class FrozenBase:
    """The base weights. The graph of each complex, which is the network's input, and its encoding
    by these weights are kept on the device.

    model: in eval mode, on the device. hash: of its weights. text: which weights, for the user.
    items: all pairs or VariantSets that a run scores, by key. complexes: theirs, by key."""

    def __init__(self, base: Base, items: list, device: torch.device):
        """base: its model is copied."""
        self.model = copy.deepcopy(base.model).eval().to(device)
        self.hash = base.hash
        self.text = base.text
        self.items = {item.key: item for item in items}
        self.complexes = {structure.key: structure
                          for item in items for structure in item.structures}
        self.device = device
        self.kept = KeptOnDevice(MOST_KEPT)

    def graph(self, complex_keys: list[int]) -> Graph:
        """The network's input for complexes, on the device."""
        return stack([self.kept.get(("graph", one), self.make_graph, one)
                      for one in complex_keys])

    def encoding(self, complex_keys: list[int]) -> Encoding:
        """The encoding of complexes by the base weights."""
        return stack([self.kept.get(("encoding", one), self.make_encoding, one)
                      for one in complex_keys])

    def log_probs_alone(self, complex_key: int) -> Tensor:
        """(L, 21) log-probabilities of the residues of a complex, each alone, on the CPU."""
        log_probs, = self.kept.get(("alone", complex_key), self.make_log_probs_alone, complex_key)
        return log_probs

    def scores_alone(self, set_key: int) -> Tensor:
        """(N + 1,) float32 scores of the variants of a VariantSet, of their mutated residues alone,
        on the device; the last, of the wild type, is 0. Of binding all are 0: a residue alone is
        the same in the complex and in its partner."""
        scores, = self.kept.get(("variants alone", set_key), self.make_scores_alone, set_key)
        return scores

    def make_scores_alone(self, set_key):     # of one tensor, as the store keeps tuples
        variant_set = self.items[set_key]
        if variant_set.partners:
            return (torch.zeros(len(variant_set.values), device=self.device),)
        scores = score_alone(self.model, variant_set.complex, variant_set.variants)
        return (torch.from_numpy(np.append(scores, 0.0)).float().to(self.device),)

    def make_graph(self, complex_key):
        tensors = collate_complexes([self.complexes[complex_key]], GRAPH_INPUT)
        return self.model.graph(**tensors).to(self.device)

    def make_encoding(self, complex_key):
        return self.model.encode(self.graph([complex_key]))

    def make_log_probs_alone(self, complex_key):
        structure = self.complexes[complex_key]
        log_probs = torch.zeros(len(structure), len(ALPHABET))
        rows = np.flatnonzero(structure.mask).tolist()
        log_probs[rows] = log_probs_alone(self.model, structure, rows).float().cpu()
        return (log_probs,)


# ---------------------------------------------------------------- kept on the device
class KeptOnDevice:
    """Tuples of tensors by name. Beyond `most` bytes the least recently used ones are dropped."""

    def __init__(self, most: int):
        self.room = most        # bytes left
        self.tuples = {}        # least recently used first

    def get(self, name: tuple, make: Callable, of: int) -> tuple:
        """The tuple of this name: what make(of) gave."""
        tensors = self.tuples.pop(name, None)
        if tensors is None:
            tensors = make(of)
            self.room -= sum(x.nbytes for x in tensors)
        self.tuples[name] = tensors
        while self.room < 0 and len(self.tuples) > 1:
            least_recent = next(iter(self.tuples))
            self.room += sum(x.nbytes for x in self.tuples.pop(least_recent))
        return tensors


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


# ---------------------------------------------------------------- kept in a file
def kept_scores(path: Path, shape: tuple, compute: Callable, ddp: Ddp) -> tuple[Tensor, str]:
    """Scores from a file, or else computed and written there. A collective.

    Args:
        path:    its name should be a hash of all inputs.
        compute: function () -> scores of this shape, float32, equal on all ranks.
    Returns: (scores on the CPU, text that says where they come from).
    """
    scores = None
    trouble = ""
    if ddp.is_main and path.exists():
        try:
            scores = load_checkpoint(str(path))["scores"]
        except ValueError as error:
            trouble = f"; {path} could not be used ({str(error).splitlines()[0]})"
    if broadcast(scores is not None, ddp):
        if scores is None:
            scores = torch.zeros(shape)
        return broadcast(scores, ddp).cpu(), f"read from {path}"
    scores = compute()
    save_checkpoint(path, ddp, scores=scores)
    return scores, f"computed, kept in {path}{trouble}"
