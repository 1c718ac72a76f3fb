"""Trees of arrays: cast the floating leaves, test that all are finite, select between two trees.

Everything else in a tree (integers, booleans, PRNG keys, strings, functions, None, Python numbers) passes untouched,
so the trees of every model library work, those with functions and names for leaves included.
"""

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path
from jax.typing import ArrayLike, DTypeLike

from jamp._compat import mapped_axes
from jamp._dtypes import FLOAT32, half_dtype, parse_dtype, short_repr

T = TypeVar("T")
N = TypeVar("N")
AxisName = Hashable | Sequence[Hashable]

_ARRAYS = (jax.Array, np.ndarray, np.generic)  # Tracers are instances of jax.Array.


def is_floating(x: Any) -> bool:
    """Whether `x` is an array with a real floating dtype: of jax, of numpy, traced, or abstract.

    Python floats are not: they have no dtype of their own, and take that of the arrays they meet.
    """
    return isinstance(x, (*_ARRAYS, jax.ShapeDtypeStruct)) and jnp.issubdtype(x.dtype, jnp.floating)


def nodes_of(tree: Any, *kinds: type[N]) -> list[N]:
    """The nodes of a tree that are of some types, each without those inside of it."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in nodes if isinstance(x, kinds)]


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a tree.

    Args:
        tree: Any pytree. Leaves that are not floating arrays are returned as they are.
        dtype: The floating dtype to cast to, in any spelling (`"bf16"`, `jnp.bfloat16`, …).

    Returns:
        A tree of the same structure. numpy arrays stay numpy arrays, `jax.ShapeDtypeStruct`s stay what they are.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> tree = jamp.cast_tree({"w": jnp.ones(2), "step": jnp.int32(3), "name": "mlp"}, "float16")
        >>> tree["w"].dtype, tree["step"].dtype, tree["name"]
        (dtype('float16'), dtype('int32'), 'mlp')
    """
    target = parse_dtype(dtype)
    return jax.tree.map(lambda x: _cast(x, target) if is_floating(x) else x, tree)


def _cast(x: Any, dtype: np.dtype) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype, weak_type=False)
    return x.astype(dtype, copy=False)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of a tree to `jamp.half_dtype()`.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> jamp.cast_to_half(jnp.ones(2)).dtype == jamp.half_dtype()
        True
    """
    return cast_tree(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of a tree to float32.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> jamp.cast_to_full([jnp.ones(2, "float16")])[0].dtype
        dtype('float32')
    """
    return cast_tree(tree, FLOAT32)


def all_finite(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Whether no floating or complex value in a tree is infinite or NaN.

    Args:
        tree: Any pytree. Leaves that hold no floating or complex numbers count as finite, and so does an empty tree.
        axis_name: Name, or names, of the mapped axes (`jax.shard_map`, `jax.pmap`, `jax.vmap`) over which to agree.
            Under `jax.jit` with sharded arrays the answer is global without it.

    Returns:
        Boolean array of shape (); with `axis_name`, the same on every device of those axes.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> bool(jamp.all_finite({"w": jnp.array([1.0, 2.0]), "b": jnp.float16(jnp.inf)}))
        False
    """
    flags = [_is_finite(x) for x in jax.tree.leaves(tree) if _can_be_nonfinite(x)]
    finite = jnp.stack(flags).all() if flags else jnp.array(True)
    if axis_name is not None:
        check_mapped(axis_name)
    # A minimum of integers is the "and" over devices: collectives take no booleans.
    return finite if axis_name is None else lax.pmin(finite.astype(jnp.int32), axis_name) == 1


def check_mapped(axis_name: AxisName) -> None:
    """Refuses an axis over which nothing is mapped here."""
    try:
        lax.axis_size(axis_name)
    except NameError as error:
        here = ", ".join(map(repr, mapped_axes())) or "none"
        raise ValueError(
            f"`axis_name` is {axis_name!r}, and the axes that are mapped here are: {here}. Call it inside of "
            f"jax.pmap(train_step, axis_name={axis_name!r}), or of a jax.shard_map over a mesh with this axis. Under "
            "jax.jit with sharded arrays leave `axis_name` away: all devices agree without it."
        ) from error


def _is_finite(x: Any) -> jax.Array:
    """Whether all values are finite: one that is not, less itself, is NaN, and so is the sum.

    On CPU, XLA makes one read of the array of this, and writes the booleans of `jnp.isfinite(x).all()` to memory
    (jaxlib 0.10.2: 3 and 13 ms for 64 MiB). A maximum of magnitudes would be as fast, but loses NaN there. What is
    narrower would be cast to float32 first, which costs more than the booleans.
    """
    x = jnp.asarray(x)
    return jnp.isfinite(x).all() if x.dtype.itemsize < 4 else jnp.sum(x - x) == 0


def _can_be_nonfinite(x: Any) -> bool:
    return isinstance(x, (float, complex)) or (isinstance(x, _ARRAYS) and jnp.issubdtype(x.dtype, jnp.inexact))


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Selects one of two whole trees, without leaving the device.

    Args:
        pred: Boolean scalar, Python or array of shape ().
        a: Any pytree, returned where `pred` is true.
        b: A pytree of the same structure, with the same shapes and dtypes, returned otherwise. Leaves that are not
            arrays (functions, names) must be equal to those of `a`.

    Returns:
        A tree with the structure of both.

    Raises:
        ValueError: If `pred` is not a boolean scalar, or the trees differ in more than their values. The message
            names all the leaves that differ.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> jamp.select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    if not isinstance(pred, (bool, *_ARRAYS)) or jnp.shape(pred) or not _is_boolean(pred):
        given = short_repr(pred)
        raise ValueError(f"`pred` is {given}: expected boolean scalar. Write `jamp.all_finite(tree)` or `pred.all()`.")
    paths_a, treedef = tree_flatten_with_path(a)
    paths_b, treedef_b = tree_flatten_with_path(b)
    if treedef != treedef_b:
        raise ValueError(_structure_message(paths_a, paths_b, treedef, treedef_b))
    pairs = [(path, x, y) for (path, x), (_, y) in zip(paths_a, paths_b, strict=True)]
    problems = [f"  {keystr(path) or 'the tree'}: {p}" for path, x, y in pairs if (p := _mismatch(x, y))]
    if problems:
        raise ValueError("Cannot select between trees that differ in more than values:\n" + "\n".join(problems))
    return jax.tree.unflatten(treedef, [_select(pred, x, y) for _, x, y in pairs])


def _is_boolean(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.bool_)


def _select(pred: ArrayLike, x: Any, y: Any) -> Any:
    if x is y or not _is_number(x):
        return x
    if _is_python_number(x) and x == y:
        return x  # A static number of the model stays one, so that Python can still branch on it.
    if _dtype(x) == jax.dtypes.float0:
        return x  # The tangent of an integer: it holds nothing that could be selected.
    return jnp.where(pred, x, y)


def _is_python_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def _is_number(x: Any) -> bool:
    return isinstance(x, _ARRAYS) or _is_python_number(x)


def is_number(x: Any) -> bool:
    """Whether a leaf is a number, an array, or an object that says that it is one, with a shape and a dtype."""
    return _is_number(x) or (hasattr(x, "dtype") and hasattr(x, "shape"))


def check_holds_numbers(tree: Any, what: str, write: str) -> None:
    """Refuses a tree of leaves none of which is an array or a number, such as the name of one.

    Args:
        tree: What was given. Trees without leaves pass, and so do those with functions and names beside arrays.
        what: What takes it: "`jamp.half_params` takes parameters, a tree of arrays".
        write: The code to write instead.
    """
    leaves = tree_leaves_with_path(tree)
    if leaves and not any(is_number(x) for _, x in leaves):
        listed = "\n".join(f"  {keystr(path) or 'the tree'}: {short_repr(x)}" for path, x in leaves[:5])
        raise TypeError(f"{what}, and these leaves are none:\n{listed}\n{write}")


def _dtype(x: Any) -> Any:
    return type(x) if _is_python_number(x) else x.dtype


def _mismatch(x: Any, y: Any) -> str:
    """What keeps two leaves from being selected between; empty when nothing does."""
    if _is_number(x) and _is_number(y):
        same = (_dtype(x), np.shape(x)) == (_dtype(y), np.shape(y))
        return "" if same else f"{_spec(x)} and {_spec(y)}"
    same = x is y or (_is_number(x) == _is_number(y) and bool(x == y))
    return "" if same else f"{_spec(x)} and {_spec(y)} are not both arrays, and not equal"


def _spec(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, _ARRAYS) else repr(x)


def _structure_message(paths_a: list, paths_b: list, treedef_a: Any, treedef_b: Any) -> str:
    keys_a, keys_b = ({keystr(path) for path, _ in paths} for paths in (paths_a, paths_b))
    lines = [f"  only in the first: {key}" for key in sorted(keys_a - keys_b)]
    lines += [f"  only in the second: {key}" for key in sorted(keys_b - keys_a)]
    if not lines:
        lines = [f"  first: {treedef_a}", f"  second: {treedef_b}"]
    return "Cannot select between trees of different structure:\n" + "\n".join(lines)
