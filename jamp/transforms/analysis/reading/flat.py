"""A jaxpr with the calls in it opened: what `jnp.where` and `jax.nn.softmax` do, beside what stands around them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jax.dtypes import float0

from jamp._compat import (
    Atom,
    Aval,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    open_jaxpr,
    scan_counts,
    while_parts,
)
from jamp._primitives import FUNCTIONS, Trait, acts, has, traits_of
from jamp.transforms.analysis.reading.arithmetic import computed

T = TypeVar("T")


class Value(NamedTuple):
    """A variable in one of the calls; those of the jaxpr itself are in call 0."""

    call: int
    var: Var

    @property
    def aval(self) -> Aval:
        """Shape and dtype."""
        return self.var.aval


Source = Value | Literal


class Flat(NamedTuple):
    """An equation that calls nothing.

    Attributes:
        eqn: The equation.
        ins: Its operands.
        outs: Its results.
        top: Position of the equation of the jaxpr itself that it is in.
        cases: Of a `cond` whose branches are opened, the results of each; of a loop, those of an iteration.
    """

    eqn: Eqn
    ins: tuple[Source, ...]
    outs: tuple[Value, ...]
    top: int
    cases: tuple[tuple[Source, ...], ...] = ()

    @property
    def values(self) -> list[Value]:
        """Its operands but for literals."""
        return [source for source in self.ins if isinstance(source, Value)]


# What runs once where it stands, whatever its derivative is.
ONCE = FUNCTIONS | Trait.CUSTOM_VJP | Trait.CUSTOM_BATCHING | Trait.REMAT | Trait.STAYS


class Opened:
    """A jaxpr with the calls in it opened.

    Args:
        jaxpr: The jaxpr.
        deep: Whether checkpoints, functions with a rule of any kind and branches are opened too.
        loops: Whether the bodies of loops are.

    Attributes:
        eqns: All equations, in order.
        results: The values that the jaxpr returns.
        carried: By the first result of an opened loop, what an iteration gets of each carry.
        entered: By such a value, what the first iteration gets, and what an iteration makes for the next one.
        scanned: By value that such an iteration gets, what it is a part of.
        inside: The jaxprs that were opened in it.
    """

    def __init__(self, jaxpr: Jaxpr, *, deep: bool = False, loops: bool = False) -> None:
        self.eqns: list[Flat] = []
        self.carried: dict[Value, tuple[Value, ...]] = {}
        self.entered: dict[Value, tuple[Source, Source]] = {}
        self.scanned: dict[Value, Source] = {}
        self.inside: set[int] = set()
        self._calls = 0
        self._deep = deep
        self._loops = loops
        env: dict[Var, Source] = {var: Value(0, var) for var in (*jaxpr.invars, *jaxpr.constvars)}
        self._env = env
        for top, eqn in enumerate(jaxpr.eqns):
            self._open(eqn, env, 0, top)
        self.results = {source for atom in jaxpr.outvars if isinstance(source := _read(atom, env), Value)}

    # Not all who open a jaxpr ask all of these.
    @functools.cached_property
    def _outer(self) -> dict[Value, Var]:
        # Of several variables that are one value, the first.
        return {source: var for var, source in reversed(self._env.items()) if isinstance(source, Value)}

    @functools.cached_property
    def made(self) -> dict[Value, Flat]:
        """By value, what makes it."""
        return {value: flat for flat in self.eqns for value in flat.outs}

    @functools.cached_property
    def readers(self) -> dict[Value, list[Flat]]:
        """By value, what reads it; dead code reads nothing."""
        readers: dict[Value, list[Flat]] = defaultdict(list)
        live = set(self.results)
        for flat in reversed(self.eqns):
            if acts(flat.eqn) or any(value in live for value in flat.outs):
                for source in flat.ins:
                    if isinstance(source, Value):
                        live.add(source)
                        readers[source].append(flat)
        return readers

    @functools.cached_property
    def _firsts(self) -> dict[Value, Value]:
        firsts: dict[Value, Value] = {}
        known: dict[Hashable, tuple[Value, ...]] = {}
        for flat in self.eqns:
            if flat.cases or acts(flat.eqn):
                continue
            try:
                ins = tuple(
                    firsts.get(source, source) if isinstance(source, Value) else _bits(source) for source in flat.ins
                )
                before = known.setdefault((flat.eqn.primitive, tuple(flat.eqn.params.items()), ins), flat.outs)
            except TypeError:  # A parameter that has no hash.
                continue
            if before is not flat.outs:
                firsts.update(zip(flat.outs, before, strict=True))
        return firsts

    def first(self, value: Value) -> Value:
        """Of values that are computed alike, the first: weights are often written twice."""
        return self._firsts.get(value, value)

    def source(self, atom: Atom) -> Source | None:
        """What a variable of the jaxpr itself is; None for one of another jaxpr."""
        return atom if isinstance(atom, Literal) else self._env.get(atom)

    def outer(self, value: Value) -> Var | None:
        """The variable of the jaxpr itself that a value is, of a call that returns it too; None where there is none."""
        return self._outer.get(value)

    def is_live(self, value: Value) -> bool:
        """Whether anything reads a value."""
        return value in self.results or bool(self.readers.get(value))

    def _open(self, eqn: Eqn, env: dict[Var, Source], call: int, top: int) -> None:
        ins = tuple([_read(atom, env) for atom in eqn.invars])
        traits = traits_of(eqn)
        if traits & (ONCE if self._deep else FUNCTIONS):
            env.update(zip(eqn.outvars, self._enter(called_jaxpr(eqn.params), ins, top), strict=True))
            return
        cases: tuple[tuple[Source, ...], ...] = ()
        outs = tuple([Value(call, var) for var in eqn.outvars])
        if self._deep and traits & Trait.BRANCHES:
            cases = tuple(self._enter(branch, ins[1:], top) for branch in eqn.params["branches"])
        elif self._loops and traits & Trait.LOOPS:
            cases = (self._iterate(eqn, ins, outs, top),)
        env.update(zip(eqn.outvars, outs, strict=True))
        flat = Flat(eqn, ins, outs, top, cases)
        if traits & Trait.VIEW and len(outs) > 1:  # Each result is one operand, as of a barrier.
            self.eqns += [Flat(eqn, (moved(flat, index),), (out,), top) for index, out in enumerate(outs)]
        else:
            self.eqns.append(flat)

    def _enter(self, jaxpr: ClosedJaxpr, ins: tuple[Source, ...], top: int) -> tuple[Source, ...]:
        """Opens a jaxpr inside; its results."""
        self._calls += 1
        inner, number = open_jaxpr(jaxpr), self._calls
        self.inside.add(id(inner))
        env: dict[Var, Source] = dict(zip(inner.invars, ins, strict=True))
        env.update((var, Value(number, var)) for var in inner.constvars)
        for eqn in inner.eqns:
            self._open(eqn, env, number, top)
        return tuple(_read(atom, env) for atom in inner.outvars)

    def _iterate(self, eqn: Eqn, ins: Sequence[Source], outs: Sequence[Value], top: int) -> tuple[Source, ...]:
        """Opens the body of a loop, as of any one iteration; its results."""
        body, ins = loop_body(eqn, ins)
        consts, carries = loop_counts(eqn)
        given = [Value(self._calls + 1, var) for var in open_jaxpr(body).invars[consts:]]
        self.carried.update((out, tuple(given[:carries])) for out in outs[:1])
        self.scanned.update(zip(given[carries:], ins[consts + carries :], strict=True))
        results = self._enter(body, (*ins[:consts], *given), top)
        self.entered.update(zip(given, zip(ins[consts : consts + carries], results, strict=False), strict=False))
        return results

    def carries(self, loop: Flat) -> tuple[Value, ...]:
        """What an iteration gets of each carry; of what is no opened loop, nothing."""
        return self.carried.get(loop.outs[0], ()) if loop.outs else ()

    def maker(self, source: Source) -> Flat | None:
        """The equation that makes a value; None for literals and arguments."""
        return None if isinstance(source, Literal) else self.made.get(source)

    @functools.cached_property
    def _numbers(self) -> dict[Value, float]:
        numbers: dict[Value, float] = {}
        for flat in self.eqns:  # In order, and not back from each value: thousands may stand one behind another.
            if flat.cases or any(isinstance(source, Value) and source not in numbers for source in flat.ins):
                continue
            operands = [written(source) if isinstance(source, Literal) else numbers[source] for source in flat.ins]
            found = _number(flat, [number for number in operands if number is not None])
            if found is not None:
                numbers[flat.outs[0]] = found
        return numbers

    def number(self, source: Source) -> float | None:
        """The number that all elements of a value are, if the program writes it: `-1e9`, or `1 / sqrt(64)`."""
        return written(source) if isinstance(source, Literal) else self._numbers.get(source)


def _number(flat: Flat, operands: Sequence[float]) -> float | None:
    """The number that a result is of which all operands are numbers."""
    traits = traits_of(flat.eqn)
    if not operands or len(operands) < len(flat.ins):
        return None
    if traits & Trait.CONVERTS or (traits & Trait.VIEW and len(operands) == 1):
        return operands[0]
    return computed(flat.eqn, operands)


def _bits(literal: Literal) -> Hashable:
    """What tells a literal from others."""
    return literal.aval, np.asarray(literal.val).tobytes()


def written(literal: Literal) -> float | None:
    """The number that a literal is; None for arrays, complex numbers and what stands for a missing tangent."""
    dtype = np.asarray(literal.val).dtype
    is_real = dtype.kind in "bfiuV" and dtype != float0  # bfloat16 is void to NumPy, and so is that.
    return float(literal.val) if is_real and np.ndim(literal.val) == 0 else None


def moved(flat: Flat, index: int) -> Source:
    """The operand that a result of an equation is elements of, where it moves them."""
    return flat.ins[index] if len(flat.ins) == len(flat.outs) else flat.ins[0]


def is_scan(eqn: Eqn) -> bool:
    """Whether an equation is a loop that counts."""
    return has(eqn, Trait.LOOPS) and "jaxpr" in eqn.params


def is_while(eqn: Eqn) -> bool:
    """Whether an equation is a loop that ends by a condition."""
    return has(eqn, Trait.LOOPS) and not is_scan(eqn)


def loop_body(eqn: Eqn, operands: Sequence[T]) -> tuple[ClosedJaxpr, Sequence[T]]:
    """The body of a loop, and those of the loop's operands, or of what stands for them, that it begins with."""
    if is_scan(eqn):
        return eqn.params["jaxpr"], operands
    parts = while_parts(eqn.params)
    return parts.body, operands[parts.cond_consts :]


def loop_counts(eqn: Eqn) -> tuple[int, int]:
    """Number of constants and of carries of a loop's body."""
    return scan_counts(eqn.params) if is_scan(eqn) else (while_parts(eqn.params).body_consts, len(eqn.outvars))


def called_jaxprs(eqn: Eqn) -> tuple[Sequence[ClosedJaxpr], int]:
    """The jaxprs of which a call or a choice runs one, and the position of the first operand that they are given."""
    branches = eqn.params["branches"] if has(eqn, Trait.BRANCHES) else [called_jaxpr(eqn.params)]
    return branches, len(eqn.invars) - len(open_jaxpr(branches[0]).invars)


def _read(atom: Atom, env: Mapping[Var, Source]) -> Source:
    return atom if isinstance(atom, Literal) else env[atom]
