"""Compiled memory and step time of the ways to keep residuals in half; `docs/design/residuals.md` has the results.

Run from the root of the repository::

    python -m benchmarks.residual_forms --batch 16 --time 5 --json out.json
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jamp
from benchmarks.zoo import flax_linen, flax_linen_cnn
from benchmarks.zoo._model import Model, first_class, next_token, normal, tokens
from jamp.transforms.keeping.kept import keep_half


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


def forms(build: Callable[..., Model], batch: int) -> dict[str, Callable[..., Any]]:
    """The functions to compare, by name."""
    full, native = build(None, batch).apply, build(jnp.bfloat16, batch).apply
    policy = jamp.get_policy("O2:bfloat16")
    everything = jamp.cast_fn(full, dataclasses.replace(policy, residuals="all"))
    dots = jax.checkpoint_policies.dots_saveable
    return {
        "float32": full,
        "native": native,
        "native, dots_saveable": jax.checkpoint(native, policy=dots),
        "jamp, all residuals": everything,
        "jamp, dots_saveable": jax.checkpoint(everything, policy=dots),
        "jamp, half, one barrier": jax.checkpoint(everything, policy=keep_half),
        "jamp, half, no barrier": jax.checkpoint(everything, policy=keep_half, prevent_cse=False),
        "jamp (default)": jamp.cast_fn(full, policy),
    }


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time", type=int, default=0, metavar="N", help="time N steps of each")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, build in MODELS.items():
        model = build(None, options.batch)
        found = forms(build, options.batch)
        results[name] = {form: measured(model, found[form], options.time) for form in track(found, description=name)}
    table = Table("model", "form", "temp MB", "of native", "step ms")
    for name, rows in results.items():
        for form, row in rows.items():
            ratio = row["temp_mb"] / rows["native"]["temp_mb"]
            table.add_row(
                name, form, f"{row['temp_mb']:.1f}", f"{ratio:.2f}", f"{row.get('step_ms', float('nan')):.1f}"
            )
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "models": results}, file, indent=1
            )


if __name__ == "__main__":
    main()
