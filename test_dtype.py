"""Which dtypes work on this device, how exactly and how fast?

Run it to choose `memory.mixed_precision`.

    python test_dtype.py                # on the device that training would choose; or --device cpu
    mpirun -n 2 python test_dtype.py    # every rank checks its device; rank 0 prints
    pytest test_dtype.py                # the same checks, on this machine's CPU

Prints a table with a line PASS, FAIL or SKIP for each dtype and for what networks are given, then
how fast large matrices are multiplied, for `mfu` in the log of train_sedd_ddp.py; the last line is
the recommended setting. Errors are relative norms of the difference to the same computation in
float64 on the CPU: of a matrix product, and of the outputs and gradients of SEDD and ProteinMPNN,
under autocast as in training. Exit code of every rank: 0, 3 if a check failed on any rank, 2 for
wrong arguments. Reads and writes no files.
"""
import functools
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer, timer

from ddp_setup import Ddp, autocast, gather, grad_scaler, print0
from mpnn.model import ProteinMPNN
from sedd.diffusion import AbsorbingGraph, make_noise, sample, score_entropy_loss
from sedd.fast_cpu import FastSEDD
from training.command_line import add_launch_arguments, started_ranks
from training.fast_linear import fast_linear
from training.parser import Parser
from training.peak import matmul_rows, measure_matmul
from training.precision import choose_dtype

FAILED = 3                  # exit code
FLOAT64 = torch.float64
FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
FLOAT16 = torch.float16
DTYPES = (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)
# Largest relative error, in units of the dtype's eps (its spacing at 1); 64 eps of float32, in
# which sums are computed, are added. Seen were 0.5 eps in a product and 1.4 in a network, which
# rounds dozens of times. Overflow, lost gradients, TF32, or bfloat16 instead of float16 (7 eps)
# exceed it.
PRODUCT_EPS = 1
NETWORK_EPS = 4
MOST_TRIES = 20             # steps in which the gradient scaler finds a scale
FASTER = 1.1                # least speed-up for which a lower precision is recommended
ROUNDS = 2                  # in which each speed is measured
SECONDS = 0.25              # for which, at least, in each round
WIDTH = 80                  # columns of a terminal
DRAW_STEPS = 6              # denoising steps of a sample
X_ID = 20                   # the token of an unknown residue, below which the known ones are
GRAPH = AbsorbingGraph(21)
NOISE = make_noise("loglinear", eps=1e-3)


def short_name(dtype):
    return str(dtype).removeprefix("torch.")


def in_short(error):
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# ---- the networks ----

class Network(NamedTuple):
    make: Callable              # (*size) -> (model, batch)
    step: Callable              # (model, batch, dtype, ddp) -> (output, loss)
    embedding: str              # name of the part of the model that tokens reach first
    size_for_errors: tuple
    size_on_cpu: tuple          # for speeds, like the next
    size_on_accelerator: tuple


def random_sedd(width, blocks, B, L):
    """(model in float32, batch) on the CPU.

    Weights that start at zero are randomised too: otherwise the output would not depend on sigma.
    """
    model = FastSEDD(GRAPH.vocab_size, width, blocks, 4, dropout=0.0, forbidden=(X_ID,),
                     init_logits=1.0)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    x0 = torch.randint(0, X_ID, (B, L))
    sigma, dsigma = NOISE(torch.linspace(0.1, 0.9, B))
    return model, (GRAPH.corrupt(x0, sigma), x0, sigma, dsigma)


def sedd_step(model, batch, dtype, ddp):
    """(log scores (B, L, V), mean loss in nats per residue), as in training."""
    xt, x0, sigma, dsigma = batch
    with autocast(dtype, ddp):
        log_score = model(xt, sigma)
    mask = torch.ones_like(xt, dtype=torch.bool)
    loss, count = score_entropy_loss(log_score, sigma, dsigma, xt, x0, GRAPH, mask)
    return log_score, loss.sum() / count.sum()


def random_proteinmpnn(width, edges, M, L):
    """(model in float32, batch) on the CPU: M sequences on a random walk of 3.8 Angstrom steps."""
    model = ProteinMPNN(num_edges=edges, hidden_size=width, product=fast_linear)
    walk = 3.8 * F.normalize(torch.randn(1, L, 3), dim=-1).cumsum(1)
    X = walk[:, :, None] + torch.randn(1, L, 4, 3)
    ones = torch.ones(1, L, dtype=torch.int64)
    S = torch.randint(0, X_ID, (M, L))
    order = torch.rand(M, L).argsort(-1)
    return model, (X, ones, torch.arange(L)[None], ones, S, order)


def proteinmpnn_step(model, batch, dtype, ddp):
    """(log-probabilities (M, L, 21), mean negative log-likelihood in nats per residue)."""
    *structure, S, order = batch
    graph = model.graph(*structure)
    with autocast(dtype, ddp):
        log_probs = model(graph, S, order)
    return log_probs, F.nll_loss(log_probs.flatten(0, 1), S.flatten())


NETWORKS = {
    "SEDD": Network(random_sedd, sedd_step, "vocab_embed",
                    (64, 2, 4, 48), (256, 2, 4, 128), (768, 4, 8, 512)),
    "ProteinMPNN": Network(random_proteinmpnn, proteinmpnn_step, "W_s",
                           (64, 16, 4, 40), (128, 32, 2, 64), (128, 48, 16, 300))}


def make(name, size, device, dtype=FLOAT32):
    """(model, batch) on the device, the same on every rank.

    Weights and real numbers of the batch are float64 for dtype float64, else float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = NETWORKS[name].make(*size)
    exact = FLOAT64 if dtype == FLOAT64 else FLOAT32
    return model.to(device, exact), [x.to(device, exact if x.is_floating_point() else x.dtype)
                                     for x in batch]


# ---- what is measured ----

@dataclass
class Row:
    """Measurements of a dtype."""
    missing: str = ""                               # why the dtype cannot be used
    matmul: float | None = None                     # relative error of a matrix product
    networks: dict = field(default_factory=dict)    # model's name: errors of output and gradient
    seconds: dict = field(default_factory=dict)     # "matmul" or model's name: best time
    rate: float | None = None                       # FLOP/s of a large matrix product


def measure_errors(ddp):
    """Make the table: {dtype: Row}, without speeds."""
    a, b = random_factors(ddp)
    cpu = Ddp()                                     # settings of one process on the CPU
    exact = {name: output_and_gradient(name, FLOAT64, cpu) for name in NETWORKS}
    rows = {}
    for dtype in DTYPES:
        row = Row()
        rows[dtype] = row
        try:
            product = a.to(ddp.device, dtype) @ b.to(ddp.device, dtype)
            row.matmul = distance(product.cpu().double(), a @ b)
            for name in NETWORKS:
                found = output_and_gradient(name, dtype, ddp)
                row.networks[name] = list(map(distance, found, exact[name]))
        except (RuntimeError, TypeError) as error:  # this torch or device has no such kernels
            row.missing = in_short(error)
    return rows


def random_factors(ddp):
    """Two square matrices in float64 on the CPU, the same on every rank."""
    n = 384 if ddp.device.type == "cpu" else 2048
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, n, dtype=FLOAT64, generator=generator) for _ in range(2)]


def output_and_gradient(name, dtype, ddp):
    """(output, gradient as one vector), both float64 on the CPU."""
    network = NETWORKS[name]
    model, batch = make(name, network.size_for_errors, ddp.device, dtype)
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
    return output.detach().cpu().double(), gradient.cpu().double()


def distance(found, expected):
    """Relative norm of the difference; nan or infinite if `found` is."""
    return float((found - expected).norm() / expected.norm())


def measure_speeds(rows, ddp):
    """Fill in the speeds of the table."""
    for what in ("matmul", *NETWORKS):
        dtypes = [dtype for dtype in DTYPES if not rows[dtype].missing]
        if what in NETWORKS:    # nobody trains in float64
            dtypes = [dtype for dtype in dtypes if dtype != FLOAT64]
        try:
            watches = {dtype: Timer("call()", globals={"call": call_in(dtype, what, ddp)},
                                    num_threads=torch.get_num_threads()) for dtype in dtypes}
            for _ in range(ROUNDS):     # in turn, so that other work here slows all dtypes alike
                for dtype, watch in watches.items():
                    best = min(watch.blocked_autorange(min_run_time=SECONDS).times)
                    rows[dtype].seconds[what] = min(best, rows[dtype].seconds.get(what, best))
        except RuntimeError as error:               # such as out of memory: no speed in the table
            print(f"{what} could not be timed: {in_short(error)}", file=sys.stderr)
    for dtype in dict.fromkeys((FLOAT32, choose_dtype(True, ddp.device)[0])):   # of training
        if not rows[dtype].missing:
            rows[dtype].rate = measure_matmul(matmul_rows(ddp.device), dtype, ddp.device, timer)


def call_in(dtype, what, ddp):
    """A function that multiplies matrices, or computes loss and gradient of a network."""
    if what == "matmul":
        return functools.partial(torch.matmul, *(x.to(ddp.device, dtype)
                                                 for x in random_factors(ddp)))
    model, batch = make(what, size_for_speed(what, ddp), ddp.device, dtype)
    return lambda: NETWORKS[what].step(model, batch, dtype, ddp)[1].backward()


def size_for_speed(name, ddp):
    network = NETWORKS[name]
    return network.size_on_cpu if ddp.device.type == "cpu" else network.size_on_accelerator


def speed(rows, dtype, what):
    """Speed-up over float32, or None if one of the two was not measured."""
    seconds = rows[dtype].seconds.get(what)
    in_float32 = rows[FLOAT32].seconds.get(what)
    return in_float32 / seconds if seconds and in_float32 else None


# ---- the checks: each is a line of the table ----

class Result(NamedTuple):
    """What a check found."""
    status: str     # PASS, FAIL or SKIP
    text: str


HEAD = """\
                error of             SEDD      ProteinMPNN     speed, x float32
      dtype       matmul  output gradient  output gradient matmul   SEDD   MPNN"""


def check_dtype(dtype, rows, ddp):
    """Is a dtype as close to float64 as its rounding lets it be? float32 and that of training have
    to work; others may be missing."""
    row = rows[dtype]
    if row.missing:
        needed = dtype in (FLOAT32, choose_dtype(True, ddp.device)[0])
        return Result("FAIL" if needed else "SKIP", f"not on this device: {row.missing}")
    text = f"{row.matmul:8.0e}"
    for output, gradient in row.networks.values():
        text += f"{output:8.0e} {gradient:8.0e}"
    for what in ("matmul", *NETWORKS):
        gain = speed(rows, dtype, what)
        text += f"{gain:7.1f}" if gain else "      -"
    limits = {"the product": PRODUCT_EPS, **dict.fromkeys(NETWORKS, NETWORK_EPS)}
    status = "PASS"
    for (what, units), errors in zip(limits.items(), [[row.matmul], *row.networks.values()]):
        most = units * torch.finfo(dtype).eps + 64 * torch.finfo(FLOAT32).eps
        if not all(error <= most for error in errors):      # or nan
            status = "FAIL"
            text += f" {what} is off by more than {most:.1g}."
    return Result(status, text)


def check_tokens(rows, ddp):
    """Do tokens reach the embeddings as int64 in every dtype, and are samples int64? bfloat16 has
    no odd numbers above 256."""
    seen = set()
    for name, network in NETWORKS.items():
        model, batch = make(name, network.size_for_errors, ddp.device)
        embedding = getattr(model, network.embedding)
        embedding.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
        for dtype in (FLOAT32, BFLOAT16, FLOAT16):
            if not rows[dtype].missing:
                network.step(model, batch, dtype, ddp)
    seen.add(draw(ddp, no_preference).dtype)
    names = ", ".join(sorted(map(short_name, seen)))
    if seen != {torch.int64}:
        return Result("FAIL", f"{names} in networks and samples; expected int64 alone")
    return Result("PASS", f"{names} in both networks, in every dtype, and in samples")


def check_sigma(rows, ddp):
    """Is each network call of sample() given the total noise sigma(t) of that step in float32, and
    not the time t?"""
    sigmas = []

    def log_score(xt, sigma):
        sigmas.append(sigma.cpu())
        return no_preference(xt, sigma)

    draw(ddp, log_score)
    sigma, _ = NOISE(torch.linspace(1, 1e-5, DRAW_STEPS + 1))
    found = torch.stack(sigmas)
    text = (f"{short_name(found.dtype)}, from {found.max():.3g} to {found.min():.1g} in "
            f"{len(found)} network calls of a sample")
    try:
        torch.testing.assert_close(found, sigma[:, None].expand(-1, 2), rtol=1e-4, atol=1e-8)
    except AssertionError as error:
        return Result("FAIL", f"{text}; expected sigma(t) in float32. {in_short(error)}")
    return Result("PASS", text)


def draw(ddp, log_score):
    return sample(log_score, GRAPH, NOISE, (2, 12), DRAW_STEPS, forbidden=(X_ID,),
                  device=ddp.device, generator=torch.Generator().manual_seed(0))


def no_preference(xt, sigma):
    """Log scores of a network that prefers no letter."""
    return torch.zeros(*xt.shape, GRAPH.vocab_size, device=xt.device)


CHECKS = {**{short_name(dtype): functools.partial(check_dtype, dtype) for dtype in DTYPES},
          "tokens": check_tokens, "sigma": check_sigma}


# ---- python test_dtype.py ----

def report(ddp):
    """Check on every rank, print on rank 0.

    Returns: names of the checks that failed on any rank.
    """
    rows = measure_errors(ddp)
    measure_speeds(rows, ddp)
    results = {name: check_on_all_ranks(check, rows, ddp) for name, check in CHECKS.items()}
    failed = [name for name, result in results.items() if result.status == "FAIL"]
    device_name = "cpu"
    if ddp.device.type != "cpu":
        device_name = torch.get_device_module(ddp.device).get_device_name(ddp.device)
    print0(ddp, f"torch {torch.__version__} on {device_name}, {torch.get_num_threads()} thread(s); "
                f"speeds with SEDD of width {size_for_speed('SEDD', ddp)[0]}")
    print0(ddp, HEAD)
    for name, (status, text) in results.items():
        print0(ddp, textwrap.fill(f"{status}  {name:<10}{text}", WIDTH, subsequent_indent=" " * 18,
                                  break_on_hyphens=False))
    print0(ddp, f"{len(failed)} of {len(CHECKS)} checks failed; mixed_precision: true means "
                f"{short_name(choose_dtype(True, ddp.device)[0])}")
    for line in describe_rates(rows):
        print0(ddp, line)
    print0(ddp, f"recommended: memory.mixed_precision: {short_name(recommend(rows, results))}")
    return failed


def check_on_all_ranks(check, rows, ddp):
    """What a check found on rank 0; if it failed on any rank, what the first one of these found."""
    try:
        result = check(rows, ddp)
    except Exception as error:      # any error fails this check; do the others too
        result = Result("FAIL", in_short(error))
    results = [Result(*found) for found in gather([*result], ddp)]
    failed = [rank for rank, found in enumerate(results) if found.status == "FAIL"]
    if not failed:
        return results[0]
    ranks = ", ".join(map(str, failed))
    return Result("FAIL", f"{results[failed[0]].text} (on rank {ranks})")


def recommend(rows, results):
    """The first dtype that passed, on all ranks, and in which SEDD trains faster than in float32.

    bfloat16 comes first, as it has float32's range and needs no GradScaler. A dtype that the
    hardware only emulates is slower than float32, and so not recommended.
    """
    for dtype in (BFLOAT16, FLOAT16):
        gain = speed(rows, dtype, "SEDD")
        if results[short_name(dtype)].status == "PASS" and gain and gain >= FASTER:
            return dtype
    return FLOAT32


def describe_rates(rows):
    """Lines on the measured FLOP/s, as settings for a run's `mfu`."""
    return [f"measured in {short_name(dtype)}, one rank: monitoring.matmul_tflops: "
            f"{row.rate / 1e12:.3g}" for dtype, row in rows.items() if row.rate]


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
    for name, check in CHECKS.items():
        assert check(rows, Ddp()).status != "FAIL", name


if __name__ == "__main__":
    cli(sys.argv[1:])
