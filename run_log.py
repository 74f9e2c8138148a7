"""Where a run's numbers go: metrics.jsonl, the screen. Rank 0 only; on other ranks every call does nothing.

    log = RunLog("runs/demo", ddp.is_main, total_steps=2000)
    log.truncate(step)                                   # after a resume: drop rows that will come again
    log.metrics(step, {"loss": 2.81, "val/nll": 2.79})
    log.progress(step, loss=2.81, ppl=16.6, rate=12300)
    log.say("saved checkpoints/last.pt")
    log.close()

Writes RUN_DIR/metrics.jsonl, one JSON object per row. Other places for metrics belong behind RunLog.metrics.
Below it: the run directory itself (its lock, what to continue from, what is refused), for all training scripts.
"""

import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path


class RunLog:
    """run_dir: folder, made if missing. total_steps: for bar and time left. quiet: nothing on the screen.

    progress draws a bar on stderr where that is a terminal, and prints plain lines on stdout where it is not.
    """

    def __init__(self, run_dir, is_main, total_steps=None, quiet=False):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.is_main, self.total_steps, self.quiet = is_main, total_steps, quiet
        self.file = self.bar = self.began = None
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def metrics(self, step, values):
        """Append one row {"step": step, **values}; values are numbers. Another process sees it when this returns.

        nan and infinities are written as null: JSON has no word for them, and tables take null as missing.
        """
        if not self.is_main:
            return
        row = {"step": int(step)}
        for name, value in values.items():
            value = value if isinstance(value, int) else float(value)
            row[name] = value if math.isfinite(value) else None
        if self.file is None:
            if self.path.exists() and not _ends_a_line(self.path):
                raise ValueError(f"{self.path} ends in half a row, left by a run that was killed; expected "
                                 f"whole rows. Call truncate(step) with the step that the run resumes from.")
            self.file = open(self.path, "a", encoding="utf-8")
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def sync(self):
        """Have the rows on the disk: before the checkpoint that a next start continues from, and after a power cut."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def truncate(self, step):
        """Drop the rows after `step`, and a last row that a killed run left half written.

        The file is replaced in one go, so a kill here leaves the old or the new one. Raises ValueError for a
        row that is broken anywhere else.
        """
        if not self.is_main or not self.path.exists():
            return
        if self.file is not None:
            self.file.close()
            self.file = None
        kept = rows_up_to(self.path, step)
        if kept != self.path.read_text(encoding="utf-8", errors="replace"):
            write_text_atomic(self.path, kept)

    def progress(self, step, loss=None, ppl=None, rate=None, **more):
        """Show where the run is. rate: residues/s of all ranks; more: other short numbers or texts."""
        if not self.is_main or self.quiet:
            return
        now = time.monotonic()
        if self.began is None:
            self.began = step, now
            if sys.stderr.isatty():
                from tqdm import tqdm
                columns, lines = shutil.get_terminal_size()    # 80 x 24 if the terminal says 0 x 0
                self.bar = tqdm(total=self.total_steps, initial=step, file=sys.stderr, leave=False,
                                ncols=columns, nrows=lines, bar_format="{desc}  |{bar}|")
        fields = [f"{name} {_short(v)}" for name, v in [("loss", loss), ("ppl", ppl)] if v is not None]
        if rate is not None:
            fields.append(f"{rate:,.0f} res/s")
        first, since = self.began
        if self.total_steps and step > first:
            left = int((now - since) / (step - first) * max(self.total_steps - step, 0))
            fields.append(f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
        fields += [f"{name} {_short(value)}" for name, value in more.items()]
        where = f"step {step}/{self.total_steps}" if self.total_steps else f"step {step}"
        if self.bar is not None:
            self.bar.n = step
            self.bar.set_description_str("  ".join([where, *fields]))
            return
        line = where
        for field in fields:                 # at most 80 columns: what does not fit is left out
            if len(line) + 2 + len(field) > 80:
                break
            line += "  " + field
        print(line, flush=True)

    def say(self, text):
        """Print a line on stdout without breaking the bar."""
        if not self.is_main or self.quiet:
            return
        if self.bar is not None:
            self.bar.write(str(text), file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def close(self):
        """Close bar and file. Harmless twice; a later call of metrics opens the file again."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.file is not None:
            self.file.close()
            self.file = None


def write_text_atomic(path, text):
    """Write a text file so that a kill at any moment leaves the old file, or none, or the whole new one.

    Makes the folder if it is missing. Temporary name in the same folder, fsync, rename, fsync of the folder.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")   # two threads may end a run
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _short(value):
    return value if isinstance(value, str) else f"{value:.4g}"


def _ends_a_line(path):
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class RunLock:
    """Keeps a second live run out of a run directory.

    RUN_DIR/lock.json holds host, pid, start of the process, job id, and a beat (epoch seconds) that a thread
    renews every `every` seconds. A lock counts as dead if its process is gone on this host, or if its beat is
    older than `stale` seconds on another; the next run then takes it over.
    """
    every, stale = 15, 120
    silent = None    # (folder, beat) that this process has watched in vain

    def __init__(self, run_dir):
        """Take the lock, making the folder. Raises ValueError if a live run holds it, OSError if it cannot be
        written."""
        self.path = Path(run_dir) / "lock.json"
        if self.refuse_live(run_dir):
            dead = self.path.read_bytes()
            aside = self.path.with_name(f".lock.json.{os.getpid()}.tmp")
            self.path.replace(aside)
            if aside.read_bytes() != dead:   # another start has taken it over in between: put its lock back
                aside.replace(self.path)
                self.refuse_live(run_dir)
            aside.unlink(missing_ok=True)
        job = next((os.environ[k] for k in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
                    if k in os.environ), "")
        self.holder = {"host": socket.gethostname(), "pid": os.getpid(), "start": _process_start(os.getpid()),
                       "job": job}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_name(f".lock.json.{os.getpid()}.tmp")
        try:
            whole.write_text(self._text(), encoding="utf-8")
            try:
                os.link(whole, self.path)    # whole or not at all; of two that start at once, one gets it
            except FileExistsError:
                raise
            except OSError:                  # a file system without hard links
                with open(self.path, "x", encoding="utf-8") as file:
                    file.write(self._text())
        except FileExistsError:
            raise ValueError(f"{run_dir} was taken by another run at this moment. Expected one run per folder. "
                             "Give another --work_dir.") from None
        finally:
            whole.unlink(missing_ok=True)
        self.released, self.lost = threading.Event(), ""
        self.thread = threading.Thread(target=self._keep_beating, daemon=True, name="run-lock")
        self.thread.start()

    def _text(self):
        return json.dumps({**self.holder, "beat": time.time()})

    def _keep_beating(self):
        while not self.released.wait(self.every):
            try:
                try:
                    now = json.loads(self.path.read_text(encoding="utf-8"))
                except (FileNotFoundError, ValueError):   # removed or spoilt by hand: this run is alive, and says so
                    now = self.holder
                if any(now.get(key) != value for key, value in self.holder.items()):   # after a long standstill
                    self.lost = f"process {now.get('pid')} on {now.get('host')}"
                    return
                write_text_atomic(self.path, self._text())
            except OSError:   # a full disk is reported by what cannot be saved; the beat may come back
                continue

    def check(self):
        """Raise RuntimeError if another run has taken the folder over, which a run that stood still must learn."""
        if self.lost:
            raise RuntimeError(f"{self.path.parent} has been taken over by {self.lost}, as this run gave no sign of "
                               f"life for {self.stale} s. Nothing more is written here.")

    def release(self, at=None):
        """Give the folder free. at: where it is now, if it was renamed. Harmless when called twice."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join()          # or a beat under way would write it again
        if not self.lost:
            (self.path if at is None else Path(at) / "lock.json").unlink(missing_ok=True)

    @classmethod
    def _beats(cls, run_dir, beat, age):
        """Does the holder on another host renew its lock? Waits for that until it would be stale: what was killed there
        a moment ago must not keep the same command, now started here, from going on."""
        if cls.silent == (str(run_dir), beat):
            return False
        wrong_clock = 2 * cls.every + 5 if age < 3600 else 0   # clocks of hosts may differ, either way
        limit = min(max(cls.stale - age, wrong_clock), cls.stale)
        end = time.time() + limit
        if limit > 0:
            print(f"{run_dir} was in use {age:.0f} s ago on another host: waiting for a sign of life, at most "
                  f"{limit:.0f} s", flush=True)
        while time.time() < end:
            time.sleep(min(1.0, cls.every))
            try:
                if json.loads((Path(run_dir) / "lock.json").read_text(encoding="utf-8"))["beat"] != beat:
                    return True
            except FileNotFoundError:   # it has ended
                return False
            except (ValueError, KeyError, TypeError):
                continue
        cls.silent = str(run_dir), beat
        return False

    @classmethod
    def refuse_live(cls, run_dir, wait=True):
        """Raise ValueError naming the holder if a live run holds this folder. Returns whether there is a lock,
        of a dead run or of this process. wait: watch whether a holder on another host still beats; else a beat that is
        not stale counts as life."""
        try:
            lock = json.loads((Path(run_dir) / "lock.json").read_text(encoding="utf-8"))
            host, pid, age = lock["host"], lock["pid"], time.time() - lock["beat"]
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{run_dir}/lock.json cannot be read as a lock; expected JSON with host, pid and "
                             f"beat. Remove it if no run is using this folder.") from None
        here = host == socket.gethostname()
        if here and pid == os.getpid():
            return True
        start = _process_start(pid) if here else None
        if (start is not None and start == lock.get("start")) if here else (
                cls._beats(run_dir, lock["beat"], age) if wait else age < cls.stale):
            job = f", job {lock['job']}" if lock.get("job") else ""
            raise ValueError(f"{run_dir} is in use by process {pid} on {host}{job} (last sign of life {age:.0f} s "
                             f"ago). Expected one run per folder. Wait for it, stop it, or give another "
                             f"--work_dir.")
        return True


def rows_up_to(path, step):
    """The rows of a metrics.jsonl up to `step`, as text, without a last one that was left half written."""
    kept = []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):    # after the last line end: nothing, or half a row
        try:
            row_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: found {line[:60]!r}; expected a JSON object "
                             f"with 'step'. Repair or remove the line.") from None
        if row_step <= step:
            kept.append(line + "\n")
    return "".join(kept)


def _process_start(pid):
    """When the process started, in clock ticks since boot: with the pid a name not used again. None: no such."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()   # from field 3 on
        return None if fields[0] in "ZX" else int(fields[19])   # ended, though nobody has asked after it
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    try:   # no /proc: existence must do
        os.kill(pid, 0)
        return 0
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0


# ---- the run directory ----

def find_checkpoint(run_dir, resume, fresh, differences):
    """What to continue from: a path (text) or None. For rank 0; writes nothing.

    differences: called with the config.yaml of a run that came to no checkpoint; returns lines, none if alike.
    Raises ValueError for a run directory that is in use, that cannot be written, that holds another run, or that is
    none."""
    there = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "may not be written" if there.is_dir() else "is a file"
        raise ValueError(f"the run directory {run_dir} cannot be used: {there} {what}. Expected a folder that can be "
                         f"written, or made. Give another --work_dir.")
    RunLock.refuse_live(run_dir)
    if (run_dir / "STOP").exists() and not fresh:
        raise ValueError(f"{run_dir / 'STOP'} exists: this run was asked to stop. Remove the file to continue it.")
    last = run_dir / "checkpoints" / "last.pt"
    saved = any(last.with_name(name).exists() for name in ("last.pt", "last-1.pt"))   # the second: killed while saving
    if resume and saved and last.parent.resolve() != Path(resume).resolve().parent:
        raise ValueError(f"{run_dir} holds a run already, and --resume {resume} is of another. Expected a checkpoint "
                         f"of the same run. Give another --work_dir; or leave --resume out to continue this run.")
    half = {p.name for p in run_dir.glob(".lock.json.*.tmp")}   # of a start that came to nothing
    there = sorted({*os.listdir(run_dir)} - half) if run_dir.exists() else []
    if there and not {"lock.json", "metrics.jsonl", "checkpoints", "config.yaml", "status.json"} & set(there):
        raise ValueError(f"{run_dir} is not a run directory: it holds {', '.join(there[:5])}. Expected an empty or "
                         f"new folder, or that of a run. Give another --work_dir.")
    if "metrics.jsonl" in there and not fresh:
        rows_up_to(run_dir / "metrics.jsonl", 0)   # readable?
    if not resume and not fresh and not saved and "config.yaml" in there:
        different = differences(run_dir / "config.yaml")
        if different:
            raise ValueError(f"{run_dir} holds a run with another config, which came to no checkpoint:\n    " +
                             "\n    ".join(different) + "\n  Expected the same config. Give another --work_dir, or "
                             "--fresh to start over.")
    return str(resume) if resume else str(last) if saved and not fresh else None


def open_run(run_dir, fresh, folders):
    """Take the run directory: rank 0 only. --fresh renames a former run's folder, never deletes it.

    folders: those below it, in which a killed run may have left half a file."""
    former = fresh and run_dir.exists() and any(run_dir.iterdir())
    lock = RunLock(run_dir)
    if former:   # under the lock, so that of two at once one is refused
        old = next(p for k in range(1, 10**6) if not (p := run_dir.with_name(f"{run_dir.name}.old{k}")).exists())
        run_dir.rename(old)
        lock.release(at=old)
        print(f"--fresh: the former run is now in {old}", flush=True)
        lock = RunLock(run_dir)
    for folder in (run_dir, *(run_dir / name for name in folders)):
        for half in folder.glob(".*.tmp"):   # what a killed run was writing: the lock says that it is not running
            half.unlink(missing_ok=True)
    return lock


def write_status(run_dir, code, reason, step=None):
    """status.json for a start that did not train. See ddp_setup.close_run."""
    write_text_atomic(run_dir / "status.json", json.dumps({"code": code, "reason": reason, "step": step}))


def replace_status(run_dir, code, reason, since=math.inf):
    """Rank 0: a status.json that an earlier start left must not speak for this one, unless a live run goes on here.
    run_dir: None where the command did not say. since: what was written later (epoch seconds) stays."""
    if run_dir is None:
        return False
    run_dir = Path(run_dir)
    try:
        RunLock.refuse_live(run_dir, wait=False)   # it may be the last thing that a failing process does
        if (run_dir / "status.json").stat().st_mtime < since:
            write_status(run_dir, code, reason)
            return True
    except (ValueError, OSError):
        pass
    return False


def check_resume(state, path, script, needed, differences, may_change, model, things, fingerprint, world_size):
    """Refuse to continue from a checkpoint of something else. Returns its number of micro-batches per global batch.

    state: what the file `path` holds; it must have the keys `needed`. differences: called with its config; returns
    lines, those of the keys may_change left out. model: a state_dict of the same shapes. things, fingerprint: what is
    trained on, a word and {"n", "hash"}."""
    absent = [k for k in needed if not isinstance(state, dict) or k not in state]
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; expected a checkpoint of {os.path.basename(script)}.")
    different = differences(state["config"])
    if different:
        raise ValueError(f"{path} was trained with another config:\n    " + "\n    ".join(different) +
                         "\n  Expected the same but for " + ", ".join(may_change) + ". Give another --work_dir, or "
                         "--fresh to start over.")
    shapes, found = ({k: tuple(v.shape) for k, v in weights.items()} for weights in (model, state["model"]))
    if shapes != found:
        wrong = [k for k in {**shapes, **found} if shapes.get(k) != found.get(k)]
        raise ValueError(f"{path} holds another model: {len(wrong)} tensors differ, first {wrong[0]}: "
                         f"{found.get(wrong[0], 'absent')} in the file, {shapes.get(wrong[0], 'absent')} by the "
                         f"config. Give a checkpoint of this model, another --work_dir, or --fresh.")
    if state["data"] != fingerprint:
        raise ValueError(f"{path} was trained on other {things}, or in another order ({state['data']['n']:,}, hash "
                         f"{state['data']['hash']}; now {fingerprint['n']:,}, {fingerprint['hash']}). Give the same "
                         f"data, another --work_dir, or --fresh.")
    micro_batches = state["micro_batches"]
    if micro_batches % world_size:
        fits = [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
        raise ValueError(f"{path} has {micro_batches} micro-batches per step, which {world_size} ranks cannot "
                         f"share equally. Continue on {', '.join(map(str, fits))} ranks.")
    return micro_batches
