"""What a loop reads in each iteration has its cotangents added up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import equations

STEPS = 300
X, W = jnp.eye(4), jnp.ones((4, 4))


def read(data, step=lambda data, t: t * data, steps=STEPS):
    return jax.lax.scan(lambda s, t: (s, step(data, t)), 0.0, jnp.ones(steps))[1]


READERS = {
    "a loop": read,
    "jit": lambda data: jax.jit(read)(data),
    "jit inside": lambda data: read(data, jax.jit(lambda data, t: t * data)),
    "checkpoint": lambda data: read(data, jax.checkpoint(lambda data, t: t * data)),
    "a loop within a loop": lambda data: read(data, lambda data, t: t * read(data, steps=30), 10),
    "vmap": lambda data: jax.vmap(read)(data[None]),
    "moved": lambda data: read(data, lambda data, t: t * data.T),
    "two": lambda data: read((data, data[:2]), lambda pair, t: t * jnp.concatenate([pair[0][:2], pair[1]]))[:, :2],
}


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_half_data_that_a_loop_reads(reader, policy):
    """In bfloat16 one added to 256 is 256."""

    def loss(w):
        return jnp.sum(jamp.cast_fn(lambda w, x: reader(x @ w) + 0 * w[0, 0], policy)(w, X))

    expected = jax.grad(lambda w: jnp.sum(reader(X @ w)))(W)
    assert expected.max() == STEPS
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(W), expected)
    np.testing.assert_array_equal(jax.jvp(loss, (W,), (W,))[1], expected.sum())


def test_a_decoder_attends_to_the_same_in_each_step():
    keys = jax.random.split(jax.random.key(0), 5)
    x, y = jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (400, 16))
    ws = [jax.random.normal(key, (16, 16)) / 4 for key in keys[2:]]

    def decoder(ws, x, y):
        memory = x @ ws[0]

        def step(s, t):
            s = jnp.tanh(s @ ws[1] / 2 + jax.nn.softmax((s + t) @ memory.T / 4) @ memory)
            return s, s

        return jax.lax.scan(step, jnp.zeros(16), y)[1] @ ws[2]

    def gradient(fn):
        return jax.jit(jax.grad(lambda ws: jnp.mean(fn(ws, x, y) * (y + 1))))(ws)

    for got, expected in zip(gradient(jamp.cast_fn(decoder, "O2:bfloat16")), gradient(decoder), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(("steps", "raised"), [(7, False), (8, True)])
def test_a_short_loop_has_few_readers(steps, raised):
    def net(w, x):
        return read(x @ w, lambda data, t: jnp.tanh(t * data), steps) @ w

    found = equations(jax.make_jaxpr(jamp.cast_fn(net, "O2:bfloat16"))(W, X))
    copied = [eqn.outvars[0].aval.dtype for eqn in found if eqn.primitive.name == "jamp_shared_copy"]
    assert bool(copied) == raised


def test_what_a_loop_reads_is_rounded_where_xla_would_leave_it_out():
    """What the backward pass is given is rounded, and a loop that had read more digits would be another one."""
    fn = jamp.cast_fn(lambda w, x: read(x @ w) @ w, "O1:bfloat16")
    lowered = jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(fn(w, x)))).lower(W, X).as_text()
    assert "stablehlo.reduce_precision" in lowered
    assert "e8m7" in lowered
