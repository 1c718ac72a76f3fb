"""Measures jamp on a zoo of unmodified float32 models, beside their libraries' own mixed precision, jmp and mpx.

Run from the root of the repository::

    python -m benchmarks.precision                      # everything, minutes
    python -m benchmarks.precision --quick              # the set for continuous integration, under a minute
    python -m benchmarks.precision --models lm,resnet --json out.json

The exit status is 1 where a goal is missed, if ``--strict`` is given.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import measure, zoo
from benchmarks.candidates import Candidate, candidates, half_dtype
from benchmarks.measure import Measurement
from benchmarks.report import Results, goals, print_depths, print_goals, print_table
from benchmarks.zoo import plain
from benchmarks.zoo._model import Entry, Model

QUICK = (
    "linen/lm_scanned",
    "linen/cnn_groupnorm",
    "nnx/gemma",
    "haiku/lstm",
    "equinox/mlp",
    "plain/transformer",
    "plain/transformer_remat",
    "plain/gnn",
)
DEPTHS = (12, 48, 96)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 240)
    # By default XLA leaves out some roundings to half on a CPU, where it computes in float32, but none of what a
    # checkpoint keeps: jamp's gradients would be compared with those of a native code that is not in half.
    flags = "--xla_allow_excess_precision=false"
    if not options.time:
        # Only times need optimized machine code, and compiling it is most of the run.
        flags += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    found, missing = candidates(options.policy)
    if options.quick:
        found = [candidate if candidate.name != "jmp" else replace(candidate, runs=False) for candidate in found]
    if options.only:
        found = [candidate for candidate in found if candidate.name in ("float32", *options.only.split(","))]
    entries, not_installed = zoo.load()
    entries = _chosen(entries, options)
    for name, why in (missing | not_installed).items():
        console.print(f"[yellow]without {name}:[/] {why}")

    results: Results = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(entries))
        for entry in entries:
            progress.update(task, description=entry.name)
            results[entry.name] = _measure_entry(entry, found, options)
            if options.json:
                _write_json(options, results, {})  # what is measured so far, should the run be cut short
            progress.advance(task)
    depths = _measure_depths(found, options) if options.depths else {}

    print_table(console, results)
    print_depths(console, depths)
    reached = goals(results)
    print_goals(console, reached)
    if options.json:
        _write_json(options, results, depths)
    return int(options.strict and not all(goal.passed for goal in reached))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Precision measures of jamp on a zoo of models.")
    parser.add_argument("--policy", default="O2:bfloat16", help="what jamp.cast_fn is given (default: %(default)s)")
    parser.add_argument("--models", default="", help="comma-separated parts of model names; default all")
    parser.add_argument("--only", default="", help="comma-separated candidates beside float32; default all")
    parser.add_argument("--quick", action="store_true", help="the small set for continuous integration")
    parser.add_argument("--static", action="store_true", help="trace only: nothing is compiled or run")
    parser.add_argument("--time", type=int, default=0, metavar="N", help="time N compiled gradient steps")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of trace timing, 0 for none")
    parser.add_argument("--draws", type=int, default=3, help="draws that the gradient error is averaged over")
    parser.add_argument("--depths", action="store_true", help=f"trace times at {DEPTHS} blocks")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a goal is missed")
    return parser.parse_args(arguments)


def _chosen(entries: list[Entry], options: argparse.Namespace) -> list[Entry]:
    if options.quick:
        return [entry for entry in entries if entry.name in QUICK]
    parts = options.models.split(",")
    return [entry for entry in entries if any(part in entry.name for part in parts)]


def _measure_entry(entry: Entry, found: list[Candidate], options: argparse.Namespace) -> dict[str, Measurement]:
    """All candidates on one model; what fails leaves its error in place of the numbers."""
    try:
        full = entry.build(None)
        native = entry.build(half_dtype(options.policy)) if entry.native else None
    except Exception as error:
        return {"float32": Measurement(error=_message(error))}
    # Both run with the same float32 parameters and inputs.
    models = {False: full, True: native and replace(native, params=full.params, inputs=full.inputs)}
    found = [candidate for candidate in found if models[candidate.native]]
    results = {candidate.name: Measurement() for candidate in found}

    references: list[Any] = []
    programs: dict[str, Any] = {}
    draws = [(full.params, *full.inputs)]
    draws += [measure.perturbed(draws[0], seed) for seed in range(1, options.draws)]
    for candidate in found:
        model, result = models[candidate.native], results[candidate.name]
        apply = candidate.wrap(model.apply)
        _guarded(result, measure.measure_static, result, model, apply)
        if candidate.name == "jamp":
            _guarded(result, measure.measure_shared_casts, result, model, options.policy)
        if candidate.runs and not options.static and not result.error:
            _guarded(result, _run, candidate.name, result, measure.objective(model, apply), draws, references, programs)
    if options.time:
        for name, seconds in measure.step_seconds(programs, draws[0], options.time).items():
            results[name].step_seconds = seconds
    if options.rounds:
        _time_traces(results, found, models, options.rounds)
    return results


def _run(
    name: str,
    result: Measurement,
    loss: Callable[..., jax.Array],
    draws: Sequence[Any],
    references: list[Any],
    programs: dict[str, Any],
) -> None:
    """Compiles and runs one candidate; the first one that comes here, float32, sets the references."""
    compiled = measure.run_gradient(loss, draws)
    result.temp_bytes, programs[name] = compiled.temp_bytes, compiled.program
    if not references:
        references.extend(compiled.gradients)
    result.gradient_error = measure.gradient_error(compiled.gradients, references)


def _time_traces(
    results: dict[str, Measurement], found: list[Candidate], models: dict[bool, Model], rounds: int
) -> None:
    makers = {}
    for candidate in found:
        if candidate.runs and results[candidate.name].error is None:
            model = models[candidate.native]
            makers[candidate.name] = lambda c=candidate, m=model: measure.objective(m, c.wrap(m.apply))
    for name, seconds in measure.trace_seconds(makers, models[False], rounds).items():
        results[name].trace_seconds = seconds


def _guarded(result: Measurement, measure_part: Callable[..., None], *args: Any) -> None:
    try:
        measure_part(*args)
    except Exception as error:  # a model that fails is a result, and the others are still to be measured
        result.error = _message(error)


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _measure_depths(found: list[Candidate], options: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Trace times of unrolled transformers by depth, to see that they grow linearly."""
    builders: dict[str, Callable[[Any, int], Model]] = {"plain/transformer": plain.transformer_deep}
    try:
        from benchmarks.zoo import flax_linen
    except ImportError:
        pass
    else:
        builders["linen/lm"] = flax_linen.lm_deep
    times: dict[str, dict[int, dict[str, float]]] = {}
    for name, build in builders.items():
        for depth in DEPTHS:
            models = {False: build(None, depth), True: build(half_dtype(options.policy), depth)}
            results = {candidate.name: Measurement() for candidate in found}
            _time_traces(results, found, models, max(options.rounds, 3))
            seconds = {key: result.trace_seconds for key, result in results.items() if result.trace_seconds}
            times.setdefault(name, {})[depth] = seconds
    return times


def _write_json(options: argparse.Namespace, results: Results, depths: Any) -> None:
    measured = {name: {key: asdict(value) for key, value in row.items()} for name, row in results.items()}
    setting = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "policy": options.policy}
    with open(options.json, "w") as file:
        json.dump({**setting, "models": measured, "depths": depths}, file)


if __name__ == "__main__":
    sys.exit(main())
