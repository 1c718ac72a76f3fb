"""What the readers of a value want of it."""

from __future__ import annotations

import enum


@enum.unique
class Want(enum.IntEnum):
    """What readers want of a value. What several of them want together is the largest, as `combine` says."""

    NONE = 0  # None of its readers cares.
    SCORE = 1  # All that care compute in float32, to make weights of it in a softmax.
    FULL = 2  # All that care compute in float32.
    FULL_APART = 3  # The same, and one of them takes something as large off it.
    HALF = 4  # To one of them half will do.
    HALF_APART = 5  # The same, and one of them takes something as large off it.
    LEFT = 6  # The same, and that is a number, as in `1 - z`: a sigmoid is float32, and half will do of all else.
    DIVISOR = 7  # One of them divides by it, or solves for it: an epsilon in it must not vanish.
    DIVISOR_APART = 8  # The same, and one of them takes something as large off it.
    BOUND = 9  # It is taken from a number that it comes near, as in `1 - p`, or read where a derivative is infinite.
    GATE = 10  # It scales a state in each iteration: see `analysis.loops.gates`. A product may be half all the same.
    PHASE = 11  # One of them takes it modulo something, or for an index.
    START = 12  # A loop to convergence starts from it: see `analysis.loops.starts`.
    LIMIT = 13  # A loop to convergence only compares with it: see `analysis.loops.starts`.
    VALUE = 14  # The same, and a part of it is the value at another part: see `analysis.loops.points`.
    EXACT = 15  # It decides when a loop ends: see `analysis.demand`.
    AGAIN = 16  # The same, and it is a choice, or makes one, that ends the loop when it comes again.

    @property
    def full(self) -> bool:
        """Whether the value is wanted in float32."""
        return _FULL[self]

    @property
    def apart(self) -> bool:
        """Whether a reader takes something as large off it, so that what was added to a large part must be left."""
        return _APART[self]

    @property
    def decides(self) -> bool:
        """Whether it decides when a loop ends."""
        return self >= Want.EXACT

    @property
    def open(self) -> bool:
        """Whether it takes the equations before a loop to tell what is wanted: see `analysis.loops.starts`."""
        return _OPEN[self]


Wants = tuple[Want, ...]
# By want, the same where a reader takes something as large off the value.
APART = {Want.FULL: Want.FULL_APART, Want.HALF: Want.HALF_APART, Want.DIVISOR: Want.DIVISOR_APART}


# By want: a plan asks some ten thousand times, and `in` compares and hashes members in Python.
_FULL = tuple(want not in (Want.NONE, Want.HALF, Want.HALF_APART, Want.LEFT) for want in Want)
_APART = tuple(want in (*APART.values(), Want.LEFT, Want.BOUND) for want in Want)
_OPEN = tuple(want in (Want.START, Want.LIMIT, Want.VALUE) for want in Want)
_WITH_APART = tuple(APART.get(want, want) for want in Want)


# By want, the same in float32.
_RAISED = {Want.HALF: Want.FULL, Want.HALF_APART: Want.FULL_APART, Want.LEFT: Want.FULL_APART}


def raised(want: Want) -> Want:
    """What is wanted of a value that is computed in float32 whatever its readers would take."""
    return _RAISED.get(want, want)


def combine(*wants: Want) -> Want:
    """What several readers want together. A reader that does not care changes nothing."""
    largest = max(wants, default=Want.NONE)
    apart = _WITH_APART[largest]
    return apart if apart is not largest and any(_APART[want] for want in wants) else largest
