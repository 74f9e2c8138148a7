"""Log a run's numbers to metrics.jsonl and the screen. On ranks other than 0, calls do nothing.

    log = RunLog("runs/demo", ddp.is_main, total_steps=2000)
    log.truncate(step)                # after a resume: drop rows that will be written again
    log.metrics(step, {"loss": 2.81, "val/loss": 2.79})
    log.progress(step, loss=2.81, ppl=16.6, rate=12300)
    log.say("saved checkpoints/last.pt")
    log.close()

Writes RUN_DIR/metrics.jsonl, one JSON object per row. `track` also sends the rows to TensorBoard
and Weights & Biases. A tracker that fails is reported once and then no longer used.
"""

import contextlib
import datetime
import errno
import json
import math
import os
import secrets
import shutil
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

TRACKER_SECONDS = 60    # limit for a run to wait for a tracker's server


class RunLog:
    """Writes the metrics of a run to its file, to the screen and to trackers.

    run_dir: folder, made if missing. total_steps: for the bar and the time left.
    """

    def __init__(self, run_dir, is_main, total_steps):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.is_main, self.total_steps = is_main, total_steps
        self.file = self.bar = self.began = None   # began: (step, time) of the first progress()
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

    def metrics(self, step, values, histograms=None):
        """Append one row {"step": step, **values}; other processes see it when this returns.

        values: numbers, or texts such as a host name. nan and infinities are written as null: JSON
        cannot express them, and tables read null as missing.
        histograms: {name: training.meter.Histogram}, for trackers only.
        """
        if not self.is_main:
            return
        row = {"step": int(step)}
        for name, value in values.items():
            if not isinstance(value, (int, str)):
                value = float(value)
            row[name] = value if isinstance(value, str) or math.isfinite(value) else None
        if self.file is None:
            self.file = open(self.path, "a", encoding="utf-8")
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        known = {name: value for name, value in row.items() if value is not None}
        self.trackers = [tracker for tracker in self.trackers
                         if self._try(tracker.name, tracker.log, step, known, histograms or {})]

    def sync(self):
        """Wait until the rows are on disk. Call it before saving a checkpoint that follows them."""
        if self.file is not None:
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
        """Show the progress: as a bar on stderr if that is a terminal, else as a line on stdout.

        rate: residues/s of all ranks. numbers: further values to show, by name.
        """
        if not self.is_main:
            return
        now = time.monotonic()
        if self.began is None:
            self.began = step, now
            if sys.stderr.isatty():
                from tqdm import tqdm
                columns, lines = shutil.get_terminal_size()    # 80 x 24 if the size is unknown
                self.bar = tqdm(total=self.total_steps, initial=step, file=sys.stderr, leave=False,
                                ncols=columns, nrows=lines, bar_format="{desc}  |{bar}|")
        fields = [f"step {step}/{self.total_steps}"]
        for name, value in numbers.items():   # four digits, with zeros, so that columns line up
            digits = f"{value:,}" if isinstance(value, int) else f"{value:#.4g}".rstrip(".")
            fields.append(f"{name} {digits}")
        if rate is not None:
            fields.append(f"{rate:,.0f} res/s")
        first, since = self.began
        if step > first:
            left = (now - since) / (step - first) * (self.total_steps - step)
            fields.append(f"ETA {datetime.timedelta(seconds=int(left))}")
        line = "  ".join(fields)
        if self.bar is not None:
            self.bar.n = step
            self.bar.set_description_str(line)
        else:
            print_line(line)

    def say(self, text):
        """Print a line on stdout without breaking the bar."""
        if not self.is_main:
            return
        with (self.bar.external_write_mode(sys.stdout) if self.bar is not None else
              contextlib.nullcontext()):
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


class TensorBoard:
    """Curves for `tensorboard --logdir RUN_DIR`. If a resumed run logs rows again, they replace the
    earlier ones."""
    name = "TensorBoard"

    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step, row, histograms):
        for name, value in row.items():
            if name != "step":
                add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
                add(name, value, step)
        for name, h in histograms.items():
            self.writer.add_histogram_raw(name, h.edges[0], h.edges[-1], sum(h.counts), h.total,
                                          h.squares, h.edges[1:], h.counts, step)
        self.writer.flush()

    def close(self):
        self.writer.close()


class Wandb:
    """A run on Weights & Biases. A resumed start continues it by its id in RUN_DIR/wandb_id.

    settings: {"project", "name", "mode"}, each optional. If neither WANDB_MODE nor `mode` is given
    and the server cannot be reached, it writes RUN_DIR/wandb for `wandb sync`. Rows that a resumed
    run logs again appear twice there."""
    name = "W&B"

    def __init__(self, folder, settings, config):
        import wandb
        path = folder / "wandb_id"
        if not path.exists():
            write_text_atomic(path, secrets.token_hex(4) + "\n")
        mode = os.environ.get("WANDB_MODE") or settings.get("mode") or (
            "online" if _is_reachable("api.wandb.ai") else "offline")
        limits = {name: TRACKER_SECONDS for name in ("login_timeout", "finish_timeout")
                  if hasattr(wandb.Settings(), name)}
        self.run = wandb.init(project=settings.get("project") or "protein-ddp", mode=mode,
                              name=settings.get("name") or folder.name, dir=str(folder),
                              id=path.read_text().strip(), resume="allow", config=config,
                              settings=wandb.Settings(**limits))
        self.run.define_metric("*", step_metric="step")

    def log(self, step, row, histograms):
        import wandb
        self.run.log({**row, **{name: wandb.Histogram(np_histogram=(h.counts, h.edges))
                                for name, h in histograms.items()}})

    def close(self):
        self.run.finish()


def _is_reachable(host):
    """Whether there is a proxy, or a connection to `host` opens within 3 seconds."""
    if "https" in urllib.request.getproxies():
        return True
    try:
        socket.create_connection((host, 443), timeout=3).close()
        return True
    except OSError:
        return False


def write_text_atomic(path, text):
    """Write a text file, see write_whole."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path, write):
    """Call write(binary file) so that a kill at any moment leaves the old file, none, or the new.

    Makes the folder if it is missing. Writes under a temporary name, fsync, rename, fsync of the
    folder. Raises: ValueError for a device, pipe or folder, which the rename would replace.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is no file; expected the name of a file.")
    path = Path(os.path.realpath(path))   # follow links: replace the file, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = f"{os.getpid()}-{threading.get_ident()}"   # a notebook may write it from two threads
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:   # on a full disk it is missing
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


def print_line(text, write=print):
    """Print a line. If the reader of stdout is gone, such as `tee` after Ctrl-C or a terminal, drop
    output: the run must go on and save. write: print, or a function that prints on rank 0 only."""
    try:
        write(text, flush=True)
    except OSError as e:
        if e.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rows_up_to(path, step):
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


def read_rows(path):
    """All complete rows of a metrics.jsonl, as dicts; an empty list if there is no such file."""
    if not Path(path).exists():
        return []
    return [json.loads(line) for line in rows_up_to(path, math.inf).split("\n")[:-1]]
