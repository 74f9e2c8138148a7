"""How long steps take, and how large gradients and weights are, layer by layer.

    run.meter = make_meter(config, ddp, seen=("residues", "tokens"))
    values = step_values(run, norm, ddp)      # what every script logs of a step

Between two reports the clock is read, and the time in which this rank waits for its micro-batches
is added up. The time of an exchange of all gradients is measured once, at the start
(time_exchange). Nothing here changes a result.
"""
import math
import sys
import time

import torch
import torch.distributed as dist

from ddp_setup import all_sum

BUCKET = 25 * 2**20 // 4     # float32 gradients that DDP sums over ranks at a time: 25 MiB


class StepMeter:
    """Measures steps from one report to the next, on every rank.

    Args:
        seen: names of the last entries of a step's sums, whose throughput is reported.
        layers: what is measured layer by layer, on rank 0: "gradients", "weights", both or none.
        log_freq: steps from one measurement of the layers to the next.
    """

    def __init__(self, ddp, seen=(), layers=(), log_freq=1):
        self.ddp = ddp
        self.seen = seen
        self.layers = layers if ddp.is_main else ()
        self.log_freq = log_freq
        self.reports = 0
        self.exchange = None       # seconds, see time_exchange
        self.flops_of = None       # see count_flops
        self.peak = None
        self.restart()

    def restart(self):
        """Start to measure anew, for the next report."""
        self.since = time.perf_counter()
        self.steps = 0
        self.waited = 0.0      # seconds for micro-batches
        self.flops = 0.0       # of this rank
        self.counts = torch.zeros(len(self.seen), dtype=torch.float64)
        self.norms = {}

    def count_flops(self, flops_of, peak):
        """Report MFU from now on, the model FLOP utilisation: the FLOP that the formula of the
        model gives, divided by the time and by the rate of the device (Chowdhery et al. 2022,
        arXiv 2204.02311, appendix B).

        flops_of: function (micro-batch) -> FLOP of forward and backward pass. peak: FLOP/s of this
        rank's device."""
        self.flops_of = flops_of
        self.peak = peak

    def time_exchange(self, model):
        """Measure how long the ranks take to sum the gradients of a model and do nothing else. In a
        step they do so while backward still computes, which hides a part. A collective."""
        n = sum(p.numel() for p in model.parameters() if p.requires_grad)
        bucket = torch.zeros(min(n, BUCKET), device=self.ddp.device)
        n_buckets = math.ceil(n / len(bucket))
        dist.all_reduce(bucket)    # the first one is slower
        bucket[0].item()           # waits for it
        began = time.perf_counter()
        for _ in range(n_buckets):
            dist.all_reduce(bucket)
        bucket[0].item()
        self.exchange = (time.perf_counter() - began) * n / (n_buckets * len(bucket))

    def begin(self, step):
        """Step `step` begins: from now on this rank waits for its micro-batches."""
        self.step = step
        self.began = time.perf_counter()

    def have(self, micro_batches):
        """They are here: the wait ends."""
        self.waited += time.perf_counter() - self.began
        if self.flops_of is not None:
            self.flops += sum(map(self.flops_of, micro_batches))

    def measure_layers(self, kind, model):
        """Norms of the model's `kind` ("gradients", "weights") by layer."""
        if kind not in self.layers or self.step % self.log_freq:
            return
        groups = {}
        for name, parameter in model.named_parameters():
            tensor = parameter.grad if kind == "gradients" else parameter.detach()
            if tensor is not None:
                groups.setdefault(layer_of(name), []).append(tensor)
        norms = torch.stack([torch.nn.utils.get_total_norm(tensors, foreach=True)
                             for tensors in groups.values()]).tolist()
        for layer, norm in zip(groups, norms):
            self.norms[f"{kind}/{layer}"] = norm

    def finish(self, sums):
        """End the step. sums: of all ranks, see training.loop.Totals."""
        self.steps += 1
        if self.seen:
            self.counts += sums[-len(self.seen):].nan_to_num()

    def report(self):
        """Metrics of the steps since the last report, by name. A collective."""
        seconds = time.perf_counter() - self.since
        values = {"time/step": seconds / max(self.steps, 1), "data_wait": self.waited / seconds}
        for name, count in zip(self.seen, self.counts.tolist()):
            values[f"{name}_per_second"] = count / seconds
        if self.exchange is not None:
            values["time/exchange"] = self.exchange / values["time/step"]
        if self.flops_of is not None:
            values["mfu"] = self.flops / seconds / self.peak
        values.update(self.norms)
        values.update(self._compare_memory())
        self.reports += 1
        return values

    def _compare_memory(self):
        """Metrics of the peak memory of all ranks, by name. A collective."""
        memory = torch.zeros(self.ddp.world_size, dtype=torch.float64)
        memory[self.ddp.rank] = peak_memory(self.ddp.device)
        memory = all_sum(memory, self.ddp)
        values = {"memory/peak_gb_least": float(memory.min()),
                  "memory/peak_gb_most": float(memory.max())}
        if self.ddp.world_size > 1:
            values["memory/most_host"] = self.ddp.hosts[int(memory.argmax())]
        return values


def make_meter(config, ddp, seen) -> StepMeter:
    """The StepMeter of a run. seen: see StepMeter."""
    monitoring = config.monitoring
    layers = []
    if monitoring.log_gradients:
        layers.append("gradients")
    if monitoring.log_weights:
        layers.append("weights")
    return StepMeter(ddp, seen, layers, config.training.log_freq)


def step_values(run, norm, ddp) -> dict:
    """{name: value} that every script logs of a step. A collective."""
    first_row = run.meter.reports == 0   # of this start, which may have another number of ranks
    values = {"grad_norm": norm, "lr": run.optimizer.param_groups[0]["lr"],
              "epoch": (run.progress["step"] - 1) // run.steps_per_epoch}
    for name, number in run.progress["seen"].items():
        values[f"seen/{name}"] = number
    values.update(run.meter.report())
    if run.progress["bad_steps"][0]:
        values["bad_steps"] = run.progress["bad_steps"][0]
    if run.scaler.is_enabled():
        values["loss_scale"] = run.scaler.get_scale() * ddp.world_size   # see grad_scaler
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
