"""A small model, train steps around it that are right or plain, and what jamp tells of a program."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jamp

PARAMS = {"w": jnp.eye(4), "b": jnp.zeros(4)}
X, Y = jnp.ones((8, 4)), jnp.zeros((8, 4))
SCALER = jamp.DynamicLossScale()
TX = jamp.mixed_precision(optax.adam(1e-3), "O2:float16")
STATE = TX.init(PARAMS)
BFLOAT16 = jamp.mixed_precision(optax.adam(1e-3), "O2:bfloat16")


def model(params, x):
    return x @ params["w"] + params["b"]


def make_loss(policy):
    forward = jamp.cast_fn(model, policy)
    return lambda params, x=X, y=Y: ((forward(params, x) - y) ** 2).mean()


loss = make_loss("O2:float16")
MADE_OUTSIDE = jamp.scaled_value_and_grad(loss, STATE)


def step_with(gradients, tx=TX):
    """A new step each time: JAX would not trace one twice, nor could it then be asked anything."""

    def step(params, opt_state, x=X, y=Y):
        grads = gradients(params, opt_state, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def right(params, opt_state, x, y):
    return jamp.scaled_value_and_grad(loss, opt_state)(params, x, y)[1]


def plain(params, opt_state, x, y):
    return jax.grad(loss)(params, x, y)


def told(run):
    """The warnings of a program, each with its file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    here = Path(__file__).parent
    assert all(issubclass(w.category, jamp.PrecisionWarning) and Path(w.filename).parent == here for w in caught)
    return [str(w.message) for w in caught]


def loop_by_scan(body, carry):
    return jax.lax.scan(lambda c, _: (body(c), None), carry, None, length=2)


def loop_by_fori(body, carry):
    return jax.lax.fori_loop(0, 2, lambda i, c: body(c), carry)


def loop_by_while(body, carry):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, carry))


def stacked(tree, n):
    return jax.tree.map(lambda x: jnp.stack([x] * n), tree)
