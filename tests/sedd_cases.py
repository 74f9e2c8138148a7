"""What the tests of SEDD's network and of its mathematics share."""
import itertools

import numpy as np
import pytest
import torch

from proteins.letters import N_TOKENS, X_ID, decode
from sample_sedd import sample_sequences
from sedd.demo import DemoSource
from sedd.diffusion import make_graph, make_noise
from sedd.model import EMA, SEDD
from sedd.variants import score_proteins
from sedd.weights import load_sedd, model_of

BOTH_GRAPHS = pytest.mark.parametrize("graph_name", ["absorb", "uniform"])
CASES = pytest.mark.parametrize("graph_name, noise_name", list(itertools.product(
    ["absorb", "uniform"], ["loglinear", "geometric"])))

SIZES = {"hidden_size": 32, "n_blocks": 2, "n_heads": 2, "cond_dim": 16, "parameterization": "sedd",
         "dropout": 0.1, "init_logits": 3.0}
NOISE = {"type": "loglinear", "eps": 1e-3, "sigma_min": 1e-4, "sigma_max": 20.0}
LENGTHS = {7: 3, 20: 5, 31: 2}   # of the training proteins
# Of a run that takes a second.
TINY = {"training.batch_size": 4, "training.accum": 2, "training.n_iters": 12,
        "training.eval_freq": 6, "training.log_freq": 1, "training.snapshot_freq": 6,
        "optim.lr": 3e-3, "optim.warmup": 4, "optim.ema": 0.9, "model.hidden_size": 32,
        "model.n_blocks": 2, "model.n_heads": 2, "model.cond_dim": 16, "model.dropout": 0.1,
        "data.max_length": 50, "data.val_fraction": 0.1, "memory.mixed_precision": "false",
        "monitoring.n_samples": 2, "monitoring.sample_steps": 2}


def write_proteins(path):
    """A FASTA file of 240 proteins of 5 to 70 residues, some of them X."""
    source = DemoSource(seed=0).sample(240, seed=1)
    draw = np.random.default_rng(0)
    with open(path, "w") as file:
        for number, tokens in enumerate(source):
            tokens = tokens[:draw.integers(5, 71)].copy()
            tokens[draw.random(len(tokens)) < 0.03] = X_ID
            file.write(f">p{number}\n{decode(tokens)}\n")
    return path


def entries(fixture, *names):
    """The entries below these names, under the rest of their names. fixture: the official code's
    numbers, a flat dict, whose keys sedd.md beside it explains."""
    start = "/".join(names) + "/"
    return {key.removeprefix(start): value for key, value in fixture.items()
            if key.startswith(start)}


def near(found, expected, rtol=0.0, atol=0.0):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small_model(graph, **kwargs):
    """A small model whose every parameter matters: what starts at zero is filled."""
    torch.manual_seed(0)
    model = SEDD(graph.vocab_size, 32, 2, 4, cond_dim=16, scale_by_sigma=graph.absorb, **kwargs)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "adaLN" in name or "output_layer.linear" in name:
                p.normal_(std=0.2)
    return model


def small_batch(graph):
    """x0, xt, a mask of different lengths, and t, sigma, dsigma of log-linear noise."""
    generator = seeded()
    mask = torch.arange(24) < torch.randint(12, 25, (6, 1), generator=generator)
    x0 = torch.randint(20, (6, 24), generator=generator).where(mask, 20)
    t = torch.rand(6, generator=generator, dtype=torch.float64)
    sigma, dsigma = make_noise("loglinear")(t)
    return x0, graph.corrupt(x0, sigma, generator).where(mask, 20), mask, t, sigma, dsigma


class TrueScores(torch.nn.Module):
    """The exact scores of residues drawn independently with probabilities p (20,)."""

    def __init__(self, p, graph):
        super().__init__()
        self.graph = graph
        self.anything = torch.nn.Parameter(torch.zeros(1))
        # neither X nor the mask in clean data
        self.p = torch.cat([p, torch.full((graph.vocab_size - 20,), 1e-30)])

    def forward(self, xt, sigma, mask=None, wanted=None):
        stay = torch.exp(-sigma.double())[:, None, None]
        limit = torch.full((self.graph.vocab_size,), 1 / self.graph.vocab_size)
        if self.graph.absorb:
            limit = (torch.arange(self.graph.vocab_size) == self.graph.mask_id).double()
        now = stay * self.p + (1 - stay) * limit                           # p(xt) at this noise
        ratio = now / now.expand(*xt.shape, -1).gather(-1, xt[..., None])
        return ratio.clamp(min=1e-30).log().scatter(-1, xt[..., None], 0.0).float()


def write_checkpoint(path, graph="absorb", reduction="residue", **more):
    """A file as train_sedd_ddp.py writes it, of random weights; the averages are others."""
    torch.manual_seed(0)
    model = model_of(SIZES, make_graph(graph, N_TOKENS))
    average = EMA(model.parameters())
    for tensor in (*model.parameters(), *average.shadow_params):
        torch.nn.init.normal_(tensor, std=0.2)
    torch.save({"model": model.state_dict(), "ema": average.state_dict(), "step": 12,
                "best": {"step": 10, "score": 2.5}, "data": {"n": 10, "hash": "x"},
                "config": {"model": SIZES, "graph": {"type": graph}, "noise": NOISE,
                           "data": {"max_length": 40}, "loss": {"reduction": reduction}},
                "letters": [*range(100, 121)], "lengths": [LENGTHS.get(n, 0) for n in range(32)],
                **more}, path)
    return path


def write_published(path, checkpoint):
    """The averages of a checkpoint as a file in the published layout, whose last weights are 0."""
    model = load_sedd(checkpoint).model
    exponent = torch.arange(0, model.head_dim, 2) / model.head_dim
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    torch.save({"model": {**weights, "rotary_emb.inv_freq": 10000.0 ** -exponent},
                "ema": {"decay": 0.9999, "num_updates": 0,
                        "shadow_params": [p.detach() for p in model.parameters()]},
                "step": 0}, path)
    return path


def draw_and_score(path, out, ddp):
    """Save proteins that the model in a file draws, and its scores of variants: (list, tensor)."""
    sedd = load_sedd(path, device=ddp.device)
    drawn = sample_sequences(sedd, ["_" * 30, "M____W", "_" * 9] * 9, 12, tokens=400, ddp=ddp)
    scores, = score_proteins(sedd, ["MKTAYIAKQ"], [[[(0, 0)], [(0, 2)], [(1, 18), (8, 0)]]],
                             ddp=ddp)
    torch.save((drawn, torch.from_numpy(scores)), out)
