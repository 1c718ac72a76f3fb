"""Comparisons of half values, compiled: a value is equal to the maximum that it is, whatever XLA leaves out.

XLA may leave out the rounding of a product that is raised to float32 again (`xla_allow_excess_precision`, its default).
Each function here counts what cannot be: rows without a largest element, elements above their maximum.
"""

import itertools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.transforms._traced import Traced
from tests.transforms.harness import run

X = jax.random.normal(jax.random.key(0), (16, 64))
W = jax.random.normal(jax.random.key(1), (64, 64)) / 8
POLICIES = ("O1:bfloat16", "O2:bfloat16", "O2:float16", "OD:bfloat16", "O3:bfloat16")


def most(h):
    return h.max(1, keepdims=True)


def rows_without(mask, least=1):
    return (mask.sum(1) < least).sum()


IMPOSSIBLE = {
    "eq": lambda h: rows_without(h == most(h)),
    "ne": lambda h: (h != most(h)).all(1).sum(),
    "ge": lambda h: rows_without(h >= most(h)),
    "le": lambda h: rows_without(most(h) <= h),
    "lt": lambda h: (h < most(h)).all(1).sum() + (most(h) < h).sum(),
    "gt": lambda h: (most(h) > h).all(1).sum() + (h > most(h)).sum(),
    "smallest": lambda h: rows_without(h == h.min(1, keepdims=True)),
    "negated": lambda h: rows_without(h == -(-h).min(1, keepdims=True)),
    "magnitude": lambda h: rows_without(jnp.abs(h) == most(jnp.abs(h))),
    "sort": lambda h: rows_without(h >= jnp.sort(h, 1)[:, -2:-1], 2),
    "top_k": lambda h: rows_without(h >= lax.top_k(h, 3)[0][:, -1:], 3),
    "partition": lambda h: rows_without(h <= jnp.partition(h, 3, 1)[:, 3:4], 4),
    "cummax": lambda h: rows_without(h == lax.cummax(h, 1)),
    "argmax": lambda h: rows_without(h == jnp.take_along_axis(h, h.argmax(1, keepdims=True), 1)),
    "reversed": lambda h: (h != h[::-1][::-1]).sum(),
    "maximum": lambda h: (jnp.maximum(h, h[::-1]) < h).sum(),
    "clip": lambda h: ((jnp.clip(h, -0.5, 0.5) != h) != ((h > 0.5) | (h < -0.5))).sum(),
    "floor": lambda h: (h < jnp.floor(h)).sum(),
    "pool": lambda h: rows_without(h == lax.reduce_window(h, -jnp.inf, lax.max, (1, 64), (1, 1), "VALID")),
    "where": lambda h: jnp.isinf(jnp.where(h == most(h), h, -jnp.inf).max(1)).sum(),
    "scanned": lambda h: lax.scan(lambda n, row: (n + (row == row.max()).sum(), None), 0, h)[0] < len(h),
    "associative": lambda h: rows_without(h == lax.associative_scan(jnp.maximum, h, axis=1)[:, -1:]),
    "percentile": lambda h: rows_without(h >= jnp.percentile(h, 100, 1, keepdims=True)),
    "median": lambda h: rows_without(h <= jnp.median(h[:, 1:], 1, keepdims=True), 32),
    "beside float32": lambda h: (jnp.concatenate([h, jnp.linspace(0, 1, len(h))[:, None]], 1)[:, :-1] != h).sum(),
    "segments": lambda h: rows_without(h == jax.ops.segment_max(h.T, jnp.zeros(h.shape[1], int), 1).T),
    "carried": lambda h: rows_without(h == lax.scan(lambda m, x: (jnp.maximum(m, x), None), h[:, 0], h.T)[0][:, None]),
    "checkpoint": lambda h: jax.checkpoint(lambda h: rows_without(h == most(h)))(h),
    "call": lambda h: rows_without(jnp.isclose(h, most(h), rtol=0, atol=0)),
    "branch": lambda h: lax.cond((h == most(h)).any(), lambda: 0, lambda: 1),
    "loop": lambda h: lax.while_loop(lambda i: (i < h.shape[1]) & (h[0, i] != h[0].max()), lambda i: i + 1, 0) // 64,
    "root": lambda h: jnp.isnan(jnp.sqrt(most(h) - h)).sum(),
    "softmax": lambda h: (jnp.exp(h - most(h)).max(1) != 1).sum(),
}


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("of", [lambda h: h, jnp.tanh], ids=["product", "tanh"])
def test_a_maximum_is_one_of_the_values(of, policy):
    def impossible(x):
        return {name: count(of(x @ W)) for name, count in IMPOSSIBLE.items()}

    found = {name: jax.jit(jamp.cast_fn(lambda x, f=f: f(of(x @ W)), policy))(X) for name, f in IMPOSSIBLE.items()}
    assert {name: int(count) for name, count in found.items() if count} == {}
    together = jax.jit(jamp.cast_fn(impossible, policy))(X)
    assert {name: int(count) for name, count in together.items() if count} == {}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("largest", [jnp.max, lambda h: jnp.sort(h)[-1], lambda h: lax.cummax(h)[-1]])
def test_the_gradient_of_a_maximum_inside_is_that_of_one_row(largest, policy):
    """It was zero: JAX divides among the elements that are equal to the maximum, and none was."""

    def penalty(x):
        return jnp.abs(jax.grad(lambda x: jax.vmap(largest)(x @ W).sum())(x)).sum(1)

    assert jnp.all(jax.jit(jamp.cast_fn(penalty, policy))(X) > 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_peaks_of_a_heat_map_are_those_that_eager_code_finds(policy):
    kernel = jax.random.normal(jax.random.key(2), (3, 3, 4, 4)) / 6

    def peaks(image):
        heat = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        window = lax.reduce_window(heat, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return (window == heat).sum()

    image = jnp.round(4 * jax.random.normal(jax.random.key(3), (2, 16, 16, 4)))
    cast = jamp.cast_fn(peaks, policy)
    assert abs(int(jax.jit(cast)(image)) - int(cast(image))) <= 2 and cast(image) > 20


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16", "O3:bfloat16"])
@pytest.mark.parametrize("compiled", [jax.jit, lambda fn: fn], ids=["compiled", "eager"])
def test_nothing_of_what_is_scaled_is_above_its_maximum(policy, compiled):
    """A sum scales its terms once more, in float32, but not a term that the other one is the maximum of.

    (At O1 the sum is float32, of which XLA makes one operation with the product: so it is without jamp.)
    """
    tops = {
        "max": most,
        "sort": lambda h: jnp.sort(h, 1)[:, -1:],
        "percentile": lambda h: jnp.percentile(h, 100, 1, keepdims=True),
        "stopped": lambda h: lax.stop_gradient(most(h)),
    }

    def above(top, scale):
        def fn(x):
            h = (x @ W + x) * scale
            return (h - top(h) > 0).sum()

        return int(compiled(jamp.cast_fn(fn, policy))(X))

    for scale in (0.375, jnp.float32(0.375)):
        found = {name: above(top, scale) for name, top in tops.items()}
        assert found == dict.fromkeys(tops, 0)


def test_comparisons_in_another_precision_than_around_them():
    """At O3 all is half; the region compares in float32 what was rounded outside."""

    def without(x):
        h = x @ W
        return rows_without(jamp.full_precision(lambda a, b: a == b)(h, most(h)))

    assert jax.jit(jamp.cast_fn(without, "O3:bfloat16"))(X) == 0


def exact_steps(fn, *args, policy="O2:bfloat16"):
    """Names of the operations whose results must be rounded, in order."""
    steps = Traced(fn, args, {}).plan(jamp.get_policy(policy)).steps
    return [step.eqn.primitive.name for step in steps if step.exact]


def test_what_is_compared_is_exact_where_it_is_made():
    """And neither what hands it on, nor what is compared with numbers alone."""

    def peaks(x):
        h = jnp.tanh(x @ W)
        return (h.max(1) == h.T).sum() + (x @ W.T > 0.1).sum()

    assert exact_steps(peaks, X) == ["tanh"]
    assert exact_steps(lambda x: (jnp.abs(x @ W)[:, ::2] < x[:, ::2]).sum(), X) == ["dot_general"]


def test_calls_and_checkpoints_say_what_they_compare():
    close = jax.jit(lambda h, m: h == m)
    assert exact_steps(lambda x: close(x @ W, 1.0 + x).sum(), X) == ["dot_general"]
    assert exact_steps(lambda x: jax.checkpoint(lambda h: h == most(h))(x @ W), X) == ["dot_general"]
    turned = jax.jit(lambda h: (h.T, jnp.tanh(h)))
    assert exact_steps(lambda x: turned(x @ W)[0] == x.T, X)[0] == "dot_general"
    assert "dot_general" not in exact_steps(lambda x: turned(x @ W)[1] == x, X)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jax.nn.softmax, jax.nn.standardize, jnp.abs])
def test_networks_compare_nothing(activation):
    def loss(w, x):
        return jnp.mean(activation(x @ w) @ w)

    assert exact_steps(jax.grad(loss), W, X) == []


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16"])
def test_derivatives_pass_what_is_exact_unchanged(policy):
    def loss(x):
        h = x @ W
        return jnp.where(h >= jnp.sort(h, 1)[:, -2:-1], h, 0).sum()

    found = jax.jit(jax.grad(jamp.cast_fn(loss, policy)))(X)
    chex.assert_trees_all_close(found, jax.grad(loss)(X), atol=0.01, rtol=0.02)


def test_small_numbers_of_float16_stay():
    """They are below its normal numbers, and would be zero with as few bits in the exponent."""

    def compared(x):
        h = x @ jnp.eye(4)
        return h * (h == h.max())

    x = jnp.array([[2.0**-20, 0.0, 2.0**-22, -1.0]])
    chex.assert_trees_all_equal(jax.jit(jamp.cast_fn(compared, "O2:float16"))(x), x * (x == 2.0**-20))


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16"])
def test_sums_of_exponentials_are_of_those_that_the_backward_pass_computes(policy):
    """Compiled, a gradient is what it is operation by operation, where nothing is left out."""

    def loss(weights, x):
        q, k, v = (x @ weights[name] for name in "qkv")
        return ((jax.nn.softmax(q @ k.swapaxes(1, 2) / 4) @ v @ weights["o"] - x) ** 2).mean()

    keys = jax.random.split(jax.random.key(0), 5)
    weights = {name: jax.random.normal(key, (16, 16)) / 3 for name, key in zip("qkvo", keys, strict=False)}
    x = jax.random.normal(keys[4], (2, 64, 16))
    gradient = jax.grad(jamp.cast_fn(loss, policy))
    expected = jax.grad(loss)(weights, x)["q"]
    compiled, by_operation = jax.jit(gradient)(weights, x)["q"], run(gradient, weights, x)["q"]
    assert jnp.linalg.norm(compiled - expected) < 2.5 * jnp.linalg.norm(by_operation - expected)


# What a softmax is of: half by way of its other reader.
LOGITS = {
    "a product": lambda h: h,
    "a multiple": lambda h: 20 * h,
    "far from zero": lambda h: 300 + 20 * h,
    "with a bias": lambda h: 8 * h + jnp.linspace(-1, 1, h.shape[-1]),
    "a quotient": lambda h: h / 0.05,
    "a sum of two": lambda h: 8 * h + 8 * jnp.tanh(h),
    "a square": lambda h: 4 * h * h,
    "capped": lambda h: 30 * jnp.tanh(h / 3),
    "of a sigmoid": lambda h: 20 * jax.nn.sigmoid(h),
    "of a jitted function": lambda h: 20 * jax.nn.gelu(h),
    "in a jitted function": lambda h: jax.jit(lambda a: 20 * a)(h),
    "in a checkpoint": lambda h: jax.checkpoint(lambda a: 20 * jnp.sin(a))(h),
    "in a branch": lambda h: lax.cond(h[0, 0] > 1e9, lambda a: a, lambda a: 20 * a, h),
    "of a loop": lambda h: lax.scan(lambda c, a: (c * 0.5 + a, 8 * c + a), jnp.zeros(h.shape[-1]), h)[1],
    "of a norm": lambda h: 8 * jax.nn.standardize(h),
    "of a function's norm": lambda h: jax.jit(lambda a: 8 * jax.jit(jax.nn.standardize)(a))(h),
    "put together": lambda h: jnp.concatenate([8 * h, 4 * h], -1),
    "turned": lambda h: (8 * h).T,
    "chosen": lambda h: jnp.where(h > 0, 8 * h, 2 * h),
}
NORMALIZED = {
    "softmax": jax.nn.softmax,
    "by hand": lambda z: jnp.exp(z - most(z)) / jnp.exp(z - most(z)).sum(-1, keepdims=True),
    "of a log_softmax": lambda z: jnp.exp(jax.nn.log_softmax(z)),
    "by a logsumexp": lambda z: jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True)),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy[:2] != "O3"])
@pytest.mark.parametrize("normalized", NORMALIZED.values(), ids=NORMALIZED)
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_what_all_weights_of_a_softmax_have_in_common_changes_nothing(logits, normalized, policy, key):
    """They add up to one. Where the backward pass had other logits than the sum, gradients were up to 152 % off."""
    keys = jax.random.split(key, 5)
    x, w = jax.random.normal(keys[0], (16, 16)), jax.random.normal(keys[1], (16, 8)) / 4
    v, apart = jax.random.normal(keys[2], (16, 30)), jax.random.normal(keys[3], (16, 16))

    @jamp.cast_fn(policy=policy)
    def both(w, v, x):
        z = logits(x @ w)
        return normalized(z), z @ v[: z.shape[-1]]

    def gradient(of):
        def loss(w):
            weights, others = both(w, v, x)
            return jnp.sum(weights * of(weights.shape)) + 1e-9 * jnp.sum(others)

        return jnp.linalg.norm(jax.jit(jax.grad(loss))(w))

    differs = gradient(lambda shape: 16 * apart.ravel()[: shape[0] * shape[1]].reshape(shape))
    assert gradient(lambda shape: jnp.full(shape, 16.0)) < 1e-4 * differs


def test_what_exponentials_take_the_difference_of_is_exact():
    """Made by a product or not; a maximum that is taken away cancels as it is, whatever it is of."""

    def exact(fn):
        return exact_steps(fn, X, policy="O3:bfloat16")  # Where all of it is half.

    assert exact(lambda x: jnp.exp(jnp.tanh(x @ W) * 3.0 - (x @ W.T))) == ["dot_general", "tanh", "mul", "dot_general"]
    assert exact(lambda x: jax.jit(lambda a, b: jnp.exp(a - b))(x @ W, 2.0 * x)) == ["dot_general", "mul"]
    assert exact(lambda x: jnp.exp(x @ W - 3.0) + jnp.exp(x @ W)) == []
    assert exact(lambda x: jnp.exp(jnp.tanh(x @ W) - lax.stop_gradient(most(x @ W)))) == []
    assert exact(lambda x: jnp.exp((x @ W) ** 2) - x @ W) == []
    assert exact(lambda x: jax.nn.softmax(jnp.tanh(x @ W)) @ W) == ["dot_general"]  # Of exponentials that are added up.


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16"])
@pytest.mark.parametrize("depth", [2, 3])
def test_slopes_of_a_softplus_are_those_of_its_values(policy, depth, key):
    """They are `exp(x - softplus(x))`; of an `x` that was rounded for one of the two, losses of them were 12 % off."""
    keys = jax.random.split(key, depth + 2)
    sizes = [3, *[32] * depth, 1]
    weights = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, itertools.pairwise(sizes), strict=False)]
    points = jax.random.uniform(keys[-1], (64, 3), minval=-1)

    def loss(weights, points):
        def distance(point):
            for w in weights[:-1]:
                point = jax.nn.softplus(100 * (point @ w)) / 100
            return (point @ weights[-1])[0]

        slopes = jax.vmap(jax.grad(distance))(points)
        return jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    def off(found):
        difference = jax.tree.map(lambda a, b: a - b, found, expected)
        return sum(jnp.vdot(d, d) for d in difference) ** 0.5 / sum(jnp.vdot(e, e) for e in expected) ** 0.5

    expected = jax.grad(loss)(weights, points)
    gradient = jax.grad(jamp.cast_fn(loss, policy))
    by_operation = off(run(gradient, weights, points))
    assert off(jax.jit(gradient)(weights, points)) < 1.5 * by_operation
    assert by_operation < 0.08
