"""Tables and the chart of what the step-time benchmark measured, for the README and `docs/benchmarks.md`."""

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.goals import Goal
from benchmarks.steptime.goals import BY_HAND, OURS, step_time_goals
from benchmarks.steptime.rows import columns, texts
from benchmarks.tables import markdown

SHOWN = {  # The README's columns. The page has all candidates.
    "float32": "float32",
    "float32, TF32": "TF32",
    "hand-written bfloat16": "hand-written bfloat16",
    "jamp O1 bfloat16": "jamp O1 bfloat16",
    "jamp O2 bfloat16": "jamp O2 bfloat16",
    f"{OURS}, attention=fused": "jamp O2 bfloat16, attention=fused",
    "jamp O2 float16": "jamp O2 float16",
    "jmp bfloat16": "jmp bfloat16",
    "torch.autocast bfloat16": "torch bfloat16",
}


def load(folder: Path) -> list[dict[str, Any]]:
    """Returns what is stored for every device, GPUs first."""
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    stored = [one for one in stored if "suites" in one]
    return sorted(stored, key=lambda one: platform(one) == "cpu")


def platform(stored: dict[str, Any]) -> str:
    """Returns "gpu" or "cpu"."""
    return next(iter(stored["suites"].values()))["environment"]["platform"]


def speeds(stored: list[dict[str, Any]]) -> str:
    """Returns the README's table: how many times as fast as float32, and the peak memory, of what was measured."""
    rows = [(one["device"], row) for one in stored for row in one["suites"].get("peers", {}).get("rows", [])]
    shown = {name: title for name, title in SHOWN.items() if any(row["candidate"] == name for _, row in rows)}
    lines = []
    for device, workload in dict.fromkeys((device, row["workload"]) for device, row in rows):
        found = {row["candidate"]: row for d, row in rows if (d, row["workload"]) == (device, workload)}
        lines.append((device, workload, *(_speed_and_memory(found.get(name)) for name in shown)))
    return markdown(("device", "model", *shown.values()), lines, align=":--")


def _speed_and_memory(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    memory = f", {_bytes(row['peak_bytes'])}" if row["peak_bytes"] else ""
    speed = f"{row['speed']:.2f}" if row["speed"] else f"{1e3 * row['seconds']:.1f} ms"  # Without float32 beside it.
    return speed + memory


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def suites(stored: dict[str, Any]) -> Iterator[str]:
    """Yields the sections of one device for `docs/benchmarks.md`: all rows of all suites, and the goals."""
    for name, suite in stored["suites"].items():
        versions = ", ".join(f"{key} {value}" for key, value in suite["environment"]["versions"].items())
        yield f"## {stored['device']}: {name}\n\nPython {suite['environment']['python']}, {versions}."
        yield markdown(columns(suite["rows"]), texts(suite["rows"]), names=3)
        if found := step_time_goals(suite["rows"]):
            yield _goals(found, platform(stored))


def _goals(found: list[Goal], device: str) -> str:
    if device == "cpu":
        return "\n".join(["Where this CPU stands with the goals for a GPU:", "", *(f"* {goal}" for goal in found)])
    return "\n".join(["Goals:", "", *(f"* {'reached' if goal.passed else '**missed**'}: {goal}" for goal in found)])


def chart(stored: list[dict[str, Any]], path: Path) -> None:
    """Draws a panel a device: bars of how many times as fast as hand-written bfloat16 each candidate is, by model."""
    import matplotlib

    matplotlib.use("Agg")  # A picture for a file needs no display.
    import matplotlib.pyplot as plt

    measured = [one for one in stored if one["suites"].get("peers")]
    if not measured:
        return
    figure, axes = plt.subplots(len(measured), 1, figsize=(10, 4 * len(measured)), squeeze=False)
    for axis, one in zip(axes[:, 0], measured, strict=True):
        rows = {(row["workload"], row["candidate"]): row["seconds"] for row in one["suites"]["peers"]["rows"]}
        workloads = [workload for workload, name in rows if name == BY_HAND]
        names = [name for name in SHOWN if any((workload, name) in rows for workload in workloads)]
        for i, name in enumerate(names):
            places = [place + (i - len(names) / 2) * 0.8 / len(names) for place in range(len(workloads))]
            speeds = [rows[workload, BY_HAND] / rows.get((workload, name), inf) for workload in workloads]
            color = f"C{list(SHOWN).index(name)}"
            axis.bar(places, speeds, 0.8 / len(names), align="edge", label=SHOWN[name], color=color)
        axis.axhline(1, color="0.5", linewidth=0.8)
        axis.set_xticks(range(len(workloads)), workloads)
        axis.set(title=one["device"], ylabel="speed, hand-written bfloat16 = 1")
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
