"""`GradientHistogram` as a picture."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jamp.inspect._histogram_text import LARGEST, range_of, scale_of
from jamp.inspect._names import shortened
from jamp.inspect._picture import GREY, new_figure, save, say

_BLUE, _RED, _ORANGE = "#4477aa", "#cc3311", "#ee7733"
_SMALL = {"va": "center", "fontsize": 7, "color": GREY}


def plot(found: Any, path: str) -> None:
    """A histogram of all gradients, and below it one row for each leaf."""
    leaves = found.leaves[:LARGEST]
    figure = new_figure(10, 3.4 + 0.22 * len(leaves))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, max(1, 0.24 * len(leaves))])
    exponents = found.exponents
    above.bar([e + 0.5 for e in exponents], exponents.values(), width=0.9, color=_BLUE)
    if exponents:
        above.set_yscale("log")
    else:
        above.set_yticks([])
        say(above, "no gradient that is finite and not zero")
    above.set_ylabel("gradients")
    _draw_lost(above, below, found)
    for row, leaf in enumerate(leaves):
        most = max(leaf.exponents.values(), default=1)
        for e, n in leaf.exponents.items():
            below.add_patch(_cell(e, row, 0.15 + 0.85 * math.sqrt(n / most)))
        if said := _odd(leaf):
            below.annotate(said, (0.995, row), xycoords=("axes fraction", "data"), ha="right", **_SMALL)
    below.set_ylim(len(leaves) - 0.5, -0.5)
    below.set_yticks(range(len(leaves)), shortened([leaf.path for leaf in leaves], 40), fontsize=7)
    below.set_xlabel("binary exponent of the true gradient")
    figure.suptitle(f"gradients in {found.dtype} at a loss scale of {scale_of(found.loss_scale)}")
    save(figure, path)


def _draw_lost(above: Any, below: Any, found: Any) -> None:
    """What the dtype loses, behind the bars, with its names above them."""
    info, shift = jnp.finfo(found.dtype), math.log2(found.loss_scale)
    normal, zero, top = (info.minexp - shift, info.minexp - info.nmant - shift, info.maxexp - shift)
    low, high = range_of(found.exponents)
    left, right = min(low, zero) - 2, max(high + 1, top) + 2
    for axes in (above, below):
        axes.axvspan(left, zero, color=_RED, alpha=0.15, lw=0, zorder=0)
        axes.axvspan(zero, normal, color=_ORANGE, alpha=0.15, lw=0, zorder=0)
        axes.axvspan(top, right, color=_RED, alpha=0.15, lw=0, zorder=0)
        axes.set_xlim(left, right)
        axes.spines[["top", "right"]].set_visible(False)
    for start, end, text in ((left, zero, "zero"), (zero, normal, "fewer digits"), (top, right, "∞")):
        at = {"xycoords": ("data", "axes fraction"), "xytext": (0, 2), "textcoords": "offset points"}
        above.annotate(text, ((start + end) / 2, 1), **at, ha="center", fontsize=8, color=GREY)


def _odd(leaf: Any) -> str:
    """What a row does not show: gradients that are not finite, and leaves that are all zero."""
    if leaf.nonfinite:
        return f"not finite already: {leaf.nonfinite:,} of {leaf.size:,}"
    return "all zero" if leaf.size and leaf.zeros == leaf.size else ""


def _cell(exponent: int, row: int, weight: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((exponent, row - 0.4), 1, 0.8, color=_BLUE, alpha=weight, lw=0)
