"""Wrong calls, as people make them who come from elsewhere: each is an error with the code to write instead."""

import contextlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

PARAMS, X = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
SHAPES = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
HALF = {"w": jnp.ones((4, 2), jnp.float16)}
O2 = jamp.mixed_precision(optax.adam(1e-3), "O2:float16")
O3 = jamp.mixed_precision(optax.adam(1e-3), "O3:float16")
STATE = O2.init(PARAMS)
FLAGS = ("yes", None, 1, 0.5, PARAMS, jnp.array([True, False]))
SCALERS = (jamp.DynamicLossScale(), jamp.StaticLossScale(2.0), jamp.NoOpLossScale())
RUNNERS = (jamp.compare, jamp.first_nonfinite, jamp.verify, jamp.error_sources)


def loss(params, x):
    return (x @ params["w"]).mean()


def enter(context):
    with context():
        pass


def refused(error, text, calls):
    return [pytest.param(call, error, text, id=f"{text[:30]} {i}") for i, call in enumerate(calls)]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *refused(
            ValueError, "Write jamp.all_finite(grads).", [lambda s=s, f=f: s.adjust(f) for s in SCALERS for f in FLAGS]
        ),
        *refused(
            TypeError,
            "They are no contexts for `with`, because JAX has no global mode",
            [
                lambda: enter(lambda: jamp.autocast("O2")),
                lambda: enter(lambda: jamp.autocast()),
                lambda: enter(lambda: jamp.autocast(policy="O2")),
                lambda: enter(lambda: jamp.autocast(jamp.get_policy("O2"))),
                lambda: enter(lambda: jamp.autocast("cuda")),
                lambda: enter(lambda: jamp.autocast("cuda", jnp.float16)),
                lambda: enter(lambda: jamp.autocast(jnp.float16)),
                lambda: enter(lambda: jamp.cast_fn("O2:float16")),
                lambda: enter(lambda: jamp.cast_fn(loss)),
            ],
        ),
        *refused(
            TypeError,
            "jamp.autocast(fn, policy='O1:float16')",
            [
                lambda: enter(lambda: jamp.autocast(device_type="cuda", dtype=jnp.float16)),
                lambda: enter(lambda: jamp.autocast(enabled=False)),
            ],
        ),
        *refused(TypeError, "`jamp.autocast(fn, policy='O2')`", [lambda: jamp.autocast("cuda")]),
        *refused(TypeError, "`jamp.cast_fn(fn, policy='O1')`", [lambda: jamp.cast_fn("O1", loss)]),
        *refused(
            TypeError, "nor `with jamp.full_precision():`", [lambda: enter(jamp.full_precision), jamp.full_precision]
        ),
        *refused(TypeError, "nor `with jamp.half_precision():`", [lambda: enter(jamp.half_precision)]),
        *refused(
            ValueError,
            "For mixed precision in it write 'O2:float16'.",
            [
                lambda: jamp.cast_fn(loss, jnp.float16),
                lambda: jamp.get_policy(jnp.dtype("float16")),
                lambda: jamp.mixed_precision(optax.sgd(1.0), jnp.float16),
            ],
        ),
        *refused(TypeError, "The optimizer comes first", [lambda: jamp.mixed_precision("O2:float16", optax.sgd(1.0))]),
        *refused(TypeError, "The policy comes first", [lambda: jamp.MixedPrecision(optax.sgd(1.0), "O2:float16")]),
        *refused(
            TypeError,
            "The state comes first",
            [lambda: jamp.set_loss_scale(128.0, STATE), lambda: jamp.set_loss_scale(jamp.DynamicLossScale(), STATE)],
        ),
        *refused(TypeError, "The function comes first", [lambda: jamp.scaled_value_and_grad(STATE, loss)]),
        *refused(
            ValueError,
            "jamp.DynamicLossScale.preset('pytorch')",
            [lambda s=s: jamp.mixed_precision(optax.sgd(1.0), "O2", loss_scale=s) for s in ("static", "pytorch", "8")],
        ),
        *refused(
            TypeError,
            "Write `opt_state = tx.init(params)`.",
            [lambda tx=tx, p=p: tx.init(p) for tx in (O2, O3) for p in ("params", loss, {"w": "w"})],
        ),
        *refused(
            TypeError,
            "jamp.from_optax(tx, params,",
            [lambda: O3.update(HALF, STATE, HALF), lambda: O2.update(PARAMS, O3.init(HALF), PARAMS)],
        ),
        *refused(
            TypeError,
            "Call it outside of `jax.jit`, with arrays.",
            [
                *(lambda f=f: f(loss, SHAPES, X) for f in RUNNERS),
                *(lambda f=f: jax.jit(lambda p, x: f(loss, p, x) and 0)(PARAMS, X) for f in RUNNERS),
            ],
        ),
    ],
)
def test_the_error_has_the_code_to_write(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


@pytest.mark.parametrize("convert", [float, int, bool, lambda x: x.item()])
@pytest.mark.parametrize("jit", [False, True])
def test_a_number_that_the_model_wants_to_know_is_told_at_its_own_line(convert, jit):
    def model(params, x):
        return x @ params["w"] * convert(x.sum())

    cast = jamp.cast_fn(model, "O2")
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"model at .*test_wrong_calls\.py:\d+ ") as told:
        (jax.jit(cast) if jit else cast)(PARAMS, X)
    assert "jamp/" not in str(told.value)


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [(128.0, 128.0), (128, 128.0), ("dynamic", 2.0**15), (None, 2.0**15), (jamp.DynamicLossScale(8.0), 8.0)],
)
def test_loss_scales_of_mixed_precision(loss_scale, expected):
    for make in (
        lambda **k: jamp.mixed_precision(optax.sgd(1.0), "O2:float16", **k),
        lambda **k: jamp.MixedPrecision("O2:float16", optax.sgd(1.0), **k).tx,
    ):
        assert jamp.scale_value(make(loss_scale=loss_scale).init(PARAMS)) == expected


def test_disable_is_a_context():
    assert isinstance(jamp.disable(), contextlib.AbstractContextManager)
