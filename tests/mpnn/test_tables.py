"""dpo/tables.py, mpnn/tables.py: the loss over all pairs of a table's variants is that of each."""
import copy

import numpy as np
import pytest
import torch

from ddp_setup import Ddp
from dpo.reference import Reference
from dpo.scorer import Base, load
from dpo.tables import VariantTable, draw_couples, load_tables
from dpo.validation import Validation
from mpnn.dpo import ProteinMPNNScorer
from mpnn.kind import ProteinMPNNKind
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn.pairs import Pair
from mpnn.tables import SAVES_MEMORY_FROM, TableScorer
from proteins.letters import AMINO_ACIDS, LETTERS
from proteins.mutations import place_all, place_on_sequences
from proteins.structures import read_structure
from test_train_dpo import SMALL, TINY, run, write_pairs
from test_variants import random_complex
from table_runs import check_any_number_of_ranks, gradients_on_tables
from train_dpo_ddp import (Config, micro_batch_loss, objective, preference_loss, train_apart)
from training.config import load_config
from training_runs import (  # noqa: F401 (the fixture one_thread)
    assert_refused, one_thread, rows, same_run, words)

TABLE = {"loss.unit": "table", "table.measured": "ddg", "table.better": "lower"}


def config_of(**more):
    return load_config(Config, None, words({**TINY, **TABLE, "training.batch_size": 2}, **more))


def table_of(complex, variants, wild_type=0.0):
    """A VariantTable with made values."""
    values = np.random.default_rng(len(variants)).normal(size=len(variants) + 1)
    values[-1] = wild_type
    return VariantTable("made", complex, variants, values)


def letters_at(complex, row):
    """All variants of one row."""
    return [[(row, letter)] for letter in range(20) if letter != complex.S[row]]


def small_tables():
    """Of other lengths, one with a context chain and unresolved rows, some variants of several
    mutations, of one without a value of the wild type."""
    one = random_complex(12)
    two = random_complex(16, unresolved=(3, 4), second=5)
    three = random_complex(14)
    four = random_complex(13)
    return [
        table_of(one, letters_at(one, 2)[:5] + letters_at(one, 7)[:3]),
        table_of(two, [*letters_at(two, 8)[:4], [(1, 0), (8, 5)], [(1, 2), (8, 5)],
                       [(0, 1), (5, 2), (9, 3)]]),
        table_of(three, letters_at(three, 0)[:3], wild_type=np.nan),
        table_of(four, [[(2, 3), (4, 6)], [(2, 5), (4, 8)]])]


def networks(config, tables, ddp=Ddp()):
    """(policy, TableScorer) with other weights than its base."""
    (policy, base) = (random_proteinmpnn(k, **SMALL) for k in (2, 1))
    return policy, TableScorer(Base(base.eval(), "random"), tables, config, ddp)


# ---- the loss ----

@pytest.mark.parametrize("reference", ["base", "unfolded"])
@pytest.mark.parametrize("rows_of", [(5,), (2, 9)])
def test_the_loss_and_its_gradient_are_those_of_the_same_pairs_one_by_one(reference, rows_of):
    """All variants of the same residues, so that a pair designs these and no others."""
    complex = random_complex(20)
    draw = np.random.default_rng(0)
    variants = {tuple((row, int(letter)) for row, letter in zip(rows_of, letters))
                for letters in draw.integers(0, 20, (7, len(rows_of)))}
    table = table_of(complex, [list(variant) for variant in sorted(variants)])
    config = config_of(loss__order="arange", loss__reference=reference, table__margin=0.4)
    policy, scorer = networks(config, [table])
    couples, _ = draw_couples(table.values, 0.4, 1000, [0])
    assert 5 < len(couples) < 28
    sequences = []
    for variant in [*table.variants, []]:
        letters = complex.S.copy()
        for row, letter in variant:
            letters[row] = letter
        sequences.append(letters)
    designed = np.isin(np.arange(len(complex)), rows_of)
    pairs = [Pair(complex, sequences[better], sequences[worse], designed)
             for better, worse in couples]
    one_by_one = config_of(loss__order="arange", loss__reference=reference, loss__unit="pair",
                           table__measured="null", table__better="null")
    of_pairs = ProteinMPNNScorer(scorer.base, pairs, one_by_one, Ddp())
    plain = Reference(of_pairs)
    plain.table = plain.compute(pairs)
    batch = scorer.batch_maker([table])([0], epoch=0)
    found = loss_and_gradient(policy, Reference(scorer), batch, config)
    batch = of_pairs.batch_maker(pairs)(range(len(pairs)), epoch=0)
    expected = loss_and_gradient(policy, plain, batch, one_by_one)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.norm()) + 1e-9)


def loss_and_gradient(model, reference, batch, config):
    """(mean loss of a batch, its gradients)."""
    loss, _ = micro_batch_loss(model, batch, reference, config, Ddp(), torch.float32)
    loss = loss / batch["pair_weight"].sum()
    return loss.item(), torch.autograd.grad(loss, [*model.parameters()])


def test_a_long_protein_computed_twice_has_the_same_gradient_from_less_memory(monkeypatch):
    import mpnn.tables
    complex = random_complex(40)
    table = table_of(complex, [letter for row in range(40)
                               for letter in letters_at(complex, row)])
    assert len(complex) < SAVES_MEMORY_FROM
    config = config_of(**{"table.most_pairs": 10})
    policy, scorer = networks(config, [table])
    batch = scorer.batch_maker([table])([0], epoch=0)
    held = []       # of each call, {address: bytes} of what is held for the gradient

    def hold(tensor):
        storage = tensor.untyped_storage()
        held[-1][storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss_and_gradient_counting():
        held.append({})
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            return loss_and_gradient(policy, Reference(scorer), batch, config)

    kept = loss_and_gradient_counting()
    monkeypatch.setattr(mpnn.tables, "SAVES_MEMORY_FROM", 1)
    again = loss_and_gradient_counting()
    assert kept[0] == again[0] and all(map(torch.equal, kept[1], again[1]))
    n_kept, n_again = (sum(sizes.values()) for sizes in held)
    assert n_again < 0.75 * n_kept      # above, if the encoder or the mutations alone save


# ---- pairs ----

def test_pairs_are_all_that_differ_by_the_margin_with_the_better_first():
    couples, differences = draw_couples(np.array([1.0, 3.0, 1.5, np.nan, 2.0]), 1.0, 100, [0])
    assert sorted(map(tuple, couples.tolist())) == [(1, 0), (1, 2), (1, 4), (4, 0)]
    assert dict(zip(map(tuple, couples.tolist()), differences)) == {
        (1, 0): 2.0, (1, 2): 1.5, (1, 4): 1.0, (4, 0): 1.0}


def test_equal_values_are_no_pair_without_a_margin():
    couples, _ = draw_couples(np.array([1.0, 1.0, 2.0]), 0.0, 100, [0])
    assert sorted(map(tuple, couples.tolist())) == [(2, 0), (2, 1)]


def test_of_many_pairs_some_are_drawn_evenly_and_anew_by_the_seed():
    values = np.arange(60.0)
    drawn = [draw_couples(values, 10.0, 500, [seed])[0] for seed in (0, 0, 1)]
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert (values[drawn[0]] @ [1, -1] >= 10).all()
    expected = 500 * (50 * 51 / 2) / (60 * 60 / 2)
    assert len(drawn[0]) == pytest.approx(expected, rel=0.15)


def test_the_wild_type_is_a_variant_only_if_it_has_a_value():
    complex = random_complex(12)
    for value, takes_part in ((0.0, True), (np.nan, False)):
        table = table_of(complex, letters_at(complex, 4), wild_type=value)
        _, scorer = networks(config_of(), [table])
        couples = scorer.batch_maker([table])([0], epoch=0)["couples"]
        assert (couples == len(table.variants)).any() == takes_part


def test_pairs_weighed_by_their_difference_have_the_weight_of_their_protein_in_all():
    complex = random_complex(12)
    table = table_of(complex, letters_at(complex, 4))
    _, scorer = networks(config_of(table__weigh=True), [table])
    batch = scorer.batch_maker([table])([0], epoch=0)
    differences = table.values[batch["couples"]] @ [1, -1]
    expected = table.weight * differences / differences.sum()
    assert batch["pair_weight"].numpy() == pytest.approx(expected, rel=1e-5)
    assert table.weight == pytest.approx((19 / 50)**0.5)


# ---- on ranks, validation, runs ----

def plain_loss(model, batch, scorer, config, tables, indices):
    """Sum of weight x loss over the pairs of a batch, each variant scored by a
    pass of its own."""
    total = 0.0
    start = 0
    for p, index in enumerate(indices):
        table = tables[index]
        orders = batch["orders"][p]
        scores = [[plain_score(m, table, variant, orders) for variant in [*table.variants, []]]
                  for m in (model, scorer.base.model)]
        end = start + len(table.values)
        for (better, worse), weight in zip(batch["couples"].tolist(), batch["pair_weight"]):
            if start <= better < end:
                numbers = [side[k - start][None] for side in scores for k in (better, worse)]
                loss = preference_loss(numbers[0], numbers[1], numbers[2].detach(),
                                       numbers[3].detach(), None, config.loss)
                total = total + weight * loss[0]
        start = end
    return total


def plain_score(model, table, variant, orders):
    """ln p(mutant) - ln p(wild type) of the mutated residues, last in an order, () float64."""
    if not variant:
        return torch.zeros((), dtype=torch.float64)
    complex = table.complex
    X, mask, residue_idx, chain_id = (torch.from_numpy(np.asarray(x))[None] for x in (
        complex.X, complex.mask.astype(np.float32), complex.residue_idx, complex.chain_id))
    encoding = model.encode(model.graph(X, mask, residue_idx, chain_id))
    rows_of = sorted(row for row, _ in variant)
    total = 0.0
    for number, order in enumerate(orders.tolist()):
        last = rows_of if number % 2 == 0 else rows_of[::-1]
        order = [row for row in order if row not in last] + last
        for sign, letters in ((1, dict(variant)), (-1, {})):
            S = torch.from_numpy(complex.S.astype(np.int64))[None].clone()
            for row, letter in letters.items():
                S[0, row] = letter
            log_p = model.decode(encoding, S, torch.tensor(order)[None])[0]
            total = total + sign * log_p[rows_of, S[0, rows_of]].sum()
    return total / len(orders)


def gradients_of(ddp, by_definition=False):
    """See gradients_on_tables. By the definition: each variant scored by itself."""
    tables = small_tables() + [table_of(random_complex(n), [[(1, 4)], [(5, 6)]])
                               for n in (17, 18, 19, 20)]
    config = config_of(loss__n_orders=2, table__margin=0.2)
    policy, scorer = networks(config, tables, ddp)
    return gradients_on_tables(policy, scorer, tables, config, ddp,
                               plain_loss if by_definition else None)


def test_any_number_of_ranks_makes_the_gradient_of_the_mean_over_pairs(tmp_path):
    check_any_number_of_ranks(gradients_of, "test_tables", "gradients_of(ddp)", tmp_path)


def test_validation_is_the_mean_over_proteins_of_the_means_of_their_pairs():
    tables = small_tables()
    config = config_of()
    policy, scorer = networks(config, tables)
    found = Validation(tables, scorer, objective)(policy)
    total = weights = 0.0
    for index, table in enumerate(tables):
        batch = scorer.batch_maker(tables)([index])
        total += plain_loss(policy, batch, scorer, config, tables, [index]).item()
        weights += batch["pair_weight"].sum().item()
    assert found["val/loss"] == pytest.approx(total / weights, rel=1e-4)
    same = Validation(tables, scorer, objective)(copy.deepcopy(scorer.base.model))
    assert same["val/loss"] == pytest.approx(np.log(2), abs=1e-6)


# ---- runs from a file ----

def write_table(folder, name="table.csv", residues=14, shift=0):
    """Write a table of all letters at some rows of three structures, and the structures. Low values
    are of letters at the beginning of the alphabet, so that there is something to learn."""
    write_pairs(folder, residues)
    lines = ["pdb_file,mutation,ddg"]
    for number in range(3):
        structure = read_structure(folder / f"s{number}.pdb")
        chain = structure.chains["A"]
        for row in (2, 9):
            native = LETTERS[chain.S[row]]
            for place, letter in enumerate(AMINO_ACIDS):
                if letter != native:
                    mutation = f"{native}{int(chain.numbers[row]) + shift}{letter}"
                    lines.append(f"s{number}.pdb,{mutation},{place - 10}")
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def config_for(folder, **more):
    return config_of(data__train_data=write_table(folder), table__wild_type="null",
                     data__val_fraction=0, **more)


def test_relatives_are_on_one_side_of_the_validation_of_a_table(tmp_path):
    """Eight families of two, which have half of their letters in common."""
    rng = np.random.default_rng(0)
    lines = ["sequence,mutation,ddg"]
    for _ in range(8):
        text = "".join(rng.choice(list(AMINO_ACIDS), 40))
        other = "".join(rng.choice(list(AMINO_ACIDS), 20)) + text[20:]
        for sequence in (text, other):
            native = sequence[30]
            mutants = [letter for letter in "AW" if letter != native]
            lines += [f"{sequence},{native}31{letter},{ddg}" for ddg, letter in enumerate(mutants)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    config = config_of(data__train_data=tmp_path / "t.csv", data__val_fraction=0.4,
                       table__wild_type=-5)
    data = load_tables(config, place_on_sequences)
    ends = [{tuple(table.complex.S[20:]) for table in side} for side in (data.train, data.val)]
    assert not ends[0] & ends[1]
    assert len(data.train) + len(data.val) == 16 and len(data.val) % 2 == 0


def test_proteins_in_training_and_validation_are_named(tmp_path):
    """s0 is in both tables."""
    lines = write_table(tmp_path).read_text().splitlines(keepends=True)
    (tmp_path / "val.csv").write_text("".join(lines[:30]))
    (tmp_path / "rest.csv").write_text("".join([lines[0], *lines[45:]]))
    notes = {}
    for train in ("table.csv", "rest.csv"):
        config = config_of(data__train_data=tmp_path / train, data__val_data=tmp_path / "val.csv")
        notes[train] = " ".join(load_tables(config, place_all).description)
    assert "1 protein(s) are in training and validation" in notes["table.csv"]
    assert "in training and validation" not in notes["rest.csv"]


def test_a_resumed_run_on_tables_equals_an_uninterrupted_one(tmp_path):
    often = dict(training__eval_freq=3, training__snapshot_freq=3, table__most_pairs=300,
                 training__accum=1, loss__native_kl=0.1)
    run(config_for(tmp_path, training__n_iters=5, **often), tmp_path / "whole")
    run(config_for(tmp_path, training__n_iters=3, **often), tmp_path / "parts")
    run(config_for(tmp_path, training__n_iters=5, **often), tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_training_on_a_table_ranks_its_variants(tmp_path):
    table = write_table(tmp_path)
    run(config_for(tmp_path, data__val_data=table, training__accum=1, training__n_iters=20,
                   optim__lr=1e-2), tmp_path / "run")
    before, *_, after = [row["val/spearman"] for row in rows(tmp_path / "run")
                         if "val/spearman" in row]
    assert after > max(before, 0.8)


@pytest.mark.parametrize("rate, warns", [(1e-6, False), (1e-1, True)])
def test_weights_that_have_moved_far_from_a_trained_base_are_warned_of(
        tmp_path, capsys, rate, warns):
    torch.save(to_checkpoint(random_proteinmpnn(3, **SMALL)), tmp_path / "w.pt")
    settings = {**TABLE, "table.wild_type": "null", "data.train_data": write_table(tmp_path),
                "data.val_fraction": 0, "training.batch_size": 1, "training.n_iters": 4,
                "optim.lr": rate, "model.base_model_dir": tmp_path, "model.base_model_name": "w"}
    run(load_config(Config, None, words(settings)), tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert ("the weights have moved far from the base" in said) == warns


def test_a_table_that_cannot_be_used_is_refused_and_leaves_nothing(tmp_path):
    write_table(tmp_path)
    write_table(tmp_path, "shifted.csv", shift=1)
    (tmp_path / "equal.csv").write_text("pdb_file,mutation,ddg\n" + "".join(
        line.rpartition(",")[0] + ",1\n"
        for line in (tmp_path / "table.csv").read_text().splitlines()[1:]))
    lines = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    (tmp_path / "one.csv").write_text("".join(lines[:20]))
    (tmp_path / "few.csv").write_text("".join(lines[:10]))
    (tmp_path / "unmeasured.csv").write_text("".join(
        line.rpartition(",")[0] + ",\n" if number else line for number, line in enumerate(lines)))
    (tmp_path / "sequence.csv").write_text("sequence,mutation,ddg\nMKTAY,M1A,1\nMKTAY,M1C,2\n")
    base = "model.base_model_name=random data.val_fraction=0 --output_dir new --train_data "
    unit = " loss.unit=table table.measured=ddg table.better=lower"
    assert_refused("train_dpo_ddp", [
        (base + "table.csv loss.unit=table", "table.measured is not given",
         "table.better is not given"),
        (base + "table.csv --measured ddg --better lower", "loss.unit is pair"),
        (base + "table.csv", "loss.unit=table"),
        (base + "table.csv" + unit + " loss.sft=1", "loss.sft is 1.0"),
        (base + "one.csv" + unit + " data.val_fraction=0.1", "data.val_fraction=0 to train"),
        (base + "table.csv" + unit + " data.max_length=9", "data.max_length is 9"),
        (base.partition(" --train_data")[0] + unit, "data.train_data is not given"),
        (base + "table.csv" + unit.replace("ddg", "dG"), "dG"),
        (base + "table.csv" + unit + " table.margin=100", "table.margin 100"),
        (base + "table.csv" + unit + " table.wild_type=1e3", "table.wild_type=null"),
        (base + "table.csv" + unit + " table.folds=1", "table.folds is 1"),
        (base + "table.csv" + unit + " table.folds=4 table.wild_type=null", "3 proteins"),
        (base + "few.csv" + unit + " table.folds=4 table.wild_type=null", "9 variants"),
        (base + "equal.csv" + unit + " table.wild_type=null", "no two variants"),
        (base + "unmeasured.csv" + unit + " table.wild_type=null", "no two variants"),
        (base + "sequence.csv" + unit, "no column pdb_file", "for SEDD"),
        (base + "shifted.csv" + unit, "With every number 1 smaller")], tmp_path)


# ---- cross-validation ----

def config_for_one(folder, **more):
    """Of the first protein alone."""
    lines = write_table(folder).read_text().splitlines(keepends=True)
    (folder / "one.csv").write_text("".join(lines[:39]))
    return config_of(data__train_data=folder / "one.csv", table__wild_type="null",
                     data__val_fraction=0, **{"training__n_iters": 3, "training__batch_size": 1,
                                              "training__accum": 1, **more})


def test_training_apart_gives_the_weights_of_a_run(tmp_path):
    config = config_for_one(tmp_path, loss__native_kl=0.1, optim__warmup=2, optim__decay="linear",
                            model__dropout=0.1)
    run(config, tmp_path / "run")
    base, data = load(ProteinMPNNKind(), config, Ddp())
    base.model.eval()
    apart = train_apart(base, data.train[0], config, Ddp())
    expected = torch.load(tmp_path / "run" / "latest_model.pt", weights_only=True)
    for name, value in apart.state_dict().items():
        assert torch.equal(value, expected["model_state_dict"][name]), name
    assert not torch.equal(value, base.model.state_dict()[name])


def test_a_cross_validation_leaves_the_run_as_it_is(tmp_path):
    for folds in (0, 2):
        run(config_for_one(tmp_path, table__folds=folds), tmp_path / str(folds))
    models = [torch.load(tmp_path / name / "latest_model.pt", weights_only=True)
              for name in ("0", "2")]
    first, other = (model["model_state_dict"] for model in models)
    assert all(torch.equal(first[name], other[name]) for name in first)
    found = [row for row in rows(tmp_path / "2") if "folds/after" in row]
    assert [row["step"] for row in found] == [0] and found[0]["folds/variants"] == 38


def test_a_run_that_shall_stop_leaves_its_cross_validation_for_the_next_start(tmp_path,
                                                                              monkeypatch):
    config = config_for_one(tmp_path, table__folds=2)
    monkeypatch.setenv("DDP_DEADLINE", "1000000001")
    stopped = run(config, tmp_path / "run")
    assert stopped["stopped"] and not (tmp_path / "run" / "metrics.jsonl").exists()
    monkeypatch.delenv("DDP_DEADLINE")
    assert run(config, tmp_path / "run")["step"] == 3
    assert ["folds/after" in row for row in rows(tmp_path / "run")][0]


def test_a_resumed_run_knows_the_cross_validation(tmp_path, capsys):
    config = config_for_one(tmp_path, table__folds=2)
    run(config, tmp_path / "whole")
    said = [line for line in capsys.readouterr().out.splitlines() if "cross-validation" in line]
    assert len(said) == 2 and said[0] == said[1]        # at the start and the end
    before = tmp_path / "whole" / "checkpoints" / "last-1.pt"
    run(config, tmp_path / "resumed", resume=before)
    again = [line for line in capsys.readouterr().out.splitlines() if "cross-validation" in line]
    assert again == said[1:]
