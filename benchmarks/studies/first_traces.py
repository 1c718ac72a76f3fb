"""Tells what a first trace under jamp consists of: the user's function, planning and emission, JAX's differentiation.

Run from the root of the repository, on an idle machine::

    python -m benchmarks.studies.first_traces --only plain/

Every trace begins with empty caches. `jamp` traces the function as it is, plans, emits what it has planned, and JAX
differentiates that; so what its forward trace takes beyond that of the function in float32 is planning and emission.
"""

from __future__ import annotations

import argparse

from benchmarks import zoo
from benchmarks.models import objective
from benchmarks.precision.candidates import candidates
from benchmarks.precision.instruments import trace_seconds
from benchmarks.precision.measure import built
from benchmarks.tables import number, print_table

HEADINGS = ("model", "function", "planned and emitted", "differentiated", "native: function", "differentiated", "ratio")


def main() -> None:
    """Prints a row for each model that has a hand-written half form; milliseconds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.first_traces", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their name")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="each takes the least of this many times")
    parser.add_argument("--policy", default="O2:bfloat16")
    options = parser.parse_args()
    found = [each for each in candidates(options.policy)[0] if each.name in ("float32", "native", "jamp")]
    lines = []
    for entry in zoo.load()[0]:
        if options.only not in entry.name or not entry.native:
            continue
        models = built(entry, found)
        makers = {
            each.name: lambda each=each, model=models[each.dtype]: objective(model, each.wrap(model.apply))
            for each in found
        }
        forward = trace_seconds(makers, models[None], options.rounds, differentiated=False)
        whole = trace_seconds(makers, models[None], options.rounds)
        parts = (
            forward["float32"],
            forward["jamp"] - forward["float32"],
            whole["jamp"] - forward["jamp"],
            forward["native"],
            whole["native"] - forward["native"],
        )
        row = (*(number(1e3 * seconds, digits=0) for seconds in parts), number(whole["jamp"] / whole["native"]))
        lines.append((entry.name, *row))
        print(*lines[-1], sep=" | ", flush=True)
    print_table(f"First traces, {options.policy}, ms", HEADINGS, lines, names=1)


if __name__ == "__main__":
    main()
