"""Memory that a rank takes to train on pairs or tables, for --plan: estimated from measured peaks.

    lines = describe_memory(config, data)       # data: DpoData, or None without the files

What was measured is the resident memory of a process on a CPU, in float32, by weights of the
published size: of one that has loaded all, and what a step adds for a residue of a sequence. Uses
no device. Writes nothing.
"""
from typing import Any, NamedTuple

from dpo.reference import MOST_KEPT
from mpnn.variants import SAVES_MEMORY_FROM
from training.plan import count

PROCESS = 0.40e9            # torch, the scripts, four copies of the weights
PER_VARIANT = 2e3           # of a table: its text, its mutations, its value
KEPT_PER_RESIDUE = 31.5e3   # of a complex: its graph, and its encoding by the base weights
# A step, for each residue: of a protein of a table, in each decoding order, and more if it is
# mutated; less where much is computed twice (mpnn/variants.py, choose_run), and there for variants
# of several mutations, of which a few are computed at once; of pairs, of each
# structure and of each sequence, of which a pair has two in each decoding order.
TABLE_RESIDUE = 2.2e6
TABLE_MUTATED = 3.4e6
TABLE_TWICE = 0.8e6
TABLE_TWICE_MUTATED = 1.2e6
TABLE_SEVERAL = 1.6e6
PAIRS_STRUCTURE = 1.4e6
PAIRS_SEQUENCE = 0.25e6
# Micro-batches of other sizes leave gaps in memory that the next ones do not fill.
GAPS = 1.4
EXAMPLES = (72, 150, 300, 500)      # residues, where the data are not known


def describe_memory(config: Any, data: Any) -> list[str]:
    """Lines on the memory of a rank. data: DpoData, or None."""
    at_once = config.training.batch_size
    where = "on a CPU, with weights of the published size"
    if data is None:
        sizes = [f"{as_text(PROCESS + step_bytes(config, [Size(n, n)] * at_once, 1))} for {n:,}"
                 for n in EXAMPLES]
        return [f"memory of a rank, about: {', '.join(sizes)} residues, {words_of_batch(config)}; "
                f"{where}; many structures take more"]
    items = [*data.train, *(data.val or [])]
    lengths = {structure.key: len(structure) for item in items for structure in item.structures}
    largest = sorted(map(size_of, items), reverse=True)[:at_once]
    # Pairs of one structure come together, see dpo/plan.py.
    n_structures = min(1 + len(largest) * len(lengths) / len(items), len(largest), len(lengths))
    step = step_bytes(config, largest, n_structures)
    if len(set(lengths.values())) > 1:
        step *= GAPS
    kept = min(KEPT_PER_RESIDUE * sum(lengths.values()), MOST_KEPT)
    process = PROCESS + PER_VARIANT * sum(size_of(item).variants for item in items)
    return [f"memory of a rank, about {as_text(process + kept + step)}: process and data "
            f"{as_text(process)}, {count(len(lengths), 'structure')} {as_text(kept)}, a step on "
            f"up to {largest[0].residues:,} residues, {words_of_batch(config)}, {as_text(step)}; "
            f"{where}"]


class Size(NamedTuple):
    """What the memory for a pair, or for a protein of a table, depends on."""
    residues: int           # of binding those of the partners, too
    mutated: int = 0        # residues, of a table; of binding twice
    variants: int = 0
    joint: int = 0          # residues of the complex, if it has variants of several mutations


def size_of(item):
    """The Size of a Pair or a VariantSet."""
    variants = getattr(item, "variants", [])
    mutated = {row for variant in variants for row, _ in variant}
    n_mutated = len(mutated) * (2 if len(item.structures) > 1 else 1)
    has_several = any(len(variant) > 1 for variant in variants)
    return Size(item.length, n_mutated, len(variants), len(item.complex) if has_several else 0)


def step_bytes(config, sizes, n_structures):
    """What a step adds. sizes: of the items of its largest micro-batch, the largest first, which
    are on so many structures."""
    n_orders = config.loss.n_orders
    n_residues = sum(size.residues for size in sizes) * n_orders
    if config.loss.unit == "pair":
        on_structures = sizes[0].residues * n_structures * PAIRS_STRUCTURE
        return on_structures + 2 * n_residues * PAIRS_SEQUENCE
    n_mutated = sum(size.mutated for size in sizes) * n_orders
    if n_residues >= SAVES_MEMORY_FROM:
        joint = max(size.joint for size in sizes) * TABLE_SEVERAL
        return n_residues * TABLE_TWICE + n_mutated * TABLE_TWICE_MUTATED + joint
    return n_residues * TABLE_RESIDUE + n_mutated * TABLE_MUTATED


def words_of_batch(config):
    """Text on the size of a micro-batch."""
    unit = "protein" if config.loss.unit == "table" else "pair"
    return f"{count(config.training.batch_size, unit)} at once"


def as_text(n_bytes):
    """Bytes in GB."""
    return f"{n_bytes / 1e9:.1f} GB"
