"""Do the checks of jobs/preflight.py pass where all is well, and do they name the host at fault?

Faults are made on one rank of two, by a driver script that starts jobs/preflight.py."""
import re
import socket

import pytest

import launchers
from launchers import FOLDERS, ROOT, copy_code, fork_ranks, free_port, run_ranks, slow

HOST = socket.gethostname()
MODULES = {*FOLDERS, *(path.stem for path in ROOT.glob("*.py"))}
CHECKS = ["place", "versions", "matmul", "all-reduce", "folder"]
GUARDED = {"DDP_GUARD": 1}    # forked ranks are not, unless asked to
HANG = 1000             # seconds of a fault that hangs: more than any limit
IN_TIME = 300.0         # seconds in which a hang is noticed; some 10 where nothing else runs
LIMIT = 5               # seconds of a check: short, as a fault lasts longer than any
STOP = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
DRIVER = """import os, sys, time
HANG = {hang}
rank = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
folder = {folder!r} if rank == 1 else {root!r}
sys.path[:0] = [folder + "/jobs", folder]
for name, module in list(sys.modules.items()):      # a forked rank has those of the root
    if name.partition(".")[0] in {modules!r}:
        del sys.modules[name]
import ddp_guard
ddp_guard.supervise()
import platform, torch, preflight
import torch.distributed as dist
preflight.LARGE = 1 << 22      # quick on a busy machine too
preflight.ALL_ROWS = 2.0
if rank == {faulty_rank}:
    {fault}
preflight.main()
"""


def check(tmp_path, *options, fault=None, faulty_rank=1, launcher=None, n=2, folder=ROOT, env=None):
    """Run the pre-flight in `tmp_path`.

    fault: Python text that is executed beforehand on one rank, or with faulty_rank "rank" on all;
    folder: rank 1's project files."""
    path = ROOT / "jobs" / "preflight.py"
    if fault is not None:
        path = tmp_path / "driver.py"
        path.write_text(DRIVER.format(folder=str(folder), root=str(ROOT), fault=fault,
                                      modules=MODULES, faulty_rank=faulty_rank, hang=HANG))
    # A small share: of two ranks on a busy machine, one may run much slower than the other.
    argv = [path, "--device", "cpu", "--slow", "0.02", "--suspects", "bad_hosts",
            *map(str, options)]
    if launcher is None:
        return fork_ranks(n, argv, tmp_path, env)
    return run_ranks(launcher, n, argv, cwd=tmp_path, env=env)


def lines_of(result):
    """{name of the check: (status, text)} as printed"""
    found = re.findall(r"^(PASS|FAIL|SKIP)  (\S+) +(.*(?:\n {18}.*)*)$", result.stdout, re.M)
    assert len({name for _, name, _ in found}) == len(found), result.text
    return {name: (status, re.sub("\n +", " ", text)) for status, name, text in found}


def assert_found(result, tmp_path, **expected):
    """Exactly the checks `expected` failed, each naming rank 1 alone, with these words. The host is
    suspected in both forms, and all have ended."""
    assert result.returncode == 3, result.text
    lines = lines_of(result)
    assert [name for name, (status, _) in lines.items() if status == "FAIL"] == list(expected)
    for name, words in expected.items():
        text = lines[name][1]
        assert set(re.findall(r"rank \d+ on \S+", text)) == {f"rank 1 on {HOST}"}, result.text
        assert words in text, result.text
    assert result.stdout.splitlines()[-1] == f"suspect hosts: {HOST}", result.text
    assert (tmp_path / "bad_hosts").read_text() == f"{HOST}\n"
    # Job scripts take a line `FAILED: rank R of N on HOST` for a host at fault: rank 0's is not.
    assert "Traceback" not in result.text and "FAILED" not in result.text, result.text


@pytest.fixture(scope="module", params=[None, slow("mpich"), slow("openmpi")])
def healthy(request, tmp_path_factory):
    """(folder, Result) of all checks on two ranks."""
    folder = tmp_path_factory.mktemp("healthy")
    (folder / "bad_hosts").write_text("of-a-former-run\n")
    return folder, check(folder, "--work_dir", "runs", launcher=request.param, env=GUARDED)


def test_two_healthy_ranks_pass(healthy):
    _, result = healthy
    assert result.returncode == 0 and result.stderr == "", result.text
    assert {name: status for name, (status, _) in lines_of(result).items()} == dict.fromkeys(
        CHECKS, "PASS"), result.text
    assert "suspect" not in result.stdout


def test_two_healthy_ranks_leave_nothing_but_an_empty_list_of_suspects(healthy):
    folder, result = healthy
    assert result.leftover == []
    assert [p.name for p in folder.iterdir()] == ["bad_hosts"]    # the run folder is as it was
    assert (folder / "bad_hosts").read_text() == ""


def test_a_table_at_the_end_says_where_the_ranks_run(healthy):
    _, result = healthy
    table = result.stdout.partition("\nrank  host")[2]
    assert re.search(rf"^ +1  {re.escape(HOST)} +1  cpu +\d+ ", table, re.M), result.text
    assert table.splitlines()[-1] == "5 passed, 0 failed, 0 skipped"


def test_what_is_printed_fits_80_columns(healthy):
    _, result = healthy
    assert max(map(len, result.stdout.partition("PASS")[2].splitlines())) <= 80, result.text


def test_the_bandwidth_is_that_of_a_ring(healthy):
    _, result = healthy
    mib, ms, rate = re.search(r"; (\d+) MiB in ([\d.]+) ms, ([\d.]+) GB/s over each link",
                              lines_of(result)["all-reduce"][1]).groups()
    # Each of two ranks sends the size once.
    assert float(rate) == pytest.approx(int(mib) * 2**20 / (float(ms) / 1e3) / 1e9, rel=1e-2)


def test_one_rank_skips_what_needs_two_and_says_why(tmp_path):
    result = check(tmp_path, n=1)
    assert result.returncode == 0, result.text
    lines = lines_of(result).items()
    assert {name: text for name, (status, text) in lines if status == "SKIP"} == {
        "all-reduce": "one rank: nothing to sum over", "folder": "no --work_dir given"}


# ------------------------------------------------------------------ faults on one rank
def test_a_wrong_version_sum_product_and_folder_are_each_found(tmp_path):
    (tmp_path / "elsewhere").mkdir()   # as with a run folder on a disk of each host's own
    fault = """reduce, mm = dist.all_reduce, torch.mm
    platform.python_version = lambda: "3.9.1"
    dist.all_reduce = lambda x: reduce(x.mul_(1 + 2**-20) if len(x) > 9999 else x)
    torch.mm = lambda a, b: mm(a, b).index_fill_(0, torch.tensor([7]), 1.0)
    os.chdir("elsewhere")"""
    result = check(tmp_path, "--work_dir", "runs", "--timeout", LIMIT, fault=fault)
    assert_found(result, tmp_path, **{
        "versions": "has python 3.9.1, most have 3.1",
        "matmul": "cpu: 1 of 384 rows are wrong, and 0 of",
        "all-reduce": "its share of the sum is wrong on other ranks",
        "folder": f"does not see in {tmp_path / 'elsewhere' / 'runs'} what rank 0 wrote"})
    assert not (tmp_path / "runs").exists()


def test_other_code_a_sum_received_wrongly_and_a_slow_device_are_each_found(tmp_path):
    folder = tmp_path / "older"
    copy_code(folder)
    with open(folder / "dpo" / "reference.py", "a") as file:
        file.write("# of another day\n")
    fault = """reduce, mm = dist.all_reduce, torch.mm
    dist.all_reduce = lambda x: (reduce(x), x[5:6].zero_() if len(x) > 9999 else 0)
    torch.mm = lambda a, b: (time.sleep(0.1), mm(a, b))[1]"""
    result = check(tmp_path, "--slow", "0.5", fault=fault, folder=folder)   # 0.1 s: 1.1 GFLOP/s
    assert_found(result, tmp_path, **{
        "versions": f"(*.py in {folder})",
        "matmul": "GFLOP/s, the median is",
        "all-reduce": "received 1 wrong elements"})


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()        # permissions would not stop root
    result = check(tmp_path, "--work_dir", "file/runs")
    assert result.returncode == 3, result.text
    status, text = lines_of(result)["folder"]
    assert status == "FAIL" and f"rank 0 on {HOST} cannot write {tmp_path}/file/runs: Not" in text
    assert "suspect" not in result.stdout and (tmp_path / "bad_hosts").read_text() == ""


@pytest.mark.parametrize("fault, name, words", [
    slow("torch.mm = lambda a, b: time.sleep(HANG)", "matmul", f"did not answer within {LIMIT} s"),
    (f"""def stop(*a):
        {STOP}
    dist.all_reduce = stop""", "all-reduce", f"did not answer within {LIMIT} s"),
    slow("torch.zeros_like = lambda x: time.sleep(HANG)", "all-reduce", "did not answer"),
    ("dist.all_reduce = lambda x: x.nothing", "all-reduce",
     "raised AttributeError: 'Tensor' object has no attribute"),
    slow("preflight.measure = lambda *a: time.sleep(HANG)", "place", "did not answer")])
def test_of_ranks_that_wait_for_each_other_the_one_at_fault_is_named_in_time(
        tmp_path, fault, name, words):
    result = check(tmp_path, "--timeout", LIMIT, fault=fault)
    assert_found(result, tmp_path, **{name: words})
    assert result.seconds < IN_TIME, result.text


def test_a_rank_that_dies_is_named_where_no_launcher_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "GRACE", None)
    fault = """import signal
    dist.all_reduce = lambda x: os.kill(os.getpid(), signal.SIGKILL)"""
    result = check(tmp_path, "--timeout", LIMIT, fault=fault)
    assert_found(result, tmp_path, **{"all-reduce": f"did not answer within {LIMIT} s"})


def test_a_failure_of_all_ranks_suspects_no_host(tmp_path):
    result = check(tmp_path, fault="dist.all_reduce = lambda x: x.nothing", faulty_rank="rank")
    assert result.returncode == 3 and lines_of(result)["all-reduce"][0] == "FAIL", result.text
    assert "suspect" not in result.stdout and (tmp_path / "bad_hosts").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [STOP, "import ctypes; ctypes.PyDLL(None).sleep(HANG)"],
                         ids=["stopped", "lock held"])
def test_when_rank_0_does_not_answer_another_names_it_and_all_end(tmp_path, fault):
    fault = f"""def stand_still():
        {fault}
    platform.python_version = stand_still
preflight.ANSWER = 3.0
preflight.OWN_END = 60.0"""
    result = check(tmp_path, "--timeout", LIMIT, fault=fault, faulty_rank=0, launcher="mpich")
    assert result.returncode == 3 and result.leftover == [], result.text
    assert f"suspect hosts: {HOST}" in result.stdout.splitlines(), result.text
    assert "Traceback" not in result.text and result.seconds < IN_TIME, result.text


@pytest.mark.parametrize("words, named", [
    (["--timeout", "inf"], "--timeout is inf"), (["--slow", "2"], "--slow is 2"),
    (["--bandwidth"], "--bandwidth"), (["--suspects", "none/hosts"], "none/hosts")])
def test_wrong_arguments_end_with_2_and_are_named_once(tmp_path, words, named):
    result = check(tmp_path, *words, env=GUARDED)
    assert result.returncode == 2 and result.text.count(named) == 1, result.text
    assert result.stdout == "" and not list(tmp_path.glob("none*")), result.text


def test_a_rank_that_was_never_started_is_named_by_the_set_up(tmp_path):
    env = {"DDP_RANK": 0, "DDP_WORLD_SIZE": 2, "DDP_LOCAL_RANK": 0, "DDP_LOCAL_WORLD_SIZE": 2,
           "MASTER_PORT": free_port()}
    result = check(tmp_path, "--init_timeout", "1", n=1, env=env)
    assert result.returncode == 3, result.text
    text = lines_of(result)["set-up"][1]
    assert "1 of 2 ranks did not appear within 1 s: rank(s) 1" in text, result.text
