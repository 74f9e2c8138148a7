"""Do several ranks meet, agree, save, load and end together, and are those that lack named?

The ranks are forked, without a launcher: see test_ddp_launch.py for those."""
import os
import re
import signal
import socket

import pytest

from launchers import (
    GRACE,
    ForkedRanks,
    by_hand,
    fork_ranks,
    free_port,
    own_tracebacks,
    script,
)
from training_runs import needs_pretended_device

HOST = socket.gethostname()


def run(ranks, text, folder, **env):
    return fork_ranks(ranks, [script(folder, text)], folder, env)


def two_ranks(text, folder, ranks=(0, 1), **env):
    """ForkedRanks of two, or some of them, without guards."""
    return by_hand(folder, text, ranks, 2, **{"DDP_GUARD": 0, **env})


# ---------------------------------------------------------------- collectives
def test_all_ranks_get_what_one_sends(tmp_path):
    done = run(3, """
with setup_ddp(quiet=True) as ddp:
    told = {"from": ddp.rank, "text": "é", "none": [None, 1.5, True]}
    assert broadcast(told, ddp, src=1) == {**told, "from": 1}
    tensor = torch.full((2,), float(ddp.rank))
    assert broadcast(tensor, ddp, src=2) is tensor and tensor.tolist() == [2.0, 2.0]
    weight = torch.nn.Linear(4, 3).weight
    assert broadcast(weight, ddp) is weight and weight.requires_grad
    assert len(set(map(str, gather(weight.tolist(), ddp)))) == 1
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_all_ranks_get_what_each_has_in_their_order(tmp_path):
    done = run(3, """
with setup_ddp(quiet=True) as ddp:
    assert gather({"rank": ddp.rank, "long": "x" * ddp.rank * 10000}, ddp) == [
        {"rank": rank, "long": "x" * rank * 10000} for rank in range(3)]
    assert gather(None, ddp) == [None] * 3
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_sums_over_ranks_keep_their_form(tmp_path):
    done = run(3, """
with setup_ddp(quiet=True) as ddp:
    assert all_sum(ddp.rank, ddp) == 3.0 and all_sum([1, ddp.rank], ddp) == [3.0, 3.0]
    assert all_sum(2**53 // 4, ddp) == 3 * 2**53 // 4, "exact in float64"
    tensor = torch.full((2,), float(ddp.rank))
    assert all_sum(tensor, ddp).tolist() == [3.0, 3.0]
    assert tensor.tolist() == [float(ddp.rank)] * 2, "the sum is a new tensor"
    assert all_mean(ddp.rank, ddp) == 1.0 == all_mean(tensor, ddp)[0].item()
    assert all_mean([1, ddp.rank], ddp) == [1.0, 1.0]
    assert not all_sum(torch.ones(1, requires_grad=True), ddp).requires_grad
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


@needs_pretended_device
def test_numbers_are_summed_on_devices_that_have_no_float64(tmp_path):
    done = run(2, """
from pretended_device import NAME, OnDevice, PretendedDevice
make = OnDevice.__init__
def make_without_float64(tensor, values):
    if values.dtype == torch.float64:
        raise TypeError("this device has no float64")
    make(tensor, values)
OnDevice.__init__ = make_without_float64
with setup_ddp(quiet=True) as ddp, PretendedDevice():
    ddp = replace(ddp, device=torch.device(NAME, 0))
    assert all_sum([0.1, ddp.rank], ddp) == [0.2, 1.0] and all_mean(ddp.rank, ddp) == 0.5
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_gradients_are_averaged_over_ranks_in_the_last_micro_step_alone(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    model = wrap_ddp(torch.nn.Linear(1, 1), ddp)
    for last, expected in ((False, ddp.rank + 1.0), (True, 3.0)):    # the sum of two micro-steps
        with gradient_sync(model, last):
            model(torch.full((1, 1), ddp.rank + 1.0)).sum().backward()
        assert model.module.weight.grad.item() == expected
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_ranks_know_their_hosts_and_tell_other_libraries_their_place(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    assert ddp.hosts == (ddp.host, ddp.host) and ddp.on_one_host
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    assert [int(os.environ[name]) for name in names] == [ddp.rank, 2, ddp.rank, 2]
    assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


# ---------------------------------------------------------------- who is missing?
def test_the_ranks_that_do_not_come_to_a_meeting_are_named_to_those_that_do(tmp_path):
    done = run(4, """
with setup_ddp(quiet=True) as ddp:
    if ddp.rank in (1, 3):
        print(wait_for_ranks(ddp, 1.0), flush=True)
    all_sum(1, ddp)
    if ddp.rank in (0, 2):    # they come late
        assert wait_for_ranks(ddp, 60.0) == []
    assert wait_for_ranks(ddp, 60.0) == []
""", tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0, 2]\n" * 2), done.text


LATE = """
with setup_ddp(quiet=True, timeout={timeout}) as ddp:
    barrier(ddp, timeout=60.0)
    if ddp.rank == 1:
        try:
            barrier(ddp{limit})
        except RuntimeError as error:
            print(error, flush=True)
        ddp.store.set("given_up", "")
    else:
        ddp.store.wait(["given_up"], timedelta(seconds=60))
        barrier(ddp)
"""


def test_a_barrier_names_the_ranks_that_do_not_come(tmp_path):
    done = run(3, LATE.format(timeout=None, limit=", timeout=1.0"), tmp_path)
    said = "rank(s) 0, 2 of 3 did not come to a barrier within 1 s; expected all\n"
    assert (done.returncode, done.stdout) == (0, said), done.text


def test_a_barrier_has_the_limit_that_the_ranks_were_set_up_with(tmp_path):
    done = run(2, LATE.format(timeout=2.0, limit=""), tmp_path)
    assert "did not come to a barrier within 2 s" in done.stdout, done.text


def test_the_store_does_not_grow_with_the_barriers(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    for _ in range(3):
        barrier(ddp)
    before = ddp.store.num_keys()
    for _ in range(50):
        barrier(ddp)
    assert ddp.store.num_keys() < before + 10
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


@pytest.mark.parametrize("waiting", [0, 1])
def test_while_a_rank_waits_in_a_barrier_the_store_of_its_group_answers(waiting, tmp_path):
    """As for NCCL's watchdog, which tells the other ranks there why one fails."""
    done = run(2, f"""
make_group = torch.distributed.init_process_group
def make_noted_group(*values, store, **options):
    global group_store
    group_store = store
    make_group(*values, store=store, **options)
torch.distributed.init_process_group = make_noted_group

with setup_ddp(quiet=True) as ddp:
    if ddp.rank == {waiting}:
        waiter = threading.Thread(target=barrier, args=(ddp, 60.0))
        waiter.start()
        time.sleep(0.5)    # it waits
        group_store.set("told", "")
        waiter.join()
    else:
        group_store.wait(["told"], timedelta(seconds=20))
        barrier(ddp)
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_who_does_not_come_to_cleanup_ddp_is_named(tmp_path):
    done = run(2, """
ddp = setup_ddp(quiet=True)
if ddp.rank == 1:
    time.sleep(600)
cleanup_ddp(ddp, timeout=1.0)
""", tmp_path)
    said = (f"[rank 0 of 2 on {HOST}] rank(s) 1 of 2 did not come to cleanup_ddp within 1 s; "
            "expected all")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said, done.text


# ---------------------------------------------------------------- the start
@pytest.mark.parametrize("device, said", [
    ("cuda", "error: asked for device cuda, backend auto: no cuda device is visible"),
    ("cpu' if os.environ['RANK'] == '0' else 'cuda",
     f"error: rank 1, 2 on {HOST}: asked for device cuda")])
def test_a_start_that_cannot_be_is_refused_once_with_code_2(device, said, tmp_path):
    done = run(3, f"""
try:
    setup_ddp('{device}', init_timeout=60.0)
except SetupError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(error.code)
""", tmp_path)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.text
    assert said in done.stderr and done.stdout == "", done.text


def test_ranks_that_do_not_appear_are_named(tmp_path):
    done = run(4, """
if os.environ["RANK"] in "13":
    time.sleep(600)
setup_ddp(quiet=True, init_timeout=2.0)
""", tmp_path)
    assert done.returncode == 1, done.text
    assert (f"2 of 4 ranks did not appear within 2 s: rank(s) 1, 3. The others are on {HOST}. "
            in done.stderr.splitlines()[-1]), done.text


@pytest.mark.parametrize("env, said", [
    ({}, r"rank 0 cannot be reached at 127.0.0.1:\d+ within 1 s .* Did it start\?"),
    ({"DDP_LOCAL_RANK": 2}, "says rank 1, local rank 2 of 2; expected 0 to 1")])
def test_a_rank_that_cannot_start_says_why_though_rank_0_says_nothing(env, said, tmp_path):
    with two_ranks("setup_ddp(init_timeout=1.0)\n", tmp_path, [1], **env) as ranks:
        assert ranks.codes(120) == [1]
        assert re.search(f"SetupError: .*{said}", ranks.err()), ranks.err()


def test_ranks_meet_where_only_the_host_of_rank_0_knows_the_number_of_the_job(tmp_path):
    """mpirun starts the ranks of other hosts by ssh, which does not pass PBS_JOBID on."""
    done = run(2, """
if os.environ["RANK"] == "0":
    os.environ["PBS_JOBID"] = "7.server"
with setup_ddp(quiet=True, init_timeout=10.0) as ddp:
    print(all_sum(1, ddp), flush=True)
""", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    assert (done.returncode, done.stdout) == (0, "2.0\n" * 2), done.text


def test_ranks_of_two_members_of_a_job_array_do_not_meet_at_one_port(tmp_path):
    here = {"PMI_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "DDP_GUARD": 0,
            "DDP_MPI4PY": 0}
    members = {rank: {**here, "PMI_RANK": rank, "MPI_LOCALRANKID": rank,
                      "PBS_JOBID": f"12[{rank}].server"} for rank in range(2)}
    path = script(tmp_path, "with setup_ddp(quiet=True, init_timeout=2.0):\n    pass\n")
    with ForkedRanks([path], tmp_path, members) as ranks:
        assert 0 not in ranks.codes(100, GRACE), ranks.err()


@pytest.mark.parametrize("indent", ["    ", ""], ids=["inside", "afterwards"])
def test_several_ranks_that_would_meet_again_are_told_so_at_once(indent, tmp_path):
    done = run(2, f"""
with setup_ddp(quiet=True):
    pass
{indent}try:
{indent}    setup_ddp()
{indent}except SetupError as error:
{indent}    print(error, flush=True)
""", tmp_path)
    said = "setup_ddp was called a second time. Several ranks can meet once in a process"
    assert (done.returncode, done.stdout.count(said)) == (0, 2), done.text


def test_beside_a_group_of_another_library_no_ranks_are_set_up_and_it_stays(tmp_path):
    done = run(1, """
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
try:
    setup_ddp()
except SetupError as error:
    print(error)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
""", tmp_path)
    assert done.returncode == 0 and "has a process group already" in done.stdout, done.text


STEP_OF_ONE_TASK = {"SLURM_JOB_ID": 77, "SLURM_STEP_ID": 4294967290, "SLURM_PROCID": 0,
                    "SLURM_LOCALID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1}
TELL_THE_GUARD = """
pipe = int(os.environ["DDP_GUARD_FD"].partition(":")[0])
os.write(pipe, b'{"slurm_step": "77.0", "rank": 1, "size": 2}' + bytes([10]))
"""


@pytest.mark.parametrize("text, cancelled", [
    ("with setup_ddp(quiet=True) as ddp, watch_run(ddp):\n    sys.exit(1)", False),   # salloc's
    (TELL_THE_GUARD + "sys.exit(1)", True),
    (TELL_THE_GUARD + "os.kill(os.getppid(), 15)\ntime.sleep(60)", False)])
def test_the_guard_of_one_of_several_ranks_cancels_their_step_unless_slurm_does(
        text, cancelled, tmp_path):
    (tmp_path / "scancel").write_text("#!/bin/sh\ntouch was_called\n")
    (tmp_path / "scancel").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    fork_ranks(1, [script(tmp_path, text)], tmp_path,
               {"DDP_GUARD": 1, "PATH": path, **STEP_OF_ONE_TASK})
    assert (tmp_path / "was_called").exists() == cancelled


# ---------------------------------------------------------------- checkpoints
def test_all_ranks_go_back_to_the_former_checkpoint_where_the_newest_is_damaged(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    for step in 1, 2:
        save_checkpoint("last.pt", ddp, keep_last=2, step=step, weight=torch.arange(100.0))
    assert load_checkpoint("last.pt", ddp)["step"] == 2
    barrier(ddp)
    if ddp.is_main:
        os.truncate("last.pt", 500)
    barrier(ddp)
    assert newest_checkpoint("last.pt", ddp) == "last-1.pt"
    state = load_checkpoint("last.pt", ddp)
    assert state["step"] == 1 and state["weight"].tolist() == list(range(100))
    if ddp.is_main:
        os.unlink("last-1.pt")
    barrier(ddp)
    try:
        load_checkpoint("last.pt", ddp)
    except ValueError as error:
        print("refused", flush=True)
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text
    assert done.stdout.count("it is damaged") + done.stdout.count("BadZipFile") == 1, done.text
    assert done.stdout.count("refused") == 2, done.text


def test_ranks_that_have_the_file_read_it_themselves(tmp_path):
    done = run(2, """
send = torch.distributed.broadcast_object_list
sent = []
def note_and_send(values, *more, **options):
    send(values, *more, **options)
    sent.append(len(pickle.dumps(values)))
torch.distributed.broadcast_object_list = note_and_send

with setup_ddp(quiet=True) as ddp:
    save_checkpoint("last.pt", ddp, weight=torch.arange(100_000.0))
    assert load_checkpoint("last.pt", ddp)["weight"].tolist() == list(range(100_000))
    assert max(sent) < 10_000, sent
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


ELSEWHERE = """
with setup_ddp(quiet=True) as ddp:
    save_checkpoint("last.pt", ddp, weight=torch.arange(100.0))
    os.makedirs("elsewhere", exist_ok=True)
    if ddp.rank == 1:    # on another host, say
        os.chdir("elsewhere")
        {own}
"""


@pytest.mark.parametrize("own", ["", "save_checkpoint('last.pt', Ddp(), weight=torch.zeros(100))"])
def test_a_rank_without_the_file_of_rank_0_gets_what_that_holds(own, tmp_path):
    done = run(2, ELSEWHERE.format(own=own) + """
    assert load_checkpoint("last.pt", ddp)["weight"].tolist() == list(range(100))
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_a_copy_that_is_damaged_on_one_rank_is_refused_on_all(tmp_path):
    own = """
        with open("../last.pt", "rb") as file:
            data = file.read()
        weight = torch.arange(100.0).numpy().tobytes()
        with open("last.pt", "wb") as file:
            file.write(data.replace(weight, bytes(len(weight))))
"""
    done = run(2, ELSEWHERE.format(own=own) + """
    try:
        load_checkpoint("last.pt", ddp)
    except ValueError as error:
        print(error, flush=True)
""", tmp_path)
    assert done.stdout.count("it is damaged, the checksum of its record") == 2, done.text


# ---------------------------------------------------------------- one fails, all end
@pytest.mark.parametrize("end, said", [
    ("with ddp: raise ValueError('on purpose')", "Traceback (most recent call last):"),
    ("raise ValueError('on purpose')", "Traceback (most recent call last):"),
    ("with ddp: sys.exit(1)", "left with exit code 1"),
    ("with ddp: sys.exit('no data')", "no data"), ("abort(ddp, 'no room')", "no room")])
def test_a_rank_that_fails_is_the_one_that_speaks_and_not_those_that_lose_it(end, said, tmp_path):
    done = run(3, f"""
ddp = setup_ddp(quiet=True)
if ddp.rank == 1:
    {end}
all_sum(1.0, ddp)
""", tmp_path)
    assert done.returncode == 1 and done.stderr.count("[rank ") == 1, done.text
    assert f"\n[rank 1 of 3 on {HOST}] {said}\n" in done.stderr, done.text
    assert done.stderr.count("ValueError: on purpose\n") == own_tracebacks(done.stderr), done.text


@pytest.mark.parametrize("end, code", [
    ("abort(ddp, 'no such file', 2)", 2), ("with ddp: sys.exit(5)", 5),
    ("with ddp: raise KeyboardInterrupt", 130)])
def test_an_end_that_has_a_code_keeps_it(end, code, tmp_path):
    with two_ranks(f"ddp = setup_ddp(quiet=True)\n{end}\n", tmp_path) as ranks:
        assert ranks.codes() == [code, code], ranks.err()


@pytest.mark.parametrize("env, watch", [
    ({}, ""), ({"DDP_GUARD": 1}, ", watch_run(ddp, 'run')")], ids=["core", "watched"])
def test_a_rank_says_why_it_fails_though_rank_0_is_frozen(env, watch, tmp_path):
    """As with a host that died, or whose cable was cut."""
    with two_ranks(f"""
with setup_ddp(quiet=True) as ddp{watch}:
    frozen = gather(os.getpid(), ddp)[0]
    if ddp.is_main:
        os.kill(frozen, signal.SIGSTOP)
    while ") T " not in open(f"/proc/{{frozen}}/stat").read():
        time.sleep(0.01)
    raise ValueError("the real cause")
""", tmp_path, **env) as ranks:
        assert ranks.codes(60, GRACE)[1] == 1, ranks.err()
        assert "ValueError: the real cause" in ranks.err(1), ranks.err()


def test_ranks_that_lose_another_one_give_it_time_to_speak_first(tmp_path):
    with two_ranks("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)    # of a launcher that needs some time
with setup_ddp(quiet=True) as ddp:
    if ddp.rank == 1:
        raise ValueError("on purpose")
    all_sum(1.0, ddp)
""", tmp_path) as ranks:
        assert ranks.codes(grace=0.5) == [-signal.SIGKILL, 1]
        assert "ValueError: on purpose" in ranks.err(1) and ranks.err(0) == ""


def test_where_only_the_loss_of_a_rank_is_known_that_is_told(tmp_path):
    """The rank was killed, and has no guard to say so."""
    with two_ranks("""
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 1:
        os.kill(os.getpid(), 9)
    all_sum(1.0, ddp)
""", tmp_path) as ranks:
        assert ranks.codes() == [1, -signal.SIGKILL]
        said = rf"(?s)\[rank 0 of 2 on {HOST}\] Traceback .*\nRuntimeError: "
        assert re.search(said, ranks.err()), ranks.err()


def test_a_forked_child_of_a_rank_ends_without_a_word(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    for code in (0, 3):
        child = os.fork()
        if child == 0:
            sys.exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    barrier(ddp)
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


@pytest.mark.parametrize("fails, cancelled", [(True, "77.0\n"), (False, "")])
def test_slurm_is_asked_to_end_the_step_of_ranks_of_which_one_fails(fails, cancelled, tmp_path):
    """srun goes on for an exit code. A program of this name stands for Slurm's."""
    (tmp_path / "scancel").write_text("#!/bin/sh\necho $* >> cancelled\n")
    (tmp_path / "scancel").chmod(0o755)
    step = {"SLURM_JOB_ID": 77, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_NUM_NODES": 1, "DDP_GUARD": 0,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "MASTER_PORT": free_port()}
    path = script(tmp_path, f"""
with setup_ddp(quiet=True) as ddp:
    if ddp.rank == 1 and {fails}:
        raise ValueError("on purpose")
""")
    tasks = {rank: {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(2)}
    with ForkedRanks([path], tmp_path, tasks) as ranks:
        assert ranks.codes(grace=GRACE)[1] == fails, ranks.err()
    calls = tmp_path / "cancelled"
    assert (calls.read_text() if calls.exists() else "") == cancelled


# ---------------------------------------------------------------- one process
def test_an_exception_that_leaves_the_block_of_one_process_can_be_caught(tmp_path):
    done = run(1, """
try:
    with setup_ddp(quiet=True):
        raise ValueError("of a trial")
except ValueError as error:
    print(f"caught {error}")
""", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught of a trial\n", ""), done.text


def test_after_an_exception_of_one_process_all_that_is_to_run_at_its_end_does(tmp_path):
    done = run(1, """
import atexit
atexit.register(print, "at exit")
try:
    with setup_ddp(quiet=True):
        raise ValueError("of a trial")
finally:
    print("finally")
""", tmp_path)
    assert (done.returncode, done.stdout) == (1, "finally\nat exit\n"), done.text
    assert own_tracebacks(done.stderr) == 1, done.text


def test_one_process_may_end_without_cleanup(tmp_path):
    done = run(1, """
ddp = setup_ddp(quiet=True)
print(all_sum(1, ddp))
""", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", ""), done.text
