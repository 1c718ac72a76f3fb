"""Counts the attentions of the zoo's unmodified models that `attention=fused` recognises, and those that it does not.

Run from the root of the repository::

    python -m benchmarks.studies.attentions --published

Nothing runs: models are traced and planned.
"""

from __future__ import annotations

import argparse

import jamp
from benchmarks import zoo
from benchmarks.studies import published
from benchmarks.tables import print_table
from jamp.inspect._attentions import attentions
from jamp.transforms._traced import Traced

POLICY = "O2:bfloat16,attention=fused"


def main() -> None:
    """Prints a row for each model that has an attention, or what looks like one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.attentions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their name")
    parser.add_argument("--published", action="store_true", help="the published models too")
    options = parser.parse_args()
    entries, missing = zoo.load()
    if options.published:
        entries += published.entries()
    lines = []
    for entry in entries:
        if options.only in entry.name:
            model = entry.build(None)
            plan = Traced(model.apply, (model.params, *model.inputs), {}).plan(jamp.get_policy(POLICY))
            for found in attentions(plan):
                reasons = "; ".join(f"{platform}: {reason}" for platform, reason in found.reasons.items())
                lines.append((entry.name, str(found.count), ", ".join(found.kernels) or "as written", reasons))
                print(*lines[-1], sep=" | ", flush=True)
    print_table("Attentions", ("model", "count", "fused for", "not fused"), lines, names=1)
    for library, reason in missing.items():
        print(f"{library}: {reason}")


if __name__ == "__main__":
    main()
