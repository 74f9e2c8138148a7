"""ProteinMPNN before its weights are there: its Kind in training on preferences (dpo/scorer.py)."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpo.pair_files import PairsOfRun
from dpo.reference import WITHOUT_REFERENCE
from dpo.scorer import Base, Kind, Scorer
from dpo.tables import load_tables
from mpnn.base import load_base
from mpnn.dpo import ProteinMPNNScorer
from mpnn.split import load_pairs
from mpnn.tables import TableScorer
from proteins.mutations import place_all


class ProteinMPNNKind(Kind):
    """ProteinMPNN before its weights are there."""

    def check(self, config: Any, without_data: bool) -> list[str]:
        """Texts on where base weights and pairs come from, and on decoding orders."""
        data = config.data
        base = config.model.base_model_name
        has_data = without_data or data.train_data is not None
        problems = check_scores(config.loss)
        if base != "random" and config.model.random != type(config.model.random)():
            problems.append(f"model.random gives sizes, but model.base_model_name is {base}, a "
                            "file with its own sizes; expected no model.random in the config, or "
                            "base_model_name random")
        if not has_data and base != "random":
            problems.append("data.train_data is not given; expected a file of preference pairs "
                            "(--train_data). Demo pairs are made for random weights only "
                            "(configs/dpo_demo.yaml)")
        for_files = (data.val_data, data.max_length, data.mutable_positions, data.mutable_ranges)
        if not has_data and any(for_files):
            problems.append("data.val_data, max_length, mutable_positions and mutable_ranges need "
                            "pairs from a file, but data.train_data is not given; expected "
                            "--train_data")
        if data.mutable_positions is not None and data.mutable_ranges is not None:
            problems.append("data.mutable_positions and data.mutable_ranges are given together; "
                            "expected one of them")
        return problems

    def load_base(self, config: Any) -> Base:
        return load_base(config)

    def load_pairs(self, config: Any, base: Base | None, alive: Callable) -> PairsOfRun:
        ca_only = base is not None and base.model.ca_only   # structures are read otherwise then
        if config.loss.unit == "table":
            return load_tables(config, lambda table: place_all(table, ca_only=ca_only), alive)
        return load_pairs(config.data, config.training.seed, alive, ca_only)

    def scorer(self, base: Base, pairs: list, config: Any, ddp: Any) -> Scorer:
        if config.loss.unit == "table":
            return TableScorer(base, pairs, config, ddp)
        return ProteinMPNNScorer(base, pairs, config, ddp)

    def options_anew(self, folder: Path | str) -> str:
        return f"--base_model_name {folder}/best_model.pt"


def check_scores(loss):
    """Texts on loss.order and loss.reference."""
    problems = []
    if loss.order == "arange" and loss.n_orders != 1:
        problems.append(f"loss.n_orders is {loss.n_orders}, but loss.order arange is a single "
                        "order; expected 1")
    if loss.name in WITHOUT_REFERENCE and loss.reference != type(loss).reference:
        problems.append(f"loss.reference is {loss.reference}, but loss.name {loss.name} uses no "
                        "reference; expected it left out, or another loss.name")
    return problems
