"""Matrices that a program puts together: frames, poses, homogeneous coordinates, and what is added to a diagonal."""

from jamp._compat import Aval, Eqn
from jamp._primitives import Trait, has
from jamp.transforms.program.flow import Flows
from jamp.transforms.program.marks import Mark


def builds(eqn: Eqn, ins: Flows, aval: Aval) -> bool:
    """Whether operands are put together with numbers, or side by side.

    Not so the weights of layers that are stacked, nor rows that are written to a buffer.

    Args:
        eqn: An equation that assembles its result.
        ins: The states of its operands.
        aval: Its result.
    """
    replaces = has(eqn, Trait.REPLACES)
    axes = slice(-1 if replaces else -2, None)
    return any(
        flow is not None
        and (
            flow.has(Mark.BUILT) or atom.aval.shape[axes] != aval.shape[axes] or not (replaces or flow.has(Mark.GIVEN))
        )
        for atom, flow in zip(eqn.invars, ins, strict=True)
    )


def adds_to_frame(eqn: Eqn, ins: Flows) -> bool:
    """Whether an equation, of whose operands one is a frame, adds square matrices, or a number to one.

    Args:
        eqn: An equation.
        ins: The states of its operands.
    """
    if not has(eqn, Trait.ADDS):
        return False
    shape = eqn.outvars[0].aval.shape
    return (
        len(shape) > 1
        and shape[-1] == shape[-2]
        and all(flow is not None and (flow.size > 1 or flow.has(Mark.FRAME)) for flow in ins)
    )


def marks_of_sum(eqn: Eqn, ins: Flows, marks: Mark) -> Mark:
    """The marks of what is added to a frame. What is subtracted from one takes differences, as a Laplacian does.

    Args:
        eqn: An addition or a subtraction.
        ins: The states of its operands.
        marks: The marks that they hand on.
    """
    if not adds_to_frame(eqn, ins):
        return marks & ~Mark.FRAME
    return (marks & ~Mark.SAMPLED) | Mark.SIGNED if has(eqn, Trait.SUBTRACTS) else marks
