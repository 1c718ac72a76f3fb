"""Gradient errors of the zoo in float8 beside bfloat16: with the products that jamp chooses, and with all that fit.

Run from the root of the repository; models that the file has already are left out, so that it can be run in pieces::

    python -m benchmarks.studies.float8_models --models plain equinox
    python -m benchmarks.studies.float8_models --published --models hf/bert hf/gpt2
"""

import argparse
import json
import os
from pathlib import Path

import jax
from rich.progress import track

import jamp
from benchmarks import zoo
from benchmarks.files import RESULTS, write_json
from benchmarks.models import objective
from benchmarks.precision.instruments import gradient_error, perturbed, run_gradient
from benchmarks.studies import published
from benchmarks.tables import number, print_table

BFLOAT16 = "O2:bfloat16"
# The models are small, and few of their products are large enough for 8 bits to be chosen.
ALL = f"{BFLOAT16},float8=['dot_general', 'conv_general_dilated', 'ragged_dot_general']"
CANDIDATES = {"bfloat16": BFLOAT16, "float8": f"{BFLOAT16},matmul=float8", "float8, all that fit": ALL}
DRAWS = 2


def measured(entry: zoo.Entry, enough: float) -> dict[str, dict[str, float]]:
    """By candidate, the error of the gradient relative to float32's, and the share of the FLOPs in float8.

    Args:
        entry: The model.
        enough: Beyond which share of a candidate none is measured that has more.
    """
    model = entry.build(None)
    first = (model.params, *model.inputs)
    draws = [first, *(perturbed(first, seed) for seed in range(1, DRAWS))]
    references = run_gradient(objective(model, model.apply), draws).gradients
    rows: dict[str, dict[str, float]] = {}
    for name, policy in CANDIDATES.items():
        if any(row["share"] > enough for row in rows.values()):
            break
        loss = objective(model, jamp.cast_fn(model.apply, policy))
        report = jamp.report(objective(model, model.apply), *first, policy=policy)
        flops = report.gradient or report.forward
        rows[name] = {
            "gradient_error": gradient_error(run_gradient(loss, draws).gradients, references),
            "share": flops.float8 / max(flops.total, 1),
        }
    return rows


def attempted(entry: zoo.Entry, enough: float) -> dict[str, dict[str, float]] | str:
    """The same, or why the model itself does not run, as published models may not on this jax."""
    try:
        return measured(entry, enough)
    except Exception:
        try:
            model = entry.build(None)
            run_gradient(objective(model, model.apply), [(model.params, *model.inputs)])
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        raise


def main() -> None:
    """Measures what is not measured yet, writes it after each model, and prints a table."""
    # The CPU keeps what the program rounds in float32 otherwise.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.float8_models", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="*", default=[""], metavar="NAME", help="beginnings of names; all by default")
    parser.add_argument("--published", action="store_true", help="the models of `benchmarks.studies.published`")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.out = options.out or RESULTS / f"float8-{'published' if options.published else 'models'}.json"
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = stored.get("models", {})
    entries = published.entries() if options.published else zoo.load()[0]
    enough = 0.5 if options.published else 1.0  # Of most published models nearly all products are chosen.
    wanted = [e for e in entries if e.name.startswith(tuple(options.models)) and e.name not in rows]
    for entry in track(wanted, description="models"):
        rows[entry.name] = attempted(entry, enough)
        write_json(options.out, {"jax": jax.__version__, "draws": DRAWS, "models": rows})
    headings = ("model", *(title for name in CANDIDATES for title in (f"{name}: error %", "FLOPs in float8 %")))
    lines = [
        (name, *(number(row.get(c, {}).get(key), 100, 1) for c in CANDIDATES for key in ("gradient_error", "share")))
        for name, row in rows.items()
        if not isinstance(row, str)
    ]
    print_table("Gradient errors in float8", headings, lines)


if __name__ == "__main__":
    main()
