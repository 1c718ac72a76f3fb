"""Compiled memory and step time of the ways to keep residuals in half; `docs/design/residuals.md` has the results.

Run from the root of the repository::

    python -m benchmarks.studies.residual_forms --batch 16 --time 5 --json out.json
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.progress import track

import jamp
from benchmarks.candidates import Candidate, dots_saveable, of_jamp
from benchmarks.files import write_json
from benchmarks.models import Model, first_class, next_token, normal, tokens
from benchmarks.tables import BREAK, number, print_table
from benchmarks.zoo import flax_linen, flax_linen_cnn


def resnet(dtype: Any, batch: int) -> Model:
    """The zoo's residual network at 64 x 64."""
    norm = partial(nn.BatchNorm, use_running_average=False, dtype=dtype)
    module, image = flax_linen_cnn.ResNet(norm, dtype), normal(batch, 64, 64, 3)
    variables = flax_linen_cnn.ResNet(partial(norm, dtype=None)).init(jax.random.key(0), image[:1])

    def apply(params: Any, stats: Any, image: jax.Array) -> Any:
        return module.apply({"params": params, "batch_stats": stats}, image, mutable=["batch_stats"])

    return Model(apply, variables["params"], (variables["batch_stats"], image), first_class)


def language_model(layers: str, dtype: Any, batch: int) -> Model:
    """The zoo's language model, its layers unrolled or scanned."""
    module, ids = flax_linen.LanguageModel(dtype, 4, layers), tokens(batch, flax_linen.LENGTH, flax_linen.VOCABULARY)
    params = flax_linen.LanguageModel(None, 4, layers).init(jax.random.key(0), ids[:1])
    return Model(module.apply, params, (ids,), next_token)


MODELS = {
    "ResNet": resnet,
    "LM": partial(language_model, "unrolled"),
    "LM, scanned": partial(language_model, "scanned"),
}


def forms() -> list[Candidate]:
    """The forms to compare."""
    everything = of_jamp("O2:bfloat16,residuals=all").wrap
    one = partial(jax.checkpoint, policy=policy_of_jamp())
    return [
        Candidate("float32"),
        Candidate("native", dtype=jnp.bfloat16),
        Candidate("native, dots_saveable", dots_saveable, jnp.bfloat16),
        Candidate("jamp, all residuals", everything),
        Candidate("jamp, dots_saveable", lambda apply: dots_saveable(everything(apply))),
        Candidate("jamp, half, one barrier", lambda apply: one(everything(apply))),
        Candidate("jamp, half, no barrier", lambda apply: one(everything(apply), prevent_cse=False)),
        of_jamp("O2:bfloat16", "jamp (default)"),
    ]


def policy_of_jamp() -> Callable[..., bool]:
    """The policy of the checkpoints that `jamp.cast_fn` writes, as the trace of one has it."""
    x = jnp.ones((2, 2))
    jaxpr = jax.make_jaxpr(jamp.cast_fn(lambda x: jnp.tanh(x @ x), "O2:bfloat16"))(x)
    return next(eqn.params["policy"] for eqn in jaxpr.eqns if "policy" in eqn.params)


def measured(model: Model, apply: Callable[..., Any], repeats: int) -> dict[str, float]:
    """Temporary memory of a compiled gradient step in MB, and its fastest time in ms."""
    step = jax.jit(jax.grad(lambda params: model.loss(apply(params, *model.inputs), *model.inputs)))
    compiled = step.lower(model.params).compile()
    found = {"temp_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6}
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(model.params))
        times.append(time.perf_counter() - start)
    return found | ({"step_ms": min(times) * 1e3} if times else {})


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.residual_forms", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time", type=int, default=0, metavar="N", help="time N steps of each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, build in MODELS.items():
        models = {dtype: build(dtype, options.batch) for dtype in (None, jnp.bfloat16)}
        for form in track(forms(), description=name):
            apply = form.wrap(models[form.dtype].apply)
            results.setdefault(name, {})[form.name] = measured(models[None], apply, options.time)
    print_results(results)
    if options.json:
        device = jax.devices()[0].device_kind
        write_json(options.json, {"device": device, "jax": jax.__version__, "models": results})


def print_results(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints a row for each model and form."""
    lines = []
    for name, rows in results.items():
        for form, row in rows.items():
            ratio = row["temp_mb"] / rows["native"]["temp_mb"]
            lines.append(
                (name, form, number(row["temp_mb"], digits=1), number(ratio), number(row.get("step_ms"), digits=1))
            )
        lines.append(BREAK)
    print_table("Forms of residuals", ("model", "form", "temp MB", "of native", "step ms"), lines, names=2)


if __name__ == "__main__":
    main()
