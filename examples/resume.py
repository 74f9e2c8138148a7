"""A training that goes on after an interruption as if there had been none, to the last bit.

    python examples/resume.py                    # or mpirun -n 2 python ..., srun, torchrun
    touch runs/resume/STOP                       # or Ctrl-C, kill: it saves, and ends with code 75
    rm runs/resume/STOP; python examples/resume.py            # goes on; on the same number of ranks

To use it elsewhere, copy it with ddp_setup.py, ddp_watch.py and ddp_guard.py, and replace the data,
the model and the loss.
"""
import argparse
import sys
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))     # ddp_setup.py, if it is not here
if __name__ == "__main__":      # before `import torch`
    import ddp_guard
    ddp_guard.supervise()       # a parent process, which speaks if this one is killed or hangs

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_setup import (
    STOPPED,
    broadcast,
    ddp_sampler,
    load_checkpoint,
    print0,
    save_checkpoint,
    seed_for,
    setup_ddp,
    unwrap_ddp,
    wrap_ddp,
)
from ddp_watch import watch_run

EPOCHS = 4
SAVE_EVERY = 10     # steps


def main(ddp, watch, run_dir):
    points = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))    # your data
    data = TensorDataset(points, points.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1),
                                torch.nn.Linear(64, 1))
    model = wrap_ddp(model.to(ddp.device), ddp)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ddp_sampler(data, ddp)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    step = 0
    path = Path(run_dir, "checkpoints", "last.pt")
    if broadcast(path.exists(), ddp):       # as rank 0 sees it: all ranks do the same
        state = load_checkpoint(path, ddp)
        watch.saved(path, state["step"])
        if state["ranks"] != ddp.world_size:    # an epoch has other batches
            raise ValueError(f"{path} was saved by {state['ranks']} ranks, and this run has "
                             f"{ddp.world_size}: start {state['ranks']}.")
        unwrap_ddp(model).load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
        step = state["step"]
        print0(ddp, f"goes on after step {step}")
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)            # its order
        for x, y in islice(loader, step % len(loader), None):   # without what is done of the epoch
            step += 1
            torch.manual_seed(seed_for(0, step, ddp.rank))      # of the dropout in this step
            loss = torch.nn.functional.mse_loss(model(x.to(ddp.device)), y.to(ddp.device))
            optim.zero_grad()
            loss.backward()
            optim.step()
            reason = watch.stop_reason(step)                    # the same on all ranks
            is_last = step == EPOCHS * len(loader)
            if reason or is_last or step % SAVE_EVERY == 0:
                save_checkpoint(path, ddp, model=unwrap_ddp(model).state_dict(),
                                optim=optim.state_dict(), step=step, ranks=ddp.world_size)
                watch.saved(path, step)
                print0(ddp, f"step {step}  loss {loss.item():.4f}  saved")
            if is_last:
                watch.reason = "finished"       # also if a stop was asked for in this step
            elif reason:
                print0(ddp, f"stops: {reason}")
                sys.exit(STOPPED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()      # the two options that the job scripts give
    parser.add_argument("--work_dir", default="runs/resume")
    parser.add_argument("--config", help="not read here")
    run_dir = parser.parse_args().work_dir
    # NCCL's own limit of a collective is 10 minutes, and names nobody; the watch's is 20.
    with setup_ddp(seed=0, timeout=3600) as ddp, watch_run(ddp, run_dir, minutes=20) as watch:
        main(ddp, watch, run_dir)
