import jax
import jax.numpy as jnp
import pytest

import jamp

X = jnp.float32([1 + 2**-9, 2])


def test_errors_of_each_result():
    found = jamp.compare(lambda x: {"half": x * 1.0 @ jnp.eye(2), "count": jnp.arange(3)}, X, policy="O3:bfloat16")
    count, half = found.differences
    assert (count.path, count.dtype, count.absolute, count.relative) == ("['count']", "int32", 0.0, 0.0)
    assert (half.path, half.dtype, half.shape) == ("['half']", "float32", (2,))
    assert (half.absolute, half.relative) == (2**-9, 2**-10)  # 1 + 2^-9 is 1 in bfloat16; the largest is 2.


def test_nonfinite_elements_are_counted_and_kept_out_of_the_error():
    (found,) = jamp.compare(lambda x: x * x, jnp.float32([2, 2**9, jnp.inf]), policy="O3:float16").differences
    assert (found.nonfinite, found.nonfinite_reference, found.absolute) == (2, 1, 0.0)


def test_any_two_policies():
    found = jamp.compare(jamp.cast_fn(lambda x: x @ x, "O3:float16"), X, reference="O3:float16")
    assert (found.policy, found.reference) == (jamp.get_policy("O3:float16"),) * 2
    assert found.differences[0].absolute == 0.0


def norm_of_product(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


applied = jamp.cast_fn(norm_of_product, "O3:bfloat16")


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: applied(w, x),
        jax.jit(applied),
        jax.grad(lambda w, x: applied(w, x)),
        jax.jit(jax.value_and_grad(applied)),
        lambda w, x: jax.lax.scan(lambda c, _: (applied(w, c) * c, None), x, None, length=2)[0],
        jax.checkpoint(applied),
    ],
)
def test_a_cast_fn_inside_is_compared_with_float32(fn):
    w, x = jnp.full((2, 2), 0.3), X[None]
    jax.block_until_ready(fn(w, x))  # Fills the caches of jit: what was compiled at half must not be the reference.
    found = jamp.compare(fn, w, x)
    assert all(d.absolute > 1e-4 for d in found.differences)
    assert (found.policy, found.inner, str(found.reference)) == (None, (jamp.get_policy("O3:bfloat16"),), "O0")
    assert str(found).splitlines()[0] == "as written, with cast_fn at O3:bfloat16 inside, beside O0"


def test_a_function_with_a_cast_fn_inside_runs_as_it_is_written():
    def loss_fn(w, x):
        return applied(w, x), jnp.exp(x) * w[0, 0]

    w, x = jnp.full((2, 2), 0.3), X[None]
    inner, outer = jamp.compare(loss_fn, w, x).differences
    assert inner.absolute == jamp.compare(applied, w, x).differences[0].absolute > 0
    assert outer.absolute == 0


def test_policies_given_rule_what_the_cast_fn_inside_does_not():
    def loss_fn(w, x):
        return applied(w, x), x @ w

    w, x = jnp.full((2, 2), 0.3), X[None]
    found = jamp.compare(loss_fn, w, x, policy="O3:float16", reference="O3:bfloat16")
    assert str(found).startswith("O3:float16, with cast_fn at O3:bfloat16 inside, beside O3:bfloat16\n")
    assert [d.absolute > 0 for d in found.differences] == [False, True]


def test_random_keys_and_things_that_are_no_arrays_pass():
    found = jamp.compare(lambda k: (jax.random.split(k), "text", None), jax.random.key(0))
    assert [d.absolute for d in found.differences] == [0.0]


def test_table():
    lines = str(jamp.compare(lambda x: {"y": x @ x}, X, policy="O3:bfloat16")).splitlines()
    assert lines[0] == "O3:bfloat16 beside O0"
    assert lines[-1].split()[:2] == ["['y']", "float32[]"]
    assert max(map(len, lines)) <= 100


def test_takes_functions_only():
    with pytest.raises(TypeError, match=r"`jamp.compare` takes a function first, got 3"):
        jamp.compare(3)


def test_the_table_has_what_differs():
    found = jamp.compare(
        lambda x: {"state": [jnp.arange(2.0) + i for i in range(45)], "y": x @ x}, X, policy="O3:bfloat16"
    )
    assert len(found.differences) == 46
    assert [line.split()[0] for line in str(found).splitlines()[2:]] == ["result", "['y']", "and"]
    assert str(jamp.compare(jnp.sum, X, policy="O0")).endswith("1 array without a difference")


def test_where_everything_is_nan_there_is_no_error_of_zero():
    found = jamp.compare(lambda x: (x * jnp.nan, jnp.zeros(0)), X, policy="O3:float16")
    nan, empty = found.differences
    assert jnp.isnan(nan.absolute) and jnp.isnan(nan.relative) and empty.absolute == 0
    assert "nan" in str(found).splitlines()[3]
