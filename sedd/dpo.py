"""SEDD in training on preference pairs: its Scorer (see dpo/scorer.py).

Log-likelihoods are estimates of bounds, see sedd/bounds.py; the noise of a pair is the same for
policy and base.
"""
import functools
from collections.abc import Callable
from typing import Any

import torch

from dpo.scorer import Base, Likelihoods, Scorer
from proteins.letters import X_ID
from sedd.batches import to_device
from sedd.bounds import PairBounds, margin_variance
from sedd.designs import Designs

TABLE_VERSION = 1       # see Scorer.table_settings


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
        return fine_tuned(self.sedd, model, step)

    def describe(self) -> tuple[str, str, str]:
        estimator = self.config.estimator
        noise = "the same in all epochs" if estimator.fixed else "new in each epoch"
        shared = "shared" if estimator.share else "not shared"
        return ("SEDD", describe_model(self.sedd),
                f"bounds of {estimator.samples} noise levels, {noise}, {shared} by chosen and "
                "rejected")

    def designs(self, pairs: list) -> Designs:
        ordered = sorted(pairs, key=lambda pair: pair.key)
        return Designs([len(pair.chosen) for pair in ordered], self.sedd, self.config)


# ---------------------------------------------------------------- files, texts
def fine_tuned(sedd: Any, model: torch.nn.Module, step: int) -> dict:
    """The content of a file of fine-tuned weights, as sample_sedd.py and load_sedd read it.

    sedd: of the base, a Sedd. model: with the weights."""
    config = {**sedd.config, "data": {"max_length": sedd.max_length}}
    lengths = None if sedd.lengths is None else sedd.lengths.tolist()
    return {"model": model.state_dict(), "config": config, "letters": sedd.letters.tolist(),
            "lengths": lengths, "step": step,
            "notes": ["fine-tuned on preference pairs by train_dpo_ddp.py"]}


def describe_model(sedd: Any) -> str:
    """A text on the graph and the noise of a Sedd."""
    return f"{sedd.config['graph']['type']} graph, {sedd.config['noise']['type']} noise"


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
