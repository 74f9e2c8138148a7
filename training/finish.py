"""The end of a run: its result or how to go on, on the screen, in status.json and as a picture."""
import functools
from pathlib import Path

from ddp_setup import AGAIN, end_watch, print0
from training.log import print_line, read_rows
from training.plot import draw, rows_of


def finish_run(run, log, ddp, reason, result, seconds, lines) -> dict:
    """The end of training: close the log, print the result or how to go on, give the folder back.

    reason: why the run stopped before its end. seconds: duration of training. lines: function that
    returns lines of text on the result of a finished run.
    Returns: `result`; if the run stopped before its end, with "stopped": reason."""
    log.close()
    write = functools.partial(print0, ddp)
    finished = run.progress["finished"]
    if finished:
        loss = f", training loss {result['loss']:.4f}" if "loss" in result else ""
        if "mfu" in result:
            loss += f", mfu {result['mfu']:.3f}"
        text = [f"Finished at step {result['step']:,} ({finished}) after {seconds / 60:.1f} "
                f"min{loss}", *lines()]
        print_line("\n".join(text), write)
        if ddp.is_main:
            draw_curves(run.work_dir)
        end_watch(ddp, 0, finished)
        return result
    last = run.work_dir / "checkpoints" / "last.pt"
    checkpoint = last if last.exists() else run.continued_from or "nothing yet"
    saved = f"Saved: {checkpoint}."
    if run.progress["step"] == run.sampler.first:
        saved = f"This start did no step and wrote nothing. Saved before: {checkpoint}."
    print_line(f"Stopped at step {run.progress['step']:,} of {run.n_iters:,}: {reason}. {saved} "
               f"{ddp.state.advice}", write)
    end_watch(ddp, AGAIN, reason)
    return {**result, "stopped": reason}


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
    """Draw curves.png of a run, if matplotlib is installed. An error here does not fail the run."""
    try:
        draw({folder.name: rows_of(folder)}, folder / "curves.png")
    except ImportError:   # matplotlib is optional
        return
    except Exception as error:
        print_line(f"ATTENTION: no picture was drawn: {type(error).__name__}: {error}")
        return
    print_line(f"  picture   {folder / 'curves.png'}")
