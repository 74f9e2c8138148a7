"""The parent of a rank: it ends a training run that cannot go on, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()

or, for a script that shall not be changed: python -m ddp_guard SCRIPT ARGUMENTS...

`supervise` starts the same command again as a child, the rank, and stays as its guard: a small
process without torch, which works when the rank is stopped, holds Python's lock or is dead. The
guards connect by TCP to that of rank 0, the hub. The hub ends the run when a rank fails, dies, does
not come to cleanup_ddp, or all make no progress for the limit that watch_run sets: status.json,
`FAILED: rank R of N on HOST: ...`, then every guard kills its rank and leaves with the same code.

It is off with DDP_GUARD=0, in a debugger, a notebook, a script from stdin, and on Windows; and,
unless DDP_GUARD=1, under launchers where it was never tried (PALS, Flux, jsrun, MVAPICH2).

Messages are lines of JSON. Rank to guard, over DDP_GUARD_FD ("descriptor:guard's process"):
  {"serve": host}         rank 0: listen for the other guards; answer: {"address": hub}
  {"join": {"rank", "size", "launcher", "hub"}}    hub: that answer, which rank 0 gives to all
  {"watch": {"limit", "run_dir", "stacks"}}    seconds (0: none), folder, file for the stacks
  {"step": number or null}                     a sign of progress
  {"checkpoint": [path, step]}                 what a next start continues from
  {"failed": {"code", "cause", "text", "secondary", "retry"}}    see ddp_setup.abort
  {"bye": seconds}        in cleanup_ddp; the others may take that long to come there
  {"left": true}          cleanup_ddp is over, the process is about to end
Guard to hub, twice a second, of 1,000 ranks and more less often: {"token", "idle", the fields of
its Rank}. Hub to guard: {"stacks": whether they are wanted}, as often; {"end": Verdict}.
"""
import collections
import contextlib
import ctypes
import json
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

HANG = 70               # exit code of a run that made no progress
TICK = 0.5              # between two looks at what time has brought
LATE_FAILURE = 1.0      # a failure that only reports a lost connection waits for the one behind it
SILENCE = 13.0          # without a sign of a guard: it is stopped, or its host is gone
SUSPENDED = 5.0         # a guard that wakes up so much too late was suspended: it forgets all ages
UNHEARD = 7.0           # a blamed rank whose guard was silent for so long is killed from outside
STACKS = 2.0            # for all ranks to write their stacks
TURN = 0.2              # between guards that have lost the hub; for all ranks to be stopped
LAST_WORDS = 5.0        # stderr may be a full pipe, the file system may hang
LEAVE = 0.7             # between the verdict and the guards' ends: launchers kill at the first end
EXIT = 120.0            # for Python to end after cleanup_ddp; a profiler may write its traces then
DOUBLE = 0.2            # within it, a second SIGINT is the same Ctrl-C, on two ways
RELAYED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")
UNTRIED = {"PALS_RANKID": "PALS", "FLUX_TASK_RANK": "Flux", "JSM_NAMESPACE_RANK": "jsrun",
           "MV2_COMM_WORLD_RANK": "MVAPICH2"}


# ---------------------------------------------------------------- the start
def supervise(command=None):
    """Return in the rank, and where no guard is wanted; else stay as the guard and never return.

    command: words of the rank's command line; default: those of this process.
    """
    # One that is inherited from further up, such as of a guarded launcher, is not for us.
    descriptor, _, parent = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if parent and int(parent) == os.getppid():    # this is the rank
        os.set_inheritable(int(descriptor), False)
        return
    if not _is_wanted():
        if command:
            os.execv(command[0], command)
        return
    _die_with_agent()
    # An own group of processes can be killed whole, with the DataLoader's workers. Not before a
    # terminal: there a group in the background cannot read.
    own_group = True
    with contextlib.suppress(OSError):    # no terminal, or not ours
        own_group = os.tcgetpgrp(0) != os.getpgrp()
    ours, ranks_end = socket.socketpair()
    ranks_end.set_inheritable(True)

    def prepare():
        _die_with_parent(signal.SIGKILL)
        if own_group:
            os.setpgid(0, 0)

    rank = subprocess.Popen(
        command or [sys.executable, *sys.orig_argv[1:]], preexec_fn=prepare,
        close_fds=False,    # MPICH and Intel MPI hand a descriptor over
        env={**os.environ, "DDP_GUARD_FD": f"{ranks_end.fileno()}:{os.getpid()}"})
    ranks_end.close()
    guard = Guard(rank, ours, own_group)
    code = guard.run()
    # A signal: else a shell's loop goes on after Ctrl-C, and MPICH's other ranks wait for the one
    # that died before they had met.
    if code == -signal.SIGINT or (code < 0 and not guard.joined):
        with contextlib.suppress(OSError):    # no handler of SIGKILL can be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _is_wanted():
    script = getattr(sys.modules.get("__main__"), "__file__", None)    # None: it comes from stdin
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or not script
    debugged = sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules
    if os.environ.get("DDP_GUARD") == "0" or os.name != "posix" or interactive or debugged:
        return False
    untried = [variable for variable in UNTRIED if variable in os.environ]
    if not untried or os.environ.get("DDP_GUARD") == "1":
        return True
    if os.environ[untried[0]] == "0":
        print(f"ddp_guard: never tried under {UNTRIED[untried[0]]}; the run goes on without it. "
              f"DDP_GUARD=1 uses it.", file=sys.stderr)
    return False


def _die_with_parent(number):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


def _die_with_agent():
    """torchrun and Open MPI leave ranks behind when killed. A shell as parent may end at once."""
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/comm") as file:
            if not re.search(r"sh$|^env$|^numactl$", file.read().strip()):
                _die_with_parent(signal.SIGTERM)


# ---------------------------------------------------------------- when must a run end?
class Verdict(NamedTuple):
    """Why the run ends."""
    rank: int                           # the one at fault
    host: str
    code: int
    cause: str
    text: str = ""                      # printed before the last line
    secondary: bool = False             # it only reports a lost connection
    retry: bool = True                  # may the same command help?
    checkpoint: tuple = (None, None)    # path and step, as the failing rank knows it
    silent: tuple = ()                  # (host, pids) of ranks whose guards do not answer


class Rank:
    """What a guard knows of a rank: of its own from the rank, of another from that one's guard."""
    step = run_dir = stacks = failure = None    # as in the messages; failure: a Verdict
    checkpoint = (None, None)
    limit = 0.0               # seconds that it may be without progress; 0: no limit
    place = None              # in the code, while stacks are wanted
    bye = None                # in cleanup_ddp: seconds that others may take to come there
    left = gone = False       # cleanup_ddp is over; its guard has ended

    def __init__(self, number, host, pids, now):
        self.number, self.host, self.pids = number, host, pids    # pids: its guard's, its own
        self.heard = self.progress = now

    def hear(self, now, idle=0.0, **fields):
        """Take over what it or its guard has sent. idle: seconds without progress."""
        vars(self).update(fields, heard=now, progress=now - idle)


class Watcher:
    """Decides from what a guard knows of ranks, at times that are given to it: testable. The hub
    watches all ranks, other guards watch rank 0; before they have joined, their own."""

    def __init__(self, rank):
        self.ranks, self.since = [rank], {}    # since when conditions hold
        self.hangs = False                     # nobody makes progress: stacks are wanted

    def lasted(self, name, holds, now):
        """Seconds for which a condition has held without a break."""
        if not holds:
            self.since.pop(name, None)
            return 0.0
        return now - self.since.setdefault(name, now)

    def decide(self, now):
        """The Verdict, or None as long as the run may go on."""
        failures = [Verdict(*rank.failure) for rank in self.ranks if rank.failure]
        lost = [rank for rank in self.ranks if rank.gone and not rank.bye]
        ranks = [rank for rank in self.ranks if not rank.gone]
        silent = [rank for rank in ranks if now - rank.heard > SILENCE]
        missing = [rank for rank in ranks if not rank.bye]
        patience = max(rank.bye or 0.0 for rank in self.ranks)
        watched = [rank for rank in missing if rank.limit]
        self.hangs = bool(watched) and all(now - rank.progress >= rank.limit for rank in watched)
        for failure in failures:
            if not failure.secondary or self.lasted("failure", True, now) > LATE_FAILURE:
                return failure
        if lost:
            return blame(lost, 1, "died without a word (its guard was killed, or its host is gone)",
                         now)
        if silent:
            return blame(silent, HANG, f"no sign of its guard for {SILENCE:.0f} s: stopped, or its "
                                       f"host is gone", now)
        if self.lasted("bye", 0 < len(missing) < len(self.ranks), now) > patience:
            numbers = listed([rank.number for rank in missing])
            return blame(missing, HANG, f"rank {numbers} of {len(self.ranks)} did not come to "
                                        f"cleanup_ddp within {patience:.0f} s", now)
        if self.lasted("hang", self.hangs, now) > STACKS:
            return describe_hang(ranks, now)
        return None

    def forget_ages(self, now):
        """This guard was suspended, and perhaps the whole run."""
        self.since.clear()
        for rank in self.ranks:
            rank.heard = rank.progress = now


def blame(ranks, code, cause, now, text=""):
    """A Verdict on ranks, of which those that do not answer are to be killed from outside."""
    silent = [(rank.host, rank.pids) for rank in ranks
              if not rank.gone and now - rank.heard > UNHEARD]
    return Verdict(ranks[0].number, ranks[0].host, code, cause, text, silent=silent)


def describe_hang(ranks, now):
    """A Verdict on the late ranks: those that write no stacks, else those at the lowest step, else
    those at another place than most."""
    groups = collections.defaultdict(list)
    for rank in ranks:
        groups[rank.place, rank.step].append(rank)
    late, *waiting = sorted(groups.values(), key=lambda group: (
        group[0].place is not None, -1 if group[0].step is None else group[0].step,
        len(group), -group[0].number))
    stories = []
    for group in (late, *waiting):
        names = listed([f"{rank.number} on {rank.host}" for rank in group])
        place = f"in {group[0].place}" if group[0].place else "stopped: no answer"
        stories.append(f"rank {names}, last step {group[0].step}, {place}")
    limit = max(rank.limit for rank in ranks)
    cause = f"no progress for {limit:.0f} s (the watchdog's limit). Late: {stories[0]}"
    return blame(late, HANG, cause, now, "\n  waiting: ".join([cause, *stories[1:]]))


def listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


def place_of(stacks):
    """Where the main thread was: its innermost two frames outside libraries."""
    section = stacks.rpartition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)
    library = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    own = [frame for frame in frames if not any(part in frame[0] for part in library)]
    return " < ".join(f"{function} ({os.path.basename(path)}:{line})"
                      for path, line, function in (own or frames)[:2]) or "?"


# ---------------------------------------------------------------- one guard
class Guard:
    """Waits, in one thread, for its rank, the other guards and signals."""
    size, launcher, joined = 1, "plain process", False
    hub = listener = interrupted = None     # sockets; time of the first Ctrl-C
    stacks_wanted = False                   # the hub wants to know where the rank is
    written = None                          # bytes in the file of stacks before it was asked
    urgent = False                          # decide, or tell the hub, at once
    ended = False                           # the rank's process has ended
    verdict = None                          # why all ranks shall end

    def __init__(self, process, pipe, own_group):
        self.process, self.pipe, self.own_group = process, pipe, own_group
        self.me = Rank(0, socket.gethostname(), [os.getpid(), process.pid], time.monotonic())
        self.watcher, self.began = Watcher(self.me), time.time()
        self.peers, self.unread = {}, {}    # socket -> Rank, bytes without their end of line
        self.selector = selectors.DefaultSelector()
        self.selector.register(pipe, selectors.EVENT_READ)
        for number in (getattr(signal, name) for name in RELAYED):
            if signal.getsignal(number) is not signal.SIG_IGN:    # as nohup has it
                signal.signal(number, self.pass_on)

    def run(self):
        """Guard the rank to its end. Returns the exit code; of a signal its negative number."""
        ticked, faults = time.monotonic(), 0
        while True:
            try:
                ending = self.process.poll() is not None and not self.ended
                for key, _ in self.selector.select(0 if ending else TICK):    # its last messages
                    self.read(key.fileobj)
                if ending:
                    self.judge_end(self.process.returncode)
                # Of 12,000 ranks each gives a sign every 6 s: the hub hears 2,000 lines a second.
                pause = TICK if self.stacks_wanted else max(TICK, min(TICK * self.size / 1000, 6))
                now = time.monotonic()
                if now > ticked + pause + SUSPENDED:
                    self.me.progress = now
                    self.watcher.forget_ages(now)
                if self.urgent or now > ticked + pause:
                    ticked = now
                    self.tick(now)
                if self.verdict:
                    return self.end_rank()
                if self.ended and not self.me.failure and not self.peers:
                    return self.process.returncode
            except Exception as error:    # the guard's own fault must not end the run
                faults += 1
                if faults == 1:
                    self.try_to(sys.stderr.write, f"ddp_guard: {type(error).__name__}: {error}\n")
                if self.process.poll() is not None:
                    return self.process.returncode
                time.sleep(TICK)

    # ---- what it hears
    def read(self, sock):
        if sock is self.listener:
            with contextlib.suppress(OSError):
                connection, _ = self.listener.accept()
                connection.settimeout(LAST_WORDS)
                self.selector.register(connection, selectors.EVENT_READ)
            return
        try:
            data = sock.recv(1 << 20)
            *lines, self.unread[sock] = (self.unread.get(sock, b"") + data).split(b"\n")
            for line in lines:
                self.hear(sock, json.loads(line), time.monotonic())
        except (OSError, ValueError, KeyError, TypeError):    # lost, or a stranger's nonsense
            data = b""
        if not data or len(self.unread[sock]) > 1 << 24:    # longer than any message
            self.lose(sock)

    def hear(self, sock, message, now):
        if sock is self.pipe:
            self.hear_rank(now, **message)
        elif sock is self.hub:
            self.watcher.ranks[0].heard = now
            self.stacks_wanted = message.get("stacks", False)
            if "end" in message:
                self.verdict = Verdict(*message["end"])
        elif message["token"] == self.token:
            if sock not in self.peers:
                self.peers[sock] = Rank(message["number"], message["host"], message["pids"], now)
                self.watcher.ranks.append(self.peers[sock])
            self.peers[sock].hear(now, **message)
            self.urgent = self.urgent or bool(self.peers[sock].failure)
        else:
            raise ValueError("a stranger")

    def lose(self, sock):
        self.selector.unregister(sock)
        sock.close()
        self.unread.pop(sock, None)
        self.urgent = True
        if sock is self.pipe:    # most likely the rank ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TICK)
        elif sock in self.peers:
            self.peers.pop(sock).gone = True
        elif sock is self.hub:
            self.hub, self.watcher.ranks[0].gone = None, True
            if self.me.bye:    # the hub may leave first
                self.watcher.ranks = [self.me]

    def hear_rank(self, now, serve=None, join=None, failed=None, step=None, watch=None, **fields):
        self.me.hear(now, **fields, **(watch or {}))
        self.urgent = self.urgent or "bye" in fields
        if step is not None:
            self.me.step = step
        if serve:
            self.serve(serve)
        if join:
            self.join(now, **join)
        if failed:
            self.fail(**failed)

    def serve(self, host):
        """Listen for the guards of the other ranks, and tell the rank where."""
        self.peers, self.watcher.ranks, address = {}, [self.me], None
        self.token = os.urandom(8).hex()    # a new one: connections of an earlier set-up end
        with contextlib.suppress(OSError, ValueError):    # where the system does not let it
            import resource    # a connection for every rank
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.suppress(OSError):
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self.listener = socket.create_server(place[:2], family=family, backlog=4096)
            self.selector.register(self.listener, selectors.EVENT_READ)
            address = [*self.listener.getsockname()[:2], self.token, self.me.host, self.me.pids]
        send(self.pipe, address=address)

    def join(self, now, rank, size, launcher, hub, **_):
        self.size, self.launcher, self.joined = size, launcher, True
        self.me.number, self.me.bye, self.me.left = rank, None, False    # it may set up twice
        if rank == 0:
            return
        *address, self.token, host, pids = hub
        try:
            self.hub = socket.create_connection(address, timeout=10)
            self.selector.register(self.hub, selectors.EVENT_READ)
            self.watcher.ranks, self.urgent = [Rank(0, host, pids, now)], True
        except OSError as error:
            self.watcher.ranks = [self.me]
            self.try_to(sys.stderr.write, f"ddp_guard: rank {rank} goes on without the other guards"
                        f": no connection to rank 0's at {address[0]}:{address[1]} ({error})\n")

    def pass_on(self, number, _):
        """Give a signal to the rank. Before a terminal, it gets Ctrl-C from there."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if self.joined and self.interrupted and now > self.interrupted + DOUBLE:
                self.fail(130, "interrupted twice (Ctrl-C)")    # the rank may hold Python's lock
                return
            self.interrupted = self.interrupted or now
        if self.own_group or number != signal.SIGINT:
            self.process.send_signal(number)

    def judge_end(self, code):
        """The process of the rank has ended: has the rank failed?"""
        self.ended = True
        name = signal.Signals(-code).name if code < 0 else ""
        if name and self.own_group:
            with contextlib.suppress(OSError):    # nothing of it is left
                os.killpg(self.process.pid, signal.SIGKILL)
        # The results stand. Launchers send SIGTERM to the ranks that leave a little later.
        if self.me.left or self.me.bye and name == "SIGTERM":
            if name not in ("", "SIGTERM"):
                self.try_to(sys.stderr.write, f"ddp_guard: rank {self.me.number} ended by {name} "
                                              "after cleanup_ddp\n")
        elif name and self.joined:
            self.fail(1, f"died without a word ({name}{': out of memory?' * (name == 'SIGKILL')})")
        elif name and name not in ("SIGINT", "SIGTERM"):    # else somebody has asked for it
            self.try_to(sys.stderr.write, f"\nFAILED: a rank on {self.me.host} died before "
                                          f"the ranks had met ({name})\n")
        elif self.joined and (code > 0 or not self.me.bye):
            missing = "" if code else " without cleanup_ddp"
            self.fail(code or 1, f"left with exit code {code}{missing}")

    # ---- what it does
    def try_to(self, action, *values):
        """Do what may block, such as to print where nobody reads."""
        thread = threading.Thread(target=action, args=values, daemon=True)
        thread.start()
        thread.join(LAST_WORDS)

    def fail(self, code, cause, **more):
        """The run shall end for a fault of this rank: the next tick decides it or tells the hub."""
        self.urgent = True
        self.me.failure = self.me.failure or Verdict(
            self.me.number, self.me.host, code, cause, checkpoint=self.me.checkpoint, **more)

    def tick(self, now):
        """See what time has brought, and give a sign of life."""
        self.me.heard = now
        if self.watcher.lasted("exit", self.me.left and not self.ended, now) > EXIT:
            self.fail(HANG, f"did not end within {EXIT:.0f} s after cleanup_ddp")
        if not self.verdict and (verdict := self.watcher.decide(now)):
            self.end_run(verdict)
        if not self.hub:
            self.stacks_wanted = self.watcher.hangs
        self.find_place()
        self.urgent = False
        if self.hub:
            send(self.hub, **vars(self.me), idle=now - self.me.progress, token=self.token)
        for sock in self.peers:
            send(sock, stacks=self.stacks_wanted)

    def find_place(self):
        """Have faulthandler in the rank write its stacks, which needs no lock of Python."""
        if not self.stacks_wanted:
            self.me.place = self.written = None
        elif self.me.stacks is None:
            self.me.place = "code outside watch_run"
        elif self.me.place is None:
            with contextlib.suppress(OSError), open(self.me.stacks, "rb") as file:
                stacks = file.read()
                if self.written is None:
                    self.written = len(stacks)
                    self.process.send_signal(signal.SIGQUIT)
                elif len(stacks) > self.written:
                    self.me.place = place_of(stacks[self.written:].decode(errors="replace"))

    def end_run(self, verdict):
        """Print why, then tell the other guards: launchers kill all at the first end."""
        self.verdict = verdict
        time.sleep(TURN * min(self.me.number, 20))
        self.try_to(self.announce)
        for sock in self.peers:
            send(sock, end=verdict)

    def announce(self):
        """Write status.json and the last line, unless another guard has."""
        verdict, me = self.verdict, self.me
        place = f"rank {verdict.rank} of {self.size} on {verdict.host}"
        if me.run_dir:
            path = os.path.join(me.run_dir, "status.json")
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                recent = os.path.getmtime(path) >= self.began
                if recent and json.load(file)["code"] not in (None, 0, 75):
                    return
            with contextlib.suppress(OSError):    # a full disk is perhaps what is reported
                with open(f"{path}.{os.getpid()}.tmp", "w") as file:
                    reason = verdict.cause if self.size == 1 else f"{place}: {verdict.cause}"
                    json.dump({"code": verdict.code, "reason": reason, "step": me.step}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(file.name, path)
        path, step = verdict.checkpoint if verdict.checkpoint[0] else me.checkpoint
        saved = f"Last checkpoint: {path}" if path else "No checkpoint yet"
        saved += "" if step is None else f" (step {step})"
        again = (f"To go on, give the same command again ({self.launcher}, {self.size} rank(s)): "
                 + os.environ.get("DDP_COMMAND", shlex.join(["python", *sys.orig_argv[1:]]))
                 if verdict.retry else "Mend the cause before the next start.")
        cause = verdict.cause.rstrip(".")
        cause = cause if len(cause) < 250 else f"{cause[:250]} ..."
        text, line = f"[{place}] {verdict.text.rstrip() or cause}\n", ""
        if verdict.code != 2:    # else bad input: nothing ran, nothing to go on with
            text = text if verdict.text.strip() not in ("", cause) else ""
            line = f"FAILED: {place}: {cause}{'.' * (cause[-1:] != '?')} {saved}. {again}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\n{text}{line}")
            sys.stderr.flush()

    def end_rank(self):
        """Kill the rank, its workers, and what does not answer on this host. Returns the code."""
        pids = [pid for host, pids in self.verdict.silent if host == self.me.host for pid in pids]
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(TURN)    # all stop before one is killed: they would report a lost connection
        for pid in pids + [-self.process.pid] * self.own_group:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        with contextlib.suppress(OSError, TypeError):
            if os.path.getsize(self.me.stacks) == 0:
                os.unlink(self.me.stacks)
                os.rmdir(os.path.dirname(self.me.stacks))
        time.sleep(LEAVE)
        return self.verdict.code


def send(sock, **message):
    """Send a line, unless the other end is gone: then its own end is what counts."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ddp_guard SCRIPT ARGUMENTS...")
    supervise([sys.executable, *sys.argv[1:]])
