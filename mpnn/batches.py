"""Tensors of structures, padded to one length, and on a device.

    batch = to_device(collate_complexes([one, other]), device)

No model and no process group here.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def collate_complexes(complexes: list, names: Iterable[str] = (
        "X", "S", "mask", "residue_idx", "chain_id")) -> dict[str, torch.Tensor]:
    """Tensors of U complexes, padded to the longest, L rows.

    Args:
        complexes: list of Complex.
        names:     of the tensors to make.
    Returns: dict of
        X                     (U, L, 4, 3) float32, Angstrom
        S                     (U, L) int64, native letters
        mask                  (U, L) float32, 1 = resolved
        residue_idx, chain_id (U, L) int64
        Padding is 0, and -100 in residue_idx.
    """
    shape = (len(complexes), max(map(len, complexes)))
    kinds = {"X": ((4, 3), np.float32, 0), "S": ((), np.int64, 0), "mask": ((), np.float32, 0),
             "residue_idx": ((), np.int64, -100), "chain_id": ((), np.int64, 0)}
    tensors = {}
    for name in names:
        more_axes, dtype, padding = kinds[name]
        array = np.full((*shape, *more_axes), padding, dtype)
        for row, structure in enumerate(complexes):
            array[row, :len(structure)] = getattr(structure, name)
        tensors[name] = torch.from_numpy(array)
    return tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`: a tensor, or a dict, list or NamedTuple of these; all
    else stays."""
    if torch.is_tensor(batch):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    return batch
