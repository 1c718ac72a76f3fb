"""`ErrorSources` as a picture: what adds up to the error by scope, along the program, and by iteration of its loops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jamp.inspect._names import shortened
from jamp.inspect._picture import new_figure, save, say
from jamp.inspect._sources_text import number, place_of
from jamp.inspect._target import heading

_LARGEST = 16
_NAMED = 5  # Operations of each panel that have a color, and a name below the panels.
_BLUE = "#4477aa"


def plot(found: Any, path: str) -> None:
    """Bars by scope, the operations along the depth of the program, and those in loops by iteration.

    All of it is the column `gradient` of the table, or `value` where there is no gradient: parts that add up.
    """
    moving = [op for op in found.operations if op.share > 0]
    moving.sort(key=lambda op: -_size(_part(found, op)))  # What is drawn, which may be less than the share.
    in_loops = [op for op in moving if any(op.iterations)][:_NAMED]
    named = list({id(op): op for op in [*moving[:_NAMED], *in_loops]}.values())
    scopes = _by_scope(found, moving)
    rows = (len(named) + 1) // 2
    heights = [0.5 + 0.26 * max(len(scopes), 3), 2.6]
    figure = new_figure(11, 0.9 + sum(heights) + 0.22 * rows)
    grid = figure.add_gridspec(2, 2, height_ratios=heights)
    _draw_bars(figure.add_subplot(grid[0, :]), found, scopes)
    colors = {id(op): f"C{i}" for i, op in enumerate(named)}
    depth = figure.add_subplot(grid[1, 0] if in_loops else grid[1, :])
    _draw_depth(depth, found, moving, colors)
    if in_loops:
        _draw_loops(figure.add_subplot(grid[1, 1]), in_loops, colors)
    places = shortened([place_of(op) for op in named], 48)
    labels = [f"{number(_part(found, op))}  {op.operation}, {place}" for op, place in zip(named, places, strict=True)]
    handles = [_dot(color) for color in colors.values()]
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
    measured, predicted = _totals(found)
    figure.suptitle(
        f"{heading(found.policy, found.inner)}: relative error of the {_what(found)} {number(measured)}, "
        f"predicted {number(predicted)}",
        fontsize=11,
    )
    save(figure, path)


def _what(found: Any) -> str:
    return "results" if found.gradient_error is None else "gradient"


def _totals(found: Any) -> tuple[float, float]:
    """The error that was measured, and what its parts add up to."""
    if found.gradient_error is None:
        return found.value_error, found.value_predicted
    return found.gradient_error, found.gradient_predicted


def _part(found: Any, op: Any) -> float:
    """What an operation adds to the error; infinite if it overflows, which moves nothing in its own direction."""
    part, length = (op.value, op.value_spread) if found.gradient_error is None else (op.gradient, op.gradient_spread)
    return part if np.isfinite(length) else float("inf")


def _by_scope(found: Any, operations: Sequence[Any]) -> list[tuple[str, float]]:
    """The scopes whose parts are the largest, these last, and behind them the sum of all others."""
    parts: dict[str, float] = defaultdict(float)
    for op in operations:
        parts[place_of(op)] += _part(found, op)
    ranked = sorted(parts.items(), key=lambda item: _size(item[1]))
    rest, largest = ranked[:-_LARGEST], ranked[-_LARGEST:]
    others = [(f"{len(rest)} others", sum(part for _, part in rest))] if rest else []
    return [*others, *largest]


def _size(part: float) -> float:
    """The size of a part; what overflowed is the largest."""
    return abs(part) if np.isfinite(part) else float("inf")


def _draw_bars(axes: Any, found: Any, scopes: Sequence[tuple[str, float]]) -> None:
    finite = [abs(part) for _, part in scopes if np.isfinite(part)]
    widest = max(finite, default=0.0) or 1.0
    for row, (_, part) in enumerate(scopes):
        overflows = not np.isfinite(part)
        axes.barh(row, widest if overflows else part, color="#cc3311" if overflows else _BLUE, height=0.8)
        if overflows:
            at = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate("not finite", (0, row), **at, color="white", fontsize=8)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(scopes)), shortened([name for name, _ in scopes], 48), fontsize=8)
    spare = max(3 - len(scopes), 0) / 2
    axes.set_ylim(-0.6 - spare, len(scopes) - 0.4 + spare)
    axes.tick_params(labelsize=8)
    if not scopes:
        say(axes, "no operation rounds in a way that moves it")
    axes.set_xlabel(f"part of the relative error of the {_what(found)}: all bars add up to the prediction", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_depth(axes: Any, found: Any, operations: Sequence[Any], colors: dict[int, str]) -> None:
    for op in reversed(operations):  # Those with a name on top.
        if np.isfinite(part := _part(found, op)) and part:
            color = colors.get(id(op), "#bbbbbb")
            axes.plot(op.depth, abs(part), "o", color=color, markersize=5, fillstyle="full" if part > 0 else "none")
    axes.set_xlim(-0.04, 1.04)
    end = "its end" if found.gradient_error is None else "the end of the backward pass"
    axes.set_xlabel(f"depth in the program: 0 is its beginning, 1 {end}", fontsize=9)
    axes.set_ylabel("part of the error, by size\n(hollow: reduces it)", fontsize=9)
    _on_log_scale(axes)


def _draw_loops(axes: Any, operations: Sequence[Any], colors: dict[int, str]) -> None:
    for op in operations:
        sizes = np.nan_to_num(np.abs(op.iterations), nan=0.0, posinf=0.0)
        axes.plot(np.where(sizes > 0, sizes, np.nan), "o-", color=colors[id(op)], markersize=3)
    axes.set_xlabel("iteration of the loop", fontsize=9)
    axes.set_ylabel("part of the error, by size", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _on_log_scale(axes)


def _on_log_scale(axes: Any) -> None:
    """Sizes on a logarithmic axis; where there are none it has no numbers to show."""
    if any(np.any(np.asarray(line.get_ydata(), float) > 0) for line in axes.lines):
        axes.set_yscale("log")
    else:
        axes.set_yticks([])
        say(axes, "none that is finite and not zero")
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _dot(color: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker="o", linestyle="", color=color)
