"""What an update subtracts from something nearly the same: `low_precision_state` leaves it float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.optim.test_low_precision_state import dtypes, dtypes_of, start, stored


def steps_of(tx, params, count=40):
    """The sum of the updates for gradients that hardly vary, at parameters that move."""

    def step(carry, i):
        params, state = carry
        grads = jax.tree.map(lambda p: jnp.cos(p) * (1 + 0.01 * jnp.sin(7 * i + 100 * p)), start())
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (new, state), _ = jax.jit(lambda c: lax.scan(step, c, jnp.arange(float(count))))((params, tx.init(params)))
    return jax.tree.map(jnp.subtract, new, params), state


def float32_parts(tx):
    found = dtypes_of(jax.eval_shape(tx.init, start()).inner_state)
    return {path for path, dtype in found.items() if dtype == "float32" and "['w']" in path}


CENTERED = {
    "rmsprop": optax.rmsprop(1e-3, centered=True),
    "rmsprop with hyperparameters": optax.inject_hyperparams(optax.rmsprop, static_args=("centered", "nesterov"))(
        1e-3, centered=True
    ),
    "bias correction": optax.chain(optax.scale_by_stddev(bias_correction=True), optax.scale(-1e-3)),
    "in MultiSteps": optax.MultiSteps(optax.rmsprop(1e-3, centered=True), 2),
    "in apply_if_finite": optax.apply_if_finite(optax.rmsprop(1e-3, centered=True), 2),
}


@pytest.mark.in_turns(2)
@dtypes
@pytest.mark.parametrize("optimizer", ["rmsprop", "bias correction"])
def test_centered_moments_near_float32(optimizer, dtype):
    inner = CENTERED[optimizer]
    found, state = steps_of(stored(inner, dtype), start())
    expected, _ = steps_of(inner, start())
    assert jamp.all_finite((found, state))
    error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected)) / optax.tree.norm(expected)
    assert error < 1e-3


@pytest.mark.parametrize("optimizer", CENTERED)
def test_centered_moments_stay_float32(optimizer):
    found = {path.split(".")[-1] for path in float32_parts(stored(CENTERED[optimizer]))}
    assert found - {"acc_grads['w']"} == {"mu['w']", "nu['w']"}  # The mean of `MultiSteps` goes into both.


@dtypes
def test_lbfgs_converges_as_in_float32(dtype):
    """It remembers the parameters and the gradient of the step before, and its line search leaves a gradient."""
    scale = jnp.linspace(1, 30, 1600).reshape(16, 100)
    loss = lambda p: jnp.sum(scale * p["w"] ** 2) + 0.1 * jnp.sum(p["w"] ** 4)  # noqa: E731
    params = {"w": jax.random.normal(jax.random.key(0), (16, 100))}

    def losses(tx):
        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            params, state = carry
            value, grads = value_and_grad(params, state=state)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
            return (optax.apply_updates(params, updates), state), value

        return jax.jit(lambda c: lax.scan(step, c, None, 12))((params, tx.init(params)))[1]

    found, expected = losses(stored(optax.lbfgs(), dtype)), losses(optax.lbfgs())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected[0]))


OTHERS = {
    "adam": (optax.adam(1e-3), set()),
    "lion": (optax.lion(1e-3), set()),
    "yogi": (optax.yogi(1e-3), set()),  # A step with a sign.
    "momentum, written as a lerp": (
        optax.GradientTransformation(
            optax.tree.zeros_like, lambda g, m, p: (m, jax.tree.map(lambda m, g: m + 0.9 * (g - m), m, g))
        ),
        set(),
    ),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-3), 2), set()),  # Its mean is a lerp too.
    "adan": (optax.adan(1e-3), {"[0].g['w']"}),
    "adabelief": (optax.adabelief(1e-3), {"[0].mu['w']"}),
    "schedule_free": (optax.contrib.schedule_free_adamw(1e-3), {".z['w']"}),
    "arguments of its own": (optax.contrib.sophia(1e-3), set()),
}


@pytest.mark.parametrize("optimizer", OTHERS)
def test_nothing_else_stays_float32(optimizer):
    inner, expected = OTHERS[optimizer]
    assert float32_parts(stored(inner)) == expected


def test_a_difference_in_a_loop_or_a_branch():
    def update(grads, state, params):
        def body(i, d):
            return d + lax.cond(i > 0, lambda: jax.tree.map(jnp.subtract, grads, state)["w"], lambda: d)

        return {**grads, "w": lax.fori_loop(0, 3, body, grads["w"])}, grads

    tx = stored(optax.GradientTransformation(optax.tree.zeros_like, update))
    assert float32_parts(tx) == {"['w']"}


def of_moments(variance):
    """A transformation that divides by the root of a variance of the gradients."""

    def update(grads, state, params=None):
        del params
        mu, nu = (
            jax.tree.map(lambda x, g: 0.9 * x + 0.1 * g, part, tree)
            for part, tree in zip(state, (grads, jax.tree.map(jnp.square, grads)), strict=True)
        )
        divide = lambda g, m, v: -1e-3 * g / jnp.sqrt(jnp.maximum(variance(m, v), 0) + 1e-12)  # noqa: E731
        return jax.tree.map(divide, grads, mu, nu), (mu, nu)

    zeros = lambda p: jax.tree.map(jnp.zeros_like, p)  # noqa: E731
    return optax.GradientTransformation(lambda p: (zeros(p), zeros(p)), update)


VARIANCES = {
    "negated factor": lambda m, v: v + (-m) * m,
    "minus one times": lambda m, v: v + jnp.float32(-1) * m * m,
    "ratio": lambda m, v: 1 - m * m / (v + 1e-30),
    "ratio of roots": lambda m, v: 1 - (jnp.abs(m) / jnp.sqrt(v)) ** 2,
    "negated ratio": lambda m, v: 1 + (-m) * m / v,
    "times what is left": lambda m, v: v * (1 - m * m / v),
}


@pytest.mark.parametrize("form", VARIANCES)
def test_a_variance_may_be_written_as_one_likes(form):
    assert len(float32_parts(stored(of_moments(VARIANCES[form])))) == 2


@pytest.mark.parametrize("name", ["lars", "ascent", "nesterov"])
def test_a_momentum_of_either_sign_is_no_difference(name):
    inner = {
        "lars": optax.lars(1.0),
        "ascent": optax.chain(optax.scale(-1.0), optax.sgd(0.1, momentum=0.9)),
        "nesterov": optax.chain(optax.scale(-2.0), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    }[name]
    assert not float32_parts(stored(inner))
