"""What holds for all of a plan: the precisions, the thresholds, and how products in 8 bits are made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jamp._dtypes import BFLOAT16, E4M3, FLOAT32, Pair
from jamp.transforms.program.heuristics import DEFAULT, Heuristics


class Scaling(NamedTuple):
    """Which elements of an array in 8 bits share a scale.

    Attributes:
        axes: Axes along which all elements do; None for all axes.
        block: An axis along which blocks of 32 have a scale each, whatever `axes` says.
        ragged: An axis of rows that belong to groups, whatever `axes` says: all rows of a group share a scale.
    """

    axes: tuple[int, ...] | None = None
    block: int | None = None
    ragged: int | None = None

    BLOCK = 32


class EightBits(NamedTuple):
    """How products in 8 bits are made.

    Attributes:
        scales: What shares a scale: `"tensor"` (an operand, or each of a batch of them), `"row"` (what is contracted
            together) or `"block"`.
        grad_dtype: The float8 format of cotangents.
        weight_grad_in_half: Whether the product that makes the gradient of a weight is in half.
    """

    scales: str = "tensor"
    grad_dtype: np.dtype = E4M3
    weight_grad_in_half: bool = False

    @property
    def blocks(self) -> bool:
        """Whether each 32 elements that are contracted have a scale of their own."""
        return self.scales == "block"

    def scaling(self, contracted: tuple[int, ...], apart: tuple[int, ...], ndim: int) -> Scaling:
        """Which elements of an operand share a scale.

        Args:
            contracted: The contracted axes.
            apart: Axes along which each index has scales of its own, whatever the setting: of a batch. Members of an
                ensemble, and experts, may be of very different magnitude.
            ndim: The number of axes of the operand.
        """
        if self.blocks:
            return Scaling(block=contracted[0])
        if self.scales == "row":
            return Scaling(contracted)
        return Scaling(tuple(axis for axis in range(ndim) if axis not in apart) if apart else None)


def unscaled_dtype(out: np.dtype) -> np.dtype:
    """The dtype of a product of float8 numbers that is then scaled by powers of two, by the dtype of its result.

    bfloat16 has the exponents of float32, so that scaling rounds nothing there, and what is added up over devices takes
    half of the bytes. float16 has no room for what is not scaled yet.
    """
    return out if out == BFLOAT16 else FLOAT32


class Setting(NamedTuple):
    """What holds for all of a plan.

    Attributes:
        pair: The precisions of the policy.
        heuristics: The thresholds.
        eight_bits: How products in 8 bits are made.
        wide_gradients: Whether products make the gradients of weights in float32, as they are reduced over devices.
    """

    pair: Pair
    heuristics: Heuristics = DEFAULT
    eight_bits: EightBits = EightBits()
    wide_gradients: bool = False
