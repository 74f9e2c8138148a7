"""CA-only models: what they see of a structure, which files they read, sampling and training."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample_proteinmpnn
import score_mutations
import train_dpo_ddp
from ddp_setup import Ddp
from dpo.demo import demo_pairs
from dpo.pairs import read_pairs
from launchers import Printed
from mpnn.model import (
    ca_frames,
    ca_orientation,
    from_checkpoint,
    quaternion,
    random_proteinmpnn,
    to_checkpoint,
)
from mpnn.weights import load_proteinmpnn
from mpnn_cases import ABSENT, BACKBONE, Atoms, changed, refusal, write
from proteins.structures import NAMES, read_structure
from tool_runs import assert_refused
from train_dpo_ddp import Config
from training.config import load_config
from training_runs import losses, prepare_and_train

SMALL = {"hidden_size": 8, "n_encoder": 1, "n_decoder": 1, "num_edges": 8}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files of small weights: ca.pt of a CA-only model, full.pt of one for full backbones."""
    folder = tmp_path_factory.mktemp("weights")
    for name, ca_only in (("ca", True), ("full", False)):
        model = random_proteinmpnn(3, ca_only=ca_only, **SMALL)
        torch.save(to_checkpoint(model), folder / f"{name}.pt")
    return folder


def chain_of(atoms, chain, X, S, kept):
    """Add a chain to Atoms, with the kept atoms of each residue."""
    places = [BACKBONE.index(atom) for atom in kept]
    for number, (xyz, letter) in enumerate(zip(X, S), 1):
        atoms.add(chain, number, NAMES[letter], kept, xyz=xyz[places])
    return atoms


@pytest.fixture(scope="module")
def demo():
    """A pair on one chain of a made structure, with coordinates as in a PDB file."""
    pair, = demo_pairs(5, 1, 1)
    pair.complex.X[:] = pair.complex.X.round(3)
    return pair


@pytest.fixture
def files(tmp_path, demo):
    """A folder of one structure: all.pdb, ca.pdb and ca.cif with CA alone, and mixed.pdb, whose
    chain A has CA alone."""
    X = demo.complex.X
    S = demo.complex.S
    alone = chain_of(Atoms(), "A", X, S, ["CA"])
    (tmp_path / "all.pdb").write_text(chain_of(Atoms(), "A", X, S, BACKBONE).pdb())
    (tmp_path / "ca.pdb").write_text(alone.pdb())
    (tmp_path / "ca.cif").write_text(alone.mmcif())
    mixed = chain_of(Atoms(alone), "B", X + 20, S, BACKBONE)
    (tmp_path / "mixed.pdb").write_text(mixed.pdb())
    return tmp_path


# ---- features ----

def test_a_quaternion_turns_vectors_as_its_rotation_does():
    generator = torch.Generator().manual_seed(0)
    R, _ = torch.linalg.qr(torch.randn(20, 3, 3, generator=generator, dtype=torch.float64))
    R = R * R.det()[:, None, None]      # rotations, without reflections
    x, y, z, w = quaternion(R).unbind(-1)
    expected = torch.stack([
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], dim=-1).view(-1, 3, 3)
    torch.testing.assert_close(R, expected)


def trace(angles):
    """(1, L, 3) float64 of CA atoms in a plane, 3.8 Angstrom apart, in these directions."""
    angles = torch.tensor(angles, dtype=torch.float64)
    steps = 3.8 * torch.stack([angles.cos(), angles.sin(), 0 * angles], dim=-1)
    return F.pad(steps.cumsum(0), (0, 0, 1, 0))[None]


def test_a_frame_is_bisector_and_normal_of_two_steps():
    CA = trace([0, math.pi / 2, 0, 0])              # steps along x, y, x, x
    frame = ca_frames(CA, torch.ones(1, 5, dtype=torch.bool))[0, 1]
    half = math.sqrt(0.5)
    expected = torch.tensor([[half, -half, 0], [0, 0, 1], [-half, -half, 0]], dtype=torch.float64)
    torch.testing.assert_close(frame, expected)


@pytest.mark.parametrize("at, moved", [(3, 0.3), (3, 3.0)], ids=["within 3.6 to 4", "a gap"])
def test_a_step_that_is_no_bond_makes_no_frame(at, moved):
    CA = trace([0, 0.9, 0, 0.9, 0, 0.9, 0])
    CA[:, at:, 2] += moved                          # all from this residue on
    frames = ca_frames(CA, torch.ones(1, 8, dtype=torch.bool))[0]
    has_frame = frames.square().sum((1, 2)) > 0
    expected = [0, 1, 1, 1, 1, 1, 0, 0]             # not of the first and the last two
    if moved > 1:
        expected[at - 1] = 1                        # one of its two steps is left: a bisector
    assert has_frame.tolist() == list(map(bool, expected))


def test_the_direction_to_a_neighbour_does_not_depend_on_where_a_protein_lies():
    generator = torch.Generator().manual_seed(0)
    CA = torch.randn(1, 12, 3, generator=generator, dtype=torch.float64)
    CA = (3.8 * F.normalize(CA, dim=-1)).cumsum(1)
    R, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    R = R * R.det()
    is_residue = torch.ones(1, 12, dtype=torch.bool)
    E_idx = torch.arange(12).expand(1, 12, 12)
    here = ca_orientation(CA, is_residue, E_idx)[..., :3]
    there = ca_orientation(CA @ R.T + 5, is_residue, E_idx)[..., :3]
    torch.testing.assert_close(here, there)


# ---- structures ----

@pytest.mark.parametrize("name", ["ca.pdb", "ca.cif", "all.pdb"])
def test_a_ca_only_model_reads_ca_atoms_alone(files, demo, name):
    structure = read_structure(files / name, ca_only=True)
    chain = structure.chains["A"]
    assert chain.resolved.all()
    assert np.array_equal(chain.X[:, 1], demo.complex.X[:, 1])
    assert not chain.X[:, [0, 2, 3]].any()
    assert structure.key == read_structure(files / "ca.pdb", ca_only=True).key


def test_a_residue_without_ca_is_unresolved_for_a_ca_only_model(tmp_path):
    atoms = Atoms().add("A", 1, "MET").add("A", 2, "LYS", ["N", "C", "O"])
    atoms.add("A", 4, "VAL", ["CA"])
    path = write(tmp_path, atoms.pdb(), "s.pdb")
    assert read_structure(path, ca_only=True).chains["A"].resolved.tolist() == [
        True, False, False, True]


@pytest.mark.parametrize("name", ["ca.pdb", "ca.cif"])
def test_a_file_of_ca_atoms_is_refused_for_full_backbones_with_what_to_do(files, name):
    assert "ca/v_48_020" in refusal(files / name, read_structure)


# ---- sampling and training ----

@pytest.fixture
def sample(capsys):
    """Function: arguments -> (exit code, standard output, standard error)."""
    def run(*args):
        code = 0
        try:
            sample_proteinmpnn.main(list(map(str, args)))
        except SystemExit as end:
            code = end.code
        return code, *map(Printed, capsys.readouterr())
    return run


def sequences(text):
    return text.splitlines()[1::2]


def test_a_ca_only_model_draws_the_same_for_a_file_with_all_atoms(sample, weights, files, tmp_path):
    texts = []
    for name in ("all.pdb", "ca.pdb"):
        (tmp_path / "one.pdb").write_bytes((files / name).read_bytes())     # the name is a seed
        code, out, _ = sample(weights / "ca.pt", tmp_path / "one.pdb", "--num", 3)
        assert code == 0
        texts.append(out)
    assert texts[0] == texts[1]
    assert len(set(sequences(texts[0]))) == 4


def test_chains_of_ca_atoms_that_a_full_model_leaves_out_are_named(sample, weights, files):
    code, _, said = sample(weights / "full.pt", files / "mixed.pdb")
    assert code == 0
    assert "designed chains B" in said
    assert "chains A have CA atoms only" in said


def test_a_chain_of_ca_atoms_is_refused_for_design_by_a_full_model(weights, files):
    words = [weights / "full.pt", files / "mixed.pdb", "--chains", "A"]
    assert_refused(sample_proteinmpnn.main, words, "A CA-only", files)


@pytest.mark.parametrize("options", [["--mutations", "list.csv"], ["--scan"]])
def test_variants_of_a_file_of_ca_atoms_are_scored(weights, files, demo, options, capsys):
    letter = "ACDEFGHIKLMNPQRSTVWY"[demo.complex.S[1]]
    (files / "list.csv").write_text(f"mutation\n{letter}2{'A' if letter != 'A' else 'G'}\n")
    options = [files / word if word == "list.csv" else word for word in options]
    score_mutations.main([*map(str, (weights / "ca.pt", files / "ca.pdb", *options))])
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_a_correction_by_weights_of_the_other_kind_is_refused(weights, files):
    words = [weights / "ca.pt", files / "all.pdb", "--scan", "--correction_weights",
             weights / "full.pt"]
    assert_refused(score_mutations.main, words, "ca.pt full.pt CA-only", files)


def pairs_file(folder, demo, pdb_file):
    """pairs.json with the demo pair, three times with another letter, on chain A of a file."""
    letters = "".join("ACDEFGHIKLMNPQRSTVWY"[i] for i in demo.chosen)
    entries = [changed(pdb_file=pdb_file, preferred_seq=letters,
                       unpreferred_seq=letters[:k] + "W" + letters[k + 1:], description=ABSENT)
               for k in range(len(letters)) if letters[k] != "W"][:3]
    return write(folder, entries)


def test_a_pair_on_a_chain_of_ca_atoms_is_refused_for_a_full_model(files, demo):
    assert "CA-only model" in refusal(pairs_file(files, demo, "mixed.pdb"), read_pairs)


@pytest.fixture
def tune(weights, files, demo):
    """Function: (steps, name of a run folder) -> the folder, of DPO with the CA-only weights."""
    pairs = pairs_file(files, demo, "ca.pdb")

    def run(steps, name):
        config = load_config(Config, None, [
            f"data.train_data={pairs}", f"model.base_model_dir={weights}",
            "model.base_model_name=ca", f"training.n_iters={steps}", "training.log_freq=1",
            "optim.lr=1e-3", "optim.warmup=0", "data.val_fraction=0"])
        prepare_and_train(train_dpo_ddp, config, Ddp(), files / name)
        return files / name

    return run


def test_a_ca_only_model_learns_from_pairs(tune):
    first, *_, last = losses(tune(3, "out")).values()
    assert first == pytest.approx(math.log(2), abs=1e-6)
    assert last < first


def test_tuned_ca_only_weights_have_the_layout_of_their_file(tune, weights):
    written = tune(1, "out") / "latest_model.pt"
    before = torch.load(weights / "ca.pt", weights_only=True)["model_state_dict"]
    assert list(torch.load(written, weights_only=True)["model_state_dict"]) == list(before)
    assert load_proteinmpnn(written).ca_only


def test_unused_tensors_of_a_file_are_written_as_they_were_read():
    file = to_checkpoint(random_proteinmpnn(0, ca_only=True, **SMALL))
    weights = file["model_state_dict"]
    weights["W_v.weight"] = torch.rand(8, 8)
    written = to_checkpoint(from_checkpoint(file))["model_state_dict"]
    assert torch.equal(written["W_v.weight"], weights["W_v.weight"])
