"""Draw the curves of one or several runs into one PNG; matplotlib is needed.

SEDD: loss with validation and what letter frequencies alone give, learning rate, throughput, norm
of the gradient. DPO: loss, correlation with the measured values, accuracy, margins and rewards,
recovery, KL divergence. ProteinMPNN on structures: loss and recovery, also of other structures. A
panel is drawn if at least one run has its metrics; how the steps went (TECHNICAL) only if one is no
short run.
"""
import math
from pathlib import Path

import numpy as np

from training.figures import make_figure, save_figure
from training.log import read_rows

PER_RESIDUE = "nats per residue"
PER_PAIR = "nats per pair"
# (title, unit of the vertical axis, {key of metrics.jsonl: line style}). Style "~" is for noisy
# curves: pale, with a running mean. Style "level..." is for constants: a horizontal line. The unit
# of the loss depends on the kind of the run: loss_unit.
PANELS = (
    ("loss", PER_RESIDUE,
     {"loss": "~", "val/loss": "o-", "other/loss": "o--", "val/unigram": "level:",
      "val/exact": "level--"}),
    ("ranks of measured values", "Spearman's correlation",
     {"val/spearman": "o-", "spearman": "o--"}),
    ("rewards", "nats", {"val/rewards/chosen": "-", "val/rewards/rejected": "--"}),
    ("accuracy", "share of pairs", {"rewards/accuracies": "~", "val/rewards/accuracies": "o-"}),
    ("margin of the rewards", "nats", {"rewards/margins": "~", "val/rewards/margins": "o-"}),
    ("recovery of native sequences", "share of residues",
     {"val/recovery": "o-", "accuracy": "~", "val/accuracy": "o-", "other/accuracy": "o--"}),
    ("KL from the reference", "nats per residue", {"val/kl": "o-"}),
    ("learning rate", "", {"lr": "-"}),
    ("throughput", "residues per second", {"residues_per_second": "-"}),
    ("pairs", "pairs per second", {"pairs_per_second": "-"}),
    ("norm of the gradient", "", {"grad_norm": "~"}))
TECHNICAL = ("learning rate", "throughput", "pairs", "norm of the gradient")
SHORT = 50        # steps of a run, of which these say nothing
OF_PAIRS = "rewards/accuracies"    # end of keys that only DPO has
LABELS = {"spearman": "spearman (of the variants trained on)"}   # of keys that do not say it all
SMOOTHED = 200    # a curve of more points is drawn as means over neighbouring points


def draw(runs, path) -> None:
    """Draw {name: rows} into a PNG at `path`. Each of several runs has its own colour.

    Raises: ValueError if nothing can be drawn, ImportError without matplotlib."""
    panels = choose_panels(runs)
    if not panels:
        raise ValueError(f"{', '.join(runs)}: found none of the metrics that are drawn; expected "
                         "those of docs/metrics.md.")
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    lines = math.ceil(len(panels) / columns)
    for_names = 0.25 * math.ceil(len(runs) / columns)   # inches for the names of the runs
    figure = make_figure(figsize=(5.5 * columns, 3.2 * lines + for_names))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    colors = colors_for(len(runs))
    for (title, unit, styles), axis in zip(panels, axes.flat):
        _draw_panel(axis, styles, list(runs.values()), colors)
        if title == "loss":
            unit = loss_unit(list(runs.values()))
        axis.set(title=title, xlabel="step", ylabel=unit)
        if title in ("learning rate", "throughput", "pairs"):
            axis.set_ylim(bottom=0)
    if len(runs) > 1:
        _name_runs(figure, runs, colors, columns)
    save_figure(figure, path, dpi=110)


def choose_panels(runs) -> list[tuple]:
    """Those of PANELS that say something about {name: rows}."""
    are_short = max(rows[-1]["step"] for rows in runs.values()) < SHORT
    panels = []
    for title, unit, styles in PANELS:
        has_points = any(points(rows, key) for rows in runs.values() for key in styles)
        if has_points and not (are_short and title in TECHNICAL):
            panels.append((title, unit, styles))
    return panels


def loss_unit(runs) -> str:
    """What the loss of runs (of each its rows) is measured in: DPO counts pairs, not residues."""
    is_dpo = {any(key.endswith(OF_PAIRS) for row in rows for key in row) for rows in runs}
    if is_dpo == {True}:
        return PER_PAIR
    if is_dpo == {False}:
        return PER_RESIDUE
    return f"{PER_RESIDUE}; DPO: {PER_PAIR}"


class NothingLogged(ValueError):
    """A run folder without a row of metrics."""


def rows_of(folder) -> list[dict]:
    """The rows of a run's metrics.jsonl, to which val/unigram is added: nats from the perplexity.

    Raises: NothingLogged if there are none."""
    path = Path(folder) / "metrics.jsonl"
    rows = read_rows(path)
    if not rows:
        raise NothingLogged(f"{path} is missing or empty; expected the folder of a run that has "
                         "logged a step.")
    for row in rows:
        if row.get("val/unigram_perplexity"):
            row["val/unigram"] = math.log(row["val/unigram_perplexity"])
    return rows


def points(rows, key) -> list[list[float]]:
    """[[step, value]] of the rows that have `key`; long curves as means over neighbours."""
    known = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    size = len(known) // SMOOTHED + 1
    groups = [known[i:i + size] for i in range(0, len(known), size)]
    return [[sum(values) / len(values) for values in zip(*group)] for group in groups]


def running_mean(values) -> np.ndarray:
    """Means over a twentieth of a curve's points to either side, fewer at its ends."""
    window = np.ones(2 * (len(values) // 20) + 1)
    n_points = np.convolve(np.ones(len(values)), window, "same")
    return np.convolve(values, window, "same") / n_points


def colors_for(n):
    """n colours that differ, or a few more."""
    from matplotlib import colormaps
    colors = [f"C{number}" for number in range(10)]
    if n > len(colors):   # they would repeat
        colors = colormaps["turbo"](np.linspace(0, 1, n))
    return colors


def _draw_panel(axis, styles, runs, colors):
    """Draw the curves of one panel. styles: {key: line style}. runs: the rows of each run. A colour
    is a run's; with a single run, a curve's."""
    several = len(runs) > 1
    labels = set()    # keys in the legend, once for all runs
    for run_number, rows in enumerate(runs):
        curves = {key: points(rows, key) for key in styles}
        curves = {key: curve for key, curve in curves.items() if curve}
        for key_number, (key, curve) in enumerate(curves.items()):
            color = colors[run_number if several else key_number]
            _draw_curve(axis, key, styles[key], curve, color, with_label=key not in labels)
            labels.add(key)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if len(styles) > 1:    # which of them it is, also where there is one
        legend = axis.legend(fontsize="small")
        if several:
            for handle in legend.legend_handles:
                handle.set_color("black")


def _draw_curve(axis, key, style, curve, color, with_label):
    steps, values = zip(*curve)
    label = LABELS.get(key, key) if with_label else None
    if style.startswith("level"):
        axis.axhline(values[-1], linestyle=style.removeprefix("level"), color=color, label=label)
    elif style == "~":
        means = running_mean(values)
        if with_label and not np.array_equal(means, values):    # as of a short run
            label = f"{key} (running mean; pale: steps)"
        axis.plot(steps, values, color=color, alpha=0.3)
        axis.plot(steps, means, color=color, label=label)
    else:
        axis.plot(steps, values, style, color=color, markersize=3, label=label)


def _name_runs(figure, runs, colors, columns):
    """A legend above all panels: the colour and name of each run."""
    from matplotlib.lines import Line2D
    lines = [Line2D([], [], color=color) for color, _ in zip(colors, runs)]
    # A label that begins with "_" would be left out; "$" begins mathematics.
    names = [f" {name}".replace("$", r"\$") for name in runs]
    figure.legend(lines, names, loc="outside upper center", ncols=min(len(runs), columns))
