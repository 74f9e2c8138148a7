"""The parent of a rank: it ends a rank that cannot end itself, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()           # or, without a change: python -m ddp_guard SCRIPT ...

`supervise` starts the same command again as a child, the rank, and stays as its guard: a process
without torch, which works even if the rank is stopped or holds the GIL. It speaks for its own rank
only, and in three cases: the rank died of a signal, left the block of watch_run (ddp_watch.py) by
ending its process without a word, or made no progress there within its limit. It then prints
`FAILED: rank R of N on HOST: cause`, notes it in status.json, and exits with a code. Ending the
other ranks is the launcher's task: it does so for an exit code (MPICH and Slurm are asked to).

    rank  --- lines of JSON through a pipe --->  its guard, the parent
          <-- signals; at the limit SIGQUIT ---  for the stacks; then SIGKILL

Each line is a sign of progress, and replaces what the guard knew (see `Known`):
    {"rank", "size", "host", "slurm_step", "limit"}   in watch_run, with all below as at the start
    {"run_dir", "run"}   when the run has its folder; "run" stands in status.json too
    {"step"}             with each step
    {"saved"}            what a next start continues from, in words for the last line
    {"spoken"}           the rank itself says why it ends
    {"left"}             the block is left
If no rank makes progress, each guard has its rank write its stacks to RUN_DIR/stacks/rank_R.txt,
and adds a line with step and place. Rank 0's guard reads these, and says who is late.

DDP_GUARD=0 in the environment: no guard.
"""
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

__version__ = "1.0.0"
FAILED = 1          # exit codes, as in ddp_watch.py
BAD_INPUT = 2
HANG = 70
STOPPED = 75
INTERRUPTED = 130
POLL = 0.25         # seconds between two looks at the rank
SUSPENDED = 5.0     # a guard that did not run for so long was suspended, and its rank with it
STACKS = 3.0        # for a rank to write its stacks
OTHERS = 20.0       # for the guards of other ranks to reach their limits too, and to say so
SCANCEL = 30.0      # for Slurm to end a job step
READER = 5.0        # for the reader of a pipe to make room
FORWARDING = 0.5    # for a launcher to forward what was printed, before all is ended
RANK_0_FIRST = 1.5  # for rank 0's guard to say what all guards know
TURN = 0.1          # between the guards of two ranks, where rank 0's does not speak
DYING = 10.0        # for the rank to end by SIGKILL; a hanging disk or driver may keep it longer
SAME_CTRL_C = 0.2   # between two SIGINTs of one Ctrl-C, from the terminal and from the launcher
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# To all processes of a step of Slurm, when a rank refuses to start: guards end with BAD_INPUT, and
# so does srun. Killed ranks would make it end with 137. Other programs ignore this signal.
REFUSED = signal.SIGURG
# Of a death by signal. SIGBUS: a page of shared memory, such as MPI's own, found no room.
LIKELY_CAUSES = {signal.SIGKILL: ": out of memory?", signal.SIGBUS: ": is /dev/shm full?"}
# Files of the innermost frame of a rank that waits for others: DDP does so in the backward.
WAITING = ("torch/distributed", "torch/autograd", "ddp_setup.py", "ddp_watch.py")
RANK_VARIABLES = ("DDP_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMI_RANK",
                  "SLURM_PROCID")
INNER_LAUNCHERS = ("DDP_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


# ---------------------------------------------------------------- the start
def supervise(command: list[str] | None = None) -> None:
    """Run the rest of this script as a child of a guard, or unguarded where a guard is not wanted.

    In the child, and unguarded, it returns (with a command and unguarded, the process becomes that
    command). In the guard it does not return: the process ends with the exit code of the rank.

    Args:
        command: the program to guard and its arguments; None: this script, with its arguments."""
    _open_standard_files()
    is_a_script = _is_a_script()
    if is_a_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)   # Ctrl-C in an import: no traceback
    if _has_a_guard():
        return
    if "TORCHELASTIC_RUN_ID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        die_with_parent(signal.SIGTERM)   # torchrun and Open MPI leave ranks behind when killed
    if not is_a_script or os.environ.get("DDP_GUARD") == "0":
        if command is not None:
            os.execv(command[0], command)
        return
    rank, pipe = start_rank(command or [sys.executable, *sys.orig_argv[1:]])
    Guard(rank, pipe).run()


def _open_standard_files():
    """Where stdin, stdout or stderr is closed, open /dev/null in its place: the first file that a
    rank opens, perhaps its lock, would take the number, and get what is printed there."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _is_a_script():
    """Whether this is a program that can be started again: no notebook, no debugger, no stdin."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    is_debugged = sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules
    has_file = script is not None and os.path.exists(script)
    return os.name == "posix" and has_file and not is_interactive and not is_debugged


def _has_a_guard():
    """Whether the parent of this process is its guard. Ranks that a rank starts inherit the
    variable too, but have another parent."""
    return os.environ.get("DDP_GUARD_FD", "").partition(":")[2] == str(os.getppid())


def start_rank(command):
    """Start the rank; returns its process, and the end of the pipe from which it is heard."""
    pipe, ranks_end = os.pipe()
    os.set_inheritable(ranks_end, True)
    # Descriptor of the pipe, and the guard, which must be the rank's parent.
    address = f"{ranks_end}:{os.getpid()}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # if ignored, exit codes are lost
    rank = subprocess.Popen(
        command,
        preexec_fn=prepare_rank,
        close_fds=False,    # MPICH and Intel MPI give the rank a descriptor
        env={**os.environ, "DDP_GUARD_FD": address})
    os.close(ranks_end)
    return rank, pipe


def prepare_rank():
    """What the rank inherits from the moment before its command is started."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)   # a closed terminal tells both: see pass_on
    die_with_parent()


def die_with_parent(number=signal.SIGKILL):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


# ---------------------------------------------------------------- one guard
class Known:
    """What the rank has told of itself."""

    def __init__(self):
        self.rank = rank_by_environment()
        self.size = None       # number of ranks; None: watch_run has not begun
        self.host = socket.gethostname()
        self.slurm_step = step_by_environment()   # to be cancelled if the rank fails
        self.limit = 0.0       # seconds that it may be without progress; 0: no limit
        self.run_dir = None    # for status.json and the stacks
        self.run = None        # identifies this run in status.json
        self.step = None       # number of steps done
        self.saved = ""
        self.spoken = False
        self.left = False

    def hear(self, line):
        """Replace what a line of JSON holds."""
        message = json.loads(line)
        self.rank = message.get("rank", self.rank)
        self.size = message.get("size", self.size)
        self.host = message.get("host", self.host)
        self.slurm_step = message.get("slurm_step", self.slurm_step)
        self.limit = message.get("limit", self.limit)
        self.run_dir = message.get("run_dir", self.run_dir)
        self.run = message.get("run", self.run)
        self.step = message.get("step", self.step)
        self.saved = message.get("saved", self.saved)
        self.spoken = message.get("spoken", self.spoken)
        self.left = message.get("left", self.left)


def rank_by_environment():
    """The number of this rank as its launcher tells it; 0 without one."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def step_by_environment():
    """Slurm's step, such as 77.0, if srun itself seems to have started several ranks, else "". Not
    at a terminal, where the first task may be a person's shell (srun --pty)."""
    n_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if n_tasks in ("", "1") or os.isatty(0) or any(name in os.environ for name in INNER_LAUNCHERS):
        return ""
    return f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"


class Guard:
    """Guards one rank to its end."""

    def __init__(self, rank, pipe):
        self.rank = rank             # its process
        self.pipe = pipe
        self.text = b""              # read from the pipe: a line that is not complete
        self.known = Known()
        self.ending = False          # the rank is being ended: no signal is passed on any more
        self.terminated = False      # by SIGTERM, such as that of scancel for all ranks
        self.refused = False         # by REFUSED
        self.interrupted = None      # time of the first Ctrl-C
        self.terminal = False        # True: the terminal itself sends Ctrl-C to the rank
        with contextlib.suppress(OSError):    # no terminal, or not ours
            self.terminal = os.tcgetpgrp(0) == os.getpgrp()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:    # as under nohup
                signal.signal(number, self.pass_on)
        signal.signal(REFUSED, self.note_refusal)

    def run(self):
        """Wait for the end of the rank, or for its limit; then end this process."""
        now = time.monotonic()
        looked = now
        progress = now
        while self.rank.poll() is None:
            has_spoken = self.listen(POLL)
            if self.refused and not self.known.spoken:   # not the rank that has refused
                self.rank.kill()
                os._exit(BAD_INPUT)
            now = time.monotonic()
            if has_spoken or now > looked + SUSPENDED:
                progress = now
            looked = now
            if self.known.limit and now > progress + self.known.limit:
                self.end_hang()
        self.listen(0)
        self.end(self.rank.returncode)

    def listen(self, seconds):
        """Hear the rank, waiting for it at most so long. Returns whether it has said something."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return False
        self.text += os.read(self.pipe, 1 << 16)
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):   # no JSON: a guard must not end a healthy run
                self.known.hear(line)
        if not lines:     # the rank has closed its end, and exits
            time.sleep(seconds)
        return bool(lines)

    def pass_on(self, number, _):
        """Pass a signal on to the rank: SIGHUP, of a closed terminal, as a SIGTERM."""
        if number == signal.SIGTERM:
            self.terminated = True
            if tells_a_failure(self.known):   # the launcher ends all: nothing can be saved
                self.ending = True
        if self.ending and number in (signal.SIGTERM, signal.SIGINT):
            self.rank.kill()
            os._exit(128 + number)
        has_ended = self.known.left or status_code(self.known) is not None   # and only leaves
        if number == signal.SIGINT and not has_ended and self.is_second_interrupt():
            self.ending = True
            self.rank.kill()   # even if it is stuck
            if self.known.rank != 0:
                time.sleep(RANK_0_FIRST)
            self.fail(INTERRUPTED, "interrupted twice (Ctrl-C)")
        if number == signal.SIGHUP:
            self.rank.send_signal(signal.SIGTERM)
        elif number != signal.SIGINT or not self.terminal:
            self.rank.send_signal(number)

    def note_refusal(self, *_):
        self.refused = True

    def is_second_interrupt(self):
        now = time.monotonic()
        if self.interrupted is None:
            self.interrupted = now
        return now > self.interrupted + SAME_CTRL_C

    # ------------------------------------------------ the end of the rank
    def end(self, code):
        """The process of the rank has ended with this code: of a signal its negative number."""
        known = self.known
        asked_to_end = code in (-signal.SIGTERM, -signal.SIGINT)
        if known.left and (code >= 0 or asked_to_end):
            os._exit(code if code >= 0 else 128 - code)
        if code == -signal.SIGINT:
            if known.rank == 0:
                say("interrupted (Ctrl-C)\n")
                write_status(known, INTERRUPTED, "interrupted (Ctrl-C)")
            self.leave(INTERRUPTED)
        if code == -signal.SIGTERM:   # perhaps of the launcher, as another rank has failed
            self.leave(128 + signal.SIGTERM)
        if known.spoken:
            self.leave(code if code > 0 else FAILED)
        if code < 0:
            name = signal.Signals(-code).name
            self.fail(FAILED, f"died without a word ({name}{LIKELY_CAUSES.get(-code, '')})",
                      suspects=known.host)
        if known.size is not None:
            self.fail(code or FAILED, f"left with exit code {code} without a word")
        self.leave(code)

    def end_hang(self):
        """The rank is at its limit: have it write its stacks, and say who is late."""
        self.ending = True
        known = self.known
        if known.left:
            self.fail(HANG, f"the run has ended, but Python did not within {known.limit:.0f} s")
        if known.spoken or self.rank.poll() is not None:   # it has said why it ends, and hangs
            self.rank.kill()
            self.leave(FAILED)
        cause = f"no progress for {known.limit:.0f} s"
        if known.run_dir is None:    # then nobody knows where the others are
            self.rank.send_signal(signal.SIGQUIT)
            time.sleep(STACKS)
            if known.rank != 0:
                time.sleep(RANK_0_FIRST)
            self.fail(HANG, f"{cause}, last step {known.step}. Its stacks are above")
        own = find_place(self.rank, known)
        note_place(known, own)
        if known.rank != 0:    # rank 0's guard speaks for all, and the launcher then ends this one
            time.sleep(OTHERS + STACKS + TURN * known.rank)
        late = find_late(known, own)
        hosts = {place.host for place in late}
        where = "at different places: see stacks/"
        if len({place.where for place in late}) == 1:
            where = late[0].where
        who = listed([f"{place.rank} on {place.host}" for place in late])
        cause = f"{cause}. Late: rank {who}, last step {late[0].step}, {where}"
        if len(hosts) > 1:   # no host is more suspect than another
            self.fail(HANG, cause, f"{len(late)} ranks on {len(hosts)} hosts")
        known.rank = late[0].rank
        known.host = late[0].host
        self.fail(HANG, cause, suspects=known.host)

    def fail(self, code, cause, who="", suspects=""):
        """Say why this run ends, unless another has said so, note it in status.json, and end.

        who: in words; "": this rank. suspects: the host that is perhaps at fault, or ""."""
        known = self.known
        self.ending = True
        self.rank.kill()
        if not who:
            of = "" if known.size is None else f" of {known.size}"
            who = f"rank {known.rank}{of} on {known.host}"
        if not tells_a_failure(known):
            say(f"\nFAILED: {who}: {cause}. {known.saved}".rstrip() + "\n")
            write_status(known, code, f"{who}: {cause}", suspects)
        self.leave(code)

    def leave(self, code):
        """Exit so that the launcher ends the other ranks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.rank.wait(DYING)    # MPICH hangs if a guard ends before its rank
        if code:
            time.sleep(FORWARDING)
            self.end_others(code)
        os._exit(code)

    def end_others(self, code):
        """Ask those launchers to end all ranks that would not do so for an exit code."""
        step = self.known.slurm_step
        words = ["scancel", step]
        if step and code == BAD_INPUT:
            words = ["scancel", "--signal", REFUSED.name, step]
        else:
            with contextlib.suppress(KeyError, ValueError, OSError):    # MPICH, Intel MPI
                os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
        if step and not self.terminated:   # else Slurm is ending them already
            with contextlib.suppress(OSError, subprocess.SubprocessError):    # missing, or hangs
                subprocess.run(words, timeout=SCANCEL, stderr=subprocess.DEVNULL)


def say(text):
    """Print an error by the kernel alone, all at once; not where nobody reads it any more, as the
    guard would wait there for ever."""
    if select.select([], [2], [], READER)[1]:
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


# ---------------------------------------------------------------- status.json, of guard and watch
def status_code(known):
    """The code in status.json: None while this run is on, and where there is none.

    known: what has `run_dir` and `run`, a Known or ddp_watch.Watch; for write_status `step` too."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(f"{known.run_dir}/status.json") as file:
            status = json.load(file)
        if status["run"] == known.run:
            return status["code"]
    return None


def tells_a_failure(known):
    """Whether status.json tells of a failure: then another rank or guard has spoken."""
    return status_code(known) not in (None, 0, STOPPED)


def write_status(known, code, reason, suspects=""):
    """Write status.json, unless the end of this run stands there: the first one stays.

    suspects: the host whose rank died or is late; "": no host is known to be at fault."""
    if known.run_dir is None or status_code(known) is not None:
        return
    path = f"{known.run_dir}/status.json"
    temporary = f"{known.run_dir}/.status.json.{os.getpid()}.tmp"
    status = {"code": code, "reason": reason, "suspects": suspects, "step": known.step,
              "run": known.run}
    text = json.dumps(status) + "\n"
    with contextlib.suppress(OSError):
        try:
            with open(temporary, "wb", buffering=0) as file:
                file.write(text.encode())
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:   # on a full disk there is room in the old file
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            with open(path, "r+b", buffering=0) as file:
                file.write(text.encode())
                file.truncate()


# ---------------------------------------------------------------- a hang: who is late?
class Place(NamedTuple):
    """Where a rank is at its limit."""
    rank: int
    host: str
    step: int       # number of steps done
    answers: bool   # has it written its stacks?
    waits: bool     # is it where ranks wait for others?
    where: str      # in words


def stacks_of(known, rank):
    """Path of the file with the stacks of a rank."""
    return f"{known.run_dir}/stacks/rank_{rank}.txt"


def find_place(rank, known):
    """The Place of a rank, from its faulthandler, which answers SIGQUIT even while a library holds
    the GIL. rank: its process."""
    rank.send_signal(signal.SIGQUIT)
    deadline = time.monotonic() + STACKS
    frames = []
    while not frames and time.monotonic() < deadline:
        time.sleep(POLL)
        with contextlib.suppress(OSError):
            with open(stacks_of(known, known.rank), errors="replace") as file:
                frames = frames_in(file.read())
    step = known.step or 0
    if not frames:
        return Place(known.rank, known.host, step, False, False, "stopped: no answer")
    waits = any(part in frames[0][0] for part in WAITING)
    return Place(known.rank, known.host, step, True, waits, f"in {shown(frames)}")


def frames_in(stacks):
    """(path, line, function) of the frames of the main thread, the innermost first."""
    section = stacks.rpartition("Current thread")[2].partition("\n\n")[0]
    return re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)


def shown(frames):
    """The innermost two frames outside libraries, in words."""
    own = [frame for frame in frames if not is_in_a_library(frame[0])]
    places = [f"{function} ({os.path.basename(path)}:{line})"
              for path, line, function in (own or frames)[:2]]
    return " < ".join(places)


def is_in_a_library(path):
    parts = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")   # <frozen ...>
    return any(part in path for part in parts)


def note_place(known, place):
    """Add the Place of this rank to its stacks, as a line of JSON for rank 0's guard."""
    with contextlib.suppress(OSError), open(stacks_of(known, place.rank), "a") as file:
        file.write(f"\n{json.dumps(place)}\n")


def read_place(path):
    """The Place that note_place has added to a file; None: not yet."""
    with contextlib.suppress(OSError, ValueError, IndexError, TypeError), open(path) as file:
        return Place(*json.loads(file.read().splitlines()[-1]))
    return None


def host_of(known, rank):
    """Name of the host of a rank, which is the first line of the file of its stacks."""
    with contextlib.suppress(OSError), open(stacks_of(known, rank), errors="replace") as file:
        return file.readline().strip() or "?"
    return "?"


def find_late(known, own):
    """The Places of those that are late, by what all guards have noted. Rank 0's guard waits OTHERS
    for that; the guards of other ranks have waited, and speak only if rank 0's does not.

    Late are those that do not answer, else those at the lowest step, else those that do not wait
    for others, else the fewest at one place in the code; on a tie, those at each such place."""
    deadline = time.monotonic() + (OTHERS if known.rank == 0 else 0.0)
    places = {}
    while len(places) < known.size:
        for rank in range(known.size):
            place = read_place(stacks_of(known, rank))
            if place is not None:
                places[rank] = place
        if time.monotonic() > deadline:
            break
        time.sleep(POLL)
    places[known.rank] = own
    no_answer = "its guard or host does not answer"
    silent = [Place(rank, host_of(known, rank), 0, False, False, no_answer)
              for rank in range(known.size) if rank not in places]
    if silent:
        return silent
    groups = {}    # {(answers, step, waits, where): Places}
    for place in places.values():
        groups.setdefault(place[2:], []).append(place)

    def lateness(group):
        answers, step, waits, _ = group
        return answers, step, waits, len(groups[group])

    latest = min(map(lateness, groups))
    return sorted(place for group in groups if lateness(group) == latest
                  for place in groups[group])


def listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


if __name__ == "__main__":    # PYTHON OPTIONS -m ddp_guard SCRIPT ARGUMENTS
    script = sys.argv[1:]
    if not script or script[0] in ("-h", "--help"):
        print("usage: python -m ddp_guard SCRIPT [ARGUMENTS]")
        print(__doc__)
        sys.exit(0 if script else 2)
    options = sys.orig_argv[1:-len(script) - 2]
    supervise([sys.executable, *options, *script])
