"""Where the error comes from: known numbers, planted culprits, first order beside what is measured."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jamp


def test_what_is_linear_is_exact():
    x = jnp.float32([1 + 2**-8, 2])
    found = jamp.error_sources(lambda x: x @ jnp.ones(2), x, policy="O2:bfloat16", gradient=False)
    assert found.value_error == pytest.approx(2**-8 / (3 + 2**-8), rel=1e-6)
    assert found.value_predicted == pytest.approx(found.value_error, rel=1e-6)
    assert found.operations[0].operation == "dot_general"
    assert found.operations[0].share == 1


def test_a_square_is_exact():
    x = jnp.float32([1 + 2**-8, 1])
    found = jamp.error_sources(lambda x: x @ x, x, policy="O3:bfloat16", gradient=False)
    size = (1 + 2**-8) ** 2 + 1
    assert found.value_error == pytest.approx((size - 2) / size, rel=1e-5)
    assert found.value_predicted == pytest.approx(found.value_error, rel=1e-5)


def smaller_root(b):
    return (-b + jnp.sqrt(b * b - 4)) / 2


CANCELLING = {
    "quadratic": lambda x: smaller_root(20 + 5 * x),
    "quadratic, all lost": lambda x: smaller_root(200 + 50 * x),
    "variance": lambda x: cancels(10 + x),
    "sums": lambda x: (10 + x).sum() - (10 + x[::-1] ** 2).sum(),
    "cosine": lambda x: (1 - jnp.cos(0.1 * (1 + x))) / x**2,
    "exponential": lambda x: (jnp.exp(0.01 * (1 + x)) - 1) / x,
    "cross product": lambda x: jnp.cross(x[:15].reshape(5, 3) + 3, 1.01 * x[:15].reshape(5, 3) + 3),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", CANCELLING)
def test_what_cancels_is_predicted_however_large_its_error(name):
    x = 0.5 + jax.random.uniform(jax.random.key(0), (16,))
    fn = jamp.half_precision(CANCELLING[name])
    found = jamp.error_sources(lambda x: (fn(x) ** 2).mean(), x, policy="O2:bfloat16", gradient=False)
    assert found.value_error > 1e-3
    assert found.value_predicted == pytest.approx(found.value_error, rel=0.1)


def off(x):
    """Numbers beside zero whose errors are as large as they are."""
    return jamp.half_precision(lambda x: (10 * x + 100) - (10 * x[::-1] + 100))(x)


OF_ONE_NUMBER = {
    "root": lambda x: jnp.sqrt(jnp.abs(off(x)) + 1e-6),
    "logarithm": lambda x: jnp.log(jnp.abs(off(x)) + 1e-3),
    "inverse root": lambda x: jax.lax.rsqrt(off(x) ** 2 + 1e-2),
    "reciprocal": lambda x: 1 / (jnp.abs(off(x)) + 0.1),
    "power": lambda x: (jnp.abs(off(x)) + 0.1) ** -1.5,
    "angle": lambda x: jnp.sin(3 * off(x)),
    "steps": lambda x: jnp.round(8 * off(x)) * x,
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_functions_of_one_number_are_predicted_however_large_its_error(name):
    x = 0.5 + jax.random.uniform(jax.random.key(0), (64,))
    found = jamp.error_sources(lambda x: (OF_ONE_NUMBER[name](x) ** 2).mean(), x, policy="O2:bfloat16")
    assert found.gradient_error > 1e-3
    assert found.value_predicted == pytest.approx(found.value_error, rel=0.05)
    assert found.gradient_predicted == pytest.approx(found.gradient_error, rel=0.05)


def test_what_stays_in_float32_has_no_sources():
    found = jamp.error_sources(lambda x: jnp.sin(x).sum(), jnp.arange(4.0), policy="O1:bfloat16")
    assert (found.operations, found.value_error, found.gradient_error) == ((), 0, 0)


@pytest.mark.parametrize("directions", [0, -1, True, 1.5, "2"])
def test_directions_are_counted_from_one(directions):
    with pytest.raises(ValueError, match=r"`directions` is .*: expected how many .*Write directions=2"):
        jamp.error_sources(jnp.sum, jnp.ones(2), policy="O2:bfloat16", directions=directions)


def cancels(x):
    return (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2


def recurrence(x):
    return jax.lax.scan(lambda h, _: (h + 2**-9 * x, None), 1 + x, None, length=32)[0]


def by_while(x):
    return jax.lax.while_loop(lambda s: s[0] < 20, lambda s: (s[0] + 1, s[1] + 2**-9 * x), (0, 1 + x))[1]


CULPRITS = {
    "variance": lambda x: cancels(x + 10),
    "offset": lambda x: (x + 100) - 100,
    "exponential": lambda x: jnp.exp(6 * x) / 100,
    "angle": lambda x: jnp.sin(100 * x),
    "power": lambda x: (1 + x / 50) ** 60,
    "logarithm": lambda x: 100 * jnp.log(1 + x * 1e-2),
    "root": lambda x: 200 * (jnp.sqrt(1 + x * 1e-2) - 1),
    "pole": lambda x: 1 / (1.02 - jnp.tanh(x) ** 2),
    "centring": lambda x: (x + 50) - (x + 50).mean(-1, keepdims=True),
    "differences": lambda x: jnp.diff(jnp.cumsum(x + 10, -1), axis=-1, append=0.0),
    "recurrence": recurrence,
    "product": lambda x: (x + 30) @ (jnp.eye(16) - 1 / 16),
    "branch": lambda x: jax.lax.cond(x.sum() < 1e6, lambda x: (x + 100) - 100, lambda x: x, x),
    "checkpointed": jax.checkpoint(lambda x: (x + 100) - 100),
}


def planted(culprit, precision=jamp.half_precision):
    """A network in float32 and half, one of whose parts is all half and should not be."""

    def loss(params, x):
        with jax.named_scope("before"):
            x = x + jnp.tanh(x @ params[0]) @ params[1]
        with jax.named_scope("culprit"):
            x = precision(culprit)(x) + x * 0.1
        with jax.named_scope("after"):
            return ((x + jnp.tanh(x @ params[2]) @ params[3]) ** 2).mean()

    keys = jax.random.split(jax.random.key(len(culprit.__name__)), 5)
    params = [0.25 * jax.random.normal(key, (16, 16)) for key in keys[:4]]
    return loss, params, 0.5 * jax.random.normal(keys[4], (8, 16))


# Each takes seconds to compile.
BY_DAY = ("power", "differences", "recurrence", "branch")


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in CULPRITS]
)
def test_a_planted_culprit_is_among_the_first_three(name):
    found = jamp.error_sources(*planted(CULPRITS[name]), policy="O2:bfloat16")
    assert "culprit" in [op.scope for op in found.operations[:3]]


def binomial(x):
    return x**4 - 4 * x**3 + 6 * x**2 - 4 * x + 1


@pytest.mark.nightly  # A quarter of a minute.
def test_what_amplifies_errors_is_not_blamed_for_them():
    # It is (x - 1)**4, whose slope makes more of what is rounded before it than its own roundings amount to. To
    # compute it in float32 would not help.
    found = jamp.error_sources(*planted(binomial), policy="O2:bfloat16")
    assert {op.scope for op in found.operations[:2]} == {"before"}
    # What is around it stays half, as it is in the program that was asked about.
    between = lambda fn: jamp.half_precision(lambda x: 1 * jamp.full_precision(fn)(1 * x))  # noqa: E731
    in_float32 = jamp.error_sources(*planted(binomial, between), policy="O2:bfloat16")
    assert in_float32.gradient_error > 0.9 * found.gradient_error


def smooth(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w)
    return (x * x).mean()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16", "O3:bfloat16"])
def test_first_order_explains_what_is_measured(policy):
    keys = jax.random.split(jax.random.key(0), 5)
    params = [0.25 * jax.random.normal(key, (16, 16)) for key in keys[:4]]
    found = jamp.error_sources(smooth, params, jax.random.normal(keys[4], (8, 16)), policy=policy)
    assert found.gradient_predicted == pytest.approx(found.gradient_error, rel=0.1)


def test_iterations_add_up():
    found = jamp.error_sources(*planted(recurrence), policy="O2:bfloat16")
    (op,) = [op for op in found.operations if op.scope == "culprit" and op.operation == "add" and op.iterations]
    assert len(op.iterations) == 32
    assert any(op.iterations)
    assert "of 32" in str(found)


def test_the_worst_iteration_is_named(tmp_path):
    def steps(numbers):
        return jax.lax.scan(lambda c, y: (c + jamp.half_precision(lambda y: y + y)(y), None), 0.0, numbers)[0]

    numbers = jnp.ones(8).at[5].set(1 + 2**-8)  # Half precision holds all but one.
    found = jamp.error_sources(steps, numbers, policy="O2:bfloat16", gradient=False)
    assert "▁▁▁▁▁█▁▁ most in iteration 5 of 8" in str(found)
    found.plot(tmp_path / "loop.png")
    assert (tmp_path / "loop.png").stat().st_size > 10_000


@pytest.mark.nightly  # A quarter of a minute.
@pytest.mark.in_turns(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_is_entered(check_vma):
    def body(w, x):
        def layer(x, _):
            with jax.named_scope("culprit"):
                x = jamp.half_precision(lambda x: (x + 100) - 100)(x)
            with jax.named_scope("layer"):
                return x + jnp.tanh(x @ w), None

        return jax.lax.pmean((jax.lax.scan(layer, x, None, length=2)[0] ** 2).mean(), "d")

    def on_one_device(w, x):
        return jax.vmap(body, (None, 0), axis_name="d")(w, x.reshape(2, 4, 8)).mean()

    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check_vma)
    keys = jax.random.split(jax.random.key(0), 2)
    args = 0.25 * jax.random.normal(keys[0], (8, 8)), jax.random.normal(keys[1], (8, 8))
    found, same = (jamp.error_sources(f, *args, policy="O2:bfloat16") for f in (mapped, on_one_device))
    assert found.operations[0].scope == same.operations[0].scope == "culprit"
    assert len(found.operations[0].iterations) == 2
    for name in ("value", "gradient"):
        assert getattr(found.operations[0], name) == pytest.approx(getattr(same.operations[0], name), rel=0.05)
    assert found.gradient_error == pytest.approx(same.gradient_error, rel=0.05)


def test_a_while_inside_of_a_while_is_entered():
    @jax.custom_vjp
    def run(w, x):
        inner = lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(s[1])), (0, x))[1]

    run.defvjp(lambda w, x: (run(w, x), (w, x)), lambda res, g: (jnp.outer(res[1].sum(0), g.sum(0)), g))
    w, x = jax.random.normal(jax.random.key(0), (8, 8)) / 3, jnp.ones((4, 8))
    found = jamp.error_sources(lambda w, x: (run(w, x) ** 2).sum(), w, x, policy="O2:bfloat16")
    assert {"dot_general", "tanh"} <= {op.operation for op in found.operations}
    assert abs(found.value_predicted / found.value_error - 1) < 0.1


def test_a_while_is_entered():
    x = jnp.linspace(0.1, 1, 8)
    found = jamp.error_sources(jamp.half_precision(by_while), x, policy="O2:bfloat16")
    assert found.no_gradient
    assert max(len(op.iterations) for op in found.operations) == 20
    assert found.value_predicted == pytest.approx(found.value_error, rel=0.01)


def test_what_overflows_comes_first():
    def loss(x):
        with jax.named_scope("square"):
            y = jamp.half_precision(lambda x: x * x)(x)
        return jnp.log(y).sum()

    found = jamp.error_sources(loss, jnp.float32([300, 2]), policy="O2:float16")
    assert found.operations[0].scope == "square"
    assert found.value_error == found.operations[0].value_spread == float("inf")


def test_a_result_that_half_makes_nan_of_is_no_small_error():
    def log_determinant(x):
        gram = jamp.half_precision(lambda x: x @ x.T)(x) + 1e-3 * jnp.eye(6)
        return jnp.log(jnp.diagonal(jnp.linalg.cholesky(gram))).sum()

    x = 3 + 0.1 * jax.random.normal(jax.random.key(0), (6, 8))
    assert jnp.isnan(jamp.cast_fn(log_determinant, "O2:bfloat16")(x)) and jnp.isfinite(log_determinant(x))
    found = jamp.error_sources(log_determinant, x, policy="O2:bfloat16")
    assert found.value_error == float("inf")
    assert found.operations[0].operation == "dot_general"


@pytest.mark.parametrize("x", [-jnp.ones(3), jnp.full(3, jnp.nan)])
def test_what_is_nan_in_float32_has_no_error(x):
    found = jamp.error_sources(lambda x: jnp.log(x).sum(), x, policy="O2:bfloat16")
    assert np.isnan(found.value_error)
    assert "jamp.first_nonfinite" in str(found)


def test_a_result_that_overflows_does_not_make_the_gradient_wrong():
    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w).sum()

    args = 1000 * jnp.ones((4, 4)), 1000 * jnp.ones((3, 4))
    found = jamp.error_sources(product, *args, policy="O3:float16")
    assert (found.value_error, found.gradient_error) == (np.inf, 0.0)


def test_an_iteration_that_overflows_is_the_worst():
    def steps(x):
        more = jamp.half_precision(lambda c: 2.1 * c)
        return jax.lax.scan(lambda c, _: (more(c), None), x, None, length=4)[0].sum()

    found = jamp.error_sources(steps, jnp.float32([1e4, 1e3]), policy="O2:float16", gradient=False)
    assert "▁▁██ most in iteration 2 of 4" in str(found)


def test_masks_that_half_decides_otherwise():
    x = jnp.float32([1 + 2**-10, 3])

    def loss(x):
        y = jamp.half_precision(lambda x: x * 1.0)(x)
        return jnp.where(y > 1, 5 * x, x).sum()

    found = jamp.error_sources(loss, x, policy="O3:bfloat16")
    assert found.operations[0].line.endswith(f"{loss.__code__.co_firstlineno + 1}")  # It is due to that rounding.
    assert found.value_predicted == pytest.approx(found.value_error, rel=1e-3)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "rectified", [jax.nn.relu, lambda h: -jnp.minimum(-h, 0.1 * h), lambda h: jnp.where(h > 0, h, 0)]
)
def test_masks_of_layers_are_exact(rectified):
    ws, x = jax.random.normal(jax.random.key(0), (4, 32, 32)) / 4, jax.random.normal(jax.random.key(1), (32, 32))

    def loss(ws, x):
        for w in ws:
            x = rectified(x @ w)
        return (x * x).mean()

    found = jamp.error_sources(loss, ws, x, policy="O2:bfloat16")
    assert found.value_predicted == pytest.approx(found.value_error, rel=2e-3)
    assert found.gradient_predicted == pytest.approx(found.gradient_error, rel=2e-3)
    assert found.operations[0].operation == "dot_general"


def neighbour(d, x):
    return x[jnp.argmin(jnp.abs(d[:, None] - 110 - jnp.arange(-1, 1, 0.03)), -1)]


DECISIONS = {
    "comparison": lambda d, x: jnp.where(d < 110.4, x, 0),
    "branch of several": lambda d, x: jnp.where((d < 110.4) & ~(d > 109.7), x, 0),
    "index": lambda d, x: x[((d - 109) * 30).astype(int)],
    "argmin": neighbour,
    "top_k": lambda d, x: x[jax.lax.top_k(d, 5)[1]],
    "in a loop": lambda d, x: jax.lax.scan(lambda c, y: (c + jnp.where(y[0] < 110.4, y[1], 0), None), 0.0, (d, x))[0],
    "number": lambda d, x: (d < 110.4).astype(jnp.float32) * x,
    "one-hot": lambda d, x: jax.nn.one_hot(jnp.round(d).astype(int) % 4, 4) @ jnp.arange(4.0) * x,
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", DECISIONS)
def test_what_decides_otherwise_is_due_to_what_it_is_made_of(name):
    def loss(x):
        with jax.named_scope("far"):
            d = x + 100
        return (DECISIONS[name](d, x) ** 2).sum()

    policy = jamp.get_policy("O2:bfloat16").with_rules(half=["far/*"])
    found = jamp.error_sources(loss, 10 + jnp.sin(jnp.arange(64.0)), policy=policy)
    assert found.value_error > 1e-3
    assert found.operations[0].scope == "far"
    assert found.operations[0].share > 0.5
    assert found.value_predicted == pytest.approx(found.value_error, rel=0.05)


def test_errors_go_on_where_the_gradient_is_stopped():
    """`h + stop_gradient(r - h)` is `r`, whatever the error of `h` is; and a target moves the loss."""

    def loss(w, x):
        h = 3 * x @ w
        quantized = h + jax.lax.stop_gradient(jnp.floor(h) - h)
        target = jax.lax.stop_gradient(jnp.tanh(x @ w)) * 8
        return ((quantized - target) ** 2).mean() + (h * target).mean()

    x, w = jax.random.normal(jax.random.key(0), (16, 8)), jax.random.normal(jax.random.key(1), (8, 16))
    found = jamp.error_sources(loss, w, x, policy="O3:bfloat16")
    assert found.value_predicted == pytest.approx(found.value_error, rel=0.05)
    assert found.gradient_predicted == pytest.approx(found.gradient_error, rel=0.05)


@pytest.mark.parametrize(
    ("operation", "decide"),
    [
        ("select_and_scatter_add", lambda h: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (4, 1), (4, 1), "VALID")),
        ("sort", lambda h: jax.lax.sort((h[:, 0], h[:, 1]), num_keys=1)[1] * jnp.linspace(-1, 1, len(h))),
    ],
)
def test_floats_that_half_orders_otherwise(operation, decide):
    x, w = jax.random.normal(jax.random.key(0), (256, 16)), jax.random.normal(jax.random.key(1), (16, 16)) / 4
    found = jamp.error_sources(jamp.cast_fn(lambda w: jnp.sum(jnp.tanh(decide(x @ w)) ** 2), "O2:bfloat16"), w)
    assert 0.8 < found.gradient_predicted / found.gradient_error < 1.2
    assert any(op.operation == operation for op in found.operations[:3])


def norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + 1e-5)


def layers(x, w):
    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            return x + jnp.tanh(norm(x) @ w)

    with jax.named_scope("model"):
        return (block(block(x)) ** 2).mean()


def looped(x, w):
    def step(h, _):
        h = 0.9 * h
        with jax.named_scope("inner"):
            return h + 0.1 * jnp.tanh(h @ w), h.sum()

    h, sums = jax.lax.scan(step, x, None, length=3)
    return (h**2).mean() + sums.mean()


def marked(x, w):
    with jax.named_scope("before"):
        x = x @ w
    with jax.named_scope("culprit"):
        x = jamp.half_precision(CULPRITS["offset"])(x)
    return (x**2).mean()


def inner(x, w):
    x = jamp.cast_fn(lambda x: jnp.exp(x @ w), "O3:bfloat16")(x)
    with jax.named_scope("outer"):
        return (x @ w).mean()


def explicit(x, w):
    with jax.named_scope("own"):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).mean()


O2 = jamp.get_policy("O2:bfloat16")
WITHOUT_A_RULE = {
    marked: (O2, "jamp.half_precision"),
    inner: (O2, "policy of the `cast_fn` inside, O3:bfloat16"),
    explicit: (O2, "program itself asks for half"),
}


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (layers, O2),
        pytest.param(looped, "O3:bfloat16", marks=pytest.mark.nightly),
        (marked, O2.with_rules(half=["before/*"])),
        (inner, O2),
    ],
)
def test_the_entry_of_each_row_takes_it_out(fn, policy):
    keys = jax.random.split(jax.random.key(0), 2)
    args = jax.random.normal(keys[0], (4, 8)), jax.random.normal(keys[1], (8, 8))
    found = jamp.error_sources(fn, *args, policy=policy, directions=1)
    entries = dict.fromkeys(op.entry for op in found.operations if op.entry and op.share > 1e-3)
    assert entries
    for entry in [*entries][:3]:
        after = jamp.error_sources(fn, *args, policy=found.policy.with_rules(full=[entry]), directions=1)
        left = {_row(op): _size(op) for op in after.operations}
        rows = [op for op in found.operations if op.entry == entry and op.share > 1e-3]
        assert all(left.get(_row(op), 0) < 0.9 * _size(op) for op in rows)


def _row(op):
    return op.scope, op.line, op.operation, op.dtype


def _size(op):
    return op.value_spread + op.gradient_spread


@pytest.mark.parametrize("fn", WITHOUT_A_RULE)
def test_where_no_rule_works_it_says_what_does(fn):
    policy, words = WITHOUT_A_RULE[fn]
    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    found = jamp.error_sources(fn, x, x + 0.1, policy=policy, directions=1)
    dearest = found.operations[0]
    assert dearest.entry == "" and words in dearest.instead and words in str(found)


def test_a_cast_fn_inside_has_rules_of_its_own():
    def loss(policy, x):
        return (jamp.cast_fn(lambda x: jnp.exp(x @ x), policy)(x) ** 2).mean()

    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    policy = jamp.get_policy("O3:bfloat16")
    found = jamp.error_sources(lambda x: loss(policy, x), x)
    entry = found.operations[0].entry
    assert f"policy of the cast_fn inside.with_rules(full=['{entry}'])" in str(found)
    after = jamp.error_sources(lambda x: loss(policy.with_rules(full=[entry]), x), x)
    assert after.gradient_error < 0.5 * found.gradient_error


def test_its_dictionary_is_for_json():
    loss, params, x = planted(CULPRITS["offset"])
    found = jamp.error_sources(loss, params, x, policy="O3:bfloat16")
    json.dumps(found.to_dict())
    assert "culprit" in str(found)


def test_operations_are_those_of_the_function():
    """A cast in front of what hands a value on, or at the border of the function, is that of what reads it."""

    def loss(w, x):
        return (jax.nn.gelu(jnp.tanh(x @ w) @ w) ** 2).mean()

    w, x = (jnp.sin(jnp.arange(16.0)).reshape(4, 4) / n for n in (2, 3))
    for policy in ("O3:bfloat16", "half"):
        found = jamp.error_sources(loss, w, x, policy=policy)
        names = {op.operation for op in found.operations}
        assert "jamp_keep" not in names and "dot_general" in names
        assert all(op.line != "?" for op in found.operations if op.share)
    product = jamp.error_sources(lambda x: (x @ x).sum(), w, policy="O2:bfloat16").operations[0]
    assert product.rule == "half, float32 out"


def test_what_moves_nothing_is_only_counted():
    found = jamp.error_sources(lambda x: (x @ x).sum() + 0 * (x @ x.T).sum(), jnp.eye(4) * 1.001, policy="O3:bfloat16")
    still = sum(not op.share for op in found.operations)
    assert still and f"not shown: {still} operations that round, and move neither" in str(found)
    assert not any(line.startswith("   0.0 %         0         0") for line in str(found).splitlines())


def test_policies_without_a_level_take_no_rules():
    x = jnp.sin(jnp.arange(16.0)).reshape(4, 4)
    found = jamp.error_sources(lambda x: jnp.tanh(x @ x).sum(), x, policy="half")
    assert "a policy with a level, such as 'O2'" in str(found) and "takes no rules" in str(found)
    found = jamp.error_sources(lambda x: jnp.tanh(x @ x).sum(), x, policy="p=f32,c=f32,o=bf16")
    assert "arguments and results: results in float32, by policy.with_output_dtype('float32')" in str(found)


def test_a_function_without_floating_results():
    with pytest.raises(TypeError, match="floating results"):
        jamp.error_sources(lambda x: x > 0, jnp.ones(2))


def test_an_index_into_flags_is_put_down_to_what_was_compared():
    """As an adaptive solver takes the last step that was accepted."""

    def fn(x, w):
        h = x @ w
        with jax.named_scope("culprit"):
            below = h + 100 < 100  # Rounded away in half.
        first = jnp.argmax(below, axis=-1)
        return jnp.take_along_axis(jnp.arange(16.0) + x, first[:, None], -1).sum()

    x, w = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    found = jamp.error_sources(fn, x, w, policy="O3:bfloat16")
    assert found.value_error != 0
    assert "culprit" in [op.scope for op in found.operations[:3]]


@pytest.mark.parametrize("ran_as", ["{}/scripts/train.py", "{}/scripts/../scripts/train.py"])
def test_an_entry_for_a_line_is_the_same_in_another_checkout(ran_as, tmp_path, monkeypatch):
    def model_of(checkout):
        space = {"jnp": jnp}
        code = "def model(w, x):\n    return jnp.tanh(x @ w).sum()\n"
        exec(compile(code, ran_as.format(tmp_path / checkout), "exec"), space)
        return space["model"]

    args = jnp.sin(jnp.arange(64.0)).reshape(8, 8), jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    monkeypatch.syspath_prepend(tmp_path / "one" / "scripts")
    found = jamp.error_sources(model_of("one"), *args, policy="O2:bfloat16")
    assert found.operations[0].entry == "train.py:2"
    policy = jamp.get_policy("O2:bfloat16").with_rules(full=[found.operations[0].entry])
    operations = jamp.report(model_of("two"), *args, policy=policy).operations
    assert {op.inputs[0] for op in operations if op.primitive == "dot_general"} == {"float32"}
