"""Evaluates a program in float32 and in half side by side, so that a hook sees what each rounding does.

The program is a jaxpr in which all casts are written out, as `cast_fn` emits them (or a user does). A half-precision
operation is the float32 one of half operands, rounded. So both evaluations hold float32 values, and one of them rounds.
The error of an operation is what its rounding changes where its operands are rounded already: a transposition of half
data does no harm, and neither does a factor of two. Where an operand is an index or a mask, its error is also what it
does that half precision decided otherwise than float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._compat import Literal, bind, called_jaxpr, inner_jaxprs, jaxpr_consts, open_jaxpr, scan_counts, while_parts
from jamp._dtypes import FLOAT32, HALF_DTYPES, is_half
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.inspect._operations import CALLS
from jamp.inspect.roundings.maps import enters_map, in_shard_map
from jamp.inspect.roundings.pair import Pair
from jamp.transforms.emission.functions import scatter

Key = tuple[int, ...]
_PRODUCTS = Trait.MATRIX | Trait.CONVOLVES
_LINEAR = (
    Trait.ADDS | Trait.SUBTRACTS | Trait.NEGATES | Trait.VIEW | Trait.MOVES | Trait.SLICES | Trait.SELECTS
    | Trait.PADS | Trait.ASSEMBLES | Trait.GROWS | Trait.CONVERTS | Trait.LINEAR | Trait.TRAFFIC
)  # fmt: skip
_EXACT = Trait.VIEW | Trait.MOVES | Trait.SLICES | Trait.SELECTS | Trait.NEGATES | Trait.EXTREMUM | Trait.ASSEMBLES


def rounds(eqn: Any) -> bool:
    """Whether an equation may round: its result is half, and not only a choice among half operands."""
    if eqn.primitive.name == "reduce_precision":  # JAX writes some without effect around what a checkpoint keeps.
        return eqn.outvars[0].aval.dtype == FLOAT32 and eqn.params["mantissa_bits"] < 23
    if not any(is_half(getattr(var.aval, "dtype", None)) for var in eqn.outvars) or is_opaque(eqn):
        return False
    if rule_of(eqn) is Rule.RECURSE:
        return False
    if eqn.primitive.name == "convert_element_type":
        return not is_half(eqn.invars[0].aval.dtype) or eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype
    return not has(eqn, _EXACT) and rule_of(eqn) is not Rule.FOLLOW


def decides(eqn: Any) -> bool:
    """Whether an equation takes floats by a mask or an index, which half precision may have decided otherwise."""
    name, dtypes = eqn.primitive.name, [getattr(a.aval, "dtype", None) for a in (*eqn.invars, *eqn.outvars)]
    picks = name in ("select_n", "gather", "dynamic_slice", "dynamic_update_slice") or has(eqn, Trait.SCATTERS)
    variable = (
        any(not isinstance(a, Literal) and not jnp.issubdtype(a.aval.dtype, jnp.inexact) for a in eqn.invars)
        if picks
        else False
    )
    return bool(variable) and dtypes[-1] is not None and jnp.issubdtype(dtypes[-1], jnp.inexact)


def is_opaque(eqn: Any) -> bool:
    """Whether an equation has to run in the dtypes that it was traced with."""
    name = eqn.primitive.name
    if name in ("convert_element_type", "reduce_precision") or has(eqn, Trait.SCATTERS):
        return False
    return rule_of(eqn) in (Rule.TRACED, Rule.OPAQUE) or name == "shard_map" or bool(
        inner_jaxprs(eqn) and rule_of(eqn) is not Rule.RECURSE
    )  # fmt: skip


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
    """

    def __init__(
        self,
        hook: Callable[..., list[Any]] | None = None,
        watch: Callable[[Any, list[Pair], list[Pair]], Any] | None = None,
        trips: dict[Key, int] | None = None,
    ) -> None:
        self.hook, self.watch, self.trips = hook, watch, trips or {}

    def run(self, jaxpr: Any, args: Sequence[Pair], key: Key = (), slots: Any = None) -> tuple[list[Pair], dict]:
        """Results of a jaxpr and what was recorded, by key; `slots` is handed to the hook."""
        inner, records = open_jaxpr(jaxpr), {}
        consts = [_both(value) for value in jaxpr_consts(jaxpr)]
        env = dict(zip([*inner.invars, *inner.constvars], [*args, *consts], strict=True))

        def read(atom: Any) -> Pair:
            return _both(atom.val) if isinstance(atom, Literal) else env[atom]

        for number, eqn in enumerate(inner.eqns):
            here = (*key, number)
            operands = [*map(read, eqn.invars)]
            outs, found = self._equation(eqn, operands, here, slots)
            records |= found
            if self.watch is not None and (seen := self.watch(eqn, operands, outs)) is not None:
                records[here] = seen
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(atom) for atom in inner.outvars], records

    def _equation(self, eqn: Any, args: list[Pair], key: Key, slots: Any) -> tuple[list[Pair], dict[Key, Any]]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.run(called_jaxpr(eqn.params), args, (*key, 0), slots)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, args, key, slots)
        if name == "shard_map" and enters_map(eqn):
            return self._shard_map(eqn, args, key, slots)
        same = all(arg.wide is arg.half for arg in args)
        apply = _as_traced if is_opaque(eqn) else raised_bind
        wide = apply(eqn, [arg.wide for arg in args])
        if same and not rounds(eqn):
            return [Pair(y, y) for y in wide], {}
        exact = wide if same else apply(eqn, [arg.half for arg in args])
        half = _rounded_results(eqn, exact) if rounds(eqn) else exact
        if self.hook is not None and not (same or has(eqn, _LINEAR) or is_opaque(eqn)):
            wide = _with_derivative_between(eqn, args, wide)
        decided = any(arg.wide is not arg.half and not _is_float(arg.wide) for arg in args)
        if self.hook is not None and slots is not None and (rounds(eqn) or decided) and not is_opaque(eqn):
            if decided:
                exact = apply(eqn, [arg.half if _is_float(arg.half) else arg.wide for arg in args])
            errors = [_error(h, y) if _is_float(y) else None for h, y in zip(half, exact, strict=True)]
            wide = self.hook(key, wide, errors, slots)
        if rounds(eqn) or has(eqn, Trait.DIVIDES | Trait.SINGULAR):
            half = [_finite_again(h, y) if _is_float(y) else h for h, y in zip(half, wide, strict=True)]
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


def _both(value: Any) -> Pair:
    """A value that is the same in both evaluations."""
    value = value.astype(FLOAT32) if is_half(getattr(value, "dtype", None)) else value
    return Pair(value, value)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _like(values: Sequence[Pair], carry: Sequence[Pair]) -> list[Pair]:
    return jax.tree.map(lambda v, c: jnp.asarray(v).astype(c.dtype) if _is_float(c) else v, [*values], [*carry])


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)


def _as_traced(eqn: Any, args: list[Any]) -> list[Any]:
    half = [x.astype(a.aval.dtype) if _is_half(a) else x for x, a in zip(args, eqn.invars, strict=True)]
    return [x.astype(FLOAT32) if is_half(getattr(x, "dtype", None)) else x for x in bind(eqn, half)]


def raised_bind(eqn: Any, args: list[Any]) -> list[Any]:
    """An equation in float32."""
    if eqn.primitive.name == "reduce_precision":
        return args
    if not any(map(_is_half, (*eqn.invars, *eqn.outvars))):
        return bind(eqn, args)
    if has(eqn, Trait.SCATTERS):
        return scatter(eqn, args)
    params = {k: FLOAT32 if _is_half_dtype(v) else v for k, v in eqn.params.items()}
    if has(eqn, _PRODUCTS):
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return bind(eqn, args, params)


def _rounded_results(eqn: Any, exact: list[Any]) -> list[Any]:
    if eqn.primitive.name == "reduce_precision":
        return [lax.reduce_precision(exact[0], eqn.params["exponent_bits"], eqn.params["mantissa_bits"])]
    return [rounded(y, v.aval.dtype) if _is_half(v) else y for y, v in zip(exact, eqn.outvars, strict=True)]


def _is_half(atom: Any) -> bool:
    return is_half(getattr(atom.aval, "dtype", None))


def _is_half_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) and value in HALF_DTYPES


def _with_derivative_between(eqn: Any, args: list[Pair], wide: list[Any]) -> list[Any]:
    """Float32 results whose derivative is that halfway between both precisions, where these can be told apart.

    For products and squares the derivative there times the error of an operand is the error of the result, however
    large it is. At the float32 operands alone, what cancels to 0 instead of 1 changes its square by 2.
    """
    own_sign = has(eqn, Trait.DIVIDES | Trait.SINGULAR)

    def between(arg: Pair) -> Any:
        if arg.wide is arg.half or not _is_float(arg.wide):
            return arg.wide
        step = lax.stop_gradient(arg.half - arg.wide) / 2
        usable = jnp.isfinite(step)
        if own_sign and not jnp.iscomplexobj(step):  # There may be a pole between a positive and a negative number.
            usable &= arg.wide * arg.half > 0
        return arg.wide + jnp.where(usable, step, 0)

    middle = raised_bind(eqn, [between(arg) for arg in args])
    return [
        jnp.where(jnp.isfinite(y), y - lax.stop_gradient(y), 0) + lax.stop_gradient(w) if _is_float(w) else w
        for y, w in zip(middle, wide, strict=True)
    ]


def _error(half: Any, exact: Any) -> Any:
    return jnp.where((half == exact) | jnp.isnan(exact), 0, half - exact)


def _finite_again(half: Any, wide: Any) -> Any:
    """Goes on with the float32 value where half has none, so that what follows an overflow is not blamed for it."""
    return jnp.where(jnp.isfinite(half) | ~jnp.isfinite(wide), half, lax.stop_gradient(wide))


def rounded(value: Any, dtype: Any) -> Any:
    """A float32 value rounded to half. The barrier keeps XLA, which may leave out roundings, from doing so."""
    return lax.optimization_barrier(jnp.asarray(value).astype(dtype)).astype(FLOAT32)
