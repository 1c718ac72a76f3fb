"""The states that values come in with, and where their marks go."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Pair
from jamp._primitives import NO_TRAITS, Trait
from jamp.transforms.program.flow import Flow, beyond_half, inside, literal_flow, num_elements, traced_flow, united
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import common_scope
from jamp.transforms.program.marks import NO_MARKS, TRANSMISSION, Mark, transmit
from jamp.transforms.program.scale import Range

TABLE = Path(__file__).parent / "marks.txt"
BF16, FP16, WIDE = Pair(FLOAT32, BFLOAT16), Pair(FLOAT32, FLOAT16), Pair(FLOAT64, FLOAT32)
LETTERS = {Kind.WEAK: "W", Kind.LAZY: "L", Kind.HALF: "H", Kind.ISLAND: "I", Kind.STAT: "S", Kind.FULL: "F"}


def aval(*shape, dtype=FLOAT32):
    return ShapedArray(shape, dtype)


def test_where_marks_go():
    """By trait of a primitive and by mark of an operand, the kinds of results that have it as well.

    Traits without a row are as none. `JAMP_UPDATE_PLANS=1` writes the table anew, as it does for plans; read the diff
    before you commit it.
    """

    def row(trait: int) -> str:
        goes = ["".join(LETTERS[kind] for kind in Kind if transmit(mark, trait, kind) & mark) or "-" for mark in Mark]
        return " ".join(f"{kinds:8}" for kinds in goes).rstrip()

    lines = [f"{'':17}" + " ".join(f"{mark.name:8}" for mark in Mark).rstrip(), f"{'none':17}{row(NO_TRAITS)}"]
    traits = {name: bit for name, bit in vars(Trait).items() if name.isupper()}
    lines += [f"{name.lower():17}{row(bit)}" for name, bit in traits.items() if row(bit) != row(NO_TRAITS)]
    text = "\n".join(lines) + "\n"
    if os.environ.get("JAMP_UPDATE_PLANS"):
        TABLE.write_text(text)
    assert text == TABLE.read_text()


def test_marks_go_one_by_one():
    assert set(TRANSMISSION) == set(Mark)
    for kind in Kind:
        for traits in (NO_TRAITS, Trait.SPREADS, Trait.MOVES | Trait.INTEGRAL, Trait.SPREADS | Trait.COUNTS):
            born = transmit(NO_MARKS, traits, kind)
            assert born == (NO_MARKS if traits & (Trait.INTEGRAL | Trait.COUNTS) else Mark.FRACTION)
            for a in Mark:
                alone = transmit(a, traits, kind)
                assert not alone & ~(a | born)
                assert transmit(alone, traits, kind) == alone
                assert all(transmit(a | b, traits, kind) == alone | transmit(b, traits, kind) for b in Mark)


GIVEN, STORED, REPEATED, HUGE = Mark.GIVEN, Mark.STORED, Mark.REPEATED, Mark.HUGE


@pytest.mark.parametrize(
    ("operands", "together"),
    [
        ([], NO_MARKS),
        ([None], NO_MARKS),
        ([GIVEN | STORED], GIVEN | STORED),
        ([GIVEN | STORED, GIVEN | STORED | REPEATED], GIVEN | STORED),  # All that are given have to be.
        ([GIVEN | STORED, GIVEN], GIVEN),
        ([GIVEN | STORED | REPEATED, NO_MARKS], GIVEN | STORED | REPEATED),  # A number that the program writes.
        ([GIVEN | STORED, None], GIVEN | STORED),
        ([HUGE | STORED, Mark.QUOTIENT | GIVEN], HUGE | Mark.QUOTIENT | GIVEN),
        ([REPEATED], REPEATED),
        ([Mark.SIGNED, NO_MARKS], Mark.SIGNED),
        ([Mark.SIGNED, GIVEN], GIVEN),  # Numbers that are multiplied with data take no differences.
    ],
)
def test_marks_of_all_operands(operands, together):
    flows = [None if marks is None else Flow(FLOAT32, Kind.LAZY, 4, marks=marks) for marks in operands]
    assert united(flows) == together
    assert united(flows[::-1]) == together


@pytest.mark.parametrize(("size", "together"), [(1, GIVEN | STORED), (2, GIVEN)])
def test_weights_are_stored_where_a_single_number_scales_them(size, together):
    weights, scale = Flow(FLOAT32, Kind.LAZY, 4, marks=GIVEN | STORED), Flow(FLOAT32, Kind.LAZY, size, marks=GIVEN)
    assert united([weights, scale]) == united([scale, weights]) == together


def test_number_of_elements():
    assert num_elements(aval()) == 1
    assert num_elements(aval(3, 4)) == 12
    assert num_elements(object()) == 1
    (batch,) = jax.export.symbolic_shape("b")
    assert num_elements(aval(batch, 3)) == 3 * 64  # An unknown counts for 64.
    assert type(num_elements(aval(np.int64(3)))) is int


DATA = Mark.GIVEN | Mark.TRAINED | Mark.FRACTION | Mark.STORED


@pytest.mark.parametrize(
    ("value", "kind", "pair", "expected"),
    [
        (aval(3, 4), Kind.LAZY, BF16, Flow(FLOAT32, Kind.LAZY, 12, "in", DATA)),
        (aval(1), Kind.LAZY, BF16, Flow(FLOAT32, Kind.LAZY, 1, "in", DATA | Mark.ROUNDS)),
        (aval(3), Kind.WEAK, BF16, Flow(FLOAT32, Kind.WEAK, 3, "in")),
        (aval(), Kind.WEAK, BF16, Flow(FLOAT32, Kind.WEAK, 1, "in", Mark.ROUNDS)),
        (aval(3, dtype=FLOAT16), Kind.LAZY, BF16, Flow(FLOAT16, Kind.HALF, 3, "in", DATA)),
        (aval(dtype=BFLOAT16), Kind.STAT, BF16, Flow(BFLOAT16, Kind.HALF, 1, "in", DATA)),
        (aval(3), Kind.STAT, WIDE, Flow(FLOAT32, Kind.HALF, 3, "in", DATA)),
        (aval(3, dtype=FLOAT64), Kind.STAT, WIDE, Flow(FLOAT64, Kind.STAT, 3, "in", DATA)),
        (aval(3, dtype=np.int32), Kind.LAZY, BF16, None),
        (aval(3, dtype=jnp.complex64), Kind.LAZY, BF16, None),
        (aval(3, dtype=FLOAT64), Kind.LAZY, BF16, None),
    ],
)
def test_a_value_at_its_traced_dtype(value, kind, pair, expected):
    assert traced_flow(value, kind, pair, "in") == expected
    marked = None if expected is None else expected._replace(marks=Mark.FAR, scope="")
    assert traced_flow(value, kind, pair, marks=Mark.FAR) == marked


@pytest.mark.parametrize(
    ("value", "pair", "marks"),
    [
        (2.0, BF16, NO_MARKS),
        (0.0, BF16, NO_MARKS),
        (-3.0, FP16, Mark.SIGNED),
        (0.5, BF16, Mark.FRACTION),
        (0.1, BF16, Mark.FRACTION | Mark.ROUNDS),
        (257.0, BF16, Mark.ROUNDS),
        (257.0, FP16, NO_MARKS),
        (-1e9, BF16, Mark.ROUNDS | Mark.SIGNED),
        (-1e9, FP16, Mark.ROUNDS | Mark.HUGE | Mark.SIGNED),
        (65504.0, FP16, NO_MARKS),
        (65536.0, FP16, Mark.ROUNDS | Mark.HUGE),
        (2.0**-15, FP16, Mark.FRACTION | Mark.HUGE),  # No normal number of float16.
        (2.0**-14, FP16, Mark.FRACTION),
        (np.inf, FP16, Mark.FRACTION),
        (np.nan, FP16, Mark.FRACTION),
        ([1.0, 2.0, -np.inf], FP16, Mark.FRACTION | Mark.SIGNED),
        ([1.0, 0.1, 1e9], FP16, Mark.FRACTION | Mark.ROUNDS | Mark.HUGE),
        ([1.0, 2.5], BF16, Mark.FRACTION),
        (2.0**24 + 1, WIDE, Mark.ROUNDS),
        (1e300, WIDE, Mark.ROUNDS | Mark.HUGE),
    ],
)
def test_a_number_that_the_program_writes(value, pair, marks):
    shape = np.shape(value)
    flow = literal_flow(aval(*shape, dtype=pair.wide), value, Kind.WEAK, pair)
    assert flow._replace(scale=0, number=None) == Flow(pair.wide, Kind.WEAK, max(len(shape) and shape[0], 1), "", marks)


@pytest.mark.parametrize(
    ("value", "pair", "scale"),
    [
        (1e6, BF16, 0),
        (1e6, FP16, 20),
        (-1e6, FP16, 20),
        (65504.0, FP16, 0),
        (2.0**-14, FP16, 0),
        (2.0**-15, FP16, -15),
        (0.0, FP16, 0),
        (np.inf, FP16, 0),
        ([1e6, 0.0, 1e-9], FP16, -30),
        (1e30, WIDE, 0),
        (1e300, WIDE, 997),
    ],
)
def test_the_scale_of_a_number_is_that_of_one_beyond_the_half_range(value, pair, scale):
    assert literal_flow(aval(*np.shape(value), dtype=pair.wide), value, Kind.WEAK, pair).scale == scale


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2.0, Range(2.0, 2.0)),
        (1e30, Range(1e30, 1e30)),
        (np.inf, Range(np.inf, np.inf)),
        (np.nan, None),
        ([3.0, -1.0, 2.0], Range(-1.0, 3.0, (3.0, -1.0, 2.0))),
        (np.arange(65.0), Range(0.0, 64.0)),
        ([], None),
    ],
)
def test_numbers_are_known_where_half_lacks_range(value, number):
    shape = np.shape(value)
    for pair, known in ((FP16, number), (WIDE, number), (BF16, None)):
        assert literal_flow(aval(*shape, dtype=pair.wide), value, Kind.WEAK, pair).number == known


@pytest.mark.parametrize(
    ("array", "scale", "number"),
    [
        ([1.0, -1e6], 20, Range(-1e6, 1.0, (1.0, -1e6))),
        ([2.0**-16, 0.0], -16, Range(0.0, 2.0**-16, (2.0**-16, 0.0))),
        ([1.0, -65504.0], 0, None),
        ([1e6, np.nan], 0, None),  # Nothing is known of it.
        ([], 0, None),
        (None, 0, None),
    ],
)
def test_an_array_of_which_half_does_not_hold_the_largest_number_is_known(array, scale, number):
    flow = Flow(FLOAT32, Kind.LAZY, 2, marks=GIVEN | Mark.TRAINED)
    known = flow._replace(marks=flow.marks | HUGE, scale=scale, number=number) if scale else flow
    assert beyond_half(flow, None if array is None else np.array(array), FP16) == known


def test_a_number_that_moves_data_far():
    for value, is_far in ((15.0, False), (16.0, True), (-16.0, True), ([1.0, 17.0], True), (np.inf, False)):
        flow = literal_flow(aval(*np.shape(value)), value, Kind.WEAK, BF16, far=16.0)
        assert flow.has(Mark.FAR) == is_far, value
    assert not literal_flow(aval(), 1e30, Kind.LAZY, BF16).has(Mark.FAR)
    assert literal_flow(aval(dtype=np.int32), 3, Kind.WEAK, BF16) is None


SCOPES = ("", "a", "b", "ab", "a/a", "a/b", "b/a", "ab/a", "a/b/a", "a/b/b", "a/ab")


def test_a_scope_lies_in_those_whose_parts_it_begins_with():
    for scope in SCOPES:
        for outer in SCOPES:
            parts = outer.split("/") if outer else []
            assert inside(scope, outer) == (scope.split("/")[: len(parts)] == parts), (scope, outer)


def test_a_common_scope_is_the_innermost_that_encloses_all():
    for a in SCOPES:
        assert common_scope([a]) == a
        for b in SCOPES:
            enclosing = [scope for scope in SCOPES if inside(a, scope) and inside(b, scope)]
            assert common_scope([a, b]) == common_scope([a, b, b]) == max(enclosing, key=len)
    assert common_scope(["a/b/a", "a/b/b", "a/ab"]) == "a"


def test_marks_are_given_and_taken_away():
    flow = Flow(FLOAT32, Kind.ISLAND, 4, marks=Mark.HUGE | Mark.GIVEN)
    assert flow.with_marks(Mark.TANGENT, Mark.HUGE).marks == Mark.GIVEN | Mark.TANGENT
    assert flow.with_marks(Mark.HUGE, Mark.HUGE).marks == Mark.GIVEN
    assert flow.with_marks(Mark.GIVEN, Mark.TANGENT) is flow
