"""Measures jamp on a zoo of unmodified float32 models, beside their libraries' own mixed precision, jmp and mpx.

Run from the root of the repository::

    python -m benchmarks.precision                      # everything, minutes
    python -m benchmarks.precision --quick              # the set for continuous integration, under a minute
    python -m benchmarks.precision --models lm,resnet --json out.json
    python -m benchmarks.precision --time 20 --depths --store    # what the README and the documentation show
    python -m benchmarks.precision --against benchmarks/results/precision.json --strict

The exit status is 1 where a goal is missed or a stored run was better, if ``--strict`` is given.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import zoo
from benchmarks.commands import check_names
from benchmarks.files import OUT, RESULTS
from benchmarks.goals import print_goals
from benchmarks.precision import summary
from benchmarks.precision.candidates import candidates
from benchmarks.precision.goals import Results, precision_goals
from benchmarks.precision.measure import DEPTHS, Settings, measure_depths, measure_entry
from benchmarks.precision.report import print_depths, print_results
from benchmarks.tables import terminal
from benchmarks.zoo import Entry

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    parser = _parser()
    options = _options(parser, arguments)
    console = terminal()
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
        names = options.only.split(",")
        check_names("candidate", names, [*(candidate.name for candidate in found), *missing], parser.error)
        found = [candidate for candidate in found if candidate.name in ("float32", *names)]
    entries, not_installed = zoo.load()
    every = [*(entry.name for entry in entries), *not_installed]
    for part in options.models.split(","):
        if not any(part in name for name in every):
            parser.error(f"no model has {part!r} in its name: there are {', '.join(every)}")
    entries = _chosen(entries, options)
    for name, why in (missing | not_installed).items():
        console.print(f"[yellow]without {name}:[/] {why}")

    settings = Settings(options.policy, options.static, options.time, options.rounds, options.draws)
    results: Results = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(entries))
        for entry in entries:
            progress.update(task, description=entry.name)
            results[entry.name] = measure_entry(entry, found, settings)
            _write(options, results, {})  # what is measured so far, should the run be cut short
            progress.advance(task)
    depths = measure_depths(found, options.rounds) if options.depths else {}
    _write(options, results, depths)
    everything = _everything(options, results, depths)
    if options.store:
        summary.write(RESULTS / "precision.json", summary.summarize(everything))

    print_results(results, console)
    print_depths(depths, console)
    goals = precision_goals(results)
    print_goals(goals, console=console)
    worse = []
    if options.against:
        stored = json.loads(options.against.read_text())
        worse = sorted(summary.regressions(summary.summarize(everything), stored))
        unknown = (name for name in stored["models"] if name not in results and _is_wanted(name, options))
        worse += [f"{name}: not measured, its library is not installed" for name in unknown]
        console.print("\n".join(worse) or f"Nowhere worse than {options.against}.", highlight=False)
    return int(options.strict and bool(worse or not all(goal.passed for goal in goals)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="O2:bfloat16", help="what jamp.cast_fn is given (default: %(default)s)")
    parser.add_argument("--models", default="", help="comma-separated parts of model names; default all")
    parser.add_argument("--only", default="", help="comma-separated candidates beside float32; default all")
    parser.add_argument("--quick", action="store_true", help="the small set for continuous integration")
    parser.add_argument("--static", action="store_true", help="trace only: nothing is compiled or run")
    parser.add_argument("--time", type=int, default=0, metavar="N", help="time N compiled gradient steps")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of trace timing, 0 for none")
    parser.add_argument("--draws", type=int, default=3, help="draws that the gradient error is averaged over")
    parser.add_argument("--depths", action="store_true", help=f"trace times at {DEPTHS} blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--store", action="store_true", help="write a summary into benchmarks/results, and everything into out"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="name what is worse than in a stored summary")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a goal is missed")
    return parser


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.store and options.json is None:
        options.json = OUT / "precision.json"
    return options


def _chosen(entries: list[Entry], options: argparse.Namespace) -> list[Entry]:
    return [entry for entry in entries if _is_wanted(entry.name, options)]


def _is_wanted(name: str, options: argparse.Namespace) -> bool:
    return name in QUICK if options.quick else any(part in name for part in options.models.split(","))


def _everything(options: argparse.Namespace, results: Results, depths: Any) -> dict[str, Any]:
    measured = {name: {key: asdict(value) for key, value in row.items()} for name, row in results.items()}
    setting = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "policy": options.policy}
    return {**setting, "models": measured, "depths": depths}


def _write(options: argparse.Namespace, results: Results, depths: Any) -> None:
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_everything(options, results, depths)))


if __name__ == "__main__":
    sys.exit(main())
