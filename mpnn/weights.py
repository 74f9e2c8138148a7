"""ProteinMPNN weights as files, published or ours.

from_checkpoint of mpnn/model.py makes the network of what such a file holds.
"""
import os
import zipfile
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mpnn.model import PUBLISHED, ProteinMPNN, from_checkpoint
from training.files import check_zip


def load_proteinmpnn(path: str, dropout: float = 0.0,
                     product: Callable = F.linear) -> ProteinMPNN:
    """Read a file {num_edges, noise_level, model_state_dict, ...}, published or ours.

    dropout, product: as of ProteinMPNN.
    Returns: the model, on the CPU, in float32 and training mode.
    Raises: ValueError naming the file and what is wrong.
    """
    if os.path.isdir(path):
        best = os.path.join(path, "best_model.pt")
        example = f", such as {best}" if os.path.isfile(best) else ""
        raise ValueError(f"{path} is a folder; expected a file of ProteinMPNN weights{example}. "
                         f"{PUBLISHED}")
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file, or a link that leads to none; expected a file of "
                         f"ProteinMPNN weights. {PUBLISHED}")
    if not os.path.isfile(path):
        raise ValueError(f"There is no file {path}; expected ProteinMPNN weights. {PUBLISHED}")
    if str(path).endswith((".pkl", ".pickle")) and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is a pickle file, as the weights of ColabDesign are, which are "
                         f"for JAX; expected a file of PyTorch. {PUBLISHED}")
    check_zip(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:          # a damaged file can make torch.load raise anything
        raise ValueError(f"{path} cannot be read as a file of tensors and numbers "
                         f"({type(error).__name__}). Fetch or write it again. "
                         f"{PUBLISHED}") from None
    return from_checkpoint(checkpoint, dropout, path, product)
