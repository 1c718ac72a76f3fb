"""Step time and peak memory of jamp beside float32, hand-written bfloat16, its peers and PyTorch.

    python -m benchmarks.run peers --device gpu        # all candidates on all workloads
    python -m benchmarks.run tutorials --device gpu    # against the speed-ups that Paddle and MXNet publish
    python -m benchmarks.run overhead --device cpu     # what tracing and compiling through jamp takes

Everything runs in one process, compiled and warm, the candidates in turn, and medians count. On a CPU, seconds are
those in which the process was busy, summed over its threads, because other processes share the CPU. Results are added
to `benchmarks/results/<device>.json`; `python -m benchmarks.render` makes the README's table and chart of those files.
jax, flax and optax are enough; jmp, mpx and torch are measured where they are installed.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.goals import goals

RESULTS = Path(__file__).parent / "results"
SUITES = ("tutorials", "peers", "overhead")
COLUMNS: dict[str, tuple[str, Any]] = {
    "seconds": ("step ms", lambda x: f"{1e3 * x:.3f}"),
    "speed": ("times float32", lambda x: f"{x:.2f}"),
    "peak_bytes": ("peak MB", lambda x: f"{x / 1e6:.1f}"),
    "peak_share": ("matmul peak %", lambda x: f"{100 * x:.0f}"),
    "largest_batch": ("largest batch", str),
    "trace_seconds": ("trace s", lambda x: f"{x:.3f}"),
    "compile_seconds": ("compile s", lambda x: f"{x:.3f}"),
}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows, with the columns that any of them has."""
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    print(f"{'workload':10s} {'candidate':26s}" + "".join(f"{COLUMNS[key][0]:>15s}" for key in columns))
    for row in rows:
        cells = ("" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in columns)
        print(f"{row['workload']:10s} {row['candidate']:26s}" + "".join(f"{cell:>15s}" for cell in cells))


def print_goals(rows: list[dict[str, Any]], platform: str) -> None:
    """Prints what a GPU is to reach, and whether it was; on a CPU the goals are there to be compared with."""
    for goal in goals(rows):
        mark = "" if platform == "cpu" else "reached  " if goal.passed else "MISSED   "
        print(f"{mark}{goal}" + (" on a GPU" if platform == "cpu" else ""))


def store(folder: Path, suite: str, rows: list[dict[str, Any]], environment: dict[str, Any]) -> Path:
    """Writes the rows into the device's file, in place of those of the same workloads, and returns its path."""
    path = folder / (re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-") + ".json")
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    new = {row["workload"] for row in rows}
    kept = [row for row in stored["suites"].get(suite, {}).get("rows", []) if row["workload"] not in new]
    stored["device"] = environment["device"]
    stored["suites"][suite] = {"environment": environment, "rows": kept + rows}
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return path


def main(argv: list[str] | None = None) -> None:
    """Runs one suite, prints its table and stores its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate")
    parser.add_argument("--workload", action="append", help="one of SimpleNet, ResNet-50, LSTM, GPT; may be repeated")
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

    from benchmarks import suites

    try:
        jax.devices()
    except RuntimeError as error:
        parser.error(f"no {args.device} for jax: {error}")
    full = (args.size or {"cpu": "small", "gpu": "full"}[args.device]) == "full"
    chosen = suites.choose(full, args.workload, parser.error)
    rows = []
    for workload in chosen:  # stored one by one: a long run that is cut short has not been for nothing
        if args.suite == "overhead":
            found = suites.overhead(workload, args.rounds)
        else:
            found = suites.step_times(args.suite, workload, full, args.rounds, args.largest_batch)
        environment = suites.environment(full)
        path = store(args.out, args.suite, found, environment)
        rows += found
    print_table(rows)
    print_goals(rows, environment["platform"])
    print(f"\nStored in {path}. Now: python -m benchmarks.render")


if __name__ == "__main__":
    main()
