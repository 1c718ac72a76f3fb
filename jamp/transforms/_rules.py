"""The classes of operation, as data: which JAX primitive may run in half precision, and why.

The classes follow the op lists that PyTorch, Apex, Paddle, MindSpore, MXNet and MegEngine agree on, translated to JAX
primitives. Where those frameworks disagree the reason for the choice stands with the group. A primitive that no group
names is *opaque*: it runs exactly as it was traced.
"""

from __future__ import annotations

# Matrix units multiply half operands and accumulate in float32. Every framework lists these.
HALF = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# Functions whose result moves fast in their argument, or that leave float16's range: a relative error of 2^-9 in the
# exponent of `exp(10)` is an error of 2 %. All frameworks list exp, log, pow and the inverse functions; sin and cos are
# listed by MegEngine alone, and are here because positions times frequencies (rotary embeddings) need every bit.
FULL_ELEMENTWISE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "digamma", "erf_inv", "exp", "exp2",
    "expm1", "integer_pow", "lgamma", "log", "log1p", "log2", "polygamma", "pow", "reciprocal", "rsqrt", "sin",
    "sinh", "square", "tan",
})  # fmt: skip

# Sums lose bits with length (4096 bfloat16 ones scatter-add to 256) and overflow: 70,000 float16 ones sum to inf.
FULL_REDUCTION = frozenset({
    "cumlogsumexp", "cumprod", "cumsum", "reduce_prod", "reduce_sum", "reduce_window_sum", "scatter-add",
    "scatter-mul", "scatter-sub", "select_and_scatter_add",
})  # fmt: skip

# No half kernel in LAPACK, cuSOLVER or the FFT libraries, or series that need float32 inside.
NO_HALF_KERNEL = frozenset({
    "bessel_i0e", "bessel_i1e", "cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "fft", "geqp3",
    "geqrf", "hessenberg", "householder_product", "igamma", "igamma_grad_a", "igammac", "lu", "ormqr", "qr",
    "random_gamma", "regularized_incomplete_beta", "schur", "svd", "symmetric_product", "triangular_solve",
    "tridiagonal", "tridiagonal_solve", "zeta",
})  # fmt: skip

# All operands come to one dtype. tanh, logistic, erf and sqrt are here because their results are bounded or shrink;
# only MegEngine lists sqrt as full, and no framework but Apex (gelu) the others.
PROMOTE = frozenset({
    "abs", "add", "add_any", "cbrt", "ceil", "clamp", "concatenate", "div", "dynamic_update_slice", "eq", "eq_to",
    "erf", "erfc", "floor", "ge", "gt", "is_finite", "le", "le_to", "logistic", "lt", "lt_to", "max", "min", "mul",
    "ne", "neg", "one_minus_square", "pad", "rem", "round", "select_n", "sign", "sqrt", "stack", "sub", "tanh",
})  # fmt: skip

# Data moves or is selected; the dtype that comes in goes out. Maximum and minimum are exact in half.
FOLLOW = frozenset({
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "argmax", "argmin",
    "broadcast_in_dim", "broadcast_to", "copy", "copy_p", "cummax", "cummin", "device_put", "dynamic_slice",
    "expand_dims", "gather", "layout_constraint", "name", "optimization_barrier", "pbroadcast", "pmax", "pmin",
    "ppermute", "psum", "psum_invariant", "pvary", "reduce_max", "reduce_min", "reduce_scatter",
    "reduce_window_max", "reduce_window_min", "reduced_vary_cast", "reshape", "reshard", "rev",
    "sharding_constraint", "slice", "sort", "split", "squeeze", "stop_gradient", "tie", "tile", "top_k",
    "transpose", "unreduced_psum", "unstack", "vary_unreduced_cast", "with_memory_space_constraint",
})  # fmt: skip

# Known, and kept at the dtypes that the user wrote: they make values from bits, keys or counters, look at bits, or
# carry a computation that was traced in float32.
TRACED = frozenset({
    "approx_top_k", "axis_index", "bitcast_convert_type", "complex", "conj", "imag", "iota", "nextafter",
    "random_bits", "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap",
    "real", "reduce", "reduce_precision", "reduce_window", "rng_bit_generator", "rng_uniform", "scatter",
    "scatter-max", "scatter-min", "select_and_gather_add", "select_and_scatter", "threefry2x32", "create_token",
    "after_all", "empty", "empty2", "clz", "population_count", "and", "or", "xor", "not", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "reduce_and", "reduce_or", "reduce_xor", "mulhi",
    "convert_element_type",
})  # fmt: skip

# Plain calls of a jaxpr.
CALLS = frozenset({"closed_call", "core_call", "jit", "pjit"})

# Functions of a phase: an error of 1 in the angle, or of a hundredth of a pixel around an edge, changes everything.
PHASE_READERS = frozenset({"ceil", "cos", "floor", "rem", "round", "sin", "tan"})

# A jaxpr inside, which the interpreter enters.
RECURSE = CALLS | {
    "checkpoint", "composite", "cond", "custom_jvp_call", "custom_vjp_call", "remat2", "remat_opt", "scan",
    "shard_map", "while",
}  # fmt: skip

# Operations through which a loop carry adds up: what is lost here in one iteration is lost for good.
ACCUMULATING = frozenset({"add", "sub", "mul", "div", "neg", "select_n", "add_any", "convert_element_type", "copy"})

# Where half terms meet a float32 accumulator.
SUMS = frozenset({"add", "add_any", "sub"})

# Operations that hand a large magnitude on: a mask of -1e9 is still one after a `where`, and no longer after `exp`.
SPREADS = FOLLOW | ACCUMULATING | {"abs", "clamp", "concatenate", "dynamic_update_slice", "max", "min", "pad", "stack"}
# Operations that hand a small magnitude on, or its reciprocal: what an epsilon keeps from being zero.
KEEPS_SMALL = (SPREADS - {"div", "mul"}) | {"integer_pow", "rsqrt", "sqrt", "square"}

_CLASSES = {
    "half": HALF,
    "full": FULL_ELEMENTWISE | FULL_REDUCTION,
    "no_half": NO_HALF_KERNEL,
    "promote": PROMOTE,
    "follow": FOLLOW,
    "traced": TRACED,
    "recurse": RECURSE,
}
CLASS_OF = {name: group for group, names in _CLASSES.items() for name in names}


def op_class(primitive_name: str) -> str:
    """The class of a primitive, `"opaque"` if the table does not know it."""
    return CLASS_OF.get(primitive_name, "opaque")
