"""`gradient_histogram`: how large gradients are, and what a loss scale in float16 loses of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jamp._dtypes import FLOAT64, parse_dtype
from jamp._tree import is_floating
from jamp.inspect._histogram_picture import plot
from jamp.inspect._histogram_text import table
from jamp.optim import loss_scale
from jamp.scalers import LossScale

_EXPONENTS = range(-126, 128)  # Of normal float32 numbers. What is smaller or larger counts as the nearest of them.


@dataclasses.dataclass(frozen=True)
class LeafHistogram:
    """The gradients of one array.

    Attributes:
        path: Where it is in the tree.
        size: Number of elements.
        zeros: Those that are zero already.
        nonfinite: Those that are infinite or NaN already.
        smallest: Smallest magnitude of the true gradients that is not zero; zero where all are.
        largest: Largest finite magnitude.
        exponents: How many of the true gradients have which binary exponent: `{-3: 5}` says that five magnitudes are in
            [1/8, 1/4).
        below: Elements that are too small at this scale, and become zero.
        short: Elements that keep fewer digits, because they are below the normal numbers of the dtype.
        above: Elements that are too large at this scale, and become infinite: one is enough to skip a step.
    """

    path: str
    size: int
    zeros: int
    nonfinite: int
    smallest: float
    largest: float
    exponents: Mapping[int, int]
    below: int
    short: int
    above: int


@dataclasses.dataclass(frozen=True)
class GradientHistogram:
    """How large gradients are. `str(histogram)` is a table, `histogram.to_dict()` is ready for JSON.

    Attributes:
        dtype: The dtype that is asked about.
        loss_scale: The scale that is asked about.
        best_scale: The scale that loses the fewest digits without an overflow: that which is asked about, if none loses
            fewer; else the nearest such power of two. None where all gradients are zero.
        leaves: One for each floating array.
    """

    dtype: str
    loss_scale: float
    best_scale: float | None
    leaves: tuple[LeafHistogram, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def below(self) -> int:
        """Elements that become zero at this scale."""
        return sum(leaf.below for leaf in self.leaves)

    @property
    def short(self) -> int:
        """Elements that keep fewer digits at this scale."""
        return sum(leaf.short for leaf in self.leaves)

    @property
    def above(self) -> int:
        """Elements that become infinite at this scale."""
        return sum(leaf.above for leaf in self.leaves)

    @property
    def exponents(self) -> dict[int, int]:
        """How many of all gradients have which binary exponent, in order."""
        keys = sorted({e for leaf in self.leaves for e in leaf.exponents})
        return {e: sum(leaf.exponents.get(e, 0) for leaf in self.leaves) for e in keys}

    def to_dict(self) -> dict[str, Any]:
        """The same in dictionaries, lists, strings and numbers, for JSON."""
        totals = {"size": self.size, "below": self.below, "short": self.short, "above": self.above}
        return {**dataclasses.asdict(self), **totals, "exponents": self.exponents}

    def plot(self, path: str) -> None:
        """Draws the histogram of all gradients, with what is lost, and the leaves below each other.

        Args:
            path: Where to write it; the ending tells the format.

        Raises:
            ImportError: If matplotlib is not installed (`pip install 'jamp-jax[examples]'`).
        """
        plot(self, path)

    def __str__(self) -> str:
        return table(self)


def gradient_histogram(
    grads: Any, opt_state: optax.OptState | LossScale | None = None, *, dtype: DTypeLike = "float16"
) -> GradientHistogram:
    """Tells how large gradients are, leaf by leaf, what float16 loses of them, and which loss scale loses least.

    Gradients that went through float16 have lost already what it loses: to see that, take those of a step in bfloat16
    or float32 (`jamp.disable()`). Of gradients inside of a model, which may be larger and smaller than those of its
    parameters, it knows nothing; what overflows there, `jamp.first_nonfinite` tells.

    Args:
        grads: A tree of gradients, arrays with values. Leaves that are not floating do not count.
        opt_state: The state that `grads` were made with by `jamp.scaled_value_and_grad`, or its loss scale: they are
            scaled by it. Left out, they are true gradients, and the scale is 1.
        dtype: What they are to be held in, any floating dtype.

    Returns:
        A `GradientHistogram`; print it, or `plot` it.

    Raises:
        TypeError: If no leaf is a floating array, they have no values, or `grads` is a pair of loss and gradients.
        ValueError: If `dtype` is not a floating one, or `opt_state` holds no loss scale, or more than one.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> found = jamp.gradient_histogram({"w": jnp.float32([1, 0.75, 2**-30, 0])})
        >>> found.below, found.above, found.best_scale, found.exponents
        (1, 0, 32768.0, {-30: 1, -1: 1, 0: 1})
    """
    _refuse_pair(grads)
    leaves = [(keystr(path) or "the only leaf", leaf) for path, leaf in tree_leaves_with_path(grads)]
    leaves = [(path, leaf) for path, leaf in leaves if is_floating(leaf)]
    bad = [path for path, leaf in leaves if isinstance(leaf, Tracer | jax.ShapeDtypeStruct)]
    if bad or not leaves:
        problem = f"these have no values: {', '.join(bad[:5])}" if bad else "there are none"
        raise TypeError(
            f"`jamp.gradient_histogram` looks at floating arrays, and {problem}. Return the gradients from the jitted "
            "step, and call it outside, with arrays."
        )
    scale = 1.0 if opt_state is None else float(loss_scale(opt_state).loss_scale)
    held = _floating_dtype(dtype)
    found = tuple(_leaf(path, leaf, scale, held) for path, leaf in leaves)
    return GradientHistogram(str(held), scale, _best_scale(found, held, scale), found)


def _refuse_pair(grads: Any) -> None:
    """Refuses what `jamp.scaled_value_and_grad` returns: the loss would be counted as a gradient."""
    if type(grads) is not tuple or len(grads) != 2:
        return
    loss, tree = grads
    if is_floating(loss) and loss.shape == () and not jax.tree_util.all_leaves([tree]):
        raise TypeError(
            "`jamp.gradient_histogram` got a pair (loss, grads): expected the gradients alone. Write\n"
            "    loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)\n"
            "    print(jamp.gradient_histogram(grads, opt_state))\n"
            "Gradients of two arguments, of which the first is a number, are taken as a list: [*grads]."
        )


def _floating_dtype(spec: DTypeLike) -> np.dtype:
    """As `parse_dtype`, and the 8-bit ones by the names that JAX gives them."""
    if isinstance(spec, str) and not spec.startswith("float8"):
        return parse_dtype(spec)
    dtype = jnp.dtype(spec)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`dtype` is {str(dtype)!r}: expected a floating dtype, such as 'float16'.")
    return dtype


def _leaf(path: str, scaled: Any, scale: float, dtype: np.dtype) -> LeafHistogram:
    counts = jax.device_get(_count(jnp.asarray(scaled), 1 / scale, dtype))
    zeros, nonfinite, below, short, above = (int(counts[n]) for n in ("zeros", "nonfinite", "below", "short", "above"))
    exponents = {e: int(n) for e, n in zip(_EXPONENTS, counts["exponents"], strict=True) if n}
    return LeafHistogram(
        path, scaled.size, zeros, nonfinite, float(counts["smallest"]), float(counts["largest"]), exponents, below,
        short, above,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=2)
def _count(scaled: jax.Array, factor: float, dtype: np.dtype) -> dict[str, jax.Array]:
    scaled = scaled.astype(scaled.dtype if scaled.dtype == FLOAT64 else jnp.float32).ravel()
    size = jnp.abs(scaled)
    finite, there = jnp.isfinite(scaled), size > 0
    true = size * factor
    info = jnp.finfo(true.dtype)
    # As the dtype holds the exponent: of what is zero, or smaller than a normal number, it is the least.
    held_as = jax.lax.bitcast_convert_type(true, jnp.dtype(f"int{info.bits}")) >> info.nmant
    exponents = jnp.clip(held_as + (info.minexp - 1), _EXPONENTS[0], _EXPONENTS[-1])
    counts = jnp.zeros(1 + len(_EXPONENTS), jnp.int32)
    counts = counts.at[jnp.where(there & finite, exponents - _EXPONENTS[0] + 1, 0)].add(1)
    held = size.astype(dtype)
    return {
        "zeros": jnp.sum(~there & finite),
        "nonfinite": jnp.sum(~finite),
        "below": jnp.sum((held == 0) & there),
        "short": jnp.sum((held != 0) & (size < jnp.finfo(dtype).smallest_normal.astype(size.dtype))),
        "above": jnp.sum(~jnp.isfinite(held) & finite),
        "smallest": jnp.min(true, where=there & finite, initial=jnp.inf),
        "largest": jnp.max(true, where=finite, initial=0),
        "exponents": counts[1:],
    }


def _best_scale(leaves: tuple[LeafHistogram, ...], dtype: np.dtype, present: float) -> float | None:
    largest = max(leaf.largest for leaf in leaves)
    if not largest:
        return None
    info = jnp.finfo(dtype)
    top = math.floor(math.log2(float(info.max))) - math.frexp(largest)[1] + 1
    while largest * 2.0**top > float(info.max):
        top -= 1

    def digits_lost(power: int) -> int:
        """Below the normal numbers each halving costs a digit, until none is left."""
        return sum(
            n * min(max(info.minexp - (e + power), 0), info.nmant + 1)
            for leaf in leaves
            for e, n in leaf.exponents.items()
        )

    top = min(max(top, -126), 126)
    fewest, power = digits_lost(top), math.frexp(present)[1] - 1
    if not any(leaf.above for leaf in leaves) and digits_lost(power) == fewest:
        return present
    least = next(power for power in range(-126, top + 1) if digits_lost(power) == fewest)
    return 2.0 ** min(max(power, least), top)
