"""To which dtypes plans cast what they are given."""

from __future__ import annotations

from collections import defaultdict

from jamp._compat import Literal, Var, open_jaxpr
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
        self._known: dict[tuple[Plan, Flows, int, int], list[Dtypes]] = {}

    def of(self, plan: Plan, outs: Flows | None = None, but_for: int = 0, through: int = 0) -> list[Dtypes]:
        """By input of a plan, the dtypes that it is cast to.

        Args:
            plan: The plan.
            outs: The states in which its results leave the equation that it is inside of; by default as they are.
            but_for: Traits of the readers that are left out.
            through: Traits of the readers that hand it on, whose own readers count.
        """
        key = plan, plan.outs if outs is None else outs, but_for, through
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, plan: Plan, outs: Flows, but_for: int, through: int) -> list[Dtypes]:
        jaxpr, read = open_jaxpr(plan.jaxpr), defaultdict[Var, Dtypes](Dtypes)
        for var, inner, outer in zip(jaxpr.outvars, plan.outs, outs, strict=True):
            if not isinstance(var, Literal):
                read[var] |= {outer.dtype} if inner and outer and inner.dtype != outer.dtype else _AS_IT_IS
        for step in reversed(plan.steps):
            if has(step.eqn, but_for):
                continue
            for index, (atom, cast) in enumerate(zip(step.operands, step.casts, strict=True)):
                if isinstance(atom, Literal):
                    continue
                if cast is None and index == 0 and has(step.eqn, through) and step.rewrite is None:
                    read[atom] = read[atom].union(*(read[var] for var in step.eqn.outvars))
                else:
                    read[atom] |= {cast.dtype} if cast else self._inside(step, index, but_for, through)
        return [read[var] for var in jaxpr.invars]

    def _inside(self, step: Step, index: int, but_for: int, through: int) -> Dtypes:
        """The dtypes that jaxprs inside cast an operand to that they are given as it is."""
        if has(step.eqn, Trait.CUSTOM_VJP):
            return _AS_IT_IS
        loops, dtypes = has(step.eqn, Trait.LOOPS), Dtypes()
        for plan in step.plans:
            place = index - len(step.eqn.invars) + len(plan.ins)
            is_carry = loops and plan.constants <= place < plan.constants + plan.carries
            if is_carry or not 0 <= place < len(plan.ins) or (loops and len(step.plans) > 1):
                return _AS_IT_IS
            dtypes |= self.of(plan, None, but_for, 0 if loops else through)[place]
        return dtypes or _AS_IT_IS
