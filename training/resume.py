"""Start a run, or continue one: find the checkpoint, refuse one that does not fit, load it; save.

A script's `prepare` asks one object, which is the same for a new run and a continued one:

    start = start_or_continue(config, ddp, work_dir, resume, fresh, anew)   # then: start.config
    start.check_data("proteins", fingerprint)
    lr, warmup = start.rate(lr_batch)
    progress = start.progress(SEEN, initial, n_iters)
    start.load_weights(model)
    run = SeddRun(lr=lr, warmup=warmup, progress=progress, micro_batches=start.micro_batches, ...)
    start.load_optimizer(run, ddp)
    ...
    path = save_run(run, log, ddp, "last.pt", keep_last=2)

The first call refuses a checkpoint that does not fit the config; each other call refuses one that
does not fit what it is given. A start never writes before all of them have passed (a
damaged checkpoint is renamed, see ddp_setup.newest_checkpoint).

A run folder holds its checkpoints in checkpoints/: last.pt, the former ones last-1.pt and so on,
and those of the best weights.
"""
import contextlib
import hashlib
import math
import os
import sys
import time
from pathlib import Path

import torch

from ddp_setup import broadcast, load_checkpoint, newest_checkpoint, save_checkpoint
from training.config import config_differences, config_items, config_to_dict, keys_that
from training.log import rows_up_to
from training.loop import (
    ADVICE,
    Diverged,
    check_alike,
    check_ranks,
    has_ended,
    micro_batches_of,
    scale_for_batch,
)
from training.run_folder import MARKS, names_in, refuse_in_use


# ---------------------------------------------------------------- the start
class Start:
    """How a run starts: anew, or from a checkpoint that fits its config. Errors are ValueErrors.

    path: of the checkpoint, as text; None: a new run. state: its content, see save_run, or None.
    micro_batches: in a global batch, which is fixed at the start of a run.
    """

    def __init__(self, config, ddp, work_dir=None, path=None, state=None, further=""):
        """work_dir: Path of the run folder; None: the run has none. further: a sentence for
        messages, on how to train the checkpoint's weights further as a new run."""
        self.config = config
        self.work_dir = work_dir
        self.path = path
        self.state = state
        self.further = further
        self.micro_batches = self._count_micro_batches(ddp)

    def check_data(self, things, fingerprint) -> None:
        """Refuse a checkpoint that was trained on other data.

        things: a word for messages, such as proteins. fingerprint: of the data now, {"n",
        "hash"}."""
        if self.state is None or self.state["data"] == fingerprint:
            return
        former = self.state["data"]
        raise ValueError(f"{self.path} was trained on other {things}, or in another order "
                         f"({former['n']:,}, hash {former['hash']}; now {fingerprint['n']:,}, "
                         f"{fingerprint['hash']}). Give the same data, another --work_dir, or "
                         f"--fresh.{self.further}")

    def rate(self, lr_batch) -> tuple[float, int]:
        """(full learning rate, warm-up steps) of the run: those of the checkpoint, if there is one,
        which must be what the same config, data and batch give now.

        lr_batch: the global batch, or less if the data set is smaller; the rate is scaled to
        this."""
        optim = self.config.optim
        lr, warmup = scale_for_batch(optim.lr, optim.warmup, optim.scale, lr_batch,
                                     optim.base_global_batch)
        if self.state is None:
            return lr, warmup
        kept = self.state
        with using_checkpoint(self.path):
            if not math.isclose(kept["lr"], lr, rel_tol=1e-6) or kept["warmup"] != warmup:
                raise ValueError(f"{self.path} has the learning rate {kept['lr']:g} and "
                                 f"{kept['warmup']:g} steps of warm-up; expected {lr:g} and "
                                 f"{warmup}, which the config gives. Give an older checkpoint "
                                 "(--resume), or --fresh to start over.")
        return kept["lr"], kept["warmup"]

    def progress(self, seen, initial, n_iters) -> dict:
        """Run.progress: as the checkpoint has it, or that of a new run. Refuses a checkpoint of a
        run that is not finished and has no step left to do.

        seen: names of the last entries of Totals.sums; their totals over good steps are kept.
        initial: the script's additions, with initial values. n_iters: optimizer steps in all."""
        progress = {"step": 0, "best": None, "bad_evals": 0, "finished": "",
                    "bad_steps": [0, 0],   # nan or infinite: in all, and in a row up to now
                    "seen": dict.fromkeys(seen, 0),
                    **initial}
        if self.state is None:
            return progress
        with using_checkpoint(self.path):
            for name in progress:
                progress[name] = self.state[name]
        if not has_ended(progress, n_iters):
            # Not the parents of the real path: checkpoints/ may be a link to another disk.
            folder = Path(self.path).absolute().parent.parent
            if folder.resolve() != self.work_dir.resolve():
                progress["best"] = None   # the file of these weights is in the former folder
        elif not progress["finished"]:   # it stopped early, and n_iters has been lowered since
            raise ValueError(f"{self.path} is of step {progress['step']:,} of a run that is not "
                             "finished, and training.n_iters or num_epochs asks for "
                             f"{n_iters:,} steps; expected more.")
        return progress

    def load_weights(self, model) -> None:
        """Give a model, not yet wrapped in DDP, the weights of the checkpoint, if there is one."""
        if self.state is not None:
            with using_checkpoint(self.path):
                model.load_state_dict(self.state["model"])

    def load_optimizer(self, run, ddp) -> None:
        """Continue with optimizer, scaler and averages of the checkpoint, if there is one."""
        if self.state is None:
            return
        with using_checkpoint(self.path):
            run.optimizer.load_state_dict(self.state["optimizer"])
            scaler = self.state["scaler"]
            if run.scaler.is_enabled():   # its scale hangs on the number of ranks: grad_scaler
                scale = scaler["scale"] * self.state["world_size"] / ddp.world_size
                scaler = {**scaler, "scale": scale}
            run.scaler.load_state_dict(scaler)
            if run.ema is not None:
                run.ema.load_state_dict(self.state["ema"])

    def _count_micro_batches(self, ddp):
        """As many as the checkpoint has; in a new run as the config says. Refuses more ranks, or a
        config that asks for another number than the checkpoint has."""
        training = self.config.training
        if self.state is None:
            micro_batches = micro_batches_of(training, ddp.world_size)
            source = f"training.micro_batches is {training.micro_batches}"
            advice = ", or a larger training.micro_batches"
        else:
            micro_batches = self.state["micro_batches"]
            source = f"{self.path} has {micro_batches} micro-batches per step"
            advice = ", or begin a new run (another --work_dir, or --fresh)"
        if training.micro_batches not in (None, micro_batches):
            raise ValueError(f"{source}, and training.micro_batches is {training.micro_batches}; "
                             "expected the same. Leave training.micro_batches out to continue "
                             "this run.")
        check_ranks(ddp.world_size, micro_batches, source, advice)
        return micro_batches


def start_or_continue(config, ddp, work_dir, resume, fresh, anew, complete=None) -> Start:
    """Decide on rank 0 what to continue from; all ranks read the same checkpoint. A collective.

    Args:
        work_dir: Path of the run folder. resume, fresh: see find_checkpoint.
        anew: options, as text, that start a new run from this run's weights, for messages;
            {path} in it is that of the checkpoint.
        complete: function (config, content of the checkpoint or None) -> the config of the run,
            with what it takes from the weights that the run begins with; None: all is given.
    Raises: ValueError for options or a checkpoint that cannot be, and, on every rank, for a config
        that is not the same on all."""
    check_options(work_dir, resume, fresh)
    check_alike(config_items(config, keys_that(type(config), "per_host")), ddp)
    path = None
    if ddp.is_main:
        path = find_checkpoint(work_dir, resume, fresh)
    path = broadcast(path, ddp)
    if path is None:
        if complete is not None:
            config = complete(config, None)
        return Start(config, ddp, work_dir)
    path = newest_checkpoint(path, ddp)   # last-1.pt, where last.pt is damaged
    state = load_checkpoint(path, ddp)
    options = anew.replace("{path}", path)
    further = f" To train its weights further, as a new run: {options} --work_dir NEW."
    with using_checkpoint(path):
        if complete is not None:
            config = complete(config, state)
        check_config(path, state, config, further)
        check_weights(path, state["model"])
    return Start(config, ddp, work_dir, path, state, further)


def check_options(work_dir, resume, fresh) -> None:
    """ValueError for --work_dir, --resume and --fresh that cannot be meant so."""
    if fresh and resume:
        raise ValueError("--fresh and --resume exclude each other: start over, or continue.")
    if fresh and work_dir.name in ("", ".."):
        raise ValueError(f"--fresh renames the run folder, and --work_dir {work_dir} names none. "
                         "Give its name, from another folder.")
    if resume and Path(resume).is_dir():
        folder = "" if Path(resume).name == "checkpoints" else "checkpoints"
        raise ValueError(f"--resume {resume} is a folder; expected a checkpoint, such as "
                         f"{Path(resume) / folder / 'last.pt'}.")


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


def check_config(path, state, config, further="") -> None:
    """Refuse a checkpoint of another config. Raises: ValueError.

    path, state: of the checkpoint. further: see Start."""
    differences = config_differences(state["config"], config,
                                     keys_that(type(config), "may_change"))
    if not differences:
        return
    lines = "\n    ".join(differences)
    if any(line.startswith(("model.", "graph.")) for line in differences):
        further = ""   # a network of another shape cannot take these weights
    raise ValueError(f"{path} was trained with another config:\n    {lines}\n  Expected the same. "
                     f"Give another --work_dir, or --fresh to start over.{further} (Keys that may "
                     "differ are marked * in --help.)")


def check_weights(path, weights) -> None:
    """Refuse weights with nan or infinity. Their shapes are compared when a model loads them.

    weights: {name: tensor}, of the checkpoint at `path`. Raises: ValueError."""
    spoilt = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if spoilt:
        raise ValueError(f"{path}: {len(spoilt)} tensors of the model hold nan or infinite "
                         f"numbers, first {spoilt[0]}; expected finite weights. Give an older "
                         "checkpoint (--resume), or --fresh to start over.")


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


# ---------------------------------------------------------------- on which machine?
def hash_of(weights) -> str:
    """Hash of a state_dict, as text."""
    digest = hashlib.blake2b(digest_size=8)
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
    then = {"world_size": state["world_size"], "torch": state["versions"]["torch"],
            **state["machine"]}
    differences = []
    for name, value in now.items():
        if then[name] != value:
            differences.append(f"{name} {then[name]} -> {value}")
    return ", ".join(differences)


# ---------------------------------------------------------------- saving
def save_run(run, log, ddp, name, keep_last=1, **more) -> str:
    """Write checkpoints/NAME: what every script needs to resume, and `more`. A collective.

    Returns: its path."""
    before_saving(run, log)
    progress = run.progress
    if run.ema is not None:
        more["ema"] = run.ema.state_dict()
    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    path = str(run.work_dir / "checkpoints" / name)
    save_checkpoint(path, ddp, keep_last,
                    model=run.bare.state_dict(), optimizer=run.optimizer.state_dict(),
                    scaler=run.scaler.state_dict(), config=config_to_dict(run.config),
                    epoch=progress["step"] // run.steps_per_epoch, micro_batches=run.micro_batches,
                    lr=run.lr, warmup=run.warmup, data=run.fingerprint, world_size=ddp.world_size,
                    versions=versions, machine=describe_machine(ddp), **progress, **more)
    run.saved_at = time.monotonic()
    return path


def before_saving(run, log) -> None:
    """Check what must hold before weights are written: if the last step was bad, they are
    finite."""
    log.sync()   # the rows up to this step must be on disk before the checkpoint is
    _, bad_in_a_row = run.progress["bad_steps"]
    if bad_in_a_row and not all(p.isfinite().all() for p in run.bare.parameters()):
        raise Diverged(f"step {run.progress['step']}: weights are nan or infinite; expected "
                       f"finite numbers. {ADVICE}")
