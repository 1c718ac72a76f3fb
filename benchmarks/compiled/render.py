"""Table and chart of what was compiled, for the terminal and `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.goals import Goal
from benchmarks.tables import BREAK, markdown, number, print_table

FLOAT32, BY_HAND, OURS, FUSED = "float32", "hand-written bfloat16", "jamp O2", "jamp O2, attention fused"
# Of each number, what it is called and what it is divided by to be printed.
MEASURES = {"peak_bytes": ("peak GB", 1e9), "moved_bytes": ("moved GB", 1e9), "cycles": ("estimated Mcycles", 1e6)}
Rows = dict[str, dict[str, int]]  # By candidate, what was measured of one model.


def lines(stored: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each device, model and candidate: each number, and how many times that of hand-written code."""
    for device in stored["devices"].values():
        for model, rows in device["models"].items():
            for candidate, row in rows.items():
                texts = []
                for key, (_, unit) in MEASURES.items():
                    value, base = row.get(key), rows.get(BY_HAND, {}).get(key)
                    texts += [number(value, 1 / unit), number(value / base if value and base else None)]
                yield (device["name"], model, candidate, *texts)
            yield BREAK


def headings() -> tuple[str, ...]:
    """Returns the headings of `lines`."""
    return (
        "device",
        "model",
        "candidate",
        *(text for name, _ in MEASURES.values() for text in (name, "of hand-written")),
    )


def show(stored: dict[str, Any]) -> None:
    """Prints the table."""
    print_table("Compiled train steps", headings(), lines(stored), names=3)


def goals(stored: dict[str, Any]) -> list[Goal]:
    """Returns the goals: jamp at O2 takes at most what code in bfloat16 written by hand takes."""
    found = []
    for device in stored["devices"].values():
        for key, (name, _) in MEASURES.items():
            ratios = {model: _ratio(rows, key) for model, rows in device["models"].items()}
            known = {model: value for model, value in ratios.items() if value is not None}
            if known:
                worst = max(known, key=lambda model: known[model])
                found.append(Goal(f"{device['name']}: {name} of hand-written, largest", known[worst], 1.0, worst))
    return found


def _ratio(rows: Rows, key: str) -> float | None:
    ours, base = (rows.get(name, {}).get(key) for name in (OURS, BY_HAND))
    return ours / base if ours and base else None


def section(stored: dict[str, Any]) -> str:
    """Returns the section of `docs/benchmarks.md`."""
    versions = ", ".join(f"{device['name']}: jax {device['jax']}" for device in stored["devices"].values())
    text = (
        "## Compiled for an H100 and a TPU\n\nTrain steps compiled by XLA's own compilers on a machine without these "
        f"devices (`python -m benchmarks.compiled`; {versions}). **Nothing ran**: there are no times here. Peak memory "
        "is what the compiler reserves, bytes are what its kernels read and write of the device's memory, and cycles "
        "are what XLA:TPU expects its kernels to take one after the other, loops as often as they go round.\n\n"
        "![Peak memory, bytes and cycles beside hand-written bfloat16](images/compiled.png)"
    )
    table = markdown(headings(), [line for line in lines(stored) if line], names=3)
    reached = (f"* {'reached' if goal.passed else '**missed**'}: {goal}; {goal.worst}" for goal in goals(stored))
    return "\n\n".join([text, table, "\n".join(["Goals of jamp O2:", "", *reached])])


def chart(stored: dict[str, Any], path: Path) -> None:
    """Draws a panel for each device and measure: bars beside hand-written bfloat16, by model."""
    import matplotlib

    matplotlib.use("Agg")  # A picture for a file needs no display.
    import matplotlib.pyplot as plt

    panels = [
        (device, key)
        for device in stored["devices"].values()
        for key in MEASURES
        if any(row.get(key) for rows in device["models"].values() for row in rows.values())
    ]
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 2.6 * len(panels)), squeeze=False)
    for axis, (device, key) in zip(axes[:, 0], panels, strict=True):
        models = list(device["models"])
        names = [name for name in next(iter(device["models"].values())) if name != BY_HAND]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            values = []
            for rows in device["models"].values():
                value, base = rows.get(name, {}).get(key), rows.get(BY_HAND, {}).get(key)
                values.append(value / base if value and base else 0)
            places = [place + (i - len(names) / 2) * width for place in range(len(models))]
            axis.bar(places, values, width, align="edge", label=name)
        axis.axhline(1, color="0.5", linewidth=0.8)
        axis.set_xticks(range(len(models)), models)
        axis.set(title=f"{device['name']}: {MEASURES[key][0]}", ylabel="hand-written = 1")
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
