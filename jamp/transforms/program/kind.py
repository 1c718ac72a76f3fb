"""The kinds of floating values, from what only happens to be float32 to what has to be."""

import enum


@enum.unique
class Kind(enum.IntEnum):
    """How firmly a floating value holds on to its dtype, weakest first."""

    WEAK = 0  # Computed from literals alone: takes the dtype of whatever it meets.
    LAZY = 1  # Float32 by origin (an argument, a closed-over array): cast where a half operation uses it.
    HALF = 2  # Stored in half.
    ISLAND = 3  # Float32 of data's size, computed from half data: rounded back when it leaves its scope.
    STAT = 4  # A float32 statistic: raises bigger half data to float32, yields to half data of its own size.
    FULL = 5  # An accumulator: float32 whatever it meets.
