"""Which dtypes work on this device, how exactly and how fast?

Run it to choose `memory.mixed_precision`.

    python test_dtype.py                # on the device that training would choose; or --device cpu
    mpirun -n 2 python test_dtype.py    # every rank checks its device; rank 0 prints
    pytest test_dtype.py                # the same checks, on this machine's CPU

Prints a table of dtypes, then a line PASS, FAIL or SKIP for each claim, and how fast large matrices
are multiplied, for `mfu` in the log of train_sedd_ddp.py; the last line is the recommended setting.
Errors are relative norms of the difference to the same computation in float64 on the CPU: of a
matrix product, and of the outputs and gradients of SEDD and ProteinMPNN, under autocast as in
training. Exit code of every rank: 0, 3 if a claim failed on any rank, 2 for wrong arguments. Reads
and writes no files.
"""
if __name__ == "__main__":   # Ctrl-C during the imports below ends the script with one line
    import ddp_guard
    ddp_guard.end_imports_at_ctrl_c()

import contextlib
import functools
import math
import sys
import textwrap
import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ddp_setup import Ddp, all_sum, autocast, broadcast, choose_dtype, grad_scaler, print0
import mpnn.fast_cpu
from mpnn.model import ProteinMPNN
from training.config import Parser
from training.peak import matmul_rows, measure_matmul
from training.command_line import add_launch_arguments, started_ranks
from sedd.diffusion import AbsorbingGraph, make_noise, sample, score_entropy_loss
from sedd.fast_cpu import speed_up
from sedd.model import SEDD

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
FROM_ROUNDING = 0.1         # error of a network that rounded weights alone do not make
FASTER = 1.1                # least speed-up for which a lower precision is recommended
WIDTH = 80                  # columns of a terminal
DRAW_STEPS = 6              # denoising steps of a sample
X_ID = 20                   # the token of an unknown residue, below which the known ones are
GRAPH = AbsorbingGraph(21)
NOISE = make_noise("loglinear", eps=1e-3)


def short_name(dtype):
    return str(dtype).removeprefix("torch.")


def first_line(error):
    return (str(error).splitlines() or [""])[0]


# ---- what is measured ----

class NetworkErrors(NamedTuple):
    """Relative errors of a network."""
    output: float
    gradient: float


@dataclass
class Row:
    """Measurements of a dtype."""
    error: str | None = None                        # why the dtype cannot be used
    matmul: float | None = None                     # relative error of a matrix product
    networks: dict = field(default_factory=dict)    # model's name: NetworkErrors
    seconds: dict = field(default_factory=dict)     # "matmul" or model's name: best time
    tries: dict = field(default_factory=dict)       # model's name: steps to a finite gradient
    rate: float | None = None                       # FLOP/s of a large matrix product


def random_sedd(width, blocks, B, L):
    """(model in float32, batch) on the CPU.

    Weights that start at zero are randomised too: otherwise the output would not depend on sigma.
    """
    # eval mode: in training, log scores of known residues are computed on devices but not on CPUs.
    model = SEDD(GRAPH.vocab_size, width, blocks, 4, dropout=0.0, forbidden=(X_ID,),
                 init_logits=1.0).eval()
    speed_up(model)
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
    model = ProteinMPNN(num_edges=edges, hidden_size=width)
    mpnn.fast_cpu.speed_up(model)
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


class Network(NamedTuple):
    make: Callable              # (*size) -> (model, batch)
    step: Callable              # (model, batch, dtype, ddp) -> (output, loss)
    size_for_errors: tuple
    size_on_cpu: tuple          # for speeds, like the next
    size_on_accelerator: tuple


NETWORKS = {
    "SEDD": Network(random_sedd, sedd_step, (64, 2, 4, 48), (256, 2, 4, 128), (768, 4, 8, 512)),
    "ProteinMPNN": Network(random_proteinmpnn, proteinmpnn_step, (64, 16, 4, 40), (128, 32, 2, 64),
                           (128, 48, 16, 300))}


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


def make_small(name, ddp, dtype=FLOAT32):
    """(model, batch) of the size for errors."""
    return make(name, NETWORKS[name].size_for_errors, ddp.device, dtype)


def output_and_gradient(name, dtype, ddp):
    """(output, gradient as one vector, both float64 on the CPU; steps until it was finite)."""
    model, batch = make_small(name, ddp, dtype)
    scaler = grad_scaler(dtype, ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for tries in range(1, MOST_TRIES + 1):
        optimizer.zero_grad()
        output, loss = NETWORKS[name].step(model, batch, dtype, ddp)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                              if parameter.grad is not None])
        if gradient.isfinite().all():
            break
        scaler.step(optimizer)
        scaler.update()
    return output.detach().cpu().double(), gradient.cpu().double(), tries


def distance(found, expected):
    """Relative norm of the difference; nan or infinite if `found` is."""
    return float((found - expected).norm() / expected.norm())


def best_times(calls, ddp, limit):
    """{key: seconds of the best call of calls[key]()}.

    Calls alternate, for about `limit` seconds each, so that other work on the machine slows all
    alike. The first call of each does not count.
    """
    best = dict.fromkeys(calls, math.inf)
    rounds = 0
    end = time.monotonic() + limit * len(calls)
    while rounds < 3 or time.monotonic() < end:
        for key, call in calls.items():
            start = now(ddp)
            call()
            seconds = now(ddp) - start
            if rounds > 0:
                best[key] = min(best[key], seconds)
        rounds += 1
    return best


def now(ddp):
    """Seconds of the clock, after the device has finished its work."""
    if ddp.device.type != "cpu":
        getattr(torch, ddp.device.type).synchronize()
    return time.perf_counter()


def random_factors(ddp):
    """Two square matrices in float64 on the CPU, the same on every rank."""
    n = 384 if ddp.device.type == "cpu" else 2048
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, n, dtype=FLOAT64, generator=generator) for _ in range(2)]


def measure_errors(ddp):
    """Make the table: {dtype: Row}, without seconds."""
    rows = {}
    a, b = random_factors(ddp)
    cpu = Ddp()                                     # settings of one process on the CPU
    expected = {name: output_and_gradient(name, FLOAT64, cpu) for name in NETWORKS}
    for dtype in DTYPES:
        row = Row()
        rows[dtype] = row
        try:
            product = a.to(ddp.device, dtype) @ b.to(ddp.device, dtype)
            row.matmul = distance(product.cpu().double(), a @ b)
            for name, (exact_output, exact_gradient, _) in expected.items():
                output, gradient, row.tries[name] = output_and_gradient(name, dtype, ddp)
                row.networks[name] = NetworkErrors(distance(output, exact_output),
                                                   distance(gradient, exact_gradient))
        except (RuntimeError, TypeError) as error:  # this torch or device has no such kernels
            row.error = f"{type(error).__name__}: {first_line(error)}"
    return rows


def measure_speeds(rows, ddp, limit):
    """Fill in the seconds of the table. limit: seconds for which each speed is measured."""
    dtypes = [dtype for dtype in DTYPES if rows[dtype].error is None]
    for what in ("matmul", *NETWORKS):
        try:
            if what == "matmul":
                calls = matmul_calls(dtypes, ddp)
            else:
                calls = training_calls(what, dtypes, ddp)
            for dtype, seconds in best_times(calls, ddp, limit).items():
                rows[dtype].seconds[what] = seconds
        except RuntimeError as error:               # such as out of memory: no speed in the table
            print(f"{what} could not be timed: {first_line(error)}", file=sys.stderr)
    for dtype in dict.fromkeys((FLOAT32, choose_dtype(True, ddp.device)[0])):   # of training
        if rows[dtype].error is None:
            rows[dtype].rate = measure_matmul(matmul_rows(ddp.device), dtype, ddp.device,
                                              lambda: now(ddp))


def matmul_calls(dtypes, ddp):
    """{dtype: function that multiplies in it}."""
    a, b = random_factors(ddp)
    return {dtype: functools.partial(torch.matmul, a.to(ddp.device, dtype), b.to(ddp.device, dtype))
            for dtype in dtypes}


def describe_rates(rows):
    """Lines on the measured FLOP/s, as settings for a run's `mfu`."""
    return [f"measured in {short_name(dtype)}, one rank: monitoring.matmul_tflops: "
            f"{row.rate / 1e12:.3g}" for dtype, row in rows.items() if row.rate]


def size_for_speed(name, ddp):
    network = NETWORKS[name]
    return network.size_on_cpu if ddp.device.type == "cpu" else network.size_on_accelerator


def training_calls(name, dtypes, ddp):
    """{dtype: function that computes loss and gradient}, without float64."""
    def train(model, batch, dtype):
        NETWORKS[name].step(model, batch, dtype, ddp)[1].backward()

    size = size_for_speed(name, ddp)
    return {dtype: functools.partial(train, *make(name, size, ddp.device, dtype), dtype)
            for dtype in dtypes if dtype != FLOAT64}


def speed(rows, dtype, what):
    """Speed-up over float32, or None if one of the two was not measured."""
    seconds = rows[dtype].seconds.get(what)
    in_float32 = rows[FLOAT32].seconds.get(what)
    return in_float32 / seconds if seconds and in_float32 else None


def table(rows):
    """Lines of at most WIDTH columns."""
    lines = ["            matmul     SEDD, error     MPNN, error speed, x float32",
             "dtype        error  output gradient output gradient matmul SEDD MPNN"]
    for dtype, row in rows.items():
        if row.error:
            figures = row.error
        else:
            errors = "  ".join(f"{found.output:6.0e}  {found.gradient:6.0e}"
                               for found in row.networks.values())
            gains = ""
            for what in ("matmul", *NETWORKS):
                gain = speed(rows, dtype, what)
                gains += f"{gain:5.1f}" if gain else "    -"
            figures = f"  {row.matmul:6.0e}  {errors}  {gains}"
        lines.append(f"{short_name(dtype):9} {figures}"[:WIDTH])
    return lines


# ---- the claims: each returns (True, False, or None if it cannot be checked; text) ----

STATUS = {True: "PASS", False: "FAIL", None: "SKIP"}


def allowed(dtype, units):
    return units * torch.finfo(dtype).eps + 64 * torch.finfo(FLOAT32).eps


def all_within(ddp, rows, units, errors_of):
    """Is every dtype within `units` eps? Only float32 and the dtype of training have to work.

    errors_of: function from a Row to its relative errors.
    """
    of_training, _ = choose_dtype(True, ddp.device)
    holds = True
    parts = []
    for dtype, row in rows.items():
        if row.error is not None:
            parts.append(f"no {short_name(dtype)}: {row.error}")
            if dtype in (FLOAT32, of_training):
                holds = False
        else:
            errors = errors_of(row)
            most = allowed(dtype, units)
            parts.append(f"{short_name(dtype)} {max(errors):.1g} of {most:.1g}")
            if not all(error <= most for error in errors):      # or nan
                holds = False
    return holds, ", ".join(parts)


def matrix_products_are_close_to_float64(ddp, rows):
    return all_within(ddp, rows, PRODUCT_EPS, lambda row: [row.matmul])


def sedd_is_finite_and_close(ddp, rows):
    return all_within(ddp, rows, NETWORK_EPS, lambda row: row.networks["SEDD"])


def proteinmpnn_is_finite_and_close(ddp, rows):
    return all_within(ddp, rows, NETWORK_EPS, lambda row: row.networks["ProteinMPNN"])


def half_dtypes(rows):
    return [dtype for dtype in (BFLOAT16, FLOAT16) if rows[dtype].error is None]


def tokens_stay_integers(ddp, rows):
    """Tokens reach the embeddings as int64 under every autocast and in low-precision models.

    Samples are int64 too. Models refuse tokens in real dtypes: bfloat16 has no odd numbers above
    256.
    """
    seen = set()        # dtypes that reach embeddings
    taken = set()       # models that accept real tokens
    cases = [(FLOAT32, FLOAT32)]        # (dtype of weights, of autocast)
    for half in half_dtypes(rows):
        cases += [(FLOAT32, half), (half, half)]
    for name, network in NETWORKS.items():
        for weights, compute in cases:
            model, batch = make_small(name, ddp)
            lookup = model.vocab_embed if name == "SEDD" else model.W_s
            lookup.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
            with torch.no_grad():
                network.step(model.to(weights), batch, compute, ddp)
                real = [x if x.is_floating_point() else x.to(compute) for x in batch]
                with contextlib.suppress(ValueError):
                    network.step(model, real, compute, ddp)
                    taken.add(name)

    def no_preference(xt, sigma):
        return torch.zeros(*xt.shape, GRAPH.vocab_size, device=ddp.device)

    seen.add(draw(ddp, no_preference).dtype)
    dtypes = ", ".join(sorted(map(str, seen)))
    others = f"{', '.join(taken)} took real tokens" if taken else "others are refused"
    return seen == {torch.int64} and not taken, (
        f"{dtypes} in {len(cases)} kinds of each model and in samples; {others}")


def dtypes_of_weights_and_inputs_may_differ(ddp, rows):
    """Models with low-precision weights accept float32 inputs, with and without autocast.

    Otherwise they fail with `mat1 and mat2 must have the same dtype`.
    """
    errors = []
    for half in half_dtypes(rows):
        for name, network in NETWORKS.items():
            model, batch = make_small(name, ddp)
            with torch.no_grad():
                exact = network.step(model, batch, FLOAT32, ddp)[0]
                model.to(half)
                for compute in (FLOAT32, half):
                    errors.append(distance(network.step(model, batch, compute, ddp)[0], exact))
    if not errors:
        return None, "no low precision here"
    return all(error < FROM_ROUNDING for error in errors), (
        f"models with weights in low precision are within {max(errors):.1g}")


def gradients_are_scaled_for_float16_alone(ddp, rows):
    scaled = [dtype for dtype in DTYPES if grad_scaler(dtype, ddp).is_enabled()]
    tries = [f"; {name} finite at try {n}" for name, n in rows[FLOAT16].tries.items()]
    names = ", ".join(map(short_name, scaled)) or "none"
    return scaled == [FLOAT16], f"GradScaler on for {names}{''.join(tries)}"


def draw(ddp, log_score):
    return sample(log_score, GRAPH, NOISE, (2, 12), DRAW_STEPS, forbidden=(X_ID,),
                  device=ddp.device, generator=torch.Generator().manual_seed(0))


def generation_passes_sigma(ddp, rows):
    """Each network call of sample() gets the total noise sigma(t) of that step, not the time t.

    And SEDD uses it: ln p of the tokens at a mask depends on sigma. (log_softmax removes the scale
    of the scores, which always does.)
    """
    model, (xt, *_) = make_small("SEDD", ddp)
    sigmas = []

    def log_score(xt, sigma):
        sigmas.append(sigma.double().cpu())
        return model(xt, sigma)

    with torch.no_grad():
        draw(ddp, log_score)
        masked = torch.full_like(xt, GRAPH.mask_id)
        at_low = model(masked, torch.full((len(xt),), 0.1, device=ddp.device))
        at_high = model(masked, torch.full((len(xt),), 3.0, device=ddp.device))
    low = at_low[..., :X_ID].log_softmax(-1)
    high = at_high[..., :X_ID].log_softmax(-1)
    change = (low - high).abs().mean().item()
    expected = NOISE(torch.linspace(1, 1e-5, DRAW_STEPS + 1, dtype=FLOAT64))[0]
    right = len(sigmas) == DRAW_STEPS + 1 and torch.allclose(
        torch.stack(sigmas), expected[:, None].expand(-1, 2), rtol=1e-5)
    return right and change > 1e-3, (
        f"{len(sigmas)} calls, sigma {sigmas[0][0]:.3g} to {sigmas[-1][0]:.1g}"
        f"{'' if right else ', not sigma(t)'}; from 0.1 to 3 SEDD's ln p changes by {change:.2g}")


CLAIMS = {"matmul": matrix_products_are_close_to_float64,
          "SEDD": sedd_is_finite_and_close,
          "ProteinMPNN": proteinmpnn_is_finite_and_close,
          "tokens": tokens_stay_integers,
          "mixed": dtypes_of_weights_and_inputs_may_differ,
          "GradScaler": gradients_are_scaled_for_float16_alone,
          "sigma": generation_passes_sigma}


def recommend(rows):
    """(dtype, reason): the first one in which both models are close and SEDD trains faster.

    bfloat16 comes first, as it has float32's range and needs no GradScaler. A dtype that the
    hardware only emulates is slower than float32, and so not recommended.
    """
    reasons = []
    for dtype in (BFLOAT16, FLOAT16):
        row = rows[dtype]
        gain = speed(rows, dtype, "SEDD")
        name = short_name(dtype)
        most = allowed(dtype, NETWORK_EPS)
        if row.error is not None:
            reasons.append(f"{name} does not work")
        elif not all(error <= most for errors in row.networks.values() for error in errors):
            reasons.append(f"{name} is not close")
        elif gain is None:
            reasons.append(f"SEDD's speed in {name} was not measured")
        else:
            reasons.append(f"SEDD trains {gain:.1f} x as fast in {name} as in float32")
            if gain >= FASTER:
                return dtype, "; ".join(reasons)
    return FLOAT32, "; ".join(reasons)


# ---- python test_dtype.py ----

def report(ddp, limit):
    """Check on every rank, print on rank 0. limit: see measure_speeds.

    Returns: names of the claims that failed on any rank.
    """
    rows = measure_errors(ddp)
    measure_speeds(rows, ddp, limit)
    device_name = "cpu"
    if ddp.device.type != "cpu":
        device_name = getattr(torch, ddp.device.type).get_device_name(ddp.device)
    print0(ddp, f"torch {torch.__version__} on {device_name}, {torch.get_num_threads()} thread(s); "
                f"speeds with SEDD of width {size_for_speed('SEDD', ddp)[0]}")
    print0(ddp, "\n".join(table(rows)))
    failed = []
    for name, claim in CLAIMS.items():
        holds, figure = check_on_all_ranks(claim, ddp, rows)
        if holds is False:
            failed.append(name)
        print0(ddp, textwrap.fill(f"{STATUS[holds]}  {name:<12} {figure}", WIDTH,
                                  subsequent_indent=" " * 19, break_on_hyphens=False))
    dtype, reason = recommend(rows)
    summary = (f"{len(failed)} of {len(CLAIMS)} claims failed. {reason}; true means "
               f"{short_name(choose_dtype(True, ddp.device)[0])}")
    print0(ddp, textwrap.fill(summary, WIDTH))
    for line in describe_rates(rows):
        print0(ddp, line)
    print0(ddp, f"recommended: memory.mixed_precision: {short_name(dtype)}")
    return failed


def check_on_all_ranks(claim, ddp, rows):
    """What a claim returns, on rank 0; if it fails on any rank, False and the first one's text."""
    try:
        holds, figure = claim(ddp, rows)
    except Exception as error:      # any error fails this claim; check the others too
        holds = False
        figure = f"{type(error).__name__}: {first_line(error)}"
    failures = [float(holds is False and rank == ddp.rank) for rank in range(ddp.world_size)]
    ranks = [rank for rank, n in enumerate(all_sum(failures, ddp)) if n]
    if not ranks:
        return holds, figure
    figure = broadcast(figure, ddp, ranks[0])
    return False, f"on rank {', '.join(map(str, ranks))}: {figure}"


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=0.5,
                        help="how long each speed is measured (default 0.5)")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    args = make_parser().parse_args(argv)
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"command line: --seconds is {args.seconds}, expected a number above 0")
    return args


def cli(argv):
    if "-h" in argv or "--help" in argv:
        make_parser().parse_args(["--help"])
    with started_ranks(None, argv) as ddp:
        failed = report(ddp, read_arguments(argv).seconds)
    sys.exit(FAILED if failed else 0)


# ---- pytest test_dtype.py ----

@functools.cache
def measured():
    return measure_errors(Ddp())


def pytest_generate_tests(metafunc):    # without importing pytest, which a cluster may lack
    metafunc.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.__name__)


def test_on_this_cpu(claim):
    holds, figure = claim(Ddp(), measured())
    assert holds, figure


if __name__ == "__main__":
    cli(sys.argv[1:])
