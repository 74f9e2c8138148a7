"""Batches of pairs: their tensors. Which pairs are in which step: dpo/plan.py.

    batch = make_batch(train, indices, config.loss, seed=0, epoch=0)

All results depend only on the arguments. No model and no process group here.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ddp_setup import seed_for
from dpo.pairs import Pair
from mpnn.batches import collate_complexes
from mpnn.model import SharedContext, decoding_order
from proteins.letters import X_ID

MOST_DESIGNED = 0.3     # fraction of rows up to which sequences share their context's pass


def make_batch(pairs: list[Pair], indices: list[int], loss: Any, seed: int,
               epoch: int | None = None) -> dict[str, Any]:
    """Collate P pairs on U complexes of at most L rows into M distinct (sequence, order) rows.

    Args:
        loss:  the config's section.
        epoch: None: the same random numbers at each call.
    Returns a dict of
        S, order: (M, L) int64, the sequences and the order in which each is decoded.
        complex_row: (M,) int64, the row's complex, numbered in order of first appearance.
        complex_keys: list of U int, keys of the complexes: the host looks them up, so no tensor.
        sequence_rows: (P, O, 2) int64, row in S of the chosen and the rejected sequence of a pair
            under each of its O orders.
        scored: (P, L) float32, 1 = residue is scored. n_scored: (P,) number of scored residues.
        weight: (P,) float32, of each pair in means over pairs.
        seen: (2,) float64, numbers of pairs and of scored residues.
    If few residues are designed, also the fields of model.SharedContext, by name, for S: designed,
    context_row, sequence. With loss.native_kl, also what native_rows makes.
    """
    batch = collate(pairs, indices)
    rows = {}               # content of a row -> (its number, the row)
    sequence_rows = []
    L = batch["S"].shape[1]
    for p, i in enumerate(indices):
        for order in decoding_orders(pairs[i], loss, seed, epoch):
            order = torch.cat([order, torch.arange(len(order), L)])                # padding last
            for name in ("chosen", "rejected"):
                row = (int(batch["complex"][p]), batch[name][p], order)
                content = (row[0], row[1].numpy().tobytes(), order.numpy().tobytes())
                number, _ = rows.setdefault(content, (len(rows), row))      # equal ones: one row
                sequence_rows.append(number)
    complex_row, S, order = zip(*(row for _, row in rows.values()))
    scored = batch["chain_M"] * batch["mask"][batch["complex"]]
    n_scored = scored.sum(1)
    made = {"S": torch.stack(S), "order": torch.stack(order),
            "complex_row": torch.tensor(complex_row), "complex_keys": batch["complex_keys"],
            "sequence_rows": torch.tensor(sequence_rows).view(len(indices), -1, 2),
            "scored": scored, "n_scored": n_scored,
            "weight": torch.tensor([pairs[i].weight for i in indices], dtype=torch.float32),
            "seen": torch.tensor([len(indices), float(n_scored.sum())], dtype=torch.float64)}
    made.update(find_contexts(made))
    if loss.native_kl:
        made.update(native_rows(batch, [pairs[i] for i in indices], seed, epoch))
    return made


def decoding_orders(pair: Pair, loss: Any, seed: int, epoch: int | None = None) -> torch.Tensor:
    """(n_orders, L) decoding orders of a pair (arange: (1, L)), fixed residues first. Chosen and
    rejected sequence, and policy and base, use the same orders.

    The random seed depends on (seed, pair, epoch); without an epoch, or with loss.order fixed, on
    (seed, pair). With share_order, complex and designed positions replace the pair in it."""
    n = len(pair.chain_M)
    designed = torch.zeros(1, len(pair.complex))
    designed[0, :n] = torch.from_numpy(pair.chain_M & pair.complex.mask[:n])
    if loss.order == "arange":
        places = torch.arange(designed.shape[1], dtype=torch.float64)
        return decoding_order(designed, places[None])
    what = pair.key
    if loss.share_order:
        what = (pair.complex.key, pair.chain_M.tobytes())
    if loss.order == "fixed":
        epoch = None
    generator = torch.Generator().manual_seed(seed_for(seed, "order", what, epoch))
    draw = torch.rand(loss.n_orders, designed.shape[1], dtype=torch.float64, generator=generator)
    return decoding_order(designed.expand_as(draw), draw)


def native_rows(batch: dict, pairs: list[Pair], seed: int, epoch: int | None) -> dict:
    """The native sequence of each of U complexes, to be decoded in a random order of all residues.

    Args:
        batch: as of collate. pairs: those of the batch, P.
    Returns a dict of
        native, native_order: (U, L) int64, letters and order.
        native_known: (U, L) float32, 1 = resolved, with a known letter.
        native_row: (P,) int64, the row of the pair's complex.
    """
    L = batch["S"].shape[1]
    first_pairs = {}        # key of a complex -> the first of its pairs, which tells orders apart
    for pair in pairs:
        first_pairs.setdefault(pair.complex.key, pair)
    orders = []
    for pair in first_pairs.values():
        generator = torch.Generator().manual_seed(seed_for(seed, "native", pair.key, epoch))
        order = torch.randperm(len(pair.complex), generator=generator)
        orders.append(torch.cat([order, torch.arange(len(order), L)]))         # padding last
    known = batch["mask"] * (batch["S"] != X_ID)
    return {"native": batch["S"], "native_order": torch.stack(orders), "native_known": known,
            "native_row": batch["complex"]}


def find_contexts(batch: dict) -> dict[str, torch.Tensor]:
    """Which sequences of a batch share the context of their designed residues.

    batch: as of make_batch. Returns {name: tensor} of model.SharedContext, or {} if so many
    residues are designed that the pass over all rows is no more work."""
    designed = torch.zeros(batch["S"].shape, dtype=torch.bool)
    for rows, scored in zip(batch["sequence_rows"], batch["scored"]):
        designed[rows.flatten()] = scored.bool()
    if designed.sum() > MOST_DESIGNED * designed.numel():
        return {}
    letters = batch["S"].masked_fill(designed, 0)
    # The order without its designed residues; these are the same ones if the rest is the same.
    is_context = ~designed.gather(1, batch["order"])
    numbers = {}            # content of a context -> its number
    context_row = []
    sequence = []
    for row in range(len(letters)):
        order = batch["order"][row][is_context[row]]
        content = (int(batch["complex_row"][row]), letters[row].numpy().tobytes(),
                   order.numpy().tobytes())
        if content not in numbers:
            numbers[content] = len(numbers)
            sequence.append(row)
        context_row.append(numbers[content])
    return {"designed": designed, "context_row": torch.tensor(context_row),
            "sequence": torch.tensor(sequence)}


def shared_context(batch: dict) -> SharedContext | None:
    """The SharedContext of a batch of make_batch, or None if it has none."""
    if "context_row" not in batch:
        return None
    return SharedContext(batch["designed"], batch["context_row"], batch["sequence"])


def collate(pairs: list[Pair], indices: Iterable[int]) -> dict[str, Any]:
    """Tensors of P pairs and of the U distinct complexes that they are on.

    Coordinates are left out: the graph made from them is kept per complex.

    Args:
        indices: which of the pairs.
    Returns: dict of S and mask as of collate_complexes, and
        complex_keys     list of U int
        complex          (P,) int64, row of the pair's complex in S and mask
        chosen, rejected (P, L) int64, letters of the whole complex
        chain_M          (P, L) float32, 1 = designed; chain_M x mask[complex] is 1 where scored
    """
    batch_pairs = [pairs[i] for i in indices]
    complexes = {pair.complex.key: pair.complex for pair in batch_pairs}
    rows = {complex_key: row for row, complex_key in enumerate(complexes)}
    batch = collate_complexes([*complexes.values()], ("S", "mask"))
    batch["complex_keys"] = [*complexes]
    batch["complex"] = torch.tensor([rows[pair.complex.key] for pair in batch_pairs])
    batch["chosen"] = batch["S"][batch["complex"]]
    batch["rejected"] = batch["chosen"].clone()
    batch["chain_M"] = torch.zeros(batch["chosen"].shape)
    for i, pair in enumerate(batch_pairs):
        for name in ("chosen", "rejected", "chain_M"):
            batch[name][i, :len(pair.chosen)] = torch.from_numpy(getattr(pair, name))
    return batch
