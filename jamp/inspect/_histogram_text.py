"""`GradientHistogram` as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jamp.inspect._picture import new_figure, save

_LARGEST = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
_ROW = "{:<32} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7}  {}"


def table(found: Any) -> str:
    """The whole of it as text."""
    lines = [
        f"gradients in {found.dtype} at a loss scale of {_scale(found.loss_scale)}",
        f"  lost      {_share(found.below, found)} become zero, {_share(found.above, found)} infinite; "
        f"{_share(found.short, found)} keep fewer digits",
        f"  best      {_best(found)}",
        "",
    ]
    low, high = _range(found.exponents)
    title = f"exponents {low} to {high}"
    lines.append(_ROW.format("leaf", "size", "smallest", "largest", "is zero", "below", "short", "above", title))
    shown = found.leaves[:_LARGEST]
    for leaf in shown:
        cells = f"{leaf.size:,}", _number(leaf.smallest), _number(leaf.largest), leaf.zeros, leaf.below, leaf.short
        lines.append(_ROW.format(leaf.path[-32:], *cells, leaf.above, _bars(leaf.exponents, low, high)))
    if len(found.leaves) > _LARGEST:
        lines.append(f"and {len(found.leaves) - _LARGEST} leaves more")
    if nonfinite := [leaf.path for leaf in found.leaves if leaf.nonfinite]:
        lines += ["", f"not finite already: {', '.join(nonfinite[:5])}"]
    return "\n".join(line.rstrip() for line in lines)


def _best(found: Any) -> str:
    if found.best_scale is None:
        return "any scale: all gradients are zero"
    if found.best_scale == found.loss_scale:
        return "this scale: no other loses fewer digits without an overflow"
    return f"a scale of {_scale(found.best_scale)} loses the fewest digits without an overflow"


def _scale(value: float) -> str:
    power = math.log2(value)
    return f"2**{power:.0f} ({value:g})" if power == round(power) and power else f"{value:g}"


def _share(number: int, found: Any) -> str:
    return "none" if not number else f"{number:,} of {found.size:,} ({100 * number / found.size:.2g} %)"


def _number(value: float) -> str:
    return "" if math.isinf(value) else f"{value:.1e}"


def _range(exponents: Mapping[int, int]) -> tuple[int, int]:
    return (min(exponents), max(exponents)) if exponents else (0, 0)


def _bars(exponents: Mapping[int, int], low: int, high: int) -> str:
    """A bar for each exponent; for each few of them where there are more than forty."""
    width = max(1, math.ceil((high - low + 1) / 40))
    sums = [sum(exponents.get(e, 0) for e in range(start, start + width)) for start in range(low, high + 1, width)]
    most = max(sums, default=0)
    # The square root shows the tails, which are what a scale loses.
    return "".join(" " if not n else _BLOCKS[min(7, int(8 * math.sqrt(n / most)))] for n in sums)


def plot(found: Any, path: str) -> None:
    """A histogram of all gradients, and below it one row for each leaf."""
    figure = new_figure(10, 3.4 + 0.22 * min(len(found.leaves), _LARGEST))
    above, below = figure.subplots(
        2, 1, sharex=True, height_ratios=[3, max(1, 0.24 * min(len(found.leaves), _LARGEST))]
    )
    info, shift = jnp.finfo(found.dtype), math.log2(found.loss_scale)
    normal, zero, top = (info.minexp - shift, info.minexp - info.nmant - shift, info.maxexp - shift)
    exponents = found.exponents
    above.bar([e + 0.5 for e in exponents], exponents.values(), width=0.9, color="#4477aa")
    above.set_yscale("log")
    above.set_ylabel("gradients")
    low, high = _range(exponents)
    left, right = min(low, zero) - 2, max(high + 1, top) + 2
    for axes in (above, below):
        axes.axvspan(left, zero, color="#cc3311", alpha=0.15, lw=0, zorder=0)
        axes.axvspan(zero, normal, color="#ee7733", alpha=0.15, lw=0, zorder=0)
        axes.axvspan(top, right, color="#cc3311", alpha=0.15, lw=0, zorder=0)
        axes.set_xlim(left, right)
        axes.spines[["top", "right"]].set_visible(False)
    for at, text in ((left + 0.5, "zero"), (zero + 0.3, "fewer\ndigits"), (top + 0.3, "∞")):
        above.annotate(text, (at, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8, color="#555555")
    leaves = found.leaves[:_LARGEST]
    for row, leaf in enumerate(leaves):
        most = max(leaf.exponents.values(), default=1)
        for e, n in leaf.exponents.items():
            below.add_patch(_cell(e, row, 0.15 + 0.85 * math.sqrt(n / most)))
    below.set_ylim(len(leaves) - 0.5, -0.5)
    below.set_yticks(range(len(leaves)), [leaf.path[-40:] for leaf in leaves], fontsize=7)
    below.set_xlabel("binary exponent of the true gradient")
    figure.suptitle(f"gradients in {found.dtype} at a loss scale of {_scale(found.loss_scale)}")
    save(figure, path)


def _cell(exponent: int, row: int, weight: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((exponent, row - 0.4), 1, 0.8, color="#4477aa", alpha=weight, lw=0)
