"""Compiles a train step for a device, and reads off it what it will cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import hlo
from benchmarks.candidates import Candidate, of_jamp
from benchmarks.compiled.render import BY_HAND, FLOAT32, FUSED
from benchmarks.steptime.programs import matmul_precision, parts
from benchmarks.steptime.workloads import Workload
from benchmarks.timing import peak_bytes

_PLATFORMS = {"gpu": "cuda"}  # What JAX lowers for, where a device calls itself otherwise.


def candidates() -> list[Candidate]:
    """Returns what is compared."""
    jamps = [of_jamp(f"{level}:bfloat16", f"jamp {level}") for level in ("O1", "O2", "O3")]
    fused = of_jamp("O2:bfloat16,attention=fused", FUSED)
    return [Candidate(FLOAT32), Candidate(BY_HAND, dtype=jnp.bfloat16), *jamps, fused]


def compiled(workload: Workload, candidate: Candidate, device: Any, batch: int | None = None) -> Any:
    """Compiles a train step for a device, perhaps with another batch, from shapes alone."""
    steps = []

    def arguments() -> Any:
        step, *rest = parts(workload, candidate, batch)
        steps.append(step)
        return rest

    place = jax.sharding.SingleDeviceSharding(device)
    flat = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(arguments))
    with matmul_precision(candidate):
        traced = jax.jit(steps[0], donate_argnums=(0, 1)).trace(*flat[:2], *flat[2])
        platform: str = device.platform
        return traced.lower(lowering_platforms=(_PLATFORMS.get(platform, platform),)).compile()


def measured(workload: Workload, candidate: Candidate, device: Any) -> dict[str, int]:
    """Peak memory and memory traffic of a train step in bytes, and for a TPU the cycles that its compiler expects."""
    step = compiled(workload, candidate, device)
    text = step.as_text()
    row = {"peak_bytes": peak_bytes(step), "moved_bytes": hlo.traffic(text)}
    expected = hlo.cycles(text)
    return row | ({"cycles": expected} if expected else {})
