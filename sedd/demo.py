"""Demo proteins: a random source whose exact likelihood is known.

    source = DemoSource(seed=0)
    proteins = source.sample(20000, seed=0)
    source.nll(proteins)        # in nats, which no model can be below on average
"""
import numpy as np

from ddp_setup import seed_for
from proteins.letters import AMINO_ACIDS, UNIREF50, X_ID, decode
from proteins.sequences import Proteins


class DemoSource:
    """A second-order Markov source of known likelihood with UniRef50's letter frequencies.

    P(c | a, b), for residue c after a, b, is proportional to
        exp(bias[c] + 2 same[b, c] + same[a, c] + u1[b, c] + 0.7 u2[a, c]),
    where same is 1 if both residues are of one class (which favour helix, strand or turn) and else
    0, and u1, u2 are uniform in [-1, 1], drawn once from the seed. Two motifs override this: after
    "GK" comes S or T with probability 0.9 (the end of a P-loop), and two places after another N
    comes S or T with probability 0.6 (the glycosylation site N-x-[ST]). bias is fitted so that the
    stationary letter frequencies are UniRef50's. The first two residues have the stationary
    distribution of pairs, so a window has the law of a protein of its length; lengths are uniform
    over 40 to 120. There is no other state: the likelihood of a protein given its length is the
    product of these probabilities.
    With seed 0: 2.064 nats per residue in a long chain, 2.08 in its proteins, whose first two
    residues cost more; 2.889 by letter frequencies alone.

    transition: (20, 20, 20) float64, P(c | a, b).
    pair: (20, 20) float64, P(a, b) of two consecutive residues.
    """
    shortest = 40
    longest = 120
    classes = ("AEHKLMQR", "CFITVWY", "DGNPS")  # runs of a class are what a network learns first

    def __init__(self, seed=0):
        draw = _draws("demo source", seed)
        u1 = 2 * draw((20, 20)) - 1
        u2 = 2 * draw((20, 20)) - 1
        member = np.array([[c in group for c in AMINO_ACIDS] for group in self.classes], float)
        same = member.T @ member
        wanted = np.array(UNIREF50) / sum(UNIREF50)
        bias = np.log(wanted)
        self.pair = np.outer(wanted, wanted)
        for _ in range(2000):                   # until bias and pair no longer change
            logits = bias + (2 * same + u1)[None] + (same + 0.7 * u2)[:, None]
            self.transition = self._transition(logits)
            self.pair = np.einsum("ab,abc->bc", self.pair, self.transition)
            bias = bias + 0.1 * np.log(wanted / self.pair.sum(0))

    @staticmethod
    def _transition(logits):
        p = np.exp(logits)
        p /= p.sum(2, keepdims=True)
        g, k, n = (AMINO_ACIDS.index(c) for c in "GKN")
        is_motif = np.array([c in "ST" for c in AMINO_ACIDS])
        after_n = np.s_[n:n + 1, :]
        after_gk = np.s_[g:g + 1, k:k + 1]
        for context, share in ((after_n, 0.6), (after_gk, 0.9)):
            block = p[context]                                  # a view
            motif = block[..., is_motif].sum(-1, keepdims=True)
            block *= np.where(is_motif, share / motif, (1 - share) / (1 - motif))
        return p

    def sample(self, n, seed):
        """n proteins drawn with this seed -> Proteins."""
        draw = _draws("demo sample", seed)
        spread = self.longest - self.shortest + 1
        lengths = self.shortest + (draw(n) * spread).astype(np.int64)
        tokens = np.empty((n, self.longest), np.uint8)
        first = np.searchsorted(np.cumsum(self.pair)[:399], draw(n))
        tokens[:, 0] = first // 20
        tokens[:, 1] = first % 20
        edges = np.cumsum(self.transition, axis=2)[:, :, :19]
        for i in range(2, self.longest):
            context = (tokens[:, i - 2], tokens[:, i - 1])
            tokens[:, i] = (edges[context] < draw(n)[:, None]).sum(1)
        return Proteins(tokens.ravel(), np.arange(n) * self.longest, lengths)

    def nll(self, proteins):
        """Exact negative log-likelihood of each protein given its length, nats: (n,) float64.

        Raises ValueError for X and for fewer than 2 residues, which this source never makes.
        """
        log_pair = np.log(self.pair)
        log_transition = np.log(self.transition)
        nll = np.empty(len(proteins))
        for i in range(len(proteins)):
            x = proteins[i]
            if len(x) < 2 or x.max() >= X_ID:
                raise ValueError(f"protein {i} is {decode(x)[:30]!r}; expected at least 2 residues "
                                 f"and no X: the demo source makes no other.")
            inner = log_transition[x[:-2], x[1:-1], x[2:]].sum()
            nll[i] = -log_pair[x[0], x[1]] - inner
        return nll


def _draws(*key):
    return np.random.Generator(np.random.PCG64(seed_for(*key))).random
