"""What things cost on this machine; prints what it measured, writes nothing that stays.

    python bench_ddp.py save                                    # a checkpoint: write, check and read
    python bench_ddp.py save --folder /lus/flare/projects/X     # on that file system
    mpirun -n 4 python bench_ddp.py save configs/sedd_cpu.yaml  # load: read by rank 0 and sent to the others
    python bench_ddp.py dpo                                     # a DPO step against a plain one; on one CPU thread
    python bench_ddp.py dpo --device cuda                       # the same on a device: pairs per second
    python bench_ddp.py dpo --pdb 5L33.pdb --long               # on this structure; memory of the plain step too
"""
import argparse
import copy
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
from ddp_setup import add_launch_arguments, broadcast, load_checkpoint, print0, save_checkpoint, setup_ddp
from proteinmpnn_model import ATOMS, PAIRS, random_proteinmpnn
from run_config import load_config
from sedd_diffusion import make_graph
from sedd_model import EMA, SEDD
from sequence_data import N_TOKENS, X_ID
from structure_data import NAMES, PHI_PSI, Complex, Pair, build_backbone, collate, collate_complexes, read_structure
from train_sedd_ddp import Config

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
        totals, norm = dpo.accumulate(model, [batch], self.reference, self.config, self.ddp, self.dtype, self.n)
        return totals[0] / totals[-4], norm

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


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("save", "dpo"))
    parser.add_argument("configs", nargs="*", type=Path, help="of save; default: configs/sedd_*.yaml")
    parser.add_argument("--folder", default=".", help="where to write (and remove) checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pdb", type=Path, help="structure for dpo, all its chains designed; default: a built one")
    parser.add_argument("--long", action="store_true", help="dpo: memory of the plain step too; takes GB and minutes")
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    if args.what == "dpo" and args.device == "auto":
        args.device = "cpu"
    with setup_ddp(args.device, args.backend, ranks=args.ranks, init_timeout=args.init_timeout, quiet=True) as ddp:
        {"save": bench_save, "dpo": bench_dpo}[args.what](args, ddp)


if __name__ == "__main__":
    main(sys.argv[1:])
