"""The fate of a run: it stops in good order, a hang ends it, and status.json tells how it ended.

Copy this file beside ddp_setup.py and ddp_guard.py for jobs that run for hours:

    with setup_ddp(seed=0) as ddp, watch_run(ddp, "runs/my", minutes=20) as watch:
        for step, batch in enumerate(batches, 1):
            ...
            if watch.stop_reason(step):          # the same on all ranks
                save_checkpoint("runs/my/last.pt", ddp, ...)
                watch.saved("runs/my/last.pt", step)
                sys.exit(STOPPED)

    signal to any rank           \\                          summed over ranks
    DDP_DEADLINE (rank 0 looks)   a request --> flag: 1.0 --------------------> stop_reason, on all
    RUN_DIR/STOP (rank 0 looks)  /

A run folder holds `lock`, which keeps a second run out; `stacks/rank_R.txt`, where each rank is at
a hang; and `status.json`, {"code", "reason", "suspects", "step", "run"}: code null while the run is
on, else 0 finished, 75 stopped with work left, 1 failed, 2 bad input, 70 no progress, 130
interrupted, or that of sys.exit. "suspects" is the host of a rank that died or is late; "" if no
host is known to be at fault, as after an exception. It is written by rank 0 at the start and at a
good end; at a failure by who prints it, which is the rank, or its guard if the rank is dead or
hangs (ddp_guard.py).

Environment that is read: DDP_DEADLINE, the time in epoch seconds at which a run is to stop.
"""
import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import secrets
import signal
import struct
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from ddp_guard import REFUSED, tells_a_failure, write_status
from ddp_setup import (
    BAD_INPUT,
    GRACE,
    JOBS,
    PATIENCE,
    STOPPED,
    Ddp,
    abort,
    all_sum,
    await_culprit,
    broadcast,
    end_ranks,
    gather,
    slurm_step,
    wait_for_ranks,
    words_of,
)

__version__ = "1.0.0"
HANG = 70          # exit codes, beside those of ddp_setup.py
INTERRUPTED = 130
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
# Seconds.
SAME_CTRL_C = 0.2   # between two signals of one Ctrl-C, from the terminal and from the launcher
CLOSING = 60.0      # for a rank that has said why it ends
LEAVING = 120.0     # for Python to end: a profiler may still write its traces
WORKERS = 1.0       # for DataLoader workers to end with it
FORMER_START = 60.0  # for ranks of this same job, which was started again, to end
LOOK = 0.5          # between two looks at the lock
MOST_MINUTES = 1e6  # as timers hold no more than some years


# ---------------------------------------------------------------- what a script calls
def watch_run(ddp: Ddp, run_dir: str | os.PathLike | None = None, minutes: float = 20.0,
              signals: Iterable[str] = STOP_SIGNALS) -> "Watch":
    """Watch for stop requests and hangs in a `with` block inside that of setup_ddp. A collective.

    Signals, the time DDP_DEADLINE and a file RUN_DIR/STOP only ask for a stop, which stop_reason
    tells. A second Ctrl-C, or one before the first stop_reason, ends the run at once.

    Each call of stop_reason is a sign of progress, as is `progress`. With a guard (ddp_guard.py), a
    run without progress is ended with exit code 70, and the late rank is named. Without one, each
    rank without progress prints its stacks and ends by itself with exit code 1, and status.json
    keeps code null. NCCL's own limit of 10 minutes comes first, and names nobody, unless setup_ddp
    is given a larger `timeout`.

    Args:
        run_dir: folder of this run, see above; None: none, or take_folder is called later.
        minutes: limit without progress; 0: none. signals: names of those that ask for a stop.
    Raises: ValueError, on all ranks, if another run uses the folder, or it cannot be written.
        Nothing has been written then."""
    return Watch(ddp, run_dir, minutes, signals)


class Watch:
    """See watch_run, which makes it."""
    current: "Watch | None" = None   # of this process, whose signals and timer it has

    def __init__(self, ddp, run_dir, minutes, signals):
        _deadline()   # refuses a wrong DDP_DEADLINE before anything is done
        if not 0 <= minutes <= MOST_MINUTES:
            raise ValueError(f"minutes is {minutes}; expected 0 (no limit) to {MOST_MINUTES:.0f}")
        self.ddp = ddp
        self.run_dir = None        # from take_folder on
        self.step = None           # number of steps done
        self.reason = ""           # why a run that ends in good order has ended, for status.json
        self.requested = ""        # why this rank was asked to stop
        self._wanted_dir = run_dir
        self._signals = signals
        alone_in_a_notebook = ddp.world_size == 1 and hasattr(sys, "ps1")
        if alone_in_a_notebook:    # neither a long pause nor a signal ends it
            minutes = 0
            self._signals = ()
        self._limit = minutes * 60
        self.run = ""              # identifies this run in status.json
        self._guard = _pipe_to_guard()
        self._lock = None          # on rank 0: the open file that holds the lock of the folder
        self._stacks = None        # file for stack traces of this rank; None: stderr
        self._handlers = {}        # {signal: its handler before}
        self._interrupted = None   # time of the first Ctrl-C
        self._answers = False      # stop_reason has been called: requests are answered
        self._stopping = False     # it has given a reason
        self._checkpoint = ""      # what a next start continues from, and how, in words
        self._advice = ""

    # ------------------------------------------------ in the loop
    def stop_reason(self, step: int, flags: float | None = None) -> str:
        """Why all ranks shall now save and leave, the same on each, or "" to go on.

        To be called at a step boundary, on all ranks: it is a sign of progress too. It makes the
        host wait for the device: where steps take milliseconds, call it at every tenth.

        step: number of steps done. flags: the sum of `flag` over ranks, where the caller has it
            from an all-reduce of its own; None: it is summed here."""
        self.progress(step)
        self._answers = True
        if flags is None:
            flags = all_sum(torch.tensor(self.flag()), self.ddp).item()
        if not flags:
            return ""
        reasons = gather(self.requested, self.ddp)
        self.requested = next(filter(None, reasons), "")
        self._stopping = self._stopping or self.requested != ""
        return self.requested

    def flag(self) -> float:
        """1.0 if this rank has been asked to stop, else 0.0: to be summed over ranks, for
        stop_reason. Rank 0 looks for the deadline and the stop file."""
        if self.ddp.is_main and not self.requested:
            if time.time() >= _deadline():
                self.requested = "DDP_DEADLINE is reached"
            elif self.run_dir and os.path.exists(f"{self.run_dir}/STOP"):
                self.requested = f"{self.run_dir}/STOP exists; remove it before the next start"
        return float(bool(self.requested))

    def progress(self, step: int | None = None) -> None:
        """A sign of progress: the limit begins anew. step: number of steps done; None: as before,
        as between two steps."""
        if step is not None:
            self.step = int(step)   # perhaps of numpy
        if self._guard is not None:
            self._tell_guard(step=self.step)
        elif self._limit:   # no guard: this rank can only print its own stacks, and exit
            _set_timer(self._limit)

    def saved(self, path: str | os.PathLike, step: int | None = None,
              advice: str = "To go on, load_checkpoint it.") -> None:
        """Note what a next start continues from: the last line of a failure says so."""
        at = "" if step is None else f" (step {step})"
        self._checkpoint = f"Last checkpoint: {path}{at}."
        self._advice = advice
        self._tell_guard(saved=f"{self._checkpoint} {advice}")

    def note_stop(self) -> None:
        """Write into status.json that the run has stopped and is saved, before what may take longer
        than is left, such as a picture. The end of the block writes it otherwise."""
        self._write_status(STOPPED, self.reason or self.requested or "stopped")

    def take_folder(self, run_dir: str | os.PathLike, minutes: float | None = None) -> None:
        """Take the lock of a run folder, and write its status from here on. A collective.

        minutes: another limit without progress from here on. Raises: as watch_run."""
        run_dir = os.path.abspath(run_dir)
        told = None
        if self.ddp.is_main:
            told = self._lock_and_begin(run_dir)
        problem, self.run = broadcast(told, self.ddp)
        if problem:
            raise ValueError(problem)
        self.run_dir = run_dir
        self._checkpoint = self._checkpoint or "No checkpoint yet."
        if minutes is not None and self._limit:
            self._limit = minutes * 60
        self._tell_guard(run_dir=run_dir, run=self.run, limit=self._limit,
                         saved=f"{self._checkpoint} {self._advice}")
        if self._limit and self._guard is not None:
            self._open_stacks()

    def abort(self, text: str, code: int = 1, advise: bool = True) -> None:
        """As abort of ddp_setup: print `text` once, and end all ranks. status.json tells it, and
        the last line what to continue from, unless it is bad input (2), with which none began.

        advise: may the same command go on from the last checkpoint?"""
        self._restore_handlers()   # the launcher's SIGTERM must end this rank
        await_culprit(self.ddp)
        self._end(text, code, text.partition("\n")[0], advise)

    # ------------------------------------------------ begin and end
    def __enter__(self) -> "Watch":
        if Watch.current is not None:
            raise RuntimeError("watch_run was called inside the block of another watch_run; "
                               "expected one at a time in a process.")
        if self._wanted_dir is not None:
            self.take_folder(self._wanted_dir)
        ddp = self.ddp
        self._tell_guard(rank=ddp.rank, size=ddp.world_size, host=ddp.host, limit=self._limit,
                         slurm_step=slurm_step(ddp), run_dir=self.run_dir, run=self.run,
                         saved=f"{self._checkpoint} {self._advice}", step=None, spoken=False,
                         left=False)
        Watch.current = self
        self._set_handlers()
        self._extend_timeout()
        if self._guard is not None:
            _have_stacks_written(self._stacks)
        atexit.register(self._at_exit)
        self.progress()
        return self

    def __exit__(self, kind, error, tb) -> None:
        if os.getpid() != self.ddp.pid:   # a forked child of the rank
            return
        left_by_exit = isinstance(error, SystemExit) and error.code in (None, 0, STOPPED)
        if error is None or left_by_exit:
            self._end_well(error)
        elif self.ddp.world_size > 1:
            self._end_badly(error)
        else:   # it goes on as an ordinary exception, of which Python, or who catches it, tells
            _, code = words_of(error)
            self._write_status(code, _cause_of(error))
            self._tell_guard(spoken=True)
            if not isinstance(error, SystemExit) and hasattr(error, "add_note"):   # Python 3.11
                error.add_note(self._last_line(_cause_of(error), _may_go_on(error)))
        self._close()

    def _end_well(self, left_by):
        """Wait for all ranks, as none of them shall fail after status 0, and write it.

        left_by: the SystemExit by which the block was left, or None."""
        with contextlib.suppress(RuntimeError):   # the store has ended: who has ended it tells why,
            self._await_others()                  # or cleanup_ddp
        stopped = self._stopping and not self.reason   # and the script has left its loop
        if stopped or (left_by is not None and left_by.code == STOPPED):
            self.note_stop()
        else:
            self._write_status(0, self.reason or "finished")

    def _end_badly(self, error):
        """End all ranks because of an exception on this one."""
        self._restore_handlers()   # as in abort
        await_culprit(self.ddp, error)
        self._end(*words_of(error), _cause_of(error), _may_go_on(error))

    def _await_others(self):
        limit = self._limit or PATIENCE
        self._tell_guard(limit=limit + GRACE)
        if self._guard is None and self._limit:
            _set_timer(limit + GRACE)
        missing = wait_for_ranks(self.ddp, limit)
        if missing:
            who = ", ".join(map(str, missing[:20]))
            self.abort(f"this rank left the block of watch_run after step {self.step}, but "
                       f"rank(s) {who} did not within {limit:.0f} s", HANG)

    def _end(self, text, code, cause, advise):
        """End all ranks. If another one has said why, wait silently for the launcher to do so."""
        self._tell_guard(spoken=True, limit=CLOSING)
        several = self.ddp.world_size > 1
        if several and tells_a_failure(self):
            time.sleep(GRACE)
            os._exit(code % 256 or 1)
        self._write_status(code, f"{self.ddp.place}: {cause}" if several else cause)
        words = f"[{self.ddp.place}] {text}" if several else text
        if code != BAD_INPUT and text == cause:
            words = self._last_line(cause, advise)
        elif code != BAD_INPUT:
            words = f"{words}\n{self._last_line(cause, advise)}"
        self._close_stacks()
        if several:   # srun gives the code of guards that end for this signal: see there
            by_guards = code == BAD_INPUT and self._guard is not None
            end_ranks(self.ddp, words, code, REFUSED.name if by_guards else "")
        abort(self.ddp, words, code)

    def _last_line(self, cause, advise):
        stop = "" if cause[-1:] in ".?" else "."
        line = f"FAILED: {self.ddp.place}: {cause}{stop} {self._checkpoint}"
        return f"{line} {self._advice}".rstrip() if advise else line.rstrip()

    def _close(self):
        """Give back what belongs to the process: signals, timer, lock."""
        Watch.current = None
        self._restore_handlers()
        if self._guard is None and self._limit:
            faulthandler.cancel_dump_traceback_later()
        self._close_stacks()
        self._tell_guard(limit=0.0, left=True)
        if self._lock is not None:
            self._lock.close()

    def _at_exit(self):
        """Python ends. It asks workers to end, by SIGTERM, which they may ignore (worker_init), and
        waits for them without a limit: so they are killed."""
        if os.getpid() != self.ddp.pid:
            return
        self._tell_guard(limit=LEAVING)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # torch raises an error for a killed worker
        workers = [child for child in multiprocessing.active_children() if child.daemon]
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + WORKERS
        for worker in workers:
            worker.join(max(deadline - time.monotonic(), 0))
            worker.kill()

    # ------------------------------------------------ the guard
    def _tell_guard(self, **message):
        """Send a line to the guard, if there is one. message: see the docstring of ddp_guard.py."""
        if self._guard is not None:
            with contextlib.suppress(OSError):   # it is gone, or does not read
                os.write(self._guard, json.dumps(message).encode() + b"\n")

    def _extend_timeout(self):
        """Have the watch, which names the late rank, end a hang before torch's own limit does."""
        by_script = self.ddp.timeout is not None
        if by_script or not self._limit or self.ddp.world_size == 1:
            return
        if hasattr(dist, "set_timeout"):   # torch 2.14
            with contextlib.suppress(RuntimeError, TypeError):   # a backend without a limit
                dist.set_timeout(timedelta(seconds=2 * self._limit + GRACE))

    # ------------------------------------------------ signals
    def _set_handlers(self):
        with contextlib.suppress(ValueError):   # only the main thread may set handlers
            for name in self._signals:
                number = getattr(signal, name, None)   # None: not on this system
                if number is not None:
                    self._handlers[number] = signal.signal(number, self._request_stop)

    def _restore_handlers(self):
        with contextlib.suppress(ValueError):
            for number, handler in self._handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)   # None: of a library in C

    def _request_stop(self, number, _):
        """Handler of the stop signals."""
        if os.getpid() != self.ddp.pid:   # a forked child: do what the signal does by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            first = self._interrupted
            self._interrupted = first or time.monotonic()
            is_second = first is not None and time.monotonic() - first > SAME_CTRL_C
            if is_second or not self._answers:
                raise KeyboardInterrupt
        if self.requested or tells_a_failure(self):   # the launcher ends all, and nobody can save
            return
        name = signal.Signals(number).name
        self.requested = f"{name} on rank {self.ddp.rank} ({self.ddp.host})"
        when = "after this step and saves" if self._answers else "before its first step"
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        if self.ddp.is_main:   # by os.write: the signal may have interrupted a print
            with contextlib.suppress(OSError):
                os.write(2, f"\n{name}: the run stops {when}{again}\n".encode())

    # ------------------------------------------------ the folder
    def _lock_and_begin(self, run_dir):
        """On rank 0: take the lock, and begin status.json. Returns (problem, run)."""
        self.run = secrets.token_hex(4)
        try:
            lock = lock_folder(run_dir)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {self.ddp.host}{_this_job()}\n")
            lock.flush()
        except ValueError as error:
            return str(error), ""
        except OSError as error:
            return f"cannot write into {run_dir}: {error.strerror}", ""
        self._lock = lock
        self.run_dir = run_dir
        write_status(self, None, "running")
        return "", self.run

    def _write_status(self, code, reason):
        """Write the end of the run; a good one on rank 0 only."""
        if self.ddp.is_main or code not in (0, STOPPED):
            write_status(self, code, reason)

    # ------------------------------------------------ stacks
    def _open_stacks(self):
        """Open the file for the stack traces that the guard asks for."""
        folder = os.path.join(self.run_dir, "stacks")
        with contextlib.suppress(OSError):   # without a file the stacks go to stderr
            os.makedirs(folder, exist_ok=True)
            self._stacks = open(os.path.join(folder, f"rank_{self.ddp.rank}.txt"), "w")
            self._stacks.write(f"{self.ddp.host}\n")   # for a guard, if this host does not answer
            self._stacks.flush()
        _have_stacks_written(self._stacks)

    def _close_stacks(self):
        """Close the file of the stacks; one that holds none is removed."""
        if self._stacks is None:
            return
        _have_stacks_written(None)
        self._stacks.close()
        with contextlib.suppress(OSError):
            if Path(self._stacks.name).read_text() == f"{self.ddp.host}\n":
                os.unlink(self._stacks.name)
                os.rmdir(os.path.dirname(self._stacks.name))


def note_progress() -> None:
    """A sign of progress from code that does not have the watch, such as a long evaluation."""
    if Watch.current is not None:
        Watch.current.progress()


def worker_init(worker_id: int = 0, signals: Iterable[str] = STOP_SIGNALS) -> None:
    """worker_init_fn for a DataLoader. A stop signal to all processes must not end the workers:
    without them the main process would raise an error instead of saving."""
    for name in signals:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def lock_folder(folder: str | os.PathLike) -> IO:
    """Take the lock of a folder: FOLDER/lock, which the kernel gives back when this process ends or
    closes the file. It may hold who that is, in words.

    It holds across hosts where the file system has such locks; where it has none, a line says so.
    For a holder of this same job it waits: a job that was started again may meet its former ranks.
    Returns: the open file. Raises: ValueError if another process holds the lock; OSError."""
    os.makedirs(os.path.realpath(folder), exist_ok=True)   # perhaps a link that leads nowhere yet
    file = open(os.path.join(folder, "lock"), "a+", encoding="utf-8")
    try:
        _wait_for_lock(file)
    except (BlockingIOError, PermissionError):
        holder = _holder_of(file)
        file.close()
        raise ValueError(f"{folder} is in use by {holder}. Expected one run per folder. Wait for "
                         f"it, stop it, or give another folder.") from None
    except OSError as error:
        print(f"ATTENTION: {folder} is on a file system without locks ({error.strerror}): nothing "
              f"keeps a second run out", flush=True)
    if os.stat(file.name).st_ino != os.fstat(file.fileno()).st_ino:   # renamed meanwhile
        file.close()
        raise ValueError(f"another run has just renamed {folder}. Start again.")
    return file


# ---------------------------------------------------------------- how it works
def _this_job():
    """The numbers of the batch job of this process, in words."""
    return "".join(f", job {os.environ[name]}" for name in JOBS.split() if name in os.environ)


def _holder_of(file):
    file.seek(0)
    return file.read().strip() or "another process"


def _wait_for_lock(file):
    """Lock a file. Raises: as _lock, at once unless the holder is of this job."""
    waited = 0.0
    while True:
        try:
            return _lock(file)
        except (BlockingIOError, PermissionError):
            holder = _holder_of(file)
            of_this_job = _this_job() and holder.endswith(_this_job())
            if not of_this_job or waited > FORMER_START:
                raise
        if not waited:
            print(f"{file.name} is held by {holder}, which is this job: perhaps a rank of its "
                  f"former start. It has {FORMER_START:.0f} s to end", flush=True)
        time.sleep(LOOK)
        waited += LOOK


def _lock(file):
    """Lock a file, for as long as this open file lives. Forked workers may outlive this process, so
    they close it."""
    import fcntl
    if hasattr(fcntl, "F_OFD_SETLK"):   # Linux: else it would be lost when any other is closed
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)   # struct flock
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
        os.register_at_fork(after_in_child=file.close)
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _deadline():
    """DDP_DEADLINE in epoch seconds, or infinity."""
    text = os.environ.get("DDP_DEADLINE", "").strip()
    with contextlib.suppress(ValueError):
        deadline = float(text or "inf")
        if deadline > 1e9:   # 1e9 is in 2001; false for nan
            return deadline
    raise ValueError(f"DDP_DEADLINE={text!r} is not a time in epoch seconds. Expected for example "
                     f"$(( $(date +%s) + 3000 )).")


def _pipe_to_guard():
    """File descriptor of the pipe to ddp_guard.py, if that is this process' parent, else None."""
    descriptor, _, guard = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if guard != str(os.getppid()):
        return None
    os.set_blocking(int(descriptor), False)   # a guard that does not read must not stop the rank
    return int(descriptor)


def _set_timer(seconds):
    """Have this process print its stacks and end after so many seconds."""
    # No timer is set if stderr is no real file, or `seconds` is more than a timer can hold.
    with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError, OverflowError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def _have_stacks_written(file):
    """Have faulthandler write the stacks there if the guard asks by SIGQUIT: it answers even while
    a library call holds the GIL. file: None means stderr."""
    # stderr is no real file, or closed.
    with contextlib.suppress(ValueError, AttributeError, OSError, RuntimeError):
        faulthandler.register(signal.SIGQUIT, file or sys.__stderr__)


def _cause_of(error):
    """The last line of an error's text as a sentence: for status.json, and the last line."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return words_of(error)[0].partition("\n")[0]
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _may_go_on(error):
    """Whether the same command may go on: where memory ran out it would again."""
    return not isinstance(error, (MemoryError, torch.OutOfMemoryError))
