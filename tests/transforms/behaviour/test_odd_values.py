"""Values that are no arrays of real numbers, wherever a program may hold them: nothing about them is an error."""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp import cast_fn, report

KEYS = jax.random.split(jax.random.key(0), (4, 4))
W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)
EXCHANGE = np.array([[0, 1j], [-1j, 0]])  # Its real part alone is a diagonal.


def of_rows(w, x):
    return jax.lax.map(lambda key: jax.random.normal(key, (8,)) @ w, KEYS[0]) + x


def of_table(w, x):
    return jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (8,)) @ w))(KEYS).sum(1) + x


def in_loop(w, x):
    def step(carry, key):
        x, other = carry
        other, drop = jax.random.split(other)
        x = jnp.where(jax.random.bernoulli(drop, 0.9, x.shape), x, 0.0) @ w / 4 + jax.random.normal(key, x.shape)
        return (x, other), x.mean()

    return jax.lax.scan(step, (x, KEYS[1, 1]), KEYS[:, 0])[0][0]


def moved(w, x):
    keys = jnp.where(jnp.arange(4)[:, None] < 2, jnp.concatenate([KEYS[2:], KEYS[:2]]), KEYS.T)
    keys = keys.at[0, 0].set(KEYS[3, 3])[jnp.arange(4), jnp.arange(4)]
    return jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys) @ w + x


def in_branch(w, x):
    def with_noise(key):
        return jax.random.normal(key, x.shape) @ w

    return jax.lax.cond(x.sum() > 0, with_noise, lambda key: x @ w, KEYS[1, 1])


def checkpointed(w, x):
    step = jax.checkpoint(lambda x, key: x + jnp.tanh(x @ w) * jax.random.normal(key, x.shape))
    for i in range(4):
        x = step(x, KEYS[i, 0])
    return x


def drawn_before(w, x):
    """Noise of batches of keys, and of a key that is split here, handed to a loop and a checkpoint."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(KEYS[0])
    x = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w + noise), x)
    key, _ = jax.random.split(KEYS[0, 0])
    return jax.checkpoint(lambda n: jnp.tanh(n @ w))(jax.random.normal(key, x.shape)) + x


def compared(w, x):
    same = KEYS[:, :1] == KEYS[1]
    return jax.nn.softmax(jnp.where(same, x @ x.T, -1e9)) @ x @ w


def complex_matrix(w, x):
    return jnp.abs(jnp.einsum("ij,jbk->ibk", jnp.asarray(EXCHANGE, jnp.complex64), jnp.stack([x, 2 * x])) @ w)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", ["OD", "O1", "O2", "O2:float16", "O2,attention=fused"])
@pytest.mark.parametrize(
    "function",
    [of_rows, of_table, in_loop, moved, in_branch, checkpointed, drawn_before, compared, complex_matrix],
    ids=lambda f: f.__name__,
)
def test_random_keys_and_complex_constants_go_through(function, policy):
    expected, cast = (jax.jit(f)(W, X) for f in (function, cast_fn(function, policy)))
    chex.assert_trees_all_close(cast.astype(jnp.float32), expected, atol=0.05 * float(jnp.abs(expected).max()))
    report(function, W, X, policy=policy)


def of_eigenvalues(a):
    return jnp.abs(jnp.linalg.eigvals(a @ a)).sum()


def of_a_callback(a):
    shape = jax.ShapeDtypeStruct(a.shape, jnp.complex64)
    turned = jax.pure_callback(lambda x: np.asarray(x) * np.complex64(1 + 1j), shape, jax.lax.stop_gradient(a))
    return jnp.abs((turned * (a + 1j)) @ a).sum()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("policy", ["O1", "O2"])
@pytest.mark.parametrize("function", [of_eigenvalues, of_a_callback], ids=lambda f: f.__name__)
def test_what_makes_complex_numbers_of_real_ones_is_not_kept(function, policy):
    """`jax.checkpoint` cannot keep them."""
    expected, found = (jax.grad(f)(W) for f in (function, cast_fn(function, policy)))
    chex.assert_trees_all_close(found, expected, atol=0.05 * float(jnp.abs(expected).max()))


def test_a_loop_written_out_may_start_from_a_number():
    """As the line search of `jaxopt.NonlinearCG` does. It is a loop all the same: its sums stay float32."""
    step = jax.jit(lambda total, w, x: total + jnp.sin(1.0 + total * jnp.vdot(x, w)))

    def function(w, x):
        return step(step(0.0, w, x), w, x)

    assert "0.0:f32[] a b" in str(jax.make_jaxpr(function)(W[0], X[0])), "the call is to read a number"
    cast = jax.jit(cast_fn(function, "O2:bfloat16"))(W[0], X[0])
    assert cast.dtype == jnp.float32
    chex.assert_trees_all_close(cast, function(W[0], X[0]), rtol=0.01)


@pytest.mark.parametrize("policy", ["OD", "O1", "O2"])
def test_values_of_a_type_of_ones_own_go_through(policy):
    """A value that is a pair of arrays has no shape."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "VJPHiPrimitive"):
        pytest.skip("jax 0.12 has another base class for operations on such values")

    @dataclass(frozen=True)
    class Pair:
        first: jax.Array
        second: jax.Array

    class OfPair(hijax.HiType):
        def __init__(self, first, second):
            self.types = first, second

        def __hash__(self):
            return hash(self.types)

        def __eq__(self, other):
            return isinstance(other, OfPair) and self.types == other.types

        def lo_ty(self):
            return list(self.types)

        def lower_val(self, pair):
            return [pair.first, pair.second]

        def raise_val(self, first, second):
            return Pair(first, second)

    class Together(hijax.VJPHiPrimitive):
        def __init__(self, first, second):
            self.in_avals, self.out_aval, self.params = (first, second), OfPair(first, second), {}
            super().__init__()

        def expand(self, first, second):
            return Pair(first, second)

    class Second(hijax.VJPHiPrimitive):
        def __init__(self, pair):
            self.in_avals, self.out_aval, self.params = (pair,), pair.types[1], {}
            super().__init__()

        def expand(self, pair):
            return pair.second

    hijax.register_hitype(Pair, lambda pair: OfPair(jax.typeof(pair.first), jax.typeof(pair.second)))

    def function(w, x):
        indices = jnp.arange(8)
        pair = Together(jax.typeof(indices), jax.typeof(w))(indices, w)
        return x @ Second(jax.typeof(pair))(pair) + indices

    chex.assert_trees_all_close(jax.jit(cast_fn(function, policy))(W, X), jax.jit(function)(W, X), atol=0.1)
