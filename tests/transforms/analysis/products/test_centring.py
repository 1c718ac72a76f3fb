"""Gram matrices of which a matrix that the program writes takes a mean: what is left of them is not lost in half."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import mixed_levels, product_dtypes, trace

N, IN, OUT = 48, 12, 8
CENTRE = jnp.eye(N) - 1 / N
LAPLACIAN = jnp.eye(N) - jnp.roll(jnp.eye(N), 1, 0) / 2 - jnp.roll(jnp.eye(N), -1, 0) / 2


def drawn(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    w, v = (jax.random.normal(key, (IN, OUT)) / 4 for key in keys[:2])
    return w, v, jax.random.normal(keys[2], (N, IN))


def gram(x, w):
    features = jnp.tanh(x @ w) + 3  # Far from zero beside what tells them apart.
    return features @ features.T / OUT


def independence(k, l):  # noqa: E741
    return jnp.trace(k @ CENTRE @ l @ CENTRE)


def made_inside(k, l):  # noqa: E741
    centre = jnp.eye(N) - jnp.ones((N, N)) / N
    return jnp.trace(k @ centre @ l @ centre)


def one_side(k, l):  # noqa: E741
    return jnp.trace((CENTRE @ k) @ (CENTRE @ l))


def components(k, l):  # noqa: E741
    return jnp.sum(jnp.square((CENTRE @ k @ CENTRE) @ l[:, :4]))


def in_functions(k, l):  # noqa: E741
    centred = jax.jit(lambda m: CENTRE @ m @ CENTRE)
    return jnp.trace(jax.checkpoint(centred)(k) @ centred(l))


def in_a_loop(k, l):  # noqa: E741
    return lax.scan(lambda s, a: (s + jnp.trace((CENTRE @ (a * l)) @ (CENTRE @ k)), None), 0.0, jnp.arange(1.0, 4.0))[0]


FORMS = [independence, made_inside, one_side, components, in_functions, in_a_loop]


@mixed_levels
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_centred_gram_matrices(form, level):
    def fn(w, v, x):
        return form(gram(x, w), gram(x, v)) / N**2

    args = drawn(0)
    wanted = jax.grad(fn, (0, 1, 2))(*args)
    found = jax.jit(jax.grad(jamp.cast_fn(fn, f"{level}:bfloat16"), (0, 1, 2)))(*args)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(one - other) <= 0.025 * jnp.linalg.norm(other)


@mixed_levels
@pytest.mark.parametrize(
    "layers",
    [
        lambda w, v, x: jnp.tanh(LAPLACIAN @ (x @ w)) @ v.T,  # Of graphs.
        lambda w, v, x: jnp.tanh(CENTRE @ (x @ w)) @ v.T,  # Of features.
        lambda w, v, x: LAPLACIAN @ jnp.tanh(LAPLACIAN @ (x @ w)) @ v.T,
        lambda w, v, x: jax.nn.softmax((x @ w) @ (x @ v).T) @ (x @ w),  # An attention without a centre.
    ],
)
def test_layers_have_no_gram_matrices(layers, level):
    found = product_dtypes(trace(jamp.cast_fn(layers, f"{level}:bfloat16,o=bfloat16"), *drawn(0)))
    assert {dtype for dtypes in found for dtype in dtypes[:2]} == {"bfloat16"}
