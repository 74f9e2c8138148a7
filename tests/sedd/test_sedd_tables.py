"""sedd/tables.py: SEDD on tables of mutations: all variants of a protein from few rows."""
import numpy as np
import pytest
import torch

from ddp_setup import Ddp, load_checkpoint
from dpo.reference import Reference
from dpo.scorer import Base, load
from dpo.tables import VariantTable
from proteins.letters import AMINO_ACIDS, decode, encode
from proteins.mutations import protein_of_sequence
from sedd.kind import SeddKind
from sedd.tables import AT_ONCE, TableScorer, deal
from sedd.variants import score_proteins
from sedd.weights import load_sedd
from mpnn_cases import Atoms
from sedd_cases import seeded, write_checkpoint
from test_sedd_dpo import moved, run, settings
from table_runs import check_any_number_of_ranks, gradients_on_tables
from train_dpo_ddp import (describe_plan, micro_batch_loss, preference_loss, train_apart)
from training_runs import (  # noqa: F401 (the fixture one_thread)
    assert_refused, one_thread, rows, same_run)

TABLE = {"loss.unit": "table", "table.measured": "ddg", "table.better": "lower",
         "table.wild_type": "null", "data.val_fraction": 0, "estimator.samples": 8,
         "estimator.masked": 0.2, "training.batch_size": 2}


def config_of(folder, **more):
    write_checkpoint(folder / "base.pt")
    return settings(folder, **{**TABLE, **more})


def made_tables():
    """Of four lengths, some variants of several mutations, two without a value of the wild type."""
    draw = np.random.default_rng(0)
    tables = []
    for number, length in enumerate((16, 21, 24, 30)):
        text = "".join(draw.choice(list(AMINO_ACIDS), length))
        letters = encode(text)
        variants = []
        for place in draw.choice(length, 9, replace=False).tolist():
            others = [letter for letter in range(20) if letter != letters[place]]
            variants += [[(place, int(letter))] for letter in draw.choice(others, 2, replace=False)]
        if number % 2:
            variants += [[(1, (int(letters[1]) + 1) % 20), (7, (int(letters[7]) + k) % 20)]
                         for k in (1, 2)]
            variants.append([(place, (int(letters[place]) + 1) % 20) for place in (9, 2, 5)])
        values = draw.normal(size=len(variants) + 1)
        if number % 3 == 0:
            values[-1] = np.nan
        tables.append(VariantTable("made", protein_of_sequence("made", text).complex, variants,
                                   values))
    return tables


def networks(config, tables, ddp=Ddp()):
    """(policy, TableScorer) with other weights than its base."""
    sedd = load_sedd(config.model.base)
    scorer = TableScorer(Base(sedd.model.eval(), "made", more=sedd), tables, config, ddp)
    return moved(sedd.model), scorer


def plain_scores(model, work, table):
    """[score of each variant and of the wild type] at the masks of the given rows, one by one."""
    scores = []
    for variant in table.variants:
        places = {place for place, _ in variant}
        fitting = [row for row in work.rows if masks_of(row) >= places
                   and (len(variant) == 1 or masks_of(row) == places)]
        row = max(fitting, key=lambda row: len(masks_of(row)))
        share = torch.tensor([len(masks_of(row)) / len(row)])
        log_score = model(row[None], -torch.log(1 - share), None, None)[0, :, :20]
        log_p = log_score - log_score.logsumexp(-1, keepdim=True)
        scores.append(sum(log_p[place, letter] - log_p[place, table.complex.S[place]]
                          for place, letter in variant))
    return [*scores, torch.zeros(())]


def masks_of(row):
    return set((row == 21).nonzero()[:, 0].tolist())


def plain_loss(policy, batch, scorer, config, tables, indices):
    """Sum of weight x loss over the pairs of a batch, one by one."""
    total = 0.0
    start = 0
    for work, index in zip(batch["works"], indices):
        table = tables[index]
        of_policy = plain_scores(policy, work, table)
        with torch.no_grad():
            of_base = plain_scores(scorer.base.model, work, table)
        end = start + len(table.values)
        for (better, worse), weight in zip(batch["couples"].tolist(), batch["pair_weight"]):
            if start <= better < end:
                numbers = [side[k - start][None] for side in (of_policy, of_base)
                           for k in (better, worse)]
                total = total + weight * preference_loss(*numbers, None, config.loss)[0]
        start = end
    return total


# ---- the loss ----

def test_the_loss_and_its_gradient_are_those_of_the_pairs_one_by_one(tmp_path):
    config = config_of(tmp_path, table__margin=0.2)
    tables = made_tables()[:2]
    policy, scorer = networks(config, tables)
    batch = scorer.batch_maker(tables)([0, 1], epoch=0)
    assert 1 < len(batch["works"][0].rows) < 9     # several places in a row
    loss, _ = micro_batch_loss(policy, batch, Reference(scorer), config, Ddp(), torch.float32)
    expected = plain_loss(policy, batch, scorer, config, tables, [0, 1])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    parameters = [*policy.parameters()]
    for a, b in zip(torch.autograd.grad(loss, parameters),
                    torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.norm()) + 1e-9)


def test_with_one_place_in_a_row_scores_are_those_of_score_mutations(tmp_path):
    config = config_of(tmp_path, estimator__masked=0.01)
    tables = made_tables()[:2]
    policy, scorer = networks(config, tables)
    policy.eval()
    batch = scorer.prepare(scorer.batch_maker(tables)([0, 1], epoch=0))
    sedd = scorer.sedd._replace(model=policy)
    expected = score_proteins(sedd, [decode(table.complex.S) for table in tables],
                              [table.variants for table in tables])
    for found, scores in zip(scorer.run(policy, batch), expected):
        assert found.scores.tolist() == pytest.approx(scores.tolist(), abs=1e-5)


def test_rows_in_parts_have_the_same_loss_and_gradient(tmp_path, monkeypatch):
    import sedd.tables
    config = config_of(tmp_path)
    tables = made_tables()[3:4]
    policy, scorer = networks(config, tables)
    policy.eval()       # without dropout
    batch = scorer.batch_maker(tables)([0], epoch=0)
    assert batch["works"][0].rows.numel() < AT_ONCE
    found = []
    for at_once in (AT_ONCE, 70):
        monkeypatch.setattr(sedd.tables, "AT_ONCE", at_once)
        loss, _ = micro_batch_loss(policy, batch, Reference(scorer), config, Ddp(), torch.float32)
        found.append([loss.detach(), *torch.autograd.grad(loss, [*policy.parameters()])])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.norm()) + 1e-8)


# ---- masks ----

def test_places_are_dealt_once_into_as_few_groups_as_the_share_allows():
    places = [3, 4, 9, 11, 12, 20, 31]
    groups = deal(places, 3, seeded())
    assert sorted(place for group in groups for place in group) == places
    assert [len(group) for group in groups] == [3, 2, 2]


def test_masks_are_new_in_each_epoch_unless_they_are_fixed(tmp_path):
    tables = made_tables()[:1]
    for fixed in (False, True):
        _, scorer = networks(config_of(tmp_path, estimator__fixed=fixed), tables)
        make = scorer.batch_maker(tables)
        one, same, other = (make([0], epoch=epoch)["works"][0].rows for epoch in (0, 0, 1))
        assert torch.equal(one, same)
        assert torch.equal(one, other) == fixed


# ---- on ranks, runs ----

def gradients_of(ddp, folder, by_definition=False):
    """See gradients_on_tables. By the definition: each pair by itself."""
    tables = made_tables()
    config = settings(folder, **{**TABLE, "table.margin": 0.2, "training.batch_size": 1})
    policy, scorer = networks(config, tables, ddp)
    return gradients_on_tables(policy, scorer, tables, config, ddp,
                               plain_loss if by_definition else None)


@pytest.mark.slow
def test_any_number_of_ranks_makes_the_gradient_of_the_mean_over_pairs(tmp_path):
    write_checkpoint(tmp_path / "base.pt")

    def of_folder(ddp, by_definition):
        return gradients_of(ddp, tmp_path, by_definition)

    check_any_number_of_ranks(of_folder, "test_sedd_tables", "gradients_of(ddp, '.')", tmp_path)


def write_table(folder, name="table.csv", length=24):
    """Write a table of sequences. Low values are of letters at the beginning of the alphabet."""
    draw = np.random.default_rng(1)
    lines = ["sequence,mutation,ddg"]
    for _ in range(4):
        text = "".join(draw.choice(list(AMINO_ACIDS), length))
        for place in (2, 9, 17):
            lines += [f"{text},{text[place]}{place + 1}{letter},{number - 10}"
                      for number, letter in enumerate(AMINO_ACIDS) if letter != text[place]]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def test_training_on_a_table_ranks_its_variants(tmp_path):
    table = write_table(tmp_path)
    run(config_of(tmp_path, data__train_data=table, data__val_data=table, training__accum=1,
                  training__n_iters=15, optim__lr=1e-2), tmp_path / "run")
    before, *_, after = [row["val/spearman"] for row in rows(tmp_path / "run")
                         if "val/spearman" in row]
    assert after > max(before, 0.8)
    assert load_sedd(tmp_path / "run").max_length == 40


def test_a_resumed_run_on_tables_equals_an_uninterrupted_one(tmp_path):
    table = write_table(tmp_path)
    often = dict(data__train_data=table, training__accum=1, table__most_pairs=300,
                 training__snapshot_freq=3)
    run(config_of(tmp_path, training__n_iters=5, **often), tmp_path / "whole")
    run(config_of(tmp_path, training__n_iters=3, **often), tmp_path / "parts")
    run(config_of(tmp_path, training__n_iters=5, **often), tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_training_apart_gives_the_weights_of_a_run_with_a_cross_validation(tmp_path):
    lines = write_table(tmp_path).read_text().splitlines(keepends=True)
    first = lines[1].partition(",")[0]
    (tmp_path / "one.csv").write_text(
        lines[0] + "".join(line for line in lines if line.startswith(first)))
    config = config_of(tmp_path, data__train_data=tmp_path / "one.csv", table__folds=2,
                       training__n_iters=3, training__accum=1, training__batch_size=1,
                       data__val_fraction=0)
    run(config, tmp_path / "run")
    assert "folds/after" in rows(tmp_path / "run")[0]
    base, data = load(SeddKind(), config, Ddp())
    apart = train_apart(base._replace(model=base.model.eval()), data.train[0], config, Ddp())
    expected = load_checkpoint(str(tmp_path / "run" / "checkpoints" / "last.pt"))["model"]
    assert all(torch.equal(value, expected[name]) for name, value in apart.state_dict().items())


def test_of_a_structure_the_mutated_chain_alone_is_seen(tmp_path):
    """Though the table names a context."""
    atoms = Atoms()
    for place, chain in enumerate("AAAABB"):
        atoms.add(chain, 10 + place, "ALA")
    (tmp_path / "two.pdb").write_text(atoms.pdb())
    (tmp_path / "t.csv").write_text("pdb_file,chain,context,mutation,ddg\n"
                                    "two.pdb,B,A,A15K,1\ntwo.pdb,B,A,A15W,2\n")
    config = config_of(tmp_path, data__train_data=tmp_path / "t.csv")
    data = SeddKind().load_pairs(config, SeddKind().load_base(config), lambda: None)
    assert [(len(table.complex), table.variants) for table in data.train] == [
        (2, [[(1, 8)], [(1, 18)]])]


def test_a_protein_that_is_too_long_is_left_out_by_name(tmp_path):
    lines = write_table(tmp_path).read_text() + write_table(
        tmp_path, "long.csv", length=41).read_text().partition("\n")[2]
    (tmp_path / "all.csv").write_text(lines)
    config = config_of(tmp_path, data__train_data=tmp_path / "all.csv")
    data = SeddKind().load_pairs(config, SeddKind().load_base(config), lambda: None)
    assert [table.length for table in data.train] == [24] * 4
    assert "has 41 residues; the model was trained on at most 40" in "\n".join(data.description)


def test_the_plan_says_how_many_positions_a_micro_batch_has(tmp_path):
    plan = describe_plan(config_of(tmp_path), "1,2")
    assert "up to 2 proteins of up to 40 residues, of each up to 8,192 positions" in plan


def test_what_cannot_be_used_is_refused_with_one_message(tmp_path):
    write_checkpoint(tmp_path / "base.pt")
    write_checkpoint(tmp_path / "uniform.pt", graph="uniform")
    write_table(tmp_path)
    write_table(tmp_path, "long.csv", length=41)
    given = "--no_cuda model.kind=sedd --output_dir run data.val_fraction=0 --base "
    unit = " loss.unit=table --measured ddg --better lower table.wild_type=null"
    assert_refused("train_dpo_ddp", [
        (f"{given} uniform.pt --train_data table.csv {unit}", "uniform graph"),
        (f"{given} base.pt --train_data long.csv {unit}", "41 residues", "at most 40"),
        (f"{given} base.pt --train_data table.csv {unit} estimator.samples=4",
         "estimator.samples is 4"),
        (f"{given} base.pt --train_data table.csv estimator.masked=0.2",
         "estimator.masked is 0.2"),
        (f"{given} base.pt {unit}", "data.train_data is not given"),
    ], tmp_path)
