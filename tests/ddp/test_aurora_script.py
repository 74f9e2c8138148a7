"""Does test_aurora_ddp.py pass where all is well, in a folder of two files too, and can each of its
claims fail?

Faults are made on one rank of two, by a driver script that starts it."""
import re
import shutil
import socket

import pytest

from launchers import ROOT, fork_ranks, free_port, run_ranks, slow

HOST = socket.gethostname()
CLAIMS = ["set-up", "device", "all-reduce", "gradients", "training", "ipex", "checkpoint",
          "clean-up"]
LIMIT = "5"             # seconds for which ranks wait: short, as a fault lasts longer than any
IN_TIME = 300.0         # seconds in which a hang is noticed; some 10 where nothing else runs
DRIVER = """import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import test_aurora_ddp as script
rank = int(os.environ.get("RANK", 0))
if rank == {faulty_rank}:
    {fault}
script.main()
"""


def check(tmp_path, *options, fault="pass", faulty_rank=1, n=2):
    """Run the script on forked ranks of the CPU. fault: Python text that is executed beforehand on
    one rank, or with faulty_rank "rank" on all."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER.format(root=str(ROOT), fault=fault, faulty_rank=faulty_rank))
    return fork_ranks(n, [path, "--device", "cpu", *options], tmp_path)


def lines_of(result):
    """{name of the claim: (status, words)} as printed, each once."""
    found = re.findall(r"^(PASS|FAIL|SKIP)  (\S+) +(.*)$", result.stdout, re.M)
    assert len({name for _, name, _ in found}) == len(found), result.text
    return {name: (status, words) for status, name, words in found}


def failed(result):
    return [name for name, (status, _) in lines_of(result).items() if status == "FAIL"]


@pytest.mark.parametrize("launcher, n", [("python", 1), ("torchrun", 2), slow("mpich", 2),
                                         slow("openmpi", 2), slow("srun", 2)])
def test_it_runs_in_a_folder_of_two_files(launcher, n, request, tmp_path):
    if launcher == "srun":
        request.getfixturevalue("slurm")
    for name in ("test_aurora_ddp.py", "ddp_setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    result = run_ranks(launcher, n, [tmp_path / "test_aurora_ddp.py", "--device=cpu"], tmp_path)
    assert result.returncode == 0 and result.leftover == [], result.text
    assert list(lines_of(result)) == CLAIMS and failed(result) == [], result.text
    assert {path.name for path in tmp_path.iterdir()} <= {
        "test_aurora_ddp.py", "ddp_setup.py", "__pycache__"}


def test_what_one_rank_cannot_check_is_skipped_with_the_reason(tmp_path):
    result = check(tmp_path, "--ipex=off", n=1)
    assert result.returncode == 0, result.text
    lines = lines_of(result).items()
    assert {name: words for name, (status, words) in lines if status == "SKIP"} == {
        "all-reduce": "one rank: nothing to sum over", "ipex": "--ipex off"}


# On rank 1 alone.
OTHER_PRODUCT = """matmul = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda a, b: matmul(a, b) + (a.dtype == torch.float32)"""
OTHER_SUM = """all_sum = script.all_sum
    script.all_sum = lambda *a: all_sum(*a).index_fill_(0, torch.tensor([5]), 1.0)"""
OTHER_DATA = """items_of = script.items_of
    script.items_of = lambda ranks: items_of([*ranks, 7] if len(ranks) > 1 else ranks)"""
OTHER_RATE = """AdamW = torch.optim.AdamW
    torch.optim.AdamW = lambda parameters, lr: AdamW(parameters, lr=2 * lr)"""
OTHER_FILE = """load = script.load_checkpoint
    def load_checkpoint(*a):
        state = load(*a)
        state["model"]["0.bias"].add_(1)
        return state
    script.load_checkpoint = load_checkpoint"""
STAYS = "script.dist = type('', (), {'is_initialized': lambda: True})"


@pytest.mark.parametrize("fault, name, words", [
    (OTHER_PRODUCT, "device", "has 262144 wrong elements of 262144 in a product of matrices"),
    (OTHER_SUM, "all-reduce", "has 1 wrong elements of 262144 in a sum"),
    (OTHER_DATA, "gradients", "off that of one process"),
    (OTHER_RATE, "training", "has other weights than rank 0 after 20 steps"),
    (OTHER_FILE, "checkpoint", "has loaded another model than was saved"),
    (STAYS, "clean-up", "still has a process group")])
def test_a_claim_that_is_false_on_one_rank_fails_and_names_it(fault, name, words, tmp_path):
    result = check(tmp_path, fault=fault)
    assert result.returncode == 3, result.text
    first, *more = re.findall(r"^FAIL  (\S+) +(.*)$", result.stdout, re.M)
    assert first[0] == name and words in first[1], result.text
    for _, text in (first, *more):     # weights that differ are in the checkpoint too
        assert re.findall(r"rank \d+ on \S+", text) == [f"rank 1 on {HOST}"], result.text
    assert "Traceback" not in result.text, result.text


def test_ranks_that_train_alone_fail(tmp_path):
    result = check(tmp_path, fault="script.wrap_ddp = lambda model, *a, **more: model",
                   faulty_rank="rank")
    assert result.returncode == 3, result.text
    assert failed(result) == ["gradients", "training", "checkpoint"], result.text


def test_two_ranks_in_one_place_fail(tmp_path):
    fault = """import dataclasses
    setup = script.setup_ddp
    script.setup_ddp = lambda *a, **more: dataclasses.replace(setup(*a, **more), local_rank=0)"""
    result = check(tmp_path, fault=fault)
    assert result.returncode == 3 and failed(result) == ["set-up"], result.text
    assert "has local rank 0, as have the ranks [0, 1]" in lines_of(result)["set-up"][1]


def test_ipex_that_is_asked_for_and_missing_fails(tmp_path):
    result = check(tmp_path, "--ipex", "on")
    assert result.returncode == 3 and failed(result) == ["ipex"], result.text


def test_an_error_on_one_rank_ends_all_with_code_3(tmp_path):
    result = check(tmp_path, fault="script.items_of = lambda ranks: ranks.nothing")
    assert result.returncode == 3, result.text
    assert "FAIL  gradients, by an error on this rank" in result.stderr, result.text
    assert result.stderr.count("AttributeError: ") == 1, result.text


def test_a_rank_that_is_stopped_does_not_hold_up_the_others_for_ever(tmp_path):
    fault = "script.items_of = lambda ranks: os.kill(os.getpid(), signal.SIGSTOP)"
    result = check(tmp_path, "--timeout", LIMIT, fault=fault)
    assert result.returncode == 3 and "FAIL  gradients" in result.stderr, result.text
    assert result.seconds < IN_TIME, result.text


def test_a_rank_that_is_stuck_ends_and_shows_where(tmp_path):
    result = check(tmp_path, "--timeout", "1", n=1, faulty_rank="rank",
                   fault="script.items_of = lambda ranks: time.sleep(1000)")
    assert result.returncode == 1 and "in gradients" in result.stderr, result.text


def test_a_rank_that_was_never_started_is_named(tmp_path):
    env = {"DDP_RANK": 0, "DDP_WORLD_SIZE": 2, "DDP_LOCAL_RANK": 0, "DDP_LOCAL_WORLD_SIZE": 2,
           "MASTER_PORT": free_port()}
    argv = [ROOT / "test_aurora_ddp.py", "--device", "cpu", "--init_timeout", "1"]
    result = fork_ranks(1, argv, tmp_path, env)
    assert result.returncode == 3 and "rank(s) 1" in lines_of(result)["set-up"][1], result.text


def test_a_wrong_argument_ends_with_2_and_is_named(tmp_path):
    result = check(tmp_path, "--preflight")
    assert result.returncode == 2 and "--preflight" in result.stderr, result.text
    assert result.stdout == "", result.text
