"""A pytest plugin for one process of JAX's tests: wraps `jax.jit`, and writes down what each test did.

Environment:
    JAX_TESTS_LOG: File to which one line of JSON is appended when a test starts, and one when it ends.
    JAX_TESTS_SOURCE: Folder `jax/_src` of the checkout that the tests come from.
    JAX_TESTS_POLICY: Policy of the cast around each jitted function; empty for none.
    JAX_TESTS_WRAP: Names of the functions of `jax` whose first argument is cast, such as "jit grad".
    JAX_TESTS_REBUILD: "1" to have jamp rebuild also those calls and rules inside that it would leave as they are.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax._src
import jax.numpy as jnp
import pytest

import jamp
from jamp.transforms.program import plan as planned

_PACKAGE = Path(jamp.__file__).parent


def lossless(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """A function cast at a policy, with results in the dtypes that the function gives them."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes: list[Any] = []

        @functools.wraps(fn)
        def recording(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            dtypes[:] = map(_dtype, jax.tree.leaves(result))
            return result

        leaves, tree = jax.tree.flatten(jamp.cast_fn(recording, policy)(*args, **kwargs))
        return jax.tree.unflatten(tree, [_at(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])

    return wrapper


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) else None


def _at(leaf: Any, dtype: Any) -> Any:
    return leaf if dtype is None or leaf.dtype == dtype else leaf.astype(dtype)


def wrapping(transform: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """A transform of JAX's, such as `jax.jit`, that casts the function first where a test calls it."""

    @functools.wraps(transform)
    def wrapper(*args: Any, **options: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.endswith("_test.py"):
            return transform(*args, **options)  # JAX itself, and jamp.
        if args and callable(args[0]):
            args = (lossless(args[0], policy), *args[1:])
        elif not args:  # As a decorator with options, which `jax.jit` takes.
            return functools.partial(wrapper, **options)
        return transform(*args, **options)

    return wrapper


def pytest_configure(config: pytest.Config) -> None:
    """Wraps `jax.jit` before JAX's tests are imported, which may need modules of JAX that wheels leave out."""
    del config
    jax._src.__path__.append(os.environ.get("JAX_TESTS_SOURCE", ""))
    if policy := os.environ.get("JAX_TESTS_POLICY"):
        for name in os.environ.get("JAX_TESTS_WRAP", "jit").split():
            setattr(jax, name, wrapping(getattr(jax, name), policy))
    if os.environ.get("JAX_TESTS_REBUILD") == "1":
        planned.Plan.unchanged = property(lambda plan: False)  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is not asked for, and what the log says was run by a process that did not come to its end."""
    done = {entry["test"] for entry in read_log()}
    items[:] = [item for item in items if name_of(item) not in done]
    if only := os.environ.get("JAX_TESTS_ONLY"):
        wanted = set(json.loads(Path(only).read_text()))
        items[:] = [item for item in items if name_of(item) in wanted]


def read_log() -> Iterator[dict[str, Any]]:
    """The lines of the log so far."""
    path = Path(os.environ["JAX_TESTS_LOG"])
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def name_of(item: pytest.Item) -> str:
    """File, class and function of a test."""
    return f"{item.path.name}::{'::'.join(item.nodeid.split('::')[1:])}"


def _write(**entry: Any) -> None:
    with Path(os.environ["JAX_TESTS_LOG"]).open("a") as log:
        log.write(json.dumps(entry) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Writes that a test starts."""
    _write(test=name_of(item), outcome="started")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Writes how a test ended."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        cause = describe(call.excinfo.value) if call.excinfo and report.outcome == "failed" else {}
        _write(test=name_of(item), outcome=report.outcome, seconds=round(call.duration, 3), **cause)
    return report


def describe(error: BaseException) -> dict[str, str]:
    """Type and text of an error, and the innermost frame of jamp's that it went through, of its causes too."""
    chain, at = [error], error
    while (at := at.__cause__ or at.__context__) is not None and at not in chain:
        chain.append(at)
    frames = [frame for link in chain for frame in traceback.extract_tb(link.__traceback__)]
    inside = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    last = next(iter(traceback.extract_tb(error.__traceback__)[::-1]), None)
    return {
        "error": type(error).__name__,
        "text": str(error)[:600],
        "jamp": "{0.filename}:{0.name}".format(inside[-1]).removeprefix(f"{_PACKAGE}/") if inside else "",
        "line": str(inside[-1].lineno) if inside else "",
        "raised": f"{Path(last.filename).name}:{last.lineno}:{last.name}" if last else "",
    }
