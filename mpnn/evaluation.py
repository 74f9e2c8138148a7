"""Validation of ProteinMPNN in training on preference pairs.

All results are the same for any number of ranks.
"""
import torch

from ddp_setup import Ddp, all_sum, note_progress
from mpnn.designs import Designs
from mpnn.model import ALPHABET
from mpnn.pairs import Pair
from training.log import show_progress
from training.loop import eval_mode
from dpo.pair_plan import eval_batches
from dpo.preferences import SUMS, PairValidation, metrics_of, pack, unpack_sums


class Validation(PairValidation):
    """Metrics of the validation pairs, in float32, under the same decoding orders at each call.

    Of pairs: means of loss and rewards, by the weights of the pairs. Of native sequences (one for
    each complex and set of designed positions among the pairs): means over scored residues of
    recovery, the fraction of native letters that are the policy's most likely letter given the
    letters decoded before, and of the KL divergence of policy from reference, in nats. Each pair is
    computed on one rank and gathered, so the number of ranks does not matter.
    table: reference scores of the pairs, (n, 2), or None.
    """

    def __init__(self, *arguments):
        """arguments: of PairValidation."""
        super().__init__(*arguments)
        config = self.config
        if config.monitoring.n_designs:
            self.designs = Designs(self.pairs, self.reference, config)
        self.natives = native_pairs(self.pairs)
        self.native_batches = eval_batches(self.natives, config.training.batch_size)

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, ddp: Ddp) -> dict:
        """Metrics by name. model: without DDP; set to eval mode and back."""
        with eval_mode(model):
            packed = self.sums_over_pairs(model, ddp)
            right, kl, residues = self.sums_over_natives(model, ddp)
        sums = unpack_sums(packed)
        values = metrics_of(packed, self.weights.sum(), "val/")
        values["val/logps/chosen_per_residue"] = float(sums["logps/chosen"] / sums["residues"])
        values["val/recovery"] = right / max(residues, 1)
        values["val/kl"] = max(kl / max(residues, 1), 0.0)   # rounding can make it negative
        return values

    def sums_over_pairs(self, model, ddp):
        """Packed sums of weight x metrics over the pairs of all ranks."""
        packed = torch.zeros(len(self.pairs), len(SUMS), dtype=torch.float64)
        mine = self.batches[ddp.rank::ddp.world_size]
        for indices in show_progress(mine, ddp, "validation pairs"):
            batch, log_probs, natives = self.reference.run_model(model, self.pairs, indices,
                                                                 with_natives=True)
            reference_scores = self.reference.scores(batch, self.table)
            likelihoods = self.reference.likelihoods(log_probs, natives, batch)
            _, metrics = self.objective(likelihoods, batch, reference_scores, self.config.loss)
            packed[indices] = pack(metrics).cpu()
            note_progress(ddp)
        return (self.weights[:, None] * all_sum(packed, ddp)).sum(0)

    def sums_over_natives(self, model, ddp):
        """Sums over the residues of native sequences of all ranks: letters that are the policy's
        most likely, KL divergence in nats, number of residues."""
        found = torch.zeros(len(self.natives), 3, dtype=torch.float64)
        mine = self.native_batches[ddp.rank::ddp.world_size]
        for indices in show_progress(mine, ddp, "validation, native sequences"):
            batch, log_probs, _ = self.reference.run_model(model, self.natives, indices)
            right = (log_probs.argmax(-1) == batch["S"]).float()
            difference = log_probs - self.reference.log_probs(batch)
            kl = (log_probs.exp() * difference).sum(-1)
            rows = batch["sequence_rows"][..., 0]               # native is chosen and rejected
            sum_right = (right[rows].mean(1) * batch["scored"]).sum(-1)
            sum_kl = (kl[rows].mean(1) * batch["scored"]).sum(-1)
            columns = torch.stack([sum_right, sum_kl, batch["n_scored"]], 1)
            found[indices] = columns.double().cpu()
            note_progress(ddp)
        return all_sum(found, ddp).sum(0).tolist()


def native_pairs(pairs):
    """Pairs of the native sequence with itself, one for each complex and set of designed positions
    with a known native letter."""
    unknown = ALPHABET.index("X")
    found = {}
    for pair in pairs:
        native = pair.complex.S[:len(pair.chain_M)]
        designed = pair.chain_M & (native != unknown)
        if (designed & pair.complex.mask[:len(designed)]).any():
            key = (pair.complex.key, designed.tobytes())
            found.setdefault(key, Pair(pair.complex, native, native, designed))
    return list(found.values())
