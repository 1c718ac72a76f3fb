"""The body of a loop, as the analyses of loops read it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jamp._compat import Eqn, Jaxpr, open_jaxpr
from jamp.transforms.analysis.reading.flat import Opened, Source, Value, loop_body, loop_counts
from jamp.transforms.analysis.reading.freezing import Freezing


class Body:
    """The body of a loop. What several analyses ask of it is found once.

    Args:
        jaxpr: The body. Its first results are the carries.
        first: Position of the first carry among its inputs.
        carries: How many carries there are.
    """

    def __init__(self, jaxpr: Jaxpr, first: int, carries: int) -> None:
        self.jaxpr = jaxpr
        self.first = first
        self.carries = carries

    @classmethod
    def of(cls, eqn: Eqn) -> Body:
        """The body of a loop's equation."""
        return cls(open_jaxpr(loop_body(eqn, eqn.invars)[0]), *loop_counts(eqn))

    @functools.cached_property
    def opened(self) -> Opened:
        """All equations, of calls, checkpoints, rules and branches too."""
        return Opened(self.jaxpr, deep=True)

    @property
    def before(self) -> Sequence[Value]:
        """The carries as an iteration is given them."""
        return [Value(0, var) for var in self.jaxpr.invars[self.first : self.first + self.carries]]

    @property
    def after(self) -> Sequence[Source | None]:
        """The carries as an iteration returns them."""
        return [self.opened.source(atom) for atom in self.jaxpr.outvars[: self.carries]]

    @functools.cached_property
    def freezing(self) -> Freezing:
        """What makes its values those of the iteration before."""
        return Freezing(self.opened, self.before, self.after)
