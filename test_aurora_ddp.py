"""Does DDP training work on this machine? Eight claims, a line for each: PASS, FAIL or SKIP.

    mpirun -n 2 python test_aurora_ddp.py     also mpiexec, srun, torchrun, or python alone
    pytest test_aurora_ddp.py                 the same, on two ranks of this machine's CPU

Start it exactly as your training. To check another machine, copy this file and ddp_setup.py there:
they need torch and the standard library, and nothing else.

    set-up       all ranks have met, and each has a place of its own
    device       a product of matrices on the device of each rank is exact
    all-reduce   a sum over all ranks is exact
    gradients    those of a DDP model are the gradients of one process that has all the data
    training     in 20 steps the loss falls, and then the weights of all ranks are equal
    ipex         the same for a model that Intel's extension has optimized, where that is used
    checkpoint   what was saved is loaded with equal bits, on all ranks
    clean-up     all ranks leave together, and the process group is gone

Rank 0 prints. Where a claim is false on some ranks, the line names them, and the next claim is
checked. A rank that raises an error says so, and ends all; so does one that hangs, after --timeout
seconds. Exit code of every rank: 0 all passed, 3 a claim failed (of a rank that hangs: 1), 2 wrong
arguments. Writes a checkpoint into a temporary folder of rank 0, and removes it.
"""
import argparse
import copy
import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_setup import (
    BACKENDS,
    Ddp,
    abort,
    all_mean,
    all_sum,
    broadcast,
    cleanup_ddp,
    gather,
    load_checkpoint,
    optimize_with_ipex,
    save_checkpoint,
    setup_ddp,
    unwrap_ddp,
    wrap_ddp,
)

__version__ = "1.0.0"
FAILED = 3           # exit code: a claim failed
N_ITEMS = 12         # data items per rank
N_FEATURES = 16      # numbers per item
N_STEPS = 20         # training steps
CLOSE = 1e-4         # relative error allowed in gradients: float32 has 1e-6, TF32 1e-3
MOST_PROBLEMS = 6    # ranks that a line names


class Wrong(Exception):
    """The claim is false on this rank; the text says what the rank has found. To be raised after
    the last collective of a claim: the other ranks do not wait for this one there."""


class NothingToCheck(Exception):
    """The text says why. To be raised on all ranks."""


def main(argv: list[str] | None = None) -> None:
    """Check all claims, print a line for each, and exit with the code."""
    options = read_arguments(argv)
    try:
        ddp = setup_ddp(options.device, options.backend, timeout=options.timeout,
                        init_timeout=options.init_timeout)
    except RuntimeError as error:
        print_line("FAIL", "set-up", str(error))
        sys.exit(FAILED)
    with ddp:
        statuses = [check(name, claim, ddp, options) for name, claim in CLAIMS.items()]
        statuses.append(check_clean_up(ddp, options))
    if ddp.is_main:
        count = statuses.count
        print(f"{count('PASS')} passed, {count('FAIL')} failed, {count('SKIP')} skipped")
    sys.exit(FAILED if "FAIL" in statuses else 0)


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of the command line; argv: None: of this process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    add("--backend", default="auto", choices=("auto", *BACKENDS))
    add("--ipex", default="auto", choices=("auto", "on", "off"),
        help="auto: where Intel GPUs need it")
    add("--timeout", type=float, default=60.0,
        help="seconds in which the ranks wait for each other (default 60)")
    add("--init_timeout", type=float, default=90.0,
        help="seconds for all ranks to appear (default 90)")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)   # of torch.distributed.launch
    return parser.parse_args(argv)


# ---------------------------------------------------------------- the claims
# Each takes (ddp, options), is called on all ranks, and returns words for its line.
def set_up(ddp, options):
    places = gather([ddp.rank, ddp.host, ddp.local_rank], ddp)
    ranks = [rank for rank, _, _ in places]
    if ranks != list(range(ddp.world_size)):
        raise Wrong(f"sees the ranks {ranks}; expected 0 to {ddp.world_size - 1}")
    same_place = [rank for rank, host, local_rank in places
                  if host == ddp.host and local_rank == ddp.local_rank]
    if same_place != [ddp.rank]:
        raise Wrong(f"has local rank {ddp.local_rank}, as have the ranks {same_place} of this host")
    n_hosts = len({host for _, host, _ in places})
    return (f"{ddp.world_size} rank(s) on {n_hosts} host(s), launcher {ddp.launcher}, backend "
            f"{ddp.backend}")


def device(ddp, options):
    # Sums of small integers are exact in float32 and TF32, in any order.
    n = 512
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-2, 3, (n, n), generator=generator, dtype=torch.float32)
    b = torch.randint(-2, 3, (n, n), generator=generator, dtype=torch.float32)
    product = (a.to(ddp.device) @ b.to(ddp.device)).cpu()
    n_wrong = int((product.double() != a.double() @ b.double()).sum())
    name = "CPU"
    if ddp.device.type != "cpu":
        name = torch.get_device_module(ddp.device).get_device_name(ddp.device)
    if n_wrong:
        raise Wrong(f"has {n_wrong} wrong elements of {n * n} in a product of matrices on "
                    f"{ddp.device} ({name})")
    return f"a product of matrices is exact on {ddp.device} ({name})"


def all_reduce(ddp, options):
    """Element i is i + 1 on rank i % n, and 0 on the others: the sum has no rounding."""
    if ddp.world_size == 1:
        raise NothingToCheck("one rank: nothing to sum over")
    expected = torch.arange(1, 2**18 + 1, dtype=torch.float32)
    mine = torch.zeros_like(expected)
    mine[ddp.rank::ddp.world_size] = expected[ddp.rank::ddp.world_size]
    total = all_sum(mine.to(ddp.device), ddp).cpu()
    n_wrong = int((total != expected).sum())
    if n_wrong:
        raise Wrong(f"has {n_wrong} wrong elements of {len(expected)} in a sum over all ranks")
    return f"a sum of {len(expected)} numbers over {ddp.world_size} ranks is exact"


def gradients(ddp, options):
    model, _ = make_model(ddp)
    model = wrap(model, ddp)
    one_process = copy.deepcopy(unwrap_ddp(model)).cpu().double()
    x, y = items_of(range(ddp.world_size))
    mean_loss(one_process, x.double(), y.double()).backward()

    x, y = items_of([ddp.rank])
    mean_loss(model, x.to(ddp.device), y.to(ddp.device)).backward()
    error = 0.0
    for found, expected in zip(model.parameters(), one_process.parameters()):
        difference = found.grad.cpu().double() - expected.grad
        error = max(error, (difference.norm() / expected.grad.norm()).item())
    if not error <= CLOSE:   # true for nan
        raise Wrong(f"has a gradient {error:.1g} off that of one process")
    return f"{ddp.world_size * N_ITEMS} items as in one process, within {error:.1g}"


def training(ddp, options):
    model, optimizer = make_model(ddp)
    return train(wrap(model, ddp), optimizer, ddp)


def ipex(ddp, options):
    if options.ipex == "off":
        raise NothingToCheck("--ipex off")
    plain_model, plain_optimizer = make_model(ddp)
    model, optimizer = optimize_with_ipex(plain_model, plain_optimizer, ddp, options.ipex)
    if model is plain_model and options.ipex == "on":
        raise Wrong("could not use IPEX, which --ipex on asks for: see above")
    if model is plain_model:
        raise NothingToCheck("not used here: only Intel GPUs need it, where torch has no xccl")
    return train(wrap(model, ddp), optimizer, ddp)


def checkpoint(ddp, options):
    model, optimizer = make_model(ddp)
    model = wrap(model, ddp)
    x, y = items_of([ddp.rank])
    mean_loss(model, x.to(ddp.device), y.to(ddp.device)).backward()
    optimizer.step()
    saved = {"model": unwrap_ddp(model).state_dict(), "optimizer": optimizer.state_dict()}

    folder = broadcast(tempfile.mkdtemp() if ddp.is_main else "", ddp)
    try:   # rank 0 alone reads and writes there
        save_checkpoint(f"{folder}/last.pt", ddp, **saved)
        loaded = load_checkpoint(f"{folder}/last.pt", ddp)
    finally:
        if ddp.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    for key in saved:
        try:
            torch.testing.assert_close(loaded[key], saved[key], rtol=0, atol=0, check_device=False)
        except AssertionError:
            raise Wrong(f"has loaded another {key} than was saved") from None
    return "model and optimizer are loaded with equal bits"


CLAIMS: dict[str, Callable[[Ddp, argparse.Namespace], str]] = {
    "set-up": set_up, "device": device, "all-reduce": all_reduce, "gradients": gradients,
    "training": training, "ipex": ipex, "checkpoint": checkpoint}


# ---------------------------------------------------------------- what is trained
def items_of(ranks):
    """(x (n, 16), y (n, 1)) float32 on the CPU: inputs and targets, N_ITEMS of each of `ranks`."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank)
        parts.append(torch.randn(N_ITEMS, N_FEATURES, generator=generator))
    x = torch.cat(parts)
    return x, x[:, :1] * x[:, 1:2]


def make_model(ddp):
    """(model, its optimizer). Ranks start with different weights, so that a claim is false if DDP
    does not copy rank 0's."""
    torch.manual_seed(ddp.rank)
    model = torch.nn.Sequential(torch.nn.Linear(N_FEATURES, 64), torch.nn.Tanh(),
                                torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Tanh(),
                                torch.nn.Linear(64, 1)).to(ddp.device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def wrap(model, ddp):
    return wrap_ddp(model, ddp, bucket_cap_mb=0.01)   # several buckets a step, as of a large model


def mean_loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


def train(model, optimizer, ddp):
    """Take N_STEPS steps, each rank with its own items. Returns words for the line.

    Raises: Wrong if the loss does not fall, or this rank has other weights than rank 0."""
    x, y = items_of([ddp.rank])
    x = x.to(ddp.device)
    y = y.to(ddp.device)
    losses = []
    for _ in range(N_STEPS):
        loss = mean_loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_mean(loss.item(), ddp))   # every rank has as many items
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    weights_of_rank_0 = broadcast(weights.clone(), ddp)
    change = f"{losses[0]:.3g} -> {losses[-1]:.3g}"
    if not torch.equal(weights, weights_of_rank_0):
        raise Wrong(f"has other weights than rank 0 after {N_STEPS} steps")
    if not losses[-1] < losses[0]:
        raise Wrong(f"has a loss that does not fall: {change}")
    return f"equal weights on {ddp.world_size} rank(s) after {N_STEPS} steps, loss {change}"


# ---------------------------------------------------------------- how a claim is checked
def check(name, claim, ddp, options):
    """Check a claim on all ranks; rank 0 prints its line. Returns PASS, FAIL or SKIP, the same on
    all ranks."""
    limit_this_rank(options)
    try:
        verdicts = gather(verdict_here(claim, ddp, options), ddp)
    except Exception:   # the others may wait for this rank in a collective: it has to end all
        abort(ddp, f"FAIL  {name}, by an error on this rank. It may be the consequence of another "
                   f"rank that hangs or has ended.\n{traceback.format_exc()}", FAILED)
    status, words = verdicts[0]
    problems = [f"rank {rank} on {ddp.hosts[rank]} {text}"
                for rank, (one, text) in enumerate(verdicts) if one == "FAIL"]
    if problems:
        status = "FAIL"
        words = "; ".join(problems[:MOST_PROBLEMS])
    if len(problems) > MOST_PROBLEMS:
        words = f"{words}; and {len(problems) - MOST_PROBLEMS} more"
    if ddp.is_main:
        print_line(status, name, words)
    return status


def verdict_here(claim, ddp, options):
    """(PASS, FAIL or SKIP, words for the line) of this rank."""
    try:
        return "PASS", claim(ddp, options)
    except NothingToCheck as reason:
        return "SKIP", str(reason)
    except Wrong as problem:
        return "FAIL", str(problem)


def check_clean_up(ddp, options):
    """The last claim, after which the ranks cannot tell each other anything. Returns PASS or FAIL,
    of this rank."""
    faulthandler.cancel_dump_traceback_later()   # cleanup_ddp has a limit of its own
    cleanup_ddp(ddp, timeout=options.timeout)    # if some do not come, it names them and ends all
    if dist.is_initialized():
        print_line("FAIL", "clean-up", f"rank {ddp.rank} on {ddp.host} still has a process group")
        return "FAIL"
    if ddp.is_main:
        print_line("PASS", "clean-up", "all ranks have left together")
    return "PASS"


def limit_this_rank(options):
    """From now on, end this rank if it is stuck, and show where. NCCL and gloo keep the limit given
    to setup_ddp themselves, and say more; xccl has none, and a device may hang too."""
    faulthandler.dump_traceback_later(2 * options.timeout, exit=True)


def print_line(status, name, words):
    print(f"{status}  {name:<10}  {words}", flush=True)


# ---------------------------------------------------------------- pytest
def test_all_claims_hold_on_two_ranks_of_this_cpu(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
             "--local_addr=127.0.0.1", str(Path(__file__).resolve()), "--device=cpu"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed, 0 failed, 1 skipped" in done.stdout
    assert not list(tmp_path.glob("**/*.pt")), "the checkpoint is removed"


if __name__ == "__main__":
    main()
