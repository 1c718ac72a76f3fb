"""Pictures: matplotlib where it is installed, and an error that says so where it is not."""

from __future__ import annotations

import os
from typing import Any

GREY = "#555555"  # Of words in a picture.


def new_figure(width: float, height: float) -> Any:
    """An empty figure that belongs to no window and to no global list.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("The picture takes matplotlib: pip install 'jamp-jax[examples]'.") from missing
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def say(axes: Any, text: str) -> None:
    """Writes into the middle of axes why there is nothing in them."""
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=9, color=GREY)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure; the ending of the path tells the format."""
    figure.savefig(path, dpi=120)
