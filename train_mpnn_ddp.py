"""Train ProteinMPNN on own structures, from scratch or from published weights.

    mpirun -n 4 python train_mpnn_ddp.py --config configs/mpnn.yaml --structures pdbs/
    python train_mpnn_ddp.py --nproc_per_node 2 --config configs/mpnn_finetune.yaml \\
        --structures my_enzymes/ --other_structures others/ --base_model_name v_48_020
    python train_mpnn_ddp.py --config configs/mpnn.yaml --plan 1,2,4      # batch, rate, memory

Reads a YAML config (keys: below, training/config.py and --help), and structures: a folder of PDB
and mmCIF files, or a CSV list that says which chains are designed (docs/structures.md). They are
read once, into one file beside the run folder, RUN_FOLDER.structures.pt. Writes into the run folder
(--work_dir, default runs/CONFIG_NAME): latest_model.pt, and with validation best_model.pt, which
other ProteinMPNN tools read; metrics.jsonl, config.yaml, status.json; checkpoints/last.pt to resume
from (the checkpoint before it: last-1.pt); and at the end or a stop curves.png. The same command
again resumes the run. SIGTERM, SIGUSR1, Ctrl-C, the time DDP_DEADLINE or a file STOP in the run
folder make the run save and exit with code 75.

Runs with the same global batch are equal on any number of ranks, up to rounding. For this, each
step's micro-batches do not depend on the ranks that compute them, and random numbers are seeded by
(seed, purpose, structure, epoch), never by rank.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import copy
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from ddp_setup import gradient_sync, optimize_with_ipex, seed_for, wrap_ddp
from mpnn.backbones import Draws, Plan, make_batch
from mpnn.base import load_base, moved_record
from mpnn.batches import to_device
from mpnn.evaluation import Validation, evaluate, evaluate_start, result_lines, save_model
from mpnn.record import TrainingRecord
from mpnn.structure_data import cache_beside, describe_memory, load_data
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
from training.resume import save_run, start_or_continue
from training.run_folder import HOW_TO_GO_ON, finish_run, say_finished, take_folder


# ---------------------------------------------------------------- config
@dataclass
class Training(CommonTraining):
    residues_per_batch: int = key(
        2500, least=1, help="residues of a micro-batch, padding included; a structure with more of "
                            "them is one of its own")
    n_iters: int | None = key(None, least=1, most=MOST_STEPS, may_change=True,
                              help="optimizer steps")
    num_epochs: int | None = key(None, least=1, most=MOST_STEPS, may_change=True,
                                 help="or: passes over the structures, instead of n_iters")
    eval_freq: int = key(500, least=1, may_change=True, help="steps between evaluations")
    snapshot_freq: int = key(500, least=1, may_change=True, help="steps between checkpoints")
    noise: float = key(0.2, least=0, help="Angstrom, standard deviation of what is added to each "
                                          "coordinate of the backbone, anew in each epoch")


@dataclass
class Optim(CommonOptim):
    # As published: Adam, which is AdamW without weight decay, and the schedule of Vaswani et al.
    # 2017, 2 x width^-0.5 x min(step^-0.5, step x warmup^-1.5), whose peak, in step `warmup`, is
    # 2 x 128^-0.5 x 4000^-0.5.
    lr: float = key(2 * 128**-0.5 * 4000**-0.5, least=0, most=MOST_LR,
                    help="full learning rate, at base_global_batch; scaled by `scale`")
    warmup: int = key(4000, least=0, help="steps, linear; also scaled by `scale`")
    decay: Literal["none", "linear", "cosine", "wsd", "noam"] = key(
        "noam", help="of the learning rate, see training/loop.py, rate_share; noam: with "
                     "1 / sqrt(step) after the warm-up")
    grad_clip: float = key(0.0, least=0, help="largest norm of the gradient; 0: no clipping")
    betas: tuple[float, float] = key((0.9, 0.98), least=0, below=1, help="of AdamW")
    eps: float = key(1e-9, above=0, help="of AdamW")


@dataclass
class RandomSizes:
    hidden_size: int = key(128, least=1, help="channels of a residue")
    n_encoder: int = key(3, least=1, help="layers")
    n_decoder: int = key(3, least=1, help="layers")
    num_edges: int = key(48, least=1, help="neighbours of a residue")


@dataclass
class Model:
    base_model_name: str = key(
        "random", may_change=True, per_host=True, flag="--base_model_name",
        help="random: from scratch. Else fine-tune: file BASE_MODEL_DIR/NAME.pt, the path of a "
             "file, or a published name (mpnn/weights.py)")
    base_model_dir: str = key("vanilla_model_weights", may_change=True, per_host=True,
                              flag="--base_model_dir", help="folder of base_model_name")
    dropout: float = key(0.1, least=0, below=1, help="share of numbers that are dropped")
    random: RandomSizes = field(default_factory=RandomSizes)   # for random weights only


@dataclass
class Loss:
    label_smoothing: float = key(0.1, least=0, below=1,
                                 help="share of the target that is spread over the 21 letters")
    kl: float = key(0.0, least=0,
                    help="factor of an added term: mean KL divergence from the base weights per "
                         "residue, on the same input; what fine-tuning is to keep of them")


@dataclass
class Data:
    structures: str | None = key(
        None, may_change=True, per_host=True, flag="--structures",   # a hash of all must stay
        help="folder of PDB and mmCIF files, or a CSV list of files with the chains to design")
    val_structures: str | None = key(
        None, may_change=True, per_host=True, flag="--val_structures",
        help="the same for validation; none: val_fraction is split off")
    other_structures: str | None = key(
        None, may_change=True, per_host=True, flag="--other_structures",
        help="never trained on and no choice is made by them: evaluated beside the validation, "
             "they show what training does to other proteins")
    val_fraction: float = key(0.1, least=0, below=1,
                              help="of the families of structures; 0: no validation")
    identity: float = key(0.3, least=0.1, most=1, help="of chains, from which structures are of "
                                                       "one family")
    homologous: float = key(0.7, least=0.1, most=1,
                            help="identity, from which chains of a structure are designed together")
    max_length: int = key(10_000, least=1, help="residues of all chains; longer structures are "
                                                "left out, and counted")
    most_broken: float = key(0.05, least=0, most=1, may_change=True,
                             help="share of files that cannot be read, above which all is refused")
    cache: str | None = key(None, may_change=True, per_host=True,
                            help="file that keeps what was read; null: RUN_FOLDER.structures.pt")


@dataclass
class Memory(CommonMemory):
    mixed_precision: bool | Literal["float32", "bfloat16", "float16"] = key(
        True, help="for training steps only; validation and the base weights use float32")


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    memory: Memory = field(default_factory=Memory)
    data: Data = field(default_factory=Data)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: CommonMonitoring = field(default_factory=CommonMonitoring)


SEEN = ("residues", "tokens")   # counts of what a run has trained on so far


def check_config(config, without_data=False):
    """Check what types and limits cannot: keys that exclude each other. Raises ValueError.

    without_data: data.structures may be missing, as --plan needs none."""
    training = config.training
    problems = check_common(config)
    if (training.n_iters is None) == (training.num_epochs is None):
        problems.append(f"training.n_iters is {training.n_iters} and training.num_epochs "
                        f"{training.num_epochs}; expected one of the two, and null for the other")
    if config.data.structures is None and not without_data:
        problems.append("data.structures is not given; expected a folder of PDB and mmCIF files, "
                        "or a CSV list of them (--structures)")
    validates = config.data.val_structures is not None or config.data.val_fraction > 0
    if training.patience is not None and not validates:
        problems.append(f"training.patience is {training.patience}, and there is no validation; "
                        "expected some (data.val_fraction, --val_structures), or "
                        "training.patience=null")
    is_random = config.model.base_model_name == "random"
    if is_random and config.loss.kl:
        problems.append(f"loss.kl is {config.loss.kl}, and training starts from random weights; "
                        "expected 0, or weights to stay close to (--base_model_name)")
    if not is_random and config.model.random != RandomSizes():
        problems.append("model.random gives sizes, but model.base_model_name is "
                        f"{config.model.base_model_name}, a file with its own sizes; expected no "
                        "model.random in the config, or base_model_name random")
    refuse_config(problems)


# ---------------------------------------------------------------- loss
def micro_batch_loss(model, batch, run, ddp):
    """Loss of one micro-batch of MicroBatchDataset, over its `counted` residues: designed, resolved
    and of known letter, decoded in a random order after all that is not designed.

        loss = smoothed_nll(ln p)             of the native letters, given the noised backbone
             + kl x KL(base || policy)        of the same input and order

    Returns: (sum of the loss in nats; (6,) sums for the log: loss, -ln p of native letters, number
    of residues whose most likely letter is native, KL, residues, tokens). The loss is divided by
    the sum of batch["count"] over the global batch. The published code divides by 2,000 instead,
    which Adam does not notice.
    """
    loss = run.config.loss
    batch = to_device(batch, ddp.device)
    S = batch["S"]
    counted = batch["counted"]
    graph = run.bare.graph(batch["X"], batch["mask"], batch["residue_idx"], batch["chain_id"])
    base_log_probs = None
    if run.base is not None:    # first: the memory that it takes is then free for the policy
        with torch.no_grad():
            base_log_probs = run.base(graph, S, batch["order"])                     # (U, L, 21)
    with autocast(run.dtype, ddp):
        log_probs = model(graph, S, batch["order"])                                 # (U, L, 21)
    total = (counted * smoothed_nll(log_probs, S, loss.label_smoothing)).sum()
    kl = counted.new_zeros(())
    if base_log_probs is not None:
        each = (base_log_probs.exp() * (base_log_probs - log_probs)).sum(-1)        # (U, L)
        kl = (counted * each).sum()
        total = total + loss.kl * kl
    nll = -(counted * log_probs.gather(-1, S[..., None])[..., 0]).sum()
    correct = (counted * (log_probs.argmax(-1) == S)).sum()
    tokens = counted.new_full((), S.numel())    # padding included
    sums = [total, nll, correct, kl, counted.sum(), tokens]
    return total, torch.stack([number.detach().double() for number in sums])


def smoothed_nll(log_probs, S, smoothing):
    """(U, L) cross-entropy, in nats, of the target: (1 for the native letter + smoothing / 21 for
    each letter) / (1 + smoothing), as published.

    log_probs: (U, L, 21). S: (U, L) native letters."""
    n_letters = log_probs.shape[-1]
    target = F.one_hot(S, n_letters) + smoothing / n_letters
    target = target / target.sum(-1, keepdim=True)
    return -(target * log_probs).sum(-1)


# ---------------------------------------------------------------- data
class MicroBatchDataset(torch.utils.data.Dataset):
    """Makes the tensors of a micro-batch from the plan's (step, micro-batch, epoch, item numbers).
    All that is random is drawn on the CPU, so that it does not depend on device or workers.

    structures: StructureSet. items: list of Backbone, see mpnn/backbones.py."""

    def __init__(self, structures, items, config):
        self.structures = structures
        self.items = items
        self.config = config

    def __getitem__(self, item):
        step, micro, epoch, indices = item
        training = self.config.training
        draws = Draws(training.seed, epoch, training.noise)
        batch = make_batch(self.structures, [self.items[i] for i in indices], draws)
        batch["seed"] = seed_for(training.seed, "dropout", step, micro)
        batch["count"] = int(batch["counted"].sum())
        return batch


# ---------------------------------------------------------------- prepare
@dataclass(kw_only=True)
class MpnnRun(Run):
    train_set: MicroBatchDataset
    others: Validation | None   # of data.other_structures
    base: Any                   # the frozen base weights, for loss.kl; None without
    base_hash: str
    record: TrainingRecord | None   # of base weights that have one: scores are corrected as theirs


def prepare(  # noqa: PLR0913  (what a command line says of a start)
        config, ddp, work_dir, resume=None, fresh=False, ipex="auto"):
    """Everything before the first step that writes nothing but the file of structures: data, model,
    checkpoint. Returns MpnnRun.

    ipex: see ddp_setup.optimize_with_ipex. Raises ValueError or OSError for input that cannot be
    used. The run folder is touched afterwards, by take_folder, when all checks have passed on every
    rank."""
    check_config(config)
    former = "FORMER" if resume else work_dir
    start = start_or_continue(config, ddp, Path(work_dir), resume, fresh,
                              f"--base_model_name {former}/latest_model.pt")
    base, data, plan = load_data_and_plan(config, start, ddp)
    network = make_model_and_optimizer(config, start, base, data, ipex, ddp)
    run = make_run(config, start, data, plan, network, ddp)
    lines = describe_data(run, data, plan, network, ddp)
    batch = network.batch_for_scaling
    print_lines(ddp, lines + describe_run(run, start.state, "residues", batch, ddp))
    return run


def load_data_and_plan(config, start, ddp):
    """(base weights, StructureData, Plan) of a run: the same on every rank, and as in its
    checkpoint."""
    base = load_base(config)   # a CA-only model reads structures otherwise
    cache = config.data.cache or cache_beside(start.work_dir)
    data = load_data(config.data, cache, base.model.ca_only, ddp)
    check_alike({"base weights (hash)": base.hash}, ddp)
    start.check_data("structures", data.fingerprint)
    if start.state is not None and start.state["base"] != base.hash:
        raise ValueError(f"{start.path} was trained from other base weights (hash "
                         f"{start.state['base']}; {base.text}: {base.hash}). Give the same, "
                         "another --work_dir, or --fresh.")
    plan = Plan(data.train.items, config.training.seed, start.micro_batches,
                config.training.residues_per_batch)
    return base, data, plan


class Network(NamedTuple):
    """What is trained, and how."""
    bare: Any              # the ProteinMPNN without DDP: the policy
    model: Any             # the same model, wrapped in DDP
    base: Any              # a frozen copy of the base weights, for loss.kl; None without
    base_hash: str
    record: TrainingRecord | None    # for the files of weights, see MpnnRun
    optimizer: Any
    dtype: torch.dtype     # for autocast
    lr: float              # full rate, scaled, as is warmup (steps)
    warmup: int
    batch_for_scaling: int   # the global batch that they are scaled to
    lines: list              # for the user: where the weights are from
    precision: str           # for the user: how it computes


def make_model_and_optimizer(  # noqa: PLR0913  (what the two hang on)
        config, start, base, data, ipex, ddp):
    """The Network of a run, with the weights that it starts from.

    base: of mpnn.base.load_base."""
    dtype, precision = choose_precision(config, ddp)
    frozen = None
    if config.loss.kl:
        frozen = copy.deepcopy(base.model).eval().requires_grad_(False).to(ddp.device)
    bare = base.model.to(ddp.device)   # the policy
    bare.noise_level = config.training.noise    # as the files of weights say
    start.load_weights(bare)
    # a small set of structures never fills the global batch
    n_residues = sum(item.length for item in data.train.items)
    batch_for_scaling = min(start.micro_batches * config.training.residues_per_batch, n_residues)
    lr, warmup = start.rate(batch_for_scaling)
    optimizer = make_optimizer(bare, lr, config.optim)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp, ipex)
    model = wrap_ddp(bare, ddp, **vars(config.ddp))   # from here on with the weights of rank 0
    record = None if base.record is None else moved_record(base, start.work_dir)
    return Network(bare, model, frozen, base.hash, record, optimizer, dtype, lr, warmup,
                   batch_for_scaling, describe_base(config, base), precision)


def make_run(config, start, data, plan, network, ddp):  # noqa: PLR0913  (all of a run)
    """The MpnnRun of a start, at the step where it begins."""
    training = config.training
    n_iters = training.n_iters or training.num_epochs * plan.steps_per_epoch
    initial = {"before": None}     # metrics of the evaluation at step 0
    progress = start.progress(SEEN, initial, n_iters)
    sampler = MicroBatchSampler(plan.item_of, start.micro_batches, ddp, progress["step"], n_iters)
    run = MpnnRun(
        config=config, work_dir=start.work_dir, continued_from=start.path,
        fingerprint=data.fingerprint, bare=network.bare, model=network.model, dtype=network.dtype,
        optimizer=network.optimizer, scaler=grad_scaler(network.dtype, ddp), lr=network.lr,
        warmup=network.warmup, progress=progress, sampler=sampler,
        validation=Validation.of(data.val, training.residues_per_batch),
        others=Validation.of(data.other, training.residues_per_batch), n_iters=n_iters,
        steps_per_epoch=plan.steps_per_epoch, micro_batches=start.micro_batches,
        global_batch=start.micro_batches * training.residues_per_batch,
        meter=make_meter(config, ddp, SEEN), base=network.base, base_hash=network.base_hash,
        record=network.record,
        train_set=MicroBatchDataset(*data.train, config))
    start.load_optimizer(run, ddp)
    return run


def describe_base(config, base):
    """Lines on the weights that a run starts from. base: of mpnn.base.load_base."""
    if config.model.base_model_name == "random":
        return [f"  from scratch: random weights from seed {config.training.seed}"]
    return [f"  from {base.text}"]


def describe_data(run, data, plan, network, ddp):
    """Lines that describe model, data, loss and batch."""
    config = run.config
    name = "CA-only ProteinMPNN" if run.bare.ca_only else "ProteinMPNN"
    n_parameters = sum(p.numel() for p in run.bare.parameters())
    loss = f"loss: -ln p of native letters, label smoothing {config.loss.label_smoothing:g}"
    if config.loss.kl:
        loss += f" + {config.loss.kl:g} KL divergence from the base weights"
    batch = f"  about {plan.residues:,.0f} residues of a step are not padding"
    if plan.left_out:
        batch += f"; each epoch leaves {plan.left_out} micro-batches out, at random"
    return [f"model: {name}, {n_parameters / 1e6:.2f} million parameters, {run.bare.num_edges} "
            f"neighbours, dropout {config.model.dropout:g}",
            *network.lines,
            f"  {network.precision}; validation in float32",
            *data.lines,
            f"{loss}; backbone noise {config.training.noise:g} Angstrom",
            describe_batch(run, f"up to {config.training.residues_per_batch:,} residues", ddp),
            batch]


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
    evaluate_start(run, log, ddp)

    def loss_of(batch):
        return micro_batch_loss(run.model, batch, run, ddp)

    batches = open_batches(run, run.train_set, loss_of, ddp)
    trace = open_trace(run, log)
    began = time.perf_counter()
    reason = watch.stop_reason(progress["step"])
    while not progress["finished"] and not reason:
        set_learning_rate(run)
        micro_batches = next_micro_batches(run, batches)   # this rank's share of the step
        count = global_count(micro_batches, ddp)           # designed residues of all ranks
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
    evaluate_now = is_last or due(step, training.eval_freq)
    report_now = evaluate_now or due(step, training.log_freq)
    save_now = asked or is_last or due(step, training.snapshot_freq)
    if report_now:
        run.values = report_step(run, log, totals, ddp)
    if evaluate_now:
        evaluate(run, log, run.values, ddp)   # adds val/..., other/...; may set "finished"
    if is_last and not progress["finished"]:
        progress["finished"] = "all steps done"
    if report_now:
        log.metrics(step, run.values)
    if progress["finished"] or save_now:
        save_model(run, log, ddp, "latest_model.pt")
        path = save_run(run, log, ddp, "last.pt", training.keep_last, base=run.base_hash)
        watch.saved(path, step, HOW_TO_GO_ON)
    if report_now:   # evaluation and saving are not counted as training
        run.meter.restart()


def report_step(run, log, totals, ddp):
    """Show loss, perplexity, accuracy and rate of a step; returns its metrics by name. All but the
    loss are of the native letters alone, with noise and dropout."""
    loss, nll, correct, kl, residues, _ = totals.sums.tolist()
    residues = max(residues, 1)
    values = {"loss": loss / totals.count, "perplexity": math.exp(min(nll / residues, 50.0)),
              "accuracy": correct / residues}
    if run.base is not None:
        values["kl"] = kl / residues
    values.update(step_values(run, totals.norm, ddp))
    log.progress(run.progress["step"], loss=values["loss"], ppl=values["perplexity"],
                 acc=values["accuracy"], rate=(values["residues_per_second"], "res"),
                 **bad_steps_field(run))
    return values


# ---------------------------------------------------------------- plan
def describe_plan(config, ranks):
    """Text: a table with a row for each number of ranks (such as "1,2,4,8"), then the memory. Uses
    no device, and reads no structures. Raises ValueError where training would, except for
    structures and weights."""
    numbers, head = plan_head(config.optim, ranks, "residues")
    per_rank = config.training.residues_per_batch
    table, problems = plan_table(config, numbers, per_rank, f"{'global batch (residues)':>25}")
    return "\n".join([head, *table, *problems, *describe_memory(config)])


# ---------------------------------------------------------------- main
def read_arguments(argv):
    """(options, config) of a command line. Raises ValueError."""
    parser = Parser(description=__doc__, allow_abbrev=False, config=Config,
                    epilog="Examples: top of train_mpnn_ddp.py.")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_key_options()
    add_run_arguments(parser, "--work_dir", "--output_dir")
    options = parser.parse_intermixed_args(argv)
    config = load_config(Config, options.config, options.overrides, parser.given_keys(options))
    check_config(config, without_data=options.plan is not None)
    return options, config


def main(argv=None):
    """The command line. Exits with a code other than 0 if the run did not finish."""
    command = read_command(argv, read_arguments)   # starts the ranks, if its options ask for it
    if command.plan is not None:
        return print_plan(command, describe_plan)
    with ranks_meet(command) as (ddp, watch):
        with preparing(command, watch):   # an error in arguments or data is printed by one rank
            options = command.options
            run = prepare(command.config, ddp, command.work_dir, options.resume, options.fresh,
                          options.ipex)
            take_folder(run, ddp, watch, options.fresh, ("checkpoints",))
        result = train(run, ddp, watch)
    exit_with(result)


if __name__ == "__main__":
    main()
