"""Products with power spectra, such as a bank of mel filters: squares of what a transform added up.

The square of a sum over 2,048 samples reaches 1e6, and float16 ends at 65504: of speech at its usual loudness a part of
the logarithms behind the filters was infinite, or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.core import ShapedArray

from jamp._compat import Jaxpr, Var, inner_jaxprs, open_jaxpr
from jamp._dtypes import is_complex
from jamp._primitives import MOVED, PRODUCTS, SCALES, Trait, has, is_outer
from jamp.transforms.analysis.products.unfolded import times_itself
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back, makers_behind
from jamp.transforms.program.flow import num_elements

_ADDED_UP = MOVED | Trait.ADDS | Trait.SUMS_AXES | Trait.LIMITS | Trait.SELECTS


def of_spectra(jaxpr: Jaxpr) -> frozenset[Var]:
    """Results of products with squares of complex numbers, or of their parts, or sums of such.

    Args:
        jaxpr: The jaxpr; what is in it is looked into, loops and branches too.
    """
    if not _makes_complex(jaxpr):
        return frozenset()
    opened = Opened(jaxpr, deep=True, loops=True)
    products = (flat for flat in opened.eqns if has(flat.eqn, PRODUCTS) and not is_outer(flat.eqn))
    return frozenset(flat.outs[0].var for flat in products if any(_is_spectrum(opened, side) for side in flat.values))


def _makes_complex(jaxpr: Jaxpr) -> bool:
    return any(
        any(isinstance(var.aval, ShapedArray) and is_complex(var.aval.dtype) for var in eqn.outvars)
        or any(_makes_complex(open_jaxpr(inner)) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _is_spectrum(opened: Opened, side: Value) -> bool:
    def onward(flat: Flat, value: Value) -> Sequence[Source]:
        if flat.cases:  # Of a loop, those of an iteration.
            return [case[flat.outs.index(value)] for case in flat.cases]
        if has(flat.eqn, _ADDED_UP):
            return flat.values
        return _scaled(opened, flat) if has(flat.eqn, SCALES) else ()

    return any(flat is not None and _is_square(opened, flat) for _, flat in back(opened, [side], onward))


def _scaled(opened: Opened, flat: Flat) -> list[Source]:
    """What an equation scales: by numbers, or by weights that the program is given."""
    sides = [(one, other) for one, other in zip(flat.ins, flat.ins[::-1], strict=True) if one is not other]
    if has(flat.eqn, Trait.DIVIDES):
        sides = sides[:1]
    return [one for one, other in sides if num_elements(other.aval) == 1 or _is_given(opened, other)]


def _is_given(opened: Opened, source: Source) -> bool:
    return opened.number(source) is not None or not any(True for _ in makers_behind(opened, [source], MOVED))


def _is_square(opened: Opened, flat: Flat) -> bool:
    makers = [*makers_behind(opened, flat.values, MOVED)]
    if any(is_complex(source.aval.dtype) for source in flat.ins):  # As in `(z * z.conj()).real`.
        return any(has(maker.eqn, Trait.MULTIPLIES) for maker in makers)
    sides = [opened.first(value) for value in flat.values]
    is_square = (has(flat.eqn, Trait.MULTIPLIES) and sides == sides[:1] * 2) or times_itself(flat.eqn)
    return bool(is_square) and any(is_complex(source.aval.dtype) for maker in makers for source in maker.ins)
