"""Backward rules that go through the steps of a loop to convergence again, and have to accept those that it accepted.

An adaptive solver takes a step back whose error is too large. A rule that goes to its states from the start, to step
back from each, decides that anew, in a loop that counts: with products in half it would refuse steps that were accepted
in float32, and end elsewhere. Such a loop chooses what it carries by a comparison: of one number, or of one for each
member of a batch. A loop that adds up a series, as the gradient of a fixed point does, compares nothing, or each
element of its own, as the derivative of a relu does; its products are half, as they are in any rule.
"""

from __future__ import annotations

from jamp._compat import ClosedJaxpr, Eqn, inner_jaxprs, open_jaxpr, while_parts
from jamp._dtypes import is_inexact
from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.deciders import of_while
from jamp.transforms.analysis.reading.flat import Opened, Source, Value, is_while, loop_body
from jamp.transforms.analysis.reading.walks import back
from jamp.transforms.program.flow import num_elements


def replays(jaxpr: ClosedJaxpr) -> bool:
    """Whether a jaxpr holds a loop that counts, and takes or leaves what its iterations make."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if has(eqn, Trait.LOOPS) and not _converges(eqn) and _chooses(eqn):
            return True
        if any(map(replays, inner_jaxprs(eqn))):
            return True
    return False


def _converges(eqn: Eqn) -> bool:
    return is_while(eqn) and of_while(while_parts(eqn.params), Body.of(eqn)).multiplies


def _chooses(loop: Eqn) -> bool:
    """Whether iterations choose by comparisons of less than what is chosen, or try until something is good enough."""
    opened = Opened(open_jaxpr(loop_body(loop, loop.invars)[0]), deep=True, loops=True)
    for flat in opened.eqns:
        if _converges(flat.eqn):
            return True
        if has(flat.eqn, Trait.SELECTS | Trait.BRANCHES):
            size = max((num_elements(var.aval) for var in flat.eqn.outvars), default=1)
            decides = _decides(opened, flat.ins[0])
            if decides is not None and (decides == 1 or decides < size):
                return True
    return False


def _decides(opened: Opened, choice: Source) -> int | None:
    """The size of what a choice is made by, if that compares floating numbers."""
    flat = opened.maker(choice)
    while flat is not None and has(flat.eqn, MOVED):
        choice = flat.ins[0]
        flat = opened.maker(choice)
    if not isinstance(choice, Value):
        return None
    logical = back(opened, [choice], lambda flat, _: (x for x in flat.values if not is_inexact(x.aval.dtype)))
    compares = any(
        flat is not None
        and has(flat.eqn, Trait.COMPARES)
        and any(is_inexact(operand.aval.dtype) for operand in flat.values)
        for _, flat in logical
    )
    return num_elements(choice.aval) if compares else None
