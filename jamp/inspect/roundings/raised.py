"""Evaluates a program in float32 and in half side by side, so that a hook sees what each rounding does.

The program is a jaxpr in which all casts are written out, as `cast_fn` emits them (or a user does). A half-precision
operation is the float32 one of half operands, rounded. So both evaluations hold float32 values, and one of them rounds.
The error of an operation is what its rounding changes where its operands are rounded already: a transposition of half
data does no harm, and neither does a factor of two. Where an operand is an index or a mask, its error is also what it
does that half precision decided otherwise than float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp._compat import Literal, called_jaxpr, open_jaxpr, scan_counts, while_parts
from jamp._dtypes import FLOAT32, is_half
from jamp._primitives import Trait, has
from jamp.inspect._operations import CALLS
from jamp.inspect.roundings.causes import Cause, causes_of, handed_on
from jamp.inspect.roundings.maps import enters_map, in_shard_map
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.single import (
    as_traced,
    deciders,
    decides,
    error_of,
    finite_again,
    is_float,
    is_linear,
    is_opaque,
    raised_bind,
    rounded_results,
    rounds,
    with_derivative_between,
)
from jamp.inspect.roundings.steps import Key, Step, Steps, Value, in_line


def inside(eqn: Any) -> list[Any]:
    """The jaxprs inside of an equation that are entered; each has its number in a key."""
    name = eqn.primitive.name
    if name in CALLS:
        return [called_jaxpr(eqn.params)]
    if name == "while":
        parts = while_parts(eqn.params)
        return [parts.cond, parts.body]
    if name == "shard_map":
        return [called_jaxpr(eqn.params)] if enters_map(eqn) else []
    return {"scan": lambda: [eqn.params["jaxpr"]], "cond": lambda: list(eqn.params["branches"])}.get(name, list)()


class Evaluation:
    """Evaluates a jaxpr twice: `Pair`s of values in float32, and at the program's precision but raised to float32.

    Branches are those that float32 takes, and loops run as often as in float32.

    Args:
        hook: Called with key, float32 results and their errors (None for what has none), and `slots`. Gives the float32
            results to go on with.
        watch: Called with an equation, and pairs of its operands and results; gives what to record, None for nothing.
        trips: How often each `while` runs. Those that are known are written as a scan, which has a derivative.
        constants: What to put in the place of a jaxpr's constants, by their numbers in `Steps`.
    """

    def __init__(
        self,
        hook: Callable[..., list[Any]] | None = None,
        watch: Callable[[Any, list[Pair], list[Pair]], Any] | None = None,
        trips: dict[Key, int] | None = None,
        constants: Callable[[Steps], Mapping[int, Any]] = lambda program: program.consts,
    ) -> None:
        self.hook, self.watch, self.trips, self.constants = hook, watch, trips or {}, constants

    def run(self, jaxpr: Any, args: Sequence[Pair], key: Key = (), slots: Any = None) -> tuple[list[Pair], dict]:
        """Results of a jaxpr and what was recorded, by key; `slots` is handed to the hook."""
        program = in_line(jaxpr, key)
        env = dict(zip(program.ins, args, strict=True))
        env |= {i: both_of(value) for i, value in self.constants(program).items()}
        records = self.run_steps(program.steps, env, slots)
        return [_read(value, env) for value in program.outs], records

    def run_steps(self, steps: Sequence[Step], env: dict[int, Pair], slots: Any = None) -> dict[Key, Any]:
        """Puts the results of equations into `env`, and gives what was recorded."""
        records: dict[Key, Any] = {}
        causes: dict[Value, Cause] = {}
        for step in steps:
            operands = [_read(value, env) for value in step.ins]
            known = [None if isinstance(value, Literal) else causes.get(value) for value in step.ins]
            outs, found = self._equation(step.eqn, operands, step.key, slots, known)
            if self.hook is not None and slots is not None:
                causes |= zip(step.outs, causes_of(step.eqn, operands, outs, known), strict=True)
            records |= found
            if self.watch is not None and (seen := self.watch(step.eqn, operands, outs)) is not None:
                records[step.key] = seen
            env |= zip(step.outs, outs, strict=True)
        return records

    def _equation(
        self, eqn: Any, args: list[Pair], key: Key, slots: Any, causes: Sequence[Cause]
    ) -> tuple[list[Pair], dict[Key, Any]]:
        name = eqn.primitive.name
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, args, key, slots)
        if name == "shard_map" and enters_map(eqn):
            return self._shard_map(eqn, args, key, slots)
        same = all(arg.wide is arg.half for arg in args)
        apply = as_traced if is_opaque(eqn) else raised_bind
        wide = apply(eqn, [arg.wide for arg in args])
        if same and not rounds(eqn):
            return [Pair(y, y) for y in wide], {}
        exact = wide if same else apply(eqn, [arg.half for arg in args])
        half = rounded_results(eqn, exact) if rounds(eqn) else exact
        if self.hook is not None and not (same or is_linear(eqn) or is_opaque(eqn)):
            wide = with_derivative_between(eqn, args, wide, exact)
        if self.hook is not None and slots is not None and not is_opaque(eqn):
            by = [i for i in deciders(eqn) if args[i].wide is not args[i].half] if decides(eqn) else []
            if by:  # As float32 decides. What is sorted by is what it is.
                keys = exact[: len(by)] if has(eqn, Trait.SORTS) else []
                taken = apply(eqn, [arg.wide if i in by else arg.half for i, arg in enumerate(args)])
                exact = [*keys, *taken[len(keys) :]]
            if rounds(eqn) or by:
                errors = [error_of(h, y) if is_float(y) else None for h, y in zip(half, exact, strict=True)]
                due = [] if rounds(eqn) else [causes[i] for i in by]
                if due and all(cause is not None for cause in due):
                    wide = [y if e is None else handed_on(y, e, due) for y, e in zip(wide, errors, strict=True)]
                else:
                    wide = self.hook(key, wide, errors, slots)
        if rounds(eqn) or has(eqn, Trait.DIVIDES | Trait.SINGULAR):
            half = [finite_again(h, y) if is_float(y) else h for h, y in zip(half, wide, strict=True)]
        return [Pair(y, h) for y, h in zip(wide, half, strict=True)], {}

    def _scan(self, eqn: Any, args: list[Pair], key: Key, slots: Any) -> tuple[list[Pair], dict[Key, Any]]:
        consts, carries = scan_counts(eqn.params)
        fixed, init, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]
        each, shared = slots.split(key) if slots is not None else ((), None)

        def body(carry: Any, x: Any) -> Any:
            mine = shared.joined(x[1]) if shared is not None else None
            outs, found = self.run(eqn.params["jaxpr"], [*fixed, *carry, *x[0]], (*key, 0), mine)
            return _like(outs[:carries], carry), (outs[carries:], found)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        final, (ys, found) = lax.scan(body, jax.tree.map(jnp.asarray, init), (xs, each), **options)
        return [*final, *ys], found

    def _shard_map(self, eqn: Any, args: list[Pair], key: Key, slots: Any) -> tuple[list[Pair], dict[Key, Any]]:
        def body(given: list[Pair], by_key: dict[Key, Any]) -> tuple[list[Pair], dict[Key, Any]]:
            inside = None if slots is None else slots._replace(by_key=by_key)
            return self.run(called_jaxpr(eqn.params), given, (*key, 0), inside)

        by_key = {} if slots is None else slots.by_key
        return in_shard_map(eqn, args, body, {k: v for k, v in by_key.items() if k[: len(key)] == key})

    def _cond(self, eqn: Any, args: list[Pair], key: Key, slots: Any) -> tuple[list[Pair], dict[Key, Any]]:
        def branch(number: int, jaxpr: Any) -> Callable[..., Any]:
            return lambda *given: self.run(jaxpr, given, (*key, number), slots)

        branches = [branch(i, jaxpr) for i, jaxpr in enumerate(eqn.params["branches"])]
        shapes = {k: v for fn in branches for k, v in jax.eval_shape(fn, *args[1:])[1].items()}

        def filled(fn: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                outs, found = fn(*given)
                return jax.tree.map(jnp.asarray, outs), {k: found.get(k, _zeros(v)) for k, v in shapes.items()}

            return run

        return lax.switch(args[0].wide, [*map(filled, branches)], *args[1:])

    def _while(self, eqn: Any, args: list[Pair], key: Key, slots: Any) -> tuple[list[Pair], dict[Key, Any]]:
        parts = while_parts(eqn.params)
        for_cond, for_body = args[: parts.cond_consts], args[parts.cond_consts : parts.first_carry]
        init = jax.tree.map(jnp.asarray, args[parts.first_carry :])

        def goes_on(carry: Any) -> Pair:
            return self.run(parts.cond, [*for_cond, *carry], (*key, 0))[0][0]

        inner = set(_whiles(parts.body, (*key, 1))) if self.watch else set()

        def after(carry: Any, going: Pair, slots: Any = None) -> tuple[list[Pair], dict[Key, Pair]]:
            """The next carry, and how often the loops inside ran for it."""
            outs, found = self.run(parts.body, [*for_body, *carry], (*key, 1), slots)
            new = [Pair(*map(_where, going, a, b)) for a, b in zip(_like(outs, carry), carry, strict=True)]
            return new, {k: v for k, v in found.items() if k in inner}

        if key in self.trips:
            each, shared = slots.split(key) if slots is not None else ((), None)

            def step(carry: Any, x: Any) -> Any:
                going = goes_on(carry).wide
                return after(carry, Pair(going, going), shared and shared.joined(x))[0], None

            return lax.scan(step, init, each, length=self.trips[key])[0], {}

        def iteration(state: Any) -> Any:
            counts, most, carry = state
            going = goes_on(carry)
            new, found = after(carry, going)
            counts = [n + jnp.any(g) for n, g in zip(counts, going, strict=True)]
            return counts, jax.tree.map(jnp.maximum, most, found), new

        never = _zeros(jax.eval_shape(lambda carry: after(carry, goes_on(carry))[1], init))
        start = [jnp.int32(0), jnp.int32(0)], never, jax.tree.map(lax.stop_gradient, init)
        any_goes_on = lambda state: jnp.any(jnp.stack([jnp.any(g) for g in goes_on(state[2])]))  # noqa: E731
        (wide, half), most, final = lax.while_loop(any_goes_on, iteration, start)
        return final, {key: Pair(wide, half)} | most if self.watch else {}


def _whiles(jaxpr: Any, key: Key) -> Iterator[Key]:
    """The keys of all `while`s in a jaxpr."""
    for number, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        here = (*key, number)
        if eqn.primitive.name == "while":
            yield here
        for i, part in enumerate(inside(eqn)):
            yield from _whiles(part, (*here, i))


def _where(going: Any, new: Any, old: Any) -> Any:
    return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)


def _read(value: Value, env: Mapping[int, Pair]) -> Pair:
    return both_of(value.val) if isinstance(value, Literal) else env[value]


def both_of(value: Any) -> Pair:
    """A value that is the same in both evaluations."""
    value = value.astype(FLOAT32) if is_half(getattr(value, "dtype", None)) else value
    return Pair(value, value)


def _like(values: Sequence[Pair], carry: Sequence[Pair]) -> list[Pair]:
    return jax.tree.map(lambda v, c: jnp.asarray(v).astype(c.dtype) if is_float(c) else v, [*values], [*carry])


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
