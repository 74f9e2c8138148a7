"""The run folder: what stands in it, who may write there, and how a run in it ends.

    take_folder(run, ddp, watch, fresh, ("checkpoints", "samples"))   # from here on it is ours
    ...                                                               # the steps
    return finish_run(run, log, watch, reason, result, seconds, lines)

A run folder holds config.yaml, metrics.jsonl, checkpoints/ and what a Watch (ddp_watch.py) writes:
status.json, stacks/ and `lock`, which the kernel frees when the run ends. A user's file STOP asks
the run to stop, and no run starts until it is removed.
"""
import functools
from pathlib import Path

from ddp_setup import print0
from ddp_watch import lock_folder
from training.config import dump_yaml
from training.files import write_text_atomic
from training.log import print_line, read_rows
from training.loop import is_finished
from training.plot import NothingLogged, draw, rows_of
from training.problems import in_columns

# A folder with none of these names in it is not taken for a run folder.
MARKS = {"lock", "metrics.jsonl", "checkpoints", "config.yaml", "status.json"}
HOW_TO_GO_ON = "To go on, give the same command again, without --fresh or --resume."


# ---------------------------------------------------------------- whose is it?
def take_folder(run, ddp, watch, fresh, folders) -> None:
    """Take the run folder, when all checks of a start have passed. That of a finished run is left
    alone.

    fresh: rename a former run's folder. folders: names of subfolders in which a killed run may have
    left unfinished files.
    Raises: ValueError if another run has the folder; OSError."""
    if is_finished(run):
        return
    if fresh and ddp.is_main:
        rename_former(run.work_dir)
    watch.take_folder(run.work_dir, run.config.monitoring.watchdog_minutes)
    if run.continued_from:
        watch.saved(run.continued_from, run.progress["step"], HOW_TO_GO_ON)
    if ddp.is_main:
        for folder in (run.work_dir, *(run.work_dir / name for name in folders)):
            for unfinished in folder.glob(".*.tmp"):   # of a killed run: the lock shows that
                unfinished.unlink(missing_ok=True)     # none runs
        write_text_atomic(run.work_dir / "config.yaml", dump_yaml(run.config))


def rename_former(run_dir) -> None:
    """Rename a run folder that is not empty to the first free NAME.oldK.

    Raises: ValueError if another run has the folder, or it cannot be renamed."""
    run_dir = run_dir.resolve()   # a link stays; what it leads to is renamed
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    lock = lock_folder(run_dir)
    number = 1
    while (old := run_dir.with_name(f"{run_dir.name}.old{number}")).exists():
        number += 1
    try:
        run_dir.rename(old)
    except OSError as e:   # for example, a volume is mounted there
        raise ValueError(f"--fresh cannot rename {run_dir}: {e.strerror}. Give another "
                         "--work_dir.") from None
    finally:
        lock.close()
    print(f"--fresh: the former run is now in {old}", flush=True)


def refuse_in_use(run_dir: Path) -> None:
    """Raise ValueError, naming it, if another run has this folder now."""
    if (run_dir / "lock").exists():
        lock_folder(run_dir).close()


def names_in(run_dir) -> list[str]:
    """Sorted names of what a run folder holds; an empty list if there is no such folder."""
    return sorted(path.name for path in run_dir.iterdir()) if run_dir.exists() else []


# ---------------------------------------------------------------- the end of a run
def finish_run(run, log, watch, reason, result, seconds, lines) -> dict:
    """The end of training: close the log, print the result or how to go on, draw the curves.

    reason: why the run stopped before its end. seconds: duration of training. lines: function (row
    of metrics, folder of the run) -> lines of text on what was learned and where it is.
    Returns: `result`; if the run stopped before its end, with "stopped": reason."""
    log.close()
    if run.progress["finished"]:
        watch.reason = run.progress["finished"]   # for status.json: no stop counts any more
        text = [*finished_lines(run, result, seconds), *lines(result, run.work_dir),
                *skipped_lines(run)]
    else:
        watch.note_stop()     # everything is saved, and the time may be short
        result = {**result, "stopped": reason}
        text = [stopped_line(run, reason)]
        if run.progress["step"] > run.sampler.first:
            text += lines({"step": run.progress["step"]}, run.work_dir)
    print_line("\n".join(text), functools.partial(print0, watch.ddp))
    if watch.ddp.is_main:
        draw_curves(run.work_dir)
    return result


def finished_lines(run, result, seconds) -> list[str]:
    """That a run is finished, and how. For arguments see finish_run."""
    loss = f", training loss {result['loss']:.4f}" if "loss" in result else ""
    if "mfu" in result:
        loss += f", mfu {result['mfu']:.3f}"
    return [f"Finished at step {result['step']:,} ({run.progress['finished']}) after "
            f"{seconds / 60:.1f} min{loss}"]


def skipped_lines(run) -> list[str]:
    """How many steps were bad, if any were."""
    bad_steps, _ = run.progress["bad_steps"]
    if not bad_steps:
        return []
    return [in_columns(f"  ATTENTION: {bad_steps:,} steps were skipped, as their loss or gradient "
                       "was nan or infinite")]


def stopped_line(run, reason) -> str:
    """Why a run has stopped, what is saved, and how to go on."""
    last = run.work_dir / "checkpoints" / "last.pt"
    checkpoint = last if last.exists() else run.continued_from or "nothing yet"
    saved = f"Saved: {checkpoint}."
    if run.progress["step"] == run.sampler.first:
        saved = f"This start did no step and wrote nothing. Saved before: {checkpoint}."
    return in_columns(f"Stopped at step {run.progress['step']:,} of {run.n_iters:,}: {reason}. "
                      f"{saved} {HOW_TO_GO_ON}")


def say_finished(run, ddp, lines) -> dict:
    """A finished run was started again: print that, and its result.

    lines: function (last row of metrics.jsonl, folder of the run) -> lines of text."""
    step = run.progress["step"]
    if run.progress["finished"] == "early stop":
        how = f"early stop at step {step:,}."
    else:
        how = (f"all steps done at step {step:,}. To go on, raise training.n_iters or "
               "num_epochs.")
    folder = run.work_dir
    if not (folder / "metrics.jsonl").exists():   # --resume of another folder's checkpoint
        folder = Path(run.continued_from).absolute().parent.parent
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] == step]
    result = rows[-1] if rows else {"step": step}
    text = [f"This run is finished: {how} To start over, --fresh.", *lines(result, folder)]
    picture = folder / "curves.png"
    if picture.exists():
        text.append(f"  picture   {picture}")
    print0(ddp, "\n".join(text))
    return {"step": step}


def draw_curves(folder) -> None:
    """Draw curves.png of a run that has logged a row, and say where it is, or why there is none. An
    error here does not fail the run."""
    try:
        draw({folder.name: rows_of(folder)}, folder / "curves.png")
    except NothingLogged:   # it was stopped before
        return
    except ImportError:   # matplotlib is optional
        print_line("  picture   none without matplotlib: pip install matplotlib, then\n"
                   f"    python plot_run.py {folder}")
    except Exception as error:
        print_line(in_columns(f"ATTENTION: no picture was drawn: {type(error).__name__}: {error}"))
    except KeyboardInterrupt:   # Ctrl-C again: the run is saved, and has said so
        print_line("  picture   none, interrupted (Ctrl-C)")
    else:
        print_line(f"  picture   {folder / 'curves.png'}")
