"""The models of the zoo by name, and the decorator that collects them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jax.typing import DTypeLike

from benchmarks.models import Model


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
