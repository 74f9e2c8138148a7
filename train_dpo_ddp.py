"""Fine-tune ProteinMPNN by DPO (direct preference optimisation) on structures and preference pairs.

    python train_dpo_ddp.py --config configs/dpo_demo.yaml                             # needs no file
    mpirun -n 4 python train_dpo_ddp.py --train_data pairs.json --base_model_dir vanilla_model_weights
    torchrun --nproc_per_node=4 train_dpo_ddp.py --config configs/dpo.yaml --train_data pairs.json loss.name=ipo
    python train_dpo_ddp.py --config configs/dpo.yaml --plan 1,2,4,8                   # what scaling will do; no device

Reads pairs and their structures (structure_data.py), published weights, and perhaps a YAML config (every key below,
with its default). Writes into the run directory (--output_dir, default runs/CONFIG_NAME): best_model.pt and
latest_model.pt, which other ProteinMPNN tools read; metrics.jsonl, config.yaml, reference/KEY.pt (log-probabilities
under the base weights), checkpoints/last.pt (before it last-1.pt) to continue from, and at the end status.json. The
same command again continues. SIGTERM, SIGUSR1, Ctrl-C, the time DDP_DEADLINE and a file STOP in the run directory end
a run in good order: it saves, and leaves with exit code 75.

A run does not depend on the number of ranks: the unit of distribution is the micro-batch, and everything random is
keyed by (seed, purpose, pair, epoch), never drawn from a stream of a rank.
"""
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()

import copy
import functools
import hashlib
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F

from ddp_setup import (AGAIN, BAD_INPUT, STOP_SIGNALS, add_launch_arguments, all_sum, autocast, barrier, beat,
                       broadcast, check_alike, check_in_sync, choose_dtype, close_run, end_watch, grad_scaler,
                       gradient_sync, hand_over, limit_memory, load_checkpoint, machine_differences, optimize_with_ipex,
                       print0, read_flags, save_checkpoint, scale_for_batch, scale_name, seed_for, setup_ddp,
                       skip_where_bad, abort, stop_reason, stop_wanted, to_host, watch_run, worker_init, wrap_ddp)
from proteinmpnn_model import (ALPHABET, PUBLISHED, decoding_order, load_proteinmpnn, random_proteinmpnn,
                               to_checkpoint)
from run_config import Parser, config_differences, config_items, config_to_dict, dump_yaml, load_config
from run_log import (RunLog, check_resume, find_checkpoint, open_run, replace_status, write_status,
                     write_text_atomic)
from structure_data import (EpochPlan, Pair, collate, collate_complexes, demo_pairs, describe, eval_batches,
                            read_pairs, shared_structures, split_pairs)


# ------------------------------------------------------------------------------------------------------------ config
@dataclass
class Training:
    batch_size: int = 8                  # pairs per rank and micro-step, at most
    accum: int = 1                       # micro-steps per optimizer step
    num_workers: int = 0                 # processes that prepare batches, per rank
    num_epochs: int = 10
    n_iters: int | None = None           # optimizer steps, instead of num_epochs
    eval_freq: int | None = None         # steps between evaluations, beside those at the end of each epoch
    log_freq: int = 10                   # steps between rows of metrics.jsonl
    snapshot_freq: int | None = None     # steps between checkpoints, beside those at the end of each epoch
    keep_last: int = 2                   # of them are kept: last.pt, last-1.pt, ...
    max_bad_steps: int = 10              # steps in a row with a nan or infinite loss or gradient that end the run
    stop_signals: tuple[str, ...] = STOP_SIGNALS   # that end the run in good order
    patience: int | None = None          # evaluations without improvement before an early stop
    min_delta: float = 0.0               # nats per pair that count as an improvement
    seed: int = 0


@dataclass
class Optim:
    # Adam moves each weight by up to lr per step. ProteinMPNN's are about 0.1 in size, so 1,000 steps at 3e-6 (the
    # single-process default of the published DPO scripts) change them by at most 3 %, which keeps the policy near its
    # reference; 1e-4 does so in 30 steps. Their 3e-7 for many ranks needs ten times the steps.
    lr: float = 3e-6                     # at base_global_batch; scaled by `scale`
    warmup: int = 20                     # steps, linear; scaled likewise
    scale: Literal["none", "linear", "sqrt"] | dict[str, float] = "none"   # or {cap: 4}
    base_global_batch: int | None = None  # pairs per step that lr was chosen for
    grad_clip: float = 10.0              # global norm; 0 = none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class Random:
    hidden_size: int = 128
    n_encoder: int = 3
    n_decoder: int = 3
    num_edges: int = 48


@dataclass
class Model:
    base_model_name: str = "v_48_020"    # file BASE_MODEL_DIR/NAME.pt; "random": seeded, for demonstrations and tests
    base_model_dir: str = "vanilla_model_weights"
    dropout: float = 0.0                 # above 0, chosen and rejected differ by chance: noise that exceeds the signal
    random: Random = field(default_factory=Random)   # sizes of random weights; files bring their own


@dataclass
class Loss:
    # See preference_loss. ipo: with sums over residues, as published; ipo_norm: with means.
    name: Literal["sigmoid", "hinge", "ipo", "ipo_norm", "robust", "conservative", "sigmoid_norm", "reference_free",
                  "simpo"] = "sigmoid"
    beta: float = 0.1                    # higher = closer to the reference; about 2 for simpo, 10 for sigmoid_norm
    label_smoothing: float = 0.1         # robust, conservative: share of pairs taken to be the wrong way round
    gamma: float = 0.5                   # simpo: margin, in nats
    sft: float = 0.0                     # x mean negative log-probability of the chosen, per residue
    diversity_lambda: float = 0.0        # x mean entropy of the policy, per residue, is taken off the loss
    temperature: float = 1.0             # log_softmax(logits / temperature); 0.1 acts like up to 10 x beta
    order: Literal["random", "fixed", "arange"] = "random"   # anew in each epoch; per pair for good; from N to C
    n_orders: int = 1                    # orders per pair, over which log-probabilities are averaged
    share_order: bool = False            # one order for all pairs of a design problem: sequences that recur count once


@dataclass
class Data:
    train_data: str | None = None        # JSON of pairs; none: demo pairs, for random weights
    val_data: str | None = None          # none: val_fraction is split off, by structure
    val_fraction: float = 0.1            # of the structures; 0 = no validation
    max_length: int | None = None        # longer designs are refused, never cut
    mutable_positions: str | None = None  # for pairs that give none: "A12 A15" (chain, number in the file), or "11 14"
    mutable_ranges: str | None = None    # (0-based in the sequence); "A10-A20" or "9-19", both ends included
    reference_cache: str | None = None   # folder; none: reference/ in the run directory
    demo_structures: int = 48
    demo_pairs: int = 8                  # per structure


@dataclass
class Memory:
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = False   # of the policy in training alone
    max_memory_per_gpu: float | None = None  # share of the device's memory this process may take
    structure_cache_mb: int = 2048       # for what does not change of each structure, on the device


@dataclass
class DdpSection:
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    broadcast_buffers: bool = False      # the model has none
    bucket_cap_mb: int | None = None


@dataclass
class Monitoring:
    watchdog_minutes: float = 30.0       # without progress, after which the run is ended; 0 = never
    check_sync_every: int = 1000         # steps between comparisons of the weights over ranks; 0 = never
    fall: float = 0.02                   # nats per residue; a larger fall of chosen log-probabilities is warned about


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    optim: Optim = field(default_factory=Optim)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    data: Data = field(default_factory=Data)
    memory: Memory = field(default_factory=Memory)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: Monitoring = field(default_factory=Monitoring)


# A resumed run may differ in these and in the number of ranks (accum follows); in nothing else.
MAY_CHANGE = ("training.n_iters", "training.num_epochs", "training.eval_freq", "training.log_freq",
              "training.snapshot_freq", "training.keep_last", "training.max_bad_steps", "training.stop_signals",
              "training.num_workers", "memory.structure_cache_mb", "monitoring.watchdog_minutes",
              "monitoring.check_sync_every", "monitoring.fall", "data.reference_cache", "data.train_data",
              "data.val_data", "model.base_model_name", "model.base_model_dir")   # the content of files is compared
PER_HOST = ("data.train_data", "data.val_data", "data.reference_cache", "model.base_model_name", "model.base_model_dir",
            "training.num_workers", "memory.structure_cache_mb", "memory.max_memory_per_gpu")   # need not be equal
KEPT = ("model", "optimizer", "scaler", "step", "best", "bad_steps", "sums", "config", "micro_batches", "lr", "warmup",
        "data", "base")   # what a checkpoint must hold
WITHOUT_REFERENCE = ("reference_free", "simpo")


def check_config(c):
    """Refuse values that no type forbids. Raises ValueError naming the key."""
    t, o, m, d = c.training, c.optim, c.memory, c.data
    for key in ("train_data", "val_data", "mutable_positions", "mutable_ranges", "reference_cache"):
        if getattr(d, key) is not None and not getattr(d, key).strip():
            raise ValueError(f"config: data.{key} is empty; expected a value. To do without, leave it out.")
    for ok, text in (
            (m.max_memory_per_gpu is None or 0 < m.max_memory_per_gpu <= 1,
             f"memory.max_memory_per_gpu is {m.max_memory_per_gpu}; expected a share of the memory, above 0 up to 1"),
            (o.scale == "none" or o.base_global_batch,
             f"optim.scale is {o.scale} without optim.base_global_batch; give the global batch that lr was chosen for"),
            (not isinstance(o.scale, dict) or (list(o.scale) == ["cap"] and o.scale["cap"] >= 1),
             f"optim.scale is {o.scale}; expected none, linear, sqrt or {{cap: N}} with N of at least 1"),
            (0 <= c.model.dropout < 1, f"model.dropout is {c.model.dropout}; expected 0 up to below 1"),
            (0 <= d.val_fraction < 1, f"data.val_fraction is {d.val_fraction}; expected 0 up to below 1"),
            (1e-6 <= c.loss.beta <= 1e6, f"loss.beta is {c.loss.beta}; expected 1e-6 to 1e6"),
            (1e-3 <= c.loss.temperature <= 1e3, f"loss.temperature is {c.loss.temperature}; expected 0.001 to 1,000"),
            (all(0 <= b < 1 for b in o.betas), f"optim.betas is {list(o.betas)}; expected 0 up to below 1"),
            (0 <= c.loss.label_smoothing < 0.5,
             f"loss.label_smoothing is {c.loss.label_smoothing}; expected 0 up to below 0.5"),
            (c.loss.order != "arange" or c.loss.n_orders == 1,
             f"loss.n_orders is {c.loss.n_orders} with loss.order arange, which is a single order; expected 1"),
            (c.model.base_model_name == "random" or c.model.random == Random(),
             "model.random gives sizes, but model.base_model_name is a file, which brings its own; expected random"),
            (d.train_data is not None or c.model.base_model_name == "random",
             "data.train_data is not given; expected a file of preference pairs (--train_data). Demo pairs are made "
             "for random weights only (configs/dpo_demo.yaml)"),
            (d.train_data is not None or not (d.val_data or d.mutable_positions or d.mutable_ranges),
             "data.val_data, mutable_positions and mutable_ranges are for pairs of a file, but data.train_data is not "
             "given; expected --train_data"),
            (d.mutable_positions is None or d.mutable_ranges is None,
             "data.mutable_positions and data.mutable_ranges are given together; expected one of them"),
            (set(t.stop_signals) <= {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"},
             f"training.stop_signals is {list(t.stop_signals)}; expected names such as SIGTERM, of signals that a "
             f"program may handle")):
        if not ok:
            raise ValueError(f"config: {text}.")
    at_least = {"training": dict(batch_size=1, accum=1, num_workers=0, n_iters=1, num_epochs=1, eval_freq=1, log_freq=1,
                                 snapshot_freq=1, patience=1, min_delta=0, keep_last=1, max_bad_steps=0),
                "optim": dict(lr=0, warmup=0, base_global_batch=1, grad_clip=0, eps=0, weight_decay=0),
                "loss": dict(gamma=0, sft=0, diversity_lambda=0, n_orders=1),
                "data": dict(max_length=1, demo_structures=1, demo_pairs=1), "ddp": dict(bucket_cap_mb=1),
                "memory": dict(structure_cache_mb=0),
                "monitoring": dict(watchdog_minutes=0, check_sync_every=0, fall=0)}
    for section, keys in at_least.items():
        for key, low in keys.items():
            value = getattr(getattr(c, section), key)
            if value is not None and value < low:
                raise ValueError(f"config: {section}.{key} is {value}; expected at least {low}.")
    for key, value in vars(c.model.random).items():
        if value < 1:
            raise ValueError(f"config: model.random.{key} is {value}; expected at least 1.")


# -------------------------------------------------------------------------------------------------------------- loss
def preference_loss(chosen, rejected, ref_chosen, ref_rejected, n, loss):
    """Loss of each pair, (P,), in nats.

    chosen, rejected, ref_chosen, ref_rejected: (P,) log-probabilities under policy and reference, summed over the
    scored residues, whose number is n (P,). loss: a section Loss.
    Sources: sigmoid, Rafailov et al. 2023, arXiv 2305.18290; ipo, Azar et al. 2023, arXiv 2310.12036; hinge, Zhao et
    al. 2023, arXiv 2305.10425; robust, Chowdhury et al. 2024, arXiv 2403.00409; simpo, Meng et al. 2024, arXiv
    2405.14734.
    """
    beta, flipped = loss.beta, loss.label_smoothing
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    right, wrong = -F.logsigmoid(beta * h), -F.logsigmoid(-beta * h)
    return {"sigmoid": lambda: right,
            "hinge": lambda: torch.relu(1 - beta * h),
            "ipo": lambda: (h - 1 / (2 * beta)).square(),
            "ipo_norm": lambda: (h / n - 1 / (2 * beta)).square(),
            "robust": lambda: ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped),
            "conservative": lambda: (1 - flipped) * right + flipped * wrong,
            "sigmoid_norm": lambda: -F.logsigmoid(beta * h / n),
            "reference_free": lambda: -F.logsigmoid(beta * (chosen - rejected)),
            "simpo": lambda: -F.logsigmoid(beta * (chosen - rejected) / n - loss.gamma)}[loss.name]()


def pair_scores(log_probs, batch, temperature):
    """Log-probabilities of M sequences (M, L, 21) -> (P, 2), those of chosen and rejected, summed over the scored
    residues; and (P,), the mean entropy of a scored residue given the chosen sequence. Both are means over the orders.
    """
    if temperature != 1:
        log_probs = torch.log_softmax(log_probs / temperature, dim=-1)
    token = log_probs.gather(-1, batch["S"][..., None])[..., 0]                          # (M, L)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    weight, index = batch["weight"][:, None], batch["index"]                             # (P, 1, L), (P, O, 2)
    sums = (token[index] * weight[:, None]).sum(-1).mean(1)
    return sums, (entropy[index[..., 0]] * weight).sum(-1).mean(1) / batch["n"]


# Sums over pairs, of which metrics are made. rewards: beta x log-ratio to the reference (to 1 without a reference).
SUMS = ("loss", "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen",
        "logps/rejected", "entropy", "residues")


def objective(log_probs, batch, reference, loss):
    """What is minimised, for each pair (P,), and the detached columns of SUMS (P, 9).

    reference: (P, 2), summed log-probabilities of chosen and rejected under the reference."""
    scores, entropy = pair_scores(log_probs, batch, loss.temperature)
    (chosen, rejected), n = scores.unbind(1), batch["n"]
    total = preference = preference_loss(chosen, rejected, *reference.unbind(1), n, loss)
    if loss.sft:
        total = total - loss.sft * chosen / n
    if loss.diversity_lambda:
        total = total - loss.diversity_lambda * entropy
    rewards = loss.beta * (scores - reference)
    columns = (total, preference, *rewards.unbind(1), rewards[:, 0] > rewards[:, 1], chosen, rejected, entropy, n)
    return total, torch.stack([column.detach().double() for column in columns], 1)


def metrics_of(sums, pairs, prefix=""):
    """Means over pairs, by name."""
    values = dict(zip((prefix + name for name in SUMS), (float(x) / (float(pairs) or math.nan) for x in sums)))
    values.pop(f"{prefix}residues")
    values[f"{prefix}rewards/margins"] = values[f"{prefix}rewards/chosen"] - values[f"{prefix}rewards/rejected"]
    return values


def micro_batch_loss(model, batch, reference, config, ddp, dtype):
    """Loss of one micro-batch: (sum over pairs in nats, the sums of SUMS, pairs). The mean over the global batch is
    taken by the caller, over all its micro-batches."""
    ref = reference.scores(batch)   # outside autocast: in float32
    with autocast(dtype, ddp):
        log_probs = model(batch["graph"], batch["S"], batch["order"], batch["structure"])
    loss, columns = objective(log_probs, batch, ref, config.loss)
    return loss.sum(), columns.sum(0), len(loss)


def accumulate(model, batches, reference, config, ddp, dtype, nominal, scaler=None):
    """Gradient of the mean loss over the pairs of the global batch, left in .grad on every rank (before clipping).

    batches: list of this rank's micro-batches. Ranks have different numbers of pairs: backward runs on sum / nominal,
    then comes one small all-reduce, then the gradients are multiplied by ranks x nominal / count (DDP has divided by
    the ranks). Returns (totals, norm). totals: float64 on the device, over all ranks: [*SUMS, pairs, ranks with a loss
    or gradient that is not finite, ranks with such a loss, ranks asked to stop]. norm: of the gradient. If totals[-3]
    is not 0, all gradients are nan. Nothing here waits for the device.
    """
    totals = torch.zeros(len(SUMS) + 4, dtype=torch.float64, device=ddp.device)
    for k, batch in enumerate(batches):
        if config.model.dropout:
            torch.manual_seed(batch["seed"])   # dropout too is keyed by the micro-batch
        batch = reference.to_device(batch)
        with gradient_sync(model, last=k == len(batches) - 1):
            loss, sums, pairs = micro_batch_loss(model, batch, reference, config, ddp, dtype)
            scaled = loss / nominal
            (scaler.scale(scaled) if scaler is not None else scaled).backward()
        totals[:len(SUMS)] += sums
        totals[-4] += pairs
        totals[-2] += ~loss.detach().isfinite()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    bad_loss = totals[-2] > 0
    totals[-3], totals[-2], totals[-1] = bad_loss | ~norm.isfinite(), bad_loss, stop_wanted(ddp)
    totals = all_sum(totals, ddp)
    factor = ddp.world_size * nominal / totals[-4]
    factor = torch.where(totals[-3] > 0, math.nan, factor).to(gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)
    return totals, norm * factor


# -------------------------------------------------------------------------------------------------------------- data
def orders_of(pair, loss, seed, epoch=None):
    """(n_orders, L) decoding orders of a pair, fixed residues first: the same for its four scores.

    Keyed by (seed, pair, epoch); without an epoch, or with order fixed, by (seed, pair)."""
    designed = torch.zeros(1, len(pair.complex))
    designed[0, :len(pair.chain_M)] = torch.from_numpy(pair.chain_M & pair.complex.mask[:len(pair.chain_M)])
    if loss.order == "arange":
        return decoding_order(designed, torch.arange(designed.shape[1], dtype=torch.float64)[None])
    key = (pair.complex.key, pair.chain_M.tobytes()) if loss.share_order else pair.key
    key = seed_for(seed, "order", key, epoch if loss.order == "random" else None)
    generator = torch.Generator().manual_seed(key)
    draw = torch.rand(loss.n_orders, designed.shape[1], dtype=torch.float64, generator=generator)
    return decoding_order(designed.expand_as(draw), draw)


def make_batch(pairs, indices, loss, seed, epoch=None):
    """P pairs on U complexes of at most L rows -> M distinct sequences, each under an order, and who they belong to.

    S, order (M, L) int64; structure (M,) int64, row of the complex, counted as they first come; index (P, O, 2) int64,
    row in S of the chosen and the rejected sequence of a pair under each of its orders; weight (P, L) float32, 1 =
    scored, n (P,) their number; indices (P,) int64."""
    batch, rows, index = collate(pairs, indices), {}, []
    L = batch["S"].shape[1]
    for p, i in enumerate(indices):
        for order in orders_of(pairs[i], loss, seed, epoch):
            order = torch.cat([order, torch.arange(len(order), L)])                      # padding last
            for name in ("chosen", "rejected"):
                row = (int(batch["complex"][p]), batch[name][p], order)
                index.append(rows.setdefault((row[0], row[1].numpy().tobytes(), order.numpy().tobytes()),
                                             (len(rows), row))[0])
    structure, S, order = zip(*(row for _, row in rows.values()))
    weight = batch["chain_M"] * batch["mask"][batch["complex"]]
    return {"S": torch.stack(S), "order": torch.stack(order), "structure": torch.tensor(structure),
            "index": torch.tensor(index).view(len(indices), -1, 2), "weight": weight, "n": weight.sum(1),
            "indices": torch.as_tensor(indices)}


class MicroBatches(torch.utils.data.Dataset):
    """(step, micro, epoch, pair indices) -> tensors of one micro-batch, see make_batch. Orders are drawn on the CPU:
    the same on every device and with any number of workers."""

    def __init__(self, pairs, loss, seed):
        self.pairs, self.loss, self.seed = pairs, loss, seed

    def __getitem__(self, item):
        step, micro, epoch, indices = item
        return {**make_batch(self.pairs, indices, self.loss, self.seed, epoch),
                "seed": seed_for(self.seed, "dropout", step, micro)}


class Schedule(torch.utils.data.Sampler):
    """What this rank computes, from `first` step to `last`: items for MicroBatches. Any step is reached directly."""

    def __init__(self, pairs, config, micro_batches, ddp, first=0, last=0):
        self.pairs, self.config, self.micro_batches, self.ddp = pairs, config, micro_batches, ddp
        self.first, self.last = first, last
        self.plan, self.planned = self.plan_of(0), 0
        self.steps_per_epoch = self.plan.n_steps
        self.accum = micro_batches // ddp.world_size

    def plan_of(self, epoch):
        t = self.config.training
        return EpochPlan(self.pairs, t.seed, epoch, self.micro_batches, t.batch_size)

    def global_batch(self, step):
        """All items of a step: (step, micro, epoch, pair indices) per micro-batch."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self.planned != epoch:
            self.plan, self.planned = self.plan_of(epoch), epoch
        return [(step, k, epoch, indices.tolist()) for k, indices in enumerate(self.plan.global_batch(at))]

    def __iter__(self):
        mine = slice(self.ddp.rank * self.accum, (self.ddp.rank + 1) * self.accum)
        for step in range(self.first, self.last):
            yield from self.global_batch(step)[mine]

    def __len__(self):
        return (self.last - self.first) * self.accum


def stack(parts):
    """Graphs, or encodings, of one structure each -> one of all, padded with what is masked in both."""
    if len(parts) == 1:
        return parts[0]
    size, out = [max(part.E_idx.shape[d] for part in parts) for d in (1, 2)], []
    for name in parts[0]._fields:
        values = [getattr(part, name) for part in parts]
        d = 1 if name in ("mask", "h_V") else 2                                          # (L, ...) or (L, K, ...)
        whole = values[0].new_zeros(len(parts), *size[:d], *values[0].shape[1 + d:])
        for row, value in zip(whole, values):
            row[tuple(map(slice, value.shape[1:1 + d]))] = value[0]
        out.append(whole)
    return type(parts[0])(*out)


def size_of(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


class Reference:
    """What does not change in training, on the device: the base weights, what the network sees of each complex, and its
    encoding under the base weights. The last two are made once per complex and kept while there is room."""

    def __init__(self, model, pairs, config, ddp):
        self.model, self.pairs, self.config, self.ddp = model.eval().requires_grad_(False), pairs, config, ddp
        self.needed = config.loss.name not in WITHOUT_REFERENCE
        self.room, self.kept, self.table = config.memory.structure_cache_mb * 2**20, {}, None

    def keep(self, kind, complex, make):
        found = self.kept.pop((kind, complex.key), None)
        if found is None:
            found = make()
            self.room -= size_of(found)
        self.kept[kind, complex.key] = found                                             # the last used stands last
        while self.room < 0 and len(self.kept) > 1:
            self.room += size_of(self.kept.pop(next(iter(self.kept))))
        return found

    def graph(self, complex):
        def make():
            c = collate_complexes([complex])
            graph = self.model.graph(c["X"], c["mask"], c["residue_idx"], c["chain_id"])
            return type(graph)(*(x.to(self.ddp.device) for x in graph))
        return self.keep("graph", complex, make)

    def to_device(self, batch, pairs=None):
        """The batch of make_batch on the device, with the graph of its complexes, and these. pairs: that it is of."""
        move = {k: v.to(self.ddp.device, non_blocking=True) if isinstance(v, torch.Tensor) else v
                for k, v in batch.items()}
        some = [(self.pairs if pairs is None else pairs)[i] for i in batch["indices"].tolist()]
        complexes = list({pair.complex.key: pair.complex for pair in some}.values())
        return {**move, "complexes": complexes, "graph": stack([self.graph(c) for c in complexes])}

    @torch.no_grad()
    def log_probs(self, batch):
        """(M, L, 21) under the base weights, in float32 whatever the policy computes in."""
        encoding = stack([self.keep("encoding", complex, lambda: self.model.encode(self.graph(complex)))
                          for complex in batch["complexes"]])
        return self.model.decode(encoding, batch["S"], batch["order"], batch["structure"])

    def scores(self, batch):
        """(P, 2) summed log-probabilities of chosen and rejected; 0 where the loss has no reference."""
        if not self.needed:
            return torch.zeros_like(batch["weight"][:, :2])
        if self.table is not None:
            return self.table[batch["indices"]]
        return pair_scores(self.log_probs(batch), batch, self.config.loss.temperature)[0]

    def precompute(self, pairs, weights_hash, folder):
        """(table, told): scores of all pairs under orders that stay, (n, 2) float32, from `folder` or put there.

        The file's name is a hash of all that enters them. Each pair is computed on one rank, in the same batch always.
        """
        t, loss, ddp = self.config.training, self.config.loss, self.ddp
        order = "arange" if loss.order == "arange" else ("fixed", t.seed, loss.n_orders, loss.share_order)
        key = hashlib.blake2b(repr((2, weights_hash, order, loss.temperature, t.batch_size, self.model.num_edges,
                                    ddp.device.type, torch.__version__,   # other sums: step 0 would not be log 2
                                    [pair.key for pair in pairs])).encode(), digest_size=12).hexdigest()
        path, table, trouble = Path(folder) / f"{key}.pt", torch.zeros(len(pairs), 2), ""
        if ddp.is_main and path.exists():
            try:
                found = load_checkpoint(str(path))["scores"]
                if not torch.is_tensor(found) or found.dtype != table.dtype or found.shape != table.shape or (
                        not found.isfinite().all()):
                    raise ValueError(f"scores are not {tuple(table.shape)} finite {table.dtype}")
                table = found
            except (ValueError, KeyError, TypeError) as e:
                trouble = f"; {path} could not be used ({str(e).splitlines()[0]})"
        if broadcast(ddp.is_main and path.exists() and not trouble, ddp):
            return broadcast(table, ddp).to(ddp.device), f"read from {path}"
        table = torch.zeros(len(pairs), 2, dtype=torch.float64)
        for indices in eval_batches(pairs, t.batch_size)[ddp.rank::ddp.world_size]:
            batch = self.to_device(make_batch(pairs, indices.tolist(), loss, t.seed), pairs)
            with torch.no_grad():   # as in Validation, so that equal weights have equal scores to the last bit
                log_probs = self.model(batch["graph"], batch["S"], batch["order"], batch["structure"])
            table[indices] = pair_scores(log_probs, batch, loss.temperature)[0].double().cpu()
            beat(ddp)
        table = all_sum(table, ddp).float()
        save_checkpoint(str(path), ddp, resumes=False, scores=table)
        return table.to(ddp.device), f"computed, kept in {path}{trouble}"


def try_all(*functions):
    """What the functions return. Raises one ValueError with all that is wrong with their input."""
    found, problems = [], []
    for function in functions:
        try:
            found.append(function())
        except (ValueError, OSError) as e:
            problems.append(str(e))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def load_pairs(config, alive):
    """(training pairs, validation pairs or None, lines that describe them, warnings). alive: see read_pairs."""
    d, seed, structures, told, warnings = config.data, config.training.seed, {}, [], []
    positions = d.mutable_positions or d.mutable_ranges
    read = lambda path: path and read_pairs(path, structures, positions, d.max_length, told, alive)
    pairs, val = try_all(lambda: read(d.train_data), lambda: read(d.val_data))
    if d.train_data is None:
        pairs = demo_pairs(seed, d.demo_structures, d.demo_pairs)
    lines = [f"{d.train_data or 'demo (no --train_data)'}: {describe(pairs)}"]
    if positions:
        lines.append(f"mutable where a pair gives none: {told[0] if told else 'not needed, each pair gives its own'}")
    if d.val_data is not None:
        train = pairs
        lines.append(f"{d.val_data}, for validation: {describe(val)}")
        shared = shared_structures(train, val)
        if shared:
            warnings.append(f"{len(shared)} structures are in training and validation, first {shared[0]}: validation "
                            f"does not tell about new structures.")
    elif d.val_fraction:
        train, val, warning = split_pairs(pairs, d.val_fraction, seed)
        warnings += [warning] if warning else []
        n = len({pair.complex.structure.key for pair in val})
        lines.append(f"{len(train):,} pairs for training, {len(val):,} on {n:,} structure(s) for validation")
    else:
        train, val = pairs, None
    return train, val, lines, warnings


def load_base(config):
    """(model with the weights to start from, on the CPU, what they are). Raises ValueError."""
    m = config.model
    if m.base_model_name == "random":
        r = m.random
        model = random_proteinmpnn(config.training.seed, num_edges=r.num_edges, hidden_size=r.hidden_size,
                                   n_encoder=r.n_encoder, n_decoder=r.n_decoder, dropout=m.dropout)
        return model, f"RANDOM weights from seed {config.training.seed}: for demonstrations and tests only"
    path = Path(m.base_model_dir) / f"{m.base_model_name.removesuffix('.pt')}.pt"
    if not path.is_file():
        raise ValueError(f"base weights: there is no file {path} (of --base_model_dir and --base_model_name). "
                         f"{PUBLISHED} Fetch that folder and name it: --base_model_dir FOLDER --base_model_name "
                         f"v_48_020. --base_model_name random trains from random weights, for demonstrations and tests "
                         f"only.")
    model = load_proteinmpnn(str(path), m.dropout)
    return model, f"{path}, trained with {model.noise_level:g} Angstrom of noise"


def check_cache(config, ddp):
    """Refuse a data.reference_cache that rank 0 could not write."""
    folder = Path(config.data.reference_cache or ".").absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if config.data.reference_cache and ddp.is_main and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(f"data.reference_cache {config.data.reference_cache} cannot be used: {there} "
                         f"{'may not be written' if there.is_dir() else 'is a file'}. Expected a folder that can be "
                         f"written, or made.")


def hash_of(weights):
    """Of a state_dict: text."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------- evaluation
class Validation:
    """Loss and rewards of every validation pair, under orders that stay, in float32, with the same weights and for any
    number of ranks the same: each pair is computed once, on one rank, and means are taken over the gathered values.

    Beside it, on the native sequence of every design problem (complex and designed positions) among the pairs, means
    over scored residues: recovery, the share of native letters that are the policy's first choice given the letters
    decoded before, and the KL divergence of the policy's choice from the reference's, in nats.
    """

    def __init__(self, pairs, reference, config):
        self.pairs, self.reference, self.config, self.table = pairs, reference, config, None
        self.natives, size, unknown = {}, config.training.batch_size, ALPHABET.index("X")
        for pair in pairs:
            native = pair.complex.S[:len(pair.chain_M)]
            asked = pair.chain_M & (native != unknown)
            if (asked & pair.complex.mask[:len(asked)]).any():
                self.natives.setdefault((pair.complex.key, asked.tobytes()),
                                        Pair(pair.complex, native, native, asked))
        self.natives = list(self.natives.values())
        self.batches, self.native_batches = eval_batches(pairs, size), eval_batches(self.natives, size)

    @torch.no_grad()
    def __call__(self, model, ddp):
        """Metrics by name. model: the bare one; put into eval mode and back."""
        reference, loss, seed = self.reference, self.config.loss, self.config.training.seed
        values = torch.zeros(len(self.pairs), len(SUMS), dtype=torch.float64)
        natives = torch.zeros(len(self.natives), 3, dtype=torch.float64)    # recovered, KL, residues
        was_training, _ = model.training, model.eval()
        for indices in self.batches[ddp.rank::ddp.world_size]:
            batch = reference.to_device(make_batch(self.pairs, indices.tolist(), loss, seed), self.pairs)
            log_probs = model(batch["graph"], batch["S"], batch["order"], batch["structure"])
            ref = self.table[batch["indices"]] if reference.needed else torch.zeros_like(batch["weight"][:, :2])
            values[indices] = objective(log_probs, batch, ref, loss)[1].cpu()
            beat(ddp)
        for indices in self.native_batches[ddp.rank::ddp.world_size]:
            batch = reference.to_device(make_batch(self.natives, indices.tolist(), loss, seed), self.natives)
            log_probs = model(batch["graph"], batch["S"], batch["order"], batch["structure"])
            right = (log_probs.argmax(-1) == batch["S"]).float()
            kl = (log_probs.exp() * (log_probs - reference.log_probs(batch))).sum(-1)
            for k, each in enumerate((right, kl)):
                natives[indices, k] = (each[batch["index"][..., 0]].mean(1) * batch["weight"]).sum(-1).double().cpu()
            natives[indices, 2] = batch["n"].double().cpu()
            beat(ddp)
        model.train(was_training)
        sums, natives = all_sum(values, ddp).sum(0), all_sum(natives, ddp).sum(0)
        return {**metrics_of(sums, len(self.pairs), "val/"),
                "val/logps/chosen_per_residue": float(sums[SUMS.index("logps/chosen")] / sums[SUMS.index("residues")]),
                "val/recovery": float(natives[0] / natives[2].clamp(min=1)),
                "val/kl": max(float(natives[1] / natives[2].clamp(min=1)), 0.0)}   # of equal models: rounding


# -------------------------------------------------------------------------------------------------------------- main
def describe_plan(config, ranks):
    """Table of what each number of ranks (text such as "1,2,4,8") would do: no device is touched."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", ranks):
        raise ValueError(f"--plan {ranks}; expected numbers of ranks, such as 1,2,4,8")
    t, o = config.training, config.optim
    rows = [f"optim.scale {scale_name(o.scale)}: from lr {o.lr:g} and warm-up {o.warmup:,}"
            + (f" at a global batch of {o.base_global_batch:,} pairs" if o.base_global_batch else ""),
            f"{'ranks':>6} {'effective batch (pairs)':>26} {'learning rate':>14} {'warm-up steps':>14}"]
    for n in map(int, ranks.split(",")):
        batch = n * t.accum * t.batch_size
        lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, batch, o.base_global_batch)
        rows.append(f"{n:>6} {batch:>26,} {lr:>14.4g} {warmup:>14,}")
    return "\n".join([*rows, "With fewer training pairs than a batch, their number counts."])


def prepare(config, ddp, work_dir, resume=None, fresh=False):
    """Everything before the first step: data, model, start or continue, the lock. Returns what `train` needs.

    Raises ValueError or OSError for input that cannot be used, and then has written nothing: the run directory is
    touched last, when every rank has come through all checks."""
    t, o, work_dir = config.training, config.optim, Path(work_dir)
    check_config(config)
    if fresh and resume:
        raise ValueError("--fresh and --resume exclude each other: start over, or continue.")
    check_alike(config_items(config, PER_HOST), ddp)   # of several hosts, each may have a copy of its own
    # Start or continue: rank 0 decides, all read the same checkpoint.
    differences = lambda before: config_differences(before, config_to_dict(config), ignore=MAY_CHANGE)
    unlike = lambda file: differences(config_to_dict(load_config(Config, file)))
    path = broadcast(find_checkpoint(work_dir, resume, fresh, unlike) if ddp.is_main else None, ddp)
    state = load_checkpoint(path, ddp) if path else None

    (pairs, val, described, warnings), (bare, base), _ = try_all(
        lambda: load_pairs(config, functools.partial(beat, ddp)), lambda: load_base(config),
        lambda: check_cache(config, ddp))
    keys = repr([[pair.key for pair in some] for some in (pairs, val or [])])   # the plan goes by their order
    fingerprint = {"n": len(pairs), "hash": hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()}
    try:
        dtype, dtype_why = choose_dtype(config.memory.mixed_precision, ddp.device)
    except RuntimeError as e:
        raise ValueError(f"config: {e}") from None
    memory_note = limit_memory(config.memory.max_memory_per_gpu, ddp)
    base_hash = hash_of(bare.state_dict())
    check_alike({"pairs (hash)": fingerprint["hash"], "base weights (hash)": base_hash}, ddp)
    bare = bare.to(ddp.device)
    reference = Reference(copy.deepcopy(bare), pairs, config, ddp)

    # A global batch is a number of micro-batches, fixed at the start of the run, whatever the ranks are later.
    micro_batches = t.accum * ddp.world_size
    if state is not None:
        micro_batches = check_resume(state, path, __file__, KEPT, differences, MAY_CHANGE, bare.state_dict(), "pairs",
                                     fingerprint, ddp.world_size)
        if state["base"] != base_hash:
            raise ValueError(f"{path} was trained from other base weights (hash {state['base']}; {base}: {base_hash}). "
                             f"Give the same, another --work_dir, or --fresh.")
    accum, batch = micro_batches // ddp.world_size, micro_batches * t.batch_size
    filled = min(batch, len(pairs))   # a small file does not fill the global batch
    lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, filled, o.base_global_batch)
    progress = {"step": 0, "best": None, "bad_evals": 0, "start": None, "fallen": False, "finished": "",
                "bad_steps": [0, 0]}   # with a loss or gradient that is not finite: in all, and in a row now
    sums = torch.zeros(len(SUMS) + 4, dtype=torch.float64, device=ddp.device)   # of the epoch so far
    if state is not None:
        path = ddp.state.checkpoint[0]   # perhaps the one before
        lr, warmup, progress = state["lr"], state["warmup"], {k: state[k] for k in progress}
        bare.load_state_dict(state["model"])
        sums += torch.tensor(state["sums"], dtype=torch.float64, device=ddp.device)
    schedule = Schedule(pairs, config, micro_batches, ddp, progress["step"])
    n_iters = t.n_iters or t.num_epochs * schedule.steps_per_epoch
    schedule.last = max(n_iters, progress["step"])
    validation = None if val is None else Validation(val, reference, config)

    optimizer = torch.optim.AdamW(bare.parameters(), lr=lr, betas=o.betas, eps=o.eps,
                                  weight_decay=o.weight_decay, fused=True)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp)
    model = wrap_ddp(bare, ddp, **vars(config.ddp))
    scaler = grad_scaler(dtype, ddp)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])

    n_parameters = sum(p.numel() for p in bare.parameters())
    c = config.loss
    terms = f" + {c.sft:g} SFT" * (c.sft > 0) + f" - {c.diversity_lambda:g} entropy" * (c.diversity_lambda > 0)
    lines = [f"model: ProteinMPNN, {n_parameters / 1e6:.2f} million parameters, {bare.num_edges} neighbours",
             f"  from {base}",
             f"  {str(dtype)[6:]} ({dtype_why}){memory_note}; the reference is scored in float32",
             f"data: {described[0]}", *(f"  {line}" for line in described[1:]), *(f"ATTENTION: {w}" for w in warnings),
             f"loss: {c.name}, beta {c.beta:g}, temperature {c.temperature:g}, {c.order} order x {c.n_orders}{terms}",
             f"batch: up to {t.batch_size:,} pairs x accum {accum} x {ddp.world_size} rank(s) = {batch:,} per step, "
             f"{schedule.steps_per_epoch:,} steps per epoch, {n_iters:,} steps in all"]
    if accum != t.accum:
        lines.append(f"  accum is {accum} and not {t.accum}: it follows the ranks, so that the global batch stays")
    lines.append(f"optim: lr {lr:g}, warm-up {warmup:,} steps, " + (
        "kept from the checkpoint" if state is not None else "as given (scale none)" if o.scale == "none" else
        f"scaled from {o.lr:g} and {o.warmup:,} at {o.base_global_batch:,} pairs ({scale_name(o.scale)})"
        + f", to the {filled:,} pairs that there are" * (filled < batch)))
    if state is None and warmup >= n_iters:
        lines.append(f"ATTENTION: the warm-up ({warmup:,} steps) lasts to the end ({n_iters:,} steps): the learning "
                     f"rate reaches {100 * n_iters / warmup:.0f} % of its value; lower optim.warmup or train longer")
    lines.append(f"results: {work_dir}, "
                 + ("a new run" if not path else f"finished, {path}" if is_finished(progress, n_iters) else
                    f"continuing from step {progress['step']:,} of {path}"))
    elsewhere = machine_differences(state, ddp) if state is not None else ""
    if elsewhere:
        lines.append(f"  saved elsewhere ({elsewhere}): the run goes on, but not to the last bit as it would have")
    wrap = textwrap.TextWrapper(80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    print0(ddp, "\n".join(map(wrap.fill, lines)))
    lock = None
    if ddp.is_main and not is_finished(progress, n_iters):
        lock = open_run(work_dir, fresh, ("checkpoints", "reference"))
        write_text_atomic(work_dir / "config.yaml", dump_yaml(config))
    if not is_finished(progress, n_iters):
        barrier(ddp)   # the run directory is there, on all ranks
        if progress["best"] and not broadcast(ddp.is_main and bring_best(work_dir, path, progress["best"]), ddp):
            progress["best"] = None
            print0(ddp, "best_model.pt of the run so far is not at hand: the best is looked for from here on")
        watch_run(ddp, work_dir, config.monitoring.watchdog_minutes, t.stop_signals)
    return SimpleNamespace(
        config=config, work_dir=work_dir, path=path, lock=lock, pairs=pairs, fingerprint=fingerprint, base=base_hash,
        reference=reference, dtype=dtype, bare=bare, model=model, optimizer=optimizer, scaler=scaler, sums=sums,
        schedule=schedule, validation=validation, progress=progress, n_iters=n_iters, accum=accum,
        micro_batches=micro_batches, batch=batch, lr=lr, warmup=warmup)


def bring_best(work_dir, path, best):
    """Is best_model.pt in work_dir? If not, it is copied from the run of checkpoint `path`, if its step is right."""
    here, there = work_dir / "best_model.pt", Path(path).absolute().parent.parent / "best_model.pt"
    if here.exists():
        return True
    try:
        if not there.is_file() or load_checkpoint(str(there))["step"] != best["step"]:
            return False
    except (ValueError, KeyError, TypeError):   # no model of ours
        return False
    half = here.with_name(f".{here.name}.{os.getpid()}.tmp")
    with open(there, "rb") as source, open(half, "wb") as copied:
        shutil.copyfileobj(source, copied)
        copied.flush()
        os.fsync(copied.fileno())
    os.replace(half, here)
    return True


def is_finished(progress, n_iters):
    return progress["finished"] == "early stop" or progress["step"] >= n_iters


def train(run, ddp):
    """Train from where `prepare` left off. Returns a dict of the final metrics, the same on every rank."""
    config, progress, bare, schedule, validation = run.config, run.progress, run.bare, run.schedule, run.validation
    t, o, m, n_iters, work_dir = config.training, config.optim, config.monitoring, run.n_iters, run.work_dir
    if is_finished(progress, n_iters):
        early = progress["finished"] == "early stop"
        home = work_dir if (work_dir / "best_model.pt").exists() else Path(run.path).absolute().parent.parent
        more = f" Weights: {home / 'best_model.pt'}."
        more += "" if early else " To go on, raise training.num_epochs or n_iters."
        print0(ddp, f"This run is finished: {'early stop' if early else 'all steps done'} at step "
                    f"{progress['step']:,}.{more} To start over, --fresh.")
        if ddp.is_main:
            write_status(work_dir, 0, progress["finished"], progress["step"])
        return {"step": progress["step"]}
    progress["finished"] = ""
    log = RunLog(work_dir, ddp.is_main, total_steps=n_iters)
    log.truncate(progress["step"] if run.path else -1)
    before = "The checkpoints are of before. Lower optim.lr, or set memory.mixed_precision: false."

    def check_lock():
        """Another run may have taken the folder over: then nothing more is written there, status.json included."""
        if run.lock and run.lock.lost:
            end_watch(ddp)
            run.lock.check()

    def save(name, keep_last=1):
        """The model for other tools; last.pt: and all that is needed to continue."""
        check_lock()
        log.sync()   # the rows before a checkpoint are on the disk no later than it
        if progress["bad_steps"][1] and not all(bool(p.isfinite().all()) for p in bare.parameters()):
            raise RuntimeError(f"step {progress['step']}: weights are nan or infinite; expected finite numbers. "
                               f"{before}")
        epoch = progress["step"] // schedule.steps_per_epoch
        model = "best_model.pt" if name == "best" else "latest_model.pt"
        save_checkpoint(str(work_dir / model), ddp, resumes=False,
                        **to_checkpoint(bare, epoch=epoch, step=progress["step"]))
        if name != "best":
            save_checkpoint(str(work_dir / "checkpoints" / name), ddp, keep_last, model=bare.state_dict(),
                            optimizer=run.optimizer.state_dict(), scaler=run.scaler.state_dict(),
                            config=config_to_dict(config), epoch=epoch, micro_batches=run.micro_batches, lr=run.lr,
                            warmup=run.warmup, data=run.fingerprint, base=run.base, sums=run.sums.tolist(),
                            **progress)

    def settle(totals, arrived):
        """Read the flags of a step: a bad one has changed nothing. Returns how many ranks were asked to stop."""
        bad, wanted = read_flags(totals, arrived, progress["bad_steps"], run.scaler, t.max_bad_steps,
                                 f"step {progress['step']}", before)
        return wanted

    def evaluated(values, score):
        """Keep the best model; settle for all ranks whether to stop early. score: lower is better."""
        if not math.isfinite(score):
            raise RuntimeError(f"step {progress['step']}: the loss is {score}; expected a finite number. {before}")
        improved, progress["bad_evals"], stop = broadcast(judge(score, progress, t), ddp)
        if improved:
            progress["best"] = {"step": progress["step"], "score": score,
                                **{k: v for k, v in values.items() if k.startswith("val/")}}
            save("best")
        progress["finished"] = "early stop" if stop else ""

    def watch_chosen(now):
        """Warn, once, of chosen sequences that become less likely. now: their log-probability per residue."""
        if progress["start"] is None:
            progress["start"] = now
        if not progress["fallen"] and now < progress["start"] - m.fall:
            progress["fallen"] = True
            log.say(textwrap.fill(
                f"ATTENTION: chosen sequences have become less likely, by {progress['start'] - now:.3f} nats per "
                f"residue since the start. DPO may widen the margin so, rejected ones falling faster. If designs "
                f"suffer: set loss.sft (1, say), raise loss.beta, lower optim.lr, or stop earlier.", 80,
                subsequent_indent="    "))

    folder = config.data.reference_cache or work_dir / "reference"
    if config.loss.order != "random" and run.reference.needed:
        run.reference.table, told = run.reference.precompute(run.pairs, run.base, folder)
        print0(ddp, f"reference, training pairs: {told}")
    if validation is not None and run.reference.needed:
        validation.table, told = run.reference.precompute(validation.pairs, run.base, folder)
        print0(ddp, f"reference, validation pairs: {told}")
    # Without validation, training itself tells how far log-probabilities are from those under the base weights; where
    # it cannot, as these are not known or without dropout, how far from those of the first epoch.
    if validation is None and run.reference.needed and not config.model.dropout and progress["start"] is None:
        progress["start"] = 0.0
    values, epoch_began, began = {}, time.perf_counter(), time.perf_counter()
    if validation is not None and progress["start"] is None:   # what the base weights do
        values = validation(bare, ddp)
        log.metrics(0, values)
        log.say(f"step 0: validation {told_of(values)}, recovery {values['val/recovery']:.3f}")
        watch_chosen(values["val/logps/chosen_per_residue"])
        evaluated(values, values["val/loss"])

    dataset = MicroBatches(run.pairs, config.loss, t.seed)
    batches = iter(torch.utils.data.DataLoader(dataset, sampler=schedule, batch_size=None, num_workers=t.num_workers,
                                               pin_memory=ddp.device.type == "cuda", generator=torch.Generator(),
                                               worker_init_fn=functools.partial(worker_init, signals=t.stop_signals)))
    nominal = float(run.batch)   # a fixed guess of the count, so that backward runs on numbers near 1
    bare.train()
    # DDP lays out its buckets anew after its first backward, which changes the order of sums from 3 ranks on. One
    # backward whose gradient is thrown away, at every start, and a resumed run has the layout of the one before.
    if ddp.world_size > 1:
        first = dataset[schedule.global_batch(progress["step"])[ddp.rank * run.accum]]
        accumulate(run.model, [first], run.reference, config, ddp, run.dtype, nominal)
        run.optimizer.zero_grad(set_to_none=True)
    since, waited = time.perf_counter(), 0.0
    seen = torch.zeros((), dtype=torch.float64, device=ddp.device)
    first_row, pending, per_epoch = True, None, schedule.steps_per_epoch
    reason = stop_reason(ddp, progress["step"])
    while not progress["finished"] and not reason:
        for group in run.optimizer.param_groups:
            group["lr"] = run.lr * min((progress["step"] + 1) / max(run.warmup, 1), 1.0)
        asked = time.perf_counter()
        mine = [next(batches) for _ in range(run.accum)]
        waited += time.perf_counter() - asked
        totals, norm = accumulate(run.model, mine, run.reference, config, ddp, run.dtype, nominal, run.scaler)
        wanted = 0.0 if pending is None else settle(*pending)   # of the step before, which the device has long done
        if run.scaler.is_enabled():
            run.scaler.unscale_(run.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), o.grad_clip or math.inf, foreach=True)
        else:
            torch.nn.utils.clip_grads_with_norm_(bare.parameters(), o.grad_clip or math.inf, norm, foreach=True)
            skip_where_bad(run.optimizer, totals[-3])
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        progress["step"] += 1
        seen += totals[-4]
        run.sums += torch.where(totals[-3] > 0, 0.0, totals)
        step, last = progress["step"], progress["step"] == n_iters

        epoch_ends = step % per_epoch == 0
        due = lambda freq: last or epoch_ends or bool(freq) and step % freq == 0
        evaluate, save_last = due(t.eval_freq), due(t.snapshot_freq)
        report, pending = evaluate or step % t.log_freq == 0, to_host(totals)
        if report or save_last or ddp.device.type == "cpu":   # here the flags of this very step are at hand
            wanted, pending = settle(*pending), None
        if step == 1 and validation is None:   # the sums are of before the step
            log.say(f"step 0: train loss {metrics_of(totals[:len(SUMS)], totals[-4])['loss']:.4f}")
        reason = stop_reason(ddp, step, wanted)
        if reason and pending is not None:
            settle(*pending)
        if m.check_sync_every and (step % m.check_sync_every == 0 or last):
            check_in_sync(bare, ddp)
        if report:
            values = {**metrics_of(totals[:len(SUMS)], totals[-4]), "grad_norm": float(norm),
                      "lr": run.optimizer.param_groups[0]["lr"], "epoch": (step - 1) // per_epoch,
                      "pairs_per_second": float(seen) / (time.perf_counter() - since),
                      "data_wait": waited / (time.perf_counter() - since)}   # share of the time, on rank 0
            if progress["bad_steps"][0]:
                values["bad_steps"] = progress["bad_steps"][0]
            if run.scaler.is_enabled():
                values["loss_scale"] = run.scaler.get_scale()
            if first_row:   # of every start: the ranks may be others
                values.update({"ddp/world_size": ddp.world_size, "ddp/effective_batch_size": run.batch,
                               "ddp/scaled_lr": run.lr, "ddp/scaled_warmup": run.warmup})
            first_row = False
            more = {"bad steps": progress["bad_steps"][0]} if progress["bad_steps"][0] else {}
            log.progress(step, loss=values["loss"], **{"pairs/s": values["pairs_per_second"]},
                         acc=values["rewards/accuracies"], margin=values["rewards/margins"], **more)
        if evaluate:
            trained = metrics_of(run.sums[:len(SUMS)], run.sums[-4])   # since the epoch began
            told = f"train {told_of(trained, '')}"
            if validation is not None:
                found = validation(bare, ddp)
                values.update(found)
                told += f", validation {told_of(found)}"
                if not (epoch_ends or last):
                    log.say(f"step {step:,}: validation {told_of(found)}")
                watch_chosen(found["val/logps/chosen_per_residue"])
            elif float(run.sums[-4]) and (epoch_ends or last):
                k, n = SUMS.index("rewards/chosen"), SUMS.index("residues")
                watch_chosen(float(run.sums[k] / run.sums[n]) / config.loss.beta)
            if epoch_ends or last:
                log.say(f"epoch {-(-step // per_epoch)}/{-(-n_iters // per_epoch)}: {told}, "
                        f"{time.perf_counter() - epoch_began:.0f} s")
                epoch_began = time.perf_counter()
            if epoch_ends:
                values.update({f"epoch/{k}": trained[k] for k in ("loss", "rewards/accuracies")})
            if validation is not None or float(run.sums[-4]):
                evaluated(values, values.get("val/loss", trained["loss"]))
            elif last and progress["best"] is None:
                raise RuntimeError(f"step {step}: all steps had a nan or infinite loss or gradient; expected finite "
                                   f"numbers. {before}")
        if last and not progress["finished"]:
            progress["finished"] = "all steps done"
        if report:
            check_lock()
            log.metrics(step, values)
        if epoch_ends:
            run.sums.zero_()
        if progress["finished"] or save_last or reason:
            save("last.pt", t.keep_last)
        if report:   # evaluation and saving are not counted as training
            since, waited = time.perf_counter(), 0.0
            seen.zero_()
    log.close()
    if run.lock:
        run.lock.release()
    result = {"step": progress["step"], **values}
    if not progress["finished"]:
        saved = last if (last := work_dir / "checkpoints" / "last.pt").exists() else "nothing yet"
        print0(ddp, f"Stopped at step {progress['step']:,} of {n_iters:,}: {reason}. Saved: {saved}. The same command "
                    f"continues.")
        close_run(ddp, AGAIN, reason)
        return {**result, "stopped": reason}
    print0(ddp, summary(result, progress, work_dir, time.perf_counter() - began))
    close_run(ddp, 0, progress["finished"])
    return result


def told_of(values, prefix="val/"):
    return f"loss {values[prefix + 'loss']:.4f} acc {values[prefix + 'rewards/accuracies']:.3f}"


def main(config, ddp, work_dir, resume=None, fresh=False):
    """prepare and train; importable."""
    run = None
    try:
        run = prepare(config, ddp, work_dir, resume, fresh)
        return train(run, ddp)
    except BaseException as e:
        close_run(ddp, 130 if isinstance(e, KeyboardInterrupt) else 1, f"{type(e).__name__}: {e}")
        raise
    finally:
        end_watch(ddp)
        if run is not None and run.lock:
            run.lock.release()


def summary(result, progress, work_dir, seconds):
    """What a person wants to know at the end."""
    best = progress["best"]
    lines = [f"Finished at step {result['step']:,} ({progress['finished']}) after {seconds / 60:.1f} min"]
    if "val/loss" in result:
        lines += ["  validation     loss  accuracy   margin  recovery        KL"]
        for name, row in (("best", best), ("latest", result)):
            lines.append(f"  {name:<9}{row['val/loss']:>10.4f}{row['val/rewards/accuracies']:>10.3f}"
                         f"{row['val/rewards/margins']:>9.3f}{row['val/recovery']:>10.3f}{row['val/kl']:>10.4f}")
    if best["step"] == 0:
        lines.append("  ATTENTION: no evaluation was better than the base weights, which best_model.pt therefore holds")
    return "\n".join(lines + [f"  weights   {work_dir / 'best_model.pt'} (step {best['step']:,}) and latest_model.pt",
                              f"  metrics   {work_dir / 'metrics.jsonl'}"])


def judge(score, progress, training):
    """(is it the best so far, evaluations without improvement, stop early?)"""
    improved = progress["best"] is None or score < progress["best"]["score"] - training.min_delta
    bad_evals = 0 if improved else progress["bad_evals"] + 1
    return improved, bad_evals, training.patience is not None and bad_evals >= training.patience


FLAGS = {"batch_size": "training.batch_size", "num_epochs": "training.num_epochs",
         "num_workers": "training.num_workers", "learning_rate": "optim.lr", "weight_decay": "optim.weight_decay",
         "beta": "loss.beta", "temperature": "loss.temperature", "diversity_lambda": "loss.diversity_lambda",
         "max_length": "data.max_length", "train_data": "data.train_data", "val_data": "data.val_data",
         "base_model_name": "model.base_model_name", "base_model_dir": "model.base_model_dir",
         "mutable_positions": "data.mutable_positions", "mutable_ranges": "data.mutable_ranges"}
TEXTS = ("train_data", "val_data", "base_model_name", "base_model_dir", "mutable_positions", "mutable_ranges")


def make_parser():
    parser = Parser(description=__doc__.split("\n")[0], epilog="See the head of this file for examples and all keys.",
                    allow_abbrev=False)
    parser.add_argument("--config", help="YAML file; without it the defaults hold")
    parser.add_argument("--output_dir", "--work_dir", dest="work_dir", help="run directory (default runs/CONFIG_NAME)")
    for flag, key in FLAGS.items():
        several = {"nargs": "+"} if flag.startswith("mutable") else {}
        parser.add_argument(f"--{flag}", *(["--lr"] if flag == "learning_rate" else []), help=f"sets {key}", **several)
    parser.add_argument("--no_cuda", action="store_true", help="the same as --device cpu")
    parser.add_argument("--base_model_config_dir", help="accepted, not needed: the weights say how the model is made")
    parser.add_argument("--resume", help="continue from this checkpoint")
    parser.add_argument("--fresh", action="store_true", help="start over; the old run directory is renamed")
    parser.add_argument("--plan", help="print batch, learning rate and warm-up for numbers of ranks such as 1,2,4,8")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add_launch_arguments(parser)
    return parser


def read_arguments(argv):
    """(arguments, config). Raises ValueError."""
    args = make_parser().parse_intermixed_args(argv)
    for name in ("mutable_positions", "mutable_ranges"):   # as many words as there are: overrides may stand among them
        if (given := getattr(args, name)) is not None:
            args.overrides += [word for word in given if "=" in word]
            setattr(args, name, " ".join(word for word in given if "=" not in word))
    numbers = [f"{key}={getattr(args, flag)}" for flag, key in FLAGS.items()
               if flag not in TEXTS and getattr(args, flag) is not None]
    config = load_config(Config, args.config, [*args.overrides, *numbers])
    if args.num_epochs is not None and config.training.n_iters is not None:
        raise ValueError(f"command line: --num_epochs {args.num_epochs} with training.n_iters "
                         f"{config.training.n_iters}; expected one of the two (training.n_iters=null takes it away).")
    for flag in TEXTS:
        if getattr(args, flag) is not None:
            section, key = FLAGS[flag].split(".")
            setattr(getattr(config, section), key, getattr(args, flag))
    check_config(config)
    return args, config


def cli(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        make_parser().parse_args(["--help"])
    launch = Parser(add_help=False, allow_abbrev=False)   # known before the ranks can meet
    add_launch_arguments(launch)
    for option in (("--config",), ("--output_dir", "--work_dir"), ("--plan",)):
        launch.add_argument(*option, dest=option[-1][2:])
    launch.add_argument("--no_cuda", action="store_true")
    early, problem, work_dir, began = launch.parse_args([]), None, None, time.time()
    try:
        early = launch.parse_known_args(argv)[0]
        work_dir = early.work_dir or os.path.join("runs", Path(early.config or "dpo").stem)
        if early.no_cuda:
            asked, early.device = early.device, "cpu"
            if asked not in ("auto", "cpu"):
                raise ValueError(f"command line: --no_cuda with --device {asked}; expected one of the two.")
        if early.plan is None:
            hand_over(early, argv)
    except (ValueError, RuntimeError) as e:
        problem = ValueError(e)   # told below, once
    try:
        if early.plan is not None:
            return print(describe_plan(read_arguments(argv)[1], early.plan))
        # A collective's own limit is long: the watchdog, which names who is late, is to be sooner.
        ddp = setup_ddp(early.device, early.backend, ranks=early.ranks, timeout=6 * 3600.0,
                        init_timeout=early.init_timeout, ipex=early.ipex)
    except (ValueError, RuntimeError, OSError) as e:
        code = getattr(e, "code", BAD_INPUT if isinstance(e, ValueError) else 1)
        print(f"error: {e}", file=sys.stderr)
        if early.plan is None:
            replace_status(work_dir, code, str(e), since=began)   # of several ranks, the first tells the cause
        sys.exit(code)
    except KeyboardInterrupt:   # nothing runs yet
        replace_status(work_dir, 130, "interrupted (Ctrl-C)", since=began)
        sys.exit(130)
    with ddp:
        try:
            speaking = replace_status(work_dir, None, "starting") if ddp.is_main else False
            if problem:
                raise problem
            args, config = read_arguments(argv)
            if args.base_model_config_dir:
                print0(ddp, f"--base_model_config_dir {args.base_model_config_dir} is not needed, and not read: the "
                            f"weights say how the model is made")
            minutes = config.monitoring.watchdog_minutes   # while loading no less than for meeting
            signals = [name for name in config.training.stop_signals if name != "SIGINT"]   # Ctrl-C ends it at once
            watch_run(ddp, work_dir if speaking else None, minutes and max(minutes, early.init_timeout / 60), signals)
            run = prepare(config, ddp, work_dir, args.resume, args.fresh)
        except (ValueError, OSError) as e:
            if ddp.is_main:
                replace_status(work_dir, BAD_INPUT, str(e))
            abort(ddp, f"error: {e}", code=BAD_INPUT)
        result = train(run, ddp)
    if "stopped" in result:
        sys.exit(AGAIN)


if __name__ == "__main__":
    cli()
