"""bench/plain.py: the plain transcriptions are the published codes, and ours written plainly."""
import copy
import math

import pytest
import torch

from bench import plain
from bench.speed import OurDpo, norm_of, write_demo_pdb, write_made_pairs
from ddp_setup import Ddp
from mpnn.batches import collate_complexes
from mpnn.model import decoding_order, gumbel_noise, random_proteinmpnn
from proteins.letters import X_ID
from proteins.structures import Complex, read_structure
from sedd.diffusion import AbsorbingGraph, make_noise
from sedd.diffusion import sample as our_sample
from sedd.model import SEDD, load_official
from sedd_cases import entries, near, seeded, small_model
from train_dpo_ddp import Config, prepare


@pytest.mark.parametrize("noise_name", ["loglinear", "geometric"])
def test_the_plain_step_of_sedd_agrees_with_the_official_code(shared, noise_name):
    fixture = torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)
    case = entries(fixture, "absorb", noise_name)
    sizes = [fixture[f"cfg_{size}"] for size in ("hidden", "blocks", "heads", "cond")]
    model = SEDD(entries(fixture, "absorb")["vocab"], *sizes).eval()
    weights = entries(fixture, "absorb", "model")   # their names are those of a model in DDP
    load_official(model, {f"module.{name}": value for name, value in weights.items()})
    log_score = plain.plain_log_score(model, case["xt"], case["sigma"])
    loss = plain.plain_sedd_loss(log_score, case["sigma"], case["dsigma"], case["xt"], case["x0"])
    near(loss, case["loss"], rtol=1e-4, atol=1e-3)
    loss.mean().backward()
    near(torch.stack([p.grad.norm() for p in model.parameters()]), case["grad_norms"], rtol=1e-3)
    for parameter, gradient in ((model.vocab_embed.embedding, "grad_embed"),
                                (model.output_layer.linear.weight, "grad_out_weight")):
        assert (parameter.grad - case[gradient]).norm() < 1e-4 * case[gradient].norm()


@pytest.mark.parametrize("noise_name", ["loglinear", "geometric"])
def test_a_plain_step_of_sampling_has_the_probabilities_of_the_official_code(shared, noise_name):
    fixture = torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)
    case = entries(fixture, "absorb", noise_name)
    probs = plain.plain_analytic_probs(case["log_score"].exp(), case["xt"], case["sigma_step"])
    expected = case["analytic_probs"]
    near(probs, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.max())))


def test_our_sedd_draws_what_the_plain_sampler_draws_from_equal_random_numbers():
    graph = AbsorbingGraph(21)
    model = small_model(graph, forbidden=(X_ID,)).eval()
    noise = make_noise("loglinear")
    with torch.no_grad():
        drawn = plain.plain_sedd_sample(model, noise, 6, 30, 12, seeded())
        ours = our_sample(model, graph, noise, (6, 30), 12, forbidden=(X_ID,), generator=seeded())
    assert torch.equal(drawn, ours)
    assert len(drawn.unique()) > 10


def test_the_plain_step_of_dpo_has_our_loss_and_gradient(tmp_path):
    """On a chain with fewer rows than neighbours, a gap and a residue that lacks O: all are seen by
    all."""
    path = tmp_path / "s.pdb"
    write_demo_pdb(path, 30)
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        residue = int(line[22:26])
        atom = line[13]
        if residue != 9 and not (residue == 17 and atom == "O"):
            lines.append(line)
    path.write_text("".join(lines))
    write_made_pairs(tmp_path / "pairs.json", path, 2)
    config = Config()
    config.model.base_model_name = "random"
    config.data.train_data = str(tmp_path / "pairs.json")
    config.data.val_fraction = 0.0
    config.training.batch_size = 2
    config.training.n_iters = 2
    config.training.stop_signals = ()
    config.loss.order = "arange"

    def compare(run, ddp):
        base = copy.deepcopy(run.bare).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in run.bare.parameters():
                p += 0.003 * torch.randn(p.shape, generator=generator)
        ours = OurDpo(run, 1, ddp)
        steps = plain.PlainDpo(copy.deepcopy(run.bare), base, run.train_set.items, 2, config.loss,
                               config.optim)
        loss = steps.loss(ours.next_items())
        assert abs(float(loss.detach()) - math.log(2)) > 1e-3
        differences = ours.compare(steps)
        assert differences[0] < 1e-5 and differences[1] < 1e-4
        assert float(norm_of(steps.policy)) > 0

    compare(prepare(config, Ddp(), tmp_path / "run"), Ddp())


def test_our_proteinmpnn_draws_what_the_plain_sampler_draws_from_equal_random_numbers(tmp_path):
    """With probabilities equal within 1e-4."""
    write_demo_pdb(tmp_path / "s.pdb", 60)
    structure = read_structure(tmp_path / "s.pdb")
    tensors = collate_complexes([Complex(structure, sorted(structure.chains))])
    tensors = {name: tensors[name] for name in ("X", "mask", "residue_idx", "chain_id")}
    model = random_proteinmpnn(0, num_edges=16, hidden_size=32).eval()
    generator = seeded()
    S = torch.zeros(3, 60, dtype=torch.int64)
    order = decoding_order(torch.ones_like(S), torch.randn(3, 60, generator=generator))
    noise = gumbel_noise(torch.rand(3, 60, 21, dtype=torch.float64, generator=generator))
    copies = {name: x.expand(3, *x.shape[1:]) for name, x in tensors.items()}
    with torch.no_grad():
        drawn, plain_probs = plain.plain_mpnn_sample(model, copies, order, 0.5, noise)
        encoding = model.encode(model.graph(**tensors))
        ours, probs = model.sample(encoding, S, torch.ones_like(S), order, 0.5, noise=noise)
    assert torch.equal(drawn, ours)
    near(probs, plain_probs, atol=1e-4)
