"""Log-likelihoods of pairs of proteins under SEDD, estimated with noise that both share.

    bounds = PairBounds(graph, noise, letter_counts, samples=8, share=True)
    batch = bounds.batch(pairs, [3, 1, 4], seed=0, epoch=0)      # on the CPU: all noise is drawn
    parts = bounds.parts(model(batch["xt"], batch["sigma"], mask), batch)     # (P, K, 2) in nats
    chosen, rejected = parts.sum(1).unbind(1)                        # estimates of ln p

ln p(x) is not known: what stands for it is -B(x), the bound of sedd/evaluation.py, an integral over
noise levels and random masks. An estimate of it has K levels. Of a preference only differences
count, between two sequences and between two models. They are the less noisy the more is shared: the
same noise for all models, always; for both sequences of a pair too, with `share`. (Zhu et al. 2025,
LLaDA 1.5, arXiv 2505.19223, do this for text.)

Absorbing graph: if each of L residues is hidden with probability m, the bound is, with h the loss
of a mask M at that level (-ln p of the hidden residues; Sahoo et al. 2024, arXiv 2406.07524),

    B = integral of 1/m E[h(M, m)] dm = sum over l = 1..L of  1/l E[h(M, m) | M has l residues]

The number l is drawn evenly and not left to chance. M and m follow together from L uniform random
numbers: M are the places of the l smallest, m is the largest of these.

Mutants, which differ at d positions, at most FEW: of the masks of l residues, a share s(l) hides at
least one of the d. These contribute much, but are rare where 1/l is large. So

    E[h | l] = s(l) E[h | l, some of the d hidden] + (1 - s(l)) E[h | l, none hidden]

and some of the K levels draw masks of the first kind, the others of the second. Where a mask hides
all d, both noised sequences are one, and one pass of the network serves both.
"""
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from proteins.letters import X_ID
from proteins.seeds import keyed_generator
from sedd.diffusion import independent_log_score, score_entropy_loss

# In training t is drawn from [TIME_EPS, 1], as the weight of the loss, 1/t, diverges at 0: a model
# learns no scores at lower noise.
TIME_EPS = 1e-3
# Differing positions, at most, by which masks are chosen: of 99 residues with exact scores this
# makes the variance of a difference 5, 3, 4 and 5 times smaller for 1, 2, 3 and 5, and for 8 not.
FEW = 5
LEAST_SPLIT = 4       # levels, so that each kind of masks has two: one has no variance


class Unigram:
    """The model that knows letter frequencies alone: the control variate of bounds.

    Its scores and likelihood are known exactly, and the noise happens to change the losses of all
    models alike. So a bound is its exact -ln p plus the estimated difference between the models:
    without bias, with several times less variance. Below TIME_EPS, where no score is learned, the
    bound thereby is that of this model.

    nll: (21,) float64, -ln p of each token, in nats; 0 for X, which never counts.
    baseline: (21,) float64, its part of the bound.
    """

    def __init__(self, letter_counts, graph, noise):
        """letter_counts: of the training proteins, see Proteins.letter_counts."""
        self.graph = graph
        frequencies = np.append(unigram_frequencies(letter_counts), 0.0)   # 0 for X, never a target
        self.nll = -np.log(np.append(frequencies[:X_ID], 1.0))
        self.frequencies = torch.from_numpy(frequencies)
        self.baseline = self.nll if graph.absorb else self._uniform_cost(noise)

    def _uniform_cost(self, noise):
        """Baseline in nats of each token in the uniform graph. The prior at t = 1 is uniform: it
        replaces the unigram model's own distribution of noised tokens."""
        graph = self.graph
        sigma1 = noise(torch.ones(1, dtype=torch.float64))[0]
        p1 = graph.transition(torch.arange(graph.n_tokens)[None], sigma1)[0]       # (n_tokens, V)
        own_prior = (torch.xlogy(p1, p1) - torch.xlogy(p1, self.frequencies @ p1)).sum(-1).numpy()
        return np.where(self.nll > 0, self.nll - own_prior + graph.prior_kl(sigma1), 0.0)

    def loss(self, batch):
        """(B,) loss in nats, float64 on the CPU, of a batch of x0, xt, weight, sigma, dsigma."""
        log_score = independent_log_score(self.frequencies, batch["sigma"], batch["xt"],
                                          self.graph)
        loss, _ = score_entropy_loss(log_score, batch["sigma"], batch["dsigma"], batch["xt"],
                                     batch["x0"], self.graph, batch["weight"])
        return loss


def unigram_frequencies(letter_counts):
    """(count + 1) / (total + 20) of the 20 amino acids, so that none is zero: (20,) float64.

    letter_counts: (21,), see Proteins.letter_counts; X is left out.
    """
    seen = np.asarray(letter_counts, np.float64)[:X_ID] + 1
    return seen / seen.sum()


class Noised(NamedTuple):
    """One sequence of a pair with the noise of one level."""
    level: int              # 0 to K - 1
    side: int               # 0: chosen, 1: rejected
    x0: torch.Tensor        # (L,) int64
    xt: torch.Tensor        # (L,) int64
    sigma: float
    dsigma: float           # of which the loss is a multiple
    factor: float           # of its loss in the estimate


class PairBounds:
    """Estimates of ln p for both sequences of pairs, each with `samples` noise levels, K.

    A pair has chosen and rejected, (L,) uint8 of lengths that may differ, and key, an int. Its
    noise is seeded by (seed, key, epoch).
    """

    def __init__(self, graph, noise, letter_counts, samples: int, share: bool = True):
        self.graph = graph
        self.noise = noise
        self.samples = samples
        self.share = share
        self.unigram = Unigram(letter_counts, graph, noise)

    # ---- what a training script calls ----

    def batch(self, pairs: list, indices: list[int], seed: int,
              epoch: int | None = None) -> dict[str, Any]:
        """The noise of P pairs, as tensors: what does not depend on a model.

        epoch: None for noise that is the same in all epochs.
        Returns a dict of
            xt (R, L) int64, sigma (R,) float64, mask (R, L) bool, True = residue: the R distinct
                inputs of the network; full: whether no residue is padding.
            row (E,) int64, x0 (E, L) int64, weight (E, L) bool, factor (E,), dsigma (E,): E
                losses, each of a sequence x0 at an input; cell (E,) int64: where it is added.
            offset (P, K, 2): what parts are without the model's losses.
            n_first (P,) int64: how many of the K levels are of the first of two kinds; 0: all are
                of one.
        """
        noised = []
        n_first = []
        for i in indices:
            drawn, number = self.draw(pairs[i], seed, epoch)
            noised.append(drawn)
            n_first.append(number)
        batch = self._stack(noised)
        batch["n_first"] = torch.tensor(n_first)
        per_entry = {name: batch[name] for name in ("x0", "weight", "dsigma")}
        per_entry["xt"] = batch["xt"][batch["row"]]
        per_entry["sigma"] = batch["sigma"][batch["row"]]
        cells = torch.zeros(len(indices) * self.samples * 2, dtype=torch.float64)
        cells.index_add_(0, batch["cell"], batch["factor"] * self.unigram.loss(per_entry))
        baseline = torch.tensor([[self.unigram.baseline[side].sum()
                                  for side in (pairs[i].chosen, pairs[i].rejected)]
                                 for i in indices], dtype=torch.float64)
        batch["offset"] = cells.view(-1, self.samples, 2) - baseline[:, None] / self.samples
        return batch

    def parts(self, log_score: torch.Tensor, batch: dict) -> torch.Tensor:
        """(P, K, 2) float32, whose sums over K estimate ln p of chosen and rejected, in nats.

        log_score: (R, L, V) at the inputs of the batch, which is on the model's device."""
        row = batch["row"]
        loss, _ = score_entropy_loss(log_score[row], batch["sigma"][row], batch["dsigma"],
                                     batch["xt"][row], batch["x0"], self.graph, batch["weight"])
        offset = batch["offset"].to(loss.dtype)
        weighted = batch["factor"].to(loss.dtype) * loss
        return offset.flatten().index_add(0, batch["cell"], -weighted).view_as(offset)

    def entropy(self, log_score: torch.Tensor, batch: dict) -> torch.Tensor:
        """(P,) mean entropy, in nats, of the letters that a model gives at hidden residues of the
        chosen sequence; 0 for the uniform graph, which hides none."""
        P = len(batch["n_first"])
        if not self.graph.absorb:
            return log_score.new_zeros(P)
        log_p = torch.log_softmax(log_score[..., :X_ID], -1)
        hidden = batch["xt"] == self.graph.mask_id
        # At seen residues scores may be infinite: a gradient of 0 x inf would be NaN.
        log_p = torch.where(hidden[..., None], log_p, 0.0)
        of_residue = torch.where(hidden, -(log_p.exp() * log_p).sum(-1), 0.0)
        chosen = batch["cell"] % 2 == 0
        row = batch["row"][chosen]
        pair = batch["cell"][chosen] // (2 * self.samples)
        sums = log_p.new_zeros(P).index_add(0, pair, of_residue.sum(-1)[row])
        counts = log_p.new_zeros(P).index_add(0, pair, hidden.sum(-1)[row].to(sums.dtype))
        return sums / counts

    # ---- the noise of a pair ----

    def draw(self, pair: Any, seed: int, epoch: int | None = None) -> tuple[list[Noised], int]:
        """([Noised], number of levels whose masks hide some of the positions at which the two
        differ)."""
        sides = [torch.from_numpy(side.astype(np.int64)) for side in (pair.chosen, pair.rejected)]
        key = (seed, "pair noise", pair.key, "always" if epoch is None else epoch)
        if not self.share:
            found = []
            for side in range(2):
                generator = keyed_generator(*key, side)
                found += self._all_levels(sides[side:side + 1], side, generator)
            return found, 0
        generator = keyed_generator(*key)
        differ = self._few_differing(*sides)
        if differ is None:
            return self._all_levels(sides, 0, generator), 0
        n_first = self.samples // 2
        found = []
        for level, place in enumerate(evenly(n_first, generator)):
            found += self._some_hidden(sides, differ, level, place, generator)
        for level, place in enumerate(evenly(self.samples - n_first, generator), n_first):
            found += self._none_hidden(sides, differ, level, place, generator)
        return found, n_first

    def _few_differing(self, one, other):
        """Positions (d,) at which two sequences differ, if masks shall be chosen by them; or None.
        """
        if not self.graph.absorb or len(one) != len(other) or self.samples < LEAST_SPLIT:
            return None
        differ = (one != other).nonzero()[:, 0]
        return differ if 0 < len(differ) <= min(FEW, len(one) - 1) else None

    def _all_levels(self, sides, first_side, generator):
        """Noised of the sequences at all levels, by the same random numbers where both are long
        enough. first_side: the number of the first of them."""
        found = []
        for level, place in enumerate(evenly(self.samples, generator)):
            draws = torch.rand(max(map(len, sides)), dtype=torch.float64, generator=generator)
            if not self.graph.absorb:
                tokens = self.graph.sample_limit(draws.shape, generator)
            for side, x0 in enumerate(sides, first_side):
                if self.graph.absorb:
                    found.append(self._masked(x0, level, side, place, draws[:len(x0)]))
                else:
                    t = TIME_EPS + (1 - TIME_EPS) * place
                    sigma, dsigma = map(float, self.noise(torch.tensor(t, dtype=torch.float64)))
                    noised = draws[:len(x0)] < -math.expm1(-sigma)
                    found.append(Noised(level, side, x0,
                                        torch.where(noised, tokens[:len(x0)], x0), sigma, dsigma,
                                        (1 - TIME_EPS) / self.samples))
        return found

    def _masked(self, x0, level, side, place, draws):
        """Noised with a mask whose number of residues is at a place in [0, 1) from 1 to L."""
        number = 1 + int(place * len(x0))
        ranked = draws.sort()
        hidden = ranked.indices[:number]
        return self._hide(x0, hidden, level, side, float(ranked.values[number - 1]),
                          len(x0) / number / self.samples)

    def _hide(self, x0, hidden, level, side, share,  # noqa: PLR0913  (the fields of Noised)
              factor):
        """Noised without the residues `hidden`. share: the probability with which one is hidden."""
        low, high = self.noise(torch.tensor([TIME_EPS, 1.0], dtype=torch.float64))[0].tolist()
        # Beyond the levels of training, the scores of the nearest of these.
        sigma = min(max(-math.log1p(-share), low), high)
        xt = x0.clone()
        xt[hidden] = self.graph.mask_id
        # A loss over r = 1 / (e^sigma - 1), by which scores are scaled: h of the file's docstring.
        return Noised(level, side, x0, xt, sigma, math.expm1(sigma), factor)

    def _some_hidden(self, sides, differ, level, place, generator):
        """Noised of both sequences with one mask that hides some of the differing positions."""
        L = len(sides[0])
        d = len(differ)
        number = 1 + int(place * L)
        # How many: j, as often as among all masks but those that hide none.
        ways = torch.tensor([math.comb(d, j) * ways_to_hide(L - d, number - j)
                             / math.comb(L, number) for j in range(1, d + 1)],
                            dtype=torch.float64)
        draw = torch.rand((), dtype=torch.float64, generator=generator)
        n_hidden = 1 + min(int((ways.cumsum(0) <= draw * ways.sum()).sum()), d - 1)
        draws = torch.rand(L, dtype=torch.float64, generator=generator)
        order = draws[differ].argsort()
        draws[differ[order[:n_hidden]]] = -1.0                      # hidden
        draws[differ[order[n_hidden:]]] = 2.0                       # seen
        return self._both(sides, draws, number, level, L * float(ways.sum()), generator)

    def _none_hidden(self, sides, differ, level, place, generator):
        """Noised of both sequences with one mask that hides none of the differing positions."""
        L = len(sides[0])
        d = len(differ)
        number = 1 + int(place * (L - d))
        share = ways_to_hide(L - d, number) / math.comb(L, number)
        draws = torch.rand(L, dtype=torch.float64, generator=generator)
        draws[differ] = 2.0
        return self._both(sides, draws, number, level, (L - d) * share, generator)

    def _both(self, sides, ranks, number, level,  # noqa: PLR0913  (see _hide)
              ways, generator):
        """Noised of both sequences, without the `number` residues of lowest rank, at a level drawn
        for that. ways: what 1 / number is multiplied by, see the file's docstring."""
        hidden = ranks.argsort()[:number]
        draws = torch.rand(len(ranks), dtype=torch.float64, generator=generator)
        share = float(draws.sort().values[number - 1])
        n_levels = self.samples // 2
        if level >= n_levels:       # of the second kind
            n_levels = self.samples - n_levels
        factor = ways / number / n_levels
        return [self._hide(x0, hidden, level, side, share, factor) for side, x0 in enumerate(sides)]

    def _stack(self, noised):
        """Tensors of [[Noised] of a pair], see batch; equal inputs of the network become one."""
        entries = [(pair, one) for pair, drawn in enumerate(noised) for one in drawn]
        L = max(len(one.x0) for _, one in entries)
        inputs = {}             # content -> (its row, Noised)
        rows = []
        for _, one in entries:
            content = (one.xt.numpy().tobytes(), one.sigma)
            row, _ = inputs.setdefault(content, (len(inputs), one))
            rows.append(row)
        firsts = [one for _, one in inputs.values()]

        def padded(tokens):
            return torch.stack([pad(x, (0, L - len(x)), value=X_ID) for x in tokens])

        lengths = torch.tensor([len(one.xt) for one in firsts])
        x0 = padded([one.x0 for _, one in entries])
        factors = torch.tensor([one.factor for _, one in entries], dtype=torch.float64)
        dsigma = torch.tensor([one.dsigma for _, one in entries], dtype=torch.float64)
        cells = [(pair * self.samples + one.level) * 2 + one.side for pair, one in entries]
        return {"xt": padded([one.xt for one in firsts]),
                "sigma": torch.tensor([one.sigma for one in firsts], dtype=torch.float64),
                "mask": torch.arange(L) < lengths[:, None], "full": bool((lengths == L).all()),
                "row": torch.tensor(rows), "x0": x0, "weight": x0 != X_ID,   # padding is X too
                "dsigma": dsigma, "factor": factors, "cell": torch.tensor(cells)}


def evenly(n, generator) -> list[float]:
    """n random numbers in [0, 1), one in each of n equal parts, at the same place in each."""
    start = float(torch.rand((), dtype=torch.float64, generator=generator))
    return [(k + start) / n for k in range(n)]


def ways_to_hide(n, number):
    """Number of masks of `number` of n residues."""
    return math.comb(n, number) if number >= 0 else 0


def margin_variance(parts: torch.Tensor, n_first: torch.Tensor) -> torch.Tensor:
    """(P,) variance, by the noise, of chosen - rejected; levels are taken as independent, so it is
    an upper estimate.

    parts: (P, K, 2), see PairBounds.parts, or a difference of two models' parts, K at least 2.
    n_first: (P,), see PairBounds.batch.
    """
    margins = parts[..., 0] - parts[..., 1]                                     # (P, K)
    K = margins.shape[1]
    variance = margins.var(1) * K
    split = n_first > 0
    if bool(split.any()):
        n = int(n_first.max())
        of_kinds = margins[:, :n].var(1) * n + margins[:, n:].var(1) * (K - n)
        variance = torch.where(split, of_kinds, variance)
    return variance
