"""The attention kernels of each platform, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jamp.transforms.program.attention import Attention


def _refused_by_cudnn(attention: Attention) -> str:
    """What `jax.nn.dot_product_attention(..., implementation="cudnn")` raises on all of NVIDIA's GPUs."""
    depth, width = attention.size(attention.depth), attention.size(attention.width)
    if depth != width:
        return f"its queries have {depth} features, its values {width}"
    if depth % 8 or depth > 128:
        return f"its heads have {depth} features: not at most 128, and a multiple of 8"
    queries, keys = attention.size(attention.queries), attention.size(attention.keys)
    if (attention.biases or attention.masks or attention.places) and (queries % 2 or keys % 2):
        return f"it has a mask or a bias, and {queries} queries and {keys} keys: not even numbers"
    return ""


def _refused_by_flash(attention: Attention) -> str:
    """What JAX's flash attention for TPUs cannot do."""
    depth, width = attention.size(attention.depth), attention.size(attention.width)
    if depth != width:
        return f"its queries have {depth} features, its values {width}"
    queries, keys = attention.size(attention.queries), attention.size(attention.keys)
    if queries % 128 or keys % 128:
        return f"it has {queries} queries and {keys} keys: not multiples of 128"
    if attention.biases:
        return "it adds a bias to its scores"
    if attention.masks:
        return (
            "it has a mask of the program's data, which is not known to be causal while a program is traced: make a "
            "causal mask inside of the function, by jnp.tril, or close over it, instead of passing it as an argument"
        )
    if attention.window is not None:
        return f"it has a window of {attention.window + 1} keys"
    return "its mask depends on places, but is not the causal one" if attention.places else ""


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
        name: Its name.
        refuses: Why it cannot do an attention; empty where it can.
        divides: Whether XLA can divide it over devices.
    """

    name: str
    refuses: Callable[[Attention], str]
    divides: bool


# By the name of the platform that a program is lowered for.
KERNELS: Mapping[str, Kernel] = {
    "cuda": Kernel("cuDNN", _refused_by_cudnn, divides=True),
    "tpu": Kernel("flash attention", _refused_by_flash, divides=False),
}


def refusals(attention: Attention) -> dict[str, str]:
    """By platform, why its kernel cannot do an attention."""
    if any(type(size) is not int for size in attention.sizes):
        return dict.fromkeys(KERNELS, "its sizes are not known")
    return {platform: reason for platform, kernel in KERNELS.items() if (reason := kernel.refuses(attention))}


def refused_everywhere(attention: Attention) -> str:
    """Why no kernel can do an attention; empty where one can."""
    found = refusals(attention)
    if len(found) < len(KERNELS):
        return ""
    return "; ".join(dict.fromkeys(f"{platform}: {reason}" for platform, reason in found.items()))
