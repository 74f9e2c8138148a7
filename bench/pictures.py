"""The pictures of README.md and docs: each is drawn if its input is given.

    python -m bench pictures --out docs/pictures --demo runs/sedd_demo --structure 5L33.pdb \\
        --table held_out.csv --weights tuned.pt

--demo: the folder of a run of `bash jobs/local.sh`; draws demo_curves.png. --structure: a PDB or
mmCIF file; draws scan_heatmap.png, the scores of all its mutations by the published weights.
--table with --weights: a table of measured stabilities (column ddg, positive = destabilising) of
proteins that these weights were not trained on; draws stability_before_after.png, measured against
predicted, by the published weights and by these. Scores the two last with score_mutations.py. The
tables of bench/stability.sh fit: runs/stability/megascale_held_out.csv, seed_0/latest_model.pt.
matplotlib and the published weights are needed.
"""
import csv
import sys
import tempfile
from pathlib import Path

import numpy as np

import score_mutations
from ddp_setup import BAD_INPUT
from proteins.correlation import Report, correlate
from training.figures import make_figure, save_figure
from training.files import check_writable
from training.parser import Parser
from training.plot import draw, rows_of
from training.problems import in_columns

BASE = "v_48_020"
COLORS = 256            # of a picture with a palette, which is a third as large
LOSSES = ("step", "loss", "val/loss", "val/unigram", "val/exact")
DPI = 110
GRID = 45               # hexagons along an axis


# ---------------------------------------------------------------- pictures
def draw_demo(run: Path, path: Path) -> None:
    """Draw the loss of a run, as in its own curves.png, which has the other curves too."""
    rows = [{key: row[key] for key in LOSSES if key in row} for row in rows_of(run)]
    draw({run.name: rows}, path)
    shrink(path)


def draw_scan(structure: Path, path: Path) -> None:
    """Draw the scores of all single mutations of a structure."""
    with tempfile.TemporaryDirectory() as folder:
        score(BASE, structure, "--scan", "--picture", path, "--out", Path(folder) / "scan.csv")
    shrink(path)


def draw_before_after(table: Path, weights: Path, path: Path) -> None:
    """Draw measured changes of stability against scores, by two weights side by side."""
    figure = make_figure(figsize=(9.0, 4.4))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    with tempfile.TemporaryDirectory() as folder:
        # Tuned weights are corrected as they were trained; the published ones likewise.
        results = {f"before: {BASE}": (BASE, "--correct_unfolded"), "after tuning": (weights,)}
        for axis, (title, words) in zip(axes, results.items()):
            out = Path(folder) / "scores.csv"
            score(*words, "--mutations", table, "--measured", "ddg", "--lower_is_better",
                  "--orders", "1", "--out", out)
            scores, ddg, report = read_scores(out)
            draw_panel(axis, title, scores, ddg, report)
    axes[0].invert_xaxis()      # of both: so that points of good weights rise
    axes[0].set_ylabel("score, nats")
    figure.suptitle(f"{report.overall.n:,} mutations of {report.n_proteins} proteins that were not "
                    "trained on (yellow: many)", fontsize=11)
    save_figure(figure, path, DPI)
    shrink(path)


def draw_panel(axis, title, scores, ddg, report: Report):
    """Draw one density of scores and measured values, with its correlations as title."""
    axis.hexbin(ddg, scores, gridsize=GRID, bins="log", cmap="viridis", mincnt=1, linewidths=0.1)
    axis.set(xlabel="measured ddG, kcal/mol (left: destabilising)")
    words = f"Spearman {report.overall.value:.2f} over all"
    if report.mean is not None:
        words += f", {report.mean.value:.2f} in the mean of proteins"
    axis.set_title(f"{title}\n{words}", fontsize=10)
    axis.grid(alpha=0.3)


def read_scores(path):
    """((n,) scores, (n,) ddG, Report) of what score_mutations.py wrote."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ddg"]]
    scores = np.array([float(row["score"]) for row in rows])
    ddg = np.array([float(row["ddg"]) for row in rows])
    names = [row["pdb_file"] for row in rows]
    return scores, ddg, correlate(scores, -ddg, names)


def score(*words):
    """Call score_mutations.py with these arguments; wrong ones end with its message and code."""
    score_mutations.main(list(map(str, words)))


def shrink(path):
    """Replace a PNG by one with a palette of COLORS colours."""
    from PIL import Image
    with Image.open(path) as image:
        # The default method, median cut, makes greys of a blue that is rare.
        small = image.convert("RGB").quantize(COLORS, method=Image.Quantize.FASTOCTREE)
    small.save(path, format="PNG", optimize=True)


# ---------------------------------------------------------------- command
def main(argv):
    parser = Parser(prog="python -m bench pictures", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="for the pictures")
    add("--demo", type=Path, metavar="RUN", help="run folder of the demo")
    add("--structure", type=Path, metavar="FILE", help="PDB or mmCIF, to be scanned")
    add("--table", type=Path, metavar="FILE.csv", help="measured ddG of proteins held out")
    add("--weights", type=Path, metavar="FILE.pt", help="trained without these proteins")
    try:
        args = parser.parse_args(argv)
        if bool(args.table) != bool(args.weights):
            raise ValueError("found one of --table and --weights; expected both.")
        if not (args.demo or args.structure or args.table):
            raise ValueError("found nothing to draw; expected --demo, --structure or --table.")
        args.out.mkdir(parents=True, exist_ok=True)
        check_writable(args.out / "scan_heatmap.png")
        if args.demo:
            draw_demo(args.demo, args.out / "demo_curves.png")
        if args.structure:
            draw_scan(args.structure, args.out / "scan_heatmap.png")
        if args.table:
            draw_before_after(args.table, args.weights, args.out / "stability_before_after.png")
        for path in sorted(args.out.glob("*.png")):
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    except (ValueError, OSError) as error:
        print(in_columns(f"python -m bench pictures: error: {error}"), file=sys.stderr)
        sys.exit(BAD_INPUT)
