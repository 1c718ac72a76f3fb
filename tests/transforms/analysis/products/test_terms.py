"""Sums of multiples of one value are made of multiples of the same value, however half it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._compat import open_jaxpr
from jamp.transforms.analysis.products.terms import terms

sixth, seventh, eighth = (jax.jit(lambda r, n=n: r**n) for n in (6, 7, 8))

# Each is flat where r is 1: the terms of its derivative cancel there.
CUTOFFS = {
    "written": lambda r: 1 - 28 * r**6 + 48 * r**7 - 21 * r**8,
    "jitted": jax.jit(lambda r: 1 - 28 * r**6 + 48 * r**7 - 21 * r**8),
    "terms jitted": lambda r: 1 - 28 * sixth(r) + 48 * seventh(r) - 21 * eighth(r),
    "chosen": lambda r: jnp.where(r < 1, 1 - 28 * r**6 + 48 * r**7 - 21 * r**8, 0.0),
    "terms chosen": lambda r: (
        1 - jnp.where(r < 1, 28 * r**6, 0.0) + jnp.where(r < 1, 48 * r**7, 0.0) - jnp.where(r < 1, 21 * r**8, 0.0)
    ),
    "factored": lambda r: 1 + r**6 * (-28 + r * (48 - 21 * r)),
    "Horner's scheme": lambda r: jnp.polyval(jnp.array([-21.0, 48, -28, 0, 0, 0, 0, 0, 1]), r, unroll=16),
    "powers": lambda r: 1 - 28 * jnp.power(r, 6.0) + 48 * jnp.power(r, 7.0) - 21 * jnp.power(r, 8.0),
    "stacked": lambda r: jnp.stack([1 - 28 * r**6, 48 * r**7, -21 * r**8]).sum(0),
    "side by side": lambda r: (
        jnp.concatenate([1 - 28 * r**6, 48 * r**7, -21 * r**8]).reshape(3, *r.shape).sum(0)
    ),
    "of one point": jax.vmap(jax.vmap(lambda r: 1 - 28 * r**6 + 48 * r**7 - 21 * r**8)),
    "divided": lambda r: (1 - 28 * r**6 + 48 * r**7 - 21 * r**8) / 3,
}  # fmt: skip


def forces(cutoff, w, x, v):
    """The derivative of a layer behind a cutoff, which a layer reads."""
    return jax.grad(lambda x: jnp.sum(jnp.tanh(cutoff(x) @ w)))(x) @ v


def beside(cutoff, w, x, v):
    """The same where the layer reads the positions as well, so that the sum has a term of its own."""
    both = jnp.concatenate([w, w])
    return jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.concatenate([cutoff(x), x], -1) @ both)))(x) @ v


def second(cutoff, w, x, v):
    """A loss of forces, differentiated."""
    return jax.grad(lambda w: jnp.sum(jnp.tanh(forces(cutoff, w, x, v))))(w)


def outside(cutoff, w, x, v):
    return jnp.sum(jnp.tanh(forces(cutoff, w, x, v)))


def error(fn, level, w, x, v):
    """Of a program, or of the derivative of one with a single result, relative to float32."""
    differentiated = jax.grad if fn(w, x, v).ndim == 0 else lambda f: f
    expected = differentiated(fn)(w, x, v)
    return jnp.linalg.norm(differentiated(jamp.cast_fn(fn, level))(w, x, v) - expected) / jnp.linalg.norm(expected)


@pytest.mark.parametrize("level", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("program", [forces, beside, second, outside])
@pytest.mark.parametrize("form", CUTOFFS)
def test_a_cotangent_is_rounded_once(form, program, level, key):
    """Each of its multiples rounded, the derivative was off by 23 to 105 %."""
    keys = jax.random.split(key, 3)
    x = jax.random.uniform(keys[0], (256, 3), minval=0.8)
    w, v = jax.random.normal(keys[1], (3, 8)), jax.random.normal(keys[2], (3, 16))

    def fn(w, x, v):
        return program(CUTOFFS[form], w, x, v)

    careful = error(fn, f"OD:{level[3:]}", w, x, v)
    assert careful < 0.04
    # Where XLA leaves roundings out, those of the careful level are fewer.
    assert error(fn, level, w, x, v) < max(1.6 * careful, 0.01)


def found(fn, *args):
    """The results, in order, of all equations that are found, and those that are not."""
    jaxpr = open_jaxpr(jax.make_jaxpr(fn)(*args))
    among = terms(jaxpr)
    return "".join("*" if eqn.outvars[0] in among else "-" for eqn in jaxpr.eqns)


X = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: x * 3.0 + x * y, "***"),
        (lambda x, y: x * 3.0 - y * 3.0, "---"),
        (lambda x, y: x + x * y, "**"),
        (lambda x, y: x / y - x / 3.0, "***"),
        (lambda x, y: y / x - 3.0 / x, "---"),  # Multiples of y, and of nothing.
        (lambda x, y: x * 3.0 + jnp.tanh(x) * y, "----"),
        (lambda x, y: (x * 3.0 + y) - x * y, "****"),  # A term between the two.
        (lambda x, y: (x * 3.0 + y) * y - x * y, "*****"),  # A sum times y.
        (lambda x, y: -(x * y) + lax.reshape(x * 2.0, (4, 4)), "****"),
        (lambda x, y: jnp.sum(x * y) + jnp.sum(x), "----"),
        (lambda x, y: (x @ y) * 2.0 + (x @ y) * 3.0, "-----"),  # Two products, which are one to XLA alone.
        (lambda x, y: jnp.sin(x * y * 2.0) + x, "----"),
    ],
)
def test_what_is_a_multiple_of_the_same(fn, expected):
    assert found(fn, X, X) == expected


def test_a_shared_factor_stays_as_it_is():
    """What all terms are multiples of may be half, made of others as it is."""
    jaxpr = open_jaxpr(jax.make_jaxpr(lambda x, y: (h := jnp.tanh(x * y)) * 3.0 + h * y)(X, X))
    multiple, activation, *others = (eqn.outvars[0] for eqn in jaxpr.eqns)
    assert terms(jaxpr) == set(others)
    assert {multiple, activation}.isdisjoint(others)


def added_by_scan(x, y):
    return lax.scan(lambda total, power: (total - y * x**power, None), x, jnp.arange(2.0))[0]


def added_by_while(x, y):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, lax.reshape(s[1], x.shape) + y / s[0]), (1.0, x))[1]


def in_loop(fn):
    """As `found`, of the body of a loop that is an equation of a function."""
    jaxpr = open_jaxpr(jax.make_jaxpr(fn)(X, X))
    (loop,) = (eqn for eqn in jaxpr.eqns if "jaxpr" in eqn.params or "body_jaxpr" in eqn.params)
    among = terms(jaxpr)
    body = open_jaxpr(loop.params.get("jaxpr") or loop.params["body_jaxpr"])
    return {eqn.primitive.name for eqn in body.eqns if eqn.outvars[0] in among}


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (added_by_scan, {"mul", "sub"}),
        (added_by_while, {"div", "add"}),
        (lambda x, y: lax.scan(lambda t, z: (t + x * z, None), x, y)[0], {"mul", "add"}),
        (lambda x, y: lax.scan(lambda t, z: (t + t * z, None), x, y)[0], {"mul", "add"}),  # Of the carry itself.
        (lambda x, y: lax.scan(lambda t, z: (t + jnp.sin(x) * z, None), x, y)[0], set()),
        (lambda x, y: lax.scan(lambda t, z: (x * z, t + 1), x, y)[0], set()),  # Nothing is added up.
        (lambda x, y: lax.scan(lambda t, z: (t + 0.3 * z, None), x[0], y)[0], set()),
        # Layers of a residual stream: a product in each is as far off as the stream.
        (lambda x, y: lax.scan(lambda t, w: (t + x * jnp.tanh(t @ w), None), x, y[None])[0], set()),
        (lambda x, y: lax.scan(lambda t, w: (t + x * jax.jit(jnp.dot)(t, w), None), x, y[None])[0], set()),
    ],
)
def test_what_a_loop_adds_up_is_a_multiple_of_the_same(fn, expected):
    assert in_loop(fn) == expected


@pytest.mark.parametrize("level", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("kind", ["scan", "while"])
def test_a_tangent_is_rounded_once(kind, level, key):
    """Each multiple of it that the loop added was rounded: the tangent was off by 44 to 56 %."""
    keys = jax.random.split(key, 3)
    x = jax.random.uniform(keys[0], (256, 3), minval=0.8)
    w, v = jax.random.normal(keys[1], (3, 8)), jax.random.normal(keys[2], (3, 16))
    numbers = jnp.array([-28.0, 48, -21])

    def step(i, r):
        return numbers[i] * r ** (6.0 + i)

    def cutoff(r):
        if kind == "scan":
            return lax.scan(lambda total, i: (total + step(i, r), None), jnp.ones_like(r), jnp.arange(3))[0]
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + step(s[0], r)), (0, jnp.ones_like(r)))[1]

    def fn(w, x, v):
        return jax.jvp(lambda x: cutoff(x) @ w, (x,), (jnp.tanh(x @ v @ v.T),))[1] @ w.T

    careful = error(fn, f"OD:{level[3:]}", w, x, v)
    assert careful < 0.02
    assert error(fn, level, w, x, v) < max(1.6 * careful, 0.01)


def test_long_sums_and_products_come_to_an_end():
    def loop(x):
        for step in range(40):
            x = x + x * jnp.sin(x) * step
        return x

    assert found(loop, X).count("*") >= 40


def test_rounded_results_are_those_of_float32():
    """3 h - 2 h of half h is h, to the last bit."""
    h = jnp.arange(1.0, 17).reshape(4, 4) / 16
    third = jnp.full((4, 4), 1 / 3)

    def fn(w, x):
        h = x @ w
        return (h * third + h * (1 - third)) @ w

    for level in ("O1:bfloat16", "O2:bfloat16", "O2:float16"):
        assert np.array_equal(jamp.cast_fn(fn, level)(jnp.eye(4), h), h)
