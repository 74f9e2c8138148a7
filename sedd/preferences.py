"""What training on preference pairs does for SEDD alone. mpnn/preferences.py has the same functions
for ProteinMPNN, and shows how they are called.

Log-likelihoods are estimates of bounds, see sedd/bounds.py; the noise of a pair is the same for
policy and reference.
"""
import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_setup import Ddp, all_sum, note_progress, save_checkpoint
from sedd.batches import to_device
from sedd.bounds import PairBounds, margin_variance
from sedd.designs import Designs
from sedd.model import describe_memory
from sedd.pairs import load_pairs
from proteins.letters import X_ID
from sedd.weights import Sedd, load_sedd
from training.log import show_progress
from training.loop import eval_mode
from training.optimizer import state_bytes
from dpo.pair_plan import eval_batches
from dpo.preferences import SUMS, Likelihoods, Loaded, PairValidation, metrics_of, pack, unpack_sums
from dpo.reference_scores import WITHOUT_REFERENCE, kept_scores
from training.resume import before_saving

PER_RESIDUE = ("ipo_norm", "sigmoid_norm", "simpo")   # losses of means over residues
CACHE_FORMAT = 1    # version of the files of scores; part of the hash that names them


def check(config: Any, without_data: bool) -> list[str]:
    """Texts on where base weights and pairs come from."""
    problems = []
    if config.model.base is None and not without_data:
        problems.append("model.base is not given; expected weights of SEDD (--base): a checkpoint "
                        "or run folder of train_sedd_ddp.py, an export, or a published file")
    if config.data.train_data is None and not without_data:
        problems.append("data.train_data is not given; expected a file of preference pairs "
                        "(--train_data): preferred_seq and unpreferred_seq, as JSON or as a table")
    return problems


def plan_memory(config: Any) -> list[str]:
    """Lines of --plan on the memory of a rank."""
    if config.model.base is None:
        return ["memory of a rank: not known without --base"]
    try:
        sedd = read_base(config.model.base)
    except (ValueError, OSError) as error:      # training would refuse it, but the plan is right
        return [f"memory of a rank: not known: {error}"]
    sequences = config.training.batch_size * config.estimator.samples * 2
    length = longest_of(sedd, config)
    in_float32 = config.memory.mixed_precision in (False, "float32")
    return [f"a micro-batch: up to {sequences:,} sequences for the network, of up to {length:,} "
            "residues",
            *describe_memory(sedd.model, sequences * length, in_float32,
                             state_bytes(sedd.model, config.optim.name), "base weights")]


def load(config: Any, ddp: Ddp) -> Loaded:
    """Pairs and base weights; `more` is a Sedd. Raises: ValueError with the problems of both."""
    sedd = read_base(config.model.base)
    data = load_pairs(config.data, config.training.seed, longest_of(sedd, config),
                      lambda: note_progress(ddp))
    check_lengths([*data.train, *(data.val or [])], config.loss.name)
    check_entropy(config.loss.diversity_lambda, sedd)
    name, *assumed = sedd.notes
    data = data._replace(description=[*(f"  {note}" for note in assumed), *data.description])
    return Loaded(data, sedd.model, name, sedd, settings_of(sedd))


def options_anew(folder: Any) -> str:
    """Options that start a new run from the best weights of the run in a folder."""
    return f"--base {folder}/best_model.pt"


def longest_of(sedd, config):
    """The most residues that a sequence of a pair may have."""
    return min(sedd.max_length, config.data.max_length or sedd.max_length)


def read_base(path):
    """The Sedd of a file. Raises: ValueError or OSError."""
    try:
        return load_sedd(path)
    except ValueError as error:
        raise ValueError(f"base weights: {error}") from None


def settings_of(sedd):
    """Text of what decides the scores of a Sedd beside its weights: some settings change what equal
    weights mean, some the noise, and the letters are those of the control variate."""
    return json.dumps([sedd.config, sedd.letters.tolist()], sort_keys=True, default=str)


def check_lengths(pairs, name):
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


def make_reference(loaded: Loaded, config: Any, ddp: Ddp) -> "Reference":
    """The Reference, of a copy of the base weights."""
    sedd = loaded.more._replace(model=copy.deepcopy(loaded.model))
    return Reference(sedd, loaded.data.train, config, ddp)


def batch_maker(pairs: list, config: Any, loaded: Loaded) -> Callable:
    """Function (indices, epoch) -> batch of make_batch."""
    return functools.partial(make_batch, pairs, bounds_of(loaded.more, config),
                             seed=config.training.seed, fixed=config.estimator.fixed)


def make_validation(loaded: Loaded, reference: "Reference", config: Any,
                    objective: Callable) -> "Validation":
    """See Validation."""
    return Validation(loaded.data.val, reference, config, objective)


def save_model(run: Any, log: Any, ddp: Ddp, name: str) -> None:
    """Write the weights as sample_sedd.py and load_sedd read them."""
    before_saving(run, log, ddp)
    sedd = run.reference.sedd
    config = {**sedd.config, "data": {"max_length": sedd.max_length}}
    lengths = None if sedd.lengths is None else sedd.lengths.tolist()
    save_checkpoint(str(run.work_dir / name), ddp, resumes=False, model=run.bare.state_dict(),
                    config=config, letters=sedd.letters.tolist(), lengths=lengths,
                    step=run.progress["step"],
                    notes=["fine-tuned on preference pairs by train_dpo_ddp.py"])


def describe(run: Any) -> tuple[str, str, str]:
    """Texts: name of the model, more on it, how log-likelihoods are computed."""
    sedd = run.reference.sedd
    estimator = run.config.estimator
    noise = "the same in all epochs" if estimator.fixed else "new in each epoch"
    shared = "shared" if estimator.share else "not shared"
    return ("SEDD", f"{sedd.config['graph']['type']} graph, {sedd.config['noise']['type']} noise",
            f"bounds of {estimator.samples} noise levels, {noise}, {shared} by chosen and rejected")


# ---------------------------------------------------------------- batches
def bounds_of(sedd: Sedd, config: Any) -> PairBounds:
    """The estimator of log-likelihoods that a config asks for."""
    return PairBounds(sedd.graph, sedd.noise, sedd.letters, config.estimator.samples,
                      config.estimator.share)


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


# ---------------------------------------------------------------- the reference
class Reference:
    """The base model on the device.

    needed: whether the loss has a reference. is_start: whether this is what the policy starts from.
    is_fixed: whether its scores are the same in all
    epochs. table: these of all training pairs, (n, K, 2) parts of PairBounds, or None."""

    def __init__(self, sedd, pairs, config, ddp):
        # With requires_grad off, torch rounds differently: equal weights would score unequally.
        self.sedd = sedd
        self.config = config
        self.ddp = ddp
        self.pairs = pairs
        self.bounds = bounds_of(sedd, config)
        self.needed = config.loss.name not in WITHOUT_REFERENCE
        self.is_start = self.needed
        self.is_fixed = config.estimator.fixed
        self.table = None

    def to_device(self, batch):
        """The batch of make_batch on the device."""
        return to_device(batch, self.ddp.device, next(self.sedd.model.parameters()).dtype)

    def run_policy(self, model, batch):
        """The log scores (R, L, V) of a model at the inputs of a batch, as a tuple."""
        mask = None if batch["full"] else batch["mask"]
        wanted = self.sedd.graph.wanted(batch["xt"])
        return (model(batch["xt"], batch["sigma"], mask, wanted),)

    def likelihoods(self, log_score, batch):
        """Likelihoods of what run_policy returned."""
        scores = self.bounds.parts(log_score, batch).sum(1)
        return Likelihoods(scores, self.bounds.entropy(log_score, batch))

    @torch.no_grad()
    def parts(self, batch, table=None):
        """(P, K, 2) parts of PairBounds under the base weights; 0 if the loss has no reference."""
        if not self.needed:
            return torch.zeros_like(batch["offset"], dtype=torch.float32)
        if table is not None:
            return table[batch["pair_numbers"]]
        return self.bounds.parts(*self.run_policy(self.sedd.model, batch), batch)

    def scores(self, batch, table=None):
        """(P, 2) log-likelihoods of chosen and rejected under the base weights."""
        return self.parts(batch, table).sum(1)

    def run_model(self, model, pairs, indices):
        """(batch on the device, log scores) of pairs, by noise that is the same in all epochs."""
        batch = make_batch(pairs, self.bounds, indices.tolist(), self.config.training.seed)
        batch = self.to_device(batch)
        return batch, *self.run_policy(model, batch)

    def precompute(self, pairs, base_hash, folder, what):
        """Parts (n, K, 2) of all pairs, by noise that is the same in all epochs, from a file in
        `folder`, or else computed and written there. base_hash: of the base's weights and settings.
        what: of which pairs, for the progress bar.

        Returns: (parts, text that says where they come from)."""
        def compute():
            return self.compute_parts(pairs, what)

        estimator = self.config.estimator
        content = (CACHE_FORMAT, base_hash,
                   self.config.training.seed, estimator.samples, estimator.share,
                   self.config.training.batch_size, self.ddp.device.type,
                   torch.__version__,   # other versions round differently: no log 2 at step 0
                   [pair.key for pair in pairs])
        name = hashlib.blake2b(repr(content).encode(), digest_size=12).hexdigest() + ".pt"
        return kept_scores(Path(folder) / name, (len(pairs), estimator.samples, 2), compute,
                           self.ddp)

    @torch.no_grad()
    def compute_parts(self, pairs, what):
        """(n, K, 2) float32, equal for any number of ranks: batches do not depend on the ranks that
        compute them, and are those of validation."""
        parts = torch.zeros(len(pairs), self.bounds.samples, 2, dtype=torch.float64)
        mine = eval_batches(pairs, self.config.training.batch_size)[
            self.ddp.rank::self.ddp.world_size]
        for indices in show_progress(mine, self.ddp, f"reference, {what}"):
            batch, log_score = self.run_model(self.sedd.model, pairs, indices)
            parts[indices] = self.bounds.parts(log_score, batch).double().cpu()
            note_progress(self.ddp)
        return all_sum(parts, self.ddp).float()


# ---------------------------------------------------------------- validation
class Validation(PairValidation):
    """Metrics of the validation pairs, in float32, by the same noise at each call: means by the
    weights of the pairs. Each pair is computed on one rank, so the number of ranks does not matter.

    val/margin_noise: standard deviation, in nats, that the noise gives to the log-ratio of policy
    to reference of chosen over rejected, of a typical pair.
    table: reference parts of the pairs, (n, K, 2), or None.
    """

    def __init__(self, *arguments):
        """arguments: of PairValidation."""
        super().__init__(*arguments)
        if self.config.monitoring.n_designs:
            self.designs = Designs(self.pairs, self.reference.sedd, self.config)

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, ddp: Ddp) -> dict:
        """Metrics by name. model: without DDP; set to eval mode and back."""
        packed = torch.zeros(len(self.pairs), len(SUMS) + 1, dtype=torch.float64)
        with eval_mode(model):
            mine = self.batches[ddp.rank::ddp.world_size]
            for indices in show_progress(mine, ddp, "validation pairs"):
                packed[indices] = self.metrics_of_batch(model, indices)
                note_progress(ddp)
        sums = (self.weights[:, None] * all_sum(packed, ddp)).sum(0)
        values = metrics_of(sums[:-1], self.weights.sum(), "val/")
        named = unpack_sums(sums)
        values["val/logps/chosen_per_residue"] = float(named["logps/chosen"] / named["residues"])
        values["val/margin_noise"] = float((sums[-1] / self.weights.sum()).sqrt())
        return values

    def metrics_of_batch(self, model, indices):
        """(P, SUMS and the variance of the margin) float64 on the CPU."""
        reference = self.reference
        batch, log_score = reference.run_model(model, self.pairs, indices)
        base = reference.parts(batch, self.table)
        likelihoods = reference.likelihoods(log_score, batch)
        _, metrics = self.objective(likelihoods, batch, base.sum(1), self.config.loss)
        parts = reference.bounds.parts(log_score, batch) - base
        variance = margin_variance(parts, batch["n_first"])
        return torch.cat([pack(metrics), variance.double()[:, None]], 1).cpu()
