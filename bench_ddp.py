"""What things cost on this machine; prints what it measured, writes nothing that stays.

    python bench_ddp.py save                                    # a checkpoint: write, check and read
    python bench_ddp.py save --folder /lus/flare/projects/X     # on that file system
    mpirun -n 4 python bench_ddp.py save configs/sedd_cpu.yaml  # load: read by rank 0 and sent to the others
    python bench_ddp.py dpo                                     # a DPO step against a plain one; on one CPU thread
    python bench_ddp.py dpo --device cuda                       # the same on a device: pairs per second
    python bench_ddp.py dpo --pdb 5L33.pdb --long               # on this structure; memory of the plain step too
    python bench_ddp.py data --proteins 60000000 --folder /tmp  # planning and reading of a made prepared set, 17 GB
    mpirun -n 2 python bench_ddp.py data                        # the second part of it (training) with 2 ranks
"""
import argparse
import copy
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train_dpo_ddp as dpo
from ddp_setup import (all_sum, barrier, broadcast, load_checkpoint, print0, save_checkpoint,
                       setup_ddp, wrap_ddp)
from proteinmpnn_model import ATOMS, PAIRS, random_proteinmpnn
from run_config import load_config
from sedd_diffusion import make_graph, make_noise
from sedd_model import EMA, SEDD
from sequence_batches import BatchReader, sum_rows
from sequence_data import FORMAT, N_TOKENS, PARTS, SETS, VERSION, X_ID, PreparedProteins, sequence_keys
from structure_data import NAMES, PHI_PSI, Complex, Pair, build_backbone, collate, collate_complexes, read_structure
from run_script import add_launch_arguments
from train_loop import Schedule, global_gradient
from train_sedd_ddp import (Config, MicroBatches, make_batch_plan, make_model, make_reader, micro_batch_loss)

CONFIGS = Path(__file__).with_name("configs")


def training_state(path):
    """(number of parameters, what a checkpoint of this config's run holds), after one optimizer step on the CPU."""
    c = load_config(Config, path)
    graph = make_graph(c.graph.type, N_TOKENS)
    model = SEDD(graph.vocab_size, c.model.hidden_size, c.model.n_blocks, c.model.n_heads, c.model.cond_dim,
                 forbidden=(X_ID,))
    optimizer, ema = torch.optim.AdamW(model.parameters(), fused=True), EMA(model.parameters(), c.optim.ema)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return sum(p.numel() for p in model.parameters()), dict(model=model.state_dict(), ema=ema.state_dict(),
                                                            optimizer=optimizer.state_dict(), step=1)


def seconds(function, repeats):
    """Median and spread (max - min) of the wall time of function()."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def bench_save(args, ddp):
    """Time to write a checkpoint (with fsync), and to check and read it; all ranks take part."""
    folder = broadcast(tempfile.mkdtemp(prefix="bench-", dir=args.folder) if ddp.is_main else None, ddp)
    print0(ddp, f"a checkpoint in {args.folder}, {ddp.world_size} rank(s), median of {args.repeats} (max - min)\n"
                f"{'config':<16}{'parameters':>12}{'MB':>8}{'write s':>16}{'read s':>16}{'every 15 min':>14}")
    try:
        for config in args.configs or sorted(CONFIGS.glob("sedd_*.yaml")):
            n, state = training_state(config)
            path = os.path.join(folder, "last.pt")
            write, write_spread = seconds(lambda: save_checkpoint(path, ddp, 2, **state), args.repeats)
            read, read_spread = seconds(lambda: load_checkpoint(path, ddp), args.repeats)
            size = broadcast(os.path.getsize(path) if ddp.is_main else None, ddp) / 1e6
            print0(ddp, f"{Path(config).stem[:15]:<16}{n / 1e6:>10.1f} M{size:>8.0f}{write:>9.2f} ({write_spread:.2f})"
                        f"{read:>9.2f} ({read_spread:.2f}){write / 900:>13.2%}")
    finally:
        if ddp.is_main:
            shutil.rmtree(folder)
    print0(ddp, "'every 15 min': the share of the time that saving takes. Training waits while it saves.")


# ---- a DPO step ----

def plain_log_probs(model, X, S, mask, residue_idx, chain_id, order):
    """What ProteinMPNN computes, as its paper and the published code describe it, without any saving: all L x L
    distances, concatenated inputs, the order as one-hot matrices. Weights of `model`; log-probabilities (B, L, 21)."""
    B, L = S.shape
    N, CA, C, O = X.unbind(2)
    b, c = CA - N, C - CA
    atoms = dict(N=N, CA=CA, C=C, O=O)
    atoms["CB"] = -0.58273431 * torch.linalg.cross(b, c) + 0.56802827 * b - 0.54067466 * c + CA

    def distances(p, q):
        return ((atoms[p][:, :, None] - atoms[q][:, None]).square().sum(-1) + 1e-6).sqrt()      # (B, L, L)

    def gather(x, index):                               # (B, L, H), (B, L, K) -> (B, L, K, H)
        flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, flat).view(*index.shape, x.shape[-1])

    pair_mask = mask[:, :, None] * mask[:, None]
    D = pair_mask * distances("CA", "CA")
    nearest, E_idx = (D + (1 - pair_mask) * D.amax(-1, keepdim=True)).topk(min(model.num_edges, L), largest=False)
    centres = torch.linspace(2, 22, 16, device=X.device)
    rbf = []
    for k, pair in enumerate(PAIRS.split()):
        d = nearest if k == 0 else distances(*pair.split("-")).gather(2, E_idx)
        rbf.append(torch.exp(-((d[..., None] - centres) / 1.25).square()))
    offset = (residue_idx[:, :, None] - residue_idx[:, None]).gather(2, E_idx)
    same = (chain_id[:, :, None] == chain_id[:, None]).gather(2, E_idx)
    kind = torch.where(same, (offset + 32).clamp(0, 64), 65)
    f = model.features
    positional = f.embeddings.linear(F.one_hot(kind, 66).float())
    h_E = model.W_e(f.norm_edges(f.edge_embedding(torch.cat([positional, *rbf], -1))))
    h_V = h_E.new_zeros(B, L, h_E.shape[-1])
    edge_mask = mask[..., None] * gather(mask[..., None], E_idx)[..., 0]

    def message(x, *layers):
        return layers[2](F.gelu(layers[1](F.gelu(layers[0](x)))))

    def centre(h_V, rest):
        return torch.cat([h_V[:, :, None].expand(-1, -1, rest.shape[2], -1), rest], -1)

    def update(layer, h_V, m):
        h_V = layer.norm1(h_V + m.sum(2) / 30)
        return layer.norm2(h_V + layer.dense(h_V)) * mask[..., None]

    for layer in model.encoder_layers:
        x = centre(h_V, torch.cat([h_E, gather(h_V, E_idx)], -1))
        h_V = update(layer, h_V, message(x, layer.W1, layer.W2, layer.W3) * edge_mask[..., None])
        x = centre(h_V, torch.cat([h_E, gather(h_V, E_idx)], -1))
        h_E = layer.norm3(h_E + message(x, layer.W11, layer.W12, layer.W13))
    one_hot = F.one_hot(order, L).float()                                                           # step, residue
    visible = torch.einsum("ij,biq,bjp->bqp", one_hot.new_ones(L, L).tril(-1), one_hot, one_hot)
    visible = visible.gather(2, E_idx)[..., None]
    h_S = model.W_s(S)
    blind = torch.cat([h_E, torch.zeros_like(h_E), gather(h_V, E_idx)], -1) * (1 - visible) * mask[..., None, None]
    for layer in model.decoder_layers:
        seen = torch.cat([h_E, gather(h_S, E_idx), gather(h_V, E_idx)], -1) * visible * mask[..., None, None]
        h_V = update(layer, h_V, message(centre(h_V, seen + blind), layer.W1, layer.W2, layer.W3))
    return torch.log_softmax(model.W_out(h_V), -1)


def plain_loss(policy, reference, path, pairs, beta):
    """Mean DPO loss of pairs on one structure, which is read anew: four forward passes, nothing kept or shared."""
    structure = read_structure(path)
    complex = Complex(structure, sorted(structure.chains))
    batch = collate([Pair(complex, pair.chosen, pair.rejected, pair.chain_M) for pair in pairs], range(len(pairs)))
    device = policy.W_s.weight.device
    batch = {name: value.to(device) for name, value in {**batch, **collate_complexes([complex])}.items()}
    rows, scores = batch["complex"], []
    X, mask, residue_idx, chain_id = (batch[name][rows] for name in ("X", "mask", "residue_idx", "chain_id"))
    order = torch.arange(X.shape[1], device=device).expand(len(pairs), -1)
    order = order.gather(1, (batch["chain_M"] * mask).gather(1, order).argsort(dim=1, stable=True))
    for model, grad in ((policy, True), (reference, False)):
        for name in ("chosen", "rejected"):
            with torch.set_grad_enabled(grad):
                log_probs = plain_log_probs(model, X, batch[name], mask, residue_idx, chain_id, order)
                token = log_probs.gather(-1, batch[name][..., None])[..., 0]
                scores.append((token * mask * batch["chain_M"]).sum(1))
    chosen, rejected, ref_chosen, ref_rejected = scores
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


class DpoSteps:
    """The plain step and ours, from equal weights, on the same pairs. A step is loss, gradient, clipping and Adam."""

    def __init__(self, path, n_pairs, ddp, order="arange", dtype="float32", seed=0, made=4):
        self.path, self.n, self.ddp = path, n_pairs, ddp
        self.config = dpo.Config()
        self.config.loss.order = order
        self.dtype = getattr(torch, dtype)
        structure = read_structure(path)
        complex, rng = Complex(structure, sorted(structure.chains)), np.random.default_rng(seed)
        L = len(complex)
        self.pairs = [Pair(complex, *np.where(complex.mask, rng.integers(0, 20, (2, L)), complex.S).astype(np.uint8),
                           np.ones(L, bool)) for _ in range(made)]
        self.base = random_proteinmpnn(seed).eval()
        policy = copy.deepcopy(self.base)
        self.base = self.base.to(ddp.device)
        with torch.no_grad():                              # away from the reference, where every loss is log 2
            for p in policy.parameters():
                p += 0.003 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + 1))
        policy = policy.to(ddp.device)
        self.models = {"plain": policy, "ours": copy.deepcopy(policy)}
        self.optimizers = {k: torch.optim.Adam(m.parameters(), lr=3e-6) for k, m in self.models.items()}
        self.reference = dpo.Reference(self.base, self.pairs, self.config, ddp)
        self.at, self.epoch, self.waited = {"plain": 0, "ours": 0}, 0, 0.0
        if order != "random":                              # once per run, not per step
            self.epoch = None
            with torch.no_grad():
                batch = self.reference.to_device(self.batch(range(made)))
                log_probs = self.reference.log_probs(batch)
            self.reference.table = dpo.pair_scores(log_probs, batch, 1.0)[0]

    def batch(self, indices):
        return dpo.make_batch(self.pairs, list(indices), self.config.loss, 0, self.epoch)

    def gradient(self, kind):
        """(loss, norm of the gradient) of the next pairs, tensors; the gradient is left in .grad."""
        model, some = self.models[kind], [(self.at[kind] + i) % len(self.pairs) for i in range(self.n)]
        self.at[kind] += self.n
        model.zero_grad()
        if kind == "plain":
            loss = plain_loss(model, self.base, self.path, [self.pairs[i] for i in some], self.config.loss.beta)
            loss.backward()
            return loss.detach(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        self.epoch = self.epoch if self.epoch is None else self.at[kind]
        asked = self.now()
        batch = self.batch(some)
        self.waited += self.now() - asked
        totals, norm = global_gradient(model, [{**batch, "seed": 0}], self.loss_of, self.ddp, self.n)
        return totals.sums[0] / totals.count, norm

    def loss_of(self, model, batch):
        return dpo.micro_batch_loss(model, batch, self.reference, self.config, self.ddp, self.dtype)

    def now(self):
        """CPU seconds of this process; of a device, which works beside it, seconds."""
        return time.process_time() if self.ddp.device.type == "cpu" else time.perf_counter()

    def finish(self):
        if self.ddp.device.type != "cpu":
            getattr(torch, self.ddp.device.type).synchronize()

    def step(self, kind, n=1):
        """(seconds of each of n steps, share of them in which the next pairs were made). The device is not waited for
        between them."""
        self.finish()
        start, self.waited = self.now(), 0.0
        for _ in range(n):
            self.gradient(kind)
            torch.nn.utils.clip_grad_norm_(self.models[kind].parameters(), self.config.optim.grad_clip)
            self.optimizers[kind].step()
        self.finish()
        took = self.now() - start
        return took / n, self.waited / took


def write_demo_pdb(path, n_residues):
    """Helices and strands of 12 residues in turns, as a PDB file with one chain."""
    kinds = [("helix", "strand")[i // 12 % 2] for i in range(n_residues)]
    X = build_backbone(*zip(*(PHI_PSI[kind] for kind in kinds)))
    X -= X.min((0, 1))                                     # a column of the format has no room for -1,000
    path.write_text("".join(
        f"ATOM  {4 * i + k + 1:5d}  {atom:<3} {NAMES[i * 7 % 20]} A{i + 1:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00"
        f"           {atom[0]}\n" for i, residue in enumerate(X)
        for k, (atom, (x, y, z)) in enumerate(zip(ATOMS, residue.tolist()))))


def resident(field):
    """VmRSS or VmHWM (its peak) of this process in GB; Linux only."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1e6


def memory_of_a_step(kind, path, queue):
    """Puts the growth of the peak memory in GB, with all that is kept for the step, and its CPU seconds. In a process
    of its own."""
    torch.set_num_threads(1)
    with setup_ddp("cpu", quiet=True) as ddp:
        before = resident("VmRSS")
        steps = DpoSteps(path, 1, ddp, made=1)
        Path("/proc/self/clear_refs").write_text("5")      # the peak counts from here on, but what is kept counts
        took = steps.step(kind)[0]
        queue.put((resident("VmHWM") - before, took))


def memory_on_the_device(kind, path, ddp):
    """The same of a device."""
    backend = getattr(torch, ddp.device.type)
    before = backend.memory_allocated()
    steps = DpoSteps(path, 1, ddp, made=1)
    backend.reset_peak_memory_stats()
    took = steps.step(kind)[0]
    return (backend.max_memory_allocated() - before) / 1e9, took


def bench_dpo(args, ddp):
    """Pairs per CPU second, or per second of a device, of our DPO step and of a plain one, in turns; differences of the
    results; memory at 2,000 residues."""
    if ddp.world_size > 1:
        raise ValueError(f"found {ddp.world_size} ranks; expected one process: bench_ddp.py dpo compares steps, on "
                         "one device. Start it by python alone.")
    on_cpu = ddp.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    second = "CPU second" if on_cpu else "second"
    with tempfile.TemporaryDirectory() as folder:
        path = args.pdb or Path(folder, "demo.pdb")
        if args.pdb is None:
            write_demo_pdb(path, 106)
        n = sum(len(chain.S) for chain in read_structure(path).chains.values())
        print(f"DPO step, {path.name}, {n} rows, all designed; {'one thread' if on_cpu else ddp.device}, in turns, "
              f"median of {args.repeats};\nloss and gradient norm before the first step\n"
              f"{'':<34}{f'pairs per {second}':^24}\n{'ours is':<34}"
              f"{'plain':>8}{'ours':>8}{'ratio':>8}  {'(min-max)':<14}{'data':>5}"
              f"{'loss differs':>13}{'norm, relative':>16}")
        for pairs, order, dtype in ((1, "arange", "float32"), (1, "random", "float32"), (4, "arange", "float32"),
                                    (4, "arange", "bfloat16")):
            steps = DpoSteps(path, pairs, ddp, order, dtype)
            loss, norm, our_loss, our_norm = map(float, (*steps.gradient("plain"), *steps.gradient("ours")))
            steps.step("ours", 3)                          # Adam's state, and what is kept per structure
            took = [(steps.step("plain")[0], *steps.step("ours", 3 if on_cpu else 20)) for _ in range(args.repeats)]
            plain, ours, data = (statistics.median(column) for column in zip(*took))
            ratios = [a / b for a, b, _ in took]
            differ = (f"{abs(loss - our_loss):>13.1e}{abs(norm / our_norm - 1):>16.1e}" if order == "arange" else
                      f"{'another order':>13}")
            print(f"{f'{pairs} per structure, {order}, {dtype}':<34}{pairs / plain:>8.2f}{pairs / ours:>8.2f}"
                  f"{plain / ours:>7.1f}x  {f'({min(ratios):.1f}-{max(ratios):.1f})':<14}{data:>5.1%}{differ}",
                  flush=True)
        print("plain: reads the file and runs four forward passes in float32 each step. Order random computes the "
              "reference\neach step too, and compares with the plain step's order arange. data: share of our step in "
              "which its pairs are\nmade, as without --num_workers.")
        path = Path(folder, "long.pdb")
        write_demo_pdb(path, 2000)
        for kind in ("ours", "plain")[:1 + args.long]:
            if on_cpu:
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=memory_of_a_step, args=(kind, path, queue))
                process.start()
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"the {kind} step on 2,000 residues ended with {process.exitcode}; expected 0. "
                                       "-9: the system's memory did not suffice.")
                grown, took = queue.get()
            else:
                grown, took = memory_on_the_device(kind, path, ddp)
            print(f"2,000 residues, 1 pair, {kind}: peak memory grows by {grown:.2f} GB, {took:.1f} {second}s",
                  flush=True)


# ---- data ----

UNIREF50_LENGTHS = dict(mean=np.log(200), sigma=0.85, shortest=11, longest=45_000)   # log-normal, mean 287 residues


def write_prepared(folder, n):
    """A prepared folder of n made proteins, with UniRef50's length distribution and random letters."""
    law, random = UNIREF50_LENGTHS, np.random.default_rng(0)
    for name in SETS:
        (folder / name).mkdir(parents=True)
        for part in PARTS:
            (folder / name / part).touch()
    histogram = np.zeros(law["longest"] + 1, np.int64)
    parts = [open(folder / "train" / part, "wb") for part in PARTS]
    for first in range(0, n, 250_000):
        lengths = np.exp(random.normal(law["mean"], law["sigma"], min(250_000, n - first)))
        lengths = lengths.clip(law["shortest"], law["longest"]).astype(np.int64)
        tokens = random.integers(0, X_ID, lengths.sum(), np.uint8)
        keys = sequence_keys(tokens, np.cumsum(lengths) - lengths, lengths)
        for file, part, kind in zip(parts, (tokens, lengths, keys), PARTS.values()):
            part.astype(kind).tofile(file)
        histogram += np.bincount(lengths, minlength=len(histogram))
    for file in parts:
        file.close()
    lengths = np.flatnonzero(histogram)
    sets = {name: {"proteins": 0, "residues": 0, "length_histogram": [], "letter_counts": [0] * N_TOKENS,
                   "keys_hash": "", "files": {p: {"bytes": (folder / name / p).stat().st_size} for p in PARTS}}
            for name in SETS}
    sets["train"].update(proteins=n, residues=int((histogram[lengths] * lengths).sum()),
                         length_histogram=np.stack([lengths, histogram[lengths]], 1).tolist(),
                         letter_counts=[1] * N_TOKENS)
    (folder / "meta.json").write_text(json.dumps({
        "format": FORMAT, "version": VERSION, "release": "made", "source": [], "val_fraction": 0.0,
        "min_length": 1, "sets": sets}))


def private_megabytes():
    """Memory of this process that it shares with no other, in MB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private")) / 1e3


def start_a_rank(folder, config, micro_batches, accum, queue):
    """What rank 0 of a run needs until its first batch, and what its batches are, put on the queue."""
    torch.set_num_threads(1)
    before, began = private_megabytes(), time.process_time()
    proteins = PreparedProteins(folder)
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    reader = BatchReader(plan, proteins, sum_rows(proteins, plan))
    for lane in range(accum):
        reader.micro_batch(0, lane)
    first, memory = time.process_time() - began, private_megabytes() - before
    table = 4 * len(proteins)                              # the lengths, read once, by rank 0 alone
    began, far = time.perf_counter(), plan.steps_per_epoch * 5 // 3
    for lane in range(accum):
        reader.micro_batch(far, lane)
    reach = time.perf_counter() - began
    read_before, whole, positions, residues, waits = proteins.bytes_read, 0, 0, 0, []
    lanes = np.linspace(0, micro_batches - 1, min(micro_batches, 64)).astype(int)
    reader.units.clear()
    window = [plan.window_steps * (plan.windows // 2) + k for k in range(plan.window_steps)]
    steps = window if len(lanes) * len(window) <= 20_000 else window[::len(window) * len(lanes) // 20_000 + 1]
    share = len(window) / len(steps)
    for step in steps:
        work = []
        for lane in lanes:
            part, width = reader.micro_batch(step, lane)
            lengths = np.minimum(part.lengths, plan.max_length)
            positions, residues = positions + len(part) * width, residues + int(lengths.sum())
            whole += share * int(part.lengths.sum())
            work.append(len(part) * width * (6 * config.model.hidden_size + width))
        waits.append(max(work) / (sum(work) / len(work)) - 1)
    queue.put(dict(first=first, memory=memory, reach=reach, padding=1 - residues / positions, wait=np.mean(waits),
                   read=(proteins.bytes_read - read_before) / whole,
                   read_cropped=(proteins.bytes_read - read_before) / (share * residues), table=table / 1e6,
                   steps=plan.steps_per_epoch, windows=plan.windows,
                   unit=proteins.meta["residues"] / plan.windows / micro_batches))


def in_a_child(function, *arguments):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=function, args=(*arguments, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__} ended with {process.exitcode}; expected 0. -9: memory did not "
                           f"suffice.")
    return queue.get()


def bench_data(args, ddp):
    """Planning at any number of ranks, and training from a prepared set against the same set in memory."""
    folder = Path(broadcast(tempfile.mkdtemp(prefix="bench-", dir=args.folder) if ddp.is_main else None, ddp))
    try:
        if ddp.world_size == 1:
            table_of_ranks(args, folder)
        if ddp.is_main:
            write_prepared(folder / "small", 100_000)
        barrier(ddp)
        train_from_both(args, folder / "small", ddp)
    finally:
        barrier(ddp)
        if ddp.is_main:
            shutil.rmtree(folder)


def table_of_ranks(args, folder):
    free = shutil.disk_usage(folder).free
    n = min(args.proteins, int(free * 0.9 / 300))
    began = time.perf_counter()
    write_prepared(folder / "large", n)
    config = load_config(Config, CONFIGS / "sedd_uniref50.yaml")
    accum = config.training.accum
    print(f"prepared set of {n:,} made proteins{'' if n == args.proteins else ' (the disk has room for no more)'}, "
          f"written in {time.perf_counter() - began:.0f} s; sedd_uniref50.yaml, accum {accum}\n"
          f"{'ranks':>6}{'steps/epoch':>12}{'windows':>8}{'unit kB':>8}{'CPU s to batch 1':>17}{'private MB':>11}"
          f"{'s to step k':>12}{'padding':>8}{'waits':>6}{'read/used':>10}{'cropped':>8}")
    for ranks in (1, 12, 1536, 12288):
        if n < 2 * ranks * accum * config.training.batch_size:
            print(f"{ranks:>6}  too few proteins for this number of ranks: see --proteins")
            continue
        r = in_a_child(start_a_rank, folder / "large", config, ranks * accum, accum)
        print(f"{ranks:>6}{r['steps']:>12,}{r['windows']:>8,}{r['unit'] / 1e3:>8,.0f}{r['first']:>17.2f}"
              f"{r['memory']:>11.0f}{r['reach']:>12.3f}{r['padding']:>8.1%}{r['wait']:>6.1%}{r['read']:>10.3f}"
              f"{r['read_cropped']:>8.3f}",
              flush=True)
    print(f"rank 0, which alone reads all lengths ({r['table']:,.0f} MB) at the start; k is in the second epoch; waits: by "
          f"how much the\nslowest of up to 64 micro-batches of a step is above their mean; read/used: bytes read per "
          f"residue\nof the proteins trained on; cropped: per residue that their crops leave")


def train_from_both(args, folder, ddp):
    """Residues per second of training from disk, in turns with the same batches from memory; of the loader alone."""
    torch.set_num_threads(1)
    config = load_config(Config, CONFIGS / "sedd_cpu.yaml")
    graph, noise = make_graph("absorb", N_TOKENS), make_noise("loglinear")
    model = wrap_ddp(make_model(config, graph).to(ddp.device), ddp)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = MicroBatches(graph, noise, config.data.max_length, ddp.world_size, 0)
    on_disk = PreparedProteins(folder)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, graph, config, ddp, torch.float32)

    def run(proteins, first, last, train):
        reader = make_reader(config, proteins, ddp.world_size, ddp)
        schedule = Schedule(reader.item_of, ddp.world_size, ddp, first, last)
        barrier(ddp)
        began, residues = time.perf_counter(), 0.0
        for item in schedule:
            batch = dataset[item]
            residues += float(batch["mask"].sum())
            if train:
                global_gradient(model, [batch], loss_of, ddp, 2048.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return all_sum(residues, ddp) / (time.perf_counter() - began)

    in_memory = on_disk.read_all()
    run(on_disk, 0, 5, True)
    ratios, rates = [], []
    for k in range(args.repeats):                          # each time other steps, from the start of reading on
        first, last = 1000 * k, 1000 * k + args.steps
        rates.append([run(proteins, first, last, True) for proteins in (on_disk, in_memory)])
        ratios.append(rates[-1][0] / rates[-1][1])
    alone = run(on_disk, 0, 200, False)
    print0(ddp, f"{ddp.world_size} rank(s), sedd_cpu.yaml, {args.steps} steps, {args.repeats} times in turns: "
                f"{statistics.median(r[0] for r in rates):,.0f} residues/s from disk, {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f}-{max(ratios):.3f}) of that from memory; the loader alone {alone:,.0f} residues/s")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("save", "dpo", "data"))
    parser.add_argument("configs", nargs="*", type=Path, help="of save; default: configs/sedd_*.yaml")
    parser.add_argument("--folder", default=".", help="where to write (and remove) checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--proteins", type=int, default=2_000_000, help="data: size of the made set (60000000: 17 GB)")
    parser.add_argument("--steps", type=int, default=60, help="data: steps of each training")
    parser.add_argument("--pdb", type=Path, help="structure for dpo, all its chains designed; default: a built one")
    parser.add_argument("--long", action="store_true", help="dpo: memory of the plain step too; takes GB and minutes")
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    if args.what in ("dpo", "data") and args.device == "auto":
        args.device = "cpu"
    with setup_ddp(args.device, args.backend, ranks=args.ranks, init_timeout=args.init_timeout, quiet=True) as ddp:
        {"save": bench_save, "dpo": bench_dpo, "data": bench_data}[args.what](args, ddp)


if __name__ == "__main__":
    main(sys.argv[1:])
