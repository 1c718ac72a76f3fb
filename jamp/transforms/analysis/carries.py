"""What loops want of their carries: what is read after them, by the next iteration, and by what ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from jamp._compat import ClosedJaxpr, Eqn, open_jaxpr, scan_counts, while_parts
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.deciders import Decided, of_while
from jamp.transforms.analysis.loops.gates import NO_STATES, States
from jamp.transforms.analysis.loops.iterates import iterates
from jamp.transforms.analysis.loops.latches import find_latches
from jamp.transforms.analysis.loops.log_domain import in_log_domain, stacked_logarithms
from jamp.transforms.analysis.loops.points import targets, values_of_points
from jamp.transforms.analysis.loops.spectral import spectral
from jamp.transforms.analysis.loops.starts import changed, only_compared
from jamp.transforms.analysis.reading.fixed import in_body
from jamp.transforms.analysis.reading.flat import loop_body, loop_counts
from jamp.transforms.analysis.regimes import Regime
from jamp.transforms.program.want import Want, Wants, combine

# What a jaxpr wants of its inputs, by what is wanted of its results, its regime, its scope, which inputs are fixed, and
# which are states.
Inputs = Callable[[ClosedJaxpr, Sequence[Want], Regime, str, frozenset[int], States], list[Want]]


class Carries:
    """What is wanted of the carries of loops; what is known of a loop is remembered.

    Args:
        inputs: The backward pass over a jaxpr.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        # Each reads a body alone, which several loops and several rounds of one loop ask about.
        self._bodies = cache(Body)
        self._ends = cache(of_while)
        self._latches = cache(find_latches)
        self._iterates = cache(iterates)
        self._spectral = cache(spectral)
        self._logarithms = cache(in_log_domain)
        self._stacks = cache(stacked_logarithms)
        self._values = cache(values_of_points)
        self._targets = cache(targets)

    def of_loop(
        self, eqn: Eqn, after: list[Want], regime: Regime, scope: str, fixed: list[bool]
    ) -> tuple[Wants, Sequence[Want]]:
        """What is wanted of the results of a loop, its carries first, and of all of its operands.

        A carry is read after the loop and by the next iteration, which wants of it what it needs for the carries that
        it makes. Forward algorithms and Viterbi's add log-probabilities up for hundreds of steps; in half they would
        take another path.

        What decides when a loop ends is wanted as it was traced inside of the loop alone. What comes in is the same in
        all iterations, so that they converge whatever it was rounded to; it is wanted in float32, whoever reads it.
        Not so where the loop lies in another that ends by its results: there it comes anew in each iteration. Nor what
        it starts from or compares with, if one part of that is computed from another.
        """
        scans = "jaxpr" in eqn.params
        body = self._body(eqn)
        first, carries = body.first, body.carries
        # Without a reader outside, what is only read in float32 may be carried so.
        carried = [Want.FULL if want is Want.NONE else want for want in after[:carries]]
        stacked = after[carries:]
        if regime.delicate and not regime.all_full:
            latched = self._latches(body)
            carried = [latched.get(index, want) for index, want in enumerate(carried)]
        # These are float32 though all that read them may be half.
        precise: frozenset[int] = frozenset()
        if regime.delicate:
            logarithms = self._logarithms(body)
            precise = self._iterates(body) | self._spectral(body) | logarithms
            # Readers of such logarithms take differences.
            stacked = _in_float32(stacked, self._stacks(body, logarithms, len(stacked)))
        carried = _in_float32(carried, precise)
        read_by = self._read_by_scan if scans else self._read_by_while
        while True:
            before, reads, behind = read_by(eqn, carried, stacked, regime, scope, fixed)
            again = _in_float32([combine(*both) for both in zip(carried, reads, strict=True)], precise)
            if again != carried:
                carried = again
            elif any(want.decides for want in after):
                return (*carried, *stacked), [*before, *carried, *behind]
            else:
                begin = self._starts(carried, body)
                limits = only_compared(eqn.invars, body, len(before))
                if any(want.decides for want in (*before, *carried)):
                    for index in self._targets(body):
                        limits[len(before) - first + index] = True
                wanted = zip((*before, *begin, *behind), limits, strict=True)
                return (*carried, *stacked), [_from_outside(want, is_limit) for want, is_limit in wanted]

    def _read_by_scan(
        self, eqn: Eqn, carried: list[Want], stacked: list[Want], regime: Regime, scope: str, fixed: list[bool]
    ) -> tuple[list[Want], list[Want], list[Want]]:
        consts, carries = scan_counts(eqn.params)
        states = States(frozenset(range(consts, consts + carries)), carries)
        inner = self._inputs(eqn.params["jaxpr"], carried + stacked, regime, scope, in_body(eqn, fixed), states)
        inner = _closed(inner)
        return inner[:consts], inner[consts : consts + carries], inner[consts + carries :]

    def _read_by_while(
        self, eqn: Eqn, carried: list[Want], stacked: list[Want], regime: Regime, scope: str, fixed: list[bool]
    ) -> tuple[list[Want], list[Want], list[Want]]:
        parts, decided = while_parts(eqn.params), self.ended_by(eqn)
        exact = regime.delicate and not regime.all_full and not decided.is_chosen
        cond = self._inputs(parts.cond, [Want.EXACT if exact else Want.NONE], regime, scope, frozenset(), NO_STATES)
        states = States(frozenset(range(parts.body_consts, parts.body_consts + len(carried))))
        body = self._inputs(parts.body, carried + stacked, regime, scope, in_body(eqn, fixed), states)
        cond, body = _closed(cond), _closed(body)
        reads = [combine(a, b) for a, b in zip(cond[parts.cond_consts :], body[parts.body_consts :], strict=True)]
        reads = [Want.AGAIN if exact and i in decided.again else want for i, want in enumerate(reads)]
        return [*cond[: parts.cond_consts], *body[: parts.body_consts]], reads, []

    def ended_by(self, eqn: Eqn) -> Decided:
        """What decides when a `while` ends."""
        return self._ends(while_parts(eqn.params), self._body(eqn))

    def latches(self, eqn: Eqn) -> Mapping[int, Want]:
        """What is wanted of the carries that decide when a loop does nothing more, by their positions."""
        return self._latches(self._body(eqn))

    def _body(self, eqn: Eqn) -> Body:
        body, _ = loop_body(eqn, eqn.invars)
        return self._bodies(open_jaxpr(body), *loop_counts(eqn))

    def alone(self, eqn: Eqn, regime: Regime) -> Wants:
        """What a loop wants of its own carries, whoever reads them after it."""
        after = [Want.NONE] * len(eqn.outvars)
        return self.of_loop(eqn, after, regime, "", [False] * len(eqn.invars))[0]

    def _starts(self, wants: Sequence[Want], body: Body) -> list[Want]:
        """What is wanted of what carries start from, by what is wanted of them in a loop to convergence."""
        changes = changed(body)
        if not any(wants[index].decides for index in changes):
            return [*wants]
        values = self._values(body)
        begin = [Want.VALUE if index in values else Want.START for index in range(len(wants))]
        return [begin[i] if want.decides and i in changes else want for i, want in enumerate(wants)]


def _in_float32(wants: Sequence[Want], precise: frozenset[int]) -> list[Want]:
    """What is wanted of results of a loop, of which some are float32 though products read them."""
    return [combine(want, Want.DIVISOR) if index in precise else want for index, want in enumerate(wants)]


def _closed(wants: Sequence[Want]) -> list[Want]:
    """What is wanted of the inputs of a loop's body: what a loop inside is given, this one gives anew each time."""
    return [Want.DIVISOR if want.open else want for want in wants]


def _from_outside(want: Want, is_limit: bool) -> Want:
    if not want.decides:
        return want
    return Want.LIMIT if is_limit else Want.DIVISOR
