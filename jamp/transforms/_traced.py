"""A function as a jaxpr of its arrays: joins planning, which decides, and emission, which runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._compat import Aval, open_jaxpr, with_results, with_weak_type
from jamp._dtypes import BFLOAT16, FLOAT32
from jamp.policy import Policy
from jamp.transforms._argument_names import NamedArrays, explain, leaf_names
from jamp.transforms._misuse import refuse_without_x64
from jamp.transforms._opaque import refuse_opaque
from jamp.transforms.analysis.attention.inside import with_masks_inside
from jamp.transforms.analysis.regimes import Regime
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.rewrites import new_run
from jamp.transforms.emission.taylor import is_taylor_mode, taylor_mode
from jamp.transforms.planning.planner import Planner
from jamp.transforms.planning.rewrites import REGISTRY, Registry
from jamp.transforms.program.closures import captured
from jamp.transforms.program.flow import traced_flow
from jamp.transforms.program.heuristics import DEFAULT, Heuristics
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Plan
from jamp.transforms.program.want import Want

_TAKES_HALF = "fp16/bf16"  # As cuDNN's attention refuses float32.
_HALF_KERNEL = (
    "A kernel takes half alone, and is given float32 even where the function's arguments are half: something in front "
    'of it asks for float32. Leave `implementation="cudnn"` out, and ask for the kernel in the policy: '
    "jamp.cast_fn(fn, 'O2,attention=fused'). Or cast the operands where the kernel is called: "
    "q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))."
)


_STANDS_FOR = "__wrapped__"  # By which `functools.wraps` names the function behind another.


class _Static(NamedTuple):
    """A result that is not an array, such as a string, kept outside of the trace."""

    value: Any


class Traced:
    """A function traced to a jaxpr at the arguments of one call: arrays are inputs, all else is constant.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        half: What a function is traced in that calls a kernel which takes half alone, as cuDNN's attention: its float32
            arguments are cast in front of it, and its results raised behind it.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, half: np.dtype = BFLOAT16) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        self._dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        self.inputs = [leaves[i] for i in self._dynamic]
        self._static_outs: list[_Static | None] = []

        def flat(*arrays: Array) -> list[Array]:
            return self._flat(fn, leaves, tree, *arrays)

        # JAX names the traced function, its line and its arguments in errors such as that of `float(x)`: as the user
        # has them, and not as they are here.
        names = leaf_names(fn, args, kwargs)
        signature = NamedArrays([names[i] for i in self._dynamic])
        shown = {"__wrapped__": _written_by_user(fn), "__signature__": signature}
        vars(flat).update(shown)
        # What some libraries configure on import, for the whole process, is no word about a product. Without it, an
        # equation says what its call site wrote.
        with jax.default_matmul_precision(None):
            try:
                jaxpr = jax.make_jaxpr(flat)(*self.inputs)
            except NotImplementedError as error:
                if _TAKES_HALF not in str(error):
                    raise
                halved = _between_casts(flat, half)
                vars(halved).update(shown)
                try:
                    jaxpr = jax.make_jaxpr(halved)(*self.inputs)
                except Exception as other:
                    error.add_note(_HALF_KERNEL)
                    raise error from other
            except (TypeError, IndexError) as error:
                explain(error)
                raise
        refuse_opaque((out.value for out in self._static_outs if out is not None), jaxpr)
        # Results behind those of the function: the program has to compute them, and emission to have them at hand.
        self._captured = captured(jaxpr)
        results = [*open_jaxpr(jaxpr).outvars, *self._captured]
        self.jaxpr = with_results(jaxpr, results) if self._captured else jaxpr

    def _flat(self, fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, *inputs: Any) -> list[Any]:
        leaves = list(leaves)
        for index, value in zip(self._dynamic, inputs, strict=True):
            leaves[index] = value
        args, kwargs = jax.tree.unflatten(tree, leaves)
        outs, self._out_tree = jax.tree.flatten(fn(*args, **kwargs))
        self._static_outs = [None if _is_traced(out) else _Static(out) for out in outs]
        return [out for out in outs if _is_traced(out)]

    def plan(
        self,
        policy: Policy,
        base: Regime | None = None,
        heuristics: Heuristics = DEFAULT,
        registry: Registry = REGISTRY,
    ) -> Plan:
        """Decides the precision of every operation.

        Args:
            policy: The policy.
            base: The regime, where it is not that of the policy's level.
            heuristics: The thresholds.
            registry: The patterns that are found and rewritten.

        Raises:
            ValueError: If the policy is for float64 programs, and JAX is not in x64 mode.
        """
        refuse_without_x64(policy)
        jaxpr = with_masks_inside(self.jaxpr) if policy.attention == "fused" else self.jaxpr
        inner = open_jaxpr(jaxpr)
        ins = tuple(traced_flow(var.aval, Kind.LAZY, policy.pair) for var in inner.invars)
        planner = Planner(policy, base, heuristics, registry, jaxpr, frozenset(self._captured))
        wants = (Want.FULL if policy.output_dtype == policy.pair.wide else Want.HALF,) * len(inner.outvars)
        return planner.plan(jaxpr, ins, wants, planner.base)

    def rebuild(self, outs: Sequence[Array]) -> Any:
        """Results as `fn` returns them: half values in the dtype that they were traced with, float32 never narrowed."""
        traced = [var.aval for var in open_jaxpr(self.jaxpr).outvars]
        raised = iter(_raised(out, aval) for out, aval in zip(outs, traced, strict=True))
        leaves = [next(raised) if static is None else static.value for static in self._static_outs]
        return jax.tree.unflatten(self._out_tree, leaves)


def _between_casts(flat: Callable[..., list[Array]], half: np.dtype) -> Callable[..., list[Array]]:
    """A function of float32 arrays that is computed from half ones, with results in float32."""

    def halved(*arrays: Array) -> list[Array]:
        outs = flat(*(x.astype(half) if x.dtype == FLOAT32 else x for x in arrays))
        return [out.astype(FLOAT32) if getattr(out, "dtype", None) == half else out for out in outs]

    return halved


def _written_by_user(fn: Any) -> Any:
    """The function with a name and a line behind a `functools.partial`, or behind an object that can be called."""
    while isinstance(fn, functools.partial) or _STANDS_FOR in getattr(fn, "__dict__", ()):
        fn = fn.func if isinstance(fn, functools.partial) else vars(fn)[_STANDS_FOR]
    return fn if inspect.isroutine(fn) or isinstance(fn, type) else type(fn).__call__


def _raised(value: Any, traced: Aval) -> Any:
    if not isinstance(traced, jax.core.ShapedArray) or not jnp.issubdtype(traced.dtype, jnp.floating):
        return value
    value = jnp.asarray(value)  # A constant of NumPy's, returned as it is, too.
    if value.dtype.itemsize < traced.dtype.itemsize:
        value = value.astype(traced.dtype)
    # A conversion that only makes a weak type strong is not emitted inside, and casts make all types strong.
    return value if value.dtype != traced.dtype else with_weak_type(value, traced.weak_type)


def evaluate(plan: Plan, inputs: Sequence[Array], policy: Policy) -> list[Array]:
    """Runs a plan on arrays."""
    with taylor_mode(inputs):
        run = new_run(keep_half=policy.residuals == "half" and not is_taylor_mode(), remember=True)
        return execute(plan, inputs, run)


def is_array(leaf: object) -> bool:
    """Whether an argument is traced: JAX arrays, and floating NumPy arrays.

    Python scalars stay weak, and NumPy's scalars, and arrays of integers or booleans, stay concrete, so that rates,
    shapes, flags and index tables keep working as they do without the transform.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_traced(result: Any) -> bool:
    """Whether a result comes out of the trace: arrays, and tokens; not what describes an array."""
    return isinstance(result, jax.core.Tracer) or (is_array(result) and not isinstance(result, jax.ShapeDtypeStruct))
