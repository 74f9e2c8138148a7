"""Proteins that the policy draws at each evaluation of DPO: has it collapsed?

    designs = Designs(pairs, sedd, config)
    values = designs(model, step, folder, ddp)     # metrics by name; FOLDER/designs/step_N.fasta

The random numbers of a protein are seeded by (seed, its number), not by the step: proteins of two
steps differ only because the model does. Results are equal for any number of ranks.
"""
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_setup import Ddp, all_sum
from sedd.diffusion import sample
from sedd.sequences import X_ID, decode, keyed_generator
from training.files import write_text_atomic
from training.loop import eval_mode
from training.watch import beat

# Signs of a collapse: diversity below this fraction of the base's; shift above this value.
LEAST_DIVERSITY = 0.5
MOST_SHIFT = 0.3


class Designs:
    """Draws monitoring.n_designs proteins as long as preferred ones of validation pairs."""

    def __init__(self, pairs: list, sedd: Any, config: Any):
        """sedd: a Sedd, whose model has the base weights."""
        self.sedd = sedd
        self.seed = config.training.seed
        self.steps = config.monitoring.design_steps
        ordered = sorted(pairs, key=lambda pair: pair.key)
        number = config.monitoring.n_designs
        self.lengths = [len(ordered[k % len(ordered)].chosen) for k in range(number)]
        self.base = None      # proteins of the base weights, see draw

    def __call__(self, model: torch.nn.Module, step: int, folder: Path, ddp: Ddp) -> dict:
        """Draw, write FOLDER/designs/step_N.fasta on rank 0, and return metrics by name.

        model: without DDP; set to eval mode and back. At step 0 it has the base weights, whose
        proteins are drawn once per start, as the baseline for collapse."""
        if self.base is None:
            self.base = self.draw(self.sedd.model, ddp)
        rows = self.base if step == 0 else self.draw(model, ddp)
        if ddp.is_main:
            text = "".join(f">step_{step}_{k} length={len(row)}\n{decode(row)}\n"
                           for k, row in enumerate(rows))
            write_text_atomic(Path(folder) / "designs" / f"step_{step}.fasta", text)
        return self.metrics(rows)

    @torch.no_grad()
    def draw(self, model, ddp):
        """[letters (L,) uint8] of each protein, each computed on one rank, by itself."""
        out = torch.zeros(len(self.lengths), max(self.lengths), dtype=torch.float64)

        def log_score(xt, sigma):
            beat(ddp)
            return model(xt, sigma, None)

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

    def sign_of_collapse(self, values):
        """Sentence about the sign of a collapse in `values` (from metrics); "" if there is none."""
        now = values["val/design_diversity"]
        base = self.metrics(self.base)["val/design_diversity"]
        if now < LEAST_DIVERSITY * base:
            return (f"designs have become too alike: two of them differ in {now:.1%} of their "
                    f"residues; with the base weights in {base:.1%}.")
        if values["val/design_shift"] > MOST_SHIFT:
            return (f"the composition of designs has moved: {values['val/design_shift']:.0%} of "
                    "their residues would have to change to give the letter frequencies of the "
                    f"base weights' designs (more than {MOST_SHIFT:.0%}).")
        return ""


def frequencies(rows):
    """(20,) frequency of each letter."""
    counts = np.bincount(np.concatenate(rows), minlength=X_ID)
    return counts / counts.sum()
