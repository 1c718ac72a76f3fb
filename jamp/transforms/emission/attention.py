"""Emits an attention that was found: bound as one primitive, with its written form inside."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array

from jamp._compat import eval_jaxpr, jaxpr_consts, open_jaxpr
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.fused import fused_attention
from jamp.transforms.emission.run import Run
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.program.plan import Step
from jamp.transforms.program.rewrites import FusedAttention


def emit_attention(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """An attention."""
    rewrite = step.rewrite
    if not isinstance(rewrite, FusedAttention):
        raise TypeError(f"Expected the step of an attention, got {rewrite!r}.")
    (plan,) = rewrite.plans
    inner = run._replace(keep_half=False, probe=None)
    if is_taylor_mode():
        return execute(plan, operands, inner)
    key = ("attention", plan, inner, *map(jax.typeof, operands))
    built = run.memo.built
    if key not in built:
        built[key] = jax.make_jaxpr(lambda *args: execute(plan, args, inner))(*operands)
    written = built[key]
    consts, count = jaxpr_consts(written), len(operands)
    if consts:  # To be operands behind the others.
        plain = open_jaxpr(written)
        values = [*operands, *consts]
        written = jax.make_jaxpr(lambda *args: eval_jaxpr(plain, args[count:], *args[:count]))(*values)
        return [fused_attention(written, rewrite.attention, values)]
    return [fused_attention(written, rewrite.attention, operands)]
