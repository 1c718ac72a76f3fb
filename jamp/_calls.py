"""Calls whose arguments do not fit, and `with` around what is no context: answered with the code to write."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from jax.typing import DTypeLike

from jamp._dtypes import HALF_DTYPES, close_matches, parse_dtype, short_repr

F = TypeVar("F", bound=Callable[..., Any])


def explains(usage: str, elsewhere: Mapping[str, str] | None = None) -> Callable[[F], F]:
    """Has a function, or the constructor of a class, say what to write where its arguments do not fit.

    Python names what is missing or unknown, and knows nothing of what it may be called here.

    Args:
        usage: A call that is right.
        elsewhere: What arguments are called in other libraries, each with its name here, or with a sentence where
            another thing takes its place.
    """

    def decorate(fn: F) -> F:
        target: Callable[..., Any] = fn.__init__ if isinstance(fn, type) else fn
        signature = inspect.signature(target)

        @functools.wraps(target)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                positional = args[1:] if isinstance(fn, type) else args
                raise TypeError(_answer(error, usage, elsewhere or {}, signature, positional, kwargs)) from None
            return target(*args, **kwargs)

        if not isinstance(fn, type):
            return cast(F, checked)
        setattr(fn, "__init__", checked)  # noqa: B010 (a class is a callable, to which a type checker knows no such name)
        return cast(F, fn)

    return decorate


def _answer(
    error: TypeError,
    usage: str,
    elsewhere: Mapping[str, str],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    name = usage.partition("(")[0]
    if all(argument in signature.parameters for argument in kwargs):
        return f"`{name}`: {error}. Write {usage}."
    told = unknown_arguments(kwargs, list(signature.parameters), elsewhere)
    renamed = {elsewhere.get(argument, argument): value for argument, value in kwargs.items()}
    if len(renamed) == len(kwargs) and all(argument in signature.parameters for argument in renamed):
        values = [_written(x, parameter) for x, parameter in zip(args, signature.parameters, strict=False)]
        values += [f"{key}={_written(x, key)}" for key, x in renamed.items()]
        usage = f"{name}({', '.join(values)})"
    return f"`{name}` has no argument {told} Write {usage}."


def _written(value: Any, parameter: str) -> str:
    """An argument as one writes it: what has no such form, by its name or by that of the parameter."""
    if parameter == "policy":
        value = _as_policy(value)
    text = short_repr(value, 40)
    if " at 0x" not in repr(value):
        return text
    name = getattr(value, "__name__", "")
    return name if name.isidentifier() else parameter


def _as_policy(value: Any) -> Any:
    """A policy, where others take a dtype or the number of a level: a dtype alone would be that of all arithmetic."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3:
        return f"O{value}"
    try:
        dtype = parse_dtype(cast(DTypeLike, value))
    except (TypeError, ValueError):
        return value
    return f"O2:{dtype}" if dtype in HALF_DTYPES else "O0"


def called(**names: Iterable[str]) -> dict[str, str]:
    """What arguments are called elsewhere: for each one here, its names there."""
    return {theirs: ours for ours, there in names.items() for theirs in there}


def unknown_arguments(given: Mapping[str, Any], known: list[str], elsewhere: Mapping[str, str]) -> str:
    """The arguments that are not known, each with what takes its place here."""
    unknown = [argument for argument in given if argument not in known]
    named = [f"{x!r} (here `{elsewhere[x]}`)" if elsewhere.get(x) in known else repr(x) for x in unknown]
    sentences = [elsewhere[x] for x in unknown if x in elsewhere and elsewhere[x] not in known]
    hints = [close_matches(x, known).strip() for x in unknown if x not in elsewhere]
    return " ".join([f"{', '.join(named)}.", *filter(None, dict.fromkeys(sentences + hints))])


class NotAContext:
    """Answers `with` by an error in words."""

    _instead = (
        "`jamp.autocast` and `jamp.cast_fn` make functions. They are no contexts for `with`, because JAX has no global "
        "mode in which operations could be cast. Write `forward = jamp.autocast(model.apply, policy='O2')`, then "
        "`forward(params, x)`. A part in float32 is `jamp.full_precision(fn)(x)`, and everything `jamp.disable()`."
    )

    def __enter__(self) -> NoReturn:
        raise TypeError(self._instead)

    def __exit__(self, *exc: object) -> None: ...


class _Function(NotAContext):
    """A function, which answers `with` too."""

    def __init__(self, fn: Callable[..., Any], instead: str) -> None:
        functools.update_wrapper(self, fn)
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        return repr(self.__wrapped__)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> str:
        return self.__qualname__  # pyright: ignore[reportAttributeAccessIssue]  # By its name, as functions are.


def no_context(instead: str = NotAContext._instead) -> Callable[[F], F]:
    """Has a function answer `with` around its bare name.

    Args:
        instead: What to write.
    """
    return lambda fn: cast(F, _Function(fn, instead))


def check_count(name: str, value: Any, what: str, usual: int) -> None:
    """Refuses what is no number of times, from one on.

    Args:
        name: Of the argument.
        value: What was given.
        what: What it counts, in words.
        usual: A value to write.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` is {value!r}: expected {what}, 1 or more. Write {name}={usual}.")
