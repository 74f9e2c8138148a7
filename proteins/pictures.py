"""Pictures of scores of mutations, as PNG; matplotlib is needed.

    draw_scan(proteins, scores, "scan.png", "v_48_020")            # heat map, residues x letters
    draw_scan(proteins, scores, "next.png", "v_48_020", marks)     # marks: of proteins/proposals.py
    draw_measured(proteins, scores, "scores.png", report, "ddg", lower_is_better=True)

proteins: list of Protein (proteins/mutations.py). scores: (n,) of the variants of each. The weights
are named in words: which ones, and by which others their scores are corrected.
"""
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proteins.correlation import Report
from proteins.letters import AMINO_ACIDS, decode
from proteins.mutations import Protein
from proteins.proposals import MEASURED, PROPOSED, UNMARKED
from proteins.scores import label_of, partners_of
from training.figures import make_figure, save_figure

LETTERS_BY_KIND = "GAVLIMCPFWYSTNQHKRDE"    # small and greasy, aromatic, polar, charged
PER_LINE = 60           # residues at most: a page shows a line of these at a size one can read
TICK = 10               # residues from one number to the next, in a line that leaves out none
SHORT_GAP = 4           # rows without a residue: fewer of them are drawn, in grey
INCHES = 0.14           # of a cell
LEAST_COLUMNS = 24      # room for the titles
WITHIN = 0.995          # part of the scores that the colours tell apart
DPI = 130
CUT = 3                 # points, of the gap where residues are left out; a line is in its middle
GREY = "0.85"           # of cells without a score, such as gaps
SCALE = "score, nats (above 0: the mutant is preferred)"
BINDING_SCALE = "score of binding, nats (above 0: the mutant binds more strongly)"
DOT = "dot: wild type, also above"
MOST_COLOURS = 10       # proteins that have a colour of their own
# How cells are marked: the arguments of scatter. What is measured is crossed out; what is proposed
# is framed in a colour that the map does not have.
MARKS = {MEASURED: {"label": "measured", "marker": "x", "s": 14, "color": "black",
                    "linewidths": 0.8},
         PROPOSED: {"label": "proposed", "marker": "s", "s": 40, "facecolors": "none",
                    "edgecolors": "#00a000", "linewidths": 1.6}}


class Line(NamedTuple):
    """A line of a heat map: n columns, of residues of one chain."""
    title: str
    labels: list[str]           # number of each residue in the file, "" for a gap
    wild_types: list[str]       # its letter, or ""
    cells: np.ndarray           # (20, n) scores, 0 of the wild type, nan where there is none
    marked: np.ndarray          # (20, n)
    cuts: list[int]             # columns before which residues are left out


def draw_scan(proteins: list[Protein], scores: list[np.ndarray], path, weights: str,
              marks: list[np.ndarray] | None = None) -> None:
    """Draw the scores of single mutations of a protein: a row of cells for each letter.

    Residues without a score are left out, but for short gaps. Long chains are wrapped into lines of
    equal length.

    Args:
        weights: names of those that gave the scores, for the title.
        marks:   (n,) of each protein, what of MARKS its variants have; None: no marks.
    Raises: ImportError without matplotlib."""
    lines = []
    for number, protein in enumerate(proteins):
        if marks is None:
            protein_marks = np.full(len(protein.variants), UNMARKED)
        else:
            protein_marks = marks[number]
        for chain in protein.complex.design:
            lines += chain_lines(protein, chain, scores[number], protein_marks)
    limit = float(np.quantile(np.abs(np.concatenate(scores)), WITHIN)) or 1.0
    longest = max(LEAST_COLUMNS, *(line.cells.shape[1] for line in lines))
    width = INCHES * longest + 1.6
    height = (INCHES * len(LETTERS_BY_KIND) + 0.75) * len(lines) + 0.5
    figure = make_figure(figsize=(width, height))
    figure.set_layout_engine("compressed")      # else a tall figure loses the letters at its left
    figure.suptitle(f"Scores by {weights}".replace("$", r"\$"), fontsize=10, wrap=True)
    axes = figure.subplots(len(lines), 1, squeeze=False)[:, 0]
    for axis, line in zip(axes, lines):
        image = draw_line(axis, line, longest, limit)
    bar = figure.colorbar(image, ax=list(axes), extend="both", fraction=0.02, pad=0.01,
                          shrink=min(1.0, 3.0 / height + 0.3))
    bar.set_label(f"{scale_of(proteins)}\n{DOT}")
    shown = [axes[0].scatter([], [], **style) for mark, style in MARKS.items()
             if any((line.marked == mark).any() for line in lines)]
    if shown:
        figure.legend(handles=shown, loc="outside lower left", ncols=len(shown), fontsize=8,
                      frameon=False)
    save_figure(figure, path, DPI)


def scale_of(proteins):
    """What scores are, in words."""
    return BINDING_SCALE if proteins[0].partners else SCALE


def chain_lines(protein, chain, scores, marks):
    """List of the Lines of a chain."""
    numbers = protein.structure.chains[chain].numbers
    place = {number: k for k, number in enumerate(numbers) if number}
    cells = np.full((len(LETTERS_BY_KIND), len(numbers)), math.nan)
    marked = np.full(cells.shape, UNMARKED)
    wild_types = [""] * len(numbers)
    for variant, score, mark in zip(protein.variants, scores, marks):
        if variant.cells.get("chain", chain) == chain:
            mutation, = variant.mutations
            k = place[mutation.number]
            cells[LETTERS_BY_KIND.index(mutation.mutant), k] = score
            marked[LETTERS_BY_KIND.index(mutation.mutant), k] = mark
            wild_types[k] = mutation.wild_type
            cells[LETTERS_BY_KIND.index(mutation.wild_type), k] = 0
    scored = [k for k, letter in enumerate(wild_types) if letter]
    if not scored:
        return []
    name = Path(protein.name).name
    if protein.has_structure:
        name += f", chain {chain}"
    if protein.partners:
        name += f", binding of {partners_of(protein)}"
    rows, cuts = rows_of(protein.structure.chains[chain], scored)
    lines = []
    for part in lines_of(0, len(rows)):
        shown = rows[part]
        labels = [numbers[k] or "" for k in shown]
        present = [label for label in labels if label]
        lines.append(Line(f"{name}: {present[0]} to {present[-1]}", labels,
                          [wild_types[k] for k in shown], cells[:, shown], marked[:, shown],
                          [cut - part.start for cut in cuts if part.start < cut < part.stop]))
    return lines


def rows_of(chain, scored):
    """(rows of a Chain that are drawn, the places among these before which some are left out).

    scored: rows that have scores. Between them, short gaps are drawn: a residue that could have a
    score, but has none, was not asked for."""
    letters = decode(chain.S)
    rows = scored[:1]
    cuts = []
    for last, row in zip(scored, scored[1:]):
        between = range(last + 1, row)
        is_gap = not any(chain.resolved[k] and letters[k] in AMINO_ACIDS for k in between)
        if is_gap and len(between) < SHORT_GAP:
            rows += between
        else:
            cuts.append(len(rows))
        rows.append(row)
    return rows, cuts


def lines_of(first, end):
    """Slices that cover first:end, as few as PER_LINE allows, and as equal in length as can be."""
    n_lines = math.ceil((end - first) / PER_LINE)
    ends = [first + round((end - first) * k / n_lines) for k in range(n_lines + 1)]
    return [slice(start, stop) for start, stop in zip(ends, ends[1:])]


def draw_line(axis, line, longest, limit):
    """Draw a Line of a heat map. Returns the image, of which the colour bar is made."""
    from matplotlib import colormaps
    colours = colormaps["RdBu"].with_extremes(bad=GREY)
    image = axis.imshow(line.cells, cmap=colours, vmin=-limit, vmax=limit, interpolation="nearest")
    axis.spines[:].set_visible(False)       # they would frame the empty end of a line
    for column in line.cuts:
        axis.axvline(column - 0.5, color="white", linewidth=CUT)
        axis.axvline(column - 0.5, color="0.4", linewidth=CUT / 5)
    columns = [k for k, letter in enumerate(line.wild_types) if letter]
    rows = [LETTERS_BY_KIND.index(line.wild_types[k]) for k in columns]
    axis.scatter(columns, rows, s=9, color="black", linewidths=0)
    for mark, style in MARKS.items():
        rows, columns = np.nonzero(line.marked == mark)
        axis.scatter(columns, rows, **style)
    axis.set_xlim(-0.5, longest - 0.5)      # cells of all lines have one width
    axis.set_yticks(range(len(LETTERS_BY_KIND)), LETTERS_BY_KIND, fontsize=7,
                    family="monospace")
    if line.cuts:
        axis.set_xticks(range(len(line.labels)), line.labels, fontsize=7, rotation=90)
    else:
        ticks = [k for k, label in enumerate(line.labels)
                 if label.isdigit() and int(label) % TICK == 0]
        axis.set_xticks(ticks, [line.labels[k] for k in ticks], fontsize=8)
    axis.set_title(line.title, fontsize=9, loc="left", pad=14)
    for k, letter in enumerate(line.wild_types):
        axis.text(k, -0.9, letter, ha="center", va="bottom", fontsize=7, family="monospace")
    return image


def draw_measured(  # noqa: PLR0913  (what is drawn, and what is written beside it)
        proteins: list[Protein], scores: list[np.ndarray], path, report: Report, measured: str,
        lower_is_better: bool = False) -> None:
    """Draw scores against measured values.

    Args:
        report:          of correlate_proteins.
        measured:        name of the column.
        lower_is_better: turns the axis, so that a good model's points rise, as its correlation.
    Raises: ImportError without matplotlib."""
    figure = make_figure(figsize=(6.4, 5.4))
    axis = figure.subplots()
    several = 1 < len(proteins) <= MOST_COLOURS
    n = sum(map(len, scores))
    size = 22 if n < 200 else 9
    for number, (protein, protein_scores) in enumerate(zip(proteins, scores)):
        values = [variant.measured for variant in protein.variants]     # nan is not drawn
        axis.scatter(values, protein_scores, s=size, alpha=0.55, linewidths=0,
                     color=f"C{number if several else 0}",
                     label=f" {label_of(protein)}".replace("$", r"\$"))
    if several:
        axis.legend(fontsize="x-small")
    axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    label = measured.replace("$", r"\$")
    if lower_is_better:
        axis.invert_xaxis()
        label += " (lower is better: axis reversed)"
    axis.set(xlabel=label, ylabel=scale_of(proteins))
    axis.set_title(f"Spearman's rho {report.overall}\n{report.overall.n:,} mutations of "
                   f"{report.n_proteins:,} protein(s), 95 % interval in brackets", fontsize=10)
    axis.grid(alpha=0.3)
    save_figure(figure, path, DPI)
