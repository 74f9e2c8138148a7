"""Run by test_ddp_launch.py under real launchers: `python ddp_ranks.py WHAT ...`; prints what rank 0 saw."""
import os
import sys
import time

import torch
from torch import nn

from ddp_setup import (all_mean, all_sum, barrier, broadcast, cleanup_ddp, gradient_sync, save_checkpoint, setup_ddp, stop_all,
                       unwrap_ddp, wrap_ddp)


def gradients(ddp, static_graph, accumulate):
    """Gradient of a mean over 8 items on all ranks, in one backward or in two micro-steps."""
    torch.manual_seed(7)
    model = wrap_ddp(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), ddp, static_graph=static_graph)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).chunk(ddp.world_size)[ddp.rank]
    out = []
    for _ in range(3):
        parts = x.chunk(2) if accumulate else [x]
        for k, part in enumerate(parts):
            with gradient_sync(model, last=k == len(parts) - 1):
                (model(part).square().sum() / len(x)).backward()
        out.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    return torch.stack(out), unwrap_ddp(model)


def collectives(ddp):
    r, n = ddp.rank, ddp.world_size
    assert all_sum([float(r), 1], ddp) == [n * (n - 1) / 2, n] and all_mean(r, ddp) == (n - 1) / 2
    mine = torch.full((3,), float(r))
    assert torch.equal(all_sum(mine, ddp), torch.full((3,), n * (n - 1) / 2)) and mine[0] == r
    assert broadcast({"x": [r, None, "é", 0.1]}, ddp, src=1) == {"x": [1, None, "é", 0.1]}
    assert torch.equal(broadcast(torch.full((2,), r), ddp), torch.zeros(2, dtype=torch.int64))
    assert setup_ddp() is ddp and os.environ["WORLD_SIZE"] == str(n) and os.environ["RANK"] == str(r)
    torch.manual_seed(ddp.seed)
    model = wrap_ddp(nn.Linear(3, 3), ddp)
    weight = unwrap_ddp(model).weight.detach()
    assert torch.equal(all_mean(weight, ddp), weight)
    draw = torch.rand(1)
    assert all_mean(draw, ddp) != draw, "every rank draws the same after wrap_ddp"
    plain, bare = gradients(ddp, False, False)
    for static_graph in (False, True):
        other, _ = gradients(ddp, static_graph, True)
        assert torch.allclose(plain, other, rtol=1e-5, atol=1e-7), (static_graph, (plain - other).abs().max())
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    one = torch.autograd.grad(bare(whole).square().sum() / 8, list(bare.parameters()))
    assert torch.allclose(plain[0], torch.cat([g.flatten() for g in one]), rtol=1e-5, atol=1e-7)
    save_checkpoint("good/a.pt", ddp, x=1)
    try:
        save_checkpoint("file/a.pt", ddp, x=1)   # a path under a regular file
        failed = False
    except RuntimeError as e:
        failed = "cannot write file/a.pt" in str(e)
    assert all_sum(int(failed), ddp) == n
    listening = []
    if r == 0:
        inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
        for table in ("tcp", "tcp6"):
            for row in open(f"/proc/net/{table}").read().splitlines()[1:]:
                row = row.split()
                if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                    listening.append(row[1].split(":")[0])
    if r == 0:
        print("listening", sorted(set(listening)), flush=True)


what = sys.argv[1]
before = dict(os.environ)
ddp = setup_ddp(seed=0, ranks=int(os.environ["TEST_RANKS"]) if "TEST_RANKS" in os.environ else None,
                init_timeout=float(os.environ.get("TEST_INIT", 300)))
if what == "collectives":
    collectives(ddp)
elif what == "late":
    if ddp.rank != 1:
        barrier(ddp, timeout=2)
    time.sleep(600)
elif what == "all":
    stop_all(ddp, "bad input: the same on every rank", 2)
elif what in ("in", "out"):
    barrier(ddp)
    if ddp.rank == 1:
        print("raising", time.time(), flush=True)
        raise ArithmeticError("planned failure")
    all_sum(1, ddp) if what == "in" else time.sleep(600)
cleanup_ddp(ddp)
cleanup_ddp(ddp)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
    assert os.environ.get(name) == before.get(name), f"cleanup_ddp left {name} changed"   # torch sets others itself
if ddp.is_main:
    print(f"all well on {ddp.world_size}", flush=True)
