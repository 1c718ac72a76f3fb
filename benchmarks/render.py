"""Make the README's tables and chart, and `docs/benchmarks.md`, out of the files in `benchmarks/results`.

python -m benchmarks.render
"""

import argparse
import json
import re
from pathlib import Path
from statistics import stdev
from typing import Any

from benchmarks import render_precision
from benchmarks.goals import Goal, goals
from benchmarks.render_precision import cells
from benchmarks.run import COLUMNS, RESULTS

ROOT = Path(__file__).parents[1]
SHOWN = {  # The README's columns. The page has all candidates.
    "float32": "float32",
    "float32, TF32": "TF32",
    "hand-written bfloat16": "hand-written bfloat16",
    "jamp O1 bfloat16": "jamp O1 bfloat16",
    "jamp O2 bfloat16": "jamp O2 bfloat16",
    "jamp O2 float16": "jamp O2 float16",
    "jmp bfloat16": "jmp bfloat16",
    "torch.autocast bfloat16": "torch bfloat16",
}
NOT_MEASURED = "GPU, not measured yet"


def load(folder: Path) -> list[dict[str, Any]]:
    """Returns what is stored for every device, GPUs first."""
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    stored = [one for one in stored if "suites" in one]
    return sorted(stored, key=lambda one: platform(one) == "cpu")


def platform(stored: dict[str, Any]) -> str:
    """Returns "gpu" or "cpu"."""
    return next(iter(stored["suites"].values()))["environment"]["platform"]


def summary(stored: list[dict[str, Any]]) -> str:
    """Returns the README's table: how many times as fast as float32, and the peak memory, of each candidate."""
    lines = [cells("device", "model", *SHOWN.values()), cells(*[":--"] * (2 + len(SHOWN)))]
    if not any(platform(one) == "gpu" for one in stored):
        lines.append(cells(NOT_MEASURED, *[""] * (1 + len(SHOWN))))
    for one in stored:
        rows = one["suites"].get("peers", {}).get("rows", [])
        for workload in dict.fromkeys(row["workload"] for row in rows):
            found = {row["candidate"]: row for row in rows if row["workload"] == workload}
            lines.append(cells(one["device"], workload, *(_speed_and_memory(found.get(name)) for name in SHOWN)))
    return "\n".join(lines)


def _speed_and_memory(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    memory = f", {row['peak_bytes'] / 1e6:.1f} MB" if row["peak_bytes"] else ""
    return f"{row['speed']:.2f}{memory}"


def page(stored: list[dict[str, Any]], others: dict[str, dict[str, Any]]) -> str:
    """Returns `docs/benchmarks.md`: precision, all rows of all suites of all devices, goals, accuracy, and scaling."""
    parts = ["# Benchmarks\n\nMade by `python -m benchmarks.render` out of the files in `benchmarks/results`."]
    if "precision" in others:
        parts.append(render_precision.by_model(others["precision"]))
    for one in stored:
        for name, suite in one["suites"].items():
            versions = ", ".join(f"{key} {value}" for key, value in suite["environment"]["versions"].items())
            parts.append(f"## {one['device']}: {name}\n\nPython {suite['environment']['python']}, {versions}.")
            parts.append(_full_table(suite["rows"]))
            if found := goals(suite["rows"]):
                parts.append(_goals(found, platform(one)))
    if "accuracy" in others:
        parts.append(_accuracy(others["accuracy"]))
    if "scaling" in others:
        parts.append(_scaling(others["scaling"]))
    return "\n\n".join(parts) + "\n"


def _full_table(rows: list[dict[str, Any]]) -> str:
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = [cells("model", "sizes", "candidate", *(COLUMNS[key][0] for key in keys))]
    lines.append(cells(":--", ":--", ":--", *["--:"] * len(keys)))
    for row in rows:
        values = ("" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in keys)
        lines.append(cells(row["workload"], row["sizes"], row["candidate"], *values))
    return "\n".join(lines)


def _goals(found: list[Goal], device: str) -> str:
    if device == "cpu":
        return "\n".join(["Where this CPU stands with the goals for a GPU:", "", *(f"* {goal}" for goal in found)])
    return "\n".join(["Goals:", "", *(f"* {'reached' if goal.passed else '**missed**'}: {goal}" for goal in found)])


def _accuracy(stored: dict[str, Any]) -> str:
    settings, rows = stored["settings"], stored["rows"]
    spread = {row["task"]: stdev(row["values"]) for row in rows if row["policy"] == "O0"}
    text = (
        f"## Accuracy\n\nMeans over {settings['seeds']} seeds (`python -m benchmarks.accuracy`, jax {stored['jax']}): "
        f"test accuracy of the digits after {settings['epochs']} epochs, held-out loss in nats per byte of the "
        f"language models of width {settings['size']} after {settings['steps']} steps. The difference is that from the "
        "float32 run of the same seed, with its standard deviation; beside it the standard deviation of float32 itself "
        "from seed to seed."
    )
    lines = [cells("task", "policy", "mean", "difference from float32", "float32's own deviation")]
    lines.append(cells(":--", ":--", "--:", "--:", "--:"))
    for row in rows:
        difference = f"{row['difference']:+.4f} ± {row['deviation']:.4f}" if row["policy"] != "O0" else ""
        texts = (row["task"], row["policy"], f"{row['mean']:.4f}", difference, f"{spread[row['task']]:.4f}")
        lines.append(cells(*texts))
    return text + "\n\n" + "\n".join(lines)


def _scaling(stored: dict[str, Any]) -> str:
    text = (
        "## The cost of loss scaling\n\nMilliseconds a train step with float32 weights and Adam, and what unscaling, "
        f"checking and skipping add (`python -m benchmarks.scaling`, {stored['device']}, jax {stored['jax']}). It is "
        "proportional to the weights, a step to weights times batch. Without the conditional, `loss_scaled` as a link "
        "of a chain, it is the check alone: one read of the gradients. With it, updates are written and read once more."
    )
    lines = [cells("way", *stored["step_ms"], "passes over the gradients before the optimizer")]
    lines.append(cells(":--", *["--:"] * (len(stored["step_ms"]) + 1)))
    base, *_ = ways = list(next(iter(stored["step_ms"].values())))
    for way in ways:
        texts = [f"{ms[way]:.1f} ({100 * (ms[way] / ms[base] - 1):+.1f} %)" for ms in stored["step_ms"].values()]
        passes = stored["memory_passes"].get(way)
        lines.append(cells(way, *texts, "" if passes is None else f"{passes:.1f}"))
    return text + "\n\n" + "\n".join(lines)


def chart(stored: list[dict[str, Any]], path: Path) -> None:
    """Draws a panel a device: bars of how many times as fast as float32 each candidate is, by model."""
    import matplotlib

    matplotlib.use("Agg")  # A picture for a file needs no display.
    import matplotlib.pyplot as plt

    measured = [one for one in stored if one["suites"].get("peers")]
    if not measured:
        return
    figure, axes = plt.subplots(len(measured), 1, figsize=(10, 4 * len(measured)), squeeze=False)
    for axis, one in zip(axes[:, 0], measured, strict=True):
        rows = {
            (row["workload"], row["candidate"]): row["speed"] for row in one["suites"]["peers"]["rows"] if row["speed"]
        }
        workloads = list(dict.fromkeys(workload for workload, _ in rows))
        names = [name for name in SHOWN if any((workload, name) in rows for workload in workloads)]
        for i, name in enumerate(names):
            places = [place + (i - len(names) / 2) * 0.8 / len(names) for place in range(len(workloads))]
            speeds = [rows.get((workload, name), 0) for workload in workloads]
            axis.bar(places, speeds, 0.8 / len(names), align="edge", label=SHOWN[name])
        axis.axhline(1, color="0.5", linewidth=0.8)
        axis.set_xticks(range(len(workloads)), workloads)
        axis.set(title=one["device"], ylabel="speed, float32 = 1")
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def insert(text: str, name: str, content: str) -> str:
    """Replaces what stands between the markers `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"Expected the markers <!-- {name} --> and <!-- /{name} --> in the README.")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def main(argv: list[str] | None = None) -> None:
    """Writes the tables, the page and the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs")
    args = parser.parse_args(argv)
    stored = load(args.results)
    paths = {name: args.results / f"{name}.json" for name in ("precision", "accuracy", "scaling")}
    others = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    readme = args.root / "README.md"
    text = insert(readme.read_text(), "benchmark-table", summary(stored))
    if "precision" in others:
        text = insert(text, "precision-table", render_precision.by_library(others["precision"]))
    readme.write_text(text)
    (args.root / "docs" / "benchmarks.md").write_text(page(stored, others))
    chart(stored, args.root / "docs" / "images" / "benchmarks.png")


if __name__ == "__main__":
    main()
