"""Does training with Intel's extension (IPEX) keep ranks equal and checkpoints plain? Two ranks on
CPU, gloo.

    ipex/bin/python tests/ipex_path.py        # in an environment made from requirements-ipex.txt

In no test suite, since IPEX 2.8, its last release, needs torch 2.8. Trains SEDD and ProteinMPNN
through ddp_setup.optimize_with_ipex and wrap_ddp for STEPS steps, with and without dtype=bfloat16,
in under a minute. Ranks start from different weights and see different data. Prints a row per case,
one of them without the broadcast, to show what it is for. Exit code 1 if ranks differ, a checkpoint
does not load into the plain model, or IPEX was not used. Writes nothing.
"""
import argparse
import contextlib
import copy
import io
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ddp_setup  # noqa: E402
from ddp_setup import (all_mean, all_sum, autocast, broadcast,  # noqa: E402
                       detect_launcher, optimize_with_ipex, print0, setup_ddp, wrap_ddp)
from run_script import add_launch_arguments, hand_over  # noqa: E402
from run_dir import check_in_sync  # noqa: E402
from proteinmpnn_model import ProteinMPNN  # noqa: E402
from sedd_model import SEDD  # noqa: E402

STEPS, LR = 20, 3e-3
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def make_sedd():
    """(model, f): f(model) is a mean loss in nats on this rank's data."""
    model = SEDD(22, 64, 2, 4, dropout=0.0, init_logits=1.0)
    xt, sigma = torch.randint(0, 22, (8, 40)), torch.rand(8) + 0.1
    target = (xt.flatten() + 1) % 20
    return model, lambda model: F.cross_entropy(model(xt, sigma).flatten(0, 1), target)


def make_proteinmpnn():
    model, L = ProteinMPNN(num_edges=8, hidden_size=32), 30
    walk = 3.8 * F.normalize(torch.randn(1, L, 3), dim=-1).cumsum(1)   # Angstrom
    X, one = walk[:, :, None] + torch.randn(1, L, 4, 3), torch.ones(1, L, dtype=torch.int64)
    graph = model.graph(X, one, torch.arange(L)[None], one)
    S, order = torch.randint(0, 20, (4, L)), torch.rand(4, L).argsort(-1)
    return model, lambda model: F.nll_loss(model(graph, S, order).flatten(0, 1), S.flatten())


def optimize(model, ddp, dtype=None, without_broadcast=False):
    """(model, optimizer, what was printed). without_broadcast: each rank keeps its own initial
    weights."""
    optimizer, printed = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), io.StringIO()
    skip = (mock.patch.object(ddp_setup, "broadcast") if without_broadcast else
            contextlib.nullcontext())
    with skip, contextlib.redirect_stdout(printed):
        return *optimize_with_ipex(model, optimizer, ddp, dtype), printed


def run_steps(model, optimizer, loss_of, compute, ddp, steps):
    """Mean loss over ranks, in nats, of each step."""
    losses = []
    for _ in range(steps):
        with autocast(compute, ddp):
            loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(all_mean(loss.item(), ddp))
    return losses


def spread(state, ddp):
    """Largest difference of a tensor in `state` from rank 0's, over all ranks."""
    largest = max((value - broadcast(value.clone(), ddp)).abs().max().item()
                  for value in state.values())
    return max(all_sum([largest * (r == ddp.rank) for r in range(ddp.world_size)], ddp))


def examine(make, compute, dtype, without_broadcast, ddp):
    """(row of the table, is it as it must be) of one case."""
    torch.manual_seed(100 + ddp.rank)   # other weights and other data on each rank
    given, loss_of = make()
    plain = copy.deepcopy(given)
    bare, optimizer, _ = optimize(given, ddp, dtype, without_broadcast)
    used, model = bare is not given, wrap_ddp(bare, ddp)
    losses = run_steps(model, optimizer, loss_of, compute, ddp, STEPS)
    in_sync = True
    with contextlib.suppress(RuntimeError):
        in_sync = False
        check_in_sync(model, ddp)
        in_sync = True
    state = bare.state_dict()
    apart = spread(state, ddp)
    form = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    loads = {name: (value.shape, value.dtype) for name, value in state.items()} == form
    with torch.no_grad(), autocast(compute, ddp):
        before = loss_of(bare).item()
        plain.load_state_dict(state, strict=False)
        change = abs(loss_of(plain).item() - before)   # both compute the same
    weights = "+".join(sorted({str(p.dtype)[6:] for p in bare.parameters()}))
    row = (f"{weights:17}{'yes' if in_sync else 'NO':5}{apart:<9.2g}{'yes' if loads else 'NO':7}"
           f"{change:<10.1g}{losses[0]:.3f} to {losses[-1]:.3f}"
           f"{'' if used else '  IPEX WAS NOT USED'}")
    if without_broadcast:
        return row, used and apart > 0
    good = used and in_sync and apart == 0 and loads and change < 0.02 and losses[-1] < losses[0]
    return row, good


def resumed(ddp):
    """Largest difference of the weights after STEPS steps: in one go, and with everything saved,
    made anew and loaded half way."""
    ends = []
    for parts in ([STEPS], [STEPS // 2, STEPS - STEPS // 2]):
        saved = None
        for steps in parts:
            torch.manual_seed(100 + ddp.rank)
            bare, loss_of = make_sedd()
            if saved:
                bare.load_state_dict(saved[0])
            bare, optimizer, _ = optimize(bare, ddp)
            if saved:
                optimizer.load_state_dict(saved[1])
            run_steps(wrap_ddp(bare, ddp), optimizer, loss_of, FLOAT32, ddp, steps)
            saved = copy.deepcopy((bare.state_dict(), optimizer.state_dict()))
        ends.append(saved[0])
    return max((a - b).abs().max().item() for a, b in zip(*(end.values() for end in ends)))


def falls_back(ddp):
    """(what was printed, did all ranks keep what they had) where IPEX refuses the model of the last
    rank alone."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters()) if ddp.rank < ddp.world_size - 1 else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        kept = optimize_with_ipex(model, optimizer, ddp, BFLOAT16)
    own = kept[0] is model and kept[1] is optimizer
    return printed.getvalue().strip(), all_sum(own, ddp) == ddp.world_size


def main(ddp):
    wrong = []
    print0(ddp, f"torch {torch.__version__}, {ddp.world_size} ranks, {STEPS} steps; apart: largest "
                f"difference of the ranks' state dicts;\nloads: state dict fits the plain model; "
                f"change: of its loss, in nats\n{'model':6}{'dtype=':9}{'autocast':9}{'weights':17}"
                f"sync {'apart':9}loads  {'change':10}loss")
    cases = [(name, make, compute, dtype, False)
             for name, make in (("SEDD", make_sedd), ("MPNN", make_proteinmpnn))
             for compute, dtype in ((FLOAT32, None), (BFLOAT16, None), (BFLOAT16, BFLOAT16))]
    cases.append(("SEDD", make_sedd, BFLOAT16, BFLOAT16, True))
    for name, make, compute, dtype, without in cases:
        row, good = examine(make, compute, dtype, without, ddp)
        wrong += [] if good else [f"{name} dtype={dtype} autocast {compute}"]
        note = ("without the broadcast of the initial weights, the ranks must differ:\n" if without
                else "")
        print0(ddp, f"{note}{name:6}{str(dtype)[6:] if dtype else '-':9}"
                    f"{'-' if compute == FLOAT32 else 'bfloat16':9}{row}")
    difference = resumed(ddp)
    print0(ddp, f"resumed after {STEPS // 2} steps, the weights differ from an uninterrupted run's "
                f"by {difference:g}")
    wrong += ["resume"] if all_sum(difference, ddp) else []
    printed, kept = falls_back(ddp)
    print0(ddp, f"where the last rank's IPEX refuses, all go on without: {printed}")
    told = not ddp.is_main or printed.count("\n") == 0 and "not used" in printed
    wrong += [] if kept and told else ["fall back"]
    print0(ddp, f"WRONG: {'; '.join(wrong)}" if wrong else "all as it must be")
    return bool(all_sum(len(wrong), ddp))


def cli(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_launch_arguments(parser)
    parser.set_defaults(device="cpu", ipex="on")
    args = parser.parse_args(argv)
    if detect_launcher(os.environ).world_size == 1 and args.nproc_per_node is None:
        args.nproc_per_node = 2
    hand_over(args, argv)
    warnings.filterwarnings("ignore", module="torch|intel_extension_for_pytorch")
    with setup_ddp(args.device, args.backend, ipex=args.ipex, quiet=True) as ddp:
        bad = main(ddp)
    sys.exit(bad)


if __name__ == "__main__":
    cli(sys.argv[1:])
