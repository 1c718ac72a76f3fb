"""Is half precision as accurate as float32? The digits and the language models, at every policy, on several seeds.

    python -m benchmarks.studies.accuracy [--seeds 5] [--steps 150] [--size 32] [--epochs 20]

A seed decides about the initial weights and the order of the data, and all policies share it. So the table gives,
beside each mean, the mean difference from the float32 run of the same seed, and that difference's standard deviation.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.progress import track

from benchmarks.files import RESULTS, ROOT, write_json
from benchmarks.tables import print_table

sys.path.insert(0, str(ROOT / "examples"))

import digits
import language_models


def measurements(args: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """Yields task, policy and result of every run: test accuracy in percent, or held-out loss in nats per byte."""
    data, (text, held_out) = digits.load_data(), language_models.load_text()
    for seed in range(args.seeds):
        for model in digits.MODELS:
            for spec in digits.POLICIES:
                run, _ = digits.train(model, spec, data, args.epochs, seed, lambda: None)
                yield f"digits, {model}: accuracy %", spec, 100 * run.accuracy
                jax.clear_caches()
        for name, model in language_models.MODELS.items():
            for spec in digits.POLICIES:
                _, loss = language_models.train(model(args.size), spec, text, held_out, args.steps, seed, lambda: None)
                yield f"{name}: loss", spec, loss
                jax.clear_caches()


def summarize(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Returns a row for each task and policy: means, and the differences from float32 on the same seeds."""
    rows = []
    for task, by_policy in found.items():
        for spec, values in by_policy.items():
            differences = [value - full for value, full in zip(values, by_policy["O0"], strict=True)]
            spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
            rows.append({"task": task, "policy": spec, "values": values, "mean": statistics.mean(values)})
            rows[-1] |= {"difference": statistics.mean(differences), "deviation": spread}
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    lines = []
    for row in rows:
        difference = f"{row['difference']:+.4f} ± {row['deviation']:.4f}"
        lines.append((row["task"], row["policy"], f"{row['mean']:.4f}", difference))
    print_table("Accuracy against float32", ("task", "policy", "mean", "difference from float32"), lines, names=2)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Trains everything, prints the table and stores it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="of the digits")
    parser.add_argument("--steps", type=int, default=150, help="of the language models")
    parser.add_argument("--size", type=int, default=32, help="width of the language models")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, list[float]]] = {}
    runs = args.seeds * len(digits.POLICIES) * (len(digits.MODELS) + len(language_models.MODELS))
    for task, spec, value in track(measurements(args), "training", total=runs):
        found.setdefault(task, {}).setdefault(spec, []).append(value)
    rows = summarize(found)
    print_rows(rows)
    settings = {key: getattr(args, key) for key in ("seeds", "epochs", "steps", "size")}
    stored = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "settings": settings, "rows": rows}
    write_json(args.out, stored)
    return rows


if __name__ == "__main__":
    main()
