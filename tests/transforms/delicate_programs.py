"""Parts of random programs in which something has to stay float32: counts, keys, masks, convergence, large literals.

As in `programs.py` every operation keeps values and slopes of the order of one. What has to stay float32 inside of one
is nothing that the rest of the program could tell: a part is right, or wrong by far.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROWS, COLUMNS = SHAPE = (3, 4)
Body = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


DELICATE_OPERATIONS: dict[str, Callable[..., jax.Array]] = {}


def _cond_operands(body: Body, m: Any, v: Any, w: Any) -> Any:
    """Each branch reads an operand that the other does not."""
    branches = (lambda m, n: body(m, v, w), lambda m, n: jnp.sin(n))
    return lax.cond(m[0, 0] < 1e6, *branches, m, m + 7.0) + 0.5 * lax.cond(m[0, 0] > 1e6, *branches, m, m + 7.0)


def _switch_operands(body: Body, m: Any, v: Any, w: Any) -> Any:
    index = (m[0, 0] < 1e6).astype(jnp.int32)
    branches = [lambda m, n: jnp.zeros_like(m), lambda m, n: body(n, v, w), lambda m, n: m @ w]
    return lax.switch(index, branches, m, -m)


# By name, what jamp does wrong today; whoever mends it takes the entry out, and random programs have it from then on.
BROKEN = {}

DELICATE_COMBINATORS: dict[str, Callable[[Body, Any, Any, Any], Any]] = {
    "cond_operands": _cond_operands,
    "switch_operands": _switch_operands,
}
