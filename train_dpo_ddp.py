"""Fine-tune ProteinMPNN by DPO (direct preference optimisation), on pairs or on tables.

    python train_dpo_ddp.py --config configs/dpo_demo.yaml                       # needs no file
    mpirun -n 4 python train_dpo_ddp.py --train_data pairs.json --base_model_name v_48_020
    python train_dpo_ddp.py --nproc_per_node 4 --train_data pairs.json loss.name=ipo
    python train_dpo_ddp.py --config configs/dpo_stability.yaml --train_data ddg.csv
    python train_dpo_ddp.py --config configs/dpo.yaml --plan 1,2,4,8     # scaling, and the memory

Reads preference pairs and their structures (dpo/pairs.py), or with loss.unit table a table of
measured mutations (docs/tables.md), published weights, and optionally a YAML config (keys: below,
training/config.py and --help). Writes into the run folder (--output_dir, default
runs/CONFIG_NAME): latest_model.pt, and with validation best_model.pt, which other ProteinMPNN
tools read; metrics.jsonl, config.yaml, status.json; reference/KEY.pt (scores under the base
weights); checkpoints/last.pt to resume from (the checkpoint before it: last-1.pt); and at the end
or a stop curves.png. The same command again resumes the run. SIGTERM, SIGUSR1, Ctrl-C, the time
DDP_DEADLINE or a file STOP in the run folder make the run save and exit with code 75.

Runs with the same global batch are equal on any number of ranks, up to rounding. For this, each
step's micro-batches do not depend on the ranks that compute them, and random numbers are seeded by
(seed, purpose, item, epoch), never by rank. An item is a pair, or a protein with its variants.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from ddp_setup import gradient_sync, optimize_with_ipex, print0, seed_for, wrap_ddp
from ddp_watch import note_progress
from dpo import pair_batches, pair_scores, variant_scores, variant_sets
from dpo.checks import config_problems, describe_former_reference
from dpo.data import load_data
from dpo.evaluation import (
    METRICS,
    evaluate,
    evaluate_start,
    mean_metrics,
    pair_metrics,
    result_lines,
)
from dpo.memory import describe_memory
from dpo.pair_files import files_of
from dpo.plan import Plan
from dpo.reference import WITHOUT_REFERENCE, FrozenBase
from mpnn.base import load_base, record_of
from mpnn.batches import to_device
from mpnn.evaluation import save_model
from mpnn.record import TrainingRecord
from training.command_line import (
    add_run_arguments,
    exit_with,
    preparing,
    print_plan,
    ranks_meet,
    read_command,
)
from training.config import (
    MOST_LR,
    MOST_STEPS,
    CommonMemory,
    CommonMonitoring,
    CommonOptim,
    CommonTraining,
    DdpSection,
    check_common,
    key,
    load_config,
    refuse_config,
)
from training.log import open_log
from training.loop import (
    MicroBatchSampler,
    Run,
    after_step,
    check_alike,
    due,
    exchange,
    global_count,
    is_finished,
    next_micro_batches,
    open_batches,
    open_trace,
    set_learning_rate,
)
from training.meter import bad_steps_field, make_meter, step_values
from training.optimizer import make_optimizer
from training.parser import Parser
from training.plan import describe_batch, describe_run, plan_head, plan_table, print_lines
from training.precision import autocast, choose_precision, grad_scaler
from training.resume import save_run, start_or_continue, using_checkpoint
from training.run_folder import HOW_TO_GO_ON, finish_run, say_finished, take_folder


# ---------------------------------------------------------------- config
@dataclass
class Training(CommonTraining):
    batch_size: int = key(8, least=1, flag="--batch_size",
                          help="pairs per rank and micro-step, at most; of loss.unit table, "
                               "proteins")
    num_epochs: int = key(10, least=1, most=MOST_STEPS, may_change=True, flag="--num_epochs",
                          help="passes over the pairs")
    n_iters: int | None = key(None, least=1, most=MOST_STEPS, may_change=True,
                              help="optimizer steps, instead of num_epochs")
    eval_freq: int | None = key(None, least=1, may_change=True,
                                help="steps between evaluations; always after each epoch")
    snapshot_freq: int | None = key(None, least=1, may_change=True,
                                    help="steps between checkpoints; always after each epoch")


@dataclass
class Optim(CommonOptim):
    # Adam moves each weight by up to lr per step. ProteinMPNN's weights are about 0.1 in size, so
    # 1,000 steps at 3e-6 (single-process default of the published DPO scripts) change them by 3 %
    # at most, which keeps the policy near the reference; 1e-4 moves as far in 30 steps. 3e-7, the
    # default of those scripts for many ranks, needs ten times the steps.
    lr: float = key(3e-6, least=0, most=MOST_LR, flag=("--learning_rate", "--lr"),
                    help="learning rate, at base_global_batch; scaled by `scale`")
    warmup: int = key(20, least=0, help="steps, linear; also scaled by `scale`")
    grad_clip: float = key(10.0, least=0, help="largest norm of the gradient; 0: no clipping")


@dataclass
class RandomSizes:
    hidden_size: int = key(128, least=1, help="channels of a residue")
    n_encoder: int = key(3, least=1, help="layers")
    n_decoder: int = key(3, least=1, help="layers")
    num_edges: int = key(48, least=1, help="neighbours of a residue")


@dataclass
class Model:
    base_model_name: str = key(
        "v_48_020", may_change=True, per_host=True, flag="--base_model_name",
        help="file BASE_MODEL_DIR/NAME.pt, the path of a file, or a published name "
             "(mpnn/weights.py); random: untrained weights")
    base_model_dir: str = key("vanilla_model_weights", may_change=True, per_host=True,
                              flag="--base_model_dir", help="folder of base_model_name")
    # above 0 it adds noise to each log-probability that is larger than the margin of chosen over
    # rejected
    dropout: float = key(0.0, least=0, below=1, help="best left at 0")
    random: RandomSizes = field(default_factory=RandomSizes)   # for random weights only


@dataclass
class Loss:
    name: Literal["sigmoid", "hinge", "ipo", "ipo_norm", "robust", "conservative", "sigmoid_norm",
                  "reference_free", "simpo"] = key(
        "sigmoid", help="see preference_loss. ipo: sums over residues, as published; *_norm: means "
                        "over residues")
    # What h, the gain of chosen over rejected, is measured from. base: the base weights. unfolded:
    # each residue alone under these, so that h is the score of score_mutations.py
    # --correct_unfolded, and pairs teach what this score gets wrong.
    reference: Literal["base", "unfolded"] = key(
        "base", help="what a gain is measured from: the base weights, or each residue alone under "
                     "these")
    beta: float = key(0.1, least=1e-6, most=1e6, flag="--beta",
                      help="higher: closer to the reference; about 2 for simpo, 10 for "
                           "sigmoid_norm")
    label_smoothing: float = key(0.1, least=0, below=0.5,
                                 help="robust, conservative: assumed fraction of swapped pairs")
    gamma: float = key(0.5, least=0, help="simpo: margin, in nats")
    sft: float = key(0.0, least=0,
                     help="factor of an added term: mean -ln p per chosen residue")
    diversity_lambda: float = key(0.0, least=0, flag="--diversity_lambda",
                                  help="factor of a subtracted term: mean entropy per residue")
    # Pairs that differ at few positions teach how these are decoded last; this keeps what the
    # design of whole sequences needs.
    native_kl: float = key(0.0, least=0,
                           help="factor of an added term: mean KL divergence from the base weights "
                                "per residue of native sequences, decoded in a random order of all "
                                "residues")
    # 0.1 acts like a beta up to 10 times as large
    temperature: float = key(1.0, least=1e-3, most=1e3, flag="--temperature",
                             help="log_softmax(logits / temperature) in loss and rewards")
    order: Literal["random", "fixed", "arange"] = key(
        "random", help="of decoding: new in each epoch, one per pair for all epochs, or N to C")
    n_orders: int = key(1, least=1, help="orders per pair that log-probabilities are "
                                         "averaged over")
    share_order: bool = key(False, help="same order for all pairs of a complex with the same "
                                        "designed positions: sequences they share are run once")
    unit: Literal["pair", "table"] = key(
        "pair", help="of which training.batch_size counts: preference pairs, or proteins with all "
                     "their measured variants (section table)")


@dataclass
class Table:
    """Of loss.unit table. docs/tables.md has the columns of a table of mutations."""
    measured: str | None = key(None, flag="--measured", help="column of measured values")
    better: Literal["lower", "higher"] | None = key(
        None, flag="--better", help="values; ddG: lower, if positive values are destabilising")
    wild_type: float | None = key(None, help="its value: of ddG 0, of fitness often 1; null: it is "
                                             "in no pair")
    margin: float = key(0.0, least=0, help="least difference of the values of a pair")
    weigh: bool = key(False, help="weigh pairs by their difference")
    # Drawing some of many pairs adds little noise: 1,000 variants have only 1,000 scores.
    most_pairs: int = key(100_000, least=1, most=10_000_000,
                          help="of a protein; of more, so many are drawn anew in each epoch")
    group: str | None = key(None, help="column of texts; proteins with an equal text are on one "
                                       "side of a split, as are relatives")
    copies: bool = key(False, help="a mutation is in all copies of its chain")
    most_several: int = key(
        256, least=2, help="variants of several mutations of a protein, each of which takes a pass "
                           "of its own; of more, so many are drawn anew in each epoch")


@dataclass
class Data:
    train_data: str | tuple[str, ...] | None = key(
        None, may_change=True, per_host=True, flag="--train_data",
        help="file or files of pairs, or of loss.unit table of mutations; none: demo pairs, for "
             "random weights")
    val_data: str | tuple[str, ...] | None = key(
        None, may_change=True, per_host=True, flag="--val_data",
        help="file or files; none: val_fraction is split off")
    val_fraction: float = key(0.1, least=0, below=1,
                              help="of the families of proteins; 0: no validation")
    identity: float = key(0.3, least=0.1, most=1, help="of sequences, from which proteins are of "
                                                       "one family")
    max_length: int | None = key(None, least=1, may_change=True,   # what is left is compared
                                 flag="--max_length",
                                 help="residues; longer designs are refused, longer structures of "
                                      "loss.unit table left out; none is cut")
    mutable_positions: str | None = key(
        None, flag="--mutable_positions",
        help='for pairs that give none: "A12 A15" (chain and number in the file) or "11 14" '
             '(0-based in the sequence)')
    mutable_ranges: str | None = key(
        None, flag="--mutable_ranges",
        help='or ranges, "A10-A20" or "9-19", both ends included')
    demo_structures: int = key(48, least=1, help="of demo pairs")
    demo_pairs: int = key(8, least=1, help="per structure")


@dataclass
class Memory(CommonMemory):
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = key(
        False, help="for the policy's training steps only; validation and the reference use "
                    "float32")


@dataclass
class Monitoring(CommonMonitoring):
    fall: float = key(0.02, least=0, may_change=True,
                      help="nats per residue; warn if the log-probability of chosen sequences "
                           "falls by more")


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    table: Table = field(default_factory=Table)
    optim: Optim = field(default_factory=Optim)
    memory: Memory = field(default_factory=Memory)
    data: Data = field(default_factory=Data)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: Monitoring = field(default_factory=Monitoring)


SEEN = ("pairs", "residues")   # counts of what a run has trained on so far


def check_config(config, without_data=False):
    """Check what types and limits cannot: keys that exclude each other. Raises ValueError.

    without_data: data.train_data may be missing, as --plan needs no pairs."""
    refuse_config(check_common(config) + config_problems(config, without_data))


# ---------------------------------------------------------------- loss
def loss_of_pairs(model, batch, base, config, ddp, dtype):  # noqa: PLR0913  (all of a forward pass)
    """DPO on P pairs of sequences, chosen and rejected, each pair for one structure.

    With s = ln p, in nats, of the designed residues of a sequence, decoded in orders that policy
    and base share (mean over orders), and s_base that of the base weights,

        h    = [s(chosen) - s_base(chosen)] - [s(rejected) - s_base(rejected)]
        loss = -ln sigmoid(beta h)               or another of preference_loss
             - sft x s(chosen) / n               mean -ln p per residue
             - diversity_lambda x entropy        mean per residue of chosen
             + native_kl x KL(base || policy)    mean per residue of the native sequence

    Args:
        model: ProteinMPNN, perhaps wrapped in DDP. base: FrozenBase.
        batch: of pair_batches.make_batch, on the device.
    Returns: loss (P,), with gradients; METRICS (P, 9).
    """
    loss = config.loss
    # The base first: the memory that it takes is then free for the policy.
    base_scores = pair_scores.base_pair_scores(base, batch, loss)                # (P, 2)
    base_natives = pair_scores.base_natives(base, batch)                         # (U, L, 21)
    graph = base.graph(batch["complex_keys"])
    with autocast(dtype, ddp):
        log_probs, natives = pair_scores.decode_pairs(model, graph, batch)       # (M, L, 21)
    scores, entropy = pair_scores.score_pairs(log_probs, batch, loss.temperature)
    chosen, rejected = scores.unbind(1)
    base_chosen, base_rejected = base_scores.unbind(1)
    n = batch["n_scored"]
    preference = preference_loss(chosen, rejected, base_chosen, base_rejected, n, loss)
    total = preference
    if loss.sft:
        total = total - loss.sft * chosen / n
    if loss.diversity_lambda:
        total = total - loss.diversity_lambda * entropy
    if loss.native_kl:
        total = total + loss.native_kl * pair_scores.native_kl(natives, base_natives, batch)
    metrics = pair_metrics(total, preference, (chosen, rejected), (base_chosen, base_rejected),
                           entropy, n, loss.beta)
    return total, metrics


def loss_of_tables(model, batch, base, config, ddp, dtype):  # noqa: PLR0913  (as above)
    """DPO on measured variants of P proteins.

    Of a protein, with measured values y (N,) of N variants and s (N,) their scores, in nats: ln p
    of the mutated residues' letters, less that of the wild type's, decoded last (of binding: less
    the same in each partner alone),

        h_ij = [s_i - s_base_i] - [s_j - s_base_j]      of pairs with y_i > y_j
        loss = mean over the drawn pairs of -ln sigmoid(beta h_ij), or another of preference_loss,
               perhaps weighed by y_i - y_j
             - diversity_lambda x entropy               mean per mutated residue
             + native_kl x KL(base || policy)           mean per residue of the native sequence

    A loss on scores and values, such as their correlation, would stand here as well.

    Args:
        model: VariantPass, perhaps wrapped in DDP. base: FrozenBase.
        batch: of variant_sets.make_batch, on the device.
    Returns: loss (P,), with gradients; METRICS (P, 9).
    """
    loss = config.loss
    proteins = batch["proteins"]
    references = [variant_scores.score_by_base(base, protein, loss) for protein in proteins]
    graphs = [[base.graph([one]) for one in variant_sets.keys_of(protein)] for protein in proteins]
    with autocast(dtype, ddp):
        outputs = model(proteins, graphs)
    losses = []
    metrics = []
    for protein, output, reference in zip(proteins, outputs, references):
        values = protein.values                                             # (N,) higher is better
        scores = output.scores                                              # (N,) nats
        base_scores = reference.scores                                      # (N,)
        better = protein.better                                             # (Q,) of the N
        worse = protein.worse
        preference = preference_loss(scores[better], scores[worse], base_scores[better],
                                     base_scores[worse], protein.n_mutated, loss)        # (Q,)
        weight = torch.ones_like(values[better])
        if config.table.weigh:
            weight = values[better] - values[worse]
        weight = weight / weight.sum()
        added = 0.0
        if loss.diversity_lambda:
            added = added - loss.diversity_lambda * output.entropy
        if loss.native_kl:
            added = added + loss.native_kl * variant_scores.native_kl(output, reference, protein)
        losses.append((weight * preference).sum() + added)
        rows = pair_metrics(preference + added, preference, (scores[better], scores[worse]),
                            (base_scores[better], base_scores[worse]), output.entropy,
                            protein.n_mutated, loss.beta)                                # (Q, 9)
        metrics.append((weight[:, None] * rows).sum(0))
    return torch.stack(losses), torch.stack(metrics)


def preference_loss(  # noqa: C901, PLR0913  (a branch per loss; a preference is four numbers)
        chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor,
        ref_rejected: torch.Tensor, n: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Loss of each pair, (P,).

    Args:
        chosen, rejected, ref_chosen, ref_rejected: (P,) log-probabilities under policy and
            reference, summed over the scored residues, in nats.
        n: (P,) number of these residues. loss: the config's Loss section.
    """
    beta = loss.beta
    flipped = loss.label_smoothing      # assumed fraction of pairs whose sequences are swapped
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    right = -F.logsigmoid(beta * h)     # the loss of a pair as given, and as swapped
    wrong = -F.logsigmoid(-beta * h)
    if loss.name == "sigmoid":          # Rafailov et al. 2023, arXiv 2305.18290
        return right
    if loss.name == "hinge":            # Zhao et al. 2023, arXiv 2305.10425
        return torch.relu(1 - beta * h)
    if loss.name == "ipo":              # Azar et al. 2023, arXiv 2310.12036
        return (h - 1 / (2 * beta)).square()
    if loss.name == "ipo_norm":         # the same for means over residues
        return (h / n - 1 / (2 * beta)).square()
    if loss.name == "robust":           # Chowdhury et al. 2024, arXiv 2403.00409
        return ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped)
    if loss.name == "conservative":     # Mitchell 2023, ericmitchell.ai/cdpo.pdf
        return (1 - flipped) * right + flipped * wrong
    if loss.name == "sigmoid_norm":     # sigmoid, for means over residues
        return -F.logsigmoid(beta * h / n)
    if loss.name == "reference_free":   # sigmoid, with a reference of equal probabilities
        return -F.logsigmoid(beta * (chosen - rejected))
    if loss.name == "simpo":            # Meng et al. 2024, arXiv 2405.14734
        return -F.logsigmoid(beta * (chosen - rejected) / n - loss.gamma)
    raise ValueError(f"loss.name is {loss.name}; expected one of those of Loss")


def micro_batch_loss(model, batch, run, ddp):
    """Loss of one micro-batch of MicroBatchDataset.

    Returns: (sum over its items of weight x loss, in nats; (11,) sums for the log: weight x each of
    METRICS, then numbers of pairs and residues). The loss is divided by the sum of batch["count"],
    the weights of the items, over the global batch."""
    batch = to_device(batch, ddp.device)
    loss, metrics = run.loss_function(model, batch, run.base, run.config, ddp, run.dtype)
    weight = batch["weight"]
    sums = (weight[:, None] * metrics).sum(0)
    return (weight * loss).sum(), torch.cat([sums, batch["seen"]])


# ---------------------------------------------------------------- data
class MicroBatchDataset(torch.utils.data.Dataset):
    """Makes the tensors of a micro-batch from the plan's (step, micro-batch, epoch, item numbers).
    All that is random is drawn on the CPU, so that it does not depend on device or workers.

    items: Pairs, or VariantSets of a table. base_scores: (n, 2) of pairs under the reference, where
    they stay the same; None: each batch is scored."""

    def __init__(self, items, config):
        self.items = items
        self.config = config
        self.base_scores = None

    def make_batch(self, indices, epoch=None):
        """The batch of these items. Without an epoch its random numbers are the same at each call.
        """
        config = self.config
        if config.loss.unit == "table":
            return variant_sets.make_batch(self.items, indices, config, epoch)
        batch = pair_batches.make_batch(self.items, indices, config.loss, config.training.seed,
                                        epoch)
        if self.base_scores is not None:
            batch["base_scores"] = self.base_scores[indices]
        return batch

    def __getitem__(self, item):
        step, micro, epoch, indices = item
        batch = self.make_batch(indices, epoch)
        batch["seed"] = seed_for(self.config.training.seed, "dropout", step, micro)
        batch["count"] = float(batch["weight"].double().sum())
        return batch


# ---------------------------------------------------------------- prepare
@dataclass(kw_only=True)
class DpoRun(Run):
    loss_function: Any      # loss_of_pairs or loss_of_tables
    train_set: MicroBatchDataset
    base: FrozenBase
    record: TrainingRecord  # goes into the files of weights
    epoch_sums: Any         # (12,) float64, of the epoch so far: sums of the log, then of weights
    epoch_began: float = 0.0


def prepare(  # noqa: PLR0913  (what a command line says of a start)
        config, ddp, work_dir, resume=None, fresh=False, ipex="auto"):
    """Everything before the first step that writes nothing: data, model, checkpoint. Returns
    DpoRun.

    ipex: see ddp_setup.optimize_with_ipex. Raises ValueError or OSError for input that cannot be
    used. The run folder is touched afterwards, by take_folder, when all checks have passed on every
    rank."""
    check_config(config)
    former = "FORMER" if resume else work_dir
    start = start_or_continue(config, ddp, Path(work_dir), resume, fresh,
                              f"--base_model_name {former}/latest_model.pt")
    base, data, plan = load_data_and_plan(config, start, ddp)
    network = make_model_and_optimizer(config, start, base, data, ipex, ddp)
    is_of_binding = all(len(item.structures) > 1 for item in data.train)
    record = record_of(config, base, start.work_dir, config.loss.name not in WITHOUT_REFERENCE,
                       is_of_binding)
    run = make_run(config, start, data, plan, network, record, ddp)
    lines = describe_data(run, data, network, ddp)
    lines += describe_former_reference(config, base)
    batch = network.batch_for_scaling
    print_lines(ddp, lines + describe_run(run, start.state, unit_of(config), batch, ddp))
    return run


def load_data_and_plan(config, start, ddp):
    """(base weights, DpoData, Plan) of a run: the same on every rank, and as in its checkpoint."""
    problems = []
    base = None
    data = None
    try:
        base = load_base(config)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    try:    # a CA-only model reads structures otherwise
        data = load_data(config, base is not None and base.model.ca_only, note_progress)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    unit = unit_of(config)
    check_alike({f"{unit} (hash)": data.fingerprint["hash"], "base weights (hash)": base.hash}, ddp)
    start.check_data(unit, data.fingerprint)
    if start.state is not None and start.state["base"] != base.hash:
        raise ValueError(f"{start.path} was trained from other base weights (hash "
                         f"{start.state['base']}; {base.text}: {base.hash}). Give the same, "
                         "another --work_dir, or --fresh.")
    if data.val is None and config.training.patience is not None:
        raise ValueError(f"config: training.patience is {config.training.patience}, and there is "
                         "no validation; expected some, or training.patience=null.")
    plan = Plan(data.train, config.training.seed, start.micro_batches, config.training.batch_size)
    return base, data, plan


class Network(NamedTuple):
    """What is trained, and how."""
    bare: Any              # the ProteinMPNN without DDP: the policy
    model: Any             # the same model, or its VariantPass, wrapped in DDP
    base: FrozenBase
    optimizer: Any
    dtype: torch.dtype     # for autocast
    lr: float              # full rate, scaled, as is warmup (steps)
    warmup: int
    batch_for_scaling: int   # the global batch that they are scaled to
    precision: str           # for the user: how it computes


def make_model_and_optimizer(  # noqa: PLR0913  (what the two hang on)
        config, start, base, data, ipex, ddp):
    """The Network of a run, with the weights that it starts from.

    base: of mpnn.base.load_base."""
    dtype, precision = choose_precision(config, ddp)
    bare = base.model.to(ddp.device)   # the policy; the frozen one is a copy
    frozen = FrozenBase(base, [*data.train, *(data.val or [])], ddp.device)
    start.load_weights(bare)
    # a small file never fills the global batch
    batch_for_scaling = min(start.micro_batches * config.training.batch_size, len(data.train))
    lr, warmup = start.rate(batch_for_scaling)
    optimizer = make_optimizer(bare, lr, config.optim)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp, ipex)
    module = variant_scores.VariantPass(bare) if config.loss.unit == "table" else bare
    model = wrap_ddp(module, ddp, **vars(config.ddp))   # from here on with the weights of rank 0
    return Network(bare, model, frozen, optimizer, dtype, lr, warmup, batch_for_scaling, precision)


def make_run(config, start, data, plan, network, record, ddp):  # noqa: PLR0913  (all of a run)
    """The DpoRun of a start, at the step where it begins."""
    training = config.training
    n_iters = training.n_iters or training.num_epochs * plan.steps_per_epoch
    initial = {
        "before": None,        # metrics of the validation at step 0
        "start": None,         # log-probability per residue of chosen ones at the start
        "fallen": False}       # has warned that chosen sequences become less likely
    progress = start.progress(SEEN, initial, n_iters)
    sampler = MicroBatchSampler(plan.item_of, start.micro_batches, ddp, progress["step"], n_iters)
    epoch_sums = torch.zeros(len(METRICS) + len(SEEN) + 1, dtype=torch.float64)
    if start.state is not None:
        with using_checkpoint(start.path):
            epoch_sums += torch.tensor(start.state["epoch_sums"], dtype=torch.float64)
    run = DpoRun(
        config=config, work_dir=start.work_dir, continued_from=start.path,
        fingerprint=data.fingerprint, bare=network.bare, model=network.model, dtype=network.dtype,
        optimizer=network.optimizer, scaler=grad_scaler(network.dtype, ddp), lr=network.lr,
        warmup=network.warmup, progress=progress, sampler=sampler,
        validation=MicroBatchDataset(data.val, config) if data.val else None, n_iters=n_iters,
        steps_per_epoch=plan.steps_per_epoch, micro_batches=start.micro_batches,
        global_batch=start.micro_batches * training.batch_size,
        meter=make_meter(config, ddp, SEEN), base=network.base, record=record,
        loss_function=loss_of_tables if config.loss.unit == "table" else loss_of_pairs,
        train_set=MicroBatchDataset(data.train, config), epoch_sums=epoch_sums)
    start.load_optimizer(run, ddp)
    return run


def keep_base_scores(run, ddp):
    """Score by the reference, or read from the run folder, what is the same in all epochs."""
    if run.config.loss.unit == "table":     # each epoch draws other variants
        return
    for dataset, what in ((run.train_set, "training pairs"), (run.validation, "validation pairs")):
        in_training = dataset is run.train_set
        if dataset is None or not pair_scores.keeps_base_scores(run.config.loss, in_training):
            continue
        dataset.base_scores, source = pair_scores.keep_base_scores(
            run.base, dataset.items, run.config, run.work_dir / "reference", what, ddp)
        print_lines(ddp, [f"reference, {what}: {source}"])


def unit_of(config):
    """What training.batch_size counts, in words."""
    return "proteins" if config.loss.unit == "table" else "pairs"


def describe_data(run, data, network, ddp):
    """Lines that describe model, data, loss and batch."""
    config = run.config
    loss = config.loss
    name = "CA-only ProteinMPNN" if run.bare.ca_only else "ProteinMPNN"
    n_parameters = sum(p.numel() for p in run.bare.parameters())
    scoring = f"temperature {loss.temperature:g}, {loss.order} order x {loss.n_orders}"
    if loss.reference == "unfolded":
        scoring += ", reference: residues alone"
    if loss.unit == "table":
        weighed = ", weighed by their differences" if config.table.weigh else ""
        margin = f" by {config.table.margin:g} or more" if config.table.margin else ""
        scoring += (f", pairs of variants that differ{margin}{weighed}, "
                    f"up to {config.table.most_pairs:,} of a protein")
    for factor, term in ((loss.sft, "SFT"), (-loss.diversity_lambda, "entropy"),
                         (loss.native_kl, "KL of native sequences")):
        if factor:
            scoring += f" {'+' if factor > 0 else '-'} {abs(factor):g} {term}"
    return [f"model: {name}, {n_parameters / 1e6:.2f} million parameters, {run.bare.num_edges} "
            "neighbours",
            f"  from {run.base.text}",
            f"  {network.precision}; the reference is scored in float32",
            *data.description,
            f"loss: {loss.name}, beta {loss.beta:g}, {scoring}",
            describe_batch(run, f"up to {config.training.batch_size:,} {unit_of(config)}", ddp)]


# ---------------------------------------------------------------- train
def train(run, ddp, watch):
    """Train from where `prepare` left off, until `watch` (ddp_watch.py) is asked to stop. Returns
    the step and the last metrics."""
    config = run.config
    progress = run.progress

    def lines(row, folder):
        return result_lines(row, progress, folder)

    if is_finished(run):
        return say_finished(run, ddp, lines)
    progress["finished"] = ""   # a finished run continues if n_iters was raised
    log = open_log(run, ddp)
    keep_base_scores(run, ddp)
    evaluate_start(run, log, ddp)

    def loss_of(batch):
        return micro_batch_loss(run.model, batch, run, ddp)

    batches = open_batches(run, run.train_set, loss_of, ddp)
    trace = open_trace(run, log)
    began = time.perf_counter()
    run.epoch_began = began
    reason = watch.stop_reason(progress["step"])
    while not progress["finished"] and not reason:
        set_learning_rate(run)
        micro_batches = next_micro_batches(run, batches)   # this rank's share of the step
        count = global_count(micro_batches, ddp)           # weights of the items of all ranks
        sums = 0.0
        for k, batch in enumerate(micro_batches):
            torch.manual_seed(batch["seed"])   # dropout by micro-batch, not by rank
            with gradient_sync(run.model, last=k == len(micro_batches) - 1):
                loss, part = loss_of(batch)
                # DDP divides by world_size; the scaler scales in float16 alone
                run.scaler.scale(loss * ddp.world_size / count).backward()
            sums = sums + part
        run.scaler.unscale_(run.optimizer)
        run.meter.measure_layers("gradients", run.bare)
        norm = clip_grad_norm_(run.bare.parameters(), config.optim.grad_clip or math.inf,
                               foreach=True)
        totals = exchange(run, sums, count, norm, watch, ddp)   # one small all-reduce
        if totals.is_finite:                                    # a bad step changes nothing
            run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        reason, save_due = after_step(run, totals, watch, ddp)
        report_and_save(run, log, totals, reason or save_due, watch, ddp)
        if trace:
            trace.step()
    if trace:
        trace.stop()
    result = {"step": progress["step"], **run.values}
    return finish_run(run, log, watch, reason, result, time.perf_counter() - began, lines)


def report_and_save(run, log, totals, asked, watch, ddp):  # noqa: PLR0913  (a step, and to whom)
    """What follows a step, where it is due: report, evaluate, save. asked: whether somebody asks
    for a checkpoint now."""
    training = run.config.training
    progress = run.progress
    step = progress["step"]
    is_last = step == run.n_iters
    is_whole_epoch = due(step, run.steps_per_epoch)
    at_end = is_last or is_whole_epoch
    evaluate_now = at_end or due(step, training.eval_freq)
    report_now = evaluate_now or due(step, training.log_freq)
    save_now = asked or at_end or due(step, training.snapshot_freq)
    if totals.is_finite:
        run.epoch_sums += torch.cat([totals.sums, totals.sums.new_tensor([totals.count])])
    if report_now:
        run.values = report_step(run, log, totals, ddp)
    if evaluate_now:
        evaluate(run, log, run.values, ddp)   # adds val/...; may set "finished"
    if is_last and not progress["finished"]:
        progress["finished"] = "all steps done"
    if report_now:
        log.metrics(step, run.values)
    if is_whole_epoch:
        run.epoch_sums.zero_()
    if at_end:
        run.epoch_began = time.perf_counter()
    if progress["finished"] or save_now:
        save_model(run, log, ddp, "latest_model.pt")
        path = save_run(run, log, ddp, "last.pt", training.keep_last, base=run.base.hash,
                        epoch_sums=run.epoch_sums.tolist())
        watch.saved(path, step, HOW_TO_GO_ON)
    if report_now:   # evaluation and saving are not counted as training
        run.meter.restart()


def report_step(run, log, totals, ddp):
    """Show loss, accuracy and rate of a step; returns its metrics by name."""
    values = mean_metrics(totals.sums, totals.count)
    values.update(step_values(run, totals.norm, ddp))
    log.progress(run.progress["step"], loss=values["loss"], acc=values["rewards/accuracies"],
                 margin=values["rewards/margins"], rate=(values["pairs_per_second"], "pairs"),
                 **bad_steps_field(run))
    return values


# ---------------------------------------------------------------- plan
def describe_plan(config, ranks):
    """Text: a table with a row for each number of ranks (such as "1,2,4,8"), then the memory. Uses
    no device. Raises ValueError where training would, except for missing data and weights."""
    unit = unit_of(config)
    numbers, head = plan_head(config.optim, ranks, unit)
    table, problems = plan_table(config, numbers, config.training.batch_size,
                                 f"{f'effective batch ({unit})':>26}")
    memory = describe_memory(config, planned_data(config))
    return "\n".join([head, *table, *problems,
                      f"With fewer training {unit} than that, the batch is all {unit}.", *memory])


def planned_data(config):
    """The DpoData of a run; None if its files are not here. Raises ValueError for damaged ones."""
    files = [*files_of(config.data.train_data), *files_of(config.data.val_data)]
    if not files and config.model.base_model_name != "random":
        return None
    if not all(map(os.path.isfile, files)):
        return None
    try:
        ca_only = load_base(config).model.ca_only
    except ValueError:      # the weights are not here
        ca_only = False
    return load_data(config, ca_only)


# ---------------------------------------------------------------- main
# Keys whose options take more words.
POSITIONS = ("data.mutable_positions", "data.mutable_ranges")
FILES = ("data.train_data", "data.val_data")


def read_arguments(argv):
    """(options, config) of a command line. Raises ValueError."""
    parser = Parser(description=__doc__, allow_abbrev=False, config=Config,
                    epilog="Examples: top of train_dpo_ddp.py.")
    parser.add_argument("--config", help="YAML file; without it the defaults, in runs/dpo")
    parser.add_key_options((*POSITIONS, *FILES))
    parser.add_argument("--no_cuda", action="store_true", help="the same as --device cpu")
    parser.add_argument("--base_model_config_dir",
                        help="ignored: the sizes of the model are read from the weights")
    add_run_arguments(parser, "--output_dir", "--work_dir")
    options = parser.parse_intermixed_args(argv)
    given = parser.given_keys(options)
    for name in (*POSITIONS, *FILES):
        if given[name] is not None:   # it also took section.key=value
            words = given[name]
            taken = [word for word in words if re.match(r"\w+(\.\w+)+=", word)]
            options.overrides += taken
            words = [word for word in words if word not in taken]
            given[name] = " ".join(words)
            if name in FILES and len(words) > 1:
                given[name] = words
    config = load_config(Config, options.config, options.overrides, given)
    if given["training.num_epochs"] is not None and config.training.n_iters is not None:
        raise ValueError(f"command line: --num_epochs {given['training.num_epochs']} with "
                         f"training.n_iters {config.training.n_iters}; expected one of the two "
                         "(training.n_iters=null removes it).")
    check_config(config, without_data=options.plan is not None)
    return options, config


def main(argv=None):
    """The command line. Exits with a code other than 0 if the run did not finish."""
    # It starts the ranks, if its options ask for it.
    command = read_command(argv, read_arguments, default_name="dpo")
    if command.plan is not None:
        return print_plan(command, describe_plan)
    with ranks_meet(command) as (ddp, watch):
        with preparing(command, watch):   # an error in arguments or data is printed by one rank
            options = command.options
            if options.base_model_config_dir:
                print0(ddp, f"--base_model_config_dir {options.base_model_config_dir} is ignored: "
                            "the sizes of the model are read from the weights")
            run = prepare(command.config, ddp, command.work_dir, options.resume, options.fresh,
                          options.ipex)
            take_folder(run, ddp, watch, options.fresh, ("checkpoints", "reference"))
        result = train(run, ddp, watch)
    exit_with(result)


if __name__ == "__main__":
    main()
