"""Is this machine right, in parallel? About two minutes before a large allocation is spent.

    mpiexec -n 24 --ppn 12 python test_aurora_ddp.py --preflight --work_dir runs/mine --suspects bad_hosts
    srun python test_aurora_ddp.py --preflight --bandwidth
    pytest test_aurora_ddp.py                             the same checks, on two ranks of this machine's CPU

Start it exactly as the training. Rank 0 prints one line per check: PASS, FAIL or SKIP, its name, its figure.
  --preflight  (also without options) do all ranks come; has each a device of its own; do all run the same code and
               versions; is a sum over ranks and a product on each device right, and none slow; does the last rank see
               what rank 0 writes into the run folder (--work_dir)
  --bandwidth  time and bus bandwidth of the all-reduce, 1 KiB to 256 MiB (--max_mib)

Where hosts are to blame, the last line is `suspect hosts: n1,n2`, as Slurm's --exclude takes it; --suspects FILE holds
one per line (empty: none), for `grep -vwFf FILE $PBS_NODEFILE > hosts`. What cannot be blamed on one host (no network)
names none. Exit code of every rank: 0 all passed, 3 a check failed, 2 wrong arguments.
Reads the project's *.py files; writes and removes .preflight-* in the run folder, and FILE.

Ranks report through the store of ddp_setup, one request each, and not by collectives: those are what is in doubt here,
and on some devices they wait without end. So every check says who did not come, at any number of ranks.
"""
import argparse
import collections
import contextlib
import datetime
import faulthandler
import hashlib
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_setup
from ddp_setup import add_launch_arguments, broadcast, detect_launcher, hand_over, print0, setup_ddp, stop_all

FAILED, USAGE = 3, 2        # exit codes
TABLE_ROWS = 32             # up to this many ranks the table of ranks is printed: some sites choke on more output
COLLECTIVE = "collective"   # what row["at"] says while this rank can be held up by others


# ---------------------------------------------------------------- the checks: what each rank measures
# measure(row, ddp, args, told) fills `row` (plain values); raising is a failure of this rank. told: rank 0's row of
# the check before, and "failed", the names of the checks that failed.
# judge(rows, args), on rank 0: (problems, figure, lines). problems: [(rank or None, text)], empty for PASS.
def place(row, ddp, args, told):
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    row.update(local=ddp.local_rank, device=str(ddp.device), id=None, cores=ranges(cores), name="cpu", free=None)
    if ddp.device.type == "cpu":
        with contextlib.suppress(OSError, StopIteration):   # not Linux
            with open("/proc/meminfo") as f:
                row["free"] = int(next(line for line in f if line.startswith("MemAvailable")).split()[1]) * 1024
        return
    module = getattr(torch, ddp.device.type)
    properties = module.get_device_properties(ddp.device)
    row.update(name=properties.name, id=str(getattr(properties, "uuid", "")) or None)
    with contextlib.suppress(AttributeError, RuntimeError):   # XPU: not in every torch, not on every driver
        row["free"] = module.mem_get_info(ddp.device)[0]


def judge_places(rows, args):
    problems, seen = [], {}
    for r, row in enumerate(rows):
        for key, what in (("local", "local rank"), ("id", "device")):
            first = seen.setdefault((row["host"], key, row[key]), r)
            if first != r and row[key] is not None:
                problems.append((r, f"has the same {what} as rank {first}: {row[key]}"))
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


def list_versions(row, ddp, args, told):
    folder = Path(__file__).resolve().parent
    row.update(python=platform.python_version(), torch=str(torch.__version__),
               ddp_setup=hash_of([Path(ddp_setup.__file__)]), code=hash_of(sorted(folder.glob("*.py"))),
               folder=str(folder))


def judge_versions(rows, args):
    problems, figure = [], []
    for what in ("python", "torch", "ddp_setup", "code"):
        common, others = odd([row[what] for row in rows])
        figure.append(f"{what} {common}")
        problems += [(r, f"has {what} {rows[r][what]}, most have {common}" + (
            f" (*.py in {rows[r]['folder']})" if what == "code" else "")) for r in others]
    return problems, ", ".join(figure), []


def sum_over_ranks(row, ddp, args, told):
    """Element i is i + 1 on rank i % n and 0 elsewhere: exact in float32, and a wrong element names its rank."""
    n, values = ddp.world_size, torch.arange(1, 2**18 + 1, dtype=torch.float32)   # 1 MiB; n must not be larger
    if n == 1:
        row["skip"] = "one rank: nothing to sum over"
        return
    mine = torch.zeros_like(values)
    mine[ddp.rank::n] = values[ddp.rank::n]
    mine = mine.to(ddp.device)
    row["at"], start = COLLECTIVE, time.monotonic()
    dist.all_reduce(mine)   # not all_sum: that may send what is on a CPU by another backend
    result = mine.cpu()
    row.update(at="after", seconds=time.monotonic() - start)
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
                 for r, middle in low(rates, args.slow)]
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
    lines = [f"{'size':>9}  {'time [us]':>12}  {'bus [GB/s]':>10}  slowest rank, where ranks differ by a fifth"]
    for k, size in enumerate(rows[0]["bytes"]):
        times = [row["seconds"][k] for row in rows]
        slowest = max(range(n), key=times.__getitem__)
        bus = 2 * (n - 1) / n * size / times[slowest] / 1e9
        best = max(best, (bus, size))
        who = f"{slowest} on {rows[slowest]['host']}" if times[slowest] > 1.2 * statistics.median_low(times) else ""
        lines.append(f"{in_words(size):>9}  {times[slowest] * 1e6:>12.1f}  {bus:>10.4f}  {who}".rstrip())
    return [], (f"{rows[0]['backend']}, up to {best[0]:.3g} GB/s at {in_words(best[1])}, "
                f"{in_words(rows[0]['bytes'][0])} in {max(row['seconds'][0] for row in rows) * 1e6:.0f} us"), lines


def judge_arrival(rows, args):
    return [], f"all {len(rows)} rank(s) came, the last {rows[0]['waited']:.2f} s after rank 0", []


def checks_for(args):
    """[(name, measure, judge, seconds it may take)]. The first one only waits for all ranks."""
    chosen = []
    if args.preflight or not args.bandwidth:
        chosen += [("barrier", None, judge_arrival, args.timeout),
                   ("place", place, judge_places, args.timeout),
                   ("versions", list_versions, judge_versions, args.timeout),
                   ("all-reduce", sum_over_ranks, judge_sum, args.timeout),
                   ("matmul", multiply, judge_products, args.timeout),
                   ("folder", write_folder, judge_written, args.timeout),
                   ("visible", read_folder, judge_read, args.timeout)]
    if args.bandwidth:
        chosen += [("bandwidth", reduce_all_sizes, judge_bandwidth, args.timeout + 120.0)]
    return chosen


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
    if measure:
        thread.start()
        thread.join(limit)
    if measure and thread.is_alive():
        return {**row, "error": f"did not end within {limit:.0f} s", "hangs": True}
    return {**row, "error": problem[0]} if problem else row


def meet(ddp, name, row, deadline):
    """On rank 0 the rows of all ranks, in order, None for one that has not come by `deadline` (monotonic seconds);
    elsewhere None at once."""
    if ddp.world_size == 1:
        return [row]
    store, n = ddp.state["store"], ddp.world_size
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
    """[(rank, text)] for ranks that did not come or failed, without those that only wait for them in a collective."""
    bad = [r for r, row in enumerate(rows) if row is None or "error" in row]
    outside = [r for r in bad if rows[r] is None or rows[r].get("at") != COLLECTIVE]
    raised = [r for r in bad if rows[r] is not None and "hangs" not in rows[r]]
    return [(r, f"did not come within {limit:.0f} s" if rows[r] is None else rows[r]["error"])
            for r in outside or raised or bad]


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
        faulthandler.dump_traceback_later(limit + 60.0, exit=True, file=sys.__stderr__)   # Python's lock may be held
        start = time.monotonic()
        row = {"host": host, **bounded(measure, limit, ddp, args, told)}
        rows = meet(ddp, name, row, start + limit + (10.0 if measure else 0.0))
        if rows is None:
            told = wait_for_answer(ddp, name, limit + 40.0)
            continue
        rows[0]["waited"] = time.monotonic() - start
        status, problems, figure, lines = conclude(rows, judge, limit, args)
        hosts = [row["host"] if row else known for row, known in zip(rows, ddp.state.get("hosts", [host]))]
        if problems:
            shown = [text if r is None else f"rank {r} on {hosts[r]} {text}" for r, text in problems[:6]]
            figure = "; ".join(shown + [f"and {len(problems) - 6} more"] * (len(problems) > 6))
        print0(ddp, "\n".join([f"{status}  {name:<10}  {figure}", *("      " + line for line in lines)]))
        guilty = {r for r, _ in problems} - {None}
        if len(guilty) < ddp.world_size:   # else it is not the fault of a host
            suspects.update(dict.fromkeys(hosts[r] for r in sorted(guilty)))
        count[status] += 1
        written = rows[0] if "made" in rows[0] else written
        told = {**rows[0], "failed": told["failed"] + [name] * (status == "FAIL")}
        # a backend that failed within a collective cannot be used again, perhaps not even closed
        lost = any(row is None or "hangs" in row or "error" in row and row.get("at") == COLLECTIVE for row in rows)
        if lost:
            break   # the others wait for the answer until stop_all ends them
        if ddp.world_size > 1:
            ddp.state["store"].set(f"check/{name}/answer", json.dumps(told))
    faulthandler.cancel_dump_traceback_later()
    if ddp.is_main:
        remove_probe(args, written)
        print0(ddp, f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped")
        name_suspects(args, list(suspects))
        if lost:
            time.sleep(0.5)   # MPICH drops what it has not yet passed on when a rank aborts
            stop_all(ddp, f"check {name}: ranks are missing or stuck, see above; all end here", FAILED)
    return told["failed"]


def wait_for_answer(ddp, name, limit):
    key = f"check/{name}/answer"
    try:
        ddp.state["store"].wait([key], datetime.timedelta(seconds=limit))
        return json.loads(ddp.state["store"].get(key))
    except RuntimeError:   # a timeout, or rank 0 is gone: then its end is told by the lifeline
        stop_all(ddp, f"{name}: rank 0 on {ddp.state['hosts'][0]} did not answer", FAILED, secondary=True)


def name_suspects(args, hosts):
    if hosts:
        print(f"suspect hosts: {','.join(hosts)}", flush=True)
    if args.suspects:
        try:
            Path(args.suspects).write_text("".join(f"{host}\n" for host in hosts))
        except OSError as e:
            print(f"cannot write --suspects {args.suspects}: {e.strerror}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- helpers
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
    return Path(args.work_dir) / f".preflight-{token}"


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
    parser.add_argument("--bandwidth", action="store_true", help="measure the all-reduce")
    parser.add_argument("--work_dir", help="run folder of the training to come")
    parser.add_argument("--suspects", metavar="FILE", help="write the suspect hosts there, one per line")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a check may take (default 60)")
    parser.add_argument("--slow", type=float, default=0.5, help="share of the median rate below which a device is slow")
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
    if not 0 <= args.slow < 1:
        raise ValueError(f"command line: --slow is {args.slow}, expected a share from 0 to below 1")
    hand_over(args, argv)
    return args


def give_up(seconds):
    """Setting up hangs below Python, in a device's own backend: no rank can tell another."""
    with contextlib.suppress(RuntimeError):
        if detect_launcher(os.environ).rank == 0:
            print(f"FAIL  set-up      did not end within {seconds:.0f} s", flush=True)
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
    limit = args.init_timeout + 90.0   # setup_ddp's own limits are below
    guard = threading.Timer(limit, give_up, (limit,))
    guard.daemon = True
    guard.start()
    try:
        # The backend's own limit lies behind that of the checks: who waits in a collective then differs from who fails.
        ddp = setup_ddp(args.device, args.backend, ranks=args.ranks, timeout=args.timeout + 60.0,
                        init_timeout=args.init_timeout)
    except RuntimeError as e:
        print(f"FAIL  set-up      {e}", flush=True)
        name_suspects(args, [])
        sys.exit(USAGE if problem else FAILED)
    guard.cancel()
    with ddp:
        if problem:   # the same on all ranks
            print0(ddp, f"error: {problem}", file=sys.stderr)
        failed = [] if problem else run_checks(ddp, args)
    sys.exit(USAGE if problem else FAILED if failed else 0)


def test_the_checks_pass_on_two_ranks_of_this_cpu(tmp_path):
    # A small share: a busy machine may run one of two ranks much slower than the other.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__,
             "--preflight", "--bandwidth", "--device=cpu", "--max_mib=1", "--slow=0.01", f"--work_dir={tmp_path}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed, 0 failed, 0 skipped" in done.stdout, done.stdout


if __name__ == "__main__":
    cli()
