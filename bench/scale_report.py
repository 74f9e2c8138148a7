"""Report of python -m bench scale: tables, a plot, and a prediction for more ranks.

In weak scaling the time of a step of N ranks is predicted (predict_step) as
    alone + sigma m(N) + X - min(overlap X, backward)
    X = 2 (N - 1) / N x bytes / bandwidth + messages x hops x latency
alone, sigma: median time of a step without communication ("exchange"), and its standard deviation
    over ranks; both of the largest measured number of ranks up to N, as ranks on a host share its
    memory and cores. If only one rank was measured, sigma is that over its steps
m(N): expected maximum of N standard normal numbers: all ranks wait for the slowest
X: time of communication. bytes: of all gradients
bandwidth, latency of a hop: from a line fitted to measured all-reduces
hops: 2 (N - 1) for a ring, as in gloo; 2 log2 N for trees, with any other backend
messages: DDP's buckets, plus the small all-reduce of counts
overlap: measured fraction of X that is hidden behind backward, which is 2/3 of compute

Critical batch: B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv 1812.06162). A step with
batch B makes 1 / (1 + B_simple / B) of the progress of a step along the exact gradient: one half at
B_simple, so that a larger batch can at most double it. B_simple grows as the loss falls.
"""
import math
import statistics
import textwrap
from typing import NamedTuple

import numpy as np

from training.files import write_whole

FEW_STEPS = 50      # after fewer steps of training, weights are still close to random
# Only launches that are equal in these are compared in a table.
ALIKE = ("what", "config", "overrides", "device", "dtype", "parameters", "train")


# ---------------------------------------------------------------- formulas
def noise_scale(small, big, n_small, n_big):
    """(tr(Sigma), |G|^2), unbiased, from squared gradient norms of batches of two sizes.

    McCandlish et al. 2018, appendix A.1. tr(Sigma): gradient noise of a batch of one.
    Args: small, big: squared norms, means over many batches. n_small, n_big: batch sizes (harmonic
        means if they vary).
    """
    return ((small - big) / (1 / n_small - 1 / n_big),
            (n_big * big - n_small * small) / (n_big - n_small))


class Link(NamedTuple):
    """Model of an all-reduce's time. latency: seconds per hop; bandwidth: bytes per second."""
    latency: float
    bandwidth: float
    ring: bool = False

    def hops(self, ranks):
        return 2 * (ranks - 1) if self.ring else 2 * math.log2(ranks)

    def seconds(self, ranks, size, messages=1):
        """Time of `messages` all-reduces that have `size` bytes in total."""
        return (messages * self.hops(ranks) * self.latency
                + 2 * (ranks - 1) / ranks * size / self.bandwidth)


def fit_link(ranks, all_reduces, ring):
    """Link fitted to [[bytes, seconds]]. It minimises relative errors, so short ones count too."""
    sizes, seconds = np.array(all_reduces).T
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    link = Link(0.0, 2 * (ranks - 1) / ranks / max(slope, 1e-15), ring)
    return link._replace(latency=max(start, 0.0) / link.hops(ranks))


def expected_maximum(n):
    """Expected maximum of n standard normal numbers, by Blom's formula (1958)."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def predict_step(alone, ranks, exchange, overlap):
    """Seconds of a step by the formula at the top of this file. alone: row of a measurement
    without exchange. exchange: X in seconds. overlap: fraction of X."""
    hidden = min(overlap * exchange, alone["parts"]["compute"] * 2 / 3)
    return alone["seconds"] + alone["sigma"] * expected_maximum(ranks) + exchange - hidden


# ---------------------------------------------------------------- what was measured
def merge(launches):
    """{ranks: launch} of the launches like the last one, with medians over repeats. "rows" becomes
    {(scaling, variant): row}; strong scaling keeps only the largest global batch."""
    launches = [launch for launch in launches if is_alike(launch, launches[-1])]
    backends = [launch["backend"] for launch in launches if launch["ranks"] > 1]
    groups = {}         # {ranks: launches}
    for launch in launches:
        if launch["ranks"] == 1 or launch["backend"] == backends[-1]:   # one rank has no backend
            groups.setdefault(launch["ranks"], []).append(launch)
    largest = max(launch["largest"] for group in groups.values() for launch in group)
    return {ranks: merge_group(group, largest) for ranks, group in sorted(groups.items())}


def is_alike(launch, other):
    return all(launch.get(key) == other.get(key) for key in ALIKE)


def merge_group(group, largest):
    """One launch from repeats of a number of ranks. largest: number of ranks whose global batch
    the rows of strong scaling have."""
    repeats = {}        # {(scaling, variant): rows}
    all_reduces = []
    for launch in group:
        all_reduces += launch["all_reduces"]
        for row in launch["rows"]:
            if row["scaling"] == "weak" or launch["largest"] == largest:
                repeats.setdefault((row["scaling"], row["variant"]), []).append(row)
    noises = [launch["noise"] for launch in group if launch["noise"]]
    return {**group[-1], "launches": len(group),
            "noise": median_of(noises) if noises else None,
            "rows": {key: median_of(rows) for key, rows in repeats.items()},
            "all_reduces": all_reduces}


def median_of(dicts):
    """Median of each number over dicts; texts and keys are those of the first."""
    medians = {}
    for key, first in dicts[0].items():
        values = [numbers[key] for numbers in dicts if key in numbers]   # older files have more
        if isinstance(first, str):
            medians[key] = first
        elif isinstance(first, dict):
            medians[key] = median_of(values)
        else:
            medians[key] = statistics.median(values)
    return medians


def find_alone(launches, scaling, ranks):
    """Row without exchange for the most measured ranks up to `ranks` (one rank never exchanges)."""
    ranks = max((n for n in launches if n <= ranks), default=min(launches))
    return launches[ranks]["rows"].get((scaling, "" if ranks == 1 else "alone"))


def add_efficiency(rows, launches):
    """Add to rows the speed-up over the fewest ranks, and its fraction of the ideal speed-up."""
    for row in rows:
        least = min(n for n in launches if (row["scaling"], "") in launches[n]["rows"])
        base = launches[least]["rows"][row["scaling"], ""]
        row["speed_up"] = row["batch"] / row["seconds"] / (base["batch"] / base["seconds"])
        row["efficiency"] = row["speed_up"] * least / row["ranks"]
    return rows


# ---------------------------------------------------------------- what is predicted
def predict(launches, args):
    """(rows for args.predict, {"scaling ranks": predicted / measured - 1}, text about the link).

    Raises: ValueError if the time of an all-reduce is neither measured nor given."""
    last = launches[max(launches)]
    measured = None
    if last["ranks"] > 1:
        measured = fit_link(last["ranks"], last["all_reduces"], last["backend"] == "gloo")
    if args.latency_us is not None:
        link = Link(args.latency_us / 1e6, args.bandwidth_gbs * 1e9)
        origin = "given"
    else:
        link = measured
        origin = "fitted"
    if link is None:
        raise ValueError("--predict: only one rank was measured, so the time of an all-reduce is "
                         "not known. Expected --ranks with 2 or more, or --latency_us and "
                         "--bandwidth_gbs.")

    def exchange(ranks, link):
        return link.seconds(ranks, last["gradient_bytes"], last["messages"])

    overlaps, errors = check_prediction(launches, lambda ranks: exchange(ranks, measured))
    overlap = statistics.median(overlaps.values() or [0.0])
    least = min(launches)
    per_rank = launches[least]["rows"]["weak", ""]["batch"] / least
    rows = []
    for n in args.predict:
        seconds = predict_step(find_alone(launches, "weak", n), n, exchange(n, link), overlap)
        rows.append(dict(scaling="weak", ranks=n, batch=per_rank * n, exchange=exchange(n, link),
                         seconds=seconds))
    return add_efficiency(rows, launches), errors, (
        f"{origin}: {link.latency * 1e6:,.1f} us a hop, "
        f"{link.bandwidth / 1e9:.3g} GB/s; overlap {overlap:.0%}")


def check_prediction(launches, exchange):
    """What the measured numbers of ranks tell about the prediction.

    Args: exchange: function of the number of ranks that gives X, by the measured link.
    Returns: ({(scaling, ranks): measured overlap}, {"scaling ranks": predicted / measured - 1},
        each predicted with the overlap of the other numbers of ranks).
    """
    points = {}         # {(scaling, ranks): row}
    for n, launch in launches.items():
        for scaling in ("weak", "strong"):
            if n > 1 and (scaling, "") in launch["rows"]:
                points[scaling, n] = launch["rows"][scaling, ""]
    overlaps = {}
    for (scaling, n), row in points.items():
        waited = row["seconds"] - predict_step(find_alone(launches, scaling, n), n, 0.0, 0.0)
        overlaps[scaling, n] = min(max(1 - waited / exchange(n), 0.0), 1.0)
    errors = {}
    for (scaling, n), row in points.items():
        others = [overlap for (_, other), overlap in overlaps.items() if other != n]
        step = predict_step(find_alone(launches, scaling, n), n, exchange(n),
                            statistics.median(others or [0.0]))
        errors[f"{scaling} {n}"] = step / row["seconds"] - 1
    return overlaps, errors


def critical_batch(launches):
    """B_simple in the unit of the batch, from the launch with the most ranks that measured it;
    None if none did, 0 if noise hides it."""
    noises = [launches[ranks]["noise"] for ranks in sorted(launches) if launches[ranks]["noise"]]
    if not noises:
        return None
    trace, square = noise_scale(**noises[-1])
    return trace / square if trace > 0 and square > 0 else 0


# ---------------------------------------------------------------- report
def report(launches, args):
    """Print the table and the prediction, draw args.plot. Returns a dict for the JSON file."""
    merged = merge(launches)
    rows = []
    for n, launch in merged.items():
        for row in launch["rows"].values():
            rows.append({"ranks": n, "memory_gb": launch["memory_gb"], **row})
    table = add_efficiency(rows, merged)
    table.sort(key=lambda row: (row["scaling"] == "strong", row["variant"], row["ranks"]))
    left_out = len(launches) - sum(launch["launches"] for launch in merged.values())
    if left_out:
        print(f"{left_out} of the file's launches are left out. They differ from the last one in "
              f"one of\n  {', '.join(ALIKE)}, backend")
    print_table(table, launches[-1])
    last = merged[max(merged)]
    if last["all_reduces"]:
        print_all_reduces(last)
    critical = critical_batch(merged)
    predicted = []
    errors = {}
    if args.predict:
        predicted, errors, text = predict(merged, args)
        print_prediction(predicted, errors, text, critical, merged)
    if args.plot:
        draw(table, predicted, args.plot)
        print(f"picture: {args.plot}")
    return dict(launches=launches, table=table, predicted=predicted, errors=errors,
                critical_batch=critical)


def print_table(table, last):
    """Print the measured rows. last: the launch that says what was measured."""
    unit = last["unit"]
    print(textwrap.fill(" ".join([f"{last['what']},", last["config"], *last["overrides"]]), 100))
    print(f"{last['parameters'] / 1e6:.2f} million parameters, {last['dtype']}, {last['device']}"
          f"{', one thread a rank' if last['device'] == 'cpu' else ''}; medians\n"
          f"{'':<18}{'':>6}{'batch':>9}{'step':>7}{'':>11}{'speed-':>7}{'effi-':>7}{'of':>6}"
          f"{'':>5}{'com-':>5}{'ex-':>7}{'opti-':>6}{'GB a':>6}\n{'':<18}{'ranks':>6}{unit:>9}"
          f"{'s':>7}{unit + '/s':>11}{'up':>7}{'ciency':>7}{'alone':>6}{'data':>5}{'pute':>5}"
          f"{'change':>7}{'mizer':>6}{'rank':>6}")
    for row in table:
        data, compute, exchange, optimizer = (f"{seconds / row['seconds']:.0%}"
                                              for seconds in row["parts"].values())
        print(f"{row['scaling'] + ' ' + row['variant']:<18}{row['ranks']:>6}{row['batch']:>9,.0f}"
              f"{row['seconds']:>7.3f}{row['batch'] / row['seconds']:>11,.0f}"
              f"{row['speed_up']:>7.2f}{row['efficiency']:>7.0%}{row['of_alone']:>6.2f}"
              f"{data:>5}{compute:>5}{exchange:>7}{optimizer:>6}{row['memory_gb']:>6.2f}")


def print_all_reduces(launch):
    """Print the time and the bus bandwidth of an all-reduce, for each size."""
    ranks = launch["ranks"]
    repeats = {}        # {bytes: seconds}
    for size, seconds in launch["all_reduces"]:
        repeats.setdefault(size, []).append(seconds)
    print(f"all-reduces of {ranks} ranks, {launch['backend']}, float32\n"
          f"{'KiB':>10}{'us':>12}{'bus GB/s':>12}")
    for size, found in sorted(repeats.items()):
        seconds = statistics.median(found)
        bus = 2 * (ranks - 1) / ranks * size / seconds
        print(f"{size / 1024:>10,.0f}{seconds * 1e6:>12,.0f}{bus / 1e9:>12.4f}")


def print_prediction(predicted, errors, text, critical, launches):
    """Print the predicted rows with their learning progress, and the critical batch."""
    found = ", ".join(f"{name}: {error:+.1%}" for name, error in errors.items())
    print(textwrap.fill(f"predicted, {text}. Check: each measured number of ranks, predicted with "
                        "the measured link and the overlap of the other numbers (none: 0), is off "
                        f"by: {found or '-'}", 100))
    least = min(launches)
    if launches[least].get("optimizer") == "muon":
        print("Muon: ranks share its work if all are on one host, else each does all of it: on "
              "several hosts\na step takes longer than predicted, by at most the optimizer part of "
              "'alone'.")
    unit = launches[least]["unit"]
    first = launches[least]["rows"]["weak", ""]
    print(f"{'ranks':>6}{'batch ' + unit:>17}{'step s':>10}{'exchange s':>12}{'speed-up':>10}"
          f"{'efficiency':>12}{'progress':>10}")
    for row in predicted:
        progress = "?"
        if critical:
            row["progress"] = (first["seconds"] * (1 + critical / first["batch"])
                               / row["seconds"] / (1 + critical / row["batch"]))
            progress = f"{row['progress']:.1f}"
        print(f"{row['ranks']:>6}{row['batch']:>17,.0f}{row['seconds']:>10.3f}"
              f"{row['exchange']:>12.4f}{row['speed_up']:>10.1f}{row['efficiency']:>12.0%}"
              f"{progress:>10}")
    if critical is None:
        print("critical batch: not measured; give --predict with --ranks.")
        return
    if not critical:
        print("critical batch: not found; the noise hides the gradient in so few batches. Take "
              "more --steps.")
        return
    if launches[least]["train"] < FEW_STEPS:
        print("The weights are nearly untrained, so the critical batch is small: see --train.")
    print(textwrap.fill(
        f"critical batch: B_simple = tr(Sigma)/|G|^2 = {critical:,.0f} {unit}, the batch of "
        f"{critical * least / first['batch']:,.2f} ranks, at the weights where it was measured; it "
        "grows in training. A step with this batch makes half of the progress of a step with the "
        "exact gradient, so larger batches, and more ranks, gain at most a factor of two "
        "(McCandlish et al. 2018, arXiv 1812.06162). progress: learning progress per second, "
        f"relative to {least} rank(s); below 1, more ranks learn more slowly.", 100))


def draw(table, predicted, path):
    """Speed-up, efficiency and parts of the step, as a PNG."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    speed, share, parts = figure.subplots(1, 3)
    plain = [row for row in table if row["variant"] == ""]
    weak = [row for row in plain if row["scaling"] == "weak"]
    strong = [row for row in plain if row["scaling"] == "strong"]
    for rows, style, label in ((weak, "oC0-", "weak"), (strong, "sC1-", "strong"),
                               (predicted, ".C0--", "weak, predicted")):
        if rows:
            ranks = [row["ranks"] for row in rows]
            speed.plot(ranks, [row["speed_up"] for row in rows], style, label=label)
            share.plot(ranks, [row["efficiency"] for row in rows], style, label=label)
    ranks = sorted({row["ranks"] for row in [*table, *predicted]})
    speed.loglog(ranks, [n / ranks[0] for n in ranks], ":", base=2, color="grey", label="ideal")
    share.plot([row["ranks"] for row in weak], [row["of_alone"] for row in weak], "^C2:",
               label="weak, of alone")
    share.semilogx(base=2)
    share.set_ylim(bottom=0)
    bottom = np.zeros(len(weak))
    for part in weak[0]["parts"]:
        heights = [row["parts"][part] for row in weak]
        parts.bar([str(row["ranks"]) for row in weak], heights, 0.6, bottom, label=part)
        bottom += heights
    for axis in (speed, share):
        axis.set_xticks(ranks, ranks)
    for axis, title, unit in ((speed, "speed-up", ""), (share, "efficiency", "share of ideal"),
                              (parts, "a step, weak", "seconds")):
        axis.set(title=title, xlabel="ranks", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(fontsize="small")
    write_whole(path, lambda file: figure.savefig(file, dpi=110, format="png"))
