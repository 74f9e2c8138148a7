"""SEDD before its weights are there: its Kind in training on preferences (dpo/scorer.py)."""
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpo.pair_files import PairsOfRun
from dpo.scorer import Base, Kind, Scorer
from dpo.tables import load_tables
from proteins.mutations import name_of, place_named, refuse_long
from proteins.structures import Complex
from sedd.dpo import SeddScorer
from sedd.model import describe_memory
from sedd.pairs import load_pairs
from sedd.tables import AT_ONCE, TableScorer
from sedd.variants import mask_of
from sedd.weights import load_sedd
from training.optimizer import state_bytes

PER_RESIDUE = ("ipo_norm", "sigmoid_norm", "simpo")   # losses of means over residues


class SeddKind(Kind):
    """SEDD before its weights are there."""

    def check(self, config: Any, without_data: bool) -> list[str]:
        """Texts on where base weights and pairs come from, and on keys that loss.unit does not
        use."""
        problems = []
        of_table = config.loss.unit == "table"
        if config.model.base is None and not without_data:
            problems.append("model.base is not given; expected weights of SEDD (--base): a "
                            "checkpoint or run folder of train_sedd_ddp.py, an export, or a "
                            "published file")
        if config.data.train_data is None and not without_data and not of_table:
            problems.append("data.train_data is not given; expected a file of preference pairs "
                            "(--train_data): preferred_seq and unpreferred_seq, as JSON or as a "
                            "table")
        estimator = config.estimator
        defaults = type(estimator)()
        of_other_unit = ("samples", "share") if of_table else ("masked",)
        for name in of_other_unit:
            value = getattr(estimator, name)
            if value != getattr(defaults, name):
                problems.append(f"estimator.{name} is {value}, which loss.unit {config.loss.unit} "
                                "does not use; expected it left out")
        return problems

    def plan_memory(self, config: Any) -> list[str]:
        if config.model.base is None:
            return ["memory of a rank: not known without --base"]
        try:
            sedd = read_base(config.model.base)
        except (ValueError, OSError) as error:  # training would refuse it, but the plan is right
            return [f"memory of a rank: not known: {error}"]
        length = longest_of(sedd.max_length, config)
        batch_size = config.training.batch_size
        if config.loss.unit == "table":
            at_once = max(AT_ONCE, length)
            positions = batch_size * at_once
            line = (f"a micro-batch: up to {batch_size:,} proteins of up to {length:,} residues, "
                    f"of each up to {at_once:,} positions of rows with masks at a time")
        else:
            sequences = batch_size * config.estimator.samples * 2
            positions = sequences * length
            line = (f"a micro-batch: up to {sequences:,} sequences for the network, of up to "
                    f"{length:,} residues")
        in_float32 = config.memory.mixed_precision in (False, "float32")
        return [line, *describe_memory(sedd.model, positions, in_float32,
                                       state_bytes(sedd.model, config.optim.name), "base weights")]

    def load_base(self, config: Any) -> Base:
        sedd = read_base(config.model.base)
        check_entropy(config.loss.diversity_lambda, sedd)
        if config.loss.unit == "table":
            mask_of(sedd)       # raises ValueError for a model that has none
        name, *assumed = sedd.notes
        return Base(sedd.model, name, settings_text(sedd), notes=tuple(assumed), more=sedd)

    def load_pairs(self, config: Any, base: Base | None, alive: Callable) -> PairsOfRun:
        max_length = None
        if base is not None:
            max_length = base.more.max_length
        if config.loss.unit == "table":
            return load_tables(config, lambda table: place_chains(table, max_length), alive)
        longest = longest_of(max_length, config)
        data = load_pairs(config.data, config.training.seed, longest, alive)
        check_equal_lengths([*data.train, *(data.val or [])], config.loss.name)
        return data

    def scorer(self, base: Base, pairs: list, config: Any, ddp: Any) -> Scorer:
        if config.loss.unit == "table":
            return TableScorer(base, pairs, config, ddp)
        return SeddScorer(base, pairs, config, ddp)

    def options_anew(self, folder: Path | str) -> str:
        return f"--base {folder}/best_model.pt"


def longest_of(max_length: int | None, config: Any) -> int | None:
    """The most residues that a sequence of a pair may have. max_length: of the base, or None: it is
    not known."""
    limits = [limit for limit in (max_length, config.data.max_length) if limit is not None]
    return min(limits, default=None)


def place_chains(table, longest):
    """place_named of a table, of structures the mutated chains alone; longer ones are skipped.

    longest: residues of a protein, or None: any number. Raises: ValueError, also if all are longer.
    """
    # Letters alone matter: a residue that has a CA atom is there.
    proteins, skipped = place_named(table, ca_only=True)
    kept = []
    for protein in proteins:
        n = len(protein.sequence)
        if longest is None or n <= longest:
            kept.append(protein._replace(complex=Complex(protein.structure, [protein.chain])))
        else:
            reason = (f"{protein.name} has {n:,} residues; the model was trained on at most "
                      f"{longest:,}")
            skipped.variants.extend(f"{name_of(variant)}: {reason}" for variant in protein.variants)
    if not kept:
        refuse_long(table.path, proteins, longest)
    return kept, skipped


def read_base(path):
    """The Sedd of a file. Raises: ValueError or OSError."""
    try:
        return load_sedd(path)
    except ValueError as error:
        raise ValueError(f"base weights: {error}") from None


def settings_text(sedd):
    """Text of what decides the scores of a Sedd beside its weights: some settings change what equal
    weights mean, some the noise, and the letters are those of the control variate."""
    return json.dumps([sedd.config, sedd.letters.tolist()], sort_keys=True, default=str)


def check_equal_lengths(pairs, name):
    """ValueError for a loss of means over residues, if the sequences of a pair have two lengths."""
    unequal = sum(len(pair.chosen) != len(pair.rejected) for pair in pairs)
    if name in PER_RESIDUE and unequal:
        raise ValueError(f"loss.name is {name}, a loss of means over the residues of a pair, and "
                         f"{unequal:,} of {len(pairs):,} pairs have sequences of two lengths; "
                         "expected another loss, such as sigmoid, or equal lengths.")


def check_entropy(factor, sedd):
    """ValueError for a term of the entropy of hidden residues, if the base's graph hides none."""
    if factor and not sedd.graph.absorb:
        raise ValueError(f"loss.diversity_lambda is {factor:g}, but the base is of the "
                         f"{sedd.config['graph']['type']} graph, which hides no residues, and the "
                         "term is the entropy of hidden ones; expected 0, or a base of the graph "
                         "absorb.")
