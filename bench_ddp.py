"""What things cost on this machine; prints what it measured, writes nothing that stays.

    python bench_ddp.py save                                    # a checkpoint: write, check and read
    python bench_ddp.py save --folder /lus/flare/projects/X     # on that file system
    mpirun -n 4 python bench_ddp.py save configs/sedd_cpu.yaml  # load: read by rank 0 and sent to the others
"""
import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ddp_setup import add_launch_arguments, broadcast, load_checkpoint, print0, save_checkpoint, setup_ddp
from run_config import load_config
from sedd_diffusion import make_graph
from sedd_model import EMA, SEDD
from sequence_data import N_TOKENS, X_ID
from train_sedd_ddp import Config

CONFIGS = Path(__file__).with_name("configs")


def training_state(path):
    """(number of parameters, what a checkpoint of this config's run holds), after one optimizer step on the CPU."""
    c = load_config(Config, path)
    graph = make_graph(c.graph.type, N_TOKENS)
    model = SEDD(graph.vocab_size, c.model.hidden_size, c.model.n_blocks, c.model.n_heads, c.model.cond_dim,
                 forbidden=(X_ID,))
    optimizer, ema = torch.optim.AdamW(model.parameters(), fused=True), EMA(model.parameters(), c.optim.ema)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return sum(p.numel() for p in model.parameters()), dict(model=model.state_dict(), ema=ema.state_dict(),
                                                            optimizer=optimizer.state_dict(), step=1)


def seconds(function, repeats):
    """Median and spread (max - min) of the wall time of function()."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def bench_save(args, ddp):
    """Time to write a checkpoint (with fsync), and to check and read it; all ranks take part."""
    folder = broadcast(tempfile.mkdtemp(prefix="bench-", dir=args.folder) if ddp.is_main else None, ddp)
    print0(ddp, f"a checkpoint in {args.folder}, {ddp.world_size} rank(s), median of {args.repeats} (max - min)\n"
                f"{'config':<16}{'parameters':>12}{'MB':>8}{'write s':>16}{'read s':>16}{'every 15 min':>14}")
    try:
        for config in args.configs or sorted(CONFIGS.glob("sedd_*.yaml")):
            n, state = training_state(config)
            path = os.path.join(folder, "last.pt")
            write, write_spread = seconds(lambda: save_checkpoint(path, ddp, 2, **state), args.repeats)
            read, read_spread = seconds(lambda: load_checkpoint(path, ddp), args.repeats)
            size = broadcast(os.path.getsize(path) if ddp.is_main else None, ddp) / 1e6
            print0(ddp, f"{Path(config).stem[:15]:<16}{n / 1e6:>10.1f} M{size:>8.0f}{write:>9.2f} ({write_spread:.2f})"
                        f"{read:>9.2f} ({read_spread:.2f}){write / 900:>13.2%}")
    finally:
        if ddp.is_main:
            shutil.rmtree(folder)
    print0(ddp, "'every 15 min': the share of the time that saving takes. Training waits while it saves.")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("save",))
    parser.add_argument("configs", nargs="*", type=Path, help="default: all of configs/")
    parser.add_argument("--folder", default=".", help="where to write (and remove) checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    with setup_ddp(args.device, args.backend, ranks=args.ranks, init_timeout=args.init_timeout, quiet=True) as ddp:
        bench_save(args, ddp)


if __name__ == "__main__":
    main(sys.argv[1:])
