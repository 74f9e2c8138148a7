"""Benchmarks of this machine. Prints the results; leaves only files that were asked for.

    python -m bench save                                    # write, check, read a checkpoint
    python -m bench save --folder /lus/flare/projects/X     # on that file system
    mpirun -n 4 python -m bench save configs/sedd_cpu.yaml  # rank 0 reads and sends to others
    python -m bench dpo     # our DPO step, and a plain transcription of the published code
    python -m bench dpo --pairs pairs.json                  # with real pairs
    python -m bench dpo --device cuda                       # on a device: pairs per second
    python -m bench sedd --data proteins.fasta.gz           # our SEDD step and a plain one
    python -m bench data --proteins 60000000 --folder /tmp  # plan, read 17 GB of random data
    mpirun -n 2 python -m bench data                        # only train from such data, 2 ranks
    python -m bench scale --ranks 1,2,4                     # see bench/scale.py
    python -m bench card                                    # all about a GPU: see bench/card.py
"""
import argparse
import concurrent.futures
import copy
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bench import card as bench_card
from bench import learn as bench_learn
from bench import scale as bench_scale
import train_dpo_ddp as dpo
from bench.scale import CONFIGS, shared_folder
from bench.sedd import bench_sedd, now, write_prepared
from ddp_setup import (all_sum, barrier, broadcast, load_checkpoint, print0, save_checkpoint,
                       wrap_ddp)
from training.optimizer import make_optimizer
from mpnn.model import ATOMS, PAIRS, random_proteinmpnn
from training.config import load_config
from sedd.diffusion import make_graph, make_noise
from sedd.model import EMA
from sedd.batches import BatchReader, sum_rows
from sedd.sequences import N_TOKENS, PreparedProteins
import mpnn.fast_cpu
from mpnn.batches import PairPlan, collate, collate_complexes
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.pairs import Pair, describe, read_pairs
from mpnn.structures import NAMES, Complex, read_structure
from training.command_line import add_launch_arguments, started_ranks
from training.loop import MicroBatchSampler, global_gradient
from train_sedd_ddp import (Config, MicroBatchDataset, make_batch_plan, make_model, make_reader,
                            micro_batch_loss)

SAVE_PERIOD = 900           # assumed seconds between checkpoints, for the fraction of time to save
# For dpo: {pairs per step: [(order, dtype) of our steps]}, for synthetic pairs and those of a file.
MADE_CASES = {1: [("arange", "float32"), ("random", "float32")],
              4: [("arange", "float32"), ("arange", "bfloat16")]}
FILE_CASES = {1: [("random", "float32"), ("fixed", "float32")],
              4: [("fixed", "float32"), ("random", "bfloat16"), ("fixed", "bfloat16")]}
PAIRS_OF_A_TURN = 16        # pairs of a file that each step takes before the other has its turn
# For data
BYTES_PER_PROTEIN = 300     # of a prepared set on disk
MOST_READ = 20_000          # most micro-batches of a window that are read


def seconds(function, repeats):
    """Median and spread (max - min) of the wall time of function()."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def in_a_child(function, *arguments):
    """Run function(*arguments) in a new process; return its result."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


# ---- a checkpoint ----

def training_state(path):
    """The state that a checkpoint of this config holds, after one optimizer step on the CPU.

    Returns: (number of parameters, state for save_checkpoint).
    """
    config = load_config(Config, path)
    model = make_model(config, make_graph(config.graph.type, N_TOKENS))
    optimizer = make_optimizer(model, config.optim.lr, config.optim)
    ema = EMA(model.parameters(), config.optim.ema)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return sum(parameter.numel() for parameter in model.parameters()), dict(
        model=model.state_dict(), ema=ema.state_dict(), optimizer=optimizer.state_dict(), step=1)


def bench_save(args, ddp):
    """Time to write a checkpoint (with fsync), and to check and read it; all ranks take part."""
    with shared_folder(args.folder, ddp) as folder:
        print0(ddp, f"a checkpoint in {args.folder}, {ddp.world_size} rank(s), median of "
                    f"{args.repeats} (max - min)\n{'config':<20}{'parameters':>12}{'MB':>8}"
                    f"{'write s':>16}{'read s':>16}{'every 15 min':>14}")
        path = folder / "last.pt"
        for config in args.configs or sorted(CONFIGS.glob("sedd_*.yaml")):
            n, state = training_state(config)
            write, write_spread = seconds(lambda: save_checkpoint(path, ddp, 2, **state),
                                          args.repeats)
            read, read_spread = seconds(lambda: load_checkpoint(path, ddp), args.repeats)
            size = broadcast(path.stat().st_size if ddp.is_main else None, ddp) / 1e6
            print0(ddp, f"{config.stem[:19]:<20}{n / 1e6:>10.1f} M{size:>8.0f}"
                        f"{write:>9.2f} ({write_spread:.2f}){read:>9.2f} ({read_spread:.2f})"
                        f"{write / SAVE_PERIOD:>13.2%}")
    print0(ddp, "read: just after writing, when the file may still be cached in memory; a later "
                "start takes longer.\n'every 15 min': fraction of the time for saving at that "
                "interval. Training waits while it saves.")


# ---- a DPO step ----

def plain_log_probs(model, X, S, mask, residue_idx, chain_id, order):
    """ProteinMPNN's forward pass, written as in its paper and the published code.

    Not optimised: all L x L distances, concatenated inputs, the order as one-hot matrices.
    Args, as of ProteinMPNN: X (B, L, 4, 3) in Angstrom; S, residue_idx, chain_id, order (B, L)
        int64; mask (B, L). The weights are those of `model`.
    Returns: log-probabilities (B, L, 21).
    """
    B, L = S.shape
    N, CA, C, O = X.unbind(2)
    b, c = CA - N, C - CA
    atoms = dict(N=N, CA=CA, C=C, O=O)
    atoms["CB"] = -0.58273431 * torch.linalg.cross(b, c) + 0.56802827 * b - 0.54067466 * c + CA

    def distances(p, q):
        difference = atoms[p][:, :, None] - atoms[q][:, None]
        return (difference.square().sum(-1) + 1e-6).sqrt()                  # (B, L, L)

    def linear(layer, x):                               # not training/fast_linear.py's faster one
        return F.linear(x, layer.weight, layer.bias)

    def gather(x, index):                               # (B, L, H), (B, L, K) -> (B, L, K, H)
        flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, flat).view(*index.shape, x.shape[-1])

    pair_mask = mask[:, :, None] * mask[:, None]
    D = pair_mask * distances("CA", "CA")
    D = D + (1 - pair_mask) * D.amax(-1, keepdim=True)
    nearest, E_idx = D.topk(min(model.num_edges, L), largest=False)
    centres = torch.linspace(2, 22, 16, device=X.device)
    rbf = []
    for k, pair in enumerate(PAIRS.split()):
        d = nearest if k == 0 else distances(*pair.split("-")).gather(2, E_idx)
        rbf.append(torch.exp(-((d[..., None] - centres) / 1.25).square()))
    offset = (residue_idx[:, :, None] - residue_idx[:, None]).gather(2, E_idx)
    same = (chain_id[:, :, None] == chain_id[:, None]).gather(2, E_idx)
    kind = torch.where(same, (offset + 32).clamp(0, 64), 65)
    f = model.features
    positional = linear(f.embeddings.linear, F.one_hot(kind, 66).float())
    features = linear(f.edge_embedding, torch.cat([positional, *rbf], -1))
    h_E = linear(model.W_e, f.norm_edges(features))
    h_V = h_E.new_zeros(B, L, h_E.shape[-1])
    edge_mask = mask[..., None] * gather(mask[..., None], E_idx)[..., 0]

    def message(x, *layers):
        for layer in layers[:-1]:
            x = F.gelu(linear(layer, x))
        return linear(layers[-1], x)

    def centre(h_V, rest):
        return torch.cat([h_V[:, :, None].expand(-1, -1, rest.shape[2], -1), rest], -1)

    def update(layer, h_V, m):
        h_V = layer.norm1(h_V + m.sum(2) / 30)
        dense = message(h_V, layer.dense.W_in, layer.dense.W_out)
        return layer.norm2(h_V + dense) * mask[..., None]

    for layer in model.encoder_layers:
        x = centre(h_V, torch.cat([h_E, gather(h_V, E_idx)], -1))
        h_V = update(layer, h_V, message(x, layer.W1, layer.W2, layer.W3) * edge_mask[..., None])
        x = centre(h_V, torch.cat([h_E, gather(h_V, E_idx)], -1))
        h_E = layer.norm3(h_E + message(x, layer.W11, layer.W12, layer.W13))
    one_hot = F.one_hot(order, L).float()                                   # step, residue
    earlier = one_hot.new_ones(L, L).tril(-1)
    visible = torch.einsum("ij,biq,bjp->bqp", earlier, one_hot, one_hot).gather(2, E_idx)[..., None]
    h_S = model.W_s(S)
    known = mask[..., None, None]
    blind = torch.cat([h_E, torch.zeros_like(h_E), gather(h_V, E_idx)], -1) * (1 - visible) * known
    for layer in model.decoder_layers:
        seen = torch.cat([h_E, gather(h_S, E_idx), gather(h_V, E_idx)], -1) * visible * known
        h_V = update(layer, h_V, message(centre(h_V, seen + blind), layer.W1, layer.W2, layer.W3))
    return torch.log_softmax(linear(model.W_out, h_V), -1)


def plain_loss(policy, reference, pairs, beta):
    """Mean DPO loss of pairs, padded to the longest, with four forward passes. Nothing is shared or
    cached: the structures are read again."""
    complexes = {}
    for pair in pairs:
        old = pair.complex
        if old.key not in complexes:
            complexes[old.key] = Complex(read_structure(old.structure.name), old.design, old.fixed)
    pairs = [Pair(complexes[pair.complex.key], pair.chosen, pair.rejected, pair.chain_M)
             for pair in pairs]
    batch = {**collate(pairs, range(len(pairs))), **collate_complexes([*complexes.values()])}
    device = policy.W_s.weight.device
    batch = {name: value.to(device) for name, value in batch.items()}
    names = "X", "mask", "residue_idx", "chain_id"
    X, mask, residue_idx, chain_id = (batch[name][batch["complex"]] for name in names)
    designed = batch["chain_M"] * mask
    order = torch.arange(X.shape[1], device=device).expand(len(pairs), -1)
    order = order.gather(1, designed.gather(1, order).argsort(dim=1, stable=True))
    scores = []
    for model, grad in ((policy, True), (reference, False)):
        for S in (batch["chosen"], batch["rejected"]):
            with torch.set_grad_enabled(grad):
                log_probs = plain_log_probs(model, X, S, mask, residue_idx, chain_id, order)
                scores.append((log_probs.gather(-1, S[..., None])[..., 0] * designed).sum(1))
    chosen, rejected, ref_chosen, ref_rejected = scores
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def made_pairs(path):
    """4 pairs of random sequences on all chains of a structure."""
    structure, rng = read_structure(path), np.random.default_rng(0)
    complex = Complex(structure, sorted(structure.chains))
    L = len(complex)
    sequences = [np.where(complex.mask, rng.integers(0, 20, (2, L)), complex.S) for _ in range(4)]
    return [Pair(complex, *both.astype(np.uint8), np.ones(L, bool)) for both in sequences]


class Turn(NamedTuple):
    """Means over some consecutive steps."""
    seconds: float     # per step
    loading: float     # fraction of this in which batches of pairs are made
    rows: float        # of structures, per step
    pairs: float       # per step: fewer than batch_size if structures have few


class DpoSteps:
    """The plain step and ours, from equal weights, on the same pairs.

    A step is loss, gradient, clipping and Adam. The plain step takes the pairs in random order,
    ours in the order of training (PairPlan).
    Args: batch_size: pairs per step. order: a value of loss.order.
    """

    def __init__(self, pairs, batch_size, ddp, order="arange", dtype="float32"):
        self.pairs, self.batch_size, self.ddp = pairs, batch_size, ddp
        self.config = dpo.Config()
        self.config.loss.order = order
        self.dtype = getattr(torch, dtype)
        self.base = random_proteinmpnn(0).eval()
        mpnn.fast_cpu.speed_up(self.base)
        policy = copy.deepcopy(self.base)
        self.base = self.base.to(ddp.device)
        with torch.no_grad():               # move it: if it equals the reference, losses are log 2
            for p in policy.parameters():
                generator = torch.Generator().manual_seed(1)
                p += 0.003 * torch.randn(p.shape, generator=generator)
        policy = policy.to(ddp.device)
        self.models = {"plain": policy, "ours": copy.deepcopy(policy)}
        self.optimizers = {
            "plain": torch.optim.Adam(self.models["plain"].parameters(), lr=3e-6),
            "ours": torch.optim.AdamW(self.models["ours"].parameters(), lr=3e-6, fused=True)}
        self.reference = dpo.Reference(self.base, pairs, self.config, ddp)
        self.shuffled = np.random.default_rng(0).permutation(len(pairs)).tolist()
        self.plan = PairPlan(pairs, 0, 1, batch_size)
        self.taken, self.loading = {"plain": 0, "ours": 0}, 0.0
        # Clock for loading. Wall time on a device, which works on while this process makes pairs.
        self.clock = time.process_time if ddp.device.type == "cpu" else time.perf_counter
        if order != "random":               # compute the reference's scores once, not per step
            self.reference.table = self.reference.compute_scores(pairs).to(ddp.device)

    def next_pairs(self, kind):
        """(epoch, indices) of the next step."""
        step, n = self.taken[kind], len(self.pairs)
        self.taken[kind] += 1
        if kind == "ours":
            return self.plan.item_of(step, 0)[2:]
        return 0, [self.shuffled[(step * self.batch_size + i) % n] for i in range(self.batch_size)]

    def gradient(self, kind, epoch, indices):
        """(loss, norm of the gradient) of these pairs, as tensors. Leaves the gradient in .grad."""
        model = self.models[kind]
        model.zero_grad()
        if kind == "plain":
            loss = plain_loss(model, self.base, [self.pairs[i] for i in indices],
                              self.config.loss.beta)
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            return loss.detach(), torch.nn.utils.get_total_norm(gradients)
        start = self.clock()
        batch = dpo.make_batch(self.pairs, indices, self.config.loss, 0, epoch)
        self.loading += self.clock() - start
        totals, norm = global_gradient(model, [{**batch, "seed": 0}], self.loss_of, self.ddp,
                                       self.batch_size)
        return totals.sums[0] / totals.count, norm

    def differences(self):
        """Differences between plain and ours on the same pairs, both decoded from N to C: (absolute
        of the loss, relative of the gradient's norm)."""
        loss, table = self.config.loss, self.reference.table
        order, loss.order, self.reference.table = loss.order, "arange", None
        indices = self.shuffled[:self.batch_size]
        (plain, norm), (ours, our_norm) = (map(float, self.gradient(kind, 0, indices))
                                           for kind in ("plain", "ours"))
        loss.order, self.reference.table = order, table
        return abs(plain - ours), abs(norm / our_norm - 1)

    def loss_of(self, model, batch):
        return dpo.micro_batch_loss(model, batch, self.reference, self.config, self.ddp,
                                    self.dtype)

    def take_steps(self, kind, n):
        """Take n steps, without waiting for the device between them. Returns: Turn."""
        start, self.loading, rows, pairs = now(self.ddp), 0.0, 0, 0
        for _ in range(n):
            epoch, indices = self.next_pairs(kind)
            norm = self.gradient(kind, epoch, indices)[1]
            torch.nn.utils.clip_grads_with_norm_(self.models[kind].parameters(),
                                                 self.config.optim.grad_clip, norm)
            self.optimizers[kind].step()
            rows += sum(len(self.pairs[i].complex) for i in indices)
            pairs += len(indices)
        duration = now(self.ddp) - start
        return Turn(duration / n, self.loading / duration, rows / n, pairs / n)


def write_demo_pdb(path, n_residues):
    """Helices and strands of 12 residues in turns, as a PDB file with one chain."""
    kinds = [("helix", "strand")[i // 12 % 2] for i in range(n_residues)]
    X = build_backbone(*zip(*(PHI_PSI[kind] for kind in kinds)))
    X -= X.min((0, 1))                      # a PDB column has no room for numbers such as -1000.000
    with open(path, "w") as file:
        for i, residue in enumerate(X.tolist()):
            for k, (atom, xyz) in enumerate(zip(ATOMS, residue)):
                place = f"{4 * i + k + 1:5d}  {atom:<3} {NAMES[i * 7 % 20]} A{i + 1:4d}"
                x, y, z = (f"{coordinate:8.3f}" for coordinate in xyz)
                file.write(f"ATOM  {place}    {x}{y}{z}  1.00  0.00           {atom[0]}\n")


def bench_dpo(args, ddp):
    """Time our DPO step and a plain one alternately, and compare their results."""
    on_cpu = ddp.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    second = "CPU second" if on_cpu else "second"
    with tempfile.TemporaryDirectory() as folder:
        if args.pairs:
            pairs, cases = read_pairs(args.pairs), FILE_CASES
            title = f"{args.pairs.name}, {describe(pairs)}"
        else:
            path = Path(folder, "demo.pdb")
            write_demo_pdb(path, 106)
            pairs, cases = made_pairs(path), MADE_CASES
            title = f"{path.name}, {len(pairs[0].complex)} rows, all designed"
        print(f"DPO step, {title};\n{'one thread' if on_cpu else ddp.device}, in turns, median of "
              f"{args.repeats}; loss and gradient norm before the first step, decoded from N to C\n"
              f"{'':<33}{f'pairs per {second}':^24}{'difference of':>43}\n{'ours is':<33}"
              f"{'plain':>8}{'ours':>8}{'ratio':>8}  {'(min-max)':<13}{'data':>5}"
              f"{'loss':>8}{'norm, relative':>15}")
        for batch_size, settings in cases.items():
            plain_count, our_count = 1, 3 if on_cpu else 20
            if args.pairs:      # structures differ in length: as many steps of both
                plain_count = our_count = PAIRS_OF_A_TURN // batch_size
            for row in compare_steps(pairs, batch_size, settings, plain_count, our_count,
                                     args.repeats, ddp):
                print(row, flush=True)
        print("plain: reads the files and runs four forward passes in float32 each step, decoded "
              "from N to C,\npairs in random order. With order random, ours computes the reference "
              "in each step too. ratio: of\nthe times per row of a structure. data: fraction of "
              "our step in which batches are made, as without\n--num_workers.")


def compare_steps(pairs, batch_size, settings, plain_count, our_count, repeats, ddp):
    """Rows of bench_dpo's table, one for each (order, dtype) of ours.

    plain_count, our_count: steps of a turn.
    """
    sides = [DpoSteps(pairs, batch_size, ddp, *setting) for setting in settings]
    differences = [steps.differences() for steps in sides]
    for steps in sides:
        steps.take_steps("ours", 3)             # warm up: Adam's state, caches of structures
    plain_turns, turns_of_sides = [], [[] for _ in sides]
    for _ in range(repeats):
        plain_turns.append(sides[0].take_steps("plain", plain_count))
        for steps, turns in zip(sides, turns_of_sides):
            turns.append(steps.take_steps("ours", our_count))
    for (order, dtype), turns, (loss, norm) in zip(settings, turns_of_sides, differences):
        ratios = [(plain.seconds / plain.rows) / (ours.seconds / ours.rows)
                  for plain, ours in zip(plain_turns, turns)]
        plain, ours = (Turn(*map(statistics.median, zip(*column)))
                       for column in (plain_turns, turns))
        name = f"{batch_size} pair{'s' if batch_size > 1 else ''} a step, {order}, {dtype}"
        yield (f"{name:<33}{plain.pairs / plain.seconds:>8.2f}"
               f"{ours.pairs / ours.seconds:>8.2f}"
               f"{statistics.median(ratios):>7.1f}x  "
               f"{f'({min(ratios):.1f}-{max(ratios):.1f})':<13}{ours.loading:>5.1%}"
               f"{loss:>8.1e}{norm:>15.1e}")


# ---- data ----

def private_megabytes():
    """Memory of this process that is not shared with other processes, in MB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines()
               if line.startswith("Private")) / 1e3


def start_a_rank(folder, config, micro_batches, accum):
    """Costs of rank 0 until its first batch, and statistics of the batches.

    Returns: dict for table_of_ranks: first (CPU seconds to the first batch), memory (MB), reach
        (seconds to a step of the second epoch), padding and wait (fractions), read, read_cropped
        (bytes per residue), steps, windows, unit (thousand residues).
    """
    torch.set_num_threads(1)
    memory_before, start = private_megabytes(), time.process_time()
    proteins = PreparedProteins(folder)
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    reader = BatchReader(plan, proteins, sum_rows(proteins, plan))
    for lane in range(accum):
        reader.micro_batch(0, lane)
    found = dict(first=time.process_time() - start, memory=private_megabytes() - memory_before,
                 steps=plan.steps_per_epoch, windows=plan.windows,
                 unit=proteins.meta["residues"] / plan.windows / micro_batches / 1e3)
    start = time.perf_counter()
    for lane in range(accum):
        reader.micro_batch(plan.steps_per_epoch * 5 // 3, lane)
    found["reach"] = time.perf_counter() - start
    read_before, uncropped, positions, residues, waits = proteins.bytes_read, 0, 0, 0, []
    lanes = np.linspace(0, micro_batches - 1, min(micro_batches, 64)).astype(int)
    reader.units.clear()
    first_step, n = plan.window_steps * (plan.windows // 2), plan.window_steps
    steps = range(first_step, first_step + n, math.ceil(len(lanes) * n / MOST_READ))
    for step in steps:
        work = []
        for lane in lanes:
            part, width = reader.micro_batch(step, lane)
            positions += len(part) * width
            residues += int(np.minimum(part.lengths, plan.max_length).sum())
            uncropped += int(part.lengths.sum())
            work.append(len(part) * width * (6 * config.model.hidden_size + width))
        waits.append(max(work) / (sum(work) / len(work)) - 1)
    read = (proteins.bytes_read - read_before) * len(steps) / n   # all n steps were read
    return {**found, "padding": 1 - residues / positions, "wait": np.mean(waits),
            "read": read / uncropped, "read_cropped": read / residues}


def bench_data(args, ddp):
    """Measure planning for many ranks, and training from a prepared set and from memory."""
    with shared_folder(args.folder, ddp) as folder:
        if ddp.world_size == 1:
            table_of_ranks(args, folder)
        if ddp.is_main:
            write_prepared(folder / "small", 100_000)
        barrier(ddp)
        train_from_both(args, folder / "small", ddp)


def table_of_ranks(args, folder):
    """Print a table of the results of start_a_rank for 1 to 12,288 ranks."""
    n = min(args.proteins, int(shutil.disk_usage(folder).free * 0.9 / BYTES_PER_PROTEIN))
    start = time.perf_counter()
    write_prepared(folder / "large", n)
    config = load_config(Config, CONFIGS / "sedd_uniref50.yaml")
    accum = config.training.accum
    print(f"prepared set of {n:,} random proteins"
          f"{'' if n == args.proteins else ' (the disk has no room for more)'}, written in "
          f"{time.perf_counter() - start:.0f} s; sedd_uniref50.yaml, accum {accum}\n"
          f"{'ranks':>6}{'steps/epoch':>12}{'windows':>8}{'unit kB':>8}{'CPU s to batch 1':>17}"
          f"{'private MB':>11}{'s to step k':>12}{'padding':>8}{'waits':>6}{'read/used':>10}"
          f"{'cropped':>8}")
    for ranks in (1, 12, 1536, 12288):
        if n < 2 * ranks * accum * config.training.batch_size:
            print(f"{ranks:>6}  too few proteins for this number of ranks: see --proteins")
            continue
        found = in_a_child(start_a_rank, folder / "large", config, ranks * accum, accum)
        print("{ranks:>6}{steps:>12,}{windows:>8,}{unit:>8,.0f}{first:>17.2f}{memory:>11.0f}"
              "{reach:>12.3f}{padding:>8.1%}{wait:>6.1%}{read:>10.3f}{read_cropped:>8.3f}".format(
                  ranks=ranks, **found), flush=True)
    print(f"of rank 0, the only one that reads all lengths ({4 * n / 1e6:,.0f} MB) at the start. "
          "k: a step of the second epoch. waits: work\nof the largest of up to 64 micro-batches of "
          "a step over their mean, minus 1. read/used: bytes read per\nresidue of the proteins "
          "trained on. cropped: per residue of these after cropping")


def train_from_both(args, folder, ddp):
    """Compare residues per second of training from disk and from memory; also time the loader."""
    torch.set_num_threads(1)
    config = load_config(Config, CONFIGS / "sedd_cpu.yaml")
    graph, noise = make_graph("absorb", N_TOKENS), make_noise("loglinear")
    model = wrap_ddp(make_model(config, graph).to(ddp.device), ddp)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = MicroBatchDataset(graph, noise, config.data.max_length, ddp.world_size, 0)
    on_disk = PreparedProteins(folder)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, graph, config, ddp, torch.float32)

    def residue_rate(proteins, first, last, train):
        """Residues per second over these steps. train: False only loads their batches."""
        reader = make_reader(config, proteins, ddp.world_size, ddp)
        sampler = MicroBatchSampler(reader.item_of, ddp.world_size, ddp, first, last)
        barrier(ddp)
        start, residues = time.perf_counter(), 0.0
        for item in sampler:
            batch = dataset[item]
            residues += float(batch["mask"].sum())
            if train:
                global_gradient(model, [batch], loss_of, ddp, 2048.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if ddp.device.type != "cpu":
            getattr(torch, ddp.device.type).synchronize()
        return all_sum(residues, ddp) / (time.perf_counter() - start)

    in_memory = on_disk.read_all()
    residue_rate(on_disk, 0, 5, train=True)     # to warm up
    rates, ratios = [], []
    for k in range(args.repeats):           # other steps in each repeat, each with a new reader
        first, last = 1000 * k, 1000 * k + args.steps
        disk = residue_rate(on_disk, first, last, train=True)
        memory = residue_rate(in_memory, first, last, train=True)
        rates.append(disk)
        ratios.append(disk / memory)
    loader = residue_rate(on_disk, 0, 200, train=False)
    print0(ddp, f"{ddp.world_size} rank(s), sedd_cpu.yaml, {args.steps} steps, {args.repeats} "
                f"times in turns: {statistics.median(rates):,.0f} residues/s from disk, "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of that "
                f"from memory; the loader alone {loader:,.0f} residues/s")


def main(argv):
    benches = {"save": bench_save, "sedd": bench_sedd, "dpo": bench_dpo, "data": bench_data}
    own_options = {"scale": bench_scale.main, "card": bench_card.main, "learn": bench_learn.main}
    if argv and argv[0] in own_options:
        return own_options[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=(*benches, *own_options),
        help="scale and card have their own options (python -m bench scale --help); sedd, dpo and "
             "data measure the CPU unless --device says otherwise")
    add("configs", nargs="*", type=Path, default=[], help="save: default configs/sedd_*.yaml")
    add("--folder", default=".", help="folder for temporary checkpoints and data")
    add("--repeats", type=int, default=5)
    add("--proteins", type=int, default=2_000_000,
        help="data: number of random proteins (60000000: 17 GB)")
    add("--steps", type=int, default=60, help="data: steps of each training")
    add("--data", help="sedd: proteins; default: random ones with the lengths of UniRef50")
    add("--pairs", type=Path, help="dpo: file of preference pairs, as for train_dpo_ddp.py; "
                                   "default: random pairs of a synthetic structure")
    add_launch_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    if not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder} is no folder; expected one that exists")
    if args.what in own_options:
        parser.error(f"{args.what} must be the first argument")
    if args.what != "save" and args.device == "auto":
        args.device = "cpu"
    for name, value in vars(args).items():
        if name != "node_rank" and type(value) is int and value < 1:
            parser.error(f"--{name} is {value}; expected at least 1")
    if args.configs and args.what != "save":
        parser.error(f"found {args.configs[0]}; expected options: save alone takes configs")
    for option, task in (("data", "sedd"), ("pairs", "dpo")):
        if getattr(args, option) and args.what != task:
            parser.error(f"found --{option} with {args.what}; expected it with {task} alone")
    with started_ranks(args, argv) as ddp:
        if args.what in ("sedd", "dpo") and ddp.world_size > 1:
            raise ValueError(f"found {ddp.world_size} ranks; expected one process: {args.what} "
                             "compares steps, on one device. Start it by python alone.")
        benches[args.what](args, ddp)


if __name__ == "__main__":
    main(sys.argv[1:])
