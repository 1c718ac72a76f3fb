"""A report as a page of HTML, and as a picture: where FLOPs and kept bytes are, by scope and precision."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from jamp.inspect._picture import new_figure, save
from jamp.inspect._residuals import Residual
from jamp.inspect._table import amount, heading_lines, headings, scopes

_COLORS = {"half": "#4477aa", "float32": "#ee7733", "float8": "#228833", "other": "#bbbbbb"}
_DEEPEST = 8

Cells = dict[tuple[str, ...], dict[str, float]]


def as_html(report: Any) -> str:
    """The table of a report, for notebooks."""
    cell = '<td style="text-align:{}">{}</td>'
    rows = []
    for scope, operations in scopes(report):
        rows.append(f'<tr><th colspan="7" style="text-align:left">{html.escape(scope)}</th></tr>')
        for cells in operations:
            line = (cell.format("left" if i < 3 else "right", html.escape(text)) for i, text in enumerate(cells))
            rows.append(f"<tr>{''.join(line)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in headings())
    totals = html.escape("\n".join(heading_lines(report)))
    return f"<pre>{totals}</pre><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def plot(report: Any, path: str) -> None:
    """Two flame graphs below each other: FLOPs of products, and bytes that reverse mode keeps."""
    flops: Cells = defaultdict(lambda: defaultdict(float))
    for op in report.operations:
        if op.flops:
            flops[_parts(op.scope or f"{op.function} {op.line}")][_precision(op.inputs)] += op.flops
    kept: Cells = defaultdict(lambda: defaultdict(float))
    for residual in report.residuals:
        kept[_parts(_scope(residual))][_precision([residual.dtype])] += residual.bytes
    panels = [("FLOPs of products, forward", "FLOP", flops), ("bytes kept for the backward pass", "B", kept)]
    panels = [panel for panel in panels if panel[2]] or panels[:1]
    depths = [min(max(map(len, cells), default=1), _DEEPEST) for _, _, cells in panels]
    figure = new_figure(11, 1.2 + sum(0.9 + 0.42 * depth for depth in depths))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[depth + 1 for depth in depths])
    for axes, (title, unit, cells), depth in zip(all_axes[:, 0], panels, depths, strict=True):
        total = sum(sum(sizes.values()) for sizes in cells.values())
        axes.set_title(f"{title}: {amount(total)}{unit}", loc="left", fontsize=10)
        axes.set_xlim(0, 1)
        axes.set_ylim(depth + 0.02, -0.02)
        axes.set_axis_off()
        for left, width, level, name, shares in _boxes(dict(cells), 0.0, 1.0, 0, max(total, 1e-30)):
            _draw(axes, left, width, level, name, shares)
    figure.suptitle(heading_lines(report)[0], fontsize=11)
    used = {p for _, _, cells in panels for sizes in cells.values() for p in sizes}
    handles = [_patch(0, 0, 1, 1, _COLORS[name], label=name) for name in _COLORS if name in used]
    if handles:
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=8, frameon=False)
    save(figure, path)


def _boxes(
    cells: dict[tuple[str, ...], dict[str, float]], left: float, right: float, level: int, total: float
) -> Iterator[tuple[float, float, int, str, dict[str, float]]]:
    """The boxes of a flame graph: each scope as wide as what is in it, below the scope that it is in."""
    children: dict[str, Cells] = defaultdict(dict)
    for parts, sizes in cells.items():
        if parts:
            children[parts[0]][parts[1:]] = sizes
    for name, inner in sorted(children.items(), key=lambda item: -_total(item[1].values())):
        width = _total(inner.values()) / total
        shares: dict[str, float] = defaultdict(float)
        for sizes in inner.values():
            for precision, size in sizes.items():
                shares[precision] += size
        yield left, width, level, name, dict(shares)
        if level + 1 < _DEEPEST:
            yield from _boxes(inner, left, left + width, level + 1, total)
        left += width


def _total(sizes: Iterable[dict[str, float]]) -> float:
    return sum(sum(size.values()) for size in sizes)


def _draw(axes: Any, left: float, width: float, level: int, name: str, shares: dict[str, float]) -> None:
    start, total = left, sum(shares.values())
    for precision in _COLORS:
        part = width * shares.get(precision, 0) / total if total else 0
        if part:
            axes.add_patch(_patch(start, level, part, 0.94, _COLORS[precision], edgecolor="none"))
            start += part
    axes.add_patch(_patch(left, level, width, 0.94, "none", edgecolor="white", linewidth=1.2))
    letters = int(width * 150)
    if letters >= 3:
        text = name if len(name) <= letters else f"{name[: letters - 1]}…"
        axes.text(left + width / 2, level + 0.47, text, ha="center", va="center", fontsize=7, color="white")


def _patch(x: float, y: float, width: float, height: float, color: str, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, **options)


def _parts(scope: str) -> tuple[str, ...]:
    return tuple(scope.split("/")) if "/" in scope and ".py:" not in scope else (scope,)


def _scope(residual: Residual) -> str:
    """The scope, or function, at the end of where a residual comes from."""
    found = re.search(r"\(([^()]*(?:\(\))?[^()]*)\)$", residual.where)
    return found[1] if found else residual.where


def _precision(dtypes: Iterable[str]) -> str:
    names = {dtype for dtype in dtypes if "float" in dtype}
    if not names:
        return "other"
    if any(name.startswith("float8") for name in names):
        return "float8"
    return "half" if names <= {"float16", "bfloat16"} else "float32"
