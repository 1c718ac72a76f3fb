"""To which dtypes plans cast what they are given."""

from __future__ import annotations

from jamp._compat import Literal, open_jaxpr
from jamp._primitives import Trait, has
from jamp.transforms.program.flow import Flows
from jamp.transforms.program.plan import Plan, Step

Dtypes = frozenset[object]
_AS_IT_IS: Dtypes = frozenset({None})


class Reads:
    """The dtypes that inputs of plans are cast to where they are read, None among them for what is read as it is.

    Remembered per plan: of loops in loops each is asked for what is inside of it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Plan, int], list[Dtypes]] = {}

    def of(self, plan: Plan, outs: Flows | None = None, but_for: int = 0) -> list[Dtypes]:
        """By input of a plan, the dtypes that it is cast to.

        Args:
            plan: The plan.
            outs: The states in which its results leave the equation that it is inside of; by default as they are.
            but_for: Traits of the readers that are left out.
        """
        key = plan, but_for
        if key not in self._known:
            self._known[key] = self._by_steps(plan, but_for)
        jaxpr = open_jaxpr(plan.jaxpr)
        read = dict(zip(jaxpr.invars, self._known[key], strict=True))
        for var, inner, outer in zip(jaxpr.outvars, plan.outs, plan.outs if outs is None else outs, strict=True):
            if not isinstance(var, Literal) and var in read:
                read[var] |= {outer.dtype} if inner and outer and inner.dtype != outer.dtype else _AS_IT_IS
        return [*read.values()]

    def _by_steps(self, plan: Plan, but_for: int) -> list[Dtypes]:
        read = dict.fromkeys(open_jaxpr(plan.jaxpr).invars, Dtypes())
        for step in plan.steps:
            if has(step.eqn, but_for):
                continue
            for index, (atom, cast) in enumerate(zip(step.operands, step.casts, strict=True)):
                if not isinstance(atom, Literal) and atom in read:
                    read[atom] |= {cast.dtype} if cast else self._inside(step, index, but_for)
        return [*read.values()]

    def _inside(self, step: Step, index: int, but_for: int) -> Dtypes:
        """The dtypes that jaxprs inside cast an operand to that they are given as it is."""
        if has(step.eqn, Trait.CUSTOM_VJP):
            return _AS_IT_IS
        loops, dtypes = has(step.eqn, Trait.LOOPS), Dtypes()
        for plan in step.plans:
            place = index - len(step.eqn.invars) + len(plan.ins)
            is_carry = loops and plan.constants <= place < plan.constants + plan.carries
            if is_carry or not 0 <= place < len(plan.ins) or (loops and len(step.plans) > 1):
                return _AS_IT_IS
            dtypes |= self.of(plan, but_for=but_for)[place]
        return dtypes or _AS_IT_IS
