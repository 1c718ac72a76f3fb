"""Tables of what the precision benchmark measured, for the README and `docs/benchmarks.md`."""

from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

from benchmarks.tables import markdown, number

Row = dict[str, dict[str, Any]]  # By candidate, the summary of what was measured of one model.
_OVER_NATIVE = ("temp_bytes", "gradient_error", "trace_seconds", "later_trace_seconds")


def by_library(stored: dict[str, Any]) -> str:
    """Returns the README's table: means over the models of each library, and over all."""
    heading = (
        "models of", "number", "wholly in half: jmp", "jamp", "memory kept, of float32", "of native",
        "peak memory, of native", "gradient error, of native", "first trace, of native", "later traces",
    )  # fmt: skip
    lines = []
    libraries = list(dict.fromkeys(name.split("/")[0] for name in stored["models"]))
    for library in [*libraries, "all"]:
        rows = [row for name, row in stored["models"].items() if library in ("all", name.split("/")[0])]
        lines.append((library, str(len(rows)), *_means(rows)))
    return markdown(heading, lines)


def _means(rows: list[Row]) -> list[str]:
    native = [row for row in rows if "native" in row]
    return [
        *(str(sum(_half(row[name]) == 1 for row in rows)) for name in ("jmp", "jamp")),
        _mean([_kept(row["jamp"]) / _kept(row["float32"]) for row in rows]),
        _mean([_kept(row["jamp"]) / _kept(row["native"]) for row in native]),
        *(_mean(_over_native(native, key)) for key in _OVER_NATIVE),
    ]


def _over_native(rows: list[Row], key: str) -> list[float]:
    return [row["jamp"][key] / row["native"][key] for row in rows if row.get("native", {}).get(key)]


def by_model(stored: dict[str, Any]) -> str:
    """Returns the section of `docs/benchmarks.md`: each model at float32, in native mixed precision and in jamp's."""
    text = (
        f"## Precision\n\nUnmodified float32 models under `jamp.cast_fn` at {stored['policy']}, beside the mixed "
        "precision of their libraries, which for plain JAX is written by hand (`python -m benchmarks.precision`, "
        f"jax {stored['jax']}). What reverse mode keeps is in MB, the error of the gradient is that from float32. The "
        "peak is that of the temporary memory of the compiled gradient, in MB. " + _of_step_times(stored)
    )
    heading = (
        "model", "matmul FLOPs in half %: native", "jmp", "mpx", "jamp", "kept: float32", "native",
        "native, `dots_saveable`", "jamp", "peak: float32", "native", "jamp", "gradient error %: native", "jmp", "jamp",
        "first trace of native", "later traces", "step time of native", "of float32", "casts: native", "jamp",
        "saved by sharing",
    )  # fmt: skip
    return text + "\n\n" + markdown(heading, ((name, *_numbers(row)) for name, row in stored["models"].items()))


def _numbers(row: Row) -> Iterator[str]:
    def column(
        form: Callable[[dict[str, Any]], float | None], factor: float, digits: int, *names: str
    ) -> Iterator[str]:
        return (number(form(row.get(name, {})), factor, digits) for name in names)

    yield from column(_half, 100, 1, "native", "jmp", "mpx", "jamp")
    yield from column(_kept, 1e-6, 2, "float32", "native", "native, dots saved", "jamp")
    yield from column(lambda measured: measured.get("temp_bytes"), 1e-6, 2, "float32", "native", "jamp")
    yield from column(lambda measured: measured.get("gradient_error"), 100, 2, "native", "jmp", "jamp")
    yield _ratio(row, "trace_seconds", "native")
    yield _ratio(row, "later_trace_seconds", "native")
    yield _ratio(row, "step_seconds", "native")
    yield _ratio(row, "step_seconds", "float32")
    yield from column(lambda measured: measured.get("casts"), 1, 0, "native", "jamp")
    yield from column(lambda measured: measured.get("shared_casts"), 1, 0, "jamp")


def _of_step_times(stored: dict[str, Any]) -> str:
    mean_ratio = _mean(_over_native(list(stored["models"].values()), "step_seconds"))
    if stored["device"] != "cpu":
        return f"A gradient step on the {stored['device']} takes {mean_ratio} of native's time, on the mean."
    return (
        f"On a CPU, where XLA was told to round wherever the program says so, a gradient step takes {mean_ratio} of "
        "native's processor time, on the mean."
    )


def _ratio(row: Row, key: str, base: str) -> str:
    ours, theirs = (row.get(name, {}).get(key) for name in ("jamp", base))
    return number(ours / theirs if ours and theirs else None)


def _half(measured: dict[str, Any]) -> float | None:
    """Share of FLOPs in half, of the pass that has less; 0 where the candidate failed, None where there is none."""
    if not measured:
        return None
    return 0.0 if "error" in measured else min(measured["half_forward"], measured["half_backward"])


def _kept(measured: dict[str, Any]) -> Any:
    return None if "error" in measured else measured.get("kept_bytes")


def _mean(values: list[float]) -> str:
    return f"{mean(values):.2f}" if values else ""
