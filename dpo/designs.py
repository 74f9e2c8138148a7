"""Sequences that the policy draws at each evaluation of training on preference pairs: has it
collapsed?

What is the same for every kind of model. A kind derives its Designs from PolicyDesigns.
"""
from pathlib import Path
from typing import Any

import torch

from ddp_setup import Ddp
from training.files import write_text_atomic

# Signs of a collapse: diversity below this fraction of the base designs'; shift above this value.
LEAST_DIVERSITY = 0.5
MOST_SHIFT = 0.3


class PolicyDesigns:
    """A class derived from this has the methods

        draw(model, ddp) -> designs, equal for any number of ranks
        metrics(designs) -> metrics by name, among them val/design_diversity, the fraction of
            residues in which two designs differ, and val/design_shift, the total variation distance
            between their letter frequencies and those of the base weights' designs
        fasta(designs, step) -> text

    what: which designs are compared with one another, for the warning. base: designs of the base
    weights, or None: not drawn yet.
    """
    what = "designs"

    def __init__(self, base_model: torch.nn.Module):
        """base_model: with the base weights."""
        self.base_model = base_model
        self.base = None

    def __call__(self, model: torch.nn.Module, step: int, folder: Path, ddp: Ddp) -> dict[str, Any]:
        """Draw, write FOLDER/designs/step_N.fasta on rank 0, and return metrics by name.

        model: without DDP; set to eval mode and back. At step 0 it has the base weights, whose
        designs are drawn once per start, as the baseline for collapse."""
        if self.base is None:
            self.base = self.draw(self.base_model, ddp)
        designs = self.base if step == 0 else self.draw(model, ddp)
        if ddp.is_main:
            path = Path(folder) / "designs" / f"step_{step}.fasta"
            write_text_atomic(path, self.fasta(designs, step))
        return self.metrics(designs)

    def sign_of_collapse(self, values: dict) -> str:
        """Sentence about the sign of a collapse in `values` (from metrics); "" if there is none."""
        now = values["val/design_diversity"]
        shift = values["val/design_shift"]
        base = self.metrics(self.base)["val/design_diversity"]
        if now < LEAST_DIVERSITY * base:
            return (f"{self.what} have become too alike: two of them differ in {now:.1%} of their "
                    f"residues; with the base weights in {base:.1%}.")
        if shift > MOST_SHIFT:
            return (f"the composition of designs has moved: {shift:.0%} of their residues would "
                    "have to change to give the letter frequencies of the base weights' designs "
                    f"(more than {MOST_SHIFT:.0%}).")
        return ""
