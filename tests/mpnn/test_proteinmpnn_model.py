"""ProteinMPNN against the official code's numbers; padding, sampling, dropout and files."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mpnn.model import (
    ALPHABET,
    ProteinMPNN,
    SharedContext,
    decoded_before,
    decoding_order,
    decoding_steps,
    from_checkpoint,
    independent_steps,
    random_proteinmpnn,
    to_checkpoint,
)
from mpnn.weights import load_proteinmpnn
from mpnn_cases import each_case, graph_of, near, official_numbers
from training import fast_linear

X_LETTER = 20


def of_letters(log_probs, S):
    return log_probs.gather(-1, S[..., None])[..., 0]


# ---- the official code's numbers ----

@pytest.fixture(scope="module", params=["as written", "by oneDNN"])
def fixture(shared, request):
    by_onednn = request.param == "by oneDNN"
    if by_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    product = fast_linear.fast_linear if by_onednn else F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_linear, "onednn_is_faster", lambda *_: True)
        yield official_numbers(shared, product)


def scored(inputs):
    return inputs["mask"] * inputs["chain_M_full"]


@torch.no_grad()
def test_features_and_encoder_agree_with_the_official_code(fixture):
    for case, inputs, model, _ in each_case(fixture, "features"):
        features = case["features"]
        resolved = inputs["mask"].bool()
        graph = graph_of(model, inputs)
        near(graph.E_idx[resolved], features["E_idx"][resolved])
        n_rows = features["E_rows"].shape[1]
        L = resolved.shape[1]
        every = next(step for step in (16, 64) if math.ceil(L / step) == n_rows)
        rows = resolved[:, ::every]
        near(model.features(graph)[:, ::every][rows], features["E_rows"][rows], atol=1e-4)
        encoding = model.encode(graph)
        near(encoding.h_V, case["encoder"]["h_V"], atol=2e-4)
        near(encoding.h_E[:, ::every][rows], case["encoder"]["h_E_rows"][rows], atol=2e-4)


@torch.no_grad()
def test_log_probs_agree_with_the_official_code(fixture):
    for case, inputs, *models in each_case(fixture, "dpo"):
        resolved = inputs["mask"].bool()
        expected = case["ref"]
        order = decoding_order(scored(inputs), inputs["randn"])
        near(order, inputs["decoding_order"])
        S = torch.cat([inputs["S"], inputs["S_chosen"], inputs["S_rejected"]])
        for who, model in zip(("ref", "policy"), models):
            log_probs = model(graph_of(model, inputs), S, order.expand(3, -1))
            sums = (of_letters(log_probs, S) * scored(inputs)).sum(-1)
            for row, what in enumerate(("native", "chosen", "rejected")):
                near(sums[row:row + 1], expected[f"{who}_{what}_sum_logp"], atol=2e-3)
                if f"{who}_{what}_log_probs" in expected:
                    near(log_probs[row][resolved[0]],
                         expected[f"{who}_{what}_log_probs"][resolved], atol=1e-4)
        encoding = models[0].encode(graph_of(models[0], inputs))
        near(models[0].unconditional(encoding)[resolved],
             expected["ref_unconditional_log_probs"][resolved], atol=1e-4)
        log_probs = models[0].decode(encoding, S[:1], torch.arange(S.shape[1])[None])
        sums = (of_letters(log_probs, S[:1]) * scored(inputs)).sum(-1)
        near(sums, expected["ref_native_sum_logp_arange"], atol=2e-3)


# Tolerances of rewards, whole gradient and each of its parameters (relative and in addition).
EXACT = (3e-4, 2e-3, 1e-2, 1e-4)
ROUNDED = (0.05, 0.02, 0.03, 1e-3)


@pytest.mark.parametrize("dtype, tolerances", [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)])
def test_dpo_loss_and_gradients_agree_with_the_official_code(fixture, dtype, tolerances):
    rewards_atol, rtol, each_rtol, each_atol = tolerances
    for case, inputs, reference, policy in each_case(fixture, "dpo"):
        expected = case["dpo"]
        S = torch.cat([inputs["S_chosen"], inputs["S_rejected"]])

        def sums(model):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                order = inputs["decoding_order"].expand(2, -1)
                log_probs = model(graph_of(model, inputs), S, order)
            return (of_letters(log_probs, S) * scored(inputs)).sum(-1)

        with torch.no_grad():
            reference_sums = sums(reference)
        rewards = expected["beta"] * (sums(policy) - reference_sums)
        near(rewards.detach(), torch.cat([expected["rewards_chosen"],
                                          expected["rewards_rejected"]]), atol=rewards_atol)
        loss = -F.logsigmoid(rewards[0] - rewards[1])
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        norms = torch.stack([gradient.double().norm() for gradient in gradients])
        near(norms.norm(), expected["grad_norm"], rtol=rtol)
        official = [expected["grad_norms"][name] for name, _ in policy.named_parameters()]
        near(norms, torch.stack(official), rtol=each_rtol, atol=each_atol)


@torch.no_grad()
def test_greedy_sampling_agrees_with_the_official_code(fixture):
    for case, inputs, model, _ in each_case(fixture, "greedy"):
        expected = case["greedy"]
        designed = inputs["chain_M"] * expected["chain_M_pos"]
        order = decoding_order(designed * inputs["mask"], expected["randn"])
        near(order, expected["decoding_order"])
        encoding = model.encode(graph_of(model, inputs))
        for temperature in (0, 1e-4):
            S, _ = model.sample(encoding, inputs["S"], designed, order, temperature,
                                bias=expected["bias_by_res"])
            assert "".join(ALPHABET[letter] for letter in S[0]) == expected["seq"]
        near(model.decode(encoding, S, order), expected["log_probs"], atol=1e-4)


# ---- padding ----

def small_model(num_edges=8, ca_only=False):
    """A small model in float64 whose every parameter matters."""
    model = random_proteinmpnn(0, num_edges=num_edges, hidden_size=16, n_encoder=2, n_decoder=2,
                               ca_only=ca_only)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        model.W_s.weight *= 10                       # letters shall matter to their neighbours
    return model.double().eval()


def protein(lengths, unresolved=(), width=None):
    """X, mask, residue_idx, chain_id and S of one protein with chains of these lengths.

    Padded to `width`. Of the unresolved residues, those of even number lack O alone, the others all
    atoms.
    """
    generator = torch.Generator().manual_seed(0)
    L = sum(lengths)
    step = F.normalize(torch.randn(L, 3, generator=generator, dtype=torch.float64), dim=-1)
    atoms = 1.5 * torch.randn(L, 4, 3, generator=generator, dtype=torch.float64)
    atoms[:, 1] = 0     # CA atoms are 3.8 Angstrom apart: CA-only models make frames from them
    X = (3.8 * step).cumsum(0)[:, None] + atoms
    chain_id = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
    residue_idx = torch.arange(L) + 100 * (chain_id - 1)
    mask = torch.ones(L)
    mask[list(unresolved)] = 0
    for i in unresolved:
        X[i, 0 if i % 2 else 3:] = math.nan
    S = torch.randint(20, (L,), generator=generator)
    S[mask == 0] = X_LETTER
    tensors = (X, math.nan), (mask, 0), (residue_idx, -100), (chain_id, 0), (S, 7)
    return [F.pad(x, (0,) * (2 * x.dim() - 1) + ((width or L) - L,), value=padding)[None]
            for x, padding in tensors]


def random_order(L, M=1):
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(L, generator=generator) for _ in range(M)])


@pytest.mark.parametrize("num_edges, ca_only", [(8, False), (64, False), (64, True)])
def test_padding_changes_neither_scores_nor_gradients(num_edges, ca_only):
    model = small_model(num_edges, ca_only)
    cases = ([30], ()), ([7, 5], (2, 6)), ([9], (1, 2, 3, 5)), ([1], ())

    def score(cases, width, row):
        *structure, S = [torch.cat(x) for x in zip(*(protein(*case, width=width)
                                                     for case in cases))]
        order = torch.stack([       # padding first: a padded residue is earlier than all others
            torch.cat([torch.arange(sum(lengths), S.shape[1]), random_order(sum(lengths))[0]])
            for lengths, _ in cases])
        sums = (of_letters(model(model.graph(*structure), S, order), S) * structure[1]).sum(-1)
        return [sums[row].detach(), *torch.autograd.grad(sums[row], list(model.parameters()))]

    for row, case in enumerate(cases):
        alone = score([case], None, 0)
        for width in (30, 70):
            for found, expected in zip(score(cases, width, row), alone):
                near(found, expected, atol=1e-10)


# ---- few designed residues ----

def few_designed():
    """Five sequences on two structures of 12 and 9 residues, three contexts in all.

    Returns: structures (tensors of `graph`), S, order, structure and the SharedContext."""
    cases = [protein([12], unresolved=(4,)), protein([5, 4], unresolved=(2,), width=12)]
    *tensors, S = [torch.cat(x) for x in zip(*cases)]
    designed_at = [[3, 7], [3, 7], [3, 7], [1, 6], [1, 6]]
    first = torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 10, 11])
    second = first.flip(0)              # another order of the same residues
    third = torch.tensor([5, 0, 2, 8, 3, 7, 4])
    padding = torch.tensor([9, 10, 11])
    order = torch.stack([
        torch.cat([first, torch.tensor([3, 7])]), torch.cat([first, torch.tensor([7, 3])]),
        torch.cat([second, torch.tensor([3, 7])]),
        *[torch.cat([third, torch.tensor([6, 1]), padding])] * 2])
    structure = torch.tensor([0, 0, 0, 1, 1])
    designed = F.one_hot(torch.tensor(designed_at), 12).sum(1).bool()
    S = S[structure].clone()
    S[designed] = torch.randint(20, (10,), generator=torch.Generator().manual_seed(1))
    shared = SharedContext(designed, torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 2, 3]))
    return tensors, S, order, structure, shared


@pytest.mark.parametrize("num_edges", [4, 64])
def test_a_shared_context_changes_neither_scores_nor_gradients_of_designed_residues(num_edges):
    model = small_model(num_edges=num_edges)
    tensors, S, order, structure, shared = few_designed()

    def score(shared_context):
        log_probs = model(model.graph(*tensors), S, order, structure, shared_context)
        of_designed = log_probs[shared.designed]
        loss = (of_designed * torch.arange(of_designed.numel()).view_as(of_designed)).sum()
        return [of_designed.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    for found, expected in zip(score(shared), score(None)):
        near(found, expected, rtol=1e-9, atol=1e-10)


def test_a_shared_context_is_run_once():
    """Counted in rows that the first decoder layer updates: those of three contexts at most, and
    two designed residues of each of five sequences."""
    model = small_model(num_edges=64)
    tensors, S, order, structure, shared = few_designed()
    n_rows = []
    model.decoder_layers[0].register_forward_pre_hook(
        lambda layer, inputs: n_rows.append(inputs[0].flatten(0, -2).shape[0]))
    model(model.graph(*tensors), S, order, structure, shared)
    assert n_rows[0] <= 3 * 10 + 5 * 2


def test_in_bfloat16_a_shared_context_gives_the_scores_in_bfloat16():
    model = small_model(num_edges=64).float()
    tensors, S, order, structure, shared = few_designed()
    tensors[0] = tensors[0].float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = model.graph(*tensors)
        found = model(graph, S, order, structure, shared)[shared.designed]
        expected = model(graph, S, order, structure)[shared.designed]
    assert found.dtype == torch.float32
    near(found, expected, atol=0.05)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_in_low_precision_take_coordinates_in_float32(weights, autocast):
    model = small_model().float()
    X, *structure, S = protein([20, 10])
    graph = model.graph(X.float(), *structure)
    with torch.no_grad():
        expected = model(graph, S, random_order(30))
        with torch.autocast("cpu", weights, enabled=autocast):
            found = model.to(weights)(graph, S, random_order(30))
    assert (found - expected).norm() < 0.1 * expected.norm()


# ---- sampling ----

def test_a_letter_is_drawn_given_those_that_were_drawn_before():
    model = small_model()
    (*structure, S) = protein([20], unresolved=(3,))
    encoding = model.encode(model.graph(*structure))
    order = random_order(20, 3)
    chain_M = (torch.arange(20) % 3 > 0).float()[None]
    found, probs = model.sample(encoding, S.expand(3, -1), chain_M, order, 0.7)
    assert len(found.unique(dim=0)) == 3, "each sequence has its own noise"
    drawn = (chain_M.bool() & encoding.mask)[0]
    expected = (model.decode(encoding, found, order)[..., :X_LETTER] / 0.7).softmax(-1)
    near(probs[:, drawn, :X_LETTER], expected[:, drawn], atol=1e-12)
    assert not probs[:, ~drawn].any() and torch.equal(found[:, ~drawn], S.expand(3, -1)[:, ~drawn])


def test_a_tied_group_draws_from_the_mean_of_its_members_when_the_first_is_due():
    model = small_model(num_edges=12)
    (*structure, S) = protein([6, 6], unresolved=(9,))
    encoding = model.encode(model.graph(*structure))
    T = 0.5       # absent: not one of its members
    i = 2
    j = 8
    absent = 9
    triple = [3, 4, 5]
    others = [k for k in range(12) if k not in (i, j, *triple)]
    chain_M = F.one_hot(torch.tensor([i, j, absent, *triple]), 12).sum(0, keepdim=True)
    bias = torch.zeros(12, 21, dtype=torch.float64)
    bias[i, 3] = 1

    def logits(before, k):
        after = [n for n in range(12) if n not in (k, *before)]
        return model.decode(encoding, S, torch.tensor([[*before, k, *after]]))[0, k, :X_LETTER]

    for before, after in ((others, triple), (others[:3], others[3:] + triple)):
        order = torch.tensor([[*before, j, *after[:-3], i, *after[-3:]]])
        found, probs = model.sample(encoding, S, chain_M, order, T, bias,
                                    tied=[[i, j, absent], triple])
        assert found[0, i] == found[0, j] and torch.equal(found[:, others], S[:, others])
        scores = logits(before, i) + logits(before, j) + bias[i, :X_LETTER]
        near(probs[0, [i, j], :X_LETTER], (scores / 2 / T).softmax(-1).expand(2, -1), atol=1e-12)


def test_sampling_refuses_what_cannot_be_drawn():
    model = small_model()
    (*structure, S) = protein([20])
    encoding = model.encode(model.graph(*structure))
    order = random_order(20, 2)
    ones = torch.ones(2, 20)
    half = torch.arange(20).expand(2, 20) < 10
    split = torch.zeros(20, 21)                     # tied, these two allow no common letter
    split[4, 1:] = -math.inf
    split[5, :1] = -math.inf
    for options, message in (
            (dict(tied=[[1, 2], [2, 3]]), "tied"),
            (dict(chain_M=half, tied=[[1, 12]]), "tied|12"),
            (dict(temperature=math.nan), "temperature is nan"),
            (dict(tied=[[4, 5]], bias=split), r"\[0, 4\], \[0, 5\]")):
        with pytest.raises(ValueError, match=message):
            model.sample(encoding, S.expand(2, -1), **{"chain_M": ones, "decoding_order": order,
                                                       **options})


# ---- dropout, boundary ----

def test_dropout_acts_in_training_only_and_is_off_unless_asked_for():
    (*structure, S) = protein([15])
    order = random_order(15)
    calls = []
    for options in ({}, {"dropout": 0.5}):
        model = random_proteinmpnn(0, hidden_size=16, **options).double()
        graph = model.graph(*structure)
        assert torch.equal(model(graph, S, order), model(graph, S, order)) == (not options)
        assert torch.equal(model.eval()(graph, S, order), model(graph, S, order))
    for layer in (*model.encoder_layers, *model.decoder_layers):
        layer.drop.register_forward_hook(lambda *_: calls.append(1))
    model(graph, S, order)
    assert len(calls) == 3 * 3 + 3 * 2      # each message, feed-forward and edge update


def test_wrong_inputs_are_refused_with_what_was_found():
    model = small_model()
    (X, mask, residue_idx, chain_id, S) = protein([10])
    X[0, 3, 1, 2] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        model.graph(X, mask, residue_idx, chain_id)
    encoding = model.encode(model.graph(*protein([10])[:4]))
    order = random_order(10, 3)
    for wrong, message in ((order[:2], r"\(3, 10\), \(2, 10\)"), (order * 0, "permutation")):
        with pytest.raises(ValueError, match=message):
            model.decode(encoding, S.expand(3, -1), wrong)
    with pytest.raises(ValueError, match="bfloat16"):
        model.decode(encoding, S.bfloat16(), random_order(10))


# ---- files ----

@pytest.mark.parametrize("ca_only", [False, True])
def test_a_saved_model_loads_back_exactly_and_is_laid_out_as_published(tmp_path, ca_only):
    model = random_proteinmpnn(1, num_edges=30, hidden_size=8, n_encoder=1, n_decoder=2,
                               noise_level=0.1, ca_only=ca_only)
    path = tmp_path / "model.pt"
    torch.save(to_checkpoint(model, epoch=3), path)
    file = torch.load(path, weights_only=True)
    assert (file["num_edges"], file["noise_level"], file["epoch"]) == (30, 0.1, 3)
    loaded = load_proteinmpnn(path, dropout=0.1)
    assert loaded.ca_only == ca_only
    assert (loaded.num_edges, loaded.noise_level, loaded.encoder_layers[0].drop.p) == (30, 0.1, 0.1)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) and value.requires_grad
               for name, value in loaded.named_parameters())
    file["model_state_dict"] = {f"module.{name}": value.bfloat16()
                                for name, value in weights.items()}
    rounded = from_checkpoint(file).state_dict()
    assert all(torch.equal(rounded[name], weights[name].bfloat16().float()) for name in weights)


def test_files_of_something_else_are_refused_with_what_was_found(tmp_path):
    good = to_checkpoint(random_proteinmpnn(0, hidden_size=8, n_encoder=1, n_decoder=1))
    state = good["model_state_dict"]
    ones = torch.ones
    path = tmp_path / "model.pt"

    def weights(changes):
        changed = {**state, **changes}
        return {**good, "model_state_dict": {k: v for k, v in changed.items() if v is not None}}

    cases = [(weights(changes), message) for changes, message in (
        ({"W_v.weight": ones(8, 8), "features.edge_embedding.weight": ones(8, 167)},
         "not a CA-only ProteinMPNN .*Missing key.*features.node_embedding.weight"),
        ({"W_v.weight": ones(8, 8), "features.node_embedding.weight": ones(8, 3)},
         "a membrane-label ProteinMPNN"),
        ({"context_encoder_layers.0.norm1.weight": ones(8)}, "LigandMPNN"),
        ({"W_out.bias": None}, "Missing key.* .W_out.bias"),
        ({"W_s.weight": ones(22, 8)}, r"mismatch for W_s.weight: .*\[22, 8\].*\[21, 8\]"),
        ({"W_e.weight": torch.full((8, 8), math.nan)}, "W_e.weight has values that are not finite"),
        ({"W_e.weight": torch.ones(8, 8, dtype=torch.int8)}, "int8; expected floating point"),
        ({name: None for name in state if "coder" in name}, r"0 encoder and 0 decoder layers"))]
    without_edges = {name: value for name, value in good.items() if name != "num_edges"}
    for content, message in [*cases, (without_edges, "no .*num_edges"), (state, "expected all"),
                             ([1, 2], "no model_state_dict")]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=message) as error:
            load_proteinmpnn(path)
        assert str(path) in str(error.value)
    torch.save(ProteinMPNN(hidden_size=8), path)    # an object of a class: its code is not run
    for content, message in ((path.read_bytes(), "cannot be read"), (b"", "is empty")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_proteinmpnn(path)
    with pytest.raises(ValueError, match="v_48_020.pt"):
        load_proteinmpnn(tmp_path / "v_48_020.pt")


def test_a_file_with_a_wrong_byte_among_its_numbers_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    model = random_proteinmpnn(0, hidden_size=8)
    torch.save(to_checkpoint(model), path)
    numbers = model.W_s.weight.detach().numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(numbers, numbers[::-1]))
    with pytest.raises(ValueError, match="weights.pt"):
        load_proteinmpnn(path)


def test_random_weights_come_from_their_seed_and_leave_torchs_generator_alone():
    state = torch.get_rng_state()
    first, again, other = (random_proteinmpnn(seed, hidden_size=8) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.W_out.weight, other.W_out.weight)
    bound = math.sqrt(6 / (21 + 8))                 # Xavier: every matrix, the embedding table too
    assert 0.8 * bound < first.W_s.weight.abs().max() <= bound


class ProductsOfEdges(TorchFunctionMode):
    """Notes the shapes (B, L, K, n) that F.linear is given."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[0].dim() == 4:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_every_product_of_edges_is_computed_by_the_product_that_is_given():
    given = []

    def product(x, weight, bias=None):
        if x.dim() == 4:
            given.append(x.shape)
        return F.linear(x, weight, bias)

    model = random_proteinmpnn(0, hidden_size=8, num_edges=6, product=product)
    X, mask, residue_idx, chain_id, S = protein([12])
    order = torch.arange(12)[None]
    with ProductsOfEdges() as computed:
        model(model.graph(X.float(), mask, residue_idx, chain_id), S, order)
    assert given and computed.shapes == given


@pytest.mark.parametrize("name, advice", [("vocab_embed.embedding", "a SEDD model"),
                                          ("W_e.weight", "latest_model.pt")])
def test_a_checkpoint_that_holds_no_weights_for_it_says_what_it_is(tmp_path, name, advice):
    torch.save({"model": {name: torch.zeros(1)}}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=advice):
        load_proteinmpnn(tmp_path / "last.pt")


@pytest.mark.parametrize("tied", [[], [[3, 9], [0, 5, 11]]])
def test_steps_of_a_pass_do_not_see_one_another(tied):
    """Whatever a residue sees has been decoded in a pass before."""
    generator = torch.Generator().manual_seed(0)
    M = 3
    L = 40
    K = 5
    E_idx = torch.rand(M, L, L, generator=generator).argsort(-1)[..., :K]
    order = torch.rand(M, L, generator=generator).argsort(-1)
    step_of, steps, _ = decoding_steps(order, tied)
    visible = decoded_before(step_of, E_idx)
    T = steps.shape[1]
    decoded = torch.zeros(M, L, dtype=torch.bool)
    passes = independent_steps(steps, range(T), E_idx, visible)
    for sequence, turn in passes:
        for m, t in zip(sequence.tolist(), turn.tolist()):
            for i in steps[m, t]:
                assert decoded[m, E_idx[m, i][visible[m, i]]].all()
        decoded[sequence[:, None], steps[sequence, turn]] = True
    assert decoded.all()
    assert sum(len(sequence) for sequence, _ in passes) == M * T
    assert len(passes) < T / 2
