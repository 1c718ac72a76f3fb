"""Layers that repeat are under a checkpoint each, and are traced, differentiated and transposed once."""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jamp
from jamp._compat import inner_jaxprs, open_jaxpr
from jamp.inspect import bytes_by_dtype, residuals
from jamp.transforms._traced import Traced, evaluate
from jamp.transforms.keeping.repeats import Life, copies, crossings
from jamp.transforms.program.heuristics import DEFAULT, Heuristics
from jamp.transforms.program.plan import Step
from tests.transforms.harness import find, trace

DEPTH, WIDTH = 6, 16
X = jax.random.normal(jax.random.key(0), (4, 8, WIDTH))
KEY = jax.random.key(7)
NEVER = Heuristics(repeated=10**6)


def weights(depth: int = DEPTH) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(1), (depth, 4))
    return [
        {name: jax.random.normal(key, (WIDTH, WIDTH)) / 4 for name, key in zip("qkvo", block, strict=True)}
        for block in keys
    ]


def block(w: dict[str, jax.Array], x: jax.Array, mix: Callable[..., jax.Array] = jax.nn.softmax) -> jax.Array:
    """Attention and a norm, each in a scope."""
    with jax.named_scope("norm"):
        y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    with jax.named_scope("attention"):
        scores = mix((y @ w["q"]) @ (y @ w["k"]).swapaxes(-1, -2) / 4)
        return x + jax.nn.gelu(scores @ (y @ w["v"])) @ w["o"]


def network(blocks: Sequence[Any], x: jax.Array, scope: Callable[[int], str] = "block_{}".format) -> jax.Array:
    for index, w in enumerate(blocks):
        with jax.named_scope(scope(index)):
            x = block(w, x)
    return x


def unscoped(blocks: Sequence[Any], x: jax.Array) -> jax.Array:
    for w in blocks:
        x = block(w, x)
    return x


def flat(blocks: Sequence[Any], x: jax.Array) -> jax.Array:
    """Names as libraries without nested scopes make them: no scope holds a layer."""
    for index, w in enumerate(blocks):
        with jax.named_scope(f"norm_{index}"):
            y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        with jax.named_scope(f"attention_{index}"):
            scores = jax.nn.softmax((y @ w["q"]) @ (y @ w["k"]).swapaxes(-1, -2) / 4)
            x = x + jax.nn.gelu(scores @ (y @ w["v"])) @ w["o"]
    return x


def planned_with(function: Callable[..., Any], heuristics: Heuristics, policy: str = "O2:bfloat16") -> Any:
    chosen = jamp.get_policy(policy)

    def call(*args: Any) -> Any:
        traced = Traced(function, args, {})
        return traced.rebuild(evaluate(traced.plan(chosen, heuristics=heuristics), traced.inputs, chosen))

    return call


def checkpoints(function: Callable[..., Any], heuristics: Heuristics = DEFAULT) -> list[Any]:
    return find(trace(planned_with(function, heuristics), weights(), X), "checkpoint", "remat2")


def scope_paths(jaxpr: Any, outer: str = "") -> list[str]:
    """The scopes of all products, from the outermost inwards."""
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        path = f"{outer}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "dot_general":
            found.append("/".join(part for part in path.split("/") if part and part not in ("checkpoint", "remat2")))
        for inner in inner_jaxprs(eqn):
            found += scope_paths(inner, path)
    return found


def seeded(blocks: Sequence[Any], x: jax.Array) -> jax.Array:
    """Dropout as Flax seeds it: with a number for each layer."""
    for index, w in enumerate(blocks):
        key = jax.random.fold_in(KEY, 1_000_003 * index)
        x = block(w, x)
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)
    return x


@pytest.mark.parametrize("function", [network, unscoped, seeded])
def test_layers_share_a_jaxpr(function):
    found = checkpoints(function)
    distinct = {id(eqn.params["jaxpr"]) for eqn in found}
    assert len(found) - len(distinct) >= DEPTH - 3  # What comes in, and what goes out, may differ in its dtype.
    assert len(checkpoints(function, NEVER)) == 1


def test_what_no_scope_holds_is_not_cut():
    assert len(checkpoints(flat)) == len(checkpoints(flat, NEVER))


def test_steps_in_time_share_one_checkpoint_and_the_copies_of_their_weights():
    found = checkpoints(lambda blocks, x: network(blocks[:1] * DEPTH, x))
    assert len(found) == 1


def test_each_layer_keeps_its_own_scopes():
    expected = scope_paths(trace(network, weights(), X))
    assert len(set(expected)) == DEPTH
    for heuristics in (DEFAULT, NEVER):
        assert scope_paths(trace(planned_with(network, heuristics), weights(), X)) == expected


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("function", [network, unscoped, seeded])
def test_numbers_are_the_same(function, policy):
    def gradient(heuristics: Heuristics) -> Any:
        run = planned_with(function, heuristics, policy)
        return jax.grad(lambda blocks, x: run(blocks, x).astype(jnp.float32).sum(), (0, 1))(weights(), X)

    chex.assert_trees_all_equal(gradient(DEFAULT), gradient(NEVER))


@pytest.mark.parametrize("function", [network, unscoped])
def test_no_more_is_kept(function):
    def kept(heuristics: Heuristics) -> int:
        return sum(bytes_by_dtype(residuals(planned_with(function, heuristics), weights(), X)).values())

    assert kept(DEFAULT) <= kept(NEVER)


def test_second_derivatives_and_batches():
    """What is shared is shared between all derivatives."""

    def curvature(run: Callable[..., Any]) -> Any:
        def slope(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: run(weights(3), x).astype(jnp.float32).sum())(x)

        return jax.vmap(lambda v: jax.jvp(slope, (X,), (v,))[1])(jnp.stack([X, jnp.ones_like(X)]))

    chex.assert_trees_all_equal(curvature(planned_with(network, DEFAULT)), curvature(planned_with(network, NEVER)))


def steps_of(function: Callable[..., Any], *args: Any) -> list[Step]:
    return list(Traced(function, args, {}).plan(jamp.get_policy("O2:bfloat16")).steps)


SMALL = jnp.eye(4)
OPERATIONS = (lambda x: x @ SMALL, jnp.sin, jnp.tanh, jnp.exp, jnp.abs, lambda x: x + 1.0)


@settings(deadline=None)
@given(
    rest=st.lists(st.sampled_from(range(len(OPERATIONS))), min_size=4, max_size=8),
    before=st.lists(st.sampled_from(range(len(OPERATIONS))), max_size=5),
    after=st.lists(st.sampled_from(range(len(OPERATIONS))), max_size=5),
    depth=st.integers(1, 6),
)
def test_copies_are_alike_and_apart(rest, before, after, depth):
    layer = [0, *rest]  # With a product.

    def function(x: jax.Array) -> jax.Array:
        for index in [*before, *layer * depth, *after]:
            x = OPERATIONS[index](x)
        return x

    steps = steps_of(function, jnp.ones((4, 4)))
    lives = [Life(index, index + 1, 1, True) for index in range(len(steps))]
    found = copies(steps, lives, (), Heuristics(repeated=4))
    borders = [border for copy in found for border in (copy.start, copy.stop)]
    assert borders == sorted(borders) and all(copy.stop - copy.start >= 4 for copy in found)
    for one in found:
        names = [step.eqn.primitive for step in steps[one.start : one.stop]]
        alike = [
            other
            for other in found
            if names == [step.eqn.primitive for step in steps[other.start : other.stop]] and other != one
        ]
        assert alike, "a copy alone is none"
    if depth > 3:  # The first and the last are given and give other dtypes.
        assert sum(copy.stop - copy.start for copy in found) >= (depth - 2) * len(layer) - 2 * 4


def test_layers_begin_where_the_fewest_bytes_cross():
    def function(x: jax.Array) -> jax.Array:
        for _ in range(4):
            for operation in OPERATIONS[:4]:
                x = operation(x)
        return x

    steps = steps_of(function, jnp.ones((4, 4)))
    lives = [Life(index, index + 1, 2 if index % 4 == 1 else 9, False) for index in range(len(steps))]
    found = copies(steps, lives, (), Heuristics(repeated=4, crossing=1))
    assert [copy.start for copy in found] == [2, 6, 10]
    assert np.array_equal([copy.stop for copy in found], [6, 10, 14])


@given(st.lists(st.tuples(st.integers(-3, 12), st.integers(0, 15), st.integers(1, 9), st.booleans()), max_size=8))
def test_what_crosses_is_what_is_made_before_and_read_after(drawn):
    lives, count = [Life(*each) for each in drawn if each[0] < each[1]], 12
    for period in range(4):
        found = crossings(lives, count, period)
        assert len(found) == count + 1
        for step, (others, every) in enumerate(found):
            there = [life for life in lives if life.made < step and step + period <= min(life.last, count)]
            assert every == sum(life.bytes for life in there)
            assert others == sum(life.bytes for life in there if not life.is_kept)


def test_what_all_layers_read_is_kept_once():
    """A mask that is made of the tokens, as large as an eighth of what the products of a layer make."""

    def masked(blocks: Sequence[Any], x: jax.Array) -> jax.Array:
        mask = jnp.where(x.sum(-1)[:, :, None] > x.sum(-1)[:, None, :], 0.0, -1e9) * jnp.ones((4, 8, 8))
        for w in blocks:
            x = block(w, x, mix=lambda scores: jax.nn.softmax(scores + mask))
        return x

    assert len(checkpoints(masked)) >= DEPTH
