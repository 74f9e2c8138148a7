"""Proteins that the policy draws at each evaluation of DPO: has it collapsed?

    designs = Designs(lengths, sedd, config)
    values = designs(model, step, folder, ddp)     # metrics by name; FOLDER/designs/step_N.fasta

The random numbers of a protein are seeded by (seed, its number), not by the step: proteins of two
steps differ only because the model does. Results are equal for any number of ranks.
"""
from typing import Any

import numpy as np
import torch

from ddp_setup import all_sum
from ddp_watch import note_progress
from dpo.designs import PolicyDesigns
from proteins.letters import X_ID, decode
from proteins.seeds import keyed_generator
from sedd.diffusion import sample
from training.loop import eval_mode


class Designs(PolicyDesigns):
    """Draws monitoring.n_designs proteins as long as those of validation."""

    def __init__(self, lengths: list[int], sedd: Any, config: Any):
        """lengths: taken in turn. sedd: a Sedd, whose model has the base weights."""
        super().__init__(sedd.model)
        self.sedd = sedd
        self.seed = config.training.seed
        self.steps = config.monitoring.design_steps
        number = config.monitoring.n_designs
        self.lengths = [lengths[k % len(lengths)] for k in range(number)]

    @torch.no_grad()
    def draw(self, model, ddp):
        """[letters (L,) uint8] of each protein, each computed on one rank, by itself."""
        out = torch.zeros(len(self.lengths), max(self.lengths), dtype=torch.float64)

        def log_score(xt, sigma):
            note_progress()
            return model(xt, sigma, None, self.sedd.graph.wanted(xt))

        with eval_mode(model):
            for k in range(ddp.rank, len(self.lengths), ddp.world_size):
                n = self.lengths[k]
                drawn = sample(log_score, self.sedd.graph, self.sedd.noise, (1, n), self.steps,
                               forbidden=(X_ID,), device=ddp.device,
                               generator=keyed_generator(self.seed, "design", k))
                out[k, :n] = drawn[0].double().cpu()
        rows = all_sum(out, ddp).numpy().astype(np.uint8)
        return [row[:n] for row, n in zip(rows, self.lengths)]

    def metrics(self, rows):
        """val/design_diversity: mean fraction of positions at which two proteins differ.
        val/design_shift: total variation distance between their letter frequencies and those of the
        base weights' proteins."""
        differ = []
        for k, row in enumerate(rows):
            for other in rows[:k]:
                n = min(len(row), len(other))
                differ.append((row[:n] != other[:n]).mean())
        shift = abs(frequencies(rows) - frequencies(self.base)).sum() / 2
        return {"val/design_diversity": float(np.mean(differ)), "val/design_shift": float(shift)}

    def fasta(self, rows, step):
        """FASTA text."""
        return "".join(f">step_{step}_{k} length={len(row)}\n{decode(row)}\n"
                       for k, row in enumerate(rows))


def frequencies(rows):
    """(20,) frequency of each letter."""
    counts = np.bincount(np.concatenate(rows), minlength=X_ID)
    return counts / counts.sum()
