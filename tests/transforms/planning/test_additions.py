"""What is added up: sums, numbers far from zero, identities and points, and the half data that meets them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._dtypes import FLOAT16, FLOAT32
from jamp._primitives import Trait
from jamp.transforms._traced import Traced
from jamp.transforms.program.flow import Flow, Root
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.scale import Range
from jamp.transforms.program.want import Want
from tests.transforms.planning.decided import DATA, STATES, X, decide, equation, own_primitive


def test_a_sum_of_a_loop_written_out_is_float32():
    eqn = equation(lax.add, X, X)
    half = (STATES["half"], STATES["half"])
    root = Root("sum", 1)
    assert decide(eqn, half).out[0].kind == Kind.HALF
    step = decide(eqn, half, sums={eqn.outvars[0]: root})
    assert (step.out[0].kind, step.out[0].dtype) == (Kind.FULL, FLOAT32)
    assert decide(eqn, half, "O3", sums={eqn.outvars[0]: root}).out[0].kind == Kind.HALF
    assert decide(eqn, (STATES["weak"],) * 2, sums={eqn.outvars[0]: root}).out[0].kind == Kind.WEAK


def test_a_number_far_from_zero_moves_data_in_float32():
    far, half = Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.FAR), STATES["half"]
    for level, kind in (("OD", Kind.LAZY), ("O1", Kind.LAZY), ("O2", Kind.ISLAND), ("O3", Kind.HALF)):
        assert decide(equation(lax.add, X, X), (half, far), level).out[0].kind == kind
        assert decide(equation(lax.sub, X, X), (far, half), level).out[0].kind == kind
    assert decide(equation(lax.mul, X, X), (half, far)).out[0].kind == Kind.HALF
    assert decide(equation(lax.add, X, X), (STATES["lazy"], far)).out[0].kind == Kind.LAZY
    assert decide(equation(lax.add, X, X), (STATES["stat"], far)).out[0].kind == Kind.ISLAND
    own = Flow(FLOAT16, Kind.HALF, 1, marks=Mark.FAR)  # The user's own half number.
    assert decide(equation(lax.add, X, X), (half, own)).out[0].kind == Kind.HALF


@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
def test_a_number_with_more_digits_than_half_has_is_added_as_it_is(level):
    digits, half = STATES["digits"], STATES["half"]
    for operation, ins in ((lax.add, (half, digits)), (lax.sub, (half, digits)), (lax.sub, (digits, half))):
        step = decide(equation(operation, X, X), ins, level)
        assert step.out[0].kind == Kind.HALF
        assert any(step.out_casts) == (level != "O3")
    # An argument may be a mask, which has to saturate; a number of few digits loses nothing.
    for other in ("scalar", "weak", "huge"):
        assert not any(decide(equation(lax.add, X, X), (half, STATES[other])).out_casts)


@pytest.mark.parametrize("level", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda h: h - np.log(2.0), -math.log(2)),
        (lambda h: h - jnp.log(2.0), -math.log(2)),
        (lambda h: 1 / 3 + h, 1 / 3),
        (lambda h: h + jnp.float32(2.0) / 3, 2 / 3),
        (lambda h: h + jnp.sqrt(jnp.arange(4.0))[3], math.sqrt(3)),
        (lambda h: jax.vmap(lambda row: row + 0.1)(h), 0.1),
    ],
)
def test_what_moves_data_does_so_without_a_bias(level, change, number):
    """As the shift of `softplus(x) - log(2)`: rounded, it was off by 0.0017 in every element."""
    h = jnp.arange(64.0).reshape(4, 16) / 64  # Exact in both half dtypes.
    moved = jamp.cast_fn(lambda x, w: change(x @ w) @ w, level)(h, jnp.eye(16))
    half = jamp.get_policy(level).compute_dtype
    expected = (np.asarray(h, np.float64) + number).astype(np.float32).astype(half).astype(np.float32)
    assert np.array_equal(moved, expected)


def test_a_number_far_from_zero_moves_any_of_several_terms():
    made = own_primitive("my_sum_of_three", "promote", lambda x, y, z: x, Trait.ADDS)
    far = Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.FAR)
    eqn = equation(made.bind, X, X, X)
    for terms, kind in ((("half", "lazy"), Kind.ISLAND), (("half", "half"), Kind.ISLAND), (("lazy",) * 2, Kind.LAZY)):
        assert decide(eqn, (*(STATES[term] for term in terms), far)).out[0].kind == kind


def sum_of(shape: tuple[int, ...], one: Flow, other: Flow, level: str = "O2", want: Want = Want.HALF) -> Kind:
    """The kind of the sum of two arrays, which is the same in either order."""
    array = jnp.ones(shape)
    eqn, orders = equation(lax.add, array, array), ((one, other), (other, one))
    (kind,) = {decide(eqn, ins, level, want).out[0].kind for ins in orders}
    return kind


FRAME = Flow(FLOAT32, Kind.LAZY, 64, marks=Mark.FRAME)
SQUARE = (8, 8)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("half", Kind.STAT),
        ("small", Kind.STAT),
        ("island", Kind.STAT),
        ("sum", Kind.FULL),
        ("big stat", Kind.STAT),
        ("lazy", Kind.LAZY),
        ("weak", Kind.LAZY),
    ],
)
def test_what_is_added_to_an_identity_is_float32(other, kind):
    assert sum_of(SQUARE, FRAME, STATES[other]) == kind


def test_half_data_is_added_to_other_matrices_in_half():
    matrix, half, tall = FRAME.without(Mark.FRAME), STATES["half"], (16, 4)
    assert sum_of(SQUARE, matrix, half) == sum_of(SQUARE, half, half) == Kind.HALF
    assert sum_of(tall, FRAME, half) == Kind.HALF  # No identity.


def test_levels_at_which_half_data_is_added_to_an_identity_in_float32():
    frame, half = FRAME._replace(kind=Kind.WEAK), STATES["half"]
    kinds = {"O1": Kind.LAZY, "O2": Kind.STAT, "O3": Kind.HALF, "promote": Kind.LAZY}
    assert {level: sum_of(SQUARE, frame, half, level) for level in kinds} == kinds


def test_a_mask_of_scores_is_no_identity():
    """Of scores a softmax makes weights. Without demand, where what readers want counts for nothing, they are half."""
    frame, half = FRAME._replace(kind=Kind.WEAK), STATES["half"]
    assert sum_of(SQUARE, frame, half, "promote", Want.SCORE) == Kind.HALF
    assert sum_of(SQUARE, frame, half, "promote", Want.FULL) == Kind.LAZY
    assert sum_of(SQUARE, FRAME, half, want=Want.SCORE) == Kind.ISLAND
    assert sum_of(SQUARE, FRAME, half, want=Want.FULL) == Kind.STAT


def test_a_matrix_whose_diagonal_is_added_to_in_place_is_float32():
    """As `x + eye(16)` is: its trace, or a product of two, would lose what lies beside the diagonal."""

    def program(x, w):
        diagonal = jnp.arange(16)
        return (x @ w).at[diagonal, diagonal].add(1.0), jnp.exp(x @ w).at[diagonal].add(1.0)

    plan = Traced(program, (jnp.ones((16, 16)), jnp.ones((16, 16))), {}).plan(jamp.get_policy("O2:bfloat16,o=bfloat16"))
    added = [step.out[0] for step in plan.steps if step.eqn.primitive.name == "scatter-add"]
    assert [(flow.kind, flow.dtype) for flow in added] == [(Kind.STAT, FLOAT32), (Kind.ISLAND, FLOAT32)]


POINTS, SHIFT = Flow(FLOAT32, Kind.LAZY, 96, marks=DATA), Flow(FLOAT16, Kind.HALF, 96, marks=DATA)
ISLAND = POINTS._replace(kind=Kind.ISLAND)
SPACE = (32, 3)


@pytest.mark.parametrize("shape", [SPACE, (48, 2), (4, 8, 3), (96, 1)], ids=str)
def test_points_that_half_data_moves_are_float32(shape):
    assert sum_of(shape, POINTS, SHIFT) == Kind.STAT


@pytest.mark.parametrize("shape", [(96,), (24, 4), (3, 32)], ids=str)
def test_points_have_as_few_columns_as_space(shape):
    assert sum_of(shape, POINTS, SHIFT) == Kind.HALF


@pytest.mark.parametrize(
    ("points", "shift", "kind"),
    [
        (POINTS, ISLAND, Kind.STAT),
        (POINTS._replace(kind=Kind.STAT), SHIFT, Kind.STAT),  # Moved before.
        (POINTS._replace(kind=Kind.FULL, roots=frozenset({Root("carry", 1)})), SHIFT, Kind.FULL),
        (ISLAND._replace(marks=DATA | Mark.SOLUTION), SHIFT, Kind.STAT),  # Turned by a frame.
        (ISLAND, SHIFT, Kind.HALF),  # Data that half data is added to.
        (ISLAND, ISLAND, Kind.ISLAND),
        (POINTS._replace(size=3), SHIFT, Kind.HALF),  # A bias.
        (POINTS, SHIFT._replace(size=3), Kind.STAT),
        (POINTS, SHIFT._replace(marks=DATA | Mark.TANGENT), Kind.HALF),
        (POINTS, POINTS, Kind.LAZY),
        (SHIFT, SHIFT, Kind.HALF),
    ],
)
def test_what_moves_which_points(points, shift, kind):
    assert sum_of(SPACE, points, shift) == kind


def test_where_points_are_moved_in_float32():
    kinds = {"O1": Kind.LAZY, "O2": Kind.STAT, "O3": Kind.HALF}
    assert {level: sum_of(SPACE, POINTS, SHIFT, level) for level in kinds} == kinds
    assert sum_of(SPACE, POINTS, SHIFT, want=Want.SCORE) == Kind.ISLAND
    assert sum_of(SPACE, POINTS, SHIFT, want=Want.FULL) == Kind.STAT
    points = jnp.ones(SPACE)
    assert decide(equation(lax.sub, points, points), (POINTS, SHIFT)).out[0].kind == Kind.STAT
    assert decide(equation(lax.mul, points, points), (POINTS, SHIFT)).out[0].kind == Kind.HALF


# What is added, and how firm the float32 sum is where a reader takes it apart: one of a large part keeps its digits.
TAKEN_APART = {
    "data and an argument": ("half", "lazy", Kind.STAT),
    "an island and an argument": ("island", "lazy", Kind.STAT),
    "data and a statistic as large": ("half", "big stat", Kind.STAT),
    "data and one number that is an argument": ("half", "scalar", Kind.ISLAND),
    "data and data": ("half", "half", Kind.ISLAND),
    "data and a number of the program": ("half", "weak", Kind.STAT),
}


@pytest.mark.parametrize(("one", "other", "kind"), TAKEN_APART.values(), ids=TAKEN_APART)
@pytest.mark.parametrize("operation", [lax.add, lax.sub])
def test_what_is_taken_apart_is_added_in_float32(one, other, kind, operation):
    eqn = equation(operation, X, X)
    for states in ((STATES[one], STATES[other]), (STATES[other], STATES[one])):
        step = decide(eqn, states, want=Want.HALF_APART)
        assert (step.out[0].dtype, step.out[0].kind) == (FLOAT32, kind)
    product = decide(equation(lax.mul, X, X), (STATES[one], STATES["lazy"]), want=Want.HALF_APART).out[0]
    assert (product.dtype, product.kind) == (FLOAT32, Kind.ISLAND)


@pytest.mark.parametrize("operation", [lax.tanh, lax.logistic, lax.erf, lax.neg, lax.abs])
def test_functions_are_computed_in_float32_where_they_are_taken_apart(operation):
    step = decide(equation(operation, X), (STATES["half"],), want=Want.HALF_APART)
    assert (step.out[0].dtype, step.out[0].kind) == (FLOAT32, Kind.ISLAND)
    assert decide(equation(operation, X), (STATES["half"],)).out[0].dtype == FLOAT16


@pytest.mark.parametrize(
    ("number", "kind"), [(0.5, Kind.STAT), (-300.0, Kind.STAT), (0.49, Kind.ISLAND), (0.0, Kind.ISLAND)]
)
def test_a_number_that_is_taken_off_again_is_no_epsilon(number, kind):
    eqn = equation(lambda x: x + number, X)
    step = decide(eqn, (STATES["half"], STATES["weak"]), want=Want.HALF_APART)
    assert (step.out[0].dtype, step.out[0].kind) == (FLOAT32, kind)
    assert decide(eqn, (STATES["half"], STATES["weak"])).out[0].dtype == FLOAT16
    # Where there is no data, nothing is lost.
    assert decide(eqn, (STATES["lazy"], STATES["weak"]), want=Want.HALF_APART).out[0].kind == Kind.LAZY


def test_a_sum_stays_one_where_it_is_taken_apart():
    step = decide(equation(lax.add, X, X), (STATES["sum"], STATES["half"]), want=Want.HALF_APART)
    assert step.out[0].kind == Kind.FULL
    both = decide(equation(lax.sub, X, X), (STATES["lazy"], STATES["half"]), "O1", want=Want.HALF_APART)
    assert both.out[0].dtype == FLOAT32


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (2.0**-26, Kind.ISLAND),
        (-(2.0**-26), Kind.ISLAND),
        (0.99 * 2**-25, Kind.ISLAND),
        (2.0**-25, Kind.HALF),
        (0.0, Kind.HALF),
        (1.0, Kind.HALF),
    ],
)
def test_a_number_that_half_takes_for_zero_is_added_in_float32(number, kind):
    eqn, epsilon = equation(lax.add, X, X), Flow(FLOAT32, Kind.WEAK, 1, number=Range(number, number))
    for ins in ((STATES["half"], epsilon), (epsilon, STATES["half"])):
        assert decide(eqn, ins).out[0].kind == kind
        assert decide(eqn, ins, "O3").out[0].kind == Kind.HALF
    assert decide(equation(lax.mul, X, X), (STATES["half"], epsilon)).out[0].kind == Kind.HALF


MOVED = {
    "1 + h / 8": (lambda h: 1.0 + h / 8.0, True),
    "1 + h / 7": (lambda h: 1.0 + h / 7.0, False),
    "h / 8 - 1": (lambda h: h / 8.0 - 1.0, True),
    "1 + h * 0.125": (lambda h: 1.0 + h * 0.125, True),
    "1 + 0.125 h": (lambda h: 1.0 + 0.125 * h, True),
    "1 + -(0.125 h)": (lambda h: 1.0 + -(0.125 * h), True),
    "1 + half of 0.125 h": (lambda h: (0.125 * h).astype(jnp.bfloat16) + 1.0, True),
    "1 + half of 0.13 h": (lambda h: (0.13 * h).astype(jnp.bfloat16) + 1.0, False),
    "1 + 0.13 h": (lambda h: 1.0 + 0.13 * h, False),
    "1 + 8 h": (lambda h: 1.0 + 8.0 * h, False),
    "1 + 0 h": (lambda h: 1.0 + 0.0 * h, False),
    "1 + h / 2 / 2 / 2": (lambda h: 1.0 + h / 2.0 / 2.0 / 2.0, True),
    "1 + h after 4 scalings": (lambda h: 1.0 + h * 0.5 * 0.75 * 0.5 * 0.5, True),
    "1 + h after 5 scalings": (lambda h: 1.0 + h * 0.25 * 0.75 * 0.75 * 0.75 * 0.75, False),
    "1 + the larger of h and 0.1": (lambda h: 1.0 + jnp.maximum(h, 0.1), False),
    "an array + h / 8": (lambda h: h / 8.0 + np.linspace(1, 2, 16, dtype=np.float32), True),
    "an array of small numbers + h / 8": (lambda h: h / 8.0 + np.linspace(0.1, 0.2, 16, dtype=np.float32), False),
}


@pytest.mark.parametrize(("move", "in_float32"), MOVED.values(), ids=MOVED)
def test_data_is_far_from_zero_beside_what_it_was_scaled_down_to(move, in_float32):
    policy = jamp.get_policy("O2:bfloat16,o=bfloat16")
    plan = Traced(lambda x, w: move(x @ w), (X, jnp.ones((16, 16))), {}).plan(policy)
    (added,) = [step for step in plan.steps if step.eqn.primitive.name in ("add", "sub")]
    assert (added.out[0].kind == Kind.ISLAND) is in_float32
