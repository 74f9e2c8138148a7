"""Do ranks that real launchers start find each other, work together, and end together?

Where a test is about what a rank and its guard say and write, the ranks are forked, and ended after
another has failed: what launchers do is tested with launchers.
"""
import os
import re
import shutil
import signal
import socket
import sys
import time

import pytest
import torch

import launchers
from launchers import (ROOT, ForkedRanks, clean_environment, fork_ranks, free_port, need,
                       own_tracebacks, python_of, read_status, run_ranks, seconds_until, slow,
                       start_ranks)

HEAD = f"""import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import ddp_guard
ddp_guard.supervise()
import torch
import ddp_setup
from ddp_setup import *
if "CLOSING" in os.environ:    # shorter limits at the end
    ddp_setup.CLOSING = float(os.environ["CLOSING"])
    ddp_setup.MARGIN = ddp_setup.CLOSING / 2
"""
GONE = 15.0    # seconds in which every process must be gone after a failure; 5 are wanted
GRACE = 6.0    # ends the other ranks so long after a failure, as a launcher does; they may speak


def script(folder, text):
    path = folder / "script.py"
    path.write_text(HEAD + text)
    return path


def by_hand(folder, text, ranks, size=None, **env):
    """ForkedRanks of a script, with a guard each."""
    size = size or len(ranks)
    env = {"MASTER_PORT": free_port(), **env}
    return ForkedRanks([script(folder, text)], folder, {r: dict(
        DDP_RANK=r, DDP_WORLD_SIZE=size, DDP_LOCAL_RANK=r, DDP_LOCAL_WORLD_SIZE=size, **env)
        for r in ranks})


# ---------------------------------------------------------------- one fails, all end
ENDING = """
ddp = setup_ddp(quiet=True)
barrier(ddp)
if ddp.rank == 1:
    print("ending", flush=True)
    {ending}
if ddp.rank == 2 and ddp.state.guard is None:
    all_sum(1.0, ddp)    # waits for rank 1; others are outside any collective
time.sleep(60)
"""
RAISE = "raise ValueError('on purpose.')"
LEAVE = "sys.exit()"
NO_GUARD = {"DDP_GUARD": "0"}
NO_MPI4PY = {"DDP_MPI4PY": "0"}


@pytest.mark.parametrize("launcher, ending, env", [
    ("mpich", RAISE, NO_GUARD), slow("mpich", LEAVE, NO_GUARD),
    slow("mpich", RAISE, NO_GUARD | NO_MPI4PY), slow("torchrun", RAISE, NO_GUARD),
    slow("torchrun", LEAVE, NO_GUARD), slow("openmpi", RAISE, NO_GUARD),
    slow("openmpi", RAISE, NO_MPI4PY), slow("intel", RAISE, NO_MPI4PY),
    slow("intel", RAISE, NO_GUARD)])    # not without both: see docs/faults.md
def test_without_a_guard_or_mpi4py_too_a_rank_that_fails_or_leaves_early_ends_all(
        launcher, ending, env, tmp_path):
    path = script(tmp_path, ENDING.format(ending=ending))
    with start_ranks(launcher, 3, [path], cwd=tmp_path, env=env) as running:
        running.wait_for("ending", timeout=600)
        seconds = seconds_until(lambda: not running.pids(), 600)
        result = running.wait(timeout=5, leftover_grace=0)
    assert seconds < GONE and result.leftover == [] and result.returncode != 0, result.text
    last = [line for line in result.stderr.splitlines() if line.startswith("FAILED: ")]
    cause = "ValueError: on purpose" if ending == RAISE else "ended without cleanup_ddp"
    assert last and re.match(rf"FAILED: rank 1 of 3 on \S+: {cause}\.( |$)", last[0]), result.text
    assert ending == LEAVE or "Traceback" in result.stderr, result.text


@pytest.mark.parametrize("ending, code, words", [
    ("os.kill(os.getpid(), 9)", 1, "died without a word (SIGKILL"),
    ("sys.exit(3)", 1, "ended without cleanup_ddp"),
    ("os._exit(0)", 1, "left with exit code 0 without cleanup_ddp"),
    ("abort(ddp, 'a full disk.')", 1, "a full disk."),
    ("abort(ddp, 'no such file', 2)", 2, "no such file"),
    ("raise ValueError('on purpose')", 1, "ValueError: on purpose."),
    ("exec('with ddp: sys.exit(\"no data?\")')", 1, "no data? No checkpoint yet.")])
def test_the_end_of_a_rank_is_told_once_with_rank_host_and_exit_code(ending, code, words, tmp_path):
    with by_hand(tmp_path, f"""
ddp = setup_ddp(quiet=True)
start_watch(ddp, "out")
barrier(ddp)
if ddp.rank == 1:
    {ending}
all_sum(1.0, ddp)    # waits for rank 1
""", range(3)) as ranks:
        assert ranks.codes(grace=GRACE)[1] == code, ranks.err()
        place = f"rank 1 of 3 on {socket.gethostname()}"
    prefix = "" if code == 2 else f"FAILED: {place}: "
    assert ranks.err().count(prefix + words) == 1, ranks.err()
    assert ranks.err().count("FAILED: ") == (code != 2), ranks.err()
    assert own_tracebacks(ranks.err()) == ("ValueError" in words), ranks.err()
    status = read_status(tmp_path / "out")
    assert status["code"] == code and status["reason"].startswith(f"{place}: "), status


def test_an_exception_of_all_ranks_is_printed_once_as_the_last_thing(tmp_path):
    with by_hand(tmp_path, """
ddp = setup_ddp(quiet=True)
barrier(ddp)
raise ValueError("on purpose")
""", range(3)) as ranks:
        assert ranks.codes(grace=GRACE)[0] == 1, ranks.err()
        assert own_tracebacks(ranks.err()) == ranks.err().count("ValueError: on purpose.") == 1
        assert ranks.err(0).splitlines()[-1].startswith("FAILED: rank 0 of 3 on "), ranks.err()


HANG = """
ddp = setup_ddp(quiet=True)
start_watch(ddp, {run_dir}, minutes=3 / 60)
def stuck():
    while ddp.rank == 1:
        pass
for step in range(8):
    stop_reason(ddp, step)
    if step == 5:
        stuck()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_hang_is_ended_with_the_late_rank_its_step_and_all_stacks(size, tmp_path):
    with by_hand(tmp_path, HANG.format(run_dir="'out'"), range(size)) as ranks:
        codes = ranks.codes(grace=GRACE)
        text = ranks.err()
    assert codes[0] == 70 and text.count("FAILED: ") == 1, text
    assert re.search(r"FAILED: rank 1 of \d .*no progress for 3 s.*stuck \(script.py:", text), text
    status = read_status(tmp_path / "out")
    assert status["code"] == 70 and status["step"] in (5, 6) and "no progress" in status["reason"]
    for r in range(size):
        assert "script.py" in (tmp_path / "out" / "stacks" / f"rank_{r}.txt").read_text(), r


def test_without_a_run_folder_a_hang_is_ended_and_the_stacks_of_all_are_printed(tmp_path):
    with by_hand(tmp_path, HANG.format(run_dir=None), range(2)) as ranks:
        assert 70 in ranks.codes(grace=GRACE), ranks.err()
        assert "in stuck" in ranks.err(1) and "in all_reduce" in ranks.err(0), ranks.err()
        assert re.search(r"FAILED: rank 0 of 2 on \S+: no progress for 3 s, last step [56]",
                         ranks.err()), ranks.err()


@pytest.mark.parametrize("when, speaker, code, status, says", [
    # a library with a hook of its own
    ("sys.excepthook = lambda *_: None; before = lambda: 1 / 0", 1, 1, 1, "ZeroDivisionError"),
    ("before = lambda: os._exit(1)", 1, 1, 1, "left with exit code 1"),
    ("before = lambda: os.kill(os.getpid(), 19)", 0, 70, 70,
     "rank(s) 1 did not come to cleanup_ddp within 3 s"),
    ("torch.distributed.destroy_process_group = lambda: os.kill(os.getpid(), 9)", 1, 1, 0,
     "died without a word (SIGKILL"),
    ("after = lambda: os.kill(os.getpid(), 9)", 1, 128 + signal.SIGKILL, 0, ""),
    # while Python ends: what is registered first is called last
    ("import atexit; atexit.register(os.kill, os.getpid(), 19)", 1, 70, 0, "no progress for 8")])
def test_a_rank_that_fails_or_dies_or_is_stopped_while_it_leaves_is_not_passed_over(  # noqa: PLR0913
        when, speaker, code, status, says, tmp_path):
    with by_hand(tmp_path, f"""
before = after = lambda: None
if os.environ["DDP_RANK"] == "1":
    {when}
ddp = setup_ddp(quiet=True)
start_watch(ddp, "out", minutes=3 / 60)
stop_reason(ddp, 0)
before()
cleanup_ddp(ddp)
after()
""", range(2), CLOSING=4) as ranks:
        assert ranks.codes(100, GRACE)[speaker] == code, ranks.err()
        assert ranks.err().count("FAILED: ") == bool(says) and says in ranks.err(), ranks.err()
        assert read_status(tmp_path / "out")["code"] == status


@pytest.mark.slow
def test_a_rank_ends_in_good_order_however_late_gloo_lets_go_of_the_last_tensor(tmp_path):
    """Its threads need the GIL for that, and get hardly any time beside a busy process."""
    path = script(tmp_path, """
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


def test_a_stop_that_one_rank_is_asked_for_is_the_outcome_and_the_end_of_a_child_is_not(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".last.pt.tmp").touch()    # of a save that was killed
    with by_hand(tmp_path, """
import atexit, multiprocessing, signal
ddp = setup_ddp(quiet=True)
start_watch(ddp, "out")
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
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()    # all that sys.exit would do, but for torch's own threads
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.kill(os.getpid(), signal.SIGUSR1)
while not stop_reason(ddp, 1):
    pass
save_checkpoint("out/last.pt", ddp, step=1)
cleanup_ddp(ddp)
""", range(2), DDP_GUARD="0") as ranks:
        assert ranks.codes() == [0, 0], ranks.err()
        assert ranks.out(1) == "-15\n5\n"
    status = read_status(tmp_path / "out")
    assert status["code"] == 75 and status["reason"].startswith("SIGUSR1 on rank 1"), status
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "last.pt", "lock", "status.json"]


def test_a_notebook_lives_on_after_an_exception_and_a_lone_script_says_how_it_ended(tmp_path):
    path = script(tmp_path, """
sys.ps1 = ">>> "      # what makes a session interactive
try:
    with setup_ddp(quiet=True) as ddp:
        start_watch(ddp, "notebook", minutes=0.2 / 60)
        time.sleep(1)
        raise ValueError("of a cell")
except ValueError:
    print("lives on", flush=True)
del sys.ps1
start_watch(setup_ddp(), "script")
raise ValueError("on purpose")
""")
    result = fork_ranks(1, [path], tmp_path, {"DDP_GUARD": 1})
    assert (result.returncode, result.stdout) == (1, "lives on\n"), result.text
    assert result.stderr.count("FAILED: rank 0 of 1") == 1 == own_tracebacks(result.stderr)
    for folder, reason in (("notebook", "of a cell"), ("script", "on purpose")):
        status = read_status(tmp_path / folder)
        assert (status["code"], status["reason"]) == (1, f"ValueError: {reason}")


# ---------------------------------------------------------------- working together
TOGETHER = """
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

ddp = setup_ddp(seed=5, quiet=True)
rank, tensor = str(ddp.rank), torch.full((2,), float(ddp.rank))
assert setup_ddp() is ddp and [ddp.local_world_size, ddp.node_rank] == [3, 0]
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [rank, "3", rank]
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
if "OMPI_COMM_WORLD_RANK" not in os.environ:    # its own library listens on all addresses
    assert listening() == {"0100007F"}, "only 127.0.0.1 may be listened on"
told = {"from": ddp.rank, "text": "é", "none": [None, 1.5]}
assert broadcast(told, ddp, src=1) == told | {"from": 1}
assert broadcast(tensor, ddp, src=2) is tensor and tensor.tolist() == [2.0, 2.0]
assert all_sum(tensor, ddp).tolist() == [6.0, 6.0] and all_sum([1, ddp.rank], ddp) == [3, 3]
assert all_mean(ddp.rank, ddp) == 1.0 == all_mean(torch.tensor([float(rank)]), ddp).item()
model = torch.nn.Linear(4, 3)
assert broadcast(model.weight.tolist(), ddp) == broadcast(model.weight, ddp).tolist()
model = wrap_ddp(model, ddp, broadcast_buffers=False)    # torch 2.13 warns of this name
assert model.gradient_as_bucket_view
stream = torch.rand(2).tolist()
with pytest.raises(RuntimeError, match="cannot write"):
    save_checkpoint(__file__ + "/under/a/file.pt", ddp, epoch=1)
assert gather([ddp.rank, "é"], ddp) == [[0, "é"], [1, "é"], [2, "é"]]
cleanup_ddp(ddp)
cleanup_ddp(ddp)
assert not dist.is_initialized()
with open(f"stream{rank}", "w") as f:
    f.write(str(stream))
"""


@pytest.mark.parametrize("launcher", [slow("openmpi"), slow("torchrun"), "forked"])
def test_three_ranks_work_together_and_leave_nothing(launcher, tmp_path):
    path = script(tmp_path, TOGETHER)
    if launcher == "forked":
        result = fork_ranks(3, [path], tmp_path, {"DDP_GUARD": 1})
    else:
        result = run_ranks(launcher, 3, [path], cwd=tmp_path)
    assert result.stdout == result.stderr == "", result.text
    assert (result.returncode, result.leftover) == (0, []), result.text
    assert len({(tmp_path / f"stream{rank}").read_text() for rank in range(3)}) == 3


def test_a_barrier_names_the_rank_that_does_not_come(tmp_path):
    with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 2:
        time.sleep(600)
    barrier(ddp, timeout=3)
""", range(3)) as ranks:
        assert 1 in ranks.codes(grace=GRACE)[:2], ranks.err()   # of the one that has spoken
        assert own_tracebacks(ranks.err()) == ranks.err().count("FAILED: ") == 1, ranks.err()
        assert "RuntimeError: rank(s) 2 of 3 did not come to a barrier within 3 s" in ranks.err()


# ---------------------------------------------------------------- finding rank 0
WHERE = """
ddp = setup_ddp(init_timeout=float(os.environ.get("LIMIT", 600)))
where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
print(f"{int(all_sum(1, ddp))} ranks met at {where}", flush=True)
cleanup_ddp(ddp)
"""


def test_a_node_waits_for_the_others_as_long_as_it_was_told_and_a_pods_variables_do_not_count(
        tmp_path):
    words = (f"train_sedd_ddp.py --config configs/sedd_demo.yaml --work_dir {tmp_path / 'w'} "
             f"--nnodes 2 --node_rank 0 --nproc_per_node 1 --master_addr 127.0.0.1 "
             f"--master_port {free_port()} --init_timeout 1")
    pod = clean_environment(env=dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1"))
    with launchers.Running([sys.executable, *words.split()], ROOT, pod) as running:
        result = running.wait(timeout=600)
    assert result.returncode == 1 and "starting 1 rank(s) here, on node 0 of 2" in result.text
    assert "1 of 2 ranks did not appear within 1 s: rank(s) 1." in result.text, result.text


def test_without_a_port_ranks_compute_the_same_with_a_guard_in_between(tmp_path):
    path = script(tmp_path, WHERE)
    words = [["env", f"DDP_RANK={r}", f"DDP_LOCAL_RANK={r}", sys.executable, str(path)]
             for r in (1, 0)]
    env = clean_environment(env=dict(DDP_WORLD_SIZE=2, DDP_LOCAL_WORLD_SIZE=2))
    with launchers.Running(words[0], tmp_path, env, words[1:]) as running:
        result = running.wait(timeout=600)
    met = re.findall(r"2 ranks met at (\S+)", result.stdout)
    assert result.returncode == 0 and len(met) == 2 and len(set(met)) == 1, result.text


@pytest.mark.parametrize("text, other_rank, env, said", [
    (WHERE, 1, {"MASTER_PORT": 99999, "LIMIT": 6}, "MASTER_PORT=99999 is no port"),
    (WHERE, 2, {"LIMIT": 4}, "1 of 3 ranks did not appear within 4 s: rank(s) 1."),
    ("setup_ddp(device=['cpu', 'cuda'][int(os.environ['DDP_RANK'])])", 1, {},
     "rank 1 on {host}: --device cuda, --backend auto: no cuda device is visible"),
    ("setup_ddp(ranks=4)\n", 1, {}, "--ranks asks for 4 rank(s), but 2 were started")],
    ids=["no port", "missing rank", "impossible device", "number of ranks"])
def test_a_start_that_cannot_be_is_refused_once(text, other_rank, env, said, tmp_path):
    with by_hand(tmp_path, text, [0, other_rank], other_rank + 1, **env) as started:
        codes = started.codes(500, GRACE)
        assert codes[0] == 1 and codes[1] != 0, started.err()   # 1: of an uncaught exception
    assert started.err().count(said.format(host=socket.gethostname())) == 1, started.err()
    assert own_tracebacks(started.err()) == 1, started.err()


@pytest.mark.parametrize("launcher", ["mpich", slow("openmpi"), slow("ours"), slow("intel")])
def test_a_port_of_another_program_ends_all_at_once_with_code_2(launcher, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = [ROOT / "train_sedd_ddp.py", "--config", ROOT / "configs" / "sedd_demo.yaml",
                 "--device", "cpu", "--work_dir", "out", "--init_timeout", "400"]
        if launcher == "ours":
            words += ["--master_port", port]
        result = run_ranks(launcher, 2, words, tmp_path, timeout=300,
                           env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert (result.returncode, result.leftover) == (2, []), result.text
    assert result.stderr.count(f"cannot listen on 127.0.0.1:{port}") == 1, result.text


def test_a_run_whose_port_a_second_one_is_given_goes_on(tmp_path):
    with by_hand(tmp_path, """
import subprocess
ddp_setup.MARGIN = 0.1
ddp = setup_ddp(quiet=True)
barrier(ddp)
if ddp.is_main and "second" not in sys.argv:
    second = {**os.environ, "DDP_RANK": "1", "DDP_LOCAL_RANK": "1"}
    print(subprocess.run([sys.executable, __file__, "second"], env=second).returncode, flush=True)
all_sum(1.0, ddp)
cleanup_ddp(ddp)
""", range(2)) as ranks:
        assert ranks.codes() == [0, 0], ranks.err()
        assert ranks.out(0) == "2\n", ranks.err()


def test_an_mpirun_of_another_mpi_is_refused_instead_of_many_runs_of_one_rank(tmp_path):
    need("mpich")
    need("openmpi")
    words = launchers.command("mpich", 2, [script(tmp_path, WHERE)])
    words = [python_of("openmpi") if word == sys.executable else word for word in words]
    with launchers.Running(words, tmp_path, clean_environment("mpich")) as running:
        result = running.wait(timeout=600)
    assert result.returncode != 0 and "ranks met" not in result.stdout
    assert result.stderr.count("built for another MPI") == 1, result.text


# ---------------------------------------------------------------- the file without the others
def script_beside_the_one_file(folder, text):
    """A script in a folder that holds nothing else of the project but ddp_setup.py."""
    shutil.copy(ROOT / "ddp_setup.py", folder)
    path = folder / "script.py"
    path.write_text(text)
    return path


def two_ranks(path, folder, **env):
    """ForkedRanks without a guard."""
    env = {"DDP_WORLD_SIZE": 2, "DDP_LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port(),
           "DDP_GUARD": 0, **env}
    return ForkedRanks([path], folder, {rank: dict(env, DDP_RANK=rank, DDP_LOCAL_RANK=rank)
                                        for rank in range(2)})


STOPPING = """
import sys, time
from ddp_setup import setup_ddp, start_watch, stop_reason, cleanup_ddp
ddp = setup_ddp(quiet=True)
start_watch(ddp, "out")
step = 0
reason = ""
while not reason:
    step += 1
    reason = stop_reason(ddp, step)
    if step == 2:
        print("training", flush=True)
    time.sleep(0.02)
print(f"stopped after step {step}: {reason}")
cleanup_ddp(ddp)
sys.exit(75)
"""


@pytest.mark.parametrize("request_, reason", [
    ("SIGTERM", r"SIGTERM on rank 1 \(\S+\)"), ("SIGUSR1", r"SIGUSR1 on rank 1 \(\S+\)"),
    ("SIGINT", r"SIGINT on rank 1 \(\S+\)"),
    ("file", r"\S+/out/STOP exists; remove it before the next start"),
    ("deadline", "DDP_DEADLINE is reached")])
def test_the_file_alone_has_all_ranks_stop_after_the_same_step_on(request_, reason, tmp_path):
    env = {"DDP_DEADLINE": time.time() + 8} if request_ == "deadline" else {}
    path = script_beside_the_one_file(tmp_path, STOPPING)
    (tmp_path / "out").mkdir()
    with two_ranks(path, tmp_path, **env) as ranks:
        ranks.wait_for("training")
        if request_ == "file":
            (tmp_path / "out" / "STOP").touch()
        elif request_ != "deadline":
            os.kill(ranks.pids[1], getattr(signal, request_))
        assert ranks.codes() == [75, 75], ranks.err()
        assert ranks.out(0) == ranks.out(1)
        assert re.search(rf"stopped after step \d+: {reason}\n", ranks.out(0)), ranks.out(0)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "ddp_setup.py", "script.py", "out"}


def test_the_file_alone_ends_a_run_at_once_on_the_second_ctrl_c(tmp_path):
    path = script_beside_the_one_file(tmp_path, """
import time
from ddp_setup import setup_ddp, stop_reason
with setup_ddp(quiet=True) as ddp:
    stop_reason(ddp, 0)
    print("training", flush=True)
    time.sleep(600)
""")
    with ForkedRanks([path], tmp_path, {0: {"DDP_GUARD": 0}}) as ranks:
        ranks.wait_for("training")
        os.kill(ranks.pids[0], signal.SIGINT)
        launchers.await_that(lambda: "Ctrl-C once more" in ranks.err(), 60, ranks.err)
        time.sleep(0.5)     # SIGINTs in quick succession are one Ctrl-C
        os.kill(ranks.pids[0], signal.SIGINT)
        assert ranks.codes() == [130], ranks.err()
        assert "FAILED: rank 0 of 1 on " in ranks.err() and own_tracebacks(ranks.err()) == 0


@pytest.mark.parametrize("launcher", ["mpich", slow("torchrun"), slow("openmpi")])
def test_the_file_alone_ends_the_other_rank_when_one_fails(launcher, tmp_path):
    script_beside_the_one_file(tmp_path, """
import time
from ddp_setup import barrier, setup_ddp
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 1:
        raise ValueError("on purpose")
    time.sleep(600)
""")
    result = run_ranks(launcher, 2, ["script.py"], cwd=tmp_path)
    assert result.returncode != 0 and result.leftover == [], result.text
    assert re.search(r"^FAILED: rank 1 of 2 on \S+: ValueError: on purpose\.$", result.stderr,
                     re.MULTILINE), result.text


def test_the_file_alone_ends_a_rank_that_makes_no_progress_and_shows_where_it_is(tmp_path):
    path = script_beside_the_one_file(tmp_path, """
import time
from ddp_setup import setup_ddp, start_watch
start_watch(setup_ddp(quiet=True), minutes=1 / 60)
def stuck():
    time.sleep(600)
stuck()
""")
    result = fork_ranks(1, [path], tmp_path)
    assert result.returncode == 1 and "in stuck" in result.stderr, result.text


@pytest.mark.parametrize("launcher, n", [
    slow("python", 1), ("mpich", 2), slow("torchrun", 2), slow("openmpi", 4)])
def test_the_script_of_the_readme_runs_as_it_stands_beside_the_one_file(launcher, n, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script_beside_the_one_file(tmp_path, next(block for block in blocks if "setup_ddp" in block))
    result = run_ranks(launcher, n, ["script.py"], cwd=tmp_path)
    assert (result.returncode, result.stderr, result.leftover) == (0, "", []), result.text
    assert result.stdout.count("epoch 9  loss") == 1, result.text
    state = torch.load(tmp_path / "out" / "9.pt", weights_only=True)
    assert (state["epoch"], state["world_size"]) == (9, n)
