"""Is this machine right, in parallel? About two minutes before a large allocation is spent.

    mpirun -n 2 python test_aurora_ddp.py                 everything; also mpiexec, srun, torchrun, or python alone
    mpiexec -n 24 --ppn 12 python test_aurora_ddp.py --preflight --work_dir runs/mine --suspects bad_hosts
    srun python test_aurora_ddp.py --preflight --bandwidth
    pytest test_aurora_ddp.py                             the same checks, on two ranks of this machine's CPU

Start it exactly as the training. Rank 0 prints one line per check: PASS, FAIL or SKIP, its name, its figure.
  --preflight  do all ranks come; where are they (a table); has each a device of its own; do all run the same code and
               versions; are the limits of the system wide enough; is a sum over ranks and a product on each device
               right, and none slow; does the last rank see what rank 0 writes into the run folder (--work_dir)
  --claims     (also without options) the pre-flight, and then: do messages arrive, and does a barrier hold all; are the
               gradients of a wrapped model, in one piece and accumulated, those of one process with all the data; are
               the weights equal on all ranks after 20 steps, and with IPEX where it is installed; does the sampler
               deal each item once; does a checkpoint come back, bit by bit; is nothing left after cleaning up
  --bandwidth  time and bus bandwidth of the all-reduce, 1 KiB to 256 MiB (--max_mib)

Where hosts are to blame, the last line is `suspect hosts: n1,n2`, as Slurm's --exclude takes it; --suspects FILE holds
one per line (empty: none), for `grep -vwFf FILE $PBS_NODEFILE > hosts`. What cannot be blamed on one host (no network)
names none. Exit code of every rank: 0 all passed, 3 a check failed, 2 wrong arguments.
Reads the project's *.py files; writes and removes .preflight-* in the run folder (without one: the temporary folder of
rank 0), and FILE.

Ranks report through the store of ddp_setup, one request each, and not by collectives: those are what is in doubt here,
and on some devices they wait without end. So every check says who did not come, at any number of ranks.
"""
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()

import argparse
import collections
import contextlib
import copy
import datetime
import faulthandler
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_setup
from ddp_setup import (GLOO_MAX_RANKS, abort, barrier, broadcast, cleanup_ddp, ddp_sampler, detect_launcher,
                       gradient_sync, load_checkpoint, optimize_with_ipex, print0, save_checkpoint,
                       setup_ddp, unwrap_ddp, wrap_ddp)
from train_loop import add_launch_arguments, check_in_sync, hand_over

FAILED, USAGE = 3, 2        # exit codes
EXPORTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
LEAST_SHARED = 1 << 27      # bytes free in /dev/shm
TABLE_ROWS = 32             # up to this many ranks the table of ranks is printed: some sites choke on more output
COLLECTIVE = "collective"   # what row["at"] says while this rank can be held up by others
ITEMS, STEPS = 12, 20       # of each rank, in the claims
CLOSE = 1e-4                # relative, for gradients: float32 comes to 1e-6, TF32 and bfloat16 only to 1e-3


# ---------------------------------------------------------------- the checks: what each rank measures
# measure(row, ddp, args, told) fills `row` (plain values); raising is a failure of this rank. told: rank 0's row of
# the check before, and "failed", the names of the checks that failed.
# judge(rows, args), on rank 0: (problems, figure, lines). problems: [(rank or None, text)], empty for PASS.
def judge_arrival(rows, args):
    return [], f"all {len(rows)} rank(s) came, the last {rows[0]['waited']:.2f} s after rank 0", []


def place(row, ddp, args, told):
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    row.update(local=ddp.local_rank, device=str(ddp.device), cores=ranges(cores), name="cpu", free=None)
    if ddp.device.type == "cpu":
        with contextlib.suppress(OSError, StopIteration):   # not Linux
            with open("/proc/meminfo") as f:
                row["free"] = int(next(line for line in f if line.startswith("MemAvailable")).split()[1]) * 1024
        return
    module = getattr(torch, ddp.device.type)
    row["name"] = module.get_device_name(ddp.device)
    with contextlib.suppress(AttributeError, RuntimeError):   # XPU: not in every torch, not on every driver
        row["free"] = module.mem_get_info(ddp.device)[0]


def judge_places(rows, args):
    problems = twice(rows, "local", "local rank")
    per_host = collections.Counter(row["host"] for row in rows)
    free = [row["free"] for row in rows if row["free"] is not None]
    figure = (f"{len(rows)} ranks on {len(per_host)} host(s), {span(per_host.values())} per host; "
              f"{', '.join(sorted({row['name'] for row in rows}))}"
              + (f"; {span([gib(f) for f in free])} GiB free" if free else ""))
    lines = []
    if len(rows) <= TABLE_ROWS:
        width = max(4, *(len(row["host"]) for row in rows))
        lines = [f"rank  {'host':<{width}}  local  device    free GiB  cores"]
        lines += [f"{r:>4}  {row['host']:<{width}}  {row['local']:>5}  {row['device']:<8}  {gib(row['free']):>8}  "
                  f"{row['cores']}" for r, row in enumerate(rows)]
    return problems, figure, lines


def identify_device(row, ddp, args, told):
    row["id"] = ddp_setup._device_id(ddp.device)
    if row["id"] is None:
        row["skip"] = "all ranks are on the CPU"


def judge_devices(rows, args):
    return twice(rows, "id", "device"), f"{len(rows)} different device(s)", []


def list_versions(row, ddp, args, told):
    folder = Path(__file__).resolve().parent
    row.update(python=platform.python_version(), torch=str(torch.__version__),
               ddp_setup=hash_of([Path(ddp_setup.__file__)]), code=hash_of(sorted(folder.glob("*.py"))),
               folder=str(folder))


def judge_versions(rows, args):
    problems, figure = [], []
    for what in ("python", "torch", "ddp_setup", "code"):
        common, others = odd([row[what] for row in rows])
        figure += [f"{what} {common}"] * (what != "ddp_setup")   # one line
        problems += [(r, f"has {what} {rows[r][what]}, most have {common}" + (
            f" (*.py in {rows[r]['folder']})" if what == "code" else "")) for r in others]
    return problems, ", ".join(figure), []


def read_limits(row, ddp, args, told):
    """What runs out first: open files, shared memory, the length of the name of a Unix socket."""
    with contextlib.suppress(ImportError):
        import resource
        row["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError, AttributeError):
        disk = os.statvfs("/dev/shm")
        row["shared"] = disk.f_bavail * disk.f_frsize
    row.update(temporary=tempfile.gettempdir(), wished=os.environ.get("TMPDIR", ""))


def judge_limits(rows, args):
    problems, least = [], 2 * min(len(rows), GLOO_MAX_RANKS) + 100   # gloo joins all with all
    for rank, row in enumerate(rows):
        socket_name = os.path.join(row["temporary"], "pymp-xxxxxxxx", "listener-xxxxxxxx")
        wished = row["wished"] and os.path.realpath(row["wished"])
        for wrong, text in (
                (row.get("files", least) < least,
                 f"may open {row.get('files')} files, expected {least} for {len(rows)} ranks: ulimit -n {least}"),
                (row.get("shared", LEAST_SHARED) < LEAST_SHARED,
                 "has less than 128 MiB free in /dev/shm, which DataLoader workers need: docker --shm-size, or "
                 "num_workers 0"),
                (wished and wished != os.path.realpath(row["temporary"]),
                 f"cannot use TMPDIR={row['wished']}; {row['temporary']} is used"),
                (len(socket_name) > 107,
                 f"has too long a temporary folder for Unix sockets, {row['temporary']}: export TMPDIR=/tmp")):
            problems += [(rank, text)] * bool(wrong)
    files = [row["files"] for row in rows if "files" in row]
    shared = [row["shared"] for row in rows if "shared" in row]
    return problems, ", ".join([f"{min(files)} open files"] * bool(files) + [
        f"{min(shared) / 2**30:.1f} GiB of shared memory"] * bool(shared)), []


def sum_over_ranks(row, ddp, args, told):
    """Element i is i + 1 on rank i % n and 0 elsewhere: exact in float32, and a wrong element names its rank."""
    n, values = ddp.world_size, torch.arange(1, 2**18 + 1, dtype=torch.float32)   # 1 MiB; n must not be larger
    if n == 1:
        row["skip"] = "one rank: nothing to sum over"
        return
    mine = torch.zeros_like(values)
    mine[ddp.rank::n] = values[ddp.rank::n]
    mine = mine.to(ddp.device)
    start = time.monotonic()
    with together(row):
        dist.all_reduce(mine)   # not all_sum: that may send what is on a CPU by another backend
        result = mine.cpu()
    row["seconds"] = time.monotonic() - start
    wrong = (result != values).nonzero().flatten()
    row.update(wrong=len(wrong), senders=(wrong % n).unique().tolist()[:9])


def judge_sum(rows, args):
    got, n = [r for r, row in enumerate(rows) if row["wrong"]], len(rows)
    senders = collections.Counter(s for r in got for s in rows[r]["senders"])
    if not got:
        problems = []
    elif len(got) <= n // 2:   # not all have the same sum
        problems = [(r, f"received {rows[r]['wrong']} wrong elements of {2**18}, others none") for r in got]
    elif len(senders) < min(n, 9):
        problems = [(s, f"its share of the sum is wrong on {count} rank(s)") for s, count in senders.items()]
    else:
        problems = [(None, f"{len(got)} rank(s) received a wrong sum, with the shares of many ranks wrong")]
    return problems, f"1 MiB, exact, first one in {max(row['seconds'] for row in rows) * 1e3:.1f} ms", []


def multiply(row, ddp, args, told):
    """Small integers: the product is exact in float32 and TF32. (A B) v = A (B v) in float64 on the CPU checks it, as
    any single wrong element changes it (Freivalds 1977). Its rate is the best of half a second's repeats."""
    m, generator = (384 if ddp.device.type == "cpu" else 4096), torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (m, m), generator=generator, dtype=torch.float32) for _ in range(2))
    v = torch.randint(1, 9, (m,), generator=generator, dtype=torch.float64)
    there_a, there_b = a.to(ddp.device), b.to(ddp.device)
    first, times, changed, start = torch.mm(there_a, there_b), [], 0, time.monotonic()
    while len(times) < 3 or time.monotonic() - start < 0.5:
        synchronize(ddp)
        begin = time.perf_counter()
        product = torch.mm(there_a, there_b)
        synchronize(ddp)
        times.append(time.perf_counter() - begin)
        changed += not torch.equal(product, first)
    wrong = int((product.cpu().double() @ v != a.double() @ (b.double() @ v)).sum())
    row.update(rate=2 * m**3 / min(times) / 1e9, wrong=wrong, changed=changed, repeats=len(times), rows=m,
               device=str(ddp.device))


def judge_products(rows, args):
    problems = [(r, f"{row['device']}: {row['wrong']} of {row['rows']} rows are wrong, and {row['changed']} of "
                    f"{row['repeats']} repeats gave another product") for r, row in enumerate(rows)
                if row["wrong"] or row["changed"]]
    rates = [row["rate"] for row in rows]
    problems += [(r, f"{rows[r]['device']}: {rates[r]:,.0f} GFLOP/s, the median is {middle:,.0f}")
                 for r, middle in low(rates, args.slow or (0.1 if rows[0]["device"] == "cpu" else 0.5))]
    return problems, f"exact, {span([round(rate) for rate in rates])} GFLOP/s (float32)", []


def write_folder(row, ddp, args, told):
    if args.work_dir is None:
        row["skip"] = "no --work_dir given"
    elif ddp.is_main:
        row["made"] = not os.path.exists(args.work_dir)
        os.makedirs(args.work_dir, exist_ok=True)
        start, row["token"] = time.monotonic(), secrets.token_hex(8)
        path = probe(args, row["token"])
        path.with_suffix(".tmp").write_text(row["token"])
        path.with_suffix(".tmp").rename(path)
        row["seconds"] = time.monotonic() - start


def judge_written(rows, args):
    return [], f"rank 0 wrote and renamed a file in {args.work_dir} in {rows[0]['seconds'] * 1e3:.1f} ms", []


def read_folder(row, ddp, args, told):
    if "token" not in told:
        row["skip"] = "nothing was written"
    elif ddp.rank == ddp.world_size - 1:
        path, start = probe(args, told["token"]), time.monotonic()
        limit = min(0.8 * args.timeout, 45.0)   # NFS clients may believe for half a minute that a file is not there
        while not (path.exists() and path.read_text() == told["token"]):
            if time.monotonic() - start > limit:
                raise FileNotFoundError(f"what rank 0 wrote is not in {path.parent.absolute()} after {limit:.0f} s. "
                                        f"Expected a folder that all hosts share")
            time.sleep(0.02)
        row["seconds"] = time.monotonic() - start


def judge_read(rows, args):
    return [], f"rank {len(rows) - 1} saw it after {rows[-1]['seconds'] * 1e3:.0f} ms", []


def reduce_all_sizes(row, ddp, args, told):
    """Median time of the all-reduce of float32 zeros, per size in bytes; each size takes about 2 s at most."""
    if ddp.world_size == 1 or "all-reduce" in told["failed"]:
        row["skip"] = "one rank: nothing to reduce over" if ddp.world_size == 1 else "the all-reduce failed"
        return
    row.update(at=COLLECTIVE, bytes=[], seconds=[], backend=ddp.backend)
    size = 1024
    while size <= args.max_mib * 2**20:
        x, times, repeats = torch.zeros(size // 4, dtype=torch.float32, device=ddp.device), [], args.repeats
        while len(times) < 2 + repeats:   # two to warm up
            synchronize(ddp)
            start = time.perf_counter()
            dist.all_reduce(x)
            synchronize(ddp)
            times.append(time.perf_counter() - start)
            if len(times) == 2:   # rank 0 decides: all must do the same number
                repeats = broadcast(max(1, min(args.repeats, int(2.0 / times[1]))), ddp)
        row["bytes"].append(size)
        row["seconds"].append(statistics.median(times[2:]))
        size *= 4


def judge_bandwidth(rows, args):
    n, best = len(rows), (0.0, 0)
    lines = [f"{'size':>9}  {'time [us]':>12}  {'bus [GB/s]':>10}  slowest rank, if by a fifth"]
    for k, size in enumerate(rows[0]["bytes"]):
        times = [row["seconds"][k] for row in rows]
        slowest = max(range(n), key=times.__getitem__)
        bus = 2 * (n - 1) / n * size / times[slowest] / 1e9
        best = max(best, (bus, size))
        who = f"{slowest} on {rows[slowest]['host']}" if times[slowest] > 1.2 * statistics.median_low(times) else ""
        lines.append(f"{in_words(size):>9}  {times[slowest] * 1e6:>12.1f}  {bus:>10.4f}  {who}".rstrip())
    return [], (f"{rows[0]['backend']}, up to {best[0]:.3g} GB/s at {in_words(best[1])}, "
                f"{in_words(rows[0]['bytes'][0])} in {max(row['seconds'][0] for row in rows) * 1e6:.0f} us"), lines


# ---------------------------------------------------------------- the claims: is what is trained here right?
def pass_messages(row, ddp, args, told):
    """From the last rank, as most defaults point to rank 0. A counter tells who had come when a barrier let go."""
    n, store = ddp.world_size, ddp.state.store
    if n == 1:
        row["skip"] = "one rank: nobody to talk to"
        return
    values = [[n - 1.0] * 1024, {"text": "\u00e9", "list": [None, True, 0.5]}]
    mine, start = torch.full((1024,), float(ddp.rank), device=ddp.device), time.monotonic()
    with together(row):
        got = [broadcast(mine, ddp, n - 1).tolist(), broadcast(values[1] if ddp.rank == n - 1 else None, ddp, n - 1)]
    row.update(seconds=time.monotonic() - start, wrong=got != values)
    if ddp.rank == n - 1:
        time.sleep(0.1)   # the others must wait for it
    store.add("check/at the barrier", 1)
    start = time.monotonic()
    with together(row):
        barrier(ddp, args.timeout)
    row.update(late=n - store.add("check/at the barrier", 0), waited=time.monotonic() - start)


def judge_messages(rows, args):
    problems = [(r, f"received something else than rank {len(rows) - 1} sent")
                for r, row in enumerate(rows) if row["wrong"]]
    problems += [(r, f"left the barrier before {row['late']} rank(s) had come")
                 for r, row in enumerate(rows) if row["late"]]
    return problems, (f"4 KiB and an object in {max(row['seconds'] for row in rows) * 1e3:.1f} ms, barrier in "
                      f"{rows[-1]['waited'] * 1e3:.1f} ms"), []


def items_of(ranks):
    """(x (n, 16), y (n, 1)) float32 on the CPU: the ITEMS items of each of `ranks`."""
    x = torch.cat([torch.randn(ITEMS, 16, generator=torch.Generator().manual_seed(r)) for r in ranks])
    return x, x[:, :1] * x[:, 1:2]


def prepare(row, ddp, args=None):
    """(wrapped model, its optimizer, x, y), the items of this rank on its device. The weights differ between ranks:
    wrapping has to make them rank 0's. args: with IPEX, as they say."""
    torch.manual_seed(ddp.rank)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64),
                                torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(ddp.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with together(row):
        if args is not None:
            present = broadcast(importlib.util.find_spec("intel_extension_for_pytorch") is not None, ddp)
            if present and args.ipex == "auto":   # tried where it is, needed or not
                ddp.state.ipex = "on"
            given, (model, optimizer) = model, optimize_with_ipex(model, optimizer, ddp)
            ddp.state.ipex = args.ipex
            if model is given:
                row["skip"] = f"not used here with --ipex {args.ipex}" + ("" if present else ", and not installed")
        model = wrap_ddp(model, ddp, bucket_cap_mb=0.01)   # small buckets: several all-reduces per step
    return model, optimizer, *(t.to(ddp.device) for t in items_of([ddp.rank]))


def backward(model, x, y, row, pieces=1):
    """Gradient of the mean loss of the items, in `pieces` micro-steps of which only the last averages over ranks.
    Returns the loss."""
    total = 0.0
    for k, (a, b) in enumerate(zip(x.chunk(pieces), y.chunk(pieces))):
        with together(row), gradient_sync(model, last=k == pieces - 1):
            loss = ((model(a) - b) ** 2).sum() / len(x)
            loss.backward()
        total += loss.item()
    return total


def plain_gradients(model, ranks, device="cpu", dtype=torch.float64):
    """Those of one process with the items of all `ranks`."""
    bare = copy.deepcopy(unwrap_ddp(model)).to(device, dtype)
    backward(bare, *(t.to(device, dtype) for t in items_of(ranks)), {})
    return [p.grad for p in bare.parameters()]


def distance(gradients, right):
    """The largest relative one of a parameter."""
    return torch.stack([(g.cpu().double() - r).norm() / r.norm() for g, r in zip(gradients, right)]).max().item()


def average_gradients(row, ddp, args, told, pieces=1):
    model, _, x, y = prepare(row, ddp)
    row["own"] = distance(plain_gradients(model, [ddp.rank], ddp.device, torch.float32),
                          plain_gradients(model, [ddp.rank]))
    backward(model, x, y, row, pieces)
    row["mean"] = distance([p.grad for p in model.parameters()], plain_gradients(model, range(ddp.world_size)))
    row["pieces"] = pieces


def judge_gradients(rows, args):
    own, mean = ([r for r, row in enumerate(rows) if not row[key] <= CLOSE] for key in ("own", "mean"))   # or nan
    problems = [(r, f"computes its own gradient {rows[r]['own']:.1g} off") for r in own] or [
        (r, f"has a mean over ranks {rows[r]['mean']:.1g} off one process's gradient") for r in mean]
    if not own and len(mean) == len(rows) > 1:
        problems = [(None, f"on every rank the mean over ranks is {rows[0]['mean']:.1g} off one process's gradient")]
    pieces = f" in {rows[0]['pieces']} micro-steps" if rows[0]["pieces"] > 1 else ""
    return problems, (f"{len(rows) * ITEMS} items{pieces} as in one process, within "
                      f"{max(row['mean'] for row in rows):.1g}"), []


def take_steps(row, ddp, args, told, ipex=False):
    model, optimizer, x, y = prepare(row, ddp, args if ipex else None)
    if "skip" in row:
        if args.ipex == "on":
            raise RuntimeError("asked for by --ipex on, and not used: see above")
        return
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, x, y, row))
        optimizer.step()
    row.update(first=losses[0], last=losses[-1], weights=digest(unwrap_ddp(model).state_dict()), said="")
    with together(row):
        try:
            check_in_sync(model, ddp)
        except RuntimeError as e:
            row["said"] = str(e)


def judge_steps(rows, args):
    others, said = odd([row["weights"] for row in rows])[1], rows[0]["said"]
    first, last = (statistics.fmean(row[key] for row in rows) for key in ("first", "last"))
    problems = [(r, f"has other weights after {STEPS} steps") for r in others]
    if bool(said) != bool(others):
        problems.append((None, f"check_in_sync says {said!r}"))
    if not last < first:
        problems.append((None, f"the loss went from {first:.3g} to {last:.3g}"))
    return problems, f"equal weights on {len(rows)} rank(s) after {STEPS} steps, loss {first:.2g} -> {last:.2g}", []


def deal_items(row, ddp, args, told):
    data = range(10 * ddp.world_size + 1)
    row.update(each=list(ddp_sampler(data, ddp, train=False)), train=list(ddp_sampler(data, ddp)))


def judge_items(rows, args):
    n, problems = len(rows), []
    for key, items in (("each", 10 * n + 1), ("train", 10 * n + (n == 1))):   # training cuts the epoch to equal steps
        owner = {}
        for r, row in enumerate(rows):
            if len(row[key]) != len(range(r, items, n)):
                problems.append((r, f"has {len(row[key])} of {items} items, expected {len(range(r, items, n))}"))
            problems += [(r, f"has item {i}, which rank {owner[i]} has too") for i in row[key] if i in owner][:1]
            owner.update(dict.fromkeys(row[key], r))
    return problems, f"each of {10 * n + 1} items once, and {10 * n + (n == 1)} shuffled", []


def save_and_load(row, ddp, args, told):
    model, optimizer, x, y = prepare(row, ddp)
    backward(model, x, y, row)
    optimizer.step()
    saved = {"model": unwrap_ddp(model).state_dict(), "optimizer": optimizer.state_dict()}
    with together(row):
        folder = broadcast(str(probe(args, secrets.token_hex(8)).absolute()), ddp)   # rank 0's
        path, times = os.path.join(folder, "last.pt"), [time.monotonic()]
        try:
            save_checkpoint(path, ddp, resumes=False, **saved)
            times.append(time.monotonic())
            row["size"] = os.path.getsize(path) if ddp.is_main else 0
            loaded = load_checkpoint(path, ddp)
        finally:
            if ddp.is_main:
                shutil.rmtree(folder, ignore_errors=True)
        ddp.state.checkpoint = (None, None)   # else a later failure names it as what to go on from
    row.update(save=times[1] - times[0], load=time.monotonic() - times[1],
               differs=[key for key in saved if digest(loaded[key]) != digest(saved[key])])


def judge_loaded(rows, args):
    problems = [(r, f"loaded another {' and '.join(row['differs'])} than was saved")
                for r, row in enumerate(rows) if row["differs"]]
    return problems, (f"{in_words(rows[0]['size'])}, equal bits; saved in {rows[0]['save'] * 1e3:.0f} ms, loaded in "
                      f"{max(row['load'] for row in rows) * 1e3:.0f} ms"), []


def leave(row, ddp, args, told):
    """The last check: ranks can still report, as the store ends only with the process that holds it."""
    cleanup_ddp(ddp)
    end = time.monotonic() + 5.0
    while (left := what_is_here(args) - args.before) and time.monotonic() < end:
        time.sleep(0.02)
    row["left"] = sorted(left)


def judge_left(rows, args):
    return ([(r, f"is left with {', '.join(row['left'])[:300]}") for r, row in enumerate(rows) if row["left"]],
            "no thread, process, variable or warning of ours is left", [])


def what_is_here(args):
    """Texts: the threads, child processes (Linux) and variables of this process, and the warnings it has given."""
    here = {f"thread {t.name}" for t in threading.enumerate() if type(t).__name__ != "_DummyThread"}   # not Python's
    here |= {f"variable {name}={os.environ[name]}" for name in EXPORTED if name in os.environ}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):   # it has just ended
            name, fields = stat.read_text().rsplit(")", 1)
            here |= {f"process {name})"} if int(fields.split()[1]) == os.getpid() else set()
    return here | set(args.warned)


def checks_for(args):
    """[(name, measure, judge, seconds it may take)]. The first one only waits for all ranks."""
    chosen, claims = [], args.claims or not (args.preflight or args.bandwidth)
    if args.preflight or claims:
        chosen += [("barrier", None, judge_arrival),
                   ("place", place, judge_places),
                   ("device", identify_device, judge_devices),
                   ("versions", list_versions, judge_versions),
                   ("limits", read_limits, judge_limits),
                   ("all-reduce", sum_over_ranks, judge_sum),
                   ("matmul", multiply, judge_products),
                   ("folder", write_folder, judge_written),
                   ("visible", read_folder, judge_read)]
    if claims:
        chosen += [("messages", pass_messages, judge_messages),
                   ("gradients", average_gradients, judge_gradients),
                   ("accumulate", functools.partial(average_gradients, pieces=3), judge_gradients),
                   ("steps", take_steps, judge_steps),
                   ("ipex", functools.partial(take_steps, ipex=True), judge_steps),
                   ("sampler", deal_items, judge_items),
                   ("checkpoint", save_and_load, judge_loaded)]
    if args.bandwidth:
        chosen += [("bandwidth", reduce_all_sizes, judge_bandwidth)]
    if claims:
        chosen += [("clean-up", leave, judge_left)]
    return [(*check, args.timeout + 120.0 * (check[0] == "bandwidth")) for check in chosen]


# ---------------------------------------------------------------- running them: every wait has an end
def bounded(measure, limit, ddp, args, told):
    """The row that `measure` fills in a thread within `limit` seconds; its "error" says why it has not."""
    row, problem = {}, []

    def work():
        try:
            if ddp.device.type != "cpu":
                getattr(torch, ddp.device.type).set_device(ddp.device)   # is a thread's own
            measure(row, ddp, args, told)
        except Exception as e:   # whatever it is, it is reported, with the rank
            problem.append(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}")

    thread = threading.Thread(target=work, daemon=True)
    if measure is leave:   # MPI wants to be finalised by the thread that has initialised it
        work()
    elif measure:
        thread.start()
        thread.join(limit)
    if thread.is_alive():
        return {**row, "error": f"did not end within {limit:.0f} s, in {innermost(thread)}", "hangs": True,
                "entered": collectives_entered()}
    return {**row, "error": problem[0]} if problem else row


def collectives_entered():
    """How many collectives this rank has entered, DDP's own included."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):   # a backend that does not count
        return 0


def meet(ddp, name, row, deadline):
    """On rank 0 the rows of all ranks, in order, None for one that has not come by `deadline` (monotonic seconds);
    elsewhere None at once."""
    if ddp.world_size == 1:
        return [row]
    store, n = ddp.state.store, ddp.world_size
    store.set(f"check/{name}/{ddp.rank}", json.dumps(row))
    store.add(f"check/{name}", 1)
    if not ddp.is_main:
        return None
    while (came := store.add(f"check/{name}", 0)) < n and time.monotonic() < deadline:
        time.sleep(0.01)
    keys = [f"check/{name}/{r}" for r in range(n)]
    there = [came == n or store.check([key]) for key in keys]
    values = iter(store.multi_get([key for key, yes in zip(keys, there) if yes]))
    return [json.loads(next(values)) if yes else None for yes in there]


def blame(rows, limit):
    """[(rank, text)] for ranks that did not come or failed, without those that only wait for them in a collective:
    these have entered more of them. (None, text) where all failed alike."""
    bad = [r for r, row in enumerate(rows) if row is None or "error" in row]
    outside = [r for r in bad if rows[r] is None or rows[r].get("at") != COLLECTIVE]
    raised = [r for r in bad if rows[r] is not None and "hangs" not in rows[r]]
    if len(raised) == len(rows) > 1 and alike(rows):
        return [(None, f"on every rank {rows[0]['error']}")]
    late = [] if outside or raised or not bad else [
        r for r in bad if rows[r]["entered"] == min(rows[other]["entered"] for other in bad)]
    return [(r, f"did not come within {limit:.0f} s" if rows[r] is None else rows[r]["error"])
            for r in outside or raised or late]


def alike(rows):
    return len({row.get("error") for row in rows if row is not None}) == 1


def conclude(rows, judge, limit, args):
    """(PASS, FAIL or SKIP, problems, figure, lines) of one check, on rank 0."""
    problems = blame(rows, limit)
    if problems:
        return "FAIL", problems, "", []
    if "skip" in rows[0]:
        return "SKIP", [], rows[0]["skip"], []
    problems, figure, lines = judge(rows, args)
    return "FAIL" if problems else "PASS", problems, figure, lines


def run_checks(ddp, args):
    """Run the chosen checks; rank 0 prints what they say. Returns the names of those that failed, on every rank.
    Where a rank is lost, all end here with exit code 3."""
    told, count, suspects, written, lost = {"failed": []}, collections.Counter(), {}, {}, False
    host = ddp.launcher == "Slurm step" and os.environ.get("SLURMD_NODENAME") or ddp.host   # as --exclude wants it
    for name, measure, judge, limit in checks_for(args):
        # Python's lock may be held. cleanup_ddp has a limit of its own, timeout + 60, and then names the missing ranks.
        faulthandler.dump_traceback_later(limit + (120.0 if measure is leave else 60.0), exit=True, file=sys.__stderr__)
        start = time.monotonic()
        row = {"host": host, **bounded(measure, limit, ddp, args, told)}
        rows = meet(ddp, name, row, start + limit + (10.0 if measure else 0.0))
        if rows is None:
            told = wait_for_answer(ddp, name, limit + 40.0)
            continue
        rows[0]["waited"] = time.monotonic() - start
        status, problems, figure, lines = conclude(rows, judge, limit, args)
        hosts = [row["host"] if row else known for row, known in zip(rows, ddp.state.hosts or [host])]
        if problems:
            shown = [text if r is None else f"rank {r} on {hosts[r]} {text}" for r, text in problems[:6]]
            figure = "; ".join(shown + [f"and {len(problems) - 6} more"] * (len(problems) > 6))
        print0(ddp, "\n".join([in_lines(status, name, figure), *("      " + line for line in lines)]))
        guilty = {r for r, _ in problems} - {None}
        if len(guilty) < ddp.world_size:   # else it is not the fault of a host
            suspects.update(dict.fromkeys(hosts[r] for r in sorted(guilty)))
        count[status] += 1
        written = rows[0] if "made" in rows[0] else written
        told = {**rows[0], "failed": told["failed"] + [name] * (status == "FAIL")}
        # a backend that failed within a collective cannot be used again, perhaps not even closed
        lost = any(row is None or "hangs" in row or "error" in row and row.get("at") == COLLECTIVE and not alike(rows)
                   for row in rows)
        if lost:
            break   # the others wait for the answer until abort ends them
        if ddp.world_size > 1:
            ddp.state.store.set(f"check/{name}/answer", json.dumps(told))
    faulthandler.cancel_dump_traceback_later()
    if ddp.world_size > 1 and not lost:   # the store lives in rank 0's process: it stays until all have read
        came, end = ddp.state.store.add("check/read", 1), time.monotonic() + 10.0
        while ddp.is_main and came < ddp.world_size and time.monotonic() < end:
            time.sleep(0.01)
            came = ddp.state.store.add("check/read", 0)
    if ddp.is_main:
        remove_probe(args, written)
        print0(ddp, f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped")
        name_suspects(args, list(suspects))
        if lost:
            time.sleep(0.5)   # MPICH drops what it has not yet passed on when a rank aborts
            abort(ddp, f"check {name}: ranks are missing or stuck, see above; all end here", FAILED)
    return told["failed"]


def wait_for_answer(ddp, name, limit):
    key = f"check/{name}/answer"
    try:
        ddp.state.store.wait([key], datetime.timedelta(seconds=limit))
        return json.loads(ddp.state.store.get(key))
    except RuntimeError:   # a timeout, or rank 0 is gone: then its end is told by the lifeline
        abort(ddp, f"{name}: rank 0 on {ddp.state.hosts[0]} did not answer", FAILED, secondary=True)


def name_suspects(args, hosts):
    if hosts:
        print(f"suspect hosts: {','.join(hosts)}", flush=True)
    if args.suspects:
        try:
            Path(args.suspects).write_text("".join(f"{host}\n" for host in hosts))
        except OSError as e:
            print(f"cannot write --suspects {args.suspects}: {e.strerror}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- helpers
@contextlib.contextmanager
def together(row):
    """Within, this rank can be held up by others (and is, after an exception: they may be left waiting)."""
    row["at"] = COLLECTIVE
    yield
    row["at"] = "after"


def innermost(thread):
    """Where in this file a thread is."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_name} (line {frame.f_lineno})"


def in_lines(status, name, figure):
    """One line of 80 columns, where the figure fits."""
    return textwrap.fill(f"{status}  {name:<10}  {figure}", 80, subsequent_indent=" " * 18, break_long_words=False,
                         break_on_hyphens=False)


def digest(value):
    """Text that is equal for equal bits, of nested dicts and lists of tensors (on any device) and plain values."""
    if isinstance(value, torch.Tensor):
        data = bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    elif isinstance(value, (dict, list, tuple)):
        data = repr([digest(v) for v in (value.items() if isinstance(value, dict) else value)]).encode()
    else:
        data = repr(value).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def twice(rows, key, what):
    """[(rank, text)] of ranks that have the same row[key] as an earlier one of their host."""
    first = {}
    return [(r, f"has the same {what} as rank {first[row['host'], row[key]]}: {row[key]}")
            for r, row in enumerate(rows) if first.setdefault((row["host"], row[key]), r) != r]


def odd(values):
    """(the most common value, places of the others). In a tie the first one's counts as common."""
    common = collections.Counter(values).most_common(1)[0][0]
    return common, [i for i, value in enumerate(values) if value != common]


def low(values, share):
    """[(place, median)] of values below `share` of the median; of two, the median is the larger one."""
    known = [value for value in values if value is not None]
    middle = statistics.median_high(known) if known else 0
    return [(i, middle) for i, value in enumerate(values) if value is not None and value < share * middle]


def ranges(numbers):
    """[0, 1, 2, 8] -> '0-2,8'"""
    runs = []
    for i in numbers:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def span(values):
    low, high = min(values), max(values)
    return f"{low:,} to {high:,}" if high > low else f"{low:,}"


def gib(size):
    return "?" if size is None else round(size / 2**30, 1)


def in_words(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def hash_of(paths):
    digest = hashlib.blake2b(digest_size=6)
    for path in paths:
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def synchronize(ddp):
    if ddp.device.type != "cpu":
        getattr(torch, ddp.device.type).synchronize(ddp.device)


def probe(args, token):
    return Path(args.work_dir or tempfile.gettempdir()) / f".preflight-{token}"


def remove_probe(args, written):
    with contextlib.suppress(OSError):   # it could not be written
        if "token" in written:
            probe(args, written["token"]).unlink(missing_ok=True)
            probe(args, written["token"]).with_suffix(".tmp").unlink(missing_ok=True)
        if written.get("made"):
            os.rmdir(args.work_dir)


# ---------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    def error(self, message):   # raised, so that it is printed once and not by every rank
        raise ValueError(f"command line: {message}. See --help.")


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--preflight", action="store_true", help="check ranks, devices, versions, results, run folder")
    parser.add_argument("--claims", action="store_true", help="the same, and training itself (default)")
    parser.add_argument("--bandwidth", action="store_true", help="measure the all-reduce")
    parser.add_argument("--work_dir", help="run folder of the training to come")
    parser.add_argument("--suspects", metavar="FILE", help="write the suspect hosts there, one per line")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a check may take (default 60)")
    parser.add_argument("--slow", type=float, help="share of the median rate below which a device is "
                        "slow (default 0.5; on CPUs, whose cores others may use, 0.1)")
    parser.add_argument("--max_mib", type=int, default=256, help="largest all-reduce in MiB (default 256)")
    parser.add_argument("--repeats", type=int, default=7, help="timed all-reduces per size (default 7)")
    add_launch_arguments(parser)
    parser.set_defaults(init_timeout=90.0)
    return parser


def read_arguments(argv):
    args = make_parser().parse_args(argv)
    for name in ("timeout", "max_mib", "repeats"):
        if not getattr(args, name) > 0:
            raise ValueError(f"command line: --{name} is {getattr(args, name)}, expected more than 0")
    if args.slow is not None and not 0 < args.slow < 1:
        raise ValueError(f"command line: --slow is {args.slow}, expected a share between 0 and 1")
    hand_over(args, argv)
    return args


def give_up(seconds):
    """Setting up hangs below Python, in a device's own backend: no rank can tell another."""
    with contextlib.suppress(RuntimeError):
        if detect_launcher(os.environ).rank == 0:
            print(in_lines("FAIL", "set-up", f"did not end within {seconds:.0f} s"), flush=True)
    os._exit(FAILED)


def cli(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        make_parser().parse_args(["--help"])
    problem = None
    try:
        args = read_arguments(argv)
    except (ValueError, RuntimeError) as e:
        args, problem = make_parser().parse_args(["--device", "cpu"]), e
    args.warned, show = [], warnings.showwarning
    warnings.showwarning = lambda message, category, *more, **options: (
        args.warned.append(f"{category.__name__}: {str(message).strip()[:100]}"),
        show(message, category, *more, **options))
    args.before = what_is_here(args)
    limit = args.init_timeout + 90.0   # setup_ddp's own limits are below
    guard = threading.Timer(limit, give_up, (limit,))
    guard.daemon = True
    guard.start()
    try:
        # The backend's own limit lies behind that of the checks: who waits in a collective then differs from who fails.
        ddp = setup_ddp(args.device, args.backend, ranks=args.ranks, timeout=args.timeout + 60.0,
                        init_timeout=args.init_timeout, ipex=args.ipex)
    except RuntimeError as e:
        print(in_lines("FAIL", "set-up", str(e)), flush=True)
        name_suspects(args, [])
        sys.exit(USAGE if problem else FAILED)
    guard.cancel()
    with ddp:
        if problem:   # the same on all ranks
            print0(ddp, f"error: {problem}", file=sys.stderr)
        failed = [] if problem else run_checks(ddp, args)
    sys.exit(USAGE if problem else FAILED if failed else 0)


# ---------------------------------------------------------------- pytest
def pytest_generate_tests(metafunc):
    if "check" in metafunc.fixturenames:
        args = make_parser().parse_args(["--claims", "--bandwidth"])
        metafunc.parametrize("check", [name for name, *_ in checks_for(args)])


@functools.lru_cache(maxsize=None)   # no fixture: where the training is, there may be no pytest to import
def two_ranks():
    """The finished process of two ranks on this machine's CPU; its stdout has a line per check."""
    # A small share: a busy machine may run one of two ranks much slower than the other.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "--claims",
             "--bandwidth", "--device=cpu", "--max_mib=1", "--slow=0.01", "--work_dir=run"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
        return done, os.listdir(folder)


def test_two_ranks_of_this_cpu(check):
    import pytest
    done, _ = two_ranks()
    line = re.search(rf"^(PASS|FAIL|SKIP)  {check} (.*(?:\n {{18}}.*)*)", done.stdout, re.M)
    assert line and line[1] != "FAIL", done.stdout + done.stderr
    if line[1] == "SKIP":
        pytest.skip(line[2].strip())


def test_two_ranks_of_this_cpu_end_well_and_leave_nothing():
    done, left = two_ranks()
    assert (done.returncode, done.stderr, left) == (0, "", []), done.stdout


if __name__ == "__main__":
    cli()
