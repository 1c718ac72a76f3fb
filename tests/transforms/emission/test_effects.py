"""Effects happen once, in order, and see the dtypes that the user wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import find, operand_dtypes, trace

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))


def test_a_debug_callback_sees_the_dtype_that_the_user_wrote_and_runs_once():
    seen = []

    def fn(x):
        h = jnp.tanh(x @ W)
        jax.debug.callback(lambda h: seen.append(h.dtype), h)
        return h @ W

    jax.jit(jax.grad(lambda x: jnp.sum(jamp.cast_fn(fn, "O2:bfloat16")(x))))(X)
    jax.effects_barrier()
    assert seen == [np.float32]


def test_debug_print_prints(capfd):
    def fn(x):
        jax.debug.print("sum {s}", s=jnp.sum(x @ W))
        return x

    jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(jnp.zeros((2, 4)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 0.0\n"


def test_a_jitted_logger_that_reads_no_value(capfd):
    log = jax.jit(lambda x: jax.debug.print("step"))

    def fn(x):
        log(x)
        return x @ W

    jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(jnp.zeros((2, 4)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "step\n"


@pytest.mark.parametrize("inside", [lambda fn: fn, jax.jit, lambda fn: lambda x: jax.lax.map(fn, x[None])[0]])
def test_effects_in_inner_jaxprs_stay(inside):
    def fn(x):
        h = x @ W
        jax.debug.callback(lambda h: None, h)
        return h

    jaxpr = trace(jamp.cast_fn(inside(fn), "O2:bfloat16"), X)
    (callback,) = find(jaxpr, "debug_callback")
    assert operand_dtypes(callback) == ["float32"]


def test_a_pure_callback_gets_and_gives_the_declared_dtype():
    def double(h):
        assert h.dtype == np.float32
        return np.asarray(h) * 2

    def fn(x):
        return jax.pure_callback(double, jax.ShapeDtypeStruct((2, 4), jnp.float32), x @ W) @ W

    jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), X)
    (callback,) = find(jaxpr, "pure_callback")
    assert operand_dtypes(callback) == ["float32"]
    assert {tuple(operand_dtypes(dot)) for dot in find(jaxpr, "dot_general")} == {("bfloat16", "bfloat16")}
    np.testing.assert_allclose(jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(X), 2 * X @ W @ W, atol=0.1)


def test_an_ordered_io_callback_runs_in_order():
    seen = []

    def fn(x):
        for i in range(3):
            jax.experimental.io_callback(lambda v, i=i: seen.append((i, v.dtype.name)), None, x @ W, ordered=True)
        return x @ W

    jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(X)
    jax.effects_barrier()
    assert seen == [(0, "float32"), (1, "float32"), (2, "float32")]


def test_mutable_arrays():
    def fn(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] @ W
        return ref[...]

    np.testing.assert_allclose(jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(X), X @ W, atol=0.05)


def test_a_mutable_array_as_argument_is_updated():
    ref = jax.new_ref(jnp.zeros((2, 4)))

    def fn(ref, x):
        ref[...] += x @ W

    jax.jit(functools.partial(jamp.cast_fn(fn, "O2:bfloat16")))(ref, X)
    np.testing.assert_allclose(ref[...], X @ W, atol=0.05)


def test_checkify_errors_pass():
    from jax.experimental import checkify

    def fn(x):
        checkify.check(jnp.all(x > 0), "must be positive")
        return x @ W

    error, _ = jax.jit(checkify.checkify(jamp.cast_fn(fn, "O2:bfloat16")))(-jnp.abs(X))
    with pytest.raises(checkify.JaxRuntimeError, match="must be positive"):
        error.throw()
