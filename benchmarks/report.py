"""The table of the precision benchmark, and the goals that it is held against."""

from collections.abc import Callable, Iterable
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.goals import Goal
from benchmarks.measure import Measurement

Results = dict[str, dict[str, Measurement]]


def ratio(row: dict[str, Measurement], get: Callable[[Measurement], float | None], base: str) -> float | None:
    """A measure of jamp over that of another candidate; None where either is missing."""
    ours, theirs = (get(row[name]) if name in row else None for name in ("jamp", base))
    return ours / theirs if ours is not None and theirs else None


def residual_total(measurement: Measurement) -> float | None:
    """Bytes kept between the passes."""
    return measurement.residual_total


def activation_total(measurement: Measurement) -> float | None:
    """The same without copies of weights."""
    return measurement.activation_total


def gradient_error(measurement: Measurement) -> float | None:
    """Relative error of the gradient."""
    return measurement.gradient_error


def trace_seconds(measurement: Measurement) -> float | None:
    """Time to trace the gradient."""
    return measurement.trace_seconds


def baseline(row: dict[str, Measurement]) -> str:
    """What a model is compared with: its native mixed precision, float32 where there is none."""
    return "native" if "native" in row else "float32"


def print_table(console: Console, results: Results) -> None:
    """Prints a row for each model and, below, the errors of the candidates that failed."""
    table = Table(title="Precision by model", header_style="bold", row_styles=("", "dim"))
    table.add_column("model", no_wrap=True)
    for heading in (
        "half FLOPs %\nnative",
        "jmp",
        "mpx",
        "jamp",
        "residuals MB\nfloat32",
        "native",
        "dots saved",
        "jmp",
        "jamp",
        "jamp over\nbase",
        "without\ncopies",
        "grad error %\nnative",
        "jmp",
        "jamp",
        "jamp over\nnative",
        "trace s\nbase",
        "jamp over\nbase",
        "casts\nnative",
        "jamp",
        "saved by\nsharing",
        "temp MB\nbase",
        "jamp",
        "step over\nbase",
    ):
        table.add_column(heading, justify="right")
    for name, row in results.items():
        table.add_row(name, *_cells(row))
    console.print(table)
    for name, row in results.items():
        for candidate, measurement in row.items():
            if measurement.error:
                console.print(f"[red]{name}, {candidate}:[/] {measurement.error}", highlight=False, markup=True)


def _cells(row: dict[str, Measurement]) -> Iterable[str]:
    base = baseline(row)
    empty = Measurement()

    def cell(form: Callable[[Measurement], str], *candidates: str) -> list[str]:
        return ["[red]error[/]" if row.get(name, empty).error else form(row.get(name, empty)) for name in candidates]

    yield from cell(_shares, "native", "jmp", "mpx", "jamp")
    yield from cell(lambda m: _number(m.residual_total, 1e-6), "float32", "native", "native, dots saved", "jmp", "jamp")
    yield _number(ratio(row, residual_total, base))
    yield _number(ratio(row, activation_total, base))
    yield from cell(lambda m: _number(m.gradient_error, 100), "native", "jmp", "jamp")
    yield _number(ratio(row, gradient_error, "native"))
    yield from cell(lambda m: _number(m.trace_seconds), base)
    yield _number(ratio(row, trace_seconds, base))
    yield from cell(lambda m: _count(m.casts), "native", "jamp")
    yield from cell(lambda m: _count(m.shared_casts), "jamp")
    yield from cell(lambda m: _number(m.temp_bytes, 1e-6), base, "jamp")
    yield _number(ratio(row, lambda m: m.step_seconds, base))


def _shares(measurement: Measurement) -> str:
    shares = (measurement.half_forward, measurement.half_backward)
    return "/".join(_number(share, 100).removesuffix(".00") for share in shares if share is not None)


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.2f}"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def print_depths(console: Console, depths: dict[str, dict[int, dict[str, float]]]) -> None:
    """Prints trace times by number of blocks."""
    for name, by_depth in depths.items():
        table = Table(title=f"Trace time of {name}, ms a block")
        table.add_column("blocks", justify="right")
        columns = sorted({candidate for seconds in by_depth.values() for candidate in seconds})
        for candidate in columns:
            table.add_column(candidate, justify="right")
        for depth, seconds in by_depth.items():
            cells = [_number(seconds[name] / depth, 1e3) if name in seconds else "" for name in columns]
            table.add_row(str(depth), *cells)
        console.print(table)


def goals(results: Results) -> list[Goal]:
    """The bounds that jamp sets itself."""
    native = {name: row for name, row in results.items() if "native" in row}
    others = {name: row for name, row in results.items() if "native" not in row}
    full = {
        name: 100 * (1 - min(row["jamp"].half_forward, row["jamp"].half_backward))
        for name, row in results.items()
        if "jamp" in row and row["jamp"].half_forward is not None
    }
    residuals = _ratios(native, residual_total)
    errors = _ratios(native, gradient_error)
    traces = _ratios(results, trace_seconds)
    scanned = {name: value for name, value in traces.items() if "scanned" in name}
    failed = {name: 1.0 for name, row in results.items() if "jamp" in row and row["jamp"].error}
    return [
        Goal("models that fail", float(len(failed)), 0.0, ", ".join(failed)),
        _bound("FLOPs in full precision, largest share in %", max, full, 0.0),
        _bound("residual bytes over native, largest", max, residuals, 1.0),
        _bound("residual bytes over native, mean", mean, residuals, 0.6),
        _bound("the same without copies of weights, mean", mean, _ratios(native, activation_total), 0.6),
        _bound("residual bytes over float32 where no native, mean", mean, _ratios(others, residual_total), 0.55),
        _bound("gradient error over native, mean", mean, errors, 1.05),
        _bound("gradient error over native, largest", max, errors, 1.15),
        _bound("trace time over base, mean", mean, traces, 1.3),
        _bound("trace time over base, largest of scanned layers", max, scanned, 1.2),
    ]


def _ratios(results: Results, get: Callable[[Measurement], float | None]) -> dict[str, float]:
    found = {name: ratio(row, get, baseline(row)) for name, row in results.items()}
    return {name: value for name, value in found.items() if value is not None}


def _bound(name: str, over: Callable[[Iterable[float]], float], values: dict[str, float], limit: float) -> Goal:
    if not values:
        return Goal(name, None, limit)
    worst = max(values, key=lambda model: values[model])
    return Goal(name, over(values.values()), limit, f"{worst} {values[worst]:.2f}")


def print_goals(console: Console, reached: list[Goal]) -> None:
    """Prints every bound with PASS or FAIL."""
    table = Table(title="Goals")
    for heading in ("", "goal", "measured", "at most", "worst"):
        table.add_column(heading)
    for goal in reached:
        mark = "-" if goal.value is None else "[green]PASS[/]" if goal.passed else "[red]FAIL[/]"
        table.add_row(mark, goal.name, _number(goal.value), _number(goal.limit), goal.worst)
    console.print(table)
