"""Drawing sequences by SEDD and ProteinMPNN, and plain transcriptions of the published samplers.

    python -m bench sample                                   # takes hours: 128 steps of SEDD
    python -m bench sample --models mpnn --batch 1 8 --lengths 100

The plain samplers are written from the published mathematics, in the style of the published code,
in float32. SEDD (Lou, Meng, Ermon 2024, arXiv 2310.16834): all sequences of a batch padded to the
longest; in each step the network on all positions, scores of all tokens, the analytic step. As
all steps are equal, a few are timed. "SEDD subs" has the parameterization of masked diffusion, with
which ours asks the network only when a residue is unmasked; plain is the same.
ProteinMPNN (Dauparas et al. 2022, Science 378, 49): the structure copied for each design; then one
residue at a time, for which concatenated inputs are gathered. Ours are `sample_sequences` of
sample_sedd.py, and `graph`, `encode` and `sample` of mpnn/model.py. Random weights of usual sizes
(SEDD: 6 million parameters) on structures of ideal helices and strands. On a CPU with one thread,
in CPU seconds. "mixed" designs have lengths from a tenth of the longest up to it. Leaves no files.
"""
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.common import (CommandParser, computes_in_bfloat16, now, read_options,
                          run_on_one_rank, say)
from bench.dpo import (plain_encode, plain_gather, plain_centre, plain_linear, plain_message,
                       plain_update, plain_visible, write_demo_pdb)
from bench.sedd import NETWORK, plain_log_score
from mpnn.batches import collate_complexes
from mpnn.model import decoding_order, random_proteinmpnn
from proteins.structures import Complex, read_structure
from sample_sedd import FREE, sample_sequences
from sedd.diffusion import AbsorbingGraph, make_noise
from sedd.fast_cpu import FastSEDD
from proteins.letters import N_TOKENS, X_ID
from sedd.weights import Sedd
from training.fast_linear import fast_linear

TITLES = {"sedd": "SEDD", "subs": "SEDD subs", "mpnn": "ProteinMPNN"}
PLAIN_STEPS = 8             # steps of the plain SEDD that are timed, at most
TEMPERATURE = 0.1           # of ProteinMPNN, as is usual
LAST_TIME = 1e-5            # where the steps of SEDD end, as published


def bench_sample(args, ddp):
    """Time both samplers of both models alternately."""
    on_cpu = ddp.device.type == "cpu"
    place = ddp.device
    if on_cpu:
        torch.set_num_threads(1)
        cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "the CPU")
        place = f"one thread of {cpu.strip()}"
    print(f"{'CPU seconds' if on_cpu else 'seconds'} per design; {place}; in turns, median of "
          f"{args.repeats}; SEDD: {args.steps} steps and the last\n"
          f"{'':<42}{'plain':>9}{'ours':>9}{'ratio':>8}  (min-max)", flush=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            for length in args.lengths:
                for batch in args.batch:
                    title = f"{TITLES[model]}, {length} residues, batch {batch}"
                    if model == "mpnn":
                        samplers = mpnn_samplers(Path(folder), length, batch, ddp)
                    else:
                        samplers = sedd_samplers(model, [length] * batch, args, ddp)
                    print_rows(title, samplers, batch, args.repeats, ddp)
        for model in args.models:
            for batch in args.batch:
                if batch > 1 and model != "mpnn":
                    lengths = mixed_lengths(max(args.lengths), batch)
                    samplers = sedd_samplers(model, lengths, args, ddp)
                    title = f"{TITLES[model]}, mixed to {max(args.lengths)}, batch {batch}"
                    print_rows(title, samplers, batch, args.repeats, ddp)


def print_rows(title, samplers, batch, repeats, ddp):
    """Print a row of the table for each sampler but the first, which is plain.

    samplers: {name: function ()}, which draws `batch` designs and returns what part of the work on
    them it has done."""
    times = {name: [] for name in samplers}
    for turn in range(1 + repeats):      # the first one warms up
        say(f"{title}: {f'turn {turn} of {repeats}' if turn else 'warm-up'}")
        for name, draw in samplers.items():
            start = now(ddp)
            part_done = draw()
            times[name].append((now(ddp) - start) / batch / part_done)
    plain, *ours = [(name, found[1:]) for name, found in times.items()]
    for name, found in ours:
        ratios = [a / b for a, b in zip(plain[1], found)]
        print(f"{f'{title}, {name}':<42}{statistics.median(plain[1]):>9.4f}"
              f"{statistics.median(found):>9.4f}{statistics.median(ratios):>7.2f}x  "
              f"({min(ratios):.2f}-{max(ratios):.2f})", flush=True)


def mixed_lengths(longest, batch):
    """`batch` lengths, evenly from a tenth of the longest to it."""
    return np.linspace(longest / 10, longest, batch).round().astype(int).tolist()


# ---- SEDD ----

def sedd_samplers(model, lengths, args, ddp):
    """{name: function ()} that draws a protein of each length: see print_rows. model: "sedd" or
    "subs"."""
    sedd_ours = random_sedd(ddp.device, model)
    templates = [FREE * length for length in lengths]
    timed = min(args.steps, PLAIN_STEPS)

    def plain():
        plain_sedd_sample(sedd_ours.model, sedd_ours.noise, len(lengths), max(lengths), timed)
        return (timed + 1) / (args.steps + 1)

    def ours(dtype):
        sample_sequences(sedd_ours, templates, args.steps, dtype=dtype, ddp=ddp,
                         tokens=max(16384, max(lengths)))
        return 1

    samplers = {"plain": plain, "float32": lambda: ours(torch.float32)}
    if computes_in_bfloat16(ddp.device):
        samplers["bfloat16"] = lambda: ours(torch.bfloat16)
    return samplers


def random_sedd(device, parameterization="sedd"):
    """A Sedd of random weights, all of which matter, with the network of `bench sedd`."""
    graph = AbsorbingGraph(N_TOKENS)
    torch.manual_seed(0)
    model = FastSEDD(graph.vocab_size, **NETWORK, forbidden=(X_ID,),
                     parameterization=parameterization).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return Sedd(model.to(device), graph, make_noise("loglinear"), {}, None, None, 10**6, {}, ())


def plain_sedd_sample(model, noise, B, L, steps, generator=None):
    """B sequences of L tokens (B, L), drawn with SEDD's absorbing graph by the published analytic
    steps; X is never drawn."""
    device = next(model.parameters()).device
    x = torch.full((B, L), model.vocab_size - 1, device=device)
    times = torch.linspace(1, LAST_TIME, steps + 1, device=device)
    for time, later in zip(times, times[1:]):
        sigma = noise(time.expand(B))[0]
        step = sigma - noise(later.expand(B))[0]
        probs = plain_analytic_probs(plain_log_score(model, x, sigma).exp(), x, step)
        probs[..., X_ID] = 0
        x = plain_draw(probs, generator)
    sigma = noise(times[-1].expand(B))[0]
    probs = plain_analytic_probs(plain_log_score(model, x, sigma).exp(), x, sigma)
    probs[..., X_ID:] = 0           # also the mask
    return plain_draw(probs, generator)


def plain_analytic_probs(score, x, step):
    """Probabilities (B, L, V) of the tokens one step later: exp(-step Q) score, the staggered
    score, times the transition from each token to x. score (B, L, V), x (B, L), step (B,)."""
    mask_id = score.shape[-1] - 1
    step = step[:, None, None]
    extra = (1 - step.exp()) * score.sum(-1, keepdim=True)
    staggered = score * step.exp()
    staggered[..., mask_id:] += extra
    transition = (-step).exp() * torch.nn.functional.one_hot(x, mask_id + 1)
    transition = transition + torch.where(x[..., None] == mask_id, 1 - (-step).exp(), 0.0)
    return staggered * transition


def plain_draw(probs, generator):
    """A token for each row of probs (B, L, V), which need not be normalised."""
    uniform = torch.rand(probs.shape, generator=generator).to(probs.device)
    return (probs / (1e-10 - (uniform + 1e-10).log())).argmax(-1)


# ---- ProteinMPNN ----

def mpnn_samplers(folder, length, batch, ddp):
    """{name: function ()} that draws `batch` designs of a structure: see print_rows."""
    path = folder / f"{length}.pdb"
    write_demo_pdb(path, length)
    model = random_proteinmpnn(0, product=fast_linear).eval().to(ddp.device)
    structure = read_structure(path)
    tensors = collate_complexes([Complex(structure, sorted(structure.chains))])
    tensors = {name: tensors[name].to(ddp.device)
               for name in ("X", "mask", "residue_idx", "chain_id")}
    S = torch.zeros(batch, tensors["mask"].shape[1], dtype=torch.int64, device=ddp.device)
    everywhere = torch.ones_like(S)

    def orders():
        return decoding_order(everywhere, torch.randn(S.shape, device=S.device))

    def plain():
        copies = {name: x.expand(batch, *x.shape[1:]) for name, x in tensors.items()}
        plain_mpnn_sample(model, copies, orders(), TEMPERATURE)
        return 1

    def ours():
        encoding = model.encode(model.graph(**tensors))
        model.sample(encoding, S, everywhere, orders(), TEMPERATURE)
        return 1

    return {"plain": plain, "float32": ours}


def plain_mpnn_sample(model, tensors, order, temperature, noise=None):
    """Draw all residues, by the published loop over residues; X is never drawn.

    Args:
        tensors: X, mask, residue_idx, chain_id of B structures, as of ProteinMPNN.graph.
        order: (B, L) int64, element t is the residue drawn at step t.
        noise: (B, L, 21) Gumbel noise that decides the letters; None: torch.multinomial.
    Returns: S (B, L), and the probabilities (B, L, 21) that its letters were drawn from.
    """
    mask = tensors["mask"].float()
    h_V, h_E, E_idx = plain_encode(model, tensors["X"], mask, tensors["residue_idx"],
                                   tensors["chain_id"])
    B, L, H = h_V.shape
    visible = plain_visible(order, E_idx)
    seen = visible * mask[..., None, None]
    blind = torch.cat([h_E, torch.zeros_like(h_E), plain_gather(h_V, E_idx)], -1)
    blind = blind * (1 - visible) * mask[..., None, None]
    S = torch.zeros_like(order)
    h_S = torch.zeros_like(h_V)
    stack = [h_V, *(torch.zeros_like(h_V) for _ in model.decoder_layers)]
    all_probs = h_V.new_zeros(B, L, 21)

    def take(x, at):                                        # (B, L, ...) -> (B, 1, ...)
        index = at.view(B, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
        return x.gather(1, index)

    def put(x, at, rows):                                   # rows (B, 1, n) into x (B, L, n)
        x.scatter_(1, at[:, None, None].expand_as(rows), rows)

    for at in order.unbind(1):
        near = take(E_idx, at)                                              # (B, 1, K)
        edges = torch.cat([take(h_E, at), plain_gather(h_S, near)], -1)
        for k, layer in enumerate(model.decoder_layers):
            inputs = torch.cat([edges, plain_gather(stack[k], near)], -1)
            inputs = take(seen, at) * inputs + take(blind, at)
            here = take(stack[k], at)
            message = plain_message(plain_centre(here, inputs), layer.W1, layer.W2, layer.W3)
            put(stack[k + 1], at, plain_update(layer, here, message, take(mask, at)))
        logits = plain_linear(model.W_out, take(stack[-1], at)[:, 0]) / temperature
        logits[:, X_ID] = -torch.inf
        probs = logits.softmax(-1)
        if noise is None:
            letter = torch.multinomial(probs, 1)
        else:
            letter = (probs.log() + take(noise, at)[:, 0]).argmax(-1, keepdim=True)
        put(h_S, at, model.W_s(letter))
        put(all_probs, at, probs[:, None])
        S.scatter_(1, at[:, None], letter)
    return S, all_probs


def main(argv):
    parser = CommandParser(prog="python -m bench sample", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(TITLES), help="some of %(default)s")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32],
                        help="designs drawn side by side; default 1 8 32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 400],
                        help="residues; default 100 400")
    parser.add_argument("--steps", type=int, default=128, help="of SEDD; default 128")
    parser.add_argument("--repeats", type=int, default=3)
    args = read_options(parser, argv)
    args.models = args.models.split(",")
    if not set(args.models) <= set(TITLES):
        parser.error(f"--models: found {', '.join(args.models)}; expected {', '.join(TITLES)}")
    if min(args.batch + args.lengths) < 1:
        parser.error(f"--batch {args.batch}, --lengths {args.lengths}; expected numbers of at "
                     "least 1")
    run_on_one_rank("sample", bench_sample, args, argv)
