"""What a kind of model plugs into training on preferences: a Kind, which loads, and its Scorer.

    kind = KINDS[config.model.kind]         # of train_dpo_ddp.py; mpnn/kind.py, sedd/kind.py
    base, data = load(kind, config, ddp)    # base weights and pairs
    scorer = kind.scorer(base, pairs, config, ddp)
    batch = scorer.prepare(batch)                   # onto the device
    likelihoods = scorer(policy, batch)             # with gradients
    with torch.no_grad():
        likelihoods = scorer(base.model, batch)

Policy and base are two models that one Scorer scores, by the same code. A new kind of model is a
class derived from Kind and one from Scorer; what these two have to define is below.
"""
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_setup import Ddp, all_sum
from ddp_watch import note_progress
from dpo.pair_files import PairsOfRun
from dpo.pair_plan import eval_batches
from training.log import show_progress


class Base(NamedTuple):
    """The base weights of a run, from which the policy starts."""
    model: torch.nn.Module      # on the CPU, as loaded
    text: str                   # which weights, for the user
    settings: str = ""          # what decides its scores beside the weights
    is_trained: bool = True     # False: random weights, for demonstrations
    notes: tuple = ()           # lines for the user
    more: Any = None            # what else the kind of model needs


class Likelihoods(NamedTuple):
    """What the loss of P pairs is made of, under one model."""
    parts: torch.Tensor             # (P, 2) scores, or (P, K, 2), whose sums over K are the scores
    entropy: torch.Tensor | None = None     # (P,) mean of a residue, in nats
    native_kl: torch.Tensor | None = None   # (P,) for loss.native_kl

    @property
    def scores(self) -> torch.Tensor:
        """(P, 2) ln p of the chosen and the rejected sequence, summed over residues."""
        return self.parts if self.parts.dim() == 2 else self.parts.sum(1)


class Scorer:
    """Log-likelihoods of pairs under any model of one kind.

    A batch is what `batch_maker` makes, a dict of tensors with, among others, pair_numbers (P,)
    int64, pair_weight (P,) and n_scored (P,), the residues that a score is summed over.

    Args, and attributes of the same names:
        base: with its model on the device, in eval mode. pairs: all that will be scored; a batch
            has numbers, and the Scorer may need what belongs to them.
    shape: of Likelihoods.parts without P; None: no scores are kept, as items have several pairs.
    is_fixed: whether scores of training pairs under the base are the same in all epochs.
    starts_at_base: whether the reference is the base itself, so that policy and reference are equal
        before the first step. is_noisy: whether scores are estimates. is_relative: whether scores
        are ratios to the wild type's probability, so that they say nothing of likely sequences.
    """
    shape = (2,)
    is_fixed = False
    starts_at_base = True
    is_noisy = False
    is_relative = False

    def __init__(self, base: Base, pairs: list, config: Any, ddp: Ddp):
        self.base = base
        self.pairs = pairs
        self.config = config
        self.ddp = ddp

    def __call__(self, model: torch.nn.Module, batch: dict) -> Likelihoods:
        """The Likelihoods of a prepared batch, with gradients."""
        return self.likelihoods(self.run(model, batch), batch)

    # ---- what each kind of model defines ----

    def batch_maker(self, pairs: list) -> Callable:
        """Function (indices, epoch=None) -> batch of these of `pairs`, on the CPU. Without an epoch
        its random numbers are the same at each call. It holds no model, as workers call it."""
        raise NotImplementedError

    def prepare(self, batch: dict) -> dict:
        """The batch on the device, with all that the network needs."""
        raise NotImplementedError

    def run(self, model: torch.nn.Module, batch: dict) -> Any:
        """The network's output for a prepared batch, with gradients."""
        raise NotImplementedError

    def likelihoods(self, output: Any, batch: dict) -> Likelihoods:
        """Likelihoods of what `run` returned."""
        raise NotImplementedError

    def table_settings(self) -> tuple:
        """All of the config that decides scores under the base, apart from the weights; the first
        is the version of this tuple and of what the scores mean."""
        raise NotImplementedError

    def file_content(self, model: torch.nn.Module, epoch: int, step: int) -> dict:
        """What best_model.pt holds of a model, as other tools read it."""
        raise NotImplementedError

    def describe(self) -> tuple[str, str, str]:
        """Texts: name of the model, more on it, how log-likelihoods are computed."""
        raise NotImplementedError

    def designs(self, pairs: list) -> Any:
        """The PolicyDesigns (dpo/designs.py) for validation pairs."""
        raise NotImplementedError

    # ---- what a kind of model may define ----

    def module(self, model: torch.nn.Module) -> torch.nn.Module:
        """What DDP wraps: a module with the parameters of `model`, whose forward pass `run`
        calls."""
        return model

    def run_base(self, batch: dict) -> Any:
        """As `run` of the base; called without gradients. What depends on the base alone may be
        kept from call to call."""
        return self.run(self.base.model, batch)

    def base_parts(self, pairs: list, indices: list[int]) -> torch.Tensor:
        """Likelihoods.parts of pairs under the reference, for the table. As validation computes
        those of the policy: equal weights then score equally to the last bit."""
        batch = self.prepare(self.batch_maker(pairs)(indices))
        return self(self.base.model, batch).parts

    def margin_variance(self, likelihoods: Likelihoods, base: Likelihoods,
                        batch: dict) -> torch.Tensor:
        """(P,) variance that the noise of the scores gives to the log-ratio of policy to base of
        chosen over rejected. Called if is_noisy."""
        raise NotImplementedError

    def more_metrics(self, model: torch.nn.Module, pairs: list) -> dict:
        """Metrics by name, beside those of the validation pairs themselves. A collective."""
        return {}

    def variant_scores(self, model: torch.nn.Module, tables: list) -> list:
        """Of loss.unit table: (N,) scores of the variants of each table, in nats, by one order, as
        those that the loss compares. model: in eval mode. A collective."""
        raise NotImplementedError

    def drift(self, model: torch.nn.Module, tables: list) -> float | None:
        """Of loss.unit table: mean KL divergence of a model from the base per residue of native
        sequences, in nats, or None. Their designs hang on it, and no measured value tells it. A
        collective."""
        return None

    # ---- for both ----

    def rows_of(self, pairs: list, shape: tuple, compute: Callable, what: str) -> torch.Tensor:
        """(n, *shape) float64 on the CPU, equal for any number of ranks: each pair is computed on
        one rank, in a batch that does not depend on the ranks. A collective.

        compute: function (indices) -> rows of these pairs. what: for the progress bar."""
        rows = torch.zeros(len(pairs), *shape, dtype=torch.float64)
        batches = eval_batches(pairs, self.config.training.batch_size)
        mine = batches[self.ddp.rank::self.ddp.world_size]
        for indices in show_progress(mine, self.ddp, what):
            rows[indices] = compute(indices.tolist()).double().cpu()
            note_progress()
        return all_sum(rows, self.ddp)


class Kind:
    """A kind of model in training on preferences, before its weights are there."""

    def check(self, config: Any, without_data: bool) -> list[str]:
        """Texts on what the config may not say of this kind. without_data: for --plan, which needs
        neither pairs nor weights."""
        raise NotImplementedError

    def plan_memory(self, config: Any) -> list[str]:
        """Lines of --plan on the memory of a rank."""
        return []

    def load_base(self, config: Any) -> Base:
        """The base weights. Raises: ValueError or OSError."""
        raise NotImplementedError

    def load_pairs(self, config: Any, base: Base | None, alive: Callable) -> PairsOfRun:
        """The pairs to train on and to validate with. base: None if it could not be loaded. alive:
        called before each pair, to show a watchdog that reading continues.

        Raises: ValueError or OSError."""
        raise NotImplementedError

    def scorer(self, base: Base, pairs: list, config: Any, ddp: Ddp) -> Scorer:
        """The Scorer of this kind."""
        raise NotImplementedError

    def options_anew(self, folder: Path | str) -> str:
        """Options that start a new run from the best weights of the run in a folder."""
        raise NotImplementedError


def load(kind: Kind, config: Any, ddp: Ddp) -> tuple[Base, PairsOfRun]:
    """Base weights and pairs. Raises: ValueError with the problems of both."""
    problems = []
    base = None
    data = None
    try:
        base = kind.load_base(config)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    try:
        data = kind.load_pairs(config, base, note_progress)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return base, data
