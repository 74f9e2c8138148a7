"""Sequences that the policy draws for validation structures in DPO training: has it collapsed?

    designs = Designs(pairs, scorer)
    values = designs(model, step, folder, ddp)     # metrics by name; FOLDER/designs/step_N.fasta

A design problem is a complex, the positions to design in it, and the letters of all others. The
random numbers of a design are seeded by (seed, problem, number of the design), not by the step:
designs of two steps differ only because the model does. Results are equal for any number of ranks.
Measured on a CPU: 4 designs of each problem add 10 to 60 % to the time of an evaluation (80 % in
configs/dpo_demo.yaml, 4 % of that whole run).
"""
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from ddp_setup import all_sum, seed_for
from ddp_watch import note_progress
from dpo.designs import PolicyDesigns
from mpnn.model import ALPHABET, decoding_order, gumbel_noise
from proteins.letters import X_ID, decode
from proteins.structures import Complex
from training.log import show_progress
from training.loop import eval_mode

MOST_PROBLEMS = 16       # problems with the lowest key, a hash: the cost is limited for any data
MOST_IN_BATCH = 16       # sequences that are drawn in one batch


class Problem(NamedTuple):
    """What is designed in a complex."""
    complex: Complex
    drawn: np.ndarray     # (L,) bool, designed and resolved
    letters: np.ndarray   # (L,) uint8, of positions not drawn: from the pair, in context native
    preferred: list       # of (n_designed,) uint8, the preferred sequences of its pairs
    key: int


def design_problems(pairs: list) -> list[Problem]:
    """List of the distinct Problems of pairs, sorted by key."""
    found = {}
    for pair in pairs:
        n = len(pair.chain_M)
        letters = pair.complex.S.copy()
        drawn = np.zeros(len(letters), bool)
        drawn[:n] = pair.chain_M & pair.complex.mask[:n]
        letters[:n] = np.where(pair.chain_M, letters[:n], pair.chosen)
        key = seed_for("problem", pair.complex.key, drawn.tobytes(), letters.tobytes())
        problem = found.setdefault(key, Problem(pair.complex, drawn, letters, [], key))
        problem.preferred.append(pair.chosen)
    return [found[key] for key in sorted(found)]


class Designs(PolicyDesigns):
    """Draws monitoring.n_designs sequences for each of at most MOST_PROBLEMS design problems."""

    what = "designs of one structure"

    def __init__(self, pairs: list, scorer: Any):
        """scorer: see ProteinMPNNScorer in mpnn/dpo.py."""
        super().__init__(scorer.base.model)
        config = scorer.config
        self.problems = design_problems(pairs)[:MOST_PROBLEMS]
        self.scorer = scorer
        self.seed = config.training.seed
        self.number = config.monitoring.n_designs
        self.temperature = config.monitoring.design_temperature
        by_length = sorted(range(len(self.problems)),
                           key=lambda i: -len(self.problems[i].complex))
        designs = list(itertools.product(by_length, range(self.number)))
        # Drawing needs less memory than training, which has 2 x batch_size sequences at a time.
        size = min(4 * config.training.batch_size, MOST_IN_BATCH)
        self.batches = [designs[i:i + size] for i in range(0, len(designs), size)]

    @torch.no_grad()
    def draw(self, model, ddp):
        """Letters (problems, designs, longest) uint8, 0 after the end of a complex.

        Each design is computed on one rank, in a batch that does not depend on the ranks."""
        longest = max(len(problem.complex) for problem in self.problems)
        S = torch.zeros(len(self.problems), self.number, longest, dtype=torch.float64)
        with eval_mode(model):
            mine = self.batches[ddp.rank::ddp.world_size]
            for batch in show_progress(mine, ddp, "designs for validation structures"):
                indices, numbers = map(list, zip(*batch))
                letters = self.draw_batch(model, batch, ddp)
                S[indices, numbers, :letters.shape[1]] = letters.double().cpu()
                note_progress()
        return all_sum(S, ddp).numpy().astype(np.uint8)

    def draw_batch(self, model, batch, ddp):
        """Letters (M, L) of designs [(number of the problem, number of its design)]. The first is
        of the longest complex, with L residues."""
        indices = [index for index, _ in batch]
        rows = list(dict.fromkeys(indices))         # distinct problems
        L = len(self.problems[indices[0]].complex)
        graph = self.scorer.graph([self.problems[i].complex for i in rows])
        inputs = zip(*(self.inputs(self.problems[i], number, L) for i, number in batch))
        letters, drawn, order, noise = (torch.stack(x).to(ddp.device) for x in inputs)
        structure = torch.tensor([rows.index(i) for i in indices], device=ddp.device)
        found, _ = model.sample(model.encode(graph), letters, drawn, order, self.temperature,
                                noise=noise, structure=structure)
        return found

    def inputs(self, problem, number, length):
        """Inputs to draw one design, padded to `length` rows: letters, drawn (1 = draw here),
        decoding order, Gumbel noise (length, 21)."""
        n = len(problem.drawn)
        generator = torch.Generator().manual_seed(
            seed_for(self.seed, "design", problem.key, number))
        letters = torch.from_numpy(problem.letters).long()
        drawn = torch.from_numpy(problem.drawn).long()
        draws = torch.rand(1, n, dtype=torch.float64, generator=generator)
        order = torch.cat([decoding_order(drawn[None], draws)[0], torch.arange(n, length)])
        uniform = torch.rand(n, len(ALPHABET), dtype=torch.float64, generator=generator)
        rest = length - n
        return (pad(letters, (0, rest)), pad(drawn, (0, rest)), order,
                pad(gumbel_noise(uniform), (0, 0, 0, rest)))

    def drawn_letters(self, S):
        """[(problem, letters (designs, n) of its drawn positions)] of all problems."""
        return [(problem, designs[:, :len(problem.drawn)][:, problem.drawn])
                for problem, designs in zip(self.problems, S)]

    def metrics(self, S):
        """Metrics of designs S (from draw): means over problems of fractions of drawn residues.

        val/design_recovery: fraction with the native letter, where that is known.
        val/design_preferred: fraction with the letter of the preferred sequences of the problem's
        pairs. val/design_diversity: fraction in which two designs of a problem differ.
        val/design_shift: total variation distance between the letter frequencies of all designs
        and those of the base weights' designs."""
        recovery = []
        preferred = []
        diversities = []
        for problem, letters in self.drawn_letters(S):
            native = problem.complex.S[problem.drawn]
            known = native != X_ID
            if known.any():
                recovery.append((letters == native)[:, known].mean())
            better = np.stack(problem.preferred)[:, problem.drawn[:len(problem.preferred[0])]]
            preferred.append((letters[:, None] == better).mean())
            diversities.append(diversity(letters))
        shift = abs(self.frequencies(S) - self.frequencies(self.base)).sum() / 2
        values = {}
        if recovery:
            values["val/design_recovery"] = float(np.mean(recovery))
        values["val/design_preferred"] = float(np.mean(preferred))
        values["val/design_diversity"] = float(np.mean(diversities))
        values["val/design_shift"] = float(shift)
        return values

    def frequencies(self, S):
        """(21,) frequency of each letter in the drawn residues of designs S."""
        counts = sum(np.bincount(letters.ravel(), minlength=len(ALPHABET))
                     for _, letters in self.drawn_letters(S))
        return counts / counts.sum()

    def fasta(self, S, step):
        """FASTA text: the designed chains of each design, joined by /."""
        lines = []
        for problem, designs in zip(self.problems, S):
            c = problem.complex
            ends = np.flatnonzero(np.diff(c.chain_id[:c.n_designed])) + 1
            for number, row in enumerate(designs, 1):
                parts = "/".join(map(decode, np.split(row[:c.n_designed], ends)))
                lines += [f">{Path(c.structure.name).name}, designed_chains={list(c.design)}, "
                          f"designed={problem.drawn.sum()}, T={self.temperature:g}, "
                          f"sample={number}", parts]
        return "\n".join(lines) + "\n"


def diversity(letters: np.ndarray) -> float:
    """The fraction of residues in which two of N designs differ, in the mean over pairs of them.

    letters: (N, L) of any type, N of at least two."""
    n, length = letters.shape
    n_equal = 0     # ordered pairs with the same letter
    for letter in np.unique(letters):
        with_it = (letters == letter).sum(0)
        n_equal += (with_it * (with_it - 1)).sum()
    return 1 - n_equal / (n * (n - 1) * length)
