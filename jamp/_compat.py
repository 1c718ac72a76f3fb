"""The only file that knows JAX versions or names private JAX modules.

One function a difference, each with the version at which it can go. Everything else in jamp uses public JAX.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import jax
from jax import lax
from jax._src import (
    core,  # No public way to ask what is being traced, or to run a jaxpr with other constants.
    dispatch,  # No public way to say that a primitive's lowering asks for devices.
    linear_util,  # See `traced`.
    source_info_util,  # No public way to re-emit an equation under its own name stack and source line.
    traceback_util,  # No public way to keep a library's frames out of tracebacks.
)
from jax._src.ad_util import Zero  # What the rules of `custom_vjp` give for what has no cotangent.
from jax._src.interpreters import partial_eval  # No public way to say what a checkpoint keeps of a primitive.
from jax.core import Tracer
from jax.extend import core as jex_core


class Aval(Protocol):
    """What jamp reads of an abstract value; tokens and keys have less."""

    shape: tuple[int, ...]
    dtype: Any
    ndim: int
    sharding: Any
    weak_type: bool

    def update(self, **changes: Any) -> Aval:
        """The same with other attributes."""
        ...


class Var(Protocol):
    """A variable of a jaxpr."""

    aval: Aval


if TYPE_CHECKING:  # JAX gives its own no types that say more than that there is an abstract value.

    class Literal:
        """A number that a jaxpr holds."""

        aval: Aval
        val: Any

else:
    Literal = jex_core.Literal

Atom: TypeAlias = Var | Literal


class Eqn(Protocol):
    """An equation of a jaxpr."""

    primitive: Any
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    @property
    def invars(self) -> Sequence[Atom]:
        """Operands."""
        ...

    @property
    def outvars(self) -> Sequence[Var]:
        """Results."""
        ...


class Jaxpr(Protocol):
    """A jaxpr, without its constants (see `open_jaxpr`)."""

    @property
    def eqns(self) -> Sequence[Eqn]:
        """Equations, in order."""
        ...

    @property
    def invars(self) -> Sequence[Var]:
        """Inputs."""
        ...

    @property
    def constvars(self) -> Sequence[Var]:
        """Variables that stand for constants."""
        ...

    @property
    def outvars(self) -> Sequence[Atom]:
        """Results."""
        ...


ClosedJaxpr: TypeAlias = Any  # With or without constants, which jax 0.12 makes no difference between.
_JAXPRS = jex_core.Jaxpr, jex_core.ClosedJaxpr

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
# As JAX's own frames, jamp's are left out of tracebacks (see `jax_traceback_filtering`), and are nobody's source line.
traceback_util.register_exclusion(_PACKAGE)
source_info_util.register_exclusion(_PACKAGE)


def is_atom(value: object) -> TypeGuard[Atom]:
    """Whether a value is a variable or a literal of a jaxpr."""
    return isinstance(value, jex_core.Var | jex_core.Literal)


def is_equation(value: object) -> TypeGuard[Eqn]:
    """Whether a value is an equation of a jaxpr."""
    return isinstance(value, jex_core.JaxprEqn)


def open_jaxpr(jaxpr: ClosedJaxpr) -> Jaxpr:
    """The jaxpr without its constants. `ClosedJaxpr` is `Jaxpr` itself from jax 0.12; drop this when 0.10 goes."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: ClosedJaxpr) -> Sequence[Any]:
    """The constants of a jaxpr; None stands for each of an open one, which a foreign primitive may have."""
    return getattr(jaxpr, "consts", ()) or (None,) * len(open_jaxpr(jaxpr).constvars)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation holds a jaxpr, open or closed, in every version."""
    return isinstance(value, _JAXPRS)


def inner_jaxprs(eqn: Eqn | Producer) -> list[ClosedJaxpr]:
    """All jaxprs among the parameters of an equation, alone or in tuples."""
    found: list[ClosedJaxpr] = []
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):  # A union of types would be made anew for each.
            found += [each for each in value if is_jaxpr(each)]
        elif is_jaxpr(value):
            found.append(value)
    return found


def called_jaxpr_name(params: dict[str, Any]) -> str:
    """What a call names the jaxpr that it runs: each primitive its own way; `composite` changed it in jax 0.12."""
    return next(name for name in ("call_jaxpr", "jaxpr", "fwd_jaxpr", "call") if name in params)


def called_jaxpr(params: dict[str, Any]) -> ClosedJaxpr:
    """The jaxpr that a call runs."""
    return params[called_jaxpr_name(params)]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Number of constants and of carries of a `scan`. jax 0.12 replaced the two counts by `ft_in`."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_loop_consts(params: dict[str, Any], count: int) -> dict[str, Any]:
    """The parameters of a loop whose body has another number of constants; see `scan_counts`, `while_parts`."""
    if "body_nconsts" in params:
        return {**params, "body_nconsts": count}
    if "num_consts" in params:
        return {**params, "num_consts": count}
    from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]  # From jax 0.12.

    _, carry, xs = params["ft_in"].unpack()
    return {**params, "ft_in": flattree.pack((flattree.nones(count), carry, xs))}


class WhileParts(NamedTuple):
    """What a `while` consists of: its two jaxprs, and how many constants each of them is given."""

    cond: ClosedJaxpr
    body: ClosedJaxpr
    cond_consts: int
    body_consts: int

    @property
    def first_carry(self) -> int:
        """Position of the first carry among the operands."""
        return self.cond_consts + self.body_consts


def while_parts(params: dict[str, Any]) -> WhileParts:
    """The parts of a `while`."""
    return WhileParts(
        params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
    )  # fmt: skip


_UNKNOWN_SIZE = 64


def nominal_size(size: Any) -> int:
    """A size as a number, with 64 for each unknown of a shape-polymorphic program (`jax.export.symbolic_shape`).

    JAX has public ways to compare such sizes, which fail where the answer depends on the unknown, but none to evaluate
    them.
    """
    if hasattr(size, "_evaluate"):
        return int(size._evaluate(dict.fromkeys(size._get_vars(), _UNKNOWN_SIZE)))
    return int(size)


def varying_axes(x: Any) -> frozenset[Any]:
    """Manual axes over which a value differs, where `jax.shard_map` keeps account of that; empty elsewhere.

    Some versions call the attribute `vma`.
    """
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return frozenset(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", ()))


def bind(eqn: Eqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Applies the primitive of `eqn` to new operands. `get_bind_params` returned a tuple before jax 0.9.2."""
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    out = eqn.primitive.bind(*args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def with_weak_type(x: jax.Array, weak: bool) -> jax.Array:
    """An array with a weak type, or with a strong one. No public function makes an array's type weak."""
    if jax.typeof(x).weak_type == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def configured_precision() -> Any:
    """What `jax_default_matmul_precision` says, as equations hold it; there are several spellings of each precision."""
    if jax.config.jax_default_matmul_precision is None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    one = jax.ShapeDtypeStruct((1,), jax.numpy.float32)
    (product,) = open_jaxpr(jax.make_jaxpr(jax.lax.dot)(one, one)).eqns
    return product.params["precision"]


def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Runs a jaxpr; `jax.extend.core.jaxpr_as_fun` wants it closed, a type that jax 0.12 changed."""
    return core.eval_jaxpr(jaxpr, consts, *args)  # pyright: ignore[reportArgumentType]


# JAX makes error messages of it, about functions that a user has written.
_EMITTED = linear_util.DebugInfo("jamp", "emitted", None, None)


def traced(function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of a function of arrays to a sequence of arrays, at the types of operands.

    `jax.make_jaxpr` takes seven times as long (200 us), as it looks at signatures, trees and its cache first.

    Args:
        function: The function.
        operands: Arrays, or abstract values.
    """
    avals = [x if isinstance(x, core.ShapedArray) else jax.typeof(x) for x in operands]
    wrapped = linear_util.wrap_init(function, debug_info=_EMITTED)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    # jax 0.12 has one type for jaxprs with and without constants, made another way.
    return jax.make_jaxpr(function)(*avals) if consts else partial_eval.close_jaxpr(jaxpr)


def hoisted(jaxpr: ClosedJaxpr, avals: Sequence[Any]) -> tuple[Sequence[Any], ClosedJaxpr]:
    """The constants of a jaxpr, and the jaxpr with these as its first inputs."""
    consts = jaxpr_consts(jaxpr)
    if not consts:
        return (), jaxpr

    def run(*args: Any) -> list[Any]:
        return core.eval_jaxpr(open_jaxpr(jaxpr), args[: len(consts)], *args[len(consts) :])  # pyright: ignore[reportArgumentType]

    return consts, jax.make_jaxpr(run)(*map(jax.typeof, consts), *avals)


class ForwardRule(NamedTuple):
    """The forward part of a `custom_vjp`'s rule.

    Attributes:
        run: A function of the operands behind the constants. Gives the residuals that are no operands, then results.
        forwarded: For each residual, the operand of the equation that it is; None for what `run` gives.
    """

    run: Callable[..., Sequence[Any]]
    forwarded: Sequence[int | None]


def forward_rule(eqn: Eqn, perturbed: Sequence[bool], *, anew: bool = False) -> ForwardRule:
    """The forward part of the rule of a `custom_vjp_call`.

    JAX has no public way to ask for it. `jax.vjp` of the equation gives a function that hides which residuals are
    operands, and which cotangents are symbolic zeros.

    Args:
        eqn: The equation.
        perturbed: For each operand behind the constants, whether it is differentiated. A rule that does not ask for it
            is the same for all; but JAX refuses to differentiate a constant that it made an operand of later.
        anew: Whether it is traced again where JAX has differentiated the equation before, and remembers a jaxpr
            whose equations all have the source line of this one.
    """
    if eqn.params["symbolic_zeros"] or anew:
        _forget(eqn.params["fwd_jaxpr_thunk"], tuple(perturbed))
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*perturbed)
    _, _, forwarded = eqn.params["out_trees"]()
    return ForwardRule(functools.partial(eval_jaxpr, jaxpr, consts), forwarded)


def _forget(thunk: Any, perturbed: tuple[bool, ...]) -> None:
    """Has the forward part of a rule traced again.

    JAX remembers its jaxpr for each choice of what is differentiated, and what its residuals are of the last one alone.
    """
    held = _nonlocals(thunk.f)
    if isinstance(known := held.get("cells"), dict):
        known.pop(perturbed, None)
    # Where JAX has left out results that nobody reads, it remembers twice.
    for inner in _nonlocals(held.get("fn")).values():
        if type(inner) is type(thunk):
            _forget(inner, perturbed)


def _nonlocals(function: object) -> Mapping[str, Any]:
    """What a function closes over, by name."""
    return inspect.getclosurevars(function).nonlocals if isinstance(function, FunctionType) else {}


def backward_rule(eqn: Eqn, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Applies the backward part of the rule of a `custom_vjp_call`: what it gives for operands behind the constants.

    Zeros are None. In jax 0.12 a rule also returns what it logs.
    """
    given = eqn.params["bwd"].call_wrapped(*residuals, *cotangents)
    if isinstance(given, tuple):
        given, _ = given
    return [None if isinstance(value, Zero) else value for value in given]


def traced_variable(value: Any) -> Var | None:
    """The variable that a value of a trace stands for, also when the trace is over; None for all else."""
    atom = getattr(value, "val", None) if isinstance(value, Tracer) and hasattr(value, "parent") else None
    return None if isinstance(atom, Literal) else atom


_SEARCHED = 10_000
# These hold nothing of one function, or all that a process knows, as the registry of pytrees does.
_OF_THE_PROCESS = (type, ModuleType, CodeType, BuiltinFunctionType, jax.tree_util.PyTreeDef, core.Trace, jax.Array, str)
_WITH_CACHE = (type(jax.jit(lambda: None)), type(functools.cache(lambda: None)))


def _held(value: Any) -> Sequence[Any]:
    """What an object holds on to, but for what all functions do: globals, builtins, caches."""
    if isinstance(value, FunctionType):
        return value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__
    if isinstance(value, _WITH_CACHE):
        return (getattr(value, "__wrapped__", None),)
    return () if isinstance(value, _OF_THE_PROCESS) or is_jaxpr(value) else gc.get_referents(value)


def is_jitted(value: object) -> TypeGuard[Any]:
    """Whether something is a function that JAX or Python remembers results of, with `__wrapped__`."""
    return isinstance(value, _WITH_CACHE)


def _closure(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


class _UnknownRuleError(Exception):
    """JAX holds a rule in a way that is not known here."""


def _axis(axis: Any) -> tuple[Any, ...]:
    """What a mapped axis is: its name, which most have not, its size, and how it is sharded."""
    name = () if axis.name is core.no_axis_name else (axis.name,)
    return name, axis.size, axis.spmd_name, axis.explicit_mesh_axis


def _values(static: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(argument.val for argument in static)


# What JAX's transformations of rules are given. Types of operands are left out, which the equation says, and what the
# other half of a reverse-mode rule leaves to them.
_GIVEN: dict[str, Callable[..., tuple[Any, ...]]] = {
    "_flatten_jvp": lambda *given: (given[-2], given[-1]()[0]),
    # jax 0.10 has the positions of what is not differentiated before the others.
    "_flatten_fwd": lambda *given: (given[-5], given[-2], given[-1]()[0]),
    # jax 0.12 adds the function, for its name, and two flags.
    "_flatten_bwd": lambda tree, _types, _left, *more: (tree, more[1:]),
    "_handle_consts_in_bwd": lambda types: (len(types),),
    "_prepend_static_args": lambda static: (_values(static),),
    "_argnums_partial": lambda argnums, static: (argnums, _values(static)),
    "batch_subtrace": lambda _tag, axis, dims: (_axis(axis), tuple(dims)),
    "batch_custom_jvp_subtrace": lambda _tag, axis, dims: (_axis(axis), tuple(dims)),
}


def _parts(rule: Any) -> tuple[Any, ...]:
    """A function of JAX's with the transformations around it."""
    if rule.params or rule.in_type is not None or any(made.__name__ not in _GIVEN for made, _ in rule.transforms):
        raise _UnknownRuleError
    return _core(rule.f), *((made.__name__, *_GIVEN[made.__name__](*given)) for made, given in rule.transforms)


def _core(function: Any) -> Any:
    """The user's function; in place of one that JAX made of an equation, or to map a rule, what that is made of."""
    name = getattr(function, "__qualname__", "") if isinstance(function, FunctionType) else ""
    if name in ("lift_jvp.<locals>.jvp", "lift_fwd.<locals>.fwd"):
        held = _closure(function)
        return name, held["num_consts"], _of_equation(held.get("jvp_jaxpr_fun") or held["fwd_jaxpr_thunk"])
    if name == "batch_custom_vjp_bwd.<locals>.new_bwd":
        held = _closure(function)
        return name, _axis(held["axis_data"]), tuple(held["out_dim_dests"]), _parts(held["bwd"])
    return function


def _of_equation(thunk: Any) -> tuple[Any, ...]:
    """What the function of an equation is made of, which JAX calls for the jaxpr of a rule."""
    made = _closure(thunk.f)["fn"]
    if not made.__qualname__.startswith("DynamicJaxprTrace.process_custom_"):
        raise _UnknownRuleError
    held = _closure(made)
    return _parts(held["jvp"] if "jvp" in held else held["fwd"])


def rule_parts(eqn: Eqn) -> tuple[Any, ...] | None:
    """What the rule of a `custom_jvp_call` or a `custom_vjp_call` is made of.

    The equation holds functions that JAX made with it. The user's are in what these close over, where
    `jax.custom_jvp.__call__`, `jax.vmap` and `DynamicJaxprTrace` put them.

    Returns:
        Tuples in tuples of the user's functions, and of what they are given besides operands: structures, arguments
        that are not differentiated, mapped axes. None where JAX holds the rule in another way.
    """
    try:
        if "bwd" in eqn.params:
            return _of_equation(eqn.params["fwd_jaxpr_thunk"]), _parts(eqn.params["bwd"])
        return _of_equation(eqn.params["jvp_jaxpr_fun"])
    except (_UnknownRuleError, AttributeError, KeyError, TypeError, ValueError):
        return None


def shown_params(eqn: Eqn) -> Mapping[str, Any]:
    """Parameters of an equation as a jaxpr shows them, which names functions with a rule."""
    return eqn.params if (name := called_name(eqn)) is None else {**eqn.params, "name": name}


def rule_functions(eqn: Eqn) -> Iterator[FunctionType]:
    """The user's functions among what the rule of an equation is made of, as far as that is known."""
    queue: list[Any] = [rule_parts(eqn) or eqn.params.get("rule")]
    while queue:
        part = queue.pop()
        if isinstance(part, tuple):
            queue += part
        elif isinstance(part, FunctionType):
            yield part


def closed_over(eqns: Sequence[Eqn]) -> list[Var]:
    """Variables whose values the rules of some equations close over.

    JAX runs a rule once the function is transformed, and asks nobody before what it closes over. The garbage
    collector knows what an object holds on to, at any depth; the nearest 10,000 objects an equation are looked at.
    """
    rules = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule", "transpose_thunk")
    queue: deque[Any] = deque(eqn.params[name] for eqn in eqns for name in rules if name in eqn.params)
    found: list[Var] = []
    seen: dict[int, Any] = {}  # With the objects, whose addresses are not used again so long.
    while queue and len(seen) < _SEARCHED * len(eqns):
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tracer):
            var = traced_variable(value)
            found += [] if var is None else [var]
        else:
            queue += _held(value)
    return found


def with_results(jaxpr: ClosedJaxpr, results: Sequence[Atom]) -> ClosedJaxpr:
    """A closed jaxpr with other results. `ClosedJaxpr` is `Jaxpr` itself from jax 0.12."""
    return _with_parts(jaxpr, outvars=[*results])


def with_equations(jaxpr: ClosedJaxpr, invars: Sequence[Var], eqns: Sequence[Eqn]) -> ClosedJaxpr:
    """A jaxpr, open or closed, with other inputs and equations."""
    return _with_parts(jaxpr, invars=[*invars], eqns=[*eqns])


def _with_parts(jaxpr: ClosedJaxpr, **parts: Any) -> ClosedJaxpr:
    inner = open_jaxpr(jaxpr)
    other = inner.replace(**parts)  # pyright: ignore[reportAttributeAccessIssue]
    return other if inner is jaxpr else jaxpr.replace(jaxpr=other)


def with_jaxprs(params: dict[str, Any], change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    """Parameters of an equation with all jaxprs among them changed; the same dictionary where none is another."""

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            new = tuple(map(changed, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value

    new = {name: changed(value) for name, value in params.items()}
    return params if all(new[name] is value for name, value in params.items()) else new


def with_operands(
    eqn: Eqn, operands: Sequence[Atom], params: dict[str, Any], results: Sequence[Var] | None = None
) -> Eqn:
    """An equation with other operands, parameters and results."""
    results = eqn.outvars if results is None else results
    return _changed(eqn, invars=[*operands], params=params, outvars=[*results])


def new_variable(aval: Aval) -> Var:
    """A variable that stands in no jaxpr yet."""
    made: Any = jex_core.Var
    return made(aval)


def tell_devices_to_lowering(primitive: Any) -> None:
    """Has JAX tell the rules for lowering of a primitive which devices it lowers for, as partitioned kernels ask it."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def lowered_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that are lowered for in a context (of `jax.interpreters.mlir`)."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def is_partitioned_by_xla(ctx: Any) -> bool:
    """Whether what is lowered in a context (of `jax.interpreters.mlir`) runs on several devices, as XLA divides it.

    In a `jax.shard_map` over all axes of the mesh it does not: there the program says what each device does.
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices is not None and axes.num_devices > 1
    return hasattr(axes, "manual_axes") and set(axes.manual_axes) != set(axes.mesh.axis_names)


def has_dim_variables(ctx: Any) -> bool:
    """Whether what is lowered in a context (of `jax.interpreters.mlir`) is given more than its operands.

    These are sizes that are not known, and, in a program for several platforms, which of them it runs on.
    """
    return bool(ctx.dim_var_values)


def is_eager_in_shard_map() -> bool:
    """Whether each operation of the caller is run on its own inside of a `jax.shard_map`, as outside of `jax.jit`."""
    trace = core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        if type(trace).__name__ == "ShardMapTrace":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def has_side_effects(eqn: Eqn) -> bool:
    """Whether an equation talks to the host or writes to memory. That it names a mesh axis is an effect to JAX too."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def scope_path(eqn: Eqn) -> str:
    """The path of named scopes in which an equation was traced, such as `Model/Block_0/LayerNorm_0`."""
    return str(eqn.source_info.name_stack)


def scopes(eqn: Eqn) -> tuple[Hashable, ...]:
    """The same, one by one, outermost first; transformations, such as `jvp`, are among them."""
    return eqn.source_info.name_stack.stack


def outer_scopes(eqn: Eqn, count: int) -> AbstractContextManager[None]:
    """Enters the outermost scopes of an equation."""
    return source_info_util.set_name_stack(source_info_util.current_name_stack() + eqn.source_info.name_stack[:count])


class equation_context:  # noqa: N801 (a context manager, named like those of contextlib)
    """Re-emits an equation where the user wrote it: name stack, source line and JAX's per-equation settings.

    Args:
        eqn: The equation.
        entered: How many of its outermost scopes are entered already.
    """

    __slots__ = ("_settings", "_source")

    def __init__(self, eqn: Eqn, entered: int = 0) -> None:
        info = eqn.source_info
        stack = info.name_stack[entered:] if entered else info.name_stack
        name_stack = source_info_util.current_name_stack() + stack
        self._source = source_info_util.user_context(info.traceback, name_stack=name_stack)
        self._settings = eqn.ctx.manager

    def __enter__(self) -> None:
        self._source.__enter__()
        self._settings.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._settings.__exit__(*exc)
        self._source.__exit__(*exc)


def traced_apart(trace: Callable[[], ClosedJaxpr]) -> ClosedJaxpr:
    """What `trace` gives, with the call stack of each equation, where JAX would give all of them that of its caller.

    It does so while an equation is emitted again, or transposed: those of its rule are to have its source line. Where
    no user has written the rule, they have that here too.
    """
    around = source_info_util._source_info_context.context
    source_info_util._source_info_context.context = source_info_util.SourceInfo(None, around.name_stack)
    try:
        jaxpr = trace()
    finally:
        source_info_util._source_info_context.context = around
    if around.traceback is None:
        return jaxpr
    inner = open_jaxpr(jaxpr)
    eqns: list[Any] = [
        eqn if code_location(eqn) else _changed(eqn, source_info=eqn.source_info.replace(traceback=around.traceback))
        for eqn in inner.eqns
    ]
    return with_equations(jaxpr, inner.invars, eqns)


def _changed(eqn: Eqn, **changes: Any) -> Eqn:
    return eqn.replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]


def function_names(eqn: Eqn) -> list[str]:
    """Names of the Python functions that were on the call stack when `eqn` was traced, innermost first."""
    traceback = eqn.source_info.traceback
    # Frames carry qualified names: `Head.__call__`, `make_model.<locals>.head`.
    return [] if traceback is None else [frame.function_name.rpartition(".")[2] for frame in traceback.frames]


def called_name(eqn: Eqn) -> str | None:
    """Name of the function that an equation calls; one with a rule has it where the jaxpr is described."""
    jaxpr = eqn.params.get("call_jaxpr", eqn.params.get("call"))
    if "name" in eqn.params or jaxpr is None:
        return eqn.params.get("name")
    return getattr(getattr(open_jaxpr(jaxpr), "debug_info", None), "func_name", None)


def functions_and_files(eqn: Eqn) -> list[tuple[str, str]]:
    """The same names, each with the file that it stands in."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return [(frame.function_name.rpartition(".")[2], frame.file_name) for frame in frames]


def code_locations(eqn: Eqn) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the user's code that an equation comes from, and of what calls that, innermost first.

    Inside of `jax.jit` they end at the function that is jitted: it is traced once for all of its calls.
    """
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def code_location(eqn: Eqn) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that an equation comes from; None where that is not known."""
    return next(code_locations(eqn), None)


def checkpoint_name(x: jax.Array, name: str) -> jax.Array:
    """`jax.ad_checkpoint.checkpoint_name`; the module has to be imported by hand in jax 0.10."""
    from jax.ad_checkpoint import checkpoint_name as tag

    return tag(x, name)


def kept_apart(primitive: Any) -> None:
    """Has checkpoints keep another result of a primitive than the forward pass reads.

    Args:
        primitive: A primitive that gives its one operand as often as its parameter `count` says. With the parameter
            `given` no more than the operand is kept. In the backward pass its parameter `barrier` is what the
            checkpoint's policy has as an attribute of that name.
    """

    def divide(saveable: Callable[..., Any], unknown: Sequence[bool], there: Sequence[bool], eqn: Any) -> Any:
        """What an equation is in the forward pass and in the backward pass, as JAX asks for it."""
        (operand,), count = eqn.invars, len(eqn.outvars)
        again = eqn.replace(params={**eqn.params, "barrier": getattr(saveable, "barrier", False)})
        if any(unknown):
            return None, again, [True] * count, [True] * count, []
        if isinstance(operand, Literal) or (eqn.params["given"] and all(there)):
            return eqn, again, [False] * count, [True] * count, []
        policy = partial_eval.ensure_enum(saveable(primitive, operand.aval, **eqn.params))
        if not isinstance(policy, partial_eval.SaveableType):
            return eqn, again, [False] * count, [True] * count, [] if all(there) else [operand]
        apart = core.Var(operand.aval)
        forward = eqn.replace(outvars=[*eqn.outvars, apart], params={**eqn.params, "count": count + 1})
        return forward, again.replace(invars=[apart]), [False] * count, [True] * count, [apart]

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = divide


class Producer(NamedTuple):
    """The equation that made a traced value: its primitive's name, parameters, scope path, outputs and operands.

    `position` is the place of the value among the outputs.
    """

    primitive: str
    params: dict[str, Any]
    scope: str
    outputs: list[Any]
    operands: list[Any]
    position: int


def jit_tracer(x: Any) -> Any:
    """The value in the trace of the innermost `jit` (or scan, pmap, ...), out of the tracers of `grad` and `vmap`."""
    while isinstance(x, Tracer) and not hasattr(x, "parent"):
        x = getattr(x, "primal", getattr(x, "val", None))
    return x


def producer(tracer: Any) -> Producer | None:
    """What made a value of `jit_tracer`; None for an input of the trace, a constant, and an array with a value.

    JAX keeps it until the trace ends, but has no public way to ask.
    """
    eqn = getattr(tracer, "parent", None)
    if eqn is None:
        return None
    scope = str(eqn.source_info.name_stack)
    position = next(i for i, var in enumerate(eqn.outvars) if var is tracer.val)
    return Producer(eqn.primitive.name, eqn.params, scope, list(eqn.outvars), list(eqn.in_tracers), position)


def captured(tracer: Any) -> Any:
    """What a value of `jit_tracer` stands for: a constant, or a value of a trace around its own, that a closure brings.

    None for other values.
    """
    get_const = getattr(getattr(tracer, "_trace", None), "get_const", None)
    return None if get_const is None else get_const(tracer)


def is_in_loop(tracer: Any) -> bool:
    """Whether a value of `jit_tracer` belongs to the body of a scan or of a while loop."""
    return traced_for(tracer).startswith(("scan", "fori_loop", "while"))


def traced_for(tracer: Any) -> str:
    """What the trace of a value of `jit_tracer` is for ("jit", "scan", "cond", ...)."""
    return next((info.traced_for for _, info in _traces(getattr(tracer, "_trace", None))), "")


def traces_around(tracer: Any) -> tuple[int, ...]:
    """The trace of a value of `jit_tracer` and those around it, as far as JAX knows: not those around a `shard_map`."""
    return tuple(id(trace) for trace, _ in _traces(getattr(tracer, "_trace", None)))


def is_taylor_tracer(x: Any) -> bool:
    """Whether a value is a Taylor series of `jax.experimental.jet`, which has no public type for it."""
    return isinstance(x, Tracer) and type(x).__module__ == "jax.experimental.jet"


def enclosing_traces() -> list[tuple[str, str]]:
    """What the traces around the caller are for ("jit", "scan", "shard_map", ...) and of which function."""
    return [(info.traced_for, info.func_src_info) for _, info in _traces(core.trace_ctx.trace)]


def _traces(trace: Any) -> Iterator[tuple[Any, Any]]:
    """A trace and those around it that make programs, each with what JAX knows of its function."""
    while trace is not None:
        if info := getattr(getattr(trace, "frame", None), "debug_info", None):
            yield trace, info
        trace = getattr(trace, "parent_trace", None)


def is_from_jamp(function: str) -> bool:
    """Whether a function, as `enclosing_traces` describes it, is one of jamp's own."""
    return f" at {_PACKAGE}" in function


def mapped_axes() -> list[str]:
    """Names of the mapped axes around the caller, those of `vmap`, `pmap` and `shard_map`; none that JAX invented."""
    names = core.trace_ctx.axis_env.axis_sizes
    return [name for name in names if isinstance(name, str) and not name.startswith("_internal")]
