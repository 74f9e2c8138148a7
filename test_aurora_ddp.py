"""Does DDP training work on this machine? A check of two minutes, before a large job.

    mpirun -n 2 python test_aurora_ddp.py       all; also mpiexec, srun, torchrun, or python alone
    mpiexec -n 24 --ppn 12 python test_aurora_ddp.py --preflight --work_dir runs/mine
    srun python test_aurora_ddp.py --preflight --bandwidth --suspects bad_hosts
    pytest test_aurora_ddp.py                   the same, on two ranks of this machine's CPU

Start it exactly as the training. Rank 0 prints a line per check: PASS, FAIL or SKIP, name, result.
  --preflight  all ranks start; where they run (a table); each has its own device; all have the same
               code and versions; system limits are high enough; an all-reduce and a matrix product
               on each device are correct, and no device is slow; the last rank sees a file that
               rank 0 writes into the run folder (--work_dir)
  --claims     (the default) the pre-flight, and then: broadcasts arrive; gradients of a DDP model
               equal those of one process with all the data; weights are equal on all ranks after 20
               steps, also with IPEX if it is used; a saved checkpoint is loaded with equal bits
  --bandwidth  time and bus bandwidth of the all-reduce, 1 KiB to 256 MiB (--max_mib)

If single hosts are to blame, the last line is `suspect hosts: n1,n2`, in the form that Slurm's
--exclude takes. --suspects FILE writes them to FILE, one per line (empty: none), for
`grep -vwFf FILE $PBS_NODEFILE > hosts`. A failure of all hosts (no network) names none. Exit code
of every rank: 0 all passed, 3 a check failed, 2 wrong arguments. Reads the project's *.py files;
writes FILE, and temporary files .preflight-* in the run folder (or rank 0's temporary folder).

Ranks report through ddp_setup's store (TCP) and not by collectives. Those are what is tested here,
and on some devices they wait forever. So every check can say which ranks did not arrive.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import collections
import contextlib
import copy
import datetime
import functools
import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist

import ddp_setup
from ddp_setup import (GLOO_MAX_RANKS, abort, broadcast, detect_launcher, load_checkpoint,
                       optimize_with_ipex, print0, save_checkpoint, setup_ddp, unwrap_ddp, wrap_ddp)
from training.config import Parser
from training.command_line import add_launch_arguments
from training.launch import start_ranks_if_asked
from training.resume import hash_of

FAILED = 3                  # exit code: a check failed
USAGE = 2                   # exit code: wrong arguments
CODE = ("*.py", "sedd/*.py", "mpnn/*.py", "training/*.py")   # the files that all ranks must share
LEAST_SHARED = 1 << 27      # bytes free in /dev/shm
TABLE_ROWS = 32             # most ranks for which a table is printed
MOST_PROBLEMS = 6           # most problems printed per check
MOST_SENDERS = 9            # most ranks with a wrong share that a rank reports
REPEATS = 7                 # timed all-reduces per size
ITEMS = 12                  # data items per rank, in the claims
STEPS = 20                  # training steps, in the claims
CLOSE = 1e-4                # relative error allowed in gradients: float32 has 1e-6, TF32 1e-3

# Seconds. All ranks begin a check together, and each check has a limit, --timeout.
BANDWIDTH = 120.0           # added to the limit of the bandwidth check
REPORTS = 10.0              # rank 0 waits this long after the limit for reports, also of hangs
ANSWER = 40.0               # other ranks wait this long after the limit for rank 0's verdict
COLLECTIVES = 60.0          # time limit of collectives beyond all others: checks report first
SETTING_UP = 90.0           # end a setup that takes so much longer than --init_timeout
VISIBLE = 45.0              # wait for a file: NFS clients cache for 30 s that it does not exist
PRODUCTS = 0.5              # repeat the matrix product for so long
POLL = 0.01                 # between two looks for a file


class Check(NamedTuple):
    """What each rank measures, and how rank 0 judges the results.

    measure(row, ddp, args, answer): fills `row` with JSON values. row["problems"] (texts) or an
        exception mean that this rank failed; row["skip"] of rank 0 says why nothing is checked;
        row["in_collective"] is True while the rank may be waiting for others. answer: rank 0's row
        of the check before, plus "failed", the names of the checks that failed.
    judge(rows, args): on rank 0, returns more problems [(rank or None, text)], and the text to
        print: a line, perhaps with a table. Without `judge`, row["figure"] is this text.
    """
    name: str
    measure: Callable
    limit: float   # seconds
    judge: Callable | None = None


# ---------------------------------------------------------------- the checks before a run
def arrive(row, ddp, args, answer):
    """Only wait for all ranks."""


def judge_arrival(rows, args):
    waited = rows[0]["waited"]
    return [], f"all {len(rows)} rank(s) came, the last {waited:.2f} s after rank 0"


def describe_place(row, ddp, args, answer):
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = range(os.cpu_count() or 1)
    row.update(local=ddp.local_rank, device=str(ddp.device), cores=ranges(cores), name="cpu",
               free=None)
    if ddp.device.type != "cpu":
        module = getattr(torch, ddp.device.type)
        row["name"] = module.get_device_name(ddp.device)
        with contextlib.suppress(AttributeError, RuntimeError):   # missing for XPU in some torch
            row["free"] = module.mem_get_info(ddp.device)[0]


def judge_places(rows, args):
    per_host = collections.Counter(row["host"] for row in rows)
    names = ", ".join(sorted({row["name"] for row in rows}))
    figure = (f"{len(rows)} ranks on {len(per_host)} host(s), {span(per_host.values())} per host; "
              f"{names}")
    free = [gibibytes(row["free"]) for row in rows if row["free"] is not None]
    if free:
        figure += f"; {span(free)} GiB free"
    if len(rows) <= TABLE_ROWS:
        width = max(4, *(len(row["host"]) for row in rows))
        figure += f"\nrank  {'host':<{width}}  local  device    free GiB  cores"
        for rank, row in enumerate(rows):
            figure += (f"\n{rank:>4}  {row['host']:<{width}}  {row['local']:>5}  "
                       f"{row['device']:<8}  {gibibytes(row['free']):>8}  {row['cores']}")
    owners = {}         # {(host, local rank): the first rank that has it}
    problems = []
    for rank, row in enumerate(rows):
        owner = owners.setdefault((row["host"], row["local"]), rank)
        if owner != rank:
            problems.append((rank, f"has the same local rank as rank {owner}: {row['local']}"))
    return problems, figure


def list_versions(row, ddp, args, answer):
    folder = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=6)
    for pattern in CODE:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    row.update(python=platform.python_version(), torch=str(torch.__version__), folder=str(folder),
               code=digest.hexdigest())


def judge_versions(rows, args):
    problems = []
    figures = []
    for key in ("python", "torch", "code"):
        usual, others = majority([row[key] for row in rows])
        figures.append(f"{key} {usual}")
        for rank in others:
            files = f" (*.py in {rows[rank]['folder']})" if key == "code" else ""
            problems.append((rank, f"has {key} {rows[rank][key]}, most have {usual}{files}"))
    return problems, ", ".join(figures)


def check_limits(row, ddp, args, answer):
    """Check the limits that are most often too low: open files and shared memory."""
    row["problems"] = []
    with contextlib.suppress(ImportError):      # no such limits, nor /dev/shm, on this system
        import resource
        row["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        least = 2 * min(ddp.world_size, GLOO_MAX_RANKS) + 100   # gloo connects all pairs of ranks
        if row["files"] < least:
            row["problems"].append(f"may open {row['files']} files, expected {least} for "
                                   f"{ddp.world_size} ranks: ulimit -n {least}")
    with contextlib.suppress(OSError):
        row["shared"] = shutil.disk_usage("/dev/shm").free
        if row["shared"] < LEAST_SHARED:
            row["problems"].append("has less than 128 MiB free in /dev/shm, which DataLoader "
                                   "workers need: docker --shm-size, or num_workers 0")


def judge_limits(rows, args):
    files = [row["files"] for row in rows if "files" in row]
    shared = [row["shared"] for row in rows if "shared" in row]
    figures = []
    if files:
        figures.append(f"{min(files)} open files")
    if shared:
        figures.append(f"{min(shared) / 2**30:.1f} GiB of shared memory")
    return [], ", ".join(figures)


def sum_over_ranks(row, ddp, args, answer):
    """All-reduce a vector whose element i is i + 1 on rank i % n, and 0 on the others.

    The sum is exact in float32, and the index of a wrong element tells which rank sent it.
    """
    n = ddp.world_size
    values = torch.arange(1, 2**18 + 1, dtype=torch.float32)   # 1 MiB, > n
    if n == 1:
        row["skip"] = "one rank: nothing to sum over"
        return
    mine = torch.zeros_like(values)
    mine[ddp.rank::n] = values[ddp.rank::n]
    mine = mine.to(ddp.device)
    start = time.monotonic()
    with in_collective(row):
        dist.all_reduce(mine)   # not all_sum, which may use another backend for CPU tensors
        result = mine.cpu()
    row["seconds"] = time.monotonic() - start
    wrong = (result != values).nonzero().flatten()
    row.update(wrong=len(wrong), senders=(wrong % n).unique().tolist()[:MOST_SENDERS])


def judge_sum(rows, args):
    receivers = [rank for rank, row in enumerate(rows) if row["wrong"]]
    senders = sorted({sender for row in rows for sender in row["senders"]})
    if len(senders) < min(len(receivers), MOST_SENDERS):    # a few bad senders, not bad receivers
        problems = [(rank, "its share of the sum is wrong on other ranks") for rank in senders]
    else:
        problems = [(rank, f"received {rows[rank]['wrong']} wrong elements of {2**18}")
                    for rank in receivers]
    longest = max(row["seconds"] for row in rows)
    return problems, f"1 MiB, exact, first one in {longest * 1e3:.1f} ms"


def multiply(row, ddp, args, answer):
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
    start = time.monotonic()
    while len(times) < 3 or time.monotonic() - start < PRODUCTS:
        product, seconds = timed(lambda: torch.mm(a_there, b_there), ddp)
        times.append(seconds)
        changed += not torch.equal(product, first)
    wrong = int((product.cpu().double() @ v != a.double() @ (b.double() @ v)).sum())
    row.update(rate=2 * m**3 / min(times) / 1e9, device=str(ddp.device))
    if wrong or changed:
        row["problems"] = [f"{ddp.device}: {wrong} of {m} rows are wrong, and {changed} of "
                           f"{len(times)} repeats gave another product"]


def judge_products(rows, args):
    rates = [row["rate"] for row in rows]
    median = statistics.median_high(rates)   # of two rates the larger one, to find a slow second
    share = args.slow
    if share is None:
        share = 0.1 if rows[0]["device"] == "cpu" else 0.5
    problems = [(rank, f"{rows[rank]['device']}: {rate:,.0f} GFLOP/s, the median is {median:,.0f}")
                for rank, rate in enumerate(rates) if rate < share * median]
    return problems, f"exact, {span([round(rate) for rate in rates])} GFLOP/s (float32)"


def write_folder(row, ddp, args, answer):
    if args.work_dir is None:
        row["skip"] = "no --work_dir given"
    elif ddp.is_main:
        row["made"] = not os.path.exists(args.work_dir)
        os.makedirs(args.work_dir, exist_ok=True)
        row["token"] = secrets.token_hex(8)
        start = time.monotonic()
        Path(args.work_dir, f".preflight-{row['token']}").write_text(row["token"])
        taken = (time.monotonic() - start) * 1e3
        row["figure"] = f"rank 0 wrote a file in {args.work_dir} in {taken:.1f} ms"


def read_folder(row, ddp, args, answer):
    if "token" not in answer or "folder" in answer["failed"]:
        row["skip"] = "nothing was written"
    elif ddp.rank == ddp.world_size - 1:
        path = Path(args.work_dir, f".preflight-{answer['token']}")
        start = time.monotonic()
        limit = min(0.8 * args.timeout, VISIBLE)
        while not (path.exists() and path.read_text() == answer["token"]):
            if time.monotonic() > start + limit:
                raise FileNotFoundError(
                    f"what rank 0 wrote is not in {path.parent.absolute()} after {limit:.0f} s. "
                    "Expected a folder that all hosts share")
            time.sleep(POLL)
        row["figure"] = f"rank {ddp.rank} saw it after {(time.monotonic() - start) * 1e3:.0f} ms"


def reduce_all_sizes(row, ddp, args, answer):
    """Median time of the all-reduce of float32 zeros, per size in bytes."""
    if ddp.world_size == 1:
        row["skip"] = "one rank: nothing to reduce over"
        return
    if "all-reduce" in answer["failed"]:
        row["skip"] = "the all-reduce failed"
        return
    row.update(in_collective=True, bytes=[], seconds=[], backend=ddp.backend)
    size = 1024
    while size <= args.max_mib * 2**20:
        x = torch.zeros(size // 4, dtype=torch.float32, device=ddp.device)
        times = [timed(lambda: dist.all_reduce(x), ddp)[1] for _ in range(2 + REPEATS)]
        row["bytes"].append(size)
        row["seconds"].append(statistics.median(times[2:]))     # the first two warm up
        size *= 4


def judge_bandwidth(rows, args):
    n = len(rows)
    sizes = rows[0]["bytes"]
    best_bus = 0.0
    best_size = 0
    lines = [f"{'size':>9}  {'time [us]':>12}  {'bus [GB/s]':>10}  rank, if slower by a fifth"]
    for size, times in zip(sizes, zip(*(row["seconds"] for row in rows))):
        longest = max(times)
        bus = 2 * (n - 1) / n * size / longest / 1e9
        if bus >= best_bus:
            best_bus = bus
            best_size = size
        line = f"{binary_size(size):>9}  {longest * 1e6:>12.1f}  {bus:>10.4f}"
        if longest > 1.2 * statistics.median_low(times):
            rank = times.index(longest)
            line += f"  {rank} on {rows[rank]['host']}"
        lines.append(line)
    shortest = max(row["seconds"][0] for row in rows)
    figure = (f"{rows[0]['backend']}, up to {best_bus:.3g} GB/s at {binary_size(best_size)}, "
              f"{binary_size(sizes[0])} in {shortest * 1e6:.0f} us")
    return [], "\n".join([figure, *lines])


# ---------------------------------------------------------------- the claims: is training right?
def pass_messages(row, ddp, args, answer):
    """Broadcast from the last rank, not rank 0: a broadcast that ignores its source would fail."""
    last = ddp.world_size - 1
    if ddp.world_size == 1:
        row["skip"] = "one rank: nobody to talk to"
        return
    vector = torch.full((1024,), float(ddp.rank), device=ddp.device)
    message = {"text": "\u00e9", "list": [None, True, 0.5]}
    start = time.monotonic()
    with in_collective(row):
        numbers = broadcast(vector, ddp, last)
        received = broadcast(message if ddp.rank == last else None, ddp, last)
    row["figure"] = f"4 KiB and an object in {(time.monotonic() - start) * 1e3:.1f} ms"
    if received != message or not (numbers == last).all():
        row["problems"] = [f"received something else than rank {last} sent"]


def items_of(ranks):
    """(x (n, 16), y (n, 1)) float32 on the CPU: inputs and targets, ITEMS of each of `ranks`."""
    x = torch.cat([torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(rank))
                   for rank in ranks])
    return x, x[:, :1] * x[:, 1:2]


def prepare(row, ddp, with_ipex=False):
    """(DDP model, its optimizer, x, y), with this rank's items on its device.

    Ranks start with different weights, so that a check fails if DDP does not copy rank 0's.
    """
    torch.manual_seed(ddp.rank)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64),
                                torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = model.to(ddp.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with in_collective(row):
        if with_ipex:
            plain = model
            model, optimizer = optimize_with_ipex(model, optimizer, ddp)
            if model is plain:
                row["skip"] = f"not used here with --ipex {ddp.state.ipex}"
        model = wrap_ddp(model, ddp, bucket_cap_mb=0.01)   # several all-reduces per step
    return model, optimizer, *(t.to(ddp.device) for t in items_of([ddp.rank]))


def backward(model, x, y, row):
    """Gradient of the mean loss of the items; returns the loss."""
    with in_collective(row):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
    return loss.item()


def average_gradients(row, ddp, args, answer):
    """Compare DDP gradients with those of one process on the items of all ranks, in float64."""
    model, _, x, y = prepare(row, ddp)
    plain = copy.deepcopy(unwrap_ddp(model)).cpu().double()
    backward(plain, *(t.double() for t in items_of(range(ddp.world_size))), {})
    backward(model, x, y, row)
    errors = [(parameter.grad.cpu().double() - expected.grad).norm() / expected.grad.norm()
              for parameter, expected in zip(model.parameters(), plain.parameters())]
    row["gradient_error"] = torch.stack(errors).max().item()


def judge_gradients(rows, args):
    problems = [(rank, f"has a gradient {row['gradient_error']:.1g} off one process's")
                for rank, row in enumerate(rows) if not row["gradient_error"] <= CLOSE]   # or nan
    if len(problems) == len(rows) > 1:
        problems = [(None, f"every rank {problems[0][1]}")]
    return problems, (f"{len(rows) * ITEMS} items as in one process, within "
                      f"{max(row['gradient_error'] for row in rows):.1g}")


def take_steps(row, ddp, args, answer, ipex=False):
    model, optimizer, x, y = prepare(row, ddp, ipex)
    if "skip" in row:
        if args.ipex == "on":
            raise RuntimeError("asked for by --ipex on, and not used: see above")
        return
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, x, y, row))
        optimizer.step()
    row.update(first=losses[0], last=losses[-1], weights=hash_of(unwrap_ddp(model).state_dict()))


def judge_steps(rows, args):
    _, others = majority([row["weights"] for row in rows])
    first, last = (statistics.fmean(row[key] for row in rows) for key in ("first", "last"))
    problems = [(rank, f"has other weights after {STEPS} steps") for rank in others]
    if not last < first:
        problems.append((None, f"the loss went from {first:.3g} to {last:.3g}"))
    return problems, (f"equal weights on {len(rows)} rank(s) after {STEPS} steps, loss "
                      f"{first:.2g} -> {last:.2g}")


def save_and_load(row, ddp, args, answer):
    model, optimizer, x, y = prepare(row, ddp)
    backward(model, x, y, row)
    optimizer.step()
    saved = {"model": unwrap_ddp(model).state_dict(), "optimizer": optimizer.state_dict()}
    with in_collective(row):
        folder = os.path.abspath(args.work_dir or tempfile.gettempdir())
        folder = broadcast(os.path.join(folder, f".preflight-{secrets.token_hex(8)}"), ddp)
        path = os.path.join(folder, "last.pt")
        try:
            save_checkpoint(path, ddp, resumes=False, **saved)
            if ddp.is_main:
                row["figure"] = f"{os.path.getsize(path) // 2**10} KiB, equal bits"
            loaded = load_checkpoint(path, ddp)
        finally:
            if ddp.is_main:
                shutil.rmtree(folder, ignore_errors=True)
        # Forget the deleted checkpoint: otherwise a failure would advise to resume from it.
        ddp.state.checkpoint = ""
        ddp_setup.tell_guard(ddp, checkpoint="")
    row["problems"] = []
    for key in saved:
        try:
            torch.testing.assert_close(loaded[key], saved[key], rtol=0, atol=0, check_device=False)
        except AssertionError:
            row["problems"].append(f"loaded another {key} than was saved")


def checks_for(args):
    """List of the Checks that the options ask for, in order."""
    claims = args.claims or not (args.preflight or args.bandwidth)
    limit = args.timeout
    chosen = []
    if args.preflight or claims:
        chosen += [Check("barrier", arrive, limit, judge_arrival),
                   Check("place", describe_place, limit, judge_places),
                   Check("versions", list_versions, limit, judge_versions),
                   Check("limits", check_limits, limit, judge_limits),
                   Check("all-reduce", sum_over_ranks, limit, judge_sum),
                   Check("matmul", multiply, limit, judge_products),
                   Check("folder", write_folder, limit),
                   Check("visible", read_folder, limit)]
    if claims:
        chosen += [Check("messages", pass_messages, limit),
                   Check("gradients", average_gradients, limit, judge_gradients),
                   Check("steps", take_steps, limit, judge_steps),
                   Check("ipex", functools.partial(take_steps, ipex=True), limit, judge_steps),
                   Check("checkpoint", save_and_load, limit)]
    if args.bandwidth:
        chosen += [Check("bandwidth", reduce_all_sizes, limit + BANDWIDTH, judge_bandwidth)]
    return chosen


# ---------------------------------------------------------------- running: every wait has a limit
def in_thread(limit, ddp, function, *arguments):
    """Call function(*arguments) in a thread, and wait for it for at most `limit` seconds.

    Returns: (its error in one line, or ""; the thread).
    """
    error = ""

    def work():
        nonlocal error
        try:
            if ddp.device.type != "cpu":   # the current device is a setting of each thread
                getattr(torch, ddp.device.type).set_device(ddp.device)
            function(*arguments)
        except Exception as e:   # any error is reported, with the rank
            first_line = (str(e).splitlines() or [""])[0]
            error = f"{type(e).__name__}: {first_line[:300]}"

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    return error, thread


def measure_row(check, ddp, args, answer):
    """The row that a check's `measure` fills. If it raises or hangs, row["error"] says so."""
    row = {}
    error, thread = in_thread(check.limit, ddp, check.measure, row, ddp, args, answer)
    if thread.is_alive():       # it may still write into `row`
        return {**row, "hangs": True, "error": f"did not end within {check.limit:.0f} s, in "
                                               f"{innermost_function(thread)}"}
    if error:
        row["error"] = error
    return row


def gather_rows(check, row, ddp, deadline):
    """On rank 0, the rows of all ranks, in order; None for a rank that is silent at `deadline`."""
    if ddp.world_size == 1:
        return [row]
    store = ddp.state.store
    limit = deadline - time.monotonic()
    keys = [f"check/{check.name}/{rank}" for rank in range(ddp.world_size)]
    store.set(keys[0], json.dumps(row))
    in_thread(limit, ddp, store.wait, keys, datetime.timedelta(seconds=limit))
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def fetch_answer(check, row, ddp, deadline):
    """On the other ranks: send the row to rank 0, and wait for rank 0's answer to this check."""
    store = ddp.state.store
    limit = deadline - time.monotonic()
    key = f"check/{check.name}/answer"
    answer = None

    def fetch():
        nonlocal answer
        store.set(f"check/{check.name}/{ddp.rank}", json.dumps(row))
        store.wait([key], datetime.timedelta(seconds=limit))
        answer = json.loads(store.get(key))

    in_thread(limit, ddp, fetch)   # in a thread: a store on a suspended rank 0 never answers
    if answer is None:   # secondary: if rank 0 has died, its own guard's message goes first
        abort(ddp, f"check {check.name}: rank 0 on {ddp.state.hosts[0]} did not answer", FAILED,
              secondary=True)
    return answer


def blame(rows, limit):
    """Which ranks did not report, hang or raised an error.

    A rank that hangs in a collective may only be waiting for others. So it is blamed only if no
    other rank is silent, hangs elsewhere or raised an error.
    Returns: problems [(rank, text)] or, if all ranks raised the same error, [(None, text)].
    """
    errors = {}         # {rank: what is wrong with it}
    outside = []        # ranks that do not wait for others
    raised = []
    for rank, row in enumerate(rows):
        if row is None:
            errors[rank] = f"did not come within {limit:.0f} s"
            outside.append(rank)
        elif "error" in row:
            errors[rank] = row["error"]
            if not row.get("in_collective"):
                outside.append(rank)
            if "hangs" not in row:
                raised.append(rank)
    on_all = len(errors) == len(rows) > 1 and not any(map(is_lost, rows))
    if on_all and len(set(errors.values())) == 1:
        return [(None, f"on every rank {errors[0]}")]
    return [(rank, errors[rank]) for rank in outside or raised or errors]


def is_lost(row):
    """Is a rank silent or stuck, or did it raise an error in a collective where others wait?"""
    if row is None or "hangs" in row:
        return True
    return "error" in row and row.get("in_collective", False)


def conclude(check, rows, args):
    """(PASS, FAIL or SKIP, problems, figure) of a check, on rank 0."""
    problems = blame(rows, check.limit)
    if problems:
        return "FAIL", problems, ""
    if "skip" in rows[0]:
        return "SKIP", [], rows[0]["skip"]
    figure = ""
    for rank, row in enumerate(rows):
        problems += [(rank, text) for text in row.get("problems", ())]
        figure = figure or row.get("figure", "")
    if check.judge:
        more, figure = check.judge(rows, args)
        problems += more
    return "FAIL" if problems else "PASS", problems, figure


@dataclass
class Found:
    """What the checks have shown until now; `failed` on every rank, the rest on rank 0."""
    failed: list = field(default_factory=list)      # names of the checks
    outcomes: list = field(default_factory=list)    # PASS, FAIL or SKIP of each
    suspects: list = field(default_factory=list)    # hosts
    written: dict = field(default_factory=dict)     # row of the check `folder`, if it wrote a file


def run_checks(ddp, args):
    """Run the chosen checks; rank 0 prints their lines, and the suspect hosts.

    If a rank is lost, all ranks exit here with code 3.
    Returns, on every rank: names of the checks that failed.
    """
    host = ddp.host
    if ddp.launcher == "Slurm step":   # the name that Slurm's --exclude takes
        host = os.environ.get("SLURMD_NODENAME") or host
    found = Found()
    answer = {"failed": found.failed}
    for check in checks_for(args):
        start = time.monotonic()
        row = {"host": host, **measure_row(check, ddp, args, answer)}
        if ddp.is_main:
            answer = lead_check(check, row, found, ddp, args, start)
        else:
            answer = fetch_answer(check, row, ddp, start + check.limit + ANSWER)
    if ddp.is_main:
        finish(ddp, args, found)
    return answer["failed"]


def lead_check(check, row, found, ddp, args, start):
    """On rank 0, wait for the other ranks' rows, judge and print, and answer them.

    Args: row: rank 0's. start: of the check, by time.monotonic. Changes `found`.
    Returns: the answer.
    """
    rows = gather_rows(check, row, ddp, start + check.limit + REPORTS)
    rows[0]["waited"] = time.monotonic() - start
    status, problems, figure = conclude(check, rows, args)
    hosts = [known["host"] if known else of_setup
             for known, of_setup in zip(rows, ddp.state.hosts or [row["host"]])]
    print0(ddp, check_lines(check.name, status, problems, figure, hosts))
    found.outcomes.append(status)
    if status == "FAIL":
        found.failed.append(check.name)
    if "made" in row:
        found.written = row
    guilty = sorted({rank for rank, _ in problems} - {None})
    # If all ranks fail, no single host is to blame. If rank 0 cannot write, the path may be.
    cannot_write = check.name == "folder" and guilty == [0] and not is_lost(rows[0])
    if len(guilty) < ddp.world_size and not cannot_write:
        for rank in guilty:
            if hosts[rank] not in found.suspects:
                found.suspects.append(hosts[rank])
    if any(map(is_lost, rows)):
        finish(ddp, args, found)
        abort(ddp, f"check {check.name}: ranks failed, are missing or stuck, see above; all "
                   f"end here. Suspect hosts: {','.join(found.suspects) or 'none alone'}", FAILED,
              retry=False)   # the other ranks are still waiting for the answer
    answer = {**row, "failed": found.failed}
    if ddp.world_size > 1:
        ddp.state.store.set(f"check/{check.name}/answer", json.dumps(answer))
    return answer


def finish(ddp, args, found):
    """On rank 0, clean up the run folder, print the outcome, and write --suspects."""
    with contextlib.suppress(OSError):   # the folder could not be written
        if "token" in found.written:
            os.remove(os.path.join(args.work_dir, f".preflight-{found.written['token']}"))
        if found.written.get("made"):
            os.rmdir(args.work_dir)
    outcomes = found.outcomes
    print0(ddp, f"{outcomes.count('PASS')} passed, {outcomes.count('FAIL')} failed, "
                f"{outcomes.count('SKIP')} skipped")
    if found.suspects:
        print(f"suspect hosts: {','.join(found.suspects)}", flush=True)
    if args.suspects:
        try:
            Path(args.suspects).write_text("".join(f"{host}\n" for host in found.suspects))
        except OSError as error:
            abort(ddp, f"cannot write --suspects {args.suspects}: {error.strerror}", USAGE)


def check_lines(name, status, problems, figure, hosts):
    """What rank 0 prints about a check: a line, wrapped at 80 columns, and perhaps a table."""
    figure, *table = figure.split("\n")
    if problems:
        texts = []
        for rank, text in problems[:MOST_PROBLEMS]:
            texts.append(text if rank is None else f"rank {rank} on {hosts[rank]} {text}")
        if len(problems) > MOST_PROBLEMS:
            texts.append(f"and {len(problems) - MOST_PROBLEMS} more")
        figure = "; ".join(texts)
    line = textwrap.fill(f"{status}  {name:<10}  {figure}", 80, subsequent_indent=" " * 18,
                         break_long_words=False, break_on_hyphens=False)
    return "\n".join([line, *("      " + row for row in table)])


# ---------------------------------------------------------------- helpers
@contextlib.contextmanager
def in_collective(row):
    """Mark that ranks may wait for each other here. After an exception the mark stays."""
    row["in_collective"] = True
    yield
    row["in_collective"] = False


def innermost_function(thread):
    """The function of this file, with line number, that a thread is in."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_name} (line {frame.f_lineno})"


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


def gibibytes(size):
    return "?" if size is None else round(size / 2**30, 1)


def binary_size(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def timed(function, ddp):
    """(result of function(), seconds it took, including its work on the device)."""
    def wait():
        if ddp.device.type != "cpu":
            getattr(torch, ddp.device.type).synchronize(ddp.device)

    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return result, time.perf_counter() - start


# ---------------------------------------------------------------- command line
def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--preflight", action="store_true",
        help="check ranks, devices, versions, results, run folder")
    add("--claims", action="store_true", help="the same, and training itself (default)")
    add("--bandwidth", action="store_true", help="measure the all-reduce")
    add("--work_dir", help="run folder of the training that you plan")
    add("--suspects", metavar="FILE", help="write the suspect hosts there, one per line")
    add("--timeout", type=float, default=60.0, help="seconds a check may take (default 60)")
    add("--slow", type=float, help="fraction of the median rate below which a device is slow "
                                   "(default 0.5; on CPUs, which others may use too, 0.1)")
    add("--max_mib", type=int, default=256, help="largest all-reduce in MiB (default 256)")
    add_launch_arguments(parser)
    parser.set_defaults(init_timeout=90.0)
    return parser


def read_arguments(argv):
    args = make_parser().parse_args(argv)
    for name in ("timeout", "max_mib"):
        if not 0 < getattr(args, name) < 1e9:   # true for nan too
            raise ValueError(f"command line: --{name} is {getattr(args, name)}, expected a number "
                             "above 0 and below 1e9")
    if args.slow is not None and not 0 < args.slow < 1:
        raise ValueError(f"command line: --slow is {args.slow}, expected a number between 0 and 1")
    start_ranks_if_asked(args, argv)
    return args


def fail_setup(text):
    print(check_lines("set-up", "FAIL", [], text.replace("\n", " "), []), flush=True)


def end_hung_setup(seconds):
    """End a rank whose setup hangs in a device's backend, outside Python."""
    with contextlib.suppress(RuntimeError):
        if detect_launcher(os.environ).rank == 0:
            fail_setup(f"did not end within {seconds:.0f} s")
    os._exit(FAILED)


def cli(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    problem = None
    try:
        args = read_arguments(argv)
    except (ValueError, RuntimeError) as error:   # printed below, once for all ranks
        problem = error
        args = make_parser().parse_args(["--device", "cpu"])
    # Empty the file now, so that no old suspects stay if this call is interrupted.
    with contextlib.suppress(OSError, ddp_setup.SetupError):   # these are reported later
        if args.suspects and detect_launcher(os.environ).rank == 0:
            Path(args.suspects).write_text("")
    limit = args.init_timeout + SETTING_UP
    timer = threading.Timer(limit, end_hung_setup, (limit,))
    timer.daemon = True
    timer.start()
    try:
        ddp = setup_ddp(args.device, args.backend, ranks=args.ranks, ipex=args.ipex,
                        timeout=args.timeout + BANDWIDTH + COLLECTIVES,
                        init_timeout=args.init_timeout)
    except RuntimeError as error:
        if problem:   # report the error in the arguments, which came first
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(USAGE)
        fail_setup(str(error))
        sys.exit(FAILED)
    timer.cancel()
    ddp.state.patience = args.timeout   # cleanup_ddp then names the ranks that are missing
    with ddp:
        if problem:
            print0(ddp, f"error: {problem}", file=sys.stderr)
            code = USAGE
        elif run_checks(ddp, args):
            code = FAILED
        else:
            code = 0
    sys.exit(code)


# ---------------------------------------------------------------- pytest
def test_two_ranks_of_this_cpu_pass_all_checks_and_leave_nothing(tmp_path):
    # --slow is small, as a busy machine may run one of two ranks much slower than the other.
    words = [sys.executable, __file__, "--nproc_per_node=2", "--claims", "--bandwidth",
             "--device=cpu", "--max_mib=1", "--slow=0.01", "--work_dir=run"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    done = subprocess.run(words, cwd=tmp_path, env=env | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr      # that of the launcher
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    cli()
