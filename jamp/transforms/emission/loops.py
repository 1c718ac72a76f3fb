"""Loops, rebuilt through `lax.scan` and `lax.while_loop` around planned bodies."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jamp._compat import open_jaxpr, scan_counts, while_parts
from jamp.transforms.emission.casts import rounded_outside
from jamp.transforms.emission.execute import Run, execute
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.keeping.states import half_states
from jamp.transforms.program.plan import Scan, Step, loop_dtypes


def emit_scan(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A scan. What its half constants are cast of follows the operands."""
    rewrite, params = step.rewrite, step.eqn.params
    if not isinstance(rewrite, Scan):
        raise TypeError(f"Expected the step of a scan, got {rewrite!r}.")
    (plan,) = rewrite.plans
    consts, carries = scan_counts(params)
    count = len(step.eqn.invars)
    dtypes = loop_dtypes(step)
    fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries : count]
    shared = [] if is_taylor_mode() else zip(rewrite.shared, operands[count:], strict=True)
    casts = [(i, x, lax.stop_gradient(fixed[i])) for i, x in shared]
    inner = run._replace(in_loop=True)
    states = half_states(plan, run.memo.keeping) if rewrite.states_may_be_half else frozenset()

    def body(carry: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        constants = list(fixed)
        for index, original, half in casts:
            constants[index] = rounded_outside(original, half)
        outs = execute(plan, [*constants, *carry, *x], inner, dtypes, states)
        return outs[:carries], outs[carries:]

    # The length of an exported program may be an unknown, which `lax.scan` takes from its operands alone.
    options = {name: params[name] for name in ("reverse", "unroll")} | ({} if xs else {"length": params["length"]})
    final, ys = lax.scan(body, [*map(_as_array, init)], list(xs), **options)
    return [*final, *ys]


def _as_array(value: Array) -> Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def emit_while(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A while loop."""
    (cond, body), parts = step.plans, while_parts(step.eqn.params)
    inner = run._replace(keep_half=False, in_loop=True)  # Reverse mode does not pass through a while loop.
    dtypes = loop_dtypes(step)

    def goes_on(carry: Sequence[Array]) -> Array:
        return execute(cond, [*operands[: parts.cond_consts], *carry], inner)[0]

    def iteration(carry: Sequence[Array]) -> list[Array]:
        after = execute(body, [*operands[parts.cond_consts : parts.first_carry], *carry], inner, dtypes)
        if not batched:
            return after
        going = goes_on(carry)
        return [select_going(going, new, old) for new, old in zip(after, carry, strict=True)]

    # Under vmap the condition is one for each member of the batch. The loop goes on while one of them does, and what
    # has come to its end stays as it is: the meaning that JAX gives to such an equation, which `while_loop` refuses.
    batched = open_jaxpr(cond.jaxpr).outvars[0].aval.shape != ()
    final = lax.while_loop(
        lambda carry: jnp.any(goes_on(carry)) if batched else goes_on(carry),
        iteration,
        [*map(_as_array, operands[parts.first_carry :])],
    )
    return list(final)


def select_going(going: Array, new: Array, old: Array) -> Array:
    """The new value for the members of a batch whose loop goes on, the old one for the others."""
    return lax.select(lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)
