"""Laws of what the interpreter knows of values, over random states: any order will do, and repetition ends."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Pair
from jamp._primitives import TABLE, Trait
from jamp.transforms.program.flow import (
    NO_MARKS,
    TRANSMISSION,
    Flow,
    Kind,
    Mark,
    Root,
    common_scope,
    inside,
    join,
    meet,
    transmit,
)
from jamp.transforms.program.want import Want, combine

PAIRS = (Pair(FLOAT32, BFLOAT16), Pair(FLOAT32, FLOAT16), Pair(FLOAT64, FLOAT32))
ALL_MARKS = functools.reduce(lambda a, b: a | b, Mark)

pairs = st.sampled_from(PAIRS)
kinds = st.sampled_from(Kind)
marks = st.sets(st.sampled_from(Mark)).map(lambda found: functools.reduce(lambda a, b: a | b, found, NO_MARKS))
roots = st.frozensets(st.builds(Root, st.sampled_from(("carry", "xs", "sum")), st.integers(0, 1), st.integers(0, 2)))
scopes = st.lists(st.sampled_from("ab"), max_size=3).map("/".join)
traits = st.sampled_from(sorted({row.traits for row in TABLE.values()}, key=lambda found: found.value))
wants = st.sampled_from(Want)


def flows_of(pair: Pair) -> st.SearchStrategy[Flow]:
    """Any state of a value under a policy: half data may have either half dtype, as the user may have both."""
    narrow = st.sampled_from((FLOAT16, BFLOAT16)) if pair.wide == FLOAT32 else st.just(pair.narrow)

    def of_kind(kind: Kind) -> st.SearchStrategy[Flow]:
        dtype = narrow if kind == Kind.HALF else st.just(pair.wide)
        return st.builds(Flow, dtype, st.just(kind), st.integers(1, 99), scopes, marks, roots)

    return kinds.flatmap(of_kind)


several = pairs.flatmap(lambda pair: st.tuples(st.just(pair), flows_of(pair), flows_of(pair), flows_of(pair)))


@given(several)
def test_join_is_commutative_and_associative(drawn):
    pair, a, b, c = drawn
    assert join([a, b], pair) == join([b, a], pair)
    at_once = join([a, b, c], pair)
    assert join([join([a, b], pair), c], pair) == join([a, join([b, c], pair)], pair) == at_once


@given(several)
def test_join_is_idempotent(drawn):
    pair, a, b, _ = drawn
    assert join([a], pair) == join([a, a], pair) == a
    both = join([a, b], pair)
    assert join([both, a], pair) == join([both, b], pair) == both


@given(several)
def test_join_loses_nothing(drawn):
    pair, a, b, _ = drawn
    both = join([a, b], pair)
    assert both.marks == a.marks | b.marks
    assert both.roots == a.roots | b.roots
    assert both.size == max(a.size, b.size)
    assert inside(a.scope, both.scope) and inside(b.scope, both.scope)


# The order of which `join` is the least upper bound, as pairs of which the second is firmer or as firm.
ORDER = {
    Kind.WEAK: {Kind.WEAK, Kind.LAZY, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.LAZY: {Kind.LAZY, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.HALF: {Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.ISLAND: {Kind.ISLAND, Kind.HALF, Kind.STAT, Kind.FULL},
    Kind.STAT: {Kind.STAT, Kind.FULL},
    Kind.FULL: {Kind.FULL},
}


@given(several)
def test_join_is_the_least_kind_that_is_as_firm_as_all(drawn):
    pair, a, b, _ = drawn
    above = ORDER[a.kind] & ORDER[b.kind]
    (least,) = [kind for kind in above if above <= ORDER[kind]]
    assert join([a, b], pair).kind == least


@given(several)
def test_a_joined_dtype_is_wide_or_half(drawn):
    pair, a, b, c = drawn
    out = join([a, b, c], pair)
    assert out.dtype == pair.wide if out.kind != Kind.HALF else pair.is_narrow(out.dtype)
    if out.kind == Kind.HALF and out.dtype != pair.narrow:  # The user's own half dtype, where there is no other.
        assert {state.dtype for state in (a, b, c) if state.kind == Kind.HALF} == {out.dtype}
        assert all(state.kind != Kind.ISLAND for state in (a, b, c))


@given(several, kinds)
def test_a_carry_never_falls(drawn, kind):
    pair, before, after, _ = drawn
    met = meet(before, after, kind, pair)
    assert met.kind == max(before.kind, kind)
    assert met.marks == before.marks | after.marks
    assert met.size == max(before.size, after.size)
    assert met.scope == before.scope
    # What else it continues, it continues for one iteration alone.
    assert met.roots == before.roots
    assert met.dtype == pair.wide if met.kind != Kind.HALF else pair.is_narrow(met.dtype)
    if met.kind == before.kind:
        assert met.dtype == before.dtype
    elif met.kind == Kind.HALF:
        assert met.dtype == pair.narrow


@given(several, kinds)
def test_meet_is_idempotent(drawn, kind):
    pair, before, after, _ = drawn
    assert meet(before, before, before.kind, pair) == before
    met = meet(before, after, kind, pair)
    assert meet(met, after, kind, pair) == meet(met, met, kind, pair) == met


@given(pairs.flatmap(lambda pair: st.tuples(st.just(pair), flows_of(pair), st.lists(flows_of(pair), max_size=40))))
def test_a_carry_settles(drawn):
    pair, carry, iterations = drawn
    distinct = {carry}
    for after in iterations:
        carry = meet(carry, after, after.kind, pair)
        distinct.add(carry)
    # Each new state is firmer, larger, or has a mark more.
    assert len(distinct) <= 1 + len(Kind) + len(Mark) + len({after.size for after in iterations})


@given(marks, marks, traits, kinds)
def test_marks_are_handed_on_one_by_one(a, b, through, kind):
    assert transmit(a | b, through, kind) == transmit(a, through, kind) | transmit(b, through, kind)
    assert transmit(transmit(a, through, kind), through, kind) == transmit(a, through, kind)
    born = transmit(NO_MARKS, through, kind)
    assert born == (NO_MARKS if through & (Trait.INTEGRAL | Trait.COUNTS) else Mark.FRACTION)
    assert transmit(a, through, kind) & ~(a | born) == NO_MARKS


@pytest.mark.parametrize("kind", Kind)
def test_where_marks_end(kind):
    """One row a mark: what hands it on, what ends it, and to which kinds of results it goes."""

    def goes(mark: Mark, through: Trait) -> bool:
        return bool(transmit(mark, through, kind) & mark)

    for always in (Mark.TANGENT, Mark.GIVEN, Mark.TRAINED):
        assert goes(always, Trait.EXPONENTIAL)
    assert goes(Mark.HUGE, Trait.SPREADS) == (kind != Kind.HALF)  # The cast to half saturates.
    assert not goes(Mark.HUGE, Trait.EXPONENTIAL)
    for same in (Trait.VIEW, Trait.MOVES, Trait.NEGATES):
        assert goes(Mark.QUOTIENT, same) == (kind != Kind.HALF)
    assert not goes(Mark.QUOTIENT, Trait.ADDS)
    assert goes(Mark.ROUNDS, Trait.EXPONENTIAL) == (kind in (Kind.WEAK, Kind.LAZY))
    assert goes(Mark.FRACTION, Trait.INTEGRAL)
    assert not goes(Mark.FRACTION, Trait.COUNTS)
    assert set(TRANSMISSION) == set(Mark)


@given(several, marks)
def test_marks_of_a_state(drawn, mark):
    _, state, _, _ = drawn
    assert state.has(mark) == bool(state.marks & mark)
    bare = state.without(mark)
    assert bare.marks == state.marks & ~mark
    assert bare._replace(marks=state.marks) == state


@given(wants, wants, wants)
def test_what_readers_want_together(a, b, c):
    assert combine(a, b) == combine(b, a)
    assert combine(combine(a, b), c) == combine(a, combine(b, c)) == combine(a, b, c)
    assert combine(a, a) == combine(a) == a
    assert combine(Want.NONE, a) == a
    assert combine() == Want.NONE


def test_half_will_do_where_one_reader_says_so_and_none_insists():
    assert [want for want in Want if combine(want, Want.HALF).full] == [Want.DIVISOR, Want.PHASE, Want.EXACT]
    assert combine(Want.SCORE, Want.FULL) == Want.FULL  # A softmax alone takes half scores.
    assert [want for want in Want if not want.full] == [Want.NONE, Want.HALF]


@given(st.lists(scopes, min_size=1, max_size=4))
def test_a_common_scope_is_the_innermost_that_encloses_all(found):
    common = common_scope(found)
    assert all(inside(scope, common) for scope in found)
    deeper = [scope for scope in found if scope != common and len(scope) > len(common)]
    for scope in deeper:
        parts = scope.split("/")[: len(common.split("/")) + 1 if common else 1]
        assert not all(inside(other, "/".join(parts)) for other in found)


def test_a_scope_is_told_from_one_whose_name_begins_alike():
    assert inside("a/b", "a") and inside("a", "a") and inside("a", "")
    assert not inside("ab", "a") and not inside("", "a") and not inside("a", "a/b")
