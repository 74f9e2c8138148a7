"""Does a run of train_sedd_ddp.py end soon, say why, lose nothing and go on to the same weights?

Launcher x fault on real processes. The faults of one launcher hit one run after the other: every
row goes on from what the row before has left, its checkpoint is compared with that of an
undisturbed run at the same step, and at the end the run is finished and compared. A table of what
happened is printed at the end, and appended to the file that the variable FAULT_TABLE names.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

from ddp_setup import load_checkpoint
from launchers import (
    about,
    clean_environment,
    fork_ranks,
    need,
    own_tracebacks,
    read_status,
    run_ranks,
    seconds_until,
    slow,
    start_ranks,
)
from training_runs import equal, same_run

GONE = 15.0         # seconds in which every process must be gone after a failure; 5 are wanted
AGENT = 35.0        # seconds after which torchrun has killed a guard that is stopped
SILENCE = 30.0      # seconds after the limit until a guard that gives no sign counts as stopped
INIT = 8            # seconds that ranks wait for one that failed before it came to them
WATCHDOG = 6.0      # seconds without progress after which a run is ended, where rows wait for it
WATCHED = f"monitoring.watchdog_minutes={WATCHDOG / 60}"
SAVE_EVERY = 2
FAILED = r"^FAILED: rank (\d+)(?: of \d+)? on \S+: (.*)$"
DRIVER = Path(__file__).resolve().parent / "fault_driver.py"    # the training script, with a fault
CONFIG = """
training: {batch_size: 4, n_iters: %d, eval_freq: %d, log_freq: 1, snapshot_freq: %d}
optim: {lr: 3e-3, warmup: 4, ema: 0.9}
model: {hidden_size: 32, n_blocks: 2, n_heads: 2, cond_dim: 16, dropout: 0.1}
data: {max_length: 48, val_fraction: 0.05, demo_proteins: 300}
memory: {mixed_precision: false}
monitoring: {n_samples: 2, sample_steps: 2}
"""

# Of each launcher: the name for launchers.py, ranks, words for the launcher, environment.
LAUNCHERS = {
    "python": ("python", 1, [], {}), "ours": ("ours", 2, [], {}),
    "torchrun": ("torchrun", 2, [], {}), "openmpi": ("openmpi", 2, [], {}),
    "mpich": ("mpich", 2, [], {}), "intel": ("intel", 2, [], {}),
    "srun": ("srun", 2, ["--kill-on-bad-exit=0"], {}),
    "srun --kill-on-bad-exit": ("srun", 2, ["--kill-on-bad-exit=1"], {}),
    "mpich without mpi4py": ("mpich", 2, [], {"DDP_MPI4PY": "0"}),
    "torchrun with signals": ("torchrun", 2, ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"], {}),
    "two hosts, torchrun": ("torchrun-2hosts", 2, [], {}),
    "two hosts, mpich": ("mpich-2hosts", 2, [], {})}


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what is expected then.

    fault, rank: see fault_driver.py (rank -1: the last one). code: in status.json. says: pattern of
    the cause. act: what the test does to the run when the fault file has appeared."""
    fault: str
    rank: int
    code: int | None
    says: str
    act: object = None
    overrides: tuple = ()
    watchdog: bool = False   # the run ends by its limit
    guard: bool = False      # it hits the guard, not the rank


def to_launcher(number, running, folder):
    # Intel's mpirun is a shell script, which dies of the signal and passes nothing on. Its
    # mpiexec.hydra does.
    pids = [pid for pid in running.pids() if about(pid, "comm").startswith("mpiexec.hydra")]
    os.kill(pids[0] if pids else running.process.pid, number)


def to_all(number, running, folder):
    for pid in running.pids():
        with contextlib.suppress(OSError):      # it has just ended
            if about(pid, "comm") != "srun\n":      # see scancel
                os.kill(pid, number)


def to_guard(rank, number, running, folder, with_rank=False):
    guard = running.guard_pids()[rank]
    pid = running.rank_pids()[rank]
    for each in (guard, pid) if with_rank else (guard,):
        os.kill(each, number)


def scancel(flags, running, folder):
    """Slurm sends its signals to the tasks. srun itself, when it gets SIGTERM, has all tasks killed
    at once."""
    variables = about(running.rank_pids()[0], "environ")
    job = re.search(r"\0SLURM_JOB_ID=(\d+)", variables)[1]
    subprocess.run(["scancel", *flags, job], env=clean_environment("srun"), check=True)


WORKERS = ("training.num_workers=2",)
DIED = "died without a word"
LOST = f"{DIED}|RuntimeError"   # nobody is left to speak for that rank: others tell what they see
HANGS = "no progress for 6 s"
RAISE = "raise ValueError('on purpose')"
LOCK = "mine and sum(range(10**15))"    # a call in C keeps the GIL for days, and sees no signal
TERM = signal.SIGTERM
USR1 = signal.SIGUSR1
KILL = signal.SIGKILL
STOP = signal.SIGSTOP
FAULTS = {
    "exception in forward": Fault(f"if mine: {RAISE}", 1, 1, "ValueError: on purpose"),
    "exception, others busy": Fault(f"mine or time.sleep(600); {RAISE}", 0, 1,
                                    "ValueError: on purpose"),
    "exit code 1": Fault("mine and sys.exit(1)", 1, 1, "left with exit code 1"),
    "kill -9 of rank 0": Fault("mine and os.kill(os.getpid(), 9)", 0, 1, DIED),
    "kill -9 of the last rank": Fault("mine and os.kill(os.getpid(), 9)", -1, 1, DIED),
    "os.abort": Fault("mine and os.abort()", 1, 1, DIED),
    "out of memory": Fault("mine and run_out_of_memory()", 1, 1, DIED),
    "SIGSTOP": Fault("mine and os.kill(os.getpid(), 19)", 1, 70, HANGS, watchdog=True),
    "SIGSTOP of rank 0": Fault("mine and os.kill(os.getpid(), 19)", 0, 70, HANGS, watchdog=True),
    "lock held in C": Fault(LOCK, 1, 70, HANGS, watchdog=True),
    "endless loop": Fault("mine and exec('while True: pass')", 1, 70, HANGS, watchdog=True),
    "os._exit(0)": Fault("mine and os._exit(0)", 1, 1, "left with exit code 0 without a word"),
    "guard killed": Fault("slow", 1, 1, LOST, partial(to_guard, 1, KILL), guard=True),
    "guard of rank 0 killed": Fault("slow", 0, 1, LOST, partial(to_guard, 0, KILL), guard=True),
    "guard and rank stopped": Fault("slow", 1, 70, f"{HANGS}.*does not answer",
                                    partial(to_guard, 1, STOP, with_rank=True), guard=True,
                                    watchdog=True),
    "guard and rank 0 stopped": Fault("slow", 0, 70, f"{HANGS}.*does not answer",
                                      partial(to_guard, 0, STOP, with_rank=True), guard=True,
                                      watchdog=True),
    "SIGTERM": Fault("slow", 0, 75, "SIGTERM", partial(to_launcher, TERM)),
    "SIGUSR1": Fault("slow", 0, 75, "SIGUSR1", partial(to_launcher, USR1)),
    # It ends torchrun's agent and nothing else; the guards see that and send SIGTERM.
    "SIGUSR1 to the agent": Fault("slow", 0, 75, "SIGTERM", partial(to_launcher, USR1)),
    "SIGTERM to all, 2 workers": Fault("slow", 0, 75, "SIGTERM", partial(to_all, TERM), WORKERS),
    "SIGUSR1 to all, 2 workers": Fault("slow", 0, 75, "SIGUSR1", partial(to_all, USR1), WORKERS),
    "scancel -s TERM": Fault("slow", 0, 75, "SIGTERM", partial(scancel, ["-s", "TERM"])),
    "scancel": Fault("slow", 0, 75, "SIGTERM", partial(scancel, [])),
    "SIGTERM to srun": Fault("slow", 0, None, "", partial(to_launcher, TERM)),
    "STOP file": Fault("slow", 0, 75, "STOP",
                       lambda running, folder: (folder / "run" / "STOP").touch()),
    "DDP_DEADLINE": Fault("slow", 0, 75, "DDP_DEADLINE"),
}
QUICK = {"mpich": ("SIGUSR1",)}
FULL = tuple(name for name in FAULTS if not re.search("scancel|srun|USR1 to", name))
# What hangs on the launcher: how it ends the others, passes signals on, and notices the death of a
# rank or of its guard.
FIVE = ("exception, others busy", "exit code 1", "kill -9 of rank 0", "SIGSTOP", "guard killed")
HOSTS = ("exception, others busy", "kill -9 of rank 0", "SIGSTOP", "cable pulled")
# Of our own launcher those by which it could differ from others.
OURS = ("exception, others busy", "kill -9 of rank 0", "guard killed", "guard and rank stopped",
        "SIGTERM", "SIGUSR1")
SLOW = {"ours": OURS,
        "torchrun": (*FIVE, "SIGTERM", "SIGUSR1 to the agent"),
        "mpich": tuple(name for name in FULL if name not in QUICK["mpich"]),
        "openmpi": (*FIVE, "SIGTERM", "SIGUSR1 to all, 2 workers"), "intel": (*FIVE, "SIGTERM"),
        "srun": (*FIVE, "scancel -s TERM", "SIGTERM to srun"),
        "srun --kill-on-bad-exit": ("exception, others busy", "SIGSTOP", "scancel"),
        "mpich without mpi4py": ("exception, others busy", "kill -9 of rank 0"),
        "torchrun with signals": ("SIGUSR1",),
        "two hosts, torchrun": HOSTS, "two hosts, mpich": HOSTS}


# ---------------------------------------------------------------- the table
@dataclass
class Row:
    launcher: str
    fault: str
    gone: float = float("nan")
    exit: str = ""
    status: str = ""
    continued: str = "not tried"


@pytest.fixture(scope="session")
def table(request):
    """Rows of what happened; printed when the session ends."""
    rows = []
    yield rows
    cells = [["launcher", "fault", "gone after s", "exit", "status.json", "continued"]]
    cells += [[row.launcher, row.fault, f"{row.gone:.1f}", row.exit, row.status, row.continued]
              for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    text = "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{text}")
    if os.environ.get("FAULT_TABLE"):
        with open(os.environ["FAULT_TABLE"], "a") as file:     # each process of pytest has rows
            file.write(text + "\n")


# ---------------------------------------------------------------- runs
@pytest.fixture(scope="session")
def steps(request):
    """Of a run: each fault of a chain takes a few."""
    return 66 if request.config.getoption("--slow") else 20


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, steps):
    """undisturbed(n): folder of a run on n ranks to which nothing happened, with step_N.pt of every
    step."""
    @cache
    def get(n):
        folder = tmp_path_factory.mktemp(f"undisturbed{n}")
        arguments = prepare(folder, steps) + ["training.snapshot_freq=1"]
        result = fork_ranks(n, arguments, folder, {"KEEP_ALL": folder}, timeout=600)
        assert result.returncode == 0, result.text
        return folder
    return get


def prepare(folder, steps):
    """Write the config into `folder`; returns the words to start the run there."""
    (folder / "config.yaml").write_text(CONFIG % (steps, steps // 2, SAVE_EVERY))
    return [DRIVER, "--config", "config.yaml", "--work_dir", "run"]


def check_checkpoint(run_dir, reference):
    """The step of last.pt, which must be, to the last bit, what the undisturbed run had there."""
    state = load_checkpoint(str(run_dir / "checkpoints" / "last.pt"))
    wanted = load_checkpoint(str(reference / f"step_{state['step']}.pt"))
    for key in ("model", "ema", "optimizer", "scaler", "best", "bad_evals"):
        assert equal(state[key], wanted[key]), (
            f"{key} differs from the undisturbed run at step {state['step']}")
    return state["step"]


def await_end(row, running, run_dir, limit=45.0):
    """Wait until all processes are gone, and note it in `row`; returns Result and status.json."""
    row.gone = seconds_until(lambda: not running.pids(), limit)
    result = running.wait(timeout=5, leftover_grace=0)
    status = read_status(run_dir)
    row.exit = str(result.returncode)
    row.status = str(status.get("code"))
    print(f"{row}, {status}\n{result.text}")
    return result, status


def check_status(status, fault, result):
    assert status.get("code") == fault.code, (status, result.text)
    assert re.search(fault.says, status["reason"]), (status, result.text)


class Chain:
    """One run in one folder, hit by one fault after the other."""

    def __init__(self, label, folder, reference, table, steps=20):
        self.label = label
        self.steps = steps
        self.folder = folder
        self.reference = reference
        self.table = table
        self.launcher, self.n, self.flags, self.env = LAUNCHERS[label]
        self.run_dir = folder / "run"
        self.flag = folder.parent / f"{folder.name}.fault"
        self.words = prepare(folder, steps)
        self.step = 0
        self.rows = []   # whose continuing is yet to be seen

    def start(self, *more, **env):
        return start_ranks(self.launcher, self.n, [*self.words, *more], self.folder,
                           env={**self.env, **env}, flags=self.flags)

    def environment(self, fault, rank=0):
        """The variables that bring a fault about."""
        self.flag.unlink(missing_ok=True)
        return dict(FAULT=fault, FAULT_RANK=rank, FAULT_FILE=self.flag,
                    FAULT_STEP=self.fault_step())

    def fault_step(self):
        """The third step from here. In a new run later, when there is a checkpoint."""
        return self.step + 3 if self.step else SAVE_EVERY + 3

    @contextlib.contextmanager
    def faulty(self, name, *more, fault="slow", rank=0, **env):
        """Begin a row of the table and continue the run; yields both when the fault has come."""
        row = Row(self.label, name)
        self.table.append(row)
        with self.start(*more, **self.environment(fault, rank), **env) as running:
            if "DDP_DEADLINE" in env:
                seconds_until(lambda: time.time() > env["DDP_DEADLINE"], 60)
            else:
                process = running.process
                seconds_until(lambda: self.flag.exists() or process.poll() is not None, 300)
                assert self.flag.exists(), (
                    f"no fault came about:\n{running.stdout()}\n{running.stderr()}")
            if not fault.startswith("early"):
                self.check_continued(running)
            yield row, running
        self.rows.append(row)

    def check_continued(self, running):
        """Has this start gone on from where the one before has left off?"""
        expected = f"continuing from step {self.step}" if self.step else "a new run"

        def seen():
            return expected in " ".join(running.stdout().split())     # a path may have been wrapped
        # What a rank prints comes through its launcher, after the files that it writes.
        seconds_until(lambda: seen() or not running.pids(), 60.0)
        ok = seen()
        for row in self.rows:
            row.continued = "yes" if ok else "NO"
        assert ok, f"expected {expected!r} in\n{running.stdout()}"
        self.rows.clear()

    def hit(self, name, fault, **env):
        """Continue the run, have the fault happen, and check what it leaves."""
        rank = fault.rank % self.n
        step = self.fault_step()
        if name == "DDP_DEADLINE":
            env.update(DDP_DEADLINE=time.time() + 10, PACE=1)
        limit = WATCHDOG if fault.watchdog else 0.0
        more = (*fault.overrides, *([WATCHED] if fault.watchdog else []))
        with self.faulty(name, *more, fault=fault.fault, rank=rank, **env) as (row, running):
            if fault.act:
                fault.act(running, self.folder)
            result, status = await_end(row, running, self.run_dir, limit + 75.0)
        (self.run_dir / "STOP").unlink(missing_ok=True)

        assert row.gone - limit < self.most_seconds(fault), result.text
        assert result.returncode != 0
        if self.launcher.startswith("mpich") and status.get("code") is not None:
            assert result.returncode == status["code"], result.text
        saved = check_checkpoint(self.run_dir, self.reference)
        # The last periodic one. A fault from outside comes during the step before, perhaps before
        # it is saved.
        periodic = (step - 1 - (fault.fault == "slow")) // SAVE_EVERY * SAVE_EVERY
        if fault.code is None:
            # All were killed; perhaps one outlived another for long enough to tell of its death.
            assert status.get("code") is None or DIED in status["reason"], (status, result.text)
            assert saved >= max(periodic, self.step), (status, result.text)
        elif fault.code == 75:
            self.check_stopped_well(fault, result, status, saved, max(periodic, self.step))
        else:
            self.check_failed(fault, result, status, rank)
            later = SAVE_EVERY if fault.fault == "slow" else 0   # from outside: one step later
            assert saved in (periodic, periodic + later), "the last periodic checkpoint is another"
        if fault.watchdog and not fault.guard:
            for other in set(range(self.n)) - {rank}:
                stacks = self.run_dir / "stacks" / f"rank_{other}.txt"
                assert "most recent call first" in stacks.read_text()
        self.step = saved

    def most_seconds(self, fault):
        """Seconds after its limit in which every process of the run must be gone."""
        if self.launcher == "torchrun-2hosts":   # the agent of a rank that is busy kills it
            return GONE + AGENT
        if not fault.guard:
            return 10.0 if fault.watchdog else GONE
        killed_by_launcher = fault.watchdog and self.launcher in ("torchrun", "ours")
        return (SILENCE if fault.watchdog else GONE) + (AGENT if killed_by_launcher else 0.0)

    def check_failed(self, fault, result, status, rank):
        last_lines = re.findall(FAILED, result.stderr, re.M)
        if fault.guard and not fault.watchdog and status.get("code") is None:
            # Launchers that kill all where a signal ends one may leave no time for a word, or for
            # status.json after it, and say so themselves.
            own_words = r"task \d+: Killed|signal 9|EXIT CODE: 9|\(Killed\)|KILLED BY SIGNAL: 9"
            assert re.search(own_words, result.stdout + result.stderr), result.text
            assert len(last_lines) <= 1, result.text
            return
        killed_guard = fault.guard and not fault.watchdog   # then other ranks speak
        launcher_too = killed_guard and self.launcher == "ours"
        assert len(last_lines) == 1 or (launcher_too and len(last_lines) == 2), result.text
        assert own_tracebacks(result.stderr) <= 1, result.text
        number, cause = last_lines[0]
        assert killed_guard or int(number) == rank, result.text
        assert re.search(fault.says, cause), result.text
        assert "last.pt" in cause and "give the same command again" in cause, result.text
        check_status(status, fault, result)

    def check_stopped_well(self, fault, result, status, saved, periodic):
        if self.launcher == "openmpi" and status.get("code") != 75:
            # mpirun passes SIGTERM on and kills about a second later: the periodic one must do.
            assert saved >= periodic and fault.says == "SIGTERM", (status, result.text)
            return
        if result.returncode != -USR1:   # else torchrun's store is gone, and ranks may say so
            assert "FAILED: rank" not in result.stderr, result.text
            assert own_tracebacks(result.stderr) == 0, result.text
        check_status(status, fault, result)
        assert saved == status["step"] and self.step <= saved < self.steps, (saved, result.text)

    def finish(self):
        with self.start() as running:
            result = running.wait(timeout=300)
            self.check_continued(running)
        assert result.returncode == 0 and result.leftover == [], result.text
        assert read_status(self.run_dir).get("code") == 0, result.text
        same_run(self.reference / "run", self.run_dir)


@pytest.fixture(scope="session")
def chains(tmp_path_factory, undisturbed, table, steps):
    """chains(request, label): a context with the run of a launcher that faults have hit so far.

    A row that fails must not fail the following ones: these begin a new run."""
    runs = {}

    @contextlib.contextmanager
    def get(request, label):
        launcher, n, *_ = LAUNCHERS[label]
        if launcher == "srun":
            request.getfixturevalue("slurm")
        if launcher.endswith("-2hosts"):
            request.getfixturevalue("two_hosts")
        need(launcher)
        chain = runs.pop(label, None)
        if chain is None:
            folder = tmp_path_factory.mktemp(re.sub(r"\W+", "-", label))
            chain = Chain(label, folder, undisturbed(n), table, steps)
        yield chain
        runs[label] = chain
    return get


@pytest.fixture
def memory_group():
    """Folder of a group of processes that may have 64 MB: the kernel ends one that wants more."""
    old = Path("/sys/fs/cgroup/memory")
    new = Path("/sys/fs/cgroup")
    group = (old if old.is_dir() else new) / f"ddp-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")
        limit.write_text(str(64 << 20))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group
    except OSError as error:
        pytest.skip(f"a group of processes with little memory needs root and a writable cgroup: "
                    f"{error}")
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.parametrize("launcher, name", [
    *((launcher, name) for launcher, names in QUICK.items() for name in names),
    *(slow(launcher, name) for launcher, names in SLOW.items() for name in names)])
def test_after_a_fault_all_end_and_the_last_checkpoint_is_that_of_an_undisturbed_run(
        launcher, name, chains, request):
    with chains(request, launcher) as chain:
        if name == "cable pulled":
            pull_the_cable(chain, request.getfixturevalue("two_hosts"))
        else:
            group = request.getfixturevalue("memory_group") if name == "out of memory" else None
            chain.hit(name, FAULTS[name], MEMORY_GROUP=group)


@pytest.mark.parametrize("launcher", [*QUICK, *map(slow, SLOW)])
def test_after_all_faults_the_same_command_ends_with_the_weights_of_an_undisturbed_run(
        launcher, chains, request):
    with chains(request, launcher) as chain:
        chain.finish()


def pull_the_cable(chain, cable):
    """Each half of a run whose hosts no longer reach each other ends by itself, and says what it
    knows. Launchers may stay, waiting for the other host: torchrun's agent on the far one, mpiexec
    of MPICH on the near one."""
    try:
        with chain.faulty("cable pulled", WATCHED) as (row, running):
            cable(False)
            row.gone = seconds_until(lambda: not running.rank_pids(), WATCHDOG + 60.0)
            near = seconds_until(lambda: running.process.poll() is not None, 20.0)
            row.exit = str(running.process.poll())
            far = running.pids()
            text = (f"ranks gone after {row.gone:.1f} s, near launcher {near:.1f} s later; left "
                    f"{far}\n{running.stdout()}\n{running.stderr()}")
    finally:
        cable(True)
    print(text)
    status = read_status(chain.run_dir)
    row.status = str(status.get("code"))
    assert row.gone - WATCHDOG < SILENCE, text
    if chain.launcher == "torchrun-2hosts":
        assert near < GONE and row.exit not in ("0", "None") and far, text
        row.exit += "; far agent stays"
    else:
        assert row.exit != "0", text
        row.exit = row.exit.replace("None", "mpiexec stays")
    assert status["code"] in (70, 1), (status, text)
    assert re.search(f"no progress|{LOST}", status["reason"]), (status, text)
    assert len(re.findall("^FAILED: ", text, re.M)) in (1, 2), text   # at most one per half
    saved = check_checkpoint(chain.run_dir, chain.reference)
    assert saved >= (chain.step + 1) // SAVE_EVERY * SAVE_EVERY
    chain.step = saved


# ---------------------------------------------------------------- disks
@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder],
                          capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk needs root and the right to mount: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_save_that_fails_ends_all_with_one_message_and_the_checkpoint_of_before(
        small_disk, table, undisturbed, steps):
    chain = Chain("python", small_disk, undisturbed(1), table, steps)
    with chain.faulty("full disk", fault="fill") as (row, running):
        result, status = await_end(row, running, chain.run_dir, 60.0)
    assert row.gone < GONE and result.returncode != 0
    last_line, = re.findall(FAILED, result.stderr, re.M)
    assert own_tracebacks(result.stderr) <= 1 and "last.pt" in last_line[1], result.text
    assert re.search("No space left|disk full|file write failed", last_line[1]), result.text
    assert status["code"] in (1, None), status    # None: no room for a word
    chain.step = check_checkpoint(chain.run_dir, chain.reference)
    assert chain.step == 4
    (small_disk / "run" / "filler").unlink()
    chain.finish()


# ---------------------------------------------------------------- Ctrl-C
@pytest.mark.slow
@pytest.mark.parametrize("launcher, n, fault, env", [    # by the rank itself, or by its guard
    ("python", 1, "mine and wait()", {"DDP_GUARD": "0"}), ("python", 1, LOCK, {}),
    ("mpich", 2, "mine and wait()", {})])
def test_a_second_ctrl_c_ends_at_once_with_130_and_without_a_wall_of_tracebacks(
        launcher, n, fault, env, tmp_path, table):
    chain = Chain(launcher, tmp_path, None, table)
    name = f"Ctrl-C twice{', lock held in C' * (fault == LOCK)}"
    with chain.faulty(name, fault=fault, **env) as (row, running):
        for nth in (1, 2):
            for pid in running.rank_pids().values() if n > 1 else [running.process.pid]:
                os.kill(pid, signal.SIGINT)
            dots = running.stdout().count(".")      # the main thread waits in Python, printing dots
            seconds_until(lambda: running.stdout().count(".") > dots + 50 or not running.pids(),
                          1.0 if fault == LOCK else 30.0)
            assert nth == 2 or running.process.poll() is None
        result, status = await_end(row, running, chain.run_dir)
    assert row.gone < GONE and status["code"] == 130, (status, result.text)
    assert result.returncode == 130, result.text
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) < 12, result.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "intel"])
def test_four_ranks_that_are_refused_end_with_code_2_and_one_message(launcher, tmp_path):
    result = run_ranks(launcher, 4, [*prepare(tmp_path, 20), "--data", "nope.fasta"], tmp_path)
    assert result.returncode == 2 and "TERMINATION" not in result.text, result.text
    assert result.text.count("nope.fasta does not exist") == 1, result.text


# ---------------------------------------------------------------- other surroundings
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpich"])
def test_a_run_that_was_suspended_for_longer_than_the_limit_trains_on(
        launcher, tmp_path, undisturbed, table, steps):
    chain = Chain(launcher, tmp_path, undisturbed(2), table, steps)
    with chain.faulty("suspended, resumed", WATCHED, PACE=0.1) as (row, running):
        pids = [*running.rank_pids().values(), *running.guard_pids().values()]
        for pid in pids:
            os.kill(pid, STOP)
        end = time.monotonic() + WATCHDOG + 3.0    # beyond the limit
        seconds_until(lambda: time.monotonic() > end, 60.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        result, status = await_end(row, running, chain.run_dir, 300.0)
    assert result.returncode == status["code"] == 0, result.text
    same_run(chain.reference / "run", chain.run_dir)
    row.gone = 0.0
    row.continued = "yes"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exception in forward", "kill -9 of rank 0", "SIGSTOP of rank 0"])
def test_as_process_1_of_a_container_too_a_rank_is_ended(name, tmp_path, table):
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid needs root and the right to make namespaces")
    fault = FAULTS[name]
    row = Row("python, process 1", name)
    chain = Chain("python", tmp_path, None, table)
    done = subprocess.run(
        [*apart, sys.executable, *chain.words, WATCHED], cwd=tmp_path, text=True,
        capture_output=True, timeout=600, env=clean_environment(env=chain.environment(fault.fault)))
    row.exit = str(done.returncode)
    row.status = str(read_status(chain.run_dir).get("code"))
    table.append(row)
    assert (row.exit, row.status) == (str(fault.code),) * 2, done.stdout + done.stderr
    assert len(re.findall(FAILED, done.stderr, re.M)) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher, fault, limit, says", [
    ("mpich", "early kill", 300, "FAILED: rank 1 on"),
    ("torchrun", "early kill", 300, "FAILED: rank 1 on"),
    ("torchrun", "early", 300, "RuntimeError: on purpose"),
    ("mpich", "early", 300, "RuntimeError: on purpose"),
    # its guard does not know yet that Slurm has started this rank: the others wait for this limit
    ("srun", "early", INIT, "RuntimeError: on purpose")])
def test_a_rank_that_ends_before_the_ranks_have_met_ends_the_others(
        launcher, fault, limit, says, tmp_path, table, request):
    if launcher == "srun":
        request.getfixturevalue("slurm")
    chain = Chain(launcher, tmp_path, None, table)
    chain.run_dir.mkdir()
    former = {"code": 70, "reason": "no progress", "step": 3, "run": "former"}
    (chain.run_dir / "status.json").write_text(json.dumps(former))    # it silences nobody
    with chain.faulty(f"{fault}, before the group", f"--init_timeout={limit}", fault=fault,
                      rank=1) as (row, running):
        result, status = await_end(row, running, chain.run_dir, 100.0)
    late = 3.0 * INIT if limit == INIT else 0.0    # ranks that start late wait anew
    assert row.gone - late < GONE and result.returncode != 0, result.text
    assert result.stderr.count(says) == 1, result.text
    assert status == former
