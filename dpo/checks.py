"""Keys of train_dpo_ddp.py's config that do not fit each other, as sentences."""
import os
from typing import Any

from dpo.pair_files import files_of, named
from dpo.reference import WITHOUT_REFERENCE

# Keys that are of designed sequences, and say nothing of measured mutations.
OF_SEQUENCES = ("loss.sft", "loss.share_order", "loss.temperature", "data.mutable_positions",
                "data.mutable_ranges")


def config_problems(config: Any, without_data: bool) -> list[str]:
    """Texts on keys that exclude each other, or are missing.

    without_data: data.train_data may be missing, as --plan needs no data."""
    problems = check_texts(config.data)
    problems += check_loss(config.loss)
    problems += check_base(config, without_data)
    if config.loss.unit == "table":
        problems += check_table(config, without_data)
    elif config.table != type(config.table)():
        problems.append("keys of the section table are given, and loss.unit is pair; expected "
                        "loss.unit table, or none of them")
    return problems


def describe_former_reference(config: Any, base: Any) -> list[str]:
    """List of a warning, if base weights need a correction of their scores that this training on
    tables does not make. base: of mpnn.base.load_base."""
    loss = config.loss
    if base.record is None or not base.record.is_corrected:
        return []
    if loss.unit != "table" or loss.reference == "unfolded":
        return []
    return [f"ATTENTION: the base weights were trained with loss.reference unfolded, so their "
            f"scores fit measured values once corrected by {base.record.base}; this run compares "
            "scores that are not corrected. Give loss.reference=unfolded."]


def check_texts(data):
    """Texts on keys that are given, and empty."""
    problems = []
    for name in ("train_data", "val_data", "mutable_positions", "mutable_ranges"):
        value = getattr(data, name)
        texts = files_of(value)
        if value is not None and not all(text.strip() for text in texts or [""]):
            problems.append(f"data.{name} is empty; expected a value. If you do not need this "
                            "key, leave it out")
        if len(set(map(os.path.realpath, texts))) < len(texts):
            problems.append(f"data.{name} names a file twice, of {named(value)}; expected each "
                            "once")
    if data.mutable_positions is not None and data.mutable_ranges is not None:
        problems.append("data.mutable_positions and data.mutable_ranges are given together; "
                        "expected one of them")
    return problems


def check_loss(loss):
    """Texts on keys of the section loss that the loss does not use."""
    defaults = type(loss)
    problems = []
    if loss.name not in ("robust", "conservative"):
        if loss.label_smoothing not in (0, defaults.label_smoothing):
            problems.append(f"loss.label_smoothing is {loss.label_smoothing}, but loss.name "
                            f"{loss.name} does not use it; expected it left out, or loss.name "
                            "robust or conservative")
    if loss.name != "simpo" and loss.gamma not in (0, defaults.gamma):
        problems.append(f"loss.gamma is {loss.gamma}, but loss.name {loss.name} does not use it; "
                        "expected it left out, or loss.name simpo")
    if loss.order == "arange" and loss.n_orders != 1:
        problems.append(f"loss.n_orders is {loss.n_orders}, but loss.order arange is a single "
                        "order; expected 1")
    if loss.name in WITHOUT_REFERENCE and loss.reference != defaults.reference:
        problems.append(f"loss.reference is {loss.reference}, but loss.name {loss.name} uses no "
                        "reference; expected it left out, or another loss.name")
    return problems


def check_base(config, without_data):
    """Texts on where base weights and demo pairs come from."""
    data = config.data
    base = config.model.base_model_name
    problems = []
    if base != "random" and config.model.random != type(config.model.random)():
        problems.append(f"model.random gives sizes, but model.base_model_name is {base}, a file "
                        "with its own sizes; expected no model.random in the config, or "
                        "base_model_name random")
    if data.train_data is not None or without_data or config.loss.unit == "table":
        return problems
    if base != "random":
        problems.append("data.train_data is not given; expected a file of preference pairs "
                        "(--train_data). Demo pairs are made for random weights only "
                        "(configs/dpo_demo.yaml)")
    for_files = (data.val_data, data.max_length, data.mutable_positions, data.mutable_ranges)
    if any(for_files):
        problems.append("data.val_data, max_length, mutable_positions and mutable_ranges need "
                        "pairs from a file, but data.train_data is not given; expected "
                        "--train_data")
    return problems


def check_table(config, without_data):
    """Texts on keys of tables of mutations that are missing, or that these do not use."""
    problems = []
    for name in OF_SEQUENCES:
        section_name, key_name = name.split(".")
        section = getattr(config, section_name)
        value = getattr(section, key_name)
        if value != getattr(type(section), key_name):
            problems.append(f"{name} is {value}, which is of designed sequences; expected it left "
                            "out with loss.unit table")
    if without_data:
        return problems
    if config.data.train_data is None:
        problems.append("data.train_data is not given; expected a table of mutations for loss.unit "
                        "table (--train_data)")
    if config.table.measured is None:
        problems.append("table.measured is not given; expected the column of measured values for "
                        "loss.unit table")
    if config.table.better is None:
        problems.append("table.better is not given; expected lower or higher (ddG: lower, if "
                        "positive values are destabilising) for loss.unit table")
    return problems
