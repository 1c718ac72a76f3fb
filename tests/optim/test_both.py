"""`jamp.MixedPrecision`, and what goes with it: transforms of other libraries, numbers, states on disk."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jamp
from tests.helpers import run_python

X = jnp.arange(32.0).reshape(8, 4) / 32


@pytest.mark.parametrize("policy", ["O0", "O1:float16", "O2:float16", "O2:bfloat16", "O3:bfloat16"])
def test_it_is_the_two_functions_with_one_policy(policy):
    optimizer = optax.adam(1e-2)
    amp, tx = jamp.MixedPrecision(policy, optimizer), jamp.mixed_precision(optimizer, policy)
    params = amp.cast_to_param({"w": jnp.eye(4)})
    model = lambda p, x: x @ p["w"]  # noqa: E731

    def step(cast, value_and_grad, tx, params, state):
        value, grads = value_and_grad(lambda p: (cast(model)(p, X) ** 2).mean(), state)(params)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates)

    ours = jax.jit(lambda p, s: step(amp.cast_fn, amp.value_and_grad, amp.tx, p, s))(params, amp.tx.init(params))
    cast = functools.partial(jamp.cast_fn, policy=policy)
    theirs = jax.jit(lambda p, s: step(cast, jamp.scaled_value_and_grad, tx, p, s))(params, tx.init(params))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), ours, theirs))


def test_it_is_a_value():
    optimizer = optax.adam(1e-2)
    make = functools.partial(jamp.MixedPrecision, optimizer=optimizer)
    assert make("O2:float16") == make("mixed_float16") and hash(make("O2:float16")) == hash(make("mixed_float16"))
    assert len({make("O2:float16"), make("O2:bfloat16"), make("O2:float16", axis_name="d")}) == 3
    scaled = functools.partial(make, "O2:float16", loss_scale=jamp.DynamicLossScale())
    assert scaled() == scaled() != make("O2:float16", loss_scale=jamp.DynamicLossScale(2.0))
    for number in (np.float32, np.array, jnp.float32):
        a, b, c = (make("O2:float16", loss_scale=number(x)) for x in (8.0, 8.0, 4.0))
        assert a == b != c and hash(a) == hash(b)
    assert make("O2") != jamp.MixedPrecision("O2", optax.adam(1e-2))  # Of another optimizer object.
    with pytest.raises(AttributeError, match="make another"):
        make("O2").policy = "O3"
    amp = make("O2:float16")
    assert jax.jit(lambda amp, p: amp.tx.init(p), static_argnums=0)(amp, jnp.ones(2)).skipped == 0


def test_wrong_arguments_of_it():
    with pytest.raises(TypeError, match="policy comes first"):
        jamp.MixedPrecision(optax.adam(1e-3), "O2")
    with pytest.raises(TypeError, match="optax transformation"):
        jamp.MixedPrecision("O2", "adam")
    with pytest.raises(ValueError, match="O4"):
        jamp.MixedPrecision("O4", optax.adam(1e-3))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (128.0, 128.0), (128, 128.0), (np.float32(128), 128.0), (np.array(128.0), 128.0), (jnp.float32(128), 128.0),
        ("dynamic", 2.0**15), (None, 2.0**15),
    ],
)  # fmt: skip
def test_numbers_for_a_loss_scale(given, value):
    state = jamp.mixed_precision(optax.sgd(1.0), "O2:float16", loss_scale=given).init(jnp.ones(2))
    assert jamp.scale_value(state) == value and jamp.DynamicLossScale().loss_scale == 2**15
    assert isinstance(
        jamp.loss_scale(state), jamp.DynamicLossScale if isinstance(given, str | None) else jamp.StaticLossScale
    )


class Model(nnx.Module):
    def __init__(self):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.lora = nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x) + self.lora(x))


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
def test_nnx(wrt):
    amp = jamp.MixedPrecision("O2:float16", optax.sgd(0.1), loss_scale=jamp.DynamicLossScale(128.0))
    model = Model()
    optimizer = nnx.Optimizer(model, amp.tx, wrt=wrt)
    forward = amp.cast_fn(lambda model, x: model(x))

    def loss_fn(model, x):
        return (forward(model, x) ** 3).mean()

    @nnx.jit
    def step(model, optimizer, x):
        argnums = nnx.DiffState(0, wrt)
        differentiate = amp.value_and_grad(loss_fn, optimizer.opt_state, argnums, transform=nnx.value_and_grad)
        loss, grads = differentiate(model, x)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(jnp.copy, nnx.state(model))
    expected, true = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(Model(), X)
    loss = step(model, optimizer, X)
    assert jnp.allclose(loss, expected, rtol=1e-3)
    moved = jax.tree.map(lambda a, b: a - b, nnx.state(model, wrt), nnx.filter_state(before, wrt))
    assert jax.tree.all(jax.tree.map(lambda m, g: jnp.allclose(m, -0.1 * g, atol=1e-4), moved, true))
    assert (model.norm.mean[...] != 0).any() and jamp.metrics(optimizer.opt_state)["grads_finite"]


def test_nnx_without_the_transform_is_told():
    tx = jamp.mixed_precision(optax.sgd(0.1), "O2:float16")
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)
        optimizer.update(model, grads)

    with pytest.warns(jamp.PrecisionWarning, match="transform=nnx.value_and_grad"):
        step(model, optimizer, X)


def test_equinox():
    amp = jamp.MixedPrecision("O2:float16", optax.sgd(0.5))
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    forward = amp.cast_fn(lambda model, x: jax.vmap(model)(x))

    def loss_fn(model, x):
        return (forward(model, x) ** 2).mean(), "aux"

    @eqx.filter_jit
    def step(model, state, x):
        differentiate = amp.value_and_grad(loss_fn, state, has_aux=True, transform=eqx.filter_value_and_grad)
        (loss, aux), grads = differentiate(model, x)
        assert aux == "aux"
        updates, state = amp.tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    state = amp.tx.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(5):
        model, state, loss = step(model, state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_what_is_no_transform():
    scaler = jamp.DynamicLossScale()
    with pytest.raises(ValueError, match="values and gradients"):
        jamp.scaled_value_and_grad(jnp.sum, scaler, transform=jax.grad)
    with pytest.raises(TypeError, match="transform"):
        jamp.value_and_grad(jnp.sum, scaler, transform="nnx")
    with pytest.raises(TypeError, match="transform=nnx"):
        jamp.scaled_value_and_grad(lambda m: 0.0, scaler)({"activation": jnp.tanh})


@pytest.mark.parametrize(
    "scaler",
    [jamp.DynamicLossScale(64.0, hysteresis=2), jamp.DynamicLossScale(delayed=True), jamp.StaticLossScale(8.0),
     jamp.NoOpLossScale()],
)  # fmt: skip
def test_flax_serialization(scaler):
    tx = jamp.loss_scaled(scaler, optax.adam(1e-3))
    params = {"w": jnp.ones(3)}
    fresh = tx.init(params)
    _, state = tx.update({"w": jnp.array([1.0, jnp.inf, 1.0])}, fresh, params)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all() and a.dtype == b.dtype, restored, state))
    jax.jit(tx.update)(params, restored, params)


def test_flax_serialization_of_a_scaler_alone():
    """In a state of one's own, in a program that has made no state of an optimizer."""
    code = """
import jamp
from flax import serialization
for scaler in (jamp.DynamicLossScale(8.0), jamp.StaticLossScale(8.0)):
    state = serialization.from_bytes({"scale": scaler}, serialization.to_bytes({"scale": scaler}))
    print(type(state["scale"]).__name__, state["scale"].loss_scale)
"""
    assert run_python(code).splitlines() == ["DynamicLossScale 8.0", "StaticLossScale 8.0"]


def test_flax_serialization_of_another_scaler():
    params = jnp.ones(2)
    states = [jamp.loss_scaled(jamp.DynamicLossScale(hysteresis=h), optax.sgd(1.0)).init(params) for h in (1, 2)]
    with pytest.raises(ValueError, match="hysteresis"):
        serialization.from_bytes(states[1], serialization.to_bytes(states[0]))


O2, O3 = (jamp.mixed_precision(optax.adam(1e-3), policy) for policy in ("O2:float16", "O3:float16"))


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda p, h: jamp.DynamicLossScale().adjust("yes"), ValueError, "jamp.all_finite"),
        (lambda p, h: O2.init("params"), TypeError, "a tree of arrays"),
        (lambda p, h: O3.update(h, O2.init(p), h), TypeError, "lacks master weights"),
        (lambda p, h: O2.update(p, O3.init(h), p), TypeError, "has master weights"),
        (lambda p, h: jamp.master_weights(optax.sgd(1.0)).update(h, (), h), TypeError, "MasterWeightsState"),
        (lambda p, h: jamp.set_loss_scale(8.0, O2.init(p)), TypeError, "The state comes first"),
        (lambda p, h: jamp.compare(jnp.sin, jax.ShapeDtypeStruct((2,), "float32")), TypeError, "no values"),
        (lambda p, h: jax.jit(lambda x: jamp.first_nonfinite(jnp.sin, x))(p["w"]), TypeError, "outside of `jax.jit`"),
        (lambda p, h: nnx.jit(lambda m: jamp.first_nonfinite(m, X))(Model()), TypeError, "outside of `jax.jit`"),
    ],
)
def test_errors_that_say_what_to_write(call, kind, says):
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(kind, match=says):
        call(params, jamp.half_params(params, "float16"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jamp.autocast("O2"), lambda: jamp.autocast(policy="O2"), lambda: jamp.autocast(),
        lambda: jamp.autocast(jnp.sin), lambda: jamp.cast_fn("O2:float16"), lambda: jamp.cast_fn(policy="O2"),
        lambda: jamp.autocast("cuda", dtype=jnp.float16), lambda: jamp.autocast(enabled=False),
        lambda: jamp.autocast(device_type="cuda", dtype=jnp.float16), lambda: jamp.autocast(True),
    ],
)  # fmt: skip
def test_autocast_is_no_context(make):
    with pytest.raises(TypeError, match=r"Write `(forward = )?jamp\.(autocast|cast_fn)\("), make():
        pass
