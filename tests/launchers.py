"""Starts scripts for tests under real launchers, on one host or two, or on forked ranks.

    result = run_ranks("openmpi", 4, [script, "--config", config], cwd=tmp_path)
    with start_ranks("mpich", 2, [script], cwd=tmp_path) as running:     # to signal ranks
        running.wait_for("step 3", timeout=60)
        os.kill(running.rank_pids()[1], signal.SIGTERM)
        result = running.wait(timeout=30)
    result = fork_ranks(2, [script], cwd=tmp_path)      # no launcher, and no import of torch
    with by_hand(tmp_path, text, range(2)) as ranks:    # the same, of a text, to signal ranks
        assert ranks.codes() == [0, 0]

What a launcher starts carries a mark in its environment, so that processes are found (and ended) by
their own id, whatever group or session they are in; this needs /proc (Linux). Output goes to files,
so that a hang shows what was printed. MPICH is looked for in the environment that runs the tests,
the others in its folder mpi/ (see jobs/test.sh). srun needs a Slurm, torchrun-2hosts and
mpich-2hosts two hosts: the fixtures `slurm` and `two_hosts` of conftest.py bring them up.
"""

import atexit
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("proteins", "sedd", "mpnn", "dpo", "training", "bench")   # of modules
MARK = "TEST_RUN_MARK"
SLURM_CONF = None     # set by conftest.py: configuration file of the running two-node Slurm
HOST_SHELL = None     # and a program: HOST_SHELL HOST COMMAND... runs it on a host
GRACE = 3.0           # seconds of forked ranks after another has failed, as launchers have them
KILLING = 60.0        # seconds until processes must be gone after SIGKILL
LEFTOVER = 10.0       # seconds in which other processes may end after the launcher
_fork_server = None   # the process that forks ranks
HOSTS = {"hostA": "10.77.0.1", "hostB": "10.77.0.2"}

# What a script of a test begins with.
HEAD = f"""
import os, pickle, signal, sys, threading, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from datetime import timedelta
import ddp_guard
ddp_guard.supervise()
import torch
import ddp_setup
import ddp_watch
from ddp_setup import *
from ddp_watch import *
"""

# What a batch system or an outer launcher may have left in our own environment.
_DROPPED_PREFIXES = (
    "SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "PALS_", "MPI_LOCAL", "HYDRA_",
    "HYDI_", "I_MPI_", "PBS_", "TORCHELASTIC_", "TORCH_", "GLOO_", "MPI4PY_", "DDP_", "ROLE_",
    "GROUP_")
_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
            "MASTER_PORT", "PYTHONPATH")
# Where a rank's number stands in its environment, innermost launcher first.
_RANK_VARIABLES = ("DDP_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def own_tracebacks(text):
    """Number of tracebacks in `text` without those of torchrun's agent."""
    agents = (r'Traceback \(most recent call last\):\n(?:[ \t].*\n)*?'
              r'[ \t]+File ".*/torch/distributed/(?:run\.py|elastic/)')
    return text.count("Traceback (most recent call last)") - len(re.findall(agents, text))


class Printed(str):
    """What a program printed. `words in printed` takes a line break for a blank: long messages are
    wrapped."""

    def __contains__(self, words):
        return " ".join(words.split()) in " ".join(self.split())


@dataclass
class Result:
    """What a finished run left."""
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    leftover: list[str] = field(default_factory=list)    # what outlived it: "pid command line"

    @property
    def text(self):
        return Printed(f"exit code {self.returncode} after {self.seconds:.1f} s\n"
                       f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}")


def slow(*values):
    """A row of a parametrization that runs with --slow alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def need(launcher):
    """Skip the calling test if `launcher` cannot be used here."""
    if launcher in ("python", "torchrun"):
        return
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are followed through /proc, which only Linux has")
    if launcher == "srun" and not SLURM_CONF:
        pytest.skip("srun: no Slurm is up; the fixture `slurm` brings one up")
    if launcher.endswith("-2hosts") and not HOST_SHELL:
        pytest.skip(f"{launcher}: no hosts; the fixture `two_hosts` brings them up")
    if _mpi_home(launcher) and not _starter(launcher).exists():
        installer = "jobs/test.sh --slow" if launcher == "intel" else "jobs/test.sh"
        pytest.skip(f"{launcher}: no {_starter(launcher)}; `bash {installer}` installs it")


def python_of(launcher):
    """The interpreter whose mpi4py loads the MPI of `launcher`."""
    own = launcher in ("openmpi", "intel")
    return str(_mpi_home(launcher) / "bin" / "python") if own else sys.executable


def clean_environment(launcher="python", env=None):
    """A copy of os.environ without launchers' variables, with one thread per process and `env`."""
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(_DROPPED_PREFIXES) and key not in _DROPPED}
    # It writes every argument of print by itself, and lines of several ranks get mixed.
    clean.pop("PYTHONUNBUFFERED", None)
    clean["OMP_NUM_THREADS"] = "1"
    home = _mpi_home(launcher)
    if home:
        # Intel's mpirun is a shell script that looks for mpiexec.hydra on PATH.
        clean["PATH"] = f"{home / 'bin'}{os.pathsep}{clean.get('PATH', os.defpath)}"
    if launcher == "srun":
        clean["SLURM_CONF"] = str(SLURM_CONF)
    return {key: str(value) for key, value in (clean | (env or {})).items() if value is not None}


def command(launcher, n, argv, flags=()):
    """The words that start `python argv` on n ranks, those of srun on two nodes.

    flags: more words for the launcher itself."""
    run = [python_of(launcher), *map(str, argv)]
    if launcher == "python":
        return run
    if launcher == "ours":     # training/launch.py: the script starts its ranks
        return [*run, "--nproc_per_node", str(n)]
    if launcher == "srun":
        nodes = min(n, 2)
        return ["srun", *flags, f"--nodes={nodes}", f"--ntasks={n}",
                f"--ntasks-per-node={n // nodes}", *run]
    if launcher == "torchrun":
        return [run[0], "-m", "torch.distributed.run", *flags, "--standalone",
                f"--nproc_per_node={n}", *run[1:]]
    if launcher == "openmpi":
        # It refuses root, and more ranks than cores, bound or not, each unless told otherwise.
        flags = [*flags, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [str(_starter(launcher)), *flags, "-n", str(n), *run]


def host_words(host, words):
    """The words that run others on a host."""
    return [str(HOST_SHELL), host, "exec " + shlex.join(map(str, words))]


def host_commands(launcher, n, argv):
    """The command lines that together start `python argv` on n ranks, half on each of two hosts."""
    python = python_of(launcher)
    half = n // 2
    if launcher == "torchrun-2hosts":
        run = [python, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={half}",
               "--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS['hostA']}:29400", *argv]
        return [host_words(host, run) for host in HOSTS]
    # The agents on the hosts connect back to mpiexec, so it must run on one of them too.
    flags = ["-launcher", "rsh", "-launcher-exec", str(HOST_SHELL), "-hosts", ",".join(HOSTS),
             "-ppn", str(half)]
    return [host_words("hostA", command(launcher, n, argv, flags))]


def run_ranks(launcher, n, argv, cwd, env=None, timeout=600):
    """Run `python argv` on n ranks in folder `cwd` to its end and return a Result.

    env: variables added to a clean environment; a value of None removes one. timeout: seconds; then
    all is killed and TimeoutError shows what was printed."""
    with start_ranks(launcher, n, argv, cwd, env) as running:
        return running.wait(timeout)


def ask_fork_server(**request):
    """The answer of forked_ranks.py, which the first call starts."""
    global _fork_server
    if _fork_server is None or _fork_server.poll() is not None:
        _fork_server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forked_ranks.py")], text=True,
            env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(_fork_server.communicate)      # closes its stdin, which ends it
    try:
        _fork_server.stdin.write(json.dumps(request) + "\n")
        _fork_server.stdin.flush()
        return json.loads(_fork_server.stdout.readline())
    except BaseException:       # a test's time limit, say: its answer is not for the next one
        _fork_server.terminate()
        _fork_server.wait()
        raise


class ForkedRanks(contextlib.AbstractContextManager):
    """Ranks that run `python argv`, forked from a process that has imported torch; for a `with`,
    whose end kills what is left.

    environments: {rank: variables added to a clean environment}. pids: {rank: process id}, of the
    guard where the script asks for one."""

    def __init__(self, argv, cwd, environments):
        self._files = {rank: [tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()]
                       for rank in environments}
        ranks = [[clean_environment(env=env), *(file.name for file in self._files[rank])]
                 for rank, env in environments.items()]
        started = ask_fork_server(argv=list(map(str, argv)), cwd=str(cwd), ranks=ranks)
        self.pids = dict(zip(environments, started))

    def __exit__(self, *exception):
        self.codes(timeout=0)

    def out(self, rank=None):
        """What `rank`, or all of them, printed to stdout yet."""
        return Printed("".join(_read(out) for number, (out, _) in self._files.items()
                               if rank in (None, number)))

    def err(self, rank=None):
        """As out(), of stderr."""
        return Printed("".join(_read(err) for number, (_, err) in self._files.items()
                               if rank in (None, number)))

    def wait_for(self, text, timeout=600):
        """Return once every rank has printed `text`."""
        await_that(lambda: all(text in self.out(rank) for rank in self.pids), timeout, self.err)

    def codes(self, timeout=600, grace=None):
        """Wait for all; exit codes, of those killed at the timeout -9. grace: when one has failed,
        end the others by SIGTERM, and so many seconds later by SIGKILL; None: do not."""
        return ask_fork_server(wait=list(self.pids.values()), timeout=timeout, grace=grace)


def fork_ranks(n, argv, cwd, env=None, timeout=600):
    """Run `python argv` on n ForkedRanks to their end and return a Result.

    They have the variables of torchrun, and no guard unless `env` holds DDP_GUARD=1. When one has
    failed, the others are ended as a launcher does it. returncode: of the first rank that failed.
    """
    common = {"DDP_GUARD": 0, **(env or {})}
    environments = {0: common}
    if n > 1:
        here = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": free_port()}
        for rank in range(n):
            environments[rank] = {**here, "RANK": rank, "LOCAL_RANK": rank, **common}
    start = time.monotonic()
    with ForkedRanks(argv, cwd, environments) as ranks:
        codes = ranks.codes(timeout, GRACE)
    return Result(first_failure(codes), ranks.out(), ranks.err(), time.monotonic() - start)


def script(folder, text):
    """Path of a script of this text after HEAD, which is written into the folder."""
    path = folder / "script.py"
    path.write_text(HEAD + text)
    return path


def by_hand(folder, text, ranks, size=None, **env):
    """ForkedRanks of a script(), which nobody ends when one fails, with a guard each unless `env`
    holds DDP_GUARD=0. size: of the run, where other ranks do not start."""
    size = size or len(ranks)
    here = {"DDP_WORLD_SIZE": size, "DDP_LOCAL_WORLD_SIZE": size, "MASTER_PORT": free_port(), **env}
    places = {rank: {"DDP_RANK": rank, "DDP_LOCAL_RANK": rank, **here} for rank in ranks}
    return ForkedRanks([script(folder, text)], folder, places)


def first_failure(codes):
    """The first exit code that is not 0, if possible of a rank that was not ended because another
    had failed; or 0."""
    failed = [code for code in codes if code != 0]
    ended = (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)     # the last one by a guard
    by_themselves = [code for code in failed if code not in ended]
    return [*by_themselves, *failed, 0][0]


def code_files():
    """All Python files of the project but its tests."""
    folders = (*FOLDERS, "jobs", "examples")
    return [*ROOT.glob("*.py"), *(path for name in folders for path in ROOT.glob(f"{name}/*.py"))]


def copy_code(target):
    """Copy the project's Python files but its tests into the folder `target`."""
    for path in code_files():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def start_ranks(launcher, n, argv, cwd, env=None, flags=()):
    """As run_ranks, but returns at once: a Running, for a `with`, whose end kills what is left."""
    need(launcher)
    more = []
    if launcher.endswith("-2hosts"):
        words, *more = host_commands(launcher, n, argv)
    else:
        words = command(launcher, n, argv, flags)
    return Running(words, cwd, clean_environment(launcher, env), more)


@contextlib.contextmanager
def started(words, **how):
    """subprocess.Popen(words, **how) for a `with`, whose end kills what is left of its session.

    A Popen's own `with` would wait for ever for a run that a failed test leaves behind. SIGHUP is
    not ignored there, as it would be where these tests run under nohup."""
    prepare = how.pop("preexec_fn", lambda: None)

    def heed_sighup():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        prepare()
    process = subprocess.Popen(words, start_new_session=True, preexec_fn=heed_sighup, **how)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


class Running(contextlib.AbstractContextManager):
    """A started launcher: `process` is its Popen, `stdout()` and `stderr()` what was printed yet.

    more: command lines of the same run's launchers on other hosts; `processes`: Popens of all.
    """

    def __init__(self, words, cwd, env, more=()):
        self.words = words
        mark = uuid.uuid4().hex
        self._mark = f"{MARK}={mark}"
        self._out = tempfile.TemporaryFile()
        self._err = tempfile.TemporaryFile()
        self._start = time.monotonic()
        self.processes = [
            subprocess.Popen(each, cwd=cwd, env=env | {MARK: mark}, start_new_session=True,
                             stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err)
            for each in (words, *more)]
        self.process = self.processes[0]

    def __exit__(self, *exception):
        self.kill()
        self._out.close()
        self._err.close()

    def stdout(self):
        return _read(self._out)

    def stderr(self):
        return _read(self._err)

    def pids(self):
        """Ids of all live processes of this run: launcher, helpers, ranks and their children."""
        return [pid for pid in all_pids() if self._mark in environment_of(pid)]

    def rank_pids(self):
        """{rank: process id} of the ranks that run now: of guarded ones the guard's child."""
        return {rank: pid for rank, (guard, pid) in self._ranks().items()}

    def guard_pids(self):
        """{rank: process id} of the guards of ranks that run now."""
        return {rank: guard for rank, (guard, pid) in self._ranks().items() if guard != pid}

    def _ranks(self):
        """{rank: (outermost process with its number, the rank's own)}"""
        ranks = {}      # {process: its rank}
        guarded = {}    # {guard: its child}
        for pid in self.pids():
            environment = dict(entry.partition("=")[::2] for entry in environment_of(pid))
            numbers = [environment[name] for name in _RANK_VARIABLES if environment.get(name)]
            if numbers:
                ranks[pid] = int(numbers[0])
            guard = environment.get("DDP_GUARD_FD", ":").split(":")[1]   # PIPE:GUARD
            if guard == str(_parent(pid)):
                guarded[_parent(pid)] = pid
        return {rank: (pid, guarded.get(pid, pid)) for pid, rank in ranks.items()
                if ranks.get(_parent(pid)) != rank}

    def wait_for(self, text, timeout):
        """Return once `text` was printed on either stream; TimeoutError if all ends first."""
        def seen():
            return text in self.stdout() + self.stderr()
        seconds_until(lambda: seen() or self.process.poll() is not None, timeout)
        if not seen():     # after the end: last words may be there
            raise TimeoutError(f"{text!r} was not printed within {timeout} s: {self._story()}")

    def wait(self, timeout, leftover_grace=LEFTOVER):
        """Wait for the launcher's end and return a Result; TimeoutError with the output without.

        leftover_grace: seconds after it in which other processes may end, or are left over and
        killed."""
        try:
            end = time.monotonic() + timeout
            returncodes = [process.wait(max(0.0, end - time.monotonic()))
                           for process in self.processes]
        except subprocess.TimeoutExpired:
            alive = [_describe(pid) for pid in self.pids()]
            self.kill()
            raise TimeoutError(f"still running after {timeout} s: {self._story()}\nalive were:\n"
                               + "\n".join(alive)) from None
        seconds = time.monotonic() - self._start
        seconds_until(lambda: not self.pids(), leftover_grace)
        leftover = [_describe(pid) for pid in self.pids()]
        self.kill()
        return Result(first_failure(returncodes), self.stdout(), self.stderr(), seconds, leftover)

    def kill(self):
        """End every process of this run by SIGKILL, each by its id, and wait until none is left."""
        deadline = time.monotonic() + KILLING
        while True:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            pids = self.pids()
            if not pids:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{pids} of {' '.join(self.words)} do not end by SIGKILL")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):      # it ended in between
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _story(self):
        return f"{' '.join(self.words)}\nstdout:\n{self.stdout()}\nstderr:\n{self.stderr()}"


def _mpi_home(launcher):
    here = Path(sys.prefix)
    if launcher.startswith("mpich"):
        return here
    if launcher in ("openmpi", "intel"):
        return here / "mpi" / launcher
    return None


def _starter(launcher):
    program = "mpiexec" if launcher.startswith("mpich") else "mpirun"
    return _mpi_home(launcher) / "bin" / program


def stolen_seconds():
    """Seconds in which the machine below has given the most robbed of our cores to others."""
    with contextlib.suppress(OSError):
        cores = re.findall(r"^cpu\d.*", Path("/proc/stat").read_text(), re.M)
        return max(int(core.split()[8]) for core in cores) / os.sysconf("SC_CLK_TCK")
    return 0.0


def seconds_until(condition, limit):
    """Seconds until condition() holds, without stolen ones; gives up after `limit`."""
    start = time.monotonic()
    stolen = stolen_seconds()
    while not condition() and time.monotonic() < start + limit:
        time.sleep(0.02)
    return time.monotonic() - start - (stolen_seconds() - stolen)


def read_status(run_dir):
    """status.json of a run folder; {} if there is none."""
    path = Path(run_dir) / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def await_that(condition, seconds, what):
    """Return once `condition()` is true; AssertionError with what() if that takes too long."""
    seconds_until(condition, seconds)
    assert condition(), f"not within {seconds} s: {what()}"


def _read(file):
    # pread leaves alone the file position, at which the processes write.
    size = os.fstat(file.fileno()).st_size
    return Printed(os.pread(file.fileno(), size, 0).decode(errors="replace"))


def all_pids():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def about(pid, name):
    """The text of a file of /proc/PID; "" of one that has ended, or not ours."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def environment_of(pid):
    """The variables a process was started with: "NAME=VALUE" each."""
    return about(pid, "environ").split("\0")


def command_of(pid):
    return about(pid, "cmdline").replace("\0", " ")


def _parent(pid):
    fields = about(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _describe(pid):
    return f"{pid} {command_of(pid) or '(ended meanwhile)'}"
