"""Which dtypes work on this device, how exactly and how fast? To know before `memory.mixed_precision` is set.

    python test_dtype.py                      # on the device that training would choose; or --device cpu
    mpirun -n 2 python test_dtype.py          # every rank checks its device; rank 0 prints
    pytest test_dtype.py                      # the same checks, on this machine's CPU

Prints a table of dtypes, then a line PASS, FAIL or SKIP per claim with its figure; the last line is the recommended
setting. Errors are relative norms against the same in float64 on the CPU: of a matrix product, and, under autocast as
in training, of the outputs and gradients of SEDD and ProteinMPNN. Exit code of every rank: 0, 3 if a claim failed on
any, 2 for wrong arguments. Reads nothing (on Linux /proc/cpuinfo), writes nothing.
"""
import argparse
import contextlib
import functools
import math
import re
import sys
import textwrap
import time

import torch
import torch.nn.functional as F
from torch import nn

from ddp_setup import (Ddp, all_sum, autocast, broadcast, choose_dtype, grad_scaler, print0,
                       setup_ddp)
from proteinmpnn_model import ProteinMPNN
from sedd_diffusion import AbsorbingGraph, make_noise, sample, score_entropy_loss
from sedd_model import SEDD
from train_loop import add_launch_arguments, hand_over

FAILED = 3
FLOAT64, FLOAT32, BFLOAT16, FLOAT16 = DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Largest relative error: so many eps (the dtype's spacing at 1), and 64 of float32's, in which sums are made. A product
# rounds its inputs once: half an eps was seen. A network rounds dozens of times on the way there and back, with random
# signs: 1.4 eps were seen. Overflow, lost gradients, TF32, and bfloat16 where float16 was meant (7 eps) are beyond.
PRODUCT_EPS, NETWORK_EPS = 1, 4
FASTER = 1.1     # what a lower precision must gain to be recommended
GRAPH, NOISE, X_ID = AbsorbingGraph(21), make_noise("loglinear", eps=1e-3), 20


# ---------------------------------------------------------------- what is measured
def native(device):
    """{dtype: does the hardware compute in it}: "no", "?" where nobody says, else "yes" or what it is called."""
    words = {None: "?", True: "yes", False: "no"}
    if device.type == "cuda":
        with torch.cuda.device(device):
            bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        float16 = torch.cuda.get_device_capability(device) >= (5, 3)
        return {FLOAT64: "yes", FLOAT32: "yes", BFLOAT16: words[bfloat16], FLOAT16: words[float16]}
    if device.type == "xpu":
        has, names = torch.xpu.get_device_properties(device), ("has_fp64", "has_bfloat16_conversions", "has_fp16")
        return {FLOAT32: "yes", **{
            d: words[getattr(has, name, None)] for d, name in zip((FLOAT64, BFLOAT16, FLOAT16), names)}}
    flags, rest = set(), "?"
    with contextlib.suppress(OSError, TypeError):   # not Linux
        with open("/proc/cpuinfo") as f:
            flags, rest = set(re.search(r"^(?:flags|Features)\s*:(.*)$", f.read(), re.M)[1].split()), "no"
    known = {BFLOAT16: ("amx_bf16", "avx512_bf16", "bf16"), FLOAT16: ("amx_fp16", "avx512_fp16", "asimdhp")}
    return {FLOAT64: "yes", FLOAT32: "yes", **{
        d: next((name for name in names if name in flags), rest) for d, names in known.items()}}


def random_sedd(width, blocks, B, L):
    """(model in float32, batch) on the CPU. What starts at zero is drawn too: a fresh SEDD does not look at sigma."""
    model = SEDD(GRAPH.vocab_size, width, blocks, 4, dropout=0.0, forbidden=(X_ID,), init_logits=1.0)
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    x0 = torch.randint(0, X_ID, (B, L))
    sigma, dsigma = NOISE(torch.linspace(0.1, 0.9, B))
    return model, (GRAPH.corrupt(x0, sigma), x0, sigma, dsigma)


def sedd_step(model, batch, dtype, ddp):
    """(log scores (B, L, V), mean loss in nats per residue), as in training."""
    xt, x0, sigma, dsigma = batch
    with autocast(dtype, ddp):
        log_score = model(xt, sigma)
    loss, count = score_entropy_loss(log_score, sigma, dsigma, xt, x0, GRAPH, torch.ones_like(xt, dtype=torch.bool))
    return log_score, loss.sum() / count.sum()


def random_proteinmpnn(width, edges, M, L):
    """(model in float32, batch) on the CPU: M sequences on a random walk of L residues 3.8 Angstrom apart."""
    model = ProteinMPNN(num_edges=edges, hidden_size=width)
    walk = 3.8 * F.normalize(torch.randn(1, L, 3), dim=-1).cumsum(1)
    X, one = walk[:, :, None] + torch.randn(1, L, 4, 3), torch.ones(1, L, dtype=torch.int64)
    return model, (X, one, torch.arange(L)[None], one, torch.randint(0, X_ID, (M, L)), torch.rand(M, L).argsort(-1))


def proteinmpnn_step(model, batch, dtype, ddp):
    """(log-probabilities (M, L, 21), mean negative log-likelihood in nats per residue)."""
    *structure, S, order = batch
    graph = model.graph(*structure)
    with autocast(dtype, ddp):
        log_probs = model(graph, S, order)
    return log_probs, F.nll_loss(log_probs.flatten(0, 1), S.flatten())


# name: (make, step, size for errors, size for speed on a CPU, on an accelerator)
MODELS = {"SEDD": (random_sedd, sedd_step, (64, 2, 4, 48), (256, 2, 4, 128), (768, 4, 8, 512)),
          "ProteinMPNN": (random_proteinmpnn, proteinmpnn_step, (64, 16, 4, 40), (128, 32, 2, 64), (128, 48, 16, 300))}


def make(name, size):
    with torch.random.fork_rng(devices=[]):   # the same on every rank and device
        torch.manual_seed(0)
        return MODELS[name][0](*size)


def move(model, batch, device, dtype):
    """Weights and what is real in the batch are float32 (float64 for dtype float64); tokens stay as they are."""
    exact = FLOAT64 if dtype == FLOAT64 else FLOAT32
    return model.to(device, exact), [x.to(device, exact if x.is_floating_point() else x.dtype) for x in batch]


def output_and_gradient(name, dtype, ddp):
    """(output, gradient as one vector, tries until the scaled gradient was finite), on the CPU in float64."""
    model, batch = move(*make(name, MODELS[name][2]), ddp.device, dtype)
    scaler, optimizer = grad_scaler(dtype, ddp), torch.optim.SGD(model.parameters(), lr=0.0)
    for tries in range(1, 21):
        optimizer.zero_grad()
        output, loss = MODELS[name][1](model, batch, dtype, ddp)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        if gradient.isfinite().all():
            break
        scaler.step(optimizer)
        scaler.update()
    return output.detach().cpu().double(), gradient.cpu().double(), tries


def distance(found, expected):
    """Relative norm of the difference; nan or infinite where `found` is."""
    return float((found - expected).norm() / expected.norm())


def best_times(works, ddp, limit):
    """{key: seconds of the best call of works[key]()}. In turn, for about `limit` seconds each, so that whatever else
    the machine does slows all alike; the first call of each does not count."""
    wait = getattr(torch, ddp.device.type).synchronize if ddp.device.type != "cpu" else lambda: None
    best, rounds, end = {}, 0, time.monotonic() + limit * len(works)
    while rounds < 3 or time.monotonic() < end:
        for key, work in works.items():
            wait()
            start = time.perf_counter()
            work()
            wait()
            best[key] = min(best[key] if rounds > 1 else float("inf"), time.perf_counter() - start)
        rounds += 1
    return best


def measure(ddp, limit):
    """{dtype: row} of the table. row: "native"; "error", why the dtype cannot be used, or "matmul" and, per model,
    (output's error, gradient's error, tries); "times" in seconds, each taken for `limit` seconds (0: not at all)."""
    n, size = (384, 3) if ddp.device.type == "cpu" else (2048, 4)
    generator, rows = torch.Generator().manual_seed(0), {}
    a, b = (torch.randn(n, n, dtype=FLOAT64, generator=generator) for _ in range(2))
    expected = {name: output_and_gradient(name, FLOAT64, Ddp()) for name in MODELS}   # Ddp(): one process on the CPU
    known = native(ddp.device)
    for dtype in DTYPES:
        row = rows[dtype] = {"native": known[dtype], "times": {}}
        try:
            row["matmul"] = distance((a.to(ddp.device, dtype) @ b.to(ddp.device, dtype)).cpu().double(), a @ b)
            for name in MODELS:
                output, gradient, tries = output_and_gradient(name, dtype, ddp)
                row[name] = distance(output, expected[name][0]), distance(gradient, expected[name][1]), tries
        except (RuntimeError, TypeError) as e:   # kernels that this torch or device has not got
            row["error"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    good = [dtype for dtype in DTYPES if "error" not in rows[dtype]] if limit else []
    for what in ("matmul", *MODELS):
        try:
            if what == "matmul":
                works = {d: lambda x=a.to(ddp.device, d), y=b.to(ddp.device, d): x @ y for d in good}
            else:   # nobody trains in float64
                placed = {d: move(*make(what, MODELS[what][size]), ddp.device, d) for d in good if d != FLOAT64}
                works = {d: lambda step=MODELS[what][1], d=d, at=at: step(*at, d, ddp)[1].backward()
                         for d, at in placed.items()}
            for dtype, best in best_times(works, ddp, limit).items():
                rows[dtype]["times"][what] = best
        except RuntimeError as e:   # out of memory, say: then nothing is known of the speed
            print(f"{what} could not be timed: {(str(e).splitlines() or [''])[0]}", file=sys.stderr)
    return rows


def speed(rows, dtype, what):
    """How many times as fast as float32, or None."""
    times = rows[dtype]["times"].get(what), rows[FLOAT32]["times"].get(what)
    return times[1] / times[0] if all(times) else None


def table(rows):
    """Lines of at most 80 columns."""
    lines = ["                      matmul     SEDD, error     MPNN, error speed, x float32",
             "dtype     native       error  output gradient output gradient matmul SEDD MPNN"]
    for dtype, row in rows.items():
        figures = row.get("error", "")
        if not figures:
            errors = "  ".join(f"{row[name][0]:6.0e}  {row[name][1]:6.0e}" for name in MODELS)
            gains = [speed(rows, dtype, what) for what in ("matmul", *MODELS)]
            gains = "".join(f"{gain:5.1f}" if gain else "    -" for gain in gains)
            figures = f"{row['matmul']:6.0e}  {errors}  {gains}"
        lines.append(f"{str(dtype)[6:]:9} {row['native']:11} {figures}"[:80])
    return lines


# ---------------------------------------------------------------- the claims: (PASS, FAIL or SKIP, figure)
def allowed(dtype, units):
    return units * torch.finfo(dtype).eps + 64 * torch.finfo(FLOAT32).eps


def all_within(rows, units, what):
    """Is every dtype within `units` eps? What is neither native nor works does not count."""
    status, parts = "PASS", []
    for dtype, row in rows.items():
        if "error" in row:
            parts.append(f"no {str(dtype)[6:]}: {row['error']}")
            status = "FAIL" if row["native"] not in ("no", "?") else status
        else:
            errors = [row[what]] if what == "matmul" else row[what][:2]
            parts.append(f"{str(dtype)[6:]} {max(errors):.1g} of {allowed(dtype, units):.1g}")
            status = status if all(e <= allowed(dtype, units) for e in errors) else "FAIL"
    return status, ", ".join(parts)


def matrix_products_are_close_to_float64(ddp, rows):
    return all_within(rows, PRODUCT_EPS, "matmul")


def sedd_is_finite_and_close(ddp, rows):
    return all_within(rows, NETWORK_EPS, "SEDD")


def proteinmpnn_is_finite_and_close(ddp, rows):
    return all_within(rows, NETWORK_EPS, "ProteinMPNN")


def low_dtypes(rows):
    return [dtype for dtype in (BFLOAT16, FLOAT16) if "error" not in rows[dtype]]


def tokens_stay_integers(ddp, rows):
    """What reaches the embedding tables is int64 under every autocast and in models of low weights, so are samples, and
    tokens that were made real are refused: bfloat16 has no odd number above 256."""
    seen, cases = set(), [(FLOAT32, FLOAT32)] + [(w, d) for d in low_dtypes(rows) for w in (FLOAT32, d)]
    for name, (_, step, size, *_) in MODELS.items():
        for weights, compute in cases:
            model, batch = move(*make(name, size), ddp.device, FLOAT32)
            lookup = model.vocab_embed if name == "SEDD" else model.W_s
            lookup.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
            with torch.no_grad():
                step(model.to(weights), batch, compute, ddp)
                with contextlib.suppress(ValueError):
                    step(model, [x.to(compute) if not x.is_floating_point() else x for x in batch], compute, ddp)
                    seen.add(f"{name} took {compute}")
    seen.add(draw(ddp, lambda xt, sigma: torch.zeros(*xt.shape, GRAPH.vocab_size, device=ddp.device)).dtype)
    return "PASS" if seen == {torch.int64} else "FAIL", (
        f"{', '.join(sorted(map(str, seen)))} in {len(cases)} kinds of each model and in samples; others are refused")


class Naive(nn.Module):
    """A SEDD as often written: the noise embedding comes out in float32, whatever the weights are."""

    def __init__(self, V=22, H=32):
        super().__init__()
        self.embed, self.sigma_map, self.out = nn.Embedding(V, H), nn.Linear(2 * H, H), nn.Linear(H, V)

    def forward(self, xt, sigma):
        angle = sigma[:, None] * torch.arange(self.embed.embedding_dim, device=sigma.device)
        c = self.sigma_map(torch.cat([angle.cos(), angle.sin()], dim=-1))
        return self.out(self.embed(xt) + c[:, None])


def dtypes_of_weights_and_inputs_may_differ(ddp, rows):
    """`mat1 and mat2 must have the same dtype` is what a naive model says; ours compute, with and without autocast."""
    said, errors = [], []
    for dtype in low_dtypes(rows):
        for name, (_, step, size, *_) in MODELS.items():
            model, batch = move(*make(name, size), ddp.device, FLOAT32)
            try:
                with torch.no_grad():
                    exact = step(model, batch, FLOAT32, ddp)[0]
                    model.to(dtype)
                    errors += [distance(step(model, batch, compute, ddp)[0], exact) for compute in (FLOAT32, dtype)]
            except RuntimeError as e:
                return "FAIL", f"{name} in {dtype}: {str(e).splitlines()[0]}"
        xt, _, sigma, _ = move(*make("SEDD", MODELS["SEDD"][2]), ddp.device, FLOAT32)[1]
        try:
            Naive().to(ddp.device, dtype)(xt, sigma)
        except RuntimeError as e:
            said.append(str(e).splitlines()[0])
    if not said or not all("same dtype" in text for text in said):
        return "SKIP", f"no low precision here, or it does not mind a naive model: {said}"
    # weights that were rounded themselves: a tenth would be another model
    return "PASS" if all(e < 0.1 for e in errors) else "FAIL", (
        f"ours are within {max(errors):.1g}; a naive model: {said[0]}")


def gradients_are_scaled_for_float16_alone(ddp, rows):
    on = [dtype for dtype in DTYPES if grad_scaler(dtype, ddp).is_enabled()]
    tries = {name: rows[FLOAT16][name][2] for name in MODELS if name in rows.get(FLOAT16, ())}
    return "PASS" if on == [FLOAT16] else "FAIL", (
        f"GradScaler on for {', '.join(str(d)[6:] for d in on) or 'none'}" + "".join(
            f"; {name} finite at try {n}" for name, n in tries.items()))


def draw(ddp, log_score, steps=6):
    return sample(log_score, GRAPH, NOISE, (2, 12), steps, forbidden=(X_ID,), device=ddp.device,
                  generator=torch.Generator().manual_seed(0))


def generation_passes_sigma(ddp, rows):
    """Each network call of sample() gets the total noise sigma(t) of that step and never t, and SEDD heeds it: which
    token it prefers at a mask changes with it (its overall scale ln r always does)."""
    model, (xt, *_) = move(*make("SEDD", MODELS["SEDD"][2]), ddp.device, FLOAT32)
    given, steps = [], 6

    def log_score(xt, sigma):
        given.append(sigma.double().cpu())
        return model(xt, sigma)

    with torch.no_grad():
        draw(ddp, log_score, steps)
        masked = torch.full_like(xt, GRAPH.mask_id)
        log_p = [model(masked, torch.full((len(xt),), sigma, device=ddp.device))[..., :X_ID].log_softmax(-1)
                 for sigma in (0.1, 3.0)]
    expected = NOISE(torch.linspace(1, 1e-5, steps + 1, dtype=FLOAT64))[0]
    right = len(given) == steps + 1 and torch.allclose(torch.stack(given), expected[:, None].expand(-1, 2), rtol=1e-5)
    change = (log_p[0] - log_p[1]).abs().mean().item()
    return "PASS" if right and change > 1e-3 else "FAIL", (
        f"{len(given)} calls, sigma {given[0][0]:.3g} to {given[-1][0]:.1g}{'' if right else ', not sigma(t)'}; from "
        f"0.1 to 3 SEDD's ln p changes by {change:.2g}")


def true_means_bfloat16_where_it_is_native(ddp, rows):
    (chosen, why), yes = choose_dtype(True, ddp.device), rows[BFLOAT16]["native"]
    if yes == "?":
        return "SKIP", f"nobody says whether bfloat16 is native; true means {str(chosen)[6:]}"
    return "PASS" if (chosen == BFLOAT16) == (yes != "no") else "FAIL", f"true means {str(chosen)[6:]}: {why}"


CLAIMS = {"matmul": matrix_products_are_close_to_float64, "SEDD": sedd_is_finite_and_close,
          "ProteinMPNN": proteinmpnn_is_finite_and_close, "tokens": tokens_stay_integers,
          "mixed": dtypes_of_weights_and_inputs_may_differ, "GradScaler": gradients_are_scaled_for_float16_alone,
          "sigma": generation_passes_sigma, "true": true_means_bfloat16_where_it_is_native}


def recommend(rows):
    """(dtype, reason): the first native one in which both models are close and SEDD trains faster. bfloat16 comes
    first, as it has float32's range and needs no GradScaler."""
    reasons = []
    for dtype in (BFLOAT16, FLOAT16):
        row, gain, name = rows[dtype], speed(rows, dtype, "SEDD"), str(dtype)[6:]
        if "error" in row or row["native"] in ("no", "?"):
            reasons.append(f"{name} does not work" if "error" in row else f"{name} is not known to be native")
        elif not all(e <= allowed(dtype, NETWORK_EPS) for model in MODELS for e in row[model][:2]):
            reasons.append(f"{name} is not close")
        elif gain is None:
            reasons.append(f"SEDD's speed in {name} was not measured")
        else:
            reasons.append(f"SEDD trains {gain:.1f} x as fast in {name} as in float32")
            if gain >= FASTER:
                return dtype, "; ".join(reasons)
    return FLOAT32, "; ".join(reasons)


# ---------------------------------------------------------------- python test_dtype.py
def report(ddp, limit):
    """Check on every rank, print on rank 0; returns the names of the claims that failed on any rank."""
    rows, failed, say = measure(ddp, limit), [], functools.partial(print0, ddp)
    width = MODELS["SEDD"][3 if ddp.device.type == "cpu" else 4][0]
    name = "cpu" if ddp.device.type == "cpu" else f"{getattr(torch, ddp.device.type).get_device_name(ddp.device)}"
    say(f"torch {torch.__version__} on {name}, {torch.get_num_threads()} thread(s); speeds with SEDD of width {width}")
    say("\n".join(table(rows)))
    for name, claim in CLAIMS.items():
        try:
            status, figure = claim(ddp, rows)
        except Exception as e:   # whatever the models or the device say: the other claims are still of interest
            status, figure = "FAIL", f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        bad = [float(status == "FAIL" and r == ddp.rank) for r in range(ddp.world_size)]
        ranks = [r for r, n in enumerate(all_sum(bad, ddp)) if n]
        if ranks:
            status, figure = "FAIL", f"on rank {', '.join(map(str, ranks))}: {broadcast(figure, ddp, ranks[0])}"
            failed.append(name)
        say(textwrap.fill(f"{status}  {name:<12} {figure}", 80, subsequent_indent=" " * 19, break_on_hyphens=False))
    dtype, why = recommend(rows)
    say(textwrap.fill(f"{len(CLAIMS) - len(failed)} of {len(CLAIMS)} claims did not fail. {why}", 80))
    say(f"recommended: memory.mixed_precision: {str(dtype)[6:]}")
    return failed


class Parser(argparse.ArgumentParser):
    def error(self, message):   # raised, so that it is printed once and not by every rank
        raise ValueError(f"command line: {message}. See --help.")


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=0.5, help="per time that is taken (default 0.5)")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    args = make_parser().parse_args(argv)
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"command line: --seconds is {args.seconds}, expected a number above 0")
    hand_over(args, argv)
    return args


def cli(argv):
    if "-h" in argv or "--help" in argv:
        make_parser().parse_args(["--help"])
    problem = None
    try:
        args = read_arguments(argv)
    except (ValueError, RuntimeError) as e:   # told below, once
        args, problem = make_parser().parse_args(["--device", "cpu"]), e
    try:
        ddp = setup_ddp(args.device, args.backend, ranks=args.ranks, init_timeout=args.init_timeout, ipex=args.ipex,
                        quiet=True)
    except (ValueError, RuntimeError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(getattr(e, "code", 2))
    with ddp:
        if problem:
            print0(ddp, f"error: {problem}", file=sys.stderr)
        failed = [] if problem else report(ddp, args.seconds)
    sys.exit(2 if problem else FAILED if failed else 0)


# ---------------------------------------------------------------- pytest test_dtype.py
@functools.cache
def measured():
    return measure(Ddp(), limit=0)


def pytest_generate_tests(metafunc):   # without importing pytest, which a cluster may lack
    metafunc.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.__name__)


def test_on_this_cpu(claim):
    status, figure = claim(Ddp(), measured())
    nobody_says = status == "SKIP" and claim is true_means_bfloat16_where_it_is_native
    assert status == "PASS" or nobody_says, figure


if __name__ == "__main__":
    cli(sys.argv[1:])
