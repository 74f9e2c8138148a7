"""The report of sample_sedd.py --report: samples compared with reference proteins, as a table and
a picture.

    print(report(samples, sequences_of("proteins.fasta"), picture="samples.png"))

The picture is drawn if matplotlib is installed. Table and picture show the composition of the
sequences, their repeats, and how similar each is to its nearest sequence of the reference. They do
not show whether the proteins fold or work.

- Frequencies and dipeptides: KL divergence of the samples' shares from the reference's, in nats;
  one is added to each count, so that none is zero.
- Low complexity: share of residues in a window of 12 whose letters have an entropy below 2.2 bits
  (the first pass of SEG; Wootton, Federhen 1993, Computers & Chemistry 17, 149).
- Longest repeat: residues of the longest stretch that occurs twice or more in one sequence.
- New 5-mers: share of a sequence's 5-mers that no reference sequence has.
- Identity: equal letters in the global alignment of a sequence with the nearest stretch of the
  reference, of about its length, as a share of its length. The nearest stretch shares most 5-mers
  on neighbouring diagonals (Lipman, Pearson 1985, Science 227, 1435); without a shared 5-mer there
  is none. By chance: the same for the letters of the sequence in random order, same stretch.
- Difference among samples: 1 - shared / all 5-mers of two samples, mean over pairs; 0: the same.
"""
import itertools
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from proteins.letters import AMINO_ACIDS, encode
from proteins.sequences import named_sequences
from proteins.tables import refuse_all
from training.files import write_whole

K = 5                   # length of the words (K-mers) that are compared; 3.2 million are possible
WINDOW = 12             # low complexity: residues of a window,
LEAST_BITS = 2.2        # whose letters have an entropy below this
BAND = 16               # diagonals (place in reference - place in sample) that are counted together
MOST_PAIRS = 500        # samples, the first ones, that are compared in all pairs


class Figures(NamedTuple):
    """What measure finds in a set of n sequences."""
    residues: np.ndarray        # (20,) share of each residue
    dipeptides: np.ndarray      # (20, 20) share of each pair of neighbours
    lengths: np.ndarray         # (n,) residues
    simple: np.ndarray          # (n,) share of residues in windows of low complexity
    repeats: np.ndarray         # (n,) residues of the longest repeat


def sequences_of(path):
    """The sequences of a FASTA file, a list of text in capitals, without a stop at the end.

    Raises: ValueError for gaps and other signs, which would count as residues, and for empty
    records."""
    found = []
    problems = []
    for name, text in named_sequences(path):
        text = text.upper().removesuffix("*")
        try:
            encode(text)
            if not text:
                raise ValueError("found no residue; expected some. Remove the record.")
            found.append(text)
        except ValueError as error:
            problems.append(f"{name:.60}: {error}")
    refuse_all(path, problems, "sequences")
    return found


def measure(sequences):
    """Figures of a list of str. Letters other than the 20 are left out of the shares."""
    singles = Counter()
    doubles = Counter()
    for text in sequences:
        singles.update(text)
        doubles.update(map("".join, zip(text, text[1:])))
    residues = np.array([singles[a] + 1.0 for a in AMINO_ACIDS])
    pairs = np.array([[doubles[a + b] + 1.0 for b in AMINO_ACIDS] for a in AMINO_ACIDS])
    return Figures(residues=residues / residues.sum(), dipeptides=pairs / pairs.sum(),
                   lengths=np.array([len(text) for text in sequences]),
                   simple=np.array([low_complexity(text) for text in sequences]),
                   repeats=np.array([longest_repeat(text) for text in sequences]))


def low_complexity(text):
    """Share of residues that lie in a window of low complexity."""
    simple = np.zeros(len(text), bool)
    for start in range(len(text) - WINDOW + 1):
        counts = Counter(text[start:start + WINDOW]).values()
        bits = -sum(n / WINDOW * math.log2(n / WINDOW) for n in counts)
        if bits < LEAST_BITS:
            simple[start:start + WINDOW] = True
    return simple.mean()


def longest_repeat(text):
    """Residues of the longest stretch that occurs at two places, which may overlap."""
    # Bisection: if a stretch repeats, shorter ones do too.
    low = 0
    high = max(len(text) - 1, 0)
    while low < high:
        size = (low + high + 1) // 2
        words = [text[i:i + size] for i in range(len(text) - size + 1)]
        repeats = len(set(words)) < len(words)
        if repeats:
            low = size
        else:
            high = size - 1
    return low


def kmers_of(text):
    """The K-mers of a sequence, in order."""
    return [text[i:i + K] for i in range(len(text) - K + 1)]


class Novelty(NamedTuple):
    """How n samples compare with the reference, each an array (n,)."""
    new: np.ndarray             # share of a sample's K-mers that no reference sequence has; or nan
    identity: np.ndarray        # with the nearest stretch; nan without a shared K-mer
    by_chance: np.ndarray       # the same of its letters in a random order
    nearest: np.ndarray         # index of the sequence with that stretch; -1 without one


def compare(samples, reference):
    """The Novelty of samples. samples, reference: lists of str."""
    holders = {word: [] for text in samples for word in kmers_of(text)}
    for place, text in enumerate(reference):
        for i, word in enumerate(kmers_of(text)):
            if word in holders:
                holders[word].append((place, i))
    random = np.random.default_rng(0)
    rows = []
    for text in samples:
        words = kmers_of(text)
        new = math.nan
        if words:
            new = sum(not holders[word] for word in set(words)) / len(set(words))
        bands = Counter((place, (i - j) // BAND) for j, word in enumerate(words)
                        for place, i in holders[word])
        if not bands:
            rows.append((new, math.nan, math.nan, -1))
            continue
        place, band = max(sorted(bands), key=bands.get)   # of equal ones the first
        first = (band - 1) * BAND
        stretch = reference[place][max(first, 0):first + len(text) + 3 * BAND]
        shuffled = "".join(random.permutation(list(text)))
        rows.append((new, identity(text, stretch), identity(shuffled, stretch), place))
    new, identities, by_chance, nearest = (np.array(column) for column in zip(*rows))
    return Novelty(new, identities, by_chance, nearest)


def identity(one, other):
    """Equal letters of the global alignment (gemmi's, with its default scores), as a share of
    `one`."""
    import gemmi
    aligned = gemmi.align_string_sequences(list(one), list(other), [])
    return aligned.match_count / len(one)


def difference(samples):
    """Mean over pairs of 1 - shared / all K-mers, of up to MOST_PAIRS samples; nan for one."""
    words = [set(kmers_of(text)) for text in samples[:MOST_PAIRS]]
    values = [1 - len(a & b) / max(len(a | b), 1) for a, b in itertools.combinations(words, 2)]
    return float(np.mean(values)) if values else math.nan


def divergence(p, q):
    """KL(p || q) in nats of two arrays of shares."""
    return float((p * np.log(p / q)).sum())


def span(values, form):
    """Least, median and most of the values that are not nan, as text, each formatted by `form`."""
    known = values[~np.isnan(values)]
    if not len(known):
        return "none"
    return "  ".join(form.format(x) for x in (known.min(), np.median(known), known.max()))


def report(samples, reference, picture=None):
    """Text of the table. Also draws `picture` (path of a PNG) if matplotlib is installed.

    samples, reference: lists of str, neither of them empty."""
    ours = measure(samples)
    theirs = measure(reference)
    novelty = compare(samples, reference)
    new = novelty.new[~np.isnan(novelty.new)]
    rows = []

    def row(name, mine, other=""):
        rows.append((name, mine, other))

    row("sequences", f"{len(samples):,}", f"{len(reference):,}")
    row("distinct sequences", f"{len(set(samples)):,}", f"{len(set(reference)):,}")
    row("length: least, median, most", span(ours.lengths, "{:,.0f}"),
        span(theirs.lengths, "{:,.0f}"))
    row("low complexity: mean share", f"{ours.simple.mean():.3f}", f"{theirs.simple.mean():.3f}")
    row("longest repeat: least, median, most", span(ours.repeats, "{:.0f}"),
        span(theirs.repeats, "{:.0f}"))
    row("residue frequencies: KL, nats", f"{divergence(ours.residues, theirs.residues):.4f}")
    row("dipeptides: KL, nats", f"{divergence(ours.dipeptides, theirs.dipeptides):.4f}")
    row("new 5-mers: mean share", f"{new.mean():.3f}" if len(new) else "none")
    row("identity with nearest: least, median, most", span(novelty.identity, "{:.2f}"))
    row("    by chance", span(novelty.by_chance, "{:.2f}"))
    row("samples that share no 5-mer", f"{(new == 1).sum():,}")
    row("difference among samples: mean", f"{difference(samples):.3f}")
    lines = [f"{'':<47}{'samples':>15}  {'reference':>15}"]
    lines += [f"{name:<47}{mine:>15}  {other:>15}".rstrip() for name, mine, other in rows]
    if picture is not None:
        lines.append(draw_picture(ours, theirs, novelty, picture))
    return "\n".join(lines)


def draw_picture(ours, theirs, novelty, path):
    """Draw the picture. Returns a line that says where it is, or why there is none."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    (letters, length), (complexity, nearness) = axes
    places = np.arange(len(AMINO_ACIDS))
    lengths = np.concatenate([ours.lengths, theirs.lengths])
    edges = np.geomspace(lengths.min(), lengths.max() + 1, 31)
    for shift, figures, name in ((-0.2, ours, "samples"), (0.2, theirs, "reference")):
        letters.bar(places + shift, figures.residues, 0.4, label=name)
        share = np.full(len(figures.lengths), 1 / len(figures.lengths))
        length.hist(figures.lengths, edges, weights=share, alpha=0.6, label=name)
        complexity.hist(figures.simple, 20, range=(0, 1), weights=share, alpha=0.6, label=name)
    letters.margins(y=0.2)      # room for the legend
    letters.set(xticks=places, xticklabels=list(AMINO_ACIDS), title="share of each residue")
    length.set(title="length", xlabel="residues", xscale="log", ylabel="share of sequences")
    length.xaxis.set_major_formatter("{x:,.0f}")
    length.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    complexity.set(title="low complexity", xlabel="share of a sequence",
                   ylabel="share of sequences")
    for values, name in ((novelty.identity, "identity with the nearest"),
                         (novelty.by_chance, "the same, letters shuffled")):
        nearness.hist(values[~np.isnan(values)], 25, range=(0, 1), alpha=0.6, label=name)
    nearness.set(title="novelty of the samples", xlabel="share of the sample", ylabel="samples")
    for axis in axes.flat:
        axis.legend()
    write_whole(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    return f"picture: {path}"
