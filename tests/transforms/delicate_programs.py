"""Parts of random programs in which something has to stay float32: counts, keys, masks, convergence, large literals.

As in `programs.py` every operation keeps values and slopes of the order of one. What has to stay float32 inside of one
is nothing that the rest of the program could tell: a part is right, or wrong by far.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS = SHAPE = (3, 4)
Body = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

INDEX = np.array([2, 0, 2], np.int32)
_DESCENDING = np.arange(COLUMNS)[::-1]
_LEAST = float(np.finfo(np.float32).min)
_MOST_STEPS = 60


def _attend_by_loop(m: Any, n: Any, least: float) -> Any:
    """Attention whose mask a loop writes."""

    def write(i: Any, mask: Any) -> Any:
        return mask.at[i].set(jnp.where(np.arange(ROWS) <= i, 0.0, least))

    mask = lax.fori_loop(0, ROWS, write, jnp.zeros((ROWS, ROWS), m.dtype))
    return jax.nn.softmax(m @ n.T / 4 + mask) @ n


def _huber(m: Any, n: Any) -> Any:
    """A sum of Huber's losses of differences of numbers around a thousand."""
    e = (m + 1000.0) - (n + 1000.0)
    losses = jnp.where(jnp.abs(e) <= 1.0, 0.5 * e**2, jnp.abs(e) - 0.5)
    return n + losses.sum(-1, keepdims=True) / 8


def _count(m: Any, n: Any) -> Any:
    """A factor of one, as 257 less 256: the first is counted by a product of ones with one-hots."""
    counts = jnp.ones((1, 514), m.dtype) @ jax.nn.one_hot(jnp.arange(514) % 2, 2, dtype=m.dtype)
    return m * (counts[0, :1] - 256.0) + 0.5 * n


def _move_numbers(m: Any) -> Any:
    """Numbers of more bits than half has, moved by a permutation matrix."""
    moved = jax.nn.one_hot(INDEX, ROWS, dtype=m.dtype) @ jnp.array([[2049.0], [2051.0], [2053.0]], m.dtype)
    return m * (moved - 2050.0) / 3


def keys(m: Any, order: np.ndarray = _DESCENDING) -> Any:
    """Keys that depend on data, and whose order does not."""
    return 4.0 + 0.002 * order + 1e-5 * jnp.tanh(m)


def _guard(m: Any, n: Any) -> Any:
    """A factor of one, as a quotient that an epsilon keeps from being zero by zero."""
    epsilon = jnp.asarray(np.float32(1e-8)) * jnp.ones((), m.dtype)
    h = jax.nn.relu(m)
    return n * ((h + epsilon) / (h + epsilon))


def _carry_scaled(m: Any, w: Any) -> Any:
    """A loop whose carry is in units of a millionth."""
    return lax.scan(lambda h, _: (jnp.tanh((h * 1e-6) @ w) * 1e6, None), m * 1e6, None, length=2)[0] * 1e-6


DELICATE_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "argsort": lambda m, n, v, w: jnp.take_along_axis(n, jnp.argsort(keys(m), 1), 1),
    "attend_by_loop": lambda m, n, v, w: _attend_by_loop(m, n, -1e9),
    "attend_by_loop_least": lambda m, n, v, w: _attend_by_loop(m, n, _LEAST),
    "carry_scaled": lambda m, n, v, w: _carry_scaled(m, w) + 0.5 * n,
    "count": lambda m, n, v, w: _count(m, n),
    "guard": lambda m, n, v, w: _guard(m, n),
    "huber": lambda m, n, v, w: _huber(m, n),
    "large_literal": lambda m, n, v, w: jnp.tanh(m * 3e5 * 3e-6) + 0.5 * n,
    "move_numbers": lambda m, n, v, w: _move_numbers(m),
    "saturate": lambda m, n, v, w: n * (jnp.abs(m) * 1e5 / (jnp.abs(m) * 1e5 + 8e4)),
    "scaled_large": lambda m, n, v, w: jnp.tanh((m * 3e5) @ (w * 3e-6)) + 0.5 * n,
    "scaled_small": lambda m, n, v, w: jnp.tanh(((m * 3e-9) @ w) * 3e8) + 0.5 * n,
    "small_literal": lambda m, n, v, w: jnp.tanh(m * 3e-9 * 3e8) + 0.5 * n,
    "sort_pairs": lambda m, n, v, w: lax.sort((keys(m), n), dimension=1, num_keys=1)[1],
}


def _cond_operands(body: Body, m: Any, v: Any, w: Any) -> Any:
    """Each branch reads an operand that the other does not."""
    branches = (lambda m, n: body(m, v, w), lambda m, n: jnp.sin(n))
    return lax.cond(m[0, 0] < 1e6, *branches, m, m + 7.0) + 0.5 * lax.cond(m[0, 0] > 1e6, *branches, m, m + 7.0)


def _switch_operands(body: Body, m: Any, v: Any, w: Any) -> Any:
    index = (m[0, 0] < 1e6).astype(jnp.int32)
    branches = [lambda m, n: jnp.zeros_like(m), lambda m, n: body(n, v, w), lambda m, n: m @ w]
    return lax.switch(index, branches, m, -m)


def _converge(body: Body, m: Any, v: Any, w: Any) -> Any:
    """A fixed point, by iteration until it moves no more; none where that does not end."""

    def step(z):
        return m + 0.05 * jnp.tanh(body(z, v, w))

    def going(s):
        return (jnp.max(jnp.abs(s[0] - s[1])) > 1e-4) & (s[2] < _MOST_STEPS)

    z, _, count = lax.while_loop(going, lambda s: (step(s[0]), s[0], s[2] + 1), (step(m), m, 1))
    return jnp.where(count < _MOST_STEPS, z, jnp.nan)


def _accumulate(add: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """A scan whose carry adds up by index."""

    def combinator(body: Body, m: Any, v: Any, w: Any) -> Any:
        def step(total: Any, i: Any) -> Any:
            return add(total, i, jnp.tanh(body(m - 0.1 * i, v, w)) / 4), None

        return lax.scan(step, jnp.zeros(SHAPE, m.dtype), jnp.arange(4))[0]

    return combinator


def _add_to_row(total: Any, i: Any, term: Any) -> Any:
    row = lax.dynamic_slice(total, (i % ROWS, 0), (1, COLUMNS))
    return lax.dynamic_update_slice(total, row + term[:1], (i % ROWS, 0))


def _add_and_turn(total: Any, i: Any, term: Any) -> Any:
    return jnp.concatenate([total[1:], total[:1]]) + term


# Closed over by the rules below, so not among their arguments.
_FACTOR = np.linspace(0.5, 1.0, ROWS * COLUMNS, dtype=np.float32).reshape(SHAPE)
_ON_DEVICE = jnp.asarray(_FACTOR)


def _custom_vjp_constant(body: Body, m: Any, v: Any, w: Any) -> Any:
    """A rule that closes over constants, another one in the backward pass than in the forward pass."""
    function = jax.custom_vjp(lambda m, v, w: body(m, v, w) * _FACTOR)

    def backward(kept: Any, g: Any) -> Any:
        return kept(g * _ON_DEVICE.astype(g.dtype))

    function.defvjp(lambda *args: (function(*args), jax.vjp(body, *args)[1]), backward)
    return function(m, v, w)


def _custom_jvp_constant(body: Body, m: Any, v: Any, w: Any) -> Any:
    def scaled(m, v, w):
        return body(m, v, w) * _ON_DEVICE

    function = jax.custom_jvp(scaled)
    function.defjvp(lambda primals, tangents: jax.jvp(scaled, primals, tangents))
    return function(m, v, w)


def _ref(body: Body, m: Any, v: Any, w: Any) -> Any:
    """A mutable array, written in a loop."""
    total = jax.new_ref(jnp.zeros_like(m))

    def step(i: Any, carry: Any) -> Any:
        total[...] = 0.5 * total[...] + 0.5 * body(m, v, w)
        return carry

    lax.fori_loop(0, 2, step, 0)
    return total[...]


DELICATE_COMBINATORS: dict[str, Callable[[Body, Any, Any, Any], Any]] = {
    "accumulate_by_index": _accumulate(lambda total, i, term: total.at[INDEX].add(0.5 * term)),
    "accumulate_by_turning": _accumulate(_add_and_turn),
    "accumulate_in_rows": _accumulate(_add_to_row),
    "accumulate_segments": _accumulate(lambda total, i, term: total + jax.ops.segment_sum(term, INDEX, ROWS) / 2),
    "cond_operands": _cond_operands,
    "converge": _converge,
    "custom_jvp_constant": _custom_jvp_constant,
    "custom_vjp_constant": _custom_vjp_constant,
    "ref": _ref,
    "switch_operands": _switch_operands,
}
