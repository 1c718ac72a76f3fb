"""An optimizer of optax in a function that is cast: a whole train step, most often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, functions_and_files, inner_jaxprs, open_jaxpr
from jamp._warnings import warn_user
from jamp.policy import Policy

_JAMP = str(Path(__file__).parents[1] / "optim")
_UPDATES = ("update_fn", "apply_updates", "update")

_MESSAGE = (
    "An optimizer runs inside of a function that `cast_fn` made, and computes in half precision where its operands are "
    "half: in float16 the second moments of Adam become zero, and small updates are lost. Cast the model and not the "
    "step:\n"
    "    apply_fn = jamp.cast_fn(model.apply, {policy!r})\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch): ...  # calls apply_fn"
)


def warn_of_optimizer(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Warns of results that optax computed, at the levels at which arithmetic like its own runs in half precision.

    The wrappers of jamp warn by themselves, and compute in float32 whatever is around them.
    """
    if policy.level not in ("O2", "O3"):
        return
    stacks = [functions_and_files(eqn) for eqn in _makers_of_results(jaxpr)]
    if any(file.startswith(_JAMP) for stack in stacks for _, file in stack):
        return
    if any(name in _UPDATES and "optax" in Path(file).parts for stack in stacks for name, file in stack):
        warn_user(_MESSAGE.format(policy=str(policy)))


def _makers_of_results(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The equations that results come from, and within calls and loops those that the results of these come from."""
    results = {id(var) for var in open_jaxpr(jaxpr).outvars}
    for eqn in open_jaxpr(jaxpr).eqns:
        if any(id(var) in results for var in eqn.outvars):
            yield eqn
            for inner in inner_jaxprs(eqn):
                yield from _makers_of_results(inner)
