"""`Policy`: which precision a function's parameters, arithmetic and results have, and who decides."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from jamp._calls import explains
from jamp._dtypes import FLOAT32, FLOAT32_AND_HALF, FLOAT64, HALF_DTYPES, Pair, close_matches, parse_dtype, short_repr
from jamp._policy.presets import PRESETS
from jamp._policy.rule import Rule as Rule
from jamp._policy.rule import entry_strings, parse_rules
from jamp._policy.spec import (
    HOW_TO_SPELL,
    LEVELS,
    RULE_LISTS,
    SETTINGS,
    canonical_settings,
    check_products,
    check_rules,
    check_settings,
    check_wide_gradients,
    level_fields,
    parse_spec,
    plain_settings,
)
from jamp._tree import cast_tree

T = TypeVar("T")
Entries = str | Callable[..., Any] | Iterable[str | Callable[..., Any]]

_DTYPES = ("param_dtype", "compute_dtype", "output_dtype")


@explains("jamp.Policy('float32', 'bfloat16', 'float32', level='O2'), or jamp.get_policy('O2:bfloat16')")
@dataclass(frozen=True, repr=False)
class Policy:
    """Precision of the parameters, the arithmetic and the results of a function.

    A policy is a value: hashable, equal to every policy that says the same in other spellings, and written back by
    `str` in a form that `jamp.get_policy` reads. Most policies come from there; the constructor is jmp's.

    | level | compute | who decides |
    |---|---|---|
    | `"O0"` | float32 everywhere | nobody |
    | `"OD"` | matmul and convolution in half, their results straight back to float32 | half list |
    | `"O1"` | half list in half, full list in float32, the rest in the widest dtype of its operands | both lists |
    | `"O2"` | everything in half except the full list and the regions around it | full list |
    | `"O3"` | everything in half, except what has no half kernel | nobody |
    | `None` | arguments cast to the compute dtype, results to the output dtype, nothing in between | the caller |

    Args:
        param_dtype: Dtype of the parameters between steps: float32, or at O3 the half dtype. Any spelling will do.
        compute_dtype: Dtype of the arithmetic; with a level other than O0, the half dtype (float16 or bfloat16). With
            parameters in float64 it may be float32, which then is to a float64 program (in JAX's x64 mode) what half is
            to a float32 one: `jamp.Policy("float64", "float32", "float64", level="O2")`.
        output_dtype: Dtype of the results.
        level: `"O0"`, `"OD"`, `"O1"`, `"O2"`, `"O3"`, or None for the three dtypes alone.
        half: Rules for what runs in half precision, in addition to the level's own (see `with_rules`).
        full: Rules for what runs in float32.
        promote: Rules for what runs in the widest dtype of its operands.
        float8: Rules for products that run in 8 bits, whatever `matmul` says (see `with_rules`).
        highest: Rules for what runs in float32 on every device (see `with_rules`).
        residuals: What reverse mode keeps of the forward pass: `"half"` recomputes full-size float32 values that are
            elementwise-recomputable, `"all"` keeps whatever jax keeps. None is `"half"` at OD, O1, O2 and O3, and
            `"all"` where nothing is interpreted.
        attention: `"as written"` (None), or `"fused"`: attention that is recognised runs as one fused kernel.
        reduce: The dtype in which gradients of parameters are summed across devices: `"half"` (None), as in code that
            is written in half, or `"float32"`. Of settings that are dtypes, their names and objects do as well.
        matmul: `"half"` (None), or `"float8"` or `"mxfp8"`: products with weights take operands of 8 bits.
        grad_dtype: The float8 format of gradients in such products, `"e4m3"` (None) or `"e5m2"`.
        float8_scales: What shares a scale in products in float8: a whole operand, `"tensor"` (None), or all that is
            contracted together, `"row"`. `matmul="mxfp8"` has scales of its own.
        weight_grad: What the product that makes the gradient of a weight runs in, `"float8"` (None) or `"half"`.

    Raises:
        ValueError: If a field has an impossible value, a rule is unknown, or two rules contradict each other.
        TypeError: If a rule is neither a string nor a named function.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> policy = jamp.Policy("float32", jnp.bfloat16, "f32")
        >>> policy
        get_policy('p=float32,c=bfloat16,o=float32')
        >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype
        dtype(bfloat16)
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    _: KW_ONLY
    level: str | None = None
    half: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    float8: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()
    residuals: str | None = None
    attention: str | None = None
    reduce: str | None = None
    matmul: str | None = None
    grad_dtype: str | None = None
    float8_scales: str | None = None
    weight_grad: str | None = None

    if TYPE_CHECKING:  # The fields' types are what one reads; the constructor takes more.

        def __init__(
            self,
            param_dtype: DTypeLike,
            compute_dtype: DTypeLike,
            output_dtype: DTypeLike,
            *,
            level: str | None = None,
            half: Entries = (),
            full: Entries = (),
            promote: Entries = (),
            float8: Entries = (),
            highest: Entries = (),
            residuals: str | None = None,
            attention: str | None = None,
            reduce: DTypeLike | None = None,
            matmul: DTypeLike | None = None,
            grad_dtype: DTypeLike | None = None,
            float8_scales: str | None = None,
            weight_grad: DTypeLike | None = None,
        ) -> None: ...

    def __post_init__(self):
        rules = {name: entry_strings(getattr(self, name)) for name in RULE_LISTS}
        self._set(**_parsed_dtypes(self), **rules)
        _check_level(self)
        given = {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}
        given = canonical_settings(given, self.compute_dtype)
        check_settings(self.level, given)
        self._set(**plain_settings(self.level) | given)
        if self.reduce == "float32":
            check_wide_gradients(self.level, self.param_dtype)
        settings = {name: getattr(self, name) for name in SETTINGS}
        check_rules(self.level, rules)
        check_products(settings, rules)
        _ = self.rules  # A wrong rule is an error here, where it was written, and not at the first call.

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # The way to normalize a field of a frozen dataclass.

    @cached_property
    def _says(self) -> tuple[Any, ...]:
        """The fields; the order of rules in a list says nothing."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(frozenset(value) if isinstance(value, tuple) else value for value in values)

    def __eq__(self, other: object) -> bool:
        return self._says == other._says if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._says)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of all lists, parsed, the most specific first: the first that matches decides."""
        lists = {name: getattr(self, name) for name in RULE_LISTS}
        return parse_rules(lists)  # pyright: ignore[reportArgumentType]

    @property
    def pair(self) -> Pair:
        """The two precisions of the policy: that of the program as it is written, and that of its products."""
        if self.compute_dtype != FLOAT32:
            return Pair(FLOAT32, self.compute_dtype)
        return Pair(FLOAT64, FLOAT32) if self.param_dtype == FLOAT64 else FLOAT32_AND_HALF

    @classmethod
    def preset(cls, name: str) -> "Policy":
        """An O1 policy with the op lists of another framework, for people who port a recipe.

        Args:
            name: `"pytorch"`, `"paddle"`, `"mindspore"`, `"mxnet"`, `"megengine"` or `"apex"`. The names of their
                operators are translated to those of jax; what has no counterpart in jax is left out.

        Returns:
            A policy whose rules decide before jamp's own table, which still rules what the framework does not list.

        Raises:
            ValueError: If the name is unknown.

        Example:
            >>> import jamp
            >>> "softmax" in jamp.Policy.preset("pytorch").full
            True
        """
        if name not in PRESETS:
            hint = close_matches(str(name), PRESETS)
            raise ValueError(f"Unknown preset {name!r}: expected one of {', '.join(PRESETS)}.{hint}")
        return replace(get_policy("O1"), **PRESETS[name])

    @explains("policy.with_rules(full=['softmax'])")
    def with_rules(
        self,
        half: Entries = (),
        full: Entries = (),
        promote: Entries = (),
        float8: Entries = (),
        highest: Entries = (),
    ) -> "Policy":
        """A policy with rules added, which steer it without touching the model.

        An entry is one of

        * `"dot_general"`: a primitive of jax,
        * `"softmax"`: a called function, public in jax or a loss of optax; `"fn:my_loss"` or the function itself for
          one of your own. It rules everything traced while the function is on the call stack, and the rule of a
          `jax.custom_jvp` or `jax.custom_vjp` with it. (Functions that jax inlines, such as `jnp.matmul`, leave no
          trace of their name, and neither does what the backward pass of a `jax.grad` inside of `cast_fn` calls. A rule
          by such a name is one for its primitive, if it is one, as `"multiply"`; else it matches nothing, and is warned
          of.)
        * `"*lm_head*"`, `"decoder/*/LayerNorm_*"`: a glob over the scope path, told by its `*` or `/`; it rules
          everything traced inside,
        * `"model.py:41"`: a source line, as reports print it; `"model.py:41 from model.py:87"`: only where the function
          that it is in is called from that other line (functions in `jax.jit` are the same for all callers);
          `"add at model.py:41"`: only that primitive there,
        * `"integer_pow[y=2]"`: a condition on the value of a primitive's parameter, as a jaxpr prints it.

        Where several match, the most specific wins: a line, the longest scope, then conditions, then functions, then
        primitives.

        Args:
            half: Entries for what runs in half precision.
            full: Entries for what runs in float32.
            promote: Entries for what runs in the widest dtype of its operands.
            float8: Entries for products that run in 8 bits, those included that `matmul="float8"` leaves in half:
                logits, small ones, and those of two computed values. Sizes that are no multiple of 16 stay half.
            highest: Entries for what runs in float32 with products of `precision=HIGHEST`. Without it GPUs multiply
                float32 numbers in TF32, and TPUs in bfloat16; `jamp.report` says which.

        Returns:
            A new policy.

        Raises:
            ValueError: If an entry is unknown, or stands in two lists. `dataclasses.replace(policy, full=...)` sets a
                list anew.
            TypeError: If an entry is neither a string nor a named function.

        Example:
            >>> import jamp
            >>> jamp.get_policy("O2:bfloat16").with_rules(full=["*lm_head*", "softmax"])
            get_policy("O2:bfloat16,full=['*lm_head*', 'softmax']")
        """
        added = {"half": half, "full": full, "promote": promote, "float8": float8, "highest": highest}
        return replace(self, **{k: getattr(self, k) + entry_strings(v) for k, v in added.items()})

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """The same policy with results in another dtype.

        Example:
            >>> import jamp
            >>> jamp.get_policy("O2:float16").with_output_dtype("float16")
            get_policy('O2:float16,o=float16')
        """
        return replace(self, output_dtype=output_dtype)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating leaves of a tree to the parameters' dtype."""
        return cast_tree(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating leaves of a tree to the dtype of the arithmetic."""
        return cast_tree(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating leaves of a tree to the results' dtype."""
        return cast_tree(tree, self.output_dtype)

    def __str__(self) -> str:
        """The shortest string from which `jamp.get_policy` makes an equal policy."""
        if self.level is None:
            head = [f"p={self.param_dtype}", f"c={self.compute_dtype}", f"o={self.output_dtype}"]
            plain = {"param_dtype": self.param_dtype, "output_dtype": self.output_dtype}
        else:
            head = [self.level if self.level == "O0" else f"{self.level}:{self.compute_dtype}"]
            plain = level_fields(self.level, self.compute_dtype)
        plain |= plain_settings(self.level)
        keys = {"p": "param_dtype", "o": "output_dtype"} | {name: name for name in SETTINGS}
        settings = [f"{k}={getattr(self, f)}" for k, f in keys.items() if getattr(self, f) != plain[f]]
        rules = [f"{name}={list(getattr(self, name))}" for name in RULE_LISTS if getattr(self, name)]
        return ",".join(head + settings + rules)

    def __repr__(self) -> str:
        return f"get_policy({str(self)!r})"


def get_policy(spec: str | Policy) -> Policy:
    """The policy that a string spells.

    * A level, `"O0"`, `"OD"`, `"O1"`, `"O2"` or `"O3"` (see `jamp.Policy`), alone or with its half dtype:
      `"O2:float16"`. Alone it takes `jamp.half_dtype()`, asked at each call. O0 has no half dtype: `"O0:float16"` is
      `"O0"`, so that a sweep over levels and dtypes may contain it.
    * `"auto"`: what suits the device without further thought, which is O2 in `jamp.half_dtype()`.
    * `"mixed_float16"`, `"mixed_bfloat16"`: Keras's names for `"O2:float16"` and `"O2:bfloat16"`.
    * `"pytorch"`, `"paddle"`, `"mindspore"`, `"mxnet"`, `"megengine"`, `"apex"`: `jamp.Policy.preset`, alone or with a
      half dtype: `"pytorch:float16"`.
    * Three dtypes as in jmp: `"p=f32,c=bf16,o=f32"`, in any order. Compute follows params, and output follows
      compute, where they are left out. Or one dtype for all three: `"half"`,
      `"f16"` or `"fp16"`, which casts and leaves the arithmetic to the function.
    * Settings after either: `"O2:float16,o=float16,residuals=all,full=['softmax']"`.

    Args:
        spec: The string, or a policy, which comes back as it is.

    Returns:
        The policy.

    Raises:
        ValueError: If `spec` is anything else.

    Example:
        >>> import jamp
        >>> jamp.get_policy("O1:f16").compute_dtype
        dtype('float16')
        >>> jamp.get_policy("c=bf16")
        get_policy('p=float32,c=bfloat16,o=bfloat16')
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"Expected a policy, got {short_repr(spec)}. {_instead_of(spec) or HOW_TO_SPELL}")
    return Policy(**parse_spec(spec))


def _instead_of(spec: Any) -> str:
    """What to write in place of a dtype object, which says nothing of the level, or of another library's policy."""
    try:
        if all(hasattr(spec, name) for name in _DTYPES):  # As jmp's.
            return f"Write {str(Policy(*(getattr(spec, name) for name in _DTYPES)))!r}."
        dtype = parse_dtype(spec)
    except (TypeError, ValueError):
        return ""
    return f"For mixed precision in it write 'O2:{dtype}'." if dtype in HALF_DTYPES else ""


def _parsed_dtypes(policy: Policy) -> dict[str, np.dtype]:
    parsed, problems = {}, []
    for name in _DTYPES:
        try:
            parsed[name] = parse_dtype(getattr(policy, name))
        except (TypeError, ValueError) as error:
            problems.append(f"  {name}: {error}")
    if problems:
        raise ValueError("Policy with impossible dtypes:\n" + "\n".join(problems))
    return parsed


def _check_level(policy: Policy) -> None:
    level, compute = policy.level, policy.compute_dtype
    if level is None:
        return
    if level not in LEVELS:
        raise ValueError(f"Unknown level {level!r}: expected one of {', '.join(LEVELS)}, or None.")
    if level != "O0" and compute == FLOAT32 and policy.param_dtype == FLOAT64:
        return  # Float64 programs whose products run in float32.
    if compute not in (allowed := (FLOAT32,) if level == "O0" else HALF_DTYPES):
        names = " or ".join(dtype.name for dtype in allowed)
        raise ValueError(f"Level {level!r} computes in {names}, got compute_dtype {compute.name!r}.")
