"""What bench_ddp.py scale measured: a table and a picture, and what more ranks would do.

The weak step of N ranks is predicted (predict_step) as
    alone + sigma m(N) + X - min(overlap X, backward)
    X = 2 (N - 1) / N x bytes / bandwidth + messages x hops x latency
alone, sigma: seconds of a step without exchange and their spread over ranks, at the largest
    measured number of ranks up to N: neighbours on a host share its memory and its cores. Where
    one rank alone was measured, sigma is that over its steps, which differ in work as ranks do not
m(N): expected maximum of N standard normal numbers, which grows as sqrt(2 ln N): all wait for the
    slowest rank
bandwidth, latency of a hop: of a line through measured all-reduces. bytes: of all gradients
hops: 2 (N - 1) of a ring, such as gloo's; 2 log2 N of trees, where the backend is another
messages: DDP's buckets, and the small all-reduce of counts
overlap: share of X that steps do not wait for, as measured; backward: 2/3 of compute, at most

Critical batch: B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv 1812.06162). A step on a
batch B makes 1 / (1 + B_simple / B) of the progress of a step along the exact gradient: at B_simple
a half, so that all that is added beyond at most doubles it. It grows as the loss falls.
"""
import math
import statistics
import textwrap
from typing import NamedTuple

import numpy as np

from run_log import write_whole

FEW_STEPS = 50      # of training: the weights are still nearly fresh
# Of launches that are compared; what the ranks are is compared too.
ALIKE = ("what", "config", "overrides", "device", "dtype", "parameters", "train")


# ---------------------------------------------------------------- formulas
def noise_scale(small, big, n_small, n_big):
    """(tr(Sigma), |G|^2), unbiased, from squared norms of the gradients of two sizes of batches.

    McCandlish et al. 2018, appendix A.1. tr(Sigma): noise of the gradient of a batch of one.
    Args: small, big: means over many batches. n_small, n_big: their sizes; of sizes that differ,
        the harmonic means.
    """
    return ((small - big) / (1 / n_small - 1 / n_big),
            (n_big * big - n_small * small) / (n_big - n_small))


class Link(NamedTuple):
    """What an all-reduce takes. latency: seconds of a hop; bandwidth: bytes per second."""
    latency: float
    bandwidth: float
    ring: bool = False

    def hops(self, ranks):
        return 2 * (ranks - 1) if self.ring else 2 * math.log2(ranks)

    def seconds(self, ranks, size, messages=1):
        """Of `messages` all-reduces of `size` bytes together."""
        return (messages * self.hops(ranks) * self.latency
                + 2 * (ranks - 1) / ranks * size / self.bandwidth)


def fit_link(ranks, all_reduces, ring):
    """The Link of [[bytes, seconds]]: relative errors are smallest, so that short ones count."""
    sizes, seconds = np.array(all_reduces).T
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    link = Link(0.0, 2 * (ranks - 1) / ranks / max(slope, 1e-15), ring)
    return link._replace(latency=max(start, 0.0) / link.hops(ranks))


def expected_maximum(n):
    """Of n standard normal numbers, by Blom's formula (1958)."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def predict_step(alone, ranks, exchange, overlap):
    """Seconds of a step, see the head of this file. alone: row of what a rank does without
    exchange. exchange: X, seconds. overlap: share of it."""
    hidden = min(overlap * exchange, alone["parts"]["compute"] * 2 / 3)
    return alone["seconds"] + alone["sigma"] * expected_maximum(ranks) + exchange - hidden


# ---------------------------------------------------------------- what was measured
def merge(launches):
    """{ranks: launch} of those like the last one; of several, medians. "rows": {(scaling,
    variant): row}, strong ones of the largest global batch alone."""
    alike, merged = {}, {}
    for launch in launches:
        if all(launch.get(key) == launches[-1].get(key) for key in ALIKE):
            alike.setdefault(launch["ranks"], []).append(launch)
    largest = max(launch["largest"] for group in alike.values() for launch in group)
    for ranks, group in sorted(alike.items()):
        rows = {}
        for launch in group:
            for row in launch["rows"]:
                if row["scaling"] == "weak" or launch["largest"] == largest:
                    rows.setdefault((row["scaling"], row["variant"]), []).append(row)
        noises = [launch["noise"] for launch in group if launch["noise"]]
        merged[ranks] = {**group[-1], "launches": len(group),
                         "noise": median_of(noises) if noises else None,
                         "rows": {key: median_of(repeats) for key, repeats in rows.items()},
                         "all_reduces": sum((launch["all_reduces"] for launch in group), [])}
    return merged


def median_of(dicts):
    """Of each number in dicts with the same keys; texts are those of the first."""
    medians = {}
    for key, first in dicts[0].items():
        values = [numbers[key] for numbers in dicts]
        if isinstance(first, str):
            medians[key] = first
        else:
            medians[key] = (median_of if isinstance(first, dict) else statistics.median)(values)
    return medians


def find_alone(launches, scaling, ranks):
    """The row without exchange of the largest number of ranks up to `ranks`; one rank has none."""
    ranks = max((n for n in launches if n <= ranks), default=min(launches))
    return launches[ranks]["rows"].get((scaling, "" if ranks == 1 else "alone"))


def add_efficiency(rows, launches):
    """Speed-up over the fewest ranks with this scaling, and its share of the ideal one."""
    for row in rows:
        least = min(n for n in launches if (row["scaling"], "") in launches[n]["rows"])
        base = launches[least]["rows"][row["scaling"], ""]
        row["speed_up"] = row["batch"] / row["seconds"] / (base["batch"] / base["seconds"])
        row["efficiency"] = row["speed_up"] * least / row["ranks"]
    return rows


# ---------------------------------------------------------------- what is predicted
def predict(launches, args):
    """(rows for args.predict, {"scaling ranks": predicted / measured - 1}, text on the link).

    Raises: ValueError where nothing says what an all-reduce takes."""
    last, given, measured, overlaps = launches[max(launches)], None, None, {}
    if args.latency_us is not None:
        given = Link(args.latency_us / 1e6, args.bandwidth_gbs * 1e9)
    if last["ranks"] > 1:
        measured = fit_link(last["ranks"], last["all_reduces"], last["backend"] == "gloo")
    link = given or measured
    if link is None:
        raise ValueError("--predict: one rank alone was measured, which does not say what an "
                         "all-reduce takes. Expected --ranks with 2 or more, or --latency_us and "
                         "--bandwidth_gbs.")

    def exchange(ranks, link):
        return link.seconds(ranks, last["gradient_bytes"], last["messages"])

    points = {(scaling, n): launch["rows"][scaling, ""] for n, launch in launches.items() if n > 1
              for scaling in ("weak", "strong") if (scaling, "") in launch["rows"]}
    for (scaling, n), row in points.items():
        waited = row["seconds"] - predict_step(find_alone(launches, scaling, n), n, 0.0, 0.0)
        overlaps[scaling, n] = min(max(1 - waited / exchange(n, measured), 0.0), 1.0)
    errors = {}
    for (scaling, n), row in points.items():
        others = [overlap for (_, other), overlap in overlaps.items() if other != n]
        step = predict_step(find_alone(launches, scaling, n), n, exchange(n, measured),
                            statistics.median(others or [0.0]))
        errors[f"{scaling} {n}"] = step / row["seconds"] - 1
    overlap = statistics.median(overlaps.values() or [0.0])
    per_rank = launches[min(launches)]["rows"]["weak", ""]["batch"] / min(launches)
    rows = [dict(scaling="weak", ranks=n, batch=per_rank * n, exchange=exchange(n, link),
                 seconds=predict_step(find_alone(launches, "weak", n), n, exchange(n, link),
                                      overlap)) for n in args.predict]
    return add_efficiency(rows, launches), errors, (
        f"{'given' if given else 'fitted'}: {link.latency * 1e6:,.1f} us a hop, "
        f"{link.bandwidth / 1e9:.3g} GB/s; overlap {overlap:.0%}")


def critical_batch(launches):
    """B_simple in the unit of the batch, of the most ranks that measured it; None where none did,
    0 where noise hides it."""
    noises = [launches[ranks]["noise"] for ranks in sorted(launches) if launches[ranks]["noise"]]
    if not noises:
        return None
    trace, square = noise_scale(**noises[-1])
    return trace / square if trace > 0 and square > 0 else 0


# ---------------------------------------------------------------- report
def report(launches, args):
    """Print the table and the prediction, draw args.plot. Returns a dict for the JSON file."""
    last, merged = launches[-1], merge(launches)
    table = add_efficiency([{"ranks": n, "memory_gb": launch["memory_gb"], **row}
                            for n, launch in merged.items() for row in launch["rows"].values()],
                           merged)
    table.sort(key=lambda row: (row["scaling"] == "strong", row["variant"], row["ranks"]))
    unit = last["unit"]
    if left_out := len(launches) - sum(launch["launches"] for launch in merged.values()):
        print(f"{left_out} of the file's launches are left out. They differ from the last one in "
              f"one of\n  {', '.join(ALIKE)}")
    print(textwrap.fill(" ".join([f"{last['what']},", last["config"], *last["overrides"]]), 100))
    print(f"{last['parameters'] / 1e6:.2f} million parameters, {last['dtype']}, {last['device']}"
          f"{', one thread a rank' * (last['device'] == 'cpu')}; medians\n"
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
    predicted, errors, critical = [], {}, critical_batch(merged)
    if args.predict:
        predicted, errors, text = predict(merged, args)
        print_prediction(predicted, errors, text, critical, merged)
    if args.plot:
        draw(table, predicted, args.plot)
        print(f"picture: {args.plot}")
    return dict(launches=launches, table=table, predicted=predicted, errors=errors,
                critical_batch=critical)


def print_prediction(predicted, errors, text, critical, launches):
    """Print the predicted rows, with the progress that they buy, and the critical batch."""
    found = ", ".join(f"{name}: {error:+.1%}" for name, error in errors.items())
    print(textwrap.fill(f"predicted, {text}. Check: each measured number of ranks, predicted with "
                        "the measured link and the overlap of the other numbers (none: 0), is off "
                        f"by: {found or '-'}", 100))
    least = min(launches)
    if launches[least].get("optimizer") == "muon":
        print("Muon: ranks that are all on one host share its work, others do all of it: over "
              "several hosts\na step takes longer than predicted, by at most the optimizer part of "
              "'alone'.")
    unit, first = launches[least]["unit"], launches[least]["rows"]["weak", ""]
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
        print("These are fresh weights, whose critical batch is small: see --train.")
    print(textwrap.fill(
        f"critical batch: B_simple = tr(Sigma)/|G|^2 = {critical:,.0f} {unit}, that of "
        f"{critical * least / first['batch']:,.2f} ranks, at the weights where it was measured; it "
        "grows in training. A step of it makes half of an exact gradient's progress, and what is "
        "added beyond at most doubles that: more ranks then buy little (McCandlish et al. 2018, "
        f"arXiv 1812.06162). progress: what is learned per second, over that of {least} "
        "rank(s); below 1 more ranks learn more slowly.", 100))


def draw(table, predicted, path):
    """Speed-up, efficiency and parts of the step, as a PNG."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (speed, share, parts) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    weak, strong = ([row for row in table if (row["scaling"], row["variant"]) == (scaling, "")]
                    for scaling in ("weak", "strong"))
    for rows, style, label in ((weak, "oC0-", "weak"), (strong, "sC1-", "strong"),
                               (predicted, ".C0--", "weak, predicted")):
        for axis, key in ((speed, "speed_up"), (share, "efficiency")):
            if rows:
                axis.plot([row["ranks"] for row in rows], [row[key] for row in rows], style,
                          label=label)
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
    try:
        write_whole(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    finally:
        pyplot.close(figure)
