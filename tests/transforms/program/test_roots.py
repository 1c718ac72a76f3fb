"""What a value continues of a recurrence: through which primitives, and what they have done to it."""

import pytest

from jamp._dtypes import FLOAT32
from jamp._primitives import TABLE
from jamp.transforms.program.flow import TREE, Flow, Root, continued
from jamp.transforms.program.kind import Kind

CARRY, ITEM = Root("carry", 1), Root("xs", 1, 2)
H = Flow(FLOAT32, Kind.LAZY, 4, roots=frozenset({CARRY}))
X = Flow(FLOAT32, Kind.LAZY, 4, roots=frozenset({ITEM}))
PLAIN = Flow(FLOAT32, Kind.LAZY, 4)


def through(primitive: str, *operands: Flow | None) -> frozenset[Root]:
    """What the result of a primitive continues."""
    return continued(operands, TABLE[primitive].traits)


def test_a_root_is_unchanged_at_first():
    assert Root("carry") == ("carry", 0, 0, False, False)
    assert Root("tree") == TREE
    assert Root("xs", 1, 2, changed=True, limited=True).origin == Root("xs", 1, 2)


@pytest.mark.parametrize(("changed", "limited", "adds_up"), [(0, 0, True), (0, 1, False), (1, 0, True), (1, 1, True)])
def test_a_running_maximum_adds_nothing_up(changed, limited, adds_up):
    assert Root("carry", changed=bool(changed), limited=bool(limited)).adds_up == adds_up


@pytest.mark.parametrize("primitive", ["neg", "select_n", "concatenate", "reshape", "dynamic_slice", "pad", "sort"])
def test_a_carry_goes_on_as_it_was(primitive):
    assert through(primitive, H) == {CARRY}


@pytest.mark.parametrize("primitive", ["add", "sub", "mul", "div", "scatter-add", "scatter-mul"])
def test_arithmetic_changes_a_carry(primitive):
    assert through(primitive, H, PLAIN) == {CARRY._replace(changed=True)}


@pytest.mark.parametrize("primitive", ["max", "min", "clamp", "abs"])
def test_a_limit_limits_a_carry(primitive):
    assert through(primitive, PLAIN, H) == {CARRY._replace(limited=True)}


@pytest.mark.parametrize("primitive", ["exp", "tanh", "sqrt", "dot_general", "reduce_sum", "argmax", "gt"])
def test_a_function_of_a_carry_does_not_continue_it(primitive):
    assert through(primitive, H) == frozenset()


def test_what_has_happened_to_a_carry_stays():
    """As in `max(h + x, 0) * -1`: what an iteration adds, the next one adds to."""
    added = H._replace(roots=through("add", H, PLAIN))
    limited = H._replace(roots=through("max", added, None))
    assert through("neg", added) == added.roots
    assert limited.roots == {CARRY._replace(changed=True, limited=True)} == through("neg", limited)
    assert through("mul", H._replace(roots=through("max", H, None)), PLAIN) == limited.roots


def test_a_result_continues_what_any_of_its_operands_does():
    assert through("select_n", None, H, X) == {CARRY, ITEM}
    assert through("select_n", None, PLAIN, X) == {ITEM}
    assert through("add", PLAIN, None) == through("add") == frozenset()
