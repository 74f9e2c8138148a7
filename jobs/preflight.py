"""Is this machine fit for a large job? Job scripts run this before the training, on its ranks.

    mpiexec -n 24 --ppn 12 python jobs/preflight.py --work_dir runs/mine
    srun python jobs/preflight.py --suspects bad_hosts

Rank 0 prints a line per check, PASS, FAIL or SKIP, and then a table of the ranks:
    place       where the ranks run
    versions    all have the same Python, torch and *.py files
    matmul      a product of matrices is exact on each device, and no device is slow
    all-reduce  a sum over all ranks is exact; how fast the network is
    folder      each host sees a file that rank 0 writes into the run folder (--work_dir)

If single hosts are to blame, the last line is `suspect hosts: n1,n2`, in the form that Slurm's
--exclude takes. --suspects FILE writes them to FILE, one per line (empty: none), for
`grep -vwFf FILE $PBS_NODEFILE > hosts`. A failure of all ranks (no network) names none. Exit code
of every rank: 0 all passed, 3 a check failed, 2 wrong arguments. Reads the *.py files of the
project; writes FILE, and a temporary file .preflight-* in the run folder.

    each rank: measure --> its row in the store  --> rank 0: judge, print --> verdict, to all ranks
                           (TCP, no collective)      no row in time: this rank is at fault

A rank that is stopped, or hangs in its device, has no row. Those that wait for it in a collective
give up earlier than rank 0 does, and say so in theirs.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))   # which holds ddp_setup.py

if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import argparse
import collections
import contextlib
import faulthandler
import hashlib
import itertools
import json
import os
import platform
import secrets
import socket
import statistics
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_setup import BACKENDS, SetupError, abort, broadcast, detect_launcher, setup_ddp, slurm_step

FAILED = 3                  # exit code: a check failed
USAGE = 2                   # exit code: wrong arguments
ENDS = "the pre-flight ends, as not all ranks can go on: see FAIL above"
NOT_IMPORTED = ("tests", "docs", "bench")   # folders whose files no run imports
TABLE_ROWS = 32             # most ranks for which a table is printed
MOST_PROBLEMS = 6           # most problems printed per check
MOST_SENDERS = 9            # most ranks with a wrong share that a rank reports
LARGE = 1 << 26             # bytes of the all-reduce that is timed
REPEATS = 5                 # timed all-reduces

# Shares of --timeout, and seconds. All ranks begin a check together.
GIVE_UP = 0.7               # share after which a rank no longer waits for others in a collective
ALL_ROWS = 5.0              # a rank that is late itself waits at least so long for the others
ANSWER = 30.0               # other ranks wait this long beyond --timeout for rank 0's verdict
OWN_END = 60.0              # a rank that is stuck this long beyond --timeout ends by itself
CULPRIT_FIRST = 1.5         # for the launcher to end all, if rank 0 is gone as another has failed
REFUSAL_FIRST = 4.0         # for rank 0 to print a wrong argument, before other ranks exit
PRODUCTS = 0.5              # repeat the product of matrices for so long
DEVICE_POLL = 0.001         # between two looks at a device
FILE_POLL = 0.1             # between two looks for a file: of 500 hosts at one file server


def main(argv: list[str] | None = None) -> None:
    """Check this machine, and exit with the code."""
    args = read_arguments_on_all_ranks(argv)
    limit = GIVE_UP * args.timeout   # of a collective
    if args.device != "cpu" and torch.accelerator.is_available():
        limit = args.timeout + OWN_END   # NCCL then ends a rank that only waits, too
    try:
        ddp = setup_ddp(args.device, args.backend, timeout=limit, init_timeout=args.init_timeout)
    except RuntimeError as error:
        text = f"on {socket.gethostname()}: {error}".replace("\n", " ")
        print(line_of("set-up", "FAIL", [], text, []), flush=True)
        sys.exit(FAILED)
    with ddp:
        passed = run_checks(ddp, args)
    sys.exit(0 if passed else FAILED)


def run_checks(ddp, args):
    """Run all checks; returns, on every rank, whether all passed. If a rank raised an error or is
    silent, all ranks exit here with code 3."""
    report = Report(ddp, args)
    for check in CHECKS:
        faulthandler.dump_traceback_later(args.timeout + OWN_END, exit=True)
        deadline = time.monotonic() + args.timeout
        row = {"host": own_host(ddp), **measure(check, ddp, args)}
        if ddp.is_main:
            goes_on = judge(check, gather_rows(check, row, ddp, deadline), report)
        else:
            goes_on = await_verdict_of_rank_0(check, row, report, deadline + ANSWER)
        if not goes_on:
            abort(ddp, ENDS, FAILED)
    faulthandler.cancel_dump_traceback_later()
    if ddp.is_main:
        report.finish()
    return "FAIL" not in report.outcomes


# ---------------------------------------------------------------- the checks
class Check(NamedTuple):
    """What each rank measures, and how rank 0 judges it.

    measure(ddp, args) -> row, a dict of plain values, on each rank. Its "problem": what is wrong
        with this rank; "skip": why nothing is checked.
    judge(rows, args) -> more problems [(rank; None: of no single one, text)], result: on rank 0.
    """
    name: str
    measure: Callable
    judge: Callable


def describe_place(ddp, args):
    cores = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    row = {"local": ddp.local_rank, "device": str(ddp.device), "cores": ranges(cores),
           "name": "cpu", "free": None}
    if ddp.device.type != "cpu":
        module = torch.get_device_module(ddp.device)
        row["name"] = module.get_device_name(ddp.device)
        with contextlib.suppress(AttributeError, RuntimeError):   # missing for XPU in some torch
            row["free"] = module.mem_get_info(ddp.device)[0] / 2**30
    return row


def judge_places(rows, args):
    per_host = collections.Counter(row["host"] for row in rows)
    names = ", ".join(sorted({row["name"] for row in rows}))
    return [], (f"{len(rows)} rank(s) on {len(per_host)} host(s), {span(per_host.values())} per "
                f"host; {names}")


def list_versions(ddp, args):
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]):
        if path.parent.name not in NOT_IMPORTED:
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return {"python": platform.python_version(), "torch": str(torch.__version__),
            "folder": str(ROOT), "code": digest.hexdigest()}


def judge_versions(rows, args):
    problems = []
    results = []
    for key in ("python", "torch", "code"):
        usual, others = majority([row[key] for row in rows])
        results.append(f"{key} {usual}")
        for rank in others:
            files = f" (*.py in {rows[rank]['folder']})" if key == "code" else ""
            problems.append((rank, f"has {key} {rows[rank][key]}, most have {usual}{files}"))
    return problems, ", ".join(results)


def multiply(ddp, args):
    """Check a product of matrices of small integers, exact in float32 and TF32; measure its rate.

    Compares (A B) v with A (B v) in float64 on the CPU: a wrong element of A B changes the first
    (Freivalds 1977), and no second product is needed.
    """
    m = 384 if ddp.device.type == "cpu" else 4096
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-2, 3, (m, m), generator=generator, dtype=torch.float32)
    b = torch.randint(-2, 3, (m, m), generator=generator, dtype=torch.float32)
    v = torch.randint(1, 9, (m,), generator=generator, dtype=torch.float64)
    a_there = a.to(ddp.device)
    b_there = b.to(ddp.device)
    first = torch.mm(a_there, b_there)
    times = []
    changed = 0
    while len(times) < 3 or sum(times) < PRODUCTS:
        synchronize(ddp)
        start = time.perf_counter()
        product = torch.mm(a_there, b_there)
        synchronize(ddp)
        times.append(time.perf_counter() - start)
        changed += not torch.equal(product, first)
    wrong = int((product.cpu().double() @ v != a.double() @ (b.double() @ v)).sum())
    row = {"device": str(ddp.device), "rate": 2 * m**3 / min(times) / 1e9}
    if wrong or changed:
        row["problem"] = (f"{ddp.device}: {wrong} of {m} rows are wrong, and {changed} of "
                          f"{len(times)} repeats gave another product")
    return row


def judge_products(rows, args):
    rates = [row["rate"] for row in rows]
    median = statistics.median_high(rates)   # of two rates the larger one, to find a slow second
    share = args.slow
    if share is None:
        share = 0.1 if rows[0]["device"] == "cpu" else 0.5
    problems = [(rank, f"{rows[rank]['device']}: {rate:,.0f} GFLOP/s, the median is {median:,.0f}")
                for rank, rate in enumerate(rates) if rate < share * median]
    return problems, f"exact, {span([round(rate) for rate in rates])} GFLOP/s (float32)"


def sum_over_ranks(ddp, args):
    """All-reduce a vector whose element i is i + 1 on rank i % n, and 0 on the others; then a large
    one, for the time.

    The sum is exact in float32, and the index of a wrong element tells which rank sent it.
    """
    n = ddp.world_size
    if n == 1:
        return {"skip": "one rank: nothing to sum over"}
    values = torch.arange(1, 2**18 + 1, dtype=torch.float32)   # 1 MiB, > n
    mine = torch.zeros_like(values)
    mine[ddp.rank::n] = values[ddp.rank::n]
    mine = mine.to(ddp.device)
    large = torch.zeros(LARGE // 4, device=ddp.device)
    with waiting_for_others():
        dist.all_reduce(mine)
        dist.all_reduce(large)   # the first one is slower
        settle(ddp, args)
        start = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(large)
        settle(ddp, args)
        seconds = (time.perf_counter() - start) / REPEATS
    wrong = (mine.cpu() != values).nonzero().flatten()
    return {"backend": ddp.backend, "seconds": seconds, "wrong": len(wrong),
            "senders": (wrong % n).unique().tolist()[:MOST_SENDERS]}


def judge_sum(rows, args):
    receivers = [rank for rank, row in enumerate(rows) if row["wrong"]]
    senders = sorted({sender for row in rows for sender in row["senders"]})
    if len(senders) < min(len(receivers), MOST_SENDERS):    # a few bad senders, not bad receivers
        problems = [(rank, "its share of the sum is wrong on other ranks") for rank in senders]
    else:
        problems = [(rank, f"received {rows[rank]['wrong']} wrong elements of {2**18}")
                    for rank in receivers]
    seconds = max(row["seconds"] for row in rows)
    n = len(rows)
    bus = 2 * (n - 1) / n * LARGE / seconds / 1e9   # what a ring sends over each link
    return problems, (f"exact; {LARGE >> 20} MiB in {seconds * 1e3:.1f} ms, {bus:.3g} GB/s over "
                      f"each link ({rows[0]['backend']})")


def share_folder(ddp, args):
    """Rank 0 writes a file into the run folder, and the last rank of each host looks for it."""
    if args.work_dir is None:
        return {"skip": "no --work_dir given"}
    row = {}
    start = time.monotonic()
    token = secrets.token_hex(8)
    if ddp.is_main:
        row["made"] = not os.path.exists(args.work_dir)
        try:
            os.makedirs(args.work_dir, exist_ok=True)
            file_of(token, args).write_text(token)
        except OSError as error:
            row["not_written"] = f"{os.path.abspath(args.work_dir)}: {error.strerror}"
            token = ""   # nothing to look for
    with waiting_for_others():
        row["token"] = broadcast(token, ddp)
    if row["token"] and ddp.local_rank == ddp.local_world_size - 1:
        path = file_of(row["token"], args)
        while not (path.exists() and path.read_text() == row["token"]):   # NFS caches its absence
            if time.monotonic() > start + GIVE_UP * args.timeout:
                row["problem"] = (f"does not see in {path.parent.absolute()} what rank 0 wrote; "
                                  f"expected a folder that all hosts share")
                break
            time.sleep(FILE_POLL)
    row["seconds"] = time.monotonic() - start
    return row


def file_of(token, args):
    return Path(args.work_dir, f".preflight-{token}")


def judge_folder(rows, args):
    if "not_written" in rows[0]:   # no host is to blame: perhaps the path is mistyped
        return [(None, f"rank 0 on {rows[0]['host']} cannot write {rows[0]['not_written']}")], ""
    seconds = max(row["seconds"] for row in rows)
    return [], f"each host sees what rank 0 writes in {args.work_dir}, in {seconds * 1e3:.0f} ms"


CHECKS = (Check("place", describe_place, judge_places),
          Check("versions", list_versions, judge_versions),
          # Before any collective: in these, all ranks would hang with a device that does.
          Check("matmul", multiply, judge_products),
          Check("all-reduce", sum_over_ranks, judge_sum),
          Check("folder", share_folder, judge_folder))


# ---------------------------------------------------------------- helpers of the checks
class WaitedForOthers(RuntimeError):
    """An error of a rank that is perhaps not at fault itself; its text, in one line."""


@contextlib.contextmanager
def waiting_for_others():
    """In this block ranks wait for each other: an error of the backend, such as a limit, may be
    another rank's fault."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise WaitedForOthers(in_one_line(error)) from error


def settle(ddp, args):
    """Wait for the device, with a limit. On an accelerator collectives return before they are done;
    on the CPU gloo has the same limit itself, see `main`."""
    if ddp.device.type == "cpu":
        return
    done = torch.Event(ddp.device)
    done.record()
    deadline = time.monotonic() + GIVE_UP * args.timeout
    while not done.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end of a collective within {GIVE_UP * args.timeout:.0f} s")
        time.sleep(DEVICE_POLL)


def synchronize(ddp):
    if ddp.device.type != "cpu":
        torch.accelerator.synchronize(ddp.device)


def majority(values):
    """(the most common value, ranks with another value). In a tie the first value wins."""
    usual = collections.Counter(values).most_common(1)[0][0]
    return usual, [rank for rank, value in enumerate(values) if value != usual]


# ---------------------------------------------------------------- rows and verdicts: see the top
def own_host(ddp):
    """The name of this host, under Slurm that which its --exclude takes."""
    if slurm_step(ddp):
        return os.environ.get("SLURMD_NODENAME", ddp.host)
    return ddp.host


def measure(check, ddp, args):
    """The row of this rank; its "error": what was raised, "waited": perhaps for a rank at fault."""
    try:
        return check.measure(ddp, args)
    except WaitedForOthers as error:
        return {"error": str(error), "waited": True}
    except Exception as error:   # any error is reported, with the rank
        return {"error": in_one_line(error), "waited": False}


def gather_rows(check, row, ddp, deadline):
    """On rank 0, the rows of all ranks, in order; None: silent at the deadline."""
    if ddp.world_size == 1:
        return [row]
    keys = [f"row/{check.name}/{rank}" for rank in range(ddp.world_size)]
    ddp.store.set(keys[0], json.dumps(row))
    seconds = max(deadline - time.monotonic(), ALL_ROWS)
    with contextlib.suppress(dist.DistStoreError):   # at the deadline
        ddp.store.wait(keys, timedelta(seconds=seconds))
    return [json.loads(ddp.store.get(key)) if ddp.store.check([key]) else None for key in keys]


def judge(check, rows, report):
    """On rank 0: judge the rows, print the line of the check, and tell all ranks the verdict.
    Returns whether the next check can follow."""
    report.note(rows)
    lost = lost_ranks(rows, report.args)
    status = "PASS"
    problems = lost
    result = ""
    if not lost and "skip" in rows[0]:
        status = "SKIP"
        result = rows[0]["skip"]
    elif not lost:
        problems = [(rank, row["problem"]) for rank, row in enumerate(rows) if "problem" in row]
        more, result = check.judge(rows, report.args)
        problems += more
    if problems:
        status = "FAIL"
    report.add(check.name, status, problems, result)
    if lost:
        report.finish()
    if report.ddp.world_size > 1:
        verdict = {"goes_on": not lost, "status": status, "host": report.hosts[0]}
        report.ddp.store.set(f"verdict/{check.name}", json.dumps(verdict))
    return not lost


def lost_ranks(rows, args):
    """[(rank, text)] of the ranks that are silent or raised an error. Those that perhaps only
    waited for these are not to blame."""
    at_fault = []
    waited = []
    for rank, row in enumerate(rows):
        if row is None:
            at_fault.append((rank, f"did not answer within {args.timeout:.0f} s: stopped, dead or "
                                   f"stuck"))
        elif "error" in row and row["waited"]:
            waited.append((rank, f"waited for others: {row['error']}"))
        elif "error" in row:
            at_fault.append((rank, f"raised {row['error']}"))
    return at_fault or waited


def await_verdict_of_rank_0(check, row, report, deadline):
    """On the other ranks: send the row, and wait for the verdict. Returns whether the next check
    can follow. If there is no verdict, all ranks end here."""
    ddp = report.ddp
    # Of a thread: with rank 0 stopped, or its host unplugged, a call of the store does not return.
    seconds = max(deadline - time.monotonic(), ALL_ROWS)
    timer = threading.Timer(seconds, end_without_rank_0, [check, report])
    timer.daemon = True
    timer.start()
    try:
        ddp.store.set(f"row/{check.name}/{ddp.rank}", json.dumps(row))
        key = f"verdict/{check.name}"
        ddp.store.wait([key], timedelta(seconds=report.args.timeout + OWN_END))
        verdict = json.loads(ddp.store.get(key))
    except RuntimeError:   # the store is gone with rank 0
        time.sleep(CULPRIT_FIRST)
        end_without_rank_0(check, report)
    timer.cancel()
    report.outcomes.append(verdict["status"])
    report.hosts[0] = verdict["host"]
    return verdict["goes_on"]


def end_without_rank_0(check, report):
    """One rank, if possible of another host than rank 0, says that rank 0 does not answer. All
    end."""
    ddp = report.ddp
    elsewhere = [rank for rank, host in enumerate(ddp.hosts) if host != ddp.hosts[0]]
    speaker = elsewhere[0] if elsewhere else 1
    if ddp.rank == speaker:
        report.add(check.name, "FAIL", [(0, "did not answer: stopped, dead or stuck")], "")
        report.finish()
    abort(ddp, ENDS, FAILED)


# ---------------------------------------------------------------- what is printed
class Report:
    """What is known of all ranks. Rank 0 prints it, or another rank if rank 0 is gone."""

    def __init__(self, ddp, args):
        self.ddp = ddp
        self.args = args
        self.hosts = list(ddp.hosts)            # of each rank
        self.found = [{} for _ in self.hosts]   # all that its rows held
        self.outcomes = []                      # PASS, FAIL or SKIP of each check
        self.suspects = []                      # hosts

    def note(self, rows):
        """Remember the rows of all ranks; None: of a silent one."""
        for rank, row in enumerate(rows):
            if row is not None:
                self.hosts[rank] = row["host"]
                self.found[rank].update(row)

    def add(self, name, status, problems, result):
        """Print the line of a check, and note which hosts are suspected."""
        self.outcomes.append(status)
        print(line_of(name, status, problems, result, self.hosts), flush=True)
        guilty = sorted({rank for rank, _ in problems} - {None})
        if len(guilty) < self.ddp.world_size:   # else no single host is to blame
            suspects = self.suspects + [self.hosts[rank] for rank in guilty]
            self.suspects = list(dict.fromkeys(suspects))

    def finish(self):
        """Print the table of ranks and the outcome, and write --suspects."""
        with contextlib.suppress(OSError):   # leave the run folder as it was, if it is there
            if self.found[0].get("token"):
                file_of(self.found[0]["token"], self.args).unlink()
            if self.found[0].get("made"):
                os.rmdir(self.args.work_dir)
        if self.ddp.is_main and len(self.hosts) <= TABLE_ROWS:
            print("\n".join(table_of(self.hosts, self.found)))
        count = self.outcomes.count
        print(f"{count('PASS')} passed, {count('FAIL')} failed, {count('SKIP')} skipped")
        write_suspects(self.args, self.suspects)
        if self.suspects:
            print(f"suspect hosts: {','.join(self.suspects)}")
        sys.stdout.flush()


def write_suspects(args, hosts):
    """Write --suspects. Raises: ValueError if it cannot be written."""
    if args.suspects is None:
        return
    try:
        Path(args.suspects).write_text("".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise ValueError(f"cannot write --suspects {args.suspects}: {error.strerror}") from None


def line_of(name, status, problems, result, hosts):
    """The line of a check, wrapped at 80 columns: its result, or what is wrong."""
    texts = []
    for rank, text in problems[:MOST_PROBLEMS]:
        texts.append(text if rank is None else f"rank {rank} on {hosts[rank]} {text}")
    if len(problems) > MOST_PROBLEMS:
        texts.append(f"and {len(problems) - MOST_PROBLEMS} more")
    return textwrap.fill(f"{status}  {name:<10}  {'; '.join(texts) or result}", 80,
                         subsequent_indent=" " * 18, break_long_words=False,
                         break_on_hyphens=False)


def table_of(hosts, found):
    """Lines of at most 80 columns: where each rank runs, and how fast it is."""
    width = min(32, max(4, *map(len, hosts)))
    lines = [f"\nrank  {'host':<{width}}  local  device  GFLOP/s  free GiB  cores"]
    for rank, (host, row) in enumerate(zip(hosts, found)):
        rate = f"{row['rate']:.0f}" if "rate" in row else ""
        free = f"{row['free']:.1f}" if row.get("free") is not None else ""
        line = (f"{rank:>4}  {host[:width]:<{width}}  {row.get('local', ''):>5}  "
                f"{row.get('device', ''):<6}  {rate:>7}  {free:>8}  {row.get('cores', '')}")
        lines.append(line[:80])
    return lines


def ranges(numbers):
    """[0, 1, 2, 8] -> '0-2,8'"""
    # In a run of consecutive numbers, number - index is constant.
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def span(values):
    """[3, 5, 4] -> '3 to 5'"""
    least = min(values)
    most = max(values)
    return f"{least:,} to {most:,}" if most > least else f"{least:,}"


def in_one_line(error):
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# ---------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    """One whose errors are ValueErrors: each rank has them, and one prints."""

    def error(self, message):
        raise ValueError(f"{message}. See --help, and the top of {os.path.basename(__file__)}")


def read_arguments(argv):
    """The options. Raises: ValueError."""
    parser = Parser(description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work_dir", help="run folder of the training that you plan")
    add("--suspects", metavar="FILE", help="write the suspect hosts there, one per line")
    add("--timeout", type=float, default=60.0, help="seconds a check may take (default 60)")
    add("--slow", type=float, help="fraction of the median rate below which a device is slow "
                                   "(default 0.5; on CPUs, which others may use too, 0.1)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", *BACKENDS))
    add("--init_timeout", type=float, default=90.0, help="seconds to wait for all ranks")
    args = parser.parse_args(argv)
    if not 0 < args.timeout < 1e9:   # true for nan too
        raise ValueError(f"--timeout is {args.timeout}, expected a number above 0 and below 1e9")
    if args.slow is not None and not 0 < args.slow < 1:
        raise ValueError(f"--slow is {args.slow}, expected a number between 0 and 1")
    return args


def read_arguments_on_all_ranks(argv):
    """The options; if they are wrong, print on one rank why, and exit."""
    try:
        args = read_arguments(argv)
        if launched_rank() == 0:
            write_suspects(args, [])   # those of an earlier start must not stay
        return args
    except ValueError as problem:
        if launched_rank() == 0:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        else:
            time.sleep(REFUSAL_FIRST)
        sys.exit(USAGE)


def launched_rank():
    """The number of this rank, before the ranks have met; 0 if it is not known yet."""
    with contextlib.suppress(SetupError):   # setup_ddp says it
        return detect_launcher(dict(os.environ)).rank
    return 0


if __name__ == "__main__":
    main()
