"""The parent of a rank: it ends a training run that cannot go on, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()           # or, without a change: python -m ddp_guard SCRIPT ...

`supervise` starts the same command again as a child, the rank, and stays as its guard: a process
without torch, which works even if the rank is stopped or holds the GIL. Rank 0's guard is the hub.
It ends the run when a rank fails, dies or does not end in time, or when no rank makes progress: it
prints `FAILED: rank R of N on HOST: ...`, and all guards kill their ranks and exit with its code.

Messages are lines of JSON. Rank to guard, over DDP_GUARD_FD ("file descriptor:guard's process id"):
  {"serve": host}         rank 0: listen for the other guards; answer: {"address": hub}
  {"join": {"rank", "size", "launcher", "hub"}}    hub: that address, passed on by rank 0
  {"watch": {"limit", "run_dir", "stacks"}}    seconds (0: none), folder, file for the stacks; a key
          that is absent stays as it was: ddp_setup.py tells the limit, training/watch.py the others
  {"step": number or null}, {"checkpoint": text}   progress; what a next start continues from
  {"failed": {"code", "cause", "text", "secondary", "retry"}}    see ddp_setup.abort
  {"bye": seconds}, {"left": true}    cleanup_ddp begins (limit for the others), and is over
Between guards, each second (many ranks: less often): {"token", "idle": seconds, fields of Rank}.
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
POLL = 0.25             # seconds between two checks of the rank and of what other guards report
CAUSE_WAIT = 1.0        # a secondary failure (a lost connection) waits for the one that caused it
SILENCE = 13.0          # a guard silent for so long is stopped, or its host is gone
SUSPENDED = 5.0         # a guard that did not run for so long was suspended: all limits start anew
STACKS = 3.0            # for a rank to write its stack traces, and for its guard to tell the hub
PRINTING = 5.0          # for printing: stderr may be a full pipe, the file system may hang
LEAVE = 2.0             # from the verdict until guards exit; ranks are killed after half of it
EXIT = 120.0            # for Python to end after cleanup_ddp; a profiler may write its traces then
SAME_CTRL_C = 0.2       # between two SIGINTs of one Ctrl-C, from terminal and launcher
UNTRIED = {"PALS_RANKID": "PALS", "FLUX_TASK_RANK": "Flux", "JSM_NAMESPACE_RANK": "jsrun",
           "MV2_COMM_WORLD_RANK": "MVAPICH2"}


# ---------------------------------------------------------------- the start
def supervise(command=None):
    """Guard `command` (default: this one) as a child. Returns only in the child, or unguarded."""
    if os.environ.get("DDP_GUARD_FD", "").endswith(f":{os.getppid()}"):
        return    # this is the rank; another id is of a guard further up, of the launcher
    if not _is_wanted():
        return os.execv(command[0], command) if command else None
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        _die_with_parent(signal.SIGTERM)    # torchrun and Open MPI leave ranks behind when killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # if ignored, exit codes are lost
    ours, ranks_end = socket.socketpair()
    ranks_end.set_inheritable(True)
    process = subprocess.Popen(
        command or [sys.executable, *sys.orig_argv[1:]],
        preexec_fn=lambda: (_die_with_parent(signal.SIGKILL),
                            signal.signal(signal.SIGHUP, signal.SIG_IGN)),    # see pass_on
        close_fds=False,    # MPICH and Intel MPI give the rank a descriptor
        env={**os.environ, "DDP_GUARD_FD": f"{ranks_end.fileno()}:{os.getpid()}"})
    ranks_end.close()
    try:
        code = Guard(process, ours).run()
    except Exception as error:    # a defect of the guard must not end the run
        say(f"ddp_guard: {error!r}; this rank goes on without it\n")
        code = process.wait()
    # Die of the same signal as the rank: shell loops and MPICH end for a signal, not for a code.
    if code < 0:
        with contextlib.suppress(OSError):    # no handler of SIGKILL can be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)    # process 1 of a container survives it
    os._exit(code if code >= 0 else 128 - code)


def _is_wanted():
    script = getattr(sys.modules.get("__main__"), "__file__", None)    # None: read from stdin
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or not script
    debugged = sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules
    if os.environ.get("DDP_GUARD") == "0" or os.name != "posix" or interactive or debugged:
        return False
    untried = [variable for variable in UNTRIED if variable in os.environ]
    wanted = not untried or os.environ.get("DDP_GUARD") == "1"
    if not wanted and os.environ[untried[0]] == "0":
        say(f"ddp_guard: never tried under {UNTRIED[untried[0]]}: not used without DDP_GUARD=1\n")
    return wanted


def _die_with_parent(number):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


# ---------------------------------------------------------------- when must a run end?
class Rank:
    """What a guard knows about its own rank, or about another rank from that one's guard."""
    step = run_dir = stacks = checkpoint = None    # as in the messages
    limit = 0.0         # seconds that it may be without progress; 0: no limit
    place = None        # where in the code it was when it reached the limit
    bye = None          # set in cleanup_ddp: seconds for the others to come there too
    left = ended = False    # cleanup_ddp is over; the process has ended
    failure = None      # a verdict, see blame; final if it comes from the hub

    def __init__(self, number, host, now):
        self.number, self.host = number, host
        self.last_sign = self.last_progress = now    # times: of its guard, of the rank

    def blame(self, code, cause, **more):
        """A verdict: why the run ends. more: text, secondary and retry, as in the messages."""
        return dict(rank=self.number, host=self.host, code=code, cause=cause, **more)


def decide(ranks, now):
    """The verdict on these ranks: why the run must end; None: it may go on."""
    failed = [rank for rank in ranks if rank.failure]    # last_progress: when it was reported
    for rank in sorted(failed, key=lambda rank: rank.failure.get("secondary", False)):
        if not rank.failure.get("secondary") or now > rank.last_progress + CAUSE_WAIT:
            return {**rank.failure, "secondary": False}    # other guards need not wait again
    for rank in ranks:
        if now > rank.last_sign + SILENCE:
            return rank.blame(HANG, f"no sign of its guard for {SILENCE:.0f} s: stopped, or gone")
        idle = now - rank.last_progress
        if rank.bye and not rank.ended and idle > EXIT + (0 if rank.left else rank.bye):
            return rank.blame(HANG, f"still there {idle:.0f} s after cleanup_ddp")
    waiting, busy = [rank for rank in ranks if rank.bye], [rank for rank in ranks if not rank.bye]
    if waiting and busy and now > min(rank.last_progress + rank.bye for rank in waiting):
        return busy[0].blame(HANG, f"rank {names(busy)} did not come to cleanup_ddp within "
                                   f"{waiting[0].bye:.0f} s")
    watched = [rank for rank in busy if rank.limit]
    hangs = watched and all(now > rank.last_progress + rank.limit + STACKS for rank in watched)
    return describe_hang(busy) if hangs else None


def describe_hang(ranks):
    """A verdict on the late ranks: those that write no stacks, else those at the lowest step, else
    the fewest at one place in the code (on a tie, a guess: the last; the text has all)."""
    groups = {}
    for rank in ranks:
        stopped = bool(rank.stacks and not rank.place)
        place = "stopped: no answer" if stopped else f"in {rank.place or 'an unknown place'}"
        groups.setdefault((not stopped, rank.step or 0, place), []).append(rank)
    order = sorted(reversed(groups), key=lambda group: (*group[:2], len(groups[group])))
    stories = [f"rank {names(groups[group])}, last step {group[1]}, {group[2]}" for group in order]
    cause = f"no progress for {max(rank.limit for rank in ranks):.0f} s. Late: {stories[0]}"
    return groups[order[0]][0].blame(HANG, cause, text="\n  waiting: ".join([cause, *stories[1:]]))


def names(ranks):
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return ", ".join(f"{rank.number} on {rank.host}" for rank in ranks[:20]) + more


def place_of(stacks):
    """Where the main thread was: its innermost two frames outside libraries. None: no stacks."""
    section = stacks.rpartition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)
    library = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    own = [frame for frame in frames if not any(part in frame[0] for part in library)]
    return " < ".join(f"{function} ({os.path.basename(path)}:{line})"
                      for path, line, function in (own or frames)[:2]) or None


# ---------------------------------------------------------------- one guard
class Guard:
    """Guards one rank. Threads note what the rank and other guards report; `run` acts on it."""
    size, launcher, joined = 1, "plain process", False
    token = None            # of this set-up: strangers at the hub's port do not know it
    prints = True           # this guard prints the last line, unless the hub has
    terminal = False        # True: the terminal itself sends Ctrl-C to the rank
    interrupted = None      # time of the first Ctrl-C

    def __init__(self, process, pipe):
        self.process, self.pipe = process, pipe
        self.me = Rank(0, socket.gethostname(), time.monotonic())
        self.guards = {}    # {connection: Rank}; the hub has all others, a guard has the hub
        self.reader = begin(self.hear_rank)
        begin(self.find_place)    # apart, as a file system may hang
        with contextlib.suppress(OSError):    # no terminal, or not ours
            self.terminal = os.tcgetpgrp(0) == os.getpgrp()
        for number in signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT:
            if signal.getsignal(number) is not signal.SIG_IGN:    # as under nohup
                signal.signal(number, self.pass_on)

    def run(self):
        """Guard the rank to its end. Returns the exit code; of a signal its negative number."""
        for look in itertools.count():
            time.sleep(POLL)
            now, others = time.monotonic(), [*self.guards.values()]
            if now > self.me.last_sign + SUSPENDED:    # perhaps all were suspended
                for rank in (self.me, *others):
                    rank.last_sign = rank.last_progress = now
            self.me.last_sign = now
            if self.process.poll() is not None and not self.me.ended:
                self.judge_end(self.process.returncode)
            # The hub judges all ranks. Other guards judge the hub or, without one, their own rank.
            ranks = others if others and self.me.number else [self.me, *others]
            if verdict := decide(ranks, now):
                return self.end_run(verdict)
            # Many ranks report less often: the hub takes some 1,000 signs a second. News goes now.
            if look % (4 + self.size // 500) == 0 or self.me.failure or self.me.ended:
                self.give_sign()
            if self.me.ended and not self.me.failure and (self.me.number or not others):
                return self.process.returncode

    def hear_rank(self):
        for message in messages(self.pipe):
            self.me.last_progress = time.monotonic()
            if "serve" in message:
                send(self.pipe, address=self.serve(message["serve"]))
            elif "join" in message:
                self.join(**message["join"])
            elif "failed" in message:
                self.fail(**message["failed"])
            else:
                vars(self.me).update(message.get("watch", message))    # keys: fields of Rank
                if "bye" in message:    # the launcher may soon kill all
                    self.give_sign()

    def serve(self, host):
        """Listen for the guards of the other ranks. Returns where, or None."""
        def accept():
            while True:
                begin(self.hear_guard, listener.accept()[0])
        self.guards, self.token = {}, os.urandom(8).hex()
        with contextlib.suppress(OSError):
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family, backlog=4096)
            begin(accept)
            return [*listener.getsockname()[:2], self.token, self.me.host]

    def join(self, rank, size, launcher, hub):
        self.size, self.launcher, self.joined = size, launcher, True
        self.me = Rank(rank, self.me.host, time.monotonic())    # anew: a script may set up twice
        if rank == 0:
            return
        self.guards, (host, port, self.token, hubs_host) = {}, hub
        try:
            connection = socket.create_connection((host, port), SILENCE)
            connection.settimeout(None)
        except OSError as error:    # go on: the run may work
            return say(f"ddp_guard: rank {rank} goes on without the hub, {host}:{port}: {error}\n")
        self.guards = {connection: Rank(0, hubs_host, time.monotonic())}
        self.prints = rank == size - 1    # if the hub is lost: this one is mostly elsewhere
        begin(self.hear_guard, connection)
        self.give_sign()    # before the rank, and with it the hub, can end

    def hear_guard(self, connection):
        for message in messages(connection):
            if message.pop("token", None) != self.token:
                break
            now = time.monotonic()
            rank = self.guards.setdefault(connection, Rank(message["number"], message["host"], now))
            vars(rank).update(message, last_sign=now, last_progress=now - message["idle"])
        rank = self.guards.get(connection)
        if rank and not rank.failure:    # else its end was expected
            del self.guards[connection]
            if not (rank.bye or self.me.left):
                self.fail(1, "died without a word (its guard or its host is gone)", rank)

    def pass_on(self, number, _):
        """Pass a signal on to the rank: SIGHUP, of a closed terminal, as a SIGTERM."""
        if number == signal.SIGINT and self.joined and not self.me.left:
            self.interrupted = self.interrupted or time.monotonic()
            if time.monotonic() > self.interrupted + SAME_CTRL_C:    # the rank may be stuck
                self.fail(130, "interrupted twice (Ctrl-C)")
        if number != signal.SIGINT or not self.terminal:
            self.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def judge_end(self, code):
        """The process of the rank has ended: has the rank failed?"""
        self.reader.join(POLL)    # its last messages
        self.me.ended = True
        # Launchers send SIGTERM to the ranks that leave a little later than others.
        if self.me.left or self.me.bye and code in (0, -signal.SIGTERM):
            return
        cause = f"left with exit code {code} without cleanup_ddp"
        if code < 0:
            hint = ": out of memory?" if code == -signal.SIGKILL else ""
            cause = f"died without a word ({signal.Signals(-code).name}{hint})"
        if self.joined:
            self.fail(code if code > 0 else 1, cause)
        elif code < 0 and code not in (-signal.SIGINT, -signal.SIGTERM):    # these: on request
            say(f"\nFAILED: a process on {self.me.host} {cause}; its guard knew no other\n")

    def fail(self, code, cause, rank=None, **more):
        """Note a failure. Only a secondary one can be replaced by a later one."""
        if not self.me.failure or self.me.failure.get("secondary"):
            self.me.failure = (rank or self.me).blame(code, cause, **more)

    def find_place(self):
        """At the limit, ask the rank's faulthandler for its stacks: that works without the GIL."""
        while True:
            time.sleep(POLL)
            me, stacks = self.me, self.me.stacks    # another thread may change them
            if not stacks or time.monotonic() < me.last_progress + me.limit:
                me.place = size_before = None    # not asked yet
            elif not me.place:
                with contextlib.suppress(OSError), open(stacks, errors="replace") as file:
                    if size_before is None:
                        size_before = os.path.getsize(stacks)
                        self.process.send_signal(signal.SIGQUIT)
                    file.seek(size_before)
                    me.place = place_of(file.read())

    def give_sign(self, verdict=None):
        """Report the rank to the hub. The hub tells the others that it lives, and a verdict."""
        me = self.me
        sign = vars(me) if me.number else dict(    # ended: so that no guard applies EXIT to it
            number=0, host=me.host, bye=me.bye, ended=True, failure=verdict)
        for connection in [*self.guards]:
            send(connection, token=self.token, idle=time.monotonic() - me.last_progress, **sign)

    def end_run(self, verdict):
        """Print why, tell the other guards, kill the rank, have MPICH end all. Returns the code."""
        # All ranks stop, then are killed, then guards exit: no rank reports a lost connection.
        self.process.send_signal(signal.SIGSTOP)
        if self.prints and not any(rank.failure for rank in self.guards.values() if self.me.number):
            begin(self.announce, **verdict).join(PRINTING)
        threading.Timer(LEAVE / 2, self.process.kill).start()
        for _ in range(round(LEAVE / POLL)):
            self.give_sign({**verdict, "text": ""})    # a guard may have joined just now
            time.sleep(POLL)
        begin(self.process.wait).join(LEAVE)    # MPICH hangs if a guard ends before its rank
        with contextlib.suppress(KeyError, ValueError, OSError):    # as MPI_Abort does
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % verdict["code"])
        return verdict["code"]

    def announce(self, rank, host, code, cause, text="", retry=True, **_):
        """Print why the run ends and how to go on, and write status.json."""
        me, place = self.me, f"rank {rank} of {self.size} on {host}"
        reason = cause if self.size == 1 else f"{place}: {cause}"
        has_text = code == 2 or text.strip() not in ("", cause)    # else `text` has nothing to add
        text, cause = (f"[{place}] {text or cause}\n" if has_text else ""), cause.rstrip(".")[:400]
        saved = f"Last checkpoint: {me.checkpoint}" if me.checkpoint else "No checkpoint yet"
        again = (f"To go on, give the same command again ({self.launcher}, {self.size} rank(s)): "
                 + os.environ.get("DDP_COMMAND", shlex.join(["python", *sys.orig_argv[1:]]))
                 if retry else "Mend the cause first.")
        line = f"FAILED: {place}: {cause}{'' if cause.endswith('?') else '.'} {saved}. {again}\n"
        say(f"\n{text}{line if code != 2 else ''}")    # 2: bad input, nothing ran
        if me.run_dir:    # last, as its file system may hang or be full
            temporary = f"{me.run_dir}/.status.{os.getpid()}.tmp"
            outcome = f"{json.dumps(dict(code=code, reason=reason, step=me.step))}\n".encode()
            with contextlib.suppress(OSError), open(temporary, "wb", buffering=0) as file:
                file.write(outcome)
                os.fsync(file.fileno())
                os.replace(temporary, f"{me.run_dir}/status.json")


def begin(action, *values, **names):
    thread = threading.Thread(target=action, args=values, kwargs=names, daemon=True)
    thread.start()
    return thread


def say(text):
    """Print an error; give up if nobody reads stderr."""
    begin(sys.stderr.write, text).join(PRINTING)


def messages(sock):
    """Messages from the other end, until it is gone or sends something else than JSON."""
    with sock, contextlib.suppress(OSError, ValueError, TypeError), sock.makefile() as lines:
        for line in lines:
            yield dict(json.loads(line))


def send(sock, **message):
    """Send a line. If the other end is gone, the thread that reads from it notices that."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    supervise([sys.executable, *sys.orig_argv[1:-len(sys.argv) - 1], *sys.argv[1:]])
