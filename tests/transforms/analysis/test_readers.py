"""What an equation wants of its operands where several equations together make it special: with facts made by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from jamp._dtypes import Pair
from jamp.transforms.analysis.facts import Facts
from jamp.transforms.analysis.readers import Readers
from jamp.transforms.analysis.regimes import REGIMES, Ruled
from jamp.transforms.program.heuristics import DEFAULT
from jamp.transforms.program.want import Want
from tests.transforms.analysis.test_demand import wants_of

X = jnp.ones((16, 16))
PAIR = Pair(jnp.dtype("float32"), jnp.dtype("float16"))


def asked(operation, want, note=None, level="O2"):
    """The wants of both operands of an operation."""
    (eqn,) = jax.make_jaxpr(operation)(X, X).eqns
    facts = Facts(PAIR, DEFAULT)
    if note is not None:
        note(facts, eqn)
    readers = Readers(facts, PAIR, DEFAULT)
    return list(readers.wanted_by(eqn, [want], Ruled(REGIMES[level], ""), {}))


def wide(*positions):
    def note(facts, eqn):
        facts.wide |= {(id(eqn), position) for position in positions} | {
            (0, 0),
            (0, 1),
        }  # And those of another equation.

    return note


@pytest.mark.parametrize("positions", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("want", [Want.HALF, Want.HALF_APART, Want.FULL, Want.PHASE])
@pytest.mark.parametrize("operation", [lax.mul, lax.dot])
def test_wide_operands_are_float32_where_half_would_do(operation, want, positions):
    plain = asked(operation, want, None)
    found = asked(operation, want, wide(*positions))
    widened = want in (Want.HALF, Want.HALF_APART)
    passed = [want] * 2 if operation is lax.mul or positions else plain
    assert found == [Want.FULL if widened and index in positions else passed[index] for index in range(2)]


@pytest.mark.parametrize("set_of", ["cancelling", "means"])
def test_products_that_cancel_and_means_want_all_digits(set_of):
    def note(facts, eqn):
        getattr(facts, set_of).add(eqn.outvars[0])

    assert asked(lax.dot, Want.HALF) == [Want.HALF] * 2
    assert asked(lax.dot, Want.HALF, note) == [Want.FULL] * 2
    assert asked(lax.dot, Want.HALF, note, "O3") == [Want.HALF] * 2


@pytest.mark.parametrize("position", [0, 1])
def test_a_matrix_that_takes_differences_hands_on_what_is_wanted(position):
    def note(facts, eqn):
        facts.differences.add(eqn.invars[position])

    assert asked(lax.dot, Want.DIVISOR, note) == [Want.FULL] * 2
    assert asked(lax.dot, Want.HALF, note) == [Want.HALF] * 2


def test_a_literal_takes_no_differences():
    (eqn,) = jax.make_jaxpr(lambda x: lax.mul(x, 2.0))(jnp.float32(1)).eqns
    found = Readers(Facts(PAIR, DEFAULT), PAIR, DEFAULT).wanted_by(eqn, [Want.HALF], Ruled(REGIMES["O2"], ""), {})
    assert list(found) == [Want.HALF] * 2


@pytest.mark.parametrize(
    ("adds", "want"),
    [
        (lambda x: lax.cumsum(x, 1), Want.PHASE),  # Frequencies.
        (lambda x: lax.reduce_sum(x, (1,)), Want.FULL),
        (lambda x: lax.cumlogsumexp(x, 1), Want.FULL),
        (lambda x: lax.cumprod(x, 1), Want.BOUND),
    ],
)
def test_what_is_added_up_to_a_phase_is_one(adds, want):
    assert wants_of(lambda x: lax.sin(adds(x)), X) == (want,)


def search(x, *, results, **others):
    """An unknown primitive."""
    made = Primitive("my_search")
    made.multiple_results = True
    made.def_abstract_eval(lambda *_: [x.aval.update(dtype=jnp.dtype(dtype)) for dtype in results])
    return made.bind(x, *others.values())


@pytest.mark.parametrize(
    ("results", "want"),
    [
        (("int32",), Want.PHASE),
        (("int32", "int8"), Want.PHASE),
        (("int32", "float32"), Want.FULL),
        (("float32",), Want.FULL),
        (("bool",), Want.FULL),
    ],
)
def test_what_makes_nothing_but_integers_of_numbers_makes_indices(results, want):
    assert wants_of(lambda x: search(x, results=results), X) == (want,)
    assert wants_of(lambda x, i: search(x, index=i, results=results), X, X.astype(int)) == (want, want)
    assert wants_of(lambda i: search(i, results=results), X.astype(int)) == (Want.FULL,)
    assert wants_of(lambda x: search(x, results=results), X, level="O3") == (Want.FULL,)


@pytest.mark.parametrize(("level", "want"), [("O1", Want.PHASE), ("O2", Want.PHASE), ("O3", Want.HALF)])
def test_an_index_is_wanted_as_a_phase(level, want):
    assert wants_of(lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), X, jnp.int32(1), level=level) == (
        Want.HALF,
        want,
    )


def test_an_order_is_an_index_and_the_best_is_none():
    def chosen(order):
        return lambda x, y: y.at[order(x)].get(mode="clip")

    by_sorting = chosen(lambda x: lax.sort((x, lax.iota(jnp.int32, 16)), num_keys=1)[1])
    assert wants_of(by_sorting, X[0], X) == (Want.PHASE, Want.HALF)
    assert wants_of(chosen(lambda x: lax.argmax(x, 0, jnp.int32)), X[0], X) == (Want.FULL, Want.HALF)


def test_the_exponential_of_a_complex_number_turns_by_an_angle():
    assert wants_of(lambda x: lax.exp(lax.complex(x, x)), X) == (Want.PHASE,)
    assert wants_of(lambda x: lax.dot(lax.complex(x, x), lax.complex(x, x)), X) == (Want.FULL,)


def test_a_product_with_a_matrix_that_the_program_makes_adds_frequencies_up():
    def lower():
        return (lax.iota(jnp.int32, 16)[:, None] >= lax.iota(jnp.int32, 16)).astype(jnp.float32)

    assert wants_of(lambda x: lax.sin(x @ lower()), X) == (Want.PHASE,)
    assert wants_of(lambda x: lax.sin(lower() @ x), X) == (Want.PHASE,)
    assert wants_of(lambda x, w: lax.sin(x @ w), X, X) == (Want.HALF, Want.HALF)


@pytest.mark.parametrize(("level", "want"), [("O2", Want.DIVISOR), ("O3", Want.FULL)])
def test_what_is_solved_for_is_a_divisor(level, want):
    assert wants_of(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), X, level=level) == (want,)


def test_what_is_as_traced_hands_on_what_is_wanted_if_it_moves():
    assert wants_of(lambda x: lax.reduce_precision(x, 8, 10), X, want=Want.DIVISOR) == (Want.DIVISOR,)
    assert wants_of(lambda x: lax.nextafter(x, x), X, want=Want.DIVISOR) == (Want.FULL,)


def test_results_of_products_alone_are_points():
    def note(facts, eqn):
        facts.points.add(eqn.outvars[0])

    assert asked(lax.dot, Want.HALF, note) == [Want.DIVISOR] * 2
    assert asked(lax.mul, Want.HALF, note) == [Want.HALF] * 2


@pytest.mark.parametrize("wants", [(Want.FULL, Want.HALF), (Want.HALF, Want.FULL), (Want.NONE, Want.FULL)])
def test_one_result_in_float32_is_enough(wants):
    assert wants_of(lambda x: lax.split(x, (8, 8), 1), X, want=wants) == (Want.FULL,)


@pytest.mark.parametrize("operation", [lax.add, lax.sub])
@pytest.mark.parametrize("position", [0, 1])
def test_beside_a_diagonal_matrix_nothing_is_rounded(operation, position):
    def note(facts, eqn):
        facts.diagonals.add(eqn.invars[position])

    assert asked(operation, Want.HALF) == [Want.HALF] * 2
    assert asked(operation, Want.HALF, note) == [Want.FULL] * 2
    assert asked(operation, Want.HALF_APART, note)[0] == Want.FULL_APART
    assert asked(operation, Want.DIVISOR, note) == asked(operation, Want.DIVISOR)
    assert asked(operation, Want.SCORE, note) == [Want.SCORE] * 2  # A mask.
    assert asked(operation, Want.HALF, note, "O3") == [Want.HALF] * 2
    assert asked(lax.mul, Want.HALF, note) == [Want.HALF] * 2


def test_products_that_contract_nothing_weigh_and_move_nothing():
    def table():
        return lax.iota(jnp.float32, 32).reshape(16, 2)

    assert wants_of(lambda x: jnp.einsum("ab,cb->acb", x, table().T[:, :16]), X, want=Want.HALF) == (Want.HALF,)
    assert wants_of(lambda x: jnp.einsum("ab,bc->ac", x, table()), X, want=Want.HALF) == (Want.FULL,)
