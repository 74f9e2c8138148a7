"""Gradients of accumulated micro-batches on these ranks, of train_sedd_ddp.py's loss.

    torchrun --nproc_per_node=2 accumulate_gradients.py FASTA OUT

Writes OUT, a dict {name of a setting: list over two steps of {parameter: gradient}}, from rank 0.
Imported, it also gives the reference: one backward of sum / count over the whole global batch, in
one process.
"""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ddp_setup import cleanup_ddp, grad_scaler, setup_ddp, wrap_ddp  # noqa: E402
from sedd_diffusion import make_graph, make_noise, score_entropy_loss  # noqa: E402
from sedd_model import SEDD  # noqa: E402
from sequence_data import N_TOKENS, X_ID, read_sequences  # noqa: E402
from train_loop import MicroBatchSampler, global_gradient  # noqa: E402
from train_sedd_ddp import Config, MicroBatches, make_reader, micro_batch_loss  # noqa: E402

MAX_LENGTH, NOMINAL = 50, 123.0
SETTINGS = {f"{dtype} {reduction} {micro} micro-batches{' static graph' if static else ''}":
            dict(dtype=dtype, reduction=reduction, micro=micro, static=static)
            for dtype, reduction, micro, static in itertools.product(
                ("float64", "float32"), ("residue", "sequence"), (4, 8), (False, True))}


def build(proteins, ddp, dtype, reduction, micro, static, dropout=0.1):
    """(model with no zero gradient, dataset, schedule, graph, config, reader)."""
    config = Config()
    config.training.batch_size, config.training.seed = 3, 5
    config.loss.reduction, config.model.dropout = reduction, dropout
    config.data.max_length = MAX_LENGTH
    graph, noise = make_graph("absorb", N_TOKENS), make_noise("loglinear")
    torch.manual_seed(0)
    model = SEDD(graph.vocab_size, 32, 2, 2, 16, dropout, forbidden=(X_ID,))
    model = model.to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():   # a fresh model has zeros in places, and zero gradients behind them
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    reader = make_reader(config, proteins, micro, ddp)
    return (model, MicroBatches(graph, noise, MAX_LENGTH, micro, config.training.seed),
            MicroBatchSampler(reader.item_of, micro, ddp, 0, 2), graph, config, reader)


def accumulated(proteins, ddp, static, **setting):
    """What accumulate leaves in .grad in two steps."""
    model, dataset, schedule, graph, config, _ = build(proteins, ddp, static=static, **setting)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, graph, config, ddp, torch.float32)

    wrapped, items, out = wrap_ddp(model, ddp, static_graph=static), iter(schedule), []
    for _ in range(2):
        batches = [dataset[next(items)] for _ in schedule.mine]
        global_gradient(wrapped, batches, loss_of, ddp, NOMINAL, grad_scaler(torch.float32, ddp))
        out.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return out


def reference(proteins, ddp, **setting):
    """The same from the definition: the sum over everything, divided by the number of everything,
    one backward."""
    model, dataset, schedule, graph, _, reader = build(proteins, ddp, **setting)
    exact, out = next(model.parameters()).dtype, []
    for step in range(2):
        total, count = 0.0, 0
        for micro in range(reader.plan.micro_batches):
            b = dataset[schedule.item_of(step, micro)]
            torch.manual_seed(b["seed"])
            sigma = b["sigma"].to(exact)
            score = model(b["xt"], sigma, b["mask"])
            loss, n = score_entropy_loss(score, sigma, b["dsigma"].to(exact), b["xt"], b["x0"],
                                         graph, b["mask"] & (b["x0"] != X_ID))
            total += loss.sum()
            count += n.sum() if setting["reduction"] == "residue" else len(n)
        grads = torch.autograd.grad(total / count, list(model.parameters()))
        out.append({name: g for (name, _), g in zip(model.named_parameters(), grads)})
    return out


def main(fasta, out):
    ddp = setup_ddp(quiet=True)
    proteins, _ = read_sequences(fasta)
    results = {name: accumulated(proteins, ddp, **setting) for name, setting in SETTINGS.items()}
    if ddp.is_main:
        torch.save(results, out)
    cleanup_ddp(ddp)


if __name__ == "__main__":
    main(*sys.argv[1:])
