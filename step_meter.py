"""Where a step's time and memory go, and how large gradients and weights are, layer by layer.

A timed step (every monitoring.timing_every-th) is cut into parts, whose shares are logged:

    data       this rank waits for its micro-batches
    compute    forward and backward passes, up to the moment when the last gradient of this rank is
               there; DDP's all-reduce goes on beside the backward pass, and what of it is hidden
               behind that costs nothing
    exchange   what the step then waits for: the rest of the all-reduce, and the sum over ranks of
               counts and flags. The wait for slower ranks is in it
    optimizer  the rest: norm, clipping, optimizer (with Muon its exchange of weights), averages

All parts but the exchange are a rank's own time; the slowest rank is the one with most of it. On a
CPU the clock is read; on a device, events go into its queue and are read at the next report, so
that no step waits: time is what the device takes for a part, or stands idle in it. Nothing here
changes a result. A report on timed steps costs one small collective: every 50th step is timed by
default, so that such reports are few and a run of a minute has some.
"""
import contextlib
import itertools
import math
import sys
import time
from typing import NamedTuple

import torch

from ddp_setup import all_sum

PARTS = ("data", "compute", "exchange", "optimizer")
BINS = 64     # of a histogram


class StepMeter:
    """Measures steps from one report to the next, on every rank.

    Args:
        timing_every: steps from one timed step to the next; 0: none is timed.
        log_freq: steps from one measurement of the layers to the next.
        layers: of "gradients", "weights": what is measured by layer, on rank 0.
        with_histograms: whether histograms are made too.
        seen: names of the last entries of a step's sums. The rate is reported for the first name.
    """

    def __init__(self, ddp, timing_every=0, log_freq=1, layers=(), with_histograms=False,
                 seen=("items",)):
        self.ddp, self.timing_every, self.log_freq = ddp, timing_every, log_freq
        self.seen, self.reports = seen, 0
        self.layers = layers if ddp.is_main else ()
        self.with_histograms, self.laps = with_histograms, None
        self.restart()

    def restart(self):
        """What follows belongs to the next report."""
        self.since, self.steps, self.waited, self.count = time.perf_counter(), 0, 0.0, 0.0
        self.timed, self.norms, self.histograms = [], {}, {}

    def fetch(self, batches, number, step):
        """Begin step `step`: the next `number` micro-batches of the iterator `batches`."""
        self.step, begin = step, time.perf_counter()
        if self.timing_every and step % self.timing_every == 0:
            self.laps = [("", self._stamp())]     # (part, stamp of its end)
        fetched = [next(batches) for _ in range(number)]
        self.waited += time.perf_counter() - begin
        self.lap("data")
        return fetched

    def lap(self, part):
        """What was done since the last lap belongs to `part`, if this step is timed."""
        if self.laps is not None:
            self.laps.append((part, self._stamp()))

    @contextlib.contextmanager
    def passes(self, model):
        """Context for forward and backward pass of a micro-batch: laps "compute", "exchange"."""
        if self.laps is None:
            yield
            return
        last_gradient = None     # stamp of when it was added to a parameter's

        def gradient_is_there(parameter):
            nonlocal last_gradient
            last_gradient = self._stamp()

        hooks = [p.register_post_accumulate_grad_hook(gradient_is_there)
                 for p in model.parameters() if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.laps.append(("compute", last_gradient or self._stamp()))
        self.lap("exchange")

    def finish(self, sums):
        """End the step. sums: of Totals."""
        self.count = self.count + sums[-len(self.seen)]   # on the device
        self.lap("optimizer")
        if self.laps is not None:
            self.timed.append(self.laps)
        self.laps, self.steps = None, self.steps + 1

    def measure_layers(self, kind, model):
        """Norms, perhaps histograms, of the model's `kind` ("gradients", "weights") by layer.

        What this takes counts as no part of the step."""
        if kind not in self.layers or self.step % self.log_freq:
            return
        self.lap("optimizer")
        groups = {}
        for name, parameter in model.named_parameters():
            tensor = parameter.grad if kind == "gradients" else parameter.detach()
            if tensor is not None:
                groups.setdefault(layer_of(name), []).append(tensor)
        norms = torch.stack([torch.nn.utils.get_total_norm(tensors, foreach=True)
                             for tensors in groups.values()]).tolist()
        for (layer, tensors), norm in zip(groups.items(), norms):
            self.norms[f"{kind}/{layer}"] = norm
            if self.with_histograms and math.isfinite(norm):
                self.histograms[f"histograms/{kind}/{layer}"] = histogram_of(tensors)
        self.lap("")

    def report(self):
        """Metrics of the steps since the last report, by name. A collective where one was timed."""
        seconds = time.perf_counter() - self.since
        values = {"time/step": seconds / max(self.steps, 1), "data_wait": self.waited / seconds,
                  f"{self.seen[0]}_per_second": float(self.count) / seconds, **self.norms}
        self.reports += 1
        if not self.timed:
            return values
        steps = [seconds_by_part(laps) for laps in self.timed]
        own = [sum(step[part] for step in steps) for part in PARTS]
        table = torch.zeros(self.ddp.world_size, len(PARTS) + 2, dtype=torch.float64)
        table[self.ddp.rank] = torch.tensor([*own, peak_memory(self.ddp.device),
                                             utilization(self.ddp.device)])
        spent, memory, used = all_sum(table, self.ddp).split([len(PARTS), 1, 1], 1)
        shares = spent.sum(0) / spent.sum()
        values |= {f"time/{part}": float(share) for part, share in zip(PARTS, shares)}
        values |= {"memory/peak_gb_least": float(memory.min()),
                   "memory/peak_gb_most": float(memory.max())}
        if used.isfinite().any():
            values["device/utilization"] = float(used.nanmean())
        if self.ddp.world_size > 1:
            working = spent.sum(1) - spent[:, PARTS.index("exchange")]
            hosts = self.ddp.state.hosts
            slowest, largest = int(working.argmax()), int(memory.argmax())
            values |= {"time/slowest_rank": slowest, "time/slowest_host": hosts[slowest],
                       "time/slowest_ratio": float(working.max() / working.mean()),
                       "memory/most_host": hosts[largest]}
        return values

    def _stamp(self):
        if self.ddp.device.type == "cpu":
            return time.perf_counter()
        event = getattr(torch, self.ddp.device.type).Event(enable_timing=True)
        event.record()
        return event


def make_meter(config, ddp, seen):
    """The StepMeter of a run. seen: see there."""
    monitoring = config.monitoring
    layers = [kind for kind in ("gradients", "weights") if getattr(monitoring, f"log_{kind}")]
    has_tracker = monitoring.tensorboard or monitoring.wandb is not None
    return StepMeter(ddp, monitoring.timing_every, config.training.log_freq, layers, has_tracker,
                     seen)


def seconds_by_part(laps):
    """{part: seconds} of a timed step; under "" what belongs to none."""
    seconds = dict.fromkeys((*PARTS, ""), 0.0)
    for (_, begin), (part, end) in itertools.pairwise(laps):
        if isinstance(end, float):     # of a CPU's clock
            seconds[part] += end - begin
        else:
            end.synchronize()          # until the device has come to it
            seconds[part] += begin.elapsed_time(end) / 1000
    return seconds


def layer_of(name):
    """The layer of a parameter: blocks.0 of blocks.0.norm1.weight, W_out of W_out.bias."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdecimal() else first


class Histogram(NamedTuple):
    """Of all numbers of a layer. edges: of the bins, one more than counts."""
    counts: list
    edges: list
    total: float      # of the numbers
    squares: float    # of the numbers, summed


def histogram_of(tensors):
    """The Histogram of all numbers in some tensors, which are finite."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).float()
    low, high, total, squares = torch.stack([*flat.aminmax(), flat.sum(),
                                             flat.square().sum()]).tolist()
    if low == high:     # all numbers are alike, such as the zeros of fresh weights
        high = low + (abs(low) or 1.0)
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    return Histogram(torch.histc(flat, BINS, low, high).tolist(), edges.tolist(), total, squares)


def peak_memory(device):
    """Most memory, in GB, that tensors have taken on a device since the start; of a CPU, that this
    process has taken."""
    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated(device) / 1e9
    import resource
    unit = 1 if sys.platform == "darwin" else 1024     # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def utilization(device):
    """Share of the last moments in which a CUDA device computed; nan where that is not known.

    It needs the vendor's library (pynvml, amdsmi). That of XPUs would hold up a step for 0.1 s."""
    try:
        return torch.cuda.utilization(device) / 100 if device.type == "cuda" else math.nan
    except Exception:     # no library, no permission, an old driver: of many classes
        return math.nan
