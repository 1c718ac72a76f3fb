"""One equation in float32 and in half: whether it rounds, what it gives, and what its rounding changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._compat import Literal, bind, inner_jaxprs
from jamp._dtypes import FLOAT32, HALF_DTYPES, is_half
from jamp._primitives import PRODUCTS, Rule, Trait, has, rule_of
from jamp.inspect.roundings.pair import Pair
from jamp.transforms.emission.functions import scatter

_LINEAR = (
    Trait.ADDS | Trait.SUBTRACTS | Trait.NEGATES | Trait.VIEW | Trait.MOVES | Trait.SLICES | Trait.SELECTS
    | Trait.PADS | Trait.ASSEMBLES | Trait.GROWS | Trait.CONVERTS | Trait.LINEAR | Trait.TRAFFIC
)  # fmt: skip
_EXACT = Trait.VIEW | Trait.MOVES | Trait.SLICES | Trait.SELECTS | Trait.NEGATES | Trait.EXTREMUM | Trait.ASSEMBLES

_FAR = 2.0**-6  # Of a number: closer, and differences of results are mostly rounding.
# What takes floats, or makes them, by a mask or an index. A mask may be a number: `(x > 0).astype(float)`.
_DECIDED = ("select_n", "gather", "dynamic_slice", "dynamic_update_slice", "convert_element_type")
_STEPS = ("sign", "floor", "ceil", "round")  # Without a derivative, and exact.
_HANDS_ON = ("reduce_precision", "stop_gradient")  # A rounding is handed on, whatever the program differentiates.


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


def deciders(eqn: Any) -> list[int]:
    """The operands by which an equation takes others: masks, indices, and floats of which the largest or first counts.

    Half precision may have decided these otherwise.
    """
    name, atoms = eqn.primitive.name, eqn.invars
    if name in ("select_and_scatter_add", "select_and_gather_add"):  # The gradient of a maximum in each window.
        return [1]
    if name == "sort":
        return [*range(eqn.params["num_keys"])] if len(atoms) > eqn.params["num_keys"] else []
    if name not in _DECIDED and not has(eqn, Trait.SCATTERS):
        return []
    return [i for i, a in enumerate(atoms) if not isinstance(a, Literal) and not _is_inexact(a)]


def decides(eqn: Any) -> bool:
    """Whether an equation takes floats by what half precision may have decided otherwise."""
    return bool(deciders(eqn)) and any(map(_is_inexact, eqn.outvars))


def _is_inexact(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def is_opaque(eqn: Any) -> bool:
    """Whether an equation has to run in the dtypes that it was traced with."""
    name = eqn.primitive.name
    if name in ("convert_element_type", "reduce_precision") or has(eqn, Trait.SCATTERS):
        return False
    return rule_of(eqn) in (Rule.TRACED, Rule.OPAQUE) or name == "shard_map" or bool(
        inner_jaxprs(eqn) and rule_of(eqn) is not Rule.RECURSE
    )  # fmt: skip


def as_traced(eqn: Any, args: list[Any]) -> list[Any]:
    """An equation in the dtypes that it was traced with."""
    half = [x.astype(a.aval.dtype) if _is_half(a) else x for x, a in zip(args, eqn.invars, strict=True)]
    return [x.astype(FLOAT32) if is_half(getattr(x, "dtype", None)) else x for x in bind(eqn, half)]


def raised_bind(eqn: Any, args: list[Any]) -> list[Any]:
    """An equation in float32."""
    if eqn.primitive.name in _HANDS_ON:
        return args
    if not any(map(_is_half, (*eqn.invars, *eqn.outvars))):
        return bind(eqn, args)
    if has(eqn, Trait.SCATTERS):
        return scatter(eqn, args)
    params = {k: FLOAT32 if _is_half_dtype(v) else v for k, v in eqn.params.items()}
    if has(eqn, PRODUCTS):
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return bind(eqn, args, params)


def rounded_results(eqn: Any, exact: list[Any]) -> list[Any]:
    """The results of an equation, rounded to the dtypes that it has in the program."""
    if eqn.primitive.name == "reduce_precision":
        return [lax.reduce_precision(exact[0], eqn.params["exponent_bits"], eqn.params["mantissa_bits"])]
    return [rounded(y, v.aval.dtype) if _is_half(v) else y for y, v in zip(exact, eqn.outvars, strict=True)]


def _is_half(atom: Any) -> bool:
    return is_half(getattr(atom.aval, "dtype", None))


def _is_half_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) and value in HALF_DTYPES


def is_linear(eqn: Any) -> bool:
    """Whether the derivative of an equation, but for its rounding, is the same everywhere."""
    return has(eqn, _LINEAR) or eqn.primitive.name == "reduce_precision"


def with_derivative_between(eqn: Any, args: list[Pair], wide: list[Any], half: list[Any]) -> list[Any]:
    """Float32 results whose derivative, times the errors of the operands, is the error of the result, however large.

    For products and squares that is the derivative halfway between both precisions. At the float32 operands alone, what
    cancels to 0 instead of 1 changes its square by 2. Of a function of one number it is the slope from one precision to
    the other; a quotient is a product with such a function. For all else halfway is as good as it gets.

    Args:
        eqn: The equation.
        args: Its operands in both precisions.
        wide: Its results for the float32 operands.
        half: Its results for the others, not rounded.
    """
    middle = raised_bind(eqn, [_halfway(arg, has(eqn, Trait.DIVIDES | Trait.SINGULAR)) for arg in args])
    if eqn.primitive.name == "div" and not any(jnp.iscomplexobj(arg.wide) for arg in args):
        over, under = args
        between = _halfway(under, True)
        inverse = Pair(1 / under.wide, 1 / under.half)
        middle = [_halfway(over, False) * _sloped(under, inverse, 1 / jnp.where(between == 0, 1, between))]
    elif has(eqn, Trait.EXTREMUM) and is_float(wide[0]):
        middle = [_larger(*args) if has(eqn, Trait.MAXIMUM) else -_larger(*(Pair(-x, -y) for x, y in args))]
    elif _is_of_one_number(eqn, args, wide):
        middle = [_sloped(args[0], Pair(wide[0], half[0]), middle[0], 0.0 if eqn.primitive.name in _STEPS else _FAR)]
    return [_differentiated(lax.stop_gradient(w), y) if is_float(w) else w for y, w in zip(middle, wide, strict=True)]


def _larger(left: Pair, right: Pair) -> Any:
    """The larger of two numbers, with the slopes between both precisions, of which another one may be the larger."""
    ahead, after = (lax.stop_gradient(x - y) for x, y in zip(left, right, strict=True))
    # Of the absolute value of their difference: `max(x, y)` is `(x + y + abs(x - y)) / 2`.
    step = after - ahead
    slope = (jnp.abs(after) - jnp.abs(ahead)) / jnp.where(step == 0, 1, step)
    slope = jnp.where((ahead * after < 0) | ((ahead == 0) != (after == 0)), slope, jnp.sign(ahead))
    parts = [((1 + slope) / 2, left.wide), ((1 - slope) / 2, right.wide)]
    return sum(jnp.where(part > 0, part * x, 0) for part, x in parts)


@jax.custom_vjp
def _differentiated(value: Any, like: Any) -> Any:
    """A value whose derivative is that of another one, where that is finite."""
    del like
    return value


def _differentiated_backward(finite: Any, cotangent: Any) -> Any:
    return None, jnp.where(finite, cotangent, 0)


# Of all that a sum of both would keep for the derivative, only the mask is needed.
_differentiated.defvjp(lambda value, like: (value, jnp.isfinite(like)), _differentiated_backward)


def _halfway(arg: Pair, own_sign: bool) -> Any:
    """An operand halfway between both precisions; with a sign of its own, if a pole may lie between two signs."""
    if arg.wide is arg.half or not is_float(arg.wide):
        return arg.wide
    step = lax.stop_gradient(arg.half - arg.wide) / 2
    usable = jnp.isfinite(step)
    if own_sign and not jnp.iscomplexobj(step):
        usable &= arg.wide * arg.half > 0
    return arg.wide + jnp.where(usable, step, 0)


def _sloped(x: Pair, y: Pair, otherwise: Any, far: float = _FAR) -> Any:
    """A value halfway between two results, with the slope between them; another one where their arguments are near."""
    step = lax.stop_gradient(x.half - x.wide)
    slope = lax.stop_gradient(y.half - y.wide) / jnp.where(step == 0, 1, step)
    usable = jnp.isfinite(slope) & (jnp.abs(step) > far * jnp.abs(lax.stop_gradient(x.wide)))
    half = lax.stop_gradient((y.wide + y.half) / 2)
    return jnp.where(usable, half + jnp.where(usable, slope, 0) * (x.wide - lax.stop_gradient(x.wide)), otherwise)


def _is_of_one_number(eqn: Any, args: list[Pair], results: list[Any]) -> bool:
    """Whether an equation computes each number of its one result from one number."""
    if len(args) != 1 or len(results) != 1 or has(eqn, Trait.EXPENSIVE | Trait.REDUCES | Trait.COMPLEX):
        return False
    if rule_of(eqn) is Rule.NO_HALF:  # Linear algebra.
        return False
    (arg,), (result,) = args, results
    real = all(is_float(x) and not jnp.iscomplexobj(x) for x in (arg.wide, result))
    return real and arg.wide.shape == result.shape and arg.wide is not arg.half


def error_of(half: Any, exact: Any) -> Any:
    """What rounding changes; none where it changes nothing, and where there is no value."""
    return jnp.where((half == exact) | jnp.isnan(exact), 0, half - exact)


def finite_again(half: Any, wide: Any) -> Any:
    """Goes on with the float32 value where half has none, so that what follows an overflow is not blamed for it."""
    return jnp.where(jnp.isfinite(half) | ~jnp.isfinite(wide), half, lax.stop_gradient(wide))


def rounded(value: Any, dtype: Any) -> Any:
    """A float32 value rounded to half. The barrier keeps XLA, which may leave out roundings, from doing so."""
    return lax.optimization_barrier(jnp.asarray(value).astype(dtype)).astype(FLOAT32)


def is_float(value: Any) -> bool:
    """Whether a value is floating or complex."""
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)
