"""Compiles train steps for an H100 and a TPU on a machine without one: peak memory, memory traffic, estimated cycles.

Run from the root of the repository, where `pip install "jax[cuda12]"` or `pip install "jax[tpu]"` has added XLA's
compiler for the device (each in an environment of its own, for all that they are called the same)::

    python -m benchmarks.compiled --device tpu --store

Nothing runs, so nothing is timed. Without a GPU at hand XLA does not try out algorithms for products and convolutions,
so that theirs may differ from those of a run; what is fused around them, what is kept and what is copied is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.compiled.devices import DEVICES, descriptions  # isort: skip (It sets the environment that JAX is imported in.)

import jax
from rich.progress import Progress

from benchmarks.commands import check_names
from benchmarks.compiled.measure import candidates, measured
from benchmarks.compiled.models import compiled_workloads
from benchmarks.compiled.render import chart, goals, show
from benchmarks.files import OUT, RESULTS, write_json
from benchmarks.goals import print_goals

FILE = "compiled.json"


def main(argv: list[str] | None = None) -> None:
    """Compiles, prints a table, draws a chart, and stores what was measured if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", action="append", choices=DEVICES, help="default all whose compilers are installed")
    parser.add_argument("--model", action="append", default=[], help="one of them; may be repeated")
    parser.add_argument("--candidate", action="append", default=[], help="one of them; may be repeated")
    parser.add_argument("--published", action="store_true", help="the published sizes, which take long")
    parser.add_argument("--json", type=Path, default=OUT / FILE, help="results; what is there already stays")
    parser.add_argument("--store", action="store_true", help=f"write to benchmarks/results/{FILE}")
    options = parser.parse_args(argv)
    path = RESULTS / FILE if options.store else options.json
    stored = json.loads(path.read_text()) if path.exists() else {"devices": {}}
    models = compiled_workloads(options.published)
    check_names("model", options.model, (model.name for model in models), parser.error)
    check_names("candidate", options.candidate, (candidate.name for candidate in candidates()), parser.error)
    work = [(w, c) for w in models for c in candidates() if _asked_for(options, w, c)]
    with Progress(transient=True) as progress:
        for name, device in descriptions(options.device).items():
            task = progress.add_task("", total=len(work))
            for workload, candidate in work:
                progress.update(task, description=f"{name}, {workload.name}: {candidate.name}")
                rows = device_of(stored, name)["models"].setdefault(workload.name, {})
                rows[candidate.name] = measured(workload, candidate, device)
                write_json(path, stored)  # What is there stays there, whatever happens to the next.
                progress.advance(task)
    if stored["devices"]:
        show(stored)
        print_goals(goals(stored))
        chart(stored, path.with_suffix(".png") if not options.store else OUT / "compiled.png")


def _asked_for(options: Any, workload: Any, candidate: Any) -> bool:
    return (not options.model or workload.name in options.model) and (
        not options.candidate or candidate.name in options.candidate
    )


def device_of(stored: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns what is stored of a device, with the version that compiles now."""
    device = stored["devices"].setdefault(name, {"models": {}})
    device |= {"name": DEVICES[name].name, "jax": jax.__version__}
    return device


if __name__ == "__main__":
    main()
