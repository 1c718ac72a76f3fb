"""Compiles convolutions and grouped products of float8 operands for an H100: what XLA makes of them.

Run from the root of the repository, where `pip install "jax[cuda12]"` has added XLA's compiler for NVIDIA GPUs::

    python -m benchmarks.studies.float8_kernels --json benchmarks/results/float8-kernels.json

Nothing runs. For each operation it tells the kernel, and the dtypes and shapes that it is given; for train steps of two
networks also peak memory and the bytes that are moved.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compiled.devices import descriptions  # isort: skip (It sets the environment that JAX is imported in.)

import jax
import jax.numpy as jnp
from jax import lax

import jamp
from benchmarks import hlo
from benchmarks.files import write_json
from benchmarks.timing import peak_bytes

E4M3 = jnp.float8_e4m3fn
X, W = (32, 32, 32, 256), (3, 3, 256, 256)
_KERNELS = re.compile(r'custom_call_target="(__cudnn\$\w+)"|= \S+ (dot|convolution)\(')
_OPERANDS = re.compile(r"%[\w.-]+")


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution with a float32 result."""
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes, preferred_element_type=jnp.float32)


def programs() -> Iterator[tuple[str, Callable[..., Any], list[tuple[tuple[int, ...], Any]]]]:
    """Names, functions, and the shapes and dtypes of their arguments."""
    ragged = lambda x, w, sizes: lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)  # noqa: E731
    for dtype in (E4M3, jnp.bfloat16):
        arguments = [((4096, 1024), dtype), ((8, 1024, 1024), dtype), ((8,), jnp.int32)]
        yield f"ragged_dot, {jnp.dtype(dtype).name}", ragged, arguments
    yield "convolution", convolution, [(X, E4M3), (W, E4M3)]
    scaled = lambda x, w, a, b: (convolution(x, w) * a * b).astype(jnp.bfloat16)  # noqa: E731
    yield "convolution, scaled, to bfloat16", scaled, [(X, E4M3), (W, E4M3), ((), jnp.float32), ((), jnp.float32)]
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, W, X)]
    both = jax.make_jaxpr(lambda x, w, dy: jax.vjp(convolution, x, w)[1](dy))(*wide)
    found = [eqn for eqn in both.jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]
    for eqn in found[1:]:
        of_kernel = eqn.outvars[0].aval.shape == W or eqn.params["dimension_numbers"].lhs_spec[0] != 0
        name = f"gradient of a convolution's {'kernel' if of_kernel else 'data'}"
        yield (
            name,
            lambda *xs, eqn=eqn: eqn.primitive.bind(*xs, **eqn.params),
            [(v.aval.shape, E4M3) for v in eqn.invars],
        )


def networks() -> Iterator[tuple[str, Callable[..., Any], list[Any], list[jamp.Policy]]]:
    """Names, losses, the shapes of their arguments, and policies."""
    half, float8 = jamp.get_policy("O2:bfloat16"), jamp.get_policy("O2:bfloat16,matmul=float8")

    def convolutions(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.gelu(convolution(x, w))
        return jnp.mean(x**2)

    def experts(ws: list[jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.gelu(lax.ragged_dot(x, w, sizes))
        return jnp.mean(x**2)

    each = float8.with_rules(float8=["conv_general_dilated"])
    yield "convolutions", convolutions, [[(W, jnp.float32)] * 3, (X, jnp.float32)], [half, each]
    arguments = [[((8, 1024, 1024), jnp.float32)] * 2, ((4096, 1024), jnp.float32), ((8,), jnp.int32)]
    yield "experts", experts, arguments, [half, float8]


def kernels(text: str) -> list[str]:
    """The products and convolutions of a compiled program, with what they are given."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", text))
    found = []
    for line in text.splitlines():
        if match := _KERNELS.search(line):
            operands = _OPERANDS.findall(line[match.end() if match[2] else line.index("custom-call(") :])
            given = [types[name] for name in operands if name in types][:2]
            found.append(f"{match[1] or match[2]} of {' and '.join(given)}")
    return found


def main() -> None:
    """Compiles, prints, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.float8_kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = descriptions(["h100"])["h100"]
    place = jax.sharding.SingleDeviceSharding(device)
    results = {}
    for name, fn, arguments in programs():
        avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in arguments]
        text = jax.jit(fn).trace(*avals).lower(lowering_platforms=("cuda",)).compile().as_text()
        results[name] = kernels(text)
        print(f"{name}: {'; '.join(results[name])}")
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    for name, fn, arguments, policies in networks():
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(*x, sharding=place), arguments, is_leaf=is_shape)
        for policy in policies:
            step = jax.jit(jax.grad(jamp.cast_fn(fn, policy)))
            compiled = step.trace(*avals).lower(lowering_platforms=("cuda",)).compile()
            text = compiled.as_text()
            found = {
                "peak bytes": peak_bytes(compiled), "moved bytes": hlo.traffic(text), "kernels": kernels(text)
            }  # fmt: skip
            results[f"train step of {name}, {policy}"] = found
            print(f"{name} at {policy}: {found['peak bytes'] / 1e6:.0f} MB, {found['moved bytes'] / 1e6:.0f} MB moved")
    if options.json:
        write_json(options.json, {"compiled_for": device.device_kind, "jax": jax.__version__, "kernels": results})


if __name__ == "__main__":
    main()
