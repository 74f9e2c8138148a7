"""Time to write a checkpoint, and to check and read it.

    python -m bench save                                    # configs/sedd_*.yaml
    python -m bench save --folder /lus/flare/projects/X     # on that file system
    mpirun -n 4 python -m bench save configs/sedd_cpu.yaml  # rank 0 reads and sends to others
"""
import statistics
import time
from pathlib import Path

import torch

from bench.common import (CONFIGS, CommandParser, add_folder, check_folder, read_options,
                          run_on_ranks, shared_folder)
from ddp_setup import broadcast, load_checkpoint, print0, save_checkpoint
from sedd.diffusion import make_graph
from sedd.model import EMA
from proteins.letters import N_TOKENS
from training.config import load_config
from training.optimizer import make_optimizer
from train_sedd_ddp import Config, make_model

SAVE_PERIOD = 900           # assumed seconds between checkpoints, for the fraction of time to save


def bench_save(args, ddp):
    """Time to write a checkpoint (with fsync), and to check and read it; all ranks take part."""
    with shared_folder(args.folder, ddp) as folder:
        print0(ddp, f"a checkpoint in {args.folder}, {ddp.world_size} rank(s), median of "
                    f"{args.repeats} (max - min)\n{'config':<20}{'parameters':>12}{'MB':>8}"
                    f"{'write s':>16}{'read s':>16}{'every 15 min':>14}")
        path = folder / "last.pt"
        for config in args.configs or sorted(CONFIGS.glob("sedd_*.yaml")):
            n, state = training_state(config)
            write, write_spread = seconds(lambda: save_checkpoint(path, ddp, 2, **state),
                                          args.repeats)
            read, read_spread = seconds(lambda: load_checkpoint(path, ddp), args.repeats)
            size = broadcast(path.stat().st_size if ddp.is_main else None, ddp) / 1e6
            print0(ddp, f"{config.stem[:19]:<20}{n / 1e6:>10.1f} M{size:>8.0f}"
                        f"{write:>9.2f} ({write_spread:.2f}){read:>9.2f} ({read_spread:.2f})"
                        f"{write / SAVE_PERIOD:>13.2%}")
    print0(ddp, "read: just after writing, when the file may still be cached in memory; a later "
                "start takes longer.\n'every 15 min': fraction of the time for saving at that "
                "interval. Training waits while it saves.")


def training_state(path):
    """The state that a checkpoint of this config holds, after one optimizer step on the CPU.

    Returns: (number of parameters, state for save_checkpoint).
    """
    config = load_config(Config, path)
    model = make_model(config, make_graph(config.graph.type, N_TOKENS))
    optimizer = make_optimizer(model, config.optim.lr, config.optim)
    ema = EMA(model.parameters(), config.optim.ema)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return sum(parameter.numel() for parameter in model.parameters()), dict(
        model=model.state_dict(), ema=ema.state_dict(), optimizer=optimizer.state_dict(), step=1)


def seconds(function, repeats):
    """Median and spread (max - min) of the wall time of function()."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def main(argv):
    parser = CommandParser(prog="python -m bench save", allow_abbrev=False,
                           description=__doc__.split("\n")[0])
    parser.add_argument("configs", nargs="*", type=Path, help="default: configs/sedd_*.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    add_folder(parser)
    args = read_options(parser, argv)
    check_folder(parser, args.folder)
    run_on_ranks("save", bench_save, args, argv)
