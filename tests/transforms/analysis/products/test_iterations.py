"""Iterations that solve, by a matrix and its transpose or by squares of their state, are those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, product_dtypes, run, trace

rng = np.random.default_rng(0)
SIZE, STEPS = 24, 6
LEFT, RIGHT = (np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0] for _ in range(2))
MATRIX = np.float32(LEFT * np.geomspace(1, 0.03, SIZE) @ RIGHT)
SEEN = np.float32(rng.standard_normal(SIZE))


def written_out(start, step, read=lambda state: state[0]):
    def fn(matrix, seen):
        state = start(matrix, seen)
        for _ in range(STEPS):
            state = step(matrix, seen, state)
        return read(state)

    return fn


def in_a_loop(start, step, read=lambda state: state[0]):
    def fn(matrix, seen):
        return read(lax.fori_loop(0, STEPS, lambda _, state: step(matrix, seen, state), start(matrix, seen)))

    return fn


def at_zero(matrix, seen):
    return (jnp.zeros(SIZE),)


def landweber(matrix, seen, state):
    return (state[0] - matrix.T @ (matrix @ state[0] - seen),)


def derived(matrix, seen, state):
    return (state[0] - 0.9 * jax.grad(lambda x: 0.5 * jnp.sum((matrix @ x - seen) ** 2))(state[0]),)


def thresholded(matrix, seen, state):
    x = state[0] - matrix.T @ (matrix @ state[0] - seen)
    return (jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.01, 0),)


def with_momentum(matrix, seen, state):
    x, speed = state
    speed = 0.5 * speed - matrix.T @ (matrix @ x - seen)
    return x + speed, speed


def primal_and_dual(matrix, seen, state):
    x, ahead, dual = state
    dual = (dual + 0.9 * (matrix @ ahead - seen)) / 1.9
    after = x - 0.9 * (matrix.T @ dual)
    return after, 2 * after - x, dual


def begin_conjugate(matrix, seen):
    back = matrix.T @ seen
    return jnp.zeros(SIZE), seen, back, back @ back


def conjugate(matrix, seen, state):
    """Conjugate gradients for least squares."""
    x, left, along, norm = state
    moved = matrix @ along
    size = norm / (moved @ moved)
    left = left - size * moved
    back = matrix.T @ left
    return x + size * along, left, back + (back @ back) / norm * along, back @ back


def least_residual(matrix, seen, state):
    left = seen - matrix @ state[0]
    moved = matrix @ left
    return (state[0] + (left @ moved) / (moved @ moved) * left,)


def columns(step):
    """Several right sides at once."""
    return lambda matrix, seen, state: step(matrix, jnp.stack([seen, 2 * seen], 1), state)


def in_a_function(matrix, seen, state):
    return jax.jit(landweber)(matrix, seen, state)


def in_a_checkpoint(matrix, seen, state):
    return jax.checkpoint(landweber)(matrix, seen, state)


def kernel(matrix, seen):
    return jnp.zeros((1, 3, 8)), matrix[:9, :3].reshape(3, 3, 3)


def of_a_convolution(matrix, seen, state):
    """The loop carries its kernel as it is."""
    x, kernel = state
    blurred, back = jax.vjp(lambda x: lax.conv_general_dilated(x, kernel, (1,), "SAME"), x)
    return x - 0.2 * back(blurred - seen.reshape(1, 3, 8))[0], kernel


def guess(matrix, seen):
    return (matrix.T / jnp.sum(matrix**2),)


def inverse(matrix, seen, state):
    return (2 * state[0] - state[0] @ matrix @ state[0],)


def inverse_with_a_minus(matrix, seen, state):
    return (-(state[0] @ matrix @ state[0]) + 2 * state[0],)


def inverse_by_a_factor(matrix, seen, state):
    return (state[0] @ (2 * jnp.eye(SIZE) - matrix @ state[0]),)


def inverse_of_third_order(matrix, seen, state):
    left = jnp.eye(SIZE) - matrix @ state[0]
    return (state[0] + state[0] @ left + state[0] @ left @ left,)


def turned_twice(matrix, seen, state):
    return (-(matrix.T @ (matrix @ state[0] - seen) - state[0]),)


def as_a_column(step):
    """States that are a matrix of one column between the steps."""
    return lambda matrix, seen, state: (step(matrix, seen, (state[0].reshape(SIZE),))[0].reshape(SIZE, 1),)


def where_wanted(step):
    """States that may stay as they are."""

    def chosen(matrix, seen, state):
        after = step(matrix, seen, state)
        return (jnp.where(seen[0] > 9, state[0], after[0]),)

    return chosen


def two_columns(matrix, seen):
    return (jnp.zeros((SIZE, 2)),)


def three_vectors(matrix, seen):
    return (jnp.zeros(SIZE),) * 3


ITERATIONS = {
    "Landweber's": (at_zero, landweber),
    "a gradient": (at_zero, derived),
    "soft thresholds": (at_zero, thresholded),
    "momentum": (lambda *given: at_zero(*given) * 2, with_momentum),
    "primal and dual": (three_vectors, primal_and_dual),
    "conjugate gradients": (begin_conjugate, conjugate),
    "least residuals": (at_zero, least_residual),
    "several": (two_columns, columns(landweber)),
    "functions": (at_zero, in_a_function),
    "checkpoints": (at_zero, in_a_checkpoint),
    "a convolution": (kernel, of_a_convolution),
    "an inverse": (guess, inverse),
    "an inverse, with a minus": (guess, inverse_with_a_minus),
    "Landweber's, with a minus": (at_zero, turned_twice),
    "Landweber's, as a column": (lambda matrix, seen: (jnp.zeros((SIZE, 1)),), as_a_column(landweber)),
    "an inverse, where wanted": (guess, where_wanted(inverse)),
    "Landweber's, where wanted": (at_zero, where_wanted(landweber)),
    "an inverse, by a factor": (guess, inverse_by_a_factor),
    "an inverse of third order": (guess, inverse_of_third_order),
    "a scaled matrix": (at_zero, lambda a, b, x: (x[0] - 0.5 * a.T @ (a @ x[0] - b),)),
    "a scaled matrix, of a mean": (at_zero, lambda a, b, x: (x[0] + (2 * a).T @ (b - a @ x[0]) / SIZE,)),
    "a rate": (
        lambda a, b: (jnp.zeros(SIZE), jnp.sum(b**2) / 40),
        lambda a, b, x: (x[0] - x[1] * a.T @ (a @ x[0] - b), x[1]),
    ),
}


@both_halves
@pytest.mark.parametrize("written", [written_out, in_a_loop])
@pytest.mark.parametrize("iteration", ITERATIONS.values(), ids=ITERATIONS)
def test_they_are_as_exact_as_in_float32(iteration, written, half):
    fn = written(*iteration)
    found, traced = run(jamp.cast_fn(fn, f"O2:{half}"), MATRIX, SEEN), fn(MATRIX, SEEN)
    np.testing.assert_allclose(found, traced, rtol=0, atol=1e-4 * np.abs(traced).max())


def test_a_batch_of_them():
    fn = jax.vmap(in_a_loop(at_zero, landweber), (None, 0))
    seen = np.stack([SEEN, -SEEN])
    products = product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), MATRIX, seen))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


WIDE = np.float32(rng.standard_normal((32, 32)) / 32**0.5)
ROWS = np.float32(rng.standard_normal((16, 32)))


def tied(weights, x):
    for _ in range(3):
        x = x + jax.nn.relu(x @ weights) @ weights.T
    return x


def tied_in_a_loop(weights, x):
    return lax.fori_loop(0, 3, lambda _, x: x + jnp.tanh(x @ weights) @ weights.T, x)


def linear_attention(weights, x):
    for w in jnp.split(jnp.tanh(weights * jnp.arange(1, 4)[:, None, None]), 3):
        x = x + (x @ w[0]) @ ((x @ w[0].T).T @ (x @ w[0])) / 16
    return x @ weights


def attention_of_a_stack(weights, x):
    layers = jnp.tanh(weights * jnp.arange(1, 4)[:, None, None])
    for index in range(3):
        x = x + (x @ layers[index]) @ ((x @ layers[index]).T @ x) / 16
    return x @ weights


def bilinear_stack(weights, x):
    """Layers that multiply what they are given with their own weights and with itself."""
    state = x[:, :16]
    for change in (jnp.sin, jnp.cos, jnp.tanh):
        state = state + 0.1 * state @ change(weights[:16, :16]) @ state
    return state @ weights[:16]


def squared_in_a_loop(weights, x):
    """A sum of powers, with nothing to invert."""
    return x @ lax.fori_loop(0, 3, lambda _, w: 0.5 * w + 0.5 * w @ w, weights)


def gradient_of_attention(masked):
    """The gradient inside: its terms have the same factors, and none of them is what another one leaves over."""

    def loss(weights, bias, x):
        h = x + bias
        scores = masked((h @ jnp.sin(weights)) @ (h @ jnp.cos(weights)).T)
        return jnp.mean((scores @ (h @ weights) - 1) ** 2)

    return lambda weights, x: jax.grad(loss, argnums=(0, 1))(weights, weights[0], x)


def causal(scores):
    return jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, 0)


def scanned_attention(weights, x):
    layers = jnp.stack([weights, weights.T, -weights])
    return lax.scan(lambda x, w: (x + 0.04 * (x @ w) @ (x @ w).T @ x, None), x, layers)[0]


def graph(weights, x):
    """Linear layers over a graph's edges and back, each with weights of its own."""
    edges = jnp.tanh(x @ x.T)
    for change in (jnp.sin, jnp.cos, jnp.tanh):
        x = x + edges @ (edges.T @ (x @ change(weights)))
    return x


def spectral_norm(steps):
    def fn(weights, x):
        u = jnp.ones(32)
        for _ in range(steps):
            v = weights.T @ u
            v = v / (jnp.linalg.norm(v) + 1e-6)
            u = weights @ v
            u = u / (jnp.linalg.norm(u) + 1e-6)
        u, v = lax.stop_gradient((u, v))
        return jax.nn.relu(x @ (weights / (u @ weights @ v)))

    return fn


def adapted(weights, x):
    """Steps of training inside of a loss."""
    params = {"w": weights, "bias": jnp.zeros(32), "head": weights}

    def network(p, x):
        return jax.nn.relu(x @ p["w"] + p["bias"]) @ p["head"]

    for _ in range(3):
        slope = jax.grad(lambda p: jnp.mean((network(p, x) - 1) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)
    return network(params, x)


def propagated(weights, x):
    """Layers that share what they multiply with, and no transpose of it."""
    start = z = jax.nn.relu(x @ weights)
    for _ in range(4):
        z = 0.9 * z @ weights + 0.1 * start
    return z


def without_a_direction(weights, x):
    """What a layer gives, without its part along what another one gives."""
    along, h = x @ weights, jnp.tanh(x) @ weights.T
    return (h - jnp.sum(h * along) / jnp.sum(along * along) * along) @ weights


def orthogonalized(weights, x):
    """By Newton and Schulz' iteration, as in Muon and Bjorck's layers: the next step mends what one has rounded."""
    for _ in range(3):
        weights = 1.5 * weights - 0.5 * weights @ weights.T @ weights
    return x @ weights


def equilibrium(bend, sign):
    return lambda weights, x: lax.fori_loop(0, 4, lambda _, z: bend(z + sign * (z @ weights.T) @ weights + x), x)


def rectified_by_own_weights(weights, x):
    layers = jnp.stack([weights, weights.T, -weights])
    return lax.scan(lambda z, w: (jax.nn.relu(z - 0.1 * (z @ w) @ w.T), None), x, layers)[0]


def stepped_by_own_weights(weights, x):
    for change in (jnp.sin, jnp.cos, jnp.tanh):
        x = x - 0.1 * (x @ change(weights)) @ change(weights).T
    return x


def bipartite(weights, x):
    """Users and items that hand on what they are to each other."""
    u, v = x, jnp.tanh(x)
    for _ in range(3):
        u = u + v @ weights
        v = v + u @ weights.T
    return u


def diffused(weights, x):
    """Over a graph, in layers."""
    edges = jnp.tanh(x[:8])
    for change in (jnp.sin, jnp.cos, jnp.tanh):
        x = x - 0.1 * (x @ edges.T) @ edges @ change(weights)
    return x


LAYERS = {
    "orthogonalized": orthogonalized,
    "an equilibrium": equilibrium(jnp.tanh, -0.1),
    "an equilibrium with a sum": equilibrium(jax.nn.gelu, 0.1),
    "by own weights": rectified_by_own_weights,
    "by own weights, written out": stepped_by_own_weights,
    "bipartite": bipartite,
    "diffused": diffused,
    "shared by all": lambda weights, x: lax.fori_loop(0, 3, lambda _, z: z + (z @ weights) @ weights.T, x),
    "tied": tied,
    "without a direction": without_a_direction,
    "tied in a loop": tied_in_a_loop,
    "linear attention": linear_attention,
    "linear attention, stacked": attention_of_a_stack,
    "linear attention in a scan": scanned_attention,
    "causal attention without softmax, its gradient": gradient_of_attention(causal),
    "attention of a relu, its gradient": gradient_of_attention(jax.nn.relu),
    "bilinear, stacked": bilinear_stack,
    "squared in a loop": squared_in_a_loop,
    "a graph": graph,
    "a spectral norm": spectral_norm(3),
    "adapted": adapted,
    "propagated": propagated,
    "a power": lambda weights, x: x @ lax.fori_loop(0, 3, lambda _, w: w @ w, weights),
    "a power, written out": lambda weights, x: x @ ((weights @ weights) @ (weights @ weights)),
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layers):
    products = product_dtypes(trace(jamp.cast_fn(layers, "O2:bfloat16"), WIDE, ROWS))
    vectors = 2 if layers is LAYERS["a spectral norm"] else 0  # The norm itself is divided by.
    assert sum("float32" in operands for operands in products) <= vectors
