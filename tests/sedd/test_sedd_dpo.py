"""Does train_dpo_ddp.py train SEDD on preference pairs, on any number of ranks, and refuse?"""

import copy
import json
import math

import numpy as np
import pytest
import torch

import sample_sedd
import train_dpo_ddp
from ddp_setup import Ddp
from sedd.pairs import SequencePair, groups_of, read_pairs
from sedd.kind import SeddKind
from proteins.letters import AMINO_ACIDS, encode
from sedd.weights import load_sedd
from sedd_cases import NOISE, SIZES, write_checkpoint
from train_dpo_ddp import (Config, MicroBatchDataset, check_config, describe_plan,
                           micro_batch_loss, objective, prepare)
from training.config import load_config
from training.command_line import prepare_and_train
from training.loop import MicroBatchSampler
from dpo.pair_plan import PairPlan
from dpo.reference import Reference
from dpo.scorer import load
from dpo.validation import Validation
from training.resume import hash_of
from training_runs import (  # noqa: F401 (the fixture one_thread)
    assert_refused, gradients, on_ranks, one_thread, rows, same_run, words)


def made_entries(n=24):
    """Pairs of 12 groups: chosen ones have more K; single mutants, double ones, other lengths."""
    draw = np.random.default_rng(0)
    entries = []
    for k in range(n):
        letters = draw.choice(list(AMINO_ACIDS), 16 + k % 5)
        better = letters.copy()
        better[draw.choice(len(letters), 1 + k % 2, replace=False)] = "K"
        worse = letters[:-1] if k % 4 == 3 else np.where(letters == "K", "R", letters)
        entries.append({"preferred_seq": "".join(better), "unpreferred_seq": "".join(worse) + "E",
                        "group": f"protein {k % 12}", "weight": 0.5 + k % 3})
    return entries


@pytest.fixture
def made(tmp_path):
    """A folder with base weights and pairs.json."""
    write_checkpoint(tmp_path / "base.pt")
    (tmp_path / "pairs.json").write_text(json.dumps(made_entries()))
    return tmp_path


SETTINGS = {"model.kind": "sedd", "model.base": "base.pt", "data.train_data": "pairs.json",
            "data.val_fraction": 0.3, "training.batch_size": 3, "training.accum": 2,
            "training.n_iters": 4, "training.log_freq": 1, "optim.lr": 3e-3, "optim.warmup": 1,
            "estimator.samples": 4, "monitoring.n_designs": 2, "monitoring.design_steps": 4}


def settings(folder, **more):
    found = {**SETTINGS, "model.base": f"{folder}/base.pt",
             "data.train_data": f"{folder}/pairs.json"}
    return load_config(Config, None, words(found, **more))


def run(config, work_dir, **options):
    return prepare_and_train(train_dpo_ddp, config, Ddp(), work_dir, **options)


def scorer_of(config, ddp=Ddp()):
    """(Scorer, pairs) of a config."""
    kind = SeddKind()
    base, data = load(kind, config, ddp)
    return kind.scorer(base, [*data.train, *(data.val or [])], config, ddp), data


def moved(model):
    """A copy of a model with other weights."""
    policy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    return policy


# ---- training ----

def test_a_run_starts_at_log_2_and_saves_what_sample_sedd_reads(made, capsys):
    run(settings(made, training__n_iters=3), made / "run")
    metrics = rows(made / "run")
    assert metrics[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-8)
    assert metrics[1]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert metrics[0]["val/margin_noise"] == 0 < metrics[-1]["val/margin_noise"]
    sedd = load_sedd(made / "run")
    assert sedd.max_length == 40
    score, = sample_sedd.score_sequences(sedd, ["MKTAYIAK"], samples=2).bound
    assert math.isfinite(score)
    assert len((made / "run" / "designs" / "step_3.fasta").read_text().splitlines()) == 4
    assert "noise" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected best_model.pt or latest_model.pt"):
        load_sedd(made / "run" / "checkpoints" / "last.pt")


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(made):
    """It stops within an epoch."""
    run(settings(made, training__n_iters=4), made / "whole")
    run(settings(made, training__n_iters=2), made / "parts")
    run(settings(made, training__n_iters=4), made / "parts")
    for name in ("latest_model.pt",):
        one, other = (torch.load(made / folder / name, weights_only=True)["model"]
                      for folder in ("whole", "parts"))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_fixed_noise_is_scored_once_by_the_reference(made):
    run(settings(made, estimator__fixed=True, training__n_iters=1), made / "run")
    metrics = rows(made / "run")
    assert len(list((made / "run" / "reference").iterdir())) == 2
    assert metrics[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize("other", [
    {"letters": [*range(120, 99, -1)]},
    {"config": {"model": {**SIZES, "n_heads": 4}, "graph": {"type": "absorb"}, "noise": NOISE,
                "data": {"max_length": 40}}}])
def test_kept_scores_are_not_taken_for_a_base_of_equal_weights_and_other_settings(other, made):
    for more in ({}, other):
        write_checkpoint(made / "base.pt", **more)
        config = settings(made, data__val_fraction=0)
        scorer, data = scorer_of(config)
        reference = Reference(scorer)
        base_hash = hash_of(scorer.base.model.state_dict(), scorer.base.settings)
        reference.fill_table(data.train, base_hash, made / "kept", "pairs")
    torch.testing.assert_close(reference.table, reference.compute(data.train))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with base weights, pairs, and their scores by the reference."""
    folder = tmp_path_factory.mktemp("kept")
    write_checkpoint(folder / "base.pt")
    (folder / "pairs.json").write_text(json.dumps(made_entries(4)))
    assert where_scores_come_from(folder) == "computed,"
    return folder


def where_scores_come_from(folder, **changed):
    """The first word of what is told."""
    scorer, data = scorer_of(settings(folder, data__val_fraction=0, **changed))
    return Reference(scorer).fill_table(data.train, "hash", folder / "scores", "pairs").split()[0]


@pytest.mark.parametrize("changed", [
    {"estimator.share": False}, {"estimator.samples": 5}, {"training.seed": 1},
    {"training.batch_size": 2}])
def test_kept_scores_are_not_taken_after_a_change_of(changed, kept):
    assert where_scores_come_from(kept, **changed) == "computed,"


def test_kept_scores_are_taken_after_a_change_that_leaves_them(kept):
    assert where_scores_come_from(kept, loss__beta=0.5) == "read"


def test_residues_are_counted_without_unknown_ones(tmp_path):
    write_checkpoint(tmp_path / "base.pt")
    (tmp_path / "pairs.json").write_text(json.dumps(
        [{"preferred_seq": "MKXXTA", "unpreferred_seq": "MRTA"}]))
    scorer, data = scorer_of(settings(tmp_path, data__val_fraction=0))
    batch = scorer.batch_maker(data.train)([0])
    assert batch["n_scored"].tolist() == [4]


def test_a_run_is_not_resumed_from_a_base_of_equal_weights_and_another_noise(made):
    run(settings(made, training__n_iters=1), made / "run")
    noise = {**NOISE, "eps": 2 * NOISE["eps"]}
    write_checkpoint(made / "base.pt", config={
        "model": SIZES, "graph": {"type": "absorb"}, "noise": noise, "data": {"max_length": 40}})
    with pytest.raises(ValueError, match="a base with other settings"):
        prepare(settings(made, training__n_iters=2), Ddp(), made / "run")


@pytest.mark.parametrize("base, said", [
    ("base.pt", "up to 24 sequences for the network, of up to 40 residues"),
    ("null", "not known without --base"), ("none.pt", "not known: base weights: there is no")])
def test_the_plan_says_what_memory_a_rank_takes(base, said, made):
    base = base.replace("base.pt", f"{made}/base.pt")
    assert said in describe_plan(settings(made, model__base=base), "1,2")


def gradients_of(ddp, folder, by_definition=False):
    """See training_runs.gradients, in float64. By the definition: the mean over all pairs of a
    step by weight, each by itself."""
    config = settings(folder, loss__sft=0.3, loss__diversity_lambda=0.2, data__val_fraction=0)
    scorer, data = scorer_of(config, ddp)
    scorer.base.model.double()
    reference = Reference(scorer)
    policy = moved(scorer.base.model)
    pairs = data.train
    plan = PairPlan(pairs, 0, 4, config.training.batch_size)
    make = scorer.batch_maker(pairs)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, reference, config, ddp, torch.float32)

    def whole(step):
        total = weights = 0.0
        for _, _, epoch, indices in (plan.item_of(step, k) for k in range(4)):
            for i in indices:
                batch = scorer.prepare(make([i], epoch=epoch))
                with torch.no_grad():
                    base = scorer(scorer.base.model, batch)
                loss, _ = objective(scorer(policy, batch), batch, base.scores, config.loss)
                total = total + pairs[i].weight * loss.sum()
                weights = weights + pairs[i].weight
        return total / weights

    return gradients(policy, MicroBatchSampler(plan.item_of, 4, ddp, 0, 2),
                     MicroBatchDataset(make, 0), loss_of, ddp, whole if by_definition else None)


@pytest.mark.slow
def test_any_number_of_ranks_makes_the_gradient_of_the_weighted_mean(made):
    expected = gradients_of(Ddp(), made, by_definition=True)
    for n in (1, 2, 3, 4):
        found = on_ranks(n, "test_sedd_dpo", "gradients_of(ddp, '.')", made)
        for a, b in zip(found, expected, strict=True):
            for name in b:
                torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-8)


def validated(ddp, folder):
    """Metrics of validation, of a policy with other weights than the reference."""
    config = settings(folder, monitoring__n_designs=2)
    scorer, data = scorer_of(config, ddp)
    policy = moved(scorer.base.model)
    validation = Validation(data.val, scorer, objective)
    values = validation(policy)
    drawn = [row.tolist() for row in validation.designs.draw(policy, ddp)]
    return values, drawn


@torch.no_grad()
def test_the_noise_of_the_margin_is_the_root_of_its_mean_variance_by_weight(made):
    scorer, data = scorer_of(settings(made, monitoring__n_designs=0))
    policy = moved(scorer.base.model).eval()
    found = Validation(data.val, scorer, objective)(policy)["val/margin_noise"]
    make = scorer.batch_maker(data.val)
    total = 0.0
    for number, pair in enumerate(data.val):
        batch = scorer.prepare(make([number]))
        variance = scorer.margin_variance(scorer(policy, batch), scorer(scorer.base.model, batch),
                                          batch)
        total += pair.weight * float(variance)
    mean = total / sum(pair.weight for pair in data.val)
    assert found == pytest.approx(math.sqrt(mean), rel=1e-4)


@pytest.mark.slow
def test_validation_is_the_same_on_two_ranks(made):
    assert on_ranks(2, "test_sedd_dpo", "validated(ddp, '.')", made) == validated(Ddp(), made)


# ---- pairs ----

def test_pairs_are_read_from_a_table_as_from_json(tmp_path):
    entries = made_entries(6)
    lines = ["preferred_seq\tunpreferred_seq\tgroup\tweight"]
    lines += ["\t".join(map(str, entry.values())) for entry in entries]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "pairs.json").write_text(json.dumps(entries))
    table, objects = (read_pairs(tmp_path / name, 40) for name in ("pairs.tsv", "pairs.json"))
    assert [(p.key, p.group, p.weight) for p in table] == [
        (p.key, p.group, p.weight) for p in objects]


def test_pairs_of_a_group_or_with_a_shared_sequence_stay_together():
    def pair(chosen, rejected, group=None):
        return SequencePair(encode(chosen), encode(rejected), group)

    found = groups_of([pair("AC", "AD"), pair("AE", "AF"), pair("AD", "AG"),
                       pair("CC", "CD", "p"), pair("DC", "DD", "p"), pair("DD", "AF")]).tolist()
    assert found[0] == found[2]
    assert found[1] == found[3] == found[4] == found[5] != found[0]


def test_bad_pairs_are_all_named(tmp_path):
    good = {"preferred_seq": "MKTA", "unpreferred_seq": "MRTA"}
    bad = [({}, "preferred_seq is null"), ({**good, "preferred_seq": "MK-A"}, "'-' at position 3"),
           ({**good, "unpreferred_seq": "MKTA"}, "no preference"),
           ({**good, "preferred_seq": "M" * 41}, "41 residues; expected at most 40"),
           ({**good, "unpreferred_seq": "ATGGCATTCGACCGTAAGCTG"}, "seq is of nucleotides (ATGG"),
           ({**good, "preferred_seq": "XXX"}, "unknown residues alone"),
           ({**good, "preferred_seq": "MXTA"}, "differ at unknown residues"),
           ({**good, "weight": 0}, "weight is 0"), ({**good, "group": 3}, "group is 3"),
           ({**good, "pdb_file": "a.pdb"}, "model.kind=proteinmpnn"),
           ({**good, "chain": "A"}, "unknown key chain"), ([], "expected an object")]
    (tmp_path / "pairs.json").write_text(json.dumps([good, *(entry for entry, _ in bad)]))
    with pytest.raises(ValueError) as caught:
        read_pairs(tmp_path / "pairs.json", 40)
    for item, (_, said) in enumerate(bad, 1):
        assert any(f"item {item}:" in line and said in line
                   for line in str(caught.value).splitlines()), said


def test_a_table_without_pairs_is_refused(tmp_path):
    (tmp_path / "pairs.csv").write_text("preferred_seq,unpreferred_seq\n")
    with pytest.raises(ValueError, match="holds no pair"):
        read_pairs(tmp_path / "pairs.csv", 40)


def test_columns_of_a_table_that_are_not_used_are_named(made):
    entries = made_entries(6)
    lines = ["preferred_seq,unpreferred_seq,weigth"]
    lines += [f"{entry['preferred_seq']},{entry['unpreferred_seq']},2" for entry in entries]
    (made / "pairs.csv").write_text("\n".join(lines) + "\n")
    config = settings(made, data__train_data=str(made / "pairs.csv"), data__val_fraction=0)
    assert f"  {made / 'pairs.csv'}: columns that are not used: weigth" in load(
        SeddKind(), config, Ddp())[1].description


def test_a_table_of_pairs_on_structures_is_refused(tmp_path):
    (tmp_path / "pairs.csv").write_text("pdb_file,preferred_seq,unpreferred_seq\na,MK,ML\n")
    with pytest.raises(ValueError, match="model.kind=proteinmpnn"):
        read_pairs(tmp_path / "pairs.csv", 40)


def test_a_term_of_entropy_is_refused_for_a_base_that_hides_no_residues(made):
    write_checkpoint(made / "base.pt", graph="uniform")
    with pytest.raises(ValueError, match="loss.diversity_lambda is 0.1, but .* uniform graph"):
        load(SeddKind(), settings(made, loss__diversity_lambda=0.1), Ddp())


def test_what_is_assumed_of_a_base_is_said(made):
    write_checkpoint(made / "base.pt", letters=None)
    base, _ = load(SeddKind(), settings(made), Ddp())
    assert any("no letter frequencies" in note for note in base.notes)


@pytest.mark.parametrize("changed, said", [
    ({"loss.order": "fixed"}, "loss.order is given, which is for model.kind proteinmpnn"),
    ({"model.random.hidden_size": 8}, "model.random.hidden_size|model.random is given"),
    ({"data.mutable_positions": "1 2"}, "data.mutable_positions"),
    ({"model.base": "null"}, "--base"), ({"data.train_data": "null"}, "--train_data"),
    ({"estimator.samples": 1}, "estimator.samples is 1;"),
    ({"estimator.samples": 10**11}, "estimator.samples is 100000000000"),
    ({"model.kind": "proteinmpnn"}, "estimator.samples is given, which is for model.kind sedd")])
def test_settings_of_the_other_kind_are_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        check_config(load_config(Config, None, words({**SETTINGS, **changed})))


def test_unusable_input_of_a_run_is_refused_with_one_message(made):
    (made / "linked.json").write_text(json.dumps(
        [{"preferred_seq": "MKTA", "unpreferred_seq": f"MRT{letter}"} for letter in "ACDE"]))
    given = "--no_cuda model.kind=sedd --output_dir run"
    assert_refused("train_dpo_ddp", [
        (f"{given} --base none.pt --train_data pairs.json", "base weights", "none.pt"),
        (f"{given} --base base.pt --base_model_name v_48_020 --train_data pairs.json",
         "--base_model_name is for model.kind proteinmpnn"),
        (f"{given} --base base.pt --train_data linked.json", "none can be held out"),
        (f"{given} --base base.pt --train_data pairs.json loss.name=simpo", "of two lengths"),
    ], made)
