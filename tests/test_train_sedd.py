"""Does train_sedd_ddp.py train the right thing on any number of ranks, stop, go on and refuse?

Runs under launchers import torch in every rank (seconds), so each of them serves several tests;
where the launcher does not matter, ranks are forked.
"""

import functools
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from accumulate_gradients import SETTINGS, reference
from ddp_setup import Ddp, load_checkpoint
from launchers import ForkedRanks, clean_environment, fork_ranks, need, run_ranks
import bench_ddp
import prepare_uniref50
import sequence_batches
import train_sedd_ddp
from run_config import dump_yaml, load_config
from run_dir import RunLock, find_checkpoint, read_status, replace_status
from run_log import write_text_atomic
from sedd_diffusion import make_graph, make_noise
from sequence_data import (AMINO_ACIDS, N_TOKENS, X_ID, DemoSource, Proteins, decode,
                           read_sequences)
from sedd_eval import Validation, result_lines, sample_proteins
from sedd_files import export_sedd, load_sedd
from train_loop import MicroBatchSampler
from train_sedd_ddp import (Config, MicroBatches, check_config, describe_plan, main, make_reader,
                            prepare, train)

from training import (  # noqa: F401 (the fixture one_thread)
    ROOT, command_lines, equal, losses, one_thread, rows, same_run, words)

SCRIPT, DEMO = ROOT / "train_sedd_ddp.py", ROOT / "configs" / "sedd_demo.yaml"
TINY = {"training.batch_size": 4, "training.accum": 2, "training.n_iters": 12,
        "training.eval_freq": 6, "training.log_freq": 1, "training.snapshot_freq": 6,
        "optim.lr": 3e-3, "optim.warmup": 4, "optim.ema": 0.9, "model.hidden_size": 32,
        "model.n_blocks": 2, "model.n_heads": 2, "model.cond_dim": 16, "model.dropout": 0.1,
        "data.max_length": 50, "data.val_fraction": 0.1, "memory.mixed_precision": "false",
        "monitoring.n_samples": 2, "monitoring.sample_steps": 2}


@pytest.fixture(scope="module")
def fasta(tmp_path_factory):
    """240 proteins of 5 to 70 residues, some of them X."""
    source, cut = DemoSource(seed=0).sample(240, seed=1), np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "p.fasta"
    with open(path, "w") as f:
        for i in range(240):
            tokens = source[i][:cut.integers(5, 71)].copy()
            tokens[cut.random(len(tokens)) < 0.03] = X_ID
            f.write(f">p{i}\n{decode(tokens)}\n")
    return path


def tiny(fasta, **more):
    return load_config(Config, None, words({**TINY, "data.file": fasta}, **more))


def run(config, work_dir, **options):
    return main(config, Ddp(), work_dir, **options)


@pytest.fixture(scope="module")
def straight(fasta, tmp_path_factory):
    """The folder of a finished run of tiny(fasta), to compare with."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(tiny(fasta), folder)
    return folder


def by_command(n, config, folder, work_dir, *more, script=SCRIPT, env=None):
    """Run a config on n ranks by the command line, in `folder`: a Result."""
    (folder / "c.yaml").write_text(dump_yaml(config))
    argv = [script, "--config", "c.yaml", "--work_dir", work_dir, *more]
    return fork_ranks(n, argv, folder, env)


def state_of(work_dir, name="last.pt"):
    return load_checkpoint(str(work_dir / "checkpoints" / name))


def steps_of(work_dir):
    return [row["step"] for row in rows(work_dir)]


def same_weights(a, b, name="last.pt"):
    """Assert that checkpoints of two run folders hold the same weights and averages."""
    one, other = state_of(a, name), state_of(b, name)
    assert equal([one["model"], one["ema"]], [other["model"], other["ema"]])


# ---- one run on any number of ranks ----

ALIKE = words({"training.batch_size": 8, "training.n_iters": 10, "training.eval_freq": 10,
               "training.eval_samples": 1, "training.log_freq": 1, "optim.warmup": 3,
               "model.hidden_size": 64, "model.n_blocks": 2, "model.dropout": 0.1,
               "data.demo_proteins": 600, "monitoring.sample_steps": 2})
RANKS = {"alone": 1, "torchrun": 2, "openmpi": 4}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """demo(launcher) -> (run directory, what was printed) of ten steps of the demo, global batch
    32."""
    @functools.cache
    def get(launcher):
        n, folder = RANKS[launcher], tmp_path_factory.mktemp(launcher)
        argv = [SCRIPT, "--config", DEMO, *ALIKE, f"training.accum={4 // n}",
                f"training.num_workers={int(launcher == 'torchrun')}"]
        result = (fork_ranks(n, argv, folder) if launcher == "alone" else
                  run_ranks(launcher, n, argv, folder))
        assert result.returncode == 0 and not result.leftover, result.text
        return folder / "runs" / "sedd_demo", result
    return get


@pytest.mark.parametrize("launcher", [
    "torchrun", pytest.param("openmpi", marks=pytest.mark.slow)])
def test_the_same_global_batch_gives_the_same_losses_under_any_launcher(demo, launcher):
    need(launcher)
    one, other = rows(demo("alone")[0]), rows(demo(launcher)[0])
    assert steps_of(demo(launcher)[0]) == list(range(1, 11))
    for a, b in zip(one, other):
        keys = ["loss", "perplexity", "lr"] + [k for k in a if k.startswith("val/")]
        assert [b[k] for k in keys] == pytest.approx([a[k] for k in keys], rel=1e-5), a["step"]
    # there was something to differ
    assert one[-1]["loss"] != pytest.approx(one[0]["loss"], rel=1e-2)
    assert "val/loss" in one[-1]
    scaled = {"ddp/effective_batch_size": 32, "ddp/scaled_lr": 5e-4, "ddp/scaled_warmup": 2}
    for table, n in ((one, 1), (other, RANKS[launcher])):   # 1e-3 and 3 steps at 64, and 32 here
        assert {k: table[0][k] for k in table[0] if k.startswith("ddp/")} == {
            "ddp/world_size": n, **scaled}
    assert demo(launcher)[1].stdout.count("step 10/10") == 1              # rank 0 alone speaks


def test_accumulated_gradients_are_those_of_one_backward_over_the_global_batch(fasta, tmp_path):
    proteins, _ = read_sequences(fasta)
    expected = {name: reference(proteins, Ddp(), **setting | {"static": False})
                for name, setting in SETTINGS.items()}
    for n in (1, 2, 4):
        done = fork_ranks(n, [ROOT / "tests" / "accumulate_gradients.py", fasta, "out.pt"],
                          tmp_path)
        assert done.returncode == 0, done.text
        for setting, steps in torch.load(tmp_path / "out.pt", weights_only=True).items():
            for a, b in zip(steps, expected[setting], strict=True):
                worst = max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)
                assert worst < (1e-10 if "float64" in setting else 1e-5), (n, setting)


def test_any_number_of_ranks_computes_the_same_micro_batches_from_any_step_on(fasta):
    proteins, _ = read_sequences(fasta)
    config = load_config(Config, None, ["training.tokens_per_batch=200", "training.seed=7",
                                        "data.max_length=50"])

    def items(first, n):
        """(step, micro-batch, epoch, width, proteins) of all ranks, from step `first` to 45."""
        read = (MicroBatchSampler(make_reader(config, proteins, 4, Ddp()).item_of, 4,
                                  Ddp(rank=rank, world_size=n), first, 45) for rank in range(n))
        return sorted((step, micro, epoch, width, [decode(part[i]) for i in range(len(part))])
                      for sampler in read for step, micro, epoch, part, width in sampler)

    one = items(0, 1)
    assert [item[:2] for item in one] == [(step, micro) for step in range(45) for micro in range(4)]
    assert {epoch for _, _, epoch, *_ in one} >= {0, 1}
    assert items(0, 2) == items(0, 4) == one
    assert items(31, 2) == [item for item in one if item[0] >= 31]


def test_the_times_of_a_micro_batch_hit_each_stratum_once_and_those_of_a_global_batch_lie_closer():
    proteins = Proteins.from_sequences(["ACDEF" * 4] * 16)
    dataset = MicroBatches(make_graph("absorb", N_TOKENS), make_noise("loglinear"), 50, 4, seed=1)
    orders = set()
    for step in range(6):
        batches = [dataset[step, micro, 0, proteins, 20] for micro in range(4)]
        # of log-linear noise
        times = torch.stack([(1 - (-b["sigma"]).exp()) / (1 - 1e-3) for b in batches])
        shares = (times - 1e-3) / (1 - 1e-3)
        strata = (shares * 16).floor().long()
        assert all(sorted(row) == list(range(16)) for row in strata.tolist())
        assert sorted((shares.flatten() * 64).floor().long().tolist()) == list(range(64))
        orders.update(map(tuple, strata.tolist()))
    assert len(orders) == 24


def test_noise_is_keyed_by_step_and_micro_batch_and_spares_padding(fasta):
    proteins, _ = read_sequences(fasta)
    dataset = MicroBatches(make_graph("absorb", N_TOKENS), make_noise("loglinear"), 50, 2, seed=1)
    a, b, *others = (dataset[step, micro, 0, proteins.subset(np.arange(8)), 60]
                     for step, micro in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
               for k in a)
    assert a["x0"].shape == (8, 60)
    for other in others:
        assert not torch.equal(a["xt"], other["xt"]) and a["seed"] != other["seed"]
    assert (a["xt"][~a["mask"]] == X_ID).all() and not a["full"]


def test_workers_and_repetition_change_nothing(fasta, straight, tmp_path):
    run(tiny(fasta, training__num_workers=1), tmp_path)
    same_run(straight, tmp_path)
    sampled = [folder / "samples" / "step_12.fasta" for folder in (straight, tmp_path)]
    assert sampled[0].read_text() == sampled[1].read_text()


# ---- prepared folders ----

@pytest.fixture(scope="module")
def prepared(fasta, tmp_path_factory):
    """Folder prepared from `fasta`."""
    folder = tmp_path_factory.mktemp("prepared") / "folder"
    prepare_uniref50.main([str(folder), "--fasta", str(fasta), "--val_fraction", "0.1"])
    return folder


@pytest.fixture
def own_copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def test_ranks_read_the_same_from_a_prepared_folder_or_a_copy_of_it(fasta, prepared, tmp_path):
    run(tiny(fasta, training__accum=4), tmp_path / "one")
    for n, stage in ((2, []), (4, ["--stage", "local"])):
        done = by_command(n, tiny(prepared, training__accum=4 // n), tmp_path, f"on{n}", *stage)
        assert done.returncode == 0, done.text
        assert losses(tmp_path / f"on{n}") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert list((tmp_path / "local").iterdir()) == []


def test_a_run_begun_from_fasta_goes_on_from_the_folder(fasta, straight, prepared, tmp_path):
    run(tiny(fasta, training__n_iters=7), tmp_path / "parts")
    run(tiny(prepared), tmp_path / "parts")
    same_weights(straight, tmp_path / "parts")
    text = Path(fasta).read_text()
    (tmp_path / "other.fasta").write_text(text[:text.rindex(">")])
    prepare_uniref50.main([str(tmp_path / "other"), "--fasta", str(tmp_path / "other.fasta"),
                           "--val_fraction", "0.1"])
    with pytest.raises(ValueError, match="proteins"):
        run(tiny(tmp_path / "other", training__n_iters=20), tmp_path / "parts")


# kind: (file, what becomes of its bytes, what the refusal says)
DAMAGE = {
    "short": ("train/tokens.bin", lambda data: data[:-1],
              r"train/tokens.bin has [\d,]+ bytes \(expected"),
    "missing": ("train/lengths.bin", None, "train/lengths.bin is missing"),
    "version": ("meta.json", lambda data: data.replace(b'"version": 1', b'"version": 2'),
                "version 2; expected"),
    "torn": ("meta.json", lambda data: data[:100], "cannot be read"),
    "lengths": ("train/lengths.bin", lambda data: os.urandom(len(data)),
                "lengths.bin of the data is damaged"),
    "hole": ("train/tokens.bin", lambda data: data[:1000].ljust(len(data), b"\0"),   # half copied
             "is damaged or was changed under the run: tokens.bin, .* is wrong at or before")}


def damage(folder, kind):
    name, change, says = DAMAGE[kind]
    path = folder / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    return says


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_before_anything_is_written(kind, own_copy, tmp_path):
    with pytest.raises((ValueError, OSError), match=damage(own_copy, kind)):
        run(tiny(own_copy), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_a_folder_prepared_with_other_settings_is_refused(prepared, tmp_path):
    for key, value, made in (("val_fraction", 0.2, 0.1), ("min_length", 9, 1)):
        with pytest.raises(ValueError, match=f"{key} is {value}, but .* was prepared with {made}"):
            run(tiny(prepared, **{f"data__{key}": value}), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_staging_leaves_nothing_and_never_touches_the_original(prepared, own_copy, tmp_path):
    before = sorted(prepared.rglob("*"))
    run(tiny(prepared), tmp_path / "w", stage=str(prepared.parent))        # beside the original
    assert sorted(prepared.rglob("*")) == before and [prepared] == list(prepared.parent.iterdir())
    stage = tmp_path / "stage"
    ready = prepare(tiny(prepared), Ddp(), tmp_path / "v", stage=str(stage))
    assert list(stage.iterdir()) == []                                     # while it is read
    assert train(ready, Ddp())["step"] == 12
    same_weights(tmp_path / "w", tmp_path / "v")
    with pytest.raises(OSError, match=damage(own_copy, "hole")):
        run(tiny(own_copy), tmp_path / "x", stage=str(stage))
    with pytest.raises(ValueError, match="--stage copies a folder made by"):
        run(tiny(Path(__file__)), tmp_path / "x", stage=str(stage))
    assert list(stage.iterdir()) == [] and not (tmp_path / "x").exists()


def test_staging_without_room_is_refused_with_numbers(prepared, tmp_path, monkeypatch):
    space = shutil._ntuple_diskusage(10**6, 10**6, 10**3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    with pytest.raises(ValueError, match="0.0 GB free; expected .* for a copy of"):
        run(tiny(prepared), tmp_path / "w", stage=str(tmp_path / "stage"))


def test_a_rank_starts_in_little_memory_and_time_on_many_proteins(tmp_path):
    bench_ddp.write_prepared(tmp_path / "large", 100_000)
    config = load_config(Config, ROOT / "configs" / "sedd_uniref50.yaml")
    found = bench_ddp.in_a_child(bench_ddp.start_a_rank, tmp_path / "large", config, 48, 4)
    assert found["memory"] < 300 and found["first"] < 5 and found["reach"] < 2, found
    assert found["read"] < 1.1, found


# ---- stop and go on ----

def test_a_resumed_run_equals_an_uninterrupted_one(fasta, straight, tmp_path, monkeypatch):
    """Also if it is timed from there on. What it has seen is counted here by hand."""
    real, seen = train_sedd_ddp.micro_batch_loss, [0, 0]

    def counting(model, batch, *arguments):
        seen[0] += int((batch["mask"] & (batch["x0"] != X_ID)).sum())
        seen[1] += batch["x0"].numel()
        return real(model, batch, *arguments)

    monkeypatch.setattr(train_sedd_ddp, "micro_batch_loss", counting)
    run(tiny(fasta, training__n_iters=6), tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 7, "loss": 0.0}\n{"step": 8, "lo')   # of a run that was killed later
    run(tiny(fasta, monitoring__timing_every=2), tmp_path)
    same_weights(straight, tmp_path, "best.pt")
    same_run(straight, tmp_path)
    assert steps_of(tmp_path) == list(range(1, 13))
    assert [rows(tmp_path)[-1][f"seen/{name}"] for name in ("residues", "tokens")] == seen
    assert [row["step"] for row in rows(tmp_path) if "time/compute" in row] == [8, 10, 12]
    state = state_of(tmp_path)
    assert (state["step"], state["epoch"], state["world_size"]) == (12, 12 // 27, 1)


def test_a_killed_run_goes_on_from_its_last_checkpoint_by_the_same_command(fasta, tmp_path):
    config = words({**TINY, "data.file": fasta}, training__snapshot_freq=4,
                   training__eval_freq=10**6)
    (tmp_path / "c.yaml").write_text("training: {}\n")
    start = [SCRIPT, "--config", "c.yaml", *config, "training.n_iters=100000"]
    with ForkedRanks(start, tmp_path, {0: {"DDP_GUARD": 0}}) as ranks:
        ranks.wait_for("step 7/")
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert ranks.codes() == [-signal.SIGKILL]
    killed = tmp_path / "runs" / "c"
    at = state_of(killed)["step"]
    assert (killed / "lock.json").exists() and at % 4 == 0
    same = ["--config", "c.yaml", *config, f"training.n_iters={at + 6}"]
    go_on, straight = command_lines("train_sedd_ddp", [same, [*same, "--work_dir", "straight"]],
                                    tmp_path)
    assert go_on[0] == straight[0] == 0, go_on
    assert f"continuing from step {at:,} " in go_on[1]
    same_run(killed, tmp_path / "straight")
    assert not (killed / "lock.json").exists() and not list(killed.rglob("*.tmp"))


def test_a_resumed_run_of_muon_equals_an_uninterrupted_one(fasta, tmp_path):
    def muon(n):
        return tiny(fasta, optim__name="muon", training__n_iters=n, training__eval_freq=3)

    run(muon(6), tmp_path / "whole")
    run(muon(3), tmp_path / "parts")
    run(muon(6), tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(ValueError, match="optim.name: 'muon' -> 'adamw'"):
        run(tiny(fasta, training__n_iters=6, training__eval_freq=3), tmp_path / "parts")


def test_a_run_saved_on_four_ranks_goes_on_alike_on_three_two_and_one(fasta, tmp_path):
    def go_on(n, steps, **env):
        config = tiny(fasta, training__accum=3, training__batch_size=2, training__n_iters=steps,
                      training__eval_freq=100, optim__scale="linear", optim__base_global_batch=8)
        return by_command(n, config, tmp_path, f"on{n}", env=env)

    result = go_on(4, 5)
    assert result.returncode == 0, result.text
    for n in (3, 2, 1, 5):
        shutil.copytree(tmp_path / "on4", tmp_path / f"on{n}")
    for n, accum in ((4, 3), (3, 4), (2, 6), (1, 12)):
        result = go_on(n, 15)
        assert result.returncode == 0, result.text
        assert "lr 0.009, warm-up 12 steps, kept" in result.stdout
        if n != 4:
            assert f"saved elsewhere (world_size 4 -> {n})" in result.stdout, result.text
            assert f"accum is {accum} and not 3" in result.stdout
        found, expected = rows(tmp_path / f"on{n}"), rows(tmp_path / "on4")
        assert [row["loss"] for row in found[5:]] == pytest.approx(
            [row["loss"] for row in expected[5:]], rel=1e-5)
        assert [row["lr"] for row in found] == [row["lr"] for row in expected] and len(found) == 15
    before = sorted(tmp_path.rglob("*"))
    assert_refused(go_on(5, 15, DDP_GUARD=1), "has 12 micro-batches per step, which 5 ranks cannot "
                   "share equally. Continue on 1, 2, 3, 4, 6, 12 ranks.")
    assert sorted(tmp_path.rglob("*")) == before


def assert_refused(result, expected):
    """Assert that ranks with a guard have refused with this one message."""
    assert result.returncode == 2 and "Traceback" not in result.text, result.text
    said = result.stdout + result.stderr
    assert said.count(expected) == 1 == said.count("error: "), result.text


def test_starts_that_leave_nothing_to_do_or_to_rename_are_refused(fasta, tmp_path, monkeypatch):
    ready = prepare(tiny(fasta, training__eval_freq=100), Ddp(), tmp_path / "w")
    ready.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert train(ready, Ddp())["stopped"]
    monkeypatch.chdir(tmp_path / "w")
    before = sorted(tmp_path.rglob("*"))
    for folder, options, more, expected in (
            (tmp_path / "w", {}, dict(training__n_iters=1), "not finished.*asks for 1 steps"),
            (".", dict(fresh=True), {}, r"--fresh renames the run folder, and --work_dir \. names"),
            (tmp_path / "new", dict(resume=tmp_path / "w"), {}, "w is a folder; expected a check"),
            (tmp_path / "new", dict(resume=tmp_path / "w" / "checkpoints"), {},
             "expected a checkpoint, such as .*/w/checkpoints/last.pt")):
        with pytest.raises(ValueError, match=expected):
            run(tiny(fasta, **more), folder, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_says_so_and_may_be_lengthened(tmp_path):
    def start(**more):
        config = load_config(Config, None, words({**TINY, "training.n_iters": 3,
                                                  "data.demo_proteins": 100}, **more))
        result = by_command(1, config, tmp_path, "w")
        assert result.returncode == 0, result.text
        return result.stdout

    first, folder = start(), tmp_path / "w"
    assert read_status(folder) == {"code": 0, "reason": "all steps done", "step": 3}
    again = start()
    assert "This run is finished: all steps done at step 3" in again
    assert "step 3/3" not in again
    result = first[first.index("  the same validation"):]   # and paths
    assert result in again and "weights   w/checkpoints/best.pt (step 3)" in again
    assert "exact, of the source" in result and "standard error" in result
    assert "no better than the letter frequencies" in result
    start(training__n_iters=5, training__log_freq=2)
    assert steps_of(folder) == [1, 2, 3, 4, 5]


def test_a_finished_run_ends_with_a_picture_and_never_fails_for_it(fasta, tmp_path, capsys, extras):
    pytest.importorskip("matplotlib")
    run(tiny(fasta, training__n_iters=2), tmp_path / "w")
    picture = tmp_path / "w" / "curves.png"
    assert capsys.readouterr().out.splitlines()[-1] == f"  picture   {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    picture.mkdir()   # where no picture can be written
    run(tiny(fasta, training__n_iters=3), tmp_path / "w")
    assert capsys.readouterr().out.splitlines()[-1].startswith("ATTENTION: no picture was drawn")
    assert not list((tmp_path / "w").glob(".curves*"))


def test_a_resume_is_refused_for_another_config_other_data_or_model(fasta, tmp_path, monkeypatch):
    run(tiny(fasta, training__n_iters=2), tmp_path / "w")
    path = re.escape(str(tmp_path / "w" / "checkpoints" / "last.pt"))
    fine_tune = f"as a new run: --init_from {path} --work_dir NEW"
    differences = (r"(?s)another config.*optim\.lr: 0\.003 -> 0\.5.*loss\.reduction: 'residue'.*"
                   + fine_tune)
    with pytest.raises(ValueError, match=differences):
        run(tiny(fasta, optim__lr=0.5, loss__reduction="sequence"), tmp_path / "w")
    with pytest.raises(ValueError, match=r"(?s)model\.hidden_size: 32 -> 48.*start over\.$"):
        run(tiny(fasta, model__hidden_size=48), tmp_path / "w")
    state = state_of(tmp_path / "w")
    state["model"]["vocab_embed.embedding"] = torch.zeros(33, 32)   # of another alphabet, say
    torch.save(state, tmp_path / "alphabet.pt")
    shapes = r"another model: 1 tensors.*\(33, 32\) in the file, \(22, 32\) by the config"
    with pytest.raises(ValueError, match=shapes):
        run(tiny(fasta), tmp_path / "new", resume=tmp_path / "alphabet.pt")
    fewer = tmp_path / "fewer.fasta"
    fewer.write_text(fasta.read_text().rpartition(">")[0])
    with pytest.raises(ValueError, match=f"other proteins.*{fine_tune}"):
        run(tiny(fewer), tmp_path / "w")
    with monkeypatch.context() as patch:
        patch.setattr(sequence_batches, "BUCKET_RATIO", 0.9)   # another version of the project
        with pytest.raises(ValueError, match="was saved by a run with other batches"):
            run(tiny(fasta), tmp_path / "w")
    for state in ({"step": 1}, [1, 2]):
        torch.save(state, tmp_path / "other.pt")
        with pytest.raises(ValueError, match="no model, optimizer"):
            run(tiny(fasta), tmp_path / "new", resume=tmp_path / "other.pt")
    assert not (tmp_path / "new").exists() and steps_of(tmp_path / "w") == [1, 2]
    copy = tmp_path / "copy.fasta"   # the same proteins under another name are the same data
    shutil.copy(fasta, copy)
    allowed = dict(training__n_iters=3, training__eval_freq=1, training__log_freq=2,
                   training__snapshot_freq=1, training__num_workers=1,
                   monitoring__sample_frequency=2, monitoring__n_samples=3,
                   monitoring__sample_steps=3, monitoring__predictor="euler")
    run(tiny(copy, **allowed), tmp_path / "w")
    assert steps_of(tmp_path / "w") == [1, 2, 3]


def test_a_run_goes_on_though_a_later_version_has_more_keys(fasta, straight, tmp_path):
    """It did then what the new key does by default; another value is another config."""
    half = tiny(fasta, training__n_iters=6)
    run(half, tmp_path / "w")
    path = tmp_path / "w" / "checkpoints" / "last.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["optim"]["decay"], state["config"]["monitoring"]["tensorboard"]
    del state["config"]["monitoring"]["timing_every"], state["seen"]
    del state["config"]["training"]["init_from"], state["init_from"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"optim\.decay: 'none' -> 'linear'"):
        run(tiny(fasta, optim__decay="linear"), tmp_path / "w")
    run(tiny(fasta), tmp_path / "w")
    same_weights(straight, tmp_path / "w")
    assert losses(straight) == losses(tmp_path / "w")
    assert "seen/residues" not in rows(tmp_path / "w")[-1]   # nobody knows


def test_a_file_is_continued_in_another_folder_with_the_best_weights(fasta, tmp_path, capsys):
    def to(steps, **more):   # no evaluation after the first one is better
        return tiny(fasta, training__n_iters=steps, training__min_delta=9.0, **more)

    run(to(12), tmp_path / "a")
    a, b, c = (tmp_path / name / "checkpoints" for name in "abc")
    b.mkdir(parents=True)
    (b / "best.pt").write_bytes(b"of a start that came to no checkpoint")
    run(to(14, memory__max_memory_per_gpu=0.5), tmp_path / "b", resume=a / "last.pt")
    assert steps_of(tmp_path / "b") == [13, 14]
    assert (b / "best.pt").read_bytes() == (a / "best.pt").read_bytes()
    assert state_of(tmp_path / "b", "best.pt")["step"] == 6
    shutil.copy(a / "last.pt", tmp_path / "step12.pt")
    run(to(14), tmp_path / "a")
    same_weights(tmp_path / "a", tmp_path / "b")
    capsys.readouterr()
    run(to(14), tmp_path / "c", resume=tmp_path / "step12.pt")   # beside which is no best.pt
    assert "best.pt of the run so far is not at hand" in capsys.readouterr().out
    assert state_of(tmp_path / "c", "best.pt")["step"] == 14
    with pytest.raises(ValueError, match="holds a run already"):
        run(to(14), tmp_path / "a", resume=tmp_path / "step12.pt")
    with pytest.raises(ValueError, match="no checkpoint"):
        run(to(14), tmp_path / "d", resume=tmp_path / "missing.pt")


def test_fresh_renames_the_former_run_and_starts_over(fasta, tmp_path):
    for k in range(3):
        run(tiny(fasta, training__n_iters=2, training__seed=k), tmp_path / "w", fresh=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w", "w.old1", "w.old2"]
    seeds = [load_config(Config, tmp_path / name / "config.yaml").training.seed
             for name in ("w.old1", "w.old2", "w")]
    assert seeds == [0, 1, 2] and steps_of(tmp_path / "w") == [1, 2]


def test_the_lock_of_a_live_run_counts_and_a_dead_ones_is_taken_over(fasta, tmp_path, monkeypatch):
    hold = ("import time; from run_dir import RunLock; RunLock('w'); print('held', flush=True); "
            "time.sleep(100)")
    with subprocess.Popen([sys.executable, "-c", hold], cwd=tmp_path, stdout=subprocess.PIPE,
                          env=clean_environment(env={"PYTHONPATH": ROOT,
                                                     "SLURM_JOB_ID": "77"})) as holder:
        assert holder.stdout.readline() == b"held\n"
        for options in ({}, {"fresh": True}):
            with pytest.raises(ValueError, match=f"in use by process {holder.pid} on .*, job 77"):
                run(tiny(fasta), tmp_path / "w", **options)
        assert [p.name for p in (tmp_path / "w").iterdir()] == ["lock.json"]
        assert not (tmp_path / "w.old1").exists()
        holder.kill()
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / ".lock.json.7.tmp").touch()   # all that a start left that was killed
    assert find_checkpoint(tmp_path / "h", None, False, None) is None
    run(tiny(fasta, training__n_iters=1), tmp_path / "w")
    lock = tmp_path / "w" / "lock.json"
    assert not lock.exists()
    # On another host it counts whether the beat goes on: it does; it does not, since a moment;
    # since long.
    monkeypatch.setattr(RunLock, "stale", 2)
    monkeypatch.setattr(RunLock, "every", 0.2)

    def write(age):
        write_text_atomic(lock, json.dumps({"host": "elsewhere", "pid": 1, "start": 5,
                                            "beat": time.time() - age}))

    write(0)
    enough = threading.Event()
    beating = threading.Thread(target=lambda: [write(0) for _ in iter(lambda: enough.wait(0.1),
                                                                      True)])
    beating.start()
    try:
        with pytest.raises(ValueError, match="in use by process 1 on elsewhere"):
            RunLock(tmp_path / "w")
    finally:
        enough.set()
        beating.join()
    # in between: perhaps a clock that is wrong
    for age, seconds in ((0, (1.5, 60)), (1000, (1.5, 60)), (10000, (0, 1.5))):
        write(age)
        # a process that fails here does not wait
        write_text_atomic(tmp_path / "w" / "status.json", "{}")
        replace_status(tmp_path / "w", 2, "bad input")
        assert ((tmp_path / "w" / "status.json").read_text() == "{}") == (age == 0)
        start = time.monotonic()
        RunLock(tmp_path / "w").release()
        assert seconds[0] <= time.monotonic() - start <= seconds[1]


def test_a_run_that_was_taken_over_while_it_stood_still_writes_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLock, "every", 0.01)
    lock = RunLock(tmp_path)
    lock.check()
    other = json.dumps({"host": "elsewhere", "pid": 7, "start": 5, "beat": time.time()})
    while not lock.lost:      # a beat under way may still be written after this; then again
        lock.path.write_text(other)
    with pytest.raises(RuntimeError, match="taken over by process 7 on elsewhere"):
        lock.check()
    lock.release()
    assert lock.path.read_text() == other and [p.name for p in tmp_path.iterdir()] == ["lock.json"]


def test_a_lock_that_was_removed_by_hand_comes_back_and_needs_no_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(RunLock, "every", 0.01)
    monkeypatch.setattr(os, "link", refused)
    lock = RunLock(tmp_path)
    lock.path.unlink()
    end = time.monotonic() + 60
    while not lock.path.exists() and time.monotonic() < end:
        pass
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_directory_is_refused_and_left_alone(fasta, tmp_path):
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / ".notes.tmp").write_text("mine")
    for options in ({}, {"fresh": True}):
        with pytest.raises(ValueError, match="not a run directory: it holds .notes.tmp, src"):
            run(tiny(fasta), tmp_path / "project", **options)
    assert sorted(p.name for p in (tmp_path / "project").iterdir()) == [".notes.tmp", "src"]


def test_a_run_that_came_to_no_checkpoint_starts_again_but_not_with_another_config(fasta, tmp_path):
    run(tiny(fasta, training__n_iters=2), tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / "checkpoints")
    before = {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file()}
    with pytest.raises(ValueError,
                       match=r"(?s)another config, which came to no checkpoint.*optim\.lr"):
        run(tiny(fasta, training__n_iters=2, optim__lr=0.5), tmp_path / "w")
    assert before == {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file()}
    run(tiny(fasta, training__n_iters=2), tmp_path / "w")
    assert steps_of(tmp_path / "w") == [1, 2]
    (tmp_path / "w" / "metrics.jsonl").write_text("nonsense\n")
    before = (tmp_path / "w" / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match="line 1: found 'nonsense'"):
        run(tiny(fasta, training__n_iters=3), tmp_path / "w")
    assert (tmp_path / "w" / "config.yaml").read_bytes() == before


def test_a_stop_file_ends_the_run_and_its_line_says_to_remove_the_file(fasta, tmp_path, capsys):
    ddp, stop = Ddp(), tmp_path / "w" / "STOP"
    ready = prepare(tiny(fasta, training__n_iters=10**6), ddp, tmp_path / "w")
    stop.touch()
    assert "STOP exists" in train(ready, ddp)["stopped"]
    assert f"Remove {stop}; then the same command continues" in capsys.readouterr().out
    with pytest.raises(ValueError, match="Remove the file to continue"):
        run(tiny(fasta), tmp_path / "w")


# ---- start from weights ----

@pytest.fixture(scope="module")
def sources(straight, tmp_path_factory):
    """Files that hold the averaged weights of the best of `straight`, by kind."""
    folder, best = tmp_path_factory.mktemp("sources"), straight / "checkpoints" / "best.pt"
    export_sedd(load_sedd(best), folder / "published.pth")
    state = torch.load(folder / "published.pth", weights_only=True)   # as others publish it
    torch.save({key: state[key] for key in ("model", "ema", "step")}, folder / "published.pth")
    paths = {"checkpoint": best, "published": folder / "published.pth"}
    if importlib.util.find_spec("safetensors"):
        export_sedd(load_sedd(best), folder / "export")
        paths["export"] = folder / "export"
    return paths


@pytest.fixture
def family(fasta, tmp_path):
    """Some of the proteins of `fasta`."""
    path = tmp_path / "family.fasta"
    path.write_text(">".join(fasta.read_text().split(">")[:120]))
    return path


@pytest.mark.parametrize("kind", ["checkpoint", "export", "published"])
def test_a_run_begins_with_nothing_but_the_averages_of_a_file(sources, family, tmp_path, kind):
    if kind not in sources:
        pytest.skip("needs the package safetensors")
    config = tiny(family, training__init_from=sources[kind], training__seed=5,
                  model__dropout=0, noise__type="geometric", optim__ema=0.5)
    ready = prepare(config, Ddp(), tmp_path / "w")
    averages = torch.load(sources["checkpoint"], weights_only=True)["ema"]["shadow_params"]
    for average, p, own_average in zip(averages, ready.bare.parameters(), ready.ema.shadow_params,
                                       strict=True):
        assert torch.equal(average, p) and torch.equal(average, own_average)
    assert not ready.optimizer.state and ready.progress["step"] == ready.ema.num_updates == 0
    assert ready.progress["best"] is None and ready.lr == 3e-3 and ready.ema.decay == 0.5
    assert load_config(Config, tmp_path / "w" / "config.yaml") == config


def test_the_same_command_goes_on_with_what_it_began(sources, straight, family, tmp_path, capsys):
    shutil.copy(sources["checkpoint"], base := tmp_path / "base.pt")

    def begin(steps, path=base, **more):
        init = {"training__init_from": path} if path else {}
        return tiny(family, training__n_iters=steps, training__eval_freq=2,
                    training__snapshot_freq=2, **init, **more)

    run(begin(6), tmp_path / "whole")
    run(begin(2), tmp_path / "parts")
    begun = f"weights: from the run's checkpoint; it began with {base} (hash "
    assert begun not in capsys.readouterr().out
    run(begin(4), tmp_path / "parts")
    assert begun in " ".join(capsys.readouterr().out.split())
    state, other = torch.load(base, weights_only=True), tmp_path / "other.pt"
    state["ema"]["shadow_params"][0][0, 0] += 1
    torch.save(state, other)
    with pytest.raises(ValueError, match=f"began with other weights .* now .* of {other}.*fresh"):
        run(begin(6, other), tmp_path / "parts")
    with pytest.raises(ValueError, match=f"--init_from {tmp_path}/absent.pt: there is no such"):
        run(begin(6, tmp_path / "absent.pt"), tmp_path / "parts")
    base.write_bytes(b"newer")   # not needed any longer
    run(begin(6), tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert [row["step"] for row in rows(tmp_path / "parts") if "val/loss" in row] == [0, 2, 4, 6]
    run(begin(8, path=None), tmp_path / "parts")
    state = state_of(tmp_path / "parts")
    assert state["step"] == 8 and state["init_from"]["path"] == str(base)
    last = straight / "checkpoints" / "last.pt"
    before = last.read_bytes()
    with pytest.raises(ValueError, match="began with random weights"):
        run(tiny(family, training__init_from=other), straight)
    with pytest.raises(ValueError, match="exclude each other"):
        run(begin(4, other), tmp_path / "new", resume=last)
    assert last.read_bytes() == before and not (tmp_path / "new").exists()


def test_all_that_does_not_fit_the_weights_is_told_at_once(sources, family, tmp_path):
    other = torch.load(sources["published"], weights_only=True)
    other["model"]["vocab_embed.embedding"] = torch.zeros(33, 32)
    other["ema"]["shadow_params"][0] = torch.zeros(33, 32)
    torch.save(other, tmp_path / "tokens.pth")
    letters = torch.load(sources["checkpoint"], weights_only=True)
    torch.save({**letters, "alphabet": "ARNDCQEGHILKMFPSTWYVX"}, tmp_path / "letters.pt")
    sizes = ["model.hidden_size is 32 in the file, and 48 by the config", "model.n_blocks is 2",
             "model.n_heads is 2", "model.cond_dim is 16"]
    cases = [(sources["checkpoint"], dict(model__parameterization="subs"),
              [*sizes, "model.parameterization is sedd in the file, and subs"]),
             (tmp_path / "letters.pt", dict(graph__type="uniform"),
              [*sizes, "graph.type is absorb", "ARNDCQEGHILKMFPSTWYVX; expected ACDEF"]),
             (tmp_path / "tokens.pth", {}, [*sizes, "one of 33 tokens", "(33, 32)"])]
    for path, more, expected in cases:
        with pytest.raises(ValueError) as error:
            run(tiny(family, training__init_from=path, model__hidden_size=48, model__n_blocks=3,
                     model__n_heads=4, model__cond_dim=8, **more), tmp_path / "w")
        assert all(text in str(error.value) for text in expected), error.value
    assert not (tmp_path / "w").exists()


def test_two_ranks_begin_with_the_weights_that_rank_0_reads(sources, family, tmp_path):
    run(tiny(family, training__init_from=sources["published"], training__n_iters=2,
             training__accum=4), tmp_path / "one")
    (tmp_path / "driver.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train_sedd_ddp as script
from run_dir import hash_of
start_run = script.start_run
def noting(kind, config, ddp, former, bare, *more, **fields):
    open(f"hash{{ddp.rank}}", "w").write(hash_of(bare.state_dict()))   # before DDP wraps it
    return start_run(kind, config, ddp, former, bare, *more, **fields)
script.start_run = noting
script.cli()
""")
    done = by_command(2, tiny(family, training__n_iters=2), tmp_path, "two", "--init_from",
                      sources["published"], script="driver.py")
    assert done.returncode == 0, done.text
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    recorded = [state_of(tmp_path / name)["init_from"] for name in ("one", "two")]
    assert recorded[0] == recorded[1] and recorded[0]["path"] == str(sources["published"])
    for rank in (0, 1):
        assert (tmp_path / f"hash{rank}").read_text() == recorded[0]["hash"]


# ---- decisions ----

def test_validation_and_samples_are_those_of_the_averaged_weights(fasta, tmp_path):
    ready = prepare(tiny(fasta, optim__lr=0.03, optim__ema=0.99), Ddp(), tmp_path / "w")
    result = train(ready, Ddp())

    def again():
        text = sample_proteins(ready.bare, ready.config, ready.graph, ready.noise,
                               ready.plan.counts, 12, Ddp(), ready.dtype)
        return ready.validation.summarise(ready.validation(ready.bare, Ddp(),
                                                           ready.dtype))["val/loss"], text

    last, (live_bound, live_samples) = tmp_path / "w" / "samples" / "step_12.fasta", again()
    with ready.ema.applied(ready.bare):
        assert again() == (result["val/loss"], last.read_text())
    assert live_bound != result["val/loss"] and live_samples != last.read_text()


def test_the_learning_rate_is_not_scaled_beyond_the_data_there_is(fasta, tmp_path, capsys):
    config = tiny(fasta, optim__scale="linear", optim__base_global_batch=2, optim__warmup=0,
                  training__accum=1, training__batch_size=240)
    n = prepare(config, Ddp(), tmp_path).plan.proteins
    said = " ".join(capsys.readouterr().out.split())
    assert f"lr {3e-3 * n / 2:g}, " in said and f"to the {n} proteins that there are" in said


def test_a_batch_that_is_not_filled_is_told_by_plan_and_start_not_resume(fasta, tmp_path, capsys):
    poor, said = dict(training__batch_size=3), "do not fill a micro-batch"
    for ranks in ("1", "1,2", "2,1"):
        table = describe_plan(tiny(fasta, **poor, training__accum=1), ranks)
        assert (said in table) == (ranks != "1"), ranks
    run(tiny(fasta, **poor), tmp_path)
    assert said in capsys.readouterr().out
    run(tiny(fasta, **poor, training__n_iters=13), tmp_path)
    assert said not in capsys.readouterr().out


def test_two_ranks_without_validation_stop_early_together_on_the_training_loss(fasta, tmp_path):
    config = tiny(fasta, optim__lr=0, data__val_fraction=0, training__n_iters=50,
                  training__eval_freq=2, training__patience=2, training__min_delta=10)
    done = by_command(2, config, tmp_path, "w", env={"DDP_LOG_ALL": "1"})   # both say it
    assert done.returncode == 0, done.text
    assert done.stdout.count("Finished at step 6 (early stop)") == 2, done.text
    table, best = rows(tmp_path / "w"), state_of(tmp_path / "w", "best.pt")["best"]
    assert best == {"step": 2, "score": (table[0]["loss"] + table[1]["loss"]) / 2}
    assert not any(k.startswith("val/") for row in table for k in row)


# ---- what is computed ----

def test_gradient_checkpointing_gives_the_same_losses(fasta, straight, tmp_path):
    run(tiny(fasta, memory__gradient_checkpointing="true"), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_trains_near_float32_and_samples(fasta, straight, tmp_path, capsys, dtype):
    run(tiny(fasta, memory__mixed_precision=dtype, memory__max_memory_per_gpu=0.85), tmp_path)
    assert f"{dtype} (asked for" in (text := capsys.readouterr().out)
    assert "max_memory_per_gpu 0.85 has no effect on cpu" in text
    a, b = losses(straight), losses(tmp_path)
    assert a != b and b == pytest.approx(a, rel=0.02)
    sampled = (tmp_path / "samples" / "step_12.fasta").read_text().split("\n")[1::2]
    assert len(sampled) == 2 and all(re.fullmatch(f"[{AMINO_ACIDS}]+", line) for line in sampled)


def test_an_overflow_in_float16_is_skipped_and_no_failure(fasta, tmp_path):
    ready = prepare(tiny(fasta, memory__mixed_precision="float16"), Ddp(), tmp_path / "w")
    ready.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10**6)
    before = [p.clone() for p in ready.bare.parameters()]
    result = train(ready, Ddp())
    table = rows(tmp_path / "w")
    assert table[0]["grad_norm"] is None and table[0]["loss_scale"] < 2.0**22
    assert math.isfinite(result["loss"])
    assert table[-1]["grad_norm"] > 0 and table[-1]["loss_scale"] >= 1
    assert any(not torch.equal(a, b) for a, b in zip(before, ready.bare.parameters()))


def test_a_run_that_breaks_down_stops_with_the_checkpoints_of_before(fasta, tmp_path):
    config = tiny(fasta, training__log_freq=100, training__eval_freq=100, training__n_iters=100,
                  training__snapshot_freq=3)
    ready = prepare(config, Ddp(), tmp_path / "w")
    ready.optimizer.register_step_post_hook(lambda *_: (
        ready.progress["step"] == 4 and ready.bare.output_layer.linear.bias.data.fill_(math.nan)))
    with pytest.raises(RuntimeError, match="step 6: weights are nan.*optim.lr"):
        train(ready, Ddp())
    state = state_of(tmp_path / "w")
    assert state["step"] == 3 and all(p.isfinite().all() for p in state["model"].values())


def test_weights_that_have_come_apart_are_told_with_rank_and_parameter(tmp_path):
    (tmp_path / "s.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from ddp_setup import *
from run_dir import check_in_sync
with setup_ddp(quiet=True) as ddp:
    layers = [torch.nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(2)]
    model = wrap_ddp(torch.nn.Sequential(*layers), ddp)
    check_in_sync(model, ddp)
    if ddp.rank == 2:
        with torch.no_grad():
            unwrap_ddp(model)[1].weight[2, 1] += 0.01
    check_in_sync(model, ddp)
""")
    result = fork_ranks(3, ["s.py"], cwd=tmp_path)
    assert result.returncode != 0
    assert re.search(r"FAILED: .*rank 2 on \S+ differ from rank 0, first in 1.weight",
                     result.stderr), result.text


class TrueScores(torch.nn.Module):
    """The exact scores of residues drawn independently with probabilities p (20,)."""

    def __init__(self, p, graph):
        super().__init__()
        self.graph, self.anything = graph, torch.nn.Parameter(torch.zeros(1))
        # neither X nor the mask in clean data
        self.p = torch.cat([p, torch.zeros(graph.vocab_size - 20)])

    def forward(self, xt, sigma, mask=None):
        stay = torch.exp(-sigma.double())[:, None, None]
        limit = torch.zeros(self.graph.vocab_size)
        limit[slice(-1, None)
              if self.graph.absorb else slice(None)] = 1.0 if self.graph.absorb else 1 / len(limit)
        now = stay * self.p + (1 - stay) * limit                           # p(xt) at this noise
        ratio = now / now.expand(*xt.shape, -1).gather(-1, xt[..., None])
        return ratio.clamp(min=1e-30).log().scatter(-1, xt[..., None], 0.0).float()


def iid_proteins():
    p = torch.linspace(1, 6, 20)
    p = (p / p.sum()).double()
    draw = torch.Generator().manual_seed(0)
    rows = [torch.multinomial(p, 30 + 2 * (i % 20), True, generator=draw).numpy().astype(np.uint8)
            for i in range(150)]
    return p, Proteins.from_sequences(rows)


@pytest.mark.parametrize("graph, noise, arguments", [
    ("absorb", "loglinear", {}), ("absorb", "cosine", {}), ("uniform", "loglinear", {}),
    ("uniform", "geometric", {}), ("uniform", "geometric", {"sigma_max": 1.0})])
def test_with_true_scores_the_validation_value_is_the_exact_likelihood(graph, noise, arguments):
    p, proteins = iid_proteins()
    graph, noise = make_graph(graph, N_TOKENS), make_noise(noise, **arguments)
    config = load_config(Config, None, ["training.batch_size=1", "training.eval_samples=60",
                                        "data.max_length=80"])
    validation = Validation(proteins, config, graph, noise, np.ones(21, np.int64))
    bound = validation(TrueScores(p, graph), Ddp(), torch.float32)
    # Sampling starts from full noise, the data end at sigma(1). The bound exceeds the likelihood by
    # the mean of ln p(x1)/limit over x1 given x0: 0 to four digits but for the last case.
    extra = torch.zeros(20, dtype=torch.float64)
    if not graph.absorb:
        V, stay = graph.vocab_size, torch.exp(-noise(torch.ones((), dtype=torch.float64))[0])
        now = stay * torch.cat([p, torch.zeros(1)]) + (1 - stay) / V
        given = stay * torch.eye(V, dtype=torch.float64)[:20] + (1 - stay) / V
        extra = given @ torch.log(now * V)
    each = torch.stack([(-p.log() + extra)[torch.from_numpy(proteins[i]).long()].sum()
                        for i in range(len(proteins))])
    difference, counts = bound - each, torch.from_numpy(proteins.lengths)
    mean, exact = difference.sum() / counts.sum(), float(each.sum() / counts.sum())
    error = float(((difference - mean * counts) ** 2).sum().sqrt() / counts.sum())
    assert error < 0.01 * exact   # or the next line says little
    assert abs(float(mean)) < 3 * error + 0.002 * exact


@pytest.mark.parametrize("graph, noise, arguments", [
    ("absorb", "loglinear", {}), ("absorb", "loglinear", {"eps": 0.2}),
    ("uniform", "loglinear", {}), ("uniform", "geometric", {})])
def test_one_draw_of_the_noise_tells_how_a_model_differs_from_the_unigram(graph, noise, arguments):
    p, proteins = iid_proteins()
    config = load_config(Config, None, ["training.batch_size=1", "training.eval_samples=1",
                                        "data.max_length=80"])
    graph, counts = make_graph(graph, N_TOKENS), proteins.letter_counts()
    validation = Validation(proteins, config, graph, make_noise(noise, **arguments), counts)
    own = (counts[:20] + 1) / (counts[:20] + 1).sum()
    bound = validation(TrueScores(torch.from_numpy(own), graph), Ddp(), torch.float32)
    exact = np.array([-np.log(own[proteins[i]]).sum() for i in range(len(proteins))])
    assert np.allclose(bound, exact, rtol=1e-5) and validation.unigram == pytest.approx(
        math.exp(exact.sum() / proteins.lengths.sum()))


def test_the_exact_value_beside_the_bound_is_that_of_the_residues_evaluated():
    source = DemoSource(seed=0)
    proteins = source.sample(30, seed=3)
    config = load_config(Config, None, ["training.batch_size=1", "data.max_length=48"])
    graph = make_graph("absorb", N_TOKENS)
    v = Validation(proteins, config, graph, make_noise("loglinear"), proteins.letter_counts(),
                   source)
    assert v.counts.max() == 48 and proteins.lengths.max() > 48            # cropped
    again = source.nll(Proteins.from_sequences([v.proteins[i] for i in range(30)]))
    found = v.summarise(torch.from_numpy(again))
    assert found["val/exact"] == pytest.approx(again.sum() / v.counts.sum())
    assert found["val/loss"] == pytest.approx(found["val/exact"])
    assert found["val/standard_error"] == pytest.approx(0, abs=1e-12)


# ---- does it learn ----

LEARN = {"training.batch_size": 32, "training.log_freq": 50, "training.eval_samples": 8,
         "optim.lr": 5e-3, "optim.warmup": 20, "optim.ema": 0.98, "model.hidden_size": 64,
         "model.n_blocks": 2, "model.n_heads": 2, "model.cond_dim": 32, "model.dropout": 0,
         "data.demo_proteins": 6000, "data.val_fraction": 0.03, "data.max_length": 48,
         "memory.mixed_precision": "false", "monitoring.sample_steps": 4}


def learn(work_dir, steps, model, **more):
    kind = {"sedd": {}, "subs": {"model__parameterization": "subs"},
            "uniform": {"graph__type": "uniform"}}[model]
    settings = words(LEARN, training__n_iters=steps, training__eval_freq=steps, **kind, **more)
    result = run(load_config(Config, None, settings), work_dir)
    print(model, {k: round(v, 4) for k, v in result.items() if "val/" in k})
    return result


def assert_a_bound(result):
    """A bound below what the source itself would give is a bug in the evaluation."""
    error = 3 * result["val/standard_error"] + 0.002 * result["val/exact"]
    assert result["val/loss"] > result["val/exact"] - error


# Measured: 9.69 to 10.5 after 100 steps, of a unigram's 17.96 and an exact 8.06.
@pytest.mark.parametrize("model", [
    "sedd", pytest.param("subs", marks=pytest.mark.slow)])
def test_a_short_demo_learns_the_source_and_stays_above_its_exact_value(tmp_path, model):
    result = learn(tmp_path, 100, model)
    assert_a_bound(result)
    assert result["val/perplexity"] < 0.65 * result["val/unigram_perplexity"]
    lines = result_lines(result, {"best": {"step": 1}}, tmp_path)
    assert "no better than the letter frequencies" not in "\n".join(lines)


@pytest.mark.parametrize("model", ["sedd", "subs", "uniform"])
def test_the_bound_holds_where_nothing_was_learned(tmp_path, model):
    result = learn(tmp_path, 1, model, optim__lr=0, training__batch_size=2,
                   data__demo_proteins=2000)
    assert_a_bound(result)
    assert result["val/perplexity"] > 0.95 * result["val/unigram_perplexity"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["sedd", "uniform"])
def test_a_longer_demo_comes_near_the_exact_value_and_not_below(tmp_path, model):
    result = learn(tmp_path, 400, model, training__eval_samples=16)
    assert_a_bound(result)
    # Measured after 400 steps, 4 and 8 seeds: sedd 0.15 to 0.17 above, uniform 0.17 to 0.22.
    assert result["val/loss"] < result["val/exact"] + {"sedd": 0.2, "uniform": 0.25}[model]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_real_proteins_are_learned_on_two_ranks(shared, tmp_path):
    more = ["training.n_iters=300", "training.eval_freq=300", "optim.ema=0.98",
            "monitoring.sample_steps=16"]
    done = fork_ranks(2, [SCRIPT, "--config", ROOT / "configs" / "sedd_cpu.yaml", "--data",
                          shared / "data" / "proteins.fasta.gz", *more], tmp_path, timeout=2900)
    assert done.returncode == 0, done.text
    last = rows(tmp_path / "runs" / "sedd_cpu")[-1]
    ratio = last["val/perplexity"] / last["val/unigram_perplexity"]
    print(f"perplexity {last['val/perplexity']:.3f}, unigram {last['val/unigram_perplexity']:.3f}, "
          f"ratio {ratio:.4f}, {done.seconds:.0f} s")
    assert ratio < 0.985   # a model that knows only letter frequencies is at 1


# ---- config ----

def test_every_shipped_config_and_the_keys_of_the_original_are_accepted():
    paths = sorted((ROOT / "configs").glob("sedd_*.yaml"))
    assert DEMO in paths
    for path in paths:
        check_config(load_config(Config, path))
    check_config(load_config(Config, None, [
        "training.batch_size=16", "training.num_epochs=1", "optim.lr=1e-4", "optim.warmup=10000",
        "memory.gradient_checkpointing=False", "memory.mixed_precision=True",
        "memory.max_memory_per_gpu=0.85", "ddp.find_unused_parameters=False",
        "ddp.gradient_as_bucket_view=True", "monitoring.log_gradients=true",
        "monitoring.log_weights=false", "monitoring.sample_frequency=5000"]))


def test_the_plan_is_the_table_of_the_original():
    c = load_config(Config, ROOT / "configs" / "sedd_uniref50.yaml")

    def table_of(c, ranks):
        return [re.split(r"\s{2,}", line.strip())[:4]
                for line in describe_plan(c, ranks).splitlines() if re.match(r" +\d", line)]

    c.training.init_from = "not_read.pt"
    assert table_of(c, "1,2,4,8") == [
        ["1", "64", "5e-05", "5,000"], ["2", "128", "0.0001", "10,000"],
        ["4", "256", "0.0002", "20,000"], ["8", "512", "0.0004", "40,000"]]
    c = load_config(Config, ROOT / "configs" / "sedd_uniref50_8gpu.yaml")
    assert table_of(c, "8") == [["8", "384", "0.0003", "30,000"]]
    c = load_config(Config, DEMO, ["optim.warmup=300", "data.demo_proteins=3000"])
    assert "with 4, 64 rank(s) the warm-up lasts to the end (step 600)" in describe_plan(c, "4,64")


# ---- bad input ----

def test_bad_input_is_refused_with_one_message_and_leaves_nothing(fasta, tmp_path):
    files = {"c.yaml": "training: {}\n", "typo.yaml": "optim: {lrr: 1}\n",
             "one.fasta": ">a\nACDEF\n", "broken.fasta": ">a\nACDEF\n>b\nAC1EF\n",
             "few.fasta": ">a\nACDEF\n>b\nACDEG\n>c\nACDEH\n", "other.pt": "junk"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    alone = [("--config typo.yaml", "unknown key 'optim.lrr'"), ("", "--config"),
             ("--nnodes 2 --node_rank 0 --master_addr h", "required: --config")]
    more = [   # words after good ones, what is said about them
        ("--data none.fasta", "none.fasta does not exist"),
        ("--data data/none", "data/none does not exist", "python prepare_uniref50.py data/none"),
        ("--datafile broken.fasta", "broken.fasta, line 4, column 3: found b'1'"),
        ("--data few.fasta data.val_fraction=0", "3 proteins fill", "one global batch needs 2"),
        ("--data one.fasta", "data.val_fraction", "set data.val_fraction=0"),
        ("--data .", "meta.json does not exist", "prepare_uniref50.py"),
        ("--work_dir /proc/nope", "--work_dir", "/proc/nope"),
        ("--work_dir c.yaml/run", "c.yaml/run cannot be used", "c.yaml is a file"),
        ("--work_dir ''", "an argument is empty"), ("--work_dir=", "an argument is empty"),
        ("training.seed=1" + "0" * 19, "training.seed"), ("optim.eps=0", "optim.eps is 0"),
        ("training.batch_size=1e21", "training.batch_size"), ("optim.ema=1.0", "optim.ema is 1.0"),
        ("training.accum=0", "training.accum is 0; expected at least 1"),
        ("training.tokens_per_batch=400", "expected one of the two"),
        ("optim.betas=[0.9,1.0]", "optim.betas"), ("noise.eps=2", "noise.eps = 2"),
        ("optim.scale=linear", "optim.base_global_batch None"),
        ("graph.type=uniform model.parameterization=subs", "expected graph.type absorb"),
        ("model.n_heads=5", "model.n_heads is 5", "n_heads one of 1, 2, 4, 8, 16"),
        ("--rank 2", "unrecognized arguments: --rank"), ("--device tpu", "--device", "tpu"),
        ("--init_timeout 0", "init_timeout is 0"), ("--plan 1,x", "--plan 1,x"),
        ("--work_dir asked --ranks 2", "--ranks asks for 2"),
        ("--fresh --resume other.pt", "exclude each other"),
        ("--resume other.pt", "cannot read the checkpoint other.pt"),
        ("--init_from no.pt", "--init_from no.pt: there is no such file")]
    base = ["--config", "c.yaml", *words({**TINY, "data.file": fasta}, training__n_iters=1),
            "--work_dir", "new"]
    cases = [(first + shlex.split(text), said)
             for first, those in ((base, more), ([], alone)) for text, *said in those]
    # an outcome of before must not speak for the start that was refused
    for folder in ("runs/typo", "new", "asked"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "status.json").write_text('{"code": 75}')
    before = sorted(p.name for p in tmp_path.rglob("*"))
    found = command_lines("train_sedd_ddp", [argv for argv, _ in cases], tmp_path)
    for (argv, expected), (code, out, err) in zip(cases, found):
        text = f"{argv}\nexit code {code}\n{out}\n{err}"
        assert code not in (0, None) and code > 0, text
        assert all(e in err for e in expected) and err.count("error:") == 1, text
        assert "Traceback" not in out + err and len(err.strip().splitlines()) <= 3, text
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    for folder in ("runs/typo", "new", "asked"):
        assert read_status(tmp_path / folder)["code"] == 2


def test_two_ranks_refuse_a_folder_that_cannot_be_written_with_one_message(fasta, tmp_path):
    assert_refused(by_command(2, tiny(fasta), tmp_path, "c.yaml/run", env={"DDP_GUARD": 1}),
                   "c.yaml/run cannot be used")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


# train_sedd_ddp.py, where rank 1 is asked to stop while it reads the proteins, or has been given
# something else.
LOADING = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train_sedd_ddp
real, rank, argv = train_sedd_ddp.load_data, int(os.environ["RANK"]), sys.argv[1:]
def load_data(config, ddp, stage):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(config, ddp, stage)
if {case!r} == "stop":
    train_sedd_ddp.load_data = load_data
if {case!r} == "setting":
    argv.append(f"optim.lr=0.00{{rank + 1}}")
if {case!r} == "file":
    argv.append(f"data.file=file{{rank}}.fasta")
train_sedd_ddp.cli(argv)
"""


@pytest.mark.parametrize("case, code, expected", [
    ("stop", 75, r"SIGTERM on rank 1"),
    ("setting", 2, r"rank 1 on \S+ has optim.lr 0.002 \(rank 0: 0.001\)\. "),
    ("file", 2, r'rank 1 on \S+ has data \(hash\) "\w+" \(rank 0: "\w+"\)\. ')])
def test_what_one_rank_meets_before_the_training_ends_all(case, code, expected, fasta, tmp_path):
    text = Path(fasta).read_text()
    for name, whole in (("file0.fasta", text), ("file1.fasta", text[:text.rindex(">")])):
        (tmp_path / name).write_text(whole)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "status.json").write_text('{"code": 75}')
    (tmp_path / "driver.py").write_text(LOADING.format(root=str(ROOT), case=case))
    result = by_command(2, tiny(fasta), tmp_path, "w", script="driver.py")
    status = read_status(tmp_path / "w")
    assert (result.returncode, status["code"]) == (code, code), result.text
    assert re.search(expected, status["reason"]) and "Traceback" not in result.stderr, result.text
    said = re.findall(expected, result.stdout if code == 75 else result.stderr)
    assert len(said) == (1 if code == 75 else 2), result.text      # each rank, without a guard


# ---- what a person sees ----

def test_without_a_terminal_lines_are_short_and_the_essentials_are_said(demo):
    text = demo("torchrun")[1].stdout
    assert max(len(line) for line in text.splitlines() if "/" not in line
               and "launcher" not in line) <= 80
    for said in ("Initialized DDP: 2 rank(s)", "device cpu", "float32 (mixed precision off)",
                 "million parameters", "for training",
                 "8 proteins x accum 2 x 2 rank(s) = 32 per step",
                 "results: runs/sedd_demo, a new run", "step 10: validation",
                 "Finished at step 10 (all steps done)", "learned bound (EMA)", "unigram",
                 "exact, of the source", "checkpoints/best.pt", "samples/step_10.fasta",
                 "metrics.jsonl"):
        assert text.count(said) == 1 or said in ("unigram", "metrics.jsonl", "for training"), said
        assert said in text, said
    assert re.search(r"step 9/10  loss \d\S*  ppl \d\S*  [\d,]+ res/s  ETA 0:00:\d\d", text)
