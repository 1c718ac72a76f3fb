"""What the precision benchmark compares: float32, the library's own mixed precision, jmp, mpx and jamp."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from benchmarks.candidates import Candidate, dots_saveable, of_jamp, of_peers


def candidates(policy: str) -> tuple[list[Candidate], dict[str, str]]:
    """All precisions whose library is installed.

    Args:
        policy: What `jamp.cast_fn` is given; its half dtype is that of the others too.

    Returns:
        The candidates, and by name why one is missing.
    """
    dtype = half_dtype(policy)
    peers, missing = of_peers(dtype)
    found = [
        Candidate("float32"),
        Candidate("native", dtype=dtype),
        Candidate("native, dots saved", dots_saveable, dtype=dtype, runs=False),
        *(replace(peer, runs=peer.name != "mpx") for peer in peers),
        of_jamp(policy),
    ]
    return found, missing


def half_dtype(policy: str) -> Any:
    """Half dtype that a policy's name has, bfloat16 if it names none."""
    return jnp.dtype(policy.partition(",")[0].partition(":")[2] or jnp.bfloat16)
