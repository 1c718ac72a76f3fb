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
    DIVISOR = 6  # One of them divides by it, or solves for it: an epsilon in it must not vanish.
    DIVISOR_APART = 7  # The same, and one of them takes something as large off it.
    PHASE = 8  # One of them takes it modulo something, or for an index.
    START = 9  # A loop to convergence starts from it: see `analysis.starts`.
    LIMIT = 10  # A loop to convergence only compares with it: see `analysis.starts`.
    VALUE = 11  # The same, and a part of it is the value at another part: see `analysis.points`.
    EXACT = 12  # It decides when a loop ends: see `analysis.demand`.
    AGAIN = 13  # The same, and it is a choice, or makes one, that ends the loop when it comes again.

    @property
    def full(self) -> bool:
        """Whether the value is wanted in float32."""
        return self not in (Want.NONE, Want.HALF, Want.HALF_APART)

    @property
    def apart(self) -> bool:
        """Whether a reader takes something as large off it, so that what was added to a large part must be left."""
        return self in APART.values()

    @property
    def decides(self) -> bool:
        """Whether it decides when a loop ends."""
        return self in (Want.EXACT, Want.AGAIN)

    @property
    def open(self) -> bool:
        """Whether it takes the equations before a loop to tell what is wanted: see `analysis.starts`."""
        return self in (Want.START, Want.LIMIT, Want.VALUE)


Wants = tuple[Want, ...]
# By want, the same where a reader takes something as large off the value.
APART = {Want.FULL: Want.FULL_APART, Want.HALF: Want.HALF_APART, Want.DIVISOR: Want.DIVISOR_APART}


def combine(*wants: Want) -> Want:
    """What several readers want together. A reader that does not care changes nothing."""
    largest = max(wants, default=Want.NONE)
    return APART[largest] if largest in APART and any(want.apart for want in wants) else largest
