"""Outside of `jax.jit`, loops, branches and calls are compiled once, and no others are taken for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp

X, W = jnp.ones(4), 2 * jnp.eye(4)


def jitted(by: Any, w: Any, x: Any) -> Any:
    return jax.jit(lambda x: jnp.minimum(x @ w, 64) * by)(x)


# Small whole numbers, so that half is exact.
PROGRAMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "counted": lambda by, w, x: lax.fori_loop(0, 2, lambda i, x: x @ w + by * i, x),
    "scanned": lambda by, w, x: lax.scan(lambda x, _: (x @ w + by, x), x, None, 2),
    "scanned over": lambda by, w, x: lax.scan(lambda x, y: (x @ w + y, x), x, jnp.zeros((2, 4)) + by),
    "started": lambda by, w, x: lax.scan(lambda x, _: (x @ w, None), x * by, None, 2)[0],
    "started by it alone": lambda by, w, x: lax.fori_loop(0, 2, lambda i, y: (y * x) @ w, by + 0 * x),
    "as long as": lambda by, w, x: lax.while_loop(lambda x: x.sum() < 30, lambda x: x @ w + by, x),
    "bounded": lambda by, w, x: lax.while_loop(lambda x: (x < 8 * by).all(), lambda x: x @ w, x),
    "chosen": lambda by, w, x: lax.cond(x.sum() > jnp.max(by), lambda x: x @ w, lambda x: x @ w + by, x),
    "chosen by it": lambda by, w, x: lax.cond(jnp.sum(by) > 2, lambda x: x @ w, lambda x: -x, x),
    "called": jitted,
    "called in a loop": lambda by, w, x: lax.fori_loop(0, 2, lambda i, x: jitted(by, w, x), x),
    "loop in a call": lambda by, w, x: jax.jit(lambda x: lax.fori_loop(0, 2, lambda i, x: x @ w + by, x))(x),
    "in float32": lambda by, w, x: lax.scan(lambda n, _: (n + by, n), jnp.zeros(4), None, 3)[0] + x @ w,
    "in a checkpoint": lambda by, w, x: jax.checkpoint(lambda x: lax.fori_loop(0, 2, lambda i, x: x @ w + by, x))(x),
}  # fmt: skip
CONSTANTS: dict[str, Callable[[int], Any]] = {
    "number": lambda value: value,
    "float": float,
    "number of NumPy's": np.float32,
    "array of NumPy's": lambda value: np.full(4, value, np.float32),
    "integers of NumPy's": lambda value: np.full(4, value),
    "array": lambda value: jnp.full(4, float(value)),
}
POLICIES = ("O2:bfloat16", "O1:float16", "OD:bfloat16", "O2:bfloat16,residuals=all")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_told_apart(name: str, constant: str) -> None:
    for value, policy in itertools.product((1, 2, 1), POLICIES):
        by = CONSTANTS[constant](value)

        def program(w: Any, x: Any, by: Any = by) -> Any:
            return PROGRAMS[name](by, w, x)

        cast, expected = jamp.cast_fn(program, policy), program(W, X)
        chex.assert_trees_all_equal(cast(W, X), expected)
        chex.assert_trees_all_equal(jax.jit(cast)(W, X), expected)
        (mapped,) = jax.vmap(lambda x, cast=cast: (cast(W, x),))(X[None])
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], mapped), expected)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "in a checkpoint"])
def test_they_compile_nothing_once_they_ran(caplog: pytest.LogCaptureFixture, name: str) -> None:
    cast = jamp.cast_fn(lambda by, w, x: PROGRAMS[name](by, w, x), "O2:bfloat16")
    for by in (1.0, 2.0):
        cast(by, W, X)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for by in (1.0, 2.0):
            jax.block_until_ready(cast(by, W, X))
    messages = (record.getMessage() for record in caplog.records)
    assert not [message for message in messages if message.startswith("Compiling")]


def test_loops_with_effects_run_each_time() -> None:
    seen: list[float] = []

    def step(i: Any, x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x[0])), x, ordered=True)
        return x @ W

    cast = jamp.cast_fn(lambda x: lax.fori_loop(0, 2, step, x), "O2:bfloat16")
    for _ in range(2):
        jax.block_until_ready(cast(X))
    jax.effects_barrier()
    assert seen == [1.0, 2.0, 1.0, 2.0]


def test_loops_of_two_layers_have_one_jaxpr() -> None:
    def layer(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros(4), x)[1]

    def stacked(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    jaxpr = jax.make_jaxpr(jamp.cast_fn(stacked, "O2:bfloat16"))([W, W, W], jnp.ones((3, 4)))
    _, first, second = (eqn.params["jaxpr"] for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    assert first is second  # That before them is given float32.
