"""`jamp.report`, on functions whose numbers one can work out by hand."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.helpers import run_python
from tests.inspect.programs import FORWARD, MLP_SHAPES, mlp, raises_in_reverse, rows, shape
from tests.transforms.harness import find, trace

LEVELS = ("O0", "OD:float16", "O1:bfloat16", "O2:bfloat16", "O2:float16", "O3:bfloat16", "p=f32,c=bf16,o=f32")


@pytest.mark.parametrize("level", LEVELS)
def test_flops_of_a_two_layer_network(level):
    found = jamp.report(mlp, *MLP_SHAPES, policy=level)
    half = 0 if level == "O0" else 1
    assert (found.forward.total, found.forward.half) == (FORWARD, half * FORWARD)
    # Each product has one more for the gradient of either operand.
    assert (found.gradient.total, found.gradient.half) == (3 * FORWARD, half * 3 * FORWARD)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", {"float32": 3 * 8 * 4, "bool": 3 * 8}),  # The hidden layer, and where relu passes.
        ("O1:bfloat16", {"bfloat16": 2 * 3 * 8}),  # What relu makes of the product.
        # Copies of all arguments too.
        ("O1:bfloat16,residuals=all", {"bfloat16": 2 * (3 * 8 + 4 * 8 + 8 * 2 + 3 * 4), "bool": 3 * 8}),
        ("O2:bfloat16,residuals=all", {"bfloat16": 2 * (3 * 8 + 4 * 8 + 8 * 2 + 3 * 4), "bool": 3 * 8}),
    ],
)
def test_residual_bytes(level, expected):
    assert jamp.report(mlp, *MLP_SHAPES, policy=level).residual_bytes == expected


def test_half_residuals_keep_no_copy_of_an_argument():
    found = jamp.report(mlp, *MLP_SHAPES, policy="O2:bfloat16")
    assert list(found.residual_bytes) == ["bfloat16"]
    assert not [kept for kept in found.residuals if kept.where == "cast of an argument"]


def test_operations_say_where_in_what_and_why():
    first, second = rows(jamp.report(mlp, *MLP_SHAPES, policy="OD:float16"), "dot_general")
    assert (first.scope, first.function, second.scope) == ("hidden", "mlp", "out")
    assert "inspect/programs.py:" in first.line
    assert (first.inputs, first.outputs, first.rule) == (("float16", "float16"), ("float32",), "half")
    assert (first.count, first.casts, first.flops, first.bytes) == (1, 2, 2 * 3 * 4 * 8, 3 * 8 * 4)


@pytest.mark.parametrize("level", LEVELS)
def test_casts_of_values_that_xla_must_round_are_counted(level):
    def model(w, x):
        scores = (x @ w) @ x.T
        return jax.nn.softmax(scores) @ x, (x @ w == (x @ w).max()).sum()

    found = jamp.report(model, shape(4, 4), shape(8, 4), policy=level)
    assert sum(op.casts for op in found.operations) == found.casts


@pytest.mark.parametrize("level", LEVELS)
def test_rows_add_up_to_the_totals(level):
    def model(w, x):
        h, sums = lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w)
        h = lax.cond(sums[0] > 0, lambda h: h * 2, jnp.exp, h)
        return jnp.sum(jax.nn.softmax(jax.jit(jax.nn.gelu)(h) @ h.T) * 0.5 + sums.mean())

    found = jamp.report(model, shape(5, 4, 4), shape(2, 4), policy=level)
    assert sum(op.flops for op in found.operations) == found.forward.total == 5 * 2 * (2 * 4 * 4) + 2 * (2 * 4 * 2)
    assert sum(op.casts for op in found.operations) == found.casts


def test_one_cast_serves_two_readers():
    found = jamp.report(lambda w, x: (x @ w, w @ x), shape(4, 4), shape(4, 4), policy="O1:bfloat16")
    assert (found.casts, found.shared_casts, found.to_dict()["shared_casts"]) == (2, 2, 2)
    assert [(op.casts, op.shared) for op in rows(found, "dot_general")] == [(2, 2)]
    assert "2, and 2 saved by sharing" in str(found)
    assert "sharing" not in str(jamp.report(lambda w, x: x @ w, shape(4, 4), shape(4, 4), policy="O1:bfloat16"))


def test_like_operations_are_one_with_a_count():
    def deep(w, x):
        for _ in range(3):
            x = x @ w
        return x

    (row,) = rows(jamp.report(deep, shape(4, 4), shape(2, 4), policy="O3:bfloat16"), "dot_general")
    assert (row.count, row.flops) == (3, 3 * 2 * (2 * 4 * 4))


def test_loops_count_their_length_and_conditionals_the_dearest_branch():
    def loop(w, x):
        x = lax.scan(lambda c, _: (c @ w, None), x, None, length=11)[0]
        return lax.cond(True, lambda x: x @ w, lambda x: x @ w @ w, x)

    found = jamp.report(loop, shape(2, 2), shape(2, 2), policy="O2:bfloat16")
    assert found.forward.total == sum(op.flops for op in found.operations) == (11 + 2) * 16
    assert sum(op.count for op in rows(found, "dot_general")) == 4


def test_unknown_primitives_are_named():
    def looked_up(x):
        return jax.pure_callback(lambda x: x, x, x) * 2

    found = jamp.report(looked_up, shape(3), policy="O2:bfloat16")
    assert found.opaque == ("pure_callback",)
    assert "pure_callback" in str(found)
    assert jamp.report(mlp, *MLP_SHAPES).opaque == ()


def test_without_a_gradient_it_says_why():
    found = jamp.report(lambda x: lax.while_loop(lambda x: x < 3, lambda x: x * 2, x), shape(), policy="O2:bfloat16")
    assert found.gradient is None and found.residuals == ()
    assert "while_loop" in found.no_gradient and "while_loop" in str(found)
    integers = jamp.report(lambda x: x + 1, shape(3, dtype=jnp.int32))
    assert integers.no_gradient == "no argument is floating"
    chosen = jamp.report(lambda w1, w2, x: jnp.argmax(mlp(w1, w2, x), -1), *MLP_SHAPES)
    assert chosen.no_gradient == "no result is floating" and chosen.gradient is None


@pytest.mark.parametrize("error", [RuntimeError("no way\nback"), KeyError("no way"), AssertionError()], ids=repr)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_rule_that_raises_leaves_a_report_without_a_gradient(error, compiled):
    found = jamp.report(raises_in_reverse(error), *MLP_SHAPES[::2], policy="O2:bfloat16", compiled=compiled)
    lines = [line.strip() for line in str(found).splitlines()]
    said = next(i for i, line in enumerate(lines) if line.endswith("none: the derivative could not be traced"))
    assert lines[said + 1] == (str(error).splitlines() or ["AssertionError"])[0]
    assert found.gradient is None and found.residuals == () and "back" not in str(found)
    assert found.forward.share == 1


def test_arrays_and_shapes_give_the_same_report():
    arrays = [jnp.ones(s.shape) for s in MLP_SHAPES]
    assert jamp.report(mlp, *arrays, policy="O2:bfloat16") == jamp.report(mlp, *MLP_SHAPES, policy="O2:bfloat16")


def test_nothing_runs():
    def counted(x):
        jax.debug.callback(lambda: pytest.fail("the function ran"))
        return x * 2

    assert jamp.report(counted, jnp.ones(2), policy="O1:bfloat16").casts == 0


def test_takes_keyword_and_static_arguments():
    def model(x, *, scale, train):
        return (x * scale) @ x if train else x

    found = jamp.report(model, shape(4, 4), scale=shape(), train=True, policy="O3:float16")
    assert found.forward.half == 2 * 4**3


def test_the_policy_is_that_of_cast_fn_unless_given():
    cast = jamp.cast_fn(mlp, policy="O3:float16")
    assert jamp.report(cast, *MLP_SHAPES).policy == jamp.get_policy("O3:float16")
    assert jamp.report(cast, *MLP_SHAPES, policy="O0").forward.half == 0
    assert jamp.report(mlp, *MLP_SHAPES).policy == jamp.get_policy("O2")


def test_a_nested_cast_fn_is_reported_as_it_runs():
    inner = jamp.cast_fn(mlp, "O3:float16")
    found = jamp.report(lambda *args: inner(*args) @ jnp.ones((2, 2)), *MLP_SHAPES, policy="O0")
    assert [op.inputs[0] for op in rows(found, "dot_general")] == ["float16", "float16", "float32"]
    assert found.forward.half == FORWARD


def test_what_a_rule_puts_in_half_is_not_said_to_be_of_another_level():
    policy = jamp.get_policy("O2:bfloat16").with_rules(half=["integer_pow[y=2]", "exp"])
    found = jamp.report(lambda x: jnp.exp(lax.integer_pow(x, 2)), shape(3), policy=policy)
    assert [
        (op.primitive, op.inputs, op.rule) for op in found.operations if op.primitive != "convert_element_type"
    ] == [
        ("integer_pow", ("bfloat16",), "half"),
        ("exp", ("bfloat16",), "half"),
    ]


def own(x):
    return x * 2


def test_rules_that_match_nothing_are_listed():
    policy = jamp.get_policy("O2:bfloat16").with_rules(
        full=["*lm_haed*", "*hidden*", "softmax"], half=["fn:missing", own, "prim:none", "out/*"], promote="*/inner"
    )

    def model(*args):
        with jax.named_scope("around"):
            return own(jax.jit(jax.named_call(mlp, name="inner"))(*args))

    found = jamp.report(model, *MLP_SHAPES, policy=policy)
    assert found.unmatched == ("fn:missing", "prim:none", "out/*", "*lm_haed*")
    assert "rules that match nothing   'fn:missing', 'prim:none', 'out/*', '*lm_haed*'" in str(found)
    # Of products in 8 bits there are none in a scope without products.
    policy = jamp.get_policy("O2:bfloat16").with_rules(float8=["*hiden*", "*hidden*", "*norm*"], highest=["*ou/*"])
    with_norm = jax.named_call(lambda *args: jnp.exp(mlp(*args)), name="norm")
    assert jamp.report(mlp, *MLP_SHAPES, policy=policy).unmatched == ("*hiden*", "*norm*", "*ou/*")
    alone = jax.jit(jax.named_call(lambda x: jnp.exp(x), name="norm"))
    found = jamp.report(lambda *args: alone(mlp(*args)), *MLP_SHAPES, policy=policy)
    assert found.unmatched == ("*hiden*", "*norm*", "*ou/*")
    assert "*norm*" not in jamp.report(with_norm, *MLP_SHAPES, policy=policy).unmatched
    quiet = jamp.report(mlp, *MLP_SHAPES, policy=jamp.Policy.preset("pytorch"))
    assert quiet.unmatched == () and "match nothing" not in str(quiet)


def test_state_of_nnx_modules_is_looked_at_and_left_alone():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    model = Model(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    found = jamp.report(model, jnp.full((8, 4), 2.0), policy="O2:bfloat16")
    assert found.forward.share == 1.0 and found.forward.total == 2 * 8 * 4 * 4
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(model)))


def test_dictionary_is_json():
    found = jamp.report(mlp, *MLP_SHAPES, policy="O1:bfloat16")
    loaded = json.loads(json.dumps(found.to_dict()))
    assert loaded["policy"] == "O1:bfloat16"
    assert loaded["forward"] == {"total": FORWARD, "half": FORWARD, "float8": 0}
    assert loaded["residual_bytes"] == found.residual_bytes
    assert len(loaded["operations"]) == len(found.operations)


def test_table():
    text = str(jamp.report(mlp, *MLP_SHAPES, policy="O1:bfloat16"))
    lines = text.splitlines()
    assert lines[0] == "precision at O1:bfloat16"
    assert lines[1].split() == ["half", "FLOPs,", "forward", "100.0", "%", "of", "288", "FLOP"]
    assert max(map(len, lines)) <= 100
    assert lines.index("hidden") < lines.index("out")  # The dearer scope comes first.
    (row,) = [line.split() for line in lines[lines.index("out") :] if line.startswith("dot_general")]
    assert row == ["dot_general", "bf16", "->", "f32", "half,", "float32", "out", "1", "1", "96", "24"]


def test_table_puts_numbered_scopes_with_the_same_operations_under_one_heading():
    def blocks(w, x):
        for i in range(3):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(x @ w)
        with jax.named_scope("block_9"):
            return x + 1

    text = str(jamp.report(blocks, shape(4, 4), shape(2, 4), policy="O3:bfloat16"))
    lines = text.splitlines()
    assert "block_*" in lines and "block_9" in lines and "block_0" not in lines
    assert re.search(r"[23] x 16 B bf16\[2, 4\] \w+ \S+ \(block_\*\)", text)


@pytest.mark.parametrize("name", ["block_p{}", "block_{}", "block{}", "{}"])
def test_residuals_are_grouped_as_the_table_is(name):
    def blocks(w, x):
        for i in range(5):
            with jax.named_scope(name.format(i)):
                x = jnp.tanh(x @ w)
        return x.sum() + (x * x).sum()

    lines = str(jamp.report(blocks, shape(4, 4), shape(2, 4), policy="O2:bfloat16")).splitlines()
    pattern = name.format("*")
    assert pattern in lines
    kept = [line.strip() for line in lines if f"({pattern})" in line]
    assert len(kept) == 1 and kept[0].startswith("4 x 16 B bf16[2, 4] tanh")


def test_long_scopes_stay_different():
    def blocks(w, x):
        for letter in "abc":
            with jax.named_scope(f"a_model_with_long_names_of_its_parts/a_block_{letter}/its_attention_and_projection"):
                x = jnp.tanh(x @ w)
        return x.sum() + (x * x).sum()

    lines = str(jamp.report(blocks, shape(4, 4), shape(2, 4), policy="O2:bfloat16")).splitlines()
    kept = [line for line in lines if "1 x 16 B" in line]
    assert len(kept) == len(set(kept)) == 2 and all("…" in line and len(line) <= 100 for line in kept)


def test_table_leaves_out_what_only_moves_data():
    text = str(jamp.report(lambda x: jnp.sin(x).T.reshape(8), shape(2, 4), policy="O2:bfloat16"))
    assert "transpose" not in text
    assert "not shown: 2 operations" in text


@pytest.mark.parametrize(("fn", "error"), [(3, TypeError), ("O2", TypeError)])
def test_takes_functions_only(fn, error):
    with pytest.raises(error, match=r"takes a function first, got .* Write `jamp.report\(fn, \*args\)`"):
        jamp.report(fn, 1)


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"Expected a policy|nknown"):
        jamp.report(mlp, *MLP_SHAPES, policy="O7")


def test_names_a_half_dtype_and_no_backend_is_touched():
    code = """
import jax, jax.numpy as jnp, jamp
from jax._src import xla_bridge
x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
jamp.report(lambda x: x @ x, x, policy="O2:bfloat16")
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(code) == "False"


def _attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize(
    ("policy", "offered"),
    [
        ("O2:bfloat16", ["attentions as written      2, at attention=fused cuDNN (cuda), flash attention (tpu)"]),
        ("O1:float16", ["attentions as written      2, at attention=fused cuDNN (cuda), flash attention (tpu)"]),
        ("O2:bfloat16,attention=fused", []),
        ("O0", []),
        ("p=f32,c=bf16,o=f32", []),
    ],
)
def test_attentions_that_could_be_fused_are_counted(policy, offered):
    x = shape(2, 128, 4, 64)
    found = jamp.report(lambda q, k, v: _attention(_attention(q, k, v), k, v), x, x, x, policy=policy)
    assert sum(each.count for each in found.fusible) == 2 * len(offered)
    assert [line.strip() for line in str(found).splitlines() if "as written" in line] == offered
    assert (found.attentions != ()) is (policy == "O2:bfloat16,attention=fused")


def test_what_no_kernel_can_do_is_not_offered():
    x = shape(2, 128, 4, 60)  # Features that cuDNN does not take, and a bias that the kernel for TPUs does not.

    def program(q, k, v, bias):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    assert jamp.report(program, x, x, x, shape(128, 128), policy="O2:bfloat16").fusible == ()


def test_products_in_float32_are_the_half_of_a_float64_program():
    with jax.enable_x64(True):
        x = jnp.ones((64, 64), jnp.float64)
        found = jamp.report(lambda x: jnp.tanh(x @ x).sum(), x, policy="O2:float32,p=float64,o=float64")
        assert found.forward.share == found.gradient.share == 1
        assert "f32 FLOPs, forward" in str(found)
        assert "; in float64 " in str(found)
        assert jamp.report(lambda x: (x @ x).sum(), x, policy="O0").forward.share == 0


def test_no_kernel_multiplies_float32():
    with jax.enable_x64(True):
        q = jnp.ones((2, 128, 4, 64), jnp.float64)
        found = jamp.report(
            jax.nn.dot_product_attention, q, q, q, policy="O2:float32,p=float64,o=float64,attention=fused"
        )
        (attention,) = found.attentions
        assert attention.reasons == {"": "cuda: its products are float32; tpu: its products are float32"}


def test_casts_and_loops_of_float64_programs_are_told():
    def program(w, x):
        y = lax.while_loop(lambda y: jnp.abs(y).max() > 1e-9, lambda y: y / 2 + 0.01 * jnp.tanh(y @ w), x)
        return jnp.exp(jnp.tanh(y @ w) @ w)

    with jax.enable_x64(True):
        x = jnp.linspace(-0.1, 0.1, 256).reshape(16, 16)
        for policy, told in (
            ("O2:float32,p=float64,o=float64", "which decide in float64"),
            ("O3:float32,p=float64,o=float64", "loops that decide in f32"),
        ):
            found = jamp.report(program, x, x, policy=policy)
            casts = find(trace(jamp.cast_fn(program, policy), x, x), "convert_element_type")
            assert found.casts == len(casts) > 0
            assert found.casts == sum(op.casts for op in found.operations)
            assert told in str(found)


@pytest.mark.parametrize("rule", ["tanh", "*part*"])
def test_a_rule_for_float32_is_what_decided_about_an_elementwise_operation(rule):
    def fn(x):
        with jax.named_scope("part"):
            return jnp.tanh(x @ x)

    found = jamp.report(fn, jnp.ones((4, 4)), policy=jamp.get_policy("O2:bfloat16").with_rules(full=[rule]))
    assert [op.rule for op in found.operations if op.primitive == "tanh"] == ["full"]
