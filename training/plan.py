"""What --plan and a start print: tables and lines on batch, learning rate and results."""
import math
import re

from ddp_setup import print0
from training.loop import (
    check_ranks,
    is_finished,
    length_of_decay,
    micro_batches_of,
    rate_share,
    scale_for_batch,
)
from training.problems import in_columns
from training.resume import machine_differences


def numbers_of(option, text):
    """Numbers of ranks from a text such as "1,2,4,8", given to an option. Raises: ValueError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"--{option} {text}; expected numbers of ranks, such as 1,2,4,8")
    return [int(number) for number in text.split(",")]


def plan_head(optim, ranks: str, unit: str) -> tuple[list[int], str]:
    """(numbers of ranks from text such as "1,2,4,8", line on the scaling) for --plan."""
    numbers = numbers_of("plan", ranks)
    base = ""
    if optim.base_global_batch:
        base = f" at a global batch of {optim.base_global_batch:,} {unit}"
    line = (f"optim.scale {scale_name(optim.scale)}: from lr {optim.lr:g} and warm-up "
            f"{optim.warmup:,}{base}{decay_name(optim, optim.lr)}")
    return numbers, line


def plan_table(config, numbers, per_rank, title, more="", outcome=lambda n, batch: (batch, "")):
    """Table of what each number of ranks would do: global batch, learning rate, warm-up; and a
    warning if the warm-up lasts for all of training.n_iters.

    Args:
        per_rank: batch of a rank in a micro-step.
        title: heading of the global batch's column, which sets its width. more: further headings.
        outcome: function (ranks, global batch) -> (the global batch that there is data for, text
            of further columns). Raises ValueError where training would be refused.
    Returns: (lines, lines on what would be refused)."""
    optim = config.optim
    n_iters = config.training.n_iters
    problems = []
    late = []   # numbers of ranks, as text
    uneven = []   # lines
    least = f" {'min_lr':>10}" if optim.min_lr else ""   # heading; then the value of a row
    rows = [f"{'ranks':>6} {title} {'learning rate':>14}{least} {'warm-up steps':>14}{more}"]
    for n in numbers:
        micro_batches = micro_batches_of(config.training, n)
        batch = micro_batches * per_rank
        row = f"{n:>6} {batch:>{len(title)},}"
        try:
            check_ranks(n, micro_batches, f"training.micro_batches is {micro_batches}")
            lr_batch, columns = outcome(n, batch)
        except ValueError as error:
            problems.append(f"refused with {n} rank(s): {error}")
            rows.append(f"{row} {'refused, see below':>14}")
            continue
        lr, warmup = scale_for_batch(optim.lr, optim.warmup, optim.scale, lr_batch,
                                     optim.base_global_batch)
        if optim.min_lr:
            least = f" {optim.min_lr / optim.lr * lr:>10.4g}"
        rows.append(f"{row} {lr:>14.4g}{least} {warmup:>14,}{columns}")
        if n_iters and warmup >= n_iters:
            late.append(str(n))
        if micro_batches % n:
            uneven.append(describe_sharing(n, micro_batches))
    if late:
        rows.append(f"ATTENTION: with {', '.join(late)} rank(s) the warm-up lasts to the end (step "
                    f"{n_iters:,})")
    return rows + uneven, problems


def describe_batch(run, per_rank, ddp):
    """Line on the global batch. per_rank: text on a micro-batch."""
    if run.micro_batches % ddp.world_size:
        shared = f"{run.micro_batches} micro-batches on {ddp.world_size} ranks"
    else:
        shared = f"accum {run.micro_batches // ddp.world_size} x {ddp.world_size} rank(s)"
    epochs = run.n_iters / run.steps_per_epoch
    return (f"batch: {per_rank} x {shared} = {run.global_batch:,} per step, "
            f"{count(run.steps_per_epoch, 'step')} per epoch, {count(run.n_iters, 'step')} in all "
            f"({epochs:,.1f} epochs)")


def count(n, what):
    """A number of things, in words."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def describe_sharing(n_ranks, micro_batches):
    """Line on ranks that share the micro-batches of a step unevenly."""
    most = math.ceil(micro_batches / n_ranks)
    return (f"{n_ranks} ranks share {micro_batches:,} micro-batches per step unevenly: a step "
            f"takes as long as {most}, and {1 - micro_batches / (most * n_ranks):.0%} of the "
            "ranks' time is spent waiting")


def describe_run(run, state, unit: str, lr_batch: int, ddp) -> list[str]:
    """Lines on how this start trains.

    state: content of the checkpoint that it continues; None: a new run.
    unit: of the batch, such as proteins. lr_batch: the global batch that lr was scaled to."""
    lines = []
    accum = run.micro_batches // ddp.world_size
    if run.micro_batches % ddp.world_size:
        lines.append(f"  {describe_sharing(ddp.world_size, run.micro_batches)}")
    elif accum != run.config.training.accum:
        lines.append(f"  accum is {accum} and not {run.config.training.accum}: it follows the "
                     "number of ranks, so that the global batch stays")
    lines.append(describe_rate(run, state, unit, lr_batch))
    if state is None and run.warmup >= run.n_iters:
        highest = run.lr * rate_share(run.n_iters - 1, run.warmup, run.n_iters, run.config.optim)
        lines.append(f"ATTENTION: the warm-up ({count(run.warmup, 'step')}) is not shorter than "
                     f"the run ({count(run.n_iters, 'step')}), so the learning rate is "
                     f"{highest:.2g} at most: lower optim.warmup, or train longer")
    former = run.continued_from
    if not former:
        how = "a new run"
    elif is_finished(run):
        how = f"finished ({former})"
    else:
        how = f"continuing from step {run.progress['step']:,} of {former}"
    lines.append(f"results: {run.work_dir}, {how}")
    if state is not None and state["best"] and not run.progress["best"]:
        lines.append("  the best weights are looked for from here on: those so far are elsewhere")
    if state is not None:
        elsewhere = machine_differences(state, ddp)
        if elsewhere:
            lines.append(f"  saved elsewhere ({elsewhere}): the run continues, but its losses may "
                         "differ in the last digits")
    return lines


def describe_rate(run, state, unit, lr_batch):
    """Line on the learning rate, and where it comes from; for arguments see describe_run."""
    optim = run.config.optim
    if state is not None:
        how = "kept from the checkpoint"
    elif optim.scale == "none":
        how = "as given (scale none)"
    elif lr_batch == run.global_batch == optim.base_global_batch:
        how = "as given (the batch is the base)"
    else:
        how = (f"scaled from {optim.lr:g} and {optim.warmup:,} at {optim.base_global_batch:,} "
               f"{unit} ({scale_name(optim.scale)})")
        if lr_batch < run.global_batch:
            how += f", to the {lr_batch:,} {unit} that there are"
    name = "Muon for the blocks' matrices, AdamW for the rest, " if optim.name == "muon" else ""
    decay = decay_name(optim, run.lr)
    if decay and run.warmup >= run.n_iters and length_of_decay(optim) is None:
        decay = f"; no {optim.decay} decay, as it would begin after the warm-up"
    return f"optim: {name}lr {run.lr:g}, warm-up {count(run.warmup, 'step')}, {how}{decay}"


def decay_name(optim, lr) -> str:
    """Text on the decay of the learning rate, to append to a line; "" for none. lr: full rate."""
    if optim.decay == "none":
        return ""
    if optim.decay == "noam":
        return "; noam decay, with 1 / sqrt(step)"
    length = length_of_decay(optim) or 0
    if length == 0:
        over = "all steps after the warm-up"
    elif length < 1:
        over = f"the last {length:.0%} of the steps"
    else:
        over = f"the last {length:,.0f} steps"
    end = f", to {optim.min_lr / optim.lr * lr:g}" if optim.min_lr else ""
    return f"; {optim.decay} decay over {over}{end}"


def scale_name(rule):
    """The rule of scale_for_batch in words."""
    return rule if isinstance(rule, str) else f"linear up to {rule['cap']:g} times"


def print_lines(ddp, lines):
    """Print on rank 0, in at most 80 columns where words allow it."""
    print0(ddp, in_columns("\n".join(lines), hanging="    "))
