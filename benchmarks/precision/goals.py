"""The bounds that jamp sets itself on the models of the precision benchmark."""

from collections.abc import Callable, Iterable
from statistics import mean

from benchmarks.goals import Goal
from benchmarks.precision.instruments import Measurement

Row = dict[str, Measurement]  # By candidate, what was measured of one model.
Results = dict[str, Row]

# What is float32 on purpose (docs/design/interpreter.md), in % of the FLOPs of a model's products.
KEPT = {
    # Its loop ends by an estimate of the error, which reads every product of the vector field.
    "diffrax/neural_ode": 100.0,
    # The sums of a step's stages: a few float32 values each, which no matrix unit makes faster.
    "diffrax/neural_ode_fixed": 2.2,
}


def baseline(row: Row) -> str:
    """What a model is compared with: its native mixed precision, float32 where there is none."""
    return "native" if "native" in row else "float32"


def ratio(row: Row, key: str, base: str | None = None) -> float | None:
    """A measure of jamp over that of another candidate, by default the baseline; None where either is missing."""
    ours, theirs = (getattr(row[name], key) if name in row else None for name in ("jamp", base or baseline(row)))
    return ours / theirs if ours is not None and theirs else None


def precision_goals(results: Results) -> list[Goal]:
    """Returns the goals with what was measured."""
    native = {name: row for name, row in results.items() if "native" in row}
    others = {name: row for name, row in results.items() if "native" not in row and KEPT.get(name, 0.0) < 100.0}
    full = {
        name: max(100 * (1 - min(row["jamp"].half_forward, row["jamp"].half_backward)) - KEPT.get(name, 0.0), 0.0)
        for name, row in results.items()
        if "jamp" in row and row["jamp"].half_forward is not None
    }
    kept, errors = _ratios(native, "residual_total"), _ratios(native, "gradient_error")
    traces, later = _ratios(results, "trace_seconds"), _ratios(results, "later_trace_seconds")
    scanned = {name: value for name, value in traces.items() if "scanned" in name}
    failed = {name: 1.0 for name, row in results.items() if "jamp" in row and row["jamp"].error}
    return [
        Goal("models that fail", float(len(failed)), 0.0, ", ".join(failed)),
        _bound("FLOPs in full precision but not on purpose, largest share in %", max, full, 0.0),
        _bound("residual bytes over native, largest", max, kept, 1.0),
        _bound("residual bytes over native, mean", mean, kept, 0.6),
        _bound("the same without copies of weights, mean", mean, _ratios(native, "activation_total"), 0.6),
        _bound("residual bytes over float32 where no native, mean", mean, _ratios(others, "residual_total"), 0.55),
        _bound("gradient error over native, mean", mean, errors, 1.05),
        _bound("gradient error over native, largest", max, errors, 1.15),
        _bound("first trace over base, mean", mean, traces, 1.1),
        _bound("first trace over base, largest", max, traces, 1.25),
        _bound("first trace over base, largest of scanned layers", max, scanned, 1.05),
        _bound("later traces over base, mean", mean, later, 1.3),
        _bound("later traces over base, largest", max, later, 1.75),
    ]


def _ratios(results: Results, key: str) -> dict[str, float]:
    found = {name: ratio(row, key) for name, row in results.items()}
    return {name: value for name, value in found.items() if value is not None}


def _bound(name: str, over: Callable[[Iterable[float]], float], values: dict[str, float], limit: float) -> Goal:
    if not values:
        return Goal(name, None, limit)
    worst = max(values, key=lambda model: values[model])
    return Goal(name, over(values.values()), limit, f"{worst} {values[worst]:.2f}")
