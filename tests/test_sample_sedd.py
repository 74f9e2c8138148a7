"""sample_sedd.py and report_sequences.py: what comes out keeps its promises."""

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from launchers import fork_ranks
from report_sequences import (compare, difference, divergence, longest_repeat, low_complexity,
                              measure)
from sample_sedd import (cli, denoise, reshape_choice, residue_scores, sample_sequences,
                         scaffold_templates, score_sequences, variant_scores)
from sedd_cases import TrueScores
from sedd_diffusion import make_graph, make_noise
from sedd_files import Sedd, export_sedd, load_sedd, model_of
from sedd_model import EMA, load_official
from sequence_data import AMINO_ACIDS, N_TOKENS, encode, named_sequences
from training import one_thread  # noqa: F401 (a fixture for all)

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 32, "n_blocks": 2, "n_heads": 2, "cond_dim": 16, "parameterization": "sedd",
         "dropout": 0.1, "init_logits": 3.0}
NOISE = {"type": "loglinear", "eps": 1e-3, "sigma_min": 1e-4, "sigma_max": 20.0}
LENGTHS = {7: 3, 20: 5, 31: 2}   # of the training proteins


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A file as train_sedd_ddp.py writes it, of random weights; the averages are others."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "best.pt")


def write_checkpoint(path, graph="absorb", **more):
    torch.manual_seed(0)
    model = model_of(SIZES, make_graph(graph, N_TOKENS))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    average = EMA(model.parameters())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    counts = [LENGTHS.get(n, 0) for n in range(32)]
    torch.save({"model": model.state_dict(), "ema": average.state_dict(), "step": 12,
                "best": {"step": 10, "score": 2.5}, "data": {"n": 10, "hash": "x"},
                "config": {"model": SIZES, "graph": {"type": graph}, "noise": NOISE,
                           "data": {"max_length": 40}},
                "letters": [100 + i for i in range(21)], "lengths": counts, **more}, path)
    return path


def refused(capsys, *arguments):
    """What the command says when it refuses these arguments, in one message with code 2."""
    with pytest.raises(SystemExit) as end:
        cli([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("error: ") == 1, err
    assert "Traceback" not in err
    return err


# ------------------------------------------------------------------ sampling
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


def test_a_scaffold_keeps_letters_and_draws_each_length_in_its_range():
    templates = scaffold_templates("mkt[2-4]GSH[3]W[0-1]", 60, seed=1)
    for text in templates:
        assert re.fullmatch("MKT_{2,4}GSH___W_?", text)
    assert {len(re.findall("_+", text)[0]) for text in templates} == {2, 3, 4}
    with pytest.raises(ValueError, match=r"expected letters and lengths in brackets"):
        scaffold_templates("MKT(4)", 1, 0)


def test_any_number_of_ranks_draws_and_scores_the_same(checkpoint, tmp_path):
    drawing = ["--number", "9", "--steps", "4", "--tokens", "60", "--out"]
    scoring = ["--score", str(tmp_path / "1.fasta"), "--tokens", "60", "--out"]
    cli([str(checkpoint), *drawing, str(tmp_path / "1.fasta")])
    cli([str(checkpoint), *scoring, str(tmp_path / "1.tsv")])
    for ranks, words, name in ((2, drawing, "2.fasta"), (4, drawing, "4.fasta"),
                               (2, scoring, "2.tsv")):
        done = fork_ranks(ranks, [ROOT / "sample_sedd.py", checkpoint, *words, name], tmp_path)
        assert done.returncode == 0, done.text
        one = tmp_path / f"1{Path(name).suffix}"
        assert (tmp_path / name).read_text() == one.read_text(), name
    assert (tmp_path / "1.fasta").read_text().count(">") == 9


def test_lengths_are_those_of_the_training_proteins_or_as_asked(checkpoint, tmp_path, capsys):
    cli([str(checkpoint), "--number", "40", "--steps", "1", "--out", str(tmp_path / "a.fasta")])
    drawn = [len(text) for _, text in named_sequences(tmp_path / "a.fasta")]
    assert set(drawn) == set(LENGTHS)
    cli([str(checkpoint), "--number", "9", "--steps", "1", "--length", "5-6"])
    assert set(re.findall(r"length=(\d+)", capsys.readouterr().out)) == {"5", "6"}
    bare = write_checkpoint(tmp_path / "bare.pt", lengths=None)
    assert "does not tell the lengths" in refused(capsys, bare, "--number", "2")


def test_temperature_and_top_p_shape_the_letters_and_not_the_speed():
    torch.manual_seed(0)
    log_score, mask = torch.randn(2, 5, 22, dtype=torch.float64), 21
    xt = torch.tensor([[21, 3, 21, 21, 20]] * 2)
    letters, masked = log_score[..., :20], xt == mask
    for temperature, top_p in ((0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (0.7, 0.4)):
        shaped = reshape_choice(log_score, xt, mask, temperature, top_p)
        assert torch.equal(shaped[~masked], log_score[~masked])
        assert torch.equal(shaped[..., mask], log_score[..., mask])
        new = shaped[..., :20].exp()
        assert torch.allclose(new.sum(-1)[masked], letters.exp().sum(-1)[masked])
        q = letters.exp() ** (1 / temperature)
        q = q / q.sum(-1, keepdim=True)
        for row, before in zip((new / new.sum(-1, keepdim=True))[masked], q[masked]):
            kept = row > 0
            assert torch.allclose(row[kept], before[kept] / before[kept].sum())
            least = before[kept].min()
            assert before[kept].sum() >= top_p - 1e-12 and (before[~kept] <= least).all()
            assert before[kept].sum() - least < top_p


# ------------------------------------------------------------------ scoring
LETTERS = np.append(np.arange(20, 0, -1), 7) * 1e6    # of the training data; X has no part


def exact_model(p):
    graph = make_graph("absorb", N_TOKENS)
    return Sedd(TrueScores(torch.from_numpy(p), graph), graph, make_noise("loglinear"), {},
                LETTERS, None, 60, {}, ())


def test_the_score_of_an_exact_model_is_the_exact_likelihood_within_its_error():
    p, random = np.arange(1, 21) / 210, np.random.default_rng(0)
    rows = ["".join(random.choice(list(AMINO_ACIDS), 50, p=p)) for _ in range(60)]
    exact = np.array([-np.log(p)[encode(row)].sum() for row in rows])
    scores = score_sequences(exact_model(p), rows, samples=32)
    unigram = [-np.log(LETTERS[encode(row)] / LETTERS[:20].sum()).sum() for row in rows]
    assert scores.unigram == pytest.approx(unigram, rel=1e-4) and (scores.residues == 50).all()
    error = math.hypot(*scores.error)
    assert error < 0.01 * exact.sum() and abs(scores.bound.sum() - exact.sum()) < 3 * error
    assert (np.abs(scores.bound - exact) < 2 * scores.error).mean() > 0.8   # each one's, too


def test_a_score_does_not_depend_on_the_other_sequences(checkpoint):
    sedd, rows = load_sedd(checkpoint), ["MKTAYIAK", "GSHHWACDEFGHIKL", "WWWWWWWWWW"]
    together = score_sequences(sedd, rows, samples=3)
    for i, row in enumerate(rows):
        alone = score_sequences(sedd, [row], samples=3)
        assert alone.bound[0] == pytest.approx(together.bound[i], rel=1e-5)


def test_longer_sequences_are_refused_or_scored_in_parts(checkpoint):
    sedd, row = load_sedd(checkpoint), "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"
    with pytest.raises(ValueError, match="56 residues, but the model was trained on at most 40"):
        score_sequences(sedd, [row])
    whole = score_sequences(sedd, [row], samples=4, window=True)
    parts = score_sequences(sedd, [row[:28], row[28:]], samples=4)
    assert whole.bound[0] == pytest.approx(parts.bound.sum())
    assert whole.error[0] == pytest.approx(math.hypot(*parts.error))


def test_each_position_is_scored_given_all_others_and_variants_by_it():
    p = np.arange(1, 21) / 210
    sedd, text = exact_model(p), "ACDEXWY"
    scores = residue_scores(sedd, text)
    known = [a != "X" for a in text]
    expected = [-math.log(p[AMINO_ACIDS.index(a)]) for a in text if a != "X"]
    assert scores[known] == pytest.approx(expected, abs=1e-5) and np.isnan(scores[4])
    ratios = variant_scores(sedd, text, [[(0, 19)], [(0, 19), (1, 18)]])
    first = math.log(p[19] / p[0])
    assert ratios == pytest.approx([first, first + math.log(p[18] / p[1])], abs=1e-4)


def test_a_masked_position_sees_the_rest_of_its_sequence(checkpoint):
    sedd = load_sedd(checkpoint)
    rows = torch.from_numpy(np.stack([encode("MKTAYIAK"), encode("MKTAYIAW")]).astype(np.int64))
    rows[:, 2] = sedd.graph.mask_id
    log_p = denoise(sedd, rows)[:, 2]
    assert torch.allclose(log_p.exp().sum(-1), torch.ones(2)) and not torch.allclose(*log_p)
    plain = residue_scores(sedd, "MKTAYIAK")[2]
    assert plain == pytest.approx(-float(log_p[0, AMINO_ACIDS.index("T")]), rel=1e-5)
    longer = "ACDEFGHIKL" * 6   # beyond the 40 residues: those around each position
    assert residue_scores(sedd, longer)[30] == pytest.approx(
        residue_scores(sedd, longer[10:50])[20], rel=1e-5)


def test_the_commands_print_tables(checkpoint, tmp_path, capsys):
    fasta = tmp_path / "p.fasta"
    fasta.write_text(">one first\nMKTAYI\nAKQ*\n>two\nACDXEFG\n")
    cli([str(checkpoint), "--score", str(fasta)])
    out, err = capsys.readouterr()
    head, one, two = (line.split("\t") for line in out.splitlines())
    assert one[:2] == ["one first", "9"] and two[1] == "7"
    nats, each, errors, unigram = np.array([one[2:], two[2:]], float).T
    assert each == pytest.approx(nats / [9, 6], abs=1e-4)   # X does not count
    said = re.search(r"15 residues: bound (\S+) nats .*error (\S+)\), perplexity (\S+) ", err)
    expected = [nats.sum() / 15, math.hypot(*errors) / 15, math.exp(nats.sum() / 15)]
    assert list(map(float, said.groups())) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    cli([str(checkpoint), "--score", str(fasta), "--each_position"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + 9 + 7


def test_variants_are_ranked_and_those_of_another_sequence_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "wild.fasta").write_text(">w\nMKTAYIAKQ\n")
    (tmp_path / "v.txt").write_bytes("\ufeffM1A  # \xfc\n\nk2w, Q9A,\nT3G\n".encode())
    words = [str(checkpoint), "--score", str(tmp_path / "wild.fasta"), "--mutations"]
    cli([*words, str(tmp_path / "v.txt")])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()][1:]
    assert {row[1] for row in rows} == {"M1A", "K2W,Q9A", "T3G"}
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)
    (tmp_path / "bad.txt").write_text("M1A\nA2W\n")
    assert "line 2: found A2W; the sequence has K there" in refused(capsys, *words,
                                                                    tmp_path / "bad.txt")


# ------------------------------------------------------------------ files
def test_averaged_weights_are_used_unless_not_wanted(checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    averaged, live = load_sedd(checkpoint), load_sedd(checkpoint, ema=False)
    for average, p in zip(state["ema"]["shadow_params"], averaged.model.parameters()):
        assert torch.equal(average, p)
    for name, p in live.model.named_parameters():
        assert torch.equal(state["model"][name], p)
    assert averaged.max_length == 40 and averaged.lengths[20] == 5 and averaged.letters[1] == 101


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
def test_an_export_reads_back_to_the_last_bit(tmp_path, capsys, graph, extras):
    pytest.importorskip("safetensors")
    sedd = load_sedd(write_checkpoint(tmp_path / "best.pt", graph))
    for name in ("folder", "published.pth"):
        export_sedd(sedd, tmp_path / name)
        again = load_sedd(tmp_path / name)
        assert again.model.state_dict().keys() == sedd.model.state_dict().keys()
        for key, value in sedd.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[key]), key
        assert type(again.graph) is type(sedd.graph)
        assert (again.config, again.max_length) == (sedd.config, 40)
        assert (again.letters == sedd.letters).all() and (again.lengths == sedd.lengths).all()
        times = torch.tensor([0.1, 0.5, 1.0])
        assert torch.equal(again.noise(times)[0], sedd.noise(times)[0])
        with pytest.raises(FileExistsError):
            export_sedd(sedd, tmp_path / name)
    assert load_sedd(tmp_path / "folder").about == sedd.about
    assert "would overwrite" in refused(capsys, tmp_path / "folder", "--length", 5, "--out",
                                        tmp_path / "folder" / "config.json")
    official = torch.load(tmp_path / "published.pth", weights_only=True)
    assert load_official(sedd.model, official) == "ema"


@pytest.mark.parametrize("words, expected", [
    (["--number", "0"], "--number 0; expected at least 1"),
    (["--length", "9-3"], "found the length 9-3; expected such as 80-120"),
    (["--length", "9" * 20], "at most 1,000,000"),
    (["--score", __file__, "--seed", "1"], "found --seed, which --score does not use"),
    (["--scaffold", "MKT[4]", "--score", __file__], "not allowed with argument"),
    (["--score", "nope.fasta"], "there is no file nope.fasta"),
    (["--score", __file__], "found letters before a header"),
    (["--window"], "--window without --score"),
    (["--temperature", "0", "--length", "5"], "expected temperature above 0"),
    (["--out", "no/where.fasta"], "in a folder that is missing"),
    (["--report", __file__, "--out", "new.fasta"], "found letters before a header"),
    (["--report", __file__, "--out", "new.png"], "expected --out NAME.fasta"),
    (["--score", __file__, "--out", __file__], "the result would overwrite"),
    (["--seed", 2**63], f"--seed {2**63}; expected at most"),
    (["--mutations", __file__, "--score", __file__, "--each_position"], "not allowed with"),
    (["--score", __file__, "--each_position", "--samples", "4"], "found --samples with"),
    (["--export", "e", "--out", "o.fa"], "found --out with --export"),
    (["--out", "/proc/o.fa"], "/proc/"),
    (["--scaffold", "MKX[4]"], "found 'X' at place 3"),
    (["--infill", __file__], "found letters before a header")])
def test_what_cannot_be_done_is_refused_in_one_message_before_anything_is_written(
        checkpoint, tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, checkpoint, *words)
    assert not list(tmp_path.iterdir())


def test_a_result_replaces_neither_a_device_nor_the_checkpoint(checkpoint, tmp_path, capsys):
    former = checkpoint.read_bytes()
    assert "would overwrite" in refused(capsys, checkpoint, "--length", 5, "--out", checkpoint)
    assert checkpoint.read_bytes() == former
    os.mkfifo(tmp_path / "pipe")
    assert "is a folder or a device" in refused(capsys, checkpoint, "--out", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_what_is_no_model_is_refused(checkpoint, tmp_path, capsys, extras):
    (tmp_path / "text.pt").write_text("hello")
    spoilt = torch.load(write_checkpoint(tmp_path / "nan.pt"), weights_only=True)
    spoilt["ema"]["shadow_params"][3][:] = math.nan
    torch.save(spoilt, tmp_path / "nan.pt")
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "other.pt")
    for name, expected in (("text.pt", "cannot read"), ("other.pt", "holds no SEDD model"),
                           ("nan.pt", "nan or infinite numbers, first"),
                           ("absent.pt", "No such file"), ("", "give checkpoints/best.pt")):
        assert expected in refused(capsys, tmp_path / name)
    pytest.importorskip("safetensors")
    export_sedd(load_sedd(checkpoint), tmp_path / "folder")
    weights = tmp_path / "folder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot read" in refused(capsys, tmp_path / "folder")


# ------------------------------------------------------------------ report
def test_the_report_of_known_sequences():
    assert low_complexity("A" * 30) == 1 and low_complexity("ACDEFGHIKLMNPQRSTVWY") == 0
    assert longest_repeat("ACDEFGHIKL") == 0 and longest_repeat("WWWW") == 3
    assert longest_repeat("MKTAYGMKTAYH") == 5
    rows = ["MKTAYIAKQRQISFVKSHFSRQ", "GGGGGGAAAAAWWWWWCDEFGH"]
    figures = measure(rows)
    assert divergence(figures.residues, figures.residues) == 0
    assert figures.residues.sum() == pytest.approx(1) and (figures.lengths == 22).all()
    new, identity, by_chance, nearest = compare(
        [rows[0], "MKTAYIAKQRWWWWWWWWWWWW", "CCCCCCCCC"], rows)
    assert nearest.tolist()[:2] == [0, 0] and nearest[2] == -1 and np.isnan(identity[2])
    assert new[0] == 0 and identity[0] == 1 and new[2] == 1 and 0.4 < identity[1] < 0.7
    assert by_chance[0] < 0.7 and np.isnan(by_chance[2])
    assert difference([rows[0], rows[0]]) == 0 and difference(rows) == 1


def test_a_long_protein_is_near_to_its_own_stretches_only():
    random = np.random.default_rng(0)
    long, other = ("".join(random.choice(list(AMINO_ACIDS), n)) for n in (5000, 100))
    copied = long[2000:2040] + "WW" + long[2040:2100]   # with an insertion
    _, identity, by_chance, nearest = compare([copied, other], [other[:7] + "A" * 99, long])
    assert nearest[0] == 1 and identity[0] > 0.97
    assert identity[1] < 0.5 and (by_chance < 0.5).all()   # letters in order, somewhere, are not it


def test_samples_come_with_a_report(checkpoint, tmp_path, capsys, extras):
    pytest.importorskip("matplotlib")
    (tmp_path / "ref.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFSRQ\n")
    cli([str(checkpoint), "--number", "3", "--steps", "2", "--length", "20", "--report",
         str(tmp_path / "ref.fasta"), "--out", str(tmp_path / "t0.5")])
    assert "distinct sequences" in capsys.readouterr().err
    assert (tmp_path / "t0.5.png").stat().st_size > 10_000
