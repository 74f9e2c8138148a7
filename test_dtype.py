"""Which dtypes work on this device, how exactly and how fast?

Run it to choose `memory.mixed_precision`.

    python test_dtype.py                # on the device that training would choose; or --device cpu
    mpirun -n 2 python test_dtype.py    # every rank checks its device; rank 0 prints
    pytest test_dtype.py                # the same checks, on this machine's CPU

Prints a table with a line PASS, FAIL or SKIP for each dtype, then how fast large matrices are
multiplied, for `mfu` in the log of train_sedd_ddp.py; the last line is the recommended setting.
Errors are relative norms of the difference to the same computation in float64 on the CPU: of the
outputs and gradients of SEDD and ProteinMPNN, under autocast as in training. Exit code of every
rank: 0, 3 if a dtype failed on any rank, 2 for wrong arguments. Reads and writes no files.
"""
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer, timer

from ddp_setup import Ddp, gather, print0
from mpnn.model import ProteinMPNN
from sedd.diffusion import AbsorbingGraph, make_noise, score_entropy_loss
from sedd.model import SEDD
from training.command_line import add_launch_arguments, started_ranks
from training.fast_linear import fast_linear
from training.parser import Parser
from training.peak import matmul_rows, measure_matmul
from training.precision import autocast, choose_dtype, grad_scaler

FAILED = 3                  # exit code
TIMED = (torch.float32, torch.bfloat16, torch.float16)      # nobody trains in float64
DTYPES = (torch.float64, *TIMED)
# Largest relative error, in units of the dtype's eps (its spacing at 1); 64 eps of float32, in
# which sums are computed, are added. Seen were 1.4 eps, as a network rounds dozens of times.
# Overflow, lost gradients, TF32, or bfloat16 instead of float16 (7 eps) exceed it.
MOST_EPS = 4
MOST_TRIES = 20             # steps in which the gradient scaler finds a scale
FASTER = 1.1                # least speed-up for which a lower precision is recommended
ROUNDS = 2                  # in which each speed is measured
SECONDS = 0.25              # for which, at least, in each round
X_ID = 20                   # the token of an unknown residue, below which the known ones are
GRAPH = AbsorbingGraph(21)
NOISE = make_noise("loglinear", eps=1e-3)


def short_name(dtype):
    return str(dtype).removeprefix("torch.")


def in_short(error):
    """Type and first line of an error."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def dtype_of_training(ddp):
    """What `mixed_precision: true` means on this device."""
    dtype, _ = choose_dtype(True, ddp.device)
    return dtype


# ---- the networks ----

def make_sedd(width, blocks, B, L):
    """(model in float32, batch) on the CPU.

    Weights that start at zero are randomised too: otherwise the output would not depend on sigma.
    """
    model = SEDD(GRAPH.vocab_size, width, blocks, 4, dropout=0.0, forbidden=(X_ID,),
                     init_logits=1.0)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    x0 = torch.randint(0, X_ID, (B, L))
    sigma, dsigma = NOISE(torch.linspace(0.1, 0.9, B))
    xt = GRAPH.corrupt(x0, sigma)
    return model, (xt, x0, sigma, dsigma)


def sedd_step(model, batch, dtype, ddp):
    """(log scores (B, L, V), mean loss in nats per residue), as in training."""
    xt, x0, sigma, dsigma = batch
    with autocast(dtype, ddp):
        log_score = model(xt, sigma)
    mask = torch.ones_like(xt, dtype=torch.bool)
    loss, count = score_entropy_loss(log_score, sigma, dsigma, xt, x0, GRAPH, mask)
    return log_score, loss.sum() / count.sum()


def make_proteinmpnn(width, edges, M, L):
    """(model in float32, batch) on the CPU: M sequences on a random walk of 3.8 Angstrom steps."""
    model = ProteinMPNN(num_edges=edges, hidden_size=width, product=fast_linear)
    walk = 3.8 * F.normalize(torch.randn(1, L, 3), dim=-1).cumsum(1)
    X = walk[:, :, None] + torch.randn(1, L, 4, 3)
    mask = torch.ones(1, L, dtype=torch.int64)
    residue_idx = torch.arange(L)[None]
    chain_id = torch.ones(1, L, dtype=torch.int64)
    S = torch.randint(0, X_ID, (M, L))
    order = torch.rand(M, L).argsort(-1)
    return model, (X, mask, residue_idx, chain_id, S, order)


def proteinmpnn_step(model, batch, dtype, ddp):
    """(log-probabilities (M, L, 21), mean negative log-likelihood in nats per residue)."""
    *structure, S, order = batch
    graph = model.graph(*structure)
    with autocast(dtype, ddp):
        log_probs = model(graph, S, order)
    return log_probs, F.nll_loss(log_probs.flatten(0, 1), S.flatten())


class Network(NamedTuple):
    make: Callable              # (**size) -> (model, batch)
    step: Callable              # (model, batch, dtype, ddp) -> (output, loss)
    size_for_errors: dict
    size_on_cpu: dict           # for speeds, like the next
    size_on_accelerator: dict


NETWORKS = {
    "SEDD": Network(
        make_sedd, sedd_step,
        size_for_errors=dict(width=64, blocks=2, B=4, L=48),
        size_on_cpu=dict(width=256, blocks=2, B=4, L=128),
        size_on_accelerator=dict(width=768, blocks=4, B=8, L=512)),
    "ProteinMPNN": Network(
        make_proteinmpnn, proteinmpnn_step,
        size_for_errors=dict(width=64, edges=16, M=4, L=40),
        size_on_cpu=dict(width=128, edges=32, M=2, L=64),
        size_on_accelerator=dict(width=128, edges=48, M=16, L=300))}


def make(network, size, dtype, ddp):
    """(model, batch) on the device, the same on every rank.

    Weights and real numbers of the batch are float64 for dtype float64, else float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = network.make(**size)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    batch = [tensor.to(real) if tensor.is_floating_point() else tensor for tensor in batch]
    return model.to(ddp.device, real), [tensor.to(ddp.device) for tensor in batch]


def size_for_speed(network, ddp):
    return network.size_on_cpu if ddp.device.type == "cpu" else network.size_on_accelerator


# ---- what is measured ----

@dataclass
class Row:
    """Measurements of a dtype."""
    missing: str = ""                               # why the dtype cannot be used
    errors: dict = field(default_factory=dict)      # as "SEDD output": relative error
    seconds: dict = field(default_factory=dict)     # network's name: best time of a step
    rate: float | None = None                       # FLOP/s of a large matrix product


def measure_errors(ddp):
    """Make the table: {dtype: Row}, without speeds."""
    cpu = Ddp()                                     # settings of one process on the CPU
    exact = outputs_and_gradients(torch.float64, cpu)
    rows = {}
    for dtype in DTYPES:
        row = Row()
        rows[dtype] = row
        try:
            found = outputs_and_gradients(dtype, ddp)
        except (RuntimeError, TypeError) as error:  # this torch or device has no such kernels
            row.missing = in_short(error)
            continue
        for name, expected in exact.items():        # the error is nan or infinite if found is
            row.errors[name] = float((found[name] - expected).norm() / expected.norm())
    return rows


def outputs_and_gradients(dtype, ddp):
    """{"SEDD output": tensor, "SEDD gradient": vector, ...} in float64 on the CPU."""
    results = {}
    for name, network in NETWORKS.items():
        output, gradient = output_and_gradient(network, dtype, ddp)
        results[f"{name} output"] = output.cpu().double()
        results[f"{name} gradient"] = gradient.cpu().double()
    return results


def output_and_gradient(network, dtype, ddp):
    """(output, gradient as one vector); for float16 by the first scale that lets it be finite."""
    model, batch = make(network, network.size_for_errors, dtype, ddp)
    scaler = grad_scaler(dtype, ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(MOST_TRIES):
        optimizer.zero_grad()
        output, loss = network.step(model, batch, dtype, ddp)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                              if parameter.grad is not None])
        if gradient.isfinite().all():
            break
        scaler.step(optimizer)
        scaler.update()
    return output.detach(), gradient


def measure_speeds(rows, ddp):
    """Fill in the speeds of the table."""
    timed = [dtype for dtype in TIMED if not rows[dtype].missing]
    for name, network in NETWORKS.items():
        try:
            for _ in range(ROUNDS):     # in turn, so that other work here slows all dtypes alike
                for dtype in timed:
                    best = rows[dtype].seconds.get(name, math.inf)
                    rows[dtype].seconds[name] = min(best, time_step(network, dtype, ddp))
        except RuntimeError as error:   # such as out of memory
            print(f"{name} was not timed in each dtype: {in_short(error)}", file=sys.stderr)
    for dtype in {torch.float32, dtype_of_training(ddp)}:
        if not rows[dtype].missing:
            rows[dtype].rate = measure_matmul(matmul_rows(ddp.device), dtype, ddp.device, timer)


def time_step(network, dtype, ddp):
    """Seconds for loss and gradient, the best of some turns."""
    model, batch = make(network, size_for_speed(network, ddp), dtype, ddp)

    def step():
        _, loss = network.step(model, batch, dtype, ddp)
        loss.backward()

    watch = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return min(watch.blocked_autorange(min_run_time=SECONDS).times)


def speed(rows, dtype, name):
    """Speed-up of a network over float32, or None if one of the two was not measured."""
    seconds = rows[dtype].seconds.get(name)
    in_float32 = rows[torch.float32].seconds.get(name)
    if seconds is None or in_float32 is None:
        return None
    return in_float32 / seconds


# ---- the checks: each is a line of the table ----

class Result(NamedTuple):
    """What the check of a dtype found."""
    status: str     # PASS, FAIL or SKIP
    text: str


HEAD = """\
                error of    SEDD       ProteinMPNN      speed, x float32
      dtype      output gradient   output gradient     SEDD  ProteinMPNN"""


def check_dtype(dtype, rows, ddp):
    """Is a dtype as close to float64 as its rounding lets it be? float32 and that of training have
    to work; others may be missing."""
    row = rows[dtype]
    if row.missing:
        is_needed = dtype in (torch.float32, dtype_of_training(ddp))
        return Result("FAIL" if is_needed else "SKIP", f"not on this device: {row.missing}")
    most = MOST_EPS * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    text = ""
    wrong = []
    for name, error in row.errors.items():
        text += f"{error:9.0e}"
        if not error <= most:   # or nan
            wrong.append(name)
    for name in NETWORKS:
        gain = speed(rows, dtype, name)
        text += "        -" if gain is None else f"{gain:9.1f}"
    if wrong:
        return Result("FAIL", f"{text}  off by more than {most:.1g}: {', '.join(wrong)}")
    return Result("PASS", text)


def check_on_all_ranks(dtype, rows, ddp):
    """What rank 0 found on a dtype; if it failed on any rank, what the first one of these found."""
    found = check_dtype(dtype, rows, ddp)
    results = [Result(status, text) for status, text in gather(tuple(found), ddp)]
    failed = [rank for rank, result in enumerate(results) if result.status == "FAIL"]
    if not failed:
        return results[0]
    ranks = ", ".join(map(str, failed))
    return Result("FAIL", f"{results[failed[0]].text} (on rank {ranks})")


def recommend(rows, results):
    """The first dtype that passed, on all ranks, and in which SEDD trains faster than in float32.

    bfloat16 comes first, as it has float32's range and needs no GradScaler. A dtype that the
    hardware only emulates is slower than float32, and so not recommended.
    """
    for dtype in (torch.bfloat16, torch.float16):
        gain = speed(rows, dtype, "SEDD")
        if results[dtype].status == "PASS" and gain is not None and gain >= FASTER:
            return dtype
    return torch.float32


# ---- python test_dtype.py ----

def report(ddp):
    """Check on every rank, print on rank 0.

    Returns: the dtypes that failed on any rank.
    """
    rows = measure_errors(ddp)
    measure_speeds(rows, ddp)
    results = {dtype: check_on_all_ranks(dtype, rows, ddp) for dtype in DTYPES}
    failed = [dtype for dtype in DTYPES if results[dtype].status == "FAIL"]
    device_name = "cpu"
    if ddp.device.type != "cpu":
        device_name = torch.get_device_module(ddp.device).get_device_name(ddp.device)
    width = size_for_speed(NETWORKS["SEDD"], ddp)["width"]
    print0(ddp, f"torch {torch.__version__} on {device_name}, {torch.get_num_threads()} thread(s); "
                f"speeds with SEDD of width {width}")
    print0(ddp, HEAD)
    for dtype, (status, text) in results.items():
        print0(ddp, f"{status}  {short_name(dtype):<9}{text}")
    print0(ddp, f"{len(failed)} of {len(DTYPES)} checks failed; mixed_precision: true means "
                f"{short_name(dtype_of_training(ddp))}")
    for line in describe_rates(rows):
        print0(ddp, line)
    print0(ddp, f"recommended: memory.mixed_precision: {short_name(recommend(rows, results))}")
    return failed


def describe_rates(rows):
    """Lines on the measured FLOP/s, as settings for a run's `mfu`."""
    lines = []
    for dtype, row in rows.items():
        if row.rate is not None:
            lines.append(f"measured in {short_name(dtype)}, one rank: monitoring.matmul_tflops: "
                         f"{row.rate / 1e12:.3g}")
    return lines


def cli(argv):
    parser = Parser(description=__doc__, allow_abbrev=False)
    add_launch_arguments(parser)
    if "-h" in argv or "--help" in argv:
        parser.parse_args(["--help"])
    with started_ranks(None, argv) as ddp:
        parser.parse_args(argv)     # here, so that an error is printed once
        failed = report(ddp)
    sys.exit(FAILED if failed else 0)


# ---- pytest test_dtype.py ----

def test_on_this_cpu():
    rows = measure_errors(Ddp())
    for dtype in DTYPES:
        assert check_dtype(dtype, rows, Ddp()).status != "FAIL", dtype


if __name__ == "__main__":
    cli(sys.argv[1:])
