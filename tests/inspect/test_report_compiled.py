"""What `report` says beyond precision: the float32 baseline, what XLA makes of the step, and pictures."""

import json

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp.inspect._compiled import may_skip_roundings, multiplied_otherwise
from jamp.inspect._flops import matmuls
from jamp.inspect._report_pictures import _boxes

W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)


def loss(w, x):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return (h @ w).sum()


def test_residuals_of_the_same_function_in_float32():
    found = jamp.report(loss, W, X, policy="O2:bfloat16")
    assert found.residuals_in_float32 == 2 * 4 * 256 * 64  # The tanh and its derivative; x and w are arguments.
    assert sum(found.residual_bytes.values()) < found.residuals_in_float32
    assert "; in float32 131 kB" in str(found)
    inside = jamp.report(lambda w, x: jamp.cast_fn(loss, "O2:bfloat16")(w, x), W, X)
    assert inside.residuals_in_float32 == found.residuals_in_float32
    assert jamp.report(loss, W, X, policy="O0").residuals_in_float32 == found.residuals_in_float32


def test_the_compiled_step():
    found = jamp.report(loss, W, X, policy="O2:bfloat16", compiled=True)
    arrays = 4 * (2 * 64 * 64 + 2 * 256 * 64)  # Arguments and gradients.
    for compiled in (found.compiled, found.compiled_in_float32):
        held = compiled.peak - compiled.temporary
        assert arrays <= held < arrays + 200 and compiled.traffic >= arrays  # And the table of the results.
    assert "compiled, peak memory" in str(found) and "xla_allow_excess_precision" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["compiled"]["peak"] == found.compiled.peak
    assert jamp.report(loss, W, X).compiled is None and "compiled, peak" not in str(jamp.report(loss, W, X))


def test_what_has_no_gradient_is_compiled_too():
    found = jamp.report(lambda i: i * 2, jnp.arange(4), compiled=True)
    assert found.compiled.peak >= 32 and found.gradient is None


@pytest.mark.parametrize(
    ("flags", "skips"),
    [("", True), ("--xla_allow_excess_precision=false", False), ("--xla_allow_excess_precision=true", True),
     ("--xla_allow_excess_precision --other=1", True)],
)  # fmt: skip
def test_whether_roundings_may_be_left_out(monkeypatch, flags, skips):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert may_skip_roundings() == skips


class Device:
    def __init__(self, platform, capability=None):
        self.platform = platform
        if capability:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        (Device("cpu"), None, None),
        (Device("tpu"), None, "bfloat16"),
        (Device("tpu"), "high", None),
        (Device("gpu", "7.0"), None, None),
        (Device("gpu", "8.0"), None, "TF32"),
        (Device("gpu", "9.0"), "high", "TF32"),
        (Device("gpu", "9.0"), "highest", None),
        (Device("gpu", "gfx942"), None, None),
    ],
)
def test_float32_products_that_a_device_multiplies_otherwise(device, precision, expected):
    products = list(matmuls(jax.make_jaxpr(lambda w, x: jnp.dot(x, w, precision=precision))(W, X)))
    found = multiplied_otherwise(products, lambda: device)
    assert (found and found.format) == expected
    assert found is None or (found.flops == 2 * 256 * 64 * 64 and len(found.where) == 1)
    halves = matmuls(jax.make_jaxpr(jamp.cast_fn(loss, "O2:bfloat16"))(W, X))
    assert multiplied_otherwise(halves, lambda: device) is None


def test_a_configured_precision_counts():
    products = list(matmuls(jax.make_jaxpr(loss)(W, X)))
    with jax.default_matmul_precision("highest"):
        assert multiplied_otherwise(products, lambda: Device("tpu")) is None


@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
def test_a_rule_for_the_highest_precision(level):
    policy = jamp.get_policy(f"{level}:bfloat16").with_rules(highest=["head/*"])
    assert jamp.get_policy(str(policy)) == policy
    w, x = jnp.full((4, 4), 1 + 2**-10), jnp.ones((2, 4))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(jamp.cast_fn(loss, policy)))(w, x)
    products = list(matmuls(jaxpr))
    exact = [m for m in products if str(m.precision).count("HIGHEST") == 2]
    assert [m.half for m in exact] == [False] * 3  # Forward, and both gradients.
    assert all(m.half for m in products if m not in exact) and len(products) == 5
    assert {op.rule for op in jamp.report(loss, w, x, policy=policy).operations if op.scope == "head"} >= {"highest"}


def test_rules_for_the_highest_precision_that_contradict_or_match_nothing():
    with pytest.raises(ValueError, match="Contradictory"):
        jamp.get_policy("O2").with_rules(highest=["head/*"], half=["head/*"])
    assert jamp.report(loss, W, X, policy="O2,highest=['nowhere/*']").unmatched == ("nowhere/*",)


def test_a_convolution_in_the_highest_precision():
    def conv(k, x):
        return jax.lax.conv(x, k, (1,), "SAME")

    policy = jamp.get_policy("O2:bfloat16").with_rules(highest=["conv_general_dilated"])
    k, x = jnp.ones((4, 4, 3)), jnp.ones((1, 4, 8))
    (product,) = matmuls(jax.make_jaxpr(jamp.cast_fn(conv, policy))(k, x))
    assert str(product.precision).count("HIGHEST") == 2 and str(product.dtypes[0]) == "float32"


def test_html_and_picture(tmp_path):
    found = jamp.report(loss, W, X, policy="O2:bfloat16,full=['head/*']")
    page = found._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") and "body" in page and "bf16 -&gt; f32" in page
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5_000
    jamp.report(lambda x: x + 1, jnp.ones(2)).plot(tmp_path / "empty.png")


def test_the_picture_has_what_can_be_seen():
    """Scopes that differ in a number are one where they are too narrow for names, and small ones are added up."""
    few = {(f"block_{i}", "mlp"): {"half": 2.0} for i in range(4)}
    boxes = list(_boxes(few, 0.0, 0, 8.0))
    assert [box.label for box in boxes if not box.level] == ["block_0", "block_1", "block_2", "block_3"]
    many = {(f"block_{i}", "mlp"): {"half": 2.0, "float32": 1.0} for i in range(500)}
    small = {(name,): {"half": 0.1} for name in "abc"}
    boxes = list(_boxes(many | small, 0.0, 0, 1500.3))
    assert [(box.label, box.level) for box in boxes] == [("block_* (500)", 0), ("mlp", 1), ("", 0)]
    assert boxes[1].shares == {"half": 1000, "float32": 500} and boxes[2].shares["half"] == pytest.approx(0.3)


def test_names_in_the_picture_differ():
    alike = {(f"a_rather_long_name_{c}_of_a_block",): {"half": 1.0} for c in "abcdefghijkl"}
    labels = [box.label for box in _boxes(alike, 0.0, 0, 12.0)]
    assert len(set(labels)) == 12 and all("…" in label for label in labels)


def test_the_picture_says_that_there_are_no_products(tmp_path):
    jamp.report(lambda x: jnp.tanh(jnp.tanh(x)).sum(), X, policy="O2:bfloat16").plot(tmp_path / "report.svg")
    picture = (tmp_path / "report.svg").read_text()
    assert "no matrix product or convolution" in picture and "bytes kept for the backward pass: " in picture
