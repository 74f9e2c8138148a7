"""The checkpoint that a run continues from: finding it, refusing one that does not fit, saving.

    former = start_or_continue(config, ddp, work_dir, resume, fresh, MAY_CHANGE, PER_HOST)
    check_checkpoint(former, NEEDED, config, MAY_CHANGE, model, anew)   # ValueError: what is wrong
    check_data(former, "proteins", fingerprint, anew)
    micro_batches = count_micro_batches(former, config, ddp)
    ...
    save_run(run, log, ddp, "last.pt", keep_last=2)

A run folder holds its checkpoints in checkpoints/: last.pt, the former ones last-1.pt and so on,
and those of the best weights. A start never writes before all checks have passed.
"""
import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_setup import broadcast, load_checkpoint, print0, save_after, save_checkpoint
from training.config import (MOST_STEPS, config_differences, config_items, config_to_dict,
                             load_config, other_script)
from training.files import write_whole
from training.folder import MARKS, names_in, refuse_in_use
from training.log import is_step, rows_up_to
from training.loop import (ADVICE, Diverged, check_alike, check_ranks, is_finished,
                           micro_batches_of)

# A resumed run may differ in these keys; scripts add to them.
# training.micro_batches is compared with the checkpoint's number.
MAY_ALWAYS_CHANGE = ("training.n_iters", "training.num_epochs", "training.eval_freq",
                     "training.micro_batches",
                     "training.log_freq", "training.snapshot_freq", "training.snapshot_minutes",
                     "training.keep_last", "training.max_bad_steps", "training.stop_signals",
                     "training.num_workers", "training.profile",
                     "monitoring.watchdog_minutes", "monitoring.check_sync_every",
                     "monitoring.tensorboard", "monitoring.wandb", "monitoring.timing_every",
                     "monitoring.log_gradients", "monitoring.log_weights", "memory.compile",
                     "memory.max_memory_per_gpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 1e100         # rates and sums are smaller; math.isfinite fails for a larger integer
# What every checkpoint to continue from must hold; scripts add to it.
ALWAYS_NEEDED = ("model", "optimizer", "scaler", "step", "best", "bad_steps", "config",
                 "micro_batches", "lr", "warmup", "data")


# ---------------------------------------------------------------- what to continue from
class Former(NamedTuple):
    """The checkpoint that a start continues from."""
    path: str | None          # None: a new run
    state: dict | None        # its content


def start_or_continue(config, ddp, work_dir, resume, fresh, may_change, per_host) -> Former:
    """Decide on rank 0 what to continue from; all ranks read the same checkpoint.

    Args:
        work_dir: Path of the run folder. resume, fresh, may_change: see find_checkpoint.
        per_host: keys that may differ between ranks.
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
    check_alike(config_items(config, per_host), ddp)
    path = None
    if ddp.is_main:
        path = find_checkpoint(work_dir, resume, fresh, config, may_change)
    path = broadcast(path, ddp)
    if path is None:
        return Former(None, None)
    state = load_checkpoint(path, ddp)
    check_fields(ddp.state.checkpoint, state)
    refuse_other_script(ddp.state.checkpoint, state, config)
    return Former(ddp.state.checkpoint, state)   # last-1.pt, where last.pt is damaged


def check_fields(path, state) -> None:
    """Refuse the content of a checkpoint in which a field is of the wrong type, or a number that
    cannot be. Fields that are missing are named by check_checkpoint. Raises: ValueError."""
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds {type(state).__name__}; expected a checkpoint of this "
                         "training script.")
    problems = []
    for name, is_right in FIELDS.items():
        if name in state and not is_right(state[name]):
            problems.append(f"{name} is {state[name]!r:.60}")
    if problems:
        raise ValueError(f"{path} has values that cannot be: {'; '.join(problems)}; expected what "
                         "this training script saves. Give an older checkpoint (--resume), or "
                         "--fresh to start over.")


def refuse_other_script(path, state, config) -> None:
    """Raise ValueError, naming it, if the other training script saved this checkpoint."""
    other = other_script(state.get("config", {}), type(config))
    if other:
        raise ValueError(f"{path} is a checkpoint of {other}; expected one of this script. Give it "
                         f"to {other}, or give another --work_dir or --resume here.")


def is_positive(value):
    return type(value) is int and 0 < value <= MOST_STEPS


def is_number(value):
    return type(value) in (int, float) and 0 <= value < LARGEST


def is_best(value):
    return value is None or isinstance(value, dict) and (not value or is_step(value.get("step")))


def are_weights(value):
    """Whether a value is a state_dict of ordinary tensors."""
    return (isinstance(value, dict) and all(isinstance(name, str) for name in value)
            and all(map(is_dense, value.values())))


def is_dense(value):
    """Whether a value is an ordinary tensor of real numbers."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided
            and value.dtype in FLOATS and value.device.type == "cpu")


def are_sections(value):
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def is_fingerprint(value):
    return isinstance(value, dict) and is_step(value.get("n")) and isinstance(
        value.get("hash"), str)


def are_averages(value):
    return (isinstance(value, dict) and isinstance(value.get("shadow_params"), list)
            and are_weights(dict(zip(map(str, range(len(value["shadow_params"]))),
                                     value["shadow_params"])))
            and is_number(value.get("decay")) and is_step(value.get("num_updates")))


def is_start(value):
    """Whether a value tells the initial weights of a run: None, or {"path", "hash"}."""
    return value is None or isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("path", "hash"))


def are_two_counts(value):
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_step, value))


def are_numbers(values):
    return all(type(number) in (int, float) and abs(number) < LARGEST for number in values)


def are_totals(value):
    return isinstance(value, dict) and are_numbers(value.values())


def are_two_numbers(value):
    return isinstance(value, (list, tuple)) and len(value) == 2 and are_numbers(value)


def is_list_of_numbers(value):
    return isinstance(value, (list, tuple)) and are_numbers(value)


def is_log_probability(value):
    """Whether a value is one, or None: not known yet."""
    return value is None or are_numbers([value])


def is_bool(value):
    return type(value) is bool


def is_text(value):
    return isinstance(value, str)


def is_dict(value):
    return isinstance(value, dict)


# A field of a checkpoint -> whether a value can be one.
FIELDS = {"model": are_weights, "optimizer": is_dict, "scaler": are_totals, "step": is_step,
          "best": is_best, "bad_steps": are_two_counts, "bad_evals": is_step,
          "config": are_sections, "micro_batches": is_positive, "lr": is_number,
          "warmup": is_number, "data": is_fingerprint, "machine": is_dict, "versions": is_dict,
          "ema": are_averages, "init_from": is_start, "seen": are_totals,
          "recent": are_two_numbers, "finished": is_text, "world_size": is_positive,
          "epoch": is_step, "plan": is_text, "base": is_text, "sums": is_list_of_numbers,
          "start": is_log_probability, "fallen": is_bool, "collapsed": is_bool}


def find_checkpoint(run_dir, resume, fresh, config, may_change) -> str | None:
    """Find the checkpoint that a start continues from. Writes nothing.

    Args:
        run_dir: Path of the run folder; it need not exist.
        resume: path of a checkpoint that the user names, or None.
        fresh: whether the user wants to start over.
        config: the config now. may_change: keys that may differ from the former run's config.
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
    if "config.yaml" in names and not fresh and not saved:
        _refuse_other_config(run_dir, resume, config, may_change)
    if resume:
        return str(resume)
    return str(last) if saved and not fresh else None


def _refuse_other_config(run_dir, resume, config, may_change):
    """Raise ValueError if a run that came to no checkpoint had another config."""
    former = load_config(type(config), run_dir / "config.yaml")
    differences = config_differences(former, config, may_change)
    if differences:
        lines = "\n    ".join(differences)
        or_fresh = "." if resume else ", or --fresh to start over."
        raise ValueError(f"{run_dir} holds a run with another config, which came to no "
                         f"checkpoint:\n    {lines}\n  Expected the same config. Give another "
                         f"--work_dir{or_fresh}")


def check_checkpoint(former, needed, config, may_change, model, anew) -> None:
    """Refuse a checkpoint that does not fit the config and the model, or holds nan or infinity.

    Args:
        former: a Former. Without a state, nothing is checked.
        needed: keys that the state must have.
        config: the config now. may_change: keys that may differ from the checkpoint's config.
        model: of the expected shapes.
        anew: options that start a new run from this run's weights, for messages.
    Raises: ValueError."""
    path, state = former
    if state is None:
        return
    absent = [key for key in needed if not isinstance(state, dict) or key not in state]
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; expected a checkpoint of this "
                         "training script.")
    differences = config_differences(state["config"], config, may_change)
    if differences:
        lines = "\n    ".join(differences)
        same_model = not any(line.startswith(("model.", "graph.")) for line in differences)
        raise ValueError(f"{path} was trained with another config:\n    {lines}\n  Expected the "
                         "same. Give another --work_dir, or --fresh to start over."
                         f"{further_training(anew) if same_model else ''} (Keys that may "
                         "differ: MAY_CHANGE in the training script.)")
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in state["model"].items()}
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{path} holds another model: {len(wrong)} tensors differ, first "
                         f"{wrong[0]}: {found.get(wrong[0], 'absent')} in the file, "
                         f"{expected.get(wrong[0], 'absent')} by the config. Give a checkpoint of "
                         "this model, another --work_dir, or --fresh.")
    spoilt = [name for name, weight in state["model"].items() if not weight.isfinite().all()]
    if spoilt:
        raise ValueError(f"{path}: {len(spoilt)} tensors of the model hold nan or infinite "
                         f"numbers, first {spoilt[0]}; expected finite weights. Give an older "
                         "checkpoint (--resume), or --fresh to start over.")


def check_data(former, things, fingerprint, anew) -> None:
    """Refuse a checkpoint that was trained on other data.

    former, anew: see check_checkpoint. things: a word for messages, such as proteins. fingerprint:
    of the data now, {"n", "hash"}. Raises: ValueError."""
    path, state = former
    if state is not None and state["data"] != fingerprint:
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


def bring_best(run, ddp, name) -> None:
    """If --resume continues a run in another folder, copy that run's best weights (file `name`).

    If there are none, the next evaluation counts as the best so far."""
    best = run.progress["best"]
    if is_finished(run) or not best:
        return
    found = ddp.is_main and copy_best(run.work_dir, name, run.continued_from, best)
    if not broadcast(found, ddp):
        run.progress["best"] = None
        print0(ddp, f"{name} of the run so far was not found: the best is looked for from here on")


def copy_best(folder, name, path, best) -> bool:
    """Copy file `name` from the run folder of checkpoint `path`, if its step is that of `best`.

    Returns: whether `folder`, which may be the same, has the file now."""
    target = folder / name
    source = Path(path).absolute().parent.parent / name
    if os.path.realpath(target) == os.path.realpath(source):
        return target.exists()
    try:
        if not source.is_file() or load_checkpoint(str(source))["step"] != best["step"]:
            return False
    except (OSError, ValueError, KeyError, TypeError):   # not a file of save_checkpoint
        return False
    with open(source, "rb") as opened:
        write_whole(target, lambda file: shutil.copyfileobj(opened, file))
    return True


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
    save_after(run.config.training.snapshot_minutes, ddp)


def before_saving(run, log, ddp) -> None:
    """Check what must hold before weights are written: the folder is still ours and, if the last
    step was bad, the weights are finite."""
    log.sync()   # the rows up to this step must be on disk before the checkpoint is
    _, bad_in_a_row = run.progress["bad_steps"]
    if bad_in_a_row and not all(p.isfinite().all() for p in run.bare.parameters()):
        raise Diverged(f"step {run.progress['step']}: weights are nan or infinite; expected "
                       f"finite numbers. {ADVICE}")
