"""Wrong calls, as people make them who come from elsewhere: each is an error with the code to write instead."""

import contextlib
import copy
import functools
import inspect
import pickle
import re
import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jamp
from jamp.inspect._target import SETTINGS

PARAMS, X = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
SHAPES = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
HALF = {"w": jnp.ones((4, 2), jnp.float16)}
O2 = jamp.mixed_precision(optax.adam(1e-3), "O2:float16")
O3 = jamp.mixed_precision(optax.adam(1e-3), "O3:float16")
STATE = O2.init(PARAMS)
FLAGS = ("yes", None, 1, 0.5, PARAMS, jnp.array([True, False]))
SCALERS = (jamp.DynamicLossScale(), jamp.StaticLossScale(2.0), jamp.NoOpLossScale())
AMP = jamp.MixedPrecision("O2:float16", optax.adam(1e-3))
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
SCALED = jamp.mixed_precision(optax.sgd(0.1), "O2:float16", axis_name="d")
PLAIN_STATE = optax.adam(1e-3).init(PARAMS)
JMP_POLICY = types.SimpleNamespace(param_dtype=jnp.float32, compute_dtype=jnp.float16, output_dtype=jnp.float32)
RUNNERS = (jamp.compare, jamp.first_nonfinite, jamp.verify, jamp.error_sources)


def loss(params, x):
    return (x @ params["w"]).mean()


def enter(context):
    with context():
        pass


def enter_bare(function):
    with function:
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
            AttributeError,
            "The optimizer is `amp.tx`: write `amp.tx.",
            [lambda: AMP.init(PARAMS), lambda: AMP.update(PARAMS, STATE, PARAMS)],
        ),
        *refused(AttributeError, "jamp.MixedPrecision has no attribute 'optimizer'.", [lambda: AMP.optimizer]),
        *refused(
            TypeError,
            "has no argument 'fulll'. Did you mean 'full'? Write policy.with_rules(full=['softmax']).",
            [lambda: jamp.get_policy("O2").with_rules(fulll=["softmax"])],
        ),
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
        *refused(
            TypeError,
            "`jamp.scaled_value_and_grad`: missing a required argument: 'opt_state'. "
            "Write jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch).",
            [lambda: jamp.scaled_value_and_grad(loss)],
        ),
        *refused(
            TypeError,
            "(loss_fn, opt_state)(params, batch)",
            [
                lambda: jamp.scaled_value_and_grad(),
                lambda: jamp.scaled_value_and_grad(loss, STATE, optimizer=O2),
                lambda: jamp.MixedPrecision("O2", optax.sgd(1.0)).value_and_grad(loss),
            ],
        ),
        *refused(
            TypeError,
            "(loss_fn, loss_scale)(params, batch)",
            [lambda f=f: f(loss) for f in (jamp.grad, jamp.value_and_grad)],
        ),
        *refused(TypeError, "'scaler' (here `opt_state`)", [lambda: jamp.scaled_value_and_grad(loss, scaler=STATE)]),
        *refused(TypeError, "Write jamp.StaticLossScale(1024.0).", [lambda: jamp.StaticLossScale()]),
        *refused(
            TypeError,
            "Write scaler.adjust(jamp.all_finite(grads)).",
            [lambda s=s: s.adjust() for s in SCALERS],
        ),
        *refused(
            TypeError,
            "expected an optax transformation. Write jamp.mixed_precision(optax.adam(1e-3), 'O2:float16').",
            [lambda i=i: jamp.mixed_precision(i, "O2") for i in ("adam", optax.adam, None, STATE, 0.1)],
        ),
        *refused(TypeError, "`sgd` makes one when it is called.", [lambda: jamp.mixed_precision(optax.sgd, "O2")]),
        *refused(
            TypeError,
            "`optimizer` is 'adam': expected an optax transformation. Write jamp.MixedPrecision('O2:float16', optax",
            [lambda: jamp.MixedPrecision("O2", "adam")],
        ),
        *refused(
            TypeError,
            "`jamp.mixed_precision` has no argument 'optimizer' (here `inner`), 'opt_level' (here `policy`).",
            [lambda: jamp.mixed_precision(optimizer=optax.sgd(0.1), opt_level="O2")],
        ),
        *refused(
            TypeError,
            "brings master weights",
            [lambda: jamp.mixed_precision(optax.sgd(0.1), "O2", master_weights=True)],
        ),
        *refused(
            TypeError,
            "Write jamp.cast_fn(loss, policy='O2:float16').",
            [lambda d=d: jamp.cast_fn(loss, dtype=d) for d in ("float16", "fp16", jnp.float16, jnp.dtype("float16"))],
        ),
        *refused(
            TypeError, "Write jamp.cast_fn(fn, policy='O2:float16').", [lambda: jamp.cast_fn(lambda x: x, dtype="f16")]
        ),
        *refused(TypeError, "Write jamp.cast_fn(loss, policy='O0').", [lambda: jamp.cast_fn(loss, dtype="float32")]),
        *refused(
            TypeError,
            "Write jamp.cast_fn(loss, policy='O1').",
            [lambda: jamp.cast_fn(loss, level="O1"), lambda: jamp.cast_fn(loss, opt_level=1)],
        ),
        *refused(
            TypeError,
            "Write jamp.mixed_precision(inner, policy='O2:float16').",
            [lambda: jamp.mixed_precision(optax.sgd(1.0), dtype="float16")],
        ),
        *refused(
            TypeError,
            "The state comes first: write jamp.master_params(opt_state, params).",
            [lambda: jamp.master_params(HALF, O3.init(HALF)), lambda: jamp.master_params(PARAMS, STATE)],
        ),
        *refused(ValueError, "are the masters: write `params`", [lambda: jamp.master_params(STATE, PARAMS)]),
        *refused(
            ValueError,
            "Write jamp.half_params(params, 'float16').",
            [lambda p=p: jamp.half_params(PARAMS, p) for p in ("O3:float16", jamp.get_policy("O3:float16"))],
        ),
        *refused(
            ValueError,
            "keeps parameters in float32: leave them as they are. For half parameters write jamp.half_params(params, "
            "'bfloat16'), with the policy 'O3:bfloat16'.",
            [lambda p=p: jamp.half_params(PARAMS, p) for p in ("O2:bfloat16", jamp.get_policy("O1:bfloat16"))],
        ),
        *refused(
            ValueError,
            "expected 'bfloat16' or 'float16'.",
            [lambda d=d: jamp.half_params(PARAMS, d) for d in ("float32", "f17", None, 3, jnp.int8)],
        ),
        *refused(
            ValueError,
            "Write 'p=float32,c=float16,o=float32'.",
            [
                lambda: jamp.cast_fn(loss, JMP_POLICY),
                lambda: jamp.mixed_precision(optax.sgd(1.0), JMP_POLICY),
                lambda: jamp.get_policy(JMP_POLICY),
            ],
        ),
        *refused(TypeError, "The parameters come first: write jamp.to_optax(", [lambda: jamp.to_optax(STATE, PARAMS)]),
        *refused(
            TypeError,
            "The plain parameters come before the plain state: write jamp.from_optax(",
            [
                lambda: jamp.from_optax(O2, PARAMS, PLAIN_STATE, PARAMS),
                lambda: jamp.from_optax(O3, HALF, PLAIN_STATE, PARAMS),
            ],
        ),
        *refused(
            TypeError,
            "The half parameters come before the plain ones: write jamp.from_optax(",
            [lambda: jamp.from_optax(O3, PARAMS, HALF, PLAIN_STATE)],
        ),
        *refused(
            ValueError,
            "There is no loss scale in this optimizer state, which is a dict with leaves ['w'].",
            [
                lambda: jamp.scaled_value_and_grad(loss, PARAMS),
                lambda: jamp.metrics(PARAMS),
                lambda: jamp.set_loss_scale(PARAMS, 8.0),
            ],
        ),
        *refused(
            ValueError,
            "restored without a target, a checkpoint is a dict",
            [
                lambda: jamp.metrics({"inner_state": [{"mu": jnp.ones(2)}], "loss_scale": {"scale": jnp.ones(())}}),
                lambda: jamp.scaled_value_and_grad(loss, {"0": {"loss_scale": jnp.ones(())}}),
            ],
        ),
        *refused(
            ValueError,
            "one scale serve all parameters: jamp.mixed_precision(optax.multi_transform(...), policy)",
            [lambda: jamp.metrics({"a": STATE, "b": STATE})],
        ),
        *refused(
            ValueError,
            "which is a tuple of ScaleByAdamState, EmptyState. Make it with",
            [lambda: jamp.scale_value(optax.adam(0.1).init(PARAMS))],
        ),
        *refused(ValueError, "state, which is None.", [lambda: jamp.loss_scale(None)]),
        *refused(
            ValueError,
            "jax.pmap(train_step, axis_name='d')",
            [
                lambda: jamp.average_gradients(GRADS, "d"),
                lambda: jamp.all_finite(GRADS, "d"),
                lambda: jax.jit(lambda g: jamp.all_finite(g, "d"))(GRADS),
                lambda: SCALED.update(GRADS, SCALED.init(PARAMS), PARAMS),
                lambda: jax.jit(SCALED.update)(GRADS, SCALED.init(PARAMS), PARAMS),
            ],
        ),
        *refused(
            ValueError,
            "the axes that are mapped here are: 'e'.",
            [lambda: jax.vmap(lambda x: jamp.average_gradients(x, "d"), axis_name="e")(X)],
        ),
        *refused(
            TypeError,
            "Write jamp.clip_by_global_norm(grads, 1.0, opt_state).",
            [lambda n=n: jamp.clip_by_global_norm(GRADS, n) for n in ("1", None, True, GRADS, optax.sgd)],
        ),
        *refused(
            ValueError,
            "Write jamp.clip_by_global_norm(grads, 1.0, opt_state).",
            [lambda n=n: jamp.clip_by_global_norm(GRADS, n) for n in (0, -1.0, np.float32("nan"), jnp.ones(2))],
        ),
        *refused(
            TypeError,
            "these leaves are none",
            [
                *(lambda s=s: s.scale("loss") for s in SCALERS),
                *(lambda s=s: s.unscale({"w": "x"}) for s in SCALERS),
                *(lambda f=f: f("params") for f in (jamp.half_params, jamp.global_norm)),
                lambda: jamp.half_params(linen.Dense(2)),
                lambda: jamp.average_gradients("grads", "d"),
                lambda: jamp.clip_by_global_norm(loss, 1.0),
                lambda: jamp.metrics(STATE, grads="grads"),
            ],
        ),
        *refused(
            TypeError,
            "apply_fn = jamp.cast_fn(model.apply, policy)",
            [lambda m=m: jamp.cast_fn(m, "O2") for m in (linen.Dense(4), linen.Sequential([]), hk.transform(loss))],
        ),
        *refused(
            TypeError, "got the class Dense", [lambda: jamp.cast_fn(linen.Dense), lambda: jamp.autocast(linen.Dense)]
        ),
        *refused(
            TypeError,
            "They are no contexts for `with`",
            [lambda: enter_bare(jamp.autocast), lambda: enter_bare(jamp.cast_fn)],
        ),
        *refused(
            TypeError,
            "takes a function: write `jamp.",
            [lambda: enter_bare(jamp.full_precision), lambda: enter_bare(jamp.half_precision)],
        ),
        *refused(TypeError, "write `with jamp.disable():`", [lambda: enter_bare(jamp.disable)]),
        *refused(TypeError, "The scale comes first", [lambda: jamp.loss_scaled(optax.sgd(1.0), SCALERS[0])]),
        *refused(TypeError, "or jamp.get_policy('O2:bfloat16').", [lambda: jamp.Policy("O2"), lambda: jamp.Policy()]),
        *refused(
            TypeError,
            "expected the position of an argument",
            [lambda x=x: jamp.scaled_value_and_grad(loss, STATE, x) for x in ("params", None, 0.0, ("params", 1))],
        ),
        *refused(TypeError, "jax.grad does not", [lambda: jamp.accumulate_gradients(jax.grad(loss), 2)(PARAMS, X[:2])]),
        *refused(AttributeError, "Its name here is jamp.DynamicLossScale", [lambda: jamp.GradScaler()]),
        *refused(AttributeError, "Write jamp.cast_fn(model.apply", [lambda: jamp.amp, lambda: jamp.initialize]),
        *refused(AttributeError, "Did you mean 'autocast'", [lambda: jamp.autocats]),
        *refused(AttributeError, "write updates, opt_state = tx.update(", [lambda s=s: s.step for s in SCALERS]),
        *refused(AttributeError, "which returns them.", [lambda s=s: s.unscale_(GRADS) for s in SCALERS]),
    ],
)
def test_the_error_has_the_code_to_write(call, error, text):
    with pytest.raises(error, match=re.escape(text)) as told:
        call()
    assert "Write" not in str(told.value) or " at 0x" not in str(told.value).split("Write")[-1]


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


def test_disable_decorates_too():
    half = jamp.cast_fn(lambda x: jnp.dot(x, x), "O3:bfloat16")
    x = jnp.float32([1 + 2**-10])
    plain = jamp.disable()(half)
    assert float(plain(x)) == float(plain(x)) == (1 + 2**-10) ** 2 != float(half(x))
    context = jamp.disable()
    for _ in range(2):
        with context, context:
            assert float(half(x)) == float(plain(x))
        assert float(half(x)) != float(plain(x))
    with pytest.raises(TypeError, match=re.escape("Write jamp.disable()(fn)")):
        jamp.disable(half)


def test_disable_is_a_context():
    assert isinstance(jamp.disable(), contextlib.AbstractContextManager)


# The call as it is written elsewhere, and what the message says to write.
SCALERS_ELSEWHERE = [
    (dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000),  # PyTorch.
     "jamp.DynamicLossScale(loss_scale=65536.0, factor=2.0, backoff_factor=0.5, period=2000)"),
    (dict(init_scale=65536.0, scale_factor=2.0, scale_window=2000),  # Apex, MXNet.
     "jamp.DynamicLossScale(loss_scale=65536.0, factor=2.0, period=2000)"),
    (dict(initial_scale=32768.0, dynamic_growth_steps=2000),  # Keras.
     "jamp.DynamicLossScale(loss_scale=32768.0, period=2000)"),
    (dict(growth_interval=2000, fin_steps=0, scale=65536.0, minimum_scale=1.0),  # Flax.
     "jamp.DynamicLossScale(period=2000, counter=0, loss_scale=65536.0, min_loss_scale=1.0)"),
    (dict(loss_scaling=32768.0, min_loss_scaling=1.0, factor=2, period=2000),  # mpx.
     "jamp.DynamicLossScale(loss_scale=32768.0, min_loss_scale=1.0, factor=2, period=2000)"),
    (dict(init_loss_scaling=65536.0, incr_ratio=2.0, decr_ratio=0.5, incr_every_n_steps=9, decr_every_n_nan_or_inf=1),
     "jamp.DynamicLossScale(loss_scale=65536.0, factor=2.0, backoff_factor=0.5, period=9, hysteresis=1)"),  # Paddle.
    (dict(loss_scale_window=1000, min_scale=1.0, hysteresis=2),  # DeepSpeed, Megatron-LM.
     "jamp.DynamicLossScale(period=1000, min_loss_scale=1.0, hysteresis=2)"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "call"), SCALERS_ELSEWHERE)
def test_arguments_of_other_scalers(arguments, call):
    with pytest.raises(TypeError, match=re.escape(f"Write {call}.")) as told:
        jamp.DynamicLossScale(**arguments)
    assert all(name in str(told.value) for name in arguments)
    assert isinstance(eval(call), jamp.DynamicLossScale)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: jamp.DynamicLossScale(2.0, growth_interval=5), "Write jamp.DynamicLossScale(2.0, period=5)."),
        (lambda: jamp.DynamicLossScale(2.0, init_scale=5), "Write jamp.DynamicLossScale(2.0, loss_scale=5)."),
        (lambda: jamp.DynamicLossScale(init_scale=2.0, enabled=False), "none at all jamp.NoOpLossScale()"),
        (lambda: jamp.DynamicLossScale(device="cuda"), "A scaler needs no device."),
        (lambda: jamp.DynamicLossScale(initial_scale_power=16), "loss_scale=2.0**16"),
        (lambda: jamp.DynamicLossScale(periods=3), "Did you mean 'period'"),
        (lambda: jamp.DynamicLossScale(1.0, 0, 2, 2, 1.0, 0.5), "too many positional arguments"),
        (lambda: jamp.StaticLossScale(init_scale=8.0), "Write jamp.StaticLossScale(loss_scale=8.0)."),
        (lambda: jamp.StaticLossScale(8.0, growth_interval=3), "'growth_interval'"),
        (lambda: jamp.NoOpLossScale(1.0), "Write jamp.NoOpLossScale()."),
        (lambda: jamp.NoOpLossScale(init_scale=1.0), "Write jamp.NoOpLossScale()."),
    ],
)
def test_other_arguments_of_scalers(make, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


LOSSES = {
    "a vector": (lambda p, x: x @ p["w"], {}, "`fun` returned float32[3, 2]: expected a scalar loss."),
    "one in a vector": (lambda p, x: loss(p, x)[None], {}, "`fun` returned float32[1]"),
    "a pair": (lambda p, x: (loss(p, x), x), {}, "`fun` returned a tuple of 2: expected a scalar loss."),
    "a list": (lambda p, x: [loss(p, x)], {}, "`fun` returned a list of 1"),
    "nothing": (lambda p, x: None, {}, "`fun` returned None: expected a scalar loss. `return`"),
    "a dict": (lambda p, x: {"loss": loss(p, x)}, {}, "`fun` returned {'loss'"),
    "no pair": (loss, {"has_aux": True}, "has to return a pair (loss, auxiliary data), got float32[]."),
    "three": (lambda p, x: (1.0, 2, 3), {"has_aux": True}, "got a tuple of 3. Write `return loss, aux`"),
    "a pair with a vector": (lambda p, x: (x @ p["w"], x), {"has_aux": True}, "`fun` returned float32[3, 2]"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("fun", "settings", "text"), LOSSES.values(), ids=LOSSES)
def test_losses_that_are_no_scalars(fun, settings, text, jit):
    for grad_fn in (
        jamp.scaled_value_and_grad(fun, STATE, **settings),
        jamp.scaled_value_and_grad(fun, O3.init(HALF), **settings),
        jamp.value_and_grad(fun, jamp.StaticLossScale(8.0), **settings),
        jamp.grad(fun, jamp.NoOpLossScale(), **settings),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            (jax.jit(lambda p, x: grad_fn(p, x)) if jit else grad_fn)(PARAMS, X)  # noqa: B023 (called at once)


def test_losses_of_every_scalar_kind():
    for fun in (loss, lambda p, x: loss(p, x).astype("float16"), lambda p, x: loss(p, x) * np.float32(2)):
        jamp.scaled_value_and_grad(fun, STATE)(PARAMS, X)
    assert jamp.value_and_grad(lambda x: 2.0 * x, jamp.StaticLossScale(8.0))(3.0) == (6.0, 2.0)
    assert jamp.value_and_grad(lambda x: 4.0, jamp.StaticLossScale(8.0))(3.0)[1] == 0.0


def test_modules_that_hold_their_parameters_are_cast():
    dense = linen.Dense(4)
    variables = dense.init(jax.random.key(0), X)
    bound = dense.bind(variables)
    assert jamp.cast_fn(bound, "O2:bfloat16")(X).shape == (3, 4)

    class Net(linen.Module):
        def setup(self):
            self.first = jamp.cast_fn(linen.Dense(4), "O2:bfloat16")  # Bound later, as a part of the net.

        def __call__(self, x):
            return x

    assert Net().apply({}, X).shape == X.shape


@pytest.mark.parametrize("function", [jamp.cast_fn, jamp.autocast, jamp.full_precision, jamp.disable])
def test_functions_that_answer_with_stay_functions(function):
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert function.__name__ in repr(function)
    assert callable(function)
    assert inspect.getdoc(function)
    assert inspect.signature(function) == inspect.signature(inspect.unwrap(function))


def test_constructors_keep_their_signatures():
    assert list(inspect.signature(jamp.StaticLossScale).parameters) == ["loss_scale"]
    assert list(inspect.signature(jamp.DynamicLossScale).parameters)[:5] == [
        "loss_scale", "counter", "period", "factor", "min_loss_scale",
    ]  # fmt: skip
    assert list(inspect.signature(jamp.MixedPrecision).parameters)[:2] == ["policy", "optimizer"]
    for scaler in SCALERS:
        assert pickle.loads(pickle.dumps(scaler)).loss_scale == scaler.loss_scale


@pytest.mark.parametrize(
    "name",
    [
        "accumulate_gradients", "average_gradients", "clip_by_global_norm", "from_optax", "global_norm",
        "half_params", "loss_scale", "loss_scaled", "low_precision_state", "master_params", "master_weights", "metrics",
        "mixed_precision", "scale_value", "scaled_value_and_grad", "set_loss_scale", "stochastic_rounding", "to_optax",
    ],
)  # fmt: skip
def test_missing_and_unknown_arguments(name):
    with pytest.raises(TypeError, match=rf"`jamp.{name}`: missing .*\. Write jamp.{name}\("):
        getattr(jamp, name)()
    with pytest.raises(TypeError, match=rf"`jamp.{name}` has no argument 'nonsense'\..* Write jamp.{name}\("):
        getattr(jamp, name)(nonsense=1)


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("O2 bfloat16", "Write 'O2:bfloat16'."), ("O2-bf16", "Write 'O2:bf16'."),
        ("bfloat16:O2", "Write 'O2:bfloat16'."), ("O2,float16", "Write 'O2:float16'."),
        ("o1:fp16", "Write 'O1:fp16'."), ("O2:", "Write 'O2'."),
        ("O2:float32", "Write 'O0'"), ("O3:f64", "Write 'O0'"),
    ],
)  # fmt: skip
def test_a_level_and_a_dtype_put_together_otherwise(spec, meant):
    with pytest.raises(ValueError, match=re.escape(meant)):
        jamp.get_policy(spec)


@pytest.mark.parametrize("tool", [*RUNNERS, jamp.report, functools.partial(jamp.tune, tolerance=0.1)])
def test_a_misspelt_setting_is_none_of_the_function(tool):
    with pytest.raises(TypeError, match=r"'polcy'\. Did you mean 'policy'"):
        tool(loss, PARAMS, X, polcy="O2")


def test_the_settings_of_what_looks_at_functions_are_all_known():
    for name, settings in SETTINGS.items():
        parameters = inspect.signature(getattr(jamp, name)).parameters.values()
        assert [each.name for each in parameters if each.kind is each.KEYWORD_ONLY] == [*settings]


def test_what_is_not_traced_is_no_function_of_arrays():
    async def later(x):
        return x

    def each(x):
        yield x

    for fn, word in ((later, "is async"), (each, "yields")):
        with pytest.raises(TypeError, match=f"{word}. Cast the function of arrays"):
            jamp.cast_fn(fn, "O2")


def test_a_classmethod_is_above():
    with pytest.raises(TypeError, match=r"Write `@classmethod` above `@jamp\.cast_fn"):
        jamp.cast_fn(classmethod(loss), "O2")
    made = type("Model", (), {"loss": classmethod(jamp.cast_fn(lambda cls, x: x @ x, "O2:bfloat16"))})
    assert made.loss(jnp.eye(2)).dtype == jnp.float32


def test_aux_of_microbatches_is_of_arrays():
    grad_fn = jax.value_and_grad(lambda w, x: ((w * x).mean(), {"x": x, "name": "a"}), has_aux=True)
    with pytest.raises(TypeError, match=re.escape("aux['name']: 'a'")):
        jamp.accumulate_gradients(grad_fn, 2)(jnp.float32(1), jnp.arange(4.0))
