"""Gradients that were not made for their optimizer are told, each once and at the user's line; right ones are silent.

The suite turns warnings into errors, so every other test of jamp says that right code is silent, too.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jamp
from tests.optim.train_steps import (
    BFLOAT16,
    MADE_OUTSIDE,
    PARAMS,
    SCALER,
    STATE,
    TX,
    X,
    Y,
    loop_by_fori,
    loop_by_scan,
    loop_by_while,
    loss,
    make_loss,
    model,
    plain,
    right,
    stacked,
    step_with,
    told,
)  # fmt: skip

CONSTANT = {
    "made outside of the step": lambda: jax.jit(step_with(lambda p, s, x, y: MADE_OUTSIDE(p, x, y)[1]))(PARAMS, STATE),
    # A new function, because `jax.make_jaxpr` below traces by `jax.jit`, which traces a function once.
    "jitted by itself": lambda: jax.jit(jamp.scaled_value_and_grad(loss, STATE))(PARAMS),
    "state closed over": lambda: jax.jit(step_with(lambda p, s, x, y: right(p, STATE, x, y)))(PARAMS, STATE),
    "whole step closes over it": lambda: jax.jit(lambda p: step_with(right)(p, STATE))(PARAMS),
    "state by partial": lambda: jax.jit(functools.partial(step_with(right), opt_state=STATE))(PARAMS),
    "scaler closed over": lambda: jax.jit(lambda p: jamp.value_and_grad(loss, SCALER)(p))(PARAMS),
    "grad, scaler closed over": lambda: jax.jit(lambda p: jamp.grad(loss, SCALER)(p))(PARAMS),
    "scaled by hand": lambda: jax.jit(jax.grad(lambda p: SCALER.scale(loss(p))))(PARAMS),
    "in a scan in jit": lambda: jax.jit(
        lambda p: jax.lax.scan(lambda c, _: (c, MADE_OUTSIDE(p)[0]), None, None, length=2)
    )(PARAMS),
    "in vmap in jit": lambda: jax.jit(jax.vmap(lambda x: MADE_OUTSIDE(PARAMS, x, Y)[0]))(X[None]),
    "in pmap": lambda: jax.pmap(lambda p: MADE_OUTSIDE(p)[0])(stacked(PARAMS, 2)),
    "accumulated in jit": lambda: jax.jit(jamp.accumulate_gradients(MADE_OUTSIDE, 4))(PARAMS, X, Y),
}


@pytest.mark.parametrize("form", CONSTANT)
def test_a_scale_that_becomes_a_constant(form):
    (message,) = told(CONSTANT[form])
    assert "constant of a compiled function" in message and "jamp.scaled_value_and_grad(loss_fn, opt_state)" in message


def clipped_by_hand(params, opt_state, x, y):
    grads = right(params, opt_state, x, y)
    norm = optax.tree.norm(jamp.loss_scale(opt_state).unscale(grads))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)


RIGHT = {
    "jit": lambda: jax.jit(step_with(right))(PARAMS, STATE),
    "eager": lambda: step_with(right)(PARAMS, STATE),
    "eager, made outside": lambda: MADE_OUTSIDE(PARAMS),
    "donated": lambda: jax.jit(step_with(right), donate_argnums=(0, 1))(*jax.tree.map(jnp.copy, (PARAMS, STATE))),
    "scan": lambda: jax.lax.scan(lambda c, _: (step_with(right)(*c), None), (PARAMS, STATE), None, length=2),
    "eager scan over batches": lambda: jax.lax.scan(lambda c, x: (c, MADE_OUTSIDE(PARAMS, x, Y)), None, X[None]),
    "eager vmap": lambda: jax.vmap(lambda x: MADE_OUTSIDE(PARAMS, x, Y))(X[None]),
    "ensemble": lambda: jax.jit(jax.vmap(step_with(right)))(*stacked((PARAMS, STATE), 2)),
    "ensemble on devices": lambda: jax.pmap(step_with(right))(*stacked((PARAMS, STATE), 2)),
    "accumulated": lambda: jamp.accumulate_gradients(MADE_OUTSIDE, 4)(PARAMS, X, Y),
    "accumulated in jit": lambda: jax.jit(
        step_with(lambda p, s, x, y: jamp.accumulate_gradients(jamp.scaled_value_and_grad(loss, s), 4)(p, x, y)[1])
    )(PARAMS, STATE),
    "looked at": lambda: [jax.make_jaxpr(MADE_OUTSIDE)(PARAMS), jax.eval_shape(MADE_OUTSIDE, PARAMS)],
    "inspected": lambda: [f(MADE_OUTSIDE, PARAMS) for f in (jamp.report, jamp.compare, jamp.first_nonfinite)],
    "scaled by hand": lambda: jax.jit(
        step_with(lambda p, s, x, y: jax.grad(lambda p: loss(p, x, y) * jamp.scale_value(s))(p))
    )(PARAMS, STATE),
    "clipped by hand": lambda: jax.jit(step_with(clipped_by_hand))(PARAMS, STATE),
    "gradients from outside": lambda: jax.jit(TX.update)(PARAMS, STATE, PARAMS),
    "gradients not of this trace": lambda: jax.jit(lambda p, s: TX.update(jax.tree.map(jnp.zeros_like, p), s, p))(
        PARAMS, STATE
    ),
    "one scale for two optimizers": lambda: jax.jit(
        lambda p, s, t: TX.update(right(p, t, X, Y), s, p, grads_finite=True)[0]  # The `&` of their flags.
    )(PARAMS, STATE, STATE),
    "two steps in one": lambda: jax.jit(lambda p, s: step_with(right)(*step_with(right)(p, s)))(PARAMS, STATE),
    "scaler an argument": lambda: jax.jit(lambda p, s: jamp.value_and_grad(loss, s)(p))(PARAMS, SCALER),
    "static scale": lambda: jax.jit(lambda p: jamp.value_and_grad(loss, jamp.StaticLossScale(8.0))(p))(PARAMS),
    "no scale": lambda: jax.jit(lambda p: jamp.value_and_grad(loss, jamp.NoOpLossScale())(p))(PARAMS),
    "under grad": lambda: jax.jit(jax.grad(lambda p: step_with(right)(p, STATE_OF(p))[0]["w"].sum()))(PARAMS),
}


def STATE_OF(params):  # noqa: N802 (a state that is made inside of the trace)
    return TX.init(params)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("form", RIGHT)
def test_right_code_is_silent(form):
    RIGHT[form]()


@pytest.mark.parametrize(
    "form",
    {
        "jit": lambda: jax.jit(step_with(plain))(PARAMS, STATE),
        "value_and_grad": lambda: jax.jit(step_with(lambda p, s, x, y: jax.value_and_grad(loss)(p)[1]))(PARAMS, STATE),
        "vjp": lambda: jax.jit(step_with(lambda p, s, x, y: jax.vjp(loss, p)[1](jnp.float32(1))[0]))(PARAMS, STATE),
        "jitted inside": lambda: jax.jit(step_with(lambda p, s, x, y: jax.jit(jax.grad(loss))(p)))(PARAMS, STATE),
        "scan": lambda: jax.lax.scan(lambda c, _: (step_with(plain)(*c), None), (PARAMS, STATE), None, length=2),
        "vmap": lambda: jax.jit(jax.vmap(step_with(plain)))(*stacked((PARAMS, STATE), 2)),
        "accumulated": lambda: jax.jit(
            step_with(lambda p, s, x, y: jamp.accumulate_gradients(jax.value_and_grad(loss), 4)(p, x, y)[1])
        )(PARAMS, STATE),
        "clipped": lambda: jax.jit(step_with(lambda p, s, x, y: jax.tree.map(jnp.tanh, plain(p, s, x, y))))(
            PARAMS, STATE
        ),
        "the state of before": lambda: jax.jit(
            step_with(lambda p, s, x, y: jax.grad(lambda p: loss(p) * 32768.0)(p))  # As it was when this was written.
        )(PARAMS, STATE),
        "chain": lambda: jax.jit(step_with(plain, chain := optax.chain(jamp.loss_scaled(SCALER), optax.sgd(1.0))))(
            PARAMS, chain.init(PARAMS)
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_gradients_that_were_never_scaled(form):
    (message,) = told(form[1])
    assert "never multiplied" in message and "nnx.value_and_grad" in message


@pytest.mark.parametrize(
    "gradients",
    [
        lambda p, s, x, y: jamp.value_and_grad(loss, jamp.loss_scale(s))(p)[1],
        lambda p, s, x, y: jamp.grad(loss, jamp.loss_scale(s))(p),
        lambda p, s, x, y: jax.jit(lambda p, s: jamp.grad(loss, s)(p))(p, jamp.loss_scale(s)),
        lambda p, s, x, y: jamp.loss_scale(s).unscale(right(p, s, x, y)),
        lambda p, s, x, y: jax.tree.map(lambda g: g / 2, jamp.loss_scale(s).unscale(right(p, s, x, y))),
        lambda p, s, x, y: jamp.grad(loss, jamp.StaticLossScale(1024.0))(p),
    ],
)
def test_gradients_that_are_unscaled_twice(gradients):
    (message,) = told(lambda: jax.jit(step_with(gradients))(PARAMS, STATE))
    assert "unscaled already" in message


@pytest.mark.parametrize("loop", [loop_by_scan, loop_by_fori, loop_by_while])
def test_a_scale_of_before_the_loop(loop):
    def epoch(params, opt_state, inside):
        before = jamp.scaled_value_and_grad(loss, opt_state)
        gradients = right if inside else lambda p, s, x, y: before(p, x, y)[1]
        return loop(lambda carry: step_with(gradients)(*carry), (params, opt_state))

    (message,) = told(lambda: jax.jit(functools.partial(epoch, inside=False))(PARAMS, STATE))
    assert "of before this loop" in message and "jamp.scaled_value_and_grad(loss_fn, opt_state)" in message
    jax.jit(functools.partial(epoch, inside=True))(PARAMS, STATE)


def test_gradients_of_several_batches_with_the_scale_of_before_the_loop():
    def step(params, opt_state, xs):
        differentiate = jamp.scaled_value_and_grad(loss, opt_state)
        add = lambda total, x: (jax.tree.map(jnp.add, total, differentiate(params, x)[1]), None)  # noqa: E731
        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return TX.update(grads, opt_state, params)

    jax.jit(step)(PARAMS, STATE, jnp.stack([X, X]))


def test_a_scale_of_before_a_loop_that_nothing_compiles():
    eager = lambda c, x: (step_with(lambda p, s, x, y: MADE_OUTSIDE(p, x, y)[1])(*c, x), None)  # noqa: E731
    (message,) = told(lambda: jax.lax.scan(eager, (PARAMS, STATE), X[None]))
    assert "of before this loop" in message


def clip_by_norm(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), grads)


def clip_by_optax(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def clip_by_branch(grads):
    norm = optax.tree.norm(grads)
    return jax.lax.cond(norm > 1, lambda g: jax.tree.map(lambda x: x / norm, g), lambda g: g, grads)


@pytest.mark.parametrize(
    "change",
    {
        "by norm": clip_by_norm,
        "by value": lambda g: jax.tree.map(lambda x: jnp.clip(x, -1, 1), g),
        "by optax": clip_by_optax,
        "by a branch": clip_by_branch,
        "by a branch, to zero": lambda g: jax.lax.cond(
            optax.tree.norm(g) < 100, lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), g
        ),
        "by a mask": lambda g: jax.tree.map(lambda x: jnp.where(jnp.abs(x) > 10.0, 0, x), g),
        "by jamp, as if true": lambda g: jamp.clip_by_global_norm(g, 1.0),
        "jitted": jax.jit(clip_by_norm),
    }.items(),
    ids=lambda item: item[0],
)
def test_clipping_of_scaled_gradients(change):
    (message,) = told(lambda: jax.jit(step_with(lambda p, s, x, y: change[1](right(p, s, x, y))))(PARAMS, STATE))
    assert "while they were multiplied" in message and "jamp.clip_by_global_norm(grads, 1.0, opt_state)" in message


def _of_each(change):
    return lambda g: jax.tree.map(change, g)


def all_or_nothing(g):
    fine = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(g)]))
    return jax.tree.map(lambda x: jnp.where(fine, x, 0), g)


@pytest.mark.parametrize(
    "change",
    {
        "nan_to_num": _of_each(jnp.nan_to_num),
        "isfinite": _of_each(lambda x: jnp.where(jnp.isfinite(x), x, 0)),
        "isnan": _of_each(lambda x: jnp.where(jnp.isnan(x), 0.0, x)),
        "isinf": _of_each(lambda x: jnp.where(jnp.isinf(x), 1.0, x)),
        "less than infinite": _of_each(lambda x: jnp.where(jnp.abs(x) < jnp.inf, x, 0)),
        "all of them": all_or_nothing,
        "by jamp": lambda g: jax.tree.map(lambda x: jnp.where(jamp.all_finite(g), x, 0), g),
        "select_tree": lambda g: jamp.select_tree(jamp.all_finite(g), g, jax.tree.map(jnp.zeros_like, g)),
        "by the norm": lambda g: jax.tree.map(lambda x: jnp.where(jnp.isfinite(jamp.global_norm(g)), x, 0), g),
        "a branch": lambda g: jax.lax.cond(
            jamp.all_finite(g), lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), g
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_infinities_that_are_hidden(change):
    (message,) = told(lambda: jax.jit(step_with(lambda p, s, x, y: change[1](right(p, s, x, y))))(PARAMS, STATE))
    assert "Infinities and NaNs in these gradients were replaced" in message


def test_what_a_model_replaces_is_its_own():
    def loss(p, x):
        y = jnp.log(p * x)
        return jnp.where(jnp.isfinite(y), y, 0.0).sum() + jnp.nan_to_num(y).sum()

    tx = jamp.mixed_precision(optax.sgd(0.1), "O2:float16")

    @jax.jit
    def step(p, state):
        _, grads = jamp.scaled_value_and_grad(jamp.cast_fn(loss, "O2:float16"), state)(p, jnp.ones(4))
        return tx.update(grads, state, p)

    p = jnp.ones(4)
    assert told(lambda: step(p, tx.init(p))) == []


def test_functions_of_scaled_gradients():
    squashed = lambda p, s, x, y: jax.tree.map(jnp.tanh, right(p, s, x, y))  # noqa: E731
    (message,) = told(lambda: jax.jit(step_with(squashed))(PARAMS, STATE))
    assert "a function that is not linear" in message and "32,768 at first" in message


def penalty(params):
    return sum((p**2).sum() for p in jax.tree.leaves(params))


IN_PART = {
    "decay by hand": lambda p, s, x, y: jax.tree.map(lambda g, p: g + 0.1 * p, right(p, s, x, y), p),
    "a second gradient": lambda p, s, x, y: jax.tree.map(jnp.add, right(p, s, x, y), jax.grad(penalty)(p)),
    "one summand of the loss": lambda p, s, x, y: jax.grad(
        lambda p: jamp.loss_scale(s).scale(loss(p, x, y)) + penalty(p)
    )(p),
    "one leaf": lambda p, s, x, y: right(p, s, x, y) | {"b": plain(p, s, x, y)["b"]},
}


@pytest.mark.parametrize("form", IN_PART)
def test_gradients_that_are_scaled_in_part(form):
    (message,) = told(lambda: jax.jit(step_with(IN_PART[form]))(PARAMS, STATE))
    assert "Only a part of these gradients" in message and ("['b']" in message) == (form == "one leaf")


def test_gradients_that_are_scaled_twice():
    twice = lambda p, s, x, y: jamp.scaled_value_and_grad(lambda p: jamp.loss_scale(s).scale(loss(p)), s)(p)[1]  # noqa: E731
    (message,) = told(lambda: jax.jit(step_with(twice))(PARAMS, STATE))
    assert "the power 2 of the loss scale" in message


HANDED_ON = {
    "jitted": lambda s: jax.jit(lambda s: s)(s),
    "put somewhere": lambda s: jax.device_put(s, jax.devices()[0]),
    "checkpointed": lambda s: jax.checkpoint(lambda s: s)(s),
    "behind a barrier": jax.lax.optimization_barrier,
    "set to what it is": lambda s: jamp.set_loss_scale(s, jamp.scale_value(s)),
    "checked": lambda s: eqx.error_if(s, jnp.isnan(s.scale_used), "not a number"),
    "computed with": lambda s: jax.tree.map(lambda x: jnp.where(True, x, x), s),
    "by a branch": lambda s: jax.lax.cond(s.grads_finite, lambda s: s, lambda s: s, s),
    "through a loop": lambda s: jax.lax.fori_loop(0, 2, lambda i, s: s, s),
}


@pytest.mark.parametrize("form", HANDED_ON)
def test_a_state_that_is_handed_on_is_the_same(form):
    def step(params, opt_state):
        grads = right(params, opt_state, X, Y)
        return TX.update(grads, HANDED_ON[form](opt_state), params)

    jax.jit(step)(PARAMS, STATE)


def test_a_state_that_nested_functions_of_nnx_hand_on():
    forward = jamp.cast_fn(lambda model, x: model(x), "O2:float16")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def gradients(model, optimizer):
        differentiate = jamp.scaled_value_and_grad(
            lambda model: (forward(model, X) ** 2).mean(), optimizer.opt_state, transform=nnx.value_and_grad
        )
        return differentiate(model)[1]

    nnx.jit(lambda model, optimizer: optimizer.update(model, gradients(model, optimizer)))(model, optimizer)


def test_no_trace_is_kept():
    chain = optax.chain(TX, optax.scale(1.0))
    state = chain.init(PARAMS)
    with jax.checking_leaks():
        jax.jit(step_with(right))(PARAMS, STATE)
        jax.jit(step_with(right, chain))(PARAMS, state)


def test_gradients_of_another_state():
    step = lambda p, s, other: step_with(lambda p, _, x, y: right(p, other, x, y))(p, s)  # noqa: E731
    (message,) = told(lambda: jax.jit(step)(PARAMS, STATE, STATE))
    assert "another loss scale" in message

    def two_steps(params, opt_state):
        differentiate = jamp.scaled_value_and_grad(loss, opt_state)
        one = lambda p, s: step_with(lambda p, s, x, y: differentiate(p)[1])(p, s)  # noqa: E731
        return one(*step_with(right)(params, opt_state))

    (message,) = told(lambda: jax.jit(two_steps)(PARAMS, STATE))
    assert "that of an earlier step" in message

    def behind(carry, _):
        params, opt_state, before = carry
        params, after = step_with(lambda p, s, x, y: right(p, before, x, y))(params, opt_state)
        return (params, after, opt_state), None

    (message,) = told(lambda: jax.lax.scan(behind, (PARAMS, STATE, STATE), None, length=2))
    assert "loss scale" in message


STATIC = jamp.mixed_precision(optax.adam(1e-3), "O2:float16", loss_scale=1024.0)


@pytest.mark.parametrize(
    "gradients",
    {
        "by its state": right,
        "by a scaler like it": lambda p, s, x, y: jamp.scaled_value_and_grad(loss, jamp.StaticLossScale(1024))(p)[1],
        "by hand": lambda p, s, x, y: jax.grad(lambda p: 1024 * loss(p))(p),
        "by its reciprocal": lambda p, s, x, y: jax.grad(lambda p: loss(p) / 2**-10)(p),
        "afterwards": lambda p, s, x, y: jax.tree.map(lambda g: g * 1024.0, plain(p, s, x, y)),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_static_scale(gradients):
    jax.jit(step_with(gradients[1], STATIC))(PARAMS, STATIC.init(PARAMS))


@pytest.mark.parametrize(
    "gradients",
    [plain, lambda p, s, x, y: jax.jacfwd(loss)(p), lambda p, s, x, y: jax.grad(lambda p: 128 * loss(p))(p)],
)
def test_a_static_scale_that_nobody_applied(gradients):
    (message,) = told(lambda: jax.jit(step_with(gradients, STATIC))(PARAMS, STATIC.init(PARAMS)))
    assert "never multiplied" in message


def test_scaled_gradients_for_an_optimizer_without_a_scale():
    tx = jamp.mixed_precision(optax.adam(1e-3), "O2:bfloat16")
    scaled = lambda p, s, x, y: jamp.scaled_value_and_grad(make_loss("O2:bfloat16"), jamp.StaticLossScale(8.0))(p)[1]  # noqa: E731
    (message,) = told(lambda: jax.jit(step_with(scaled, tx))(PARAMS, tx.init(PARAMS)))
    assert "nothing divides by it" in message


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("loop", [loop_by_scan, loop_by_fori])
@pytest.mark.parametrize(
    "form",
    {
        "projected": lambda a, b: a - jnp.minimum(jnp.vdot(a, b) / jnp.vdot(b, b), 0) * b,
        "masked": lambda a, b: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, a.shape), a, 0),
        "weighed": lambda a, b: 0.3 * a + 0.7 * b,
        "of one size": lambda a, b: a * (jnp.linalg.norm(b) / (jnp.linalg.norm(a) + 1e-8)),
        "without what is not finite": lambda a, b: jnp.nan_to_num(a),
        "centred": lambda a, b: a - a.mean(),
        "in half": lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    }.items(),
    ids=lambda item: item[0],
)
def test_gradients_that_are_changed_rightly(form, loop):
    def gradients(params, opt_state, x, y):
        a, b = right(params, opt_state, x, y), right(params, opt_state, x + 1, y)
        return jax.tree.map(form[1], a, b)

    loop(lambda carry: step_with(gradients)(*carry), (PARAMS, STATE))


def test_a_state_of_an_nnx_optimizer_outside_of_the_step():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    forward = jamp.cast_fn(lambda model, x: model(x), "O2:float16")
    of = lambda state: jamp.scaled_value_and_grad(  # noqa: E731
        lambda model: (forward(model, X) ** 2).mean(), state, transform=nnx.value_and_grad
    )
    outside = of(optimizer.opt_state)

    def step(model, optimizer, differentiate):
        optimizer.update(model, differentiate(optimizer)(model)[1])

    (message,) = told(lambda: nnx.jit(lambda m, o: step(m, o, lambda _: outside))(model, optimizer))
    assert "constant of a compiled function" in message
    nnx.jit(lambda m, o: step(m, o, lambda o: of(o.opt_state)))(model, optimizer)


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O1:bfloat16", "O0", "p=f32,c=bf16,o=f32"])
@pytest.mark.parametrize("inside", [False, True])
def test_two_policies(policy, inside):
    tx = jamp.mixed_precision(optax.adam(1e-3), policy)
    gradients = (lambda p, s, x, y: jax.jit(right)(p, s, x, y)) if inside else right
    (message,) = told(lambda: jax.jit(step_with(gradients, tx))(PARAMS, tx.init(PARAMS)))
    assert "float16" in message and str(jamp.get_policy(policy)) in message and "jamp.MixedPrecision(" in message


def test_two_policies_that_go_together():
    of = lambda loss: lambda p, s, x, y: jamp.scaled_value_and_grad(loss, s)(p, x, y)[1]  # noqa: E731
    jax.jit(step_with(of(make_loss("O2:bfloat16")), BFLOAT16))(PARAMS, BFLOAT16.init(PARAMS))
    jax.jit(step_with(of(make_loss("O2:bfloat16"))))(PARAMS, STATE)  # A scale where none is needed does no harm.
    on_purpose = jamp.mixed_precision(optax.adam(1e-3), "O2:float16", loss_scale=jamp.NoOpLossScale())
    jax.jit(step_with(right, on_purpose))(PARAMS, on_purpose.init(PARAMS))


@pytest.mark.parametrize("change", [lambda g: g, lambda g: jnp.clip(g, -1, 1), lambda g: g * 1.0 / jnp.maximum(1.0, g)])
def test_what_an_optimizer_without_a_scale_may_get(change):
    changed = lambda p, s, x, y: jax.tree.map(change, jax.grad(make_loss("O2:bfloat16"))(p))  # noqa: E731
    jax.jit(step_with(changed, BFLOAT16))(PARAMS, BFLOAT16.init(PARAMS))


def test_other_models_in_float16():
    frozen, mean = jamp.cast_fn(model, "O2:float16"), make_loss("O2:bfloat16")
    jax.jit(step_with(lambda p, s, x, y: jax.grad(lambda p: mean(p, frozen(PARAMS, X)))(p), BFLOAT16))(
        PARAMS, BFLOAT16.init(PARAMS)
    )

    def attacked(params, _, x, y):  # Data that went through a derivative in float16.
        x = x + 0.1 * jnp.sign(jax.grad(loss, argnums=1)(params, x, y))
        return jax.grad(mean)(params, x, y)

    jax.jit(step_with(attacked, BFLOAT16))(PARAMS, BFLOAT16.init(PARAMS))


def test_a_state_without_a_scale():
    (message,) = told(lambda: jax.jit(step_with(right))(PARAMS, BFLOAT16.init(PARAMS)))
    assert "jamp.set_loss_scale(opt_state, jamp.DynamicLossScale())" in message
    state = jamp.set_loss_scale(BFLOAT16.init(PARAMS), jamp.DynamicLossScale())
    jax.jit(step_with(right))(PARAMS, state)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit, lambda f: jax.jit(jax.checkpoint(f))])
def test_a_frozen_float16_teacher_of_a_bfloat16_model(wrap):
    teacher, student = jamp.cast_fn(model, "O2:float16"), jamp.cast_fn(model, "O2:bfloat16")

    def make(student):
        @wrap
        def distill(params, x):
            return ((student(params, x) - jnp.tanh(teacher(PARAMS, x))) ** 2).mean()

        return step_with(lambda params, opt_state, x, y: jax.grad(distill)(params, x), BFLOAT16)

    assert told(lambda: jax.jit(make(student))(PARAMS, BFLOAT16.init(PARAMS))) == []
    assert len(told(lambda: jax.jit(make(teacher))(PARAMS, BFLOAT16.init(PARAMS)))) == 1
