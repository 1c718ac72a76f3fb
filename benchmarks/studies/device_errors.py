"""Gradient errors of the zoo's models on the device at hand, whose kernels are not those of a CPU.

Run from the root of the repository::

    python -m benchmarks.studies.device_errors --json benchmarks/results/device-errors.json

The reference is float32 on the same device, with `jax.default_matmul_precision("highest")`. On an H100 products
accumulate in another order than on a CPU, `attention=fused` is cuDNN's kernel, and float8 products are not emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import zoo
from benchmarks.candidates import Candidate, of_jamp
from benchmarks.files import OUT, write_json
from benchmarks.models import objective
from benchmarks.precision.instruments import gradient_error, perturbed, run_gradient
from benchmarks.precision.measure import built
from benchmarks.tables import message, number, print_table

O2 = "O2:bfloat16"
POLICIES = (O2, f"{O2},attention=fused", f"{O2},matmul=float8", "O2:float16", "O2:float16,attention=fused")
REFERENCE = "float32"


def candidates() -> list[Candidate]:
    """Float32, what the library makes of float32 on this device, its own mixed precision, and jamp."""
    found = [Candidate(REFERENCE, matmul_precision="highest"), Candidate("float32, as the device has it")]
    return [*found, Candidate("native", dtype=jnp.bfloat16), *(of_jamp(policy, policy) for policy in POLICIES)]


def measured(entry: zoo.Entry, draws: int) -> dict[str, float | str]:
    """Errors by candidate, and in place of one that failed what it said."""
    found = candidates()
    models = built(entry, found)
    first = (models[None].params, *models[None].inputs)
    inputs = [first, *(perturbed(first, seed) for seed in range(1, draws))]
    gradients: dict[str, Any] = {}
    errors: dict[str, float | str] = {}
    for candidate in found:
        if candidate.dtype in models:
            model = models[candidate.dtype]
            try:
                with matmul_precision(candidate):
                    gradients[candidate.name] = run_gradient(objective(model, candidate.wrap(model.apply)), inputs)
            except Exception as error:  # A kernel that a device has not got is a result, and the others are of use.
                errors[candidate.name] = message(error)
    reference = gradients.pop(REFERENCE).gradients
    return errors | {name: gradient_error(found.gradients, reference) for name, found in gradients.items()}


def matmul_precision(candidate: Candidate) -> contextlib.AbstractContextManager[Any]:
    """The context that a candidate is traced in."""
    if candidate.matmul_precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(candidate.matmul_precision)


def guarded(measure: Callable[..., dict[str, float | str]], entry: zoo.Entry, draws: int) -> dict[str, float | str]:
    """What was measured of a model; what it said if all of it failed."""
    try:
        return measure(entry, draws)
    except Exception as error:
        return {REFERENCE: message(error)}


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.device_errors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their name")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--json", type=Path, default=OUT / "device-errors.json")
    options = parser.parse_args()
    entries = [entry for entry in zoo.load()[0] if options.only in entry.name]
    stored: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "models": {}}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        waiting = {entry.name: pool.submit(guarded, measured, entry, options.draws) for entry in entries}
        for name, future in waiting.items():
            stored["models"][name] = future.result()
            write_json(options.json, stored)
    show(stored)


def show(stored: dict[str, Any]) -> None:
    """Prints a row for each model: errors in percent, and what failed below."""
    names = [candidate.name for candidate in candidates()[1:]]
    lines, failures = [], []
    for model, row in stored["models"].items():
        failures += [f"{model}: {name}: {value}" for name, value in row.items() if isinstance(value, str)]
        found = [row.get(name) for name in names]
        lines.append((model, *(number(x, 100, 3) if isinstance(x, float) else "" for x in found)))
    print_table(f"Gradient errors on {stored['device']} (%)", ("model", *names), lines)
    print("\n".join(failures))


if __name__ == "__main__":
    main()
