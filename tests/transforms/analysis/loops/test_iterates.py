"""What a linear iteration computes is float32, with its products in half; recurrent and stacked layers stay half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, find, mixed_levels, product_dtypes, run, trace

# From the first state to three others and back: 1024 + 1024 + 1, which is 2048 in half.
A = np.zeros((8, 8), np.float32)
A[0, 1:4], A[1:4, 0] = 1, (1024, 1024, 1)
V = np.eye(8, dtype=np.float32)[:1]


def scanned(step, v, length=2):
    return lax.scan(lambda v, _: (step(v), None), v, length=length)[0]


def while_counted(v, a):
    return lax.while_loop(lambda state: state[0] < 2, lambda state: (state[0] + 1, state[1] @ a), (0, v))[1]


def swapped(v, a):
    """Two carries that take turns, as in Chebyshev's recursion."""
    before, now = lax.fori_loop(0, 2, lambda _, state: (state[1], state[1] @ a - 0 * state[0]), (0 * v, v))
    return now + before


def held(v, a):
    known = jnp.arange(8) > 5
    return scanned(lambda v: jnp.where(known, 0.0, v @ a), v)


ITERATIONS = {
    "fori_loop": lambda v, a: lax.fori_loop(0, 2, lambda _, v: v @ a, v),
    "scan": lambda v, a: scanned(lambda v: v @ a, v),
    "while": while_counted,
    "from the left": lambda v, a: scanned(lambda v: a.T @ v, v.T),
    "einsum": lambda v, a: scanned(lambda v: jnp.einsum("ni,ij->nj", v, a), v),
    "damped": lambda v, a: scanned(lambda v: 0.5 * v @ a * 2.0 + 0 * v, v),
    "with a source": lambda v, a: scanned(lambda v: v @ a + (0 * a[0]), v),
    "a residual": lambda v, a: scanned(lambda z: z + (0 * v - z @ (jnp.eye(8) - a)), v),
    "normalized": lambda v, a: scanned(lambda v: v @ a / jnp.maximum(jnp.abs(v).max(), 1.0), v),
    "held": held,
    "swapped": swapped,
    "scaled by data": lambda v, a: lax.scan(lambda v, x: (x * (v @ a), None), v, jnp.ones((2, 1, 8)))[0],
    "in a function": lambda v, a: scanned(jax.jit(lambda v: v @ a), v),
    "in a checkpoint": lambda v, a: scanned(jax.checkpoint(lambda v: v @ a), v),
    "mapped": lambda v, a: jax.vmap(lambda v: scanned(lambda v: v @ a, v))(v),
    "a matrix that is computed": lambda v, a: (lambda b: scanned(lambda v: v @ b, v))(jnp.abs(a)),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("iteration", ITERATIONS.values(), ids=ITERATIONS)
def test_the_state_of_a_linear_iteration_keeps_its_digits(iteration, level, half):
    def program(v, a):  # Behind it a product, which would have it in half.
        out = iteration(v, a)
        return out, jnp.tanh(out.reshape(1, 8) @ a)

    cast = jamp.cast_fn(program, f"{level}:{half}")
    np.testing.assert_array_equal(run(cast, V, A)[0], run(program, V, A)[0])


def test_its_products_are_half():
    products = product_dtypes(trace(jamp.cast_fn(ITERATIONS["scan"], "O2:bfloat16"), V, A))
    assert {str(dtype) for dtypes in products for dtype in dtypes} == {"bfloat16"}


def test_scalings_of_a_kernel_are_float32():
    """Sinkhorn's iteration: each quotient is of a product with the last, and these are divided by."""

    def program(v, a):
        kernel = jnp.exp(v.T @ v + a / 2048)

        def step(scalings, _):
            u = 1 / (kernel @ scalings[1])
            return (u, 1 / (kernel.T @ u)), None

        u, v = lax.scan(step, (jnp.ones(8), jnp.ones(8)), length=20)[0]
        return (u[:, None] * kernel * v) @ a

    (loop,) = find(trace(jamp.cast_fn(program, "O2:bfloat16"), V, A), "scan")
    assert loop.outvars[1].aval.dtype == jnp.float32
    assert product_dtypes(loop.params["jaxpr"]) == [["float32", "float32"]] * 2


def layers(step):
    """Layers with weights of their own."""
    return lambda v, a: lax.scan(lambda v, w: (step(v, w), None), v @ a, jnp.stack([a, a.T, a]))[0] @ a


def recurrent(step):
    """A recurrent layer, over inputs that another one gives."""

    def program(v, a):
        xs = jnp.stack([v @ a, jnp.tanh(v @ a), v @ a.T])
        h, hs = lax.scan(lambda h, x: (step(h, x, a), h), v @ a, xs)
        return h @ a, hs @ a

    return program


LAYERS = {
    "recurrent": recurrent(lambda h, x, a: jnp.tanh(x + h @ a)),
    "rectified": recurrent(lambda h, x, a: jax.nn.relu(x + h @ a)),
    "gated": recurrent(lambda h, x, a: jax.nn.sigmoid(h @ a) * jnp.tanh(x + h @ a)),
    "stacked": layers(lambda v, w: jnp.tanh(v @ w)),
    "stacked and linear": layers(lambda v, w: v @ w),
    "normalized": recurrent(lambda h, x, a: jnp.tanh((x + h @ a) / (1 + jnp.sum(h * h)))),
    "softly signed": recurrent(lambda h, x, a: (x + h @ a) / (1 + jnp.abs(x + h @ a))),
    "tied": lambda v, a: lax.fori_loop(0, 3, lambda _, h: jax.nn.gelu(h @ a), v @ a) @ a,
}


@both_halves
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_carry_half(layer, half):
    jaxpr = trace(jamp.cast_fn(layer, f"O2:{half}"), V, A)
    (loop,) = find(jaxpr, "scan", "while")
    assert {str(var.aval.dtype) for var in loop.outvars if var.aval.ndim} == {half}
    assert {str(dtype) for dtypes in product_dtypes(jaxpr) for dtype in dtypes} == {half}


def orthogonal(w):
    """Newton and Schulz' iteration, written out."""
    for _ in range(3):
        w = 1.5 * w - 0.5 * w @ w.T @ w
    return w


def layers_written_out(w):
    h = w
    for scale in (0.5, 0.25, 2.0):  # Weights that are computed where they are read are weights.
        h = h + jnp.tanh(h @ (scale * w)) @ (w.T * scale)
    return h @ w


def sums(fn):
    """Dtypes of all sums and differences of matrices."""
    eqns = find(trace(jamp.cast_fn(fn, "O2:bfloat16"), A), "add", "sub")
    return {str(eqn.outvars[0].aval.dtype) for eqn in eqns}


def test_iterations_written_out_add_up_in_float32():
    assert sums(orthogonal) == {"float32"}


def test_layers_written_out_do_not():
    assert "bfloat16" in sums(layers_written_out)
