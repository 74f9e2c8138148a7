"""Do several ranks meet, agree, save, load and end together, and are those that lack named?

The ranks are forked, without a launcher: see test_ddp_launch.py for those."""
import os
import signal
import socket
import subprocess
import sys

import pytest

from launchers import (GRACE, ROOT, ForkedRanks, clean_environment, fork_ranks, free_port,
                       own_tracebacks, read_status)

HEAD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from ddp_setup import *
"""
HOST = socket.gethostname()


def script(folder, text):
    (folder / "script.py").write_text(HEAD + text)
    return folder / "script.py"


def run(ranks, text, folder, **env):
    return fork_ranks(ranks, [script(folder, text)], folder, env)


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
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_ranks_know_their_hosts_and_tell_other_libraries_their_place(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    assert ddp.hosts == (ddp.host, ddp.host) and ddp.on_one_host and ddp.node_rank == 0
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
        print(missing_ranks(ddp, "half", 1.0), flush=True)
    barrier(ddp)
    assert missing_ranks(ddp, "half, later", 60.0) == []
""", tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0, 2]\n" * 2), done.text


def test_a_barrier_names_the_ranks_that_do_not_come(tmp_path):
    done = run(3, """
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 1:
        try:
            barrier(ddp, timeout=1.0)
        except RuntimeError as error:
            print(error, flush=True)
""", tmp_path)
    said = "rank(s) 0, 2 of 3 did not come to a barrier within 1 s; expected all\n"
    assert (done.returncode, done.stdout) == (0, said), done.text


def test_a_barrier_has_the_limit_that_the_ranks_were_set_up_with(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True, timeout=1.5) as ddp:
    if ddp.is_main:
        try:
            barrier(ddp)
        except RuntimeError as error:
            print(error, flush=True)
    missing_ranks(ddp, "the end", 60.0)
""", tmp_path)
    assert "did not come to a barrier within 2 s" in done.stdout, done.text


@pytest.mark.parametrize("end", ["", "end_watch(ddp, 0, 'done')"])
def test_who_does_not_come_to_the_end_within_the_limit_of_the_watch_is_named(end, tmp_path):
    done = run(2, f"""
ddp = setup_ddp(quiet=True)
start_watch(ddp, "run", minutes=4 / 60)
if ddp.rank == 1:
    start_watch(ddp, minutes=0)
{end}
if ddp.rank == 1:
    time.sleep(600)
cleanup_ddp(ddp)
""", tmp_path)
    said = f"FAILED: rank 0 of 2 on {HOST}: rank(s) 1 did not come to cleanup_ddp within 4 s."
    assert done.returncode == 70 and done.stderr.splitlines()[-1].startswith(said), done.text
    assert read_status(tmp_path / "run")["code"] == (0 if end else 70)


# ---------------------------------------------------------------- the start
@pytest.mark.parametrize("device, said", [
    ("cuda", "error: --device cuda, --backend auto: no cuda device is visible"),
    ("cpu' if os.environ['RANK'] == '0' else 'cuda", f"error: rank 1, 2 on {HOST}: --device cuda")])
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


def test_several_ranks_that_would_meet_again_are_told_so_at_once(tmp_path):
    done = run(2, """
cleanup_ddp(setup_ddp(quiet=True))
try:
    setup_ddp()
except SetupError as error:
    print(error, flush=True)
""", tmp_path)
    assert done.returncode == 0 and done.stdout.count("called after cleanup_ddp") == 2, done.text


STEP_OF_ONE_TASK = {"SLURM_JOB_ID": 77, "SLURM_STEP_ID": 4294967290, "SLURM_PROCID": 0,
                    "SLURM_LOCALID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1}
TELL_THE_GUARD = """
pipe = int(os.environ["DDP_GUARD_FD"].partition(":")[0])
os.write(pipe, b'{"slurm_step": "77.0", "rank": 1, "size": 2}' + bytes([10]))
"""


@pytest.mark.parametrize("text, cancelled", [
    ("setup_ddp(quiet=True)\nsys.exit(1)", False),    # in the shell of salloc
    (TELL_THE_GUARD + "sys.exit(1)", True),
    (TELL_THE_GUARD + "os.kill(os.getppid(), 15)\ntime.sleep(60)", False)])
def test_the_guard_of_one_of_several_ranks_cancels_their_step_unless_slurm_does(
        text, cancelled, tmp_path):
    (tmp_path / "scancel").write_text("#!/bin/sh\ntouch was_called\n")
    (tmp_path / "scancel").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = clean_environment(env={"PATH": path, "PYTHONPATH": ROOT, **STEP_OF_ONE_TASK})
    subprocess.run([sys.executable, "-m", "ddp_guard", script(tmp_path, text)], cwd=tmp_path,
                   env=env, timeout=600)
    assert (tmp_path / "was_called").exists() == cancelled


# ---------------------------------------------------------------- checkpoints
def test_a_checkpoint_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    try:
        save_checkpoint("script.py/under/a/file.pt", ddp, step=1)
    except RuntimeError as error:
        print(error, flush=True)
""", tmp_path)
    assert done.stdout.count("cannot write script.py/under/a/file.pt: ") == 2, done.text


def test_all_ranks_load_what_rank_0_reads_and_go_back_where_it_is_damaged(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    for step in 1, 2:
        save_checkpoint("last.pt", ddp, keep_last=2, step=step, weight=torch.arange(100.0))
    assert load_checkpoint("last.pt", ddp)["step"] == 2
    barrier(ddp)
    if ddp.is_main:
        with open("last.pt", "r+b") as file:
            file.truncate(500)
    barrier(ddp)
    state = load_checkpoint("last.pt", ddp)
    assert state["step"] == 1 and state["weight"].tolist() == list(range(100))
    assert (ddp.state.checkpoint, ddp.state.step) == ("last-1.pt", 1)
    if ddp.is_main:
        os.unlink("last-1.pt")
    barrier(ddp)
    try:
        load_checkpoint("last.pt", ddp)
    except ValueError as error:
        print("refused", flush=True)
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text
    assert done.stdout.count("Going back to last-1.pt") == 1 and done.stdout.count("refused") == 2


# ---------------------------------------------------------------- one fails, all end
def test_a_rank_that_fails_is_the_one_that_speaks_and_not_those_that_lose_it(tmp_path):
    done = run(3, """
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp, "run")
    stop_reason(ddp, 3)
    if ddp.rank == 1:
        raise ValueError("on purpose")
    all_sum(1.0, ddp)
""", tmp_path)
    assert done.returncode == 1 and done.stderr.count("FAILED: ") == 1, done.text
    last = f"FAILED: rank 1 of 3 on {HOST}: ValueError: on purpose. No checkpoint yet."
    assert done.stderr.splitlines()[-1] == last and own_tracebacks(done.stderr) == 1, done.text
    assert read_status(tmp_path / "run") == {
        "code": 1, "reason": f"rank 1 of 3 on {HOST}: ValueError: on purpose", "step": 3}


@pytest.mark.parametrize("end", ["raise NoBug('the same on all')", "abort(ddp, 'the same on all')"])
def test_an_error_of_all_ranks_is_told_once(end, tmp_path):
    done = run(3, f"""
class NoBug(RuntimeError):
    expected = True
with setup_ddp(quiet=True) as ddp:
    {end}
""", tmp_path)
    assert done.returncode == 1 and done.stderr.count("the same on all") == 1, done.text
    assert done.stderr.splitlines()[-1] == f"FAILED: rank 0 of 3 on {HOST}: the same on all."


def test_where_only_the_loss_of_a_rank_is_known_that_is_told(tmp_path):
    """The rank was killed, and has no guard to say so."""
    script(tmp_path, """
with setup_ddp(quiet=True) as ddp:
    barrier(ddp)
    if ddp.rank == 1:
        os.kill(os.getpid(), 9)
    all_sum(1.0, ddp)
""")
    here = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "DDP_GUARD": 0, "DDP_MPI4PY": 0}
    with ForkedRanks(["script.py"], tmp_path, {
            rank: {**here, "RANK": rank, "LOCAL_RANK": rank} for rank in range(2)}) as ranks:
        assert ranks.codes() == [1, -signal.SIGKILL]
        last = ranks.err().splitlines()[-1]
    assert last.startswith(f"FAILED: rank 0 of 2 on {HOST}: RuntimeError: "), last


@pytest.mark.parametrize("folder", ["None", "'run'"])
def test_an_error_after_the_launchers_sigterm_is_no_news_where_another_rank_has_spoken(
        folder, tmp_path):
    done = run(2, f"""
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp, {folder})
    if ddp.rank == 1 and {folder}:
        with open("run/status.json", "w") as file:    # as its guard does
            file.write('{{"code": 1, "reason": "died without a word", "step": 3}}')
    barrier(ddp)
    if ddp.rank == 1:
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("connection closed by peer")
""", tmp_path)
    assert done.returncode == 1 and "FAILED" not in done.stderr, done.text


def test_an_error_after_sigterm_is_told_where_no_rank_has_spoken(tmp_path):
    done = run(1, """
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp, "run")
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("no such thing")
""", tmp_path)
    assert done.returncode == 1 and "RuntimeError: no such thing" in done.stderr, done.text
    assert read_status(tmp_path / "run")["code"] == 1


def test_a_rank_that_leaves_without_cleanup_is_told(tmp_path):
    done = run(2, """
ddp = setup_ddp(quiet=True)
if ddp.rank == 0:
    cleanup_ddp(ddp)
""", tmp_path)
    said = f"FAILED: rank 1 of 2 on {HOST}: ended without cleanup_ddp. Call it at the end, or use"
    assert done.returncode == 1 and said in done.stderr, done.text


def test_a_forked_child_of_a_rank_ends_without_a_word(tmp_path):
    done = run(2, """
with setup_ddp(quiet=True) as ddp:
    start_watch(ddp)
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
""", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text
