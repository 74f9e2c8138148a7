"""What training on preference pairs does for ProteinMPNN alone. sedd/preferences.py has the same
functions for SEDD; train_dpo_ddp.py calls those of the kind that model.kind names.

    problems = check(config, without_data=False)
    lines = plan_memory(config)                         # for --plan
    loaded = load(config, ddp)                          # pairs, and the model with base weights
    reference = make_reference(loaded, config, ddp)     # scores pairs by policy and reference
    batch = batch_maker(loaded.data.train, config, loaded)([3, 1, 4], epoch=0)
    validation = make_validation(loaded, reference, config, objective)
    save_model(run, log, ddp, "best_model.pt")
"""
import copy
import functools
from collections.abc import Callable
from typing import Any

from ddp_setup import note_progress, save_checkpoint
from mpnn.batches import make_batch
from mpnn.evaluation import Validation
from mpnn.model import to_checkpoint
from mpnn.reference import Reference, base_is_ca_only, load_base
from mpnn.split import load_pairs
from dpo.pair_files import try_all
from dpo.preferences import Loaded
from dpo.reference_scores import WITHOUT_REFERENCE
from training.resume import before_saving


def check(config: Any, without_data: bool) -> list[str]:
    """Texts on where base weights and pairs come from, and on decoding orders."""
    data = config.data
    base = config.model.base_model_name
    has_data = without_data or data.train_data is not None
    problems = check_scores(config.loss)
    if base != "random" and config.model.random != type(config.model.random)():
        problems.append(f"model.random gives sizes, but model.base_model_name is {base}, a file "
                        "with its own sizes; expected no model.random in the config, or "
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


def plan_memory(config: Any) -> list[str]:
    """Lines of --plan on the memory of a rank: none, as that of ProteinMPNN hardly matters."""
    return []


def load(config: Any, ddp: Any) -> Loaded:
    """Pairs and base weights. Raises: ValueError with the problems of both."""
    seed = config.training.seed
    data, (model, base) = try_all(        # their problems in one message
        lambda: load_pairs(config.data, seed, lambda: note_progress(ddp), base_is_ca_only(config)),
        lambda: load_base(config))
    return Loaded(data, model, base)


def options_anew(folder: Any) -> str:
    """Options that start a new run from the best weights of the run in a folder."""
    return f"--base_model_name best_model --base_model_dir {folder}"


def make_reference(loaded: Loaded, config: Any, ddp: Any) -> Reference:
    """The Reference, of a copy of the base weights."""
    return Reference(copy.deepcopy(loaded.model), loaded.data.train, config, ddp)


def batch_maker(pairs: list, config: Any, loaded: Loaded) -> Callable:
    """Function (indices, epoch) -> batch of make_batch."""
    return functools.partial(make_batch, pairs, loss=config.loss, seed=config.training.seed)


def make_validation(loaded: Loaded, reference: Reference, config: Any,
                    objective: Callable) -> Validation:
    """See Validation."""
    return Validation(loaded.data.val, reference, config, objective)


def save_model(run, log, ddp, name):
    """Write the weights in the published format, which other ProteinMPNN tools read."""
    before_saving(run, log, ddp)
    step = run.progress["step"]
    save_checkpoint(str(run.work_dir / name), ddp, resumes=False,
                    **to_checkpoint(run.bare, epoch=step // run.steps_per_epoch, step=step))


def describe(run: Any) -> tuple[str, str, str]:
    """Texts: name of the model, more on it, how log-likelihoods are computed."""
    loss = run.config.loss
    name = "CA-only ProteinMPNN" if run.bare.ca_only else "ProteinMPNN"
    scoring = f"temperature {loss.temperature:g}, {loss.order} order x {loss.n_orders}"
    if loss.reference == "unfolded":
        scoring += ", reference: residues alone"
    return name, f"{run.bare.num_edges} neighbours", scoring
