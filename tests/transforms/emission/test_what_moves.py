"""Rules that are told which operands are differentiated, and keep what these need alone, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp


@jax.custom_vjp
def product(w: Any, x: Any) -> Any:
    return w * x


def forward(w: Any, x: Any) -> Any:
    return w.value * x.value, (w.value if x.perturbed else None, x.value if w.perturbed else None)


def backward(kept: Any, g: Any) -> Any:
    w, x = kept
    return None if x is None else g * x, None if w is None else g * w


product.defvjp(forward, backward, symbolic_zeros=True)
jitted = jax.jit(product)
both = jax.jit(lambda w, x: (product(w, x), product(w, x) + 1))
W, V, X = jnp.full(4, 2.0), jnp.full(4, 5.0), jnp.full(4, 3.0)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda c, _: (c + product(w, x), None), jnp.zeros(4), None, 2)[0]


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "alone": product,
    "jit": jitted,
    "one result of two": lambda w, x: both(w, x)[0],
    "jit made anew": lambda w, x: jax.jit(lambda w, x: product(w, x) * 1.5)(w, x),
    "scan": scanned,
    "scan of a jit": lambda w, x: lax.scan(lambda c, _: (c + jitted(w, x), None), jnp.zeros(4), None, 2)[0],
    "jit of a scan": lambda w, x: jax.jit(scanned)(w, x),
    "branch": lambda w, x: lax.cond(x[0] > 0, product, lambda w, x: x * w, w, x),
    "checkpoint": jax.checkpoint(product),
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("policy", ["O2:bfloat16", "O1:float16", "OD:bfloat16", "O2:bfloat16,residuals=all"])
@pytest.mark.parametrize("place", PLACES)
def test_one_differentiation_after_another(place: str, policy: str) -> None:
    cast = jamp.cast_fn(lambda w, x: PLACES[place](w, x).sum(), policy)
    for moving in (0, 1, (0, 1), 0, 1):
        expected = jax.grad(lambda w, x: (scanned if "scan" in place else lambda w, x: w * x)(w, x).sum(), moving)(W, X)
        expected = jax.tree.map(lambda x: x * (1.5 if place == "jit made anew" else 1.0), expected)
        chex.assert_trees_all_equal(jax.grad(cast, moving)(W, X), expected)
        chex.assert_trees_all_equal(jax.jit(jax.grad(cast, moving))(W, X), expected)


def test_layers_of_which_one_is_given_what_stands_still() -> None:
    cast = jamp.cast_fn(
        lambda w, v, x: (scanned(w, x * 1.0) + scanned(v, lax.stop_gradient(x * 1.0))).sum(), "O2:bfloat16"
    )
    found = jax.grad(cast, (0, 1, 2))(W, V, X)
    np.testing.assert_array_equal(jnp.stack(found), jnp.stack([2 * X, 2 * X, 2 * W]))
