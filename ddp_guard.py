"""The parent of a rank: it ends a training run that cannot go on, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()

or, for a script that shall not be changed: python -m ddp_guard SCRIPT ARGUMENTS...

`supervise` starts the same command again as a child, the rank, and stays behind as its guard: a
small process without torch, which still works when the rank is stopped, holds Python's lock or is
dead. The guards of all ranks are joined by TCP at that of rank 0, the hub. The hub ends the run
when a rank fails, dies, does not come to cleanup_ddp, or when all together make no progress for
the limit that watch_run sets. It writes status.json and prints `FAILED: rank R of N on HOST: ...`;
then every guard kills its rank and leaves with the same exit code.

It is off with DDP_GUARD=0, in a debugger, a notebook, a script from stdin, and on Windows; and,
unless DDP_GUARD=1, under launchers where it was never tried (PALS, Flux, jsrun, MVAPICH2).

Messages are lines of JSON. Rank to guard, over DDP_GUARD_FD ("descriptor:guard's process"):
  {"serve": host}         rank 0: listen for the other guards; answer: {"address": hub}
  {"join": {"rank", "size", "host", "launcher", "hub": [host, port, token]}}
  {"watch": {"limit", "run_dir", "stacks"}}    seconds (0: none), folder, file for the stacks
  {"step": number or null}                     a sign of progress
  {"checkpoint": [path, step]}                 what a next start continues from
  {"failed": {"code", "cause", "text", "secondary", "retry"}}    see ddp_setup.abort
  {"bye": seconds}        in cleanup_ddp; the others may take that long to come there
  {"left": true}          cleanup_ddp is over, the process is about to end
Guard to hub: {"hello": {"token", "rank", "processes": [host, guard, rank]}}, {"bye"}, {"failed"},
{"beat": [step, seconds without progress or null, limit]}, {"place": text}.
Hub to guard: {"alive": processes}, {"stacks": true}, {"end": verdict}.
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
STACKS = 2.0            # for all ranks to write their stacks
LAST_WORDS = 5.0        # stderr may be a full pipe, the file system may hang
LEAVE = 0.7             # between the verdict and the guards' ends: launchers kill at the first end
EXIT = 120.0            # for Python to end after cleanup_ddp; a profiler may write its traces then
DOUBLE = 0.2            # within it, a second SIGINT is the same Ctrl-C, on two ways
RELAYED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")
UNTRIED = {"PALS_RANKID": "PALS", "FLUX_TASK_RANK": "Flux", "JSM_NAMESPACE_RANK": "jsrun",
           "MV2_COMM_WORLD_RANK": "MVAPICH2"}
DIED = "died without a word"


# ---------------------------------------------------------------- the start
def supervise(command=None):
    """Return in the rank, and where no guard is wanted; else stay as the guard and never return.

    command: words of the rank's command line; default: those of this process.
    """
    descriptor, _, parent = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if parent and int(parent) == os.getppid():    # this is the rank
        os.set_inheritable(int(descriptor), False)
        return
    reason = why_not(os.environ) if command is None else ""
    if reason:
        if reason.startswith("never tried") and os.environ.get("PALS_RANKID", "0") == "0":
            print(f"ddp_guard: {reason}; the run goes on without it. DDP_GUARD=1 uses it.",
                  file=sys.stderr)
        return
    if _started_by_an_agent():    # torchrun and Open MPI leave ranks behind when they are killed
        _die_with_parent(signal.SIGTERM)
    # An own group of processes can be killed whole, with the DataLoader's workers. Not before a
    # terminal: there a group in the background cannot read.
    own_group = not _in_terminal()
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
    code = Guard(rank, ours, own_group).run()
    if code == -signal.SIGINT:    # a shell's loop goes on unless it sees this
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if code >= 0 else 128 - code)


def why_not(environment):
    """Why this process shall run without a guard, or ""."""
    if environment.get("DDP_GUARD") == "0" or os.name != "posix":
        return "not wanted, or not possible"
    if sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules:
        return "a debugger is at work"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if hasattr(sys, "ps1") or sys.flags.interactive or not script:
        return "an interactive session, or a script from stdin"
    untried = [name for variable, name in UNTRIED.items() if variable in environment]
    wanted = environment.get("DDP_GUARD") == "1"
    return f"never tried under {untried[0]}" if untried and not wanted else ""


def _die_with_parent(number):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


def _started_by_an_agent():
    """Is the parent torchrun's or Open MPI's? A shell in between may end at once: no sign then."""
    if not {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        return False
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/comm") as file:
        return not re.search(r"sh$|^env$|^numactl$", file.read().strip())
    return False


def _in_terminal():
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:    # no terminal, or not ours
        return False


# ---------------------------------------------------------------- what the hub decides
class Verdict(NamedTuple):
    """Why the run ends. rank: the one at fault; text: printed before the last line; retry: may the
    same command help; silent: processes of ranks whose guards do not answer; checkpoint: the last
    one, as that rank knows it, which may be ahead of others."""
    rank: int
    code: int
    cause: str
    host: str
    text: str = ""
    retry: bool = True
    silent: tuple = ()
    checkpoint: tuple = (None, None)


class Rank:
    """What the hub knows of one rank. progress: when it made some last, None while not watched."""

    def __init__(self, processes, now):
        self.host, self.processes, self.heard = processes[0], processes, now
        self.step = self.progress = self.place = None
        self.bye = self.gone = False


class Hub:
    """Hears of all ranks and decides when the run must end. Times are given to it: testable."""

    def __init__(self, size):
        self.size, self.ranks = size, {}
        self.limit = self.patience = 0.0
        self.late_failure = self.first_bye = self.asked = None    # asked: when stacks were wanted

    def hear(self, number, message, now):
        """Take note of a guard's message. Returns the Verdict that follows at once, or None."""
        if "hello" in message:
            self.ranks[number] = Rank(message["hello"]["processes"], now)
        rank = self.ranks[number]
        rank.heard = now
        if "beat" in message:
            rank.step, age, limit = message["beat"]
            rank.progress = None if age is None else now - age
            self.limit = limit or self.limit
        elif "place" in message:
            rank.place = message["place"]
        elif "bye" in message:
            rank.bye, self.patience = True, message["bye"]
            self.first_bye = self.first_bye or now
        elif "failed" in message:
            failure = message["failed"]
            verdict = Verdict(number, failure["code"], failure["cause"], rank.host,
                              failure["text"], failure["retry"],
                              checkpoint=failure["checkpoint"])
            if not failure["secondary"]:
                return verdict
            self.late_failure = self.late_failure or (now + LATE_FAILURE, verdict)
        return None

    def lose(self, number):
        """A guard's connection is closed. Returns a Verdict unless it had said goodbye."""
        rank = self.ranks[number]
        rank.gone = True
        cause = f"{DIED} (its guard was killed, or its host is gone)"
        return None if rank.bye else Verdict(number, 1, cause, rank.host)

    def decide(self, now):
        """The Verdict that follows from the time that has passed, or None."""
        if self.late_failure and now >= self.late_failure[0]:
            return self.late_failure[1]
        ranks = {number: rank for number, rank in self.ranks.items() if not rank.gone}
        silent = {number: rank for number, rank in ranks.items() if now - rank.heard > SILENCE}
        missing = [number for number, rank in ranks.items() if not rank.bye]
        if silent:
            cause = f"no sign of its guard for {SILENCE:.0f} s: stopped, or its host is gone"
            number = min(silent)
            return Verdict(number, HANG, cause, ranks[number].host,
                           silent=[rank.processes for rank in silent.values()])
        if self.first_bye and missing and now > self.first_bye + self.patience:
            cause = (f"rank {listed(missing)} of {self.size} did not come to cleanup_ddp within "
                     f"{self.patience:.0f} s")
            return Verdict(missing[0], HANG, cause, ranks[missing[0]].host)
        watched = [ranks[number].progress for number in missing
                   if ranks[number].progress is not None]
        if not watched or not self.limit or now - max(watched) < self.limit:
            self.asked = None
        elif self.asked is None:
            self.asked = now
            for rank in ranks.values():
                rank.place = None
        elif now > self.asked + STACKS:
            return self.describe_hang(ranks, now)
        return None

    def describe_hang(self, ranks, now):
        """A Verdict that names the late ranks: those that write no stacks, else those at the lowest
        step, else those at another place than most."""
        steps = {number: -1 if rank.step is None else rank.step for number, rank in ranks.items()}
        usual = collections.Counter(rank.place for rank in ranks.values()).most_common(1)[0][0]
        late = ([number for number, rank in ranks.items() if rank.place is None]
                or [number for number in ranks if steps[number] == min(steps.values())])
        if len(late) == len(ranks):
            late = [number for number in ranks if ranks[number].place != usual] or list(ranks)
        stories = [f"rank {number} on {ranks[number].host}, last step {ranks[number].step}, "
                   + (f"in {ranks[number].place}" if ranks[number].place else "stopped: no answer")
                   for number in late[:8]]
        cause = (f"no progress for {self.limit:.0f} s (the watchdog's limit). "
                 f"Late: {'; '.join(stories)}")
        waiting = collections.defaultdict(list)
        for number in set(ranks) - set(late):
            waiting[ranks[number].place].append(number)
        text = [cause, *(f"  waiting: rank {listed(group)} in {place}"
                         for place, group in waiting.items())]
        return Verdict(late[0], HANG, cause, ranks[late[0]].host, "\n".join(text), silent=[
            ranks[number].processes for number in late if now - ranks[number].heard > STACKS])

    def forget_ages(self, now):
        """This guard was suspended, and perhaps all others with it."""
        for rank in self.ranks.values():
            rank.heard, rank.progress = now, rank.progress and now


def listed(items):
    """Up to 20 items as text."""
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(map(str, items[:20])) + more


def place_of(stacks):
    """Where the main thread is, from what faulthandler wrote: its innermost two frames outside
    libraries."""
    section = stacks.rpartition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)
    library = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    own = [frame for frame in frames if not any(part in frame[0] for part in library)]
    return " < ".join(f"{function} ({os.path.basename(path)}:{line})"
                      for path, line, function in (own or frames)[:2]) or "?"


# ---------------------------------------------------------------- one guard
class Guard:
    """Waits, in one thread, for its rank, the other guards and signals."""

    def __init__(self, process, pipe, own_group):
        self.process, self.pipe, self.own_group = process, pipe, own_group
        self.rank, self.size, self.launcher, self.joined = 0, 1, "plain process", False
        self.processes = [socket.gethostname(), os.getpid(), process.pid]
        self.limit, self.progress, self.step, self.checkpoint = 0.0, None, None, (None, None)
        self.run_dir = self.stacks = self.dumped = None      # dumped: length of the file before
        self.failed = self.bye = False
        self.left = self.interrupted = self.hub_lost = None  # times
        self.beaten = 0.0
        self.hub, self.listener, self.peers = None, None, {}     # rank 0's guard; socket -> rank
        self.token = os.urandom(8).hex()
        self.to_hub, self.hub_heard, self.hub_processes = None, 0.0, ["?"]    # the other guards
        self.verdict, self.began, self.unread = None, time.time(), {}    # unread: socket -> bytes
        self.selector = selectors.DefaultSelector()
        self.signals, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        for name in (*RELAYED, "SIGCHLD"):
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:    # as nohup has it
                signal.signal(getattr(signal, name), lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno())
        self.listen_to(pipe)
        self.listen_to(self.signals)

    def run(self):
        """Guard the rank to its end. Returns the exit code; of a signal its negative number."""
        ticked, faults = time.monotonic(), 0
        while True:
            try:
                if (code := self.exit_code()) is not None:
                    return code
                for key, _ in self.selector.select(TICK):
                    self.read(key.fileobj)
                now = time.monotonic()
                if now > ticked + SUSPENDED:
                    self.forget_ages(now)
                if now > ticked + TICK:
                    ticked = now
                    self.tick(now)
            except Exception as error:    # the guard's own fault must not end the run
                faults += 1
                if faults == 1:
                    print(f"ddp_guard: {type(error).__name__}: {error}", file=sys.stderr)
                time.sleep(TICK)

    def exit_code(self):
        """The code to leave with now, or None."""
        if self.verdict:
            return self.end_rank()
        code = self.process.poll()
        if code is None:
            return None
        self.read(self.pipe)    # its last messages
        if self.left and code < 0 and not self.failed:    # the results stand
            self.failed = True
            print(f"ddp_guard: rank {self.rank} ended by {signal.Signals(-code).name} after "
                  f"cleanup_ddp", file=sys.stderr)
        well = self.left or self.bye and code == 0
        if well or not self.joined and (code >= 0 or code == -signal.SIGINT):
            return None if self.verdict or self.hub and self.peers else code
        if not self.failed:
            if code >= 0:
                cause = f"left with exit code {code}" + " without cleanup_ddp" * (code == 0)
            else:
                memory = ": out of memory?" if code == -signal.SIGKILL else ""
                cause = f"{DIED} ({signal.Signals(-code).name}{memory})"
            self.fail({"code": max(code, 1), "cause": cause})
        return None

    def end_rank(self):
        """Kill the rank, its workers, and what does not answer on this host. Returns the code."""
        for host, *pids in self.verdict.silent:
            for pid in pids if host == self.processes[0] else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self.own_group:
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(OSError, TypeError):
            if os.path.getsize(self.stacks) == 0:
                os.unlink(self.stacks)
                os.rmdir(os.path.dirname(self.stacks))
        time.sleep(LEAVE)
        return self.verdict.code

    # ---- what it hears
    def listen_to(self, sock):
        self.selector.register(sock, selectors.EVENT_READ)
        self.unread[sock] = b""

    def read(self, sock):
        if sock is self.listener:
            with contextlib.suppress(OSError):
                sock, _ = self.listener.accept()
                sock.settimeout(LAST_WORDS)
                self.listen_to(sock)
        elif sock is self.signals:
            for number in sock.recv(64):
                self.pass_on(number)
        elif sock in self.unread:
            try:
                data = sock.recv(1 << 20, socket.MSG_DONTWAIT)
                *lines, self.unread[sock] = (self.unread[sock] + data).split(b"\n")
                for line in lines:
                    self.hear(sock, json.loads(line))
            except BlockingIOError:
                return
            except (OSError, ValueError, KeyError, TypeError):    # lost, or a stranger's nonsense
                data = b""
            known = sock in (self.pipe, self.to_hub, *self.peers)
            if not data or not known and len(self.unread[sock]) > 1000:
                self.lose(sock)

    def hear(self, sock, message):
        now = time.monotonic()
        if sock is self.pipe:
            self.hear_rank(now, **message)
        elif sock is self.to_hub:
            self.hub_heard, self.hub_processes = now, message.get("alive", self.hub_processes)
            if "stacks" in message:
                self.dump_stacks()
            if "end" in message:
                self.verdict = Verdict(*message["end"])
        else:
            if sock not in self.peers and message["hello"]["token"] != self.token:
                raise ValueError("a stranger")
            number = self.peers.setdefault(sock, message.get("hello", {}).get("rank"))
            self.end_run(self.hub.hear(number, message, now))
            if "hello" in message:
                send(sock, alive=self.processes)

    def lose(self, sock):
        self.selector.unregister(sock)
        del self.unread[sock]
        if sock in self.peers:
            self.end_run(self.hub.lose(self.peers.pop(sock)))
        elif sock is self.to_hub:
            self.to_hub = None
            self.hub_lost = None if self.bye else time.monotonic()
        if sock is not self.pipe:
            sock.close()

    def hear_rank(self, now, serve=None, join=None, watch=None, step=None, checkpoint=None,
                  failed=None, bye=None, left=None):
        self.progress = now
        self.step = self.step if step is None else step
        self.checkpoint = checkpoint or self.checkpoint
        self.left = now if left else self.left
        if serve is not None:
            self.serve(serve)
        if join is not None:
            self.join(**join)
        if watch is not None:
            self.limit, self.run_dir, self.stacks = (
                watch["limit"], watch["run_dir"], watch["stacks"])
        if bye is not None:
            self.bye = True
            self.report(bye=bye)
        if failed is not None:
            self.fail(failed)

    def serve(self, host):
        """Listen for the guards of the other ranks, and tell the rank where."""
        address = None
        with contextlib.suppress(OSError):
            import resource    # a connection for every rank
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self.listener = socket.create_server(place[:2], family=family, backlog=4096)
            self.listen_to(self.listener)
            address = [*self.listener.getsockname()[:2], self.token]
        send(self.pipe, address=address)

    def join(self, rank, size, host, launcher, hub):
        self.rank, self.size, self.launcher, self.processes[0] = rank, size, launcher, host
        self.bye, self.left, self.peers = False, None, {}    # a script may set up twice
        hello, now = {"rank": rank, "processes": self.processes}, time.monotonic()
        if rank == 0:
            self.hub = Hub(size)
            self.hub.hear(0, {"hello": hello}, now)
        else:
            try:
                self.to_hub = socket.create_connection(hub[:2], timeout=10)
            except OSError as error:
                print(f"ddp_guard: rank {rank} on {host} goes on without a guard: no connection to "
                      f"that of rank 0 at {hub[0]}:{hub[1]} ({error})", file=sys.stderr)
                return
            self.to_hub.settimeout(LAST_WORDS)
            self.listen_to(self.to_hub)
            self.hub_heard = now
            send(self.to_hub, hello={**hello, "token": hub[2]})
        self.joined = True

    def pass_on(self, number):
        """Give a signal to the rank. Before a terminal, it gets Ctrl-C from there."""
        now = time.monotonic()
        if number == signal.SIGINT:
            second = self.interrupted and now > self.interrupted + DOUBLE
            if second and self.joined:    # the rank may hold Python's lock
                self.fail({"code": 130, "cause": "interrupted twice (Ctrl-C)"})
                return
            self.interrupted = self.interrupted or now
        wanted = number != signal.SIGCHLD and (self.own_group or number != signal.SIGINT)
        if wanted and self.process.poll() is None:
            self.process.send_signal(number)

    # ---- what it does
    def report(self, **message):
        """Tell the hub, which may be here."""
        if self.hub:
            self.end_run(self.hub.hear(self.rank, message, time.monotonic()))
        elif self.to_hub:
            send(self.to_hub, **message)

    def fail(self, failure):
        failure = {"text": "", "secondary": False, "retry": True, "checkpoint": self.checkpoint,
                   **failure}
        self.failed = True
        if self.hub or self.to_hub or self.hub_lost:    # lost: that is the cause, see tick
            self.report(failed=failure)
        else:
            self.end_run(Verdict(self.rank, failure["code"], failure["cause"], self.processes[0],
                                 failure["text"], failure["retry"]))

    def tick(self, now):
        watched = self.limit and self.progress is not None and not self.bye
        # Of 12,000 ranks each gives a sign every 6 s: the hub hears 2,000 lines a second.
        due = now > self.beaten + TICK * (self.size / 1000)
        if due:
            self.beaten = now
            self.report(beat=[self.step, now - self.progress if watched else None, self.limit])
        if self.dumped is not None:
            with contextlib.suppress(OSError, TypeError), open(self.stacks) as file:
                file.seek(self.dumped)
                if text := file.read():
                    self.dumped = None
                    self.report(place=place_of(text))
        if self.hub:
            asked = self.hub.asked
            self.end_run(self.hub.decide(now))
            want_stacks = {"stacks": True} if self.hub.asked and not asked else {}
            for sock in self.peers if due or want_stacks else ():
                send(sock, alive=self.processes, **want_stacks)
            if want_stacks:
                self.dump_stacks()
        elif self.to_hub and not self.bye and now > self.hub_heard + SILENCE:
            self.hub_lost = self.hub_lost or now
        if self.hub_lost and now > self.hub_lost + 0.2 * min(self.rank, 20):    # one after another
            cause = f"no sign of its guard for {SILENCE:.0f} s" if self.to_hub else (
                f"{DIED}, and its guard with it")
            self.end_run(Verdict(0, HANG if self.to_hub else 1, cause, self.hub_processes[0],
                                 silent=[self.hub_processes] if self.to_hub else []))
        if self.left and now > self.left + EXIT:
            self.end_run(Verdict(self.rank, HANG, f"did not end within {EXIT:.0f} s after "
                                                  f"cleanup_ddp", self.processes[0]))

    def forget_ages(self, now):
        """This guard was suspended, and perhaps the whole run."""
        self.progress, self.left, self.hub_heard = self.progress and now, self.left and now, now
        if self.hub:
            self.hub.forget_ages(now)

    def dump_stacks(self):
        """Have faulthandler in the rank write its stacks, which needs no lock of Python."""
        if self.stacks is None:
            self.report(place="code before watch_run")
        with contextlib.suppress(OSError, TypeError):
            self.dumped = os.path.getsize(self.stacks)
            self.process.send_signal(signal.SIGQUIT)

    def end_run(self, verdict):
        """Print why, then tell the other guards: launchers kill all at the first end."""
        if verdict is None or self.verdict:
            return
        self.verdict = verdict
        words = threading.Thread(target=self.announce, daemon=True)
        words.start()
        words.join(LAST_WORDS)
        for sock in self.peers:
            send(sock, end=verdict)

    def announce(self):
        """Write status.json and the last line, unless another guard has."""
        verdict, place = self.verdict, f"rank {self.verdict.rank} on {self.verdict.host}"
        if self.run_dir:
            path = os.path.join(self.run_dir, "status.json")
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                recent = os.path.getmtime(path) >= self.began
                if recent and json.load(file)["code"] not in (None, 0, 75):
                    return
            with contextlib.suppress(OSError):    # a full disk is perhaps what is reported
                with open(f"{path}.{os.getpid()}.tmp", "w") as file:
                    reason = verdict.cause if self.size == 1 else f"{place}: {verdict.cause}"
                    json.dump({"code": verdict.code, "reason": reason, "step": self.step}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(file.name, path)
        place = place.replace(" on ", f" of {self.size} on ", 1)
        path, step = verdict.checkpoint if verdict.checkpoint[0] else self.checkpoint
        saved = f"Last checkpoint: {path}" if path else "No checkpoint yet"
        saved += "" if step is None else f" (step {step})"
        command = shlex.join(["python", *sys.orig_argv[1:]])
        again = (f"To go on, give the same command again ({self.launcher}, {self.size} rank(s)): "
                 f"{command}" if verdict.retry else "Mend the cause before the next start.")
        cause = verdict.cause.rstrip(".")
        cause = cause if len(cause) < 250 else f"{cause[:250]} ..."
        needed = verdict.code == 2 or verdict.text.strip() != cause    # of several lines, or long
        text = f"\n[{place}] {verdict.text.rstrip()}\n" if verdict.text and needed else "\n"
        if verdict.code != 2:    # bad input: nothing ran, nothing to go on with
            text += f"FAILED: {place}: {cause}. {saved}. {again}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def send(sock, **message):
    """Send a line, unless the other end is gone: then its own end is what counts."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ddp_guard SCRIPT ARGUMENTS...")
    supervise([sys.executable, *sys.argv[1:]])
