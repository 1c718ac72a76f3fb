"""Flax NNX modules as arguments: what they mutate comes back, as with `nnx.jit`."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp


class Model(nnx.Module):
    """Everything that NNX mutates while it runs: running statistics and a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, 4))


def draws(model: Model) -> int:
    return int(model.dropout.rngs.count[...])


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_statistics_and_random_streams_advance(x, wrap):
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    apply = wrap(jamp.cast_fn(lambda model, x: model(x), "O2:bfloat16"))
    for step in range(1, 3):
        out, expected = apply(model, x), plain(x)
        assert out.dtype == jnp.float32
        assert draws(model) == draws(plain) == step
        assert model.norm.mean[...].dtype == jnp.float32
        np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-3)
        np.testing.assert_allclose(out, expected, atol=0.1)


def test_modules_that_stay_as_they_are_may_belong_to_a_trace_around(x):
    """The generator, and the frozen encoder, in the gradient of another module."""
    generator, critic = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1))
    apply = jamp.cast_fn(lambda module, x: module(x), "O2:bfloat16")

    def loss(apply):
        return lambda critic: nnx.softplus(apply(critic, apply(generator, x))).mean()

    for wrap in (lambda f: f, nnx.jit):
        value, grads = wrap(lambda critic: nnx.value_and_grad(loss(apply))(critic))(critic)
        expected = nnx.value_and_grad(loss(lambda module, x: module(x)))(critic)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-2), (value, grads), expected)
    assert generator(x).shape == (16, 8)


def test_variables_that_change_places_are_written_back(x):
    """A target network that is swapped with the one that learns."""

    class Pair(nnx.Module):
        def __init__(self):
            self.one, self.other = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.ones(2))

    def swap(pair):
        pair.one[...], pair.other[...] = pair.other[...], pair.one[...]

    pair = Pair()
    jamp.cast_fn(swap, "O2:bfloat16")(pair)
    assert pair.one[...].sum() == 2 and pair.other[...].sum() == 0


# A three-dtype policy hands BatchNorm half statistics, which it updates with float32 ones; JAX warns of that.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.parametrize("policy", ["O0", "O3:float16", "p=f32,c=bf16,o=bf16"])
def test_state_keeps_its_dtype_at_every_policy(x, policy):
    model = Model(nnx.Rngs(0))
    jamp.cast_fn(lambda model, x: model(x), policy)(model, x)
    assert model.norm.var[...].dtype == jnp.float32
    assert draws(model) == 1


def test_a_module_and_its_method_can_be_wrapped(x):
    model = Model(nnx.Rngs(0))
    jamp.cast_fn(model, "O2:bfloat16")(x)
    jamp.cast_fn(model.__call__, "O2:bfloat16")(x)
    assert draws(model) == 2


def test_a_module_twice_among_the_arguments_is_updated_once(x):
    model = Model(nnx.Rngs(0))
    jamp.cast_fn(lambda a, b, x: a(x) + b(x), "O2:bfloat16")(model, {"again": model}["again"], x)
    assert draws(model) == 2


def test_trains_with_nnx_optimizer_and_loss_scaling(x):
    model = Model(nnx.Rngs(0))
    tx = jamp.loss_scaled(jamp.DynamicLossScale(2.0**10), inner=optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    apply = jamp.cast_fn(lambda model, x: model(x), "O2:float16")
    target = jnp.ones((16, 2))

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean((apply(model, x) - target) ** 2)

        scale = jamp.loss_scale(optimizer.opt_state)
        value, grads = nnx.value_and_grad(lambda model: scale.scale(loss(model)))(model)
        optimizer.update(model, grads)
        return scale.unscale(value)

    losses = [float(step(model, optimizer, x)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0], (flax.__version__, losses)
    assert model.inner.kernel[...].dtype == jnp.float32
    assert draws(model) == 20


def test_split_and_merge_need_nothing_special(x):
    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def pure(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    out, new_state = jamp.cast_fn(pure, "O2:bfloat16")(state, x)
    assert out.dtype == jnp.float32
    assert int(new_state["dropout"]["rngs"]["count"][...]) == 1


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["bare", "jit"])
@pytest.mark.filterwarnings("ignore:An optimizer runs inside")  # It does, and works.
def test_an_optimizer_keeps_its_moments(x, wrap):
    def train(cast):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)

        step = wrap(cast(step))
        for _ in range(3):
            step(model, optimizer, x)
        return model.kernel[...], jax.tree.leaves(nnx.state(optimizer)), int(optimizer.step[...])

    kernel, moments, steps = train(lambda step: jamp.cast_fn(step, "O2:bfloat16"))
    expected_kernel, expected_moments, expected_steps = train(lambda step: step)
    assert steps == expected_steps == 3
    np.testing.assert_allclose(kernel, expected_kernel, atol=1e-2)
    for moment, expected in zip(moments, expected_moments, strict=True):
        np.testing.assert_allclose(moment, expected, atol=1e-2)


def test_metrics_variables_and_random_streams_advance(x):
    metric, plain_metric = nnx.metrics.Average(), nnx.metrics.Average()
    for metrics, call in ((plain_metric, lambda f, *a: f(*a)), (metric, lambda f, *a: jamp.cast_fn(f, "O1")(*a))):
        call(lambda m, x: m.update(values=x), metrics, x)
    np.testing.assert_allclose(metric.compute(), plain_metric.compute(), rtol=1e-6)

    counter, rngs = nnx.Variable(jnp.float32(1)), nnx.Rngs(0)

    def count(counter):
        counter[...] += 1

    jamp.cast_fn(count)(counter)
    assert counter[...] == 2
    draw = jamp.cast_fn(lambda stream: jax.random.normal(stream()))
    assert draw(rngs.default) != draw(rngs.default)


def test_a_state_is_a_value(x):
    graph, state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    grads = jax.grad(lambda state: jamp.cast_fn(lambda s, x: nnx.merge(graph, s)(x).sum())(state, x))(state)
    assert jax.tree.structure(grads) == jax.tree.structure(state)
    np.testing.assert_allclose(grads["bias"][...], 16)
