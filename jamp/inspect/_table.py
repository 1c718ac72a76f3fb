"""A report as text: totals first, then the operations by scope, in a hundred columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jamp._dtypes import FLOAT32
from jamp.inspect._attentions import offers, summaries
from jamp.inspect._endings import IN_HALF, KEPT
from jamp.inspect._names import shortened
from jamp.inspect._operations import Operation, summed
from jamp.inspect._residuals import Residual
from jamp.inspect._target import heading

_WIDTHS = (26, 24, 20, 5, 5, 7, 7)  # operation, dtypes, rule, count, casts, FLOPs, bytes: 100 columns with the gaps.
_HEADINGS = ("operation", "dtypes", "rule", "count", "casts", "FLOPs", "bytes")
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_LARGEST = 5
_INDENT = 29  # Of the values of the totals.
_FEWEST_LETTERS = 16  # Of a scope, whatever stands in front of it.
# Of loops that end when floating values say so: the rule, the name of the line, what it tells, and what to write.
_LOOPS = (
    (
        KEPT,
        "loops to convergence",
        "decide in {wide}",
        "`jamp.half_precision` around the body, or half=['*its scope*'], puts it back to half",
    ),
    (
        IN_HALF,
        "loops that decide in {half}",
        "may end late or never",
        "`jamp.full_precision` around the loop, or full=['*its scope*'], ends it as in {wide}",
    ),
)


def table(report: Any) -> str:
    """The whole report as text."""
    hidden = sum(op.count for op in report.operations if _is_noise(op))
    lines = [*heading_lines(report), "", _row(_HEADINGS)]
    found = scopes(report)
    for title, (_, rows) in zip(shortened([scope for scope, _ in found], 100), found, strict=True):
        lines += ["", title, *map(_row, rows)]
    if hidden:
        lines += ["", f"not shown: {hidden} operations that only move data, or touch no floats"]
    return "\n".join(line.rstrip() for line in lines)


def headings() -> tuple[str, ...]:
    """The columns of the table."""
    return _HEADINGS


def heading_lines(report: Any) -> list[str]:
    """The lines in front of the table: the policy, and totals."""
    return [f"precision {_at(report)}", *_totals(report)]


def scopes(report: Any) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The rows of the table under their headings."""
    shown = [op for op in report.operations if not _is_noise(op)]
    return [(scope, [_cells(op) for op in rows]) for scope, rows in _by_scope(shown)]


def _at(report: Any) -> str:
    policies = heading(report.policy, report.inner)
    return policies if report.policy is None else f"at {policies}"


def _words(report: Any) -> tuple[str, str]:
    """What the two precisions are called: half and float32, but of a policy for float64 programs."""
    if report.policy is None or report.policy.pair.wide == FLOAT32:
        return "half", FLOAT32.name
    return short(report.policy.pair.narrow.name), report.policy.pair.wide.name


def _totals(report: Any) -> Iterable[str]:
    half, float32 = _words(report)
    yield _total(f"{half} FLOPs, forward", _share(report.forward))
    if report.gradient is None:
        what, _, error = report.no_gradient.partition(": ")
        yield _total("gradient", f"none: {what}")
        if error:
            yield _total("", error)
    else:
        yield _total(f"{half} FLOPs, with backward", _share(report.gradient))
        sizes = report.residual_bytes
        by_dtype = [f"{short(name)} {amount(size)}B" for name, size in sizes.items()]
        total = sum(sizes.values())
        beside = f"; in {float32} {amount(report.residuals_in_float32)}B" if report.residuals_in_float32 else ""
        yield _total("residuals", f"{amount(total)}B{': ' if sizes else ''}{', '.join(by_dtype)}{beside}")
        yield from (_total("", line) for line in _largest(report.residuals))
    if report.forward.float8:
        passes = [report.forward.float8, *([report.gradient.float8] if report.gradient else [])]
        found = ", with backward ".join(f"{amount(flops)}FLOP" for flops in passes)
        yield _total("of these in float8", f"{found}{'; emulated on this device' if report.float8_emulated else ''}")
    for number, line in enumerate(_not_in_float8(report.operations)):
        yield _total("" if number else "products not in float8", line)
    yield from _compiled(report)
    shared = report.shared_casts
    yield _total("casts", f"{report.casts}{f', and {shared} saved by sharing' if shared else ''}")
    yield _total("opaque, run as traced", ", ".join(report.opaque) or "none")
    for rule, name, told, instead in _LOOPS:
        if loops := [op for op in report.operations if op.rule == rule]:
            where = ", ".join(dict.fromkeys(op.scope or f"{op.line} ({op.function})" for op in loops))
            told = told.format(wide=float32)
            yield _total(name.format(half=half), f"{sum(op.count for op in loops)}, which {told}: {where}")
            yield _total("", instead.format(wide=float32))
    for number, line in enumerate(summaries(report.attentions)):
        yield _total("" if number else "attentions", line)
    for number, line in enumerate(offers(report.fusible)):
        yield _total("" if number else "attentions as written", line)
    if report.unmatched:
        yield _total("rules that match nothing", ", ".join(map(repr, report.unmatched)))


def _not_in_float8(operations: Iterable[Operation]) -> list[str]:
    """A line for each reason why products are not in float8, the most expensive first."""
    alike: dict[str, list[Operation]] = defaultdict(list)
    for op in operations:
        if op.not_float8:
            alike[op.not_float8].append(op)
    found = sorted(alike.items(), key=lambda item: -sum(op.flops for op in item[1]))
    return [f"{sum(op.count for op in ops)}: {reason}" for reason, ops in found]


def _compiled(report: Any) -> Iterable[str]:
    ours, theirs = report.compiled, report.compiled_in_float32
    half, float32 = _words(report)
    if ours is not None:
        for name, what in (("peak", "compiled, peak memory"), ("traffic", "compiled, bytes moved")):
            a, b = getattr(ours, name), getattr(theirs, name)
            if a and b:
                yield _total(what, f"{amount(a)}B; in {float32} {amount(b)}B, of which this is {a / b:.2f}")
        skips = "may be left out by XLA (xla_allow_excess_precision)" if report.skips_roundings else "are all made"
        yield _total(f"roundings to {half}", skips)
    if report.multiplied is not None:
        found, where = report.multiplied, ", ".join(report.multiplied.where[:3])
        yield _total(f"float32 in {found.format}", f"{amount(found.flops)}FLOP: {where}")
        yield _total("", "with_rules(highest=['*its scope*']) multiplies all digits")


def _largest(residuals: Iterable[Residual]) -> list[str]:
    """The values that take the most bytes, those of scopes that differ in a number alone together, as in the table."""
    alike: dict[tuple[str, str, str], list[Residual]] = defaultdict(list)
    for kept in residuals:
        made_by, scope = _maker_and_scope(kept.where)
        size = f"{amount(kept.bytes)}B {short(kept.dtype)}[{', '.join(map(str, kept.shape))}]"
        alike[size, made_by, re.sub(r"\d+", "*", scope)].append(kept)
    largest = sorted(alike.items(), key=lambda item: -sum(kept.bytes for kept in item[1]))[:_LARGEST]
    heads, scopes = [], []
    for (size, made_by, pattern), found in largest:
        own = {_maker_and_scope(kept.where)[1] for kept in found}
        heads.append(f"{len(found)} x {size} {made_by}")
        scopes.append(own.pop() if len(own) == 1 else pattern)
    room = max(100 - _INDENT - max(map(len, heads), default=0) - len(" ()"), _FEWEST_LETTERS)
    cut = shortened(scopes, room)
    return [f"{head} ({scope})" if scope else head for head, scope in zip(heads, cut, strict=True)]


def _maker_and_scope(where: str) -> tuple[str, str]:
    """What made a value, and the scope or function in brackets behind it."""
    made_by, bracket, scope = where.partition(" (")
    return made_by, scope.removesuffix(")") if bracket else ""


def _share(flops: Any) -> str:
    if not flops.total:
        return "no matrix product or convolution"
    return f"{100 * flops.share:.1f} % of {amount(flops.total)}FLOP"


def _total(name: str, value: str) -> str:
    return _cut(f"  {name:<{_INDENT - 2}}{value}", 100)


def _by_scope(operations: list[Operation]) -> list[tuple[str, list[Operation]]]:
    """Operations under headings; numbered scopes that hold the same operations are one, the costly ones come first."""
    alike: dict[Any, list[Operation]] = defaultdict(list)
    for op in operations:
        alike[re.sub(r"\d+", "*", _place(op)), op.primitive, dtypes(op), op.rule].append(op)
    headings: dict[str, list[Operation]] = defaultdict(list)
    for (place, *_), found in alike.items():
        places = {_place(op) for op in found}
        headings[places.pop() if len(places) == 1 else place].append(summed(found))
    rows = [(scope, sorted(found, key=_cost, reverse=True)) for scope, found in headings.items()]
    return sorted(rows, key=lambda row: tuple(map(sum, zip(*map(_cost, row[1]), strict=True))), reverse=True)


def _place(op: Operation) -> str:
    """Heading of an operation: its scope, or the function that it is in where the model names none."""
    if op.line == "?" and not op.scope:
        return "arguments and results"  # Only jamp's own casts at the border of the function come from no line of it.
    return op.scope or f"{op.function} in {op.line.rsplit(':', 1)[0]}"


def _cost(op: Operation) -> tuple[int, int]:
    return op.flops, op.bytes


def _is_noise(op: Operation) -> bool:
    return not op.casts and not op.flops and op.rule in ("follow", "not floating")


def _cells(op: Operation) -> tuple[str, ...]:
    numbers = (str(op.count), str(op.casts or ""), amount(op.flops) if op.flops else "", amount(op.bytes))
    return (op.primitive, dtypes(op), op.rule, *map(str.strip, numbers))


def _row(cells: tuple[str, ...]) -> str:
    padded = [
        f"{_cut(cell, width):<{width}}" if i < 3 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return " ".join(padded)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def dtypes(op: Operation) -> str:
    """`bf16,f32 -> f32`: each dtype once, in short."""
    sides = (",".join(dict.fromkeys(map(short, side))) for side in (op.inputs, op.outputs))
    return " -> ".join(sides)


def short(dtype: str) -> str:
    """`float32` as a jaxpr writes it: `f32`."""
    match = re.fullmatch(r"([a-z]+?)(\d+)", dtype)
    return f"{_SHORT[match[1]]}{match[2]}" if match and match[1] in _SHORT else dtype


def amount(number: float) -> str:
    """A number with three digits and a prefix: `12.6 M`."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
