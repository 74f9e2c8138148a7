"""Does DDP training work on this machine? A check of two minutes, before a large job.

    mpirun -n 2 python test_aurora_ddp.py       all; also mpiexec, srun, torchrun, or python alone
    mpiexec -n 24 --ppn 12 python test_aurora_ddp.py --preflight --work_dir runs/mine
    srun python test_aurora_ddp.py --preflight --suspects bad_hosts
    pytest test_aurora_ddp.py                   the same, on two ranks of this machine's CPU

Start it exactly as the training. To check a new machine, copy it there with ddp_setup.py alone, or
with ddp_guard.py, which also names a rank that dies. Rank 0 prints a line per check: PASS, FAIL or
SKIP, name, result; and then a table of the ranks.
  --preflight  where the ranks run; all have the same code and versions; a matrix product on each
               device and an all-reduce are correct, no device is slow, and how fast the network is;
               each host sees a file that rank 0 writes into the run folder (--work_dir)
  --claims     (the default) the same, and then: gradients of a DDP model equal those of one process
               with all the data; weights are equal on all ranks after 20 steps, with IPEX if it is
               used; a saved checkpoint is loaded with equal bits

If single hosts are to blame, the last line is `suspect hosts: n1,n2`, in the form that Slurm's
--exclude takes. --suspects FILE writes them to FILE, one per line (empty: none), for
`grep -vwFf FILE $PBS_NODEFILE > hosts`. A failure of all ranks (no network) names none. Exit code
of every rank: 0 all passed, 3 a check failed, 2 wrong arguments. Reads the *.py files beside it;
writes FILE, and temporary files .preflight-* in the run folder (or rank 0's temporary folder).

    each rank: measure --> its row in the store  --> rank 0: judge, print --> verdict, to all ranks
                           (TCP, no collective)      no row in time: this rank is at fault

A rank that is stopped, or hangs in its device, has no row. Those that wait for it in a collective
give up earlier than rank 0 does, and say so in theirs.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import contextlib
    with contextlib.suppress(ModuleNotFoundError):   # ddp_guard.py may be left out
        import ddp_guard
        ddp_guard.supervise()

import argparse
import collections
import contextlib
import copy
import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_setup import (SetupError, abort, broadcast, detect_launcher, load_checkpoint,
                       note_progress, optimize_with_ipex, save_checkpoint, setup_ddp, start_watch,
                       unwrap_ddp, wrap_ddp)

FAILED = 3                  # exit code: a check failed
USAGE = 2                   # exit code: wrong arguments
CODE = ("*.py", "sedd/*.py", "mpnn/*.py", "training/*.py")   # the files that all ranks must share
TABLE_ROWS = 32             # most ranks for which a table is printed
MOST_PROBLEMS = 6           # most problems printed per check
MOST_SENDERS = 9            # most ranks with a wrong share that a rank reports
LARGE = 1 << 26             # bytes of the all-reduce that is timed
REPEATS = 5                 # timed all-reduces
ITEMS = 12                  # data items per rank, in the claims
STEPS = 20                  # training steps, in the claims
CLOSE = 1e-4                # relative error allowed in gradients: float32 has 1e-6, TF32 1e-3

# Shares of --timeout, and seconds. All ranks begin a check together.
GIVE_UP = 0.7               # share after which a rank no longer waits for others in a collective
ALL_ROWS = 5.0              # rank 0 waits at least so long for the others, if it is late itself
ANSWER = 30.0               # other ranks wait this long beyond --timeout for rank 0's verdict
OWN_END = 60.0              # a rank that is stuck this long beyond --timeout is ended; NCCL does so
CULPRIT_FIRST = 1.5         # for the launcher to end all, if rank 0 is gone as another has failed
REFUSAL_FIRST = 4.0         # for rank 0 to print a wrong argument, before other ranks exit
PRODUCTS = 0.5              # repeat the matrix product for so long
POLL = 0.001                # between two looks at a device, or for a file


class Check(NamedTuple):
    """What each rank measures, and how rank 0 judges it.

    measure(ddp, args) -> row, a dict of plain values, on each rank. Its "problem": what is wrong
        with this rank; "skip": why nothing is checked; "result" of rank 0: for the line.
    judge(rows, args) -> more problems [(rank; None: of no single one, text)], result: on rank 0.
    """
    name: str
    measure: Callable
    judge: Callable | None = None


class WaitedForOthers(RuntimeError):
    """An error of a rank that is perhaps not at fault itself; its text, in one line."""


# ---------------------------------------------------------------- the checks before a run
def describe_place(ddp, args):
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = range(os.cpu_count() or 1)
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
    folder = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=6)
    for pattern in CODE:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return {"python": platform.python_version(), "torch": str(torch.__version__),
            "folder": str(folder), "code": digest.hexdigest()}


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
    """Check a matrix product of small integers, exact in float32 and TF32, and measure its rate.

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
            Path(args.work_dir, f".preflight-{token}").write_text(token)
        except OSError as error:
            row["not_written"] = f"{os.path.abspath(args.work_dir)}: {error.strerror}"
            token = ""   # nothing to look for
    with waiting_for_others():
        row["token"] = broadcast(token, ddp)
    if row["token"] and ddp.local_rank == ddp.local_world_size - 1:
        path = Path(args.work_dir, f".preflight-{row['token']}")
        while not (path.exists() and path.read_text() == row["token"]):   # NFS caches its absence
            if time.monotonic() > start + GIVE_UP * args.timeout:
                row["problem"] = (f"does not see in {path.parent.absolute()} what rank 0 wrote; "
                                  f"expected a folder that all hosts share")
                break
            time.sleep(POLL)
    row["seconds"] = time.monotonic() - start
    return row


def judge_folder(rows, args):
    if "not_written" in rows[0]:   # no host is to blame: perhaps the path is mistyped
        return [(None, f"rank 0 on {rows[0]['host']} cannot write {rows[0]['not_written']}")], ""
    seconds = max(row["seconds"] for row in rows)
    return [], f"each host sees what rank 0 writes in {args.work_dir}, in {seconds * 1e3:.0f} ms"


# ---------------------------------------------------------------- the claims: is training right?
def items_of(ranks):
    """(x (n, 16), y (n, 1)) float32 on the CPU: inputs and targets, ITEMS of each of `ranks`."""
    x = torch.cat([torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(rank))
                   for rank in ranks])
    return x, x[:, :1] * x[:, 1:2]


def make_model(ddp, with_ipex=False):
    """(DDP model, its optimizer, whether IPEX has optimized it).

    Ranks start with different weights, so that a check fails if DDP does not copy rank 0's.
    """
    torch.manual_seed(ddp.rank)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64),
                                torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = plain.to(ddp.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with waiting_for_others():
        if with_ipex:
            model, optimizer = optimize_with_ipex(model, optimizer, ddp)
        used = model is not plain
        return wrap_ddp(model, ddp, bucket_cap_mb=0.01), optimizer, used   # several buckets a step


def backward(model, ddp, args):
    """Gradient of the mean loss of this rank's items; returns the loss."""
    x, y = items_of([ddp.rank])
    with waiting_for_others():
        loss = ((model(x.to(ddp.device)) - y.to(ddp.device)) ** 2).mean()
        loss.backward()
        settle(ddp, args)
    return loss.item()


def average_gradients(ddp, args):
    """Compare DDP gradients with those of one process on the items of all ranks, in float64."""
    model = make_model(ddp)[0]
    plain = copy.deepcopy(unwrap_ddp(model)).cpu().double()
    x, y = (values.double() for values in items_of(range(ddp.world_size)))
    ((plain(x) - y) ** 2).mean().backward()
    backward(model, ddp, args)
    errors = [(parameter.grad.cpu().double() - expected.grad).norm() / expected.grad.norm()
              for parameter, expected in zip(model.parameters(), plain.parameters())]
    error = torch.stack(errors).max().item()
    row = {"result": f"{ddp.world_size * ITEMS} items as in one process, within {error:.1g}"}
    if not error <= CLOSE:   # true for nan
        row["problem"] = f"has a gradient {error:.1g} off one process's"
    return row


def take_steps(ddp, args):
    model, optimizer, with_ipex = make_model(ddp, with_ipex=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, ddp, args))
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return {"first": losses[0], "last": losses[-1], "with_ipex": with_ipex,
            "weights": hashlib.blake2b(repr(weights).encode(), digest_size=8).hexdigest()}


def judge_steps(rows, args):
    _, others = majority([row["weights"] for row in rows])
    first = statistics.fmean(row["first"] for row in rows)
    last = statistics.fmean(row["last"] for row in rows)
    problems = [(rank, f"has other weights after {STEPS} steps") for rank in others]
    if not last < first:
        problems.append((None, f"the loss went from {first:.3g} to {last:.3g}"))
    if args.ipex == "on" and not rows[0]["with_ipex"]:
        problems.append((None, "--ipex on asks for IPEX, which was not used: see above"))
    ipex = ", with IPEX" if rows[0]["with_ipex"] else ""
    return problems, (f"equal weights on {len(rows)} rank(s) after {STEPS} steps{ipex}, loss "
                      f"{first:.2g} -> {last:.2g}")


def save_and_load(ddp, args):
    model, optimizer, _ = make_model(ddp)
    backward(model, ddp, args)
    optimizer.step()
    saved = {"model": unwrap_ddp(model).state_dict(), "optimizer": optimizer.state_dict()}
    folder = Path(args.work_dir or tempfile.gettempdir(), f".preflight-{secrets.token_hex(8)}")
    try:   # rank 0 alone reads and writes
        with waiting_for_others():
            save_checkpoint(folder / "last.pt", ddp, resumes=False, **saved)
            loaded = load_checkpoint(folder / "last.pt", ddp)
    finally:
        if ddp.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    wrong = []
    for key in saved:
        try:
            torch.testing.assert_close(loaded[key], saved[key], rtol=0, atol=0, check_device=False)
        except AssertionError:
            wrong.append(key)
    if wrong:
        return {"problem": f"loaded another {' and '.join(wrong)} than was saved"}
    return {"result": "loaded with equal bits"}


PREFLIGHT = (Check("place", describe_place, judge_places),
             Check("versions", list_versions, judge_versions),
             # Before any collective: in these, all ranks would hang with a device that does.
             Check("matmul", multiply, judge_products),
             Check("all-reduce", sum_over_ranks, judge_sum),
             Check("folder", share_folder, judge_folder))
CLAIMS = (Check("gradients", average_gradients),
          Check("steps", take_steps, judge_steps),
          Check("checkpoint", save_and_load))


# ---------------------------------------------------------------- running: every wait has a limit
class Report:
    """What is known of all ranks. Rank 0 prints it, or another rank if rank 0 is gone."""

    def __init__(self, ddp, args):
        self.ddp = ddp
        self.args = args
        self.hosts = list(ddp.hosts)            # of each rank
        self.found = [{} for _ in self.hosts]   # all that its rows held
        self.outcomes = []                      # PASS, FAIL or SKIP of each check
        self.suspects = []                      # hosts

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
                os.remove(Path(self.args.work_dir, f".preflight-{self.found[0]['token']}"))
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


def run_checks(ddp, args):
    """Run the chosen checks; returns, on every rank, whether one failed. If a rank raised an error
    or is silent, all ranks exit here with code 3."""
    start_watch(ddp, minutes=(args.timeout + OWN_END) / 60, signals=())
    report = Report(ddp, args)
    checks = PREFLIGHT
    if args.claims or not args.preflight:
        checks = PREFLIGHT + CLAIMS
    for check in checks:
        note_progress(ddp)   # the limit of start_watch begins anew
        deadline = time.monotonic() + args.timeout
        row = {"host": own_host(ddp), **measure(check, ddp, args)}
        if ddp.is_main:
            ends = judge(check, gather_rows(check, row, ddp, deadline), report)
        else:
            ends = await_verdict_of_rank_0(check, row, report, deadline + ANSWER)
        if ends:
            abort(ddp, "", FAILED)   # rank 0 has said why
    if ddp.is_main:
        report.finish()
    return "FAIL" in report.outcomes


def own_host(ddp):
    """The name of this host, under Slurm that which its --exclude takes."""
    return (ddp.slurm_step and os.environ.get("SLURMD_NODENAME")) or ddp.host


def measure(check, ddp, args):
    """The row of this rank; its "error": what was raised, "waited": perhaps for a rank at fault."""
    try:
        return check.measure(ddp, args)
    except Exception as error:   # any error is reported, with the rank
        waited = isinstance(error, WaitedForOthers)
        return {"error": str(error) if waited else in_one_line(error), "waited": waited}


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
    Returns whether all shall end now."""
    for rank, row in enumerate(rows):
        if row is not None:
            report.hosts[rank] = row["host"]
            report.found[rank].update(row)
    lost = lost_ranks(rows, report.args)
    problems = lost
    result = rows[0].get("skip", "")
    if not lost and not result:
        problems, result = conclude(check, rows, report.args)
    status = "PASS"
    if problems:
        status = "FAIL"
    elif "skip" in rows[0]:
        status = "SKIP"
    report.add(check.name, status, problems, result)
    if lost:
        report.finish()
    if report.ddp.world_size > 1:
        verdict = {"ends": bool(lost), "status": status, "host": report.hosts[0]}
        report.ddp.store.set(f"verdict/{check.name}", json.dumps(verdict))
    return bool(lost)


def lost_ranks(rows, args):
    """[(rank, text)] of the ranks that are silent or raised an error. Those that perhaps only
    waited for these are not to blame."""
    silent = [(rank, f"did not answer within {args.timeout:.0f} s: stopped, dead or stuck")
              for rank, row in enumerate(rows) if row is None]
    errors = [(rank, row) for rank, row in enumerate(rows) if row is not None and "error" in row]
    raised = [(rank, f"raised {row['error']}") for rank, row in errors if not row["waited"]]
    waited = [(rank, f"waited for others: {row['error']}") for rank, row in errors if row["waited"]]
    return silent + raised or waited


def conclude(check, rows, args):
    """(problems, result) of rows without errors."""
    problems = [(rank, row["problem"]) for rank, row in enumerate(rows) if "problem" in row]
    result = rows[0].get("result", "")
    if check.judge is not None:
        more, result = check.judge(rows, args)
        problems += more
    return problems, result


def await_verdict_of_rank_0(check, row, report, deadline):
    """On the other ranks: send the row, and wait for the verdict. Returns whether all shall end
    now. If there is no verdict, one rank, if possible of another host, says so."""
    ddp = report.ddp
    key = f"verdict/{check.name}"
    seconds = max(deadline - time.monotonic(), ALL_ROWS)
    with contextlib.suppress(RuntimeError):   # at the deadline, or the store is gone with rank 0
        ddp.store.set(f"row/{check.name}/{ddp.rank}", json.dumps(row))
        ddp.store.wait([key], timedelta(seconds=seconds))
        verdict = json.loads(ddp.store.get(key))
        report.outcomes.append(verdict["status"])
        report.hosts[0] = verdict["host"]
        return verdict["ends"]
    time.sleep(CULPRIT_FIRST)
    elsewhere = [rank for rank, host in enumerate(ddp.hosts) if host != ddp.hosts[0]]
    speaker = elsewhere[0] if elsewhere else 1
    if ddp.rank == speaker:
        report.add(check.name, "FAIL", [(0, "did not answer: stopped, dead or stuck")], "")
        report.finish()
    return True


# ---------------------------------------------------------------- helpers of the checks
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
    on the CPU gloo has the same limit itself, see `cli`."""
    if ddp.device.type == "cpu":
        return
    done = torch.Event(ddp.device)
    done.record()
    deadline = time.monotonic() + GIVE_UP * args.timeout
    while not done.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end of a collective within {GIVE_UP * args.timeout:.0f} s")
        time.sleep(POLL)


def synchronize(ddp):
    if ddp.device.type != "cpu":
        torch.accelerator.synchronize(ddp.device)


# ---------------------------------------------------------------- what is printed
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


def majority(values):
    """(the most common value, ranks with another value). In a tie the first value wins."""
    usual = collections.Counter(values).most_common(1)[0][0]
    return usual, [rank for rank, value in enumerate(values) if value != usual]


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
    parser = Parser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--preflight", action="store_true", help="check ranks, devices, versions, run folder")
    add("--claims", action="store_true", help="the same, and training itself (default)")
    add("--work_dir", help="run folder of the training that you plan")
    add("--suspects", metavar="FILE", help="write the suspect hosts there, one per line")
    add("--timeout", type=float, default=60.0, help="seconds a check may take (default 60)")
    add("--slow", type=float, help="fraction of the median rate below which a device is slow "
                                   "(default 0.5; on CPUs, which others may use too, 0.1)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", "nccl", "gloo", "ccl", "xccl", "xpu"))
    add("--ipex", default="auto", choices=("auto", "on", "off"))
    add("--init_timeout", type=float, default=90.0, help="seconds to wait for all ranks")
    add("--nproc_per_node", type=int, help="start this many ranks on this host")
    add("--nnodes", type=int, help="number of hosts; give this command on each")
    add("--node_rank", type=int, help="number of this host, 0 to nnodes - 1")
    add("--master_addr", help="host of rank 0")
    add("--master_port", type=int, help="a free port of rank 0")
    args = parser.parse_args(argv)
    if not 0 < args.timeout < 1e9:   # true for nan too
        raise ValueError(f"--timeout is {args.timeout}, expected a number above 0 and below 1e9")
    if args.slow is not None and not 0 < args.slow < 1:
        raise ValueError(f"--slow is {args.slow}, expected a number between 0 and 1")
    return args


def start_ranks(args, argv):
    """Start the ranks of this host, if --nproc_per_node, --nnodes, ... ask for it."""
    given = (args.nproc_per_node, args.nnodes, args.node_rank, args.master_addr, args.master_port)
    if given.count(None) == len(given):
        return
    try:
        from training.launch import start_ranks_if_asked
    except ModuleNotFoundError:
        raise ValueError("--nproc_per_node and --nnodes need the folder training/ beside this "
                         "file. Start the ranks by torchrun, mpirun, mpiexec or srun") from None
    start_ranks_if_asked(args, argv)


def launched_rank():
    """The number of this rank, before the ranks have met; 0 if it is not known yet."""
    with contextlib.suppress(SetupError):
        return detect_launcher(dict(os.environ)).rank
    return 0


def refuse(problem):
    """Print a wrong argument on one rank, and exit."""
    if launched_rank() == 0:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_FIRST)
    sys.exit(USAGE)


def cli(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = read_arguments(argv)
        start_ranks(args, argv)
        if launched_rank() == 0:
            write_suspects(args, [])   # those of an earlier start must not stay
    except ValueError as problem:
        refuse(problem)
    limit = GIVE_UP * args.timeout   # of a collective
    if args.device != "cpu" and torch.accelerator.is_available():
        limit = args.timeout + OWN_END   # NCCL ends the rank then
    try:
        ddp = setup_ddp(args.device, args.backend, ipex=args.ipex, timeout=limit,
                        init_timeout=args.init_timeout)
    except RuntimeError as error:
        text = f"on {socket.gethostname()}: {error}".replace("\n", " ")
        print(line_of("set-up", "FAIL", [], text, []), flush=True)
        sys.exit(FAILED)
    with ddp:
        failed = run_checks(ddp, args)
    sys.exit(FAILED if failed else 0)


# ---------------------------------------------------------------- pytest
def test_two_ranks_of_this_cpu_pass_all_checks_and_leave_nothing(tmp_path):
    # --slow is small, as a busy machine may run one of two ranks much slower than the other.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
             "--local_addr=127.0.0.1", __file__, "--claims", "--device=cpu", "--slow=0.01",
             "--work_dir=run"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    done = subprocess.run(words, cwd=tmp_path, env=env | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed, 0 failed, 0 skipped" in done.stdout
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    cli()
