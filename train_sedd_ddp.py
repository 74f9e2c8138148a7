"""Pretrain SEDD (score entropy discrete diffusion) on protein sequences, on one process or many.

    python train_sedd_ddp.py --config configs/sedd_demo.yaml
    mpirun -n 4 python train_sedd_ddp.py --config configs/sedd_uniref50.yaml --data data/uniref50
    python train_sedd_ddp.py --nproc_per_node 4 --config configs/sedd_cpu.yaml --data my.fasta
    python train_sedd_ddp.py --config my.yaml --data family.fasta --init_from best.pt  # fine-tune
    python train_sedd_ddp.py --config configs/sedd_demo.yaml --plan 1,2,4,8   # what scaling does

Reads a YAML config (keys and defaults: Config below and training/config.py) and proteins: a
sequence file (see proteins/sequences.py), a folder made by prepare_uniref50.py, or generated demo
proteins. Writes into the run folder (--work_dir, default runs/CONFIG_NAME): metrics.jsonl,
config.yaml, status.json, samples/step_N.fasta, checkpoints/last.pt (the previous one: last-1.pt)
and best.pt, and at the end or a stop curves.png. The same command again continues from last.pt.
SIGTERM, SIGUSR1, Ctrl-C, the time in DDP_DEADLINE, or a file STOP in the run folder makes a run
save and exit with code 75.

Runs with the same global batch give the same result, up to rounding, on any number of ranks. The
global batch consists of micro-batches, which the ranks divide among them. Every random draw is
seeded by (seed, purpose, step, micro-batch) or by the protein, never by the rank.
"""
if __name__ == "__main__":   # runs this command again in a child, the rank; this process guards it
    import ddp_guard
    ddp_guard.supervise()

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from ddp_setup import Ddp, broadcast, gradient_sync, optimize_with_ipex, seed_for, wrap_ddp
from proteins.letters import N_TOKENS, X_ID
from proteins.seeds import keyed_generator
from proteins.sequences import apply_max_length, collate, random_crops
from sedd.batches import BatchPlan, BatchReader, count_rows, sum_rows, to_device
from sedd.data import NO_DATA, load_data, missing_data, names_no_data
from sedd.diffusion import make_graph, score_entropy_loss, stratified_times
from sedd.evaluation import (
    TIME_EPS,
    Validation,
    evaluate,
    evaluate_start,
    result_lines,
    save,
    write_samples,
)
from sedd.model import EMA, SEDD, describe_memory, flops_per_position
from sedd.weights import noise_of, start_from_weights, unused_noise_keys, with_architecture
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
    config_differences,
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
    micro_batches_of,
    next_micro_batches,
    open_batches,
    open_trace,
    set_learning_rate,
)
from training.meter import bad_steps_field, make_meter, step_values
from training.optimizer import make_optimizer, state_bytes
from training.parser import Parser
from training.plan import describe_batch, describe_run, plan_head, plan_table, print_lines
from training.precision import autocast, choose_precision, compile_blocks, grad_scaler
from training.resume import start_or_continue
from training.run_folder import HOW_TO_GO_ON, finish_run, say_finished, take_folder


# ---------------------------------------------------------------- config
@dataclass
class Training(CommonTraining):
    batch_size: int | None = key(None, least=1, help="proteins per micro-batch, on average")
    tokens_per_batch: int | None = key(
        None, least=1, help="or: tokens per micro-batch, padding included, on average")
    n_iters: int | None = key(None, least=1, most=MOST_STEPS, may_change=True,
                              help="optimizer steps")
    num_epochs: int | None = key(None, least=1, most=MOST_STEPS, may_change=True,
                                 help="or: epochs, instead of n_iters")
    eval_freq: int = key(500, least=1, may_change=True, help="steps between evaluations")
    eval_samples: int = key(1, least=1, help="noise levels per validation protein")
    snapshot_freq: int = key(500, least=1, may_change=True, help="steps between checkpoints")
    init_from: str | None = key(    # the file may move: a hash of the weights must stay
        None, may_change=True, flag="--init_from",
        help="initial weights, whose sizes the model takes: a checkpoint, run folder, export or "
             "published file")


@dataclass
class Optim(CommonOptim):
    lr: float = key(3e-4, least=0, most=MOST_LR,
                    help="learning rate for base_global_batch; `scale` adapts it to the batch")
    warmup: int = key(2500, least=0, help="steps of linear warm-up; adapted likewise")
    ema: float = key(0.9999, least=0, below=1, help="decay of the averaged weights")


@dataclass
class Model:
    hidden_size: int = key(768, least=1, help="channels of a residue")
    n_blocks: int = key(12, least=1, help="blocks of attention and MLP")
    n_heads: int = key(12, least=1, help="heads of attention")
    cond_dim: int = key(128, least=1, help="size of the embedded noise level")
    dropout: float = key(0.1, least=0, below=1, help="share of numbers that are dropped")
    parameterization: Literal["sedd", "subs"] = key(
        "sedd", help="free scores; or masked diffusion")
    init_logits: float = key(0.0, least=0,
                             help="std of the initial logits (sedd/model.py); 3 learns faster")


@dataclass
class Loss:
    reduction: Literal["residue", "sequence"] = key("residue",
                                                    help="mean over residues or proteins")


@dataclass
class Noise:
    type: Literal["loglinear", "geometric", "cosine"] = key("loglinear",
                                                           help="rise of the noise with time")
    eps: float = key(1e-3, help="loglinear, cosine: share of clean residues at t = 1")
    sigma_min: float = key(1e-4, help="geometric: sigma at t = 0")
    sigma_max: float = key(20.0, help="geometric: sigma at t = 1")


@dataclass
class GraphSection:
    type: Literal["absorb", "uniform"] = key("absorb", help="noise: masks, or random residues")


@dataclass
class Data:
    file: str | None = key(None, may_change=True, per_host=True,   # a hash of its content must stay
                           flag=("--data", "--datafile"),
                           help="file of proteins, or folder of prepare_uniref50.py")
    max_length: int = key(512, least=1, help="residues of a protein")
    long: Literal["crop", "drop"] = key("crop", help="what happens to longer proteins")
    min_length: int = key(1, least=1, help="residues; shorter proteins are left out")
    val_fraction: float = key(0.05, least=0, below=1,
                              help="share for validation, by hash of the sequence; 0: none")
    demo_proteins: int | None = key(
        None, least=1, may_change=True,
        help="without a file: so many of a source with exact likelihood")


@dataclass
class Memory(CommonMemory):
    gradient_checkpointing: bool = key(False, help="less memory for activations, more time")
    compile: bool | Literal["auto"] = key("auto", may_change=True,
                                          help="torch.compile the blocks; auto: on CUDA only")


@dataclass
class Monitoring(CommonMonitoring):
    sample_frequency: int = key(0, least=0, may_change=True,
                                help="steps between sampled proteins; 0: only at the end")
    n_samples: int = key(8, least=0, may_change=True, help="proteins to sample; 0: none")
    sample_steps: int = key(128, least=1, may_change=True, help="of their sampling")
    matmul_tflops: float | None = key(
        None, above=0, may_change=True,
        help="TFLOP/s of a rank's device, as test_dtype.py measures it, for `mfu` in the log; "
             "null: no `mfu`")


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    optim: Optim = field(default_factory=Optim)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    noise: Noise = field(default_factory=Noise)
    graph: GraphSection = field(default_factory=GraphSection)
    data: Data = field(default_factory=Data)
    memory: Memory = field(default_factory=Memory)
    ddp: DdpSection = field(default_factory=DdpSection)
    monitoring: Monitoring = field(default_factory=Monitoring)


SEEN = ("residues", "tokens")   # counts of what a run has trained on so far


def check_config(config):
    """Check what types and limits cannot: keys that exclude each other. Raises ValueError."""
    training = config.training
    problems = check_common(config)
    if (training.batch_size is None) == (training.tokens_per_batch is None):
        problems.append(f"training.batch_size is {training.batch_size} and "
                        f"training.tokens_per_batch {training.tokens_per_batch}; expected one of "
                        "the two, and null for the other")
    if (training.n_iters is None) == (training.num_epochs is None):
        problems.append(f"training.n_iters is {training.n_iters} and training.num_epochs "
                        f"{training.num_epochs}; expected one of the two, and null for the other")
    for name in unused_noise_keys(config.noise):
        value = getattr(config.noise, name)
        if value != getattr(Noise, name):
            problems.append(f"noise.{name} is {value}; expected it left out, as "
                            f"{config.noise.type} noise has none")
    tokens = training.tokens_per_batch
    if tokens is not None and tokens < config.data.max_length:
        problems.append(f"training.tokens_per_batch is {tokens}, data.max_length "
                        f"{config.data.max_length}; expected a budget that holds the longest "
                        "protein")
    refuse_config(problems)


# ---------------------------------------------------------------- loss
def micro_batch_loss(model, batch, graph, ddp, dtype):
    """Loss of one micro-batch of MicroBatchDataset. Padding and unknown residues X do not count.

    Returns: (sum of the loss in nats; (3,) sums for the log: loss, residues, tokens). The loss is
    divided by the sum of batch["count"] over the global batch: see count_of and global_count.
    """
    batch = to_device(batch, ddp.device, next(model.parameters()).dtype)
    xt, x0, mask, sigma, dsigma = (batch[k] for k in ("xt", "x0", "mask", "sigma", "dsigma"))
    with autocast(dtype, ddp):
        log_score = model(xt, sigma, None if batch["full"] else mask, graph.wanted(xt))
    counted = is_counted(x0, mask)
    loss, residues = score_entropy_loss(log_score, sigma, dsigma, xt, x0, graph, counted)
    total = loss.sum()
    tokens = total.new_full((), x0.numel(), dtype=torch.float64)   # padding included
    return total, torch.stack([total.detach().double(), residues.sum(), tokens])


def is_counted(x0, mask):
    """(B, L) bool: the residues that the loss is of. x0, mask: as of MicroBatchDataset."""
    return mask & (x0 != X_ID)


def count_of(x0, mask, reduction):
    """What the mean loss of a micro-batch is taken over: its number of residues, or of proteins.

    x0, mask: as of MicroBatchDataset. reduction: loss.reduction of the config."""
    residues = is_counted(x0, mask).sum(1)
    return int(residues.sum() if reduction == "residue" else (residues > 0).sum())


# ---------------------------------------------------------------- data
class MicroBatchDataset(torch.utils.data.Dataset):
    """Makes the tensors of a micro-batch from the sampler's (step, micro, epoch, proteins, width).

    It adds the noise on the CPU, so that any device and number of workers gives the same batch.
    Items are dicts of x0 (clean) and xt (noised), (B, L) int64 with L = width; mask (B, L) bool,
    False = padding; full, bool: no padding; sigma, dsigma (B,) float64; seed, int: of dropout;
    count, int: see count_of.
    """

    def __init__(self, graph, noise, max_length, micro_batches, seed, reduction):
        self.graph = graph
        self.noise = noise
        self.max_length = max_length
        self.micro_batches = micro_batches
        self.seed = seed
        self.reduction = reduction

    def __getitem__(self, item):
        step, micro, epoch, proteins, width = item
        n = len(proteins)
        x0, mask = collate(random_crops(proteins, self.max_length, self.seed, epoch), width)
        # Stratified: each of the n proteins gets a time in its own n-th of [0, 1]. Each micro-batch
        # has another offset, so that the times of the global batch are evenly spaced.
        offset = (seed_for(self.seed, "time", step) / 2**63 + micro / self.micro_batches) % 1
        strata = torch.randperm(n, generator=keyed_generator(self.seed, "strata", step, micro))
        sigma, dsigma = self.noise(stratified_times(n, offset, strata, TIME_EPS))
        xt = self.graph.corrupt(x0, sigma, keyed_generator(self.seed, "noise", step, micro))
        return {"x0": x0, "xt": torch.where(mask, xt, X_ID), "mask": mask, "full": bool(mask.all()),
                "sigma": sigma, "dsigma": dsigma,
                "seed": seed_for(self.seed, "dropout", step, micro),
                "count": count_of(x0, mask, self.reduction)}


# ---------------------------------------------------------------- prepare
@dataclass(kw_only=True)
class SeddRun(Run):
    graph: Any
    noise: Any
    plan: BatchPlan
    letters: Any             # (21,) int64, how often each token occurs in the training proteins
    init_from: dict | None   # {"path", "hash"} of the initial weights; None: random weights


def prepare(  # noqa: PLR0913  (what a command line says of a start)
        config, ddp, work_dir, resume=None, fresh=False, ipex="auto", given=()):
    """Everything before the first step that writes nothing: data, model, checkpoint. Returns
    SeddRun.

    ipex: see ddp_setup.optimize_with_ipex. given: keys of the command line, see with_architecture.
    Raises ValueError or OSError for input that cannot be used. The run folder is touched
    afterwards, by take_folder, when all checks have passed on every rank."""
    check_config(config)
    start = start_or_continue(config, ddp, Path(work_dir), resume, fresh, "--init_from {path}",
                              lambda config, state: with_architecture(config, state, given, ddp))
    taken = describe_architecture(config, start.config)
    config = start.config
    data, reader = load_data_and_plan(config, start, ddp)
    network = make_model_and_optimizer(config, start, reader.plan, resume, ipex, ddp)
    run = make_run(config, start, data, reader, network, ddp)
    lines = network.lines + taken + describe_data(run, data, network, ddp)
    batch = network.batch_for_scaling
    print_lines(ddp, lines + describe_run(run, start.state, run.plan.counted_in, batch, ddp))
    return run


def load_data_and_plan(config, start, ddp):
    """(TrainingData, BatchReader) of a run: the same on every rank, and as in its checkpoint."""
    data = load_data(config, ddp)
    check_alike({"data (hash)": data.fingerprint["hash"]}, ddp)
    start.check_data("proteins", data.fingerprint)
    if data.val is None and config.training.patience is not None:
        raise ValueError(f"config: training.patience is {config.training.patience}, and there are "
                         "no validation proteins; expected some, or training.patience=null.")
    reader = make_reader(config, data.train, start.micro_batches, ddp)
    plan = reader.plan
    if start.state is not None and start.state["plan"] != plan.identity():
        raise ValueError(f"{start.path} was saved by a run with other batches (hash "
                         f"{start.state['plan']}, now {plan.identity()}); expected the same. "
                         "Continue with the version of this project that saved it, or --fresh.")
    return data, reader


def make_batch_plan(config, length_counts, micro_batches):
    """The BatchPlan of this config. length_counts: see Proteins.length_counts."""
    return BatchPlan(length_counts, config.data.max_length, micro_batches,
                     config.training.batch_size, config.training.tokens_per_batch,
                     config.data.long, config.model.hidden_size, config.training.seed)


def make_reader(config, proteins, micro_batches, ddp):
    """The BatchReader of this config. Collective: rank 0 reads all lengths and sends the sums."""
    plan = make_batch_plan(config, proteins.length_counts(), micro_batches)
    check_alike({"batches (hash)": plan.identity()}, ddp)
    if ddp.is_main:
        rows = torch.from_numpy(sum_rows(proteins, plan))
    else:
        rows = torch.zeros(2, count_rows(len(proteins)), dtype=torch.int64)
    return BatchReader(plan, proteins, broadcast(rows, ddp).numpy())


class Network(NamedTuple):
    """What is trained, and how."""
    graph: Any
    bare: Any              # the model without DDP
    model: Any             # the same model, wrapped in DDP
    optimizer: Any
    dtype: torch.dtype     # for autocast
    lr: float              # full rate, scaled, as is warmup (steps)
    warmup: int
    batch_for_scaling: int   # the global batch that they are scaled to
    init_from: dict | None   # see SeddRun
    lines: list              # for the user: where the weights are from
    precision: str           # for the user: how it computes


def make_model_and_optimizer(  # noqa: PLR0913  (what the two hang on)
        config, start, plan, resume, ipex, ddp):
    """The Network of a run, with the weights that it starts from."""
    dtype, precision = choose_precision(config, ddp)
    torch.manual_seed(config.training.seed)   # the same initial weights on every rank
    graph = make_graph(config.graph.type, N_TOKENS)
    bare = make_model(config, graph).to(ddp.device)
    compiled = compile_blocks(bare, config.memory.compile, ddp)
    init_from, lines = start_from_weights(config, start, resume, bare, ddp)
    start.load_weights(bare)   # of a run that is continued
    # a small set of proteins never fills the global batch
    batch_for_scaling = min(global_batch_of(config.training, start), plan.available)
    lr, warmup = start.rate(batch_for_scaling)
    optimizer = make_optimizer(bare, lr, config.optim)
    bare, optimizer = optimize_with_ipex(bare, optimizer, ddp, ipex)
    model = wrap_ddp(bare, ddp, **vars(config.ddp))   # from here on with the weights of rank 0
    return Network(graph, bare, model, optimizer, dtype, lr, warmup, batch_for_scaling, init_from,
                   lines, precision + compiled)


def global_batch_of(training, start):
    """Proteins or tokens in a step of all ranks, as the config asks for."""
    return start.micro_batches * (training.batch_size or training.tokens_per_batch)


def make_model(config, graph):
    """A SEDD of random weights, drawn from torch's generator."""
    return SEDD(graph.vocab_size, **vars(config.model), scale_by_sigma=graph.absorb,
                forbidden=(X_ID,), gradient_checkpointing=config.memory.gradient_checkpointing)


def make_run(config, start, data, reader, network, ddp):  # noqa: PLR0913  (all of a run)
    """The SeddRun of a start, at the step where it begins."""
    plan = reader.plan
    graph = network.graph
    noise = noise_of(vars(config.noise))
    letters = data.train.letter_counts()
    validation = None
    if data.val is not None:
        val = apply_max_length(data.val, config.data.max_length, config.data.long)
        validation = Validation(val, config, graph, noise, letters, data.source)
    n_iters = config.training.n_iters or config.training.num_epochs * plan.steps_per_epoch
    progress = start.progress(SEEN, {}, n_iters)
    sampler = MicroBatchSampler(reader.item_of, start.micro_batches, ddp, progress["step"], n_iters)
    run = SeddRun(
        config=config, work_dir=start.work_dir, continued_from=start.path,
        fingerprint=data.fingerprint, bare=network.bare, model=network.model,
        ema=EMA(network.bare.parameters(), config.optim.ema), dtype=network.dtype,
        optimizer=network.optimizer, scaler=grad_scaler(network.dtype, ddp), lr=network.lr,
        warmup=network.warmup, progress=progress, sampler=sampler, validation=validation,
        n_iters=n_iters, steps_per_epoch=plan.steps_per_epoch, micro_batches=start.micro_batches,
        global_batch=global_batch_of(config.training, start), meter=make_meter(config, ddp, SEEN),
        letters=letters, graph=graph, noise=noise, plan=plan, init_from=network.init_from)
    start.load_optimizer(run, ddp)
    if not is_finished(run):
        reader.item_of(run.progress["step"], run.sampler.mine[0])   # raises if data is damaged
    count_flops(run, ddp)
    return run


def count_flops(run, ddp):
    """Let the log have `mfu`, if monitoring.matmul_tflops tells the rate of this rank's device."""
    tflops = run.config.monitoring.matmul_tflops
    if tflops is None:
        return

    # A rank may have one micro-batch more or less than the mean, of which the log tells.
    mean_number = run.micro_batches / ddp.world_size
    share = mean_number / len(run.sampler.mine)

    def flops_of(batch):
        return share * batch["x0"].numel() * flops_per_position(run.bare, batch["x0"].shape[1])

    run.meter.count_flops(flops_of, tflops * 1e12)


def describe_data(run, data, network, ddp):
    """Lines that describe model, data and batch."""
    config = run.config
    n_parameters = sum(p.numel() for p in run.bare.parameters())
    noise = ", ".join(f"{name} {value:g}" for name, value in vars(run.noise).items())
    proteins = run.plan.describe()
    n_val = 0 if data.val is None else len(data.val)
    if n_val:
        proteins += f"; {n_val:,} for validation"
    lines = [f"model: SEDD, {n_parameters / 1e6:.2f} million parameters, {config.graph.type} "
             f"graph, {config.noise.type} noise ({noise}), {config.model.parameterization}",
             f"  {network.precision}",
             f"data: {data.description}",
             f"  {proteins}",
             describe_batch(run, f"about {run.plan.asked:,} {run.plan.counted_in}", ddp)]
    if run.continued_from:
        return lines
    if 0 < n_val < 10:
        lines.append(f"ATTENTION: only {n_val} protein(s) for validation, by which best.pt is "
                     "chosen: raise data.val_fraction")
    return lines + run.plan.warning()


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
    dataset = MicroBatchDataset(run.graph, run.noise, config.data.max_length, run.micro_batches,
                                config.training.seed, config.loss.reduction)

    def loss_of(batch):
        return micro_batch_loss(run.model, batch, run.graph, ddp, run.dtype)

    batches = open_batches(run, dataset, loss_of, ddp)   # warms DDP up, by a backward of its own
    trace = open_trace(run, log)
    began = time.perf_counter()
    reason = watch.stop_reason(progress["step"])
    while not progress["finished"] and not reason:
        set_learning_rate(run)
        micro_batches = next_micro_batches(run, batches)   # this rank's share of the step
        count = global_count(micro_batches, ddp)           # residues, or proteins, of all ranks
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
            run.ema.update(run.bare.parameters())
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
    """What follows a step, where it is due: report, evaluate, sample, save. asked: whether somebody
    asks for a checkpoint now."""
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
        evaluate(run, log, run.values, ddp)   # adds val/...; may set "finished"
    if is_last and not progress["finished"]:
        progress["finished"] = "all steps done"
    if report_now:
        log.metrics(step, run.values)
    if progress["finished"] or due(step, run.config.monitoring.sample_frequency):
        write_samples(run, ddp)
    if progress["finished"] or save_now:   # after the samples
        path = save(run, log, ddp, "last.pt", training.keep_last)
        watch.saved(path, step, HOW_TO_GO_ON)
    if report_now:   # evaluation, saving and sampling are not counted as training
        run.meter.restart()


def report_step(run, log, totals, ddp):
    """Show loss, perplexity and throughput of a step; returns its metrics by name."""
    loss_sum, residues, _ = totals.sums.tolist()
    loss = loss_sum / totals.count
    per_residue = loss_sum / max(residues, 1)
    values = {"loss": loss, "perplexity": math.exp(min(per_residue, 50.0)),
              **step_values(run, totals.norm, ddp)}
    more = {"mfu": values["mfu"]} if "mfu" in values else {}
    log.progress(run.progress["step"], loss=loss, ppl=values["perplexity"],
                 rate=(values["residues_per_second"], "res"), **more, **bad_steps_field(run))
    return values


# ---------------------------------------------------------------- plan
def describe_plan(config, ranks, given=()):
    """Text: a table with a row for each number of ranks (such as "1,2,4,8"), then the memory. Uses
    no device.

    given: keys of the command line, see with_architecture. Raises ValueError where training would,
    except for missing or damaged data, and for missing weights."""
    weights = config.training.init_from
    taken = []
    if weights is not None and Path(weights).exists():
        configured = config
        config = with_architecture(configured, None, given, Ddp())
        taken = describe_architecture(configured, config)
    per_rank = config.training.batch_size or config.training.tokens_per_batch
    unit = "proteins" if config.training.batch_size else "tokens"
    numbers, head = plan_head(config.optim, ranks, unit)
    noise_of(vars(config.noise))   # raises for values that training would refuse
    lengths = None
    missing = missing_data(config.data)
    if missing:
        lines = [head, f"steps per epoch are not known: {missing}"]
    else:
        data = load_data(config, Ddp())
        lengths = data.train.length_counts()
        lines = [f"data: {data.description}", head]
    lines = [*taken, *lines]
    plan = None   # of the last number of ranks

    def outcome(n, batch):
        nonlocal plan
        if lengths is None:
            return batch, f" {'?':>12} {'?':>8}"
        plan = make_batch_plan(config, lengths, micro_batches_of(config.training, n))
        steps = plan.steps_per_epoch
        epochs = config.training.num_epochs or config.training.n_iters / steps
        return min(batch, plan.available), f" {steps:>12,} {epochs:>8,.2f}"

    table, problems = plan_table(config, numbers, per_rank, f"{f'batch ({unit})':>17}",
                                 f" {'steps/epoch':>12} {'epochs':>8}", outcome)
    if problems and plan is None:
        raise ValueError("\n".join(problems))
    positions = config.training.tokens_per_batch   # of the largest micro-batch
    if config.training.batch_size:
        positions = config.training.batch_size * config.data.max_length
    if plan is not None:
        positions = int((plan.sizes * plan.tops).max())
        problems.append(f"data of an epoch: {plan.describe()}")
        problems += plan.warning()
    return "\n".join([*lines, *table, *problems, *plan_memory(config, positions)])


def plan_memory(config, positions):
    """Lines on the memory of a rank. positions: of the largest micro-batch, padding included."""
    with torch.device("meta"):
        model = make_model(config, make_graph(config.graph.type, N_TOKENS))
    in_float32 = config.memory.mixed_precision in (False, "float32")
    return describe_memory(model, positions, in_float32, state_bytes(model, config.optim.name))


# ---------------------------------------------------------------- main
def read_arguments(argv):
    """(options, config) of a command line. Raises ValueError."""
    parser = Parser(description=__doc__, allow_abbrev=False, config=Config,
                    epilog="Examples: top of train_sedd_ddp.py.")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_key_options()
    add_run_arguments(parser, "--work_dir")
    options = parser.parse_intermixed_args(argv)
    config = load_config(Config, options.config, options.overrides, parser.given_keys(options))
    check_config(config)
    if options.plan is None and names_no_data(config.data):   # a plan can do without
        raise ValueError(NO_DATA)
    return options, config


def describe_architecture(configured, config):
    """List of a line on what the weights of --init_from say otherwise than the config."""
    taken = config_differences(configured, config)
    if not taken:
        return []
    return ["  architecture of the initial weights, not that of the config: "
            f"{', '.join(taken)}"]


def keys_of(overrides):
    """The keys of texts such as "optim.lr=1e-4"."""
    return [text.partition("=")[0].strip() for text in overrides]


def main(argv=None):
    """The command line. Exits with a code other than 0 if the run did not finish."""
    command = read_command(argv, read_arguments)   # starts the ranks, if its options ask for it
    if command.plan is not None:
        return print_plan(command, lambda config, ranks: describe_plan(
            config, ranks, keys_of(command.options.overrides)))
    with ranks_meet(command) as (ddp, watch):
        with preparing(command, watch):   # an error in arguments or data is printed by one rank
            options = command.options
            run = prepare(command.config, ddp, command.work_dir, options.resume, options.fresh,
                          options.ipex, keys_of(options.overrides))
            take_folder(run, ddp, watch, options.fresh, ("checkpoints", "samples"))
        result = train(run, ddp, watch)
    exit_with(result)


if __name__ == "__main__":
    main()
