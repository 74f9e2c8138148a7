"""The end of a run: its result or how to go on, on the screen, in status.json and as a picture."""
import functools
import sys
from pathlib import Path

from ddp_setup import AGAIN, print0
from training.log import print_line, read_rows
from training.plot import draw, rows_of
from training.watch import close_run, write_status


def finish_run(run, log, ddp, reason, result, seconds, lines) -> dict:
    """The end of training: close the log, release the folder, print the result or how to go on.

    reason: why the run stopped before its end. seconds: duration of training. lines: function that
    returns lines of text on the result of a finished run.
    Returns: `result`; if the run stopped before its end, with "stopped": reason."""
    log.close()
    if run.lock:
        run.lock.release()
    write = functools.partial(print0, ddp)
    finished = run.progress["finished"]
    if finished:
        loss = f", training loss {result['loss']:.4f}" if "loss" in result else ""
        if "mfu" in result:
            loss += f", mfu {result['mfu']:.3f}"
        text = [f"Finished at step {result['step']:,} ({finished}) after {seconds / 60:.1f} "
                f"min{loss}", *lines()]
        print_line("\n".join(text), write)
        close_run(ddp, 0, finished)
        if ddp.is_main:
            draw_curves(run.work_dir)
        return result
    last = run.work_dir / "checkpoints" / "last.pt"
    stop = run.work_dir / "STOP"
    remove = f"Remove {stop}; then the" if stop.exists() else "The"
    without = ""
    start_options = find_start_options(sys.argv)
    if start_options and last.exists():
        without = f" without {' and '.join(start_options)}"
    if last.exists():
        checkpoint = last
    else:
        checkpoint = run.continued_from or "nothing yet"
    if run.progress["step"] > run.sampler.first:
        saved = f"Saved: {checkpoint}."
    else:
        saved = f"This start did no step and wrote nothing. Saved before: {checkpoint}."
    print_line(f"Stopped at step {run.progress['step']:,} of {run.n_iters:,}: {reason}. {saved} "
               f"{remove} same command{without} continues.", write)
    close_run(ddp, AGAIN, reason)
    return {**result, "stopped": reason}


def find_start_options(words) -> list[str]:
    """Options of a command, a list of words, with which it would not continue what it has saved."""
    names = [word.partition("=")[0] for word in words]
    return [name for name in ("--fresh", "--resume") if name in names]


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
    close_run(ddp)   # so that cleanup_ddp does not write status.json
    if ddp.is_main:
        write_status(run.work_dir, 0, run.progress["finished"], step)
    return {"step": step}


def draw_curves(folder) -> None:
    """Draw curves.png of a run, if matplotlib is installed. An error here does not fail the run."""
    try:
        draw({folder.name: rows_of(folder)}, folder / "curves.png")
    except ImportError:   # matplotlib is optional
        return
    except Exception as error:
        print_line(f"ATTENTION: no picture was drawn: {type(error).__name__}: {error}")
        return
    print_line(f"  picture   {folder / 'curves.png'}")


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
