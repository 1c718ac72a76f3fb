"""One table says what is known of primitives: of JAX's own, all of them; of one's own, what a library registers."""

import itertools
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from jamp._dtypes import FLOAT32, FLOAT64, Pair
from jamp._primitives import PRODUCTS, TABLE, Rule, Trait, acts
from jamp.transforms._traced import Traced, evaluate
from jamp.transforms.analysis.patterns import Match
from jamp.transforms.analysis.regimes import Functions, Regime
from jamp.transforms.planning.rewrites import REGISTRY, Entry
from jamp.transforms.program.plan import Step
from jamp.transforms.program.rewrites import Forward
from tests.helpers import run_python

O2 = jamp.get_policy("O2:bfloat16")
HALF_OUT = O2.with_output_dtype("bfloat16")  # Its results are not wanted in float32, which products would heed.
X, W = jnp.ones((4, 4)), jnp.ones((4, 4))

# In a process of its own, because other tests import kernel languages and sparse arrays, with primitives of their own.
_LIST_PRIMITIVES = """
import gc, jax, jax.nn, jax.numpy, jax.scipy
from jax.extend.core import Primitive
print(*{p.name for p in gc.get_objects() if isinstance(p, Primitive)})
"""


def test_every_primitive_that_jax_registers_has_a_row():
    registered = set(run_python(_LIST_PRIMITIVES).split())
    assert "dot_general" in registered
    assert registered - set(TABLE) == set()


def _own(name):
    """A primitive of a library: doubles its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: x)
    return primitive


def _step(primitive, dtype_of_operand):
    """What is decided about a primitive that is given float32 or half data."""

    def program(x, w):
        return primitive.bind(x @ w if dtype_of_operand == "half" else lax.exp(x @ w))

    plan = Traced(program, (X, W), {}).plan(HALF_OUT)
    (step,) = [step for step in plan.steps if step.eqn.primitive is primitive]
    return step


def _runs_in(step):
    (cast,), (flow,) = step.casts, step.ins
    return (cast.dtype if cast else flow.dtype).name, step.out[0].dtype.name


@pytest.mark.parametrize(
    ("rule", "of_half", "of_full"),
    [
        ("half", ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ("full", ("float32", "float32"), ("float32", "float32")),
        ("no_half", ("float32", "float32"), ("float32", "float32")),
        ("promote", ("bfloat16", "bfloat16"), ("float32", "float32")),
        ("follow", ("bfloat16", "bfloat16"), ("float32", "float32")),
        ("traced", ("float32", "float32"), ("float32", "float32")),
        ("opaque", ("float32", "float32"), ("float32", "float32")),
    ],
)
def test_a_primitive_of_ones_own_is_one_row(rule, of_half, of_full):
    primitive = _own(f"test_table_{rule}")
    assert _step(primitive, "half").rule == "opaque"
    jamp.register_primitive(primitive, rule)
    assert _runs_in(_step(primitive, "half")) == of_half
    assert _runs_in(_step(primitive, "full")) == of_full


def test_a_rule_of_a_policy_comes_before_the_row():
    primitive = _own("test_table_ruled")
    jamp.register_primitive(primitive, "half")
    plan = Traced(lambda x: primitive.bind(x), (X,), {}).plan(O2.with_rules(full=["prim:test_table_ruled"]))
    assert [step.out[0].dtype.name for step in plan.steps] == ["float32"]


def test_a_row_may_be_written_twice_but_not_otherwise():
    jamp.register_primitive("test_table_twice", Rule.FULL, Trait.REDUCES)
    jamp.register_primitive("test_table_twice", "full", Trait.REDUCES)
    with pytest.raises(ValueError, match="is 'full' by an earlier call, and cannot be 'half' too"):
        jamp.register_primitive("test_table_twice", "half")
    with pytest.raises(ValueError, match=r"is 'full' by jamp's own table.*with_rules\(half=\['prim:exp'\]\)"):
        jamp.register_primitive("exp", "half")
    assert TABLE["exp"].rule is Rule.FULL


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in (Rule.FULL, Rule.RECURSE)])
def test_the_error_about_two_rows_names_what_works(rule):
    """There is no list of a policy for `follow` and others; the advice was to write one, which raised a TypeError."""
    name = f"test_table_advised_{rule.value}"
    primitive = _own(name)
    jamp.register_primitive(name, Rule.FULL)
    with pytest.raises(ValueError, match="write policy") as told:
        jamp.register_primitive(name, rule)
    code = str(told.value).split("write ")[1].rstrip(".")
    policy = eval(code, {"policy": O2})
    (step,) = Traced(lambda x: primitive.bind(x), (X,), {}).plan(policy).steps
    assert step.out[0].dtype.name == ("bfloat16" if rule is Rule.HALF else "float32")


@pytest.mark.parametrize("rule", ["ful", "recurse", Rule.RECURSE])
def test_an_unknown_rule_is_told(rule):
    with pytest.raises(ValueError, match="expected one of half, full, no_half, promote, follow, traced, opaque"):
        jamp.register_primitive("test_table_unknown", rule)
    assert "test_table_unknown" not in TABLE


@pytest.mark.parametrize("traits", [["reduces", "linear"], "expensive solves", ("phase",), Trait.REDUCES])
def test_traits_are_named(traits):
    primitive = _own(f"test_table_of_traits_{traits}")
    jamp.register_primitive(primitive, "full", traits)
    assert _runs_in(_step(primitive, "half")) == ("float32", "float32")
    assert TABLE[primitive.name].traits


def test_an_unknown_trait_is_told():
    with pytest.raises(ValueError, match=r"expected some of expensive, linear, phase, reduces, solves.*'linear'"):
        jamp.register_primitive("test_table_unknown", "full", traits=["linaer"])
    assert "test_table_unknown" not in TABLE


@pytest.mark.parametrize("value", [3, None, ""])
def test_what_is_no_primitive_is_told(value):
    with pytest.raises(TypeError, match=rf"Expected a jax.extend.core.Primitive or its name, got {value!r}"):
        jamp.register_primitive(value, "half")


def test_a_level_is_one_regime():
    """Functions in half, as in O3, and operations between them as in O2."""
    level = Regime("my level", functions=Functions.HALF, delicate=False)
    plan = Traced(lambda x, w: lax.exp(x @ w) + 1, (X, W), {}).plan(HALF_OUT, base=level)
    assert [step.out[0].dtype.name for step in plan.steps] == ["bfloat16"] * 3
    assert [step.rule for step in plan.steps] == ["half", "my level", "promote"]


def test_a_pattern_is_one_entry():
    """`-(-x)` is `x`: found by a finder, answered by a rewrite, in a registry that the planner is given."""

    def find(jaxpr, made):
        for eqn in jaxpr.eqns:
            inner = made.get(eqn.invars[0]) if eqn.primitive is lax.neg_p else None
            if inner is not None and inner.primitive is lax.neg_p:
                yield eqn, Match("negated twice", atom=inner.invars[0])

    def answer(site, match):
        made = site.maker(match.atom)
        return Step(site.eqn, (made.out[0],), (None,), (made.out[0],), "follow", Forward(reads=(match.atom,)))

    def program(x, w):
        return lax.neg(lax.neg(x @ w))

    registry = {**REGISTRY, "negated twice": Entry(find, answer)}
    traced = Traced(program, (X, W), {})
    plan = traced.plan(O2, registry=registry)
    assert [step.eqn.primitive.name for step in plan.steps] == ["dot_general", "neg"]
    np.testing.assert_array_equal(evaluate(plan, (X, W), O2)[0], jnp.full((4, 4), 4.0))
    assert len(traced.plan(O2).steps) == 3


FLOAT64_PROGRAM = jamp.Policy("float64", "float32", "float64", level="O2")


def test_a_float64_program_may_run_its_products_in_float32():
    assert FLOAT64_PROGRAM.pair == Pair(FLOAT64, FLOAT32)

    def program(x, w):
        return lax.reduce_sum(lax.exp(lax.tanh(x @ w) @ w), (0,))

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.normal(size=(8, 8))) for _ in range(2))
        plan = Traced(program, (x, w), {}).plan(FLOAT64_PROGRAM)
        ran = [
            (step.eqn.primitive.name, (step.casts[0] or step.ins[0]).dtype, step.out[0].dtype) for step in plan.steps
        ]
        assert ran == [
            ("dot_general", FLOAT32, FLOAT32),
            ("tanh", FLOAT32, FLOAT32),
            ("dot_general", FLOAT32, FLOAT64),  # What `exp` reads is not rounded.
            ("exp", FLOAT64, FLOAT64),
            ("reduce_sum", FLOAT64, FLOAT64),
        ]
        cast = jamp.cast_fn(program, FLOAT64_PROGRAM)
        assert cast(x, w).dtype == jnp.float64
        error = np.abs(np.asarray(cast(x, w) - program(x, w))).max()
        assert 1e-12 < error < 1e-4
        gradient = jax.grad(lambda x, w: cast(x, w).sum())(x, w)
        reference = jax.grad(lambda x, w: program(x, w).sum())(x, w)
        assert gradient.dtype == jnp.float64
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-4)


def test_a_number_that_float32_rounds_is_exact_in_a_float64_program():
    """As a scale of 0.005 is in a float32 program whose data is half."""
    with jax.enable_x64(True):
        policy = FLOAT64_PROGRAM.with_output_dtype("float32")
        x = jnp.eye(16) * jnp.arange(16.0)
        plan = Traced(lambda x, w: (x @ w) * 0.1, (x, jnp.ones((16, 16))), {}).plan(policy)
        out = evaluate(plan, (x, jnp.ones((16, 16))), policy)[0]
        assert out.dtype == jnp.float32
        exact = (np.arange(16) * 0.1).astype(np.float32)
        rounded_first = np.arange(16, dtype=np.float32) * np.float32(0.1)
        assert (exact != rounded_first).any()
        np.testing.assert_array_equal(out, np.repeat(exact[:, None], 16, 1))


def test_branches_and_loops_of_a_float64_program_hand_over_float64():
    """Of which NumPy says that it is equal to None."""

    def branches(x, w):
        y = lax.switch(jnp.int32(x[0, 0] > 0), [lambda x: jnp.zeros((3, 4)), jnp.abs, lambda x: x @ w], x)
        return y.mean(), y, y @ w

    def loop(x, w):
        return lax.fori_loop(0, 3, lambda i, x: lax.cond(i < 1, jnp.sin, lambda x: x @ w, x), x)

    with jax.enable_x64(True):
        x, w = jnp.linspace(1.0, 2.0, 12).reshape(3, 4), jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
        for fn, level in itertools.product((branches, loop), ("OD", "O1", "O2")):
            out = jamp.cast_fn(fn, f"{level}:float32,p=float64,o=float64")(x, w)
            chex.assert_trees_all_equal_shapes_and_dtypes(out, fn(x, w))
            chex.assert_trees_all_close(out, fn(x, w), rtol=1e-5)


def test_float64_policies_are_spelled():
    text = str(FLOAT64_PROGRAM)
    assert text == "O2:float32,p=float64,o=float64"
    assert jamp.get_policy(text) == FLOAT64_PROGRAM
    for wrong in ("O2:float32", "O2:float32,o=float64", "O2:float64,p=float64"):
        with pytest.raises(ValueError, match=r"float32|float64"):
            jamp.get_policy(wrong)
    with pytest.raises(ValueError, match="computes in float16 or bfloat16"):
        jamp.Policy("float32", "float32", "float32", level="O2")


@pytest.mark.parametrize("call", [lambda policy: jamp.cast_fn(jnp.tanh, policy)(X), partial(jamp.report, jnp.tanh, X)])
def test_a_policy_for_float64_programs_asks_for_them(call):
    with pytest.raises(ValueError, match=r"jax_enable_x64', True\)"):
        call(policy=FLOAT64_PROGRAM)


def test_a_policy_in_half_says_that_it_leaves_float64_as_it_is():
    with jax.enable_x64(True):
        with pytest.warns(jamp.PrecisionWarning, match="'O2:float32,p=float64,o=float64'"):
            assert jamp.cast_fn(jnp.tanh, O2)(jnp.float64(1)).dtype == jnp.float64
        jamp.cast_fn(lambda x, y: x + y, O2)(jnp.float64(1), jnp.float32(1))
        jamp.cast_fn(lambda n: n + 1, O2)(1)
        jamp.cast_fn(jnp.tanh, FLOAT64_PROGRAM)(jnp.float64(1))


def test_what_does_more_than_make_its_results():
    def program(x):
        jax.debug.print("{}", x)
        jax.jit(lambda x: None)(x)
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return jax.freeze(ref) * jnp.sin(x)

    told = {eqn.primitive.name: acts(eqn) for eqn in jax.make_jaxpr(program)(1.0).eqns}
    assert {name for name, does in told.items() if not does} == {"sin", "mul", "add", "convert_element_type"}
    assert sum(told.values()) == 6  # The print, the call without a result, and a reference made, read, set and freed.


def test_what_takes_or_makes_no_array_acts():
    """A reference may be read or freed without an effect that JAX tells of, and a token orders what is done."""
    array, other = jax.core.ShapedArray((), jnp.float32), object()
    for ins, outs, does in (
        ([array], [array], False),
        ([], [array], False),
        ([other], [array], True),
        ([array, other], [array], True),
        ([array], [other], True),
        ([array], [], True),
    ):
        atoms = ([SimpleNamespace(aval=aval) for aval in avals] for avals in (ins, outs))
        eqn = SimpleNamespace(effects=(), invars=next(atoms), outvars=next(atoms))
        assert acts(eqn) is does
        eqn.effects = {"print"}
        assert acts(eqn) is True


def test_products_are_those_that_matrix_units_run():
    products = {name for name, row in TABLE.items() if row.traits & PRODUCTS}
    assert products == {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def test_what_is_a_view_moves():
    assert not [name for name, row in TABLE.items() if row.has(Trait.VIEW) and not row.has(Trait.MOVES)]
