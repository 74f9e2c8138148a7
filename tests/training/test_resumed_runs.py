"""A run that was interrupted ends as one that was not, to the last bit: checkpoints, metrics,
samples."""
from typing import NamedTuple

import pytest
import torch

import prepare_uniref50
from ddp_setup import Ddp, load_checkpoint
from dpo_cases import TABLE, write_binding, write_pairs, write_table
from dpo_cases import TINY as DPO
from launchers import ROOT, fork_ranks
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import SIZES, write_structures
from mpnn_cases import TINY as MPNN
from sedd_cases import TINY as SEDD
from sedd_cases import write_checkpoint, write_proteins
from training.config import load_config
from training_runs import SCRIPTS, driver, prepare_and_train, rows, same_run, words

OF_STRUCTURES = {**MPNN, "model.dropout": 0.1, "data.structures": "DATA/structures",
                 "data.cache": "DATA/structures.pt"}
RANDOM = {f"model.random.{key}": value for key, value in SIZES.items()}


class Case(NamedTuple):
    """A run, and where it is interrupted."""
    script: str
    settings: dict          # DATA in a value is the folder of `data`
    first: int              # steps of the first start; the second goes on to the end
    steps: int
    then: dict = {}         # settings of the second start alone


SEDD_RUN = {**SEDD, "data.file": "DATA/p.fasta", "training.eval_freq": 3,
            "training.snapshot_freq": 3}
DPO_RUN = {**DPO, "model.dropout": 0.1, "training.eval_freq": 3, "training.snapshot_freq": 3}
OF_FILE = {name: value for name, value in DPO_RUN.items() if "random" not in name
           and name != "model.base_model_name"}
OF_TABLE = {**DPO_RUN, **TABLE, "training.batch_size": 2, "training.accum": 1,
            "table.most_pairs": 300, "loss.native_kl": 0.1}
CASES = {
    "sedd, then with a process that reads": Case(
        "sedd", SEDD_RUN, 3, 6, {"training.num_workers": 1}),
    "sedd, then on a prepared folder": Case("sedd", SEDD_RUN, 3, 6, {"data.file": "DATA/folder"}),
    "sedd from weights, by muon": Case(
        "sedd", {**SEDD_RUN, "optim.name": "muon", "training.init_from": "DATA/sedd.pt"}, 3, 6),
    "dpo on pairs, new orders in each epoch": Case("dpo", DPO_RUN, 3, 7),   # of 5 steps
    "dpo on pairs in fixed orders": Case("dpo", {**DPO_RUN, "loss.order": "fixed"}, 3, 6),
    "dpo on a table": Case("dpo", {
        **OF_TABLE, "data.train_data": "DATA/table.csv", "data.val_data": "DATA/table.csv"}, 3, 5),
    "dpo on tables of stability and binding": Case("dpo", {
        **OF_TABLE, "data.train_data": "[DATA/table.csv,DATA/binding.csv]",
        "data.val_data": "DATA/binding.csv"}, 3, 5),
    "dpo of a CA-only model": Case("dpo", {
        **OF_FILE, "data.train_data": "DATA/pairs.json", "model.base_model_name": "DATA/ca.pt"},
        2, 4),
    "mpnn from scratch": Case("mpnn", {**OF_STRUCTURES, **RANDOM}, 3, 6),
    "mpnn near base weights": Case("mpnn", {
        **OF_STRUCTURES, "model.base_model_name": "DATA/base.pt", "loss.kl": 0.3}, 3, 5)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of what the cases read."""
    folder = tmp_path_factory.mktemp("data")
    write_proteins(folder / "p.fasta")
    prepare_uniref50.main([str(folder / "folder"), "--fasta", str(folder / "p.fasta"),
                           "--val_fraction", "0.1"])
    write_checkpoint(folder / "sedd.pt")
    write_binding(folder)
    write_table(folder)
    write_pairs(folder, 14)
    for name, ca_only in (("base.pt", False), ("ca.pt", True)):
        torch.save(to_checkpoint(random_proteinmpnn(7, ca_only=ca_only, **SIZES)), folder / name)
    write_structures(folder / "structures")
    return folder


def settings_of(case, data, steps, **more):
    settings = {**case.settings, **more, "training.n_iters": steps}
    return [text.replace("DATA", str(data)) for text in words(settings)]


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(name, data, tmp_path):
    case = CASES[name]
    script = SCRIPTS[case.script]

    def run(folder, steps, **more):
        config = load_config(script.Config, None, settings_of(case, data, steps, **more))
        prepare_and_train(script, config, Ddp(), tmp_path / folder)

    run("whole", case.steps)
    run("parts", case.first)
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {case.first + 1}, "loss": 0.0}}\n{{"step": 8, "lo')   # of a kill
    run("parts", case.steps, **case.then)
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert rows(tmp_path / "parts")[-1]["step"] == case.steps


@pytest.mark.parametrize("name", ["sedd, then with a process that reads",
                                  "dpo on pairs, new orders in each epoch", "mpnn from scratch"])
def test_a_run_that_was_killed_goes_on_to_the_last_bit(name, data, tmp_path):
    """On three ranks, which share four micro-batches unevenly. A signal that cannot be caught comes
    in step 5 to all of them."""
    case = CASES[name]
    script = SCRIPTS[case.script].__name__
    more = {"training.micro_batches": 4, "training.snapshot_freq": 3}
    command = ["--config", "c.yaml", *settings_of(case, data, 6, **more)]
    (tmp_path / "c.yaml").write_text("training: {}\n")
    killed = driver(tmp_path, script, """
exchange = script.exchange
def and_die(run, *arguments):
    if run.progress["step"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(run, *arguments)
script.exchange = and_die
""")
    for program, folder, ends_well in ((ROOT / f"{script}.py", "whole", True),
                                       (killed, "parts", False),
                                       (ROOT / f"{script}.py", "parts", True)):
        done = fork_ranks(3, [program, *command, "--work_dir", folder], tmp_path)
        assert (done.returncode == 0) == ends_well, done.text
        if not ends_well:
            last = load_checkpoint(str(tmp_path / folder / "checkpoints" / "last.pt"))
            assert last["step"] == 3
    same_run(tmp_path / "whole", tmp_path / "parts")
