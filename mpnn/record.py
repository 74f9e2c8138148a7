"""What a file of weights says of its training: from which base, and what its scores were less.

    record = read_record(content, path)         # None: published weights, or older files
    name, model = find_base(record, path)       # checked by its hash; by it scores are corrected

Training with loss.reference unfolded compares scores that are corrected: less those of the residues
alone under the base weights. Scores by such weights have to be corrected by the same base. The
record is of the last training alone: its base is the file that this started from, which may be
fine-tuned weights themselves. Training on binding alone keeps the record of that file, if it has
one. mpnn/base.py makes it. Writes nothing.
"""
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F

from mpnn.model import ProteinMPNN
from mpnn.weights import find_weights, is_published, load_proteinmpnn
from training.resume import hash_of

RECORD = "training_record"      # key of best_model.pt and latest_model.pt
REFERENCES = ("base", "unfolded", "none")


class TrainingRecord(NamedTuple):
    """How train_dpo_ddp.py trained weights; all texts.

    base:      name of the weights that it started from, published or a path as it was given.
    base_file: path of their file, relative to the folder of the trained weights; "" for random
               ones.
    base_hash: of these weights, see hash_of.
    reference: loss.reference; "none" for losses that use none.
    unit:      loss.unit.
    """
    base: str
    base_file: str
    base_hash: str
    reference: str
    unit: str

    @property
    def is_corrected(self) -> bool:
        """Whether training compared scores less those of the residues alone under the base."""
        return self.reference == "unfolded"


def read_record(content: dict, path: str | Path) -> TrainingRecord | None:
    """The record in what a file of weights holds; None if it has none. Raises: ValueError."""
    raw = content.get(RECORD)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: {RECORD} is {type(raw).__name__}; expected a dict, as "
                         "train_dpo_ddp.py writes it.")
    values = {}
    for name in TrainingRecord._fields:
        values[name] = raw.get(name)
        if not isinstance(values[name], str):
            raise ValueError(f"{path}: {RECORD} has {values[name]!r:.60} as {name}; expected a "
                             "text, as train_dpo_ddp.py writes it.")
    if values["reference"] not in REFERENCES:
        raise ValueError(f"{path}: {RECORD} has {values['reference']!r:.60} as reference; expected "
                         f"one of {', '.join(REFERENCES)}.")
    return TrainingRecord(**values)


def find_base(record: TrainingRecord, path: str | Path,
              product: Callable = F.linear) -> tuple[str, ProteinMPNN]:
    """(name, model) of the base weights of a record, found by file or by name, with its hash.

    path: of the trained weights. Raises: ValueError that says what was found."""
    found = []
    for name, file in places_of_base(record, path):
        if not file.is_file():
            found.append(f"no file {file}")
            continue
        try:
            model = load_proteinmpnn(file, product=product)
        except ValueError as error:
            found.append(str(error))
            continue
        weights = hash_of(model.state_dict())
        if weights == record.base_hash:
            return name, model
        found.append(f"{file}, which holds other weights (hash {weights})")
    raise ValueError(f"{path} was trained with loss.reference unfolded from {record.base} (hash "
                     f"{record.base_hash}), by which its scores are to be corrected; found "
                     f"{'; '.join(found) or 'nothing'}. Give these weights (--correction_weights "
                     "FILE, once for each file of weights), or --no_correction.")


def places_of_base(record, path):
    """[(name, Path)] where the base weights of a record may be."""
    places = []
    is_known = is_published(record.base)
    if record.base_file:
        folder = os.path.dirname(os.path.realpath(path))
        file = os.path.normpath(os.path.join(folder, record.base_file))
        places.append((record.base if is_known else os.path.relpath(file), Path(file)))
    if is_known:
        try:
            named = find_weights(record.base)
        except ValueError:      # they are not installed
            return places
        if named.resolve() not in [file.resolve() for _, file in places]:
            places.append((record.base, named))
    return places
