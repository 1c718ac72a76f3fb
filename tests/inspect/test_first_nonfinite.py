"""`jamp.first_nonfinite`: the operation that made it, not the one that choked on it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

BIG = jnp.full((2, 2), 2.0**9)


def summary(found):
    return found.operation, found.cast, found.iterations, found.dtype, found.infinities, found.nans, found.size


def test_names_the_product_that_overflowed_and_not_the_norm_that_made_nan_of_it():
    # pytorch/pytorch#115500: BatchNorm was blamed for a linear layer in front of it.
    def model(w, x):
        with jax.named_scope("linear"):
            h = x @ w
        with jax.named_scope("norm"):
            return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)

    found = jamp.first_nonfinite(model, BIG, BIG, policy="O3:float16")
    assert summary(found) == ("dot_general", None, (), "float16", 4, 0, 4)
    assert (found.scope, found.function, found.largest) == (
        "linear",
        "test_names_the_product_that_overflowed_and_not_the_norm_that_made_nan_of_it.model",
        512.0,
    )
    assert jamp.first_nonfinite(model, BIG, BIG, policy="O3:bfloat16") is None


def test_names_the_cast_that_overflowed():
    found = jamp.first_nonfinite(
        lambda w, x: jnp.tanh(x * 2.0**8) @ w + x * 2.0**8 @ w, BIG / 2**9, BIG, policy="O1:float16"
    )
    assert summary(found) == ("dot_general", 0, (), "float16", 4, 0, 4)
    assert found.largest == 2.0**17
    assert str(found).startswith("the cast to float16 of operand 0 of dot_general, ")


def test_a_scan_is_entered_and_the_iteration_named():
    def doubling(x):
        return lax.scan(lambda c, w: (c * w, None), x, jnp.full(20, 2.0))[0]

    found = jamp.first_nonfinite(doubling, jnp.float32(1.0), policy="O3:float16")
    assert summary(found) == ("mul", None, (15,), "float16", 1, 0, 1)  # 2^16 is the first that float16 does not have.
    assert found.largest == 2.0**15


def test_a_reversed_scan_runs_backwards():
    def growing(x):
        return lax.scan(lambda c, w: (c * w, None), x, jnp.float32([1, 2.0**15, 2]), reverse=True)[0]

    assert jamp.first_nonfinite(growing, jnp.float32(1.0), policy="O3:float16").iterations == (1,)


def test_nested_loops_calls_and_branches_are_entered():
    def model(x):
        def body(i, c):
            return lax.cond(i < 2, lambda c: c, jax.jit(jax.checkpoint(lambda c: jnp.log(c - c))), c)

        return lax.scan(lambda c, _: (lax.fori_loop(0, i_max, body, c), None), x, None, length=3)[0]

    i_max = 3
    found = jamp.first_nonfinite(model, jnp.ones(2), policy="O2:float16")
    assert (found.operation, found.iterations, found.infinities) == ("log", (0, 2), 2)


@pytest.mark.parametrize("policy", ["O0", "p=f32,c=f32,o=f32", "O1:float16"])
def test_a_while_loop_is_entered_at_every_level(policy):
    def squaring(x):
        return lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] * c[0], c[1] + 1), (x, 0))[0]

    found = jamp.first_nonfinite(squaring, jnp.float32(2.0), policy=policy)
    assert summary(found) == ("mul", None, (6,), "float32", 1, 0, 1)  # 2^64 squared.


def test_custom_rules_are_entered():
    @jax.custom_vjp
    def f(x):
        return jnp.log(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g / x,))
    assert jamp.first_nonfinite(f, jnp.zeros(2), policy="O2:float16").operation == "log"
    gradient = jax.grad(lambda x: jamp.cast_fn(f, "O2:float16")(x))
    assert jamp.first_nonfinite(gradient, jnp.float32(0), policy="O0").operation == "div"


def test_what_a_where_discards_does_not_count():
    assert jamp.first_nonfinite(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), jnp.zeros(2), policy="O2:float16") is None


def test_masks_of_minus_infinity_do_not_count():
    def masked(x, keep):
        return jax.nn.softmax(jnp.where(keep, x, -jnp.inf))

    x = jnp.ones(2)
    assert jamp.first_nonfinite(masked, x, jnp.array([True, False]), policy="O2:float16") is None
    assert jamp.first_nonfinite(lambda x: jnp.where(x > 1, x, -jnp.inf), x, policy="O2:float16") is None
    nothing_left = jamp.first_nonfinite(masked, x, jnp.array([False, False]), policy="O2:float16")
    assert (nothing_left.operation, nothing_left.nans) == ("sub", 2)  # -inf less its maximum, -inf.


def test_the_first_of_two_is_named():
    found = jamp.first_nonfinite(lambda x: (jnp.exp(x), jnp.log(x - x)), jnp.full(2, 100.0), policy="O2:float16")
    assert found.operation == "exp"


def test_arguments_that_come_in_broken_are_named():
    params = {"w": jnp.float32([1, jnp.nan])}
    found = jamp.first_nonfinite(lambda p, *, x: p["w"] * x, params, x=jnp.ones(2), policy="O2:float16")
    assert summary(found) == ("argument args[0]['w']", None, (), "float32", 0, 1, 2)
    assert str(found) == "argument args[0]['w']: 1 nan in 2 float32 values"


def test_casting_the_result_can_overflow():
    policy = jamp.get_policy("O2:float16").with_output_dtype("float16")
    found = jamp.first_nonfinite(lambda x: jnp.exp(x), jnp.float32([0, 12]), policy=policy)
    assert summary(found) == ("result", None, (), "float16", 1, 0, 2)


def test_finite_results_give_none():
    assert jamp.first_nonfinite(jnp.sin, jnp.ones(3), policy="O2:float16") is None


def test_shapes_are_not_enough():
    with pytest.raises(TypeError, match=r"have no values:\n  args\[0\]: ShapeDtypeStruct"):
        jamp.first_nonfinite(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
