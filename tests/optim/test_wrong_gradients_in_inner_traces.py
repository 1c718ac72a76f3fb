"""An operand of a branch, an inner jit or a checkpoint may be any scale: what is right with it is silent.

A state or gradients enter an inner trace as an operand, and the other by a closure.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jamp
from tests.optim.train_steps import PARAMS, STATE, TX, X, Y, loop_by_scan, loss, plain, right, told


def update(params, opt_state, grads):
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def twice(params, opt_state, grads):
    return update(*update(params, opt_state, grads), grads)


def keep(params, opt_state, *_):
    return params, opt_state


def if_wanted(run, *operands):
    """`run` or `keep`, by a branch whose operands are all that is given."""
    return jax.lax.cond(jnp.asarray(True), run, keep, *operands)


def in_custom_vjp(run, *operands):
    function = jax.custom_vjp(run)
    function.defvjp(lambda *args: (run(*args), None), lambda _, cotangents: None)
    return function(*operands)


def clip(params, opt_state, grads):
    return update(params, opt_state, jamp.clip_by_global_norm(grads, 1.0, opt_state))


def add(params, opt_state, grads):
    return update(params, opt_state, jax.tree.map(jnp.add, grads, right(params, opt_state, X, Y)))


def after(params, opt_state, grads):
    """The step after one: its operands."""
    params, opt_state = update(params, opt_state, grads)
    return params, opt_state, right(params, opt_state, X, Y)


def in_scan(params, opt_state, _):
    def step(params, opt_state):
        grads = right(params, opt_state, X, Y)
        return if_wanted(functools.partial(update, grads=grads), params, opt_state)

    return loop_by_scan(lambda carry: step(*carry), (params, opt_state))


OF = functools.partial
RIGHT = {
    "state to a branch": lambda p, s, g: if_wanted(OF(update, grads=g), p, s),
    "gradients to a branch": lambda p, s, g: jax.lax.cond(True, OF(update, p, s), lambda _: (p, s), g),
    "all to a branch": lambda p, s, g: if_wanted(update, p, s, g),
    "nothing to a branch": lambda p, s, g: if_wanted(lambda p, _: update(p, s, g), p, s),
    "state to a switch": lambda p, s, g: jax.lax.switch(0, [OF(update, grads=g), keep], p, s),
    "state to an inner jit": lambda p, s, g: jax.jit(lambda p, s: update(p, s, g))(p, s),
    "gradients to an inner jit": lambda p, s, g: jax.jit(lambda g: update(p, s, g))(g),
    "state to a checkpoint": lambda p, s, g: jax.checkpoint(lambda p, s: update(p, s, g))(p, s),
    "state to a custom_vjp": lambda p, s, g: in_custom_vjp(lambda p, s: update(p, s, g), p, s),
    "state to nnx.cond": lambda p, s, g: nnx.cond(jnp.asarray(True), OF(update, grads=g), keep, p, s),
    "state to a branch of a branch": lambda p, s, g: if_wanted(lambda p, s: if_wanted(OF(update, grads=g), p, s), p, s),
    "state to a branch in a scan": in_scan,
    "state of the last update to a branch": lambda p, s, g: if_wanted(update, *after(p, s, g)),
    "clipped in a branch": lambda p, s, g: if_wanted(OF(clip, grads=g), p, s),
    "more gradients in a branch": lambda p, s, g: if_wanted(OF(add, grads=g), p, s),
    "state and its scaler to a branch": lambda p, s, g: if_wanted(
        lambda p, s, scaler: update(p, s, right(p, scaler, X, Y)), p, s, jamp.loss_scale(s)
    ),
    "state to the branch that differentiates": lambda p, s, g: if_wanted(
        lambda p, t: update(p, s, right(p, t, X, Y)), p, s
    ),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("form", RIGHT)
def test_right_code_is_silent(form):
    jax.jit(lambda p, s: RIGHT[form](p, s, right(p, s, X, Y)))(PARAMS, STATE)


def test_a_branch_that_nothing_compiles():
    if_wanted(lambda p, s: update(p, s, right(p, STATE, X, Y)), PARAMS, STATE)


WRONG = [
    ("never multiplied", lambda p, s, g: if_wanted(lambda p, s: update(p, s, plain(p, s, X, Y)), p, s)),
    ("never multiplied", lambda p, s, g: if_wanted(OF(update, grads=jax.grad(loss)(p)), p, s)),
    ("unscaled already", lambda p, s, g: if_wanted(lambda p, s: update(p, s, jamp.loss_scale(s).unscale(g)), p, s)),
    ("the power 2", lambda p, s, g: if_wanted(lambda p, s: update(p, s, jamp.loss_scale(s).scale(g)), p, s)),
    ("were multiplied", lambda p, s, g: jax.jit(lambda p, s: update(p, s, optax.tree.clip(g, -1, 1)))(p, s)),
    ("another loss scale", lambda p, s, g: if_wanted(OF(twice, grads=g), p, s)),
    ("another loss scale", lambda p, s, g: jax.jit(lambda p, s: twice(p, s, right(p, s, X, Y)))(p, s)),
    (
        "before this loop",
        lambda p, s, g: jax.jit(lambda p, s: loop_by_scan(lambda c: update(*c, right(c[0], s, X, Y)), (p, s)))(p, s),
    ),
]


@pytest.mark.parametrize(("message", "run"), WRONG)
def test_what_is_known_all_the_same(message, run):
    (found,) = told(lambda: jax.jit(lambda p, s: run(p, s, right(p, s, X, Y)))(PARAMS, STATE))
    assert message in found


def test_another_state_is_told_where_both_are_known():
    branch = lambda p, s, t: if_wanted(lambda p, _: update(p, s, right(p, t, X, Y)), p, s)  # noqa: E731
    (found,) = told(lambda: jax.jit(branch)(PARAMS, STATE, STATE))
    assert "another loss scale" in found
