"""Errors of attention's gradients: as written at O2, as `attention=fused` emits it on CPUs, and as kernels compute it.

Run from the root of the repository::

    python -m benchmarks.studies.attention_gradients

The kernel is a reference in plain JAX, with the roundings of flash attention: operands in half, scores and the sums of
the softmax in float32, weights and their cotangents rounded to half before products, the result in half. Errors are
root mean squares of differences to float64, over those of the gradients themselves.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jamp
from benchmarks.tables import print_table

HALVES = ("bfloat16", "float16")


class Case(NamedTuple):
    """An attention of `[batch, length, heads, features]`.

    Attributes:
        causal: Whether keys after a query are masked.
        biased: Whether a bias is added to the scores.
        spread: Standard deviation of queries and keys: the larger, the fewer keys have weight.
    """

    causal: bool = False
    biased: bool = False
    spread: float = 1.0


CASES: Mapping[str, Case] = {
    "plain": Case(),
    "causal": Case(causal=True),
    "bias": Case(biased=True),
    "few keys": Case(causal=True, spread=2.0),
}


def _scores(case: Case, q: Array, k: Array, bias: Array, dtype: jnp.dtype) -> Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype) / np.sqrt(q.shape[-1])
    if case.biased:
        scores = scores + bias.astype(dtype)
    return jnp.where(np.tri(q.shape[1], dtype=bool), scores, -1e9) if case.causal else scores


def written(case: Case, q: Array, k: Array, v: Array, bias: Array) -> Array:
    """The attention as models write it, of operands that they compute."""
    q, k, v = _made(case, q, k, v)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(_scores(case, q, k, bias, q.dtype)), v)


def _made(case: Case, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    return q * case.spread, k * case.spread, v * 1.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(case: Case, q: Array, k: Array, v: Array, bias: Array) -> Array:
    """The attention with the roundings of a kernel, of operands in half."""
    return _forward(case, q, k, v, bias)[0]


def _forward(case: Case, q: Array, k: Array, v: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = _scores(case, q, k, bias, jnp.float32)
    shifted = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = shifted.sum(-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bhqd", shifted.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    out = jnp.swapaxes(out, 1, 2).astype(v.dtype)
    return out, (q, k, v, bias, out, scores.max(-1, keepdims=True) + jnp.log(total))


def _backward(case: Case, kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
    q, k, v, bias, out, logsumexp = kept
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jnp.exp(_scores(case, q, k, bias, jnp.float32) - logsumexp)
    of_weights = product("bqhd,bkhd->bhqk", cotangent, v)
    row = jnp.einsum("bqhd,bqhd->bhq", cotangent.astype(jnp.float32), out.astype(jnp.float32))[..., None]
    of_scores = weights * (of_weights - row)
    of_logits = of_scores.astype(q.dtype)
    scale = 1 / np.sqrt(q.shape[-1])
    return (
        (product("bhqk,bkhd->bqhd", of_logits, k) * scale).astype(q.dtype),
        (product("bhqk,bqhd->bkhd", of_logits, q) * scale).astype(k.dtype),
        product("bhqk,bqhd->bkhd", weights.astype(v.dtype), cotangent).astype(v.dtype),
        of_scores.sum(0) if case.biased else jnp.zeros_like(bias),
    )


kernel.defvjp(_forward, _backward)


def _by_kernel(case: Case, half: str, q: Array, k: Array, v: Array, bias: Array) -> Array:
    return kernel(case, *(x.astype(half) for x in _made(case, q, k, v)), bias).astype(jnp.float32)


def _derived(function: Callable[..., Array], operands: list[np.ndarray], cotangent: np.ndarray) -> list[np.ndarray]:
    """The value and the gradients of a function."""

    def run(*values: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(function, *values[:-1])
        return out, *pull(values[-1].astype(out.dtype))

    return [np.asarray(each, np.float64) for each in jax.jit(run)(*operands, cotangent)]


def errors(case: Case, half: str, shape: tuple[int, ...] = (2, 32, 2, 16), seed: int = 0) -> dict[str, np.ndarray]:
    """Relative errors of the value and of the gradients of queries, keys and values, by form of the attention.

    Args:
        case: The attention.
        half: Name of the half dtype.
        shape: `[batch, length, heads, features]` of its operands.
        seed: Seed of these.
    """
    rng = np.random.default_rng(seed)
    q, k, v, cotangent = rng.standard_normal((4, *shape))
    bias = rng.standard_normal((shape[2], shape[1], shape[1]))
    operands, cotangent = [x.astype(np.float32) for x in (q, k, v, bias)], cotangent.astype(np.float32)
    plain = functools.partial(written, case)
    with jax.enable_x64(True):
        exact = _derived(plain, [x.astype(np.float64) for x in operands], cotangent.astype(np.float64))
    forms = {
        "as written": jamp.cast_fn(plain, f"O2:{half}"),
        "fused, on CPUs": jamp.cast_fn(plain, f"O2:{half},attention=fused"),
        "kernel": functools.partial(_by_kernel, case, half),
    }
    count = 5 if case.biased else 4
    return {
        name: np.array([
            np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
            for got, want in zip(_derived(form, operands, cotangent)[:count], exact[:count], strict=True)
        ])
        for name, form in forms.items()
    }  # fmt: skip


def main() -> None:
    """Prints the errors, and their ratios to those of the form as it is written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.attention_gradients", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    lines = []
    for half in HALVES:
        for name, case in CASES.items():
            found = [errors(case, half, seed=seed) for seed in range(options.seeds)]
            means = {form: np.mean([each[form] for each in found], axis=0) for form in found[0]}
            for form, mean in means.items():
                ratio = mean / means["as written"]
                lines.append(
                    (half, name, form, *(f"{100 * a:.3f} ({b:.2f})" for a, b in zip(mean, ratio, strict=True)))
                )
    lines = [line + ("",) * (8 - len(line)) for line in lines]
    titles = ("dtype", "attention", "form", "value %", "queries %", "keys %", "values %", "bias %")
    print_table("Errors (and over those as written)", titles, lines, names=3)


if __name__ == "__main__":
    main()
