"""Products of bfloat16 operands have float32 accumulators on a CPU too, however their axes lie."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.transforms.emission.wide_products import accumulator

SIZES = {"b": 3, "d": 2, "c": 5, "k": 2, "m": 4, "n": 6, "o": 3}
# Batch axes are `b` and `d`, contracted are `c` and `k`.
AXES = [("cm", "cn"), ("cm", "cno"), ("bcm", "bcn"), ("bcm", "bcno"), ("bcmo", "bcn"), ("bc", "bcn"), ("bdcm", "bdcn")]


def numbers(left, right):
    """What `dot_general` is told of two operands that are named by their axes."""
    shared = [[axis for axis in left if axis in which] for which in ("ck", "bd")]
    return tuple((tuple(map(left.index, axes)), tuple(map(right.index, axes))) for axes in shared)


def drawn(seed, axes):
    """Integers of which bfloat16 holds each, and not all of their sums."""
    shape = [SIZES[axis] for axis in axes]
    return np.random.default_rng(seed).integers(-20, 20, shape).astype(jnp.bfloat16)


def orders(left, right):
    """Some operands with their axes in every order, those of a large family thinned out."""
    found = list(itertools.product(itertools.permutations(left), itertools.permutations(right)))
    return found[:: max(1, len(found) // 48)]


def made(left, right, out_axes, a, b):
    """The accumulator of a product, with its axes in some order."""
    (eqn,) = jax.make_jaxpr(partial(lax.dot_general, dimension_numbers=numbers(left, right)))(a, b).eqns
    return lax.transpose(accumulator(eqn, (a, b), np.dtype(np.float32)), out_axes)


def exact(left, right, out_axes, a, b):
    shared = [axis for axis in left if axis in "bd"]
    out = "".join((*shared, *(axis for axis in (*left, *right) if axis not in "bdck")))
    return np.einsum(f"{''.join(left)},{''.join(right)}->{out}", *map(np.float64, (a, b))).transpose(out_axes)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("turned", [False, True], ids=["as they are", "transposed"])
@pytest.mark.parametrize(("left", "right"), AXES)
def test_axes_in_every_order(left, right, turned):
    """XLA folds transposes of operands and of results into a product."""
    cases = orders(left, right)
    rank = len({*left, *right} - {"c", "k"})
    out_axes = (*range(rank),)[:: -1 if turned else 1]
    pairs = [(drawn(1, a), drawn(2, b)) for a, b in cases]

    @jax.jit
    def products(pairs):
        turns = [[x.T for x in pair] if turned else pair for pair in pairs]
        return [made(*case, out_axes, *pair) for case, pair in zip(cases, turns, strict=True)]

    found = products([[x.T for x in pair] if turned else pair for pair in pairs])
    for out, case, pair in zip(found, cases, pairs, strict=True):
        np.testing.assert_array_equal(out, exact(*case, out_axes, *pair))


TURNED = {
    "between products": lambda x, w: jax.nn.gelu((x @ w).T).T @ w,
    "both operands": lambda x, w: jax.nn.gelu((x @ w).T).T @ jnp.sin((x @ w).T).T,
    "in reverse": lambda x, w: jax.nn.gelu((x @ w).T)[::-1].T @ w,
    "a vector": lambda x, w: jax.nn.gelu((x @ w).T).T @ w[0],
    "of a solution": lambda x, w: jnp.tanh(jnp.linalg.solve(9 * jnp.eye(16), (x @ w).T).T) @ w,
}


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16"])
@pytest.mark.parametrize("function", TURNED.values(), ids=TURNED)
def test_a_transpose_among_what_is_between_products(function, policy):
    """XLA moves it through what is computed element by element, and would fold it into the next product."""
    x, w = jax.random.normal(jax.random.key(1), (2, 16, 16)) / 2
    cast = jamp.cast_fn(function, policy)
    np.testing.assert_allclose(jax.jit(cast)(x, w), function(x, w), rtol=0, atol=0.1)
    several = jax.export.export(jax.jit(cast), platforms=("cpu", "cuda"))(x, w)
    np.testing.assert_allclose(several.call(x, w), function(x, w), rtol=0, atol=0.1)
    gradients = [jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x, w)))))(x) for f in (cast, function)]
    np.testing.assert_allclose(*gradients, rtol=0, atol=0.3)


# A weight's gradient has batch axes where experts or heads have weights of their own.
PRODUCTS = {
    "experts": ("ecd,edf->ecf", (2, 257, 3), (2, 3, 4)),
    "experts behind": ("ecd,dfe->ecf", (2, 257, 3), (3, 4, 2)),
    "heads": ("bhd,hdv->bhv", (257, 2, 3), (2, 3, 4)),
    "heads behind": ("bdh,vdh->bhv", (257, 3, 2), (4, 3, 2)),
    "heads of queries": ("bd,dhv->bhv", (257, 3), (3, 2, 4)),
    "two batch axes": ("bhgd,vghd->bhgv", (257, 2, 3, 4), (5, 3, 2, 4)),
}


@pytest.mark.parametrize(("spec", "data", "weight"), PRODUCTS.values(), ids=PRODUCTS)
def test_gradients_in_float32_of_products_with_batch_axes(spec, data, weight):
    x, w = jnp.ones(data), jnp.ones(weight)

    def loss(w, x):
        return jnp.sum(jnp.einsum(spec, x, w).astype(jnp.float32))

    def wide(w, x):
        return jax.grad(jamp.cast_fn(loss, "O2:bfloat16,reduce=float32"))(w, x)

    def raised(w, x):
        return jamp.float32_gradients(jax.value_and_grad(loss))(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))[1]

    expected = np.asarray(jax.grad(loss)(w, x))
    assert (expected == 257).all()
    for gradient in (wide, raised):
        found = jax.jit(gradient)(w, x)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, expected)
