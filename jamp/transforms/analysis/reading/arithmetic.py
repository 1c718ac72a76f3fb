"""What primitives make of numbers that a program writes: `1 / sqrt(64)` is one as well."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping

from jamp._compat import Eqn


def computed(eqn: Eqn, numbers: Iterable[float]) -> float | None:
    """What arithmetic makes of numbers; None where it has no result, and of what is no arithmetic."""
    compute = _ARITHMETIC.get(eqn.primitive.name)
    try:
        return None if compute is None else compute(eqn.params, *numbers)
    except (ArithmeticError, ValueError):
        return None


def is_arithmetic(eqn: Eqn) -> bool:
    """Whether `computed` knows what it makes of numbers, element by element."""
    return eqn.primitive.name in _ARITHMETIC


# What numbers become, by primitive; the first argument is its parameters.
_ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b,
    "neg": lambda _, a: -a,
    "abs": lambda _, a: abs(a),
    "sign": lambda _, a: math.copysign(1, a) if a else a,
    "max": lambda _, a, b: max(a, b),
    "min": lambda _, a, b: min(a, b),
    "clamp": lambda _, low, a, high: min(max(low, a), high),
    "sqrt": lambda _, a: math.sqrt(a),
    "rsqrt": lambda _, a: 1 / math.sqrt(a),
    "pow": lambda _, a, b: math.pow(a, b),
    "integer_pow": lambda params, a: a ** params["y"],
    "square": lambda _, a: a * a,
    "reciprocal": lambda _, a: 1 / a,
    "cbrt": lambda _, a: math.cbrt(a),
    "exp": lambda _, a: math.exp(a),
    "exp2": lambda _, a: 2.0**a,
    "expm1": lambda _, a: math.expm1(a),
    "log": lambda _, a: math.log(a),
    "log1p": lambda _, a: math.log1p(a),
    "sin": lambda _, a: math.sin(a),
    "cos": lambda _, a: math.cos(a),
    "tan": lambda _, a: math.tan(a),
    "atan": lambda _, a: math.atan(a),
    "sinh": lambda _, a: math.sinh(a),
    "cosh": lambda _, a: math.cosh(a),
    "tanh": lambda _, a: math.tanh(a),
    "asinh": lambda _, a: math.asinh(a),
    "erf": lambda _, a: math.erf(a),
    "lgamma": lambda _, a: math.lgamma(a),
    "logistic": lambda _, a: 0.5 + 0.5 * math.tanh(a / 2),
}
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge
}  # fmt: skip
