"""Where float32 that was computed from half data is rounded again, and where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.transforms._traced import Traced
from jamp.transforms.analysis.regimes import plain_scope


def cutoff(r):
    """Which ends flat: the terms of its derivative cancel there."""
    return 1 - 28 * r**6 + 48 * r**7 - 21 * r**8


def energy(cell, x, w):
    """Of displacements in a periodic cell, which a cutoff ends."""
    distances = jnp.linalg.norm(x - jnp.round(x) @ cell, axis=-1)
    return jnp.sum(jnp.tanh((jnp.arange(1.0, 9) * cutoff(distances)[:, None]) @ w))


def stress(w, x):
    return jax.grad(energy)(jnp.eye(3), x, w)


def named(w, x):
    def inside(cell):
        with jax.named_scope("cell"):
            return energy(cell, x, w)

    return jax.grad(inside)(jnp.eye(3))


@pytest.mark.parametrize("fn", [stress, named, jax.jit(stress), jax.checkpoint(stress)])
def test_terms_of_a_derivative_that_cancel_are_added_in_float32(fn, key):
    """The derivative of a scope belongs to it; rounded where it begins, each term was off, and the sum by 3 to 8 %."""
    keys = jax.random.split(key, 4)
    x = jax.random.uniform(keys[0], (256, 3), minval=-0.5, maxval=0.5)
    near = jax.random.uniform(keys[1], (256, 1), minval=0.85)  # The end of the cutoff, that is.
    x = near * x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x + jnp.round(jax.random.uniform(keys[2], (256, 3), minval=-1.4, maxval=1.4))
    w = jax.random.normal(keys[3], (8, 8))
    expected = fn(w, x)
    off, careful = (
        jnp.linalg.norm(jamp.cast_fn(fn, level)(w, x) - expected) for level in ("O2:bfloat16", "O1:bfloat16")
    )
    assert off < 1.2 * careful < 0.1 * jnp.linalg.norm(expected)


def test_scopes_are_those_of_the_program():
    def scoped(x):
        with jax.named_scope("block"):
            return jnp.sum(jnp.exp(x @ x))

    plan = Traced(jax.grad(scoped), (jnp.ones((4, 4)),), {}).plan(jamp.get_policy("O2:bfloat16"))
    found = {flow.scope for step in plan.steps for flow in step.out if flow is not None}
    assert found <= {"", "block"}
    assert any("transpose(" in str(step.eqn.source_info.name_stack) for step in plan.steps)
    assert plain_scope("transpose(jvp(Model))/Dense_0") == "Model/Dense_0"


@pytest.mark.parametrize("level", ["O2:bfloat16", "O2:float16"])
def test_what_leaves_its_scope_is_rounded(level):
    def program(x, w):
        with jax.named_scope("norm"):
            raised = jnp.exp(x @ w)
        with jax.named_scope("next"):
            return (raised * raised) @ w

    plan = Traced(program, (jnp.ones((4, 4)), jnp.eye(4)), {}).plan(jamp.get_policy(level))
    assert plan.steps[-2].out[0].dtype == jamp.get_policy(level).compute_dtype
    assert np.array_equal(jamp.cast_fn(program, level)(jnp.zeros((4, 4)), jnp.eye(4)), np.ones((4, 4)))


@pytest.mark.parametrize("level", ["O2:bfloat16", "O2:float16"])
def test_the_name_of_an_einsum_is_no_scope(level):
    """What only decides is compared as it is computed: whether a ray meets a triangle."""

    def program(one, other, rays):
        across = jnp.cross(rays[:, None], other[None])
        size = jnp.einsum("ti,rti->rt", one, across)
        left = (rays[:, None] * across).sum(-1) / size
        right = jnp.einsum("ri,rti->rt", rays, jnp.cross(rays[:, None], one[None])) / size
        return jnp.where(left + right < 1, 1.0, 0.0)

    given = jnp.linspace(-1, 3, 12).reshape(4, 3), jnp.cos(jnp.arange(12.0)).reshape(4, 3), jnp.eye(3)
    plan = Traced(program, given, {}).plan(jamp.get_policy(level))
    (total,) = (step for step in plan.steps if step.eqn.primitive.name == "add")
    assert total.out[0].dtype == jnp.float32
