"""Networks beside a system are half: a policy that acts on a body, a decoder behind a filter."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves

rng = np.random.default_rng(0)
SIZE, WIDE = 6, 64
SCALES = {"in": (2 * SIZE, WIDE), "in_place": (SIZE, WIDE), "between": (WIDE, WIDE), "out": (WIDE, SIZE)}
WEIGHTS = {name: np.float32(rng.standard_normal(shape) / shape[0] ** 0.5) for name, shape in SCALES.items()}
POSITION, VELOCITY = np.float32(rng.standard_normal((2, SIZE)))
MASS = np.float32(np.eye(SIZE) + 0.1)
CONTACT = np.float32(rng.standard_normal((3, SIZE)))


def policy(weights, q, v):
    hidden = jax.nn.silu(jnp.concatenate([q, v]) @ weights["in"])
    return jax.nn.relu(hidden @ weights["between"]) @ weights["out"]


def adapted(weights, q, v):
    """Its weights are computed: they have a correction of low rank."""
    corrected = weights["in"] + 0.1 * weights["in"][:, :4] @ weights["in"][:4]
    return jnp.tanh(jnp.concatenate([q, v]) @ corrected) @ weights["out"]


def stacked(weights, q, v):
    layers = jnp.stack([weights["between"]] * 3)
    hidden = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), jnp.concatenate([q, v]) @ weights["in"], layers)[0]
    return jax.checkpoint(jnp.matmul)(hidden, weights["out"])


def solved(q, v, force):
    return q + 0.01 * v, v + 0.01 * jnp.linalg.solve(MASS, force - q)


def factored(q, v, force):
    """The mass depends on where the body is."""
    factor = jsp.linalg.cho_factor(MASS + jnp.outer(q, q))
    return q + 0.01 * v, v + 0.01 * jsp.linalg.cho_solve(factor, force - q)


def inverted(q, v, force):
    return q + 0.01 * v, v + 0.01 * jnp.linalg.inv(MASS + jnp.outer(q, q)) @ (force - q)


def implicit(q, v, force):
    """The velocity is solved for, and not its change."""
    return q + 0.01 * v, jnp.linalg.solve(MASS + 0.01 * jnp.diag(q * q), MASS @ v + 0.01 * (force - q))


def in_contact(q, v, force):
    pressed = jnp.linalg.solve(CONTACT @ CONTACT.T + jnp.eye(3), CONTACT @ v)
    return q + 0.01 * v, v + 0.01 * (force - CONTACT.T @ pressed)


def beside(q, v, force):
    """The force is no side of the system."""
    return q + 0.01 * v, v + 0.01 * (force + jnp.linalg.solve(MASS + jnp.outer(q, q), -q))


def rolled(act, move):
    def run(weights, q, v):
        return jax.lax.scan(lambda state, _: (move(*state, act(weights, *state)), state[0]), (q, v), None, 5)[1]

    return run


def written_out(act, move):
    def run(weights, q, v):
        for _ in range(3):
            q, v = move(q, v, act(weights, q, v))
        return q

    return run


def rules(fn, *args, half="bfloat16"):
    """Those of its products, by whether they are layers. Solvers have some of their own, as they were traced."""
    operations = jamp.report(fn, *args, policy=f"O2:{half}").operations
    found = [op for op in operations if op.primitive == "dot_general" and op.rule != "as traced"]
    layers = {op.rule for op in found if op.flops / op.count >= 2 * SIZE * WIDE}
    return layers, {op.rule for op in found} - layers


@both_halves
@pytest.mark.parametrize("over", [rolled, written_out])
@pytest.mark.parametrize("move", [solved, factored, inverted, implicit, in_contact, beside])
def test_policies_are_half(move, over, half):
    layers, _ = rules(over(policy, move), WEIGHTS, POSITION, VELOCITY, half=half)
    assert layers <= {"half", "half, float32 out"}


@both_halves
@pytest.mark.parametrize("act", [adapted, stacked])
def test_policies_of_other_layers_are_half(act, half):
    layers, _ = rules(rolled(act, factored), WEIGHTS, POSITION, VELOCITY, half=half)
    assert layers <= {"half", "half, float32 out"}


def test_products_of_the_system_are_float32():
    _, of_system = rules(rolled(policy, in_contact), WEIGHTS, POSITION, VELOCITY)
    assert "cancelling" in of_system


def equilibrium(newton):
    """Where a network gives what it is given, by Newton's method."""

    def run(weights, right):
        def left(z):
            return z - 0.5 * jnp.tanh(jnp.tanh(z @ weights["in_place"]) @ weights["out"]) - right

        return newton(lambda z: z - jnp.linalg.solve(jax.jacfwd(left)(z), left(z)), jnp.zeros_like(right))

    return run


def in_a_loop(step, start):
    return jax.lax.scan(lambda z, _: (step(z), None), start, None, 5)[0]


def one_by_one(step, start):
    for _ in range(5):
        start = step(start)
    return start


@both_halves
@pytest.mark.parametrize("newton", [in_a_loop, one_by_one])
def test_a_network_that_newtons_method_solves_for_is_float32(newton, half):
    """The Jacobian is made of its weights."""
    fn = equilibrium(newton)
    found = jamp.cast_fn(fn, f"O2:{half}")(WEIGHTS, POSITION)
    np.testing.assert_allclose(found, fn(WEIGHTS, POSITION), rtol=1e-5, atol=1e-5)


RESIDUALS = {
    "narrow": lambda w, z: jnp.tanh(jnp.tanh(z @ w["in_place"][:, :SIZE]) @ w["out"][:SIZE]),
    "assembled": lambda w, z: jnp.tanh(z @ w["in_place"]) @ w["in_place"].T / 20,
    "linear": lambda w, z: (z @ w["in_place"]) @ w["out"] / 5,
    "affine": lambda w, z: (z @ w["in_place"] + w["in"][0]) @ w["out"] / 5,
    "with a sine": lambda w, z: (z @ w["in_place"] + w["in"][0]) @ w["out"] / 5 + jnp.sin(z) / 5,
    "from the system": lambda w, z: jnp.tanh(z @ w["in_place"]) @ w["out"] / 5,
    "into the system": lambda w, z: jnp.tanh(z @ w["in_place"]) @ w["out"] / 5,
}


@both_halves
@pytest.mark.parametrize("residual", RESIDUALS)
def test_other_residuals_are_float32(residual, half):
    """What has an inexact Jacobian converges to where its residual as it is computed is zero."""

    def fn(weights, right):
        of_weights = {
            "from the system": weights["in_place"] @ weights["in_place"].T / 9,
            "into the system": weights["out"].T @ weights["out"],
        }
        system = of_weights.get(residual, jnp.linalg.inv(MASS))

        def step(z, _):
            return z - jnp.linalg.solve(jnp.eye(SIZE) + 0.1 * system, z - RESIDUALS[residual](weights, z) - right), None

        return jax.lax.scan(step, right, None, 40)[0]

    found = jamp.cast_fn(fn, f"O2:{half}")(WEIGHTS, VELOCITY)
    np.testing.assert_allclose(found, fn(WEIGHTS, VELOCITY), rtol=1e-5, atol=1e-5)


def decoded(weights, cov, rows):
    """A filter, and a network that reads its mean."""

    def step(state, row):
        mean, cov = state
        gain = jnp.linalg.solve(cov + jnp.eye(SIZE), cov).T
        state = mean + gain @ (row - mean), cov - gain @ cov + 0.1 * jnp.eye(SIZE)
        return state, jnp.tanh(mean @ weights["in_place"]) @ weights["out"]

    return jax.lax.scan(step, (jnp.zeros(SIZE), cov), rows)[1]


@both_halves
def test_a_decoder_behind_a_filter_is_half(half):
    layers, of_filter = rules(decoded, WEIGHTS, MASS, np.stack([POSITION, VELOCITY]), half=half)
    assert layers <= {"half", "half, float32 out"}
    assert of_filter <= {"cancelling", "solution"}
