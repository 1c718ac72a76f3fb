"""What is kept of a run: the numbers that the tables and goals are made of, without the lists of single operations."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Summary = dict[str, Any]

EXACT = ("half_forward", "half_backward", "copied_bytes", "casts", "shared_casts", "temp_bytes", "error")
ROUNDED = ("gradient_error", "step_seconds", "trace_seconds", "later_trace_seconds")
DIGITS = 6
SLACK = 0.01  # By how much a gradient error may grow from run to run: the compiler orders sums as it likes.


def summarize(everything: dict[str, Any]) -> Summary:
    """Returns the summary of what `--json` writes."""
    return {
        **everything,
        "models": {
            model: {candidate: _numbers(measured) for candidate, measured in row.items()}
            for model, row in everything["models"].items()
        },
        "depths": _rounded(everything["depths"]),
    }


def _numbers(measured: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: measured[key] for key in EXACT} | {key: _rounded(measured.get(key)) for key in ROUNDED}
    kept = measured["residual_bytes"]
    numbers["kept_bytes"] = None if kept is None else sum(kept.values())
    return {key: value for key, value in numbers.items() if value is not None}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(path: Path, summary: Summary) -> None:
    """Writes a summary, with a line for each model and candidate."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(summary, depth=3) + "\n")


def _text(value: Any, depth: int, indent: str = "") -> str:
    """JSON whose outer objects, down to a depth, have a line for each entry."""
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    entries = (f"{inner}{json.dumps(str(key))}: {_text(entry, depth - 1, inner)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def regressions(now: Summary, before: Summary) -> Iterator[str]:
    """Yields where jamp does worse than in a stored run: half FLOPs, bytes kept, or the error of a gradient."""
    for model, row in now["models"].items():
        ours, stored = row.get("jamp", {}), before["models"].get(model, {}).get("jamp", {})
        if "error" in ours and "error" not in stored:
            yield f"{model} fails: {ours['error']}"
        for key in ours.keys() & stored.keys() - {"error"}:
            if _worse(key, ours[key], stored[key]):
                yield f"{model}: {key} {ours[key]:.6g}, stored {stored[key]:.6g}"


def _worse(key: str, now: float, before: float) -> bool:
    match key:
        case "half_forward" | "half_backward":
            return now < before
        case "kept_bytes":
            return now > before
        case "gradient_error":
            return now > before * (1 + SLACK)
    return False
