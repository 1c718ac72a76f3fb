"""Results have the weak types that they have without the transform, so that what meets them is promoted as it was."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

X, H = jnp.ones(3), jnp.ones(3, jnp.float16)
LEVELS = ("O0", "OD:float16", "O1:bfloat16", "O2:bfloat16", "O2:float16", "O3:bfloat16")


def counted(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, either(x)), (0, 0.0))


def either(x):
    return lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0)


PROGRAMS = {
    "literal": lambda x: (jnp.asarray(3.0), jnp.asarray(3), 3j * jnp.asarray(1.0)),
    "full": lambda x: (lax.full((), 1.0), lax.full((3,), 1.0), lax.full((3,), 1.0, jnp.float32)),
    "cond": either,
    "cond of integers": lambda x: lax.cond(x[0] > 0, lambda: 1, lambda: 2),
    "cond of both": lambda x: lax.cond(x[0] > 0, lambda: x[0], lambda: 2.0),
    "switch": lambda x: lax.switch(x[0].astype(int), [lambda: 1.0, lambda: 2.0, lambda: jnp.float32(3)]),
    "scan": lambda x: lax.scan(lambda c, _: (c * 0.5, 1.0), 1.0, None, length=2),
    "scan of both": lambda x: lax.scan(lambda c, a: (c + a, c), 1.0, x),
    "while": counted,
    "map": lambda x: lax.map(lambda a: 2.0, x),
    "vmap": lambda x: jax.vmap(lambda a: lax.cond(a > 0, lambda: 1.0, lambda: 2.0))(x),
    "jit": lambda x: jax.jit(lambda a: (a * 2, 3.0))(1.0),
    "checkpoint": lambda x: jax.checkpoint(lambda a: (jnp.sin(a), 3.0))(1.0),
    "arithmetic": lambda x: jnp.where(x[0] > 0, jnp.exp(either(x)), 1.0) + 2,
    "strong": lambda x: (x.sum(), jnp.float32(2), jnp.float32(2) + either(x)),
}


def out_types(fn, *args):
    return [(aval.shape, aval.dtype, aval.weak_type) for aval in jax.make_jaxpr(fn)(*args).out_avals]


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_as_weak_as_without_the_transform(name):
    expected = out_types(PROGRAMS[name], X)
    for level in LEVELS:
        assert out_types(jamp.cast_fn(PROGRAMS[name], level), X) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x * 2, lambda x: jnp.tanh(x)], ids=["same", "double", "tanh"])
def test_arguments_stay_weak(fn, level):
    x = jnp.asarray(2.0)
    assert out_types(jamp.cast_fn(fn, level), x) == out_types(fn, x) == [((), jnp.float32, True)]


@pytest.mark.parametrize("level", LEVELS)
def test_what_meets_a_result_is_promoted_as_without_the_transform(level):
    assert (jamp.cast_fn(either, level)(X) * H).dtype == jnp.float16


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("source", [either, lambda x: counted(x)[1], lambda x: jnp.asarray(2.0)])
def test_a_reverse_rule_is_given_weak_types(source, level):
    seen = []

    @jax.custom_vjp
    def scaled(scale, x):
        return scale * x

    def backward(residuals, cotangent):
        scale, x = residuals
        seen.append((jax.typeof(scale).weak_type, (scale * x).dtype))
        return (cotangent * x).sum().astype(jnp.float32), scale * cotangent

    scaled.defvjp(lambda scale, x: (scale * x, (scale, x)), backward)

    def loss(x, h):
        return scaled(source(x), h).sum().astype(jnp.float32)

    jax.grad(loss, argnums=1)(X, H)
    jax.grad(jamp.cast_fn(loss, level), argnums=1)(X, H)
    assert set(seen) == {(True, jnp.dtype(jnp.float16))}
