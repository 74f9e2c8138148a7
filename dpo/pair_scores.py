"""Scores of pairs by ProteinMPNN, and what native sequences tell of a model.

A score is ln p of the designed residues of a sequence, decoded in an order of dpo/pair_batches.py,
the same for both sequences of a pair, and for policy and base.
"""
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_setup import Ddp
from dpo.pair_batches import make_batch, shared_context
from dpo.pairs import Pair
from dpo.plan import rows_on_ranks
from dpo.reference import WITHOUT_REFERENCE, FrozenBase, kept_scores
from mpnn.batches import to_device
from mpnn.model import Graph
from proteins.letters import X_ID
from proteins.seeds import content_hash

SCORES_VERSION = 3      # of what kept scores mean, and of the settings in the names of their files


# ---------------------------------------------------------------- in a step
def decode_pairs(model: nn.Module, graph: Graph, batch: dict) -> tuple[Tensor, Tensor | None]:
    """What a model says of the sequences of a batch: log-probabilities (M, L, 21), and with
    loss.native_kl those of the native sequences (U, L, 21), else None.

    model: a ProteinMPNN, perhaps wrapped in DDP. graph: of the batch's complexes."""
    arguments = (graph, batch["S"], batch["order"], batch["complex_row"], shared_context(batch))
    if "native" not in batch:
        return model(*arguments), None
    return model(*arguments, (batch["native"], batch["native_order"]))


def score_pairs(log_probs: Tensor, batch: dict, temperature: float) -> tuple[Tensor, Tensor]:
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


@torch.no_grad()
def base_pair_scores(base: FrozenBase, batch: dict, loss: Any) -> Tensor:
    """(P, 2) scores under the reference, in float32 also if the policy uses bfloat16; 0 for losses
    without one. loss: the config's section."""
    if loss.name in WITHOUT_REFERENCE:
        return torch.zeros_like(batch["weight"])[:, None].expand(-1, 2)
    if "base_scores" in batch:      # they stay, see keep_base_scores
        return batch["base_scores"]
    log_probs = base.model.decode(base.encoding(batch["complex_keys"]), batch["S"],
                                  batch["order"], batch["complex_row"], shared_context(batch))
    scores, _ = score_pairs(log_probs, batch, loss.temperature)
    return scores


@torch.no_grad()
def base_natives(base: FrozenBase, batch: dict) -> Tensor | None:
    """Log-probabilities (U, L, 21) of the native sequences of a batch under the base weights; None
    without loss.native_kl."""
    if "native" not in batch:
        return None
    encoding = base.encoding(batch["complex_keys"])
    return base.model.decode(encoding, batch["native"], batch["native_order"])


def native_kl(natives: Tensor, base_log_probs: Tensor, batch: dict) -> Tensor:
    """(P,) mean KL divergence of a model from the base, per residue of the native sequence of each
    pair's complex, in nats: of ln(p base / p model) under the base's p.

    natives, base_log_probs: (U, L, 21), of the native sequences of a batch, of model and base."""
    divergence = (base_log_probs.exp() * (base_log_probs - natives)).sum(-1)       # (U, L)
    known = batch["native_known"]
    means = (divergence * known).sum(1) / known.sum(1).clamp(min=1)
    return means[batch["native_row"]]


# ---------------------------------------------------------------- scores that stay
def keeps_base_scores(loss: Any, in_training: bool) -> bool:
    """Whether scores of pairs under the reference are the same in all epochs."""
    if loss.name in WITHOUT_REFERENCE:
        return False
    return not in_training or loss.order != "random" or loss.reference == "unfolded"


def keep_base_scores(base: FrozenBase, pairs: list[Pair], config: Any, folder: Path, what: str,
                     ddp: Ddp) -> tuple[Tensor, str]:
    """Scores (n, 2) of pairs under the reference, on the CPU: computed, or read from a file in
    `folder`, whose name is a hash of all that decides them. A collective.

    what: which pairs, for the progress bar.
    Returns: (scores, text that says where they come from)."""
    path = Path(folder) / name_of_scores(base, pairs, config, ddp)
    return kept_scores(path, (len(pairs), 2),
                       lambda: compute_base_scores(base, pairs, config, what, ddp), ddp)


def name_of_scores(base, pairs, config, ddp):
    """Name of the file that keeps the scores of these pairs under the reference."""
    loss = config.loss
    seed = config.training.seed
    order = ("fixed", seed, loss.n_orders, loss.share_order)
    if loss.order == "arange":
        order = "arange"
    if loss.reference == "unfolded":
        order = "unfolded"
    content = (SCORES_VERSION, base.hash, order, loss.temperature, config.training.batch_size,
               base.model.num_edges, ddp.device.type,
               torch.__version__,   # other versions round differently: no log 2 at step 0
               [pair.key for pair in pairs])
    return content_hash(content, n_bytes=12) + ".pt"


@torch.no_grad()
def compute_base_scores(base: FrozenBase, pairs: list[Pair], config: Any, what: str,
                        ddp: Ddp) -> Tensor:
    """(n, 2) float32 scores of pairs under the reference, on the CPU. A collective.

    Batches are those of validation: equal weights then score equally to the last bit."""
    loss = config.loss

    def scores_of(indices):
        if loss.reference == "unfolded":
            return torch.stack([score_alone(base, pairs[i], loss.temperature) for i in indices])
        batch = batch_without_natives(pairs, indices, config, ddp)
        log_probs, _ = decode_pairs(base.model, base.graph(batch["complex_keys"]), batch)
        scores, _ = score_pairs(log_probs, batch, loss.temperature)
        return scores

    size = config.training.batch_size
    return rows_on_ranks(pairs, 2, scores_of, size, f"reference, {what}", ddp).float()


def score_alone(base, pair, temperature):
    """(2,) float64 scores of the designed residues alone, see mpnn/variants.py. They have no
    order."""
    log_probs = torch.log_softmax(base.log_probs_alone(pair.complex.key) / temperature, dim=-1)
    scored = np.flatnonzero(pair.chain_M & pair.complex.mask[:len(pair.chain_M)])
    sides = [log_probs[scored, letters[scored].astype(np.int64)].double().sum()
             for letters in (pair.chosen, pair.rejected)]
    return torch.stack(sides)


# ---------------------------------------------------------------- native sequences
def native_pairs(pairs: list[Pair]) -> list[Pair]:
    """Pairs of the native sequence with itself, one for each complex and set of designed positions
    with a known native letter."""
    natives = {}
    for pair in pairs:
        native = pair.complex.S[:len(pair.chain_M)]
        designed = pair.chain_M & (native != X_ID)
        if (designed & pair.complex.mask[:len(designed)]).any():
            what = (pair.complex.key, designed.tobytes())
            natives.setdefault(what, Pair(pair.complex, native, native, designed))
    return list(natives.values())


def whole_natives(complexes: list) -> list[Pair]:
    """Pairs of the native sequence of each complex with itself, of which all is designed."""
    pairs = []
    for structure in complexes:
        native = structure.S[:structure.n_designed]
        pairs.append(Pair(structure, native, native, np.ones(len(native), bool)))
    return pairs


@torch.no_grad()
def compare_natives(model: nn.Module, base: FrozenBase, pairs: list[Pair], config: Any,
                    ddp: Ddp) -> dict:
    """Of native_pairs of these pairs, means over their scored residues: of val/recovery, the
    fraction of native letters that are the model's most likely letter given the letters decoded
    before, and of val/kl, the KL divergence of the model from the base, in nats. A collective.

    model: a ProteinMPNN in eval mode, without DDP."""
    natives = native_pairs(pairs)

    def sums_of(indices):
        batch = batch_without_natives(natives, indices, config, ddp)
        log_probs, _ = decode_pairs(model, base.graph(batch["complex_keys"]), batch)
        base_log_probs = base.model.decode(
            base.encoding(batch["complex_keys"]), batch["S"], batch["order"],
            batch["complex_row"], shared_context(batch))
        right = (log_probs.argmax(-1) == batch["S"]).float()
        kl = (log_probs.exp() * (log_probs - base_log_probs)).sum(-1)
        rows = batch["sequence_rows"][..., 0]               # native is chosen and rejected
        sum_right = (right[rows].mean(1) * batch["scored"]).sum(-1)
        sum_kl = (kl[rows].mean(1) * batch["scored"]).sum(-1)
        return torch.stack([sum_right, sum_kl, batch["n_scored"]], 1)

    rows = rows_on_ranks(natives, 3, sums_of, config.training.batch_size, "native sequences", ddp)
    right, kl, residues = rows.sum(0).tolist()
    return {"val/recovery": right / max(residues, 1),
            "val/kl": max(kl / max(residues, 1), 0.0)}     # rounding can make it negative


def batch_without_natives(pairs, indices, config, ddp):
    """A batch on the device, the same at each call, without what loss.native_kl asks for."""
    loss = replace(config.loss, native_kl=0.0)
    batch = make_batch(pairs, indices, loss, config.training.seed)
    return to_device(batch, ddp.device)
