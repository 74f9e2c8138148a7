"""ProteinMPNN against the official code's numbers, a plain transcription of its formulas, and closed forms."""
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from proteinmpnn_model import (ALPHABET, Encoding, ProteinMPNN, decoding_order, from_checkpoint, gaussians,
                               load_proteinmpnn, random_proteinmpnn, save_proteinmpnn, to_checkpoint)

X_LETTER = 20
CASES = pytest.mark.parametrize("name", ["monomer_official", "monomer_small", "complex_small", "peptide_small",
                                         "odd_pdb_small"])


def near(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, check_dtype=False, **{"rtol": 0, "atol": 0, **tolerance})


def of_letters(log_probs, S):
    return log_probs.gather(-1, S[..., None])[..., 0]


# The official code's numbers


@pytest.fixture(scope="module")
def official(shared):
    """(cases, {name: model}) of the fixture file; its bfloat16 weights are exact."""
    fixture = torch.load(shared / "fixtures" / "proteinmpnn.pt", weights_only=True)
    return fixture["cases"], {name: from_checkpoint(fixture[f"checkpoint_{name}"]).eval()
                              for name in ("official", "official_policy", "small", "small_policy")}


def graph_of(model, inputs):
    return model.graph(*(inputs[key] for key in ("X", "mask", "residue_idx", "chain_encoding_all")))


@CASES
def test_features_and_encoder_agree_with_the_official_code(official, name):
    case, model = official[0][name], official[1][official[0][name]["model"]]
    features, resolved = case["features"], case["inputs"]["mask"].bool()
    graph = graph_of(model, case["inputs"])
    near(graph.E_idx[resolved], features["E_idx"][resolved])
    raw = torch.cat([model.features.positional()[graph.offset], gaussians(graph.distance)], dim=-1)
    near(raw[:, :features["raw_rows"].shape[1]], features["raw_rows"], atol=1e-5)
    every = 64 if name in ("complex_small", "odd_pdb_small") else 16
    rows = resolved[:, ::every]
    near(model.features(graph)[:, ::every][rows], features["E_rows"][rows], atol=1e-4)
    encoding = model.encode(graph)
    near(encoding.h_V, case["encoder"]["h_V"], atol=2e-4)
    near(encoding.h_E[:, ::every][rows], case["encoder"]["h_E_rows"][rows], atol=2e-4)


@CASES
@torch.no_grad()
def test_log_probs_agree_with_the_official_code(official, name):
    case, inputs, expected = official[0][name], official[0][name]["inputs"], official[0][name]["ref"]
    resolved, scored = inputs["mask"].bool(), inputs["mask"] * inputs["chain_M_full"]
    near(scored.sum(-1), expected["n_scored"])
    order = decoding_order(scored, inputs["randn"])
    near(order, inputs["decoding_order"])
    S = torch.cat([inputs["S"], inputs["S_chosen"], inputs["S_rejected"]])
    for who, model in (("ref", official[1][case["model"]]), ("policy", official[1][case["model"] + "_policy"])):
        encoding = model.encode(graph_of(model, inputs))
        log_probs = model.decode(encoding, S, order.expand(3, -1))
        sums = (of_letters(log_probs, S) * scored).sum(-1)
        for row, what in enumerate(("native", "chosen", "rejected")):
            near(sums[row:row + 1], expected[f"{who}_{what}_sum_logp"], atol=2e-3)
            if f"{who}_{what}_log_probs" in expected:
                near(log_probs[row][resolved[0]], expected[f"{who}_{what}_log_probs"][resolved], atol=1e-4)
        if who == "ref":
            near(model.unconditional(encoding)[resolved], expected["ref_unconditional_log_probs"][resolved], atol=1e-4)
            arange = torch.arange(S.shape[1])[None]
            sums = (of_letters(model.decode(encoding, S[:1], arange), S[:1]) * scored).sum(-1)
            near(sums, expected["ref_native_sum_logp_arange"], atol=2e-3)


@CASES
def test_dpo_loss_and_gradients_agree_with_the_official_code(official, name):
    case, inputs, expected = official[0][name], official[0][name]["inputs"], official[0][name]["dpo"]
    reference, policy = (official[1][case["model"] + end] for end in ("", "_policy"))
    scored = inputs["mask"] * inputs["chain_M_full"]
    S = torch.cat([inputs["S_chosen"], inputs["S_rejected"]])
    order = inputs["decoding_order"].expand(2, -1)
    graph = graph_of(policy, inputs)
    sums = (of_letters(policy(graph, S, order), S) * scored).sum(-1)
    with torch.no_grad():
        reference_sums = (of_letters(reference(graph, S, order), S) * scored).sum(-1)
    rewards = expected["beta"] * (sums - reference_sums)
    near(rewards.detach(), torch.cat([expected["rewards_chosen"], expected["rewards_rejected"]]), atol=3e-4)
    loss = -F.logsigmoid(rewards[0] - rewards[1])
    near(loss.detach(), expected["loss"], atol=1e-4)
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    norms = {key: g.double().norm() for (key, _), g in zip(policy.named_parameters(), gradients)}
    near(torch.stack(list(norms.values())).norm(), expected["grad_norm"], rtol=2e-3)
    assert norms.keys() == expected["grad_norms"].keys()
    for key, norm in expected["grad_norms"].items():
        near(norms[key], norm, rtol=1e-2, atol=1e-4)


@torch.no_grad()
def test_a_padded_peptide_scores_as_officially_alone_not_as_officially_padded(official):
    case, model = official[0]["padded_batch_small"], official[1]["small"]
    inputs = case["inputs"]
    log_probs = model(graph_of(model, inputs), inputs["S"], inputs["decoding_order"])
    sums = (of_letters(log_probs, inputs["S"]) * inputs["mask"] * inputs["chain_M_full"]).sum(-1)
    near(sums, case["ref"]["single_sum_logp"], atol=2e-3)
    assert abs(sums[1] - case["ref"]["official_padded_sum_logp"][1]) > 1


@torch.no_grad()
def test_greedy_sampling_agrees_with_the_official_code(official):
    case, model = official[0]["monomer_small"], official[1]["small"]
    inputs, expected = case["inputs"], case["greedy"]
    designed = inputs["chain_M"] * expected["chain_M_pos"]
    order = decoding_order(designed * inputs["mask"], expected["randn"])
    near(order, expected["decoding_order"])
    encoding = model.encode(graph_of(model, inputs))
    for temperature in (0, 1e-4):
        S = model.sample(encoding, inputs["S"], designed, order, temperature, bias=expected["bias_by_res"])
        assert "".join(ALPHABET[letter] for letter in S[0]) == expected["seq"]
    log_probs = model.decode(encoding, S, order)
    near(log_probs, expected["log_probs"], atol=1e-4)
    loss = -of_letters(log_probs, S)
    near((loss * designed).sum(-1) / designed.sum(-1), expected["score"], atol=1e-4)
    near(loss.mean(-1), expected["global_score"], atol=1e-4)


# A plain transcription of the formulas


def small_model(seed=0, **kwargs):
    """A small model in float64 whose every parameter matters."""
    model = random_proteinmpnn(seed, **{"num_edges": 8, "hidden_size": 16, "n_encoder": 2, "n_decoder": 2, **kwargs})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn(p.shape, generator=generator)
        model.W_s.weight *= 10                       # letters shall matter to their neighbours
    return model.double().eval()


def protein(lengths, unresolved=(), seed=0, width=None):
    """X, mask, residue_idx, chain_id and S of one protein with chains of these lengths, padded to `width`. Of the
    unresolved residues, those of even number lack O alone, the others all atoms."""
    generator = torch.Generator().manual_seed(seed)
    L = sum(lengths)
    step = F.normalize(torch.randn(L, 3, generator=generator, dtype=torch.float64), dim=-1)
    atoms = 1.5 * torch.randn(L, 4, 3, generator=generator, dtype=torch.float64)
    X = (3.8 * step).cumsum(0)[:, None] + atoms
    chain_id = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
    residue_idx = torch.arange(L) + 100 * (chain_id - 1)
    mask = torch.ones(L)
    mask[list(unresolved)] = 0
    for i in unresolved:
        X[i, 0 if i % 2 else 3:] = math.nan
    S = torch.randint(20, (L,), generator=generator)
    S[mask == 0] = X_LETTER
    fill = (math.nan, 0, -100, 0, 7)
    return [F.pad(x, (0,) * (2 * x.dim() - 1) + ((width or L) - L,), value=value)[None]
            for x, value in zip((X, mask, residue_idx, chain_id, S), fill)]


def random_order(L, M=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(L, generator=generator) for _ in range(M)])


PAIRS = ("CA CA, N N, C C, O O, CB CB, CA N, CA C, CA O, CA CB, N C, N O, N CB, CB C, CB O, O C, N CA, C CA, O CA, "
         "CB CA, C N, O N, CB N, C CB, O CB, C O")


@torch.no_grad()
def plain_log_probs(model, X, mask, residue_idx, chain_id, S, order):
    """One residue at a time, inputs of linear layers concatenated, as the method is written down. No padding."""
    p, L, K = dict(model.named_parameters()), len(S), model.num_edges

    def linear(name, *inputs):
        return torch.cat(inputs, -1) @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def gelu(x):
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    def mlp(prefix, names, *inputs):
        first, *others = names.split()
        x = linear(prefix + first, *inputs)
        for name in others:
            x = linear(prefix + name, gelu(x))
        return x

    def norm(name, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def distance(a, b):
        return math.sqrt(((a - b) ** 2).sum() + 1e-6)

    N, CA, C, O = X.where(X.isfinite(), 0).unbind(1)
    a, b = CA - N, C - CA
    CB = -0.58273431 * torch.linalg.cross(a, b) + 0.56802827 * a - 0.54067466 * b + CA
    atoms = {"N": N, "CA": CA, "C": C, "O": O, "CB": CB}
    centres = torch.linspace(2, 22, 16, dtype=X.dtype)
    E_idx, h_E = {}, {}
    inside = [i for i in range(L) if mask[i]]
    for i in inside:
        d = {j: distance(CA[i], CA[j]) for j in inside}
        far = max(d.values())
        E_idx[i] = sorted(range(L), key=lambda j: d.get(j, far + 1 + int(residue_idx[j])))[:K]
        edges = []
        for j in E_idx[i]:
            one_hot = torch.zeros(66, dtype=X.dtype)
            offset = int((residue_idx[i] - residue_idx[j]).clamp(-32, 32)) + 32
            one_hot[offset if chain_id[i] == chain_id[j] else 65] = 1
            between = [distance(atoms[u][i], atoms[v][j]) for u, v in (pair.split() for pair in PAIRS.split(", "))]
            between[0] = d.get(j, far)
            rbf = [torch.exp(-((x - centres) / 1.25) ** 2) for x in between]
            edges.append(linear("features.edge_embedding", linear("features.embeddings.linear", one_hot), *rbf))
        h_E[i] = linear("W_e", norm("features.norm_edges", torch.stack(edges)))

    def update(prefix, h, i, message):
        h = norm(f"{prefix}norm1", h[i] + message.sum(0) / 30)
        return norm(f"{prefix}norm2", h + mlp(prefix, "dense.W_in dense.W_out", h))

    h_V = torch.zeros(L, model.W_e.out_features, dtype=X.dtype)
    for layer in range(len(model.encoder_layers)):
        prefix = f"encoder_layers.{layer}."
        new = h_V.clone()
        for i, js in E_idx.items():
            message = mlp(prefix, "W1 W2 W3", h_V[i].expand(len(js), -1), h_E[i], h_V[js])
            new[i] = update(prefix, h_V, i, message * mask[js, None])
        h_V = new
        for i, js in E_idx.items():
            message = mlp(prefix, "W11 W12 W13", h_V[i].expand(len(js), -1), h_E[i], h_V[js])
            h_E[i] = norm(f"{prefix}norm3", h_E[i] + message)
    encoded, rank = h_V, order.argsort()
    for layer in range(len(model.decoder_layers)):
        prefix = f"decoder_layers.{layer}."
        new = h_V.clone()
        for i, js in E_idx.items():
            before = (rank[js] < rank[i])[:, None]
            letters = p["W_s.weight"][S[js]] * before
            new[i] = update(prefix, h_V, i, mlp(prefix, "W1 W2 W3", h_V[i].expand(len(js), -1), h_E[i], letters,
                                                torch.where(before, h_V[js], encoded[js])))
        h_V = new
    return torch.log_softmax(linear("W_out", h_V), -1)


@pytest.mark.parametrize("lengths, unresolved", [([20, 45], (3, 4, 30)), ([6, 6], (0, 4, 5, 6, 9, 11)),
                                                 ([12], (0, 5, 6, 7)), ([2], ())],
                         ids=["two chains", "mostly unresolved", "as many resolved residues as neighbours",
                              "fewer residues than neighbours"])
def test_log_probs_follow_the_formulas_as_they_are_written_down(lengths, unresolved):
    model, (*structure, S) = small_model(), protein(lengths, unresolved)
    order = random_order(S.shape[1])
    found = model(model.graph(*structure), S, order)
    expected = plain_log_probs(model, *(x[0] for x in structure), S[0], order[0])
    resolved = structure[1][0] == 1
    near(found[0][resolved], expected[resolved], atol=1e-9)


def test_names_shapes_and_number_of_parameters_are_the_published_ones():
    model, H = ProteinMPNN(), 128
    assert sum(p.numel() for p in model.parameters()) == 1_660_485
    found = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert len(found) == 118 and list(found) == [key for key, _ in model.named_parameters()]
    expected = {"features.embeddings.linear.weight": (16, 66), "features.edge_embedding.weight": (H, 416),
                "features.norm_edges.bias": (H,), "W_e.weight": (H, H), "W_s.weight": (21, H), "W_out.bias": (21,),
                "encoder_layers.2.norm3.weight": (H,), "encoder_layers.0.W11.weight": (H, 3 * H),
                "encoder_layers.1.W13.bias": (H,), "encoder_layers.2.dense.W_in.weight": (4 * H, H),
                "decoder_layers.2.W1.weight": (H, 4 * H), "decoder_layers.0.dense.W_out.weight": (H, 4 * H)}
    assert {key: found.get(key) for key in expected} == expected


# Invariances


def test_the_order_in_which_residues_are_listed_changes_nothing():
    model, (*structure, S) = small_model(), protein([9, 6], unresolved=(2, 3, 4, 8, 9, 10, 13, 14))
    order = random_order(15)
    expected = model(model.graph(*structure), S, order)
    shuffle = random_order(15, seed=1)[0]
    moved = model(model.graph(*(x[:, shuffle] for x in structure)), S[:, shuffle], shuffle.argsort()[order])
    near(moved, expected[:, shuffle], atol=1e-10)


def test_a_residue_does_not_see_letters_decoded_at_its_turn_or_later_and_sees_earlier_neighbours():
    model, (*structure, S) = small_model(num_edges=30), protein([30])
    encoding, order = model.encode(model.graph(*structure)), random_order(30)
    expected = model.decode(encoding, S, order)[0]
    for t in (0, 11, 28, 29):
        changed = S.clone()
        changed[0, order[0, t]] = (S[0, order[0, t]] + 1) % 20
        found = model.decode(encoding, changed, order)[0]
        assert torch.equal(found[order[0, :t + 1]], expected[order[0, :t + 1]])
        assert all(not torch.equal(found[i], expected[i]) for i in order[0, t + 1:])


def test_motion_of_the_backbone_changes_nothing_and_its_mirror_image_does():
    model, (X, *others, S) = small_model(), protein([25])
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=X.dtype))[0]
    rotation = rotation * rotation.det().sign()
    order, expected = random_order(25), model(model.graph(X, *others), S, random_order(25))
    near(model(model.graph(X @ rotation + 50, *others), S, order), expected, atol=1e-8)
    assert (model(model.graph(-X, *others), S, order) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("num_edges", [8, 64])
def test_padding_changes_neither_scores_nor_gradients(num_edges):
    model = small_model(num_edges=num_edges)
    proteins = ([30], ()), ([7, 5], (2, 6)), ([9], (1, 2, 3, 5)), ([1], ())

    def score(lengths, unresolved, width, rows):
        *structure, S = (torch.cat(x) for x in zip(*(protein(n, gaps, width=width) for n, gaps in zip(lengths,
                                                                                                    unresolved))))
        order = torch.cat([F.pad(random_order(sum(n)), (0, S.shape[1] - sum(n)), value=-1) for n in lengths])
        for row, n in zip(order, lengths):            # padding first: a padded residue is earlier than all others
            row.copy_(torch.cat([torch.arange(sum(n), len(row)), row[:sum(n)]]))
        log_probs = model(model.graph(*structure), S, order)
        sums = (of_letters(log_probs, S) * structure[1]).sum(-1)
        return sums.detach(), torch.autograd.grad(sums[rows].sum(), list(model.parameters()))

    alone = [score([lengths], [gaps], None, [0]) for lengths, gaps in proteins]
    for width in (30, 70):
        for row in range(len(proteins)):
            sums, gradients = score(*zip(*proteins), width, [row])
            near(sums[row:row + 1], alone[row][0], atol=1e-10)
            for found, expected in zip(gradients, alone[row][1]):
                near(found, expected, atol=1e-10)


def test_an_unresolved_residue_is_seen_by_the_atoms_it_has_and_a_missing_atom_is_one_at_0():
    model, (X, *others, S) = small_model(num_edges=20), protein([20], unresolved=(4, 11))
    resolved, score = others[0][0] == 1, lambda X: model(model.graph(X, *others), S, torch.arange(20)[None])[0]
    expected, moved = score(X)[resolved], X.clone()
    for value in (0, math.inf):
        moved[~X.isfinite()] = value
        near(score(moved)[resolved], expected)
    moved[0, 4, 0] += 1                               # N of the residue that lacks O
    assert (score(moved)[resolved] - expected).abs().max() > 1e-6
    model.num_edges = 8                               # nearer residues are enough: unresolved ones are no neighbours
    near(score(moved)[resolved], score(X)[resolved])


def test_no_tensor_is_larger_than_all_distances_or_the_neighbours_features():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if torch.is_tensor(x):
                    # storage, so that an expanded view counts as what it takes
                    self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
            return out

    L, K = 600, 2
    model, (*structure, S) = random_proteinmpnn(0, num_edges=K, hidden_size=8), protein([L])
    with Largest() as largest:
        model(model.graph(*structure), S, random_order(L))
    assert largest.numel == max(L * L, L * K * 400)


# Encode once


def test_sequences_sharing_an_encoding_score_as_in_passes_of_their_own():
    model = small_model()
    *structures, S = (torch.cat(x) for x in zip(*(protein([20], seed=seed) for seed in range(3))))
    encoding = model.encode(model.graph(*structures))
    which = torch.tensor([2, 0, 0, 2, 1])
    S, order = torch.randint(20, (5, 20), generator=torch.Generator().manual_seed(0)), random_order(20, M=5)
    found = model.decode(encoding, S, order, structure=which)
    for row, b in enumerate(which):
        graph = model.graph(*(x[b:b + 1] for x in structures))
        near(found[row:row + 1], model(graph, S[row:row + 1], order[row:row + 1]), atol=1e-10)
    one = Encoding(*(x[2:] for x in encoding))
    near(model.decode(one, S[[0, 3]], order[[0, 3]]), found[[0, 3]], atol=1e-10)
    near(model.decode(encoding, S[:3], order[:3])[0], model.decode(encoding, S[:1], order[:1], which[1:2])[0],
         atol=1e-10)


def test_the_first_residue_of_an_order_scores_as_without_a_sequence():
    model, (*structure, S) = small_model(), protein([12])
    encoding = model.encode(model.graph(*structure))
    unconditional = model.unconditional(encoding)
    for i in (0, 5, 11):
        order = torch.tensor([[i] + [j for j in range(12) if j != i]])
        near(model.decode(encoding, S, order)[0, i], unconditional[0, i], atol=1e-10)


def test_fixed_residues_come_first_in_a_random_order():
    generator = torch.Generator().manual_seed(0)
    designed = (torch.rand(200, 40, generator=generator) < 0.5).float()
    randn = torch.randn(200, 40, generator=generator)
    randn[0, designed[0].argmax()] = 1e-6            # where the published rule lets a designed residue go first
    order = decoding_order(designed, randn)
    near(order.sort(-1).values, torch.arange(40).expand(200, 40))
    near(designed.gather(1, order), designed.sort(-1).values)
    assert len({tuple(row.tolist()) for row in decoding_order(torch.ones(200, 40), randn)}) == 200


# Sampling


def sampling_case(M=1, num_edges=8, lengths=(20,), unresolved=()):
    model, (*structure, S) = small_model(num_edges=num_edges), protein(list(lengths), unresolved)
    return model, model.encode(model.graph(*structure)), S.expand(M, -1).clone(), random_order(S.shape[1], M)


def test_the_coldest_sample_is_the_best_letter_at_every_step_and_kept_letters_stay():
    model, encoding, S, order = sampling_case(M=4, unresolved=(3,))
    chain_M = (torch.arange(20) % 3 > 0).float()[None]
    bias = torch.randn(20, 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = model.sample(encoding, S, chain_M, order, temperature=0, bias=bias)
    drawn = (chain_M.bool() & encoding.mask)[0]
    assert torch.equal(found[:, ~drawn], S[:, ~drawn]) and not torch.equal(found, S)
    scores = model.decode(encoding, found, order) + bias
    near(found[:, drawn], scores[..., :X_LETTER].argmax(-1)[:, drawn])


def test_letters_are_drawn_with_the_probabilities_of_the_tempered_and_biased_model():
    M, T, i, later = 4_000, 0.5, 3, 6
    model, encoding, S, order = sampling_case(M=1, lengths=(8,))
    order = torch.tensor([[0, 1, 2, i, 4, 5, later, 7]])
    chain_M = F.one_hot(torch.tensor([i]), 8) + F.one_hot(torch.tensor([later]), 8)
    bias = torch.zeros(8, 21, dtype=torch.float64)
    bias[:, 4], bias[:, 5] = 0.7, -math.inf
    found = model.sample(encoding, S.expand(M, -1), chain_M, order.expand(M, -1), T, bias, omit="XC",
                         generator=torch.Generator().manual_seed(0))

    def expected(S, i):
        logits = model.decode(encoding, S, order)[0, i] + bias[i]
        logits[[1, X_LETTER]] = -math.inf
        return (logits / T).softmax(-1)

    p = expected(S, i)
    assert ((found[:, i].bincount(minlength=21) / M - p).abs() <= 5 * (p * (1 - p) / M).sqrt()).all()
    common = int(found[:, i].mode().values)          # the later draw is conditional on the earlier one
    chosen = found[found[:, i] == common]
    p = expected(chosen[:1], later)
    assert ((chosen[:, later].bincount(minlength=21) / len(chosen) - p).abs()
            <= 5 * (p * (1 - p) / len(chosen)).sqrt()).all()


def test_sequences_drawn_side_by_side_are_those_drawn_one_after_another():
    model, encoding, S, order = sampling_case(M=6)
    chain_M = torch.ones(1, 20)
    together, alone = (torch.Generator().manual_seed(3) for _ in range(2))
    found = model.sample(encoding, S, chain_M, order, 1.0, generator=together)
    for row in range(6):
        near(model.sample(encoding, S[:1], chain_M, order[row:row + 1], 1.0, generator=alone)[0], found[row])
    assert len(found.unique(dim=0)) == 6


def test_many_structures_are_sampled_in_one_pass():
    model = small_model()
    *structures, S = (torch.cat(x) for x in zip(*(protein([n], seed=n, width=15) for n in (15, 9))))
    which, order = torch.tensor([1, 0, 1]), random_order(15, M=3)
    encoding = model.encode(model.graph(*structures))
    found = model.sample(encoding, S[which], torch.ones(3, 15), order, 0, structure=which)
    for row, b in enumerate(which):
        one = Encoding(*(x[b:b + 1] for x in encoding))
        near(model.sample(one, S[b:b + 1], torch.ones(1, 15), order[row:row + 1], 0)[0], found[row])
    assert (found[[0, 2], 9:] == 7).all()            # padding keeps what it had


def test_a_tied_group_draws_from_the_mean_of_its_members_when_the_first_of_them_is_due():
    model, encoding, S, _ = sampling_case(num_edges=12, lengths=(6, 6))
    M, T, (i, j), triple = 2_000, 0.1, (2, 8), [3, 4, 5]
    others = [k for k in range(12) if k not in (i, j, *triple)]
    chain_M = torch.zeros(1, 12)
    chain_M[0, [i, j, *triple]] = 1

    def logits(before, k):
        after = [n for n in range(12) if n not in (k, *before)]
        return model.decode(encoding, S, torch.tensor([[*before, k, *after]]))[0, k, :X_LETTER]

    for before, after in ((others, triple), (others[:3], others[3:] + triple)):
        p = ((logits(before, i) + logits(before, j)) / (2 * T)).softmax(-1).detach()
        order = torch.tensor([[*before, j, *after[:-3], i, *after[-3:]]]).expand(M, -1)
        found = model.sample(encoding, S.expand(M, -1), chain_M, order, T, tied=[[i, j], triple],
                             generator=torch.Generator().manual_seed(0))
        assert torch.equal(found[:, i], found[:, j]) and torch.equal(found[:, others], S[:, others].expand(M, -1))
        assert ((found[:, i].bincount(minlength=20) / M - p).abs() <= 5 * (p * (1 - p) / M).sqrt()).all()


def test_tied_positions_share_their_letters_whatever_the_orders_and_group_sizes():
    model, encoding, S, order = sampling_case(M=8, lengths=(8, 8, 8), unresolved=(2, 17))
    tied = [[i, i + 8, i + 16] for i in range(4)] + [[5, 13]]
    generator = torch.Generator().manual_seed(0)
    found = model.sample(encoding, S, torch.ones(1, 24), order, 1.0, tied=tied, generator=generator)
    for group in tied:
        letters = [found[:, i] for i in group if encoding.mask[0, i]]
        assert len(letters) > 1 and all(torch.equal(letter, letters[0]) for letter in letters)
    assert (found[:, [2, 17]] == X_LETTER).all() and (found[:, encoding.mask[0]] < X_LETTER).all()
    assert not torch.equal(found[:, 6], found[:, 14])
    near(model.sample(encoding, S, torch.ones(1, 24), order, 1.0, generator=generator.manual_seed(1)),
         model.sample(encoding, S, torch.ones(1, 24), order, 1.0, tied=[[2, 10]], generator=generator.manual_seed(1)))


def test_sampling_refuses_what_cannot_be_drawn():
    model, encoding, S, order = sampling_case(M=2)
    ones = torch.ones(2, 20)
    half = torch.arange(20).expand(2, 20) < 10
    uneven = ones.clone()
    uneven[0, :2] = 0
    never = torch.zeros(20, 21)
    never[7] = -math.inf
    for kwargs, match in ((dict(tied=[[1, 2], [2, 3]]), "none of them twice"), (dict(tied=[[1, 20]]), "0 to 19"),
                          (dict(chain_M=half, tied=[[1, 12]]), "mixes drawn"),
                          (dict(chain_M=uneven, tied=[[0, 1]]), "same drawn positions"),
                          (dict(bias=never), r"\[0, 7\], \[1, 7\]"), (dict(omit=ALPHABET), "no letter"),
                          (dict(omit="B"), "'B'; expected"), (dict(temperature=-1.0), "temperature -1"),
                          (dict(temperature=math.nan), "temperature nan"), (dict(temperature=1e40), "temperature 1e"),
                          (dict(chain_M=ones[0]), r"chain_M is \(20,\)"),
                          (dict(bias=torch.zeros(3, 20, 21)), r"bias \(3, 20, 21\)")):
        with pytest.raises(ValueError, match=match):
            model.sample(encoding, S, **{"chain_M": ones, "decoding_order": order, **kwargs})
    kept = ones.clone()
    kept[:, 7] = 0
    assert torch.equal(model.sample(encoding, S, kept, order, bias=never)[:, 7], S[:, 7])


# Precision, dropout, boundary


def test_a_float64_model_computes_in_float64_and_autocast_stays_close():
    exact, (X, *others, S) = small_model(), protein([40])
    order = random_order(40)
    expected = exact(exact.graph(X, *others), S, order)
    assert expected.dtype == torch.float64 and not torch.equal(expected, expected.float().double())
    model = copy.deepcopy(exact).float()
    graph = model.graph(X.float(), *others)
    near(model(graph, S, order).double(), expected, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = model(graph, S, order)
        sampled = model.sample(model.encode(graph), S, torch.ones(1, 40), order, 0)
    assert log_probs.dtype == torch.float32 and sampled.dtype == torch.int64
    near(log_probs.detach().double(), expected.detach(), atol=0.2)
    of_letters(log_probs, S).sum().backward()
    of_letters(expected, S).sum().backward()
    for p, q in zip(model.parameters(), exact.parameters()):
        assert p.grad.dtype == torch.float32 and (p.grad - q.grad).norm() < 0.1 * q.grad.norm()
    whole = copy.deepcopy(exact).bfloat16()
    near(whole(graph, S, order).double(), expected, atol=0.5)


def test_dropout_acts_in_training_only_and_is_off_unless_asked_for():
    (*structure, S), order = protein([15]), random_order(15)
    for dropout in (None, 0.5):
        model = random_proteinmpnn(0, hidden_size=16, **({} if dropout is None else {"dropout": dropout})).double()
        graph = model.graph(*structure)
        same = torch.equal(model(graph, S, order), model(graph, S, order))
        assert same == (dropout is None)
        assert torch.equal(model.eval()(graph, S, order), model(graph, S, order))
    calls = []
    for layer in (*model.encoder_layers, *model.decoder_layers):
        layer.drop.register_forward_hook(lambda *_: calls.append(1))
    model(graph, S, order)
    assert len(calls) == 3 * 3 + 3 * 2               # each message, feed-forward and edge update, as published


def test_wrong_inputs_are_refused_with_what_was_found():
    model, (X, mask, residue_idx, chain_id, S) = small_model(), protein([10])
    infinite, padded = X.clone(), chain_id.clone()
    infinite[0, 3, 1, 2], padded[0, 4] = math.inf, 0
    good = dict(X=X, mask=mask, residue_idx=residue_idx, chain_id=chain_id)
    for wrong, match in ((dict(X=X[:, :, :3]), r"\(1, 10, 3, 3\)"), (dict(X=X.long()), "int64; expected"),
                         (dict(mask=mask[:, :9]), r"mask is \(1, 9\)"),
                         (dict(residue_idx=mask), "residue_idx is .*float"),
                         (dict(chain_id=chain_id[0]), r"chain_id is \(10,\)"), (dict(X=infinite), "not finite"),
                         (dict(chain_id=padded), "means padding")):
        with pytest.raises(ValueError, match=match):
            model.graph(**{**good, **wrong})
    encoding = model.encode(model.graph(*(x.expand(2, *x.shape[1:]) for x in good.values())))
    S, order = S.expand(3, -1), random_order(10, 3)
    which = torch.tensor([0, 1, 1])
    for args, match in (((S[:, :9], order, which), r"S is \(3, 9\)"), ((S.int(), order, which), "int32"),
                        ((S, order[:2], which), r"decoding_order is \(2, 10\)"), ((S, order), "structure is None"),
                        ((S, order, which[:2]), r"structure is \(2,\)"),
                        ((S, order, which + 1), "structure has .* 1 to 2"),
                        ((S + 15, order, which), "S has values"), ((S, order * 0, which), "permutation")):
        with pytest.raises(ValueError, match=match):
            model.decode(encoding, *args)


# Files


def test_a_saved_model_loads_back_exactly_and_is_laid_out_as_published(tmp_path):
    model = random_proteinmpnn(1, num_edges=30, hidden_size=8, n_encoder=1, n_decoder=2, noise_level=0.1)
    path = tmp_path / "model.pt"
    save_proteinmpnn(path, model, epoch=3)
    file = torch.load(path, weights_only=True)
    assert (file["num_edges"], file["noise_level"], file["epoch"]) == (30, 0.1, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    loaded = load_proteinmpnn(path, dropout=0.1)
    assert (loaded.num_edges, loaded.noise_level, loaded.encoder_layers[0].drop.p) == (30, 0.1, 0.1)
    for (name, p), (other, q) in zip(model.named_parameters(), loaded.named_parameters()):
        assert name == other and q.requires_grad and torch.equal(p, q)
    file["model_state_dict"] = {f"module.{key}": value.bfloat16() for key, value in file["model_state_dict"].items()}
    rounded = from_checkpoint(file)
    assert all(torch.equal(q, p.bfloat16().float()) for p, q in zip(model.parameters(), rounded.parameters()))


def test_files_of_something_else_are_refused_with_what_was_found(tmp_path):
    model = random_proteinmpnn(0, hidden_size=8, n_encoder=1, n_decoder=1)
    good, path = to_checkpoint(model), tmp_path / "model.pt"

    def weights(**changed):
        state = {**good["model_state_dict"], **changed}
        return {**good, "model_state_dict": {key: value for key, value in state.items() if value is not None}}

    def without(key):
        return {name: value for name, value in good.items() if name != key}

    cases = [(weights(**{"W_v.weight": torch.ones(8, 8)}), "CA-only"),
             (weights(**{"features.node_embedding.weight": torch.ones(8, 8)}), "CA-only"),
             (weights(**{"context_encoder_layers.0.norm1.weight": torch.ones(8)}), "LigandMPNN"),
             (weights(**{"W_out.bias": None}), "missing W_out.bias"),
             (weights(extra=torch.ones(1)), "unexpected extra"),
             (weights(**{"W_s.weight": torch.ones(22, 8)}), r"W_s.weight is \(22, 8\), not \(21, 8\)"),
             (weights(**{"W_e.weight": torch.full((8, 8), math.nan)}), "W_e.weight has values that are not finite"),
             (weights(**{"W_e.bias": [1.0]}), "'W_e.bias': list; expected a dict of tensors"),
             (weights(**{"W_e.bias": torch.ones(8).char()}), "'W_e.bias': torch.strided torch.int8"),
             (weights(**{"W_e.bias": torch.ones(8) + 0j}), "complex64"),
             (weights(**{"W_e.bias": torch.ones(0)}), "has 0"), (weights(**{"W_e.bias": torch.ones(9999)}), "9,999"),
             (weights(**{"W_s.weight": torch.ones(21, 8).to_sparse()}), "torch.sparse_coo"),
             ({**good, "model_state_dict": {**good["model_state_dict"], 3: torch.ones(1)}}, "has 3: "),
             ({**good, "model_state_dict": {k: v for k, v in good["model_state_dict"].items() if "coder" not in k}},
              r"0 \+ 0 layers"), ({**good, "num_edges": 10 ** 12}, "num_edges 1000000000000"),
             ({**good, "noise_level": math.nan}, "noise_level nan"),
             ({**good, "noise_level": -0.1}, "noise_level -0.1"),
             (good["model_state_dict"], "expected num_edges"),
             (without("num_edges"), "holds noise_level"), (without("noise_level"), "expected .*noise_level"),
             (without("model_state_dict"), "expected .*model_state_dict"), ({**good, "num_edges": 0}, "num_edges 0"),
             ({**good, "num_edges": 48.0}, "48.0"), ({**good, "noise_level": "0.2"}, "'0.2'"), ([1, 2], "holds a list")]
    for content, match in cases:
        torch.save(content, path)
        with pytest.raises(ValueError, match=match) as error:
            load_proteinmpnn(path)
        assert str(path) in str(error.value)
    torch.save(model, path)                          # an object of a class, not tensors: its code is not run
    for content in (path.read_bytes(), b"", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            load_proteinmpnn(path)
    for missing in (tmp_path / "v_48_020.pt", tmp_path):
        with pytest.raises(ValueError, match="There is no file .*vanilla_model_weights"):
            load_proteinmpnn(missing)


def test_random_weights_come_from_their_seed_and_leave_torchs_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (random_proteinmpnn(seed, hidden_size=8) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.W_out.weight, other.W_out.weight)
    bound = math.sqrt(6 / (21 + 8))                 # Xavier: every matrix, the embedding table too
    assert 0.8 * bound < first.W_s.weight.abs().max() <= bound
