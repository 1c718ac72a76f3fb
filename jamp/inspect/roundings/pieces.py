"""The evaluation in two precisions in pieces. A piece that a program has many times, as in layers, is compiled once.

XLA compiles a model of unrolled layers as if all of them were different, in two precisions, with a derivative; of a GPT
of 12 layers that takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jamp._compat import Literal
from jamp._primitives import PRODUCTS, acts, has
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.raised import Evaluation, both_of
from jamp.inspect.roundings.steps import Key, Step, in_line
from jamp.transforms.program.signature import Signatures

# A value that is the same in both precisions is handed over once, and known to be the same inside.
Given = tuple[Any] | tuple[Any, Any]

_LOOPS = ("scan", "while", "cond", "shard_map")


class Piece(NamedTuple):
    """Equations that are compiled together.

    Attributes:
        steps: The equations.
        ins: What they read and do not make.
        outs: What is read later of what they make.
        last: What is not read later of all that they read.
    """

    steps: Sequence[Step]
    ins: Sequence[int]
    outs: Sequence[int]
    last: Sequence[int]


class EvaluationInPieces:
    """As `Evaluation`, outside of any `jax.jit`: the pieces are jitted. It remembers them as long as it lives.

    Args:
        hook: As of `Evaluation`.
        slots: Makes what the hook is given besides from arrays, by key.
        trips: As of `Evaluation`.
    """

    def __init__(
        self, hook: Callable[..., list[Any]], slots: Callable[[dict[Key, Any]], Any], trips: dict[Key, int]
    ) -> None:
        self._hook, self._slots, self._trips = hook, slots, trips
        self._signatures = Signatures(places=False)
        self._compiled: dict[Hashable, Callable[..., list[Given]]] = {}

    def run(self, jaxpr: Any, args: Sequence[Pair], by_key: dict[Key, Any]) -> list[Pair]:
        """Results of a jaxpr; `by_key` holds the arrays of the slots."""
        program = in_line(jaxpr)
        env = dict(zip(program.ins, args, strict=True)) | {i: both_of(x) for i, x in program.consts.items()}
        of_step = _by_step(by_key, program.steps)
        trips = _by_step(self._trips, program.steps)
        for piece in pieces(program.steps, [i for i in program.outs if isinstance(i, int)]):
            mine = {(n, *k[len(s.key) :]): v for n, s in enumerate(piece.steps) for k, v in of_step.get(s.key, ())}
            within = {(n, *k[len(s.key) :]): v for n, s in enumerate(piece.steps) for k, v in trips.get(s.key, ())}
            given = [_given(env[i]) for i in piece.ins]
            outs = self._function(piece, within)(given, mine)
            env |= {i: Pair(out[0], out[-1]) for i, out in zip(piece.outs, outs, strict=True)}
            for i in piece.last:
                del env[i]
        return [both_of(i.val) if isinstance(i, Literal) else env[i] for i in program.outs]

    def _function(self, piece: Piece, trips: dict[Key, int]) -> Callable[..., list[Given]]:
        signature = self._signatures.of_equations(
            [(step.eqn, step.ins, step.outs) for step in piece.steps], piece.ins, piece.outs
        )
        if signature is None:
            return self._jitted(piece, trips)
        found = signature, tuple(sorted(trips.items()))
        if found not in self._compiled:
            self._compiled[found] = self._jitted(piece, trips)
        return self._compiled[found]

    def _jitted(self, piece: Piece, trips: dict[Key, int]) -> Callable[..., list[Given]]:
        evaluation = Evaluation(hook=self._hook, trips=trips)
        steps = [step._replace(key=(n,)) for n, step in enumerate(piece.steps)]

        def run(given: Sequence[Given], by_key: dict[Key, Any]) -> list[Given]:
            env = {i: Pair(x[0], x[-1]) for i, x in zip(piece.ins, given, strict=True)}
            evaluation.run_steps(steps, env, self._slots(by_key))
            return [_given(env[i]) for i in piece.outs]

        return jax.jit(run)


def pieces(steps: Sequence[Step], outs: Sequence[int]) -> Iterator[Piece]:
    """Cuts a program behind each product. Where it is cut depends on the equations alone, so that layers are cut alike.

    Args:
        steps: The equations.
        outs: The results of the program.
    """
    groups = _groups(steps)
    last_read = {i: n for n, group in enumerate(groups) for step in group for i in _variables(step)}
    last_read |= dict.fromkeys(outs, len(groups))
    for n, group in enumerate(groups):
        made = dict.fromkeys(i for step in group for i in step.outs)
        read = [i for i in dict.fromkeys(i for step in group for i in _variables(step)) if i not in made]
        later = [i for i in made if last_read.get(i, n) > n]
        yield Piece(group, read, later, [i for i in read if last_read[i] == n])


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Equations by the product before which they are needed first; behind the last product they need if before none.

    JAX computes factors of the derivatives of all layers before the derivatives of all layers.
    """
    if any(acts(step.eqn) for step in steps):
        return [[*steps]]
    ends = [number for number, step in enumerate(steps) if _ends(step.eqn)]
    group_of: dict[int, int] = {number: group for group, number in enumerate(ends)}
    needed: dict[int, int] = {}  # By value.
    for number, step in reversed([*enumerate(steps)]):
        found = [group_of[number]] if number in group_of else [needed[i] for i in step.outs if i in needed]
        if found:
            group_of[number] = min(found)
            needed |= {i: min(group_of[number], needed.get(i, len(ends))) for i in _variables(step)}
    made: dict[int, int] = {}
    for number, step in enumerate(steps):
        group = group_of.setdefault(number, max((made.get(i, 0) for i in _variables(step)), default=0))
        made |= dict.fromkeys(step.outs, group)
    groups: list[list[Step]] = [[] for _ in range(max(len(ends), 1))]
    for number, step in enumerate(steps):
        groups[group_of[number]].append(step)
    return groups


def _ends(eqn: Any) -> bool:
    return has(eqn, PRODUCTS) or eqn.primitive.name in _LOOPS


def _variables(step: Step) -> list[int]:
    return [i for i in step.ins if isinstance(i, int)]


def _given(pair: Pair) -> Given:
    return (pair.wide,) if pair.wide is pair.half else (pair.wide, pair.half)


def _by_step(values: dict[Key, Any], steps: Sequence[Step]) -> dict[Key, list[tuple[Key, Any]]]:
    """What has a key, by the step that it is inside of."""
    keys, found = {step.key for step in steps}, {}
    for key, value in values.items():
        step = next(key[:n] for n in range(1, len(key) + 1) if key[:n] in keys)
        found.setdefault(step, []).append((key, value))
    return found
