"""What --plan and a start print: tables and lines on batch, learning rate and results."""
import re
import textwrap

from ddp_setup import print0
from training.loop import is_finished, scale_for_batch
from training.resume import machine_differences


def numbers_of(option, text):
    """Numbers of ranks from a text such as "1,2,4,8", given to an option. Raises: ValueError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"--{option} {text}; expected numbers of ranks, such as 1,2,4,8")
    return [int(number) for number in text.split(",")]


def plan_head(o, ranks, unit):
    """(numbers of ranks from text such as "1,2,4,8", line on the scaling) for --plan."""
    base = f" at a global batch of {o.base_global_batch:,} {unit}" if o.base_global_batch else ""
    return numbers_of("plan", ranks), (
        f"optim.scale {scale_name(o.scale)}: from lr {o.lr:g} and warm-up {o.warmup:,}{base}"
        f"{decay_name(o)}")


def plan_table(config, numbers, per_rank, title, more="", outcome=lambda n, batch: (batch, "")):
    """Table of what each number of ranks would do: global batch, learning rate, warm-up; and a
    warning if the warm-up lasts for all of training.n_iters.

    Args:
        per_rank: batch of a rank in a micro-step.
        title: heading of the global batch's column, which sets its width. more: further headings.
        outcome: function (ranks, global batch) -> (the global batch that there is data for, text
            of further columns). Raises ValueError where training would be refused.
    Returns: (lines, lines on what would be refused)."""
    o, steps, problems, late = config.optim, config.training.n_iters, [], []
    rows = [f"{'ranks':>6} {title} {'learning rate':>14} {'warm-up steps':>14}{more}"]
    for n in numbers:
        batch = n * config.training.accum * per_rank
        row = f"{n:>6} {batch:>{len(title)},}"
        try:
            lr_batch, columns = outcome(n, batch)
        except ValueError as e:
            problems.append(f"refused with {n} rank(s): {e}")
            rows.append(f"{row} {'refused, see below':>14}")
            continue
        lr, warmup = scale_for_batch(o.lr, o.warmup, o.scale, lr_batch, o.base_global_batch)
        rows.append(f"{row} {lr:>14.4g} {warmup:>14,}{columns}")
        if steps and warmup >= steps:
            late.append(str(n))
    if late:
        rows.append(f"ATTENTION: with {', '.join(late)} rank(s) the warm-up lasts to the end (step "
                    f"{steps:,})")
    return rows, problems


def describe_batch(run, per_rank, ddp):
    """Line on the global batch. per_rank: text on the batch of a rank in a micro-step."""
    return (f"batch: {per_rank} x accum {len(run.sampler.mine)} x {ddp.world_size} rank(s) = "
            f"{run.global_batch:,} per step, {run.steps_per_epoch:,} steps per epoch, "
            f"{run.n_iters:,} steps in all")


def describe_run(run, state, unit, lr_batch, ddp):
    """Lines on how this start trains. lr_batch: the global batch that lr was scaled to."""
    o, accum, lines = run.config.optim, run.micro_batches // ddp.world_size, []
    if accum != run.config.training.accum:
        lines.append(f"  accum is {accum} and not {run.config.training.accum}: it follows the "
                     "number of ranks, so that the global batch stays")
    fewer = f", to the {lr_batch:,} {unit} that there are" if lr_batch < run.global_batch else ""
    if state is not None:
        how = "kept from the checkpoint"
    elif o.scale == "none":
        how = "as given (scale none)"
    elif lr_batch == run.global_batch == o.base_global_batch:
        how = "as given (the batch is the base)"
    else:
        how = (f"scaled from {o.lr:g} and {o.warmup:,} at {o.base_global_batch:,} {unit} "
               f"({scale_name(o.scale)}){fewer}")
    name = "Muon for the blocks' matrices, AdamW for the rest, " if o.name == "muon" else ""
    lines.append(f"optim: {name}lr {run.lr:g}, warm-up {run.warmup:,} steps, {how}{decay_name(o)}")
    if state is None and run.warmup >= run.n_iters:
        lines.append(f"ATTENTION: the warm-up ({run.warmup:,} steps) lasts to the end "
                     f"({run.n_iters:,} steps) or longer: lower optim.warmup or train longer")
    former = run.continued_from
    lines.append(f"results: {run.work_dir}, " + (
        "a new run" if not former else f"finished ({former})" if is_finished(run) else
        f"continuing from step {run.progress['step']:,} of {former}"))
    elsewhere = machine_differences(state, ddp) if state is not None else ""
    if elsewhere:
        lines.append(f"  saved elsewhere ({elsewhere}): the run continues, but its losses may "
                     "differ in the last digits")
    return lines


def decay_name(o):
    """Text on the decay of the learning rate, to append to a line; "" for none."""
    if o.decay == "none":
        return ""
    length = o.decay_steps or 0
    over = (f"the last {length:.0%} of the steps" if 0 < length < 1 else
            f"the last {length:,.0f} steps" if length else "all steps after the warm-up")
    return f"; {o.decay} decay over {over}"


def scale_name(rule):
    """The rule of scale_for_batch in words."""
    return rule if isinstance(rule, str) else f"linear up to {rule['cap']:g} times"


def print_lines(ddp, lines):
    """Print on rank 0, in at most 80 columns where words allow it."""
    wrap = textwrap.TextWrapper(80, subsequent_indent="    ", break_long_words=False,
                                break_on_hyphens=False)
    print0(ddp, "\n".join(map(wrap.fill, lines)))
