"""Compiles the step-time workloads at their published sizes for an H100: memory, traffic, and the largest batches.

Run from the root of the repository, where `pip install "jax[cuda12]"` has added XLA's compiler for NVIDIA GPUs::

    python -m benchmarks.studies.h100 --json benchmarks/results/h100-compiled.json

Nothing runs, so nothing is timed. Without a GPU at hand XLA does not try out algorithms for products and convolutions,
so that theirs may differ from those of a run; what is fused around them, what is kept and what is copied is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compiled.devices import descriptions  # isort: skip (It sets the environment that JAX is imported in.)

import jax
from rich.progress import Progress

from benchmarks.candidates import Candidate, of_jamp
from benchmarks.commands import check_names
from benchmarks.compiled import measure
from benchmarks.files import write_json
from benchmarks.steptime.candidates import LARGEST, candidates
from benchmarks.steptime.goals import BY_HAND
from benchmarks.steptime.programs import largest_batch
from benchmarks.steptime.workloads import Workload, scanned_gpt, workloads
from benchmarks.tables import BREAK, number, print_table
from benchmarks.timing import peak_bytes

NAMES = ("float32", BY_HAND, "jamp O1 bfloat16", "jamp O2 bfloat16", "jamp O3 bfloat16", "jamp O2 float16")
MEMORY = int(0.75 * 84_929_347_584)  # What JAX takes of an H100's by default.


def chosen(names: list[str], error: Callable[[str], Any]) -> list[Workload]:
    """The workloads of these names, all of them for none; ends the command by `error` where there is none of a name."""
    found = [*workloads(True), scanned_gpt()]
    check_names("workload", names, (workload.name for workload in found), error)
    return [workload for workload in found if not names or workload.name in names]


def precisions() -> list[Candidate]:
    """The candidates, and jamp without half residuals."""
    found = [candidate for candidate in candidates()[0] if candidate.name in NAMES]
    return [*found, of_jamp("O2:bfloat16,residuals=all", "jamp O2 bfloat16, all")]


def measured(workload: Workload, candidate: Candidate, device: Any, largest: bool) -> dict[str, float]:
    """Peak memory and memory traffic of a train step in bytes, and if asked for, the largest batch that fits."""
    found = measure.measured(workload, candidate, device)
    row = {"peak_bytes": found["peak_bytes"], "traffic_bytes": found["moved_bytes"]}
    if largest and candidate.name in LARGEST:

        def fits(batch: int) -> bool:
            return peak_bytes(measure.compiled(workload, candidate, device, batch)) <= MEMORY

        row["largest_batch"] = largest_batch(fits, workload.batch)
    return row


def main() -> None:
    """Compiles, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.h100", description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", default=[], help="one of them; may be repeated")
    parser.add_argument(
        "--largest-batch", action="store_true", help="look for the largest batches too, which takes long"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    work = [(w, c) for w in chosen(options.workload, parser.error) for c in precisions()]
    device = descriptions(["h100"])["h100"]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for workload, candidate in work:
            progress.update(task, description=f"{workload.name}: {candidate.name}")
            row = measured(workload, candidate, device, options.largest_batch)
            results.setdefault(workload.name, {})[candidate.name] = row
            progress.advance(task)
    print_results(results)
    if options.json:
        stored = {"compiled_for": device.device_kind, "jax": jax.__version__, "workloads": results}
        write_json(options.json, stored)


def print_results(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints a row for each workload and candidate."""
    headings = ("model", "candidate", "peak GB", "of hand-written", "moved GB", "of hand-written", "largest batch")
    lines = []
    for name, rows in results.items():
        for candidate, row in rows.items():
            numbers = []
            for key in ("peak_bytes", "traffic_bytes"):
                numbers += [number(row[key], 1e-9), number(row[key] / rows[BY_HAND][key])]
            lines.append((name, candidate, *numbers, str(row.get("largest_batch", ""))))
        lines.append(BREAK)
    print_table("Compiled for an H100", headings, lines, names=2)


if __name__ == "__main__":
    main()
