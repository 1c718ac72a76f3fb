"""The rows of the step-time benchmark as texts, for the terminal and the documentation."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

ORDER = ("SimpleNet", "ResNet-50", "LSTM", "GPT", "GPT, scanned")  # Of the workloads, however they came to be stored.
NAMES = {"workload": "model", "sizes": "sizes", "candidate": "candidate"}
COLUMNS: dict[str, tuple[str, Any]] = {
    "seconds": ("step ms", lambda x: f"{1e3 * x:.3f}"),
    "speed": ("times float32", lambda x: f"{x:.2f}"),
    "peak_bytes": ("peak MB", lambda x: f"{x / 1e6:.1f}"),
    "peak_share": ("matmul peak %", lambda x: f"{100 * x:.0f}"),
    "largest_batch": ("largest batch", str),
    "trace_seconds": ("trace s", lambda x: f"{x:.3f}"),
    "compile_seconds": ("compile s", lambda x: f"{x:.3f}"),
}


def place(row: Row) -> int:
    """Returns where a row's workload stands in tables."""
    return ORDER.index(row["workload"])


def columns(rows: list[Row]) -> list[str]:
    """Returns the headings: those of the names, and of the numbers that any row has."""
    return [*NAMES.values(), *(COLUMNS[key][0] for key in _measured(rows))]


def texts(rows: list[Row]) -> Iterator[list[str]]:
    """Yields the cells of each row."""
    keys = _measured(rows)
    for row in rows:
        numbers = ("" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in keys)
        yield [*(row[name] for name in NAMES), *numbers]


def _measured(rows: list[Row]) -> list[str]:
    return [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
