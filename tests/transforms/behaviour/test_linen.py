"""Parts of Flax Linen modules, cast while the whole runs: what they make and change comes back to the whole."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.transforms.harness import product_dtypes

POLICY = "O2:bfloat16"
X = jax.random.normal(jax.random.key(1), (8, 4))
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(3)}


class Part(nn.Module):
    """Parameters, statistics, random numbers, and something sown."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        self.sow("intermediates", "normed", x)
        return nn.Dense(3)(nn.relu(nn.Dropout(0.5, deterministic=not train)(x)))


class Whole(nn.Module):
    """A part and a head in float32; `cast` casts the part."""

    cast: Callable[[Any], Any]

    def setup(self) -> None:
        """Parts."""
        self.part, self.head = Part(), nn.Dense(2)

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        return self.head(self.cast(self.part)(x, train=train))


class Decorated(nn.Module):
    """The same by a decorator on a method."""

    def setup(self) -> None:
        """Parts."""
        self.part, self.head = Part(), nn.Dense(2)

    @jamp.cast_fn(policy=POLICY)
    def encode(self, x: jax.Array, train: bool) -> jax.Array:
        """In half."""
        return self.part(x, train=train)

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        return self.head(self.encode(x, train))


def handed_over(part: Part) -> Any:
    """The part as an argument of a function."""
    call = jamp.cast_fn(lambda module, *args, **kwargs: module(*args, **kwargs), POLICY)
    return functools.partial(call, part)


FORMS = {
    "a module": Whole(lambda part: jamp.cast_fn(part, POLICY)),
    "a method": Whole(lambda part: jamp.cast_fn(part.__call__, POLICY)),
    "handed over": Whole(
        lambda part: lambda *a, **k: jamp.cast_fn(lambda m, *a, **k: m(*a, **k), POLICY)(part, *a, **k)
    ),
    "a decorator": Decorated(),
}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("model", FORMS.values(), ids=FORMS)
def test_a_part_is_cast_while_the_whole_runs(model: nn.Module) -> None:
    plain = Whole(lambda part: part)
    variables = model.init(RNGS, X)
    chex.assert_trees_all_equal(variables["params"], plain.init(RNGS, X)["params"])
    mutable = ["batch_stats", "intermediates"]
    y, state = model.apply(variables, X, rngs=RNGS, mutable=mutable)
    expected, expected_state = plain.apply(variables, X, rngs=RNGS, mutable=mutable)
    chex.assert_trees_all_equal_shapes_and_dtypes((y, state), (expected, expected_state))
    chex.assert_trees_all_close((y, state), (expected, expected_state), atol=0.03)

    def loss(params: Any) -> jax.Array:
        y, _ = model.apply({**variables, "params": params}, X, rngs=RNGS, mutable=mutable)
        return jnp.sum(y**2)

    dtypes = product_dtypes(jax.make_jaxpr(loss)(variables["params"]))
    assert dtypes == [["bfloat16"] * 2, ["bfloat16"] * 2, ["float32"] * 2]
    chex.assert_tree_all_finite(jax.jit(jax.grad(loss))(variables["params"]))


def test_a_function_around_a_part_that_initializes_says_what_to_write() -> None:
    model = Whole(lambda part: jamp.cast_fn(lambda x, train: part(x, train), POLICY))
    with pytest.raises(ValueError, match=r"jamp.cast_fn\(self.part, policy\)\(x\)"):
        model.init(RNGS, X)
    variables = Whole(lambda part: part).init(RNGS, X)
    chex.assert_tree_all_finite(model.apply(variables, X, train=False))
