"""The run folder: finding the checkpoint to resume, refusing a mismatch, lock, saving, the end.

    path = find_checkpoint(folder, resume, fresh, config, may_change)   # None: a new run
    lock = open_run(folder, fresh, ("checkpoints", "samples"))   # from here on the folder is ours
    ...
    lock.release()

A run folder holds config.yaml, metrics.jsonl, checkpoints/ and status.json; while a run is on also
lock.json. A user's file STOP asks the run to stop, and no run starts until it is removed. staged()
makes a copy of the data on each host, which is removed when the run ends.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_setup import (AGAIN, BAD_INPUT, all_sum, barrier, beat, broadcast, close_run,
                       first_problem, listed, load_checkpoint, print0, save_checkpoint, unwrap_ddp,
                       watch_run)
from plot_run import draw, rows_of
from training.config import config_differences, config_items, config_to_dict, dump_yaml, load_config
from training.log import RunLog, print_line, read_rows, rows_up_to, write_text_atomic, write_whole

ADVICE = ("A checkpoint, if there is one, holds the weights from before these steps. Begin a new "
          "run with a lower optim.lr, a higher optim.warmup, or memory.mixed_precision: false.")
# A resumed run may differ in these keys; scripts add to them.
MAY_ALWAYS_CHANGE = ("training.n_iters", "training.num_epochs", "training.eval_freq",
                     "training.log_freq", "training.snapshot_freq", "training.keep_last",
                     "training.max_bad_steps", "training.stop_signals", "training.num_workers",
                     "monitoring.watchdog_minutes", "monitoring.check_sync_every",
                     "monitoring.tensorboard", "monitoring.wandb", "monitoring.timing_every",
                     "monitoring.log_gradients", "monitoring.log_weights", "memory.compile",
                     "memory.max_memory_per_gpu")
# What every checkpoint to continue from must hold; scripts add to it.
ALWAYS_NEEDED = ("model", "optimizer", "scaler", "step", "best", "bad_steps", "config",
                 "micro_batches", "lr", "warmup", "data")
# A folder with none of these names in it is not taken for a run folder.
MARKS = {"lock.json", "metrics.jsonl", "checkpoints", "config.yaml", "status.json"}
STAGE_SECONDS = 3 * 3600.0   # limit for the slowest host to copy the data: 20 GB at 2 MB/s
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


class Diverged(RuntimeError):
    """The loss has become nan or infinite. The same command would end in the same way again."""
    retry = False   # read by ddp_setup, which then does not advise to give the command again


# ---------------------------------------------------------------- what to continue from
def find_checkpoint(run_dir, resume, fresh, config, may_change):
    """Find the checkpoint that a start continues from. Writes nothing.

    Args:
        run_dir: Path of the run folder; it need not exist.
        resume: path of a checkpoint that the user names, or None.
        fresh: whether the user wants to start over.
        config: the config now. may_change: keys that may differ from the former run's config.
    Returns: path of the checkpoint as text, or None for a new run.
    Raises: ValueError for a folder that is in use, cannot be written, holds another run, or is no
        run folder."""
    refuse_unwritable(run_dir)
    RunLock.refuse_live(run_dir)
    if (run_dir / "STOP").exists() and not fresh:
        raise ValueError(f"{run_dir / 'STOP'} exists: this run was asked to stop. Remove the file "
                         "to continue it.")
    last = run_dir / "checkpoints" / "last.pt"
    # If only last-1.pt exists, the run was killed between two renames of save_checkpoint.
    saved = any(last.with_name(name).exists() for name in ("last.pt", "last-1.pt"))
    if resume and saved and last.parent.resolve() != Path(resume).resolve().parent:
        raise ValueError(f"{run_dir} holds a run already, and --resume {resume} is of another. "
                         "Expected a checkpoint of the same run. Give another --work_dir; or "
                         "leave --resume out to continue this run.")
    names = sorted(name for name in (os.listdir(run_dir) if run_dir.exists() else ())
                   if not name.startswith(".lock.json."))   # left by a killed start
    if names and not MARKS & set(names):
        raise ValueError(f"{run_dir} is not a run directory: it holds {', '.join(names[:5])}. "
                         "Expected an empty or new folder, or that of a run. Give another "
                         "--work_dir.")
    if "metrics.jsonl" in names and not fresh:
        rows_up_to(run_dir / "metrics.jsonl", 0)   # refuses a file with broken rows
    if not fresh and not saved and "config.yaml" in names:
        former = load_config(type(config), run_dir / "config.yaml")
        differences = config_differences(former, config, may_change)
        if differences:
            lines = "\n    ".join(differences)
            raise ValueError(f"{run_dir} holds a run with another config, which came to no "
                             f"checkpoint:\n    {lines}\n  Expected the same config. Give another "
                             "--work_dir" + (", or --fresh to start over." if not resume else "."))
    if resume:
        return str(resume)
    return str(last) if saved and not fresh else None


def refuse_unwritable(run_dir):
    """Raise ValueError, naming --work_dir, if the folder cannot be made or written."""
    folders = (run_dir.absolute(), *run_dir.absolute().parents)
    nearest = next(folder for folder in folders if folder.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    what = "may not be written" if nearest.is_dir() else "is a file"
    raise ValueError(f"--work_dir: the run directory {run_dir} cannot be used: {nearest} {what}. "
                     "Expected a folder that can be written, or made. Give another --work_dir.")


class Former(NamedTuple):
    """The checkpoint that a start continues from."""
    path: str | None          # None: a new run
    state: dict | None        # its content


def micro_batches_of(former, config, may_change, needed, model, things, fingerprint, anew, ddp):
    """Number of micro-batches in a global batch, which is fixed at the start of a run. Refuses a
    checkpoint that does not fit this start, or holds nan or infinity.

    Args:
        former: a Former, whose state must have the keys `needed`.
        config: the config now. may_change: keys that may differ from the checkpoint's config.
        model: of the expected shapes.
        things, fingerprint: the data: a word for messages, such as proteins, and {"n", "hash"}.
        anew: options that start a new run from this run's weights, for messages.
    Raises: ValueError."""
    path, state = former
    fine_tune = f" To train its weights further, as a new run: {anew} --work_dir NEW."
    if state is None:
        return config.training.accum * ddp.world_size
    absent = [k for k in needed if not isinstance(state, dict) or k not in state]
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; expected a checkpoint of this "
                         "training script.")
    differences = config_differences(state["config"], config, may_change)
    if differences:
        lines = "\n    ".join(differences)
        same_model = not any(line.startswith(("model.", "graph.")) for line in differences)
        raise ValueError(f"{path} was trained with another config:\n    {lines}\n  Expected the "
                         "same. Give another --work_dir, or --fresh to start over."
                         f"{fine_tune if same_model else ''} (Keys that may "
                         "differ: MAY_CHANGE in the training script.)")
    expected, found = ({k: tuple(v.shape) for k, v in weights.items()}
                       for weights in (model.state_dict(), state["model"]))
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
    if state["data"] != fingerprint:
        raise ValueError(f"{path} was trained on other {things}, or in another order "
                         f"({state['data']['n']:,}, hash {state['data']['hash']}; now "
                         f"{fingerprint['n']:,}, {fingerprint['hash']}). Give the same data, "
                         f"another --work_dir, or --fresh.{fine_tune}")
    micro_batches = state["micro_batches"]
    if micro_batches % ddp.world_size:
        divisors = [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
        raise ValueError(f"{path} has {micro_batches} micro-batches per step, which "
                         f"{ddp.world_size} ranks cannot share equally. Continue on "
                         f"{', '.join(map(str, divisors))} ranks.")
    return micro_batches


def hash_of(weights):
    """Hash of a state_dict, as text."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(weights.items()):
        numbers = value.detach().cpu().float().contiguous().numpy()
        digest.update(name.encode() + numbers.tobytes())
    return digest.hexdigest()


def open_run(run_dir, fresh, folders):
    """Take the run folder and return its RunLock. --fresh renames a former run's folder.

    folders: names of its subfolders in which a killed run may have left unfinished files.
    """
    if run_dir.is_symlink():
        run_dir = run_dir.resolve()   # --fresh renames what the link leads to
    renames = fresh and run_dir.exists() and any(run_dir.iterdir())
    try:
        lock = RunLock(run_dir)
    except OSError as e:
        raise ValueError(f"--work_dir: the run directory {run_dir} cannot be made or written: "
                         f"{e.strerror}. Give another --work_dir.") from None
    if renames:   # under the lock, so that only one of two simultaneous starts does it
        candidates = (run_dir.with_name(f"{run_dir.name}.old{k}") for k in range(1, 10**6))
        old = next(path for path in candidates if not path.exists())
        try:
            run_dir.rename(old)
        except OSError as e:   # for example, a volume is mounted there
            lock.release()
            raise ValueError(f"--fresh cannot rename {run_dir}: {e.strerror}. Give another "
                             "--work_dir.") from None
        lock.path = old / "lock.json"
        lock.release()
        print(f"--fresh: the former run is now in {old}", flush=True)
        lock = RunLock(run_dir)
    for folder in (run_dir, *(run_dir / name for name in folders)):
        for unfinished in folder.glob(".*.tmp"):   # of a killed run: the lock shows that none runs
            unfinished.unlink(missing_ok=True)
    return lock


# ---------------------------------------------------------------- on all ranks
def start_or_continue(config, ddp, work_dir, resume, fresh, may_change, per_host):
    """Decide on rank 0 what to continue from; all ranks read the same checkpoint.

    may_change: keys that may differ from the checkpoint's config. per_host: keys that may differ
    between ranks. Returns a Former.
    """
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
    path = find_checkpoint(work_dir, resume, fresh, config, may_change) if ddp.is_main else None
    path = broadcast(path, ddp)
    if path is None:
        return Former(None, None)
    state = load_checkpoint(path, ddp)
    return Former(ddp.state.checkpoint, state)   # last-1.pt, where last.pt is damaged


def check_alike(values, ddp):
    """Refuse values that differ between ranks, such as settings or the hash of a file.

    values: {what: plain value}. A collective. Raises ValueError on every rank, naming the first
    rank that differs from rank 0 and what it has."""
    of_rank_0 = broadcast(values, ddp)
    other = [f"{what} {json.dumps(own)} (rank 0: {json.dumps(of_rank_0.get(what))})"
             for what, own in values.items() if of_rank_0.get(what) != own]
    problem = f"rank {ddp.rank} on {ddp.host} has {listed(other)}" if other else ""
    problem = first_problem(problem, ddp)
    if problem:
        raise ValueError(f"{problem}. Expected the same on all ranks. Is a file that every host "
                         "has a copy of an old one somewhere, or was another command given there?")


def check_in_sync(model, ddp):
    """Check that all ranks have the same parameters, bit for bit, by a checksum of each parameter.

    Raises: RuntimeError on every rank, naming the ranks that differ and their first parameter."""
    if ddp.world_size == 1:
        return
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}   # {bytes: type}
    names, parameters = zip(*unwrap_ddp(model).named_parameters())
    bits = [p.detach().contiguous().view(integers[p.element_size()]) for p in parameters]
    sums = torch.stack([values.sum(dtype=torch.int64) for values in bits])
    differs = (sums != broadcast(sums.clone(), ddp)).tolist()
    name = first_problem(names[differs.index(True)] if any(differs) else "", ddp)
    if not name:
        return
    found = all_sum([float(any(differs) and r == ddp.rank) for r in range(ddp.world_size)], ddp)
    ranks, hosts = [r for r, differ in enumerate(found) if differ], ddp.state.hosts
    who = f"rank {listed([f'{r} on {hosts[r]}' for r in ranks])} differ from rank 0"
    if len(ranks) > ddp.world_size / 2 and ddp.world_size > 2:
        who = f"rank 0 on {hosts[0]} differs from most others"
    raise RuntimeError(f"the parameters are no longer equal on all ranks: {who}, first in {name}. "
                       "Expected equal bits. Is a device faulty, or does a rank change weights by "
                       "itself?")


@contextlib.contextmanager
def staged(folder, stage, copy, ddp):
    """A copy of a folder on each host, as long as this context lasts; None without `stage`.

    At the end the copy is deleted. Files that a rank still has open stay readable for it, and the
    system frees their space when the rank ends, however it ends.

    Args:
        folder: what to copy. stage: folder that each host has; None: nothing is copied.
        copy: function (folder, target, report), which calls report(bytes done, bytes in all).
    """
    if not stage:
        yield None
        return
    name = f"{Path(folder).resolve().name}-{os.urandom(4).hex()}" if ddp.is_main else None
    target = Path(stage) / f"{broadcast(name, ddp)}-{ddp.host or 'here'}"
    reported = time.monotonic()

    def report(done, total):
        nonlocal reported
        beat(ddp)
        if ddp.is_main and (done == total or time.monotonic() > reported + 10):
            reported = time.monotonic()
            print0(ddp, f"copying {folder} to {stage}: {done / 1e9:,.3f} of {total / 1e9:,.3f} GB")

    if ddp.local_rank == 0:
        copy(folder, target, report)
    try:
        barrier(ddp, timeout=STAGE_SECONDS)
        yield target
        barrier(ddp)
    finally:   # also if reading it has failed
        if ddp.local_rank == 0:
            shutil.rmtree(target, ignore_errors=True)


def describe_machine(ddp):
    """What the last bits of a result depend on, apart from the number of ranks: plain values."""
    kind = ddp.device.type
    device = kind if kind == "cpu" else getattr(torch, kind).get_device_name(ddp.device)
    return {"device": device, "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability()}


def machine_differences(state, ddp):
    """Differences from the machine that wrote the checkpoint `state`, if they may change the last
    bits of results. Text; '' if there are none."""
    now = {"world_size": ddp.world_size, "torch": str(torch.__version__), **describe_machine(ddp)}
    then = {"world_size": state.get("world_size"), "torch": state.get("versions", {}).get("torch"),
            **state.get("machine", {})}
    return ", ".join(f"{k} {then[k]} -> {now[k]}" for k in now if k in then and then[k] != now[k])


def is_finished(run):
    return run.progress["finished"] == "early stop" or run.progress["step"] >= run.n_iters


def take_folder(run, ddp, fresh, folders):
    """Lock the run folder, and watch for stop requests and hangs from here on. A finished run's
    folder is left alone. Raises: ValueError if an unfinished run has no step left to do."""
    if is_finished(run):
        if not run.progress["finished"]:   # it stopped early, and n_iters has been lowered since
            raise ValueError(f"{run.continued_from} is of step {run.progress['step']:,} of a run "
                             f"that is not finished, and training.n_iters or num_epochs asks for "
                             f"{run.n_iters:,} steps; expected more.")
        return
    if ddp.is_main:
        run.lock = open_run(run.work_dir, fresh, folders)
        write_text_atomic(run.work_dir / "config.yaml", dump_yaml(run.config))
    barrier(ddp)   # now the folder exists for all ranks
    watch_run(ddp, run.work_dir, run.config.monitoring.watchdog_minutes,
              run.config.training.stop_signals)


def bring_best(run, ddp, name):
    """If --resume continues a run in another folder, copy that run's best weights (file `name`).

    If there are none, the next evaluation counts as the best so far."""
    best = run.progress["best"]
    if is_finished(run) or not best:
        return
    if not broadcast(ddp.is_main and copy_best(run.work_dir, name, run.continued_from, best), ddp):
        run.progress["best"] = None
        print0(ddp, f"{name} of the run so far was not found: the best is looked for from here on")


def copy_best(folder, name, path, best):
    """Copy file `name` from the run folder of checkpoint `path`, if its step is that of `best`.

    Returns: whether `folder`, which may be the same, has the file now."""
    target, source = folder / name, Path(path).absolute().parent.parent / name
    if target.resolve() == source.resolve():
        return target.exists()
    try:
        if not source.is_file() or load_checkpoint(str(source))["step"] != best["step"]:
            return False
    except (OSError, ValueError, KeyError, TypeError):   # not a file of save_checkpoint
        return False
    with open(source, "rb") as opened:
        write_whole(target, lambda file: shutil.copyfileobj(opened, file))
    return True


def check_lock(run, ddp):
    """Raise RuntimeError if another run took over the folder while this one was suspended."""
    if run.lock and run.lock.lost:
        close_run(ddp)   # so that this failure is not written to the other run's status.json
        raise RuntimeError(f"{run.work_dir} has been taken over by {run.lock.lost}, as this run "
                           f"gave no sign of life for {run.lock.stale} s. Nothing more is written "
                           "here.")


def before_saving(run, log, ddp):
    """Check what must hold before weights are written: the folder is still ours and, if the last
    step was bad, the weights are finite."""
    check_lock(run, ddp)
    log.sync()   # the rows up to this step must be on disk before the checkpoint is
    finite = (bool(p.isfinite().all()) for p in run.bare.parameters())
    if run.progress["bad_steps"][1] and not all(finite):
        raise Diverged(f"step {run.progress['step']}: weights are nan or infinite; expected "
                       f"finite numbers. {ADVICE}")


def open_log(run, ddp):
    """Open the RunLog of a run, and drop its rows after the step that the run continues from."""
    log, m = RunLog(run.work_dir, ddp.is_main, run.n_iters), run.config.monitoring
    log.truncate(run.progress["step"] if run.continued_from else -1)
    log.track({**config_to_dict(run.config), "world_size": ddp.world_size}, run.progress["step"],
              m.tensorboard, m.wandb)
    return log


def save_run(run, log, ddp, name, keep_last=1, resumes=True, **more):
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


def finish_run(run, log, ddp, reason, result, seconds, lines):
    """The end of training: close the log, release the folder, print the result or how to go on.

    reason: why the run stopped before its end. seconds: duration of training. lines: function that
    returns lines of text on the result of a finished run.
    Returns: `result`; if the run stopped before its end, with "stopped": reason."""
    log.close()
    if run.lock:
        run.lock.release()
    write = functools.partial(print0, ddp)
    if run.progress["finished"]:
        loss = f", training loss {result['loss']:.4f}" if "loss" in result else ""
        print_line("\n".join([f"Finished at step {result['step']:,} ({run.progress['finished']}) "
                              f"after {seconds / 60:.1f} min{loss}", *lines()]), write)
        close_run(ddp, 0, run.progress["finished"])
        if ddp.is_main:
            draw_curves(run.work_dir)
        return result
    last, stop = run.work_dir / "checkpoints" / "last.pt", run.work_dir / "STOP"
    remove = f"Remove {stop}; then the" if stop.exists() else "The"
    saved = last if last.exists() else run.continued_from or "nothing yet"
    print_line(f"Stopped at step {run.progress['step']:,} of {run.n_iters:,}: {reason}. Saved: "
               f"{saved}. {remove} same command continues.", write)
    close_run(ddp, AGAIN, reason)
    return {**result, "stopped": reason}


def draw_curves(folder):
    """Draw curves.png of a run, if matplotlib is installed. An error here does not fail the run."""
    try:
        draw({folder.name: rows_of(folder)}, folder / "curves.png")
    except ImportError:   # matplotlib is optional
        return
    except Exception as error:
        print_line(f"ATTENTION: no picture was drawn: {type(error).__name__}: {error}")
        return
    print_line(f"  picture   {folder / 'curves.png'}")


def say_finished(run, ddp, lines):
    """A finished run was started again: print that, and its result.

    lines: function (last row of metrics.jsonl, folder of the run) -> lines of text."""
    early, step = run.progress["finished"] == "early stop", run.progress["step"]
    more = "" if early else " To go on, raise training.n_iters or num_epochs."
    folder = run.work_dir
    if not (folder / "metrics.jsonl").exists():   # --resume of another folder's checkpoint
        folder = Path(run.continued_from).absolute().parent.parent
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] == step]
    result, picture = rows[-1] if rows else {"step": step}, folder / "curves.png"
    text = [f"This run is finished: {'early stop' if early else 'all steps done'} at step "
            f"{step:,}.{more} To start over, --fresh.", *lines(result, folder)]
    if picture.exists():
        text.append(f"  picture   {picture}")
    print0(ddp, "\n".join(text))
    close_run(ddp)   # so that cleanup_ddp does not write status.json
    if ddp.is_main:
        write_status(run.work_dir, 0, run.progress["finished"], step)
    return {"step": step}


def prepare_and_train(ddp, prepare, train):
    """Prepare and train. Close the watch and the lock even after an error: a notebook goes on.

    prepare: function () -> Run. train: function (run, ddp), whose result is returned."""
    run = None
    try:
        run = prepare()
        return train(run, ddp)
    except BaseException as e:
        code = 130 if isinstance(e, KeyboardInterrupt) else 1
        close_run(ddp, code, f"{type(e).__name__}: {e}")
        raise
    finally:
        close_run(ddp)
        if run is not None and run.lock:
            run.lock.release()


# ---------------------------------------------------------------- status.json
def write_status(run_dir, code, reason, step=None):
    """Write status.json for a start that did not train. While a run trains, ddp_setup does it."""
    text = json.dumps({"code": code, "reason": reason, "step": step}) + "\n"
    write_text_atomic(Path(run_dir) / "status.json", text)


def read_status(run_dir):
    """status.json as a dict, or {} if it is missing or cannot be read. run_dir: may be None."""
    if run_dir is None:
        return {}
    try:
        status = json.loads((Path(run_dir) / "status.json").read_text(encoding="utf-8"))
        return status if isinstance(status, dict) else {}
    except (OSError, ValueError):
        return {}


def replace_status(run_dir, code, reason, since=math.inf, finished=None):
    """Replace the status.json of an earlier start by the outcome of this start.

    If this start was refused (code BAD_INPUT) and the run had finished (code 0), that outcome is
    kept or put back: a mistyped command does not undo a finished run.
    Returns: whether the file was written. It is not if there is none, or while a run is alive.

    Args:
        run_dir: None if the command did not name a run folder.
        since: epoch seconds; a file written after that is kept.
        finished: status.json of a finished run as this start found it, to be put back.
    """
    if run_dir is None:
        return False
    try:
        RunLock.refuse_live(run_dir, wait=False)   # this process is failing: do not wait
        if (Path(run_dir) / "status.json").stat().st_mtime >= since:
            return False
        finished = finished or read_status(run_dir)
        if code == BAD_INPUT and finished.get("code") == 0:
            write_status(run_dir, 0, finished.get("reason"), finished.get("step"))
        else:
            write_status(run_dir, code, reason)
        return True
    except (ValueError, OSError):
        return False


# ---------------------------------------------------------------- lock
class RunLock:
    """Keeps a second live run out of a run folder.

    RUN_DIR/lock.json holds host, process id, start time of the process, job id, and a heartbeat
    (epoch seconds), which a thread renews every `every` seconds. A lock is dead if it is of this
    host and its process is gone, or if it is of another host and its heartbeat is older than
    `stale` seconds. The next run then takes it over.
    """
    every, stale = 15, 120   # seconds; 8 heartbeats may fail before another host takes over
    silent = None   # (folder, heartbeat) of a lock that this process has watched and found dead

    def __init__(self, run_dir):
        """Take the lock, making the folder. Raises ValueError if a live run holds it, OSError if it
        cannot be written."""
        self.path = Path(run_dir) / "lock.json"
        temporary = self.path.with_name(f".lock.json.{os.getpid()}.tmp")
        dead = self.refuse_live(run_dir)
        if dead is not None:
            with contextlib.suppress(FileNotFoundError):   # another start has removed it
                self.path.replace(temporary)
                if temporary.read_text(encoding="utf-8") != dead:   # a new lock: put it back
                    temporary.replace(self.path)
                    self.refuse_live(run_dir)
        job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
        self.holder = {"host": socket.gethostname(), "pid": os.getpid(),
                       "start": process_start(os.getpid()), "job": job}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(self._text(), encoding="utf-8")
            try:
                os.link(temporary, self.path)    # atomic: one of two starts gets it
            except FileExistsError:
                raise
            except OSError:                  # there are no hard links
                with open(self.path, "x", encoding="utf-8") as file:
                    file.write(self._text())
        except FileExistsError:
            raise ValueError(f"{run_dir} was taken by another run at this moment. Expected one run "
                             "per folder. Give another --work_dir.") from None
        finally:
            temporary.unlink(missing_ok=True)
        self.released, self.lost = threading.Event(), ""
        self.thread = threading.Thread(target=self._renew, daemon=True, name="run-lock")
        self.thread.start()

    def _text(self):
        return json.dumps({**self.holder, "beat": time.time()})

    def _renew(self):
        while not self.released.wait(self.every):
            try:
                try:
                    lock = json.loads(self.path.read_text(encoding="utf-8"))
                except (FileNotFoundError, ValueError):   # someone removed or damaged it
                    lock = self.holder
                if any(lock.get(key) != value for key, value in self.holder.items()):
                    self.lost = f"process {lock.get('pid')} on {lock.get('host')}"   # new owner
                    return
                write_text_atomic(self.path, self._text())
            except OSError:   # such as a full disk, which the next checkpoint will report
                continue

    def release(self):
        """Release the folder. Harmless when repeated."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join()          # else a late heartbeat could write the file again
        if not self.lost:
            self.path.unlink(missing_ok=True)

    @classmethod
    def _lives_elsewhere(cls, run_dir, beat, age):
        """Does the holder on another host renew its lock?

        Waits for a new heartbeat until the lock is stale. So if the run was killed on another host
        a moment ago, the same command started here waits and then continues it.
        """
        if cls.silent == (str(run_dir), beat):
            return False
        wrong_clock = 2 * cls.every + 5 if age < 3600 else 0   # seconds; hosts' clocks may differ
        limit = min(max(cls.stale - age, wrong_clock), cls.stale)
        end = time.time() + limit
        if limit > 0:
            print(f"{run_dir} was in use {age:.0f} s ago on another host: waiting for a sign of "
                  f"life, at most {limit:.0f} s", flush=True)
        while time.time() < end:
            time.sleep(min(1.0, cls.every))
            try:
                text = (Path(run_dir) / "lock.json").read_text(encoding="utf-8")
                if json.loads(text)["beat"] != beat:
                    return True
            except FileNotFoundError:   # that run has ended
                return False
            except (ValueError, KeyError, TypeError):   # it is being written
                continue
        cls.silent = str(run_dir), beat
        return False

    @classmethod
    def refuse_live(cls, run_dir, wait=True):
        """Raise ValueError, naming the holder, if a live run holds this folder.

        wait: for a holder on another host, wait for a new heartbeat; if False, a heartbeat that is
        not stale is enough. Returns: text of the lock if it is dead or this process', else None.
        """
        try:
            text = (Path(run_dir) / "lock.json").read_text(encoding="utf-8")
            lock = json.loads(text)
            host, pid, age = lock["host"], lock["pid"], time.time() - lock["beat"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{run_dir}/lock.json cannot be read as a lock; expected JSON with "
                             "host, pid and beat. Remove it if no run is using this "
                             "folder.") from None
        if host != socket.gethostname():
            lives = cls._lives_elsewhere(run_dir, lock["beat"], age) if wait else age < cls.stale
        elif pid == os.getpid():
            return text
        else:
            start = process_start(pid)
            lives = start is not None and start == lock.get("start")
        if lives:
            job = f", job {lock['job']}" if lock.get("job") else ""
            raise ValueError(f"{run_dir} is in use by process {pid} on {host}{job} (last sign of "
                             f"life {age:.0f} s ago). Expected one run per folder. Wait for it, "
                             "stop it, or give another --work_dir.")
        return text


def process_start(pid):
    """When a process started, in clock ticks since boot, or None if it is gone.

    Process ids are reused; id and start time together identify a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()   # from field 3, the state
        return None if fields[0] in "ZX" else int(fields[19])   # Z: zombie, X: dead
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    try:   # no /proc: only tell whether the process exists
        os.kill(pid, 0)
        return 0
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
