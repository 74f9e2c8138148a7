"""Does train_mpnn_ddp.py train the right thing on any number of ranks, stop, go on and refuse?"""
import math
import shutil

import pytest
import torch

import train_mpnn_ddp
from ddp_setup import Ddp, load_checkpoint
from launchers import fork_ranks, need, run_ranks
from mpnn.evaluation import Validation
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn.record import RECORD, TrainingRecord, find_base, read_record
from mpnn.weights import load_proteinmpnn
from mpnn_cases import SIZES, TINY, write_structure, write_structures
from proteins.letters import X_ID
from train_mpnn_ddp import (
    Config,
    Loss,
    Optim,
    describe_plan,
    main,
    micro_batch_loss,
    prepare,
    read_arguments,
)
from training.config import load_config
from training.loop import rate_share
from training.optimizer import make_optimizer
from training.resume import hash_of
from training_runs import (
    ROOT,
    assert_refused,
    driver,
    losses,
    prepare_and_train,
    rows,
    timeless,
    words,
)

SCRIPT = ROOT / "train_mpnn_ddp.py"
SETTINGS = {**TINY, **{f"model.random.{name}": value for name, value in SIZES.items()}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(14 structures of one or two chains, 3 others)."""
    folder = write_structures(tmp_path_factory.mktemp("structures"))
    other = tmp_path_factory.mktemp("others")
    for k in range(3):
        write_structure(other, f"o{k}.pdb", 100 + k, [30, 21 + k])
    return folder, other


@pytest.fixture(scope="module")
def cache(folders, tmp_path_factory):
    """Settings that read the structures, once for all tests."""
    folder, other = folders
    file = tmp_path_factory.mktemp("cache") / "structures.pt"
    return {"data.structures": folder, "data.other_structures": other, "data.cache": file}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A file of weights to start from."""
    path = tmp_path_factory.mktemp("weights") / "base.pt"
    torch.save(to_checkpoint(random_proteinmpnn(7, **SIZES)), path)
    return path


def tiny(cache, **more):
    return load_config(Config, None, words({**SETTINGS, **cache}, **more))


def fine_tuning(base, **more):
    """Settings that start from a file of weights, beside SETTINGS."""
    sizes = {f"model__random__{key}": getattr(Config().model.random, key) for key in SIZES}
    return {"model__base_model_name": base, **sizes, **more}


def run(config, work_dir, **options):
    return prepare_and_train(train_mpnn_ddp, config, Ddp(), work_dir, **options)


# ---- the loss ----

def batch_and_run(cache, tmp_path, model=None, **more):
    """(a micro-batch of all structures of a run without dropout and noise, the run)."""
    config = tiny(cache, training__noise=0, model__dropout=0, **more)
    ready = prepare(config, Ddp(), tmp_path / "w")
    batch = ready.train_set[0, 0, 0, range(len(ready.train_set.items))]
    ready.bare = ready.model = model or ready.model
    return batch, ready


def log_probs_of(model, batch):
    """(U, L, 21), with gradients."""
    graph = model.graph(batch["X"], batch["mask"], batch["residue_idx"], batch["chain_id"])
    return model(graph, batch["S"], batch["order"])


def published_loss(log_probs, S, chain_M, mask):
    """The training loss as published: label smoothing over 21 letters, whose sum over the designed
    residues is divided by a constant, 2,000. S: (U, L). chain_M, mask: (U, L) float."""
    hot = torch.eye(21, dtype=log_probs.dtype)[S]
    hot = hot + 0.1 / 21
    hot = hot / hot.sum(-1, keepdim=True)
    cross_entropy = -(hot * log_probs).sum(-1)
    return (cross_entropy * mask * chain_M).sum() / 2000


def test_loss_and_gradient_of_a_batch_are_the_published_ones_but_for_the_constant(cache, tmp_path):
    """Of structures of several lengths, with padding; some with a chain that is not designed."""
    batch, ready = batch_and_run(cache, tmp_path)
    assert (batch["mask"] == 0).any() and (batch["chain_M"] < batch["mask"]).any()
    parameters = list(ready.bare.parameters())
    log_probs = log_probs_of(ready.bare, batch)
    published = published_loss(log_probs, batch["S"], batch["chain_M"], batch["mask"])
    expected = torch.autograd.grad(published, parameters)
    total, sums = micro_batch_loss(ready.model, batch, ready, Ddp())
    loss = total / batch["count"]
    factor = 2000 / batch["count"]
    assert loss.item() == pytest.approx(published.item() * factor, rel=1e-5)
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs * factor, rtol=1e-4, atol=1e-7)
    assert sums[0].item() == pytest.approx(total.item())


def test_a_residue_of_unknown_letter_does_not_count(cache, tmp_path):
    batch, ready = batch_and_run(cache, tmp_path)
    row, at = batch["counted"].nonzero()[3].tolist()
    before, sums = micro_batch_loss(ready.model, batch, ready, Ddp())
    log_probs = log_probs_of(ready.bare, batch).detach()
    own = train_mpnn_ddp.smoothed_nll(log_probs, batch["S"], 0.1)[row, at]
    batch["counted"][row, at] = 0
    after, fewer = micro_batch_loss(ready.model, batch, ready, Ddp())
    assert (before - after).item() == pytest.approx(own.item(), rel=1e-3)
    assert sums[4] - fewer[4] == 1


@pytest.mark.parametrize("smoothing, expected", [
    (0.0, -math.log(0.6)),
    # target: 1 + 0.21 / 21 and 0.21 / 21, divided by 1.21; 20 letters of 0.02 each
    (0.21, -(1.01 * math.log(0.6) + 20 * 0.01 * math.log(0.02)) / 1.21)])
def test_label_smoothing_at_numbers_computed_by_hand(smoothing, expected):
    p = torch.full((1, 1, 21), 0.02, dtype=torch.float64)
    p[..., 4] = 0.6
    found = train_mpnn_ddp.smoothed_nll(p.log(), torch.tensor([[4]]), smoothing)
    assert found.item() == pytest.approx(expected)


def test_the_kl_term_is_the_divergence_from_the_base_weights(cache, tmp_path, base):
    moved = random_proteinmpnn(8, **SIZES)
    batch, ready = batch_and_run(cache, tmp_path, moved, loss__kl=0.7, **fine_tuning(base))
    with_kl, sums = micro_batch_loss(moved, batch, ready, Ddp())
    a = log_probs_of(load_proteinmpnn(base).eval(), batch)
    b = log_probs_of(moved, batch)
    divergence = torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)
    expected = (divergence * batch["counted"]).sum().item()
    ready.base = None
    without, _ = micro_batch_loss(moved, batch, ready, Ddp())
    assert expected > 1 and (with_kl - without).item() == pytest.approx(0.7 * expected, rel=1e-4)
    assert sums[3].item() == pytest.approx(expected, rel=1e-5)


def test_the_base_weights_compute_without_dropout_and_stay_as_they_were(cache, tmp_path, base):
    config = tiny(cache, loss__kl=0.5, model__dropout=0.3, training__n_iters=2,
                  **fine_tuning(base))
    kept = []

    def train(ready, ddp, watch):
        result = train_mpnn_ddp.train(ready, ddp, watch)
        kept.append(ready.base)
        return result

    prepare_and_train(train_mpnn_ddp, config, Ddp(), tmp_path / "w", train=train)
    assert not kept[0].training
    for weight, former in zip(kept[0].parameters(), load_proteinmpnn(base).parameters()):
        assert torch.equal(weight, former) and weight.grad is None
    last = rows(tmp_path / "w")[-1]
    assert last["kl"] > 0


# ---- optimizer and schedule ----

@pytest.mark.parametrize("step", [1, 10, 4000, 10_000])
def test_the_learning_rate_is_that_of_the_published_schedule(step):
    optim = Optim()
    published = 2 * 128**-0.5 * min(step**-0.5, step * 4000**-1.5)
    share = rate_share(step - 1, optim.warmup, 20_000, optim)
    assert optim.lr * share == pytest.approx(published, rel=1e-9)
    from_file = load_config(Config, ROOT / "configs" / "mpnn.yaml").optim
    assert from_file.lr == pytest.approx(optim.lr, rel=1e-8) and from_file.decay == optim.decay


def test_the_optimizer_moves_weights_as_adam_does():
    model = random_proteinmpnn(1, **SIZES)
    other = random_proteinmpnn(1, **SIZES)
    ours = make_optimizer(model, 1e-3, Optim())
    adam = torch.optim.Adam(other.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=draw)
            b.grad = a.grad.clone()
        ours.step()
        adam.step()
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# ---- evaluation ----

def test_validation_is_the_mean_over_all_residues_that_may_be_designed(cache, tmp_path):
    """Each group of chains is designed once, beside the others; as if each was scored alone."""
    config = tiny(cache)
    ready = prepare(config, Ddp(), tmp_path / "w")
    validation = ready.others
    assert len(validation.items) == 6 and validation.n_structures == 3
    model = ready.bare
    nll = correct = n = 0
    model.eval()
    for item in validation.items:
        alone = Validation(validation.structures, [item], 100)
        batch = train_mpnn_ddp.make_batch(alone.structures, [item])
        with torch.no_grad():
            log_probs = log_probs_of(model, batch)
        counted = batch["counted"].bool() & (batch["S"] != X_ID)
        own = log_probs.gather(-1, batch["S"][..., None])[..., 0][counted]
        nll -= own.double().sum().item()
        correct += (log_probs.argmax(-1) == batch["S"])[counted].sum().item()
        n += int(counted.sum())
    model.train()
    loss, accuracy = validation(model, Ddp())
    assert n == int(validation.structures.lengths.sum()) and model.training
    assert loss == pytest.approx(nll / n, rel=1e-6) and accuracy == pytest.approx(correct / n)


def test_a_run_on_other_structures_tells_what_it_does_to_them(cache, tmp_path, base, capsys):
    run(tiny(cache, **fine_tuning(base)), tmp_path / "w")
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path.parent) not in line)
    _, _, table = out.partition("Finished")
    lines = [line.split() for line in table.splitlines()]
    heads = [line[0] for line in lines if line and line[0] in ("validation", "others", "before",
                                                               "best", "latest")]
    assert heads == ["validation", "before", "best", "latest", "others", "before", "best", "latest"]
    found = rows(tmp_path / "w")
    before, = [row for row in found if row["step"] == 0]
    evaluated = [row for row in found if "other/loss" in row]
    assert [row["step"] for row in evaluated] == [0, 3, 6]
    best = min(evaluated, key=lambda row: row["val/loss"])
    shown = [float(line[1]) for line in lines if line and line[0] in ("before", "best", "latest")]
    expected = [row[name] for name in ("val/loss", "other/loss")
                for row in (before, best, evaluated[-1])]
    assert shown == pytest.approx(expected, abs=6e-5)
    assert before["val/perplexity"] == pytest.approx(math.exp(before["val/loss"]))


def test_without_validation_the_others_are_still_evaluated(cache, tmp_path, base, capsys):
    config = tiny(cache, data__val_fraction=0, **fine_tuning(base))
    run(config, tmp_path / "w")
    assert [row["step"] for row in rows(tmp_path / "w") if "other/loss" in row] == [0, 3, 6]
    assert not (tmp_path / "w" / "best_model.pt").exists()
    out = capsys.readouterr().out
    assert "others" in out and f"weights   {tmp_path / 'w' / 'latest_model.pt'}" in out


def test_what_is_written_is_read_as_weights_of_proteinmpnn(cache, tmp_path):
    run(tiny(cache, training__noise=0.1), tmp_path / "w")
    best = torch.load(tmp_path / "w" / "best_model.pt", weights_only=True)
    assert best["noise_level"] == 0.1 and best["num_edges"] == 8
    model = load_proteinmpnn(tmp_path / "w" / "latest_model.pt")
    state = load_checkpoint(str(tmp_path / "w" / "checkpoints" / "last.pt"))
    assert all(torch.equal(value, state["model"][name])
               for name, value in model.state_dict().items())


def test_weights_keep_what_their_base_says_of_the_correction_of_its_scores(cache, tmp_path, base):
    """That of weights trained on measured mutations, found from the folder of the run."""
    content = torch.load(base, weights_only=True)
    record = TrainingRecord("stability", base.name, hash_of(content["model_state_dict"]),
                            "unfolded", "table")
    stable = base.with_name("stable.pt")
    torch.save({**content, RECORD: record._asdict()}, stable)
    run(tiny(cache, training__n_iters=1, **fine_tuning(stable)), tmp_path / "w")
    path = tmp_path / "w" / "latest_model.pt"
    kept = read_record(torch.load(path, weights_only=True), path)
    _, model = find_base(kept, path)
    assert kept.is_corrected and hash_of(model.state_dict()) == record.base_hash


def test_without_progress_the_run_ends_early_and_the_best_is_the_base(cache, tmp_path, base,
                                                                        capsys):
    run(tiny(cache, optim__lr=0, training__patience=1, **fine_tuning(base)), tmp_path / "w")
    assert rows(tmp_path / "w")[-1]["step"] == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "best_model.pt is still the base weights, as no later evaluation was better" in said
    assert "latest_model.pt has step 3" in said
    best = load_proteinmpnn(tmp_path / "w" / "best_model.pt").state_dict()
    for name, value in load_proteinmpnn(base).state_dict().items():
        assert torch.equal(value, best[name])


# ---- one run on any number of ranks ----

def test_any_number_of_ranks_makes_the_same_losses(cache, tmp_path):
    settings = words({**SETTINGS, **cache, "model.dropout": 0.1, "training.n_iters": 4})
    run(load_config(Config, None, settings), tmp_path / "of1")
    for n in (3, 4):   # three share the micro-batches unevenly
        done = fork_ranks(n, [SCRIPT, "--config", ROOT / "configs" / "mpnn.yaml", "--work_dir",
                              f"of{n}", *settings], tmp_path)
        assert done.returncode == 0, done.text
    one = timeless(tmp_path / "of1")
    for n in (3, 4):
        for a, b in zip(one, timeless(tmp_path / f"of{n}"), strict=True):
            assert [b[key] for key in a] == pytest.approx([*a.values()], rel=1e-5, abs=1e-6)
    assert one[-1]["loss"] != pytest.approx(one[0]["loss"], rel=1e-2)   # something could differ


@pytest.mark.slow
def test_the_same_global_batch_gives_the_same_losses_under_mpi(cache, tmp_path):
    need("mpich")
    settings = words({**SETTINGS, **cache})
    run(load_config(Config, None, settings), tmp_path / "one")
    done = run_ranks("mpich", 2, [SCRIPT, "--config", ROOT / "configs" / "mpnn.yaml", "--work_dir",
                                  "two", *settings], tmp_path)
    assert done.returncode == 0 and not done.leftover, done.text
    assert [*losses(tmp_path / "two").values()] == pytest.approx(
        [*losses(tmp_path / "one").values()], rel=1e-5)


# ---- stop and go on ----

def test_a_file_stop_saves_and_the_same_command_finishes(cache, tmp_path):
    command = [SCRIPT, "--config", ROOT / "configs" / "mpnn.yaml", "--work_dir", "w",
               *words({**SETTINGS, **cache})]
    program = driver(tmp_path, "train_mpnn_ddp", """
after = script.after_step
def and_ask(run, *arguments):
    (run.work_dir / "STOP").touch()
    return after(run, *arguments)
script.after_step = and_ask
""")
    stopped = fork_ranks(1, [program, *command[1:]], tmp_path, {"RANK": "0"})
    assert stopped.returncode == 75, stopped.text
    step = load_checkpoint(str(tmp_path / "w" / "checkpoints" / "last.pt"))["step"]
    assert 1 <= step < 6
    (tmp_path / "w" / "STOP").unlink()
    done = fork_ranks(1, command, tmp_path)
    assert done.returncode == 0 and [*losses(tmp_path / "w")] == [1, 2, 3, 4, 5, 6], done.text


def test_a_resume_is_refused_for_other_structures_or_base_weights(cache, folders, tmp_path, base):
    run(tiny(cache, training__n_iters=1, **fine_tuning(base)), tmp_path / "w")
    other = tmp_path / "other.pt"
    torch.save(to_checkpoint(random_proteinmpnn(9, **SIZES)), other)
    with pytest.raises(ValueError, match="base weights"):
        run(tiny(cache, **fine_tuning(other)), tmp_path / "w")
    shutil.copytree(folders[0], tmp_path / "more")
    write_structure(tmp_path / "more", "new.pdb", 50, [40])
    for changed in ("data.structures", "data.val_structures"):
        with pytest.raises(ValueError, match="structures"):
            run(tiny({**cache, changed: tmp_path / "more", "data.cache": tmp_path / "more.pt"},
                     **fine_tuning(base)), tmp_path / "w")


def test_other_structures_may_be_left_out_and_added_on_the_way(cache, folders, tmp_path, base):
    """They decide nothing."""
    more = {"data__cache": tmp_path / "c.pt", **fine_tuning(base)}
    without = {**cache, "data.other_structures": "null"}
    run(tiny(cache, training__n_iters=3, **more), tmp_path / "w")
    run(tiny(without, training__n_iters=6, **more), tmp_path / "w")
    run(tiny(cache, training__n_iters=9, **more), tmp_path / "w")
    evaluated = [row["step"] for row in rows(tmp_path / "w") if "other/loss" in row]
    assert evaluated == [0, 3, 9]


def test_other_structures_that_are_trained_on_are_told(folders, tmp_path, capsys):
    settings = {"data.structures": folders[0], "data.other_structures": folders[0]}
    prepare(tiny(settings), Ddp(), tmp_path / "w")
    out = " ".join(capsys.readouterr().out.split())
    assert "structures of data.other_structures have a chain that is in training" in out


# ---- input and options ----

@pytest.mark.parametrize("line, named", [
    ("data.structures=null", "--structures"),
    ("--structures empty", "empty"),
    ("--structures s training.num_epochs=3", "training.n_iters training.num_epochs 3"),
    ("--structures s loss.kl=0.5", "loss.kl 0.5"),
    ("--structures s --base_model_name absent", "absent"),
    ("--structures s optim.min_lr=1e-5", "optim.min_lr 1e-05")])
def test_input_that_cannot_be_used_is_refused_and_writes_nothing(line, named, folders, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "s").symlink_to(folders[0])
    assert_refused(main, f"--config {ROOT / 'configs' / 'mpnn.yaml'} {line}", named, tmp_path)


@pytest.mark.parametrize("more, words_of_it", [
    ({"training__micro_batches": 40}, "40"),
    ({"data__max_length": 25}, "data.max_length 25")])
def test_what_the_structures_do_not_allow_is_refused(folders, tmp_path, more, words_of_it):
    with pytest.raises(ValueError, match=words_of_it):
        prepare(tiny({"data.structures": folders[0]}, **more), Ddp(), tmp_path / "w")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("more, words_of_it", [
    ({"data__val_fraction": 0, "training__patience": 2}, "training.patience"),
    ({"data__cache": "absent/c.pt"}, "absent/c.pt")])
def test_what_can_be_refused_before_structures_are_read_leaves_no_file(folders, tmp_path, more,
                                                                       words_of_it, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words_of_it):
        prepare(tiny({"data.structures": folders[0]}, **more), Ddp(), tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_the_default_cache_survives_a_fresh_start(folders, tmp_path, capsys):
    """It stands beside the run folder, which --fresh renames."""
    config = tiny({"data.structures": folders[0]}, training__n_iters=1)
    run(config, tmp_path / "w", fresh=True)
    run(config, tmp_path / "w", fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.old1", "w.structures.pt"]
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("rows, kept in") == out.count("rows, from") == 1


def test_a_ca_only_model_is_trained_on_ca_atoms(cache, tmp_path):
    path = tmp_path / "ca.pt"
    torch.save(to_checkpoint(random_proteinmpnn(3, ca_only=True, **SIZES)), path)
    run(tiny({**cache, "data.cache": tmp_path / "ca_cache.pt"}, training__n_iters=2,
             **fine_tuning(path)), tmp_path / "w")
    assert load_proteinmpnn(tmp_path / "w" / "latest_model.pt").ca_only


@pytest.mark.parametrize("name", ["mpnn.yaml", "mpnn_finetune.yaml"])
def test_a_plan_shows_batch_rate_and_memory_without_structures(name):
    _, config = read_arguments(["--config", str(ROOT / "configs" / name), "--plan", "1,2,8"])
    text = describe_plan(config, "1,2,8")
    rows_of_ranks = [line.split() for line in text.splitlines() if line.strip()[:1] in "128"]
    assert [row[:2] for row in rows_of_ranks[:2]] == [["1", "10,000"], ["2", "10,000"]]
    assert "refused with 8 rank(s)" in text and "memory of a rank, up to" in text


def test_defaults_are_the_published_recipe():
    config = Config()
    assert (config.loss, config.training.noise, config.model.dropout) == (Loss(0.1, 0.0), 0.2, 0.1)
    assert config.optim.betas == (0.9, 0.98) and config.optim.eps == 1e-9
    assert config.optim.decay == "noam" and not config.optim.grad_clip
    assert not config.optim.weight_decay
