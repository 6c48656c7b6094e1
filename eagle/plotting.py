"""Plots without a screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eagle.files import replacing


@contextmanager
def saved_plot(path: Path, rows: int = 1, columns: int = 1, **keywords) -> Iterator:
    """A matplotlib figure with panels, written to ``path`` at the end, all or nothing.

    Args:
        path: its ending (.png, .svg) decides the format.
        rows: rows of panels.
        columns: columns of panels.
        keywords: for ``pyplot.subplots``, ``figsize`` among them.

    Yields:
        The figure, and its panels as an array ``[rows, columns]``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **keywords)
    try:
        yield figure, np.asarray(panels)
        with replacing(path) as scratch:
            figure.savefig(scratch, dpi=140)
    finally:
        pyplot.close(figure)
