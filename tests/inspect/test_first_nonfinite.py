"""`jamp.first_nonfinite`: the operation that made it, not the one that choked on it."""

import jax
import jax.numpy as jnp
import numpy as np
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


def centered(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def diverging(x):
    return lax.scan(lambda c, w: (c - c * w, None), x, jnp.float32([0.5, 0.5, 1]))[0]


@pytest.mark.parametrize("policy", ["O0", "O2:float16", "O3:bfloat16"])
@pytest.mark.parametrize("fn", [jax.nn.softmax, jax.jit(jax.nn.softmax), jax.nn.standardize, centered, diverging])
def test_nan_made_of_infinities_in_an_argument_is_the_argument_s(fn, policy):
    found = jamp.first_nonfinite(lambda p: fn(p["x"]), {"x": jnp.float32([1, jnp.inf])}, policy=policy)
    assert summary(found) == ("argument args[0]['x']", None, (), "float32", 1, 0, 2)
    assert found.nan_made_by.operation == "sub" and found.nan_made_by.nans
    assert "; turned into NaN by sub" in str(found)


def test_where_an_infinity_turned_into_nan_is_said_in_full():
    found = jamp.first_nonfinite(diverging, jnp.float32([1, jnp.inf]), policy="O0")
    assert found.nan_made_by.iterations == (0,)
    assert str(found).startswith("argument args[0]: 1 inf in 2 float32 values; turned into NaN by sub, ")
    assert str(found).endswith(" (diverging.<lambda>), iteration 0")


def test_infinite_weights_are_the_argument_s_and_not_the_norm_s():
    def model(w, x):
        return centered(x @ w)

    w = jnp.eye(2).at[0, 1].set(jnp.inf)
    assert jamp.first_nonfinite(model, w, jnp.ones((2, 2)), policy="O2:float16").operation == "argument args[0]"
    zeros = jamp.first_nonfinite(jnp.matmul, jnp.zeros((2, 2)), w, policy="O2:float16")
    assert (zeros.operation, zeros.nan_made_by.operation) == ("argument args[1]", "dot_general")


def test_masks_of_minus_infinity_may_come_in_from_outside():
    def masked(x, mask):
        return jax.nn.softmax(x + mask)

    x, mask = jnp.ones(2), jnp.float32([0, -jnp.inf])
    assert jamp.first_nonfinite(masked, x, mask, policy="O2:float16") is None
    assert jamp.first_nonfinite(lambda x: masked(x, mask), x, policy="O2:float16") is None
    assert jamp.first_nonfinite(lambda x: x + mask, x, policy="O2:float16") is None
    nothing_left = jamp.first_nonfinite(masked, x, mask - jnp.inf, policy="O2:float16")
    assert (nothing_left.operation, nothing_left.nan_made_by.operation) == ("argument args[1]", "sub")


@pytest.mark.parametrize("call", [lambda fn: fn, jax.jit])
def test_a_mask_is_not_blamed_for_an_overflow_beside_it(call):
    # The product overflows; with it, the row is inf - inf. That there is a mask of -inf besides is nobody's fault.
    scores = call(lambda w, x, mask: jax.nn.softmax(x @ w + mask))
    found = jamp.first_nonfinite(scores, BIG, BIG, jnp.float32([0, -jnp.inf]), policy="O3:float16")
    assert (found.operation, found.nan_made_by) == ("dot_general", None)
    after = call(lambda x, mask: jnp.exp(jax.nn.softmax(x + mask) * 100))
    assert jamp.first_nonfinite(after, jnp.ones(2), jnp.float32([0, -jnp.inf])).operation == "exp"


def test_closed_over_arrays_that_are_broken_are_named():
    weights = jnp.float32([1, jnp.nan])
    found = jamp.first_nonfinite(lambda x: jnp.exp(x * weights), jnp.ones(2), policy="O2:float16")
    assert summary(found) == ("constant", None, (), "float32", 0, 1, 2)
    infinite = jnp.float32([1, jnp.inf])
    found = jamp.first_nonfinite(lambda x: centered(x * infinite), jnp.ones(2), policy="O2:float16")
    assert (found.operation, found.infinities, found.nan_made_by.operation) == ("constant", 1, "sub")


@pytest.mark.parametrize("policy", ["O2:float16", "O3:float16"])
def test_a_scan_whose_weights_are_cast_outside_is_entered(policy):
    def powers(w, x):
        return lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=3)[0]

    found = jamp.first_nonfinite(powers, BIG / 16, BIG / 16, policy=policy)
    assert (found.operation, found.iterations) == ("dot_general", (1,))


def test_a_function_with_a_cast_fn_inside_runs_as_it_is_written():
    apply_fn = jamp.cast_fn(lambda w, x: x @ w, "O3:float16")

    def loss_fn(w, x):
        return jnp.sum(apply_fn(w, x) * 2.0**126)

    small = jnp.full((2, 2), 2.0)
    found = jamp.first_nonfinite(loss_fn, small, small)
    assert (found.operation, found.dtype) == ("mul", "float32")  # Outside of the cast_fn.
    found = jamp.first_nonfinite(jax.jit(loss_fn), BIG, BIG * 2.0**10)
    assert (found.operation, found.dtype, found.largest) == ("convert_element_type", "float16", 2.0**19)


def test_the_gradients_of_a_loss_scale_that_is_too_large():
    apply_fn = jamp.cast_fn(lambda w, x: x @ w, "O2:float16")

    def loss_fn(w, x):
        return jnp.mean(apply_fn(w, x) ** 2)

    w = x = jnp.full((2, 2), 2.0)
    step = jamp.value_and_grad(loss_fn, jamp.StaticLossScale(2.0**20))
    found = jamp.first_nonfinite(step, w, x)
    assert found.infinities and found.dtype == "float16"
    assert jamp.first_nonfinite(jamp.value_and_grad(loss_fn, jamp.StaticLossScale(2.0**4)), w, x) is None


def test_casting_the_result_can_overflow():
    policy = jamp.get_policy("O2:float16").with_output_dtype("float16")
    found = jamp.first_nonfinite(lambda x: jnp.exp(x), jnp.float32([0, 12]), policy=policy)
    assert summary(found) == ("result", None, (), "float16", 1, 0, 2)


def test_finite_results_give_none():
    assert jamp.first_nonfinite(jnp.sin, jnp.ones(3), policy="O2:float16") is None


def test_shapes_are_not_enough():
    with pytest.raises(TypeError, match=r"have no values:\n  args\[0\]: ShapeDtypeStruct"):
        jamp.first_nonfinite(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_a_loop_that_ends_for_each_member_of_a_batch_by_itself():
    def until_large(x):
        return lax.while_loop(lambda c: c.sum() < 40, lambda c: c * 2 + jnp.log(x), x)

    x = jnp.ones((4, 3)).at[1, 1].set(-1.0)
    found = jamp.first_nonfinite(jax.vmap(until_large), x, policy="O1:bfloat16")
    assert found.operation == "log" and found.iterations == (0,) and found.nans == 1
    assert jamp.first_nonfinite(jax.vmap(until_large), jnp.arange(1.0, 13.0).reshape(4, 3)) is None


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * jnp.nan,
        lambda x: jnp.where(x > 0, jnp.nan, x),
        lambda x: (x + jnp.full(4, jnp.nan)).sum(),
        lambda x: x + np.full(4, np.nan, np.float32),
    ],
)
def test_a_nan_that_the_program_writes_is_named(fn):
    found = jamp.first_nonfinite(fn, jnp.arange(4.0), policy="O2:bfloat16")
    assert found.operation == "constant" and found.nans


def test_infinities_that_the_program_writes_are_its_own():
    assert jamp.first_nonfinite(lambda x: x + jnp.where(x > 0, -jnp.inf, 0.0), jnp.arange(4.0), policy="O2") is None
