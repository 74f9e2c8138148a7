"""Fine-tune ProteinMPNN, or SEDD, by DPO (direct preference optimisation) on preference pairs.

    python train_dpo_ddp.py --config configs/dpo_demo.yaml                       # needs no file
    mpirun -n 4 python train_dpo_ddp.py --train_data pairs.json --base_model_name v_48_020
    python train_dpo_ddp.py --nproc_per_node 4 --train_data pairs.json loss.name=ipo
    python train_dpo_ddp.py --config configs/dpo.yaml --plan 1,2,4,8             # what scaling does

Reads preference pairs and their structures (mpnn/pairs.py), or with loss.unit table a table of
measured mutations (docs/data.md), published weights, and optionally a YAML config (keys: below,
training/config.py and --help); with model.kind sedd, pairs of sequences, or a table of mutations,
and weights of SEDD (docs/dpo_sedd.md). Writes into the run folder (--output_dir, default
runs/CONFIG_NAME): best_model.pt and latest_model.pt, which other ProteinMPNN tools (of SEDD:
sample_sedd.py) read; metrics.jsonl, config.yaml, status.json; reference/KEY.pt (log-probabilities
under the base weights); designs/step_N.fasta (sequences drawn at each evaluation);
checkpoints/last.pt to resume from (the checkpoint before it: last-1.pt); and at the end curves.png.
The same command again resumes the run. SIGTERM, SIGUSR1, Ctrl-C, the time DDP_DEADLINE or a file
STOP in the run folder make the run save and exit with code 75.

Runs with the same global batch are equal on any number of ranks, up to rounding. For this, each
step's micro-batches do not depend on the ranks that compute them, and random numbers are seeded by
(seed, purpose, pair, epoch), never by rank.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ddp_setup import all_sum, optimize_with_ipex, print0, seed_for, wrap_ddp
from ddp_watch import note_progress
from dpo.evaluation import (SEEN, SUMS, evaluate, evaluate_start, metrics_of, pack, result_lines,
                            save_model)
from dpo.folds import cross_validate, lines_on
from dpo.pair_plan import PairPlan
from dpo.reference import Reference, make_tables
from dpo.scorer import Likelihoods, load
from dpo.validation import Validation
from mpnn.kind import ProteinMPNNKind
from proteins.correlation import LEAST
from sedd.kind import SeddKind
from training.command_line import (add_run_arguments, exit_with, preparing, print_plan, ranks_meet,
                                   read_command)
from training.config import (CommonMemory, CommonMonitoring, CommonOptim, CommonTraining,
                             MOST_LR, MOST_STEPS, DdpSection, check_common,
                             config_items, key, key_fields, load_config, refuse_config)
from training.log import open_log, show_progress
from training.loop import (N_SCALARS, MicroBatchSampler, Run, after_step, check_alike,
                           clip_gradient, fetch, global_gradient, is_finished, open_batches,
                           set_learning_rate, step_optimizer, take_step)
from training.meter import StepMeter, bad_steps_field, make_meter, step_values
from training.optimizer import make_optimizer
from training.parser import Parser
from training.plan import describe_batch, describe_run, plan_head, plan_table, print_lines
from training.precision import autocast, choose_precision, grad_scaler
from training.profile import StepProfile
from training.resume import (Checkpoint, Start, hash_of, save_run, start_or_continue,
                             using_checkpoint)
from training.run_folder import HOW_TO_GO_ON, finish_run, say_finished, take_folder

# model.kind -> what differs between them, see dpo/scorer.py
KINDS = {"proteinmpnn": ProteinMPNNKind(), "sedd": SeddKind()}


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
    kind: Literal["proteinmpnn", "sedd"] = key("proteinmpnn", help="what is trained")
    base: str | None = key(None, may_change=True, per_host=True, kind="sedd", flag="--base",
                           help="weights, of a file, run folder or export")
    base_model_name: str = key(
        "v_48_020", may_change=True, per_host=True, kind="proteinmpnn", flag="--base_model_name",
        help="file BASE_MODEL_DIR/NAME.pt, the path of a file, or a published name "
             "(mpnn/published.py); random: untrained weights")
    base_model_dir: str = key("vanilla_model_weights", may_change=True, per_host=True,
                              kind="proteinmpnn", flag="--base_model_dir",
                              help="folder of base_model_name")
    # above 0 it adds noise to each log-probability that is larger than the margin of chosen over
    # rejected
    dropout: float = key(0.0, least=0, below=1, kind="proteinmpnn", help="best left at 0")
    random: RandomSizes = field(default_factory=RandomSizes,   # for random weights only
                                metadata={"kind": "proteinmpnn"})


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
        "base", kind="proteinmpnn", help="what a gain is measured from: the base weights, or each "
                                         "residue alone under these")
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
    native_kl: float = key(0.0, least=0, kind="proteinmpnn",
                           help="factor of an added term: mean KL divergence from the base weights "
                                "per residue of native sequences, decoded in a random order of all "
                                "residues")
    # 0.1 acts like a beta up to 10 times as large
    temperature: float = key(1.0, least=1e-3, most=1e3, kind="proteinmpnn", flag="--temperature",
                             help="log_softmax(logits / temperature) in loss and rewards")
    order: Literal["random", "fixed", "arange"] = key(
        "random", kind="proteinmpnn", help="of decoding: new in each epoch, one per pair for all "
                                           "epochs, or N to C")
    n_orders: int = key(1, least=1, kind="proteinmpnn",
                        help="orders per pair that log-probabilities are averaged over")
    share_order: bool = key(False, kind="proteinmpnn",
                            help="same order for all pairs of a complex with the same designed "
                                 "positions: sequences they share are run once")
    unit: Literal["pair", "table"] = key(
        "pair", help="of which training.batch_size counts: preference pairs, or proteins with all "
                     "their measured variants (section table)")


@dataclass
class Table:
    """Of loss.unit table. docs/data.md has the columns of a table of mutations."""
    measured: str | None = key(None, flag="--measured", help="column of measured values")
    better: Literal["lower", "higher"] | None = key(
        None, flag="--better", help="values; ddG: lower, if positive values are destabilising")
    wild_type: float | None = key(0.0, help="its value, as of ddG; fitness often gives it 1; null: "
                                            "it is in no pair")
    margin: float = key(0.0, least=0, help="least difference of the values of a pair")
    weigh: bool = key(False, help="weigh pairs by their difference")
    # Drawing some of many pairs adds little noise: 1,000 variants have only 1,000 scores.
    most_pairs: int = key(100_000, least=1, most=10_000_000,
                          help="of a protein; of more, so many are drawn anew in each epoch")
    identity: float = key(0.3, least=0.1, most=1, help="of sequences, from which data.val_fraction "
                                                       "keeps proteins together")
    folds: int = key(0, least=0, most=100,
                     help="of one protein: first leave each part of the variants out of a short "
                          "training, and say whether this ranks them better; 0: do not")


@dataclass
class Estimator:
    """Of log-likelihoods of SEDD, see sedd/bounds.py; of variants of tables, sedd/tables.py."""
    # Their differences tell how noisy an estimate is; far more would not fit into memory.
    samples: int = key(8, least=2, most=1024, kind="sedd",
                       help="noise levels for each sequence of a pair; each is two sequences for "
                            "the network")
    share: bool = key(True, kind="sedd", help="the same noise for chosen and rejected")
    fixed: bool = key(False, kind="sedd", help="one noise for all epochs, or new in each")
    masked: float = key(0.1, above=0, most=1, kind="sedd",
                        help="loss.unit table: largest part of a protein that is masked at once, "
                             "to score many single mutations in one pass")


@dataclass
class Data:
    train_data: str | None = key(None, may_change=True, per_host=True, flag="--train_data",
                                 help="file of pairs, or of loss.unit table a table of mutations; "
                                      "none: demo pairs, for random weights")
    val_data: str | None = key(None, may_change=True, per_host=True, flag="--val_data",
                               help="none: val_fraction is split off, by structure")
    val_fraction: float = key(0.1, least=0, below=1, help="of the structures; 0: no validation")
    max_length: int | None = key(None, least=1, may_change=True,   # it can only refuse pairs
                                 flag="--max_length",
                                 help="residues; longer designs are refused, never cut")
    mutable_positions: str | None = key(
        None, kind="proteinmpnn", flag="--mutable_positions",
        help='for pairs that give none: "A12 A15" (chain and number in the file) or "11 14" '
             '(0-based in the sequence)')
    mutable_ranges: str | None = key(
        None, kind="proteinmpnn", flag="--mutable_ranges",
        help='or ranges, "A10-A20" or "9-19", both ends included')
    demo_structures: int = key(48, least=1, kind="proteinmpnn", help="of demo pairs")
    demo_pairs: int = key(8, least=1, kind="proteinmpnn", help="per structure")


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
    n_designs: int = key(4, least=0, may_change=True,
                         help="per validation structure, drawn at each evaluation; 0: none")
    design_temperature: float = key(0.1, least=0, most=1e3, may_change=True, kind="proteinmpnn",
                                    help="of these designs")
    design_steps: int = key(64, least=1, may_change=True, kind="sedd",
                            help="of sampling, as in sample_sedd.py")


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    table: Table = field(default_factory=Table)
    estimator: Estimator = field(default_factory=Estimator)
    optim: Optim = field(default_factory=Optim)
    memory: Memory = field(default_factory=Memory)
    data: Data = field(default_factory=Data)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: Monitoring = field(default_factory=Monitoring)


def check_config(config: Config, without_data: bool = False) -> None:
    """Check what types and limits cannot: keys that exclude each other. Raises ValueError.

    without_data: data.train_data may be missing, as --plan needs no pairs."""
    for name in ("train_data", "val_data", "mutable_positions", "mutable_ranges"):
        value = getattr(config.data, name)
        if value is not None and not value.strip():
            raise ValueError(f"config: data.{name} is empty; expected a value. If you do not need "
                             "this key, leave it out.")
    problems = check_common(config)
    problems += check_loss(config.loss)
    problems += check_table(config, without_data)
    if config.table.folds == 1:
        problems.append("table.folds is 1; expected 0, or 2 and more")
    if config.monitoring.n_designs == 1:
        problems.append("monitoring.n_designs is 1; expected 0, or 2 and more")
    problems += check_kind(config)
    problems += KINDS[config.model.kind].check(config, without_data)
    refuse_config(problems)


def check_kind(config):
    """Texts on keys that are for the other kind of model alone."""
    problems = []
    defaults = config_items(Config())
    values = config_items(config)
    for name, kind in kinds_of_keys().items():
        if kind != config.model.kind and values[name] != defaults[name]:
            problems.append(f"{name} is given, which is for model.kind {kind}, and model.kind "
                            f"is {config.model.kind}; expected it left out, or that kind")
    return problems


def kinds_of_keys():
    """{key: the only model.kind that it is for}."""
    return {name: field.metadata["kind"] for name, field in key_fields(Config).items()
            if field.metadata.get("kind")}


def check_loss(loss):
    """Texts on keys of the section loss that the loss does not use."""
    problems = []
    if loss.name not in ("robust", "conservative"):
        if loss.label_smoothing not in (0, Loss.label_smoothing):
            problems.append(f"loss.label_smoothing is {loss.label_smoothing}, but loss.name "
                            f"{loss.name} does not use it; expected it left out, or loss.name "
                            "robust or conservative")
    if loss.name != "simpo":
        if loss.gamma not in (0, Loss.gamma):
            problems.append(f"loss.gamma is {loss.gamma}, but loss.name {loss.name} does not use "
                            "it; expected it left out, or loss.name simpo")
    return problems


def check_table(config, without_data):
    """Texts on keys of tables of mutations that are missing, or that loss.unit does not use."""
    problems = []
    loss = config.loss
    if loss.unit == "table":
        for name in ("sft", "share_order", "temperature"):
            if getattr(loss, name) != getattr(Loss, name):
                problems.append(f"loss.{name} is {getattr(loss, name)}, which is of whole "
                                "sequences; expected it left out with loss.unit table")
        for name in ("max_length", "mutable_positions", "mutable_ranges"):
            value = getattr(config.data, name)
            if value is not None:
                problems.append(f"data.{name} is {value}, which is of designed sequences; expected "
                                "it left out with loss.unit table")
        if config.data.train_data is None and not without_data:
            problems.append("data.train_data is not given; expected a table of mutations for "
                            "loss.unit table (--train_data)")
        for name, what in (("measured", "the column of measured values"),
                           ("better", "lower or higher (ddG: lower, if positive values are "
                                      "destabilising)")):
            if getattr(config.table, name) is None and not without_data:
                problems.append(f"table.{name} is not given; expected {what} for loss.unit table")
    elif config.table != Table():
        problems.append(f"keys of the section table are given, and loss.unit is {loss.unit}; "
                        "expected loss.unit table, or none of them")
    return problems


# ---------------------------------------------------------------- loss
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


def objective(likelihoods: Likelihoods, batch: dict, reference: torch.Tensor,
              loss: Loss) -> tuple[torch.Tensor, dict]:
    """The loss to minimise of each pair (P,), and metrics {name: (P,)}, of evaluation.SUMS.

    likelihoods: of the policy. reference: (P, 2) log-probabilities of the chosen and the rejected
    sequence under the reference, summed over residues. batch: of the kind's make_batch; n_scored
    (P,) is the number of these residues."""
    scores = likelihoods.scores
    chosen, rejected = scores.unbind(1)
    ref_chosen, ref_rejected = reference.unbind(1)
    n = batch["n_scored"]
    preference = preference_loss(chosen, rejected, ref_chosen, ref_rejected, n, loss)
    total = preference
    if loss.sft:
        total = total - loss.sft * chosen / n
    if loss.diversity_lambda:
        total = total - loss.diversity_lambda * likelihoods.entropy
    if loss.native_kl:
        total = total + loss.native_kl * likelihoods.native_kl
    better, worse = (loss.beta * (scores - reference)).unbind(1)
    return total, {"loss": total, "preference_loss": preference, "rewards/chosen": better,
                   "rewards/rejected": worse, "rewards/accuracies": better > worse,
                   "logps/chosen": chosen, "logps/rejected": rejected,
                   "entropy": likelihoods.entropy,
                   "residues": n}


def micro_batch_loss(model, batch, reference, config, ddp, dtype):
    """Sums over the pairs of a micro-batch: weight x loss, in nats; and (11,) the 9 SUMS times
    weight, then the numbers of pairs and residues. global_gradient divides the loss by the sum of
    the weights of the global batch. Of tables, it divides by the number of proteins: one of few
    variants, alone in a step, moves the weights less. Their SUMS are plain sums over proteins."""
    scorer = reference.scorer
    batch = scorer.prepare(batch)
    base = reference(batch)   # outside autocast: in float32
    with autocast(dtype, ddp):
        output = scorer.run(model, batch)
    likelihoods = scorer.likelihoods(output, batch)
    loss, metrics = objective(likelihoods, batch, base.scores, config.loss)
    weight = batch["pair_weight"]
    weighted = (batch.get("share", weight)[:, None] * pack(metrics)).sum(0)
    residues = metrics["residues"].double().sum()
    pairs = residues.new_full((), len(loss))
    sums = torch.cat([weighted, torch.stack([pairs, residues])])
    return (weight * loss).sum(), sums


# ---------------------------------------------------------------- data
class MicroBatchDataset(torch.utils.data.Dataset):
    """(step, micro-batch, epoch, pair indices) -> tensors of this micro-batch. All that is random
    is drawn on the CPU, so that it does not depend on device or workers.

    make_batch: function (indices, epoch=) -> batch, of Scorer.batch_maker."""

    def __init__(self, make_batch, seed):
        self.make_batch = make_batch
        self.seed = seed

    def __getitem__(self, item):
        step, micro, epoch, indices = item
        batch = self.make_batch(indices, epoch=epoch)
        batch["seed"] = seed_for(self.seed, "dropout", step, micro)
        batch.setdefault("count", float(batch["pair_weight"].double().sum()))
        return batch


# ---------------------------------------------------------------- prepare
@dataclass(kw_only=True)
class DpoCheckpoint(Checkpoint):
    """See training.resume.Checkpoint."""
    base: str                        # hash of the base weights
    sums: list
    seen: dict[str, int]
    start: float | None = None
    fallen: bool = False
    collapsed: bool = False
    folds: dict | None = None


@dataclass(kw_only=True)
class DpoRun(Run):
    pairs: list
    make_batch: Any        # see MicroBatchDataset
    base: str              # hash of the base weights
    reference: Reference   # of the training pairs
    sums: torch.Tensor     # packed Totals of the epoch so far, as in checkpoints


def prepare(config, ddp, work_dir, resume=None, fresh=False, ipex="auto"):
    """Everything before the first step that writes nothing: data, model, checkpoint. Returns
    DpoRun.

    ipex: see ddp_setup.optimize_with_ipex. Raises ValueError or OSError for input that cannot be
    used. The run folder is touched afterwards, by take_folder, when all checks have passed on every
    rank."""
    work_dir = Path(work_dir)
    training = config.training
    check_config(config)
    kind = KINDS[config.model.kind]
    start = start_or_continue(config, ddp, work_dir, resume, fresh, DpoCheckpoint,
                              anew=kind.options_anew("FORMER" if resume else work_dir))
    base, data = load(kind, config, ddp)
    base_hash = hash_of(base.model.state_dict(), base.settings)
    dtype, precision = choose_precision(config, ddp)
    check_alike({"pairs (hash)": data.fingerprint["hash"], "base weights (hash)": base_hash}, ddp)
    bare = base.model.to(ddp.device)   # the policy
    base = base._replace(model=copy.deepcopy(bare).eval())
    check_folds(config, data.train)
    scorer = kind.scorer(base, [*data.train, *(data.val or [])], config, ddp)
    unit = unit_of(config)
    start.check_data("pairs", data.fingerprint)
    if start.state is not None and start.state["base"] != base_hash:
        raise ValueError(f"{start.path} was trained from other base weights, or from a base with "
                         f"other settings (hash {start.state['base']}; {base.text}: {base_hash}). "
                         "Give the same, another --work_dir, or --fresh.")
    plan = PairPlan(data.train, training.seed, start.micro_batches, training.batch_size)
    batch = start.micro_batches * training.batch_size
    lr_batch = min(batch, len(data.train))   # a small file does not fill the global batch
    validation = None
    if data.val:
        validation = Validation(data.val, scorer, objective)
    sums = torch.zeros(len(SUMS) + len(SEEN) + N_SCALARS, dtype=torch.float64)
    if start.state is not None:
        with using_checkpoint(start.path):
            sums = torch.tensor(start.state["sums"], dtype=torch.float64).view_as(sums)
    n_iters = training.n_iters or training.num_epochs * plan.steps_per_epoch
    lr, warmup = start.rate(lr_batch)
    initial = {
        "start": None,         # log-probability per residue of chosen ones at the start
        "fallen": False,       # has warned that chosen sequences become less likely
        "collapsed": False,    # has warned that designs become too alike
        "folds": None}         # what the cross-validation has found
    progress = start.progress(SEEN, initial, n_iters)
    sampler = MicroBatchSampler(plan.item_of, start.micro_batches, ddp, progress["step"], n_iters)
    start.load_weights(bare)
    optimizer = make_optimizer(bare, lr, config.optim, ddp)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp, ipex)
    # from here on with the weights of rank 0
    model = wrap_ddp(scorer.module(bare), ddp, **vars(config.ddp))
    run = DpoRun(
        config=config, work_dir=work_dir, continued_from=start.path, fingerprint=data.fingerprint,
        bare=bare, model=model, dtype=dtype, optimizer=optimizer, scaler=grad_scaler(dtype, ddp),
        lr=lr, warmup=warmup, progress=progress, sampler=sampler, validation=validation,
        n_iters=n_iters, steps_per_epoch=plan.steps_per_epoch, micro_batches=start.micro_batches,
        global_batch=batch, meter=make_meter(config, ddp, SEEN), pairs=data.train, base=base_hash,
        reference=Reference(scorer), make_batch=scorer.batch_maker(data.train),
        sums=sums.to(ddp.device))
    start.load_optimizer(run)
    lines = describe_data(run, data, precision, unit, ddp)
    print_lines(ddp, lines + describe_run(run, start.state, unit, lr_batch, ddp))
    return run


def check_folds(config, tables):
    """ValueError if table.folds is given for tables that it is not for."""
    folds = config.table.folds
    if not folds:
        return
    if len(tables) > 1:
        raise ValueError(f"table.folds is {folds}, and {len(tables):,} proteins are for training; "
                         "expected one. Whole proteins judge several: set table.folds=0, and "
                         "data.val_fraction or --val_data.")
    n = len(tables[0].variants)
    if n < LEAST:
        raise ValueError(f"table.folds is {folds}, and the table has {n} variants; expected "
                         f"{LEAST} or more to correlate. Set table.folds=0, or measure more.")


def unit_of(config):
    """What training.batch_size counts, in words."""
    return "proteins" if config.loss.unit == "table" else "pairs"


def describe_data(run, data, precision, unit, ddp):
    """Lines to print about model, data, loss and batch. unit: of the batch."""
    loss = run.config.loss
    n_parameters = sum(p.numel() for p in run.bare.parameters())
    terms = ""
    if loss.sft:
        terms += f" + {loss.sft:g} SFT"
    if loss.diversity_lambda:
        terms += f" - {loss.diversity_lambda:g} entropy"
    if loss.native_kl:
        terms += f" + {loss.native_kl:g} KL of native sequences"
    scorer = run.reference.scorer
    name, more, scoring = scorer.describe()
    return [f"model: {name}, {n_parameters / 1e6:.2f} million parameters, {more}",
            f"  from {scorer.base.text}",
            *(f"  {note}" for note in scorer.base.notes),
            f"  {precision}; the reference is scored in float32",
            *data.description,
            f"loss: {loss.name}, beta {loss.beta:g}, {scoring}{terms}",
            describe_batch(run, f"up to {run.config.training.batch_size:,} {unit}", ddp)]


# ---------------------------------------------------------------- one protein, in memory
def train_apart(base, table, config, ddp, watch=None):
    """The policy after all steps of a training on one protein, in eval mode: the weights that a run
    gives. Nothing is written or printed. On one rank: a protein is one micro-batch.

    base: a Base with its model on the device. table: VariantTable. watch: a Watch (ddp_watch.py):
    if it is asked to stop, the training ends early; None: nobody asks."""
    training = config.training
    start = Start(config, ddp)   # anew
    dtype, _ = choose_precision(config, ddp)
    scorer = KINDS[config.model.kind].scorer(base, [table], config, ddp)
    reference = Reference(scorer)
    policy = copy.deepcopy(base.model)
    lr, warmup = start.rate(lr_batch=1)
    plan = PairPlan([table], training.seed, micro_batches=1, batch_size=1)
    n_iters = training.n_iters or training.num_epochs * plan.steps_per_epoch
    run = Run(
        config=config, work_dir=None, continued_from=None, fingerprint={}, bare=policy,
        model=scorer.module(policy), dtype=dtype,
        optimizer=make_optimizer(policy, lr, config.optim, ddp), scaler=grad_scaler(dtype, ddp),
        lr=lr, warmup=warmup, progress=start.progress(SEEN, {}, n_iters),
        sampler=MicroBatchSampler(plan.item_of, 1, ddp, 0, n_iters), validation=None,
        n_iters=n_iters, steps_per_epoch=plan.steps_per_epoch, micro_batches=1, global_batch=1,
        meter=StepMeter(ddp, seen=SEEN))

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, reference, config, ddp, dtype)

    dataset = MicroBatchDataset(scorer.batch_maker([table]), training.seed)
    policy.train()
    for item in run.sampler:
        if watch is not None and all_sum(watch.flag(), ddp):
            break   # the caller gives up what it wanted to know
        take_step(run, iter([dataset[item]]), loss_of, ddp)
        note_progress()
    return policy.eval()


def cross_validate_run(run, log, ddp, watch):
    """Say whether training as in this run ranks variants of its protein better that it has not
    seen, see dpo/folds.py. A resumed run knows it."""
    config = run.config
    if not config.table.folds or run.progress["folds"] is not None:
        return
    table, = run.pairs
    scorer = run.reference.scorer
    log.say(f"{config.table.folds} trainings without a part of the variants each, to see whether "
            "tuning helps")

    def scores_of(model):
        scores, = scorer.variant_scores(model, [table])
        return scores

    def scores_after(others):
        return scores_of(train_apart(scorer.base, others, config, ddp, watch))

    def show(folds):
        return show_progress(folds, ddp, "cross-validation")

    found = cross_validate(table, config.table.folds, config.training.seed,
                           scores_of(scorer.base.model), scores_after, show)
    if watch.stop_reason(run.progress["step"]):      # trainings were cut short
        return
    run.progress["folds"] = found
    log.metrics(0, {f"folds/{name}": value for name, value in found.items()})
    for line in lines_on(found):
        log.say(line)


# ---------------------------------------------------------------- train
def train(run, ddp, watch):  # noqa: C901  (the loop of a run on one screen, in the order of time)
    """Train from where `prepare` left off, until `watch` (ddp_watch.py) is asked to stop. Returns
    the step and the last metrics."""
    config = run.config
    training = config.training
    progress = run.progress
    if is_finished(run):
        return say_finished(run, ddp, lambda row, folder: result_lines(row, progress, folder))
    progress["finished"] = ""   # n_iters may have been raised
    log = open_log(run, ddp)
    profile = StepProfile(run, log)
    make_tables(run, ddp)
    cross_validate_run(run, log, ddp, watch)
    began = time.perf_counter()
    epoch_began = began
    values = evaluate_start(run, log, ddp)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, run.reference, config, ddp, run.dtype)

    dataset = MicroBatchDataset(run.make_batch, training.seed)
    batches = open_batches(run, dataset, loss_of, ddp)
    reason = watch.stop_reason(progress["step"])
    while not progress["finished"] and not reason:
        profile.begin(progress["step"] + 1)
        set_learning_rate(run)
        micro_batches = fetch(run, batches)
        totals, norm = global_gradient(run.model, micro_batches, loss_of, ddp, run, watch)
        run.sums += torch.where(totals.bad > 0, 0.0, totals.packed)
        norm = clip_gradient(run, norm)
        step_optimizer(run, totals)   # a bad step changes nothing
        step = progress["step"]
        is_last = step == run.n_iters
        is_whole_epoch = step % run.steps_per_epoch == 0
        at_end = is_last or is_whole_epoch
        evaluate_now = at_end or is_due(step, training.eval_freq)
        save_now = at_end or is_due(step, training.snapshot_freq)
        report = evaluate_now or is_due(step, training.log_freq)
        reason, save_due = after_step(run, ddp, watch, at_once=report or save_now)
        if step == 1 and run.validation is None:   # this loss was computed before the first update
            loss = metrics_of(totals.sums, totals.count)["loss"]
            log.say(f"step 0: train loss {loss:.4f}")
        if report:
            values = report_step(run, log, totals, norm, ddp)
        if evaluate_now:
            evaluate(run, log, values, epoch_began, ddp)
        if at_end:
            epoch_began = time.perf_counter()
        if is_last and not progress["finished"]:
            progress["finished"] = "all steps done"
        if report:
            log.metrics(step, values)
        if is_whole_epoch:
            run.sums.zero_()
        if progress["finished"] or save_now or save_due or reason:
            save_model(run, log, ddp, "latest_model.pt")
            path = save_run(run, log, ddp, "last.pt", training.keep_last, base=run.base,
                            sums=run.sums.tolist())
            watch.saved(path, step, HOW_TO_GO_ON)
        if report:   # do not count evaluation and saving as time of training
            run.meter.restart()
    profile.close()
    result = {"step": progress["step"], **values}
    return finish_run(run, log, watch, reason, result, time.perf_counter() - began,
                      lambda: result_lines(result, progress, run.work_dir))


def is_due(step, every):
    """Whether something is done after this step. every: number of steps, or None: never."""
    return every is not None and step % every == 0


def report_step(run, log, totals, norm, ddp):
    """Show loss, accuracy and rate of a step; returns its metrics by name."""
    values = metrics_of(totals.sums, totals.count)
    values.update(step_values(run, norm, ddp))
    log.progress(run.progress["step"], loss=values["loss"],
                 **{"pairs/s": values["pairs_per_second"]}, acc=values["rewards/accuracies"],
                 margin=values["rewards/margins"], **bad_steps_field(run))
    return values


# ---------------------------------------------------------------- plan
def describe_plan(config, ranks):
    """Table of batch, learning rate and warm-up by ranks (text such as "1,2,4,8"). No device."""
    unit = unit_of(config)
    numbers, head = plan_head(config.optim, ranks, unit)
    table, problems = plan_table(config, numbers, config.training.batch_size,
                                 f"{f'effective batch ({unit})':>26}")
    return "\n".join([head, *table, *problems,
                      f"With fewer training {unit} than that, the batch is all {unit}.",
                      *KINDS[config.model.kind].plan_memory(config)])


# ---------------------------------------------------------------- main
SEVERAL_WORDS = ("data.mutable_positions", "data.mutable_ranges")   # their options take more words


def read_arguments(argv):
    """(options, config) of a command line. Raises ValueError."""
    parser = Parser(description=__doc__, allow_abbrev=False, config=Config,
                    epilog="Examples: top of train_dpo_ddp.py.")
    parser.add_argument("--config", help="YAML file; without it the defaults, in runs/dpo")
    parser.add_key_options(SEVERAL_WORDS)
    parser.add_argument("--no_cuda", action="store_true", help="the same as --device cpu")
    parser.add_argument("--base_model_config_dir",
                        help="ignored: the sizes of the model are read from the weights")
    add_run_arguments(parser, "--output_dir", "--work_dir")
    options = parser.parse_intermixed_args(argv)
    given = parser.given_keys(options)
    for name in SEVERAL_WORDS:
        if given[name] is not None:   # it also took section.key=value
            words = given[name]
            options.overrides += [word for word in words if "=" in word]
            given[name] = " ".join(word for word in words if "=" not in word)
    config = load_config(Config, options.config, options.overrides, given)
    check_flags(given, config.model.kind)
    if given["training.num_epochs"] is not None and config.training.n_iters is not None:
        raise ValueError(f"command line: --num_epochs {given['training.num_epochs']} with "
                         f"training.n_iters {config.training.n_iters}; expected one of the two "
                         "(training.n_iters=null removes it).")
    check_config(config, without_data=options.plan is not None)
    return options, config


def check_flags(given, kind):
    """ValueError for flags of the other kind of model, even if they give the default."""
    for name, other in kinds_of_keys().items():
        if given.get(name) is not None and other != kind:
            flag = key_fields(Config)[name].metadata["flag"]
            raise ValueError(f"command line: {flag} is for model.kind {other}, and model.kind is "
                             f"{kind}; expected it left out, or that kind. Base weights: --base "
                             "(sedd), --base_model_name (proteinmpnn).")


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
            take_folder(run, ddp, watch, options.fresh, ("checkpoints", "reference", "designs"))
        result = train(run, ddp, watch)
    exit_with(result)


if __name__ == "__main__":
    main()
