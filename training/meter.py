"""Where a step's time and memory go, and how large gradients and weights are, layer by layer.

A timed step (every monitoring.timing_every-th) is cut into parts, whose shares are logged:

    data       this rank waits for its micro-batches
    compute    forward and backward passes, until this rank has computed its last gradient. DDP's
               all-reduce overlaps with the backward pass, and the overlapping part costs no time
    exchange   what the step then waits for: the rest of the all-reduce, and the sums over ranks of
               counts (before the passes) and flags. It includes the wait for slower ranks
    optimizer  the rest: gradient norm, clipping, optimizer (with Muon its exchange of weights), EMA

All parts but the exchange are a rank's own time; the slowest rank is the one with most of it. On a
CPU the clock is read. On a device, events are put into its queue and read at the next report, so
that no step waits for the device: the time of a part includes the device's idle time in it. Nothing
here changes a result. A report on timed steps costs one small collective; by default every 50th
step is timed, so that such reports are few, but a run of a minute has some.
"""
import contextlib
import itertools
import sys
import time

import torch

from ddp_setup import all_sum

PARTS = ("data", "compute", "exchange", "optimizer")


class StepMeter:
    """Measures steps from one report to the next, on every rank.

    Args:
        timing_every: steps from one timed step to the next; 0: none is timed.
        log_freq: steps from one measurement of the layers to the next.
        layers: what is measured layer by layer, on rank 0: "gradients", "weights", both or none.
        seen: names of the last entries of a step's sums, whose throughput is reported.
    """

    def __init__(self, ddp, timing_every=0, log_freq=1, layers=(), seen=("items",)):
        self.ddp = ddp
        self.timing_every = timing_every
        self.log_freq = log_freq
        self.layers = layers if ddp.is_main else ()
        self.seen = seen
        self.reports = 0
        self.flops_of = None     # see count_flops
        self.peak = None
        self.laps = None    # of the step that is being timed: [(part, time stamp of its end)]
        self.restart()

    def restart(self):
        """Start to measure anew, for the next report."""
        self.since = time.perf_counter()
        self.steps = 0
        self.waited = 0.0      # seconds for micro-batches
        self.flops = 0.0       # of this rank
        self.counts = 0.0      # of what `seen` names
        self.timed = []        # laps of the timed steps
        self.norms = {}

    def count_flops(self, flops_of, peak):
        """Report MFU from now on. flops_of: function (micro-batch) -> FLOP of forward and backward
        pass; peak: FLOP/s of this rank's device, see training.peak."""
        self.flops_of = flops_of
        self.peak = peak

    def begin(self, step):
        """Step `step` begins: from now on this rank waits for its micro-batches."""
        self.step = step
        self.began = time.perf_counter()
        if self.timing_every and step % self.timing_every == 0:
            self.laps = [("", self._stamp())]

    def have(self, micro_batches):
        """They are here: the wait ends."""
        self.waited += time.perf_counter() - self.began
        if self.flops_of is not None:
            self.flops += sum(map(self.flops_of, micro_batches))
        self.lap("data")

    def lap(self, part):
        """Count the time since the last lap as `part`, if this step is timed."""
        if self.laps is not None:
            self.laps.append((part, self._stamp()))

    @contextlib.contextmanager
    def passes(self, model):
        """Context for forward and backward pass of a micro-batch: laps "compute", "exchange"."""
        if self.laps is None:
            yield
            return
        last_gradient = None     # time stamp of the last parameter's gradient

        def stamp_gradient(parameter):
            nonlocal last_gradient
            last_gradient = self._stamp()

        hooks = [p.register_post_accumulate_grad_hook(stamp_gradient)
                 for p in model.parameters() if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.laps.append(("compute", last_gradient or self._stamp()))
        self.lap("exchange")

    def finish(self, sums):
        """End the step. sums: see training.loop.Totals."""
        self.counts = self.counts + sums[-len(self.seen):]   # on the device
        self.lap("optimizer")
        if self.laps is not None:
            self.timed.append(self.laps)
        self.laps = None
        self.steps += 1

    def measure_layers(self, kind, model):
        """Norms of the model's `kind` ("gradients", "weights") by layer.

        The time of this is not counted in any part of the step."""
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
        for layer, norm in zip(groups, norms):
            self.norms[f"{kind}/{layer}"] = norm
        self.lap("")

    def report(self):
        """Metrics of the steps since the last report, by name. Collective if a step was timed."""
        seconds = time.perf_counter() - self.since
        values = {"time/step": seconds / max(self.steps, 1), "data_wait": self.waited / seconds}
        counts = torch.as_tensor(self.counts).expand(len(self.seen)).tolist()
        for name, count in zip(self.seen, counts):
            values[f"{name}_per_second"] = count / seconds
        if self.flops_of is not None:
            values["mfu"] = self.flops / seconds / self.peak
        values.update(self.norms)
        self.reports += 1
        if self.timed:
            values.update(self._compare_ranks())
        return values

    def _compare_ranks(self):
        """Metrics that need the timed steps of all ranks, by name. A collective."""
        steps = [seconds_by_part(laps) for laps in self.timed]
        own = [sum(step[part] for step in steps) for part in PARTS]
        table = torch.zeros(self.ddp.world_size, len(PARTS) + 1, dtype=torch.float64)
        table[self.ddp.rank] = torch.tensor([*own, peak_memory(self.ddp.device)])
        spent, memory = all_sum(table, self.ddp).split([len(PARTS), 1], 1)
        shares = spent.sum(0) / spent.sum()
        values = {f"time/{part}": float(share) for part, share in zip(PARTS, shares)}
        values["memory/peak_gb_least"] = float(memory.min())
        values["memory/peak_gb_most"] = float(memory.max())
        if self.ddp.world_size > 1:
            hosts = self.ddp.hosts
            working = spent.sum(1) - spent[:, PARTS.index("exchange")]
            slowest = int(working.argmax())
            values["time/slowest_rank"] = slowest
            values["time/slowest_host"] = hosts[slowest]
            values["time/slowest_ratio"] = float(working.max() / working.mean())
            values["memory/most_host"] = hosts[int(memory.argmax())]
        return values

    def _stamp(self):
        if self.ddp.device.type == "cpu":
            return time.perf_counter()
        event = getattr(torch, self.ddp.device.type).Event(enable_timing=True)
        event.record()
        return event


def make_meter(config, ddp, seen) -> StepMeter:
    """The StepMeter of a run. seen: see StepMeter."""
    monitoring = config.monitoring
    layers = []
    if monitoring.log_gradients:
        layers.append("gradients")
    if monitoring.log_weights:
        layers.append("weights")
    return StepMeter(ddp, monitoring.timing_every, config.training.log_freq, layers, seen)


def step_values(run, norm, ddp) -> dict:
    """{name: value} that every script logs of a step. Can be a collective: see StepMeter.report."""
    first_row = run.meter.reports == 0   # of this start, which may have another number of ranks
    values = {"grad_norm": float(norm), "lr": run.optimizer.param_groups[0]["lr"],
              "epoch": (run.progress["step"] - 1) // run.steps_per_epoch}
    for name, number in run.progress["seen"].items():
        values[f"seen/{name}"] = number
    values.update(run.meter.report())
    if run.progress["bad_steps"][0]:
        values["bad_steps"] = run.progress["bad_steps"][0]
    if run.scaler.is_enabled():
        values["loss_scale"] = run.scaler.get_scale()
    if first_row:
        values["ddp/world_size"] = ddp.world_size
        values["ddp/effective_batch_size"] = run.global_batch
        values["ddp/scaled_lr"] = run.lr
        values["ddp/scaled_warmup"] = run.warmup
    return values


def bad_steps_field(run) -> dict:
    """For RunLog.progress: the number of bad steps, if there were any."""
    bad_steps, _ = run.progress["bad_steps"]
    return {"bad steps": bad_steps} if bad_steps else {}


def seconds_by_part(laps) -> dict[str, float]:
    """{part: seconds} of a timed step; "" is for time that belongs to no part."""
    seconds = dict.fromkeys((*PARTS, ""), 0.0)
    for (_, begin), (part, end) in itertools.pairwise(laps):
        if isinstance(end, float):     # from the clock, on a CPU
            seconds[part] += end - begin
        else:
            end.synchronize()          # waits until the device has reached it
            seconds[part] += begin.elapsed_time(end) / 1000
    return seconds


def layer_of(name) -> str:
    """The layer of a parameter: blocks.0 of blocks.0.norm1.weight, W_out of W_out.bias."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdecimal() else first


def peak_memory(device) -> float:
    """Peak memory since the start in GB: of tensors on a device, or, for a CPU, of this process."""
    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated(device) / 1e9
    import resource
    unit = 1 if sys.platform == "darwin" else 1024     # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
