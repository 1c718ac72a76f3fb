"""The exact steps at which the scale grows and backs off, its limits, and the values that are refused."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.helpers import assert_same_spec, spec

DYNAMIC = jamp.DynamicLossScale


def scales(scaler, flags):
    """The scale after each step; `flags` as text, "." for a finite step and "x" for an overflow."""
    out = []
    for flag in flags:
        scaler = scaler.adjust(flag == ".")
        out.append(float(scaler.loss_scale))
    return out


# ---------------------------------------------------------------- growth and backoff


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_grows_on_exactly_the_period_th_finite_step(period):
    # flax's DynamicScale and jaxamp grow one step later.
    steps = scales(DYNAMIC(1.0, period=period), "." * (2 * period))
    assert steps == [1.0] * (period - 1) + [2.0] * period + [4.0]


def test_an_overflow_restarts_the_count():
    assert scales(DYNAMIC(4.0, period=3), "..x..x...") == [4, 4, 2, 2, 2, 1, 1, 1, 2]


def test_counter_tells_the_finite_steps():
    scaler = DYNAMIC(4.0, period=3)
    counts = []
    for flag in (True, True, False, True, True, True, True):
        scaler = scaler.adjust(flag)
        counts.append(int(scaler.counter))
    assert counts == [1, 2, 0, 1, 2, 0, 1]


def test_a_period_beyond_int32_is_never():
    scaler = DYNAMIC(8.0, counter=5, period=10**10)
    assert scaler.adjust(True).loss_scale == 8 and scaler.adjust(True).counter == 6


def test_starts_from_a_given_counter():
    assert scales(DYNAMIC(4.0, 2, 3), ".") == [8.0]
    assert scales(DYNAMIC(4.0, counter=99, period=3), ".") == [8.0]


def test_factors():
    assert scales(DYNAMIC(4.0, period=1, factor=4), ".x") == [16.0, 4.0]
    assert scales(DYNAMIC(4.0, period=1, factor=4, backoff_factor=0.5), ".x") == [16.0, 8.0]


# ---------------------------------------------------------------- limits


def test_stops_at_the_cap_and_comes_back():
    assert scales(DYNAMIC(4.0, period=1, max_loss_scale=10.0), "...x") == [8.0, 10.0, 10.0, 5.0]


def test_stops_at_the_floor_and_comes_back():
    assert scales(DYNAMIC(4.0, period=1, min_loss_scale=1.5), "xxx.") == [2.0, 1.5, 1.5, 3.0]


def test_floor_may_be_below_one():
    # NVIDIA/apex#452, tensorflow#38357, keras#16100.
    assert scales(DYNAMIC(1.0, min_loss_scale=0.25), "xxx") == [0.5, 0.25, 0.25]


def test_floor_survives_jit():
    # google-deepmind/jmp#44: flattening loses `min_loss_scale`, which is 1.0 again after any jit.
    scaler = jax.jit(lambda s: s)(DYNAMIC(2.0**-9, min_loss_scale=2.0**-10))
    assert scaler.min_loss_scale == 2.0**-10
    assert scales(jax.tree.map(lambda x: x, scaler), "xxx") == [2.0**-10] * 3


@pytest.mark.parametrize("no_limit", [None, 0, 0.0])
def test_300_overflows_in_a_row_leave_a_scale_that_recovers(no_limit):
    # NVIDIA/apex#834: "reducing loss scale to 1e-317"; jaxamp, Paddle and Keras have no floor either.
    scaler = DYNAMIC(2.0**15, period=1, min_loss_scale=no_limit)
    for _ in range(300):
        scaler = scaler.adjust(False)
    assert scaler.loss_scale == 2.0**-126
    assert scaler.unscale(scaler.scale(jnp.float32(8.0))) == 8.0
    for _ in range(10):
        scaler = scaler.adjust(True)
    assert scaler.loss_scale == 2.0**-116


@pytest.mark.parametrize("no_limit", [None, float("inf")])
def test_300_growths_in_a_row_leave_a_scale_that_works(no_limit):
    # pytorch#98828, google/flax#2547; jmp stops at 1.7e38, and jaxamp reaches inf.
    scaler = DYNAMIC(2.0**15, period=1, max_loss_scale=no_limit)
    for _ in range(300):
        scaler = scaler.adjust(True)
    assert scaler.loss_scale == 2.0**126
    # XLA multiplies with the reciprocal; that of 2**127 would be flushed to zero, and the gradients with it.
    assert jax.jit(scaler.unscale)(jnp.full(8, 2.0**126)).tolist() == [1.0] * 8
    assert scaler.adjust(False).loss_scale == 2.0**125


def test_default_limits():
    assert scales(DYNAMIC(2.0**24, period=1), ".") == [2.0**24]
    assert scales(DYNAMIC(1.0), "x") == [1.0]


def test_limits_that_float32_rounds_admit_themselves():
    for value in (0.3, 0.7, 1e-5, 1e10 / 3):
        DYNAMIC(value, min_loss_scale=value, max_loss_scale=value)


# ---------------------------------------------------------------- hysteresis


def test_hysteresis_forgives_until_growth():
    # DeepSpeed and Megatron: once used up, every overflow backs off until the scale has grown.
    scaler = DYNAMIC(64.0, period=3, hysteresis=2)
    assert scales(scaler, "xx.x...xx") == [64, 32, 32, 16, 16, 16, 32, 32, 16]


def test_hysteresis_of_overflows_in_a_row():
    scaler = DYNAMIC(64.0, period=9, hysteresis=2, hysteresis_refill="finite")
    assert scales(scaler, "x.x.xxx.x") == [64, 64, 64, 64, 64, 32, 16, 16, 16]


def test_hysteresis_that_backing_off_refills():
    scaler = DYNAMIC(64.0, period=9, hysteresis=2, hysteresis_refill="backoff")
    assert scales(scaler, "x.xxxxx.x") == [64, 64, 64, 32, 32, 16, 16, 16, 16]


def test_a_forgiven_overflow_restarts_the_count():
    assert scales(DYNAMIC(4.0, period=3, hysteresis=9), "..x..x...") == [4] * 8 + [8]


def test_leaves_are_the_scale_and_the_counter():
    assert [leaf.dtype.name for leaf in jax.tree.leaves(DYNAMIC(4.0))] == ["float32", "int32"]
    assert len(jax.tree.leaves(DYNAMIC(4.0, hysteresis=2))) == 3


# ---------------------------------------------------------------- what the constructor takes


@pytest.mark.parametrize(
    "value",
    [1024, 1024.0, np.float16(1024), np.float64(1024), jnp.float16(1024), jnp.bfloat16(1024), np.array(1024.0),
     jnp.asarray(1024.0), np.float32(1024), jnp.float32(1024)],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}",
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda value: DYNAMIC(value, period=1), jamp.StaticLossScale])
def test_any_number_becomes_a_strong_float32_scalar(make, value):
    # jmp#47: a float16 scale breaks `adjust`. jmp and flax: a Python number or a weak array compiles twice.
    scaler = make(value)
    assert spec(scaler.loss_scale) == ((), np.dtype("float32"), False)
    step = jax.jit(chex.assert_max_traces(lambda s: s.adjust(True), n=1))
    assert_same_spec(step(step(step(scaler))), scaler)


def test_traced_and_weakly_typed_scales():
    scaler = jax.jit(lambda scale, counter: DYNAMIC(scale, counter))(1024.0, 3)
    assert spec(scaler.loss_scale) == ((), np.dtype("float32"), False)
    assert spec(scaler.counter) == ((), np.dtype("int32"), False)


@pytest.mark.parametrize("eight", [np.int64(8), np.array(8), jnp.int32(8), jnp.uint8(8)])
@pytest.mark.parametrize("make", [DYNAMIC, jamp.StaticLossScale])
def test_integer_arrays_are_taken_as_integers_are(make, eight):
    """jmp warns of them. They are no misuse: what would have wrapped around is negative, or zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(eight).loss_scale == 8.0
        assert DYNAMIC(64.0, min_loss_scale=eight, max_loss_scale=np.int64(128)).min_loss_scale == 8
    with pytest.raises(ValueError, match="positive"):
        make(np.array(2**31).astype(np.int32))


def test_settings_become_python_numbers():
    scaler = DYNAMIC(8.0, 0, jnp.int32(5), np.float32(4), jnp.asarray(0.5), max_loss_scale=np.float64(64.0))
    assert (scaler.period, scaler.factor, scaler.min_loss_scale, scaler.max_loss_scale) == (5, 4.0, 0.5, 64.0)
    hash(jax.tree.structure(scaler))


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, float("inf"), float("nan"), 1e39, 2.0**127, 1e-40, np.float32("inf")])
def test_refuses_impossible_scales(scale):
    for make in (DYNAMIC, jamp.StaticLossScale):
        with pytest.raises(ValueError, match="loss_scale"):
            make(scale)


@pytest.mark.parametrize("scale", [None, "1024", True, [1.0], 1j, object()])
def test_refuses_what_is_no_number(scale):
    for make in (DYNAMIC, jamp.StaticLossScale):
        with pytest.raises(TypeError, match="loss_scale"):
            make(scale)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("period", {"period": 0}),
        ("period", {"period": -1}),
        ("period", {"period": 2.5}),
        ("period", {"period": float("inf")}),
        ("period", {"period": "2000"}),
        ("factor", {"factor": 1}),
        ("factor", {"factor": 0.5}),
        ("factor", {"factor": float("inf")}),
        ("factor", {"factor": float("nan")}),
        ("backoff_factor", {"backoff_factor": 0.0}),
        ("backoff_factor", {"backoff_factor": 1.0}),
        ("backoff_factor", {"backoff_factor": -0.5}),
        ("min_loss_scale", {"min_loss_scale": -1.0}),
        ("min_loss_scale", {"min_loss_scale": float("inf")}),
        ("max_loss_scale", {"min_loss_scale": 8.0, "max_loss_scale": 4.0}),
        ("max_loss_scale", {"max_loss_scale": 0.0}),
        ("loss_scale", {"max_loss_scale": 4.0}),
        ("loss_scale", {"min_loss_scale": 16.0}),
        ("hysteresis", {"hysteresis": 0}),
        ("hysteresis_refill", {"hysteresis_refill": "never"}),
        ("counter", {"counter": -1}),
        ("counter", {"counter": 1.5}),
        ("counter", {"counter": jnp.zeros(2)}),
        ("loss_scale", {"loss_scale": jnp.ones(2)}),
    ],
)
def test_refuses_impossible_settings(name, settings):
    with pytest.raises(ValueError, match=f"`{name}` "):
        DYNAMIC(**{"loss_scale": 8.0, **settings})


def test_refuses_traced_settings():
    with pytest.raises(TypeError, match="`factor` is traced"):
        jax.jit(lambda f: DYNAMIC(8.0, factor=f))(2.0)


@pytest.mark.parametrize("flag", [jnp.array([True]), 1.0, jnp.float32(1)])
def test_adjust_wants_a_boolean_scalar(flag):
    with pytest.raises(ValueError, match="expected boolean scalar"):
        DYNAMIC(8.0).adjust(flag)


# ---------------------------------------------------------------- set


@pytest.mark.parametrize("counter", [-1, 2**40, 1.5])
def test_refuses_impossible_counters(counter):
    with pytest.raises(ValueError, match=r"`counter` is .*between 0 and 2\*\*31 - 1"):
        DYNAMIC(8.0, counter=counter)
    for no_number in ("3", None, True):
        with pytest.raises(TypeError, match="`counter` is"):
            DYNAMIC(8.0, counter=no_number)


def test_set_changes_the_scale_and_nothing_else():
    scaler = DYNAMIC(8.0, period=3, hysteresis=2).adjust(True)
    changed = scaler.set(jnp.float16(32))
    assert_same_spec(changed, scaler)
    assert changed.loss_scale == 32.0 and changed.counter == 1
    assert jax.jit(lambda s, v: s.set(v))(scaler, 64.0).loss_scale == 64.0
    assert jamp.StaticLossScale(2.0).set(4.0).loss_scale == 4.0
    assert scales(DYNAMIC(8.0, delayed=True).set(4.0), ".x.") == [4.0, 4.0, 2.0]
    traced = jax.jit(lambda v: DYNAMIC(8.0, min_loss_scale=2.0, max_loss_scale=64.0).set(v).loss_scale)
    assert [float(traced(v)) for v in (2.0**-20, 32.0, jnp.inf)] == [2, 32, 64]


@pytest.mark.parametrize("value", [0.0, float("nan"), 2.0**25, 0.5])
def test_set_refuses_what_the_constructor_refuses(value):
    with pytest.raises(ValueError, match="loss_scale"):
        DYNAMIC(8.0).set(value)


# ---------------------------------------------------------------- scale and unscale


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scaler", [DYNAMIC(2.0**16), jamp.StaticLossScale(2.0**16)], ids=["dynamic", "static"])
def test_half_values_are_raised_before_they_are_scaled(scaler, dtype):
    # jmp#47, flax, mpx, MindSpore: a float16 loss times 2**16 is inf, and a float16 gradient times 2**-24 is garbage.
    scaled = scaler.scale(jnp.asarray(3.0, dtype))
    assert scaled.dtype == jnp.float32 and scaled == 3.0 * 2**16
    gradient = jnp.asarray(1.5 * 2.0**-10, dtype)
    assert scaler.unscale(gradient).dtype == jnp.float32 and scaler.unscale(gradient) == 1.5 * 2.0**-26


def test_other_floating_dtypes():
    scaler = jamp.StaticLossScale(2.0**100)
    value = jnp.complex64(3 + 4j)
    assert scaler.unscale(scaler.scale(value)) == value and scaler.scale(value).dtype == jnp.complex64
    assert scaler.scale(jnp.asarray(2.0, jnp.float8_e4m3fn)).dtype == jnp.float32
    assert spec(scaler.scale(1.0)) == ((), np.dtype("float32"), False)
    with jax.enable_x64(True):
        wide = jnp.float64(1 / 3)
        assert scaler.unscale(scaler.scale(wide)) == wide and scaler.scale(wide).dtype == jnp.float64
        gradient = jamp.StaticLossScale(1000.0).unscale(1000 * wide)
        assert abs(gradient / wide - 1) < 1e-15


def test_static_scale_is_a_leaf():
    # jmp registers it with the array as metadata: compiled once per value, and a tracer leaks out of jit.
    step = jax.jit(chex.assert_max_traces(lambda s, x: (s, s.scale(x)), n=1))
    for value in (2.0, 4.0, 8.0):
        scaler, scaled = step(jamp.StaticLossScale(value), jnp.float32(1.0))
        assert scaled == scaler.loss_scale == value


def test_counts_do_not_wrap_around():
    most = 2**31 - 1
    scaler = DYNAMIC(4.0, counter=most, period=2**40, hysteresis=2**40)
    assert (scaler.adjust(True).counter, scaler.adjust(True).loss_scale) == (0, 8)
    assert DYNAMIC(counter=most - 2, period=2**40).adjust(True).counter == most - 1
    for _ in range(2):
        scaler = scaler.adjust(False)
    assert (scaler.overflows, scaler.loss_scale) == (2, 4)
    full = DYNAMIC(4.0, hysteresis=2**31, overflows=most).adjust(False)
    assert (full.overflows, full.loss_scale) == (most, 2)


def test_words_are_no_flag():
    with pytest.raises(ValueError, match="`delayed` is 'no': expected True or False"):
        DYNAMIC(delayed="no")
    assert DYNAMIC(delayed=np.bool_(True)).delayed is True
