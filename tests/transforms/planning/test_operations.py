"""What is decided about single operations, for all states of their operands: decision tables, one file an operation.

Of an operation on two operands a row is the state of the first and a column that of the second; of those on one a row
is its state and a column the operation. A cell is what comes out: its kind by the letter, `r` if the operation runs in
float32 and rounds, `b` if it is bfloat16 at a policy of float16, its size if that is not data's, its marks (`i` for
integers, `s` if it is scaled), `*` if it continues a recurrence, then `^` where an operand is raised to float32, `v`
where one is rounded to half, and `!` where that saturates. Of results that are not floating, a cell says
whether the operands are wide or narrow.

`JAMP_UPDATE_PLANS=1` writes the files anew, as it does for plans; read the diff before you commit it.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32
from jamp._primitives import NO_TRAITS, Rule, Trait, rule_of
from jamp.transforms.analysis.recurrences import Sums
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.planning import operations
from jamp.transforms.planning.planner import Planner
from jamp.transforms.planning.scales import with_scale
from jamp.transforms.planning.site import Context, Site
from jamp.transforms.program.flow import Flow, Flows, Kind, Mark, Root
from jamp.transforms.program.plan import Scatter, Step
from jamp.transforms.program.want import Want

FOLDER = Path(__file__).parent / "decisions"
PLANNERS = {
    Rule.FULL: operations.plan_full,
    Rule.NO_HALF: operations.plan_no_half,
    Rule.PROMOTE: operations.plan_promote,
    Rule.FOLLOW: operations.plan_follow,
    Rule.TRACED: operations.plan_known_traced,
    Rule.OPAQUE: operations.plan_opaque,
}
X = jnp.ones((4, 16))

DATA = Mark.GIVEN | Mark.TRAINED | Mark.FRACTION
STATES = {
    "none": None,  # Integers.
    "weak": Flow(FLOAT32, Kind.WEAK, 1),
    "huge": Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.HUGE, scale=20),
    "digits": Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.ROUNDS | Mark.FRACTION),
    "lazy": Flow(FLOAT32, Kind.LAZY, 64, marks=DATA),
    "scalar": Flow(FLOAT32, Kind.LAZY, 1, marks=DATA | Mark.ROUNDS),
    "constant": Flow(FLOAT32, Kind.LAZY, 64, marks=Mark.GIVEN | Mark.FRACTION),
    "position": Flow(FLOAT32, Kind.LAZY, 64),
    "half": Flow(FLOAT16, Kind.HALF, 64, marks=DATA),
    "small": Flow(FLOAT16, Kind.HALF, 4, marks=DATA),
    "other": Flow(BFLOAT16, Kind.HALF, 64, marks=DATA),
    "island": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.HUGE),
    "left": Flow(FLOAT32, Kind.ISLAND, 64, "block", marks=DATA),
    "scaled": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA, scale=-20),
    "quotient": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.QUOTIENT),
    "tangent": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.TANGENT | Mark.HUGE),
    "stat": Flow(FLOAT32, Kind.STAT, 4, marks=DATA),
    "big stat": Flow(FLOAT32, Kind.STAT, 64, marks=DATA),
    "sum": Flow(FLOAT32, Kind.FULL, 64, marks=DATA, roots=frozenset({Root("carry", 1)})),
}
LETTERS = {Kind.WEAK: "W", Kind.LAZY: "L", Kind.HALF: "H", Kind.ISLAND: "I", Kind.STAT: "S", Kind.FULL: "F"}
MARKS = {Mark.HUGE: "h", Mark.QUOTIENT: "q", Mark.TANGENT: "t", Mark.ROUNDS: "d"}
WANTED = (*((level, want) for level in ("O1", "O2") for want in (Want.HALF, Want.FULL)), ("O3", Want.HALF))


def equation(fn: Callable[..., Any], *args: Any) -> Any:
    """The last equation of a program: the operation itself."""
    return jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]


def decide(eqn: Any, ins: Flows, level: str = "O2", want: Want = Want.HALF, sums: Sums | None = None) -> Step:
    """What is decided about one operation alone, by the planner of its rule."""
    site = _site(eqn, ins, level, want, sums)
    return with_scale(site, PLANNERS[rule_of(eqn)](site))


@functools.cache
def _planner() -> Planner:
    return Planner(jamp.get_policy("O2:float16"))


def _site(eqn: Any, ins: Flows, level: str = "O2", want: Want = Want.HALF, sums: Sums | None = None) -> Site:
    wants = (want,) * len(eqn.outvars)
    context = Context(REGIMES[level])
    ins = (*ins, *(None for _ in eqn.invars[len(ins) :]))  # Indices have no state.
    return Site(_planner(), eqn, ins, wants, context, "", {}, sums or {}, None, around=context, states={}, numbers={})


def _cell(step: Step) -> str:
    """One decision in a few letters."""
    (flow,) = step.out[:1]
    operated = {
        (cast.dtype if cast else state.dtype).name for cast, state in zip(step.casts, step.ins, strict=True) if state
    }
    saturates = any(cast and cast.saturate for cast in step.casts)
    moved = {cast.dtype == FLOAT32 for cast in step.casts if cast}
    casts = "^" * (True in moved) + "v" * (False in moved) + "!" * saturates
    if flow is None:
        return f"-{'w' if operated == {'float32'} else 'n' if len(operated) == 1 else '?'}{casts}"
    rounds = any(step.out_casts)
    marks = "".join(letter for mark, letter in MARKS.items() if mark in flow.marks)
    marks += "s" if flow.scale else ""
    marks += "" if Mark.FRACTION in flow.marks else "i"
    other = "b" if flow.dtype == BFLOAT16 else ""
    size = "" if flow.size == 64 else flow.size
    return f"{LETTERS[flow.kind]}{other}{'r' * rounds}{size}{marks}{'*' * bool(flow.roots)}{casts}"


def _eqn(fn: Callable[..., Any], *args: Any) -> Any:
    return lambda: equation(fn, *(args or (X,)))


BINARY = {
    "add": _eqn(lax.add, X, X), "sub": _eqn(lax.sub, X, X), "mul": _eqn(lax.mul, X, X), "div": _eqn(lax.div, X, X),
    "max": _eqn(lax.max, X, X), "pow": _eqn(lax.pow, X, X), "gt": _eqn(lax.gt, X, X),
    "rem": _eqn(lax.rem, X, X), "concatenate": _eqn(lambda x, y: lax.concatenate([x, y], 1), X[:, :8], X[:, :8]),
}  # fmt: skip
UNARY = {
    "exp": _eqn(lax.exp), "sqrt": _eqn(lax.sqrt), "rsqrt": _eqn(lax.rsqrt), "square": _eqn(lax.square),
    "neg": _eqn(lax.neg), "tanh": _eqn(lax.tanh), "sign": _eqn(lax.sign), "floor": _eqn(lax.floor),
    "is_finite": _eqn(lax.is_finite),
    "sum of all": _eqn(lambda x: lax.reduce_sum(x, (0, 1))),
    "sum of 16": _eqn(lambda x: lax.reduce_sum(x, (1,))),
    "sum of 4": _eqn(lambda x: lax.reduce_sum(x, (0,))),
    "cumsum": _eqn(lax.cumsum), "reduce_max": _eqn(lambda x: lax.reduce_max(x, (1,))),
    "argmax": _eqn(lambda x: lax.argmax(x, 1, jnp.int32)), "sort": _eqn(lambda x: lax.sort(x)),
    "reshape": _eqn(lambda x: lax.reshape(x, (64,))), "slice": _eqn(lambda x: x[:2]),
    "broadcast by 7": _eqn(lambda x: lax.broadcast(x, (7,))), "broadcast by 8": _eqn(lambda x: lax.broadcast(x, (8,))),
    "cholesky": _eqn(lax.linalg.cholesky, jnp.ones((8, 8))),
    "to float16": _eqn(lambda x: x.astype(jnp.float16)), "to bfloat16": _eqn(lambda x: x.astype(jnp.bfloat16)),
    "to int32": _eqn(lambda x: x.astype(jnp.int32)),
    "reduce_precision": _eqn(lambda x: lax.reduce_precision(x, 5, 10)),
    "to half and back": _eqn(lambda x: x.astype(jnp.float32), X.astype(jnp.float16)),
    "from integers": _eqn(lambda x: x.astype(jnp.float32), X.astype(jnp.int32)),
}  # fmt: skip


def _table(title: str, rows: dict[str, list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines = (" ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows.values())
    return "\n".join([title, *(f"  {name:9}{line}".rstrip() for name, line in zip(rows, lines, strict=True))]) + "\n"


def _of_two(eqn: Any) -> str:
    """A table a level: how each state meets each."""
    tables = []
    for level, want in WANTED:
        rows = {
            row: [
                _cell(decide(eqn, (state, other), level, want)) if state or other else "" for other in STATES.values()
            ]
            for row, state in STATES.items()
        }
        tables.append(_table(f"{level}, wanted in {want.name.lower()}", rows))
    return "".join(tables)


def _of_one(level: str) -> str:
    """What comes out of each operation, for each state."""
    eqns = {name: make() for name, make in UNARY.items()}
    tables = []
    for want in (Want.HALF, Want.FULL):
        rows = {"": list(eqns)}
        for row, state in STATES.items():
            rows[row] = [
                _cell(decide(eqn, (state,), level, want)) if _fits(eqn, state) else "" for eqn in eqns.values()
            ]
        tables.append(_table(f"{level}, wanted in {want.name.lower()}", rows))
    return "".join(tables)


def _fits(eqn: Any, state: Flow | None) -> bool:
    """Whether an operand may be in a state: integers have none, and the user's own half data is half."""
    dtype = eqn.invars[0].aval.dtype
    if state is None or dtype == jnp.int32:
        return state is None and dtype == jnp.int32
    return dtype != FLOAT16 or state.kind == Kind.HALF


TABLES = {name: lambda make=make: _of_two(make()) for name, make in BINARY.items()}
TABLES |= {f"one_operand_{level}": lambda level=level: _of_one(level) for level in REGIMES}


@pytest.mark.parametrize("name", TABLES)
def test_decisions(name):
    path, text = FOLDER / f"{name}.txt", TABLES[name]()
    if os.environ.get("JAMP_UPDATE_PLANS"):
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_a_table_for_each_file():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(TABLES)


def test_a_sum_of_a_loop_written_out_is_float32():
    eqn = equation(lax.add, X, X)
    half = (STATES["half"], STATES["half"])
    root = Root("sum", 1)
    assert decide(eqn, half).out[0].kind == Kind.HALF
    step = decide(eqn, half, sums={eqn.outvars[0]: root})
    assert (step.out[0].kind, step.out[0].dtype) == (Kind.FULL, FLOAT32)
    assert decide(eqn, half, "O3", sums={eqn.outvars[0]: root}).out[0].kind == Kind.HALF
    assert decide(eqn, (STATES["weak"],) * 2, sums={eqn.outvars[0]: root}).out[0].kind == Kind.WEAK


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


def test_one_number_that_is_given_to_eight_has_many_readers():
    for readers, raised in ((7, False), (8, True)):
        eqn = equation(lambda x, readers=readers: lax.broadcast(x, (readers,)), X[0, 0])
        assert any(decide(eqn, (STATES["half"]._replace(size=1),)).out_casts) == raised


def test_a_movement_gives_each_result_the_dtype_of_its_operand():
    eqn = equation(lambda x, y: lax.sort((x, y)), X, X)
    first, second = decide(eqn, (STATES["half"], STATES["island"])).out
    assert (first.kind, second.kind) == (Kind.HALF, Kind.ISLAND)
    eqn = equation(lambda x: lax.split(x, (4, 12), 1), X)
    parts = decide(eqn, (STATES["half"],)).out
    assert [(part.kind, part.size) for part in parts] == [(Kind.HALF, 16), (Kind.HALF, 48)]


def _primitive(name: str, rule: str, result: Callable[..., Any], traits: Trait = NO_TRAITS) -> Primitive:
    made = Primitive(name)
    made.def_abstract_eval(result)
    jamp.register_primitive(made, rule, traits)
    return made


def test_what_is_read_outside_of_its_scope_is_rounded_beside_integers():
    eqn = equation(lambda x, i: lax.sort((x, i)), X, X.astype(int))
    first, second = decide(eqn, (STATES["left"], None)).out
    assert (first.kind, second) == (Kind.HALF, None)


def test_numbers_that_a_movement_makes_of_integers_are_arguments():
    made = _primitive("my_movement_of_integers", "follow", lambda x: x.update(dtype=FLOAT32))
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
    assert decide(bits, (None,)).out[0].marks == Mark.RANDOM | Mark.FRACTION
    for shape, rounds in (((2048,), False), ((2049,), True), ((2049, 2), True), ((2, 2048), False)):
        counter = equation(lambda shape=shape: lax.broadcasted_iota(FLOAT32, shape, 0))
        assert decide(counter, ()).out[0].marks == (Mark.ROUNDS if rounds else Mark(0))
    long = equation(lambda x: lax.reduce_precision(x, 5, 10), jnp.ones(4096))
    assert not decide(long, (STATES["position"],)).out[0].has(Mark.RANDOM | Mark.ROUNDS)


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
    own = _primitive("my_solver", "no_half", lambda x: x, Trait.SOLVES)
    assert not decide(equation(own.bind, X.astype(FLOAT16)), (STATES["half"],)).out[0].has(Mark.SOLUTION)
    assert decide(equation(own.bind, X), (STATES["half"],)).out[0].has(Mark.SOLUTION)


def test_a_conversion_that_the_user_wrote_is_as_firm_as_what_it_converts():
    back = UNARY["to half and back"]()
    kinds = {"weak": Kind.LAZY, "lazy": Kind.LAZY, "half": Kind.ISLAND, "island": Kind.ISLAND, "sum": Kind.FULL}
    assert {state: decide(back, (STATES[state],)).out[0].kind for state in kinds} == kinds
    assert not decide(back, (STATES["lazy"],)).out[0].has(Mark.ROUNDS)
    integers = equation(lambda x: x.astype(FLOAT16), X.astype(int))
    assert not decide(integers, (None,)).out[0].has(Mark.ROUNDS)


def test_a_statistic_is_an_eighth_of_data_at_most():
    for rows, kind in ((7, Kind.ISLAND), (8, Kind.STAT)):
        eqn = equation(lambda x: lax.reduce_sum(x, (0,)), jnp.ones((rows, 8)))
        assert decide(eqn, (STATES["half"],)).out[0].kind == kind


def test_data_that_is_scattered_into_a_sum_is_one():
    eqn = equation(lambda x, y: lax.scatter_add(x, INDEX, y[:3], _ROWS), X, X)
    assert decide(eqn, (STATES["sum"], None, STATES["half"])).out[0].kind == Kind.FULL


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
    step = operations.plan_untouched(_site(equation(lax.add, X.astype(int), X.astype(int)), (None, None)))
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
