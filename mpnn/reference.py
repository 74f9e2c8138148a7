"""The reference model of DPO: base weights, cached encodings of complexes, reference scores.

Also makes batches of pairs (sequences with decoding orders) and scores them. Policy and reference
are scored by the same code.
"""
import hashlib
import os
from pathlib import Path

import torch

from ddp_setup import all_sum, beat, broadcast, load_checkpoint, print0, save_checkpoint
from mpnn.batches import collate_complexes, eval_batches, make_batch, to_device
from mpnn.model import PUBLISHED, load_proteinmpnn, random_proteinmpnn

WITHOUT_REFERENCE = ("reference_free", "simpo")   # losses that need no reference model
CACHE_FORMAT = 2   # version of the files of scores; part of the hash that names them


# ---------------------------------------------------------------- base weights
def load_base(config):
    """(model with the base weights, on the CPU; text that describes them). Raises ValueError."""
    m, seed = config.model, config.training.seed
    if m.base_model_name == "random":
        r = m.random
        model = random_proteinmpnn(seed, num_edges=r.num_edges, hidden_size=r.hidden_size,
                                   n_encoder=r.n_encoder, n_decoder=r.n_decoder, dropout=m.dropout)
        return model, f"RANDOM weights from seed {seed}: for demonstrations and tests only"
    path, folder = Path(m.base_model_dir), Path(m.base_model_dir).parent
    if path.is_file():
        raise ValueError(f"base weights: --base_model_dir {path} is a file; expected "
                         f"--base_model_dir {folder} --base_model_name {path.stem}.")
    path = path / f"{m.base_model_name.removesuffix('.pt')}.pt"
    if not path.is_file():
        raise ValueError(f"base weights: there is no file {path} (of --base_model_dir and "
                         f"--base_model_name). {PUBLISHED} Fetch that folder and name it: "
                         "--base_model_dir FOLDER --base_model_name v_48_020. --base_model_name "
                         "random trains from random weights, for demonstrations and tests only.")
    model = load_proteinmpnn(str(path), m.dropout)
    return model, f"{path}, trained with {model.noise_level:g} Angstrom of noise"


# ---------------------------------------------------------------- scores
def pair_scores(log_probs, batch, temperature):
    """Log-probabilities and entropy of pairs, averaged over their orders.

    log_probs: (M, L, 21), of the sequences of a batch of make_batch.
    Returns (P, 2) log-probabilities of chosen and rejected, summed over the scored residues, in
    nats; and (P,) mean entropy of a scored residue given the chosen sequence.
    """
    if temperature != 1:
        log_probs = torch.log_softmax(log_probs / temperature, dim=-1)
    token = log_probs.gather(-1, batch["S"][..., None])[..., 0]                    # (M, L)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    scored, rows = batch["scored"][:, None], batch["sequence_rows"]       # (P, 1, L), (P, O, 2)
    sums = (token[rows] * scored[:, None]).sum(-1).mean(1)
    return sums, (entropy[rows[..., 0]] * scored).sum(-1).mean(1) / batch["n_scored"]


# ---------------------------------------------------------------- the reference
def stack(parts):
    """Join Graphs (or Encodings) of one structure each into one, padded with masked rows."""
    if len(parts) == 1:
        return parts[0]
    size, out = [max(part.E_idx.shape[d] for part in parts) for d in (1, 2)], []
    for name in parts[0]._fields:
        values = [getattr(part, name) for part in parts]
        d = 1 if name in ("mask", "h_V") else 2                         # (L, ...) or (L, K, ...)
        whole = values[0].new_zeros(len(parts), *size[:d], *values[0].shape[1 + d:])
        for row, value in zip(whole, values):
            row[tuple(map(slice, value.shape[1:1 + d]))] = value[0]
        out.append(whole)
    return type(parts[0])(*out)


class Reference:
    """The base model on the device, with a cache of each complex's graph (the network's input) and
    encoding. memory.structure_cache_mb limits the cache."""

    def __init__(self, model, pairs, config, ddp):
        # With requires_grad off, torch rounds differently: equal weights would score unequally.
        self.model = model.eval()
        self.pairs, self.config, self.ddp = pairs, config, ddp
        self.needed = config.loss.name not in WITHOUT_REFERENCE
        self.room = config.memory.structure_cache_mb * 2**20   # bytes left in the cache
        self.cache, self.table = {}, None

    def cached(self, kind, complex, make):
        """The cached result of make() for this complex. Least recently used ones are dropped."""
        found = self.cache.pop((kind, complex.key), None)
        if found is None:
            found = make()
            self.room -= sum(x.nbytes for x in found)
        self.cache[kind, complex.key] = found   # the dict is ordered from least to most recent
        while self.room < 0 and len(self.cache) > 1:
            self.room += sum(x.nbytes for x in self.cache.pop(next(iter(self.cache))))
        return found

    def graph(self, complex):
        def make():
            c = collate_complexes([complex])
            graph = self.model.graph(c["X"], c["mask"], c["residue_idx"], c["chain_id"])
            return type(graph)(*(x.to(self.ddp.device, non_blocking=True) for x in graph))
        return self.cached("graph", complex, make)

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

    def run_model(self, model, pairs, indices):
        """(batch on the device, log-probabilities (M, L, 21)) of these pairs, under orders that do
        not depend on the epoch."""
        batch = make_batch(pairs, indices.tolist(), self.config.loss, self.config.training.seed)
        batch = self.to_device(batch, pairs)
        return batch, model(batch["graph"], batch["S"], batch["order"], batch["complex_row"])

    @torch.no_grad()
    def log_probs(self, batch):
        """(M, L, 21) under the base weights, in float32 also if the policy uses bfloat16."""
        encoding = stack([self.cached("encoding", c, lambda: self.model.encode(self.graph(c)))
                          for c in batch["complexes"]])
        return self.model.decode(encoding, batch["S"], batch["order"], batch["complex_row"])

    def scores(self, batch, table=None):
        """(P, 2) summed log-probabilities of chosen and rejected; 0 if the loss has no reference.

        table: (n, 2) precomputed scores of all pairs; None: compute them here."""
        if not self.needed:
            return torch.zeros_like(batch["scored"][:, :2])
        if table is not None:
            return table[batch["pair_numbers"]]
        return pair_scores(self.log_probs(batch), batch, self.config.loss.temperature)[0]

    def precompute(self, pairs, weights_hash, folder):
        """Scores of all pairs under orders that do not depend on the epoch, from the cache file in
        `folder`, or else computed and written there. A hash of all inputs is the file's name.

        Returns: (scores (n, 2) float32, text that says where they come from)."""
        path, scores, trouble = Path(folder) / self._file_name(pairs, weights_hash), None, ""
        if self.ddp.is_main and path.exists():
            try:
                scores = read_scores(path, len(pairs))
            except (ValueError, KeyError, TypeError) as e:
                trouble = f"; {path} could not be used ({str(e).splitlines()[0]})"
        if broadcast(scores is not None, self.ddp):
            scores = torch.zeros(len(pairs), 2) if scores is None else scores
            return broadcast(scores, self.ddp).to(self.ddp.device), f"read from {path}"
        scores = self.compute_scores(pairs)
        save_checkpoint(str(path), self.ddp, resumes=False, scores=scores)
        return scores.to(self.ddp.device), f"computed, kept in {path}{trouble}"

    def _file_name(self, pairs, weights_hash):
        t, loss = self.config.training, self.config.loss
        order = "arange" if loss.order == "arange" else (
            "fixed", t.seed, loss.n_orders, loss.share_order)
        content = (CACHE_FORMAT, weights_hash, order, loss.temperature, t.batch_size,
                   self.model.num_edges, self.ddp.device.type,
                   torch.__version__,   # other versions round differently: no log 2 at step 0
                   [pair.key for pair in pairs])
        return hashlib.blake2b(repr(content).encode(), digest_size=12).hexdigest() + ".pt"

    @torch.no_grad()
    def compute_scores(self, pairs):
        """(n, 2) float32, equal for any number of ranks: batches do not depend on the ranks that
        compute them."""
        ddp, scores = self.ddp, torch.zeros(len(pairs), 2, dtype=torch.float64)
        batches = eval_batches(pairs, self.config.training.batch_size)
        for indices in batches[ddp.rank::ddp.world_size]:
            # Runs encoder and decoder as validation does, for scores equal to the last bit.
            batch, log_probs = self.run_model(self.model, pairs, indices)
            found, _ = pair_scores(log_probs, batch, self.config.loss.temperature)
            scores[indices] = found.double().cpu()
            beat(ddp)
        return all_sum(scores, ddp).float()


def read_scores(path, n):
    """(n, 2) finite float32 scores from a file. Raises ValueError, KeyError or TypeError."""
    scores = load_checkpoint(str(path))["scores"]
    if not torch.is_tensor(scores) or scores.dtype != torch.float32 or (
            scores.shape != (n, 2) or not scores.isfinite().all()):
        raise ValueError(f"scores are not {(n, 2)} finite {torch.float32}")
    return scores


def check_cache(config, ddp):
    """Refuse a data.reference_cache that rank 0 could not write."""
    given = config.data.reference_cache
    folder = Path(given or ".").absolute()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if given and ddp.is_main and not usable:
        raise ValueError(f"data.reference_cache {given} cannot be used: {nearest} "
                         f"{'is not writable' if nearest.is_dir() else 'is a file'}. Expected a "
                         "folder that can be written, or made.")


def make_tables(run, ddp):
    """Precompute (or read from the cache) the reference scores that are the same in all epochs."""
    config, reference, validation = run.config, run.reference, run.validation
    folder = config.data.reference_cache or run.work_dir / "reference"
    if config.loss.order != "random" and reference.needed:
        reference.table, source = reference.precompute(run.pairs, run.base, folder)
        print0(ddp, f"reference, training pairs: {source}")
    if validation is not None and reference.needed:
        validation.table, source = reference.precompute(validation.pairs, run.base, folder)
        print0(ddp, f"reference, validation pairs: {source}")
