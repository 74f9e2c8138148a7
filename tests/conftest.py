"""What tests share: the switch --slow, reference material, a real Slurm, two hosts on one machine.
See pytest.ini too."""

import contextlib
import fcntl
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import launchers
from launchers import ROOT
from mpnn.weights import in_package
from mpnn_cases import SMALL

# Of Slurm and of the two hosts there can be one: all runs of the tests see their locks here.
COMMON = Path(tempfile.gettempdir())
# Several ranks of a test must not share a GPU. TEST_CUDA=1 shows it, to tests that need one.
os.environ.pop("DRY_RUN", None)     # it is for job scripts
# What tests run in this process is not to see a batch job or a launcher in which the tests run.
for name in os.environ.keys() - launchers.clean_environment().keys() - {"PYTHONPATH"}:
    del os.environ[name]
if os.environ.get("TEST_CUDA") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

SLOW_TIMEOUT = 900     # seconds per test that is marked slow: only to end a hang
# Groups of tests that take longest, quick ones or slow ones: they begin first, so that none of them
# runs alone at the end.
FIRST = ("Slurm", "test_faults.py mpich", "two hosts", "test_oldest_versions.py",
         "test_bench_scripts.py", "test_faults.py ours", "test_faults.py torchrun",
         "test_train_sedd.py", "test_train_dpo.py", "test_preflight.py", "test_ddp_guard.py",
         "test_ddp_launch.py", "test_job_scripts.py", "test_job_chains.py", "test_jobs.py",
         "test_loop.py", "test_resumed_runs.py", "test_options_train.py", "test_ranks.py",
         "test_score_mutations.py", "test_tutorial.py")


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--slow", action="store_true", help="run only the tests marked slow")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "no effect without pytest-timeout")


def pytest_configure(config):
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): no effect without pytest-timeout")
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False     # groups in our order: see FIRST
    # A shell that starts us in the background makes us ignore Ctrl-C, and a bash that we start
    # could then not trap it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)   # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--slow")
    left_out = [item for item in items if bool(item.get_closest_marker("slow")) != wanted]
    items[:] = [item for item in items if bool(item.get_closest_marker("slow")) == wanted]
    config.hook.pytest_deselected(items=left_out)
    groups = {item: group_of(item) for item in items}
    items.sort(key=lambda item: place_of(groups[item]))     # equal ones stay in their order
    for item in items:
        if wanted and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(groups[item]))


def group_of(item):
    """The name of those that run in one process of pytest, one after the other, with this test."""
    launcher = ""
    if hasattr(item, "callspec"):
        launcher = str(item.callspec.params.get("launcher", ""))
    if "slurm" in item.fixturenames or launcher.startswith("srun"):
        return "Slurm"         # it can exist once
    if "two_hosts" in item.fixturenames or launcher.startswith("two hosts"):
        return "two hosts"     # as these
    if item.get_closest_marker("slow") and "chains" in item.fixturenames:
        return f"{item.path.name} {launcher}"     # all launchers' in one process take too long
    return item.path.name


def place_of(group):
    """Where a group stands among those that have not begun."""
    return FIRST.index(group) if group in FIRST else len(FIRST)


@pytest.fixture(scope="session", autouse=True)
def temporary_files():
    """What programs leave in the folder for temporary files goes when the tests end. Its name is
    short: sockets of launchers are in it."""
    with pytest.MonkeyPatch.context() as patch:
        with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
            patch.setenv("TMPDIR", folder)
            yield


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in one order: bit-identical runs are compared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared():
    """The folder of reference material beside the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no reference material at {folder}")
    return folder


@pytest.fixture
def disk_calls(monkeypatch):
    """What this process asks of the disk during the test, in order: ("fsync", bytes in the file),
    ("fsync", path of a folder), ("rename", the new path)."""
    calls = []
    fsync = os.fsync
    rename = {name: getattr(os, name) for name in ("replace", "rename")}

    def noted_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", path if path.is_dir() else path.read_bytes()))
        fsync(descriptor)

    def noted_rename(name, old, new):
        calls.append(("rename", Path(new)))
        rename[name](old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    for name in rename:
        monkeypatch.setattr(os, name, functools.partial(noted_rename, name))
    return calls


MATPLOTLIB = {}   # its modules, while a test runs that is to be as on a machine without it


@pytest.fixture
def extras(monkeypatch):
    """What users may add, such as matplotlib, can be imported: jobs/test.sh has installed it."""
    site, = list(ROOT.glob(".venv/extras/lib/python*/site-packages")) or [ROOT / "none"]
    monkeypatch.syspath_prepend(site)
    sys.modules.update(MATPLOTLIB)
    yield site
    MATPLOTLIB.update({name: module for name, module in sys.modules.items()
                       if name.split(".")[0] == "matplotlib"})
    for name in MATPLOTLIB:
        sys.modules.pop(name, None)


@pytest.fixture
def weights_package(monkeypatch):
    """The package that carries published weights can be found, also by processes started here."""
    site, = list(ROOT.glob(".venv/weights/lib/python*/site-packages")) or [ROOT / "none"]
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    if in_package("v_48_020") is None:
        pytest.skip("no package with published weights in .venv/weights: see jobs/test.sh")


@contextlib.contextmanager
def brought_up(scripts, lock, **env):
    """Between SCRIPTS_up.sh and SCRIPTS_down.sh, while no other run of the tests on this machine
    holds `lock`: what they make can exist once."""
    def run(end):
        return subprocess.run(["bash", f"{scripts}_{end}.sh"], timeout=600, text=True,
                              env=launchers.clean_environment(env=env), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    with open(COMMON / f"{lock}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run("down")      # what a killed run left
        try:
            done = run("up")
            assert done.returncode == 0, done.stdout
            yield
        finally:
            run("down")


@pytest.fixture(scope="session")
def slurm(shared):
    """A real Slurm of two nodes, n1 and n2, on this machine, for the launcher "srun"."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if not shutil.which(name)]
    if os.getuid() or missing:
        pytest.skip(f"Slurm needs root and slurm-wlm and munge (no {', '.join(missing) or 'root'}),"
                    f" which `bash {shared}/cluster/slurm_up.sh -i` installs")
    # Not pytest's folder for temporary files, which other users (munge) may not enter. A fixed
    # name, so that what a killed run left is found and stopped.
    folder = COMMON / "slurm-of-tests"
    with brought_up(shared / "cluster" / "slurm", "slurm-of-tests", SLURM_DIR=folder,
                    CTLPORT=26817, BASEPORT=27000):
        launchers.SLURM_CONF = folder / "slurm.conf"
        yield folder
        launchers.SLURM_CONF = None


@pytest.fixture(scope="session")
def two_hosts(shared):
    """Two hosts, hostA and hostB, as network namespaces, for torchrun-2hosts and mpich-2hosts.
    Yields a function: cable(False) unplugs hostB, cable(True) plugs it in."""
    probe = "ip netns add probe-of-tests && ip netns del probe-of-tests"
    done = subprocess.run(["sh", "-c", probe], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("two hosts on one machine need `ip` and the right to make network namespaces: "
                    + done.stderr.strip())

    def cable(plugged):
        state = "up" if plugged else "down"
        subprocess.run(["ip", "-n", "labsw", "link", "set", "pB", state], check=True)
        if plugged:   # each host has to find the other again
            for here, there in (("hostA", "hostB"), ("hostB", "hostA")):
                ask = f"(: < /dev/tcp/{launchers.HOSTS[there]}/9) 2>&1 | grep -q refused"
                command = shlex.join(["bash", "-c", f"until {ask}; do :; done"])
                subprocess.run([launchers.HOST_SHELL, here, command], check=True, timeout=300)

    with brought_up(shared / "cluster" / "netns", "two-hosts-of-tests"):
        launchers.HOST_SHELL = shared / "cluster" / "nsrsh.sh"
        yield cable
        launchers.HOST_SHELL = None


@pytest.fixture
def small(tmp_path):
    """A folder that holds small.pdb, of the chains SMALL."""
    (tmp_path / "small.pdb").write_text(SMALL.pdb())
    return tmp_path
