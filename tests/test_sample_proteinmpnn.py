"""Does sample_proteinmpnn.py draw and score what it was asked to, and refuse what it cannot do?"""

import json
import re

import numpy as np
import pytest
import torch

import sample_proteinmpnn
from proteinmpnn_model import (decoding_order, load_proteinmpnn, random_proteinmpnn, to_checkpoint)
from structure_data import NAMES, PHI_PSI, build_backbone
from test_structure_data import Atoms

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
NATIVE = "MKTAYIAKQRQISFVKSHFSRQ"       # 22 residues, numbered from 10 in the files


def helix(n):
    """(n, 4, 3) Angstrom, rounded as in a PDB file."""
    return build_backbone(*zip(*[PHI_PSI["helix"]] * n)).round(3)


def write_pdb(path, chains):
    """A file of helices of these sequences, 15 Angstrom apart; "-" is a gap."""
    atoms = Atoms()
    for c, (chain, sequence) in enumerate(chains.items()):
        for i, (letter, xyz) in enumerate(zip(sequence, helix(len(sequence)) + [0, 15 * c, 0])):
            if letter != "-":
                atoms.add(chain, 10 + i, NAMES[LETTERS.index(letter)], xyz=xyz)
    path.write_text(atoms.pdb())
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a small model; what it draws depends much on the place and the letters around.

    One decoder layer, so that a residue does not see in which order others were decoded.
    """
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    model = random_proteinmpnn(3, hidden_size=16, n_encoder=2, n_decoder=1, num_edges=12)
    with torch.no_grad():
        model.W_s.weight *= 20
        model.W_out.weight *= 2
        model.features.norm_edges.weight *= 4
    torch.save(to_checkpoint(model), path)
    return path


@pytest.fixture
def pdb(tmp_path):
    return write_pdb(tmp_path / "one.pdb", {"A": NATIVE})


@pytest.fixture
def dimer(tmp_path):
    return write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": NATIVE})


@pytest.fixture
def sample(weights, capsys):
    """Function: arguments after the checkpoint -> (standard output, standard error)."""
    def run(*args, code=0, checkpoint=weights):
        try:
            found = sample_proteinmpnn.main([str(checkpoint), *map(str, args)])
        except SystemExit as end:                                   # argparse
            found = end.code
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err
    return run


def read(text):
    """[(dict of the header's numbers, sequence)]."""
    lines = text.splitlines()
    assert len(lines) % 2 == 0 and all(line[0] == ">" for line in lines[::2])
    return [({key: float(value) for key, value in re.findall(r"(\w+)=(-?[\d.]+)", head)}, sequence)
            for head, sequence in zip(lines[::2], lines[1::2])]


def drawn(output):
    """The drawn sequences of what `sample` returned."""
    return [sequence for _, sequence in read(output[0])[1:]]


def helix_log_probs(weights, sequence, order):
    """(L, 21) of a helix with this sequence; X has no coordinates."""
    model, L = load_proteinmpnn(weights).eval(), len(sequence)
    X, index = torch.from_numpy(helix(L))[None], torch.arange(L)[None]
    mask = torch.tensor([[float(letter != "X") for letter in sequence]])
    S = torch.tensor([[(LETTERS + "X").index(letter) for letter in sequence]])
    with torch.no_grad():
        graph = model.graph(X * mask[..., None, None], mask, index, torch.ones_like(index))
        return model(graph, S, torch.as_tensor(order)[None])[0]


def test_the_same_seed_gives_the_same_sequences_whatever_the_batch_size_and_number(sample, pdb):
    args = ("--temperature", 1)
    one, five = (sample(pdb, *args, "--num", 5, "--batch_size", size) for size in (1, 5))
    assert one == five and len(set(drawn(one))) == 5
    assert drawn(sample(pdb, *args, "--num", 2)) == drawn(one)[:2]
    assert drawn(sample(pdb, *args, "--seed", 1)) != drawn(one)[:1]


def test_letters_are_drawn_from_the_softmax_of_the_model(sample, weights, tmp_path):
    """Two residues that are tied and do not see one another, after all others."""
    pdb, native = write_pdb(tmp_path / "short.pdb", {"A": "ACDEFG"}), "ACDEFG"
    found = drawn(sample(pdb, "--num", 1500, "--batch_size", 500, "--bias", "W=1", "--omit", "C",
                         "--temperature", 2, "--orders", 1, "--mutable_positions", "A12", "A14",
                         "--tied_positions", "A12,A14"))
    assert {s[:2] + s[3] + s[5] for s in found} == {"ACEG"} and all(s[4] == s[2] for s in found)
    logits = (helix_log_probs(weights, native, [0, 1, 3, 5, 2, 4])[2]
              + helix_log_probs(weights, native, [0, 1, 3, 5, 4, 2])[4]) / 2
    logits[LETTERS.index("W")] += 1
    logits[[LETTERS.index("C"), 20]] = -torch.inf
    expected = torch.softmax(logits / 2, 0)
    share = torch.tensor([[s[2] for s in found].count(letter) for letter in LETTERS] + [0])
    error = (expected * (1 - expected) / len(found)).sqrt()
    assert ((share / len(found) - expected).abs() <= 4.5 * error + 1e-9).all()


def test_fixed_positions_keep_their_letters_and_mutable_ones_are_the_rest(sample, pdb):
    args = (pdb, "--num", 6, "--temperature", 3)
    fixed = sample(*args, "--fixed_positions", "A10-A14", "A20")
    for i in range(22):
        letters = {sequence[i] for sequence in drawn(fixed)}
        assert letters == {NATIVE[i]} if i in (0, 1, 2, 3, 4, 10) else len(letters) > 1
    assert "--fixed_positions: 6 positions by chain and number in the file" in fixed[1]
    assert sample(*args, "--mutable_positions", "5-9", "11-21")[0] == fixed[0]


def test_fixed_chains_are_context_that_no_sequence_shows(sample, dimer):
    text = sample(dimer, "--chains", "B", "--num", 1)[0]
    assert "fixed_chains=['A'], designed_chains=['B']" in text
    (alone, native), (_, sequence) = read(sample(dimer, "--chains", "B", "--fixed_chains")[0])
    with_a = read(text)[0][0]
    assert native == NATIVE and len(sequence) == 22
    assert alone["score"] == alone["global_score"] != with_a["score"] != with_a["global_score"]
    assert sample(dimer, "--fixed_chains", "A", "--num", 1)[0] == text


def test_omitted_letters_never_come_and_a_strong_bias_wins(sample, pdb):
    for omitted in ("", "CGPW"):
        found = drawn(sample(pdb, "--num", 40, "--temperature", 50, "--omit", omitted))
        assert set("".join(found)) == set(LETTERS) - set(omitted)
    assert drawn(sample(pdb, "--bias", "W=50")) == ["W" * 22]


def test_tied_chains_of_a_homodimer_are_equal(sample, dimer):
    args = (dimer, "--num", 3, "--temperature", 2)
    homomer, notes = sample(*args, "--homomer")
    halves = [sequence.split("/") for sequence in drawn((homomer, notes))]
    assert all(a == b for a, b in halves) and len({a for a, _ in halves}) == 3
    for group in ("A10-A31,B10-B31", "0-21,22-43"):
        assert sample(*args, "--tied_positions", group)[0] == homomer
    groups = sample(*args, "--tied_positions", "A12,B20", "A13,B21")
    for sequence in drawn(groups):
        a, b = sequence.split("/")
        assert a != b and (a[2], a[3]) == (b[10], b[11])
    assert sample(*args, "--tied_positions", "A12,B20 A13,B21") == groups, "quoted as one word"


def test_score_is_the_mean_over_designed_residues_and_global_score_over_all(
        sample, weights, tmp_path):
    """Of one designed residue, it is its log-probability given all others; gaps do not count."""
    pdb = write_pdb(tmp_path / "gap.pdb", {"A": "ACD-EFGHI"})
    head, sequence = read(sample(pdb, "--mutable_positions", "A15", "--temperature", 1)[0])[0]
    assert sequence == "ACDXEFGHI"
    order = decoding_order(torch.tensor([[0, 0, 0, 0, 0, 1, 0, 0, 0]]), torch.ones(1, 9))[0]
    log_prob = helix_log_probs(weights, sequence, order)[5, LETTERS.index("F")].item()
    assert head["score"] == pytest.approx(-log_prob, abs=1e-4)
    whole = read(sample(pdb)[0])[0][0]
    assert whole["score"] == whole["global_score"]


def test_recovery_is_counted_on_designed_positions(sample, pdb, tmp_path):
    fasta = tmp_path / "given.fasta"
    given = "MKTAY" + "W" * 5 + NATIVE[10:]                # 5 of the 10 first residues differ
    fasta.write_text(f">given\n{given[:9]}\n{given[9:]}\n")
    for positions, share in (("A10-A19", 0.5), ("A10-A13", 1), ("A15-A17", 0),
                             ("A10-A31", 17 / 22)):
        (head, sequence), = read(sample(pdb, "--mutable_positions", positions,
                                        "--score_only", fasta)[0])
        assert (head["seq_recovery"], sequence) == (round(share, 4), given)


# ---- several structures and temperatures, settings per structure, files of arrays ----

def as_json(tmp_path, settings):
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return tmp_path / "settings.json"


def arrays(folder, kind, name="one"):
    return dict(np.load(folder / kind / f"{name}.npz"))


def test_many_structures_and_temperatures_give_the_designs_of_calls_of_their_own(
        sample, dimer, pdb, tmp_path):
    folder = tmp_path / "backbones"
    folder.mkdir()
    pdb, dimer = pdb.rename(folder / "one.pdb"), dimer.rename(folder / "dimer.pdb")
    (folder / "notes.txt").write_text("not a structure")
    args = ("--num", 3, "--batch_size", 2)
    near = drawn(sample(pdb, "--num", 2, "--temperature", 2, 2.0001))
    assert len(set(near)) == 4                      # new draws at each temperature
    text, expected = sample(folder, *args, "--temperature", 0.5, 2)[0], []
    for path in (dimer, pdb):
        hot, cold = (sample(path, *args, "--temperature", T)[0] for T in (2, 0.5))
        expected += [*read(cold), *read(hot)[1:]]
    assert read(text) == expected
    heads = [line for line in text.splitlines() if line[0] == ">"]
    assert [head.startswith(">one, ") for head in heads] == [False] * 7 + [True] * 7
    sample(dimer, pdb, *args, "--temperature", 0.5, 2, "--out_folder", tmp_path / "new")
    written = [(tmp_path / "new" / "seqs" / f"{name}.fa").read_text() for name in ("dimer", "one")]
    assert read("".join(written)) == expected


def test_saved_scores_and_probabilities_belong_to_the_designs(sample, dimer, tmp_path):
    folder = tmp_path / "out"
    args = (dimer, "--chains", "B", "A", "--fixed_positions", "A12-A20")
    sample(*args, "--num", 5, "--temperature", 2, "--omit", "C", "--save_scores", "--save_probs",
           "1", "--out_folder", folder)
    fasta = folder / "seqs" / "dimer.fa"
    designs, designs_file = read(fasta.read_text())[1:], fasta.read_bytes()
    sequences = [sequence.replace("/", "") for _, sequence in designs]
    scores, probs = (arrays(folder, kind, "dimer") for kind in ("scores", "probs"))
    assert ["".join(probs["alphabet"].item()[i] for i in S) for S in probs["S"]] == sequences
    assert probs["probs"].shape == (5, 44, 21) and probs["position"][23] == "A11"
    mask = probs["mask"]
    assert [str(x) for x in probs["position"][~mask]] == [f"A{i}" for i in range(12, 21)]
    assert (probs["probs"][:, ~mask] == 0).all() and (probs["probs"][..., [1, 20]] == 0).all()
    assert probs["probs"][:, mask].sum(-1) == pytest.approx(1, abs=1e-5)
    of_drawn = np.take_along_axis(probs["probs"], probs["S"][..., None], -1)[..., 0][:, mask]
    assert of_drawn.min() > 0 and 0.1 < of_drawn.mean() < 1
    again = read(sample(*args, "--score_only", fasta, "--batch_size", 2)[0])[1:]
    of_again, of_designs = ([[head[key] for key in ("score", "global_score", "seq_recovery")]
                             for head, _ in records] for records in (again, designs))
    assert of_again == of_designs and len({row[0] for row in of_again}) == 5
    for k, key in enumerate(("score", "global_score")):
        assert [row[k] for row in of_again] == pytest.approx(scores[key], abs=1e-4)
    sample(*args, "--score_only", fasta, "--save_scores", "--out_folder", tmp_path / "again")
    later = arrays(tmp_path / "again", "scored", "dimer")
    assert later["score"][1:] == pytest.approx(scores["score"], abs=1e-5)
    sample(*args, "--score_only", fasta, "--save_scores", "--out_folder", folder)
    scored = folder / "scored" / "dimer.fa"
    assert read(scored.read_text())[1:] == again and fasta.read_bytes() == designs_file
    assert (folder / "scored" / "dimer.npz").exists()
    others = tmp_path / "others.fasta"
    others.write_text(f">d1, rosetta_score=-250.1, my-score=1, score=3\n{NATIVE}/{NATIVE}\n")
    note = sample(*args, "--score_only", others, "--out_folder", folder)[1]
    assert scored.read_text().startswith(">d1, rosetta_score=-250.1, my-score=1, score=")
    assert scored.read_text().count("score=") == 4 and " 1 sequence(s), to " in note
    assert not (folder / "scored" / "dimer.npz").exists(), "these were scores of other sequences"
    err = sample(*args, "--score_only", scored, "--out_folder", folder, code=2)[1]
    assert f"found {scored} to be written, which is the input" in err


def test_unconditional_and_conditional_probabilities_are_those_of_the_model(
        sample, weights, tmp_path):
    pdb, folder = write_pdb(tmp_path / "one.pdb", {"A": "ACD-EFGHI"}), tmp_path / "out"
    given = tmp_path / "given.fasta"
    given.write_text(">a\nACDXEFGHI\n>b\nWWWXWWWWW\n")
    args = ("--fixed_positions", "A10", "--orders", 1, "--out_folder", folder)
    sample(pdb, *args, "--unconditional_probs", "--conditional_probs", "--score_only", given)
    alone, others = (arrays(folder, f"{kind}conditional_probs")["log_p"] for kind in ("un", ""))
    assert np.isnan(alone[[0, 3]]).all() and np.isnan(others[:, [0, 3]]).all()
    for i in (1, 2, 4, 5, 6, 7, 8):
        rest = [k for k in range(9) if k != i]
        for row, sequence in enumerate(("ACDXEFGHI", "WWWXWWWWW")):
            first = helix_log_probs(weights, sequence, [i, *rest])[i]
            last = helix_log_probs(weights, sequence, [*rest, i])[i]
            assert alone[i] == pytest.approx(first.numpy(), abs=1e-4)
            assert others[row, i] == pytest.approx(last.numpy(), abs=1e-4)


def test_settings_by_position_act_at_their_position_only(sample, dimer, tmp_path):
    args = (dimer, "--chains", "B", "A", "--num", 30, "--temperature", 30, "--omit", "C")

    def letters(option, settings):
        """Those drawn at each position of chains B and A."""
        path = as_json(tmp_path, {"dimer": settings, "other": {}})
        found = drawn(sample(*args, f"--{option}", path))
        return [set(column) for column in zip(*(s.replace("/", "") for s in found))]

    matrix = np.zeros((22, 21))
    matrix[4, LETTERS.index("W")] = 1e4
    columns = letters("bias_by_res_jsonl", {"A": matrix.tolist()})
    assert columns.pop(22 + 4) == {"W"} and all(len(letters) > 5 for letters in columns)
    columns = letters("omit_AA_jsonl", {"A": [[[1, 2], "ADEFGHIKLM"], [[2], "NPQRSTVW"]]})
    assert columns[23] == {"Y"} and columns[22] <= set("NPQRSTVWY") and len(columns[22]) > 3
    assert all(letters - set("NPQRSTVWY") for letters in columns[:22] + columns[24:])
    assert set().union(*columns) == set(LETTERS) - {"C"}
    same = sample(*args, "--bias_AA_jsonl", as_json(tmp_path, {"E": 40, "K": -3}))[0]
    assert same == sample(*args, "--bias", "E=40,K=-3")[0]


def test_settings_of_a_file_are_those_of_the_options(sample, dimer, tmp_path):
    args = (dimer, "--num", 2, "--temperature", 2)
    for option, settings, given in (
            ("chain_id_jsonl", [["B"], ["A"]], ("--chains", "B")),
            ("fixed_positions_jsonl", {"A": [1, 3], "B": [22]},
             ("--fixed_positions", "A10", "A12", "B31")),
            ("tied_positions_jsonl", [{"A": [3], "B": [11]}, {"A": [[4], [1]], "B": [[12], [1]]}],
             ("--tied_positions", "A12-A13,B20-B21"))):
        path = as_json(tmp_path, {"dimer": settings})
        assert sample(*args, f"--{option}", path)[0] == sample(*args, *given)[0]


def test_a_negative_weight_makes_the_tied_state_unlikely(sample, dimer, tmp_path):
    def of_pair(weight, chains="BA"):
        groups = [{"A": [[3], [1.0]], "B": [[9], [weight]]}]
        sample(dimer, "--chains", *chains, "--mutable_positions", "A12", "B18", "--save_probs",
               "--out_folder", tmp_path, "--tied_positions_jsonl",
               as_json(tmp_path, {"dimer": groups}))
        found = arrays(tmp_path, "probs", "dimer")
        a12 = found["probs"][0, found["position"].tolist().index("A12")]
        return np.log(a12[:20].astype(float).clip(1e-300))

    zero, half, minus = of_pair(0), of_pair(0.01), of_pair(-0.01)
    liked = half - zero                                     # by position B18, up to a constant
    assert np.corrcoef(liked, zero - minus)[0, 1] > 0.99 and np.ptp(liked) > 0.01
    assert (of_pair(0, "AB") == zero).all()


def test_gaps_and_broken_residues_are_left_out_of_their_groups(sample, tmp_path):
    """As the published helper ties them: row by row, whatever is resolved there."""
    gapped = NATIVE[:3] + "-" + NATIVE[4:]
    dimer = write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": gapped})
    args = (dimer, "--num", 2, "--temperature", 2, "--tied_positions_jsonl")
    groups = [{"A": [i], "B": [i]} for i in range(1, 23)]
    out = sample(*args, as_json(tmp_path, {"dimer": groups}))
    for sequence in drawn(out):
        a, b = sequence.split("/")
        assert a[:3] + a[4:] == b[:3] + b[4:] and b[3] == "X" != a[3]
    assert "1 tied positions are gaps or lack atoms" in out[1]
    assert drawn(sample(*args[:-1], "--homomer")) == drawn(out)
    # What is left of a group is drawn as if it were in none, whatever its weight was.
    alone = [{"A": [[4], [-0.5]], "B": [[4], [1.0]]}]
    assert drawn(sample(*args, as_json(tmp_path, {"dimer": alone}))) == drawn(sample(*args[:-1]))


def test_a_pssm_that_has_it_all_decides_and_one_without_trust_changes_nothing(
        sample, pdb, tmp_path):
    target, plain = NATIVE[::-1], sample(pdb, "--num", 3, "--temperature", 1)[0]
    letters = np.eye(21)[[LETTERS.index(letter) for letter in target]]
    args = (pdb, "--num", 3, "--temperature", 1, "--pssm_jsonl", tmp_path / "settings.json")
    for coef, found in ((1, [target] * 3), (0, drawn((plain,)))):
        as_json(tmp_path, {"one": {"A": {"pssm_coef": [coef] * 22, "pssm_bias": letters.tolist(),
                                         "pssm_log_odds": (letters - 0.5).tolist()}}})
        assert drawn(sample(*args, "--pssm_multi", 1)) == found
    rare = drawn(sample(*args, "--pssm_log_odds_flag", 1, "--pssm_threshold", -0.1))
    as_target = np.mean([a == b for s in rare for a, b in zip(s, target)])
    assert as_target > 0.5 > np.mean([a == b for s in found for a, b in zip(s, target)])
    assert drawn(sample(*args, "--pssm_log_odds_flag", 1, "--pssm_threshold", -1)) == found


def test_backbone_noise_is_new_for_each_sequence_and_leaves_scores_alone(sample, pdb, tmp_path):
    sample(pdb, "--mutable_positions", "A20", "--num", 5, "--temperature", 9, "--save_probs",
           "--out_folder", tmp_path, "--backbone_noise", 0.3)
    of_one_residue = arrays(tmp_path, "probs")["probs"][:, 10]
    assert np.ptp(of_one_residue, 0).max() > 1e-3
    args, out = (pdb, "--temperature", 1, "--num", 5), tmp_path / "noisy.fasta"
    sample(*args, "--backbone_noise", 0.3, "--batch_size", 4, "--out", out)
    noisy = out.read_text()
    assert sample(*args, "--backbone_noise", 0.3, "--batch_size", 1)[0] == noisy
    assert read(noisy)[0] == read(sample(*args)[0])[0]
    again = read(sample(pdb, "--score_only", out)[0])
    assert [head["score"] for head, _ in again] == [head["score"] for head, _ in read(noisy)]


BAD = {                                                     # arguments: words of the message
    "--chains Z": "Z; expected chains of",
    "--chains A --fixed_chains A": "chain A is to be designed and to be fixed",
    "--fixed_positions A9": "position A9 is not there",
    "--fixed_positions A12 --mutable_positions A13": "together; expected one of them",
    "--fixed_positions 0-43": "no position is left to design",
    "--tied_positions A12": "at least two parts",
    "--tied_positions A12,B12 --fixed_positions A12": "A12 (fixed), B12 (designed)",
    "--homomer --chains A": "share no residue number",
    "--bias W=0 W=2": "found W twice",
    "--temperature warm": "found --temperature warm",
    "--score_only good.fasta --num 3": "found --num with --score_only",
    "--score_only short.fasta": "chains of [22, 21] letters; expected [22, 22]",
    "--score_only lower.fasta": "'m' at A10",
    "--score_only unknown.fasta": "'X' at A11 (position 1, 0-based)",
    "--save_probs": "without --out_folder",
    "--pssm_multi 0.5": "without FILE",
    "--omit_AA_jsonl list.json": "expected JSON objects",
    "--omit_AA_jsonl twice.json": 'key "dimer" given twice',
}
PSSM = {"pssm_coef": [1] * 22, "pssm_bias": [[0.5] * 21] * 22, "pssm_log_odds": [[0] * 21] * 22}
# Settings of the structure "dimer" in the file of an option: words of the message.
BAD_SETTINGS = [
    ("omit_AA", None, 'found settings for ["other"]; expected dimer among them'),
    ("omit_AA", {"Z": []}, 'found chain "Z"; expected one of A B'),
    ("omit_AA", {"A": [[[23], "G"]]}, "chain A: found [23]; expected a list of rows from 1 to 22"),
    ("omit_AA", {"B": [[[2], "ACDEFGHIKLMNPQRSTVWY"]]}, "no letter to draw at B11"),
    ("bias_by_res", {"A": [[0.0] * 21]}, "expected numbers of shape (22, 21)"),
    ("tied_positions", [{"A": [1], "B": [1]}, {"A": [1, 2]}], "in two groups"),
    ("pssm", {"A": PSSM}, "pssm_bias at A10 of dimer with a sum of"),
    ("pssm", {"A": {**PSSM, "pssm_bias": np.eye(21)[[20] * 22].tolist()}}, "no letter to draw at"),
]


@pytest.mark.parametrize("option, settings, words", BAD_SETTINGS)
def test_bad_settings_are_refused_by_structure_and_chain(
        sample, dimer, tmp_path, option, settings, words):
    path = as_json(tmp_path, {"other": {}} if settings is None else {"dimer": settings})
    more = ("--pssm_multi", 1) if option == "pssm" else ()
    args = (f"--{option}_jsonl", path, *more, "--out_folder", tmp_path / "out")
    assert words in sample(dimer, *args, code=2)[1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_one_clear_error_and_leaves_no_file(
        sample, dimer, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    if text == "--device xpu" and torch.xpu.is_available():
        pytest.skip("this machine has an XPU")
    for name, letters in {"good": f"{NATIVE}/{NATIVE}", "short": f"{NATIVE}/{NATIVE[1:]}",
                          "lower": f"m{NATIVE[1:]}/{NATIVE}",
                          "unknown": f"MX{NATIVE[2:]}/{NATIVE}"}.items():
        (tmp_path / f"{name}.fasta").write_text(f">a\n{letters}\n")
    (tmp_path / "empty.fasta").write_text("\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "twice.json").write_text('{"dimer": {}}\n{"dimer": {}}\n')
    (tmp_path / "headless.fasta").write_text(NATIVE)
    before = sorted(tmp_path.iterdir())
    out, err = sample(dimer, "--out", tmp_path / "new.fasta", *text.split(), code=2)
    assert BAD[text] in err and out == "" and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_bad_files_are_refused_by_name_and_an_old_result_stays(sample, pdb, tmp_path):
    old, bad, shifted = tmp_path / "old.fasta", tmp_path / "bad.pt", tmp_path / "shifted.pdb"
    old.write_text("as it was")
    bad.write_bytes(b"not weights")
    write_pdb(shifted, {"A": "MKTAY", "B": "KTAYM"})
    (tmp_path / "empty").mkdir()
    for structures, more, words in (
            ([pdb], {"checkpoint": bad}, "bad.pt"), ([old], {}, "old.fasta"),
            ([tmp_path / "none.pdb"], {}, "none.pdb"), ([pdb, pdb], {}, "of different names"),
            ([pdb, tmp_path / "empty"], {}, "no structure in the folder"),
            ([pdb, shifted, "--chains", "B"], {}, f"{pdb}: --chains: found B"),
            ([shifted, "--homomer"], {}, "A10 M, B10 K; expected the same letter")):
        out, err = sample(*structures, "--out", old, code=2, **more)
        assert words in err and err.startswith("sample_proteinmpnn.py: error: ") and out == ""
        assert old.read_text() == "as it was"


def test_an_input_is_never_written_over(sample, weights, dimer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given.fasta").write_text(f">a\n{NATIVE}/{NATIVE}\n")
    (tmp_path / "w.pt").write_bytes(weights.read_bytes())
    (tmp_path / "link.pdb").symlink_to(dimer)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for out in ("w.pt", "dimer.pdb", str(dimer), "link.pdb", "given.fasta"):
        err = sample("./dimer.pdb", "--score_only", "given.fasta", "--out", out, code=2,
                     checkpoint="w.pt")[1]
        assert f"found {out} to be written, which is the input" in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_designs_of_unknown_letters_have_scores_where_there_are_letters_and_no_nan(sample, pdb):
    pdb.write_text(re.sub("|".join(NAMES), "UNK", pdb.read_text()))
    text = sample(pdb)[0]
    (native, letters), (head, _) = read(text)
    assert "no residue of known letter" in text and letters == "X" * 22
    assert native.keys() == {"seed"} and "nan" not in text
    assert head.keys() == {"T", "sample", "score", "global_score"}
