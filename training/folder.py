"""The run folder: taking it, the lock that keeps a second run out, status.json.

    lock = open_run(folder, fresh, ("checkpoints", "samples"))   # from here on the folder is ours
    ...
    lock.release()

A run folder holds config.yaml, metrics.jsonl, checkpoints/ and status.json; while a run is on also
lock.json. A user's file STOP asks the run to stop, and no run starts until it is removed.
"""
import contextlib
import json
import math
import os
import socket
import threading
import time
from pathlib import Path

from ddp_setup import BAD_INPUT, barrier, process_fields
from training.config import dump_yaml
from training.files import read_text, write_text_atomic
from training.loop import is_finished
from training.watch import close_run, read_status, save_every, watch_run, write_status

# A folder with none of these names in it is not taken for a run folder.
MARKS = {"lock.json", "metrics.jsonl", "checkpoints", "config.yaml", "status.json"}
FILES = {"lock.json", "metrics.jsonl", "config.yaml"}   # that a run writes, besides *.pt
FOLDERS = {"checkpoints", "samples", "designs", "reference"}   # that a run makes
LATEST_BEAT = 1e11   # epoch seconds: year 5138; later, or nan, is no time of a clock
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def take_folder(run, ddp, fresh, folders) -> None:
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
    save_every(ddp, run.config.training.snapshot_minutes)


def open_run(run_dir, fresh, folders):
    """Take the run folder and return its RunLock. --fresh renames a former run's folder.

    folders: names of its subfolders in which a killed run may have left unfinished files.
    """
    if run_dir.is_symlink():
        run_dir = run_dir.resolve()   # --fresh renames what the link leads to
    rename = fresh and run_dir.exists() and any(run_dir.iterdir())
    try:
        lock = RunLock(run_dir)
    except OSError as e:
        raise ValueError(f"--work_dir: the run directory {run_dir} cannot be made or written: "
                         f"{e.strerror}. Give another --work_dir.") from None
    if rename:   # under the lock, so that only one of two simultaneous starts does it
        _rename_former(run_dir, lock)
        lock = RunLock(run_dir)
    for folder in (run_dir, *(run_dir / name for name in folders)):
        for unfinished in folder.glob(".*.tmp"):   # of a killed run: the lock shows that none runs
            unfinished.unlink(missing_ok=True)
    return lock


def _rename_former(run_dir, lock):
    """Rename a run folder, which `lock` holds, to the first free NAME.oldK; release the lock.

    Raises: ValueError."""
    number = 1
    while (old := run_dir.with_name(f"{run_dir.name}.old{number}")).exists():
        number += 1
    try:
        run_dir.rename(old)
    except OSError as e:   # for example, a volume is mounted there
        lock.release()
        raise ValueError(f"--fresh cannot rename {run_dir}: {e.strerror}. Give another "
                         "--work_dir.") from None
    lock.path = old / "lock.json"
    lock.release()
    print(f"--fresh: the former run is now in {old}", flush=True)


def names_in(run_dir) -> list[str]:
    """Sorted names of what a run folder holds; an empty list if there is no such folder."""
    if not run_dir.exists():
        return []
    names = [path.name for path in run_dir.iterdir()]
    return sorted(name for name in names
                  if not name.startswith(".lock.json."))   # left by a killed start


def refuse_unwritable(run_dir) -> None:
    """Raise ValueError, naming --work_dir, if the folder cannot be made or written."""
    nearest = run_dir.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
    except OSError as error:
        raise ValueError(f"--work_dir: the run directory {str(run_dir):.200} cannot be made: "
                         f"{error.strerror}. Give another --work_dir.") from None
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    what = "may not be written" if nearest.is_dir() else "is a file"
    raise ValueError(f"--work_dir: the run directory {run_dir} cannot be used: {nearest} {what}. "
                     "Expected a folder that can be written, or made. Give another --work_dir.")


def refuse_folders_as_files(run_dir) -> None:
    """Raise ValueError for a folder with the name of a file that a run writes, such as best.pt, or
    a file with the name of a folder, such as checkpoints."""
    for path in sorted([*run_dir.glob("*"), *run_dir.glob("checkpoints/*")]):
        is_folder = path.is_dir()
        if is_folder and (path.name in FILES or path.suffix == ".pt"):
            raise ValueError(f"{path} is a folder; expected a file there, which the run writes. "
                             "Move it away, or give another --work_dir.")
        if path.name in FOLDERS and not is_folder:
            raise ValueError(f"{path} is no folder; expected one there, which the run makes. Move "
                             "it away, or give another --work_dir.")


def check_lock(run, ddp) -> None:
    """Raise RuntimeError if another run took over the folder while this one was suspended."""
    if run.lock and run.lock.lost:
        close_run(ddp)   # so that this failure is not written to the other run's status.json
        raise RuntimeError(f"{run.work_dir} has been taken over by {run.lock.lost}, as this run "
                           f"gave no sign of life for {run.lock.stale} s. Nothing more is written "
                           "here.")


# ---------------------------------------------------------------- lock
class RunLock:
    """Keeps a second live run out of a run folder.

    RUN_DIR/lock.json holds host, process id, start time of the process, job id, and a heartbeat
    (epoch seconds), which a thread renews every `every` seconds. A lock is dead if it is of this
    host and its process is gone, or if it is of another host and its heartbeat is older than
    `stale` seconds. The next run then takes it over.
    """
    every = 15      # seconds
    stale = 120     # seconds; 8 heartbeats may fail before another host takes over
    silent = None   # (folder, heartbeat) of a lock that this process has watched and found dead

    def __init__(self, run_dir):
        """Take the lock, making the folder. Raises ValueError if a live run holds it, OSError if it
        cannot be written."""
        self.path = Path(run_dir) / "lock.json"
        temporary = self.path.with_name(f".lock.json.{os.getpid()}.tmp")
        dead = self.refuse_live(run_dir)
        if dead is not None:
            self._remove_dead(dead, temporary, run_dir)
        elif self.path.is_symlink():   # it leads to nothing
            self.path.unlink(missing_ok=True)
        self.holder = {"host": socket.gethostname(), "pid": os.getpid(),
                       "start": process_start(os.getpid()), "job": _job_id()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._create(temporary)
        except FileExistsError:
            raise ValueError(f"{run_dir} was taken by another run at this moment. Expected one run "
                             "per folder. Give another --work_dir.") from None
        finally:
            temporary.unlink(missing_ok=True)
        self.released = threading.Event()
        self.lost = ""   # who took over the folder while this process was suspended
        self.thread = threading.Thread(target=self._renew, daemon=True, name="run-lock")
        self.thread.start()

    def release(self):
        """Release the folder. Harmless when repeated."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join()          # else a late heartbeat could write the file again
        if not self.lost:
            self.path.unlink(missing_ok=True)

    @classmethod
    def refuse_live(cls, run_dir, wait=True):
        """Raise ValueError, naming the holder, if a live run holds this folder.

        wait: for a holder on another host, wait for a new heartbeat; if False, a heartbeat that is
        not stale is enough. Returns: text of the lock if it is dead or this process', else None.
        """
        try:
            text = read_text(Path(run_dir) / "lock.json")
            lock = json.loads(text)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError, OSError):
            lock = None
        if not is_lock(lock):
            raise ValueError(f"{run_dir}/lock.json cannot be read as a lock; expected JSON with "
                             "host, pid and beat. Remove it if no run is using this "
                             "folder.")
        host = lock["host"]
        pid = lock["pid"]
        age = time.time() - lock["beat"]
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

    def _remove_dead(self, dead, temporary, run_dir):
        """Remove the lock file if its text is still `dead`; another start may be faster."""
        with contextlib.suppress(FileNotFoundError):   # another start has removed it
            self.path.replace(temporary)
            if temporary.read_text(encoding="utf-8") != dead:   # a new lock: put it back
                temporary.replace(self.path)
                self.refuse_live(run_dir)

    def _create(self, temporary):
        """Make the lock file; of two starts one gets it, the other FileExistsError."""
        temporary.unlink(missing_ok=True)    # perhaps a link, which would be written through
        temporary.write_text(self._text(), encoding="utf-8")
        try:
            os.link(temporary, self.path)    # atomic
        except FileExistsError:
            raise
        except OSError:                      # there are no hard links
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(self._text())

    def _text(self):
        return json.dumps({**self.holder, "beat": time.time()})

    def _renew(self):
        while not self.released.wait(self.every):
            try:
                lock = self._read()
                if any(lock.get(key) != value for key, value in self.holder.items()):
                    self.lost = f"process {lock.get('pid')} on {lock.get('host')}"   # new owner
                    return
                write_text_atomic(self.path, self._text())
            except OSError:   # such as a full disk, which the next checkpoint will report
                continue

    def _read(self):
        """What the lock file holds; our own where someone has removed or damaged it."""
        try:
            lock = json.loads(read_text(self.path))
        except (FileNotFoundError, ValueError, RecursionError):
            return self.holder
        return lock if isinstance(lock, dict) else self.holder

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
                if json.loads(read_text(Path(run_dir) / "lock.json"))["beat"] != beat:
                    return True
            except FileNotFoundError:   # that run has ended
                return False
            except (ValueError, KeyError, TypeError, RecursionError):   # it is being written
                continue
        cls.silent = str(run_dir), beat
        return False


def is_lock(lock):
    """Whether a value from JSON has the fields of a lock: host, pid and beat."""
    if not isinstance(lock, dict) or not isinstance(lock.get("host"), str):
        return False
    pid = lock.get("pid")
    beat = lock.get("beat")
    has_pid = type(pid) is int and 0 < pid < 2**31
    return has_pid and type(beat) in (int, float) and 0 <= beat < LATEST_BEAT


def _job_id():
    """Id of the batch job that this process belongs to, or ""."""
    for name in JOB_VARIABLES:
        if name in os.environ:
            return os.environ[name]
    return ""


def process_start(pid):
    """When a process started, in clock ticks since boot, or None if it is gone.

    Process ids are reused; id and start time together identify a process."""
    try:
        fields = process_fields(pid)
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


# ---------------------------------------------------------------- status.json
def replace_status(run_dir, code, reason, since=math.inf, former=None):
    """Replace the status.json of an earlier start by the outcome of this start.

    If this start was refused (code BAD_INPUT) and an earlier one had taken steps, its outcome is
    kept or put back: a mistyped command does not change what became of the run.
    Returns: whether the file was written. It is not if there is none, or while a run is alive.

    Args:
        run_dir: None if the command did not name a run folder.
        since: epoch seconds; a file written after that is kept.
        former: status.json as this start found it, where it has been replaced since.
    """
    if run_dir is None:
        return False
    try:
        RunLock.refuse_live(run_dir, wait=False)   # this process is failing: do not wait
        if (Path(run_dir) / "status.json").stat().st_mtime >= since:
            return False
        former = former or read_status(run_dir)
        if code == BAD_INPUT and tells_an_outcome(former):
            write_status(run_dir, former["code"], former.get("reason"), former.get("step"))
        else:
            write_status(run_dir, code, reason)
        return True
    except (ValueError, OSError):
        return False


def tells_an_outcome(status) -> bool:
    """Whether a status.json tells how a run ended that had taken steps, or had none to take."""
    code = status.get("code")
    return code == 0 or type(code) is int and status.get("step") is not None
