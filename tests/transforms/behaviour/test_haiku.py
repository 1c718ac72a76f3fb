"""Parts of Haiku modules, cast while the whole runs: what they make and change comes back to the whole."""

from collections.abc import Callable
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.transforms.harness import product_dtypes

POLICY = "O2:bfloat16"
X = jax.random.normal(jax.random.key(1), (8, 4))


class Part(hk.Module):
    """Parameters, statistics and random numbers."""

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(16)(x), train)
        x = hk.dropout(hk.next_rng_key(), 0.5, x) if train else x
        return hk.Linear(3)(jax.nn.relu(x))

    def encode(self, x: jax.Array) -> jax.Array:
        """A method other than the call, with parameters of its own."""
        return hk.Linear(3, name="encoder")(x)


def module_itself(cast: Callable[[Any], Any], x: jax.Array, train: bool) -> jax.Array:
    """Made outside, and cast."""
    return cast(Part())(x, train)


def function_around(cast: Callable[[Any], Any], x: jax.Array, train: bool) -> jax.Array:
    """Made inside."""
    return cast(lambda x: Part()(x, train))(x)


def method(cast: Callable[[Any], Any], x: jax.Array, train: bool) -> jax.Array:
    """A bound method, of what runs in float32 too."""
    part = Part()
    return part(x, train) + cast(part.encode)(x)


def twice(cast: Callable[[Any], Any], x: jax.Array, train: bool) -> jax.Array:
    """Two of the same class, one called twice: statistics and keys go on from call to call."""
    shared = cast(Part())
    return shared(x, train) + shared(2 * x, train) + cast(lambda x: Part()(x, train))(x)


def in_a_scan(cast: Callable[[Any], Any], x: jax.Array, train: bool) -> jax.Array:
    """Inside of one of Haiku's own transforms."""
    part = cast(hk.Linear(4))
    return hk.scan(lambda carry, _: (jnp.tanh(part(carry)), None), x, None, length=3)[0]


WRITTEN = [module_itself, function_around, method, twice, in_a_scan]


def transformed(written: Callable[..., jax.Array], cast: Callable[[Any], Any]) -> Any:
    """The part, and a random number and a head in float32 behind it."""

    def whole(x: jax.Array, train: bool = True) -> jax.Array:
        x = written(cast, x, train)
        x = x + jax.random.normal(hk.next_rng_key(), x.shape)
        return hk.Linear(2)(x)

    return hk.transform_with_state(whole)


@pytest.mark.parametrize("written", WRITTEN)
def test_a_part_initializes_and_runs_as_without_cast_fn(written: Callable[..., jax.Array]) -> None:
    plain, cast = (transformed(written, each) for each in (lambda fn: fn, lambda fn: jamp.cast_fn(fn, policy=POLICY)))
    params, state = plain.init(jax.random.key(0), X)
    initialized, _ = cast.init(jax.random.key(0), X)
    chex.assert_trees_all_equal(initialized, params)
    args = (params, state, jax.random.key(2), X)
    expected, got = (jax.jit(each.apply)(*args) for each in (plain, cast))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, atol=0.03, rtol=0.03)
    dtypes = product_dtypes(jax.make_jaxpr(cast.apply)(*args))
    assert ["bfloat16"] * 2 in dtypes and dtypes[-1] == ["float32"] * 2


@pytest.mark.parametrize("written", WRITTEN)
def test_gradients_go_through(written: Callable[..., jax.Array]) -> None:
    def gradient(cast: Callable[[Any], Any]) -> hk.Params:
        whole = transformed(written, cast)
        params, state = whole.init(jax.random.key(0), X)
        return jax.grad(lambda params: jnp.sum(whole.apply(params, state, jax.random.key(2), X)[0] ** 2))(params)

    expected, got = gradient(lambda fn: fn), gradient(lambda fn: jamp.cast_fn(fn, policy=POLICY))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    largest = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(got, expected, atol=0.03 * float(largest))


def test_the_whole_and_a_part_in_it_can_be_cast() -> None:
    whole = transformed(module_itself, lambda fn: jamp.cast_fn(fn, policy="O0"))
    params, state = whole.init(jax.random.key(0), X)
    outer = jamp.cast_fn(lambda *args: whole.apply(*args)[0], policy=POLICY)
    expected = whole.apply(params, state, jax.random.key(2), X)[0]
    chex.assert_trees_all_close(outer(params, state, jax.random.key(2), X), expected, atol=0.05)
