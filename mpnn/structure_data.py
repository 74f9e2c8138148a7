"""What train_mpnn_ddp.py trains on, validates with and compares with; the memory that this takes.

    data = load_data(config.data, cache_beside(work_dir), ca_only=False, ddp=ddp)
    data.train.structures, data.train.items         # StructureSet, list of Backbone
    lines = describe_memory(config)

Rank 0 reads the structures into the cache, where it does not hold them already; all ranks load it.
"""
from pathlib import Path
from typing import Any, NamedTuple

from ddp_setup import Ddp, broadcast
from ddp_watch import note_progress
from mpnn.backbones import Backbone, training_items, validation_items
from proteins.seeds import content_hash
from proteins.structure_sets import (
    Reading,
    StructureSet,
    choose_usable,
    describe_shared,
    fingerprint,
    hold_out,
    load_cache,
    make_cache,
)
from training.files import check_output
from training.log import show_progress
from training.loop import check_alike

# Measured on a CPU, peak memory of a process, by a model of the published size: one that has loaded
# all, and for each residue, padding included, of the largest micro-batch. One step takes 1.3 MB for
# it; after a hundred steps, micro-batches of other sizes have left gaps that no next one fills.
PROCESS = 0.40e9
PER_RESIDUE = 3.1e6


class Items(NamedTuple):
    """Structures, and what is designed of them."""
    structures: StructureSet
    items: list[Backbone]


class StructureData(NamedTuple):
    """The structures of a run. lines: that describe them.

    fingerprint: {"n", "hash"} of what a run trains on and chooses by. The others may change."""
    train: Items
    val: Items | None
    other: Items | None
    fingerprint: dict
    lines: list


def cache_beside(work_dir: str | Path) -> Path:
    """The default file for what was read of structures: beside the run folder, so that --fresh,
    which renames this, does not read them again."""
    folder = Path(work_dir).absolute()
    return folder.with_name(f"{folder.name}.structures.pt")


def load_data(section: Any, cache: str | Path, ca_only: bool, ddp: Ddp) -> StructureData:
    """The StructureData of a config. A collective.

    Args:
        section: the config's section data.
        cache:   file, made or made anew where that is needed.
        ca_only: for a CA-only model.
    Raises: ValueError or OSError, on rank 0 for structures that cannot be used."""
    sources = {"train": section.structures, "val": section.val_structures,
               "other": section.other_structures}
    sources = {name: source for name, source in sources.items() if source is not None}
    splits = section.val_structures is None and section.val_fraction > 0
    reading = Reading(ca_only=ca_only, homologous=section.homologous, identity=section.identity,
                      split="train" if splits else None, most_broken=section.most_broken)
    lines = None
    if ddp.is_main:
        if section.cache is not None:
            check_output(section.cache, [])
        lines = make_cache(cache, sources, reading, note_progress,
                           lambda items, text: show_progress(items, ddp, text))
    lines = list(broadcast(lines, ddp))
    sets = load_cache(cache)
    numbers = {}
    left_out = {}
    for name in sources:
        numbers[name], left_out[name] = choose_usable(sets[name], section.max_length)
        lines += left_out[name]
    if splits:
        sets["val"] = sets["train"]
        numbers["train"], numbers["val"], said = hold_out(sets["train"], numbers["train"],
                                                          section.val_fraction,
                                                          "".join(left_out["train"]))
        lines += said
    elif "val" in sources:
        lines += describe_shared(sets["train"], numbers["train"], sets["val"], numbers["val"])
    if "other" in sources:
        lines += describe_shared(sets["train"], numbers["train"], sets["other"], numbers["other"],
                                 "data.other_structures")
    parts = {name: fingerprint(sets[name], numbers[name]) for name in numbers}
    check_alike({f"structures of {name} (hash)": part["hash"] for name, part in parts.items()}, ddp)
    parts.pop("other", None)
    whole = {"n": parts["train"]["n"], "hash": content_hash(sorted(
        (name, part["hash"]) for name, part in parts.items()))}
    items = {"train": Items(sets["train"], training_items(sets["train"], numbers["train"]))}
    for name in ("val", "other"):
        items[name] = None
        if name in numbers:
            items[name] = Items(sets[name], validation_items(sets[name], numbers[name]))
    return StructureData(items["train"], items["val"], items["other"], whole, lines)


def describe_memory(config: Any) -> list[str]:
    """Lines on the memory of a rank."""
    n = config.training.residues_per_batch
    step = n * PER_RESIDUE
    return [f"memory of a rank, up to {(PROCESS + step) / 1e9:.1f} GB, and the structures: "
            f"micro-batches of {n:,} residues {step / 1e9:.1f} GB; on a CPU, with weights of the "
            "published size. A structure with more residues takes as much more"]
