"""What jamp knows of JAX's primitives: one row for each family, with its rule, its traits and the reason.

The rules follow the op lists that PyTorch, Apex, Paddle, MindSpore, MXNet and MegEngine agree on, translated to JAX
primitives. Where those frameworks disagree the reason for the choice stands with the row. A primitive without a row is
*opaque*, as are those whose row says so: it runs exactly as it was traced.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.core import ShapedArray

from jamp._compat import Eqn, inner_jaxprs, open_jaxpr
from jamp._dtypes import close_matches


class Rule(enum.Enum):
    """How a primitive moves precision."""

    HALF = "half"  # Operands cast to half, accumulated in float32.
    FULL = "full"  # Operands raised to float32, and the result stays float32.
    NO_HALF = "no_half"  # Float32 at every level, because no library has it in half.
    PROMOTE = "promote"  # All operands to one dtype.
    FOLLOW = "follow"  # The dtype that comes in goes out.
    TRACED = "traced"  # Known, and kept at the dtypes that the user wrote.
    RECURSE = "recurse"  # A jaxpr inside, which the interpreter enters.
    OPAQUE = "opaque"  # Runs as it was traced, and stands in the report.


_BITS = (1 << place for place in itertools.count())


class Trait:
    """What analyses and rewrites ask of a primitive: a bit each, so that a number may be several of them.

    These are no `enum.Flag`, whose members take a microsecond to unite: plans ask tens of thousands of times.
    """

    # Arithmetic.
    MATRIX = next(_BITS)  # A product of matrices.
    CONVOLVES = next(_BITS)
    GROUPS = next(_BITS)  # Products of rows and matrices, each row with that of its group.
    ADDS = next(_BITS)  # Adds its operands, element by element.
    SUBTRACTS = next(_BITS)  # Adds its first operand to the others, negated: data is centred so.
    MULTIPLIES = next(_BITS)
    DIVIDES = next(_BITS)
    NEGATES = next(_BITS)
    MAGNITUDE = next(_BITS)
    EXPONENTIAL = next(_BITS)
    VAST = next(_BITS)  # Its result may leave float16's range either way, where what it is given is about ten.
    LOGARITHM = next(_BITS)
    POWER = next(_BITS)  # Of its first operand; roots are powers too.
    EXTREMUM = next(_BITS)  # The larger or smaller of two.
    MAXIMUM = next(_BITS)
    SINGULAR = next(_BITS)  # Its derivative divides by what it is given: an epsilon in it must not vanish.
    BOUNDED = next(_BITS)  # Its derivative is infinite at an end of its domain, where rounding takes what is near.
    OF_RESULT = next(_BITS)  # Its derivative is made of its result.
    PROBABILITY = next(_BITS)  # Its result is a share of one.
    PHASE = next(_BITS)  # Takes its operand modulo something: an error of 1 in the angle changes everything.
    SMOOTH = next(_BITS)  # Its derivative at a rounded number is a rounded derivative.
    SOLVES = next(_BITS)  # Gives what solves an equation: a factorization, an inverse, an eigenvector.
    # Reductions.
    REDUCES = next(_BITS)  # Sums or multiplies many elements.
    SUMS_AXES = next(_BITS)
    LINEAR = next(_BITS)  # A sum, whose derivative reads nothing.
    SCATTERS = next(_BITS)  # Its parameters hold a function of two numbers, in the dtype that it was traced in.
    MULTIPLIES_AXES = next(_BITS)  # Multiplies the elements along axes.
    TAKES_EXTREMUM = next(_BITS)  # The largest or smallest of many.
    # Comparisons and choices.
    COMPARES = next(_BITS)
    EQUALS = next(_BITS)
    GREATER = next(_BITS)
    CHOOSES = next(_BITS)  # Which is the best: in half, one of many is a tie, and the first of them wins.
    SORTS = next(_BITS)
    SELECTS = next(_BITS)  # Takes each element from one of several operands.
    INVERTS = next(_BITS)  # Makes true of false.
    EITHER = next(_BITS)  # True where any operand is.
    BOTH = next(_BITS)  # True where all operands are.
    JUDGES = next(_BITS)  # True where all elements of many are, or any.
    # Movement.
    VIEW = next(_BITS)  # The same elements, seen otherwise.
    TURNS = next(_BITS)  # A view in another order, though the shape may be the same.
    MOVES = next(_BITS)  # Elements of one operand, none of them computed.
    GROWS = next(_BITS)  # Gives an element to many readers: its transpose is a sum.
    SLICES = next(_BITS)
    PADS = next(_BITS)
    ASSEMBLES = next(_BITS)  # Puts operands together to something larger.
    REPLACES = next(_BITS)  # Its first operand with some elements changed.
    PLACES = next(_BITS)  # Looks up, or puts in, elements at places that operands give: see `axes.places`.
    VARIES = next(_BITS)  # Says that devices differ in it, from here on: its transpose is a sum over them.
    TRAFFIC = next(_BITS)  # Goes to other devices, or comes from all of them.
    EXPENSIVE = next(_BITS)  # Reads a whole array for each result, or is traffic: never done twice.
    CONVERTS = next(_BITS)  # Changes the dtype.
    NAMES = next(_BITS)  # Names a value for a checkpoint policy.
    PARTS = next(_BITS)  # A view that derivatives or the compiler do not see through.
    # How values go on: see `transforms.program.flow`.
    CONTINUES = next(_BITS)  # A loop carry adds up through it: what is lost in one iteration is lost for good.
    LIMITS = next(_BITS)  # Its operands, or a limit, or their magnitude: what adds up goes on behind it.
    SPREADS = next(_BITS)  # Hands a large magnitude on: a mask of -1e9 is still one after `where`, not after `exp`.
    INTEGRAL = next(_BITS)  # Makes integers of integers.
    COUNTS = next(_BITS)  # Makes integers, whatever it is given.
    DRAWS = next(_BITS)  # Makes random numbers.
    REINTERPRETS = next(_BITS)  # Makes floating numbers of bits, as random ones are made.
    COMPLEX = next(_BITS)  # Makes complex numbers, or takes them.
    # Jaxprs inside.
    CALLS = next(_BITS)  # A plain call of a jaxpr.
    STAYS = next(_BITS)  # A call that says more than its jaxpr (shardings, a name): bound again around another jaxpr.
    REMAT = next(_BITS)  # `jax.checkpoint`.
    LOOPS = next(_BITS)
    BRANCHES = next(_BITS)
    CUSTOM_JVP = next(_BITS)
    CUSTOM_VJP = next(_BITS)
    CUSTOM_BATCHING = next(_BITS)
    CUSTOM_TRANSPOSE = next(_BITS)


class Row(NamedTuple):
    """What is known of a primitive."""

    rule: Rule
    traits: int

    def has(self, trait: int) -> bool:
        """Whether the primitive has a trait, or one of several."""
        return self.traits & trait != 0


# What a policy can say of a primitive instead: the same, or what comes nearest.
_OF_POLICIES = {
    **{rule: rule.value for rule in (Rule.HALF, Rule.FULL, Rule.PROMOTE)},
    **dict.fromkeys((Rule.NO_HALF, Rule.TRACED, Rule.OPAQUE), "full"),
    Rule.FOLLOW: "promote",
}
NO_TRAITS = 0
PRODUCTS = Trait.MATRIX | Trait.CONVOLVES | Trait.GROUPS
FUNCTIONS = Trait.CALLS | Trait.CUSTOM_JVP
MOVED = Trait.MOVES | Trait.CONVERTS  # Elements of an operand, elsewhere or in another dtype: what is a view moves too.
SHOWN = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES  # All of them, but for the sign.
SCALES = Trait.MULTIPLIES | Trait.DIVIDES
_TABLE: dict[str, Row] = {}
# The columns by themselves: analyses ask fifty times of each equation.
_RULES: dict[str, Rule] = {}
_TRAITS: dict[str, int] = {}


def _row(rule: Rule, names: str, traits: int = NO_TRAITS) -> None:
    for name in names.split():
        _add(name, Row(rule, traits))


def _add(name: str, row: Row) -> None:
    _TABLE[name], _RULES[name], _TRAITS[name] = row, row.rule, row.traits


T = Trait

# Matrix units multiply half operands and accumulate in float32. Every framework lists these.
_row(Rule.HALF, "dot_general", T.MATRIX)
_row(Rule.HALF, "conv_general_dilated", T.CONVOLVES)
_row(Rule.HALF, "ragged_dot_general", T.GROUPS)

# Functions whose result moves fast in their argument, or that leave float16's range: a relative error of 2^-9 in the
# exponent of `exp(10)` is an error of 2 %. All frameworks list exp, log, pow and the inverse functions; sin and cos are
# listed by MegEngine alone, and are here because positions times frequencies (rotary embeddings) need every bit.
_row(Rule.FULL, "exp", T.EXPONENTIAL | T.VAST)
_row(Rule.FULL, "exp2", T.VAST)
_row(Rule.FULL, "asinh atan atan2 cosh digamma expm1 lgamma polygamma sinh")
# What these are given may be a clipped 1 - 1e-6, the result of a tanh, or a probability of 1e-9: in half that is 1 or
# 0, and they are infinite.
_row(Rule.FULL, "acos acosh asin atanh erf_inv", T.BOUNDED)
_row(Rule.FULL, "log log1p log2", T.LOGARITHM | T.BOUNDED)
_row(Rule.FULL, "pow", T.POWER | T.VAST)
_row(Rule.FULL, "integer_pow square", T.POWER | T.SMOOTH | T.INTEGRAL)
_row(Rule.FULL, "cos sin tan", T.PHASE)
# What these are given may be an epsilon and nothing else. Their derivative divides by it: in float16, where 1e-8 is
# zero, the gradient of sqrt(x * x + 1e-8) at zero is not a number. Of the frameworks MegEngine lists sqrt.
_row(Rule.FULL, "cbrt sqrt", T.POWER | T.SINGULAR | T.SMOOTH)
_row(Rule.FULL, "reciprocal", T.SINGULAR | T.DIVIDES)
_row(Rule.FULL, "rsqrt", T.POWER | T.SINGULAR | T.DIVIDES)

# Sums lose bits with length (4096 bfloat16 ones scatter-add to 256) and overflow: 70,000 float16 ones sum to inf.
_row(Rule.FULL, "reduce_sum", T.REDUCES | T.SUMS_AXES | T.LINEAR | T.INTEGRAL)
_row(Rule.FULL, "cumsum reduce_window_sum", T.REDUCES | T.LINEAR | T.INTEGRAL)
_row(Rule.FULL, "cumlogsumexp", T.REDUCES)
_row(Rule.FULL, "cumprod", T.REDUCES | T.MULTIPLIES_AXES | T.VAST | T.INTEGRAL)
_row(Rule.FULL, "reduce_prod", T.REDUCES | T.MULTIPLIES_AXES | T.INTEGRAL)
_row(
    Rule.FULL,
    "scatter-add scatter-mul scatter-sub",
    T.REDUCES | T.SCATTERS | T.REPLACES | T.PLACES | T.CONTINUES | T.INTEGRAL,
)
_row(Rule.FULL, "select_and_scatter_add", T.REDUCES)

# No half kernel in LAPACK, cuSOLVER or the FFT libraries, or series that need float32 inside.
_row(
    Rule.NO_HALF,
    """
    cholesky cholesky_update custom_linear_solve eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur
    svd triangular_solve tridiagonal tridiagonal_solve
    """,
    T.SOLVES,
)
_row(
    Rule.NO_HALF,
    """
    bessel_i0e bessel_i1e igamma igamma_grad_a igammac polynomial random_gamma regularized_incomplete_beta
    symmetric_product zeta
    """,
)
_row(Rule.NO_HALF, "fft", T.COMPLEX)
_row(Rule.NO_HALF, "eig", T.SOLVES | T.COMPLEX)

# All operands come to one dtype. tanh, logistic and erf are here because their results are bounded; no framework but
# Apex (gelu) lists them.
_row(Rule.PROMOTE, "add add_any", T.ADDS | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "sub", T.ADDS | T.SUBTRACTS | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "mul", T.MULTIPLIES | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "div", T.DIVIDES | T.CONTINUES | T.SPREADS | T.SMOOTH)
_row(Rule.PROMOTE, "neg", T.NEGATES | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "max", T.EXTREMUM | T.MAXIMUM | T.LIMITS | T.SPREADS | T.INTEGRAL)
_row(Rule.PROMOTE, "min", T.EXTREMUM | T.LIMITS | T.SPREADS | T.INTEGRAL)
_row(Rule.PROMOTE, "select_n", T.SELECTS | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "abs", T.MAGNITUDE | T.LIMITS | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "clamp", T.LIMITS | T.SPREADS | T.INTEGRAL)
_row(Rule.PROMOTE, "erf erfc one_minus_square", T.SMOOTH)
_row(Rule.PROMOTE, "logistic", T.OF_RESULT | T.SMOOTH | T.PROBABILITY)
_row(Rule.PROMOTE, "tanh", T.OF_RESULT | T.SMOOTH)
_row(Rule.PROMOTE, "sign", T.COUNTS | T.SMOOTH)
_row(Rule.PROMOTE, "ceil floor round", T.PHASE | T.COUNTS)
_row(Rule.PROMOTE, "rem", T.PHASE | T.INTEGRAL)
_row(Rule.PROMOTE, "concatenate stack", T.ASSEMBLES | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.PROMOTE, "pad", T.ASSEMBLES | T.PADS | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_PUT = T.ASSEMBLES | T.REPLACES | T.PLACES | T.CONTINUES | T.SPREADS | T.INTEGRAL
_row(Rule.PROMOTE, "dynamic_update_slice", _PUT | T.SMOOTH)
_row(Rule.PROMOTE, "scatter", _PUT)  # `x.at[i].set(v)`
_row(Rule.PROMOTE, "eq", T.COMPARES | T.EQUALS | T.SMOOTH)
_row(Rule.PROMOTE, "gt", T.COMPARES | T.GREATER | T.SMOOTH)
_row(Rule.PROMOTE, "eq_to ge is_finite le le_to lt lt_to ne", T.COMPARES | T.SMOOTH)

# Data moves or is selected; the dtype that comes in goes out. Maximum and minimum are exact in half.
_PASSED = T.MOVES | T.CONTINUES | T.SPREADS | T.INTEGRAL
_row(Rule.FOLLOW, "broadcast_in_dim broadcast_to", _PASSED | T.VIEW | T.GROWS)
_row(
    Rule.FOLLOW,
    """
    copy copy_p expand_dims jamp_held_apart jamp_left_out jamp_written layout_constraint reshape reshard
    sharding_constraint squeeze tie with_memory_space_constraint
    """,
    _PASSED | T.VIEW,
)
_row(
    Rule.FOLLOW,
    "pbroadcast pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p",
    _PASSED | T.VIEW | T.VARIES,
)
_row(Rule.FOLLOW, "optimization_barrier stop_gradient", _PASSED | T.VIEW | T.PARTS)
_row(Rule.FOLLOW, "rev transpose", _PASSED | T.VIEW | T.TURNS)
_row(Rule.FOLLOW, "jamp_keep name", _PASSED | T.VIEW | T.NAMES)
_row(Rule.FOLLOW, "device_put", _PASSED | T.VIEW | T.PARTS | T.TRAFFIC | T.EXPENSIVE)
_row(Rule.FOLLOW, "slice", _PASSED | T.SLICES)
_row(Rule.FOLLOW, "split unstack", _PASSED)
_row(Rule.FOLLOW, "dynamic_slice", _PASSED | T.PLACES)
_row(Rule.FOLLOW, "gather", _PASSED | T.GROWS | T.PLACES)
_row(Rule.FOLLOW, "tile", _PASSED | T.GROWS)
_row(Rule.FOLLOW, "argmax argmin", T.CHOOSES | T.EXPENSIVE)
_row(Rule.FOLLOW, "top_k", T.CHOOSES | T.EXPENSIVE | T.CONTINUES | T.SPREADS | T.INTEGRAL)
_row(Rule.FOLLOW, "sort", T.CHOOSES | T.SORTS | T.EXPENSIVE | T.CONTINUES | T.SPREADS | T.INTEGRAL)
_row(Rule.FOLLOW, "reduce_max reduce_min", T.TAKES_EXTREMUM | T.EXPENSIVE | T.CONTINUES | T.SPREADS | T.INTEGRAL)
_row(
    Rule.FOLLOW,
    "cummax cummin reduce_window_max reduce_window_min",
    T.EXPENSIVE | T.CONTINUES | T.SPREADS | T.INTEGRAL,
)
_row(
    Rule.FOLLOW,
    "all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute",
    _PASSED | T.TRAFFIC | T.EXPENSIVE,
)
_row(
    Rule.FOLLOW,
    "psum psum_invariant reduce_scatter unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter",
    T.TRAFFIC | T.EXPENSIVE | T.LINEAR | T.CONTINUES | T.SPREADS | T.INTEGRAL,
)

# Known, and kept at the dtypes that the user wrote: they make values from bits, keys or counters, look at bits, or
# carry a computation that was traced in float32.
_row(Rule.TRACED, "convert_element_type", T.CONVERTS | T.CONTINUES | T.SPREADS | T.INTEGRAL | T.SMOOTH)
_row(Rule.TRACED, "reduce_precision", T.CONTINUES | T.SPREADS)
_row(Rule.TRACED, "complex", T.COMPLEX | T.CONTINUES)
_row(Rule.TRACED, "conj imag real", T.CONTINUES)
_row(Rule.TRACED, "iota axis_index iota_2x32_shape", T.COUNTS)
_row(Rule.TRACED, "bitcast_convert_type", T.REINTERPRETS)
_row(Rule.TRACED, "not", T.INVERTS)
_row(Rule.TRACED, "or", T.EITHER)
_row(Rule.TRACED, "and", T.BOTH)
_row(Rule.TRACED, "reduce_and reduce_or", T.JUDGES)
_row(Rule.TRACED, "scatter-max scatter-min", T.PLACES)
_row(Rule.TRACED, "random_bits rng_bit_generator rng_uniform", T.DRAWS)
_row(
    Rule.TRACED,
    """
    after_all approx_top_k clz create_token empty empty2
    lu_pivots_to_permutation mulhi nextafter philox2x32 philox4x32 population_count random_clone random_fold_in
    random_seed random_split random_unwrap random_wrap reduce reduce_window
    reduce_xor select_and_gather_add select_and_scatter shift_left
    shift_right_arithmetic shift_right_logical threefry2x32 threefry4x32 xor zeros_like
    """,
)

# A jaxpr inside, which the interpreter enters.
_row(Rule.RECURSE, "jit pjit", T.CALLS | T.STAYS)
_row(Rule.RECURSE, "closed_call core_call", T.CALLS)
_row(Rule.RECURSE, "composite", T.STAYS)
_row(Rule.RECURSE, "remat_opt")
_row(Rule.RECURSE, "checkpoint remat2", T.REMAT)
_row(Rule.RECURSE, "scan while", T.LOOPS)
_row(Rule.RECURSE, "cond", T.BRANCHES)
_row(Rule.RECURSE, "custom_jvp_call", T.CUSTOM_JVP)
_row(Rule.RECURSE, "custom_vjp_call", T.CUSTOM_VJP)
_row(Rule.RECURSE, "custom_vmap_call", T.CUSTOM_BATCHING)
_row(Rule.RECURSE, "shard_map")

# Kernels, callbacks, foreign functions and fused products carry a computation that was traced at certain dtypes.
_row(
    Rule.OPAQUE,
    """
    call call_exported call_hi_primitive call_hi_primitive_linearized core_map cudnn_fusion custom_jvp_call_jaxpr
    custom_lin custom_partitioning debug_callback debug_print dot_product_attention_bwd
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
    dot_product_attention_fwd_wrapper eval_jaxpr ffi_call inspect_sharding io_callback pallas_call
    program_order pure_callback run_state scaled_dot scaled_matmul scaled_matmul_wrapper stage
    """,
)
_row(Rule.OPAQUE, "linear_call", T.CUSTOM_TRANSPOSE)
# What an inner `cast_fn` made of an attention, of a product in 8 bits, of the derivative of a product, of a weight, and
# of half data.
_row(
    Rule.OPAQUE,
    "jamp_attention jamp_attention_tangent jamp_raised_copy jamp_ruled jamp_scaled_dot jamp_shared_copy "
    "jamp_weight_tangent",
)
# References are memory of a fixed dtype, and what is written there has to have it.
_row(
    Rule.OPAQUE,
    """
    accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get new_box new_log new_ref log_extend
    log_read pin swap unpin
    """,
)
# Traffic in two halves: what one starts has the dtype that the other ends.
_row(
    Rule.OPAQUE,
    """
    all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start pbroadcast_done
    pbroadcast_dynamic pbroadcast_start preduced ragged_all_to_all ppermute_done ppermute_start precv psend psum_done
    psum_invariant_start psum_start reduce_scatter_done reduce_scatter_start unreduced_psum_start
    unreduced_reduce_scatter_start
    """,
)
# Sizes, checks, devices and extended dtypes: nothing in them is floating.
_row(
    Rule.OPAQUE,
    """
    check create_linear dce_sink dim_as_value dimension_size from_edtype platform_index relayout shape_assertion
    to_edtype unreachable
    """,
)

# What is known, by name, from jax 0.10 to 0.12. tests/test_primitives.py fails when JAX registers one without a row.
TABLE: Mapping[str, Row] = MappingProxyType(_TABLE)
_rule_of, _traits_of = _RULES.get, _TRAITS.get
_BUILT_IN = frozenset(_TABLE)
_OF_ELEMENTS = _TABLE["mul"].traits


def rule_of(eqn: Eqn) -> Rule:
    """How the primitive of an equation moves precision."""
    return _rule_of(eqn.primitive.name, Rule.OPAQUE)


def traits_of(eqn: Eqn) -> int:
    """The traits of the primitive of an equation."""
    return _traits_of(eqn.primitive.name, NO_TRAITS)


def has(eqn: Eqn, trait: int) -> bool:
    """Whether the primitive of an equation has a trait, or one of several."""
    return _traits_of(eqn.primitive.name, NO_TRAITS) & trait != 0


def having(eqns: Iterable[Eqn], trait: int) -> list[Eqn]:
    """The equations whose primitive has a trait, or one of several."""
    return [eqn for eqn in eqns if _traits_of(eqn.primitive.name, NO_TRAITS) & trait]


def traits_of_all(eqns: Iterable[Eqn]) -> int:
    """The traits that the primitives of some equations have: where one is missing, nobody has to look for it."""
    return functools.reduce(operator.or_, [_traits_of(eqn.primitive.name, NO_TRAITS) for eqn in eqns], NO_TRAITS)


def holds(eqns: Sequence[Eqn], traits: int, through: int | None = None) -> bool:
    """Whether some equations, or those of the jaxprs inside of them, have one of several traits.

    Args:
        eqns: The equations.
        traits: The traits.
        through: Traits of the equations that are looked into; None for all.
    """
    if having(eqns, traits):
        return True
    called = eqns if through is None else having(eqns, through)
    return any(holds(open_jaxpr(inner).eqns, traits, through) for eqn in called for inner in inner_jaxprs(eqn))


def is_outer(eqn: Eqn) -> bool:
    """A product that contracts nothing, such as `einsum("bld,dn->bldn")`, is elementwise."""
    return has(eqn, Trait.MATRIX) and contracts_nothing(eqn.params)


def contracts_nothing(params: Mapping[str, Any]) -> bool:
    """Whether a matrix product with some parameters is elementwise."""
    return not params["dimension_numbers"][0][0]


def traits_as_computed(eqn: Eqn) -> int:
    """The traits of an equation. A product that contracts nothing has those of an elementwise one."""
    return _OF_ELEMENTS if is_outer(eqn) else traits_of(eqn)


def asks_one(eqn: Eqn) -> bool:
    """Whether an equation asks if numbers are finite, which is no close call: solvers ask it of all they compute."""
    return has(eqn, Trait.COMPARES) and len(eqn.invars) == 1


def acts(eqn: Eqn) -> bool:
    """Whether an equation does more than make its results: it has an effect, or takes or makes what is no array.

    Such are references, which an equation may free without an effect that JAX would tell of, and tokens.
    """
    if eqn.effects or not eqn.outvars:
        return True
    for atom in (*eqn.invars, *eqn.outvars):  # noqa: SIM110 (a generator takes twice as long)
        if not isinstance(atom.aval, ShapedArray):
            return True
    return False


# Those that ask for no parameter of an equation, and so can be said of any primitive.
_NAMED = {
    "expensive": Trait.EXPENSIVE,
    "linear": Trait.LINEAR,
    "phase": Trait.PHASE,
    "reduces": Trait.REDUCES,
    "solves": Trait.SOLVES,
}


def _named_traits(primitive: str, names: Iterable[str]) -> int:
    """The traits with these names, as one number."""
    if isinstance(names, str):
        names = names.split()
    traits = NO_TRAITS
    for name in names:
        if name not in _NAMED:
            hint = close_matches(str(name), _NAMED)
            raise ValueError(f"Unknown trait {name!r} for {primitive!r}: expected some of {', '.join(_NAMED)}.{hint}")
        traits |= _NAMED[name]
    return traits


def register_primitive(primitive: Any, rule: Rule | str, traits: Iterable[str] | int = ()) -> None:
    """Says how a primitive of one's own moves precision. Without that it is opaque, and runs as it was traced.

    As with the lowering and the derivative of a primitive, which JAX keeps in tables of its own, a library says it
    once, where it defines the primitive. What `jax.jit` compiled before stays as it was, until `jax.clear_caches()`.

    Args:
        primitive: The primitive (`jax.extend.core.Primitive`), or its name.
        rule: `"half"` (operands in half), `"full"` (operands and results in float32), `"no_half"` (float32 at every
            level), `"promote"` (all operands in one dtype), `"follow"` (each result in the dtype of the operand that it
            comes from), `"traced"` or `"opaque"` (as it was traced; an opaque one stands in `jamp.report`).
        traits: What else holds of it; most primitives need none. `"reduces"`: it adds up many elements, so that what
            it makes is kept and not computed again. `"linear"`: its derivative reads no operand. `"expensive"`: it is
            never computed twice. `"phase"`: it takes its operand modulo something, as a sine does. `"solves"`: it
            gives the solution of an equation.

    Raises:
        ValueError: If the rule or a trait is unknown, or the primitive has another row already.
        TypeError: If `primitive` is neither a primitive nor a name.

    Example:
        >>> import jamp
        >>> jamp.register_primitive("my_fused_product", "half")
        >>> jamp.register_primitive("my_prefix_sum", "full", traits=["reduces", "linear"])
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"Expected a jax.extend.core.Primitive or its name, got {primitive!r}.")
    known = {member.value: member for member in Rule if member is not Rule.RECURSE}
    found = rule if isinstance(rule, Rule) else known.get(rule)
    if found is None or found is Rule.RECURSE:
        hint = close_matches(str(rule), known)
        raise ValueError(f"Unknown rule {rule!r} for {name!r}: expected one of {', '.join(known)}.{hint}")
    row = Row(found, traits if isinstance(traits, int) else _named_traits(name, traits))
    before = _TABLE.get(name, row)
    if before != row:
        whose = "jamp's own table" if name in _BUILT_IN else "an earlier call"
        raise ValueError(
            f"The primitive {name!r} is {before.rule.value!r} by {whose}, and cannot be {found.value!r} too. To treat "
            f"it otherwise in one model, write policy.with_rules({_OF_POLICIES[found]}=['prim:{name}'])."
        )
    _add(name, row)
