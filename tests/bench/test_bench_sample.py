"""bench/sample.py: the plain samplers are the published ones, and draw what ours draw."""
import re

import pytest
import torch

from bench import sample
from bench.dpo import write_demo_pdb
from mpnn.batches import collate_complexes
from mpnn.model import decoding_order, gumbel_noise, random_proteinmpnn
from proteins.structures import Complex, read_structure
from sedd.diffusion import AbsorbingGraph, make_noise, sample as our_sample
from proteins.letters import X_ID
from sedd_cases import entries, near, seeded, small_model


@pytest.mark.parametrize("noise_name", ["loglinear", "geometric"])
def test_a_plain_step_of_sedd_has_the_probabilities_of_the_official_code(shared, noise_name):
    fixture = torch.load(shared / "fixtures" / "sedd.pt", weights_only=True)
    case = entries(fixture, "absorb", noise_name)
    found = sample.plain_analytic_probs(case["log_score"].exp(), case["xt"], case["sigma_step"])
    expected = case["analytic_probs"]
    near(found, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.max())))


def test_our_sedd_draws_what_the_plain_sampler_draws_from_equal_random_numbers():
    graph = AbsorbingGraph(21)
    model = small_model(graph, forbidden=(X_ID,)).eval()
    noise = make_noise("loglinear")
    with torch.no_grad():
        plain = sample.plain_sedd_sample(model, noise, 6, 30, 12, seeded())
        ours = our_sample(model, graph, noise, (6, 30), 12, forbidden=(X_ID,), generator=seeded())
    assert torch.equal(plain, ours)
    assert len(plain.unique()) > 10


def structure_tensors(path, n):
    """The tensors of a made structure of n residues."""
    write_demo_pdb(path, n)
    structure = read_structure(path)
    tensors = collate_complexes([Complex(structure, sorted(structure.chains))])
    return {name: tensors[name] for name in ("X", "mask", "residue_idx", "chain_id")}


def test_our_proteinmpnn_draws_what_the_plain_sampler_draws_from_equal_random_numbers(tmp_path):
    """With probabilities equal within 1e-4."""
    tensors = structure_tensors(tmp_path / "s.pdb", 60)
    model = random_proteinmpnn(0, num_edges=16, hidden_size=32).eval()
    generator = seeded()
    S = torch.zeros(3, 60, dtype=torch.int64)
    order = decoding_order(torch.ones_like(S), torch.randn(3, 60, generator=generator))
    noise = gumbel_noise(torch.rand(3, 60, 21, dtype=torch.float64, generator=generator))
    copies = {name: x.expand(3, *x.shape[1:]) for name, x in tensors.items()}
    with torch.no_grad():
        plain, plain_probs = sample.plain_mpnn_sample(model, copies, order, 0.5, noise)
        encoding = model.encode(model.graph(**tensors))
        ours, probs = model.sample(encoding, S, torch.ones_like(S), order, 0.5, noise=noise)
    assert torch.equal(plain, ours)
    near(probs, plain_probs, atol=1e-4)


def test_a_row_is_printed_for_each_model_length_and_batch(monkeypatch, capsys):
    monkeypatch.setattr(sample, "NETWORK", dict(hidden_size=16, n_blocks=1, n_heads=2))
    monkeypatch.setattr(sample, "computes_in_bfloat16", lambda device: True)
    sample.main(["--batch", "1", "2", "--lengths", "20", "--steps=2", "--repeats=1"])
    out = capsys.readouterr().out
    found = re.findall(r"^(\w.*?) +[\d.]+ +[\d.]+ +[\d.]+x", out, re.M)
    cases = ("20 residues, batch 1", "20 residues, batch 2")
    dtypes = ("float32", "bfloat16")
    expected = [f"{model}, {case}, {dtype}"
                for model in ("SEDD", "SEDD subs") for case in cases for dtype in dtypes]
    expected += [f"ProteinMPNN, {case}, float32" for case in cases]
    expected += [f"{model}, mixed to 20, batch 2, {dtype}"
                 for model in ("SEDD", "SEDD subs") for dtype in dtypes]
    assert found == expected
