"""Files of ProteinMPNN weights, published or ours, checked where they are read.

    model = load_proteinmpnn("v_48_020.pt")         # also of CA-only models

What has passed the checks goes to from_checkpoint of mpnn/model.py. Writes nothing.
"""
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mpnn.model import N_FEATURES, ProteinMPNN, from_checkpoint, has_edge_features
from training.config import key, read_fields
from training.files import check_zip

WHERE_PUBLISHED = ("Published files (v_48_002, v_48_010, v_48_020, v_48_030, .pt) are in "
                   "vanilla_model_weights, soluble_model_weights and ca_model_weights of "
                   "github.com/dauparas/ProteinMPNN.")


@dataclass
class Checkpoint:
    """What a file holds. Other keys, such as epoch, are not needed."""
    num_edges: int = key(least=1)                   # neighbours of a residue
    noise_level: float = key(least=0, most=1000)    # Angstrom, in training; published: up to 0.3
    model_state_dict: dict[str, torch.Tensor] = key()


def load_proteinmpnn(path: str, dropout: float = 0.0,
                     product: Callable = F.linear) -> ProteinMPNN:
    """Read a file {num_edges, noise_level, model_state_dict, ...}, published or ours.

    dropout, product: as of ProteinMPNN.
    Returns: the model, on the CPU, in float32 and training mode.
    Raises: ValueError naming the file and what is wrong.
    """
    checkpoint = read_checkpoint(path)
    refuse_other_networks(path, checkpoint.model_state_dict)
    try:
        model = from_checkpoint(vars(checkpoint), dropout, product)
    except ValueError as error:
        raise ValueError(f"{path}: {error} {WHERE_PUBLISHED}") from None
    not_finite = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if not_finite:
        raise ValueError(f"{path}: {not_finite[0]} has values that are not finite. "
                         f"{WHERE_PUBLISHED}")
    return model


def read_checkpoint(path):
    """The Checkpoint in a file. Raises: ValueError."""
    if os.path.isdir(path):
        best = os.path.join(path, "best_model.pt")
        example = f", such as {best}" if os.path.isfile(best) else ""
        raise ValueError(f"{path} is a folder; expected a file of ProteinMPNN weights{example}. "
                         f"{WHERE_PUBLISHED}")
    if not os.path.isfile(path):
        raise ValueError(f"There is no file {path}; expected ProteinMPNN weights. "
                         f"{WHERE_PUBLISHED}")
    if str(path).endswith((".pkl", ".pickle")) and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is a pickle file, as the weights of ColabDesign are, which are "
                         f"for JAX; expected a file of PyTorch. {WHERE_PUBLISHED}")
    check_zip(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:          # a damaged file can make torch.load raise anything
        raise ValueError(f"{path} cannot be read as a file of tensors and numbers "
                         f"({type(error).__name__}). Fetch or write it again. "
                         f"{WHERE_PUBLISHED}") from None
    if not isinstance(content, dict) or "model_state_dict" not in content:
        raise ValueError(f"{path} has no model_state_dict; expected num_edges, noise_level and "
                         "model_state_dict, as best_model.pt of a run has them. "
                         f"{advice_on(path, content)}")
    checkpoint = read_fields(Checkpoint, content, path)
    tensors = checkpoint.model_state_dict.values()
    for name, value in checkpoint.model_state_dict.items():
        if not value.is_floating_point():   # integers may be weights of 8 bits, with a scale
            raise ValueError(f"{path}: {name} is {value.dtype}; expected floating point. "
                             f"{WHERE_PUBLISHED}")
    claimed = sum(value.numel() * value.element_size() for value in tensors)
    if claimed > os.path.getsize(path):     # a tensor may repeat a number of the file without end
        raise ValueError(f"{path}: its weights would take {claimed:,} bytes, and the file has "
                         f"{os.path.getsize(path):,}. {WHERE_PUBLISHED}")
    return checkpoint


def advice_on(path, content):
    """What to do with a file that is no ProteinMPNN weights: for those of this project, their use.
    """
    weights = None
    if isinstance(content, dict):
        weights = content.get("model", content)
    names = set()
    if isinstance(weights, dict):
        names = {str(name).removeprefix("module.") for name in weights}
    if "vocab_embed.embedding" in names:
        return "It is a SEDD model: sample_sedd.py and train_sedd_ddp.py take it."
    if "W_e.weight" in names:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(path)))
        return ("It is a checkpoint that train_dpo_ddp.py resumes from; its weights are "
                f"{os.path.join(folder, 'latest_model.pt')}, and the best best_model.pt there.")
    return WHERE_PUBLISHED


def refuse_other_networks(path, weights):
    """ValueError for weights of a related network."""
    # CA-only models have these layers too, but fewer features of an edge.
    has_nodes = any(name.startswith(("W_v.", "features.node_embedding.")) for name in weights)
    if any(name.startswith("context_encoder_layers.") for name in weights):
        other = "a LigandMPNN with ligand context"
    elif has_nodes and has_edge_features(weights, N_FEATURES):
        other = "a membrane-label ProteinMPNN"
    else:
        return
    raise ValueError(f"{path} is {other}, another architecture; expected ProteinMPNN for full "
                     f"backbones, vanilla or soluble, or for CA atoms alone. {WHERE_PUBLISHED}")
