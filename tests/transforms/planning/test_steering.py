"""Policies steer a model without touching it: rules, presets, marked regions, the switch, and a policy in a policy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from tests.transforms.harness import find, o2, operand_dtypes, out_dtypes, product_dtypes, trace

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
FULL = ["float32", "float32"]
HALF = ["bfloat16", "bfloat16"]


def steered(level="O2:bfloat16", **rules):
    return jamp.get_policy(level).with_rules(**rules)


def products(fn, policy):
    return product_dtypes(trace(jamp.cast_fn(fn, policy), W, X))


def two_layers(w, x):
    with jax.named_scope("encoder"), jax.named_scope("Dense_0"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("lm_head"):
        return x @ w


class TestRules:
    def test_a_primitive_is_made_full(self):
        assert products(two_layers, steered(full="dot_general")) == [FULL, FULL]

    def test_a_primitive_is_made_half(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.exp(x @ w) @ w, steered(half="exp")), W, X)
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}

    def test_a_primitive_is_made_to_promote(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.exp(x @ w) @ w, steered(promote="exp")), W, X)
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}

    def test_a_scope_is_made_full(self):
        assert products(two_layers, steered(full="*lm_head*")) == [HALF, FULL]
        assert products(two_layers, steered(full="encoder/*")) == [FULL, HALF]
        assert products(two_layers, steered(full="encoder/Dense_*")) == [FULL, HALF]

    def test_a_scope_is_made_half(self):
        def fn(w, x):
            with jax.named_scope("fast"):
                return jnp.exp(x @ w) @ w

        assert out_dtypes(trace(jamp.cast_fn(fn, steered(half="*fast*")), W, X), "exp") == {"bfloat16"}

    def test_a_scope_that_does_not_match_changes_nothing_and_is_told(self):
        with pytest.warns(jamp.PrecisionWarning, match=r"match nothing.*'\*decoder\*'.*lm_head"):
            assert products(two_layers, steered(full="*decoder*")) == [HALF, HALF]

    @pytest.mark.parametrize("rule", ["*lm_haed*", "fn:not_called", "prim:not_there", "*/lm_head/*/x"])
    @pytest.mark.parametrize("kind", ["half", "full", "promote", "float8", "highest"])
    def test_rules_that_match_nothing_are_told(self, rule, kind):
        with pytest.warns(jamp.PrecisionWarning, match="match nothing"):
            products(two_layers, steered(**{kind: rule}))

    @pytest.mark.parametrize(
        ("rule", "says"),
        [
            ("matmul", "JAX inlines 'matmul'.*'dot_general'"),
            (jnp.matmul, "JAX inlines 'matmul'.*'dot_general'"),
            ("dot_general[foo=1]", "Parameters of 'dot_general' are dimension_numbers, "),
            ("tanh[accuracy=None, nope=1]", "Parameters of 'tanh' are accuracy"),
        ],
    )
    def test_rules_that_can_match_nothing_are_told_with_what_to_write(self, rule, says):
        with pytest.warns(jamp.PrecisionWarning, match=f"match nothing.*{says}"):
            products(two_layers, steered(full=rule))

    @pytest.mark.parametrize("rule", ["multiply", "sigmoid", "sin[nope=1]", "dot_general[precision=LOW]", "softmax"])
    def test_names_and_values_that_another_model_may_have_are_not_told(self, rule, recwarn):
        products(two_layers, steered(full=rule))
        products(two_layers, "pytorch:bfloat16")  # These lists name functions that JAX inlines.
        products(two_layers, "mxnet:bfloat16")
        assert not recwarn.list

    def test_a_name_that_is_inlined_rules_its_primitive(self):
        def fn(w, x):
            return jax.nn.sigmoid(jnp.multiply(x @ w, x @ w))

        jaxpr = trace(jamp.cast_fn(fn, steered("O3:bfloat16", full=["multiply", "sigmoid"])), W, X)
        assert out_dtypes(jaxpr, "mul") | out_dtypes(jaxpr, "logistic") == {"float32"}

    def test_a_condition_on_the_name_that_a_jaxpr_prints(self):
        jaxpr = trace(o3 := jamp.cast_fn(lambda w, x: jax.nn.relu(x @ w), steered("O3:bfloat16")), W, X)
        assert out_dtypes(jaxpr, "max") == {"bfloat16"}
        full = steered("O3:bfloat16", full="custom_jvp_call[name=relu]")
        assert out_dtypes(trace(jamp.cast_fn(o3.__wrapped__, full), W, X), "max") == {"float32"}

    @pytest.mark.parametrize("precision", ["half", "promote", "full", "highest"])
    def test_a_rule_for_a_primitive_that_jamp_does_not_know(self, precision):
        sine = Primitive("sine_of_a_user")
        sine.def_abstract_eval(lambda x: x)
        sine.def_impl(jnp.sin)
        cast = jamp.cast_fn(lambda x: sine.bind(x), steered(**{precision: "prim:sine_of_a_user"}))
        if precision in ("full", "highest"):  # As it was traced.
            assert cast(X).dtype == np.float32
            return
        with pytest.warns(jamp.PrecisionWarning, match=rf"register_primitive\('sine_of_a_user', '{precision}'\)"):
            cast(X)

    def test_a_rule_for_half_where_no_kernel_has_it_is_told(self):
        def fn(w, x):
            return jnp.linalg.cholesky(w @ w.T + 4 * jnp.eye(4))

        with pytest.warns(jamp.PrecisionWarning, match="match nothing.*'cholesky' runs as it was traced"):
            products(fn, steered(half="cholesky"))
        products(fn, steered(full="cholesky"))
        products(two_layers, steered(half="cholesky"))

    def test_a_float8_rule_that_names_no_product_is_told(self):
        def fn(w, x):
            return jnp.exp(x @ w)

        with pytest.warns(jamp.PrecisionWarning, match="match nothing in this function: 'exp'.*has to name products"):
            products(fn, steered(float8=["exp", "tanh"]))  # What does not occur may be meant for others.

    @pytest.mark.parametrize(
        "wrap",
        [jax.jit, jax.checkpoint, lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None])[:, 0]],
        ids=["jit", "remat", "vmap"],
    )
    def test_a_scope_rule_reaches_inside(self, wrap):
        assert products(wrap(two_layers), steered(full="*lm_head*")) == [HALF, FULL]

    def test_a_scope_rule_reaches_a_loop_body(self):
        def fn(w, x):
            with jax.named_scope("decoder"):
                return jax.lax.scan(lambda x, w: (two_layers(w, x), None), x, w[None])[0]

        assert products(fn, steered(full="decoder/*lm_head*")) == [HALF, FULL]

    def test_a_scope_rule_holds_in_the_backward_pass(self):
        cast = jamp.cast_fn(two_layers, steered(full="*lm_head*"))
        jaxpr = trace(jax.grad(lambda w, x: jnp.sum(cast(w, x)), (0, 1)), W, X)
        assert sorted(product_dtypes(jaxpr)) == [HALF] * 3 + [FULL] * 3

    def test_a_scope_rule_holds_for_a_gradient_inside(self):
        def fn(w, x):
            return jax.grad(lambda w: jnp.sum(two_layers(w, x)))(w)

        dtypes = products(fn, steered(full="*lm_head*"))
        assert HALF in dtypes
        assert FULL in dtypes

    def test_a_called_function_is_made_full(self):
        def my_head(w, x):
            return x @ w

        def fn(w, x):
            return my_head(w, jnp.tanh(x @ w))

        assert products(fn, steered(full="fn:my_head")) == [HALF, FULL]
        assert products(fn, steered(full=[my_head])) == [HALF, FULL]

    def test_a_called_function_of_jax_is_made_half(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jax.nn.softmax(x @ w) @ w, steered(half="softmax")), W, X)
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}

    def test_the_value_of_a_parameter_decides(self):
        policy = steered(half="integer_pow[y=3]")
        jaxpr = trace(jamp.cast_fn(lambda w, x: (x @ w) ** 3 @ w + (x @ w) ** 5 @ w, policy), W, X)
        by_power = {eqn.params["y"]: eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "integer_pow")}
        assert by_power == {3: "bfloat16", 5: "float32"}

    def test_the_most_specific_rule_wins(self):
        policy = steered(full=["dot_general", "encoder/*"], half="encoder/Dense_0")
        assert products(two_layers, policy) == [HALF, FULL]

    def test_rules_hold_at_od_too(self):
        assert products(two_layers, steered("OD:bfloat16", full="*lm_head*")) == [HALF, FULL]

    def test_rules_change_numbers(self):
        x = jnp.full((1, 1), 1 + 2**-10)
        cast = jamp.cast_fn(lambda x: x @ jnp.ones((1, 1)), steered(full="dot_general"))
        assert cast(x)[0, 0] == 1 + 2**-10


@pytest.mark.parametrize("name", ["pytorch", "paddle", "mindspore", "mxnet", "megengine", "apex"])
def test_a_preset_runs_products_in_half_and_exponentials_in_float32(name):
    def fn(w, x):
        return jax.nn.log_softmax(jnp.exp(jnp.tanh(x @ w)) @ w)

    jaxpr = trace(jamp.cast_fn(fn, jamp.Policy.preset(name)), W, X)
    assert product_dtypes(jaxpr) == [HALF, HALF]
    assert out_dtypes(jaxpr, "exp") == {"float32"}


class TestRegions:
    def test_full_precision_runs_in_float32(self):
        assert products(lambda w, x: jamp.full_precision(jnp.matmul)(jnp.tanh(x @ w), w), "O2:bfloat16") == [HALF, FULL]

    def test_half_precision_runs_in_half(self):
        jaxpr = trace(o2(lambda w, x: jamp.half_precision(jnp.exp)(x @ w) @ w), W, X)
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}

    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    def test_full_precision_holds_at_every_level(self, level):
        assert products(jamp.full_precision(two_layers), f"{level}:bfloat16") == [FULL, FULL]

    @pytest.mark.parametrize(
        "wrap",
        [jax.jit, jax.checkpoint, lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None])[:, 0]],
        ids=["jit", "remat", "vmap"],
    )
    def test_a_region_reaches_inside_and_holds_backward(self, wrap):
        cast = o2(jamp.full_precision(wrap(two_layers)))
        assert products(wrap(two_layers), "O2:bfloat16") == [HALF, HALF]
        assert set(map(tuple, product_dtypes(trace(jax.grad(lambda w, x: cast(w, x).sum()), W, X)))) == {tuple(FULL)}

    def test_the_innermost_region_wins(self):
        def fn(w, x):
            return jamp.full_precision(lambda x: jnp.tanh(x @ w) + jamp.half_precision(jnp.matmul)(x, w))(x)

        assert products(fn, "O2:bfloat16") == [FULL, HALF]

    def test_a_region_does_nothing_outside_of_the_transform(self):
        plain, marked = trace(two_layers, W, X), trace(jamp.half_precision(two_layers), W, X)
        assert str(plain) == str(marked)

    def test_a_region_decorates_and_keeps_the_name(self):
        @jamp.full_precision
        def head(x):
            """Head."""
            return x @ W

        assert (head.__name__, head.__doc__) == ("head", "Head.")

    def test_a_region_takes_a_function(self):
        with pytest.raises(TypeError, match=r"full_precision\(fn\)\(x\)"):
            jamp.full_precision(X)


class TestDisable:
    def test_inside_the_context_the_function_is_the_users(self):
        with jamp.disable():
            assert products(two_layers, "O2:bfloat16") == [FULL, FULL]
        assert products(two_layers, "O2:bfloat16") == [HALF, HALF]

    def test_the_switch_is_part_of_the_key_of_jits_cache(self):
        traces = []

        @jax.jit
        def fn(x):
            traces.append(None)
            return jamp.cast_fn(lambda x: x @ jnp.ones((1, 1)), "O3:bfloat16")(x)

        x = jnp.full((1, 1), 1 + 2**-10)
        values = [float(fn(x)[0, 0])]
        with jamp.disable():
            values.append(float(fn(x)[0, 0]))
        values.append(float(fn(x)[0, 0]))
        assert values == [1.0, 1 + 2**-10, 1.0]
        assert len(traces) == 2

    def test_the_switch_is_off_again_after_an_error(self):
        with pytest.raises(RuntimeError), jamp.disable():
            raise RuntimeError
        assert products(two_layers, "O2:bfloat16") == [HALF, HALF]

    def test_three_dtype_policies_are_switched_off_too(self):
        cast = jamp.cast_fn(lambda x: x * 1.0, "bf16")
        with jamp.disable():
            assert cast(X).dtype == jnp.float32
        assert cast(X).dtype == jnp.bfloat16


class TestNesting:
    @pytest.mark.parametrize(
        ("inner", "expected"),
        [("O2:float16", ["float16"] * 2), ("O0", FULL), ("O1:bfloat16", HALF), ("p=f32,c=f16,o=f32", ["float16"] * 2)],
    )
    def test_the_inner_policy_rules_its_part(self, inner, expected):
        cast = jamp.cast_fn(lambda w, x: x @ w, inner)
        assert products(lambda w, x: cast(w, jnp.tanh(x @ w)) @ w, "O2:bfloat16") == [HALF, expected, HALF]

    def test_the_inner_policy_rules_its_part_in_jit_and_scan(self):
        cast = jamp.cast_fn(lambda w, x: jnp.tanh(x @ w), "O0")

        def fn(w, x):
            return jax.lax.scan(lambda x, w: (jax.jit(cast)(w, x) @ w, None), x, w[None])[0]

        assert products(fn, "O2:bfloat16") == [FULL, HALF]

    def test_the_inner_policy_rules_its_part_backward(self):
        cast = jamp.cast_fn(lambda w, x: x @ w, "O2:float16")
        outer = o2(lambda w, x: jnp.tanh(cast(w, x)) @ w)
        jaxpr = trace(jax.grad(lambda w, x: outer(w, x).sum(), (0, 1)), W, X)
        assert sorted(product_dtypes(jaxpr)) == [HALF] * 3 + [["float16"] * 2] * 3

    def test_the_inner_policy_rules_its_part_of_a_gradient_inside(self):
        cast = jamp.cast_fn(lambda w, x: jnp.tanh(x @ w), "O2:float16")
        dtypes = products(lambda w, x: jax.grad(lambda w: cast(w, x).sum())(w), "O2:bfloat16")
        assert dtypes
        assert all(of_one == ["float16"] * 2 for of_one in dtypes)

    def test_nesting_the_same_policy_changes_no_value(self):
        once, twice = o2(two_layers), o2(o2(two_layers))
        np.testing.assert_array_equal(jax.jit(once)(W, X), jax.jit(twice)(W, X))


def test_operands_of_a_full_region_are_raised_from_half():
    jaxpr = trace(o2(lambda w, x: jamp.full_precision(jnp.tanh)(x @ w) @ w), W, X)
    (tanh,) = find(jaxpr, "tanh")
    assert operand_dtypes(tanh) == ["float32"]


@pytest.mark.parametrize("rules", [{"half": "scatter-add"}, {"promote": "scatter-add"}, {"full": "scatter-add"}])
@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
def test_a_rule_for_a_sum_changes_its_result_not_its_arithmetic(level, rules):
    policy = jamp.get_policy(f"{level}:bfloat16").with_rules(**rules)

    def fn(w, x):
        rows = jamp.half_precision(lambda x: jnp.abs(x @ w))(x[:2])
        return jnp.zeros_like(rows).at[jnp.array([1, 0])].add(rows)

    jaxpr = trace(jamp.cast_fn(fn, policy), W, X)
    assert {eqn.invars[0].aval.dtype for eqn in find(jaxpr, "scatter-add")} == {np.dtype(np.float32)}
    jax.jit(jamp.cast_fn(fn, policy))(W, X)  # Lowers: the computation inside of the scatter has the operands' dtype.


def test_a_promoted_function_takes_its_products_along():
    def similarity(a, b):
        return a @ b.T + jax.jit(jnp.matmul)(a, b.T)

    policy = jamp.get_policy("O1:bfloat16").with_rules(promote=similarity)
    jaxpr = trace(jamp.cast_fn(lambda w, x: similarity(x @ w, x), policy), W, X)
    assert sorted(product_dtypes(jaxpr)) == [["bfloat16", "bfloat16"], ["float32", "float32"], ["float32", "float32"]]


@pytest.mark.parametrize("rule", [
    "dot_general[dimension_numbers=(([1], [0]), ([], []))]", "dot_general[precision=(Precision.HIGH, Precision.HIGH)]",
    "block/*",
])  # fmt: skip
def test_conditions_are_written_as_a_jaxpr_prints_them(rule):
    def fn(x):
        with jax.named_scope("block"):
            return lax.dot(x, x, precision="high")

    policy = jamp.get_policy("O2:bfloat16").with_rules(full=[rule])
    assert product_dtypes(trace(jamp.cast_fn(fn, policy), W)) == [["float32", "float32"]]
    with pytest.raises(TypeError, match="A list of rules is 3"):
        policy.with_rules(full=3)


class TestFloat8RulesThatCannotBe:
    @staticmethod
    def called(size, policy):
        def fn(w, x):
            with jax.named_scope("head"):
                return jnp.tanh(x @ w)

        jamp.cast_fn(fn, policy)(jnp.ones((size, size)), jnp.ones((size, size)))

    @pytest.mark.parametrize("rule", ["*head*", "dot_general"])
    @pytest.mark.parametrize("more", ["", ",matmul=float8", ",matmul=mxfp8,grad_dtype=e5m2"])
    def test_are_told(self, rule, more):
        with pytest.warns(jamp.PrecisionWarning, match="only products that cannot run in 8 bits.*no multiple of 16"):
            self.called(60, f"O2:bfloat16{more},float8=['{rule}']")

    def test_blocks(self):
        with pytest.warns(jamp.PrecisionWarning, match="not one axis in blocks of 32"):
            self.called(48, "O2:bfloat16,matmul=mxfp8,float8=['*head*']")

    def test_others_are_not(self, recwarn):
        self.called(64, "O2:bfloat16,grad_dtype=e5m2,float8=['*head*']")
        self.called(60, "O2:bfloat16,matmul=float8")
        assert not recwarn.list


@pytest.mark.parametrize("rules", [{"half": ["*lm_head*"]}, {"full": ["tanh"]}, {"full": ["*nowhere*"]}])
def test_a_float32_run_to_compare_with_may_have_the_rules_of_the_others(rules):
    def fn(x):
        with jax.named_scope("lm_head"):
            return jnp.tanh(x @ x)

    policy = jamp.get_policy("O0").with_rules(**rules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jamp.cast_fn(fn, policy)(jnp.eye(4)).dtype == jnp.float32
        report = jamp.report(fn, jnp.eye(4), policy=policy)
    assert not report.unmatched
    assert report.forward.half == 0
