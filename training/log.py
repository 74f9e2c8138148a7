"""Log a run's numbers to metrics.jsonl and the screen. On ranks other than 0, calls do nothing.

    log = RunLog("runs/demo", ddp.is_main, total_steps=2000)
    log.truncate(step)                # after a resume: drop rows that will be written again
    log.metrics(step, {"loss": 2.81, "val/loss": 2.79})
    log.progress(step, loss=2.81, ppl=16.6, rate=(12300, "res"))
    log.say("saved checkpoints/last.pt")
    log.close()

Writes RUN_DIR/metrics.jsonl, one JSON object per row. `track` also sends the rows to TensorBoard
and Weights & Biases. A tracker that fails is reported once and then no longer used.
"""

import datetime
import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_setup import Ddp
from training.config import config_to_dict
from training.files import naming, write_text_atomic
from training.trackers import TensorBoard, Wandb

DISK_FULL = 5.0         # seconds until a row is written once more
LINE_SECONDS = 30       # between two lines of a log file that say how far some work is


class RunLog:
    """Writes the metrics of a run to its file, to the screen and to trackers.

    run_dir: folder, made if missing. total_steps: for the progress and the time left.
    """

    def __init__(self, run_dir, is_main, total_steps):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.is_main = is_main
        self.total_steps = total_steps
        self.file = None       # metrics.jsonl, open from the first row on
        self.bar = None        # the line on a terminal that shows the progress
        self.began = None      # (step, time) of the first progress()
        self.trackers = []
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def track(self, config, step, tensorboard=False, wandb=None):
        """Send all further rows to trackers too.

        config: plain dict, recorded with the run. step: the step that the run starts from.
        tensorboard: write RUN_DIR/tensorboard. wandb: None or {"project", "name", "mode"}, each
        optional."""
        if not self.is_main:
            return
        folder = self.path.parent
        if tensorboard:
            self._try("TensorBoard", lambda: self.trackers.append(TensorBoard(folder, step)))
        if wandb is not None:
            self._try("W&B", lambda: self.trackers.append(Wandb(folder, wandb, config)))

    def _try(self, name, action, *arguments):
        """Call action(*arguments), which uses a tracker. Returns: whether it succeeded. An error is
        only reported: it must not end the run."""
        try:
            action(*arguments)
            return True
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            self.say(f"ATTENTION: {name} is not used: {type(error).__name__}: {reason}")
            return False

    def metrics(self, step, values):
        """Append one row {"step": step, **values}; other processes see it when this returns.

        values: numbers, or texts such as a host name. nan and infinities are written as null: JSON
        cannot express them, and tables read null as missing.
        """
        if not self.is_main:
            return
        row = {"step": int(step)}
        for name, value in values.items():
            if not isinstance(value, (int, str)):
                value = float(value)
            row[name] = value if isinstance(value, str) or math.isfinite(value) else None
        with naming(self.path):
            if self.file is None:
                self.file = open(self.path, "a", encoding="utf-8")
            self.file.write(json.dumps(row) + "\n")
            self._flush()
        known = {name: value for name, value in row.items() if value is not None}
        working = []
        for tracker in self.trackers:
            if self._try(tracker.name, tracker.log, step, known):
                working.append(tracker)
        self.trackers = working

    def _flush(self):
        """Write the row out; once more after some seconds if the disk is full, as that may pass."""
        try:
            self.file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(DISK_FULL)
            self.file.flush()   # of what it still holds

    def sync(self):
        """Wait until the rows are on disk. Call it before saving a checkpoint that follows them."""
        if self.file is not None:
            with naming(self.path):
                os.fsync(self.file.fileno())

    def truncate(self, step):
        """Drop the rows after `step`, and a last row that a killed run left incomplete. Call it
        before the first row is written.

        The file is replaced atomically, so a kill leaves the old or the new one. Raises ValueError
        for any other broken row.
        """
        if self.is_main and self.path.exists():
            write_text_atomic(self.path, rows_up_to(self.path, step))

    def progress(self, step, rate=None, **numbers):
        """Show the progress: on a terminal (see on_terminal) in one line, which stays at its
        bottom, else as a line on stdout.

        rate: (units per second of all ranks, unit), such as (12300, "res"). numbers: further values
        to show, by name.
        """
        if not self.is_main:
            return
        now = time.monotonic()
        if self.began is None:
            self.began = (step, now)
            if on_terminal():
                self.bar = progress_bar(True, bar_format="{desc}")   # the text says how far it is
        fields = [f"step {step}/{self.total_steps}"]
        for name, value in numbers.items():   # four digits, with zeros, so that columns line up
            digits = f"{value:,}" if isinstance(value, int) else f"{value:#.4g}".rstrip(".")
            fields.append(f"{name} {digits}")
        if rate is not None:
            per_second, unit = rate
            digits = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:#.3g}"
            fields.append(f"{digits} {unit}/s")
        first, since = self.began
        if step > first:
            left = (now - since) / (step - first) * (self.total_steps - step)
            fields.append(f"ETA {datetime.timedelta(seconds=int(left))}")
        line = "  ".join(fields)
        if self.bar is not None:
            self.bar.set_description_str(line)
        else:
            print_line(line)

    def say(self, text):
        """Print a line on stdout, above the one that shows the progress."""
        if not self.is_main:
            return
        if self.bar is None:
            print_line(text)
            return
        with self.bar.external_write_mode(sys.stdout):
            print_line(text)

    def close(self):
        """Close bar, file and trackers. May be called twice; metrics() opens the file again."""
        for tracker in self.trackers:
            self._try(tracker.name, tracker.close)
        self.trackers = []
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.file is not None:
            self.file.close()
            self.file = None


def open_log(run, ddp) -> RunLog:
    """Open the RunLog of a run, and drop its rows after the step that the run continues from."""
    monitoring = run.config.monitoring
    step = run.progress["step"]
    log = RunLog(run.work_dir, ddp.is_main, run.n_iters)
    log.truncate(step if run.continued_from else -1)
    log.track({**config_to_dict(run.config), "world_size": ddp.world_size}, step,
              monitoring.tensorboard, monitoring.wandb)
    return log


def on_terminal() -> bool:
    """Whether both outputs are a terminal, so that a line of progress can stay at its bottom. With
    `| tee`, what is printed above that line would come late, and the line twice."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def progress_bar(is_main: bool, **options):
    """A tqdm bar on stderr, which goes when it ends; none without a terminal or on other ranks.

    options: of tqdm, such as total, unit and desc."""
    from tqdm import tqdm
    columns, lines = shutil.get_terminal_size()    # 80 x 24 if the size is unknown
    return tqdm(file=sys.stderr, disable=not (is_main and sys.stderr.isatty()), leave=False,
                ncols=columns, nrows=lines, **options)


def show_progress(items: Sequence, ddp: Ddp, text: str) -> Iterator:
    """Yield the items, and show on rank 0 how many are done.

    On a terminal it is a bar on stderr, which goes when it ends; else a line on stdout now and
    then, if it takes long. text: what is done, such as "reference, validation pairs"."""
    if not ddp.is_main:
        yield from items
    elif on_terminal():
        yield from progress_bar(True, iterable=items, desc=text,
                                bar_format="{desc} {percentage:3.0f} % |{bar}|")
    else:
        shown = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - shown > LINE_SECONDS:
                print_line(f"{text}: {done / len(items):.0%}")
                shown = time.monotonic()
            yield item


def print_line(text, write=print) -> None:
    """Print a line. If the reader of stdout is gone, such as `tee` after Ctrl-C or a terminal, drop
    output: the run must go on and save. write: print, or a function that prints on rank 0 only."""
    try:
        write(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):   # of a pipe, of a terminal
            error.filename = "standard output"   # else a disk is full, and nobody knows which
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):    # what a bar has left
            os.dup2(nowhere, sys.stderr.fileno())
        os.dup2(nowhere, sys.stdout.fileno())


def rows_up_to(path, step) -> str:
    """The rows of a metrics.jsonl up to `step`, as text, without an incomplete last row."""
    kept = []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):   # the last: empty or incomplete
        try:
            wanted = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: found {line[:60]!r}; expected a JSON object "
                             f"with 'step'. Repair or remove the line.") from None
        if wanted:
            kept.append(line + "\n")
    return "".join(kept)


def read_rows(path) -> list[dict]:
    """All complete rows of a metrics.jsonl, as dicts; an empty list if there is no such file."""
    if not Path(path).exists():
        return []
    return [json.loads(line) for line in rows_up_to(path, math.inf).split("\n")[:-1]]
