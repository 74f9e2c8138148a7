"""Training on tables of measured mutations: the loss over pairs of variants is that of each pair,
on any number of ranks, in runs."""
import copy
import math

import numpy as np
import pytest
import torch

from ddp_setup import Ddp
from dpo.data import load_data
from dpo.evaluation import METRICS, validate
from dpo.memory import size_of
from dpo.pair_scores import compute_base_scores, native_pairs, whole_natives
from dpo.pairs import Pair
from dpo.plan import Plan
from dpo.reference import FrozenBase
from dpo.variant_scores import VariantPass, correlate_variants, score_by_base
from dpo.variant_sets import VariantSet, draw_pairs, draw_variants, keys_of
from dpo_cases import (
    TABLE,
    config_of,
    run,
    run_of,
    write_binding,
    write_table,
)
from mpnn.base import Base
from mpnn.binding import score_binding
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn.record import find_base, read_record
from mpnn.variants import Scoring, score_alone, variant_order
from mpnn_cases import SIZES, Atoms, backbone, random_complex
from proteins.letters import AMINO_ACIDS, LETTERS, X_ID, decode
from proteins.structures import NAMES, Complex
from train_dpo_ddp import (
    Config,
    MicroBatchDataset,
    loss_of_pairs,
    loss_of_tables,
    main,
    micro_batch_loss,
    preference_loss,
    prepare,
    read_arguments,
)
from training.config import load_config
from training.loop import MicroBatchSampler
from training_runs import assert_refused, gradients, on_ranks, rows, words


def set_of(structure, variants, wild_type=0.0, partners=()):
    """A VariantSet with made values."""
    values = np.random.default_rng(len(variants)).normal(size=len(variants) + 1)
    values[-1] = wild_type
    return VariantSet("made", structure, variants, values, partners)


def set_of_binding(length=11, second=8):
    """A VariantSet of variants in one partner, in the other, and in both. Partner B comes first, so
    that rows alone differ from those in the complex on either side."""
    structure = random_complex(length, second=second).structure
    whole = Complex(structure, ["A", "B"])
    variants = [*letters_at(whole, 4)[:3], *letters_at(whole, length + 2)[:5],
                [(3, 1), (length + 5, 2)], [(length, 3), (2, 5), (length + 2, 6)]]
    return set_of(whole, variants, partners=(Complex(structure, ["B"]), Complex(structure, ["A"])))


def letters_at(structure, row):
    """All variants of one row."""
    return [[(row, letter)] for letter in range(20) if letter != structure.S[row]]


def small_sets():
    """Of other lengths, one with a context chain and unresolved rows, one with an unknown letter,
    some variants of several mutations, of one without a value of the wild type."""
    one = random_complex(12)
    two = random_complex(16, unresolved=(3, 4), second=5)
    three = random_complex(14)
    three.S[6] = X_ID
    four = random_complex(13)
    return [
        set_of(one, letters_at(one, 2)[:5] + letters_at(one, 7)[:3]),
        set_of(two, [*letters_at(two, 8)[:4], [(1, 0), (8, 5)], [(1, 2), (8, 5)],
                     [(0, 1), (5, 2), (9, 3)]]),
        set_of(three, letters_at(three, 0)[:3], wild_type=np.nan),
        set_of(four, [[(2, 3), (4, 6)], [(2, 5), (4, 8)]]),
        set_of_binding()]


def networks(sets):
    """(policy, FrozenBase) with other weights."""
    (policy, base) = (random_proteinmpnn(k, **SIZES) for k in (2, 1))
    return policy, FrozenBase(Base(base, "random", "hash"), sets, torch.device("cpu"))


# ---- the loss ----

def loss_and_gradient(loss_of, model, base, batch, config):
    """(mean loss of a batch, its gradients)."""
    loss, _ = loss_of(model, batch, base, config, Ddp(), torch.float32)
    loss = loss.mean()
    return loss.item(), torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize("reference", ["base", "unfolded"])
@pytest.mark.parametrize("mutated", [(5,), (2, 9)])
def test_the_loss_and_its_gradient_are_those_of_the_same_pairs_one_by_one(reference, mutated):
    """All variants of the same residues, so that a pair designs these and no others."""
    structure = random_complex(20)
    draw = np.random.default_rng(0)
    variants = {tuple((row, int(letter)) for row, letter in zip(mutated, letters))
                for letters in draw.integers(0, 20, (7, len(mutated)))}
    variant_set = set_of(structure, [list(variant) for variant in sorted(variants)])
    config = config_of(loss__order="arange", loss__reference=reference, table__margin=0.4)
    policy, base = networks([variant_set])
    couples = draw_pairs(variant_set.values, 0.4, 1000, [0])
    assert 5 < len(couples) < 28
    sequences = []
    for variant in [*variant_set.variants, []]:
        letters = structure.S.copy()
        for row, letter in variant:
            letters[row] = letter
        sequences.append(letters)
    designed = np.isin(np.arange(len(structure)), mutated)
    pairs = [Pair(structure, sequences[better], sequences[worse], designed)
             for better, worse in couples]
    one_by_one = config_of(loss__order="arange", loss__reference=reference, loss__unit="pair",
                           table__measured="null", table__better="null")
    dataset = MicroBatchDataset(pairs, one_by_one)
    dataset.base_scores = compute_base_scores(base, pairs, one_by_one, "pairs", Ddp())
    batch = MicroBatchDataset([variant_set], config).make_batch([0], epoch=0)
    loss, gradient = loss_and_gradient(loss_of_tables, VariantPass(policy), base, batch, config)
    batch = dataset.make_batch(range(len(pairs)), epoch=0)
    expected, plain = loss_and_gradient(loss_of_pairs, policy, base, batch, one_by_one)
    assert loss == pytest.approx(expected, rel=1e-5)
    for a, b in zip(gradient, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.norm()) + 1e-9)


def test_the_scores_of_residues_alone_are_those_of_the_drawn_variants():
    structure = random_complex(20)
    variants = [variant for row in range(5, 15) for variant in letters_at(structure, row)]
    variant_set = set_of(structure, variants)
    _, base = networks([variant_set])
    config = config_of(loss__reference="unfolded", table__most_pairs=5)
    drawn = draw_variants(variant_set, config, epoch=0)
    expected = np.append(score_alone(base.model, structure, variants), 0.0)[drawn.numbers]
    assert 2 < len(drawn.numbers) < 12 and np.ptp(expected) > 0
    assert score_by_base(base, drawn, config.loss).scores.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("n_orders", [1, 2])
def test_a_score_of_binding_in_training_is_that_of_scoring_in_the_same_orders(n_orders):
    """Of the policy, and of the base weights as the reference; of residues alone it is 0."""
    variant_set = set_of_binding()
    policy, base = networks([variant_set])
    config = config_of(loss__n_orders=n_orders)
    drawn = draw_variants(variant_set, config, epoch=0)

    def in_scoring_order(part):
        return part._replace(orders=torch.cat([variant_order(part.S.shape[1], 3, number)
                                               for number in range(n_orders)]))

    drawn = in_scoring_order(drawn)._replace(
        partners=[in_scoring_order(partner) for partner in drawn.partners])
    graphs = [base.graph([key]) for key in keys_of(drawn)]
    (output,) = VariantPass(policy)([drawn], [graphs])
    for model, scores in ((policy, output.scores), (base.model, score_by_base(
            base, drawn, config.loss).scores)):
        expected, = score_binding(model.eval(), [variant_set.complex], [variant_set.partners],
                                  [variant_set.variants], Scoring(n_orders, 3))
        assert scores[:-1].tolist() == pytest.approx(expected.binding, abs=1e-5)
        assert np.abs(expected.binding - expected.in_complex).min() > 1e-3
    unfolded = config_of(loss__reference="unfolded").loss
    assert not score_by_base(base, drawn, unfolded).scores.any()


def test_a_partner_that_no_drawn_variant_changes_is_not_scored():
    variant_set = set_of_binding()
    variant_set.values[3:] = np.nan         # what is left is in A
    drawn = draw_variants(variant_set, config_of(), epoch=0)
    assert [partner.complex_key for partner in drawn.partners] == [variant_set.partners[1].key]


def test_an_unknown_native_letter_does_not_count_in_what_validation_tells_of_natives():
    structure = random_complex(14)
    structure.S[6] = X_ID
    (native,) = native_pairs(whole_natives([structure]))
    assert native.chain_M.tolist() == [row != 6 for row in range(14)]


def test_pairs_weighed_by_their_difference_count_by_it():
    structure = random_complex(12)
    variant_set = set_of(structure, letters_at(structure, 4))
    policy, base = networks([variant_set])
    batch = MicroBatchDataset([variant_set], config_of()).make_batch([0])
    protein, = batch["proteins"]
    with torch.no_grad():
        _, plain = loss_of_tables(VariantPass(policy), batch, base, config_of(), Ddp(),
                                  torch.float32)
        _, weighed = loss_of_tables(VariantPass(policy), batch, base,
                                    config_of(table__weigh=True), Ddp(), torch.float32)
        output, = VariantPass(policy)([protein], [[base.graph([protein.complex_key])]])
    chosen = output.scores[protein.better].double().numpy()
    values = variant_set.values[protein.numbers]
    difference = values[protein.better] - values[protein.worse]
    column = METRICS.index("logps/chosen")
    assert plain[0, column].item() == pytest.approx(chosen.mean(), rel=1e-5)
    assert weighed[0, column].item() == pytest.approx(np.average(chosen, weights=difference),
                                                      rel=1e-5)


# ---- on ranks, validation ----

def plain_loss(policy, batch, base, config, sets):
    """(losses of P proteins, each the mean over pairs of variants that are scored one by one, with
    the KL divergence of native sequences that the config asks for)."""
    losses = []
    for protein in batch["proteins"]:
        variant_set = next(one for one in sets if one.key == protein.key)
        variants = [*variant_set.variants, []]
        scores = [[plain_binding(model, variant_set, variants[number], protein)
                   for number in protein.numbers.tolist()] for model in (policy, base.model)]
        terms = []
        for better, worse in zip(protein.better.tolist(), protein.worse.tolist()):
            numbers = [side[k][None] for side in scores for k in (better, worse)]
            terms.append(preference_loss(numbers[0], numbers[1], numbers[2].detach(),
                                         numbers[3].detach(), None, config.loss)[0])
        loss = torch.stack(terms).mean()
        if config.loss.native_kl:
            loss = loss + config.loss.native_kl * plain_kl(policy, base.model, variant_set, protein)
        losses.append(loss)
    return losses


def plain_encoding(model, structure):
    X, mask, residue_idx, chain_id = (torch.from_numpy(np.asarray(x))[None] for x in (
        structure.X, structure.mask.astype(np.float32), structure.residue_idx,
        structure.chain_id))
    return model.encode(model.graph(X, mask, residue_idx, chain_id))


def plain_kl(policy, base, variant_set, protein):
    """Mean over resolved residues of a known letter of the divergence of a model from the base."""
    log_p, log_q = (model.decode(plain_encoding(model, variant_set.complex), protein.S,
                                 protein.native_order)[0] for model in (base, policy))
    counted = [row for row in range(len(variant_set.complex))
               if variant_set.complex.mask[row] and variant_set.complex.S[row] != X_ID]
    log_p = log_p[counted].detach()
    return (log_p.exp() * (log_p - log_q[counted])).sum(-1).mean()


def plain_binding(model, variant_set, variant, protein):
    """The score of a variant, less that of its part in each partner by the partner's own rows."""
    whole = variant_set.complex
    score = plain_score(model, whole, variant, protein.orders)
    for structure in variant_set.partners:
        name, = structure.design
        first = whole.rows([name])[0]
        own = [(row - first, letter) for row, letter in variant
               if whole.chain_id[row] == whole.design.index(name) + 1]
        orders = [partner.orders for partner in protein.partners
                  if partner.complex_key == structure.key]
        if own:
            score = score - plain_score(model, structure, own, orders[0])
    return score


def plain_score(model, structure, variant, orders):
    """ln p(mutant) - ln p(wild type) of the mutated residues, last in an order, () float64."""
    if not variant:
        return torch.zeros((), dtype=torch.float64)
    encoding = plain_encoding(model, structure)
    mutated = sorted(row for row, _ in variant)
    total = 0.0
    for number, order in enumerate(orders.tolist()):
        last = mutated if number % 2 == 0 else mutated[::-1]
        order = [row for row in order if row not in last] + last
        for sign, letters in ((1, dict(variant)), (-1, {})):
            S = torch.from_numpy(structure.S.astype(np.int64))[None].clone()
            for row, letter in letters.items():
                S[0, row] = letter
            log_p = model.decode(encoding, S, torch.tensor(order)[None])[0]
            total = total + sign * log_p[mutated, S[0, mutated]].sum()
    return total / len(orders)


def gradients_of(ddp, by_definition=False):
    """See training_runs.gradients, of four micro-batches of proteins a step, in float64. By the
    definition: the mean over proteins by their weights, each variant scored by itself."""
    sets = small_sets() + [set_of(random_complex(n), [[(1, 4)], [(5, 6)]])
                           for n in (17, 18, 19, 20)]
    config = config_of(loss__n_orders=2, table__margin=0.2, loss__native_kl=0.3)
    policy, base = networks(sets)
    policy = policy.double()
    base.model.double()
    run = run_of(config, policy, base, sets, loss_of_tables)
    dataset = MicroBatchDataset(sets, config)
    plan = Plan(sets, 0, 4, config.training.batch_size)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, run, ddp)

    def whole(step):
        total = weights = 0.0
        for _, _, epoch, indices in (plan.item_of(step, k) for k in range(4)):
            batch = dataset.make_batch(indices, epoch)
            losses = plain_loss(policy, batch, base, config, sets)
            for index, loss in zip(indices, losses, strict=True):
                total = total + sets[index].weight * loss
                weights = weights + sets[index].weight
        return total / weights

    return gradients(VariantPass(policy), MicroBatchSampler(plan.item_of, 4, ddp, 0, 2), dataset,
                     loss_of, ddp, whole if by_definition else None)


def test_any_number_of_ranks_makes_the_gradient_of_the_loss_that_is_logged(tmp_path):
    """Of the mean over proteins by their weights: what is minimised is what is shown."""
    expected = gradients_of(Ddp(), True)
    for n in (3, 4):   # three share the micro-batches unevenly
        of_ranks = on_ranks(n, "test_tables", "gradients_of(ddp)", tmp_path)
        for a, b in zip(of_ranks, expected, strict=True):
            for name in b:
                torch.testing.assert_close(a[name].double(), b[name].double(), rtol=1e-5,
                                           atol=1e-5 * float(b[name].norm()) + 1e-9)


def test_validation_is_the_same_mean_over_proteins_as_training():
    sets = small_sets()
    config = config_of()
    policy, base = networks(sets)
    run = run_of(config, policy, base, sets, loss_of_tables)
    run.model = VariantPass(policy)
    values = validate(run, Ddp())
    batch = run.validation.make_batch(range(len(sets)))
    losses = [loss.item() for loss in plain_loss(policy, batch, base, config, sets)]
    weights = [variant_set.weight for variant_set in sets]
    assert values["val/loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-4)
    run.bare = copy.deepcopy(base.model)
    run.model = VariantPass(run.bare)
    assert validate(run, Ddp())["val/loss"] == pytest.approx(math.log(2), abs=1e-6)


# ---- runs from a file ----

def config_for(folder, **more):
    return config_of(data__train_data=write_table(folder), data__val_fraction=0, **more)


def split_table(folder):
    """Write table.csv, and its halves, one.csv and two.csv, which share a protein."""
    head, *lines = write_table(folder).read_text().splitlines(keepends=True)
    half = len(lines) // 2      # in the middle of the second protein's
    for name, part in (("one.csv", lines[:half]), ("two.csv", lines[half:])):
        (folder / name).write_text(head + "".join(part))
    return [folder / name for name in ("table.csv", "one.csv", "two.csv")]


def test_several_tables_train_as_if_they_were_one(tmp_path, capsys):
    """On the command line as well as in a config."""
    whole, one, two = split_table(tmp_path)
    merged = load_data(config_of(data__train_data=whole, data__val_fraction=0))
    (tmp_path / "c.yaml").write_text(f"data: {{train_data: [{one}, {two}]}}")
    table = [f"{name}={value}" for name, value in TABLE.items()]
    for argv in (["--train_data", str(one), str(two), *table, "data.val_fraction=0"],
                 ["--config", str(tmp_path / "c.yaml"), *table, "data.val_fraction=0"]):
        _, config = read_arguments(["model.base_model_name=random", *argv])
        data = load_data(config)
        assert data.fingerprint == merged.fingerprint
        said = " ".join(data.description)
        assert f"data: {one}, {two}: " in said
        assert "1 protein(s) are in several of these tables" in said


def test_variants_of_several_tables_that_do_not_fit_are_said_with_their_table(tmp_path):
    _, one, two = split_table(tmp_path)
    with open(two, "a") as file:
        file.write("s2.pdb,W999A,1\n")
    data = load_data(config_of(data__train_data=f"[{one},{two}]", data__val_fraction=0))
    said = [line for line in data.description if "do not" in line]
    assert len(said) == 1 and said[0].startswith(f"{two}: ")


def test_of_several_tables_all_that_cannot_be_read_are_named(tmp_path):
    whole, one, two = split_table(tmp_path)
    two.write_text("pdb_file,mutation\n")
    with pytest.raises(ValueError) as caught:
        load_data(config_of(data__train_data=f"[{one},{two},{tmp_path}/none.csv]"))
    assert str(two) in str(caught.value) and "none.csv" in str(caught.value)


def test_training_on_a_table_ranks_its_variants_and_says_by_how_much(tmp_path, capsys):
    table = write_table(tmp_path)
    run(config_for(tmp_path, data__val_data=table, training__accum=1, training__n_iters=20,
                   optim__lr=1e-2), tmp_path / "run")
    before, *_, after = [row["val/spearman"] for row in rows(tmp_path / "run")
                         if "val/spearman" in row]
    assert after > max(before, 0.8)
    result = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()
              if line.startswith(("  validation ", "  before ", "  latest "))}
    column = result["validation"].index("Spearman")
    assert float(result["before"][column]) == pytest.approx(before, abs=5e-4)
    assert float(result["latest"][column]) == pytest.approx(after, abs=5e-4)


def test_without_validation_a_run_says_how_it_ranks_the_variants_that_it_trains_on(
        tmp_path, capsys):
    settings = dict(training__accum=1, training__n_iters=20, optim__lr=1e-2)
    run(config_for(tmp_path, **settings), tmp_path / "run")
    logged = [row["spearman"] for row in rows(tmp_path / "run") if "spearman" in row]
    assert logged[-1] > max(logged[0], 0.8) and rows(tmp_path / "run")[0]["step"] == 0
    end = f"Spearman  {logged[0]:.3f} before, {logged[-1]:.3f} now, of variants that were trained"
    said = " ".join(capsys.readouterr().out.split())
    assert " ".join(end.split()) in said
    assert "proteins): this does not say how others are ranked" in said


def test_what_a_run_ranked_before_training_is_known_after_a_resume(tmp_path, capsys):
    settings = dict(training__accum=1, optim__lr=1e-2)
    run(config_for(tmp_path, training__n_iters=2, **settings), tmp_path / "run")
    capsys.readouterr()
    run(config_for(tmp_path, training__n_iters=4, **settings), tmp_path / "run")
    first = rows(tmp_path / "run")[0]["spearman"]
    assert f"Spearman  {first:.3f} before" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")].count(0) == 1


def test_a_run_with_validation_ranks_what_is_held_out_alone(tmp_path):
    run(config_for(tmp_path, data__val_data=write_table(tmp_path), training__n_iters=1),
        tmp_path / "run")
    assert not any("spearman" in row for row in rows(tmp_path / "run"))


def test_the_loss_in_the_log_is_the_one_of_validation(tmp_path):
    """Of proteins of few variants, which count less, at a learning rate of 0, in one order."""
    lines = write_table(tmp_path).read_text().splitlines(keepends=True)
    few = [lines[0], *lines[1:9], *lines[60:63]]      # of the first protein, and of the next
    (tmp_path / "few.csv").write_text("".join(few))
    config = config_of(data__train_data=tmp_path / "few.csv", data__val_data=tmp_path / "few.csv",
                       optim__lr=0, loss__reference="unfolded", loss__order="arange",
                       training__n_iters=1)
    run(config, tmp_path / "w")
    start, row = rows(tmp_path / "w")
    assert row["loss"] == pytest.approx(start["val/loss"], rel=1e-6) != math.log(2)
    assert row["loss"] == pytest.approx(row["epoch/loss"], rel=1e-9)


def test_validation_scores_no_more_variants_of_several_mutations_than_training(monkeypatch):
    structure = random_complex(20)
    variants = [[(row, 1), (other, 2)] for row in range(10) for other in range(10, 20)]
    variant_set = set_of(structure, variants)
    policy, base = networks([variant_set])
    numbers = []

    def scores_of_zero(model, structures, variants, *more, **settings):
        numbers.extend(len(of_protein) for of_protein in variants)
        return [np.arange(len(of_protein), dtype=float) for of_protein in variants]

    monkeypatch.setattr("mpnn.binding.score_proteins", scores_of_zero)
    correlate_variants(policy, base, [variant_set], config_of(table__most_several=12), Ddp())
    assert numbers == [12]


@pytest.mark.parametrize("rate, warns", [(1e-6, False), (1e-1, True)])
def test_weights_that_have_moved_far_from_a_trained_base_are_warned_of(
        tmp_path, capsys, rate, warns):
    torch.save(to_checkpoint(random_proteinmpnn(3, **SIZES)), tmp_path / "w.pt")
    settings = {**TABLE, "data.train_data": write_table(tmp_path), "data.val_fraction": 0,
                "training.batch_size": 1, "training.n_iters": 4, "optim.lr": rate,
                "model.base_model_dir": tmp_path, "model.base_model_name": "w"}
    run(load_config(Config, None, words(settings)), tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert ("the weights have moved far from the base" in said) == warns


USUAL = "model.base_model_name=random data.val_fraction=0 --output_dir new"
OF_TABLE = f"{USUAL} loss.unit=table table.measured=ddg table.better=lower"


@pytest.mark.parametrize("line, named", [
    (f"{USUAL} --train_data table.csv loss.unit=table", "table.measured table.better"),
    (f"{USUAL} --train_data table.csv --measured ddg --better lower", "table loss.unit pair"),
    (f"{USUAL} --train_data table.csv", "table.csv loss.unit=table"),
    (f"{OF_TABLE} --train_data table.csv loss.sft=1", "loss.sft 1.0"),
    (f"{OF_TABLE} --train_data one.csv data.val_fraction=0.1", "data.val_fraction=0"),
    (f"{OF_TABLE} --train_data table.csv data.max_length=9", "data.max_length 9"),
    (OF_TABLE, "data.train_data"),
    (f"{OF_TABLE} --train_data table.csv --measured dG", "table.csv dG"),
    (f"{OF_TABLE} --train_data table.csv table.margin=100", "table.margin 100"),
    (f"{OF_TABLE} --train_data table.csv one.csv ./table.csv", "data.train_data table.csv"),
    (f"{OF_TABLE} --train_data equal.csv", "equal.csv"),
    (f"{OF_TABLE} --train_data unmeasured.csv", "unmeasured.csv"),
    (f"{OF_TABLE} --train_data sequence.csv", "sequence.csv pdb_file"),
    (f"{OF_TABLE} --train_data table.csv table.group=cluster", "table.csv cluster")])
def test_a_table_that_cannot_be_used_is_refused_and_nothing_is_written(line, named, tmp_path):
    write_table(tmp_path)
    lines = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    without_value = [line.rpartition(",")[0] for line in lines[1:]]
    for name, value in (("equal.csv", ",1\n"), ("unmeasured.csv", ",\n")):
        (tmp_path / name).write_text(lines[0] + "".join(line + value for line in without_value))
    (tmp_path / "one.csv").write_text("".join(lines[:20]))
    (tmp_path / "sequence.csv").write_text("sequence,mutation,ddg\nMKTAY,M1A,1\nMKTAY,M1C,2\n")
    assert_refused(main, line, named, tmp_path)


# ---- held out ----

def write_families(folder):
    """Write t.csv with 16 proteins, families of two that have half of their letters in common."""
    rng = np.random.default_rng(0)
    lines = ["pdb_file,mutation,ddg"]
    for family in range(8):
        text = "".join(rng.choice(list(AMINO_ACIDS), 40))
        relative = "".join(rng.choice(list(AMINO_ACIDS), 20)) + text[20:]
        for number, sequence in enumerate((text, relative)):
            atoms = Atoms()
            for place, letter in enumerate(sequence, 1):
                atoms.add("A", place, NAMES[LETTERS.index(letter)])
            name = f"f{family}{number}.pdb"
            (folder / name).write_text(atoms.pdb())
            mutants = [letter for letter in "ACDW" if letter != sequence[30]]
            lines += [f"{name},{sequence[30]}31{letter},{ddg}"
                      for ddg, letter in enumerate(mutants)]
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return folder / "t.csv"


def test_relatives_are_on_one_side_of_the_validation_of_a_table(tmp_path):
    data = load_data(config_of(data__train_data=write_families(tmp_path), data__val_fraction=0.4))
    ends = [{decode(variant_set.complex.S[20:]) for variant_set in side}
            for side in (data.train, data.val)]
    assert not ends[0] & ends[1]
    assert len(data.train) + len(data.val) == 16 and len(data.val) % 2 == 0


def test_relatives_of_less_identity_than_asked_for_may_be_on_both_sides(tmp_path):
    data = load_data(config_of(data__train_data=write_families(tmp_path), data__val_fraction=0.4,
                               data__identity=0.9))
    ends = [{decode(variant_set.complex.S[20:]) for variant_set in side}
            for side in (data.train, data.val)]
    assert ends[0] & ends[1]


def test_proteins_of_a_group_are_on_one_side_whatever_their_sequences(tmp_path):
    """Each of the 8 families has a group with the next one, and so with all but the last two."""
    lines = write_families(tmp_path).read_text().splitlines()
    grouped = [f"{lines[0]},cluster"]
    for line in lines[1:]:
        family = int(line[1])
        # A protein has a row of each of its two groups.
        name = f"g{(family + int(line[-1]) % 2) // 2}" if family < 6 else ""
        grouped.append(f"{line},{name}")
    (tmp_path / "t.csv").write_text("\n".join(grouped) + "\n")
    settings = dict(data__train_data=tmp_path / "t.csv", data__val_fraction=0.4)
    data = load_data(config_of(table__group="cluster", **settings))
    sides = [{variant_set.name[1] for variant_set in side} for side in (data.train, data.val)]
    assert set("012345") <= sides[0] or set("012345") <= sides[1]
    said = " ".join(data.description)
    assert "(of 3; " in said and "none of 4 groups on both sides" in said
    data = load_data(config_of(**settings))
    sides = [{variant_set.name[1] for variant_set in side} for side in (data.train, data.val)]
    assert set("012345") & sides[0] and set("012345") & sides[1], "the groups have no effect"


@pytest.mark.parametrize("of_binding", [False, True])
def test_after_training_on_binding_weights_are_corrected_as_before(of_binding, tmp_path):
    """The first training is in a folder of its own, and started from a file beside that. After a
    second one on stability the correction is by the weights of the first."""
    torch.save(to_checkpoint(random_proteinmpnn(3, **SIZES)), tmp_path / "w.pt")
    table = write_table(tmp_path)
    second = write_binding(tmp_path) if of_binding else table
    settings = {**TABLE, "data.val_fraction": 0, "training.n_iters": 1, "training.batch_size": 1,
                "loss.reference": "unfolded"}
    for data, start, folder in ((table, "w.pt", "one"), (second, "one/latest_model.pt", "x/two")):
        run(load_config(Config, None, words({
            **settings, "data.train_data": data, "model.base_model_name": tmp_path / start})),
            tmp_path / folder)
    path = tmp_path / "x" / "two" / "latest_model.pt"
    record = read_record(torch.load(path, weights_only=True), path)
    name, _ = find_base(record, path)
    assert record.is_corrected
    assert name.endswith("w.pt" if of_binding else "one/latest_model.pt")


def test_validation_ranks_variants_of_binding_by_the_score_of_binding():
    variant_set = set_of_binding()
    policy, base = networks([variant_set])
    scores, = score_binding(policy.eval(), [variant_set.complex], [variant_set.partners],
                            [variant_set.variants], Scoring(1, 0))
    variant_set.values[:-1] = scores.binding
    for reference in ("base", "unfolded"):
        config = config_of(loss__reference=reference)
        assert correlate_variants(policy, base, [variant_set], config, Ddp()) == pytest.approx(1)


def test_the_plan_counts_the_partners_in_the_memory_of_a_complex():
    """Of 2 x 19 residues, of which 6 are mutated, each also alone."""
    size = size_of(set_of_binding())
    assert (size.residues, size.mutated) == (38, 12)


def test_structures_that_are_longer_than_asked_for_are_left_out_and_told(tmp_path):
    write_binding(tmp_path)
    tables = f"[{write_table(tmp_path)},{tmp_path / 'binding.csv'}]"
    data = load_data(config_of(data__train_data=tables, data__val_fraction=0, data__max_length=14))
    assert [variant_set.name for variant_set in data.train] == ["s0.pdb", "s1.pdb", "s2.pdb"]
    assert "data.max_length 14: 3 structures: b0.pdb (16)" in " ".join(data.description)


def test_a_mutation_is_put_into_all_copies_of_its_chain_if_asked_for(tmp_path):
    chain = random_complex(12).structure.chains["A"]
    atoms = backbone(chain.S, chain.X)
    atoms += backbone(chain.S, chain.X + 9, "B")
    (tmp_path / "dimer.pdb").write_text(atoms.pdb())
    native = LETTERS[chain.S[3]]
    mutants = [letter for letter in "ACDEFG" if letter != native]
    (tmp_path / "t.csv").write_text("pdb_file,chain,mutation,ddg\n" + "".join(
        f"dimer.pdb,A,{native}4{letter},{number}\n" for number, letter in enumerate(mutants)))
    mutated = {}
    for copies in (False, True):
        variant_set, = load_data(config_of(data__train_data=tmp_path / "t.csv",
                                           data__val_fraction=0, table__copies=copies)).train
        mutated[copies] = {tuple(row for row, _ in variant) for variant in variant_set.variants}
    assert mutated == {False: {(3,)}, True: {(3, 15)}}


def test_proteins_in_training_and_validation_are_named(tmp_path):
    """s0 is in both tables."""
    lines = write_table(tmp_path).read_text().splitlines(keepends=True)
    (tmp_path / "val.csv").write_text("".join(lines[:30]))
    (tmp_path / "rest.csv").write_text("".join([lines[0], *lines[60:]]))
    notes = {}
    for train in ("table.csv", "rest.csv"):
        config = config_of(data__train_data=tmp_path / train, data__val_data=tmp_path / "val.csv")
        notes[train] = " ".join(load_data(config).description)
    assert "1 protein of validation, or of its group, is in training" in notes["table.csv"]
    assert "is in training" not in notes["rest.csv"]


def test_a_group_in_training_and_validation_is_named(tmp_path):
    """s0 is in one table, s1 in the other, and the group g is theirs."""
    lines = write_table(tmp_path).read_text().splitlines()
    files = {}
    for name in ("s0", "s1"):
        own = [f"{line},g" for line in lines[1:] if line.startswith(f"{name}.")]
        files[name] = tmp_path / f"{name}.csv"
        files[name].write_text("\n".join([f"{lines[0]},group", *own]) + "\n")
    said = {}
    for group in ("group", "null"):
        config = config_of(data__train_data=files["s0"], data__val_data=files["s1"],
                           table__group=group)
        said[group] = " ".join(load_data(config).description)
    assert "of its group, is in training, first s1." in said["group"]
    assert "is in training" not in said["null"]


def test_another_validation_table_is_other_data(tmp_path):
    """A run that is resumed with it is refused."""
    lines = write_table(tmp_path).read_text().splitlines(keepends=True)
    for name, n in (("a.csv", 30), ("b.csv", 29)):
        (tmp_path / name).write_text("".join(lines[:n]))
    hashes = {load_data(config_for(tmp_path, data__val_data=tmp_path / name)).fingerprint["hash"]
              for name in ("a.csv", "b.csv")}
    assert len(hashes) == 2


def test_without_a_value_the_wild_type_is_in_no_pair(tmp_path):
    """Else 0 would make it the best of all by constants of binding, or the worst by fitness."""
    dataset = prepare(config_for(tmp_path), Ddp(), tmp_path / "run").train_set
    for index, variant_set in enumerate(dataset.items):
        protein, = dataset.make_batch([index])["proteins"]
        assert protein.numbers.max() < len(variant_set.variants)


@pytest.mark.parametrize("of_config, of_others, said", [
    ("null", np.nan, "the wild type is in no pair for 2 others"),
    (0.5, -0.5, "wild type 0.5, of table.wild_type for 2 others")])
def test_a_row_of_the_wild_type_gives_its_protein_the_value(of_config, of_others, said, tmp_path):
    """Lower is better, so values have the other sign."""
    config = config_for(tmp_path, table__wild_type=of_config)
    with open(tmp_path / "table.csv", "a") as file:
        file.write("s1.pdb,WT,3\ns1.pdb,wt,5\ns1.pdb,p.=,NA\n")
    data = load_data(config)
    values = {variant_set.name: variant_set.values[-1] for variant_set in data.train}
    assert values == pytest.approx({"s0.pdb": of_others, "s1.pdb": -4, "s2.pdb": of_others},
                                   nan_ok=True)
    description = " ".join(data.description)
    assert f"wild type 4, of its row in the table; {said}" in description
    assert "no substitution: 3 wild types" in description


def test_limits_and_rows_without_a_value_are_told_and_not_trained_on(tmp_path):
    config = config_for(tmp_path)
    n = sum(len(variant_set.variants) for variant_set in load_data(config).train)
    text = (tmp_path / "table.csv").read_text()
    lines = text.splitlines()
    lines[1] = lines[1].rpartition(",")[0] + ",>5"
    lines[2] = lines[2].rpartition(",")[0] + ",NA"
    (tmp_path / "table.csv").write_text("\n".join(lines))
    data = load_data(config)
    assert sum(len(variant_set.variants) for variant_set in data.train) == n - 2
    assert "not measured in ddg: 1 without a value, 1 with a limit" in " ".join(data.description)


def test_rows_of_the_wild_type_in_several_tables_count_by_their_mean(tmp_path):
    _, one, two = split_table(tmp_path)
    for path, value in ((one, 3), (two, 4)):
        with open(path, "a") as file:
            file.write(f"s1.pdb,WT,{value}\n")
    data = load_data(config_of(data__train_data=f"[{one},{two}]", data__val_fraction=0))
    values = {variant_set.name: variant_set.values[-1] for variant_set in data.train}
    assert values["s1.pdb"] == -3.5
