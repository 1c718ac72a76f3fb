"""Spellings of floating dtypes, and the half-precision dtype of the machine at hand."""

import difflib
import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(jnp.bfloat16)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
HALF_DTYPES = (FLOAT16, BFLOAT16)
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)

# jmp's spellings, and "fp16" and its like from the settings of other frameworks. They are looked up before numpy's, for
# which "f16" is a 16-byte float.
_NAMED = {
    "f16": HALF_DTYPES[0],
    "bf16": HALF_DTYPES[1],
    "f32": FLOAT32,
    "full": FLOAT32,
    "f64": FLOAT64,
    "fp16": HALF_DTYPES[0],
    "fp32": FLOAT32,
    "fp64": FLOAT64,
}
_FLOATS = {d.name: d for d in _NAMED.values()}
ACCEPTED = ("half", *_NAMED, *_FLOATS)


def is_half(dtype: Any) -> bool:
    """Whether a dtype is one of the two half-precision dtypes."""
    return dtype in HALF_DTYPES


def is_differentiable(aval: Any) -> bool:
    """Whether an abstract value is an array of floating or complex numbers."""
    return isinstance(aval, jax.core.ShapedArray) and is_inexact(aval.dtype)


@functools.cache
def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is one of floating or complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@functools.cache
def is_complex(dtype: Any) -> bool:
    """Whether a dtype is one of complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


@functools.cache
def _lacks_range(narrow: np.dtype, wide: np.dtype) -> bool:
    return float(jnp.finfo(narrow).smallest_normal) > 2 * float(jnp.finfo(wide).smallest_normal)


class Pair(NamedTuple):
    """The two precisions of a policy: what a program was written in, and what its products run in.

    Attributes:
        wide: Dtype in which the program was written, and in which sums and functions are computed: float32.
        narrow: Dtype of the products, and of stored data: float16 or bfloat16. With `wide` float64 it is float32.
    """

    wide: np.dtype
    narrow: np.dtype

    def is_narrow(self, dtype: Any) -> bool:
        """Whether data is stored in a dtype: in either half dtype beside float32, as the user may have both."""
        return dtype in HALF_DTYPES if self.wide == FLOAT32 else dtype == self.narrow

    def flows(self, aval: Any) -> bool:
        """Whether precision may flow through a value: it is wide or narrow. Float8, integers and complex stay."""
        # A reference has the dtype of what it refers to, and is none.
        return isinstance(aval, jax.core.ShapedArray) and (aval.dtype == self.wide or self.is_narrow(aval.dtype))

    def is_other_inexact(self, aval: Any) -> bool:
        """Floating or complex, but outside what flows: complex, float8, and float64 beside float32."""
        return is_differentiable(aval) and not self.flows(aval)

    def is_cast(self, before: Any, after: Any) -> bool:
        """Whether a conversion is one between the two."""
        both = (before, after), (after, before)
        return any(one == self.wide and self.is_narrow(other) for one, other in both)

    @property
    def lacks_range(self) -> bool:
        """Whether the narrow dtype takes numbers for zero, or for infinity, that are ordinary in the wide one."""
        return _lacks_range(self.narrow, self.wide)

    def holds(self, magnitudes: Any) -> Any:
        """Whether the narrow dtype holds numbers, by their magnitudes, with all of its digits."""
        info = jnp.finfo(self.narrow)
        return (magnitudes == 0) | ((magnitudes >= float(info.smallest_normal)) & (magnitudes <= float(info.max)))


# Where no policy says which: either half dtype is seen as one.
FLOAT32_AND_HALF = Pair(FLOAT32, BFLOAT16)


def close_matches(word: str, choices: Any, cutoff: float = 0.5) -> str:
    """`" Did you mean …?"` for an error message, or an empty string when nothing comes close."""
    found = difflib.get_close_matches(word, list(choices), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def short_repr(value: Any, limit: int = 80) -> str:
    """`repr`, cut where an array or an optimizer state would fill the screen, for an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({type(value).__name__})"


def parse_dtype(spec: DTypeLike) -> np.dtype:
    """The floating dtype that `spec` spells.

    Args:
        spec: A name (`"float32"`, `"f32"`, `"full"`, `"half"`, …), a scalar type (`jnp.bfloat16`, `np.float32`)
            or a `np.dtype`.

    Returns:
        One of the `np.dtype`s float16, bfloat16, float32 and float64.

    Raises:
        ValueError: If `spec` is a string or a dtype, and not one of those.
        TypeError: If `spec` is not a dtype at all.
    """
    if isinstance(spec, str):
        name = spec.strip()
        dtype = half_dtype() if name == "half" else _NAMED.get(name, _FLOATS.get(name))
        if dtype is None:
            expected = f"expected one of {', '.join(ACCEPTED)}.{close_matches(name, ACCEPTED)}"
            raise ValueError(f"Unknown dtype {spec!r}: {expected}")
        return dtype
    # numpy reads None and `float` as float64, which nobody who writes them here means, and arrays as their dtype.
    if not isinstance(spec, type | np.dtype) or spec is float:
        raise TypeError(f"Expected a floating dtype such as 'float32' or jnp.bfloat16, got {spec!r}.")
    dtype = np.dtype(spec)
    if dtype not in _FLOATS.values():
        raise ValueError(f"Expected one of the floating dtypes {', '.join(_FLOATS)}, got {dtype.name!r}.")
    return dtype


def half_dtype() -> np.dtype:
    """The half-precision dtype that suits the default device, asked now and not at import.

    bfloat16 on TPU, on CPU, and on GPUs of compute capability 8.0 and later (Ampere), which run it as fast as float16
    and do not need loss scaling; float16 on older GPUs, which have no bfloat16 matrix units.

    Returns:
        `np.dtype("bfloat16")` or `np.dtype("float16")`.

    Example:
        >>> import jamp
        >>> jamp.half_dtype().itemsize
        2
    """
    return half_dtype_of(default_device())


def default_device() -> Any:
    """The device that what says nothing of one runs on, asked now."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def has_float8(device: Any) -> bool:
    """Whether a device multiplies float8 numbers itself: GPUs of compute capability 8.9 and later (Ada, Hopper).

    Elsewhere, or where a device does not say, XLA converts them, to the same results.
    """
    try:
        return device.platform in ("gpu", "cuda") and float(device.compute_capability) >= 8.9
    except (AttributeError, ValueError):
        return False


def half_dtype_of(device: Any) -> np.dtype:
    """`half_dtype` for a given `jax.Device`."""
    float16, bfloat16 = HALF_DTYPES
    if device.platform not in ("gpu", "cuda", "rocm"):
        return bfloat16
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):
        return bfloat16  # AMD names an architecture ("gfx942"), and all that ROCm supports today have bfloat16.
    return bfloat16 if capability >= 8.0 else float16
