"""What a model is that can be measured, and the losses and inputs that several models share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike


def mean_square(outputs: jax.Array, *inputs: Any) -> jax.Array:
    """Mean square of an output, the loss of models without targets."""
    del inputs
    return jnp.mean(jnp.square(outputs))


def next_token(logits: jax.Array, *inputs: Any) -> jax.Array:
    """Cross entropy of the next token; the tokens are the last input."""
    tokens = inputs[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def first_class(outputs: Any, *inputs: Any) -> jax.Array:
    """Cross entropy against class ``i % classes`` for row ``i``; a model with state returns it second."""
    del inputs
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    labels = jnp.arange(logits.shape[0]) % logits.shape[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def first_mean_square(outputs: tuple[jax.Array, Any], *inputs: Any) -> jax.Array:
    """Mean square of the first of several outputs."""
    return mean_square(outputs[0], *inputs)


@dataclass(frozen=True)
class Model:
    """A model that is ready to be differentiated.

    Attributes:
        apply: Pure function ``apply(params, *inputs) -> outputs``, the thing that a precision transform wraps.
        params: Pytree of float32 arrays, or of their shapes; gradients are taken with respect to it.
        inputs: Everything else that ``apply`` takes: batch, running statistics, PRNG keys.
        loss: ``loss(outputs, *inputs) -> scalar``; it is given float32 outputs and stays outside every transform.
    """

    apply: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    loss: Callable[..., jax.Array] = mean_square


def objective(model: Model, apply: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Float32 loss of the outputs of ``apply``, as a function of ``(params, *inputs)``."""

    def loss(params: Any, *inputs: Any) -> jax.Array:
        return model.loss(jax.tree.map(_raised, apply(params, *inputs)), *inputs)

    return loss


def _raised(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if is_floating(leaf) else leaf


def is_floating(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array of floating numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def initial(init: Callable[..., Any], dtype: DTypeLike | None, *args: Any) -> Any:
    """Parameters of the float32 model; shapes alone for a native one, which is run with the float32 model's."""
    return jax.jit(init)(*args) if dtype is None else jax.eval_shape(init, *args)


def tokens(batch: int, length: int, vocabulary: int) -> jax.Array:
    """Int32 token batch, the same on every call."""
    return jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)


def normal(*shape: int) -> jax.Array:
    """Float32 normal batch, the same on every call."""
    return jax.random.normal(jax.random.key(2), shape)
