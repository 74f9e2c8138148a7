"""Does train_dpo_ddp.py train the right thing on any number of ranks, stop, go on and refuse?

Runs under launchers import torch in every rank (seconds); where the launcher does not matter, ranks
are forked.
"""

import copy
import json
import math
import re
import shlex
import shutil

import numpy as np
import pytest
import torch

import bench_ddp
import train_dpo_ddp
from ddp_setup import Ddp, load_checkpoint
from dpo_designs import Designs
from launchers import fork_ranks, need, run_ranks
from proteinmpnn_model import (ALPHABET, from_checkpoint, load_proteinmpnn, random_proteinmpnn,
                               to_checkpoint)
from run_config import dump_yaml, load_config
from run_dir import hash_of, read_status
from sequence_data import decode
from structure_data import (NAMES, Chain, Complex, Pair, PairPlan, Structure, demo_pairs,
                            read_pairs)
from test_proteinmpnn_model import graph_of, plain_log_probs
from test_structure_data import Atoms
from dpo_reference import Reference, make_batch, orders_of, pair_scores
from dpo_eval import SUMS, Validation
from train_dpo_ddp import (Config, Loss, MicroBatches, check_config, describe_plan, main,
                           micro_batch_loss, objective, preference_loss, read_arguments)
from train_loop import MicroBatchSampler, global_gradient
from training import (  # noqa: F401 (the fixture one_thread)
    CLOCK, ROOT, command_lines, equal, one_thread, rows, same_run, timeless, words)

SCRIPT, DEMO = ROOT / "train_dpo_ddp.py", ROOT / "configs" / "dpo_demo.yaml"
SMALL = {"hidden_size": 16, "n_encoder": 1, "n_decoder": 1, "num_edges": 8}
TINY = {"training.batch_size": 3, "training.accum": 2, "training.n_iters": 12,
        "training.log_freq": 1, "optim.lr": 3e-3, "optim.warmup": 3,
        "model.base_model_name": "random", "data.demo_structures": 6, "data.demo_pairs": 5,
        **{f"model.random.{k}": v for k, v in SMALL.items()}}

def tiny(**more):
    return load_config(Config, None, words(TINY, **more))


def run(config, work_dir, **options):
    return main(config, Ddp(), work_dir, **options)


def best_of(work_dir):
    return torch.load(work_dir / "best_model.pt", weights_only=True)


# ---- losses ----

@pytest.fixture(scope="module")
def official(shared):
    fixture = torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)
    return fixture["cases"], {name: from_checkpoint(fixture[f"checkpoint_{name}"]).eval()
                              for name in ("official", "official_policy", "small", "small_policy")}


def batch_of(inputs, order):
    """The pair of a fixture, as make_batch lays it out."""
    weight = inputs["mask"] * inputs["chain_M_full"]
    return {"S": torch.cat([inputs["S_chosen"], inputs["S_rejected"]]),
            "order": order.expand(2, -1), "scored": weight, "n_scored": weight.sum(1),
            "complex_row": torch.zeros(2, dtype=torch.int64),
            "sequence_rows": torch.tensor([[[0, 1]]])}


def scored(model, inputs, batch):
    return model(graph_of(model, inputs), batch["S"], batch["order"], batch["complex_row"])


FIXTURE_NAMES = {
    "sigmoid": {}, "hinge": {}, "ipo": {"fixture": "ipo_sum"}, "ipo_norm": {"fixture": "ipo_mean"},
    "conservative": {"fixture": "conservative_ls0p1"}, "robust": {"fixture": "robust_ls0p1"},
    "sigmoid_norm": {}, "reference_free": {}, "simpo": {"fixture": "simpo_b2_g0p5", "beta": 2.0}}


@pytest.mark.parametrize("case", ["monomer_official", "monomer_small", "complex_small",
                                  "peptide_small", "odd_pdb_small"])
@torch.no_grad()
def test_losses_and_rewards_have_the_values_of_the_official_model(official, case):
    case, models = official[0][case], official[1]
    batch = batch_of(case["inputs"], case["inputs"]["decoding_order"])
    policy, reference = (scored(models[case["model"] + end], case["inputs"], batch)
                         for end in ("_policy", ""))
    reference = pair_scores(reference, batch, 1)[0]
    for name, more in FIXTURE_NAMES.items():
        loss = Loss(name=name, beta=more.get("beta", 0.1))
        values, columns = objective(policy, batch, reference, loss)
        expected = case["dpo"]["losses"][more.get("fixture", name)]
        tolerance = dict(rtol=1e-3, atol=0) if name == "ipo" else dict(rtol=0, atol=3e-4)
        torch.testing.assert_close(values, expected, **tolerance)
        if name == "sigmoid":
            near = {"loss": 1e-4, "rewards_chosen": 3e-4, "rewards_rejected": 3e-4,
                    "policy_chosen_logps": 2e-3, "policy_rejected_logps": 2e-3, "n_scored": 0}
            for k, (key, atol) in zip((0, 2, 3, 5, 6, 8), near.items()):
                assert columns[0, k].item() == pytest.approx(case["dpo"][key].item(), abs=atol), key


@pytest.mark.parametrize("case", ["monomer_official", "monomer_small", "peptide_small"])
@pytest.mark.parametrize("name, temperature", [("T0p1", 0.1), ("T1p0", 1.0)])
def test_loss_and_gradient_in_order_are_those_of_the_original(official, case, name, temperature):
    case, models = official[0][case], official[1]
    policy, reference = copy.deepcopy(models[case["model"] + "_policy"]), models[case["model"]]
    batch, T = batch_of(case["inputs"],
                        torch.arange(case["inputs"]["S"].shape[1])[None]), temperature
    # The original adds 1e-20 to probabilities, which some reach at temperature 0.1: undone here, as
    # ours does not.
    def floor(log_probs):
        return T * ((log_probs / T).softmax(-1) + 1e-20).log()

    with torch.no_grad():
        ref = pair_scores(floor(scored(reference, case["inputs"], batch)), batch, T)[0]
    value = objective(floor(scored(policy, case["inputs"], batch)), batch, ref,
                      Loss(temperature=T))[0].mean()
    value.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    torch.testing.assert_close(value.detach(), case["invfold"][f"loss_{name}"].float(), rtol=2e-3,
                               atol=1e-5)
    torch.testing.assert_close(norm.float(), case["invfold"][f"grad_norm_{name}"].float(),
                               rtol=2e-3, atol=1e-5)


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


def test_sft_adds_the_mean_negative_log_probability_and_diversity_takes_off_the_mean_entropy():
    p = torch.full((1, 4, 21), 0.1 / 19).double()
    p[..., 0], p[..., 1] = 0.6, 0.3   # chosen AAAA, rejected CCCC, under any order
    S = torch.tensor([[0] * 4, [1] * 4])
    weight = torch.tensor([[1.0, 1, 0, 1]]).double()
    batch = {"S": S, "scored": weight, "n_scored": weight.sum(1),
             "sequence_rows": torch.tensor([[[0, 1]]])}
    entropy = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1 / 19))
    loss, reference = Loss(sft=2.0, diversity_lambda=0.5), torch.zeros(1, 2).double()
    log_probs = p.log().repeat(2, 1, 1).requires_grad_()
    value, columns = objective(log_probs, batch, reference, loss)
    assert torch.autograd.gradcheck(lambda x: objective(x, batch, reference, loss)[0], log_probs)
    sigmoid = math.log(1 + math.exp(-0.1 * 3 * (math.log(0.6) - math.log(0.3))))
    assert columns[0, 1].item() == pytest.approx(sigmoid)
    assert value.item() == pytest.approx(sigmoid - 2 * math.log(0.6) - 0.5 * entropy)
    assert columns[0, 4] == 1 and columns[0, 5].item() == pytest.approx(3 * math.log(0.6))


# ---- batches and orders ----

def small_pairs():
    """Pairs of different lengths; some with fixed positions, unresolved rows, a context chain."""
    out, random, complexes = [], np.random.default_rng(0), {}
    pairs = demo_pairs(seed=3, n_structures=4, pairs_per_structure=4)
    # not ideal backbones: there, neighbours lie at equal distances
    for i, pair in enumerate(pairs):
        chain = pair.complex.structure.chains["A"]
        if i % 4 == 0:
            X = chain.X + random.normal(0, 0.3, chain.X.shape).astype(np.float32)
            structure = Structure(f"s{i}", {"A": Chain(chain.S, X, chain.resolved, chain.numbers)})
            complexes[i // 4] = Complex(structure, ["A"])
        pair = pairs[i] = Pair(complexes[i // 4], pair.chosen, pair.rejected, pair.chain_M)
        if i % 4 == 1:
            mask = random.random(len(pair.chain_M)) < 0.5
            pair = Pair(pair.complex, np.where(mask, pair.chosen, pair.rejected), pair.rejected,
                        mask)
        out.append(pair)
    chain, other = pairs[0].complex.structure.chains["A"], pairs[4].complex.structure.chains["A"]
    resolved = np.arange(len(chain.S)) % 7 != 3
    chains = {"A": Chain(chain.S, chain.X, resolved, chain.numbers),
              "B": Chain(other.S, other.X + np.float32(20), other.resolved, other.numbers)}
    complex = Complex(Structure("two", chains), ["A"], ["B"])
    return out + [Pair(complex, pair.chosen, pair.rejected, pair.chain_M) for pair in pairs[:3]]


def test_orders_put_fixed_residues_first_and_are_keyed_by_seed_pair_and_epoch():
    pairs, loss = small_pairs(), Loss(n_orders=3)
    for pair in pairs:
        n, L = len(pair.chain_M), len(pair.complex)
        designed = np.concatenate([pair.chain_M & pair.complex.mask[:n], np.zeros(L - n, bool)])
        for order in orders_of(pair, loss, 0, 0).tolist():
            assert sorted(order) == list(range(L))
            assert not designed[order[:L - designed.sum()]].any()
        arange = orders_of(pair, Loss(order="arange"), 0, 5)
        assert arange.tolist() == [np.flatnonzero(~designed).tolist()
                                   + np.flatnonzero(designed).tolist()]

    def get(pair=pairs[0], seed=0, epoch=0, **more):
        return orders_of(pair, Loss(**more), seed, epoch).tolist()

    assert get() == get() and len({str(get(n_orders=4)[k]) for k in range(4)}) == 4
    assert get() != get(epoch=1) and get() != get(seed=1) and get() != get(pair=pairs[2])
    assert get(order="fixed") == get(order="fixed", epoch=1) != get(order="fixed", seed=1)
    assert orders_of(pairs[0], Loss(), 0).tolist() == get(order="fixed")   # in evaluations
    shared = [get(pair=pair, share_order=True) for pair in pairs[:4]]
    # the second has other designed positions
    assert shared[0] == shared[2] == shared[3] != shared[1]


def test_a_batch_scores_each_distinct_sequence_once_and_only_designed_resolved_residues():
    pairs = small_pairs()
    base = pairs[0]
    again = Pair(base.complex, base.chosen, pairs[2].rejected, base.chain_M)
    some = [base, again, pairs[1], pairs[16]]
    batch = make_batch(some, [0, 1, 2, 3], Loss(order="arange"), 0)
    assert len(batch["S"]) == 7   # 8, but the chosen of two pairs is one
    assert batch["sequence_rows"][0, 0, 0] == batch["sequence_rows"][1, 0, 0]
    assert len(make_batch(some, [0, 1, 2, 3], Loss(), 0, 0)["S"]) == 8     # its orders differ
    assert len(make_batch(some, [0, 1, 2, 3], Loss(share_order=True), 0, 0)["S"]) == 7
    for p, pair in enumerate(some):
        n = len(pair.chain_M)
        expected = np.zeros(batch["S"].shape[1])
        expected[:n] = pair.chain_M & pair.complex.mask[:n]
        assert batch["scored"][p].tolist() == expected.tolist()
        assert batch["n_scored"][p] == expected.sum()
        for side, letters in enumerate((pair.chosen, pair.rejected)):
            row = batch["sequence_rows"][p, 0, side]
            assert batch["S"][row, :n].tolist() == letters.tolist()
            # context: native
            assert batch["S"][row, n:len(pair.complex)].tolist() == pair.complex.S[n:].tolist()


def sizes(config):
    """(policy, Reference, pairs) of small_pairs; the policy differs everywhere."""
    pairs, model = small_pairs(), random_proteinmpnn(1, **SMALL)
    policy, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return policy, Reference(model, pairs, config, Ddp()), pairs


@torch.no_grad()
def alone(model, pair, S, orders, temperature=1.0, plain=False):
    """log p(S) of one pair scored by itself, averaged over orders. plain: by the formulas as they
    are written down."""
    total = 0.0
    for order in orders:
        log_probs, letters, weight = everywhere(model, pair, S, order, plain)
        log_probs = torch.log_softmax(log_probs / temperature, -1)
        total += float((log_probs.gather(-1, letters[:, None])[:, 0] * weight).sum())
    return total / len(orders)


def everywhere(model, pair, S, order, plain=False):
    """(log-probabilities (L, 21), letters (L,), weight (L,), 1 = scored) of a sequence S of a pair
    under an order."""
    c = pair.complex
    letters = torch.from_numpy(np.concatenate([S, c.S[len(S):]]).astype(np.int64))
    X, mask, residue_idx, chain_id = (torch.from_numpy(np.asarray(x)) for x in (
        c.X, c.mask.astype(np.float32), c.residue_idx, c.chain_id))
    weight = torch.zeros(len(c))
    weight[:len(S)] = torch.from_numpy(pair.chain_M & c.mask[:len(S)]).float()
    if plain:
        found = plain_log_probs(model, X, mask, residue_idx, chain_id, letters, order)
        return found, letters, weight
    graph = model.graph(X[None], mask[None], residue_idx[None], chain_id[None])
    return model(graph, letters[None], order[None])[0], letters, weight


@pytest.mark.parametrize("settings", [{}, {"n_orders": 2, "temperature": 0.5}, {"order": "arange"},
                                      {"share_order": True}])
@torch.no_grad()
def test_scores_of_mixed_batches_are_those_of_each_sequence_alone(settings):
    config = tiny()
    config.loss = Loss(**settings)
    policy, reference, pairs = sizes(config)
    chosen = [0, 2, 1, 6, 16, 17]
    batch = reference.to_device(make_batch(pairs, chosen, config.loss, 7, 3))
    found = pair_scores(policy(batch["graph"], batch["S"], batch["order"], batch["complex_row"]),
                        batch, config.loss.temperature)[0]
    for scores, model in ((found, policy), (reference.scores(batch), reference.model)):
        expected = [[alone(model, pairs[i], S, orders_of(pairs[i], config.loss, 7, 3),
                           config.loss.temperature) for S in (pairs[i].chosen, pairs[i].rejected)]
                    for i in chosen]
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=2e-4)


def test_validation_means_are_over_pairs_each_once_with_recovery_and_kl_on_natives(tmp_path):
    config = tiny()
    policy, reference, pairs = sizes(config)
    v = Validation(pairs, reference, config, objective)
    v.table, _ = reference.precompute(pairs, "hash", tmp_path)
    found = v(policy, Ddp())
    base, scores = (torch.tensor([[alone(model, p, S, orders_of(p, config.loss, 0))
                                   for S in (p.chosen, p.rejected)] for p in pairs])
                    for model in (reference.model, policy))
    torch.testing.assert_close(v.table, base, rtol=1e-5, atol=2e-4)
    rewards = 0.1 * (scores - v.table)
    margin = rewards[:, 0] - rewards[:, 1]
    assert found["val/loss"] == pytest.approx(float(torch.nn.functional.softplus(-margin).mean()),
                                              rel=1e-4)
    assert found["val/rewards/accuracies"] == pytest.approx(float((margin > 0).float().mean()))
    assert found["val/rewards/margins"] == pytest.approx(float(margin.mean()), abs=1e-4)
    assert found["val/logps/rejected"] == pytest.approx(float(scores[:, 1].mean()), rel=1e-5)
    sums = torch.zeros(4)   # KL(policy | reference), the reverse, recovered, residues
    for p in v.natives:
        order = orders_of(p, config.loss, 0)[0]
        (a, letters, weight), (b, _, _) = (everywhere(m, p, p.chosen, order)
                                           for m in (policy, reference.model))
        each = ((a.exp() * (a - b)).sum(-1), (b.exp() * (b - a)).sum(-1), a.argmax(-1) == letters,
                torch.ones(len(a)))
        sums += torch.stack([(x * weight).sum() for x in each]).detach()
    kl, reverse, recovered = (sums[:3] / sums[3]).tolist()
    assert found["val/kl"] == pytest.approx(kl, rel=1e-3) and kl != pytest.approx(reverse, rel=1e-2)
    assert found["val/recovery"] == pytest.approx(recovered) and recovered > 0 and policy.training
    assert v(copy.deepcopy(reference.model).train(), Ddp())["val/kl"] == pytest.approx(0, abs=1e-6)
    assert len(v.natives) == len({(p.complex.key, p.chain_M.tobytes()) for p in pairs})


# ---- designs ----

def designs_of(ddp, only=None):
    """(Designs of small_pairs, or of one of them, letters that the policy draws)."""
    config = tiny(monitoring__n_designs=3, monitoring__design_temperature=0.5)
    policy, reference, pairs = sizes(config)
    reference.ddp = ddp
    found = Designs(pairs if only is None else [pairs[only]], reference, config)
    return found, found.draw(policy, ddp)


def test_designs_change_designed_resolved_positions_alone_and_hang_on_their_problem_alone():
    designs, S = designs_of(Ddp())
    pairs = small_pairs()
    for problem, drawn in zip(designs.problems, S, strict=True):
        number, pair = next((k, p) for k, p in enumerate(pairs)
                            if p.complex.key == problem.complex.key
                            and np.array_equal(p.chosen, problem.preferred[0]))
        n, L, native = problem.complex.n_designed, len(problem.complex), problem.complex.S
        resolved = problem.complex.mask[:n]
        for kept, letters in ((~pair.chain_M, pair.chosen), (~resolved, native[:n])):
            assert (drawn[:, :n][:, kept] == letters[kept]).all()
        assert (drawn[:, :n][:, pair.chain_M & resolved] != ALPHABET.index("X")).all()
        assert (drawn[:, n:L] == native[n:]).all()                             # context
        assert len({row.tobytes() for row in drawn}) == designs.number
        assert (designs_of(Ddp(), only=number)[1][0] == drawn[:, :L]).all()
    assert len(designs.problems) == 4 + 4 + 1
    entries = designs.fasta(S).splitlines()
    assert len(entries) == 2 * S[..., 0].size
    assert entries[1] == decode(S[0, 0, :designs.problems[0].complex.n_designed])


def test_metrics_of_designs_by_hand_and_a_collapsed_model_is_seen():
    designs, _ = designs_of(Ddp())
    designs.base = designs.draw(designs.reference.model, Ddp())
    base = designs.metrics(designs.base)
    assert base["val/design_shift"] == 0 and base["val/design_diversity"] > 0.2
    assert not designs.sign_of_collapse(base)
    w, drawn = ALPHABET.index("W"), [p.drawn for p in designs.problems]
    collapsed = random_proteinmpnn(0, **SMALL)
    collapsed.W_out.bias.data[w] += 100
    S = designs.draw(collapsed, Ddp())
    assert all((row[:, :len(d)][:, d] == w).all() for row, d in zip(S, drawn))
    found = designs.metrics(S)
    native = [(p.complex.S[d] == w).mean() for p, d in zip(designs.problems, drawn)]
    preferred = [np.mean([(s == w)[d[:len(s)]].mean() for s in p.preferred])
                 for p, d in zip(designs.problems, drawn)]
    share = np.mean(np.concatenate([row[k, :len(d)][d] for row, d in zip(designs.base, drawn)
                                    for k in range(3)]) == w)
    assert found == pytest.approx({
        "val/design_recovery": np.mean(native), "val/design_preferred": np.mean(preferred),
        "val/design_diversity": 0, "val/design_shift": 1 - share})
    assert "too alike: two of them differ in 0.0% of their residues" in (
        designs.sign_of_collapse(found))
    # one letter of the first design of the first problem: it differs from the two others
    i = np.flatnonzero(drawn[0])[0]
    S[0, 0, i] = ALPHABET.index("C")
    assert designs.metrics(S)["val/design_diversity"] == pytest.approx(
        2 / 3 / drawn[0].sum() / len(drawn))
    spread = {**found, "val/design_diversity": 1.0}       # varied, but of other letters
    assert "the composition of designs has moved" in designs.sign_of_collapse(spread)


# ---- weights of pairs ----

def test_a_pair_of_weight_2_counts_as_if_it_came_twice():
    config = tiny(loss__sft=0.3)
    found = {}
    for weights, indices in (({0: 2.0, 6: 3.0}, [0, 2, 6]), ({}, [0, 0, 2, 6, 6, 6])):
        policy, ref, pairs = sizes(config)
        for i, weight in weights.items():
            pairs[i].weight = weight
        data = MicroBatches(pairs, config.loss, 0)
        totals, norm = global_gradient(policy, [data[0, 0, 0, indices]],
                                       loss_of(ref, config, Ddp()), Ddp(), 3.0)
        validation = Validation([pairs[i] for i in indices], ref, config, objective)
        validation.table = ref.compute_scores(validation.pairs).float()
        found[len(indices)] = (totals.sums[:len(SUMS)] / totals.count, totals.count, norm,
                               [p.grad for p in policy.parameters()], validation(policy, Ddp()))
    torch.testing.assert_close(found[3], found[6], rtol=2e-4, atol=1e-6)
    assert found[3][1] == 6


# ---- one run on any number of ranks ----

GRADIENTS = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from ddp_setup import setup_ddp, cleanup_ddp
from test_train_dpo import designs_of, gradients
ddp = setup_ddp(quiet=True)
found = gradients(ddp), torch.from_numpy(designs_of(ddp)[1])
if ddp.is_main:
    torch.save(found, sys.argv[1])
cleanup_ddp(ddp)
"""


def loss_of(ref, config, ddp):
    return lambda model, batch: micro_batch_loss(model, batch, ref, config, ddp, torch.float32)


def gradients(ddp, reference=False):
    """[{parameter: gradient}, loss] of two steps of four micro-batches of different sizes, float64.

    Pairs have weights, of sums below 1. reference: from the definition, one backward of the mean
    over all pairs of the step, each scored by itself."""
    from ddp_setup import wrap_ddp
    config = tiny(loss__sft=0.3, loss__diversity_lambda=0.2, loss__n_orders=2)
    policy, ref, pairs = sizes(config)
    policy, ref.model, ref.ddp = policy.double(), ref.model.double(), ddp
    for i, pair in enumerate(pairs):
        pair.weight = (1 + i % 3) / 64   # of float32 without rounding
    plan, out, numbers = PairPlan(pairs, 0, 4, config.training.batch_size), [], set()
    schedule = MicroBatchSampler(plan.item_of, 4, ddp, 0, 2)
    model, items, data = wrap_ddp(policy, ddp), iter(schedule), MicroBatches(pairs, config.loss, 0)
    for step in range(2):
        if reference:
            micro_batches = [plan.item_of(step, k) for k in range(4)]
            everything = [(epoch, i) for _, _, epoch, indices in micro_batches for i in indices]
            numbers.update(len(item[3]) for item in micro_batches)
            total = 0.0
            for epoch, i in everything:
                batch = ref.to_device(make_batch(pairs, [i], config.loss, 0, epoch))
                log_probs = policy(batch["graph"], batch["S"], batch["order"], batch["complex_row"])
                loss = objective(log_probs, batch, ref.scores(batch), config.loss)[0].sum()
                total = total + pairs[i].weight * loss
            loss = total / sum(pairs[i].weight for _, i in everything)
            loss.backward()
        else:
            totals, _ = global_gradient(model, [data[next(items)] for _ in schedule.mine],
                                        loss_of(ref, config, ddp), ddp, 7.0)
            loss = totals.sums[0] / totals.count
        out.append({"loss": loss.detach().clone(), **{k: p.grad.clone() for k,
                                                      p in policy.named_parameters()}})
        policy.zero_grad()
    assert not reference or len(numbers) > 1
    return out


@pytest.mark.parametrize("n", [1, 2, 4])
def test_any_number_of_ranks_makes_the_gradient_of_the_weighted_mean_and_the_designs(tmp_path, n):
    (tmp_path / "s.py").write_text(GRADIENTS.format(root=str(ROOT), tests=str(ROOT / "tests")))
    done = fork_ranks(n, ["s.py", "out.pt"], tmp_path)
    assert done.returncode == 0, done.text
    found, designs = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(designs, torch.from_numpy(designs_of(Ddp())[1]))
    for a, b in zip(found, gradients(Ddp(), reference=True), strict=True):
        worst = max((float((a[k] - b[k]).norm() / b[k].norm()), k) for k in b if b[k].norm() > 0)
        assert worst[0] < 1e-6 and a.keys() == b.keys()   # structures are kept in float32


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "mpich"])
def test_the_same_global_batch_gives_the_same_losses_under_any_launcher(launcher, tmp_path):
    need(launcher)
    settings = words({**TINY, "training.n_iters": 8, "training.eval_freq": 3, "model.dropout": 0.1,
                      "loss.diversity_lambda": 0.1})
    run(load_config(Config, None, [*settings, "training.accum=4"]), tmp_path / "one")
    result = run_ranks(launcher, 2, [SCRIPT, "--output_dir", "two", *settings,
                                     f"training.num_workers={int(launcher == 'torchrun')}"],
                       tmp_path, timeout=600)
    assert result.returncode == 0 and not result.leftover, result.text
    one, other = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in other] == list(range(9))
    for a, b in zip(one, other):
        keys = [k for k in a if k != "epoch" and not k.startswith(CLOCK)]
        assert [b[k] for k in keys] == pytest.approx([a[k] for k in keys], rel=1e-4,
                                                     abs=1e-5), a["step"]
    # there was something to differ
    assert one[-1]["loss"] != pytest.approx(one[1]["loss"], rel=1e-2)
    assert other[1]["ddp/world_size"] == 2 and other[1]["ddp/effective_batch_size"] == 12
    assert result.stdout.count("step 8/8") == 1                            # rank 0 alone speaks


# ---- stop and go on ----

def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    for order in ("random", "fixed"):
        often = dict(training__eval_freq=4, training__snapshot_freq=4, loss__order=order,
                     model__dropout=0.1)
        run(tiny(**often), tmp_path / order)
        # in the middle of an epoch of 5
        run(tiny(training__n_iters=4, **often), tmp_path / f"{order} parts")
        shutil.rmtree(tmp_path / f"{order} parts" / "reference")
        run(tiny(**often), tmp_path / f"{order} parts")
        same_run(tmp_path / order, tmp_path / f"{order} parts")
    seen = {row["step"]: row.get("seen/pairs") for row in rows(tmp_path / "random parts")}
    pairs = load_checkpoint(str(tmp_path / "random" / "checkpoints" / "last.pt"))["data"]["n"]
    assert (seen[5], seen[10]) == (pairs, 2 * pairs)   # at the ends of epochs
    assert rows(tmp_path / "random")[-1]["loss"] != rows(tmp_path / "fixed")[-1]["loss"]


def test_a_resume_is_refused_for_another_config_other_pairs_or_other_base_weights(tmp_path):
    run(tiny(training__n_iters=2), tmp_path / "w")
    with pytest.raises(ValueError, match=r"another config:\s+loss\.beta: 0\.1 -> 0\.2\s+Expected"):
        run(tiny(loss__beta=0.2), tmp_path / "w")
    state = load_checkpoint(str(tmp_path / "w" / "checkpoints" / "last.pt"))
    for key, value, text in (("base", "0", "trained from other base weights"),
                             ("data", {"n": 3, "hash": "0"},
                              "trained on other pairs, or in another order.* as a new run: "
                              "--base_model_name best_model --base_model_dir FORMER --work_dir"),
                             ("optimizer", None,
                              "has no optimizer; expected a checkpoint of train_dpo_ddp.py")):
        changed = {k: v for k, v in {**state, key: value}.items() if v is not None}
        torch.save(changed, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=text):
            run(tiny(), tmp_path / "new", resume=tmp_path / "other.pt")
    assert not (tmp_path / "new").exists()


def test_a_run_that_goes_on_in_another_folder_takes_its_best_model_along(tmp_path, capsys):
    run(tiny(training__n_iters=2, optim__lr=0), tmp_path / "w")
    last, best = tmp_path / "w" / "checkpoints" / "last.pt", tmp_path / "w" / "best_model.pt"
    run(tiny(training__n_iters=3, optim__lr=0), tmp_path / "new", resume=last)
    assert (tmp_path / "new" / "best_model.pt").read_bytes() == best.read_bytes()
    run(tiny(training__n_iters=2, optim__lr=0), tmp_path / "done", resume=last)
    assert f"weights   {best}" in capsys.readouterr().out


# ---- decisions ----

def test_a_run_that_no_longer_improves_stops_early_and_keeps_the_base_weights(tmp_path, capsys):
    still = tiny(optim__lr=0, training__n_iters=50, training__eval_freq=2, training__patience=3)
    result = run(still, tmp_path / "w")
    assert result["step"] == 5   # evaluations at steps 2, 4 and at the end of the epoch, 5
    text = capsys.readouterr().out
    assert run(still, tmp_path / "w")["step"] == 5
    again = capsys.readouterr().out
    assert "This run is finished: early stop at step 5" in again
    for said in ("  validation       loss", f"weights   {tmp_path / 'w' / 'best_model.pt'}"):
        assert (text + again).count(said) == 2
    assert "Finished at step 5 (early stop)" in text
    assert "no evaluation was better than the base weights" in text
    table = rows(tmp_path / "w")
    assert all(row["loss"] == pytest.approx(math.log(2), abs=1e-5) for row in table[1:])
    base = random_proteinmpnn(0, **SMALL).state_dict()
    best = best_of(tmp_path / "w")
    assert best["step"] == 0 and equal(dict(best["model_state_dict"]), dict(base))


def test_without_validation_the_best_model_is_of_a_whole_epoch_whose_mean_loss_is_least(tmp_path):
    """Its part may be one batch, which is luckier than any epoch."""
    run(tiny(data__val_fraction=0, training__n_iters=14, training__eval_freq=1), tmp_path / "w")
    per_epoch = 5
    table = [row for row in rows(tmp_path / "w") if "epoch/loss" in row]
    least = min(table, key=lambda row: row["epoch/loss"])["step"]
    assert [row["step"] for row in table] == [per_epoch, 2 * per_epoch]
    assert best_of(tmp_path / "w")["step"] == least
    for steps in (1, per_epoch):   # the single batch's loss is no better and no worse
        run(tiny(data__val_fraction=0, training__n_iters=steps, optim__lr=0), tmp_path / "part")
        assert best_of(tmp_path / "part")["step"] == steps


def test_falling_chosen_sequences_are_warned_of_once_and_sft_holds_them(tmp_path, capsys):
    settings, warning = dict(training__n_iters=30, optim__lr=1e-2), "have become less likely"
    result = run(tiny(**settings), tmp_path / "plain")
    text = capsys.readouterr().out
    assert text.count(f"ATTENTION: chosen sequences {warning}") == 1 and "loss.sft" in text
    held = run(tiny(loss__sft=1, **settings), tmp_path / "sft")
    assert warning not in capsys.readouterr().out
    # one epoch
    run(tiny(data__val_fraction=0, **{**settings, "training__n_iters": 5}), tmp_path / "blind")
    text = capsys.readouterr().out
    assert text.count("step 0: train loss 0.6931") == 1 == text.count(warning)
    start = rows(tmp_path / "sft")[0]["val/logps/chosen"]
    assert result["val/logps/chosen"] < start < held["val/logps/chosen"]


# The loss is nan on rank 1 in steps 3 and 6 to 8. The first call lays out DDP's buckets.
NAN_LOSS = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import ddp_guard
ddp_guard.supervise()
import train_dpo_ddp as script
real, calls = script.micro_batch_loss, []
def micro_batch_loss(*arguments):
    loss, sums, count = real(*arguments)
    calls.append(1)
    bad = os.environ["RANK"] == "1" and len(calls) - 1 in (3, 6, 7, 8)
    return (loss * float("nan"), sums * float("nan"), count) if bad else (loss, sums, count)
script.micro_batch_loss = micro_batch_loss
script.cli()
"""


def test_a_nan_on_one_rank_is_skipped_by_all_and_too_many_in_a_row_end_the_run(tmp_path):
    (tmp_path / "driver.py").write_text(NAN_LOSS)
    (tmp_path / "c.yaml").write_text(dump_yaml(tiny(training__snapshot_freq=1, training__accum=1,
                                                    training__keep_last=9,
                                                    training__max_bad_steps=2)))
    result = fork_ranks(2, ["driver.py", "--config", "c.yaml", "--work_dir", "w"], tmp_path)
    # the story and the last line
    assert result.stderr.count("in 3 steps in a row, on 1 rank(s)") == 2, result.text
    assert result.returncode == read_status(tmp_path / "w")["code"] == 1, result.text
    states = map(load_checkpoint, map(str, tmp_path.glob("w/checkpoints/last*.pt")))
    states = {state["step"]: state for state in states}
    assert [states[step]["bad_steps"] for step in range(1, 8)] == [
        [0, 0], [0, 0], [1, 1], [1, 0], [1, 0], [2, 1], [3, 2]] and len(states) == 7
    for key in ("model", "sums"):
        assert equal(states[3][key], states[2][key]) and not equal(states[4][key], states[3][key])
    assert equal(states[3]["optimizer"]["state"], states[2]["optimizer"]["state"])
    assert all(p.isfinite().all() for p in states[7]["model"].values())
    assert all(map(math.isfinite, states[4]["sums"]))
    table = rows(tmp_path / "w")
    assert [row.get("bad_steps") for row in table] == [None] * 3 + [1, 1, 1, 2, 3]
    assert table[3]["loss"] is None


# ---- what is computed ----

def test_scores_under_the_reference_are_kept_for_orders_that_stay(tmp_path, capsys, monkeypatch):
    run(tiny(loss__order="fixed", training__n_iters=3), tmp_path / "a")
    assert capsys.readouterr().out.count("computed, kept in") == 2
    shutil.copytree(tmp_path / "a" / "reference", tmp_path / "cache")
    with_cache = dict(loss__order="fixed", training__n_iters=3,
                      data__reference_cache=tmp_path / "cache")
    run(tiny(**with_cache), tmp_path / "b")
    assert capsys.readouterr().out.count("read from") == 2
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    before = sorted((tmp_path / "cache").iterdir())
    for change in (dict(training__seed=1), dict(loss__n_orders=2), dict(loss__temperature=0.5),
                   dict(loss__order="arange"), dict(data__demo_pairs=4),
                   dict(model__random__num_edges=9)):
        run(tiny(**{**with_cache, **change}), tmp_path / str(change))
        assert capsys.readouterr().out.count("computed, kept in") == 2, change
    size = load_checkpoint(str(before[0]))["scores"].shape
    for i, scores in enumerate((torch.full(size, math.nan), torch.zeros(size).int(),
                                torch.zeros(3, 2), None)):
        torch.save({"scores": scores}, before[0])
        if i == 0:
            before[1].write_bytes(b"junk")
        run(tiny(**with_cache), tmp_path / f"c{i}")
        assert capsys.readouterr().out.count("could not be used") == 1 + (i == 0)
        assert rows(tmp_path / f"c{i}")[-1]["loss"] == rows(tmp_path / "a")[-1]["loss"]
    # sums of another build are not those of the policy here
    monkeypatch.setattr(torch, "__version__", "0.0")
    run(tiny(**with_cache), tmp_path / "d")
    assert capsys.readouterr().out.count("computed, kept in") == 2


@pytest.mark.parametrize("name, beta", [("simpo", 2), ("ipo", 0.1)])
def test_other_losses_train(tmp_path, name, beta):
    result = run(tiny(loss__name=name, loss__beta=beta, training__n_iters=25), tmp_path / "w")
    table = rows(tmp_path / "w")
    assert result["val/loss"] < table[0]["val/loss"] and result["val/rewards/accuracies"] >= 0.8
    assert (tmp_path / "w" / "reference").exists() == (name == "ipo")       # simpo has none


def test_little_room_changes_nothing_and_mixed_precision_little_and_not_step_0(tmp_path, capsys):
    run(tiny(), tmp_path / "a")
    run(tiny(memory__structure_cache_mb=0), tmp_path / "little")
    same_run(tmp_path / "a", tmp_path / "little")
    run(tiny(memory__mixed_precision="bfloat16"), tmp_path / "b")
    assert "bfloat16 (asked for" in capsys.readouterr().out
    a, b = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert a[0] == b[0] and a[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    evaluated = [[row["val/loss"] for row in table if "val/loss" in row] for table in (a, b)]
    assert a[5]["loss"] != b[5]["loss"] and evaluated[0] == pytest.approx(evaluated[1], abs=0.05)


def test_the_plain_step_of_the_benchmark_has_our_loss_and_gradient(tmp_path):
    """On a chain with fewer rows than neighbours, a gap and a residue that lacks O: all are seen by
    all."""
    bench_ddp.write_demo_pdb(tmp_path / "s.pdb", 30)
    lines = [line for line in (tmp_path / "s.pdb").read_text().splitlines(keepends=True)
             if int(line[22:26]) != 9 and (int(line[22:26]) != 17 or line[13] != "O")]
    (tmp_path / "s.pdb").write_text("".join(lines))
    steps = bench_ddp.DpoSteps(bench_ddp.made_pairs(tmp_path / "s.pdb"), 2, Ddp())
    (plain, norm), (ours, our_norm) = (map(float, steps.gradient(kind, 0, [0, 1]))
                                       for kind in ("plain", "ours"))
    assert plain == pytest.approx(ours, abs=4e-6) and abs(plain - math.log(2)) > 1e-3
    assert norm == pytest.approx(our_norm, rel=1e-4)
    for (name, p), q in zip(steps.models["plain"].named_parameters(),
                            steps.models["ours"].parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * norm, msg=name)


def test_the_benchmark_takes_each_pair_of_a_file_once_and_pads_structures_together(tmp_path):
    for length in (50, 60):   # neighbours of a shorter one would be padding, as published
        bench_ddp.write_demo_pdb(tmp_path / f"{length}.pdb", length)
    pairs = [*bench_ddp.made_pairs(tmp_path / "50.pdb", 2),
             *bench_ddp.made_pairs(tmp_path / "60.pdb", 2)]
    steps = bench_ddp.DpoSteps(pairs, 2, Ddp(), "random")
    together = {len(pairs[i].complex) for i in steps.next_pairs("plain")[1]}
    loss, norm = steps.differences()
    assert together == {50, 60} and loss < 4e-6 and norm < 1e-4
    for kind, n in (("plain", 1), ("ours", 2)):   # the other plain one is taken
        indices = [i for _ in range(n) for i in steps.next_pairs(kind)[1]]
        assert len(set(indices)) == len(indices) == 2 * n


# ---- the demo, and real proteins ----

def test_the_demo_learns_its_rule_and_says_what_it_does(tmp_path):
    result, folder = fork_ranks(2, [SCRIPT, "--config", DEMO], tmp_path), tmp_path / "runs/dpo_demo"
    assert result.returncode == 0, result.text
    text = result.stdout
    for said in ("RANDOM weights from seed 0: for demonstrations and tests only",
                 "loss: sigmoid, beta 0.1", "16 pairs x accum 1 x 2 rank(s) = 32 per step",
                 "step 0: validation loss 0.6931 acc 0.000", "epoch 1/5: train loss",
                 "epoch 5/5: train loss", "best_model.pt", "the reference is scored in float32"):
        assert text.count(said) == 1, said
    figures = r"loss 0\.\d{4} acc [01]\.\d{3}"
    assert re.search(rf"epoch 2/5: train {figures}, validation {figures}, \d+ s", text)
    rates = r"pairs/s \d\S*  acc \d\S*  margin -?\d\S*$"
    assert re.search(rf"^step 5/55  loss \d\S*  {rates}", text, re.MULTILINE)
    assert re.search(rf"^step 10/55  loss \d\S*  ETA \d:\d\d:\d\d  {rates}", text, re.MULTILINE)
    table = rows(folder)
    assert table[-1]["val/rewards/accuracies"] > 0.9
    assert table[-1]["val/loss"] < 0.2 < 0.69 < table[0]["val/loss"]
    assert table[0]["val/rewards/margins"] == 0 == table[0]["val/kl"]
    for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins",
                "rewards/accuracies", "logps/chosen", "logps/rejected"):
        assert key in table[-1] and f"val/{key}" in table[-1]
    chosen, rejected = table[-1]["rewards/chosen"], table[-1]["rewards/rejected"]
    assert table[-1]["rewards/margins"] == pytest.approx(chosen - rejected)
    assert {"grad_norm", "lr", "val/recovery", "val/kl", "entropy"} <= table[-1].keys()
    assert all(0 < row["data_wait"] < 1 for row in table[1:])
    assert json.loads((folder / "status.json").read_text())["code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("data, more", [
    ("pairs_monomer.json", []), ("pairs_multichain.json", ["loss.order=fixed"])])
def test_real_pairs_are_learned_into_a_file_like_the_published(shared, tmp_path, data, more):
    fixture = torch.load(shared / "fixtures" / "proteinmpnn.pt",
                         weights_only=True)["checkpoint_official"]
    (tmp_path / "weights").mkdir()
    torch.save(fixture, tmp_path / "weights" / "v_48_020.pt")
    argv = ["--train_data", shared / "data" / data, "--output_dir", "out", "--base_model_dir",
            "weights", "--lr", "2e-5", "--batch_size", "2", "--num_epochs", "3", "optim.warmup=0",
            "training.log_freq=1", *more]
    done = fork_ranks(2, [SCRIPT, *argv], tmp_path, timeout=900)
    assert done.returncode == 0, done.text
    table = rows(tmp_path / "out")
    first, last = table[1], table[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert table[0]["val/rewards/accuracies"] == 0 and last["val/rewards/accuracies"] > 0.9
    assert last["loss"] < 0.5 and last["val/loss"] < 0.6
    found = best_of(tmp_path / "out")
    assert found["num_edges"] == 48 and found["noise_level"] == 0.2
    published = fixture["model_state_dict"]
    assert {key: value.shape for key, value in found["model_state_dict"].items()} == {
        key: value.shape for key, value in published.items()}
    assert all(v.dtype == torch.float32 and v.isfinite().all()
               for v in found["model_state_dict"].values())
    # The margin of a pair, from the two files alone; of a small one by the formulas as they are
    # written down.
    policy, base = from_checkpoint(found), from_checkpoint(fixture)
    pair = min(read_pairs(shared / "data" / data), key=lambda pair: len(pair.complex))
    orders = orders_of(pair, Loss(), 0)
    plain = len(pair.complex) < 100
    h = [alone(policy, pair, S, orders, plain=plain) - alone(base, pair, S, orders, plain=plain)
         for S in (pair.chosen, pair.rejected)]
    assert h[0] - h[1] > 1


# ---- config and command line ----

def test_every_shipped_config_is_accepted():
    paths = sorted((ROOT / "configs").glob("dpo*.yaml"))
    assert DEMO in paths
    for path in paths:
        check_config(load_config(Config, path))


def test_options_of_the_original_set_what_they_say(tmp_path):
    argv = ("--train_data a.json --val_data b.json --output_dir out --batch_size 16 --num_epochs "
            "7 --learning_rate 1e-4 --beta 0.5 --temperature 0.1 --base_model_name v_48_010 "
            "--base_model_dir w --backend gloo --no_cuda --weight_decay 0.01 --num_workers 2 "
            "--max_length 500 --diversity_lambda 0.05 --mutable_positions A12 A15 "
            "--base_model_config_dir cfg loss.name=hinge").split()
    args, c = read_arguments(argv)
    expected = load_config(Config, None, [
        "data.train_data=a.json", "data.val_data=b.json", "data.max_length=500",
        "data.mutable_positions=A12 A15", "training.batch_size=16", "training.num_epochs=7",
        "training.num_workers=2", "optim.lr=1e-4", "optim.weight_decay=0.01", "loss.name=hinge",
        "loss.beta=0.5", "loss.temperature=0.1", "loss.diversity_lambda=0.05",
        "model.base_model_name=v_48_010", "model.base_model_dir=w"])
    assert c == expected
    assert args.work_dir == "out" and args.no_cuda and args.backend == "gloo"
    _, c = read_arguments(["--train_data", "a", "--mutable_ranges", "0-5", "9-12", "optim.lr=1",
                           "--lr", "3"])
    assert c.data.mutable_ranges == "0-5 9-12" and c.optim.lr == 3
    _, c = read_arguments(["--train_data", "a"])
    assert (c.loss.beta, c.loss.temperature) == (0.1, 1.0)
    assert (c.model.dropout, c.training.num_workers) == (0.0, 0)


def test_the_plan_scales_the_learning_rate():
    c = load_config(Config, None, ["training.batch_size=4", "optim.lr=3e-7", "optim.scale=linear",
                                   "optim.base_global_batch=4", "optim.warmup=10"])
    lines = describe_plan(c, "1,4").splitlines()[-3:-1]
    table = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert table == [["1", "4", "3e-07", "10"], ["4", "16", "1.2e-06", "40"]]
    read_arguments(["--plan", "1,4"])                                      # needs no pairs


def test_a_small_file_scales_to_its_pairs_and_a_long_warm_up_is_told_once(tmp_path, capsys):
    config = tiny(training__batch_size=64, training__n_iters=2, optim__scale="linear",
                  optim__base_global_batch=5)
    # 5 structures of 5 pairs: 5 times the base, where a full batch were 25.6 times
    run(config, tmp_path / "w")
    printed = " ".join(capsys.readouterr().out.split())
    for said in ("lr 0.015, warm-up 15 steps, scaled from 0.003 and 3 at 5 pairs (linear), to the "
                 "25 pairs", "ATTENTION: the warm-up (15 steps) lasts to the end (2 steps): the "
                 "learning rate reaches 13 %"):
        assert said in printed
    assert rows(tmp_path / "w")[-1]["lr"] == pytest.approx(0.015 * 2 / 15)
    config.training.n_iters = 3
    run(config, tmp_path / "w")
    printed = " ".join(capsys.readouterr().out.split())
    assert "lr 0.015, warm-up 15 steps, kept from the checkpoint" in printed
    assert "lasts to the end" not in printed
    assert rows(tmp_path / "w")[-1]["lr"] == pytest.approx(0.015 * 3 / 15)


def pdb_text(complex):
    atoms = Atoms()
    for i, (xyz, letter) in enumerate(zip(complex.X, complex.S), 1):
        atoms.add("A", i, NAMES[letter], xyz=xyz)
    return atoms.pdb()


@pytest.fixture
def files(tmp_path):
    """A folder with pairs.json (6 pairs on 3 structures) and base weights."""
    entries = []
    for i, pair in enumerate(demo_pairs(seed=5, n_structures=3, pairs_per_structure=2)):
        (tmp_path / f"s{i // 2}.pdb").write_text(pdb_text(pair.complex))
        entries.append({"pdb_file": f"s{i // 2}.pdb", "preferred_seq": decode(pair.chosen),
                        "unpreferred_seq": decode(pair.rejected), "chain_id": "A"})
    (tmp_path / "pairs.json").write_text(json.dumps(entries))
    (tmp_path / "w").mkdir()
    torch.save(to_checkpoint(random_proteinmpnn(0, noise_level=0.2, **SMALL)),
               tmp_path / "w" / "v_48_020.pt")
    return tmp_path


def test_runs_from_files_as_the_original_was_called_and_with_positions_on_the_command_line(files):
    entries = json.loads((files / "pairs.json").read_text())
    for entry in entries:
        entry["unpreferred_seq"] = entry["preferred_seq"][:4] + "GGGGG" + entry["preferred_seq"][9:]
    (files / "few.json").write_text(json.dumps(entries))
    few = "--train_data few.json --base_model_dir w --num_epochs 1".split()
    plain, again, by_number, by_index = command_lines("train_dpo_ddp", [
        ("--train_data pairs.json --base_model_dir w --num_epochs 2 --lr 1e-3 --no_cuda "
         "--batch_size 2 --output_dir out --base_model_config_dir cfg").split(),
        ("--train_data few.json --num_epochs 1 --base_model_dir out --base_model_name best_model "
         "--work_dir again").split(),   # from the weights of a former run
        [*few, "--output_dir", "a", "--mutable_positions", "A5-A9"],
        [*few, "--output_dir", "b", "--mutable_ranges", "4-8", "optim.lr=3e-6"]], files)
    assert plain[0] == 0 and "--base_model_config_dir cfg is not needed" in plain[1], plain
    assert "6 pairs on 3 structures" in plain[1]
    assert "4 pairs for training, 2 on 1 structure(s)" in plain[1]
    assert "v_48_020.pt, trained with 0.2 Angstrom of noise" in plain[1]
    model = load_proteinmpnn(files / "out" / "latest_model.pt")
    assert model.noise_level == 0.2 and model.num_edges == 8
    assert "out/best_model.pt, trained with 0.2 Angstrom of noise" in again[1], again
    best = load_proteinmpnn(files / "out" / "best_model.pt")
    state = load_checkpoint(str(files / "again" / "checkpoints" / "last.pt"))
    assert state["base"] == hash_of(best.state_dict())
    for run, said in ((by_number, "5 positions by chain and number in the file: A5-A9"),
                      (by_index, "5 positions by 0-based number in the sequence: 4-8")):
        assert said in " ".join(run[1].split()), run
    a, b = rows(files / "a"), rows(files / "b")
    assert a[0] == b[0] and -5 * 6 < a[0]["val/logps/chosen"] < -5   # of 5 residues, not of 30
    assert a[0]["val/logps/chosen_per_residue"] == pytest.approx(a[0]["val/logps/chosen"] / 5)


def test_a_run_whose_designs_collapse_says_so_once_and_says_where_they_are(files, capsys):
    collapse = words({"training.num_epochs": 3, "optim.lr": 0.1, "data.val_fraction": 0.4,
                      "data.train_data": files / "pairs.json", "model.base_model_dir": files / "w"})
    run(load_config(Config, None, collapse), files / "out")
    printed, folder = " ".join(capsys.readouterr().out.split()), files / "out" / "designs"
    assert printed.count("Look at") == printed.count("ATTENTION: the composition of designs") == 1
    assert f"designs {folder}/step_3.fasta" in printed
    assert sorted(p.name for p in folder.iterdir()) == [f"step_{k}.fasta" for k in range(4)]
    run(load_config(Config, None, [*collapse, "training.n_iters=4"]), files / "out")
    assert "Look at" not in capsys.readouterr().out
    run(load_config(Config, None, [*collapse, "monitoring.n_designs=0"]), files / "out", fresh=True)
    assert "  designs  " not in capsys.readouterr().out and not folder.exists()


@pytest.mark.parametrize("text, expected", [
    ("", ["data.train_data is not given", "dpo_demo.yaml"]),
    ("--train_data ''", ["data.train_data is empty"]),
    ("--mutable_positions 1 --mutable_ranges 1-2", ["given together"]),
    ("--mutable_ranges training.accum=2", ["data.mutable_ranges is empty"]),
    ("data.mutable_positions=\"' '\"", ["data.mutable_positions is empty"]),
    ("data.reference_cache=\"''\"", ["data.reference_cache is empty"]),
    ("--beta 1e-300", ["loss.beta is 1e-300; expected 1e-6"]),
    ("--temperature 1e-300", ["loss.temperature is 1e-300; expected 0.001"]),
    ("--num_epochs 3 training.n_iters=4", ["--num_epochs 3 with training.n_iters 4"]),
    ("loss.name=dpo", ["loss.name", "sigmoid"]), ("loss.label_smoothing=0.5", ["below 0.5"]),
    ("loss.label_smoothing=0.2", ["loss.name sigmoid", "loss.name robust or conservative"]),
    ("loss.gamma=0.2 loss.name=hinge", ["loss.gamma is 0.2", "loss.name simpo"]),
    ("monitoring.n_designs=1", ["monitoring.n_designs is 1; expected 0, or 2"]),
    ("loss.order=arange loss.n_orders=2", ["single order"]),
    ("model.random.hidden_size=64", ["expected no model.random"])])
def test_a_wrong_config_is_refused_by_the_name_of_its_key(text, expected):
    data = "--train_data a " if text and "--train_data" not in text else ""
    with pytest.raises(ValueError) as caught:
        read_arguments(shlex.split(data + text))
    assert all(words in str(caught.value) for words in expected)


def test_bad_input_is_refused_with_one_message_and_leaves_nothing(files):
    entries = json.loads((files / "pairs.json").read_text())
    (files / "short.json").write_text(json.dumps([{**entries[0], "preferred_seq": "ACD"}]))
    (files / "one.json").write_text(json.dumps(entries[:1]))
    (files / "w" / "broken.pt").write_bytes(b"junk")
    (files / "c.yaml").write_text("training: {batch_size: 2}\n")
    base = "--train_data pairs.json --base_model_dir w --output_dir new --num_epochs 1 "
    cases = [
        (base + "--train_data short.json --val_data none.json --base_model_name v_48_030",
         # all at once
         ["item 0", "lengths differ", "No such file or directory: 'none.json'",
          "no file w/v_48_030.pt", "github.com/dauparas/ProteinMPNN", "--base_model_dir FOLDER",
          "--base_model_name random"]),
        ("--train_data pairs.json", ["no file vanilla_model_weights/v_48_020.pt"]),
        (base + "--base_model_name broken", ["broken.pt cannot be read"]),
        (base + "--train_data one.json", ["none can be held out", "--val_data"]),
        (base + "--max_length 10", ["more than max_length 10"]),
        (base + "training.accum=9", ["9 micro-batches"]),
        (base + "data.reference_cache=c.yaml/cache", ["c.yaml is a file"]),
        (base + "--no_cuda --device cuda", ["--no_cuda with --device cuda"])]
    before = sorted(p.name for p in files.rglob("*"))
    found = command_lines("train_dpo_ddp", [argv.split() for argv, _ in cases], files)
    for (argv, expected), (code, out, err) in zip(cases, found):
        text = f"{argv}\nexit code {code}\n{out}\n{err}"
        assert code == 2, text
        assert all(e in err for e in expected) and err.count("error:") == 1, text
        assert "Traceback" not in out + err, text
    assert sorted(p.name for p in files.rglob("*")) == before


OWN_FILES = """
import os, sys
sys.path.insert(0, {root!r})
import train_dpo_ddp
os.chdir(os.environ["RANK"])
train_dpo_ddp.cli()
"""


@pytest.mark.parametrize("alike", [False, True])
def test_two_ranks_refuse_a_bad_file_and_good_files_that_differ(files, alike):
    entries = json.loads((files / "pairs.json").read_text())
    for rank in ("0", "1"):
        shutil.copytree(files / "w", files / rank / "w")
        for path in files.glob("*.pdb"):
            shutil.copy(path, files / rank)
        own = [{"pdb_file": "s0.pdb"}] if alike else entries[::-1] if rank == "1" else entries
        (files / rank / "p.json").write_text(json.dumps(own))
    if not alike:
        torch.save(to_checkpoint(random_proteinmpnn(1, **SMALL)),
                   files / "1" / "w" / "v_48_020.pt")
    (files / "driver.py").write_text(OWN_FILES.format(root=str(ROOT)))
    before = sorted(p.name for p in files.rglob("*"))
    argv = ["driver.py", "--train_data", "p.json", "--base_model_dir", "w"]
    done = fork_ranks(2, argv, files)
    said = ("missing key preferred_seq" if alike else
            r'rank 1 on \S+ has pairs \(hash\) "\w+" \(rank 0: "\w+"\), base weights \(hash\) "')
    assert done.returncode == 2 and len(re.findall(said, done.stderr)) == 2, done.text
    assert "Traceback" not in done.text and sorted(p.name for p in files.rglob("*")) == before


def test_a_run_without_a_good_step_says_so(tmp_path, monkeypatch):
    real = train_dpo_ddp.micro_batch_loss

    def bad(*arguments):
        loss, sums, pairs = real(*arguments)
        return math.nan * loss, math.nan * sums, pairs

    monkeypatch.setattr(train_dpo_ddp, "micro_batch_loss", bad)
    with pytest.raises(RuntimeError, match="all steps had a nan or infinite loss.*optim.lr"):
        run(tiny(training__n_iters=2, data__val_fraction=0), tmp_path / "w")
    assert not (tmp_path / "w" / "lock.json").exists()   # where the process goes on
