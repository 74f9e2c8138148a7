"""Every key and option of the training scripts once, each with an effect: one table per script.

A row is a key, its value, and what it shows in a run of three steps beside a run without it. A key
or an option of --help without a row fails."""
import contextlib
import io
import json
import os
import re
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import pairs_from_scores
import prepare_uniref50
from ddp_setup import load_checkpoint
from dpo_cases import write_binding, write_pairs, write_table
from launchers import ROOT, read_status
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import SIZES, write_structure, write_structures
from sedd_cases import SIZES as SEDD_SIZES
from sedd_cases import write_checkpoint, write_proteins
from tool_runs import run_tool
from training.config import key_fields, names_of_keys
from training_runs import SCRIPTS, assert_refused

RANDOM = {f"model.random.{name}": value for name, value in SIZES.items()}
THREE_STEPS = {"training.n_iters": 3, "training.log_freq": 1, "optim.lr": 3e-3, "optim.warmup": 0,
               "memory.mixed_precision": "false", "data.val_fraction": 0}
# The settings of a run without the key. DATA stands for the folder of `data`.
BASES = {
    "sedd": {**THREE_STEPS, "data.file": "DATA/p.fasta", "training.batch_size": 4,
             "model.hidden_size": 16, "model.n_blocks": 1, "model.n_heads": 2,
             "model.cond_dim": 8, "model.dropout": 0, "data.max_length": 50,
             "monitoring.n_samples": 0},
    "dpo": {**THREE_STEPS, **RANDOM, "model.base_model_name": "random", "training.batch_size": 3,
            "data.demo_structures": 3, "data.demo_pairs": 3},
    "mpnn": {**THREE_STEPS, **RANDOM, "data.structures": "DATA/structures",
             "data.cache": "DATA/structures.pt", "training.residues_per_batch": 100,
             "optim.decay": "none", "model.dropout": 0}}
DROP = None     # a value: the key is left out


@dataclass
class Left:
    """What a run has left."""
    folder: Path
    out: str
    rows: list
    calls: int      # of modules of the network

    def column(self, name):
        return [row[name] for row in self.rows if name in row]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of what the rows read."""
    folder = tmp_path_factory.mktemp("data")
    write_proteins(folder / "p.fasta")
    text = (folder / "p.fasta").read_text()
    (folder / "half.fasta").write_text(text[:text.index(">p120")])
    write_checkpoint(folder / "sedd.pt")
    write_binding(folder)
    write_pairs(folder, 14)
    entries = json.loads((folder / "pairs.json").read_text())
    (folder / "some.json").write_text(json.dumps(entries[:4]))
    for entry in entries:
        entry["unpreferred_seq"] = entry["preferred_seq"][:5] + "GGG" + entry["preferred_seq"][8:]
    (folder / "few.json").write_text(json.dumps(entries))
    lines = write_table(folder).read_text().splitlines()
    for name, native in (("s0", "10"), ("s1", "0")):      # a value of the wild type
        lines.append(f"{name}.pdb,WT,{native}")
    (folder / "table.csv").write_text("\n".join(
        [f"{lines[0]},other", *(f"{line},{number % 7}" for number, line in enumerate(lines[1:]))]))
    torch.save(to_checkpoint(random_proteinmpnn(7, **SIZES)), folder / "base.pt")
    write_structures(folder / "structures")
    few = folder / "few"
    few.mkdir()
    for number in range(3):
        write_structure(few, f"f{number}.pdb", 50 + number, [30])
    return folder


@pytest.fixture(scope="module")
def run_with(data, tmp_path_factory):
    """Function: (script, settings beside those of its base) -> Left. Runs of equal settings are
    done once."""
    done = {}

    def run(script, more):
        settings = {**BASES[script], **more}
        line = [f"{name}={value}".replace("DATA", str(data))
                for name, value in settings.items() if value is not DROP]
        name = " ".join([script, *line])
        if name not in done:
            folder = tmp_path_factory.mktemp("run")
            (folder / "c.yaml").write_text("{}")
            config = ["--config", "c.yaml", "--work_dir", "w"]
            ran = run_tool(SCRIPTS[script].main, [*config, *line], folder)
            assert ran.code == 0, ran.text
            text = (folder / "w" / "metrics.jsonl").read_text()
            done[name] = Left(folder / "w", ran.out, list(map(json.loads, text.splitlines())),
                              ran.calls)
        return done[name]

    return run


# ---- what a row may show: functions of (run without the key, run with it) ----

def changes(column):
    return lambda before, after: before.column(column) != after.column(column)


def scales(column, factor):
    def shows(before, after):
        expected = [factor * number for number in before.column(column)]
        return len(expected) > 0 and after.column(column) == pytest.approx(expected)
    return shows


def has(column, *steps):
    """Rows of these steps, or of any, have a column that begins so; those of the run before are
    others, or none."""
    def shows(before, after):
        found, former = (steps_with(column, run) for run in (after, before))
        return found != former and (not steps or found == list(steps))
    return shows


def steps_with(column, run):
    return [row["step"] for row in run.rows if any(name.startswith(column) for name in row)]


def writes(pattern, number=1):
    """So many files of this pattern are there, and in the run before another number."""
    def shows(before, after):
        return (len(list(after.folder.glob(pattern))) == number
                != len(list(before.folder.glob(pattern))))
    return shows


def says(words):
    return lambda before, after: (words in " ".join(after.out.split())
                                  and words not in " ".join(before.out.split()))


def samples(before, after):
    path = "samples/step_3.fasta"
    return (before.folder / path).read_text() != (after.folder / path).read_text()


def computes_again(before, after):
    return (after.calls > before.calls
            and after.column("loss") == pytest.approx(before.column("loss")))


LOSS = changes("loss")
VALIDATES = {"data.val_fraction": 0.3}
# key: (value, or all settings of the run with it; what it shows; settings of both runs).
COMMON = {
    "training.accum": (2, scales("ddp/effective_batch_size", 2)),
    "training.micro_batches": (3, scales("ddp/effective_batch_size", 3)),
    "training.log_freq": (2, has("loss", 2, 3)),
    "training.snapshot_minutes": (
        1e-9, writes("checkpoints/last-*.pt", 2), {"training.keep_last": 3}),
    "training.keep_last": (3, writes("checkpoints/last*.pt", 3), {"training.snapshot_freq": 1}),
    "training.patience": (1, has("loss", 1, 2), {**VALIDATES, "training.eval_freq": 1,
                                                 "optim.lr": 0}),
    "training.profile": ("2:2", writes("profile/*2-2*")),
    "training.seed": (1, LOSS),
    "training.n_iters": (2, has("loss", 1, 2)),
    "training.eval_freq": (2, has("val/loss", 2, 3), VALIDATES),
    "training.snapshot_freq": (1, writes("checkpoints/last-1.pt")),
    "optim.name": ("muon", LOSS),
    "optim.decay": ("linear", changes("lr")),
    "optim.decay_steps": (1, changes("lr"), {"optim.decay": "linear"}),
    "optim.min_lr": (1e-3, changes("lr"), {"optim.decay": "linear"}),
    "optim.grad_clip": (1e-3, LOSS, {"optim.eps": 1e-2}),
    "optim.betas": ("[0.5,0.5]", LOSS),
    "optim.eps": (1, LOSS),
    "optim.weight_decay": (10, LOSS),
    "optim.lr": (1e-2, LOSS),
    "optim.warmup": (3, changes("lr")),
    "memory.mixed_precision": ("bfloat16", LOSS),
    "memory.max_memory_per_gpu": (0.5, says("max_memory_per_gpu 0.5 has no effect on cpu")),
    "model.dropout": (0.5, LOSS),
    "data.val_fraction": (0.3, has("val/loss")),
    "monitoring.log_gradients": ("true", has("gradients/", 1, 2, 3)),
    "monitoring.log_weights": ("true", has("weights/", 1, 2, 3))}
GEOMETRIC = {"noise.type": "geometric"}
SIZES_OF_FILE = {f"model.{name}": value for name, value in SEDD_SIZES.items()}
SAMPLES = {"monitoring.n_samples": 2, "monitoring.sample_steps": 2}
FROM_FILE = {**dict.fromkeys(RANDOM), "model.base_model_name": "DATA/base.pt"}
ON_PAIRS = {"data.train_data": "DATA/pairs.json"}
ON_FEW = {"data.train_data": "DATA/few.json"}     # pairs that differ at A6 to A8 alone
ON_TABLE = {"data.train_data": "DATA/table.csv", "loss.unit": "table", "table.measured": "ddg",
            "table.better": "lower", "training.batch_size": 2}
KEYS = {
    "sedd": {
        **COMMON,
        "optim.base_global_batch": (8, scales("lr", 0.5), {"optim.scale": "linear",
                                                           "optim.base_global_batch": 4}),
        "optim.scale": ("linear", scales("lr", 2), {"optim.base_global_batch": 2}),
        "training.batch_size": (8, scales("ddp/effective_batch_size", 2)),
        "training.tokens_per_batch": (
            {"training.batch_size": "null", "training.tokens_per_batch": 100},
            scales("ddp/effective_batch_size", 25)),
        "training.num_epochs": (
            {"training.n_iters": "null", "training.num_epochs": 1, "training.batch_size": 120},
            has("loss", 1, 2)),
        "training.eval_samples": (4, changes("val/loss"), VALIDATES),
        "training.init_from": ("DATA/sedd.pt", LOSS, SIZES_OF_FILE),
        "optim.ema": (0.1, changes("val/loss"), VALIDATES),
        "model.hidden_size": (24, LOSS),
        "model.n_blocks": (2, LOSS),
        "model.n_heads": (1, LOSS),
        "model.cond_dim": (4, LOSS),
        "model.parameterization": ("subs", LOSS),
        "model.init_logits": (3, LOSS),
        "loss.reduction": ("sequence", LOSS),
        "noise.type": ("geometric", LOSS),
        "noise.eps": (1e-2, LOSS),
        "noise.sigma_min": (1e-2, LOSS, GEOMETRIC),
        "noise.sigma_max": (5, LOSS, GEOMETRIC),
        "graph.type": ("uniform", LOSS),
        "data.file": ("DATA/half.fasta", LOSS),
        "data.max_length": (20, changes("seen/residues")),
        "data.long": ("drop", changes("seen/residues"), {"data.max_length": 40}),
        "data.min_length": (40, changes("seen/residues")),
        "data.demo_proteins": ({"data.file": DROP, "data.demo_proteins": 50}, LOSS),
        "memory.gradient_checkpointing": ("true", computes_again),
        "monitoring.sample_frequency": (2, writes("samples/step_2.fasta"), SAMPLES),
        "monitoring.n_samples": (2, writes("samples/step_3.fasta")),
        "monitoring.sample_steps": (5, samples, SAMPLES),
        "monitoring.matmul_tflops": (1e-3, has("mfu", 1, 2, 3))},
    "dpo": {
        **COMMON,
        "optim.scale": ("linear", scales("lr", 3), {"optim.base_global_batch": 1}),
        "optim.base_global_batch": (6, scales("lr", 0.5), {
            "optim.scale": "linear", "optim.base_global_batch": 3}),
        "training.patience": (1, has("loss", 1, 2, 3), {
            **VALIDATES, "training.eval_freq": 3, "training.n_iters": 6, "optim.lr": 0}),
        "training.eval_freq": (2, has("val/loss", 0, 2, 3), VALIDATES),
        "training.batch_size": (1, scales("ddp/effective_batch_size", 1 / 3)),
        "training.num_epochs": ({"training.n_iters": DROP, "training.num_epochs": 2},
                                has("loss", 1, 2, 3, 4, 5, 6)),
        "model.base_model_name": (FROM_FILE, LOSS, ON_PAIRS),
        "model.base_model_dir": (
            {**FROM_FILE, "model.base_model_dir": "DATA", "model.base_model_name": "base"}, LOSS,
            ON_PAIRS),
        "model.random.hidden_size": (8, LOSS),
        "model.random.n_encoder": (2, LOSS),
        "model.random.n_decoder": (2, LOSS),
        "model.random.num_edges": (4, LOSS),
        "loss.name": ("ipo", LOSS),
        "loss.reference": ("unfolded", LOSS),
        "loss.beta": (1, LOSS),
        "loss.label_smoothing": (0.3, LOSS, {"loss.name": "robust"}),
        "loss.gamma": (2, LOSS, {"loss.name": "simpo"}),
        "loss.sft": (1, LOSS),
        "loss.diversity_lambda": (1, LOSS),
        "loss.native_kl": (1, LOSS),
        "loss.temperature": (0.5, LOSS),
        "loss.order": ("arange", LOSS),
        "loss.n_orders": (2, LOSS),
        "loss.share_order": ("true", LOSS),
        "loss.unit": (ON_TABLE, LOSS),
        "table.measured": ("other", LOSS, ON_TABLE),
        "table.better": ("higher", LOSS, ON_TABLE),
        "table.wild_type": (0, LOSS, ON_TABLE),
        "table.margin": (5, LOSS, ON_TABLE),
        "table.weigh": ("true", LOSS, ON_TABLE),
        "table.most_pairs": (5, LOSS, ON_TABLE),
        "table.most_several": (2, LOSS, ON_TABLE),
        "data.train_data": ("DATA/pairs.json", LOSS),
        "data.val_data": ("DATA/some.json", has("val/loss"), ON_PAIRS),
        "data.max_length": (14, says("left out"), {
            **ON_TABLE, "data.train_data": "[DATA/table.csv,DATA/binding.csv]"}),
        "data.mutable_positions": ("A5 A6 A7 A8", LOSS, ON_FEW),
        "data.mutable_ranges": ("A5-A8", LOSS, ON_FEW),
        "data.demo_structures": (4, LOSS),
        "data.demo_pairs": (4, LOSS),
        "monitoring.fall": (0, says("have become less likely"), {
            **VALIDATES, "monitoring.fall": 100, "optim.lr": 0.05})},
    "mpnn": {
        **COMMON,
        "optim.scale": ("linear", scales("lr", 2), {"optim.base_global_batch": 50}),
        "optim.base_global_batch": (200, scales("lr", 0.5), {
            "optim.scale": "linear", "optim.base_global_batch": 100}),
        "training.residues_per_batch": (200, scales("ddp/effective_batch_size", 2)),
        "training.num_epochs": (
            {"training.n_iters": DROP, "training.num_epochs": 1,
             "training.residues_per_batch": 400}, has("loss", 1, 2)),
        "training.noise": (0.5, LOSS),
        "model.base_model_name": (FROM_FILE, LOSS),
        "model.base_model_dir": (
            {**FROM_FILE, "model.base_model_dir": "DATA", "model.base_model_name": "base"}, LOSS),
        "model.random.hidden_size": (8, LOSS),
        "model.random.n_encoder": (2, LOSS),
        "model.random.n_decoder": (2, LOSS),
        "model.random.num_edges": (4, LOSS),
        "loss.label_smoothing": (0.3, LOSS),
        "loss.kl": (1, has("kl", 1, 2, 3), FROM_FILE),
        "data.structures": ({"data.structures": "DATA/few", "data.cache": "DATA/few.pt"}, LOSS),
        "data.val_structures": (
            {"data.val_structures": "DATA/few", "data.cache": "DATA/val.pt"}, has("val/loss")),
        "data.other_structures": (
            {"data.other_structures": "DATA/few", "data.cache": "DATA/other.pt"},
            has("other/loss")),
        "data.max_length": (40, LOSS),
        "data.identity": ({"data.identity": 0.2, "data.cache": "DATA/identity.pt"},
                          changes("val/loss"), VALIDATES),
        "data.homologous": (
            {"data.homologous": 0.1, "data.cache": "DATA/homologous.pt"}, LOSS),
        "data.cache": (DROP, lambda before, after: (
            after.folder.with_name("w.structures.pt").exists()))}}

# {(script, key) whose effect needs more than two runs of one process: FILE: its test}
ELSEWHERE = {
    ("dpo", "table.group"):
        "tests/dpo/test_tables.py: "
        "test_proteins_of_a_group_are_on_one_side_whatever_their_sequences",
    ("dpo", "table.copies"):
        "tests/dpo/test_tables.py: "
        "test_a_mutation_is_put_into_all_copies_of_its_chain_if_asked_for",
    ("dpo", "data.identity"):
        "tests/dpo/test_tables.py: "
        "test_relatives_of_less_identity_than_asked_for_may_be_on_both_sides"}
HERE = set()    # (script, key or option) whose effect a test below shows


def shows(*keys, scripts=tuple(KEYS)):
    """A test of each of these scripts, which shows the effect of keys that need more than a row."""
    def note(test):
        HERE.update((script, key) for script in scripts for key in keys)
        return pytest.mark.parametrize("script", scripts)(test)
    return note


def shown_for(script):
    """Keys and options of a script that a test shows, other than by a row."""
    return {key for its, key in {*ELSEWHERE, *HERE} if its == script}


def row_of(table, key):
    """(settings of the run without a key, of the run with it, what shall be seen)."""
    value, effect, *common = table[key]
    before = dict(common[0]) if common else {}
    after = {**before, **(value if isinstance(value, dict) else {key: value})}
    return before, after, effect


@pytest.mark.parametrize("script, key", [(script, key) for script in KEYS for key in KEYS[script]])
def test_a_key_has_its_effect(script, key, run_with):
    before, after, effect = row_of(KEYS[script], key)
    plain = run_with(script, before)
    changed = run_with(script, after)
    assert effect(plain, changed), f"{plain.out}\n{changed.out}\n{plain.rows}\n{changed.rows}"


@pytest.mark.parametrize("script", KEYS)
def test_each_key_of_a_script_has_an_effect_in_a_test(script):
    documented = set(names_of_keys(SCRIPTS[script].Config))
    shown = {key for key in shown_for(script) if not key.startswith("--")} | KEYS[script].keys()
    assert documented - shown == set(), "keys without a row"
    assert shown - documented == set(), "rows without a key"


# ---- keys that need more than a row ----

ALL = pytest.mark.parametrize("script", KEYS)


@pytest.fixture
def line_of(data):
    """Function: (script, settings) -> words of the command line of a run."""
    def line(script, **more):
        settings = {**BASES[script], **{name.replace("__", "."): x for name, x in more.items()}}
        return [f"{name}={value}".replace("DATA", str(data)) for name, value in settings.items()]

    return line


@pytest.fixture
def start(line_of, tmp_path):
    """Function: (script, settings, words) -> Ran, in the folder tmp_path, of run folder w."""
    (tmp_path / "c.yaml").write_text("{}")

    def run(script, *words, **more):
        usual = ["--config", "c.yaml", "--work_dir", "w"]
        return run_tool(SCRIPTS[script].main, [*usual, *words, *line_of(script, **more)], tmp_path)

    return run


@shows("monitoring.tensorboard", "monitoring.wandb")
def test_rows_are_sent_to_trackers(script, start, monkeypatch):
    """To modules that take the place of theirs: tests/training/test_trackers.py has the real ones.
    """
    writer = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        types.SimpleNamespace(SummaryWriter=lambda *_, **__: writer))
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    ran = start(script, monitoring__tensorboard="true", monitoring__wandb="{project: mine}")
    assert ran.code == 0 and "ATTENTION" not in ran.out, ran.text
    steps = [call.args[2] for call in writer.add_scalar.call_args_list if call.args[0] == "loss"]
    assert steps == [1, 2, 3]
    assert wandb.init.call_args.kwargs["project"] == "mine"
    assert wandb.init.return_value.log.call_count == len(steps)


@shows("monitoring.watchdog_minutes")
def test_the_limit_without_progress_is_set(script, start, monkeypatch):
    limits = []
    monkeypatch.setattr("faulthandler.dump_traceback_later",
                        lambda seconds, **_: limits.append(seconds))
    assert start(script, monitoring__watchdog_minutes=0).code == 0 and not limits
    assert start(script, "--fresh", monitoring__watchdog_minutes=9).code == 0
    assert min(limits) == 9 * 60


@shows("training.max_bad_steps")
def test_more_bad_steps_than_allowed_end_a_run(script, start, monkeypatch):
    real = SCRIPTS[script].micro_batch_loss
    factors = []

    def first_steps_are_bad(*arguments):
        loss, sums = real(*arguments)
        return loss * factors.pop(0), sums

    monkeypatch.setattr(SCRIPTS[script], "micro_batch_loss", first_steps_are_bad)
    for most, code in ((2, 0), (1, 1)):
        factors[:] = [float("nan"), float("nan"), 1.0]
        ran = start(script, "--fresh", training__max_bad_steps=most)
        assert ran.code == code, ran.text


@shows("training.stop_signals")
def test_a_signal_of_the_list_stops_a_run(script, start, tmp_path, monkeypatch):
    real = SCRIPTS[script].exchange

    def signalled(*arguments):
        signal.raise_signal(signal.SIGUSR2)
        return real(*arguments)

    monkeypatch.setattr(SCRIPTS[script], "exchange", signalled)
    ran = start(script, training__stop_signals="[SIGUSR2]")
    assert ran.code == 75, ran.text
    assert read_status(tmp_path / "w")["step"] < 3


@shows("ddp.find_unused_parameters", "ddp.gradient_as_bucket_view")
def test_options_of_ddp_reach_it(script, start, monkeypatch):
    spy = mock.Mock(wraps=SCRIPTS[script].wrap_ddp)
    monkeypatch.setattr(SCRIPTS[script], "wrap_ddp", spy)
    given = {"find_unused_parameters": True, "gradient_as_bucket_view": False}
    start(script, **{f"ddp__{name}": str(value).lower() for name, value in given.items()})
    assert spy.call_args.kwargs == given


@shows("training.num_workers")
def test_as_many_processes_prepare_batches_as_asked_for(script, start, tmp_path, monkeypatch):
    def start_worker(worker_id, signals):
        (tmp_path / f"worker_{worker_id}_of_{os.getppid()}").touch()

    monkeypatch.setattr("training.loop.start_worker", start_worker)
    assert start(script, training__n_iters=1).code == 0
    ran = start(script, "--fresh", training__n_iters=1, training__num_workers=2)
    assert ran.code == 0, ran.text
    found = sorted(path.name for path in tmp_path.glob("worker_*"))
    assert found == [f"worker_{number}_of_{os.getpid()}" for number in (0, 1)]


@shows("monitoring.check_sync_every")
def test_weights_are_compared_as_often_as_asked_for(script, start, monkeypatch):
    """How, tests/training/test_loop.py shows on three ranks."""
    check = mock.Mock()
    monkeypatch.setattr("training.loop.check_in_sync", check)
    for every, times in ((0, 0), (3, 1), (2, 2), (1, 3)):     # and at the end
        check.reset_mock()
        ran = start(script, "--fresh", monitoring__check_sync_every=every)
        assert ran.code == 0 and check.call_count == times, ran.text


@shows("memory.compile", scripts=["sedd"])
def test_blocks_are_compiled_where_this_is_asked_for(script, start, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **_: compiled.append(block))
    assert start(script, memory__compile="true", model__n_blocks=2).code == 0
    assert len(compiled) == 2


@shows("data.most_broken", scripts=["mpnn"])
def test_more_files_that_cannot_be_read_than_allowed_are_refused(script, start, data, tmp_path):
    folder = tmp_path / "some"
    folder.mkdir()
    for path in (data / "few").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "broken.pdb").write_text("ATOM\n")
    assert start(script, data__structures=folder, data__cache=tmp_path / "c.pt").code == 2
    ran = start(script, data__structures=folder, data__cache=tmp_path / "c.pt",
                data__most_broken=0.5)
    assert ran.code == 0, ran.text


def test_the_config_for_real_proteins_on_cpus_trains(data, tmp_path):
    """As it is but for its length, and samples."""
    ran = run_tool(SCRIPTS["sedd"].main, [
        "--config", ROOT / "configs" / "sedd_cpu.yaml", "--data", data / "p.fasta",
        "training.n_iters=2", "training.log_freq=1", "monitoring.n_samples=0"], tmp_path)
    assert ran.code == 0, ran.text
    folder = tmp_path / "runs" / "sedd_cpu"
    first, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    config = yaml.safe_load((ROOT / "configs" / "sedd_cpu.yaml").read_text())
    assert first["ddp/effective_batch_size"] == config["training"]["tokens_per_batch"]
    assert last["val/loss"] < 20 * 0.9


# ---- options ----

@pytest.fixture
def assert_written(line_of, tmp_path):
    """Function: (script, words, folder): with these words a run of a step is written there."""
    def run(script, words, folder):
        (tmp_path / "mine.yaml").write_text("training: {n_iters: 1}\n")
        line = [word for word in line_of(script) if not word.startswith("training.n_iters")]
        ran = run_tool(SCRIPTS[script].main, ["--config", "mine.yaml", *line, *words], tmp_path)
        assert ran.code == 0, ran.text
        assert len((tmp_path / folder / "metrics.jsonl").read_text().splitlines()) == 1

    return run


@shows("--config", "--work_dir")
@pytest.mark.parametrize("words, folder", [([], "runs/mine"), (["--work_dir", "a"], "a")])
def test_a_run_is_named_by_its_config_or_by_an_option(script, words, folder, assert_written):
    assert_written(script, words, folder)


@shows("--output_dir", scripts=["dpo", "mpnn"])
def test_a_run_is_named_as_the_original_names_it(script, assert_written):
    assert_written(script, ["--output_dir", "a"], "a")


@shows("--resume", "--fresh")
def test_a_run_goes_on_or_is_renamed(script, start, tmp_path):
    assert start(script).code == 0
    last = tmp_path / "w" / "checkpoints" / "last.pt"
    ran = start(script, "--work_dir", "other", "--resume", last, training__n_iters=5)
    assert ran.code == 0, ran.text
    rows = (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [4, 5]
    assert start(script, "--fresh", training__n_iters=1).code == 0
    assert load_checkpoint(str(last))["step"] == 1
    assert load_checkpoint(str(tmp_path / "w.old1" / "checkpoints" / "last.pt"))["step"] == 3


@shows("--plan")
def test_a_plan_is_printed_and_nothing_is_written(script, start):
    ran = start(script, "--plan", "1,2")
    rows = re.findall(r"(?m)^ +([12]) ", ran.out)
    assert ran.code == 0 and ran.files == {} and rows[:2] == ["1", "2"], ran.text


@shows("--device", "--backend")
def test_device_or_backend_are_taken(script, start):
    ran = start(script, "--device", "cpu", "--backend", "gloo")
    assert ran.code == 0 and "asked for device cpu, backend gloo" in " ".join(ran.out.split())


@shows("--ranks", "--init_timeout")
@pytest.mark.parametrize("words", ["--ranks 2", "--init_timeout 0"])
def test_a_wish_that_the_start_does_not_meet_is_refused(script, words, line_of, tmp_path):
    (tmp_path / "c.yaml").write_text("{}")
    line = ["--config", "c.yaml", "--work_dir", "w", *words.split(), *line_of(script)]
    name, value = words.removeprefix("--").split()
    assert_refused(SCRIPTS[script].main, line, f"{name} {value}", tmp_path)


@shows("--ipex")
def test_intels_extension_is_tried_where_it_is_asked_for(script, start, monkeypatch):
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)     # not installed
    assert "IPEX" not in start(script).out
    assert "IPEX not used" in start(script, "--fresh", "--ipex", "on").out


@shows("--no_cuda", "--base_model_config_dir", scripts=["dpo"])
def test_options_of_the_original_are_taken(script, start):
    ran = start(script, "--no_cuda", "--base_model_config_dir", "x")
    assert "asked for device cpu" in ran.out and "--base_model_config_dir x is ignored" in ran.out


@shows("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port")
def test_a_command_starts_the_ranks_it_is_asked_for(script, start, monkeypatch):
    """As tests/training/test_launch.py starts them."""
    run_ranks = mock.Mock(return_value=7)
    monkeypatch.setattr("training.launch.run_ranks", run_ranks)
    words = "--nproc_per_node 3 --nnodes 2 --node_rank 1 --master_addr n1 --master_port 4711"
    ran = start(script, *words.split(), "--init_timeout", "9")
    assert ran.code == 7, ran.text
    assert run_ranks.call_args.args[1:] == (3, 2, 1, "n1", 4711, 9)


def flags_of(script):
    """[(option, the key that it sets)]"""
    found = []
    for name, field in key_fields(SCRIPTS[script].Config).items():
        flags = field.metadata.get("flag") or ()
        found += [(flag, name) for flag in ([flags] if isinstance(flags, str) else flags)]
    return found


WHOLE_NUMBERS = ("training.num_workers", "training.batch_size", "training.num_epochs",
                 "data.max_length")


@pytest.mark.parametrize("script, flag, key", [
    (script, flag, key) for script in KEYS for flag, key in flags_of(script)])
def test_an_option_sets_its_key(script, flag, key, monkeypatch, tmp_path):
    module = SCRIPTS[script]
    monkeypatch.setattr(module, "check_config", lambda *_, **__: None)   # it is of no whole run
    (tmp_path / "c.yaml").write_text("{}")
    value = "7" if key in WHOLE_NUMBERS else "0.25"
    if key == "table.better":
        value = "higher"
    line = ["--config", str(tmp_path / "c.yaml")]
    if script == "sedd":
        line.append("data.demo_proteins=50")     # it asks for some data
    _, by_option = module.read_arguments([*line, flag, value])
    _, by_key = module.read_arguments([*line, f"{key}={value}"])
    assert by_option == by_key != module.Config()


@ALL
def test_each_option_of_a_script_has_an_effect_in_a_test(script):
    options = options_of(SCRIPTS[script].main)
    shown = {key for key in shown_for(script) if key.startswith("--")}
    assert shown - options == set(), "tests of what is no option"
    assert options - shown - {flag for flag, _ in flags_of(script)} == set()


def options_of(main):
    """The options that --help lists."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help"])
    head = text.getvalue().partition("\nkeys of the config")[0].partition("options:")[2]
    return set(re.findall(r"--\w+", head)) - {"--help"}


@pytest.mark.parametrize("name", ELSEWHERE.values())
def test_the_test_that_is_named_for_an_effect_is_there_and_quick(name):
    path, _, test = name.partition(": ")
    text = (ROOT / path).read_text()
    found = re.findall(rf"(?m)((?:^[@ )\]].*\n)*)^def {test}\(", text)
    assert len(found) == 1 and "mark.slow" not in found[0]
    assert "\npytestmark" not in text


# ---- prepare_uniref50.py, pairs_from_scores.py ----

def n_of(meta, side="train"):
    return meta["sets"][side]["proteins"]


def fewer(before, after):
    return 0 < n_of(after) < n_of(before)


PREPARE = {   # option: (its words, what it shows in meta.json)
    "--fasta": (["half.fasta"], fewer),
    "--max_sequences": (["50"], fewer),
    "--min_length": (["40"], fewer),
    "--val_fraction": (["0.5"], lambda before, after: n_of(after, "val") > n_of(before, "val")),
    "--seed": (["1"], lambda before, after: (   # another order of the same proteins
        before["sets"]["train"]["files"] != after["sets"]["train"]["files"]
        and n_of(before) == n_of(after)))}


@pytest.mark.parametrize("option", PREPARE)
def test_an_option_of_prepare_uniref50_has_its_effect(option, data, tmp_path):
    words, effect = PREPARE[option]
    words = [data / word if word.endswith(".fasta") else word for word in words]
    metas = []
    for name, more in (("before", []), ("after", [option, *words])):
        ran = run_tool(prepare_uniref50.main, [name, "--fasta", data / "p.fasta", *more], tmp_path)
        assert ran.code == 0, ran.text
        metas.append(json.loads((tmp_path / name / "meta.json").read_text()))
    assert effect(*metas)


def weights_of(pairs):
    return [pair.get("weight") for pair in pairs]


def chosen(pairs):
    return [pair["preferred_seq"] for pair in pairs]


PAIRS = {   # option: (its words, what it shows in the pairs)
    "--margin": (["2"], lambda before, after: 0 < len(after) < len(before)),
    "--per_structure": (["1"], lambda before, after: 1 == len(after) < len(before)),
    "--lower_is_better": ([], lambda before, after: chosen(after) != chosen(before)),
    "--score": (["other"], lambda before, after: chosen(after) != chosen(before)),
    "--weights": ([], lambda before, after: weights_of(after) != weights_of(before))}


@pytest.mark.parametrize("option", PAIRS)
def test_an_option_of_pairs_from_scores_has_its_effect(option, tmp_path):
    words, effect = PAIRS[option]
    (tmp_path / "x.pdb").write_text("")
    lines = [f"x.pdb,A{letter},{score},{score % 3},A\n" for score, letter in enumerate("CDEF")]
    (tmp_path / "t.csv").write_text("pdb,sequence,score,other,chain\n" + "".join(lines))
    found = []
    for name, more in (("before.json", []), ("after.json", [option, *words])):
        ran = run_tool(pairs_from_scores.main, ["t.csv", name, *more], tmp_path)
        assert ran.code == 0, ran.text
        found.append(json.loads((tmp_path / name).read_text()))
    assert effect(*found)


@pytest.mark.parametrize("script, table", [(prepare_uniref50, PREPARE), (pairs_from_scores, PAIRS)])
def test_each_option_of_a_tool_has_a_row(script, table):
    assert options_of(script.main) == table.keys()
