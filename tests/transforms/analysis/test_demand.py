"""What readers want of values: a table for single operations, and programs for what lies between them.

`JAMP_UPDATE_PLANS=1` writes the table anew, as it does for plans; read the diff before you commit it.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jamp
from jamp._primitives import is_outer
from jamp.transforms.analysis.loops.gates import States
from jamp.transforms.analysis.reading.axes import free_sizes, has_one_channel, is_reduction, num_contracted
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.planning.planner import Planner
from jamp.transforms.program.want import Want

X = jnp.ones((4, 16))
W = jnp.ones((16, 16))
TABLE = Path(__file__).parent / "demand.txt"
LETTERS = {want: want.name[0].lower() if want.apart else want.name[0] for want in Want}
LETTERS |= {Want.START: "B"}
(
    NONE, SCORE, FULL, FULL_APART, HALF, HALF_APART, LEFT, DIVISOR, DIVISOR_APART, BOUND, GATE, PHASE, START, LIMIT,
    VALUE, EXACT, AGAIN,
) = Want  # fmt: skip


def planner_of(level, rules=None):
    policy = jamp.get_policy(f"{level}:bfloat16") if level in ("OD", "O1", "O2", "O3") else jamp.get_policy("O2")
    return Planner(policy.with_rules(**(rules or {})), REGIMES[level])


def asked(closed, planner, level, want, fixed=()):
    wants = (want,) * len(closed.jaxpr.outvars) if isinstance(want, Want) else want
    wanted = planner.demand(closed, wants, REGIMES[level], "", frozenset(fixed))
    return tuple(wanted.of(var) for var in closed.jaxpr.invars)


def wants_of(fn, *args, want=HALF, level="O2", rules=None, fixed=()):
    """What is wanted of the arguments of a program whose results are wanted so."""
    return asked(jax.make_jaxpr(fn)(*args), planner_of(level, rules), level, want, fixed)


KERNEL = jnp.ones((2, 1, 3))  # Of one channel, for each of two.
SIGNAL = jnp.ones((2, 2, 8))


def depthwise(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2)


OPERATIONS = {
    "add": (lax.add, X, X), "sub": (lax.sub, X, X), "mul": (lax.mul, X, X), "div": (lax.div, X, X),
    "max": (lax.max, X, X), "rem": (lax.rem, X, X), "pow": (lax.pow, X, X), "atan2": (lax.atan2, X, X),
    "exp": (lax.exp, X), "sin": (lax.sin, X), "sqrt": (lax.sqrt, X), "rsqrt": (lax.rsqrt, X), "tanh": (lax.tanh, X),
    "floor": (lax.floor, X), "square": (lax.square, X),
    "gt": (lax.gt, X, X), "eq": (lax.eq, X, X), "is_finite": (lax.is_finite, X),
    "sum": (lambda x: lax.reduce_sum(x, (0,)), X), "maximum": (lambda x: lax.reduce_max(x, (0,)), X),
    "argmax": (lambda x: lax.argmax(x, 0, jnp.int32), X), "top_k": (lambda x: lax.top_k(x, 2), X),
    "sort of one": (lambda x: lax.sort(x), X), "sort of two": (lambda x, y: lax.sort((x, y)), X, X),
    "reshape": (lambda x: x.reshape(64), X), "broadcast": (lambda x: lax.broadcast(x, (2,)), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), X, X), "split": (lambda x: lax.split(x, (8, 8), 1), X),
    "product": (lax.dot, X, W), "product of 8": (lax.dot, X[:, :8], W[:8]), "product of 9": (lax.dot, X[:, :9], W[:9]),
    "inner": (lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))), X, X),
    "outer": (lambda x, y: jnp.einsum("a,b->ab", x, y), X[0], X[0]),
    "convolution": (depthwise, SIGNAL, KERNEL),
    "stencil": (lambda x: depthwise(x, KERNEL), SIGNAL),
    "fft": (jnp.fft.fft, X.astype(jnp.complex64)), "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), X),
    "to int32": (lambda x: x.astype(jnp.int32), X), "to float16": (lambda x: x.astype(jnp.float16), X),
    "from integers": (lambda x: x.astype(jnp.float32), X.astype(jnp.int32)),
}  # fmt: skip


def test_what_operations_want():
    """By operation and level: what is wanted of operands, for each want of results (its letter is in the title)."""
    lines = [f"{'':25}" + " ".join(f"{LETTERS[want]:2}" for want in Want).rstrip()]
    planners = {level: planner_of(level) for level in REGIMES}
    traced = {name: jax.make_jaxpr(fn)(*args) for name, (fn, *args) in OPERATIONS.items()}
    for name, closed in traced.items():
        for level, planner in planners.items():
            cells = ("".join(LETTERS[w] for w in asked(closed, planner, level, want)) for want in Want)
            lines.append(f"{name:17}{level:8}" + " ".join(f"{cell:2}" for cell in cells).rstrip())
    text = "\n".join(lines) + "\n"
    if os.environ.get("JAMP_UPDATE_PLANS"):
        TABLE.write_text(text)
    assert text == TABLE.read_text()


def test_what_several_readers_want_is_the_strongest():
    assert wants_of(lambda x: (lax.exp(x), x @ W), X) == (HALF,)
    assert wants_of(lambda x: (lax.exp(x), lax.sin(x)), X) == (PHASE,)
    assert wants_of(lambda x: (lax.exp(x), 1 / x), X) == (DIVISOR,)
    assert wants_of(lambda x: (x + 1, x + 2), X, want=(NONE, FULL)) == (FULL,)


def test_what_nobody_reads_is_dead():
    closed = jax.make_jaxpr(lambda x, y: (lax.exp(x), lax.exp(y))[0])(X, X)
    wanted = Planner(jamp.get_policy("O2"))
    found = wanted.demand(closed, (HALF,), REGIMES["O2"], "")
    live, dead = closed.jaxpr.eqns
    assert found.is_live(live) and not found.is_live(dead)
    assert found.of(closed.jaxpr.invars[1]) is NONE
    assert closed.jaxpr.invars[0] in found.live and closed.jaxpr.invars[1] not in found.live


def test_an_effect_is_live_and_wants_what_it_was_traced_with():
    assert wants_of(lambda x: jax.debug.print("{}", x), X) == (FULL,)


def test_one_result_of_several_is_enough():
    def program(x):
        left, right = lax.split(x, (8, 8), 1)
        return lax.exp(left), right @ W[:8]

    assert wants_of(program, X) == (FULL,)


def test_a_result_that_nobody_reads_wants_nothing():
    closed = jax.make_jaxpr(lambda x: lax.split(x, (8, 8), 1)[0])(X)
    assert wants_of(lambda x: lax.split(x, (8, 8), 1)[0], X) == (HALF,)
    found = Planner(jamp.get_policy("O2")).demand(closed, (HALF,), REGIMES["O2"], "")
    assert found.is_live(closed.jaxpr.eqns[0])


def softmax(z):
    e = lax.exp(z - lax.reduce_max(z, (1,))[:, None])
    return e / lax.reduce_sum(e, (1,))[:, None]


def test_scores_of_a_softmax_may_be_half():
    assert wants_of(softmax, X) == (SCORE,)
    assert wants_of(lambda z: softmax(z * 0.5 + 1), X) == (SCORE,)
    assert wants_of(softmax, X, want=FULL) == (FULL,)
    assert wants_of(lambda z: lax.exp(z) / 2, X) == (FULL,)  # No softmax.
    assert wants_of(lambda z: (softmax(z), lax.sin(z)), X) == (PHASE,)


def test_scores_whose_exponential_decides_stay_exact():
    def program(z):
        e = lax.exp(z - lax.reduce_max(z, (1,))[:, None])
        return e / lax.reduce_sum(e, (1,))[:, None], e

    assert wants_of(program, X, want=(HALF, EXACT)) == (EXACT,)


def test_scores_end_at_a_comparison_and_at_a_function():
    assert wants_of(lambda z, y: softmax(lax.select(z > y, z, z)), X, X) == (SCORE, NONE)
    assert wants_of(lambda z: softmax(lax.exp(z)), X) == (FULL,)
    assert wants_of(lambda z: softmax(lax.log(z)), X) == (BOUND,)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_call_passes_on_what_is_wanted_inside(level):
    for call in (jax.jit, jax.checkpoint):
        assert wants_of(call(lambda x: lax.exp(x)), X, level=level) == (FULL,)
        assert wants_of(call(lambda x: x + 1), X, level=level, want=PHASE) == (PHASE,)
        assert wants_of(call(lambda x, y: lax.sin(x)), X, X, level=level) == (PHASE, NONE)


def test_rules_hold_inside_of_calls():
    assert wants_of(jax.jit(lambda x: x @ W), X, rules={"full": ["prim:dot_general"]}) == (FULL,)
    assert wants_of(jax.jit(lambda x: x + 1), X, want=FULL, rules={"half": ["prim:add"]}) == (HALF,)


def test_a_branch_that_does_not_read_a_value_erases_nothing():
    def program(i, x, y):
        return lax.switch(i, [lambda x, y: lax.exp(x), lambda x, y: y, lambda x, y: x @ W], x, y)

    assert wants_of(program, 0, X, X)[1:] == (HALF, HALF)
    assert wants_of(program, 0, X, X, want=FULL)[1:] == (HALF, FULL)

    def two(i, x, y):
        return lax.cond(i, lambda x, y: lax.sin(x), lambda x, y: lax.exp(y), x, y)

    assert wants_of(two, True, X, X)[1:] == (PHASE, FULL)


def test_what_chooses_a_branch_decides_where_its_result_decides():
    def program(i, x):
        return lax.cond(i, lambda x: x, lambda x: -x, x)

    assert wants_of(program, True, X, want=EXACT) == (EXACT, EXACT)
    assert wants_of(program, True, X, want=FULL)[1] is FULL
    assert wants_of(lambda i, x: lax.switch(i, [lax.neg, lax.abs], x), jnp.int32(0), X, want=FULL) == (NONE, FULL)


def test_what_chooses_among_three_branches_is_an_index():
    three = (lax.neg, lax.abs, lax.tanh)
    for branches, want in ((three, PHASE), (three[:2], NONE)):
        assert wants_of(lambda i, x, branches=branches: lax.switch(i, branches, x), jnp.int32(0), X) == (want, HALF)
    assert wants_of(lambda i, x: lax.switch(i, three, x), jnp.int32(0), X, level="O3")[0] is not PHASE


def test_a_carry_is_wanted_by_what_comes_after_and_by_the_next_iteration():
    def adds(x, ts):
        return lax.scan(lambda h, t: (h + t, None), x, ts)[0]

    ts = jnp.ones((3, 4, 16))
    assert wants_of(adds, X, ts) == (HALF, HALF)
    assert wants_of(adds, X, ts, want=FULL) == (FULL, FULL)
    assert wants_of(adds, X, ts, want=NONE) == (FULL, FULL)  # Without a reader it may be carried in float32.

    def swaps(x, y, ts):
        return lax.scan(lambda c, t: ((c[1], lax.sin(c[0]) + t), None), (x, y), ts)[0]

    assert wants_of(swaps, X, X, ts) == (PHASE, PHASE, PHASE)


def test_what_a_scan_stacks_and_what_it_closes_over():
    ts = jnp.ones((3, 4, 16))

    def program(c, x, ts):
        def body(h, t):
            return h + 1, (lax.exp(t), h * c)

        return lax.scan(body, x, ts)

    assert wants_of(program, X, X, ts, want=(HALF, HALF, FULL)) == (FULL, HALF, FULL)
    assert wants_of(program, X, X, ts, want=(FULL, HALF, PHASE)) == (PHASE, PHASE, FULL)


def converges(z, w):
    def body(state):
        z, _ = state
        return lax.tanh(z @ w), z

    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-5, body, (z, z + 1))[0]


def inner_wants(fn, *args, level="O2", want=HALF):
    """What is wanted of the carries of the loop in a program."""
    closed = jax.make_jaxpr(fn)(*args)
    loop = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name in ("while", "scan"))
    planner = Planner(jamp.get_policy("O2:bfloat16"))
    wanted = planner.demand(closed, (want,) * len(closed.jaxpr.outvars), REGIMES[level], "")
    return wanted.carried[id(loop)], tuple(wanted.of(var) for var in closed.jaxpr.invars)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_what_decides_when_a_loop_ends_is_exact_inside_alone(level):
    carried, outside = inner_wants(converges, X, W, level=level)
    assert carried == (EXACT, EXACT)
    assert outside == (START, DIVISOR)
    # In another loop that ends by its result, it comes anew in each iteration.
    assert inner_wants(converges, X, W, level=level, want=EXACT) == (carried, (EXACT, EXACT))


@pytest.mark.parametrize("level", ["O3", "full"])
def test_levels_that_listen_to_nobody_exempt_no_loop(level):
    carried, _ = inner_wants(converges, X, W, level=level)
    assert EXACT not in carried


def test_a_loop_that_counts_does_not_converge():
    def program(x, w):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, lax.tanh(s[1] @ w)), (0, x))[1]

    carried, outside = inner_wants(program, X, W)
    assert carried == (EXACT, HALF)
    assert outside == (HALF, HALF)


def test_a_choice_and_finiteness_end_what_is_exact():
    def by_token(x, w):
        def cond(state):
            token, _ = state
            return token < 3

        def body(state):
            _, h = state
            h = lax.tanh(h @ w)
            return lax.argmax(h.ravel(), 0, jnp.int32), h

        return lax.while_loop(cond, body, (0, x))[1]

    assert inner_wants(by_token, X, W)[0] == (EXACT, HALF)

    def while_finite(x, w):
        return lax.while_loop(lambda h: lax.is_finite(h).all(), lambda h: lax.tanh(h @ w), x)

    assert inner_wants(while_finite, X, W)[0] == (HALF,)


def moved(z, w):
    return lax.tanh(z @ w)


def until_close(x, w, tolerance):
    """A fixed number of steps, of which those after the first that moves little do nothing more."""

    def body(state, _):
        steps, z, before, passed = state
        done = jnp.abs(z - before).max() < tolerance
        return (steps + 1, jnp.where(done, z, moved(z, w)), jnp.where(done, before, z), moved(passed, w)), None

    return lax.scan(body, (0.0, x, x + 1, x), None, length=9)[0]


def until_flagged(x, w, tolerance):
    def body(state, _):
        z, passed, done = state
        after = jnp.where(done, z, moved(z, w))
        return (after, moved(passed, w), done | (jnp.abs(after - z).max() < tolerance)), None

    return lax.scan(body, (x, x, False), None, length=9)[0]


def until_close_with_a_counter(x, w, tolerance):
    def body(state):
        i, z, passed, before = state
        done = jnp.abs(z - before).max() < tolerance
        return i + 1, jnp.where(done, z, moved(z, w)), moved(passed, w), jnp.where(done, before, z)

    return lax.while_loop(lambda state: state[0] < 9, body, (0, x, x, x + 1))


@pytest.mark.parametrize(
    ("program", "latched"),
    [
        (until_close, (HALF, EXACT, EXACT, HALF)),
        (until_flagged, (EXACT, HALF, EXACT)),
        (until_close_with_a_counter, (EXACT, EXACT, HALF, EXACT)),
    ],
)
def test_what_decides_when_a_loop_does_nothing_more_is_exact(program, latched):
    args = X, W, jnp.float32(1e-5)
    assert inner_wants(program, *args)[0] == latched
    for level in ("O3", "full"):
        assert EXACT not in inner_wants(program, *args, level=level)[0]


@pytest.mark.parametrize("reads", ["another carry", "what is scanned", "the number of steps", "its own carry"])
def test_a_choice_of_what_goes_on_changing_is_no_latch(reads):
    def program(x, w, ts):
        def body(state, t):
            z, other, step = state
            read = {"another carry": other, "what is scanned": t, "the number of steps": step, "its own carry": z}[
                reads
            ]
            z = jnp.where(read.max() > 3, z, moved(z, w))
            return (z, moved(other, w), step + 1), None

        return lax.scan(body, (x, x, 0.0), ts)[0]

    carried, _ = inner_wants(program, X, W, jnp.ones((3, 4, 16)))
    assert carried == ((EXACT if reads == "its own carry" else HALF), HALF, HALF)


def test_a_carry_is_no_constant_whatever_it_comes_in_as():
    def program(x, kernel):
        def body(state, _):
            h, k = state
            return (lax.tanh(depthwise(h, k)), k * 0.5), None

        return lax.scan(body, (x, kernel), None, length=3)[0]

    assert wants_of(program, SIGNAL, KERNEL, fixed=[0, 1], want=NONE) == (HALF, HALF)


@pytest.mark.parametrize(("columns", "want"), [(1, FULL), (3, FULL), (4, HALF)])
def test_a_product_with_few_columns_that_the_program_knows_weighs(columns, want):
    def program(x, w):
        return lax.dot(x, w)

    weights = W[:, :columns]
    assert wants_of(program, X, weights, fixed=[1]) == (want, want)
    assert wants_of(program, X, weights) == (HALF, HALF)
    assert wants_of(program, X, weights, fixed=[0]) == (HALF, HALF)
    # Few rows are a small batch of data.
    assert wants_of(program, weights.T, W, fixed=[0]) == ((FULL, FULL) if columns == 1 else (HALF, HALF))
    assert wants_of(lambda x: program(x, weights), X) == (want,)
    assert wants_of(program, X, weights, fixed=[1], level="O3") == (HALF, HALF)
    # One-hot rows choose, and weigh nothing.
    chosen = jnp.zeros((16, columns), jnp.int32)
    assert wants_of(lambda x, i: program(x, (i == 1).astype(x.dtype)), X, chosen, fixed=[1])[0] is HALF


def test_constants_of_a_condition_and_of_a_body():
    def program(x, limit, w):
        return lax.while_loop(lambda h: h.sum() < limit, lambda h: lax.tanh(h @ w), x)

    carried, outside = inner_wants(program, X, jnp.float32(3), W)
    assert carried == (EXACT,)
    assert outside == (START, LIMIT, DIVISOR)


def test_a_limit_is_exact_where_it_is_computed_from_what_the_loop_reads():
    def wanted(product):
        def program(x, w):
            limit = product(x, w).sum()
            return lax.while_loop(lambda size: (size * x @ w).sum() > limit, lambda size: 0.5 * size, jnp.float32(1))

        closed = jax.make_jaxpr(program)(X, W)
        total = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "reduce_sum")
        return planner_of("O2").demand(closed, (HALF,), REGIMES["O2"], "").of(total.invars[0])

    assert wanted(lambda x, w: x @ w) is EXACT
    assert wanted(jax.jit(lambda x, w: x @ w)) is EXACT
    assert wanted(lambda x, w: jnp.ones((4, 16)) @ jnp.ones((16, 16))) is FULL


def test_a_stencil_is_of_one_channel():
    def program(x, kernel):
        return lax.conv(x, kernel, (1,), "SAME")

    assert wants_of(program, SIGNAL[:, :1], KERNEL[:1]) == (FULL, FULL)  # Known or not.
    assert wants_of(program, SIGNAL[:, :1], KERNEL) == (HALF, HALF)


def test_a_stencil_of_many_channels_has_a_kernel_that_the_program_knows():
    program = depthwise

    assert wants_of(program, SIGNAL, KERNEL) == (HALF, HALF)
    assert wants_of(program, SIGNAL, KERNEL, fixed=[1]) == (FULL, FULL)
    assert wants_of(lambda x, k: program(x, k * 2 + jnp.eye(3)[:1, None]), SIGNAL, KERNEL, fixed=[1])[0] is FULL
    assert wants_of(jax.jit(program), SIGNAL, KERNEL, fixed=[1]) == (FULL, FULL)
    assert wants_of(lambda x: jax.jit(program)(x, np.ones((2, 1, 3), np.float32)), SIGNAL) == (FULL,)

    def branches(i, x, kernel):
        return lax.cond(i, program, lambda x, k: program(x, -k), x, kernel)

    assert wants_of(branches, True, SIGNAL, KERNEL, fixed=[2])[1] is FULL
    assert wants_of(branches, True, SIGNAL, KERNEL)[1] is HALF

    def scanned(x, kernel, kernels):
        return lax.scan(lambda h, k: (program(program(h, kernel), k), None), x, kernels)[0]

    kernels = jnp.stack([KERNEL] * 3)
    assert wants_of(scanned, SIGNAL, KERNEL, kernels) == (HALF, HALF, HALF)
    assert wants_of(scanned, SIGNAL, KERNEL, kernels, fixed=[1, 2]) == (HALF, FULL, FULL)
    assert wants_of(scanned, SIGNAL, KERNEL, kernels, fixed=[1]) == (HALF, FULL, HALF)

    def repeated(x, kernel):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, program(s[1], kernel)), (0, x))[1]

    assert wants_of(repeated, SIGNAL, KERNEL, fixed=[1])[1] is FULL
    assert wants_of(repeated, SIGNAL, KERNEL)[1] is HALF


def test_a_kernel_that_depends_on_an_argument_or_on_an_effect_is_not_known():
    def program(x, known, learned):
        return depthwise(x, known + learned)

    assert wants_of(program, SIGNAL, KERNEL, KERNEL, fixed=[1])[0] is HALF
    assert wants_of(program, SIGNAL, KERNEL, KERNEL, fixed=[1, 2])[0] is FULL

    def told(x):
        shape = jax.ShapeDtypeStruct(KERNEL.shape, jnp.float32)
        return depthwise(x, io_callback(lambda: np.ones(KERNEL.shape, np.float32), shape))

    assert wants_of(told, SIGNAL) == (HALF,)


def test_a_kernel_of_several_channels_is_a_layer():
    def equation(fn, *args):
        return jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]

    one = equation(lambda x: depthwise(x, KERNEL), SIGNAL)
    two = equation(lambda x: lax.conv(x, jnp.ones((1, 2, 3)), (1,), "SAME"), jnp.ones((2, 2, 8)))
    assert has_one_channel(one) and not has_one_channel(two)
    assert not has_one_channel(equation(lax.exp, X))


@pytest.mark.parametrize(
    ("spec", "shapes", "reduction", "outer", "contracted", "free"),
    [
        ("ab,bc->ac", ((4, 16), (16, 8)), False, False, 16, (4, 8)),
        ("a,a->", ((16,), (16,)), True, False, 16, (1, 1)),
        ("ab,ab->a", ((4, 16), (4, 16)), True, False, 16, (1, 1)),
        ("ab,ab->", ((4, 16), (4, 16)), True, False, 64, (1, 1)),
        ("ab,b->a", ((4, 16), (16,)), False, False, 16, (4, 1)),
        ("a,b->ab", ((4,), (16,)), False, True, 1, (4, 16)),
        ("ab,ac->abc", ((4, 16), (4, 8)), False, True, 1, (16, 8)),
        ("abc,acd->abd", ((2, 3, 5), (2, 5, 7)), False, False, 5, (3, 7)),
    ],
)
def test_kinds_of_products(spec, shapes, reduction, outer, contracted, free):
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(*map(jnp.ones, shapes)).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.dot_general_p]
    assert (is_reduction(eqn), is_outer(eqn), num_contracted(eqn)) == (reduction, outer, contracted)
    assert sorted(free_sizes(eqn)) == sorted(free)


def test_what_is_no_product_is_neither():
    eqn = jax.make_jaxpr(lax.exp)(X).jaxpr.eqns[0]
    assert not is_reduction(eqn) and not is_outer(eqn)
    assert free_sizes(eqn) == ()


def test_what_was_found_is_remembered_for_each_question():
    closed = jax.make_jaxpr(jax.named_call(lambda x: x + 1, name="b"))(X)
    demand = Planner(jamp.get_policy("O2")).demand
    (x,) = closed.jaxpr.invars
    first = demand(closed, (HALF,), REGIMES["O2"], "")
    assert demand(closed, (HALF,), REGIMES["O2"], "elsewhere") is first  # Without rules by scope.
    assert demand(closed, (FULL,), REGIMES["O2"], "").of(x) is FULL
    assert demand(closed, (HALF,), REGIMES["full"], "").of(x) is FULL
    by_scope = Planner(jamp.get_policy("O2").with_rules(full=["a/b"])).demand
    assert by_scope(closed, (HALF,), REGIMES["O2"], "a").of(x) is FULL
    assert by_scope(closed, (HALF,), REGIMES["O2"], "b").of(x) is HALF


@pytest.mark.parametrize(("level", "want", "of_gate"), [("O2", HALF, GATE), ("O2", FULL, DIVISOR), ("O3", HALF, HALF)])
def test_what_scales_a_state_is_a_gate(level, want, of_gate):
    closed = jax.make_jaxpr(lambda state, gate, x, other: (state * gate + x, other * 2.0))(X, X, X, X)
    wanted = planner_of(level).demand(closed, (want, HALF), REGIMES[level], "", frozenset(), States(frozenset({0})))
    state, gate, x, other = (wanted.of(var) for var in closed.jaxpr.invars)
    assert (gate, other) == (of_gate, HALF)
    assert GATE not in (state, x)
    alone = planner_of(level).demand(closed, (want, HALF), REGIMES[level], "")
    assert alone.of(closed.jaxpr.invars[1]) == want


@pytest.mark.parametrize(("level", "of_decay"), [("O2", GATE), ("O3", HALF)])
def test_what_a_tree_multiplies_with_itself_is_a_gate(level, of_decay):
    def tree(decay, x):
        return lax.associative_scan(lambda one, other: (one[0] * other[0], one[1] * other[0] + other[1]), (decay, x))[1]

    assert wants_of(tree, X, X, level=level)[0] == of_decay


def test_what_is_wanted_of_a_loop_is_said_of_all_its_results():
    def program(x):
        return lax.scan(lambda s, _: (s + 1.0, jnp.exp(s)), x, None, length=3)

    closed = jax.make_jaxpr(program)(X)
    (loop,) = closed.jaxpr.eqns
    wanted = planner_of("O2").demand(closed, (HALF, FULL), REGIMES["O2"], "")
    assert wanted.of_results(loop) == (HALF, FULL)
    assert wanted.of(closed.jaxpr.invars[0]) == HALF
