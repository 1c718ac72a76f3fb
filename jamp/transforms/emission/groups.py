"""Rows that belong to groups, as tokens do to experts: what all rows of a group share."""

from __future__ import annotations

from jax import Array, lax


def of_groups(rows: Array, sizes: Array) -> Array:
    """The largest value of each group, and zero of a group without rows.

    Args:
        rows: A value of each row, none negative.
        sizes: How many rows each group has. Those of the first group come first.
    """
    members = _members(rows.size, sizes)
    values = lax.broadcast_in_dim(rows, members.shape, (0,))
    return lax.reduce_max(lax.select(members, values, lax.full_like(values, 0)), (0,))


def of_rows(groups: Array, sizes: Array, count: int) -> Array:
    """The value of the group that each row belongs to, and zero of a row without a group.

    Args:
        groups: A value of each group, none negative.
        sizes: How many rows each group has.
        count: The number of rows.
    """
    members = _members(count, sizes)
    values = lax.broadcast_in_dim(groups, members.shape, (1,))
    return lax.reduce_max(lax.select(members, values, lax.full_like(values, 0)), (1,))


def shared(rows: Array, sizes: Array) -> Array:
    """The largest value of the group that each row belongs to; a row without a group keeps its own."""
    found = of_rows(of_groups(rows, sizes), sizes, rows.size)
    return lax.max(found, lax.select(_has_group(rows.size, sizes), lax.full_like(rows, 0), rows))


def _members(count: int, sizes: Array) -> Array:
    """Which of a number of rows belong to which group. XLA makes it where it is read, and not in memory."""
    shape = count, sizes.shape[0]
    ends = lax.cumsum(sizes)
    row = lax.broadcasted_iota(sizes.dtype, shape, 0)
    first, last = (lax.broadcast_in_dim(x, shape, (1,)) for x in (lax.sub(ends, sizes), ends))
    return lax.bitwise_and(lax.ge(row, first), lax.lt(row, last))


def _has_group(count: int, sizes: Array) -> Array:
    row = lax.iota(sizes.dtype, count)
    return lax.lt(row, lax.broadcast(lax.reduce_sum(sizes, (0,)), (count,)))
