"""How large gradients are: exact counts on numbers chosen by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

# For float16: infinite, as large as it can be, normal, its smallest normal, short of digits, the last that becomes
# zero, zero, and two that are broken already.
SIZES = [65520.0, 65504, 1, 2**-14, 2**-15, 2**-24, 2**-25, -(2.0**-60), 0, np.inf, np.nan]


def test_counts_are_exact():
    (leaf,) = jamp.gradient_histogram({"w": jnp.float32(SIZES), "n": jnp.arange(3)}).leaves
    assert (leaf.path, leaf.size, leaf.zeros, leaf.nonfinite) == ("['w']", 11, 1, 2)
    assert (leaf.above, leaf.short, leaf.below) == (1, 2, 2)
    assert (leaf.smallest, leaf.largest) == (2.0**-60, 65520)
    assert leaf.exponents == {15: 2, 0: 1, -14: 1, -15: 1, -24: 1, -25: 1, -60: 1}


def test_scaled_gradients_are_counted_as_they_are_and_shown_as_they_were():
    scaler = jamp.StaticLossScale(2.0**10)
    found = jamp.gradient_histogram(scaler.scale(jnp.float32([1, 2**-30, 64])), scaler)
    assert (found.loss_scale, found.below, found.short, found.above) == (1024, 0, 1, 1)
    assert found.exponents == {-30: 1, 0: 1, 6: 1}
    tx = jamp.mixed_precision(optax.sgd(1.0), "O2:float16")
    assert jamp.gradient_histogram(jnp.ones(2), tx.init(jnp.ones(2))).loss_scale == 2.0**15


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_no_power_of_two_loses_less_than_the_best(spread):
    grads = jnp.exp(spread * jax.random.normal(jax.random.key(int(spread)), (2000,)) - 8)
    best = jamp.gradient_histogram(grads).best_scale

    def lost(scale):
        """Zeros and infinities, and how far the rest is off, as numpy casts it."""
        with np.errstate(over="ignore"):
            held = (np.asarray(grads) * np.float32(scale)).astype(np.float16)
        bad = np.sum(~np.isfinite(held)), np.sum(held == 0)
        return (*map(int, bad), int(np.sum(np.abs(held) < 2**-14)))

    assert lost(best)[0] == 0
    assert lost(best) == min(lost(2.0**power) for power in range(-30, 40))


@pytest.mark.parametrize(
    ("grads", "scale", "best"),
    [
        ([1.0, 2**-30], 1, 2.0**15),
        ([2.0**20, 1], 1, 2.0**-5),
        ([65504.0, 2**-14], 1, 1),
        ([2.0**17, 1], 1, 2.0**-2),
        ([1.0, 0.5], 1, 1),  # Nothing is lost, and so no other scale is worth a change.
        ([1.0, 0.5], 2.0**10, 2.0**10),
        ([1.0, 0.5], 1000, 1000),
        ([1.0, 0.5], 2.0**17, 2.0**15),
        ([70000.0, 2, 3], 1, 2.0**-1),
        ([1.0], 2.0**16, 2.0**15),
        ([1e-6, 1e-3], 1, 2.0**6),
        ([1.0, 2**-30], 2.0**14, 2.0**15),  # One digit less.
        ([0.0], 1, None),
    ],
)
def test_the_best_scale_is_this_one_or_the_nearest_that_loses_fewer_digits(grads, scale, best):
    scaler = jamp.StaticLossScale(scale)
    found = jamp.gradient_histogram(scaler.scale(jnp.float32(grads)), scaler)
    assert found.best_scale == best
    assert ("this scale" in str(found)) == (best == scale)


@pytest.mark.parametrize("dtype, below", [("float16", 1), ("bfloat16", 0), ("float8_e5m2", 2), ("float32", 0)])
def test_of_any_dtype(dtype, below):
    assert jamp.gradient_histogram(jnp.float32([1, 2**-20, 2**-40]), dtype=dtype).below == below


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_gradients(dtype):
    grads = jnp.asarray([1, 2**-14, 2**-20], dtype)
    assert jamp.gradient_histogram(grads).exponents == {0: 1, -14: 1, -20: 1}


def test_text_dictionary_and_picture(tmp_path):
    found = jamp.gradient_histogram({"w": jnp.float32(SIZES), "zeros": jnp.zeros(2)})
    assert "not finite already: ['w']" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["below"] == 2
    found.plot(tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").stat().st_size > 10_000


def test_the_picture_says_what_no_bar_shows(tmp_path):
    leaves = {"nan": jnp.full(3, jnp.nan), "zeros": jnp.zeros(2)}
    found = jamp.gradient_histogram(leaves)
    assert "any scale: no gradient is finite and not zero" in str(found)
    found.plot(tmp_path / "odd.svg")
    picture = (tmp_path / "odd.svg").read_text()
    assert all(
        text in picture
        for text in ("not finite already: 3 of 3", "all zero", "no gradient that is finite and not zero")
    )


def test_long_names_of_leaves_differ(tmp_path):
    names = [f"layer_{c}/very/long/name/of/a/parameter/of/the/kernel" for c in "abcdef"]
    found = jamp.gradient_histogram({name: jnp.ones(2) for name in names})
    rows = [line.split("']")[0] for line in str(found).splitlines() if "/long" in line]
    assert len(rows) == len(set(rows)) == 6 and all("…" in row for row in rows)


@pytest.mark.parametrize("grads", [{"n": jnp.arange(3)}, jax.ShapeDtypeStruct((3,), jnp.float32), None])
def test_what_has_no_values(grads):
    with pytest.raises(TypeError, match="looks at floating arrays"):
        jamp.gradient_histogram(grads)


def test_the_pair_in_place_of_the_gradients():
    pair = jax.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"got a pair \(loss, grads\): expected the gradients alone"):
        jamp.gradient_histogram(pair)
    for grads in ([*pair], (jnp.float32(1.0), jnp.ones(2)), pair[1]):  # Two parameters, of which one is a number.
        jamp.gradient_histogram(grads)


def test_inside_of_jit():
    with pytest.raises(TypeError, match="outside, with arrays"):
        jax.jit(lambda g: jamp.gradient_histogram(g).below)(jnp.ones(2))


def test_float64_is_counted_in_float64():
    with jax.enable_x64(True):
        found = jamp.gradient_histogram({"a": jnp.float64([1e-300, 1.0, 1e300, 2.0**-100])})
        (leaf,) = found.leaves
        assert (leaf.zeros, leaf.nonfinite, leaf.below, leaf.above) == (0, 0, 2, 1)
        assert (leaf.smallest, leaf.largest) == (1e-300, 1e300)
        assert leaf.exponents == {-126: 1, -100: 1, 0: 1, 127: 1}
