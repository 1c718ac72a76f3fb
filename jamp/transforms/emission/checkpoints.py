"""Checkpoints, jamp's own and the user's. What has the same signature is traced, differentiated and transposed once.

JAX remembers of each jaxpr what its derivative is, which part of it is known, what it is transposed, and outside of
`jax.jit` what was compiled of it. That is most of what a checkpoint or a loop takes. So the same jaxpr has to be found
where the same steps are emitted again: when a function is traced once more, and of layers that repeat. It is found in
JAX's own cache of jitted functions, which `jax.clear_caches` empties, and which looks at all that a trace depends on
besides the steps: configuration, meshes, the types of the arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import Array

from jamp._compat import eval_jaxpr, jaxpr_consts, open_jaxpr
from jamp.transforms.keeping.kept import KeepHalf
from jamp.transforms.keeping.names import keep_p

Function = Callable[..., list[Array]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """The policy of a user's checkpoint, for the equations that the user wrote: others may stand for them now.

    Attributes:
        policy: The user's.
    """

    policy: Callable[..., bool]

    def __call__(self, primitive: object, *avals: object, **params: bool | None) -> bool:
        """What is kept of the results of a primitive; JAX asks for each."""
        saved = params["saved"] if primitive is keep_p else None
        return self.policy(primitive, *avals, **params) if saved is None else saved


class _Signed:
    """A function, as equal to another as their signatures are."""

    def __init__(self, function: Function, signature: Hashable) -> None:
        self.function: Function | None = function
        self._signature = signature
        self._hash = hash(signature)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signed) and self._signature == other._signature


@functools.partial(jax.jit, static_argnums=0)
def _signed(signed: _Signed, *values: Array) -> list[Array]:
    assert signed.function is not None  # JAX calls what it does not know, which is new.
    return signed.function(*values)


def checkpointed(
    function: Function,
    values: Sequence[Array],
    signature: Hashable | None,
    policy: Callable[..., Any] | None,
    barrier: bool = False,
) -> list[Array]:
    """Emits a function under a checkpoint.

    Args:
        function: A function of arrays.
        values: What to call it with.
        signature: What tells it, and the policy, from others; None where nothing does, so that it is traced anew.
        policy: What the checkpoint keeps.
        barrier: Whether JAX puts a barrier of its own before all that is read in the backward pass.

    Returns:
        Its results.
    """
    inside = jax.checkpoint(function, policy=policy, prevent_cse=barrier)
    own = policy if isinstance(policy, KeepHalf) else None  # Of the user's policy the signature tells.
    return remembered(inside, values, None if signature is None else (signature, own, barrier))


def remembered(function: Function, values: Sequence[Array], signature: Hashable | None) -> list[Array]:
    """Emits a function, of the jaxpr that was made of it before where there is one.

    Args:
        function: A function of arrays.
        values: What to call it with.
        signature: What tells it from others; None where nothing does, so that it is traced anew.

    Returns:
        Its results.
    """
    if signature is None:
        return list(function(*values))
    signed = _Signed(function, signature)
    jaxpr = _signed.trace(signed, *values).jaxpr
    signed.function = None  # JAX keeps what it is given, and there is no need to keep the steps.
    return eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *values)
