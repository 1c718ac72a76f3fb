"""From which width on products in float8 pay on the device at hand, and where their time goes.

Run from the root of the repository, on a machine whose GPU has float8 products::

    python -m benchmarks.studies.float8_widths --json benchmarks/results/float8-widths.json
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false \\
        python -m benchmarks.studies.float8_widths --run "cuBLASLt alone" --json benchmarks/results/float8-widths.json

For each width: the gradient of two pre-norm transformer blocks at 8 sequences of 1,024, cast by O2 and by O2 with
`matmul=float8`, both with fused attention; and the products of such a block by themselves, in each layout.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jamp
from benchmarks.files import OUT, write_json
from benchmarks.steptime.workloads import Block
from benchmarks.tables import number, print_table
from benchmarks.timing import milliseconds

O2 = "O2:bfloat16,attention=fused"
POLICIES = (O2, *(f"{O2},matmul=float8{more}" for more in ("", ",float8_scales=row", ",weight_grad=half")))
ROWS, LENGTH = 8 * 1024, 1024  # Of all sequences, and of each.
LAYERS = 2
E4M3 = jnp.float8_e4m3fn
# What is contracted of the two operands: of the forward product, of the gradient of data, of that of a weight.
LAYOUTS: Mapping[str, tuple[int, int]] = {"forward": (1, 0), "gradient of data": (1, 1), "gradient of a weight": (0, 0)}


class Blocks(nn.Module):
    """Transformer blocks, one by one."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x, _ = Block(self.width)(x, None)
        return x


def gradient(width: int, policy: str) -> tuple[Any, tuple[Any, ...]]:
    """The compiled gradient of the blocks, and what it is of."""
    module = Blocks(width)
    x = jax.random.normal(jax.random.key(1), (ROWS // LENGTH, LENGTH, width))
    params = jax.jit(module.init)(jax.random.key(0, impl="rbg"), x[:1])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jamp.cast_fn(module.apply, policy)(params, x).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss)).lower(params, x).compile(), (params, x)


def product(dtype: Any, axes: tuple[int, int], backward: bool, rounded: bool) -> Callable[..., jax.Array]:
    """One product with a bfloat16 result, of operands that are in a dtype or are rounded to it, as jamp has it."""
    precision = jax.lax.Precision.HIGHEST if backward and dtype == E4M3 else None

    def multiply(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
        if rounded:
            x, largest = x.astype(jnp.float32), jnp.abs(x).max().astype(jnp.float32)
            x = jnp.clip(x * (scales[0] / largest), -448, 448).astype(dtype)
        numbers = (((axes[0],), (axes[1],)), ((), ()))
        out = jax.lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=jnp.float32)
        return (out * scales[0] * scales[1]).astype(jnp.bfloat16)

    return multiply


def products(width: int) -> Iterator[tuple[str, Callable[..., jax.Array], tuple[jax.Array, ...]]]:
    """Products of a width and one four times as large, and their operands."""
    shapes = {
        "forward": ((ROWS, width), (width, 4 * width)),
        "gradient of data": ((ROWS, 4 * width), (width, 4 * width)),
        "gradient of a weight": ((ROWS, width), (ROWS, 4 * width)),
    }
    kinds = {"bfloat16": (jnp.bfloat16, False), "float8": (E4M3, False), "float8, rounds its data": (E4M3, True)}
    for layout, axes in LAYOUTS.items():
        x, w = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes[layout]))
        for kind, (dtype, rounded) in kinds.items():
            operands = (x if rounded else x.astype(dtype), w.astype(dtype), jnp.ones(2))
            yield f"{layout}, {kind}", product(dtype, axes, layout != "forward", rounded), operands


def kernels(program: Any, operands: tuple[Any, ...], calls: int = 3) -> dict[str, float]:
    """Milliseconds of a call by kernel, as the profiler has them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(program(*operands))
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        spent: Counter[str] = Counter()
        for plane in data.planes:
            if "/device:GPU" in plane.name:
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            spent[event.name[:100]] += event.duration_ns / 1e6 / calls
    return dict(spent.most_common(40))


def custom_calls(program: Any) -> dict[str, int]:
    """How often a compiled program calls each function of a library, and multiplies by kernels of XLA's own."""
    text = program.as_text()
    found = Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    found["Triton"] = text.count('"kind":"__triton_gemm"') + text.count('"kind":"__triton_nested_gemm_fusion"')
    return dict(found)


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.float8_widths", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1536, 3072, 6144])
    parser.add_argument("--products", type=int, nargs="*", help="widths of products by themselves, those of all else")
    parser.add_argument("--settings", type=int, default=len(POLICIES), help="how many of the settings")
    parser.add_argument("--kernels", action="store_true", help="what the profiler says of each kernel too")
    parser.add_argument("--run", default="as XLA chooses", help="what this run is stored as, beside others in the file")
    parser.add_argument("--json", type=Path, default=OUT / "float8-widths.json")
    options = parser.parse_args()
    stored: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {"runs": {}}
    stored |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    found = stored["runs"].setdefault(options.run, {})
    widths = options.widths if options.products is None else options.products
    # One by one, each stored: to choose kernels takes a compiler minutes, and while it tries them out nothing is timed.
    for width in dict.fromkeys((*options.widths, *widths)):
        row = found.setdefault(str(width), {"gradients": {}, "products": {}, "kernels": {}})
        for name, multiply, operands in products(width) if width in widths else ():
            program = jax.jit(multiply).lower(*operands).compile()
            row["products"][name] = {"ms": milliseconds(program, operands), "calls": custom_calls(program)}
            write_json(options.json, stored)
        for policy in POLICIES[: options.settings] if width in options.widths else ():
            step, operands = gradient(width, policy)
            memory = step.memory_analysis().temp_size_in_bytes / 1e6
            row["gradients"][policy] = {
                "ms": milliseconds(step, operands), "temporary MB": memory, "calls": custom_calls(step)
            }  # fmt: skip
            if options.kernels:
                row["kernels"][policy] = kernels(step, operands)
            write_json(options.json, stored)
    show(found)


def show(widths: dict[str, Any]) -> None:
    """Prints the gradients and the products of each width."""
    lines = []
    for width, row in widths.items():
        base = row["gradients"].get(O2, {"ms": float("nan")})["ms"]
        for policy, found in row["gradients"].items():
            texts = (number(x) for x in (found["ms"], found["ms"] / base, found["temporary MB"]))
            lines.append((width, policy, *texts))
    print_table("Gradients", ("width", "policy", "ms", "of O2", "temporary MB"), lines, names=2)
    lines = []
    for width, row in widths.items():
        flops = 2 * ROWS * int(width) * 4 * int(width)
        for name, found in row["products"].items():
            lines.append((width, name, number(found["ms"], digits=3), number(flops / found["ms"] / 1e9, digits=0)))
    print_table("Products", ("width", "product", "ms", "TFLOP/s"), lines, names=2)


if __name__ == "__main__":
    main()
