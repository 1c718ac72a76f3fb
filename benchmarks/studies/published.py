"""Published models that jamp was not built on, unmodified: at O1 and O2, in both half dtypes.

    pip install "transformers<5" flax equimo flowjax jraph rlax dm-haiku jmp
    python -m benchmarks.studies.published [--models bert,gpt2] [--store]

For each: the share of its products' FLOPs in half, of the forward or of the backward pass, whichever is less, and the
error of its gradient over that of its library's own mixed precision, or, where it has none, of what jmp makes of it,
and over that of everything in half, products and sums and all, as O3 has it.
"""

import argparse
import importlib
import math
import os
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

from benchmarks.candidates import Candidate, of_jamp, of_peers
from benchmarks.files import OUT, RESULTS, write_json
from benchmarks.precision.goals import Row
from benchmarks.precision.instruments import Measurement
from benchmarks.precision.measure import Settings, measure_entry
from benchmarks.tables import number, print_table
from benchmarks.zoo import Entry

MODULES = ("huggingface", "others")
POLICIES = tuple(f"{level}:{dtype}" for level in ("O1", "O2") for dtype in ("bfloat16", "float16"))


def entries() -> list[Entry]:
    """All published models; an import that fails says what is missing."""
    found: list[Entry] = []
    for module in MODULES:
        try:
            found += importlib.import_module(f"benchmarks.zoo.published.{module}").ZOO.entries
        except ImportError as error:
            print(f"without {module}: {error}")
    return found


def candidates(entry: Entry) -> list[Candidate]:
    """Float32, what a model is compared with in each half dtype, and jamp."""
    found = [Candidate("float32")]
    for dtype in ("bfloat16", "float16"):
        if entry.native:
            found.append(Candidate(f"half {dtype}", dtype=jnp.dtype(dtype)))
        else:
            peers, _ = of_peers(jnp.dtype(dtype))
            found += [replace(peer, name=f"half {dtype}") for peer in peers if peer.name == "jmp"]
        found.append(of_jamp(f"O3:{dtype}", f"all {dtype}"))
    return [*found, *(of_jamp(policy, policy) for policy in POLICIES)]


def summary(row: Row) -> dict[str, Any]:
    """What is stored of a model: by policy its share, its error over that of half, and what went wrong."""
    reference = row["float32"]
    if reference.error:
        return {"without jamp": reference.error}
    result: dict[str, Any] = {}
    for policy in POLICIES:
        found, (_, _, dtype) = row[policy], policy.partition(":")
        result[policy] = {
            "half_share": found.error is None and min(found.half_forward or 0, found.half_backward or 0),
            "gradient_error": found.gradient_error,
            "over_half": _ratio(found, row.get(f"half {dtype}")),
            "over_all_half": _ratio(found, row.get(f"all {dtype}")),
        }
        result[policy] |= {"full": found.full_matmuls} if found.full_matmuls else {}
        result[policy] |= {"error": found.error} if found.error else {}
    return result


def _ratio(found: Measurement, other: Measurement | None) -> float | None:
    """The error of one gradient over that of another; None where one of them is not there, or not a number."""
    if other is None or not other.gradient_error or found.gradient_error is None:
        return None
    ratio = found.gradient_error / other.gradient_error
    return round(ratio, 4) if math.isfinite(ratio) else None


def print_summaries(found: dict[str, dict[str, Any]]) -> None:
    """Prints a row a model."""
    rows = []
    for name, by_policy in found.items():
        if "without jamp" in by_policy:
            rows.append([name, by_policy["without jamp"][:60], *[""] * (2 * len(POLICIES) - 1)])
            continue
        cells = []
        for policy in POLICIES:
            result = by_policy[policy]
            cells += [result["error"][:30]] * 2 if "error" in result else [
                number(result["half_share"], 100, 1),
                number(result["over_half"]),
            ]  # fmt: skip
        rows.append([name, *cells])
    headings = ["model", *(text for policy in POLICIES for text in (f"{policy} % half", "error over half"))]
    print_table("Published models", headings, rows)


def main() -> None:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.published", description=__doc__)
    parser.add_argument("--models", default="", help="parts of names, divided by commas")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--store", action="store_true", help="keep the summary in benchmarks/results")
    options = parser.parse_args()
    flags = "--xla_allow_excess_precision=false --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    chosen = [e for e in entries() if not options.models or any(part in e.name for part in options.models.split(","))]
    path = (RESULTS if options.store else OUT) / "published.json"
    found: dict[str, dict[str, Any]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for entry in chosen:
            progress.update(task, description=entry.name)
            row = measure_entry(entry, candidates(entry), Settings(rounds=0, draws=options.draws))
            found[entry.name] = summary(row)
            write_json(path, found)
            progress.advance(task)
    print_summaries(found)


if __name__ == "__main__":
    main()
