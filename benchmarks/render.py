"""Make the tables of the README and of `docs`, and the charts, out of the files in `benchmarks/results`.

python -m benchmarks.render
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.compiled import render as compiled
from benchmarks.files import RESULTS, ROOT
from benchmarks.precision import render as precision
from benchmarks.steptime import render as steptime
from benchmarks.studies import render as studies

OTHERS = ("precision", "compiled", "accuracy", "float8-models", "float8-published", "published", "solvers")
OTHERS += ("scaling", "optimizer_states", "device-errors", "attention-forms", "float8-widths")


def page(devices: list[dict[str, Any]], others: dict[str, dict[str, Any]]) -> str:
    """Returns `docs/benchmarks.md`: precision, all rows of all suites of all devices, goals, accuracy, and scaling."""
    parts = ["# Benchmarks\n\nMade by `python -m benchmarks.render` out of the files in `benchmarks/results`."]
    if "precision" in others:
        parts.append(precision.by_model(others["precision"]))
    for one in devices:
        parts += steptime.suites(one)
    if "device-errors" in others:
        parts.append(studies.device_errors(others["device-errors"]))
    if "attention-forms" in others:
        parts.append(studies.attention_forms(others["attention-forms"]))
    if "float8-widths" in others:
        parts.append(studies.float8_widths(others["float8-widths"]))
    if "compiled" in others:
        parts.append(compiled.section(others["compiled"]))
    if "accuracy" in others:
        parts.append(studies.accuracy(others["accuracy"]))
    if "float8-models" in others:
        parts.append(studies.float8(others["float8-models"]))
    if "float8-published" in others:
        parts.append(studies.float8_published(others["float8-published"]))
    if "published" in others:
        parts.append(studies.published(others["published"]))
    if "solvers" in others:
        parts.append(studies.solvers(others["solvers"]))
    if "scaling" in others:
        parts.append(studies.scaling(others["scaling"]))
    return "\n\n".join(parts) + "\n"


def insert(text: str, name: str, content: str) -> str:
    """Replaces what stands between the markers `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"Expected the markers <!-- {name} --> and <!-- /{name} --> on the page.")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def main(argv: list[str] | None = None) -> None:
    """Writes the tables, the page and the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs")
    args = parser.parse_args(argv)
    devices = steptime.load(args.results)
    paths = {name: args.results / f"{name}.json" for name in OTHERS}
    others = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    readme = args.root / "README.md"
    text = insert(readme.read_text(), "benchmark-table", steptime.speeds(devices))
    if "precision" in others:
        text = insert(text, "precision-table", precision.by_library(others["precision"]))
    readme.write_text(text)
    (args.root / "docs" / "benchmarks.md").write_text(page(devices, others))
    steptime.chart(devices, args.root / "docs" / "images" / "benchmarks.png")
    if "optimizer_states" in others:
        training = args.root / "docs" / "training.md"
        table = studies.optimizer_states(others["optimizer_states"])
        training.write_text(insert(training.read_text(), "optimizer-states-table", table))
    if "compiled" in others:
        compiled.chart(others["compiled"], args.root / "docs" / "images" / "compiled.png")


if __name__ == "__main__":
    main()
