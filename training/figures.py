"""Figures of matplotlib, which need not be installed, and pictures of them as PNG.

    figure = make_figure(figsize=(6.4, 5.4))
    axis = figure.subplots()
    save_figure(figure, "scores.png", dpi=130)
"""
import os

from training.files import write_whole


def make_figure(**options):
    """A figure that is drawn into a file, with constrained layout. options: of matplotlib's Figure.

    Raises: ImportError without matplotlib."""
    # Jupyter names a backend for windows here, and matplotlib cannot be imported if it is missing,
    # as in another environment than the notebook's. A file needs none.
    os.environ.pop("MPLBACKEND", None)
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **options)


def save_figure(figure, path, dpi: int) -> None:
    """Write a figure as PNG, whole or not at all."""
    write_whole(path, lambda file: figure.savefig(file, dpi=dpi, format="png"))
