"""Do ranks that real launchers start find each other, work together, and end together?

Ranks started "by hand" (DDP_* variables, no launcher that would end them) show what ddp_guard does
by itself.
"""
import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

import launchers
from launchers import (ROOT, ForkedRanks, clean_environment, fork_ranks, free_port, need,
                       own_tracebacks, python_of, run_ranks, seconds_until, slow, start_ranks)

HEAD = f"""import json, os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
import ddp_guard
ddp_guard.EXIT = float(os.environ.get("EXIT", ddp_guard.EXIT))
ddp_guard.supervise()
import torch
from ddp_setup import *
"""
GONE = 15.0    # seconds in which every process must be gone after a failure; 5 are wanted


def script(folder, text, head=HEAD):
    path = folder / "script.py"
    path.write_text(head + text)
    return path


def by_hand(path, ranks, size=None, argv=(), **env):
    """ForkedRanks with DDP_* variables, a guard each, and a port: a forked guard does not show the
    variables by which ranks tell a guard from their launcher."""
    size = size or len(ranks)
    if "MASTER_ADDR" not in env:
        env = {"MASTER_PORT": free_port(), **env}
    return ForkedRanks([path, *argv], path.parent, {r: dict(
        DDP_RANK=r, DDP_WORLD_SIZE=size, DDP_LOCAL_RANK=r, DDP_LOCAL_WORLD_SIZE=size, **env)
        for r in ranks})


# ---------------------------------------------------------------- one fails, all end
RAISE = """
ddp = setup_ddp(seed=0, quiet=True)
failing = int(sys.argv[1])
barrier(ddp)
if ddp.rank == failing:
    print("raising", flush=True)
    raise ValueError("on purpose.")
if ddp.rank == max(r for r in range(3) if r != failing):
    all_sum(1.0, ddp)                # waits for the rank that has raised
for _ in range(600):                 # outside any collective
    time.sleep(0.1)
"""


NO_GUARD, NO_MPI4PY = {"DDP_GUARD": "0"}, {"DDP_MPI4PY": "0"}


@pytest.mark.parametrize("launcher, failing, env", [
    ("torchrun", 1, {}), ("mpich", 1, NO_GUARD),
    slow("torchrun", 1, NO_GUARD), slow("mpich", 0, {}), slow("mpich", 1, NO_GUARD | NO_MPI4PY),
    slow("openmpi", 2, {}), slow("openmpi", 0, NO_GUARD), slow("openmpi", 0, NO_MPI4PY),
    slow("intel", 0, {}), slow("intel", 1, NO_MPI4PY),
    slow("intel", 1, NO_GUARD)])    # not without mpi4py too: see docs/faults.md
def test_a_rank_that_raises_ends_all_in_and_outside_collectives(launcher, failing, env, tmp_path):
    path = script(tmp_path, RAISE)
    with start_ranks(launcher, 3, [path, failing], cwd=tmp_path, env=env) as running:
        running.wait_for("raising", timeout=600)
        seconds = seconds_until(lambda: not running.pids(), 600)
        result = running.wait(timeout=5, leftover_grace=0)
    print(f"{launcher} {env}: rank {failing} raised, all processes gone after {seconds:.1f} s")
    assert seconds < GONE and result.leftover == [], result.text
    assert result.returncode != 0
    assert "ValueError: on purpose" in result.stderr, result.text
    last = [line for line in result.stderr.splitlines() if line.startswith("FAILED: ")]
    assert last and f"rank {failing} of 3 on " in last[0], result.text
    assert ": ValueError: on purpose. No" in last[0], result.text
    if "DDP_GUARD" not in env:
        assert len(last) == 1 == own_tracebacks(result.stderr), result.text
        assert "No checkpoint yet" in last[0] and f"script.py {failing}" in last[0], result.text


ENDING = """
ddp = setup_ddp(quiet=True)
barrier(ddp)
if ddp.rank == 1:
    {ending}
time.sleep(60)
"""


@pytest.mark.parametrize("ending, code, words", [
    ("os.kill(os.getpid(), 9)", 1, "died without a word (SIGKILL"),
    ("sys.exit(3)", 3, "left with exit code 3"), ("abort(ddp, 'a full disk.')", 1, "a full disk."),
    ("abort(ddp, 'no such file', 2)", 2, "no such file"), ("os._exit(0)", 1, "without cleanup_ddp"),
    ("exec('with ddp: sys.exit(\"no data?\")')", 1, "FAILED: rank 1 of 3 on {host}: no data? No")])
def test_without_a_launcher_too_the_end_of_one_is_the_end_of_all(ending, code, words, tmp_path):
    with by_hand(script(tmp_path, ENDING.format(ending=ending)), range(3)) as ranks:
        assert ranks.codes() == [code] * 3, ranks.err()
        assert ranks.err().count(words.format(host=socket.gethostname())) == 1
        assert ranks.err().count("FAILED: ") == (code != 2)
        assert own_tracebacks(ranks.err()) == 0


@pytest.mark.parametrize("launcher", ["mpich", slow("torchrun")])
def test_without_a_guard_too_a_rank_that_leaves_early_is_a_failure(launcher, tmp_path):
    need(launcher)
    path = script(tmp_path, ENDING.format(ending="sys.exit(0)"))
    result = run_ranks(launcher, 2, [path], cwd=tmp_path, env=NO_GUARD)
    assert result.returncode != 0 and result.seconds < 55, result.text
    assert "rank 1 of 2 on" in result.stderr, result.text
    assert "ended without cleanup_ddp" in result.stderr, result.text


@pytest.mark.parametrize("fault, stderr", [
    # a full disk under the log
    ("raise ValueError('on purpose')", "/dev/full"),
    # a library with a hook of its own
    ("sys.excepthook = lambda *a: None; raise ValueError('on purpose')", None),
    ("ddp.rank and os._exit(1)", "/dev/full"),
    ("ddp.rank and time.sleep(2); ddp.rank and os._exit(1)", None)])
def test_an_end_that_nobody_can_print_or_that_comes_late_is_an_error(fault, stderr, tmp_path):
    (tmp_path / "out").mkdir()
    path = script(tmp_path, f"""
if {stderr!r}:
    os.dup2(os.open({stderr!r}, os.O_WRONLY), 2)
ddp = setup_ddp(quiet=True)
watch_run(ddp, "out")
stop_reason(ddp, 0)
{fault}
cleanup_ddp(ddp)
""")
    with by_hand(path, range(2)) as ranks:
        codes = ranks.codes(100)
    assert 0 not in codes, ranks.err()
    assert json.loads((tmp_path / "out" / "status.json").read_text())["code"] == 1


@pytest.mark.parametrize("end, codes", [
    ("os.kill(os.getppid(), 9)", [-signal.SIGKILL, 1]),    # of its guard, too
    ("os.kill(os.getpid(), 9)", [1, 1])])
def test_the_death_of_rank_0_is_told_even_where_its_loss_is_what_the_other_runs_into(
        end, codes, tmp_path):
    path = script(tmp_path, f"""
ddp = setup_ddp(quiet=True)
barrier(ddp)
if ddp.rank == 0:
    {end}
all_sum(1, ddp)
""")
    with by_hand(path, range(2)) as ranks:
        assert ranks.codes() == codes
        assert ranks.err().count("FAILED: rank 0 of 2 on ") == 1, ranks.err()
        assert ranks.err().count("died without a word") == 1, ranks.err()


HANG = """
import re
import torch.distributed as dist
mode, late = sys.argv[1], int(sys.argv[2])
ddp = setup_ddp(quiet=True)
watch_run(ddp, "out", minutes=3 / 60)
def stuck():
    if mode == "loop":
        while True:
            pass
    if mode == "lock":                       # a call in C that keeps the interpreter's lock
        re.match("(a+)+b", "a" * 60)
    if mode == "alone":                      # in a collective to which nobody else comes
        dist.all_reduce(torch.ones(1000))
        time.sleep(120)
for step in range(8):
    stop_reason(ddp, step)
    if step == 5:
        if ddp.rank == late:
            stuck()
        elif mode == "alone":
            time.sleep(120)
"""


@pytest.mark.parametrize("mode, n, late", [
    ("loop", 3, 1), slow("loop", 2, 0), slow("lock", 2, 0), slow("alone", 2, 0),
    slow("loop", 1, 0)])
def test_a_hang_is_ended_with_the_late_rank_its_step_and_all_stacks(mode, n, late, tmp_path):
    (tmp_path / "out").mkdir()
    path = script(tmp_path, HANG)
    with by_hand(path, range(n), argv=(mode, late)) as ranks:
        codes, text = ranks.codes(), ranks.err()
    assert codes == [70] * n, text
    assert f"FAILED: rank {late if mode != 'alone' else 1} of {n} on " in text, text
    assert "no progress for 3 s" in text
    assert text.count("FAILED: ") == 1
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["code"] == 70 and status["step"] in (5, 6) and "no progress" in status["reason"]
    where = "<module> (script.py:" if mode == "alone" else "stuck (script.py:"
    assert where in text, text
    for r in range(n):
        assert "script.py" in (tmp_path / "out" / "stacks" / f"rank_{r}.txt").read_text(), r


@pytest.mark.parametrize("late", [1, slow(0)])
def test_a_rank_that_stands_still_after_the_end_of_a_run_keeps_nobody(late, tmp_path):
    (tmp_path / "out").mkdir()
    path = script(tmp_path, """
import signal
ddp = setup_ddp(quiet=True)
watch_run(ddp, "out", minutes=3 / 60)
stop_reason(ddp, 0)
close_run(ddp, 0, "done")
if ddp.rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
cleanup_ddp(ddp)
""")
    with by_hand(path, range(2), argv=[late]) as ranks:
        codes = ranks.codes(60)
    assert codes == [70, 70], ranks.err()
    late_rank = f"rank {late} on {socket.gethostname()}"
    assert f"{late_rank} did not come to cleanup_ddp within 3 s" in ranks.err()
    assert ranks.err().count("FAILED: ") == 1
    assert json.loads((tmp_path / "out" / "status.json").read_text())["code"] == 70


@pytest.mark.parametrize("when, codes, says", [
    ("torch.distributed.destroy_process_group = lambda: os.kill(os.getpid(), 9)", [1, 1],
     "FAILED: rank 1 of 2 on {host}: died without a word (SIGKILL"),
    ("after = lambda: os.kill(os.getpid(), 9)", [0, -signal.SIGKILL], ""),
    # while Python ends: what is registered first is called last
    ("import atexit; atexit.register(os.kill, os.getpid(), 19)", [70, 70],
     "FAILED: rank 1 of 2 on {host}: still there 2 s after cleanup_ddp")],
    ids=["killed before the end", "killed after the end", "stopped"])
def test_a_rank_that_dies_or_is_stopped_while_it_leaves_is_not_passed_over(
        when, codes, says, tmp_path):
    path = script(tmp_path, f"""
after = lambda: None
if os.environ["DDP_RANK"] == "1":
    {when}
ddp = setup_ddp(quiet=True)
cleanup_ddp(ddp)
after()
""")
    with by_hand(path, range(2), EXIT=2) as ranks:
        assert ranks.codes(100) == codes, ranks.err()
        assert says.format(host=socket.gethostname()) in ranks.err()
        assert ranks.err().count("FAILED: ") == bool(says), ranks.err()


@pytest.mark.slow
def test_a_rank_ends_in_good_order_however_late_gloo_lets_go_of_the_last_tensor(tmp_path):
    """Its threads need Python's lock for that, and get hardly any time beside a busy process."""
    path = script(tmp_path, head=f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
from ddp_setup import *
""", text="""
def run_rank(rank, port):
    global ddp      # as in a script: it lives until Python ends
    os.environ.update(DDP_RANK=str(rank), DDP_LOCAL_RANK=str(rank), DDP_WORLD_SIZE="2",
                      DDP_LOCAL_WORLD_SIZE="2", MASTER_PORT=port)
    ddp = setup_ddp(quiet=True)
    processor = {sorted(os.sched_getaffinity(0))[-rank]}
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, processor)
        with open(f"/proc/self/task/{thread}/comm") as name:
            if "gloo_runloop" in name.read():
                os.setpriority(os.PRIO_PROCESS, thread, 19)
    pid = os.getpid()
    if os.fork() == 0:
        while os.getppid() == pid:
            pass
        os._exit(0)
    all_sum(1.0, ddp)
    cleanup_ddp(ddp)
    sys.exit()

for port in sys.argv[1:]:
    pids = [os.fork() or run_rank(rank, port) for rank in range(2)]
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
""")
    launches = 8    # without the wait in cleanup_ddp one in four ended by SIGABRT
    result = run_ranks("python", 1, [path, *(free_port() for _ in range(launches))], cwd=tmp_path,
                       env=NO_GUARD)
    assert (result.stdout, result.stderr) == (launches * "[0, 0]\n", ""), result.text


def test_a_forked_child_that_ends_by_itself_ends_no_rank(tmp_path):
    path = script(tmp_path, """
ddp = setup_ddp(quiet=True)
pid = os.fork()
if pid == 0:
    import atexit
    atexit._run_exitfuncs()    # all that sys.exit would do, but for torch's own threads
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
cleanup_ddp(ddp)
""")
    with by_hand(path, range(2), DDP_GUARD="0") as ranks:
        assert (ranks.codes(100), ranks.err()) == ([0, 0], "")
        assert ranks.out(1) == "5\n"


def test_a_stop_that_one_rank_is_asked_for_is_the_outcome_and_children_keep_their_signals(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".last.pt.tmp").write_text("half")    # of a save that was killed
    path = script(tmp_path, """
import multiprocessing, signal
ddp = setup_ddp(quiet=True)
watch_run(ddp, "out")
stop_reason(ddp, 0)
fork = multiprocessing.get_context("fork")
begun = fork.Event()
def work():
    begun.set()
    time.sleep(600)
if ddp.rank == 1:
    child = fork.Process(target=work, daemon=True)
    child.start()
    begun.wait(60)     # Python drops a signal that comes while it forks
    child.terminate()
    child.join(60)
    print(child.exitcode)
    child.kill()
    os.kill(os.getpid(), signal.SIGUSR1)
while not stop_reason(ddp, 1):
    pass
save_checkpoint("out/last.pt", ddp, step=1)
cleanup_ddp(ddp)
""")
    with by_hand(path, range(2)) as ranks:
        assert ranks.codes() == [0, 0], ranks.err()
        assert ranks.out(1) == "-15\n"
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["code"] == 75 and status["reason"].startswith("SIGUSR1 on rank 1"), status
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["last.pt", "status.json"]


def test_a_notebook_lives_on_after_an_exception_and_a_lone_script_says_how_it_ended(tmp_path):
    path = script(tmp_path, """
for folder in ("notebook", "script"):
    os.mkdir(folder)
sys.ps1 = ">>> "      # what makes a session interactive
try:
    with setup_ddp(quiet=True) as ddp:
        watch_run(ddp, "notebook", minutes=0.2 / 60)
        time.sleep(1)
        raise ValueError("of a cell")
except ValueError:
    print("lives on", flush=True)
del sys.ps1
watch_run(setup_ddp(), "script")
raise ValueError("on purpose")
""")
    result = fork_ranks(1, [path], tmp_path, {"DDP_GUARD": 1})
    assert (result.returncode, result.stdout) == (1, "lives on\n"), result.text
    assert result.stderr.count("FAILED: rank 0 of 1") == 1, result.text
    assert own_tracebacks(result.stderr) == 1, result.text
    for folder, reason in (("notebook", "ValueError: of a cell"),
                           ("script", "ValueError: on purpose")):
        status = json.loads((tmp_path / folder / "status.json").read_text())
        assert (status["code"], status["reason"]) == (1, reason)


def test_what_all_ranks_find_wrong_is_said_once(tmp_path):
    path = script(tmp_path, "with setup_ddp(quiet=True) as ddp:\n    open('/no/such/file')\n")
    with by_hand(path, range(3)) as ranks:
        assert ranks.codes() == [1, 1, 1], ranks.err()
    assert ranks.err().count("\nFileNotFoundError") == 1 == own_tracebacks(ranks.err()), ranks.err()


# ---------------------------------------------------------------- working together
TOGETHER = """
import re, socket
import pytest
import torch.distributed as dist

def listening():
    '''Addresses of the sockets on which this process listens.'''
    files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    own = {os.readlink(file) for file in files if os.path.exists(file)}
    rows = [line.split() for name in ("tcp", "tcp6")
            for line in open(f"/proc/self/net/{name}").readlines()[1:]]
    return {row[1].split(":")[0] for row in rows
            if row[3] == "0A" and f"socket:[{row[9]}]" in own}

def environment():   # without what torch sets for its own compiler
    return {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}

before, threads = environment(), threading.active_count()
ddp = setup_ddp(seed=5, quiet=True)
rank, tensor = str(ddp.rank), torch.full((2, 2), float(ddp.rank))
assert setup_ddp() is ddp and [ddp.local_world_size, ddp.node_rank] == [3, 0]
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [rank, "3", rank]
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
if "OMPI_COMM_WORLD_RANK" not in os.environ:    # its own library listens on all addresses
    assert listening() == {"0100007F"}, "only 127.0.0.1 may be listened on"
told = {"from": ddp.rank, "text": "é", "none": [None, 1.5]}
assert broadcast(told, ddp, src=1) == told | {"from": 1}
assert broadcast(tensor, ddp, src=2) is tensor and tensor.tolist() == [[2.0, 2.0], [2.0, 2.0]]
assert all_sum(tensor, ddp).tolist() == [[6.0, 6.0], [6.0, 6.0]]
assert all_sum(ddp.rank + 0.5, ddp) == 4.5 and all_sum([1, ddp.rank], ddp) == [3, 3]
assert all_mean(ddp.rank, ddp) == 1.0 == all_mean(torch.tensor([float(rank)]), ddp).item()
barrier(ddp)
from run_dir import check_alike
check_alike({"lr": 1e-3, "betas": [0.9, 0.95], "file": None}, ddp)
alike = re.escape(f"rank 2 on {socket.gethostname()} has batch_size 5 (rank 0: 4). ")
with pytest.raises(ValueError, match="^" + alike):
    check_alike({"lr": 1e-3, "batch_size": 4 + ddp.rank // 2}, ddp)
model = torch.nn.Linear(4, 3)
assert broadcast(model.weight.tolist(), ddp) == model.weight.tolist()
model = wrap_ddp(model, ddp)
stream = torch.rand(2).tolist()
with pytest.raises(RuntimeError, match="Is the disk full|cannot write"):
    save_checkpoint(__file__ + "/under/a/file.pt", ddp, epoch=1)
cleanup_ddp(ddp)
cleanup_ddp(ddp)
assert environment() == before and threading.active_count() == threads
assert not dist.is_initialized()
with setup_ddp(quiet=True) as ddp:   # once more in the same process
    assert all_sum(1, ddp) == 3
with open(f"stream{rank}", "w") as f:
    f.write(str(stream))
"""


@pytest.mark.parametrize("launcher, env", [
    slow("openmpi", {}),
    ("torchrun", {"DDP_GLOO_MAX_RANKS": "2"})])    # objects over the device's backend
def test_three_ranks_work_together_and_leave_nothing(launcher, env, tmp_path):
    need(launcher)
    result = run_ranks(launcher, 3, [script(tmp_path, TOGETHER)], cwd=tmp_path, env=env)
    assert result.stdout == result.stderr == "", result.text
    assert (result.returncode, result.leftover) == (0, []), result.text
    assert len({(tmp_path / f"stream{rank}").read_text() for rank in range(3)}) == 3


def test_a_barrier_names_the_rank_that_does_not_come(tmp_path):
    path = script(tmp_path, """
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 2:
        time.sleep(600)
    barrier(ddp, timeout=4 if ddp.rank == 0 else 60)    # it is rank 0 that knows who is missing
""")
    with by_hand(path, range(3)) as ranks:
        assert all(code != 0 for code in ranks.codes())
        assert re.search(r"Ranks? 2 failed to pass monitoredBarrier", ranks.err()), ranks.err()
        assert own_tracebacks(ranks.err()) == 1, ranks.err()


# ---------------------------------------------------------------- finding rank 0
WHERE = """
ddp = setup_ddp(init_timeout=float(os.environ.get("LIMIT", 600)))
where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
print(f"{int(all_sum(1, ddp))} ranks met at {where}", flush=True)
cleanup_ddp(ddp)
"""


def test_an_address_alone_means_port_29500_and_a_port_alone_is_this_host(tmp_path):
    path, port = script(tmp_path, WHERE), free_port()
    for env, where in (({"MASTER_ADDR": "127.0.0.5"}, "127.0.0.5:29500"),
                       ({"MASTER_PORT": port}, f"127.0.0.1:{port}")):
        with by_hand(path, [1, 0], 2, **env) as ranks:
            assert ranks.codes() == [0, 0], ranks.err()
            assert ranks.out().count(f"2 ranks met at {where}\n") == 2, ranks.out()


def test_without_a_port_ranks_compute_the_same_with_a_guard_in_between(tmp_path):
    path = script(tmp_path, WHERE)
    words = [["env", f"DDP_RANK={r}", f"DDP_LOCAL_RANK={r}", sys.executable, str(path)]
             for r in (1, 0)]
    env = clean_environment(env=dict(DDP_WORLD_SIZE=2, DDP_LOCAL_WORLD_SIZE=2))
    with launchers.Running(words[0], tmp_path, env, words[1:]) as running:
        result = running.wait(timeout=600)
    met = re.findall(r"2 ranks met at (\S+)", result.stdout)
    assert result.returncode == 0 and len(met) == 2 and len(set(met)) == 1, result.text


def test_a_second_run_at_the_same_port_is_refused_and_ends_not_the_first(tmp_path):
    path = script(tmp_path, """
ddp = setup_ddp(init_timeout=float(os.environ.get("LIMIT", 600)), quiet=True)
barrier(ddp)
print("met", flush=True)
while not os.path.exists("end"):
    time.sleep(0.05)
cleanup_ddp(ddp)
""")
    (tmp_path / "other").mkdir()
    other = shutil.copy(path, tmp_path / "other")
    variables = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), LIMIT=20)
    with by_hand(path, range(2), **variables) as ranks:
        ranks.wait_for("met")
        with by_hand(Path(other), [1], 2, **variables) as late:
            assert late.codes() != [0]
            assert "rank 1 of 2 is in this store already" in late.err(), late.err()
        (tmp_path / "end").touch()
        assert ranks.codes() == [0, 0], ranks.err()


@pytest.mark.parametrize("text, ranks, size, env, codes, said", [
    (WHERE, [0, 1], 2, {"MASTER_PORT": "busy", "LIMIT": 6}, [1, 1], "cannot listen on 127.0.0.1:"),
    (WHERE, [0, 1], 2, {"MASTER_PORT": 99999, "LIMIT": 6}, [1, 2], "MASTER_PORT=99999 is no port"),
    (WHERE, [0, 2], 3, {"LIMIT": 4}, [1, 1],
     "1 of 3 ranks did not appear within 4 s: rank(s) 1."),
    # 1: of an exception that nobody caught; 2: of a bad request
    ("setup_ddp(device=['cpu', 'cuda'][int(os.environ['DDP_RANK'])])", [0, 1], 2, {}, [1, 2],
     "rank 1 on {host}: cuda was asked for"),
    ("setup_ddp(ranks=4)\n", [0, 1], 2, {}, [1, 2],
     "--ranks asks for 4 rank(s), but 2 were started")],
    ids=["busy port", "no port", "missing rank", "impossible device", "number of ranks"])
def test_a_start_that_cannot_be_is_refused_once(text, ranks, size, env, codes, said, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        if env.get("MASTER_PORT") == "busy":
            env = {**env, "MASTER_PORT": busy.getsockname()[1]}
        with by_hand(script(tmp_path, text), ranks, size, **env) as started:
            assert started.codes(500) == codes, started.err()
    assert started.err().count(said.format(host=socket.gethostname())) == 1, started.err()
    assert own_tracebacks(started.err()) == 1, started.err()


def test_an_mpirun_of_another_mpi_is_refused_instead_of_many_runs_of_one_rank(tmp_path):
    need("mpich")
    need("openmpi")
    words = launchers.command("mpich", 2, [script(tmp_path, WHERE)])
    words = [python_of("openmpi") if word == sys.executable else word for word in words]
    with launchers.Running(words, tmp_path, clean_environment("mpich")) as running:
        result = running.wait(timeout=600)
    assert result.returncode != 0 and "ranks met" not in result.stdout
    assert result.stderr.count("built for another MPI") == 1, result.text


@pytest.mark.parametrize("launcher, n", [
    ("python", 1), ("mpich", 2), slow("torchrun", 2), slow("openmpi", 4)])
def test_the_script_of_the_readme_runs_as_it_stands_beside_the_one_file(launcher, n, tmp_path):
    need(launcher)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "script.py").write_text(next(block for block in blocks if "setup_ddp" in block))
    shutil.copy(ROOT / "ddp_setup.py", tmp_path)
    result = run_ranks(launcher, n, ["script.py"], cwd=tmp_path, timeout=600)
    assert (result.returncode, result.stderr, result.leftover) == (0, "", []), result.text
    assert result.stdout.count("epoch 9  loss") == 1, result.text
    state = torch.load(tmp_path / "out" / "9.pt", weights_only=True)
    assert (state["epoch"], state["world_size"]) == (9, n)
