"""What is put together, and what is added to a diagonal: equations of real traces with operands of chosen states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp._compat import open_jaxpr
from jamp.transforms.planning.frames import adds_to_frame, builds, marks_of_sum
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark

GIVEN = Mark.GIVEN


def state(marks=NO_MARKS, size=16):
    return Flow(np.dtype("float32"), Kind.ISLAND, size, marks=marks)


def last_equation(fn, *shapes):
    return open_jaxpr(jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes))).eqns[-1]


def side_by_side(axis):
    return lambda a, b: jnp.concatenate([a, b], axis)


def written(x, update):
    return jax.lax.dynamic_update_slice(x, update, (0, 0))


@pytest.mark.parametrize(
    ("fn", "shapes", "marks", "expected"),
    [
        # A pose: columns beside each other, or rows below one another.
        (side_by_side(-1), [(3, 3), (3, 1)], [GIVEN, GIVEN], True),
        (side_by_side(-2), [(3, 4), (1, 4)], [GIVEN, GIVEN], True),
        # Layers that are stacked, and batches that are put together.
        (side_by_side(0), [(1, 4, 4), (1, 4, 4)], [GIVEN, GIVEN], False),
        # With numbers, or with what was put together before.
        (side_by_side(0), [(1, 4, 4), (1, 4, 4)], [GIVEN, NO_MARKS], True),
        (side_by_side(0), [(1, 4, 4), (1, 4, 4)], [GIVEN, GIVEN | Mark.BUILT], True),
        (side_by_side(0), [(1, 4, 4), (1, 4, 4)], [GIVEN, None], False),
        # Rows that are written to a buffer of zeros; a part of a row is put beside the rest.
        (written, [(5, 4), (1, 4)], [NO_MARKS, GIVEN], False),
        (written, [(5, 4), (1, 2)], [NO_MARKS, GIVEN], True),
        (written, [(5, 4), (1, 4)], [GIVEN, GIVEN | Mark.BUILT], True),
    ],
)
def test_builds(fn, shapes, marks, expected):
    eqn = last_equation(fn, *shapes)
    states = [each if each is None else state(each) for each in marks]
    ins = tuple(states + [None] * (len(eqn.invars) - len(states)))
    assert builds(eqn, ins, eqn.outvars[0].aval) is expected


FRAME = GIVEN | Mark.FRAME


@pytest.mark.parametrize(
    ("fn", "shape", "ins", "expected"),
    [
        (jnp.add, (4, 4), [state(FRAME), state(GIVEN)], True),
        (jnp.subtract, (2, 4, 4), [state(FRAME), state(GIVEN, size=2)], True),
        # A scaled diagonal of one number, as `eye` that is broadcast, is a frame whatever its size.
        (jnp.add, (4, 4), [state(FRAME, size=1), state(GIVEN)], True),
        # A number is added to all elements, and what has no state may be anything.
        (jnp.add, (4, 4), [state(FRAME), state(GIVEN, size=1)], False),
        (jnp.add, (4, 4), [state(FRAME), state(GIVEN | Mark.BUILT, size=1)], False),
        (jnp.add, (4, 4), [state(FRAME), None], False),
        # No square matrices.
        (jnp.add, (4, 5), [state(FRAME), state(GIVEN)], False),
        (jnp.add, (4,), [state(FRAME), state(GIVEN)], False),
        (jnp.multiply, (4, 4), [state(FRAME), state(GIVEN)], False),
    ],
)
def test_adds_to_frame(fn, shape, ins, expected):
    eqn = last_equation(fn, shape, shape)
    assert adds_to_frame(eqn, tuple(ins)) is expected
    marks = FRAME | Mark.BUILT
    of_sum = marks_of_sum(eqn, tuple(ins), marks)
    if not expected:
        assert of_sum == GIVEN | Mark.BUILT
    elif fn is jnp.subtract:
        assert of_sum == marks | Mark.SIGNED
    else:
        assert of_sum == marks
