"""Products with power spectra, such as a bank of mel filters: squares of what a transform added up.

The square of a sum over 2,048 samples reaches 1e6, and float16 ends at 65504: of speech at its usual loudness a part of
the logarithms behind the filters was infinite, or NaN.
"""

from __future__ import annotations

from jamp._compat import Jaxpr, Var
from jamp._dtypes import is_complex
from jamp._primitives import PRODUCTS, Trait, has, is_outer
from jamp.transforms.analysis.products.dividends import makers_behind
from jamp.transforms.analysis.products.unfolded import times_itself
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value

_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS
_ADDED_UP = _VIEWS | Trait.ADDS | Trait.SUMS_AXES


def of_spectra(jaxpr: Jaxpr) -> frozenset[Var]:
    """Results of products with squares of complex numbers, or of their parts, or sums of such.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
    """
    if not any(is_complex(var.aval.dtype) for eqn in jaxpr.eqns for var in eqn.outvars if hasattr(var.aval, "dtype")):
        return frozenset()
    opened = Opened(jaxpr)
    products = (flat for flat in opened.eqns if has(flat.eqn, PRODUCTS) and not is_outer(flat.eqn))
    return frozenset(flat.outs[0].var for flat in products if any(_is_spectrum(opened, side) for side in flat.values))


def _is_spectrum(opened: Opened, value: Value) -> bool:
    return any(_is_square(opened, maker) for maker in makers_behind(opened, [value], _ADDED_UP))


def _is_square(opened: Opened, flat: Flat) -> bool:
    if any(is_complex(source.aval.dtype) for source in flat.ins):  # As in `(z * z.conj()).real`.
        return any(has(maker.eqn, Trait.MULTIPLIES) for maker in makers_behind(opened, flat.values, _VIEWS))
    same = has(flat.eqn, Trait.MULTIPLIES) and len({opened.first(value) for value in flat.values}) < len(flat.ins)
    if not (times_itself(flat.eqn) or same):
        return False
    makers = makers_behind(opened, flat.values, _VIEWS)
    return any(is_complex(source.aval.dtype) for maker in makers for source in maker.ins)
