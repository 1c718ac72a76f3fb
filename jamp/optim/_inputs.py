"""What `tx.init` and `tx.update` of jamp's wrappers are given: checked before anything is done with it."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._dtypes import short_repr
from jamp._tree import check_holds_numbers, is_number

_UPDATE = "    updates, opt_state = tx.update(grads, opt_state, params)"
STEP = "    loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)\n" + _UPDATE
_MOST_LINES = 20


class WrapperState(Protocol):
    """The state of a wrapper."""

    @property
    def inner_state(self) -> optax.OptState:
        """The state of the transformation inside."""
        ...


class StateOfAnotherError(TypeError):
    """A state that another optimizer made. Raised once, by the innermost of nested wrappers."""


class _Given(NamedTuple):
    updates: Any
    state: Any
    params: Any


def transformation(
    kind: type[WrapperState],
    name: str,
    init_fn: Callable[[Any], Any],
    update_fn: Callable[..., tuple[Any, Any]],
    *,
    needs_params: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that says in words what is wrong with what it is given.

    Args:
        kind: Type of its state.
        name: Name of the function of jamp that makes it.
        init_fn: Its `init`.
        update_fn: Its `update`. Its errors are told in the terms of the caller, where the cause is known.
        needs_params: Whether `init` reads the parameters: where it does not, None stands for them, as in optax.
    """

    def init(params: optax.Params) -> optax.OptState:
        if params is not None or needs_params:
            _check_params(params, kind)
        return init_fn(params)

    def update(updates: Any, state: Any = None, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        given = _Given(updates, state, params)
        _check_state(given, kind, name)
        _check_gradients(updates, params)
        try:
            return update_fn(updates, state, params, **extra_args)
        except StateOfAnotherError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            _explain(error, given, init_fn)
            raise

    # To optax's types, a state is an array or a collection of them, which no NamedTuple is.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _check_params(params: Any, kind: type[WrapperState]) -> None:
    """Refuses what is no tree of parameters: names, modules with functions in them, nothing at all."""
    write = "Write `opt_state = tx.init(params)`."
    if params is None or isinstance(params, int | kind):
        raise TypeError(f"`tx.init` takes the parameters, a tree of arrays, got {short_repr(params)}. {write}")
    leaves = tree_leaves_with_path(params)
    bad = [f"  {keystr(path) or 'params'}: {short_repr(x)}" for path, x in leaves if not is_number(x)]
    if bad:
        if len(bad) < len(leaves):
            write = (
                "Leave them out. For a module of Equinox write\n"
                "    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))"
            )
        raise TypeError(
            f"`tx.init` takes the parameters, a tree of arrays, and these leaves are none:\n{_lines(bad)}\n{write}"
        )
    dtypes = [jnp.result_type(x) for _, x in leaves]
    if leaves and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        whole = [f"  {keystr(path) or 'params'}: {dtype}" for (path, _), dtype in zip(leaves, dtypes, strict=True)]
        raise TypeError(
            f"`tx.init` takes the parameters, and none of these is floating, so none has a gradient:\n{_lines(whole)}\n"
            "Make them float32: jax.tree.map(lambda x: x.astype('float32'), params)."
        )


def _check_state(given: _Given, kind: type[WrapperState], name: str) -> None:
    """Refuses the state of another wrapper or of plain optax, and arguments in another order."""
    if isinstance(given.state, kind):
        return
    if given.state is None:
        raise TypeError(f"`tx.update` got no state. Write\n{_UPDATE}")
    if isinstance(given.updates, kind) or isinstance(given.params, kind):
        raise TypeError(
            f"`tx.update` takes gradients, state and parameters, in this order, and the {kind.__name__} came "
            f"{'first' if isinstance(given.updates, kind) else 'third'}. Write\n{_UPDATE}"
        )
    raise TypeError(
        f"The state of `{name}` is a {kind.__name__}, got {type(given.state).__name__}{_place_of(kind, given.state)}. "
        "Make it with `tx.init(params)`; to go on from the state of plain optax, write jamp.from_optax(tx, params, …)."
    )


def _place_of(kind: type, state: Any) -> str:
    leaves = tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, kind))
    places = [keystr(path) for path, x in leaves if isinstance(x, kind)]
    return f" with one at {places[0]}: the state of an optimizer around this one" if places else ""


def _check_gradients(updates: Any, params: Any) -> None:
    """Refuses what is not the gradients of the parameters; without these, what holds no numbers."""
    if updates is None:
        raise TypeError(f"`tx.update` got None in place of the gradients. Write\n{STEP}")
    check_holds_numbers(updates, "`tx.update` takes gradients, a tree of arrays", f"Write\n{STEP}")
    if params is None or not (lines := differences(updates, params)):
        return
    if isinstance(updates, tuple | list) and (found := [i for i, x in enumerate(updates) if _fits(x, params)]):
        names = ("(grads, loss)", "(loss, grads)")
        got = f"a pair {names[found[-1]]}" if len(updates) == 2 else f"{len(updates)} values, gradients at {found[-1]}"
        raise ValueError(f"`tx.update` got {got}: expected the gradients alone. Write\n{STEP}")
    if _is_leaf(updates) and not _is_leaf(params):
        raise ValueError(
            f"`tx.update` got {_spec(updates)} in place of the gradients, which are a tree like the parameters. A "
            f"function that returns the loss and the gradients returns them in this order:\n{STEP}"
        )
    raise ValueError(_misfit(lines, updates, params))


def _misfit(lines: list[str], updates: Any, params: Any) -> str:
    cure = f"Differentiate with respect to all that `tx.init` and `tx.update` get for parameters:\n{STEP}"
    if not differences(updates, params):
        cure = "These are gradients of each example. Take their mean: jax.tree.map(lambda g: g.mean(0), grads)."
    return f"The gradients do not fit the parameters:\n{_lines(lines)}\n{cure}"


def _fits(updates: Any, params: Any) -> bool:
    return updates is not None and not differences(updates, params)


def check_averaged(grads: Any, updates: Any, params: Any) -> None:
    """Refuses gradients of each example where the optimizer does not bring them together, but passes them on.

    Args:
        grads: What the optimizer got.
        updates: What it made of it.
        params: The parameters, or None.
    """
    lines = [] if params is None else differences(grads, params, per_example=False)
    if lines and [x.shape for x in jax.tree.leaves(updates)] == [np.shape(x) for x in jax.tree.leaves(grads)]:
        raise ValueError(_misfit(lines, grads, params))


def differences(updates: Any, params: Any, *, per_example: bool = True) -> list[str]:
    """What keeps gradients from being those of the parameters: a line for each leaf, with its path.

    None and `optax.MaskedNode` stand for no gradient, whatever the parameters have there: Equinox writes the one, and
    optax the other. Containers may be of other types, and a structure of its own may stand for the parameters in it.

    Args:
        updates: The gradients.
        params: The parameters.
        per_example: Whether gradients may have one axis more in front, as `optax.contrib.dpsgd` takes them.

    Returns:
        The lines; none where they fit.
    """
    grads = dict(_leaves(updates, keep_empty=True))
    wanted = dict(_leaves(params))
    absent = [path for path, g in grads.items() if _is_empty(g)]
    lines = []
    if jax.tree.structure(updates) != jax.tree.structure(params) and not _is_other_model(updates, params):
        lines = [
            f"  {keystr(path) or 'the tree'}: no gradient, the parameter is {_spec(p)}"
            for path, p in wanted.items()
            if path not in grads and not any(path[: len(start)] == start for start in absent)
        ]
        lines += [
            f"  {keystr(path) or 'the tree'}: gradient {_spec(g)}, no such parameter"
            for path, g in grads.items()
            if path not in wanted and not _is_empty(g)
        ]
    return lines + [
        f"  {keystr(path) or 'the tree'}: gradient {_spec(g)}, the parameter is {_spec(wanted[path])}"
        for path, g in grads.items()
        if path in wanted and not _is_empty(g) and not _same_shape(np.shape(g), np.shape(wanted[path]), per_example)
    ]


def _leaves(tree: Any, keep_empty: bool = False) -> list[tuple[Any, Any]]:
    leaves = tree_leaves_with_path(tree, is_leaf=_is_empty if keep_empty else None)
    return [(path, x) for path, x in leaves if is_number(x) or _is_empty(x)]


def _is_empty(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _is_leaf(tree: Any) -> bool:
    return jax.tree.structure(tree) == jax.tree.structure(0)


def _is_other_model(updates: Any, params: Any) -> bool:
    """Whether one of them is a structure of its own: a module, for its state; `optax.LookaheadParams`, for a tree."""
    return type(updates) is not type(params) and not (_is_plain(updates) and _is_plain(params))


def _is_plain(tree: Any) -> bool:
    return isinstance(tree, Mapping) or type(tree) in (list, tuple) or _is_leaf(tree)


def _same_shape(shape: tuple[int, ...], wanted: tuple[int, ...], per_example: bool) -> bool:
    return shape == wanted or (per_example and shape[1:] == wanted)


def _spec(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)


def _lines(lines: list[str]) -> str:
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(lines[:_MOST_LINES] + more)


def _explain(error: Exception, given: _Given, init_fn: Callable[[Any], Any]) -> None:
    """Says what is wrong with what the optimizer inside was given, once it has failed.

    Asked only then, because `init` is traced for it, and because an optimizer may take more than one expects.
    """
    if given.params is None:
        error.add_note(f"`tx.update` got no parameters. Where the optimizer needs them, write\n{_UPDATE}")
        return
    if lines := differences(given.updates, given.params, per_example=False):
        raise ValueError(_misfit(lines, given.updates, given.params)) from error
    expected = None
    with contextlib.suppress(Exception):
        expected = cast(WrapperState, jax.eval_shape(init_fn, given.params)).inner_state
    if expected is not None and (lines := _state_differences(expected, given.state.inner_state)):
        raise StateOfAnotherError(
            "The state is not one of this optimizer for these parameters. What its `tx.init(params)` makes differs in\n"
            + _lines(lines)
            + "\nKeep each state with the optimizer that made it, or make a new one: `opt_state = tx.init(params)`."
        ) from error
    if jax.tree.structure(given.updates) != jax.tree.structure(given.params):
        error.add_note(
            "Gradients and parameters are of different containers:\n"
            f"  gradients: {short_repr(jax.tree.structure(given.updates), 400)}\n"
            f"  parameters: {short_repr(jax.tree.structure(given.params), 400)}"
        )


def _state_differences(expected: Any, given: Any) -> list[str]:
    want, have = ({keystr(k): _spec(x) for k, x in tree_leaves_with_path(tree)} for tree in (expected, given))
    lines = [f"  inner_state{k}: {have.get(k, 'nothing')}, expected {want.get(k, 'nothing')}"
             for k in want | have if want.get(k) != have.get(k)]  # fmt: skip
    kinds = [jax.tree.structure(tree) for tree in (given, expected)]
    if not lines and kinds[0] != kinds[1]:
        lines = ["  inner_state: {}, expected {}".format(*(short_repr(kind, 400) for kind in kinds))]
    return lines
