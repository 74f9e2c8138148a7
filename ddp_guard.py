"""The parent of a rank: it ends a training run that cannot go on, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()           # or, without a change: python -m ddp_guard SCRIPT ...

`supervise` starts the same command again as a child, the rank, and stays as its guard: a process
without torch, which works even if the rank is stopped or holds the GIL. Rank 0's guard is the hub.
It ends the run when a rank fails, dies or does not end in time, or when no rank makes progress: it
prints `FAILED: rank R of N on HOST: ...`, and all guards kill their ranks and exit with its code.

      host A                                        host B
      rank 0                rank 1                  rank 2
        |                     |                       |     socket pair: serve, join, watch, step,
        |                     |                       |     checkpoint, failed, bye, left
        v                     v                       v     back: signals; at the limit SIGQUIT for
      its guard, the hub    its guard               its guard    the stacks, at the end SIGKILL
        ^   ^                 |                       |
        |   +--- sign, sign --+                       |     TCP, both ways, each second (many ranks:
        +------- sign, sign --------------------------+     less often): a sign of life

The hub judges all ranks. Its sign brings the verdict to the other guards, which then end too.

Messages are lines of JSON, read field by field: unknown fields and wrong types are ignored.
From a rank to its guard ("fd:pid" in DDP_GUARD_FD: file descriptor, process id of the guard):
  {"serve": host}         rank 0: listen for the other guards; answer: {"address": hub}
  {"join": {"rank", "size", "launcher", "hub"}}    hub: that address, passed on by rank 0
  {"watch": {"limit", "run_dir", "stacks"}}    seconds (0: none), folder, file for the stacks; a key
          that is absent stays as it was: ddp_setup.py tells the limit, training/watch.py the others
  {"step": number or null}, {"checkpoint": text}   progress; what a next start continues from
  {"failed": {"code", "cause", "text", "secondary", "retry"}}    see ddp_setup.abort
  {"bye": seconds}, {"left": true}    cleanup_ddp begins (limit for the others), and is over
From a guard to the hub, a sign of life:
  {"token", "number", "host", "idle", "step", "limit", "stacks", "place", "bye", "left", "ended",
   "failure"}             idle: seconds without progress; the rest: fields of Rank
From the hub to the other guards:
  {"token", "number", "host", "idle", "bye", "failure"}    failure: the verdict on the run, or null
"""
import contextlib
import ctypes
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

HANG = 70               # exit code of a run that made no progress
BAD_INPUT = 2           # exit code of a run that was refused: nothing ran, so nothing FAILED
INTERRUPTED = 130       # exit code after Ctrl-C, as shells have it
POLL = 0.25             # seconds between two checks of the rank and of what other guards report
CAUSE_WAIT = 1.0        # a secondary failure (a lost connection) waits for the one that caused it
SILENCE = 13.0          # a guard silent for so long is stopped, or its host is gone
SUSPENDED = 5.0         # a guard that did not run for so long was suspended: all limits start anew
STACKS = 3.0            # for a rank to write its stack traces, and for its guard to tell the hub
PRINTING = 5.0          # for printing: stderr may be a full pipe, the file system may hang
FORWARDING = 0.5        # for MPICH to forward what a rank printed: its abort drops the rest
LEAVE = 2.0             # from the verdict until guards exit; ranks are killed after half of it
EXIT = 120.0            # for Python to end after cleanup_ddp; a profiler may write its traces then
SAME_CTRL_C = 0.2       # between two SIGINTs of one Ctrl-C, from terminal and launcher
LOOKS_PER_SIGN = 4      # a guard gives its sign at every fourth check, which is each second
RANKS_PER_LOOK = 500    # and one check later for so many ranks: the hub takes 1,000 signs a second
LONGEST_LINE = 1 << 24  # bytes of a message; a stranger's endless line must not fill the memory
LONGEST_CAUSE = 400     # characters of a cause in the last line
MOST_NAMES = 20         # ranks that a message names
# Of a death by signal. SIGBUS: a page of shared memory, such as MPI's own, found no room.
LIKELY_CAUSES = {signal.SIGKILL: ": out of memory?", signal.SIGBUS: ": is /dev/shm full?"}
UNTRIED = {"PALS_RANKID": "PALS", "FLUX_TASK_RANK": "Flux", "JSM_NAMESPACE_RANK": "jsrun",
           "MV2_COMM_WORLD_RANK": "MVAPICH2"}

RANK_VARIABLES = ("DDP_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", *UNTRIED, "RANK", "SLURM_PROCID")


# ---------------------------------------------------------------- the start
def supervise(command: list[str] | None = None) -> None:
    """Run the rest of this script as a child of a guard, or unguarded where a guard is not wanted.

    In the child, and unguarded, it returns (with a command and unguarded, the process becomes that
    command). In the guard it does not return: the process ends with the exit code of the rank.

    Args:
        command: the program to guard and its arguments; None: this script, with its arguments."""
    end_imports_at_ctrl_c()
    if _is_rank_of_a_guard():
        return
    if not _is_wanted():
        if command is not None:
            os.execv(command[0], command)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        _die_with_parent(signal.SIGTERM)    # torchrun and Open MPI leave ranks behind when killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # if ignored, exit codes are lost
    process, pipe = _start_rank(command or [sys.executable, *sys.orig_argv[1:]])
    try:
        code = Guard(process, pipe).run()
    except Exception as error:    # a defect of the guard must not end the run
        say(f"ddp_guard: {error!r}; this rank goes on without it\n")
        code = process.wait()
    _end_like_the_rank(code)


def end_imports_at_ctrl_c() -> None:
    """Have a Ctrl-C that comes while this script imports, which takes seconds, end it with one line
    and code 130; later, and where Ctrl-C is ignored or handled, it does what it does anyway."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_number, frame):
    """Handler of SIGINT. frame: where the main thread is."""
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    imports = frame is not None and frame.f_code.co_name == "<module>"
    if not imports:
        raise KeyboardInterrupt
    if _number_of_rank() == "0":    # one line for all ranks
        os.write(2, b"interrupted (Ctrl-C)\n")
    os._exit(INTERRUPTED)    # an exception could be taken for a failed import


def _number_of_rank():
    """The number of this process as its launcher tells it, "0" without one."""
    for variable in RANK_VARIABLES:
        if os.environ.get(variable):
            return os.environ[variable]
    return "0"


def _is_rank_of_a_guard():
    """Whether this process is the child that a guard has started, and so needs no guard.

    Guards nest, and a child inherits the environment of all above it:

        guard of the command -> the command, which starts ranks here -> guard of a rank -> rank
        pid 10                  DDP_GUARD_FD=3:10, parent 10            inherits 3:10,     4:30,
                                                                        its parent is 20   parent 30

    So DDP_GUARD_FD is meant for this process only if it names the parent of this process."""
    guard = os.environ.get("DDP_GUARD_FD", "").rpartition(":")[2]
    return guard == str(os.getppid())


def _is_wanted():
    if os.environ.get("DDP_GUARD") == "0" or os.name != "posix":
        return False
    script = getattr(sys.modules.get("__main__"), "__file__", None)    # None: read from stdin
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if is_interactive or not script:
        return False
    is_debugged = sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules
    if is_debugged:
        return False
    if os.environ.get("DDP_GUARD") == "1":
        return True
    for variable, launcher in UNTRIED.items():
        if variable in os.environ:
            if os.environ[variable] == "0":    # once, not by every rank
                say(f"ddp_guard: never tried under {launcher}: not used without DDP_GUARD=1\n")
            return False
    return True


def _start_rank(command):
    """Start the rank; returns its process, and the guard's end of the socket pair."""
    pipe, ranks_end = socket.socketpair()
    ranks_end.set_inheritable(True)
    address = f"{ranks_end.fileno()}:{os.getpid()}"
    process = subprocess.Popen(
        command,
        preexec_fn=_before_the_rank,
        close_fds=False,    # MPICH and Intel MPI give the rank a descriptor
        env={**os.environ, "DDP_GUARD_FD": address})
    ranks_end.close()
    return process, pipe


def _before_the_rank():
    """What the child does before it becomes the rank."""
    _die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)    # its guard sends SIGTERM instead, see pass_on


def _die_with_parent(number):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


def _end_like_the_rank(code):
    """End with the rank's exit code. If a signal ended it (code < 0), die of the same signal: shell
    loops and MPICH end for a signal, not for a code."""
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):    # no handler of SIGKILL can be set
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)    # process 1 of a container survives the signal


# ---------------------------------------------------------------- what is known of a rank
class Rank:
    """What a guard knows about its own rank, or about another rank from that one's guard."""

    def __init__(self, number, host, now):
        self.number = number
        self.host = host
        self.last_sign = now        # time at which its guard was heard of
        self.last_progress = now    # time at which the rank itself was
        self.step = None            # number of steps done
        self.checkpoint = None      # what a next start continues from
        self.limit = 0.0            # seconds that it may be without progress; 0: no limit
        self.run_dir = None         # for status.json
        self.stacks = None          # the file to which it writes its stacks at the limit
        self.place = None           # where in the code it was then; None: no stacks yet
        self.bye = None             # set in cleanup_ddp: seconds for the others to come there too
        self.left = False           # cleanup_ddp is over
        self.ended = False          # the process has ended
        self.failure = None         # a verdict, see blame; final if it comes from the hub

    def blame(self, code, cause, text="", secondary=False, retry=True):
        """A verdict: why the run ends. text, secondary and retry: as in the message `failed`."""
        return {"rank": self.number, "host": self.host, "code": code, "cause": cause,
                "text": text, "secondary": secondary, "retry": retry}

    def read_progress(self, message):
        """Note what a message of the rank itself says of its progress and its end."""
        if has(message, "step", int, NONE):
            self.step = message["step"]
        if has(message, "checkpoint", str, NONE):
            self.checkpoint = message["checkpoint"]
        if has(message, "bye", int, float, NONE):
            self.bye = message["bye"]
        if has(message, "left", bool):
            self.left = message["left"]

    def read_watch(self, fields):
        """Note how the rank is to be watched, from the field `watch` of a message."""
        if has(fields, "limit", int, float):
            self.limit = fields["limit"]
        if has(fields, "run_dir", str, NONE):
            self.run_dir = fields["run_dir"]
        if has(fields, "stacks", str, NONE):
            self.stacks = fields["stacks"]

    def write_sign(self):
        """The fields of this rank in its guard's sign to the hub."""
        return {"number": self.number, "host": self.host, "step": self.step, "limit": self.limit,
                "stacks": self.stacks, "place": self.place, "bye": self.bye, "left": self.left,
                "ended": self.ended, "failure": self.failure}

    def read_sign(self, sign, now):
        """Note what another guard's sign says of its rank. Number and host stay those of the first
        sign of a connection."""
        self.last_sign = now
        if has(sign, "idle", int, float):
            self.last_progress = now - sign["idle"]
        self.read_progress(sign)
        self.read_watch(sign)
        if has(sign, "place", str, NONE):
            self.place = sign["place"]
        if has(sign, "ended", bool):
            self.ended = sign["ended"]
        if has(sign, "failure", dict, NONE):
            self.failure = read_verdict(sign["failure"])


NONE = type(None)


def has(fields, name, *types):
    """Whether a message has this field, with a value of one of these types (True is no int)."""
    return name in fields and type(fields[name]) in types


def read_verdict(fields):
    """The verdict (see Rank.blame) in these fields of a message; None: there is none."""
    if fields is None or not has(fields, "rank", int) or not has(fields, "host", str):
        return None
    if not has(fields, "code", int) or not has(fields, "cause", str):
        return None
    rank = Rank(fields["rank"], fields["host"], 0.0)
    return rank.blame(fields["code"], fields["cause"], **read_details(fields))


def read_details(fields):
    """The fields of a failure that may be absent, as keywords for Rank.blame."""
    details = {}
    if has(fields, "text", str):
        details["text"] = fields["text"]
    if has(fields, "secondary", bool):
        details["secondary"] = fields["secondary"]
    if has(fields, "retry", bool):
        details["retry"] = fields["retry"]
    return details


# ---------------------------------------------------------------- when must a run end?
def decide(ranks, now):
    """The verdict on these ranks: why the run must end; None: it may go on."""
    return (find_failed(ranks, now) or find_lost(ranks, now) or find_lingering(ranks, now)
            or find_missing_at_the_end(ranks, now) or find_hang(ranks, now))


def decide_about_hub(hub, now):
    """The verdict of another guard, which knows of the hub alone: what the hub itself has decided,
    or that the hub is silent. Whether rank 0 hangs is for the hub to say."""
    return find_failed([hub], now) or find_lost([hub], now)


def find_failed(ranks, now):
    """A failure that a rank has reported. One that may be the consequence of another's counts only
    if no other comes within CAUSE_WAIT."""
    failed = [rank for rank in ranks if rank.failure]
    for rank in sorted(failed, key=lambda rank: rank.failure["secondary"]):
        reported = rank.last_progress
        if not rank.failure["secondary"] or now > reported + CAUSE_WAIT:
            return {**rank.failure, "secondary": False}    # other guards need not wait again
    return None


def find_lost(ranks, now):
    """A rank whose guard gives no sign."""
    for rank in ranks:
        if now > rank.last_sign + SILENCE:
            return rank.blame(HANG, f"no sign of its guard for {SILENCE:.0f} s: stopped, or gone")
    return None


def find_lingering(ranks, now):
    """A rank that came to cleanup_ddp, and whose process does not end."""
    for rank in ranks:
        if not rank.bye or rank.ended:
            continue
        limit = EXIT
        if not rank.left:    # it may still wait for the others
            limit += rank.bye
        idle = now - rank.last_progress
        if idle > limit:
            return rank.blame(HANG, f"still there {idle:.0f} s after cleanup_ddp")
    return None


def find_missing_at_the_end(ranks, now):
    """Ranks that do not come to cleanup_ddp, where others wait for them."""
    waiting = [rank for rank in ranks if rank.bye]
    busy = [rank for rank in ranks if not rank.bye]
    if not waiting or not busy:
        return None
    if now <= min(rank.last_progress + rank.bye for rank in waiting):
        return None
    return busy[0].blame(HANG, f"rank {names(busy)} did not come to cleanup_ddp within "
                               f"{waiting[0].bye:.0f} s")


def find_hang(ranks, now):
    """No rank in training makes progress. One alone may wait for another's long work."""
    busy = [rank for rank in ranks if not rank.bye]
    watched = [rank for rank in busy if rank.limit]
    if not watched:
        return None
    for rank in watched:
        if now <= rank.last_progress + rank.limit + STACKS:
            return None
    return describe_hang(busy)


def describe_hang(ranks):
    """A verdict on the late ranks: those that write no stacks, else those at the lowest step, else
    the fewest at one place in the code (on a tie, a guess: the last; the text has all)."""
    groups = {}
    for rank in ranks:
        groups.setdefault(situation(rank), []).append(rank)

    def lateness(group):
        answers, step, _ = group
        return answers, step, len(groups[group])

    late_first = sorted(reversed(groups), key=lateness)
    stories = []
    for group in late_first:
        _, step, place = group
        stories.append(f"rank {names(groups[group])}, last step {step}, {place}")
    limit = max(rank.limit for rank in ranks)
    cause = f"no progress for {limit:.0f} s. Late: {stories[0]}"
    text = "\n  waiting: ".join([cause, *stories[1:]])
    latest = groups[late_first[0]][0]
    return latest.blame(HANG, cause, text=text)


def situation(rank):
    """(has it answered the request for stacks?, its step, in words where it is)."""
    step = rank.step or 0
    if rank.place:
        return True, step, f"in {rank.place}"
    if rank.stacks:
        return False, step, "stopped: no answer"
    return True, step, "in an unknown place"    # it was never asked


def names(ranks):
    """Numbers and hosts of ranks, for a message."""
    text = ", ".join(f"{rank.number} on {rank.host}" for rank in ranks[:MOST_NAMES])
    if len(ranks) > MOST_NAMES:
        text += f" and {len(ranks) - MOST_NAMES} more"
    return text


def place_of(stacks):
    """Where the main thread was: its innermost two frames outside libraries. None: no stacks."""
    section = stacks.rpartition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)
    own = [frame for frame in frames if not is_in_a_library(frame[0])]
    shown = own or frames
    places = [f"{function} ({os.path.basename(path)}:{line})"
              for path, line, function in shown[:2]]
    return " < ".join(places) or None


def is_in_a_library(path):
    standard_library = os.path.dirname(os.__file__)
    parts = ("site-packages", "dist-packages", standard_library, "<")    # <frozen ...>
    return any(part in path for part in parts)


# ---------------------------------------------------------------- one guard
class Guard:
    """Guards one rank. Threads note what the rank and other guards report; `run` acts on it."""

    def __init__(self, process, pipe):
        self.process = process
        self.pipe = pipe
        self.me = Rank(0, socket.gethostname(), time.monotonic())
        self.size = 1
        self.launcher = "plain process"
        self.joined = False         # the rank has told its number
        self.token = None           # of this set-up: strangers at the hub's port do not know it
        self.guards = {}            # {connection: Rank}: of the hub all others, else the hub
        self.prints = True          # this guard prints the last line, unless the hub has
        self.interrupted = None     # time of the first Ctrl-C
        self.terminal = False       # True: the terminal itself sends Ctrl-C to the rank
        with contextlib.suppress(OSError):    # no terminal, or not ours
            self.terminal = os.tcgetpgrp(0) == os.getpgrp()
        self.reader = begin(self.hear_rank)
        begin(self.find_place)      # apart, as a file system may hang
        for number in signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT:
            if signal.getsignal(number) is not signal.SIG_IGN:    # as under nohup
                signal.signal(number, self.pass_on)

    # ------------------------------------------------ the main thread: judge, and end
    def run(self):
        """Guard the rank to its end. Returns the exit code; of a signal its negative number.

        It returns in two cases: there is a verdict (the run has to end, and this guard has killed
        its rank), or the rank has ended well and nobody needs this guard any more. The hub is
        needed until all other guards have gone: it judges them, and they would miss it."""
        for look in itertools.count():
            time.sleep(POLL)
            now = time.monotonic()
            others = [*self.guards.values()]
            self.forgive_suspension(others, now)
            self.me.last_sign = now
            has_just_ended = self.process.poll() is not None and not self.me.ended
            if has_just_ended:
                self.judge_end(self.process.returncode)
            verdict = self.judge(others, now)
            if verdict:
                return self.end_run(verdict)
            has_news = self.me.failure or self.me.ended
            looks_per_sign = LOOKS_PER_SIGN + self.size // RANKS_PER_LOOK
            if has_news or look % looks_per_sign == 0:
                self.give_sign()
            ended_well = self.me.ended and not self.me.failure
            is_needed = self.is_hub() and others
            if ended_well and not is_needed:
                return self.process.returncode

    def is_hub(self):
        """Whether this guard is rank 0's (a process that has not joined counts as rank 0)."""
        return self.me.number == 0

    def judge(self, others, now):
        """The verdict on the run, None if it may go on. Who judges whom:

            the hub                          all ranks, its own among them
            another guard                    the hub; of its own rank it reports to the hub, so that
                                             one guard alone decides and prints
            one without the hub (lost,       its own rank
            or never reached)"""
        if self.is_hub():
            return decide([self.me, *others], now)
        if others:
            return decide_about_hub(others[0], now)
        return decide([self.me], now)

    def forgive_suspension(self, others, now):
        """Start all limits anew if this guard did not run for long: perhaps all were suspended."""
        if now > self.me.last_sign + SUSPENDED:
            for rank in (self.me, *others):
                rank.last_sign = now
                rank.last_progress = now

    def judge_end(self, code):
        """The process of the rank has ended: has the rank failed?"""
        self.reader.join(POLL)    # its last messages
        self.me.ended = True
        # Launchers send SIGTERM to the ranks that leave a little later than others.
        ended_in_cleanup = self.me.bye and code in (0, -signal.SIGTERM)
        if self.me.left or ended_in_cleanup:
            return
        cause = f"left with exit code {code} without cleanup_ddp"
        if code < 0:
            cause = describe_death(-code)
        on_request = code in (-signal.SIGINT, -signal.SIGTERM)
        if self.joined:
            self.fail(code if code > 0 else 1, cause)
        elif code < 0 and not on_request:
            say(f"\nFAILED: a process on {self.me.host} {cause}; its guard knew no other\n")
        elif code > 0:
            time.sleep(FORWARDING)
            abort_mpi(code)

    def fail(self, code, cause, rank=None, **details):
        """Note a failure, of another rank if one is given, for `judge`. Only a secondary one can be
        replaced by a later one."""
        noted = self.me.failure
        if noted is None or noted["secondary"]:
            self.me.failure = (rank or self.me).blame(code, cause, **details)

    def pass_on(self, number, _):
        """Pass a signal on to the rank: SIGHUP, of a closed terminal, as a SIGTERM."""
        if number == signal.SIGINT and self.joined and not self.me.left:
            self.note_interrupt()
        if number == signal.SIGHUP:
            self.process.send_signal(signal.SIGTERM)
        elif number != signal.SIGINT or not self.terminal:
            self.process.send_signal(number)

    def note_interrupt(self):
        """A second Ctrl-C ends the run, even if the rank is stuck."""
        now = time.monotonic()
        if self.interrupted is None:
            self.interrupted = now
        elif now > self.interrupted + SAME_CTRL_C:
            self.fail(INTERRUPTED, "interrupted twice (Ctrl-C)")

    # ------------------------------------------------ a thread: what the rank says
    def hear_rank(self):
        for message in messages(self.pipe):
            if message is None:
                continue
            self.me.last_progress = time.monotonic()
            if has(message, "serve", str):
                send(self.pipe, address=self.serve(message["serve"]))
            if has(message, "join", dict):
                self.hear_join(message["join"])
            if has(message, "failed", dict):
                self.hear_failure(message["failed"])
            if has(message, "watch", dict):
                self.me.read_watch(message["watch"])
            self.me.read_progress(message)
            if "bye" in message:    # the launcher may soon kill all
                self.give_sign()

    def hear_failure(self, fields):
        if has(fields, "code", int) and has(fields, "cause", str):
            self.fail(fields["code"], fields["cause"], **read_details(fields))

    def serve(self, host):
        """Listen for the guards of the other ranks. Returns where, or None."""
        def accept():
            while True:
                connection, _ = listener.accept()
                begin(self.hear_guard, connection)
        self.guards = {}
        self.token = os.urandom(8).hex()
        with contextlib.suppress(OSError):
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family, backlog=4096)
            begin(accept)
            return [*listener.getsockname()[:2], self.token, self.me.host]
        return None

    def hear_join(self, fields):
        if not has(fields, "rank", int) or not has(fields, "size", int):
            return
        if not has(fields, "launcher", str):
            return
        hub = fields.get("hub")
        if fields["rank"] != 0:
            if type(hub) is not list or [type(part) for part in hub] != [str, int, str, str]:
                return
        self.join(fields["rank"], fields["size"], fields["launcher"], hub)

    def join(self, rank, size, launcher, hub):
        """The rank knows its number: connect to the hub. hub: what `serve` returned to rank 0."""
        self.size = size
        self.launcher = launcher
        self.joined = True
        self.me = Rank(rank, self.me.host, time.monotonic())    # anew: a script may set up twice
        if rank == 0:
            return
        host, port, token, hubs_host = hub
        self.guards = {}
        self.token = token
        try:
            connection = socket.create_connection((host, port), SILENCE)
            connection.settimeout(None)
        except OSError as error:    # go on: the run may work
            say(f"ddp_guard: rank {rank} goes on without the hub, {host}:{port}: {error}\n")
            return
        self.guards = {connection: Rank(0, hubs_host, time.monotonic())}
        self.prints = rank == size - 1    # if the hub is lost: this one is mostly elsewhere
        begin(self.hear_guard, connection)
        self.give_sign()    # before the rank, and with it the hub, can end

    # ------------------------------------------------ a thread for each connection to a guard
    def hear_guard(self, connection):
        for message in messages(connection):
            if message is None or message.get("token") != self.token:
                break    # a stranger, or a guard of an earlier set-up
            now = time.monotonic()
            rank = self.guards.get(connection)
            if rank is None:
                if not has(message, "number", int) or not has(message, "host", str):
                    break
                rank = Rank(message["number"], message["host"], now)
                self.guards[connection] = rank
            rank.read_sign(message, now)
        rank = self.guards.get(connection)
        if rank is None or rank.failure:    # a stranger; or its end was expected
            return
        del self.guards[connection]
        said_goodbye = rank.bye or self.me.left
        if not said_goodbye:
            self.fail(1, "died without a word (its guard or its host is gone)", rank)

    def give_sign(self, verdict=None):
        """Report the rank to the hub. The hub tells the others that it lives, and a verdict."""
        me = self.me
        sign = me.write_sign()
        if self.is_hub():
            sign = {"number": 0, "host": me.host, "bye": me.bye, "failure": verdict}
        idle = time.monotonic() - me.last_progress
        for connection in [*self.guards]:
            send(connection, token=self.token, idle=idle, **sign)

    # ------------------------------------------------ a thread: stacks
    def find_place(self):
        """At the limit, ask the rank's faulthandler for its stacks: that works without the GIL."""
        size_before = None    # of the file of stacks, when they were asked for; None: not yet
        while True:
            time.sleep(POLL)
            me = self.me            # another thread may replace it,
            stacks = me.stacks      # and change this
            if not stacks or time.monotonic() < me.last_progress + me.limit:
                me.place = None
                size_before = None
                continue
            if me.place:
                continue
            with contextlib.suppress(OSError), open(stacks, errors="replace") as file:
                if size_before is None:
                    size_before = os.path.getsize(stacks)
                    self.process.send_signal(signal.SIGQUIT)
                file.seek(size_before)
                me.place = place_of(file.read())

    # ------------------------------------------------ the end of the run
    def end_run(self, verdict):
        """Print why, tell the other guards, kill the rank, have MPICH end all. Returns the code."""
        # All ranks stop, then are killed, then guards exit: no rank reports a lost connection.
        self.process.send_signal(signal.SIGSTOP)
        hub_has_spoken = False
        if not self.is_hub():
            hub_has_spoken = any(hub.failure for hub in self.guards.values())
        if self.prints and not hub_has_spoken:
            begin(self.announce, verdict).join(PRINTING)
        threading.Timer(LEAVE / 2, self.process.kill).start()
        for _ in range(round(LEAVE / POLL)):
            self.give_sign({**verdict, "text": ""})    # a guard may have joined just now
            time.sleep(POLL)
        begin(self.process.wait).join(LEAVE)    # MPICH hangs if a guard ends before its rank
        abort_mpi(verdict["code"])
        return verdict["code"]

    def announce(self, verdict):
        """Print why the run ends and how to go on, and write status.json."""
        say(self.last_words(verdict))
        if self.me.run_dir:    # last, as its file system may hang or be full
            self.write_status(verdict)

    def last_words(self, verdict):
        """The text of a verdict, if it has more to say than the cause, and the last line."""
        place = f"rank {verdict['rank']} of {self.size} on {verdict['host']}"
        cause = verdict["cause"]
        text = verdict["text"]
        if verdict["code"] == BAD_INPUT:
            return f"\n[{place}] {text or cause}\n"
        paragraph = ""
        if text.strip() not in ("", cause):
            paragraph = f"[{place}] {text}\n"
        cause = cause.rstrip(".")[:LONGEST_CAUSE]
        stop = "" if cause.endswith("?") else "."
        saved = "No checkpoint yet"
        if self.me.checkpoint:
            saved = f"Last checkpoint: {self.me.checkpoint}"
        advice = self.how_to_go_on() if verdict["retry"] else "Mend the cause first."
        return f"\n{paragraph}FAILED: {place}: {cause}{stop} {saved}. {advice}\n"

    def how_to_go_on(self):
        command = shlex.join(["python", *sys.orig_argv[1:]])
        command = os.environ.get("DDP_COMMAND", command)
        does = what_the_same_command_does(command, self.me.checkpoint)
        return f"{does} ({self.launcher}, {self.size} rank(s)): {command}"

    def write_status(self, verdict):
        """Write status.json in place of the rank, which cannot any more.

        training/watch.py has its own: this file imports nothing of ours, and writes without any
        buffer, as the disk may be full."""
        reason = verdict["cause"]
        if self.size > 1:
            reason = f"rank {verdict['rank']} of {self.size} on {verdict['host']}: {reason}"
        outcome = {"code": verdict["code"], "reason": reason, "step": self.me.step}
        temporary = f"{self.me.run_dir}/.status.{os.getpid()}.tmp"
        with contextlib.suppress(OSError), open(temporary, "wb", buffering=0) as file:
            file.write(f"{json.dumps(outcome)}\n".encode())
            os.fsync(file.fileno())
            os.replace(temporary, f"{self.me.run_dir}/status.json")


def abort_mpi(code):
    """Have MPICH or Intel MPI end all ranks, as MPI_Abort does: they let the others wait when one
    leaves with an exit code."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)


# ---------------------------------------------------------------- threads, lines
def begin(action, *values):
    """Run an action in a thread, which does not keep the guard from ending."""
    thread = threading.Thread(target=action, args=values, daemon=True)
    thread.start()
    return thread


def say(text):
    """Print an error; give up if nobody reads stderr."""
    begin(sys.stderr.write, text).join(PRINTING)


def describe_death(number):
    """What is told of a rank that a signal has ended, with a likely cause."""
    return f"died without a word ({signal.Signals(number).name}{LIKELY_CAUSES.get(number, '')})"


def what_the_same_command_does(command, checkpoint):
    """How to go on with the same command: it does only where there is a checkpoint, and where its
    options do not start over or from another one. checkpoint: text, or None."""
    if not checkpoint:
        return "The same command starts from the beginning"
    names = [word.partition("=")[0] for word in command.split()]
    without = [name for name in ("--fresh", "--resume") if name in names]
    if without:
        return f"To go on, give the same command again without {' and '.join(without)}"
    return "To go on, give the same command again"


def messages(connection):
    """Messages from the other end until it is gone: a dict each, None for a line that is none."""
    with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
        while True:
            line = lines.readline(LONGEST_LINE)
            if not line:
                return
            yield message_of(line)


def message_of(line):
    """The JSON object in a line, None if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):    # RecursionError: [[[[...
        return None
    if type(message) is not dict:
        return None
    return message


def send(connection, **message):
    """Send a line. If the other end is gone, the thread that reads from it notices that."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":    # PYTHON OPTIONS -m ddp_guard SCRIPT ARGUMENTS
    script = sys.argv[1:]
    options = sys.orig_argv[1:-len(script) - 2]
    supervise([sys.executable, *options, *script])
