"""Do the checks of test_aurora_ddp.py pass where all is well, and do they name the host at fault?

Faults are made on one rank of two, by a driver script that starts test_aurora_ddp.py."""
import re
import socket

import pytest

from launchers import FOLDERS, ROOT, copy_code, fork_ranks, run_ranks, slow

HOST = socket.gethostname()
MODULES = {*FOLDERS, *(path.stem for path in ROOT.glob("*.py"))}
CHECKS = ["barrier", "place", "versions", "limits", "all-reduce", "matmul", "folder", "visible",
          "messages", "gradients", "steps", "checkpoint", "bandwidth"]
GUARDED = {"DDP_GUARD": 1}    # forked ranks are not, unless asked to
HANG = 1000             # seconds of a fault that hangs: more than any limit
IN_TIME = 300.0         # seconds in which a hang is noticed; some 20 where nothing else runs
LIMIT = "5"             # seconds of a check: short, as a fault lasts longer than any
DRIVER = """import os, sys, time
HANG = {hang}
rank = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
sys.path.insert(0, {folder!r} if rank == 1 else {root!r})
for name, module in list(sys.modules.items()):      # a forked rank has those of the root
    if name.partition(".")[0] in {modules!r}:
        del sys.modules[name]
import ddp_guard
ddp_guard.supervise()
import platform, torch, test_aurora_ddp
import torch.distributed as dist
if rank == {faulty_rank}:
    {fault}
test_aurora_ddp.cli()
"""


def check(tmp_path, *options, fault=None, faulty_rank=1, launcher=None, n=2, folder=ROOT, env=None):
    """Run the pre-flight in `tmp_path`, and with the option --claims all.

    fault: Python text that is executed on one rank beforehand; folder: rank 1's project files."""
    path = ROOT / "test_aurora_ddp.py"
    if fault is not None:
        path = tmp_path / "driver.py"
        path.write_text(DRIVER.format(folder=str(folder), root=str(ROOT), fault=fault,
                                      modules=MODULES, faulty_rank=faulty_rank, hang=HANG))
    checks = [] if "--claims" in options else ["--preflight"]
    # A small share: of two ranks on a busy machine, one may run much slower than the other.
    argv = [path, "--device", "cpu", "--slow", "0.02", "--suspects", "bad_hosts", *checks, *options]
    if launcher is None:
        return fork_ranks(n, argv, tmp_path, env)
    return run_ranks(launcher, n, argv, cwd=tmp_path, env=env)


def lines_of(result):
    """{name of the check: (status, figure)} as printed"""
    found = re.findall(r"^(PASS|FAIL|SKIP)  (\S+) +(.*(?:\n {18}.*)*)$", result.stdout, re.M)
    assert len({name for _, name, _ in found}) == len(found), result.text
    return {name: (status, re.sub("\n +", " ", figure)) for status, name, figure in found}


def assert_found(result, tmp_path, **expected):
    """Exactly the checks `expected` failed, each naming rank 1 alone, with these words. The host is
    suspected in both forms, and all have ended."""
    assert result.returncode == 3, result.text
    lines = lines_of(result)
    assert [name for name, (status, _) in lines.items() if status == "FAIL"] == list(expected)
    for name, words in expected.items():
        figure = lines[name][1]
        assert set(re.findall(r"rank \d+ on \S+", figure)) == {f"rank 1 on {HOST}"}, result.text
        assert words in figure, result.text
    assert result.stdout.splitlines()[-1] == f"suspect hosts: {HOST}", result.text
    assert (tmp_path / "bad_hosts").read_text() == f"{HOST}\n"
    assert "Traceback" not in result.text, result.text


@pytest.fixture(scope="module", params=[None, slow("mpich")])
def healthy(request, tmp_path_factory):
    """(folder, Result) of all checks on two ranks."""
    folder = tmp_path_factory.mktemp("healthy")
    (folder / "bad_hosts").write_text("of-a-former-run\n")
    return folder, check(folder, "--claims", "--bandwidth", "--max_mib", "4", "--work_dir", "runs",
                         launcher=request.param, env=GUARDED)


def test_two_healthy_ranks_pass(healthy):
    _, result = healthy
    assert result.returncode == 0 and result.stderr == "", result.text
    assert {name: status for name, (status, _) in lines_of(result).items()} == {
        **dict.fromkeys(CHECKS, "PASS"), "ipex": "SKIP"}, result.text
    assert "suspect" not in result.stdout


def test_two_healthy_ranks_leave_nothing_but_an_empty_list_of_suspects(healthy):
    folder, result = healthy
    assert result.leftover == []
    assert [p.name for p in folder.iterdir()] == ["bad_hosts"]    # the run folder is as it was
    assert (folder / "bad_hosts").read_text() == ""


def test_where_the_ranks_run_is_a_table(healthy):
    _, result = healthy
    assert re.search(rf"^ +1  {re.escape(HOST)} +1  cpu ", result.stdout, re.M), result.text
    assert max(map(len, result.stdout.partition("PASS")[2].splitlines())) <= 80, result.text


def test_the_bandwidth_is_a_table_of_sizes(healthy):
    _, result = healthy
    rows = re.findall(r"^ +(\d+) (KiB|MiB) +([\d.]+) +([\d.]+)\b", result.stdout, re.M)
    sizes = [int(size) * {"KiB": 2**10, "MiB": 2**20}[unit] for size, unit, _, _ in rows]
    assert sizes == [2**10 * 4**k for k in range(7)], result.text
    for size, (_, _, time, rate) in zip(sizes, rows):   # each of two ranks sends the size once
        expected = size / (float(time) * 1e-6) / 1e9
        assert float(rate) == pytest.approx(expected, rel=1e-2, abs=6e-5), result.text


def test_one_rank_skips_what_needs_two_and_says_why(tmp_path):
    result = check(tmp_path, "--bandwidth", n=1)
    assert result.returncode == 0, result.text
    lines = lines_of(result).items()
    assert {name: figure for name, (status, figure) in lines if status == "SKIP"} == {
        "all-reduce": "one rank: nothing to sum over", "folder": "no --work_dir given",
        "visible": "nothing was written",
        "bandwidth": "one rank: nothing to reduce over"}


# ------------------------------------------------------------------ faults on one rank
def test_wrong_place_version_limit_sum_product_and_folder_are_each_found(tmp_path):
    (tmp_path / "elsewhere").mkdir()   # as with a run folder on a disk of each host's own
    fault = """import dataclasses, resource
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, most))
    set_up, reduce, mm = test_aurora_ddp.setup_ddp, dist.all_reduce, torch.mm
    test_aurora_ddp.setup_ddp = lambda *a, **k: dataclasses.replace(set_up(*a, **k), local_rank=0)
    platform.python_version = lambda: "3.9.1"
    dist.all_reduce = lambda x: reduce(x.mul_(1 + 2**-20) if len(x) > 9999 else x)
    torch.mm = lambda a, b: mm(a, b).index_fill_(0, torch.tensor([7]), 1.0)
    os.chdir("elsewhere")"""
    result = check(tmp_path, "--work_dir", "runs", "--timeout", "8", "--bandwidth", fault=fault)
    assert_found(result, tmp_path, **{
        "place": "has the same local rank as rank 0: 0",
        "versions": "has python 3.9.1, most have 3.1",
        "limits": "may open 60 files, expected 104 for 2 ranks: ulimit -n 104",
        "all-reduce": "its share of the sum is wrong on other ranks",
        "matmul": "cpu: 1 of 384 rows are wrong, and 0 of",
        "visible": f"what rank 0 wrote is not in {tmp_path / 'elsewhere' / 'runs'}"})
    assert lines_of(result)["bandwidth"] == ("SKIP", "the all-reduce failed")
    assert not (tmp_path / "runs").exists()


def test_other_code_a_sum_received_wrongly_and_a_slow_device_are_each_found(tmp_path):
    folder = tmp_path / "older"
    copy_code(folder)
    with open(folder / "test_aurora_ddp.py", "a") as file:
        file.write("# of another day\n")
    fault = """reduce, mm = dist.all_reduce, torch.mm
    dist.all_reduce = lambda x: (reduce(x), x[5:6].zero_() if len(x) > 9999 else 0)
    torch.mm = lambda a, b: (time.sleep(0.1), mm(a, b))[1]"""
    result = check(tmp_path, "--slow", "0.5", fault=fault, folder=folder)   # 0.1 s: 1.1 GFLOP/s
    assert_found(result, tmp_path, **{
        "versions": f"(*.py in {folder})",
        "all-reduce": "received 1 wrong elements",
        "matmul": "GFLOP/s, the median is"})


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()        # permissions would not stop root
    result = check(tmp_path, "--work_dir", "file/runs")
    assert result.returncode == 3, result.text
    status, figure = lines_of(result)["folder"]
    assert status == "FAIL" and f"rank 0 on {HOST} NotADirectoryError" in figure, result.text
    assert lines_of(result)["visible"] == ("SKIP", "nothing was written")
    assert "suspect" not in result.stdout and (tmp_path / "bad_hosts").read_text() == ""


@pytest.mark.parametrize("fault, name, words", [
    slow("test_aurora_ddp.measure_row = lambda *a: time.sleep(HANG)", "barrier",
         "did not come within"),
    ("torch.zeros_like = lambda x: time.sleep(HANG)", "all-reduce", "did not end within 5 s"),
    slow("test_aurora_ddp.write_folder = lambda *a: time.sleep(HANG)", "folder",
         "did not end within"),
    ("dist.all_reduce = lambda x: x.nothing", "all-reduce",
     "AttributeError: 'Tensor' object has no attribute")])
def test_of_ranks_that_wait_for_each_other_the_one_at_fault_is_named_in_time(
        tmp_path, fault, name, words):
    result = check(tmp_path, "--timeout", LIMIT, fault=fault)
    assert_found(result, tmp_path, **{name: words})
    assert result.text.count(f"check {name}: ranks failed, are missing or stuck") == 1, result.text
    assert result.seconds < IN_TIME, result.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", [
    "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "import ctypes; ctypes.PyDLL(None).sleep(HANG)"], ids=["stopped", "lock held"])
def test_when_rank_0_does_not_answer_the_others_name_it_and_end_all(tmp_path, fault):
    fault = f"""def stand_still():
        {fault}
    platform.python_version = stand_still
test_aurora_ddp.ANSWER = 1.0"""
    result = check(tmp_path, "--timeout", LIMIT, fault=fault, faulty_rank=0, launcher="mpich")
    # 9: MPICH has killed rank 0, as rank 1 was the first to leave
    assert result.returncode in (3, 9) and result.leftover == [], result.text
    # The check at work, or the next one: rank 0 may stand still before its answer is read.
    last_line = result.stderr.splitlines()[-1]
    assert re.search(rf"check \w+: rank 0 on {re.escape(HOST)} did not answer", last_line)
    assert "Traceback" not in result.text and result.seconds < IN_TIME, result.text


@pytest.mark.parametrize("words, code, message", [
    (["--max_mib", "0"], 2, "error: command line: --max_mib is 0, expected a number above 0"),
    (["--timeout", "inf"], 2, "error: command line: --timeout is inf, expected a number above 0"),
    (["--suspects", "none/hosts"], 2, "cannot write --suspects none/hosts: No such file")])
def test_wrong_arguments_are_printed_once_and_no_success(tmp_path, words, code, message):
    result = check(tmp_path, *words, env=GUARDED)
    assert result.returncode == code and result.text.count(message) == 1, result.text


def test_a_rank_that_was_never_started_is_named_by_the_set_up(tmp_path):
    env = {"DDP_RANK": 0, "DDP_WORLD_SIZE": 2, "DDP_LOCAL_RANK": 0, "DDP_LOCAL_WORLD_SIZE": 2}
    result = check(tmp_path, "--init_timeout", "1", n=1, env=env)
    assert result.returncode == 3, result.text
    figure = lines_of(result)["set-up"][1]
    assert "1 of 2 ranks did not appear within 1 s: rank(s) 1" in figure, result.text


def test_every_claim_can_fail_and_names_the_rank(tmp_path):
    fault = """t = test_aurora_ddp
    send, back, load = t.broadcast, t.backward, t.load_checkpoint
    def broadcast(value, *a):
        received = send(value, *a)
        return received + 1 if torch.is_tensor(received) else received
    def backward(model, *a):
        loss = back(model, *a)
        if hasattr(model, "module"):   # wrapped
            for p in model.parameters():
                p.grad.mul_(0.5)
        return loss
    def load_checkpoint(*a):
        state = load(*a)
        state["model"]["0.bias"].add_(1)
        return state
    t.broadcast, t.backward, t.load_checkpoint = broadcast, backward, load_checkpoint"""
    result = check(tmp_path, "--claims", fault=fault)
    assert_found(result, tmp_path, messages="received something else than rank 1 sent",
                 gradients="has a gradient 0.5 off", steps="has other weights after 20 steps",
                 checkpoint="loaded another model")
