"""What a model of the zoo is, and the losses that several of them share."""

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Entry:
    """A model by name, with the means to build it.

    Attributes:
        name: ``library/model``.
        build: ``build(dtype)``; ``None`` builds the unmodified float32 model, a half dtype the same model in the
            library's own mixed precision.
        native: Whether the library has a mixed precision of its own for this model.
    """

    name: str
    build: Callable[[DTypeLike | None], Model]
    native: bool

    @property
    def library(self) -> str:
        """The part of the name before the slash."""
        return self.name.split("/")[0]


@dataclass
class Zoo:
    """The models of one library, collected by the decorator `add`."""

    library: str
    entries: list[Entry] = field(default_factory=list)

    def add(self, native: bool = True) -> Callable[[Callable[..., Model]], Callable[..., Model]]:
        """Registers a builder under its function's name."""

        def register(build: Callable[..., Model]) -> Callable[..., Model]:
            name = f"{self.library}/{build.__name__.removesuffix('_')}"
            self.entries.append(Entry(name, build, native))
            return build

        return register


def initial(init: Callable[..., Any], dtype: DTypeLike | None, *args: Any) -> Any:
    """Parameters of the float32 model; shapes alone for a native one, which is run with the float32 model's."""
    return jax.jit(init)(*args) if dtype is None else jax.eval_shape(init, *args)


def tokens(batch: int, length: int, vocabulary: int) -> jax.Array:
    """Int32 token batch, the same on every call."""
    return jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)


def normal(*shape: int) -> jax.Array:
    """Float32 normal batch, the same on every call."""
    return jax.random.normal(jax.random.key(2), shape)
