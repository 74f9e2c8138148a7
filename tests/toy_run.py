"""A run of training/loop.py on a toy model, without files."""

import math
import types

import torch

from bench.speed import apply_gradient, compute_gradient
from ddp_setup import Ddp, wrap_ddp
from ddp_watch import watch_run
from sedd.model import EMA
from training.config import CommonMonitoring, CommonOptim, CommonTraining, DdpSection
from training.loop import (
    MicroBatchSampler,
    Run,
    after_step,
    next_micro_batches,
    open_batches,
    set_learning_rate,
)
from training.meter import make_meter
from training.optimizer import make_optimizer
from training.precision import grad_scaler
from training.resume import Start

WIDTH = 3


def loss_of(model, batch):
    """Squared error: (sum, [sum])."""
    loss = (model(batch["x"])[:, 0] - batch["y"]).square().sum()
    return loss, loss.detach().double()[None]


class Rows(torch.utils.data.Dataset):
    """(step, micro) -> 1 to 4 rows of x, y, drawn by the item; `scale` makes gradients large."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __getitem__(self, item):
        step, micro = item
        draw = torch.Generator().manual_seed(100 * step + micro)
        n = 1 + (step + micro) % 4
        return {"x": torch.randn(n, WIDTH, generator=draw), "seed": 0, "count": n,
                "y": self.scale * torch.randn(n, generator=draw)}


class Blocks(torch.nn.Module):
    """Two matrices in a block, which Muon updates, and others, which AdamW does."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.ModuleList([torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))])
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body[0](x))


def toy(n_iters=10, micro_batches=2, lr=0.5, warmup=0,  # noqa: PLR0913  (settings, by keyword)
        grad_clip=0.0, optimizer="sgd", ema=None, decay="none", decay_steps=None, min_lr=0.0,
        model=None, meter=None, ddp=Ddp(), **training):
    """A run with the toy model, or `model`. optimizer: sgd, adamw or muon; ema: decay."""
    torch.manual_seed(0)
    model = model or torch.nn.Linear(WIDTH, 1)
    optim = CommonOptim(name="muon" if optimizer == "muon" else "adamw", grad_clip=grad_clip,
                        decay=decay, decay_steps=decay_steps, min_lr=min_lr)
    optim.lr = lr
    optim.warmup = warmup
    config = types.SimpleNamespace(
        training=CommonTraining(accum=micro_batches, **training), optim=optim,
        monitoring=CommonMonitoring(check_sync_every=0), ddp=DdpSection())
    config.training.n_iters = n_iters
    wrapped = wrap_ddp(model, ddp)
    made = make_optimizer(model, lr, optim)
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    progress = Start(config, ddp).progress((), {}, n_iters)
    sampler = MicroBatchSampler(lambda *item: item, micro_batches, ddp, 0, n_iters)
    return Run(config=config, work_dir=None, continued_from=None, fingerprint={}, bare=model,
               model=wrapped, optimizer=made, scaler=grad_scaler(torch.float32, ddp),
               ema=ema and EMA(model.parameters(), ema), dtype=torch.float32, progress=progress,
               sampler=sampler, validation=None, n_iters=n_iters, steps_per_epoch=5,
               micro_batches=micro_batches, global_batch=4, lr=lr, warmup=warmup,
               meter=meter or make_meter(config, ddp, ()))


def take_step(run, batches, loss_of, watch, ddp):
    """A step in the halves of bench/speed.py, which are those of the scripts: test_loop.py compares
    them. Returns: (Totals, what after_step returns)."""
    set_learning_rate(run)
    totals = compute_gradient(run, next_micro_batches(run, batches), loss_of, watch, ddp)
    apply_gradient(run, totals)
    return totals, after_step(run, totals, watch, ddp)


def steps(run, n, scale=1.0, ddp=Ddp(), loss_of=loss_of):
    """Take n steps; yields (learning rate, norm of the gradient, how far the weights moved).

    loss_of: function (model, micro-batch)."""
    def loss(batch):
        return loss_of(run.model, batch)

    batches = open_batches(run, Rows(scale), loss, ddp)
    for _ in range(n):
        before = [p.detach().clone() for p in run.bare.parameters()]
        with watch_run(ddp, minutes=0) as watch:
            totals, _ = take_step(run, batches, loss, watch, ddp)
        moved = math.hypot(*(float((p.detach() - q).norm())
                             for p, q in zip(run.bare.parameters(), before)))
        yield run.optimizer.param_groups[0]["lr"], totals.norm, moved
