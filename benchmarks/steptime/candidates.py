"""What the step-time benchmark compares."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks.candidates import Candidate, of_jamp, of_peers
from benchmarks.steptime.goals import BY_HAND, OURS

TUTORIALS = ("float32", "float32, TF32", "jamp O1 float16", "jamp O2 float16", "jamp O1 bfloat16", "jamp O2 bfloat16")
# Those of which the largest batch is looked for.
LARGEST = ("float32", BY_HAND, "jamp O2 bfloat16", "jamp O2 float16")


# Settings of O2 in bfloat16 that pay, or do not, on an accelerator alone.
SETTINGS = (
    "residuals=all",
    "attention=fused",
    "o=bfloat16,attention=fused",  # Logits in half, as PyTorch's are.
    "matmul=float8",
    "attention=fused,matmul=float8",
)


def candidates() -> tuple[list[Candidate], dict[str, str]]:
    """Returns the candidates whose libraries are installed, and by name why one is missing."""
    found = [Candidate("float32", matmul_precision="highest")]
    if jax.default_backend() == "gpu":
        found.append(Candidate("float32, TF32", matmul_precision="tensorfloat32"))
    found.append(Candidate(BY_HAND, dtype=jnp.bfloat16))
    for dtype in ("bfloat16", "float16"):
        found += [of_jamp(f"{level}:{dtype}", f"jamp {level} {dtype}") for level in ("O1", "O2", "O3")]
    if jax.default_backend() == "gpu":
        found += [of_jamp(f"O2:bfloat16,{setting}", f"{OURS}, {setting}") for setting in SETTINGS]
    peers, missing = of_peers(jnp.bfloat16)
    return [*found, *(replace(peer, name=f"{peer.name} bfloat16") for peer in peers)], missing
