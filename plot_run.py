"""Draw the curves of one or several runs into one PNG.

    python plot_run.py runs/mine                               # writes runs/mine/curves.png
    python plot_run.py runs/a runs/b --out comparison.png      # overlaid, a colour for each run

A training script draws its own at the end, where matplotlib is installed. Reads metrics.jsonl of
each run folder. What is drawn: PANELS in training/plot.py.
"""
import sys
from pathlib import Path

from training.parser import Parser
from training.plot import draw, rows_of
from training.problems import in_columns


def main(argv):
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="PNG; default: curves.png in the first folder")
    try:
        args = parser.parse_args(argv)
        out = args.out or args.runs[0] / "curves.png"
        if out.suffix.lower() != ".png":
            raise ValueError(f"found --out {out}; expected a name that ends in .png.")
        draw({str(folder): rows_of(folder) for folder in args.runs}, out)
        print(f"picture: {out}", flush=True)
        return 0
    except (ValueError, OSError) as error:
        print(in_columns(f"plot_run.py: error: {error}"), file=sys.stderr)
        return 2
    except ImportError as error:
        print(in_columns(f"plot_run.py: error: {error}. Expected matplotlib:\n"
                         "  pip install matplotlib"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
