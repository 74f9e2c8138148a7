"""Does sample_proteinmpnn.py draw and score what it was asked to, and refuse what it cannot do?"""

import csv
import itertools
import json
import os
import re

import numpy as np
import pytest
import torch

import sample_proteinmpnn
from launchers import ROOT, Printed, fork_ranks
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn.weights import load_proteinmpnn
from mpnn_cases import Atoms
from proteins.structures import NAMES
from tool_runs import assert_refused

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
NATIVE = "MKTAYIAKQRQISFVKSHFSRQ"       # 22 residues, numbered from 10 in the files


def helices(sequences):
    """(n, 4, 3) Angstrom of each sequence, 15 Angstrom apart, rounded as in a PDB file."""
    return [build_backbone(*zip(*[PHI_PSI["helix"]] * len(sequence))).round(3) + [0, 15 * c, 0]
            for c, sequence in enumerate(sequences)]


def write_pdb(path, chains):
    """A file of helices of these sequences; "-" is a gap."""
    atoms = Atoms()
    for (chain, sequence), X in zip(chains.items(), helices(chains.values())):
        for i, (letter, xyz) in enumerate(zip(sequence, X)):
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
        end_code = 0
        try:
            sample_proteinmpnn.main([str(checkpoint), *map(str, args)])
        except SystemExit as end:
            end_code = end.code
        out, err = capsys.readouterr()
        assert end_code == code, err
        return out, Printed(err)
    return run


@pytest.fixture
def refuses(weights, tmp_path):
    """Function (words after the weights, words that the refusal names) -> what it says. In the
    current folder: w.pt, one.pdb, dimer.pdb."""
    (tmp_path / "w.pt").write_bytes(weights.read_bytes())
    write_pdb(tmp_path / "one.pdb", {"A": NATIVE})
    write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": NATIVE})

    def check(words, named, checkpoint="w.pt"):
        return assert_refused(sample_proteinmpnn.main, f"{checkpoint} {words}", named, tmp_path)

    return check


def read(text):
    """[(dict of the header's numbers, sequence)]."""
    lines = text.splitlines()
    assert len(lines) % 2 == 0 and all(line[0] == ">" for line in lines[::2])
    figures = [re.findall(r"(\w+)=(-?[\d.]+)", head) for head in lines[::2]]
    return [({name: float(value) for name, value in each}, sequence)
            for each, sequence in zip(figures, lines[1::2])]


def drawn(output):
    """The drawn sequences of what `sample` returned."""
    return [sequence for _, sequence in read(output[0])[1:]]


def helix_log_probs(weights, chains, order):
    """(L, 21) of helices with these sequences, such as "ACD/EFG"; X has no coordinates."""
    model = load_proteinmpnn(weights).eval()
    chains = chains.split("/")
    X = torch.from_numpy(np.concatenate(helices(chains))).float()[None]
    sequence = "".join(chains)
    chain_id = torch.tensor([[c for c, chain in enumerate(chains, 1) for _ in chain]])
    index = torch.arange(len(sequence)) + 100 * (chain_id - 1)
    mask = torch.tensor([[float(letter != "X") for letter in sequence]])
    S = torch.tensor([[(LETTERS + "X").index(letter) for letter in sequence]])
    with torch.no_grad():
        graph = model.graph(X * mask[..., None, None], mask, index, chain_id)
        return model(graph, S, torch.tensor([order]))[0]


def test_designs_are_summed_up_by_their_means_over_designed_residues(dimer, sample):
    """Those of chain A are written last."""
    out, err = sample(dimer, "--chains", "B", "A", "--mutable_positions", "A12", "A15",
                      "--num", 3, "--temperature", 1)
    designs = read(out)[1:]
    score, recovered = (np.mean([head[name] for head, _ in designs])
                        for name in ("score", "seq_recovery"))
    designed = [[sequence.split("/")[1][row] for row in (2, 5)] for _, sequence in designs]
    differ = np.mean([a != b for one, other in itertools.combinations(designed, 2)
                      for a, b in zip(one, other, strict=True)])
    assert 0 < differ < 1
    assert (f"dimer: mean of 3 designs: score {score:.3f}, recovery {recovered:.3f}, "
            f"diversity {differ:.3f}\n") in err


def test_the_same_seed_gives_the_same_sequences_whatever_the_batch_size_and_number(sample, pdb):
    args = ("--temperature", 1)
    one, five = (sample(pdb, *args, "--num", 5, "--batch_size", size) for size in (1, 5))
    assert one == five and len(set(drawn(one))) == 5
    assert drawn(sample(pdb, *args, "--num", 2)) == drawn(one)[:2]
    assert drawn(sample(pdb, *args, "--seed", 1)) != drawn(one)[:1]


def test_of_several_ranks_the_first_draws_alone(sample, weights, pdb, tmp_path):
    alone, _ = sample(pdb, "--num", 2)
    done = fork_ranks(2, [ROOT / "sample_proteinmpnn.py", weights, pdb, "--num", 2], tmp_path)
    said = " ".join(done.text.split())      # lines break where paths are long
    assert done.returncode == 0 and said.count("the first one does all the work") == 1
    assert [said.count(line) for line in alone.splitlines()[::2]] == [1, 1, 1]
    assert said.count("3 sequence(s), ") == 1


def test_letters_are_drawn_from_the_softmax_of_the_model(sample, weights, tmp_path):
    """Two residues that are tied and do not see one another, after all others."""
    pdb = write_pdb(tmp_path / "short.pdb", {"A": "ACD", "B": "EFG"})
    designs = drawn(sample(pdb, "--chains", "B", "A", "--num", 1500, "--batch_size", 500, "--bias",
                           "V=3", "--omit", "C", "--temperature", 2, "--orders", 1,
                           "--mutable_positions", "A12", "B11", "--tied_positions", "A12,B11"))
    assert {s[0] + s[2:6] for s in designs} == {"EG/AC"} and all(s[1] == s[6] for s in designs)
    logits = (helix_log_probs(weights, "ACD/EFG", [0, 1, 3, 5, 2, 4])[2]
              + helix_log_probs(weights, "ACD/EFG", [0, 1, 3, 5, 4, 2])[4]) / 2
    logits[LETTERS.index("V")] += 3
    logits[[LETTERS.index("C"), 20]] = -torch.inf
    expected = torch.softmax(logits / 2, 0)
    count = torch.tensor([[s[1] for s in designs].count(letter) for letter in LETTERS] + [0])
    error = (expected * (1 - expected) / len(designs)).sqrt()
    assert ((count / len(designs) - expected).abs() <= 4.5 * error + 1e-9).all()


def test_fixed_chains_are_context_that_no_sequence_shows(sample, dimer):
    text = sample(dimer, "--chains", "B", "--num", 1)[0]
    assert "fixed_chains=['A'], designed_chains=['B']" in text
    (alone, native), (_, sequence) = read(sample(dimer, "--chains", "B", "--fixed_chains")[0])
    with_a = read(text)[0][0]
    assert native == NATIVE and len(sequence) == 22
    assert alone["score"] == alone["global_score"] != with_a["score"] != with_a["global_score"]
    assert sample(dimer, "--fixed_chains", "A", "--num", 1)[0] == text


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


def test_the_score_of_one_designed_residue_is_its_log_probability(sample, weights, tmp_path):
    """Given all others; gaps do not count."""
    pdb = write_pdb(tmp_path / "gap.pdb", {"A": "ACD-EFGHI"})
    head, sequence = read(sample(pdb, "--mutable_positions", "A15", "--temperature", 1)[0])[0]
    assert sequence == "ACDXEFGHI"
    log_probs = helix_log_probs(weights, sequence, [0, 1, 2, 3, 4, 6, 7, 8, 5])[5]
    assert head["score"] == pytest.approx(-log_probs[LETTERS.index("F")].item(), abs=1e-4)


def test_recovery_is_counted_on_designed_positions(sample, pdb, tmp_path):
    fasta = tmp_path / "given.fasta"
    given = "MKTAY" + "W" * 5 + NATIVE[10:]                # 5 of the 10 first residues differ
    fasta.write_text(f">given\n{given[:9]}\n{given[9:]}\n")
    for positions, share in (("A10-A19", 0.5), ("A10-A13", 1), ("A15-A17", 0),
                             ("A10-A31", 17 / 22)):
        (head, sequence), = read(sample(pdb, "--mutable_positions", positions,
                                        "--score_only", fasta)[0])
        assert (head["seq_recovery"], sequence) == (round(share, 4), given)


# ---- several structures and temperatures, files ----

def test_many_structures_and_temperatures_give_the_designs_of_calls_of_their_own(
        sample, dimer, pdb, tmp_path):
    (tmp_path / "notes.txt").write_text("not a structure")
    args = ("--num", 3, "--batch_size", 2)
    near = drawn(sample(pdb, "--num", 2, "--temperature", 2, 2.0001))
    assert len(set(near)) == 4                      # new draws at each temperature
    text = sample(tmp_path, *args, "--temperature", 0.5, 2)[0]
    expected = []
    for path in (dimer, pdb):
        hot, cold = (sample(path, *args, "--temperature", T)[0] for T in (2, 0.5))
        expected += [*read(cold), *read(hot)[1:]]
    assert read(text) == expected
    heads = [line for line in text.splitlines() if line[0] == ">"]
    assert [head.startswith(">one, ") for head in heads] == [False] * 7 + [True] * 7
    sample(dimer, pdb, *args, "--temperature", 0.5, 2, "--out_folder", tmp_path / "new")
    written = [(tmp_path / "new" / "seqs" / f"{name}.fa").read_text() for name in ("dimer", "one")]
    assert read("".join(written)) == expected


def test_fixed_positions_keep_their_letters(sample, dimer):
    out, err = sample(dimer, "--chains", "B", "A", "--fixed_positions", "A12-A20", "--num", 5,
                      "--temperature", 2)
    assert "--fixed_positions: 9 positions by chain and number in the file" in err
    columns = [set(column) for column in zip(*drawn((out, err)), strict=True)]
    of_chain_a = columns[23:]
    assert [letters.pop() for letters in of_chain_a[2:11]] == list(NATIVE[2:11])
    assert not any(of_chain_a[2:11])
    assert all(len(letters) > 1 for letters in (*columns[:22], *of_chain_a[:2], *of_chain_a[11:]))


def test_scores_of_given_sequences_are_those_of_their_design(sample, dimer, tmp_path):
    args = (dimer, "--chains", "B", "A", "--fixed_positions", "A12-A20")
    sample(*args, "--num", 5, "--temperature", 2, "--out", tmp_path / "designs.fasta")
    designs = read((tmp_path / "designs.fasta").read_text())[1:]
    again = read(sample(*args, "--score_only", tmp_path / "designs.fasta", "--batch_size", 2)[0])
    assert again[1:] == designs
    assert len({head["score"] for head, _ in designs}) == 5


def test_scoring_into_a_folder_leaves_the_designs_there_alone(sample, dimer, tmp_path):
    folder = tmp_path / "out"
    sample(dimer, "--temperature", 2, "--out_folder", folder)
    designs = folder / "seqs" / "dimer.fa"
    before = designs.read_bytes()
    out, err = sample(dimer, "--score_only", designs, "--out_folder", folder)
    scored = folder / "scored" / "dimer.fa"
    assert read(scored.read_text())[1:] == read(before.decode())[1:]
    assert designs.read_bytes() == before
    assert out == "" and f" 2 sequence(s), to {scored}" in err


def test_scores_of_an_earlier_call_are_replaced_in_headers(sample, dimer, tmp_path):
    others = tmp_path / "others.fasta"
    old = "score=1.2 my-score=1, score=3, rosetta_score=-250.1"
    others.write_text(f">score=3 d1 {old}\n{NATIVE}/{NATIVE}\n")
    text = sample(dimer, "--score_only", others)[0]
    assert text.startswith(">score=3 d1 my-score=1, rosetta_score=-250.1, score=")
    assert text.count("score=") == 5


def test_headers_and_the_table_name_the_weights_that_gave_the_scores_as_the_user_did(
        sample, weights, dimer, tmp_path):
    """The weights of the first call are in a folder whose name has a blank."""
    drew = tmp_path / "my run" / "latest_model.pt"
    drew.parent.mkdir()
    drew.write_bytes(weights.read_bytes())
    folder = tmp_path / "out"
    sample(dimer, "--num", 2, "--temperature", 2, "--out_folder", folder, checkpoint=drew)
    fasta = folder / "seqs" / "dimer.fa"
    assert f"model_name={drew}, seed=0\n" in fasta.read_text()
    with open(folder / "designs.csv", newline="") as file:
        assert [row["weights"] for row in csv.DictReader(file)] == [str(drew)] * 2
    once = sample(dimer, "--score_only", fasta)[0]
    (tmp_path / "once.fa").write_text(once)
    twice = sample(dimer, "--score_only", tmp_path / "once.fa", checkpoint=drew)[0]
    for text, scored in ((once, weights), (twice, drew)):
        heads = text.splitlines()[::2]
        assert len(heads) == 3
        assert all(head.endswith(f", model_name={scored}") for head in heads)
        assert text.count("model_name") == 3
    assert "run" not in once and "seed=0" in twice


def test_of_given_sequences_the_mean_is_printed_without_the_native_one(sample, dimer, tmp_path):
    designs = tmp_path / "designs.fa"
    err = sample(dimer, "--num", 3, "--temperature", 1, "--out", designs)[1]
    mean = re.search(r"mean of 3 designs: (score \S+, recovery [\d.]+)", err)[1]
    again = sample(dimer, "--score_only", designs)[1]
    assert f"dimer: mean of 3 sequences other than the native one: {mean}\n" in again
    assert "mean of" not in sample(dimer, "--score_only")[1]


def test_the_table_of_designs_has_what_the_headers_say(sample, dimer, pdb, tmp_path):
    """Of all structures; the native sequences are no designs."""
    folder = tmp_path / "out"
    sample(dimer, pdb, "--chains", "A", "--num", 2, "--temperature", 0.5, 2, "--out_folder", folder)
    with open(folder / "designs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["pdb"] for row in rows] == [str(dimer)] * 4 + [str(pdb)] * 4
    assert [(row["chain"], row["context"]) for row in rows] == [("A", "B")] * 4 + [("A", "")] * 4
    cells = [({"T": float(row["temperature"]), "sample": float(row["sample"]),
               "score": float(row["mpnn_score"]), "seq_recovery": float(row["seq_recovery"])},
              row["sequence"]) for row in rows]
    expected = [entry for name in ("dimer", "one")
                for entry in read((folder / "seqs" / f"{name}.fa").read_text())[1:]]
    for head, _ in expected:
        del head["global_score"]
    assert cells == expected


def test_without_a_file_score_only_scores_the_native_sequence(sample, pdb):
    (_, native), *others = read(sample(pdb, "--score_only")[0])
    assert native == NATIVE
    assert others == []


def test_sequences_that_do_not_fit_are_named_all_at_once(refuses, tmp_path):
    (tmp_path / "s.fasta").write_text(f">a\nMK\n>b\n{NATIVE}\n>c\n{NATIVE[:-1]}1\n")
    said = refuses("one.pdb --score_only s.fasta", "s.fasta 1 a 3 c")
    assert re.findall(r"sequence (\d)", said) == ["1", "3"]


@pytest.mark.parametrize("option", ["--out", "--out_folder"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(refuses, option):
    refuses(f"one.pdb {option} /proc/new", "/proc/new")


def test_structures_that_cannot_be_read_are_named_all_at_once(refuses, tmp_path):
    for name in ("x.pdb", "y.pdb"):
        (tmp_path / name).write_text("END\n")
    refuses(".", "x.pdb y.pdb")


def test_a_residue_that_is_none_of_the_20_is_told_by_its_name(sample, pdb):
    native = pdb.read_text()
    pdb.write_text(native.replace(" HIS ", " HIX ").replace(" LYS ", " lyz "))
    assert "20 amino acids are read: HIX as X, LYZ as X" in sample(pdb)[1]
    pdb.write_text(native)
    assert "are none of the 20" not in sample(pdb)[1]


def test_the_scores_of_designs_are_told_from_those_of_the_published_tool(sample, pdb):
    assert "0.08 lower" in sample(pdb)[1]
    assert "0.08 lower" not in sample(pdb, "--score_only")[1]


def test_a_file_of_parsed_structures_is_refused_by_its_name(refuses, tmp_path):
    entry = {"seq": NATIVE, "name": "one", "num_of_chains": 1}
    (tmp_path / "parsed_pdbs.jsonl").write_text(json.dumps(entry) + "\n")
    refuses("parsed_pdbs.jsonl", "parsed_pdbs.jsonl")


def test_gaps_are_left_out_of_their_groups(sample, tmp_path):
    """As the published helper ties them: row by row, whatever is resolved there."""
    gapped = NATIVE[:3] + "-" + NATIVE[4:]
    dimer = write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": gapped})
    args = (dimer, "--num", 2, "--temperature", 2)
    out = sample(*args, "--tied_positions", "0-21,22-43")
    for sequence in drawn(out):
        a, b = sequence.split("/")
        assert a[:3] + a[4:] == b[:3] + b[4:] and b[3] == "X" != a[3]
    assert "1 tied positions are gaps or lack atoms" in out[1]
    assert drawn(sample(*args, "--homomer")) == drawn(out)


def test_what_a_gap_leaves_of_a_group_is_drawn_as_if_in_none(sample, tmp_path):
    dimer = write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": NATIVE[:3] + "-" + NATIVE[4:]})
    args = (dimer, "--num", 2, "--temperature", 2)
    assert drawn(sample(*args, "--tied_positions", "3,25")) == drawn(sample(*args))


def test_designs_are_drawn_on_noisy_backbones(sample, pdb):
    args = (pdb, "--num", 20, "--temperature", 1)
    assert drawn(sample(*args, "--backbone_noise", 1)) != drawn(sample(*args))


def test_backbone_noise_leaves_scores_alone(sample, pdb, tmp_path):
    args = (pdb, "--temperature", 1, "--num", 5)
    out = tmp_path / "noisy.fasta"
    sample(*args, "--backbone_noise", 0.3, "--batch_size", 4, "--out", out)
    noisy = out.read_text()
    assert sample(*args, "--backbone_noise", 0.3, "--batch_size", 1)[0] == noisy
    assert read(noisy)[0] == read(sample(*args)[0])[0]
    again = read(sample(pdb, "--score_only", out)[0])
    assert [head["score"] for head, _ in again] == [head["score"] for head, _ in read(noisy)]


def test_backbone_noise_is_new_for_each_sequence_and_atom():
    X = torch.ones(1, 2, 4, 3)
    noisy = sample_proteinmpnn.with_noise({"X": X}, [(1,), (2,)], 0.3)["X"]
    assert len(noisy.unique()) == noisy.numel() == 2 * 2 * 4 * 3


def test_backbone_noise_moves_the_atoms_that_are_there_alone():
    X = torch.ones(1, 2, 4, 3)
    X[0, 1, 2:] = 0   # two atoms are missing
    noisy = sample_proteinmpnn.with_noise({"X": X}, [(1,), (2,)], 0.3)["X"]
    moved = (noisy != X).all(-1)
    assert torch.equal(moved, (X != 0).all(-1).expand(2, -1, -1))


@pytest.mark.parametrize("words, named", [
    ("--chains A --fixed_chains A", "chain A"),
    ("--fixed_positions A12 --mutable_positions A13", "--fixed_positions --mutable_positions"),
    ("--fixed_positions 0-43", "--fixed_positions"), ("--tied_positions A12", "A12"),
    ("--tied_positions A12,,B12", "--tied_positions A12,,B12"),
    ("--tied_positions A12,B12 --fixed_positions A12", "A12 B12"),
    ("--tied_positions A12,B12 --chains A", "B12"), ("--homomer --chains A", "--homomer"),
    ("--bias W=0 W=2", "--bias W"), ("--temperature warm", "--temperature warm"),
    ("--score_only good.fasta --num 3", "--num --score_only"),
    ("--score_only none.fasta", "none.fasta"), ("--score_only short.fasta", "short.fasta 22 21"),
    ("--score_only lower.fasta", "'m' A10"), ("--score_only unknown.fasta", "'X' A11 1"),
    ("--num 0", "--num 0"), ("--orders 0", "--orders 0"), ("--batch_size -1", "--batch_size -1"),
    ("--backbone_noise 11", "--backbone_noise 11"), ("--omit J", "--omit J"),
    (f"--seed {2**63}", f"--seed {2**63}"),
    ("--model_name v_48_020", "--model_name"),      # of the published tool, for the weights
    ("--path_to_model_weights weights/", "--path_to_model_weights"),
    ("--use_soluble_model", "--use_soluble_model"), ("--ca_only", "--ca_only")])
def test_what_cannot_be_done_is_refused(refuses, tmp_path, words, named):
    for name, letters in {"good": f"{NATIVE}/{NATIVE}", "short": f"{NATIVE}/{NATIVE[1:]}",
                          "lower": f"m{NATIVE[1:]}/{NATIVE}",
                          "unknown": f"MX{NATIVE[2:]}/{NATIVE}"}.items():
        (tmp_path / f"{name}.fasta").write_text(f">a\n{letters}\n")
    refuses(f"dimer.pdb --out new.fasta {words}", named)


@pytest.mark.parametrize("words, named", [
    ("", "structure"), ("old.fasta", "old.fasta"), ("none.pdb", "none.pdb"),
    ("one.pdb shifted.pdb one.pdb shifted.pdb", "one.pdb"), ("one.pdb empty", "empty"),
    ("one.pdb shifted.pdb --chains B", "one.pdb --chains B"),
    ("shifted.pdb --homomer", "A10 M B10 K"), ("one.pdb --out old.fasta --out_folder d",
                                               "--out --out_folder"),
    ("one.pdb --out one.pdb", "one.pdb"), ("one.pdb --out link.pdb", "one.pdb"),
    ("one.pdb --out w.pt", "w.pt"), ("one.pdb --out pipe", "pipe"),
    ("one.pdb --out ./one.pdb", "one.pdb"),
    ("one.pdb --score_only old.fasta --out old.fasta", "old.fasta")])
def test_files_that_cannot_be_used_are_refused(words, named, refuses, tmp_path):
    (tmp_path / "old.fasta").write_text(f">a\n{NATIVE}\n")
    write_pdb(tmp_path / "shifted.pdb", {"A": "MKTAY", "B": "KTAYM"})
    (tmp_path / "empty" / "folder.pdb").mkdir(parents=True)
    (tmp_path / "empty" / "._one.pdb").write_text("of macOS")
    (tmp_path / "link.pdb").symlink_to(tmp_path / "one.pdb")
    os.mkfifo(tmp_path / "pipe")
    refuses(words, named)


@pytest.mark.parametrize("words", ["", "--pdb_path one.pdb --num_seq_per_target 8"])
def test_without_weights_it_says_where_they_are_given(refuses, words):
    refuses(words, "weights first v_48_020", checkpoint="")


def test_a_file_that_holds_no_weights_is_refused(refuses, tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"not weights")
    refuses("one.pdb --out new.fasta", "bad.pt", checkpoint="bad.pt")


TRIMER = {"A": NATIVE, "B": NATIVE, "C": NATIVE}     # of numbers 10 to 31


@pytest.mark.parametrize("option, words, lacking", [
    ("--fixed_positions", "A12 A15-A17", "B12 B15-B17 C12 C15-C17"),
    ("--fixed_positions", "A12 B12", "C12"), ("--fixed_positions", "2 5-7", "24 27-29 46 49-51"),
    ("--mutable_positions", "A12 A15-A17", "B12 B15-B17 C12 C15-C17")])
def test_a_homomer_fixed_in_one_copy_gets_the_words_for_the_others(
        sample, refuses, tmp_path, option, words, lacking):
    trimer = write_pdb(tmp_path / "trimer.pdb", TRIMER)
    said = refuses(f"trimer.pdb --homomer {option} {words}", option)
    assert lacking in said
    sample(trimer, "--homomer", option, *words.split(), *lacking.split())


def test_words_for_other_copies_hold_no_range_over_a_gap_in_the_numbers(refuses, tmp_path):
    write_pdb(tmp_path / "gap.pdb", {"A": NATIVE, "B": NATIVE[:3] + "-" + NATIVE[4:]})
    said = refuses("gap.pdb --homomer --fixed_positions A11 A12 A14", "--fixed_positions")
    assert "B11-B12 B14" in said


def test_where_designs_have_x_is_told_after_them(sample, tmp_path):
    gaps = {"A": NATIVE, "B": NATIVE[:3] + "--" + NATIVE[5:9] + "-" + NATIVE[10:]}
    dimer = write_pdb(tmp_path / "dimer.pdb", gaps)
    out, said = sample(dimer)
    design, = drawn((out, said))
    assert [run.span() for run in re.finditer("X+", design.split("/")[1])] == [(3, 5), (9, 10)]
    assert "each design has 3 X" in said and "at letters B 4-5, B 10, counted" in said


def test_designs_without_x_get_no_word_on_them(sample, dimer):
    assert " X," not in sample(dimer)[1]


def test_no_line_of_what_is_said_is_wider_than_80_columns_but_for_a_path(sample, dimer, tmp_path):
    said = sample(dimer, "--homomer", "--num", 2)[1]
    wide = [line for line in said.splitlines() if len(line) > 80]
    assert [line for line in wide if str(tmp_path) not in line and "small.pt" not in line] == []


def test_designs_of_earlier_structures_are_kept_when_one_cannot_be_written(sample, pdb, tmp_path):
    """Its name leaves no room for that of a temporary file."""
    other = write_pdb(tmp_path / f"{'z' * 246}.pdb", {"A": NATIVE})
    folder = tmp_path / "out"
    said = sample(pdb, other, "--out_folder", folder, code=2)[1]
    assert "File name too long" in said
    with open(folder / "designs.csv", newline="") as file:
        assert [row["pdb"] for row in csv.DictReader(file)] == [str(pdb)]


def test_designs_of_unknown_letters_have_scores_where_there_are_letters_and_no_nan(sample, pdb):
    pdb.write_text(re.sub("|".join(NAMES), "UNK", pdb.read_text()))
    text = sample(pdb)[0]
    (native, letters), (head, _) = read(text)
    assert "no residue of known letter" in text and letters == "X" * 22
    assert native.keys() == {"seed"} and "nan" not in text
    assert head.keys() == {"T", "sample", "score", "global_score"}
