"""What loss scaling costs: unscaling, checking and skipping as a share of the train step, beside the peers.

    python -m benchmarks.studies.scaling [--rounds 30] [--out results.json]

Every way trains the same float32 models with the same Adam, so whatever a step takes longer than the plain one is the
price of the scaling. It is proportional to the weights: one read of the gradients, for the check, and with `inner` the
updates written and read once, because a conditional stands between the optimizer and what applies them. A step is
proportional to weights times batch. Ways take turns, and the smallest time counts: other work on the machine only ever
adds. On CPU it is the time that all threads of this process were busy, because that of the clock depends on who else is
there.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from rich.progress import track

import jamp
from benchmarks import hlo
from benchmarks.files import write_json
from benchmarks.tables import number, print_table
from benchmarks.timing import clock

Step = Callable[[Any, Any, jax.Array], tuple[Any, Any]]  # (params, state, x) to the new (params, state).

ADAM = optax.adam(1e-3)
SCALE = 2.0**10


# ---------------------------------------------------------------- models: a loss of parameters and data


def mlp_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.nn.relu(x @ w)
    return (x**2).mean()


def conv_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return (x**2).mean()


def models() -> dict[str, tuple[Callable, list[jax.Array], jax.Array]]:
    square = [jnp.full((1024, 1024), 1e-3)] * 3
    kernels = [jnp.full((3, 3, i, o), 1e-2) for i, o in [(3, 32), (32, 64), (64, 64)]]
    return {
        "conv net, 57 k weights": (conv_loss, kernels, jnp.ones((8, 32, 32, 3))),
        "MLP, 3.1 M weights, batch 2048": (mlp_loss, square, jnp.ones((2048, 1024))),
        "MLP, 3.1 M weights, batch 512": (mlp_loss, square, jnp.ones((512, 1024))),
        "MLP, 3.1 M weights, batch 8": (mlp_loss, square, jnp.ones((8, 1024))),
    }


# ---------------------------------------------------------------- ways to scale


def plain(loss: Callable) -> tuple[Any, Step]:
    return ADAM, with_optax(jax.value_and_grad(loss), ADAM)


def apply_if_finite(loss: Callable) -> tuple[Any, Step]:
    tx = optax.apply_if_finite(ADAM, 1000)
    return tx, with_optax(jax.value_and_grad(loss), tx)


def with_optax(value_and_grad: Callable, tx: Any) -> Step:
    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(value_and_grad(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state

    return step


def jamp_cond(loss: Callable, tx: Any = None) -> tuple[Any, Step]:
    tx = tx or jamp.loss_scaled(jamp.DynamicLossScale(SCALE), inner=ADAM)

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        _, grads = jamp.scaled_value_and_grad(loss, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


def jamp_link(loss: Callable) -> tuple[Any, Step]:
    return jamp_cond(loss, optax.chain(jamp.loss_scaled(jamp.DynamicLossScale(SCALE)), ADAM))


def with_select(library: Any) -> Callable[[Callable], tuple[Any, Step]]:
    """The manual form of jmp, whose names jamp shares: compute both, select."""

    def way(loss: Callable) -> tuple[Any, Step]:
        init = lambda p: (library.DynamicLossScale(jnp.float32(SCALE)), ADAM.init(p))  # noqa: E731

        def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
            scale, inner = state
            grads = scale.unscale(jax.grad(lambda p: scale.scale(loss(p, x)))(params))
            finite = library.all_finite(grads)
            updates, new_inner = ADAM.update(grads, inner, params)
            new = optax.apply_updates(params, updates), new_inner
            params, inner = library.select_tree(finite, new, (params, inner))
            return params, (scale.adjust(finite), inner)

        return optax.GradientTransformation(init, None), step

    return way


def flax_dynamic_scale(loss: Callable) -> tuple[Any, Step]:
    init = lambda p: (DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0)), ADAM.init(p))  # noqa: E731

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        scale, finite, _, grads = state[0].value_and_grad(loss)(params, x)
        updates, inner = ADAM.update(grads, state[1], params)
        new = optax.apply_updates(params, updates), inner
        params, inner = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state[1]))
        return params, (scale, inner)

    return optax.GradientTransformation(init, None), step


WAYS: dict[str, Callable[[Callable], tuple[Any, Step]]] = {
    "optax.adam alone": plain,
    "the same once more (noise)": plain,
    "jamp.loss_scaled(scale, inner)": jamp_cond,
    "jamp.loss_scaled in a chain": jamp_link,
    "jamp by hand, select_tree": with_select(jamp),
    "jmp, select_tree": with_select(jmp),
    "flax DynamicScale, where": flax_dynamic_scale,
    "optax.apply_if_finite (no scale)": apply_if_finite,
}

# What has to be done with gradients before an optimizer can take them. jamp's optimizer divides as it reads.
CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "jamp.loss_scaled(scale, inner)": lambda g, s: jamp.all_finite(g),
    "jamp by hand, select_tree": lambda g, s: (u := jamp.StaticLossScale(s).unscale(g), jamp.all_finite(u)),
    "jmp, select_tree": lambda g, s: (u := jmp.StaticLossScale(s).unscale(g), jmp.all_finite(u)),
    "flax DynamicScale, where": lambda g, s: (
        u := jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) / s, g),
        jnp.array([jnp.all(lax.is_finite(x)) for x in jax.tree.leaves(u)]).all(),
    ),
    "optax.apply_if_finite (no scale)": lambda g, s: jnp.array([jnp.isfinite(x).all() for x in g]).all(),
}


# ---------------------------------------------------------------- measures


def step_times(loss: Callable, params: Any, x: jax.Array, rounds: int) -> dict[str, float]:
    """Smallest time of a train step in each way, in ms."""
    steps, carries = {}, {}
    for name, way in WAYS.items():
        tx, step = way(loss)
        steps[name] = jax.jit(step, donate_argnums=(0, 1))
        carries[name] = jax.tree.map(jnp.copy, (params, tx.init(params)))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds + 1):  # The first round compiles.
        for name, step in steps.items():
            start = clock()
            carries[name] = jax.block_until_ready(step(*carries[name], x))
            times[name].append(1e3 * (clock() - start))
    return {name: min(values[1:]) for name, values in times.items()}


def memory_passes(fun: Callable, grads: Any) -> float:
    """Bytes that the compiled function reads and writes, in units of one read of the gradients."""
    compiled = jax.jit(fun).lower(grads, jnp.float32(SCALE)).compile()
    return hlo.traffic(compiled.as_text()) / sum(g.nbytes for g in jax.tree.leaves(grads))


def bytes_per_weight() -> dict[str, float]:
    """Bytes of a bfloat16 weight and of what the optimizer keeps for it."""
    n = 1024
    params = jnp.zeros(n, jnp.bfloat16)

    def total(tx: optax.GradientTransformation) -> float:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, jax.eval_shape(tx.init, params)))) // n

    sgd, adam = optax.sgd(0.1), ADAM
    return {
        "sgd": total(sgd),
        **{f"sgd, master_weights({s!r})": total(jamp.master_weights(sgd, storage=s)) for s in ("float32", "split")},
        **{f"adam, master_weights({s!r})": total(jamp.master_weights(adam, storage=s)) for s in ("float32", "split")},
        "adam, master_weights('split') in loss_scaled": total(
            jamp.loss_scaled(jamp.DynamicLossScale(SCALE), jamp.master_weights(adam, storage="split"))
        ),
    }


def measure(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "step_ms": {}}
    for name, (loss, params, x) in track(models().items(), description="Train steps"):
        results["step_ms"][name] = step_times(loss, params, x, rounds)
    grads = [jnp.ones((1024, 1024))] * 2
    results["memory_passes"] = {name: memory_passes(check, grads) for name, check in CHECKS.items()}
    results["bytes_per_weight"] = bytes_per_weight()
    return results


def print_results(results: dict[str, Any]) -> None:
    kept = "\n".join(f"{name}: {size:g}" for name, size in results["bytes_per_weight"].items())
    lines = []
    for name in WAYS:
        cells = []
        for times in results["step_ms"].values():
            base = times["optax.adam alone"]
            cells.append(f"{times[name]:.1f} ({100 * (times[name] / base - 1):+.1f} %)")
        lines.append((name, *cells, number(results["memory_passes"].get(name), digits=1)))
    print_table(
        f"Cost of loss scaling on {results['device']}",
        ("way", *(f"{model}\nms (over plain)" for model in results["step_ms"]), "passes over\nthe gradients"),
        lines,
        caption=f"Bytes per bfloat16 weight, with state:\n{kept}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="train steps of each way and model")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: expected 1 or more")
    results = measure(args.rounds)
    print_results(results)
    if args.out:
        write_json(args.out, results)


if __name__ == "__main__":
    main()
