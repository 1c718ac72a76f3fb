"""Compiles train steps with products in 8 bits for an H100: which operands XLA gives them, memory and traffic.

Run from the root of the repository, where `pip install "jax[cuda12]"` has added XLA's compiler for NVIDIA GPUs::

    python -m benchmarks.studies.float8 --json benchmarks/results/float8-compiled.json

Nothing runs (see `benchmarks.studies.h100`): what a step takes is not known, nor which kernels a run would choose.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.compiled.devices import descriptions  # isort: skip (It sets the environment that JAX is imported in.)

from benchmarks import hlo
from benchmarks.candidates import Candidate, of_jamp
from benchmarks.compiled.measure import compiled
from benchmarks.files import write_json
from benchmarks.steptime.goals import BY_HAND
from benchmarks.studies.h100 import chosen, precisions
from benchmarks.tables import BREAK, number, print_table
from benchmarks.timing import peak_bytes

O2 = "O2:bfloat16"
SETTINGS = ("matmul=float8", "matmul=float8,float8_scales=row", "matmul=float8,weight_grad=half")


def candidates() -> list[Candidate]:
    """Bfloat16 by hand and by jamp, and jamp with products in 8 bits."""
    by_hand = [candidate for candidate in precisions() if candidate.name == BY_HAND]
    return [*by_hand, *(of_jamp(policy, policy) for policy in (O2, *(f"{O2},{setting}" for setting in SETTINGS)))]


def measured(step: Any) -> dict[str, Any]:
    """Peak memory and traffic of a compiled step in bytes, and its products by the dtypes of their operands."""
    text = step.as_text()
    products = dict(sorted(hlo.product_dtypes(text).items()))
    return {"peak_bytes": peak_bytes(step), "traffic_bytes": hlo.traffic(text), "products": products}


def main() -> None:
    """Compiles, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.float8", description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", default=[], help="one of those of `h100`; may be repeated")
    parser.add_argument("--batch", type=int, help="another batch than that of the workload")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    asked = chosen(options.workload or ["GPT", "SimpleNet"], parser.error)
    device = descriptions(["h100"])["h100"]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for workload in asked:
        batch = options.batch or workload.batch
        rows = results.setdefault(f"{workload.name}, batch {batch}", {})
        for candidate in candidates():
            rows[candidate.name] = measured(compiled(workload, candidate, device, batch))
            if options.json:  # As soon as there is something: each takes minutes.
                stored = {"compiled_for": device.device_kind, "jax": version("jax"), "workloads": results}
                write_json(options.json, stored)
    print_results(results)


def print_results(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Prints a row for each workload and candidate."""
    lines = []
    for name, rows in results.items():
        for candidate, row in rows.items():
            sizes = [
                [number(row[key], 1e-9), number(row[key] / rows[O2][key])] for key in ("peak_bytes", "traffic_bytes")
            ]
            products = "; ".join(f"{count} of {dtypes}" for dtypes, count in row["products"].items())
            lines.append((name, candidate, *sizes[0], *sizes[1], products))
        lines.append(BREAK)
    headings = ("model", "candidate", "peak GB", "of O2", "moved GB", "of O2", "products")
    print_table("Compiled for an H100", headings, lines, names=2)


if __name__ == "__main__":
    main()
