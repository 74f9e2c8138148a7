"""Does train_dpo_ddp.py train the right thing on any number of ranks, stop, go on and refuse?"""

import copy
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

import dpo.reference
import train_dpo_ddp
from ddp_setup import Ddp, load_checkpoint
from dpo.data import load_data
from dpo.demo import demo_pairs
from dpo.evaluation import METRICS, validate
from dpo.pair_batches import decoding_orders, make_batch
from dpo.pair_scores import (
    base_natives,
    compute_base_scores,
    decode_pairs,
    native_kl,
    native_pairs,
    score_pairs,
)
from dpo.pairs import Pair, read_pairs
from dpo.plan import Plan
from dpo.reference import FrozenBase
from dpo_cases import TINY, run, run_of, small_pairs, tiny, write_pairs
from launchers import Printed, fork_ranks, need, read_status, run_ranks
from mpnn.base import Base
from mpnn.model import ProteinMPNN, from_checkpoint, random_proteinmpnn, to_checkpoint
from mpnn.record import TrainingRecord, find_base, read_record
from mpnn.weights import load_proteinmpnn
from mpnn_cases import SIZES, each_case, graph_of, near, official_numbers
from proteins.letters import X_ID, decode
from proteins.structures import Complex, read_structure
from tool_runs import run_tool
from train_dpo_ddp import (
    Config,
    Loss,
    MicroBatchDataset,
    describe_plan,
    loss_of_pairs,
    main,
    micro_batch_loss,
    preference_loss,
    prepare,
    read_arguments,
)
from training.config import load_config
from training.loop import MicroBatchSampler
from training.resume import hash_of
from training_runs import (
    ROOT,
    assert_refused,
    driver,
    equal,
    gradients,
    on_ranks,
    rows,
    same_run,
    timeless,
    train_ready,
    words,
)

SCRIPT = ROOT / "train_dpo_ddp.py"
DEMO = ROOT / "configs" / "dpo_demo.yaml"
def best_of(work_dir):
    return torch.load(work_dir / "best_model.pt", weights_only=True)


# ---- losses ----

@pytest.fixture(scope="module")
def official(shared):
    return official_numbers(shared)


def batch_of(inputs, order):
    """The pair of a case, as make_batch lays it out."""
    weight = inputs["mask"] * inputs["chain_M_full"]
    return {"S": torch.cat([inputs["S_chosen"], inputs["S_rejected"]]),
            "order": order.expand(2, -1), "scored": weight, "n_scored": weight.sum(1),
            "complex_row": torch.zeros(2, dtype=torch.int64),
            "sequence_rows": torch.tensor([[[0, 1]]])}


def scored(model, inputs, batch):
    return model(graph_of(model, inputs), batch["S"], batch["order"], batch["complex_row"])


def preferences(scores, reference, batch, loss):
    """preference_loss (P,) of scores (P, 2) of policy and reference."""
    return preference_loss(*scores.unbind(1), *reference.unbind(1), batch["n_scored"], loss)


@torch.no_grad()
def test_losses_have_the_values_of_the_official_model(official):
    names = {"ipo": "ipo_sum", "ipo_norm": "ipo_mean", "conservative": "conservative_ls0p1",
             "robust": "robust_ls0p1", "simpo": "simpo_b2_g0p5"}    # of the fixture
    for case, inputs, *models in each_case(official, "dpo"):
        batch = batch_of(inputs, inputs["decoding_order"])
        reference, policy = (score_pairs(scored(model, inputs, batch), batch, 1)[0]
                             for model in models)
        official = case["dpo"]["losses"]
        ours = get_args(Loss.__annotations__["name"])
        compared = [name for name in ours if names.get(name, name) in official]
        assert len(compared) >= 9       # a loss of later is compared with numbers by hand alone
        for name in compared:
            loss = Loss(name=name, beta=2.0 if name == "simpo" else 0.1)
            near(preferences(policy, reference, batch, loss), official[names.get(name, name)],
                 **(dict(rtol=1e-3) if name == "ipo" else dict(atol=3e-4)))


def test_loss_and_gradient_in_order_are_those_of_the_original(official):
    # The original adds 1e-20 to probabilities, which some reach at temperature 0.1: undone here, as
    # ours does not.
    def floor(log_probs, T):
        return T * ((log_probs / T).softmax(-1) + 1e-20).log()

    for case, inputs, reference, policy in each_case(official, "invfold"):
        batch = batch_of(inputs, torch.arange(inputs["S"].shape[1])[None])
        for name, T in (("T0p1", 0.1), ("T1p0", 1.0)):
            with torch.no_grad():
                ref = score_pairs(floor(scored(reference, inputs, batch), T), batch, T)[0]
            scores, _ = score_pairs(floor(scored(policy, inputs, batch), T), batch, T)
            value = preferences(scores, ref, batch, Loss(temperature=T)).mean()
            norm = torch.nn.utils.get_total_norm(torch.autograd.grad(value, policy.parameters()))
            for ours, what in ((value.detach(), "loss"), (norm, "grad_norm")):
                near(ours, case["invfold"][f"{what}_{name}"], rtol=2e-3, atol=1e-5)


# chosen -10 of a reference's -11, rejected -12 of -11.5, 5 residues: h = 1 + 0.5 = 1.5, beta h =
# 0.75 at beta 0.5.
@pytest.mark.parametrize("name, expected", [
    ("sigmoid", math.log(1 + math.exp(-0.75))), ("hinge", 0.25), ("ipo", 0.25), ("ipo_norm", 0.49),
    ("robust", (0.8 * math.log(1 + math.exp(-0.75)) - 0.2 * math.log(1 + math.exp(0.75))) / 0.6),
    ("conservative", 0.8 * math.log(1 + math.exp(-0.75)) + 0.2 * math.log(1 + math.exp(0.75))),
    ("sigmoid_norm", math.log(1 + math.exp(-0.15))), ("reference_free", math.log(1 + math.exp(-1))),
    ("simpo", math.log(1 + math.exp(0.1)))])        # 0.5 x 2 / 5 - 0.3 = -0.1
def test_each_loss_at_a_margin_computed_by_hand(name, expected):
    values = [torch.tensor([x], dtype=torch.float64) for x in (-10, -12, -11, -11.5, 5)]
    found = preference_loss(*values, Loss(name=name, beta=0.5, label_smoothing=0.2, gamma=0.3))
    assert found.item() == pytest.approx(expected, rel=1e-12)


class Always(torch.nn.Module):
    """A network that gives the same log-probabilities for whatever it is asked."""

    def __init__(self, log_probs):
        super().__init__()
        self.log_probs = log_probs

    def forward(self, *arguments):
        return self.log_probs


def test_sft_adds_the_mean_negative_log_probability_and_diversity_takes_off_the_mean_entropy():
    p = torch.full((2, 4, 21), 0.1 / 19).double()
    p[..., 0] = 0.6   # chosen AAAA, rejected CCCC, under any order
    p[..., 1] = 0.3
    scored = torch.tensor([[1.0, 1, 0, 1]]).double()
    batch = {"S": torch.tensor([[0] * 4, [1] * 4]), "scored": scored, "n_scored": scored.sum(1),
             "sequence_rows": torch.tensor([[[0, 1]]]), "complex_keys": [], "order": None,
             "complex_row": None, "base_scores": torch.zeros(1, 2).double()}
    entropy = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1 / 19))
    config = Config(loss=Loss(sft=2.0, diversity_lambda=0.5))
    base = SimpleNamespace(graph=lambda keys: None)
    value, metrics = loss_of_pairs(Always(p.log()), batch, base, config, Ddp(), torch.float32)
    named = dict(zip(METRICS, metrics[0].tolist()))
    sigmoid = math.log(1 + math.exp(-0.1 * 3 * (math.log(0.6) - math.log(0.3))))
    assert value.item() == pytest.approx(sigmoid - 2 * math.log(0.6) - 0.5 * entropy)
    assert named["loss"] == pytest.approx(value.item())
    assert named["preference_loss"] == pytest.approx(sigmoid)
    assert named["rewards/accuracies"] == 1
    assert named["logps/chosen"] == pytest.approx(3 * math.log(0.6))


# ---- batches and orders ----

def networks(config):
    """(policy, FrozenBase, pairs) of small_pairs; policy and base have other weights."""
    pairs = small_pairs()
    (policy, base) = (random_proteinmpnn(k, **SIZES) for k in (2, 1))
    return policy, FrozenBase(Base(base, "random", "hash"), pairs, torch.device("cpu")), pairs


@torch.no_grad()
def alone(model, pair, S, orders, temperature=1.0):
    """log p(S) of one pair scored by itself, averaged over orders."""
    total = 0.0
    for order in orders:
        log_probs, letters, weight = everywhere(model, pair, S, order)
        log_probs = torch.log_softmax(log_probs / temperature, -1)
        total += float((log_probs.gather(-1, letters[:, None])[:, 0] * weight).sum())
    return total / len(orders)


def everywhere(model, pair, S, order):
    """(log-probabilities (L, 21), letters (L,), weight (L,), 1 = scored) of a sequence S of a pair
    under an order."""
    c = pair.complex
    letters = torch.from_numpy(np.concatenate([S, c.S[len(S):]]).astype(np.int64))
    X, mask, residue_idx, chain_id = (torch.from_numpy(np.asarray(x))[None] for x in (
        c.X, c.mask.astype(np.float32), c.residue_idx, c.chain_id))
    weight = torch.zeros(len(c))
    weight[:len(S)] = torch.from_numpy(pair.chain_M & c.mask[:len(S)]).float()
    graph = model.graph(X, mask, residue_idx, chain_id)
    return model(graph, letters[None], order[None])[0], letters, weight


def plain_native_term(models, batch, pair, place):
    """KL divergence from the base weights per known letter of a pair's native sequence, scored by
    itself in the order that a batch has for its structure. models: policy, base. place: of the pair
    in the batch."""
    structure = pair.complex
    row = batch["complex_row"][batch["sequence_rows"][place, 0, 0]]
    order = batch["native_order"][row, :len(structure)]
    native = structure.S[:structure.n_designed]
    whole = Pair(structure, native, native, np.ones(structure.n_designed, bool))
    policy, letters, _ = everywhere(models[0], whole, native, order)
    base = everywhere(models[1], whole, native, order)[0].detach()
    known = torch.from_numpy(structure.mask) & (letters != X_ID)
    return (base.exp() * (base - policy))[known].sum(-1).mean()


def test_the_divergence_on_native_sequences_is_that_of_each_scored_by_itself():
    """Unknown letters, X, do not count: one of the structures has some."""
    config = tiny(loss__native_kl=1)
    policy, base, pairs = networks(config)
    assert any((pair.complex.S == X_ID).any() for pair in pairs)
    batch = make_batch(pairs, list(range(len(pairs))), config.loss, 0, 0)
    _, natives = decode_pairs(policy, base.graph(batch["complex_keys"]), batch)
    parameters = list(policy.parameters())
    divergence = native_kl(natives, base_natives(base, batch), batch)
    together = torch.autograd.grad(divergence.sum(), parameters)
    plain = sum(plain_native_term((policy, base.model), batch, pair, place)
                for place, pair in enumerate(pairs))
    for a, b in zip(together, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.norm()) + 1e-8)


def test_dropout_is_seeded_by_step_and_micro_batch_anew():
    dataset = MicroBatchDataset(demo_pairs(0, 1, 1), Config())
    seeds = {dataset[step, micro, 0, [0]]["seed"] for step in range(2) for micro in range(2)}
    assert len(seeds) == 4


@pytest.mark.parametrize("settings", [{}, {"loss__n_orders": 2, "loss__temperature": 0.5},
                                      {"loss__order": "arange", "loss__share_order": True}])
def test_validation_means_are_over_weighted_pairs_with_recovery_and_kl_on_natives(settings):
    """Of mixed batches, as if each sequence was scored alone."""
    config = tiny(**settings)
    policy, base, pairs = networks(config)
    run = run_of(config, policy, base, pairs)
    table = compute_base_scores(base, pairs, config, "pairs", Ddp())
    run.validation.base_scores = table
    values = validate(run, Ddp())
    expected, scores = (
        torch.tensor([[alone(model, p, S, decoding_orders(p, config.loss, 0),
                             config.loss.temperature)
                       for S in (p.chosen, p.rejected)] for p in pairs])
        for model in (base.model, policy))
    torch.testing.assert_close(table, expected, rtol=1e-5, atol=2e-4)
    rewards = 0.1 * (scores - table)
    margin = rewards[:, 0] - rewards[:, 1]
    for name, numbers in {"loss": torch.nn.functional.softplus(-margin),
                          "rewards/margins": margin, "rewards/accuracies": (margin > 0).float(),
                          "logps/rejected": scores[:, 1]}.items():
        mean = np.average(numbers.tolist(), weights=[pair.weight for pair in pairs])
        assert values[f"val/{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-4), name
    sums = torch.zeros(3)   # KL(policy | base), recovered, residues
    natives = native_pairs(pairs)
    for p in natives:
        (a, letters, weight), (b, _, _) = (
            everywhere(m, p, p.chosen, decoding_orders(p, config.loss, 0)[0])
            for m in (policy, base.model))
        each = (a.exp() * (a - b)).sum(-1), (a.argmax(-1) == letters).float(), torch.ones(len(a))
        sums += (torch.stack(each) @ weight).detach()
    kl, recovered = (sums[:2] / sums[2]).tolist()
    assert values["val/kl"] == pytest.approx(kl, rel=1e-3) and kl > 0.01 and policy.training
    assert values["val/recovery"] == pytest.approx(recovered) and recovered > 0
    run.model = run.bare = copy.deepcopy(base.model).train()
    assert validate(run, Ddp())["val/kl"] == pytest.approx(0, abs=1e-6)


# ---- one run on any number of ranks ----

def gradients_of(ddp, by_definition=False):
    """See training_runs.gradients, of micro-batches of different sizes and pairs with weights, in
    float64. By the definition: the mean over all pairs, each scored by itself."""
    config = tiny(loss__sft=0.3, loss__diversity_lambda=0.2, loss__n_orders=2, loss__native_kl=0.7,
                  loss__share_order=True)      # a sequence of several pairs is computed once
    policy, base, pairs = networks(config)
    policy = policy.double()
    base.model.double()
    run = run_of(config, policy, base, pairs)
    plan = Plan(pairs, 0, 4, config.training.batch_size)

    def loss_of(model, batch):
        return micro_batch_loss(model, batch, run, ddp)

    def whole(step):
        total = weights = 0.0
        without = replace(config, loss=replace(config.loss, native_kl=0))
        for _, _, epoch, indices in (plan.item_of(step, k) for k in range(4)):
            together = make_batch(pairs, indices, config.loss, 0, epoch)
            for place, i in enumerate(indices):
                batch = make_batch(pairs, [i], without.loss, 0, epoch)
                loss, _ = loss_of_pairs(policy, batch, base, without, ddp, torch.float32)
                kl = plain_native_term((policy, base.model), together, pairs[i], place)
                total = total + pairs[i].weight * (loss[0] + config.loss.native_kl * kl)
                weights = weights + pairs[i].weight
        return total / weights

    return gradients(policy, MicroBatchSampler(plan.item_of, 4, ddp, 0, 2),
                     MicroBatchDataset(pairs, config), loss_of, ddp,
                     whole if by_definition else None)


def test_any_number_of_ranks_makes_the_gradient_of_the_weighted_mean(tmp_path):
    expected = gradients_of(Ddp(), by_definition=True)
    for n in (3, 4):   # three share the micro-batches unevenly
        of_ranks = on_ranks(n, "test_train_dpo", "gradients_of(ddp)", tmp_path)
        for a, b in zip(of_ranks, expected, strict=True):
            for name in b:   # structures are kept in float32
                torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6 * b[name].norm())


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "mpich"])
def test_the_same_global_batch_gives_the_same_losses_and_metrics_under_any_launcher(
        launcher, tmp_path):
    need(launcher)
    settings = words({**TINY, "training.n_iters": 8, "training.eval_freq": 3, "model.dropout": 0.1,
                      "loss.diversity_lambda": 0.1})
    run(load_config(Config, None, [*settings, "training.accum=4"]), tmp_path / "one")
    done = run_ranks(launcher, 2, [SCRIPT, "--output_dir", "two", *settings,
                                   f"training.num_workers={int(launcher == 'torchrun')}"], tmp_path)
    assert done.returncode == 0 and not done.leftover, done.text
    assert done.stdout.count("step 8/8") == 1
    one = timeless(tmp_path / "one")
    other = timeless(tmp_path / "two")
    assert [row["step"] for row in other] == list(range(9))
    for a, b in zip(one, other):
        a.pop("epoch", None)
        assert [b[key] for key in a] == pytest.approx([*a.values()], rel=1e-4, abs=1e-5), a["step"]
    assert one[-1]["loss"] != pytest.approx(one[1]["loss"], rel=1e-2)   # something could differ
    ddp = {key: value for key, value in rows(tmp_path / "two")[1].items() if "ddp/" in key}
    assert ddp["ddp/world_size"] == 2 and ddp["ddp/effective_batch_size"] == 12


# ---- stop and go on ----

def test_each_pair_is_seen_once_an_epoch(tmp_path):
    run(tiny(training__n_iters=10), tmp_path)
    seen = {row["step"]: row.get("seen/pairs") for row in rows(tmp_path)}
    pairs = load_checkpoint(str(tmp_path / "checkpoints" / "last.pt"))["data"]["n"]
    assert (seen[5], seen[10]) == (pairs, 2 * pairs)   # at the ends of epochs of 5 steps


def test_a_resume_is_refused_for_other_pairs_or_base_weights_or_spoilt_ones(tmp_path):
    run(tiny(training__n_iters=2), tmp_path / "w")
    state = load_checkpoint(str(tmp_path / "w" / "checkpoints" / "last.pt"))
    spoilt = {**state["model"], "W_out.bias": torch.full((21,), math.nan)}
    for other, text in (
            ({**state, "base": "0"}, "base weights"),
            ({**state, "model": spoilt}, "W_out.bias"),
            ({**state, "data": {"n": 3, "hash": "0"}},
             "pairs.*--base_model_name .*latest_model.pt")):
        torch.save(other, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=text):
            run(tiny(), tmp_path / "new", resume=tmp_path / "other.pt")
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path, capsys):
    run(tiny(training__n_iters=5), tmp_path)
    first = capsys.readouterr().out
    run(tiny(training__n_iters=10), tmp_path)
    second = capsys.readouterr().out
    assert "step 0: validation" in first and "step 0: validation" not in second
    assert [row["step"] for row in rows(tmp_path)] == list(range(11))
    before = [line for line in (first + second).splitlines() if line.startswith("  before ")]
    assert len(before) == 2 and before[0] == before[1]


STILL_BASE = "best_model.pt is still the base weights, as no later evaluation was better"


def test_a_run_that_no_longer_improves_stops_early_and_keeps_the_base_weights(tmp_path, capsys):
    still = tiny(optim__lr=0, training__n_iters=50, training__eval_freq=2, training__patience=3)
    for said in ("Finished at step 5 (early stop)", "This run is finished: early stop at step 5"):
        assert run(still, tmp_path / "w")["step"] == 5   # evaluated at 2, 4, the epoch's end, 5
        text = capsys.readouterr().out
        assert said in text and f"weights   {tmp_path / 'w' / 'best_model.pt'}" in text
        assert STILL_BASE in " ".join(text.split()) and "latest_model.pt has step 5" in text
    assert all(row["loss"] == pytest.approx(math.log(2), abs=1e-5)
               for row in rows(tmp_path / "w")[1:])
    best = best_of(tmp_path / "w")
    assert best["step"] == 0
    assert equal(dict(best["model_state_dict"]), dict(random_proteinmpnn(0, **SIZES).state_dict()))


def test_without_validation_the_last_weights_are_the_only_result(tmp_path, capsys):
    run(tiny(data__val_fraction=0, training__n_iters=6), tmp_path)
    assert f"weights   {tmp_path / 'latest_model.pt'}\n" in capsys.readouterr().out
    assert not (tmp_path / "best_model.pt").exists()


def test_patience_without_validation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="training.patience=null"):
        run(tiny(data__val_fraction=0, training__patience=2), tmp_path)


def test_the_sums_of_an_epoch_begin_anew_with_the_next(tmp_path):
    run(tiny(training__n_iters=6, training__keep_last=2), tmp_path)
    saved = [load_checkpoint(str(tmp_path / "checkpoints" / name))
             for name in ("last-1.pt", "last.pt")]
    assert [(state["step"], any(state["epoch_sums"])) for state in saved] == [(5, False), (6, True)]


def test_a_run_saves_the_step_after_which_it_is_asked_to_stop(tmp_path, monkeypatch, capsys):
    """Before its first evaluation: its best weights are those of the start."""
    ready = prepare(tiny(), Ddp(), tmp_path)
    show = train_dpo_ddp.report_step

    def be_asked(*arguments):
        monkeypatch.setenv("DDP_DEADLINE", "1000000001")
        return show(*arguments)

    monkeypatch.setattr(train_dpo_ddp, "report_step", be_asked)
    train_ready("dpo", ready)
    assert load_checkpoint(str(tmp_path / "checkpoints" / "last.pt"))["step"] == 2
    said = " ".join(capsys.readouterr().out.split())
    assert STILL_BASE in said and "latest_model.pt has step 2" in said


def test_falling_chosen_sequences_are_warned_of_once_and_sft_holds_them(tmp_path, capsys):
    settings = dict(training__n_iters=10, optim__lr=2e-2)
    warning = "have become less likely"
    result = run(tiny(**settings), tmp_path / "plain")
    text = capsys.readouterr().out
    assert text.count(f"ATTENTION: chosen sequences {warning}") == 1 and "loss.sft" in text
    held = run(tiny(loss__sft=1, **settings), tmp_path / "sft")
    assert warning not in capsys.readouterr().out
    start = rows(tmp_path / "sft")[0]["val/logps/chosen"]
    assert result["val/logps/chosen"] < start < held["val/logps/chosen"]


# On rank 1 in steps 3 and 6 to 8. The first call lays out DDP's buckets.
NAN_LOSS = """
real, calls = script.micro_batch_loss, []
def micro_batch_loss(*arguments):
    loss, sums = real(*arguments)
    calls.append(1)
    bad = float("nan") if rank == 1 and len(calls) - 1 in (3, 6, 7, 8) else 1.0
    return loss * bad, sums * bad
script.micro_batch_loss = micro_batch_loss
"""


def test_a_nan_on_one_rank_is_skipped_by_all_and_too_many_in_a_row_end_the_run(tmp_path):
    settings = words(TINY, training__snapshot_freq=1, training__accum=1, training__keep_last=9,
                     training__max_bad_steps=2)
    result = fork_ranks(2, [driver(tmp_path, "train_dpo_ddp", NAN_LOSS), "--work_dir", "w",
                            *settings], tmp_path)
    assert "in 3 steps in a row" in result.stderr, result.text
    assert "a lower optim.lr" in result.stderr and "Traceback" not in result.stderr, result.text
    assert result.returncode == read_status(tmp_path / "w")["code"] == 1, result.text
    states = map(load_checkpoint, map(str, tmp_path.glob("w/checkpoints/last*.pt")))
    states = {state["step"]: state for state in states}
    assert [states[step]["bad_steps"] for step in range(1, 8)] == [
        [0, 0], [0, 0], [1, 1], [1, 0], [1, 0], [2, 1], [3, 2]] and len(states) == 7
    for key in ("model", "epoch_sums"):
        assert equal(states[3][key], states[2][key]) and not equal(states[4][key], states[3][key])
    assert equal(states[3]["optimizer"]["state"], states[2]["optimizer"]["state"])
    assert all(p.isfinite().all() for p in states[7]["model"].values())
    assert rows(tmp_path / "w")[3]["loss"] is None


def test_scores_under_the_reference_are_kept_for_orders_that_stay(tmp_path, capsys):
    def scores_were(folder, n_iters, words):
        run(tiny(loss__order="fixed", training__n_iters=n_iters), tmp_path / folder)
        said = " ".join(capsys.readouterr().out.split())    # lines are wrapped
        assert said.count(words) == 2   # for training and validation

    scores_were("straight", 4, "computed, kept in")
    scores_were("again", 2, "computed, kept in")
    scores_were("again", 3, "read from")
    for path in (tmp_path / "again" / "reference").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    scores_were("again", 4, "could not be used")
    one, other = (load_checkpoint(str(tmp_path / name / "checkpoints" / "last.pt"))
                  for name in ("straight", "again"))
    assert equal(one["model"], other["model"])
    assert timeless(tmp_path / "straight")[-1] == timeless(tmp_path / "again")[-1]


@torch.no_grad()
def test_the_unfolded_reference_scores_each_residue_alone():
    config = tiny(loss__reference="unfolded")
    _, base, pairs = networks(config)
    model = base.model
    one = torch.ones(1, 1, dtype=torch.int64)
    pairs = pairs[::4]
    for pair, scores in zip(pairs, compute_base_scores(base, pairs, config, "pairs", Ddp()),
                            strict=True):
        structure = pair.complex
        expected = [0.0, 0.0]
        for row in np.flatnonzero(pair.chain_M & structure.mask[:len(pair.chain_M)]):
            X = torch.from_numpy(structure.X[row])[None, None]
            graph = model.graph(X, one, one, one)
            log_probs = model(graph, one, one - 1)[0, 0]
            expected[0] += float(log_probs[pair.chosen[row]])
            expected[1] += float(log_probs[pair.rejected[row]])
        assert scores.tolist() == pytest.approx(expected, rel=1e-5)


def test_with_the_unfolded_reference_pairs_do_not_start_equal(tmp_path, capsys):
    run(tiny(loss__reference="unfolded", training__n_iters=1), tmp_path / "run")
    first = rows(tmp_path / "run")[0]
    assert abs(first["val/loss"] - math.log(2)) > 1e-3
    assert "are equal" not in capsys.readouterr().out


def test_a_loss_without_a_reference_trains_without_one(tmp_path, capsys):
    run(tiny(loss__name="simpo", loss__beta=2), tmp_path / "w")
    said = capsys.readouterr().out
    assert "step 0: validation loss" in said and "reference are equal" not in said
    assert rows(tmp_path / "w")[-1]["val/loss"] < rows(tmp_path / "w")[0]["val/loss"]
    assert not (tmp_path / "w" / "reference").exists()


def test_little_room_for_graphs_makes_them_anew_and_changes_nothing(tmp_path, monkeypatch):
    made = []
    graph = ProteinMPNN.graph

    def counted_graph(*values, **named):
        made.append("graph")
        return graph(*values, **named)

    monkeypatch.setattr(ProteinMPNN, "graph", counted_graph)
    run(tiny(), tmp_path / "a")
    n_with_room = len(made)
    monkeypatch.setattr(dpo.reference, "MOST_KEPT", 0)
    run(tiny(), tmp_path / "little")
    assert len(made) > 3 * n_with_room, "graphs are made anew"
    same_run(tmp_path / "a", tmp_path / "little")


def test_mixed_precision_changes_the_steps_little_and_not_step_0(tmp_path, capsys):
    run(tiny(), tmp_path / "a")
    run(tiny(memory__mixed_precision="bfloat16"), tmp_path / "b")
    assert "bfloat16 (asked for" in capsys.readouterr().out
    a = rows(tmp_path / "a")
    b = rows(tmp_path / "b")
    assert a[0] == b[0] and a[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    evaluated = [[row["val/loss"] for row in table if "val/loss" in row] for table in (a, b)]
    assert a[5]["loss"] != b[5]["loss"] and evaluated[0] == pytest.approx(evaluated[1], abs=0.05)


# ---- the demo, and real proteins ----

@pytest.mark.slow
def test_the_demo_learns_its_rule_and_says_what_it_does(tmp_path):
    result = fork_ranks(2, [SCRIPT, "--config", DEMO], tmp_path)
    folder = tmp_path / "runs/dpo_demo"
    assert result.returncode == 0, result.text
    text = result.stdout
    for said in ("RANDOM weights from seed 0: for demonstrations and tests only",
                 "16 pairs x accum 1 x 2 rank(s) = 32 per step",
                 "step 0: validation loss 0.6931 (policy and", "epoch 5/5: train loss"):
        assert text.count(said) == 1, said
    step_line = r"^step 10/60  loss \d\S*  acc \d\S*  margin \S+  \d\S* pairs/s  ETA 0:\S+$"
    assert re.search(step_line, text, re.M)
    table = rows(folder)
    assert table[-1]["val/rewards/accuracies"] > 0.9
    assert table[-1]["val/loss"] < 0.2 < 0.69 < table[0]["val/loss"]
    assert table[0]["val/rewards/margins"] == 0 == table[0]["val/kl"]
    for key in ("loss", "rewards/accuracies", "logps/chosen", "logps/rejected"):
        assert key in table[-1] and f"val/{key}" in table[-1]
    chosen = table[-1]["rewards/chosen"]
    rejected = table[-1]["rewards/rejected"]
    assert table[-1]["rewards/margins"] == pytest.approx(chosen - rejected)
    assert {"grad_norm", "lr", "val/recovery", "entropy"} <= table[-1].keys()
    assert read_status(folder)["code"] == 0


def every_fourth_of_each_structure(path, folder):
    """Write a file of pairs of these into `folder`, all of structures with few; returns its path.
    Of every way to name chains and positions some are left."""
    entries = json.loads(path.read_text())
    of_structure = [entry["pdb_file"] for entry in entries]
    kept = [{**entry, "pdb_file": str(path.parent / entry["pdb_file"])}
            for i, entry in enumerate(entries)
            if i % 4 == 0 or of_structure.count(entry["pdb_file"]) < 10]
    (folder / "some.json").write_text(json.dumps(kept))
    return folder / "some.json"


@pytest.mark.slow
@pytest.mark.parametrize("data, more", [
    ("pairs_monomer.json", []), ("pairs_multichain.json", ["loss.order=fixed"])])
def test_real_pairs_are_learned_into_a_file_like_the_published(shared, tmp_path, data, more):
    fixture = torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)
    published = fixture["checkpoint_official"]
    torch.save(published, tmp_path / "v_48_020.pt")
    pairs = every_fourth_of_each_structure(shared / "data" / data, tmp_path)
    argv = ["--train_data", pairs, "--output_dir", "out", "--base_model_dir", ".", "--lr", "2e-5",
            "--batch_size", "2", "--num_epochs", "2", "optim.warmup=0", "training.log_freq=1",
            *more]
    done = fork_ranks(2, [SCRIPT, *argv], tmp_path, timeout=900)
    assert done.returncode == 0, done.text
    base, first, *_, last = rows(tmp_path / "out")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert base["val/rewards/accuracies"] == 0 and last["val/rewards/accuracies"] > 0.9
    assert last["loss"] < 0.5 and last["val/loss"] < 0.6
    found = best_of(tmp_path / "out")
    ours, theirs = (file["model_state_dict"] for file in (found, published))
    assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
        key: (value.shape, torch.float32) for key, value in theirs.items()}
    # The margin of a pair, from the two files alone.
    pair = min(read_pairs(pairs), key=lambda pair: len(pair.complex))
    h = [alone(from_checkpoint(file).eval(), pair, S, decoding_orders(pair, Loss(), 0))
         for file in (found, published) for S in (pair.chosen, pair.rejected)]
    assert (h[0] - h[1]) - (h[2] - h[3]) > 1


# ---- config and command line ----

def test_options_of_the_original_set_what_they_say():
    argv = ("--train_data a.json --val_data b.json --output_dir out --batch_size 16 --num_epochs "
            "7 --learning_rate 1e-4 --beta 0.5 --temperature 0.1 --base_model_name v_48_010 "
            "--base_model_dir w --backend gloo --no_cuda --weight_decay 0.01 --num_workers 2 "
            "--max_length 500 --diversity_lambda 0.05 --mutable_positions A12 A15 "
            "--base_model_config_dir cfg loss.name=hinge").split()
    args, c = read_arguments(argv)
    assert c == load_config(Config, None, [
        "data.train_data=a.json", "data.val_data=b.json", "data.max_length=500",
        "data.mutable_positions=A12 A15", "training.batch_size=16", "training.num_epochs=7",
        "training.num_workers=2", "optim.lr=1e-4", "optim.weight_decay=0.01", "loss.name=hinge",
        "loss.beta=0.5", "loss.temperature=0.1", "loss.diversity_lambda=0.05",
        "model.base_model_name=v_48_010", "model.base_model_dir=w"])
    assert args.work_dir == "out" and args.no_cuda and args.backend == "gloo"
    _, c = read_arguments(["--train_data", "a", "--mutable_ranges", "0-5", "9-12", "optim.lr=1",
                           "--lr", "3"])
    assert c.data.mutable_ranges == "0-5 9-12" and c.optim.lr == 3
    assert (c.loss.beta, c.loss.temperature, c.model.dropout) == (0.1, 1.0, 0.0)


def test_pairs_of_several_files_are_those_of_one_file_that_holds_all(files):
    entries = json.loads((files / "pairs.json").read_text())
    for name, part in (("one", entries[:2]), ("two", entries[2:])):
        (files / f"{name}.json").write_text(json.dumps(part))
    fingerprints = []
    for names in (["pairs.json"], ["one.json", "two.json"]):
        paths = [str(files / name) for name in names]
        _, config = read_arguments(["--train_data", *paths, "--val_data", *paths])
        data = load_data(config)
        fingerprints.append(data.fingerprint)
        assert f"data: {', '.join(paths)}: 6 pairs on 3 structures" in data.description[0]
    assert fingerprints[0] == fingerprints[1]


def test_weights_hold_a_record_of_their_training(files, monkeypatch):
    monkeypatch.chdir(files)
    settings = {**TINY, "data.train_data": "pairs.json", "training.n_iters": 1,
                "training.accum": 1, "model.base_model_dir": "w",
                "model.base_model_name": "v_48_020"}
    settings = {name: value for name, value in settings.items() if "random" not in name}
    for reference, more in (("unfolded", {}), ("none", {"loss.name": "simpo"})):
        if reference != "none":
            more = {"loss.reference": reference}
        run(load_config(Config, None, words({**settings, **more})), files / "runs" / reference)
        content = torch.load(f"runs/{reference}/latest_model.pt", weights_only=True)
        base = load_proteinmpnn("w/v_48_020.pt")
        assert content["training_record"] == {
            "base": "v_48_020", "base_file": "../../w/v_48_020.pt", "unit": "pair",
            "base_hash": hash_of(base.state_dict()), "reference": reference}
        assert best_of(files / "runs" / reference).keys() == content.keys()


def test_the_record_of_weights_tuned_twice_names_the_last_base(files, monkeypatch):
    monkeypatch.chdir(files)
    settings = {"data.train_data": "pairs.json", "training.n_iters": 1, "optim.lr": 1e-2,
                "loss.reference": "unfolded", "data.val_fraction": 0}
    first = {"model.base_model_dir": "w", "model.base_model_name": "v_48_020"}
    run(load_config(Config, None, words({**settings, **first})), files / "one")
    second = {"model.base_model_name": "one/latest_model.pt"}
    run(load_config(Config, None, words({**settings, **second})), files / "two")
    path = files / "two" / "latest_model.pt"
    record = read_record(torch.load(path, weights_only=True), path)
    assert record.base == "one/latest_model.pt"
    name, model = find_base(record, path)
    assert name == "one/latest_model.pt"
    assert hash_of(model.state_dict()) == record.base_hash


@pytest.mark.parametrize("more, warns", [({}, True), ({"loss.reference": "unfolded"}, False)])
def test_a_table_is_trained_with_the_reference_that_the_base_weights_had(
        more, warns, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    content = torch.load("w/v_48_020.pt", weights_only=True)
    record = TrainingRecord("v_48_010", "", "hash", "unfolded", "table")
    torch.save({**content, "training_record": record._asdict()}, "tuned.pt")
    letter = decode(Complex(read_structure("s0.pdb"), ["A"], []).S)[0]
    others = [other for other in "ACD" if other != letter]
    (files / "t.csv").write_text("pdb_file,mutation,y\n" + "".join(
        f"s0.pdb,{letter}1{other},{k}\n" for k, other in enumerate(others)))
    settings = {"data.train_data": "t.csv", "data.val_fraction": 0, "loss.unit": "table",
                "table.measured": "y", "table.better": "higher", "training.batch_size": 1,
                "model.base_model_name": "tuned.pt", **more}
    prepare(load_config(Config, None, words(settings)), Ddp(), "run")
    said = " ".join(capsys.readouterr().out.split())
    assert ("were trained with loss.reference unfolded" in said) == warns


def test_the_plan_scales_the_learning_rate_and_needs_no_pairs():
    args, c = read_arguments("--plan 1,4 training.batch_size=4 optim.lr=3e-7 optim.scale=linear "
                             "optim.base_global_batch=4 optim.warmup=10".split())
    assert re.search(r"\n +4 +16 +1.2e-06 +40\n", describe_plan(c, args.plan))


def memory_of(*argv):
    """GB that a plan says, the first number of its last line."""
    _, config = read_arguments(["--plan", "1", *map(str, argv)])
    line = describe_plan(config, "1").splitlines()[-1]
    return float(re.search(r"([\d.]+) GB", line)[1])


def test_the_plan_has_the_memory_by_the_data_if_they_are_here(files):
    """An encoding of 100 residues is 3 MB; a pair is two sequences."""
    pairs = ["--train_data", files / "pairs.json", "--base_model_dir", files / "w"]
    few = memory_of(*pairs, "training.batch_size=1")
    assert memory_of(*pairs, "training.batch_size=6") > few > 0.2
    absent = ["--train_data", files / "none.json", "--base_model_dir", files / "w"]
    assert memory_of(*absent, "training.batch_size=64") > memory_of(*absent) > 0.2
    assert memory_of("--train_data", files / "none.csv", "loss.unit=table", "table.measured=y",
                     "table.better=lower", "training.batch_size=1") > 0.2


@pytest.mark.parametrize("n_iters, said, not_said", [
    (10, "the warm-up (20 steps) is not shorter than the run (10 steps)", "linear decay over"),
    (30, "linear decay over all steps after the warm-up", "is not shorter")])
def test_a_warm_up_that_is_not_shorter_than_the_run_is_said(
        n_iters, said, not_said, tmp_path, capsys):
    """With the highest rate that the run comes to: half of 3e-3."""
    prepare(tiny(training__n_iters=n_iters, optim__warmup=20, optim__decay="linear"), Ddp(),
            tmp_path / "run")
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and not_said not in text
    assert ("learning rate is 0.0015 at most" in text) == (n_iters == 10)


def test_the_plan_scales_the_rate_in_which_the_decay_ends():
    args, c = read_arguments("--plan 4 training.batch_size=4 optim.lr=3e-7 optim.scale=linear "
                             "optim.base_global_batch=4 optim.warmup=10 optim.decay=wsd "
                             "optim.min_lr=3e-8".split())
    text = describe_plan(c, args.plan)
    assert "wsd decay over the last 20% of the steps, to 3e-08\n" in text
    assert re.search(r"learning rate +min_lr .*\n +4 +16 +1.2e-06 +1.2e-07 +40\n", text)


@pytest.fixture
def files(tmp_path):
    """A folder with pairs.json and base weights."""
    write_pairs(tmp_path)
    (tmp_path / "w").mkdir()
    torch.save(to_checkpoint(random_proteinmpnn(0, noise_level=0.2, **SIZES)),
               tmp_path / "w" / "v_48_020.pt")
    return tmp_path


USUAL = "--train_data pairs.json --base_model_dir w --output_dir new --num_epochs 1"


def test_runs_from_files_as_the_original_was_called_and_with_positions_on_the_command_line(files):
    entries = json.loads((files / "pairs.json").read_text())
    for entry in entries:
        entry["unpreferred_seq"] = entry["preferred_seq"][:4] + "GGGGG" + entry["preferred_seq"][9:]
    (files / "few.json").write_text(json.dumps(entries))
    few = "--train_data few.json --base_model_dir w --num_epochs 1"
    plain, again, by_number, by_index = [run_tool(main, line, files) for line in (
        "--train_data pairs.json --base_model_dir w --num_epochs 2 --lr 1e-3 --no_cuda "
        "--batch_size 2 --output_dir out --base_model_config_dir cfg",
        "--train_data few.json --num_epochs 1 --base_model_name out/best_model.pt "
        "--work_dir again",   # from the weights of a former run
        f"{few} --output_dir a --mutable_positions A5-A9",
        f"{few} --output_dir b --mutable_ranges 4-8 optim.lr=3e-6")]
    assert plain.code == 0 and "--base_model_config_dir cfg is ignored" in plain.out, plain.text
    for said in ("6 pairs on 3 structures", "4 pairs for training, 2 of other families (of ",
                 "v_48_020.pt, trained with 0.2 Angstrom of noise"):
        assert said in plain.out
    model = load_proteinmpnn(files / "out" / "latest_model.pt")
    assert model.noise_level == 0.2 and model.num_edges == 8
    best = load_proteinmpnn(files / "out" / "best_model.pt")
    state = load_checkpoint(str(files / "again" / "checkpoints" / "last.pt"))
    assert again.code == 0 and state["base"] == hash_of(best.state_dict())
    assert "5 positions by chain and number in the file: A5-A9" in Printed(by_number.out)
    assert by_index.code == 0 and rows(files / "a")[0] == rows(files / "b")[0]
    first = rows(files / "a")[0]
    assert -5 * 6 < first["val/logps/chosen"] < -5   # of 5 residues, not of 30
    assert first["val/logps/chosen_per_residue"] == pytest.approx(first["val/logps/chosen"] / 5)


def test_equal_weights_score_peptides_alike_to_the_last_bit(tmp_path):
    write_pairs(tmp_path, 3)
    pairs = tmp_path / "pairs.json"
    run(load_config(Config, None, [
        f"data.train_data={pairs}", f"data.val_data={pairs}", "model.base_model_name=random",
        "training.batch_size=4", "training.n_iters=1", "loss.order=fixed"]), tmp_path / "out")
    assert rows(tmp_path / "out")[0]["val/rewards/accuracies"] == 0


@pytest.mark.parametrize("line, named", [
    ("--output_dir new", "data.train_data"),
    ("--output_dir new data.train_data=\"''\"", "data.train_data"),
    (f"{USUAL} --mutable_ranges training.accum=2", "data.mutable_ranges"),
    (f"{USUAL} --beta 1e-300", "loss.beta 1e-300"),
    (f"{USUAL} training.n_iters=4", "--num_epochs 1 training.n_iters 4"),
    (f"{USUAL} loss.label_smoothing=0.2", "loss.label_smoothing sigmoid robust conservative"),
    (f"{USUAL} loss.name=simpo loss.reference=unfolded", "simpo loss.reference unfolded"),
    (f"{USUAL} model.random.hidden_size=64", "model.random"),
    (f"{USUAL} --train_data short.json --val_data none.json --base_model_name v_48_031",
     "short.json 0 none.json w/v_48_031.pt --base_model_dir"),   # all at once
    (f"{USUAL} --train_data one.json", "--val_data"),
    (f"{USUAL} training.accum=9", "9"),
    (f"{USUAL} --no_cuda --device cuda", "--no_cuda --device cuda")])
def test_input_that_cannot_be_used_is_refused_and_writes_nothing(line, named, files):
    entries = json.loads((files / "pairs.json").read_text())
    (files / "short.json").write_text(json.dumps([{**entries[0], "preferred_seq": "ACD"}]))
    (files / "one.json").write_text(json.dumps(entries[:1]))
    assert_refused(main, line, named, files)


def test_two_ranks_refuse_files_that_differ(files):
    entries = json.loads((files / "pairs.json").read_text())
    for rank, own in enumerate((entries, entries[::-1])):
        (files / f"pairs{rank}.json").write_text(json.dumps(own))
        (files / f"w{rank}").mkdir()
        torch.save(to_checkpoint(random_proteinmpnn(rank, **SIZES)),
                   files / f"w{rank}" / "v_48_020.pt")
    script = driver(files, "train_dpo_ddp", """
sys.argv += ["--train_data", f"pairs{rank}.json", "--base_model_dir", f"w{rank}"]
""")
    before = sorted(files.rglob("*"))
    done = fork_ranks(2, [script], files)
    said = r'rank 1 on \S+ has pairs \(hash\) "\w+" \(rank 0: "\w+"\), base weights \(hash\) "'
    found = re.findall(said, " ".join(done.stderr.split()))
    assert done.returncode == 2 and len(found) == 1, done.text
    assert "Traceback" not in done.text and sorted(files.rglob("*")) == before
