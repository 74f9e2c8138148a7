"""sample_sedd.py: what comes out keeps its promises."""

import itertools
import math
import os
import re

import numpy as np
import pytest
import torch

import sample_sedd
from ddp_setup import Ddp
from launchers import ROOT, fork_ranks
from proteins.letters import AMINO_ACIDS, N_TOKENS, encode
from proteins.sequences import Proteins
from sample_sedd import (
    cli,
    length_groups,
    reshape_choice,
    sample_sequences,
    scaffold_templates,
    score_sequences,
    scores_by_length_group,
)
from sedd import variants as sedd_variants
from sedd.diffusion import make_graph, make_noise
from sedd.variants import (
    batches_by_places,
    draw_masks,
    masked_nll,
    predict_letters,
    residue_scores,
    score_proteins,
    variant_scores,
)
from sedd.weights import Sedd, export_sedd, load_sedd
from sedd_cases import NOISE, SIZES, TrueScores, draw_and_score, write_checkpoint
from tool_runs import assert_refused
from training_runs import needs_pretended_device, on_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "best.pt")


@pytest.fixture
def refuses(tmp_path):
    """Function (words after the checkpoint, words that the refusal names)."""
    write_checkpoint(tmp_path / "best.pt")

    def check(words, named, checkpoint="best.pt"):
        return assert_refused(cli, f"{checkpoint} {words}", named, tmp_path)

    return check


@pytest.mark.parametrize("graph, how", [
    ("absorb", {}), ("absorb", {"predictor": "euler"}),
    ("absorb", {"temperature": 0.3, "top_p": 0.8}), ("uniform", {})])
def test_given_letters_stay_and_neither_mask_nor_x_is_drawn(tmp_path, graph, how):
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt", graph))
    templates = ["MKT" + "_" * 20 + "GSHHW", "_" * 31, AMINO_ACIDS, "W_____________W_"] * 3
    steps = []
    drawn = sample_sequences(sedd, templates, steps=6, tokens=90, on_step=steps.append, **how)
    assert set(steps) == {len(steps)}   # each call tells how many there will be
    for template, sequence in zip(templates, drawn):
        assert len(sequence) == len(template) and set(sequence) <= set(AMINO_ACIDS)
        assert all(a in ("_", b) for a, b in zip(template, sequence))
    assert len(set(drawn[1::4])) == 3   # not thrice the same


def test_sequences_of_like_lengths_are_computed_together(monkeypatch):
    """From one group to the next a sequence has less than nine tenths of the longest."""
    monkeypatch.setattr(sample_sedd, "WORTH_A_PASS", 1)
    groups = length_groups(np.array([100, 99, 91, 89, 50, 49]))
    assert [group.tolist() for group in groups] == [[0, 1, 2], [3], [4, 5]]


def test_a_pass_that_saves_little_is_not_made():
    """100 + 89 positions instead of 2 x 100."""
    assert [group.tolist() for group in length_groups(np.array([100, 89]))] == [[0, 1]]


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
def test_scores_in_groups_are_those_of_the_model_at_masks(graph, tmp_path, monkeypatch):
    """The third sequence has no mask: with the absorbing graph its scores do not matter."""
    monkeypatch.setattr(sample_sedd, "WORTH_A_PASS", 1)
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt", graph))
    lengths = np.array([40, 39, 21, 12])
    real = torch.arange(40) < torch.from_numpy(lengths)[:, None]
    generator = torch.Generator().manual_seed(0)
    xt = torch.randint(0, 20, real.shape, generator=generator).where(real, 20)
    asked = real.clone()
    if graph == "absorb":
        asked &= torch.rand(real.shape, generator=generator) < 0.5
        asked[2] = False
        xt[asked] = sedd.graph.mask_id
    sigma = torch.rand(4, generator=generator) + 0.1
    with torch.no_grad():
        scores = scores_by_length_group(sedd, lengths)(xt, sigma)
        expected = sedd.model(xt, sigma, real)
    torch.testing.assert_close(scores[asked], expected[asked], rtol=1e-4, atol=1e-4)


def test_sequences_in_which_nothing_is_unmasked_take_no_pass(tmp_path):
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt", "absorb"))
    xt = torch.full((3, 12), sedd.graph.mask_id)
    unmasked = torch.zeros(3, 12, dtype=torch.bool)
    unmasked[1, 4] = True
    seen = []
    with torch.no_grad():
        handle = sedd.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        network = scores_by_length_group(sedd, np.array([12, 12, 12]))
        scores = network(xt, torch.ones(3), unmasked)
        handle.remove()
        expected = sedd.model(xt, torch.ones(3))
    assert [len(rows) for rows in seen] == [1]
    torch.testing.assert_close(scores[unmasked], expected[unmasked], rtol=1e-4, atol=1e-4)


def model_file(folder, parameterization):
    config = {"model": {**SIZES, "parameterization": parameterization},
              "graph": {"type": "absorb"}, "noise": NOISE, "data": {"max_length": 40}}
    return write_checkpoint(folder / f"{parameterization}.pt", config=config)


def test_masked_diffusion_takes_no_more_passes_than_residues_are_drawn(tmp_path):
    sedd = load_sedd(model_file(tmp_path, "subs"))
    passes = []
    sedd.model.register_forward_pre_hook(lambda *_: passes.append(1))
    drawn, = sample_sequences(sedd, ["M___W"], steps=100)
    assert re.fullmatch(f"M[{AMINO_ACIDS}]{{3}}W", drawn)
    assert 1 <= len(passes) <= 3


@pytest.mark.slow
@needs_pretended_device
@pytest.mark.parametrize("parameterization", ["sedd", "subs"])
def test_a_device_draws_and_scores_as_the_cpu_does(parameterization, tmp_path):
    path = model_file(tmp_path, parameterization)
    call = f"on_device(draw_and_score, {str(path)!r}, 'device.pt', ddp=ddp)"
    on_ranks(1, "pretended_device", call, tmp_path)
    draw_and_score(path, tmp_path / "cpu.pt", Ddp())
    drawn, scores = torch.load(tmp_path / "device.pt")
    expected, expected_scores = torch.load(tmp_path / "cpu.pt")
    assert drawn == expected
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)


def test_a_scaffold_keeps_letters_and_draws_each_length_in_its_range():
    stretches = [re.fullmatch("MKT(_{2,4})GSH___W_?", text)[1]
                 for text in scaffold_templates("mkt[2-4]GSH[3]W[0-1]", 60, seed=1)]
    assert set(stretches) == {"__", "___", "____"}


def test_any_number_of_ranks_draws_and_scores_the_same(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = {}
    said = []
    words = {"fasta": ["--number", "9", "--steps", "4"], "tsv": ["--score", "1.fasta"]}
    for ranks, kind in ((1, "fasta"), (2, "fasta"), (4, "fasta"), (1, "tsv"), (2, "tsv")):
        out = tmp_path / f"{ranks}.{kind}"
        arguments = [str(checkpoint), "--tokens", "60", *words[kind], "--out", str(out)]
        if ranks == 1:
            cli(arguments)
            printed = capsys.readouterr().err
        else:
            done = fork_ranks(ranks, [ROOT / "sample_sedd.py", *arguments], tmp_path)
            assert done.returncode == 0, done.text
            printed = done.text
        assert out.read_text() == texts.setdefault(kind, out.read_text())
        said += re.findall(r"masked residues, .*: (\S+) nats", printed)
    assert texts["fasta"].count(">") == 9
    assert len(said) == 2 and said[0] == said[1]


@pytest.mark.parametrize("fasta, said", [
    (">a\nM\n", "none, as only X was masked, or sequences have one residue"),
    (">a\nM\n>b\nMKTA\n", "; without sequences of one residue: 1")])
def test_sequences_of_one_residue_have_no_masked_residues(fasta, said, checkpoint, tmp_path,
                                                          capsys):
    (tmp_path / "one.fasta").write_text(fasta)
    cli([str(checkpoint), "--score", str(tmp_path / "one.fasta")])
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed


def test_ranks_with_other_files_are_refused(checkpoint, tmp_path):
    """Such as an old copy on one host. Each process has another /proc/self/stat."""
    done = fork_ranks(2, [ROOT / "sample_sedd.py", checkpoint, "--score", "/proc/self/stat"],
                      tmp_path)
    assert done.returncode == 2, done.text
    assert "has --score (hash)" in done.text


def test_lengths_are_those_of_the_training_proteins_or_as_asked(checkpoint, capsys):
    for words, expected in (["--number", "40"], {"7", "20", "31"}), (
            ["--number", "9", "--length", "5-6"], {"5", "6"}):
        cli([str(checkpoint), "--steps", "1", *words])
        assert set(re.findall(r"length=(\d+)", capsys.readouterr().out)) == expected


def test_lengths_that_a_checkpoint_does_not_tell_have_to_be_given(refuses, tmp_path):
    write_checkpoint(tmp_path / "bare.pt", lengths=None)
    refuses("--number 2", "--length", checkpoint="bare.pt")


def test_temperature_and_top_p_shape_the_letters_and_not_the_speed():
    torch.manual_seed(0)
    log_score = torch.randn(2, 5, 22, dtype=torch.float64)
    mask = 21
    xt = torch.tensor([[21, 3, 21, 21, 20]] * 2)
    masked = xt == mask
    for temperature, top_p in ((2.0, 1.0), (1.0, 0.7), (0.7, 0.4)):
        shaped = reshape_choice(log_score, xt, mask, temperature, top_p)
        assert torch.equal(shaped[~masked], log_score[~masked])
        for old, new in zip(log_score[masked].exp(), shaped[masked].exp()):
            q = torch.softmax(old[:20].log() / temperature, -1)
            best = q.argsort(descending=True)
            best = best[:int((q[best].cumsum(-1) < top_p).sum()) + 1]
            expected = torch.zeros_like(old)
            expected[best] = q[best] / q[best].sum() * old[:20].sum()
            expected[mask] = old[mask]
            assert torch.allclose(new, expected)


LETTERS = np.append(np.arange(20, 0, -1), 7) * 1e6    # of the training data; X has no part


def exact_model(p):
    graph = make_graph("absorb", N_TOKENS)
    return Sedd(TrueScores(torch.from_numpy(p), graph), graph, make_noise("loglinear"), {},
                LETTERS, None, 60, ())


def test_the_score_of_an_exact_model_is_the_exact_likelihood_within_its_error():
    p = np.arange(1, 21) / 210
    random = np.random.default_rng(0)
    rows = ["".join(random.choice(list(AMINO_ACIDS), 50, p=p)) for _ in range(60)]
    exact = np.array([-np.log(p)[encode(row)].sum() for row in rows])
    scores = score_sequences(exact_model(p), rows, samples=32)
    unigram = [-np.log(LETTERS[encode(row)] / LETTERS[:20].sum()).sum() for row in rows]
    assert scores.unigram == pytest.approx(unigram, rel=1e-4) and (scores.residues == 50).all()
    error = math.hypot(*scores.error)
    assert error < 0.01 * exact.sum() and abs(scores.bound.sum() - exact.sum()) < 3 * error
    assert (np.abs(scores.bound - exact) < 2 * scores.error).mean() > 0.8   # each one's, too


LONG = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"     # 56 residues


def test_a_score_does_not_depend_on_the_others(checkpoint):
    sedd = load_sedd(checkpoint)
    alone = score_sequences(sedd, ["MKTAYIAK"], samples=4)
    together = score_sequences(sedd, [LONG[:28], "MKTAYIAK"], samples=4)
    assert together.bound[1] == pytest.approx(alone.bound[0], rel=1e-5)
    assert together.error[1] == pytest.approx(alone.error[0])


def test_a_sequence_longer_than_in_training_is_refused(checkpoint):
    with pytest.raises(ValueError, match="56 residues.* 40"):
        score_sequences(load_sedd(checkpoint), [LONG])


def test_a_longer_sequence_is_scored_in_parts_if_asked(checkpoint):
    sedd = load_sedd(checkpoint)
    whole = score_sequences(sedd, [LONG], samples=4, window=True)
    parts = [score_sequences(sedd, [part], samples=4) for part in (LONG[:28], LONG[28:])]
    assert whole.bound[0] == pytest.approx(sum(part.bound[0] for part in parts), rel=1e-5)
    assert whole.error[0] == pytest.approx(math.hypot(*(part.error[0] for part in parts)))


P = np.arange(1, 21) / 210     # of independent letters


def proteins_of(*texts):
    return Proteins.from_sequences([encode(text) for text in texts])


def test_masked_residues_cost_what_all_masks_of_a_protein_say(checkpoint, monkeypatch):
    """t is 1, 2 or 3, and 5 - t of the 4 residues are masked: of each number all masks."""
    sedd = load_sedd(checkpoint)
    row = torch.tensor(encode("MKWA").tolist())
    sets = []
    nats = 0.0
    for number in (2, 3, 4):
        places = list(itertools.combinations(range(4), number))
        for masked in map(list, places):
            xt = row.clone()
            xt[masked] = sedd.graph.mask_id
            share = min(number / 4, 0.99)
            with torch.no_grad():
                scores = sedd.model(xt[None], -torch.log1p(-torch.tensor([share])))[0, masked, :20]
            log_p = scores - scores.logsumexp(-1, keepdim=True)
            nats -= float(log_p[range(number), row[masked]].sum()) / len(places) / 3
            sets += [masked] * (12 // len(places))     # so that each number has equally many

    def one_of_all(proteins, indices, k, samples, shape):
        chosen = torch.zeros(shape, dtype=torch.bool)
        chosen[0, sets[k]] = True
        return chosen

    monkeypatch.setattr(sedd_variants, "draw_masks", one_of_all)
    found, residues = masked_nll(sedd, proteins_of("MKWA"), len(sets))
    assert found.sum() / residues.sum() == pytest.approx(nats / 3, rel=1e-5)


def test_numbers_of_masks_are_even_from_two_to_all():
    proteins = proteins_of("MKWA", "C")
    sets = torch.stack([draw_masks(proteins, np.array([0, 1]), k, 300, (2, 4))
                        for k in range(300)])
    assert sets[:, 0].sum(1).bincount().tolist() == [0, 0, 100, 100, 100]
    assert len(set(map(tuple, sets[:, 0].tolist()))) == 6 + 4 + 1
    assert sets[:, 0].float().mean(0).tolist() == pytest.approx([0.75] * 4, abs=0.05)
    assert sets[:, 1].tolist() == [[True, False, False, False]] * 300   # nothing of the padding


def test_masked_residues_of_a_protein_depend_on_no_other(checkpoint):
    sedd = load_sedd(checkpoint)
    alone, _ = masked_nll(sedd, proteins_of("MKTAYIAK"), 4)
    together, residues = masked_nll(sedd, proteins_of(LONG[:28], "MKTAYIAK"), 4)
    assert together[1] == pytest.approx(alone[0], rel=1e-4)
    assert (residues >= 2).all() and (residues <= [[28], [8]]).all()


def test_a_masked_x_does_not_count():
    nats, residues = masked_nll(exact_model(P), proteins_of("XXWXX"), 16)
    assert 0 < residues.sum() < 16
    assert nats == pytest.approx(-residues * np.log(P[encode("W")]), abs=1e-4)


def test_each_position_is_scored_given_all_others():
    expected = -np.log(np.append(P, math.nan))[encode("ACDEXWY")]
    scores = residue_scores(exact_model(P), "ACDEXWY")
    assert scores == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_a_variant_is_scored_by_the_ratio_of_its_letters():
    ratios = variant_scores(exact_model(P), "ACDEXWY", [[(0, 19)], [(0, 19), (1, 18)]])
    assert np.exp(ratios) == pytest.approx([20 / 1, 20 / 1 * 19 / 2], rel=1e-4)


def test_variants_of_the_same_places_take_one_row(checkpoint):
    sedd = load_sedd(checkpoint)
    row = encode("MKTAYIAK")
    variants = [[(5, 1), (2, 3)], [(2, 3)], [(2, 4)], [(5, 9), (2, 7)], [(2, 9)]]
    seen = []
    handle = sedd.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ratios = variant_scores(sedd, "MKTAYIAK", variants)
    handle.remove()
    assert sum(map(len, seen)) == 2
    for changes, ratio in zip(variants, ratios):
        masked = row.copy()
        masked[[place for place, _ in changes]] = sedd.graph.mask_id
        log_p = predict_letters(sedd, masked[None])
        expected = sum(log_p[k, token] - log_p[k, row[place]]
                       for k, (place, token) in enumerate(sorted(changes)))
        assert ratio == pytest.approx(expected, rel=1e-4)


def test_without_a_mask_no_position_or_variant_is_scored():
    uniform = exact_model(P)._replace(graph=make_graph("uniform", N_TOKENS))
    with pytest.raises(ValueError, match="uniform"):
        residue_scores(uniform, "ACDEXWY")
    with pytest.raises(ValueError, match="uniform"):
        variant_scores(uniform, "ACDEXWY", [[(0, 19)]])


def test_a_masked_position_sees_the_rest_of_its_sequence(checkpoint):
    sedd = load_sedd(checkpoint)
    rows = np.stack([encode("MKTAYIAK"), encode("MKTAYIAW")])
    rows[:, 2] = sedd.graph.mask_id
    log_p = predict_letters(sedd, rows)
    assert np.allclose(np.exp(log_p).sum(-1), 1) and not np.allclose(*log_p)
    plain = residue_scores(sedd, "MKTAYIAK")[2]
    assert plain == pytest.approx(-float(log_p[0, AMINO_ACIDS.index("T")]), rel=1e-5)
    variants = [[(5, 1), (2, 3)], [(0, 4)], [], [(7, 9), (1, 2), (3, 0)]]
    ratios = variant_scores(sedd, "MKTAYIAK", variants)
    ordered = [variant_scores(sedd, "MKTAYIAK", [sorted(changes)])[0]
               for changes in variants if changes]
    assert ratios == pytest.approx(np.insert(ordered, 2, 0), rel=1e-4)
    assert variant_scores(sedd, "MKTAYIAK", variants, tokens=16) == pytest.approx(ratios, rel=1e-4)
    longer = "ACDEFGHIKL" * 6   # beyond the 40 residues: those around each position
    assert residue_scores(sedd, longer)[30] == pytest.approx(
        residue_scores(sedd, longer[10:50])[20], rel=1e-5)


def test_the_commands_print_tables(checkpoint, tmp_path, capsys):
    (tmp_path / "p.fasta").write_text(">one first\nMKTAYI\nAKQ*\n>two\nACDXEFG\n")
    words = [str(checkpoint), "--score", str(tmp_path / "p.fasta")]
    cli(words)
    out, err = capsys.readouterr()
    head, one, two = (line.split("\t") for line in out.splitlines())
    assert one[:2] == ["one first", "9"] and two[1] == "7"
    assert head == ["name", "length", "nats", "standard_error", "nats_per_residue", "unigram_nats"]
    nats, errors, each, unigram = np.array([one[2:], two[2:]], float).T
    assert each == pytest.approx(nats / [9, 6], abs=1e-4)   # X does not count
    assert max(map(len, err.splitlines())) <= 80
    said = re.search(r"15 residues: bound (\S+) nats .*error (\S+)\), perplexity (\S+) ",
                     " ".join(err.split()))
    expected = [nats.sum() / 15, math.hypot(*errors) / 15, math.exp(nats.sum() / 15)]
    assert list(map(float, said.groups())) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    nats, residues = masked_nll(load_sedd(checkpoint), proteins_of("MKTAYIAKQ", "ACDXEFG"), 8)
    mean = nats.sum() / residues.sum()
    assert f": {mean:.4f} nats, perplexity {math.exp(mean):.3f}" in " ".join(err.split())
    cli([*words, "--samples", "1"])   # from which no error follows
    assert "nan" not in capsys.readouterr().err
    cli([*words, "--each_position"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + 9 + 7


def test_all_sequences_are_looked_at_before_the_first_is_scored(refuses, tmp_path):
    (tmp_path / "p.fasta").write_text(">one\nMKTAYI\n>three\nMKV-A\n")
    refuses("--score p.fasta --each_position", "p.fasta three '-' 4")


def test_the_uniform_graph_has_no_masked_residues(tmp_path, capsys):
    (tmp_path / "p.fasta").write_text(">one\nMKTAYI\n")
    path = write_checkpoint(tmp_path / "best.pt", "uniform")
    cli([str(path), "--score", str(tmp_path / "p.fasta")])
    assert "EvoDiff counts them: none, as the uniform graph has no mask" in " ".join(
        capsys.readouterr().err.split())


def test_batches_of_variants_do_not_change_their_scores(checkpoint):
    sedd = load_sedd(checkpoint)
    variants = [[[(place, 0)] for place in range(1, 9)], [[(0, 18)], [(4, 0)]]]
    told = []
    scores = score_proteins(sedd, ["AKTCYIGKQ", "GSHHW"], variants,
                            lambda n, total: told.append((n, total)), tokens=30)
    assert scores[0] == pytest.approx(variant_scores(sedd, "AKTCYIGKQ", variants[0]), rel=1e-4)
    assert scores[1] == pytest.approx(variant_scores(sedd, "GSHHW", variants[1]), rel=1e-4)
    assert told == [(3, 10), (3, 10), (2, 10), (2, 10)]


def test_variants_of_the_same_places_are_scored_together_wherever_they_stand():
    variants = [[(0, 1)], [(2, 3)], [(4, 5), (1, 2)], [(0, 7)], [(1, 8), (4, 0)]]
    assert batches_by_places(variants, 2) == [[0, 3, 1], [2, 4]]


@pytest.mark.parametrize("words, named", [
    ("--number 0", "--number 0"), ("--length 9-3", "9-3"), (f"--length {'9' * 20}", "9" * 20),
    ("--score p.fasta --seed 1", "--seed --score"),
    ("--scaffold MKT[4] --score p.fasta", "--scaffold --score"),
    ("--score nope.fasta", "nope.fasta"), ("--infill nope_1.fasta", "nope_1.fasta"),
    ("--infill MKT____GSH", "MKT____GSH --scaffold MKT[4]GSH"),
    ("--infill __MKT_GSH", "__MKT_GSH --scaffold [2]MKT[1]GSH"),
    ("--infill MKT[40]GSH[12-20]", "--scaffold MKT[40]GSH[12-20]"),
    ("--score notes.txt", "notes.txt"), ("--window", "--window --score"),
    ("--temperature 1e-4 --length 5", "temperature 0.0001"),
    ("--top_p 1.5 --length 5", "top_p 1.5"),
    ("--out no/where.fasta", "no/where.fasta"), ("--out /proc/o.fa", "/proc/o.fa"),
    ("--score p.fasta --out p.fasta", "p.fasta"), ("--out best.pt", "best.pt"),
    (f"--seed {2**63}", f"--seed {2**63}"),
    ("--score p.fasta --window --each_position", "--each_position --window"),
    ("--score p.fasta --each_position --samples 4", "--samples --each_position"),
    ("--export e --out o.fa", "--out --export"), ("--export e.pt", "--export e.pt"),
    ("--scaffold MKX[4]", "'X' 3"), ("--scaffold MKT(4)", "MKT(4) ("),
    ("--scaffold MK[0]", "MK[0]"), ("--scaffold [0-3][0-5]", "[0-3][0-5]"),
    ("--infill full.fasta", "full.fasta a"), ("--infill long.fasta", "long.fasta a 1,000,001"),
    ("--infill two.fasta", "two.fasta a")])
def test_what_cannot_be_done_is_refused(refuses, tmp_path, words, named):
    texts = {"p.fasta": ">a\nMKT\n", "notes.txt": "my notes: 1\n", "full.fasta": ">a\nMKTA\n",
             "long.fasta": ">a\n" + "_" * 1_000_001 + "\n",
             "two.fasta": ">a one\nMK__\n>a two\n____\n"}
    for name, text in texts.items():
        if name in words:
            (tmp_path / name).write_text(text)
    refuses(words, named)


def test_a_result_replaces_neither_a_device_nor_the_model(refuses, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()      # of an exported folder
    refuses("--length 5 --out model/config.json", "model/config.json", checkpoint="model")
    os.mkfifo(tmp_path / "pipe")
    refuses("--out pipe", "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("content", ["code.pt", "other.pt", "nan.pt", "absent.pt", "empty"])
def test_what_is_no_model_is_refused(content, refuses, tmp_path):
    (tmp_path / "empty").mkdir()
    spoilt = torch.load(tmp_path / "best.pt", weights_only=True)
    spoilt["ema"]["shadow_params"][3][:] = math.nan
    torch.save(spoilt, tmp_path / "nan.pt")
    torch.save({"model": print}, tmp_path / "code.pt")
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "other.pt")
    said = refuses("", content, checkpoint=content)
    assert "weights_only" not in said   # torch advises to do without


def test_an_exported_folder_that_is_cut_off_is_refused(refuses, tmp_path, extras):
    pytest.importorskip("safetensors")
    export_sedd(load_sedd(tmp_path / "best.pt"), tmp_path / "folder")
    weights = tmp_path / "folder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refuses("", "folder/model.safetensors", checkpoint="folder")


def test_each_template_of_a_file_is_filled_in_and_keeps_its_letters(checkpoint, tmp_path, capsys):
    (tmp_path / "templates.fasta").write_text(">one first\nmkt___gshhw\n>two\n_____W\n")
    cli([str(checkpoint), "--infill", str(tmp_path / "templates.fasta"), "--number", "2",
         "--steps", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [">one_1 length=11", ">one_2 length=11", ">two_1 length=6",
                          ">two_2 length=6"]
    for template, sequence in zip(["MKT...GSHHW", "MKT...GSHHW", ".....W", ".....W"], lines[1::2]):
        assert re.fullmatch(template, sequence) and set(sequence) <= set(AMINO_ACIDS)


def test_export_writes_a_folder_that_draws_the_same(checkpoint, tmp_path, capsys):
    pytest.importorskip("safetensors")
    cli([str(checkpoint), "--export", str(tmp_path / "model")])
    texts = []
    for model in (checkpoint, tmp_path / "model"):
        capsys.readouterr()
        cli([str(model), "--number", "3", "--steps", "4"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("task", ["--score", "--infill"])
def test_bad_records_of_a_fasta_are_named_all_at_once(refuses, tmp_path, task):
    (tmp_path / "bad.fasta").write_text(
        ">good\nMK_TA\n".replace("_" if task == "--score" else ".", "")
        + "".join(f">bad{k}\nMK1TA\n" for k in range(12)))
    said = refuses(f"{task} bad.fasta", "bad.fasta bad0 bad1 bad2 9")
    assert "good" not in said and "bad3" not in said
