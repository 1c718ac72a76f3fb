"""Degrees of values in loss scales: what is said of random programs is true of their numbers, and faults are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jamp.optim._degree_rules import Origin, Value
from jamp.optim._degrees import (
    ARGUMENT,
    PLAIN,
    Fault,
    Size,
    Trust,
    degree_of_number,
    either,
    is_known,
    join,
    power_of,
    product,
)  # fmt: skip
from jamp.optim._following import Following

X = jnp.float32([0.75, 1.25, 1.5])  # Few bits, so that most of what is computed of them is exact.


def degrees(fun, *more):
    """The degrees of what a function makes of parameters and of a scale that it gets."""
    jaxpr = jax.make_jaxpr(fun)(jnp.float32(8.0), X, *more)
    ins = [Value(power_of("s"), "s"), *[Value(PLAIN)] * (1 + len(more))]
    return [value.degree for value in Following().jaxpr(jaxpr, ins, "")]


def exponent(degree):
    return dict(degree.powers).get("s", 0)


ONE = {
    "negative": lambda a: -a,
    "square": lambda a: a * a,
    "integer power": lambda a: a**3,
    "root": lambda a: jnp.sqrt(jnp.abs(a)),
    "inverse root": lambda a: jax.lax.rsqrt(jnp.abs(a)),
    "power": lambda a: jnp.abs(a) ** 1.5,
    "norm": lambda a: a / jnp.linalg.norm(a),
    "sum": lambda a: a + a.sum(),
    "largest": lambda a: a / jnp.max(jnp.abs(a)),
    "positive": lambda a: jnp.maximum(a, 0.0),
    "finite": lambda a: jnp.where(jnp.isfinite(a), a, 0.0),
    "numbers": lambda a: jnp.nan_to_num(a),
    "sign": lambda a: jnp.sign(a) * X,
    "half": lambda a: a * 0.5,
    "joined": lambda a: jnp.concatenate([a, a])[1:4],
    "sorted": jnp.sort,
    "running sum": jnp.cumsum,
    "by a matrix": lambda a: a @ jnp.eye(3),
    "gathered": lambda a: a[jnp.array([2, 0, 1])],
    "added at": lambda a: jnp.zeros(3).at[1].add(a[0]) + a,
    "jitted": lambda a: jax.jit(lambda b: b * 2.0)(a),
    "checkpointed": lambda a: jax.checkpoint(lambda b: b * b)(a),
    "accumulated": lambda a: jax.lax.scan(lambda c, b: (c + b, c), jnp.float32(0), a)[1] + a,
    "repeated": lambda a: jax.lax.fori_loop(0, 2, lambda i, c: c + a, a),
    "either": lambda a: jax.lax.cond(X[0] > 1, lambda b: b, lambda b: 2 * b, a),
    "bounded": lambda a: jnp.clip(a, -65504.0, 65504.0),
    "guarded": lambda a: a / (jnp.abs(a) + 1e-30),
}
TWO = {
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - 2 * b,
    "larger": jnp.maximum,
    "chosen": lambda a, b: jnp.where(a > b, a, b),
    "masked": lambda a, b: jnp.where(X > 1, a, b),
    "matrix": lambda a, b: jnp.outer(a, b) @ X,
}
OPERATIONS = [(1, name) for name in ONE] + [(2, name) for name in TWO]


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7))
def test_what_is_said_of_random_programs_is_true(steps):
    def program(scale, x):
        values = [x, x * scale, x + 0.5]
        for (arity, name), i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(ONE[name](a) if arity == 1 else TWO[name](a, b))
        return values

    found = degrees(program)
    small, large = (program(jnp.float32(scale), X) for scale in (8.0, 32.0))
    for degree, a, b in zip(found, small, large, strict=True):
        if is_known(degree) and degree.fault is None and np.isfinite(a).all() and np.isfinite(b).all():
            np.testing.assert_allclose(b, a * 4.0 ** float(exponent(degree)), rtol=2e-4)


FAULTS = {
    "weight decay": (lambda s, x: s * x + 0.1 * x, Fault.SUM),
    "noise": (lambda s, x: s * x + jax.random.normal(jax.random.key(0), (3,)), Fault.SUM),
    "in part, added up": (lambda s, x: jnp.zeros(3).at[0].add(s).at[1].add(1.0), Fault.SUM),
    "clipped": (lambda s, x: jnp.clip(s * x, -1, 1), Fault.CHOICE),
    "clipped by a function": (lambda s, x: jax.jit(jnp.clip)(s * x, -1, 1), Fault.CHOICE),
    "clipped by norm": (lambda s, x: s * x * jnp.minimum(1, 1 / jnp.linalg.norm(s * x)), Fault.CHOICE),
    "scaled back where large": (lambda s, x: jnp.where(jnp.linalg.norm(s * x) > 1, x, x), Fault.CHOICE),
    "by a branch": (lambda s, x: jax.lax.cond((s * x).sum() > 1, lambda: s * x, lambda: x), Fault.CHOICE),
    "dropped where large": (lambda s, x: s * x * (jnp.abs(s * x) < 1), Fault.CHOICE),
    "squashed": (lambda s, x: jnp.tanh(s * x), Fault.FUNCTION),
    "its logarithm and 1": (lambda s, x: jnp.log1p(s * x), Fault.FUNCTION),
    "in one branch": (lambda s, x: jax.lax.cond(x[0] > 0, lambda: s * x, lambda: x), Fault.BRANCH),
    "put side by side": (lambda s, x: jnp.concatenate([s * x, x]), Fault.CHOICE),
}


@pytest.mark.parametrize("form", FAULTS)
def test_what_has_no_degree(form):
    program, fault = FAULTS[form]
    (degree,) = degrees(program)
    assert degree.fault is fault and degree.trust is Trust.KNOWN


def guarded(x):
    size = jnp.abs(x).max()
    return jnp.where(size > 0, size / 127, 1.0)


RIGHT = {
    "clipped when true": (lambda s, x: jnp.clip(s * x / s, -1, 1) * s, 1),
    "clipped by the true norm": (lambda s, x: s * x * jnp.minimum(1, 1 / (jnp.linalg.norm(s * x) / s)), 1),
    "scaled decay": (lambda s, x: s * x + 0.1 * x * s, 1),
    "noise of its size": (lambda s, x: s * x + s * jax.random.normal(jax.random.key(0), (3,)), 1),
    "dropped out": (lambda s, x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (3,)), s * x, 0), 1),
    "projected": (lambda s, x: s * x - jnp.minimum((s * x @ x) / (x @ x) / s, 0) * s * x, 1),
    "quantised": (lambda s, x: jnp.round(s * x / guarded(s * x)) * guarded(s * x), 1),
    "what counts": (lambda s, x: jnp.where(jnp.abs(s * x) < jnp.finfo(jnp.float16).tiny, 0, s * x), 1),
    "in 8 bits": (lambda s, x: (s * x / jnp.max(s * x)).astype(jnp.int8).astype(jnp.float32) * jnp.max(s * x), 1),
    "a high norm": (lambda s, x: ((s * x) ** 100.0).sum() ** 0.01, 1),
    "normalised": (lambda s, x: s * x / (jnp.linalg.norm(s * x) + 1e-8), 0),
    "a derivative of a scaled loss": (lambda s, x: jax.grad(lambda x: s * jnp.sum(jnp.tanh(x) ** 2))(x), 1),
    "in forward mode": (lambda s, x: jax.jacfwd(lambda x: s * jnp.sum(jnp.exp(-x)))(x), 1),
    "of a loop": (lambda s, x: jax.grad(lambda x: s * jax.lax.scan(lambda c, a: (c * a, a), 1.0, x)[0])(x), 1),
    "checkpointed": (lambda s, x: jax.grad(jax.checkpoint(lambda x: s * jnp.sum(jnp.sin(x) * x)))(x), 1),
    "clipped inside of the model": (lambda s, x: jax.grad(lambda x: s * jnp.clip(x, -1, 1).sum())(x), 1),
    "of parts": (lambda s, x: jax.grad(lambda x: s * (jnp.where(x > 1, x * x, x).sum() + x[0]))(x), 1),
}


@pytest.mark.parametrize("form", RIGHT)
def test_degrees_of_gradients(form):
    program, expected = RIGHT[form]
    (degree,) = degrees(program)
    assert is_known(degree) and degree.fault is None and exponent(degree) == expected


def test_an_argument_may_be_of_any_degree():
    jaxpr = jax.make_jaxpr(lambda s, x, total: total + s * x)(jnp.float32(8.0), X, X)
    ins = [Value(power_of("s"), "s"), Value(PLAIN), Value(ARGUMENT)]
    (value,) = Following().jaxpr(jaxpr, ins, "")
    assert value.degree.fault is None and not is_known(value.degree)


def test_in_a_derivative_an_argument_is_data():
    jaxpr = jax.make_jaxpr(lambda s, x, y: jax.grad(lambda x: s * ((x - y) ** 2).mean())(x))(jnp.float32(8.0), X, X)
    (value,) = Following().jaxpr(jaxpr, [Value(power_of("s"), "s"), Value(PLAIN), Value(ARGUMENT)], "")
    assert is_known(value.degree) and exponent(value.degree) == 1


def test_in_a_derivative_a_cotangent_may_be_an_argument():
    pulled = lambda s, x, ct: jax.vjp(lambda x: jax.nn.gelu(2 * x), x)[1](ct)[0]  # noqa: E731
    times = lambda s, x, factor: jax.grad(lambda x: factor[0] * jnp.sin(x).sum())(x)  # noqa: E731
    for fun in (pulled, lambda s, x, factor: jax.grad(lambda x: factor * jnp.sin(x).sum())(x), times):
        argument = jnp.float32(8.0) if fun not in (pulled, times) else X
        jaxpr = jax.make_jaxpr(fun)(jnp.float32(8.0), X, argument)
        ins = [Value(power_of("s"), "s"), Value(PLAIN), Value(ARGUMENT, Origin("argument", 0))]
        (value,) = Following().jaxpr(jaxpr, ins, "")
        assert is_known(value.degree) == (fun is times)


@jax.custom_vjp
def quantized_backward(x):
    return x


def _quantize(_, g):
    size = jnp.maximum(jnp.max(jnp.abs(g)), 1e-3)  # A guard against division by zero, large or small.
    return (jnp.clip(g / size, -1, 1) * size,)


quantized_backward.defvjp(lambda x: (x, None), _quantize)


def test_guards_in_a_backward_rule_are_no_clipping():
    (degree,) = degrees(lambda s, x: jax.grad(lambda x: s * (quantized_backward(x) ** 2).sum())(x))
    assert is_known(degree) and degree.fault is None and exponent(degree) == 1


def test_carries_of_loops():
    def handed_on(s, x):  # From the first carry to the last, in three rounds.
        return jax.lax.fori_loop(0, 3, lambda i, c: (c[0], c[0], c[1]), (s, jnp.zeros(()), jnp.zeros(())))

    assert [exponent(degree) for degree in degrees(handed_on)] == [1, 1, 1]
    (grows,) = degrees(lambda s, x: jax.lax.fori_loop(0, 3, lambda i, c: c * s, s))
    assert grows.trust is Trust.LOST


def test_functions_that_guard_themselves_are_no_clipping():
    (degree,) = degrees(lambda s, x: jnp.hypot(s * x, s * x))  # jax 0.12 scales by constants where it might overflow.
    assert degree.fault is None


@pytest.mark.parametrize("read", ["reference", "callback", "kernel", "bits", "logarithm"])
def test_what_comes_from_elsewhere_may_be_of_any_degree(read):
    def program(scale, x):
        if read == "callback":
            return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        if read == "bits":
            bits = jax.lax.bitcast_convert_type(scale * x, jnp.uint32)
            return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        if read == "logarithm":
            return jnp.exp2(jnp.round(jnp.log2(scale * x)))
        if read == "kernel":
            return jax.lax.linalg.triangular_solve(jnp.eye(3), scale * x, left_side=True)
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] += scale * x
        return ref[...]

    (degree,) = degrees(program)
    assert degree.trust is Trust.LOST and not is_known(degree)


def test_laws():
    s, t = power_of("s"), power_of("t")
    assert product([s, t]) == product([t, s]) and product([s, PLAIN]) == s
    for zero in (0.0, float("inf"), 1e-30, 65504.0):
        assert degree_of_number(zero).size > Size.ORDINARY
        assert join([s, degree_of_number(zero)], Fault.SUM) == s
    assert product([s, degree_of_number(0.0)]).size is Size.ZERO
    assert join([s, s], Fault.SUM) == s and join([s, t], Fault.SUM).fault is Fault.SUM
    assert not is_known(either([s, t])) and either([s, s]) == s
