"""A program without the checks that would stop it, so that one can look at what they complain about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, open_jaxpr, with_equations, with_jaxprs, with_operands


def without_checks(jaxpr: ClosedJaxpr, note: Callable[[], None]) -> ClosedJaxpr:
    """The same jaxpr without errors that are raised while it runs: `checkify.check`, and `eqx.error_if` and its like.

    The latter is a branch that does nothing but call the host, beside one that hands its operands on. It hands them on
    too now, and calls `note`.
    """
    inner = open_jaxpr(jaxpr)
    eqns = [_without(eqn, note) for eqn in inner.eqns if not (eqn.primitive.name == "check" and not eqn.outvars)]
    if len(eqns) == len(inner.eqns) and all(new is old for new, old in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    return with_equations(jaxpr, inner.invars, eqns)


def _without(eqn: Eqn, note: Callable[[], None]) -> Eqn:
    params = with_jaxprs(eqn.params, lambda jaxpr: without_checks(jaxpr, note))
    if eqn.primitive.name == "cond" and (branches := _handing_on(params["branches"], note)):
        params = {**params, "branches": branches}
    return eqn if params is eqn.params else with_operands(eqn, eqn.invars, params)


def _handing_on(branches: Sequence[ClosedJaxpr], note: Callable[[], None]) -> tuple[ClosedJaxpr, ...] | None:
    """Branches of which some only call the host, with these handing on what the others do."""
    passing = [branch for branch in branches if not open_jaxpr(branch).eqns]
    if not passing or not any(_only_calls_host(open_jaxpr(branch)) for branch in branches):
        return None

    def on_host(*values: np.ndarray) -> list[np.ndarray]:
        note()
        return [np.asarray(value) for value in values]

    def noting(*args: jax.Array) -> list[jax.Array]:
        outs = jaxpr_as_fun(passing[0])(*args)
        return jax.pure_callback(on_host, [jax.typeof(out) for out in outs], *outs)

    noted = jax.make_jaxpr(noting)(*(var.aval for var in open_jaxpr(passing[0]).invars))
    return tuple(noted if _only_calls_host(open_jaxpr(branch)) else branch for branch in branches)


def _only_calls_host(jaxpr: Jaxpr) -> bool:
    return bool(jaxpr.eqns) and all("callback" in eqn.primitive.name for eqn in jaxpr.eqns)
