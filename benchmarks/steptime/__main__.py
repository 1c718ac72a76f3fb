"""Step time and peak memory of jamp beside float32, hand-written bfloat16, its peers and PyTorch.

    python -m benchmarks.steptime peers --device gpu        # all candidates on all workloads
    python -m benchmarks.steptime tutorials --device gpu    # against the speed-ups that Paddle and MXNet publish
    python -m benchmarks.steptime overhead --device cpu     # what tracing and compiling through jamp takes

Everything runs in one process, compiled and warm, the candidates in turn, and medians count. On a CPU, seconds are
those in which the process was busy, summed over its threads, because other processes share the CPU. Results are added
to `benchmarks/results/<device>.json`; `python -m benchmarks.render` makes the README's table and chart of those files.
jax, flax and optax are enough; jmp, mpx and torch are measured where they are installed. To compile all candidates of a
workload for a GPU takes minutes, to time them seconds.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.files import RESULTS, write_json
from benchmarks.goals import print_goals
from benchmarks.steptime.goals import step_time_goals
from benchmarks.steptime.rows import columns, place, texts
from benchmarks.tables import print_table

SUITES = ("tutorials", "peers", "overhead")


def store(folder: Path, suite: str, rows: list[dict[str, Any]], environment: dict[str, Any]) -> Path:
    """Writes the rows into the device's file, in place of those of the same workloads, and returns its path."""
    path = folder / (re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-") + ".json")
    stored = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    new, before = {row["workload"] for row in rows}, stored["suites"].get(suite, {"rows": [], "environment": {}})
    kept = [row for row in before["rows"] if row["workload"] not in new]
    if kept:  # Of libraries that were there then and are not now.
        versions = {**before["environment"].get("versions", {}), **environment["versions"]}
        environment = {**environment, "versions": versions}
    stored["device"] = environment["device"]
    stored["suites"][suite] = {"environment": environment, "rows": sorted(kept + rows, key=place)}
    write_json(path, stored)
    return path


def main(argv: list[str] | None = None) -> None:
    """Runs one suite, prints its table and stores its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steptime", description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate")
    parser.add_argument("--workload", action="append", help="one of SimpleNet, ResNet-50, LSTM, GPT; may be repeated")
    parser.add_argument("--candidate", action="append", help="one of them, where time is short; may be repeated")
    parser.add_argument("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
    parser.add_argument("--largest-batch", action="store_true", help="look for the largest batch too (GPU only)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: expected 1 or more")
    # Before jax is imported. PyTorch shares the GPU, so JAX must not take nearly all of it beforehand.
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[args.device]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from benchmarks.steptime import suites

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # The latter where jax has no support for the device at all.
        parser.error(f"jax finds no {args.device}. {error}")
    full = (args.size or {"cpu": "small", "gpu": "full"}[args.device]) == "full"
    chosen = suites.choose(full, args.workload, parser.error)
    rows = []
    for workload in chosen:  # stored one by one: a long run that is cut short has not been for nothing
        if args.suite == "overhead":
            found = suites.overhead(workload, args.rounds)
        else:
            found = suites.step_times(args.suite, workload, full, args.rounds, args.largest_batch, args.candidate)
        environment = suites.environment(full)
        path = store(args.out, args.suite, found, environment)
        rows += found
    print_table(args.suite, columns(rows), texts(rows), names=3)
    judge = environment["platform"] != "cpu"  # There the goals are there to be compared with.
    print_goals(step_time_goals(rows), "Goals" if judge else "Goals for a GPU", judge)
    print(f"\nStored in {path}. Now: python -m benchmarks.render")


if __name__ == "__main__":
    main()
