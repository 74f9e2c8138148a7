"""Start a run, or continue one: find the checkpoint, refuse one that does not fit, load it; save.

A script's `prepare` takes these steps, and builds its Run itself:

    former = start_or_continue(config, ddp, work_dir, resume, fresh, SeddCheckpoint)
    check_checkpoint(former, config, anew)   # ValueError: what is wrong
    check_data(former, "proteins", fingerprint, anew)
    micro_batches = count_micro_batches(former, config, ddp)
    lr, warmup = rate_of(former, config.optim, lr_batch)
    progress = progress_of(former, seen, initial)
    load_weights(former, model)
    run = SeddRun(lr=lr, warmup=warmup, progress=progress, ...)
    load_optimizer(run, former)
    check_progress(run)
    ...
    save_run(run, log, ddp, "last.pt", keep_last=2)

A run folder holds its checkpoints in checkpoints/: last.pt, the former ones last-1.pt and so on,
and those of the best weights. A start never writes before all checks have passed.
"""
import contextlib
import hashlib
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_setup import broadcast, load_checkpoint, save_checkpoint
from training.config import (MOST_STEPS, config_differences, config_items, config_to_dict, key,
                             keys_that, read_fields)
from training.folder import MARKS, names_in, refuse_in_use
from training.log import rows_up_to
from training.loop import (ADVICE, Diverged, check_alike, check_ranks, is_finished,
                           micro_batches_of, scale_for_batch)


# ---------------------------------------------------------------- what to continue from
@dataclass
class Fingerprint:
    """Of the data of a run."""
    n: int = key(least=0)
    hash: str = key()


@dataclass(kw_only=True)
class Checkpoint:
    """What every checkpoint to continue from holds; those of a script have more. Fields with a
    default are of a later version than the first checkpoints."""
    model: dict[str, torch.Tensor]
    optimizer: dict
    scaler: dict
    config: dict
    data: Fingerprint
    step: int = key(least=0, most=MOST_STEPS)
    best: dict | None
    bad_steps: list[int] = key(least=0)     # in all, and in a row
    bad_evals: int = key(0, least=0)
    finished: str = ""
    seen: dict[str, int] = field(default_factory=dict)
    micro_batches: int = key(least=1)       # per global batch
    lr: float
    warmup: int


class Former(NamedTuple):
    """The checkpoint that a start continues from."""
    path: str | None          # None: a new run
    state: dict | None        # its content, see Checkpoint


def start_or_continue(  # noqa: PLR0913  (what a command line says of a start)
        config, ddp, work_dir, resume, fresh, content) -> Former:
    """Decide on rank 0 what to continue from; all ranks read the same checkpoint.

    Args:
        work_dir: Path of the run folder. resume, fresh: see find_checkpoint.
        content: the script's class of Checkpoint.
    Raises: ValueError on every rank, also for a config that is not the same on all."""
    if fresh and resume:
        raise ValueError("--fresh and --resume exclude each other: start over, or continue.")
    if fresh and work_dir.name in ("", ".."):
        raise ValueError(f"--fresh renames the run folder, and --work_dir {work_dir} names none. "
                         "Give its name, from another folder.")
    if resume and Path(resume).is_dir():
        folder = "" if Path(resume).name == "checkpoints" else "checkpoints"
        raise ValueError(f"--resume {resume} is a folder; expected a checkpoint, such as "
                         f"{Path(resume) / folder / 'last.pt'}.")
    check_alike(config_items(config, keys_that(type(config), "per_host")), ddp)
    path = None
    if ddp.is_main:
        path = find_checkpoint(work_dir, resume, fresh)
    path = broadcast(path, ddp)
    if path is None:
        return Former(None, None)
    state = load_checkpoint(path, ddp)
    path = ddp.state.checkpoint   # last-1.pt, where last.pt is damaged
    try:
        read_fields(content, state, path)
    except ValueError as error:
        raise ValueError(f"{error} It is no checkpoint of this training script: give one "
                         "(--resume), another --work_dir, or --fresh to start over.") from None
    return Former(path, state)


def find_checkpoint(run_dir, resume, fresh) -> str | None:
    """Find the checkpoint that a start continues from. Writes nothing.

    Args:
        run_dir: Path of the run folder; it need not exist.
        resume: path of a checkpoint that the user names, or None.
        fresh: whether the user wants to start over.
    Returns: path of the checkpoint as text, or None for a new run.
    Raises: ValueError for a folder that is in use, cannot be written, holds another run, or is no
        run folder."""
    refuse_in_use(run_dir)
    if (run_dir / "STOP").exists() and not fresh:
        raise ValueError(f"{run_dir / 'STOP'} exists: this run was asked to stop. Remove the file "
                         "to continue it.")
    last = run_dir / "checkpoints" / "last.pt"
    # If only last-1.pt exists, the run was killed between two renames of save_checkpoint. A link
    # that leads nowhere is a checkpoint too: one that cannot be read, not the sign of a new run.
    saved = os.path.lexists(last) or os.path.lexists(last.with_name("last-1.pt"))
    if resume and saved and last.parent.resolve() != Path(os.path.realpath(resume)).parent:
        raise ValueError(f"{run_dir} holds a run already, and --resume {resume} is of another. "
                         "Expected a checkpoint of the same run. Give another --work_dir; or "
                         "leave --resume out to continue this run.")
    names = names_in(run_dir)
    if names and not MARKS & set(names):
        raise ValueError(f"{run_dir} is not a run directory: it holds {', '.join(names[:5])}. "
                         "Expected an empty or new folder, or that of a run. Give another "
                         "--work_dir.")
    if (run_dir / "metrics.jsonl").exists() and not fresh:
        rows_up_to(run_dir / "metrics.jsonl", 0)   # refuses a file with broken rows
    if resume:
        return str(resume)
    return str(last) if saved and not fresh else None


def check_checkpoint(former, config, anew, ignored=()) -> None:
    """Refuse a checkpoint that does not fit the config, or holds nan or infinity.

    Args:
        former: a Former. Without a state, nothing is checked.
        config: the config now; keys that may_change may differ from the checkpoint's config.
        anew: options that start a new run from this run's weights, for messages.
        ignored: more keys that may differ.
    Raises: ValueError."""
    path, state = former
    if state is None:
        return
    with using_checkpoint(path):
        differences = config_differences(
            state["config"], config, (*keys_that(type(config), "may_change"), *ignored))
        if differences:
            lines = "\n    ".join(differences)
            same_model = not any(line.startswith(("model.", "graph.")) for line in differences)
            raise ValueError(f"{path} was trained with another config:\n    {lines}\n  Expected "
                             "the same. Give another --work_dir, or --fresh to start over."
                             f"{further_training(anew) if same_model else ''} (Keys that may "
                             "differ are marked * in --help.)")
        check_weights(path, state["model"])


def check_weights(path, weights) -> None:
    """Refuse weights with nan or infinity. Their shapes are compared when a model loads them.

    weights: {name: tensor}, of the checkpoint at `path`. Raises: ValueError."""
    spoilt = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if spoilt:
        raise ValueError(f"{path}: {len(spoilt)} tensors of the model hold nan or infinite "
                         f"numbers, first {spoilt[0]}; expected finite weights. Give an older "
                         "checkpoint (--resume), or --fresh to start over.")


def check_data(former, things, fingerprint, anew) -> None:
    """Refuse a checkpoint that was trained on other data.

    former, anew: see check_checkpoint. things: a word for messages, such as proteins. fingerprint:
    of the data now, {"n", "hash"}. Raises: ValueError."""
    path, state = former
    if state is None or state["data"] == fingerprint:
        return
    with using_checkpoint(path):
        raise ValueError(f"{path} was trained on other {things}, or in another order "
                         f"({state['data']['n']:,}, hash {state['data']['hash']}; now "
                         f"{fingerprint['n']:,}, {fingerprint['hash']}). Give the same data, "
                         f"another --work_dir, or --fresh.{further_training(anew)}")


def further_training(anew) -> str:
    """A sentence to append to an error. anew: see check_checkpoint."""
    return f" To train its weights further, as a new run: {anew} --work_dir NEW."


def count_micro_batches(former, config, ddp) -> int:
    """Number of micro-batches in a global batch, which is fixed at the start of a run.

    Raises: ValueError for more ranks than that, or a config that asks for another number than the
        checkpoint has."""
    path, state = former
    asked = config.training.micro_batches
    if state is None:
        micro_batches = micro_batches_of(config.training, ddp.world_size)
        source = f"training.micro_batches is {asked}"
        advice = ", or a larger training.micro_batches"
    else:
        micro_batches = state["micro_batches"]
        source = f"{path} has {micro_batches} micro-batches per step"
        advice = ", or begin a new run (another --work_dir, or --fresh)"
    if asked not in (None, micro_batches):
        raise ValueError(f"{source}, and training.micro_batches is {asked}; expected the same. "
                         "Leave training.micro_batches out to continue this run.")
    with using_checkpoint(path):
        check_ranks(ddp.world_size, micro_batches, source, advice)
    return micro_batches


def hash_of(weights, settings="") -> str:
    """Hash of a state_dict, as text. settings: text of what else decides the model's results."""
    digest = hashlib.blake2b(settings.encode(), digest_size=8)
    for name, value in sorted(weights.items()):
        numbers = value.detach().cpu().float().contiguous().numpy()
        digest.update(name.encode() + numbers.tobytes())
    return digest.hexdigest()


def describe_machine(ddp) -> dict:
    """What the last bits of a result depend on, apart from the number of ranks: plain values."""
    device = ddp.device.type
    if device != "cpu":
        device = getattr(torch, device).get_device_name(ddp.device)
    return {"device": device, "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability()}


def machine_differences(state, ddp) -> str:
    """Differences from the machine that wrote the checkpoint `state`, if they may change the last
    bits of results. Text; '' if there are none."""
    now = {"world_size": ddp.world_size, "torch": str(torch.__version__), **describe_machine(ddp)}
    then = {"world_size": state.get("world_size"), "torch": state.get("versions", {}).get("torch"),
            **state.get("machine", {})}
    differences = []
    for name, value in now.items():
        if name in then and then[name] != value:
            differences.append(f"{name} {then[name]} -> {value}")
    return ", ".join(differences)


# ---------------------------------------------------------------- go on from it
def rate_of(former, optim, lr_batch) -> tuple[float, int]:
    """(full learning rate, warm-up steps) of a run: those of its checkpoint, if there is one.

    optim: the config's section. lr_batch: the global batch, or less if the data set is smaller; the
    rate is scaled to this.
    Raises: ValueError for a checkpoint with another rate than the same config, data and batch give
        now."""
    lr, warmup = scale_for_batch(optim.lr, optim.warmup, optim.scale, lr_batch,
                                 optim.base_global_batch)
    path, state = former
    if state is None:
        return lr, warmup
    with using_checkpoint(path):
        if not math.isclose(state["lr"], lr, rel_tol=1e-6) or state["warmup"] != warmup:
            raise ValueError(f"{path} has the learning rate {state['lr']:g} and "
                             f"{state['warmup']:g} steps of warm-up; expected {lr:g} and {warmup}, "
                             "which the config gives. Give an older checkpoint (--resume), or "
                             "--fresh to start over.")
        return state["lr"], state["warmup"]


def progress_of(former, seen, initial) -> dict:
    """Run.progress at the start, or as the checkpoint has it.

    seen: names of the last entries of Totals.sums; their totals over good steps are kept.
    initial: the script's additions, with initial values."""
    progress = {"step": 0, "best": None, "bad_evals": 0, "finished": "",
                "bad_steps": [0, 0],   # nan or infinite: in all, and in a row up to now
                "seen": dict.fromkeys(seen, 0),
                **initial}
    _, state = former
    if state is None:
        return progress
    progress["seen"] = {}   # older checkpoints have none: what they have seen is not known
    return {name: state.get(name, value) for name, value in progress.items()}


def load_weights(former, model) -> None:
    """Give a model, not yet wrapped in DDP, the weights of the checkpoint, if there is one."""
    path, state = former
    if state is not None:
        with using_checkpoint(path):
            model.load_state_dict(state["model"])


def load_optimizer(run, former) -> None:
    """Continue with optimizer, scaler and averages of the checkpoint, if there is one.

    Raises: ValueError."""
    path, state = former
    if state is None:
        return
    with using_checkpoint(path):
        run.optimizer.load_state_dict(state["optimizer"])
        check_state(run.optimizer)
        run.scaler.load_state_dict(state["scaler"])
        if run.ema is not None:
            run.ema.load_state_dict(state["ema"])


def check_progress(run) -> None:
    """Refuse a run that is not finished and has no step left to do; forget the best of a run that
    goes on in another folder, as the file of these weights is in the former one.

    Raises: ValueError."""
    path = run.continued_from
    if path is None:
        return
    if is_finished(run):
        if not run.progress["finished"]:   # it stopped early, and n_iters has been lowered since
            raise ValueError(f"{path} is of step {run.progress['step']:,} of a run that is not "
                             "finished, and training.n_iters or num_epochs asks for "
                             f"{run.n_iters:,} steps; expected more.")
    # Not the parents of the real path: checkpoints/ may be a link to another disk.
    elif Path(path).absolute().parent.parent.resolve() != run.work_dir.resolve():
        run.progress["best"] = None


def check_state(optimizer) -> None:
    """Raise ValueError for a tensor of the optimizer's state that has not its parameter's shape.

    torch's load_state_dict does not compare them: its next step ends with an internal error."""
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            shape = getattr(value, "shape", ())
            if len(shape) and shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(shape)} for a parameter of "
                                 f"{tuple(parameter.shape)}")


@contextlib.contextmanager
def using_checkpoint(path):
    """In this block, which uses the content of a checkpoint, an error of any kind gets one sentence
    that names the file. Raises: ValueError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError,
            RuntimeError) as error:
        if str(path) in str(error):   # a refusal, which names it already
            raise
        raise ValueError(f"{path}: its content cannot be used here ({type(error).__name__}: "
                         f"{error}); expected what this training script saves. Give an older "
                         "checkpoint (--resume), or --fresh to start over.") from None


# ---------------------------------------------------------------- saving
def save_run(run, log, ddp, name, keep_last=1, resumes=True, **more) -> None:
    """Write checkpoints/NAME: what every script needs to resume, and `more`. A collective."""
    before_saving(run, log, ddp)
    progress = run.progress
    if run.ema is not None:
        more["ema"] = run.ema.state_dict()
    save_checkpoint(str(run.work_dir / "checkpoints" / name), ddp, keep_last, resumes,
                    model=run.bare.state_dict(), optimizer=run.optimizer.state_dict(),
                    scaler=run.scaler.state_dict(), config=config_to_dict(run.config),
                    epoch=progress["step"] // run.steps_per_epoch, micro_batches=run.micro_batches,
                    lr=run.lr, warmup=run.warmup, data=run.fingerprint,
                    machine=describe_machine(ddp), **progress, **more)
    run.saved_at = time.monotonic()


def before_saving(run, log, ddp) -> None:
    """Check what must hold before weights are written: the folder is still ours and, if the last
    step was bad, the weights are finite."""
    log.sync()   # the rows up to this step must be on disk before the checkpoint is
    _, bad_in_a_row = run.progress["bad_steps"]
    if bad_in_a_row and not all(p.isfinite().all() for p in run.bare.parameters()):
        raise Diverged(f"step {run.progress['step']}: weights are nan or infinite; expected "
                       f"finite numbers. {ADVICE}")
