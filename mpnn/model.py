"""ProteinMPNN: from a protein backbone, log-probabilities of the amino acid at each residue.

    file = torch.load("v_48_020.pt", weights_only=True)     # published, also of CA-only models
    model = from_checkpoint(file)
    graph = model.graph(X, mask, residue_idx, chain_id)     # no parameters: cache per structure
    order = decoding_order(chain_M * mask, torch.randn(S.shape))    # fixed residues first
    log_probs = model(graph, S, order)                      # (B, L, 21), in nats
    encoding = model.encode(graph)                  # once; then score or draw many sequences
    log_probs = model.decode(encoding, S, order)    # S (M, L): M sequences on one structure
    S, probs = model.sample(encoding, S, chain_M, order, temperature=0.1)
    torch.save(to_checkpoint(model, epoch=3), "best_model.pt")      # any ProteinMPNN tool reads it

Parameter names and sizes are those of the published code, so each loads the other's files. The same
numbers are computed with less work. Features are made for the K nearest neighbours only. A linear
layer on concatenated [centre | edge | neighbour] is the sum of three blocks, of which those of
centre and neighbour are applied to L residues, not to L x K edges. The last linear layer of a
message is applied after the sum over neighbours. Padding never changes a score. Float64 (with X in
float64) and autocast work. Needs torch only.
Source: Dauparas et al. 2022, Science 378, 49; published code and weights:
github.com/dauparas/ProteinMPNN.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"      # the index of a letter in S; X = unknown or unresolved
MESSAGE_SCALE = 30              # constant divisor of each sum over neighbours, as published
MAX_TEMPERATURE = 1e6           # all letters equally likely; far above, float32 would overflow
N_CLASSES = 66                  # classes 0 .. 64: residue offsets -32 .. 32; 65: another chain
MAX_OFFSET = 32
N_POSITIONAL = 16               # features per offset class
N_RBF = 16                      # Gaussians per distance
TINY = 1e-300                   # replaces 0 before a logarithm
COLDEST = 1e-30                 # replaces temperature 0 as a divisor
# Columns of edge_embedding, "A-B": distance from atom A of residue i to atom B of neighbour j.
ATOMS = ("N", "CA", "C", "O", "CB")
PAIRS = ("CA-CA N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB CB-C CB-O O-C "
         "N-CA C-CA O-CA CB-CA C-N O-N CB-N C-CB O-CB C-O")
N_FEATURES = N_POSITIONAL + N_RBF * len(PAIRS.split())              # of an edge: 416
# CA-only models: C1 is the residue's CA, C0 and C2 are those of the rows before and after it.
CA_ATOMS = ("C0", "C1", "C2")
CA_PAIRS = "C1-C1 C0-C0 C2-C2 C0-C1 C0-C2 C1-C0 C1-C2 C2-C0 C2-C1"
N_ORIENTATION = 7               # a direction and a quaternion, see ca_orientation
N_CA_FEATURES = N_POSITIONAL + N_RBF * len(CA_PAIRS.split()) + N_ORIENTATION        # 167
CA_STEP = (3.6, 4.0)            # Angstrom between CA of neighbours in a chain; 3.8 in proteins


class Graph(NamedTuple):
    """The network's input for B structures: the K = min(num_edges, L) nearest neighbours."""
    E_idx: Tensor         # (B, L, K) int64, nearest first, including the residue itself
    distance: Tensor      # (B, L, K, 25) Angstrom, in the order of PAIRS; CA-only: 9, of CA_PAIRS
    orientation: Tensor   # (B, L, K, 7) of a CA-only model, see ca_orientation; else (B, L, K, 0)
    offset: Tensor        # (B, L, K) int64, class of residue_idx_i - residue_idx_j and chains
    mask: Tensor          # (B, L) bool, the residue is resolved
    resolved: Tensor      # (B, L, K) bool, residue and neighbour are resolved
    present: Tensor       # (B, L, K) bool, the neighbour is a residue, not padding

    def to(self, device: torch.device) -> Graph:
        """The graph on a device."""
        return Graph(*(tensor.to(device, non_blocking=True) for tensor in self))


class Encoding(NamedTuple):
    """The encoder's output and what the decoder needs of the graph."""
    h_V: Tensor           # (B, L, H)
    h_E: Tensor           # (B, L, K, H)
    E_idx: Tensor
    mask: Tensor
    present: Tensor


class SharedContext(NamedTuple):
    """Sequences that differ only where few residues are designed.

    The designed residues come last in the order, so no other residue sees their letters. Sequences
    with the same context (structure, letters and order of all other residues) share the decoder's
    pass over it.
    """
    designed: Tensor      # (M, L) bool, the residues whose log-probabilities are asked for
    context_row: Tensor   # (M,) int64, number of the sequence's context, 0 to C - 1
    sequence: Tensor      # (C,) int64, for each context one of the sequences that have it


def run_once(function: Callable, *arguments: object) -> object:
    """function(*arguments), of which all is kept for the gradient."""
    return function(*arguments)


def run_twice(function: Callable, *arguments: object) -> object:
    """function(*arguments), of which the arguments alone are kept: it is computed again for the
    gradient."""
    return checkpoint(function, *arguments, use_reentrant=False)


class ProteinMPNN(nn.Module):
    """The network.

    num_edges:   neighbours per residue.
    dropout:     published training used 0.1.
    noise_level: Angstrom of backbone noise with which the weights were trained. It is only stored
                 in the file; this class adds no noise to X.
    ca_only:     the input is CA atoms alone; only the features of edges differ.
    product:     computes the large products: F.linear, or what gives the same numbers faster, such
                 as training/fast_linear.py on some CPUs. See Linear.
    """

    def __init__(  # noqa: PLR0913  (the sizes, each with the published default)
            self, num_edges: int = 48, hidden_size: int = 128, n_encoder: int = 3,
            n_decoder: int = 3, dropout: float = 0.0, noise_level: float = 0.0,
            ca_only: bool = False, product: Callable = F.linear):
        super().__init__()
        self.num_edges = num_edges
        self.noise_level = noise_level
        self.ca_only = ca_only
        self.features = EdgeFeatures(hidden_size, ca_only, product)
        if ca_only:
            self.W_v = Unused(weight=(hidden_size, hidden_size), bias=(hidden_size,))
        self.W_e = Linear(hidden_size, hidden_size, product=product)
        self.W_s = nn.Embedding(len(ALPHABET), hidden_size)
        self.encoder_layers = nn.ModuleList(
            EncoderLayer(hidden_size, dropout, product) for _ in range(n_encoder))
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(hidden_size, dropout, product) for _ in range(n_decoder))
        self.W_out = nn.Linear(hidden_size, len(ALPHABET))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, graph: Graph, S: Tensor, decoding_order: Tensor,
                structure: Tensor | None = None, shared: SharedContext | None = None,
                natives: tuple[Tensor, Tensor] | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities (M, L, 21) of M sequences on structures of `graph`; see `decode`.

        natives: None, or letters and orders (B, L) of a further sequence on each structure, whose
            log-probabilities (B, L, 21) are then returned besides. They share the encoding."""
        encoding = self.encode(graph)
        log_probs = self.decode(encoding, S, decoding_order, structure, shared)
        if natives is None:
            return log_probs
        return log_probs, self.decode(encoding, *natives)

    def graph(self, X: Tensor, mask: Tensor, residue_idx: Tensor, chain_id: Tensor) -> Graph:
        """The network's input for B structures. It has no parameters: cache it per structure.

        As in the published code, an unresolved residue is not padding: it is a neighbour of others,
        with the atoms it has. The coordinates of a missing atom are 0 or not finite.

        Args:
            X:           (B, L, 4, 3) floating point, N, CA, C, O in Angstrom; a CA-only model
                reads CA alone.
            mask:        (B, L), 1 = resolved.
            residue_idx: (B, L) int64.
            chain_id:    (B, L) int64, 1, 2, ... and 0 = padding.
        Returns: Graph.
        Raises: ValueError for other shapes, and for resolved residues that are padding or not
            finite (values on a GPU are not checked, as that would wait for the device).
        """
        return neighbour_graph(X, mask, residue_idx, chain_id, self.num_edges, self.ca_only)

    def encode(self, graph: Graph, run: Callable = run_once) -> Encoding:
        """Graph of B structures -> Encoding, to be shared by all sequences on them.

        run: run_once, or run_twice to save memory."""
        h_E = self.W_e(self.features(graph))
        h_V = h_E.new_zeros(*graph.mask.shape, h_E.shape[-1], dtype=self.W_e.weight.dtype)
        for layer in self.encoder_layers:
            h_V, h_E = run(layer, h_V, h_E, graph)
        return Encoding(h_V, h_E, graph.E_idx, graph.mask, graph.present)

    # The decoder's pass stands at four places, as each question needs another part of it:
    #
    #   run_decoder       all residues of all sequences: log-probabilities, and the state that a
    #                     draw begins with
    #   decode_designed   sequences with the same context, which is passed once: preference pairs
    #   step              the residues whose turn it is, one after the other: drawing letters
    #   OneOrder          in mpnn/variants.py: each residue of a sequence decoded last, of which
    #                     only what changes is computed anew: scores of mutations
    #
    # The first alone could do what the others do, with far more work. All are made of the same
    # DecoderLayer, so a change of the layer's mathematics is made once. A change of what a residue
    # sees is made at all four; tests compare the other three with the first.

    def decode(self, encoding: Encoding, S: Tensor, decoding_order: Tensor,
               structure: Tensor | None = None, shared: SharedContext | None = None) -> Tensor:
        """Log-probabilities of each residue's letter, given the backbone and the letters before it.

        Args:
            S:              (M, L) int64 letters, of fixed residues too. A residue sees only the
                            letters of residues that are earlier in the order.
            decoding_order: (M, L) int64, element t is the residue decoded at step t.
            structure:      (M,) int64, row of `encoding` for each sequence. Optional if all are on
                            one structure, or if there is one sequence per structure.
            shared:         None, or what sequences have in common if only log-probabilities of few
                            residues, the last in the order, are needed: less work.
        Returns: (M, L, 21) in nats, float32 or wider; ignore the rows of unresolved residues. With
            `shared` they are 0 for residues that are not designed.
        """
        structure = check_sequences(encoding, S, decoding_order, structure)
        if shared is not None:
            return self.decode_designed(encoding, S, decoding_order, structure, shared)
        E_idx = rows_of_structures(encoding.E_idx, structure)
        visible = decoded_before(step_of_residue(decoding_order), E_idx)
        h_V, _ = self.run_decoder(encoding, self.W_s(S), visible, structure)
        return self.log_probs(h_V)

    def decode_designed(self, encoding, S, decoding_order, structure, shared):
        """`decode` of the designed residues alone. A layer runs on the residues whose result is
        read later: the last one on designed residues only, those before also on the context."""
        nodes = decoder_nodes(encoding.E_idx, structure, decoding_order, shared,
                              len(self.decoder_layers))
        h_encoder = encoding.h_V.flatten(0, 1)                                      # (B L, H)
        h_E = encoding.h_E.flatten(0, 1)                                            # (B L, K, H)
        present = encoding.present.flatten(0, 1)
        mask = encoding.mask.flatten()
        h_S = self.W_s(S[nodes.sequence, nodes.position])
        h_V = h_encoder.index_select(0, nodes.residue)                              # (N, H)
        for layer, needed in zip(self.decoder_layers, nodes.needed):
            residue = nodes.residue[needed]
            if len(needed) < len(h_E):      # the product on fewer rows
                edges = layer.edges(h_E.index_select(0, residue))
            else:
                edges = layer.edges(h_E).index_select(0, residue)
            table = torch.cat([layer.decoded(h_V, h_S), layer.undecoded(h_encoder)])
            source = nodes.source[needed]
            neighbours = table.index_select(0, source.flatten()).view(*source.shape, -1)
            updated = layer(h_V.index_select(0, needed), edges, neighbours, present[residue],
                            mask[residue])
            h_V = h_V.index_copy(0, needed, updated.to(h_V.dtype))
        n_designed = len(nodes.needed[-1])
        designed_log_probs = self.log_probs(h_V[-n_designed:])
        log_probs = designed_log_probs.new_zeros(*S.shape, len(ALPHABET))
        log_probs[shared.designed] = designed_log_probs
        return log_probs

    def unconditional(self, encoding: Encoding) -> Tensor:
        """Log-probabilities (B, L, 21) given the backbone alone: no residue sees a letter."""
        structure = torch.arange(len(encoding.mask), device=encoding.mask.device)
        visible = torch.zeros_like(encoding.present)
        h_S = torch.zeros_like(encoding.h_V)
        h_V, _ = self.run_decoder(encoding, h_S, visible, structure)
        return self.log_probs(h_V)

    def run_decoder(self, encoding, h_S, visible, structure):
        """Run all decoder layers on all residues.

        Args:
            h_S:       (M, L, H) embedded letters.
            visible:   (M, L, K) bool, is the neighbour decoded before the residue?
            structure: (M,) int64, row of `encoding` for each sequence.
        Returns: h_V (M, L, H) and, per layer, (layer, table, edges). A table (M, 2L, H) has each
            residue's term as a neighbour in the first linear layer: in rows 0 .. L-1 as decoded,
            in rows L .. 2L-1 as not yet decoded.
        """
        h_encoder = rows_of_structures(encoding.h_V, structure)
        E_idx = rows_of_structures(encoding.E_idx, structure)
        mask = rows_of_structures(encoding.mask, structure)
        present = rows_of_structures(encoding.present, structure)
        index = torch.where(visible, E_idx, E_idx + E_idx.shape[1])
        h_V = h_encoder
        layers = []
        for layer in self.decoder_layers:
            table = torch.cat([layer.decoded(h_V, h_S), layer.undecoded(h_encoder)], dim=1)
            edges = layer.edges(encoding.h_E)                                       # (B, L, K, H)
            layers.append((layer, table, edges))
            h_V = layer(h_V, rows_of_structures(edges, structure), gather_rows(table, index),
                        present, mask)
        return h_V, layers

    def undecoded_layers(self, encoding, structure):
        """The layers of run_decoder before any residue is decoded: rows 0 .. L-1 are still 0."""
        h_encoder = rows_of_structures(encoding.h_V, structure)
        layers = []
        for layer in self.decoder_layers:
            undecoded = layer.undecoded(h_encoder)
            table = torch.cat([torch.zeros_like(undecoded), undecoded], dim=1)
            layers.append((layer, table, layer.edges(encoding.h_E)))
        return layers

    def log_probs(self, h_V):
        """(..., H) -> (..., 21) in nats, float32 or wider."""
        return torch.log_softmax(at_least_float32(self.W_out(h_V)), dim=-1)

    @torch.no_grad()
    def sample(  # noqa: PLR0913  (what a draw depends on; the last four are for special cases)
            self, encoding: Encoding, S: Tensor, chain_M: Tensor, decoding_order: Tensor,
            temperature: float = 0.1, bias: float | Tensor = 0.0, *, tied: Iterable = (),
            noise: Tensor | None = None, structure: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
        """Draw letters where chain_M is 1 and the residue is resolved; others keep those of S.

        X is never drawn. Call model.eval() first, or dropout is active.

        Args:
            S, decoding_order, structure: as in `decode`; M sequences are drawn side by side.
            chain_M:     (M, L) or (1, L), 1 = draw here.
            temperature: divides logits + bias; 0 takes the most likely letter.
            bias:        broadcasts to (M, L, 21), in nats; -inf = never this letter here.
            tied:        lists of positions, from 0. All of a list get the same letter, drawn from
                         the mean of their logits and bias. They are decoded in one step, that of
                         the earliest, and do not see one another. Unresolved ones are left out.
            noise:       (M, L, 21) from `gumbel_noise`, which decides the letters drawn; default:
                         from torch's CPU generator, so that all devices draw the same.
        Returns: S (M, L), and (M, L, 21) probabilities that its letters were drawn from, 0 where
            none was. They equal those of `decode` with the same order if temperature is 1 and there
            are no ties or bias.
        Raises: ValueError for a temperature below 0, ties that mix drawn and kept positions, and
            positions with no allowed letter.
        """
        structure = check_sequences(encoding, S, decoding_order, structure)
        M, L = S.shape
        device = S.device
        if not 0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature is {temperature}; expected 0 to {MAX_TEMPERATURE:g}.")
        chain_M = chain_M.bool().expand(M, L)
        draw = chain_M & rows_of_structures(encoding.mask, structure)
        groups = tied_groups(tied, chain_M, draw)
        zeros = at_least_float32(encoding.h_V).new_zeros(M, L, len(ALPHABET))
        bias = zeros + torch.as_tensor(bias, device=device)
        bias[..., ALPHABET.index("X")] = -torch.inf
        bias = mean_in_groups(bias, groups)
        check_letters_left(bias, draw)
        step_of, steps, is_member = decoding_steps(decoding_order, groups)
        weights = is_member.to(bias) / is_member.sum(-1, keepdim=True)              # (M, T, G)
        if noise is None:
            noise = gumbel_noise(torch.rand(bias.shape, dtype=torch.float64))
        noise = (noise * (temperature > 0)).to(bias)

        S = S.clone()
        probs = torch.zeros_like(bias)
        sequences = torch.arange(M, device=device)
        drawing = draw[sequences[:, None, None], steps].any(dim=(0, 2)).nonzero().flatten().tolist()
        if not drawing:
            return S, probs
        # This pass with the given letters is right up to the first draw; each draw then updates it.
        E_idx = rows_of_structures(encoding.E_idx, structure)
        visible = decoded_before(step_of, E_idx)
        if drawing[0] == 0:
            layers = self.undecoded_layers(encoding, structure)     # nothing is given
        else:
            _, layers = self.run_decoder(encoding, self.W_s(S), visible, structure)
        turns = range(drawing[0], drawing[-1] + 1)
        for sequence, turn in independent_steps(steps, turns, E_idx, visible):
            row = sequence[:, None]
            at = steps[sequence, turn]                                              # (N, G)
            first = at[:, :1]
            drawn = draw[row, at]
            logits, inputs = self.step(encoding, layers, step_of, row, structure[row], at)
            logits = (logits * weights[sequence, turn, :, None]).sum(1, keepdim=True)   # (N, 1, 21)
            log_p = letter_log_probs(logits + bias[row, first], temperature)
            letter = (log_p + noise[row, first]).argmax(-1)                         # (N, 1)
            S[row, at] = torch.where(drawn, letter, S[row, at])
            probs[row, at] = torch.where(drawn[..., None], log_p.exp(), 0).to(probs)
            for (layer, table, _), h_V in zip(layers, inputs):
                table[row, at] = layer.decoded(h_V, self.W_s(S[row, at]))
        return S, probs

    def step(self, encoding, layers, step_of, row, structure, at):
        """Run the decoder on the residues of N steps, each of one sequence, that may be done at a
        time.

        Args:
            layers:    as of `run_decoder`.
            step_of:   (M, L) step at which each residue is decoded.
            row:       (N, 1) int64, of each step's sequence in `step_of`.
            structure: (N, 1) int64, row of its structure in `encoding`.
            at:        (N, G) int64, the residues of each step.
        Returns: logits (N, G, 21) and, per layer, its h_V (N, G, H).
        """
        E_idx = encoding.E_idx[structure, at]
        present = encoding.present[structure, at]
        mask = encoding.mask[structure, at]
        visible = step_of[row[..., None], E_idx] < step_of[row, at][..., None]      # (N, G, K)
        L = step_of.shape[1]
        source = 2 * L * row[..., None] + torch.where(visible, E_idx, E_idx + L)
        residue = L * structure + at
        h_V = encoding.h_V[structure, at]
        inputs = []
        for layer, table, edges in layers:
            inputs.append(h_V)
            edges = take_rows(edges.flatten(0, 1), residue)                         # (N, G, K, H)
            h_V = layer(h_V, edges, take_rows(table.flatten(0, 1), source), present, mask)
        return at_least_float32(self.W_out(h_V)), inputs


class EdgeFeatures(nn.Module):
    """Graph -> E (B, L, K, H), from edges' offsets in the chain and 25 distances x 16 Gaussians; in
    a CA-only model from 9 distances and the orientation."""

    def __init__(self, hidden_size, ca_only, product):
        super().__init__()
        self.n_orientation = N_ORIENTATION if ca_only else 0
        n_features = N_CA_FEATURES if ca_only else N_FEATURES
        self.embeddings = nn.Module()
        self.embeddings.linear = nn.Linear(N_CLASSES, N_POSITIONAL)
        if ca_only:
            self.node_embedding = Unused(weight=(hidden_size, 3))
        self.edge_embedding = Linear(n_features, hidden_size, bias=False, product=product)
        if ca_only:
            self.norm_nodes = Unused(weight=(hidden_size,), bias=(hidden_size,))
        self.norm_edges = Norm(hidden_size)

    def forward(self, graph):
        weight = self.edge_embedding.weight
        ends = [N_POSITIONAL, weight.shape[1] - self.n_orientation]
        offset_weight, distance_weight, orientation_weight = weight.tensor_split(ends, dim=1)
        E = self.edge_embedding.product(gaussians(graph.distance).to(distance_weight.dtype),
                                        distance_weight)
        if self.n_orientation:
            E = E + F.linear(graph.orientation.to(orientation_weight.dtype), orientation_weight)
        # Positional features (66, 16) of offset classes: a linear layer of one-hot vectors.
        positional = self.embeddings.linear.weight.T + self.embeddings.linear.bias
        # The table is float32: in 16 bits the gradient of an offset class, which is a sum over
        # thousands of edges, was wrong by up to 30 % (measured).
        table = at_least_float32(F.linear(positional, offset_weight))
        return self.norm_edges(E + F.embedding(graph.offset, table).to(E.dtype))


class Unused(nn.Module):
    """Tensors that files of CA-only models hold, and that the published network does not use.

    They are kept as they were read, so that other tools can load what is written here. As buffers
    they have no gradient, for which DDP would wait.
    """

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))


class Norm(nn.LayerNorm):
    """Layer norm that sums the gradients of weight and bias in float32 or wider.

    torch's CPU kernel sums them in the dtype of x: in bfloat16, over the 20,000 edges of 430
    residues, they were wrong by 40 % (measured). This takes twice the time and one more tensor.
    """

    def forward(self, x):
        if x.element_size() > 2 or x.device.type != "cpu":
            return super().forward(x)
        normed = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return normed * self.weight.to(x.dtype) + self.bias.to(x.dtype)


class EncoderLayer(nn.Module):
    """Messages from neighbours to a residue, then an update of its edges."""

    def __init__(self, hidden_size, dropout, product):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.norm1, self.norm2, self.norm3 = (Norm(hidden_size) for _ in range(3))
        self.W1, self.W2, self.W3 = message_layers(3, hidden_size, product)
        self.W11, self.W12, self.W13 = message_layers(3, hidden_size, product)
        self.dense = FeedForward(hidden_size, product)

    def forward(self, h_V, h_E, graph):
        hidden = self.hidden(self.W1, self.W2, h_V, h_E, graph.E_idx)
        h_V = self.norm1(h_V + self.drop(sum_messages(hidden, graph.resolved, self.W3)))
        h_V = self.norm2(h_V + self.drop(self.dense(h_V))) * graph.mask[..., None]
        hidden = self.hidden(self.W11, self.W12, h_V, h_E, graph.E_idx)
        return h_V, self.norm3(h_E + self.drop(self.W13(hidden)))

    def hidden(self, first, second, h_V, h_E, E_idx):
        """gelu(second(gelu(first([h_V_i | h_E_ij | h_V_j])))) with two linear layers."""
        centre, edge, neighbour = first.blocks()
        x = first.product(h_E, edge)                                                # (B, L, K, H)
        x = x + gather_rows(F.linear(h_V, neighbour), E_idx)
        x = x.add_(F.linear(h_V, centre, first.bias)[..., None, :])
        return F.gelu(second(F.gelu(x)))


class DecoderLayer(nn.Module):
    """Messages to a residue from all its neighbours, decoded before it or not.

    The first linear layer gets [h_V_i | h_E_ij | letter of j | h_V_j]: the letter and the decoder's
    h_V_j if j is decoded before i, otherwise no letter and the encoder's h_V_j. The layer runs on
    all residues, or on those of one step.
    """

    def __init__(self, hidden_size, dropout, product):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.norm1, self.norm2 = (Norm(hidden_size) for _ in range(2))
        self.W1, self.W2, self.W3 = message_layers(4, hidden_size, product)
        self.dense = FeedForward(hidden_size, product)

    def forward(self, h_V, edges, neighbours, present, mask):
        """Update residues.

        Args:
            h_V:               (M, L, H).
            edges, neighbours: (M, L, K, H), their terms in the sum of the first linear layer.
            present, mask:     (M, L, K) and (M, L) bool.
        Returns: h_V (M, L, H).
        """
        return self.update(h_V, self.hidden(h_V, edges, neighbours), present, mask)

    def hidden(self, h_V, edges, neighbours):
        """Messages (M, L, K, H) before their last linear layer, each of one neighbour alone."""
        centre, _, _, _ = self.W1.blocks()
        x = (edges + neighbours).add_(F.linear(h_V, centre, self.W1.bias)[..., None, :])
        return F.gelu(self.W2(F.gelu(x)))

    def update(self, h_V, hidden, present, mask):
        """h_V after the messages of `hidden`."""
        return self.update_by_sum(h_V, sum_hidden(hidden, present), present, mask)

    def update_by_sum(self, h_V, total, present, mask):
        """h_V after the messages whose `hidden` have the sum `total` (M, L, H)."""
        h_V = self.norm1(h_V + self.drop(message_of_sum(total, present, self.W3)))
        return self.norm2(h_V + self.drop(self.dense(h_V))) * mask[..., None]

    def edges(self, h_E):
        """Term of the edges in the first linear layer."""
        _, edge, _, _ = self.W1.blocks()
        return self.W1.product(h_E, edge)

    def decoded(self, h_V, h_S):
        """Term of residues as decoded neighbours, in the first linear layer; h_S: their letters."""
        _, _, letter, neighbour = self.W1.blocks()
        return F.linear(h_S, letter) + F.linear(h_V, neighbour)

    def undecoded(self, h_encoder):
        """Term of residues as neighbours that are not yet decoded."""
        _, _, _, neighbour = self.W1.blocks()
        return F.linear(h_encoder, neighbour)


class FeedForward(nn.Module):
    """Two linear layers on each residue."""

    def __init__(self, hidden_size, product):
        super().__init__()
        self.W_in = Linear(hidden_size, 4 * hidden_size, product=product)
        self.W_out = Linear(4 * hidden_size, hidden_size, product=product)

    def forward(self, h):
        return self.W_out(F.gelu(self.W_in(h)))


class Linear(nn.Linear):
    """A linear layer computed by `product`, a function of x (..., n), weight (m, n) and bias (m,)
    or None -> (..., m). Its parts may be: of concatenated inputs each is multiplied by its block of
    the weight, so that what belongs to residues is multiplied once per residue, not per edge."""

    def __init__(self, n_in, n_out, bias=True, product=F.linear):
        super().__init__(n_in, n_out, bias)
        self.product = product

    def forward(self, x):
        return self.product(x, self.weight, self.bias)

    def blocks(self):
        """The weight, split into one (H, H) block per input of H numbers."""
        return self.weight.split(self.out_features, dim=1)


def message_layers(n_inputs, hidden_size, product):
    """The three linear layers of a message; the first is on n_inputs concatenated inputs."""
    return (Linear(n_inputs * hidden_size, hidden_size, product=product),
            Linear(hidden_size, hidden_size, product=product),
            Linear(hidden_size, hidden_size, product=product))


def sum_messages(hidden, counted, layer):
    """Sum of layer(hidden_ij) / 30 over the counted neighbours j, with one layer call on the sum.

    hidden: (..., K, H). counted: (..., K) bool. Returns (..., H).
    """
    return message_of_sum(sum_hidden(hidden, counted), counted, layer)


def sum_hidden(hidden, counted):
    """Sum (..., H) of hidden (..., K, H) over the neighbours that are counted (..., K)."""
    return torch.matmul(counted.to(hidden.dtype)[..., None, :], hidden)[..., 0, :]


def message_of_sum(total, counted, layer):
    """What sum_messages returns, of the sum of hidden over the counted neighbours."""
    bias = counted.to(total.dtype).sum(-1, keepdim=True) * layer.bias
    return (F.linear(total, layer.weight) + bias) / MESSAGE_SCALE


def gather_rows(table, index):
    """From table (M, R, H) the rows of index (M, L, K) -> (M, L, K, H)."""
    M, R, H = table.shape
    flat = index + R * torch.arange(M, device=index.device)[:, None, None]
    return take_rows(table.reshape(M * R, H), flat)


def take_rows(table, index):
    """Rows of table (R, ...), which it holds by index (...): as table[index], but faster."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


def rows_of_structures(x, structure):
    """Rows of x (B, ...) for M sequences: (M, ...); without a copy if there is one structure."""
    return x.expand(len(structure), *x.shape[1:]) if len(x) == 1 else x[structure]


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- geometry ----

def neighbour_graph(  # noqa: PLR0913  (the arrays of a structure, and two settings of the model)
        X, mask, residue_idx, chain_id, num_edges, ca_only=False):
    """See ProteinMPNN.graph. Nothing larger than (B, L, L) and (B, L, K, 25) is made; of a CA-only
    model (B, L, K, 3, 3)."""
    check_structure(X, mask, residue_idx, chain_id, ca_only)
    mask = mask.bool()
    is_residue = chain_id != 0
    # A missing atom is 0, and does not remove the other atoms of its residue (as published).
    X = torch.where(X.isfinite() & is_residue[..., None, None], X, 0)
    CA = X[:, :, 1]
    squared = sum((CA[:, :, None, axis] - CA[:, None, :, axis]).square() for axis in range(3))
    both = mask[:, :, None] & mask[:, None, :]
    D = torch.where(both, (squared + 1e-6).sqrt(), 0)                               # (B, L, L)
    farthest = D.amax(-1, keepdim=True)
    # Unresolved residues get the distance of the farthest resolved one, as published, and come
    # after it, by residue_idx (published: in any order). Padding comes last. The sort is stable:
    # ties of topk would depend on padding.
    beyond = farthest + 1 + (residue_idx - residue_idx.amin(1, keepdim=True))[:, None]
    rank = torch.where(both, D, beyond).masked_fill(~is_residue[:, None], torch.inf)
    E_idx = rank.argsort(dim=-1, stable=True)[..., :num_edges].contiguous()          # (B, L, K)
    resolved = both.gather(-1, E_idx)
    if ca_only:
        distance = atom_distances(with_rows_around(CA), CA_ATOMS, CA_PAIRS, E_idx)
        orientation = ca_orientation(CA, is_residue, E_idx)
    else:
        distance = atom_distances(with_CB(X), ATOMS, PAIRS, E_idx)
        orientation = distance[..., :0]
    distance[..., 0] = torch.where(resolved, D.gather(-1, E_idx), farthest)
    flat = E_idx.flatten(1)
    idx_j = residue_idx.gather(1, flat).view_as(E_idx)
    chain_j = chain_id.gather(1, flat).view_as(E_idx)
    present = is_residue.gather(1, flat).view_as(E_idx)
    offset = (residue_idx[..., None] - idx_j + MAX_OFFSET).clamp(0, 2 * MAX_OFFSET)
    offset = torch.where(chain_id[..., None] == chain_j, offset, N_CLASSES - 1)
    return Graph(E_idx, distance, orientation, offset, mask, resolved, present)


def with_CB(X):
    """(B, L, 4, 3) of N, CA, C, O -> (B, L, 5, 3) of ATOMS, with an ideal CB."""
    N, CA, C, O = X.unbind(2)
    b = CA - N
    c = C - CA
    CB = -0.58273431 * torch.linalg.cross(b, c) + 0.56802827 * b - 0.54067466 * c + CA
    return torch.stack([N, CA, C, O, CB], dim=2)


def atom_distances(atoms, names, pairs, E_idx):
    """(B, L, K, pairs) Angstrom from residues to neighbours, between the atoms of `pairs`.

    atoms: (B, L, A, 3), whose A atoms are called `names`.
    """
    neighbours = gather_rows(atoms.flatten(2), E_idx).unflatten(-1, (len(names), 3))
    centre = atoms[:, :, None]
    numbers = [[names.index(atom) for atom in pair.split("-")] for pair in pairs.split()]
    return torch.stack([
        ((centre[..., i, :] - neighbours[..., j, :]).square().sum(-1) + 1e-6).sqrt()
        for i, j in numbers], dim=-1)


# ---- geometry of CA-only models ----

def with_rows_around(CA):
    """(B, L, 3) -> (B, L, 3, 3) of CA_ATOMS: CA of the row before, of the row, of the row after.

    The rows are those of the whole complex, not of a chain. Beyond its ends they are 0.
    """
    padded = F.pad(CA, (0, 0, 1, 1))
    return torch.stack([padded[:, :-2], CA, padded[:, 2:]], dim=2)


def ca_orientation(CA, is_residue, E_idx):
    """How neighbours lie and are turned in the frame of a residue, made from CA atoms.

    Args:
        CA:         (B, L, 3) Angstrom, 0 where unresolved.
        is_residue: (B, L) bool, False = padding.
        E_idx:      (B, L, K) neighbours.
    Returns: (B, L, K, 7), the unit vector to the neighbour and the unit quaternion of the
        neighbour's frame. A frame that cannot be made, as at ends and gaps, is 0. As published, x,
        y and z of the quaternion change when the whole protein is turned.
    Source: Ingraham et al. 2019, NeurIPS 32, and the published code.
    """
    frames = ca_frames(CA, is_residue)                                      # (B, L, 3, 3)
    near = gather_rows(torch.cat([CA, frames.flatten(2)], dim=2), E_idx)    # (B, L, K, 12)
    CA_j, frame_j = near.split([3, 9], dim=-1)
    to_neighbour = CA_j - CA[:, :, None]
    frame_i = frames[:, :, None]
    direction = unit((frame_i * to_neighbour[..., None, :]).sum(-1))
    # R = frame_i^T frame_j as a sum of products: a matrix product could round R[a, b] and R[b, a]
    # differently, and the signs in a quaternion are of such differences.
    rows = zip(frame_i.unbind(-2), frame_j.unflatten(-1, (3, 3)).unbind(-2))
    R = sum(row_i[..., :, None] * row_j[..., None, :] for row_i, row_j in rows)
    return torch.cat([direction, quaternion(R)], dim=-1)


def ca_frames(CA, is_residue):
    """(B, L, 3, 3) frames, whose rows are unit vectors; 0 for the first and the last two rows."""
    step = F.pad(CA[:, 1:] - CA[:, :-1], (0, 0, 0, 1))              # to the next row; last row: 0
    length = step.norm(dim=-1, keepdim=True)
    shortest, longest = CA_STEP
    u = unit(torch.where((shortest < length) & (length < longest), step, 0))
    before = F.pad(u[:, :-1], (0, 0, 1, 0))                         # that of the row before
    normal = unit(torch.linalg.cross(before, u))
    bisector = unit(before - u)
    frames = torch.stack([bisector, normal, torch.linalg.cross(bisector, normal)], dim=2)
    has_frame = F.pad(is_residue, (0, 2))[:, 2:]                    # there are two rows after it
    has_frame[:, 0] = False
    return torch.where(has_frame[..., None, None], frames, 0)


def quaternion(R):
    """(..., 3, 3) rotations -> (..., 4) unit quaternions x, y, z, w."""
    x, y, z = R.diagonal(dim1=-2, dim2=-1).unbind(-1)
    squares = torch.stack([x - y - z, y - x - z, z - x - y], dim=-1) + 1
    signs = torch.stack([R[..., 2, 1] - R[..., 1, 2], R[..., 0, 2] - R[..., 2, 0],
                         R[..., 1, 0] - R[..., 0, 1]], dim=-1).sign()
    w = (1 + x + y + z).relu().sqrt()[..., None]
    return unit(torch.cat([signs * squares.abs().sqrt(), w], dim=-1) / 2)


def unit(v):
    """Vectors (..., n) of length 1; 0 stays 0."""
    return F.normalize(v, dim=-1)


def gaussians(distance):
    """Expand each distance into 16 Gaussians, centres 2 to 22, width 1.25 Angstrom.

    distance: (..., 25) Angstrom. Returns (..., 400).
    """
    centres = torch.linspace(2, 22, N_RBF, dtype=distance.dtype, device=distance.device)
    x = distance[..., None] - centres
    x.mul_(N_RBF / 20).square_().neg_()     # in place: the largest tensor of all
    # Values below e^-60 do not affect the sum, but subnormal numbers would make exponential and
    # matrix product several times slower on a CPU.
    return x.clamp_(min=-60).exp_().flatten(-2)


def check_structure(X, mask, residue_idx, chain_id, ca_only):
    """ValueError for what ProteinMPNN.graph does not take."""
    others = [tuple(x.shape) for x in (mask, residue_idx, chain_id)]
    dtypes = (residue_idx.dtype, chain_id.dtype)
    if (X.shape[2:] != (4, 3) or any(shape != X.shape[:2] for shape in others)
            or set(dtypes) != {torch.int64}):
        raise ValueError(f"X is {tuple(X.shape)}; mask, residue_idx and chain_id are {others}, the "
                         f"last two {dtypes}; expected (B, L, 4, 3), of N, CA, C, O, and (B, L), "
                         "torch.int64.")
    if X.device.type == "cpu":
        resolved = mask.bool()
        if ca_only:
            X = X[:, :, 1]
        if not X[resolved].isfinite().all():
            raise ValueError("X has coordinates that are not finite where mask is 1. Set mask to 0 "
                             "there.")
        if (resolved & (chain_id == 0)).any():
            raise ValueError("chain_id is 0, which means padding, where mask is 1. Count chains "
                             "from 1.")


# ---- decoding order ----

def decoding_order(designed: Tensor, keys: Tensor) -> Tensor:
    """Order with fixed residues first; fixed and designed residues each sorted by |key|.

    The published rule, argsort((designed + 0.0001) |randn|), rarely puts a designed residue before
    a fixed one; this does not.

    Args:
        designed: (B, L), 1 = designed and resolved.
        keys:     (B, L) numbers, random for a random order; the smallest |key| comes first.
    Returns: (B, L) int64, element t = residue decoded at step t.
    """
    order = keys.abs().argsort(dim=-1)
    return order.gather(-1, designed.gather(-1, order).argsort(dim=-1, stable=True))


def step_of_residue(order):
    """(M, L) order -> (M, L) step at which each residue is decoded."""
    return order.argsort(dim=1)         # the inverse of a permutation


def decoded_before(step_of, E_idx):
    """(M, L), (M, L, K) -> (M, L, K) bool: is the neighbour decoded before the residue?"""
    return step_of.gather(1, E_idx.flatten(1)).view_as(E_idx) < step_of[..., None]


class DecoderNodes(NamedTuple):
    """The residues that the decoder runs on: all rows of the C contexts, then the designed residues
    of the M sequences. N in all."""
    sequence: Tensor      # (N,) int64, the node's sequence (of a context: one that has it)
    position: Tensor      # (N,) int64, the node's row in it
    residue: Tensor       # (N,) int64, the same residue in the flattened (B L) rows of structures
    source: Tensor        # (N, K) int64, what the node sees of a neighbour: number of a node if
    #                       decoded before; else N + row in (B L)
    needed: list          # per layer: (n,) int64, nodes whose result is read by a later layer


def decoder_nodes(E_idx, structure, order, shared, n_layers):
    """DecoderNodes of sequences with shared contexts. Arguments as of `decode`."""
    L = order.shape[1]
    n_contexts = len(shared.sequence)
    position = torch.arange(L, device=order.device)
    designed_sequence, designed_position = shared.designed.nonzero(as_tuple=True)
    sequence = torch.cat([shared.sequence.repeat_interleave(L), designed_sequence])
    at = torch.cat([position.repeat(n_contexts), designed_position])
    n = len(sequence)
    designed = torch.arange(n_contexts * L, n, device=order.device)
    node_at = shared.context_row[:, None] * L + position        # (M, L) node that a sequence sees
    node_at[shared.designed] = designed
    neighbour = E_idx[structure[sequence], at]                                      # (N, K)
    step_of = step_of_residue(order)
    row = sequence[:, None]
    visible = step_of[row, neighbour] < step_of[sequence, at][:, None]
    undecoded = n + structure[row] * L + neighbour
    source = torch.where(visible, node_at[row, neighbour], undecoded)
    needed = [designed]
    for _ in range(n_layers - 1):
        is_read = torch.zeros(n + E_idx.shape[0] * L, dtype=torch.bool, device=order.device)
        is_read[source[needed[0]].flatten()] = True
        is_read[needed[0]] = True
        needed.insert(0, is_read[:n].nonzero().flatten())
    return DecoderNodes(sequence, at, structure[sequence] * L + at, source, needed)


def tied_groups(tied, chain_M, draw):
    """The tied groups reduced to drawn positions, without groups of one. ValueError if not valid.

    chain_M: (M, L) bool, to be drawn. draw: (M, L) bool, chain_M and the residue is resolved.
    """
    L = draw.shape[1]
    groups = [list(group) for group in tied]
    members = [i for group in groups for i in group]
    if len(set(members)) != len(members) or any(not 0 <= i < L for i in members):
        raise ValueError(f"tied = {groups}; expected lists of positions 0 to {L - 1}, none of them "
                         "twice.")
    for group in groups:
        n_drawn = chain_M[:, group].sum(1)
        if not ((n_drawn == 0) | (n_drawn == len(group))).all():
            raise ValueError(f"tied = {groups} mixes drawn (chain_M 1) and kept positions. Draw "
                             "all of a group or none.")
    if groups and not (draw == draw[:1]).all():
        raise ValueError("tied positions need the same drawn positions in all sequences, but "
                         "chain_M * mask differ.")
    groups = [[i for i in group if draw[0, i]] for group in groups]
    return [group for group in groups if len(group) > 1]


def decoding_steps(order, groups):
    """Steps of the order (M, L) when all positions of a tied group are decoded in one step.

    Returns: step_of (M, L), equal within a group; steps (M, T, G) int64, the positions of each
        step, padded to G positions by repeating the first; is_member (M, T, G) bool, False for
        this padding.
    """
    tied = {i for group in groups for i in group}
    groups = groups + [[i] for i in range(order.shape[1]) if i not in tied]
    G = max(map(len, groups))
    device = order.device
    steps = torch.tensor([group + group[:1] * (G - len(group)) for group in groups], device=device)
    is_member = torch.tensor([[g < len(group) for g in range(G)] for group in groups],
                             device=device)
    due = step_of_residue(order)[:, steps].amin(-1)         # (M, T), step of a group's earliest
    step_of = torch.empty_like(order)
    step_of[:, steps] = due[..., None]
    turn = due.argsort(dim=1)
    return step_of, steps[turn], is_member[turn]


def independent_steps(steps, turns, E_idx, visible):
    """Steps that can be done at the same time, as none of their residues sees one of another.

    A residue only sees its K neighbours that come before it. So the result is that of one step
    after another, in a fraction of the passes: 60 instead of 400 for 400 residues.

    Args:
        steps:   (M, T, G) int64, residues of each step, see decoding_steps.
        turns:   range of the steps that are to be done.
        E_idx:   (M, L, K) int64. visible: (M, L, K) bool, is the neighbour decoded before?
    Returns: list of (sequence (N,), step (N,)) int64, in the order in which to do them.
    """
    M, L, _ = E_idx.shape
    nothing = E_idx.new_tensor(L)                  # a column that stays 0
    near = torch.where(visible, E_idx, nothing).cpu()
    at = steps.cpu()
    row = torch.arange(M)[:, None]
    level = torch.zeros(M, L + 1, dtype=torch.int64)      # of residues, by the pass they are in
    levels = []
    for t in turns:
        seen = level[row[..., None], near[row, at[:, t]]]                           # (M, G, K)
        own = seen.amax((1, 2)) + 1
        level[row, at[:, t]] = own[:, None]
        levels.append(own)
    level_of_turn = torch.stack(levels, 1).flatten()                                # (M turns)
    order = level_of_turn.argsort(stable=True)
    sequence = (order // len(turns)).to(steps.device)
    turn = (order % len(turns) + turns[0]).to(steps.device)
    sizes = level_of_turn.bincount()[1:].tolist()
    return list(zip(sequence.split(sizes), turn.split(sizes)))


# ---- the letter of a step ----

def gumbel_noise(uniform: Tensor) -> Tensor:
    """float64 uniform in [0, 1) -> float32 Gumbel noise: argmax(log p + noise) is a draw from p."""
    return -(-uniform.clamp(min=TINY).log()).clamp(min=TINY).log().float()


def letter_log_probs(scores: Tensor, temperature: float) -> Tensor:
    """Log-probabilities that a letter is drawn from: those of softmax(scores / temperature).

    Args:
        scores:      (..., 21) nats, logits + bias; -inf = never.
        temperature: at least 0; at 0 the best letter has probability 1.
    Returns: (..., 21) nats.
    """
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.log_softmax(scores / max(temperature, COLDEST), -1)


def mean_in_groups(x, groups):
    """A copy of x (..., L, n) in which each row of a group is replaced by the group's mean."""
    x = x.clone()
    for group in groups:
        x[..., group, :] = x[..., group, :].mean(-2, keepdim=True)
    return x


# ---- checks ----

def check_sequences(encoding, S, decoding_order, structure):
    """Return structure (M,), or its default if None. ValueError for shapes that do not match."""
    B, L = encoding.mask.shape
    M = len(S)
    if structure is None and B == M:
        structure = torch.arange(M, device=S.device)
    elif structure is None and B == 1:
        structure = S.new_zeros(M)
    shapes = [None if x is None else tuple(x.shape) for x in (S, decoding_order, structure)]
    if shapes != [(M, L), (M, L), (M,)] or S.dtype != torch.int64:
        raise ValueError(f"S, decoding_order and structure have shapes {shapes}; expected ({M}, "
                         f"{L}), ({M}, {L}) and ({M},), rows of the {B} structures. S is "
                         f"{S.dtype}; expected torch.int64.")
    if S.device.type == "cpu" and not torch.equal(decoding_order.sort(1).values,
                                                  torch.arange(L).expand(M, L)):
        raise ValueError(f"decoding_order is no permutation; expected each of 0 to {L - 1} once "
                         "per row.")
    return structure


def check_letters_left(bias, draw):
    """ValueError if a position to draw (M, L) has no allowed letter, or bias (M, L, V) has nan."""
    is_allowed = bias > -torch.inf
    stuck = (draw & ~is_allowed.any(-1)).nonzero().tolist()
    if stuck:
        raise ValueError(f"bias leaves no letter at (sequence, position) {stuck[:5]}, counted from "
                         "0. Allow one, or keep the letters there with chain_M 0.")
    if (bias.isnan() | (bias == torch.inf)).any():
        raise ValueError("bias has a value that is nan or inf; expected nats, or -inf for never.")


# ---- files ----

def random_proteinmpnn(seed: int, **sizes) -> ProteinMPNN:
    """An untrained ProteinMPNN(**sizes) from a seed. The state of torch's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ProteinMPNN(**sizes)


def from_checkpoint(checkpoint: dict, dropout: float = 0.0,
                    product: Callable = F.linear) -> ProteinMPNN:
    """ProteinMPNN from {num_edges, noise_level, model_state_dict, ...}, published or ours; sizes
    are those of its tensors. mpnn/weights.py reads and checks files.

    Raises: ValueError for weights of another network, with what they are not.
    """
    weights = {name.removeprefix("module."): value
               for name, value in checkpoint["model_state_dict"].items()}
    W_e = weights.get("W_e.weight")
    hidden_size = 0 if W_e is None or W_e.dim() != 2 else len(W_e)
    n_encoder = count_layers(weights, "encoder_layers.")
    n_decoder = count_layers(weights, "decoder_layers.")
    if 0 in (hidden_size, n_encoder, n_decoder):
        raise ValueError(f"this is not a ProteinMPNN: its W_e.weight has {hidden_size} rows, and "
                         f"it has {n_encoder} encoder and {n_decoder} decoder layers; expected at "
                         "least 1 of each.")
    ca_only = has_edge_features(weights, N_CA_FEATURES)
    # Not on device "meta": its first use imports a compiler, which takes more than a second.
    model = random_proteinmpnn(0, num_edges=checkpoint["num_edges"], hidden_size=hidden_size,
                               n_encoder=n_encoder, n_decoder=n_decoder, dropout=dropout,
                               noise_level=checkpoint["noise_level"], ca_only=ca_only,
                               product=product)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        kind = "CA-only ProteinMPNN" if ca_only else "ProteinMPNN"
        problems = " ".join(str(error).split("\n", 1)[-1].split())
        raise ValueError(f"this is not a {kind} of {n_encoder} + {n_decoder} layers: "
                         f"{problems:.400}") from None
    return model


def has_edge_features(weights, n):
    """Whether the network of these weights takes n features of an edge."""
    embedding = weights.get("features.edge_embedding.weight")
    return embedding is not None and embedding.shape[-1:] == (n,)


def count_layers(weights, prefix):
    return len({name.split(".")[1] for name in weights if name.startswith(prefix)})


def to_checkpoint(model: ProteinMPNN, **extra) -> dict:
    """Checkpoint in the published format, on the CPU. Other tools ignore extra keys, as epoch."""
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return {**extra, "num_edges": model.num_edges, "noise_level": model.noise_level,
            "model_state_dict": weights}
