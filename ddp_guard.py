"""The parent of a rank: it ends a training run that cannot go on, and says why in one line.

    if __name__ == "__main__":          # the first lines of a script, before `import torch`
        import ddp_guard
        ddp_guard.supervise()
or, for a script that shall not be changed: python -m ddp_guard SCRIPT ARGUMENTS...

`supervise` starts the same command again as a child, the rank, and stays behind as its guard: a small process without
torch, which still works when the rank is stopped, holds Python's lock or is dead. The guards of all ranks are joined
by TCP at the guard of rank 0, the hub. The hub ends the run when a rank fails, dies without a word, makes no progress
(all ranks together, for the limit that ddp_setup.watch_run sets) or does not come to cleanup_ddp. It writes status.json
into the run folder and prints one line, `FAILED: rank R of N on HOST: cause ...`; then every guard kills its rank and
leaves with the same exit code. A run that ends well keeps the exit code of its script.

DDP_GUARD=0 switches it off; so do a debugger, a notebook, a script from stdin, and Windows. Under a launcher where it
was never tried (PALS, Flux, jsrun, MVAPICH2) it stays off and says so; DDP_GUARD=1 switches it on there.

Messages are lines of JSON. Rank to guard, over the descriptor named by DDP_GUARD_FD ("descriptor:guard's process"):
  {"serve": host}            rank 0: listen there for the other guards; answered by {"address": [host, port, token]}
  {"join": {"rank", "size", "host", "launcher", "hub": [host, port, token]}}
  {"watch": {"limit", "run_dir", "stacks"}}   seconds (0: no limit), folder or null, file for this rank's stacks
  {"step": number or null}   a sign of progress
  {"checkpoint": [path, step]}                what a next start continues from
  {"failed": {"code", "cause", "text", "secondary", "retry"}}
  {"bye": seconds}           in cleanup_ddp; the others may take that long to come there
  {"left": true}             cleanup_ddp is over, the process is about to end
Guard to hub: {"hello": {"token", "rank", "host", "pids"}}, {"beat": [step, seconds without progress or null, limit]},
{"failed": ...}, {"bye": seconds}, {"place": text}. Hub to guards: {"alive": pids}, {"stacks": true}, {"end": verdict}.
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
LATE_FAILURE = 1.0      # a failure that only reports a lost connection waits so long for the one that caused it
SILENCE = 13.0          # without a sign of a guard: it is stopped, or its host is gone. Signs come each second
SUSPENDED = 5.0         # a guard that wakes up so much too late was suspended itself, and forgets all ages
STACKS = 2.0            # for all ranks to write their stacks
WORDS = 5.0             # for the last line: stderr may be a full pipe, the file system may hang
LEAVE = 0.7             # between the verdict and the guards' ends: launchers kill all at the first end
EXIT = 120.0            # for Python to end after cleanup_ddp; traces of a profiler may be written then
DOUBLE = 0.2            # within it, a second SIGINT is the same Ctrl-C, which reached a rank on two ways
RELAYED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")
UNTRIED = {"PALS_RANKID": "PALS", "FLUX_TASK_RANK": "Flux", "JSM_NAMESPACE_RANK": "jsrun",
           "MV2_COMM_WORLD_RANK": "MVAPICH2"}
DIED = "died without a word"


# ---------------------------------------------------------------- the start
def supervise(command=None):
    """Returns in the rank, and where no guard is wanted; elsewhere stays as the guard and ends with the exit code.

    command: words of the rank's command line; default: the same as this process'.
    """
    descriptor, _, parent = os.environ.get("DDP_GUARD_FD", "").partition(":")
    if parent and int(parent) == os.getppid():    # this is the rank
        os.set_inheritable(int(descriptor), False)
        return
    reason = why_not(os.environ) if command is None else ""
    if reason:
        if reason.startswith("never tried") and os.environ.get("PALS_RANKID", "0") == "0":
            print(f"ddp_guard: {reason}; the run goes on without it. DDP_GUARD=1 uses it.", file=sys.stderr)
        return
    if _started_by_an_agent():    # torchrun and Open MPI leave ranks behind when they are killed
        _die_with_parent(signal.SIGTERM)
    # An own group of processes can be killed whole, with the DataLoader's workers. Not before a terminal: there a group
    # in the background cannot read.
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
    wish = environment.get("DDP_GUARD", "")
    main = sys.modules.get("__main__")
    if wish == "0":
        return "DDP_GUARD=0"
    if os.name != "posix":
        return "no such processes on this system"
    if sys.gettrace() or "bdb" in sys.modules or "pydevd" in sys.modules:
        return "a debugger is at work"
    if hasattr(sys, "ps1") or sys.flags.interactive or not getattr(main, "__file__", None):
        return "an interactive session, or a script from stdin"
    untried = next((name for variable, name in UNTRIED.items() if variable in environment), None)
    return f"never tried under {untried}" if untried and wish != "1" else ""


def _die_with_parent(number):
    """Have the kernel send this process a signal when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)    # PR_SET_PDEATHSIG


def _started_by_an_agent():
    """Is the parent torchrun's agent or Open MPI's? A shell in between may be gone at once, and that is no signal."""
    if not {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        return False
    try:
        with open(f"/proc/{os.getppid()}/comm") as file:
            return not re.search(r"sh$|^env$|^numactl$", file.read().strip())
    except OSError:
        return False


def _in_terminal():
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:    # no terminal, or not ours
        return False


# ---------------------------------------------------------------- decisions of the hub
class Verdict(NamedTuple):
    """Why the run ends. rank: the one at fault; text: what is printed before the last line; retry: may the same
    command help; silent: ranks whose guards do not answer."""
    rank: int
    code: int
    cause: str
    host: str = "?"
    text: str = ""
    retry: bool = True
    silent: tuple = ()


class Rank:
    """What the hub knows of one rank."""

    def __init__(self, host, pids, now):
        self.host, self.pids, self.heard = host, pids, now
        self.step = self.progress = self.place = None    # progress: when there was some last; None: not watched
        self.bye = self.gone = False


class Hub:
    """Hears of all ranks and decides when the run must end. All times are given to it, so it is testable."""

    def __init__(self, size):
        self.size, self.ranks = size, {}
        self.limit = self.patience = 0.0
        self.pending = self.first_bye = self.asked = None

    def hear(self, number, message, now):
        """Take note of a guard's message. Returns the Verdict that follows from it at once, or None."""
        if "hello" in message:
            self.ranks[number] = Rank(message["hello"]["host"], message["hello"]["pids"], now)
        rank = self.ranks[number]
        rank.heard = now
        if "beat" in message:
            rank.step, age, limit = message["beat"]
            rank.progress = None if age is None else now - age
            self.limit = limit or self.limit
        elif "place" in message:
            rank.place = message["place"]
        elif "bye" in message:
            rank.bye, rank.progress = True, None
            self.first_bye, self.patience = self.first_bye or now, message["bye"]
        elif "failed" in message:
            failure = message["failed"]
            verdict = Verdict(number, failure["code"], failure["cause"], rank.host, failure["text"], failure["retry"])
            if not failure["secondary"]:
                return verdict
            self.pending = self.pending or (now + LATE_FAILURE, verdict)
        return None

    def lose(self, number):
        """A guard's connection is closed. Returns a Verdict if it had not said goodbye, or None."""
        rank = self.ranks[number]
        rank.gone, rank.progress = True, None
        return None if rank.bye else Verdict(number, 1, f"{DIED} (its guard was killed, or its host is gone)", rank.host)

    def decide(self, now):
        """What follows from the time that has passed: a Verdict or None. `asked` is set when stacks are wanted."""
        if self.pending and now >= self.pending[0]:
            return self.pending[1]
        there = {number: rank for number, rank in self.ranks.items() if not rank.gone}
        silent = {number: rank for number, rank in there.items() if now - rank.heard > SILENCE}
        for number, rank in silent.items():
            return Verdict(number, HANG, f"no sign of its guard for {SILENCE:.0f} s: stopped, or its host is gone",
                           rank.host, silent=processes(silent.values()))
        missing = [number for number, rank in there.items() if not rank.bye]
        if self.first_bye and missing and now > self.first_bye + self.patience:
            cause = f"rank {listed(missing)} of {self.size} did not come to cleanup_ddp within {self.patience:.0f} s"
            return Verdict(missing[0], HANG, cause, self.ranks[missing[0]].host)
        watched = [rank.progress for rank in there.values() if rank.progress is not None]
        if not watched or not self.limit or now - max(watched) < self.limit:
            self.asked = None
        elif self.asked is None:
            self.asked = now
        elif now > self.asked + STACKS or all(rank.place is not None for rank in there.values()):
            return self.describe_hang(there, now)
        return None

    def describe_hang(self, ranks, now):
        """A Verdict that names the late ranks: those that write no stacks, else those at the lowest step, else those at
        another place than most."""
        late = [number for number, rank in ranks.items() if rank.place is None]
        steps = {number: -1 if rank.step is None else rank.step for number, rank in ranks.items()}
        places = collections.Counter(rank.place for rank in ranks.values())
        if not late and len(set(steps.values())) > 1:
            late = [number for number in steps if steps[number] == min(steps.values())]
        if not late:
            usual = places.most_common(1)[0][0]
            late = [number for number, rank in ranks.items() if rank.place != usual] or list(ranks)
        stories = [f"rank {number} on {ranks[number].host}, last step {ranks[number].step}, "
                   + (f"in {ranks[number].place}" if ranks[number].place else "does not answer: it is stopped")
                   for number in late[:8]]
        cause = f"no progress for {self.limit:.0f} s (the watchdog's limit). Late: {'; '.join(stories)}"
        waiting = collections.defaultdict(list)
        for number, rank in ranks.items():
            if number not in late:
                waiting[rank.place].append(number)
        text = "\n".join([cause, *(f"  waiting: rank {listed(group)} in {place}" for place, group in waiting.items())])
        silent = processes(ranks[number] for number in late if now - ranks[number].heard > STACKS)
        return Verdict(late[0], HANG, cause, ranks[late[0]].host, text, silent=silent)

    def forget_ages(self, now):
        """This guard was suspended, and perhaps all others with it."""
        for rank in self.ranks.values():
            rank.heard = now
            rank.progress = None if rank.progress is None else now


def processes(ranks):
    """[host, its guard's process, its own] of ranks."""
    return tuple([rank.host, *rank.pids] for rank in ranks)


def listed(items):
    """Up to 20 items as text."""
    return ", ".join(map(str, items[:20])) + (f" and {len(items) - 20} more" if len(items) > 20 else "")


def place_of(stacks):
    """Where the main thread is, from what faulthandler has written: the innermost frame that is no library's."""
    section = stacks.rpartition("Current thread")[2] or stacks
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section.partition("\n\n")[0])
    library = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    own = [frame for frame in frames if not any(part in frame[0] for part in library)]
    return " < ".join(f"{name} ({os.path.basename(path)}:{line})" for path, line, name in (own or frames)[:2]) or "?"


# ---------------------------------------------------------------- one guard
class Guard:
    """Waits, in one thread, for its rank, the other guards and signals."""

    def __init__(self, process, pipe, own_group):
        self.process, self.pipe, self.own_group = process, pipe, own_group
        self.rank, self.size, self.launcher, self.joined = 0, 1, "plain process", False
        self.host, self.pids, self.token = socket.gethostname(), [os.getpid(), process.pid], os.urandom(8).hex()
        self.limit, self.progress, self.step, self.checkpoint = 0.0, None, None, [None, None]
        self.run_dir = self.stacks = self.dumped = None           # dumped: length of the file before a request
        self.failed = self.bye = False
        self.left = self.interrupted = self.hub_lost = None       # times
        self.hub, self.listener, self.peers = None, None, {}      # in rank 0's guard; peers: socket -> rank
        self.to_hub, self.hub_heard, self.hub_pids = None, 0.0, []    # in the others
        self.verdict, self.began, self.buffers = None, time.time(), {}
        self.selector = selectors.DefaultSelector()
        self.signals, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        for name in (*RELAYED, "SIGCHLD"):
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:    # as nohup has it
                signal.signal(getattr(signal, name), lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno())
        for each in (pipe, self.signals):
            self.watch_socket(each)

    def run(self):
        """Guard the rank to its end; returns the exit code, of a signal its negative number."""
        try:
            ticked = time.monotonic()
            while (code := self.exit_code()) is None:
                for key, _ in self.selector.select(0.2 if self.dumped is not None or self.hub_lost else 1.0):
                    self.read(key.fileobj)
                now = time.monotonic()
                if now - ticked > 1.0 + SUSPENDED:
                    self.forget_ages(now)
                if now - ticked >= 0.2:
                    ticked = now
                    self.tick(now)
            return code
        except Exception as error:    # the guard's own fault must not end the run
            print(f"ddp_guard: {type(error).__name__}: {error}. The run goes on without it.", file=sys.stderr)
            return self.process.wait()

    def exit_code(self):
        """The code to leave with now, or None."""
        if self.verdict:
            return self.end_rank()
        code = self.process.poll()
        if code is None:
            return None
        self.read(self.pipe)    # its last messages
        if self.bye or not self.joined and code in (-signal.SIGINT, *range(256)):
            others_stay = self.hub and any(sock in self.peers for sock in self.buffers)
            return None if others_stay and not self.verdict else code
        if not self.failed and not self.verdict:
            number = -code
            cause = f"left with exit code {code}" + " without cleanup_ddp" * (code == 0) if code >= 0 else (
                f"{DIED} ({signal.Signals(number).name}" + ": out of memory?)" if number == signal.SIGKILL else
                f"{DIED} ({signal.Signals(number).name})")
            self.fail({"code": code if code > 0 else 1, "cause": cause})
        return None

    def end_rank(self):
        """Kill the rank with its workers, and guards of this host that do not answer. Returns the exit code."""
        for host, *pids in self.verdict.silent:
            for pid in pids if host == self.host else ():
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

    # ---- what is heard
    def watch_socket(self, sock):
        self.selector.register(sock, selectors.EVENT_READ)
        self.buffers[sock] = b""

    def read(self, sock):
        if sock is self.listener:
            with contextlib.suppress(OSError):
                sock, _ = self.listener.accept()
                sock.settimeout(WORDS)
                self.watch_socket(sock)
            return
        if sock is self.signals:
            for number in sock.recv(64):
                self.pass_on(number)
            return
        if sock not in self.buffers:    # closed before
            return
        try:
            data = sock.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self.buffers.get(sock, b"") + data).split(b"\n")
        try:
            for line in lines:
                self.hear(sock, json.loads(line))
        except (ValueError, KeyError, TypeError):    # a stranger at the hub's port
            data = b""
        self.buffers[sock] = rest
        if not data or sock not in (self.pipe, self.to_hub, *self.peers) and len(rest) > 1000:
            self.lose(sock)

    def hear(self, sock, message):
        if sock is self.pipe:
            self.hear_rank(**message)
        elif sock is self.to_hub:
            self.hub_heard = time.monotonic()
            self.hub_pids = message.get("alive", self.hub_pids)
            if "stacks" in message:
                self.dump_stacks()
            if "end" in message:
                self.verdict = Verdict(*message["end"])
        else:
            if sock not in self.peers and message["hello"]["token"] != self.token:
                raise ValueError("a stranger")
            number = self.peers.setdefault(sock, message.get("hello", {}).get("rank"))
            self.end_run(self.hub.hear(number, message, time.monotonic()))
            if "hello" in message:
                send(sock, alive=[self.host, *self.pids])

    def lose(self, sock):
        self.selector.unregister(sock)
        del self.buffers[sock]
        if sock in self.peers:
            self.end_run(self.hub.lose(self.peers.pop(sock)))
        elif sock is self.to_hub:
            self.to_hub = None
            if not self.bye and not self.verdict:
                self.hub_lost = time.monotonic()
        if sock is not self.pipe:
            sock.close()

    def hear_rank(self, serve=None, join=None, watch=None, checkpoint=None, failed=None, bye=None, left=None, **step):
        self.progress = time.monotonic()
        if serve is not None:
            self.serve(serve)
        if join is not None:
            self.join(**join)
        if watch is not None:
            self.limit, self.run_dir, self.stacks = watch["limit"], watch["run_dir"], watch["stacks"]
        self.step = self.step if step.get("step") is None else step["step"]
        self.checkpoint = checkpoint or self.checkpoint
        if bye is not None:
            self.bye = True
            self.report(bye=bye)
        if left:
            self.left = time.monotonic()
        if failed is not None:
            self.fail(failed)

    def serve(self, host):
        """Listen for the guards of the other ranks, and tell the rank where."""
        address = None
        with contextlib.suppress(OSError):
            import resource
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))    # a connection for every rank
            family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self.listener = socket.create_server(place[:2], family=family, backlog=4096)
            self.watch_socket(self.listener)
            address = [*self.listener.getsockname()[:2], self.token]
        send(self.pipe, address=address)

    def join(self, rank, size, host, launcher, hub):
        self.rank, self.size, self.host, self.launcher = rank, size, host, launcher
        self.bye, self.left, self.peers = False, None, {}    # a script may set up twice
        hello = {"rank": rank, "host": host, "pids": self.pids}
        if rank == 0 or size == 1:
            self.hub = Hub(size)
            self.hub.hear(0, {"hello": hello}, time.monotonic())
        else:
            try:
                self.to_hub = socket.create_connection(hub[:2], timeout=10)
            except OSError as error:
                print(f"ddp_guard: rank {rank} on {host}: no connection to the guard of rank 0 ({error}); "
                      f"this rank goes on without a guard.", file=sys.stderr)
                return
            self.to_hub.settimeout(WORDS)
            self.watch_socket(self.to_hub)
            self.hub_heard = time.monotonic()
            send(self.to_hub, hello={**hello, "token": hub[2]})
        self.joined = True

    def pass_on(self, number):
        now = time.monotonic()
        if number == signal.SIGINT:
            if self.interrupted and now - self.interrupted > DOUBLE:    # the rank may hold Python's lock
                self.fail({"code": 130, "cause": "interrupted twice (Ctrl-C)"})
                return
            self.interrupted = self.interrupted or now
        if number != signal.SIGCHLD and (self.own_group or number != signal.SIGINT) and self.process.poll() is None:
            self.process.send_signal(number)

    # ---- what follows
    def report(self, **message):
        """To the hub, which may be here."""
        if self.hub:
            self.end_run(self.hub.hear(self.rank, message, time.monotonic()))
        elif self.to_hub:
            send(self.to_hub, **message)

    def fail(self, failure):
        failure = {"text": "", "secondary": False, "retry": True, **failure}
        self.failed = True
        if self.joined:
            self.report(failed=failure)
        else:
            self.end_run(Verdict(self.rank, failure["code"], failure["cause"], self.host, failure["text"],
                                 failure["retry"]))

    def tick(self, now):
        """What is done each second."""
        age = now - self.progress if self.limit and self.progress is not None and not self.bye else None
        self.report(beat=[self.step, age, self.limit])
        if self.dumped is not None and self.stacks:
            with contextlib.suppress(OSError), open(self.stacks) as file:
                file.seek(self.dumped)
                if text := file.read():
                    self.dumped = None
                    self.report(place=place_of(text))
        if self.hub and not self.verdict:
            asked = self.hub.asked
            self.end_run(self.hub.decide(now))
            for sock in list(self.peers) if not self.verdict else ():
                send(sock, alive=[self.host, *self.pids], **({"stacks": True} if self.hub.asked != asked else {}))
            if self.hub.asked and not asked:
                self.dump_stacks()
        elif self.to_hub and not self.bye and now - self.hub_heard > SILENCE:
            self.hub_lost = self.hub_lost or now
        if self.hub_lost and now > self.hub_lost + 0.2 * min(self.rank, 20):    # one after the other
            silent = [self.hub_pids] if self.to_hub else []
            cause = f"no sign of its guard for {SILENCE:.0f} s" if silent else f"{DIED}, and its guard with it"
            self.end_run(Verdict(0, HANG if silent else 1, cause, (self.hub_pids or ["?"])[0], silent=silent))
        if self.left and now > self.left + EXIT:
            self.end_run(Verdict(self.rank, HANG, f"did not end within {EXIT:.0f} s after cleanup_ddp", self.host))

    def forget_ages(self, now):
        """This guard was suspended, and perhaps the whole run."""
        self.progress = self.progress and now
        self.left, self.hub_heard = self.left and now, now
        if self.hub:
            self.hub.forget_ages(now)

    def dump_stacks(self):
        """Have faulthandler in the rank write its stacks, which it can even where Python cannot run."""
        self.dumped = 0
        with contextlib.suppress(OSError, TypeError):
            self.dumped = os.path.getsize(self.stacks)
            self.process.send_signal(signal.SIGQUIT)

    def end_run(self, verdict):
        """Say why, then tell the other guards: launchers kill all at the first end."""
        if verdict is None or self.verdict:
            return
        self.verdict = verdict
        words = threading.Thread(target=self.speak, daemon=True)
        words.start()
        words.join(WORDS)
        for sock in self.peers:
            send(sock, end=verdict)

    def speak(self):
        """Write status.json and the last line, unless another guard has."""
        verdict, status = self.verdict, os.path.join(self.run_dir or "", "status.json")
        place = f"rank {verdict.rank} of {self.size} on {verdict.host}"
        if self.run_dir:
            with contextlib.suppress(OSError, ValueError), open(status) as file:
                if os.path.getmtime(status) >= self.began and json.load(file)["code"] not in (None, 0, 75):
                    return
            with contextlib.suppress(OSError):    # a full disk is perhaps what is reported
                with open(f"{status}.{os.getpid()}.tmp", "w") as file:
                    reason = verdict.cause if self.size == 1 else f"rank {verdict.rank} on {verdict.host}: {verdict.cause}"
                    json.dump({"code": verdict.code, "reason": reason, "step": self.step}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(file.name, status)
        path, step = self.checkpoint
        saved = "No checkpoint yet" if path is None else f"Last checkpoint: {path}"
        saved += "" if step is None else f" (step {step})"
        again = (f"To go on, give the same command again ({self.launcher}, {self.size} rank(s)): "
                 f"{shlex.join(['python', *sys.orig_argv[1:]])}" if verdict.retry else
                 "The same command would end here again: mend the cause first.")
        cause = verdict.cause.rstrip(".") if len(verdict.cause) < 250 else verdict.cause[:250] + " ..."
        text = f"\n[{place}] {verdict.text.rstrip()}\n" if verdict.text else "\n"
        last = "" if verdict.code == 2 else f"FAILED: {place}: {cause}. {saved}. {again}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + last)
            sys.stderr.flush()


def send(sock, **message):
    """Send a line, unless the other end is gone: then its own end is what counts."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ddp_guard SCRIPT ARGUMENTS...")
    supervise([sys.executable, *sys.argv[1:]])
