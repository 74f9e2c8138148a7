"""Does sample_proteinmpnn.py draw and score what it was asked to, and refuse what it cannot do?"""

import re

import numpy as np
import pytest
import torch

import sample_proteinmpnn
from proteinmpnn_model import decoding_order, load_proteinmpnn, random_proteinmpnn, save_proteinmpnn
from structure_data import NAMES, PHI_PSI, build_backbone

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
NATIVE = "MKTAYIAKQRQISFVKSHFSRQ"       # 22 residues, numbered from 10 in the files


def atoms(chains, start=10):
    """(serial, atom, residue name, chain, number, x, y, z) of helices of these sequences, 15 Angstrom apart."""
    serial = 0
    for c, (chain, sequence) in enumerate(chains.items()):
        X = build_backbone(*zip(*[PHI_PSI["helix"]] * len(sequence))) + np.array([0, 15 * c, 0])
        for i, (letter, residue) in enumerate(zip(sequence, X)):
            if letter == "-":
                continue
            for atom, place in zip(("N", "CA", "C", "O"), residue):
                serial += 1
                yield serial, atom, NAMES[LETTERS.index(letter)], chain, start + i, *(round(float(x), 3) for x in place)


def write_pdb(path, chains):
    path.write_text("".join(f"ATOM  {s:5d}  {a:<3} {r} {c}{n:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           "
                            f"{a[0]}\n" for s, a, r, c, n, x, y, z in atoms(chains)))
    return path


def write_cif(path, chains):
    names = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
             "label_seq_id auth_seq_id auth_asym_id auth_atom_id auth_comp_id pdbx_PDB_ins_code Cartn_x Cartn_y "
             "Cartn_z occupancy B_iso_or_equiv pdbx_PDB_model_num").split()
    rows = [f"ATOM {s} {a[0]} {a} . {r} {c} 1 {n} {n} {c} {a} {r} ? {x} {y} {z} 1.0 0.0 1"
            for s, a, r, c, n, x, y, z in atoms(chains)]
    path.write_text("\n".join(["data_test", "loop_", *(f"_atom_site.{name}" for name in names), *rows, ""]))
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """One decoder layer, so that a residue does not see in which order the letters around it were decoded. Larger
    weights than usual: what is drawn depends much on the place and on the letters around it."""
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    model = random_proteinmpnn(3, hidden_size=16, n_encoder=2, n_decoder=1, num_edges=12)
    with torch.no_grad():
        model.W_s.weight *= 20
        model.W_out.weight *= 2
        model.features.norm_edges.weight *= 4
    save_proteinmpnn(path, model)
    return path


@pytest.fixture
def pdb(tmp_path):
    return write_pdb(tmp_path / "one.pdb", {"A": NATIVE})


@pytest.fixture
def dimer(tmp_path):
    return write_pdb(tmp_path / "dimer.pdb", {"A": NATIVE, "B": NATIVE})


@pytest.fixture
def sample(weights, capsys):
    """Function: arguments after the checkpoint -> (text on standard output, on standard error), of a good end."""
    def run(*args, code=0):
        try:
            found = sample_proteinmpnn.main([str(weights), *map(str, args)])
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
    return [({k: float(v) for k, v in re.findall(r"(\w+)=(-?[\d.]+)", head)}, sequence)
            for head, sequence in zip(lines[::2], lines[1::2])]


def test_the_same_seed_gives_the_same_sequences_whatever_the_batch_size_and_number(sample, pdb):
    one, five = (sample(pdb, "--num", 5, "--temperature", 1, "--batch_size", size)[0] for size in (1, 5))
    assert one == five
    assert len({sequence for _, sequence in read(one)}) == 6
    assert read(sample(pdb, "--num", 2, "--temperature", 1)[0]) == read(one)[:3]
    assert read(sample(pdb, "--num", 2, "--temperature", 1, "--seed", 1)[0])[1][1] != read(one)[1][1]


@pytest.mark.parametrize("tied", [False, True])
def test_letters_are_drawn_from_the_softmax_of_the_model(sample, weights, tmp_path, tied):
    """One designed residue, or two that are tied and do not see one another, after all others: the distribution is
    known from the model's output."""
    pdb = write_pdb(tmp_path / "short.pdb", {"A": "ACDEFG"})
    args = ["--num", 1500, "--batch_size", 500, "--bias", "W=1", "--omit", "C", "--temperature", 2, "--orders", 1,
            "--mutable_positions", "A12", *(["A14", "--tied_positions", "A12,A14"] if tied else [])]
    drawn = [sequence for _, sequence in read(sample(pdb, *args)[0])[1:]]
    assert {s[:2] + s[3] + s[5] for s in drawn} == {"ACEG"}
    assert all(s[4] == (s[2] if tied else "F") for s in drawn)
    model = load_proteinmpnn(weights).eval()
    X = torch.from_numpy(build_backbone(*zip(*[PHI_PSI["helix"]] * 6)))[None].round(decimals=3)
    index = torch.arange(6)[None]
    graph = model.graph(X, torch.ones(1, 6), index, torch.ones_like(index))
    S = torch.tensor([[0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        if tied:
            logits = (model(graph, S, torch.tensor([[0, 1, 3, 5, 2, 4]]))[0, 2]
                      + model(graph, S, torch.tensor([[0, 1, 3, 5, 4, 2]]))[0, 4]) / 2
        else:
            logits = model(graph, S, torch.tensor([[0, 1, 3, 4, 5, 2]]))[0, 2]
    logits[LETTERS.index("W")] += 1
    logits[[LETTERS.index("C"), 20]] = -torch.inf
    expected = torch.softmax(logits / 2, 0)
    found = torch.tensor([[s[2] for s in drawn].count(letter) for letter in LETTERS] + [0]) / len(drawn)
    error = (expected * (1 - expected) / len(drawn)).sqrt()
    assert ((found - expected).abs() <= 4.5 * error + 1e-9).all()


def test_fixed_positions_keep_their_letters_and_mutable_ones_are_the_rest(sample, pdb):
    args = ("--num", 6, "--temperature", 3)
    fixed = sample(pdb, *args, "--fixed_positions", "A10-A14", "A20")[0]
    sequences = [sequence for _, sequence in read(fixed)[1:]]
    kept = [0, 1, 2, 3, 4, 10]
    assert all(sequence[i] == NATIVE[i] for sequence in sequences for i in kept)
    assert all(len({sequence[i] for sequence in sequences}) > 1 for i in range(22) if i not in kept)
    assert sample(pdb, *args, "--mutable_positions", "A15-A19", "A21-A31")[0] == fixed


def test_fixed_chains_are_context_that_no_sequence_shows(sample, dimer):
    text = sample(dimer, "--chains", "B", "--num", 1)[0]
    assert "fixed_chains=['A'], designed_chains=['B']" in text
    (alone, native), (_, drawn) = read(sample(dimer, "--chains", "B", "--fixed_chains")[0])
    (with_a, _), _ = read(text)
    assert native == NATIVE and len(drawn) == 22
    assert alone["score"] == alone["global_score"] and alone["score"] != with_a["score"]
    assert with_a["global_score"] != with_a["score"]


def test_chains_come_in_the_order_given(sample, tmp_path):
    pdb = write_pdb(tmp_path / "two.pdb", {"A": "MKTAYIAK", "B": "QRQISF"})
    args = ("--temperature", 1)
    (_, native), (_, ab) = read(sample(pdb, *args)[0])
    (_, reverse), (_, ba) = read(sample(pdb, *args, "--chains", "B", "A")[0])
    assert native == "MKTAYIAK/QRQISF" and reverse == "QRQISF/MKTAYIAK"
    assert ba.split("/") == ab.split("/")[::-1]


def test_omitted_letters_never_come_and_x_neither(sample, pdb):
    text = "".join(sequence for _, sequence in read(sample(pdb, "--num", 40, "--temperature", 50)[0])[1:])
    assert set(text) == set(LETTERS)
    text = sample(pdb, "--num", 40, "--temperature", 50, "--omit", "CGPW")[0]
    assert set("".join(sequence for _, sequence in read(text)[1:])) == set(LETTERS) - set("CGPW")


def test_a_strong_bias_wins_and_a_negative_one_loses(sample, pdb):
    assert read(sample(pdb, "--bias", "W=50")[0])[1][1] == "W" * 22
    best = read(sample(pdb, "--temperature", 0)[0])[1][1]
    for letter in set(best):
        assert letter not in read(sample(pdb, "--temperature", 0, "--bias", f"{letter}=-50")[0])[1][1]


def test_tied_chains_of_a_homodimer_are_equal(sample, dimer):
    args = ("--num", 3, "--temperature", 2)
    homomer, told = sample(dimer, *args, "--homomer")
    halves = [sequence.split("/") for _, sequence in read(homomer)[1:]]
    assert all(a == b for a, b in halves) and len({a for a, _ in halves}) == 3
    assert "22 groups of residues of equal number" in told
    assert sample(dimer, *args, "--tied_positions", "A10-A31,B10-B31")[0] == homomer
    assert sample(dimer, *args, "--tied_positions", "0-21,22-43")[0] == homomer
    free = [sequence.split("/") for _, sequence in read(sample(dimer, *args)[0])[1:]]
    assert all(a != b for a, b in free)
    for _, sequence in read(sample(dimer, *args, "--tied_positions", "A12,B20", "A13,B21")[0])[1:]:
        a, b = sequence.split("/")
        assert (a[2], a[3]) == (b[10], b[11])


def test_scores_in_the_fasta_are_those_of_score_only(sample, dimer, tmp_path):
    args, out = ("--chains", "B", "A", "--fixed_positions", "A12-A20"), tmp_path / "out.fasta"
    sample(dimer, *args, "--num", 5, "--temperature", 1, "--batch_size", 2, "--out", out)
    text = out.read_text()
    rescored, _ = sample(dimer, *args, "--score_only", out, "--batch_size", 4)
    keys = ("score", "global_score", "seq_recovery")
    assert [([head[k] for k in keys], s) for head, s in read(rescored)] == [
        ([head[k] for k in keys], s) for head, s in read(text)]
    assert len(read(text)) == 6
    assert list(tmp_path.glob(".*")) == []
    assert len({head["score"] for head, _ in read(text)}) == 6


def test_score_is_the_mean_over_designed_residues_and_global_score_over_all(sample, weights, tmp_path):
    """Of one designed residue, it is its log-probability given all others; a gap in the chain is not counted."""
    pdb = write_pdb(tmp_path / "gap.pdb", {"A": "ACD-EFGHI"})
    (head, sequence), _ = read(sample(pdb, "--mutable_positions", "A15", "--temperature", 1)[0])
    assert sequence == "ACDXEFGHI"
    model = load_proteinmpnn(weights).eval()
    X = torch.from_numpy(build_backbone(*zip(*[PHI_PSI["helix"]] * 9)))[None].round(decimals=3)
    mask, index = torch.ones(1, 9), torch.arange(9)[None]
    mask[0, 3], X[0, 3] = 0, 0
    S = torch.tensor([[(LETTERS + "X").index(c) for c in sequence]])
    order = decoding_order(torch.tensor([[0, 0, 0, 0, 0, 1, 0, 0, 0]]), torch.ones(1, 9))
    with torch.no_grad():
        log_probs = model(model.graph(X, mask, index, torch.ones_like(index)), S, order)
    assert head["score"] == pytest.approx(-log_probs[0, 5, S[0, 5]].item(), abs=1e-4)
    (whole, _), _ = read(sample(pdb)[0])
    assert whole["score"] == whole["global_score"]


def test_recovery_is_counted_on_designed_positions(sample, pdb, tmp_path):
    fasta = tmp_path / "given.fasta"
    given = "MKTAY" + "W" * 5 + NATIVE[10:]                        # 5 of the 10 first residues differ
    fasta.write_text(f">given\n{given[:9]}\n{given[9:]}\n")
    for positions, share in (("A10-A19", 0.5), ("A10-A13", 1), ("A15-A17", 0), ("A10-A31", round(17 / 22, 4))):
        (head, sequence), = read(sample(pdb, "--mutable_positions", positions, "--score_only", fasta)[0])
        assert (head["seq_recovery"], sequence) == (share, given)
    for head, sequence in read(sample(pdb, "--num", 4, "--temperature", 1, "--fixed_positions", "A10-A24")[0])[1:]:
        assert head["seq_recovery"] == pytest.approx(np.mean([a == b for a, b in zip(sequence, NATIVE)][15:]), abs=1e-4)


def test_both_forms_of_positions_give_the_same_and_the_message_says_which(sample, dimer):
    by_number, told_number = sample(dimer, "--fixed_positions", "A12", "B10-B19")
    by_index, told_index = sample(dimer, "--fixed_positions", "2", "22-31")
    assert by_number == by_index
    assert "--fixed_positions: 11 positions by chain and number in the file: A12 B10-B19" in told_number
    assert "--fixed_positions: 11 positions by 0-based number in the sequence: 2 22-31" in told_index


def test_mmcif_and_pdb_give_the_same(sample, tmp_path):
    chains = {"A": "MKTAYIA-KQRQ", "B": "ISFVKSHF"}
    pdb, cif = write_pdb(tmp_path / "x.pdb", chains), write_cif(tmp_path / "x.cif", chains)
    texts = [sample(path, "--num", 2, "--temperature", 1, "--fixed_positions", "A12", "B11")[0] for path in (pdb, cif)]
    assert texts[0] == texts[1] and read(texts[0])[0][1] == "MKTAYIAXKQRQ/ISFVKSHF"


BAD = {                                                             # arguments: words of the message
    "--chains Z": "Z; expected chains of",
    "--chains A A": "each once",
    "--chains A --fixed_chains A": "in --chains and in --fixed_chains",
    "--fixed_positions A9": "position A9 is not there",
    "--mutable_positions 44": "position 44 is not there",
    "--mutable_positions A12 3": "all of one kind",
    "--fixed_positions A12 --mutable_positions A13": "not allowed with",
    "--fixed_positions 0-43": "no position is left to design",
    "--tied_positions A12": "at least two parts",
    "--tied_positions A12,B12-B13": "parts of one length",
    "--tied_positions A12,B12 --fixed_positions A12": "A12 (fixed), B12 (designed)",
    "--tied_positions A12,B12 --homomer": "expected one of them",
    "--homomer --chains A": "share no residue number",
    "--omit 1": "--omit: found 1",
    "--omit ACDEFGHIKLMNPQRSTVWY": "some, not all",
    "--bias W": "found W; expected an amino acid and nats",
    "--bias W=nan": "found W=nan",
    "--bias W=1 W=2": "found W twice",
    "--bias W=0 W=2": "found W twice",
    "--bias W=1e40": "found W=1e40",
    "--temperature -1": "number of at least 0",
    "--temperature 1e40": "found --temperature 1e+40",
    "--num 0": "found --num 0",
    "--batch_size 0": "found --batch_size 0",
    "--orders 0": "found --orders 0",
    "--seed x": "invalid int value",
    "--score_only good.fasta --num 3": "found --num with --score_only",
    "--score_only missing.fasta": "missing.fasta",
    "--score_only empty.fasta": "no sequence",
    "--score_only headless.fasta": "before a header",
    "--score_only short.fasta": "chains of [22, 21] letters; expected [22, 22]",
    "--score_only joined.fasta": "expected [22, 22]",
    "--score_only lower.fasta": "'m' at A10",
    "--score_only unknown.fasta": "'X' at A11 (position 1, 0-based)",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_one_clear_error_and_leaves_no_file(sample, dimer, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    for name, letters in {"good": f"{NATIVE}/{NATIVE}", "short": f"{NATIVE}/{NATIVE[1:]}", "joined": NATIVE * 2,
                          "lower": f"m{NATIVE[1:]}/{NATIVE}", "unknown": f"MX{NATIVE[2:]}/{NATIVE}"}.items():
        (tmp_path / f"{name}.fasta").write_text(f">a\n{letters}\n")
    (tmp_path / "empty.fasta").write_text("\n")
    (tmp_path / "headless.fasta").write_text(NATIVE)
    before = sorted(tmp_path.iterdir())
    out, err = sample(dimer, "--out", tmp_path / "new.fasta", *text.split(), code=2)
    assert BAD[text] in err and out == "" and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_bad_files_are_refused_by_name_and_an_old_result_stays(sample, pdb, tmp_path, capsys):
    old = tmp_path / "old.fasta"
    old.write_text("as it was")
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"not weights")
    for args, word in (([bad, pdb], "bad.pt"), ([tmp_path / "none.pt", pdb], "none.pt"),
                       ([bad, tmp_path / "none.pdb"], "none.pdb"), ([bad, old], "old.fasta")):
        assert sample_proteinmpnn.main([*map(str, args), "--out", str(old)]) == 2
        out, err = capsys.readouterr()
        assert word in err and err.startswith("sample_proteinmpnn.py: error: ") and out == ""
        assert old.read_text() == "as it was"
    err = sample(pdb, "--out", tmp_path / "missing" / "x.fasta", code=2)[1]
    assert "in a folder that is missing" in err and not (tmp_path / "missing").exists()
    assert "a folder" in sample(pdb, "--out", tmp_path, code=2)[1]
    if not torch.xpu.is_available():
        assert "--device xpu" in sample(pdb, "--device", "xpu", code=2)[1]


def test_an_input_is_never_written_over(weights, dimer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given.fasta").write_text(f">a\n{NATIVE}/{NATIVE}\n")
    (tmp_path / "w.pt").write_bytes(weights.read_bytes())
    (tmp_path / "link.pdb").symlink_to(dimer)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for out in ("w.pt", "dimer.pdb", str(dimer), "link.pdb", "given.fasta"):
        assert sample_proteinmpnn.main(["w.pt", "./dimer.pdb", "--score_only", "given.fasta", "--out", out]) == 2
        assert f"found --out {out}, which is the input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_designs_of_unknown_letters_have_scores_where_there_are_letters_and_no_nan(sample, tmp_path):
    pdb = write_pdb(tmp_path / "unknown.pdb", {"A": NATIVE})
    pdb.write_text(re.sub("|".join(NAMES), "UNK", pdb.read_text()))
    text = sample(pdb)[0]
    (native, letters), (drawn, _) = read(text)
    assert "no residue of known letter" in text and letters == "X" * 22 and native.keys() == {"seed"}
    assert drawn.keys() == {"T", "sample", "score", "global_score"} and "nan" not in text


def test_two_chains_without_a_name_are_refused(sample, dimer):
    dimer.write_text("".join(f"{line[:21]} {line[22:]}\n" for line in dimer.read_text().splitlines()))
    assert "residue 10 comes again in a chain without a name" in sample(dimer, code=2)[1]


def test_a_homomer_whose_letters_differ_is_refused(sample, tmp_path):
    pdb = write_pdb(tmp_path / "shifted.pdb", {"A": "MKTAY", "B": "KTAYM"})
    assert "A10 M, B10 K; expected the same letter" in sample(pdb, "--homomer", code=2)[1]


def test_a_real_complex_with_gaps_and_a_fixed_chain(sample, shared):
    pdbs = shared / "data" / "pdbs"
    args = ("--chains", "A", "C", "--homomer", "--mutable_positions", "A50-A60", "C50-C60", "--num", 2)
    text, told = sample(pdbs / "3HTN.pdb", *args)
    assert "fixed_chains=['B'], designed_chains=['A', 'C']" in text
    assert "22 positions by chain and number" in told
    refusal = sample(pdbs / "3HTN.pdb", "--chains", "A", "C", "--fixed_positions", "A0", code=2)[1]
    first = int(re.search(r"chains A C hold A(\d+) ", refusal).group(1))
    for _, sequence in read(text)[1:]:
        a, c = sequence.split("/")
        native, _ = read(text)[0][1].split("/")
        assert a == c and {i + first for i, (x, y) in enumerate(zip(a, native)) if x != y} <= set(range(50, 61))
    assert read(sample(pdbs / "3HTN.cif", *args)[0]) == read(text)
    gap = read(sample(pdbs / "3HTN.pdb", "--chains", "B", "--mutable_positions", "B60")[0])[1][1]
    assert re.fullmatch("[A-Z]+X+[A-Z]+", gap)


def test_a_missing_file_of_sequences_is_refused_by_the_name_of_its_option():
    with pytest.raises(ValueError, match="--score_only: there is no file nope.fa"):
        sample_proteinmpnn.parse_arguments(["w.pt", "s.pdb", "--score_only", "nope.fa"])
