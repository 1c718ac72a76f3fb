"""Verdicts on policies, and policies that keep a tolerance."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.inspect._error_sources import row_of, sources_of
from jamp.inspect._target import resolve
from jamp.inspect.roundings.narrowing import Narrowing
from tests.inspect.programs import raises_in_reverse


def loss(x):
    with jax.named_scope("variance"):
        spread = (x * x).mean() - x.mean() ** 2
    return jnp.tanh(x).mean() + spread


X = 10 + jnp.sin(jnp.arange(64.0))


@pytest.mark.nightly
def test_tune_reaches_its_tolerance():
    policy = jamp.tune(loss, X, policy="O3:bfloat16", tolerance=1e-2)
    assert policy.full == ("variance/*",)
    assert jamp.get_policy(str(policy)) == policy
    assert jamp.verify(loss, X, policy=policy, tolerance=1e-2)
    assert not jamp.verify(loss, X, policy="O3:bfloat16", tolerance=1e-2)


def test_without_a_derivative_results_alone_are_looked_at():
    fn, args = raises_in_reverse(RuntimeError("no way back")), (jnp.eye(4), jnp.linspace(0.0, 1.0, 12).reshape(3, 4))
    why = "the derivative could not be traced: no way back"
    found = jamp.verify(fn, *args, policy="O2:bfloat16")
    assert found.ok and found.gradient is None and found.no_gradient == why and why in str(found)
    assert jamp.error_sources(fn, *args, policy="O2:bfloat16").no_gradient == why
    assert not jamp.tune(fn, *args, policy="O2:bfloat16", tolerance=1e-1).full


def test_tune_finds_what_decides_about_a_mask():
    def model(x):
        with jax.named_scope("mask"):
            mask = x + 100 > 109.9
        with jax.named_scope("rest"):
            return jnp.where(mask, 5 * x, x).sum()

    policy = jamp.tune(model, X, policy="O3:bfloat16", tolerance=1e-2)
    assert policy.full == ("mask/*",)


def test_tune_adds_nothing_where_nothing_is_needed():
    policy = jamp.get_policy("O2:bfloat16")
    assert jamp.tune(lambda x: (x @ x).mean(), jnp.eye(4), policy=policy, tolerance=1e-2) == policy


def test_what_tune_cannot_do():
    with pytest.raises(ValueError, match="adds rules to a level"):
        jamp.tune(jamp.cast_fn(loss, "half"), X, tolerance=0.1)
    with pytest.raises(ValueError, match="tolerance"):
        jamp.tune(loss, X, tolerance=0.0)


@pytest.mark.nightly  # It compiles a program for each operation.
def test_roundings_that_xla_may_leave_out_count():
    def model(w, x):
        with jax.named_scope("offset"):
            shifted = x @ w + 100  # Of what is added up in half, XLA on a CPU leaves out the rounding.
        return jnp.log(jax.nn.softplus(shifted - 100)).mean()

    w, x = jnp.sin(jnp.arange(64.0)).reshape(8, 8), jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    policy = jamp.get_policy("O2:bfloat16").with_rules(half=["offset/*"])
    error = jamp.error_sources(model, w, x, policy=policy).gradient_error
    found = jamp.verify(model, w, x, policy=policy, tolerance=1e-2)
    assert found.gradient[0] == pytest.approx(error, rel=1e-3) and not found.ok
    assert len(jamp.tune(model, w, x, policy=policy, tolerance=1e-2).full) == 1


def test_roundings_that_xla_leaves_out_in_one_place_alone_count_too(monkeypatch):
    """Hand-written code finds its own maximum in float32 if all roundings are made, and on a CPU nowhere."""

    def hand_written(x):
        h = (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T).astype(jnp.float32)
        most = (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T).max(1, keepdims=True)
        return jnp.where(h == most.astype(jnp.float32), x.sum(), 0.0).sum()

    x = jnp.sin(jnp.arange(64.0) ** 2).reshape(8, 8) + jnp.eye(8)
    found = jamp.verify(hand_written, x, policy="O0")
    assert not found.ok and found.skips_roundings and "xla_allow_excess_precision=false" in str(found)
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_allow_excess_precision=false"
    )  # Were it given, nothing else would be compiled.
    found = jamp.verify(hand_written, x, policy="O0", tolerance=0.1)
    assert found.ok and not found.skips_roundings


def test_a_loss_scale_at_which_gradients_overflow_comes_down():
    def model(x):
        return (1000 * x).sum()

    x = jnp.linspace(0.1, 0.9, 8)
    assert jamp.error_sources(model, x, policy="O3:float16").gradient_error < 1e-3
    assert jamp.verify(model, x, policy="O3:float16", tolerance=1e-3)
    assert str(jamp.tune(model, x, policy="O3:float16", tolerance=1e-3)) == "O3:float16"
    assert not jamp.verify(lambda x: (1e5 * x).sum(), x, policy="O3:float16", tolerance=1e-3)


def test_nan_is_named():
    found = jamp.verify(jamp.half_precision(lambda x: x * x), jnp.float32([300.0]), policy="O2:float16")
    assert not found.ok
    assert found.nonfinite.operation == "mul"
    assert "NaN or infinite" in str(found)


def test_indices_that_differ_are_counted():
    x = jnp.float32([1, 1 + 2**-10, 0])
    found = jamp.verify(jamp.half_precision(lambda x: (x.sum(), jnp.argmax(x * 1.0))), x, policy="O3:bfloat16")
    assert [(d.operation, d.differing, d.size) for d in found.decisions] == [("argmax", 1, 1)]


def test_the_error_of_one_number_is_an_accident():
    """Rounding the inputs moves this loss by a fifth of what the policy does, and its gradient by half of it."""
    x = jax.random.normal(jax.random.key(0), (32, 16))
    w, out = (jax.random.normal(jax.random.key(4), shape) / 4 for shape in ((16, 32), (32, 4)))

    def loss(params, x):
        h = x @ params["w"] + params["b"]  # The gradient of `b` is zero: the mean is subtracted.
        h = jax.nn.gelu((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) @ params["out"]
        return -jax.nn.log_softmax(h)[jnp.arange(32), jnp.argmax(x[:, :4], -1)].mean()

    found = jamp.verify(loss, {"w": w, "b": jnp.zeros(32), "out": out}, x, policy="O2:float16")
    assert found and found.value[0] > 4 * found.value[1]
    (bias,) = [leaf for leaf in found.leaves if "['b']" in leaf.path]
    assert bias.is_rounding and bias.error > 1 and "['b']" not in str(found)


def test_a_number_that_half_keeps_badly_is_no_accident():
    found = jamp.verify(jamp.half_precision(lambda x: (x * x).mean() - x.mean() ** 2), X, policy="O2:bfloat16")
    assert not found


def test_keys_are_drawn_anew():
    def noisy(x, key):
        return (x * jax.random.normal(key, x.shape)).sum()

    found = jamp.verify(noisy, X, jax.random.key(0), policy="O2:bfloat16", draws=4)
    assert found.draws == 4 and found.ok
    alone = jamp.verify(noisy, X, jax.random.key(0), policy="O2:bfloat16", draws=1)
    assert alone.value != found.value and alone.draws == 1
    assert jamp.verify(lambda x: x.sum(), X, policy="O2:bfloat16").draws == 1  # Nothing to draw.
    many = jamp.verify(lambda keys, x: jax.vmap(noisy, (None, 0))(x, keys), jax.random.split(jax.random.key(1), 2), X)
    assert many.draws == 3
    with pytest.raises(ValueError, match="`draws` is 0"):
        jamp.verify(noisy, X, jax.random.key(0), draws=0)


def test_branches_that_went_the_other_way_are_counted():
    def branch(x):  # 1 + 2^-9 is 1 in bfloat16.
        def step(c, v):
            return jax.lax.cond(v > 1, lambda: c + v, lambda: c - v), None

        return jax.lax.scan(step, jnp.float32(0), x)[0]

    found = jamp.verify(branch, jnp.float32([1 + 2**-9, 2, 1 + 2**-9]), policy="O3:bfloat16")
    (cond,) = [d for d in found.decisions if d.operation == "cond"]
    assert 3 * cond.differing == 2 * cond.size  # Its derivative branches too.
    assert "cond" in str(found) and "test_verify_and_tune.py" in cond.line


def test_tune_goes_the_other_way_too(capsys):
    def model(x):
        with jax.named_scope("smooth"):
            y = jnp.exp(-x)
        with jax.named_scope("variance"):
            return y.sum() + (x * x).mean() - x.mean() ** 2

    policy = jamp.tune(model, X, policy="O1:bfloat16", tolerance=5e-3, also_half=True, progress=True)
    assert policy.half == ("smooth/*",)  # The variance cancels: 2.8e-2.
    assert jamp.verify(model, X, policy=policy, tolerance=5e-3)
    assert jamp.tune(model, X, policy="O1:bfloat16", tolerance=5e-3) == jamp.get_policy("O1:bfloat16")
    assert capsys.readouterr().err.startswith("jamp.tune [####################] 0 rules")


def test_of_a_loop_that_loses_what_it_adds_up_its_own_line_is_found():
    x, w = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (16, 16)) / 4

    def add(h):
        with jax.named_scope("sum"):
            return jax.lax.scan(lambda c, _: (c + 0.01 * jnp.tanh(h), None), h, length=64)[0]

    def loss(w):
        return jnp.mean(jnp.tanh(add(jnp.tanh(x @ w)) @ w) ** 2)

    policy = jamp.get_policy("O2:bfloat16").with_rules(half=["*sum*"])
    found = jamp.tune(loss, w, policy=policy, tolerance=0.02)
    assert found.full == (f"tests/inspect/test_verify_and_tune.py:{add.__code__.co_firstlineno + 2}",)
    assert jamp.report(loss, w, policy=found).forward.share == 1


def sharp(product):
    """A loss whose scores are sharp: half precision is not enough for that one product of five."""

    def loss(ws, x, bank):
        h = x
        for w in ws:
            h = jnp.tanh(product(h, w))
        scores = product(x, 4 * bank.T)
        return -jnp.diagonal(jax.nn.log_softmax(scores)).mean() + (h * h).mean()

    return loss, loss.__code__.co_firstlineno + 4


def sharp_arguments():
    ws, x = jax.random.normal(jax.random.key(0), (4, 16, 16)) / 4, jax.random.normal(jax.random.key(1), (24, 16))
    return ws, x, x + jax.random.normal(jax.random.key(2), (24, 16))


def product(x, w):
    return x @ w


@pytest.mark.nightly
def test_tune_takes_out_one_call_of_a_helper():
    loss, line = sharp(product)
    found = jamp.tune(loss, *sharp_arguments(), policy="O2:bfloat16", tolerance=0.01)
    helper = f"tests/inspect/test_verify_and_tune.py:{product.__code__.co_firstlineno + 1}"
    assert found.full == (f"{helper} from tests/inspect/test_verify_and_tune.py:{line}",)
    assert jamp.get_policy(str(found)) == found
    assert jamp.verify(loss, *sharp_arguments(), policy=found, tolerance=0.01)


@pytest.mark.nightly
def test_tune_takes_out_one_call_of_a_jitted_function():
    loss, line = sharp(jax.jit(product))
    found = jamp.tune(loss, *sharp_arguments(), policy="O2:bfloat16", tolerance=0.01)
    assert found.full == (f"tests/inspect/test_verify_and_tune.py:{line}",)


@pytest.mark.nightly
def test_tune_takes_a_line_out_of_a_scope_that_holds_much_more():
    loss, line = sharp(jnp.matmul)

    def model(*args):
        with jax.named_scope("model"):
            return loss(*args)

    found = jamp.tune(model, *sharp_arguments(), policy="O2:bfloat16", tolerance=0.01)
    assert found.full == (f"tests/inspect/test_verify_and_tune.py:{line}",)
    share = jamp.report(model, *sharp_arguments(), policy=found).forward.share
    assert share == pytest.approx(4 * 16 / (4 * 16 + 24))


@pytest.mark.nightly
def test_tune_leaves_the_product_of_a_line_in_half():
    def model(ws, x):
        h = x
        for w in ws:
            h = h + 0.02 * jnp.tanh(h @ w)  # Small beside what it is added to, which forgets it in half.
        return jnp.mean((h - x) * jnp.cos(x))

    ws, x = jax.random.normal(jax.random.key(0), (6, 16, 16)) / 4, 4 + jax.random.normal(jax.random.key(1), (24, 16))
    found = jamp.tune(model, ws, x, policy="O3:bfloat16", tolerance=0.02)
    line = f"tests/inspect/test_verify_and_tune.py:{model.__code__.co_firstlineno + 3}"
    assert f"add at {line}" in found.full and line not in found.full
    assert jamp.report(model, ws, x, policy=found).forward.share == 1
    assert jamp.verify(model, ws, x, policy=found, tolerance=0.02)


def narrowing_of(model, *args):
    sources, found = sources_of(resolve("tune", model, args, {}, "O3:bfloat16"))
    return sources, Narrowing(found, {row_of(op): op.entry for op in sources.operations})


def test_a_loop_is_narrowed_to_what_is_in_it():
    def model(w, x):
        def step(h, _):
            f = jax.lax.cond(h[0, 0] > 0, lambda h: jnp.tanh(h @ w), lambda h: h * h, h)
            return h + 0.01 * f, None

        return jax.lax.scan(step, x, length=4)[0].sum()

    sources, narrowing = narrowing_of(model, *jax.random.normal(jax.random.key(0), (2, 8, 8)))
    first = model.__code__.co_firstlineno
    branches, add, loop = (f"tests/inspect/test_verify_and_tune.py:{first + n}" for n in (2, 3, 5))
    assert add in {op.entry for op in sources.operations}  # The loop has an entry for its carry.
    assert {branches, add} <= {*narrowing.of(loop, 1)}
    assert {f"dot_general at {branches}", f"tanh at {branches}", add} <= {*narrowing.of(loop, 2)}


def test_a_scope_is_narrowed_to_what_it_was_found_for_first():
    def model(w, x):
        with jax.named_scope("head"):
            with jax.named_scope("dense"):
                h = x @ (4 * w)
            return jnp.mean(h * jnp.cos(x))

    w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    sources, narrowing = narrowing_of(model, w, x)
    of_head = {op.line for op in sources.operations if op.entry == "head/*"}
    lines = narrowing.of("head/*", 1)
    assert set(lines[: len(of_head)]) == of_head and len(lines) > len(of_head)
    assert sources.operations[0].line not in of_head


@pytest.mark.parametrize("wrong", [-1, 0, float("nan"), float("inf"), "a", True, jnp.ones(2)])
def test_a_tolerance_is_a_positive_number(wrong):
    for ask in (jamp.verify, jamp.tune):
        with pytest.raises(ValueError, match=r"`tolerance` is .*: expected a relative error"):
            ask(loss, X, policy="O2:bfloat16", tolerance=wrong)


def test_of_what_is_nan_in_float32_too_the_verdict_is_bad():
    found = jamp.verify(lambda x: jnp.log(x).sum(), -X, policy="O2:bfloat16")
    assert not found and not found.comparable and not found.sources
    assert "NaN or infinite in float32 too" in str(found)


SOME = jnp.arange(8.0)  # Of the first, the logarithm and the derivative of the root are infinite.


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.log(x - 1),
        lambda x: (jnp.sqrt(x) * jnp.sign(x)).sum(),
        lambda x: (jnp.tanh(x), jnp.log(x).sum() * 0),
        lambda x: jnp.sqrt(x).sum(),
    ],
    ids=["a NaN", "a NaN in the gradient", "a NaN beside", "an infinity in the gradient"],
)
def test_of_what_is_nan_in_part_in_float32_the_verdict_is_bad_too(fn):
    found = jamp.verify(fn, SOME, policy="O2:bfloat16")
    assert not found and not found.comparable and found.nonfinite is None
    assert "NaN or infinite in float32 too" in str(found)
    with pytest.raises(ValueError, match="NaN or infinite in float32 too"):
        jamp.tune(fn, SOME, policy="O2:bfloat16", tolerance=0.1)


def test_a_mask_that_becomes_nan_is_not_finite():
    def fn(x):
        shift = jamp.half_precision(lambda x: x * 300 * 300)(x) / 9e4
        return jnp.where(jnp.arange(64) < 60, jnp.tanh(x), -jnp.inf) + jnp.where(jnp.arange(64) < 60, 0.0, shift)

    found = jamp.verify(fn, 1 + jnp.arange(64.0) / 64, policy="O2:float16")
    assert found.comparable and not found.ok and found.leaves[0].nonfinite == 4
    assert found.nonfinite is not None


def test_a_mask_of_infinities_in_the_results_is_none():
    found = jamp.verify(lambda x: jnp.where(jnp.arange(64) < 60, jnp.tanh(x), -jnp.inf), X, policy="O2:bfloat16")
    assert found and found.comparable


@pytest.mark.parametrize("ask", [jamp.verify, jamp.error_sources, lambda *a, **k: jamp.tune(*a, tolerance=1e-3, **k)])
def test_half_of_a_float64_program_is_no_half_precision(ask):
    """What these evaluate is float32, which such a policy has for half."""
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"jamp\.compare"):
        ask(loss, jnp.float64(X), policy="O2:float32,p=float64,o=float64")


@pytest.mark.parametrize("policy", ["O0", "float32"])
def test_policies_without_half_are_refused(policy):
    for compare in (jamp.verify, jamp.error_sources, partial(jamp.tune, tolerance=0.1)):
        with pytest.raises(ValueError, match=r"at which all of this function is float32: .*policy='O2'"):
            compare(lambda x: (x @ x.T).sum(), X, policy=policy)
    with pytest.raises(ValueError, match="got 'O0'"):
        jamp.verify(lambda x: jamp.cast_fn(lambda x: (x @ x.T).sum(), "O0")(x), X)


def test_programs_with_half_of_their_own_are_compared_at_policies_without():
    found = jamp.verify(lambda x: jnp.sin(x.astype(jnp.bfloat16)).sum(), X, policy="O0")
    assert found.value[0] > 0


@pytest.mark.parametrize("of_no_number", [jnp.log, lambda x: jnp.inf * x])
def test_what_is_not_finite_in_float32_has_no_error(of_no_number):
    found = jamp.verify(lambda x: (of_no_number(-jnp.abs(X) - x**2), x * 1.5), X, policy="O2:bfloat16")
    leaf = next(leaf for leaf in found.leaves if leaf.path == "[0]")
    assert np.isnan(leaf.error) and np.isnan(leaf.unavoidable)
    assert not found.ok and "[0]: nan, inputs alone nan" in str(found)
    assert np.isnan(jamp.verify(lambda x: of_no_number(-jnp.abs(x)).sum(), X, policy="O2:bfloat16").value[0])


def test_what_is_nan_in_float32_is_not_tuned():
    with pytest.raises(ValueError, match="NaN or infinite in float32 too"):
        jamp.tune(lambda x: jnp.log(x).sum(), -jnp.ones(3), policy="O2:bfloat16", tolerance=1e-2)


def test_a_result_without_elements_is_compared():
    verdict = jamp.verify(lambda w, x: (x @ w, x[:0]), jnp.eye(4), jnp.ones((4, 4)), policy="O2:bfloat16")
    assert verdict.ok and verdict.comparable


def test_what_no_rule_takes_out_is_named():
    x = 1 + jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    with pytest.raises(ValueError, match="half_precision"):
        jamp.tune(lambda x: jamp.half_precision(jnp.exp)(x).sum(), x, policy="O2:bfloat16", tolerance=1e-6)


_KEYS = jax.random.split(jax.random.key(3))
_W, _X = jax.random.normal(_KEYS[0], (32, 32)) / 5, jax.random.normal(_KEYS[1], (16, 32))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: (x @ _W).sum(), (_X,)),
        (lambda w: (_X @ w).mean(), (_W,)),
        (partial(jnp.matmul, _X), (_W,)),
        (lambda x: jax.jit(lambda x: jnp.tanh(x @ _W.T))(x).sum(), (_X,)),
        (lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ _W), None), x, None, 1)[0].sum(), (_X,)),
        (lambda w, x: jnp.tanh(x @ w).sum(), (_W.astype(jnp.bfloat16), _X.astype(jnp.bfloat16))),
    ],
)
def test_weights_that_a_function_closes_over_are_weights(fn, args):
    """What half costs them, and what gradients of half arguments lose by their dtype, no policy avoids."""
    verdict = jamp.verify(fn, *args, policy="O2:bfloat16")
    assert verdict.ok and 0 < verdict.gradient[1] < 0.05


def test_what_rounds_beside_a_closed_over_weight_is_found():
    def fn(x):
        return (x @ _W).sum() + jamp.half_precision(lambda x: (x * x).mean() - x.mean() ** 2)(x + 10)

    assert not jamp.verify(fn, _X, policy="O2:bfloat16", tolerance=None).ok


def test_verdicts_and_comparisons_are_ready_for_json():
    fn = jamp.cast_fn(lambda x: jnp.sin(x @ x).sum(), "O2:bfloat16")
    verdict = jamp.verify(fn, _X[:, :16], policy="O2:bfloat16")
    loaded = json.loads(json.dumps(verdict.to_dict()))
    assert loaded["ok"] == verdict.ok and loaded["policy"] == "O2:bfloat16"
    assert loaded["leaves"][0]["error"] == verdict.leaves[0].error
    compared = jamp.compare(fn, _X[:, :16], policy="O2:bfloat16")
    loaded = json.loads(json.dumps(compared.to_dict()))
    assert loaded["reference"] == "O0" and loaded["differences"][0]["dtype"] == "float32"
