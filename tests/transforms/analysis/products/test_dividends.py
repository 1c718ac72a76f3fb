"""Sums that a divisor brings down to size do not overflow in float16 before they are divided."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.transforms.analysis.products.dividends import dividends
from tests.transforms.harness import find, mixed_levels, out_dtypes, trace

# Of `q @ s` each element is 2^17, which is more than float16 holds; of the quotients each is 2, and of results 32.
Q, S, Z, W = jnp.full((4, 16), 64.0), jnp.full((16, 16), 128.0), jnp.full(16, 64.0), jnp.ones((16, 16))


def in_a_loop(q, s, z):
    return lax.scan(lambda _, row: (0, (row @ s) / (row @ z)), 0, q)[1]


def in_a_function(q, s, z):
    return jax.jit(lambda q, s, z: (q @ s) / (q @ z)[:, None])(q, s, z)


def of_functions(q, s, z):
    return jnp.einsum("ld,de->le", q, s) / jnp.einsum("ld,d->l", q, z)[:, None]


QUOTIENTS = {
    "divided": lambda q, s, z: (q @ s) / (q @ z)[:, None],
    "bounded": lambda q, s, z: (q @ s) / jnp.maximum((q @ z)[:, None], 1e-6),
    "with an epsilon": lambda q, s, z: (q @ s) / ((q @ z)[:, None] + 1e-3),
    "times the reciprocal": lambda q, s, z: (q @ s) * (1 / (q @ z))[:, None],
    "the reciprocal first": lambda q, s, z: (1 / (q @ z))[:, None] * (q @ s),
    "times a reciprocal root": lambda q, s, z: (q @ s) * lax.rsqrt((q @ z)[:, None] ** 2),
    "scaled": lambda q, s, z: 0.5 * (q @ s) / (0.5 * (q @ z))[:, None],
    "added up": lambda q, s, z: (q @ s + q @ s) / (2 * (q @ z))[:, None],
    "moved": lambda q, s, z: ((q @ s).T / (q @ z)).T,
    "negated": lambda q, s, z: -(q @ s) / -(q @ z)[:, None],
    "of functions": of_functions,
    "in a function": in_a_function,
    "in a loop": in_a_loop,
    "mapped": lambda q, s, z: jax.vmap(lambda row: (row @ s) / (row @ z))(q),
    "by a sum": lambda q, s, z: (q @ s) / (q.sum(1) * z[0])[:, None],
    "by data": lambda q, s, z: (q @ s) / (1024 * z),
}


@mixed_levels
@pytest.mark.parametrize("quotient", QUOTIENTS.values(), ids=QUOTIENTS)
def test_no_sum_overflows_that_is_divided(quotient, level):
    program = jamp.cast_fn(lambda q, s, z, w: quotient(q, s, z) @ w, f"{level}:float16")
    np.testing.assert_allclose(jax.jit(program)(Q, S, Z, W), np.full((4, 16), 32.0), rtol=2**-10)
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(program(Q, S, Z, w))))(W)
    np.testing.assert_allclose(gradient, np.full((16, 16), 8.0), rtol=2**-10)


def layer_norm(h):
    h = h - h.mean(-1, keepdims=True)
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-5)


ACTIVATIONS = {
    "by a number": lambda h: h / 8,
    "by a computed number": lambda h: h / jnp.sqrt(64.0),
    "a norm": layer_norm,
    "a root mean square": lambda h: h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6),
    "a norm by rsqrt": lambda h: h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6),
    "a layer of Flax": lambda h: nn.LayerNorm().apply({"params": {"scale": Z[:16], "bias": Z[:16]}}, h),
    "rsqrt of a number": lambda h: h * lax.rsqrt(jnp.float32(64)),
    "its sum": lambda h: h / h.sum(-1, keepdims=True),
    "swish": lambda h: h / (1 + jnp.exp(-h)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_are_no_such_sums(activation):
    program = lambda x, w: activation(x @ w) @ w  # noqa: E731
    assert dividends(jax.make_jaxpr(program)(Q, W).jaxpr) == frozenset()
    assert out_dtypes(trace(jamp.cast_fn(program, "O2:float16"), Q, W), "dot_general") >= {"float16"}


def test_a_root_divides_nothing_by_itself():
    assert dividends(jax.make_jaxpr(lambda x, w: lax.rsqrt(1 + (x @ w) ** 2))(Q, W).jaxpr) == frozenset()


def test_bfloat16_has_their_range():
    program = jamp.cast_fn(lambda q, s, z, w: QUOTIENTS["divided"](q, s, z) @ w, "O2:bfloat16")
    products = [eqn.outvars[0].aval for eqn in find(trace(program, Q, S, Z, W), "dot_general")]
    dividend, result = [aval for aval in products if aval.ndim == 2]
    assert (dividend.dtype, result.dtype) == (jnp.bfloat16, jnp.float32)


# Kernels of an optimal transport: `exp(-cost / 0.1)` is nothing in float16 where float32 has 1e-8, and all rows count.
def transport(of_rows, of_columns):
    def program(x, y, w):
        a, b = x @ w, y @ w
        a, b = (z * lax.rsqrt(jnp.sum(z * z, -1, keepdims=True)) for z in (a, b))
        cost = 1 - a @ b.T
        kernel = jnp.exp(-cost / 0.1)

        def step(scales, _):
            u = 1 / of_rows(kernel, scales[1])
            return (u, 1 / of_columns(kernel, u)), None

        (u, v), _ = lax.scan(step, (jnp.ones(20), jnp.ones(24)), None, length=20)
        return jnp.sum(u[:, None] * kernel * v * cost)

    return program


AS_SUMS = transport(lambda k, v: (k * v).sum(1), lambda k, u: (k * u[:, None]).sum(0))
TRANSPORTS = {
    "products": transport(lambda k, v: k @ v, lambda k, u: k.T @ u),
    "epsilons": transport(lambda k, v: k @ v + 1e-12, lambda k, u: k.T @ u + 1e-12),
    "bounded": transport(lambda k, v: jnp.maximum(k @ v, 1e-30), lambda k, u: jnp.maximum(u @ k, 1e-30)),
    "einsum": transport(lambda k, v: jnp.einsum("ij,j->i", k, v), lambda k, u: jnp.einsum("ij,i->j", k, u)),
    "columns": transport(lambda k, v: (k @ v[:, None])[:, 0], lambda k, u: (u[None] @ k)[0]),
    "logarithms": transport(lambda k, v: jnp.exp(jnp.log(k @ v)), lambda k, u: jnp.exp(jnp.log(k.T @ u))),
    "functions": transport(jax.jit(lambda k, v: k @ v), jax.jit(lambda k, u: k.T @ u)),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", ["OD:float16", "O1:float16", "O2:float16", "O2:bfloat16"])
@pytest.mark.parametrize("program", TRANSPORTS.values(), ids=TRANSPORTS)
def test_products_with_a_vector_that_are_divided_by(program, policy):
    """Values were 11 % off in float16, and gradients infinite."""
    x, y = jax.random.normal(jax.random.key(0), (20, 5)), jax.random.normal(jax.random.key(1), (24, 5)) + 1
    w = 0.5 * jax.random.normal(jax.random.key(2), (5, 8))
    results = [jax.jit(jax.value_and_grad(jamp.cast_fn(fn, policy), argnums=2))(x, y, w) for fn in (AS_SUMS, program)]
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.all(np.isfinite(expected))
        tolerance = 2e-2 if policy.endswith("bfloat16") else 4e-3
        assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def test_a_layer_that_is_divided_by_is_half():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    (product,) = find(trace(jamp.cast_fn(lambda x, w: 1 / (x @ w), "O2:bfloat16"), x, w), "dot_general")
    assert [str(atom.aval.dtype) for atom in product.invars] == ["bfloat16", "bfloat16"]
