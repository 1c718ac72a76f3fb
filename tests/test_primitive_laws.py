"""What the table says of primitives, held against what JAX computes; and the table as text, where a change shows.

`JAMP_UPDATE_PLANS=1` writes the text anew, as it does for plans; read the diff before you commit it.
"""

import os
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp._primitives import TABLE, Row, Rule, Trait, has, register_primitive
from jamp.transforms.program.want import Want

TEXT = Path(__file__).parent / "primitives.txt"

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
INDEX = jnp.asarray([[0], [2], [2]])
_ADDED = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_TAKEN = lax.GatherDimensionNumbers((1,), (0,), (0,))

# A program for each primitive, of floating arguments alone.
PROGRAMS = {
    "abs": (lax.abs, X),
    "acos": (lax.acos, X / 9),
    "add": (lax.add, X, Y),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), X),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.int32), X),
    "asin": (lax.asin, X / 9),
    "asinh": (lax.asinh, X),
    "atan": (lax.atan, X),
    "atan2": (lax.atan2, X, Y),
    "atanh": (lax.atanh, X / 9),
    "broadcast_in_dim": (lambda x: lax.broadcast(x, (3,)), X),
    "cbrt": (lax.cbrt, X),
    "ceil": (lax.ceil, X),
    "clamp": (lambda x: lax.clamp(x.dtype.type(-1), x, x.dtype.type(1)), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), X, Y),
    "cos": (lax.cos, X),
    "cosh": (lax.cosh, X),
    "cummax": (lax.cummax, X),
    "cummin": (lax.cummin, X),
    "cumprod": (lax.cumprod, X),
    "cumsum": (lax.cumsum, X),
    "div": (lax.div, X, Y),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 8)), X),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y[:2], (1, 0)), X, Y),
    "eq": (lax.eq, X, Y),
    "erf": (lax.erf, X),
    "erfc": (lax.erfc, X),
    "exp": (lax.exp, X),
    "exp2": (lax.exp2, X),
    "expm1": (lax.expm1, X),
    "floor": (lax.floor, X),
    "ge": (lax.ge, X, Y),
    "gt": (lax.gt, X, Y),
    "gather": (lambda x: lax.gather(x, INDEX, _TAKEN, (1, 8)), X),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), X),
    "is_finite": (lax.is_finite, X),
    "le": (lax.le, X, Y),
    "log": (lambda x: lax.log(x * x), X),
    "log1p": (lax.log1p, X * X),
    "logistic": (lax.logistic, X),
    "lt": (lax.lt, X, Y),
    "max": (lax.max, X, Y),
    "min": (lax.min, X, Y),
    "mul": (lax.mul, X, Y),
    "ne": (lax.ne, X, Y),
    "neg": (lax.neg, X),
    "pad": (lambda x: lax.pad(x, x.dtype.type(0), ((1, 1, 0), (0, 0, 0))), X),
    "pow": (lambda x, y: lax.pow(x * x, y), X, Y),
    "reduce_max": (lambda x: lax.reduce_max(x, (1,)), X),
    "reduce_min": (lambda x: lax.reduce_min(x, (1,)), X),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (1,)), X),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (1,)), X),
    "rem": (lax.rem, X, Y),
    "reshape": (lambda x: lax.reshape(x, (32,)), X),
    "rev": (lambda x: lax.rev(x, (0,)), X),
    "round": (lax.round, X),
    "rsqrt": (lax.rsqrt, X * X),
    "select_n": (lambda x, y: lax.select(x > y, x, y), X, Y),
    "scatter-add": (lambda x, y: lax.scatter_add(x, INDEX, y[:3], _ADDED), X, Y),
    "scatter-mul": (lambda x, y: lax.scatter_mul(x, INDEX, y[:3], _ADDED), X, Y),
    "sign": (lax.sign, X),
    "sin": (lax.sin, X),
    "sinh": (lax.sinh, X),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 8)), X),
    "sort": (lambda x: lax.sort(x), X),
    "split": (lambda x: lax.split(x, (4, 4), 1), X),
    "sqrt": (lax.sqrt, X * X),
    "square": (lax.square, X),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), X[None]),
    "sub": (lax.sub, X, Y),
    "tan": (lax.tan, X),
    "tanh": (lax.tanh, X),
    "top_k": (lambda x: lax.top_k(x, 2)[0], X),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), X),
}
UNARY = [name for name, (_, *args) in PROGRAMS.items() if len(args) == 1]


def primitive_of(name):
    """A primitive as the last equation of its program binds it."""
    fn, *args = PROGRAMS[name]
    return {eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns}


def having(trait, among=tuple(PROGRAMS)):
    return [name for name in among if TABLE[name].traits & trait]


def floats(name, *args):
    """All floating results of a program, flat."""
    fn, *own = PROGRAMS[name]
    leaves = jax.tree.leaves(fn(*(args or own)))
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])


def whole(name):
    """Its arguments, rounded to small integers."""
    return [jnp.round(3 * arg) for arg in PROGRAMS[name][1:]]


def test_the_table_as_text():
    lines = []
    for name, row in sorted(TABLE.items()):
        traits = " ".join(name.lower() for name, bit in vars(Trait).items() if name.isupper() and bit & row.traits)
        if not name.startswith(("test_", "my_")):  # What tests and examples register.
            lines.append(f"{name:36}{row.rule.value:8} {traits}".rstrip())
    text = "\n".join(lines) + "\n"
    if os.environ.get("JAMP_UPDATE_PLANS"):
        TEXT.write_text(text)
    assert text == TEXT.read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_is_of_its_primitive(name):
    assert name in primitive_of(name)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if TABLE[n].rule in (Rule.PROMOTE, Rule.FOLLOW, Rule.FULL)])
def test_half_goes_in_and_half_comes_out(name):
    """So that the dtype of an operation is that of its operands, whichever that is."""
    fn, *args = PROGRAMS[name]
    results = jax.tree.leaves(jax.eval_shape(fn, *(arg.astype(jnp.bfloat16) for arg in args)))
    assert all(not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.bfloat16 for leaf in results)


@pytest.mark.parametrize("name", having(Trait.COMPARES))
def test_comparisons_give_booleans(name):
    fn, *args = PROGRAMS[name]
    assert jax.eval_shape(fn, *args).dtype == jnp.bool_


@pytest.mark.parametrize("name", having(Trait.COUNTS))
def test_what_counts_makes_integers_of_anything(name):
    assert (floats(name) == np.round(floats(name))).all()


@pytest.mark.parametrize("name", having(Trait.INTEGRAL))
def test_integers_stay_integers(name):
    out = floats(name, *(arg + 10 if name == "rem" else arg for arg in whole(name)))
    assert (out == np.round(out)).all()


@pytest.mark.parametrize("name", [n for n in PROGRAMS if not TABLE[n].traits & (Trait.INTEGRAL | Trait.COUNTS)])
def test_what_is_not_marked_so_makes_fractions_or_no_numbers(name):
    fn, *args = PROGRAMS[name]
    if jnp.issubdtype(jax.tree.leaves(jax.eval_shape(fn, *args))[0].dtype, jnp.floating):
        positive = [jnp.abs(arg) + 2 for arg in whole(name)]
        out = np.concatenate([floats(name, *whole(name)), floats(name, *positive)])
        assert (np.isnan(out) | (out != np.round(out))).any()


@pytest.mark.parametrize("name", having(Trait.LINEAR))
def test_linear_sums(name):
    fn, *args = PROGRAMS[name]
    np.testing.assert_allclose(fn(*(2 * a for a in args)), 2 * fn(*args), rtol=1e-6)
    others = [jnp.flip(a) for a in args]
    both = fn(*(a + b for a, b in zip(args, others, strict=True)))
    np.testing.assert_allclose(both, fn(*args) + fn(*others), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", having(Trait.MOVES, UNARY))
def test_what_moves_computes_nothing(name):
    _, x = PROGRAMS[name]
    before, after = Counter(np.ravel(x).tolist()), Counter(np.float32(floats(name)).tolist())
    assert set(after) <= set(before)
    traits = TABLE[name].traits
    if traits & Trait.VIEW and not traits & Trait.GROWS:
        assert after == before
    assert (max(after.values()) > 1) == bool(traits & Trait.GROWS)


@pytest.mark.parametrize("name", having(Trait.GROWS))
def test_the_transpose_of_what_grows_is_a_sum(name):
    fn, x = PROGRAMS[name]
    assert np.max(jax.grad(lambda x: fn(x).sum())(x)) > 1


@pytest.mark.parametrize("name", having(Trait.NEGATES))
def test_what_negates(name):
    np.testing.assert_array_equal(floats(name), -np.ravel(np.asarray(X, np.float64)))


@pytest.mark.parametrize("name", having(Trait.EXTREMUM))
def test_an_extremum_is_one_of_its_operands(name):
    fn, x, y = PROGRAMS[name]
    out = fn(x, y)
    assert ((out == x) | (out == y)).all()
    assert (out >= x).all() == bool(TABLE[name].traits & Trait.MAXIMUM)


@pytest.mark.parametrize("name", having(Trait.SINGULAR))
def test_a_singular_derivative_divides_by_its_argument(name):
    fn = {"sqrt": lax.sqrt, "rsqrt": lax.rsqrt}.get(name, PROGRAMS[name][0])
    assert abs(jax.grad(fn)(1e-12)) > 1e5


@pytest.mark.parametrize("name", having(Trait.BOUNDED))
def test_a_derivative_is_infinite_at_an_end_of_the_domain(name):
    slope = jax.grad(PROGRAMS[name][0])
    assert max(abs(slope(end)) for end in (-1.0 + 1e-6, 1e-6, 1.0 - 1e-6, 1.0 + 1e-6)) > 100


@pytest.mark.parametrize("name", having(Trait.OF_RESULT))
def test_a_derivative_of_the_result_reads_nothing_else(name):
    fn, x = PROGRAMS[name]
    y = fn(x)
    derivative = {"tanh": lambda y: 1 - y * y, "logistic": lambda y: y * (1 - y)}[name]
    np.testing.assert_allclose(jax.grad(lambda x: fn(x).sum())(x), derivative(y), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", having(Trait.PHASE))
def test_a_phase_is_lost_where_positions_are_rounded(name):
    """Position 3005 is 3008 in bfloat16."""
    fn, *args = PROGRAMS[name]
    positions = jnp.arange(3000.0, 3100.0)
    others = [jnp.full(100, 2 * np.pi)] * (len(args) - 1)
    assert abs(fn(positions, *others) - fn(positions.astype(jnp.bfloat16).astype(jnp.float32), *others)).max() > 1


@pytest.mark.parametrize("name", having(Trait.SPREADS, UNARY))
def test_what_spreads_hands_a_mask_on(name):
    _, x = PROGRAMS[name]
    if name != "clamp":  # Between limits that the program names.
        masks = jnp.where(x > 0, jnp.float32(-1e9), jnp.float32(-2e9))
        assert np.abs(floats(name, masks)).max() > 65504


@pytest.mark.parametrize("name", having(Trait.SMOOTH, UNARY))
def test_a_smooth_derivative_at_a_rounded_number_is_a_rounded_derivative(name):
    fn, x = PROGRAMS[name]
    x = jnp.abs(x) + 0.5
    if jnp.issubdtype(jax.eval_shape(fn, x).dtype, jnp.floating):
        exact, rounded = (jax.grad(lambda x: fn(x).sum())(v) for v in (x, x.astype(jnp.bfloat16).astype(jnp.float32)))
        np.testing.assert_allclose(rounded, exact, rtol=2**-4, atol=2**-6)


def test_what_adds_many_up_is_full():
    assert {TABLE[name].rule for name in TABLE if TABLE[name].traits & Trait.REDUCES} == {Rule.FULL}


@pytest.mark.parametrize(("members", "count"), [(Rule, 8), (Want, 17)])
def test_members_are_told_apart(members, count):
    """A member with the value of another would be an alias of it."""
    assert len(list(members)) == count == len({member.value for member in members})


def test_a_row_has_its_traits_and_no_others():
    row = Row(Rule.FULL, Trait.REDUCES | Trait.PHASE)
    assert row.has(Trait.REDUCES)
    assert row.has(Trait.PHASE | Trait.SOLVES)
    assert not row.has(Trait.SOLVES)


def test_an_equation_has_the_traits_of_its_primitive():
    (eqn,) = jax.make_jaxpr(lax.sin)(X).jaxpr.eqns
    traits = TABLE["sin"].traits
    for bit in (1 << place for place in range(64)):  # The first as well as the last.
        assert has(eqn, bit) == bool(traits & bit)


@pytest.mark.parametrize(
    ("name", "trait"),
    [
        ("expensive", Trait.EXPENSIVE),
        ("linear", Trait.LINEAR),
        ("phase", Trait.PHASE),
        ("reduces", Trait.REDUCES),
        ("solves", Trait.SOLVES),
    ],
)
def test_traits_are_registered_by_name(name, trait):
    register_primitive(f"my_{name}_primitive", "full", [name])
    assert TABLE[f"my_{name}_primitive"] == Row(Rule.FULL, trait)
