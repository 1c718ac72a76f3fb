"""Which regime an equation runs under: what levels are made of, and who has the last word."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp._primitives import Trait, has
from jamp.transforms._labels import FULL_SCOPE, HALF_SCOPE, TRACED_SCOPE
from jamp.transforms.analysis.regimes import (
    CONVERGES,
    FULL,
    HALF,
    PROMOTE,
    REGIMES,
    TRACED,
    Elementwise,
    Float8,
    Functions,
    Products,
    Regime,
    Regimes,
    plain_scope,
)

O2 = jamp.get_policy("O2:bfloat16")
X = jnp.ones((4, 4))


def equation(fn, *args, primitive=None):
    """An equation of a program, the last or the one of a primitive."""
    eqns = jax.make_jaxpr(fn)(*(args or (X,))).jaxpr.eqns
    return eqns[-1] if primitive is None else next(eqn for eqn in eqns if eqn.primitive.name == primitive)


class Found(NamedTuple):
    regime: Regime
    promotes: bool


def regime(eqn, policy=O2, scope="", inside=None):
    regimes = Regimes(policy)
    found = regimes.enter(eqn, regimes.base if inside is None else inside, scope)
    return Found(found.regime, found.promotes)


LEVELS = {
    "OD": Regime("OD", Products.HALF_ONLY, Functions.TRACED, Elementwise.WIDEST),
    "O1": Regime("O1", Products.HALF, Functions.FULL, Elementwise.WIDEST, demand=True, recurrences=True),
    "O2": Regime("O2", Products.HALF, Functions.FULL, Elementwise.BY_FLOW, islands=True, demand=True, recurrences=True),
    "O3": Regime("O3", Products.HALF, Functions.HALF, Elementwise.HALF, delicate=False),
    "full": Regime("full", Products.TRACED, Functions.FULL, Elementwise.FULL),
    "promote": Regime("promote", Products.HALF, Functions.FULL, Elementwise.WIDEST),
    "traced": Regime("traced", Products.TRACED, Functions.FULL, Elementwise.FULL, untouched=True),
}


def test_what_levels_are_made_of():
    assert REGIMES == LEVELS
    assert all(level.delicate == (name != "O3") for name, level in LEVELS.items())
    assert [name for name, level in REGIMES.items() if level.untouched] == ["traced"]
    any_level = Regime("any")
    assert any_level[1:4] == (Products.HALF, Functions.FULL, Elementwise.BY_FLOW)
    assert [name for name in Regime._fields[4:] if name != "float8" and getattr(any_level, name)] == ["delicate"]
    assert any_level.float8 is Float8.NONE
    assert FULL._replace(label="decides when a loop ends") == CONVERGES


def test_what_is_float32_throughout_and_what_is_half():
    assert [name for name, level in REGIMES.items() if level.all_full] == ["full", "traced"]
    assert [name for name, level in REGIMES.items() if level.all_half] == ["O3"]
    assert not Regime("mixed", products=Products.TRACED).all_full
    assert not Regime("mixed", elementwise=Elementwise.FULL).all_full
    assert Regime("mixed", untouched=True).all_full


def test_members_are_told_apart():
    """A member with the value of another would be an alias of it."""
    for members, count in ((Products, 3), (Functions, 3), (Elementwise, 4), (Float8, 3)):
        assert len(list(members)) == count


@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
def test_a_policy_gives_its_level(level):
    assert Regimes(jamp.get_policy(f"{level}:bfloat16")).base == LEVELS[level]


def test_without_a_level_it_is_o2_and_a_given_one_comes_first():
    assert Regimes(jamp.Policy("float32", "bfloat16", "float32")).base == REGIMES["O2"]
    own = Regime("own")
    assert Regimes(O2, own).base is own


def test_a_setting_and_a_rule_say_which_products_run_in_8_bits():
    policy = jamp.get_policy("O1:bfloat16,matmul=float8").with_rules(float8=["prim:log"], half=["prim:tanh"])
    assert Regimes(policy).base == REGIMES["O1"]._replace(float8=Float8.CHOSEN)
    assert regime(equation(lax.log), policy, inside=FULL).regime == REGIMES["O1"]._replace(float8=Float8.ALL)
    assert regime(equation(lax.tanh), policy).regime is HALF


def test_whether_anything_may_run_in_8_bits():
    settings = {"O2:bfloat16": False, "O2:bfloat16,matmul=half": False, "O2:bfloat16,matmul=float8": True}
    assert {spelled: Regimes(jamp.get_policy(spelled)).in_eight_bits for spelled in settings} == settings
    assert Regimes(O2.with_rules(float8=["prim:log"], full=["prim:exp"])).in_eight_bits
    assert not Regimes(O2.with_rules(full=["prim:exp"])).in_eight_bits


def test_a_region_of_the_highest_precision_is_float32():
    policy = O2.with_rules(highest=["prim:dot_general"])
    found = regime(equation(jnp.dot, X, X), policy).regime
    assert found == FULL._replace(label="highest", highest=True)
    assert not any(level.highest for level in REGIMES.values())


def test_an_equation_has_the_regime_of_its_jaxpr():
    eqn = equation(lax.exp)
    for inside in (REGIMES["O1"], FULL, HALF):
        assert regime(eqn, inside=inside) == (inside, False)


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("Model/Dense_0", "Model/Dense_0"),
        ("transpose(jvp(Model))/Dense_0", "Model/Dense_0"),
        ("jvp(Model/Dense_0)", "Model/Dense_0"),
        ("vmap(a.b(Model))/", "Model"),
        ("", ""),
    ],
)
def test_a_plain_scope_names_no_transformation(path, plain):
    assert plain_scope(path) == plain


def marked(*scopes):
    def program(x):
        for scope in scopes:
            with jax.named_scope(scope):
                return marked(*scopes[1:])(x) if scopes[1:] else lax.exp(x)
        raise AssertionError

    return program


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        ((FULL_SCOPE,), FULL),
        ((HALF_SCOPE,), HALF),
        ((TRACED_SCOPE,), TRACED),
        ((FULL_SCOPE, HALF_SCOPE), HALF),  # The innermost.
        ((HALF_SCOPE, FULL_SCOPE), FULL),
        ((HALF_SCOPE, "block"), HALF),
        ((TRACED_SCOPE, HALF_SCOPE), TRACED),
        (("jamp_of_a_user",), REGIMES["O2"]),
    ],
)
def test_marked_scopes(scopes, expected):
    assert regime(equation(marked(*scopes))) == (expected, False)


def test_a_marked_scope_comes_before_rules_and_nothing_before_what_is_untouched():
    eqn = equation(marked(HALF_SCOPE))
    assert regime(eqn, O2.with_rules(full=["prim:exp"])).regime is HALF
    assert regime(eqn, O2.with_rules(full=["prim:exp"]), inside=TRACED) == (TRACED, False)
    assert regime(equation(marked(FULL_SCOPE)), inside=TRACED).regime is TRACED


def test_a_transposed_equation_has_the_scope_of_what_it_transposes():
    def program(x):
        with jax.named_scope(FULL_SCOPE):
            return lax.tanh(x).sum()

    eqns = jax.make_jaxpr(jax.grad(program))(X).jaxpr.eqns
    muls = [eqn for eqn in eqns if eqn.primitive is lax.mul_p]
    assert muls and all(regime(eqn).regime is FULL for eqn in muls)


RULED = {"full": FULL, "half": HALF, "promote": PROMOTE}


def named(x):
    with jax.named_scope("model"), jax.named_scope("layers_0"):
        return lax.exp(x)


def called(x):
    return jax.jit(helper)(x)


def helper(x):
    return lax.exp(x)


@pytest.mark.parametrize("precision", RULED)
@pytest.mark.parametrize(
    ("program", "entry", "applies"),
    [
        (lax.exp, "prim:exp", True),
        (lax.exp, "prim:log", False),
        (named, "model/layers_0", True),
        (named, "model/*", True),
        (named, "mod*", True),
        (named, "model/layers_?", True),
        (named, "m*l", True),  # What stands in a scope that matches.
        (named, "model/layers_1", False),
        (named, "layers_0/", False),
        (named, "*/layers_0", True),
        (named, "Model*", False),
        (called, "fn:helper", True),
        (called, "fn:called", True),  # Functions that were called when it was traced, jitted or not.
        (helper, "fn:helper", True),
        (helper, "fn:called", False),
    ],
)
def test_rules(program, entry, applies, precision):
    eqn = equation(program)
    found = regime(eqn, O2.with_rules(**{precision: [entry]}))
    expected = RULED[precision] if applies else REGIMES["O2"]
    can_promote = eqn.primitive.name == "exp"
    assert found == (expected, applies and precision == "promote" and can_promote)


def test_a_rule_by_line_names_any_end_of_the_path():
    eqn = equation(helper)
    line = helper.__code__.co_firstlineno + 1
    for entry, applies in (
        (f"test_regimes.py:{line}", True),
        (f"analysis/test_regimes.py:{line}", True),
        (f"test_regimes.py:{line + 1}", False),
        (f"regimes.py:{line}", False),
    ):
        assert (regime(eqn, O2.with_rules(full=[entry])).regime is FULL) == applies, entry


def test_rules_of_all_kinds_stand_side_by_side():
    line = helper.__code__.co_firstlineno + 1
    policy = O2.with_rules(full=["prim:log", f"test_regimes.py:{line}"], half=["fn:named"], promote=["other/*"])
    assert regime(equation(helper), policy).regime is FULL
    assert regime(equation(named), policy).regime is HALF
    assert regime(equation(lax.log), policy).regime is FULL
    assert regime(equation(lax.tanh), policy).regime is REGIMES["O2"]


def test_the_scope_of_the_jaxpr_counts_too():
    policy = O2.with_rules(full=["outer/model"])
    assert regime(equation(named), policy, scope="outer").regime is FULL
    assert regime(equation(named), policy, scope="other").regime is REGIMES["O2"]
    # That rule has been asked where the jaxpr is called, and what it is in says what came of it.
    assert regime(equation(lax.exp), O2.with_rules(full=["outer*"]), scope="outer").regime is REGIMES["O2"]
    assert regime(equation(lax.exp), O2.with_rules(full=["prim:exp"]), scope="outer").regime is FULL


def test_the_first_rule_that_applies_decides():
    rules = {"full": ["model/layers_0"], "half": ["model/*", "prim:exp"]}
    assert regime(equation(named), O2.with_rules(**rules)).regime is FULL
    assert regime(equation(named), O2.with_rules(full=["prim:exp"], half=["model*"])).regime is HALF


@pytest.mark.parametrize(
    ("condition", "applies"),
    [("axis=1", True), ("axis=0", False), ("axis=1,dtype=float32", False), ("side=1", False)],
)
def test_a_rule_with_conditions(condition, applies):
    eqn = equation(lambda x: lax.cumsum(x, 1))
    found = regime(eqn, O2.with_rules(half=[f"prim:cumsum[{condition}]"])).regime
    assert (found is HALF) == applies


@pytest.mark.parametrize(
    ("program", "promotes"),
    [
        (lax.exp, True),
        (lax.tanh, True),
        (lambda x: x @ x, True),
        (lax.cumsum, False),  # A sum is added up in float32, whatever a rule says.
        (lambda x: lax.reduce_max(x, (0,)), False),
        (lambda x: lax.rev(x, (0,)), False),
        (lambda x: x.astype(jnp.float16), False),
    ],
)
def test_what_may_be_promoted(program, promotes):
    eqn = equation(program)
    ruled = regime(eqn, O2.with_rules(promote=[f"prim:{eqn.primitive.name}"]))
    assert ruled == (PROMOTE, promotes)
    assert has(eqn, Trait.REDUCES) == (eqn.primitive is lax.cumsum_p)


@pytest.mark.parametrize(
    ("rules", "matters"),
    [([], False), (["prim:exp"], False), (["fn:helper"], True), (["model*"], True), (["model.py:3"], True)],
)
def test_whether_scopes_matter(rules, matters):
    assert Regimes(O2.with_rules(full=rules)).scope_matters == matters
