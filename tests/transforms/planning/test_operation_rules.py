"""Rules of single operations that their decision tables do not hold: of results, of their marks, of their rewrites."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jamp._dtypes import FLOAT16, FLOAT32
from jamp._primitives import Trait
from jamp.transforms.planning import operations
from jamp.transforms.planning.moves import plan_follow
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark
from jamp.transforms.program.plan import Cast
from jamp.transforms.program.rewrites import Scatter
from jamp.transforms.program.want import Want
from tests.transforms.planning.decided import DATA, STATES, X, decide, equation, own_primitive, site_of

INDEX = jnp.zeros((3, 1), jnp.int32)
_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("state", ["half", "lazy", "sum"])
def test_a_scatter_of_the_users_half_data_is_done_in_float32(level, state):
    """Its parameters hold a function that was traced in half."""
    narrow = equation(lambda x, y: lax.scatter_add(x, INDEX, y[:3], _ROWS), X.astype(FLOAT16), X.astype(FLOAT16))
    wide = equation(lambda x, y: lax.scatter_add(x, INDEX, y[:3], _ROWS), X, X)
    ins = (STATES[state], None, STATES[state])
    assert isinstance(decide(narrow, ins, level).rewrite, Scatter)
    assert not isinstance(decide(wide, ins, level).rewrite, Scatter)
    out = decide(narrow, ins, level).out[0]
    assert out.kind == (
        Kind.HALF if level == "O3" else {"half": Kind.ISLAND, "lazy": Kind.LAZY, "sum": Kind.FULL}[state]
    )


def test_data_that_is_scattered_into_a_sum_is_one():
    eqn = equation(lambda x, y: lax.scatter_add(x, INDEX, y[:3], _ROWS), X, X)
    assert decide(eqn, (STATES["sum"], None, STATES["half"])).out[0].kind == Kind.FULL


def test_what_replaces_elements_by_no_function_is_no_scatter():
    made = own_primitive("my_replaced_sums", "full", lambda x, y: x, Trait.REDUCES | Trait.REPLACES)
    narrow = X.astype(FLOAT16)
    step = decide(equation(made.bind, narrow, narrow), (STATES["half"], STATES["half"]))
    assert (step.rewrite, step.out[0].kind) == (None, Kind.ISLAND)


@pytest.mark.parametrize(("rows", "raised"), [(7, False), (8, True)])
def test_a_gather_is_added_up_in_float32_from_many_readers_on(rows, raised):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    index = jnp.zeros((rows, 1), jnp.int32)
    eqn = equation(lambda x: lax.gather(x, index, numbers, (1, 16)), X)
    assert any(decide(eqn, (STATES["half"], None)).out_casts) == raised
    assert not any(decide(eqn, (STATES["half"], None), "O3").out_casts)
    bare = STATES["half"].without(Mark.TRAINED)  # Nobody differentiates by it.
    assert not any(decide(eqn, (bare, None)).out_casts)
    tangent = STATES["half"]._replace(marks=DATA | Mark.TANGENT)
    assert not any(decide(eqn, (tangent, None)).out_casts)
    assert len(decide(eqn, (STATES["half"], None)).casts) == 2


@pytest.mark.parametrize("operation", [lax.add, lax.sub, lax.mul, lax.max, lax.min])
@pytest.mark.parametrize("state", ["half", "lazy"])
@pytest.mark.parametrize(("rows", "spread"), [(7, False), (8, True)])
def test_what_an_operation_has_many_readers_of_is_broadcast_in_float32(operation, state, rows, spread):
    """An argument, as it would be without, saturates: it may be a mask."""
    x, row = jnp.ones((rows, 16)), jnp.ones((1, 16))
    eqn, ins = equation(operation, x, row), (STATES["half"], STATES[state]._replace(size=16))
    step = decide(eqn, ins)
    if operation is lax.sub and state == "lazy":  # A statistic, by which data is centred.
        assert step.out[0].dtype == FLOAT32
        return
    assert step.out[0].kind == Kind.HALF
    assert (step.rewrite is not None) is spread
    if spread:
        assert step.rewrite.spread == (None, Cast(FLOAT16, saturate=state == "lazy"))
        assert step.casts == (None, Cast(FLOAT32) if state == "half" else None)
    for marks in (STATES[state].marks & ~Mark.TRAINED, STATES[state].marks | Mark.TANGENT):
        assert decide(eqn, (ins[0], ins[1]._replace(marks=marks))).rewrite is None
    assert decide(eqn, ins, "O3").rewrite is None
    # Nor the operand that has the shape of the result.
    assert decide(equation(lax.add, x, x), ins).rewrite is None


ASSEMBLED = {
    "concatenated": lambda x, row: lax.concatenate((x, row), 0),
    "written into": lambda x, row: lax.dynamic_update_slice(x, row, (0, 0)),
    "scattered into": lambda x, row: x.at[jnp.array([1])].set(row),
    "of another rank": lambda x, row: own_primitive("my_bias", "promote", lambda x, y: x, Trait.ADDS).bind(x, row[0]),
}


@pytest.mark.parametrize("operation", ASSEMBLED.values(), ids=ASSEMBLED)
def test_what_is_assembled_is_not_broadcast(operation):
    x, row = jnp.ones((64, 16)), jnp.ones((1, 16))
    eqn = equation(operation, x, row)
    floats = [jnp.issubdtype(var.aval.dtype, jnp.floating) for var in eqn.invars]
    step = decide(eqn, tuple(STATES["half"] if each else None for each in floats))
    assert step.out[0].kind == Kind.HALF
    assert not getattr(step.rewrite, "spread", ())


def test_a_divisor_with_many_readers_is_broadcast_in_float32():
    x, row = jnp.ones((8, 16)), jnp.ones((1, 16))
    step = decide(equation(lax.div, x, row), (STATES["half"], STATES["half"]._replace(size=16)))
    assert step.rewrite.spread == (None, Cast(FLOAT16))


def test_one_number_that_eight_are_added_to_is_broadcast_in_float32():
    for rows, spread in ((7, False), (8, True)):
        column, number = jnp.ones((rows, 1)), jnp.ones((1, 1))
        step = decide(equation(lax.add, column, number), (STATES["half"], STATES["half"]._replace(size=1)))
        assert (step.rewrite is not None) is spread


def test_one_number_that_is_given_to_eight_has_many_readers():
    for readers, raised in ((7, False), (8, True)):
        eqn = equation(lambda x, readers=readers: lax.broadcast(x, (readers,)), X[0, 0])
        assert any(decide(eqn, (STATES["half"]._replace(size=1),)).out_casts) == raised


def test_of_several_indices_the_most_tell_how_many_readers_there_are():
    made = own_primitive("my_gather", "follow", lambda x, *indices: x, Trait.GROWS)
    one, eight = jnp.zeros(1, jnp.int32), jnp.zeros(8, jnp.int32)
    for indices, raised in (((one, eight), True), ((eight, one), True), ((one, one), False)):
        assert any(decide(equation(made.bind, X, *indices), (STATES["half"], None, None)).out_casts) == raised


MOVEMENTS = {
    "slice": lambda x: lax.slice(x, (0, 0), (2, 16)),
    "reshape": lambda x: lax.reshape(x, (64,)),
    "spread": lambda x: lax.broadcast(x, (2,)),
    "tile": lambda x: lax.tile(x, (2, 1)),
    "sort": lambda x: lax.sort(x),
    "best": lambda x: lax.reduce_max(x, (1,)),
    "traffic": lambda x: own_primitive("my_exchange", "follow", lambda x: x, Trait.MOVES | Trait.TRAFFIC).bind(x),
}


def moved(name, state="half", *, level="O2", want=Want.HALF, shared=True):
    """The kind of what is moved, and read elsewhere too."""
    eqn = equation(MOVEMENTS[name], X)
    site = site_of(eqn, (STATES[state],), level, want)
    out = plan_follow(dataclasses.replace(site, shared={*eqn.invars} if shared else set())).out[0]
    assert out.dtype == (FLOAT16 if out.kind == Kind.HALF else FLOAT32)
    return out.kind


@pytest.mark.parametrize("name", MOVEMENTS)
def test_what_others_read_too_moves_in_float32_for_readers_of_float32(name):
    """Its cotangents add up. What is chosen, and traffic, stay half."""
    kind = Kind.HALF if name in ("sort", "best", "traffic") else Kind.ISLAND
    for want in (Want.FULL, Want.HALF_APART):
        assert moved(name, want=want) == kind
        assert moved(name, want=want, shared=False) == moved(name, level="O3", want=want) == Kind.HALF
        assert moved(name, "lazy", want=want) == Kind.LAZY
    assert moved(name) == Kind.HALF


@pytest.mark.parametrize("name", MOVEMENTS)
def test_terms_of_several_products_are_spread_in_float32(name, monkeypatch):
    eqn = equation(MOVEMENTS[name], X)
    site = site_of(eqn, (STATES["half"],))
    monkeypatch.setattr(site.planner.demand.facts, "terms", {eqn.outvars[0]})
    assert plan_follow(site).out[0].kind == (Kind.ISLAND if name in ("spread", "tile") else Kind.HALF)


def test_a_movement_gives_each_result_the_dtype_of_its_operand():
    eqn = equation(lambda x, y: lax.sort((x, y)), X, X)
    first, second = decide(eqn, (STATES["half"], STATES["island"])).out
    assert (first.kind, second.kind) == (Kind.HALF, Kind.ISLAND)
    eqn = equation(lambda x: lax.split(x, (4, 12), 1), X)
    parts = decide(eqn, (STATES["half"],)).out
    assert [(part.kind, part.size) for part in parts] == [(Kind.HALF, 16), (Kind.HALF, 48)]


def test_what_is_read_outside_of_its_scope_is_rounded_beside_integers():
    eqn = equation(lambda x, i: lax.sort((x, i)), X, X.astype(int))
    first, second = decide(eqn, (STATES["left"], None)).out
    assert (first.kind, second) == (Kind.HALF, None)


def test_numbers_that_a_movement_makes_of_integers_are_arguments():
    made = own_primitive("my_movement_of_integers", "follow", lambda x: x.update(dtype=FLOAT32))
    out = decide(equation(made.bind, X.astype(int)), (None,)).out[0]
    assert (out.kind, out.dtype, out.marks) == (Kind.LAZY, FLOAT32, Mark.FRACTION)


def test_what_is_as_traced_is_as_firm_as_its_operands():
    eqn = equation(lax.nextafter, X, X)
    kinds = {
        ("half", "stat"): Kind.ISLAND, ("stat", "island"): Kind.ISLAND, ("stat", "lazy"): Kind.LAZY,
        ("weak", "weak"): Kind.WEAK, ("weak", "none"): Kind.LAZY, ("none", "none"): Kind.LAZY,
    }  # fmt: skip
    for (one, other), kind in kinds.items():
        assert decide(eqn, (STATES[one], STATES[other])).out[0].kind == kind
    narrow = X.astype(FLOAT16)
    assert decide(equation(lax.nextafter, narrow, narrow), (STATES["weak"],) * 2).out[0].kind == Kind.HALF


def test_bits_are_random_numbers_and_long_counters_have_digits():
    bits = equation(lambda x: lax.bitcast_convert_type(x, FLOAT32), X.astype(jnp.int32))
    assert decide(bits, (None,)).out[0].marks == Mark.SAMPLED | Mark.FRACTION
    for shape, rounds in (((2048,), False), ((2049,), True), ((2049, 2), True), ((2, 2048), False)):
        counter = equation(lambda shape=shape: lax.broadcasted_iota(FLOAT32, shape, 0))
        assert decide(counter, ()).out[0].marks == (Mark.ROUNDS if rounds else Mark(0))
    long = equation(lambda x: lax.reduce_precision(x, 5, 10), jnp.ones(4096))
    assert not decide(long, (STATES["position"],)).out[0].has(Mark.SAMPLED | Mark.ROUNDS)


def test_what_an_unknown_primitive_gives_may_come_from_anywhere():
    shapes = jax.ShapeDtypeStruct((4,), FLOAT32), jax.ShapeDtypeStruct((4,), jnp.int32)
    eqn = equation(lambda x: jax.pure_callback(lambda x: (x, x), shapes, x), X)
    number, integer = decide(eqn, (STATES["position"]._replace(marks=Mark.TANGENT),)).out
    assert number.marks == Mark.TANGENT | DATA
    assert integer is None


def test_what_solves_an_equation_is_marked():
    square = jnp.ones((8, 8))
    eqn = equation(lax.linalg.lu, square)
    assert [out and out.marks for out in decide(eqn, (STATES["position"],)).out] == [
        Mark.SOLUTION | Mark.FRACTION, None, None,
    ]  # fmt: skip
    assert not decide(equation(lax.bessel_i0e, X), (STATES["half"],)).out[0].has(Mark.SOLUTION)
    own = own_primitive("my_solver", "no_half", lambda x: x, Trait.SOLVES)
    assert not decide(equation(own.bind, X.astype(FLOAT16)), (STATES["half"],)).out[0].has(Mark.SOLUTION)
    assert decide(equation(own.bind, X), (STATES["half"],)).out[0].has(Mark.SOLUTION)


def test_a_conversion_that_the_user_wrote_is_as_firm_as_what_it_converts():
    back = equation(lambda x: x.astype(FLOAT32), X.astype(FLOAT16))
    kinds = {"weak": Kind.LAZY, "lazy": Kind.LAZY, "half": Kind.ISLAND, "island": Kind.ISLAND, "sum": Kind.FULL}
    assert {state: decide(back, (STATES[state],)).out[0].kind for state in kinds} == kinds
    assert not decide(back, (STATES["lazy"],)).out[0].has(Mark.ROUNDS)
    integers = equation(lambda x: x.astype(FLOAT16), X.astype(int))
    assert not decide(integers, (None,)).out[0].has(Mark.ROUNDS)


@pytest.mark.parametrize("is_sample", [False, True])
@pytest.mark.parametrize(
    ("dtype", "is_data", "rounds"),
    [
        ("bool", False, False),
        ("int8", True, False),
        ("uint8", True, False),
        ("int16", False, True),
        ("int32", False, True),
    ],
)
def test_integers_of_8_bits_are_data_and_others_where_the_program_is_given_them(
    dtype, is_data, rounds, is_sample, monkeypatch
):
    eqn = equation(lambda x: x.astype(FLOAT32), X.astype(dtype))
    site = site_of(eqn, (None,))
    monkeypatch.setattr(site.planner, "samples", {eqn.invars[0]} if is_sample else set())
    marks = operations.plan_known_traced(site).out[0].marks
    assert marks & (Mark.SAMPLED | Mark.STORED) == (Mark.SAMPLED | Mark.STORED if is_data or is_sample else NO_MARKS)
    assert (Mark.ROUNDS in marks) == rounds
    assert Mark.TRAINED not in marks


def test_a_statistic_is_an_eighth_of_data_at_most():
    for rows, kind in ((7, Kind.ISLAND), (8, Kind.STAT)):
        eqn = equation(lambda x: lax.reduce_sum(x, (0,)), jnp.ones((rows, 8)))
        assert decide(eqn, (STATES["half"],)).out[0].kind == kind


def test_what_gives_numbers_beside_booleans_compares_nothing():
    """A comparison is made in float32, as that is exact: numbers follow half data."""
    made = own_primitive("my_signed_difference", "promote", lambda x, y: [x, x.update(dtype=bool)])
    made.multiple_results = True
    number, positive = decide(equation(made.bind, X, X), (STATES["half"], STATES["lazy"])).out
    assert (number.kind, number.dtype, positive) == (Kind.HALF, FLOAT16, None)


def test_a_statistic_meets_the_largest_of_several_halves():
    eqn = equation(lax.clamp, X, X, X)
    stat = STATES["stat"]._replace(size=16)
    for halves, kind in ((("small", "half"), Kind.ISLAND), (("small", "small"), Kind.HALF)):
        assert decide(eqn, (*(STATES[name] for name in halves), stat)).out[0].kind == kind


def test_numbers_that_are_not_known_scale_float16_data_in_float32():
    """Those that the program computes may be in any unit; learned ones, and half data, are as data is."""
    eqn, half = equation(lax.mul, X, X), STATES["half"]
    for size, kind in ((1, Kind.HALF), (2, Kind.ISLAND), (64, Kind.ISLAND)):
        assert decide(eqn, (half, STATES["constant"]._replace(size=size))).out[0].kind == kind
    assert decide(eqn, (half, half.without(Mark.TRAINED))).out[0].kind == Kind.HALF
    assert decide(eqn, (half, STATES["lazy"])).out[0].kind == Kind.HALF


def test_tiny_numbers_of_the_users_own_float16_are_added_in_half():
    """Float16 has them, if with fewer digits; in float32 they are beyond what half holds."""
    tiny = STATES["small"]._replace(marks=DATA | Mark.HUGE, scale=-24)
    wide = tiny._replace(dtype=FLOAT32, kind=Kind.ISLAND)
    for numbers, kind in ((tiny, Kind.HALF), (wide, Kind.ISLAND)):
        assert decide(equation(lax.add, X, X), (STATES["small"], numbers)).out[0].kind == kind


@pytest.mark.parametrize(
    ("one", "other", "in_float32"),
    [
        ("half", Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.ROUNDS), True),  # A scale of 0.1
        ("half", Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.FRACTION), False),  # and one of 0.5.
        ("half", Flow(FLOAT32, Kind.WEAK, 2, marks=Mark.ROUNDS | Mark.TRAINED), False),
        ("half", STATES["quotient"], True),
        ("half", STATES["half"]._replace(marks=DATA | Mark.QUOTIENT), False),  # It is rounded already.
        (Flow(FLOAT16, Kind.HALF, 2, marks=DATA), STATES["digits"], True),
        (Flow(FLOAT16, Kind.HALF, 1, marks=DATA), STATES["digits"], False),
    ],
)
def test_what_scales_is_not_rounded_first(one, other, in_float32):
    operands = STATES[one] if isinstance(one, str) else one, other
    for ins in (operands, operands[::-1]):
        step = decide(equation(lax.mul, X, X), ins)
        assert step.out[0].kind == Kind.HALF
        assert any(step.out_casts) == in_float32


def test_integers_stay_out_of_it():
    step = operations.plan_untouched(site_of(equation(lax.add, X.astype(int), X.astype(int)), (None, None)))
    assert (step.casts, step.out, step.rule) == ((None, None), (None,), "not floating")


def test_complex_numbers_are_as_traced():
    z = X.astype(jnp.complex64)
    eqn = equation(lax.complex, X, X)
    assert decide(eqn, (STATES["half"], STATES["lazy"])).out == (None,)
    step = decide(equation(lambda z: lax.mul(z, z), z), (None, None))
    assert (step.rule, step.out) == ("as traced", (None,))
    assert decide(equation(lax.abs, z), (None,)).rule == "as traced"
    assert decide(equation(lambda p: lax.select(p, z, z), z == z), (None,) * 3).rule == "as traced"
    real = decide(equation(lax.real, z), (None,)).out[0]
    assert (real.kind, real.dtype) == (Kind.LAZY, FLOAT32)
    assert Mark.GIVEN in real.marks  # Complex data may come from anywhere.


def test_what_gives_complex_numbers_beside_others_is_as_traced():
    for dtypes in ((FLOAT32, jnp.complex64), (jnp.complex64, FLOAT32), (jnp.complex64, jnp.complex64)):
        made = own_primitive("my_parts", "promote", lambda x, dtypes=dtypes: [x.update(dtype=each) for each in dtypes])
        made.multiple_results = True
        assert decide(equation(made.bind, X), (STATES["half"],)).rule == "as traced"


@pytest.mark.parametrize(("number", "kind"), [(1.0, Kind.ISLAND), (-0.5, Kind.ISLAND), (0.25, Kind.HALF)])
def test_what_is_left_of_a_number_is_not_rounded_outside_of_its_scope(number, kind):
    assert decide(equation(lambda x: number - x, X), (STATES["weak"], STATES["left"])).out[0].kind == kind
    assert decide(equation(lambda x: x - number, X), (STATES["left"], STATES["weak"])).out[0].kind == Kind.HALF


def test_rules_are_named_for_reports():
    named = {
        "add": (lax.add, X, X), "exp": (lax.exp, X), "reshape": (lambda x: lax.reshape(x, (64,)), X),
        "cholesky": (lax.linalg.cholesky, jnp.ones((8, 8))), "cast": (lambda x: x.astype(FLOAT16), X),
        "bits": (lambda x: lax.reduce_precision(x, 5, 10), X),
    }  # fmt: skip
    steps = {name: equation(*program) for name, program in named.items()}
    labels = {name: decide(eqn, (STATES["half"],) * len(eqn.invars)).rule for name, eqn in steps.items()}
    assert labels["add"] == "promote" and labels["exp"] == "full" and labels["reshape"] == "follow"
    assert labels["cast"] == "explicit" and labels["bits"] == "as traced"
    assert decide(steps["exp"], (STATES["half"],), "OD").rule == "OD"
    assert decide(steps["exp"], (STATES["half"],), "O3").rule == "O3"


@pytest.mark.parametrize(
    ("move", "mark"),
    [
        (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), Mark.STORED),  # As a layer: an iteration has its own.
        (lambda x, i: lax.slice(x, (0, 0), (1, 16)), Mark.REPEATED),
        (lambda x, i: lax.reshape(x, (64,)), Mark.REPEATED),
        (lambda x, i: lax.dynamic_slice(x, (0, 0), (1, 16)), Mark.REPEATED),
        (lambda x, i: x.at[i[None]].get(mode="clip"), Mark.STORED),
        (lambda x, i: lax.optimization_barrier((x, i))[0], Mark.REPEATED),
        (lambda x, i: lax.sort((x, x.astype(int)))[0], Mark.REPEATED),
    ],
)
def test_a_part_of_what_repeats_is_stored(move, mark):
    repeated = STATES["half"]._replace(marks=DATA | Mark.REPEATED)
    marks = decide(equation(move, X, jnp.int32(1)), (repeated,)).out[0].marks
    assert marks & (Mark.STORED | Mark.REPEATED) == mark
    assert DATA in marks
    plain = STATES["half"]._replace(marks=DATA)
    assert not decide(equation(move, X, jnp.int32(1)), (plain,)).out[0].has(Mark.REPEATED | Mark.STORED)


def unknown(name, *, shape=X.shape, dtype=FLOAT32):
    made = Primitive(name)
    made.def_abstract_eval(lambda *_: ShapedArray(shape, dtype))
    return made


def test_an_unknown_primitive_may_hand_sums_on():
    total = STATES["sum"]
    hands_on = equation(unknown("my_choice").bind, jnp.array(True), X, X)
    assert decide(hands_on, (None, total, STATES["half"])).out[0].roots == total.roots
    assert decide(hands_on, (None, total, STATES["half"])).out[0].kind == Kind.FULL
    assert decide(hands_on, (None, STATES["half"], total)).out[0].kind == Kind.FULL
    # What is not added up stays what it was, and so does what has another shape.
    assert decide(hands_on, (None, STATES["half"], STATES["lazy"])).out[0].kind == Kind.ISLAND
    rootless = total._replace(roots=frozenset())
    assert decide(hands_on, (None, rootless, rootless)).out[0].kind != Kind.FULL
    smaller = equation(unknown("my_part", shape=(2, 16)).bind, X)
    found = decide(smaller, (total,)).out[0]
    assert (found.roots, found.kind == Kind.FULL) == (frozenset(), False)
    narrow = equation(unknown("my_rounded_choice", dtype=FLOAT16).bind, X)
    assert decide(narrow, (total,)).out[0].kind == Kind.HALF
