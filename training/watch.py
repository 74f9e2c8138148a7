"""What our training scripts add to ddp_setup.py: status.json, the stacks of all ranks, advice.

    watch_run(ddp, "runs/my", minutes=30)     # status.json: running; a file STOP asks for a stop
    beat(ddp)                                 # a sign of progress between two steps
    save_every(ddp, minutes=15)               # checkpoints by time: save_wanted asks for them
    close_run(ddp, 0, "all steps done")       # status.json: finished

A run folder's status.json holds {"code", "reason", "step"}. code: null while the run is on, else 0
finished, 75 start me again, 1 failed, 2 bad input, 70 no progress, 130 interrupted. In a process,
write_status is the only writer; the guard of rank 0, a process of its own, writes what its rank
cannot. Where ranks have no guard, a rank that fails writes it, and a timer in each rank writes the
stacks.

    rank    watch_run, start_watch  --(limit, run folder, stack file)-->  its guard
    guard   no progress: SIGQUIT to the rank --> stacks/rank_R.txt --> where the rank was
    hub     which rank is late --> last line FAILED, status.json
"""
import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from ddp_setup import (AGAIN, STOP_SIGNALS, Ddp, Record, end_watch, note_progress, start_watch,
                       tell_guard)
from training.files import read_text, write_text_atomic


def watch_run(ddp: Ddp, run_dir: str | os.PathLike | None = None, minutes: float = 20.0,
              signals: Iterable[str] = STOP_SIGNALS) -> None:
    """Watch for stop requests and hangs from here on, see start_watch, and note the run's outcome.

    Args:
        run_dir: for rank 0's status.json, the file STOP that asks for a stop, and the stacks,
            stacks/rank_R.txt; None: no status, and stacks below the temporary folder.
        minutes: limit without progress; 0: none. signals: names of those that ask for a stop."""
    if run_dir is not None:
        run_dir = os.path.abspath(run_dir)
    start_watch(ddp, os.path.join(run_dir, "STOP") if run_dir else "", minutes, signals)
    record = RunRecord(ddp, run_dir)
    ddp.state.record = record
    if ddp.state.watch.limit:
        record.open_stacks()
    tell_guard(ddp, watch={"run_dir": run_dir, "stacks": record.stacks and record.stacks.name})
    beat(ddp)
    record.note(None, "running")


def beat(ddp: Ddp) -> None:
    """A sign of progress between step boundaries: during evaluation, sampling, saving."""
    note_progress(ddp)


def save_every(ddp: Ddp, minutes: float) -> None:
    """Have save_wanted ask for a checkpoint when so many minutes have passed since the last one, or
    since this call. 0: never."""
    ddp.state.record.save_period = minutes * 60
    note_saved(ddp)


def note_saved(ddp: Ddp) -> None:
    """A checkpoint has been written: the time until save_wanted asks for one begins anew."""
    ddp.state.record.saved_at = time.monotonic()


def save_wanted(ddp: Ddp) -> bool:
    """Whether rank 0 asks all ranks for a checkpoint, see save_every; False on other ranks."""
    period = getattr(ddp.state.record, "save_period", 0.0)   # 0: a Record of ddp_setup
    if not ddp.is_main or not period:
        return False
    return time.monotonic() - ddp.state.record.saved_at >= period


def close_run(ddp: Ddp, code: int | None = None, reason: str = "") -> None:
    """End the watch and write code and reason to status.json. All ranks must then reach cleanup_ddp
    within the limit of the watch.

    code: as in status.json; None: only end the watch, and leave status.json as it is."""
    if code is not None:
        ddp.state.record.note(code, reason)
    end_watch(ddp)


class RunRecord(Record):
    """What ddp_setup calls when the run ends, see Record there."""

    def __init__(self, ddp: Ddp, run_dir: str | None):
        self.ddp = ddp
        self.run_dir = run_dir
        self.save_period = 0.0   # seconds, see save_every
        self.saved_at = 0.0      # of the clock time.monotonic

    def open_stacks(self):
        """Open the file for stack traces. A guard asks for them by SIGQUIT: faulthandler answers
        even while a library call holds the GIL."""
        with contextlib.suppress(OSError):   # without a file the stacks go to stderr
            if self.run_dir:
                folder = os.path.join(self.run_dir, "stacks")
            else:
                folder = tempfile.mkdtemp(prefix="ddp-stacks-")
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank_{self.ddp.rank}.txt")
            if os.path.islink(path):   # its file is not ours to append to
                os.unlink(path)
            self.stacks = open(path, "a")
        if self.stacks is not None and self.ddp.state.guard is not None:
            faulthandler.register(signal.SIGQUIT, self.stacks)

    def note(self, code, reason):
        """Write status.json: on rank 0, and on any rank that fails without a guard."""
        if self.ddp.state.watch is None or self.run_dir is None:
            return
        if code in (None, 0, AGAIN) and not self.ddp.is_main:
            return
        with contextlib.suppress(OSError, ValueError):   # perhaps a full disk is the failure itself
            write_status(self.run_dir, code, reason, self.ddp.state.watch.step)

    def advice(self, retry):
        if not retry:
            advice = "Mend the cause first."
        elif self.ddp.state.checkpoint:
            advice = "To go on, give the same command again."
        else:
            advice = "The same command starts from the beginning."
        if self.ddp.state.checkpoint:   # ddp_setup names it
            return advice
        return f"No checkpoint yet. {advice}"

    def close(self):
        """Forget the run folder, and close the file of the stacks; an empty one is removed."""
        stacks = self.stacks
        self.stacks = None
        self.run_dir = None
        if stacks is None:
            return
        tell_guard(self.ddp, watch={"stacks": None})
        if self.ddp.state.guard is not None:
            faulthandler.unregister(signal.SIGQUIT)
            with contextlib.suppress(ValueError):   # not the main thread
                signal.signal(signal.SIGQUIT, signal.SIG_IGN)   # a late request of the guard
        stacks.close()
        with contextlib.suppress(OSError):
            if os.path.getsize(stacks.name) == 0:
                os.unlink(stacks.name)
                os.rmdir(os.path.dirname(stacks.name))


# ---------------------------------------------------------------- status.json
def write_status(run_dir: str | os.PathLike, code: int | None, reason: str,
                 step: int | None = None) -> None:
    """Write status.json: under a temporary name, fsync, rename. Raises: OSError, or ValueError if
    something else than a file has that name."""
    text = json.dumps({"code": code, "reason": reason, "step": step}) + "\n"
    write_text_atomic(Path(run_dir) / "status.json", text)


def read_status(run_dir: str | os.PathLike | None) -> dict:
    """status.json as a dict, or {} if it is missing or cannot be read. run_dir: may be None."""
    if run_dir is None:
        return {}
    try:
        status = json.loads(read_text(Path(run_dir) / "status.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}
