"""SEDD in training on preference pairs: its Kind and its Scorer (see dpo/scorer.py).

Log-likelihoods are estimates of bounds, see sedd/bounds.py; the noise of a pair is the same for
policy and base.
"""
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpo.pair_files import PairsOfRun
from dpo.scorer import Base, Kind, Likelihoods, Scorer
from proteins.letters import X_ID
from sedd.batches import to_device
from sedd.bounds import PairBounds, margin_variance
from sedd.designs import Designs
from sedd.model import describe_memory
from sedd.pairs import load_pairs
from sedd.weights import load_sedd
from training.optimizer import state_bytes

PER_RESIDUE = ("ipo_norm", "sigmoid_norm", "simpo")   # losses of means over residues
TABLE_VERSION = 1       # see Scorer.table_settings


class SeddKind(Kind):
    """SEDD before its weights are there."""

    def check(self, config: Any, without_data: bool) -> list[str]:
        """Texts on where base weights and pairs come from."""
        problems = []
        if config.model.base is None and not without_data:
            problems.append("model.base is not given; expected weights of SEDD (--base): a "
                            "checkpoint or run folder of train_sedd_ddp.py, an export, or a "
                            "published file")
        if config.data.train_data is None and not without_data:
            problems.append("data.train_data is not given; expected a file of preference pairs "
                            "(--train_data): preferred_seq and unpreferred_seq, as JSON or as a "
                            "table")
        return problems

    def plan_memory(self, config: Any) -> list[str]:
        if config.model.base is None:
            return ["memory of a rank: not known without --base"]
        try:
            sedd = read_base(config.model.base)
        except (ValueError, OSError) as error:  # training would refuse it, but the plan is right
            return [f"memory of a rank: not known: {error}"]
        sequences = config.training.batch_size * config.estimator.samples * 2
        length = longest_of(sedd.max_length, config)
        in_float32 = config.memory.mixed_precision in (False, "float32")
        return [f"a micro-batch: up to {sequences:,} sequences for the network, of up to "
                f"{length:,} residues",
                *describe_memory(sedd.model, sequences * length, in_float32,
                                 state_bytes(sedd.model, config.optim.name), "base weights")]

    def load_base(self, config: Any) -> Base:
        sedd = read_base(config.model.base)
        check_entropy(config.loss.diversity_lambda, sedd)
        name, *assumed = sedd.notes
        return Base(sedd.model, name, settings_text(sedd), notes=tuple(assumed), more=sedd)

    def load_pairs(self, config: Any, base: Base | None, alive: Callable) -> PairsOfRun:
        max_length = None
        if base is not None:
            max_length = base.more.max_length
        longest = longest_of(max_length, config)
        data = load_pairs(config.data, config.training.seed, longest, alive)
        check_equal_lengths([*data.train, *(data.val or [])], config.loss.name)
        return data

    def scorer(self, base: Base, pairs: list, config: Any, ddp: Any) -> "SeddScorer":
        return SeddScorer(base, pairs, config, ddp)

    def options_anew(self, folder: Path | str) -> str:
        return f"--base {folder}/best_model.pt"


def longest_of(max_length: int | None, config: Any) -> int | None:
    """The most residues that a sequence of a pair may have. max_length: of the base, or None: it is
    not known."""
    limits = [limit for limit in (max_length, config.data.max_length) if limit is not None]
    return min(limits, default=None)


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


# ---------------------------------------------------------------- scores
class SeddScorer(Scorer):
    """Scores pairs by SEDD. An output is log scores (R, L, V) at the noised inputs of a batch."""
    is_noisy = True

    def __init__(self, base: Base, pairs: list, config: Any, ddp: Any):
        super().__init__(base, pairs, config, ddp)
        self.sedd = base.more._replace(model=base.model)
        self.bounds = PairBounds(self.sedd.graph, self.sedd.noise, self.sedd.letters,
                                 config.estimator.samples, config.estimator.share)
        self.shape = (self.bounds.samples, 2)
        self.is_fixed = config.estimator.fixed

    def batch_maker(self, pairs: list) -> Callable:
        return functools.partial(make_batch, pairs, self.bounds, seed=self.config.training.seed,
                                 fixed=self.config.estimator.fixed)

    def prepare(self, batch: dict) -> dict:
        return to_device(batch, self.ddp.device, next(self.base.model.parameters()).dtype)

    def run(self, model: torch.nn.Module, batch: dict) -> torch.Tensor:
        mask = None if batch["full"] else batch["mask"]
        wanted = self.sedd.graph.wanted(batch["xt"])
        return model(batch["xt"], batch["sigma"], mask, wanted)

    def likelihoods(self, output: torch.Tensor, batch: dict) -> Likelihoods:
        return Likelihoods(self.bounds.parts(output, batch), self.bounds.entropy(output, batch))

    def margin_variance(self, likelihoods: Likelihoods, base: Likelihoods,
                        batch: dict) -> torch.Tensor:
        return margin_variance(likelihoods.parts - base.parts, batch["n_first"])

    def table_settings(self) -> tuple:
        estimator = self.config.estimator
        training = self.config.training
        return (TABLE_VERSION, training.seed, estimator.samples, estimator.share,
                training.batch_size)

    def file_content(self, model: torch.nn.Module, epoch: int, step: int) -> dict:
        """As sample_sedd.py and load_sedd read it."""
        sedd = self.sedd
        config = {**sedd.config, "data": {"max_length": sedd.max_length}}
        lengths = None if sedd.lengths is None else sedd.lengths.tolist()
        return {"model": model.state_dict(), "config": config, "letters": sedd.letters.tolist(),
                "lengths": lengths, "step": step,
                "notes": ["fine-tuned on preference pairs by train_dpo_ddp.py"]}

    def describe(self) -> tuple[str, str, str]:
        config = self.sedd.config
        estimator = self.config.estimator
        noise = "the same in all epochs" if estimator.fixed else "new in each epoch"
        shared = "shared" if estimator.share else "not shared"
        return ("SEDD", f"{config['graph']['type']} graph, {config['noise']['type']} noise",
                f"bounds of {estimator.samples} noise levels, {noise}, {shared} by chosen and "
                "rejected")

    def designs(self, pairs: list) -> Designs:
        return Designs(pairs, self.sedd, self.config)


# ---------------------------------------------------------------- batches
def make_batch(pairs: list, bounds: PairBounds,  # noqa: PLR0913  (two are of the caller's call)
               indices: list[int], seed: int, epoch: int | None = None,
               fixed: bool = False) -> dict[str, Any]:
    """The batch of PairBounds for P pairs, and
        n_scored (P,): residues of the chosen sequence, without X.
        pair_numbers (P,) int64: the indices. pair_weight (P,) float32.
    epoch: None, or fixed: the noise is the same in all epochs."""
    batch = bounds.batch(pairs, indices, seed, None if fixed else epoch)
    counts = [int((pairs[i].chosen != X_ID).sum()) for i in indices]
    batch["n_scored"] = torch.tensor(counts, dtype=torch.float32)
    batch["pair_numbers"] = torch.as_tensor(indices)
    batch["pair_weight"] = torch.tensor([pairs[i].weight for i in indices], dtype=torch.float32)
    return batch
