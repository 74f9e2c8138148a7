"""Do ranks that real launchers start find each other, work together, and end together?

Where a test is about what a rank, its watch and its guard say and write, the ranks are forked, and
ended after another has failed: what launchers do is tested with launchers.
"""
import re
import shutil
import socket
import sys

import pytest
import torch

import launchers
from launchers import (
    GRACE,
    ROOT,
    by_hand,
    clean_environment,
    fork_ranks,
    free_port,
    need,
    own_tracebacks,
    python_of,
    read_status,
    run_ranks,
    script,
    seconds_until,
    slow,
    start_ranks,
)

GONE = 15.0    # seconds in which every process must be gone after a failure; 5 are wanted


# ---------------------------------------------------------------- one fails, all end
ENDING = """
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 1:
        print("ending", flush=True)
        raise ValueError("on purpose")
    if ddp.rank == 2:
        all_sum(1.0, ddp)    # waits for rank 1; rank 0 is outside any collective
    time.sleep(60)
"""
NO_GUARD = {"DDP_GUARD": "0"}
NO_MPI4PY = {"DDP_MPI4PY": "0"}


@pytest.mark.parametrize("launcher, env", [
    ("mpich", NO_GUARD), slow("mpich", {}), slow("mpich", NO_MPI4PY),
    slow("mpich", NO_GUARD | NO_MPI4PY), slow("torchrun", {}), slow("torchrun", NO_GUARD),
    slow("openmpi", NO_GUARD), slow("openmpi", NO_MPI4PY), slow("intel", NO_MPI4PY),
    slow("intel", NO_GUARD)])    # not without both: see docs/faults.md
def test_a_rank_that_fails_says_why_and_ends_all(launcher, env, tmp_path):
    path = script(tmp_path, ENDING)
    with start_ranks(launcher, 3, [path], cwd=tmp_path, env=env) as running:
        running.wait_for("ending", timeout=600)
        seconds = seconds_until(lambda: not running.pids(), 600)
        result = running.wait(timeout=5, leftover_grace=0)
    assert seconds < GONE and result.leftover == [] and result.returncode != 0, result.text
    said = r"(?sm)^\[rank 1 of 3 on \S+\] Traceback .*^ValueError: on purpose$"
    assert re.search(said, result.stderr) and own_tracebacks(result.stderr) == 1, result.text


@pytest.mark.parametrize("ending, code, words", [
    ("os.kill(os.getpid(), 9)", 1, "died without a word (SIGKILL"),
    ("sys.exit(3)", 3, "left with exit code 3"),
    ("os._exit(0)", 1, "left with exit code 0 without a word"),
    ("watch.abort('a full disk.')", 1, "a full disk."),
    ("watch.abort('no such file', 2)", 2, "no such file"),
    ("raise ValueError('on purpose')", 1, "ValueError: on purpose."),
    ("sys.exit('no data?')", 1, "no data? No checkpoint yet.")])
def test_the_end_of_a_rank_is_told_once_with_rank_host_and_exit_code(ending, code, words, tmp_path):
    """By itself or by its guard, in the block of a watch."""
    with by_hand(tmp_path, f"""
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "out") as watch:
    if ddp.rank == 1:
        {ending}
    all_sum(1.0, ddp)    # waits for rank 1
""", range(3)) as ranks:
        assert ranks.codes(grace=GRACE)[1] == code, ranks.err()
        place = f"rank 1 of 3 on {socket.gethostname()}"
    prefix = f"[{place}] " if code == 2 else f"FAILED: {place}: "
    assert ranks.err().count(prefix + words) == 1, ranks.err()
    assert ranks.err().count("FAILED: ") == (code != 2), ranks.err()
    assert own_tracebacks(ranks.err()) == ("ValueError" in words), ranks.err()
    status = read_status(tmp_path / "out")
    assert status["code"] == code and status["reason"].startswith(f"{place}: "), status


def test_an_exit_of_rank_0_is_told_alike_by_the_last_line_and_the_status(tmp_path):
    with by_hand(tmp_path, """
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "out"):
    if ddp.is_main:
        sys.exit(5)
    all_sum(1.0, ddp)
""", range(2)) as ranks:
        assert ranks.codes(grace=GRACE)[0] == 5, ranks.err()
    status = read_status(tmp_path / "out")
    place = f"rank 0 of 2 on {socket.gethostname()}"
    assert (status["code"], status["reason"]) == (5, f"{place}: left with exit code 5")
    said = f"FAILED: {status['reason']}. No checkpoint yet."
    assert [line for line in ranks.err().splitlines() if "FAILED" in line] == [said]


@pytest.mark.parametrize("when, speaker, code, status, says", [
    # a library with a hook of its own
    ("sys.excepthook = lambda *_: None; before = lambda: 1 / 0", 1, 1, 1, "ZeroDivisionError"),
    ("before = lambda: os._exit(1)", 1, 1, 1, "left with exit code 1"),
    ("before = lambda: os.kill(os.getpid(), 19)", 0, 70, 70,
     "rank(s) 1 did not within 3 s"),
    # the run has ended well, and its status stays
    ("torch.distributed.destroy_process_group = lambda: os.kill(os.getpid(), 9)", 1, 1, 0,
     "died without a word (SIGKILL"),
    ("after = lambda: os.kill(os.getpid(), 9)", 1, 1, 0, "died without a word (SIGKILL")])
def test_a_rank_that_fails_or_dies_or_is_stopped_while_it_leaves_is_not_passed_over(  # noqa: PLR0913
        when, speaker, code, status, says, tmp_path):
    with by_hand(tmp_path, f"""
ddp_setup.CLOSING = ddp_watch.LEAVING = 2.0
before = after = lambda: None
if os.environ["DDP_RANK"] == "1":
    {when}
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "out", minutes=3 / 60) as watch:
    watch.stop_reason(0)
    before()
after()
""", range(2)) as ranks:
        assert ranks.codes(100, GRACE)[speaker] == code, ranks.err()
        assert ranks.err().count("FAILED: ") == bool(says) and says in ranks.err(), ranks.err()
        assert read_status(tmp_path / "out")["code"] == status


def test_a_rank_that_is_stopped_while_python_ends_is_ended_with_a_word(tmp_path):
    with by_hand(tmp_path, """
import atexit
ddp_setup.CLOSING = ddp_watch.LEAVING = 2.0
atexit.register(os.kill, os.getpid(), 19)    # what is registered first is called last
with setup_ddp(quiet=True) as ddp, watch_run(ddp):
    pass
""", range(1)) as ranks:
        assert ranks.codes(100) == [70]
        assert "the run has ended, but Python did not" in ranks.err()


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
    launches = 5    # without the wait in cleanup_ddp one in four ended by SIGABRT
    result = run_ranks("python", 1, [path, *(free_port() for _ in range(launches))], cwd=tmp_path,
                       env=NO_GUARD)
    assert (result.stdout, result.stderr) == (launches * "[0, 0]\n", ""), result.text


def test_a_stop_that_one_rank_is_asked_for_is_the_outcome_and_the_end_of_a_child_is_not(tmp_path):
    with by_hand(tmp_path, """
import atexit, multiprocessing
fork = multiprocessing.get_context("fork")
begun = fork.Event()
def work():
    begun.set()
    time.sleep(600)
with setup_ddp(quiet=True) as ddp, watch_run(ddp, "out") as watch:
    watch.stop_reason(0)
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
    while not watch.stop_reason(1):
        pass
    save_checkpoint("out/last.pt", ddp, step=1)
    sys.exit(STOPPED)
""", range(2), DDP_GUARD="0") as ranks:
        assert ranks.codes() == [75, 75], ranks.err()
        assert ranks.out(1) == "-15\n5\n"
    status = read_status(tmp_path / "out")
    assert status["code"] == 75 and status["reason"].startswith("SIGUSR1 on rank 1"), status
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "last.pt", "lock", "status.json"]


def test_a_pause_in_a_notebook_is_no_hang(tmp_path):
    path = script(tmp_path, """
sys.ps1 = ">>> "      # what makes a session interactive
with setup_ddp(quiet=True) as ddp, watch_run(ddp, minutes=0.2 / 60):
    time.sleep(1)
print("lives on", flush=True)
""")
    result = fork_ranks(1, [path], tmp_path, {"DDP_GUARD": 1})
    assert (result.returncode, result.stdout) == (0, "lives on\n"), result.text


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
assert ddp.local_world_size == 3 and ddp.on_one_host
with pytest.raises(SetupError, match="was called a second time"):
    setup_ddp()
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


# ---------------------------------------------------------------- finding rank 0
WHERE = """
ddp = setup_ddp(init_timeout=float(os.environ.get("LIMIT", 600)))
where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
print(f"{int(all_sum(1, ddp))} ranks met at {where}", flush=True)
cleanup_ddp(ddp)
"""


def test_a_node_waits_for_the_others_as_long_as_it_was_told(tmp_path):
    """The variables of a pod of Kubernetes do not count."""
    words = (f"{ROOT}/train_sedd_ddp.py --config {ROOT}/configs/sedd_demo.yaml --work_dir w "
             f"--nnodes 2 --node_rank 0 --nproc_per_node 1 --master_addr 127.0.0.1 "
             f"--master_port {free_port()} --init_timeout 1")
    pod = dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")
    result = fork_ranks(1, words.split(), tmp_path, pod)
    assert result.returncode == 1 and "starting 1 rank(s) here, on node 0 of 2" in result.text
    assert "1 of 2 ranks did not appear within 1 s: rank(s) 1." in result.text, result.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher, env", [
    ("mpich", NO_MPI4PY), ("mpich", NO_MPI4PY | NO_GUARD), ("intel", NO_MPI4PY),
    ("intel", NO_MPI4PY | NO_GUARD)])
def test_ranks_of_two_launches_at_once_meet_at_two_ports_without_mpi4py(launcher, env, tmp_path):
    path = script(tmp_path, WHERE)
    with start_ranks(launcher, 2, [path], tmp_path, env) as one:
        with start_ranks(launcher, 2, [path], tmp_path, env) as other:
            results = [one.wait(timeout=600), other.wait(timeout=600)]
    places = []
    for result in results:
        met = re.findall(r"2 ranks met at (\S+)", result.stdout)
        assert result.returncode == 0 and len(met) == 2 and len(set(met)) == 1, result.text
        places.append(met[0])
    assert places[0] != places[1]


@pytest.mark.parametrize("launcher", [
    "forked", slow("mpich"), slow("openmpi"), slow("ours"), slow("intel")])
def test_a_port_of_another_program_ends_all_at_once_with_code_2(launcher, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = [ROOT / "train_sedd_ddp.py", "--config", ROOT / "configs" / "sedd_demo.yaml",
                 "--device", "cpu", "--work_dir", "out", "--init_timeout", "400"]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if launcher == "forked":
            result = fork_ranks(2, words, tmp_path, {"DDP_GUARD": 1, **address}, timeout=100)
        else:
            more = ["--master_port", port] if launcher == "ours" else []
            result = run_ranks(launcher, 2, [*words, *more], tmp_path, address, timeout=300)
    assert (result.returncode, result.leftover) == (2, []), result.text
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr, result.text


def test_a_run_whose_port_a_second_one_is_given_goes_on(tmp_path):
    with by_hand(tmp_path, """
import subprocess
ddp = setup_ddp(quiet=True)
barrier(ddp)
if ddp.is_main and "second" not in sys.argv:
    second = {**os.environ, "DDP_RANK": "1", "DDP_LOCAL_RANK": "1"}
    print(subprocess.run([sys.executable, __file__, "second"], env=second).returncode, flush=True)
all_sum(1.0, ddp)
cleanup_ddp(ddp)
""", range(2)) as ranks:
        assert ranks.codes() == [0, 0], ranks.err()
        assert ranks.out(0) == "1\n" and "another run has met at" in ranks.err(0), ranks.err()


@pytest.mark.slow
def test_an_mpirun_of_another_mpi_is_refused_instead_of_many_runs_of_one_rank(tmp_path):
    need("mpich")
    need("openmpi")
    words = launchers.command("mpich", 2, [script(tmp_path, WHERE)])
    words = [python_of("openmpi") if word == sys.executable else word for word in words]
    with launchers.Running(words, tmp_path, clean_environment("mpich")) as running:
        result = running.wait(timeout=600)
    assert result.returncode != 0 and "ranks met" not in result.stdout
    assert "built for another MPI" in result.stderr, result.text


# ---------------------------------------------------------------- the file without the others
def script_beside_the_one_file(folder, text):
    """A script in a folder that holds nothing else of the project but ddp_setup.py."""
    shutil.copy(ROOT / "ddp_setup.py", folder)
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "torchrun", "openmpi"])
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
    assert re.search(r"(?sm)^\[rank 1 of 2 on \S+\] Traceback .*^ValueError: on purpose$",
                     result.stderr), result.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher, n", [("python", 1), ("mpich", 2), ("torchrun", 2)])
def test_the_script_of_the_readme_runs_as_it_stands_beside_the_one_file(launcher, n, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script_beside_the_one_file(tmp_path, next(block for block in blocks if "setup_ddp" in block))
    result = run_ranks(launcher, n, ["script.py"], cwd=tmp_path)
    assert (result.returncode, result.stderr, result.leftover) == (0, "", []), result.text
    assert result.stdout.count("epoch 9  loss") == 1, result.text
    assert torch.load(tmp_path / "out" / "last.pt", weights_only=True)["epoch"] == 9
