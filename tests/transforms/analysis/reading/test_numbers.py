"""What is known of numbers that a program computes from what it writes, beside what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp._dtypes import FLOAT16, FLOAT32, Pair
from jamp.transforms.analysis.reading.numbers import of_literal, of_results
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import join, meet
from jamp.transforms.program.scale import Range, enclosing

PAIR = Pair(FLOAT32, FLOAT16)


def known(fn):
    """What is known of the result of a program without arguments, all of whose equations are looked at."""
    closed = jax.make_jaxpr(fn)()
    env = dict(zip(closed.jaxpr.constvars, map(of_literal, closed.consts), strict=True))
    for eqn in closed.jaxpr.eqns:
        operands = [of_literal(atom.val) if hasattr(atom, "val") else env.get(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, of_results(eqn, operands, FLOAT32), strict=True))
    (atom,) = closed.jaxpr.outvars
    return of_literal(atom.val) if hasattr(atom, "val") else env[atom]


EXACT = {
    "exp": lambda: jnp.exp(14.0),
    "negative power": lambda: jnp.power(10.0, -6),
    "powers": lambda: 10000.0 ** (-jnp.arange(8.0) / 8),
    "factorials": lambda: jnp.cumprod(jnp.arange(1.0, 9.0)),
    "reversed": lambda: jnp.cumsum(jnp.arange(1.0, 9.0)[::-1]),
    "backwards": lambda: lax.cumprod(jnp.arange(1.0, 5.0), reverse=True),
    "along an axis": lambda: jnp.cumsum(jnp.arange(6.0).reshape(2, 3), axis=1),
    "sum of rows": lambda: jnp.sum(jnp.arange(6.0).reshape(2, 3), axis=0),
    "transposed": lambda: (jnp.arange(6.0).reshape(2, 3).T * jnp.arange(2.0))[1:, ::-1],
    "outer": lambda: jnp.arange(3.0)[:, None] * jnp.arange(1.0, 4.0),
    "put together": lambda: jnp.concatenate([jnp.arange(3.0), jnp.ones(2) * 1e3 * 1e3]),
    "integers": lambda: jnp.prod(jnp.array([1000, 500])).astype(jnp.float32),
    "largest": lambda: jnp.max(jnp.exp(jnp.arange(6.0))),
    "last of few": lambda: jnp.cumprod(jnp.full(6, 10.0))[-1],
    "beyond float32": lambda: jnp.float32(1e30) * -1e30,
    "below float32": lambda: jnp.float32(1e-30) * 1e-30,
    "all the same": lambda: jnp.sum(jnp.ones((300, 300)) * 1e3, axis=0),
    "in functions": lambda: jax.jit(lambda x: jax.jit(jnp.square)(x) + 1)(jnp.float32(1e3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_numbers_that_are_known(name):
    found, expected = known(EXACT[name]), np.asarray(jax.jit(EXACT[name])(), np.float64)
    np.testing.assert_allclose([found.low, found.high], [expected.min(), expected.max()], rtol=1e-5)
    if found.low < found.high:
        np.testing.assert_allclose(found.elements, expected.ravel(), rtol=1e-5)


BOUNDED = {
    "many": (lambda: jnp.arange(1000.0), 0, 999),
    "of a sign": (lambda: jnp.arange(-500.0, 500.0) * 2, -1000, 998),
    "squares": (lambda: jnp.square(jnp.arange(-500.0, 300.0)), 0, 500**2),
    "magnitudes": (lambda: jnp.abs(jnp.arange(-500.0, 300.0)), 0, 500),
    "falling": (lambda: 1 / jnp.arange(2.0, 1002.0), 1 / 1001, 1 / 2),
    "frequencies": (lambda: 10000.0 ** (-jnp.arange(1000.0) / 999), 1e-4, 1),
    "angles": (lambda: jnp.sin(jnp.arange(1000.0)), -1, 1),
    "a mask": (lambda: lax.select(jnp.arange(100) > 3, jnp.zeros(100), jnp.full(100, -1e9)), -1e9, 0),
    "an infinite mask": (lambda: jnp.concatenate([jnp.zeros(100), jnp.full(100, -jnp.inf)]), -np.inf, 0),
    "a sum of many": (lambda: jnp.sum(jnp.arange(100.0)), 0, 9900),
    "a running sum": (lambda: lax.cumsum(jnp.arange(-1.0, 99.0)), -100, 9800),
    "a product of two": (lambda: jnp.arange(1.0, 101.0) @ jnp.arange(100.0), 0, 990000),
    "padded": (lambda: jnp.pad(jnp.full(100, 7.0), 3), 0, 7),
    "moved": (lambda: jnp.arange(100.0).reshape(4, 25).T[3:, ::-1], 0, 99),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_of_many_the_ends_are_known(name):
    fn, low, high = BOUNDED[name]
    found = known(fn)
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-5)
    assert not found.elements
    value = np.asarray(fn())
    assert found.low * (1 + 1e-5) <= value.min() or found.low - 1e-5 <= value.min()
    assert value.max() <= found.high * (1 + 1e-5)


UNKNOWN = {
    "a quotient by what may be zero": lambda: 1 / jnp.arange(-50.0, 50.0),
    "a function that turns": lambda: lax.lgamma(jnp.arange(1.0, 100.0)),
    "a root of what may be negative": lambda: jnp.sqrt(jnp.arange(-50.0, 50.0)),
    "a logarithm of zero": lambda: jnp.log(jnp.arange(100.0)),
    "no number": lambda: jnp.inf - jnp.full((), jnp.inf),
    "a boolean": lambda: jnp.arange(3.0) > 1,
    "random numbers": lambda: jax.random.normal(jax.random.key(0), (3,)),
    "a loop": lambda: lax.fori_loop(0, 3, lambda i, x: x * 10.0, 1.0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known(name):
    assert known(UNKNOWN[name]) is None


def test_literals():
    assert of_literal(2.5) == of_literal(np.float32(2.5)) == of_literal(jnp.float32(2.5)) == Range(2.5, 2.5)
    assert of_literal(np.array([1, 2])) == Range(1, 2, (1.0, 2.0))
    assert of_literal(np.arange(100)) == Range(0, 99)
    for other in (True, np.nan, 1j, np.zeros(0), np.arange(5000), jax.random.key(0), np.array([True, False])):
        assert of_literal(other) is None


def test_ranges_that_enclose_others():
    assert enclosing([Range(1, 2, (1.0, 2.0)), Range(-1, -1)]) == Range(-1, 2)
    assert enclosing([Range(1, 2), None]) is None
    assert enclosing([]) is None


def test_states_of_numbers():
    one, other = (Flow(FLOAT32, Kind.WEAK, 1, number=Range(value, value)) for value in (1e6, 3.0))
    data = Flow(FLOAT32, Kind.LAZY, 8)
    assert join([one, other], PAIR).number == Range(3.0, 1e6)
    assert join([one, data], PAIR).number is None
    # A carry that is another number each time is not known.
    assert meet(one, one, Kind.WEAK, PAIR).number == one.number
    assert meet(one, other, Kind.WEAK, PAIR).number is None
    assert meet(one, one, Kind.HALF, PAIR).number is None
    assert one.is_number
    assert not data.is_number
