"""Our DPO step, and a plain transcription of the published code, in turns.

    python -m bench dpo                                     # random pairs of a made structure
    python -m bench dpo --pairs pairs.json                  # with real pairs
    python -m bench dpo --device cuda                       # on a device: pairs per second

bfloat16 is measured where the processor computes in it. Leaves no files.
"""
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import train_dpo_ddp as dpo
from bench.common import (CommandParser, computes_in_bfloat16, now, read_options,
                          run_on_one_rank, say)
from mpnn.batches import collate, collate_complexes, make_batch
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import ATOMS, PAIRS, random_proteinmpnn
from mpnn.pairs import Pair, describe, read_pairs
from mpnn.dpo import ProteinMPNNScorer
from proteins.structures import NAMES, Complex, read_structure
from training.fast_linear import fast_linear
from training.loop import global_gradient
from dpo.pair_plan import PairPlan
from dpo.reference import Reference
from dpo.scorer import Base

# {pairs per step: [(order, dtype) of our steps]}, for random pairs and those of a file.
MADE_CASES = {1: [("arange", "float32"), ("random", "float32")],
              4: [("arange", "float32"), ("arange", "bfloat16")]}
FILE_CASES = {1: [("random", "float32"), ("fixed", "float32")],
              4: [("fixed", "float32"), ("random", "bfloat16"), ("fixed", "bfloat16")]}
PAIRS_OF_A_TURN = 16        # pairs of a file that each step takes before the other has its turn
MADE_RESIDUES = 106         # of the made structure


def bench_dpo(args, ddp):
    """Time our DPO step and a plain one alternately, and compare their results."""
    on_cpu = ddp.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    second = "CPU second" if on_cpu else "second"
    with tempfile.TemporaryDirectory() as folder:
        if args.pairs:
            pairs = read_pairs(args.pairs)
            cases = FILE_CASES
            title = f"{args.pairs.name}, {describe(pairs)}"
        else:
            path = Path(folder, "demo.pdb")
            write_demo_pdb(path, MADE_RESIDUES)
            pairs = made_pairs(path)
            cases = MADE_CASES
            title = f"{path.name}, {len(pairs[0].complex)} rows, all designed"
        print(f"DPO step, {title};\n{'one thread' if on_cpu else ddp.device}, in turns, median of "
              f"{args.repeats}; loss and gradient norm before the first step, decoded from N to C\n"
              f"{'':<33}{f'pairs per {second}':^24}{'difference of':>43}\n{'ours is':<33}"
              f"{'plain':>8}{'ours':>8}{'ratio':>8}  {'(min-max)':<13}{'data':>5}"
              f"{'loss':>8}{'norm, relative':>15}", flush=True)
        for batch_size, settings in cases_on(ddp.device, cases).items():
            if args.pairs:      # structures differ in length: as many steps of both
                plain_count = PAIRS_OF_A_TURN // batch_size
                our_count = plain_count
            else:
                plain_count = 1
                our_count = 3 if on_cpu else 20
            for row in compare_steps(pairs, batch_size, settings, plain_count, our_count,
                                     args.repeats, ddp):
                print(row, flush=True)
        print("plain: reads the files and runs four forward passes in float32 each step, decoded "
              "from N to C,\npairs in random order. With order random, ours computes the reference "
              "in each step too. ratio: of\nthe times per row of a structure. data: fraction of "
              "our step in which batches are made, as without\n--num_workers.")


def cases_on(device, cases):
    """The cases without bfloat16 where the device has none."""
    if computes_in_bfloat16(device):
        return cases
    say(f"bfloat16 is left out: {device.type} has no native bfloat16")
    return {batch_size: [(order, dtype) for order, dtype in settings if dtype != "bfloat16"]
            for batch_size, settings in cases.items()}


def compare_steps(pairs, batch_size, settings, plain_count, our_count, repeats, ddp):
    """Rows of bench_dpo's table, one for each (order, dtype) of ours.

    plain_count, our_count: steps of a turn.
    """
    say(f"{batch_size} a step: comparing the results, then {repeats} turns")
    sides = [DpoSteps(pairs, batch_size, ddp, order, dtype) for order, dtype in settings]
    differences = [steps.differences() for steps in sides]
    for steps in sides:
        steps.take_steps("ours", 3)             # warm up: Adam's state, caches of structures
    plain_turns = []
    turns_of_sides = [[] for _ in sides]
    for repeat in range(repeats):
        say(f"{batch_size} a step: turn {repeat + 1} of {repeats}")
        plain_turns.append(sides[0].take_steps("plain", plain_count))
        for steps, turns in zip(sides, turns_of_sides):
            turns.append(steps.take_steps("ours", our_count))
    plain = median_turn(plain_turns)
    rows = []
    for (order, dtype), turns, (loss, norm) in zip(settings, turns_of_sides, differences):
        ratios = [(plain_turn.seconds / plain_turn.rows) / (our_turn.seconds / our_turn.rows)
                  for plain_turn, our_turn in zip(plain_turns, turns)]
        ours = median_turn(turns)
        name = f"{batch_size} pair{'s' if batch_size > 1 else ''} a step, {order}, {dtype}"
        rows.append(f"{name:<33}{plain.pairs / plain.seconds:>8.2f}"
                    f"{ours.pairs / ours.seconds:>8.2f}"
                    f"{statistics.median(ratios):>7.1f}x  "
                    f"{f'({min(ratios):.1f}-{max(ratios):.1f})':<13}{ours.loading:>5.1%}"
                    f"{loss:>8.1e}{norm:>15.1e}")
    return rows


class Turn(NamedTuple):
    """Means over some consecutive steps."""
    seconds: float     # per step
    loading: float     # fraction of this in which batches of pairs are made
    rows: float        # of structures, per step
    pairs: float       # per step: fewer than batch_size if structures have few


def median_turn(turns):
    return Turn(*map(statistics.median, zip(*turns)))


class DpoSteps:
    """The plain step and ours, from equal weights, on the same pairs.

    A step is loss, gradient, clipping and Adam. The plain step takes the pairs in random order,
    ours in the order of training (PairPlan).
    Args: batch_size: pairs per step. order: a value of loss.order.
    """

    def __init__(self, pairs, batch_size, ddp, order="arange", dtype="float32"):
        self.pairs = pairs
        self.batch_size = batch_size
        self.ddp = ddp
        self.config = dpo.Config()
        self.config.loss.order = order
        self.dtype = getattr(torch, dtype)
        self.base = random_proteinmpnn(0, product=fast_linear).eval()
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
        self.reference = Reference(ProteinMPNNScorer(Base(self.base, ""), pairs, self.config, ddp))
        self.shuffled = np.random.default_rng(0).permutation(len(pairs)).tolist()
        self.plan = PairPlan(pairs, 0, 1, batch_size)
        self.taken = {"plain": 0, "ours": 0}
        self.loading = 0.0                  # seconds in which batches were made
        # Clock for loading. Wall time on a device, which works on while this process makes pairs.
        self.clock = time.process_time if ddp.device.type == "cpu" else time.perf_counter
        if order != "random":               # compute the reference's scores once, not per step
            self.reference.table = self.reference.compute(pairs).to(ddp.device)

    def take_steps(self, kind, n):
        """Take n steps, without waiting for the device between them. Returns: Turn."""
        start = now(self.ddp)
        self.loading = 0.0
        rows = 0
        pairs = 0
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

    def next_pairs(self, kind):
        """(epoch, indices) of the next step."""
        step = self.taken[kind]
        self.taken[kind] += 1
        if kind == "ours":
            return self.plan.item_of(step, 0)[2:]
        n = len(self.pairs)
        first = step * self.batch_size
        return 0, [self.shuffled[k % n] for k in range(first, first + self.batch_size)]

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
        batch = make_batch(self.pairs, indices, self.config.loss, 0, epoch)
        self.loading += self.clock() - start
        batch = {**batch, "seed": 0, "count": len(indices)}
        totals, norm = global_gradient(model, [batch], self.loss_of, self.ddp)
        return totals.sums[0] / totals.count, norm

    def loss_of(self, model, batch):
        return dpo.micro_batch_loss(model, batch, self.reference, self.config, self.ddp,
                                    self.dtype)

    def differences(self):
        """Differences between plain and ours on the same pairs, both decoded from N to C: (absolute
        of the loss, relative of the gradient's norm)."""
        order = self.config.loss.order
        table = self.reference.table
        self.config.loss.order = "arange"
        self.reference.table = None
        indices = self.shuffled[:self.batch_size]
        plain, plain_norm = self.gradient("plain", 0, indices)
        ours, our_norm = self.gradient("ours", 0, indices)
        self.config.loss.order = order
        self.reference.table = table
        return abs(float(plain) - float(ours)), abs(float(plain_norm) / float(our_norm) - 1)


# ---- the plain step ----

def plain_log_probs(model, X, S, mask, residue_idx, chain_id, order):  # noqa: PLR0913
    """ProteinMPNN's forward pass, written as in its paper and the published code.

    Not optimised: all L x L distances, concatenated inputs, the order as one-hot matrices.
    Args, as of ProteinMPNN: X (B, L, 4, 3) in Angstrom; S, residue_idx, chain_id, order (B, L)
        int64; mask (B, L). The weights are those of `model`.
    Returns: log-probabilities (B, L, 21).
    """
    h_V, h_E, E_idx = plain_encode(model, X, mask, residue_idx, chain_id)
    visible = plain_visible(order, E_idx)
    h_S = model.W_s(S)
    known = mask[..., None, None]
    rest = [h_E, torch.zeros_like(h_E), plain_gather(h_V, E_idx)]
    blind = torch.cat(rest, -1) * (1 - visible) * known
    for layer in model.decoder_layers:
        rest = [h_E, plain_gather(h_S, E_idx), plain_gather(h_V, E_idx)]
        seen = torch.cat(rest, -1) * visible * known
        message = plain_message(plain_centre(h_V, seen + blind), layer.W1, layer.W2, layer.W3)
        h_V = plain_update(layer, h_V, message, mask)
    return torch.log_softmax(plain_linear(model.W_out, h_V), -1)


def plain_encode(model, X, mask, residue_idx, chain_id):
    """Features and encoder of plain_log_probs: h_V (B, L, H), h_E (B, L, K, H), E_idx (B, L, K)."""
    B, L = mask.shape
    N, CA, C, O = X.unbind(2)
    b = CA - N
    c = C - CA
    atoms = dict(N=N, CA=CA, C=C, O=O)
    atoms["CB"] = -0.58273431 * torch.linalg.cross(b, c) + 0.56802827 * b - 0.54067466 * c + CA

    def distances(p, q):
        difference = atoms[p][:, :, None] - atoms[q][:, None]
        return (difference.square().sum(-1) + 1e-6).sqrt()                  # (B, L, L)

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
    positional = plain_linear(f.embeddings.linear, F.one_hot(kind, 66).float())
    features = plain_linear(f.edge_embedding, torch.cat([positional, *rbf], -1))
    h_E = plain_linear(model.W_e, f.norm_edges(features))
    h_V = h_E.new_zeros(B, L, h_E.shape[-1])
    edge_mask = mask[..., None] * plain_gather(mask[..., None], E_idx)[..., 0]
    for layer in model.encoder_layers:
        x = plain_centre(h_V, torch.cat([h_E, plain_gather(h_V, E_idx)], -1))
        message = plain_message(x, layer.W1, layer.W2, layer.W3)
        h_V = plain_update(layer, h_V, message * edge_mask[..., None], mask)
        x = plain_centre(h_V, torch.cat([h_E, plain_gather(h_V, E_idx)], -1))
        h_E = layer.norm3(h_E + plain_message(x, layer.W11, layer.W12, layer.W13))
    return h_V, h_E, E_idx


def plain_visible(order, E_idx):
    """(B, L, K, 1) 1.0 where the neighbour comes before the residue in the order (B, L)."""
    L = order.shape[1]
    one_hot = F.one_hot(order, L).float()                                   # step, residue
    earlier = one_hot.new_ones(L, L).tril(-1)
    all_pairs = torch.einsum("ij,biq,bjp->bqp", earlier, one_hot, one_hot)
    return all_pairs.gather(2, E_idx)[..., None]


def plain_linear(layer, x):
    """A linear layer, not by training/fast_linear.py's faster products."""
    return F.linear(x, layer.weight, layer.bias)


def plain_gather(x, index):
    """(B, L, H), (B, L, K) -> (B, L, K, H)."""
    flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).view(*index.shape, x.shape[-1])


def plain_message(x, *layers):
    """Linear layers with GELU in between."""
    for layer in layers[:-1]:
        x = F.gelu(plain_linear(layer, x))
    return plain_linear(layers[-1], x)


def plain_centre(h_V, rest):
    """[h_V_i | rest_ij]: h_V (B, L, H), rest (B, L, K, n) -> (B, L, K, H + n)."""
    return torch.cat([h_V[:, :, None].expand(-1, -1, rest.shape[2], -1), rest], -1)


def plain_update(layer, h_V, m, mask):
    """h_V (B, L, H) after the messages m (B, L, K, H)."""
    h_V = layer.norm1(h_V + m.sum(2) / 30)
    dense = plain_message(h_V, layer.dense.W_in, layer.dense.W_out)
    return layer.norm2(h_V + dense) * mask[..., None]


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


# ---- made pairs ----

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


def made_pairs(path):
    """4 pairs of random sequences on all chains of a structure."""
    structure = read_structure(path)
    rng = np.random.default_rng(0)
    complex = Complex(structure, sorted(structure.chains))
    L = len(complex)
    pairs = []
    for _ in range(4):
        both = np.where(complex.mask, rng.integers(0, 20, (2, L)), complex.S).astype(np.uint8)
        pairs.append(Pair(complex, both[0], both[1], np.ones(L, bool)))
    return pairs


def main(argv):
    parser = CommandParser(prog="python -m bench dpo", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=Path, help="file of preference pairs, as for "
                        "train_dpo_ddp.py; default: random pairs of a made structure")
    parser.add_argument("--repeats", type=int, default=5)
    args = read_options(parser, argv)
    run_on_one_rank("dpo", bench_dpo, args, argv)
