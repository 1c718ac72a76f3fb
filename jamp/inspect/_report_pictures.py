"""A report as a page of HTML, and as a picture: where FLOPs and kept bytes are, by scope and precision."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jamp.inspect._names import shortened
from jamp.inspect._picture import new_figure, save
from jamp.inspect._residuals import Residual
from jamp.inspect._table import amount, heading_lines, headings, scopes

_COLORS = {"half": "#4477aa", "float32": "#ee7733", "float8": "#228833", "other": "#bbbbbb"}
_DEEPEST = 8
_FEWEST_LETTERS = 5  # Of a name; for fewer there is none.
_NARROWEST = 1 / 100  # Of the picture: that is room for a letter.

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
    none_kept = f"none, {report.no_gradient.partition(': ')[0]}" if report.gradient is None else "none"
    panels = [
        ("FLOPs of products, forward", "FLOP", flops, "no matrix product or convolution"),
        ("bytes kept for the backward pass", "B", kept, none_kept),
    ]
    depths = [min(max(map(len, cells), default=0), _DEEPEST) for _, _, cells, _ in panels]
    heights = [0.9 + 0.42 * depth if depth else 0.3 for depth in depths]
    figure = new_figure(11, 1.2 + sum(heights))
    all_axes = figure.subplots(
        len(panels), 1, squeeze=False, height_ratios=[depth + 1 if depth else 0.3 for depth in depths]
    )
    for axes, (title, unit, cells, why_none), depth in zip(all_axes[:, 0], panels, depths, strict=True):
        total = sum(sum(sizes.values()) for sizes in cells.values())
        size = f"{amount(total)}{unit}" if total else why_none
        axes.set_title(f"{title}: {size}", loc="left", fontsize=10)
        axes.set_xlim(0, 1)
        axes.set_ylim(depth + 0.02, -0.02)
        axes.set_axis_off()
        for box in _boxes(dict(cells), 0.0, 0, max(total, 1e-30)):
            _draw(axes, box)
    figure.suptitle(heading_lines(report)[0], fontsize=11)
    used = {p for _, _, cells, _ in panels for sizes in cells.values() for p in sizes}
    handles = [_patch(0, 0, 1, 1, _COLORS[name], label=name) for name in _COLORS if name in used]
    if handles:
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=8, frameon=False)
    save(figure, path)


class _Box(NamedTuple):
    """A scope in a flame graph.

    Attributes:
        left: Where it begins, from 0 to 1.
        width: Its part of the whole.
        level: How many scopes it is in.
        label: Its name, as far as there is room.
        shares: What it holds, by precision.
    """

    left: float
    width: float
    level: int
    label: str
    shares: dict[str, float]


def _boxes(cells: dict[tuple[str, ...], dict[str, float]], left: float, level: int, total: float) -> Iterator[_Box]:
    """The boxes of a flame graph: each scope as wide as what is in it, below the scope that it is in."""
    children: dict[str, Cells] = defaultdict(dict)
    for parts, sizes in cells.items():
        if parts:
            children[parts[0]][parts[1:]] = sizes
    children = _wide_enough(children, total)
    widths = {name: _total(inner.values()) / total for name, inner in children.items()}
    named = [name for name in children if _letters(widths[name]) >= _FEWEST_LETTERS]
    for name, inner in sorted(children.items(), key=lambda item: -widths[item[0]]):
        width = widths[name]
        label = shortened(named, _letters(width))[named.index(name)] if name in named else ""
        yield _Box(left, width, level, label, _added(inner.values()))
        if level + 1 < _DEEPEST:
            yield from _boxes(inner, left, level + 1, total)
        left += width


def _letters(width: float) -> int:
    """How many letters there is room for."""
    return int(width * 150)


def _wide_enough(children: dict[str, Cells], total: float) -> dict[str, Cells]:
    """Scopes beside each other, so that each can be seen.

    Those that differ in a number alone are one, as in the table, where they are too narrow for a name. Of others that
    are too narrow to be seen at all the sum is shown.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name in children:
        alike[name if ".py:" in name else re.sub(r"\d+", "*", name)].append(name)
    found: dict[str, Cells] = {}
    for pattern, names in alike.items():
        whole = sum(_total(children[name].values()) for name in names) / total
        if len(names) > 1 and _letters(whole / len(names)) < _FEWEST_LETTERS:
            found[f"{pattern} ({len(names)})"] = _merged(children[name] for name in names)
        else:
            found.update({name: children[name] for name in names})
    hidden = [name for name, inner in found.items() if _total(inner.values()) / total < _NARROWEST]
    if len(hidden) > 1:
        rest = _added(sizes for name in hidden for sizes in found.pop(name).values())
        found[f"{len(hidden)} others"] = {(): rest}
    return found


def _merged(cells: Iterable[Cells]) -> Cells:
    by_parts: dict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
    for each in cells:
        for parts, sizes in each.items():
            by_parts[parts].append(sizes)
    return {parts: _added(sizes) for parts, sizes in by_parts.items()}


def _added(sizes: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sizes by precision, added up."""
    total: dict[str, float] = defaultdict(float)
    for each in sizes:
        for precision, size in each.items():
            total[precision] += size
    return dict(total)


def _total(sizes: Iterable[dict[str, float]]) -> float:
    return sum(_added(sizes).values())


def _draw(axes: Any, box: _Box) -> None:
    start, total = box.left, sum(box.shares.values())
    for precision in _COLORS:
        part = box.width * box.shares.get(precision, 0) / total if total else 0
        if part:
            axes.add_patch(_patch(start, box.level, part, 0.94, _COLORS[precision], edgecolor="none"))
            start += part
    line = min(1.2, 200 * box.width)  # Of the narrowest there is more than the line between them.
    axes.add_patch(_patch(box.left, box.level, box.width, 0.94, "none", edgecolor="white", linewidth=line))
    at = box.left + box.width / 2, box.level + 0.47
    axes.text(*at, box.label, ha="center", va="center", fontsize=7, color="white")


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
