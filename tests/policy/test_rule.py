import functools

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp.policy import Rule

O2 = jamp.get_policy("O2:float16")


def only_rule(entry) -> Rule:
    (rule,) = O2.with_rules(full=[entry]).rules
    return rule


def my_loss(x):
    return x


@pytest.mark.parametrize(
    ("entry", "kind", "pattern", "params"),
    [
        ("dot_general", "primitive", "dot_general", ()),
        ("scatter-add", "primitive", "scatter-add", ()),
        ("exp", "primitive", "exp", ()),
        ("softmax", "function", "softmax", ()),
        ("softmax_cross_entropy", "function", "softmax_cross_entropy", ()),
        ("fn:exp", "function", "exp", ()),
        ("prim:my_op", "primitive", "my_op", ()),
        ("*lm_head*", "scope", "*lm_head*", ()),
        ("decoder/layer_0", "scope", "decoder/layer_0", ()),
        ("decoder/*/LayerNorm_[0-9]", "scope", "decoder/*/LayerNorm_[0-9]", ()),
        ("*[k=1]", "scope", "*[k=1]", ()),
        ("multiply", "primitive", "mul", ()),  # JAX inlines it, and this is what is left.
        ("swish", "function", "silu", ()),
        ("fn:multiply", "function", "multiply", ()),
        ("integer_pow[y=2]", "primitive", "integer_pow", (("y", 2),)),
        ("reduce_sum[axes=(0, 1), out_sharding=None]", "primitive", "reduce_sum",
         (("axes", (0, 1)), ("out_sharding", None))),
        ("custom_jvp_call[name=relu]", "primitive", "custom_jvp_call", (("name", "relu"),)),
        ("reduce_sum[axes=[0]]", "primitive", "reduce_sum", (("axes", (0,)),)),
        ("prim:my_op[path=a/b*]", "primitive", "my_op", (("path", "a/b*"),)),
    ],
)  # fmt: skip
def test_entries(entry, kind, pattern, params):
    assert only_rule(entry) == Rule(kind, pattern, params, "full")


@pytest.mark.parametrize(
    ("function", "entry"),
    [
        (my_loss, "fn:my_loss"),
        (jax.nn.softmax, "fn:softmax"),
        (jnp.max, "fn:max"),  # Not the primitive of that name, which compares two arrays.
        (jax.lax.exp, "exp"),  # jax.lax binds its primitive without a call in between.
        (jnp.multiply, "multiply"),
        (jax.nn.sigmoid, "sigmoid"),
        (jax.nn.swish, "fn:silu"),
        (jax.jit(my_loss), "fn:my_loss"),
        (jax.custom_jvp(my_loss), "fn:my_loss"),
    ],
)
def test_callables_are_taken_by_name(function, entry):
    assert O2.with_rules(full=[function]).full == (entry,)
    assert O2.with_rules(full=function).full == (entry,)


@pytest.mark.parametrize("entry", [3, None, lambda x: x, functools.partial(my_loss)])
def test_entries_that_have_no_name_are_refused(entry):
    with pytest.raises(TypeError, match="A rule is a string such as"):
        O2.with_rules(full=[entry])


def test_most_specific_first():
    policy = O2.with_rules(
        half=["exp", "softmax", "a/*"],
        full=["integer_pow", "*long_pattern*", "integer_pow[y=2]", "fn:norm"],
        promote=["integer_pow[y=3, x=1]", "*"],
    )
    assert [rule.pattern for rule in policy.rules] == [
        "*long_pattern*", "a/*", "*",  # scopes, the longest first
        "integer_pow", "integer_pow",  # conditions, the most first
        "norm", "softmax",  # functions
        "exp", "integer_pow",  # primitives
    ]  # fmt: skip
    assert [len(rule.params) for rule in policy.rules[3:5]] == [2, 1]
    assert [rule.precision for rule in policy.rules[3:5]] == ["promote", "full"]


def test_rules_add_up_and_repeat_without_effect():
    once = O2.with_rules(half=["exp"], full=["softmax"])
    assert once.with_rules(full=["softmax", "log"]).full == ("softmax", "log")
    assert O2.with_rules(half="exp").with_rules(full=["softmax", "softmax"]) == once
    assert O2.with_rules() == O2


@pytest.mark.parametrize("same", ["softmax", "fn:softmax", jax.nn.softmax])
def test_contradictions_are_refused(same):
    with pytest.raises(ValueError, match="Contradictory rules"):
        O2.with_rules(half=["softmax"], full=[same])
    with pytest.raises(ValueError, match="Contradictory rules"):
        O2.with_rules(half=["softmax"]).with_rules(promote=[same])


def test_conditions_do_not_contradict_the_bare_name():
    assert len(O2.with_rules(full=["integer_pow"], half=["integer_pow[y=2]"]).rules) == 2


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("sofmax", "Did you mean 'softmax'"),
        ("dot_genral", "Did you mean 'dot_general'"),
        ("my_loss", "Write 'fn:my_loss'"),
        ("integer_pw[y=2]", "Did you mean 'integer_pow'"),
        ("fn:", "Rule 'fn:' in 'full': no name. Write that of"),
        ("", "Rule '' in 'full': no name. Write that of"),
        ("lm_head", "loss of optax. Write 'fn:lm_head'"),  # Nothing is near enough to be meant.
        ("integer_pow[y=]", "Write it as a jaxpr prints it: 'integer_pow[y=2]'"),
        ("integer_pow[y=2, z=]", "no value for 'z'"),
        ("exp[foo]", "a condition is a parameter and its value"),
        ("exp[]", "a condition is a parameter and its value"),
        ("softmax[axis=1]", "Write 'softmax' alone"),
        ("fn:my_loss[axis=1]", "Write 'fn:my_loss' alone"),
        ("float32", "Unknown rule 'float32'"),  # In jax.numpy, and no function.
    ],
)
def test_unknown_names_are_refused(entry, says):
    with pytest.raises(ValueError) as error:
        O2.with_rules(full=[entry])
    assert says in str(error.value)


def test_rules_need_a_level():
    with pytest.raises(ValueError, match="Start from a level"):
        jamp.get_policy("p=f32,c=f16,o=f32").with_rules(full=["softmax"])
