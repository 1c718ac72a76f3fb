"""`ErrorSources` as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jamp.inspect._target import heading

# What has no finite number to compare with.
NOT_IN_FLOAT32 = (
    "NaN or infinite in float32 too: jamp.first_nonfinite(fn, *args, policy='O0') tells from where, and of a gradient "
    "that of jax.grad(fn)"
)
_LARGEST = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDEST = 24
_BORDER = "arguments and results"
_ROW = "{:>6} {:>9} {:>9}  {:<22} {:<18} {}"


def table(found: Any) -> str:
    """The whole of it as text."""
    lines = [f"error at {heading(found.policy, found.inner)}", *_totals(found), ""]
    lines.append(_ROW.format("share", "value", "gradient", "operation", "rule", "where"))
    moving = [op for op in found.operations if op.share > 0]
    shown = moving[:_LARGEST]
    for op in shown:
        where = " ".join(filter(None, [op.scope, _line(op), _by_iteration(op.iterations)]))
        cells = f"{100 * op.share:.1f} %", number(op.value), "" if op.gradient is None else number(op.gradient)
        lines.append(_ROW.format(*cells, op.operation, op.rule, where))
    if rest := moving[_LARGEST:]:
        lines.append(f"and {len(rest)} operations more, with {100 * sum(op.share for op in rest):.1f} % in total")
    if still := len(found.operations) - len(moving):
        lines.append(f"not shown: {still} operations that round, and move neither results nor gradient")
    entries = list(dict.fromkeys(op.entry for op in shown[:3] if op.entry))
    if entries:
        lines += ["", f"to take the dearest out: {_ruled_policy(found)}.with_rules(full={entries})"]
    if changes := instead(shown[:3]):
        lines += ["", "no rule takes these out; write instead", *(f"  {line}" for line in changes)]
    return "\n".join(line.rstrip() for line in lines)


def instead(operations: Sequence[Any]) -> list[str]:
    """What to write where no rule takes an operation out, once for each place."""
    return list(dict.fromkeys(f"{place_of(op)}: {op.instead}" for op in operations if op.instead and op.share))


def place_of(op: Any) -> str:
    """Scope, or else line; what comes from no line is a cast of jamp's at the border of the function."""
    return op.scope or (op.line if op.line != "?" else _BORDER)


def _line(op: Any) -> str:
    return f"{op.line} ({op.function})" if op.line != "?" else "" if op.scope else _BORDER


def _ruled_policy(found: Any) -> str:
    return "policy" if found.policy is not None or not found.inner else "policy of the cast_fn inside"


def _totals(found: Any) -> list[str]:
    lines = [f"  results   {number(found.value_error)} measured, {number(found.value_predicted)} predicted"]
    if found.gradient_error is None:
        lines.append(f"  gradient  none: {found.no_gradient}")
    else:
        predicted = number(found.gradient_predicted)
        lines.append(f"  gradient  {number(found.gradient_error)} measured, {predicted} predicted")
    if any(math.isnan(error) for error in (found.value_error, found.gradient_error or 0.0)):
        lines.append(f"  {NOT_IN_FLOAT32}")
    return lines


def number(value: float) -> str:
    """A relative error with two digits."""
    return "0" if value == 0 else f"{value:.1e}"


def _by_iteration(errors: Sequence[float]) -> str:
    """The error of each iteration as a bar, or that of the worst of a few; and which is the worst of all."""
    largest = np.finfo(np.float64).max
    sizes = np.nan_to_num(np.abs(errors), nan=largest, posinf=largest)
    if not sizes.any():
        return ""
    parts = [part.max() for part in np.array_split(sizes, min(len(sizes), _WIDEST))]
    bars = "".join(_BLOCKS[int(7 * (part / sizes.max()))] for part in parts)
    return f"{bars} most in iteration {sizes.argmax()} of {len(sizes)}"
