"""Laws of what the interpreter knows of values: any order will do, and repetition ends.

They hold for all pairs and triples of some states of each kind, and for random lists of them.
"""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Pair
from jamp.transforms.program.flow import Flow, Root, inside
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import join, meet
from jamp.transforms.program.marks import NO_MARKS, Mark
from jamp.transforms.program.scale import Range
from jamp.transforms.program.want import Want, combine

PAIRS = (Pair(FLOAT32, BFLOAT16), Pair(FLOAT32, FLOAT16), Pair(FLOAT64, FLOAT32))
CARRY, ITEM = Root("carry", 1), Root("xs", 1, 2)
# Size, scope, marks, roots and scale, of which a state of each kind has either.
CONTENTS = (
    (3, "a/b", Mark.HUGE | Mark.GIVEN, frozenset({CARRY}), 20),
    (7, "a/c", Mark.GIVEN | Mark.FRACTION, frozenset({ITEM}), -20),
    (7, "a", Mark.GIVEN | Mark.RAISED, frozenset(), 0),
)


@functools.cache
def states(pair: Pair) -> tuple[Flow, ...]:
    """States of each kind under a policy: half data may have either half dtype, as the user may have both."""
    narrow = (FLOAT16, BFLOAT16) if pair.wide == FLOAT32 else (pair.narrow,)
    held = [(dtype, kind) for kind in Kind for dtype in (narrow if kind == Kind.HALF else (pair.wide,))]
    found = (Flow(dtype, kind, *contents) for dtype, kind in held for contents in CONTENTS)
    return tuple(flow._replace(scale=0) if flow.kind == Kind.HALF else flow for flow in found)


def tuples(count: int) -> list[tuple[Pair, tuple[Flow, ...]]]:
    return [(pair, found) for pair in PAIRS for found in itertools.product(states(pair), repeat=count)]


def test_join_is_commutative_and_idempotent():
    for pair, (a, b) in tuples(2):
        both = join([a, b], pair)
        assert both == join([b, a], pair)
        assert join([a], pair) == join([a, a], pair) == a
        assert join([both, a], pair) == join([both, b], pair) == both


def test_join_is_associative():
    for pair, (a, b, c) in tuples(3):
        at_once = join([a, b, c], pair)
        assert join([join([a, b], pair), c], pair) == at_once
        assert join([a, join([b, c], pair)], pair) == at_once


def test_join_loses_nothing():
    for pair, (a, b) in tuples(2):
        both = join([a, b], pair)
        assert both.marks | Mark.RAISED == a.marks | b.marks | Mark.RAISED
        assert both.roots == a.roots | b.roots
        assert both.size == max(a.size, b.size)
        # A number beside data is a mask.
        data = [state for state in (a, b) if state.kind != Kind.WEAK] or [a, b]
        assert abs(both.scale) == max(abs(state.scale) for state in data)
        assert both.scope == (a.scope if a.scope == b.scope else "a")


def test_half_is_as_good_if_it_is_for_each():
    for pair, (a, b) in tuples(2):
        raised = a.has(Mark.RAISED) and b.has(Mark.RAISED)
        assert join([a, b], pair).has(Mark.RAISED) == meet(a, b, a.kind, pair).has(Mark.RAISED) == raised


# The order of which `join` is the least upper bound, as pairs of which the second is firmer or as firm.
ORDER = {
    Kind.WEAK: {Kind.WEAK, Kind.LAZY, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.LAZY: {Kind.LAZY, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.HALF: {Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.ISLAND: {Kind.ISLAND, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.STAT: {Kind.STAT, Kind.FULL},
    Kind.FULL: {Kind.FULL},
}


def test_join_is_the_least_kind_that_is_as_firm_as_all():
    for pair, (a, b) in tuples(2):
        above = ORDER[a.kind] & ORDER[b.kind]
        (least,) = [kind for kind in above if above <= ORDER[kind]]
        assert join([a, b], pair).kind == least


def test_a_joined_dtype_is_wide_or_half():
    for pair, found in tuples(3):
        out = join(list(found), pair)
        dtypes = {state.dtype for state in found if state.kind == Kind.HALF}
        dtypes |= {pair.narrow for state in found if state.kind == Kind.ISLAND}
        if out.kind != Kind.HALF:
            assert out.dtype == pair.wide
        else:  # The user's own half dtype, where there is no other.
            assert {out.dtype} == dtypes if len(dtypes) == 1 else out.dtype == pair.narrow


def test_kinds_and_wants_are_ordered_as_they_are_written():
    assert [int(kind) for kind in Kind] == list(range(6))
    assert [int(want) for want in Want] == list(range(17))


def test_a_carry_never_falls():
    for pair, (before, after) in tuples(2):
        for kind in Kind:
            met = meet(before, after, kind, pair)
            assert met.kind == max(before.kind, kind)
            assert met.marks | Mark.RAISED == before.marks | after.marks | Mark.RAISED
            assert met.size == max(before.size, after.size)
            # What else it continues, it continues for one iteration alone.
            assert (met.scope, met.roots) == (before.scope, before.roots)
            rises = pair.narrow if kind == Kind.HALF else pair.wide
            assert met.dtype == (rises if kind > before.kind else before.dtype)


def test_meet_is_idempotent():
    for pair, (before, after) in tuples(2):
        assert meet(before, before, before.kind, pair) == before
        for kind in Kind:
            met = meet(before, after, kind, pair)
            assert meet(met, after, kind, pair) == meet(met, met, kind, pair) == met


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_carry_settles(pair):
    for first in states(pair):
        carry, met = first, {first}
        for after in (*states(pair), *reversed(states(pair))):
            carry = meet(carry, after, after.kind, pair)
            met.add(carry)
        # Each new state is firmer, larger, or has a mark more.
        assert len(met) <= 1 + len(Kind) + len(CONTENTS) + len(Mark)
        assert all(meet(carry, after, after.kind, pair) == carry for after in states(pair))


ONE, TWO, BOTH = Range(1.0, 1.0), Range(2.0, 2.0), Range(1.0, 2.0)


@pytest.mark.parametrize(
    ("first", "second", "joined"), [(ONE, ONE, ONE), (ONE, TWO, BOTH), (BOTH, ONE, BOTH), (ONE, None, None)]
)
@pytest.mark.parametrize("kind", [Kind.WEAK, Kind.LAZY, Kind.ISLAND], ids=str)
def test_one_of_several_numbers_lies_between_them(kind, first, second, joined):
    pair = PAIRS[1]
    a, b = (Flow(FLOAT32, kind, 4, number=number) for number in (first, second))
    assert join([a, b], pair).number == join([b, a], pair).number == joined
    own = Flow(FLOAT16, Kind.HALF, 4, number=second)  # The user's own half number.
    assert join([a, own], pair).number is None


def test_a_carry_that_changes_is_no_number():
    pair = PAIRS[1]
    one, two = (Flow(FLOAT32, Kind.LAZY, 4, number=number) for number in (ONE, TWO))
    data, half = one._replace(number=None), Flow(FLOAT16, Kind.HALF, 4)
    assert meet(one, one, Kind.LAZY, pair).number == ONE
    assert meet(one, one, Kind.ISLAND, pair).number == ONE
    for before, after in ((one, two), (one, data), (data, one), (one, half), (half, one)):
        assert meet(before, after, Kind.WEAK, pair).number is None
    assert meet(one, one, Kind.HALF, pair).number is None  # Half knows none.


def members(marks: Mark) -> set[Mark]:
    return {mark for mark in Mark if mark.value & marks.value}


SOME_MARKS = (NO_MARKS, *Mark, *(Mark(2 ** len(Mark) - 1 - mark.value) for mark in Mark), Mark(2 ** len(Mark) - 1))


def test_marks_are_sets():
    for a, b in itertools.product(SOME_MARKS, repeat=2):
        assert members(a | b) == members(a) | members(b)
        assert members(a & b) == members(a) & members(b)
        assert type(a | b) is type(a & b) is type(~a) is Mark
    for a in SOME_MARKS:
        assert members(~a) == set(Mark) - members(a)
        assert bool(a) == bool(members(a))


def test_marks_of_a_state():
    for marks, asked in itertools.product(SOME_MARKS, repeat=2):
        state = states(PAIRS[0])[0]._replace(marks=marks)
        assert state.has(asked) == bool(members(marks) & members(asked))
        assert members(state.without(asked).marks) == members(marks) - members(asked)
        assert state.without(asked)._replace(marks=marks) == state


def test_what_readers_want_together():
    for a, b, c in itertools.product(Want, repeat=3):
        assert combine(a, b) == combine(b, a)
        assert combine(combine(a, b), c) == combine(a, combine(b, c)) == combine(a, b, c)
    for want in Want:
        assert combine(want, want) == combine(want) == combine(Want.NONE, want) == want
    assert combine() == Want.NONE


def test_half_will_do_where_one_reader_says_so_and_none_insists():
    above = [want for want in Want if want >= Want.DIVISOR]
    assert [want for want in Want if combine(want, Want.HALF).full] == above
    assert combine(Want.SCORE, Want.FULL) == Want.FULL  # A softmax alone takes half scores.
    assert [want for want in Want if not want.full] == [Want.NONE, Want.HALF, Want.HALF_APART, Want.LEFT]


def test_a_difference_is_looked_at_whatever_other_readers_want():
    assert [want for want in Want if want.apart] == [
        Want.FULL_APART, Want.HALF_APART, Want.LEFT, Want.DIVISOR_APART, Want.BOUND,
    ]  # fmt: skip
    half = Want.NONE, Want.SCORE, Want.FULL, Want.FULL_APART, Want.HALF, Want.HALF_APART
    assert [combine(want, Want.HALF_APART) for want in half] == [Want.HALF_APART] * 6
    assert [combine(want, Want.FULL_APART) for want in half] == [Want.FULL_APART] * 4 + [Want.HALF_APART] * 2
    assert [combine(want, Want.DIVISOR) for want in half if want.apart] == [Want.DIVISOR_APART] * 2
    assert combine(Want.DIVISOR_APART, Want.PHASE) == Want.PHASE


def test_the_start_and_the_limit_of_a_loop_are_open():
    """Another reader settles what is wanted only if it decides when a loop ends: that is float32 in any case."""
    assert [want for want in Want if want.open] == [Want.START, Want.LIMIT, Want.VALUE]
    assert [want for want in Want if want.decides] == [Want.EXACT, Want.AGAIN]
    settled = [want for want in Want if not want.open]
    assert [want for want in settled if combine(want, Want.START) == want] == [Want.EXACT, Want.AGAIN]


SCOPES = ("", "a", "b", "a/a", "a/b", "a/b/a", "ab")
LISTS = st.lists(
    st.tuples(st.integers(0, 13), st.integers(1, 99), st.sampled_from(SCOPES), st.integers(0, 2 ** len(Mark) - 1)),
    min_size=2,
    max_size=6,
)


@given(st.sampled_from(PAIRS), LISTS, st.integers(1, 5))
def test_states_join_in_any_order_and_grouping(pair, drawn, split):
    found = [
        states(pair)[index % len(states(pair))]._replace(size=size, scope=scope, marks=Mark(marks))
        for index, size, scope, marks in drawn
    ]
    at_once = join(found, pair)
    split = min(split, len(found) - 1)
    assert join(found[split:] + found[:split], pair) == join(found[::-1], pair) == at_once
    assert join([join(found[:split], pair), join(found[split:], pair)], pair) == at_once
    assert all(inside(state.scope, at_once.scope) for state in found)
