"""`GradientHistogram` as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jamp.inspect._names import shortened

LARGEST = 40  # Leaves that are shown.
_BLOCKS = "▁▂▃▄▅▆▇█"
_ROW = "{:<32} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7}  {}"


def table(found: Any) -> str:
    """The whole of it as text."""
    lines = [
        f"gradients in {found.dtype} at a loss scale of {scale_of(found.loss_scale)}",
        f"  lost      {_share(found.below, found)} become zero, {_share(found.above, found)} infinite; "
        f"{_share(found.short, found)} keep fewer digits",
        f"  best      {_best(found)}",
        "",
    ]
    low, high = range_of(found.exponents)
    title = f"exponents {low} to {high}"
    lines.append(_ROW.format("leaf", "size", "smallest", "largest", "is zero", "below", "short", "above", title))
    shown = found.leaves[:LARGEST]
    for leaf, path in zip(shown, shortened([leaf.path for leaf in shown], 32), strict=True):
        cells = f"{leaf.size:,}", _number(leaf.smallest), _number(leaf.largest), leaf.zeros, leaf.below, leaf.short
        lines.append(_ROW.format(path, *cells, leaf.above, _bars(leaf.exponents, low, high)))
    if len(found.leaves) > LARGEST:
        lines.append(f"and {len(found.leaves) - LARGEST} leaves more")
    if nonfinite := [leaf.path for leaf in found.leaves if leaf.nonfinite]:
        lines += ["", f"not finite already: {', '.join(nonfinite[:5])}"]
    return "\n".join(line.rstrip() for line in lines)


def _best(found: Any) -> str:
    if found.best_scale is None:
        odd = any(leaf.nonfinite for leaf in found.leaves)
        return "any scale: no gradient is finite and not zero" if odd else "any scale: all gradients are zero"
    if found.best_scale == found.loss_scale:
        return "this scale: no other loses fewer digits without an overflow"
    return f"a scale of {scale_of(found.best_scale)} loses the fewest digits without an overflow"


def scale_of(value: float) -> str:
    power = math.log2(value)
    return f"2**{power:.0f} ({value:g})" if power == round(power) and power else f"{value:g}"


def _share(number: int, found: Any) -> str:
    return "none" if not number else f"{number:,} of {found.size:,} ({100 * number / found.size:.2g} %)"


def _number(value: float) -> str:
    return "" if math.isinf(value) else f"{value:.1e}"


def range_of(exponents: Mapping[int, int]) -> tuple[int, int]:
    return (min(exponents), max(exponents)) if exponents else (0, 0)


def _bars(exponents: Mapping[int, int], low: int, high: int) -> str:
    """A bar for each exponent; for each few of them where there are more than forty."""
    width = max(1, math.ceil((high - low + 1) / 40))
    sums = [sum(exponents.get(e, 0) for e in range(start, start + width)) for start in range(low, high + 1, width)]
    most = max(sums, default=0)
    # The square root shows the tails, which are what a scale loses.
    return "".join(" " if not n else _BLOCKS[min(7, int(8 * math.sqrt(n / most)))] for n in sums)
