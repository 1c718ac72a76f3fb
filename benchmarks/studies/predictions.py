"""How far first order explains the error of half precision: predicted beside measured, on the models of the zoo.

Run from the root of the repository; models that the file has already are left out, so that it can be run in pieces::

    python -m benchmarks.studies.predictions --models plain equinox
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
from rich.progress import track

import jamp
from benchmarks import zoo
from benchmarks.files import RESULTS, write_json
from benchmarks.models import objective
from benchmarks.tables import number, print_table

FACTOR = 2.0


def predicted(entry: zoo.Entry, policy: str) -> dict[str, Any]:
    """Relative errors of the loss and of its gradient, with respect to weights and data, measured and predicted."""
    model = entry.build(None)
    start = time.perf_counter()
    loss = objective(model, jamp.cast_fn(model.apply, policy))
    try:
        found = jamp.error_sources(loss, model.params, *model.inputs, directions=1)
    except ValueError as error:  # A loop that has no derivative.
        return {"loss": [None, None], "gradient": [None, None], "problem": str(error), "seconds": 0.0}
    return {
        "loss": [found.value_predicted, found.value_error],
        "gradient": [found.gradient_predicted, found.gradient_error],
        "dearest": [f"{op.operation} {op.scope or op.line} {op.rule}" for op in found.operations[:3]],
        "seconds": round(time.perf_counter() - start, 1),
    }


def ratio(pair: list[float | None]) -> float | None:
    """Predicted by measured; None where there is no gradient, or no error."""
    return abs(pair[0] / pair[1]) if pair[0] is not None and pair[1] else None


def within(row: dict[str, Any], target: str) -> bool:
    """Whether a prediction is within the factor of what is measured."""
    found = ratio(row[target])
    return found is not None and 1 / FACTOR <= found <= FACTOR


def main() -> None:
    """Measures what is not measured yet, writes it after each model, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.predictions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="*", default=[""], metavar="NAME", help="beginnings of names; all by default")
    parser.add_argument("--policy", default="O2:bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.json", metavar="FILE")
    options = parser.parse_args()
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = stored.get("models", {})
    wanted = [e for e in zoo.load()[0] if e.name.startswith(tuple(options.models)) and e.name not in rows]
    for entry in track(wanted, description="models"):
        rows[entry.name] = predicted(entry, options.policy)
        write_json(options.out, {"policy": options.policy, "jax": jax.__version__, "models": rows})
    print_results(rows)


def print_results(rows: dict[str, dict[str, Any]]) -> None:
    """Prints a row for each model, and how many are within the factor."""
    lines = [
        (
            name,
            *(text for target in ("loss", "gradient") for text in _texts(row[target])),
            number(row["seconds"], digits=1),
        )
        for name, row in rows.items()
    ]
    counts = {target: sum(within(row, target) for row in rows.values()) for target in ("loss", "gradient")}
    caption = ", ".join(f"{target}: {count} of {len(rows)} within {FACTOR:g}" for target, count in counts.items())
    headings = ("model", "loss predicted", "measured", "ratio", "gradient predicted", "measured", "ratio", "seconds")
    print_table("Predicted and measured errors", headings, lines, caption=caption)


def _texts(pair: list[float | None]) -> list[str]:
    return [*("" if x is None else f"{x:.1e}" for x in pair), number(ratio(pair))]


if __name__ == "__main__":
    main()
