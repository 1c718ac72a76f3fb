"""What the precision benchmark prints."""

from collections.abc import Callable, Iterator

from rich.console import Console

from benchmarks.precision.goals import Results, Row, baseline, ratio
from benchmarks.precision.instruments import Measurement
from benchmarks.tables import number, print_table

HEADINGS = (
    "model",
    "half FLOPs %\nnative", "jmp", "mpx", "jamp",
    "residuals MB\nfloat32", "native", "dots saved", "jmp", "jamp", "jamp over\nbase", "without\ncopies",
    "grad error %\nnative", "jmp", "jamp", "jamp over\nnative",
    "first trace s\nbase", "jamp over\nbase", "later trace s\nbase", "jamp over\nbase",
    "casts\nnative", "jamp", "saved by\nsharing",
    "temp MB\nbase", "jamp", "step over\nbase",
)  # fmt: skip


def print_results(results: Results, console: Console) -> None:
    """Prints a row for each model and, below, the errors of the candidates that failed."""
    rows = [(name, *_cells(row)) for name, row in results.items()]
    print_table("Precision by model", HEADINGS, rows, console=console)
    for name, row in results.items():
        for candidate, measurement in row.items():
            if measurement.error:
                console.print(f"[red]{name}, {candidate}:[/] {measurement.error}", highlight=False, markup=True)


def _cells(row: Row) -> Iterator[str]:
    base = baseline(row)
    empty = Measurement()

    def cell(form: Callable[[Measurement], str], *candidates: str) -> list[str]:
        return ["[red]error[/]" if row.get(name, empty).error else form(row.get(name, empty)) for name in candidates]

    yield from cell(_shares, "native", "jmp", "mpx", "jamp")
    yield from cell(lambda m: number(m.residual_total, 1e-6), "float32", "native", "native, dots saved", "jmp", "jamp")
    yield number(ratio(row, "residual_total"))
    yield number(ratio(row, "activation_total"))
    yield from cell(lambda m: number(m.gradient_error, 100), "native", "jmp", "jamp")
    yield number(ratio(row, "gradient_error", "native"))
    for key in ("trace_seconds", "later_trace_seconds"):
        yield from cell(lambda m, key=key: number(getattr(m, key)), base)
        yield number(ratio(row, key))
    yield from cell(lambda m: number(m.casts, digits=0), "native", "jamp")
    yield from cell(lambda m: number(m.shared_casts, digits=0), "jamp")
    yield from cell(lambda m: number(m.temp_bytes, 1e-6), base, "jamp")
    yield number(ratio(row, "step_seconds"))


def _shares(measurement: Measurement) -> str:
    shares = (measurement.half_forward, measurement.half_backward)
    return "/".join(number(share, 100).removesuffix(".00") for share in shares if share is not None)


def print_depths(depths: dict[str, dict[int, dict[str, float]]], console: Console) -> None:
    """Prints trace times by number of blocks."""
    for name, by_depth in depths.items():
        columns = sorted({candidate for seconds in by_depth.values() for candidate in seconds})
        rows = []
        for depth, seconds in by_depth.items():
            each = (seconds[column] / depth if column in seconds else None for column in columns)
            rows.append((str(depth), *(number(value, 1e3) for value in each)))
        print_table(f"Trace time of {name}, ms a block", ("blocks", *columns), rows, names=0, console=console)
