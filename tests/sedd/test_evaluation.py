"""Validation of SEDD against exact likelihoods; what the end of a run says."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_setup import Ddp
from proteins.letters import N_TOKENS, X_ID
from proteins.sequences import Proteins
from sedd.diffusion import make_graph, make_noise
from sedd.evaluation import Validation, result_lines, sample_proteins
from sedd_cases import TrueScores
from train_sedd_ddp import Config
from training.config import load_config


@pytest.mark.parametrize("graph, noise, arguments", [
    ("absorb", "loglinear", {}), ("absorb", "loglinear", {"eps": 0.2}), ("absorb", "cosine", {}),
    ("uniform", "loglinear", {}), ("uniform", "geometric", {}),
    ("uniform", "geometric", {"sigma_max": 1.0})])
def test_with_true_scores_the_validation_value_is_the_exact_likelihood(graph, noise, arguments):
    p = torch.linspace(1, 6, 20).double()
    draw = torch.Generator().manual_seed(0)
    p /= p.sum()
    proteins = Proteins.from_sequences([
        torch.multinomial(p, 30 + 2 * (i % 20), True, generator=draw).numpy().astype(np.uint8)
        for i in range(150)])
    graph = make_graph(graph, N_TOKENS)
    noise = make_noise(noise, **arguments)
    counts = proteins.letter_counts()
    lengths = torch.from_numpy(proteins.lengths)
    letters = torch.stack([torch.bincount(torch.from_numpy(proteins[i]).long(), minlength=20)
                           for i in range(150)]).double()
    config = load_config(Config, None, ["training.batch_size=1", "data.max_length=80"])

    def validate(p, counts, samples):
        """(bounds, what they should be, perplexity of the unigram) with the true scores of p."""
        exact = -p.log()
        if not graph.absorb:   # Sampling starts from full noise, the data end at sigma(1): the
            # bound exceeds the likelihood by the mean of ln p(x1)/limit over x1 given x0.
            V = graph.vocab_size
            stay = torch.exp(-noise(torch.ones((), dtype=torch.float64))[0])
            now = stay * torch.cat([p, torch.zeros(1)]) + (1 - stay) / V
            given = stay * torch.eye(V, dtype=torch.float64)[:20] + (1 - stay) / V
            exact = exact + given @ torch.log(now * V)
        config.training.eval_samples = samples
        validation = Validation(proteins, config, graph, noise, counts)
        bound = validation(TrueScores(p, graph), Ddp(), torch.float32)
        return bound, letters @ exact, validation.unigram

    own = torch.from_numpy((counts[:20] + 1) / (counts[:20] + 1).sum())
    bound, exact, unigram = validate(own, counts, samples=1)   # the unigram model: without error
    assert torch.allclose(bound, exact, rtol=1e-5)
    assert unigram == pytest.approx(math.exp(-(letters @ own.log()).sum() / lengths.sum()))
    if "eps" in arguments:   # so many residues are clean at the end: for no model exact
        return
    bound, exact, _ = validate(p, np.ones(21, np.int64), samples=60)
    difference = bound - exact
    total = float(exact.sum() / lengths.sum())
    mean = difference.sum() / lengths.sum()
    error = float(((difference - mean * lengths) ** 2).sum().sqrt() / lengths.sum())
    assert error < 0.01 * total   # or the next line says little
    assert abs(float(mean)) < 3 * error + 0.002 * total


P = torch.linspace(1, 2, 20).double() / 30      # probabilities of letters, not much unlike
ABSORB = make_graph("absorb", N_TOKENS)


@pytest.fixture
def letters():
    """(40, 50) letters drawn by P."""
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(P, 40 * 50, True, generator=draw).view(40, 50)


def validation_of(letters, samples=1):
    """The Validation of proteins (n, L), with letters that count as equally frequent."""
    proteins = Proteins.from_sequences(list(letters.numpy().astype(np.uint8)))
    config = load_config(Config, None, ["training.batch_size=1", "data.max_length=50",
                                        f"training.eval_samples={samples}"])
    return Validation(proteins, config, ABSORB, make_noise("loglinear"), np.ones(21, np.int64))


def test_one_noise_level_gives_the_bound_of_each_protein_of_a_model_near_the_letter_frequencies(
        letters):
    """How many residues the noise happens to change, which one level hardly tells, cancels."""
    bound = validation_of(letters)(TrueScores(P, ABSORB), Ddp(), torch.float32)
    assert float((bound / -P.log()[letters].sum(1) - 1).abs().max()) < 0.1


def test_unknown_residues_do_not_count_in_the_bound(letters):
    known = letters < 10
    letters = letters.where(known, X_ID)
    bound = validation_of(letters)(TrueScores(P, ABSORB), Ddp(), torch.float32)
    exact = (-P.log()[letters.where(known, 0)] * known).sum(1)
    assert float((bound / exact - 1).abs().max()) < 0.15


def test_the_times_of_proteins_divide_the_unit_interval_evenly(letters):
    assert np.sort(validation_of(letters).start) == pytest.approx((np.arange(40) + 0.5) / 40)


class Recorder(TrueScores):
    """Notes which residues the noise has changed, (B, L) bool, of each batch."""

    def __init__(self):
        super().__init__(P, ABSORB)
        self.noised = []

    def forward(self, xt, sigma, mask=None, wanted=None):
        self.noised.append(xt == self.graph.mask_id)
        return super().forward(xt, sigma, mask)


def test_each_noise_level_of_a_protein_has_noise_of_its_own(letters):
    model = Recorder()
    validation_of(letters, samples=3)(model, Ddp(), torch.float32)
    less, more = model.noised[:2]   # of the same proteins, as noise levels follow one another
    assert less.sum() < more.sum() and (less & ~more).any()   # of one draw, more would hold less


def test_each_protein_has_noise_of_its_own(letters):
    model = Recorder()
    validation_of(letters)(model, Ddp(), torch.float32)
    noised = torch.cat(model.noised)
    by_level = noised[noised.sum(1).argsort()]
    assert (by_level[10] & ~by_level[20]).any()   # of one draw, the latter would hold the former


@pytest.mark.parametrize("beside", ["exact", "unigram"])
def test_a_standard_error_is_that_of_the_mean_difference_from_what_it_is_named_after(
        letters, beside):
    """Proteins of one length: the standard deviation of differences by residue / sqrt(n)."""
    validation = validation_of(letters)
    validation.exact = np.linspace(99, 101, 40)
    validation.unigram_nll = np.linspace(150, 140, 40)
    known = {"exact": validation.exact, "unigram": validation.unigram_nll}[beside]
    difference = torch.linspace(3, 9, 40, dtype=torch.float64)
    values = validation.summarise(difference + torch.from_numpy(known))
    found = values[f"val/{beside}_standard_error"]
    assert found == pytest.approx(float((difference / 50).std(correction=0)) / 40**0.5)


def test_samples_differ_from_step_to_step_and_not_from_run_to_run():
    config = load_config(Config, None, ["monitoring.n_samples=2", "monitoring.sample_steps=2"])
    counts = np.eye(1, 13, 12, dtype=np.int64)[0]   # all have 12 residues
    texts = [sample_proteins(TrueScores(P, ABSORB), config, ABSORB, make_noise("loglinear"), counts,
                             step, Ddp(), torch.float32).replace(f"step_{step}", "")
             for step in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_generation_in_training_gives_the_network_sigma_and_not_t():
    config = load_config(Config, None, ["monitoring.n_samples=2", "monitoring.sample_steps=3"])
    counts = np.eye(1, 13, 12, dtype=np.int64)[0]
    noise = make_noise("loglinear")
    model = TrueScores(P, ABSORB)
    sigmas = []
    model.register_forward_pre_hook(lambda _, inputs: sigmas.append(inputs[1]))
    sample_proteins(model, config, ABSORB, noise, counts, 0, Ddp(), torch.bfloat16)
    expected, _ = noise(torch.linspace(1, 1e-5, 4))
    torch.testing.assert_close(torch.stack(sigmas), expected[:, None].expand(-1, 2))


@pytest.mark.parametrize("gain, error, said", [
    (-0.1, 0.01, " no better"), (0.01, 0.001, " hardly better"), (0.1, 0.01, ""),
    (0.1, 0.11, " hardly better"), (0.01, None, " hardly better"), (0.1, None, "")])
def test_the_end_says_whether_more_than_letter_frequencies_was_learned(gain, error, said):
    row = {"step": 1, "val/loss": math.log(18) - gain, "val/unigram_perplexity": 18.0}
    if error is not None:    # that of a single protein is not known
        row["val/unigram_standard_error"] = error
    best = {"step": 1, "score": row["val/loss"]}
    text = "\n".join(result_lines(row, {"best": best}, Path("run")))
    assert ("ATTENTION" in text) == bool(said) and said in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_single_protein_has_no_standard_error(letters):
    validation = validation_of(letters[:1])
    values = validation.summarise(torch.tensor([100.0], dtype=torch.float64))
    assert not [name for name in values if "error" in name]
